import contextlib
import io
import os
import pty
import re
import subprocess
import sys

import pytest
from helpers.patience import Clock
from rich.console import Console

from jaxrl.run.loop import progress
from jaxrl.run.loop.progress import ProgressBar


def plain(**options):
    out, clock = io.StringIO(), Clock()
    return ProgressBar(console=Console(file=out, width=100), interval=5.0, clock=clock, **options), out, clock


def test_lines_now_and_then_where_there_is_no_terminal():
    progress, out, clock = plain()
    progress.start(1_000_000, initial=100_000)
    for step in range(200_000, 1_000_001, 100_000):
        clock.now += 1.0
        progress.update(step, {"train/return_mean": step / 1e5, "train/loss": float("nan")})
    progress.close()
    progress.close()
    lines = out.getvalue().splitlines()
    assert lines == [
        "200,000 / 1,000,000 steps  100,000 steps/s  return 2  00:08 left",
        "700,000 / 1,000,000 steps  100,000 steps/s  return 7  00:03 left",
        "1,000,000 / 1,000,000 steps  100,000 steps/s  return 10  00:00 left",
    ]


def test_the_evaluation_return_is_shown_where_there_is_no_other_and_units_are_named():
    progress, out, clock = plain(unit="episodes")
    progress.start(7200 * 4)
    clock.now += 4.0
    progress.update(4, {"evaluation/return_mean": 1.5})
    progress.close()
    assert out.getvalue() == "4 / 28,800 episodes  1 episodes/s  return 1.5  7:59:56 left\n"


def test_a_line_that_says_nothing_new_is_not_printed():
    progress, out, clock = plain()
    progress.start(300, timed=True)
    for step, metrics in (
        (100, {"steps_per_second": 10.0}),
        (100, {"evaluation/length_mean": 9.0}),
        (100, {}),
        (200, {}),
    ):
        clock.now += 6.0
        progress.update(step, metrics)
    progress.close()
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["100 / 300 steps", "200 / 300 steps"]


def test_a_bar_in_a_terminal_and_the_cursor_back_after_an_exception():
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    with pytest.raises(ZeroDivisionError), ProgressBar(console=console, clock=clock) as progress:
        progress.start(1000)
        clock.now += 1.0
        progress.update(500, {"train/return_mean": 21.5})
        progress.note("[saved] checkpoint 500")
        raise ZeroDivisionError
    text = out.getvalue()
    assert "500 / 1,000 steps  500 steps/s  return 21.5  00:01 left" in text
    assert "[saved] checkpoint 500" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor hidden, and shown again


ROW = {"train/return_mean": 21.5, "update/policy_loss": -0.01, "update/approximate_kl": 2e-3, "update/updates": 7.0}


def tables(out):
    """Return the titles of the tables, and the words of the last one."""
    titles = re.findall(r"╭─* (.*?) ─*╮", out.getvalue())
    return titles, re.split(r"[\s│]{2,}", out.getvalue().rpartition("╭")[2].partition("╰")[0])


def test_a_table_of_metrics_in_a_terminal_at_every_tenth_after_the_evaluation_of_its_step():
    out, clock = io.StringIO(), Clock()
    progress = ProgressBar(console=Console(file=out, force_terminal=True, width=100, color_system=None), clock=clock)
    progress.start(1000)
    for step in range(50, 1001, 50):
        clock.now += 1.0
        progress.report(step, ROW)
        if step % 100 == 0:
            progress.report(step, {"evaluation/return_mean": float(step)})
    progress.close()
    titles, words = tables(out)
    assert titles == [f"{step:,} / 1,000 steps" for step in range(100, 1001, 100)]
    assert {"evaluation return", "1000", "policy loss", "-0.01", "approximate kl", "0.002"} <= set(words)
    assert {"steps/s", "50", "time elapsed", "00:20", "time left", "00:00"} <= set(words) and "updates" not in words


def test_a_table_for_every_row_if_verbose_and_none_elsewhere_outside_of_terminals():
    for verbose, count in ((False, 0), (True, 3)):
        progress, out, _ = plain(verbose=verbose)
        progress.start(1000)
        for step in (1, 2, 3):
            progress.report(step, ROW)
        progress.close()
        assert len(tables(out)[0]) == count


