"""A policy's episodes as datasets that other programs read."""

import contextlib
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxrl import envs
from jaxrl.config import encode
from jaxrl.data import recording
from jaxrl.data.episodes import Episode, EpisodeCutter
from jaxrl.data.rlds import RldsWriter
from jaxrl.errors import ConfigError
from jaxrl.policy import Policy, check_spaces
from jaxrl.progress import ProgressBar
from jaxrl.types import Environment, HostRecipe

_NUM_ENVS = 128


class Writer(Protocol):
    """Writes episodes to a dataset that is there complete or not at all; used in a `with`."""

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

    Args:
      policy: of a `Result`, or from `jaxrl.load`.
      env: where to play; what `jaxrl.make` gives, or its name. Its spaces are those that the policy was trained on.
      path: the directory to make; `.../cartpole/1.0.0` is what `tfds.load("cartpole", data_dir=...)` looks for.
      episodes: how many.
      seed: of episodes and of action sampling.
      explore: sample actions as in training instead of taking the best.
      num_envs: environments side by side; None: as many as episodes, at most 128.
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
    options = {"seed": seed, "explore": explore, "num_envs": num_envs, "max_steps": max_steps}
    options |= {"policy_version": policy_version, "progress": progress}

    def open_writer(env):
        return RldsWriter(path, env.name, file_format=file_format)

    return _export(open_writer, policy, env, episodes=episodes, **options)


def _export(
    open_writer: Callable[[Environment | HostRecipe], Any],
    policy,
    env,
    *,
    episodes,
    seed,
    explore,
    num_envs,
    max_steps,
    policy_version,
    progress,
):
    """Plays, and hands every episode to the writer."""
    env = envs.prepared(envs.make(env) if isinstance(env, str) else env)
    problems = [
        f"{name}={value} must be at least 1"
        for name, value in (("episodes", episodes), ("num_envs", num_envs), ("max_steps", max_steps))
        if value is not None and value < 1
    ]
    if problems:
        raise ConfigError(problems)
    check_spaces(policy.spec, env)
    num_envs = min(episodes, _NUM_ENVS if num_envs is None else num_envs)
    left = np.full(num_envs, episodes // num_envs) + (np.arange(num_envs) < episodes % num_envs)
    limit = int(left.max()) * (max_steps + 1)
    common = {
        "algorithm": type(policy.algo).__name__,
        "environment": env.name,
        "seed": seed,
        "policy_version": policy_version,
        "configuration_hash": configuration_hash(policy.algo, env),
    }
    cutter, rows, written = EpisodeCutter(num_envs, max_steps), 0, 0
    with open_writer(env) as writer, contextlib.ExitStack() as stack:
        bar = stack.enter_context(ProgressBar(unit="episodes")) if progress else None
        if bar is not None:
            bar.start(episodes)
        stream = recording.play(policy, env, num_envs=num_envs, seed=seed, explore=explore)
        stack.callback(stream.close)

        def write(found):
            nonlocal written
            for index, episode in found:
                if left[index]:
                    left[index] -= 1
                    writer.write(episode, common | {"env_index": index})
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
                f"{env.name} gave {written} of {episodes} episodes in {rows:,} steps of each environment; "
                "with a larger max_steps there may be more",
                stacklevel=3,
            )
        return writer.close()


def configuration_hash(algo: Any, env: Any) -> str:
    """16 hexadecimal digits of the algorithm's and the environment's settings."""
    text = json.dumps(encode({"algorithm": algo, "environment": env}), sort_keys=True)
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", text).encode()).hexdigest()[:16]
