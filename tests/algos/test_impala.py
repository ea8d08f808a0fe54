"""IMPALA's update against its formulas in numpy, V-trace as the paper's double sum; stale data, clips, reductions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.on_policy import ACTIONS, SPEC, B, Data, T, broken_moments, collect, learner, moments, updated, vtrace
from helpers.oracle import close
from scipy.special import log_softmax

import jaxrl
from jaxrl.algos.impala import clipped_reward
from jaxrl.algos.optimizers import RMSProp
from jaxrl.core.types import NetworkInputs, TimeStep
from jaxrl.networks import GRU, MLP, ActorCritic

# Policies far from uniform, so that another's data is far from one's own.
SEPARATE = ActorCritic(MLP((8,)), policy_gain=2.0)
RECURRENT = ActorCritic(
    MLP((8,)), core=GRU(6), shared=True, previous_action=True, previous_reward=True, policy_gain=2.0
)
# One step of this rule is g / sqrt(g^2 + 1): it shows the size of a gradient as well as its sign.
RULE = RMSProp(decay=0.0, eps=1.0)
BASE = jaxrl.IMPALA(
    learning_rate=1.0,
    gamma=0.9,
    entropy_cost=0.01,
    max_grad_norm=None,
    rollout_length=T,
    reduction="mean",
    optimizer=RULE,
    network=SEPARATE,
)
FAR = {"clip_rho": 1e6, "clip_c": 1e6, "clip_pg_rho": 1e6}


def rollout_of(algo, seed, timesteps=None):
    """A rollout acted with the parameters of `learner(algo, seed)`."""
    timesteps = moments() if timesteps is None else timesteps
    return collect(algo, algo.actor(learner(algo, seed)), timesteps, jax.random.key(3))


def difference(one, other):
    return max(
        jax.tree.leaves(
            jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), one.network.params, other.network.params)
        )
    )


# --- the update, written out ---------------------------------------------------------------------------------------


def expected(algo, params, rollout):
    """Losses and the step that follows from them, in float64 from the network's outputs on."""
    data, timesteps = Data(rollout), rollout.timesteps
    if algo.reward_clipping == "abs_one":
        data.reward = np.clip(data.reward, -1, 1)
        timesteps = timesteps.replace(reward=jnp.clip(timesteps.reward, -1, 1))

    @jax.jit
    def outputs(params):
        inputs = NetworkInputs.of_timesteps(timesteps)
        output, _, _ = algo.network.apply(params, inputs, rollout.carry.network, spec=SPEC, model_state=(), train=True)
        return output.distribution.logits, output.value

    (logits, values), pull_back = jax.vjp(outputs, params)
    log_policy, values = log_softmax(np.asarray(logits, np.float64)[:-1], axis=-1), np.asarray(values, np.float64)
    policy, chosen = np.exp(log_policy), np.eye(ACTIONS)[data.action]
    log_prob, entropy = (log_policy * chosen).sum(-1), -(policy * log_policy).sum(-1)
    rhos = np.exp(log_prob - np.asarray(rollout.extras["log_prob"], np.float64))
    targets, advantages = vtrace(algo, data, values, rhos)
    weight = data.counts / data.counts.sum()
    metrics = {
        "policy_loss": -(weight * log_prob * advantages).sum(),
        "value_loss": 0.5 * (weight * (targets - values[:-1]) ** 2).sum(),
        "entropy": (weight * entropy).sum(),
        "importance_weight": (weight * np.minimum(rhos, algo.clip_rho)).sum(),
        "approximate_kl": (weight * (rhos - 1 - np.log(rhos))).sum(),
    }
    slope = advantages[..., None] * (policy - chosen)
    slope += algo.entropy_cost * policy * (log_policy + entropy[..., None])
    logit_slope = np.concatenate([weight[..., None] * slope, np.zeros((1, B, ACTIONS))])
    value_slope = np.concatenate([weight * algo.value_cost * (values[:-1] - targets), np.zeros((1, B))])
    gradients = pull_back((jnp.asarray(logit_slope, jnp.float32), jnp.asarray(value_slope, jnp.float32)))[0]
    stepped = jax.tree.map(lambda p, g: p - g / np.sqrt(np.square(g) + 1.0), params, gradients)
    return stepped, metrics, rhos[data.counts]


@pytest.mark.long
@pytest.mark.parametrize("clipping", ["none", "abs_one"])
def test_an_update_is_its_formulas_on_stale_data(clipping):
    """A recurrent learner is unrolled with its own parameters to the bootstrap too, not from the actor's last carry."""
    algo = BASE.replace(network=RECURRENT, reward_clipping=clipping)
    state, rollout = learner(algo, 0), rollout_of(algo, 1, broken_moments())
    stepped, metrics, rhos = expected(algo, state.network.params, rollout)
    assert (rhos > 1.2).mean() > 0.1 and (rhos < 0.8).mean() > 0.1, "the data should be stale"
    new, info = updated(algo, state, rollout)
    for key, value in metrics.items():
        np.testing.assert_allclose(info.metrics[key], value, rtol=1e-4, atol=1e-5, err_msg=key)
    close(new.network.params, stepped, 2e-5)
    assert new.updates == 1


