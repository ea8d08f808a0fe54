"""The command line: `jaxrl train`, `eval`, `render`, `plot` and the other `COMMANDS`.

Exit codes: 0; 1 if a run failed; 2 for bad input, reported before anything is compiled; 130, 143 and 129 after Ctrl-C,
SIGTERM and SIGHUP. Heavy modules are imported by the command that needs them.
"""

import atexit
import codecs
import contextlib
import gc
import importlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxrl.core import interrupts
from jaxrl.core.errors import (
    ConfigError,
    EnvironmentContractError,
    EnvironmentFailedError,
    JaxrlError,
    MissingExtraError,
    RunDirectoryError,
    RunStoppedWarning,
    unknown,
)
from jaxrl.core.files import escape_for_terminal
from jaxrl.run.timing import command_begins

_BAD_INPUT = (ConfigError, EnvironmentContractError, MissingExtraError, RunDirectoryError)
_EXAMPLE = "jaxrl train ppo --env gymnax:CartPole-v1 --total-steps 500000 --run-dir runs/cartpole"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit code.

    None: the words of the process, which ends afterwards.
    """
    if argv is not None:
        return _exit_code(argv)
    interrupts.own()
    # Skip Python's last search for cycles through everything imported, which takes as long as a second of training.
    atexit.register(gc.freeze)
    command_begins()
    codecs.register_error("jaxrl", _spelled)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="jaxrl")
    try:
        return interrupts.returned(_exit_code(sys.argv[1:]))
    except SystemExit as ended:
        interrupts.returned(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        raise
    except BaseException:
        interrupts.returned(1)
        raise


def _spelled(error):
    """Return a replacement for characters that the encoding of a terminal or a pipe lacks."""
    lacking = error.object[error.start : error.end].replace("±", "+-").replace("█", "#")
    return lacking.encode("ascii", "backslashreplace").decode(), error.end


def _exit_code(argv):
    """Run one command line and return the exit code."""
    try:
        with _plain_warnings():
            return _run(argv)
    except JaxrlError as error:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        if isinstance(error, EnvironmentFailedError) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)  # a traceback of the user's own code
        for problem in problems:
            print(f"error: {escape_for_terminal(problem)}", file=sys.stderr)
        return 2 if isinstance(error, _BAD_INPUT) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # jaxrl envs | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (AssertionError, RuntimeError) as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            if (problem := _without_device()) is None:
                raise
            print(f"error: {problem}", file=sys.stderr)
            return 2
        advice = "use fewer --num-envs, a smaller network or, for replay, a smaller --capacity"
        print(f"error: the device is out of memory; {advice} ({str(error).splitlines()[0]})", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {escape_for_terminal(str(error))}", file=sys.stderr)
        return 1


def _without_device():
    """Return why JAX has no device, if that is the cause of the error."""
    if "jax" not in sys.modules:
        return None
    from jaxrl.core.devices import device_problem

    return device_problem()


def _run(argv):
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0
    from jaxrl.cli.imports import import_modules

    command, *rest = import_modules(argv)
    if command == "help":
        return _run([*rest, "--help"])
    if command == "--version":
        from jaxrl.core.versions import own_version

        print(f"jaxrl {own_version()}")
        return 0
    if command not in COMMANDS:
        raise unknown("command", command, COMMANDS, "jaxrl --help lists them")
    return COMMANDS[command][0](rest)


def _overview():
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join(
        ["usage: jaxrl COMMAND ...", "", *lines, "", "jaxrl help COMMAND lists a command's flags. To begin with:", ""]
        + [f"  {_EXAMPLE}"]
    )


@contextlib.contextmanager
def _plain_warnings():
    """Print warnings as one line each, without the source line."""

    def show(message, category, filename, lineno, file=None, line=None):
        with contextlib.suppress(OSError):  # for example a closed terminal: the run must still save
            kind = "error" if issubclass(category, RunStoppedWarning) else "warning"
            print(f"{kind}: {escape_for_terminal(str(message))}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show  # ty: ignore[invalid-assignment]  # replaced as documented
        yield


# --- the commands; heavy modules are imported by the one that needs them -------------------------------------------


def _command(module: str, name: str) -> Callable[[Sequence[str]], int]:
    """Return the command `name` of a module of `jaxrl.cli`, which is imported when the command runs."""
    return lambda argv: getattr(importlib.import_module(f"jaxrl.cli.{module}"), name)(argv)


def _begins(command: str) -> Callable[[Sequence[str]], int]:
    """Return a command that begins runs."""
    return lambda argv: importlib.import_module("jaxrl.cli.runs").begin(command, argv)


def _of_runs(command, what, argv, *flags):
    """Return the arguments of a command about existing runs.

    Raises:
      ConfigError: there are no runs, or the flags are wrong.
    """
    from jaxrl.cli import imports
    from jaxrl.cli.flags import PATH, Flag, Group, parse

    runs = Flag("runs", PATH, (), "run directories, sweeps and searches", hint="required", many=True, positional=True)
    values, problems = parse(f"jaxrl {command}", what, [Group(command, [runs, *flags, imports.FLAG])], argv)
    arguments = values[command]
    if not arguments["runs"]:
        problems.append(f"no runs: jaxrl {command} RUN ...")
    if problems:
        raise ConfigError(problems)
    return arguments


def _plot(argv: Sequence[str]) -> int:
    from jaxrl.cli.flags import PATH, TEXT, Flag, optional

    arguments = _of_runs(
        "plot",
        "Draws learning curves; runs that differ only in their seed become one curve with an interval.",
        argv,
        Flag("out", PATH, Path("learning_curves.png"), "file to write; its suffix sets the format"),
        Flag("metric", optional(TEXT), None, "metric to draw; None: the return"),
    )
    from jaxrl.run.plotting import plot_runs

    plot_runs(arguments["runs"], arguments["out"], metric=arguments["metric"])
    print(arguments["out"])
    return 0


def _report(argv: Sequence[str]) -> int:
    from jaxrl.cli.flags import PATH, Flag

    arguments = _of_runs(
        "report",
        "Writes one HTML file with scores, learning curves, and which settings matter; it needs no network.",
        argv,
        Flag("out", PATH, Path("report.html"), "file to write"),
    )
    from jaxrl.sweeps.report import report

    print(report(arguments["runs"], arguments["out"]))
    return 0


def _envs(argv: Sequence[str]) -> int:
    from jaxrl.cli import imports
    from jaxrl.cli.flags import TEXT, Flag, Group, parse

    flags = [
        Flag("suite", TEXT, None, "only this suite; suite:name: one environment", positional=True),
        Flag("env_params", TEXT, (), "parameters of that environment, as key=value", many=True),
        imports.FLAG,
    ]
    what = "Lists the environments, or the spaces and parameters of one."
    values, problems = parse("jaxrl envs", what, [Group("envs", flags)], argv)
    suite, words = values["envs"]["suite"], values["envs"]["env_params"]
    one = suite is not None and ":" in suite.removesuffix(":")
    if words and not one:
        problems.append("--env-params needs an environment: jaxrl envs SUITE:NAME")
    if problems:
        raise ConfigError(problems)
    if one:
        from jaxrl.cli.environment import describe

        print(describe(suite, words))
        return 0
    from jaxrl.cli.table import environments

    print("\n".join(environments(None if suite is None else suite.removesuffix(":"))))
    return 0


def _algos(argv: Sequence[str]) -> int:
    from jaxrl.cli import imports
    from jaxrl.cli.flags import Group, parse

    parse("jaxrl algos", "Lists the algorithms and the presets.", [Group("algos", [imports.FLAG])], argv)
    from jaxrl.cli.lists import algorithm_table, preset_table

    print(algorithm_table() + "\n\n" + preset_table())
    return 0


def _doctor(argv: Sequence[str]) -> int:
    from jaxrl.cli.flags import BOOL, PATH, Flag, Group, optional, parse

    what = "print the first accelerator's description and check nothing; jaxrl compile --target FILE.json takes it"
    flags = [
        Flag("run_dir", PATH, Path("runs"), "directory for runs; checked to be writable"),
        Flag("describe_device", BOOL, False, what),
        Flag("out", optional(PATH), None, "with --describe-device: also write the description to this file"),
    ]
    values, problems = parse("jaxrl doctor", "Checks this machine and installation.", [Group("doctor", flags)], argv)
    arguments = values["doctor"]
    if arguments["out"] is not None and not arguments["describe_device"]:
        problems.append("--out needs --describe-device")
    if problems:
        raise ConfigError(problems)
    from jaxrl.cli import doctor

    if arguments["describe_device"]:
        return doctor.describe_device(arguments["out"])
    return doctor.examine(arguments["run_dir"])


# By name: the command, and one line of help.
COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (_begins("train"), "train an algorithm on an environment; the same command again resumes"),
    "compile": (
        _begins("compile"),
        "compile what train with the same flags would compile, and keep it for that run",
    ),
    "eval": (_command("evaluate", "evaluate"), "play episodes with a trained policy"),
    "render": (
        _command("evaluate", "render"),
        "draw episodes of a trained policy: a GIF, an MP4 or, of brax, an HTML page",
    ),
    "export": (
        _command("export", "export"),
        "write a trained policy as a file that runs without jaxrl, or as a folder to share",
    ),
    "export-rlds": (
        _command("data", "export_rlds"),
        "play episodes with a trained policy and write them as an RLDS dataset",
    ),
    "export-minari": (
        _command("data", "export_minari"),
        "play episodes with a trained policy and write them as a Minari dataset",
    ),
    "export-replay": (
        _command("data", "export_replay"),
        "write the episodes in a run's replay buffer as an RLDS dataset",
    ),
    "dataset": (_command("data", "dataset"), "report what a dataset contains: jaxrl dataset info DIR"),
    "plot": (_plot, "draw the learning curves of runs"),
    "report": (_report, "write one HTML file about runs: scores, curves, and which settings matter"),
    "sweep": (_begins("sweep"), "train over seeds and a grid of settings in one program"),
    "tune": (_begins("tune"), "search settings for the highest return: Bayesian, with pruning"),
    "pbt": (_begins("pbt"), "train a population in which the worst copy the best and vary their settings"),
    "envs": (_envs, "list the environments, or the parameters of one"),
    "algos": (_algos, "list the algorithms and presets"),
    "doctor": (_doctor, "check this machine and installation"),
}

if __name__ == "__main__":
    sys.exit(main())
