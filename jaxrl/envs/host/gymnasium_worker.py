"""The program of one worker process: Gymnasium environments, stepped as the other end of a pipe asks.

It is run as a script and imports nothing of jaxrl, hence no JAX: a worker starts in the time that gymnasium needs. Its
arguments are the file descriptors of the pipe, and of a lifeline that closes when the parent ends, however it ends.
"""

import fcntl
import functools
import os
import pickle
import select
import signal
import sys
import traceback
from multiprocessing.connection import Connection


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
        import gymnasium

        spec, options, info = pickle.loads(spec)
        for index in indices:
            environments[index] = gymnasium.make(spec, disable_env_checker=True, **options), info
        return None, spaces(environments[indices[0]][0])
    except RAISED:
        return traceback.format_exc(), None


def spaces(environment):
    """Of observations and of actions."""
    return environment.observation_space, environment.action_space


def answer(environment, info, index, call, argument):
    """(index, None, outcome), or (index, traceback, None) if the environment raised."""
    try:
        return index, None, outcome(environment, info, call, argument)
    except RAISED:
        return index, traceback.format_exc(), None


def outcome(environment, names, call, argument):
    """Observation, reward, terminated, truncated after a reset with the seed, or a step with the action, `argument`.

    And the numbers of these names in the step's info; zeros after a reset.
    """
    if call == "reset":
        return environment.reset(seed=argument)[0], 0.0, False, False, (0.0,) * len(names)
    observation, reward, terminated, truncated, info = environment.step(argument)
    ends = flag(terminated, "terminated"), flag(truncated, "truncated")
    return observation, real(reward), *ends, tuple(number(info, name) for name in names)


def real(reward):
    """A reward as a number that float32 holds, or that is not finite, of which the run tells.

    Raises:
      TypeError, ValueError: it is none.
    """
    if isinstance(reward, (str, bytes)):
        raise TypeError(f"reward must be a number, and it is {reward!r:.80}")
    found = float(reward)
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
    return bool(value)


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


if __name__ == "__main__":
    main()
