"""Reduction of several critics' values to one, in the targets and in the policy's loss of soft actor-critics."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl.algos import q_learning
from jaxrl.algos.base import part_class, static
from jaxrl.algos.optimizers import Number
from jaxrl.algos.q_learning import Returns
from jaxrl.networks import CategoricalReturns, QuantileReturns


@part_class
class Pessimism:
    """Reduction over an ensemble of critics: the smallest value, or less pessimistic ones."""

    target: Literal["min", "mean"] = static(
        "min",
        choices=("min", "mean"),
        help="reduction over the critics' values in the targets; min pools the quantiles of all critics",
    )
    policy: Literal["min", "mean"] = static(
        "min", choices=("min", "mean"), help="reduction over the critics' values in the policy's loss"
    )
    sampled: int | None = static(
        None,
        low=1,
        at_most="critic.ensemble",
        help="number of critics sampled at each update to compute the targets (REDQ); None: all",
    )
    dropped_quantiles: int = static(
        0,
        low=0,
        only_with="critic.head=quantilevalues",
        less_than="critic.head.quantiles",
        help="number of largest quantiles dropped from the targets, per critic (TQC)",
    )

    def returns(self, output: Any, key: jax.Array, v_min: Number, v_max: Number) -> Returns:
        """Return the returns of each action for the targets, as atoms and probabilities [batch, actions, K].

        Args:
          output: the critics' output, with leaves [ensemble, batch, actions, ...].
          key: a key to sample critics (Chen et al., 2021, arXiv:2101.05982).
          v_min, v_max: the ends of the support of a categorical head.
        """
        if self.sampled is not None:
            members = jax.tree.leaves(output)[0].shape[0]
            drawn = jax.random.permutation(jax.random.fold_in(key, 2), members)[: self.sampled]
            output = jax.tree.map(lambda x: x[drawn], output)
        if self.target == "mean":
            output = mean_member(output)
        return pessimistic_returns(output, v_min, v_max, self.dropped_quantiles)

    def value(self, values: jax.Array) -> jax.Array:
        """Reduce values [ensemble, ...] over the critics, for the policy's loss."""
        return (jnp.min if self.policy == "min" else jnp.mean)(values, axis=0)


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
