"""One thread for small products: what counts as small, who asks, and what it leaves as it was."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxrl
from jaxrl.parallel import threads
from jaxrl.parallel.threads import largest_product, one_suffices


def largest(function, *arguments):
    return largest_product(jax.make_jaxpr(function)(*arguments).jaxpr)


def test_products_are_counted_in_multiplications_and_additions():
    a, b = jnp.ones((3, 4)), jnp.ones((4, 5))
    assert largest(jnp.matmul, a, b) == 2 * 3 * 4 * 5
    assert largest(lambda a, b: jnp.einsum("ki,kj->ij", a, b), a, jnp.ones((3, 6))) == 2 * 3 * 4 * 6
    assert largest(jnp.matmul, jnp.ones((7, 3, 4)), jnp.ones((7, 4, 5))) == 7 * 2 * 3 * 4 * 5
    assert largest(lambda a: a + 1.0, a) == 0


def test_a_convolution_takes_its_kernel_for_every_output():
    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    # 8 images of 10 x 10 x 4 and 16 filters of 3 x 3: 8 x 8 places remain.
    assert largest(convolve, jnp.ones((8, 10, 10, 4)), jnp.ones((3, 3, 4, 16))) == 2 * (8 * 8 * 8 * 16) * (3 * 3 * 4)


def test_loops_branches_and_inner_programs_are_looked_into():
    a, large = jnp.ones((2, 2)), jnp.ones((9, 9))
    once = 2 * 9 * 9 * 9
    assert largest(lambda a: jax.lax.fori_loop(0, 3, lambda _, x: x @ x, a), large) == once
    assert largest(lambda a, b: jax.lax.scan(lambda x, _: (x @ x, b @ b), a, length=4), a, large) == once
    assert largest(lambda a, b: jax.lax.cond(a.sum() > 0, lambda: b @ b, lambda: b), a, large) == once
    assert largest(jax.grad(lambda a: jax.jit(lambda x: (x @ x).sum())(a)), large) == once


@pytest.fixture
def two_cores(monkeypatch):
    """As a process of the command line has it: one device, several cores, nothing set."""
    monkeypatch.setattr(threads, "cores", lambda: 2)
    monkeypatch.setattr(threads.jax, "device_count", lambda: 1)
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def asked(num_envs=8, **fields):
    return jaxrl.PPO(**fields), jaxrl.make("gymnax:CartPole-v1"), jaxrl.Anakin(num_envs, devices=1)


def test_the_size_of_minibatches_decides(two_cores):
    # 128 steps in 4 minibatches, layers of 64: 2 x 32 x num_envs x 64 x 64 operations.
    assert one_suffices(*asked(16))
    assert not one_suffices(*asked(64))
    assert one_suffices(*asked(64, minibatches=32))


@pytest.mark.parametrize("name", threads.VARIABLES)
def test_what_somebody_said_stays(two_cores, monkeypatch, name):
    monkeypatch.setenv(name, "2")
    assert not one_suffices(*asked())


def test_there_must_be_something_to_choose(two_cores, monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda: 1)
    assert not one_suffices(*asked())


def test_several_devices_keep_their_threads(two_cores, monkeypatch):
    monkeypatch.setattr(threads.jax, "device_count", lambda: 4)
    assert not one_suffices(*asked())


def test_what_does_not_fit_is_left_for_training_to_tell(two_cores):
    assert not one_suffices(*asked(3, minibatches=1000))


# A process's command line, and how many threads XLA has at its end.
_COUNTED = """
import atexit, glob, json, sys
from jaxrl.cli.main import main

def tell():
    names = [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
    print(json.dumps(names.count("tf_XLAEigen")))

atexit.register(tell)
sys.argv[1:] = json.loads(sys.argv[1])
sys.exit(main())
"""


def trained(*words, variables=()):
    """How many threads XLA has after a command line in a process of its own, and the score that it told."""
    command = ["train", "ppo", "--env", "gymnax:CartPole-v1", "--rollout-length", "8", "--minibatches", "1", "--epochs"]
    command += ["1", "--total-steps", "64", "--evaluation-episodes", "4", "--no-progress", *words]
    environment = {k: v for k, v in os.environ.items() if k not in threads.VARIABLES} | dict(variables)
    words = [sys.executable, "-c", _COUNTED, json.dumps(command)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    score = next(line for line in done.stdout.splitlines() if line.startswith("evaluation:"))
    return int(done.stdout.splitlines()[-1]), score


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
@pytest.mark.skipif(threads.cores() == 1, reason="there is one thread anyway")
def test_a_small_training_has_one_thread_and_learns_the_same():
    small = ("--num-envs", "2", "--network.torso", "mlp:8")
    (one, score), (several, same) = trained(*small), trained(*small, variables={"PJRT_NPROC": "5"})
    # Those that JAX started with idle on, where an array from then is still held.
    assert one in (1, threads.cores() + 1)
    assert several == 5
    assert score == same


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
@pytest.mark.skipif(threads.cores() == 1, reason="there is one thread anyway")
def test_a_large_training_has_a_thread_for_every_core():
    count, _ = trained("--num-envs", "8", "--network.torso", "mlp:512,512")
    assert count == threads.cores()
