"""`--distributed`: one command, started on every machine, as one run."""

import sys
import threading
from collections.abc import Mapping
from typing import Any

from jaxrl.cli.flags import Flag, documented
from jaxrl.core.errors import ConfigError
from jaxrl.parallel.multihost import addresses, distributed

_EXPLICIT = ("coordinator", "num_processes", "process_id")
_PATIENCE = 10.0  # seconds without a word, where others should arrive at about the same time
FLAGS = ("distributed", *_EXPLICIT)


def flags() -> list[Flag]:
    """What a command that may run in several processes is asked besides."""
    help_ = documented(distributed.initialize)
    what = (
        "this process is one of several of one run, all started with this command; TPU pods, Slurm, Open MPI and "
        "Kubernetes are detected, elsewhere set the next three flags"
    )
    return [
        Flag("distributed", bool, False, what),
        Flag("coordinator", str | None, None, help_["coordinator"]),
        Flag("num_processes", int | None, None, help_["num_processes"]),
        Flag("process_id", int | None, None, help_["process_id"]),
    ]


def problems(asked: Mapping[str, Any]) -> list[str]:
    """What is wrong with the values of `flags`, one line each."""
    given = {name: asked[name] for name in _EXPLICIT if asked[name] is not None}
    written = {name: f"--{name.replace('_', '-')}" for name in _EXPLICIT}
    found = distributed.problems(**given)
    if given and not asked["distributed"]:
        found.append(f"{', '.join(written[name] for name in given)}: only with --distributed")
    if given and len(given) < len(_EXPLICIT):
        missing = ", ".join(written[name] for name in _EXPLICIT if name not in given)
        found.append(f"{missing}: missing; give all three, or none of them where the cluster is detected")
    return found


def join(asked: Mapping[str, Any]) -> int:
    """Joins the other processes if that was asked for; how many there are. Before JAX is asked for its devices.

    Raises:
      ConfigError: no cluster was detected; versions differ between processes.
    """
    if not asked["distributed"]:
        return 1
    if found := problems(asked):
        raise ConfigError(found)
    place = {name: asked[name] for name in _EXPLICIT}
    note = threading.Timer(_PATIENCE, _say_what_is_awaited, [place])
    note.daemon = True
    note.start()
    try:
        return distributed.initialize(**place)
    finally:
        note.cancel()


def _say_what_is_awaited(place):
    where, why = "", None
    if place["coordinator"] is not None:
        where = f" at {place['coordinator']}"
        why = addresses.diagnose_connection(place["coordinator"], place["process_id"])
    why = why or "if none comes, see what they said"
    print(f"waiting for the other processes{where}; {why}", file=sys.stderr)
