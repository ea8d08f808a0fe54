"""Callbacks, which `train` calls during a run to inspect it, stop it, or change its environment.

`train` calls them at evaluations, at the end and, if `callback_every` is set, at this interval of environment steps. A
run that is repeated, or killed and resumed, calls them at the same steps.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.config import check_sizes, decode, encode
from jaxrl.core.errors import CheckpointError, ConfigError
from jaxrl.core.presentation import public_names
from jaxrl.core.run_state import RunState
from jaxrl.core.types import Environment

TARGET_RETURN = "target_return"
_RESERVED = ("finished", "interrupted", "non_finite", "unsaved")  # stop reasons that a callback may not return


@dataclasses.dataclass(frozen=True)
class Moment:
    """The view of a run that a callback receives.

    Attributes:
      step: environment steps so far, over all environments; in a run without environments, updates so far.
      total_steps: environment steps of the whole run.
      metrics: the newest value of every metric. Training metrics are means since the last logged row; short runs
        without `log_every` log a row about every second, so their means depend on the machine.
      score: the mean return of the evaluation at this step or, with `async_evaluation`, of the previous one; None
        if there is none.
      state: the complete state of the run; its arrays may be read during the call, but must not be kept.
      env: the training environment, a pytree whose leaves are its parameters; None for host environments and for runs
        without environments.
    """

    step: int
    total_steps: int
    metrics: Mapping[str, float]
    score: float | None
    state: RunState
    env: Environment | None


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision that a callback returns.

    Attributes:
      stop: the reason to end the run at this step, which becomes `Result.stopped`; None: the run continues.
      env: the environment to train in from this step on: `moment.env` with other leaves of the same shapes; None: no
        change. The evaluation environment does not change.
      metrics: additional metrics to log at this step, as "callback/NAME".
    """

    stop: str | None = None
    env: Environment | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Callback(Protocol):
    """An object that inspects a run periodically. With several processes, all must return the same decisions."""

    @property
    def name(self) -> str:
        """The name under which the callback's state is saved; it must be unique within a run."""
        ...

    def __call__(self, moment: Moment) -> Decision | bool | None:
        """Return None or True to continue, False to stop the run at this step, or a `Decision`."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of the callback as JSON values, which are saved with every checkpoint."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned, when a run is resumed."""
        ...


class FunctionCallback:
    """A stateless callback that calls a function; `train` wraps functions in `callbacks` with this class.

    Args:
      function: maps a `Moment` to a `Decision`, None or True (continue), or False (stop, as in Stable-Baselines3).
      name: name of the callback in messages and in `Result.stopped`.
    """

    def __init__(self, function: Callable[[Moment], Decision | bool | None], name: str = "function"):
        self.name = name
        self._function = function

    def __call__(self, moment: Moment) -> Decision | bool | None:
        return self._function(moment)

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        del state


class StopAtReturn(FunctionCallback):
    """A callback that stops when an evaluation's mean return reaches `target`, used for `target_return`."""

    def __init__(self, target: float):
        super().__init__(lambda moment: not (moment.score is not None and moment.score >= target), TARGET_RETURN)


class Callbacks:
    """The callbacks of one run, whose state is saved in its checkpoints.

    Raises:
      ConfigError: two callbacks have the same name.
    """

    def __init__(self, callbacks: Sequence[Callback]):
        self._callbacks = tuple(callbacks)
        names = [callback.name for callback in callbacks]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"several callbacks have the name {', '.join(twice)}; use unique names")
        self._env: Environment | None = None  # the training environment, if a callback changed it
        self._stopped: list[str] = []  # names of the callbacks that stopped the run
        self._restored: Mapping[str, Any] = {}  # the state in the checkpoint of a resumed run

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def __call__(self, moment: Moment) -> Decision:
        """Return the combined decision: the first reason to stop, the environment after all changes, and all metrics.

        Raises:
          ConfigError: a decision is invalid, or changes the structure of the environment or a host environment.
        """
        stop, env, metrics = None, moment.env, {}
        for callback in self._callbacks:
            decision = _decision(callback.name, callback(dataclasses.replace(moment, env=env)))
            if decision.stop in _RESERVED:
                raise ConfigError(
                    f"callback {callback.name} returned the reserved stop reason {decision.stop!r}; use another string"
                )
            if decision.stop is not None:
                self._stopped.append(callback.name)
            stop = stop or decision.stop
            metrics |= {f"callback/{name}": float(value) for name, value in decision.metrics.items()}
            if decision.env is not None:
                env = _same_form(f"callback {callback.name}", moment.env, decision.env)
        changed = None if env is moment.env else env
        self._env = changed or self._env
        return Decision(stop, changed, metrics)

    def stop_reason(self, moment: Moment, due: bool) -> str | None:
        """Return the reason to stop a resumed run at once, or None.

        The callbacks that stopped the run at this step are called again. If callbacks are due, new callbacks are also
        called, and the target return is compared, because it may have changed. All other callbacks were called before
        the checkpoint was saved.
        """
        states, stopped = self._restored.get("states", {}), self._restored.get("stopped", ())
        new = [one for one in self._callbacks if one.name not in states or isinstance(one, StopAtReturn)]
        deciding = [one for one in self._callbacks if one.name in stopped or (due and one in new)]
        decisions = [_decision(callback.name, callback(moment)) for callback in deciding]
        return next((decision.stop for decision in decisions if decision.stop), None)

    def keep(self) -> dict[str, Any]:
        """Return the state of all callbacks as JSON values, to be saved in a checkpoint.

        Raises:
          ConfigError: a state does not consist of JSON values.
        """
        states = {}
        for callback in self._callbacks:
            try:
                states[callback.name] = json.loads(json.dumps(dict(callback.state_dict()), allow_nan=False))
            except (TypeError, ValueError) as error:
                raise ConfigError(f"the state of callback {callback.name} must be JSON values: {error}") from error
        leaves = None if self._env is None else [encode(leaf) for leaf in jax.tree.leaves(jax.device_get(self._env))]
        return {"states": states, "stopped": self._stopped, "env": leaves}

    def restore(self, record: Mapping[str, Any], env: Environment | None) -> Environment | None:
        """Restore the state of all callbacks; return the training environment that they set, or None.

        Raises:
          CheckpointError: the saved state is invalid.
        """
        self._restored, states, set_by_callback = record, record.get("states", {}), record.get("env")
        fits = isinstance(states, dict) and isinstance(record.get("stopped", []), list)
        if not fits or not isinstance(set_by_callback, list | None):
            raise CheckpointError("the callbacks cannot be restored: their state in the checkpoint is invalid")
        for callback in self._callbacks:
            if callback.name in states:
                try:
                    callback.load_state_dict(states[callback.name])
                except Exception as error:  # any error, because another callback may have saved the state
                    raise CheckpointError(
                        f"callback {callback.name} cannot restore its state from the checkpoint: "
                        f"{type(error).__name__}: {error!s:.200}; use the callback that saved it, or another name"
                    ) from error
        if set_by_callback is None:
            return None
        try:
            check_sizes(set_by_callback)
            found = [decode(leaf) for leaf in set_by_callback]
            if others := [leaf for leaf in found if not isinstance(leaf, bool | int | float | np.ndarray)]:
                raise TypeError(f"a leaf is a {type(others[0]).__name__}")
            new = jax.tree.unflatten(jax.tree.structure(env), found)
            self._env = _same_form("the checkpoint", env, new)
        except (ConfigError, OverflowError, TypeError, ValueError) as error:
            raise CheckpointError(f"the environment in the checkpoint does not match: {error!s:.200}") from error
        return self._env


