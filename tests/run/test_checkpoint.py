import contextlib
import json
import math
import os
import shutil
import threading
import time
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import struct
from helpers.hostile import checksummed
from helpers.processes import python
from helpers.refused import raises
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxrl
from jaxrl.core.errors import CheckpointError, RunDirectoryError
from jaxrl.run.ahead import compile_ahead
from jaxrl.run.directory import checkpoint
from jaxrl.run.directory.checkpoint import Checkpointer, best_step, read_manifest, restore
from jaxrl.run.directory.run_directory import check_no_pattern
from jaxrl.run.settings import RunSettings

# Orbax's event loop, after an error that is expected here.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@struct.dataclass
class Learner:
    params: dict
    opt: tuple
    key: jax.Array


def make_state(seed=0):
    key = jax.random.key(seed)
    policy = {"kernel": jax.random.normal(key, (5, 3)), "bias": jnp.arange(3, dtype=jnp.bfloat16) + seed}
    return {
        "learner": Learner(
            params={"policy": policy},
            opt=((), (jnp.uint32(4294967295), jnp.zeros((0, 4))), jnp.array([True, False])),
            key=key,
        ),
        "keys": jax.random.split(key, (2, 3)),
        "a/b": jnp.int32(1 + seed),
        "a": {"b": jnp.int32(2 + seed)},
        "odd": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-40], jnp.float32),
        "half": jnp.float16(1.5),
        "host": np.arange(4, dtype=np.int64),
        "count": 7 + seed,
        "rate": 0.1,
        "done": False,
    }


