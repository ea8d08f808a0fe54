"""Training compared with a minimal loop, and SAC and DQN compared with SBX.

    python benchmarks/limits.py [--repeats 5] [--only WORK ...] [--no-peer]

SAC: Pendulum, one environment, one update of 256 transitions per step, two hidden layers of 64 or 256. TD3: the same
with layers of 64. DQN: CartPole, an update of 64 transitions every 4 steps, two hidden layers of 64, in one and in
eight environments; and in 10 environments with 120 and 84 units, an update of 128 transitions per step of all. Their
minimal loop makes the same updates on a fixed batch, without an environment or a replay buffer.

PPO: CartPole, as in throughput.py. Its minimal loop steps the environments (without the cost of random numbers),
computes the outputs of both networks, and descends the gradient of their sums: the products and activations for the
same numbers of rows (in minibatches without those of the output layers, which XLA removes), but no shuffling,
advantages, losses, optimizer, clipping or metrics.

Training and its minimal loop use as many CPU threads as `jaxrl train`: one if matrix products are small
(`jaxrl/parallel/threads.py`).

SBX trains with the same settings on Gymnasium environments, in a separate Python environment. Everything is timed after
compilation and warm-up, to `block_until_ready`, alternating in one run.
"""

import argparse
import functools
import pathlib
import sys
import time
from typing import Any, NamedTuple

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
ENVIRONMENTS = {"sac": "Pendulum-v1", "td3": "Pendulum-v1", "dqn": "CartPole-v1", "ppo": "CartPole-v1"}
# What both train with: of DQN as in throughput.py, or an update of 64 transitions every 4 rows as SBX does.
OURS: dict[str, dict[str, Any]] = {
    "actor-critic": {"batch_size": 256, "replay_ratio": 1, "rollout_length": 1},
    "delayed": {"batch_size": 256, "replay_ratio": 1, "rollout_length": 2},
    "every 4 rows": {"batch_size": 64, "replay_ratio": 0.25, "rollout_length": 4, "n_step": 1, "target_period": 100},
    "every 10 rows": {"batch_size": 128, "replay_ratio": 0.1, "rollout_length": 1, "n_step": 1, "target_period": 50},
    "on-policy": {},
}


class Work(NamedTuple):
    """A training task: algorithm, settings in `OURS`, hidden units, environments, and steps for jaxrl and SBX.

    The steps take about a second; SBX is skipped without steps. `bare`: whether to measure a minimal loop too.
    """

    name: str
    settings: str
    widths: tuple[int, ...]
    num_envs: int
    steps: int
    peer_steps: int = 0
    bare: bool = True


WORKS = {
    "sac-64": Work("sac", "actor-critic", (64, 64), 1, 2_000, 400),
    "sac-256": Work("sac", "actor-critic", (256, 256), 1, 500, 400),
    "td3-64": Work("td3", "delayed", (64, 64), 1, 4_000),
    "dqn-1": Work("dqn", "every 4 rows", (64, 64), 1, 40_000, 2_000, bare=False),
    "dqn-8": Work("dqn", "every 4 rows", (64, 64), 8, 40_000, 4_000, bare=False),
    "dqn-10": Work("dqn", "every 10 rows", (120, 84), 10, 60_000),
    "ppo-4": Work("ppo", "on-policy", (64, 64), 4, 250_000),
    "ppo-64": Work("ppo", "on-policy", (64, 64), 64, 500_000),
    "ppo-2048": Work("ppo", "on-policy", (64, 64), 2048, 1_048_576),
}


class SBX:
    """Runs in the environment of SBX: `rows` more rows of a warm run."""

    def __init__(self):
        self.models = {}

    def __call__(self, *, name: str, settings: str, widths: list[int], num_envs: int, rows: int) -> float:
        import jax
        import sbx
        from stable_baselines3.common.env_util import make_vec_env

        key = (name, *widths, num_envs)
        if key not in self.models:
            env = make_vec_env(ENVIRONMENTS[name], n_envs=num_envs, seed=0)
            given = {"learning_rate": 3e-4, "learning_starts": 500, "buffer_size": 20_000}
            given |= {"batch_size": OURS[settings]["batch_size"], "policy_kwargs": {"net_arch": list(widths)}}
            if name == "sac":
                model = sbx.SAC("MlpPolicy", env, train_freq=1, gradient_steps=1, **given)
            else:
                # An update for every 4 rows over all environments.
                model = sbx.DQN(
                    "MlpPolicy",
                    env,
                    train_freq=4,
                    gradient_steps=num_envs,
                    target_update_interval=400,
                    **given,
                )
            model.learn(total_timesteps=2_000)
            self.models[key] = model
        model = self.models[key]
        start = time.perf_counter()
        model.learn(total_timesteps=rows, reset_num_timesteps=False)
        jax.block_until_ready(model.policy.qf_state.params)
        return time.perf_counter() - start


