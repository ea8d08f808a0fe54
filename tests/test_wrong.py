"""Wrong command lines and calls, held to `golden/wrong.json`; CONTRIBUTING.md says how an entry is added."""

import json
import shlex
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from helpers.golden import old_runs
from helpers.refused import named, nothing_compiled, problems
from helpers.registered import OWN_ALGORITHMS

import jaxrl
from jaxrl.algos.rnd import RND
from jaxrl.cli import fields, main
from jaxrl.core import schedules, sources
from jaxrl.core.types import EnvSpec

# What the calls of the transcript name.
NAMES = {"jax": jax, "jaxrl": jaxrl, "np": np, "optax": optax, "nn": nn, "nnx": nnx}
NAMES |= {"EnvSpec": EnvSpec, "RND": RND, "schedules": schedules, "sources": sources}
GOLDEN = Path(__file__).parent / "golden"
TRANSCRIPT = json.loads((GOLDEN / "wrong.json").read_text())


def test_wrong_input_is_refused_as_it_was(capsys, monkeypatch, tmp_path):
    """With the same exit code or exception, and as many problems that name the same flags and fields."""
    jax.devices()  # the tests' four CPU devices exist before a --devices asks for others
    monkeypatch.chdir(tmp_path)
    shutil.copytree(old_runs() / "ppo", "there/run")
    Path("there/file").write_text("")
    Path("there/empty").mkdir()

    def command(words):
        try:
            outcome = main.main(shlex.split(words))
        except SystemExit as stopped:
            outcome = stopped.code
        return outcome, f"\n{capsys.readouterr().err}".split("\nerror: ")[1:]

    def call(expression):
        answer = eval(expression, NAMES)
        return "returned", answer if isinstance(answer, list) else [repr(answer)]

    changed: dict[str, dict] = {"commands": {}, "calls": {}}
    for kind, run in (("commands", command), ("calls", call)):
        for given, kept in TRANSCRIPT[kind].items():
            try:
                with nothing_compiled():
                    outcome, told = run(given)
            except Exception as error:
                outcome, told = type(error).__name__, problems(error)
            if (found := [outcome, *sorted(map(named, told))]) != kept:
                changed[kind][given] = found
    assert not any(changed.values()), json.dumps(changed, indent=1)


def test_flags_set_the_fields_that_they_did():
    found = {}
    for name in OWN_ALGORITHMS:
        flags, _ = fields.algorithm_flags(jaxrl.make_algorithm(name))
        assert all(flag.option == "--" + flag.name.replace("_", "-") for flag in flags)
        found[name] = " ".join(sorted(flag.name for flag in flags))
    assert found == TRANSCRIPT["flags"]
