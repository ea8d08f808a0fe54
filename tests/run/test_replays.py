"""The episodes of a replay buffer are those that went in, whatever the ring's place, the stacks and the run's end."""

import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.programs import DQN, ENV, NUM_ENVS, PPO, ROWS, anakin
from helpers.recorded import assert_bitwise

import jaxrl
from jaxrl.buffers import replay
from jaxrl.cli import main
from jaxrl.core import spaces
from jaxrl.core.errors import CheckpointError, ConfigError
from jaxrl.core.sources import FrameStack, Replay, Rollouts
from jaxrl.core.types import Counter, EnvSpec, Trajectory
from jaxrl.data.rows import EpisodeCutter
from jaxrl.parallel.replicas import SingleReplica
from jaxrl.run import manifest, replays

pytest.importorskip("tensorflow_datasets")
ENVS, ROLLOUT, FRAMES = 3, 4, 3


def lived(rollouts, stack, seed=0):
    """Rows `[T, ENVS, ...]`, every number of them another: episodes of 1 to 9 transitions that end in all ways."""
    rng, length = np.random.default_rng(seed), rollouts * ROLLOUT
    columns = []
    for env in range(ENVS):
        rows, frames = [], []
        while len(rows) < length:
            n, ending, frames = int(rng.integers(1, 10)), rng.choice(["terminated", "truncated", "broken"]), []
            for step in range(n + 1):
                number = 1000 * env + len(rows)
                frames.append(np.full((2, 1), number, np.int32))
                back = [FRAMES - 1 - i for i in range(FRAMES)]
                before = (
                    [frames[max(step - j, 0)] * (step >= j or stack.fill == "repeat") for j in back] if stack else []
                )
                ends, last = step == n - 1, step == n
                rows.append(
                    {
                        "observation": np.concatenate(before, axis=-1) if stack else frames[-1],
                        "action": np.float32([number, -number]),
                        "reward": np.float32(0.0 if last else number),
                        "terminated": ends and ending == "terminated",
                        "truncated": ends and ending == "truncated",
                        "first": step == 0,
                        "weight": not last,
                    }
                )
        columns.append(rows[:length])
    by_time = [jax.tree.map(lambda *x: np.stack(x), *moment) for moment in zip(*columns, strict=True)]
    return Trajectory(**jax.tree.map(lambda *x: np.stack(x), *by_time))


def stored(rows, slots, stack, memory="device"):
    """A run whose replay went through these rows, a rollout at a time."""
    source = Replay(slots * ENVS, batch_size=1, min_size=1, frame_stack=stack, replay_memory=memory)
    layout = {"num_envs": ENVS, "rollout_length": ROLLOUT, "shards": 1, "replicas": SingleReplica()}
    buffer = replay.bind({"replay": source}, **layout)["replay"]
    state, add = buffer.init(rows, ()), jax.jit(lambda state, rows: buffer.add(state, rows, ()))
    for start in range(0, len(rows.reward), ROLLOUT):
        state = add(state, jax.tree.map(lambda x: x[start : start + ROLLOUT], rows))  # noqa: B023
    algo = SimpleNamespace(experience={"replay": source, "rollout": Rollouts(ROLLOUT)})
    box = spaces.Box(0, 9999, rows.observation.shape[2:], np.int32)
    spec = EnvSpec("tests:Made up", box, spaces.Box(-9999, 9999, (2,)))
    empty_at = Counter(np.uint32(0), np.uint32(5 * ROLLOUT))
    state = SimpleNamespace(buffers={"replay": state}, empty_at=empty_at)
    return SimpleNamespace(algo=algo, env=spec, spec=spec, state=state, seed=7)


