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
from helpers.offline import CHOICE, choices
from helpers.offline import updated as updated_on_two
from helpers.oracle import affine, close, descended, exact, stepped
from helpers.tiers import one_quick
from helpers.updates import (
    ACTOR_CRITIC,
    COMMON,
    COUNTED,
    GAMMA,
    KEY,
    ONE,
    POLICY_RATE,
    RATE,
    TAU,
    assert_learned,
    batch,
    boxed,
    critics,
    drawn,
    gaussian,
    hidden,
    mean,
    members,
    moved,
    noise,
    projected,
    rewards_and_reach,
    unit,
)
from scipy.special import log_softmax, logsumexp, softmax
from scipy.stats import norm

import jaxrl
from jaxrl.algos import q_learning
from jaxrl.algos.fields import PrioritizedReplay
from jaxrl.algos.kl_limits import MPOLimits
from jaxrl.algos.munchausen import Munchausen
from jaxrl.algos.temperature import Temperature
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

DISCRETE = EnvSpec("choice", SPEC.observation_space, spaces.Discrete(4))


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


# --- networks and equations ------------------------------------------------------------------------------------------


def values(params, observation, action=None):
    return critics(params, observation, action)[..., 0]


def deterministic(params, observation):
    return boxed(np.tanh(affine(params["action"], hidden(params, observation))))


def log_probs(params, observation, mask):
    """Return those of all actions, [batch, actions]; of forbidden ones minus infinity."""
    logits = affine(params["distribution"]["output"], hidden(params, observation))
    return log_softmax(np.where(mask, logits, -np.inf), axis=-1)


def likelihood(params, b):
    """Return that of the actions of a batch in [-1, 1]; within a thousandth of a bound, the mean density there."""
    if b.action.ndim == 1:
        return log_probs(params, exact(b.observation), masks(b)[0])[np.arange(BATCH), np.asarray(b.action)]
    mean, std = gaussian(params, exact(b.observation))
    u, limit = unit(exact(b.action)), 1 - 1e-3
    inner = np.clip(u, -limit, limit)
    inside = norm.logpdf(np.arctanh(inner), mean, std) - np.log(1 - inner**2)
    below = norm.logcdf((np.arctanh(-limit) - mean) / std) - np.log(1e-3)
    above = norm.logsf((np.arctanh(limit) - mean) / std) - np.log(1e-3)
    return np.sum(np.where(u <= -limit, below, np.where(u >= limit, above, inside)), axis=-1)


def taken_values(params, b):
    """Return the values [ensemble, batch] of the actions that were taken."""
    if b.action.ndim == 1:
        return critics(params, exact(b.observation))[:, np.arange(BATCH), np.asarray(b.action)]
    return values(params, exact(b.observation), exact(b.action))


def chosen(forbidden=True):
    """Return the batch with three actions, of which some are forbidden; after the one that does not count all."""
    b, later = choices(), choices().next_action_mask.at[-1].set(False)
    if not forbidden:
        return batch().replace(action=b.action)
    return batch().replace(action=b.action, action_mask=b.action_mask, next_action_mask=later)


def masks(b):
    """Return what is allowed here and there, of rows that count."""
    given = (b.action_mask, b.next_action_mask)
    return [np.ones((BATCH, 3), bool) if x is None else np.asarray(x) | ~COUNTED[:, None] for x in given]


def target_of(b, following):
    total, reach = rewards_and_reach(b)
    return total + reach * following


