"""Upload and download of policy folders, to and from the Hugging Face hub or another hub set by `HF_ENDPOINT`."""

import os
import shutil
from pathlib import Path
from typing import Any

from jaxrl.core import files
from jaxrl.core.arguments import checked
from jaxrl.core.errors import ConfigError, MissingExtraError
from jaxrl.core.interrupts import interruptible
from jaxrl.export.folder import building
from jaxrl.run.policies.policy_folder import MODEL, is_policy_folder

_FILES = ("README.md", "config.json", MODEL, "scores.json")  # no other files are pushed or pulled


@interruptible
@checked()
def push(folder: str | os.PathLike, repo_id: str, *, private: bool = False, revision: str | None = None) -> str:
    """Push a policy to a hub.

    Args:
      folder: a folder written by `export_policy(..., to="safetensors")`.
      repo_id: the repository, "OWNER/NAME"; created if missing. `HF_TOKEN` or `hf auth login` sets the user.
      private: whether a new repository is private.
      revision: the branch; None: the main branch.

    Returns:
      The URL of the commit.

    Raises:
      ConfigError: the folder contains no policy, or the hub rejects the upload; the message has the reason.
      MissingExtraError: huggingface-hub is not installed.
    """
    path = files.expand(folder)
    if not is_policy_folder(path):
        raise ConfigError(
            f"{folder} does not contain a policy: it has no {MODEL}; export_policy(..., to='safetensors') writes one"
        )
    hub = _hub()
    try:
        hub.HfApi().create_repo(repo_id, exist_ok=True, private=private)
        return str(
            hub.HfApi().upload_folder(
                folder_path=path,
                repo_id=repo_id,
                revision=revision,
                allow_patterns=list(_FILES),
                commit_message="jaxrl policy",
            )
        )
    except Exception as error:
        raise ConfigError(f"the policy cannot be uploaded to {repo_id!r}: {_in_a_line(error)}") from error


@interruptible
@checked()
def pull(repo_id: str, path: str | os.PathLike, *, revision: str | None = None) -> Path:
    """Pull a policy from a hub into a folder that `jaxrl.load` reads. Nothing in the folder is executed.

    Args:
      repo_id: the repository, "OWNER/NAME".
      path: the folder, which must not exist.
      revision: a branch, tag or commit; None: the newest commit of the main branch.

    Returns:
      The path.

    Raises:
      ConfigError: `path` exists, or the repository contains no policy or cannot be read; the message has the reason.
      MissingExtraError: huggingface-hub is not installed.
    """
    where = files.expand(path)
    if not where.parent.is_dir():
        raise ConfigError(f"path={str(path)!r}: there is no folder {where.parent}")
    hub = _hub()
    try:
        with building(where) as made:
            hub.snapshot_download(repo_id, revision=revision, local_dir=made, allow_patterns=list(_FILES))
            shutil.rmtree(made / ".cache", ignore_errors=True)  # the client's cache
            if not is_policy_folder(made):
                raise ConfigError(f"{repo_id!r} does not contain a jaxrl policy: it has no {MODEL}")
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{repo_id!r} cannot be downloaded: {_in_a_line(error)}") from error
    return where


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtraError("the hub", "hub") from error
    return huggingface_hub


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
