"""Functions shared by the off-policy actor-critics: evaluation of networks, targets, losses and normalization."""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxrl.algos import combined_replay, histories, normalization, q_learning, train_state
from jaxrl.algos.histories import History
from jaxrl.algos.normalization import RunningStatistics
from jaxrl.algos.optimizers import Number
from jaxrl.algos.q_learning import Returns
from jaxrl.algos.train_state import TrainState, Variables, weighted_mean
from jaxrl.core import spaces
from jaxrl.core.shared_batch import weighted_rows
from jaxrl.core.types import (
    EnvSpec,
    Metrics,
    ModelState,
    Network,
    NetworkInputs,
    PyTree,
    Replicas,
    TransitionBatch,
)
from jaxrl.networks import (
    Categorical,
    Critic,
)

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
    if isinstance(observation, History):
        normalized = normalize_observation(statistics, observation.inputs.observation, clip)
        return observation.replace(inputs=observation.inputs.replace(observation=normalized))
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
    seen = batch.observation
    if isinstance(seen, History):
        seen = jax.tree.map(lambda x: x[0], seen.selected.observation)
    statistics = normalization.update(statistics, seen, batch.weight, replicas)
    return statistics, batch.replace(
        observation=normalize_observation(statistics, batch.observation, clip),
        next_observation=normalize_observation(statistics, batch.next_observation, clip),
    )


# --- networks over a batch -------------------------------------------------------------------------------------------


def evaluate_policy(
    network: Network, policy: Variables, observation: PyTree, spec: EnvSpec, mask: jax.Array | None = None
) -> Any:
    """Return the policy's output, leaves [batch, ...], for observations [batch, ...] and action masks [batch, n]."""
    return train_policy(network, policy, observation, spec, mask, train=False)[0]


def train_policy(
    network: Network,
    policy: Variables,
    observation: PyTree,
    spec: EnvSpec,
    mask: jax.Array | None = None,
    *,
    train: bool = True,
) -> tuple[Any, ModelState]:
    """Return the output of `evaluate_policy` in training mode (see `types.Network`), and the new model state."""
    if isinstance(observation, History):
        return observation.policy(network, policy, spec, train=train)
    inputs = NetworkInputs.of_transitions(observation, mask)
    output, _, model_state = network.apply(
        policy.params, inputs, (), spec=spec, model_state=policy.model_state, train=train
    )
    return jax.tree.map(lambda x: x[0], output), model_state


def evaluate_critic(
    network: Critic,
    critic: Variables,
    observation: PyTree,
    action: jax.Array | None,
    spec: EnvSpec,
    mask: jax.Array | None = None,
    key: jax.Array | None = None,
) -> Any:
    """Return the critics' output, with leaves [ensemble, batch, actions, ...].

    Args:
      network: the ensemble.
      critic: variables of the ensemble.
      observation: observations [batch, ...].
      action: box actions [batch, n], for which `actions` is 1 in the output; None for discrete actions.
      spec: the environment's spec.
      mask: action masks [batch, actions], if actions are discrete and some are forbidden.
      key: keys [batch] for dropout; None: no dropout.
    """
    return train_critic(network, critic, observation, action, spec, mask, key, train=False)[0]


def train_critic(
    network: Critic,
    critic: Variables,
    observation: PyTree,
    action: jax.Array | None,
    spec: EnvSpec,
    mask: jax.Array | None = None,
    key: jax.Array | None = None,
    *,
    train: bool = True,
) -> tuple[Any, ModelState]:
    """Return the output of `evaluate_critic` in training mode (see `types.Network`), and the new model state."""
    if isinstance(observation, History):
        return observation.critic(network, critic, action, spec, mask, key, train=train)
    inputs = NetworkInputs.of_transitions(observation, mask)
    output, model_state = network.apply(
        critic.params,
        inputs,
        None if action is None else action[None],
        spec=spec,
        model_state=critic.model_state,
        train=train,
        key=key,
    )
    return jax.tree.map(lambda x: x[:, 0], output), model_state


def rows_that_count(batch: TransitionBatch, ends: int = 1) -> contextlib.AbstractContextManager[None]:
    """Declare which rows count in layers that normalize over the batch; all rows of histories count.

    Args:
      batch: transitions; their weights define which rows count.
      ends: number of copies of the rows in the batch that the layers see, such as 2 with next observations.
    """
    if isinstance(batch.observation, History):
        return contextlib.nullcontext()
    return weighted_rows(jnp.concatenate([batch.weight] * ends))


def transition_keys(key: jax.Array, batch: TransitionBatch, replicas: Replicas) -> jax.Array:
    """Return keys [batch], one for each transition, independent of the number of devices."""
    if not isinstance(batch.observation, History):
        return q_learning.transition_keys(key, batch.weight.shape[0], replicas)
    columns = batch.observation.columns
    of_columns = q_learning.transition_keys(key, columns, replicas)
    row = jnp.arange(batch.weight.shape[0] // columns, dtype=jnp.uint32)
    folded = jax.vmap(lambda n: jax.vmap(lambda k: jax.random.fold_in(k, n))(of_columns))(row)
    return folded.reshape((-1, *folded.shape[2:]))


def dropout_keys(
    network: Critic, key: jax.Array, batch: TransitionBatch, replicas: Replicas
) -> tuple[DropoutKeys, jax.Array | None]:
    """Return keys [batch] for dropout in the critics' targets and loss, and in the policy's loss.

    Without dropout, the three are None.
    """
    if not network.dropout:
        return (None, None), None
    keys = jax.random.split(jax.random.fold_in(key, 3), 3)
    of_target, of_loss, of_policy = (transition_keys(k, batch, replicas) for k in keys)
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
    output, model_state = train_critic(network, critic, batch.observation, boxed, spec, batch.action_mask)
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
      output: output of `train_critic`, with leaves [ensemble, batch, actions, ...].
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
