"""What the on-policy algorithms share: clipping, statistics, and the value that they bootstrap from."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.on_policy import SPEC, B, T, collect, learner, moments, updated
from helpers.programs import assert_equal

import jaxrl
from jaxrl.algos import returns
from jaxrl.algos.on_policy import WholeEpisodes
from jaxrl.core import spaces
from jaxrl.core.schedules import Linear, resolve_schedules
from jaxrl.core.types import EnvSpec, NetworkInputs
from jaxrl.networks import GRU, MLP, ActorCritic, QNetwork

SEPARATE = ActorCritic(MLP((8,)))
PLAIN = {"rollout_length": T, "entropy_cost": 0.01}
ALGORITHMS = {
    "ppo": jaxrl.PPO(**PLAIN, learning_rate=1e-3, epochs=1, minibatches=1, network=SEPARATE, normalize_advantage=False),
    "a2c": jaxrl.A2C(**PLAIN, network=SEPARATE),
    "impala": jaxrl.IMPALA(**PLAIN, network=SEPARATE, reduction="mean"),
    "vmpo": jaxrl.VMPO(**PLAIN, epochs=1, minibatches=1, network=SEPARATE),
}


def sgd(rate):
    """Steps that show the size of a gradient."""
    return jaxrl.algos.optimizers.RMSProp(decay=0.0, eps=1e8)(rate * 1e4)  # g / sqrt(g^2 + 1e8)


def step_sizes(algo, scale):
    """How far an update moves policy and value, where rewards are `scale` times as large; and its metrics."""
    state = learner(algo)
    timesteps = moments()
    rollout = collect(algo, algo.actor(state), timesteps.replace(reward=timesteps.reward * scale), jax.random.key(3))
    new, info = updated(algo, state, rollout)
    moved = jax.tree.map(jnp.subtract, new.network.params, state.network.params)
    return {name: float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(moved[name])))) for name in moved}, info


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_large_value_loss_does_not_starve_the_policy(name):
    """With one norm over both networks a thousandfold reward's policy step is, of PPO, 0.001 of the clip."""
    algo = ALGORITHMS[name].replace(optimizer=sgd, learning_rate=1.0, max_grad_norm=0.5, value_cost=1000.0)
    apart, info = step_sizes(algo, 1000.0)
    assert apart["policy"] == pytest.approx(0.5, rel=1e-3) and apart["value"] == pytest.approx(0.5, rel=1e-3)
    metrics = info.metrics
    for part in ("policy", "value"):
        assert metrics[f"{part}_gradient_norm"] * metrics[f"{part}_clip_factor"] == pytest.approx(0.5, rel=1e-4)
    both = np.hypot(metrics["policy_gradient_norm"], metrics["value_gradient_norm"])
    assert metrics["gradient_norm"] == pytest.approx(both, rel=1e-5)
    joint, info = step_sizes(algo.replace(joint_grad_norm=True), 1000.0)
    assert joint["policy"] < 0.05 and np.hypot(*joint.values()) == pytest.approx(0.5, rel=1e-3)
    assert info.metrics["gradient_norm"] * info.metrics["clip_factor"] == pytest.approx(0.5, rel=1e-4)
    assert "policy_clip_factor" not in info.metrics and "policy_gradient_norm" in info.metrics


@pytest.mark.long
def test_a_shared_body_is_clipped_as_a_whole_and_small_gradients_are_left_alone():
    shared = ALGORITHMS["a2c"].replace(network=ActorCritic(MLP((8,)), shared=True), optimizer=sgd, learning_rate=1.0)
    moved, info = step_sizes(shared, 1000.0)
    assert np.hypot.reduce(list(moved.values())) == pytest.approx(0.5, rel=1e-3)
    assert {"gradient_norm", "clip_factor"} <= info.metrics.keys() and "value_gradient_norm" not in info.metrics
    free, info = step_sizes(shared.replace(max_grad_norm=1e6), 1.0)
    assert info.metrics["clip_factor"] == 1.0
    assert np.hypot.reduce(list(free.values())) == pytest.approx(float(info.metrics["gradient_norm"]), rel=1e-4)
    _, info = step_sizes(shared.replace(max_grad_norm=None), 1.0)
    assert "clip_factor" not in info.metrics


