"""Commands that do not train, as dataclasses whose fields are the flags."""

import dataclasses
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, dataclass_transform

from jaxrl.cli import table
from jaxrl.cli.flags import Flag, argument_flags, columns, first_line, parse, written
from jaxrl.cli.imports import Importing, found
from jaxrl.core.errors import ConfigError


@dataclass_transform(kw_only_default=True, frozen_default=True)
def command[T](cls: type[T]) -> type[T]:
    """Make a class a command: a frozen, keyword-only dataclass."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


@command
class Command(Importing):
    """A command whose fields are its flags.

    The help is read from the docstring of each command: a description, then the help of each field. A required field is
    None if its flag was not given.

    Attributes:
      positional: names of the fields that are positional arguments.
    """

    positional: ClassVar[Sequence[str]] = ()

    @classmethod
    def flags(cls, title: str) -> list[Flag]:
        """Return the flags, inherited ones last, in help section `title`; the table has some choices and defaults."""
        order = [name for base in cls.__mro__ for name in inspect.get_annotations(base)]
        known, flags = table.load()["values"], []
        for flag in argument_flags(cls).values():
            if allowed := known.get(flag.name):
                flag = dataclasses.replace(flag, default=written(allowed[0]), choices=tuple(allowed[1:] and allowed))
            flags.append(dataclasses.replace(flag, positional=flag.name in cls.positional, title=title))
        return sorted(flags, key=lambda flag: (not flag.positional, order.index(flag.name)))

    def checks(self) -> dict[str, Any]:
        """Return a dictionary of error messages about the values; each maps to a true value if the error applies."""
        return {}

    def execute(self) -> int | None:
        """Run the command and return the exit code, None for 0."""
        raise NotImplementedError

    def chosen(self, *names: str) -> dict[str, Any]:
        """Return the values of these fields, by name."""
        return {name: getattr(self, name) for name in names}


def run(name: str, place: str, argv: Sequence[str]) -> int:
    """Read a command line, run the command, and return the exit code.

    Args:
      name: the command as typed.
      place: module and name of the command's class.
      argv: the arguments after the command.

    Raises:
      ConfigError: arguments are invalid; the message lists all problems.
    """
    cls: type[Command] = found(place)
    flags = cls.flags(name)
    parsed, _, problems = parse(f"jaxrl {name}", first_line(cls), flags, argv)
    made = cls(**{flag.name: parsed.get(flag.name, flag.value) for flag in flags})
    required = [flag for flag in flags if flag.required]
    usage = " ".join([f"jaxrl {name}", *(flag.usage for flag in required)])
    problems += [f"{flag.usage} is missing: {usage}" for flag in required if not getattr(made, flag.name)]
    problems += [problem for problem, is_so in made.checks().items() if is_so]
    if problems:
        raise ConfigError(problems)
    return made.execute() or 0


# --- commands for existing runs ------------------------------------------------------------------------------------


@command
class OfRun(Command):
    """A command that reads a checkpoint of a run.

    Args:
      run: the run directory.
      step: step of the checkpoint; None: the newest.
      best: use the checkpoint with the highest evaluation.
    """

    positional = ("run",)
    run: Path
    step: int | None = None
    best: bool = False


@command
class OfRuns(Command):
    """A command that reads several runs.

    Args:
      runs: directories of runs, sweeps and searches.
    """

    positional = ("runs",)
    runs: tuple[Path, ...]


@command
class Plot(OfRuns):
    """Plot learning curves. Runs that differ only in their seed form one curve with a confidence interval.

    Args:
      out: file to write; its suffix sets the format.
      metric: metric to plot; None: the return.
    """

    out: Path = Path("learning_curves.png")
    metric: str | None = None

    def execute(self) -> None:
        from jaxrl.run.plotting import plot_runs

        plot_runs(self.runs, self.out, metric=self.metric)
        print(self.out)


@command
class Report(OfRuns):
    """Write an HTML report with scores, learning curves and the importance of settings. The file works offline.

    Args:
      out: file to write.
    """

    out: Path = Path("report.html")

    def execute(self) -> None:
        from jaxrl.sweeps.html_report import report

        print(report(self.runs, self.out))


# --- commands about jaxrl itself -----------------------------------------------------------------------------------


@command
class Envs(Command):
    """List the environments, or show the spaces and parameters of one.

    Args:
      suite: list only this suite; suite:name: show one environment.
      env_params: parameters of that environment, as key=value.
    """

    positional = ("suite",)
    suite: str | None = None
    env_params: tuple[str, ...] = ()

    @property
    def is_one(self) -> bool:
        """True if `suite` names one environment."""
        return self.suite is not None and ":" in self.suite.removesuffix(":")

    def checks(self) -> dict[str, Any]:
        return {"--env-params needs an environment: jaxrl envs SUITE:NAME": self.env_params and not self.is_one}

    def execute(self) -> None:
        if self.is_one:
            from jaxrl.cli.environment import describe

            print(describe(str(self.suite), self.env_params))
        else:
            print("\n".join(table.environments(self.suite and self.suite.removesuffix(":"))))


@command
class Algos(Command):
    """List the algorithms and the presets."""

    def execute(self) -> None:
        rows = {row[0]: row for row in table.load()["rows"]}
        if set(table.algorithms()) - set(rows):  # algorithms that a user registered
            from jaxrl.cli import describe

            rows |= {row[0]: row for row in describe.algorithm_rows()}
        presets = [
            (name, preset["algorithm"], preset["defaults"]["env"], re.split(r"\. (?=[A-Z])", preset["source"])[0])
            for name, preset in table.load()["presets"].items()
        ]
        print(columns([("algorithm", "experience", "actions", ""), *(rows[name] for name in sorted(rows))]))
        print("\n" + columns([("preset", "algorithm", "environment", "source"), *presets]))


@command
class Doctor(Command):
    """Check this machine and installation.

    Args:
      run_dir: directory for runs; must be writable.
      describe_device: only print a description of the first accelerator, for jaxrl compile --target FILE.json.
      out: file to write the description to; only with --describe-device.
    """

    run_dir: Path = Path("runs")
    describe_device: bool = False
    out: Path | None = None

    def checks(self) -> dict[str, Any]:
        return {"--out needs --describe-device": self.out is not None and not self.describe_device}

    def execute(self) -> int:
        from jaxrl.cli import doctor

        return doctor.describe_device(self.out) if self.describe_device else doctor.examine(self.run_dir)
