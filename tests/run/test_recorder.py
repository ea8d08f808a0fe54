"""What is recorded is what was lived, and nothing is lived otherwise for it; parts, kills and refusals."""

import functools
import shutil
from collections import defaultdict

import jax
import numpy as np
import pytest
from helpers import programs
from helpers.processes import environment, python
from helpers.programs import ENV, NUM_ENVS, PPO, ROWS, SMALL, anakin, assert_equal
from helpers.recorded import assert_bitwise
from helpers.refused import raises
from helpers.served import ServedFromHost

import jaxrl
from jaxrl.buffers import fixed
from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError, RecordingError
from jaxrl.core.recorded import Recorded
from jaxrl.core.sources import Replay
from jaxrl.core.types import EnvSpec, env_spec
from jaxrl.data import rings
from jaxrl.data.rlds import RldsWriter
from jaxrl.parallel.program import Program
from jaxrl.run.loop import run_loop
from jaxrl.run.recording import recorder
from jaxrl.run.recording.recorder import Record

pytest.importorskip("tensorflow_datasets")
ITERATIONS, EACH = 12, 4  # and how many between checkpoints


def train(record=None, **settings):
    settings = {"evaluate_every": 0, "checkpoint_every": EACH * ROWS, "evaluation_episodes": 8} | settings
    return programs.train(record=record, total_steps=ITERATIONS * ROWS, **settings)


def parts(path):
    """The episodes of each part, by the step at which it was begun."""
    found = sorted(path.glob("part-*"))
    return {int(one.name.removeprefix("part-")): list(jaxrl.load_dataset(f"rlds:{one}")) for one in found}


def episodes(path):
    return [episode for part in parts(path).values() for episode in part]


def by_environment(found):
    lives = defaultdict(list)
    for episode in found:
        lives[episode.metadata["env_index"]].append(episode)
    return lives


def same(one, other):
    """The same episodes, but for their numbers."""
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert_bitwise(a.steps, b.steps)
        assert {**a.metadata, "episode_id": 0} == {**b.metadata, "episode_id": 0}


