"""Host environments: PPO with EnvPool compared with SB3, and the overhead of the topology over EnvPool.

    python benchmarks/host.py [--repeats 5] [--no-peer] [--only cartpole halfcheetah pong pong-16 impala]

    python benchmarks/host.py --distributed [--coordinator HOST:PORT --num-processes N --process-id I]

With `--distributed`, run the same command on every machine. Only jaxrl is measured: one run over all devices, in
lockstep with a lag of one; the settings are totals over all processes.

PPO: both libraries use the same batch size, epochs, minibatches and networks (two of 2 x 64 tanh). SB3 steps 8
Gymnasium environments in its process, as in its documentation; jaxrl uses EnvPool, and the number of environments is
printed. Pong, 64 and 16 environments: rows per second of `Sebulba` with an algorithm that acts at random and does not
learn, compared with stepping EnvPool directly with random actions, in the same number of environments.

IMPALA in Pong, preset `impala-paper-shallow`: rows per second compared with its parts run one after another, each on
all cores: EnvPool with random actions, the policy on the observations of a group of environments, and the update on a
precomputed batch of rollouts.

Everything is timed after compilation and warm-up, alternating in one run.
"""

import argparse
import functools
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record
from limits import PEER

# Rows a batch, epochs, rows a minibatch, and our environments, threads and groups.
PPO: dict[str, dict[str, Any]] = {
    "cartpole": {"env": "CartPole-v1", "batch": 1024, "epochs": 4, "minibatch": 256, "num_envs": 128},
    "halfcheetah": {"env": "HalfCheetah-v4", "batch": 2048, "epochs": 10, "minibatch": 64, "num_envs": 32},
}
PEER_ENVS = 8
PONG: dict[str, dict[str, Any]] = {
    "pong": {"env": "Pong-v5", "num_envs": 64, "rollout": 16},
    "pong-16": {"env": "Pong-v5", "num_envs": 16, "rollout": 16},
}
IMPALA: dict[str, dict[str, Any]] = {"impala": {"env": "Pong-v5", "num_envs": 64, "rollout": 20}}
PARTS = ("environments", "policy", "updates")
TASKS = {**PPO, **PONG, **IMPALA}
_BATCHES = 60  # that PPO learns from in a timed run
_PONG_ROWS = 40_960
_IMPALA_ROWS = 10_240
_ACTORS = 2  # each with half of Pong's environments