def squared(b, target):
    return lambda params: np.sum(mean(0.5 * (target - taken_values(params, b)) ** 2))


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
        algo = algo.replace(policy_delay=1, target_noise=0.4)
    b, state = batch(), start(algo)
    new, info = updated_on_two(algo, state, b, KEY)
    if name == "td3bc":  # normalized by what is learned from
        seen = exact(b.observation)[COUNTED]
        ends = ((exact(x) - seen.mean(0)) / seen.std(0) for x in (b.observation, b.next_observation))
        b = b.replace(**dict(zip(("observation", "next_observation"), ends, strict=True)))
    observation, following = exact(b.observation), exact(b.next_observation)

    action = deterministic(exact(state.policy.target_params), following)
    if name != "ddpg":
        away = 0.4 * noise(KEY)
        assert (np.abs(away) > 0.5).any(), "one that is limited"
        action = boxed(unit(action) + np.clip(away, -0.5, 0.5))
    target = target_of(b, values(exact(state.critic.target_params), following, action).min(axis=0))
    critic = assert_learned(new.critic.params, info.metrics["critic_loss"], squared(b, target), state.critic.params)

    first = jax.tree.map(lambda x: x[:1], critic)
    does = deterministic(exact(state.policy.params), observation)
    scale = 2.5 / mean(np.abs(values(first, observation, does)[0])) if name == "td3bc" else 1.0

    def policy_loss(params):
        does = deterministic(params, observation)
        distance = np.mean((unit(does) - unit(exact(b.action))) ** 2, axis=-1) if name == "td3bc" else 0.0
        return mean(distance - scale * values(first, observation, does)[0])

    loss, old = info.metrics["policy_loss"], state.policy
    policy = assert_learned(new.policy.params, loss, policy_loss, old.params, POLICY_RATE)
    close(new.policy.target_params, moved(old.target_params, policy))
    close(new.critic.target_params, moved(state.critic.target_params, critic))


@pytest.mark.long
@pytest.mark.parametrize("ensemble", [1, 2])
def test_d4pg(ensemble):
    """Of several critics the target is that of the one that expects least, as in FastTD3 (arXiv:2505.22642)."""
    network = Critic(widths=(8,), ensemble=ensemble, head=CategoricalValues(11))
    algo = continuous.D4PG.replace(**ACTOR_CRITIC, critic=network)
    b, state, support = batch(), start(algo), np.linspace(-5.0, 5.0, 11)
    new, info = updated(algo, state, b, SPEC)
    observation, following = exact(b.observation), exact(b.next_observation)
    action = deterministic(exact(state.policy.target_params), following)
    probabilities = softmax(critics(exact(state.critic.target_params), following, action), axis=-1)
    least = (probabilities @ support).argmin(axis=0)
    assert len(set(least)) == ensemble
    probabilities = probabilities[least, np.arange(BATCH)]
    total, reach = rewards_and_reach(b)
    wanted = projected(total[:, None] + reach[:, None] * support[None], probabilities, support)
    importance = np.asarray(b.sample_info.importance, np.float64)

    def entropies(params):
        return -np.sum(wanted * log_softmax(critics(params, observation, exact(b.action)), axis=-1), axis=-1)

    def loss(params):
        return np.sum(mean(importance * entropies(params)))

    critic = assert_learned(new.critic.params, info.metrics["critic_loss"], loss, state.critic.params)
    known = np.where(wanted > 0, wanted * np.log(np.maximum(wanted, 1e-300)), 0.0).sum(axis=-1)
    divergence = entropies(exact(state.critic.params)).mean(axis=0) + known
    np.testing.assert_allclose(info.priorities["replay"][COUNTED], divergence[COUNTED] + 1e-6, rtol=1e-5, atol=1e-5)
    edge, clipped = wanted[:, [0, -1]].sum(axis=-1), np.abs(total[:, None] + reach[:, None] * support[None]) > 5.01
    assert float(info.metrics["support_edge_mass"]) == pytest.approx(mean(edge), rel=1e-5)
    wanted_mass = mean(np.sum(np.where(clipped, probabilities, 0.0), axis=-1))
    assert float(info.metrics["support_clipped_mass"]) == pytest.approx(wanted_mass, rel=1e-5, abs=1e-6)

    def policy_loss(params):
        logits = critics(critic, observation, deterministic(params, observation))[0]
        return -mean(softmax(logits, axis=-1) @ support)

    old = state.policy
    policy = assert_learned(new.policy.params, info.metrics["policy_loss"], policy_loss, old.params, POLICY_RATE)
    close(new.policy.target_params, moved(old.target_params, policy))
    close(new.critic.target_params, moved(state.critic.target_params, critic))
    uniform = algo.replace(prioritized=None)
    assert jax.eval_shape(functools.partial(updated, spec=SPEC), uniform, state, b)[1].priorities == {}


