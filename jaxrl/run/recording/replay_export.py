"""Export of the episodes in a replay buffer as a dataset."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.buffers import flashbax, frames
from jaxrl.buffers.index import Index
from jaxrl.buffers.replay import ReplayState
from jaxrl.buffers.ring import Ring, is_on_host
from jaxrl.core import files, spaces
from jaxrl.core.arguments import checked
from jaxrl.core.errors import CheckpointError, ConfigError
from jaxrl.core.interrupts import interruptible
from jaxrl.core.sources import FrameStack, Replay
from jaxrl.core.trees import named_leaves
from jaxrl.core.types import Counter, EnvSpec, PyTree, Trajectory
from jaxrl.data.rlds import RldsWriter
from jaxrl.data.rows import episode_from_rows
from jaxrl.parallel.rollout import rollout_length
from jaxrl.run.directory import checkpoint
from jaxrl.run.directory.checkpoint import read_manifest
from jaxrl.run.directory.loading import load_run
from jaxrl.run.recording.dataset_export import provenance

# Pairs of the step of the first row and consecutive rows of one episode, of shape [T + 1, ...]; the oldest first.
Stretches = Iterator[tuple[int, Trajectory[np.ndarray]]]


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
    """Write the episodes in a replay buffer as an RLDS dataset, oldest first for every environment.

    Episodes whose first transitions were overwritten are left out. For a view of a ring's rows, every item is written:
    consecutive items of an episode are joined into one written episode, which is "cut off" at its last step unless the
    original episode ends there.

    Frame stacks are rebuilt. As for `export_rlds`, `path` is created when the dataset is complete. `policy_version` is
    the iteration of the episode's first step, or -1 for runs with `learner_batch`.

    Args:
      run: a `Result`, or a run directory whose checkpoints contain the replay buffer.
      path: the directory to create.
      replay: name of a replay buffer of the algorithm, or of a view; None: the only replay buffer.
      unfinished: also write unfinished episodes, as "cut off"; the items of a view are always written.
      step: the checkpoint to read; None: the newest.
      best: read the checkpoint with the highest evaluation return instead.

    Returns:
      The path.

    Raises:
      ConfigError: there is no such replay buffer, it has no complete episode or item, or `path` exists.
      RunDirectoryError, CheckpointError: as for `jaxrl.load`.
      MissingExtraError: `jaxrl[data]` is not installed.
    """
    if isinstance(run, str | os.PathLike):
        loaded = load_run(run, step=step, best=best)
        algo, env, seed = loaded.algo, loaded.env, loaded.config.get("seed")
        saved = files.expand(run) / "checkpoints"
        buffers, empty_at = _saved(saved, loaded.step, algo.experience, loaded.policy.spec)
    elif step is not None or best:
        raise ConfigError("step and best need a run directory, because a result has only one state; leave them out")
    else:
        algo, env, seed = run.algo, run.env, run.seed
        buffers, empty_at = run.state.buffers, run.state.empty_at
    sources = {name: x for name, x in algo.experience.items() if isinstance(x, Replay) and name in buffers}
    name = _chosen(sources, replay, type(algo).__name__)
    stored = buffers[sources[name].over or name]
    if not all(x.is_fully_addressable for x in jax.tree.leaves(stored.ring) if isinstance(x, jax.Array)):
        raise ConfigError("the replay buffer is on several processes; export it from the run directory, in one process")
    common = provenance(algo, env, -1 if seed is None else seed)
    empty, length = int(empty_at), rollout_length(algo)
    grouped = np.ndim(getattr(stored.ring, "cursor", 0)) > 0  # groups count their own rollouts, not iterations
    with RldsWriter(path, env.name) as writer:
        for env_index, stretches in enumerate(_stretches(sources, buffers, name, unfinished)):
            for steps_per_env, rows in stretches:
                version = -1 if grouped else (empty + steps_per_env) // length
                episode = episode_from_rows(rows, {"policy_version": version})
                writer.write(episode, common | {"env_index": env_index})
        if not writer.episodes:
            raise ConfigError(f"replay={name!r} has no complete episode or item; train longer")
        return writer.close()


def _chosen(sources: Mapping[str, Replay], name: str | None, kind: str) -> str:
    if not sources:
        raise ConfigError(
            f"there is no replay buffer: {kind} has none, or its checkpoints were saved with save_replay=False"
        )
    stores = [name for name, source in sources.items() if source.over is None]
    if name is None and len(stores) == 1:
        return stores[0]
    if name is None or name not in sources:
        known = ", ".join(sorted(sources))
        raise ConfigError(f"replay={name!r} must be one of the replay buffers of {kind}: {known}")
    return name


# --- rows of each environment ---------------------------------------------------------------------------------------


def _stretches(
    sources: Mapping[str, Replay], buffers: Mapping[str, ReplayState], name: str, unfinished: bool
) -> Iterator[Stretches]:
    source, held = sources[name], buffers[name]
    owner = source.over or name
    ring = flashbax.as_ring(held) if source.storage == "flashbax" else buffers[owner].ring
    starts = None
    if source.over is not None:
        starts = np.asarray(ring.rows.weight)  # an item begins at every row with a weight
        if held.index.priority is not None:
            begun = np.asarray(held.index.priority) >= 0.0
            starts = begun.reshape(len(begun), ring.slots, -1).swapaxes(1, 2).reshape(starts.shape)
    for env in range(ring.columns):
        of_items = None if starts is None else starts[env]
        yield _of_ring(ring, env, source, sources[owner].frame_stack, of_items, unfinished)


def _of_ring(
    ring: Ring, env: int, source: Replay, stack: FrameStack | None, starts: np.ndarray | None, unfinished: bool
) -> Stretches:
    """Yield whole episodes or, if `starts` (bool [slots]) is given, the rows of items that begin where it is true."""
    ring = ring.at(env)
    filled, reach = int(ring.filled), source.lookahead
    number = np.arange(filled)
    slot = (int(ring.cursor) - filled + number) % ring.slots
    rows = ring.rows.replace(action_mask=None, extras={})
    column = jax.tree.map(lambda x: np.asarray((np.asarray(x) if is_on_host(x) else x)[env]), rows)
    first, weight = column.first[slot], column.weight[slot]
    began = np.maximum.accumulate(np.where(first, number, 0))  # for each row, the first row of its episode
    known = weight[:-1] & ~first[1:]  # whether the next row of the episode is stored
    if starts is not None:
        begins = starts[slot]
        begins[: frames.lookback(stack) if filled == ring.slots else 0] = False  # incomplete frame stacks
        last = np.maximum.accumulate(np.where(begins, number, -filled - reach))
        crosses = source.sequence is not None and source.sequence.end == "continue"
        known &= ((number - last < reach) & (crosses | (last >= began)))[:-1]
    known = np.flatnonzero(known)
    for run in _runs(known):
        rows = np.append(known[run], known[run[-1]] + 1)
        ended = rows[-1] + 1 < filled or not weight[rows[-1]]
        if starts is not None or (first[rows[0]] and (unfinished or ended)):
            stretch = _at(column.replace(observation=()), slot[rows])
            observation = _stacked(column.observation, slot, rows, began, stack)
            yield int(ring.written) - filled + int(rows[0]), stretch.replace(observation=observation)


def _runs(step: np.ndarray) -> list[np.ndarray]:
    """Split ascending steps, of shape [n], into runs of consecutive steps; return the indices of each run."""
    places = np.split(np.arange(len(step)), np.flatnonzero(np.diff(step) != 1) + 1)
    return [run for run in places if len(run)]


def _at(tree: PyTree, place: Any) -> PyTree:
    return jax.tree.map(lambda x: x[place], tree)


def _stacked(stored: PyTree, slot: np.ndarray, rows: np.ndarray, began: np.ndarray, stack: FrameStack | None) -> PyTree:
    """Return the observations of rows, stacked with earlier frames of their episodes."""
    if stack is None:
        return _at(stored, slot[rows])

    def one(leaf):
        pieces = []
        for back in reversed(range(stack.frames)):
            piece = leaf[slot[np.maximum(rows - back, began[rows])]]
            if stack.fill == "zeros":
                piece[rows - back < began[rows]] = 0
            pieces.append(piece)
        return np.concatenate(pieces, axis=leaf.ndim + stack.axis if stack.axis < 0 else 1 + stack.axis)

    return jax.tree.map(one, stored)


# --- reading of a checkpoint ----------------------------------------------------------------------------------------


def _template(source: Replay, spec: EnvSpec, discounted: bool) -> ReplayState:
    """Return a template of a source's replay state, with numbers instead of arrays.

    Args:
      source: the source of the algorithm.
      spec: spec of the environment.
      discounted: whether the stored rows have discounts.
    """
    number: PyTree = jnp.int32(0)
    unread: PyTree = None
    observation, action = spaces.zeros(spec.observation_space), spaces.zeros(spec.action_space)
    rows = Trajectory(observation, action, *[number] * 5, discount=number if discounted else None)
    if source.storage == "flashbax":
        return flashbax.template(rows, number)
    if source.over is not None:
        return ReplayState(unread, Index(number, *[unread] * 12))
    return ReplayState(Ring(rows, (), None, number, number, number), unread)


def _saved(
    directory: Path, step: int, sources: Mapping[str, Any], spec: EnvSpec
) -> tuple[dict[str, ReplayState], Counter]:
    """Read the replay buffers of a checkpoint into host memory, and the tick at which they were empty."""
    leaves = {leaf.name: leaf for leaf in read_manifest(directory, step).leaves}
    found = {match[1] for name in leaves if (match := re.match(r"buffers/([^/]+)/", name))} & sources.keys()
    number = jnp.int32(0)

    def discounted(name):
        return any(re.fullmatch(f"buffers/{name}/ring/(rows|experience)/discount", leaf) for leaf in leaves)

    replays = {name: sources[name] for name in found if isinstance(sources[name], Replay)}
    buffers = {name: _template(source, spec, discounted(name)) for name, source in replays.items()}
    template = {"buffers": buffers, "empty_at": Counter(number, number)}  # as in `RunState`

    def shaped(name):
        if name not in leaves and re.fullmatch(r"buffers/[^/]+/index/priority", name):
            return None  # the items of this view have equal priorities
        leaf = leaves[name]
        dtype = jnp.dtype(leaf.dtype)
        if dtype.itemsize > 8:
            raise ValueError(f"an array has numbers of type {leaf.dtype!r:.80}")
        return np.broadcast_to(np.zeros((), dtype), leaf.shape)  # takes no memory for the shape

    try:
        template = jax.tree.unflatten(jax.tree.structure(template), map(shaped, named_leaves(template)))
    except (KeyError, TypeError, ValueError) as error:  # the manifest was not written by jaxrl
        raise CheckpointError(f"checkpoint {step} in {directory} has an invalid replay buffer: {error}") from error
    saved, _, _ = checkpoint.restore(directory, template, step, partial=True)
    return saved["buffers"], saved["empty_at"]
