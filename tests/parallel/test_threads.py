"""One thread for small products: what counts as small, who asks, and what it leaves as it was."""

import json
import os
import sys

import jax
import jax.numpy as jnp
import pytest
from helpers.processes import python

import jaxrl
from jaxrl.cli import runs, training
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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("value", ["", "many"])
def test_a_variable_that_is_no_number_says_nothing(two_cores, monkeypatch, value):
    monkeypatch.setenv(threads.VARIABLES[0], value)
    assert threads.requested() is None and one_suffices(*asked())
    monkeypatch.setenv(threads.VARIABLES[1], "3")  # as XLA reads them
    assert threads.requested() == 3


@pytest.fixture
def starts(two_cores, monkeypatch):
    """How often JAX was started anew, where the command line's process is this one."""
    started = []
    monkeypatch.setattr(training, "is_for_a_command", lambda: True)
    monkeypatch.setattr(training.threads, "restart_backend", lambda: started.append(1))
    monkeypatch.setattr(training, "keep_apart", lambda threads: started.append(threads))
    monkeypatch.setattr(training, "keep_compiled_programs", lambda: None)
    return started


def line(*words, env="gymnax:CartPole-v1"):
    command = ["ppo", "--env", env, "--num-envs", "8", "--minibatches", "8", "--total-steps", "64", *words]
    return training.train_settings(runs.read("train", command))


def test_a_command_with_small_products_starts_again_and_makes_its_environment_anew(starts):
    line()
    assert starts == [1, 1]


@pytest.mark.parametrize("words", [("--async-evaluation",), ("--import", "json"), ("--dataset", "rlds:nowhere")])
def test_where_something_else_needs_the_threads_or_holds_arrays_nothing_changes(starts, words):
    line(*words)
    assert not starts


def test_environments_on_the_host_and_those_slow_to_trace_keep_their_threads(starts, monkeypatch):
    line(env="gymnasium:CartPole-v1")
    monkeypatch.setattr(training, "_SLOW_TO_TRACE", ("gymnax:Cart",))
    line()
    assert not starts


def test_a_process_of_the_users_own_is_left_alone(starts, monkeypatch):
    monkeypatch.setattr(training, "is_for_a_command", lambda: False)
    line()
    assert not starts


# A process's command line, and where and with what it computed.
_TOLD = """
import json, os, sys
import jax
from jaxrl.cli.main import main
from jaxrl.run import training

def threads():
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    return names.count("tf_XLAEigen")

def told(settings, run=training.run_training):
    before = threads()
    result = run(settings)
    leaves = [leaf for leaf in jax.tree.leaves(result.state) if isinstance(leaf, jax.Array)]
    clients = {id(device.client) for leaf in leaves for device in leaf.devices()}
    now = clients == {id(jax.devices()[0].client)}
    print(json.dumps({"threads": before, "now": now, "left": os.environ.get("PJRT_NPROC")}))
    return result

training.run_training = told
sys.argv[1:] = json.loads(sys.argv[1])
sys.exit(main())
"""


def trained(run_dir, *words, variables=()):
    """What a command line in a process of its own told of XLA's threads, and what it logged of its run."""
    command = ["train", "ppo", "--env", "gymnax:CartPole-v1", "--rollout-length", "8", "--minibatches", "1", "--epochs"]
    command += ["1", "--total-steps", "64", "--evaluation-episodes", "4", "--no-progress", "--run-dir", str(run_dir)]
    # No program that was compiled for other threads: each compiles its own.
    kept = {k: v for k, v in os.environ.items() if k not in threads.VARIABLES and not k.startswith("JAX_COMPILATION")}
    environment = kept | {"JAXRL_CACHE": "off"} | dict(variables)
    done = python("-c", _TOLD, json.dumps([*command, *words]), env=environment)
    told = json.loads(next(row for row in done.stdout.splitlines() if row.startswith('{"threads"')))
    rows = [json.loads(row) for row in (run_dir / "metrics.jsonl").read_text().splitlines()]
    learned = [{k: v for k, v in row.items() if "second" not in k and "time" not in k} for row in rows]
    return told, learned


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
@pytest.mark.skipif(threads.cores() == 1, reason="there is one thread anyway")
def test_a_small_training_has_one_thread_and_learns_the_same(tmp_path):
    small = ("--num-envs", "2", "--network.torso", "mlp:8")
    one, learned = trained(tmp_path / "one", *small)
    several, same = trained(tmp_path / "several", *small, variables={"PJRT_NPROC": "5"})
    # Those that JAX started with idle on, where an array from then is still held.
    assert one["threads"] in (1, threads.cores() + 1) and several["threads"] == 5
    assert one["now"] and several["now"], "it ran where JAX had been before"
    assert one["left"] is None and several["left"] == "5", "processes that it starts take what was meant for it"
    assert learned == same and len(learned) > 1


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
@pytest.mark.skipif(threads.cores() == 1, reason="there is one thread anyway")
def test_a_large_training_has_a_thread_for_every_core(tmp_path):
    told, _ = trained(tmp_path / "run", "--num-envs", "8", "--network.torso", "mlp:512,512")
    assert told["threads"] == threads.cores() and told["now"]