# --- stochastic policies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "spec", "learned"),
    one_quick(
        [
            pytest.param(name, spec, learned, id=f"{name}-{spec.name}-{learned}")
            for name in ("sac", "cql")
            for spec in (SPEC, CHOICE)
            for learned in (True, False)
        ],
        "sac-box-True",
    ),
)
def test_sac_and_cql(name, spec, learned):
    """By turns temperature and coefficient are learned and fixed, and some of discrete actions forbidden and none.

    CQL clones in its first updates, and then no longer.
    Over discrete actions expectations are exact (Christodoulou, 2019, equations 10 to 12).
    """
    algo = {"sac": continuous.SAC, "cql": offline.CQL}[name].replace(
        **ACTOR_CRITIC, temperature=Temperature(initial=0.3, learned=learned, target_fraction=0.5)
    )
    if name == "cql":
        threshold = 1.0 if learned else None
        algo = algo.replace(coefficient=2.0, lagrange_threshold=threshold, entropy_in_target=spec is CHOICE)
        algo = algo.replace(cloning_updates=2.0)
    cloning = name == "cql" and not learned
    b, state = batch() if spec is SPEC else chosen(learned), start(algo, spec)
    state = state.replace(updates=jnp.int32(1 if cloning else 2))
    new, info = updated_on_two(algo, state, b, KEY, spec)
    observation, following, (here, there) = exact(b.observation), exact(b.next_observation), masks(b)
    next_key, key = jax.random.split(KEY)
    old, now = exact(state.policy.params), noise(key)

    def expected(policy, critic, observation, noise, mask):
        """Return the value and the entropy [batch] of what the policy does."""
        if spec is SPEC:
            action, log_prob = drawn(policy, observation, noise)
            return values(critic, observation, action).min(axis=0), -log_prob
        logs = log_probs(policy, observation, mask)
        logs, chance = np.where(mask, logs, 0.0), np.exp(logs)
        return np.sum(chance * critics(critic, observation).min(axis=0), axis=-1), -np.sum(chance * logs, axis=-1)

    value, entropy = expected(old, exact(state.critic.target_params), following, noise(next_key), there)
    weight = 0.3 if name == "sac" or algo.entropy_in_target else 0.0
    errors = squared(b, target_of(b, value + weight * entropy))

    proposed = []
    if name == "cql" and spec is SPEC:
        # Three actions each, with their log-densities: uniform ones, the policy's here, and the policy's there.
        keys = q_learning.transition_keys(next_key, BATCH, ONE)
        places = [jax.vmap(lambda k, place=place: jax.random.fold_in(k, place))(keys) for place in range(3)]
        split = [jax.random.split(k, 3) for k in places[0]]
        proposed = [(np.float64([BOX.sample(each[i]) for each in split]), -2 * np.log(2)) for i in range(3)]
        for place, seen in ((1, observation), (2, following)):
            proposed += [drawn(old, seen, one) for one in noises(places[place], 3)]

    def gaps(params):
        """Return log of the integral of exp Q, by importance sampling or exact, less Q of the data's action."""
        if spec is CHOICE:
            maximum = logsumexp(np.where(here, critics(params, observation), -np.inf), axis=-1)
        else:
            each = [values(params, observation, action) - log_density for action, log_density in proposed]
            maximum = logsumexp(np.stack(each), axis=0) - np.log(9)
        return mean(maximum - taken_values(params, b))

    loss = errors
    if name == "cql":
        loss = lambda params: errors(params) + 0.5 * 2.0 * np.sum(gaps(params))  # noqa: E731
        gap = np.mean(gaps(exact(state.critic.params)))
        assert float(info.metrics["conservative_gap"]) == pytest.approx(gap, rel=1e-5)
        close(new.log_coefficient.params, stepped(np.log(2.0), -0.5 * 2.0 * (gap - 1.0), RATE) if learned else ())
    assert float(info.metrics["critic_loss"]) == pytest.approx(errors(exact(state.critic.params)), rel=1e-5)
    critic = descended(loss, state.critic.params, RATE)
    close(new.critic.params, critic)
    close(new.critic.target_params, moved(state.critic.target_params, critic))

    def policy_loss(params):
        value, entropy = expected(params, critic, observation, now, here)
        return mean(-0.3 * entropy - (likelihood(params, b) if cloning else value))

    assert_learned(new.policy.params, info.metrics["policy_loss"], policy_loss, old, POLICY_RATE)
    entropy = mean(expected(old, critic, observation, now, here)[1])
    assert float(info.metrics["entropy"]) == pytest.approx(entropy, rel=1e-5, abs=1e-5)
    target = -2.0 if spec is SPEC else mean(0.5 * np.log(here.sum(axis=1)))
    close(new.log_temperature.params, stepped(np.log(0.3), entropy - target, RATE) if learned else ())


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
    for number, (member, own) in enumerate(zip(members(params), members(state), strict=True)):
        features, correction, after = normed_features(member, own, x, training, corrections[number])
        found.append((affine(member["head"]["advantage"]["output"], features)[:, 0], correction, after))
    value, correction, after = zip(*found, strict=True)
    return np.stack(value), correction, jax.tree.map(lambda *x: np.stack(x), *after)


