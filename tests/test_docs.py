"""The documentation against the code: it runs, its names exist, its tables are the fields."""

import contextlib
import importlib
import inspect
import io
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from helpers import kind_table, result_tables
from helpers.field_tables import expected_table, with_table
from helpers.registered import nothing_registered_for_good

import jaxrl
from jaxrl import algos
from jaxrl.cli import main, runs
from jaxrl.cli.flags import build_parts
from jaxrl.core import spaces
from jaxrl.sweeps.spaces import search_space

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
        main.main([*words, "--help-all"])
    return set(re.findall(r"--[\w.-]+", text.getvalue()))


def test_every_command_line_in_the_documentation_could_be_typed():
    shown = [block.replace("\\\n", " ") for path in PAGES for block in blocks(path, "bash")]
    lines = [line for block in shown for line in block.split("\n")]
    lines += [code for path in PAGES for code in re.findall(r"`(jaxrl [a-z][^`]*)`", path.read_text())]
    known = {}
    for line in lines:
        words = line.partition("#")[0].split()
        if not words or words[0] != "jaxrl" or words[1] == "--help":
            continue
        command, *rest = words[1:]
        assert command in main.COMMANDS, line
        algorithm = rest[0] if rest and rest[0] in algos.ALGORITHMS else "ppo"
        key = (command, algorithm) if command in ("train", "compile", "sweep", "tune") else (command,)
        if key not in known:
            known[key] = flags(*key) | {"--help"}
        wanted = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert wanted <= known[key], line


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "bash")], ids=identity)
def test_every_value_of_a_command_to_train_is_one(path):
    for block in blocks(path, "bash"):
        for line in block.replace("\\\n", " ").split("\n"):
            program, command, *words = [*shlex.split(line, comments=True), "", ""]
            words = words[:-2]
            if program == "jaxrl" and command in ("train", "compile", "sweep", "tune") and "--help" not in words:
                if "--import" not in words:  # else of a module that is not here: tests/cli/test_own_modules.py
                    given = runs.read(command, words)
                    assert build_parts(given.groups, given.values)[1] == [], line


def test_every_algorithm_has_a_page():
    own = {name for name, cls in algos.ALGORITHMS.items() if cls.__module__.startswith("jaxrl.")}
    assert own == {path.stem for path in ALGORITHM_PAGES}


@pytest.mark.parametrize("path", ALGORITHM_PAGES, ids=identity)
def test_the_table_of_fields_is_the_code(path):
    text = path.read_text()
    table = expected_table(algos.ALGORITHMS[path.stem])
    assert with_table(text, table) == text, (
        f"run scripts/update_field_tables.py: the table of fields should read:\n\n{table}\n"
    )


def test_the_tables_of_what_takes_what_are_the_code():
    text = kind_table.PAGE.read_text()
    assert kind_table.with_tables(text) == text, "run scripts/update_field_tables.py"


@pytest.mark.parametrize("observation", kind_table.OBSERVATIONS.values(), ids=kind_table.OBSERVATIONS)
@pytest.mark.parametrize("name", kind_table.NAMES)
def test_the_defaults_suit_every_kind_of_observation(name, observation):
    actions = spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,))
    assert [] in [kind_table.problems(name, observation, action) for action in actions]


@pytest.mark.parametrize("page", result_tables.PAGES, ids=lambda path: path.name)
def test_the_tables_of_results_are_the_records(page):
    text = page.read_text()
    assert "<!-- records: " in text
    assert result_tables.with_tables(text) == text, "run scripts/update_results.py"


# --- what the pages show, run --------------------------------------------------------------------------------------


@pytest.fixture
def as_users_have_it(tmp_path, monkeypatch):
    """A folder of its own and JAX's standard rules; next to no training, and nothing stays registered.

    Sweeps and `make_train` are only asked whether they would take their arguments: the quickstart notebook runs them.
    """

    real = {name: getattr(jaxrl, name) for name in ("train", "make_train", "sweep")}

    def train(algo, env=None, *, total_steps, **options):
        if env is not None and "topology" not in options:
            options["num_envs"] = min(options.get("num_envs", 4), 16)
        options["evaluation_episodes"] = min(options.get("evaluation_episodes", 4), 4)
        return real["train"](algo, env, total_steps=min(total_steps, 512), **options, progress=False)

    def make_train(*arguments, **options):
        real["make_train"](*arguments, **options)  # checks its arguments; to compile it is for other tests
        return lambda key: (key, {})

    def sweep(*arguments, seeds, **options):
        assert isinstance(seeds, int)
        lists = [name for name in options if name not in inspect.signature(real["sweep"]).parameters]
        algos.make_algorithm("ppo", **{name: options[name][0] for name in lists})
        return SimpleNamespace(table=lambda: "", best={}, plot=lambda path: path)  # tests/sweeps/test_sweep.py

    def tune(name, env, *, total_steps, trials=30, run_dir=None, **space):
        assert search_space(algos.make_algorithm(name), space)[1]
        return SimpleNamespace(table=lambda: "", best={}, plot=lambda path: path)  # tests/sweeps/test_tune.py

    monkeypatch.setattr(jaxrl, "train", train)
    monkeypatch.setattr(jaxrl, "make_train", make_train)
    monkeypatch.setattr(jaxrl, "sweep", sweep)
    monkeypatch.setattr(jaxrl, "tune", tune)
    monkeypatch.setattr(jaxrl, "render", lambda policy, env, path: path)  # tests/test_rendering.py
    monkeypatch.chdir(tmp_path)
    jax.config.update("jax_disable_most_optimizations", True)  # what runs for a moment compiles faster so
    with nothing_registered_for_good(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def trains(path):
    return any("jaxrl.train(" in block or "jaxrl.sweep(" in block for block in blocks(path, "python"))


def page(path):
    return pytest.param(path, marks=pytest.mark.long) if trains(path) else path


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


def shortened(words):
    """A command line that trains and plays next to nothing."""
    few = {"--total-steps": "256", "--episodes": "4", "--seeds": "2"}
    words = [few.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    return words + (["--evaluation-episodes", "4", "--no-progress"] if words[0] in ("train", "sweep") else [])


@pytest.mark.long
@pytest.mark.parametrize("name", ["README.md", "docs/getting_started.md", "docs/offline.md", "docs/fine_tuning.md"])
def test_the_commands_of_a_page_run_one_after_another(name, as_users_have_it):
    lines = [line for block in blocks(ROOT / name, "bash") for line in block.split("\n")]
    commands = [words[1:] for line in lines if (words := shlex.split(line, comments=True))[:1] == ["jaxrl"]]
    assert len(commands) > 1
    for words in commands:
        assert main.main(shortened(words)) == 0, words
