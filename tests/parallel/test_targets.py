"""Descriptions of accelerators: read on stand-ins for devices, written to a file, and compiled for from there."""

import dataclasses
import importlib.util
import json
import types

import jax
import pytest

from jaxrl.cli import main
from jaxrl.core.errors import ConfigError
from jaxrl.parallel import targets

H100 = targets._DESCRIPTIONS["gpu"]["h100"]
# As XLA prints it: zeros are left out, there is more than is needed, and versions have numbers of the same names.
TEXT = targets._GPU.format(**H100).replace(" minor: 0", "")
TEXT += 'runtime_version { patch: 48 } dnn_version_info { minor: 17 } gpu_device_info_extra: "x"'


@dataclasses.dataclass
class Device:
    platform: str
    device_kind: str
    stats: dict | None = None

    def memory_stats(self):
        return self.stats


@pytest.fixture
def card(monkeypatch):
    """Makes XLA tell this of the first device, which is an H100."""

    def run(text=TEXT):
        topology = types.SimpleNamespace() if text is None else types.SimpleNamespace(target_config=text)
        found = Device("gpu", H100["name"])
        monkeypatch.setattr(targets, "_jax", types.SimpleNamespace(get_topology_for_devices=lambda devices: topology))
        monkeypatch.setattr(jax, "local_devices", lambda: [found])
        return found

    return run


def test_a_card_is_described_by_what_xla_reads_on_it(card):
    [(kind, found)] = targets.describe(card())["gpu"].items()
    assert kind == "nvidia-h100-80gb-hbm3" and found["source"].startswith("read on the device by XLA")
    assert found | {"source": ""} == H100 | {"source": ""}
    assert targets._GPU.format(**found) == targets._GPU.format(**H100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "JAX does not report what XLA read on it"),
        (TEXT.replace("core_count", "cores"), "XLA does not report its core_count"),
        (TEXT.replace("cuda_compute_capability", "rocm_compute_capability"), "not report its cuda_compute_capability"),
        (TEXT.replace("threads_per_warp: 32", "threads_per_warp: 64"), "its threads_per_warp is 64; .* cards with 32"),
        (TEXT.replace("threads_per_warp: 32", ""), "not report its threads_per_warp"),
    ],
)
def test_what_is_not_known_of_a_card_is_not_guessed(text, message, card):
    with pytest.raises(ConfigError, match=f"cannot be desc.*{message}"):
        targets.describe(card(text))


def test_a_slice_is_described_by_its_memory():
    found = targets.describe(Device("tpu", "TPU v5 lite", {"bytes_limit": 2**34 - 1}))
    assert found["tpu"]["v5e"]["memory"] == 2**34 - 1 and found["tpu"]["v5e"]["slice"] == "XxY"
    with pytest.raises(ConfigError, match="TPU v9 cannot be described"):
        targets.describe(Device("tpu", "TPU v9", {"bytes_limit": 2**34}))
    with pytest.raises(ConfigError, match="TPU v4 .*memory"):
        targets.describe(Device("tpu", "TPU v4"))


def test_doctor_describes_the_card_for_another_machine(card, tmp_path, capsys, monkeypatch):
    card()
    path = tmp_path / "card.json"
    assert main.main(["doctor", "--describe-device", "--out", str(path)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(path.read_text()) and f"--target {path}" in printed.err
    asked = {}

    def topology(name, **settings):
        asked.update(settings, name=name)
        return types.SimpleNamespace(devices=["one", "two"])

    monkeypatch.setattr(targets.topologies, "get_topology_desc", topology)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    target = targets.get(f"{path}:2")
    assert (target.name, target.devices, target.memory) == (f"{path}:2", ("one", "two"), H100["memory"])
    assert asked["target_config"] == targets._GPU.format(**H100) and asked["topology"] == "1x1x2"
    assert targets.get(str(path)).devices and asked["topology"] == "1x1x1"


def test_doctor_says_where_there_is_none(capsys):
    assert main.main(["doctor", "--describe-device"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.splitlines() == [
        f"error: there is no accelerator to describe: JAX has only CPUs here ({jax.devices()[0].device_kind})"
    ]
    assert main.main(["doctor", "--out", "card.json"]) == 2
    assert "--out needs --describe-device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not a description .*No such file"),
        ("{", "is not a description"),
        ("[1]", "is not a description"),
        ("{}", "is not a description"),
        ('{"npu": {"x": {}}}', "is not a description of one accelerator: 'npu'"),
        ('{"gpu": {"x": {"memory": 1}}}', "the fields must be memory, source, name, "),
        (json.dumps({"gpu": {"x": H100 | {"cores": 0}}}), "the fields must be"),
        (json.dumps({"gpu": {"x": H100 | {"cores": "132"}}}), "the fields must be"),
        (json.dumps({"gpu": {"x": H100, "y": H100}}), "is not a description"),
    ],
)
def test_a_file_that_describes_nothing_is_refused(text, message, tmp_path):
    path = tmp_path / "card.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        targets.get(str(path))


def test_the_number_after_a_file_is_one(tmp_path):
    path = tmp_path / "card.json"
    path.write_text(json.dumps({"gpu": {"x": H100}}))
    with pytest.raises(ConfigError, match=r"card.json:two'.*\[:COUNT\]"):
        targets.get(f"{path}:two")
