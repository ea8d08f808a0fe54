"""A run that is killed at any moment and started again is the run that was not, bit for bit."""

import os
import shutil
import subprocess
import warnings
import zlib

import numpy as np
import pytest
from helpers import kills, programs
from helpers.kills import CASES, INTERVAL, ITERATIONS, newest
from helpers.patience import PATIENCE
from helpers.processes import environment
from helpers.programs import NUM_ENVS, ROWS, assert_equal
from helpers.two_processes import both, together

from jaxrl.run.directory import checkpoint
from jaxrl.run.loggers import read_metrics
from jaxrl.sweeps.pbt import PBTResult
from jaxrl.sweeps.sweep import SweepResult

pytestmark = [pytest.mark.faults, pytest.mark.exact, pytest.mark.usefixtures("one_iteration_chunks")]

# Kills of each case: in the long and the exhaustive tests, and in `make faults`.
FEW = dict.fromkeys(CASES, 1) | {"r2d2": 3, "sebulba": 3, "sweep": 3, "pbt": 3}
MANY = {"ppo": 50, "dqn": 50, "r2d2": 10, "sebulba": 10, "sweep": 10, "pbt": 10}
TOLD = (
    "stopped",
    "total_steps",
    "returns",
    "action",
)  # of a run by two processes
IN_A_ROW = 4  # kills of one run, before it may end


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return the folder of compiled programs that the processes of these tests share."""
    return os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function of a case: the result of the run that is not killed, and the number of its moments."""
    results = {}

    def run(name):
        if name not in results:
            run_dir = tmp_path_factory.mktemp("whole") / "run"
            moments = kills.Moments(run_dir, lambda count: None)
            results[name] = kills.train(name, run_dir, [moments]), moments.count
            moments.stop()
        return results[name]

    return run


@pytest.fixture(scope="module")
def gone_on(whole, tmp_path_factory):
    """Return a function of a case and steps: the result of a run on the host that was left and resumed at these."""
    results = {}

    def run(name, steps):
        if not steps:
            return whole(name)[0]
        if (name, steps) not in results:
            run_dir = tmp_path_factory.mktemp("gone_on") / "run"
            for step in steps:
                with warnings.catch_warnings(action="ignore"), pytest.raises(kills.Stopped):
                    kills.train_and_stop(name, run_dir, step)
            results[name, steps] = resumed(name, run_dir)
        return results[name, steps]

    return run


def resumed(name, run_dir):
    """Resume a run; one with environments on the host reports how many of them begin new episodes."""
    if not (CASES[name].host and newest(run_dir)):
        return kills.train(name, run_dir)
    with pytest.warns(RuntimeWarning, match=f"resumed at .*; {NUM_ENVS} "):
        return kills.train(name, run_dir)


