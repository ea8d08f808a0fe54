"""Population-based training: exploit and explore against loops in numpy, and a population against its runs alone."""

import csv
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import dying, populations, programs
from helpers.populations import COPIES, MEMBERS, POINTS, SPACE, population
from helpers.programs import DQN, ENV, PPO, ROWS, anakin, assert_equal
from hypothesis import given
from hypothesis import strategies as st

import jaxrl
from jaxrl.cli import main
from jaxrl.core import keys
from jaxrl.core.errors import ConfigError, RunDirectoryError
from jaxrl.core.schedules import Constant, Cosine, Linear, resolve_schedules
from jaxrl.plots.lineage import Lineage
from jaxrl.run.directory import checkpoint, sweep_directory
from jaxrl.sweeps.distributions import LogUniform, Uniform
from jaxrl.sweeps.population import Hyperparameter, Population, Selection
from jaxrl.sweeps.vectorized import VectorizedRuns

RECORD = ("steps", "metrics", "returns", "failed", "learners", "fresh_returns")


@functools.cache
def evolved(devices=1, **settings):
    return population(devices=devices, **settings)


def assert_the_same(one, other):
    for name in RECORD:
        assert_equal(getattr(one, name), getattr(other, name))
    for name in ("steps", "scores", "parents", "hyperparameters", "winner"):
        assert_equal(getattr(one.lineage, name), getattr(other.lineage, name))


# --- exploit and explore, by hand ----------------------------------------------------------------------------------


def exploit(rng, scores, failed, fraction):
    """Who copies whom, by counting: a member copies if it failed, or if few are worse and there is whom to copy."""
    known = [m for m in range(len(scores)) if failed[m] or not math.isnan(scores[m])]
    value = {m: -math.inf if failed[m] else scores[m] for m in known}
    worse = {m: sum((value[o], o) < (value[m], m) for o in known) for m in known}
    most = min(max(math.floor(len(scores) * fraction + 1e-9), 1), len(known) // 2)
    copied = sorted((m for m in known if len(known) - worse[m] <= most and not failed[m]), key=worse.get)
    copying = sorted((m for m in known if worse[m] < most or failed[m]), key=worse.get) if copied else []
    parents = list(range(len(scores)))
    for member, parent in zip(copying, rng.choice(copied, len(copying)) if copied else [], strict=True):
        parents[member] = int(parent)
    return parents


def explore(rng, value, values, factor, resample):
    """The value of a copy's hyperparameter."""
    if rng.random() < resample:
        if isinstance(values, list):
            return rng.integers(len(values))
        if isinstance(values, Uniform):
            return rng.uniform(values.low, values.high)
        return np.exp(rng.uniform(np.log(values.low), np.log(values.high)))
    up = rng.random() < 0.5
    if isinstance(values, list):
        return np.clip(value + (1 if up else -1), 0, len(values) - 1)
    if isinstance(values, Uniform):
        step = np.log(factor) * (values.high - values.low)
        return np.clip(value + (step if up else -step), values.low, values.high)
    return np.exp(np.clip(np.log(value) + (1 if up else -1) * np.log(factor), *np.log([values.low, values.high])))


SCORES = st.lists(st.one_of(st.just(math.nan), st.integers(-3, 3)), min_size=2, max_size=12)


@given(scores=SCORES, seed=st.integers(0, 2**32), fraction=st.sampled_from([0.1, 0.25, 0.29, 0.5]), data=st.data())
def test_who_copies_whom_is_what_counting_says(scores, seed, fraction, data):
    failed = np.asarray(data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores))))
    scores = np.asarray(scores, np.float32)
    selection = Selection(fraction, 1.25, 0.25)
    found = selection.parents(np.random.default_rng(seed), scores, failed)
    assert found.tolist() == exploit(np.random.default_rng(seed), scores, failed, fraction)
    assert (found[found] == found).all(), "who is copied copies nobody"
    if (~failed & ~np.isnan(scores)).any() and (failed | ~np.isnan(scores)).sum() > 1:
        assert (found != np.arange(len(scores)))[failed].all(), "whoever failed copies"


