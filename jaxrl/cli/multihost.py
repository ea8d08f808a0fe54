"""`--distributed`: one command, started on every machine, as one run."""

import sys
import threading
from collections.abc import Mapping
from typing import Any

from jaxrl.cli import table
from jaxrl.cli.flags import Flag
from jaxrl.core.errors import ConfigError

_EXPLICIT = ("coordinator", "num_processes", "process_id")
_PATIENCE = 10.0  # seconds without a word, where others should arrive at about the same time
FLAGS = ("distributed", *_EXPLICIT)


def flags() -> list[Flag]:
    """What a command that may run in several processes is asked besides."""
    return table.command_flags("processes")


def problems(asked: Mapping[str, Any]) -> list[str]:
    """What is wrong with the values of `flags`, one line each."""
    given = {name: asked[name] for name in _EXPLICIT if asked[name] is not None}
    written = {name: f"--{name.replace('_', '-')}" for name in _EXPLICIT}
    if not given:
        return []
    from jaxrl.parallel.multihost import distributed

    found = distributed.problems(**given)
    if not asked["distributed"]:
        found.append(f"{', '.join(written[name] for name in given)}: only with --distributed")
    if len(given) < len(_EXPLICIT):
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
    from jaxrl.parallel.multihost import distributed

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
        from jaxrl.parallel.multihost import addresses

        where = f" at {place['coordinator']}"
        why = addresses.diagnose_connection(place["coordinator"], place["process_id"])
    why = why or "if none comes, see what they said"
    print(f"waiting for the other processes{where}; {why}", file=sys.stderr)
