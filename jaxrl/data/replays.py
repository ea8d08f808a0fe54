"""The episodes in a replay buffer, written as a dataset."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import checkpoint, spaces
from jaxrl.buffers.replay import ReplayState
from jaxrl.buffers.ring import Ring
from jaxrl.checkpoint import read_manifest
from jaxrl.data.episodes import Episode, EpisodeCutter
from jaxrl.data.export import configuration_hash
from jaxrl.data.rlds import RldsWriter
from jaxrl.errors import ConfigError
from jaxrl.loading import load_run
from jaxrl.parallel.rollout import RunState, rollout_length, row_bytes
from jaxrl.sources import FrameStack
from jaxrl.types import Counter, EnvSpec, Trajectory

_STRETCH_BYTES = 1 << 25  # of one environment's rows, looked at together


def export_replay(
    run: Any,
    path: str | os.PathLike,
    *,
    replay: str | None = None,
    unfinished: bool = False,
    step: int | None = None,
    best: bool = False,
) -> Path:
    """Writes the episodes that a replay buffer holds as an RLDS dataset, oldest first in every environment.

    Those whose first rows were overwritten are left out. Stacks of frames are made again. `path` appears when the
    dataset is complete, as with `export_rlds`; `policy_version` is the iteration in which the episode began.

    Args:
      run: a `Result`, or a run directory whose checkpoints hold the replay.
      path: the directory to make.
      replay: which of the algorithm's replays, if it has several.
      unfinished: also the episodes that are under way, "cut off".
      step: of which checkpoint of the directory; None: the newest.
      best: the checkpoint with the highest evaluation instead.

    Returns:
      The path.

    Raises:
      ConfigError: there is no such replay, or it holds no such episode; there is something at `path` already.
      RunDirectoryError, CheckpointError: as of `jaxrl.load`.
      MissingExtraError: `jaxrl[data]` is not installed.
    """
    if isinstance(run, str | os.PathLike):
        loaded = load_run(run, step=step, best=best)
        algo, env, spec, seed = loaded.algo, loaded.env, loaded.policy.spec, loaded.config.get("seed")
        state = _saved(Path(run) / "checkpoints", loaded.step, spec)
    elif step is not None or best:
        raise ConfigError("step and best are of a run directory's checkpoints; a result has one state")
    else:
        algo, env, spec, state, seed = run.algo, run.env, run.spec, run.state, run.seed
    rings = {name: held.ring for name, held in state.buffers.items() if held.ring is not None}
    name, ring = _chosen(rings, replay, type(algo).__name__)
    if not all(x.is_fully_addressable for x in jax.tree.leaves(ring) if isinstance(x, jax.Array)):
        raise ConfigError("the replay is spread over several processes; export it from the run directory, in one")
    common = {
        "algorithm": type(algo).__name__,
        "environment": env.name,
        "seed": -1 if seed is None else seed,
        "configuration_hash": configuration_hash(algo, env),
    }
    stack, empty_at, length = algo.experience[name].frame_stack, int(state.empty_at), rollout_length(algo)
    with RldsWriter(path, env.name) as writer:
        for env_index in range(ring.columns):
            cutter = EpisodeCutter(1)
            for rows, ticks in _stretches(ring, env_index, _STRETCH_BYTES // row_bytes(spec)):
                for _, episode in cutter.add(rows, (empty_at + ticks) // length):
                    writer.write(_with_stacks(episode, stack), common | {"env_index": env_index})
            for _, episode in cutter.finish() if unfinished else ():
                writer.write(_with_stacks(episode, stack), common | {"env_index": env_index})
        if not writer.episodes:
            raise ConfigError(f"no episode is whole in the {int(ring.filled) * ring.columns:,} rows of replay {name!r}")
        return writer.close()


def _chosen(rings: Mapping[str, Ring], name: str | None, kind: str) -> tuple[str, Ring]:
    if not rings:
        raise ConfigError(
            f"there is no replay: {kind} keeps none, or its checkpoints were saved without (save_replay=False)"
        )
    if name is None and len(rings) == 1:
        name = next(iter(rings))
    if name not in rings:
        raise ConfigError(f"replay={name!r}: {kind} has the replays {', '.join(sorted(rings))}; give one of them")
    return name, rings[name]


def _stretches(ring: Ring, env_index: int, length: int) -> Iterator[tuple[Trajectory, np.ndarray]]:
    """Rows `[T, 1, ...]` of an environment in the order they were lived, and their ticks `[T]`."""
    filled, slots = int(ring.filled), ring.slots
    begin, tick = int(ring.cursor) - filled, int(ring.written) - filled
    column = jax.tree.map(lambda x: np.asarray(x[env_index]), ring.rows.replace(action_mask=None, extras={}))
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


def _saved(directory: Path, step: int, spec: EnvSpec) -> RunState:
    """The replays of a checkpoint, in host memory, and nothing else of it but when they were empty."""
    leaves = {leaf.name: leaf for leaf in read_manifest(directory, step).leaves}
    found = [re.fullmatch(r"buffers/([^/]+)/ring/filled", name) for name in leaves]
    number = np.int32(0)
    rows = Trajectory(
        observation=spaces.zeros(spec.observation_space),
        action=spaces.zeros(spec.action_space),
        **dict.fromkeys(("reward", "terminated", "truncated", "first", "weight"), number),
    )
    ring = Ring(rows, carry=(), step=None, cursor=number, filled=number, written=number)
    buffers = {match.group(1): ReplayState(ring, None) for match in found if match}
    nothing = dict.fromkeys(("learner", "env_state", "timestep", "carry", "key", "ticks"))
    template = RunState(**nothing, buffers=buffers, empty_at=Counter(number, number))

    def shaped(path, _):
        leaf = leaves[jax.tree_util.keystr(path, simple=True, separator="/")]
        return np.broadcast_to(np.zeros((), jnp.dtype(leaf.dtype)), leaf.shape)  # as large as that, and no memory

    return checkpoint.restore(directory, jax.tree_util.tree_map_with_path(shaped, template), step, partial=True)[0]
