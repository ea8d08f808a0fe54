"""The program of one worker process: environments of Gymnasium or dm_env, stepped as the other end of a pipe asks.

It is run as a script and imports nothing of jaxrl, hence no JAX: a worker starts in the time that its suite needs. Its
arguments are the file descriptors of the pipe, and of a lifeline that closes when the parent ends, however it ends.
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
    """Serves environments over a pipe until it is closed."""
    connection, lifeline = Connection(int(sys.argv[1])), int(sys.argv[2])
    leave_to_parent(signal.SIGINT, signal.SIGTERM)
    die_with(lifeline)
    environments = {}
    try:
        path, setup = connection.recv()
        sys.path[:] = path
        connection.send(prepared(environments, *setup))
        while (request := connection.recv()) is not None:
            for index, call, argument in request:
                connection.send(answer(*environments[index], index, call, argument))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone
    for environment, _ in environments.values():
        environment.close()


def leave_to_parent(*numbers: int) -> None:
    """Has these signals do nothing here: a scheduler may send them to every process of a job.

    What environments start has them as before, or it could not be ended: `exec` resets handlers (and would not reset
    SIG_IGN), a fork does not.
    """
    for number in numbers:
        before = signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=functools.partial(signal.signal, number, before))


def die_with(lifeline: int) -> None:
    """Has the kernel end this process when the other end of `lifeline` closes, whatever Python is doing then.

    With it go the processes that its environments started, which are of its group.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)  # which ends the process
    leader = os.getpgrp() == os.getpid()
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid() if leader else os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()  # `select.select` takes no descriptor of 1024 or more
    closed.register(lifeline, select.POLLIN)
    if closed.poll(0):  # before the kernel was told
        sys.exit(1)


LARGEST = 3.4028235677973366e38  # from here on a number becomes infinite in float32
RAISED = (Exception, SystemExit)  # what environments raise; `sys.exit` ends nothing but the environment


def prepared(environments, spec, indices):
    """Makes the environments; (None, their spaces), or (the traceback, None) if that fails."""
    try:
        spec, options, info = pickle.loads(spec)
        for index in indices:
            environments[index] = made(spec, options), info
        return None, spaces(environments[indices[0]][0])
    except RAISED:
        return traceback.format_exc(), None


def made(spec, options):
    """One environment: of a spec of Gymnasium's, of a function, or of what `FromDmEnv` takes, alone in a tuple."""
    if isinstance(spec, tuple):
        return FromDmEnv(*spec, options)
    import gymnasium

    options = dict(options)
    wrappers = options.pop("wrappers", ())
    if callable(spec):
        found = spec(**options)
        if not isinstance(found, gymnasium.Env):
            several = ", and num_envs=N makes many of it" if isinstance(found, gymnasium.vector.VectorEnv) else ""
            raise TypeError(f"it gives a {type(found).__name__}; what makes one gymnasium.Env is needed{several}")
    else:
        found = gymnasium.make(spec, disable_env_checker=True, **options)
    for name, arguments in wrappers:
        found = wrapper(name)(found, **arguments)
    return found


def wrapper(name):
    """The class "module:Class" of a wrapper, of `gymnasium.wrappers` where no module is named.

    Raises:
      ImportError, TypeError: there is none of this name, or it is no wrapper.
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
        raise TypeError(f"{name} is no gymnasium.Wrapper")
    return found


def spaces(environment):
    """Of observations and of actions; of dm_env its specs, and whether its discounts are to be learned from."""
    discounted = isinstance(environment, FromDmEnv) and environment.discounted
    return environment.observation_space, environment.action_space, discounted


def answer(environment, info, index, call, argument):
    """(index, None, outcome), or (index, traceback, None) if the environment raised."""
    try:
        return index, None, outcome(environment, info, call, argument)
    except RAISED:
        return index, traceback.format_exc(), None


def outcome(environment, names, call, argument):
    """Observation, reward, terminated, truncated after a reset with the seed, or a step with the action, `argument`.

    And dm_env's discount, else 1; and the numbers of these names in the step's info, zeros after a reset.
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
    """What a call returned, which has these parts.

    Raises:
      TypeError: it is no tuple of so many.
    """
    if isinstance(result, (tuple, list)) and len(result) == len(names):
        return result
    found = f"{len(result)} values" if isinstance(result, (tuple, list)) else type(result).__name__
    raise TypeError(f"{call} must return ({', '.join(names)}), and it returned {found}")


