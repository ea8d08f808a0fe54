"""The commands that begin runs: each reads its command line, and imports JAX only if all of it is valid."""

from collections.abc import Callable, Sequence

from jaxrl.cli import multihost, runs
from jaxrl.cli.runs import ParsedCommand


def train(argv: Sequence[str]) -> int:
    """Run `jaxrl train ALGORITHM [FLAGS]`; return the exit code."""

    def work(parsed):
        from jaxrl.cli import training

        return training.train(parsed)

    return _begin("train", argv, work)


def compile_(argv: Sequence[str]) -> int:
    """Run `jaxrl compile ALGORITHM [FLAGS]`; return the exit code."""

    def work(parsed):
        from jaxrl.cli import ahead

        return ahead.compile_(parsed)

    return _begin("compile", argv, work)


def sweep(argv: Sequence[str]) -> int:
    """Run `jaxrl sweep ALGORITHM [FLAGS]`; return the exit code."""

    def work(parsed):
        from jaxrl.cli import sweep

        return sweep.sweep(parsed)

    return _begin("sweep", argv, work)


def pbt(argv: Sequence[str]) -> int:
    """Run `jaxrl pbt ALGORITHM [FLAGS]`; return the exit code."""

    def work(parsed):
        from jaxrl.cli import pbt

        return pbt.pbt(parsed, argv)

    return _begin("pbt", argv, work)


def tune(argv: Sequence[str]) -> int:
    """Run `jaxrl tune ALGORITHM [FLAGS]`; return the exit code."""
    if runs.asks_for_help(argv):
        return runs.print_help("tune")
    parsed = runs.read("tune", argv)
    from jaxrl.cli import tune

    return tune.tune(parsed, argv)


def _begin(command: str, argv: Sequence[str], work: Callable[[ParsedCommand], int]) -> int:
    """Start the processes of the run, or do its work; return the exit code."""
    if runs.asks_for_help(argv):
        return runs.print_help(command)
    parsed = runs.read(command, argv)
    if (code := multihost.start(command, argv, parsed.values["run"])) is not None:
        return code
    from jaxrl.parallel.multihost.distributed import report_errors

    with report_errors():
        return work(parsed)
