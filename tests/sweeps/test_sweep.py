"""Many runs in one program: each is the run alone, and one that fails disturbs none."""

import errno
import functools
import itertools
import json
import math
import signal

import jax
import numpy as np
import pytest
from helpers.programs import DQN, ENV, NUM_ENVS, PPO, ROWS, anakin, assert_equal
from helpers.refused import refused

import jaxrl
from jaxrl.core.errors import ConfigError, JaxrlError, RunDirectoryError
from jaxrl.run.directory import checkpoint
from jaxrl.sweeps.distributions import LogUniform, Uniform, configurations
from jaxrl.sweeps.vectorized import VectorizedRuns, chunk_many

UPDATES = 10
TOTAL = UPDATES * ROWS
PLAIN = PPO.replace(learning_rate=1e-2)
RATES = [1e-2, 1e30, 3e-3]  # the second destroys its run
SEEDS = [0, 4]


def sweep(algo=PLAIN, **settings):
    settings = {"total_steps": TOTAL, "topology": anakin(), "evaluation_episodes": 8, "points": 5} | settings
    return jaxrl.sweep(algo, ENV, **{"progress": False} | settings)


@functools.cache
def swept(mapping, devices):
    return sweep(seeds=SEEDS, learning_rate=RATES, mapping=mapping, devices=devices)


@functools.cache
def trained(rate, seed, algo=PLAIN, num_envs=None):
    """The same run by `train`."""
    return jaxrl.train(
        algo.replace(learning_rate=rate),
        ENV,
        total_steps=TOTAL,
        seed=seed,
        topology=anakin() if num_envs is None else None,
        num_envs=num_envs,
        evaluation_episodes=8,
        evaluate_every=0,
        progress=False,
    )


def learner(result, configuration, seed):
    return jax.tree.map(lambda x: x[seed], result.learners[configuration])


# --- a run of many is the run alone -------------------------------------------------------------------------------


@pytest.mark.exact
@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 4])
def test_mapped_in_turn_a_run_is_that_run_alone(devices):
    """Bit for bit, and on the same episodes at its end; of six runs on four devices, two have nothing real to do."""
    result = swept("in_turn", devices)
    for configuration in (0, 2):
        for place, seed in enumerate(SEEDS):
            alone = trained(RATES[configuration], seed)
            assert_equal(alone.state.learner, learner(result, configuration, place))
            np.testing.assert_array_equal(result.returns[configuration, place], alone.evaluation.returns)


@pytest.mark.long
def test_the_speed_that_is_shown_is_without_compiling(capsys):
    sweep(seeds=SEEDS, learning_rate=RATES, mapping="in_turn", devices=1, progress=True)
    compiling, first, *_, last = capsys.readouterr().err.splitlines()
    assert compiling == "compiling" and "steps/s" not in first and "left" not in first
    assert "steps/s" in last and "0:00 left" in last


@pytest.mark.long
def test_no_return_is_shown_before_an_episode_has_ended(capsys):
    """Episodes have 200 steps: the first of four parts, of 64, ends none."""
    settings = {"total_steps": 8 * 32 * 4, "points": 4, "evaluation_episodes": 1, "mapping": "in_turn"}
    jaxrl.sweep(PPO.replace(rollout_length=32), "gymnax:Pendulum-v1", num_envs=4, seeds=1, **settings)
    lines = capsys.readouterr().err.splitlines()
    shown = {line.partition(" /")[0]: "return" in line for line in lines if " / 1,024 steps" in line}
    assert shown["256"] is False and shown["1,024"] is True


@pytest.mark.exact
@pytest.mark.long
def test_under_vmap_every_run_is_that_run_alone_up_to_rounding():
    result, in_turn = swept("vmap", 1), swept("in_turn", 1)
    for configuration in (0, 2):
        for place, seed in enumerate(SEEDS):
            alone = trained(RATES[configuration], seed)
            assert_equal(alone.state.learner, learner(result, configuration, place), 1e-5)
    assert result.metrics.keys() == in_turn.metrics.keys()
    np.testing.assert_allclose(
        result.metrics["train/return_mean"][[0, 2]], in_turn.metrics["train/return_mean"][[0, 2]], rtol=1e-5
    )


@pytest.mark.exact
@pytest.mark.long
def test_make_train_is_train():
    """Bit for bit, and one entry of every metric for each update."""
    run = jax.jit(jaxrl.make_train(PLAIN, ENV, total_steps=TOTAL, topology=anakin()))
    state, metrics = run(jax.random.key(4))
    alone = trained(1e-2, 4)
    assert_equal(alone.state, state)
    assert {value.shape for value in metrics.values()} == {(UPDATES,)}
    rows = [row for row in alone.metrics if "update/policy_loss" in row]
    assert rows[0]["update/policy_loss"] == pytest.approx(float(metrics["update/policy_loss"][0]), rel=1e-6)


