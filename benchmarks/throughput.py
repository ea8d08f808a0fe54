"""PPO on CartPole, steps a second: jaxrl against rejax 0.1.3, one seed and eight, in turn in one run.

    python benchmarks/throughput.py [--repeats 7] [--num-envs 4 64 2048] [--seeds 8] [--no-peer]

    python benchmarks/throughput.py --distributed [--coordinator HOST:PORT --num-processes N --process-id I]

With `--distributed`, the same command on every machine, it is jaxrl alone, one run over all their devices; `--num-envs`
counts all of them.

Both train with the same settings (128 steps, 4 epochs of 4 minibatches, two networks of 2 x 64 tanh, Adam), rejax in
an environment of its own (gymnax 0.0.9). jaxrl runs as `jaxrl.train` does: truncation, metrics and finite checks on.
What is timed is compiled and warm, to `block_until_ready`. On an accelerator the peer is left out if it has none.
"""

import argparse
import functools
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

PEER = ["rejax==0.1.3", "gymnax==0.0.9", "jax==0.11.2", "jaxlib==0.11.2"]


# --- the two workers -------------------------------------------------------------------------------------------


class Rejax:
    """Runs in the peer's environment."""

    def __init__(self):
        self.programs = {}

    def __call__(self, *, num_envs: int, iterations: int, seeds: int, seed: int) -> float:
        import jax
        import rejax

        key = (num_envs, iterations, seeds)
        if key not in self.programs:
            algo = rejax.PPO.create(
                env="CartPole-v1",
                num_envs=num_envs,
                num_steps=128,
                num_epochs=4,
                num_minibatches=4,
                learning_rate=2.5e-4,
                max_grad_norm=0.5,
                total_timesteps=iterations * 128 * num_envs,
                eval_freq=iterations * 128 * num_envs,
                skip_initial_evaluation=True,
                agent_kwargs={"hidden_layer_sizes": (64, 64), "activation": "tanh"},
            )
            algo = algo.replace(eval_callback=lambda algo, state, key: ())
            train = algo.train if seeds == 1 else lambda keys: jax.vmap(algo.train)(keys)
            self.programs[key] = jax.jit(train)
        keys = jax.random.PRNGKey(seed) if seeds == 1 else jax.random.split(jax.random.PRNGKey(seed), seeds)
        start = time.perf_counter()
        jax.block_until_ready(self.programs[key](keys))
        return time.perf_counter() - start


class Jaxrl:
    """Runs here; one seed on one device, several as `jaxrl.sweep` spreads them."""

    def __init__(self):
        import os

        from jaxrl.parallel.mesh import use_cpu_devices

        use_cpu_devices(len(os.sched_getaffinity(0)))

    def __call__(self, *, num_envs: int, iterations: int, seeds: int, seed: int, devices: int = 1) -> float:
        import jax

        import jaxrl
        from jaxrl.core import keys
        from jaxrl.sweeps.vectorized import VectorizedRuns

        env = jaxrl.make("gymnax:CartPole-v1")
        algo = record.resolved(jaxrl.PPO(), env, num_envs)
        program = jaxrl.Anakin(num_envs, devices=devices).bind(algo, env)
        steps_per_env = iterations * 128
        if seeds == 1:
            algo, env = program.layout.place(algo), program.layout.place(env)
            state = jax.block_until_ready(program.start(algo, env, seed))
            start = time.perf_counter()
            jax.block_until_ready(program.chunk(algo, env, state, iterations, steps_per_env))
            return time.perf_counter() - start
        mapping = "in_turn" if jax.default_backend() == "cpu" else "vmap"
        many = VectorizedRuns(program, jax.local_device_count(), mapping, seeds)
        algos = many.stack([algo] * seeds)
        states = many.start(algos, env, many.stack([keys.root_key(seed + i) for i in range(seeds)]))
        jax.block_until_ready(states)
        start = time.perf_counter()
        jax.block_until_ready(many.chunk(algos, env, states, iterations, steps_per_env))
        return time.perf_counter() - start


# --- the comparison --------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[4, 64, 2048])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one timed run, roughly")
    parser.add_argument("--no-peer", action="store_true")
    record.add_process_flags(parser)
    arguments = parser.parse_args()
    if record.join_processes(arguments):
        return in_processes(arguments)

    here = pathlib.Path(__file__)
    ours = record.Worker(sys.executable, here)
    peer = None if arguments.no_peer else record.Worker(record.peer_python("rejax", PEER), here)
    rows = []
    try:
        for num_envs, seeds in [*((n, 1) for n in arguments.num_envs), (64, arguments.seeds)]:
            # About 250k steps a second on two cores; the same number of iterations for both.
            iterations = max(4, int(arguments.seconds * 250_000 / (128 * num_envs * seeds)))
            request = {"num_envs": num_envs, "iterations": iterations, "seeds": seeds, "seed": 0}
            asks = {"jaxrl": lambda request=request: ours.ask(peer=False, **request)}
            if seeds > 1:
                single = request | {"seeds": 1, "iterations": iterations * seeds}
                asks["jaxrl, one seed"] = lambda single=single: ours.ask(peer=False, **single)
            if peer is not None:
                asks["rejax"] = lambda request=request: peer.ask(peer=True, **request)
            seconds = record.alternate(asks, arguments.repeats)
            steps = iterations * 128 * num_envs * seeds
            row = {"num_envs": num_envs, "seeds": seeds}
            row |= {f"{name} (steps/s)": steps / value for name, value in seconds.items()}
            if peer is not None:
                row["jaxrl / rejax"] = seconds["rejax"] / seconds["jaxrl"]
            if seeds > 1:
                row["seeds / one seed"] = seconds["jaxrl, one seed"] / seconds["jaxrl"]
            rows.append(row)
            print(record.table([row]), flush=True)
    finally:
        ours.close()
        if peer is not None:
            peer.close()
    print(record.save("throughput", rows, repeats=arguments.repeats))


def in_processes(arguments: argparse.Namespace) -> None:
    """One run over the devices of all processes."""
    import jax

    ours, devices = Jaxrl(), jax.device_count()
    tasks = []
    for num_envs in arguments.num_envs:
        if num_envs % devices:
            print(f"--num-envs {num_envs} does not divide over {devices} devices, and is left out", flush=True)
            continue
        iterations = max(4, int(arguments.seconds * 250_000 / (128 * num_envs)))
        settings = {"num_envs": num_envs, "iterations": iterations, "seeds": 1, "seed": 0, "devices": devices}
        run = functools.partial(ours, **settings)
        tasks.append(({"num_envs": num_envs}, "steps", iterations * 128 * num_envs, run))
    record.in_processes("throughput", tasks, arguments.repeats)


def answer_requests() -> None:
    workers = {}

    def answer(*, peer: bool, **request):
        if peer not in workers:
            workers[peer] = Rejax() if peer else Jaxrl()
        return workers[peer](**request)

    record.serve(answer)


if __name__ == "__main__":
    answer_requests() if "--serve" in sys.argv else main()
