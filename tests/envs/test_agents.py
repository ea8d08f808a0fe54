"""Environments of several agents, as rows of the batch: each row against the environment stepped by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers.refused import raises, refused
from helpers.tiers import one_quick

import jaxrl
from jaxrl.algos import returns
from jaxrl.buffers import ring, transitions
from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError, EnvironmentContractError
from jaxrl.core.types import ActorState, EnvSpec, Rollout, num_agents
from jaxrl.envs.episode import restart, transition
from jaxrl.run.policies.opponents import RandomActions, evaluated_rows, opposed

AGENTS = 3
LIMIT = 7
SMALL = jaxrl.PPO(rollout_length=8, minibatches=1, epochs=1, network=jaxrl.networks.ActorCritic())


class Relay(struct.PyTreeNode):
    """Agent i ends after `lengths[i]` steps, unless all are cut off; who agrees with the next one is rewarded."""

    limit: jax.Array | int = LIMIT
    lengths: tuple[int, ...] = struct.field(pytree_node=False, default=(2, 3, 5))
    forgets: bool = struct.field(pytree_node=False, default=False)  # does not repeat endings
    named: bool = struct.field(pytree_node=False, default=False)  # agent i is rewarded for action i, and may take all

    name, resets, num_agents = "test:Relay", False, AGENTS
    observation_space = spaces.Box(0.0, 100.0, (AGENTS + 1,))
    action_space = spaces.Discrete(3)

    def reset(self, key):
        start = jax.random.randint(key, (), 0, 3)  # of the clock that masks
        return (jnp.zeros((), jnp.int32), start), jax.vmap(restart)(*self._seen(jnp.zeros((), jnp.int32), start))

    def step(self, state, action, key):
        t, start = state[0] + 1, state[1]
        done = (t == np.asarray(self.lengths)) if self.forgets else (t >= np.asarray(self.lengths))
        observation, mask = self._seen(t, start)
        over = jnp.broadcast_to(t >= self.limit, (AGENTS,))
        right = jnp.arange(AGENTS) if self.named else jnp.roll(action, -1)
        reward = (action == right).astype(jnp.float32) * t.astype(jnp.float32)
        return (t, start), jax.vmap(transition)(observation, reward, done, over, mask)

    def _seen(self, t, start):
        clock = jnp.broadcast_to(t.astype(jnp.float32), (AGENTS, 1))
        mask = (jnp.arange(3)[None] != (t + start + jnp.arange(AGENTS)[:, None]) % 3) | self.named
        return jnp.concatenate([jnp.eye(AGENTS), clock], axis=-1), mask


def prepared(**options):
    return jaxrl.envs.prepared(Relay(**options))


def played(env, games, steps, seed=0):
    """Time steps [steps + 1, rows, ...] of random legal play, and the actions [steps, rows], as numpy."""
    rows = games * AGENTS

    def one(carry, key):
        state, timestep = carry
        key_action, key_step = jax.random.split(key)
        action = jax.random.categorical(key_action, jnp.where(timestep.action_mask, 0.0, -jnp.inf)).astype(jnp.int32)
        state, timestep = jax.vmap(env.step)(state, action, jax.random.split(key_step, rows))
        return (state, timestep), (timestep, action)

    def play(key):
        key_reset, key_steps = jax.random.split(key)
        first = jax.vmap(env.reset)(jax.random.split(key_reset, rows))
        timesteps, actions = jax.lax.scan(one, first, jax.random.split(key_steps, steps))[1]
        return jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), first[1], timesteps), actions

    return jax.device_get(jax.jit(play)(jax.random.key(seed)))


@pytest.mark.parametrize("limit", [LIMIT, 4], ids=["all_end", "cut_off"])
def test_each_row_is_its_agent_until_all_are_over(limit):
    games, steps = 2, 14
    seen, actions = played(prepared(limit=limit), games, steps)
    lengths = (2, 3, 5)
    for game in range(games):
        t, returns = 0, np.zeros(AGENTS)
        mine = slice(game * AGENTS, (game + 1) * AGENTS)
        for step in range(steps):
            before = jax.tree.map(lambda x, step=step, mine=mine: x[step, mine], seen)
            now = jax.tree.map(lambda x, step=step, mine=mine: x[step + 1, mine], seen)
            action = actions[step, mine]
            assert before.action_mask[range(AGENTS), action].all()
            if before.last.all():  # of all: the next episode begins, whatever was done
                t, returns = 0, np.zeros(AGENTS)
                assert now.first.all() and not now.last.any() and not now.reward.any() and not now.episode.returns.any()
            else:
                t += 1
                reward = (action == np.roll(action, -1)) * float(t)
                returns += reward
                np.testing.assert_array_equal(now.reward, reward)
                np.testing.assert_array_equal(now.terminated, [t >= length for length in lengths])
                np.testing.assert_array_equal(now.truncated, [t >= limit and t < length for length in lengths])
                assert not now.first.any()
            np.testing.assert_array_equal(now.observation[:, :AGENTS], np.eye(AGENTS))
            np.testing.assert_array_equal(now.observation[:, AGENTS], t)
            np.testing.assert_array_equal(now.episode.returns, returns)
            np.testing.assert_array_equal(now.episode.length, t)
            np.testing.assert_array_equal(now.episode.complete, now.last.all())


class Sacrifice(struct.PyTreeNode):
    """Agent 0 may die by its first action: after 5 steps both are paid 1 if it did, else 0.1."""

    name, resets, num_agents = "test:Sacrifice", False, 2
    observation_space, action_space = spaces.Box(0.0, 5.0, (2,)), spaces.Discrete(2)

    def reset(self, key):
        return self._moment(jnp.int32(0), jnp.ones(2, bool))

    def step(self, state, action, key):
        return self._moment(state[0] + 1, state[1] & ((state[0] > 0) | (action == 0) | jnp.array([False, True])))

    def _moment(self, t, active):
        reward = jnp.where(t < 5, 0.0, jnp.where(active[0], 0.1, 1.0))
        seen = jnp.stack([jnp.full(2, t, jnp.float32), active.astype(jnp.float32)], axis=-1)
        both = jax.vmap(lambda seen, active: transition(seen, reward, t >= 5, False, active=active))(seen, active)
        return (t, active), both.replace(first=jnp.full(2, t == 0))


def test_returns_run_through_the_rows_of_an_agent_that_is_out():
    """To what its team is paid at the end: by Monte-Carlo returns, and by transitions of a replay."""
    env, keys = jaxrl.envs.prepared(Sacrifice()), jax.random.split(jax.random.key(0), 2)
    step = lambda state, _: jax.vmap(env.step)(state, jnp.ones(2, jnp.int32), keys)  # noqa: E731
    timesteps = jax.lax.scan(step, jax.vmap(env.reset)(keys)[0], length=12)[1]
    rollout = Rollout(timesteps, jnp.zeros((11, 2)), {}, carry=(), final_carry=())
    rows, nothing = rollout.rows, jnp.zeros((11, 2))
    assert rollout.active[5:, 0].tolist() == [1, 0, 0, 0, 0, 0] and rows.weight[5:, 0].tolist() == [1, 1, 1, 1, 1, 0]
    found = returns.gae(returns.Segment.of_rows(rows, nothing, nothing[0]), 0.5, 1.0)
    assert found[5:, 0].tolist() == [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 0]
    stored = ring.add(ring.init(rows, (), rows.reward.shape[1], 11, 11, False), rows, ())
    item = transitions.gather(stored, jnp.int32([5]), jnp.int32([0]), 5, None)
    assert item.rewards.tolist() == [[0, 0, 0, 0, 1]] and not item.bootstrap[0]


def test_it_keeps_the_protocol_and_says_what_does_not():
    jaxrl.check_env(Relay(), steps=12)
    raises(EnvironmentContractError, "first is not set", jaxrl.check_env, Relay(forgets=True), steps=12)


class Plain(Relay):
    """Without leaves, which JAX may otherwise put placeholders in."""

    limit: int = struct.field(pytree_node=False, default=LIMIT)


WRAPPERS = {
    "stack": lambda env: jaxrl.envs.FrameStack(env, 2),
    "flat": jaxrl.envs.Flatten,
    "hidden": lambda env: jaxrl.envs.Hide(env, (0,)),
    "sticky": lambda env: jaxrl.envs.StickyActions(env, 0.5),
    "scaled": lambda env: jaxrl.envs.ScaleReward(env, 2.0),
    "clipped": lambda env: jaxrl.envs.ClipReward(env, -1.0, 1.0),
    "limited": lambda env: jaxrl.envs.TimeLimit(env, 4),
    "repeated": lambda env: jaxrl.envs.ActionRepeat(env, 2),
    "pooled": jaxrl.envs.PooledReset,
}


@pytest.mark.parametrize("kind", [Relay, Plain])
@pytest.mark.parametrize("wrapper", one_quick(WRAPPERS, "stack", "limited"))
def test_wrappers_are_of_a_row_or_of_all(wrapper, kind):
    env = WRAPPERS[wrapper](kind())
    jaxrl.check_env(env, steps=12)
    rows = jaxrl.envs.prepared(env)
    assert num_agents(rows) == AGENTS and jaxrl.envs.prepared(rows) is rows
    seen, _ = played(rows, 1, 12)
    lengths = seen.episode.length[seen.episode.complete.all(axis=1)]
    assert len(lengths) and set(lengths.ravel()) == {{"limited": 4, "repeated": 3}.get(wrapper, 5)}


@pytest.mark.parametrize("agents", [3, True, 0])
def test_an_attribute_of_that_name_is_an_axis_of_the_time_steps(agents):
    class Alone(struct.PyTreeNode):
        name, resets, num_agents = "test:Alone", False, agents
        observation_space, action_space = spaces.Box(0.0, 1.0, (1,)), spaces.Discrete(2)

        def reset(self, key):
            return jnp.zeros(()), restart(jnp.zeros((1,)))

        def step(self, state, action, key):
            return state, transition(jnp.zeros((1,)), jnp.ones(()), jnp.ones((), bool), jnp.zeros((), bool))

    raises(EnvironmentContractError, f"num_agents.*{agents}", jaxrl.check_env, Alone())


def test_rows_are_those_of_whole_environments():
    env = prepared()
    assert num_agents(env) == AGENTS and jaxrl.envs.prepared(env) is env
    raises(
        ConfigError,
        r"4 rows .*multiple of 3",
        jax.eval_shape,
        jax.vmap(env.reset),
        jax.random.split(jax.random.key(0), 4),
    )
    raises(
        ConfigError,
        r"num_envs=8 .*use 6 or 9",
        jaxrl.train,
        SMALL,
        Relay(),
        total_steps=100,
        num_envs=8,
        progress=False,
    )


def test_runs_of_several_seeds_are_the_same_in_one_program():
    def play(key):
        state, timestep = jax.vmap(prepared().reset)(jax.random.split(key, AGENTS))
        return timestep.action_mask

    keys = jax.random.split(jax.random.key(1), 2)
    np.testing.assert_array_equal(jax.vmap(play)(keys), [play(key) for key in keys])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("agents")
    jaxrl.register("test:Relay", Relay)
    result = jaxrl.train(SMALL, Relay(), total_steps=800, seed=3, run_dir=path / "run", progress=False)
    return path, result


def test_training_counts_games_and_learns_from_what_agents_lived(trained):
    _, result = trained
    assert result.config["topology"]["num_envs"] == 8 * AGENTS  # 8 environments
    lengths = [row["train/length_mean"] for row in result.metrics if "train/length_mean" in row]
    assert lengths and set(lengths) == {5.0}  # of the longest agent: all count the game


def test_an_evaluation_counts_every_agent_and_against_an_opponent_one(trained):
    path, result = trained
    all_of_them = result.evaluate(9, seed=1)
    assert all_of_them.episodes == 9 and set(all_of_them.lengths) == {5}
    # Against itself the same games are played, and one agent of each counts.
    alone = result.evaluate(1, seed=1, opponent=result.policy)
    mine = evaluated_rows(9, AGENTS)
    np.testing.assert_array_equal(mine, np.eye(AGENTS, dtype=bool).ravel())
    np.testing.assert_array_equal(alone.returns, all_of_them.returns[mine])
    for directory in (path / "run", str(path / "run")):
        again = result.evaluate(1, seed=1, opponent=directory)
        np.testing.assert_array_equal(again.returns, alone.returns)
    against = result.evaluate(64, seed=1, opponent="random")
    assert against.episodes >= 64 and against.unfinished == 0
    (path / "empty").mkdir()
    wrong = "must be 'random', a policy or the directory of a run"
    for opponent, match in (
        ("rndom", f"^opponent='rndom' {wrong}: .*rndom"),
        (path / "empty", f"{wrong}: .*empty is not a run directory"),
        (3, "opponent=3"),
    ):
        raises(ConfigError, match, result.evaluate, 2, opponent=opponent)
    refused(lambda: opposed(SMALL, result.policy.actor, "random", jaxrl.make("gymnax:CartPole-v1")), "several agents")


@pytest.mark.long
def test_what_agents_lived_is_recorded_apart(tmp_path):
    """An agent that ended is not recorded while it waits, and the next episode is its own."""
    pytest.importorskip("tensorflow_datasets")
    jaxrl.train(SMALL, Relay(), total_steps=400, num_envs=6, progress=False, record=tmp_path / "lived")
    episodes = list(jaxrl.load_dataset(f"rlds:{tmp_path / 'lived'}"))
    lived = [(int(np.argmax(one.observation[0, :AGENTS])), len(one.reward) - 1) for one in episodes]
    assert len(lived) >= 30 and set(lived) >= {(0, 2), (1, 3), (2, 5)}
    # The recording was cut off within an episode.
    assert all(steps <= (2, 3, 5)[agent] for agent, steps in lived)


FAMILIES = {
    "replay": jaxrl.DQN(),
    "recurrent": jaxrl.PPO(learning_rate=3e-3, network=jaxrl.networks.ActorCritic(core=jaxrl.networks.GRU(8))),
}


@pytest.mark.parametrize("algo", FAMILIES)
@pytest.mark.long
def test_other_families_learn_what_is_each_agents_own(algo):
    """One policy tells the agents apart: each is paid for an action of its own, the number of the step."""
    env = Relay(named=True)
    result = jaxrl.train(FAMILIES[algo], env, total_steps=20_000, seed=0, evaluate_every=0, progress=False)
    # While it lives; then it acts on until the episode is over, and is not trained there. By chance it is 5.
    assert result.evaluate(30).return_mean >= ((1 + 2) + (1 + 2 + 3) + (1 + 2 + 3 + 4 + 5)) / 3


@pytest.mark.parametrize("algo", FAMILIES)
@pytest.mark.long
def test_a_death_that_wins_is_learned(algo):
    result = jaxrl.train(FAMILIES[algo], Sacrifice(), total_steps=12_000, evaluate_every=0, progress=False)
    assert result.evaluate(4).return_mean == pytest.approx(1.0)


def test_a_random_opponent_keeps_to_the_masks_of_every_kind_of_action():
    keys, count = jax.random.split(jax.random.key(0), 4000), 4000
    parts = spaces.Dict(
        {"push": spaces.Discrete(3), "turn": spaces.MultiDiscrete((2, 2)), "by": spaces.Box(-1, 1, (2,))}
    )
    mask = {"push": jnp.array([True, False, True]), "turn": jnp.array([True, False, True, True])}
    spec = EnvSpec("test:parts", spaces.Box(0, 1, (1,)), parts)
    timestep = restart(jnp.zeros((1,)), jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), mask))
    action = RandomActions().act(ActorState(()), timestep, (), keys, spec=spec, explore=True).action
    pushes, turns = np.bincount(action["push"], minlength=3), np.asarray(action["turn"])
    np.testing.assert_allclose(pushes / count, [0.5, 0.0, 0.5], atol=0.03)
    assert not turns[:, 0].any() and abs(turns[:, 1].mean() - 0.5) < 0.03 and action["by"].shape == (count, 2)
