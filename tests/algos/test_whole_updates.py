"""One whole update of each on-policy algorithm against numpy that shares no line with it, to 1e-5.

The numpy is float64: the network's forward pass, returns as sums over what follows each step, the losses, gradients by
central differences, clipping and one step of Adam; PPO's over two devices too. The data are stale, and hold every kind
of ending: terminations, time limits, the rollout's own end, and an environment that was built again within an episode.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from helpers.on_policy import (
    ACTIONS,
    SPEC,
    B,
    Data,
    T,
    broken_moments,
    collect,
    learner,
    updated,
    updated_on_two,
    vtrace,
)
from helpers.oracle import affine, divergence, exact, gradient, layer_normed
from helpers.tiers import one_quick

import jaxrl
from jaxrl.algos.kl_limits import KLLimits
from jaxrl.algos.kl_penalty import KLPenalty
from jaxrl.algos.optimizers import Adam
from jaxrl.core import spaces
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import EnvSpec
from jaxrl.networks import MLP, ActorCritic, QNetwork

BOXED = EnvSpec("boxed", spaces.Box(-1.0, 1.0, (3,)), spaces.Box(-1.0, 1.0, (2,)))
RATE, EPS, GAMMA, LAMBDA = 0.1, 1e-2, 0.9, 0.8
FIELDS = {
    "learning_rate": RATE,
    "optimizer": Adam(b1=0.9, b2=0.999, eps=EPS),  # so large that a step shows the size of its gradient
    "gamma": GAMMA,
    "rollout_length": T,
}
NETWORK = ActorCritic(MLP((4,)), policy_gain=2.0, value_gain=2.0)
WHOLE = {"epochs": 1, "minibatches": 1}  # the order of the rows does not matter then


# --- data ----------------------------------------------------------------------------------------------------------


def data_and_states(algo, spec=SPEC):
    """An actor's parameters, a learner of others, and the actor's rollout, in some of whose rows the agent is out."""
    actor, state = learner(algo, 1, spec), learner(algo, 0, spec)
    resolved = resolve_schedules(algo, jnp.float32(0))
    timesteps = broken_moments().replace(active=jnp.asarray(np.random.default_rng(4).random((T + 1, B)) < 0.7))
    rollout = collect(algo, resolved.actor(actor), timesteps, jax.random.key(3), spec)
    return actor.network.params, state, rollout


# --- networks ------------------------------------------------------------------------------------------------------

log_softmax = functools.partial(scipy.special.log_softmax, axis=-1)


def features(body, observation):
    return np.tanh(affine(body["torso"]["dense"]["layer_0"], observation))


def policy_and_value(params, observation):
    """What the policy is made of, logits or mean and log deviation, and the value."""
    policy, value = params["policy"], params["value"]
    head = policy["head"]
    output = affine(head["output"], features(policy["body"], observation))
    if "log_std" in head:
        output = (output, np.broadcast_to(head["log_std"], output.shape))
    return output, affine(value["head"]["output"], features(value["body"], observation))[..., 0]


def log_prob(policy, action):
    if isinstance(policy, tuple):
        mean, log_std = policy
        density = -0.5 * ((action - mean) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
        return density.sum(-1)
    return np.take_along_axis(log_softmax(policy), action[..., None], -1)[..., 0]


def entropy(policy):
    if isinstance(policy, tuple):
        return (policy[1] + 0.5 * np.log(2 * np.pi * np.e)).sum(-1)
    return -(np.exp(log_softmax(policy)) * log_softmax(policy)).sum(-1)


# --- steps ---------------------------------------------------------------------------------------------------------


def stepped(params, loss, parts, limit):
    """Parameters after one step of Adam down the gradient of `loss`, of which each part is clipped to `limit`."""
    gradients = gradient(loss, params)
    norms = {}
    for part in parts:
        mine = jax.tree.leaves(gradients[part] if part else gradients)
        norms[part] = np.sqrt(sum((x**2).sum() for x in mine))
        assert norms[part] > limit, "the clip should act"
        for x in mine:
            x *= limit / norms[part]
    # Adam's first step: its averages, corrected for their start at 0, are the gradient and its square.
    new = jax.tree.map(lambda p, g: p - RATE * g / (np.abs(g) + EPS), params, gradients)
    return new, norms


def assert_is(state, info, params, norms, metrics):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), exact(state), params)
    for part, norm in norms.items():
        name = f"{part}_gradient_norm" if part else "gradient_norm"
        np.testing.assert_allclose(info.metrics[name], norm, rtol=2e-5)
    for name, value in metrics.items():
        np.testing.assert_allclose(info.metrics[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def gae(data, values):
    """Advantages: discounted errors of what follows."""
    found = np.zeros((T, B))
    for t, b in np.argwhere(data.counts):
        terms = [(GAMMA * LAMBDA) ** (s - t) * data.error(GAMMA, values, s, b) for s in data.following(t, b)]
        found[t, b] = sum(terms)
    return found


PARTS = ("policy", "value")
GAUSSIAN = {"network": ActorCritic(MLP((4,)), policy_gain=0.5, initial_log_std=-0.2)}
KL = {"kl_penalty": KLPenalty(target=0.05, cutoff_cost=7.0, initial=1.5), "clip_value": False}
PPO = {
    "clip": {},
    "kl": KL,
    "gaussian": GAUSSIAN | {"clip": 0.3},
    "gaussian kl": GAUSSIAN | KL,
    "joint": {"joint_grad_norm": True, "normalize_advantage": False, "bootstrap_truncated": False},
}
# Of how many devices each; two hold half of the environments each, and so different numbers of transitions.
CASES = [(name, 1) for name in PPO] + [("clip", 2), ("kl", 2), ("gaussian kl", 2)]


def divided_by_divergence(algo, rollout, acted, params):
    """The far half of the environments on the second device, and the hinge between the first one's mean and all's."""
    data = Data(rollout)
    old, new = (policy_and_value(x, data.observation[:-1])[0] for x in (acted, params))
    far = np.where(data.acting, divergence(old, new), 0.0)
    order = np.argsort(far.sum(0) / data.acting.sum(0))
    by_time = {name: getattr(rollout, name) for name in ("timesteps", "action", "extras")}
    rollout = rollout.replace(**jax.tree.map(lambda x: x[:, order], by_time))
    first = order[: B // 2]
    counted = data.acting[:, first].sum()
    near, mean = far[:, first].sum() / counted, far.sum() / data.acting.sum()
    assert near < 0.9 * mean and 2 * counted != data.acting.sum()
    return algo.replace(kl_penalty=algo.kl_penalty.replace(target=float(near + mean) / 4)), rollout


@pytest.mark.parametrize(("name", "devices"), one_quick(CASES, ("clip", 1)))
def test_ppo(name, devices):
    spec = BOXED if name.startswith("gaussian") else SPEC
    fields = FIELDS | WHOLE | {"network": NETWORK, "gae_lambda": LAMBDA, "max_grad_norm": 0.05} | PPO[name]
    algo = jaxrl.PPO(**fields, entropy_cost=0.01)
    acted, state, rollout = data_and_states(algo, spec)
    params = exact(state.network.params)
    if name.endswith("kl") and devices == 2:
        algo, rollout = divided_by_divergence(algo, rollout, exact(acted), params)
    data = Data(rollout)
    if not algo.bootstrap_truncated:
        data.terminated = data.terminated | data.truncated
    old_policy, old_values = policy_and_value(exact(acted), data.observation)
    old_policy, old_values = jax.tree.map(lambda x: x[:-1], old_policy), old_values[:-1]
    old_log_prob = log_prob(old_policy, data.action)
    bootstrap = policy_and_value(params, data.observation[-1])[1]
    advantages = gae(data, np.concatenate([old_values, bootstrap[None]]))
    targets = advantages + old_values
    weight, acting = (x / x.sum() for x in (data.counts, data.acting))
    if algo.normalize_advantage:
        kept = advantages[data.acting]
        advantages = (advantages - kept.mean()) / kept.std()

    def pieces(params):
        policy, values = policy_and_value(params, data.observation[:-1])
        ratio = np.exp(log_prob(policy, data.action) - old_log_prob)
        if (penalty := algo.kl_penalty) is None:
            limited = np.clip(ratio, 1 - algo.clip, 1 + algo.clip)
            policy_loss = -(acting * np.minimum(ratio * advantages, limited * advantages)).sum()
        else:
            kl = (acting * divergence(old_policy, policy)).sum()
            hinge = penalty.cutoff_cost * max(0.0, kl - 2 * penalty.target) ** 2
            policy_loss = -(acting * ratio * advantages).sum() + penalty.initial * kl + hinge
        errors = (values - targets) ** 2
        if algo.clip_value:
            near = old_values + np.clip(values - old_values, -algo.clip, algo.clip)
            errors = np.maximum(errors, (near - targets) ** 2)
        return {
            "policy_loss": policy_loss,
            "value_loss": 0.5 * (weight * errors).sum(),
            "entropy": (acting * entropy(policy)).sum(),
            "clip_fraction": (acting * (np.abs(ratio - 1) > algo.clip)).sum(),
        }

    def loss(params):
        found = pieces(params)
        return found["policy_loss"] + algo.value_cost * found["value_loss"] - algo.entropy_cost * found["entropy"]

    metrics = pieces(params)
    assert 0.1 < metrics["clip_fraction"] < 0.95, "the data should be stale"
    expected, norms = stepped(params, loss, ("",) if algo.joint_grad_norm else PARTS, algo.max_grad_norm)
    new, info = (updated if devices == 1 else updated_on_two)(algo, state, rollout, spec)
    assert_is(new.network.params, info, expected, norms, metrics)
    if algo.kl_penalty is not None:
        after = policy_and_value(expected, data.observation[:-1])[0]
        kl = (acting * divergence(old_policy, after)).sum()
        assert kl > 1.3 * algo.kl_penalty.target
        np.testing.assert_allclose(info.metrics["kl_after_update"], kl, rtol=1e-4)
        assert new.penalty == pytest.approx(1.5 * 1.5)


def passes_by_hand(algo, state, rollout, spec):
    """The learner after each number of passes over the whole batch, and the divergence that the next one meets."""
    data, weight = Data(rollout), Data(rollout).counts / Data(rollout).counts.sum()
    states = [state] + [updated(algo.replace(epochs=n), state, rollout, spec)[0] for n in (1, 2)]
    found = []
    for one in states:
        policy, _ = policy_and_value(exact(one.network.params), data.observation[:-1])
        log_ratio = log_prob(policy, data.action) - np.asarray(rollout.extras["log_prob"], np.float64)
        found.append((weight * (np.exp(log_ratio) - 1 - log_ratio)).sum())
    return states, found


@pytest.mark.long
def test_ppo_stops_where_the_divergence_exceeds_its_target():
    algo = jaxrl.PPO(**FIELDS | WHOLE | {"learning_rate": 0.02, "network": NETWORK, "max_grad_norm": None})
    algo = algo.resolve(SPEC, B).replace(normalize_observation=False, normalize_reward=False)
    state = learner(algo, 0)
    rollout = collect(algo, resolve_schedules(algo, jnp.float32(0)).actor(state), broken_moments(), jax.random.key(3))
    states, divergences = passes_by_hand(algo, state, rollout, SPEC)
    assert divergences == sorted(divergences) and divergences[0] < 1e-9, "the policy should go on moving away"
    for made in (1, 2):
        target = (divergences[made - 1] + divergences[made]) / 3  # 1.5 times this lies between the two
        limited = algo.replace(epochs=4, target_kl=target)
        for update in (updated, updated_on_two):
            new, info = update(limited, state, rollout)
            np.testing.assert_allclose(info.metrics["steps_made"], made / 4)
            for a, b in zip(jax.tree.leaves(new.network), jax.tree.leaves(states[made].network), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def of_actor_critic(data, advantages, targets, params):
    """Return the losses of policy and values, and the entropy, of A2C and IMPALA."""
    policy, values = policy_and_value(params, data.observation[:-1])
    weight, acting = (x / x.sum() for x in (data.counts, data.acting))
    return {
        "policy_loss": -(acting * log_prob(policy, data.action) * advantages).sum(),
        "value_loss": 0.5 * (weight * (targets - values) ** 2).sum(),
        "entropy": (acting * entropy(policy)).sum(),
    }


@pytest.mark.long
def test_a2c():
    algo = jaxrl.A2C(**FIELDS, entropy_cost=0.01, network=NETWORK, gae_lambda=LAMBDA, max_grad_norm=0.1)
    acted, state, rollout = data_and_states(algo)
    data = Data(rollout)
    params = exact(state.network.params)
    old_values = policy_and_value(exact(acted), data.observation[:-1])[1]
    bootstrap = policy_and_value(params, data.observation[-1])[1]
    advantages = gae(data, np.concatenate([old_values, bootstrap[None]]))
    targets = advantages + old_values
    pieces = functools.partial(of_actor_critic, data, advantages, targets)

    def loss(params):
        found = pieces(params)
        return found["policy_loss"] + algo.value_cost * found["value_loss"] - algo.entropy_cost * found["entropy"]

    expected, norms = stepped(params, loss, PARTS, algo.max_grad_norm)
    new, info = updated(algo, state, rollout)
    assert_is(new.network.params, info, expected, norms, pieces(params))


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_alphazero(devices):
    """Targets of a search are made up, some 0; every step has a discount of its own, negative by turns."""
    algo = jaxrl.AlphaZero(
        **FIELDS | WHOLE, network=NETWORK, gae_lambda=LAMBDA, value_cost=0.7, entropy_cost=0.02, max_grad_norm=0.05
    )
    acted, state, rollout = data_and_states(algo.resolve(SPEC, B))
    rng = np.random.default_rng(2)
    policy = rng.dirichlet(np.ones(ACTIONS), (T, B)) * (rng.random((T, B, ACTIONS)) < 0.7)
    policy[policy.sum(-1) == 0] = np.eye(ACTIONS)[0]
    policy /= policy.sum(-1, keepdims=True)
    discount = rng.choice([-1.0, 1.0, -0.5], (T + 1, B))
    steps = rollout.timesteps
    discount = np.where(steps.first, 1.0, np.where(steps.terminated, 0.0, discount))
    extras = {"value": rollout.extras["value"], "search_policy": jnp.asarray(policy, jnp.float32)}
    rollout = rollout.replace(timesteps=steps.replace(discount=jnp.asarray(discount, jnp.float32)), extras=extras)
    data, params = Data(rollout), exact(state.network.params)
    old_values = policy_and_value(exact(acted), data.observation[:-1])[1]
    values = np.concatenate([old_values, policy_and_value(params, data.observation[-1])[1][None]])
    targets, weight = old_values.copy(), data.counts / data.counts.sum()
    for t, b in np.argwhere(data.counts):
        reach = 1.0
        for s in data.following(t, b):
            targets[t, b] += reach * (data.reward[s, b] + GAMMA * discount[s + 1, b] * values[s + 1, b] - values[s, b])
            reach *= GAMMA * LAMBDA * discount[s + 1, b]

    def pieces(params):
        logits, found = policy_and_value(params, data.observation[:-1])
        return {
            "policy_loss": -(weight[..., None] * policy * log_softmax(logits)).sum(),
            "value_loss": 0.5 * (weight * (targets - found) ** 2).sum(),
            "entropy": (weight * entropy(logits)).sum(),
        }

    def loss(params):
        found = pieces(params)
        return found["policy_loss"] + 0.7 * found["value_loss"] - 0.02 * found["entropy"]

    metrics = pieces(params)
    metrics["search_entropy"] = -(weight[..., None] * policy * np.log(np.where(policy > 0, policy, 1.0))).sum()
    expected, norms = stepped(params, loss, PARTS, algo.max_grad_norm)
    new, info = (updated if devices == 1 else updated_on_two)(algo.resolve(SPEC, B), state, rollout)
    assert_is(new.network.params, info, expected, norms, metrics)


VMPO = {"categorical": {}, "gaussian": GAUSSIAN}


@pytest.mark.long
@pytest.mark.parametrize("name", one_quick(VMPO, "categorical"))
def test_vmpo(name):
    spec = BOXED if name == "gaussian" else SPEC
    fields = FIELDS | WHOLE | {"network": NETWORK, "max_grad_norm": 0.05} | VMPO[name]
    limits = KLLimits(temperature=0.7, alpha_mean=2.0, alpha_std=3.0, epsilon_mean=1e-2, epsilon_std=1e-2)
    algo = jaxrl.VMPO(
        **fields,
        gae_lambda=LAMBDA,
        entropy_cost=0.15,
        kl_limits=limits,
        target_period=2,
    ).resolve(spec, B)
    algo = algo.replace(normalize_observation=False, normalize_reward=False)
    acted, state, rollout = data_and_states(algo, spec)
    data, params = Data(rollout), exact(state.network.params)
    old_policy = policy_and_value(exact(acted), data.observation[:-1])[0]
    values = policy_and_value(params, data.observation)[1]
    advantages = gae(data, values)
    targets, counted = advantages + values[:-1], data.acting.sum()
    weight, acting = (x / x.sum() for x in (data.counts, data.acting))
    better = np.zeros_like(data.counts)
    for t, b in np.argwhere(data.acting):
        better[t, b] = (advantages[t, b] < advantages[data.acting]).sum() < (counted + 1) // 2
    assert better.sum() == (counted + 1) // 2
    # Equations 3 and 4; the sums are over all of the better half at once.
    psi = np.where(better, np.exp(advantages / 0.7), 0.0)
    psi /= psi.sum()

    def moved(policy):
        if name == "categorical":
            return {"mean": (acting * divergence(old_policy, policy)).sum()}
        (mean, log_std), (new_mean, new_log_std) = old_policy, policy
        by_mean = (new_mean - mean) ** 2 / (2 * np.exp(2 * log_std))
        by_std = new_log_std - log_std + np.exp(2 * (log_std - new_log_std)) / 2 - 0.5
        return {"mean": (acting * by_mean.sum(-1)).sum(), "std": (acting * by_std.sum(-1)).sum()}

    def pieces(params):
        policy, values = policy_and_value(params, data.observation[:-1])
        return {
            "policy_loss": -(psi * log_prob(policy, data.action)).sum(),
            "value_loss": 0.5 * (weight * (targets - values) ** 2).sum(),
            "entropy": (acting * entropy(policy)).sum(),
            **{f"kl_{which}": kl for which, kl in moved(policy).items()},
        }

    def loss(params):
        found = pieces(params)
        paid = 2.0 * found["kl_mean"] + 3.0 * found.get("kl_std", 0.0)
        lost = found["policy_loss"] + algo.value_cost * found["value_loss"]
        return lost - algo.entropy_cost * found["entropy"] + paid

    metrics = pieces(params)
    expected, norms = stepped(params, loss, PARTS, algo.max_grad_norm)
    new, info = updated(algo, state, rollout, spec)
    assert_is(new.network.params, info, expected, norms, metrics)

    def dual(eta):
        return eta * (limits.epsilon + np.log(np.exp(advantages[better] / eta).mean()))

    slopes = {
        "temperature": (dual(0.7 + 1e-5) - dual(0.7 - 1e-5)) / 2e-5,
        "mean": limits.epsilon_mean - metrics["kl_mean"],
    }
    if name == "gaussian":
        slopes["std"] = limits.epsilon_std - metrics["kl_std"]
    for which, slope in slopes.items():
        before = float(state.duals.params[which])
        slope *= 1 / (1 + np.exp(-before))  # of the softplus
        after = before - limits.learning_rate * slope / (abs(slope) + EPS)
        assert float(new.duals.params[which]) == pytest.approx(after, abs=1e-5), which
    for one, other in zip(*map(jax.tree.leaves, (new.network.target_params, state.network.params)), strict=True):
        np.testing.assert_array_equal(one, other)
    copied, _ = updated(algo, new, rollout, spec)
    for one, other in zip(*map(jax.tree.leaves, (copied.network.target_params, copied.network.params)), strict=True):
        np.testing.assert_array_equal(one, other)
    acted_by = jax.tree.leaves(algo.actor(new).params)
    assert all((a == b).all() for a, b in zip(acted_by, jax.tree.leaves(new.network.target_params), strict=True))


IMPALA = {
    "sum": {"reduction": "sum"},
    "mean": {"reduction": "mean"},
    "clips": {"clip_rho": 0.8, "clip_c": 0.6, "clip_pg_rho": 1.5},
    "truncated": {"bootstrap_truncated": False, "value_cost": 0.3},
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "devices"), [(name, 1) for name in IMPALA] + [("sum", 2), ("mean", 2)])
def test_impala(name, devices):
    fields = {"entropy_cost": 0.01, "max_grad_norm": 0.1, "trace_lambda": 0.9, "clip_c": 0.8} | IMPALA[name]
    algo = jaxrl.IMPALA(**FIELDS, network=NETWORK, **fields)
    acted, state, rollout = data_and_states(algo)
    data = Data(rollout)
    if not algo.bootstrap_truncated:
        data.terminated = data.terminated | data.truncated
    params = exact(state.network.params)
    old = log_prob(policy_and_value(exact(acted), data.observation[:-1])[0], data.action)
    policy, values = policy_and_value(params, data.observation)
    rhos = np.exp(log_prob(policy[:-1], data.action) - old)
    targets, advantages = vtrace(algo, data, values, rhos)
    pieces = functools.partial(of_actor_critic, data, advantages, targets)

    def loss(params):
        found = pieces(params)
        valued, acted = (data.counts.sum(), data.acting.sum()) if algo.reduction == "sum" else (1.0, 1.0)
        policy_loss = found["policy_loss"] - algo.entropy_cost * found["entropy"]
        return acted * policy_loss + valued * algo.value_cost * found["value_loss"]

    metrics = pieces(params) | {"importance_weight": rhos[data.acting].clip(max=algo.clip_rho).mean()}
    assert metrics["importance_weight"] < 0.9, "the data should be stale"
    expected, norms = stepped(params, loss, PARTS, algo.max_grad_norm)
    new, info = (updated if devices == 1 else updated_on_two)(algo, state, rollout)
    assert_is(new.network.params, info, expected, norms, metrics)


@pytest.mark.long
def test_pqn():
    network = QNetwork(MLP((4,), "relu", "layer"))
    algo = jaxrl.PQN(
        random_persistence=0.0, **FIELDS, **WHOLE, network=network, return_lambda=LAMBDA, max_grad_norm=0.1
    )
    _, state, rollout = data_and_states(algo)
    data = Data(rollout)

    def action_values(params, observation):
        torso = params["torso"]["torso"]["dense"]
        x = np.maximum(layer_normed(torso["norm_0"], affine(torso["layer_0"], observation)), 0.0)
        return affine(params["head"]["advantage"]["output"], x)

    params = exact(state.network.params)
    best = action_values(params, data.observation).max(-1)
    targets = np.zeros((T, B))
    for t, b in np.argwhere(data.counts)[::-1]:
        goes_on = len(list(data.following(t, b))) > 1
        after = (1 - LAMBDA) * best[t + 1, b] + LAMBDA * targets[t + 1, b] if goes_on else best[t + 1, b]
        targets[t, b] = data.reward[t, b] + GAMMA * (0.0 if data.terminated[t, b] else after)
    weight = data.counts / data.counts.sum()

    def chosen(params):
        return np.take_along_axis(action_values(params, data.observation[:-1]), data.action[..., None], -1)[..., 0]

    def loss(params):
        return 0.5 * (weight * (targets - chosen(params)) ** 2).sum()

    metrics = {
        "loss": loss(params),
        "q_value": (weight * chosen(params)).sum(),
        "td_error": (weight * np.abs(targets - chosen(params))).sum(),
    }
    expected, norms = stepped(params, loss, ("",), algo.max_grad_norm)
    new, info = updated(algo, state, rollout)
    assert_is(new.network.params, info, expected, norms, metrics)
    assert data.action.max() < ACTIONS