def life(name, run_dir, share, patience, moments, cache):
    """Train in a process that is killed when it has lived a share of the moments that are left.

    A patient process waits for each save; a hasty one may be killed while it saves.
    """
    env = environment(
        PYTHONWARNINGS="ignore",
        JAX_COMPILATION_CACHE_DIR=cache,
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    first = not run_dir.exists()
    left = moments * (1 - newest(run_dir) / (ITERATIONS * ROWS))
    words = kills.command(name, str(run_dir), str(max(1, int(share * left))), patience)
    dead = subprocess.run(words, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert dead.returncode == -9, dead.stdout + dead.stderr
    steps = [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")]
    # What is being saved when the kill comes is lost too, where saving takes longer than the interval. Its rows of
    # metrics are dropped by the next life, unless that one is killed before.
    lost = max(steps, default=0) - newest(run_dir)
    assert lost <= (1 if patience == "patient" and first else 2) * INTERVAL * ROWS


def of_the_clock(name):
    """Return whether a metric depends on the speed of the machine."""
    return name.startswith(("seconds", "steps", "actors/")) or name.endswith("_per_second")


def assert_the_same_run(resumed, reference, run_dir, case=CASES["ppo"]):
    for folder in run_dir.rglob("checkpoints"):
        assert all(path.name.isdecimal() for path in folder.iterdir()), "what a killed save left is cleaned up"
    if isinstance(reference, SweepResult):
        for name in ("steps", "metrics", "returns", "failed", "learners"):
            assert_equal(getattr(reference, name), getattr(resumed, name))
        if isinstance(reference, PBTResult):
            assert_equal(reference.lineage.to_json(), resumed.lineage.to_json())
        return
    assert resumed.stopped == reference.stopped == case.stopped
    assert resumed.total_steps == reference.total_steps == case.iterations * ROWS
    assert_equal(reference.state, resumed.state)
    np.testing.assert_array_equal(reference.evaluation.returns, resumed.evaluation.returns)
    rows = read_metrics(run_dir / "metrics.jsonl")
    kinds = [(row["step"], "evaluation/return_mean" in row, "callback/weight" in row) for row in rows]
    kinds = [(step, 2 * called + evaluated) for step, evaluated, called in kinds]
    assert kinds == sorted(set(kinds)), "a row is there twice, or out of order"
    same = {(row["step"], name): row[name] for row in rows for name in row if not of_the_clock(name)}
    for row in reference.metrics:
        for name, value in row.items():
            if (row["step"], name) in same and np.isfinite(value):
                assert same[row["step"], name] == value, (row["step"], name)


def kill_again_and_again(name, count, whole, gone_on, cache, folder):
    """Kill runs `count` times in all, each up to four times, at moments drawn once and for all."""
    _, moments = whole(name)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for run in range(-(-count // IN_A_ROW)):
        run_dir, left_at = folder / str(run), []
        for _ in range(min(IN_A_ROW, count - run * IN_A_ROW)):
            share, patience = rng.uniform(0.3 if count == 1 else 0.02, 0.7), rng.choice(["patient", "hasty"])
            life(name, run_dir, share, patience, moments, cache)
            left_at.append(newest(run_dir))
        # Nothing is lost where nothing was saved since the last kill; what is on the host begins anew at each.
        again = tuple(dict.fromkeys(step for step in left_at if step)) if CASES[name].host else ()
        assert_the_same_run(resumed(name, run_dir), gone_on(name, again), run_dir, CASES[name])
        shutil.rmtree(run_dir)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_killed_and_started_again(name, whole, gone_on, cache, tmp_path):
    kill_again_and_again(name, FEW[name], whole, gone_on, cache, tmp_path)


@pytest.mark.endurance
@pytest.mark.parametrize("name", MANY)
def test_killed_many_times(name, whole, gone_on, cache, tmp_path):
    count = min(MANY[name], int(os.environ.get("FAULTS_KILLS") or MANY[name]))
    kill_again_and_again(name, count, whole, gone_on, cache, tmp_path)


def copy_what_is_there(run_dir, to):
    """Copy a directory; what the background save renames or removes meanwhile is left out, as by an earlier kill."""
    try:
        shutil.copytree(run_dir, to, ignore=shutil.ignore_patterns(".lock", "*.png"))
    except shutil.Error as error:
        assert all("No such file" in why for _, _, why in error.args[0]), error


@pytest.mark.long
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_what_lies_on_disk_at_many_moments(name, whole, tmp_path):
    """Copy the directory at moments spread over the run, as kills would leave it, and start each copy again."""
    reference, moments = whole(name)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    at = set(np.random.default_rng(7).choice(np.arange(1, int(0.95 * moments)), 6, replace=False).tolist())

    def copy(count):
        if count in at:
            watch._on = False  # copying opens files too
            copy_what_is_there(run_dir, tmp_path / str(count))
            watch._on = True

    watch = kills.Moments(run_dir, copy)
    kills.train(name, run_dir, [watch])
    watch.stop()
    copies = sorted((path for path in tmp_path.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    assert len(copies) == len(at)
    assert len({newest(copy) for copy in copies}) >= 3, "the moments are not spread over the run"
    for copy in copies:
        assert_the_same_run(kills.train(name, copy), reference, copy)


@pytest.mark.long
def test_a_damaged_newest_checkpoint_costs_one_interval_and_nothing_else(whole, tmp_path):
    reference, _ = whole("dqn")
    run_dir = shutil.copytree(reference.run_dir, tmp_path / "run")
    folder = run_dir / "checkpoints" / f"{ITERATIONS * ROWS:012d}"
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with pytest.warns(RuntimeWarning, match=f"damaged checkpoint.*using step {(ITERATIONS - INTERVAL) * ROWS}"):
        resumed = kills.train("dqn", run_dir)
    assert_the_same_run(resumed, reference, run_dir)


@pytest.fixture(scope="module")
def two_whole(tmp_path_factory):
    """Return what two processes report of the run that is not killed, and its directory."""
    folder = tmp_path_factory.mktemp("two_whole")
    return both("lives", folder)[0], folder / "run"


def kill_one_of_two(count, two_whole, folder):
    """Kill one of two processes, in turn, as above; the other one ends by itself, and both are started again."""
    reference, where = two_whole
    template = programs.anakin(4).bind(programs.PPO, programs.ENV).template(programs.PPO, programs.ENV, 3)
    rng = np.random.default_rng(11)
    for run in range(-(-count // IN_A_ROW)):
        own = folder / str(run)
        for number in range(min(IN_A_ROW, count - run * IN_A_ROW)):
            left = reference["moments"] * (1 - newest(own / "run") / (ITERATIONS * ROWS))
            victim = number % 2
            moment = max(1, int(rng.uniform(0.02, 0.7) * left))
            _, codes, said, _ = together(f"lives:{moment}:{victim}", own)
            assert codes[victim] == -9 and codes[1 - victim] not in (0, None, -9), "\n".join(said)
        last = both("lives", own)
        for told in last:
            assert {name: told[name] for name in TOLD} == {name: reference[name] for name in TOLD}
        states = [checkpoint.restore(path / "checkpoints", template)[0] for path in (where, own / "run")]
        assert_equal(*states)
        shutil.rmtree(own)


def test_one_of_two_processes_killed_three_times(two_whole, tmp_path):
    kill_one_of_two(3, two_whole, tmp_path)


@pytest.mark.endurance
def test_one_of_two_processes_killed_many_times(two_whole, tmp_path):
    kill_one_of_two(min(10, int(os.environ.get("FAULTS_KILLS") or 10)), two_whole, tmp_path)
