"""Search by the environment itself: what it finds, what it does at ends, and what AlphaZero learns of it.

The game is Nim: a heap, of which two players take 1 to 3 by turns; who takes the last wins. One who can always leaves a
multiple of 4, and who meets one has lost.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers.programs import resumed
from helpers.refused import raises
from helpers.suite_samples import needs
from helpers.tiers import one_quick

import jaxrl
from jaxrl.algos.alphazero import Node
from jaxrl.algos.search import Expansion, TreeSearch
from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError, MissingExtraError
from jaxrl.core.planning import Model
from jaxrl.core.types import EnvSpec, env_spec
from jaxrl.envs.episode import AutoReset, EpisodeStatistics, PooledReset, restart, transition
from jaxrl.envs.suite import model_of
from jaxrl.networks import GRU, MLP, ActorCritic
from jaxrl.parallel import rollout as ro
from jaxrl.run.policies.policy import Policy

MOST = 9  # in a heap
ROOTS = jnp.arange(1, MOST + 1, dtype=jnp.int32)


@struct.dataclass
class Nim:
    """The heap is one-hot, and drawn at the reset."""

    name: str = struct.field(pytree_node=False, default="nim")
    resets: bool = struct.field(pytree_node=False, default=False)
    observation_space: Any = struct.field(pytree_node=False, default=spaces.Box(0.0, 1.0, (MOST + 1,)))
    action_space: Any = struct.field(pytree_node=False, default=spaces.Discrete(3))

    def _seen(self, heap):
        mask = jnp.arange(1, 4) <= jnp.maximum(heap, 1)
        return (jnp.arange(MOST + 1) == heap).astype(jnp.float32), mask

    def reset(self, key):
        heap = jax.random.randint(key, (), 1, MOST + 1, jnp.int32)
        observation, mask = self._seen(heap)
        return heap, restart(observation, mask, discount=1.0)

    def step(self, heap, action, key):
        heap = jnp.maximum(heap - action.astype(jnp.int32) - 1, 0)
        observation, mask = self._seen(heap)
        won = heap == 0
        return heap, transition(observation, won, won, jnp.zeros((), bool), mask, discount=-1.0)


def begun(env, algo, state, timestep):
    """The algorithm, its actor whose network says 0 of everything, the time step to act at, and the model."""
    spec = env_spec(env)
    algo = algo.resolve(spec, 1)
    actor = algo.actor(algo.init(jax.random.key(0), spec))
    actor = actor.replace(params=jax.tree.map(jnp.zeros_like, actor.params))
    count = timestep.first.shape[0]
    carry = jax.vmap(lambda n: algo.initial_carry(spec, n, count))(jnp.arange(count))
    return algo, actor, ro.first_timestep(timestep, spec), carry, Model(env, state), spec


def planned(env, algo, state, timestep, *, explore=False, seed=3):
    algo, actor, timestep, carry, model, spec = begun(env, algo, state, timestep)

    @jax.jit
    def plan(model, timestep, carry, keys):
        return algo.plan(actor, timestep, carry, keys, model=model, spec=spec, explore=explore)

    return plan(model, timestep, carry, jax.random.split(jax.random.key(seed), len(timestep.first)))


def heaps(env=None):
    """Every heap, as a batch."""
    env = Nim() if env is None else env
    timestep = jax.vmap(lambda heap: restart(*env._seen(heap), discount=1.0))(ROOTS)
    return env, ROOTS, timestep


@pytest.mark.parametrize(("kind", "explore"), one_quick([("gumbel", True), ("gumbel", False), ("puct", False)]))
def test_a_search_without_knowledge_finds_the_winning_moves(kind, explore):
    env, state, timestep = heaps()
    algo = jaxrl.AlphaZero(tree_search=TreeSearch(simulations=200, kind=kind), network=ActorCritic(MLP((4,))))
    found = planned(env, algo, state, timestep, explore=explore)
    for heap, action in zip(np.asarray(ROOTS), np.asarray(found.action), strict=True):
        assert action + 1 <= heap, "allowed"
        if heap % 4:
            assert action + 1 == heap % 4, heap
    if explore:
        policy = np.asarray(found.extras["search_policy"])
        np.testing.assert_allclose(policy.sum(-1), 1.0, rtol=1e-5)
        assert (policy[~np.asarray(timestep.action_mask)] == 0).all()
        winning = np.asarray(ROOTS) % 4 != 0
        np.testing.assert_array_equal(policy.argmax(-1)[winning], np.asarray(ROOTS)[winning] % 4 - 1)


@pytest.mark.long
def test_a_plan_depends_on_its_own_state_and_key_alone():
    env, state, timestep = heaps()
    algo = jaxrl.AlphaZero(tree_search=TreeSearch(simulations=8), network=ActorCritic(MLP((4,))))
    algo, actor, timestep, carry, model, spec = begun(env, algo, state, timestep)
    keys = jax.random.split(jax.random.key(0), MOST)

    @jax.jit
    def plan(rows):
        parts = jax.tree.map(lambda x: x[rows], (timestep, carry, keys))
        one = model.replace(state=model.state[rows])
        return algo.plan(actor, *parts, model=one, spec=spec, explore=True)

    together = plan(jnp.arange(MOST))
    for pair in ([0, 1], [8, 3], [5, 5]):
        alone = plan(jnp.asarray(pair))
        np.testing.assert_array_equal(alone.action, together.action[np.asarray(pair)])
        np.testing.assert_allclose(alone.extras["search_policy"], together.extras["search_policy"][np.asarray(pair)])


def test_random_actions_are_drawn_apart_from_the_noise_of_the_search():
    """By the same numbers, the action whose noise decides whether to act at random would be the most frequent one."""
    batch, actions = 4096, 4
    algo = jaxrl.AlphaZero(tree_search=TreeSearch(simulations=4, epsilon=0.5))
    zeros = jnp.zeros((batch,))
    root = Expansion(jnp.zeros((batch, actions)), zeros, zeros)
    keys = jax.random.split(jax.random.key(0), batch)

    def expand(node, action, key):
        return Expansion(jnp.zeros(actions), node, node)

    plan = jax.jit(lambda: algo.tree_search.plan(root, expand, keys, mask=None, explore=True))()
    assert np.abs(np.bincount(plan.action, minlength=actions) / batch - 1 / actions).max() < 0.03


@pytest.mark.parametrize("bootstrap", [True, False])
def test_an_episode_that_is_over_stays_where_it_ended(bootstrap):
    """A reset would show 0 in the place of the last observation, pay another reward, and so on for ever."""
    env = jaxrl.make("probe:Truncated", max_steps=2)
    raw = model_of(env, jax.eval_shape(env.reset, jax.random.key(0))[0]).env
    assert not raw.resets and env.resets
    for episodic, resetting in ((raw, False), (env, True)):
        algo = jaxrl.AlphaZero(gamma=0.9, bootstrap_truncated=bootstrap)
        state, timestep = jax.vmap(episodic.reset)(jax.random.split(jax.random.key(0), 1))
        algo, actor, timestep, carry, model, spec = begun(episodic, algo, state, timestep)
        params = algo.init(jax.random.key(0), spec).network.params
        params["value"]["head"]["output"]["bias"] += 2.0
        actor = actor.replace(params=params)
        (logits, value), _ = algo._evaluate(actor, timestep, carry.network, spec)
        node = Node(state, carry.network, timestep.last, (logits, value))
        node = jax.tree.map(lambda x: x[0], node)
        expand = jax.jit(functools.partial(algo._expand, actor, model, spec))
        steps = []
        for number in range(4):
            found = expand(node, jnp.int32(0), jax.random.key(number))
            node = found.node
            steps.append((float(found.reward), float(found.discount), bool(node.over), float(found.value)))
        of_last = steps[1][3]
        assert of_last == pytest.approx(2.0, abs=0.5)
        ending = 0.9 if bootstrap else 0.0
        wanted = [(1.0, 0.9, False), (1.0, ending, True), (0.0, 1.0, True), (0.0, 1.0, True)]
        assert [step[:3] for step in steps] == [pytest.approx(one) for one in wanted], resetting
        assert [step[3] for step in steps[2:]] == [of_last, of_last]


def test_a_model_is_what_is_under_statistics_and_resets():
    env = Nim()
    for around in (AutoReset(EpisodeStatistics(env)), PooledReset(EpisodeStatistics(env)), AutoReset(env), env):
        state, _ = around.reset(jax.random.key(0))
        model = model_of(around, state)
        assert model.env == env and int(model.state) == int(Nim().reset(jax.random.key(0))[0])


SMALL = jaxrl.AlphaZero(
    tree_search=TreeSearch(simulations=16),
    rollout_length=8,
    minibatches=4,
    learning_rate=1e-2,
    network=ActorCritic(MLP((16,))),
)
SETTINGS = {"num_envs": 16, "evaluate_every": 0, "evaluation_episodes": 4, "progress": False, "seed": 3}


@needs("pgx")
def test_agents_of_one_episode_act_by_the_network(monkeypatch):
    """A search of one of them would move the others by what their own searches try."""
    monkeypatch.setattr(jaxrl.AlphaZero, "plan", lambda *_, **__: pytest.fail("searched"))
    env = jaxrl.make("pgx:tic_tac_toe", opponent="self")
    spec, index, roots = env_spec(env), jnp.arange(2), jax.random.split(jax.random.key(0), 2)
    algo = SMALL.resolve(spec, 2)

    def run():
        acting = ro.begin(algo, env, roots, index, spec=spec, num_envs=2)
        actor = algo.actor(algo.init(roots[0], spec))
        return ro.unroll(algo, actor, env, acting, (roots[None], roots[None]), spec=spec, explore=False)[1]

    assert jax.eval_shape(run).action.shape == (1, 2)


def test_it_learns_nim():
    """Its policy, without a search, wins every heap that can be won; its value says which those are."""
    whole = jaxrl.train(SMALL, Nim(), total_steps=8_192, **SETTINGS)
    for heap in range(1, MOST + 1):
        observation, mask = jax.tree.map(np.asarray, Nim()._seen(heap))
        action, _ = whole.policy(observation, action_mask=mask)
        if heap % 4:
            assert action + 1 == heap % 4, heap


def test_it_resumes_bit_for_bit(tmp_path):
    resumed(tmp_path, SMALL, Nim(), 1_024, **SETTINGS)


@pytest.mark.parametrize("kind", ["gumbel", "puct"])
def test_networks_with_a_memory_and_normalized_inputs_and_rewards(kind):
    network = ActorCritic(MLP((8,)), core=GRU(4), previous_action=True, previous_reward=True)
    algo = SMALL.replace(
        tree_search=TreeSearch(simulations=2, kind=kind),
        network=network,
        normalize_observation=True,
        normalize_reward=True,
    )
    result = jaxrl.train(algo, "gymnax:CartPole-v1", total_steps=512, **SETTINGS)
    assert result.evaluation.episodes == 4
    assert float(result.policy.actor.statistics.reward.moments["array"].variance) > 0.0


def test_a_policy_without_an_environment_acts_by_its_prior():
    env = jaxrl.make("gymnax:CartPole-v1")
    spec = env_spec(env)
    algo = SMALL.resolve(spec, 8)
    actor = algo.actor(algo.init(jax.random.key(1), spec))
    policy = Policy(algo, actor, spec, None)
    seen = np.random.default_rng(0).uniform(-1, 1, (6, 4)).astype(np.float32)
    by_ppo = jaxrl.PPO(network=algo.network).resolve(spec, 8)
    prior = Policy(by_ppo, by_ppo.actor(by_ppo.init(jax.random.key(1), spec)), spec, None)
    np.testing.assert_array_equal(policy(seen)[0], prior(seen)[0])


def test_what_it_cannot_plan_in_is_refused_in_a_line(monkeypatch):
    spec = env_spec(Nim())
    several = EnvSpec("two", spec.observation_space, spec.action_space, num_agents=2)
    [line] = jaxrl.AlphaZero(minibatches=1).resolve(several, 8).validate(several, 8, 1)
    assert "turns" in line
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"jaxrl\[search\]"):
        jaxrl.AlphaZero().resolve(spec, 8).validate(spec, 8, 1)


# --- PGX's games by turns ---------------------------------------------------------------------------------------------


def position(env, moves):
    state, timestep = env.reset(jax.random.key(0))
    for move in moves:
        state, timestep = env.step(state, jnp.int32(move), jax.random.key(0))
    return state, timestep


POSITIONS = {  # cells 0 to 8, row by row; the first player has those at even places
    "wins a row": ([0, 3, 1, 4], 2),
    "wins a diagonal": ([0, 1, 4, 2], 8),
    "the second wins": ([0, 3, 1, 4, 8], 5),
    "blocks a row": ([0, 4, 1], 2),
    "blocks a column": ([0, 1, 3], 6),
    "the first blocks": ([0, 4, 8, 3], 5),
}


@needs("pgx")
@pytest.mark.long
@pytest.mark.parametrize("kind", one_quick(["gumbel", "puct"]))
def test_tic_tac_toe_is_won_and_defended(kind):
    env = jaxrl.make("pgx:tic_tac_toe", opponent="turns").env.env  # without statistics and resets
    found = [position(env, moves) for moves, _ in POSITIONS.values()]
    state, timestep = jax.tree.map(lambda *x: jnp.stack(x), *found)
    assert timestep.discount.tolist() == [-1.0] * len(found)
    algo = jaxrl.AlphaZero(tree_search=TreeSearch(simulations=400, kind=kind), network=ActorCritic(MLP((4,))))
    action = planned(env, algo, state, timestep).action
    assert dict(zip(POSITIONS, action.tolist(), strict=True)) == {name: best for name, (_, best) in POSITIONS.items()}


@needs("pgx")
def test_turns_are_of_games_of_two():
    raises(ConfigError, r"'turns'; known: random, self", jaxrl.make, "pgx:sparrow_mahjong", opponent="turns")
    raises(ConfigError, r"parameter .* 'opponent'", jaxrl.make, "pgx:2048", opponent="turns")


@needs("pgx")
@pytest.mark.long
def test_turns_are_the_game_of_both_players():
    """Rewards are of who moved, observations of who moves next, and the returns of both add up to 0."""
    env = jaxrl.make("pgx:tic_tac_toe", opponent="turns").env.env
    state, timestep = env.reset(jax.random.key(5))
    seats = [int(state.seat)]
    for move in (0, 3, 1, 4):
        board = np.asarray(timestep.observation).reshape(9, 2)
        state, timestep = env.step(state, jnp.int32(move), jax.random.key(0))
        after = np.asarray(timestep.observation).reshape(9, 2)
        assert after[move, 1] and not after[move, 0], "the move is now the other's"
        np.testing.assert_array_equal(np.delete(after, move, 0), np.delete(board, move, 0)[:, ::-1])
        assert float(timestep.discount) == -1.0 and float(timestep.reward) == 0.0
        seats.append(int(state.seat))
    assert seats == [seats[0], 1 - seats[0]] * 2 + [seats[0]]
    state, timestep = env.step(state, jnp.int32(2), jax.random.key(0))
    assert bool(timestep.terminated) and float(timestep.reward) == 1.0 and float(timestep.discount) == 0.0
    jaxrl.check_env(jaxrl.make("pgx:tic_tac_toe", opponent="turns"))


@needs("pgx")
@pytest.mark.long
@pytest.mark.parametrize("opponent", ["random", "turns"])
def test_games_of_two_are_planned_by_turns(opponent):
    """Against random moves a search would hope that a threat is overlooked."""
    env = jaxrl.make("pgx:tic_tac_toe", opponent=opponent)
    state, timestep = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 4))
    model = model_of(env, state)
    assert model.env.opponent == "turns" and not model.env.resets
    np.testing.assert_array_equal(model.state.seat, model.state.game.current_player)
    after = jax.vmap(model.env.step)(model.state, jnp.full((4,), 4), jax.random.split(jax.random.key(1), 4))[1]
    played = after.observation.sum((1, 2, 3)) - timestep.observation.sum((1, 2, 3))
    assert played.tolist() == [1, 1, 1, 1] and after.discount.tolist() == [-1.0] * 4