def bits(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return str(array.dtype), array.shape, array.tobytes()


def assert_same(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(expected), strict=True):
        assert type(leaf) is type(other), path
        assert bits(leaf) == bits(other), path


def flip_bit(path, position=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 0x10
    path.write_bytes(bytes(data))


def largest_file(directory):
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def save(folder, states):
    """States by step."""
    with Checkpointer(folder, config={"seed": 0}) as checkpointer:
        for step, state in states.items():
            checkpointer.save(step, state)
        checkpointer.wait(last=True)
    return folder


@pytest.fixture
def saved(tmp_path):
    """Steps 10, 20 and 30, each with the state of its seed."""
    return save(tmp_path / "checkpoints", {step: make_state(step) for step in (10, 20, 30)})


def test_every_kind_of_leaf_comes_back_bitwise(tmp_path):
    state = make_state()
    with Checkpointer(tmp_path, config={"env": "gymnax:CartPole-v1", "sizes": (64, 64)}) as checkpointer:
        checkpointer.save(8192, state, score=3.5)
        got, step, manifest = checkpointer.restore(make_state(1))
    assert step == 8192
    assert_same(got, state)
    assert manifest.config == {"env": "gymnax:CartPole-v1", "sizes": [64, 64]}
    assert (manifest.jax_version, manifest.score) == (jax.__version__, 3.5)
    names = [leaf.name for leaf in manifest.leaves]
    assert "learner/params/policy/kernel" in names and "learner/opt/1/0" in names


@pytest.mark.parametrize("name", ["seed[1]", "[1", "1]", "a*", "what?", "a**b", "[[]"])
def test_what_could_not_be_read_again_is_refused_and_nothing_else(tmp_path, monkeypatch, name):
    """Orbax takes its own path as a pattern: under `seed[1]` it wrote a checkpoint, and found none of its parts."""
    folder, state = tmp_path / name / "run", {"x": jnp.arange(3)}
    try:
        save(folder, {1: state})
        with monkeypatch.context() as unchecked:
            unchecked.setattr(checkpoint, "check_no_pattern", lambda path: None)
            readable = np.array_equal(restore(folder, state)[0]["x"], state["x"])
    except (CheckpointError, NotImplementedError):
        readable = False
    assert readable == (name in ("[1", "1]", "a*", "what?"))
    if readable:
        check_no_pattern(folder)
    else:
        raises(RunDirectoryError, "is a pattern", check_no_pattern, folder)
        raises(RunDirectoryError, "is a pattern", restore, folder, state)


def compiled(algo, env, **settings):
    return compile_ahead(RunSettings(algo=algo, env=env, **settings))


@pytest.mark.parametrize("start", [jaxrl.train, jaxrl.sweep, compiled])
def test_a_pattern_is_refused_before_anything_is_made(tmp_path, monkeypatch, start):
    monkeypatch.chdir(tmp_path)
    raises(
        RunDirectoryError,
        r"'seed\[1\]'",
        start,
        jaxrl.PPO(),
        "gymnax:CartPole-v1",
        total_steps=64,
        run_dir="seed[1]/run",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_template_may_be_shapes_only(tmp_path):
    state = {"x": jnp.arange(6.0).reshape(2, 3), "key": jax.random.key(3)}
    got, _, _ = restore(save(tmp_path, {1: state}), jax.eval_shape(lambda: state))
    assert_same(got, state)
    assert not got["x"].committed


def test_restores_to_the_sharding_of_the_template_whatever_it_was_saved_on(tmp_path):
    four = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    two = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def place(mesh):
        values = {"x": jnp.arange(32.0).reshape(8, 4), "keys": jax.random.split(jax.random.key(0), 8), "p": jnp.ones(3)}
        spec = {"x": P("data"), "keys": P("data"), "p": P()}
        return jax.tree.map(lambda value, spec: jax.device_put(value, NamedSharding(mesh, spec)), values, spec)

    save(tmp_path, {1: place(four)})
    for mesh in (four, two):
        got, _, _ = restore(tmp_path, place(mesh))
        assert_same(got, place(mesh))
        jax.tree.map(lambda leaf, like: like.sharding == leaf.sharding or pytest.fail(), got, place(mesh))
    lone, _, _ = restore(tmp_path, jax.device_put(place(four), jax.devices()[1]))
    assert lone["x"].devices() == {jax.devices()[1]}


def test_the_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    state = jnp.arange(1_000_000, dtype=jnp.float32)
    address = state.unsafe_buffer_pointer()
    with Checkpointer(tmp_path, config={}) as checkpointer:
        checkpointer.save(1, {"x": state})
        state = overwrite(state)
        assert state.unsafe_buffer_pointer() == address  # the saved copy does not stand in the way of donation
        got, _, _ = checkpointer.restore({"x": state})
    np.testing.assert_array_equal(got["x"], np.arange(1_000_000, dtype=np.float32))


def test_a_restored_state_may_be_donated(saved):
    state, _, _ = restore(saved, make_state())
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(state["odd"]))
    again, _, _ = restore(saved, make_state())
    assert_same(again, make_state(30))


def test_saving_again_compiles_nothing(tmp_path):
    state = make_state()
    with Checkpointer(tmp_path, config={}) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        compiles = []
        jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiles.append(event))
        checkpointer.save(2, state)
        checkpointer.wait()
    assert not [event for event in compiles if "backend_compile" in event]


def test_keeps_the_newest_and_the_best(tmp_path):
    scores = {1: 5.0, 2: 9.0, 3: float("nan"), 4: 1.0, 5: None, 6: 2.0}
    with Checkpointer(tmp_path, config={}, keep=2) as checkpointer:
        for step, score in scores.items():
            checkpointer.save(step, {"x": jnp.float32(step)}, score=score)
        checkpointer.wait()
        assert checkpointer.steps() == [2, 5, 6]
        assert checkpointer.best == 2
    with Checkpointer(tmp_path, config={}, keep=1) as checkpointer:
        assert checkpointer.best == 2  # remembered by the manifests
        checkpointer.save(7, {"x": jnp.float32(7)}, score=10.0)
        checkpointer.wait()
        assert checkpointer.steps() == [7]
    assert best_step(tmp_path) == 7
    raises(CheckpointError, "has a score", best_step, tmp_path / "nowhere")


def test_saving_a_step_again_replaces_it(saved):
    with Checkpointer(saved, config={}) as checkpointer:
        checkpointer.save(30, make_state(99))
        got, _, _ = checkpointer.restore(make_state())
        assert_same(got, make_state(99))
        assert checkpointer.steps() == [10, 20, 30]


def test_a_part_can_be_restored(saved):
    key = jax.random.key(30)
    template = {"learner": {"params": {"policy": {"kernel": jnp.zeros((5, 3))}}}}
    got, _, _ = restore(saved, template, partial=True)
    np.testing.assert_array_equal(got["learner"]["params"]["policy"]["kernel"], jax.random.normal(key, (5, 3)))


DAMAGES = {
    "flipped bit in the arrays": lambda step: flip_bit(largest_file(step / "state")),
    "truncated arrays": lambda step: os.truncate(largest_file(step / "state"), 10),
    "empty arrays": lambda step: os.truncate(largest_file(step / "state"), 0),
    "missing arrays": lambda step: [shutil.rmtree(path) for path in step.rglob("d")],
    "missing state": lambda step: shutil.rmtree(step / "state"),
    "missing manifest": lambda step: (step / "manifest.json").unlink(),
    "partial manifest": lambda step: os.truncate(step / "manifest.json", 200),
    "flipped bit in the manifest": lambda step: flip_bit(step / "manifest.json"),
    "another manifest": lambda step: (step / "manifest.json").write_text("[]"),
    "a manifest with one key more": lambda step: resigned(step / "manifest.json", more=1),  # more in tests/faults
}


def resigned(file, **changes):
    """Changes a manifest, and has its checksum fit."""
    file.write_text(checksummed(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_taken(saved, damage):
    DAMAGES[damage](saved / f"{30:012d}")
    with pytest.warns(RuntimeWarning, match="000000000030: .*using step 20"):
        state, step, _ = restore(saved, make_state())
    assert step == 20
    assert_same(state, make_state(20))


def test_a_score_is_not_written_through_a_link(saved, tmp_path):
    (saved / f"{20:012d}").rename(tmp_path / "elsewhere")
    (saved / f"{20:012d}").symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere" / "manifest.json").read_bytes()
    with Checkpointer(saved, config={"seed": 0}) as checkpointer:
        checkpointer.score(20, 2.0)
        checkpointer.score(30, 1.0)
    assert (tmp_path / "elsewhere" / "manifest.json").read_bytes() == before
    assert read_manifest(saved, 30).score == 1.0


def test_a_checkpoint_that_was_renamed_is_not_of_that_step(saved):
    (saved / f"{30:012d}").rename(saved / f"{40:012d}")
    with pytest.warns(RuntimeWarning, match="belongs to step 30; using step 20"):
        _, step, _ = restore(saved, make_state())
    assert step == 20


def test_arrays_larger_than_the_manifest_says_are_not_read(saved, monkeypatch):
    """They would take memory before anything of them could be compared."""
    state = saved / f"{30:012d}" / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        names = {entry.name: np.zeros(2) for entry in read_manifest(saved, 30).leaves if math.prod(entry.data_shape)}
        shutil.rmtree(state)
        orbax.save(state, args=ocp.args.PyTreeSave(names | {"odd": np.zeros(1000, np.float32)}))
    monkeypatch.setattr(ocp.Checkpointer, "restore", lambda *_, **__: pytest.fail("it was read"))
    raises(CheckpointError, "not as in the manifest", restore, saved, make_state(), 30)


def test_more_memory_than_there_is_is_not_asked_for(saved, monkeypatch):
    monkeypatch.setattr(checkpoint.memory, "free_on_host", lambda: 100)
    raises(CheckpointError, "only 100 B are free", restore, saved, make_state(), 30)


@pytest.mark.long
def test_every_flipped_bit_is_noticed_or_harmless(saved):
    """A flip in any file either changes nothing that is restored, or is noticed; never a wrong state."""
    expected = make_state(30)
    rng = np.random.default_rng(0)
    files = sorted(path for path in (saved / f"{30:012d}").rglob("*") if path.is_file() and path.stat().st_size)
    noticed = 0
    for path in files:
        intact = path.read_bytes()
        for position in rng.integers(len(intact), size=3):
            flip_bit(path, int(position))
            with warnings.catch_warnings(record=True, action="always") as caught:
                state, step, _ = restore(saved, make_state())
            noticed += step == 20
            assert (step == 20) == any("damaged checkpoint" in str(w.message) for w in caught)
            assert_same(state, expected if step == 30 else make_state(20))
            path.write_bytes(intact)
    assert noticed > 5


def test_the_damaged_leaf_is_named(saved):
    record = read_manifest(saved, 30)
    record.leaves[[leaf.name for leaf in record.leaves].index("odd")].crc32 ^= 1
    checkpoint.manifests.write(saved / f"{30:012d}" / "manifest.json", record)
    raises(CheckpointError, "leaf odd", restore, saved, make_state(), step=30)


def test_all_damaged_is_an_error_that_lists_each(saved):
    flip_bit(largest_file(saved / f"{10:012d}" / "state"))
    (saved / f"{20:012d}" / "manifest.json").unlink()
    shutil.rmtree(saved / f"{30:012d}" / "state")
    with pytest.raises(CheckpointError) as error:
        restore(saved, make_state())
    for step in (10, 20, 30):
        assert f"{step:012d}: " in str(error.value)
    with Checkpointer(saved, config={}) as checkpointer:
        assert not checkpointer.is_empty()


def test_damaged_steps_do_not_push_out_sound_ones(saved):
    for step in (20, 30):
        (saved / f"{step:012d}" / "manifest.json").unlink()
    with Checkpointer(saved, config={}, keep=2) as checkpointer:
        with pytest.warns(RuntimeWarning, match="damaged"):
            _, step, _ = checkpointer.restore(make_state())
        assert step == 10
        checkpointer.save(15, make_state(15))
        checkpointer.wait()
        assert checkpointer.steps() == [10, 15]
        assert checkpointer.restore(make_state())[1] == 15


def test_another_structure_names_the_leaves(saved):
    template = make_state()
    template["extra"] = jnp.zeros(2)
    template["odd"] = jnp.zeros(5)
    template["half"] = jnp.float32(0)
    del template["keys"]
    with pytest.raises(CheckpointError) as error:
        restore(saved, template)
    text = str(error.value)
    assert "leaf extra is missing" in text and "leaf keys is stored but not expected" in text
    assert "leaf odd is stored as float32[4], expected float32[5]" in text
    assert "leaf half is stored as float16[], expected float32[]" in text
    assert "start another run" in text and f"init_from='{saved}" in text


def test_nothing_there_is_an_error(tmp_path, saved):
    raises(CheckpointError, "no checkpoint in", restore, tmp_path / "nowhere", {})
    raises(CheckpointError, r"no checkpoint 25.*10, 20, 30", restore, saved, make_state(), step=25)
    raises(
        CheckpointError,
        "only arrays and numbers",
        Checkpointer(tmp_path / "other", config={}).save,
        1,
        {"name": "text"},
    )


def test_a_newer_format_says_so(saved):
    record = read_manifest(saved)
    record.format, record.jaxrl_version = 99, "9.9"
    checkpoint.manifests.write(saved / f"{30:012d}" / "manifest.json", record)
    raises(CheckpointError, r"format 99, .*jaxrl 9\.9", restore, saved, make_state())


def test_a_directory_that_cannot_be_made_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    raises(CheckpointError, "cannot save checkpoints", Checkpointer, tmp_path / "file" / "checkpoints", config={})


@pytest.mark.long
def test_failed_saves_warn_then_raise_and_leave_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    checkpointer = Checkpointer(tmp_path, config={}, max_failures=3)
    checkpointer.save(1, {"x": jnp.ones(3)})
    assert checkpointer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(ocp.Checkpointer, "save", full)
        checkpointer.save(2, {"x": jnp.ones(3)})
        with pytest.warns(RuntimeWarning, match="checkpoint 2 .*No space left"):
            assert not checkpointer.wait()
        checkpointer.save(3, {"x": jnp.ones(3)})
        with warnings.catch_warnings(action="error"):
            assert not checkpointer.wait()  # that was told already
    checkpointer.save(4, {"x": jnp.ones(3)})
    assert checkpointer.wait()  # a success starts the count anew
    monkeypatch.setattr(checkpoint.manifests, "write", full)
    for step in (5, 6, 7):
        checkpointer.save(step, {"x": jnp.ones(3)})
        if step == 5:
            with pytest.warns(RuntimeWarning, match="checkpoint 5 "):
                checkpointer.wait()
    raises(CheckpointError, "3 saves in a row failed", checkpointer.close)
    checkpointer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{1:012d}", f"{4:012d}"]


def test_a_failed_save_leaves_nothing_though_threads_of_the_library_still_write(tmp_path, monkeypatch):
    """TensorStore's write on when Orbax has raised, and make the folders anew."""
    late = []

    def write_late(path):
        for number in range(8):
            time.sleep(0.03)
            path.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                (path / str(number)).write_bytes(b"late")

    def fail(self, path, *_, **__):
        late.append(threading.Thread(target=write_late, args=(path,)))
        late[0].start()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ocp.Checkpointer, "save", fail)
    with Checkpointer(tmp_path, config={}) as checkpointer:
        checkpointer.save(1, {"x": jnp.ones(3)})
        with pytest.warns(RuntimeWarning, match="checkpoint 1 "):
            checkpointer.wait()
        late[0].join()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_save_left_is_cleaned(saved):
    shutil.copytree(saved / f"{30:012d}", saved / f".saving-{40:012d}")
    (saved / f"{20:012d}").rename(saved / f".replaced-{20:012d}")  # killed between the old contents and the new
    shutil.copytree(saved / f"{30:012d}", saved / f".replaced-{30:012d}")
    assert restore(saved, make_state())[1] == 30  # reading changes nothing
    with Checkpointer(saved, config={}) as checkpointer:
        assert checkpointer.steps() == [10, 20, 30]
    assert sorted(path.name for path in saved.iterdir()) == [f"{step:012d}" for step in (10, 20, 30)]


KILLED: typing.Final = """
import os, random, signal, sys, threading, time
import jax, numpy as np
from jaxrl.run.directory.checkpoint import Checkpointer

directory, seed = sys.argv[1], int(sys.argv[2])
checkpointer = Checkpointer(directory, config={}, keep=2)
start = max(checkpointer.steps(), default=0)
state = lambda step: {"x": np.random.default_rng(step).normal(size=(400, 500)), "step": step}
checkpointer.save(start + 1, state(start + 1))
checkpointer.wait()
delay = random.Random(seed).uniform(0.0, 0.15)
threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGKILL))).start()
for step in range(start + 2, start + 10_000):
    checkpointer.save(step, state(step))
"""


@pytest.mark.long
@pytest.mark.faults
def test_a_save_killed_at_any_moment_leaves_only_whole_steps(tmp_path):
    template = {"x": np.zeros((400, 500)), "step": 0}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    before = 0
    for seed in range(2):
        python("-c", KILLED, tmp_path, seed, env=environment, code=-9)
        with warnings.catch_warnings(action="error"):
            with Checkpointer(tmp_path, config={}) as checkpointer:
                state, step, _ = checkpointer.restore(template)
        assert step == state["step"] > before
        np.testing.assert_array_equal(state["x"], np.random.default_rng(step).normal(size=(400, 500)))
        assert all(path.name.isdecimal() for path in tmp_path.iterdir())
        before = step
