"""Evaluation: a fixed quota of complete episodes of every environment, with everything of the policy frozen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers.programs import ALGORITHMS, ENV, NUM_ENVS, PPO, ROWS, assert_equal, train
from helpers.served import ServedFromHost
from helpers.tiers import one_quick

import jaxrl
from jaxrl import envs
from jaxrl.core import keys, spaces
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import env_spec
from jaxrl.envs.episode import restart, transition
from jaxrl.envs.host.time_steps import environment_seeds
from jaxrl.parallel.rollout import first_timestep, with_previous_action
from jaxrl.run.directory.run_directory import read_config
from jaxrl.run.policies.evaluation import EPISODES, default_episodes, layout
from jaxrl.run.recording import policy_rows

LONG = 50


@struct.dataclass
class ShortOrLong:
    """Episodes of 1 or of 50 steps, even odds, reward 1 a step: an average over what ends first is far too low."""

    name = "test:ShortOrLong"
    observation_space = spaces.Box(-1.0, 1.0, (1,))
    action_space = spaces.Discrete(2)
    resets = False

    def reset(self, key):
        steps = jnp.where(jax.random.bernoulli(key), LONG, 1)
        return steps, restart(jnp.zeros(1))

    def step(self, state, action, key):
        left = state - 1
        return left, transition(jnp.zeros(1), jnp.float32(1.0), left == 0, jnp.bool_(False))


@struct.dataclass
class Long(ShortOrLong):
    """Episodes of 50 steps."""

    def reset(self, key):
        return jnp.int32(LONG), restart(jnp.zeros(1))


def prepare(algo, env, seed=0):
    """An untrained actor with parameters that matter."""
    env = envs.prepared(env)
    spec = env_spec(env)
    algo = resolve_schedules(algo, jnp.float32(0.0))
    learner = algo.init(jax.random.key(seed), spec)
    params = jax.tree.map(lambda x: x + 0.5 * jax.random.normal(jax.random.key(seed), x.shape), learner.network.params)
    learner = learner.replace(network=learner.network.replace(params=params))
    return algo, algo.actor(learner), env, spec


@pytest.mark.long
def test_every_environment_plays_the_same_number_of_episodes():
    algo, actor, env, spec = prepare(PPO, ShortOrLong())
    result = jaxrl.evaluate(algo, actor, env, spec, episodes=256, num_envs=32)
    assert result.episodes == 256 and result.unfinished == 0
    assert set(np.unique(result.lengths)) == {1, LONG}
    np.testing.assert_array_equal(result.returns, result.lengths.astype(np.float32))
    # 256 fair coins: the mean is 25.5 with a standard error of 1.5. The first 256 to end would give about 2.
    assert abs(result.return_mean - (1 + LONG) / 2) < 3 * 1.54
    assert result.return_std == pytest.approx(np.std(result.returns))


@pytest.mark.long
def test_what_is_not_finished_is_counted_and_not_averaged():
    algo, actor, env, spec = prepare(PPO, ShortOrLong())
    # 8 episodes in 8 times 5 rows: only those that are all short are done by then.
    result = jaxrl.evaluate(algo, actor, env, spec, episodes=256, num_envs=32, max_steps=5)
    assert set(np.unique(result.lengths)) == {1} and 32 < result.unfinished < 256
    assert result.episodes + result.unfinished == 256
    assert result.metrics()["unfinished"] == result.unfinished and result.return_mean == 1.0
    nothing = jaxrl.evaluate(algo, actor, env, spec, episodes=256, num_envs=32, max_steps=0)
    assert nothing.episodes == 0 and nothing.unfinished == 256 and np.isnan(nothing.return_mean)


@pytest.mark.long
@pytest.mark.parametrize("on_host", [False, True])
def test_the_last_of_the_longest_episodes_is_finished(on_host):
    """Between two episodes there is a step that only resets."""
    algo, actor, env, spec = prepare(PPO, Long())
    played = ServedFromHost(env) if on_host else env
    result = jaxrl.evaluate(algo, actor, played, spec, episodes=6, num_envs=2, max_steps=LONG)
    assert result.unfinished == 0 and list(result.lengths) == [LONG] * 6
    assert jaxrl.evaluate(algo, actor, played, spec, episodes=6, num_envs=2, max_steps=LONG - 1).unfinished == 2


def test_layout():
    assert layout(128, None) == (128, 1) and layout(5, None) == (5, 1) and layout(1000, None) == (128, 8)
    assert layout(10, 4) == (4, 3) and layout(3, 64) == (3, 1)
    assert layout(129, None) == (128, 2), "rounded up to a multiple of the environments"


def played_in_python(algo, actor, env, spec, seed, num_envs, quota, *, forget=False, explore=False):
    """The same evaluation as plain loops: returns of each environment's first episodes."""
    root = keys.evaluation_key(jax.random.key(seed))
    index = jnp.arange(num_envs)
    env_roots, act_roots = keys.environment_keys(root, index), keys.policy_keys(root, index)
    state, timestep = jax.vmap(env.reset)(keys.reset_keys(env_roots))
    timestep = first_timestep(timestep, spec)
    initial = carry = jax.vmap(lambda i: algo.initial_carry(spec, i, num_envs))(index)
    act = jax.jit(lambda timestep, carry, key: algo.act(actor, timestep, carry, key, spec=spec, explore=explore))
    step = jax.jit(jax.vmap(env.step))
    totals, returns, tick = np.zeros(num_envs), [[] for _ in range(num_envs)], 0
    while min(map(len, returns)) < quota:
        output = act(timestep, initial if forget else carry, keys.tick_keys(act_roots, jnp.uint32(tick), 1)[0])
        env_keys = keys.tick_keys(env_roots, jnp.uint32(tick), 1)[0]
        state, following = step(state, output.action, env_keys)
        timestep, carry, tick = with_previous_action(following, output.action), output.carry, tick + 1
        totals = np.where(np.asarray(timestep.first), 0.0, totals + np.asarray(timestep.reward))
        for i in np.flatnonzero(np.asarray(timestep.last)):
            returns[i].append(totals[i])
    return np.asarray([episodes[:quota] for episodes in returns]).T


