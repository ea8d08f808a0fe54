"""GAIL: its penalty, terminations, and that it does what was shown.

A whole update against numpy: `test_oracles.py`. Topologies and resuming: `tests/parallel/test_offline.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import BATCH, GAIL, SPEC, transitions
from helpers.tiers import one_quick

import jaxrl
from jaxrl.algos import gail
from jaxrl.algos.histories import Observations
from jaxrl.algos.temperature import Temperature
from jaxrl.algos.train_state import Variables
from jaxrl.core import spaces
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.sources import Dataset
from jaxrl.core.types import EnvSpec, Trajectory
from jaxrl.data import EpisodeCutter
from jaxrl.networks import Actor, Critic
from jaxrl.parallel.replicas import SingleReplica

KEY = jax.random.key(0)
CHOICE = EnvSpec("choice", SPEC.observation_space, spaces.Discrete(2))


def batches():
    return {"replay": transitions(), "demonstrations": transitions(seed=1)}


def initial(algo, spec=SPEC):
    return resolve_schedules(algo, jnp.float32(0)).init(KEY, spec)


def test_what_it_learns_from():
    sources = GAIL.replace(batch_size=9, capacity=100).experience
    assert sources["demonstrations"] == Dataset(9)
    assert sources["replay"].batch_size == 9 and sources["replay"].capacity == 100 and sources["replay"].n_step == 1


@functools.partial(jax.jit, static_argnames="spec")
def updated(algo, state, batch, key, spec=SPEC):
    algo = resolve_schedules(algo, jnp.float32(0))
    return algo.update(state, batch, spec=spec, key=key, replicas=SingleReplica())


@pytest.mark.long
def test_discounts_of_1_change_nothing():
    state, batch = initial(GAIL), batches()
    other = {name: part.with_discounts() for name, part in batch.items()}
    one, two = (updated(GAIL, state, x, KEY) for x in (batch, other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, two)


@pytest.mark.long
def test_the_penalty_of_discrete_actions_is_of_the_observation():
    """Against differences of the logit between both, where the pair's actions are drawn by the same share."""
    algo, rng = GAIL, np.random.default_rng(2)
    own, shown = (part.replace(action=jnp.asarray(rng.integers(0, 2, BATCH), jnp.int32)) for part in batches().values())
    params, model_state = algo.discriminator.init(KEY, CHOICE)
    variables = Variables(params, model_state)
    keys = jax.random.split(KEY, BATCH)
    found = gail.gradient_penalty(algo.discriminator, variables, own, shown, keys, CHOICE)
    share = np.asarray(jax.vmap(jax.random.uniform)(keys))

    def logit(observation):
        ends = [
            gail.logits(algo.discriminator, variables, jnp.float32(observation), x.action, CHOICE)[0]
            for x in (own, shown)
        ]
        return (1 - share) * np.asarray(ends[0]) + share * np.asarray(ends[1])

    between = (1 - share)[:, None] * np.asarray(own.observation) + share[:, None] * np.asarray(shown.observation)
    steps = 1e-2 * np.eye(3)
    slope = np.stack([(logit(between + step) - logit(between - step)) / 2e-2 for step in steps], axis=-1)
    close = np.abs(found - (np.linalg.norm(slope, axis=-1) - 1) ** 2) < 1e-3
    assert close.sum() >= BATCH - 3, "all but where a rectifier's corner lies within the step"


VECTOR, PIXELS = spaces.Box(-1, 1, (3,)), spaces.Box(0, 255, (36, 36, 2), np.uint8)
SPACES = {"pixels": PIXELS, "name": spaces.Discrete(4), "both": spaces.Dict({"frame": PIXELS, "vector": VECTOR})}


@pytest.mark.long
@pytest.mark.parametrize("kind", one_quick(SPACES, "name", "both"))
@pytest.mark.parametrize("action", [spaces.Discrete(3), spaces.Box(-2, 2, (1,))], ids=["discrete", "box"])
def test_every_kind_of_observation_has_a_penalty(kind, action):
    """A second derivative through the torsos, traced; names have no gradient, and go through as they are."""
    spec = EnvSpec(kind, SPACES[kind], action)
    algo = resolve_schedules(jaxrl.GAIL().resolve(spec, 1), jnp.float32(0))
    assert algo.validate(spec, 1, 1) == []

    def filled(space, shape=(BATCH,)):
        if isinstance(space, spaces.Dict):
            return {name: filled(child) for name, child in space.items}
        return jnp.zeros((*shape, *space.shape), space.dtype)

    observation = filled(SPACES[kind])
    part = transitions().replace(observation=observation, next_observation=observation, action=filled(action))
    state = jax.eval_shape(lambda: algo.init(KEY, spec))
    arguments = {"spec": spec, "key": KEY, "replicas": SingleReplica()}
    new, info = jax.eval_shape(
        lambda state: algo.update(state, {"replay": part, "demonstrations": part}, **arguments), state
    )
    assert jax.tree.leaves(new) == jax.tree.leaves(state) and info.metrics["gradient_penalty"].shape == ()