@pytest.fixture(autouse=True)
def chunks_that_end_in_the_middle(monkeypatch):
    """Of 1, 3 and 4 iterations, whatever the machine is doing; the checkpoints are every 4."""
    monkeypatch.setattr(run_loop, "_CHUNK_SECONDS", 1e6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with checkpoints that records everything: its result and where."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_loop, "_CHUNK_SECONDS", 1e6)
        return train(folder / "recording", run_dir=folder / "run", keep=10), folder


# --- what is recorded ------------------------------------------------------------------------------------------------


def test_recording_changes_nothing(whole):
    result, _ = whole
    plain = train()
    assert_equal(plain.state, result.state)
    assert plain.evaluation.returns.tolist() == result.evaluation.returns.tolist()


def test_episodes_are_those_that_the_metrics_count(whole):
    result, folder = whole
    rows = [row for row in result.metrics if "train/episodes" in row]
    count = sum(row["train/episodes"] for row in rows)
    returns = sum(row["train/episodes"] * row["train/return_mean"] for row in rows if row["train/episodes"])
    found = episodes(folder / "recording")
    ended = [episode for episode in found if episode.metadata["ending"] != "cut off"]
    # Of what ends with the run's last row, the last observation is no row any more.
    late = [e for e in found if e.metadata["ending"] == "cut off"]
    assert len(late) <= NUM_ENVS and count - len(ended) <= len(late)
    assert {episode.metadata["ending"] for episode in ended} == {"terminated", "truncated"}
    assert abs(sum(episode.episode_return for episode in ended) - returns) <= 12 * (count - len(ended)) + 1e-3
    assert sum(len(episode.is_last) for episode in found) == ITERATIONS * ROWS, "every row is in an episode"


def test_an_environment_that_is_stepped_with_these_actions_shows_these_steps(whole):
    """Also whose policy acted: that of the iteration in which the episode began."""
    _, folder = whole
    lives = by_environment(episodes(folder / "recording"))
    host = ServedFromHost(ENV).build(NUM_ENVS, 0)
    shown = [host.reset()]
    steps = [
        jax.tree.map(lambda *x: np.concatenate(x), *(episode.steps for episode in lives[env]))
        for env in range(NUM_ENVS)
    ]
    actions = np.stack([one["action"] for one in steps], axis=1)
    for action in actions[:-1]:
        shown.append(host.step(action))
    shown = jax.tree.map(lambda *x: np.stack(x), *shown)
    for env, one in enumerate(steps):
        np.testing.assert_allclose(one["observation"], shown.observation[:, env], rtol=1e-6)
        assert one["is_first"].tolist() == shown.first[:, env].tolist()
        over = shown.last[:, env]
        assert one["is_terminal"].tolist() == shown.terminated[:, env].tolist()
        assert one["is_last"][:-1].tolist() == over[:-1].tolist(), "the run's last row is one, seen or not"
        counts = ~over[:-1]
        assert one["reward"][:-1][counts].tolist() == shown.reward[1:, env][counts].tolist()
        begun = np.flatnonzero(one["is_first"]) // PPO.rollout_length
        assert [episode.metadata["policy_version"] for episode in lives[env]] == begun.tolist()
    some = lives[3][0].metadata
    assert some["algorithm"] == "PPO" and some["environment"] == ENV.name and some["seed"] == 0
    assert len(some["configuration_hash"]) == 16


def test_parts_end_at_checkpoints_and_are_read_as_one(whole, tmp_path):
    """Also those of several processes, in directories of their own."""
    _, folder = whole
    found = parts(folder / "recording")
    same(list(jaxrl.load_dataset(f"rlds:{folder / 'recording'}")), sum(found.values(), []))
    for host in range(2):
        shutil.copytree(folder / "recording", tmp_path / f"host-{host:05d}-of-00002")
    assert len(jaxrl.load_dataset(f"rlds:{tmp_path}")) == 2 * sum(map(len, found.values()))
    assert list(found) == [0, EACH * ROWS, 2 * EACH * ROWS]
    for step, part in found.items():
        began = [episode.metadata["policy_version"] for episode in part]
        assert max(began) < step // ROWS + EACH
    assert {path.name for path in (folder / "recording").iterdir()} == {
        "recording.json",
        *(f"part-{step:012d}" for step in found),
    }


@pytest.mark.parametrize(
    "every, devices",
    [pytest.param(3, 4, id="environments, on devices", marks=pytest.mark.long), pytest.param(20, 1, id="fewer")],
)
def test_every_so_manieth(whole, tmp_path, every, devices):
    _, folder = whole
    everything = by_environment(episodes(folder / "recording"))
    result = train(Record(tmp_path / "some", every), topology=anakin(devices))
    found = by_environment(episodes(tmp_path / "some"))
    if every < NUM_ENVS:
        assert sorted(found) == [0, 2, 5]
        wanted = {env: everything[env] for env in found}
    else:
        kept = {env: [e for j, e in enumerate(x) if (j * NUM_ENVS + env) % 20 == 0] for env, x in everything.items()}
        wanted = {env: x for env, x in kept.items() if x}
        assert sum(map(len, wanted.values())) >= 3
    assert sorted(found) == sorted(wanted)
    for env, lived in wanted.items():
        if devices == 1:
            same(found[env], lived)
        else:  # another order of sums in the gradients
            assert [len(e.is_last) for e in found[env]] == [len(e.is_last) for e in lived]
            for a, b in zip(found[env], lived, strict=True):
                np.testing.assert_allclose(a.observation, b.observation, rtol=1e-4, atol=1e-5)
    assert result.total_steps == ITERATIONS * ROWS


@pytest.mark.long
def test_host_environments(whole, tmp_path):
    """The same run in lockstep; fewer columns of some groups, none of others."""
    _, folder = whole
    topology = jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, lockstep=True, actors=2, groups=2)
    train(Record(tmp_path / "some", 3), env=ServedFromHost(ENV), topology=topology)
    found, everything = (by_environment(episodes(x)) for x in (tmp_path / "some", folder / "recording"))
    assert sorted(found) == [0, 2, 5]
    for env, lived in found.items():
        assert len(lived) == len(everything[env])
        for a, b in zip(lived, everything[env], strict=True):
            np.testing.assert_allclose(a.observation, b.observation, rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(a.action, b.action)
            assert a.metadata["policy_version"] == b.metadata["policy_version"]


def test_which_environments():
    @functools.cache
    def some(num_envs, every):
        return Recorded.every(every, num_envs, 1).env_index

    assert some(128, 1) == tuple(range(128)) and some(8, 20) == tuple(range(8))
    assert some(40, 20) == (0, 20) and some(20, 20) == (0,)
    for num_envs in range(1, 70):
        for every in range(1, num_envs + 1):
            chosen = some(num_envs, every)
            assert abs(len(chosen) - num_envs / every) <= 0.5 and len(set(chosen)) == len(chosen)
            assert set(np.diff(chosen)) <= {num_envs // len(chosen), -(-num_envs // len(chosen))}
    assert Recorded.every(1, 4, 1 << 20).iterations == 16 and Recorded.every(1, 4, 1 << 30).iterations == 1


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("at", [0, EACH])
def test_what_is_lived_twice_is_recorded_once(whole, tmp_path, at):
    """Killed after `at` iterations and two checkpoints' worth of parts that no checkpoint vouches for."""
    _, folder = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for step in (tmp_path / "run" / "checkpoints").iterdir():
        if int(step.name) > at * ROWS:
            shutil.rmtree(step)
    (tmp_path / "run" / "result.json").unlink()
    (tmp_path / "recording" / f".part-{EACH * ROWS:012d}.partial").mkdir()
    again = train(tmp_path / "recording", run_dir=tmp_path / "run", keep=10)
    assert again.total_steps == ITERATIONS * ROWS
    before, after = parts(folder / "recording"), parts(tmp_path / "recording")
    assert list(before) == list(after)
    if not at:
        for step in before:
            same(before[step], after[step])
        return
    same(before[0], after[0])
    lost = 0
    ours, theirs = (by_environment(sum((x[s] for s in list(x)[1:]), [])) for x in (before, after))
    for env, lived in ours.items():
        whole_ones = [e for e in lived if e.metadata["policy_version"] >= at]
        lost += len(lived) - len(whole_ones)
        if len(theirs[env]) > len(whole_ones):  # one that began with the checkpoint's very row
            raise AssertionError(env)
        same(whole_ones, theirs[env])
    assert 0 < lost <= NUM_ENVS
    assert {path.name[0] for path in (tmp_path / "recording").iterdir()} == {"p", "r"}


def test_a_run_that_stops_at_what_is_not_finite_records_what_came_before(tmp_path, monkeypatch):
    monkeypatch.setattr(run_loop, "_CHUNK_SECONDS", 0.0)
    chunk = Program.recorded_chunk

    def seventh_fails(self, algo, env, state, *arguments, **options):
        failed = int(state.steps_per_env) == 6 * PPO.rollout_length
        state, report, fetch = chunk(self, algo, env, state, *arguments, **options)
        return state, report.replace(failed_at=np.int32(0)) if failed else report, fetch

    monkeypatch.setattr(Program, "recorded_chunk", seventh_fails)
    with pytest.warns(RuntimeWarning, match="not finite"):
        result = train(tmp_path / "recording")
    assert result.total_steps == 6 * ROWS
    assert sum(len(episode.is_last) for episode in episodes(tmp_path / "recording")) == 6 * ROWS


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_paths_that_cannot_be_had_are_refused_before_anything_runs(whole, tmp_path, monkeypatch):
    _, folder = whole

    def starts(*_, **__):
        raise InterruptedError

    monkeypatch.setattr(Program, "start", starts)
    monkeypatch.setattr(Program, "template", starts)
    copied = shutil.copytree(folder, tmp_path / "copied")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    gone = shutil.copytree(folder / "recording", tmp_path / "recording")
    for path, run_dir, words in (
        (tmp_path / "other", None, "is not a recording"),
        (folder / "recording", None, "recording of another run"),
        (folder / "recording", tmp_path / "new", "recording of another run"),
        (gone, tmp_path / "run", "whose directory .*run is missing;"),
        (Record(tmp_path / "new", every=0), None, "every=0"),
        (Record(tmp_path / "new", max_steps=0), None, "max_steps=0"),
    ):
        raises(ConfigError, words, train, path, run_dir=run_dir)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copied", "other", "recording"]
    with pytest.raises(InterruptedError):  # moved together, it is the same run: this one starts
        train(copied / "recording", run_dir=copied / "run")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    raises(ConfigError, "already contains", Record(folder / "recording")._check_path, None, False)


@pytest.mark.parametrize("name", [f"part-{0:012d}", f".part-{0:012d}.partial"])
def test_a_link_in_a_recording_is_refused_and_its_target_left_alone(name, whole, tmp_path, monkeypatch):
    shutil.copytree(whole[1], tmp_path / "here")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("mine")
    recording = tmp_path / "here" / "recording"
    shutil.rmtree(recording / name, ignore_errors=True)
    shutil.copytree(tmp_path / "precious", recording / "part-999999999999")
    raises(ConfigError, "part-999999999999", train, recording, run_dir=tmp_path / "here" / "run")
    shutil.rmtree(recording / "part-999999999999")
    (recording / name).symlink_to(tmp_path / "precious")
    monkeypatch.setattr(Program, "start", lambda *_, **__: pytest.fail("it began"))
    raises(ConfigError, f"{name} is not part", train, recording, run_dir=tmp_path / "here" / "run")
    # In a folder of hidden files alone, which counts as empty, and whatever else the system refuses.
    (recording / "recording.json").unlink()
    raises(
        RecordingError,
        "cannot be written: ",
        recorder.Recorder(Record(recording), Recorded(NUM_ENVS, (0,), 1), PPO, ENV, 0, None).begin,
        0,
    )
    assert (tmp_path / "precious" / "file").read_text() == "mine"


def test_arrays_that_would_not_come_back_are_named():
    space = spaces.Dict({"good": spaces.Box(0, 1, (2,)), "bad": spaces.Box(0, 1, (2, 0))})
    raises(
        ConfigError,
        r"observation/bad .*\(2, 0\)",
        Record("nowhere").check,
        EnvSpec("some", space, spaces.Discrete(2)),
        None,
        False,
    )


@pytest.mark.parametrize("where", ["write", "close"])
def test_what_goes_wrong_while_writing_reaches_the_user(tmp_path, monkeypatch, where):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(RldsWriter, where, full)
    raises(RecordingError, f"{tmp_path.name}.*no space left", train, tmp_path / "recording")
    assert [path.name for path in (tmp_path / "recording").iterdir()] == ["recording.json"]


def test_beginning_anew(whole, tmp_path, monkeypatch):
    """With `overwrite` the recording of the run that was there goes with it."""
    _, folder = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    written = []
    real = recorder.Recorder.begin
    monkeypatch.setattr(recorder.Recorder, "begin", lambda self, step: (real(self, step), written.append(step)))
    monkeypatch.setattr(recorder.Recorder, "add", lambda self, fetch: None)
    train(tmp_path / "recording", run_dir=tmp_path / "run", overwrite=True)
    assert written == [0] and [path.name for path in (tmp_path / "recording").iterdir()] == ["recording.json"]


@pytest.mark.long
@pytest.mark.faults
def test_killed_while_it_records(whole, tmp_path):
    """By `kill -9` at a moment by chance of what happens to the recording's files; what is there is whole, then all."""
    _, folder = whole
    everything = by_environment(episodes(folder / "recording"))
    for moment in np.random.default_rng(3).integers(1, 12, 3).tolist():
        script = (
            "import conftest, os, signal, sys\n"
            "from pathlib import Path\n"
            "from run import test_recorder as t\n"
            "from helpers.kills import Moments\n"
            f"folder = Path({str(tmp_path)!r})\n"
            f"die = lambda count: count == {moment} and os.kill(os.getpid(), signal.SIGKILL)\n"
            "watch = Moments(folder / 'recording', die)\n"
            "t.run_loop._CHUNK_SECONDS = 1e6\n"
            "t.train(folder / 'recording', run_dir=folder / 'run', keep=10)\n"
        )
        python("-c", script, env=environment(), code=-9)
        for episode in episodes(tmp_path / "recording"):  # reading checks each
            assert any(
                np.array_equal(episode.observation, e.observation) for e in everything[episode.metadata["env_index"]]
            )
    train(tmp_path / "recording", run_dir=tmp_path / "run", keep=10)
    found = by_environment(episodes(tmp_path / "recording"))
    assert sum(map(len, found.values())) >= sum(map(len, everything.values())) - 3 * NUM_ENVS
    for env, lived in found.items():
        begun = [episode.observation.tobytes() for episode in lived]
        assert len(set(begun)) == len(begun), "recorded twice"
        assert set(begun) <= {episode.observation.tobytes() for episode in everything[env]}


@pytest.mark.long
def test_what_a_gaussian_policy_did_can_be_learned_from(tmp_path, recwarn):
    """Its samples lie beyond the bounds of a box; recorded and exported are the actions that the environment took."""
    env = jaxrl.make("gymnax:Pendulum-v1", max_steps_in_episode=20)
    algo = jaxrl.PPO(rollout_length=8, epochs=1, minibatches=1, network=jaxrl.networks.ActorCritic(torso=SMALL))
    result = train(tmp_path / "lived", algo=algo, env=env)
    settings = {"episodes": 8, "explore": True, "progress": False}
    jaxrl.export_rlds(result.policy, env, tmp_path / "rlds", **settings)
    jaxrl.export_minari(result.policy, env, "pendulum-v0", data_dir=tmp_path, **settings)
    spec = env_spec(env)
    sources = {"replay": fixed.source_of(Replay(100, 8, 1))}
    for name in (f"rlds:{tmp_path / 'lived'}", f"rlds:{tmp_path / 'rlds'}", f"minari:{tmp_path / 'pendulum-v0'}"):
        dataset = jaxrl.load_dataset(name)
        rows = rings.rings(dataset, sources, spec, columns=2)[0]["replay"].rows
        assert np.abs(rows.action).max() == 2.0, "no sample lay beyond the bounds, so this test shows nothing"
    assert not [warning for warning in recwarn if "outside the bounds" in str(warning.message)]


def test_rollouts_in_any_order_are_not_recorded(tmp_path):
    topology = jaxrl.Sebulba(num_envs=4, actors=2, learner_batch=4)  # a batch may have one group's rollouts twice
    run = {"total_steps": 64, "topology": topology, "record": tmp_path / "recording"}
    raises(ConfigError, "an episode would have gaps", jaxrl.train, "impala", "gymnasium:CartPole-v1", **run)
