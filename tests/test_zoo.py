"""The zoo: its table, how its rows are trained, killed and gone on with, its page, and comparisons of rows."""

import itertools
import json
import os
import pathlib
import re
import shlex
import signal
import sys
from unittest import mock

import jax
import numpy as np
import pytest
from helpers import shortest, zoo_tables
from helpers.processes import environment, python
from helpers.refused import raises
from helpers.strict_json import read_json

from jaxrl.sweeps.vectorized import VectorizedRuns

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import _sequential  # noqa: E402
import _zoo  # noqa: E402
import zoo  # noqa: E402

TABLE = """
[steps_per_second]
dqn = 500
gymnax = 100
other = 10

[[rows]]
name = "tiny"
algorithm = "ppo"
environment = "gymnax:CartPole-v1"
steps = 2_000
seeds = 2
settings = "--num-envs 8 --rollout-length 25 --evaluation-episodes 4"
worst = 1
published = "9"
source = "nobody"

[[rows]]
name = "other"
algorithm = "dqn"
environment = "gymnax:CartPole-v1"
steps = 90_000
seeds = 1
mean = 1e9

[[rows]]
name = "preset"
preset = "purejaxrl-cartpole"
seeds = 2
worst = 475
worst_missed = "one at 470"
"""


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "zoo.toml"
    path.write_text(TABLE)
    return path


# --- the table -----------------------------------------------------------------------------------------------------


def test_a_row_is_a_command_and_what_it_must_reach(table):
    tiny, _, preset = _zoo.read(table).rows.values()
    settings = "--num-envs 8 --rollout-length 25 --evaluation-episodes 4"
    assert tiny.command == f"ppo --env gymnax:CartPole-v1 --total-steps 2000 --seeds 2 {settings}"
    assert (tiny.worst, tiny.mean, tiny.published, tiny.record) == (
        1.0,
        -np.inf,
        "9 (nobody)",
        "learning-defaults-tiny",
    )
    assert preset.command == "--preset purejaxrl-cartpole --seeds 2" and preset.worst_missed == "one at 470"
    assert preset.published == "" and preset.record == "learning-preset-preset"
    assert _zoo.trained(preset) == ("ppo", "gymnax:CartPole-v1", 500_000, 2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "other"', 'name = "tiny"', "row 'tiny': an earlier row has this name"),
        ("steps = 90_000\n", "", "row 'other': it needs steps"),
        ('published = "9"', 'publisht = "9"', "row 'tiny': there is no publisht"),
        ('preset = "purejaxrl-cartpole"\n', "", "row 'preset': it needs algorithm, environment, steps"),
    ],
)
def test_a_row_that_is_wrong_is_refused_by_name(old, new, message, table):
    table.write_text(TABLE.replace(old, new))
    raises(ValueError, message, _zoo.read, table)


def test_the_zoo_has_rows_of_many_environments_and_their_records_are_of_their_commands():
    rows = list(shortest.ZOO.rows.values())
    assert len(rows) >= 60 and len({_zoo.trained(row)[1] for row in rows}) >= 15
    for row in rows:
        assert shortest.ZOO.minutes(row) > 0
        if record := shortest.ZOO.held(row):
            words = shlex.split(record["run"])
            words += [] if "--seeds" in words else ["--seeds", "8"]
            assert sorted(words) == sorted(["jaxrl", "sweep", *shlex.split(row.command)]), row.name


# --- training ------------------------------------------------------------------------------------------------------


def outcome(scores, seconds=600.0):
    curves = np.tile(np.linspace(0.0, 99.0, 100), (len(scores), 1))
    curves[0, 0] = np.nan
    return _zoo.Outcome(np.asarray(scores, float), np.arange(100) * 20, curves, seconds)


def test_a_record_has_every_score_and_a_thinned_curve(table):
    read = _zoo.read(table)
    row = read.rows["tiny"]
    record = read_json(read.save(row, outcome([3.0, 5.0])))
    assert record == read.held(row) and record["run"] == f"jaxrl sweep {row.command}"
    assert record["rows"] == [{"scores": [3.0, 5.0], "mean": 4.0, "interquartile_mean": 4.0, "worst": 3.0}]
    assert record["published"] == "9 (nobody)" and record["wall_seconds"] == 600
    steps, (first, second) = record["curve"]["steps"], record["curve"]["returns"]
    assert len(steps) == len(first) == len(second) == _zoo.MOST_POINTS
    assert (steps[0], steps[-1], first[0], second[0], second[-1]) == (0, 1980, None, 0.0, 99.0)


