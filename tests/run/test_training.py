"""The loop: what it writes, what it compiles, when it stops, and how it goes on."""

import csv
import json
import math
import re
import shutil
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import programs
from helpers.programs import DQN, ENV, NUM_ENVS, PPO, ROWS, Interrupt, anakin, assert_equal
from helpers.refused import raises
from helpers.served import ServedFromHost
from helpers.strict_json import read_json

import jaxrl
from jaxrl import envs
from jaxrl.algos.fields import Memory, Sampling
from jaxrl.core.errors import ConfigError, JaxrlError, RunDirectoryError
from jaxrl.core.schedules import Linear, resolve_schedules
from jaxrl.core.sources import Lifo, View
from jaxrl.core.types import env_spec
from jaxrl.networks import GRU, QNetwork
from jaxrl.run.directory import checkpoint
from jaxrl.run.directory.loading import load_run
from jaxrl.run.loggers import read_metrics
from jaxrl.run.loop import run_loop
from jaxrl.run.loop.timing import PARTS
from jaxrl.run.settings import network_lines, resolved_defaults

ITERATIONS = 12
TOTAL = ITERATIONS * ROWS


class Rows:
    """A logger that keeps what it is given, and calls `then` on every row."""

    def __init__(self, then=lambda number, step, metrics: None):
        self.rows, self.then, self.closed = [], then, 0

    def write(self, step, metrics):
        self.rows.append({"step": step} | dict(metrics))
        self.then(len(self.rows), step, metrics)

    def close(self):
        self.closed += 1


def train(run_dir=None, *, total_steps=TOTAL, **settings):
    settings = {"evaluate_every": 4 * ROWS, "checkpoint_every": 2 * ROWS, "evaluation_episodes": 8} | settings
    return programs.train(run_dir, total_steps=total_steps, **settings)


