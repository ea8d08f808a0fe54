"""Datasets read back: reports, and faults told with the episode and the field. And the two commands."""

import contextlib
import dataclasses
import os
import re
import shutil

import jax
import numpy as np
import pytest
from helpers.made import dataset_of
from helpers.recorded import as_dataset, assert_bitwise, episode, spoil, write_rlds
from helpers.refused import refused

import jaxrl
from jaxrl.cli import main
from jaxrl.core.errors import ConfigError, DatasetError
from jaxrl.data import views
from jaxrl.data.rows import rows_from_episode

tfds = pytest.importorskip("tensorflow_datasets")


def plain(seed, transitions=4, ending="terminated"):
    """An episode of finite numbers."""
    return episode(seed, transitions, ending, dtypes=["int16", "uint8", "bool"])


# --- reports ---------------------------------------------------------------------------------------------------------


def test_a_report_tells_what_there_is():
    episodes = [plain(0, 4, "terminated"), plain(1, 9, "truncated"), plain(2, 2, "cut off"), plain(3, 5, "terminated")]
    report = dataset_of(*episodes).report()
    assert report.returns.tolist() == [sum(map(float, one.reward[:-1])) for one in episodes]
    assert report.lengths.tolist() == [4, 9, 2, 5] and report.episodes == 4 and report.transitions == 20
    assert report.endings == {"terminated": 2, "truncated": 1, "cut off": 1}
    assert report.faults == []
    fields = {field.name: (field.shape, field.low, field.high) for field in report.fields}
    how = np.concatenate([one.action["how"][:-1] for one in episodes])
    picture = np.concatenate([one.observation["picture"]["uint8"] for one in episodes])
    assert fields["action/how"] == ((2,), float(how.min()), float(how.max()))
    assert fields["observation/picture/uint8"] == ((5, 4, 1), picture.min(), picture.max())
    bars = [line for line in str(report).splitlines() if "█" in line]
    assert sum(int(line.split()[-1]) for line in bars) == 4


def test_what_means_nothing_is_not_looked_at():
    """The last step's action and reward, whatever another program put there."""
    one = plain(0)
    one.reward[-1], one.action["how"][-1] = np.nan, 1e9
    report = dataset_of(one).report()
    assert report.faults == []
    assert max(field.high for field in report.fields if field.name == "action/how") < 100


# --- faults ----------------------------------------------------------------------------------------------------------


def marked(steps, *true):
    return np.isin(np.arange(steps), true)


def test_a_broken_rule_names_episode_and_field(tmp_path):
    broken = dataclasses.replace(plain(1), is_first=marked(5, 0, 2))
    dataset = as_dataset(tmp_path, plain(0), broken, plain(2))
    assert_bitwise(dataset[0].steps, plain(0).steps)
    for read in (lambda: dataset[1], lambda: list(dataset)):
        with pytest.raises(DatasetError, match="data: episode 1: is_first is"):
            read()
    report = dataset.report()
    assert len(report.faults) == 1 and report.faults[0].startswith("episode 1: is_first is")
    assert report.returns.size == 2


def test_values_that_are_not_finite_are_reported():
    bad = plain(1)
    bad.action["how"][2, 1] = np.inf
    dataset = dataset_of(plain(0), bad)
    assert_bitwise(dataset[1].steps, bad.steps)
    assert dataset.report().faults == ["episode 1: action/how is not finite at step 2"]


def foreign(path, steps, features, **options):
    """A dataset that TFDS itself wrote, step by step."""
    path.mkdir()
    identity = tfds.core.DatasetIdentity(
        name="theirs", version=tfds.core.Version("1.0.0"), data_dir=os.fspath(path), module_name=""
    )
    info = tfds.core.DatasetInfo(builder=identity, features=tfds.features.FeaturesDict(features))
    writer = tfds.core.SequentialWriter(info, max_examples_per_shard=2, file_format="array_record")
    writer.initialize_splits(["train"])
    writer.add_examples({"train": steps})
    writer.close_splits(["train"])
    return f"rlds:{path}"


def their_steps(count=3):
    rng = np.random.default_rng(0)
    return [
        {
            "observation": {
                "image": rng.integers(0, 256, (8, 6, 3), np.uint8),
                "packed": rng.integers(0, 256, (4, 4), np.uint8),
                "double": np.float64(rng.normal()),
            },
            "action": rng.normal(size=2).astype(np.float32),
            "reward": np.float32(step),
            "discount": np.float32(1.0),
            "is_first": step == 0,
            "is_last": step == count - 1,
            "is_terminal": False,
            "language_instruction": "pick up the brick",
        }
        for step in range(count)
    ]


def their_features(**changes):
    tf = tfds.features
    image = {
        "image": tf.Tensor(shape=(8, 6, 3), dtype=np.uint8),
        "packed": tf.Tensor(shape=(4, 4), dtype=np.uint8, encoding="zlib"),
        "double": tf.Scalar(dtype=np.float64),
    }
    step = {"observation": image, "action": tf.Tensor(shape=(2,), dtype=np.float32)}
    step |= {"reward": np.float32, "discount": np.float32, "language_instruction": tf.Text()}
    step |= dict.fromkeys(("is_first", "is_last", "is_terminal"), np.bool_)
    return {name: child for name, child in (step | changes).items() if child is not None}


