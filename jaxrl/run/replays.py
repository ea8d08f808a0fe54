"""The episodes in a replay buffer, written as a dataset."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.buffers.replay import ReplayState
from jaxrl.buffers.ring import Ring, is_on_host
from jaxrl.core import files, spaces
from jaxrl.core.arguments import checked
from jaxrl.core.errors import CheckpointError, ConfigError
from jaxrl.core.interrupts import interruptible
from jaxrl.core.sources import FrameStack, Replay
from jaxrl.core.types import Counter, EnvSpec, Trajectory
from jaxrl.data.episodes import Episode
from jaxrl.data.rlds import RldsWriter
from jaxrl.data.rows import EpisodeCutter
from jaxrl.parallel.rollout import rollout_length, row_bytes
from jaxrl.run import checkpoint
from jaxrl.run.checkpoint import read_manifest
from jaxrl.run.export import configuration_hash
from jaxrl.run.loading import load_run

_STRETCH_BYTES = 1 << 25  # of one environment's rows, looked at together


@interruptible
@checked(step={"low": 0})
def export_replay(
    run: Any,
    path: str | os.PathLike,
    *,
    replay: str | None = None,
    unfinished: bool = False,
    step: int | None = None,
    best: bool = False,
) -> Path:
    """Writes the episodes in a replay buffer as an RLDS dataset, oldest first in every environment.

    Episodes whose first transitions were overwritten are left out. Frame stacks are rebuilt. `path` appears when the
    dataset is complete, as with `export_rlds`; `policy_version` is the iteration in which the episode started.

    Args:
      run: a `Result`, or a run directory whose checkpoints hold the replay buffer.
      path: the directory to create.
      replay: which of the algorithm's replay buffers, if it has several.
      unfinished: also write unfinished episodes, as "cut off".
      step: the checkpoint to read; None: the newest.
      best: read the checkpoint with the highest evaluation instead.

    Returns:
      The path.

    Raises:
      ConfigError: there is no such replay buffer, it holds no such episode, or `path` exists.
      RunDirectoryError, CheckpointError: as in `jaxrl.load`.
      MissingExtraError: `jaxrl[data]` is not installed.
    """
    if isinstance(run, str | os.PathLike):
        loaded = load_run(run, step=step, best=best)
        algo, env, spec, seed = loaded.algo, loaded.env, loaded.policy.spec, loaded.config.get("seed")
        buffers, empty_at = _saved(files.expand(run) / "checkpoints", loaded.step, spec)
    elif step is not None or best:
        raise ConfigError("step and best select a checkpoint of a run directory; a result has one state")
    else:
        algo, env, spec, seed = run.algo, run.env, run.spec, run.seed
        buffers, empty_at = run.state.buffers, run.state.empty_at
    rings = {name: held.ring for name, held in buffers.items() if isinstance(held.ring, Ring)}
    name, ring = _chosen(rings, replay, type(algo).__name__)
    if not all(x.is_fully_addressable for x in jax.tree.leaves(ring) if isinstance(x, jax.Array)):
        raise ConfigError("the replay is divided over processes; export it from the run directory, in one process")
    common = {
        "algorithm": type(algo).__name__,
        "environment": env.name,
        "seed": -1 if seed is None else seed,
        "configuration_hash": configuration_hash(algo, env),
    }
    source, empty, length = algo.experience[name], int(empty_at), rollout_length(algo)
    stack = source.frame_stack if isinstance(source, Replay) else None
    with RldsWriter(path, env.name) as writer:
        for env_index in range(ring.columns):
            cutter = EpisodeCutter(1)
            for rows, steps_per_env in _stretches(ring, env_index, _STRETCH_BYTES // row_bytes(spec)):
                for _, episode in cutter.add(rows, (empty + steps_per_env) // length):
                    writer.write(_with_stacks(episode, stack), common | {"env_index": env_index})
            for _, episode in cutter.finish() if unfinished else ():
                writer.write(_with_stacks(episode, stack), common | {"env_index": env_index})
        if not writer.episodes:
            raise ConfigError(
                f"no complete episode in the {int(ring.filled) * ring.columns:,} time steps of replay {name!r}"
            )
        return writer.close()


def _chosen(rings: Mapping[str, Ring], name: str | None, kind: str) -> tuple[str, Ring]:
    if not rings:
        raise ConfigError(
            f"there is no replay of rows: {kind} keeps none, or keeps it in a table or in flashbax, or its checkpoints "
            "were saved without (save_replay=False)"
        )
    if name is None and len(rings) == 1:
        name = next(iter(rings))
    if name is None or name not in rings:
        raise ConfigError(f"replay={name!r}: {kind} has the replay buffers {', '.join(sorted(rings))}; use one of them")
    return name, rings[name]


def _stretches(ring: Ring, env_index: int, length: int) -> Iterator[tuple[Trajectory, np.ndarray]]:
    """Rows `[T, 1, ...]` of an environment oldest first, and their ticks `[T]`."""
    filled, slots = int(ring.filled), ring.slots
    begin, tick = int(ring.cursor) - filled, int(ring.written) - filled
    rows = jax.tree.map(lambda x: np.asarray(x) if is_on_host(x) else x, ring.rows.replace(action_mask=None, extras={}))
    column = jax.tree.map(lambda x: np.asarray(x[env_index]), rows)
    for start in range(0, filled, max(length, 1)):
        number = np.arange(start, min(start + length, filled))
        yield jax.tree.map(lambda x: x[(begin + number) % slots][:, None], column), tick + number  # noqa: B023


def _with_stacks(episode: Episode, stack: FrameStack | None) -> Episode:
    """The episode with its stacks of frames, of which the newest alone are stored."""
    if stack is None:
        return episode

    def one(frames):
        pieces = []
        for back in reversed(range(stack.frames)):
            at = np.arange(len(frames)) - back
            piece = frames[np.maximum(at, 0)]
            if stack.fill == "zeros":
                piece[at < 0] = 0
            pieces.append(piece)
        return np.concatenate(pieces, axis=frames.ndim + stack.axis if stack.axis < 0 else 1 + stack.axis)

    return Episode(**{**vars(episode), "observation": jax.tree.map(one, episode.observation)})


def _saved(directory: Path, step: int, spec: EnvSpec) -> tuple[dict[str, ReplayState], Counter]:
    """The replays of a checkpoint, in host memory, and when they were empty."""
    leaves = {leaf.name: leaf for leaf in read_manifest(directory, step).leaves}
    found = [re.fullmatch(r"buffers/([^/]+)/ring/filled", name) for name in leaves]
    number = jnp.int32(0)
    observation, action = spaces.zeros(spec.observation_space), spaces.zeros(spec.action_space)
    rows = Trajectory(observation, action, number, number, number, number, number)
    ring = Ring(rows, carry=(), episode_step=None, cursor=number, filled=number, written=number)
    buffers = {match.group(1): ReplayState(ring, None) for match in found if match}
    template = {"buffers": buffers, "empty_at": Counter(number, number)}  # as in `RunState`

    def shaped(path, _):
        leaf = leaves[jax.tree_util.keystr(path, simple=True, separator="/")]
        dtype = jnp.dtype(leaf.dtype)
        if dtype.itemsize > 8:
            raise ValueError(f"it has numbers of type {leaf.dtype!r:.80}")
        return np.broadcast_to(np.zeros((), dtype), leaf.shape)  # as large as that, and no memory

    try:
        template = jax.tree_util.tree_map_with_path(shaped, template)
    except (KeyError, TypeError, ValueError) as error:  # of a manifest that jaxrl did not write
        raise CheckpointError(f"checkpoint {step} in {directory} holds no replay as jaxrl saves it: {error}") from error
    saved, _, _ = checkpoint.restore(directory, template, step, partial=True)
    return saved["buffers"], saved["empty_at"]
