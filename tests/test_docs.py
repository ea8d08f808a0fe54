"""The documentation against the code: it runs, its names exist, its tables are the fields. Imports point one way."""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import jaxrl
from jaxrl import algos, cli
from jaxrl.envs import registry
from jaxrl.schedules import is_schedule

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALGORITHM_PAGES = sorted((ROOT / "docs" / "algorithms").glob("*.md"))


def identity(path):
    return str(path.relative_to(ROOT))


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


# --- pages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=identity)
def test_every_name_in_the_documentation_exists(path):
    for name in sorted(set(re.findall(r"(?<![\w/.])jaxrl(?:\.[A-Za-z_]\w*)+", path.read_text()))):
        found, *parts = jaxrl, *name.split(".")[1:]
        for position, part in enumerate(parts, 2):
            if not hasattr(found, part):
                importlib.import_module(".".join(name.split(".")[:position]))
            found = getattr(found, part)


@pytest.mark.parametrize("path", PAGES, ids=identity)
def test_every_file_that_is_named_exists(path):
    text = path.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!https?:)([^)]*)\)", text)]
    assert [link for link in links if link and not (path.parent / link).exists()] == []
    named = re.findall(r"`((?:jaxrl|tests|benchmarks|notebooks|docs)/[\w/.]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def flags(*words):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    return set(re.findall(r"--[\w.-]+", text.getvalue()))


def test_every_command_line_in_the_documentation_could_be_typed():
    lines = [line for path in PAGES for block in blocks(path, "bash") for line in block.split("\n")]
    lines += [code for path in PAGES for code in re.findall(r"`(jaxrl [a-z][^`]*)`", path.read_text())]
    known = {}
    for line in lines:
        words = line.partition("#")[0].split()
        if not words or words[0] != "jaxrl" or words[1] == "--help":
            continue
        command, *rest = words[1:]
        assert command in cli.COMMANDS, line
        if rest and rest[0] == "vpg":
            continue  # the example of the page on new algorithms
        algorithm = rest[0] if rest and rest[0] in algos.ALGORITHMS else "ppo"
        key = (command, algorithm) if command in ("train", "sweep") else (command,)
        if key not in known:
            known[key] = flags(*key) | {"--help"}
        wanted = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert wanted <= known[key], line


def expected_table(cls):
    words = {"low": "at least", "above": "more than", "high": "at most", "below": "less than"}
    rows = ["| field | default | traced | what |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        limits = field.metadata.get("limits", {})
        what = [field.metadata.get("help", "")]
        what += [f"{words[name]} {limit:g}" for name, limit in limits.items() if name in words]
        if "choices" in limits:
            what.append("one of " + ", ".join(f'`"{choice}"`' for choice in limits["choices"]))
        traced = "yes" if field.metadata.get("pytree_node", True) else ""
        rows.append(
            f"| `{field.name}` | `{written(field.default)}` | {traced} | {'; '.join(part for part in what if part)} |"
        )
    return "\n".join(rows)


def written(value):
    if isinstance(value, bool) or value is None:
        return repr(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return f'"{value}"'
    if is_schedule(value):
        numbers = (getattr(value, field.name) for field in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(map(written, map(float, numbers)))})"
    if dataclasses.is_dataclass(value):
        usual = type(value)()
        given = [f.name for f in dataclasses.fields(value) if getattr(value, f.name) != getattr(usual, f.name)]
        return f"{type(value).__name__}({', '.join(f'{name}={written(getattr(value, name))}' for name in given)})"
    return repr(value)


def test_every_algorithm_has_a_page():
    own = {name for name, cls in algos.ALGORITHMS.items() if cls.__module__.startswith("jaxrl.")}
    assert own == {path.stem for path in ALGORITHM_PAGES}


@pytest.mark.parametrize("path", ALGORITHM_PAGES, ids=identity)
def test_the_table_of_fields_is_the_code(path):
    table = expected_table(algos.ALGORITHMS[path.stem])
    assert table in path.read_text(), f"the table under 'Fields' should read:\n\n{table}\n"


# --- what the pages show, run --------------------------------------------------------------------------------------


@pytest.fixture
def as_users_have_it(tmp_path, monkeypatch):
    """A folder of its own and JAX's standard rules; next to no training, and nothing stays registered.

    Sweeps and `make_train` are only asked whether they would take their arguments: the quickstart notebook runs them.
    """

    real = {name: getattr(jaxrl, name) for name in ("train", "make_train", "sweep")}

    def train(algo, env=None, *, total_steps, **options):
        options = options if env is None or "topology" in options else {"num_envs": 4} | options
        return real["train"](algo, env, total_steps=min(total_steps, 512), **options, progress=False)

    def make_train(*arguments, **options):
        real["make_train"](*arguments, **options)  # checks its arguments; to compile it is for other tests
        return lambda key: (key, {})

    def sweep(*arguments, seeds, **options):
        assert isinstance(seeds, int)
        lists = [name for name in options if name not in inspect.signature(real["sweep"]).parameters]
        algos.make_algorithm("ppo", **{name: options[name][0] for name in lists})
        return SimpleNamespace(table=lambda: "", best={})

    monkeypatch.setattr(jaxrl, "train", train)
    monkeypatch.setattr(jaxrl, "make_train", make_train)
    monkeypatch.setattr(jaxrl, "sweep", sweep)
    monkeypatch.setattr(jaxrl, "render", lambda policy, env, path: path)  # tests/test_rendering.py
    monkeypatch.chdir(tmp_path)
    known, envs = dict(algos.ALGORITHMS), dict(registry._REGISTERED)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    for registered, before in ((algos.ALGORITHMS, known), (registry._REGISTERED, envs)):
        registered.clear()
        registered.update(before)


LONG = {"datasets.md", "ppo.md"}  # what other tests run too


def page(path):
    return pytest.param(path, marks=pytest.mark.long) if path.name in LONG else path


@pytest.mark.parametrize("path", [page(path) for path in PAGES if blocks(path, "python")], ids=identity)
def test_the_python_of_a_page_runs_from_top_to_bottom(path, as_users_have_it):
    namespace = {"__name__": "__main__"}
    for block in blocks(path, "python"):
        exec(compile(block, identity(path), "exec"), namespace)
    if path.name == "design.md":  # the table of rows
        rows = namespace["rows"]
        assert rows.first[:, 0].tolist() == [True, False, False, True]
        assert rows.truncated[:, 0].tolist() == [False, True, False, False]
        assert rows.weight[:, 0].tolist() == [True, True, False, True]
        assert rows.reward[2, 0] == 0.0


# --- imports -------------------------------------------------------------------------------------------------------

# From the ground up; a room may import what stands lower, and itself. Rooms of one row do not know each other.
LAYERS = (
    {"errors", "spaces", "sources"},
    {"types", "keys", "schedules", "config", "loggers", "run_directory", "progress"},
    {"envs", "networks", "buffers", "manifest", "drawings", "watchdog"},
    {"algos", "parallel", "host_copy", "plotting"},
    {"policy", "evaluation", "checkpoint"},
    {"result", "signals", "many", "pure", "search", "loading", "rendering", "evaluator"},
    {"data", "follow", "sweep"},
    {"loop"},
    {"training"},
    {"launcher"},
    {"doctor"},
    {"cli"},
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def room_of(name):
    """The command line is one room of several files."""
    return "cli" if name.startswith("cli_") else name


def imports():
    """(file, its room, the room of a module of jaxrl that it imports), also of imports within functions."""
    for file in sorted((ROOT / "jaxrl").rglob("*.py")):
        room = room_of(file.relative_to(ROOT / "jaxrl").parts[0].removesuffix(".py"))
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{identity(file)} imports relatively"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                package, *rest = name.split(".")
                if package == "jaxrl":
                    yield identity(file), room, room_of(rest[0]) if rest else "__init__"


def test_every_room_has_its_place():
    others = {"__init__", "__main__", "__pycache__", "py.typed"}
    rooms = {room_of(path.name.removesuffix(".py")) for path in (ROOT / "jaxrl").iterdir()} - others
    assert rooms - set(LEVEL) == set(), "say in LAYERS (tests/test_docs.py) where they stand"


def test_imports_point_one_way():
    upward = [
        f"{file} imports jaxrl.{imported}"
        for file, room, imported in imports()
        if room not in ("__init__", "__main__") and room != imported and LEVEL.get(imported, 99) >= LEVEL.get(room, 0)
    ]
    assert upward == []


def test_algorithms_and_topologies_do_not_know_each_other():
    pairs = {(room, imported) for _, room, imported in imports()}
    assert ("parallel", "algos") not in pairs and ("algos", "parallel") not in pairs
    assert not {("parallel", "envs"), ("algos", "envs"), ("algos", "buffers"), ("networks", "algos")} & pairs
