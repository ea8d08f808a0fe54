"""The set-up that `make` does: which Python it takes, and that the lock names no addresses."""

import email
import itertools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "find_python.sh"


class Machine:
    """A machine with just the fake Pythons that a test puts on it."""

    def __init__(self, path):
        self.path = path
        self.bin = path / "bin"
        self.bin.mkdir()
        for tool in ("sh", "ls", "grep", "sort"):
            (self.bin / tool).symlink_to(shutil.which(tool))

    def put(self, where, usable):
        """A Python that passes the check, one too old (which fails it), or a pyenv shim that runs nothing."""
        file = self.path / where
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\nexit {0 if usable else 127}\n")
        file.chmod(0o755)
        return str(file)

    def find(self, **environment):
        environment = {"PATH": str(self.bin), "HOME": str(self.path / "home")} | environment
        return subprocess.run(["sh", str(SCRIPT)], env=environment, capture_output=True, text=True)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_the_named_python_comes_first(machine):
    named = machine.put("opt/python", True)
    machine.put("bin/python3.13", True)
    assert machine.find(PYTHON=named).stdout.strip() == named
    assert machine.find(PYTHON=sys.executable).stdout.strip() == sys.executable, "a real one passes the check"


def test_the_order_on_the_path(machine):
    names = ["python3", "python3.12", "python3.13"]
    for name in names:
        expected = machine.put(f"bin/{name}", True)
        assert machine.find().stdout.strip() == expected


def test_one_that_does_not_run_is_passed_over(machine):
    broken = machine.put("bin/python3.13", False)
    machine.put("bin/python3.12", False)
    expected = machine.put("bin/python3", True)
    assert machine.find(PYTHON=broken).stdout.strip() == expected
    assert machine.find(PYTHON="no-such-python").stdout.strip() == expected


def test_the_newest_that_pyenv_holds_and_that_runs(machine):
    machine.put("bin/python3", False)
    machine.put("home/.pyenv/versions/2.7.18/bin/python", True)
    machine.put("home/.pyenv/versions/3.12.1/bin/python", True)
    machine.put("home/.pyenv/versions/3.9.20/bin/python", False)
    expected = machine.put("home/.pyenv/versions/3.12.10/bin/python", True)
    machine.put("home/.pyenv/versions/3.14.0/bin/python", False)
    assert machine.find().stdout.strip() == expected
    elsewhere = machine.put("pyenv/versions/3.12.5/bin/python", True)
    assert machine.find(PYENV_ROOT=str(machine.path / "pyenv")).stdout.strip() == elsewhere


def test_none_is_one_clear_line(machine):
    machine.put("bin/python3", False)
    found = machine.find()
    assert found.returncode == 1
    assert found.stdout == ""
    assert found.stderr.count("\n") == 1
    assert "jaxrl needs CPython 3.12 or newer" in found.stderr


def test_the_lock_names_no_address_and_pins_every_hash():
    text = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"://|file:|@ |--find-links|--index-url|--extra-index-url", text)
    for entry in re.split(r"\n(?=\S)", text.split("make lock\n")[1].strip()):
        assert "==" in entry and "--hash=sha256:" in entry, entry
    # TFDS and its protocol buffers are not TensorFlow, and do not need it.
    assert not re.search(r"^(nvidia|jax-cuda|torch\b|tensorflow(?!-datasets=|-metadata=))", text, re.MULTILINE)


def test_every_dependency_has_a_floor():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    assert [entry for entry in named if ">=" not in entry and not entry.startswith("jaxrl[")] == []


def test_no_path_of_this_machine_is_in_the_project():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git work tree")
    own = os.path.basename(__file__)
    for name in listed.stdout.split("\n"):
        file = ROOT / name
        if file.is_file() and file.name != own:
            held = file.read_bytes()
            assert b"/root/" not in held and b"/opt/pypi" not in held, name


def test_the_type_checker_is_overruled_only_with_a_reason():
    assert "rules" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ty"]
    for path in (ROOT / "jaxrl").rglob("*.py"):
        for above, line in itertools.pairwise(line.strip() for line in ["", *path.read_text().splitlines()]):
            if re.search(r"#.*\b(ty|type): ?ignore", line):
                assert re.search(r"# ty: ignore\[[a-z-]+\](  # \w.*)?$", line), f"name the rule: {line}"
                assert line.count("#") > 1 or above.startswith("#"), f"say why: {line}"


