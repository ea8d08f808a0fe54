"""Steps per second compared with rejax 0.1.3 and purejaxrl, with the same settings, alternating in one run.

    python benchmarks/throughput.py [--repeats 7] [--only WORK ...] [--no-peer] [--purejaxrl CHECKOUT]

    python benchmarks/throughput.py --distributed [--coordinator HOST:PORT --num-processes N --process-id I]

PPO on CartPole (4, 64 and 2048 environments x 128 steps, 4 epochs of 4 minibatches, two networks of 2 x 64 tanh) and on
MinAtar's Breakout (64 environments, 8 minibatches), a sweep of 8 and of 16 seeds; DQN on CartPole (10 environments, an
update of 128 transitions per step of all, 120 and 84 units); SAC and TD3 on Pendulum (one environment, an update of 256
transitions per step, 2 x 64 units). rejax's DQN has other layer widths. purejaxrl has neither SAC nor TD3, and is not
on PyPI: `--purejaxrl` is a checkout of github.com/luchris429/purejaxrl. Both run in a separate environment (gymnax
0.0.9). jaxrl runs as in `jaxrl train`: with truncation, metrics and finite checks, and on a CPU with one thread if
matrix products are small (`jaxrl/parallel/threads.py`); there, every library is measured with its default of one thread
per core and with one thread. Each measurement starts a new run and is timed after compilation and warm-up, to
`block_until_ready`; on an accelerator, libraries without support for it are skipped.

With `--distributed`, run the same command on every machine. Only PPO on CartPole is measured, one run over all devices;
`--num-envs` is the total.
"""

import argparse
import functools
import os
import pathlib
import sys
import time
import types
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

PEER = ["rejax==0.1.3", "gymnax==0.0.9", "flashbax==0.1.3", "jax==0.11.2", "jaxlib==0.11.2"]
# By name: the work, environments, seeds, steps of an iteration in each environment, steps a second as one may expect.
WORKS: dict[str, tuple[str, int, int, int, int]] = {
    "PPO CartPole, 4": ("ppo", 4, 1, 128, 250_000),
    "PPO CartPole, 64": ("ppo", 64, 1, 128, 500_000),
    "PPO CartPole, 2048": ("ppo", 2048, 1, 128, 500_000),
    "PPO CartPole, 64, 8 seeds": ("ppo", 64, 8, 128, 500_000),
    "PPO CartPole, 64, 16 seeds": ("ppo", 64, 16, 128, 500_000),
    "PPO MinAtar Breakout, 64": ("minatar", 64, 1, 128, 200_000),
    "DQN CartPole, 10": ("dqn", 10, 1, 1, 60_000),
    "SAC Pendulum, 1": ("sac", 1, 1, 1, 3_000),
    "TD3 Pendulum, 1": ("td3", 1, 1, 2, 5_000),
}
PEERS = {"rejax": ("ppo", "sac", "td3"), "purejaxrl": ("ppo", "minatar", "dqn")}


# --- the workers ---------------------------------------------------------------------------------------------------


def timed(program: Any, seeds: int, seed: int) -> float:
    """Return the seconds of a compiled run from a key, or of one run per seed."""
    import jax

    keys = jax.random.PRNGKey(seed) if seeds == 1 else jax.random.split(jax.random.PRNGKey(seed), seeds)
    start = time.perf_counter()
    jax.block_until_ready(program(keys))
    return time.perf_counter() - start


class Rejax:
    """Runs in the peer's environment."""

    def __init__(self):
        self.programs = {}

    def __call__(self, *, work: str, num_envs: int, steps: int, seeds: int, seed: int) -> float:
        import jax

        key = (work, num_envs, steps, seeds)
        if key not in self.programs:
            algo = self.made(work, num_envs, steps)
            algo = algo.replace(eval_callback=lambda algo, state, key: ())
            self.programs[key] = jax.jit(algo.train if seeds == 1 else lambda keys: jax.vmap(algo.train)(keys))
        return timed(self.programs[key], seeds, seed)

    def made(self, work, num_envs, steps):
        import rejax

        settings: dict[str, Any] = {"total_timesteps": steps, "eval_freq": steps, "skip_initial_evaluation": True}
        settings["num_envs"] = num_envs
        if work == "ppo":
            network = {"hidden_layer_sizes": (64, 64), "activation": "tanh"}
            settings |= {"num_steps": 128, "num_epochs": 4, "num_minibatches": 4, "learning_rate": 2.5e-4}
            return rejax.PPO.create(env="CartPole-v1", max_grad_norm=0.5, agent_kwargs=network, **settings)
        settings |= {"buffer_size": 20_000, "fill_buffer": 256, "batch_size": 256, "learning_rate": 3e-4}
        settings["polyak"] = 0.995
        relu = {"activation": "relu"}
        if work == "sac":  # both have 2 x 64 units
            return rejax.SAC.create(env="Pendulum-v1", agent_kwargs=relu, **settings)
        return rejax.TD3.create(env="Pendulum-v1", actor_kwargs=dict(relu), critic_kwargs=relu, **settings)


