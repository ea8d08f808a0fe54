"""Bad input on the command line: told in a paragraph, with exit code 2, before anything is compiled."""

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys

import jax
import pytest
from helpers.patience import PATIENCE

import jaxrl
from jaxrl.cli import main
from jaxrl.core import suite_modules
from jaxrl.parallel.program import Program
from jaxrl.run.directory import RunDirectory

ENV = ["--env", "gymnax:CartPole-v1"]
RUN = [*ENV, "--total-steps", "1000"]


@pytest.fixture
def refused(capsys, monkeypatch):
    """Runs a command line that must be refused; what it said, each run of white space as one space."""
    jax.devices()  # the tests' four CPU devices exist before a --devices asks for others

    def start(*_):
        raise AssertionError("training began")

    monkeypatch.setattr(Program, "start", start)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*argv):
        try:
            code = main.main(list(argv))
        except SystemExit as stopped:  # how tyro leaves
            code = stopped.code
        printed = capsys.readouterr()
        assert code == 2, printed
        assert "Traceback" not in printed.err
        return " ".join(printed.err.split())

    return run


def test_unknown_command(refused):
    assert "unknown command 'trian'; did you mean 'train'?" in refused("trian", "ppo")


def test_unknown_algorithm(refused):
    assert "unknown algorithm 'pppo'; did you mean 'ppo'" in refused("train", "pppo", *RUN)


def test_unknown_suite(refused):
    said = refused("train", "ppo", "--env", "gymnaxx:CartPole-v1", "--total-steps", "1000")
    assert "unknown suite 'gymnaxx'; did you mean 'gymnax'" in said


def test_unknown_environment(refused):
    said = refused("train", "ppo", "--env", "gymnax:CartPool-v1", "--total-steps", "1000")
    assert "'CartPole-v1'" in said


def test_environment_without_its_suite(refused):
    said = refused("train", "ppo", "--env", "CartPole-v1", "--total-steps", "1000")
    assert "did you mean" in said and "'gymnax:CartPole-v1'?" in said


def test_unknown_flag(refused):
    said = refused("train", "ppo", *RUN, "--learnig-rate", "1e-3")
    assert "unknown flag '--learnig-rate'; did you mean '--learning-rate'" in said
    assert "unexpected 'extra'" in refused("train", "ppo", *RUN, "extra")
    assert "Missing value" in refused("train", "ppo", *RUN, "--gamma")


def test_several_unknown_flags_are_told_at_once(refused):
    said = refused(
        "train", "ppo", *RUN, "--learnig-rate", "1e-3", "--gama", "0.9", "--network.tors=mlp", "--epochs", "x"
    )
    assert "--learning-rate" in said and "--gamma" in said and "--network.torso" in said and "--epochs: 'x'" in said


def test_several_wrong_values_are_told_at_once(refused):
    said = refused(
        *("train", "ppo", "--env", "gymnax:CartPool-v1", "--total-steps", "many"),
        *("--learning-rate", "fast", "--epochs", "2.5", "--gamma", "1.5", "--objective", "klip"),
        *("--network.core", "gruu:8", "--network.torso", "mlp:64,x", "--optimizer", "adam:epsilon=1"),
    )
    for part in (
        "--total-steps: 'many' is not a number",
        "--learning-rate: 'fast' is neither a number nor a schedule",
        "--epochs: '2.5' is not a whole number",
        "PPO.gamma=1.5 must be at least 0 and at most 1",
        "--objective: unknown value 'klip'; did you mean 'clip'",
        "--network.core: unknown part 'gruu'; did you mean 'gru'",
        "--network.torso: 'x' is not a number",
        "--optimizer: unknown argument of adam 'epsilon'; did you mean 'eps'",
        "CartPole-v1",
    ):
        assert part in said


def test_a_wrong_name_and_wrong_counts_are_told_at_once(refused):
    few = ("--total-steps", "0", "--num-envs", "0", "--keep", "0")
    said = refused("train", "ppo", "--env", "gymnax:CartPol-v1", *few)
    for part in ("did you mean 'CartPole-v1'", "total_steps=0 must be", "num_envs=0 must be", "keep=0 must be"):
        assert said.count(part) == 1


@pytest.mark.parametrize(
    ("flag", "here"),
    [("ent-coef", "entropy-cost"), ("n_steps", "rollout-length"), ("n-envs", "num-envs"), ("lr", "learning-rate")],
)
def test_words_of_other_libraries(refused, flag, here):
    assert f"unknown flag '--{flag}'; in jaxrl: '--{here}' (" in refused("train", "ppo", *RUN, f"--{flag}", "4")


def test_a_dataset_that_is_not_there(refused, tmp_path):
    said = refused("train", "iql", "--dataset", f"rlds:{tmp_path}/no", "--eval-env", ENV[1], "--total-steps", "9")
    assert "no is not a TFDS dataset: there is no such folder (jaxrl export-rlds writes one" in said


