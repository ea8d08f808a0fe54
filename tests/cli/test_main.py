"""The command line as a newcomer meets it."""

import atexit
import contextlib
import functools
import gc
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.patience import PATIENCE
from helpers.processes import python
from helpers.refused import refused
from helpers.registered import OWN_ALGORITHMS
from helpers.strict_json import read_json
from PIL import Image

import jaxrl
from jaxrl.algos.base import replace
from jaxrl.algos.kl_penalty import KLPenalty
from jaxrl.algos.munchausen import Munchausen
from jaxrl.algos.on_policy import WholeEpisodes
from jaxrl.algos.temperature import Temperature
from jaxrl.cli import fields, flags, main, run_summary, runs, table, values
from jaxrl.cli.doctor import OK, PROBLEM, gpu_processes, packages
from jaxrl.cli.sweep import train_command
from jaxrl.core.errors import ConfigError
from jaxrl.core.schedules import Linear
from jaxrl.core.sources import Dataset
from jaxrl.core.types import EnvSpec
from jaxrl.networks import GRU, MLP, Actor
from jaxrl.run.directory import sweep_directory
from jaxrl.run.directory.loading import load_run
from jaxrl.run.presets import PRESETS
from jaxrl.run.recording import rendering

SMALL = ["--num-envs", "2", "--rollout-length", "8", "--minibatches", "2", "--network.torso", "mlp:8", "--no-progress"]
SMALL += ["--epochs", "1", "--evaluation-episodes", "2"]
TRAIN = ["train", "ppo", "--env", "gymnax:CartPole-v1", *SMALL]
RATE = "linear:1e-3:0"  # a schedule in every test, so that all share one compiled program


@pytest.fixture
def said(capsys, monkeypatch):
    """Runs a command line that must succeed, and gives what it printed."""
    jax.devices()
    monkeypatch.setenv("COLUMNS", "200")

    def run(*argv, code=0):
        try:
            found = main.main(list(argv))
        except SystemExit as stopped:
            found = stopped.code
        printed = capsys.readouterr()
        assert found == code, printed
        return printed.out

    return run


def read(words, algo=None):
    """A command line of `jaxrl train`, and PPO with its flags."""
    given = runs.read("train", words)
    made, problems = flags.build_parts(given.values, algo)
    assert not problems
    return given, flags.with_flags(algo or jaxrl.PPO(), made)


# --- a run from end to end ---------------------------------------------------------------------------------------


