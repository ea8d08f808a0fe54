"""Settings of every test, made before JAX starts: strict types and ranks, four CPU devices, no chance."""

import gc
import os
import pathlib
import tomllib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from helpers.registered import only_registered_by  # noqa: E402

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("deterministic")


TESTS = pathlib.Path(__file__).parent
EXHAUSTIVE = tomllib.loads((TESTS / "exhaustive.toml").read_text(encoding="utf-8"))

# Every compiled program takes a few mappings of memory, of which Linux gives a process 65,530 (vm.max_map_count), and
# XLA dies of a segmentation fault when they are used up. One file of long tests alone can take 50,000. The programs are
# on disk, so to forget them costs little; to count them takes milliseconds, hence not after each of the quick tests.
_MANY_MAPPINGS = 30_000


def forget_programs_if_many():
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()


def relative(path):
    """Return a path relative to this folder, as in exhaustive.toml; other paths as they are."""
    return (path.relative_to(TESTS) if path.is_relative_to(TESTS) else path).as_posix()


def pytest_ignore_collect(collection_path, config):
    """Leave out files without the mark that `-m` begins with, such as `exact`: to import all files takes minutes."""
    mark, name = config.option.markexpr.partition(" ")[0], relative(collection_path)
    if mark not in ("exact", "exhaustive", "learning", "endurance") or not collection_path.name.startswith("test_"):
        return None
    found = name in EXHAUSTIVE if mark == "exhaustive" else mark in collection_path.read_text(encoding="utf-8")
    return not found or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the cases that exhaustive.toml leaves out, and sort the slowest files first: each is run by a single worker.

    The further commands of docs/systems.md come last: they take half an hour, in which no other would be run.
    """
    places = {}
    for item in items:
        file, (test, _, case) = relative(item.path), item.name.removesuffix("]").partition("[")
        if exhaustive := case not in EXHAUSTIVE.get(file, {}).get(test, [case]):
            item.add_marker("exhaustive")
        places[item] = 2 if exhaustive and file == "test_systems_commands.py" else int("/" in file)
    items.sort(key=places.get)


@pytest.fixture(autouse=True, scope="module")
def not_too_many_programs_after_a_file():
    yield
    forget_programs_if_many()


@pytest.fixture(autouse=True)
def not_too_many_programs_after_a_long_test(request):
    yield
    if request.node.get_closest_marker("long") or request.node.get_closest_marker("exhaustive"):
        forget_programs_if_many()


@pytest.fixture(autouse=True, scope="module")
def registers_for_itself(request):
    """Keep what a file of tests registers, at its import or later, from the tests of other files."""
    with only_registered_by(request.module.__name__):
        yield
