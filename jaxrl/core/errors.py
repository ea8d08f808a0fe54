"""Exceptions and warnings; their messages contain the problem, the value, the allowed values and a remedy."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any


class JaxrlError(Exception):
    """Base class of all errors that jaxrl raises on purpose."""


class ConfigError(JaxrlError, ValueError):
    """Error for one or several invalid settings, raised before anything is compiled.

    Attributes:
      problems: all problems found, one line per problem.
    """

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class EnvironmentContractError(JaxrlError):
    """Error for a violation of the protocol `jaxrl.core.types.Environment`; the message names the invalid leaf."""


class EnvironmentFailedError(JaxrlError):
    """Error for a host environment that failed, hung or lost its process; the message contains the traceback, if any.

    Attributes:
      index: index of the environment among all environments of the run; None if a whole group failed.
      seed: seed of the environment's first reset; None if it was never reset.
      action: action of the step that failed; None if a reset failed.
    """

    def __init__(self, message: str, index: int | None = None, seed: int | None = None, action: Any = None):
        self.index, self.seed, self.action = index, seed, action
        super().__init__(message)


class MissingExtraError(JaxrlError, ImportError):
    """Error for an optional dependency that is not installed; the message names the extra to install."""

    def __init__(self, what: str, extra: str, hint: str = ""):
        how = f"pip install 'jaxrl[{extra}]'" + (f" ({hint})" if hint else "")
        super().__init__(f"{what} needs an extra that is not installed: {how}")


class CheckpointError(JaxrlError):
    """Error for a run without a restorable checkpoint; the message lists each attempted checkpoint and its error."""


class RunDirectoryError(JaxrlError):
    """Error for a run directory that is in use or belongs to another configuration."""


class DatasetError(JaxrlError):
    """Error for a dataset that is damaged or violates its format; the message names the episode and the field."""


class NoDatasetError(DatasetError, ConfigError):
    """Error for a name or path that does not refer to a dataset."""


class RecordingError(JaxrlError):
    """Error for trajectories of a run that could not be written; the message contains the path and the reason."""


class PeerError(JaxrlError):
    """Error for another process of the run that ended, failed, or does not respond."""


class RunStoppedWarning(RuntimeWarning):
    """Warning that a run ended early because of a failure; the run's result is the state before the failure."""


class NonFiniteError(JaxrlError):
    """Error for NaN or Inf in training; the message names the leaf and the step."""


# Settings of Stable-Baselines3, CleanRL, purejaxrl and older versions, and the setting or algorithm in their place if
# its name is not similar.
_ELSEWHERE = {
    "anneal_lr": "learning_rate",
    "buffer_size": "capacity",
    "clip_coef": "clip",
    "clip_eps": "clip",
    "clip_range": "clip",
    "dual_learning_rate": "kl_limits.learning_rate",
    "exploration_noise": "noise.std",
    "exploration_fraction": "epsilon",
    "gradient_steps": "replay_ratio",
    "importance_exponent": "prioritized.beta",
    "initial_penalty": "kl_penalty.initial",
    "initial_priorities": "prioritized.initial",
    "joint_batch": "CrossQ",
    "learn_temperature": "temperature.learned",
    "learning_starts": "min_size",
    "least_noise": "noise.least_std",
    "lr": "learning_rate",
    "n_steps": "rollout_length",
    "net_arch": "network",
    "newest": "view",
    "normalize_reward": "reward_scale",
    "num_steps": "rollout_length",
    "objective": "kl_penalty",
    "policy_kwargs": "network",
    "policy_lr": "policy_learning_rate",
    "policy_noise": "target_noise",
    "policy_value": "pessimism.policy",
    "q_lr": "learning_rate",
    "remover": "view",
    "replay_memory": "storage",
    "sequence_length": "memory.length",
    "target_critics": "pessimism.sampled",
    "target_entropy": "temperature.target",
    "target_entropy_fraction": "temperature.target_fraction",
    "target_network_frequency": "target_period",
    "target_update_interval": "target_period",
    "target_value": "pessimism.target",
    "train_freq": "replay_ratio",
    "train_frequency": "replay_ratio",
    "vf_coef": "value_cost",
}


def unknown(kind: str, name: str, known: Iterable[str], listing: str = "") -> ConfigError:
    """Return the error for an unknown name, with close names, or the name of this setting elsewhere or before.

    Args:
      kind: the kind of name, in words ("environment", "algorithm", "field of PPO").
      name: the name that was looked up.
      known: every name that exists.
      listing: further hint, such as where all names are listed; may be empty.
    """
    known = sorted(known)
    plain = {k.lower().lstrip("-").replace("-", "_"): k for k in known}
    typed = name.lower().lstrip("-").replace("-", "_")
    # First, names that end with `name` as a whole part: "update/entropy" for "entropy".
    within = [k for p, k in plain.items() if re.search(rf"[/:._]{re.escape(typed)}$", p)]
    similar = [plain[c] for c in difflib.get_close_matches(typed, plain, n=3, cutoff=0.5)]
    close = list(dict.fromkeys(sorted(within, key=len) + similar))[:3]
    here = _ELSEWHERE.get(typed, "")
    if here in plain:
        hint = f"in jaxrl: {plain[here]!r}"
    elif here[:1].isupper():
        hint = f"in jaxrl, it is the algorithm {here!r}"
    elif close:
        hint = "did you mean " + " or ".join(repr(c) for c in close) + "?"
    elif not known:
        hint = "none are known"
    else:
        hint = "known: " + ", ".join(known) if len(known) <= 12 else f"{len(known)} are known"
    return ConfigError(f"unknown {kind} {name!r}; {hint}" + (f" ({listing})" if listing else ""))
