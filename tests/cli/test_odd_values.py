"""Odd values of every flag of every command: refused with exit code 2 and without a traceback, or taken."""

import contextlib
import json
import os
import sys

import hypothesis
import pytest
from helpers.processes import python
from hypothesis import strategies as st

from jaxrl.cli import main, table
from jaxrl.parallel.program import Program
from jaxrl.run.directory import follow, loading
from jaxrl.run.directory.run_directory import RunDirectory
from jaxrl.run.recording import replay_export  # all that hold `load_run`, before it is replaced

ENV = ["--env", "gymnax:CartPole-v1"]
RUN = [*ENV, "--total-steps", "1000"]
HUGE = str(2**70)
EXAMPLES = 30  # of each command


class Began(Exception):
    """Nothing was wrong with the command line."""


@pytest.fixture
def said(capsys, monkeypatch):
    """The exit code of a command line and what it printed; "began" where a run would have begun."""

    def begin(*_, **__):
        raise Began

    for owner, name in ((Program, "start"), (Program, "compile_chunk")):
        monkeypatch.setattr(owner, name, begin)
    for module in (loading, replay_export, follow):
        monkeypatch.setattr(module, "load_run", begin)
    monkeypatch.setattr("jaxrl.sweeps.sweep.train_many", begin)
    monkeypatch.setattr("jaxrl.sweeps.tune._Training", begin)
    monkeypatch.setattr("jaxrl.sweeps.pbt.train_many", begin)
    monkeypatch.setenv("COLUMNS", "300")

    def run(*argv):
        code: object = 0
        try:
            code = main.main(list(argv))
        except SystemExit as stopped:  # a flag without a value
            code = stopped.code
        except Began:
            code = "began"
        return code, " ".join(capsys.readouterr().err.split())

    return run


def test_a_picture_of_an_unknown_format(said, tmp_path):
    with RunDirectory(tmp_path / "run", {"seed": 0}) as run:
        run.metrics_jsonl.write_text('{"step": 1, "train/return_mean": 1.0}\n{"step": 2, "train/return_mean": 2.0}\n')
    code, text = said("plot", str(run.path), "--out", str(tmp_path / "x.zzz"))
    assert code == 2 and "unknown image format '.zzz'" in text and not (tmp_path / "x.zzz").exists()
    assert said("plot", str(run.path), "--out", str(tmp_path / "x.svg"))[0] == 0


ODD = (
    *("", " ", "nan", "inf", "-inf", "-1", "0", "1", "1e308", "-1e308", "1e-400", HUGE, f"-{HUGE}", "1e30", "0.5", "x"),
    *(
        "None",
        "True",
        "[]",
        "{}",
        "..",
        "/",
        "1,2",
        ",",
        "linear:1",
        "linear:nan:1",
        "cosine:1:2:3:4:5",
        "mlp:",
        "mlp:-1",
    ),
    *(
        "mlp:1e9",
        "gru:0",
        "adam:eps=x",
        "=",
        "a=b=c",
        "½",
        "\u202e",
        "9" * 5000,
        "0x10",
        "1_000",
        "--",
        "-",
        "+1",
        "1e9",
    ),
)
COMMANDS = {
    "train": ["train", "ppo", *RUN],
    "train dqn": ["train", "dqn", *RUN],
    "train sac": ["train", "sac", "--env", "gymnax:Pendulum-v1", "--total-steps", "1000"],
    "sweep": ["sweep", "ppo", *RUN],
    "tune": ["tune", "ppo", *RUN],
    "pbt": ["pbt", "ppo", *RUN],
    "compile": ["compile", "ppo", *RUN],
    "eval": ["eval", "RUN"],
    "render": ["render", "RUN"],
    "export-rlds": ["export-rlds", "RUN", "--out", "OUT"],
    "export-minari": ["export-minari", "RUN", "--id", "made-v0"],
    "export-replay": ["export-replay", "RUN", "--out", "OUT"],
    "dataset": ["dataset", "info", "RUN"],
    "plot": ["plot", "RUN"],
    "report": ["report", "RUN"],
    "envs": ["envs"],
    "algos": ["algos"],
}
NOT_TRIED = ("--run-dir", "--record", "--wandb", "--distributed", "--launch", "--devices")
NOT_TRIED += ("--backend", "--out", "--dataset")