@pytest.mark.exact
@pytest.mark.long
@pytest.mark.parametrize("algo", [PLAIN, DQN], ids=["ppo", "dqn"])
def test_make_train_under_vmap(algo):
    """Over seeds and learning rates: each run as alone, to rounding."""

    def run(key, rate):
        tuned = algo.replace(learning_rate=rate)
        return jaxrl.make_train(tuned, ENV, total_steps=TOTAL, topology=anakin())(key)[0].learner

    runs = [(1e-2, 0), (3e-3, 4), (1e-2, 4)]
    rates = np.asarray([rate for rate, _ in runs], np.float32)
    many = jax.jit(jax.vmap(run))(jax.numpy.stack([jax.random.key(seed) for _, seed in runs]), rates)
    for place, (rate, seed) in enumerate(runs):
        alone = trained(rate, seed, algo).state.learner
        assert_equal(alone, jax.tree.map(lambda x, place=place: x[place], many), 1e-5)


def test_make_train_refuses_what_it_cannot_compile():
    refused(lambda: jaxrl.make_train(PPO, ENV, total_steps=TOTAL, topology=anakin(2)), "devices=2")
    refused(lambda: jaxrl.make_train(PPO, ENV, total_steps=10**13), "total_steps=10000000000000")


# --- one that fails -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("mapping", "devices"), [("in_turn", 1), ("vmap", 1), ("in_turn", 4)])
def test_a_run_that_fails_is_flagged_and_alone(mapping, devices):
    result = swept(mapping, devices)
    np.testing.assert_array_equal(result.failed, [[False, False], [True, True], [False, False]])
    assert np.isnan(result.scores[1]).all() and np.isfinite(result.scores[[0, 2]]).all()
    assert result.best in (result.configurations[0], result.configurations[2])
    assert all(np.isfinite(x).all() for place in (0, 2) for x in jax.tree.leaves(result.learners[place].network.params))
    failed = next(line for line in result.table().splitlines() if "1e+30" in line)
    assert failed.split()[-1] == "2"


# --- what is searched, and what comes back ------------------------------------------------------------------------


@pytest.mark.long
def test_labels():
    result = swept("in_turn", 1)
    assert result.configurations == [{"learning_rate": rate} for rate in RATES] and result.seeds == SEEDS
    np.testing.assert_array_equal(result.steps, [[2 * ROWS, 4 * ROWS, 6 * ROWS, 8 * ROWS, 10 * ROWS]] * 3)
    assert result.returns.shape == (3, 2, 8) and result.scores.shape == result.failed.shape == (3, 2)
    assert {curve.shape for curve in result.metrics.values()} == {(3, 2, 5)}
    assert {"train/return_mean", "train/episodes", "update/policy_loss"} <= set(result.metrics)
    np.testing.assert_allclose(result.scores[0], result.returns[0].mean(axis=-1), rtol=1e-6)
    assert result.wall_seconds > 0 and result.steps_per_second > 0


def test_table_has_the_best_first():
    lines = swept("in_turn", 1).table().splitlines()
    header = ["learning_rate", "IQM", "low", "high", "mean", "std", "min", "max", "training", "no", "score"]
    assert lines[0].split() == header and len(lines) == 4
    result = swept("in_turn", 1)
    assert float(lines[1].split()[0]) == result.best["learning_rate"]
    assert float(lines[1].split()[1]) >= float(lines[2].split()[1])
    with pytest.raises(ConfigError, match="'train/returns_mean'"):
        result.plot(metric="train/returns_mean")


def test_grid_and_random_search():
    grid = configurations(None, {"gamma": [0.9, 0.99], "clip": [0.1, 0.2, 0.3], "value_cost": 0.5})
    assert len(grid) == 6 and {tuple(c.values()) for c in grid} == {
        (gamma, clip, 0.5) for gamma in (0.9, 0.99) for clip in (0.1, 0.2, 0.3)
    }
    space = {"gamma": Uniform(0.9, 0.99), "learning_rate": LogUniform(1e-5, 1e-1), "epochs": [1, 4], "clip": 0.1}
    drawn = configurations(400, space, 1)
    assert drawn == configurations(400, space, 1) != configurations(400, space, 2)
    gammas = np.asarray([c["gamma"] for c in drawn])
    logs = np.log10([c["learning_rate"] for c in drawn])
    assert 0.9 <= gammas.min() and gammas.max() <= 0.99 and abs(gammas.mean() - 0.945) < 0.005
    assert -5 <= logs.min() and logs.max() <= -1 and abs(logs.mean() + 3) < 0.2
    assert {c["epochs"] for c in drawn} == {1, 4} and {c["clip"] for c in drawn} == {0.1}


