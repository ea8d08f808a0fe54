"""Searches: what is drawn, what is pruned, what is kept, and that a trial is the run of its settings."""

import dataclasses
import errno
import functools
import json
import math
import os

import numpy as np
import pytest
from helpers import clusters, dying, hostile, tunes
from helpers.programs import ENV, PPO, ROWS, anakin
from helpers.readers import outcome

import jaxrl
from jaxrl.algos import ALGORITHMS
from jaxrl.algos.base import owner_at
from jaxrl.algos.fields import PrioritizedReplay
from jaxrl.core.errors import ConfigError, MissingExtraError, NonFiniteError, PeerError, RunDirectoryError
from jaxrl.core.sources import Dataset
from jaxrl.run.directory import checkpoint
from jaxrl.run.directory.loading import load_run
from jaxrl.run.loggers import read_metrics
from jaxrl.run.plotting import plot_runs
from jaxrl.sweeps import tune as tuning
from jaxrl.sweeps.ray_trials import Actors, side_by_side
from jaxrl.sweeps.search_spaces import search_space
from jaxrl.sweeps.vectorized import VectorizedRuns, chunk_many

optuna = pytest.importorskip("optuna")
from jaxrl.sweeps.study import MOST_TRIALS, Study  # noqa: E402  needs the extra

OWN = {name: cls for name, cls in ALGORITHMS.items() if cls.__module__.startswith("jaxrl.")}


@functools.cache
def searched():
    return tunes.search()


# --- the table of spaces -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
def test_every_algorithm_has_a_space_of_traced_fields(name):
    algo = OWN[name]()
    if any(isinstance(source, Dataset) for source in algo.experience.values()):
        return  # a search takes no dataset
    _, ranges = search_space(algo, {})
    assert {"learning_rate", "gamma"} <= set(ranges), "every value of a range is one of the field, else this raises"
    for path in ranges:
        owner, field = owner_at(algo, path)
        assert owner.__dataclass_fields__[field].metadata.get("pytree_node", True), path


def test_what_a_call_changes_of_the_table():
    algo = jaxrl.PPO(clip=0.1)
    given = {"learning_rate": jaxrl.Uniform(1e-4, 1e-3), "gamma": 0.9, "rollout_length": range(16, 48, 16)}
    fixed, ranges = search_space(algo, given)
    assert fixed == {"gamma": 0.9}
    assert set(ranges) == {*search_space(jaxrl.PPO(), {})[1], "rollout_length"} - {"gamma", "clip"}
    assert ranges["learning_rate"] == jaxrl.Uniform(1e-4, 1e-3) and ranges["rollout_length"] == [16, 32]
    assert "prioritized.exponent" not in search_space(jaxrl.DQN(), {})[1], "it has no effect there"
    assert "prioritized.exponent" in search_space(jaxrl.DQN(prioritized=PrioritizedReplay()), {})[1]


# --- the study, without any training -------------------------------------------------------------------------------

RANGES = {"rate": jaxrl.LogUniform(1e-4, 1.0), "kind": ["a", "b"]}


def study(path=None, sampler="tpe", pruner="median", search_seed=0, fixed=None):
    return Study(path, RANGES, fixed or {}, sampler, pruner, search_seed)


