"""Programs are those of `golden/programs.json`: a change that is meant to change none has changed none."""

import itertools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.make_programs import FILE, digest, programs
from helpers.tiers import one_quick

HASHES = json.loads(FILE.read_text())
PROGRAMS = programs()
REWRITE = "if this is meant, name it in the commit and run .venv/bin/python tests/golden/make_programs.py"
LOCKED = re.search(r"^jax==(\S+)", (Path(__file__).parents[1] / "requirements.lock").read_text(), re.MULTILINE)[1]
needs_the_locks_jax = pytest.mark.skipif(
    jax.__version__ != LOCKED, reason=f"the programs are those of JAX {LOCKED} in requirements.lock"
)
QUICK = ["ppo anakin", "ppo sebulba", "bc offline"]


def test_the_file_has_every_program_and_the_locks_jax():
    known, now = set(HASHES), {"jax", *PROGRAMS}
    assert known == now, f"new: {sorted(now - known)}, gone: {sorted(known - now)}; {REWRITE}"
    assert HASHES["jax"] == LOCKED, REWRITE


@needs_the_locks_jax
@pytest.mark.parametrize("name", one_quick(PROGRAMS, *QUICK))
def test_a_program_is_what_it_was(name):
    assert digest(*PROGRAMS[name]) == HASHES[name], f"{name} has changed; {REWRITE}"


def test_order_repetition_and_names_do_not_count_and_operations_do():
    def traced(inner):
        scan = jax.jit(lambda x: {"a": jax.lax.scan(lambda c, y: (inner(c) + y, c), x[0], x)[1]})
        return digest(lambda: [scan.trace(jnp.ones(3))])

    def other_order(x):
        jnp.cos(x)
        sine = jax.jit(jnp.sin)(x)
        return jnp.exp(x) + sine

    assert traced(lambda x: jnp.exp(x) + jnp.sin(x)) == traced(other_order)
    others = [jnp.sin, lambda x: jnp.exp(x) - jnp.sin(x), jax.checkpoint(other_order)]
    for axis, shape in itertools.product((0, 1), ((2, 3), (3, 2))):
        zeros = np.zeros(shape, np.float32)
        others.append(lambda x, zeros=zeros, axis=axis: x + jax.lax.reduce(zeros, x, jax.lax.max, (axis,)).sum())
    assert len({traced(inner) for inner in [other_order, *others]}) == 8