def test_rows_that_were_begun_or_have_no_record_come_first(table):
    read = _zoo.read(table)
    path = read.save(read.rows["tiny"], outcome([3.0]))
    later = read_json(path)
    later["machine"]["date"] = "2026-01-02"
    path.write_text(json.dumps(later))
    later["machine"]["date"] = "2026-01-01"
    (path.parent / f"{read.rows['other'].record}.json").write_text(json.dumps(later))
    assert [row.name for row in zoo.due(read)] == ["preset", "other", "tiny"]
    read.runs("tiny").mkdir(parents=True)
    assert [row.name for row in zoo.due(read)] == ["tiny", "preset", "other"]


def test_a_budget_is_spent_on_rows_that_fit_it(table, monkeypatch):
    read, trained = _zoo.read(table), []

    def train(row, folder):
        folder.mkdir(parents=True)
        trained.append(row.name)
        return outcome([3.0, 5.0], 60)

    monkeypatch.setattr(_zoo, "train", train)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    minutes = {row.name: read.minutes(row) for row in read.rows.values()}
    assert minutes == pytest.approx({"tiny": 2000 * 2 / 100 / 60, "other": 3.0, "preset": 1e6 / 100 / 60})
    assert zoo.spend(read, 2.0) == 0 and trained == ["tiny"]
    assert read.minutes(read.rows["tiny"]) == 1.0  # as its record says
    trained.clear()
    assert zoo.spend(read, 100.0) == 1 and trained == ["other", "tiny"]  # the first without a record, and too low
    assert not any(read.path.parent.joinpath("runs").iterdir())