def kept(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def last(settings):
    """One evaluation."""
    yield score(settings), True


def score(settings):
    return -((math.log10(settings["rate"]) + 3.0) ** 2) - (settings["kind"] == "b")


def rising(settings):
    """Four evaluations; the last is the score."""
    for rung in range(1, 5):
        yield score(settings) - (4 - rung), rung == 4


def test_bayesian_search_closes_in_and_random_search_does_not():
    late = {}
    for sampler in ("tpe", "random"):
        one = study(sampler=sampler, pruner="none")
        late[sampler] = np.median([one.run(rising).score for _ in range(40)][20:])
    assert late["tpe"] > 0.5 * late["random"], late  # scores are negative


def test_draws_depend_on_the_seed_and_what_is_fixed_is_in_every_trial():
    first, second, other = (study(search_seed=seed, fixed={"clip": 0.2}) for seed in (1, 1, 2))
    trials = [[one.run(rising) for _ in range(12)] for one in (first, second, other)]
    assert trials[0] == trials[1] != trials[2]
    assert len({trial.settings["rate"] for trial in trials[0]}) == 12
    assert {trial.settings["clip"] for trial in trials[0]} == {0.2}
    assert all(1e-4 <= trial.settings["rate"] <= 1.0 for trial in trials[0])


def test_a_trial_that_lags_behind_is_pruned_and_asked_for_no_more():
    one = study(pruner="median")
    for _ in range(8):
        one.run(lambda settings: iter([(1.0, False), (2.0, False), (3.0, True)]))
    asked = []

    def poor(settings):
        for rung in range(1, 4):
            asked.append(rung)
            yield -float(rung), rung == 3

    assert one.run(lambda settings: iter([(-1.0, True)])).ended == "finished", "at its last evaluation"
    trial = one.run(poor)
    assert trial.ended == "pruned" and trial.returns == [-1.0] and asked == [1] and math.isnan(trial.score)
    assert study(pruner="none").run(poor).ended == "finished"


def broken(settings):
    yield 1.0, False
    raise NonFiniteError("a value was not finite")


def test_trials_that_fail_say_why_and_the_search_goes_on(tmp_path):
    def refused(settings):
        raise ConfigError(["minibatches=5", "epochs=0"])
        yield

    one = study(tmp_path / "study.journal")
    failed = [one.run(broken), one.run(refused), one.run(rising)]
    assert [trial.ended for trial in failed] == ["failed", "failed", "finished"]
    assert [trial.problem for trial in failed] == ["a value was not finite", "minibatches=5; epochs=0", None]
    np.testing.assert_array_equal(failed[0].returns, [1.0, np.nan])
    assert {tuple(line) for line in kept(tmp_path / "study.journal")} == {("settings", "returns", "ended", "problem")}
    again = study(tmp_path / "study.journal").trials()
    np.testing.assert_equal([dataclasses.asdict(trial) for trial in again], list(map(dataclasses.asdict, failed)))


class Killed(BaseException):
    pass


def killed_at(rung):
    def evaluations(settings):
        for place, found in enumerate(rising(settings), 1):
            if place == rung:
                raise Killed
            yield found

    return evaluations


@pytest.mark.parametrize(("sampler", "pruner"), [("tpe", "median"), ("random", "median")])
def test_a_study_that_was_left_in_a_trial_goes_on_as_if_it_had_not_been(sampler, pruner, tmp_path):
    """Three times in a row."""
    path, whole = tmp_path / "study.journal", study(sampler=sampler, pruner=pruner)
    for _ in range(20):
        whole.run(rising)
    for count, rung in ((0, 3), (3, 3), (10, 1)):
        one = study(path, sampler, pruner)
        for _ in range(count):
            one.run(rising)
        with pytest.raises(Killed):
            one.run(killed_at(rung))
    one = study(path, sampler, pruner)
    while len(one.trials()) < 20:
        one.run(rising)
    assert one.trials() == whole.trials() and {trial.ended for trial in one.trials()} == {"finished", "pruned"}
    assert len(kept(path)) == 20


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_trials_side_by_side_keep_their_numbers_and_those_cut_off_are_begun_anew(sampler, tmp_path):
    """Drawn at random, they are the trials of a search of one at a time, whichever end first."""
    path, whole = tmp_path / "study.journal", study(sampler=sampler)
    for _ in range(6):
        whole.run(last)
    one = study(path, sampler)
    under_way = [one.begin() for _ in range(4)]
    assert one.begun == 4 and len({trial.settings["rate"] for trial in under_way}) == 4
    for number in (2, 0):
        assert one.take(under_way[number], (score(under_way[number].settings), True)).settings == (
            under_way[number].settings
        )
    assert [line.get("number") for line in kept(path)] == [2, 0]
    one = study(path, sampler)
    assert one.begun == 2 and [one.begin().number for _ in range(3)] == [1, 3, 4]
    one = study(path, sampler)
    while len(one.trials()) < 6:
        one.run(last)
    assert [line.get("number") for line in kept(path)] == [2, 0, 1, None, None, None]
    assert one.trials() == study(path, sampler).trials() == whole.trials()
    path.write_text("\n".join(path.read_text().splitlines()[:1] * 2))
    with pytest.raises(RunDirectoryError, match="occurs twice"):
        study(path)


def test_to_the_sampler_trials_under_way_are_poor_ones():
    """Else the next would be drawn from the same density, next to them."""
    apart = {}
    for told in (True, False):
        one = study()
        for _ in range(15):
            one.run(last)
        if told:
            for _ in range(8):
                one.begin()
        one._begun = set(range(23))
        apart[told] = one.begin().settings["rate"]
    assert apart[True] != apart[False], "of the same number, and so of the same seed"


# --- its file ------------------------------------------------------------------------------------------------------


def test_a_link_or_a_pipe_in_place_of_the_journal_is_refused(tmp_path):
    target = tmp_path / "elsewhere"
    target.write_text("")
    for number, make in enumerate((lambda path: path.symlink_to(target), os.mkfifo)):
        path = tmp_path / f"study-{number}"
        make(path)
        with pytest.raises(RunDirectoryError, match="cannot be read as a study"):
            study(path)
    assert target.read_text() == ""


ONE = {"settings": {"rate": 0.1, "kind": "a"}, "returns": [1.0], "ended": "finished", "problem": None}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[" * 100_000,
        '{"op_code": 0, "worker_id": "x", "study_name": "tune", "directions": [2]}',
        ONE | {"settings": {"rate": 0.1}},
        ONE | {"settings": {"rate": 0.1, "kind": "a", "__class__": "b"}},
        ONE | {"settings": {"rate": 2.0, "kind": "a"}},
        ONE | {"settings": {"rate": 10**400, "kind": "a"}},
        ONE | {"settings": {"rate": 0.1, "kind": {"type": "algorithm:ppo"}}},
        ONE | {"returns": [None]},
        ONE | {"returns": ["1"]},
        ONE | {"returns": [1.0, 10**400]},
        ONE | {"ended": "running"},
        ONE | {"ended": "failed"},
        ONE | {"problem": "x"},
        *(ONE | {"number": number} for number in (-1, None, True, MOST_TRIALS)),
    ],
)
def test_a_study_of_something_else_is_refused(line, tmp_path):
    path = tmp_path / "study.journal"
    text = line if isinstance(line, str) else json.dumps(line)
    for whole in (text + "\n", json.dumps(ONE) + "\n" + text):
        path.write_text(whole)
        with pytest.raises(RunDirectoryError, match="cannot be read as a study"):
            study(path)
        assert path.read_text() == whole, "a file that is refused is left as it is"