COMMAND = [*TRAIN, "--seed", "3", "--learning-rate", RATE]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 64 steps, and what its command printed."""
    run_dir = tmp_path_factory.mktemp("runs") / "cartpole"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main.main([*COMMAND, "--run-dir", str(run_dir), "--total-steps", "64"]) == 0
    return run_dir, printed.getvalue()


@pytest.fixture(scope="module")
def run_dir(trained, tmp_path_factory):
    """The run carried on to 128 steps, in a folder of its own."""
    run_dir = tmp_path_factory.mktemp("further") / "cartpole"
    shutil.copytree(trained[0], run_dir)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main.main([*COMMAND, "--run-dir", str(run_dir), "--total-steps", "128"]) == 0
    assert "128 steps" in printed.getvalue()
    return run_dir


def test_train_prints_the_evaluation_and_resumes(said, trained, tmp_path):
    run_dir, printed = tmp_path / "run", trained[1]
    shutil.copytree(trained[0], run_dir)  # with the times of its files
    command = [*COMMAND, "--run-dir", str(run_dir)]
    record = read_json(run_dir / "result.json")
    evaluation = record["evaluation"]
    shown = f"evaluation (greedy): {evaluation['return_mean']:.2f} ± {evaluation['return_std']:.2f}; in training "
    assert "PPO on gymnax:CartPole-v1: 64 steps" in printed and "steps/s" in printed
    assert shown in printed and str(trained[0]) in printed
    assert set(record["origin"]) == {"command", "machine", "versions"}
    assert f"jaxrl {jaxrl.__version__}, jax {jax.__version__}" in record["origin"]["versions"]
    config = read_json(run_dir / "config.json")
    assert config["seed"] == 3 and config["algorithm"]["learning_rate"]["start"] == 1e-3
    assert config["algorithm"]["network"]["torso"]["widths"] == [8]

    for more in ([], ["--async-evaluation"]):  # the same command again, and another one: nothing is left to do
        again = said(*command, "--total-steps", "64", *more)
        assert shown in again and "the run had already finished" in again and "64 steps in" in again
    assert "128 steps" in said(*command, "--total-steps", "128")  # and one that goes further
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 128


def test_eval(said, run_dir):
    printed = said("eval", str(run_dir), "--episodes", "2", "--seed", "1")
    assert "PPO on gymnax:CartPole-v1, checkpoint at step 128" in printed
    run = load_run(run_dir)
    found = jaxrl.evaluate(run.policy.algo, run.policy.actor, run.env, run.policy.spec, episodes=2, seed=1)
    assert f"return {found.return_mean:.2f} ± {found.return_std:.2f} over 2 episodes" in printed
    own = run.held_out_seed  # by default, other episodes than those that chose the best, of seed 3
    found = jaxrl.evaluate(run.policy.algo, run.policy.actor, run.env, run.policy.spec, episodes=2, seed=own)
    assert f"return {found.return_mean:.2f} " in said("eval", str(run_dir), "--episodes", "2") and own != 3


def test_eval_follows_a_run(said, run_dir, tmp_path):
    out = tmp_path / "found.jsonl"
    printed = said("eval", str(run_dir), "--episodes", "2", "--follow", "--out", str(out))
    assert "step 128: return" in printed
    assert [json.loads(line)["step"] for line in out.read_text().splitlines()][-1] == 128
    assert printed.splitlines()[-1] == f"evaluations: {out}"
    assert f"nothing to evaluate: {out} has every" in said(
        "eval", str(run_dir), "--episodes", "3", "--follow", "--out", str(out)
    )
    said("eval", str(run_dir), "--follow", "--best", code=2)
    said("eval", str(run_dir), "--out", str(out), code=2)


def test_render(said, run_dir, tmp_path):
    written = said("render", str(run_dir), "--max-steps", "3").strip()
    assert written == str(run_dir / "episode.gif")
    with Image.open(written) as picture:
        assert picture.format == "GIF" and 2 <= picture.n_frames <= 4
    asked = ("--seed", "7", "--max-steps", "3", "--episodes", "2", "--out", str(tmp_path / "new" / "cart.gif"))
    assert said("render", str(run_dir), *asked).split() == [str(tmp_path / "new" / f"cart-{n}.gif") for n in (1, 2)]
    alone = jaxrl.render(load_run(run_dir).policy, "gymnax:CartPole-v1", tmp_path / "b.gif", seed=8, max_steps=3)
    assert (tmp_path / "new" / "cart-2.gif").read_bytes() == alone.read_bytes()


def test_render_in_another_environment(said, run_dir, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(rendering, "render", lambda policy, env, path, **settings: seen.append((env, path)) or path)
    asked = ("--env", "gymnax:CartPole-v1", "--env-params", "gravity=1.0", "--best")
    said("render", str(run_dir), *asked, "--out", str(tmp_path / "light.MP4"))
    ((env, path),) = seen
    while hasattr(env, "env"):
        env = env.env
    assert env.name == "gymnax:CartPole-v1" and env.params.gravity == 1.0 and path == tmp_path / "light.MP4"
    said("render", str(run_dir), "--env", "gymnax:Pendulum-v1", code=2)


def test_plot(said, run_dir, tmp_path):
    picture = tmp_path / "curve.png"
    assert said("plot", str(run_dir), "--out", str(picture)).strip() == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    said("plot", str(run_dir), str(run_dir), "--out", str(picture), "--metric", "update/entropy")


def test_early_stop(said):
    assert "target return was reached" in said(
        *TRAIN, "--total-steps", "64", "--learning-rate", RATE, "--target-return", "0"
    )


@pytest.mark.long
def test_sweep(said, tmp_path):
    words = ["sweep", "ppo", "--env", "gymnax:CartPole-v1", *SMALL, "--total-steps", "32", "--devices", "1"]
    words += ["--seeds", "2", "--grid", "learning_rate=1e-3,1e-2", "--grid", "gamma=0.9"]
    header, *rows = said(*words, "--run-dir", str(tmp_path / "sweep")).splitlines()
    assert header.split()[:2] == ["learning_rate", "gamma"]
    assert {row.split()[0] for row in rows[:2]} == {"0.001", "0.01"}
    assert rows[-1] == f"curves, table and best policy: {tmp_path}/sweep"
    assert "checkpoint at step 32" in said("eval", str(tmp_path / "sweep"), "--episodes", "2")
    said("plot", str(tmp_path / "sweep"), "--out", str(tmp_path / "plotted.svg"))
    assert (tmp_path / "plotted.svg").read_text().count("learning") >= 2


@pytest.mark.long
def test_tune(said, tmp_path):
    """The last line is a command that trains with the best settings, digit for digit, and as all else was asked for."""
    pytest.importorskip("optuna")
    own = ["--devices", "1", "--trials", "2", "--seeds", "1", "--search", "random", "--run-dir", str(tmp_path)]
    own += ["--space", "learning_rate=log:1e-4:1e-2"] + ["--space=clip_value=False"]
    words = ["--env", "gymnax:CartPole-v1", *SMALL, "--total-steps", "32", "--gamma", "0.9"]
    *table, best = said("tune", "ppo", *own, *words).splitlines()
    assert "gamma" not in table[0] and len(table) == 3
    command = shlex.split(best)
    assert command[:4] == ["best:", "jaxrl", "train", "ppo"] and "--run-dir" not in command and "--space" not in command
    given, algo = read(command[3:])
    found = dict(zip(table[0].split(), table[1].split(), strict=True))["learning_rate"]
    assert f"{algo.learning_rate:.4g}" == found and algo.learning_rate != float(found)
    assert algo.clip_value is False and algo.gamma == 0.9 and algo.epochs == 1 and algo.network.torso == MLP((8,))
    assert given.run["total_steps"] == 32 and given.run["num_envs"] == 2


@pytest.mark.long
def test_pbt(said, tmp_path):
    """The command that it prints follows the winner's schedules, digit for digit, and all else that was asked for."""
    own = ["--devices", "1", "--population", "4", "--fraction", "0.5", "--exploit-every", "16", "--resample", "1"]
    own += ["--space", "learning_rate=log:1e-4:1e-2", "--space=clip=0.1,0.2,0.3", "--space=gamma=0.9"]
    own += ["--space=gae_lambda=0.9", "--space=max_grad_norm=0.5", "--space=value_cost=0.5", "--space=entropy_cost=0"]
    own += ["--run-dir", str(tmp_path / "population"), "--evaluation-episodes=2"]
    words = ["--env", "gymnax:CartPole-v1", *SMALL, "--total-steps", "64"]
    lines = said("pbt", "ppo", *own, *words).splitlines()
    assert lines[0].split() == ["member", "learning_rate", "clip", "score", "copies", "failed"]
    winner = int(lines[1].split()[0])
    assert f"winner: member {winner}, return " in lines[5] and "in 2 fresh episodes" in lines[5]
    command = shlex.split(lines[7].partition(": ")[2])
    given, algo = read(command[2:])
    lineage = sweep_directory.read_lineage(tmp_path / "population")
    for name in ("learning_rate", "clip"):
        assert getattr(algo, name) == lineage.schedule(name)
        assert lineage.schedule(name).values[-1] == lineage.hyperparameters[name][-1, winner]
    assert (algo.gamma, algo.gae_lambda, algo.max_grad_norm, algo.entropy_cost) == (0.9, 0.9, 0.5, 0.0)
    assert given.run["total_steps"] == 64 and "--population" not in command
    assert "winner's policy" in lines[-1]
    assert "checkpoint at step 64" in said("eval", str(tmp_path / "population"), "--episodes", "2")


