"""Maximum a posteriori policy optimization, MPO (Abdolmaleki et al., 2018, arXiv:1806.06920).

The KL divergences of the Gaussian's mean and deviation have separate limits (Abdolmaleki et al., 2018,
arXiv:1812.02256). Expectations over discrete actions are exact.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import off_policy, q_learning, train_state
from jaxrl.algos.acting import StochasticActing
from jaxrl.algos.base import algorithm, changed, static
from jaxrl.algos.fields import (
    CombinedReplayFields,
    NStepReplayFields,
    PeriodicTargetFields,
    SupportFields,
)
from jaxrl.algos.histories import Observations
from jaxrl.algos.kl_limits import KLLimitFields, MPOLimits, decoupled_kl
from jaxrl.algos.off_policy import LearnerState
from jaxrl.algos.q_learning import Returns
from jaxrl.algos.train_state import TrainState, weighted_mean
from jaxrl.core import spaces
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import (
    EnvSpec,
    Params,
    Replicas,
    Source,
    TransitionBatch,
    UpdateInfo,
)
from jaxrl.networks import ActionValues, CategoricalValues, Critic, from_unit
from jaxrl.networks.distributions import Categorical, DiagonalGaussian, TanhGaussian
from jaxrl.networks.q_heads import CategoricalReturns


class MPOState(LearnerState):
    """State of the learner."""

    duals: TrainState  # float32: "temperature" [], "mean" [k] and for boxes "std" [k], before the softplus


class AllActions(struct.PyTreeNode):
    """All K actions of a discrete space in order, with the critics' values."""

    distribution: Categorical  # the policy's
    values: jax.Array  # [batch, K]
    returns: jax.Array | tuple[()]  # [batch, K, atoms] probabilities of a support's atoms; () for expected values
    log_prior: jax.Array  # [batch, K] log pi of each action

    def fit(self, new: Categorical, weights: jax.Array) -> jax.Array:
        """Return the negative log-likelihood [batch] of the actions under the new policy, with weights [batch, K]."""
        return -jnp.sum(weights * new.log_probs(), axis=-1)

    def divergences(self, new: Categorical) -> dict[str, jax.Array]:
        """Return the KL divergences [batch, k] of the new policy from this one, keyed by the name of their limit."""
        return {"mean": self.distribution.kl(new)[:, None]}


class SampledActions(struct.PyTreeNode):
    """K sampled actions of a box, with the critics' values."""

    distribution: TanhGaussian  # the policy's
    points: jax.Array  # [K, batch, n] sampled from the policy, before the tanh
    values: jax.Array  # [batch, K]
    returns: jax.Array | tuple[()]  # as in `AllActions`
    log_prior: jax.Array  # [batch, K] -log K of each sample

    def fit(self, new: TanhGaussian, weights: jax.Array) -> jax.Array:
        """Return the sum of two negative log-likelihoods [batch]: one fits the Gaussian's mean, one its deviation.

        Each of them takes the other parameter from the old policy. The old and the new policy use the same tanh, so
        likelihoods before and after the tanh differ only by a constant.
        """

        def likelihood(gaussian: DiagonalGaussian) -> jax.Array:
            return jnp.sum(weights.T * jax.vmap(gaussian.log_prob)(self.points), axis=0)

        now, old = new.base, self.distribution.base
        return -(
            likelihood(DiagonalGaussian(now.mean, old.log_std)) + likelihood(DiagonalGaussian(old.mean, now.log_std))
        )

    def divergences(self, new: TanhGaussian) -> dict[str, jax.Array]:
        """Return the KL divergences [batch, n] of the mean and of the deviation, per dimension."""
        mean, std = decoupled_kl(self.distribution.base, new.base)
        return {"mean": mean, "std": std}


