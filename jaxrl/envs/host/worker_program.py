"""The program of a worker process, which steps Gymnasium or dm_env environments as requested over a pipe.

It runs as a script and imports neither jaxrl nor JAX, so a worker starts as fast as its suite can be imported. Other
processes of a run, which do need them, start in the same way: the first message names the module that serves them. Its
arguments are two file descriptors: the pipe, and a lifeline that closes when the parent ends for any reason.
"""

import difflib
import fcntl
import functools
import importlib
import os
import pickle
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    """Serve environments, or call the function `serve` of a module, until the pipe is closed."""
    connection, lifeline = Connection(int(sys.argv[1])), int(sys.argv[2])
    leave_to_parent(signal.SIGINT, signal.SIGTERM)
    die_with(lifeline)
    try:
        sys.path[:], module, setup = connection.recv()
        (importlib.import_module(module).serve if module else serve)(connection, setup)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone


def serve(connection, setup):
    """Make environments, and step them as requested until the parent sends None."""
    environments = {}
    try:
        connection.send(attempt(prepare, environments, *setup))
        while (request := connection.recv()) is not None:
            for index, call, argument in request:
                connection.send((index, *attempt(outcome, *environments[index], call, argument)))
    finally:
        for environment, _ in environments.values():
            environment.close()


def leave_to_parent(*numbers: int) -> None:
    """Ignore these signals in this process, because a scheduler may send them to every process of a job.

    Processes that environments start still handle the signals as usual, so that they can be ended: `exec` resets
    handlers (but not SIG_IGN), and this function resets them after a fork.
    """
    for number in numbers:
        before = signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=functools.partial(signal.signal, number, before))