@pytest.mark.long
@pytest.mark.parametrize("seen", one_quick([0, 100_000], 100_000))
def test_crossq(seen):
    """By turns before and after the warm-up of the statistics, which are of the rows that count."""
    algo = continuous.CROSSQ.replace(
        **COMMON, policy_learning_rate=POLICY_RATE, temperature=Temperature(initial=0.3), policy_delay=1
    )
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
        **fields,
        temperature=Temperature(initial=0.3),
        discriminator_learning_rate=0.2,
        reward=reward,
        absorbing=absorbing,
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
    critic = assert_learned(new.critic.params, info.metrics["critic_loss"], loss, state.critic.params)
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
        **ACTOR_CRITIC, target_period=1, kl_limits=MPOLimits(temperature=2.0), critic=network, v_min=-5.0, v_max=5.0
    )
    b, state, support = batch(), start(algo), np.linspace(-5.0, 5.0, 11)
    new, info = updated_on_two(algo, state, b, KEY)
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

    assert_learned(new.critic.params, info.metrics["critic_loss"], critic_loss, state.critic.params)

    old_mean, old_std = gaussian(slow, observation)
    points = old_mean + old_std * noises(keys, 6)
    weights = softmax(np.stack([least(observation, boxed(np.tanh(x))) @ support for x in points]) / 2.0, axis=0)
    improved = mean(np.sum(weights * np.log(6 * weights), axis=0))
    assert float(info.metrics["kl_improved"]) == pytest.approx(improved, rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("per_dimension", [True, False])
def test_mpo(per_dimension):
    limits = MPOLimits(temperature=2.0, alpha_mean=1.5, alpha_std=3.0, learning_rate=0.02, per_dimension=per_dimension)
    critic = Critic(widths=(8,), ensemble=1 if per_dimension else 2)
    algo = continuous.MPO.replace(**ACTOR_CRITIC, target_period=1, critic=critic, kl_limits=limits)
    b, state = batch(), start(algo)
    new, info = updated_on_two(algo, state, b, KEY)
    observation, following = exact(b.observation), exact(b.next_observation)
    slow, slow_critic = exact(state.policy.target_params), exact(state.critic.target_params)
    next_keys, keys = (q_learning.transition_keys(k, BATCH, ONE) for k in jax.random.split(KEY))

    does = [drawn(slow, following, one)[0] for one in noises(next_keys, 6)]
    loss = squared(b, target_of(b, np.mean([values(slow_critic, following, one).min(0) for one in does], axis=0)))
    critic = assert_learned(new.critic.params, info.metrics["critic_loss"], loss, state.critic.params)

    old_mean, old_std = gaussian(slow, observation)
    points = old_mean + old_std * noises(keys, 6)
    valued = np.stack([values(slow_critic, observation, boxed(np.tanh(x))).min(0) for x in points])  # [6, batch]
    weights = softmax(valued / 2.0, axis=0)

    def kls(params):
        """Return those of the mean and the deviation, each beside the old other, by dimension or in all."""
        new_mean, new_std = gaussian(params, observation)
        ratio = old_std / new_std
        kl_mean = (new_mean - old_mean) ** 2 / (2 * old_std**2)
        found = mean(kl_mean.T), mean((np.log(new_std / old_std) + ratio**2 / 2 - 0.5).T)
        return found if per_dimension else [x.sum(keepdims=True) for x in found]

    def fit(params):
        new_mean, new_std = gaussian(params, observation)
        fitted = norm.logpdf(points, new_mean, old_std) + norm.logpdf(points, old_mean, new_std)
        return -mean(np.sum(weights * fitted.sum(axis=-1), axis=0))

    def policy_loss(params):
        kl_mean, kl_std = kls(params)
        return fit(params) + np.sum(1.5 * kl_mean + 3.0 * kl_std)

    policy = descended(policy_loss, state.policy.params, POLICY_RATE)
    close(new.policy.params, policy)
    close(new.policy.target_params, moved(state.policy.target_params, policy))
    close(new.critic.target_params, moved(state.critic.target_params, critic))

    kl_mean, kl_std = kls(exact(state.policy.params))
    improved = mean(np.sum(weights * np.log(6 * weights), axis=0))
    told = {"policy_loss": fit(exact(state.policy.params)), "kl_mean": kl_mean.mean(), "kl_std": kl_std.mean()}
    told |= {"kl_improved": improved, "temperature": 2.0, "alpha_mean": 1.5, "alpha_std": 3.0}
    for name, wanted in told.items():
        assert float(info.metrics[name]) == pytest.approx(wanted, rel=1e-4, abs=1e-6), name

    def dual_loss(duals):
        positive = {name: np.log1p(np.exp(x)) for name, x in duals.items()}
        eta = positive["temperature"]
        temperature = mean(eta * (0.1 + logsumexp(valued / eta, axis=0) - np.log(6)))
        bounds = np.sum(positive["mean"] * (2.5e-3 - kl_mean)) + np.sum(positive["std"] * (1e-4 - kl_std))
        return temperature + bounds

    close(new.duals.params, descended(dual_loss, state.duals.params, 0.02))


@pytest.mark.long
def test_mpo_of_discrete_actions():
    """Exact expectations over the actions that are allowed; of the policy there is one divergence."""
    algo = continuous.MPO.replace(**ACTOR_CRITIC, target_period=1, kl_limits=MPOLimits(temperature=0.5, alpha_mean=2.0))
    b, state = chosen(), start(algo, CHOICE)
    new, info = updated_on_two(algo, state, b, KEY, CHOICE)
    observation, following, (here, there) = exact(b.observation), exact(b.next_observation), masks(b)
    slow, slow_critic = exact(state.policy.target_params), exact(state.critic.target_params)

    def expected(chance, x):
        return np.sum(chance * np.where(chance > 0, x, 0.0), axis=-1)

    after = expected(np.exp(log_probs(slow, following, there)), critics(slow_critic, following)[0])
    loss = squared(b, target_of(b, after))
    critic = assert_learned(new.critic.params, info.metrics["critic_loss"], loss, state.critic.params)
    close(new.critic.target_params, moved(state.critic.target_params, critic))

    prior, valued = log_probs(slow, observation, here), critics(slow_critic, observation)[0]
    weights = softmax(prior + valued / 0.5, axis=-1)

    def fit(params):
        return -mean(expected(weights, log_probs(params, observation, here)))

    def kl(params):
        entropies = expected(np.exp(prior), prior) - expected(np.exp(prior), log_probs(params, observation, here))
        return mean(entropies)

    old = exact(state.policy.params)
    policy = descended(lambda params: fit(params) + 2.0 * kl(params), old, POLICY_RATE)
    close(new.policy.params, policy)
    close(new.policy.target_params, moved(slow, policy))
    improved = mean(expected(weights, np.log(np.maximum(weights, 1e-300))) - expected(weights, prior))
    for name, wanted in {"policy_loss": fit(old), "kl_mean": kl(old), "kl_improved": improved}.items():
        assert float(info.metrics[name]) == pytest.approx(wanted, rel=1e-4), name

    def dual_loss(duals):
        eta, alpha = (np.log1p(np.exp(duals[name])) for name in ("temperature", "mean"))
        return mean(eta * (0.1 + logsumexp(prior + valued / eta, axis=-1))) + np.sum(alpha * (2.5e-3 - kl(old)))

    close(new.duals.params, descended(dual_loss, state.duals.params, 1e-2))


@pytest.mark.long
@pytest.mark.parametrize("spec", [SPEC, CHOICE], ids=["box", "discrete"])
def test_iql(spec):
    algo = offline.IQL.replace(**ACTOR_CRITIC, expectile=0.8, inverse_temperature=2.0, max_weight=1.5)
    b, state = batch() if spec is SPEC else chosen(), start(algo, spec)
    new, info = updated_on_two(algo, state, b, KEY, spec)
    observation, following = exact(b.observation), exact(b.next_observation)
    taken = taken_values(exact(state.critic.target_params), b).min(axis=0)

    def value_loss(params):
        error = taken - values(params, observation)[0]
        return mean(np.where(error > 0, 0.8, 0.2) * error**2)

    value = assert_learned(new.value.params, info.metrics["value_loss"], value_loss, state.value.params)
    weights = np.minimum(np.exp(2.0 * (taken - values(value, observation)[0])), 1.5)
    assert (weights == 1.5).any() and (weights < 1.5).any()
    assert float(info.metrics["advantage_weight"]) == pytest.approx(mean(weights), rel=1e-5)

    def policy_loss(params):
        return -mean(weights * likelihood(params, b))

    assert_learned(new.policy.params, info.metrics["policy_loss"], policy_loss, state.policy.params, POLICY_RATE)
    loss = squared(b, target_of(b, values(value, following)[0]))
    critic = assert_learned(new.critic.params, info.metrics["critic_loss"], loss, state.critic.params)
    close(new.critic.target_params, moved(state.critic.target_params, critic))


@pytest.mark.long
@pytest.mark.parametrize(
    ("spec", "weighting", "baseline"),
    [
        (SPEC, "exp", "mean"),
        (SPEC, "exp", "max"),
        (SPEC, "indicator", "mean"),
        (CHOICE, "exp", "mean"),
        (CHOICE, "exp", "max"),
        (CHOICE, "constant", "mean"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_crr(spec, weighting, baseline):
    """Every weighting and baseline, equations 2 to 4; over discrete actions sums are of those that are allowed."""
    fields = {"target_period": 1, "temperature": 0.5, "max_weight": 1.5, "weighting": weighting, "baseline": baseline}
    algo = offline.CRR.replace(**ACTOR_CRITIC, **fields)
    b, state = batch() if spec is SPEC else chosen(), start(algo, spec)
    if spec is CHOICE:
        b = b.replace(next_action_mask=choices().next_action_mask)
    new, info = updated_on_two(algo, state, b, KEY, spec)
    observation, following, (here, there) = exact(b.observation), exact(b.next_observation), masks(b)
    next_key, key = (q_learning.transition_keys(k, BATCH, ONE) for k in jax.random.split(KEY))

    def valued(policy, critic, observation, keys, mask, samples):
        """Return probabilities and values, [batch, actions]: of all actions, or of samples."""
        if spec is CHOICE:
            return np.exp(log_probs(policy, observation, mask)), critics(critic, observation)[0]
        each = [values(critic, observation, drawn(policy, observation, x)[0])[0] for x in noises(keys, samples)]
        return np.full((BATCH, samples), 1 / samples), np.stack(each, axis=-1)

    slow = exact(state.policy.target_params), exact(state.critic.target_params)
    after = np.sum(np.prod(valued(*slow, following, next_key, there, 1), axis=0), axis=-1)
    loss = squared(b, target_of(b, after))
    critic = assert_learned(new.critic.params, info.metrics["critic_loss"], loss, state.critic.params)

    old, now = exact(state.policy.params), exact(state.critic.params)
    chance, each = valued(old, now, observation, key, here, 4)
    best = np.where(chance > 0, each, -np.inf).max(axis=-1)
    advantage = taken_values(now, b)[0] - (best if baseline == "max" else np.sum(chance * each, axis=-1))
    weights = {"exp": np.minimum(np.exp(advantage / 0.5), 1.5), "indicator": advantage > 0, "constant": 1.0}
    weights = np.broadcast_to(weights[weighting], advantage.shape)
    assert len(set(weights)) > 1 or weighting == "constant"

    def policy_loss(params):
        return -mean(weights * likelihood(params, b))

    policy = assert_learned(new.policy.params, info.metrics["policy_loss"], policy_loss, old, POLICY_RATE)
    close(new.policy.target_params, moved(state.policy.target_params, policy))
    close(new.critic.target_params, moved(state.critic.target_params, critic))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gaussian", "deterministic", "discrete"])
def test_bc(kind):
    algo = offline.BC.replace(learning_rate=RATE, optimizer=COMMON["optimizer"])
    if kind == "deterministic":
        algo = algo.replace(policy=continuous.DETERMINISTIC["policy"])
    spec, b = (CHOICE, chosen()) if kind == "discrete" else (SPEC, batch())
    state = start(algo, spec)
    new, info = updated_on_two(algo, state, b, KEY, spec)

    def loss(params):
        if kind != "deterministic":
            return -mean(likelihood(params, b))
        return mean(np.mean((unit(deterministic(params, exact(b.observation))) - unit(exact(b.action))) ** 2, axis=-1))

    assert_learned(new.policy.params, info.metrics["policy_loss"], loss, state.policy.params)
    if kind == "deterministic":
        assert float(info.metrics["squared_distance"]) == float(info.metrics["policy_loss"])
    elif kind == "discrete":
        right = log_probs(exact(state.policy.params), exact(b.observation), b.action_mask).argmax(1) == np.asarray(
            b.action
        )
        assert float(info.metrics["accuracy"]) == pytest.approx(mean(right))


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
        prioritized=PrioritizedReplay(),
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

    network = assert_learned(new.network.params, info.metrics["loss"], loss, state.network.params)
    wanted = losses(exact(state.network.params))[1] + 1e-6
    np.testing.assert_allclose(info.priorities["replay"][COUNTED], wanted[COUNTED], rtol=1e-5, atol=1e-5)
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
        munchausen=Munchausen(temperature=0.3, clip=-0.4),
        quantile_huber=0.5,
        prioritized=PrioritizedReplay(),
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

    network = assert_learned(new.network.params, info.metrics["loss"], loss, state.network.params)
    wanted = losses(exact(state.network.params)) + 1e-6
    np.testing.assert_allclose(info.priorities["replay"][COUNTED], wanted[COUNTED], rtol=1e-5, atol=1e-5)
    close(new.network.target_params, moved(state.network.target_params, network))
