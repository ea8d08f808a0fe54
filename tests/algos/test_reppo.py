"""REPPO: whole updates against numpy in float64, its returns, its limit, and runs that learn and resume."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.on_policy import ACTIONS, SPEC, B, Data, T, broken_moments, collect, learner, updated, updated_on_two
from helpers.oracle import affine, close, divergence, exact, gradient, layer_normed
from helpers.programs import resumed
from helpers.tiers import one_quick
from scipy.special import log_softmax, softmax
from scipy.stats import norm

import jaxrl
from jaxrl.algos import minibatches, on_policy, q_learning
from jaxrl.algos.temperature import Temperature
from jaxrl.core import spaces
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import EnvSpec
from jaxrl.networks import ActionValues, Actor, CategoricalValues, Critic, SelfPredictiveValues
from jaxrl.parallel.replicas import SingleReplica

ENV = jaxrl.make("probe:ActionReward", continuous=True)
BOXED = EnvSpec("boxed", spaces.Box(-1.0, 1.0, (3,)), spaces.Box(np.float32([-2, 0]), np.float32([2, 10]), (2,)))
LOW, HIGH = np.array([-2.0, 0.0]), np.array([2.0, 10.0])
KEY = jax.random.key(0)  # of `updated`
RATE, GAMMA, LAMBDA, ATOMS, EDGE = 0.1, 0.9, 0.8, 7, 4.0
ALGO = jaxrl.REPPO(
    learning_rate=RATE,
    policy_learning_rate=0.2,
    optimizer=optax.sgd,
    max_grad_norm=None,
    gamma=GAMMA,
    return_lambda=LAMBDA,
    temperature=Temperature(initial=0.3, learning_rate=0.3, target=-0.5),
    initial_penalty=0.5,
    kl_limit=0.08,
    prediction_cost=0.5,
    v_min=-EDGE,
    v_max=EDGE,
    normalize_observation=False,
    normalize_reward=False,
    rollout_length=T,
    epochs=2,
    minibatches=1,
    policy=Actor(widths=(4,), activation="silu", normalization="layer", gain=1.0),
    critic=Critic(
        widths=(4,),
        activation="silu",
        normalization="layer",
        ensemble=1,
        head=SelfPredictiveValues(ATOMS, widths=(3,), gain=1.0),
    ),
)


# --- networks in numpy ------------------------------------------------------------------------------------------------


def stack(layers, x):
    """A dense layer, layer normalization, and SiLU."""
    x = layer_normed(layers["norm_0"], affine(layers["layer_0"], x))
    return x / (1 + np.exp(-x))


def policy_of(params, observation):
    """Logits, or the mean and the log-deviation before the tanh."""
    features, head = stack(params["hidden"], observation), params["distribution"]
    if "log_std_output" not in head:
        return affine(head["output"], features)
    return affine(head["output"], features), affine(head["log_std_output"], features)


def critic_of(params, observation, action=None):
    """Logits [..., actions, atoms], features, and the prediction [..., actions, 1 + features]."""
    params = jax.tree.map(lambda x: x[0], params)
    if action is not None:
        observation = np.concatenate([observation, 2 * (action - LOW) / (HIGH - LOW) - 1], axis=-1)
    features, head = stack(params["hidden"], observation), params["head"]
    logits = affine(head["output"], stack(head["hidden"], features))
    prediction = affine(head["prediction_output"], stack(head["prediction_hidden"], features))
    actions = logits.shape[-1] // ATOMS
    return (
        logits.reshape(*logits.shape[:-1], actions, ATOMS),
        features,
        prediction.reshape(*prediction.shape[:-1], actions, -1),
    )


def expected(logits):
    return softmax(logits, axis=-1) @ np.linspace(-EDGE, EDGE, ATOMS)


def density(policy, x):
    """Of what an action is before the tanh, in units where the box is [-1, 1]."""
    mean, log_std = policy
    return np.sum(norm.logpdf(x, mean, np.exp(log_std)) - np.log(1 - np.tanh(x) ** 2), axis=-1)


def drawn(policy, noise):
    """An action of the box, and its log-density."""
    x = policy[0] + np.exp(policy[1]) * noise
    return LOW + (HIGH - LOW) * (np.tanh(x) + 1) / 2, density(policy, x)


def soft_value(policy_params, critic_params, observation, noise, temperature):
    """The value, the log-probability, the features; over all actions where there is no noise."""
    policy = policy_of(policy_params, observation)
    if noise is None:
        logits, features, _ = critic_of(critic_params, observation)
        log_prob = log_softmax(policy, axis=-1)
        chance = np.exp(log_prob)
        entropy = -np.sum(chance * log_prob, axis=-1)
        return np.sum(chance * expected(logits), axis=-1) + temperature * entropy, -entropy, features
    action, log_prob = drawn(policy, noise)
    logits, features, _ = critic_of(critic_params, observation, action)
    return expected(logits)[..., 0] - temperature * log_prob, log_prob, features


def smoothed(value):
    """HL-Gauss: a normal distribution of 0.75 distances of atoms, by the masses around the atoms."""
    width = 2 * EDGE / (ATOMS - 1)
    edges = np.linspace(-EDGE - width / 2, EDGE + width / 2, ATOMS + 1)
    below = norm.cdf((edges - np.clip(value, -EDGE, EDGE)[..., None]) / (0.75 * width))
    return np.diff(below, axis=-1) / (below[..., -1:] - below[..., :1])


# --- the update -------------------------------------------------------------------------------------------------------


def lambda_returns(data, values, bonus):
    """Of the observations, with `bonus` [T, B] beside each reward; sums written out row by row."""
    found = np.zeros((T, B))
    for b in range(B):
        for t in reversed(range(T)):
            if not data.counts[t, b]:
                continue
            following = values[t + 1, b]
            if data.terminated[t, b]:
                following = 0.0
            elif not data.truncated[t, b] and t + 1 < T and data.counts[t + 1, b]:
                following = (1 - LAMBDA) * following + LAMBDA * found[t + 1, b]
            found[t, b] = data.reward[t, b] + bonus[t, b] + GAMMA * following
    return found


def noises(keys, shape):
    normal = jax.vmap(lambda k: jax.random.normal(k, (2,), jnp.float32))
    return np.asarray(normal(keys.reshape(-1)), np.float64).reshape(*shape, 2)


def in_numpy(algo, state, rollout, discrete):
    """The learner after two gradient steps, each of all rows; the share of rows beyond the limit at the second."""
    data, one = Data(rollout), SingleReplica()
    value_key, shuffle_key, step_key = jax.random.split(KEY, 3)
    index = minibatches.minibatch_indices(shuffle_key, rows=T, num_envs=B, count=1, replicas=one, epochs=2)
    step_keys = jax.random.split(step_key, 2)
    env_keys = q_learning.transition_keys(value_key, B, one)
    moments = jnp.stack([jax.vmap(lambda k, t=t: jax.random.fold_in(k, t))(env_keys) for t in range(T + 1)])
    policy, critic = exact(state.policy.params), exact(state.critic.params)
    log_temperature, log_penalty = (float(x.params) for x in (state.log_temperature, state.log_penalty))

    noise = None if discrete else noises(moments, (T + 1, B))
    old = policy_of(policy, data.observation[:-1])
    values, _, features = soft_value(policy, critic, data.observation, noise, np.exp(log_temperature))
    bonus = -np.exp(log_temperature) * np.asarray(rollout.extras["log_prob"], np.float64)
    target = smoothed(lambda_returns(data, values, bonus) - bonus)
    observation = data.observation[:-1]

    def mean(x, rows=data.acting):
        return np.mean(x[rows])

    for number in range(2):
        order = np.argsort(np.asarray(index[number]))  # a row's place among the keys
        keys = q_learning.transition_keys(step_keys[number], T * B, one)[order]
        noise = None if discrete else noises(keys, (T, B))

        def critic_loss(params):
            action = None if discrete else np.asarray(data.action, np.float64)
            logits, _, prediction = critic_of(params, observation, action)
            if discrete:
                taken = data.action[..., None, None]
                logits, prediction = (np.take_along_axis(x, taken, axis=-2) for x in (logits, prediction))
            loss = -np.sum(target * log_softmax(logits[..., 0, :], axis=-1), axis=-1)
            following = np.concatenate([data.reward[..., None], features[1:]], axis=-1)
            wrong = np.mean((prediction[..., 0, :] - following) ** 2, axis=-1) * ~data.terminated
            return mean(loss, data.counts) + 0.5 * mean(wrong, data.counts)

        critic = jax.tree.map(lambda x, g: x - RATE * g, critic, gradient(critic_loss, critic))
        temperature, penalty = np.exp(log_temperature), np.exp(log_penalty)

        def policy_loss(params, critic=critic, noise=noise, temperature=temperature, penalty=penalty):
            soft, _, _ = soft_value(params, critic, observation, noise, temperature)
            kl = divergence(old, policy_of(params, observation))
            return mean(np.where(kl < algo.kl_limit, -soft, penalty * kl))

        kl = divergence(old, policy_of(policy, observation))
        _, log_prob, _ = soft_value(policy, critic, observation, noise, temperature)
        policy = jax.tree.map(lambda x, g: x - 0.2 * g, policy, gradient(policy_loss, policy))
        wanted = 0.89 * np.log(ACTIONS) if discrete else -0.5 * 2
        log_temperature += 0.3 * (mean(log_prob) + wanted)
        log_penalty -= 0.3 * (algo.kl_limit - mean(kl))
    return policy, critic, log_temperature, log_penalty, mean(kl >= algo.kl_limit)


@functools.cache
def experience(discrete):
    """A learner, and a rollout that a policy of other parameters acted; the agents of some rows are out."""
    spec = SPEC if discrete else BOXED
    actor = resolve_schedules(ALGO, jnp.float32(0)).actor(learner(ALGO, 1, spec))
    timesteps = broken_moments().replace(active=jnp.asarray(np.random.default_rng(1).random((T + 1, B)) < 0.7))
    return spec, learner(ALGO, 0, spec), collect(ALGO, actor, timesteps, jax.random.key(3), spec)


@pytest.mark.long
@pytest.mark.parametrize("discrete", one_quick([False, True], False))
def test_a_whole_update_is_numpys(discrete):
    spec, state, rollout = experience(discrete)
    algo = ALGO.replace(kl_limit=5e-4 if discrete else 0.08)
    new, _ = updated(algo, state, rollout, spec)
    policy, critic, log_temperature, log_penalty, beyond = in_numpy(algo, state, rollout, discrete)
    assert 0.1 < beyond < 0.9, "both sides of the limit"
    close(new.critic.params, critic, 1e-4)
    close(new.policy.params, policy, 1e-4)
    assert float(new.log_temperature.params) == pytest.approx(log_temperature, abs=1e-4)
    assert float(new.log_penalty.params) == pytest.approx(log_penalty, abs=1e-5)
    assert int(new.updates) == 1


@pytest.mark.long
def test_two_devices_make_the_update_of_one():
    """Of discrete actions, as what is sampled goes by shard, of which two devices have twice as many here."""
    spec, state, rollout = experience(True)
    one, info = updated(ALGO, state, rollout, spec)
    two, info_of_two = updated_on_two(ALGO, state, rollout, spec)
    close(one, two, 1e-4)
    close(info.metrics, info_of_two.metrics, 1e-4)


@pytest.mark.long
def test_the_return_of_a_last_row_is_reward_and_soft_value():
    """With lambda 0 and no entropy each target is one step; terminations have no value behind them."""
    spec, state, rollout = experience(True)
    plain = ALGO.replace(return_lambda=0.0, temperature=Temperature(initial=1e-9, learned=False))
    state = state.replace(log_temperature=learner(plain, 0, spec).log_temperature)
    resolved = resolve_schedules(plain, jnp.float32(0))
    rows = resolved._data(state, rollout, KEY, spec, SingleReplica())
    data = Data(rollout)
    policy, critic = exact(state.policy.params), exact(state.critic.params)
    values, _, _ = soft_value(policy, critic, data.observation, None, 0.0)
    one_step = data.reward + GAMMA * np.where(data.terminated, 0.0, values[1:])
    np.testing.assert_allclose(rows.extras["target"][data.counts], one_step[data.counts], rtol=1e-5, atol=1e-5)


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [CategoricalValues(21, smoothing=0.75), ActionValues()])
def test_other_heads_learn_without_the_prediction(head):
    support = {} if isinstance(head, CategoricalValues) else {"v_min": -20.0, "v_max": 20.0}  # which are the defaults
    algo = small().replace(critic=Critic(widths=(32,), ensemble=2, head=head), **support)
    result = jaxrl.train(algo, ENV, total_steps=8_192, num_envs=16, evaluate_every=0, progress=False)
    assert result.evaluation.return_mean > 0.9
    assert "prediction_loss" not in result.metrics


def small():
    """On episodes of one step, worth 1 less the squared distance of the action from 0.5."""
    return jaxrl.REPPO(
        learning_rate=3e-3,
        temperature=Temperature(initial=1e-3, learned=False),
        normalize_reward=False,
        rollout_length=32,
        minibatches=4,
        v_min=-5.0,
        v_max=5.0,
        policy=Actor(widths=(32,), activation="silu", normalization="layer"),
        critic=Critic(
            widths=(32,),
            activation="silu",
            normalization="layer",
            ensemble=1,
            head=SelfPredictiveValues(51, widths=(32,)),
        ),
    )


def test_it_learns_and_resumes_bit_for_bit(tmp_path):
    assert resumed(tmp_path, small(), ENV, 8_192, num_envs=16).evaluation.return_mean > 0.97


@pytest.mark.long
def test_what_is_normalized_is_seen_and_the_first_rewards_are_within_the_support():
    algo = ALGO.replace(normalize_observation=True, normalize_reward=True)
    state = learner(algo, 0, BOXED)
    timesteps = broken_moments().replace(reward=100.0 * broken_moments().reward)
    rollout = collect(algo, resolve_schedules(algo, jnp.float32(0)).actor(state), timesteps, KEY, BOXED)
    assert set(rollout.extras) == {"log_prob", "discounted_return"}
    assert updated(algo, state, rollout, BOXED)[1].metrics["support_clipped_mass"] < 0.1
    after = on_policy.update_statistics(state.statistics, rollout, algo.gamma, SingleReplica())
    seen = after.observation.moments["array"].mean
    np.testing.assert_allclose(seen, broken_moments().observation[:-1].mean((0, 1)), atol=1e-5)
    assert float(after.reward.moments["array"].mean) != 0.0
