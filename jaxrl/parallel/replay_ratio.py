"""The exact number of gradient updates per iteration for a ratio of updates per environment step.

With ratio r, rollouts of T steps and N environments, an iteration makes u = r T N updates. If u is not a whole number,
iteration k (from 1) makes floor(k u) - floor((k - 1) u) updates, so there are floor(k u) after k iterations.
"""

from fractions import Fraction

import jax
import jax.numpy as jnp

from jaxrl.core.types import Counter

_MOST_DIGITS = 1_000_000  # the largest denominator of a ratio; represents 0.1 and 1/3 exactly
_LONGEST_PERIOD = 1 << 16  # steps of an environment; the limit of `Counter.modulo`


def updates_per_iteration(ratio: float, num_envs: int, rollout_length: int) -> Fraction:
    """Return the exact mean number of updates per iteration.

    Args:
      ratio: updates per environment step.
      num_envs: number of environments over all devices.
      rollout_length: steps of every environment in an iteration.
    """
    return Fraction(ratio).limit_denominator(_MOST_DIGITS) * num_envs * rollout_length


def problems(ratio: float, num_envs: int, rollout_length: int) -> list[str]:
    """Return an error line if a ratio is invalid or cannot be kept exactly; otherwise []."""
    if not 0.0 < ratio < float("inf"):
        return [f"replay_ratio={ratio} must be a finite number of updates per environment step, more than 0"]
    average = updates_per_iteration(ratio, num_envs, rollout_length)
    period = average.denominator
    if average > 0 and (period == 1 or period * rollout_length <= _LONGEST_PERIOD):
        return []
    steps, longest = num_envs * rollout_length, max(_LONGEST_PERIOD // rollout_length, 1)
    simple = max(average.limit_denominator(longest), Fraction(1, longest))
    return [
        f"replay_ratio={ratio} cannot be kept exactly by {num_envs} environments with rollout_length="
        f"{rollout_length}; use {float(simple / steps)!r} ({simple.numerator} updates every "
        f"{simple.denominator * steps} environment steps)"
    ]


def updates_now(average: Fraction, steps_per_env: Counter, rollout_length: int) -> int | jax.Array:
    """Return the number of updates of the iteration that ends when every environment has made `steps_per_env` steps.

    Args:
      average: mean updates per iteration, from `updates_per_iteration`.
      steps_per_env: number of steps, a multiple of `rollout_length`.
      rollout_length: steps of every environment in an iteration.

    Returns:
      A Python int if all iterations have the same number of updates, otherwise an int32 array.
    """
    whole, rest, period = average // 1, average.numerator % average.denominator, average.denominator
    if period == 1:
        return int(whole)
    iteration = steps_per_env.modulo(rollout_length * period) // rollout_length  # modulo the period
    more = (iteration * jnp.uint32(rest)) % period < rest
    return int(whole) + more.astype(jnp.int32)
