"""Where batches come from: what a run lived through itself, a dataset, or some of both.

A run's share says how much of every batch is the dataset's: 0 without one, 1 where there is no environment. A source
that a dataset alone can serve gets all of its batch from it, whatever the share.
"""

import dataclasses

from jaxrl.buffers import checks, fixed, replay
from jaxrl.sources import Dataset, Replay
from jaxrl.types import Algorithm, EnvSpec


@dataclasses.dataclass(frozen=True)
class Draw:
    """One draw of an update: a part of the batch of one source, or all of it."""

    name: str  # of the algorithm's source
    source: Replay  # with the part's batch size
    stored: Replay  # whose rows it is drawn from
    ring: str  # where those are


def own(algo: Algorithm, shards: int = 1, share: float = 0.0) -> dict[str, Replay]:
    """The sources that are served from what the run lives through, with their part of the batch."""
    replays = {name: source for name, source in algo.experience.items() if isinstance(source, Replay)}
    if share == 1.0:
        return {}
    return {name: _smaller(source, _given(source, shards, share)) for name, source in replays.items()}


def given(algo: Algorithm, shards: int, share: float) -> dict[str, Replay]:
    """The sources that are served from a dataset, with their part of the batch."""
    found = {}
    for name, source in algo.experience.items():
        if isinstance(source, Dataset):
            found[name] = fixed.source_of(source)
        elif isinstance(source, Replay) and share > 0.0:
            found[name] = dataclasses.replace(fixed.source_of(source), batch_size=_given(source, shards, share))
    return found


def of_dataset(name: str) -> str:
    """How a source's part of the dataset is called, beside its own."""
    return f"{name}_dataset"


def draws(algo: Algorithm, shards: int, share: float) -> dict[str, Draw]:
    """Every draw of an update, by the name of its index."""
    mine, theirs = own(algo, shards, share), given(algo, shards, share)
    found = {name: Draw(name, source, replay.storage(mine, name), source.over or name) for name, source in mine.items()}
    for name, source in theirs.items():
        ring = of_dataset(source.over or name)
        found[of_dataset(name)] = Draw(name, source, replay.storage(theirs, name), ring)
    return found


def problems(algo: Algorithm, num_envs: int, rollout: int, shards: int, share: float) -> list[str]:
    """Why these sources cannot be served with `num_envs` environments in `shards` groups; empty if they can."""
    kind = type(algo).__name__
    mine, theirs = own(algo, shards, share), given(algo, shards, share)
    found = checks.source_problems(mine, num_envs, rollout, shards)
    found += checks.source_problems(theirs, num_envs, 1, shards)
    found += [
        f"source {name!r}: of batch_size={source.batch_size} over {shards} shards demonstration_ratio={share} gives no "
        f"part to the {'dataset' if not _given(source, shards, share) else 'run'}; use batches of {2 * shards} at least"
        for name, source in algo.experience.items()
        if isinstance(source, Replay) and 0.0 < share < 1.0 and source.batch_size < 2 * shards
    ]
    return [f"{kind} {line}" for line in found]


def dataset_problems(algo: Algorithm, spec: EnvSpec, share: float, *, dataset: bool) -> list[str]:
    """Why `algo` cannot learn with or without a dataset; one line each."""
    kind, sources = type(algo).__name__, algo.experience.values()
    if not dataset:
        only = any(isinstance(source, Dataset) for source in sources)
        return [f"{kind} learns from a dataset; give train one, as dataset='rlds:DIR'"] if only else []
    found = []
    if not 0.0 <= share <= 1.0:
        found.append(f"demonstration_ratio={share} must be between 0 and 1")
    if not all(isinstance(source, Replay | Dataset) for source in sources):
        return [*found, f"{kind} learns from what it has just done, and not from a dataset; use one with a replay"]
    if 0.0 < share < 1.0 and not any(isinstance(source, Replay) for source in sources):
        found.append(f"{kind} learns from a dataset alone; give train no environment besides, but an eval_env")
    if spec.masked:
        found.append(f"{spec.name} has action masks, which datasets do not hold")
    for name, source in algo.experience.items():
        if isinstance(source, Replay) and share > 0.0:
            if source.extras:
                found.append(
                    f"{kind}'s source {name!r} stores {source.extras} of acting, which a dataset does not hold"
                )
    return found


def _given(source, shards, share):
    """How many items of a batch are the dataset's: the same number of every shard."""
    here = source.batch_size // shards
    least, most = (0, here) if share in (0.0, 1.0) else (1, here - 1)
    return min(max(round(here * share), least), most) * shards


def _smaller(source, less):
    return dataclasses.replace(source, batch_size=source.batch_size - less) if less else source