def test_every_test_is_run_by_one_of_the_targets():
    makefile = (ROOT / "Makefile").read_text()
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    chosen = {"test": options[options.index("-m") + 1]}
    named = dict(re.findall(r"^(REST|EXACT|FURTHER) := (.*)$", makefile, re.MULTILINE))
    for target in ("test-rest", "exhaustive", "learning"):
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1]
        runs = re.findall(r' -m (?:"([^"]*)"|(\w+))', recipe)
        asked = " or ".join(f"({quoted or word})" for quoted, word in runs if word != "pytest")
        chosen[target] = re.sub(r"\$\((\w+)\)", lambda name: f"({named[name[1]]})", asked)
    of_ci = re.findall(r"^ *(?:make|limited) (\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert re.findall(r"^\t\$\(MAKE\) (\S+)$", makefile, re.MULTILINE) == ["test", "test-rest"]
    assert of_ci == ["test", "test-rest", "exhaustive"]
    for long, learning, exact, exhaustive in itertools.product((False, True), repeat=4):
        marks = {"long": long, "learning": learning, "exact": exact, "endurance": False, "exhaustive": exhaustive}
        ran = {name for name, expression in chosen.items() if eval(expression, dict(marks))}
        quick = {"test", "test-rest"} if exact else {"test"}
        if learning:
            assert ran == {"learning"}
        else:
            assert ran == ({"exhaustive"} if exhaustive else {"test-rest"} if long else quick)


@pytest.mark.long
def test_what_exhaustive_toml_names_exists():
    """Otherwise, a renamed test or case would no longer be left out, or all of them would be."""
    named = tomllib.loads((ROOT / "tests" / "exhaustive.toml").read_text(encoding="utf-8"))
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", *(f"tests/{file}" for file in named)]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    collected = {line.partition("[")[0] for line in listed} | set(listed)
    files = {line.partition("::")[0] for line in listed}  # without those of suites that are not installed
    for file, tests in named.items():
        for test, cases in tests.items():
            names = [f"tests/{file}::{test}", *(f"tests/{file}::{test}[{case}]" for case in cases)]
            assert set(names) <= collected or f"tests/{file}" not in files, names


def check_metadata(wheel):
    """Assert what `twine check` does: a wheel has a summary, and a description whose form is named; and a licence."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        found = email.message_from_bytes(archive.read(name))
        assert any(name.endswith("LICENSE") for name in archive.namelist())
    assert found["Description-Content-Type"].startswith("text/markdown") and found["License-Expression"] == "Apache-2.0"
    assert found["Summary"] and found["Requires-Python"] and len(found.get_payload()) > 5_000
    assert {"pandas", "tune", "suites"} <= set(found.get_all("Provides-Extra"))


def test_the_release_is_named_alike_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = project["version"]
    assert f'__version__ = "{version}"' in (ROOT / "jaxrl" / "__init__.py").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()
    site = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    assert site["copyright"].startswith(f"jaxrl {version},")


UV = Path(sys.executable).with_name("uv")
OPTIONS = ["--quiet", "--offline", "--no-build-isolation", "--no-config"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the source distribution and the wheel."""
    if not UV.exists():
        pytest.skip("uv is not installed")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([UV, "build", *OPTIONS, "--python", sys.executable, "--out-dir", folder, ROOT], check=True)
    return folder


def installed(package, home):
    """Return the Python of a new environment with jaxrl from `package`, and a function that runs commands in it."""
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    # What jaxrl depends on is had from here, without a network; jaxrl itself, in editable form here, is not.
    paths = {"base": str(home), "platbase": str(home)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    (packages / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([UV, "pip", "install", *OPTIONS, "--no-deps", "--python", python, package], check=True)
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return python, lambda *words: subprocess.run(words, cwd=home, env=alone, capture_output=True, text=True)


@pytest.mark.long
def test_type_checkers_accept_the_first_programs_and_find_a_misspelled_field(dist, tmp_path):
    pytest.importorskip("mypy")
    python, run = installed(*dist.glob("*.whl"), tmp_path / "home")
    for page in ("README.md", "docs/getting_started.md"):
        blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
        (tmp_path / f"{Path(page).stem}.py").write_text("".join(blocks))
    (tmp_path / "misspelled.py").write_text("import jaxrl\n\njaxrl.PPO(learning_rat=1e-3)\n")
    skipped = "[mypy]\nstrict = true\n[mypy-chex.*,flax.*,gymnasium.*,jax.*,matplotlib.*,optax.*,orbax.*,scipy.*]\n"
    (tmp_path / "mypy.ini").write_text(f"{skipped}follow_imports = skip\n")  # half of the time
    options = "--config-file", tmp_path / "mypy.ini", "--cache-dir", tmp_path, "--python-executable", python
    found = run(sys.executable, "-m", "mypy", *options, *tmp_path.glob("*.py")).stdout
    assert re.findall(r"(\w+)\.py:\d+: error: .*\[(.*)\]", found) == [("misspelled", "call-arg")], found


@pytest.mark.long
def test_the_wheel_and_the_source_distribution_work_outside_the_checkout(dist, tmp_path):
    check_metadata(next(dist.glob("*.whl")))
    for made in ("*.whl", "*.tar.gz"):
        home = tmp_path / made.strip("*.")
        python, run = installed(*dist.glob(made), home)
        where = run(python, "-c", "import jaxrl; print(jaxrl.__file__)").stdout
        assert Path(where.strip()).is_relative_to(home), where
        jaxrl = home / "bin" / "jaxrl"
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        assert run(jaxrl, "--version").stdout == f"jaxrl {version}\n"
        assert "purejaxrl-cartpole" in run(jaxrl, "algos").stdout
        words = "train ppo --env probe:ActionReward --total-steps 256 --num-envs 8 --rollout-length 8 --run-dir run"
        trained = run(jaxrl, *words.split(), "--evaluation-episodes", "8")
        assert trained.returncode == 0, trained.stderr
        assert (home / "run" / "result.json").is_file()
