"""Policies as folders: read like runs, and hostile ones refused in one line with nothing of them executed."""

import json
import pickle
import re
import shutil
import struct
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from helpers.exported import write_folder
from helpers.programs import ENV, PPO
from helpers.tiers import one_quick

import jaxrl
from jaxrl.cli import main
from jaxrl.core.errors import ConfigError, JaxrlError
from jaxrl.run.directory.follow import follow
from jaxrl.run.policies import policy_folder
from jaxrl.run.policies.policy import Policy
from jaxrl.run.policies.policy_folder import MODEL

SEEN = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A policy, and the folder that it was written to."""
    path = tmp_path_factory.mktemp("folder")
    return write_folder(path), path


@pytest.fixture
def folder(written):
    return written[1]


TRAINED = Path(jaxrl.__path__[0]) / "trained"


@pytest.mark.parametrize("name", one_quick(("cartpole", "pendulum", "breakout")))
def test_trained_policies_score_what_their_page_says(name):
    rows = dict(re.findall(r"^\| `(\w+)` \| `jaxrl train .*` \| (\S+) \|$", (TRAINED / "README.md").read_text(), re.M))
    assert sorted(rows) == sorted(path.name for path in TRAINED.iterdir() if path.is_dir())
    assert sum(path.stat().st_size for path in (TRAINED / name).iterdir()) < 200_000
    policy = jaxrl.load(TRAINED / name)
    found = jaxrl.evaluate(policy.algo, policy.actor, policy.env, policy.spec, seed=0)
    assert found.return_mean == pytest.approx(float(rows[name]), rel=0.1)


def test_what_was_written_is_read(written):
    policy, folder = written
    read = jaxrl.load(folder)
    assert jax.tree.structure(read.actor) == jax.tree.structure(policy.actor)
    for a, b in zip(jax.tree.leaves(read.actor), jax.tree.leaves(policy.actor), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert read.algo.learning_rate == pytest.approx(0.0055), "halfway down its schedule"
    for wrong, words in (({"step": 64}, "step=64"), ({"best": True}, "best=True")):
        with pytest.raises(ConfigError, match=f"without checkpoints.*{words}$"):
            jaxrl.load(folder, **wrong)
    with pytest.raises(ConfigError, match="contains only a policy"):
        jaxrl.train(PPO, ENV, total_steps=64, num_envs=8, init_from=folder, progress=False)


def test_a_policy_is_not_followed(folder):
    with pytest.raises(ConfigError, match="not a run") as caught:
        next(follow(folder))
    assert "\n" not in str(caught.value)


def test_the_command_names_flags_that_were_given(folder, tmp_path, capsys):
    for words, problem in (
        (["--best"], f"{folder} contains a policy without checkpoints; leave out --best"),
        (["--step", "64"], f"{folder} contains a policy without checkpoints; leave out --step 64"),
        (["--step", "-1"], "--step -1 must be at least 0"),
        (["--sample", "--to", "numpy"], "--sample: --to 'numpy' supports greedy actions only; use --to 'stablehlo'"),
        (["--out", "x"], "--out 'x' must end in .stablehlo"),
    ):
        assert main.main(["export", str(folder), "--out", str(tmp_path / "x.stablehlo"), *words]) == 2
        assert capsys.readouterr().err == f"error: {problem}\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, and its policy as a folder."""
    root = tmp_path_factory.mktemp("made")
    algo = PPO.replace(normalize_observation=True)
    result = jaxrl.train(
        algo, ENV, total_steps=128, num_envs=8, seed=5, run_dir=root / "run", evaluation_episodes=4, progress=False
    )
    jaxrl.export_policy(root / "run", root / "policy", to="safetensors")
    return root, result


