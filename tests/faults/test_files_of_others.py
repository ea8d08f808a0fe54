"""Files of somebody else: no command replaces or deletes one, whatever its name, and each says so before it trains."""

import importlib.util
import io
import os
import shutil

import numpy as np
import pytest
from helpers.golden import old_runs
from helpers.programs import ENV, PPO, ROWS, anakin
from PIL import Image

import jaxrl
from jaxrl.cli import doctor
from jaxrl.core import ownership
from jaxrl.core.errors import JaxrlError
from jaxrl.data.staging import Staging
from jaxrl.export.policies import export_policy
from jaxrl.plots.curves import plot_run
from jaxrl.run import training
from jaxrl.run.directory.follow import follow
from jaxrl.run.loggers import JSONLLogger
from jaxrl.run.recording import rendering
from jaxrl.sweeps import launcher, pbt, sweep, tune
from jaxrl.sweeps.html_report import report


def written(write, *arguments):
    write(file := io.BytesIO(), *arguments)
    return file.getvalue()


CONTENTS = [
    b"",
    b"mine\n",
    b'{"step": 1, "note": "x"}\n{"step": 2, "train/return_mean": 0.5}\n',
    b'{"format": 1, "algorithm": "ppo", "evaluation": {}, "stopped": true}',
    b"step,loss\n1,2\n",
    b"| trial | return |\n| ---: | ---: |\n",
    b"2026-01-01 00:00:00 INFO training, seed 3\n",
    b"<html>mine</html>",
    *(written(Image.new("RGB", (840, 8)).save, kind) for kind in ("PNG", "GIF")),
    written(np.savez, np.zeros(3)),
    np.random.default_rng(0).bytes(3000),
]
CONFIG = b'{"format": 1, "algorithm": {}}'
# By kind, the file that a directory is known by.
FOLDERS = {
    "a run": ("config.json", CONFIG),
    "a search": ("config.json", b'{"format": 1, "tune": {"algorithm": {}}}'),
    "a sweep": ("sweep.json", b'{"format": 1, "configurations": []}'),
    "a sweep, killed": ("program-0/config.json", b'{"format": 1, "sweep": {"seeds": [0]}}'),
    "a population": ("sweep.json", b'{"format": 1, "configurations": [], "lineage": {}}'),
    "a population, killed": ("program-0/config.json", b'{"format": 1, "sweep": {"population": 4}}'),
    "an exported policy": ("config.json", CONFIG),
    "a dataset": ("dataset_info.json", b"{}"),
}
COMMON = {"total_steps": 4 * ROWS, "topology": anakin(), "progress": False}
FIXED = {"clip": 0.3, "gamma": 0.9, "gae_lambda": 0.9, "value_cost": 0.4, "max_grad_norm": 0.4, "entropy_cost": 0.02}
TRIED = COMMON | FIXED | {"devices": 1, "learning_rate": [1e-3, 1e-4]}
# By kind: the command that writes such a directory, and a place where it meets a file of somebody else.
COMMANDS = {
    "a run": (lambda path, **how: jaxrl.train(PPO, ENV, run_dir=path, **COMMON, **how), "log.txt"),
    "a sweep": (lambda path, **how: jaxrl.sweep(PPO, ENV, run_dir=path, **TRIED, **how), "program-1/result.json"),
    "a population": (lambda path, **how: jaxrl.pbt(PPO, ENV, run_dir=path, **TRIED, **how), "best/metrics.csv"),
    "a search": (lambda path, **how: jaxrl.tune(PPO, ENV, run_dir=path, **TRIED, **how), "best/metrics.csv"),
    "a sweep on Ray": (
        lambda path, overwrite: launcher.launch(PPO, ENV, run_dir=path, **COMMON, seeds=1),
        "defaults/seed=0/log.txt",
    ),
}


