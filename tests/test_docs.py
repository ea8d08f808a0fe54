"""The documentation against the code: it runs, its names exist, its tables are the fields."""

import contextlib
import glob
import importlib.util
import inspect
import io
import itertools
import json
import pydoc
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pandas
import pytest
from helpers import curve_pictures, kind_table, result_tables, score_pictures, zoo_tables
from helpers.field_tables import expected_table, with_table
from helpers.registered import OWN_ALGORITHMS, only_what_jaxrl_registers

import jaxrl
from jaxrl import algos
from jaxrl.algos.base import as_algorithm, replace
from jaxrl.cli import main, runs
from jaxrl.cli.flags import build_parts
from jaxrl.core import spaces, suite_modules
from jaxrl.core.registry import registered
from jaxrl.parallel.topology import Topology
from jaxrl.run.presets import preset
from jaxrl.sweeps.search_spaces import search_space

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
    named = set(re.findall(r"(?<![\w/.])jaxrl(?:\.[A-Za-z_]\w*)+", path.read_text()))
    # A group of entry points is no name of the code.
    assert [name for name in sorted(named - {suite_modules.GROUP}) if pydoc.locate(name) is None] == []


@pytest.mark.parametrize("path", PAGES, ids=identity)
def test_every_file_that_is_named_exists(path):
    text = path.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!https?:)([^)]*)\)", text)]
    assert [link for link in links if link and not (path.parent / link).exists()] == []
    named = re.findall(r"`((?:jaxrl|tests|benchmarks|notebooks|docs)/[\w/.*-]+)`", text)
    assert [name for name in named if not any(ROOT.glob(name))] == []


def flags(*words):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main.main([*words, "--help-all"])
    return set(re.findall(r"--[\w.-]+", text.getvalue()))


def test_every_command_line_in_the_documentation_could_be_typed():
    found = [block for path in PAGES for language in ("bash", "shell") for block in blocks(path, language)]
    shown = [block.replace("\\\n", " ") for block in found]
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
        for word, name in itertools.pairwise(rest):
            if word == "--preset" and name != "NAME":
                algorithm = type(preset(name).algorithm).__name__.lower()
        key = (command, algorithm) if command in ("train", "compile", "sweep", "tune", "pbt") else (command,)
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
            if program == "jaxrl" and command in ("train", "compile", "sweep", "tune", "pbt") and "--help" not in words:
                if "--import" not in words:  # else of a module that is not here: tests/cli/test_own_modules.py
                    given = runs.read(command, words)
                    assert build_parts(given.values)[1] == [], line


def test_every_algorithm_has_a_page():
    own = set(OWN_ALGORITHMS)
    assert own == {path.stem for path in ALGORITHM_PAGES}


@pytest.mark.parametrize("path", ALGORITHM_PAGES, ids=identity)
def test_the_table_of_fields_is_the_code(path):
    text = path.read_text()
    table = expected_table(algos.ALGORITHMS[path.stem])
    assert with_table(text, table) == text, (
        f"run scripts/update_field_tables.py: the table of fields should read:\n\n{table}\n"
    )


@pytest.mark.long
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


@pytest.mark.parametrize("kind", [curve_pictures, score_pictures, zoo_tables], ids=lambda kind: kind.__name__)
def test_the_figures_are_the_records(kind):
    pictures = kind.pictures()
    for path, text in pictures.items():
        assert path.is_file() and path.read_text() == text, f"{identity(path)}: run scripts/update_results.py"
        assert len(text) < 30_000
    assert kind is score_pictures or set(kind.FOLDER.iterdir()) == set(pictures)


def test_the_figure_of_the_architecture_has_every_topology():
    figure = (ROOT / "docs" / "assets" / "architecture.svg").read_text()
    kinds = [kind for kind in registered("topology").values() if kind.__module__.startswith("jaxrl.")]
    assert [kind for kind in kinds if issubclass(kind, Topology) and f">{kind.__name__}</text>" not in figure] == []


@pytest.mark.parametrize("path", ALGORITHM_PAGES, ids=identity)
def test_a_page_has_the_source_of_its_algorithm(path):
    source = Path(inspect.getfile(algos.ALGORITHMS[path.stem])).relative_to(ROOT)
    assert f'--8<-- "{source}"' in path.read_text()


# --- what the pages show, run --------------------------------------------------------------------------------------


