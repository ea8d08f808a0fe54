"""DreamerV3 against numpy in float64, written from the paper: each part, every loss, and a whole update.

Nothing of jaxrl computes what is expected. What is shared is the random numbers. Gradients are central differences of a
loss in which everything without a gradient has the value of now, and drawn latents move with their probabilities.
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.discounted import Discounted
from helpers.oracle import EPS, exact
from helpers.programs import resumed
from scipy.special import expit, log_softmax, softmax

import jaxrl
from jaxrl.algos import dreamer
from jaxrl.algos.fields import Memory
from jaxrl.algos.optimizers import Adam, LaProp
from jaxrl.core import spaces
from jaxrl.core.types import EnvSpec, Rollout, SequenceBatch, TimeStep, env_spec
from jaxrl.networks import Categorical, WorldModel
from jaxrl.networks.world_model import LatentCarry, LatentState, Observed, Outcome
from jaxrl.parallel.replicas import MeshReplicas, SingleReplica

ONE, KEY = SingleReplica(), jax.random.key(7)
BURN_IN, LENGTH, BATCH, STEPS = 1, 5, 2, 3
NETWORK = WorldModel(deter=4, stoch=2, classes=3, hidden=3, units=3, blocks=2, layers=1, depth=2, multipliers=(2, 4))
ALGO = jaxrl.Dreamer(
    network=NETWORK,
    gamma=0.9,
    learning_rate=0.1,
    optimizer=Adam(eps=EPS),
    entropy_cost=0.3,
    observation_scale=3.0,
    free_nats=0.01,
    return_decay=0.75,
    tau=0.25,
    imagination_length=STEPS,
    memory=Memory(length=LENGTH, burn_in=BURN_IN),
)
PLAIN = EnvSpec("plain", spaces.Box(-9.0, 9.0, (2,)), spaces.Discrete(3))
MIXED = EnvSpec(
    "mixed",
    spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (6, 5, 1), np.uint8),
            "kind": spaces.Discrete(3),
            "speed": PLAIN.observation_space,
        }
    ),
    spaces.Dict({"amount": spaces.Box(-1.0, 3.0, (1,)), "choice": spaces.Discrete(3)}),
    masked=True,
    discounted=True,
)
TURNS = dataclasses.replace(PLAIN, name="turns", discounted=True)
AT = np.sign(np.linspace(-20, 20, 255)) * np.expm1(np.abs(np.linspace(-20, 20, 255)))


def symlog(x):
    return np.sign(x) * np.log1p(np.abs(x))


def sequences(spec):
    """Sequences of rows: a termination and another episode after it; a truncation likewise; then one that goes on."""
    draw, rows = np.random.default_rng(3), BURN_IN + LENGTH + 1
    first = np.zeros((rows, BATCH), bool)
    terminated, truncated = first.copy(), first.copy()
    terminated[3, 0] = truncated[2, 1] = True
    first[4, 0] = first[3, 1] = first[0, 1] = True

    def draws(space):
        found = [space.sample(key) for key in jax.random.split(jax.random.key(draw.integers(99)), rows * BATCH)]
        return jax.tree.map(lambda *x: jnp.stack(x).reshape((rows, BATCH, *x[0].shape)), *found)

    zero = lambda x: jnp.where(first.reshape((rows, BATCH, *[1] * (x.ndim - 2))), jnp.zeros_like(x), x)  # noqa: E731
    mask, own = None, None
    if spec is MIXED:
        mask = {"choice": jnp.asarray(draw.uniform(size=(rows, BATCH, 3)) < 0.6).at[..., 1].set(True)}
    if spec.discounted:
        signs = -1.0 if spec is TURNS else 1.0 - 2.0 * (np.arange(first.size).reshape(first.shape) % 3 == 0)
        own = jnp.asarray(np.where(terminated, 0.0, np.where(first, 1.0, 0.5 * signs)), jnp.float32)
    timesteps = TimeStep(
        observation=draws(spec.observation_space),
        reward=jnp.asarray(np.where(first, 0.0, draw.normal(size=first.shape) * 3), jnp.float32),
        terminated=jnp.asarray(terminated),
        truncated=jnp.asarray(truncated),
        first=jnp.asarray(first),
        action_mask=mask,
        previous_action=jax.tree.map(zero, draws(spec.action_space)),
        discount=own,
    )
    action = jax.tree.map(lambda x: x[1:], timesteps.previous_action)
    rows = Rollout(timesteps, action, extras={}, carry=(), final_carry=()).rows
    weight = rows.weight & (jnp.arange(BURN_IN + LENGTH)[:, None] >= BURN_IN)
    carry = LatentCarry(
        jnp.asarray(draw.normal(size=(BATCH, NETWORK.deter)), jnp.float32), jnp.asarray([[0, 2], [-1, -1]], jnp.int32)
    )
    mask = jnp.ones(weight.shape, bool)
    return SequenceBatch(rows.replace(weight=weight), timesteps[:-1], mask, carry, None, BURN_IN)


def learner(spec):
    """A learner no array of which is 0, whose slow critic is another than its critic."""
    state = ALGO.init(jax.random.key(0), spec)
    draw = np.random.default_rng(5)
    far = -2.0 * np.abs(np.linspace(-20, 20, 255))  # values and rewards are no large ones

    def moved(path, x):
        noise = 0.3 * draw.normal(size=x.shape)
        return jnp.asarray(x + noise + (far if x.shape == (255,) else 0.0), jnp.float32)

    params, slow = jax.tree_util.tree_map_with_path(moved, (state.network.params, state.slow_critic))
    network = state.network.replace(params=params)
    return state.replace(network=network, slow_critic=slow, return_range=jnp.asarray([-3.0, 1.0], jnp.float32))


# --- the networks in numpy -------------------------------------------------------------------------------------------


def rms(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-4) * scale


def layer(p, x):
    if p["kernel"].ndim == 2:
        y = x @ p["kernel"] + p["bias"]
    else:
        parts = np.split(x, len(p["kernel"]), axis=-1)
        y = np.concatenate([part @ block for part, block in zip(parts, p["kernel"], strict=True)], axis=-1) + p["bias"]
    if "norm" in p:
        y = rms(y, p["norm"]["scale"])
        y = y * expit(y)
    return y


def stack(p, x):
    for i in range(sum(name.startswith("layer_") for name in p)):
        x = layer(p[f"layer_{i}"], x)
    return layer(p["output"], x) if "output" in p else x


def convolved(p, x):
    """A convolution of stride 1 with zeros around, [..., H, W, C]."""
    k = len(p["kernel"])
    wide = np.pad(x, [(0, 0)] * (x.ndim - 3) + [(k // 2, k // 2)] * 2 + [(0, 0)])
    height, width = x.shape[-3:-1]
    total = p["bias"]
    for i in range(k):
        for j in range(k):
            total = total + wide[..., i : i + height, j : j + width, :] @ p["kernel"][i, j]
    return total


def pooled(x):
    """The largest of two by two; of what is left over at the ends, of one."""
    height, width = x.shape[-3:-1]
    rows = [np.max(x[..., i : i + 2, :, :], axis=-3) for i in range(0, height, 2)]
    x = np.stack(rows, axis=-3)
    return np.stack([np.max(x[..., j : j + 2, :], axis=-2) for j in range(0, width, 2)], axis=-2)


def activated(x, scale):
    y = rms(x, scale)
    return y * expit(y)


def encode(p, spec, observation):
    if spec is not MIXED:
        return stack(p["vector"]["dense"], symlog(exact(observation)))
    x = exact(observation["camera"]) / 255 - 0.5
    x = activated(pooled(convolved(p["image_0"]["conv_0"], x)), p["image_0"]["norm_0"]["scale"])
    flat = np.concatenate(
        [np.eye(3)[np.asarray(observation["kind"])] * np.log(2), symlog(exact(observation["speed"]))], -1
    )
    return np.concatenate([x.reshape((*x.shape[:-3], -1)), stack(p["vector"]["dense"], flat)], axis=-1)


def decoded(p, spec, deter, stoch, observation):
    """The decoder's loss of each time step."""
    vector = stack(p["vector"], np.concatenate([deter, flat(stoch)], axis=-1))
    if spec is not MIXED:
        return np.sum((vector - symlog(exact(observation))) ** 2, axis=-1)
    q = p["image_0"]
    x = layer(q["of_deter"], deter)  # of each block, all pixels and its part of the channels; one block is all of it
    blocks = 2 if q["of_deter"]["kernel"].ndim == 3 else 1
    x = np.moveaxis(x.reshape((*x.shape[:-1], blocks, 3, 3, 4 // blocks)), -4, -2).reshape((*x.shape[:-1], 3, 3, 4))
    x = activated(x + stack(q["of_stoch"], flat(stoch)).reshape(x.shape), q["norm"]["scale"])
    x = np.repeat(np.repeat(x, 2, axis=-3), 2, axis=-2)[..., :6, :5, :]
    found = np.sum((expit(convolved(q["conv_0"], x)) - exact(observation["camera"]) / 255) ** 2, axis=(-3, -2, -1))
    found -= np.sum(np.eye(3)[np.asarray(observation["kind"])] * log_softmax(vector[..., :3], axis=-1), axis=-1)
    return found + np.sum((vector[..., 3:] - symlog(exact(observation["speed"]))) ** 2, axis=-1)


def flat(stoch):
    return stoch.reshape((*stoch.shape[:-2], -1))


def act_vector(spec, action):
    if spec is not MIXED:
        return np.eye(3)[np.asarray(action)]
    unit = (exact(action["amount"]) - 1.0) / 2.0
    return np.concatenate([np.clip(unit, -1, 1), np.eye(3)[np.asarray(action["choice"])]], axis=-1)


def recur(p, deter, stoch, action):
    read = [layer(p[name], x) for name, x in (("of_deter", deter), ("of_stoch", flat(stoch)), ("of_action", action))]
    halves = np.split(deter, 2, axis=-1)
    hidden = layer(p["recurrent"], np.concatenate([x for half in halves for x in (half, *read)], axis=-1))
    gates = [np.split(part, 3, axis=-1) for part in np.split(layer(p["gates"], hidden), 2, axis=-1)]
    reset, candidate, update = (np.concatenate([gates[0][i], gates[1][i]], axis=-1) for i in range(3))
    update = expit(update - 1)
    return update * np.tanh(expit(reset) * candidate) + (1 - update) * deter


def mixed(logits):
    return 0.99 * softmax(logits, axis=-1) + 0.01 / logits.shape[-1]


def latents(logits):
    return mixed(logits.reshape((*logits.shape[:-1], 2, 3)))


def chosen(probability, uniform):
    """The class that a uniform number selects."""
    return np.sum(np.cumsum(probability, axis=-1) <= np.asarray(uniform, np.float64)[..., None], axis=-1)


def kl(p, q):
    return np.sum(p * (np.log(p) - np.log(q)), axis=(-2, -1))


def policy(p, spec, features, mask=None):
    """Probabilities of the choice, and mean and deviation of the amount in its units."""
    out = layer(p["action"], stack(p["actor"], features))
    if spec is not MIXED:
        return mixed(out), None
    choice = mixed(out[..., 2:])
    choice = choice * mask / np.sum(choice * mask, axis=-1, keepdims=True)
    return choice, (1.0 + 2.0 * np.tanh(out[..., 0]), 2.0 * (0.9 * expit(out[..., 1] + 2) + 0.1))


def two_hot_loss(logits, x):
    """The cross-entropy to the two bins next to each number."""
    k = np.clip(np.searchsorted(AT, x, side="right") - 1, 0, 253)
    above, logs = (x - AT[k]) / (AT[k + 1] - AT[k]), log_softmax(logits, axis=-1)
    at = lambda index: np.take_along_axis(logs, index[..., None], -1)[..., 0]  # noqa: E731
    return -(1 - above) * at(k) - above * at(k + 1)


def mean_of(logits):
    return softmax(logits, axis=-1) @ AT


# --- the update in numpy ---------------------------------------------------------------------------------------------


def unrolled(p, spec, batch, noise, now=None):
    """States after the burn-in, whose latents move with their probabilities from those of `now`."""
    timesteps = batch.timesteps
    onehot = np.where(np.asarray(batch.carry.classes)[..., None] == np.arange(3), 1.0, 0.0)
    deter, stoch, found, start = exact(batch.carry.deter), onehot, [], None
    for t in range(BURN_IN + LENGTH):
        if t == BURN_IN and now is not None:
            deter, stoch = now.start
        start = (deter, stoch) if t <= BURN_IN else start
        first = np.asarray(timesteps.first[t])
        deter, stoch = np.where(first[:, None], 0.0, deter), np.where(first[:, None, None], 0.0, stoch)
        action = act_vector(spec, jax.tree.map(lambda x, t=t: x[t], timesteps.previous_action))
        deter = recur(p, deter, stoch, np.where(first[:, None], 0.0, action))
        seen = encode(p, spec, jax.tree.map(lambda x, t=t: x[t], timesteps.observation))
        posterior = latents(stack(p["posterior_head"], np.concatenate([deter, seen], axis=-1)))
        onehot = np.eye(3)[chosen(posterior, noise[t])] if now is None else now.onehot[t]
        stoch = onehot + (0.0 if now is None else posterior - now.posterior[t])
        found.append((deter, stoch, posterior, latents(stack(p["prior_head"], deter)), onehot))
    deter, stoch, posterior, prior, onehot = (np.stack(x) for x in zip(*found, strict=True))
    return SimpleNamespace(deter=deter, stoch=stoch, posterior=posterior, prior=prior, onehot=onehot, start=start)


def features_of(states):
    return np.concatenate([states.deter, flat(states.stoch)], axis=-1)[BURN_IN:]


def imagined(params, spec, states, keys):
    """What follows from every state, by the policy and the model of now."""
    p, q = params["model"], params["predictions"]
    deter, stoch = (x[BURN_IN:].reshape((LENGTH * BATCH, *x.shape[2:])) for x in (states.deter, states.onehot))
    latent, acting = zip(*(jax.random.split(key) for key in keys), strict=True)
    uniform = np.stack([jax.random.uniform(key, (STEPS, LENGTH, 2)) for key in latent], axis=2).reshape((STEPS, -1, 2))
    act_keys = jnp.stack([jax.random.split(key, (STEPS, LENGTH)) for key in acting], axis=2).reshape((STEPS, -1))
    features, actions, masks = [np.concatenate([deter, flat(stoch)], axis=-1)], [], []
    for step in range(STEPS):
        mask = None if spec is not MIXED else stack(p["legal"], features[-1]) > 0
        choice, amount = policy(p, spec, features[-1], mask)
        if spec is not MIXED:
            action = chosen(choice, jax.vmap(lambda key: jax.random.uniform(key, ()))(act_keys[step]))
            taken = action
        else:
            parts = jax.vmap(lambda key: jax.random.split(key, 2))(act_keys[step])
            draw = jax.vmap(lambda key: jax.random.normal(key, (1,)))(parts[:, 0])[:, 0]
            choice = chosen(choice, jax.vmap(lambda key: jax.random.uniform(key, ()))(parts[:, 1]))
            action = {"amount": (amount[0] + amount[1] * exact(draw))[:, None], "choice": choice}
            taken = action | {"amount": np.clip(action["amount"], -1.0, 3.0)}
        deter = recur(p, deter, stoch, act_vector(spec, taken))
        stoch = np.eye(3)[chosen(latents(stack(p["prior_head"], deter)), uniform[step])]
        features.append(np.concatenate([deter, flat(stoch)], axis=-1))
        actions.append(action)
        masks.append(mask)
    features = np.stack(features)
    reward, goes_on = mean_of(stack(q["reward"], features)), expit(stack(q["continues"], features)[..., 0])
    sign = 1.0 - 2.0 * expit(stack(q["negative"], features)[..., 0]) if spec.discounted else np.ones_like(goes_on)
    value = mean_of(stack(params["critic"]["value"], features))
    returns, following = np.zeros((STEPS, LENGTH * BATCH)), value[-1]
    for t in reversed(range(STEPS)):
        following = reward[t + 1] + 0.9 * goes_on[t + 1] * sign[t + 1] * (0.05 * value[t + 1] + 0.95 * following)
        returns[t] = following
    weight = np.stack([goes_on[0] * np.prod(0.9 * goes_on[1 : t + 1], axis=0) for t in range(STEPS)])
    return SimpleNamespace(features=features, action=actions, mask=masks, returns=returns, value=value, weight=weight)


def replayed(batch, value):
    """Lambda-returns of the replayed rows, with imagined values: none of a row whose action did not count."""
    rows = jax.tree.map(lambda x: np.asarray(x[BURN_IN:]), batch.rows)
    found = np.zeros((LENGTH - 1, BATCH))
    for column in range(BATCH):
        following = value[-1, column]
        for t in reversed(range(LENGTH - 1)):
            if not rows.weight[t, column]:
                following = value[t, column]
                continue
            own = 1.0 if rows.discount is None else rows.discount[t, column]
            goes_on = 0.9 * own * (not rows.terminated[t, column])
            ahead = following if t + 1 < LENGTH - 1 and rows.weight[t + 1, column] else value[t + 1, column]
            following = rows.reward[t, column] + goes_on * (0.05 * value[t + 1, column] + 0.95 * ahead)
            found[t, column] = following
    return found, rows.weight[:-1]


def losses(params, spec, batch, slow, now):
    """Every loss, averaged over time steps."""
    p, q, timesteps = params["model"], params["predictions"], batch.timesteps[BURN_IN:]
    states = unrolled(p, spec, batch, None, now.states)
    deter, stoch, features = states.deter[BURN_IN:], states.stoch[BURN_IN:], features_of(states)
    posterior, prior = states.posterior[BURN_IN:], states.prior[BURN_IN:]
    own = 1.0 - exact(timesteps.terminated) if timesteps.discount is None else exact(timesteps.discount)
    goes_on = np.abs(own)
    logit = stack(q["continues"], features)[..., 0]
    found = {
        "observation_loss": decoded(q, spec, deter, stoch, timesteps.observation),
        "reward_loss": two_hot_loss(stack(q["reward"], features), exact(timesteps.reward)),
        "continue_loss": -goes_on * np.log(expit(logit)) - (1 - goes_on) * np.log(expit(-logit)),
        "dynamics_loss": np.maximum(kl(now.states.posterior[BURN_IN:], prior), 0.01),
        "representation_loss": np.maximum(kl(posterior, now.states.prior[BURN_IN:]), 0.01),
    }
    if spec.discounted:
        sign = expit(stack(q["negative"], features)[..., 0])
        found["sign_loss"] = np.where(own == 0.0, 0.0, np.where(own < 0.0, -np.log(sign), -np.log(1.0 - sign)))
    if spec is MIXED:
        logit, allowed = stack(p["legal"], features), exact(timesteps.action_mask["choice"])
        found["mask_loss"] = -np.sum(allowed * np.log(expit(logit)) + (1 - allowed) * np.log(expit(-logit)), axis=-1)

    def critic(features, *targets):
        logits = stack(params["critic"]["value"], features)
        return sum(two_hot_loss(logits, target) for target in targets)

    seen, reinforce, entropies = now.imagined, [], []
    scale = max(now.range[1] - now.range[0], 1.0)
    for t in range(STEPS):
        choice, amount = policy(p, spec, seen.features[t], seen.mask[t])
        index = seen.action[t] if spec is not MIXED else seen.action[t]["choice"]
        logs = np.log(np.where(choice > 0, choice, 1.0))
        log_prob, entropy = np.take_along_axis(logs, index[:, None], 1)[:, 0], -np.sum(choice * logs, axis=-1)
        if amount is not None:
            z = (seen.action[t]["amount"][:, 0] - amount[0]) / amount[1]
            log_prob = log_prob - 0.5 * z**2 - np.log(amount[1]) - 0.5 * np.log(2 * np.pi)
            entropy = entropy + np.log(amount[1]) + 0.5 * np.log(2 * np.pi * np.e)
        reinforce.append(-log_prob * (seen.returns[t] - seen.value[t]) / scale - 0.3 * entropy)
        entropies.append(entropy)
    found["policy_loss"] = np.mean(seen.weight * np.stack(reinforce), axis=0)
    slow = mean_of(stack(slow["value"], seen.features[:-1]))
    found["critic_loss"] = np.mean(seen.weight * critic(seen.features[:-1], seen.returns, slow), axis=0)
    target, weight = now.replayed
    found["replay_critic_loss"] = weight * critic(features[:-1], target, now.slow)
    return {name: np.mean(x) for name, x in found.items()} | {"entropy": np.mean(entropies)}


def total(found):
    scales = {"observation_loss": 3.0, "representation_loss": 0.1, "replay_critic_loss": 0.3, "entropy": 0.0}
    return sum(scales.get(name, 1.0) * x for name, x in found.items())


@functools.cache
def expected(spec):
    """What an update starts from, and what of it has no gradient."""
    state, batch = learner(spec), sequences(spec)
    params, slow = exact(state.network.params), exact(state.slow_critic)
    keys = jax.random.split(jax.random.fold_in(KEY, 0), BATCH)
    pairs = [jax.random.split(key) for key in keys]
    noise = np.stack([jax.random.uniform(pair[0], (BURN_IN + LENGTH, 2)) for pair in pairs], axis=1)
    states = unrolled(params["model"], spec, batch, noise)
    seen = imagined(params, spec, states, [pair[1] for pair in pairs])
    limits = 0.75 * np.asarray([-3.0, 1.0]) + 0.25 * np.percentile(seen.returns, [5, 95])
    slow_mean = mean_of(stack(slow["value"], features_of(states)[:-1]))
    target = replayed(batch, seen.returns[0].reshape((LENGTH, BATCH)))
    now = SimpleNamespace(states=states, imagined=seen, range=limits, replayed=target, slow=slow_mean)
    return state, batch, params, slow, now


@functools.cache
def updated(spec):
    state, batch = expected(spec)[:2]
    update = jax.jit(lambda state: ALGO.update(state, {"replay": batch}, spec=spec, key=KEY, replicas=ONE))
    return update(state)


@pytest.mark.long
@pytest.mark.parametrize("spec", [PLAIN, MIXED, TURNS], ids=["plain", "mixed", "turns"])
def test_every_loss_of_an_update_is_numpys(spec):
    _, batch, params, slow, now = expected(spec)
    assert batch.timesteps.terminated[BURN_IN:].any() and batch.timesteps.truncated[BURN_IN:].any()
    assert spec is not MIXED or not np.all(now.imagined.mask), "no imagined action is forbidden"
    assert not spec.discounted or (batch.timesteps.discount[BURN_IN:] < 0).any()
    state, info = updated(spec)
    found = losses(params, spec, batch, slow, now)
    for name, x in (found | {"loss": total(found)}).items():
        np.testing.assert_allclose(info.metrics[name], x, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(state.return_range, now.range, rtol=1e-5)
    np.testing.assert_allclose(info.metrics["return_scale"], max(now.range[1] - now.range[0], 1.0), rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("spec", [PLAIN, TURNS], ids=["plain", "turns"])
def test_a_whole_update_is_numpys(spec):
    """A few numbers of every array take Adam's step down the difference quotient, and the slow critic follows."""
    state, batch, params, slow, now = expected(spec)
    new, _ = updated(spec)
    before, after = (jax.tree_util.tree_leaves_with_path(x) for x in (params, exact(new.network.params)))
    draw, moved = np.random.default_rng(0), 0
    for (path, array), (_, result) in zip(before, after, strict=True):
        for number in draw.choice(array.size, min(array.size, 6), replace=False):
            place, ends = np.unravel_index(number, array.shape), []
            value = array[place]
            for sign in (1, -1):
                array[place] = value + sign * 1e-6
                ends.append(total(losses(params, spec, batch, slow, now)))
            array[place] = value
            slope = (ends[0] - ends[1]) / 2e-6
            moved += abs(slope) > 1e-3
            wanted = value - 0.1 * slope / (abs(slope) + EPS)
            np.testing.assert_allclose(
                result[place], wanted, rtol=1e-5, atol=1e-5, err_msg=f"{jax.tree_util.keystr(path)}{place}"
            )
    assert moved > 100, "most numbers are learned"
    wanted = jax.tree.map(lambda old, now: 0.75 * old + 0.25 * now, slow, exact(new.network.params["critic"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), new.slow_critic, wanted)


# --- parts -----------------------------------------------------------------------------------------------------------


def test_latents_and_choices_keep_a_hundredth_of_chance():
    logits = np.random.default_rng(0).normal(size=(5, 4)) * 30
    wanted = 0.99 * softmax(logits, axis=-1) + 0.01 / 4
    found = Categorical(jnp.asarray(logits, jnp.float32)).mixed(0.01)
    np.testing.assert_allclose(np.exp(found.log_probs()), wanted, rtol=1e-5)
    assert wanted.min() < 0.0026 and np.isfinite(found.logits).all()


@pytest.mark.long
def test_divergences_below_the_free_nats_move_nothing_and_others_one_side_each():
    """The loss of the dynamics moves the prior alone, that of the representation the posterior (equation 3)."""
    draw = np.random.default_rng(2)
    logits = (
        draw.normal(size=(2, 2, 1, NETWORK.stoch, NETWORK.classes)) * np.asarray([0.01, 2.0])[:, None, None, None, None]
    )
    state = LatentState(jnp.zeros((2, 1, 4)), jnp.zeros((2, 1, 2, 3)))
    timesteps = sequences(PLAIN).timesteps[:2]
    predicted = SimpleNamespace(
        observation=[jnp.zeros((2, BATCH, 2))],
        outcome=SimpleNamespace(
            reward=SimpleNamespace(loss=jnp.square), continues=jnp.zeros((2, BATCH)), negative=None
        ),
    )

    def loss(name, posterior, prior):
        observed = Observed(state, Categorical(posterior), Categorical(prior))
        return dreamer.model_losses(observed, predicted, timesteps, PLAIN.observation_space, 0.1)[name]

    posterior, prior = (jnp.asarray(x, jnp.float32) for x in np.moveaxis(logits, 1, 0))
    mixed_kl = np.sum(
        softmax(logits[:, 0], -1) * (log_softmax(logits[:, 0], -1) - log_softmax(logits[:, 1], -1)), (-2, -1)
    )
    assert (mixed_kl[0] < 0.1).all() and (mixed_kl[1] > 0.1).all(), "one on each side"
    for name, moves in (("dynamics_loss", 1), ("representation_loss", 0)):
        np.testing.assert_allclose(loss(name, posterior, prior), np.maximum(mixed_kl, 0.1), rtol=1e-5)
        slopes = jax.grad(lambda *x, name=name: jnp.sum(loss(name, *x)), (0, 1))(posterior, prior)
        assert not slopes[1 - moves].any(), "the other side is fixed"
        assert not slopes[moves][0].any() and slopes[moves][1].any()


def test_signs_are_predicted_where_an_environment_has_discounts_of_its_own():
    env = jaxrl.make("probe:Truncated")
    for one, discounted in ((env, False), (Discounted(env, discount=-1.0), True)):
        spec = env_spec(one)
        assert spec.discounted == discounted
        assert ("negative" in NETWORK.predictions.init(KEY, spec)[0]) == discounted
    logits = jnp.linspace(-3.0, 3.0, 7)
    wanted = expit(np.linspace(-3, 3, 7)) * (1 - 2 * expit(np.linspace(-3, 3, 7)))
    np.testing.assert_allclose(Outcome(None, logits, logits).discount, wanted, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(Outcome(None, logits, None).discount, expit(np.linspace(-3, 3, 7)), rtol=1e-5)


def test_percentiles_are_of_all_devices_and_their_range_is_1_at_least():
    values = np.random.default_rng(4).normal(size=(8, 3)).astype(np.float32) * 10
    wanted = np.percentile(values, [5, 95])
    np.testing.assert_allclose(dreamer.percentiles(jnp.asarray(values), ONE), wanted, rtol=1e-5)
    of_all = jax.vmap(lambda x: dreamer.percentiles(x, MeshReplicas("device", shards=2)), axis_name="device")
    np.testing.assert_array_equal(of_all(values.reshape(4, 2, 3))[3], dreamer.percentiles(jnp.asarray(values), ONE))
    assert dreamer.return_scale(jnp.asarray([-0.2, 0.3])) == 1.0
    assert dreamer.return_scale(jnp.asarray([-2.0, 3.0])) == 5.0


@pytest.mark.long
def test_acting_is_the_posterior_of_what_was_seen_and_forgets_at_a_first_observation():
    """Without exploring nothing is drawn; an episode's beginning hides the carry and the action before."""
    state, spec = learner(PLAIN), PLAIN
    timestep = sequences(PLAIN).timesteps[2]
    carry = LatentCarry(jnp.ones((BATCH, 4)), jnp.zeros((BATCH, 2), jnp.int32))
    fresh = jax.tree.map(lambda x: jnp.stack([x] * BATCH), ALGO.initial_carry(spec, jnp.int32(0), 1))
    act = functools.partial(ALGO.act, ALGO.actor(state), key=None, spec=spec, explore=False)
    first = timestep.replace(first=jnp.ones(BATCH, bool))
    other = first.replace(previous_action=2 - first.previous_action)
    jax.tree.map(np.testing.assert_array_equal, act(first, carry), act(other, fresh))
    p, later = exact(state.network.params["model"]), timestep.replace(first=jnp.zeros(BATCH, bool))
    output = act(later, carry)
    deter = recur(p, np.ones((BATCH, 4)), np.eye(3)[np.zeros((BATCH, 2), int)], act_vector(spec, later.previous_action))
    posterior = latents(
        stack(p["posterior_head"], np.concatenate([deter, encode(p, spec, later.observation)], axis=-1))
    )
    np.testing.assert_allclose(output.carry.deter, deter, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(output.carry.classes, posterior.argmax(-1))
    features = np.concatenate([deter, flat(np.eye(3)[posterior.argmax(-1)])], axis=-1)
    np.testing.assert_array_equal(output.action, policy(p, spec, features)[0].argmax(-1))


# --- learning --------------------------------------------------------------------------------------------------------

SMALL = ALGO.replace(
    network=WorldModel(deter=16, stoch=4, classes=4, hidden=16, units=16, blocks=2, layers=1),
    learning_rate=3e-3,
    optimizer=LaProp(warm_up=20.0),
    entropy_cost=3e-4,
    free_nats=1.0,
    return_decay=0.99,
    tau=0.02,
    memory=Memory(length=8, burn_in=0),
    rollout_length=4,
    batch_size=16,
    capacity=4_096,
    min_size=256,
    replay_ratio=1 / 16,
)


def trained(env, total_steps, **settings):
    settings |= {"evaluate_every": 0, "progress": False, "seed": 3, "evaluation_episodes": 32}
    return jaxrl.train(SMALL, env, total_steps=total_steps, topology=jaxrl.Anakin(num_envs=8, devices=1), **settings)


@pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "continuous"])
def test_it_finds_the_best_action_and_resumes_bit_for_bit(continuous, tmp_path):
    """One step, worth 1 for the first of two actions, or 1 less the squared distance of a number from 0.5."""
    env = jaxrl.make("probe:ActionReward", continuous=continuous)
    settings = {"evaluation_episodes": 32, "topology": jaxrl.Anakin(num_envs=8, devices=1)}
    assert resumed(tmp_path, SMALL, env, 8_192, **settings).evaluation.return_mean > 0.9


def test_values_go_on_beyond_a_time_limit():
    """A reward of 1 at every step is worth 10 with a discount of 0.9; 4.1 if a time limit after 5 were an end."""
    rows = trained("probe:Truncated", 24_576, log_every=1_024).metrics
    values = [row["update/imagined_value"] for row in rows if "update/imagined_value" in row]
    assert values[-1] == pytest.approx(10.0, rel=0.1)


def test_what_the_other_player_gains_is_lost():
    """Who moves gains 1, and then the other does: 1 - 0.9 (1 - 0.9 (...)), which is 0.53, and not 10."""
    rows = trained(Discounted(jaxrl.make("probe:Truncated"), discount=-1.0), 24_576, log_every=1_024).metrics
    values = [row["update/imagined_value"] for row in rows if "update/imagined_value" in row]
    assert values[-1] == pytest.approx(1.0 / 1.9, abs=0.1)