@pytest.mark.long
@pytest.mark.faults
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path):
    command = [sys.executable, "-m", "jaxrl", *TRAIN, "--total-steps", "100000000", "--run-dir", str(tmp_path)]
    command += ["--evaluate-every", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    metrics, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "interrupted; run the same command again to resume" in printed
    steps = [int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdecimal()]
    assert steps and f"{max(steps):,} steps" in printed
    assert load_run(tmp_path).step == max(steps)


# --- help and lists ----------------------------------------------------------------------------------------------


def test_overview_names_every_command(said):
    printed = said()
    assert printed == said("--help")
    for command in main.COMMANDS:
        assert f"  {command} " in printed


@pytest.mark.parametrize("command", ["train", "sweep", "tune", "pbt"])
def test_help_lists_the_algorithms_that_a_command_takes(command, said):
    listed = said(command, "--help").split()
    for name, cls in OWN_ALGORITHMS.items():
        needs_data = any(isinstance(source, Dataset) for source in cls().experience.values())
        assert (name in listed) == (command == "train" or not needs_data), name


@pytest.mark.parametrize("name", OWN_ALGORITHMS)
def test_help_documents_every_field(said, name):
    printed = said("train", name, "--help-all").split()
    for flag in fields.algorithm_flags(jaxrl.make_algorithm(name))[0]:
        assert flag.help and (flag.option in printed or f"{flag.option}," in printed), flag.name
    assert {flag.option for flag in table.command_flags("train")} <= {word.strip(",") for word in printed}


def test_help_begins_with_the_algorithms_own_settings_and_leaves_machines_to_help_all(said):
    short, whole = (said("train", "ppo", how) for how in ("--help", "--help-all"))
    rare = ["network", "recording, logging and checkpoints", "host environments", "devices and machines"]
    places = [whole.index(f"{title} options") for title in ("evaluation and files", *rare)]
    assert places == sorted(places) and not any(f"{title} options" in short for title in rare)
    assert "--help-all" in short and not any(flag in short for flag in ("--coordinator", "--error-buffer", "--queue"))
    assert said("eval", "--help-all") == said("eval", "--help")
    assert len(said("train", "sac", "--help").splitlines()) <= 130


def test_envs(said):
    names = said("envs").split()
    assert names == jaxrl.environments()
    assert said("envs", "gymnax").split() == [name for name in names if name.startswith("gymnax:")]
    one = said("envs", "probe:Truncated")
    assert re.search(r"actions +Discrete\(n=2\)", one) and re.search(r"max_steps +5\n", one)
    assert one.index("static parameters") < one.index("continuous")
    assert re.search(r"reward_prob +0.1", said("envs", "gymnax:BernoulliBandit-misc"))
    assert "actions" in said("envs", "gymnasium:CartPole-v1")
    changed = said("envs", "probe:Truncated", "--env-params", "max_steps=3", "continuous=True")
    assert re.search(r"actions +Box", changed) and re.search(r"max_steps +3\n", changed)
    assert re.search(r"continuous +True\n", changed)


def test_one_suite_is_listed_without_the_others(said, monkeypatch):
    own, asked = table._names, []
    monkeypatch.setattr(table, "_names", lambda suite: asked.append(suite) or own(suite))
    assert said("envs", "gymnax:") == said("envs", "gymnax") and set(asked) == {"gymnax"}


def test_algos_tries_the_spaces(said):
    lines = {line.split()[0]: line for line in said("algos").splitlines() if line}
    assert "off-policy  discrete  " in lines["dqn"]
    assert "on-policy   discrete, continuous, composite" in lines["ppo"]
    assert set(PRESETS) <= set(lines)


def test_doctor(said):
    printed = said("doctor")
    for what in ("python", "jax: ", "devices", "random numbers: threefry2x32", "compiler", "disk", "no problem found"):
        assert what in printed


@pytest.mark.long
def test_what_was_not_finite_is_said_once_with_what_to_change(capsys):
    """In a line that is short; the result has all the names."""
    assert main.main([*TRAIN, "--total-steps", "64", "--learning-rate", "1e37"]) == 1
    printed = capsys.readouterr()
    (line,) = [line for line in printed.err.splitlines() if "not finite" in line]
    assert line.startswith("error: ") and "lower the learning rate" in line and "(docs/debugging.md)" in line
    assert len(line) < 320 and "not finite" not in printed.out


@pytest.mark.long
def test_a_folder_that_was_never_installed_is_no_traceback(tmp_path):
    """Nothing knows which versions it needs: no command that asks for them fails for that."""
    hidden = "import importlib.metadata as m, sys; found = m.version, m.metadata, m.requires\n"
    for number, name in enumerate(("version", "metadata", "requires")):
        hidden += f"def {name}(package):\n    if package == 'jaxrl': raise m.PackageNotFoundError(package)\n"
        hidden += f"    return found[{number}](package)\nm.{name} = {name}\n"
    hidden += "from jaxrl.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    for words, said in (
        (["--version"], f"jaxrl {jaxrl.__version__}"),
        (["doctor", "--run-dir", str(tmp_path)], "so its requirements are unknown; run pip install -e ."),
        (["envs", "probe"], "probe:Constant"),
    ):
        ran = python("-c", hidden, *words)
        assert ran.stderr == "" and said in ran.stdout, words


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo $PPID, python; echo 77, other", "also used by other processes (77, other)"),
        ("echo $PPID, python", None),
        ("echo broken driver; exit 9", "nvidia-smi failed: "),
    ],
)
def test_doctor_says_who_else_uses_a_gpu(script, said, tmp_path, monkeypatch):
    """By the program that NVIDIA's driver brings; here a script of its name, whose parent is this process."""
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = [finding.detail for finding in gpu_processes()]
    assert len(found) == (said is not None) and all(said in detail for detail in found), found


