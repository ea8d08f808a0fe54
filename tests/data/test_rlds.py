"""RLDS on disk: every bit comes back, TFDS opens it without TensorFlow, and half a dataset is never there."""

import contextlib
import dataclasses
import json
import os
import sys
import tracemalloc
import zlib
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers import hostile
from helpers.processes import python
from helpers.programs import PPO
from helpers.recorded import (
    MADE_UP,
    TYPES,
    Clock,
    as_dataset,
    assert_bitwise,
    check_made_up,
    episode,
    untrained,
    write_minari,
    write_rlds,
)
from helpers.refused import refused
from hypothesis import given
from hypothesis import strategies as st

import jaxrl
from jaxrl.core.errors import ConfigError, DatasetError
from jaxrl.data import RldsWriter, features
from jaxrl.data.staging import Writer
from jaxrl.envs.wrappers import TimeLimit
from jaxrl.run.recording import policy_rows

tfds = pytest.importorskip("tensorflow_datasets")
KINDS = pytest.mark.parametrize("kind", ["rlds", "minari"])


def as_tfds_reads(path):
    """Every episode as TFDS gives it: its metadata, and its steps stacked."""
    source = tfds.builder_from_directory(os.fspath(path)).as_data_source("train")
    for index in range(len(source)):
        found = dict(source[index])
        steps = list(found.pop("steps"))
        yield found, jax.tree.map(lambda *x: np.stack(x), *steps)


# --- round trips ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_format", ["array_record", "tfrecord"])
@pytest.mark.parametrize("shard_bytes", [1, 1 << 28])
def test_every_bit_of_every_type_comes_back(tmp_path, shard_bytes, file_format):
    path = write_rlds(tmp_path / "data", MADE_UP, shard_bytes=shard_bytes, file_format=file_format)
    dataset = jaxrl.load_dataset(f"rlds:{path}")
    assert dataset.name == "tests_Made_up_v0"
    assert len(list(path.glob(f"*.{file_format}-*"))) == (4 if shard_bytes == 1 else 1)
    check_made_up(dataset)
    assert_bitwise(dataset[-1].steps, MADE_UP[-1].steps)
    with pytest.raises(IndexError):
        dataset[len(MADE_UP)]
    assert "tensorflow" not in sys.modules


def test_tfds_reads_the_same(tmp_path):
    path = write_rlds(tmp_path / "data", MADE_UP, shard_bytes=20_000)
    for (metadata, steps), wrote in zip(as_tfds_reads(path), MADE_UP, strict=True):
        jax.tree.map(np.testing.assert_array_equal, steps, wrote.steps)  # float32's NaNs lose their payload there
        assert jax.tree.map(lambda x: x.dtype, steps) == jax.tree.map(lambda x: x.dtype, wrote.steps)
        assert metadata["ending"] == wrote.metadata["ending"].encode()
        assert metadata["score"] == wrote.metadata["score"] and metadata["return"] == wrote.episode_return


def test_bfloat16_and_flat_arrays(tmp_path):
    wrote = episode(0, 5, dtypes=["uint8"])
    rng = np.random.default_rng(0)
    flat = dataclasses.replace(
        wrote,
        observation=rng.normal(size=(6, 4)).astype(ml_dtypes.bfloat16),
        action=np.asarray([-(2**31), 2**31 - 1, -1, 127, 128, 0], np.int32),
    )
    dataset = as_dataset(tmp_path, flat)
    assert_bitwise(dataset[0].steps, flat.steps)
    ((_, steps),) = as_tfds_reads(dataset.path)
    assert steps["observation"].dtype == ml_dtypes.bfloat16
    assert_bitwise(steps, flat.steps)


