"""Small programs that several tests train: a second or so to run, and compiled once for all tests of a process."""

import contextlib
import signal
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

import jaxrl
from jaxrl import networks
from jaxrl.algos.fields import Memory, PrioritizedReplay
from jaxrl.algos.optimizers import Adam

SMALL = networks.MLP((16,))
NUM_ENVS = 8
ROWS = NUM_ENVS * 8  # an iteration of every algorithm below

# Short episodes, so that a few rows hold terminations and truncations.
ENV = jaxrl.make("gymnax:CartPole-v1", max_steps_in_episode=12)

PPO = jaxrl.PPO(
    entropy_cost=0.01,
    rollout_length=8,
    epochs=2,
    minibatches=2,
    learning_rate=jaxrl.schedules.Linear(1e-2, 1e-3),
    network=networks.ActorCritic(torso=SMALL),
)
RECURRENT_PPO = PPO.replace(
    learning_rate=1e-2,
    normalize_observation=True,
    normalize_reward=True,
    network=networks.ActorCritic(
        torso=SMALL, core=networks.GRU(8), previous_action=True, previous_reward=True, shared=True
    ),
)
# The replay wraps before the tenth update; the first iteration only fills it.
REPLAY = {"rollout_length": 8, "capacity": NUM_ENVS * 32, "min_size": NUM_ENVS * 16, "batch_size": 32}
REPLAY |= {"replay_ratio": 2 / ROWS}
SEQUENCES = REPLAY | {"batch_size": 8, "replay_ratio": 1 / ROWS, "memory": Memory(length=6, burn_in=2)}
DQN = jaxrl.DQN(
    **REPLAY,
    learning_rate=1e-2,
    n_step=3,
    prioritized=PrioritizedReplay(),
    target_period=3,
    network=networks.QNetwork(torso=SMALL),
)
R2D2 = jaxrl.R2D2(
    **SEQUENCES,
    learning_rate=1e-2,
    n_step=2,
    target_period=3,
    network=networks.QNetwork(torso=SMALL, core=networks.GRU(8), previous_action=True, previous_reward=True),
)
# A large eps, as of the tests of devices: rounding decides the sign of what is all but 0.
DREAMER = jaxrl.Dreamer(
    learning_rate=1e-4,
    optimizer=Adam(eps=1e-2),
    **SEQUENCES,
    imagination_length=3,
    network=networks.WorldModel(deter=8, stoch=2, classes=3, hidden=8, units=8, blocks=2, layers=1),
)
ALGORITHMS = {"ppo": PPO, "recurrent_ppo": RECURRENT_PPO, "dqn": DQN}
SWEEP = {"total_steps": 2 * ROWS, "num_envs": NUM_ENVS, "evaluation_episodes": 4, "points": 2, "progress": False}


def anakin(devices=1):
    """The same run on any number of devices up to 4."""
    return jaxrl.Anakin(num_envs=NUM_ENVS, devices=devices, shards=4)


def train(run_dir=None, *, algo=PPO, env=ENV, **settings):
    """Return the result of a run: by default of PPO in short episodes of CartPole on one device."""
    return jaxrl.train(algo, env, run_dir=run_dir, **{"topology": anakin(), "progress": False} | settings)


def plain(tree):
    """Keys as their data, everything as numpy."""

    def one(x):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x)

    return jax.tree.map(one, tree)


def assert_equal(one, other, tolerance=0.0):
    """Every leaf is the same: floating numbers within `tolerance`, all else, and with tolerance 0 all, exactly."""
    one, other = plain(one), plain(other)
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        name = jax.tree_util.keystr(path)
        if a.dtype.kind == "f" and tolerance:
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)


def resumed(folder, algo, env, total_steps, **settings):
    """Return a run, after asserting that one stopped at half of it and resumed in `folder` is the same bit for bit."""
    settings = {"evaluate_every": 0, "progress": False, "seed": 3} | settings
    whole = jaxrl.train(algo, env, total_steps=total_steps, **settings)
    for steps in (total_steps // 2, total_steps):
        again = jaxrl.train(algo, env, total_steps=steps, run_dir=folder, **settings)
    assert_equal(whole.state, again.state)
    np.testing.assert_array_equal(whole.evaluation.returns, again.evaluation.returns)
    return whole


def all_finite(tree):
    return all(np.isfinite(x).all() for x in jax.tree.leaves(plain(tree)) if x.dtype.kind == "f")


@struct.dataclass
class Spoiled:
    """`env`, which shows `value` as its reward or observation at one tick of every run, in every environment."""

    env: Any
    tick: Any = np.int32(2**31 - 1)
    value: Any = np.float32(np.nan)
    in_reward: Any = np.bool_(True)
    in_observation: Any = np.bool_(False)

    name = property(lambda self: self.env.name)
    observation_space = property(lambda self: self.env.observation_space)
    action_space = property(lambda self: self.env.action_space)
    resets = property(lambda self: self.env.resets)

    def reset(self, key):
        state, timestep = self.env.reset(key)
        return (state, jnp.int32(0)), timestep

    def step(self, state, action, key):
        state, steps_per_env = state
        state, timestep = self.env.step(state, action, key)
        now = steps_per_env + 1 == self.tick
        spoil = lambda x, here: jnp.where(now & here, jnp.full_like(x, self.value), x)  # noqa: E731
        timestep = timestep.replace(
            reward=spoil(timestep.reward, self.in_reward),
            observation=spoil(timestep.observation, self.in_observation),
        )
        return (state, steps_per_env + 1), timestep


class At:
    """A logger that does something once, at its first row at or after a step."""

    def __init__(self, step, then):
        self.step, self.then = step, then

    def write(self, step, metrics):
        if self.step is not None and step >= self.step:
            self.step = None  # a second Ctrl-C would not wait for the end of the chunk
            self.then()

    def close(self):
        pass


class Interrupt(At):
    """Ends the run as a key press would."""

    def __init__(self, step=0):
        super().__init__(step, lambda: signal.raise_signal(signal.SIGINT))


def actor_threads():
    """The threads of host actors that run; others in the process (JAX's, a test runner's) come and go as they like."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(("actor-", "stepper"))]


@contextlib.contextmanager
def started(topology, algo, env, seed=3):
    """Yield a program and its first state; it is closed afterwards, and no thread is left."""
    program = topology.bind(algo, env)
    try:
        yield program, program.start(algo, env, seed)
    finally:
        program.close()
        assert not actor_threads()


def ran(topology, algo, env, iterations, seed=3):
    """Return the state and the report after some iterations, as numpy; no thread is left."""
    with started(topology, algo, env, seed) as (program, state):
        return plain(program.chunk(algo, env, state, iterations, 100))