def test_doctor_finds_what_is_wrong(said, tmp_path):
    found = {f.what: f for f in packages(lambda package: ["jax<0.1", "nonsense-that-is-not-there", "numpy>=1"])}
    assert found["jax"].verdict == PROBLEM and "pip install 'jax<0.1'" in found["jax"].detail
    assert found["nonsense-that-is-not-there"].verdict == PROBLEM
    assert found["numpy"].verdict == OK
    assert "1 problem found" in said("doctor", "--run-dir", "/proc/self/fd", code=1)
    assert "is a pattern" in said("doctor", "--run-dir", str(tmp_path / "a[1]"), code=1)


def test_version(said):
    assert said("--version").strip() == f"jaxrl {jaxrl.__version__}"


# --- values as text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN_ALGORITHMS)
def test_every_default_is_read_back_from_its_text(name):
    algo = jaxrl.make_algorithm(name)
    for flag in fields.algorithm_flags(algo)[0]:
        if flag.kind.name == "network":
            assert flag.default == "None"  # of the user's own: jaxrl's is described by flags of its own
            continue
        value = functools.reduce(getattr, flag.name.split("."), algo)
        assert values.build(flag.read(flag.default)) == value and flag.default == fields.written(value)


RUN = ["ppo", "--env", "gymnax:CartPole-v1", "--total-steps", "9"]