def test_a_study_with_too_much_is_refused_at_once(tmp_path, monkeypatch):
    path = tmp_path / "study.journal"
    path.write_text("[]\n" * (MOST_TRIALS + 1))
    with pytest.raises(RunDirectoryError, match="more than 20,000 trials"):
        study(path)
    monkeypatch.setattr("jaxrl.core.files.LARGEST", path.stat().st_size - 1)
    with pytest.raises(RunDirectoryError, match="MiB"):
        study(path)


def go_on(path):
    """Reads a study, tries two settings more, and shows all of it."""
    one = study(path / "study.journal")
    for _ in range(2):
        one.run(rising)
    result = tuning.TuneResult(one.trials(), "x")
    assert repr(result) and result.table() and result.best


@pytest.mark.long
@pytest.mark.faults
def test_whatever_lies_in_a_study_it_is_read_or_refused_and_nothing_is_executed(tmp_path):
    whole, own, refused = tmp_path / "whole", tmp_path / "own", 0
    whole.mkdir()
    one = study(whole / "study.journal")
    for _ in range(12):
        one.run(rising)
    one.run(broken)
    data = (whole / "study.journal").read_bytes()
    own.mkdir()
    (own / "study.journal").write_bytes(data)
    assert outcome(go_on, own) is None
    for what, changed in hostile.lines_mutated(data, 150, 17):
        (own / "study.journal").write_bytes(changed)
        with hostile.Watch(own) as watch:
            assert outcome(go_on, own) is None, what
        assert watch.found == [], what
        (own / "study.journal").write_bytes(changed)
        try:
            assert len(study(own / "study.journal").trials()) <= 26, what
        except RunDirectoryError:
            refused += 1
    assert 20 <= refused <= 140, "of both kinds"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["own", "study.journal", "study.journal", "whole"]


def test_a_trial_that_cannot_be_written_is_told_once_and_written_later(tmp_path, monkeypatch):
    path, whole = tmp_path / "study.journal", study()
    trials = [whole.run(rising) for _ in range(6)]
    one = study(path)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "no space left on device")

    found = [one.run(rising)]
    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="no space left") as told:
        found += [one.run(rising) for _ in range(3)]
    assert len(told) == 1 and len(kept(path)) == 1 and list(tmp_path.iterdir()) == [path], "and no half of a file"
    monkeypatch.undo()
    found.append(one.run(rising))
    assert found == trials[:5] == study(path).trials()


