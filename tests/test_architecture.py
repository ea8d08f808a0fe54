"""The packages: what lies at the top, which way imports point, and that the public face is what it says."""

import ast
import functools
import importlib
import pydoc
import re
from pathlib import Path

import pytest
from helpers.code_size import tokens_of

import jaxrl
from jaxrl.core.registry import registered
from jaxrl.parallel.program import Program
from jaxrl.parallel.topology import Topology

ROOT = Path(__file__).parents[1]
CODE = ROOT / "jaxrl"

# A package imports only packages that stand before it (docs/design.md).
PACKAGES = "core envs networks buffers algos parallel data plots run export sweeps cli".split()
NAMES = ("schedules", "spaces")  # of core, as `jaxrl.NAME`
# And of those, some know less still.
STRANGERS = {("parallel", "algos"), ("algos", "envs"), ("algos", "buffers"), ("buffers", "networks"), ("data", "algos")}
MOST_PAIRS = 60

# Tokens of code in all: a landing may lower these numbers, and nothing raises them.
MOST_TOKENS = {"jaxrl": 374_682, "tests": 470_066}
MOST_DATA = 68_782  # bytes of TOML and JSON in jaxrl/
# Names that say less than the field's noun would; in these packages none is left.
RIDDLES = {"told", "asked", "given", "shown", "kept", "wanted"}
WITHOUT_RIDDLES = PACKAGES
MOST_PASSED_ON = 12  # parameters of train, and of sweep, that reach another function one by one


def module_of(path):
    return ".".join(("jaxrl", *path.relative_to(CODE).with_suffix("").parts)).removesuffix(".__init__")


@functools.cache
def imports():
    """Return the names that each module of jaxrl imports, also within functions and for type checkers alone."""
    found = {}
    for path in CODE.rglob("*.py"):
        names = found[module_of(path)] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} imports relatively"
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def package_of(name):
    return [*name.split("."), "__init__"][1]


def ties():
    """Return the packages that each module imports from: (module, its package, the other package)."""
    return {
        (module, package_of(module), package_of(name))
        for module, names in imports().items()
        for name in names
        if name.partition(".")[0] == "jaxrl"
    }


def test_the_top_holds_packages_and_the_names_that_users_import():
    assert {path.stem for path in CODE.glob("*.py")} == {"__init__", "__main__", *NAMES}
    for name in NAMES:  # `from jaxrl.spaces import Box`
        module, core = (importlib.import_module(f"jaxrl.{path}") for path in (name, f"core.{name}"))
        assert dir(module) == dir(core) and all(getattr(module, key) is getattr(core, key) for key in dir(core))
        assert len(pydoc.render_doc(module)) > len(pydoc.render_doc(core)) / 2, "help() shows what is in it"
    assert {path.name for path in CODE.iterdir() if path.is_dir()} - {"__pycache__", "trained"} == set(PACKAGES)


def test_imports_point_one_way():
    level = {package: number for number, package in enumerate(PACKAGES)}
    level |= dict.fromkeys(NAMES, 0.5) | {"__main__": len(PACKAGES), "__init__": len(PACKAGES) + 1}
    upward = [
        f"{module} imports jaxrl.{imported}"
        for module, package, imported in ties()
        if package not in ("__init__", imported) and level[imported] >= level[package]
    ]
    assert upward == []


def test_some_packages_do_not_know_each_other():
    assert [tie for tie in ties() if tie[1:] in STRANGERS] == []


def test_packages_are_tied_by_few_imports():
    pairs = {(package, imported) for _, package, imported in ties() if package in PACKAGES}
    pairs = {pair for pair in pairs if pair[0] != pair[1]}
    assert len(pairs) <= MOST_PAIRS, sorted(pairs)


