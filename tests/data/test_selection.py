"""Parts of a dataset on disk: which episodes are theirs, that nothing is read for it too early, and that they load."""

import dataclasses

import numpy as np
import pytest
from helpers.made import ENDINGS, made
from helpers.recorded import assert_bitwise, write_rlds
from helpers.refused import refused

import jaxrl
from jaxrl.core.errors import ConfigError, DatasetError
from jaxrl.data import views
from jaxrl.data.dataset_statistics import statistics

pytest.importorskip("tensorflow_datasets")
LENGTHS = [5, 1, 9, 3, 7, 2, 8, 4, 6, 5]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("selection") / "data"
    write_rlds(path, (made(n, ENDINGS[seed % 3], seed) for seed, n in enumerate(LENGTHS)), shard_bytes=2000)
    assert len(list(path.glob("*.array_record*"))) > 2
    return f"rlds:{path}"


@pytest.fixture
def dataset(source):
    return jaxrl.load_dataset(source)


def seeds(dataset):
    return [int(one.metadata["score"]) for one in dataset]


def test_lengths_and_summaries_are_those_of_the_episodes(dataset):
    assert dataset.lengths.tolist() == LENGTHS
    for summary, episode in zip(dataset.summaries(), dataset, strict=True):
        assert summary == episode.summary
        assert summary["return"] == episode.episode_return and summary["length"] == episode.length


def test_episodes_are_read_in_any_order(dataset):
    order = [3, 4, 5, 0, 9, 9, -1, 8, 7]
    for index, episode in zip(order, dataset.read(order), strict=True):
        assert_bitwise(episode.steps, made(LENGTHS[index], ENDINGS[index % 10 % 3], index % 10).steps)
        assert episode.metadata["score"] == index % 10
        assert_bitwise(dataset[index].steps, episode.steps)
    assert list(dataset.read([])) == []
    with pytest.raises(IndexError, match="episode 10 is out of range; there are 10"):
        dataset[10]


def test_what_is_selected_is_there_and_in_order(dataset):
    chosen = dataset.select([7, 2, 3, -1])
    assert len(chosen) == 4 and seeds(chosen) == [7, 2, 3, 9]
    assert chosen.lengths.tolist() == [4, 9, 3, 5]
    assert seeds(chosen.select([3, 0])) == [9, 7]
    assert chosen[1].metadata["score"] == 2
    assert chosen.report().lengths.tolist() == [4, 9, 3, 5] and chosen.report().episodes == 4
    assert seeds(dataset) == list(range(10))
    refused(lambda: dataset.select([0, 10]), "episode 10 is out of range")


def test_a_predicate_chooses_by_what_is_known_of_an_episode(dataset):
    asked = []

    def long_and_terminated(episode):
        asked.append(episode["score"])
        return episode["length"] >= 4 and episode["ending"] == "terminated"

    chosen = dataset.where(long_and_terminated)
    assert asked == []
    assert seeds(chosen) == [i for i, n in enumerate(LENGTHS) if n >= 4 and i % 3 == 0]
    assert len(asked) == 10
    best = max(one.episode_return for one in dataset)
    assert [one.episode_return for one in dataset.where(lambda episode: episode["return"] == best)] == [best]
    assert len(dataset.where(lambda episode: False)) == 0
    assert seeds(chosen.where(lambda episode: episode["score"] > 0)) == [s for s in seeds(chosen) if s]


@pytest.mark.parametrize("fraction, validation", [(0.1, 1), (0.3, 3), (0.55, 6), (0.001, 1), (0.999, 9)])
def test_a_split_is_by_episodes_disjoint_and_complete(dataset, fraction, validation):
    train, held_out = (seeds(part) for part in dataset.split(fraction))
    assert len(held_out) == validation
    assert sorted(train + held_out) == list(range(10))
    assert train == sorted(train) and held_out == sorted(held_out)