# --- searches ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_trial_is_the_run_of_its_settings():
    result = searched()
    assert len(result.trials) == 4 and {trial.ended for trial in result.trials} == {"finished"}
    assert {len(trial.returns) for trial in result.trials} == {tunes.EVALUATIONS}
    assert result.best_trial.score == max(trial.score for trial in result.trials)
    assert set(result.best) == set(tunes.SPACE)
    alone = jaxrl.train(
        PPO.replace(**result.best),
        ENV,
        total_steps=2 * tunes.EVALUATIONS * ROWS,
        evaluate_every=2 * ROWS,
        seed=4,
        topology=anakin(),
        evaluation_episodes=8,
        progress=False,
    )
    returns = [row["evaluation/return_mean"] for row in alone.metrics if "evaluation/return_mean" in row]
    assert result.best_trial.returns == pytest.approx(returns, rel=1e-6)


@pytest.mark.long
def test_all_trials_are_one_program():
    tunes.search(trials=2, search_seed=7)
    before = chunk_many._cache_size()
    tunes.search(trials=2, search_seed=8)
    assert chunk_many._cache_size() == before


@pytest.mark.long
def test_the_score_is_the_mean_over_seeds():
    """Of settings that are the same, each seed alone and all together."""
    one = {"clip": [0.2], "trials": 1, "learning_rate": 1e-2}
    alone = [tunes.search(seeds=[seed], **one).trials[0].returns for seed in (4, 5)]
    assert alone[0] != alone[1]
    together = tunes.search(seeds=[4, 5], **one).trials[0].returns
    np.testing.assert_allclose(together, np.mean(alone, axis=0), rtol=1e-6)


@pytest.mark.long
def test_settings_that_fail_are_trials_that_failed():
    result = tunes.search(learning_rate=[1e30], trials=2)
    assert [trial.ended for trial in result.trials] == ["failed", "failed"]
    assert "a value was not finite before step 128, seed 4" in result.trials[0].problem
    with pytest.raises(NonFiniteError, match="no trial of 2 finished"):
        result.best  # noqa: B018
    assert "failed" in result.table() and "best: none" in repr(result)


@pytest.mark.long
def test_the_table_has_the_best_first():
    result = searched()
    header, first, *others = result.table().splitlines()
    assert header.split() == ["trial", *result.best, "return", "evaluations", "ended"] and len(others) == 3
    assert result.trials[int(first.split()[0])] == result.best_trial and first.split()[-2:] == ["3", "finished"]


def chunks(monkeypatch):
    """Counts the chunks from here on."""
    made, chunk = [], VectorizedRuns.chunk
    monkeypatch.setattr(VectorizedRuns, "chunk", lambda *arguments: made.append(1) or chunk(*arguments))
    return made


@pytest.mark.long
def test_a_search_goes_on_with_more_trials_and_refuses_another(tmp_path, monkeypatch):
    made = chunks(monkeypatch)
    tunes.search(tmp_path, trials=3)
    assert len(made) == 3 * tunes.EVALUATIONS
    result = tunes.search(tmp_path)
    assert len(made) == 4 * tunes.EVALUATIONS and result.trials == searched().trials
    check_what_is_left(result, tmp_path)
    with pytest.raises(RunDirectoryError, match="tune.search_seed: 0 -> 1"):
        tunes.search(tmp_path, search_seed=1)
    with pytest.raises(RunDirectoryError, match="tune.space.*clip"):
        tunes.search(tmp_path, clip=jaxrl.Uniform(0.1, 0.3))
    assert len(tunes.search(tmp_path, trials=1, search_seed=1, overwrite=True).trials) == 1
    assert checkpoint.complete_steps(tmp_path / "checkpoints") == []
    assert len((tmp_path / "trials.csv").read_text().splitlines()) == 2, "of the earlier search nothing is left"


