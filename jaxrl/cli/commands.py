"""The commands that begin runs: each reads its command line, and imports what computes only where all of it fits."""

from collections.abc import Sequence

from jaxrl.cli import multihost, runs


def train(argv: Sequence[str]) -> int:
    """`jaxrl train ALGORITHM [FLAGS]`; the exit code."""
    if runs.asks_for_help(argv):
        return runs.print_help("train")
    given = runs.read("train", argv)
    from jaxrl.cli import finished_run

    if finished_run.print_finished_run(given):
        return 0
    if (code := multihost.start("train", argv, given.values["run"])) is not None:
        return code
    from jaxrl.cli import training
    from jaxrl.parallel.multihost.distributed import report_errors

    with report_errors():
        return training.train(given)


def compile_(argv: Sequence[str]) -> int:
    """`jaxrl compile ALGORITHM [FLAGS]`; the exit code."""
    if runs.asks_for_help(argv):
        return runs.print_help("compile")
    given = runs.read("compile", argv)
    if (code := multihost.start("compile", argv, given.values["run"])) is not None:
        return code
    from jaxrl.cli import ahead
    from jaxrl.parallel.multihost.distributed import report_errors

    with report_errors():
        return ahead.compile_(given)


def sweep(argv: Sequence[str]) -> int:
    """`jaxrl sweep ALGORITHM [FLAGS]`; the exit code."""
    if runs.asks_for_help(argv):
        return runs.print_help("sweep")
    given = runs.read("sweep", argv)
    if (code := multihost.start("sweep", argv, given.values["run"])) is not None:
        return code
    from jaxrl.cli import sweep
    from jaxrl.parallel.multihost.distributed import report_errors

    with report_errors():
        return sweep.sweep(given)


def tune(argv: Sequence[str]) -> int:
    """`jaxrl tune ALGORITHM [FLAGS]`; the exit code."""
    if runs.asks_for_help(argv):
        return runs.print_help("tune")
    given = runs.read("tune", argv)
    from jaxrl.cli import tune

    return tune.tune(given, argv)
