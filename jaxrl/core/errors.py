"""Errors that say what is wrong, the value, what is allowed and what to do."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any


class JaxrlError(Exception):
    """Base of every error that jaxrl raises on purpose."""


class ConfigError(JaxrlError, ValueError):
    """One or several settings are wrong; raised before anything is compiled.

    Attributes:
      problems: one line a problem, all that were found.
    """

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class EnvironmentContractError(JaxrlError):
    """An environment breaks the protocol of `jaxrl.core.types.Environment`; names the leaf."""


class EnvironmentFailedError(JaxrlError):
    """A host environment raised, hung or lost its process; says where, and shows its traceback if it has one.

    Attributes:
      index: of the environment, among all of the run; None: of a whole group.
      seed: of its first reset; None if it was never reset.
      action: of the step that failed; None in a reset.
    """

    def __init__(self, message: str, index: int | None = None, seed: int | None = None, action: Any = None):
        self.index, self.seed, self.action = index, seed, action
        super().__init__(message)


class MissingExtraError(JaxrlError, ImportError):
    """An optional dependency is not installed; says which extra brings it."""

    def __init__(self, what: str, extra: str, hint: str = ""):
        how = f"pip install 'jaxrl[{extra}]'" + (f" ({hint})" if hint else "")
        super().__init__(f"{what} needs an extra that is not installed: {how}")


class CheckpointError(JaxrlError):
    """No checkpoint can be restored; says which were tried and why each failed."""


class RunDirectoryError(JaxrlError):
    """A run directory is in use, or belongs to another configuration."""


class DatasetError(JaxrlError):
    """A dataset is damaged or breaks the rules of its format; names the episode and the field."""


class NoDatasetError(DatasetError, ConfigError):
    """There is no dataset under the requested name or path."""


class RecordingError(JaxrlError):
    """A run's trajectories could not be written; says where and why."""


class PeerError(JaxrlError):
    """Another process of the run ended, failed, or does not answer."""


class RunStoppedWarning(RuntimeWarning):
    """A run has ended early because something failed; its result is what was learned before."""


class NonFiniteError(JaxrlError):
    """NaN or Inf appeared while training; names the leaf and the step."""


# What Stable-Baselines3, CleanRL and purejaxrl call settings that have another name here.
_ELSEWHERE = {
    "anneal_lr": "learning_rate",
    "buffer_size": "capacity",
    "clip_coef": "clip",
    "clip_eps": "clip",
    "clip_range": "clip",
    "clip_vloss": "clip_value",
    "clip_range_vf": "clip_value",
    "ent_coef": "entropy_cost",
    "env_id": "env",
    "exploration_fraction": "epsilon",
    "gradient_steps": "replay_ratio",
    "learning_starts": "min_size",
    "lr": "learning_rate",
    "n_envs": "num_envs",
    "n_epochs": "epochs",
    "n_steps": "rollout_length",
    "net_arch": "network",
    "norm_adv": "normalize_advantage",
    "num_minibatches": "minibatches",
    "num_steps": "rollout_length",
    "policy_frequency": "policy_delay",
    "policy_kwargs": "network",
    "policy_lr": "policy_learning_rate",
    "policy_noise": "target_noise",
    "noise_clip": "target_noise_clip",
    "q_lr": "learning_rate",
    "target_network_frequency": "target_period",
    "target_update_interval": "target_period",
    "total_timesteps": "total_steps",
    "train_freq": "replay_ratio",
    "train_frequency": "replay_ratio",
    "update_epochs": "epochs",
    "vf_coef": "value_cost",
}


def unknown(kind: str, name: str, known: Iterable[str], listing: str = "") -> ConfigError:
    """Return the error for an unknown name, suggesting close names or jaxrl's name for another library's setting.

    Args:
      kind: the kind of name, in words ("environment", "algorithm", "field of PPO").
      name: the name that was looked up.
      known: every name that exists.
      listing: where to see them all, a short clause, may be empty.
    """
    known = sorted(known)
    lowered = {k.lower(): k for k in known}
    # First those of which it is a whole part: "entropy" of "update/entropy".
    within = [k for k in known if name and re.search(rf"[/:._-]{re.escape(name)}$", k, re.IGNORECASE)]
    similar = [lowered[c] for c in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)]
    close = list(dict.fromkeys(sorted(within, key=len) + similar))[:3]
    here = _ELSEWHERE.get(name.lower().lstrip("-").replace("-", "_"), "")
    named = [k for k in known if here and k.lower().lstrip("-").replace("-", "_") == here]
    if named:
        hint = f"in jaxrl: {named[0]!r}"
    elif close:
        hint = "did you mean " + " or ".join(repr(c) for c in close) + "?"
    elif not known:
        hint = "none is known"
    else:
        hint = "known: " + ", ".join(known) if len(known) <= 12 else f"{len(known)} are known"
    return ConfigError(f"unknown {kind} {name!r}; {hint}" + (f" ({listing})" if listing else ""))
