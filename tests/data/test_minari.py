"""Minari datasets: every bit comes back, Minari reads them, and what others wrote is read by the same rules."""

import dataclasses
import os
import sys

import gymnasium
import jax
import ml_dtypes
import numpy as np
import pytest
from helpers.programs import ENV, PPO
from helpers.recorded import MADE_UP, assert_bitwise, check_made_up, untrained, write_minari
from helpers.refused import refused

import jaxrl
from jaxrl.cli import main
from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError, DatasetError
from jaxrl.data import MinariWriter, minari, minari_reader
from jaxrl.run.recording import policy_rows

theirs = pytest.importorskip("minari")
pytest.importorskip("h5py")


# --- round trips ---------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("at_once", [1, 1 << 22])
def test_every_bit_of_every_type_comes_back(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(minari, "_AT_ONCE", at_once)
    path = write_minari(tmp_path, MADE_UP, "made/up-v0")
    dataset = jaxrl.load_dataset(f"minari:{path}")
    assert dataset.name == "made/up-v0" and dataset.path == path
    check_made_up(dataset)
    report = dataset.report()
    assert report.faults == [] or all("not finite" in fault for fault in report.faults)
    assert report.endings == {"terminated": 2, "truncated": 1, "cut off": 1}
    assert "tensorflow" not in sys.modules


def test_images_are_stored_without_loss(tmp_path):
    """Of this size Minari would make JPEGs of them."""
    rng = np.random.default_rng(0)
    one = dataclasses.replace(MADE_UP[0], observation=rng.integers(0, 256, (5, 36, 40, 3), np.uint8))
    path = write_minari(tmp_path, [one])
    assert_bitwise(jaxrl.load_dataset(f"minari:{path}")[0].steps, one.steps)
    assert not theirs.MinariDataset(path / "data").storage.jpeg_encoding


def test_every_kind_of_space(tmp_path):
    kinds = {
        "one": spaces.Discrete(3),
        "several": spaces.MultiDiscrete((2, 5)),
        "small": spaces.Discrete(9, np.uint8),
        "flags": spaces.Box(0, 1, (2, 2), np.bool_),
    }
    rng = np.random.default_rng(0)
    x = {name: rng.integers(0, 2, (5, *space.shape)).astype(space.dtype) for name, space in kinds.items()}
    action = {name: np.concatenate([a[:-1], 0 * a[-1:]]).astype(a.dtype) for name, a in x.items()}
    one = dataclasses.replace(MADE_UP[0], observation=x, action=action)
    both = spaces.Dict(kinds)
    with MinariWriter("kinds-v0", both, both, data_dir=tmp_path) as writer:
        writer.write(one)
        path = writer.close()
    assert_bitwise(jaxrl.load_dataset(f"minari:{path}")[0].steps, one.steps)
    read = theirs.MinariDataset(path / "data")
    assert read.action_space["several"].nvec.tolist() == [2, 5] and read.observation_space["one"].n == 3
    assert read.observation_space.contains({name: a[0] for name, a in x.items()})


def test_minari_reads_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", os.fspath(tmp_path))
    write_minari(None, MADE_UP, "made/up-v0", env_spec="CartPole-v1", algorithm="PPO")
    dataset = theirs.load_dataset("made/up-v0")
    assert list(theirs.list_local_datasets()) == ["made/up-v0"]
    assert "made" in theirs.namespace.list_local_namespaces()
    assert len(dataset) == 4 and dataset.total_steps == 4 + 1 + 130 + 7
    assert dataset.recover_environment().spec.id == "CartPole-v1"
    assert dataset.storage.metadata["algorithm_name"] == "PPO" and dataset.storage.metadata["dataset_size"] > 0
    for wrote, read in zip(MADE_UP, dataset, strict=True):
        assert_bitwise(read.observations, wrote.observation)
        assert_bitwise(read.actions, jax.tree.map(lambda x: x[:-1], wrote.action))
        assert_bitwise(read.rewards, wrote.reward[:-1])
        terminated = wrote.metadata["ending"] == "terminated"
        assert read.terminations.tolist() == [False] * (wrote.length - 1) + [terminated]
        assert read.truncations.tolist() == [False] * (wrote.length - 1) + [not terminated]
    assert_bitwise(jaxrl.load_dataset("minari:made/up-v0")[2].steps, MADE_UP[2].steps)


def test_what_else_the_steps_hold_comes_back(tmp_path):
    extras = {"log_prob": np.float32([-1, -2, -3, -4, 0]), "logits": np.arange(15, dtype=np.float64).reshape(5, 3)}
    one = dataclasses.replace(MADE_UP[0], extras=extras)
    path = write_minari(tmp_path, [one])
    assert_bitwise(jaxrl.load_dataset(f"minari:{path}")[0].steps, one.steps)
    assert_bitwise(theirs.MinariDataset(path / "data")[0].infos, extras)
    nested = dataclasses.replace(one, extras={"log_prob": extras})
    refused(lambda: write_minari(tmp_path, [nested], "other-v0"), "steps/log_prob")
    refused(lambda: write_minari(tmp_path, [one, MADE_UP[0]], "other-v0"), "steps/log_prob")


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"observation": np.zeros(5, ml_dtypes.bfloat16)}, "dtype 'bfloat16'"),
        ({"observation": {"eye": np.zeros(5, np.complex64)}}, "dtype 'complex64'"),
        ({"observation": {"a/b": np.zeros(5, np.float32)}}, r"steps/observation: Minari .* keys \['a/b'\]"),
        ({"observation": np.zeros((5, 0), np.float32)}, r"steps/observation has shape \(0,\)"),
        ({"reward": np.zeros(5, np.dtype(">f4"))}, "steps/reward has dtype >f4"),
        ({"discount": np.float32([1, 0.5, 1, 0, 0])}, "steps/discount must be float32, 0 at a termination"),
        ({"metadata": {"number": 2**63}}, "the metadata field number=.* does not fit into int64"),
        ({"metadata": {"seeds": [1, 2]}}, r"the metadata field seeds=\[1, 2\] must be a number or a string"),
    ],
)
def test_what_would_not_come_back_is_refused_by_name(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        write_minari(tmp_path, [dataclasses.replace(MADE_UP[0], **changes)], "bad-v0")
    assert list(tmp_path.iterdir()) == []


def test_episodes_unlike_their_spaces_are_refused(tmp_path):
    good = spaces.Box(-1, 1, (3,)), spaces.Discrete(4)
    x = {"observation": np.zeros((5, 3), np.float32), "action": np.zeros(5, np.int32)}
    for name, changes, words in (
        ("observation", {"observation": np.zeros((5, 3))}, r"is float64 \(3,\), but must be float32 \(3,\)"),
        ("observation", {"observation": {"a": x["observation"]}}, r"is missing, but must be float32 \(3,\)"),
        ("action", {"action": np.zeros((5, 1), np.int32)}, r"is int32 \(1,\), but must be int32 \(\) as in its space"),
    ):
        with MinariWriter("bad-v0", *good, data_dir=tmp_path) as writer:
            with pytest.raises(ConfigError, match=f"steps/{name} {words}"):
                writer.write(dataclasses.replace(MADE_UP[0], **{**x, **changes}))
    with pytest.raises(ConfigError, match="no episodes"), MinariWriter("bad-v0", *good, data_dir=tmp_path) as writer:
        writer.close()
    for dataset_id in ("name", "name-v", "-v0", "a//-v0", "a b-v1"):
        with pytest.raises(ConfigError, match="must be NAME-v0"):
            MinariWriter(dataset_id, *good, data_dir=tmp_path)
    refused(lambda: MinariWriter("bad-v0", *good, data_dir=tmp_path, env_spec="Cartpole-v1"), "env_spec='Cartpole-v1'")
    assert list(tmp_path.iterdir()) == []


# --- exports ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_integers_that_count_from_elsewhere(tmp_path, monkeypatch):
    """What is exported with an `env_spec` can be played in that environment, and comes back counted from 0."""
    monkeypatch.setattr(policy_rows, "_CHUNK_ROWS", 5)
    monkeypatch.setenv("MINARI_DATASETS_PATH", os.fspath(tmp_path))
    env = jaxrl.make("gymnasium:host_probes:Counting-v0", end="truncated", workers=0)
    policy = untrained(env, PPO)
    settings = {"episodes": 5, "num_envs": 2, "explore": True, "progress": False}
    jaxrl.export_minari(policy, env, "counting-v0", env_spec="Counting-v0", **settings)
    rlds = jaxrl.load_dataset(f"rlds:{jaxrl.export_rlds(policy, env, tmp_path / 'rlds', **settings)}")
    dataset, stored = jaxrl.load_dataset("minari:counting-v0"), theirs.load_dataset("counting-v0")
    assert stored.action_space.start == 1
    for ours, raw, other in zip(dataset, stored, rlds, strict=True):
        assert set(raw.actions.tolist()) <= {1, 2} and (ours.action[:-1] == raw.actions - 1).all()
        assert_bitwise(ours.steps, other.steps)
        assert ours.observation[:, 1].tolist() == [0, 1, 2, 3] and ours.reward.tolist() == [1, 2, 3, 0]
        assert ours.metadata["ending"] == "truncated" and not ours.is_terminal[-1]
    order = sorted((one.metadata["env_index"], int(one.observation[0, 0])) for one in dataset)
    assert order == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    world = stored.recover_environment()
    world.reset()
    assert [world.step(action)[1] for action in stored[0].actions] == stored[0].rewards.tolist()


def test_one_process_alone_writes_for_minari(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    refused(lambda: jaxrl.export_minari(untrained(ENV, PPO), ENV, "a-v0", episodes=4, data_dir=tmp_path), "2 processes")


@pytest.mark.long
def test_a_run_is_exported_and_looked_at_from_the_shell(tmp_path, monkeypatch, capsys):
    """In both kinds."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", os.fspath(tmp_path / "minari"))
    run, out = os.fspath(tmp_path / "run"), os.fspath(tmp_path / "data")
    jaxrl.train(PPO, ENV, total_steps=64, run_dir=run, evaluation_episodes=2, num_envs=8, progress=False)
    exports = {
        f"rlds:{out}": ["export-rlds", run, "--out", out],
        "minari:cartpole-v0": ["export-minari", run, "--id", "cartpole-v0", "--env-spec", "CartPole-v1"],
    }
    for source, words in exports.items():
        words += ["--episodes", "9", "--seed", "4", "--no-progress"]
        assert main.main(words) == main.main(["dataset", "info", source]) == 0
        printed = capsys.readouterr().out
        assert "9 episodes" in printed and "no errors found" in printed
        told = {(one.metadata["policy_version"], one.metadata["seed"]) for one in jaxrl.load_dataset(source)}
        assert told == {(64, 4)}
        assert main.main(words) == 2 and "already exists" in capsys.readouterr().err
    assert theirs.load_dataset("cartpole-v0").recover_environment().spec.id == "CartPole-v1"
    refused(lambda: jaxrl.load_dataset("minari:cartpole-v0", split="test"), "have no splits")


# --- what others wrote -----------------------------------------------------------------------------------------------


BOX = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
SPACES = gymnasium.spaces.Tuple([BOX, gymnasium.spaces.Text(3)]), gymnasium.spaces.Discrete(9)


def foreign(folder, monkeypatch, steps=4, spaces=SPACES, **changes):
    """A dataset that Minari itself wrote, of one episode of float64 rewards."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", os.fspath(folder))
    episode = {
        "observations": (np.arange(2.0 * (steps + 1)).reshape(-1, 2), list("abcde")[: steps + 1]),
        "actions": np.arange(steps),
        "rewards": np.linspace(0, 1, steps),
        "terminations": np.zeros(steps, bool),
        "truncations": np.arange(steps) == steps - 1,
        "infos": {"action": np.arange(steps + 1.0), "success": np.ones((steps, 1), bool), "deep": {"x": np.arange(5)}},
    }
    theirs.create_dataset_from_buffers(
        "theirs-v3",
        [theirs.data_collector.EpisodeBuffer(**(episode | changes), seed=8)],
        observation_space=spaces[0],
        action_space=spaces[1],
        jpeg_encoding=False,
    )
    return jaxrl.load_dataset("minari:theirs-v3")


@pytest.mark.filterwarnings("ignore")
def test_what_minari_wrote_is_read(tmp_path, monkeypatch):
    dataset = foreign(tmp_path, monkeypatch)
    (read,) = dataset
    assert read.observation["0"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert read.observation["1"].tolist() == list("abcde")
    assert read.action.tolist() == [0, 1, 2, 3, 0] and read.reward[-1] == 0 and read.reward.dtype == np.float64
    assert read.discount.tolist() == [1, 1, 1, 1, 0] and not read.is_terminal.any()
    assert read.metadata == {"ending": "truncated", "seed": 8, "length": 4}
    assert read.extras["info_action"].tolist() == [0, 1, 2, 3, 4]
    assert read.extras["success"].ravel().tolist() == [True] * 4 + [False]
    assert read.extras["deep"]["x"].tolist() == [0, 1, 2, 3, 4]
    assert dataset.report().faults == []


@pytest.mark.parametrize(("dtype", "value", "sign"), [("uint8", 3, -1), ("int8", 125, 1)])
def test_an_integer_counted_beyond_its_type_is_refused(dtype, value, sign):
    x = {"which": np.asarray([[9], [value]], dtype)}
    with pytest.raises(DatasetError, match="action/which.* at step 1"):
        minari_reader.counted_from(x, {"which": np.asarray([5])}, sign, "action")
    kept = minari_reader.counted_from({"which": x["which"][:1]}, {"which": np.asarray([5])}, sign, "action")["which"]
    assert kept.dtype == dtype and kept.tolist() == [[9 + 5 * sign]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "space, first, ours",
    [
        (gymnasium.spaces.Discrete(3, start=1), 1, spaces.Discrete(3)),
        (gymnasium.spaces.MultiDiscrete([3, 2], start=[1, -4]), [1, -4], spaces.MultiDiscrete((3, 2))),
        (gymnasium.spaces.Box(np.array([1, -4]), np.array([3, -3]), (2,), int), [1, -4], spaces.MultiDiscrete((3, 2))),
    ],
    ids=["Discrete", "MultiDiscrete", "integer Box"],
)
def test_spaces_of_others_count_from_zero_here(tmp_path, monkeypatch, space, first, ours):
    """As in the environment that `jaxrl.make` makes of theirs: what is learned is what was done."""
    from jaxrl.envs.host import conversion

    done = np.asarray(first) + np.resize([[0, 0], [1, 1]], (4, 2))[:, : np.size(first)].reshape(4, *np.shape(first))
    seen = {"room": np.arange(1, 6), "place": np.arange(5)}
    rooms = gymnasium.spaces.Dict(
        {"room": gymnasium.spaces.Discrete(5, start=1), "place": gymnasium.spaces.Discrete(5)}
    )
    (read,) = foreign(tmp_path, monkeypatch, spaces=(rooms, space), observations=seen, actions=done)
    made = conversion.actions(space, "theirs")
    assert made.space == ours and np.array_equal(made.convert(read.action[:-1]), done)
    assert read.observation["room"].tolist() == read.observation["place"].tolist() == list(range(5))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"actions": np.arange(3)}, "action has 4 steps, but is_last has 5"),
        (
            {"terminations": np.asarray([0, 1, 0, 0], bool)},
            "terminations is true at step 1 of 4; only the last step can be",
        ),
        ({"truncations": np.zeros(3, bool)}, "truncations has 3 entries, but rewards has 4"),
    ],
)
def test_a_broken_rule_names_episode_and_field(tmp_path, monkeypatch, changes, words):
    dataset = foreign(tmp_path, monkeypatch, **changes)
    with pytest.raises(DatasetError, match=f"theirs-v3: episode 0: {words}"):
        dataset[0]
    assert dataset.report().faults[0] == f"episode 0: {words}"


def test_damaged_datasets_are_told(tmp_path):
    path = write_minari(tmp_path, MADE_UP[:2], "one-v0")
    info, records = path / "data" / "metadata.json", path / "data" / "main_data.hdf5"
    whole = records.read_bytes()
    records.write_bytes(whole[:2000])
    with pytest.raises(DatasetError, match="episode 1 cannot be read"):
        jaxrl.load_dataset(f"minari:{path}")[1]
    found = jaxrl.load_dataset(f"minari:{path}").report().faults
    assert [fault.partition(" by Minari")[0] for fault in found] == [f"episode {i} cannot be read" for i in (0, 1)]
    records.unlink()
    with pytest.raises(DatasetError, match="cannot be opened by Minari"):
        jaxrl.load_dataset(f"minari:{path}")
    info.write_text("{")
    with pytest.raises(DatasetError, match="metadata.json cannot be read"):
        jaxrl.load_dataset(f"minari:{path}")
    refused(lambda: jaxrl.load_dataset("d4rl:door-v0"), "'rlds:DIR' or 'minari:ID'")