@pytest.mark.long
def test_a_folder_reads_like_its_run(made, capsys):
    root, result = made
    before, after = jaxrl.load(root / "run"), jaxrl.load(root / "policy")
    np.testing.assert_array_equal(before(SEEN)[0], after(SEEN)[0])
    assert after.algo == before.algo and after.spec == before.spec
    said = []
    for name in ("run", "policy"):
        assert main.main(["eval", str(root / name), "--episodes", "4"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1], "the same episodes, at the same step"
    assert {path.name for path in (root / "policy").iterdir()} == {"README.md", "config.json", MODEL, "scores.json"}
    scores = json.loads((root / "policy" / "scores.json").read_text())
    assert scores[-1]["return_mean"] == pytest.approx(result.evaluation.return_mean) and scores[-1]["step"] == 128
    card = (root / "policy" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: jaxrl\n") and "PPO on gymnax:CartPole-v1" in card and "| 128 |" in card
    config = json.loads((root / "policy" / "config.json").read_text())
    assert "logging" not in config and str(root) not in json.dumps(config)


def parts_of(path):
    """The content of a file, without the step, which a bare policy does not know."""
    if path.suffix != ".npz":
        return path.read_bytes()
    with np.load(path) as file:
        description = json.loads(file["description"].tobytes()) | {"step": None}
        return json.dumps(description), *(file[name].tobytes() for name in file.files if name != "description")


@pytest.mark.parametrize(("to", "name"), [("numpy", "x.npz"), ("stablehlo", "x.stablehlo"), ("onnx", "x.onnx")])
def test_where_a_policy_was_trained_changes_nothing(to, name, written, tmp_path):
    pytest.importorskip({"numpy": "numpy", "stablehlo": "flatbuffers", "onnx": "jax2onnx"}[to])
    plain, _ = written
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = Policy(*jax.device_put((plain.algo, plain.actor), everywhere), plain.spec)
    one, other = (parts_of(jaxrl.export_policy(policy, tmp_path / name, to=to)) for policy in (plain, placed))
    assert one == other
    on_one = jax.device_put(SEEN, jax.devices()[0])
    np.testing.assert_array_equal(placed(on_one)[0], plain(SEEN)[0])


@pytest.mark.long
def test_a_result_and_another_folder_are_sources_too(made, tmp_path):
    root, result = made
    jaxrl.export_policy(result, tmp_path / "of_result", to="safetensors")
    jaxrl.export_policy(root / "policy", tmp_path / "again", to="safetensors")
    assert (tmp_path / "again" / "scores.json").read_text() == (root / "policy" / "scores.json").read_text()
    assert (tmp_path / "again" / "README.md").read_text() == (root / "policy" / "README.md").read_text()
    for name in ("of_result", "again"):
        np.testing.assert_array_equal(jaxrl.load(tmp_path / name)(SEEN)[0], result.policy(SEEN)[0])
    for to, suffix in (("numpy", ".npz"), ("stablehlo", ".stablehlo")):
        sources = enumerate((root / "run", result, result.policy))
        paths = [jaxrl.export_policy(source, tmp_path / f"{place}{suffix}", to=to) for place, source in sources]
        assert len({parts_of(path) for path in paths}) == 1
    with pytest.raises(ConfigError, match="pass the run directory"):
        jaxrl.export_policy(result.policy, tmp_path / "of_policy", to="safetensors")
    with pytest.raises(ConfigError, match="exists"):
        jaxrl.export_policy(result, tmp_path / "again", to="safetensors")
    for wrong, words in (({"step": 64}, "^step=64: "), ({"best": True}, "^best=True: ")):
        with pytest.raises(ConfigError, match=f"{words}.*the run directory"):
            jaxrl.export_policy(result, tmp_path / "x", to="numpy", **wrong)


@pytest.mark.long
def test_the_best_run_of_a_sweep_keeps_its_scores(tmp_path):
    settings = {"total_steps": 128, "num_envs": 8, "seeds": 1, "evaluation_episodes": 4, "progress": False}
    result = jaxrl.sweep(PPO, ENV, gamma=[0.9, 0.99], **settings)
    result.save(tmp_path / "sweep")
    jaxrl.export_policy(tmp_path / "sweep", tmp_path / "policy", to="safetensors")
    [score] = [row for row in json.loads((tmp_path / "policy" / "scores.json").read_text()) if row["step"] == 128]
    assert score["return_mean"] == result.scores.max()
    assert f"| Return | {score['return_mean']:.2f} |" in (tmp_path / "policy" / "README.md").read_text()


class Mark:
    """Leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def rewrite(change=lambda held, name: held, **metadata):
    """Tensors as they are after `change`, which is given them and the name of a matrix."""

    def write(folder, mark):
        held = safetensors.numpy.load((folder / MODEL).read_bytes())
        held = change(held, next(name for name in sorted(held) if held[name].ndim == 2))
        data = safetensors.numpy.save(held, metadata={"format": "jaxrl policy 1", "step": "128"} | metadata)
        (folder / MODEL).write_bytes(data)

    return write


def bytes_of(make):
    return lambda folder, mark: (folder / MODEL).write_bytes(make((folder / MODEL).read_bytes()))


HOSTILE = {
    "missing": (rewrite(lambda held, name: {n: x for n, x in held.items() if n != name}), "is missing"),
    "shape": (
        rewrite(lambda held, name: held | {name: np.zeros((3, 3), np.float32)}),
        r"float32\[3, 3\], expected",
    ),
    "dtype": (
        rewrite(lambda held, name: held | {name: held[name].astype(np.float64)}),
        r"float64\[.*expected float32",
    ),
    "more": (rewrite(lambda held, name: held | {"../../other": np.zeros(3)}), r"\.\./\.\./other is stored but not"),
    "nan": (rewrite(lambda held, name: held | {name: held[name] * np.nan}), "NaN or infinity"),
    "other format": (rewrite(format="pt"), "is not a jaxrl policy"),
    "step": (rewrite(step="-1"), "must be a number of steps"),
    "huge header": (bytes_of(lambda data: struct.pack("<Q", 2**60) + b"{}"), "cannot be read"),
    "cut short": (bytes_of(lambda data: data[:-5]), "cannot be read"),
    "pickle": (lambda f, mark: (f / MODEL).write_bytes(pickle.dumps(Mark(mark))), "cannot be read"),
    "link": (
        lambda f, mark: ((f / MODEL).unlink(), (f / MODEL).symlink_to("/dev/zero")),
        "no checkpoint",
    ),
    "class": (lambda f, mark: config(f, "algorithm", {"type": "algorithm:evil"}), "evil"),
    "import": (lambda f, mark: config(f, "algorithm", {"type": "subprocess:Popen", "args": "true"}), "Popen"),
    "size": (lambda f, mark: wide(f), "expected"),
    "no config": (lambda f, mark: (f / "config.json").write_text("[" * 10_000), "cannot be read"),
}


def config(folder, key, value):
    held = json.loads((folder / "config.json").read_text())
    held[key] = value
    (folder / "config.json").write_text(json.dumps(held))


def wide(folder):
    held = json.loads((folder / "config.json").read_text())
    held["algorithm"]["network"]["torso"]["widths"] = [100_000, 100_000]
    config(folder, "algorithm", held["algorithm"])


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folders_are_refused_in_one_line(folder, tmp_path, name):
    change, words = HOSTILE[name]
    copy, mark = tmp_path / "policy", tmp_path / "mark"
    shutil.copytree(folder, copy)
    (copy / "weights.pkl").write_bytes(pickle.dumps(Mark(mark)))  # which nobody reads
    change(copy, mark)
    with pytest.raises(JaxrlError, match=words) as caught:
        jaxrl.load(copy)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1200
    assert not mark.exists()


def test_what_cannot_act_is_not_written(folder, tmp_path):
    actor = jaxrl.load(folder).actor
    spoiled = actor.replace(params=jax.tree.map(lambda x: x * np.nan, actor.params))
    with pytest.raises(ConfigError, match=r"cannot act.* NaN or infinity"):
        policy_folder.write(tmp_path, spoiled, {}, 0)
    assert list(tmp_path.iterdir()) == []