@pytest.mark.long
def test_static_fields_make_groups():
    """One program for each combination of what is static, and the order of the configurations is kept."""
    result = sweep(seeds=SEEDS, mapping="in_turn", devices=1, epochs=[2, 1], learning_rate=RATES)
    tried = [(c["epochs"], c["learning_rate"]) for c in result.configurations]
    assert tried == [(epochs, rate) for epochs in (2, 1) for rate in RATES]
    assert_equal(trained(1e-2, 4).state.learner, learner(result, 0, 1))
    assert_equal(trained(3e-3, 4).state.learner, learner(result, 2, 1))
    assert np.isfinite(result.scores[[3, 5]]).all() and result.failed[[1, 4]].all()
    with pytest.raises(AssertionError):
        assert_equal(learner(result, 0, 0), learner(result, 3, 0))


def test_every_curve_has_the_steps_of_its_own_points():
    """Iterations of different lengths: the steps that a curve counts are those it is labelled with."""
    result = sweep(seeds=[4], mapping="in_turn", devices=1, rollout_length=[16, 8], total_steps=4 * ROWS, points=3)
    np.testing.assert_array_equal(result.steps, [[2 * ROWS, 4 * ROWS], [2 * ROWS, 4 * ROWS]])
    uneven = sweep(seeds=[4], mapping="in_turn", devices=1, rollout_length=[32, 8], total_steps=5 * ROWS, points=20)
    np.testing.assert_array_equal(uneven.steps, [[4 * ROWS, 8 * ROWS], [2 * ROWS, 5 * ROWS]])
    steps = uneven.metrics["train/transitions"][:, 0]
    resets = uneven.metrics["train/episodes"][:, 0]
    np.testing.assert_allclose((steps + resets).sum(axis=1), uneven.steps[:, -1], atol=NUM_ENVS)


def test_the_number_of_environments_can_be_tried():
    result = sweep(seeds=[4], mapping="in_turn", devices=1, topology=None, num_envs=[NUM_ENVS, 4], learning_rate=[1e-2])
    assert [c["num_envs"] for c in result.configurations] == [NUM_ENVS, 4]
    alone = trained(1e-2, 4, num_envs=4)
    assert_equal(alone.state.learner, learner(result, 1, 0))
    np.testing.assert_array_equal(result.returns[1, 0], alone.evaluation.returns)
    assert result.steps[0, -1] == result.steps[1, -1] == TOTAL


KEPT = {"seeds": SEEDS, "learning_rate": [1e-2, 3e-3], "epochs": [1, 2], "mapping": "in_turn", "devices": 1}