class Jaxrl:
    """Runs in this environment: whole training, or only its updates."""

    def __init__(self):
        self.states, self.loops = {}, {}

    def __call__(
        self, *, name: str, settings: str, widths: list[int], num_envs: int, rows: int, bare: bool = False
    ) -> float:
        import jax

        import jaxrl

        env = jaxrl.make(f"gymnax:{ENVIRONMENTS[name]}")
        algo = record.resolved(self.algorithm(name, settings, tuple(widths)), env, num_envs)
        program = jaxrl.Anakin(num_envs, devices=1).bind(algo, env)
        iterations = rows // (algo.rollout_length * num_envs)
        if bare and name == "ppo":
            return self.products(algo, env, program.layout.spec, num_envs, iterations)
        key = (name, *widths, num_envs)
        if key not in self.states:
            # Past `min_size`, so that all that is timed learns.
            self.states[key] = program.start(algo, env, 0)
            if name != "ppo":
                self.states[key] = program.chunk(algo, env, self.states[key], 1_000, 10**6)[0]
        if bare:
            count = round(rows * algo.replay_ratio)
            return self.updates(algo, program.layout.spec, self.states[key].learner, count)
        start = time.perf_counter()
        state = program.chunk(algo, env, self.states[key], iterations, 10**6)[0]
        self.states[key] = jax.block_until_ready(state)
        return time.perf_counter() - start

    def one_thread_suffices(self, *, name: str, settings: str, widths: list[int], num_envs: int) -> bool:
        """Return whether `jaxrl train` would use one thread."""
        import jaxrl

        env = jaxrl.make(f"gymnax:{ENVIRONMENTS[name]}")
        return record.one_thread_suffices(self.algorithm(name, settings, tuple(widths)), env, num_envs)

    def algorithm(self, name, settings, widths):
        import jaxrl
        from jaxrl.networks import MLP, Actor, Critic, QNetwork

        if name == "ppo":
            return jaxrl.PPO()
        given = {"learning_rate": 3e-4, "capacity": 20_000, "min_size": 500} | OURS[settings]
        if name == "dqn":
            return jaxrl.DQN(double=False, network=QNetwork(MLP(widths, activation="relu")), **given)
        kind = {"sac": jaxrl.SAC, "td3": jaxrl.TD3}[name]
        return kind(policy=Actor(widths=widths, stochastic=name == "sac"), critic=Critic(widths=widths), **given)

    def products(self, algo, env, spec, num_envs, iterations):
        """Return the seconds of a number of iterations of PPO's minimal loop."""
        import jax
        import jax.numpy as jnp

        from jaxrl.core.types import NetworkInputs

        key = (algo.network, num_envs, iterations)
        if key not in self.loops:
            size = algo.rollout_length * num_envs // algo.minibatches
            step_all = jax.vmap(env.step, in_axes=(0, 0, None))

            def outputs(params, observation):
                inputs = NetworkInputs(observation=observation)
                return algo.network.apply(params, inputs, (), spec=spec, model_state=(), train=False)[0]

            def loss(params, observation):
                output = outputs(params, observation)
                return jnp.mean(output.value) + jnp.mean(output.distribution.logits)

            def act(params, carried, _):
                state, timestep = carried
                output = outputs(params, timestep.observation[None])
                # The values join in, so that they are not left out.
                action = jnp.argmax(output.distribution.logits[0] + output.value[0, :, None], axis=-1)
                return step_all(state, action.astype(jnp.int32), jax.random.key(0)), timestep.observation

            def learn(params, observation):
                gradients = jax.grad(loss)(params, observation[None])
                return jax.tree.map(lambda p, g: p - 1e-4 * g, params, gradients), None

            def iterate(carried, _):
                params, acting = carried
                acting, seen = jax.lax.scan(functools.partial(act, params), acting, None, algo.rollout_length)
                seen = seen.reshape(algo.minibatches, size, -1)
                params = jax.lax.scan(learn, params, jnp.tile(seen, (algo.epochs, 1, 1)))[0]
                return (params, acting), None

            params = algo.network.init(jax.random.key(0), spec)[0]
            acting = jax.vmap(env.reset)(jax.random.split(jax.random.key(1), num_envs))
            run = jax.jit(lambda carried: jax.lax.scan(iterate, carried, None, iterations)[0])
            self.loops[key] = run, (params, acting)
            jax.block_until_ready(run((params, acting)))
        run, carried = self.loops[key]
        start = time.perf_counter()
        jax.block_until_ready(run(carried))
        return time.perf_counter() - start

    def updates(self, algo, spec, learner, count):
        """Return the seconds of `count` updates on one batch, in a compiled loop with donated state."""
        import jax
        import jax.numpy as jnp

        from jaxrl.core.schedules import resolve_schedules
        from jaxrl.core.types import SampleInfo, TransitionBatch
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
            sample_info=SampleInfo(
                position=jnp.arange(size, dtype=jnp.int32),
                step=jnp.zeros(size, jnp.uint32),
                probability=jnp.ones(size),
                importance=jnp.ones(size),
                priority=jnp.ones(size),
                age_steps=jnp.zeros(size, jnp.int32),
                age_updates=jnp.zeros(size, jnp.int32),
                times_sampled=jnp.ones(size, jnp.int32),
            ),
        )
        learner = jax.tree.map(jnp.copy, learner)
        known = (repr(algo), count)
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
    parser.add_argument("--only", nargs="+", choices=list(WORKS), metavar="WORK", default=list(WORKS))
    parser.add_argument("--no-peer", action="store_true")
    arguments = parser.parse_args()

    here = pathlib.Path(__file__)
    works = {name: WORKS[name] for name in arguments.only}
    ours = {one: record.Worker(sys.executable, here, record.ONE_THREAD if one else {}) for one in (False, True)}
    beside = not arguments.no_peer and any(work.peer_steps for work in works.values())
    peer = record.Worker(record.peer_python("sbx", PEER), here) if beside else None
    rows = []
    try:
        for name, work in works.items():
            rows.append({"work": name} | measured(work, ours, peer, arguments.repeats))
            print(record.table(rows[-1:]), flush=True)
    finally:
        for worker in ours.values():
            worker.close()
        if peer is not None:
            peer.close()
    print(record.save("limits", rows, repeats=arguments.repeats))