@pytest.mark.parametrize("is_over", [True, False])
def test_a_budget_that_is_over_ends_a_row_and_another_signal_the_command(is_over, table, monkeypatch, capsys):
    """The timer's signal is sent as soon as a row is trained."""
    now, timer = [0.0], mock.Mock()

    def train(row, folder):
        timer.return_value.start.assert_called_once_with()
        now[0] += 101 * 60 if is_over else 60
        _, send, arguments = timer.call_args.args
        send(*arguments)
        return outcome([3.0, 5.0])

    monkeypatch.setattr(zoo.threading, "Timer", timer)
    monkeypatch.setattr(zoo.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(_zoo, "train", train)
    before, read = signal.getsignal(signal.SIGTERM), _zoo.read(table)
    try:
        if is_over:
            assert zoo.spend(read, 100.0) == 0
        else:
            raises(SystemExit, "143", zoo.spend, read, 100.0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [call.args[0] for call in timer.call_args_list] == [6000.0]  # one row began, with all of the time
    timer.return_value.cancel.assert_called_once_with()
    assert ("the budget is spent" in capsys.readouterr().out) is is_over
    assert not any(read.held(row) for row in read.rows.values())


def test_a_row_that_fails_leaves_the_others_their_turn(table, monkeypatch):
    read, trained = _zoo.read(table), []

    def train(row, folder):
        trained.append(row.name)
        if row.name == "tiny":
            raise SystemExit(2)
        folder.mkdir(parents=True)
        return outcome([1e10])

    monkeypatch.setattr(_zoo, "train", train)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert zoo.spend(read, 1000.0) == 1
    assert trained == ["tiny", "other", "preset"] and read.held(read.rows["tiny"]) is None
    assert read.held(read.rows["preset"])["rows"][0]["worst"] == 1e10


# The command in a process that kills itself once the sixth point is saved.
KILLED = """if True:
    import conftest, jax, os, signal, sys
    jax.devices()  # else the command would start with a device for each core
    sys.path.insert(0, "benchmarks")
    import zoo
    from jaxrl.run.directory.checkpoint import Checkpointer
    save, points = Checkpointer.save, []

    def save_or_die(checkpointer, *arguments, **settings):
        save(checkpointer, *arguments, **settings)
        points.append(1)
        if len(points) == 6:
            checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    Checkpointer.save = save_or_die
    zoo.main()
"""


@pytest.mark.faults
def test_rows_that_are_stopped_or_killed_are_resumed(table, monkeypatch, capsys):
    """Both end after six of ten points, one by the signal that ends a budget; a third row is trained in one go."""
    tiny = "[[rows]]" + TABLE.split("[[rows]]")[1]
    table.write_text(TABLE + tiny.replace('"tiny"', '"killed"') + tiny.replace('"tiny"', '"whole"'))
    python("-c", KILLED, "--row", "killed", "--zoo", table, cwd=ROOT, env=environment(), code=-signal.SIGKILL)
    points, chunk, signals = [], VectorizedRuns.chunk, [signal.SIGTERM]

    def counted(many, algos, env, states, *arguments):
        if not isinstance(states.key, jax.core.Tracer):  # shapes are asked for first
            points.append(1)
            if len(points) == 6 and signals:
                os.kill(os.getpid(), signals.pop())
        return chunk(many, algos, env, states, *arguments)

    def run(name):
        points.clear()
        monkeypatch.setattr(sys, "argv", ["zoo.py", "--row", name, "--zoo", str(table)])
        return zoo.main()

    monkeypatch.setattr(VectorizedRuns, "chunk", counted)
    raises(SystemExit, "143", run, "tiny")
    assert "the same call resumes from there" in capsys.readouterr().err
    read, stopped_after, records = _zoo.read(table), len(points), {}
    assert 6 <= stopped_after < 10 and read.held(read.rows["tiny"]) is None
    for name, missing in (("tiny", 10 - stopped_after), ("killed", 4), ("whole", 10)):
        assert run(name) == 0 and len(points) == missing
        assert not read.runs(name).exists()
        records[name] = read.held(read.rows[name])
    whole = records["whole"]
    assert len(whole["rows"][0]["scores"]) == 2 and min(whole["rows"][0]["scores"]) >= 1
    assert whole["curve"]["steps"] == [200 * number for number in range(1, 11)]
    for record in records.values():
        assert (record["rows"], record["curve"]) == (whole["rows"], whole["curve"]) and record["wall_seconds"] > 0


# --- comparisons ---------------------------------------------------------------------------------------------------


def naive(batches, analyses, level):
    """The verdict after each batch, by loops over every split of every batch."""
    size = len(batches[0][0])
    halves = list(itertools.combinations(range(2 * size), size))
    splits = list(itertools.product(halves, repeat=analyses))
    beyond, verdicts = set(), []
    for done in range(1, len(batches) + 1):
        sums = []
        for split in splits:
            total = 0.0
            for half, (ours, theirs) in zip(split, batches[:done], strict=False):
                scores = [*ours, *theirs]
                total += sum(scores[i] for i in half) - sum(scores[i] for i in range(2 * size) if i not in half)
            sums.append(round(abs(total), 9))
        may = int(level * done / analyses * len(splits) + 1e-9) - len(beyond)
        inside = sorted(sums[number] for number in range(len(splits)) if number not in beyond)
        bound = inside[len(inside) - 1 - may]
        beyond |= {number for number in range(len(splits)) if sums[number] > bound}
        verdicts.append(0 in beyond)  # the first split is the scores' own
        if verdicts[-1]:
            break
    return verdicts


@pytest.mark.parametrize("shift", [0.0, 0.5, 1.5, 3.0])
@pytest.mark.parametrize(("size", "analyses"), [(3, 2), (2, 4)])
def test_a_comparison_is_what_loops_over_all_splits_say(size, analyses, shift):
    rng = np.random.default_rng(int(10 * shift) + size)
    for level in (0.05, 0.2):
        batches = [(rng.normal(shift, 1, size).round(1), rng.normal(0, 1, size).round(1)) for _ in range(analyses)]
        test, found = _sequential.Comparison(size, analyses, level=level), []
        for batch in batches:
            found.append(test.add(*batch))
            if found[-1]:
                break
        assert found == naive(batches, analyses, level)


def verdicts(shift, number, draw):
    """Verdicts of many comparisons, fifteen scores of each at most."""
    rng = np.random.default_rng(7)
    found = []
    for seed in range(number):
        test = _sequential.Comparison(3, 5, seed=seed, draws=2000)
        while test.done < 5 and not test.add(draw(rng) + shift, draw(rng)):
            pass
        found.append(test.verdict)
    return found


def normal(rng):
    return rng.normal(size=3)


def lucky(rng):
    """Scores as of CartPole: most at the most, some far below."""
    return np.where(rng.random(3) < 0.7, 500.0, rng.uniform(50, 500, 3))


@pytest.mark.parametrize("draw", [normal, lucky])
def test_equal_algorithms_are_seldom_called_different(draw):
    """At most 5 % of 1,000 comparisons, and three standard errors more."""
    found = verdicts(0.0, 1000, draw)
    wrong = sum(verdict != "not shown" for verdict in found)
    assert wrong <= 1000 * 0.05 + 3 * (1000 * 0.05 * 0.95) ** 0.5
    if draw is normal:  # the level is spent, and on either side
        assert wrong >= 25 and {"A is better", "B is better"} < set(found)
        assert set(verdicts(4.0, 100, draw)) == {"A is better"}


def test_a_comparison_refuses_what_it_cannot_decide():
    raises(ValueError, "3 scores .* 0.05", _sequential.Comparison, 3, 1)
    test = _sequential.Comparison(3, 2)
    raises(ValueError, "use 3 finite scores of each", test.add, [1.0, 2.0, np.nan], [1.0, 2.0, 3.0])
    raises(ValueError, "use 3 finite scores of each", test.add, [1.0, 2.0], [1.0, 2.0, 3.0, 4.0])
    for _ in range(2):
        assert not test.add([500.0] * 3, [500.0] * 3)
    assert test.verdict == "not shown"
    raises(ValueError, "over", test.add, [1.0] * 3, [2.0] * 3)


def test_two_rows_are_trained_until_one_is_shown_to_be_better(table, monkeypatch, capsys):
    read, trained = _zoo.read(table), []

    def train(row, folder, seeds):
        folder.mkdir(parents=True)
        trained.append((row.name, list(seeds)))
        return outcome([100.0 * (row.name == "tiny") + seed % 7 for seed in seeds])

    monkeypatch.setattr(_zoo, "train", train)
    monkeypatch.setattr(sys, "argv", ["zoo.py", "--zoo", str(table), "--compare", "other", "tiny"])
    assert zoo.main() == 0
    first = zoo.OTHERS
    assert trained == [
        ("other", [0, 1, 2]),
        ("tiny", [first, first + 1, first + 2]),
        ("other", [3, 4, 5]),
        ("tiny", [first + 3, first + 4, first + 5]),
    ]
    record = read_json(table.parent / "results" / "compare-other-tiny.json")
    assert record["verdict"] == "B is better" and [row["shown"] for row in record["rows"]] == [
        "not shown",
        "B is better",
    ]
    assert len(record["scores"]["A"]) == len(record["scores"]["B"]) == 6 and record["max_seeds"] == 15
    assert "A is other, B is tiny: B is better (6 seeds of each)" in capsys.readouterr().out
    assert not any(read.path.parent.joinpath("runs").iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--row", "none"], "no row none"),
        (["--zoo", "no/such.toml"], "No such file"),
        (["--compare", "tiny", "none"], "no row none"),
        (["--budget", "0"], "use more than 0 minutes"),
        (["--compare", "tiny", "other", "--max-seeds", "10"], "use a multiple of 3"),
        (["--compare", "tiny", "other", "--max-seeds", "3"], "3 scores of each cannot differ"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_trained(words, message, table, monkeypatch, capsys):
    monkeypatch.setattr(_zoo, "train", None)
    monkeypatch.setattr(sys, "argv", ["zoo.py", "--zoo", str(table), *words])
    raises(SystemExit, "2", zoo.main)
    assert message in capsys.readouterr().err


# --- the page ------------------------------------------------------------------------------------------------------


def test_the_page_has_every_row_and_no_picture_of_a_row_that_left():
    text = (ROOT / "docs" / "zoo.md").read_text()
    for row in shortest.ZOO.rows.values():
        assert f"# {row.name}: " in text, row.name
    drawn = {name.removeprefix("assets/zoo/") for name in re.findall(r"assets/zoo/[\w-]+\.svg", text)}
    assert {path.name for path in zoo_tables.FOLDER.iterdir()} == drawn


def test_a_record_with_a_curve_has_a_picture_of_it(table, monkeypatch):
    read = _zoo.read(table)
    monkeypatch.setattr(zoo_tables, "ZOO", read)
    read.save(read.rows["tiny"], outcome([3.0, 5.0]))
    text, pictures = zoo_tables.block(), zoo_tables.pictures()
    assert "| CartPole-v1 | PPO | 4 | 4 (3 to 5) | 3 | 9 (nobody) | 2k × 2 | 10 min |" in text
    assert "![Learning curve of PPO on CartPole-v1](assets/zoo/tiny.svg)" in text
    assert "- DQN on CartPole-v1: no record yet; the mean must reach 1e+09." in text
    assert f"\njaxrl sweep {read.rows['tiny'].command}\n" in text and "# preset: no record yet\n" in text
    curve = pictures[zoo_tables.FOLDER / "tiny.svg"]
    [line] = re.findall(r'<polyline class="c0" points="([^"]*)"', curve)
    assert len(line.split()) == _zoo.MOST_POINTS - 1  # of the first point one seed has no value
    assert zoo_tables.pictures() == pictures