@pytest.fixture
def as_users_have_it(tmp_path, monkeypatch):
    """A folder of its own and JAX's standard rules; next to no training, and nothing stays registered.

    Sweeps and `make_train` are only asked whether they would take their arguments: the quickstart notebook runs them.
    """

    real = {name: getattr(jaxrl, name) for name in ("train", "make_train", "sweep", "pbt")}

    def train(algo, env=None, *, total_steps, **options):
        if "num_envs" in options:
            options["num_envs"] = min(options["num_envs"], FEW["--num-envs"])
        options["evaluation_episodes"] = min(options.get("evaluation_episodes", 4), 4)
        most = FEW["--total-steps"] if env is not None else UPDATES
        return real["train"](algo, env, total_steps=min(total_steps, most), **options, progress=False)

    def make_train(*arguments, **options):
        real["make_train"](*arguments, **options)  # checks its arguments; to compile it is for other tests
        return lambda key: (key, {})

    def sweep(algo, env, *, total_steps, seeds, run_dir=None, **options):
        assert isinstance(seeds, int)
        lists = [name for name in options if name not in inspect.signature(real["sweep"]).parameters]
        replace(as_algorithm(algo), **{name: options[name][0] for name in lists})

        def save(path):
            train(algo, env, total_steps=total_steps, run_dir=Path(path) / "best")
            record = {"format": 1, "configurations": [{}], "seeds": [0], "scores": [[1.0]]}
            record |= {"configs": [json.loads((Path(path) / "best" / "config.json").read_text())]}
            record |= {"best": {"configuration": 0, "seed": 0, "run": "best"}}
            (Path(path) / "sweep.json").write_text(json.dumps(record))
            row = {"configuration": 0, "seed": 0, "step": total_steps, "train/return_mean": 1.0}
            (Path(path) / "metrics.jsonl").write_text(json.dumps(row) + "\n")

        if run_dir is not None:
            save(run_dir)
        columns = {name: options[name] for name in lists[:1]} or {"seed": [0]}
        table = pandas.DataFrame(columns).assign(**{"evaluation/return_mean": 1.0})
        drawn = {"plot": lambda path: path, "plot_settings": lambda path: path, "importance": dict}
        return SimpleNamespace(table=lambda: "", best={}, save=save, to_pandas=lambda: table, **drawn)  # tests/sweeps

    def tune(name, env, *, total_steps, trials=30, run_dir=None, **space):
        assert search_space(algos.make_algorithm(name), space)[1]
        return SimpleNamespace(table=lambda: "", best={}, plot=lambda path: path)  # tests/sweeps/test_tune.py

    def pbt(name, env, *, total_steps, population=16, run_dir=None, **space):
        fields = [name for name in space if name not in inspect.signature(real["pbt"]).parameters]
        assert search_space(algos.make_algorithm(name), {name: space[name] for name in fields}, schedules=True)[1]
        found = {"schedules": {}, "plot": lambda path: path, "fresh_score": 0.0}
        return SimpleNamespace(table=lambda: "", **found)  # tests/sweeps/test_pbt.py

    monkeypatch.setattr(jaxrl, "pbt", pbt)
    monkeypatch.setattr(jaxrl, "train", train)
    monkeypatch.setattr(jaxrl, "make_train", make_train)
    monkeypatch.setattr(jaxrl, "sweep", sweep)
    monkeypatch.setattr(jaxrl, "tune", tune)
    monkeypatch.setattr(jaxrl, "render", lambda policy, env=None, path=None: path)  # tests/test_rendering.py
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.chdir(tmp_path)
    jax.devices()  # JAX begins with four: a command would choose as many as it needs, which are too few for the next
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)  # what runs for a moment compiles faster so
    with only_what_jaxrl_registers(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    jax.config.update("jax_disable_most_optimizations", before)


# Commands that no test of the pages can run as printed, and why; other tests do what can be done of them here.
NOT_RUN = {
    "--distributed": "it waits for other processes: tests/parallel/multihost, tests/cli/test_multihost.py",
    "--target": "it needs a compiler that is not in the lock: tests/sweeps/test_compile_for.py",
    "--launch": "it starts processes, or waits for them: tests/parallel/multihost/test_launch.py",
    "--backend ray": "it starts a cluster: tests/parallel/ray",
    "render runs/cartpole --env gymnasium": "that draws by pygame, which no extra brings: tests/run/test_rendering.py",
    "brax:inverted_pendulum": "the page trains it in Python, and its physics compiles for long",
    "brax:ant": "its physics compiles for minutes: tests/envs/test_brax.py",
    "purejaxrl-brax": "the same of hopper",
    "envpool:Pong": "whole games through convolutions take minutes: tests/learning/test_host_scores.py",
    "cleanrl-ppo-atari": "the same of Breakout",
}
# As few as these, where a command gives more.
FEW = {"--total-steps": 512, "--num-envs": 16, "--episodes": 4, "--seeds": 2, "--trials": 2, "--video-every": 256}
FEW |= {"--population": 5, "--exploit-every": 128}
UPDATES = 32  # where nothing acts each step is one
TRAINING = ("train", "sweep", "tune", "pbt", "compile")


def shortened(words):
    """Return a command line that trains and plays next to nothing."""
    few = FEW | ({"--total-steps": UPDATES} if "--eval-env" in words else {})
    few |= {"--total-steps": 4096} if words[0] == "pbt" else {}  # of two iterations and more, as members copy between
    words = [str(min(int(word), few[flag])) if flag in few else word for flag, word in itertools.pairwise(["", *words])]
    added = {"--evaluation-episodes": 4, "--total-steps": 512} if words[0] in TRAINING else {}
    added |= {"--episodes": 4} if words[0] == "eval" else {}
    words += [str(word) for flag in added if flag not in words for word in (flag, added[flag])]
    return words + (["--no-progress"] if words[0] in ("train", "sweep", "tune", "pbt") else [])


def commands(block):
    """Yield the command lines of jaxrl in a block, as a shell would split them."""
    for line in block.replace("\\\n", " ").split("\n"):
        words = shlex.split(line, comments=True)
        if words[:2] == ["jaxrl", "tune"] and importlib.util.find_spec("optuna") is None:
            continue  # an extra that is not installed here
        if words[:1] == ["jaxrl"] and not any(part in line for part in NOT_RUN):
            yield [found for word in words[1:] for found in sorted(glob.glob(word)) or [word]]


def run_as_a_process_would(words, monkeypatch):
    """Run a command in the current folder, without what the page registered or imported before."""
    before = set(sys.modules)
    with monkeypatch.context() as patched, only_what_jaxrl_registers():
        patched.setattr(sys, "path", list(sys.path))
        code = main.main(shortened(words))
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(Path.cwd()):
            del sys.modules[name]
    assert code == 0, words


def steps(path):
    """Yield the steps of a page: (language, code, the file that the text says to save it in)."""
    text, last = path.read_text(), 0
    for found in re.finditer(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        said = re.findall(r"[Ss]ave this\s+as `(\w+\.py)`", text[last : found.start()])
        last = found.end()
        if found[1] in ("python", "bash"):
            yield found[1], found[2], said[-1] if said else None
    if path.name == "README.md":  # its table of commands
        listed = re.findall(r"`(jaxrl [^`]*)`", "\n".join(re.findall(r"^\| `jaxrl .*", text, re.MULTILINE)))
        yield "bash", "\n".join(line for line in listed if "..." not in line), None


def page(path):
    runs = path not in ALGORITHM_PAGES and any(list(commands(block)) for block in blocks(path, "bash"))
    runs |= any("jaxrl.train(" in block or "jaxrl.sweep(" in block for block in blocks(path, "python"))
    return pytest.param(path, marks=pytest.mark.long) if runs else path


# Its package is installed first, in a process of its own: tests/envs/test_suites.py.
ELSEWHERE = ROOT / "docs" / "new_suite.md"


@pytest.mark.parametrize("path", [page(p) for p in PAGES if p != ELSEWHERE and list(steps(p))], ids=identity)
def test_a_page_works_as_printed_from_top_to_bottom(path, as_users_have_it, monkeypatch):
    namespace = {"__name__": "__main__"}
    for language, code, file in steps(path):
        if file is not None:
            Path(file).write_text(code)
        if language == "python":
            exec(compile(code, identity(path), "exec"), namespace)
        elif path not in ALGORITHM_PAGES:  # whose commands have tests of their algorithms
            for words in commands(code):
                run_as_a_process_would(words, monkeypatch)
    if path.name == "design.md":  # the table of rows
        rows = namespace["rows"]
        assert rows.first[:, 0].tolist() == [True, False, False, True]
        assert rows.truncated[:, 0].tolist() == [False, True, False, False]
        assert rows.weight[:, 0].tolist() == [True, True, False, True]
        assert rows.reward[2, 0] == 0.0
