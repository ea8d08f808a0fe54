"""A policy's episodes as datasets that other programs read."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jaxrl import envs
from jaxrl.config import encode
from jaxrl.data import recording
from jaxrl.data.episodes import Episode, EpisodeCutter
from jaxrl.data.minari import MinariWriter
from jaxrl.data.rlds import RldsWriter, check_hosts, host_directory
from jaxrl.errors import ConfigError
from jaxrl.policy import Policy, check_spaces
from jaxrl.progress import ProgressBar
from jaxrl.types import Environment, HostRecipe

_NUM_ENVS = 128


class Writer(Protocol):
    """Writes episodes to a dataset that is there complete or not at all; used in a `with`."""

    def __enter__(self) -> "Writer": ...
    def __exit__(self, *_: object) -> None: ...
    def write(self, episode: Episode, metadata: dict[str, Any] | None = None) -> None: ...
    def close(self) -> Path: ...


def export_rlds(
    policy: Policy,
    env: Environment | HostRecipe | str,
    path: str | os.PathLike,
    *,
    episodes: int,
    seed: int = 0,
    explore: bool = False,
    num_envs: int | None = None,
    max_steps: int = 27_000,
    policy_version: int = 0,
    file_format: str = "array_record",
    progress: bool = True,
) -> Path:
    """Plays episodes with a policy and writes them as an RLDS dataset in TFDS's layout.

    Every environment plays its share of the episodes, the same number but for one, so that short ones are not
    favoured; with the same seed and environments they are those that `evaluate` plays. `path` appears when the
    dataset is complete and was read again; until then it is written to a hidden directory beside it. Memory is that of
    the unfinished episodes.

    Of several processes (`jaxrl.parallel.distributed`) each plays a part of the environments and writes it to a
    directory of its own in `path`, `host-00000-of-00002`, without waiting for the others; `load_dataset` reads them
    together, on whichever disk they are brought together.

    Args:
      policy: of a `Result`, or from `jaxrl.load`.
      env: where to play; what `jaxrl.make` gives, or its name. Its spaces are those that the policy was trained on.
      path: the directory to make; `.../cartpole/1.0.0` is what `tfds.load("cartpole", data_dir=...)` looks for.
      episodes: how many.
      seed: of episodes and of action sampling.
      explore: sample actions as in training instead of taking the best.
      num_envs: environments side by side, of all processes; None: as many as episodes, at most 128 a process.
      max_steps: an episode that is longer is cut off there.
      policy_version: written with every episode; the command line gives the rows that the policy had learnt from.
      file_format: "array_record", or "tfrecord" for programs that read nothing else.
      progress: show a progress bar.

    Returns:
      The path.

    Raises:
      ConfigError: there is something at `path` already, the environment is another than the policy's, or it shows
        arrays that would not come back bit for bit (says which).
      MissingExtraError: `jaxrl[data]` is not installed.
    """

    def open_writer(env):
        where, processes = Path(path), jax.process_count()
        if processes > 1:
            check_hosts(where, processes)
            where /= host_directory(jax.process_index(), processes)
        return RldsWriter(where, env.name, file_format=file_format)

    asked = _Asked(episodes, seed, explore, num_envs, max_steps, policy_version, progress)
    return _export(open_writer, policy, env, asked)


def export_minari(
    policy: Policy,
    env: Environment | HostRecipe | str,
    dataset_id: str,
    *,
    episodes: int,
    seed: int = 0,
    explore: bool = False,
    num_envs: int | None = None,
    max_steps: int = 27_000,
    policy_version: int = 0,
    data_format: str = "hdf5",
    data_dir: str | os.PathLike | None = None,
    env_spec: str | None = None,
    progress: bool = True,
) -> Path:
    """Plays episodes with a policy and writes them as a Minari dataset: those that `export_rlds` writes.

    Images are stored without loss. The dataset appears under its id when it is complete and was read again. Memory is
    that of the unfinished episodes and of a few megabytes more.

    Args:
      policy: of a `Result`, or from `jaxrl.load`.
      env: where to play; what `jaxrl.make` gives, or its name. Its spaces are those that the policy was trained on.
      dataset_id: `NAME-v0`, or `NAMESPACE/NAME-v0`.
      episodes: how many.
      seed: of episodes and of action sampling.
      explore: sample actions as in training instead of taking the best.
      num_envs: environments side by side; None: as many as episodes, at most 128.
      max_steps: an episode that is longer is cut off there.
      policy_version: written with every episode; the command line gives the rows that the policy had learnt from.
      data_format: "hdf5", one file, which all that read Minari know; "arrow" or "parquet", a directory an episode.
      data_dir: where datasets lie; None: where Minari looks for them, `MINARI_DATASETS_PATH` or `~/.minari/datasets`.
      env_spec: the id of the Gymnasium environment that `recover_environment` is to make, which d3rlpy asks for.
      progress: show a progress bar.

    Returns:
      The directory of the dataset.

    Raises:
      ConfigError: as `export_rlds`; or there are several processes, which Minari knows no datasets of.
      MissingExtraError: `jaxrl[data]` is not installed.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            f"{jax.process_count()} processes: a Minari dataset is of one; use export_rlds, or one process"
        )

    def open_writer(env):
        return MinariWriter(
            dataset_id,
            env.observation_space,
            env.action_space,
            data_format=data_format,
            data_dir=data_dir,
            env_spec=env_spec,
            algorithm=type(policy.algo).__name__,
        )

    asked = _Asked(episodes, seed, explore, num_envs, max_steps, policy_version, progress)
    return _export(open_writer, policy, env, asked)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What both exports ask for."""

    episodes: int
    seed: int
    explore: bool
    num_envs: int | None
    max_steps: int
    policy_version: int
    progress: bool

    def check(self, processes: int) -> None:
        problems = [
            f"{name}={value} must be at least 1"
            for name in ("episodes", "num_envs", "max_steps")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if not problems and min(self.episodes, self.num_envs or self.episodes) < processes:
            problems.append(
                f"episodes={self.episodes}, num_envs={self.num_envs}: each of {processes} processes needs at least one"
            )
        if problems:
            raise ConfigError(problems)


def _export(open_writer: Callable[[Environment | HostRecipe], Writer], policy, env, asked):
    """Plays, and hands every episode to the writer."""
    env = envs.prepared(envs.make(env) if isinstance(env, str) else env)
    process, processes = jax.process_index(), jax.process_count()
    asked.check(processes)
    check_spaces(policy.spec, env)
    num_envs = min(asked.episodes, processes * _NUM_ENVS if asked.num_envs is None else asked.num_envs)
    here = np.array_split(np.arange(num_envs), processes)[process]
    left = asked.episodes // num_envs + (here < asked.episodes % num_envs)
    mine, limit = int(left.sum()), int(left.max()) * (asked.max_steps + 1)
    common = {
        "algorithm": type(policy.algo).__name__,
        "environment": env.name,
        "seed": asked.seed,
        "policy_version": asked.policy_version,
        "configuration_hash": configuration_hash(policy.algo, env),
    }
    cutter, rows, written = EpisodeCutter(len(here), asked.max_steps), 0, 0
    with open_writer(env) as writer, contextlib.ExitStack() as stack:
        bar = stack.enter_context(ProgressBar(unit="episodes")) if asked.progress else None
        if bar is not None:
            bar.start(mine)
        stream = recording.play(policy, env, env_index=here, all_envs=num_envs, seed=asked.seed, explore=asked.explore)
        stack.callback(stream.close)

        def write(found):
            nonlocal written
            for index, episode in found:
                if left[index]:
                    left[index] -= 1
                    writer.write(episode, common | {"env_index": int(here[index])})
                    written += 1

        for stretch in stream:
            write(cutter.add(stretch))
            rows += len(stretch.first)
            if bar is not None:
                bar.update(written)
            if not left.any():
                break
            if rows >= limit:
                write(cutter.finish())
                break
        if left.any():
            warnings.warn(
                f"{env.name} gave {written} of {mine} episodes in {rows:,} steps of each environment; "
                "with a larger max_steps there may be more",
                stacklevel=3,
            )
        return writer.close()


def configuration_hash(algo: Any, env: Any) -> str:
    """16 hexadecimal digits of the algorithm's and the environment's settings."""
    text = json.dumps(encode({"algorithm": algo, "environment": env}), sort_keys=True)
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", text).encode()).hexdigest()[:16]