@algorithm
class MPO(
    StochasticActing, PeriodicTargetFields, NStepReplayFields, CombinedReplayFields, SupportFields, KLLimitFields
):
    """Maximum a posteriori policy optimization: KL-constrained regression on Q-weighted actions; uniform replay."""

    samples: int = static(20, low=1, help="continuous actions: policy samples per observation")
    kl_limits: MPOLimits = changed(MPOLimits(), part=MPOLimits)
    critic: Critic = changed(Critic(ensemble=1))

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        heads = (ActionValues, CategoricalValues)
        return self.actor_critic_problems(spec, stochastic=True, discrete=True, heads=heads)

    @property
    def experience(self) -> Mapping[str, Source]:
        return self.combined_sources(self.source(n_step=self.n_step))

    def init(self, key: jax.Array, spec: EnvSpec) -> MPOState:
        per_dimension = self.kl_limits.per_dimension and isinstance(spec.action_space, spaces.Box)
        duals = self.kl_limits.duals(self.optimizer, spec, spec.action_space.shape if per_dimension else (1,))
        return MPOState(**vars(super().init(key, spec)), duals=duals)

    def update(
        self, state: MPOState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[MPOState, UpdateInfo]:
        statistics, replay = self.learning_batch(state, batch, replicas)
        next_key, key = (replay.observation.keys(k, replicas) for k in jax.random.split(key))

        candidates = self._candidates(state, replay.next_observation, next_key, spec)
        target = self._target(candidates, replay)
        support = self.support
        critic, fit = off_policy.critic_step(
            self.critic, state.critic, self.critic_optimizer, replay, target, spec, replicas, **support
        )

        old = self._candidates(state, replay.observation, key, spec)

        def mean(x):
            return weighted_mean(x, replay.weight, replicas)

        def loss(learned: tuple[Params, Params]):
            duals = jax.tree.map(jax.nn.softplus, learned[1])
            variables = state.policy.variables.replace(params=learned[0])
            new, model_state = replay.observation.policy_output(self.policy, variables, spec, train=True)
            weights = improved(old.values, old.log_prior, jax.lax.stop_gradient(duals["temperature"]))
            fit = mean(old.fit(new, weights))
            divergences = old.divergences(new)
            if not self.kl_limits.per_dimension:
                divergences = {name: jnp.sum(x, axis=-1, keepdims=True) for name, x in divergences.items()}
            divergences = {name: jax.vmap(mean, in_axes=-1)(x) for name, x in divergences.items()}
            bounds, metrics = self.kl_limits.lagrangian(divergences, duals)
            temperature = mean(
                temperature_loss(old.values, old.log_prior, duals["temperature"], self.kl_limits.epsilon)
            )
            metrics |= {"policy_loss": fit, "kl_improved": mean(divergence(weights, old.log_prior))}
            return fit + bounds + temperature, (metrics, model_state)

        gradients, (metrics, model_state) = jax.grad(loss, has_aux=True)((state.policy.params, state.duals.params))
        policy, _ = train_state.apply_gradients(
            state.policy, gradients[0], self.policy_optimizer, replicas, model_state
        )
        duals = self.kl_limits.step(state.duals, gradients[1], self.optimizer, replicas)
        updates = state.updates + 1
        tau = jnp.where(updates % self.target_period == 0, self.tau, 0.0)
        policy, critic = train_state.polyak_update(policy, tau), train_state.polyak_update(critic, tau)
        return MPOState(policy, critic, statistics, updates, duals), UpdateInfo(replicas.mean(fit.metrics | metrics))

    def _candidates(
        self, state: MPOState, inputs: Observations, key: jax.Array, spec: EnvSpec
    ) -> AllActions | SampledActions:
        """Return candidate actions of the target policy for observations [batch], valued by the smallest target critic.

        The candidates are all actions of a discrete space, or actions sampled from a box with keys [batch].
        """
        policy, critic = state.policy.target_variables, state.critic.target_variables
        distribution = inputs.policy_output(self.policy, policy, spec)[0]
        if isinstance(spec.action_space, spaces.Discrete):
            output = inputs.critic_output(self.critic, critic, None, spec)[0]
            values, returns = least(output, self.v_min, self.v_max)
            # Forbidden actions have probability 0, and the most negative finite number as their value.
            allowed = values if inputs.action_mask is None else jnp.where(inputs.action_mask, values, 0.0)
            return AllActions(distribution, allowed, returns, distribution.log_probs())
        keys = jax.vmap(lambda k: jax.random.split(k, self.samples), out_axes=1)(key)
        points = jax.vmap(distribution.base.sample)(keys)
        actions = from_unit(jnp.tanh(points), spaces.expect(spec.action_space, spaces.Box))
        # vmap over the actions only, so that each observation is encoded once.
        each = jax.vmap(lambda x: inputs.critic_output(self.critic, critic, x, spec)[0], out_axes=2)
        output = jax.tree.map(lambda x: x[:, :, :, 0], each(actions))
        values, returns = least(output, self.v_min, self.v_max)
        return SampledActions(distribution, points, values, returns, jnp.full_like(values, -jnp.log(self.samples)))

    def _target(self, candidates: AllActions | SampledActions, batch: TransitionBatch) -> Returns:
        """Return the critics' target for transitions [batch], in expectation over the candidate actions."""
        probability = jnp.exp(candidates.log_prior)
        if isinstance(candidates.returns, tuple):
            return off_policy.expected_target(batch, jnp.sum(probability * candidates.values, axis=-1), self.gamma)
        mixed = jnp.sum(probability[..., None] * candidates.returns, axis=1)
        atoms = q_learning.support(self.v_min, self.v_max, mixed.shape[-1])
        after = Returns(jnp.broadcast_to(atoms[None], mixed.shape), mixed)
        return q_learning.n_step_returns(batch.rewards, batch.steps, batch.bootstrap, after, self.gamma)


def least(output: Any, v_min: Scalar, v_max: Scalar) -> tuple[jax.Array, jax.Array | tuple[()]]:
    """Select the smallest critic's output for each action.

    Args:
      output: the critics' output, [ensemble, batch, K], or `CategoricalReturns` of that shape.
      v_min, v_max: the ends of the support of `CategoricalReturns`.

    Returns:
      Expected returns [batch, K], and probabilities [batch, K, atoms] of the support's atoms; () without a support.
    """
    values = q_learning.action_values(output, v_min, v_max)
    if not isinstance(output, CategoricalReturns):
        return jnp.min(values, axis=0), ()
    which = jnp.argmin(values, axis=0)[None, :, :, None]
    logits = jnp.take_along_axis(output.logits, which, axis=0)[0]
    return jnp.min(values, axis=0), jax.nn.softmax(logits, axis=-1)


# --- the equations ---------------------------------------------------------------------------------------------------


def improved(values: jax.Array, log_prior: jax.Array, temperature: Scalar) -> jax.Array:
    """Return q proportional to pi exp(Q / eta): the best policy within a divergence of pi (section 4.1).

    Args:
      values: Q [batch, K].
      log_prior: log pi [batch, K] of the same actions; -log K if the actions were sampled from pi.
      temperature: eta, more than 0.

    Returns:
      [batch, K], each row sums to 1.
    """
    return jax.nn.softmax(values / temperature + log_prior, axis=-1)


def temperature_loss(values: jax.Array, log_prior: jax.Array, temperature: Scalar, epsilon: Scalar) -> jax.Array:
    """Return eta epsilon + eta log sum pi exp(Q / eta), whose minimum over eta is where KL(q || pi) is epsilon.

    Args:
      values, log_prior, temperature: as in `improved`.
      epsilon: limit of the KL divergence, in nats.

    Returns:
      [batch].
    """
    return temperature * (epsilon + jax.nn.logsumexp(values / temperature + log_prior, axis=-1))


def divergence(weights: jax.Array, log_prior: jax.Array) -> jax.Array:
    """Return KL(q || pi) [batch] in nats, for weights q and log pi [batch, K]."""
    return jnp.sum(jax.scipy.special.xlogy(weights, weights) - weights * log_prior, axis=-1)