@pytest.mark.long
@pytest.mark.parametrize("name", one_quick(ALGORITHMS, "ppo"))
def test_against_plain_loops(name):
    """With the recurrent state carried along, previous actions and rewards seen, and statistics as they are."""
    algo, actor, env, spec = prepare(ALGORITHMS[name], ENV)
    if name == "recurrent_ppo":
        skewed = jax.tree.map(lambda x: x + jnp.asarray(0.1, x.dtype), actor.statistics)
        actor = actor.replace(statistics=skewed)
    before = jax.tree.map(lambda x: np.array(x), actor)
    result = jaxrl.evaluate(algo, actor, env, spec, seed=3, episodes=12, num_envs=4)
    plain = played_in_python(algo, actor, env, spec, 3, 4, 3)
    np.testing.assert_array_equal(result.returns.reshape(3, 4), plain)
    assert len(set(result.returns)) > 1, "episodes of one length compare nothing"
    assert_equal(before, actor)
    if name == "recurrent_ppo":
        other = jaxrl.evaluate(
            algo, actor.replace(statistics=spoilt(actor)), env, spec, seed=3, episodes=12, num_envs=4
        )
        assert list(other.returns) != list(result.returns), "the statistics are not used"
        forgetful = played_in_python(algo, actor, env, spec, 3, 4, 3, forget=True)
        assert (forgetful != plain).any(), "the recurrent state makes no difference here, so this test shows nothing"


def spoilt(actor):
    return jax.tree.map(lambda x: x + jnp.asarray(5, x.dtype), actor.statistics)


@pytest.mark.long
def test_exploring_samples_actions():
    algo, actor, env, spec = prepare(PPO, ENV)
    sampled = jaxrl.evaluate(algo, actor, env, spec, seed=3, episodes=12, num_envs=4, explore=True)
    np.testing.assert_array_equal(
        sampled.returns.reshape(3, 4), played_in_python(algo, actor, env, spec, 3, 4, 3, explore=True)
    )
    greedy = jaxrl.evaluate(algo, actor, env, spec, seed=3, episodes=12, num_envs=4)
    assert list(sampled.returns) != list(greedy.returns)


@pytest.mark.long
def test_host_environments():
    algo, actor, env, spec = prepare(ALGORITHMS["recurrent_ppo"], ShortOrLong())
    host = ServedFromHost(env)
    result = jaxrl.evaluate(algo, actor, host, spec, episodes=30, num_envs=8, max_steps=2 * LONG)
    assert result.episodes == 32 and result.unfinished == 0 and set(np.unique(result.lengths)) == {1, LONG}
    cut = jaxrl.evaluate(algo, actor, host, spec, episodes=8, num_envs=8, max_steps=20)
    assert cut.episodes + cut.unfinished == 8 and cut.unfinished > 0


def test_host_environments_begin_other_episodes_than_in_training(monkeypatch):
    algo, actor, env, spec = prepare(PPO, ENV)
    host, built = ServedFromHost(env), []

    class Built(Exception):
        pass

    def build(_, num_envs, seed, first_env=0):
        built.append(seed)
        raise Built

    monkeypatch.setattr(ServedFromHost, "build", build)
    for seed in (3, 3, 4):
        with pytest.raises(Built):
            jaxrl.evaluate(algo, actor, host, spec, seed=seed, episodes=8)
    policy = jaxrl.Policy(algo, actor, spec)
    with pytest.raises(Built):
        next(policy_rows.play(policy, host, env_index=np.arange(8), all_envs=8, seed=3, explore=False))
    evaluation, again, other, exported = built
    assert evaluation == again == exported != other
    streams = [environment_seeds(seed, 128) for seed in (3, 4, evaluation, other)]
    assert len({seed for stream in streams for seed in stream}) == 4 * 128


@pytest.mark.long
@pytest.mark.parametrize(("given", "played"), one_quick([(None, 10), (12, 12)]), ids=str)
def test_a_run_on_the_host_plays_few_episodes_unless_it_says(given, played, tmp_path):
    """Each is played step by step; ten evaluations of 128 would be more steps than many a run."""
    topology = jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, lockstep=True)
    settings = {"env": ServedFromHost(ENV), "topology": topology, "evaluate_every": 0, "evaluation_episodes": given}
    result = train(tmp_path / "run", total_steps=ROWS, **settings)
    assert result.evaluation.episodes == played
    assert read_config(tmp_path / "run")["logging"]["evaluation_episodes"] == played
    assert default_episodes(ENV) == EPISODES == 128