# --- passes over a batch -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_each_pass_of_one_minibatch_is_a_step_on_the_whole_batch():
    """BatchPPO's 25 of policy and value each. With gamma=0 no target depends on what earlier steps moved."""
    algo = ALGORITHMS["ppo"].replace(gamma=0.0, learning_rate=1e-2)
    state = steps = learner(algo)
    rollout = collect(algo, algo.actor(learner(algo, 1)), moments(), jax.random.key(3))
    at_once, _ = updated(algo.replace(epochs=25), state, rollout)
    for _ in range(25):
        steps, _ = updated(algo, steps, rollout)
    assert int(at_once.updates) == 1
    assert_equal(steps.network, at_once.network, 1e-5)
    counts = optax.tree.get_all_with_path(at_once.network.optimizer_state, "count")
    assert {int(count) for _, count in counts} == {25}
    moved = jax.tree.map(lambda x, y: bool((x != y).any()), at_once.network.params, state.network.params)
    assert all(jax.tree.leaves(moved))


# --- statistics ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_whole_episodes_count_what_arrived_with_their_last_time_step():
    """Of rewards at the end alone; before, the variance stayed 0, and rewards were multiplied by 1e4."""
    algo = jaxrl.A2C(
        **PLAIN,
        whole_episodes=WholeEpisodes(episodes=B),
        normalize_reward=True,
        normalize_observation=True,
        network=SEPARATE,
    )
    ends = np.asarray([2, 5, T - 1, T, T + 1, T, 1, 4])  # of each environment; one ends after the rollout
    broken = np.arange(B) == 1  # built again where the others end: what follows is no part of the batch either
    times = np.arange(T + 1)[:, None]
    last = (times == ends) & ~broken
    rng = np.random.default_rng(0)
    timesteps = moments().replace(
        observation=jnp.asarray(rng.normal(3.0, 2.0, (T + 1, B, 3)), jnp.float32),
        reward=jnp.asarray(np.where(times >= ends, rng.normal(size=(T + 1, B)) * 5.0, 0.0), jnp.float32),
        terminated=jnp.asarray(last & (ends % 2 == 0)),
        truncated=jnp.asarray(last & (ends % 2 == 1)),
        first=jnp.asarray((times == 0) | (times == ends + 1)),
    )
    state = learner(algo)
    rollout = collect(algo, algo.actor(state), timesteps, jax.random.key(3)).replace(whole_episodes=True)
    statistics = updated(algo, state, rollout)[0].statistics
    real = times <= ends
    arrived = np.asarray(timesteps.reward)[real & (times > 0)]  # all before the end are 0, so each is the return so far
    [moments_of_returns] = statistics.reward.moments.values()
    assert int(statistics.reward.count) == arrived.size
    np.testing.assert_allclose(moments_of_returns.mean, arrived.mean(), rtol=1e-5)
    np.testing.assert_allclose(moments_of_returns.variance, arrived.var(), rtol=1e-5)
    [moments_of_observations] = statistics.observation.moments.values()
    seen = np.asarray(timesteps.observation)[real]
    assert int(statistics.observation.count) == len(seen)
    np.testing.assert_allclose(moments_of_observations.mean, seen.mean(0), rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_first_batch_is_learned_from_as_it_was_acted(name):
    """With the moments of its own batch, probability ratios would be between two different inputs."""
    plain = ALGORITHMS[name].replace(optimizer=sgd, learning_rate=1.0)
    algo = plain.replace(normalize_observation=True, normalize_reward=True)
    rollout = collect(algo, algo.actor(learner(algo)), moments(), jax.random.key(3))
    ours, _ = updated(algo, learner(algo), rollout)
    theirs, _ = updated(plain, learner(plain), rollout.replace(statistics=learner(plain).statistics))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours.network.params, theirs.network.params
    )
    assert int(ours.statistics.observation.count) == B * T, "the batch after it is normalized by this one"


# --- the value that is bootstrapped from ---------------------------------------------------------------------------

RECURRENT = ActorCritic(MLP((8,)), core=GRU(6), value_gain=2.0)


