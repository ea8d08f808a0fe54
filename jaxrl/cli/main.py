"""The command line: `jaxrl train`, `eval`, `render`, `plot` and the other `COMMANDS`.

Exit codes: 0; 1 if a run failed; 2 for bad input, reported before anything is compiled; 130, 143 and 129 after Ctrl-C,
SIGTERM and SIGHUP. Heavy modules are imported by the command that needs them.
"""

import atexit
import codecs
import contextlib
import gc
import io
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

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
from jaxrl.run.loop.timing import command_begins

_BAD_INPUT = (ConfigError, EnvironmentContractError, MissingExtraError, RunDirectoryError)
_EXAMPLE = "jaxrl train ppo --env gymnax:CartPole-v1 --total-steps 500000 --run-dir runs/cartpole"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit code.

    If `argv` is None, run the command line of the process and prepare for the exit of the process.
    """
    if argv is not None:
        return _exit_code(argv)
    interrupts.own()
    # Skip the final garbage collection of all imported objects, which takes about a second.
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
    """Return a replacement for characters missing from the encoding of a terminal or a pipe."""
    lacking = error.object[error.start : error.end].replace("±", "+-").replace("█", "#")
    return lacking.encode("ascii", "backslashreplace").decode(), error.end


def _exit_code(argv):
    """Run one command line and return the exit code."""
    try:
        with _plain_warnings():
            return _run(argv)
    except JaxrlError as error:
        if isinstance(error, EnvironmentFailedError) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)  # the traceback of the user's code
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        return _failed(2 if isinstance(error, _BAD_INPUT) else 1, *problems)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # jaxrl envs | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (AssertionError, RuntimeError) as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            advice = "reduce --num-envs, the size of the network or, with a replay buffer, --capacity"
            return _failed(1, f"out of device memory; {advice} ({str(error).splitlines()[0]})")
        if (problem := _without_device()) is None:
            raise
        return _failed(2, problem)
    except OSError as error:
        return _failed(1, str(error))


def _failed(code, *problems):
    for problem in problems:
        print(f"error: {escape_for_terminal(problem)}", file=sys.stderr)
    return code


def _without_device():
    """Return why JAX has no device, or None if that is not the cause of the error."""
    if "jax" not in sys.modules:
        return None
    from jaxrl.core.resources import device_problem

    return device_problem()


def _run(argv):
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0
    from jaxrl.cli import imports

    command, *rest = imports.import_modules(argv)
    if command == "help":
        return _run([*rest, "--help"])
    if command == "--version":
        from jaxrl.core.versions import own_version

        print(f"jaxrl {own_version()}")
        return 0
    if command not in COMMANDS:
        raise unknown("command", command, COMMANDS, "jaxrl --help lists them")
    from jaxrl.cli import table

    begin = imports.found("runs.begin" if command in table.load()["commands"] else "commands.run")
    return begin(command, COMMANDS[command][0], rest)


def _overview():
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name.ljust(width)}  {line}" for name, (_, line) in COMMANDS.items())
    begin = f"jaxrl help COMMAND lists a command's flags. To get started:\n\n  {_EXAMPLE}"
    return f"usage: jaxrl COMMAND ...\n\n{commands}\n\n{begin}"


@contextlib.contextmanager
def _plain_warnings():
    """Print warnings as one line each, without the source line."""

    def show(message, category, filename, lineno, file=None, line=None):
        with contextlib.suppress(OSError):  # for example, a closed terminal: the run must still be saved
            kind = "error" if issubclass(category, RunStoppedWarning) else "warning"
            print(f"{kind}: {escape_for_terminal(str(message))}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show  # ty: ignore[invalid-assignment]  # replaced as documented
        yield


# For each command, the module and name of its function or class, which is imported when the command runs, and one line
# of help.
COMMANDS = {
    "train": ("training.train", "train an algorithm on an environment; run the same command again to resume"),
    "compile": (
        "ahead.compile_",
        "compile and cache the programs that train would run with the same flags",
    ),
    "eval": ("evaluate.Evaluate", "evaluate a trained policy"),
    "render": (
        "evaluate.Render",
        "render episodes of a trained policy as a GIF, an MP4 or, for brax, an HTML page",
    ),
    "export": (
        "data.Export",
        "export a trained policy to a file that runs without jaxrl, or to a folder for sharing",
    ),
    "export-rlds": (
        "data.ExportRlds",
        "play episodes with a trained policy and export them as an RLDS dataset",
    ),
    "export-minari": (
        "data.ExportMinari",
        "play episodes with a trained policy and export them as a Minari dataset",
    ),
    "export-replay": ("data.ExportReplay", "export the episodes in a run's replay buffer as an RLDS dataset"),
    "dataset": ("data.Dataset", "report the contents of a dataset: jaxrl dataset info DIR"),
    "plot": ("commands.Plot", "plot the learning curves of runs"),
    "report": (
        "commands.Report",
        "write an HTML report on runs: scores, curves and the importance of settings",
    ),
    "sweep": ("sweep.sweep", "train over seeds and a grid of settings in one program"),
    "tune": ("sweep.tune", "search for the settings with the highest return: Bayesian, with pruning"),
    "pbt": ("sweep.pbt", "train a population; the worst members copy the best and perturb their settings"),
    "envs": ("commands.Envs", "list the environments, or show the parameters of one"),
    "algos": ("commands.Algos", "list the algorithms and presets"),
    "doctor": ("commands.Doctor", "check this machine and installation"),
}

if __name__ == "__main__":
    sys.exit(main())
