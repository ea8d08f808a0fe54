"""A policy goes to a hub and comes back; the hub is on this machine, and nothing else is asked."""

import os
import shutil
import sys

import numpy as np
import pytest
from helpers import hub as stand_in
from helpers.exported import write_folder
from helpers.processes import python
from helpers.refused import refused
from helpers.strict_json import read_json

import jaxrl
from jaxrl.core.errors import MissingExtraError
from jaxrl.export.hub import pull, push
from jaxrl.run.policies import policy_folder

pytest.importorskip("huggingface_hub")

# The client reads the address when it is imported.
CODE = """if True:
    import sys
    from jaxrl.core.errors import ConfigError
    from jaxrl.export.hub import pull, push
    print(push("policy", "somebody/cartpole", private=True))
    print(pull("somebody/cartpole", "pulled"))
    for repository in ("somebody/absent", "somebody/other", "not a name"):
        try:
            pull(repository, "nothing")
        except ConfigError as error:
            print(error)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "policy"
    path.mkdir()
    write_folder(path)
    (path / "README.md").write_text("# A policy\n")
    (path / "notes.txt").write_text("my own")
    return path


@pytest.mark.long
def test_a_policy_goes_to_a_hub_and_comes_back(folder):
    root = folder.parent
    with stand_in.serving() as (address, repositories):
        repositories["somebody/other"] = {"weights.bin": b"x", "../../escaped": b"y"}
        own = {"HF_ENDPOINT": address, "HF_TOKEN": "hf_nobody", "HF_HOME": str(root / "home"), "JAX_PLATFORMS": "cpu"}
        done = python("-c", CODE, cwd=root, env=os.environ | own)
        assert set(repositories["somebody/cartpole"]) >= {"README.md", "config.json", policy_folder.MODEL}
        assert "notes.txt" not in repositories["somebody/cartpole"], "only what a policy consists of is pushed"
    said = done.stdout.splitlines()
    assert stand_in.COMMIT in said[0] and said[1] == "pulled"
    assert "'somebody/absent' cannot be downloaded: " in said[2] and "does not contain a jaxrl policy" in said[3]
    assert "'not a name' cannot be downloaded: " in said[4] and len(said) == 5
    assert {path.name for path in (root / "pulled").iterdir()} == {"README.md", "config.json", policy_folder.MODEL}
    assert {path.name for path in root.iterdir()} <= {"policy", "pulled", "home"}
    seen = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    np.testing.assert_array_equal(jaxrl.load(root / "pulled")(seen)[0], jaxrl.load(folder)(seen)[0])
    assert read_json(root / "pulled" / "config.json")["total_steps"] == 256


def test_what_cannot_go_is_refused_before_a_hub_is_asked(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(folder, tmp_path / "policy")
    refused(lambda: pull("somebody/cartpole", "~/policy"), "exists")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"jaxrl\[hub\]"):
        push("~/policy", "somebody/cartpole")
