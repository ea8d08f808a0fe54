"""Two processes of two CPU devices each, on loopback: the run is that of one process with four.

What the processes do is in `one_of_two.py`.
"""

import functools
import json
import shutil
import signal
import types

import jax
import numpy as np
import pytest
from helpers.populations import population
from helpers.programs import ALGORITHMS, ENV, NUM_ENVS, ROWS, SWEEP, anakin, assert_equal
from helpers.served import ServedFromHost
from helpers.strict_json import read_json
from helpers.two_processes import HEARTBEAT, both, together

import jaxrl
from jaxrl.core.errors import ConfigError, PeerError
from jaxrl.core.files import as_read_back
from jaxrl.parallel.multihost import distributed
from jaxrl.run.directory import checkpoint
from jaxrl.run.loggers import read_metrics


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What both processes found, and the folder with their runs."""
    folder = tmp_path_factory.mktemp("runs")
    return both("runs", folder), folder


@functools.cache
def in_one_process(name="ppo", updates=10):
    settings = {"evaluation_episodes": 8, "evaluate_every": 5 * ROWS, "seed": 3, "progress": False}
    return jaxrl.train(ALGORITHMS[name], ENV, total_steps=updates * ROWS, topology=anakin(4), **settings)


def saved(folder, template):
    """The state that a run left, in the form of another one."""
    return checkpoint.restore(folder / "checkpoints", template)[0]


@pytest.mark.long
def test_two_processes_are_one(runs):
    (first, second), folder = runs
    one = in_one_process()
    assert_equal(one.state, saved(folder / "unbroken", one.state), 1e-5)
    assert first["unbroken"] == second["unbroken"]
    assert first["unbroken"]["returns"] == one.evaluation.returns.tolist()
    assert first["unbroken"]["action"] == one.policy([0.1, 0.2, 0.3, 0.4])[0]


@pytest.mark.long
def test_the_first_process_alone_writes_each_file_once(runs):
    _, folder = runs
    rows, names = read_metrics(folder / "unbroken" / "metrics.jsonl"), {"seconds", "steps_per_second"}
    last = {row["step"]: row for row in rows if "update/value_loss" in row}
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    one = {row["step"]: row for row in in_one_process().metrics if "update/value_loss" in row}
    # The chunks need not be the same, but for what ends at a border, nor need an episode end in each.
    assert 10 * ROWS in set(one) & set(last)
    assert set().union(*one.values()) - names == set().union(*last.values()) - names
    assert len(rows) == len({(row["step"], "evaluation/return_mean" in row) for row in rows})
    assert len(list((folder / "unbroken" / "tensorboard").iterdir())) == 1
    record = read_json(folder / "unbroken" / "result.json")
    assert record["total_steps"] == 10 * ROWS and record["evaluation"]["episodes"] == 8
    assert isinstance(jaxrl.load(folder / "unbroken"), jaxrl.Policy)


@pytest.mark.long
def test_each_process_exports_its_share(runs, tmp_path):
    _, folder = runs
    policy = in_one_process().policy
    alone = jaxrl.export_rlds(policy, ENV, tmp_path / "data", episodes=10, num_envs=4, progress=False)
    begins = []
    for path in (alone, folder / "data"):
        episodes = list(jaxrl.load_dataset(f"rlds:{path}"))
        begins.append(sorted((one.metadata["env_index"], one.observation[0].tolist()) for one in episodes))
    assert begins[0] == begins[1] and len(begins[0]) == 10
    assert sorted(path.name for path in (folder / "data").iterdir()) == ["host-00000-of-00002", "host-00001-of-00002"]


def test_ctrl_c_at_one_ends_both_and_the_resumed_run_is_the_unbroken_one(more):
    (first, second), folder = more
    for found in (first, second):
        assert found["interrupted"]["stopped"] == "interrupted"
        assert found["interrupted"]["total_steps"] == first["interrupted"]["total_steps"] < 5 * ROWS
        assert found["resumed"]["stopped"] == "finished"
        assert found["resumed"]["returns"] == first["unbroken"]["returns"]
    template = in_one_process().state
    assert_equal(saved(folder / "unbroken", template), saved(folder / "resumed", template))


@pytest.mark.long
@pytest.mark.faults
def test_sigterm_at_one_saves_on_both_and_other_layouts_resume_it(tmp_path):
    _, codes, said, _ = together("terminated", tmp_path)
    assert codes == [128 + signal.SIGTERM] * 2, "\n".join(said)
    unbroken = in_one_process().state
    for devices in (1, 4):
        run_dir = shutil.copytree(tmp_path / "run", tmp_path / str(devices))
        settings = {"evaluation_episodes": 8, "evaluate_every": 5 * ROWS, "seed": 3, "progress": False}
        resumed = jaxrl.train(
            ALGORITHMS["ppo"], ENV, total_steps=10 * ROWS, topology=anakin(devices), run_dir=run_dir, **settings
        )
        assert 0 < resumed.session_steps < resumed.total_steps == 10 * ROWS
        assert_equal(unbroken, resumed.state, 1e-5)


@pytest.mark.long
def test_two_processes_begin_with_what_a_run_has_learned_and_the_first_films(more, tmp_path):
    (first, second), folder = more
    one = jaxrl.train(
        ALGORITHMS["ppo"],
        ENV,
        total_steps=4 * ROWS,
        topology=anakin(4),
        init_from=folder / "unbroken",
        run_dir=tmp_path / "one",
        video_every=2 * ROWS,
        evaluation_episodes=8,
        evaluate_every=5 * ROWS,
        seed=3,
        progress=False,
    )
    assert_equal(one.state, saved(folder / "tuned", one.state), 1e-5)
    assert first["tuned"] == second["tuned"] and first["tuned"]["returns"] == one.evaluation.returns.tolist()
    parents = [read_json(path / "config.json")["parent"] for path in (folder / "tuned", tmp_path / "one")]
    assert parents[0] == parents[1] and parents[0]["step"] == 10 * ROWS
    films = [sorted((path / "videos").iterdir()) for path in (folder / "tuned", tmp_path / "one")]
    assert (
        [film.name for film in films[0]] == [film.name for film in films[1]] == [f"{n * ROWS:012d}.gif" for n in (2, 4)]
    )
    assert [film.read_bytes()[:6] for film in films[0]] == [b"GIF89a"] * 2


@pytest.mark.long
def test_host_environments_of_two_processes_in_lockstep(runs):
    (first, second), folder = runs
    one = in_one_process().state.replace(env_state=())
    state = saved(folder / "host", one)
    assert_equal(state, saved(folder / "host_again", one))
    assert_equal(one, state, 1e-5)
    # How many rows of metrics there are depends on how many iterations fit into a chunk's second.
    differs = {"rows", "run_dir"}
    assert first["host"] == second["host"]
    kept = first["host"].keys() - differs
    assert [first["host"][name] for name in kept] == [first["host_again"][name] for name in kept]


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    """The same of what needs as long again."""
    folder = tmp_path_factory.mktemp("more")
    return both("more", folder), folder


@pytest.mark.long
def test_processes_that_take_rollouts_in_their_own_order_learn_the_same(tmp_path):
    first, second = both("apart", tmp_path)
    assert first == second and len(first) == 3
    for run in first.values():
        assert run["stopped"] == "finished" and run["total_steps"] >= 10 * ROWS


@pytest.mark.long
def test_a_sweep_is_shared_by_two_processes(more):
    (first, second), _ = more
    one = jaxrl.sweep(ALGORITHMS["ppo"], ENV, seeds=3, devices=1, **SWEEP)
    assert first["sweep"] == second["sweep"]
    assert first["sweep"]["returns"] == one.returns.tolist()
    np.testing.assert_allclose(first["sweep"]["loss"], one.metrics["update/value_loss"], rtol=1e-5)


@pytest.mark.long
def test_a_population_copies_over_two_processes(more):
    """Five members on two processes, of which one copies another in each of two rounds: bit for bit those of one."""
    (first, second), _ = more
    one = population(points=3, members=5)
    assert first["pbt"] == second["pbt"]
    expected = one.lineage.to_json() | {"returns": one.returns.tolist(), "fresh": one.fresh_returns.tolist()}
    assert first["pbt"] == as_read_back(expected)
    crossed = [(to, source) for row in one.lineage.parents for to, source in enumerate(row) if (to < 3) != (source < 3)]
    assert crossed, "a copy between the processes"


@pytest.mark.long
def test_a_lag_of_one_over_two_processes(more):
    (first, second), _ = more
    assert first["late"] == second["late"] and first["late"]["total_steps"] == 10 * ROWS


@pytest.mark.long
def test_a_replay_over_two_processes(more):
    (first, second), folder = more
    one = in_one_process("dqn", 12)
    assert_equal(one.state, saved(folder / "dqn", one.state), 1e-5)
    assert first["dqn"] == second["dqn"] and one.state.learner.updates > 10


@pytest.mark.long
def test_different_seeds_are_refused_by_both(runs):
    found, folder = runs
    for one in found:
        assert one["refused"]["type"] == "ConfigError"
        assert "seed must be the same on all processes: 0 on process 0, 1 on process 1" in one["refused"]["said"]
    assert not (folder / "refused").exists()


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.parametrize("job", ["one_dies", "one_raises"])
def test_where_one_fails_the_other_ends_within_the_heartbeat(job, tmp_path):
    _, codes, said, ended = together(job, tmp_path)
    if job == "one_dies":
        assert codes[1] == -signal.SIGKILL
    else:
        assert codes[1] not in (0, None) and "ValueError: the pole broke" in said[1]
    assert codes[0] not in (0, None, -signal.SIGKILL), said[0]
    # One looks every so often, and on a machine that is busy with other things the end itself takes a while.
    assert abs(ended[0] - ended[1]) < 3 * HEARTBEAT + 30
    if job == "one_dies":
        assert checkpoint.read_manifest(tmp_path / "run" / "checkpoints").step == 5 * ROWS
        found, one = both("goes_on", tmp_path), in_one_process()
        assert all(told["stopped"] == "finished" and told["total_steps"] == 10 * ROWS for told in found)
        assert_equal(one.state, saved(tmp_path / "run", one.state), 1e-5)


# --- without a second process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"coordinator": "machine"}, "coordinator='machine' must be HOST:PORT"),
        ({"num_processes": 0}, "num_processes=0 must be at least 1"),
        ({"num_processes": 2, "process_id": 2}, "process_id=2 must be between 0 and 1"),
    ],
)
def test_what_cannot_be_a_run_of_several_is_told_at_once(arguments, words):
    with pytest.raises(ConfigError, match=words):
        distributed.initialize(**arguments)


class Store:
    """The store of the coordination service, without waiting."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value):
        assert key not in self.values
        self.values[key] = value

    def key_value_delete(self, key):
        del self.values[key]

    def blocking_key_value_get(self, key, milliseconds):
        if key not in self.values:
            raise RuntimeError(f"DEADLINE_EXCEEDED: {key}\nmore")
        return self.values[key]