class SB3:
    """Runs in the peer's environment."""

    def __init__(self):
        self.models = {}

    def __call__(self, *, name: str, rows: int) -> float:
        import stable_baselines3 as sb3
        import torch
        from stable_baselines3.common.env_util import make_vec_env

        settings = PPO[name]
        if name not in self.models:
            env = make_vec_env(settings["env"], n_envs=PEER_ENVS, seed=0)
            model = sb3.PPO(
                "MlpPolicy",
                env,
                n_steps=settings["batch"] // PEER_ENVS,
                batch_size=settings["minibatch"],
                n_epochs=settings["epochs"],
                device="cpu",
                policy_kwargs={"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh},
            )
            model.learn(total_timesteps=settings["batch"])
            self.models[name] = model
        start = time.perf_counter()
        self.models[name].learn(total_timesteps=rows, reset_num_timesteps=False)
        return time.perf_counter() - start


class Jaxrl:
    """Runs in this environment; `layout` has further settings of the topology."""

    def __init__(self, **layout: Any):
        self.layout, self.runs, self.pools, self.parts = layout, {}, {}, None
        self.reports: dict[str, Any] = {}  # of the last run of each

    def __call__(self, *, name: str, rows: int, part: str | None = None) -> float:
        """Return the seconds of a run, or of one part of it."""
        import jax

        if part == "environments":
            return self.pool(TASKS[name], rows)
        if name not in self.runs:
            self.runs[name] = self.started(name)
        program, algo, env, state = self.runs[name]
        if part is not None:
            if self.parts is None:
                self.parts = ImpalasParts(algo, env, TASKS[name])
            return getattr(self.parts, part)(rows)
        iterations = rows // program.steps_per_iteration(algo)
        start = time.perf_counter()
        state, report = jax.block_until_ready(program.chunk(algo, env, state, iterations, 10**9))
        seconds = time.perf_counter() - start
        self.runs[name], self.reports[name] = (program, algo, env, state), report
        return seconds

    def shares(self, name: str, rows: int) -> dict[str, float]:
        """Return how a run divides its time. It follows another run directly, so that a pause does not count."""
        for _ in range(2):
            self(name=name, rows=rows)
        told = self.reports[name].metrics()
        seconds = told["actors/seconds"]
        stepping, blocked = (
            told[f"actors/{what}_seconds"] / (_ACTORS * seconds) for what in ("stepping", "actor_blocked")
        )
        return {
            "an actor steps": float(stepping),
            "an actor waits for the learner": float(blocked),
            "an actor acts": float(1.0 - stepping - blocked),
            "the learner waits": float(told["actors/learner_blocked_seconds"] / seconds),
        }

    def started(self, name):
        import jaxrl
        from jaxrl.run.presets import PRESETS

        settings = TASKS[name]
        env = jaxrl.make("envpool:" + settings["env"])
        if name in PONG:
            algo = random_actor()(rollout_length=settings["rollout"])
            topology = jaxrl.Sebulba(num_envs=settings["num_envs"], actors=_ACTORS, queue=2, **self.layout)
        elif name in IMPALA:
            algo = PRESETS["impala-paper-shallow"].algorithm.replace(rollout_length=settings["rollout"])
            topology = jaxrl.Sebulba(num_envs=settings["num_envs"], actors=_ACTORS, queue=2, **self.layout)
        else:
            algo = jaxrl.PPO(
                rollout_length=settings["batch"] // settings["num_envs"],
                epochs=settings["epochs"],
                minibatches=settings["batch"] // settings["minibatch"],
            )
            topology = jaxrl.Sebulba(num_envs=settings["num_envs"], **self.layout)
        algo = record.resolved(algo, env, topology.num_envs)
        program = topology.bind(algo, env)
        state = program.start(algo, env, 0)
        state, _ = program.chunk(algo, env, state, 3, 10**9)
        return program, algo, env, state

    def pool(self, settings, rows):
        """Measure EnvPool without jaxrl: the same two pools, each stepped by its own thread."""
        import threading

        import envpool
        import numpy as np

        size = settings["num_envs"] // _ACTORS
        if size not in self.pools:
            self.pools[size] = [envpool.make_gymnasium(settings["env"], num_envs=size, seed=n) for n in range(_ACTORS)]
            for pool in self.pools[size]:
                pool.reset()
        actions = np.random.default_rng(0).integers(0, 6, (rows // (_ACTORS * size), size)).astype(np.int32)

        def play(pool):
            for action in actions:
                pool.step(action)

        threads = [threading.Thread(target=play, args=(pool,)) for pool in self.pools[size]]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    def close(self):
        for program, *_ in self.runs.values():
            program.close()


class ImpalasParts:
    """Separate parts of IMPALA: the seconds of acting for a number of rows, and of learning from as many."""

    def __init__(self, algo: Any, env: Any, settings: dict[str, Any]):
        import jax
        import jax.numpy as jnp
        import numpy as np

        from jaxrl.core import keys
        from jaxrl.core.schedules import resolve_schedules
        from jaxrl.core.types import env_spec
        from jaxrl.parallel.host_rollout import HostSteps, complete, in_this_thread, unroll
        from jaxrl.parallel.replicas import SingleReplica

        spec, num_envs = env_spec(env), settings["num_envs"]
        self.group, self.batch = num_envs // _ACTORS, num_envs * settings["rollout"]
        algo, key = resolve_schedules(algo, jnp.float32(0.0)), keys.root_key(0)
        self.learner = algo.init(key, spec)
        actor = algo.actor(self.learner)
        host, everybody = env.build(num_envs, 0), np.arange(num_envs, dtype=np.int32)
        steps = HostSteps(spec, num_envs, num_envs, settings["rollout"])
        acting = steps.begin(algo, host.reset(), key, everybody)
        self.rollout = complete(unroll(steps, algo, actor, acting, in_this_thread(host.step)))
        host.close()
        self.shown, self.carry, self.keys = jax.tree.map(
            lambda x: x[: self.group], (acting.timestep, acting.carry, acting.roots)
        )

        @jax.jit
        def act(shown, carry):
            timestep = shown.replace(previous_action=jnp.zeros(self.group, jnp.int32))
            output = algo.act(actor, timestep, carry, self.keys, spec=spec, explore=True)
            return output.action, output.carry, output.extras

        @functools.partial(jax.jit, donate_argnums=0)
        def learn(learner, rollout):
            replicas = SingleReplica()
            return algo.update(learner, {"rollout": rollout}, spec=spec, key=key, replicas=replicas)[0]

        self.act, self.learn = act, learn

    def policy(self, rows: int) -> float:
        import jax

        start = time.perf_counter()
        for _ in range(rows // self.group):
            action, self.carry, _ = self.act(self.shown, self.carry)
            jax.device_get(action)
        return time.perf_counter() - start

    def updates(self, rows: int) -> float:
        import jax

        start = time.perf_counter()
        for _ in range(rows // self.batch):
            self.learner = self.learn(self.learner, self.rollout)
        jax.block_until_ready(self.learner)
        return time.perf_counter() - start


def random_actor():
    """Return an algorithm that acts at random and does not learn, written with only the protocol."""
    import jax
    import jax.numpy as jnp
    from flax import struct

    from jaxrl.algos.base import static
    from jaxrl.core.types import ActorOutput, ActorState, Rollouts, UpdateInfo

    @struct.dataclass
    class Random:
        rollout_length: int = static(32)

        def resolve(self, spec, num_envs):
            return self

        def validate(self, spec, num_envs, shards):
            return []

        @property
        def experience(self):
            return {"rollout": Rollouts(self.rollout_length)}

        def init(self, key, spec):
            return jnp.float32(0.0)

        def actor(self, state):
            return ActorState(state)

        def initial_carry(self, spec, env_index, num_envs):
            return ()

        def act(self, actor, timestep, carry, key, *, spec, explore):
            return ActorOutput(jax.vmap(spec.action_space.sample)(key), carry)

        def update(self, state, batch, *, spec, key, replicas):
            rows = batch["rollout"].rows
            return state, UpdateInfo({"reward": jnp.mean(rows.reward)})

    return Random


def _task(name: str) -> str:
    """Return the task's name in the record."""
    kind = "random" if name in PONG else "IMPALA" if name in IMPALA else "PPO"
    return f"{kind} in {TASKS[name]['env']}"


def _rows(name: str) -> int:
    """Return the rows of a run of jaxrl."""
    return _PONG_ROWS if name in PONG else _IMPALA_ROWS if name in IMPALA else _BATCHES * PPO[name]["batch"]


# --- the comparison --------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    record.add_process_flags(parser)
    arguments = parser.parse_args()
    if record.join_processes(arguments):
        return in_processes(arguments)

    here = pathlib.Path(__file__)
    ours = record.Worker(sys.executable, here)
    peer = None if arguments.no_peer else record.Worker(record.peer_python("sbx", PEER), here)
    rows = []
    try:
        for name in arguments.only:
            settings = TASKS[name]
            if name in PONG:
                count = _rows(name)
                asks = {
                    "jaxrl": functools.partial(ours.ask, name=name, rows=count),
                    "EnvPool alone": functools.partial(ours.ask, name=name, rows=count, part="environments"),
                }
                seconds = record.alternate(asks, arguments.repeats)
                row = {"task": _task(name), "num_envs": settings["num_envs"]}
                row |= {f"{which} (rows/s)": count / value for which, value in seconds.items()}
                row["jaxrl / EnvPool alone"] = seconds["EnvPool alone"] / seconds["jaxrl"]
                row["shares of time"] = ours.ask(name=name, rows=count, shares=True)
            elif name in IMPALA:
                count = _rows(name)
                asks = {"jaxrl": functools.partial(ours.ask, name=name, rows=count)}
                asks |= {part: functools.partial(ours.ask, name=name, rows=count, part=part) for part in PARTS}
                seconds = record.alternate(asks, arguments.repeats)
                row = {"task": _task(name), "num_envs": settings["num_envs"]}
                row |= {f"{which} (rows/s)": count / value for which, value in seconds.items()}
                row["jaxrl / its parts by turns"] = sum(seconds[part] for part in PARTS) / seconds["jaxrl"]
                row["shares of time"] = ours.ask(name=name, rows=count, shares=True)
            else:
                count, peer_count = _rows(name), 4 * settings["batch"]
                asks = {"jaxrl": lambda name=name, count=count: ours.ask(name=name, rows=count)}
                if peer is not None:
                    asks["SB3"] = lambda name=name, count=peer_count: peer.ask(name=name, rows=count, peer=True)
                seconds = record.alternate(asks, arguments.repeats)
                row = {"task": _task(name), "num_envs": settings["num_envs"]}
                row["jaxrl (rows/s)"] = count / seconds["jaxrl"]
                if peer is not None:
                    row["SB3 (rows/s)"] = peer_count / seconds["SB3"]
                    row["jaxrl / SB3"] = row["jaxrl (rows/s)"] / row["SB3 (rows/s)"]
            rows.append(row)
            print(record.table([row]), flush=True)
    finally:
        ours.close()
        if peer is not None:
            peer.close()
    print(record.save("host", rows, repeats=arguments.repeats, settings={"ppo": PPO, "pong": PONG, "impala": IMPALA}))


def in_processes(arguments: argparse.Namespace) -> None:
    """Measure one run over the devices of all processes."""
    import jax

    ours = Jaxrl(devices=jax.device_count(), lockstep=True, lag=1)
    tasks = []
    for name in arguments.only:
        settings = TASKS[name]
        count = _rows(name)
        row = {"task": _task(name), "num_envs": settings["num_envs"]}
        tasks.append((row, "rows", count, functools.partial(ours, name=name, rows=count)))
    try:
        record.in_processes("host", tasks, arguments.repeats)
    finally:
        ours.close()


def answer_requests() -> None:
    workers = {}

    def answer(*, peer: bool = False, shares: bool = False, **request):
        if peer not in workers:
            workers[peer] = SB3() if peer else Jaxrl()
        return workers[peer].shares(**request) if shares else workers[peer](**request)

    try:
        record.serve(answer)
    finally:
        if False in workers:
            workers[False].close()


if __name__ == "__main__":
    answer_requests() if "--serve" in sys.argv else main()