@given(seed=st.integers(0, 2**32), places=st.tuples(*[st.floats(0, 1)] * 2, st.integers(0, 2)))
def test_what_a_copy_explores_is_what_the_rule_says(seed, places):
    ranges = [LogUniform(1e-4, 1e-1), Uniform(-0.5, 0.4), [0.9, 0.95, 0.99]]
    values = np.asarray([1e-4 * 1000 ** places[0], -0.5 + 0.9 * places[1], places[2]], np.float32)
    hyperparameters = [Hyperparameter(name, one) for name, one in zip("abc", ranges, strict=True)]
    found = Selection(0.2, 1.3, 0.25).explored(np.random.default_rng(seed), hyperparameters, values)
    rng = np.random.default_rng(seed)
    expected = [explore(rng, float(x), one, 1.3, 0.25) for x, one in zip(values, ranges, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    low, high = np.float32([1e-4, -0.5, 0.0]), np.float32([1e-1, 0.4, 2.0])
    assert (low <= found).all() and (found <= high).all() and found.dtype == np.float32


# --- copies on the devices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 4])
def test_copies_are_rows_of_the_arrays(devices):
    """Bit for bit, whatever the type and wherever the run lies; six runs, so that four devices hold two to spare."""
    many = VectorizedRuns(anakin().bind(PPO, ENV), devices, "in_turn", MEMBERS)
    rng = np.random.default_rng(0)
    trees = [
        {
            "float": jnp.asarray([math.nan, -0.0, run, -math.inf], jnp.float32),
            "bool": jnp.asarray(rng.random(3) < 0.5),
            "int": jnp.asarray(rng.integers(0, 2**31, (2, 2)), jnp.uint32),
            "key": keys.root_key(run),
            "other key": jax.random.key(run),
            "empty": jnp.zeros((0, 3)),
        }
        for run in range(MEMBERS)
    ]
    stacked = jax.tree.map(lambda *x: jnp.stack([*x, *[x[-1]] * (-MEMBERS % devices)]), *trees)
    parents = [0, 5, 2, 2, 0, 5]
    copies = [(run, parent) for run, parent in enumerate(parents) if run != parent]
    found = programs.plain(many.copied(stacked, copies))
    for run, parent in enumerate(parents):
        for name, value in programs.plain(trees[parent]).items():
            mine = found[name][run]
            assert mine.tobytes() == value.tobytes() and mine.dtype == value.dtype, (run, name)


# --- a population ----------------------------------------------------------------------------------------------------


@pytest.mark.exact
@pytest.mark.long
def test_a_population_is_the_same_on_four_devices():
    one, four = evolved(), evolved(4)
    assert_the_same(one, four)
    assert one.steps.tolist() == [[2 * ROWS * (point + 1) for point in range(POINTS)]] * MEMBERS


@pytest.mark.long
def test_what_happens_at_each_point_follows_from_the_scores():
    """The record of a population against the rules, with the draws of its key."""
    result = evolved()
    lineage, root, selection = result.lineage, keys.root_key(0), Selection(COPIES / MEMBERS, 1.25, 0.25)
    hyperparameters = [Hyperparameter(name, SPACE[name]) for name in lineage.hyperparameters]
    values = dict(lineage.hyperparameters)
    values["gamma"] = np.asarray([[SPACE["gamma"].index(x) for x in row] for row in values["gamma"]])
    values = np.stack(list(values.values()), axis=1)
    returns = np.moveaxis(result.metrics["train/return_mean"][:, 0], -1, 0)
    np.testing.assert_allclose(lineage.scores, returns, rtol=1e-6)
    for point in range(POINTS - 1):
        words = jax.random.key_data(keys.population_key(root, point + 1)).ravel().tolist()
        rng = np.random.default_rng(words)
        parents = selection.parents(rng, lineage.scores[point].astype(np.float32), np.zeros(MEMBERS, bool))
        np.testing.assert_array_equal(lineage.parents[point], parents)
        for member, parent in enumerate(parents):
            expected = values[point, :, parent].astype(np.float32)
            if member != parent:
                expected = selection.explored(rng, hyperparameters, expected)
            np.testing.assert_allclose(values[point + 1, :, member], expected, rtol=1e-6)
    assert (lineage.parents[-1] == np.arange(MEMBERS)).all(), "at the end nobody copies"
    assert result.configurations[3]["clip"] == lineage.hyperparameters["clip"][-1, 3]


@pytest.mark.exact
@pytest.mark.long
def test_a_member_that_copied_nobody_is_that_run_alone():
    """Bit for bit; the rates that it learned with are those that the record says, also of members that did copy."""
    result = evolved()
    copied = (result.lineage.parents != np.arange(MEMBERS)).any(axis=0)
    member = int(np.argmin(copied))
    assert not copied[member] and copied.any()
    alone = jaxrl.train(
        PPO.replace(**populations.FIXED, **result.configurations[member]),
        ENV,
        total_steps=2 * POINTS * ROWS,
        seed=result.member_seeds[member],
        topology=anakin(),
        evaluate_every=0,
        evaluation_episodes=8,
        progress=False,
    )
    assert_equal(alone.state.learner, jax.tree.map(lambda x: x[0], result.learners[member]))
    rates = np.moveaxis(result.metrics["update/learning_rate"][:, 0], -1, 0)
    np.testing.assert_allclose(rates, result.lineage.hyperparameters["learning_rate"], rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("copy_replay", [False, True])
def test_a_copy_has_the_learner_of_another_and_its_own_environments(copy_replay, monkeypatch):
    seen, step, played, evaluate = [], Population.step, [], VectorizedRuns.evaluate

    def noted(self, algos, learners, roots, settings):
        played.append(programs.plain(roots))
        return evaluate(self, algos, learners, roots, settings)

    def remembered(self, point, algos, states, report):
        before = programs.plain(states)
        after = step(self, point, algos, states, report)
        seen.append((before, programs.plain(after)))
        return after

    monkeypatch.setattr(Population, "step", remembered)
    monkeypatch.setattr(VectorizedRuns, "evaluate", noted)
    space = {"learning_rate": SPACE["learning_rate"], "gamma": 0.99, "max_grad_norm": 10.0, "prioritized.exponent": 0.6}
    result = population(algo=DQN, target_update=1.0, copy_replay=copy_replay, score="evaluation", **space)
    for (before, after), parents in zip(seen, result.lineage.parents, strict=True):
        assert_equal(jax.tree.map(lambda x, p=parents: x[p], before.learner), after.learner)
        assert_equal(before.replace(learner=(), buffers=()), after.replace(learner=(), buffers=()))
        assert_equal(jax.tree.map(lambda x, p=parents: x[p] if copy_replay else x, before.buffers), after.buffers)
    copies = result.lineage.parents[1:-1] != np.arange(MEMBERS)
    assert copies.sum(axis=1).tolist() == [COPIES] * (POINTS - 2)
    assert np.isfinite(result.lineage.scores).all() and np.ptp(result.lineage.scores) > 0
    assert len({words.tobytes() for words in played}) == len(played) == POINTS + 2, "fresh episodes each time"
    assert all((words == words[0]).all() for words in played), "the same for all members"


@pytest.mark.long
def test_a_population_that_is_killed_goes_on_bit_for_bit(tmp_path):
    whole = population(tmp_path / "whole")
    for number in (4, 3):  # the first asks for shapes
        call = f"populations.population({str(tmp_path / 'killed')!r}, checkpoint_every={2 * ROWS})"
        dying.killed(call, number)
    saved = checkpoint.complete_steps(tmp_path / "killed" / "program-0" / "checkpoints")
    assert saved and 2 * ROWS <= max(saved) < 2 * POINTS * ROWS, "of the last chunks the save may have been under way"
    with pytest.raises(RunDirectoryError, match="a sweep that has not ended"):
        jaxrl.load(tmp_path / "killed")
    again = population(tmp_path / "killed", checkpoint_every=2 * ROWS)
    assert_the_same(whole, again)
    assert_the_same(whole, evolved())
    for name in ("metrics.jsonl", "table.csv", "lineage.csv"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    record = (tmp_path / "killed" / "sweep.json").read_bytes()
    finished = population(tmp_path / "killed", checkpoint_every=2 * ROWS)
    assert (tmp_path / "killed" / "sweep.json").read_bytes() == record, "nothing was trained"
    assert (finished.wall_seconds, finished.steps_per_second) == (again.wall_seconds, again.steps_per_second)
    with pytest.raises(RunDirectoryError, match="sweep.factor: 1.25 -> 1.5"):
        population(tmp_path / "killed", factor=1.5)


@pytest.mark.long
def test_a_member_that_fails_copies_another_with_its_environments():
    """A learning rate of 1e30 destroys its run: it is copied over at the first point, and the population goes on."""
    result = population(learning_rate=[1e30, 1e-2, 2e-2, 3e-2], clip=0.2, gamma=0.99, resample=0.0, seed=3)
    lineage = result.lineage
    broken = lineage.hyperparameters["learning_rate"] == 1e30
    assert broken[0].any() and not broken[0].all()
    np.testing.assert_array_equal(np.isnan(lineage.scores), broken)
    assert (lineage.parents[:-1] != np.arange(MEMBERS))[broken[:-1]].all()
    np.testing.assert_array_equal(result.failed[:, 0], broken[-1])
    assert np.isfinite(result.fresh_score) and not broken[-1][lineage.winner]


@pytest.mark.long
def test_hyperparameters_may_be_schedules():
    """Of one kind; they go on with the run, and a copy takes one beside that of the member that it copied."""
    rates = [Linear(1e-2, 0.0), Linear(1e-3, 0.0), Linear(1e-4, 0.0, 0.5)]
    result = population(learning_rate=rates, clip=0.2, gamma=0.99)
    assert all(one["learning_rate"] in rates for one in result.configurations)
    iterations = (np.arange(2 * POINTS) / (2 * POINTS)).reshape(POINTS, 2)
    found = np.moveaxis(result.metrics["update/learning_rate"][:, 0], -1, 0)
    for point in range(POINTS):
        possible = [np.mean([float(rate(t)) for t in iterations[point]]) for rate in rates]
        for member in range(MEMBERS):
            assert min(abs(found[point, member] - x) for x in possible) < 1e-8
            middle = [float(rate((point + 0.5) / POINTS)) for rate in rates]
            assert result.lineage.hyperparameters["learning_rate"][point, member] in middle
    with pytest.raises(ConfigError, match="schedules of one kind"):
        population(learning_rate=[Linear(1e-2, 0.0), Cosine(1e-2, 0.0)])
    with pytest.raises(ConfigError, match="schedules of one kind"):
        population(learning_rate=[Constant(1e-2), 1e-3])


# --- what comes back -------------------------------------------------------------------------------------------------


def a_lineage(iterations=10):
    """Three members over five intervals of two iterations of 64 steps; the third copies the first, and that wins."""
    parents = np.tile(np.arange(3), (5, 1))
    parents[1, 2], parents[2, 1] = 0, 2
    rates = np.asarray([[1, 2, 3], [1, 2, 3], [1, 2, 1.25], [1, 1.5, 1.25], [1, 1.5, 1.25]]) * 1e-3
    steps = np.arange(1, 6) * iterations * 64 // 5
    return Lineage(steps, 64, np.arange(15.0).reshape(5, 3), parents, {"rate": rates}, winner=1)


def test_the_line_of_a_member_leads_over_those_that_it_copied():
    lineage = a_lineage()
    assert lineage.ancestors().tolist() == [0, 0, 2, 1, 1]
    assert lineage.ancestors(2).tolist() == [0, 0, 2, 2, 2] and lineage.ancestors(0).tolist() == [0] * 5
    schedule = lineage.schedule("rate")
    assert schedule.values == (1e-3, 1.25e-3, 1.5e-3)
    assert lineage.schedule("rate", 0).values == (1e-3,)


@pytest.mark.long
@given(iterations=st.integers(1, 4000).map(lambda n: 5 * n), length=st.sampled_from([1, 7, 2048]))
def test_a_schedule_has_the_number_of_every_iteration(iterations, length):
    """As programs compute progress, in float32 from the steps of one environment."""
    lineage = a_lineage(iterations)
    progress = np.arange(iterations, dtype=np.float32) * np.float32(length) / np.float32(iterations * length)
    algo = resolve_schedules(jaxrl.PPO(learning_rate=lineage.schedule("rate")), progress)
    expected = np.repeat([1e-3, 1e-3, 1.25e-3, 1.5e-3, 1.5e-3], iterations // 5)
    np.testing.assert_array_equal(algo.learning_rate, expected.astype(np.float32))


@pytest.mark.long
def test_what_a_population_leaves(tmp_path):
    result = population(tmp_path / "runs")
    winner, lineage = result.lineage.winner, result.lineage
    assert winner == int(np.nanargmax(result.scores[:, 0])) and result.best == result.configurations[winner]
    found = sweep_directory.read_lineage(tmp_path / "runs")
    for name in ("steps", "rows", "scores", "parents", "hyperparameters", "winner"):
        assert_equal(getattr(lineage, name), getattr(found, name))
    with open(tmp_path / "runs" / "lineage.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == POINTS * MEMBERS
    row = rows[2 * MEMBERS + 4]
    assert (int(row["step"]), int(row["member"])) == (6 * ROWS, 4) and int(row["parent"]) == lineage.parents[2, 4]
    assert float(row["clip"]) == lineage.hyperparameters["clip"][2, 4]
    lines = result.table().splitlines()
    assert (
        lines[0].split() == ["member", *lineage.hyperparameters, "score", "copies", "failed"]
        and len(lines) == 1 + MEMBERS
    )
    assert int(lines[1].split()[0]) == winner
    record = json.loads((tmp_path / "runs" / "sweep.json").read_text())
    assert record["fresh"] == {"return_mean": pytest.approx(result.fresh_score), "episodes": 8}
    assert main.main(["plot", str(tmp_path / "runs"), "--out", str(tmp_path / "lineage.svg")]) == 0
    record["lineage"]["parents"][0][0] = MEMBERS
    (tmp_path / "runs" / "sweep.json").write_text(json.dumps(record))
    with pytest.raises(RunDirectoryError, match="'lineage'"):
        sweep_directory.read_lineage(tmp_path / "runs")


@pytest.mark.long
def test_the_picture_has_every_line_and_that_of_the_winner():
    result = evolved()
    axes = result.plot().axes
    assert [one.get_title() for one in axes] == ["score", "gamma", "clip", "learning_rate"]
    assert [one.get_yscale() for one in axes[1:]] == ["linear", "linear", "log"]
    members, winner = (collection.get_segments() for collection in axes[3].collections)
    assert len(members) == POINTS * MEMBERS and len(winner) == POINTS
    line = result.lineage.hyperparameters["learning_rate"][np.arange(POINTS), result.lineage.ancestors()]
    np.testing.assert_allclose([segment[-1][1] for segment in winner], line)


# --- when it begins ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_nobody_copies_before_exploit_from():
    """The first episodes say little: a lucky member would take the place of those that learn from a replay later."""
    late, usual = evolved(exploit_from=0.5).lineage, evolved().lineage
    own, first = np.arange(MEMBERS), POINTS // 2 - 1
    assert (late.parents[:first] == own).all() and (late.parents[first] != own).sum() == COPIES
    assert (usual.parents[0] != own).sum() == COPIES
    for values in late.hyperparameters.values():
        np.testing.assert_array_equal(values[: first + 1], values[[0] * (first + 1)])
