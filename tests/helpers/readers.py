"""One file of every kind that jaxrl reads, and its readers; what was read is played, exported and drawn too."""

import contextlib
import os
import sys
import warnings

import numpy as np
import pytest

import jaxrl
from helpers import hostile
from helpers.programs import DQN, ENV, PPO, ROWS, anakin
from helpers.recorded import episode, write_minari, write_rlds
from jaxrl.core.errors import JaxrlError
from jaxrl.core.types import env_spec
from jaxrl.data import load_dataset
from jaxrl.plots.curves import TRAINING
from jaxrl.run.directory import checkpoint, run_status
from jaxrl.run.directory.loading import load_run
from jaxrl.run.directory.run_directory import read_config, with_new_fields
from jaxrl.run.loggers import JSONLLogger, read_metrics
from jaxrl.run.loop import run_loop
from jaxrl.run.plotting import plot_runs, read_run
from jaxrl.run.policies.evaluation import evaluate
from jaxrl.run.recording.dataset_export import export_rlds
from jaxrl.run.recording.recorder import Record
from jaxrl.run.recording.rendering import render
from jaxrl.run.recording.replay_export import export_replay

STEPS = 20  # of an episode of what was loaded


@contextlib.contextmanager
def made(root):
    """Make one of everything in `root/valid`, next to precious files; the evil module can be imported."""
    mark = root / "outside" / "was-here"
    (root / "outside" / "precious").mkdir(parents=True)
    (root / "outside" / "precious" / "file").write_text("precious")
    (root / "outside" / f"{hostile.EVIL}.py").write_text(f"open({os.fspath(mark)!r}, 'w').close()\n")
    whole = root / "valid"
    one = episode(0, 3, dtypes=["float32", "uint8"])
    often = {"topology": anakin(), "evaluate_every": ROWS, "checkpoint_every": ROWS, "evaluation_episodes": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_loop, "_CHUNK_SECONDS", 0.0)
        often |= {"progress": False}
        result = jaxrl.train(PPO, ENV, total_steps=2 * ROWS, run_dir=whole / "run", record=whole / "recording", **often)
        jaxrl.train(DQN, ENV, total_steps=4 * ROWS, run_dir=whole / "replay", **often)
    result.save(whole / "policy")
    write_rlds(whole / "rlds", [one], file_format="tfrecord")
    write_minari(whole, [one])
    sys.path.insert(0, os.fspath(root / "outside"))
    try:
        yield root
    finally:
        sys.path.remove(os.fspath(root / "outside"))


def newest(run):
    return max((run / "checkpoints").glob("0*"))


# --- who reads -------------------------------------------------------------------------------------------------------


def resume(path):
    """Read what `train` reads of a run that it resumes, but for the arrays."""
    with_new_fields(read_config(path))
    JSONLLogger(path / "metrics.jsonl", last=ROWS).close()


def list_checkpoints(path):
    checkpoint.complete_steps(path / "checkpoints")
    for read in (checkpoint.best_step, checkpoint.read_manifest):
        with contextlib.suppress(JaxrlError):
            read(path / "checkpoints")


def report(source):
    dataset = load_dataset(source)
    assert len(dataset) < 100
    dataset.report()


def play(path):
    """`jaxrl eval`: the policy acts in the environment that the files describe."""
    run = load_run(path)
    policy = run.policy
    evaluate(policy.algo, policy.actor, run.env, policy.spec, episodes=2, seed=0, max_steps=STEPS)


def export(path):
    """`jaxrl export-rlds`, into a folder beside it."""
    run = load_run(path)
    out = _fresh(path, "exported")
    export_rlds(run.policy, run.env, out, episodes=2, max_steps=STEPS, progress=False, policy_version=run.step)
    report(f"rlds:{out}")


def export_its_replay(path):
    """`jaxrl export-replay`, into a folder beside it."""
    report(f"rlds:{export_replay(path, _fresh(path, 'of-replay'), unfinished=True)}")


def draw(path):
    """`jaxrl plot`."""
    plot_runs([path], path.parent / "drawn.png")


def report_on(path):
    """`jaxrl report`."""
    jaxrl.report([path], path.parent / "report.html")


def film(path):
    """`jaxrl.render`."""
    run = load_run(path)
    render(run.policy, run.env, path.parent / "film.gif", max_steps=3)


def _fresh(path, name):
    folder = path.parent / name
    number = len(list(path.parent.glob(f"{name}*")))
    return folder.with_name(f"{name}-{number}")


# By kind of file.
READERS = {
    "config": [load_run, resume, read_run],
    "metrics": [
        resume,
        lambda path: read_run(path).curve(TRAINING),
        lambda path: read_metrics(path / "metrics.jsonl"),
    ],
    "result": [run_status.read_result, report_on],
    "manifest": [list_checkpoints, load_run],
    "rlds": [lambda path: report(f"rlds:{path}")],
    "minari": [lambda path: report(f"minari:{path}")],
    "recording": [
        lambda path: report(f"rlds:{path}"),
        lambda path: Record(path).check(env_spec(ENV), path.parent / "run", False),
    ],
    "policy": [lambda path: jaxrl.load(path)(np.zeros(4, np.float32))],
    "replay": [export_its_replay],
}
PLAYERS = [play, export, draw, report_on, film]  # of a run


def outcome(read, path):
    """Return None if it was read, or refused in jaxrl's own words; else what went wrong."""
    try:
        with hostile.bounded(), warnings.catch_warnings(action="ignore"):
            read(path)
    except JaxrlError as error:
        if len(str(error)) > 4000:
            return f"{len(str(error))} characters: {str(error)[:200]}"
    except hostile.Overdue:
        return f"took more than {hostile.LONGEST} s"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None
