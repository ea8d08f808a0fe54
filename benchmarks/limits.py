"""How much of the time is learning: SAC against its bare update loop, and SAC and DQN against SBX.

    python benchmarks/limits.py [--repeats 5] [--no-peer]

SAC: Pendulum, one environment, one update of 256 transitions a row, two hidden layers of 64 or of 256, against the
same updates in one compiled loop over a batch that is already there: no environment, no replay, no metrics but its own.
DQN: CartPole, batches of 64, two hidden layers of 64, an update every 4 rows, in one environment and in eight.
SBX (on Gymnasium's environments, in a Python environment of its own) trains with the same numbers. What is timed is
compiled and warm, to `block_until_ready`, in turn in one run.
"""

import argparse
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

PEER = [
    "sbx-rl==0.28.0",
    "jax==0.11.2",
    "jaxlib==0.11.2",
    "gymnasium==1.3.0",
    "mujoco==3.3.7",
    "imageio",
    "packaging",
]
ENVIRONMENTS = {"sac": "Pendulum-v1", "dqn": "CartPole-v1"}
BATCH = {"sac": 256, "dqn": 64}


class SBX:
    """Runs in the peer's environment: `rows` more rows of a run that is warm."""

    def __init__(self):
        self.models = {}

    def __call__(self, *, name: str, width: int, num_envs: int, rows: int) -> float:
        import jax
        import sbx
        from stable_baselines3.common.env_util import make_vec_env

        key = (name, width, num_envs)
        if key not in self.models:
            env = make_vec_env(ENVIRONMENTS[name], n_envs=num_envs, seed=0)
            settings = {"learning_rate": 3e-4, "batch_size": BATCH[name], "learning_starts": 500, "buffer_size": 20_000}
            settings["policy_kwargs"] = {"net_arch": [width, width]}
            if name == "sac":
                model = sbx.SAC("MlpPolicy", env, train_freq=1, gradient_steps=1, **settings)
            else:
                # An update for every 4 rows over all environments.
                model = sbx.DQN(
                    "MlpPolicy",
                    env,
                    train_freq=4,
                    gradient_steps=num_envs,
                    target_update_interval=400,
                    **settings,
                )
            model.learn(total_timesteps=2_000)
            self.models[key] = model
        model = self.models[key]
        start = time.perf_counter()
        model.learn(total_timesteps=rows, reset_num_timesteps=False)
        jax.block_until_ready(model.policy.qf_state.params)
        return time.perf_counter() - start