def tree(root):
    """Everything below a directory: where links lead, the bytes of files, None of all else."""
    return {
        path: path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def assert_refused(root, words, call, *arguments, **how):
    before = tree(root)
    with pytest.raises(JaxrlError) as error:
        call(*arguments, **how)
    assert words in str(error.value) and tree(root) == before


def write(path, content=b"mine"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.mark.parametrize("kind", COMMANDS)
def test_commands_refuse_what_is_not_theirs_before_they_train(kind, tmp_path, monkeypatch):
    if kind == "a search" and importlib.util.find_spec("optuna") is None:
        pytest.skip("no optuna")
    for module in (training, sweep, pbt, tune, launcher):
        for name in {"Loop", "train_many", "_Training", "_run"} & set(vars(module)):
            monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("it trains"))
    call, place = COMMANDS[kind]
    for there, (name, content) in FOLDERS.items():
        if kind.split(" on")[0] != there.split(",")[0]:
            write(tmp_path / there / name, content)
            write(tmp_path / "an exported policy" / "model.safetensors")
            for overwrite in (True, False):
                assert_refused(tmp_path, f"contains {there.split(',')[0]}", call, tmp_path / there, overwrite=overwrite)
    write(tmp_path / "mine" / place)
    for overwrite in (True, False):
        assert_refused(tmp_path, place, call, tmp_path / "mine", overwrite=overwrite)


@pytest.mark.parametrize(("kind", "names"), [("a run", ownership.OF_RUNS), ("a sweep", ownership.OF_SWEEPS)])
def test_no_name_hides_a_file_of_somebody_else(kind, names, tmp_path):
    for pattern, what in names.items():
        path = tmp_path / pattern.replace("[0-9]*", "000000000064")
        path = path / "manifest.json" if what == "step" else path
        if kind == "a run":
            write(tmp_path / "config.json", CONFIG)
        for content in CONTENTS:
            if what == "events" or (
                not content and what in ("lock", "log", "metrics", "evaluations", "journal", "probe")
            ):
                continue  # events of others are not in the way
            write(path, content)
            assert_refused(tmp_path, pattern.split("/")[0], ownership.check_folder, tmp_path, kind)
            path.unlink()
        if what not in ("events", "step"):
            path.unlink(missing_ok=True)
            path.symlink_to(old_runs() / "sebulba")
            assert_refused(tmp_path, path.name, ownership.check_folder, tmp_path, kind)
            path.unlink()
        shutil.rmtree(tmp_path / pattern.split("/")[0], ignore_errors=True)


def test_what_was_written_before_there_was_a_mark_is_known(tmp_path):
    own = {"sebulba": "a run", "tune": "a search", "sweep_finished": "a sweep", "pbt_finished": "a population"}
    for name, kind in own.items():
        ownership.check_folder(old_runs() / name, kind)
    plot_run([{"step": 1}]).savefig(tmp_path / "a.png")
    noise = np.random.default_rng(0).integers(0, 255, (2, 24, 20, 3), np.uint8)
    first, last = (Image.fromarray(x).quantize(64, dither=Image.Dither.NONE) for x in noise)
    first.save(tmp_path / "a.gif", "GIF", save_all=True, append_images=[last], duration=[50, 1000], loop=0)
    assert ownership.is_own(tmp_path / "a.png", "png") and ownership.is_own(tmp_path / "a.gif", "gif")


# By name, what writes such a file; those that do here are written twice.
OUTPUTS = {
    "a.png": lambda out: plot_run([{"step": 1}], out),
    "a.svg": lambda out: plot_run([{"step": 1}], out),
    "report.html": lambda out: report([old_runs() / "sebulba"], out),
    "rows.jsonl": lambda out: JSONLLogger(out).write(1, {"a": 1.0}),
    "a.gif": lambda out: rendering._write_gif(rendering._checked_path(out, ENV), [Image.new("RGB", (8, 8))], 20),
    "evaluations.jsonl": lambda out: next(follow(old_runs(), out=out)),
    "policy.npz": lambda out: export_policy(old_runs(), out, to="numpy"),
    "policy.py": lambda out: export_policy(old_runs(), out.with_suffix(".npz"), to="numpy"),
    "policy.stablehlo": lambda out: export_policy(old_runs(), out),
    "policy.onnx": lambda out: export_policy(old_runs(), out, to="onnx"),
    "device.json": lambda out: doctor.describe_device(out),
    "trials.md": lambda out: tune.TuneResult([], "").save(out.parent),
}
TWICE = ("a.png", "a.svg", "report.html", "rows.jsonl", "a.gif")


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_replaces_only_what_jaxrl_wrote(name, tmp_path):
    out, call = tmp_path / name, OUTPUTS[name]
    for content in CONTENTS:
        if content or not name.endswith(".jsonl"):
            write(out, content)
            assert_refused(tmp_path, name, call, out)
    out.unlink()
    for make in (os.mkfifo, lambda out: out.symlink_to("nothing"), lambda out: write(out / "x")):
        make(out)
        assert_refused(tmp_path, name, call, out)
        shutil.rmtree(out) if out.is_dir() else out.unlink()
    for _ in range(2 * (name in TWICE)):
        call(out)


def test_an_incomplete_dataset_is_deleted_and_nothing_else(tmp_path):
    left = tmp_path / ".x.partial"
    write(left / "x-train.array_record-00000")
    assert not list(Staging(tmp_path / "x").publish().iterdir())
    write(tmp_path / ".y.partial" / "mine.txt")
    assert_refused(tmp_path, "mine.txt", Staging, tmp_path / "y")
