"""One whole update of each algorithm over a replay against numpy in float64, written from the papers' equations.

Nothing of jaxrl computes what is expected: networks are plain products, gradients are central differences, and the step
is Adam's formula. The batch holds transitions of up to three steps that terminated, were truncated, were cut by the end
of the data, and that count for nothing. What is shared is the random numbers: a transition's keys.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import continuous, offline
from helpers.continuous import BATCH, BOX, SPEC, transitions
from helpers.oracle import EPS, affine, close, descended, exact, stepped
from helpers.tiers import one_quick
from scipy.special import log_softmax, logsumexp, softmax
from scipy.stats import norm

import jaxrl
from jaxrl.algos import q_learning
from jaxrl.algos.optimizers import Adam
from jaxrl.core import spaces
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import EnvSpec
from jaxrl.networks import (
    MLP,
    ActionValues,
    CategoricalValues,
    Critic,
    ImplicitQuantileValues,
    QNetwork,
    QuantileValues,
)
from jaxrl.parallel.replicas import SingleReplica

KEY = jax.random.key(7)
ONE = SingleReplica()
GAMMA, TAU, RATE, POLICY_RATE = 0.9, 0.25, 0.1, 0.05
COMMON = {"gamma": GAMMA, "n_step": 3, "learning_rate": RATE, "optimizer": Adam(eps=EPS)}
ACTOR_CRITIC = COMMON | {"tau": TAU, "policy_learning_rate": POLICY_RATE}
LOW, HIGH = BOX.low.astype(np.float64), BOX.high.astype(np.float64)
DISCRETE = EnvSpec("choice", SPEC.observation_space, spaces.Discrete(4))
COUNTED = np.arange(BATCH) < BATCH - 1


@functools.cache
def batch(discrete=False):
    """Endings by turns: terminated after two steps, truncated after one, cut by the data after two, and none."""
    steps = np.tile([2, 1, 2, 3], BATCH // 4)
    rewards = np.random.default_rng(5).normal(size=(BATCH, 3)) * (np.arange(3)[None] < steps[:, None])
    rewards[-1] = 1e6  # it does not count
    base = transitions(3)
    importance = jnp.asarray(np.random.default_rng(6).uniform(0.2, 1.0, BATCH), jnp.float32)
    action = base.action.at[0].set(jnp.asarray(BOX.low)).at[1, 1].set(10.0)  # at bounds
    return base.replace(
        rewards=jnp.asarray(rewards, jnp.float32),
        steps=jnp.asarray(steps, jnp.int32),
        bootstrap=jnp.arange(BATCH) % 4 != 0,
        action=jnp.arange(BATCH, dtype=jnp.int32) % 3 if discrete else action,
        sample_info=base.sample_info.replace(importance=importance),
    )


def start(algo, spec=SPEC):
    """A learner whose target networks are others than its networks, and the same as float64."""
    state = resolve_schedules(algo, jnp.float32(0)).init(jax.random.key(1), spec)
    for part in ("policy", "critic", "network"):
        learned = getattr(state, part, None)
        if learned is not None and learned.target_params is not None and learned.target_params != ():
            slow = jax.tree.map(lambda x: 0.7 * x + 0.05, learned.params)
            state = state.replace(**{part: learned.replace(target_params=slow)})
    return state


@functools.partial(jax.jit, static_argnames="spec")
def updated(algo, state, transitions, spec):
    algo = resolve_schedules(algo, jnp.float32(0))
    return algo.update(state, {"replay": transitions}, spec=spec, key=KEY, replicas=ONE)


def moved(slow, new, tau=TAU):
    return jax.tree.map(lambda a, b: (1 - tau) * np.asarray(a, np.float64) + tau * b, slow, new)


def mean(x):
    return np.mean(np.asarray(x)[..., COUNTED], axis=-1)


# --- networks and equations ------------------------------------------------------------------------------------------


def hidden(params, x):
    return np.maximum(affine(params["hidden"]["layer_0"], x), 0.0)


def unit(action):
    return 2.0 * (action - LOW) / (HIGH - LOW) - 1.0


def boxed(u):
    return np.clip(LOW + (HIGH - LOW) * (u + 1.0) / 2.0, LOW, HIGH)


def critics(params, observation, action=None):
    """[ensemble, batch, outputs]."""
    x = observation if action is None else np.concatenate([observation, unit(action)], axis=-1)
    members = []
    for number in range(params["hidden"]["layer_0"]["bias"].shape[0]):
        member = jax.tree.map(lambda leaf, number=number: leaf[number], params)
        members.append(affine(member["head"]["advantage"]["output"], hidden(member, x)))
    return np.stack(members)


def values(params, observation, action=None):
    return critics(params, observation, action)[..., 0]


def deterministic(params, observation):
    return boxed(np.tanh(affine(params["action"], hidden(params, observation))))


def gaussian(params, observation):
    """The mean and deviation before the tanh."""
    features, head = hidden(params, observation), params["distribution"]
    return affine(head["output"], features), np.exp(affine(head["log_std_output"], features))


def drawn(params, observation, noise):
    """An action, and its log-density where the box is [-1, 1]."""
    mean, std = gaussian(params, observation)
    x = mean + std * noise
    return boxed(np.tanh(x)), np.sum(norm.logpdf(x, mean, std) - np.log(1 - np.tanh(x) ** 2), axis=-1)


def likelihood(params, observation, action):
    """Of actions in [-1, 1]; within a thousandth of a bound, the mean density there."""
    mean, std = gaussian(params, observation)
    u, limit = unit(action), 1 - 1e-3
    inner = np.clip(u, -limit, limit)
    inside = norm.logpdf(np.arctanh(inner), mean, std) - np.log(1 - inner**2)
    below = norm.logcdf((np.arctanh(-limit) - mean) / std) - np.log(1e-3)
    above = norm.logsf((np.arctanh(limit) - mean) / std) - np.log(1e-3)
    return np.sum(np.where(u <= -limit, below, np.where(u >= limit, above, inside)), axis=-1)


def rewards_and_reach(b):
    """The discounted rewards of the steps taken, and the discount of what follows: 0 where the task terminated."""
    total = np.sum(np.asarray(b.rewards, np.float64) * GAMMA ** np.arange(3), axis=1)
    return total, np.where(b.bootstrap, GAMMA ** np.asarray(b.steps, np.float64), 0.0)


def target_of(b, following):
    total, reach = rewards_and_reach(b)
    return total + reach * following


def squared(b, target):
    return lambda params: np.sum(mean(0.5 * (target - values(params, exact(b.observation), exact(b.action))) ** 2))


def noise(key):
    """Normal numbers [BATCH, 2] of each transition's key."""
    keys = q_learning.transition_keys(key, BATCH, ONE)
    return np.stack([np.asarray(jax.random.normal(k, (2,)), np.float64) for k in keys])