def die_with(lifeline: int) -> None:
    """Make the kernel end this process when the other end of `lifeline` closes, even if Python is blocked.

    Processes that the environments started end, too, because they are in the same process group.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)  # the default action ends the process
    leader = os.getpgrp() == os.getpid()
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid() if leader else os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()  # `select.select` only accepts descriptors below 1024
    closed.register(lifeline, select.POLLIN)
    if closed.poll(0):  # the other end closed before `O_ASYNC` was set
        sys.exit(1)


LARGEST = 3.4028235677973366e38  # larger numbers become infinite in float32
RAISED = (Exception, SystemExit)  # errors of environments; `sys.exit` must not end the worker


def attempt(function, *arguments):
    """Return (None, the function's result), or (the traceback, None) if an environment raised."""
    try:
        return None, function(*arguments)
    except RAISED:
        return traceback.format_exc(), None


def prepare(environments, spec, indices):
    """Make the environments with these indices; return their spaces."""
    spec, options, info = pickle.loads(spec)
    for index in indices:
        environments[index] = made(spec, options), info
    return spaces(environments[indices[0]][0])


def made(spec, options):
    """Make an environment from `spec`: a Gymnasium spec, a function, or a tuple (`what`,) for `FromDmEnv`."""
    if isinstance(spec, tuple):
        return FromDmEnv(*spec, options)
    import gymnasium

    options = dict(options)
    wrappers = options.pop("wrappers", ())
    if callable(spec):
        found = spec(**options)
        if not isinstance(found, gymnasium.Env):
            several = ", and set num_envs=N" if isinstance(found, gymnasium.vector.VectorEnv) else ""
            raise TypeError(f"it returned a {type(found).__name__}; return one gymnasium.Env{several}")
    else:
        found = gymnasium.make(spec, disable_env_checker=True, **options)
    for name, arguments in wrappers:
        found = wrapper(name)(found, **arguments)
    return found


def wrapper(name):
    """Return the wrapper class named "module:Class", or "Class" for a class in `gymnasium.wrappers`.

    Raises:
      ImportError: there is no such class.
      TypeError: the class is not a wrapper.
    """
    import gymnasium

    module, _, within = name.rpartition(":")
    module = module or "gymnasium.wrappers"
    try:
        found = functools.reduce(getattr, within.split("."), importlib.import_module(module))
    except AttributeError:
        close = difflib.get_close_matches(within, dir(sys.modules[module]), 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ImportError(f"{module} has no wrapper {within!r}{hint}") from None
    if not (isinstance(found, type) and issubclass(found, gymnasium.Wrapper)):
        raise TypeError(f"{name} is not a gymnasium.Wrapper")
    return found


def spaces(environment):
    """Return the observation and action spaces, or dm_env's specs, and whether to learn from the discounts."""
    discounted = isinstance(environment, FromDmEnv) and environment.discounted
    return environment.observation_space, environment.action_space, discounted


def outcome(environment, names, call, argument):
    """Reset or step an environment; return observation, reward, terminated, truncated, discount and the info's numbers.

    The discount is 1 except for dm_env. The info's numbers are a tuple; after a reset, they are all 0.

    Args:
      environment: the environment.
      names: names of the numbers in the info.
      call: "reset" or "step".
      argument: the seed of the reset, or the action of the step.
    """
    if call == "reset":
        observation, _ = parts(environment.reset(seed=argument), "reset", ("observation", "info"))
        return observation, 0.0, False, False, 1.0, (0.0,) * len(names)
    result = ("observation", "reward", "terminated", "truncated", "info")
    observation, reward, terminated, truncated, info = parts(environment.step(argument), "step", result)
    ends = flag(terminated, "terminated"), flag(truncated, "truncated")
    discount = environment.discount if isinstance(environment, FromDmEnv) else 1.0
    return observation, real(reward), *ends, discount, tuple(number(info, name) for name in names)


def parts(result, call, names):
    """Return the result of a call after checking that it is a tuple or list with an entry for each of `names`.

    Raises:
      TypeError: the result has another type or length.
    """
    if isinstance(result, (tuple, list)) and len(result) == len(names):
        return result
    found = f"{len(result)} values" if isinstance(result, (tuple, list)) else type(result).__name__
    raise TypeError(f"{call} must return ({', '.join(names)}), but it returned {found}")


def real(reward):
    """Convert a reward to a float; numbers that are not finite are accepted, and the run reports them.

    Raises:
      TypeError: the reward is not a number.
      ValueError: the reward is finite but too large for float32.
    """
    try:
        found = float("" if isinstance(reward, (str, bytes)) else reward)
    except (TypeError, ValueError):
        hint = "; combine several numbers with a gymnasium.RewardWrapper (wrappers=...)" * hasattr(reward, "shape")
        raise TypeError(f"reward must be a number, not {reward!r:.80}{hint}") from None
    if LARGEST < abs(found) < float("inf"):
        raise ValueError(f"the reward {found:g} is too large for float32; rescale it")
    return found


def flag(value, name):
    """Convert `terminated` or `truncated` to a bool.

    Raises:
      TypeError: the value is neither true nor false.
    """
    try:
        if value is not None and not isinstance(value, (str, bytes, dict, list, tuple, set)):
            return bool(value)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{name} must be true or false, not {value!r:.80}") from None


def number(info, name):
    """Return `info[name]` as a float.

    Raises:
      ValueError: the info has no such number; the message lists the names that it has.
    """
    try:
        return float(info[name])
    except (KeyError, TypeError, ValueError):
        found = f"{info[name]!r:.80}" if name in info else f"missing; info has {sorted(map(str, info))}"
        raise ValueError(f"info={name!r}: every step must report this number, but it is {found}") from None


class FromDmEnv:
    """A dm_env environment (Muldal et al., 2019) with Gymnasium's interface.

    A dm_env environment cannot be seeded after construction, so a reset with a seed makes a new one. Before the first
    reset, the specs are read from an environment with seed 0.

    Args:
      what: a function that makes the environment from `seed` and the options, or the name of a dm_control task.
      options: keyword arguments of the function, or options of the task.
    """

    metadata = {}

    def __init__(self, what, options):
        self._what, self._options, self.discount = what, options, 1.0  # the discount is the newest step's
        self._environment: Any = None

    @property
    def observation_space(self):
        return self._made().observation_spec()

    @property
    def action_space(self):
        return self._made().action_spec()

    @property
    def discounted(self):
        """True if the discount spec allows values other than 0 and 1; False for dm_control's suite."""
        spec = self._made().discount_spec()
        low, high = getattr(spec, "minimum", 0.0), getattr(spec, "maximum", 1.0)
        whole = spec.dtype.kind in "iub" or (low == high and high in (0.0, 1.0))
        return not (whole or isinstance(self._what, str))

    def reset(self, *, seed=None):
        if seed is not None:
            self.close()
        return self._made(seed or 0).reset().observation, {}

    def step(self, action):
        timestep = self._environment.step(action)
        terminated, truncated, self.discount = ending(timestep)
        if self.discount not in (0.0, 1.0) and not self.discounted:
            raise ValueError(f"the discount is {self.discount:g}, but discount_spec allows only 0 and 1")
        return timestep.observation, timestep.reward, terminated, truncated, self._info(timestep.observation)

    def close(self):
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()

    def _made(self, seed=0):
        if self._environment is None:
            import dm_env

            if isinstance(self._what, str):
                found = control_task(self._what, seed, self._options)
            else:
                found = self._what(seed=seed, **self._options)
            if not isinstance(found, dm_env.Environment):
                raise TypeError(f"the factory returned a {type(found).__name__}, not a dm_env.Environment")
            if getattr(found.reward_spec(), "shape", None) != ():
                raise TypeError(f"the reward_spec is {found.reward_spec()}; a single number is required")
            self._environment = found
        return self._environment

    def _info(self, observation):
        """Return the observation's entries by name, updated by `get_info()` if it exists, as in Acme's wrappers."""
        parts = observation if isinstance(observation, Mapping) else {}
        info = {name: x.item() if getattr(x, "size", 0) == 1 else x for name, x in parts.items()}
        return info | dict(getattr(self._environment, "get_info", dict)() or {})


def control_task(name, seed, options):
    """Make dm_control's task "domain-task"; `options` may be options of the task or in `CONTROL_OPTIONS`."""
    with warnings.catch_warnings(action="ignore"):  # glfw warns if there is no display
        from dm_control import suite

    of_all = {key: value for key, value in options.items() if key in CONTROL_OPTIONS}
    of_task = {key: value for key, value in options.items() if key not in CONTROL_OPTIONS}
    domain, _, task = name.partition("-")
    return suite.load(domain, task, of_task | {"random": seed}, of_all)


CONTROL_OPTIONS = ("control_timestep", "flat_observation", "legacy_step", "n_sub_steps")


def ending(timestep):
    """Return `(terminated, truncated, discount)` of a dm_env time step that follows an action.

    A last time step is terminated if its discount is 0, and truncated if it is above 0.

    Raises:
      ValueError: the discount is not from 0 to 1, or is 0 before the last step; or a new episode began before the last
        step.
    """
    if timestep.first():
        raise ValueError("step() began another episode before StepType.LAST; return it in the last step of an episode")
    try:
        discount = float(timestep.discount)
    except (TypeError, ValueError):
        discount = -1.0
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"the discount must be a number from 0 to 1, not {timestep.discount!r:.80}")
    if not timestep.last() and discount == 0.0:
        raise ValueError("the discount is 0 within an episode; set StepType.LAST where the episode ends")
    return timestep.last() and discount == 0.0, timestep.last() and discount > 0.0, discount


if __name__ == "__main__":
    main()
