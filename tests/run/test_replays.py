"""The episodes of a replay buffer are those that went in, whatever the ring's place, the stacks and the run's end."""

import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.programs import DQN, NUM_ENVS, ROWS, train
from helpers.recorded import assert_bitwise
from helpers.refused import raises
from helpers.rows_alone import RowsAlone

import jaxrl
from jaxrl.cli import main
from jaxrl.core import spaces
from jaxrl.core.errors import CheckpointError, ConfigError
from jaxrl.core.sources import (
    Fifo,
    FrameStack,
    Lifo,
    MaxHeap,
    MinHeap,
    Prioritized,
    Replay,
    Rollouts,
    Sequence,
    Uniform,
    View,
    by_priority,
)
from jaxrl.core.types import Counter, EnvSpec, Trajectory
from jaxrl.data.rows import EpisodeCutter
from jaxrl.parallel.experience import Experience
from jaxrl.run.directory import manifest
from jaxrl.run.recording import replay_export

pytest.importorskip("tensorflow_datasets")
ENVS, ROLLOUT, FRAMES = 3, 4, 3
WHOLE_OR_STACKS = [pytest.param(None, id="whole"), pytest.param(FrameStack(FRAMES), id="stacks")]


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


def stored(rows, slots, stack, views=(), **settings):
    """A run whose replay went through these rows, a rollout at a time, with priorities given between."""
    settings = {"frame_stack": stack, "rollout_length": ROLLOUT} | settings
    sources = {"replay": Replay(slots * ENVS, 12, 1, **settings)}
    sources |= {name: view.of("replay", sources["replay"]) for name, view in views}
    algo = SimpleNamespace(
        experience=sources | {"rollout": Rollouts(ROLLOUT)}, initial_carry=lambda spec, env_index, num_envs: ()
    )
    box = spaces.Box(0, 9999, rows.observation.shape[2:], np.int32)
    spec = EnvSpec("tests:Made up", box, spaces.Box(-9999, 9999, (2,)))
    experience = Experience(algo, spec, ENVS, shards=1)
    assert experience.problems() == []

    @jax.jit
    def step(states, rows, key):
        states = experience.store(states, RowsAlone(rows))
        for name, ring in experience.rings(states, None).items():
            buffer, source = experience.online[name], sources[name]
            if by_priority(source.sampler, source.remover):
                state, batch = buffer.sample(states[name].replace(ring=ring), key)
                state = buffer.update_priorities(state, batch.sample_info, jax.random.uniform(key, (12,)))
                states[name] = state.replace(ring=states[name].ring)
        return states

    states = experience.empty(RowsAlone(rows))
    for start in range(0, len(rows.reward), ROLLOUT):
        part = jax.tree.map(lambda x: x[start : start + ROLLOUT], rows)  # noqa: B023
        states = step(states, part, jax.random.key(start))
    empty_at = Counter(np.uint32(0), np.uint32(5 * ROLLOUT))
    state = SimpleNamespace(buffers=states, empty_at=empty_at)
    return SimpleNamespace(algo=algo, env=spec, spec=spec, state=state, seed=7)


@pytest.mark.long
@pytest.mark.parametrize(
    "rollouts, slots, stack, storage",
    [
        (4, 20, None, "ring"),
        (5, 20, None, "ring"),
        (13, 20, None, "ring"),
        (13, 40, FrameStack(FRAMES), "ring"),
        (7, 20, FrameStack(FRAMES, axis=1, fill="zeros"), "host"),
        (4, 20, None, "flashbax"),
        (13, 20, None, "flashbax"),
    ],
    ids=[
        "not full",
        "just full",
        "wrapped",
        "stacks",
        "stacks of zeros, on the host",
        "flashbax, not full",
        "flashbax, wrapped",
    ],
)
def test_what_is_whole_in_the_ring_comes_out(tmp_path, rollouts, slots, stack, storage):
    rows = lived(rollouts, stack)
    run = stored(rows, slots, stack, storage=storage)
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


def held(run, name):
    """The (environment, step) at which the items begin that a view or a table holds now."""
    state, ring = run.state.buffers[name], run.state.buffers["replay"].ring
    if name == "replay":
        live = np.asarray(state.index.tables.priority) >= 0
        return {*zip(ring.items.column[live].tolist(), ring.items.step[live].tolist(), strict=True)}
    begun = np.asarray(state.index.priority)[0].reshape(ring.slots, ENVS) >= 0  # of one shard
    steps = np.asarray(ring.step_at(np.arange(ring.slots)))
    return {(int(env), int(steps[slot])) for slot, env in np.argwhere(begun)}


def stretches(rows, starts, source):
    """What these items hold: by environment the steps of its transitions, those that follow one another together."""
    known = set()
    for env, step in starts:
        reach, crosses = source.n_step, False
        if source.sequence is not None:
            reach, crosses = source.sequence.rows - 1, source.sequence.end == "continue"
        for tick in range(step, step + reach):
            if not rows.weight[tick, env] and not crosses:
                break
            if rows.weight[tick, env]:
                known.add((env, tick))
    found = []
    for env, tick in sorted(known):
        if found and found[-1][0] == env and found[-1][1][-1] == tick - 1:
            found[-1][1].append(tick)
        else:
            found.append((env, [tick]))
    return found


