"""Files that one follows to understand one thing, counted by calls; docs/design.md lists them."""

import inspect
import re
import sys
from pathlib import Path

import optax
import pytest
from gymnax.environments.classic_control.cartpole import CartPole

import jaxrl
from jaxrl import envs
from jaxrl.algos import ppo, sac
from jaxrl.buffers import transitions

CODE = Path(jaxrl.__file__).parent
DESIGN = Path(__file__).parents[1] / "docs" / "design.md"
SMALL = {"capacity": 64, "min_size": 8, "batch_size": 4}
# What is followed, between two calls of one chunk; the algorithm and environment; how many files are too many.
WAYS = {
    "an observation, from gymnax to PPO's loss": (
        jaxrl.PPO(minibatches=1, epochs=1, rollout_length=4),
        "gymnax:CartPole-v1",
        ((CartPole, "step_env"), (ppo.PPO, "_loss")),
        9,
    ),
    "a sample, from the replay to SAC's update": (
        jaxrl.SAC(**SMALL),
        "gymnax:Pendulum-v1",
        ((transitions, "gather"), (sac.SAC, "update")),
        7,
    ),
    "PPO's learning rate, from the field to the step": (
        jaxrl.PPO(minibatches=1, epochs=1, rollout_length=3),
        "gymnax:CartPole-v1",
        ((ppo.PPO, "update"), (optax, "apply_updates")),
        6,
    ),
}


def files_on_the_stack(function):
    frame, paths = sys._getframe(2), [inspect.getsourcefile(function)]
    while frame is not None:
        paths.append(frame.f_code.co_filename)
        frame = frame.f_back
    return {Path(path).relative_to(CODE).as_posix() for path in paths if Path(path).is_relative_to(CODE)}


def watched(monkeypatch, owner, name, found):
    original = getattr(owner, name)

    def call(*arguments, **named):
        found.update(files_on_the_stack(original))
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_few_files_are_on_the_way(way, monkeypatch):
    algo, name, calls, most = WAYS[way]
    env = envs.prepared(jaxrl.make(name))
    program = jaxrl.Anakin(num_envs=4, devices=1).bind(algo, env)
    algo = algo.resolve(program.layout.spec, 4)
    state, found = program.start(algo, env, 0), set()
    for owner, function in calls:
        watched(monkeypatch, owner, function, found)
    program.compile_chunk(algo, env, state)
    (row,) = [line for line in DESIGN.read_text().splitlines() if line.startswith(f"| {way} |")]
    assert found == set(re.findall(r"`(\w+/\w+\.py)`", row)), "the row in docs/design.md names others"
    assert len(found) <= most