@pytest.mark.long
@pytest.mark.parametrize(
    "rollouts, slots, stack, memory",
    [
        (4, 20, None, "device"),
        (5, 20, None, "device"),
        (13, 20, None, "device"),
        (13, 40, FrameStack(FRAMES), "device"),
        (7, 20, FrameStack(FRAMES, axis=1, fill="zeros"), "host"),
    ],
    ids=["not full", "just full", "wrapped", "stacks", "stacks of zeros, on the host"],
)
def test_what_is_whole_in_the_ring_comes_out(tmp_path, rollouts, slots, stack, memory):
    rows = lived(rollouts, stack)
    run = stored(rows, slots, stack, memory)
    for unfinished in (False, True):
        path = jaxrl.export_replay(run, tmp_path / f"data{unfinished}", unfinished=unfinished)
        read = list(jaxrl.load_dataset(f"rlds:{path}"))
        kept = jax.tree.map(lambda x: x[-slots:], rows)
        at = max(len(rows.reward) - slots, 0) + np.arange(len(kept.reward))
        wanted = []
        for env in range(ENVS):
            cutter = EpisodeCutter(1)
            column = jax.tree.map(lambda x: x[:, env : env + 1], kept)  # noqa: B023
            made = [episode for _, episode in cutter.add(column, 5 + at // ROLLOUT)]
            wanted += [(env, e) for e in made + ([e for _, e in cutter.finish()] if unfinished else [])]
        assert len(read) == len(wanted) > ENVS
        for one, (env, episode) in zip(read, wanted, strict=True):
            assert_bitwise(one.steps, episode.steps)
            assert one.metadata["env_index"] == env and one.metadata["ending"] == episode.metadata["ending"]
            assert one.metadata["policy_version"] == episode.metadata["policy_version"]
            assert one.metadata["seed"] == 7
        if unfinished:
            assert sum(e.metadata["ending"] == "cut off" for e in read) > 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    options = {"topology": anakin(), "evaluation_episodes": 8, "evaluate_every": 0, "progress": False}
    dqn = jaxrl.train(DQN, ENV, total_steps=11 * ROWS, run_dir=folder / "dqn", checkpoint_every=10 * ROWS, **options)
    jaxrl.train(DQN, ENV, total_steps=ROWS, run_dir=folder / "without", save_replay=False, **options)
    jaxrl.train(PPO, ENV, total_steps=ROWS, run_dir=folder / "ppo", **options)
    return dqn, folder


@pytest.mark.long
def test_a_run_and_its_directory_give_the_same(trained, tmp_path, capsys):
    result, folder = trained
    one = list(jaxrl.load_dataset(f"rlds:{jaxrl.export_replay(result, tmp_path / 'one')}"))
    assert main.main(["export-replay", str(folder / "dqn"), "--out", str(tmp_path / "two")]) == 0
    assert capsys.readouterr().out.split()[-1] == str(tmp_path / "two")
    two = list(jaxrl.load_dataset(f"rlds:{tmp_path / 'two'}"))
    assert len(one) == len(two) >= NUM_ENVS
    for a, b in zip(one, two, strict=True):
        assert_bitwise(a.steps, b.steps)
        assert a.metadata == b.metadata
        assert a.metadata["algorithm"] == "DQN" and a.metadata["seed"] == 0
        assert 11 - 4 <= a.metadata["policy_version"] < 11, "the ring holds four rollouts"
        position, velocity = a.observation[:, 0], a.observation[:, 1]
        np.testing.assert_allclose(np.diff(position), 0.02 * velocity[:-1], atol=1e-6)  # CartPole's Euler step
        assert (np.sign(np.diff(velocity)) == 2 * a.action[:-1] - 1).all(), "it moves where it is pushed"
    earlier = list(
        jaxrl.load_dataset(f"rlds:{jaxrl.export_replay(folder / 'dqn', tmp_path / 'three', step=10 * ROWS)}")
    )
    assert {e.metadata["policy_version"] for e in earlier} != {e.metadata["policy_version"] for e in one}


@pytest.mark.long
def test_what_is_not_there_is_told(trained, tmp_path):
    result, folder = trained
    for run, options, words in (
        (folder / "ppo", {}, "PPO keeps none"),
        (folder / "without", {}, "save_replay=False"),
        (folder / "dqn", {"replay": "other"}, "has the replay buffers replay; use one"),
        (result, {"best": True}, "a result has one state"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            jaxrl.export_replay(run, tmp_path / "data", **options)
    short = stored(jax.tree.map(lambda x: x[1:5], lived(2, None)).replace(first=np.zeros((4, ENVS), bool)), 20, None)
    with pytest.raises(ConfigError, match="no complete episode in the 12 time steps"):
        jaxrl.export_replay(short, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("dtype", "shape"), [("none", ()), ("U400000000", ()), ("int32", (-1,))], ids=str)
def test_a_manifest_with_another_replay_than_jaxrl_saves(dtype, shape, tmp_path):
    (tmp_path / "000000000064").mkdir()
    leaves = [manifest.Leaf(f"buffers/replay/ring/{name}", dtype, shape, "int32", ()) for name in ("filled", "cursor")]
    manifest.write(tmp_path / "000000000064" / "manifest.json", manifest.Manifest(64, {}, leaves))
    spec = EnvSpec("made", spaces.Box(0, 1, (2,)), spaces.Discrete(2))
    with pytest.raises(CheckpointError, match="holds no replay as jaxrl saves it"):
        replays._saved(tmp_path, 64, spec)
