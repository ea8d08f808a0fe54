"""What the on-policy algorithms share: clipping, statistics, and the value that they bootstrap from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.on_policy import collect, learner, moments, updated

import jaxrl
from jaxrl.networks import MLP, ActorCritic

SEPARATE = ActorCritic(MLP((8,)))
ALGORITHMS = {
    "ppo": jaxrl.PPO(rollout_length=9, epochs=1, minibatches=1, network=SEPARATE, normalize_advantage=False),
    "a2c": jaxrl.A2C(rollout_length=9, network=SEPARATE),
    "impala": jaxrl.IMPALA(rollout_length=9, network=SEPARATE, reduction="mean"),
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