class Jaxrl:
    """Runs here: whole training, or its updates alone."""

    def __init__(self):
        self.states, self.loops = {}, {}

    def __call__(self, *, name: str, width: int, num_envs: int, rows: int, bare: bool = False) -> float:
        import jax

        import jaxrl

        algo = self.algorithm(name, width, num_envs)
        env = jaxrl.make(f"gymnax:{ENVIRONMENTS[name]}")
        program = jaxrl.Anakin(num_envs, devices=1).bind(algo, env)
        key = (name, width, num_envs)
        if key not in self.states:
            # Past `min_size`, so that all that is timed learns.
            state = program.start(algo, env, 0)
            self.states[key] = program.chunk(algo, env, state, 1_000, 10**6)[0]
        if bare:
            return self.updates(algo, program.layout.spec, self.states[key].learner, rows)
        steps_per_env = algo.rollout_length * num_envs
        start = time.perf_counter()
        state = program.chunk(algo, env, self.states[key], rows // steps_per_env, 10**6)[0]
        self.states[key] = jax.block_until_ready(state)
        return time.perf_counter() - start

    def algorithm(self, name, width, num_envs):
        import jaxrl
        from jaxrl.networks import MLP, Actor, Critic, QNetwork

        settings = {"learning_rate": 3e-4, "capacity": 20_000, "min_size": 500, "batch_size": BATCH[name]}
        if name == "sac":
            widths = (width, width)
            return jaxrl.SAC(
                policy=Actor(widths=widths), critic=Critic(widths=widths), replay_ratio=1, rollout_length=1, **settings
            )
        torso = MLP((width, width), activation="relu")
        return jaxrl.DQN(
            double=False, network=QNetwork(torso), rollout_length=4, replay_ratio=0.25, target_period=100, **settings
        )

    def updates(self, algo, spec, learner, count):
        """Seconds of `count` updates from one batch, in a compiled loop whose state is donated."""
        import functools

        import jax
        import jax.numpy as jnp

        from jaxrl.core.schedules import resolve_schedules
        from jaxrl.core.types import TransitionBatch
        from jaxrl.parallel.replicas import SingleReplica

        @functools.partial(jax.jit, static_argnames=("count", "spec"), donate_argnames="learner")
        def loop(algo, learner, batch, key, count, spec):
            def update(learner, number):
                resolved, key_now = resolve_schedules(algo, jnp.float32(0.5)), jax.random.fold_in(key, number)
                learner, info = resolved.update(
                    learner, {"replay": batch}, spec=spec, key=key_now, replicas=SingleReplica()
                )
                return learner, info.metrics

            learner, metrics = jax.lax.scan(update, learner, jnp.arange(count))
            return learner, jax.tree.map(jnp.mean, metrics)

        size = algo.batch_size
        keys = jax.random.split(jax.random.key(0), 2 * size)
        observation = jax.vmap(spec.observation_space.sample)(keys[:size])
        batch = TransitionBatch(
            observation=observation,
            action=jax.vmap(spec.action_space.sample)(keys[size:]),
            rewards=jnp.ones((size, 1)),
            steps=jnp.ones(size, jnp.int32),
            bootstrap=jnp.ones(size, bool),
            next_observation=observation,
            weight=jnp.ones(size, bool),
        )
        learner = jax.tree.map(jnp.copy, learner)
        known = (algo.policy, count)
        if known not in self.loops:
            self.loops[known] = loop
            jax.block_until_ready(loop(algo, jax.tree.map(jnp.copy, learner), batch, jax.random.key(1), count, spec))
        jax.block_until_ready((learner, batch))
        start = time.perf_counter()
        jax.block_until_ready(self.loops[known](algo, learner, batch, jax.random.key(1), count, spec))
        return time.perf_counter() - start


# --- the comparison --------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-peer", action="store_true")
    arguments = parser.parse_args()

    here = pathlib.Path(__file__)
    ours = record.Worker(sys.executable, here)
    peer = None if arguments.no_peer else record.Worker(record.peer_python("sbx", PEER), here)
    rows = []
    try:
        # Algorithm, width, environments, and rows that take about a second.
        for name, width, num_envs, steps, peer_steps in (
            ("sac", 64, 1, 2_000, 400),
            ("sac", 256, 1, 500, 400),
            ("dqn", 64, 1, 40_000, 2_000),
            ("dqn", 64, 8, 40_000, 4_000),
        ):
            request = {"name": name, "width": width, "num_envs": num_envs}
            asks = {"jaxrl": lambda request=request, rows=steps: ours.ask(rows=rows, **request)}
            counts = {"jaxrl": steps}
            if name == "sac":
                asks["bare updates"] = lambda request=request, rows=steps: ours.ask(rows=rows, bare=True, **request)
                counts["bare updates"] = steps
            if peer is not None:
                asks["SBX"] = lambda request=request, rows=peer_steps: peer.ask(rows=rows, peer=True, **request)
                counts["SBX"] = peer_steps
            seconds = record.alternate(asks, arguments.repeats)
            rate = {which: counts[which] / value for which, value in seconds.items()}
            row = {"algorithm": name, "width": width, "num_envs": num_envs}
            row |= {f"{which} (rows/s)": value for which, value in rate.items()}
            if name == "sac":
                row["jaxrl / bare updates"] = rate["jaxrl"] / rate["bare updates"]
            if peer is not None:
                row["jaxrl / SBX"] = rate["jaxrl"] / rate["SBX"]
                if name == "sac":
                    row["SBX / bare updates"] = rate["SBX"] / rate["bare updates"]
            rows.append(row)
            print(record.table([row]), flush=True)
    finally:
        ours.close()
        if peer is not None:
            peer.close()
    print(record.save("limits", rows, repeats=arguments.repeats))


def answer_requests() -> None:
    workers = {}

    def answer(*, peer: bool = False, **request):
        if peer not in workers:
            workers[peer] = SBX() if peer else Jaxrl()
        return workers[peer](**request)

    record.serve(answer)


if __name__ == "__main__":
    answer_requests() if "--serve" in sys.argv else main()
