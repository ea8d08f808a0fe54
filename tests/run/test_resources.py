"""`train(resources=...)`: every part of a run is where it was put, and learns the same."""

import os
import threading

import jax
import numpy as np
import pytest
from helpers.programs import ENV, PPO, ROWS
from helpers.refused import raises

import jaxrl
from jaxrl.cli import main, runs
from jaxrl.cli.flags import build_parts
from jaxrl.core.errors import ConfigError
from jaxrl.core.resources import Resources
from jaxrl.parallel.remote.actors import Remote
from jaxrl.run.callbacks import FunctionCallback
from jaxrl.run.loop import evaluating

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux has it")
HOST = "gymnasium:host_probes:Counting-v0"
LAST = len(os.sched_getaffinity(0)) - 1 if hasattr(os, "sched_getaffinity") else 0


def run(**settings):
    topology = jaxrl.Sebulba(num_envs=8, actors=2)
    env = jaxrl.make(HOST, workers=1)
    settings |= {"total_steps": 4 * ROWS, "evaluate_every": 2 * ROWS, "evaluation_episodes": 2, "progress": False}
    return jaxrl.train(PPO, env, topology=topology, async_evaluation=True, **settings)


@pytest.mark.long
def test_every_part_is_where_it_was_put_and_learns_the_same(monkeypatch):
    here, seen = sorted(os.sched_getaffinity(0)), {}
    first, last = {here[0]}, {here[LAST]}

    def look(moment):
        for thread in threading.enumerate():
            if thread.name.startswith("actor-"):
                seen[thread.name] = os.sched_getaffinity(thread.native_id)
        seen["learner"] = os.sched_getaffinity(0)

    evaluate = evaluating.evaluate

    def played(*arguments, **settings):
        seen["evaluator"] = os.sched_getaffinity(0)
        return evaluate(*arguments, **settings)

    monkeypatch.setattr(evaluating, "evaluate", played)
    placed = run(
        resources=Resources(learner="0", actors=str(LAST), environments=str(LAST), evaluator=f"0-{LAST}"),
        callbacks=[FunctionCallback(look)],
    )
    assert seen == {"actor-0": last, "actor-1": last, "learner": first, "evaluator": set(here)}
    assert os.sched_getaffinity(0) == set(here)
    plain = run()
    jax.tree.map(np.testing.assert_array_equal, placed.state.learner, plain.state.learner)


@pytest.mark.parametrize(
    ("env", "settings", "asked", "words"),
    [
        (ENV, {}, Resources(actors="0"), "actors='0': a single compiled program has no such part"),
        (ENV, {}, Resources(worker_memory=1.0), "worker_memory=1.0: a single"),
        (ENV, {}, Resources(evaluator="0"), "evaluator='0': the learner evaluates, unless async_evaluation"),
        (ENV, {}, Resources(learner=f"0-{LAST + 1}"), rf"this process may use {LAST + 1} cores"),
        (ENV, {}, "0-3", "resources='0-3' must be a jaxrl.Resources"),
        (HOST, {}, Resources(environments="0"), "actor threads step the environments; set actors, or use workers=N"),
        (HOST, {}, Resources(worker_memory=1.0), "has no worker processes; make it with workers=N"),
        (
            HOST,
            {"topology": jaxrl.Sebulba(remote=Remote(backend="ray"))},
            Resources(environments="0"),
            r"Ray assigns cores to its actors \(remote.cpus\)",
        ),
    ],
)
def test_what_a_run_has_not_is_refused(env, settings, asked, words):
    raises(ConfigError, words, jaxrl.train, "ppo", env, total_steps=8, progress=False, resources=asked, **settings)


def test_memory_of_all_workers_is_counted():
    env = jaxrl.make(HOST, workers=2)
    raises(
        ConfigError,
        "worker_memory=1e[+]06 GiB",
        jaxrl.train,
        "ppo",
        env,
        total_steps=8,
        topology=jaxrl.Sebulba(actors=3),
        resources=Resources(worker_memory=1e6),
    )


def test_on_the_command_line(capsys):
    words = ["ppo", "--env", "gymnax:CartPole-v1", "--total-steps", "8"]
    asked = "resources:learner=0-1,3:actors=2:worker_memory=1.5"
    given = runs.read("train", [*words, "--resources", asked])
    values, problems = build_parts(given.values)
    assert problems == [] and values["resources"] == Resources("0-1,3", "2", worker_memory=1.5)
    assert main.main(["train", *words, "--resources", "resources:actors=0"]) == 2
    assert "actors='0': a single compiled program has no such part" in capsys.readouterr().err