@pytest.mark.long
@pytest.mark.parametrize(
    "algo",
    [
        pytest.param(jaxrl.A2C(**PLAIN, network=RECURRENT), id="a2c"),
        pytest.param(jaxrl.PPO(**PLAIN, learning_rate=1e-3, epochs=1, minibatches=1, network=RECURRENT), id="ppo"),
        pytest.param(
            jaxrl.PQN(
                random_persistence=0.0,
                rollout_length=T,
                epochs=1,
                minibatches=1,
                network=QNetwork(MLP((8,)), core=GRU(6)),
            ),
            id="pqn",
        ),
    ],
)
def test_the_bootstrap_is_not_from_the_carry_of_older_parameters(algo):
    """Before, the learner's value was of the carry that the actors' parameters had come to."""
    actor = resolve_schedules(algo, jnp.float32(0)).actor(learner(algo, 1))
    rollout = collect(algo, actor, moments(), jax.random.key(3))
    odd = rollout.replace(final_carry=jax.tree.map(lambda x: x + 1.0, rollout.final_carry))
    one, other = (updated(algo, learner(algo), batch)[0].network.params for batch in (rollout, odd))
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.long
def test_advantages_of_stale_data_bootstrap_from_the_learners_own_unroll():
    algo = jaxrl.A2C(**PLAIN, network=RECURRENT, gamma=0.9)
    state = learner(algo)
    rollout = collect(algo, algo.actor(learner(algo, 1)), moments(), jax.random.key(3))
    segment = algo.recorded_segment(rollout, state.network.variables, SPEC)
    inputs = NetworkInputs.of_timesteps(rollout.timesteps)
    variables = {"spec": SPEC, "model_state": (), "train": False}
    output, _, _ = RECURRENT.apply(state.network.params, inputs, rollout.carry.network, **variables)
    rows, values = rollout.rows, rollout.rows.extras["value"]
    expected = returns.gae(returns.Segment.of_rows(rows, values, output.value[-1]), 0.9, 0.8)
    np.testing.assert_allclose(returns.gae(segment, 0.9, 0.8), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(segment.values, values)


# --- defaults that depend on the environment -----------------------------------------------------------------------

BOXED = EnvSpec("boxed", spaces.Box(-1.0, 1.0, (3,)), spaces.Box(-1.0, 1.0, (2,)))


@pytest.mark.parametrize(
    ("algo", "discrete", "boxed"),
    [
        (jaxrl.PPO(), (False, False), (True, True)),
        (jaxrl.A2C(normalize_observation=False), (False, False), (False, True)),
        (jaxrl.PPO(normalize_reward=True), (False, True), (True, True)),
        (jaxrl.IMPALA(), (False, True), (True, True)),
        (jaxrl.IMPALA(reward_clipping="abs_one"), (False, False), (True, False)),
        (jaxrl.IMPALA(normalize_reward=False), (False, False), (True, False)),
    ],
)
def test_normalization_is_by_the_environment_unless_it_is_set(algo, discrete, boxed):
    """Before, never: 500k steps of PPO() on Pendulum came to -931 and -1,016 (2 seeds), and come to -135 and -144."""
    for spec, wanted in ((SPEC, discrete), (BOXED, boxed)):
        resolved = algo.resolve(spec, 8)
        assert (resolved.normalize_observation, resolved.normalize_reward) == wanted
        assert resolved.resolve(spec, 8) == resolved


@pytest.mark.parametrize(
    ("algo", "discrete", "boxed"),
    [
        (jaxrl.PPO(), 0.01, 0.0),
        (jaxrl.A2C(entropy_cost=0.1), 0.1, 0.1),
        (jaxrl.IMPALA(), 0.01, 0.0),
        (jaxrl.PPO(entropy_cost=0.0), 0.0, 0.0),
    ],
)
def test_the_entropy_bonus_is_for_discrete_actions_unless_it_is_set(algo, discrete, boxed):
    assert [algo.resolve(spec, 8).entropy_cost for spec in (SPEC, BOXED)] == [discrete, boxed]


@pytest.mark.parametrize(("epochs", "discrete", "boxed"), [(None, 4, 10), (3, 3, 3)])
def test_continuous_actions_have_more_passes_over_a_batch_unless_they_are_set(epochs, discrete, boxed):
    algo = jaxrl.PPO(epochs=epochs)
    assert [algo.resolve(spec, 8).epochs for spec in (SPEC, BOXED)] == [discrete, boxed]


@pytest.mark.parametrize(("rate", "discrete", "boxed"), [(None, 5e-4, 3e-4), (Linear(1e-3, 0.0), 1e-3, 1e-3)])
def test_continuous_actions_have_a_smaller_rate_unless_it_is_set(rate, discrete, boxed):
    algo = jaxrl.PPO(learning_rate=rate)
    found = [algo.resolve(spec, 8).learning_rate for spec in (SPEC, BOXED)]
    assert found == [Linear(discrete, 0.0), Linear(boxed, 0.0)]


@pytest.mark.parametrize(("network", "shared"), [(ActorCritic(), True), (ActorCritic(shared=False), False)])
def test_images_have_one_body_for_policy_and_value_unless_it_is_set(network, shared):
    images = spaces.Box(0.0, 1.0, (10, 10, 4))
    for space in (images, spaces.Dict({"image": images, "speed": spaces.Box(-1.0, 1.0, (2,))})):
        assert jaxrl.PPO(network=network).resolve(EnvSpec("seen", space, SPEC.action_space), 8).network.shared is shared
    assert not jaxrl.PPO(network=network).resolve(SPEC, 8).network.shared