def noises(keys, count):
    """[count, BATCH, 2]: of as many keys split from each."""
    split = [jax.random.split(k, count) for k in keys]
    return np.stack([[jax.random.normal(each[i], (2,)) for each in split] for i in range(count)]).astype(np.float64)


# --- deterministic policies ------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", one_quick(["ddpg", "td3", "td3bc"], "td3"))
def test_deterministic_policies(name):
    algo = {"ddpg": continuous.DDPG, "td3": continuous.TD3, "td3bc": offline.TD3BC}[name].replace(**ACTOR_CRITIC)
    if name != "ddpg":
        algo = algo.replace(policy_delay=1)
    if name == "td3bc":
        algo = algo.replace(normalize_observation=False)
    b, state = batch(), start(algo)
    new, info = updated(algo, state, b, SPEC)
    observation, following = exact(b.observation), exact(b.next_observation)

    action = deterministic(exact(state.policy.target_params), following)
    if name != "ddpg":
        action = boxed(unit(action) + np.clip(0.2 * noise(KEY), -0.5, 0.5))
    target = target_of(b, values(exact(state.critic.target_params), following, action).min(axis=0))
    loss = squared(b, target)
    assert float(info.metrics["critic_loss"]) == pytest.approx(loss(exact(state.critic.params)), rel=1e-5)
    critic = descended(loss, state.critic.params, RATE)
    close(new.critic.params, critic)

    first = jax.tree.map(lambda x: x[:1], critic)
    does = deterministic(exact(state.policy.params), observation)
    scale = 2.5 / mean(np.abs(values(first, observation, does)[0])) if name == "td3bc" else 1.0

    def policy_loss(params):
        does = deterministic(params, observation)
        distance = np.mean((unit(does) - unit(exact(b.action))) ** 2, axis=-1) if name == "td3bc" else 0.0
        return mean(distance - scale * values(first, observation, does)[0])

    assert float(info.metrics["policy_loss"]) == pytest.approx(policy_loss(exact(state.policy.params)), rel=1e-5)
    policy = descended(policy_loss, state.policy.params, POLICY_RATE)
    close(new.policy.params, policy)
    close(new.policy.target_params, moved(state.policy.target_params, policy))
    close(new.critic.target_params, moved(state.critic.target_params, critic))


def projected(atoms, probabilities, support):
    """Each atom's mass goes to the two of the support around it (Bellemare et al., 2017, algorithm 1)."""
    spacing, wanted = support[1] - support[0], np.zeros((len(atoms), len(support)))
    for row in range(len(atoms)):
        for atom, mass in zip(atoms[row], probabilities[row], strict=True):
            place = (np.clip(atom, support[0], support[-1]) - support[0]) / spacing
            lower = min(int(place), len(support) - 2)
            wanted[row, lower] += mass * (lower + 1 - place)
            wanted[row, lower + 1] += mass * (place - lower)
    return wanted