def check_what_is_left(result, path):
    """The trials as a table and a picture, and the policy of the best one, over both sessions."""
    table = (path / "trials.csv").read_text().splitlines()
    assert table[0].startswith("trial,") and len(table) == 1 + len(result.trials)
    assert result.trials[int(table[1].partition(",")[0])] == result.best_trial
    assert len((path / "trials.md").read_text().splitlines()) == 2 + len(result.trials)
    plot_runs([path], path / "again.png")
    assert (path / "again.png").read_bytes() == (path / "trials.png").read_bytes()
    run = load_run(path)
    assert {name: getattr(run.algo, name) for name in result.best} == pytest.approx(result.best)
    [row] = read_metrics(path / "best" / "metrics.jsonl")
    assert row["step"] == run.step and row["evaluation/return_mean"] >= result.best_trial.score


def test_a_directory_without_a_policy_says_what_to_do(tmp_path):
    (tmp_path / "study.journal").write_text("")
    with pytest.raises(RunDirectoryError, match="a search without a policy"):
        jaxrl.load(tmp_path)


def test_without_optuna_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(tuning.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="jaxrl.tune"):
        tunes.search()


@pytest.mark.long
@pytest.mark.faults
def test_killed_and_started_again_only_the_trial_under_way_is_lost(tmp_path):
    """By `kill -9`, in the middle of the third trial; the search is then the search that was not killed."""
    dying.killed(f"tunes.search({str(tmp_path / 'study')!r})", 2 * tunes.EVALUATIONS + 2)
    assert len(kept(tmp_path / "study" / "study.journal")) == 2
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = chunks(monkeypatch)
        result = tunes.search(tmp_path / "study")
    assert len(made) == 2 * tunes.EVALUATIONS, "two trials were kept"
    assert result.trials == searched().trials


# --- on Ray ----------------------------------------------------------------------------------------------------------


started, cluster = clusters.fixtures()


@pytest.mark.long
def test_on_ray_the_trials_are_those_of_this_process(cluster, tmp_path):
    """One at a time all are, begun there and ended here; two at a time those that are drawn at random."""
    tunes.search(tmp_path, trials=2, backend="ray", max_concurrent=1)
    assert tunes.search(tmp_path).trials == searched().trials
    there = tunes.search(search="random", backend="ray", search_seed=2)
    assert there.trials == tunes.search(search="random", search_seed=2).trials


FATES = {"fate": ["fine", "lost", "raises", "diverges"], "rate": jaxrl.Uniform(0.0, 1.0)}
PROBLEMS = {
    "fine": None,
    "lost": "the trial's process was lost: The actor died unexpectedly",
    "raises": "the trial's process raised ValueError('out of cheese')",
    "diverges": "a value was not finite",
}


@pytest.mark.long
@pytest.mark.faults
def test_a_process_that_is_lost_ends_its_trial_and_no_other(cluster, tmp_path):
    """Nor does what raises; and a search that was cut off with trials under way begins these anew."""
    path, fates, ended = tmp_path / "study.journal", tunes.Fates(tmp_path / "begun"), []
    fates.folder.mkdir()

    def told(number, trial):
        ended.append(number)
        if len(ended) == 1:
            raise Killed

    def read():
        return Study(path, FATES, {}, "random", "none", search_seed=3)

    with pytest.raises(Killed):
        side_by_side(read(), fates, 6, Actors(max_concurrent=2), 1, told)
    assert len(kept(path)) == 1
    side_by_side(read(), fates, 6, Actors(max_concurrent=2), 1, told)
    assert sorted(ended) == list(range(6))
    trials, whole = read().trials(), Study(None, FATES, {}, "random", "none", search_seed=3)
    assert [trial.settings for trial in trials] == [whole.begin().settings for _ in range(6)]
    assert {trial.settings["fate"] for trial in trials} == set(FATES["fate"])
    for trial in trials:
        fate = trial.settings["fate"]
        assert trial.ended == ("finished" if fate == "fine" else "failed") and len(trial.returns) >= 1
        assert (trial.problem or "").startswith(PROBLEMS[fate] or ""), trial


@pytest.mark.long
@pytest.mark.faults
def test_where_ray_can_start_no_process_it_says_so(cluster):
    with (
        pytest.warns(RuntimeWarning, match="could not be started"),
        pytest.raises(PeerError, match="(?s)started: .*invalid literal"),
    ):
        side_by_side(study(), tunes.Unreadable(), 4, Actors(max_concurrent=2), 1, lambda *_: pytest.fail("tried"))
    with pytest.raises(ConfigError, match="cpus_per_run=64"):
        tunes.search(backend="ray", cpus_per_run=64.0)
