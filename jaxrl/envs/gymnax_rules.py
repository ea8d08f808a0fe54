"""Parameters of gymnax's environments that follow from others, or have no effect."""

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.core.types import PyTree
from jaxrl.envs.suite import PROBABILITY


class Derived(NamedTuple):
    """A rule by which a parameter follows from others."""

    sources: tuple[str, str]
    equation: str  # for messages
    value: Callable[[Any, Any], Any]  # from the sources


# gymnax stores these in addition to their sources, and reads both.
DERIVED: dict[str, dict[str, Derived]] = {
    "CartPole-v1": {
        "total_mass": Derived(("masscart", "masspole"), "masscart + masspole", operator.add),
        "polemass_length": Derived(("masspole", "length"), "masspole * length", operator.mul),
    }
}

# Limits of the numbers of these names, in all environments; a time limit may be a float, as BernoulliBandit's 100.0.
LIMITS: dict[str, Mapping[str, float]] = {
    "max_steps_in_episode": {"low": 1},
    "fail_prob": PROBABILITY,
    "reward_prob": PROBABILITY,
}

# Parameters that are used, but without consequence; `SuiteEnv.without_effect` finds those that are not used.
WITHOUT_EFFECT: dict[str, frozenset[str]] = {
    "SimpleBandit-bsuite": frozenset({"max_steps_in_episode"}),  # every episode terminates at its first step
}

# Arguments of constructors that change nothing.
_UNUSED_ARGUMENTS: dict[str, frozenset[str]] = {
    "Seaquest-MinAtar": frozenset({"use_minimal_action_set"}),  # both sets are the same six actions
}

# For each parameter, another one, and a predicate of its values with which this one changes nothing.
_SWITCHES: dict[str, dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "Asterix-MinAtar": {"ramp_interval": ("ramping", lambda ramping: not ramping)},
    "BernoulliBandit-misc": dict.fromkeys(
        ("min_lim", "max_lim", "t_max"), ("normalize_time", lambda normalized: not normalized)
    ),
    "DeepSea-bsuite": {"randomize_actions": ("sample_action_map", bool)},
    "FourRooms-misc": {"goal_fixed": ("resample_goal_pos", bool), "pos_fixed": ("resample_init_pos", bool)},
    "FrozenLake-misc": {
        "map_name": ("desc", lambda desc: desc is not None),
        "success_rate": ("is_slippery", lambda slippery: not slippery),
    },
}


def settled(name: str, params: PyTree) -> PyTree:
    """Return gymnax's `EnvParams` of the environment `name` with its derived parameters recomputed.

    Parameters whose sources are placeholders, as in trees of axes to map over, are not changed.
    """
    values = {}
    for k, rule in DERIVED.get(name, {}).items():
        sources = [getattr(params, source) for source in rule.sources]
        if all(isinstance(x, float | np.ndarray | np.generic | jax.Array) for x in sources):
            values[k] = rule.value(*sources)
    return params.replace(**values) if values else params


def unused_arguments(name: str, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return a line for each argument of the constructor that changes nothing."""
    return [
        f"{k}={value!r:.80} of gymnax:{name} changes nothing; leave it out"
        for k, value in arguments.items()
        if k in _UNUSED_ARGUMENTS.get(name, ()) and value != defaults[k]
    ]


def switched_off(
    name: str, values: Mapping[str, Any], chosen: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[str]:
    """Return a line for each chosen parameter that changes nothing because of the value of another one.

    Args:
      name: the environment's name.
      values: all parameters and arguments that are set; the others are in `defaults`.
      chosen: those chosen by a user.
      defaults: the defaults of all parameters and arguments.
    """
    problems = []
    for k, (switch, off) in _SWITCHES.get(name, {}).items():
        if k not in chosen or _same(chosen[k], defaults[k]):
            continue
        value = values.get(switch, defaults[switch])
        if not isinstance(value, jax.Array | np.ndarray) and off(value):
            problems.append(
                f"{k}={chosen[k]!r:.80} of gymnax:{name} changes nothing with {switch}={value!r:.80}; leave one of "
                "them out"
            )
    return problems


def _same(one, other):
    return one is other or (isinstance(one, int | float | str) and one == other)
