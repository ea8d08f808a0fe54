"""Early termination of a run: its reason, and the description of values that were not finite."""

from typing import NoReturn

import jax

from jaxrl.core.errors import CheckpointError
from jaxrl.core.report import Report, persistent_state
from jaxrl.core.run_state import RunState
from jaxrl.envs.host.time_steps import environment_seeds
from jaxrl.parallel.layout import Layout
from jaxrl.parallel.multihost import distributed
from jaxrl.run.loop.advice import NOT_FINITE, OF_ENVIRONMENT
from jaxrl.run.settings import RunSettings

_LEAVES_NAMED, _NAMED_IN_SHORT = 8, 1  # maximum number of names in the result and in the warning


class Stop(Exception):
    """An exception that ends the training loop.

    Args:
      reason: value of `Result.stopped`.
      problem: value of `Result.problem`.
      summary: short description of the problem, with a remedy.
    """

    def __init__(self, reason: str, problem: str | None = None, summary: str | None = None):
        super().__init__(reason)
        self.reason, self.problem, self.summary = reason, problem, summary


def abort_without_saving(error: CheckpointError) -> NoReturn:
    """End a run that can no longer be saved.

    Raises:
      Stop: in a run with a single process, which then returns its result.
      CheckpointError: in a run with several processes.
    """
    if distributed.is_several():
        raise error
    raise Stop("unsaved", str(error)) from error


def non_finite(
    report: Report, after: RunState, step: int, failed_step: int, settings: RunSettings, layout: Layout
) -> Stop:
    """Return a `Stop` for a chunk with values that are not finite, which names the affected metrics and leaves.

    Args:
      report: report of the chunk, as numpy arrays.
      after: state after the chunk, without buffers.
      step: environment steps at that state.
      failed_step: environment steps after the first iteration with such a value.
      settings, layout: settings and layout of the run.
    """
    named = jax.tree.leaves_with_path(jax.device_get(_all_finite(persistent_state(after))))
    unsound = [jax.tree_util.keystr(path, simple=True, separator=".") for path, fine in named if not fine]
    places = {name: int(place) for name, place in sorted(report.broken.items()) if place}
    broken, unsound = (
        sorted(some, key=lambda name: not name.startswith(("reward", "timestep"))) for some in (places, unsound)
    )
    cause = _environment(places, failed_step, settings, layout)

    def text(most_broken, most_unsound):
        line = f"{cause}not finite in the iteration that ended at step {failed_step}"
        line += f": {_first(broken, most_broken)}" if broken else ""
        return line + (f"; leaves at step {step}: {_first(unsound, most_unsound)}" if unsound else "")

    advice = OF_ENVIRONMENT if cause else NOT_FINITE
    summary = f"{text(_NAMED_IN_SHORT, _NAMED_IN_SHORT)}; {advice}"
    return Stop("non_finite", text(len(broken), _LEAVES_NAMED), summary)


def _environment(places, failed_step, settings, layout):
    """Describe the environment that first returned NaN or infinity; return "" if an action was not finite earlier."""
    name = max(places, key=lambda name: (places[name], not name.startswith("action")), default="action")
    place, envs, agents = places.get(name, 0) - 1, layout.num_envs, layout.spec.num_agents
    if place <= 0 or name.startswith("action"):
        return ""
    if getattr(settings.topology, "learner_batch", None) is not None:  # the index is known only to the actors
        return f"an environment returned NaN or infinity as {name}; "
    env, agent = divmod(-place % envs, agents)
    who = f"environment {env} (index from 0" + (f", agent {agent}" if agents > 1 else "")
    if layout.spec.native is not None:
        who += f", seed {environment_seeds(settings.seed, 1, 0, env)[0]}"
    step = failed_step // envs - (place - 1) // envs
    return f"{who}) returned NaN or infinity as {name} at its step {step} (including resets); "


@jax.jit
def _all_finite(tree):
    """Return whether each leaf is finite; integer leaves always are."""
    inexact = jax.numpy.inexact
    return jax.tree.map(lambda x: not jax.numpy.issubdtype(x.dtype, inexact) or jax.numpy.isfinite(x).all(), tree)


def _first(names, number):
    """Return the first `number` names, and the number of further names, as text."""
    return ", ".join(names[:number]) + (f" and {len(names) - number} more" if len(names) > number else "")