@pytest.fixture(autouse=True)
def long_chunks(monkeypatch):
    """Chunks that end at borders only, whatever the machine is doing: 1, then up to 8 times the last."""
    monkeypatch.setattr(run_loop, "_CHUNK_SECONDS", 1e6)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run with a run directory."""
    logger = Rows()
    return train(tmp_path_factory.mktemp("runs") / "whole", loggers=[logger]), logger


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """What a run that is interrupted in the middle leaves, each time in a directory of its own."""
    source = tmp_path_factory.mktemp("half") / "run"
    result = train(source, loggers=[Interrupt(6 * ROWS)])
    assert result.stopped == "interrupted" and result.total_steps < TOTAL

    def copy(where):
        shutil.copytree(source, where)
        return where

    return copy, result


# --- what it leaves behind --------------------------------------------------------------------------------------


def test_result(finished):
    result, logger = finished
    assert result.stopped == "finished" and result.problem is None and result.total_steps == TOTAL
    assert int(result.state.steps_per_env) == TOTAL // NUM_ENVS
    assert result.evaluation.episodes == 8 and result.evaluation.unfinished == 0
    assert result.evaluation.return_mean == pytest.approx(float(np.mean(result.evaluation.returns)))
    evaluated = [row["step"] for row in result.metrics if "evaluation/return_mean" in row]
    assert evaluated == [4 * ROWS, 8 * ROWS, 12 * ROWS]
    trained = [row for row in result.metrics if "update/policy_loss" in row]
    assert trained[-1]["step"] == TOTAL and {"train/return_mean", "seconds"} <= set(trained[-1])
    assert result.wall_seconds > 0 and result.steps_per_second > 0
    assert [row["step"] for row in logger.rows] == [row["step"] for row in result.metrics] and logger.closed == 1


def test_run_directory(finished):
    result, _ = finished
    record = read_json(result.run_dir / "result.json")
    names = {"evaluation", "stopped", "problem", "total_steps", "steps_per_second", "wall_seconds", "seconds"}
    names |= {"explored", "training_return"}
    assert set(record) == names | {"session_steps", "run_steps_per_second", "total_seconds", "start", "origin"}
    assert set(record["seconds"]) == set(PARTS)
    assert sum(record["seconds"].values()) - record["seconds"]["import"] == pytest.approx(record["wall_seconds"])
    assert record["session_steps"] == TOTAL and record["total_seconds"] == record["wall_seconds"]
    assert record["run_steps_per_second"] == pytest.approx(TOTAL / record["wall_seconds"])
    assert record["evaluation"] == json.loads(json.dumps(result.evaluation.metrics()))
    assert {"return_mean", "return_std", "episodes"} <= set(record["evaluation"])
    assert record["total_steps"] == TOTAL and record["stopped"] == "finished" and record["steps_per_second"] > 0
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [row["step"] for row in result.metrics]
    table = list(csv.DictReader((result.run_dir / "metrics.csv").open()))
    assert [int(row["step"]) for row in table] == [row["step"] for row in rows]
    assert list((result.run_dir / "tensorboard").glob("events.out.tfevents.*"))
    assert (result.run_dir / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    steps = sorted(int(path.name) for path in (result.run_dir / "checkpoints").iterdir())
    assert steps[-3:] == [8 * ROWS, 10 * ROWS, 12 * ROWS] and len(steps) <= 4  # the newest three, and the best
    config = read_json(result.run_dir / "config.json")
    assert config["topology"]["shards"] == 4 and config["seed"] == 0 and config["total_steps"] == TOTAL


def test_every_checkpoint_stays_where_as_many_are_kept(tmp_path):
    """With the default, keep=3, the newest three would."""
    train(tmp_path / "run", total_steps=6 * ROWS, evaluate_every=0, checkpoint_every=ROWS, keep=1000)
    steps = checkpoint.complete_steps(tmp_path / "run" / "checkpoints")
    assert steps == [ROWS * number for number in range(1, 7)]
    first, last = (jaxrl.load(tmp_path / "run", step=step) for step in (steps[0], steps[-1]))
    with pytest.raises(AssertionError):
        assert_equal(first.actor, last.actor)


def test_the_same_seed_is_the_same_run_and_chunks_do_not_matter(finished, monkeypatch):
    result, _ = finished
    monkeypatch.setattr(run_loop, "_CHUNK_SECONDS", 0.0)  # chunks of one iteration
    again = train()
    assert_equal(result.state, again.state)
    np.testing.assert_array_equal(result.evaluation.returns, again.evaluation.returns)
    other = train(seed=1)
    with pytest.raises(AssertionError):
        assert_equal(result.state, other.state)


@pytest.mark.long
def test_evaluations_do_not_disturb_training(finished):
    result, _ = finished
    assert_equal(result.state, train(evaluate_every=0, evaluation_episodes=3).state)


# --- nothing compiles and nothing moves --------------------------------------------------------------------------


@pytest.fixture
def guarded():
    """A function from whose call on no thread moves anything of this kind that it was not told to."""
    kinds = ("jax_transfer_guard", "jax_transfer_guard_device_to_device")
    before = {kind: getattr(jax.config, kind) for kind in kinds}
    yield lambda kind: jax.config.update(kind, "disallow")
    for kind, value in before.items():
        jax.config.update(kind, value)


@pytest.mark.long
@pytest.mark.parametrize(
    "where",
    [
        pytest.param({"topology": anakin(1), "evaluation_episodes": 6}, id="anakin"),
        pytest.param({"topology": anakin(2), "evaluation_episodes": 7}, id="two devices", marks=pytest.mark.long),
        pytest.param(
            {"env": ServedFromHost(ENV), "topology": jaxrl.Sebulba(NUM_ENVS, shards=4), "evaluation_episodes": 5},
            id="sebulba",
        ),
    ],
)
def test_no_compile_and_no_implicit_transfer_after_the_first_round(where, tmp_path, guarded):
    """Of host environments what they show is numpy, which goes to the device as an argument of the step that acts."""
    kind = "jax_transfer_guard_device_to_device" if "env" in where else "jax_transfer_guard"
    compiled = []  # other numbers of episodes are programs that no other test has compiled

    def listen(name, seconds, **_):
        if "backend_compile" in name:
            compiled.append(_.get("fun_name"))

    counted = []

    def count(number, step, metrics):
        if "evaluation/return_mean" in metrics:
            counted.append(len(compiled))
            if len(counted) == 1:
                # From here on: the first save, chunks of other lengths, evaluations, saves, the end.
                guarded(kind)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        result = train(
            tmp_path / "run", evaluate_every=2 * ROWS, checkpoint_every=2 * ROWS, loggers=[Rows(count)], **where
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert result.stopped == "finished" and len(counted) == ITERATIONS // 2
    assert counted[0] > 0, "the count counts nothing"
    assert counted[1:] == counted[:1] * (len(counted) - 1), compiled[counted[0] :]


def test_the_transfer_guard_would_have_seen_one():
    with pytest.raises(Exception, match="Disallowed host-to-device"), jax.transfer_guard("disallow"):
        jax.jit(lambda x: x + 1.0)(2.0)


# --- going on ---------------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_bit_for_bit(finished, half, tmp_path):
    whole, _ = finished
    copy, interrupted = half
    assert 6 * ROWS <= interrupted.total_steps < TOTAL and interrupted.evaluation
    record = read_json(copy(tmp_path / "run") / "result.json")
    assert record["stopped"] == "interrupted" and record["total_steps"] == interrupted.total_steps
    resumed = train(tmp_path / "run")
    assert resumed.stopped == "finished"
    assert_equal(whole.state, resumed.state)
    np.testing.assert_array_equal(whole.evaluation.returns, resumed.evaluation.returns)
    assert_rows_are_in_order(tmp_path / "run", [4, 8, 12])


def assert_rows_are_in_order(run_dir, evaluated):
    """No row twice, none from a future that did not happen."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    kinds = [(row["step"], "evaluation/return_mean" in row) for row in rows]
    assert kinds == sorted(set(kinds)), kinds
    assert [step // ROWS for step, evaluation in kinds if evaluation] == evaluated


def test_rows_that_a_killed_run_wrote_after_its_last_checkpoint_go(half, tmp_path):
    run_dir = half[0](tmp_path / "run")
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 11 * ROWS, "update/loss": 1e9}) + "\n" + '{"step": 99')
    resumed = train(run_dir)
    assert_rows_are_in_order(run_dir, [4, 8, 12])
    assert all(row.get("update/loss", 0.0) < 1e9 for row in resumed.metrics)
    assert [row["step"] for row in resumed.metrics] == [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")]


def test_a_finished_run_only_evaluates(finished, tmp_path):
    result, _ = finished
    run_dir = shutil.copytree(result.run_dir, tmp_path / "run")
    before = (run_dir / "metrics.jsonl").read_text()
    for _ in range(2):
        logger = Rows()
        again = train(run_dir, loggers=[logger])
        assert again.stopped == "finished" and again.total_steps == TOTAL and not logger.rows
        assert_equal(result.state, again.state)
        np.testing.assert_array_equal(result.evaluation.returns, again.evaluation.returns)
        assert (run_dir / "metrics.jsonl").read_text() == before
        assert read_json(run_dir / "result.json")["evaluation"]["episodes"] == 8


def test_more_total_steps_go_on(finished, tmp_path):
    run_dir = shutil.copytree(finished[0].run_dir, tmp_path / "run")
    longer = train(run_dir, total_steps=TOTAL + 4 * ROWS)
    assert longer.stopped == "finished" and longer.total_steps == TOTAL + 4 * ROWS
    assert int(longer.state.steps_per_env) == longer.total_steps // NUM_ENVS
    assert_rows_are_in_order(run_dir, [4, 8, 12, 16])


@pytest.mark.long
def test_fewer_devices_go_on(finished, tmp_path, half):
    """The shards are what a run depends on; the devices that share them may change."""
    stopped = train(tmp_path / "run", topology=anakin(2), loggers=[Interrupt(6 * ROWS)])
    assert stopped.stopped == "interrupted"
    resumed = train(tmp_path / "run", topology=anakin(1))
    assert resumed.stopped == "finished" and resumed.total_steps == TOTAL
    assert_equal(finished[0].state, resumed.state, 1e-5)
    raises(
        RunDirectoryError,
        "topology.shards: 4 -> 2",
        train,
        tmp_path / "run",
        topology=jaxrl.Anakin(num_envs=NUM_ENVS, devices=1, shards=2),
    )


# --- ends -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_target_return_ends_the_run(tmp_path):
    result = train(tmp_path / "run", target_return=1.0)
    assert result.stopped == "target_return" and result.total_steps == 4 * ROWS
    assert read_json(tmp_path / "run" / "result.json")["stopped"] == "target_return"
    again = train(tmp_path / "run", target_return=1.0)
    assert again.stopped == "target_return" and again.total_steps == 4 * ROWS
    np.testing.assert_array_equal(again.evaluation.returns, result.evaluation.returns)
    assert_rows_are_in_order(tmp_path / "run", [4])
    # A higher target, and it goes on.
    assert train(tmp_path / "run", target_return=1e6).stopped == "finished"
    assert_rows_are_in_order(tmp_path / "run", [4, 8, 12])


def test_training_in_another_thread(finished):
    """Signals belong to the main thread; training does not."""
    results = []
    thread = threading.Thread(target=lambda: results.append(train()))
    thread.start()
    thread.join()
    assert_equal(finished[0].state, results[0].state)


def test_quiet():
    """A run warns of nothing where nothing is wrong, also when no episode ends for a while."""
    with warnings.catch_warnings(action="error"):
        warnings.filterwarnings("ignore", message=".*optax.global_norm.*")
        result = train(env=jaxrl.make("gymnax:CartPole-v1"), total_steps=ROWS, evaluation_episodes=2)
    assert "train/episodes" in result.metrics[0]
    assert all(math.isfinite(value) for row in result.metrics for value in row.values())


@pytest.mark.long
def test_a_run_that_ends_before_its_first_update_says_so():
    with pytest.warns(RuntimeWarning, match=f"total_steps={ROWS} is too small.*min_size"):
        train(algo=DQN, total_steps=ROWS, evaluate_every=0)
    with warnings.catch_warnings(action="error", category=RuntimeWarning):
        train(algo=DQN, total_steps=16 * NUM_ENVS, evaluate_every=0)


@pytest.mark.parametrize(
    ("settings", "empty"),
    [
        ({"sampling": Sampling(max_times_sampled=4)}, ["69%"]),
        ({"view": View(20, Lifo(), max_times_sampled=1)}, ["50%"]),
        ({"sampling": Sampling(max_times_sampled=13)}, []),
    ],
)
def test_a_replay_that_will_be_used_up_is_named_before_training(tmp_path, settings, empty):
    algo = jaxrl.DQN(batch_size=128, replay_ratio=0.1, **settings)
    # There is nothing to begin with.
    with warnings.catch_warnings(record=True, action="always") as caught, pytest.raises(JaxrlError):
        jaxrl.train(algo, "gymnax:CartPole-v1", total_steps=5_000, topology=anakin(), init_from=tmp_path)
    assert [
        re.search("[0-9]+%", str(one.message))[0] for one in caught if "samples are missing" in str(one.message)
    ] == empty


def test_progress_is_shown(capsys):
    train(total_steps=2 * ROWS, progress=True)
    assert f"{2 * ROWS:,} / {2 * ROWS:,} steps" in capsys.readouterr().err


# --- bad input --------------------------------------------------------------------------------------------------


def test_a_run_of_another_configuration_is_left_alone(half, tmp_path):
    run_dir = half[0](tmp_path / "run")
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}
    raises(RunDirectoryError, r"0.99 -> 0.5[\s\S]*0 -> 3", train, run_dir, algo=PPO.replace(gamma=0.5), seed=3)
    assert before == {path: path.read_bytes() for path in before}
    fresh = train(run_dir, algo=PPO.replace(gamma=0.5), seed=3, overwrite=True, total_steps=2 * ROWS)
    assert fresh.total_steps == 2 * ROWS and fresh.metrics[0]["step"] == ROWS


