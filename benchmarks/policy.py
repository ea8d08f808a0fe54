"""Latency of a policy on one observation on a CPU, compared with `predict` of Stable-Baselines3.

    python benchmarks/policy.py [--repeats 7] [--no-peer]

Both are untrained PPO policies for CartPole with two hidden layers of 64 tanh units. Each computes the best action for
one NumPy observation, 2,000 times in a row, including the loop around the calls. SB3 runs in a separate Python
environment, on one thread, which is fastest for such a small network. Both are warm, and alternate in one run. A batch
of 64 is also measured.
"""

import argparse
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

PEER = ["stable-baselines3==2.9.0", "torch==2.14.1", "gymnasium==1.4.0", "numpy==2.5.5"]
CALLS = 2000
BATCHES = (None, 64)  # None: one observation without a batch axis


def observations(batch):
    import numpy as np

    shape = (4,) if batch is None else (batch, 4)
    return np.random.default_rng(0).uniform(-0.05, 0.05, (CALLS, *shape)).astype(np.float32)


class SB3:
    """Runs in the peer's environment."""

    def __init__(self):
        import stable_baselines3 as sb3
        import torch

        torch.set_num_threads(1)
        kwargs = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh}
        self.model = sb3.PPO("MlpPolicy", "CartPole-v1", device="cpu", policy_kwargs=kwargs, seed=0)

    def __call__(self, *, batch: int | None) -> float:
        given = observations(batch)
        start = time.perf_counter()
        for observation in given:
            self.model.predict(observation, deterministic=True)
        return time.perf_counter() - start


class Jaxrl:
    """Runs in this environment."""

    def __init__(self):
        import jax

        import jaxrl
        from jaxrl.core.schedules import resolve_schedules
        from jaxrl.core.types import env_spec

        env = jaxrl.make("gymnax:CartPole-v1")
        algo = resolve_schedules(record.resolved(jaxrl.PPO(), env, 1), 1.0)
        state = algo.init(jax.random.key(0), env_spec(env))
        self.policy = jaxrl.Policy(algo, algo.actor(state), env_spec(env))

    def __call__(self, *, batch: int | None) -> float:
        given, carry = observations(batch), None
        start = time.perf_counter()
        for observation in given:
            _, carry = self.policy(observation, carry)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-peer", action="store_true")
    arguments = parser.parse_args()
    here = pathlib.Path(__file__)
    workers = {"jaxrl": record.Worker(sys.executable, here, {"PYTHONPATH": str(record.ROOT)})}
    if not arguments.no_peer:
        workers["SB3"] = record.Worker(record.peer_python("sb3", PEER), here)
    rows = []
    try:
        for batch in BATCHES:
            asks = {
                name: lambda worker=worker, name=name, batch=batch: worker.ask(name=name, batch=batch)
                for name, worker in workers.items()
            }
            seconds = record.alternate(asks, arguments.repeats)
            row = {"observations a call": batch or 1}
            row |= {f"{name} (µs a call)": value / CALLS * 1e6 for name, value in seconds.items()}
            if "SB3" in seconds:
                row["SB3 / jaxrl"] = seconds["SB3"] / seconds["jaxrl"]
            rows.append(row)
            print(record.table([row]), flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    print(record.save("policy", rows, repeats=arguments.repeats))


def answer_requests() -> None:
    made = {}

    def answer(*, name: str, batch: int | None) -> float:
        if name not in made:
            made[name] = {"SB3": SB3, "jaxrl": Jaxrl}[name]()
        return made[name](batch=batch)

    record.serve(answer)


if __name__ == "__main__":
    answer_requests() if "--serve" in sys.argv else main()
