"""The benchmarks: what they write keeps what is there, kernels are counted right, and are not more than they were."""

import argparse
import json
import pathlib
import subprocess
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import _record  # noqa: E402
import kernels  # noqa: E402
import sampling  # noqa: E402

PROGRAM = """
HloModule jit_f, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %multiply.1 = f32[4]{0} multiply(%p, %p)
  ROOT %add.1 = f32[4]{0} add(%multiply.1, %p)
}

%body (carried: (s32[], f32[4])) -> (s32[], f32[4]) {
  %carried = (s32[], /*index=1*/f32[4]{0}) parameter(0)
  %n = s32[] get-tuple-element(%carried), index=0
  %x = f32[4]{0} get-tuple-element(%carried), index=1
  %copy.1 = f32[4]{0} copy(%x)
  %dot.1 = f32[4]{0} dot(%copy.1, %x), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %next = s32[] fusion(%n), kind=kLoop, calls=%fused
  ROOT %out = (s32[], f32[4]{0}) tuple(%next, %dot.1)
}

%test (carried.2: (s32[], f32[4])) -> pred[] {
  %carried.2 = (s32[], f32[4]{0}) parameter(0)
  %n.2 = s32[] get-tuple-element(%carried.2), index=0
  %last = s32[] constant(16)
  ROOT %compare.1 = pred[] compare(%n.2, %last), direction=LT
}

%few (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  ROOT %negate.1 = f32[4]{0} negate(%q)
}

%many (r: f32[4]) -> f32[4] {
  %r = f32[4]{0} parameter(0)
  %negate.2 = f32[4]{0} negate(%r)
  ROOT %copy.2 = f32[4]{0} copy(%negate.2)
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %zero = s32[] constant(0)
  %first = (s32[], f32[4]{0}) tuple(%zero, %a)
  %while.1 = (s32[], f32[4]{0}) while(%first), condition=%test, body=%body, backend_config={"known_trip_count":{"n":"16"}}
  %b = f32[4]{0} get-tuple-element(%while.1), index=1
  %called = f32[4]{0} call(%b), to_apply=%few
  %which = pred[] compare(%zero, %zero), direction=EQ
  ROOT %chosen = f32[4]{0} conditional(%which, %called, %b), branch_computations={%few, %many}
}
"""  # noqa: E501


def test_kernels_are_counted():
    whole = kernels.counted(PROGRAM)
    loop, branch = whole.loops
    assert (whole.kernels, whole.copies) == (2, 0)  # the called one and the comparison
    assert (loop.turns, loop.kernels, loop.copies, loop.products) == (16, 4, 1, 1)  # a fusion is one, its parts none
    assert (branch.turns, branch.kernels, branch.copies) == (1, 2, 1)  # the larger branch
    assert whole.total == 2 + 16 * 4 + 2


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
    rows = json.loads((ROOT / "benchmarks" / "results" / "sampling.json").read_text())["rows"]
    assert [row["way"] for row in rows] == list(sampling.ways())
    assert all(row["steps/s"] > 0 for row in rows)


def test_a_part_of_a_record_leaves_the_others(tmp_path):
    path = tmp_path / "results" / "accelerator.json"
    for name, rows in (("first", [1]), ("second", [2]), ("first", [3])):
        _record.save_part(path, name, {"rows": rows})
    assert json.loads(path.read_text()) == {"parts": {"first": {"rows": [3]}, "second": {"rows": [2]}}}
    assert [file.name for file in path.parent.iterdir()] == ["accelerator.json"]


@pytest.mark.long
def test_no_more_kernels_than_were_committed():
    held = json.loads((ROOT / "benchmarks" / "results" / "kernels.json").read_text())
    version = held["machine"]["versions"]["jax"]
    if jax.__version__ != version or jax.default_backend() != "cpu":
        pytest.skip(f"counted with JAX {version} on a CPU; here is {jax.__version__} on {jax.default_backend()}")
    found = {row["what"]: row for row in kernels.rows(kernels.counted(kernels.program(held["num_envs"])))}
    for row in held["rows"]:
        for kind in ("kernels", "with all loops"):
            now, most = found[row["what"]][kind], 1.05 * row[kind]
            assert now <= most, f"{row['what']}: {now} {kind}, at most {most:.0f}; see benchmarks/kernels.py --loops"


@pytest.mark.long
def test_every_part_of_the_accelerator_benchmark_runs_small(tmp_path):
    path = tmp_path / "record.json"
    command = [sys.executable, "benchmarks/accelerator.py", "--small", "--output", str(path)]
    subprocess.run([*command, "--seconds", "300"], cwd=ROOT, check=True)
    parts = json.loads(path.read_text())["parts"]
    assert list(parts) == ["throughput", "replay", "host", "learning", "equality", "precision", "memory", "peers"]
    expected = {"the small form", "there is one device", "no --purejaxrl given"}
    for name, part in parts.items():
        assert part["machine"]["command"].startswith("python benchmarks/accelerator.py --small"), part["machine"]
        assert part["small"] and "load" in part["machine"] and part["rows"], name
        for row in part["rows"]:
            reason = row.get("left out", "the small form")
            assert name == "peers" or reason in expected, row
    first = parts["throughput"]["rows"][0]
    assert first["work"] == "PPO CartPole" and first["steps/s"] > 0
    assert all(row["twice in one process"]["bit for bit"] for row in parts["equality"]["rows"] if "numbers" in row)

    # One part anew, with a budget that suffices for nothing: its rows say so, and the others stay.
    subprocess.run([*command, "--only", "precision", "--seconds", "0.5"], cwd=ROOT, check=True)
    again = json.loads(path.read_text())["parts"]
    assert [row["left out"] for row in again["precision"]["rows"]] == ["the part's 0.5 seconds were over"]
    assert {name: part for name, part in again.items() if name != "precision"} == {
        name: part for name, part in parts.items() if name != "precision"
    }
