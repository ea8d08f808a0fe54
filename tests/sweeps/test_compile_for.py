"""Compiling for accelerators that are not here: what is reported, and that every algorithm compiles for a pod."""

import dataclasses
import importlib.util

import jax
import pytest
from algorithms import ALGORITHMS, BOX
from helpers.programs import DQN, PPO, R2D2
from helpers.tpu_compiler import tpu_compiler  # noqa: F401

import jaxrl
from jaxrl.cli import main
from jaxrl.core.errors import ConfigError
from jaxrl.networks import ActorCritic, MinAtarCNN
from jaxrl.parallel import targets

ENV = jaxrl.make("probe:Truncated", max_steps=3)
RUNS = {
    **{name: (ALGORITHMS[name], ENV) for name in ("ppo", "recurrent_ppo", "dqn", "pqn", "impala", "a2c")},
    "r2d2": (R2D2.replace(batch_size=16), ENV),
    "flashbax": (DQN.replace(storage="flashbax", n_step=1), ENV),
    "minatar": (PPO, "gymnax:Breakout-MinAtar"),
    "brax": (PPO, "brax:inverted_pendulum"),
    **{name: (ALGORITHMS[name], BOX) for name in ("sac", "crossq_continuous", "mpo", "td3", "ddpg", "d4pg")},
}


