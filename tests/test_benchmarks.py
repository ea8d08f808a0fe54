"""The benchmarks: what they write keeps what is there, and kernels are not more than they were."""

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import pytest
from helpers.patience import PATIENCE
from helpers.processes import python
from helpers.strict_json import read_json

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import _record  # noqa: E402
import kernels  # noqa: E402
import sampling  # noqa: E402
import scaling  # noqa: E402


@pytest.mark.parametrize(("typed", "several"), [([], False), (["--distributed"], True)])
def test_the_flags_of_processes_are_those_of_train(typed, several, monkeypatch):
    parser = argparse.ArgumentParser()
    _record.add_process_flags(parser)
    joined = []
    monkeypatch.setattr("jaxrl.cli.multihost.join", joined.append)
    asked = parser.parse_args(typed)
    assert _record.join_processes(asked) is several
    assert joined == [vars(asked)]


def test_the_record_has_every_way_of_sampling():
    rows = read_json(ROOT / "benchmarks" / "results" / "sampling.json")["rows"]
    assert [row["way"] for row in rows] == list(sampling.ways())
    assert all(row["steps/s"] > 0 for row in rows)


def test_the_exchange_is_what_nccl_expects():
    assert scaling.exchange(1) == 0
    # 67 times through two machines of eight: up and down seven links of 0.52 us, 1.8 times, and a step of the network.
    bytes_exchanged = scaling.program("v5e:4x4", 2048)["bytes exchanged"]
    by_hand = 67 * (4.4 + 2 * (7 * 0.52 * 1.8 + 5.0)) + bytes_exchanged / 10_526.3
    assert scaling.exchange(16) * 1e6 == pytest.approx(by_hand, rel=1e-5)
    # Four GPUs of one machine have no network between them.
    assert scaling.exchange(4) * 1e6 == pytest.approx(67 * (4.4 + 2 * 3 * 0.52) + bytes_exchanged / 10_526.3, rel=1e-5)


def test_a_part_of_a_record_leaves_the_others(tmp_path):
    path = tmp_path / "results" / "accelerator.json"
    for name, rows in (("first", [1]), ("second", [2]), ("first", [3])):
        _record.save_part(path, name, {"rows": rows})
    assert read_json(path) == {"parts": {"first": {"rows": [3]}, "second": {"rows": [2]}}}
    assert [file.name for file in path.parent.iterdir()] == ["accelerator.json"]


@pytest.mark.long
def test_a_comparison_that_is_interrupted_leaves_no_process_behind():
    """Its workers are stopped in turn: nothing else would continue or end them."""
    script = """if True:
        import pathlib, sys
        sys.path.insert(0, "benchmarks")
        import before_after
        root = pathlib.Path.cwd()
        with before_after.running({"before": root, "now": root}) as workers:
            print(*(worker.worker.pid for worker in workers.values()), flush=True)
            before_after.together(workers, "PPO CartPole, 2048 environments")
    """
    comparison = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    workers = [int(word) for word in comparison.stdout.readline().split()]
    try:
        time.sleep(1.0)  # for a few turns
        assert len(workers) == 2 and comparison.poll() is None
        comparison.send_signal(signal.SIGTERM)
        assert comparison.wait(timeout=PATIENCE) == 143
        for pid in workers:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    except BaseException:
        for pid in (comparison.pid, *workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise


@pytest.mark.long
def test_no_more_kernels_than_were_committed():
    held = read_json(ROOT / "benchmarks" / "results" / "kernels.json")
    version = held["machine"]["versions"]["jax"]
    if jax.__version__ != version or jax.default_backend() != "cpu":
        pytest.skip(f"counted with JAX {version} on a CPU; here is {jax.__version__} on {jax.default_backend()}")
    found = {row["what"]: row for row in kernels.rows(kernels.program(held["num_envs"]))}
    for row in held["rows"]:
        for kind in ("kernels", "with all loops"):
            now, most = found[row["what"]][kind], 1.05 * row[kind]
            assert now <= most, f"{row['what']}: {now} {kind}, at most {most:.0f}; see benchmarks/kernels.py --loops"


def assert_equal_on_a_cpu(rows):
    """Assert that all processes of the part "determinism" have the same programs, as on a CPU."""
    assert sum("against" in name for row in rows for name in row) == 3
    assert all(value["bit for bit"] for row in rows for name, value in row.items() if "against" in name)
    resumed = [row for row in rows if "resumed at step" in row]
    assert len(resumed) == 3 and all(row["bit for bit"] and row["that differ"] == 0 for row in resumed)


def test_every_part_of_the_accelerator_benchmark_runs_small(tmp_path):
    path = tmp_path / "record.json"
    command = ["benchmarks/accelerator.py", "--small", "--output", path]
    python(*command, "--seconds", 3000, cwd=ROOT, timeout=None)
    parts = read_json(path)["parts"]
    names = ["throughput", "replay", "host", "learning", "equality", "determinism", "precision", "memory", "peers"]
    assert list(parts) == names
    expected = {"not measured at small sizes", "only one device", "--purejaxrl was not given"}
    for name, part in parts.items():
        assert part["machine"]["command"].startswith("python benchmarks/accelerator.py --small"), part["machine"]
        assert part["small"] and "load" in part["machine"] and part["rows"], name
        for row in part["rows"]:
            reason = row.get("left out", "not measured at small sizes")
            assert name == "peers" or reason in expected, row
    first = parts["throughput"]["rows"][0]
    assert first["work"] == "PPO CartPole" and first["steps/s"] > 0
    assert all(row["twice in one process"]["bit for bit"] for row in parts["equality"]["rows"] if "numbers" in row)
    assert_equal_on_a_cpu(parts["determinism"]["rows"])

    # One part anew, with a budget that suffices for nothing: its rows say so, and the others stay.
    python(*command, "--only", "precision", "--seconds", 0.5, cwd=ROOT)
    again = read_json(path)["parts"]
    assert [row["left out"] for row in again["precision"]["rows"]] == ["the part's 0.5 seconds were over"]
    assert {name: part for name, part in again.items() if name != "precision"} == {
        name: part for name, part in parts.items() if name != "precision"
    }