@pytest.fixture
def store(monkeypatch):
    """This process as the first of two, the second of which has answered what a test puts in."""
    store = Store()
    monkeypatch.setattr(distributed._engine.global_state, "client", store)
    monkeypatch.setattr(distributed._engine.global_state, "num_processes", 2)
    monkeypatch.setattr(distributed, "_exchanges", iter(range(100)))
    return store


def test_processes_at_different_places_are_named(store):
    store.values["jaxrl/0/1"] = json.dumps(["signals", 2])
    assert distributed.exchange("signals", 1) == [1, 2]
    store.values["jaxrl/1/1"] = json.dumps(["restored", 64])
    with pytest.raises(PeerError, match="1 sent 'restored'; .*'signals'"):
        distributed.exchange("signals", 1)
    with pytest.raises(PeerError, match="process 1 .*signals.: DEADLINE"):
        distributed.exchange("signals", 1)
    assert "jaxrl/0/0" not in store.values, "what all have read goes"


def test_another_number_of_processes_is_told_before_they_wait_for_each_other(store):
    place = types.SimpleNamespace(client=store, num_processes=2, process_id=0)
    distributed._check_count(place)
    place.process_id = 1
    distributed._check_count(place)
    place.num_processes = 3
    with pytest.raises(ConfigError, match="num_processes .*: 2 .*, 3 on"):
        distributed._check_count(place)