@pytest.mark.long
def test_d4pg():
    algo = continuous.D4PG.replace(**ACTOR_CRITIC)
    b, state, support = batch(), start(algo), np.linspace(-5.0, 5.0, 11)
    new, info = updated(algo, state, b, SPEC)
    observation, following = exact(b.observation), exact(b.next_observation)
    action = deterministic(exact(state.policy.target_params), following)
    probabilities = softmax(critics(exact(state.critic.target_params), following, action)[0], axis=-1)
    total, reach = rewards_and_reach(b)
    wanted = projected(total[:, None] + reach[:, None] * support[None], probabilities, support)
    importance = np.asarray(b.sample_info.importance, np.float64)

    def entropies(params):
        return -np.sum(wanted * log_softmax(critics(params, observation, exact(b.action))[0], axis=-1), axis=-1)

    def loss(params):
        return mean(importance * entropies(params))

    assert float(info.metrics["critic_loss"]) == pytest.approx(loss(exact(state.critic.params)), rel=1e-5)
    critic = descended(loss, state.critic.params, RATE)
    close(new.critic.params, critic)
    known = np.where(wanted > 0, wanted * np.log(np.maximum(wanted, 1e-300)), 0.0).sum(axis=-1)
    divergence = entropies(exact(state.critic.params)) + known
    np.testing.assert_allclose(info.priorities["replay"][COUNTED], divergence[COUNTED] + 1e-6, rtol=1e-5, atol=1e-5)
    edge, clipped = wanted[:, [0, -1]].sum(axis=-1), np.abs(total[:, None] + reach[:, None] * support[None]) > 5.01
    assert float(info.metrics["support_edge_mass"]) == pytest.approx(mean(edge), rel=1e-5)
    wanted_mass = mean(np.sum(np.where(clipped, probabilities, 0.0), axis=-1))
    assert float(info.metrics["support_clipped_mass"]) == pytest.approx(wanted_mass, rel=1e-5, abs=1e-6)

    def policy_loss(params):
        logits = critics(critic, observation, deterministic(params, observation))[0]
        return -mean(softmax(logits, axis=-1) @ support)

    assert float(info.metrics["policy_loss"]) == pytest.approx(policy_loss(exact(state.policy.params)), rel=1e-5)
    policy = descended(policy_loss, state.policy.params, POLICY_RATE)
    close(new.policy.params, policy)
    close(new.policy.target_params, moved(state.policy.target_params, policy))
    close(new.critic.target_params, moved(state.critic.target_params, critic))


# --- stochastic policies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", one_quick(["sac", "cql"], "sac"))
def test_sac_and_cql(name):
    algo = {"sac": continuous.SAC, "cql": offline.CQL}[name].replace(**ACTOR_CRITIC, temperature=0.3)
    if name == "cql":
        algo = algo.replace(coefficient=2.0, lagrange_threshold=1.0)
    b, state = batch(), start(algo)
    new, info = updated(algo, state, b, SPEC)
    observation, following = exact(b.observation), exact(b.next_observation)
    next_key, key = jax.random.split(KEY)
    old = exact(state.policy.params)

    action, log_prob = drawn(old, following, noise(next_key))
    value = values(exact(state.critic.target_params), following, action).min(axis=0)
    target = target_of(b, value if name == "cql" else value - 0.3 * log_prob)
    errors = squared(b, target)

    # Three actions each, with their log-densities: uniform ones, the policy's here, and the policy's there.
    keys = q_learning.transition_keys(next_key, BATCH, ONE)
    places = [jax.vmap(lambda k, place=place: jax.random.fold_in(k, place))(keys) for place in range(3)]
    split = [jax.random.split(k, 3) for k in places[0]]
    proposed = [(np.float64([BOX.sample(each[i]) for each in split]), -2 * np.log(2)) for i in range(3)]
    for place, seen in ((1, observation), (2, following)):
        proposed += [drawn(old, seen, one) for one in noises(places[place], 3)]

    def gaps(params):
        """log of the integral of exp Q by importance sampling, less Q of the data's action."""
        each = [values(params, observation, action) - log_density for action, log_density in proposed]
        maximum = logsumexp(np.stack(each), axis=0) - np.log(9)
        return mean(maximum - values(params, observation, exact(b.action)))

    loss = errors
    if name == "cql":
        loss = lambda params: errors(params) + 0.5 * 2.0 * np.sum(gaps(params))  # noqa: E731
        gap = np.mean(gaps(exact(state.critic.params)))
        assert float(info.metrics["conservative_gap"]) == pytest.approx(gap, rel=1e-5)
        wanted = stepped(np.log(2.0), -0.5 * 2.0 * (gap - 1.0), RATE)
        assert float(new.log_coefficient.params) == pytest.approx(float(wanted), abs=1e-5)
    assert float(info.metrics["critic_loss"]) == pytest.approx(errors(exact(state.critic.params)), rel=1e-5)
    critic = descended(loss, state.critic.params, RATE)
    close(new.critic.params, critic)

    now = noise(key)

    def policy_loss(params):
        action, log_prob = drawn(params, observation, now)
        return mean(0.3 * log_prob - values(critic, observation, action).min(axis=0))

    assert float(info.metrics["policy_loss"]) == pytest.approx(policy_loss(old), rel=1e-5, abs=1e-5)
    close(new.policy.params, descended(policy_loss, old, POLICY_RATE))
    close(new.critic.target_params, moved(state.critic.target_params, critic))
    missing = mean(drawn(old, observation, now)[1]) - 2.0  # the target is -1 for each dimension
    wanted = stepped(np.log(0.3), -missing, RATE)
    assert float(new.log_temperature.params) == pytest.approx(float(wanted), abs=1e-5)