def test_a_split_is_the_same_wherever_it_is_made(dataset, source):
    assert seeds(dataset.split(0.3)[1]) == seeds(jaxrl.load_dataset(source).split(0.3)[1]) == [3, 5, 9]
    assert len({tuple(seeds(dataset.split(0.3, seed=seed)[1])) for seed in range(20)}) > 10
    train, held_out = dataset.where(lambda episode: episode["length"] > 3).split(0.5, seed=1)
    assert sorted(seeds(train) + seeds(held_out)) == [i for i, n in enumerate(LENGTHS) if n > 3]
    for wrong in (0, 1, -0.1, 1.5):
        with pytest.raises(ConfigError, match="more than 0 and less than 1"):
            dataset.split(wrong)
    refused(lambda: len(dataset.select([0]).split(0.5)[0]), "1 episodes cannot be split")


def test_episodes_are_changed_when_they_are_read(dataset):
    short = dataset.map(lambda one: views.truncate(one, lambda e: np.arange(len(e.is_last)) == 3))
    doubled = short.map(lambda one: dataclasses.replace(one, reward=one.reward * 2))
    assert doubled.lengths.tolist() == [min(n, 3) for n in LENGTHS]
    assert [summary["length"] for summary in short.summaries()] == doubled.lengths.tolist()
    assert doubled[2].reward.tolist() == [*(made(9, "cut off", 2).reward[:3] * 2).tolist(), 0.0]
    truncated = [seed for seed, n in enumerate(LENGTHS) if n > 3 or ENDINGS[seed % 3] == "truncated"]
    assert seeds(short.where(lambda episode: episode["ending"] == "truncated")) == truncated
    assert short.report().lengths.tolist() == doubled.lengths.tolist()
    assert dataset.lengths.tolist() == LENGTHS


def test_a_change_that_keeps_lengths_is_not_made_to_know_them(dataset):
    def no_one_asks(episode):
        raise AssertionError

    changed = dataset.select([2, 0]).map(no_one_asks, same_length=True)
    assert changed.lengths.tolist() == [9, 5]
    with pytest.raises(AssertionError):
        changed[0]


def test_an_episode_keeps_its_number_on_disk(tmp_path):
    one, *others = (made(4, "truncated", seed) for seed in range(3))
    others[0] = dataclasses.replace(others[0], is_last=np.zeros(5, bool))
    write_rlds(tmp_path / "bad", [one, *others])
    chosen = jaxrl.load_dataset(f"rlds:{tmp_path / 'bad'}").select([2, 1])
    assert chosen[0].length == 4
    with pytest.raises(DatasetError, match="bad: episode 1: is_last"):
        chosen[1]
    assert chosen.report().faults[0].startswith("episode 1: is_last")


# --- all of it -------------------------------------------------------------------------------------------------------


def test_statistics_and_arrays_are_those_of_the_episodes(dataset):
    train, _ = dataset.split(0.2)
    of, wanted = train.statistics(images="skip"), statistics(list(train), images="skip")
    assert_bitwise(of["observation"]["vector"].std, wanted["observation"]["vector"].std)
    assert of["observation"]["picture"] is None
    rows = train.arrays(extras=("value",))
    assert len(rows.first) == sum(train.lengths + 1)
    assert_bitwise(rows.observation["number"], np.concatenate([one.observation["number"] for one in train]))


@pytest.mark.long
def test_processes_read_the_same_batches(dataset):
    """Also what only a copy by value can bring there: a function that was made here."""
    changed = dataset.map(lambda one: dataclasses.replace(one, reward=one.reward + 1)).select([1, 2, 3])
    here, there = changed.loader(4), changed.loader(4, workers=1)
    with there:
        taken = there.take(3, 2)
        for number in range(2):
            assert_bitwise(taken.rewards[number], here.batch(3 + number).rewards)
            assert_bitwise(taken.observation["picture"][number], here.batch(3 + number).observation["picture"])