# --- terminations ----------------------------------------------------------------------------------------------------


@functools.cache
def preference(reward, absorbing):
    """Q of ending less Q of going on, where experience and demonstrations are alike, and either choice is as good."""
    algo = GAIL.replace(reward=reward, absorbing=absorbing, gamma=0.5, learning_rate=1e-2, tau=0.2)
    algo = algo.replace(temperature=Temperature(initial=1e-3, learned=False))
    action = jnp.arange(BATCH, dtype=jnp.int32) % 2
    ones = jnp.ones((BATCH, 3))
    part = transitions().replace(observation=ones, next_observation=ones, action=action, bootstrap=action == 1)
    part = part.replace(weight=jnp.ones(BATCH, bool))

    @jax.jit
    def learned(state):
        def step(state, key):
            batch = {"replay": part, "demonstrations": part}
            return resolved.update(state, batch, spec=CHOICE, key=key, replicas=SingleReplica())[0], None

        return jax.lax.scan(step, state, jax.random.split(KEY, 400))[0]

    resolved = resolve_schedules(algo, jnp.float32(0))
    state = learned(initial(algo, CHOICE))
    values = Observations(ones[:1]).critic_output(algo.critic, state.critic.variables, None, CHOICE)[0]
    return float(values.mean(axis=0)[0] @ jnp.asarray([1.0, -1.0]))


@pytest.mark.long
@pytest.mark.parametrize("reward", ["gail", "airl"])
def test_an_absorbing_state_makes_ending_as_good_as_going_on(reward):
    """Kostrikov et al., section 4.1: rewards of one sign alone favor long or short episodes, whatever was shown."""
    assert abs(preference(reward, True)) < 0.05


@pytest.mark.long
def test_without_one_positive_rewards_favor_survival():
    assert preference("gail", False) < -0.3


# --- imitating -------------------------------------------------------------------------------------------------------


class Episodes(list):
    """A dataset in memory."""

    path = "memory"

    @property
    def lengths(self):
        return np.array([episode.length for episode in self])


SHOWN = -1.0


def demonstrations(number=128):
    """Episodes of one step in `probe:ActionReward`, whose reward is best at 0.5, of actions about `SHOWN`."""
    last, rng = np.arange(2)[:, None] == 1, np.random.default_rng(0)
    found, cutter = Episodes(), EpisodeCutter(num_envs=1)
    for _ in range(number):
        rows = Trajectory(
            observation=last[..., None].astype(np.float32),
            action=np.where(last[..., None], 0.0, rng.normal(SHOWN, 0.1, (1, 1, 1))).astype(np.float32),
            reward=np.where(last, 0.0, 9.0).astype(np.float32),
            terminated=~last,
            truncated=np.zeros((2, 1), bool),
            first=~last,
            weight=~last,
        )
        found += [episode for _, episode in cutter.add(rows)]
    return found


@pytest.mark.long
def test_it_does_what_was_shown_and_not_what_is_rewarded():
    algo = jaxrl.GAIL(
        gamma=0.9,
        learning_rate=jaxrl.schedules.Linear(1e-2, 0.0),
        gradient_penalty=0.1,
        temperature=Temperature(initial=0.1, learned=False),
        tau=0.05,
        capacity=32_768,
        min_size=2_048,
        batch_size=64,
        rollout_length=4,
        replay_ratio=1 / 16,
        policy=Actor(widths=(32,)),
        critic=Critic(widths=(32,)),
        discriminator=Critic(widths=(32,), activation="tanh", ensemble=1),
    )
    env = jaxrl.make("probe:ActionReward", continuous=True)
    result = jaxrl.train(
        algo, env, dataset=demonstrations(), total_steps=24_000, num_envs=16, evaluate_every=0, progress=False
    )
    action, _ = result.policy(np.zeros((1, 1), np.float32))
    assert float(action[0, 0]) == pytest.approx(SHOWN, abs=0.15)
