"""XLA's flags for programs of a GPU that compute the same in every process; here, where there is none."""

import os

import jax
import pytest
from helpers.processes import environment, python
from helpers.strict_json import read_json
from jax._src import xla_bridge

from jaxrl.core.errors import ConfigError
from jaxrl.parallel import determinism

BOTH = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"


@pytest.fixture
def flags(monkeypatch):
    """Sets the flags where XLA_FLAGS is `text`, and returns what it is afterwards."""

    def run(text, started=False, platform="gpu"):
        monkeypatch.setenv("XLA_FLAGS", text)
        monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: started)
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        determinism.set_flags()
        return os.environ["XLA_FLAGS"]

    return run


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", BOTH),
        ("--xla_dump_to=/tmp/Here", f"--xla_dump_to=/tmp/Here {BOTH}"),
        ("--xla_gpu_autotune_level=0", "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true"),
        ("--xla_gpu_deterministic_ops", "--xla_gpu_deterministic_ops --xla_gpu_autotune_level=0"),
        ("--xla_gpu_autotune_level=4 " + BOTH, "--xla_gpu_autotune_level=4 " + BOTH),  # the last one counts
    ],
)
def test_what_is_missing_is_added_to_the_flags_of_the_user(before, after, flags):
    assert flags(before) == after
    assert flags(after) == after


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--xla_gpu_autotune_level=4", "XLA_FLAGS has --xla_gpu_autotune_level=4; remove the flag"),
        (BOTH + " --xla_gpu_deterministic_ops=false", "has --xla_gpu_deterministic_ops=false"),
        ("/home/me/flags.txt", "XLA_FLAGS='/home/me/flags.txt' names a file"),
    ],
)
def test_flags_that_say_otherwise_are_refused(text, message, flags):
    with pytest.raises(ConfigError, match=message):
        flags(text)
    assert os.environ["XLA_FLAGS"] == text


def test_once_jax_has_started_a_gpu_needs_them_and_others_do_not(flags):
    with pytest.raises(ConfigError, match=f"XLA_FLAGS='{BOTH}'"):
        flags("", started=True)
    assert flags(BOTH, started=True) == BOTH
    assert flags("", started=True, platform="cpu") == flags("", started=True, platform="tpu") == ""


@pytest.mark.long
def test_the_command_sets_them_before_jax_starts(tmp_path):
    """XLA reads them once: it would end the process if it did not know them, and not see what comes later."""
    script = """if True:
        import os, sys
        from jax._src import xla_bridge
        from jaxrl.cli import main
        start = xla_bridge._init_backend
        def begin(platform):
            print(platform, "starts with", os.environ["XLA_FLAGS"])
            return start(platform)
        xla_bridge._init_backend = begin
        sys.exit(main.main(sys.argv[1:]))
    """
    words = ["train", "ppo", "--env", "probe:Truncated", "--num-envs", "2", "--rollout-length", "8"]
    words += ["--minibatches", "2", "--epochs", "1", "--network.torso", "mlp:8", "--evaluation-episodes", "2"]
    words += ["--total-steps", "16", "--deterministic", "--no-progress", "--run-dir", str(tmp_path / "run")]
    ran = python("-c", script, *words, env=environment(XLA_FLAGS="--xla_cpu_enable_fast_math=false"))
    assert f"cpu starts with --xla_cpu_enable_fast_math=false {BOTH}\n" in ran.stdout
    assert read_json(tmp_path / "run" / "config.json")["logging"]["deterministic"] is True
