"""Resets of networks: networks trained early on little data learn worse later (Nikishin et al., 2022)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos.base import part_class, static
from jaxrl.core.types import EnvSpec

# Kept when the networks are reset.
_UNCHANGED = ("statistics", "updates", "return_scale", "policy_loss", "policy_metrics")


@part_class
class Resets:
    """Resets of networks and optimizers; replay, statistics and counts stay (arXiv:2205.07802)."""

    at: tuple[int, ...] = static((), help="update counts after which networks and optimizers are reset")

    def problems(self) -> list[str]:
        """Explain why `at` is invalid, one line."""
        whole = isinstance(self.at, tuple) and all(isinstance(x, int) and not isinstance(x, bool) for x in self.at)
        if self.at and whole and all(0 < x < 2**31 for x in self.at):
            return []
        return [f"resets.at={self.at!r:.80} must be a tuple of update counts, such as (15_000, 50_000)"]


def after_reset[State: Any](
    resets: Resets | None, init: Callable[[jax.Array, EnvSpec], State], state: State, key: jax.Array, spec: EnvSpec
) -> State:
    """Return the state after an update; if the update is in `resets.at`, reinitialize all but statistics and counts.

    The reinitialized state is computed only if a reset is due; in vmapped runs, it is always computed.

    Args:
      resets: the resets, or None.
      init: the algorithm's `init`.
      state: the state after the update.
      key: the key of the update.
      spec: the environment's spec.
    """
    if resets is None:
        return state

    def again(state, key):
        unchanged = {name: getattr(state, name) for name in _UNCHANGED if hasattr(state, name)}
        return init(key, spec).replace(**unchanged)

    due = jnp.isin(state.updates, jnp.asarray(resets.at, state.updates.dtype))
    # Other functions fold shard numbers into the same key; no shard has this number.
    key = jax.random.fold_in(key, 2**31 - 1)
    return jax.lax.cond(due, again, lambda same, _: same, state, key)
