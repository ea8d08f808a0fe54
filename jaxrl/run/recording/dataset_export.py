"""Export of a policy's episodes as datasets for other programs."""

import contextlib
import hashlib
import itertools
import json
import os
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl import envs
from jaxrl.core import files
from jaxrl.core.arguments import checked
from jaxrl.core.config import encode
from jaxrl.core.errors import ConfigError
from jaxrl.core.host_types import only_instance
from jaxrl.core.interrupts import interruptible
from jaxrl.core.limits import checked_seed
from jaxrl.core.matching import check_spaces
from jaxrl.core.types import Algorithm, Environment, HostRecipe, num_agents
from jaxrl.data.minari import MinariWriter
from jaxrl.data.rlds import RldsWriter, check_hosts, host_directory
from jaxrl.data.rows import EpisodeCutter
from jaxrl.envs.configs import to_config
from jaxrl.envs.env_registry import EnvironmentLike
from jaxrl.run.loop.progress import ProgressBar
from jaxrl.run.policies.policy import Policy
from jaxrl.run.recording import policy_rows

_NUM_ENVS = 128
_COUNTS = {"episodes": {"low": 1}, "num_envs": {"low": 1, "high": 1 << 20}, "max_steps": {"low": 1}}


@interruptible
@checked(**_COUNTS)
def export_rlds(
    policy: Policy,
    env: EnvironmentLike,
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
    """Write episodes of a policy as an RLDS dataset in TFDS's layout.

    All environments play the same number of episodes, plus or minus one, so that short episodes are not favored. With
    the same seed and number of environments, the episodes are those of `evaluate`. The dataset is written to a hidden
    directory next to `path`, verified, and renamed. Only unfinished episodes are kept in memory.

    With several processes (`jaxrl.parallel.multihost.distributed`), each plays a part of the environments and writes to
    its own directory in `path`, such as `host-00000-of-00002`, without waiting for the others. `load_dataset` reads
    these directories together.

    Args:
      policy: the policy of a `Result`, or from `jaxrl.load`.
      env: an environment from `jaxrl.make`, or its name, with the spaces that the policy was trained on.
      path: the directory to create; `tfds.load("cartpole", data_dir=...)` reads `.../cartpole/1.0.0`.
      episodes: number of episodes.
      seed: seed of episodes and of action sampling.
      explore: sample actions as in training, instead of taking the best ones.
      num_envs: number of environments over all processes; None: the number of episodes, at most 128 per process.
      max_steps: maximum length of an episode; longer episodes are cut off.
      policy_version: number to store with every episode; the command line uses the step of the checkpoint.
      file_format: "array_record", or "tfrecord" for programs that support only this format.
      progress: show a progress bar.

    Returns:
      The path.

    Raises:
      ConfigError: `path` exists, the spaces of the environment differ from the policy's, or the environment returns
        arrays that cannot be stored bit for bit (the message names them).
      MissingExtraError: `jaxrl[data]` is not installed.
    """

    def open_writer(env):
        where, processes = files.expand(path), jax.process_count()
        if processes > 1:
            check_hosts(where, processes)
            where /= host_directory(jax.process_index(), processes)
        return RldsWriter(where, env.name, file_format=file_format)

    return _export(open_writer, policy, env, episodes, seed, explore, num_envs, max_steps, policy_version, progress)


@interruptible
@checked(**_COUNTS)
def export_minari(
    policy: Policy,
    env: EnvironmentLike,
    dataset_id: str,
    *,
    episodes: int,
    seed: int = 0,
    explore: bool = False,
    num_envs: int | None = None,
    max_steps: int = 27_000,
    policy_version: int = 0,
    data_dir: str | os.PathLike | None = None,
    env_spec: str | None = None,
    progress: bool = True,
) -> Path:
    """Write the episodes that `export_rlds` writes for the same arguments, but as a Minari dataset.

    Images are stored losslessly. The dataset is available under its id once it is complete and verified. Only
    unfinished episodes, and a few megabytes of other data, are kept in memory.

    Args:
      policy: the policy of a `Result`, or from `jaxrl.load`.
      env: an environment from `jaxrl.make`, or its name, with the spaces that the policy was trained on.
      dataset_id: `NAME-v0`, or `NAMESPACE/NAME-v0`.
      episodes: number of episodes.
      seed: seed of episodes and of action sampling.
      explore: sample actions as in training, instead of taking the best ones.
      num_envs: number of environments; None: the number of episodes, at most 128.
      max_steps: maximum length of an episode; longer episodes are cut off.
      policy_version: number to store with every episode; the command line uses the step of the checkpoint.
      data_dir: directory of the datasets; None: Minari's default, `MINARI_DATASETS_PATH` or `~/.minari/datasets`.
      env_spec: id of the Gymnasium environment that `recover_environment` creates; needed for d3rlpy.
      progress: show a progress bar.

    Returns:
      The directory of the dataset.

    Raises:
      ConfigError: as for `export_rlds`; or there are several processes, which Minari does not support.
      MissingExtraError: `jaxrl[data]` is not installed.
    """
    if jax.process_count() > 1:
        raise ConfigError(f"Minari does not support {jax.process_count()} processes; use export_rlds, or one process")

    def open_writer(env):
        return MinariWriter(
            dataset_id,
            env.observation_space,
            env.action_space,
            data_dir=data_dir,
            env_spec=env_spec,
            algorithm=type(policy.algo).__name__,
        )

    return _export(open_writer, policy, env, episodes, seed, explore, num_envs, max_steps, policy_version, progress)


def _export(open_writer, policy, env, episodes, seed, explore, num_envs, max_steps, policy_version, progress):
    """Play episodes, and write them with the writer that `open_writer` returns."""
    process, processes = jax.process_index(), jax.process_count()
    if min(episodes, num_envs or episodes) < processes:
        raise ConfigError(f"episodes={episodes} and num_envs={num_envs} must be at least {processes}, one per process")
    env, seed = envs.prepared(env), checked_seed("seed", seed)
    check_spaces(policy.spec, env)
    most = processes * _NUM_ENVS if only_instance(env) is None else 1
    num_envs = min(episodes, most if num_envs is None else num_envs)
    together = processes * num_agents(env) if num_agents(env) > 1 else 1
    num_envs = -(-num_envs // together) * together
    here = np.array_split(np.arange(num_envs), processes)[process]
    left = episodes // num_envs + (here < episodes % num_envs)
    mine, limit = int(left.sum()), int(left.max()) * (max_steps + 1)
    common = provenance(policy.algo, env, seed) | {"policy_version": policy_version}
    stream = policy_rows.play(policy, env, env_index=here, all_envs=num_envs, seed=seed, explore=explore)
    cutter, rows, written = EpisodeCutter(len(here), max_steps), 0, 0
    with (
        open_writer(env) as writer,
        ProgressBar(unit="episodes", visible=progress) as bar,
        contextlib.closing(stream),
    ):
        bar.start(mine)
        while written < mine and rows < limit:
            chunk = next(stream)
            rows += len(chunk.first)
            cut_off = cutter.finish() if rows >= limit else ()
            for index, episode in itertools.chain(cutter.add(chunk), cut_off):
                if left[index]:
                    left[index] -= 1
                    writer.write(episode, common | {"env_index": int(here[index])})
            written = mine - int(left.sum())
            bar.update(written)
        if written < mine:
            warnings.warn(
                f"{env.name} finished only {written} of {mine} episodes in {rows:,} steps per environment; raise "
                "max_steps for more",
                stacklevel=3,
            )
        return writer.close()


def provenance(algo: Algorithm, env: Environment | HostRecipe, seed: int) -> dict[str, Any]:
    """Return metadata on the origin of episodes, including a hash of the algorithm's and environment's settings."""
    text = json.dumps({"algorithm": encode(algo), "environment": to_config(env)}, sort_keys=True)
    return {
        "algorithm": type(algo).__name__,
        "environment": env.name,
        "seed": seed,
        "configuration_hash": hashlib.sha256(text.encode()).hexdigest()[:16],
    }
