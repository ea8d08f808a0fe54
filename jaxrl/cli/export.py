"""The command `jaxrl export RUN --to FORMAT --out PATH`: a policy as a file that runs without jaxrl."""

import re
from collections.abc import Sequence
from typing import Any

from jaxrl.cli import imports, table
from jaxrl.cli.flags import BOOL, CHECKPOINT, PATH, TEXT, Flag, Group, parse
from jaxrl.core.errors import ConfigError


def export(argv: Sequence[str]) -> int:
    """Run `jaxrl export RUN --to FORMAT --out PATH [FLAGS]`; return the exit code."""
    formats = tuple(table.load()["constants"]["export_formats"])
    flags = [
        Flag("run", PATH, None, "the run directory", hint="required", positional=True),
        Flag("out", PATH, None, "the file to write; of safetensors the folder, which must not exist", hint="required"),
        Flag("to", TEXT, formats[0], "format", choices=formats),
        Flag("sample", BOOL, False, "sample actions as in training, by a key; only stablehlo"),
        *CHECKPOINT,
        imports.FLAG,
    ]
    what = "Writes a trained policy as a file that runs without jaxrl, or as a folder to share."
    values, problems = parse("jaxrl export", what, [Group("export", flags)], argv)
    arguments: dict[str, Any] = values["export"]
    if arguments["run"] is None:
        problems.append("no run directory: jaxrl export RUN --out PATH")
    if arguments["out"] is None:
        problems.append("no output given: --out PATH")
    if problems:
        raise ConfigError(problems)
    from jaxrl.export.policies import export_policy

    how = {name: arguments[name] for name in ("to", "sample", "step", "best")}
    try:
        print(export_policy(arguments["run"], arguments["out"], **how))
    except ConfigError as error:
        raise ConfigError([_with_flags(problem) for problem in error.problems]) from error
    return 0


def _with_flags(problem):
    """Return a problem with flags in place of arguments: --to 'numpy' for to='numpy', --best for best=True."""

    def flag(found):
        name = "out" if found[1] == "path" else found[1]
        return f"--{name}" if found[2] else f"--{name} "

    return re.sub(r"\b(path|to|step|sample|best)=(True\b|(?=['\d-]))", flag, problem)