# As a shell would pass them on: no NUL, and whatever else bytes can be.
TEXTS = st.text(st.characters(exclude_characters="\x00"), max_size=30)
VALUES = st.sampled_from(ODD) | st.integers().map(str) | st.floats().map(str) | TEXTS


def flags_of(said, capsys, words):
    """Its flags, by its own help."""
    with contextlib.suppress(SystemExit):
        main.main(
            [*words[:2], "--help-all"]
            if words[0] in ("train", "sweep", "tune", "pbt", "compile")
            else [words[0], "--help"]
        )
    text = capsys.readouterr().out
    return sorted({word.strip(",│|[]") for word in text.split() if word.startswith("--")} - {"--help", *NOT_TRIED})


@pytest.mark.long  # the values that were found stand for it
@pytest.mark.parametrize("command", COMMANDS)
def test_odd_values_of_any_flag(said, capsys, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = COMMANDS[command]
    flags = flags_of(said, capsys, words) or [""]
    allowed = (1, 2) if command == "dataset" else (0, 2, "began")  # there is none, which is no fault of a flag
    tried = []

    @hypothesis.settings(
        max_examples=EXAMPLES,
        phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.lists(st.tuples(st.sampled_from(flags), VALUES, st.booleans()), min_size=1, max_size=3))
    def each(drawn):
        given = list(words)
        for flag, value, joined in drawn:
            given += [f"{flag}={value}"] if joined and flag else [flag, value] if flag else [value]
        code, text = said(*given)
        assert code in allowed and "Traceback" not in text and (code != 2 or text), (given, code, text[-300:])
        tried.append(given)

    each()
    assert len(tried) >= EXAMPLES and len(COMMANDS) * EXAMPLES >= 300
    assert set(table.algorithms()) >= {"ppo", "dqn", "sac"}


AT_ONCE = r"""
import contextlib, io, json, os, re, sys

import hypothesis
from hypothesis import strategies as st

from jaxrl.cli import main

COMMANDS = [
    ["train", "ppo"], ["train", "dqn"], ["train", "sac"], ["train", "r2d2"], ["train", "cql"], ["train", "mpo"],
    ["sweep", "impala"], ["sweep", "td3"], ["compile", "pqn"], ["eval"], ["export-rlds"], ["export-minari"],
    ["export-replay"],
]
os.environ["COLUMNS"] = "500"
tried, wrong = [], []


def said(words):
    told, code = io.StringIO(), 0
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
        try:
            code = main.main(words)
        except SystemExit as stopped:
            code = stopped.code
    return code, told.getvalue()


def numbers(words):
    text = said([*words, "--help-all" if len(words) > 1 else "--help"])[1]
    return sorted(set(re.findall(r"(--[a-z][\w.-]*) N(?:UMBER)?[\s|]", text)))


FLAGS = {" ".join(words): numbers(words) for words in COMMANDS}
assert all(len(flags) >= (1 if name.startswith("export-replay") else 2) for name, flags in FLAGS.items()), FLAGS
# No number, schedule or None, whatever comes before.
NONE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12).map(lambda x: x + "!")


@hypothesis.settings(
    max_examples=int(sys.argv[1]), derandomize=True, database=None, deadline=None,
    phases=(hypothesis.Phase.generate,), suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(st.data())
def each(data):
    words = data.draw(st.sampled_from(COMMANDS))
    flags = data.draw(st.lists(st.sampled_from(FLAGS[" ".join(words)]), min_size=1, max_size=4, unique=True))
    given = [*words, *(f"{flag}={data.draw(NONE)}" for flag in flags)]
    code, told = said(given)
    tried.append(given)
    missing = [flag for flag in flags if f"{flag}: " not in told]
    if code != 2 or missing or "Traceback" in told or "jax" in sys.modules:
        wrong.append([given, code, missing, "jax" in sys.modules, told[-500:]])


each()
print(json.dumps({"tried": len(tried), "wrong": wrong[:5]}))
"""


@pytest.mark.long
@pytest.mark.parametrize("count", [20, 320])
def test_all_wrong_values_are_told_at_once_before_jax_is_imported(count, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    ended = python("-c", AT_ONCE, count, cwd=tmp_path, env=env)
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["wrong"] == [] and found["tried"] >= count
