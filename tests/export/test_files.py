"""Files of policies: they act as the run does, elsewhere, and what cannot be written is refused before it is."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.exported import (
    IMAGES,
    MANY,
    PARTS,
    PLAIN,
    RECURRENT,
    SPEC,
    VECTORS,
    assert_same,
    combinations,
    nested,
    observations,
    policy_of,
    ppo,
)
from helpers.programs import ENV, PPO
from helpers.tiers import one_quick

import jaxrl
from jaxrl import networks
from jaxrl.cli import main
from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError, MissingExtraError
from jaxrl.core.types import EnvSpec
from jaxrl.export import numpy_file, onnx_file
from jaxrl.export.operations import flat_equations

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
COMBINATIONS = combinations()
NESTED = nested(VECTORS)
OF_PARTS = ppo(networks.default_torso(NESTED)), EnvSpec("test", NESTED, PARTS)
DENSE = {name: made for name, made in COMBINATIONS.items() if "images" not in name} | RECURRENT
DENSE |= {"layer": (ppo(networks.MLP((8, 8), "relu", "layer")), SPEC), "parts": OF_PARTS}


def numpy_policy(path):
    """The policy in an .npz, by the file that lies beside it."""
    spec = importlib.util.spec_from_file_location("exported_policy", path.with_suffix(".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load(path)


def refused(words, policy, path, error=ConfigError, **how):
    """The export is refused in a line, and leaves nothing."""
    with pytest.raises(error, match=words) as caught:
        jaxrl.export_policy(policy, path, **how)
    assert "\n" not in str(caught.value) and list(Path(path).parent.iterdir()) == []


@pytest.mark.parametrize("name", one_quick(DENSE, "sac-vectors-continuous"))
def test_numpy_acts_as_the_run_does(name, tmp_path):
    policy, steps, tolerance = policy_of(*DENSE[name]), *((100, 1e-5) if name in RECURRENT else (4, 2e-6))
    act = numpy_policy(jaxrl.export_policy(policy, tmp_path / "policy.npz", to="numpy"))

    def call(seen, carry, first, reward, key):
        return act(seen, carry, first=first, reward=reward)

    assert_same(policy, call, steps=steps, tolerance=tolerance)


@pytest.mark.long
def test_numpy_begins_where_there_is_no_carry(tmp_path):
    policy = policy_of(*RECURRENT["gru"])
    act = numpy_policy(jaxrl.export_policy(policy, tmp_path / "policy.npz", to="numpy"))
    seen = observations(policy.spec, 5)
    for first in (False, np.zeros(5, bool)):
        for a, b in zip(act(seen, first=first)[1], act(seen)[1], strict=True):
            np.testing.assert_array_equal(a, b)


def test_numpy_writes_whole_numbers_of_any_type():
    """A block, here of a constant, is taken along axes that jax.lax may be told in integers that JSON has not."""
    one, table = np.int64(1), jnp.zeros((4, 3))
    numbers = jax.lax.GatherDimensionNumbers((0,), (one,), (one,))
    program = jax.make_jaxpr(lambda start: jax.lax.gather(table, start, numbers, (4, one)))(
        jax.ShapeDtypeStruct((1,), np.int32)
    )
    [equation] = [one for one in flat_equations(program)[0] if one.name == "gather"]
    found = numpy_file._parameters(equation)
    assert json.loads(json.dumps(found)) == {"axes": [1], "dropped": [1], "slice_sizes": [4, 1]}


def test_numpy_needs_numpy_alone(tmp_path):
    policy = policy_of(PLAIN, SPEC)
    path = jaxrl.export_policy(policy, tmp_path / "policy.npz", to="numpy")
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['jax', 'jaxrl', 'flax']))\n"
        "import numpy as np, policy\n"
        "act = policy.load('policy.npz')\n"
        "one, carry = act(np.zeros(4, np.float32))\n"
        "print(int(one), one.dtype, carry, act.description['algorithm'], act.description['environment'])\n"
        "for wrong in (np.zeros(3, np.float32), np.zeros(4, complex)):\n"
        "    try: act(wrong)\n"
        "    except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    right = policy(np.zeros(4, np.float32))[0]
    assert done.stdout.splitlines() == [
        f"{right} int32 () PPO test",
        "observation has shape (3,), but the policy expects (4,) or a batch",
        "observation has dtype complex128, but the policy expects float32; convert it first",
    ]
    with np.load(path, allow_pickle=False) as file:
        assert json.loads(file["description"].tobytes())["action_space"]["n"] == 6


@pytest.mark.long
def test_stablehlo_needs_jax_alone(tmp_path):
    """By the script that the page shows."""
    pytest.importorskip("flatbuffers")
    policy = policy_of(*RECURRENT["gru"])
    jaxrl.export_policy(policy, tmp_path / "policy.stablehlo")
    (script,) = re.findall(
        r"^```python\n(import jax\n.*?deserialize.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(script.splitlines()) <= 20
    block = "import sys; sys.modules.update(dict.fromkeys(['jaxrl', 'flax', 'optax', 'orbax']))\n"
    use = (
        "\nfor step in range(3):\n"
        "    seen = np.load('seen.npy')[step]\n"
        "    action, carry = act(seen, carry, first=step == 0, reward=0.5)\n"
        "    print(int(action))\n"
    )
    seen = observations(SPEC, 3)
    np.save(tmp_path / "seen.npy", seen)
    done = subprocess.run(
        [sys.executable, "-c", block + script + use], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    memory, right = None, []
    for one in seen:
        action, memory = policy(one, memory, reward=0.5)
        right.append(action)
    assert [int(line) for line in done.stdout.splitlines()[-3:]] == right


@pytest.mark.long
def test_the_command_writes_a_policy(tmp_path, monkeypatch):
    jaxrl.train(PPO, ENV, total_steps=64, num_envs=8, run_dir=tmp_path / "run", progress=False)
    monkeypatch.chdir(tmp_path)
    policy, seen = jaxrl.load("run"), np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    assert main.main(["export", "run", "--to", "numpy", "--out", "policy.npz"]) == 0
    np.testing.assert_array_equal(numpy_policy(tmp_path / "policy.npz")(seen)[0], policy(seen)[0])
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"run", "policy.npz", "policy.py"}


def test_convolutions_are_not_for_numpy(tmp_path):
    spec = EnvSpec("test", IMAGES, MANY)
    algo = jaxrl.PQN(network=networks.QNetwork(torso=networks.MinAtarCNN(2, 3, 4)))
    refused("conv_general_dilated", policy_of(algo, spec), tmp_path / "policy.npz", to="numpy")


@pytest.mark.parametrize(
    ("to", "name", "words"),
    [
        ("numpy", "numpy.npz", "would shadow the module numpy"),
        ("numpy", "json.npz", "would shadow the module json"),
        ("stablehlo", "", "is empty"),
    ],
)
def test_names_of_other_files_are_refused(to, name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(words, policy_of(PLAIN, SPEC), name, to=to)


@pytest.mark.parametrize(("to", "name"), [("numpy", "policy.npz"), ("stablehlo", "policy.stablehlo")])
def test_an_earlier_export_is_replaced(to, name, tmp_path):
    if to == "stablehlo":
        pytest.importorskip("flatbuffers")
    content = []
    for algo in (PLAIN, ppo(networks.MLP((8,)))):
        content.append(jaxrl.export_policy(policy_of(algo, SPEC), tmp_path / name, to=to).read_bytes())
    assert len(content[0]) > len(content[1])


def test_what_is_not_installed_is_said_in_a_line(tmp_path, monkeypatch):
    policy = policy_of(PLAIN, SPEC)
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    refused(r"pip install 'jaxrl\[export\]'$", policy, tmp_path / "policy.stablehlo", MissingExtraError)
    refused("orbax-checkpoint==", policy, tmp_path / "policy.onnx", to="onnx")
    assert onnx_file.HOW in PAGE.read_text().replace("\n", "; ")
    refused("did you mean 'onnx'", policy, tmp_path / "policy.onnx", to="onnxx")


ONNX = {name: COMBINATIONS[name] for name in (
    "ppo-vectors-discrete", "sac-vectors-continuous", "dqn-vectors-discrete", "pqn-images-discrete",
)}  # fmt: skip
ONNX |= {"recurrent": RECURRENT["gru"], "parts": OF_PARTS}


@pytest.mark.long
@pytest.mark.parametrize("name", ONNX)
def test_onnx_acts_as_the_run_does(name, tmp_path):
    """In an environment of its own, that docs/export.md describes: jax2onnx does not go with our orbax-checkpoint."""
    pytest.importorskip("jax2onnx")
    runtime = pytest.importorskip("onnxruntime")
    policy = policy_of(*ONNX[name])
    session = runtime.InferenceSession(jaxrl.export_policy(policy, tmp_path / "policy.onnx", to="onnx"))
    inputs = {x.name: x for x in session.get_inputs()}
    kinds = {"tensor(float)": np.float32, "tensor(int32)": np.int32, "tensor(bool)": bool}
    outputs = [x.name for x in session.get_outputs()]

    def act(seen, carry, first, reward, key):
        blank = {name: np.zeros((len(first), *x.shape[1:]), kinds[x.type]) for name, x in inputs.items()}
        carry = {name: x for name, x in blank.items() if "carry" in name} if carry is None else carry
        paths = jax.tree.leaves_with_path(seen)
        named = {"/".join(["observation", *(str(key.key) for key in path)]): x for path, x in paths}
        given = named | carry | {"first": first, "reward": reward}
        found = dict(zip(outputs, session.run(None, {key: given[key] for key in inputs}), strict=True))
        actions = [found[key] for key in outputs if key.startswith("action")]
        structure = jax.tree.structure(spaces.zeros(policy.spec.action_space))
        return jax.tree.unflatten(structure, actions), {key: found[f"next_{key}"] for key in carry}

    assert_same(policy, act, steps=20 if name == "recurrent" else 2, tolerance=1e-5)
