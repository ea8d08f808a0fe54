"""Critics of soft actor-critics: their targets and gradient step, for an ensemble of values or of distributions."""

import contextlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.algos import off_policy, q_learning, train_state
from jaxrl.algos.base import field_group, number, static
from jaxrl.algos.fields import ActorCriticFields, QuantileFields, SupportFields
from jaxrl.algos.histories import History
from jaxrl.algos.off_policy import CriticLoss
from jaxrl.algos.optimizers import Number
from jaxrl.algos.q_learning import Returns
from jaxrl.algos.train_state import TrainState, Variables
from jaxrl.core.schedules import Scalar
from jaxrl.core.shared_batch import weighted_rows
from jaxrl.core.types import EnvSpec, ModelState, PyTree, Replicas, TransitionBatch
from jaxrl.networks import Categorical, CategoricalReturns, Critic, QuantileReturns


class NextActions(NamedTuple):
    """The policy's actions at the next observations of transitions."""

    policy: Any  # the policy's distributions
    action: jax.Array | None  # [batch, n] for a box; None for discrete actions, as expectations use all of them
    log_prob: jax.Array  # [batch]; the negative entropy of discrete actions


@field_group
class SoftCriticFields(SupportFields, QuantileFields, ActorCriticFields):
    """Settings of the critics' targets, and of the schedule and the values of policy updates."""

    tau: Scalar | None = number(
        0.005,
        above=0,
        high=1,
        help="soft update coefficient of the target networks (Polyak averaging); None: no target networks",
    )
    joint_batch: bool = static(
        False,
        help="one batch of observations and next observations for critics and targets, in training mode",
    )
    joint_policy: bool = static(False, help="one batch of observations and next observations in the policy's loss too")
    target_critics: int | None = static(
        None,
        low=1,
        at_most="critic.ensemble",
        help="number of critics sampled at each update to compute the targets; None: all",
    )
    target_value: Literal["min", "mean"] = static(
        "min",
        choices=("min", "mean"),
        help="reduction over the critics' values in the targets; min pools the quantiles of all critics",
    )
    dropped_quantiles: int = static(
        0,
        low=0,
        only_with="critic.head=quantilevalues",
        less_than="critic.head.quantiles",
        help="number of largest quantiles dropped from the targets, per critic (TQC)",
    )
    policy_delay: int = static(1, low=1, help="critic updates per update of the policy and the temperature")
    policy_value: Literal["min", "mean"] = static(
        "min", choices=("min", "mean"), help="reduction over the critics' values in the policy's loss"
    )

    def critic_step(
        self,
        critic: TrainState,
        batch: TransitionBatch,
        following: NextActions,
        temperature: Number,
        key: jax.Array,
        drop: Sequence[jax.Array | None],
        spec: EnvSpec,
        replicas: Replicas,
    ) -> tuple[TrainState, CriticLoss]:
        """Take a gradient step of the critics, with target networks or one forward pass over both ends of transitions.

        Equations 5 and 6 of Haarnoja et al. (2018).

        Args:
          critic: training state of the ensemble.
          batch: normalized transitions.
          following: the policy's actions at the next observations.
          temperature: weight of the entropy.
          key: a key to sample the members that compute the targets.
          drop: two entries, keys [batch] for dropout in the targets and in the loss; None: no dropout.
          spec: the environment's spec.
          replicas: as passed to `update`.
        """
        drawn = self._drawn_critics(critic.variables, key)
        slow = critic.variables if self.tau is None else critic.target_variables
        outputs = None
        if not self.joint_batch:
            there = batch.next_observation, following.action, spec, batch.next_action_mask
            outputs = off_policy.evaluate_critic(self.critic, slow, *there, drop[0])
        elif self.tau is not None:
            outputs = joint_outputs(self.critic, slow, batch, following.action, spec, drop[0])[1]

        def loss(variables):
            """Return the loss of the critics, without gradient through the targets."""
            there = outputs
            if self.joint_batch:
                output, own, model_state = joint_outputs(self.critic, variables, batch, following.action, spec, drop[1])
                there = own if outputs is None else outputs
            else:
                action = None if following.action is None else batch.action
                here = batch.observation, action, spec, batch.action_mask
                with rows_that_count(batch):
                    output, model_state = off_policy.train_critic(self.critic, variables, *here, drop[1])
            there = there if drawn is None else jax.tree.map(lambda x: x[drawn], there)
            if self.target_value == "mean":
                there = mean_member(there)
            returns = pessimistic_returns(there, **self.support, dropped=self.dropped_quantiles)
            target = soft_target(batch, returns, following.policy, following.log_prob, temperature, self.gamma)
            loss, fit = off_policy.output_loss(
                output, batch, target, spec, replicas, quantile_huber=self.quantile_huber, **self.support
            )
            return loss, (fit, model_state)

        critic, _, fit = train_state.gradient(loss, critic).step(self.critic_optimizer, replicas)
        return critic, fit

    def _drawn_critics(self, critic: Variables, key: jax.Array) -> jax.Array | None:
        """Sample the members that compute an update's targets (Chen et al., 2021).

        Returns:
          Indices of members, int32 [target_critics]; None if all members are used.
        """
        if self.target_critics is None:
            return None
        members = jax.tree.leaves(critic.params)[0].shape[0]
        return jax.random.permutation(jax.random.fold_in(key, 2), members)[: self.target_critics]


def both_ends(here: PyTree, there: PyTree) -> PyTree:
    """Concatenate two trees, whose leaves are arrays [batch, ...] or histories, to [2 * batch, ...]."""

    def joined(a, b):
        if isinstance(a, History):  # the histories have the same rows but select different ones
            return a.replace(index=jnp.concatenate([a.index, b.index]))
        return jnp.concatenate([a, b])

    return jax.tree.map(joined, here, there, is_leaf=lambda x: isinstance(x, History))


