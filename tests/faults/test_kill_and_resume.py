"""A run that is killed at any moment and started again is the run that was not, bit for bit."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers import kills
from helpers.kills import INTERVAL, ITERATIONS
from helpers.programs import ROWS, assert_equal
from helpers.tiers import one_quick

from jaxrl.core.errors import CheckpointError
from jaxrl.run import checkpoint, loop
from jaxrl.run.loggers import read_metrics

pytestmark = pytest.mark.faults

# By case: how each of its lives is lived, and the share of the moments left at which it ends, drawn once and for all.
# A patient one has saved before it goes on; of a hasty one the last save may be under way.
LIVES = {
    ("ppo", 1): ["patient"],
    ("ppo", 2): ["hasty"],
    ("recurrent_ppo", 1): ["hasty"],
    ("recurrent_ppo", 2): ["patient"],
    ("dqn", 1): ["hasty"],
}
SHARES = dict(zip(LIVES, np.random.default_rng(5).uniform(0.3, 0.9, len(LIVES)), strict=True))


@pytest.fixture(autouse=True)
def one_iteration_chunks(monkeypatch):
    monkeypatch.setattr(loop, "_CHUNK_SECONDS", 0.0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where the processes of these tests share what they compiled, unless there is such a place."""
    return os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The runs that are not killed: by case, the result and how many moments there were."""
    results = {}

    def run(name, devices):
        if (name, devices) not in results:
            run_dir = tmp_path_factory.mktemp("whole") / "run"
            moments = kills.Moments(run_dir, lambda count: None)
            results[name, devices] = kills.train(name, devices, run_dir, [moments]), moments.count
            moments.stop()
        return results[name, devices]

    return run


def newest(run_dir):
    """The step of the newest complete checkpoint; 0 where there is none."""
    try:
        return checkpoint.read_manifest(run_dir / "checkpoints").step
    except CheckpointError:
        return 0


def assert_the_same_run(resumed, reference, run_dir):
    assert resumed.stopped == reference.stopped == "finished"
    assert resumed.total_steps == reference.total_steps == ITERATIONS * ROWS
    assert_equal(reference.state, resumed.state)
    np.testing.assert_array_equal(reference.evaluation.returns, resumed.evaluation.returns)
    rows = read_metrics(run_dir / "metrics.jsonl")
    kinds = [(row["step"], "evaluation/return_mean" in row) for row in rows]
    assert kinds == sorted(set(kinds)), "a row is there twice, or out of order"
    same = {(row["step"], name): row[name] for row in rows for name in row if not name.startswith(("seconds", "steps"))}
    for row in reference.metrics:
        for name, value in row.items():
            if (row["step"], name) in same and np.isfinite(value):
                assert same[row["step"], name] == value, (row["step"], name)


@pytest.mark.parametrize(("name", "devices"), one_quick(LIVES))
def test_killed_and_started_again(name, devices, whole, cache, tmp_path):
    case = name, devices
    reference, moments = whole(name, devices)
    run_dir = tmp_path / "run"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    for patience in LIVES[case]:
        left = moments * (1 - newest(run_dir) / (ITERATIONS * ROWS))
        arguments = [name, str(devices), str(run_dir), str(max(1, int(SHARES[case] * left))), patience]
        dead = subprocess.run(kills.command(*arguments), env=environment, capture_output=True, text=True, timeout=300)
        assert dead.returncode == -9, dead.stdout + dead.stderr
        steps = [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")]
        # What is being saved when the kill comes is lost too, where saving takes longer than the interval.
        lost = max(steps, default=0) - newest(run_dir)
        assert lost <= (1 if patience == "patient" else 2) * INTERVAL * ROWS
    assert_the_same_run(kills.train(name, devices, run_dir), reference, run_dir)
    leftovers = [path.name for path in (run_dir / "checkpoints").iterdir() if not path.name.isdecimal()]
    assert not leftovers, "what a killed save left is cleaned up"


def copy_what_is_there(run_dir, to):
    """A copy; what the background save renames or removes meanwhile is left out, as an earlier kill would have it."""
    try:
        shutil.copytree(run_dir, to, ignore=shutil.ignore_patterns(".lock", "*.png"))
    except shutil.Error as error:
        assert all("No such file" in why for _, _, why in error.args[0]), error


@pytest.mark.long
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_what_lies_on_disk_at_many_moments(name, whole, tmp_path):
    """As if killed there: the directory is copied at moments spread over the run, and each copy started again."""
    reference, moments = whole(name, 1)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    at = set(np.random.default_rng(7).choice(np.arange(1, int(0.95 * moments)), 6, replace=False).tolist())

    def copy(count):
        if count in at:
            watch._on = False  # copying opens files too
            copy_what_is_there(run_dir, tmp_path / str(count))
            watch._on = True

    watch = kills.Moments(run_dir, copy)
    kills.train(name, 1, run_dir, [watch])
    watch.stop()
    copies = sorted((path for path in tmp_path.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    assert len(copies) == len(at)
    assert len({newest(copy) for copy in copies}) >= 3, "the moments are not spread over the run"
    for copy in copies:
        assert_the_same_run(kills.train(name, 1, copy), reference, copy)


def test_a_damaged_newest_checkpoint_costs_one_interval_and_nothing_else(whole, tmp_path):
    reference, _ = whole("ppo", 1)
    run_dir = shutil.copytree(reference.run_dir, tmp_path / "run")
    folder = run_dir / "checkpoints" / f"{ITERATIONS * ROWS:012d}"
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    with open(largest, "r+b") as file:
        file.truncate(largest.stat().st_size // 2)
    with pytest.warns(RuntimeWarning, match=f"damaged checkpoint.*taking step {(ITERATIONS - INTERVAL) * ROWS}"):
        resumed = kills.train("ppo", 1, run_dir)
    assert_the_same_run(resumed, reference, run_dir)