@pytest.mark.parametrize(
    ("name", "words", "changes"),
    [
        # Switches that may be left open need no value.
        ("ppo", "--normalize-observation --network.shared", {"normalize_observation": True, "network.shared": True}),
        ("ppo", "--network.shared none --normalize_observation False", {"normalize_observation": False}),
        ("ppo", "--network.no_shared", {"network.shared": False}),
        ("ppo", "--network.value-observation-keys a,b", {"network.value_observation_keys": ("a", "b")}),
        # The flag of a part needs neither its name nor a value.
        ("dqn", "--munchausen none", {}),
        ("dqn", "--munchausen --no-double", {"munchausen": Munchausen(), "double": False}),
        ("dqn", "--munchausen=scale=0.5:clip=-2", {"munchausen": Munchausen(scale=0.5, clip=-2.0)}),
        ("dqn", "--munchausen munchausen:0.5:clip=-2", {"munchausen": Munchausen(scale=0.5, clip=-2.0)}),
        # It changes only what it names: R2D2's priorities have other numbers than the class.
        (
            "r2d2",
            "--prioritized beta=linear:0.4:1:exponent=0.7",
            {"prioritized.beta": Linear(0.4, 1.0), "prioritized.exponent": 0.7},
        ),
        (
            "r2d2",
            "--prioritized linear:0.4:0.6:0.5 --prioritized beta=0.3",
            {"prioritized.exponent": Linear(0.4, 0.6, 0.5), "prioritized.beta": 0.3},
        ),
        (
            "r2d2",
            "--prioritized.beta=linear:0.4:1 --prioritized 0.6",
            {"prioritized.beta": Linear(0.4, 1.0), "prioritized.exponent": 0.6},
        ),
        ("r2d2", "--prioritized", {}),
        ("r2d2", "--memory.cross-episodes", {"memory.cross_episodes": True}),
        ("r2d2", "--memory.no-cross-episodes", {"memory.cross_episodes": False}),
    ],
)
def test_flags_change_only_what_they_name(name, words, changes):
    algo = jaxrl.make_algorithm(name)
    assert read([name, *RUN[1:], *words.split()], algo)[1] == replace(algo, **changes)