def end_at_chunk(monkeypatch, number, how):
    """From here on, the sweep's n-th chunk is under way when `how` happens."""
    begin, numbers = VectorizedRuns.chunk, itertools.count(1)

    def begin_or_end(self, *arguments):
        if next(numbers) == number:
            how()
        return begin(self, *arguments)

    monkeypatch.setattr(VectorizedRuns, "chunk", begin_or_end)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_told_to_end_saves_and_goes_on_bit_for_bit(number, tmp_path, monkeypatch):
    whole = sweep(**KEPT)
    # The eighth of ten chunks, in the second of two programs; of each, the shapes of a report are asked for first.
    end_at_chunk(monkeypatch, 10, lambda: signal.raise_signal(number))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
    try:
        with pytest.warns(RuntimeWarning, match=f"saved at step {6 * ROWS} "):
            with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as caught:
                sweep(run_dir=tmp_path, checkpoint_every=TOTAL, **KEPT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert number == signal.SIGINT or caught.value.code == 143
    assert checkpoint.complete_steps(tmp_path / "program-0" / "checkpoints") == [TOTAL]
    assert checkpoint.complete_steps(tmp_path / "program-1" / "checkpoints") == [6 * ROWS]
    with pytest.raises(RunDirectoryError, match="a sweep that has not ended"):
        jaxrl.load(tmp_path)
    monkeypatch.undo()
    lengths, chunk = [], VectorizedRuns.chunk
    monkeypatch.setattr(VectorizedRuns, "chunk", lambda *arguments: lengths.append(arguments[4]) or chunk(*arguments))
    again = sweep(run_dir=tmp_path, **KEPT)
    assert sum(lengths) == 4 + 2, "what was saved is not trained again; two are of shapes"
    for name in ("steps", "metrics", "returns", "failed", "learners"):
        assert_equal(getattr(whole, name), getattr(again, name))
    for name in ("metrics.jsonl", "table.csv"):
        assert (tmp_path / name).read_bytes() == (whole.save(tmp_path / "whole") / name).read_bytes()
    records = [json.loads((path / "sweep.json").read_text()) for path in (tmp_path, tmp_path / "whole")]
    for record, result in zip(records, (again, whole), strict=True):
        assert record.pop("wall_seconds") == result.wall_seconds
        assert record.pop("steps_per_second") == result.steps_per_second
    assert records[0] == records[1]
    finished = sweep(run_dir=tmp_path, **KEPT)
    assert sum(lengths) == 4 + 2 + 2, "all was saved; two are of shapes"
    for name in ("wall_seconds", "steps_per_second", "origin"):
        assert getattr(finished, name) == getattr(again, name), "of the call that trained"
    with pytest.raises(RunDirectoryError, match="sweep.seeds: .* -> .*"):
        sweep(run_dir=tmp_path, **KEPT | {"seeds": [1, 2]})
    started = sweep(run_dir=tmp_path, overwrite=True, **KEPT | {"seeds": [1, 2]})
    assert started.seeds == [1, 2] and lengths[4:].count(2) == 10
    assert json.loads((tmp_path / "sweep.json").read_text())["seeds"] == [1, 2]
    with pytest.raises(JaxrlError, match="is not a run directory"):
        jaxrl.load(tmp_path / "program-0")


@pytest.mark.long
def test_a_disk_that_is_full_costs_a_sweep_a_warning_and_nothing_else(tmp_path, monkeypatch):
    def full(path, record):
        raise OSError(errno.ENOSPC, "no space left on device")

    # As many runs as others here have, and so their program.
    one = {"seeds": SEEDS, "learning_rate": [1e-2, 2e-2, 3e-3], "mapping": "in_turn", "devices": 1}
    one |= {"checkpoint_every": 2 * ROWS, "run_dir": tmp_path}
    monkeypatch.setattr(checkpoint.manifests, "write", full)
    with pytest.warns(RuntimeWarning, match="no space left on device") as told:
        whole = sweep(**one)
    assert len(told) == 2 and "results of the sweep could not be saved" in str(told[1].message)
    assert checkpoint.complete_steps(tmp_path / "program-0" / "checkpoints") == []
    monkeypatch.undo()
    again = sweep(**one)
    for name in ("steps", "metrics", "returns", "failed", "learners"):
        assert_equal(getattr(whole, name), getattr(again, name))
    assert checkpoint.complete_steps(tmp_path / "program-0" / "checkpoints")[-1] == TOTAL


def test_a_sweep_does_not_write_through_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "program-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirectoryError, match="program-1 is a link to"):
        sweep(run_dir=tmp_path / "kept", **KEPT)
    assert not list((tmp_path / "elsewhere").iterdir()) and not (tmp_path / "kept" / "program-0").exists()


# --- what it costs ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("mapping", ["vmap", "in_turn"])
def test_memory_is_that_of_the_replays(mapping):
    """Each run's replay is there once, and changed in place; beside them there is next to nothing."""
    runs, big = 16, DQN.replace(capacity=NUM_ENVS * 8192, prioritized=None)
    many = VectorizedRuns(anakin().bind(big, ENV), 1, mapping, runs)
    algos = many.stack([big.replace(learning_rate=1e-2)] * runs)
    keys = many.stack([jax.random.key(seed) for seed in range(runs)])
    states = jax.eval_shape(many.start, algos, ENV, keys)
    replays = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(states.buffers))
    assert replays > 30e6, "the replays are to be what matters"
    arguments = (many, algos, ENV, states, np.int32(2), np.float32(100))
    memory = chunk_many.lower(*arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= replays, "the replays are not updated in place"
    assert memory.temp_size_in_bytes < 0.1 * replays, memory.temp_size_in_bytes / replays
    if mapping == "vmap":
        # A condition that differed by run would compute both sides, and select between whole replays.
        conditions, selected = 0, 0
        for equation in equations(jax.make_jaxpr(chunk_many, static_argnums=0)(*arguments).jaxpr):
            conditions += equation.primitive.name == "cond"
            if equation.primitive.name == "select_n":
                selected = max(selected, *(math.prod(x.aval.shape) for x in equation.outvars))
        assert conditions >= 1, "the wait for `min_size` is no branch any more"
        assert 0 < selected < 1e6, f"a select over {selected} numbers: the replays hold {replays / 4:.0f}"


def equations(jaxpr):
    """Every equation, those of inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                inner = inner.jaxpr
            if hasattr(inner, "eqns"):
                yield from equations(inner)