def as_callbacks(callbacks: Sequence[Callback | Callable[[Moment], Decision | bool | None]]) -> list[Callback]:
    """Return the callbacks, with every function wrapped in a `FunctionCallback` that has its name.

    Raises:
      ConfigError: `callbacks` is not a list, or an item is neither a callback nor a function.
    """
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise ConfigError(f"callbacks={callbacks!r:.80} must be a list of callbacks or functions: callbacks=[...]")
    found: list[Callback] = []
    for place, one in enumerate(callbacks):
        if isinstance(one, Callback) and not isinstance(one, type):
            found.append(one)
        elif isinstance(one, type) or not callable(one) or hasattr(one, "state_dict"):  # an incomplete callback
            raise ConfigError(
                f"callbacks[{place}]={one!r:.80} must be a function of a Moment, or an object with name, __call__, "
                "state_dict and load_state_dict"
            )
        else:
            name = getattr(one, "__name__", type(one).__name__)
            taken = [other.name for other in found]
            found.append(FunctionCallback(one, f"{name}_{place}" if name in taken else name))
    return found


def run_callbacks(
    callbacks: Sequence[Callback | Callable[[Moment], Decision | bool | None]], target_return: float | None
) -> Callbacks:
    """Return the callbacks of a run. If `target_return` is set, the first one stops the run at this mean return.

    Raises:
      ConfigError: `callbacks` is not a list of callbacks or functions, or two have the same name.
    """
    stops = [] if target_return is None else [StopAtReturn(target_return)]
    return Callbacks([*stops, *as_callbacks(callbacks)])


def _decision(name: str, answer: Any) -> Decision:
    if answer is None:
        return Decision()
    if isinstance(answer, Decision):
        problems = [] if isinstance(answer.stop, str | None) else [f"stop={answer.stop!r:.80} must be a string or None"]
        if not isinstance(answer.metrics, Mapping):
            problems.append(f"metrics={answer.metrics!r:.80} must be a dictionary of numbers")
        elif wrong := [key for key, value in answer.metrics.items() if np.size(value) != 1 or not _is_number(value)]:
            problems.append(f"metrics[{wrong[0]!r}]={answer.metrics[wrong[0]]!r:.80} must be a number")
        if problems:
            raise ConfigError([f"callback {name} returned a Decision whose {problem}" for problem in problems])
        return answer
    if isinstance(answer, bool | np.bool_):
        return Decision() if answer else Decision(stop=name)
    raise ConfigError(
        f"callback {name} returned {answer!r:.80}; it can return None or True (continue), False (stop), or "
        "jaxrl.Decision(stop='reason', metrics={...}, env=...)"
    )


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)


def _same_form(who: str, env: Environment | None, new: Environment) -> Environment:
    """Return `new` with the dtypes of `env`, so that the compiled program can be reused."""
    if env is None:
        raise ConfigError(f"{who} sets an environment, but this run steps its environments on the host; leave env= out")
    if jax.tree.structure(env) != jax.tree.structure(new):
        raise ConfigError(f"{who} sets an environment with another structure; change only the leaves of moment.env")
    shapes = [(jnp.shape(a), jnp.shape(b)) for a, b in zip(jax.tree.leaves(env), jax.tree.leaves(new), strict=True)]
    if wrong := [f"{before} -> {after}" for before, after in shapes if before != after]:
        raise ConfigError(f"{who} changes the shape of the environment's leaves: {', '.join(wrong)}")
    return jax.tree.map(_like, env, new)


def _like(old, new):
    """Return `new` with the dtype and weak type of `old`, because a different type would require another program."""
    if jnp.ndim(old) == 0 and jnp.asarray(old).weak_type:
        return jnp.asarray(type(np.asarray(old).item())(new))
    return jnp.asarray(new, jnp.result_type(old))


def __dir__() -> list[str]:
    return public_names(globals())