def test_a_broken_collective_is_a_lost_process():
    broken = "UNKNOWN: Gloo all-reduce failed: Connection closed by peer [10.0.0.2]:24704"
    with pytest.raises(PeerError, match="lost.*resume.*10.0.0.2"):
        with distributed.report_errors():
            raise jax.errors.JaxRuntimeError(broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"), distributed.report_errors():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


def test_versions_and_settings_that_differ_are_all_told():
    alike = {"seed": "0", "version of jax": "0.11.2"}
    distributed._raise_differences([alike, dict(alike)])
    with pytest.raises(ConfigError) as caught:
        distributed._raise_differences([alike, alike | {"version of jax": "0.11.1"}, {"seed": "1"}])
    assert len(caught.value.problems) == 2
    assert "seed must be the same on all processes: 0 on process 0 and 1, 1 on process 2" in caught.value.problems[0]
    wanted = "processes: 0.11.2 on process 0, 0.11.1 on process 1, (absent) on process 2"
    assert caught.value.problems[1] == f"version of jax must be the same on all {wanted}"


def test_layouts_of_two_processes(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda *_: 2)
    with pytest.raises(ConfigError, match="devices=3 must be .* a multiple of the 2 processes"):
        jaxrl.Anakin(num_envs=NUM_ENVS, devices=3).bind(ALGORITHMS["ppo"], ENV)
    with pytest.raises(ConfigError) as caught:
        jaxrl.Sebulba(num_envs=6, actors=2, error_buffer=64.0, lockstep=False).bind(
            ALGORITHMS["ppo"], ServedFromHost(ENV)
        )
    said = "\n".join(caught.value.problems)
    assert "error_buffer=64.0: 2 processes cannot choose" in said
    assert "num_envs=6 is not divisible by 4 groups (actors * groups * processes); use 4 or 8" in said