def assert_written(read, rows, expected):
    assert len(read) == len(expected) > ENVS
    for one, (env, ticks) in zip(read, expected, strict=True):
        steps = np.append(ticks, ticks[-1] + 1)
        assert one.metadata["env_index"] == env and one.metadata["policy_version"] == 5 + ticks[0] // ROLLOUT
        np.testing.assert_array_equal(one.observation, rows.observation[steps, env])
        np.testing.assert_array_equal(one.action[:-1], rows.action[ticks, env])
        np.testing.assert_array_equal(one.reward[:-1], rows.reward[ticks, env])
        ended = rows.terminated[ticks[-1], env], rows.truncated[ticks[-1], env]
        assert one.metadata["ending"] == {(1, 0): "terminated", (0, 1): "truncated", (0, 0): "cut off"}[ended]
        assert one.is_terminal.sum() == one.is_terminal[-1] == ended[0]
        assert one.is_first.tolist() == [True] + [False] * len(ticks)
        assert one.is_last.tolist() == [False] * len(ticks) + [True]
    kinds = {e.metadata["ending"] for e in read}
    assert "cut off" in kinds and len(kinds) > 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "view"),
    [
        ({"n_step": 2}, View(12, Prioritized(), 30, MinHeap())),
        ({"n_step": 3}, View(12, MaxHeap(), 45, Lifo())),
        ({}, View(12, Uniform())),
        ({"sequence": Sequence(4, 2, "truncate", burn_in=1)}, View(12, Uniform(), 24, MaxHeap())),
        ({"sequence": Sequence(4, 3)}, View(12, Fifo(), 9, MinHeap())),
    ],
    ids=["steps", "first", "all", "sequences", "sequences over ends"],
)
@pytest.mark.parametrize("stack", WHOLE_OR_STACKS)
def test_a_view_writes_what_its_items_hold(tmp_path, settings, view, stack):
    rows = lived(13, stack)
    run = stored(rows, 40, stack, [("view", view)], **settings)
    source = run.algo.experience["view"]
    if run.state.buffers["view"].index.priority is None:
        oldest = len(rows.reward) - 40 + (FRAMES - 1 if stack else 0)
        starts = {(env, tick) for env in range(ENVS) for tick in range(oldest, len(rows.reward) - 1)}
    else:
        starts = held(run, "view")
    path = jaxrl.export_replay(run, tmp_path / "data", replay="view")
    assert_written(list(jaxrl.load_dataset(f"rlds:{path}")), rows, stretches(rows, starts, source))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    options = {"evaluation_episodes": 8, "evaluate_every": 0}
    dqn = train(folder / "dqn", algo=DQN, total_steps=11 * ROWS, checkpoint_every=10 * ROWS, **options)
    train(folder / "without", algo=DQN, total_steps=ROWS, save_replay=False, **options)
    train(folder / "ppo", total_steps=ROWS, **options)
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
        (folder / "ppo", {}, "PPO has none"),
        (folder / "without", {}, "save_replay=False"),
        (folder / "dqn", {"replay": "other"}, "must be one of the replay buffers of DQN"),
        (result, {"best": True}, "a result has only one state"),
    ):
        raises(ConfigError, re.escape(words), jaxrl.export_replay, run, tmp_path / "data", **options)
    short = stored(jax.tree.map(lambda x: x[1:5], lived(2, None)).replace(first=np.zeros((4, ENVS), bool)), 20, None)
    raises(ConfigError, "no complete episode", jaxrl.export_replay, short, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("dtype", "shape"), [("none", ()), ("U400000000", ()), ("int32", (-1,))], ids=str)
def test_a_manifest_with_another_replay_than_jaxrl_saves(dtype, shape, tmp_path):
    (tmp_path / "000000000064").mkdir()
    leaves = [manifest.Leaf(f"buffers/replay/ring/{name}", dtype, shape, "int32", ()) for name in ("filled", "cursor")]
    manifest.write(tmp_path / "000000000064" / "manifest.json", manifest.Manifest(64, {}, leaves))
    spec = EnvSpec("made", spaces.Box(0, 1, (2,)), spaces.Discrete(2))
    raises(CheckpointError, "invalid replay", replay_export._saved, tmp_path, 64, {"replay": Replay(64, 8, 1)}, spec)


STORAGES = {
    "views": (DQN.replace(view=View(4, Prioritized(), 64, MaxHeap())), ["replay", "view"]),
    "a view of all": (DQN.replace(prioritized=None, view=View(4)), ["replay", "view"]),
    "flashbax": (DQN.replace(storage="flashbax", n_step=1), ["replay"]),
}


@pytest.mark.long
@pytest.mark.parametrize("name", STORAGES)
def test_every_storage_and_view_of_a_directory_is_that_of_the_run(tmp_path, name):
    algo, names = STORAGES[name]
    result = train(tmp_path / "run", algo=algo, total_steps=11 * ROWS, evaluate_every=0, evaluation_episodes=8)
    for name in names:
        path = jaxrl.export_replay(result, tmp_path / f"{name}-one", replay=name)
        again = jaxrl.export_replay(tmp_path / "run", tmp_path / f"{name}-two", replay=name)
        one, two = (jaxrl.load_dataset(f"rlds:{x}") for x in (path, again))
        assert one.report().faults == [] and len(one) == len(two) > 0
        for a, b in zip(one, two, strict=True):
            assert_bitwise(a.steps, b.steps)
            assert a.metadata == b.metadata