@pytest.mark.long
def test_without_the_replay_a_run_that_goes_on_fills_it_first(tmp_path):
    settings = {"run_dir": tmp_path / "run", "algo": DQN, "evaluate_every": 0, "save_replay": False}
    first = train(total_steps=6 * ROWS, **settings)
    assert first.state.learner.updates == 10, "two a round, from the second of six rounds on"
    again = train(total_steps=9 * ROWS, **settings)
    # Of the three rounds that follow, the first only stores.
    assert again.state.learner.updates == 14 and again.state.buffers["replay"].ring.filled == 3 * 8
    assert int(again.state.steps_per_env) == 9 * 8 and int(again.state.empty_at) == 6 * 8

    def saved():
        return [leaf.name for leaf in checkpoint.read_manifest(tmp_path / "run" / "checkpoints").leaves]

    assert saved() and not [name for name in saved() if "buffers" in name]
    settings["save_replay"] = True  # it may be changed
    last = train(total_steps=10 * ROWS, **settings)
    assert last.state.learner.updates == 14 and [name for name in saved() if "buffers" in name]


@pytest.mark.long
def test_a_run_that_goes_on_with_other_programs_says_so(tmp_path):
    settings = {"evaluate_every": 0, "run_dir": tmp_path / "run"}
    train(total_steps=2 * ROWS, **settings)
    with pytest.warns(RuntimeWarning, match=rf"=True from step {2 * ROWS} "):
        train(total_steps=3 * ROWS, deterministic=True, **settings)
    assert read_json(tmp_path / "run" / "config.json")["logging"]["deterministic"] is True
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="deterministic")
        train(total_steps=4 * ROWS, deterministic=True, **settings)
    with pytest.warns(RuntimeWarning, match=rf"=False from step {4 * ROWS} "):
        train(total_steps=5 * ROWS, **settings)