# --- names and descriptions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "extra"), [("v5e:2x2", "tpu-target"), ("h100", "cuda13")])
def test_without_the_compiler_the_extra_is_named(name, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    targets.get.cache_clear()
    with pytest.raises(ConfigError, match=rf"pip install 'jaxrl\[{extra}\]'"):
        jaxrl.compile_for(name, "ppo", "probe:Truncated")


def test_every_card_is_described_in_full():
    cards = targets._DESCRIPTIONS["gpu"]
    for name, card in cards.items():
        assert card.keys() == cards["h100"].keys(), name
        text = targets._GPU.format(**card)
        assert text.count("{") == text.count("}") == 4 and f"device_memory_size: {card['memory']} " in text
        # What a block may take is less than what a multiprocessor has, and memory is what the name says, about.
        assert card["shared_memory_per_block"] < card["shared_memory_per_core"]
    assert all(
        entry["memory"] >= 2**34 and entry["source"]
        for kinds in targets._DESCRIPTIONS.values()
        for entry in kinds.values()
    )


# --- compiled for TPUs -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_it_compiles_for_sixteen_chips(name, tpu_compiler):  # noqa: F811
    algo, env = RUNS[name]
    algo = algo.replace(capacity=2**14) if hasattr(algo, "capacity") else algo  # what 16 chips hold
    report = jaxrl.compile_for("v5e:4x4", algo, env, num_envs=64, evaluation_episodes=16)
    assert [program.name for program in report.programs] == ["start", "chunk", "evaluation"]
    assert report.devices == 16 and report.device_kind == "TPU v5 lite" and report.device_memory == 2**34
    chunk = report["chunk"]
    assert 0 < chunk.peak_bytes < 2**30 and chunk.argument_bytes > 0 and chunk.seconds > 0
    assert chunk.iteration.all_collectives()["all-reduce"] >= 1, "gradients are averaged over the chips"
    assert not report["evaluation"].body.all_collectives(), "every chip has the policy"
    assert "16 devices (TPU v5 lite) with 16 GiB" in str(report) and "all-reduce" in str(report)


@pytest.mark.long
def test_the_report_counts_what_ppo_does(tpu_compiler):  # noqa: F811
    """Gradients are averaged in every minibatch: a loop of as many passes, each with the same collectives."""
    algo = PPO.replace(epochs=2, minibatches=3)
    four = jaxrl.compile_for("v5e:2x2", algo, ENV, num_envs=3072, evaluation_episodes=8)
    one = jaxrl.compile_for("v5e:2x2", algo, ENV, num_envs=3072, devices=1, evaluation_episodes=8)
    iteration = four["chunk"].iteration
    minibatches = [loop for loop in iteration.loops if loop.trips == 2 * 3 and loop.collectives]
    assert len(minibatches) == 1 and len([loop for loop in iteration.loops if loop.trips == algo.rollout_length]) >= 1
    within = iteration.all_collectives() - iteration.collectives
    assert within == {kind: 6 * count for kind, count in minibatches[0].collectives.items()}
    assert not one["chunk"].iteration.all_collectives() and one.devices == 1
    assert four.steps_per_iteration == one.steps_per_iteration == 3072 * algo.rollout_length
    # The state is shared out but for the learner, which every chip has.
    assert four["chunk"].argument_bytes < one["chunk"].argument_bytes


@pytest.mark.long
def test_a_sweep_has_runs_that_exchange_nothing(tpu_compiler):  # noqa: F811
    report = jaxrl.compile_for("v5e:2x2", PPO, ENV, num_envs=8, runs=8, evaluation_episodes=4)
    assert report.devices == 4 and report.steps_per_iteration == 8 * 8 * PPO.rollout_length
    assert [program.name for program in report.programs] == ["start", "chunk", "evaluation"]
    assert not any(program.body.all_collectives() for program in report.programs)


@pytest.mark.long
def test_what_does_not_fit_is_refused_before_it_is_compiled(tpu_compiler):  # noqa: F811
    with pytest.raises(ConfigError, match="replay .* 16 GiB .*capacity="):
        jaxrl.compile_for("v5e:2x2", DQN.replace(capacity=2**30), "gymnax:Breakout-MinAtar", num_envs=64)
    with pytest.raises(ConfigError, match="rollouts .* 16 GiB"):
        jaxrl.compile_for("v5e:2x2", PPO.replace(rollout_length=2**14), "gymnax:Breakout-MinAtar", num_envs=2**16)
    with pytest.raises(ConfigError, match="devices=5 .* and 4, the number"):
        jaxrl.compile_for("v5e:2x2", PPO, ENV, devices=5, num_envs=5)
    with pytest.raises(ConfigError, match="devices=8 .* and 4, the number"):
        jaxrl.compile_for("v5e:2x2", PPO, ENV, devices=8, runs=16)
    with pytest.raises(ConfigError, match="replay .*4 devices.*capacity="):
        jaxrl.compile_for("v5e:2x2", DQN.replace(capacity=2**26), "gymnax:Breakout-MinAtar", runs=16)
    with pytest.raises(ConfigError, match="cannot compile for target='v5e:3x7'"):
        jaxrl.compile_for("v5e:3x7", PPO, ENV)
    with pytest.raises(ConfigError, match="Anakin needs an environment in JAX"):
        jaxrl.compile_for("v5e:2x2", "ppo", "gymnasium:CartPole-v1")


@pytest.mark.long
def test_the_command_prints_the_report(tpu_compiler, capsys, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    platforms = jax.config.jax_platforms
    words = ["--num-envs", "8", "--rollout-length", "8", "--network.torso", "mlp:8", "--evaluation-episodes", "4"]
    try:
        assert main.main(["compile", "ppo", "--env", "probe:Truncated", *words, "--target", "v5e:2x2"]) == 0
    finally:
        jax.config.update("jax_platforms", platforms)
    printed = capsys.readouterr().out
    assert "v5e:2x2: 4 devices" in printed and "chunk, compiled in" in printed and "x 16" in printed
    assert not list(tmp_path.iterdir())


def test_many_hosts_worth_of_chips_and_an_image_torso(tpu_compiler):  # noqa: F811
    report = jaxrl.compile_for("v5e:16x16", PPO, "gymnax:CartPole-v1", num_envs=4096, evaluation_episodes=256)
    assert report.devices == 256 and report["chunk"].iteration.all_collectives()["all-reduce"] >= 1
    images = dataclasses.replace(PPO, network=ActorCritic(MinAtarCNN(), shared=True))
    report = jaxrl.compile_for("v5e:2x2", images, "gymnax:Breakout-MinAtar", num_envs=64, evaluation_episodes=16)
    assert report["chunk"].peak_bytes < 2**30