def test_what_tfds_wrote_is_read(tmp_path):
    steps = their_steps()
    written = [{"steps": steps, "episode_id": n} for n in range(5)]
    features = {"steps": tfds.features.Dataset(their_features()), "episode_id": np.int64}
    dataset = jaxrl.load_dataset(foreign(tmp_path / "data", written, features))
    assert len(dataset) == 5
    for number, read in enumerate(dataset):
        assert read.metadata == {"episode_id": number}
        wanted = jax.tree.map(lambda *x: np.stack(x), *steps)
        assert read.extras["language_instruction"].tolist() == ["pick up the brick"] * 3
        wanted["observation"]["double"] = wanted["observation"]["double"].astype(np.float32).astype(np.float64)
        own = {name: x for name, x in read.steps.items() if name != "language_instruction"}
        assert_bitwise(own, {name: wanted[name] for name in own})
    assert dataset.report().endings == {"not terminated": 5}


def without(path, *names, **changes):
    """A dataset whose steps do not have these fields."""
    steps = [{name: x for name, x in (step | changes).items() if name not in names} for step in their_steps()]
    features = {"steps": tfds.features.Dataset(their_features(**dict.fromkeys(names)))}
    return foreign(path, [{"steps": steps}], features)


def test_steps_that_lack_a_field_are_told_when_it_is_opened(tmp_path):
    with pytest.raises(DatasetError, match="no is_first, no is_last"):
        jaxrl.load_dataset(without(tmp_path / "data", "is_first", "is_last"))


def test_what_rlds_does_not_demand_may_be_absent(tmp_path):
    """https://github.com/google-research/rlds#dataset-format: is_first and is_last alone are mandatory."""
    optional = ("observation", "action", "reward", "discount", "is_terminal", "language_instruction")
    bare = jaxrl.load_dataset(without(tmp_path / "bare", *optional))
    (read,) = bare
    assert read.observation == {} and read.action == {} and read.reward.tolist() == [0, 0, 0]
    assert read.discount.tolist() == [1, 1, 0] and not read.is_terminal.any()
    assert bare.lengths.tolist() == [2] and next(bare.summaries())["return"] == 0
    notes = bare.report().notes
    assert len(notes) == 5
    # The discount says that it terminated.
    (ended,) = jaxrl.load_dataset(without(tmp_path / "ended", "is_terminal", discount=np.float32(0)))
    assert ended.is_terminal.tolist() == [False, False, True]
    (went_on,) = jaxrl.load_dataset(without(tmp_path / "went_on", "is_terminal"))
    assert not went_on.is_terminal.any()


def open_x(count=4):
    """An episode as Open X-Embodiment has them: every step an action, the only reward at the last, discount 1."""
    steps = their_steps(count)
    for step in steps:
        step["reward"] = np.float32(step["is_last"])
    steps[-1]["is_terminal"] = True
    return steps


def test_the_last_step_may_be_a_transition(tmp_path):
    features = {"steps": tfds.features.Dataset(their_features())}
    source = foreign(tmp_path / "data", [{"steps": open_x()}, {"steps": their_steps()}], features)
    plain, whole = jaxrl.load_dataset(source), jaxrl.load_dataset(source, last_step="transition")
    assert plain.report().faults == [] and "2 of 2 episodes have a reward at their last step" in plain.report().notes[0]
    assert plain.lengths.tolist() == [3, 2] and plain[0].episode_return == 0
    # That of the terminal end is learned from, that of the other, whose next observation nobody saw, is not.
    assert whole.lengths.tolist() == [4, 2]
    rows = rows_from_episode(whole[0])
    assert rows.reward.tolist() == [0, 0, 0, 1, 0] and rows.terminated.tolist() == [False, False, False, True, False]
    assert rows.weight.tolist() == [True] * 4 + [False] and rows.first.tolist() == [True] + [False] * 4
    np.testing.assert_array_equal(rows.action[3], open_x()[-1]["action"])
    np.testing.assert_array_equal(rows.observation["image"][4], open_x()[-1]["observation"]["image"])
    assert_bitwise(whole[1].steps, plain[1].steps)
    refused(lambda: jaxrl.load_dataset(source, last_step="reward"), "last_step='reward'")


@pytest.mark.parametrize("discount, step", [([0.9, 1.5, 1, 1, 0], 1), ([1, 0, 1, 1, 0], 1), ([1, 1, -1.5, 0.5, 0], 2)])
def test_discounts_that_mean_nothing_are_refused(discount, step):
    odd = dataclasses.replace(plain(1), discount=np.asarray(discount, np.float32))
    dataset = dataset_of(plain(0), odd)
    words = f"discount is {discount[step]:g} at step {step} of 5"
    assert words in dataset.report().faults[0] and dataset[1].discount[0] == np.float32(discount[0])
    with pytest.raises(DatasetError, match=words):
        dataset.arrays()