# --- defaults that depend on the environment -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "env", "said", "networks"),
    [
        (
            jaxrl.PPO(learning_rate=1e-3),  # without one nothing can be initialized
            "gymnax:CartPole-v1",
            ["normalize_observation: False", "normalize_reward: False", "entropy_cost: 0.01", "epochs: 4"],
            ["network: ActorCritic, layers policy 64, 64, 2; value 64, 64, 1; 9,155 parameters"],
        ),
        (
            jaxrl.DQN(learning_rate=1e-3),
            "gymnax:Breakout-MinAtar",
            ["rollout_length: 1", "n_step: 1"],
            ["network: QNetwork, layers conv 16, 128, 3; 132,179 parameters"],
        ),
        (
            jaxrl.IQL(),
            "gymnax:Pendulum-v1",
            ["rollout_length: 1"],
            [
                "policy: Actor, layers 256, 256, 1 + 1; 67,330 parameters",
                "critic: Critic, layers 2 x 256, 256, 1; 134,658 parameters",
                "value: Critic, layers 256, 256, 1; 67,329 parameters",
            ],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_defaults_are_resolved_from_the_environment(algo, env, said, networks):
    spec = env_spec(envs.prepared(jaxrl.make(env)))
    resolved = algo.resolve(spec, 8)
    lines = resolved_defaults(algo, resolved)
    assert len(lines) == len(said) and all(map(str.startswith, lines, said)), lines
    assert network_lines(resolved, spec) == networks
    assert resolved.resolve(spec, 8) == resolved and resolved_defaults(resolved, resolved) == []
    one, other = (
        jax.eval_shape(lambda key, a=a: resolve_schedules(a, jnp.float32(0)).init(key, spec), jax.random.key(0))
        for a in (algo, resolved)
    )
    assert jax.tree.structure(one) == jax.tree.structure(other), "what it resolves to is what it was all along"
    assert jax.tree.leaves(one) == jax.tree.leaves(other)


@pytest.mark.parametrize(
    ("env", "rate", "persistence"),
    [("CartPole-v1", 5e-4, 0.95), ("Breakout-MinAtar", 5e-3, 0.0), ("FourRooms-misc", 5e-4, 0.95)],
)
def test_rates_and_exploration_suit_the_observations(env, rate, persistence):
    spec = env_spec(envs.prepared(jaxrl.make(f"gymnax:{env}")))
    assert jaxrl.PPO().resolve(spec, 8).learning_rate == Linear(rate, 0.0)
    assert jaxrl.PPO(learning_rate=1e-4).resolve(spec, 8).learning_rate == 1e-4
    assert jaxrl.PQN().resolve(spec, 8).random_persistence == persistence
    assert jaxrl.PQN(random_persistence=0.5).resolve(spec, 8).random_persistence == 0.5


@pytest.mark.long
@pytest.mark.parametrize(("algo", "field"), [(jaxrl.PPO(), "learning_rate"), (jaxrl.PQN(), "random_persistence")])
def test_what_is_open_is_not_guessed(algo, field):
    spec = env_spec(envs.prepared(jaxrl.make("gymnax:CartPole-v1")))
    with pytest.raises(ConfigError, match=f"{field} is not set"):
        algo.init(jax.random.key(0), spec)
        algo.initial_carry(spec, jnp.int32(0), 1)


def test_the_default_number_of_environments_follows_the_algorithm():
    def of(algo, topology=jaxrl.Anakin()):  # noqa: B008  frozen
        return topology.resolve(algo).num_envs

    assert [of(jaxrl.make_algorithm(name)) for name in ("ppo", "a2c", "impala", "pqn", "r2d2", "bc")] == [8] * 6
    assert [of(jaxrl.make_algorithm(name)) for name in ("dqn", "sac", "td3", "ddpg", "d4pg", "mpo", "cql")] == [1] * 7
    assert of(jaxrl.SAC(), jaxrl.Sebulba(actors=3, groups=2)) == 6  # one for each group
    assert of(jaxrl.PPO(), jaxrl.Sebulba(actors=3)) == 9
    assert of(jaxrl.SAC(), jaxrl.Anakin(devices=2)) == of(jaxrl.SAC(), jaxrl.Anakin(shards=2)) == 2
    assert of(jaxrl.SAC(), jaxrl.Sebulba(devices=2)) == of(jaxrl.SAC(), jaxrl.Sebulba(ready=2)) == 2
    assert of(jaxrl.SAC(), jaxrl.Sebulba(groups=2, remote=jaxrl.Remote(actors=4))) == 4
    assert of(jaxrl.SAC(), jaxrl.Anakin(32)) == of(jaxrl.SAC(), jaxrl.Sebulba(32)) == 32


def test_updates_come_one_by_one_unless_told():
    spec = env_spec(jaxrl.make("gymnax:CartPole-v1"))
    lengths = [jaxrl.DQN(replay_ratio=0.25).resolve(spec, num_envs).rollout_length for num_envs in (0, 1, 2, 4, 64)]
    assert lengths == [4, 4, 2, 1, 1]
    assert jaxrl.DQN(rollout_length=7).resolve(spec, 1).rollout_length == 7
    sequences = jaxrl.DQN(network=QNetwork(core=GRU(4)), memory=Memory(length=20))
    assert [sequences.replace(replay_ratio=ratio).resolve(spec, 8).rollout_length for ratio in (1.0, 1e-3)] == [5, 5]
    assert jaxrl.DQN(replay_ratio=1e-5).resolve(spec, 1).rollout_length == 128
    assert jaxrl.SAC(rollout_length=0).resolve(spec, 1).rollout_length == 0  # and refused
    for field, value, said in (
        ("rollout_length", 2.5, "DQN.rollout_length=2.5 must be a whole number"),
        ("rollout_length", 0, "DQN.rollout_length=0 must be at least 1"),
        ("replay_ratio", "1", "DQN.replay_ratio='1' must be a number"),
    ):
        raises(
            ConfigError,
            said,
            jaxrl.train,
            jaxrl.DQN(**{field: value}),
            "gymnax:CartPole-v1",
            total_steps=100,
            progress=False,
        )


@pytest.mark.long
def test_a_run_prints_and_keeps_what_was_resolved(tmp_path, capfd):
    settings = {"total_steps": 8, "num_envs": 2, "evaluation_episodes": 2, "run_dir": tmp_path / "run"}
    algo = jaxrl.PPO(rollout_length=4, epochs=1, minibatches=1)
    result = jaxrl.train(algo, "gymnax:CartPole-v1", **settings)
    printed = "".join(capfd.readouterr())
    assert "Settings chosen for this environment:\n" in printed
    assert "network: ActorCritic, layers policy 64, 64, 2; value" in printed
    config = read_json(tmp_path / "run" / "config.json")
    assert config["algorithm"]["network"]["torso"]["type"] == "torso:mlp"
    assert result.algo == algo.resolve(result.spec, 2) == load_run(tmp_path / "run").algo