def renormalized(norm, state, x, training, correction=None):
    """What is normalized, with what correction, and the statistics after (Ioffe, 2017, algorithm 1)."""
    mean, var, seen = (np.asarray(state[name], np.float64) for name in ("mean", "var", "batches"))
    deviation = np.sqrt(var + 1e-3)
    if not training:
        return (x - mean) / deviation * norm["scale"] + norm["bias"], None, state
    counted = x[np.resize(COUNTED, len(x))]
    batch_mean, batch_var = counted.mean(axis=0), counted.var(axis=0)
    own = np.sqrt(batch_var + 1e-3)
    if correction is None:
        correction = np.clip(own / deviation, 1 / 3, 3), np.clip((batch_mean - mean) / deviation, -5, 5)
        correction = correction if seen >= 100_000 else (1.0, 0.0)
    r, d = correction
    after = {"batches": seen + 1, "mean": 0.99 * mean + 0.01 * batch_mean, "var": 0.99 * var + 0.01 * batch_var}
    return ((x - batch_mean) / own * r + d) * norm["scale"] + norm["bias"], correction, after


def normed_features(params, state, x, training=False, corrections=(None, None)):
    """Of one layer, whose inputs and outputs are normalized."""
    hidden, state = params["hidden"], state["hidden"]
    x, first, inputs = renormalized(hidden["norm_0"], state["norm_0"], x, training, corrections[0])
    x = np.maximum(affine(hidden["layer_0"], x), 0.0)
    x, last, features = renormalized(hidden["norm_features"], state["norm_features"], x, training, corrections[1])
    return x, (first, last), {"hidden": {"norm_0": inputs, "norm_features": features}}


def normed_values(params, state, observation, action, training=False, corrections=((None, None),) * 2):
    """The values [ensemble, batch] of two critics, their corrections, and their statistics after."""
    x = np.concatenate([observation, unit(action)], axis=-1)
    found = []
    for number in range(2):
        member, own = jax.tree.map(lambda leaf, number=number: np.asarray(leaf)[number], (params, state))
        features, correction, after = normed_features(member, own, x, training, corrections[number])
        found.append((affine(member["head"]["advantage"]["output"], features)[:, 0], correction, after))
    value, correction, after = zip(*found, strict=True)
    return np.stack(value), correction, jax.tree.map(lambda *x: np.stack(x), *after)