def test_a_discount_of_1_before_a_terminal_end_is_fine():
    one = dataclasses.replace(plain(1), discount=np.ones(5, np.float32))
    assert rows_from_episode(one).terminated.tolist() == [False, False, False, bool(one.is_terminal[-1]), False]


def test_damage_is_told_and_never_read_as_something_else(tmp_path):
    path = write_rlds(tmp_path / "data", [plain(0), plain(1)])
    for name, damage, message in (
        ("no features", lambda copy: (copy / "features.json").unlink(), "no features.json"),
        ("no info", lambda copy: (copy / "dataset_info.json").unlink(), "no dataset_info.json"),
        ("bad info", lambda copy: (copy / "dataset_info.json").write_text("{"), "dataset_info.json cannot be read"),
        ("no file", lambda copy: next(copy.glob("*.array_record*")).unlink(), "is missing"),
        ("half", lambda copy: os.truncate(next(copy.glob("*.array_record*")), 700), "cannot be read"),
    ):
        copy = shutil.copytree(path, tmp_path / name)
        damage(copy)
        with pytest.raises(DatasetError, match=message):
            list(jaxrl.load_dataset(f"rlds:{copy}"))
    rng = np.random.default_rng(0)
    for number in range(20):
        copy = shutil.copytree(path, tmp_path / str(number))
        spoil(copy, rng)
        with contextlib.suppress(DatasetError):
            read = [one.steps for one in jaxrl.load_dataset(f"rlds:{copy}")]
            assert_bitwise(read, [plain(0).steps, plain(1).steps])


def test_sources_that_are_none(tmp_path):
    refused(lambda: jaxrl.load_dataset(os.fspath(tmp_path)), "rlds:DIR")
    with pytest.raises(DatasetError, match="is not a TFDS dataset"):
        jaxrl.load_dataset(f"rlds:{tmp_path}")
    path = write_rlds(tmp_path / "data", [plain(0)])
    with pytest.raises(ConfigError, match="no split 'test'.*train"):
        jaxrl.load_dataset(f"rlds:{path}", split="test")
    info = path / "dataset_info.json"
    info.write_text(info.read_text().replace('"array_record"', '"riegeli"'))
    refused(lambda: jaxrl.load_dataset(f"rlds:{path}"), "riegeli")


# --- the command line -----------------------------------------------------------------------------------------------


def test_faults_are_an_exit_code(tmp_path, capsys):
    path = write_rlds(tmp_path / "data", [dataclasses.replace(plain(0), is_last=marked(5, 3))])
    assert main.main(["dataset", "info", f"rlds:{path}"]) == 1
    assert "fault: episode 0: is_last is true at step 3" in capsys.readouterr().out


# --- functions of the user's -----------------------------------------------------------------------------------------


def cut(one):
    return views.truncate(one, lambda one: np.arange(len(one.is_last)) == 2)


BROKEN = {
    "no episode": (lambda one: None, False, "must return an Episode"),
    "the arrays alone": (lambda one: one.steps, False, "must return an Episode"),
    "a number": (lambda one: dataclasses.replace(one, action=3.0), False, "action is 3.0"),
    "a list": (lambda one: dataclasses.replace(one, reward=[0.0] * 5), False, "reward/.* is 0.0"),
    "no steps": (
        lambda one: dataclasses.replace(one, **jax.tree.map(lambda x: x[:0], one.steps)),
        False,
        "the episode is empty",
    ),
    "another length": (cut, True, "has 2 transitions, not 4"),
}


@pytest.mark.parametrize(("change", "same_length", "words"), BROKEN.values(), ids=BROKEN)
def test_what_a_function_of_map_returns_is_held_against_the_rules(change, same_length, words):
    whole = dataset_of(plain(0), plain(1))
    for mapped in (whole.map(change, same_length=same_length), whole.select([1]).map(change, same_length=same_length)):
        for read in (lambda x: x[0], lambda x: list(x), lambda x: x.arrays(), lambda x: x.loader(2).batch(0)):
            with pytest.raises(DatasetError, match=rf"episode [01]: .*{words}"):
                read(mapped)
    assert any(re.search(words, fault) for fault in whole.map(change, same_length=same_length).report().faults)


def test_slices_are_datasets_and_masks_are_refused(tmp_path):
    whole = as_dataset(tmp_path, *map(plain, range(5)))
    for which in (slice(1, 3), slice(None, None, -1), slice(-2, None), slice(3, 1)):
        assert [one.metadata["episode_id"] for one in whole[which]] == list(range(5))[which]
    assert whole[np.int64(-1)].metadata["episode_id"] == 4
    for wrong in ([True, False], [0.5], [[0]], ["0"]):
        with pytest.raises(ConfigError, match="select"):
            whole.select(wrong)
    with pytest.raises(TypeError):
        whole[0.5]