def test_every_field_of_an_algorithm_can_be_set():
    given = ["--clip=linear:0.2:0.1", "--value-learning-rate", "1e-3", "--max-grad-norm", "none", "--epochs", "2"]
    given += ["--no-clip-value", "--whole-episodes", "8", "--kl-penalty", "0.02", "--optimizer", "rmsprop:0.9:eps=1e-3"]
    given += ["--network.torso", "mlp:32,16:activation=relu", "--network.core", "gru:8", "--network.shared"]
    _, changed = read([*RUN, *given])
    assert changed == jaxrl.PPO(
        clip=Linear(0.2, 0.1),
        value_learning_rate=1e-3,
        max_grad_norm=None,
        epochs=2,
        clip_value=False,
        whole_episodes=WholeEpisodes(episodes=8),
        kl_penalty=KLPenalty(target=0.02),
        optimizer=type(changed.optimizer)(decay=0.9, eps=1e-3),
        network=jaxrl.networks.ActorCritic(torso=MLP((32, 16), "relu"), core=GRU(8), shared=True),
    )
    assert type(changed.optimizer).__name__ == "RMSProp"


def test_the_command_of_a_search_sets_the_fields_of_parts():
    given = runs.ParsedCommand("tune", "sac", {}, {"temperature": ["initial=0.1"]}, {})
    words = shlex.split(train_command(given, {"temperature.learning_rate": 0.001, "policy.widths": (8, 8)}))[2:]
    algo = read([*words, "--env", "gymnax:Pendulum-v1", "--total-steps", "9"], jaxrl.SAC())[1]
    assert algo == jaxrl.SAC(temperature=Temperature(initial=0.1, learning_rate=0.001), policy=Actor(widths=(8, 8)))


@pytest.mark.parametrize("word", ["--no-clip-value=True", "--network.no-shared=True", "-clip-value"])
def test_what_is_no_switch_is_an_unknown_flag(word):
    refused(lambda: read([*RUN, word]), word.partition("=")[0])


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (int, "1e6", 1_000_000),
        (int, "500_000", 500_000),
        (int | None, "None", None),
        (float | None, "-1.5", -1.5),
        (tuple[int, ...], "1,2", (1, 2)),
        (bool, "false", False),
        (str | None, "text", "text"),
        *(
            (annotation, text, ConfigError)
            for annotation, text in [(int, "1.5"), (int, "inf"), (int, ""), (bool, "yes")]
        ),
        *((float, text, ConfigError) for text in ("nan", "1,5")),
    ],
)
def test_values(annotation, text, value):
    with pytest.raises(ConfigError) if value is ConfigError else contextlib.nullcontext():
        assert values.read(fields.kind_of(annotation), text) == value


def test_literals():
    words = values.assignments("--p", ["a=1", "b=1e-3", "c=pooled", "d=True", "e=none", "f=(1, 2)", "g=x=y"])
    assert {k: values.literal(v) for k, v in words.items()} == {
        "a": 1, "b": 1e-3, "c": "pooled", "d": True, "e": None, "f": (1, 2), "g": "x=y",
    }  # fmt: skip


