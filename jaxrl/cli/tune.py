"""The command `jaxrl tune`, after its flags are read: a search, its table, and the command for the best settings."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.cli import multihost, table
from jaxrl.cli.fields import written
from jaxrl.cli.runs import ParsedCommand
from jaxrl.cli.sweep import PICTURES, read_space
from jaxrl.cli.training import TrainRequest, prepare
from jaxrl.sweeps.tune import tune as run_tune

# Flags that `train` also has, but that apply to another run or mean something else there.
_NOT_OF_THE_RUN = ("run_dir", "overwrite", "progress", "devices")


def tune(parsed: ParsedCommand) -> int:
    """Run the search described by the flags; return the exit code.

    Args:
      parsed: the parsed flags.
    """
    request = prepare("tune", parsed)
    arguments = {name: value for name, value in request.arguments.items() if name not in ("out", "seeds", "space")}
    seeds, out = request.arguments["seeds"], request.arguments["out"]
    space = searched_space(request)
    arguments |= {"env": request.env, "num_envs": request.num_envs, "seeds": seeds[0] if len(seeds) == 1 else seeds}
    result = run_tune(request.algo, **arguments, **space)
    print(result.table())
    print(f"best: {' '.join(train_command('tune', result.best, parsed.argv))}")
    if out is not None:
        _save(result, out)
    return 0


def searched_space(request: TrainRequest) -> dict[str, Any]:
    """Return the space of each field in `--space`: a range, a list, or a single value."""
    space = read_space(request.algo, "--space", request.arguments["space"])
    return {
        name: values[0] if isinstance(values, list) and len(values) == 1 else values for name, values in space.items()
    }


def train_command(command: str, settings: Mapping[str, Any], argv: Sequence[str]) -> list[str]:
    """Return the words of `jaxrl train` with these settings, and otherwise as in `argv`, the words of `command`."""
    of_train = {flag.name for flag in table.command_flags("train")}
    own = {flag.name for flag in table.command_flags(command)} - of_train
    words = _without({*own, *_NOT_OF_THE_RUN, *multihost.FLAGS, *settings}, argv)
    for name, value in settings.items():
        words += _flag(name.replace("_", "-"), value)
    return [shlex.quote(word) for word in ("jaxrl", "train", *words)]


def _without(names: set[str], argv: Sequence[str]) -> list[str]:
    """Return the words without the flags of these names and their values."""
    others: list[str] = []
    keeping = True
    for word in argv:
        if word.startswith("--"):
            name = word.removeprefix("--").partition("=")[0].replace("-", "_")
            keeping = name not in names and name.removeprefix("no_") not in names
        if keeping:
            others.append(word)
    return others


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", repr(value) if isinstance(value, float) else written(value)]


def _save(result, out):
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix in PICTURES:
        result.plot(out)
    else:
        out.write_text(result.table() + "\n", encoding="utf-8")
    print(f"written to {out}")
