"""`jaxrl compile`: what it leaves for the same `jaxrl train`, and what it says."""

import json
import re

import jax
import pytest
from helpers.processes import environment, python

from jaxrl.cli import main, training
from jaxrl.run import ahead

SMALL = ["--num-envs", "4", "--network.torso", "mlp:8", "--evaluation-episodes", "4", "--no-progress"]
PPO = ["ppo", *SMALL, "--rollout-length", "8", "--epochs", "1", "--minibatches", "2"]
COMPILED = [*PPO, "--env", "probe:Truncated"]
GYMNAX = [*PPO, "--env", "gymnax:CartPole-v1", "--env-params", "max_steps_in_episode=12"]
HOST = [*PPO, "--env", "gymnasium:CartPole-v1", "--env-params", "max_episode_steps=12"]
COMMANDS = """
import collections, json, sys
import jax
from jaxrl.cli import main

events = collections.Counter()
count = lambda event, *_, **__: events.update([event.rsplit("/", 1)[-1]])
jax.monitoring.register_event_listener(count)
jax.monitoring.register_event_duration_secs_listener(count)
codes = [main.main(command) for command in json.loads(sys.argv[1])]
print(json.dumps(events | {"codes": codes}))
"""


def run(folder, *commands):
    """Command lines in a process of their own: what it compiled and what it found in the cache, and what it printed."""
    variables = environment("JAX_COMPILATION_CACHE", "JAX_ENABLE_COMPILATION_CACHE", JAXRL_CACHE=str(folder))
    *printed, events = python("-c", COMMANDS, json.dumps(commands), env=variables).stdout.splitlines()
    return json.loads(events), printed


@pytest.mark.long
@pytest.mark.parametrize(("words", "main_program"), [(GYMNAX, "chunk"), (HOST, "learn")])
def test_train_compiles_nothing_after_compile(words, main_program, tmp_path):
    def command(name, total_steps):
        return [name, *words, "--run-dir", str(tmp_path / "run"), "--total-steps", total_steps]

    first, printed = run(tmp_path / "cache", command("compile", "10"))
    assert first["codes"] == [0] and first["cache_misses"] > 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"], "it wrote to the run's directory"
    (row,) = [line for line in printed if line.split()[:1] == [main_program]]
    assert row.count("B") == 4 and not row.endswith("-"), "bytes of arguments, outputs, temporaries, peak; FLOPs"
    *_, memory, kept = printed
    assert re.fullmatch(r"peak memory per device: [\d.]+ ([KM]i)?B, in program \w+", memory)
    assert f"stored in {tmp_path / 'cache'}" in kept
    # With another number of steps, evaluations and checkpoints on the way, and a resume.
    later, _ = run(tmp_path / "cache", command("train", "640"), command("train", "960"))
    assert later["codes"] == [0, 0] and later["backend_compile_duration"] == later["cache_hits"] > 3


def test_what_is_written_over_an_argument_counts_once():
    program = jax.jit(lambda kept, large: (kept @ kept, large + 1.0), donate_argnums=1)
    kept, large = jax.numpy.ones((64, 64)), jax.numpy.ones((256, 256))
    executable = program.lower(kept, large).compile().runtime_executable()
    (arguments, outputs, temporaries, at_once), _ = ahead._analysis(executable)
    assert arguments == 4 * (64 * 64 + 256 * 256)
    assert at_once == arguments + outputs + temporaries - 4 * 256 * 256


@pytest.fixture
def uncached(monkeypatch):
    """As where no cache is in use."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    for place in (ahead, training):
        monkeypatch.setattr(place, "keep_compiled_programs", lambda: None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_without_a_cache_nothing_would_be_kept(uncached, monkeypatch, capsys):
    monkeypatch.setattr(ahead, "run_training", None)  # nothing is begun
    assert main.main(["compile", *COMPILED, "--total-steps", "10"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is disabled" in line and "JAXRL_CACHE" in line


def test_an_interrupted_one_has_compiled_no_whole_run(monkeypatch, capsys):
    monkeypatch.setattr(ahead, "cache_folder", lambda: "somewhere")

    def train(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(ahead, "run_training", train)
    assert main.main(["compile", *COMPILED, "--total-steps", "10"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