def rows_that_count(batch: TransitionBatch, ends: int = 1) -> contextlib.AbstractContextManager[None]:
    """Declare which rows count in layers that normalize over the batch; all rows of histories count.

    Args:
      batch: transitions; their weights define which rows count.
      ends: number of copies of the rows in the batch that the layers see, such as 2 with next observations.
    """
    if isinstance(batch.observation, History):
        return contextlib.nullcontext()
    return weighted_rows(jnp.concatenate([batch.weight] * ends))


def joint_outputs(
    network: Critic,
    critic: Variables,
    batch: TransitionBatch,
    next_action: jax.Array | None,
    spec: EnvSpec,
    key: jax.Array | None = None,
) -> tuple[Any, Any, ModelState]:
    """Return the critics' outputs at observations and next observations, from one training pass, and the model state.

    Args:
      network, critic: the ensemble and its variables.
      batch: transitions.
      next_action: box actions [batch, n]; None for discrete actions, for which the outputs cover all actions.
      spec: the environment's spec.
      key: keys [batch] for dropout; None: no dropout.
    """
    if key is not None:
        key = jnp.concatenate([key, jax.vmap(lambda k: jax.random.fold_in(k, 1))(key)])
    action = None if next_action is None else batch.action
    here = batch.observation, action, batch.action_mask
    there = batch.next_observation, next_action, batch.next_action_mask
    observation, action, mask = both_ends(here, there)
    with rows_that_count(batch, ends=2):
        output, model_state = off_policy.train_critic(network, critic, observation, action, spec, mask, key)
    size = batch.weight.shape[0]
    here, there = (jax.tree.map(lambda x, part=part: x[:, part], output) for part in (slice(size), slice(size, None)))
    return here, there, model_state


def dropout_keys(
    network: Critic, key: jax.Array, batch: TransitionBatch, replicas: Replicas
) -> tuple[jax.Array | None, ...]:
    """Return keys [batch] for dropout in the critics' targets, the critics' loss and the policy's loss.

    Without dropout, the three entries are None.
    """
    if not network.dropout:
        return None, None, None
    keys = jax.random.split(jax.random.fold_in(key, 3), 3)
    return tuple(off_policy.transition_keys(k, batch, replicas) for k in keys)


def mean_member(output: Any) -> Any:
    """Average an ensemble's output over its members, to one member: values, probabilities or quantiles."""
    first = jax.tree.map(lambda x: x[:1], output)
    if isinstance(output, CategoricalReturns):
        log_probs = jax.nn.log_softmax(output.logits, axis=-1)
        return first.replace(logits=jax.nn.logsumexp(log_probs, axis=0, keepdims=True))
    if isinstance(output, QuantileReturns):
        return first.replace(quantiles=jnp.mean(output.quantiles, axis=0, keepdims=True))
    return jnp.mean(output, axis=0, keepdims=True)


def pessimistic_returns(output: Any, v_min: Number, v_max: Number, dropped: int = 0) -> Returns:
    """Return pessimistic returns of each action from an ensemble, as atoms and probabilities [batch, actions, K].

    For values, use the smallest one; for categorical distributions, the distribution of the member with the smallest
    expectation; for quantiles, the pooled quantiles of all members without the largest ones (Kuznetsov et al., 2020,
    arXiv:2005.04269, equation 3).

    Args:
      output: the critics' output, with leaves [ensemble, batch, actions, ...].
      v_min, v_max: the ends of the support of a categorical head.
      dropped: number of largest quantiles to drop, per member.
    """
    if isinstance(output, QuantileReturns):
        members, size, actions, quantiles = output.quantiles.shape
        pooled = jnp.moveaxis(output.quantiles, 0, 2).reshape(size, actions, members * quantiles)
        atoms = jnp.sort(pooled, axis=-1)[..., : members * (quantiles - dropped)]
        return Returns(atoms, jnp.full_like(atoms, 1.0 / atoms.shape[-1]))
    values = q_learning.action_values(output, v_min, v_max)
    if not isinstance(output, CategoricalReturns):
        least = jnp.min(values, axis=0)[..., None]
        return Returns(least, jnp.ones_like(least))
    least = jnp.argmin(values, axis=0)[None, ..., None]
    probabilities = jax.nn.softmax(jnp.take_along_axis(output.logits, least, axis=0)[0], axis=-1)
    atoms = q_learning.support(v_min, v_max, probabilities.shape[-1])
    return Returns(jnp.broadcast_to(atoms, probabilities.shape), probabilities)


def soft_target(
    batch: TransitionBatch, following: Returns, policy: Any, log_prob: jax.Array, temperature: Number, gamma: Number
) -> Returns:
    """Return the critics' target for each transition, [batch, K]; no gradient.

    Args:
      batch: transitions.
      following: the returns of each action at the next observation, [batch, actions, K].
      policy: the policy's distribution at the next observation. For discrete actions, the target is only the expected
        return.
      log_prob: log-probability [batch] of the policy's action at the next observation.
      temperature: weight of the entropy.
      gamma: discount.
    """
    if isinstance(policy, Categorical):
        values = jnp.sum(following.atoms * following.probabilities, axis=-1)
        atoms = off_policy.expected_value(policy, values)[:, None]
        following = Returns(atoms, jnp.ones_like(atoms))
    else:
        following = jax.tree.map(lambda x: x[:, 0], following)
    following = following.replace(atoms=following.atoms - (temperature * log_prob)[:, None])
    return q_learning.n_step_returns(batch.rewards, batch.steps, batch.bootstrap, following, gamma)
