"""The flags `--launch` and `--distributed`, which run one command in several processes."""

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.cli.flags import option
from jaxrl.core.errors import ConfigError
from jaxrl.parallel.multihost import launch
from jaxrl.parallel.multihost.launch import Cluster, Several
from jaxrl.parallel.multihost.place import own_place

_EXPLICIT = ("coordinator", "num_processes", "process_id")
_PATIENCE = 10.0  # seconds to wait before printing a message; processes should start at about the same time
FLAGS = ("launch", "distributed", *_EXPLICIT)


def problems(run: Mapping[str, Any], command: str = "train") -> list[str]:
    """Return the problems with the values of `FLAGS` for a command, one line per problem."""
    try:
        how = launch.parse(run["launch"])
    except ConfigError as error:
        return [f"--launch: {problem}" for problem in error.problems]
    found = [f"--launch: {problem}" for problem in launch.problems(how)]
    several, typed = how if isinstance(how, Several) else None, f"--launch {run['launch']}"
    if command == "tune" and (run["distributed"] or run["launch"] != "here"):
        found.append("--launch and --distributed cannot be used with tune; for parallel trials, use --backend ray")
    if run["distributed"] and several:
        found.append(f"--distributed cannot be used with {typed}, which starts the processes itself")
    if several and several.restarts > 0 and run.get("run_dir") is None:
        found.append(f"{typed} needs --run-dir, since a restart resumes from its newest checkpoint")
    if several and several.evaluators > 0:
        if command in ("sweep", "pbt", "compile"):
            what = "an evaluator needs the checkpoints of jaxrl train; remove evaluators"
            found.append(f"{typed} cannot be used with {command}; {what}")
        elif command == "train" and run["run_dir"] is None:
            found.append(f"{typed} needs --run-dir, where the evaluator finds the checkpoints")
    one = several.count == 1 if several else run["num_processes"] == 1 or not _joins(run, how)
    if run.get("error_buffer") is not None and not one:
        found.append("--error-buffer cannot be used with several processes (--launch, --distributed)")
    explicit = {name: run[name] for name in _EXPLICIT if run[name] is not None}
    if not explicit:
        return found
    from jaxrl.parallel.multihost import distributed

    found += distributed.problems(**explicit)
    if not _joins(run, how):
        found.append(f"{', '.join(map(option, explicit))} can only be used with --distributed")
    if len(explicit) < len(_EXPLICIT):
        missing = ", ".join(option(name) for name in _EXPLICIT if name not in explicit)
        found.append(f"{missing}: missing; give all three flags, or none if the cluster is detected")
    return found


def is_one_of_several(run: Mapping[str, Any]) -> bool:
    """Return whether this process is one of several in a run, by the values of `FLAGS` and the way it was started."""
    return own_place() is not None or _joins(run, launch.parse(run["launch"]))


def _joins(run, how):
    return run["distributed"] or isinstance(how, Cluster)


def start(command: str, argv: Sequence[str], run: Mapping[str, Any]) -> int | None:
    """Start the processes requested by `--launch`, wait for them, and return the exit code.

    Return None if the command runs in this process.

    Args:
      command: the command of jaxrl.
      argv: its arguments.
      run: the values of `FLAGS`.
    """
    how = launch.parse(run["launch"])
    if not isinstance(how, Several) or own_place() is not None:
        return None
    again = ["--no-overwrite"] if run.get("overwrite") else []  # a restart resumes the run
    return launch.run_processes([sys.executable, "-m", "jaxrl", command, *argv], how, again)


def join(run: Mapping[str, Any]) -> int:
    """Join the other processes, if requested, and return the number of processes.

    Call this before JAX initializes its devices.

    Raises:
      ConfigError: no cluster was detected, or versions differ between processes.
    """
    if not is_one_of_several(run):
        return 1
    if found := problems(run):
        raise ConfigError(found)
    from jaxrl.parallel.multihost import distributed

    own = own_place()
    place = [run[name] for name in _EXPLICIT] if own is None else [own.coordinator, own.num_processes, own.process_id]
    note = threading.Timer(_PATIENCE, _say_what_is_awaited, [place[0], place[2]])
    note.daemon = True
    note.start()
    try:
        return distributed.initialize(*place) if own is None else distributed.join(own)
    finally:
        note.cancel()


def _say_what_is_awaited(coordinator, process_id):
    where, why = "", None
    if coordinator is not None:
        from jaxrl.parallel.multihost import addresses

        where = f" at {coordinator}"
        why = addresses.diagnose_connection(coordinator, process_id)
    why = why or "if none connects, check their output"
    print(f"waiting for the other processes{where}; {why}", file=sys.stderr)