def test_nothing_given(refused):
    said = refused("train", "ppo")
    assert "--env NAME" in said and "--total-steps N" in said


def test_schedule_that_is_none(refused):
    assert "'linear:1' has 1 numbers; write linear:START:END[:UNTIL]" in refused(
        "train", "ppo", *RUN, "--learning-rate", "linear:1"
    )


def test_environment_parameter(refused):
    said = refused("train", "ppo", *RUN, "--env-params", "gravty=3", "force_mag")
    assert "'force_mag' is not of the form key=value" in said
    said = refused("train", "ppo", *RUN, "--env-params", "gravty=3", "--env-params", "masscat=1")
    assert "did you mean 'gravity'" in said and "did you mean 'masscart'" in said


def test_devices_that_do_not_divide(refused):
    said = refused("train", "ppo", *RUN, "--num-envs", "6", "--devices", "4")
    assert "num_envs=6 does not divide over 4 devices; use 4 or 8" in said


def test_more_devices_than_there_are(refused):
    assert "devices=4096 must be between 1 and" in refused(
        "train", "ppo", *RUN, "--num-envs", "4096", "--devices", "4096"
    )


def test_minibatches_that_do_not_divide(refused):
    said = refused("train", "ppo", *RUN, "--num-envs", "4", "--rollout-length", "8", "--minibatches", "5")
    assert "minibatches=5" in said


def test_no_environments(refused):
    assert "num_envs=0 must be at least 1" in refused("train", "ppo", *RUN, "--num-envs", "0")


def test_what_learns_from_a_dataset_asks_for_it_by_its_flag(refused):
    run = ["--env", "gymnax:Pendulum-v1", "--total-steps", "1000"]
    said = refused("train", "sac", *run, "--imitate")
    assert "error: SAC with --imitate learns from a dataset: --dataset PATH" in said
    assert "error: GAIL learns from a dataset: --dataset PATH" in refused("train", "gail", *run)
    said = refused("sweep", "sac", *run, "--imitate")
    assert "SAC with --imitate learns from a dataset, which jaxrl sweep does not take; use jaxrl train" in said


def test_a_sampler_that_others_take(refused):
    said = refused("train", "sac", *RUN, "--sampler", "prioritized:0.5", "--remover", "MaxHeap")
    assert "--sampler: SAC does not take prioritized, which is for d4pg, dqn, r2d2; write uniform or fifo or" in said
    assert "--remover: SAC does not take maxheap, which is for d4pg, dqn, r2d2; write fifo or lifo" in said
    assert "unknown part 'priorized'; known: fifo, lifo, uniform" in refused(
        "train", "sac", *RUN, "--sampler", "priorized"
    )


# Of Sebulba alone, each with a value.
ON_THE_HOST = {
    "--actors": "2",
    "--groups": "2",
    "--actor-devices": "2",
    "--actor-platform": "cpu",
    "--lockstep": "True",
    "--lag": "1",
    "--queue": "2",
    "--learner-batch": "8",
    "--max-lag": "20",
    "--parameter-period": "2",
    "--ready": "2",
    "--error-buffer": "512",
    "--step-timeout": "9",
    "--remote": "remote:2",
}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["dqn", *RUN], "gymnax:CartPole-v1 is in JAX (Anakin)"),
        (["bc", "--dataset", "rlds:nowhere", "--total-steps", "9"], "with a dataset alone nothing acts (Offline)"),
    ],
)
def test_flags_of_environments_on_the_host(refused, words, why):
    """They are told as they are typed, with what they are for."""
    only_there = {field.name for field in dataclasses.fields(jaxrl.Sebulba)}
    only_there -= {field.name for field in dataclasses.fields(jaxrl.Anakin)}
    assert {flag.removeprefix("--").replace("-", "_") for flag in ON_THE_HOST} == only_there
    said = refused("train", *words, *itertools.chain(*ON_THE_HOST.items()))
    flags = said.removeprefix("error: ").partition(":")[0].split(", ")
    assert sorted(flags) == sorted(ON_THE_HOST) and why in said
    said = refused("train", *words, "--error-buffer", "512")
    assert f"error: --error-buffer: only for environments on the host (Sebulba), and {why}; leave it out" in said
    assert "--env gymnasium:CartPole-v1" in said


def test_discrete_algorithm_on_a_continuous_space(refused):
    said = refused("train", "dqn", "--env", "gymnax:Pendulum-v1", "--total-steps", "1000")
    assert "DQN chooses among discrete actions" in said and "use PPO" in said


def test_network_that_does_not_fit(refused):
    assert "NatureCNN needs images" in refused("train", "ppo", *RUN, "--network.torso", "naturecnn")