def test_tensorflow_is_never_imported(tmp_path):
    """It would be found: one that says so stands first in line."""
    path = write_rlds(tmp_path / "data", MADE_UP[:1])
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise AssertionError('TensorFlow was imported')")
    script = (
        "import sys, tensorflow_datasets as tfds\n"
        f"source = tfds.builder_from_directory({os.fspath(path)!r}).as_data_source('train')\n"
        "steps = list(source[0]['steps'])\n"
        "assert len(steps) == 5 and steps[-1]['is_last'], steps\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    python("-c", script, env=os.environ | {"PYTHONPATH": os.fspath(tmp_path)})


# --- refusals --------------------------------------------------------------------------------------------------------


def test_what_would_not_come_back_is_refused_by_name(tmp_path):
    good = episode(0, 2, dtypes=["float32"])
    bad = {
        "complex": np.zeros(3, np.complex64),
        "small": np.zeros(3, ml_dtypes.float8_e4m3fn),
        "swapped": np.zeros(3, np.dtype(">f4")),
        "text": np.asarray(["a", "b", "c"]),
        "nothing": np.zeros((3, 0), np.float32),
        "a/b": np.zeros(3, np.float32),
    }
    with pytest.raises(ConfigError) as caught:
        write_rlds(tmp_path / "data", [dataclasses.replace(good, observation=bad)])
    told = caught.value.problems
    assert sorted(line.split()[0].rstrip(":") for line in told) == sorted(f"steps/observation/{name}" for name in bad)
    flat = [dataclasses.replace(good, observation=np.zeros(3, dtype)) for dtype in (np.float32, np.float64)]
    with pytest.raises(ConfigError, match=r"observation.*float64.*float32"):
        write_rlds(tmp_path / "data", flat)
    with pytest.raises(ConfigError, match="steps/observation.* is missing, but must be .* as in earlier episodes"):
        write_rlds(tmp_path / "data", [good, flat[0]])
    refused(lambda: write_rlds(tmp_path / "data", []), "no episodes")
    refused(lambda: write_rlds(tmp_path / "data", [good], file_format="tf_record"), "did you mean 'tfrecord'")
    assert list(tmp_path.iterdir()) == []


@KINDS
def test_nothing_is_overwritten_and_damage_does_not_appear(tmp_path, monkeypatch, kind):
    pytest.importorskip({"rlds": "tensorflow_datasets"}.get(kind, kind))

    def write(episodes, name="one-v0"):
        return write_rlds(tmp_path / name, episodes) if kind == "rlds" else write_minari(tmp_path, episodes, name)

    (tmp_path / "one-v0").mkdir()  # empty: what mktemp makes
    before = hostile.snapshot(write(MADE_UP[:1]))
    refused(lambda: write(MADE_UP[:2]), "already exists")
    assert hostile.snapshot(tmp_path / "one-v0") == before
    real = Writer._read_again

    def damaged(self):
        (file,) = [*self._partial.rglob("*.array_record*"), *self._partial.rglob("*.hdf5")]
        data, reward = file.read_bytes(), MADE_UP[0].reward[:-1].tobytes()
        file.write_bytes(data.replace(reward, reward[::-1]) if reward in data else data[: len(data) // 2])
        real(self)

    monkeypatch.setattr(Writer, "_read_again", damaged)
    with pytest.raises(DatasetError):
        write(MADE_UP[:1], "two-v0")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one-v0"]


def test_a_dataset_has_one_writer(tmp_path):
    with RldsWriter(tmp_path / "other", "a"), pytest.raises(ConfigError, match="another process writes"):
        RldsWriter(tmp_path / "other", "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.faults
@KINDS
def test_a_killed_export_leaves_nothing_at_the_final_path(tmp_path, kind):
    """At eight moments that matter and twenty by chance; a line each, with what was killed and what it left."""
    pytest.importorskip({"rlds": "tensorflow_datasets"}.get(kind, kind))
    done = python("-m", "helpers.kill_writers", tmp_path, kind, 20, cwd=Path(__file__).parents[1])
    told = [line.split(": ") for line in done.stdout.splitlines()]
    assert len(told) == 1 + 8 + 20
    whole = "dataset_info.json,features.json,tests_Made_up_v0-train.array_record-00000" if kind == "rlds" else "data"
    by_chance = {moment: left for moment, _, left in told if moment.startswith("line")}
    for moment, signal, left in told:
        assert signal == ("0" if moment == "never" else "9"), moment
        if moment in by_chance:  # some are after the renaming
            assert left in ("nothing", whole), moment
        else:
            assert left == (whole if moment in ("never", "after renaming") else "nothing"), moment
        if left == whole:  # and what the killed ones left beside it did no harm
            read = list(jaxrl.load_dataset(f"{kind}:{tmp_path / moment.replace(' ', '_')}"))
            assert_bitwise([one.steps for one in read], [episode(seed, 3).steps for seed in range(4)])
    assert sum(left == "nothing" for left in by_chance.values()) >= 10
    assert {path.name for path in tmp_path.glob(".*")} <= {".data-v0.partial"}


# --- exports ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
@KINDS
def test_every_step_of_an_export_is_what_the_environment_showed(tmp_path, monkeypatch, kind):
    pytest.importorskip({"rlds": "tensorflow_datasets"}.get(kind, kind))
    monkeypatch.setattr(policy_rows, "_CHUNK_ROWS", 3)
    env = TimeLimit(Clock(), 6)
    policy = untrained(env, jaxrl.PPO())
    settings = {"episodes": 20, "num_envs": 3, "seed": 5, "policy_version": 7, "progress": False}
    if kind == "rlds":
        path = jaxrl.export_rlds(policy, env, tmp_path / "clock-v1", **settings)
    else:
        path = jaxrl.export_minari(policy, env, "clock-v1", data_dir=tmp_path, **settings)
    dataset = jaxrl.load_dataset(f"{kind}:{path}")
    endings = set()
    shares = np.zeros(3, int)
    for read in dataset:
        length = int(read.observation["hands"]["now"][0, 1])
        times = np.arange(min(length, 6) + 1)
        assert read.observation["hands"]["now"].tolist() == [[time, length] for time in times]
        assert read.observation["hands"]["odd"].tolist() == [bool(time % 2) for time in times]
        face = read.observation["face"]
        assert (face == times.reshape(-1, 1, 1, 1)).all() and face.dtype == np.uint8
        assert read.reward.tolist() == [*times[1:], 0]
        assert read.metadata["return"] == times.sum() and read.metadata["length"] == len(times) - 1
        assert read.metadata["ending"] == ("terminated" if length <= 6 else "truncated")
        assert bool(read.is_terminal[-1]) == (length <= 6)
        actions, _ = policy(read.observation)
        np.testing.assert_allclose(read.action[:-1], actions[:-1], atol=1e-6)
        assert read.metadata["environment"] == "tests:Clock" and read.metadata["algorithm"] == "PPO"
        assert read.metadata["seed"] == 5 and read.metadata["policy_version"] == 7
        endings.add(read.metadata["ending"])
        shares[read.metadata["env_index"]] += 1
    assert endings == {"terminated", "truncated"}
    assert shares.tolist() == [7, 7, 6]
    assert [file.name for file in tmp_path.iterdir()] == ["clock-v1"]


@pytest.mark.long
def test_an_export_is_the_episodes_of_an_evaluation(tmp_path):
    env = jaxrl.make("gymnax:CartPole-v1", max_steps_in_episode=30)
    policy = untrained(env, PPO)
    path = jaxrl.export_rlds(policy, env, tmp_path / "data", episodes=12, num_envs=4, seed=2, explore=True)
    found = [[] for _ in range(4)]
    for read in jaxrl.load_dataset(f"rlds:{path}"):
        found[read.metadata["env_index"]].append(read.metadata["return"])
    prepared = jaxrl.envs.prepared(env)
    played = jaxrl.evaluate(
        policy.algo, policy.actor, prepared, policy.spec, seed=2, episodes=12, num_envs=4, explore=True
    )
    assert np.asarray(found).T.ravel().tolist() == played.returns.tolist()
    assert len(set(played.returns)) > 2


@pytest.mark.long
def test_episodes_without_end_are_cut_off_and_the_shortage_is_told(tmp_path):
    env = jaxrl.make("gymnax:Pendulum-v1", max_steps_in_episode=10_000)
    policy = untrained(env, PPO)
    with pytest.warns(UserWarning, match="2 of 4 episodes"):
        path = jaxrl.export_rlds(policy, env, tmp_path / "data", episodes=4, num_envs=2, max_steps=20, progress=False)
    episodes = list(jaxrl.load_dataset(f"rlds:{path}"))
    assert [read.length for read in episodes] == [20, 20]
    for read in episodes:
        assert read.metadata["ending"] == "cut off" and not read.is_terminal.any()
        assert read.discount.tolist() == [1.0] * 20 + [0.0]


def test_the_metadata_is_the_same_wherever_it_was_written(tmp_path):
    """No path of this machine, and what TFDS needs to find the files."""
    path = write_rlds(tmp_path / "data", MADE_UP[:3], shard_bytes=1)
    info = json.loads((path / "dataset_info.json").read_text())
    assert os.fspath(tmp_path) not in json.dumps(info)
    assert info["fileFormat"] == "array_record" and info["splits"][0]["shardLengths"] == ["1", "1", "1"]
    moved = path.rename(tmp_path / "elsewhere")
    assert len(jaxrl.load_dataset(f"rlds:{moved}")) == 3
    merged = tfds.builder_from_directories([os.fspath(moved), os.fspath(write_rlds(tmp_path / "more", MADE_UP))])
    assert len(merged.as_data_source("train")) == 7
    assert set(TYPES) < set((moved / "features.json").read_text().replace('"', " ").split())


# --- several directories ---------------------------------------------------------------------------------------------


def test_directories_side_by_side_are_read_as_one(tmp_path):
    for name, episodes, file_format in (
        ("b", MADE_UP[1:2], "tfrecord"),
        ("a", MADE_UP[:1], "array_record"),
        ("c", MADE_UP[2:], "array_record"),
        (".d.partial", MADE_UP, "array_record"),
    ):
        write_rlds(tmp_path / name, episodes, file_format=file_format)
    (tmp_path / "notes").mkdir()
    dataset = jaxrl.load_dataset(f"rlds:{tmp_path}")
    assert_bitwise([read.steps for read in dataset], [one.steps for one in MADE_UP])
    assert_bitwise(dataset[3].steps, MADE_UP[3].steps)
    assert dataset.report().lengths.tolist() == [one.length for one in MADE_UP]
    broken = dataclasses.replace(MADE_UP[0], is_last=np.zeros(5, bool))
    write_rlds(tmp_path / "e", [MADE_UP[0], broken])
    dataset = jaxrl.load_dataset(f"rlds:{tmp_path}")
    with pytest.raises(DatasetError, match=r"episode 5 .*of e\): is_last"):
        dataset[5]
    assert any(fault.startswith("episode 5: is_last") for fault in dataset.report().faults)


def test_directories_that_do_not_fit_together_are_told(tmp_path):
    write_rlds(tmp_path / "a", MADE_UP[:1])
    other = dataclasses.replace(MADE_UP[1], action={**MADE_UP[1].action, "how": np.zeros((2, 3), np.float32)})
    write_rlds(tmp_path / "b", [other])
    with pytest.raises(DatasetError, match=r"b: .*how is float32 \(3,\)"):
        jaxrl.load_dataset(f"rlds:{tmp_path}")
    more = dataclasses.replace(MADE_UP[1], extras={"log_prob": np.zeros(2, np.float32)})
    (tmp_path / "b").rename(tmp_path / ".b")
    write_rlds(tmp_path / "b", [more])
    with pytest.raises(DatasetError, match=r"b: steps/log_prob .*missing"):
        jaxrl.load_dataset(f"rlds:{tmp_path}")


@pytest.mark.long
def test_every_process_writes_its_share_of_the_same_episodes(tmp_path, monkeypatch):
    env = TimeLimit(Clock(), 6)
    policy = untrained(env, jaxrl.PPO())
    settings = {"episodes": 20, "num_envs": 6, "seed": 5, "progress": False}
    alone = jaxrl.export_rlds(policy, env, tmp_path / "alone", **settings)
    together = tmp_path / "together"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        if process == 1:
            with pytest.raises(DatasetError, match="host-00001-of-00002 is missing"):
                jaxrl.load_dataset(f"rlds:{together}")
        path = jaxrl.export_rlds(policy, env, together, **settings)
        assert path == together / f"host-0000{process}-of-00002"
    dataset = jaxrl.load_dataset(f"rlds:{together}")
    assert [dataset[number].metadata["env_index"] < 3 for number in (0, 10, 11, 19)] == [True, True, False, False]

    def by_environment(episodes):
        return sorted(episodes, key=lambda one: (one.metadata["env_index"], one.metadata["episode_id"]))

    for one, other in zip(by_environment(jaxrl.load_dataset(f"rlds:{alone}")), by_environment(dataset), strict=True):
        assert_bitwise(one.steps, other.steps)
        assert one.metadata["env_index"] == other.metadata["env_index"]
    refused(lambda: jaxrl.export_rlds(policy, env, together, **settings), "already exists")
    refused(lambda: jaxrl.export_rlds(policy, env, tmp_path, **settings), "already contains alone")
    refused(lambda: jaxrl.export_rlds(policy, env, tmp_path / "few", episodes=1), "one per process")


def record_of(kind, values):
    example = features.new_example()
    getattr(example.features.feature["steps/x"], kind).value.extend(values)
    return example.SerializeToString()


def test_what_does_not_decompress_to_its_shape_is_refused_in_little_memory():
    """1 GB of zeros is 1 MB that zlib wrote."""
    field = features.Field("steps/x", np.dtype(np.uint8), (4,), "zlib")
    sound, bomb = zlib.compress(b"abcd"), zlib.compressobj()
    bomb = b"".join(bomb.compress(bytes(1 << 20)) for _ in range(1 << 8)) + bomb.flush()

    def read(*texts):
        return features.read_example(record_of("bytes_list", texts), [field], "episode 0")["steps/x"]

    np.testing.assert_array_equal(read(sound, sound), np.frombuffer(b"abcdabcd", np.uint8).reshape(2, 4))
    tracemalloc.start()
    for wrong in (bomb, zlib.compress(b"abc"), zlib.compress(b"abcde"), sound[:-3]):
        with pytest.raises(DatasetError, match="episode 0: steps/x .*4 bytes"):
            read(sound, wrong)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("uint8", 256),
        ("bool", 2),
        ("float16", 1e6),
    ],
)
def test_a_stored_number_that_its_type_cannot_hold_is_refused(dtype, value):
    """TFDS stores integers in 64 bits, and others may have written more than a field's type has."""
    field = features.Field("steps/x", np.dtype(dtype), (), "none")
    record = record_of("int64_list" if isinstance(value, int) else "float_list", [1, value])
    with pytest.raises(DatasetError, match=f"episode 0: steps/x .*{dtype}"):
        features.read_example(record, [field], "episode 0")


@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 255))
def test_damaged_records_are_read_or_refused(noise, at, value):
    field = features.Field("steps/x", np.dtype(np.int64), (), "none")
    record = bytearray(record_of("int64_list", range(100, 160)))
    record[at % len(record)] = value
    for data in (noise, bytes(record), bytes(record)[: at % len(record)]):
        with contextlib.suppress(DatasetError):
            assert features.read_example(data, [field], "episode 0")["steps/x"].dtype == np.int64


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, None, [1], 1j])
def test_metadata_that_would_not_come_back_are_refused(tmp_path, value):
    with RldsWriter(tmp_path / "data", "data") as writer, pytest.raises(ConfigError, match="metadata field mine"):
        writer.write(episode(0, 2, "truncated"), {"mine": value})
    with RldsWriter(tmp_path / "data", "data") as writer:
        writer.write(episode(0, 2, "truncated"), {"mine": 1, "share": np.float32(0.5), "count": np.int8(-3)})
        with pytest.raises(ConfigError, match="metadata field mine"):
            writer.write(episode(0, 2, "truncated"), {"mine": value, "share": 0.5, "count": 3})
        writer.close()
    (read,) = jaxrl.load_dataset(f"rlds:{tmp_path / 'data'}")
    assert (read.metadata["mine"], read.metadata["share"], read.metadata["count"]) == (1, 0.5, -3)
