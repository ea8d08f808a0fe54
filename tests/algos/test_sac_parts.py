"""One whole update of SAC with each of its parts against numpy in float64, written from the papers' equations.

As in tests/algos/test_oracles.py nothing of jaxrl computes what is expected, and random numbers are shared: a
transition's keys, which critics were drawn, and what was dropped.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import torso_equations, updates
from helpers.continuous import BATCH, QUICK, SAC, SPEC
from helpers.oracle import EPS, close, descended, exact, stepped
from helpers.programs import assert_equal, resumed
from helpers.registered import OWN_ALGORITHMS
from helpers.updates import (
    ACTOR_CRITIC,
    COUNTED,
    GAMMA,
    KEY,
    ONE,
    POLICY_RATE,
    RATE,
    TAU,
    assert_learned,
    critics,
    drawn,
    mean,
    members,
    moved,
    noise,
    rewards_and_reach,
    squashed,
    unit,
)
from scipy.special import log_softmax, softmax

import jaxrl
from jaxrl.algos import normalization, pessimism, q_learning
from jaxrl.algos.acting import Noise
from jaxrl.algos.fields import Memory
from jaxrl.algos.optimizers import Adam, AdamW
from jaxrl.algos.pessimism import Pessimism
from jaxrl.algos.reward_scale import RewardScale
from jaxrl.algos.sac import ReturnScale
from jaxrl.algos.temperature import Temperature
from jaxrl.core import spaces
from jaxrl.core.schedules import Cosine, Linear, resolve_schedules
from jaxrl.core.types import EnvSpec
from jaxrl.networks import (
    GRU,
    Actor,
    CategoricalReturns,
    CategoricalValues,
    Critic,
    InvertedResidual,
    QuantileValues,
    SimBa,
    SimBaV2,
    UnitMLP,
)
from jaxrl.run.presets import PRESETS

ALPHA = 0.3
FIELDS = ACTOR_CRITIC | {"temperature": Temperature(initial=ALPHA)}
BOTH = np.concatenate([COUNTED, COUNTED])
SUPPORT = np.linspace(-2.0, 2.0, 5)


def batch():
    returned = 4.0 * np.random.default_rng(4).normal(size=BATCH)
    return updates.batch().replace(extras={"discounted_return": jnp.asarray(returned, jnp.float32)})


def start(algo):
    """A learner that has a target of its own, and running statistics that are not those of its batch."""
    state = resolve_schedules(algo, jnp.float32(0)).init(jax.random.key(1), SPEC)
    rng = np.random.default_rng(8)

    def moved(x):
        return jnp.asarray(np.abs(np.asarray(x) + rng.uniform(0.1, 0.3, x.shape)), jnp.float32)

    def varied(path, x):  # scales and biases, which all begin alike, but for those of unit norm
        if path[-1].key in ("kernel", "unit_kernel", "unit_scale", "unit_bias"):
            return x
        return x + jnp.asarray(rng.uniform(-0.3, 0.3, x.shape), jnp.float32)

    critic, policy = (
        x.replace(
            params=jax.tree_util.tree_map_with_path(varied, x.params),
            model_state=jax.tree.map(moved, x.model_state),
        )
        for x in (state.critic, state.policy)
    )
    slow = jax.tree.map(lambda x: 0.7 * x + 0.05, critic.params)
    return state.replace(critic=critic.replace(target_params=slow), policy=policy, updates=jnp.int32(1))


@jax.jit
def updated(algo, state, transitions, key, progress=0.0):
    algo = resolve_schedules(algo, progress)
    return algo.update(state, {"replay": transitions}, spec=SPEC, key=key, replicas=ONE)


def assert_polyak(old, new, params):
    close(new.critic.target_params, moved(old, params))


# --- ensembles of plain networks -------------------------------------------------------------------------------------


def assert_updated(algo, loss_of, target_of, value_of, kept=(None, None, None)):
    """Critics, targets, policy and temperature after an update.

    `loss_of` makes the loss of the critics' outputs and a target, `target_of` the target of the target critics' outputs
    and the log-probability, `value_of` the policy's value of outputs.
    """
    b, state = batch(), start(algo)
    new, info = updated(algo, state, b, KEY)
    observation, following = exact(b.observation), exact(b.next_observation)
    next_key, key = jax.random.split(KEY)
    action, log_prob = drawn(exact(state.policy.params), following, noise(next_key))
    target = target_of(critics(exact(state.critic.target_params), following, action, kept[0]), log_prob)

    def critic_loss(params):
        return loss_of(critics(params, observation, exact(b.action), kept[1]), target)

    critic = assert_learned(new.critic.params, info.metrics["critic_loss"], critic_loss, state.critic.params)
    assert_polyak(state.critic.target_params, new, critic)

    def policy_loss(params):
        action, log_prob = drawn(params, observation, noise(key))
        return mean(ALPHA * log_prob - value_of(critics(critic, observation, action, kept[2])))

    assert_learned(new.policy.params, info.metrics["policy_loss"], policy_loss, state.policy.params, POLICY_RATE)
    missing = mean(drawn(exact(state.policy.params), observation, noise(key))[1]) - 2.0
    close(new.log_temperature.params, stepped(np.log(ALPHA), -missing, RATE))


def quantile_loss(quantiles, target):
    """Of three quantiles, linear from errors of 0.5 on."""
    levels = (np.arange(3) + 0.5) / 3
    error = target[None, :, None, :] - quantiles[..., None]
    huber = np.where(np.abs(error) <= 0.5, error**2 / 2, 0.5 * (np.abs(error) - 0.25)) / 0.5
    losses = np.abs(levels[:, None] - (error < 0)) * huber
    return np.sum(mean(losses.mean(axis=-1).sum(axis=-1)))


@pytest.mark.long
def test_tqc():
    """Kuznetsov et al. (2020), equations 3 and 5 to 10: quantiles of all critics, without the largest."""
    algo = SAC.replace(
        **FIELDS,
        critic=Critic(widths=(8,), ensemble=2, head=QuantileValues(3)),
        pessimism=Pessimism(policy="mean", dropped_quantiles=1),
        quantile_huber=0.5,
    )
    b = batch()

    def target_of(quantiles, log_prob):
        pooled = np.sort(np.concatenate(list(quantiles), axis=-1), axis=-1)[:, :-2]
        total, reach = rewards_and_reach(b)
        return total[:, None] + reach[:, None] * (pooled - ALPHA * log_prob[:, None])

    assert_updated(algo, quantile_loss, target_of, lambda quantiles: quantiles.mean(axis=(0, -1)))


@pytest.mark.long
def test_bro():
    """Nauman et al. (2024, arXiv:2405.16158), section 3: the mean of the critics, quantile by quantile."""
    critic = Critic(widths=(8,), ensemble=2, head=QuantileValues(3))
    algo = SAC.replace(**FIELDS, critic=critic, pessimism=Pessimism(target="mean", policy="mean"), quantile_huber=0.5)

    def target_of(quantiles, log_prob):
        total, reach = rewards_and_reach(batch())
        return total[:, None] + reach[:, None] * (np.mean(quantiles, axis=0) - ALPHA * log_prob[:, None])

    assert_updated(algo, quantile_loss, target_of, lambda quantiles: quantiles.mean(axis=(0, -1)))


def test_the_mean_of_an_ensemble_is_one_member():
    """Of values and probabilities; where actions are forbidden they stay so."""
    rng, mask = np.random.default_rng(0), np.asarray([[True, False, True]])
    values = rng.normal(size=(4, 1, 3))
    np.testing.assert_allclose(pessimism.mean_member(jnp.asarray(values))[0], values.mean(0), rtol=1e-6)
    logits = rng.normal(size=(4, 1, 3, 5))
    returns = CategoricalReturns(jnp.asarray(logits), jnp.broadcast_to(mask, (4, 1, 3)))
    mean = pessimism.mean_member(returns)
    np.testing.assert_allclose(jax.nn.softmax(mean.logits)[0], softmax(logits, axis=-1).mean(0), rtol=1e-5)
    np.testing.assert_array_equal(mean.mask, mask[None])


@pytest.mark.long
def test_redq():
    """Chen et al. (2021, arXiv:2101.05982), algorithm 1: the smallest of two drawn critics, the mean of all."""
    algo = SAC.replace(**FIELDS, critic=Critic(widths=(8,), ensemble=4), pessimism=Pessimism(policy="mean", sampled=2))
    subset = np.asarray(jax.random.permutation(jax.random.fold_in(KEY, 2), 4)[:2])
    assert sorted(subset) != [0, 1], "other critics than the first"

    def target_of(values, log_prob):
        return Expected.target(values[subset], *rewards_and_reach(batch()), -ALPHA * log_prob)

    assert_updated(algo, Expected.loss, target_of, lambda values: values[..., 0].mean(axis=0))


@pytest.mark.long
def test_droq():
    """Hiraoka et al. (2022, arXiv:2110.02034), figure 2: dropout before the layer normalization, also of targets."""
    algo = SAC.replace(
        **FIELDS, critic=Critic(widths=(8,), dropout=0.2, normalization="layer"), pessimism=Pessimism(policy="mean")
    )

    def kept(key):
        keys, masks = q_learning.transition_keys(key, BATCH, ONE), []
        for member in range(2):
            own = [jax.random.fold_in(jax.random.fold_in(k, member), 0) for k in keys]
            masks.append([np.asarray(jax.random.bernoulli(k, 0.8, (1, 8)))[0] for k in own])
        return np.asarray(masks)

    masks = [kept(key) for key in jax.random.split(jax.random.fold_in(KEY, 3), 3)]
    assert 0.7 < np.mean(masks) < 0.9

    def target_of(values, log_prob):
        return Expected.target(values, *rewards_and_reach(batch()), -ALPHA * log_prob)

    assert_updated(algo, Expected.loss, target_of, lambda values: values[..., 0].mean(axis=0), masks)


# --- networks that stabilize learning, as their presets have them -----------------------------------------------------


TORSOS = {
    "flashsac": (torso_equations.inverted_residual, InvertedResidual(width=4, blocks=1, expansion=2)),
    "xqc": (torso_equations.unit_mlp, UnitMLP((4, 3))),
    "simba": (torso_equations.simba, SimBa(width=3, blocks=1, expansion=2)),
    "simbav2": (torso_equations.simba_v2, SimBaV2(width=3, blocks=1, expansion=2, shift=3.0)),
}


def through(features, trees, place, x, rows):
    """The features of a torso at `place`; without batch normalization there are no statistics."""
    params, stats = ((functools.reduce(dict.get, (*place, "dense"), tree) if tree else None) for tree in trees)
    return features(params, stats, x, rows)


def biased(layer, x):
    return x @ layer["unit_kernel" if "unit_kernel" in layer else "kernel"] + layer["bias"]


def preset_policy(features, ends, params, stats, observation, noise, rows=None):
    """`ends` of the range that tanh squashes the logarithm of the deviation into; None: it is clipped."""
    x = through(features, (params, stats), ("body", "torso"), observation, rows)[: len(noise)]
    head = params["distribution"]
    log_std = (-1.0 if ends is None else 0.5) + biased(head["log_std_output"], x)
    if ends is None:
        log_std = np.clip(log_std, -20, 2)
    else:
        log_std = ends[0] + (ends[1] - ends[0]) * (1 + np.tanh(log_std)) / 2
    std = np.exp(log_std)
    return squashed(biased(head["output"], x), std, noise)


def preset_critics(features, params, stats, observation, action, rows=None):
    x, found = np.concatenate([observation, unit(action)], axis=-1), []
    for member, seen in zip(members(params), members(stats) if stats else (None, None), strict=True):
        found.append(
            biased(member["head"]["advantage"]["output"], through(features, (member, seen), ("trunk",), x, rows))
        )
    return np.stack(found)


def projected(params):
    """Columns of norm 1; scales, and biases with them, of the norm sqrt(d)."""
    if not isinstance(params, dict):
        return params
    new = {name: projected(value) for name, value in params.items()}
    if "unit_kernel" in params:
        new["unit_kernel"] = params["unit_kernel"] / np.linalg.norm(params["unit_kernel"], axis=-2, keepdims=True)
    if "unit_scale" in params:
        square = sum(np.sum(params[name] ** 2, -1, keepdims=True) for name in params if name.startswith("unit"))
        new |= {name: x * np.sqrt(x.shape[-1] / square) for name, x in params.items() if name.startswith("unit")}
    return new


class Categorical:
    """Distributions over the support: their values, the target of what follows, and the loss."""

    @staticmethod
    def values(logits):
        return softmax(logits, axis=-1) @ SUPPORT

    @staticmethod
    def target(logits, total, reach, entropy):
        """From the distribution of the member that expects least."""
        probabilities = softmax(logits, axis=-1)
        least = (probabilities @ SUPPORT).argmin(axis=0)
        assert set(least) == {0, 1}
        atoms = total[:, None] + reach[:, None] * (SUPPORT[None] + entropy[:, None])
        return updates.projected(atoms, probabilities[least, np.arange(BATCH)], SUPPORT)

    @staticmethod
    def loss(logits, target):
        return np.sum(mean(-np.sum(target * log_softmax(logits, axis=-1), axis=-1)))


class Expected:
    """The same of expected values."""

    @staticmethod
    def values(outputs):
        return outputs[..., 0]

    @staticmethod
    def target(outputs, total, reach, entropy):
        return total + reach * (outputs[..., 0].min(axis=0) + entropy)

    @staticmethod
    def loss(outputs, target):
        return np.sum(mean(0.5 * (target - outputs[..., 0]) ** 2))


def narrow(name, **fields):
    """A preset with narrow networks, and numbers as above; its learning rate begins at twice RATE."""
    algo, torso, support = PRESETS[name].algorithm, TORSOS[name][1], {}
    head = algo.critic.head
    if isinstance(head, CategoricalValues):
        head, support = dataclasses.replace(head, atoms=5), {"v_min": -2.0, "v_max": 2.0}
    rate = algo.learning_rate
    if isinstance(rate, Linear | Cosine):
        rate = dataclasses.replace(rate, start=2 * RATE, end=RATE)
    decay = algo.optimizer.weight_decay if isinstance(algo.optimizer, AdamW) else 0.0
    assert (decay > 0.0) == (name == "simba")
    optimizer = AdamW(eps=EPS, weight_decay=0.3) if decay else Adam(eps=EPS)
    return algo.replace(
        gamma=GAMMA,
        tau=TAU,
        n_step=3,
        temperature=Temperature(initial=ALPHA),
        optimizer=optimizer,
        learning_rate=rate if isinstance(rate, Linear | Cosine) else RATE,
        policy=dataclasses.replace(
            algo.policy, torso=torso, initial_log_std=-1.0 if algo.policy.log_std_range is None else 0.5
        ),
        critic=dataclasses.replace(algo.critic, trunk=torso, head=head),
        **support,
        **fields,
    )


def learned_before(state):
    """The state after statistics of other observations and returns; and these."""
    rng = np.random.default_rng(9)
    observations, returns = rng.normal(0.5, 2.0, (6, 3)).astype(np.float32), np.float32(3.0 * rng.normal(size=6))
    counts = jnp.ones(6, bool)
    if state.statistics != ():
        state = state.replace(statistics=normalization.update(state.statistics, observations, counts, ONE))
    if state.return_scale != ():
        scale = normalization.update(state.return_scale.statistics, returns, counts, ONE)
        state = state.replace(return_scale=ReturnScale(scale, jnp.float32(np.abs(returns).max())))
    return state, observations.astype(np.float64), returns.astype(np.float64)


def normalized(observation, before):
    seen = np.concatenate([before, exact(batch().observation)[COUNTED]])
    return (observation - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("flashsac", {"reward_scale": RewardScale(largest_return=0.5)}),
        ("flashsac", {"reward_scale": RewardScale(largest_return=50.0)}),
        ("xqc", {}),
        ("simba", {}),
        ("simbav2", {"reward_scale": RewardScale(largest_return=1.0)}),
    ],
)
def test_presets(name, fields):
    """Batches of both ends, distributions, scaled rewards, normalized observations, weights of unit norm, decay.

    FlashSAC's both ends go through critics, targets and policy as one batch, XQC's through critics and targets alone.
    By turns the largest return and the deviation of returns divide the rewards.
    """
    algo, features = narrow(name, **fields), TORSOS[name][0]
    joint = isinstance(algo, jaxrl.CrossQ)
    policy = functools.partial(preset_policy, features, algo.policy.log_std_range)
    valued = functools.partial(preset_critics, features)
    outputs = Categorical if isinstance(algo.critic.head, CategoricalValues) else Expected
    decay = algo.optimizer.weight_decay if isinstance(algo.optimizer, AdamW) else 0.0
    state, observations, returns = learned_before(start(algo))
    state = state.replace(updates=jnp.int32(algo.policy_delay - 1))
    b, rate = batch(), RATE
    if isinstance(algo.learning_rate, Linear):
        rate = 1.75 * RATE
    elif isinstance(algo.learning_rate, Cosine):
        rate = RATE * (1.5 + 0.5 * np.cos(np.pi / 4))
    assert (rate > RATE) == (name != "simba")
    new, info = updated(algo, state, b, KEY, 0.25)
    observation, following = exact(b.observation), exact(b.next_observation)
    if algo.normalize_observation:
        observation, following = (normalized(x, observations) for x in (observation, following))
    stats, policy_stats = exact(state.critic.model_state), exact(state.policy.model_state)
    next_key, key = jax.random.split(KEY)

    total, reach = rewards_and_reach(b)
    if (scale := algo.reward_scale) is not None:
        now = GAMMA * np.asarray(b.extras["discounted_return"]) + np.asarray(b.rewards, np.float64)[:, 0]
        returns = np.concatenate([returns, now[COUNTED]])
        largest = 0.0 if scale.largest_return is None else np.abs(returns).max() / scale.largest_return
        assert (returns.std() > largest) == (scale.largest_return in (None, 50.0))
        total, reach = rewards_and_reach(b, 1.0 / max(returns.std(), largest))
        assert float(new.return_scale.largest) == pytest.approx(np.abs(returns).max(), rel=1e-6)

    action, log_prob = policy(exact(state.policy.params), policy_stats, following, noise(next_key))
    both = np.concatenate([observation, following]), np.concatenate([exact(b.action), action])
    seen, rows = (both, BOTH) if joint else ((observation, exact(b.action)), COUNTED)
    slow = exact(state.critic.target_params)
    if joint:
        there = valued(slow, stats, *both, BOTH)[:, BATCH:]
    else:
        there = valued(slow, stats, following, action)
    target = outputs.target(there, total, reach, -ALPHA * log_prob)

    def critic_loss(params):
        return outputs.loss(valued(params, stats, *seen, rows)[:, :BATCH], target)

    before = exact(state.critic.params)
    close(before, projected(before), 1e-6)
    assert float(info.metrics["critic_loss"]) == pytest.approx(critic_loss(before), rel=1e-5)
    free = descended(critic_loss, before, rate, decay)
    critic = projected(free)
    moved = max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (free, critic)), strict=True))
    assert moved > 1e-3 if "unit_kernel" in str(before) else moved == 0.0
    close(new.critic.params, critic, 2e-5)
    assert_polyak(state.critic.target_params, new, critic)

    now = exact(new.critic.model_state)
    assert (now != ()) == joint
    if now:  # the first batch normalization sees the inputs alone
        inputs, old = np.concatenate([seen[0], unit(seen[1])], axis=-1)[rows], stats["trunk"]["dense"]["norm_inputs"]
        close(now["trunk"]["dense"]["norm_inputs"]["mean"], 0.99 * old["mean"] + 0.01 * inputs.mean(0))
        close(now["trunk"]["dense"]["norm_inputs"]["var"], 0.99 * old["var"] + 0.01 * inputs.var(0))

    acting, acting_rows = (both[0], BOTH) if (joint and algo.joint_policy) else (observation, COUNTED)

    def policy_loss(params):  # by the critics' running statistics
        action, log_prob = policy(params, policy_stats, acting, noise(key), acting_rows)
        return mean(ALPHA * log_prob - outputs.values(valued(critic, now, observation, action)).min(axis=0))

    old = exact(state.policy.params)
    assert float(info.metrics["policy_loss"]) == pytest.approx(policy_loss(old), rel=1e-5)
    close(new.policy.params, projected(descended(policy_loss, old, rate, decay)), 2e-5)
    missing = mean(policy(old, policy_stats, acting, noise(key), acting_rows)[1]) + 2.0 * algo.temperature.target
    close(new.log_temperature.params, stepped(np.log(ALPHA), -missing, rate, decay))

    # Between its steps policy and temperature stay, and the critics learn as ever.
    if algo.policy_delay > 1:
        between, _ = updated(algo, state.replace(updates=jnp.int32(algo.policy_delay - 2)), b, KEY, 0.25)
        assert_equal((between.policy, between.log_temperature), (state.policy, state.log_temperature))
        assert_equal(between.critic, new.critic)


# --- runs ------------------------------------------------------------------------------------------------------------


def test_flashsac_learns_and_resumes_bit_for_bit(tmp_path):
    """Episodes have one step, worth 1 less the squared distance of the action from 0.5; random ones -0.6 on average."""
    torso = InvertedResidual(width=16, blocks=1)
    algo = jaxrl.CrossQ(
        **QUICK,
        optimizer=Adam(eps=1e-8),
        learning_rate=1e-3,
        temperature=Temperature(initial=0.01, target=-1.5),
        policy=Actor(torso=torso, widths=(), gain=None),
        critic=Critic(trunk=torso, widths=(), head=CategoricalValues(41, gain=None)),
        v_min=-5.0,
        v_max=5.0,
        tau=0.005,
        joint_policy=True,
        policy_delay=2,
        reward_scale=RewardScale(),
        noise=Noise(random_correlation=0.9, hold=16),
    )
    env = jaxrl.make("probe:ActionReward", continuous=True)
    whole = resumed(tmp_path, algo, env, 4_096, topology=jaxrl.Anakin(num_envs=8, devices=1))
    assert whole.evaluation.return_mean > 0.9


@pytest.mark.long
def test_memory_goes_with_the_parts():
    """Both ends of the transitions within sequences are selected from one pass over them."""
    algo = jaxrl.CrossQ(
        policy=Actor(widths=(8,), core=GRU(4)),
        critic=Critic(widths=(8,), core=GRU(4), normalization="batch_renorm", dropout=0.1),
        joint_policy=True,
        reward_scale=RewardScale(),
        memory=Memory(length=4, burn_in=2),
        capacity=256,
        min_size=64,
        batch_size=12,
        replay_ratio=1 / 16,
    )
    result = jaxrl.train(algo, "gymnax:Pendulum-v1", total_steps=256, num_envs=4, evaluate_every=0, progress=False)
    learner = result.state.learner
    assert int(learner.updates) > 0 and float(learner.return_scale.largest) > 0.0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(learner.critic))


def test_dropout_is_refused_where_nothing_would_be_dropped():
    """Every other algorithm took it and did not look at it, nor did GAIL's discriminator and IQL's value."""
    spec, dropping = EnvSpec("probe", spaces.Box(-1.0, 1.0, (4,)), spaces.Box(-1.0, 1.0, (2,))), set()
    for name in OWN_ALGORITHMS:
        algo = jaxrl.make_algorithm(name)
        for field in dataclasses.fields(algo):
            if isinstance(network := getattr(algo, field.name), Critic):
                one = algo.replace(**{field.name: dataclasses.replace(network, dropout=0.1)}).resolve(spec, 8)
                label = f"{type(algo).__name__}.{field.name}"
                if not any(line.startswith(f"{label}: dropout=0.1 has no") for line in one.validate(spec, 8, 1)):
                    dropping.add(label)
    assert dropping == {"SAC.critic", "CrossQ.critic", "GAIL.critic"}