def test_settings_of_the_run(refused):
    said = refused("train", "ppo", *RUN, "--evaluation-episodes", "0", "--keep", "0")
    assert "evaluation_episodes=0 must be at least 1" in said and "keep=0 must be at least 1" in said


def test_preset(refused):
    said = refused("train", "ppo", "--preset", "purejaxrl-carpole")
    assert "did you mean 'purejaxrl-cartpole'" in said
    assert "is for PPO, not for dqn" in refused("train", "dqn", "--preset", "purejaxrl-cartpole")


def test_run_directory_in_use(refused, tmp_path):
    with RunDirectory(tmp_path, {"algorithm": "other"}):
        said = refused("train", "ppo", *RUN, "--run-dir", str(tmp_path))
    assert f"in use by process {os.getpid()}" in said


def test_run_directory_of_another_configuration(refused, tmp_path):
    with RunDirectory(tmp_path, {"algorithm": {"type": "algorithm:ppo", "gamma": 0.5}, "seed": 0}):
        pass
    said = refused("train", "ppo", *RUN, "--run-dir", str(tmp_path))
    assert "algorithm.gamma: 0.5 -> 0.99" in said and "--overwrite" in said
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 0  # nothing lost


def test_disk_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").write_text("")
    said = refused("train", "ppo", *RUN, "--run-dir", str(tmp_path / "file" / "run"))
    assert "cannot write to the run directory" in said


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system that is read-only even to root")
def test_read_only_disk(refused):
    said = refused("train", "ppo", *RUN, "--run-dir", "/proc/self/run")
    assert "cannot write to the run directory /proc/self/run" in said


def test_options_of_host_environments(refused):
    run = ("train", "ppo", "--total-steps", "1000", "--env")
    said = refused(*run, "envpool:Pong-v5", "--env-params", "preset=clasic")
    assert "did you mean 'classic'" in said
    said = refused(*run, "gymnasium:CartPole-v1", "--env-params", "workers=-1", "restarts=1")
    assert "workers=-1 must be at least 0" in said


@pytest.mark.parametrize("env", ["brax:ant", "envpool:Pong-v5"])
def test_extra_that_is_not_installed(env, refused, monkeypatch):
    missing = env.partition(":")[0]
    monkeypatch.setattr("jaxrl.core.suites.installed", lambda suite: suite != missing)
    said = refused("train", "ppo", "--env", env, "--total-steps", "1000")
    assert f"pip install 'jaxrl[{missing}]'" in said


def test_no_run_to_evaluate(refused, tmp_path):
    assert "is not a run directory" in refused("eval", str(tmp_path / "nothing"))
    assert "no run directory: jaxrl eval RUN" in refused("eval")
    assert "--step-timeout: 0 must be more than 0" in refused("eval", str(tmp_path), "--step-timeout", "0")


def test_nothing_to_plot(refused, tmp_path):
    assert "no runs: jaxrl plot" in refused("plot")
    assert "is not a run directory" in refused("plot", str(tmp_path))


def test_grid_of_a_sweep(refused):
    said = refused("sweep", "ppo", *RUN, "--grid", "learnin_rate=1", "--grid", "gamma=0.9,high")
    assert "did you mean 'learning_rate'" in said and "'high' is neither a number nor a schedule" in said


def test_suite_of_envs(refused):
    assert "unknown suite 'gym'; did you mean 'gymnax'" in refused("envs", "gym")
    assert "unknown suite ''" in refused("envs", ":")


def test_parameters_in_envs(refused):
    assert "--env-params needs an environment" in refused("envs", "gymnax", "--env-params", "gravity=1")
    assert "did you mean 'gravity'" in refused("envs", "gymnax:CartPole-v1", "--env-params", "gravty=1")


def test_a_suite_that_is_not_installed(refused, monkeypatch):
    monkeypatch.setitem(suite_modules.SUITES, "navix", suite_modules.Own("jaxrl.envs.suites.navix", "no_such_package"))
    assert "pip install 'jaxrl[navix]'" in refused("envs", "navix")


NO_DEVICE = """
import sys, jaxrl
from jaxrl.cli import main
try:
    jaxrl.make("gymnax:CartPole-v1")
except jaxrl.core.errors.ConfigError as error:
    print(error)
sys.exit(main.main(["train", "ppo", "--env", "gymnax:CartPole-v1", "--total-steps", "1000"]))
"""


@pytest.mark.long
def test_a_platform_that_is_not_there():
    """JAX raises an AssertionError without a word."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX")}
    env |= {"JAX_PLATFORMS": "tpu" if shutil.which("nvidia-smi") else "cuda", "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", NO_DEVICE]
    ended = subprocess.run(words, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    for said in (ended.stdout, ended.stderr):
        assert f"JAX has no device of JAX_PLATFORMS={env['JAX_PLATFORMS']}" in said and "jaxrl[cuda13]" in said
