"""Functions shared by the off-policy actor-critics: normalized batches, dropout, targets, and the critics' losses."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxrl.algos import combined_replay, histories, normalization, q_learning, train_state
from jaxrl.algos.histories import Histories, Observations
from jaxrl.algos.normalization import RunningStatistics
from jaxrl.algos.optimizers import Number
from jaxrl.algos.q_learning import Returns
from jaxrl.algos.train_state import TrainState, Variables, weighted_mean
from jaxrl.core import spaces
from jaxrl.core.types import (
    EnvSpec,
    Metrics,
    ModelState,
    PyTree,
    Replicas,
    TransitionBatch,
)
from jaxrl.networks import (
    Categorical,
    Critic,
)

Inputs = Observations | Histories
DropoutKeys = tuple[jax.Array | None, jax.Array | None]  # keys [batch] for targets and loss; None: no dropout
Statistics = RunningStatistics | tuple[()]  # statistics of observations; () if these are not normalized


class LearnerState(struct.PyTreeNode):
    """State of a learner with a policy and critics."""

    policy: TrainState
    critic: TrainState
    statistics: Statistics
    updates: jax.Array  # int32


# --- normalizing observations ----------------------------------------------------------------------------------------


def init_statistics(spec: EnvSpec, normalize_observation: bool) -> Statistics:
    """Return empty statistics of observations; () if they are not normalized."""
    return normalization.init(spec.observation_space) if normalize_observation else ()


def normalize_observation(statistics: Statistics, observation: PyTree, clip: Number | None) -> PyTree:
    """Normalize observations [batch, ...], clipped to [-clip, clip]; without statistics, return them unchanged.

    With `clip=None`, normalized observations are not clipped.
    """
    if not isinstance(statistics, RunningStatistics):
        return observation
    return normalization.normalize(statistics, observation, jnp.inf if clip is None else clip)


def learning_batch(
    statistics: Statistics,
    batch: Mapping[str, Any],
    clip: Number | None,
    replicas: Replicas,
    *,
    n_step: int = 1,
) -> tuple[Statistics, TransitionBatch]:
    """Merge an update's batch into the running statistics; return these and the batch's normalized transitions.

    Args:
      statistics: statistics of the observations in previous updates.
      batch: as passed to `update`; all its parts are joined.
      clip: maximum absolute value of normalized observations; None: no clipping.
      replicas: as passed to `update`.
      n_step: maximum number of steps of transitions within sequences.
    """
    transitions = histories.transitions(combined_replay.combined_batch(batch, replicas), n_step)
    return normalize_batch(statistics, transitions, clip, replicas)


def normalize_batch(
    statistics: Statistics, batch: TransitionBatch, clip: Number | None, replicas: Replicas
) -> tuple[Statistics, TransitionBatch]:
    """Merge a batch's observations into the statistics; return these and the batch normalized with them.

    The statistics are computed from the transitions sampled from the replay, not from those just collected: each
    transition counts as often as it is sampled, so it has the same weight as in the losses. The newest statistics
    normalize the observation and the next observation of a transition.
    """
    if not isinstance(statistics, RunningStatistics):
        return statistics, batch
    statistics = normalization.update(statistics, batch.observation.current, batch.weight, replicas)

    def normalized(inputs):
        return inputs.map(lambda x: normalize_observation(statistics, x, clip))

    return statistics, batch.replace(
        observation=normalized(batch.observation), next_observation=normalized(batch.next_observation)
    )


def dropout_keys(
    network: Critic, key: jax.Array, batch: TransitionBatch, replicas: Replicas
) -> tuple[DropoutKeys, jax.Array | None]:
    """Return keys [batch] for dropout in the critics' targets and loss, and in the policy's loss.

    Without dropout, the three are None.
    """
    if not network.dropout:
        return (None, None), None
    keys = jax.random.split(jax.random.fold_in(key, 3), 3)
    of_target, of_loss, of_policy = (batch.observation.keys(k, replicas) for k in keys)
    return (of_target, of_loss), of_policy


def expected_value(distribution: Categorical, values: jax.Array) -> jax.Array:
    """Return the expectation [batch] of values [batch, n] of all actions under a policy."""
    probability = jnp.exp(distribution.log_probs())
    # Forbidden actions have probability 0, and the most negative finite number as their value.
    return jnp.sum(probability * jnp.where(probability > 0.0, values, 0.0), axis=-1)


# --- the critic ------------------------------------------------------------------------------------------------------


def expected_target(batch: TransitionBatch, value: jax.Array, gamma: Number) -> Returns:
    """Return the critics' target for each transition, given the next observation's `value` [batch]; no gradient."""
    target = q_learning.n_step_target(batch.rewards, batch.steps, batch.bootstrap, value, gamma)
    return Returns(target[:, None], jnp.ones_like(target[:, None]))


class CriticLoss(struct.PyTreeNode):
    """Auxiliary outputs of the critics' loss."""

    metrics: Metrics  # this device's share
    error: jax.Array  # [batch], mean error of the members
    values: jax.Array  # [ensemble, batch, actions], expected returns
    taken: jax.Array  # [ensemble, batch], expected returns of the actions that were taken


