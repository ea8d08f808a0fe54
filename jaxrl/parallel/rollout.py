"""What every topology does alike while acting: the state of a run, turning moments into rows, and counting."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl import spaces
from jaxrl.types import (
    Algorithm,
    Counter,
    EnvSpec,
    Episodes,
    Metrics,
    PyTree,
    Replay,
    Rollout,
    RolloutBatch,
    TimeStep,
    Trajectory,
)


@struct.dataclass
class RunState:
    """Everything a run is; a checkpoint holds all of it."""

    learner: PyTree
    env_state: PyTree  # [B, ...]; () where environments are on the host
    timestep: TimeStep  # [B, ...] the moment to act at
    carry: PyTree  # [B, ...]
    buffers: dict[str, PyTree]
    key: jax.Array  # the run's root key, constant
    ticks: Counter  # rows of one environment so far
    empty_at: Counter  # the ticks at which the replays were empty: 0, unless they were lost on the way


def rollout_length(algo: Algorithm) -> int:
    """How many rows of every environment one iteration collects: the longest that any source asks for."""
    lengths = [1]  # where all comes from a dataset
    for source in algo.experience.values():
        if isinstance(source, Episodes):
            lengths.append(source.max_length)
        elif isinstance(source, Rollout):
            lengths.append(source.length)
        elif isinstance(source, Replay):
            lengths.append(source.rollout_length)
    return max(lengths)


def with_previous_action(timestep: TimeStep, action: PyTree) -> TimeStep:
    """The moment after `action` [B, ...], which it remembers unless it begins an episode."""

    def zero_where_first(x):
        mask = timestep.first.reshape(timestep.first.shape + (1,) * (x.ndim - timestep.first.ndim))
        return jnp.where(mask, jnp.zeros_like(x), x)

    return timestep.replace(previous_action=jax.tree.map(zero_where_first, action))


def bare(rows: Trajectory) -> Trajectory:
    """Rows without what only the algorithm that acted has use for."""
    return rows.replace(action_mask=None, extras={})


def row_bytes(spec: EnvSpec) -> int:
    """What a bare row takes in memory."""
    example = jax.eval_shape(lambda: (spaces.zeros(spec.observation_space), spaces.zeros(spec.action_space)))
    return 8 + sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(example))


def no_action(spec: EnvSpec, batch: int) -> PyTree:
    """Actions [batch, ...] of zeros."""
    return jax.tree.map(lambda x: jnp.zeros((batch, *x.shape), x.dtype), spaces.zeros(spec.action_space))


def first_timestep(timestep: TimeStep, spec: EnvSpec) -> TimeStep:
    """A run's first moment [B, ...], with a previous action of zeros."""
    return timestep.replace(previous_action=no_action(spec, timestep.first.shape[0]))


def assemble(
    timesteps: TimeStep,
    final: TimeStep,
    action: PyTree,
    extras: dict[str, PyTree],
    *,
    carry: PyTree,
    final_carry: PyTree,
    statistics: PyTree,
    whole_episodes: bool,
) -> RolloutBatch:
    """Rows from the moments they were taken at `[T, B]`, the actions taken there, and the moment after the last.

    With `whole_episodes` every environment began an episode at the first row, and what follows its end is masked.
    """

    def following(x, x_final):
        return jnp.concatenate([x[1:], x_final[None]])

    # A first moment where the one before was not the last: the environment broke in between, and was built again.
    broken = following(timesteps.first, final.first) & ~timesteps.last
    weight = ~timesteps.last & ~broken
    if whole_episodes:
        weight = jnp.cumsum(timesteps.last.astype(jnp.int32), axis=0) == 0
    rows = Trajectory(
        observation=timesteps.observation,
        action=action,
        reward=jnp.where(weight, following(timesteps.reward, final.reward), 0.0),
        terminated=weight & following(timesteps.terminated, final.terminated),
        truncated=weight & following(timesteps.truncated, final.truncated),
        first=timesteps.first,
        weight=weight,
        action_mask=timesteps.action_mask,
        extras=extras,
    )
    return RolloutBatch(
        rows=rows,
        timesteps=timesteps.replace(episode=None),
        final=final.replace(episode=None),
        carry=carry,
        final_carry=final_carry,
        statistics=statistics,
    )


@struct.dataclass
class EpisodeSums:
    """Sums over the episodes that ended, so that they can be added over ticks, devices and chunks."""

    count: jax.Array
    returns: jax.Array
    squares: jax.Array
    length: jax.Array
    steps: jax.Array  # real environment steps: rows that count
    lost: jax.Array  # rows that do not, though no episode ended: host environments broke there
    lives: "EpisodeSums | None" = None  # the same over lives, where a game has several

    @classmethod
    def zero(cls) -> "EpisodeSums":
        return cls(*(jnp.float32(0.0) for _ in range(6)))

    def __add__(self, other: "EpisodeSums") -> "EpisodeSums":
        return jax.tree.map(jnp.add, self, other)

    def metrics(self) -> Metrics:
        """Means over the episodes that ended; NaN where none did. Where they are lives: over games, and over lives."""
        lives = {} if self.lives is None else {f"life_{name}": x for name, x in self.lives.means().items()}
        lives |= {} if self.lives is None else {"lives": self.lives.count}
        return {"episodes": self.count, **self.means(), "environment_steps": self.steps, **lives}

    def means(self) -> Metrics:
        """Of returns and lengths."""
        with np.errstate(divide="ignore", invalid="ignore"):  # numpy arrays come here too, and warn of 0 / 0
            mean = self.returns / self.count
            variance = self.squares / self.count - mean**2
            length = self.length / self.count
        return {"return_mean": mean, "return_std": abs(variance) ** 0.5, "length_mean": length}


def episode_sums(rows: Trajectory, timesteps: TimeStep, final: TimeStep) -> EpisodeSums:
    """What ended within these rows."""

    def following(x, x_final):
        return jnp.concatenate([x[1:], x_final[None]]).astype(jnp.float32)

    steps, lost = (jnp.sum(x.astype(jnp.float32)) for x in (rows.weight, ~rows.weight & ~timesteps.last))

    def sums(episode, episode_then, ended, lives=None):
        returns = following(episode.returns, episode_then.returns) * ended
        return EpisodeSums(
            count=jnp.sum(ended),
            returns=jnp.sum(returns),
            squares=jnp.sum(jnp.square(returns)),
            length=jnp.sum(following(episode.length, episode_then.length) * ended),
            steps=steps,
            lost=lost,
            lives=lives,
        )

    episode, lives = timesteps.episode, None
    ended = (rows.terminated | rows.truncated).astype(jnp.float32)
    if episode.life is not None:
        lives = sums(episode.life, final.episode.life, ended)
    if episode.complete is not None:
        ended *= following(episode.complete, final.episode.complete)
    return sums(episode, final.episode, ended, lives)
