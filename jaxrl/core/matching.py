"""Comparison of the spaces of environments, policies and runs."""

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import HasSpaces


def space_problems(here: HasSpaces, there: HasSpaces, description: str) -> list[str]:
    """Return an error line for each space that differs in shape, dtype, names or number of actions.

    Bounds of boxes may differ: they depend on physical parameters and time limits, but do not affect a policy's output.

    Args:
      here: the spaces to check.
      there: the spaces that they must match.
      description: description of `there`, for the messages: "the environment of training has".
    """
    problems = []
    for what in ("observation_space", "action_space"):
        one, other = getattr(here, what), getattr(there, what)
        if spaces.form(one) != spaces.form(other):
            problems.append(f"{here.name} has the {what} {one}, but {description} {other}")
    return problems


def check_spaces(spec: HasSpaces, env: HasSpaces) -> None:
    """Check that a policy trained on `spec` can act in `env`; bounds of boxes may differ.

    Raises:
      ConfigError: the spaces differ; the message contains the spaces of the policy and of `env`.
    """
    if problems := space_problems(env, spec, f"the policy was trained on {spec.name} with"):
        raise ConfigError(problems)