def purejaxrl_module(name: str) -> Any:
    """Import one of purejaxrl's files from the path; imports that it does not need here may be missing."""
    import jax

    for needed in ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix", "wandb"):
        try:
            __import__(needed)
        except ImportError:
            module = sys.modules[needed] = types.ModuleType(needed)
            module.EpisodeWrapper = module.AutoResetWrapper = None  # type: ignore[attr-defined]
            parent, _, child = needed.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
    jax.tree_map = jax.tree.map  # removed from JAX
    return __import__(name)


class PureJaxRL:
    """Runs in the peer's environment, with the settings of `Rejax`."""

    def __init__(self):
        self.programs = {}

    def __call__(self, *, work: str, num_envs: int, steps: int, seeds: int, seed: int) -> float:
        import jax

        key = (work, num_envs, steps, seeds)
        if key not in self.programs:
            train = self.made(work, num_envs, steps)
            self.programs[key] = jax.jit(train if seeds == 1 else jax.vmap(train))
        return timed(self.programs[key], seeds, seed)

    def made(self, work, num_envs, steps):
        config: dict[str, Any] = {"LR": 2.5e-4, "NUM_ENVS": num_envs, "GAMMA": 0.99, "ENV_NAME": "CartPole-v1"}
        config["TOTAL_TIMESTEPS"] = steps
        if work == "dqn":
            config |= {"BUFFER_SIZE": 10_000, "BUFFER_BATCH_SIZE": 128, "LEARNING_STARTS": 0, "TAU": 1.0}
            config |= {"EPSILON_START": 1.0, "EPSILON_FINISH": 0.05, "EPSILON_ANNEAL_TIME": 25e4}
            config |= {"TARGET_UPDATE_INTERVAL": 500, "TRAINING_INTERVAL": 10}
            return purejaxrl_module("dqn").make_train(config)
        config |= {"NUM_STEPS": 128, "UPDATE_EPOCHS": 4, "NUM_MINIBATCHES": 4, "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2}
        config |= {"ENT_COEF": 0.01, "VF_COEF": 0.5, "MAX_GRAD_NORM": 0.5, "ACTIVATION": "tanh", "ANNEAL_LR": True}
        if work == "minatar":
            config |= {"ENV_NAME": "Breakout-MinAtar", "NUM_MINIBATCHES": 8}
        return purejaxrl_module("ppo").make_train(config)


class Jaxrl:
    """Runs in this environment: one seed on one device, several distributed as in `jaxrl.sweep`."""

    def __init__(self):
        from jaxrl.parallel.mesh import cores, use_cpu_devices

        use_cpu_devices(1 if record.ONE_THREAD.items() <= os.environ.items() else cores())

    def one_suffices(self, *, work: str, num_envs: int) -> bool:
        """Return whether `jaxrl train` would use one thread."""
        import jaxrl

        algo, env = self.made(work)
        return record.one_thread_suffices(algo, jaxrl.make(env), num_envs)

    def __call__(self, *, work: str, num_envs: int, steps: int, seeds: int, seed: int, devices: int = 1) -> float:
        import jax

        import jaxrl
        from jaxrl.core import keys
        from jaxrl.sweeps.vectorized import VectorizedRuns

        algo, env = self.made(work)
        env = jaxrl.make(env)
        algo = record.resolved(algo, env, num_envs)
        program = jaxrl.Anakin(num_envs, devices=devices).bind(algo, env)
        steps_per_env = steps // num_envs
        iterations = steps_per_env // algo.rollout_length
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

    def made(self, work):
        import jaxrl
        from jaxrl.algos.acting import GaussianNoise, Noise
        from jaxrl.core.schedules import Linear
        from jaxrl.networks import MLP, Actor, ActorCritic, Critic, QNetwork

        if work == "ppo":
            return jaxrl.PPO(), "gymnax:CartPole-v1"
        if work == "minatar":
            return jaxrl.PPO(minibatches=8, network=ActorCritic(MLP((64, 64)))), "gymnax:Breakout-MinAtar"
        if work == "dqn":
            settings: dict[str, Any] = {"capacity": 10_000, "min_size": 128, "batch_size": 128, "learning_rate": 2.5e-4}
            settings |= {"replay_ratio": 0.1, "rollout_length": 1, "target_period": 500, "double": False, "n_step": 1}
            network = QNetwork(MLP((120, 84), activation="relu"))
            return jaxrl.DQN(network=network, epsilon=Linear(1.0, 0.05, 0.5), **settings), "gymnax:CartPole-v1"
        settings = {"capacity": 20_000, "min_size": 256, "batch_size": 256, "learning_rate": 3e-4, "replay_ratio": 1}
        settings |= {"rollout_length": 1 if work == "sac" else 2, "critic": Critic(widths=(64, 64))}
        # Correlated noise is not in rejax.
        if work == "sac":
            return jaxrl.SAC(policy=Actor(widths=(64, 64)), noise=Noise(), **settings), "gymnax:Pendulum-v1"
        policy = Actor(widths=(64, 64), stochastic=False)
        return jaxrl.TD3(policy=policy, noise=GaussianNoise(), **settings), "gymnax:Pendulum-v1"


# --- the comparison --------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=list(WORKS), metavar="WORK", default=list(WORKS))
    parser.add_argument("--num-envs", type=int, nargs="+", default=[4, 64, 2048], help="with --distributed")
    parser.add_argument("--seconds", type=float, default=1.0, help="approximate seconds of one timed run")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--purejaxrl", type=pathlib.Path, help="checkout of purejaxrl")
    record.add_process_flags(parser)
    arguments = parser.parse_args()
    if record.join_processes(arguments):
        return in_processes(arguments)

    here = pathlib.Path(__file__)
    places: dict[str, tuple[Any, dict[str, str]]] = {"jaxrl": (sys.executable, {})}
    if not arguments.no_peer:
        python = record.peer_python("rejax", PEER)
        places["rejax"] = python, {}
        if arguments.purejaxrl is not None:
            places["purejaxrl"] = python, {"PYTHONPATH": str(arguments.purejaxrl.absolute() / "purejaxrl")}
    workers = {who: record.Worker(python, here, more) for who, (python, more) in places.items()}
    if any(WORKS[name][2] == 1 for name in arguments.only):  # sweeps have devices of their own
        for who, (python, more) in places.items():
            workers[f"{who}, one thread"] = record.Worker(python, here, more | record.ONE_THREAD)
    rows = []
    try:
        for name in arguments.only:
            rows.append(measured(name, workers, arguments))
            print(record.table(rows[-1:]), flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    print(record.save("throughput", rows, repeats=arguments.repeats))


def measured(name: str, workers: dict[str, record.Worker], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return one row: steps per second of each worker that supports the task, alternating, and jaxrl's ratios."""
    work, num_envs, seeds, length, rate = WORKS[name]
    iterations = max(4, int(arguments.seconds * rate / (length * num_envs * seeds)))
    each = iterations * length * num_envs
    request = {"work": work, "num_envs": num_envs, "steps": each, "seeds": seeds, "seed": 0}
    one = seeds == 1 and workers["jaxrl"].ask(who="jaxrl, one suffices", work=work, num_envs=num_envs)
    asks = {
        who: functools.partial(worker.ask, who=peer, **request)
        for who, worker in workers.items()
        for peer, _, thread in [who.partition(", ")]
        if (peer == "jaxrl" or work in PEERS[peer]) and (one or not thread)
    }
    if seeds > 1:
        single = request | {"seeds": 1, "steps": each * seeds}
        asks["jaxrl, one seed"] = functools.partial(workers["jaxrl"].ask, who="jaxrl", **single)
    seconds = record.alternate(asks, arguments.repeats)
    ours = seconds["jaxrl, one thread" if one else "jaxrl"]
    steps = each * seeds
    row: dict[str, Any] = {"work": name, "num_envs": num_envs, "seeds": seeds, "one thread": bool(one)}
    row |= {"jaxrl train (steps/s)": steps / ours}
    row |= {f"{who} (steps/s)": steps / value for who, value in seconds.items()}
    row |= {f"jaxrl train / {peer}": seconds[peer] / ours for peer in PEERS if peer in seconds}
    if one:
        alike = [(peer, f"{peer}, one thread") for peer in PEERS if peer in seconds]
        row |= {f"jaxrl / {peer}, each with one thread": seconds[of_one] / ours for peer, of_one in alike}
        row["one thread / one a core"] = seconds["jaxrl"] / ours
    if seeds > 1:
        row["seeds / one seed"] = seconds["jaxrl, one seed"] / seconds["jaxrl"]
    return row


def in_processes(arguments: argparse.Namespace) -> None:
    """Measure one run over the devices of all processes."""
    import jax

    ours, devices = Jaxrl(), jax.device_count()
    tasks = []
    for num_envs in arguments.num_envs:
        if num_envs % devices:
            print(f"skipping --num-envs {num_envs}, which is not divisible by {devices} devices", flush=True)
            continue
        iterations = max(4, int(arguments.seconds * 250_000 / (128 * num_envs)))
        steps = iterations * 128 * num_envs
        settings = {"work": "ppo", "num_envs": num_envs, "steps": steps, "seeds": 1, "seed": 0, "devices": devices}
        tasks.append(({"num_envs": num_envs}, "steps", steps, functools.partial(ours, **settings)))
    record.in_processes("throughput", tasks, arguments.repeats)


def answer_requests() -> None:
    kinds = {"jaxrl": Jaxrl, "rejax": Rejax, "purejaxrl": PureJaxRL}
    workers = {}

    def answer(*, who: str, **request):
        library, _, question = who.partition(", ")
        if library not in workers:
            workers[library] = kinds[library]()
        return workers[library].one_suffices(**request) if question else workers[library](**request)

    record.serve(answer)


if __name__ == "__main__":
    answer_requests() if "--serve" in sys.argv else main()