def test_the_cursor_is_back_when_the_process_ends_without_close():
    script = "from jaxrl.cli.imports import announce_jax; announce_jax()\n"
    script += "from jaxrl.run.loop.progress import ProgressBar\n"
    script += "p = ProgressBar(); p.start(10); p.update(5); raise SystemExit(3)"
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    child = subprocess.run([sys.executable, "-c", script], stderr=follower, env=environment)
    os.close(follower)
    read = b""
    with contextlib.suppress(OSError):  # which says that all was read, as whoever wrote is gone
        while part := os.read(leader, 65536):  # the system hands it over in pieces
            read += part
    shown = read.decode()
    os.close(leader)
    assert child.returncode == 3
    assert shown.startswith("Importing JAX ...") and "5 / 10 steps" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_one_changing_line_in_a_notebook(monkeypatch):
    display = pytest.importorskip("IPython.display")
    shown = []

    class Handle:
        def update(self, data, *, raw):
            shown.append(data)

    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(display, "display", lambda data, raw, display_id: shown.append(data) or Handle())
    progress = ProgressBar(console=Console(file=io.StringIO(), force_jupyter=True), clock=Clock())
    progress.start(10)
    progress.update(5)
    progress.close()
    assert shown == [{"text/plain": f"{step} / 10 steps"} for step in (0, 5, 5)], "without quotes"
    progress.report(6, ROW)
    progress._show(last=True)
    line, table = shown[-1]["text/plain"].split("\n", 1)
    assert line.startswith("6 / 10 steps") and "policy loss" in table


def test_the_time_left_is_of_the_loop_alone_once_it_is_known():
    """The first chunk compiles for a minute, and an evaluation takes as long as the chunk before it."""
    progress, out, clock = plain()
    progress.start(100_000, timed=True, phase="compiling")
    for step, seconds, metrics in (
        (1_000, 60.0, {}),
        (11_000, 10.0, {"steps_per_second": 1000.0}),
        (11_000, 10.0, {"evaluation/return_mean": 3.0}),
        (21_000, 10.0, {"steps_per_second": 1000.0}),
    ):
        clock.now += seconds
        progress.update(step, metrics)
    progress.close()
    assert out.getvalue().splitlines() == [
        "compiling",
        "1,000 / 100,000 steps",
        "11,000 / 100,000 steps  1,000 steps/s  01:29 left",
        "11,000 / 100,000 steps  1,000 steps/s  return 3  01:29 left",
        "21,000 / 100,000 steps  1,000 steps/s  return 3  01:19 left",
    ]


def test_the_speed_is_of_all_recent_steps_together():
    """Not the mean of speeds, which a short chunk would count for as much in as a long one."""
    progress, _, clock = plain()
    progress.start(10**9, timed=True)
    progress.resume(500)
    for step, speed in ((1_000_500, 1e6), (1_000_600, 1e2), (1_000_600, None)):
        clock.now += 10.0
        progress.update(step, {} if speed is None else {"steps_per_second": speed})
    assert progress.steps_per_second == pytest.approx(1_000_100 / 2.0)


def test_a_bar_says_from_the_first_moment_that_it_compiles_and_keeps_its_room():
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    progress = ProgressBar(console=console, clock=clock)
    progress.start(3_000_320, timed=True, phase="compiling")
    assert "0 / 3,000,320 steps  compiling" in out.getvalue()
    progress.resume(1_000_000)
    assert "1,000,000 / 3,000,320 steps  compiling" in out.getvalue()
    progress.update(2_000_000, {"steps_per_second": 12.7e6, "train/return_mean": 123.4})
    progress.close()
    last = out.getvalue().rpartition("\x1b[2K")[2]  # the line was cleared and drawn again
    assert "2,000,000 / 3,000,320 steps  12.7M steps/s  return 123.4  00:01 left" in last and last.index("2,000") >= 12


@pytest.mark.parametrize(
    ("rate", "unit", "text"),
    [
        (0.031, "trials", "32.3 s/trial"),
        (0.5, "runs", "2.0 s/run"),
        (0.0, "trials", "0 trials/s"),
        (1.0, "steps", "1 steps/s"),
        (2.345, "trials", "2.35 trials/s"),
        (1234.5, "steps", "1,234 steps/s"),
        (2.34e6, "steps", "2.3M steps/s"),
    ],
)
def test_what_is_slow_is_counted_in_seconds(rate, unit, text):
    assert progress._speed(rate, unit) == text
