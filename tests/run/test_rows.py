"""Rows of training metrics: at the same steps on every machine, whatever its chunks, and after a kill."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import programs
from helpers.programs import DQN, PPO, ROWS, assert_equal
from helpers.tiers import one_quick
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.core.report import EpisodeSums, Report, joined
from jaxrl.parallel.program import Program
from jaxrl.run.callbacks import FunctionCallback
from jaxrl.run.loop import run_loop
from jaxrl.run.loop.metric_rows import TrainingRows, row_period
from jaxrl.run.loop.timing import ChunkTimes

TIMED = ("seconds", "steps_per_second", "updates_per_second", "inserts_per_second", "samples_per_second")


def train(run_dir=None, *, total=12, **settings):
    settings = {"evaluate_every": 5 * ROWS, "checkpoint_every": 3 * ROWS, "evaluation_episodes": 2} | settings
    return programs.train(run_dir, total_steps=total * ROWS, **settings)


def rows(result):
    return [row for row in result.metrics if "train/updates" in row]


def steps(result):
    return [row["step"] // ROWS for row in rows(result)]


def assert_same_rows(one, other):
    """Sums over several chunks are rounded otherwise than within one."""
    assert steps(one) == steps(other)
    for row, same in zip(rows(one), rows(other), strict=True):
        values, others = ({k: v for k, v in r.items() if k not in TIMED} for r in (row, same))
        assert values.keys() == others.keys()
        np.testing.assert_allclose(list(values.values()), list(others.values()), rtol=2e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("algo", one_quick([PPO, DQN]), ids=["ppo", "dqn"])
def test_rows_do_not_depend_on_the_chunks_nor_on_a_kill(algo, monkeypatch, tmp_path):
    found = []
    for seconds in (0.0, 1e6):
        monkeypatch.setattr(run_loop, "_CHUNK_SECONDS", seconds)
        found.append(train(algo=algo, log_every=4 * ROWS))
    assert steps(found[0]) == [3, 4, 5, 6, 8, 9, 10, 12], "every fourth, and where it is evaluated or saved"
    assert_same_rows(*found)
    assert_equal(found[0].state, found[1].state)

    def killed(moment):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", algo=algo, log_every=4 * ROWS, callbacks=[FunctionCallback(killed)])
    assert_same_rows(train(tmp_path / "run", algo=algo, log_every=4 * ROWS), found[1])


def test_a_run_of_a_hundred_iterations_has_even_rows(monkeypatch):
    monkeypatch.setattr(run_loop, "_CHUNK_SECONDS", 1e6)
    result = train(total=120, evaluate_every=30 * ROWS, checkpoint_every=0)
    assert steps(result) == list(range(10, 121, 10))
    assert steps(train(total=120, evaluate_every=0, checkpoint_every=0, log_every=50 * ROWS)) == [50, 100, 120]


def test_a_short_chunk_before_a_row_does_not_shorten_those_after_it(monkeypatch):
    monkeypatch.setattr(run_loop, "_CHUNK_SECONDS", 1e6)
    lengths, chunk, measured = [], Program.chunk, ChunkTimes.add

    def timed(self, *arguments):
        return None if measured(self, *arguments) is None else 1.0

    monkeypatch.setattr(ChunkTimes, "add", timed)

    def counted(self, algo, env, state, length, *rest):
        lengths.append(length)
        return chunk(self, algo, env, state, length, *rest)

    monkeypatch.setattr(Program, "chunk", counted)
    train(total=36, evaluate_every=0, checkpoint_every=0, log_every=12 * ROWS)
    assert lengths == [1, 1, 1, 8, 1, 12, 12]


@given(st.integers(100, 10**6), st.integers(1, 2 * 10**6))
def test_rows_are_as_many_as_asked_for_and_even_between_evaluations(iterations, evaluate):
    """Every period is tried here; of an evaluation that never comes, that of the whole run."""
    rows = max(15, min(iterations // 50, 50))
    period, target = row_period(iterations, evaluate, None), iterations // rows
    assert rows // 2 <= -(-iterations // period) <= 2 * rows
    periods = range(-(-iterations // (2 * rows)), 2 * iterations // rows + 1)
    near = [n for n in periods if min(evaluate, iterations) % n == 0]
    assert period == min(near, key=lambda n: max(n / target, target / n), default=target)


def test_a_run_without_an_end_in_mind_begins_at_once():
    assert row_period(10**30, 10**29, None) == 2 * 10**28


def test_a_short_run_has_a_row_a_chunk_unless_it_says():
    assert row_period(99, 10, None) is None and row_period(99, 10, 7) == 7


def report(rng, lives=True):
    """What a chunk may have reported; numpy."""

    def episodes(inner):
        returns = rng.normal(3.0, 2.0, int(rng.integers(0, 5)))
        squares = np.sum(np.square(returns - returns.mean())) if returns.size else 0.0
        numbers = (returns.size, returns.sum(), squares, 10.0 * returns.size, 64.0, rng.integers(3))
        return EpisodeSums(*map(np.float32, numbers), lives=inner, info={"x": np.float32(rng.normal())})

    made = np.float32(rng.integers(0, 4))
    return Report(
        episodes=episodes(episodes(None) if lives else None),
        updates={name: np.float32(rng.uniform()) for name in ("loss", "replay_found", "sequences_found")},
        iterations=np.float32(made > 0),
        made=made,
        broken={"loss": np.int32(0)},
        failed_at=np.int32(-1),
        actors={name: float(rng.integers(3)) for name in ("policy_lag", "policy_lag_max", "failures", "seconds")},
    )


@pytest.mark.long
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.booleans())
def test_joined_reports_are_the_sum_that_one_program_makes(seed, number, lives):
    rng = np.random.default_rng(seed)
    parts = [(report(rng, lives), int(rng.integers(1, 4))) for _ in range(number)]
    told = joined(parts)
    expected = jax.tree.map(jnp.asarray, parts[0][0])
    for one, _ in parts[1:]:
        expected = expected.add(jax.tree.map(jnp.asarray, one), jnp.int32(0))
    lag = sum(one.actors["policy_lag"] * length for one, length in parts) / sum(length for _, length in parts)
    assert told.actors["policy_lag"] == pytest.approx(lag)
    assert told.actors["policy_lag_max"] == max(one.actors["policy_lag_max"] for one, _ in parts)
    for name in ("failures", "seconds"):  # before, a failure in one of four chunks was a quarter
        assert told.actors[name] == sum(one.actors[name] for one, _ in parts)
    assert_equal(told.replace(actors={}), jax.device_get(expected).replace(actors={}), 1e-4)
    assert all(isinstance(leaf, np.ndarray | np.generic | float) for leaf in jax.tree.leaves(told))


def test_chunks_without_an_update_are_joined_with_those_that_have_some():
    """A learner that draws while actors insert stored a whole chunk before its first update, and the run ended."""
    rng = np.random.default_rng(0)
    none, some = report(rng), report(rng).replace(made=np.float32(2.0), iterations=np.float32(1.0))
    none = none.replace(updates={}, made=np.float32(0.0), iterations=np.float32(0.0))
    for parts in ((none, some), (some, none), (none, none, some)):
        metrics = joined([(part, 1) for part in parts]).metrics()
        assert metrics["update/loss"] == some.updates["loss"] and metrics["train/updates"] == 2
    assert "update/loss" not in joined([(none, 1), (none, 1)]).metrics()


def test_a_row_is_timed_without_the_chunk_that_compiled():
    rng = np.random.default_rng(0)
    training = TrainingRows(10, {"replay": 1, "sequences": 4})
    training.add(report(rng), 1, None)
    assert training.speed() == {}
    training.add(report(rng), 4, 2.0)
    assert training.speed() == {"steps_per_second": 20.0}
    row = training.row()
    assert row["steps_per_second"] == row["inserts_per_second"] == 20.0
    assert row["updates_per_second"] == pytest.approx(row["train/updates"] * 4 / 5 / 2.0)
    found = row["update/replay_found"] + 4 * row["update/sequences_found"]
    assert row["samples_per_second"] == pytest.approx(found * row["updates_per_second"])
    training.add(report(rng), 1, None)
    assert "steps_per_second" not in training.row(), "each row begins anew"
