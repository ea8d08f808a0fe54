"""Odd values of every flag of every command: refused with exit code 2 and without a traceback, or taken."""

import contextlib

import numpy as np
import pytest

from jaxrl.cli import main, table
from jaxrl.parallel.program import CompiledProgram
from jaxrl.run import follow, loading, replays  # all that hold `load_run`, before it is replaced
from jaxrl.run.directory import RunDirectory

ENV = ["--env", "gymnax:CartPole-v1"]
RUN = [*ENV, "--total-steps", "1000"]
HUGE = str(2**70)


class Began(Exception):
    """Nothing was wrong with the command line."""


@pytest.fixture
def said(capsys, monkeypatch):
    """The exit code of a command line and what it printed; "began" where a run would have begun."""

    def begin(*_, **__):
        raise Began

    for owner, name in ((CompiledProgram, "start"), (CompiledProgram, "compile_chunk")):
        monkeypatch.setattr(owner, name, begin)
    for module in (loading, replays, follow):
        monkeypatch.setattr(module, "load_run", begin)
    monkeypatch.setattr("jaxrl.sweeps.sweep._train_many", begin)
    monkeypatch.setenv("COLUMNS", "300")

    def run(*argv):
        code: object = 0
        try:
            code = main.main(list(argv))
        except SystemExit as stopped:  # how tyro leaves
            code = stopped.code
        except Began:
            code = "began"
        return code, " ".join(capsys.readouterr().err.split())

    return run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "ppo", *RUN, "--seed", HUGE], "--seed: '1180591620717411303424' is too large"),
        (["train", "ppo", *RUN, "--seed", "-1"], "seed=-1 must be a whole number from 0 to 2^63 - 1"),
        (["train", "ppo", *RUN, "--evaluation-episodes", "1e15"], "is too many for 128 environments; at most"),
        (
            ["train", "ppo", *RUN, "--rollout-length", str(2**62)],
            "rollout_length=4611686018427387904 must be less than",
        ),
        (["train", "ppo", *RUN, "--rollout-length", str(2**30)], "have 2^31 steps or more"),
        (["train", "ppo", *RUN, "--num-envs", "1e12"], "have 2^31 steps or more"),
        (["train", "ppo", *RUN, "--num-envs", HUGE], "--num-envs: '1180591620717411303424' is too large"),
        (["train", "ppo", *RUN, "--epochs", "1e18"], "epochs=1000000000000000000 must be less than 2^31"),
        (["train", "ppo", *RUN, "--gamma", "1e400"], "'1e400' is not a finite number"),
        (["train", "ppo", *RUN, "--learning-rate", "9" * 400], "is not a finite number"),
        (["sweep", "ppo", *RUN, "--seeds", "1e12"], "seeds: at least one, and at most 65,536"),
        (["sweep", "ppo", *RUN, "--seeds", "-5,3"], "seeds=-5 must be a whole number"),
        (["eval", "runs/none", "--seed", HUGE], "is too large"),
        (["eval", "runs/none", "--seed", "-1"], "--seed: -1 must be at least 0"),
        (["export-rlds", "runs/none", "--out", "x", "--seed", HUGE], "is too large"),
        (["train", "ppo", "--env", "gymnasium:..:X", "--total-steps", "10"], "gymnasium:..:X cannot be found"),
        (["train", "ppo", "--env", "gymnasium:.os:X", "--total-steps", "10"], "gymnasium:.os:X cannot be found"),
    ],
    ids=lambda words: " ".join(words)[:60] if isinstance(words, list) else "",
)
def test_values_too_large(said, words, told):
    code, text = said(*words)
    assert code == 2 and told in text, (code, text)


def test_a_picture_of_an_unknown_format(said, tmp_path):
    with RunDirectory(tmp_path / "run", {"seed": 0}) as run:
        run.metrics_jsonl.write_text('{"step": 1, "train/return_mean": 1.0}\n{"step": 2, "train/return_mean": 2.0}\n')
    code, text = said("plot", str(run.path), "--out", str(tmp_path / "x.zzz"))
    assert code == 2 and "unknown format of pictures '.zzz'" in text and not (tmp_path / "x.zzz").exists()
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
    "compile": ["compile", "ppo", *RUN],
    "eval": ["eval", "RUN"],
    "export-rlds": ["export-rlds", "RUN", "--out", "OUT"],
    "export-minari": ["export-minari", "RUN", "--id", "made-v0"],
    "export-replay": ["export-replay", "RUN", "--out", "OUT"],
    "dataset": ["dataset", "info", "RUN"],
    "plot": ["plot", "RUN"],
    "envs": ["envs"],
    "algos": ["algos"],
}
NOT_TRIED = ("--run-dir", "--record", "--wandb", "--distributed", "--devices", "--backend", "--out", "--dataset")


def flags_of(said, capsys, words):
    """Its flags, by its own help."""
    with contextlib.suppress(SystemExit):
        main.main([*words[:2], "--help-all"] if words[0] in ("train", "sweep", "compile") else [words[0], "--help"])
    text = capsys.readouterr().out
    return sorted({word.strip(",│|[]") for word in text.split() if word.startswith("--")} - {"--help", *NOT_TRIED})


@pytest.mark.long  # the values that were found stand for it
@pytest.mark.parametrize("command", COMMANDS)
def test_odd_values_of_any_flag(said, capsys, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = COMMANDS[command]
    flags = flags_of(said, capsys, words) or [""]
    rng, wrong = np.random.default_rng(len(command)), []
    for _ in range(30):
        flag, value = flags[rng.integers(len(flags))], ODD[rng.integers(len(ODD))]
        given = [*words, *([flag] if flag else []), value]
        try:
            code, text = said(*given)
        except Exception as error:
            wrong.append(f"{given}: {type(error).__name__}: {error}")
            continue
        allowed = (1, 2) if command == "dataset" else (0, 2, "began")  # there is none, which is no fault of a flag
        if code not in allowed or "Traceback" in text or (code == 2 and not text):
            wrong.append(f"{given}: {code} {text[-300:]}")
    assert wrong == []
    assert len(COMMANDS) * 30 >= 300 and set(table.algorithms()) >= {"ppo", "dqn", "sac"}
