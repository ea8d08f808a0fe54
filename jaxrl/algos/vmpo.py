"""On-policy maximum a posteriori policy optimization, V-MPO (Song et al., 2020, arXiv:1909.12238)."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import on_policy, returns, rnd, train_state
from jaxrl.algos.base import algorithm, changed, number, part, static
from jaxrl.algos.kl_limits import KLLimitFields, KLLimits, decoupled_kl
from jaxrl.algos.minibatches import MinibatchFields, steps_over_minibatches
from jaxrl.algos.on_policy import OnPolicy, PolicyState
from jaxrl.algos.rnd import RND
from jaxrl.algos.train_state import TrainState, Variables, weighted_mean
from jaxrl.core import spaces
from jaxrl.core.schedules import Linear, Scalar
from jaxrl.core.types import (
    ActorState,
    EnvSpec,
    Replicas,
    Source,
    UpdateInfo,
)
from jaxrl.networks import Distribution
from jaxrl.networks.distributions import DiagonalGaussian, Joint, TanhGaussian
from jaxrl.networks.torsos import has_images


class VMPOState(PolicyState):
    """State of the learner, whose target network acts."""

    # Float32 scalars before the softplus: "temperature", "mean" and for boxes "std".
    duals: TrainState = struct.field(kw_only=True)


@algorithm
class VMPO(KLLimitFields, MinibatchFields, OnPolicy):
    """On-policy MPO: regression on the better half of actions, with KL limits; recurrent when its network is."""

    learning_rate: Scalar = changed(Linear(1e-3, 0.0))
    value_cost: Scalar = changed(1.0)
    entropy_cost: Scalar | None = changed(
        None, help="weight of the entropy bonus; None: 0.15 for discrete actions from images, otherwise 0"
    )
    rollout_length: int | None = changed(
        None,
        help="steps per environment and batch; None: 64, or 128 for continuous actions without a recurrent core",
    )
    kl_limits: KLLimits = changed(KLLimits(epsilon_mean=1e-2, epsilon_std=1e-3, alpha_std=1.0))
    gae_lambda: Scalar = number(
        0.95, low=0, high=1, help="lambda of GAE; 0: one-step TD errors, 1: returns of the whole rollout"
    )
    exploration_bonus: RND | None = part(RND, help="intrinsic reward for novel observations; None: no bonus")
    target_period: int = static(1, low=1, help="batches between updates of the acting policy, a copy of the network")
    minibatches: int | None = changed(
        None,
        help="gradient steps per pass, each on the better half; None: 4, or 8 if rollout_length is 128 by default",
    )

    has_target = True

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        # The reasons, with figures, are in docs/algorithms/vmpo.md.
        images = has_images(spec.observation_space)
        found = self.resolved(spec, discrete_entropy=0.15 if images else 0.0)
        longer = spaces.is_continuous(spec.action_space) and not found["network"].recurrent
        if self.rollout_length is None:
            found["rollout_length"] = 128 if longer else 64
        if self.minibatches is None:
            # Eight minibatches suit the longer rollouts but lower the score with shorter ones.
            found["minibatches"] = 8 if longer and self.rollout_length is None else 4
        return dataclasses.replace(self, **found)

    @property
    def experience(self) -> Mapping[str, Source]:
        # The limits are relative to the acting policy, which is up to `target_period` batches old anyway.
        return {"rollout": self.rollouts(max_policy_lag=1, unit=self.minibatches)}

    def init(self, key: jax.Array, spec: EnvSpec) -> VMPOState:
        duals = self.kl_limits.duals(self.optimizer, spec)
        return VMPOState(**vars(super().init(key, spec)), duals=duals)

    def actor(self, state: PolicyState) -> ActorState:
        policy = state.network.target_variables
        return ActorState(policy.params, state.statistics, policy.model_state)

    def update(
        self, state: VMPOState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[VMPOState, UpdateInfo]:
        statistics, rollout = self.prepare(state.statistics, batch, replicas)
        bonus, intrinsic, explored = self.explored(state, rollout, spec=spec, key=key, replicas=replicas)
        rows, inputs, network = rollout.rows, self.inputs(rollout), state.network.variables
        # Use values of the learner's network, because the recorded ones are from the target network.
        output, carry, _ = self.unroll(network, inputs, rollout.carry.network, spec, train=False)
        segment = self.segment(rollout, network, output.value, carry, spec)
        advantages = returns.gae(segment, self.gamma, self.gae_lambda)
        data = {
            "inputs": inputs,
            "action": rows.action,
            "old": rows.extras["distribution"],
            "advantage": rnd.with_bonus(self.exploration_bonus, advantages, intrinsic),
            "target": advantages + output.value,
            "weight": rows.weight,
            "active": rollout.active,
        }
        divided = self.divided(data, rollout.carry.network, key, replicas)

        def step(learned, indices):
            network, duals = learned
            minibatch, carry = divided.take(indices)
            gradients, (metrics, model_state) = jax.grad(self._loss, has_aux=True)(
                (network.params, duals.params), network.model_state, minibatch, carry, spec, replicas
            )
            network, norms = self.apply_gradients(network, gradients[0], replicas, model_state)
            duals = self.kl_limits.step(duals, gradients[1], self.optimizer, replicas)
            return (network, duals), metrics | norms

        (learned, duals), metrics = steps_over_minibatches(step, (state.network, state.duals), divided.indices)
        updates = state.updates + 1
        learned = train_state.polyak_update(learned, jnp.where(updates % self.target_period == 0, 1.0, 0.0))
        metrics = replicas.mean(metrics) | explored | {"learning_rate": jnp.asarray(self.learning_rate)}
        metrics["explained_variance"] = on_policy.explained_variance(
            data["target"], output.value, rows.weight, replicas
        )
        new = state.replace(network=learned, duals=duals, statistics=statistics, updates=updates, bonus=bonus)
        return new, UpdateInfo(metrics)

    def _loss(self, learned, model_state, minibatch, carry, spec, replicas):
        duals = jax.tree.map(jax.nn.softplus, learned[1])
        network = Variables(learned[0], model_state)
        output, _, model_state = self.unroll(network, minibatch["inputs"], carry, spec, train=True)
        weight = minibatch["weight"]
        acting = on_policy.acting(weight, minibatch["active"])

        def mean(x):
            return weighted_mean(x, acting, replicas)

        chosen = better_half(minibatch["advantage"], acting, replicas)
        fixed = jax.lax.stop_gradient(duals["temperature"])
        weights, divergence = advantage_weights(minibatch["advantage"], chosen, fixed, replicas)
        policy_loss = weighted_mean(-output.distribution.log_prob(minibatch["action"]), weights, replicas)
        temperature = duals["temperature"] * (self.kl_limits.epsilon - divergence)  # its gradient is that of equation 4
        moved = {name: mean(x) for name, x in divergences(minibatch["old"], output.distribution).items()}
        bounds, metrics = self.kl_limits.lagrangian(moved, duals)
        value_loss = weighted_mean(0.5 * jnp.square(minibatch["target"] - output.value), weight, replicas)
        entropy = mean(output.distribution.entropy())
        loss = self.total_loss(policy_loss, value_loss, entropy) + bounds + temperature
        metrics |= {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "kl_weights": divergence}
        return loss, (metrics, model_state)


def better_half(advantages: jax.Array, weight: jax.Array, replicas: Replicas) -> jax.Array:
    """Select the rows with the larger half of the advantages of all devices (section 4.1); bool, the same shape.

    These are the rows with an advantage of at least the median. If the number of rows is odd, the larger part is
    selected; all rows that equal the median are selected.

    Args:
      advantages: float32, any shape.
      weight: bool, the same shape: the rows that count.
      replicas: as passed to `update`.
    """
    bits = jax.lax.bitcast_convert_type(advantages, jnp.uint32)
    order = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))  # integers in the order of the floats
    half = (replicas.sum(jnp.sum(weight, dtype=jnp.int32)) + 1) // 2
    digits, median = jnp.arange(16, dtype=jnp.uint32), jnp.uint32(0)
    for shift in range(28, -1, -4):  # find the largest number that `half` of the rows reach, digit by digit
        tried = median + (digits << shift)
        reach = (order.reshape(1, -1) >= tried[:, None]) & weight.reshape(1, -1)
        enough = replicas.sum(jnp.sum(reach, axis=1, dtype=jnp.int32)) >= half
        median = jnp.max(jnp.where(enough, tried, median))
    return weight & (order >= median)


def advantage_weights(
    advantages: jax.Array, chosen: jax.Array, temperature: jax.Array, replicas: Replicas
) -> tuple[jax.Array, jax.Array]:
    """Return psi proportional to exp(A / eta) over the selected rows of all devices, with maximum 1 (equation 3).

    Args:
      advantages: advantages A [...].
      chosen: bool [...], True for the selected rows.
      temperature: eta, a scalar more than 0.
      replicas: as passed to `update`.

    Returns:
      The weights [...], 0 where not chosen, and KL(psi || uniform over the chosen), a scalar. The gradient of equation
      4, eta epsilon + eta log mean exp(A / eta), with respect to eta is epsilon minus this divergence.
    """
    scaled = jnp.where(chosen, advantages / temperature, -jnp.inf)
    largest = replicas.max(jnp.max(scaled))
    scaled = jnp.where(chosen, scaled - largest, 0.0)
    weights = jnp.where(chosen, jnp.exp(scaled), 0.0)
    count, total, product = replicas.sum(
        jnp.stack([jnp.sum(chosen, dtype=weights.dtype), jnp.sum(weights), jnp.sum(weights * scaled)])
    )
    total = jnp.maximum(total, 1e-8)
    return weights, product / total + jnp.log(jnp.maximum(count, 1.0) / total)


def divergences(old: Distribution, new: Any) -> dict[str, jax.Array]:
    """Return KL(old || new) [...], keyed by the name of its limit (section 4.2).

    For Gaussians, the divergences of mean and deviation are separate. `old` and `new` have the same type; the
    divergences of the parts of a joint distribution are summed.
    """
    if isinstance(old, Joint):
        each = [divergences(before, now) for before, now in zip(old.leaves, new.leaves, strict=True)]
        names = sorted(set().union(*each))
        return {name: functools.reduce(jnp.add, [kl[name] for kl in each if name in kl]) for name in names}
    if isinstance(old, DiagonalGaussian | TanhGaussian):
        before, now = (x.base if isinstance(x, TanhGaussian) else x for x in (old, new))
        mean, std = decoupled_kl(before, now)
        return {"mean": jnp.sum(mean, axis=-1), "std": jnp.sum(std, axis=-1)}
    return {"mean": old.kl(new)}