# --- on-policy and off-policy --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("network", [SEPARATE, RECURRENT])
def test_on_policy_it_is_a2c_with_the_monte_carlo_advantage(network):
    algo = BASE.replace(network=network)
    a2c = jaxrl.A2C(
        learning_rate=1.0,
        gamma=0.9,
        entropy_cost=0.01,
        max_grad_norm=None,
        rollout_length=T,
        optimizer=RULE,
        network=network,
    )
    state, rollout = learner(algo, 1), rollout_of(algo, 1)
    ours, info = updated(algo, state, rollout)
    theirs, _ = updated(a2c, state, rollout)
    assert difference(ours, state) > 0.1
    assert difference(ours, theirs) < 1e-5
    assert info.metrics["importance_weight"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.long
def test_values_learnt_from_stale_data_are_of_the_learners_policy():
    """One-step tasks that pay the action's number: V-trace finds what the learner's policy earns, not the actor's."""
    shape = (64, 64)
    ends = np.arange(shape[0]) % 2 == 1  # a step, and the last observation
    always = TimeStep(
        observation=jnp.ones((*shape, 3)),
        reward=jnp.zeros(shape),
        terminated=jnp.asarray(np.broadcast_to(ends[:, None], shape)),
        truncated=jnp.zeros(shape, bool),
        first=jnp.asarray(np.broadcast_to(~ends[:, None], shape)),
    )
    algo = BASE.replace(learning_rate=1e-12, value_learning_rate=0.1, entropy_cost=0.0, optimizer=RMSProp(), **FAR)
    rollout = rollout_of(algo, 2, always)
    weight = rollout.rows.weight
    rewards = jnp.where(weight, rollout.rows.action.astype(jnp.float32), 0.0)
    arrived = jnp.concatenate([jnp.zeros_like(rewards[:1]), rewards])
    rollout = rollout.replace(timesteps=rollout.timesteps.replace(reward=arrived))

    def learned(rollout):
        state = learner(algo, 7)
        for rate in (*[0.03] * 150, *[0.001] * 100):
            state, _ = updated(algo.replace(value_learning_rate=rate), state, rollout)
        return value_and_policy(state)

    def value_and_policy(state):
        one = jax.tree.map(lambda x: x[:1, :1], rollout.timesteps)
        inputs = NetworkInputs.of_timesteps(one)
        output, _, _ = algo.network.apply(state.network.params, inputs, (), spec=SPEC, model_state=(), train=False)
        return float(output.value[0, 0]), np.asarray(jax.nn.softmax(output.distribution.logits[0, 0]))

    (_, target), (_, behavior) = (value_and_policy(learner(algo, seed)) for seed in (7, 2))
    earned, acted = target @ np.arange(ACTIONS), behavior @ np.arange(ACTIONS)
    assert abs(earned - acted) > 1.0, "policies of like worth tell nothing"
    value, after = learned(rollout)
    np.testing.assert_allclose(after, target, atol=1e-6)
    assert value == pytest.approx(earned, abs=0.08)
    # The same data, said to be the learner's own.
    own = jnp.log(jnp.asarray(target))[rollout.rows.action]
    claimed = rollout.replace(extras=rollout.extras | {"log_prob": own})
    assert learned(claimed)[0] == pytest.approx(acted, abs=0.08)


@pytest.mark.long
@pytest.mark.parametrize("which", ["observation", "reward"])
def test_statistics_are_those_that_the_rows_were_acted_with(which):
    algo = BASE.replace(**{f"normalize_{which}": True})
    state = learner(algo)
    state, _ = updated(algo, state, rollout_of(algo, 1))  # a run's first batch has none
    rollout = collect(
        algo, algo.actor(learner(algo, 1).replace(statistics=state.statistics)), moments(5), jax.random.key(4)
    )
    new, _ = updated(algo, state, rollout)
    later = new.statistics
    assert int(getattr(later, which).count) > T * B // 2, "the batch is merged in"
    assert difference(updated(algo, state.replace(statistics=later), rollout)[0], new) == 0.0
    assert difference(updated(algo, state, rollout.replace(statistics=later))[0], new) > 1e-3


# --- rewards and settings ------------------------------------------------------------------------------------------


def test_rewards_are_clipped_as_in_the_released_code():
    rewards = np.float32([-50.0, -2.0, -0.5, 0.0, 0.5, 2.0, 50.0])
    squeezed = 5.0 * np.tanh(rewards / 5.0)
    for how, wanted in {
        "none": rewards,
        "abs_one": np.clip(rewards, -1, 1),
        "soft_asymmetric": np.where(rewards < 0, 0.3 * squeezed, squeezed),
    }.items():
        np.testing.assert_allclose(clipped_reward(jnp.asarray(rewards), how), wanted, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(("how", "alike"), [("none", False), ("abs_one", True)])
def test_a_network_sees_the_clipped_reward_while_acting(how, alike):
    algo = BASE.replace(network=RECURRENT, reward_clipping=how)
    actor = algo.actor(learner(algo))
    timesteps = moments()
    timesteps = timesteps.replace(first=jnp.zeros_like(timesteps.first), reward=jnp.ones_like(timesteps.reward))
    logits = [
        collect(algo, actor, timesteps.replace(reward=reward), jax.random.key(0)).rows.extras["distribution"].logits
        for reward in (timesteps.reward, 9.0 * timesteps.reward)
    ]
    assert (float(jnp.max(jnp.abs(logits[0] - logits[1]))) < 1e-6) == alike