def test_what_files_say_does_not_reach_the_terminal_as_commands(monkeypatch, capsys):
    evil = "\x1b]0;title\x07\x9b2J\ud800\u202e"
    assert main.main(["plot", evil]) == 2
    monkeypatch.setattr("jaxrl.data.load_dataset", lambda *_, **__: SimpleNamespace(report=lambda: Evil(evil)))
    assert main.main(["dataset", "info", "x"]) == 0
    with main._plain_warnings():
        warnings.warn(evil, RuntimeWarning, stacklevel=1)
    out, err = capsys.readouterr()
    as_shown = r"\x1b]0;title\x07\x9b2J\ud800\u202e"
    assert out == f"{as_shown}\n" and err.startswith(f"error: {as_shown}") and err.endswith(f"{as_shown}\n")


class Evil(str):
    faults = ()


def test_a_terminal_that_lacks_characters_is_written_to(monkeypatch):
    held = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(held, encoding="ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["jaxrl", "show"])
    monkeypatch.setattr(main.atexit, "register", lambda function: None)
    monkeypatch.setattr(main.interrupts, "own", lambda: None)
    monkeypatch.setattr(main, "_run", lambda argv: print("50 ± 1 ██ ö") or 0)
    assert main.main() == 0 and held.getvalue() == rb"50 +- 1 ## \xf6" + os.linesep.encode()


def test_a_process_ends_without_a_last_collection(monkeypatch, capsys):
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    main.main(["--help"])
    assert at_exit == [], "a caller's process goes on"
    monkeypatch.setattr(sys, "argv", ["jaxrl", "--help"])
    monkeypatch.setattr(main.interrupts, "own", lambda: None)
    main.main()
    assert at_exit == [gc.freeze]


# --- presets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_preset_is_valid(name):
    preset, known = PRESETS[name], jaxrl.environments()
    suite = preset.env.partition(":")[0]
    continuous = suite in ("brax", "playground") or preset.env in (
        "envpool:HalfCheetah-v4",
        "envpool:Hopper-v4",
        "gymnax:Pendulum-v1",
    )
    actions = jaxrl.spaces.Box(-1, 1, (2,)) if continuous else jaxrl.spaces.Discrete(6)
    observation = jaxrl.spaces.Box(-1, 1, (4,))
    if preset.env in ("envpool:Pong-v5", "envpool:Breakout-v5"):
        observation = jaxrl.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    elif "MinAtar" in preset.env:
        observation = jaxrl.spaces.Box(0, 1, (10, 10, 4))
    assert preset.algorithm.validate(EnvSpec("probe", observation, actions), preset.topology["num_envs"], 1) == []
    assert preset.name == name and preset.source
    installed = any(env.startswith(f"{suite}:") for env in known)  # a suite may be an extra
    assert preset.env in known or not installed


@pytest.mark.long
def test_the_topology_has_flags(said, tmp_path):
    run_dir = tmp_path / "run"
    printed = said(
        *("train", "ppo", "--env", "gymnasium:CartPole-v1", "--total-steps", "64", "--num-envs", "4", "--groups", "2"),
        *("--rollout-length", "16", "--lockstep", "True", "--evaluation-episodes", "2", "--run-dir", str(run_dir)),
    )
    assert "PPO on gymnasium:CartPole-v1: 64 steps" in printed
    topology = read_json(run_dir / "config.json")["topology"]
    assert (topology["num_envs"], topology["groups"], topology["lockstep"]) == (4, 2, True)
    said(*("train", "ppo", "--env", "gymnax:CartPole-v1", "--total-steps", "64", "--actors", "2"), code=2)


@pytest.mark.parametrize(
    ("mean", "deviation", "text"),
    [
        (483.5, 36.189, "return 483.50 ± 36.19"),
        (0.00213, 0.0004, "return 0.002130 ± 0.000400"),
        (-0.28125, 0.001, "return -0.2812 ± 0.0010"),
        (0.0, 0.0, "return 0.00 ± 0.00"),
        (math.nan, math.nan, "return nan ± nan"),
        (1e12, math.inf, "return 1000000000000.00 ± inf"),
    ],
)
def test_returns_of_any_size_are_shown_with_digits_that_say_something(mean, deviation, text):
    metrics = {"return_mean": mean, "return_std": deviation, "episodes": 16, "unfinished": 0}
    assert run_summary.score(metrics) == f"{text} over 16 episodes"