def real(reward):
    """A reward as a number that float32 holds, or that is not finite, of which the run tells.

    Raises:
      TypeError, ValueError: it is none.
    """
    if isinstance(reward, (str, bytes)):
        raise TypeError(f"reward must be a number, and it is {reward!r:.80}")
    try:
        found = float(reward)
    except (TypeError, ValueError):
        hint = "; make one number of several with a gymnasium.RewardWrapper (wrappers=...)" * hasattr(reward, "shape")
        raise TypeError(f"reward must be a number, and it is {reward!r:.80}{hint}") from None
    if LARGEST < abs(found) < float("inf"):
        raise ValueError(f"the reward {found:g} is none that float32 can hold")
    return found


def flag(value, name):
    """Whether an episode ends.

    Raises:
      TypeError, ValueError: it is neither true nor false.
    """
    if value is None or isinstance(value, (str, bytes, dict, list, tuple, set)):
        raise TypeError(f"{name} must be true or false, and it is {value!r:.80}")
    try:
        return bool(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be true or false, and it is {value!r:.80}") from None


def number(info, name):
    """One of the info's numbers.

    Raises:
      ValueError: there is none of this name; says which there are.
    """
    try:
        return float(info[name])
    except (KeyError, TypeError, ValueError):
        found = f"{info[name]!r:.80}" if name in info else f"missing; it has {sorted(map(str, info))}"
        raise ValueError(f"info={name!r}: every step must report this as a number, and it is {found}") from None


class FromDmEnv:
    """An environment of dm_env (Muldal et al., 2019), called as Gymnasium's are.

    dm_env knows no seeds: the environment is made anew where one is given, and before, with the seed 0, for its specs.

    Args:
      what: a function that makes it, from `seed` and the options; or the name of a task of dm_control's.
      options: by name.
    """

    metadata = {}

    def __init__(self, what, options):
        self._what, self._options, self.discount = what, options, 1.0  # of the newest step
        self._environment: Any = None

    @property
    def observation_space(self):
        return self._made().observation_spec()

    @property
    def action_space(self):
        return self._made().action_spec()

    @property
    def discounted(self):
        """Whether a discount may be another than 0 and 1, by its spec; those of dm_control's suite never are."""
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
            raise ValueError(f"its discount is {self.discount:g}, and its discount_spec has 0 and 1 alone")
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
                raise TypeError(f"its factory gives a {type(found).__name__}, and no dm_env.Environment")
            if getattr(found.reward_spec(), "shape", None) != ():
                raise TypeError(f"its rewards are {found.reward_spec()}; one number is taken")
            self._environment = found
        return self._environment

    def _info(self, observation):
        """What the observation has by name, and what `get_info` gives where it is there, as in Acme's wrappers."""
        parts = observation if isinstance(observation, Mapping) else {}
        info = {name: x.item() if getattr(x, "size", 0) == 1 else x for name, x in parts.items()}
        return info | dict(getattr(self._environment, "get_info", dict)() or {})


def control_task(name, seed, options):
    """dm_control's task "domain-task", with options of that task or of all."""
    with warnings.catch_warnings(action="ignore"):  # of glfw's, where there is no display
        from dm_control import suite

    of_all = {key: value for key, value in options.items() if key in CONTROL_OPTIONS}
    of_task = {key: value for key, value in options.items() if key not in CONTROL_OPTIONS}
    domain, _, task = name.partition("-")
    return suite.load(domain, task, of_task | {"random": seed}, of_all)


CONTROL_OPTIONS = ("control_timestep", "flat_observation", "legacy_step", "n_sub_steps")


def ending(timestep):
    """Whether a time step of dm_env is terminated, truncated (its last one; by a discount of 0, or more); the discount.

    Raises:
      ValueError: the discount is none, or 0 within an episode, or another episode began without an end.
    """
    if timestep.first():
        raise ValueError("step() began another episode, and the last one had no end: StepType.LAST must come before")
    try:
        discount = float(timestep.discount)
    except (TypeError, ValueError):
        discount = -1.0
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"its discount must be a number from 0 to 1, and it is {timestep.discount!r:.80}")
    if not timestep.last() and discount == 0.0:
        raise ValueError("its discount is 0 within an episode; what ends there has StepType.LAST")
    return timestep.last() and discount == 0.0, timestep.last() and discount > 0.0, discount


if __name__ == "__main__":
    main()