def critic_loss(
    network: Critic,
    critic: Variables,
    batch: TransitionBatch,
    target: Returns,
    spec: EnvSpec,
    replicas: Replicas,
    **options: Any,
) -> tuple[jax.Array, tuple[CriticLoss, ModelState]]:
    """Return the critics' loss, its auxiliary outputs and the new model state.

    The loss is this device's share, summed over the members.

    Args:
      network, critic: the ensemble and its variables.
      batch, target, spec, replicas: as for `output_loss`.
      options: the keyword arguments of `output_loss`.
    """
    boxed = None if isinstance(spec.action_space, spaces.Discrete) else batch.action
    output, model_state = batch.observation.critic_output(network, critic, boxed, spec, train=True)
    loss, fit = output_loss(output, batch, target, spec, replicas, **options)
    return loss, (fit, model_state)


def output_loss(
    output: Any,
    batch: TransitionBatch,
    target: Returns,
    spec: EnvSpec,
    replicas: Replicas,
    *,
    importance: jax.Array | None = None,
    v_min: Number = 0.0,
    v_max: Number = 0.0,
    quantile_huber: Number = 1.0,
) -> tuple[jax.Array, CriticLoss]:
    """Return the loss of the critics' outputs, and its auxiliary outputs.

    The loss is this device's share, summed over the members.

    Args:
      output: output of `critic_output`, with leaves [ensemble, batch, actions, ...].
      batch: transitions.
      target: target of each transition.
      spec, replicas: as passed to `update`.
      importance: importance weights [batch] of a prioritized sample, or None.
      v_min, v_max: the ends of the support of a categorical head.
      quantile_huber: Huber threshold of a quantile head.
    """
    discrete = isinstance(spec.action_space, spaces.Discrete)
    action = batch.action if discrete else jnp.zeros(batch.weight.shape, jnp.int32)
    losses, errors = jax.vmap(lambda one: q_learning.td_loss(one, action, target, v_min, v_max, quantile_huber))(output)
    if importance is not None:
        losses = losses * importance[None]
    each = jax.vmap(lambda x: weighted_mean(x, batch.weight, replicas))
    loss = jnp.sum(each(losses))  # a sum over the members: each learns independently
    values = q_learning.action_values(output, v_min, v_max)
    taken = jnp.take_along_axis(values, action[None, :, None], axis=-1)[..., 0]
    metrics = {"critic_loss": loss, "q_value": jnp.mean(each(taken)), "td_error": jnp.mean(each(errors))}
    metrics |= q_learning.support_metrics(output, target, v_min, v_max, batch.weight, replicas)
    return loss, CriticLoss(metrics, jnp.mean(errors, axis=0), values, taken)


def critic_step(
    network: Critic,
    critic: TrainState,
    transformation: optax.GradientTransformation,
    batch: TransitionBatch,
    target: Returns,
    spec: EnvSpec,
    replicas: Replicas,
    **options: Any,
) -> tuple[TrainState, CriticLoss]:
    """Take a gradient step of every member of the ensemble towards the targets; arguments as in `critic_loss`."""

    def loss(variables):
        return critic_loss(network, variables, batch, target, spec, replicas, **options)

    critic, _, fit = train_state.gradient(loss, critic).step(transformation, replicas)
    return critic, fit