def measured(
    work: Work, workers: dict[bool, record.Worker], peer: record.Worker | None, repeats: int
) -> dict[str, Any]:
    """Return one row: steps per second of each, alternating, and ratios; `workers` by whether they use one thread."""
    request = {name: getattr(work, name) for name in ("name", "settings", "widths", "num_envs")}
    one = bool(workers[False].ask(threads=True, **request))
    ours = workers[one]
    asks = {"jaxrl": functools.partial(ours.ask, rows=work.steps, **request)}
    if work.bare:
        asks["bare loop"] = functools.partial(ours.ask, rows=work.steps, bare=True, **request)
    if peer is not None and work.peer_steps:
        asks["SBX"] = functools.partial(peer.ask, rows=work.peer_steps, peer=True, **request)
    seconds = record.alternate(asks, repeats)
    rate = {which: (work.peer_steps if which == "SBX" else work.steps) / seconds[which] for which in asks}
    row = {"algorithm": work.name, "widths": list(work.widths), "num_envs": work.num_envs, "one thread": one}
    row |= {f"{which} (steps/s)": value for which, value in rate.items()}
    return row | {f"jaxrl / {which}": rate["jaxrl"] / value for which, value in rate.items() if which != "jaxrl"}


def answer_requests() -> None:
    workers = {}

    def answer(*, peer: bool = False, threads: bool = False, **request):
        if peer not in workers:
            workers[peer] = SBX() if peer else Jaxrl()
        return workers[peer].one_thread_suffices(**request) if threads else workers[peer](**request)

    record.serve(answer)


if __name__ == "__main__":
    answer_requests() if "--serve" in sys.argv else main()