@pytest.mark.long
@pytest.mark.parametrize("seen", one_quick([0, 100_000], 100_000))
def test_crossq(seen):
    """By turns before and after the warm-up of the statistics, which are of the rows that count."""
    algo = continuous.CROSSQ.replace(**COMMON, policy_learning_rate=POLICY_RATE, temperature=0.3, policy_delay=1)
    b, state = batch(), start(algo)

    def moved_on(model_state):  # running statistics that are neither the first ones nor the batch's
        rng = np.random.default_rng(8)
        after = lambda x: jnp.asarray(np.abs(x + rng.uniform(0.1, 0.3, x.shape)), jnp.float32)  # noqa: E731
        return jax.tree.map(lambda x: jnp.full_like(x, seen) if x.dtype == jnp.int32 else after(x), model_state)

    critic, policy = (x.replace(model_state=moved_on(x.model_state)) for x in (state.critic, state.policy))
    state = state.replace(critic=critic, policy=policy)
    new, info = updated(algo, state, b, SPEC)
    observation, following = exact(b.observation), exact(b.next_observation)
    next_key, key = jax.random.split(KEY)

    def drawn_by(params, observation, noise, training=False, corrections=(None, None)):
        features, correction, after = normed_features(params, policy.model_state, observation, training, corrections)
        head = params["distribution"]
        mean, std = affine(head["output"], features), np.exp(affine(head["log_std_output"], features))
        x = mean + std * noise
        log_prob = np.sum(norm.logpdf(x, mean, std) - np.log(1 - np.tanh(x) ** 2), axis=-1)
        return boxed(np.tanh(x)), log_prob, correction, after

    old, before = exact(policy.params), exact(critic.params)
    next_action, next_log_prob, _, _ = drawn_by(old, following, noise(next_key))
    both = np.concatenate([observation, following]), np.concatenate([exact(b.action), next_action])
    joint, corrections, statistics = normed_values(before, critic.model_state, *both, training=True)
    target = target_of(b, joint[:, BATCH:].min(axis=0) - 0.3 * next_log_prob)

    def loss(params):
        values = normed_values(params, critic.model_state, *both, training=True, corrections=corrections)[0]
        return np.sum(mean(0.5 * (target - values[:, :BATCH]) ** 2))

    assert float(info.metrics["critic_loss"]) == pytest.approx(loss(before), rel=1e-4)
    descended_critic = descended(loss, before, RATE)
    close(new.critic.params, descended_critic, 1e-4)
    close(new.critic.model_state, statistics, 1e-4)
    assert new.critic.target_params == ()

    now = noise(key)
    corrections, after = drawn_by(old, observation, now, training=True)[2:]

    def policy_loss(params):  # by the critics' running statistics
        action, log_prob, _, _ = drawn_by(params, observation, now, True, corrections)
        values = normed_values(descended_critic, statistics, observation, action)[0]
        return mean(0.3 * log_prob - values.min(axis=0))

    assert float(info.metrics["policy_loss"]) == pytest.approx(policy_loss(old), rel=1e-4, abs=1e-4)
    close(new.policy.params, descended(policy_loss, old, POLICY_RATE), 1e-4)
    close(new.policy.model_state, after, 1e-4)
    missing = mean(drawn_by(old, observation, now, True, corrections)[1]) - 2.0
    wanted = stepped(np.log(0.3), -missing, RATE)
    assert float(new.log_temperature.params) == pytest.approx(float(wanted), abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(("reward", "absorbing"), one_quick([("airl", True), ("gail", True), ("gail", False)]))
def test_gail(reward, absorbing):
    """Rewards of neither source are read: they are NaN. Pairs that count differ between the sources."""
    fields = {name: value for name, value in ACTOR_CRITIC.items() if name != "n_step"}
    algo = continuous.GAIL.replace(
        **fields, temperature=0.3, discriminator_learning_rate=0.2, reward=reward, absorbing=absorbing
    )
    unread, counts = jnp.full((BATCH, 1), jnp.nan), (COUNTED, np.arange(BATCH) % 7 != 2)
    own = transitions().replace(rewards=unread)
    shown = transitions(seed=3).replace(rewards=unread, bootstrap=jnp.arange(BATCH) % 3 != 0, weight=counts[1])
    state = start(algo)
    new, info = jax.jit(
        lambda algo, state: resolve_schedules(algo, jnp.float32(0)).update(
            state, {"replay": own, "demonstrations": shown}, spec=SPEC, key=KEY, replicas=ONE
        )
    )(algo, state)
    key, pair_key = jax.random.split(KEY)
    share = [jax.random.uniform(k) for k in q_learning.transition_keys(pair_key, BATCH, ONE)]
    share = np.asarray(share, np.float64)[:, None]
    sources = [[exact(b.observation), exact(b.action), ~np.asarray(b.bootstrap)] for b in (own, shown)]
    between = [(1 - share) * one + share * other for one, other in zip(*(x[:2] for x in sources), strict=True)]

    def cross_entropy(params):
        found = 0.0
        for sign, counted, (seen, done, ended) in zip((1, -1), counts, sources, strict=True):
            each = np.logaddexp(0, sign * values(params["network"], seen, done)[0])[counted]
            after = np.logaddexp(0, sign * params["absorbing"]) * (ended & counted).sum() * absorbing
            found += (each.sum() + after) / (counted.sum() + (ended & counted).sum() * absorbing)
        return found

    def penalty(params):
        """By the chain rule through the one layer of rectifiers."""
        member = jax.tree.map(lambda leaf: leaf[0], params["network"])
        layer, output = member["hidden"]["layer_0"], member["head"]["advantage"]["output"]["kernel"]
        active = affine(layer, np.concatenate([between[0], unit(between[1])], axis=-1)) > 0
        slope = (active * output[:, 0]) @ layer["kernel"].T
        return np.mean((np.linalg.norm(slope, axis=-1)[counts[0] & counts[1]] - 1) ** 2)

    before = exact(state.discriminator.params)
    assert float(info.metrics["discriminator_loss"]) == pytest.approx(cross_entropy(before), rel=1e-5)
    assert float(info.metrics["gradient_penalty"]) == pytest.approx(penalty(before), rel=1e-5)
    right = [sign * values(before["network"], *x[:2])[0] < 0 for sign, x in zip((1, -1), sources, strict=True)]
    accuracy = np.mean([hit[counted].mean() for hit, counted in zip(right, counts, strict=True)])
    assert float(info.metrics["discriminator_accuracy"]) == pytest.approx(accuracy, rel=1e-5)
    judge = descended(lambda params: cross_entropy(params) + 10 * penalty(params), before, 0.2)
    close(new.discriminator.params, judge)

    learned, after = values(judge["network"], *sources[0][:2])[0], judge["absorbing"]
    if reward == "gail":
        learned, after = np.logaddexp(0, learned), np.logaddexp(0, after)
    assert float(info.metrics["learned_reward"]) == pytest.approx(mean(learned), rel=1e-5)
    next_key, key = jax.random.split(key)
    old, observation = exact(state.policy.params), sources[0][0]
    action, log_prob = drawn(old, exact(own.next_observation), noise(next_key))
    value = values(exact(state.critic.target_params), exact(own.next_observation), action).min(axis=0) - 0.3 * log_prob
    target = learned + GAMMA * np.where(own.bootstrap, value, after / (1 - GAMMA) * absorbing)
    loss = squared(own, target)
    assert float(info.metrics["critic_loss"]) == pytest.approx(loss(exact(state.critic.params)), rel=1e-5)
    critic = descended(loss, state.critic.params, RATE)
    close(new.critic.params, critic)
    close(new.critic.target_params, moved(state.critic.target_params, critic))
    now = noise(key)

    def policy_loss(params):
        action, log_prob = drawn(params, observation, now)
        return mean(0.3 * log_prob - values(critic, observation, action).min(axis=0))

    close(new.policy.params, descended(policy_loss, old, POLICY_RATE))
    missing = mean(drawn(old, observation, now)[1]) - 2.0
    assert float(new.log_temperature.params) == pytest.approx(float(stepped(np.log(0.3), -missing, RATE)), abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("ensemble", [1, 2])
def test_distributional_mpo(ensemble):
    """The critics' target is the mixture of what each sampled action may bring; the policy's values are its means."""
    network = Critic(widths=(8,), ensemble=ensemble, head=CategoricalValues(11))
    algo = continuous.MPO.replace(
        **ACTOR_CRITIC, target_period=1, temperature=2.0, critic=network, v_min=-5.0, v_max=5.0
    )
    b, state, support = batch(), start(algo), np.linspace(-5.0, 5.0, 11)
    new, info = updated(algo, state, b, SPEC)
    observation, following = exact(b.observation), exact(b.next_observation)
    slow, slow_critic = exact(state.policy.target_params), exact(state.critic.target_params)
    next_keys, keys = (q_learning.transition_keys(k, BATCH, ONE) for k in jax.random.split(KEY))

    def least(observation, action):
        """Of the critic that expects least, by transition: probabilities [batch, atoms]."""
        members = softmax(critics(slow_critic, observation, action), axis=-1)
        return members[(members @ support).argmin(axis=0), np.arange(BATCH)]

    mixture = np.mean([least(following, drawn(slow, following, one)[0]) for one in noises(next_keys, 6)], axis=0)
    total, reach = rewards_and_reach(b)
    wanted = projected(total[:, None] + reach[:, None] * support[None], mixture, support)

    def critic_loss(params):
        each = log_softmax(critics(params, observation, exact(b.action)), axis=-1)
        return np.sum(mean(-np.sum(wanted * each, axis=-1)))

    assert float(info.metrics["critic_loss"]) == pytest.approx(critic_loss(exact(state.critic.params)), rel=1e-5)
    close(new.critic.params, descended(critic_loss, state.critic.params, RATE))

    old_mean, old_std = gaussian(slow, observation)
    points = old_mean + old_std * noises(keys, 6)
    weights = softmax(np.stack([least(observation, boxed(np.tanh(x))) @ support for x in points]) / 2.0, axis=0)
    improved = mean(np.sum(weights * np.log(6 * weights), axis=0))
    assert float(info.metrics["kl_improved"]) == pytest.approx(improved, rel=1e-4)


@pytest.mark.long
def test_mpo():
    fields = {"target_period": 1, "temperature": 2.0, "alpha_mean": 1.5, "alpha_std": 3.0, "dual_learning_rate": 0.02}
    algo = continuous.MPO.replace(**ACTOR_CRITIC, **fields)
    b, state = batch(), start(algo)
    new, info = updated(algo, state, b, SPEC)
    observation, following = exact(b.observation), exact(b.next_observation)
    slow, slow_critic = exact(state.policy.target_params), exact(state.critic.target_params)
    next_keys, keys = (q_learning.transition_keys(k, BATCH, ONE) for k in jax.random.split(KEY))

    does = [drawn(slow, following, one)[0] for one in noises(next_keys, 6)]
    loss = squared(b, target_of(b, np.mean([values(slow_critic, following, one)[0] for one in does], axis=0)))
    assert float(info.metrics["critic_loss"]) == pytest.approx(loss(exact(state.critic.params)), rel=1e-5)
    critic = descended(loss, state.critic.params, RATE)
    close(new.critic.params, critic)

    old_mean, old_std = gaussian(slow, observation)
    points = old_mean + old_std * noises(keys, 6)
    valued = np.stack([values(slow_critic, observation, boxed(np.tanh(x)))[0] for x in points])  # [6, batch]
    weights = softmax(valued / 2.0, axis=0)

    def kls(params):
        """Of the mean and the deviation, each beside the old other, by dimension."""
        new_mean, new_std = gaussian(params, observation)
        ratio = old_std / new_std
        kl_mean = (new_mean - old_mean) ** 2 / (2 * old_std**2)
        return mean(kl_mean.T), mean((np.log(new_std / old_std) + ratio**2 / 2 - 0.5).T)

    def policy_loss(params):
        new_mean, new_std = gaussian(params, observation)
        fitted = norm.logpdf(points, new_mean, old_std) + norm.logpdf(points, old_mean, new_std)
        kl_mean, kl_std = kls(params)
        return -mean(np.sum(weights * fitted.sum(axis=-1), axis=0)) + np.sum(1.5 * kl_mean + 3.0 * kl_std)

    policy = descended(policy_loss, state.policy.params, POLICY_RATE)
    close(new.policy.params, policy)
    close(new.policy.target_params, moved(state.policy.target_params, policy))
    close(new.critic.target_params, moved(state.critic.target_params, critic))

    kl_mean, kl_std = kls(exact(state.policy.params))

    def dual_loss(duals):
        positive = {name: np.log1p(np.exp(x)) for name, x in duals.items()}
        eta = positive["temperature"]
        temperature = mean(eta * (0.1 + logsumexp(valued / eta, axis=0) - np.log(6)))
        bounds = np.sum(positive["mean"] * (2.5e-3 - kl_mean)) + np.sum(positive["std"] * (1e-4 - kl_std))
        return temperature + bounds

    close(new.duals.params, descended(dual_loss, state.duals.params, 0.02))


@pytest.mark.long
def test_iql():
    algo = offline.IQL.replace(**ACTOR_CRITIC, expectile=0.8, inverse_temperature=2.0, max_weight=1.5)
    b, state = batch(), start(algo)
    new, info = updated(algo, state, b, SPEC)
    observation, following, action = exact(b.observation), exact(b.next_observation), exact(b.action)
    taken = values(exact(state.critic.target_params), observation, action).min(axis=0)

    def value_loss(params):
        error = taken - values(params, observation)[0]
        return mean(np.where(error > 0, 0.8, 0.2) * error**2)

    assert float(info.metrics["value_loss"]) == pytest.approx(value_loss(exact(state.value.params)), rel=1e-5)
    value = descended(value_loss, state.value.params, RATE)
    close(new.value.params, value)

    weights = np.minimum(np.exp(2.0 * (taken - values(value, observation)[0])), 1.5)
    assert (weights == 1.5).any() and (weights < 1.5).any()

    def policy_loss(params):
        return -mean(weights * likelihood(params, observation, action))

    assert float(info.metrics["policy_loss"]) == pytest.approx(policy_loss(exact(state.policy.params)), rel=1e-5)
    close(new.policy.params, descended(policy_loss, state.policy.params, POLICY_RATE))

    loss = squared(b, target_of(b, values(value, following)[0]))
    assert float(info.metrics["critic_loss"]) == pytest.approx(loss(exact(state.critic.params)), rel=1e-5)
    critic = descended(loss, state.critic.params, RATE)
    close(new.critic.params, critic)
    close(new.critic.target_params, moved(state.critic.target_params, critic))


@pytest.mark.long
def test_crr():
    algo = offline.CRR.replace(**ACTOR_CRITIC, target_period=1, temperature=0.5, max_weight=1.5)
    b, state = batch(), start(algo)
    new, info = updated(algo, state, b, SPEC)
    observation, following, action = exact(b.observation), exact(b.next_observation), exact(b.action)
    next_key, key = (q_learning.transition_keys(k, BATCH, ONE) for k in jax.random.split(KEY))

    does = drawn(exact(state.policy.target_params), following, noises(next_key, 1)[0])[0]
    loss = squared(b, target_of(b, values(exact(state.critic.target_params), following, does)[0]))
    assert float(info.metrics["critic_loss"]) == pytest.approx(loss(exact(state.critic.params)), rel=1e-5)
    critic = descended(loss, state.critic.params, RATE)
    close(new.critic.params, critic)

    now, old = exact(state.critic.params), exact(state.policy.params)
    baseline = np.mean([values(now, observation, drawn(old, observation, x)[0])[0] for x in noises(key, 4)], axis=0)
    weights = np.minimum(np.exp((values(now, observation, action)[0] - baseline) / 0.5), 1.5)
    assert (weights == 1.5).any() and (weights < 1.5).any()

    def policy_loss(params):
        return -mean(weights * likelihood(params, observation, action))

    assert float(info.metrics["policy_loss"]) == pytest.approx(policy_loss(old), rel=1e-5)
    policy = descended(policy_loss, old, POLICY_RATE)
    close(new.policy.params, policy)
    close(new.policy.target_params, moved(state.policy.target_params, policy))
    close(new.critic.target_params, moved(state.critic.target_params, critic))


# --- Q-learning ------------------------------------------------------------------------------------------------------


def q_outputs(params, observation, size):
    """[batch, 4, size], or of a dueling head V + A - mean A."""
    features = np.tanh(affine(params["torso"]["torso"]["dense"]["layer_0"], observation))
    head = params["head"]
    advantage = affine(head["advantage"]["output"], features).reshape(BATCH, 4, size)
    if "state_value" not in head:
        return advantage
    state_value = affine(head["state_value"]["output"], features).reshape(BATCH, 1, size)
    return state_value + advantage - advantage.mean(axis=1, keepdims=True)


HEADS = {
    "values": ActionValues(dueling=True),
    "c51": CategoricalValues(11),
    "qr": QuantileValues(5),
}


@pytest.mark.parametrize("head", one_quick(HEADS, "values"))
def test_dqn(head):
    """Double Q-learning from three steps, importance weights and priorities, with each head."""
    support = {"v_min": -3.0, "v_max": 3.0} if head == "c51" else {}
    algo = jaxrl.DQN(
        **COMMON,
        **support,
        prioritized=True,
        max_grad_norm=None,
        target_period=1,
        target_update=TAU,
        network=QNetwork(MLP((8,)), head=HEADS[head]),
    )
    b, state = batch(discrete=True), start(algo, DISCRETE)
    new, info = updated(algo, state, b, DISCRETE)
    observation, following = exact(b.observation), exact(b.next_observation)
    size, atoms = {"values": 1, "c51": 11, "qr": 5}[head], np.linspace(-3.0, 3.0, 11)
    importance, each = np.asarray(b.sample_info.importance, np.float64), np.arange(BATCH)

    def expected(outputs):
        return softmax(outputs, axis=-1) @ atoms if head == "c51" else outputs.mean(axis=-1)

    best = expected(q_outputs(exact(state.network.params), following, size)).argmax(axis=1)
    slow = q_outputs(exact(state.network.target_params), following, size)[each, best]
    total, reach = (x[:, None] for x in rewards_and_reach(b))

    def losses(params):
        """The loss and the priority of each transition."""
        chosen = q_outputs(params, observation, size)[each, np.asarray(b.action)]
        if head == "values":
            error = (total + reach * slow - chosen)[:, 0]
            return 0.5 * error**2, np.abs(error)
        if head == "c51":
            wanted = projected(total + reach * atoms[None], softmax(slow, axis=-1), atoms)
            entropy = -np.sum(wanted * log_softmax(chosen, axis=-1), axis=-1)
            known = np.where(wanted > 0, wanted * np.log(np.maximum(wanted, 1e-300)), 0.0).sum(axis=-1)
            return entropy, entropy + known
        error = (total + reach * slow)[:, None, :] - chosen[:, :, None]
        size_ = np.abs(error)
        huber = np.where(size_ <= 1.0, 0.5 * error**2, size_ - 0.5)
        level = np.abs((np.arange(5) + 0.5)[None, :, None] / 5 - (error < 0))
        found = (level * huber).mean(axis=2).sum(axis=1)
        return found, found

    def loss(params):
        return mean(importance * losses(params)[0])

    now = exact(state.network.params)
    assert float(info.metrics["loss"]) == pytest.approx(loss(now), rel=1e-5)
    wanted = losses(now)[1] + 1e-6
    np.testing.assert_allclose(info.priorities["replay"][COUNTED], wanted[COUNTED], rtol=1e-5, atol=1e-5)
    network = descended(loss, now, RATE)
    close(new.network.params, network)
    close(new.network.target_params, moved(state.network.target_params, network))


def implicit(params, observation, levels):
    """Quantiles [batch, 4, N] at levels [batch, N]."""
    features = np.tanh(affine(params["torso"]["torso"]["dense"]["layer_0"], observation))
    head = params["head"]
    cosines = np.cos(np.pi * levels[..., None] * np.arange(6))
    joined = features[:, None] * np.maximum(affine(head["embedding"], cosines), 0.0)
    advantage, state_value = (affine(head["values"][name]["output"], joined) for name in ("advantage", "state_value"))
    return np.moveaxis(state_value + advantage - advantage.mean(axis=-1, keepdims=True), 2, 1)


@pytest.mark.long
def test_implicit_quantiles_with_munchausen():
    """As Beyond the Rainbow: three steps, the first with Munchausen's bonus, at fractions drawn three times."""
    algo = jaxrl.DQN(
        **COMMON,
        munchausen=True,
        munchausen_temperature=0.3,
        munchausen_clip=-0.4,
        quantile_huber=0.5,
        prioritized=True,
        max_grad_norm=None,
        target_period=1,
        target_update=TAU,
        network=QNetwork(MLP((8,)), head=ImplicitQuantileValues(5, 6, dueling=True)),
    )
    assert algo.n_step == 3
    b, state = batch(discrete=True), start(algo, DISCRETE)
    new, info = updated(algo, state, b, DISCRETE)
    levels = []
    for key in jax.random.split(KEY, 4)[:3]:
        keys = jax.vmap(lambda k: jax.random.fold_in(k, 2))(q_learning.transition_keys(key, BATCH, ONE))
        levels.append(exact(jax.vmap(lambda k: jax.random.uniform(k, (5,), jnp.float32))(keys)))
    slow, tau = exact(state.network.target_params), 0.3
    observation, following, each = exact(b.observation), exact(b.next_observation), np.arange(BATCH)
    log_policy = tau * log_softmax(implicit(slow, observation, levels[1]).mean(-1) / tau, axis=-1)
    bonus = log_policy[each, np.asarray(b.action)]
    assert (bonus < -0.4).any() and (bonus > -0.4).any()
    after = implicit(slow, following, levels[2])
    log_policy = tau * log_softmax(after.mean(-1) / tau, axis=-1)
    soft = (np.exp(log_policy / tau)[..., None] * (after - log_policy[..., None])).sum(axis=1)
    total, reach = (x[:, None] for x in rewards_and_reach(b))
    target = total + 0.9 * np.clip(bonus, -0.4, 0.0)[:, None] + reach * soft
    importance = np.asarray(b.sample_info.importance, np.float64)

    def losses(params):
        chosen = implicit(params, observation, levels[0])[each, np.asarray(b.action)]
        error = target[:, None, :] - chosen[:, :, None]
        size = np.abs(error)
        huber = np.where(size <= 0.5, 0.5 * error**2, 0.5 * (size - 0.25)) / 0.5
        return (np.abs(levels[0][:, :, None] - (error < 0)) * huber).mean(axis=2).sum(axis=1)

    def loss(params):
        return mean(importance * losses(params))

    now = exact(state.network.params)
    assert float(info.metrics["loss"]) == pytest.approx(loss(now), rel=1e-5)
    np.testing.assert_allclose(info.priorities["replay"][COUNTED], (losses(now) + 1e-6)[COUNTED], rtol=1e-5, atol=1e-5)
    network = descended(loss, now, RATE)
    close(new.network.params, network)
    close(new.network.target_params, moved(state.network.target_params, network))