def test_the_public_face_is_what_checkers_see():
    tree = ast.parse((CODE / "__init__.py").read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(jaxrl.__all__)
    for name in seen:
        assert getattr(jaxrl, name) is not None and name in dir(jaxrl)


def test_no_imports_go_in_circles():
    left = {}
    for module, names in imports().items():
        names = {name if name in imports() else name.rpartition(".")[0] for name in names}
        left[module] = names & imports().keys() - {module}
    while free := {name for name, modules in left.items() if not modules & left.keys()}:
        left = {name: modules for name, modules in left.items() if name not in free}
    assert left == {}, "these import each other, or what does"


def test_topologies_answer_for_themselves():
    """Outside of `jaxrl.parallel` nothing asks of which class one is, so that a new one needs no line there."""
    kinds = [kind for kind in registered("topology").values() if issubclass(kind, Topology)]
    topologies = {kind.__name__ for kind in (Topology, Program, *kinds)}
    assert topologies == {"Topology", "Program", "Anakin", "Offline", "Sebulba"}
    found = [
        f"{path.relative_to(CODE)}:{node.lineno}"
        for path in CODE.rglob("*.py")
        if path.relative_to(CODE).parts[0] != "parallel"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("isinstance", "issubclass")
        for part in ast.walk(ast.Tuple(node.args[1:]))
        if getattr(part, "id", getattr(part, "attr", None)) in topologies
    ]
    assert found == []


@pytest.mark.parametrize("folder", MOST_TOKENS)
def test_the_code_does_not_grow(folder):
    assert tokens_of(ROOT / folder) <= MOST_TOKENS[folder]


def test_functions_that_algorithms_share_take_arrays_and_parts():
    """Only methods, and the functions of the registry in base.py, see an algorithm or a group of its fields."""
    groups = {cls.__name__ for algo in registered("algorithm").values() for cls in algo.__mro__}
    for file in sorted(set((CODE / "algos").glob("*.py")) - {CODE / "algos" / "base.py"}):
        functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
        for arg in [arg for node in functions for arg in (*node.args.args, *node.args.kwonlyargs)]:
            named = set(re.findall(r"\w+", ast.unparse(arg.annotation))) if arg.annotation else set()
            assert arg.arg != "algo" and not named & (groups - {"object"}), f"{file.name}: {ast.unparse(arg)}"


def test_the_data_do_not_grow():
    kept = [path for path in CODE.rglob("*.*") if path.suffix in (".json", ".toml") and path.name != "table.json"]
    assert sum(path.stat().st_size for path in kept) <= MOST_DATA


def test_docstrings_open_with_a_verb_or_a_noun():
    """Ruff checks the imperative mood of functions' docstrings, but not the openings of classes' and modules'."""
    odd = r'(?m)^ *r?"""(Wh(at|ether|ere|ich|o|ose|y)|How|That|Those|Of|As|By|None|All of|Each of)\b'
    assert [path for path in CODE.rglob("*.py") if re.search(odd, path.read_text())] == []


def passed_on(function):
    """Return the parameters of a function that an argument of a call in it names, but for calls of RunSettings."""
    parameters = {one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
    parameters |= {one.arg for one in (function.args.vararg, function.args.kwarg) if one is not None}
    found = set()
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and not ast.unparse(call.func).startswith("RunSettings"):
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            found |= {n.id for one in arguments for n in ast.walk(one) if isinstance(n, ast.Name)} & parameters
    return found


@pytest.mark.parametrize("place", ["run/training.py:train", "sweeps/sweep.py:sweep"])
def test_the_settings_of_a_run_go_on_as_one_object(place):
    file, _, name = place.partition(":")
    [function] = [
        node
        for node in ast.parse((CODE / file).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert len(passed_on(function)) <= MOST_PASSED_ON, sorted(passed_on(function))


def names_made(tree):
    """Return the names that a module gives to variables, parameters, attributes, functions, classes and imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=str(name)) | ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.TypeVar(name=name):
                yield name


def riddles(name):
    """Return the riddles among the parts of a name, which underscores or capital letters divide."""
    return RIDDLES & set(re.sub("([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_"))


@pytest.mark.parametrize("package", WITHOUT_RIDDLES)
def test_names_are_the_fields_nouns(package):
    found = {
        str(path.relative_to(CODE)): sorted({name for name in names_made(ast.parse(path.read_text())) if riddles(name)})
        for path in (CODE / package).rglob("*.py")
    }
    assert {file: names for file, names in found.items() if names} == {}


def test_riddles_are_found_in_every_place_of_a_name():
    code = """
import a as told_a
class AskedOnce:
    kept: int = 0
    def wanted_by(self, given, *shown, **kept_too):
        self._told, (asked, b) = 1, (2, 3)
        for kept in b: pass
        try: pass
        except E as shown_error: pass
        return [wanted for wanted in b if a.told and f(given=1)] or (lambda asked: 0)
"""
    assert sum(bool(riddles(name)) for name in names_made(ast.parse(code))) == 13
    assert not any(map(riddles, ("keep", "holder", "basket", "untold", "given2", "forgiven")))
