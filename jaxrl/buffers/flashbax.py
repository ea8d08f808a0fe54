"""Flashbax's buffers behind the same calls: storage and sampling theirs, rows and batches ours.

For comparison, and for who has them already. What ours gives and theirs do not is left at what is true of them:
ages and times sampled are not known, and a priority for a row that was overwritten is not dropped.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.errors import ConfigError, MissingExtraError
from jaxrl.sources import Prioritised, Replay, Uniform
from jaxrl.types import PyTree, Trajectory, TransitionBatch


@dataclasses.dataclass(frozen=True)
class FlashbaxReplay:
    """A source's one-step transitions kept by `flashbax.make_flat_buffer`, or its prioritised form.

    Rows go in as they are; a row and the one after it are a transition, of weight 0 at an episode's last observation.

    Args:
      source: its capacity, batch size, minimum size and sampler count; `n_step` 1, transitions only.
      num_envs: environments.

    Raises:
      MissingExtraError: flashbax is not installed.
      ConfigError: the source asks for what flashbax has not.
    """

    source: Replay
    num_envs: int

    def __post_init__(self):
        source = self.source
        if source.n_step != 1 or source.sequence or source.max_times_sampled or source.frame_stack or source.over:
            raise ConfigError(
                "flashbax's flat buffers hold one-step transitions only: n_step must be 1, and sequence, "
                "max_times_sampled, frame_stack and over unset; use jaxrl.buffers.replay for them"
            )
        if not isinstance(source.sampler, Uniform | Prioritised):
            raise ConfigError(f"flashbax has no sampler {source.sampler!r}; use Uniform or Prioritised")
        if source.batch_size > source.capacity:
            raise ConfigError(f"flashbax wants batch_size={source.batch_size} <= capacity={source.capacity}")

    @property
    def _buffer(self) -> Any:
        try:
            import flashbax
        except ImportError as error:
            raise MissingExtraError("the flashbax adapter", "bench") from error
        settings = {
            "max_length": self.source.capacity,
            "min_length": max(self.source.min_size, 2 * self.num_envs),
            "sample_batch_size": self.source.batch_size,
            "add_sequences": True,
            "add_batch_size": self.num_envs,
        }
        if isinstance(self.source.sampler, Uniform):
            return flashbax.make_flat_buffer(**settings)
        return flashbax.make_prioritised_flat_buffer(
            **settings, priority_exponent=float(self.source.sampler.exponent), device=jax.default_backend()
        )

    def init(self, rows: Trajectory) -> PyTree:
        """An empty buffer for rows like these `[T, B, ...]`."""
        return self._buffer.init(jax.tree.map(lambda x: jnp.zeros(x.shape[2:], x.dtype), _kept(rows)))

    def add(self, state: PyTree, rows: Trajectory) -> PyTree:
        """Stores rows `[T, B, ...]`."""
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return self._buffer.add(state, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), _kept(rows)))

    def can_sample(self, state: PyTree) -> jax.Array:
        """Whether there are enough rows, bool."""
        return self._buffer.can_sample(state)

    def sample(self, state: PyTree, key: jax.Array) -> tuple[TransitionBatch, jax.Array]:
        """A batch, and the indices that `update_priorities` wants."""
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            drawn = self._buffer.sample(state, key)
        now, following = drawn.experience.first, drawn.experience.second
        batch = TransitionBatch(
            observation=now.observation,
            action=now.action,
            rewards=now.reward[:, None],
            steps=jnp.ones(now.reward.shape, jnp.int32),
            bootstrap=~now.terminated,
            next_observation=following.observation,
            weight=now.weight & ~following.first,
            action_mask=now.action_mask,
            next_action_mask=following.action_mask,
        )
        return batch, getattr(drawn, "indices", jnp.zeros(now.reward.shape, jnp.int32))

    def update_priorities(self, state: PyTree, indices: jax.Array, priorities: jax.Array) -> PyTree:
        """Gives the drawn transitions new priorities, of a prioritised buffer."""
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return self._buffer.set_priorities(state, indices, priorities)


def _kept(rows: Trajectory) -> Trajectory:
    return rows.replace(extras={})
