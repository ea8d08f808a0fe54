"""Runs with every sampler and remover: interrupted and started again they are the run that was not, bit for bit.

Two of them are killed, and not asked to stop, in tests/faults/test_kill_and_resume.py.
"""

import itertools
import re

import jax
import numpy as np
import pytest
from helpers import programs
from helpers.programs import DQN, NUM_ENVS, ROWS, Interrupt, all_finite, assert_equal

from jaxrl.algos.fields import Sampling
from jaxrl.core.errors import CheckpointError
from jaxrl.core.sources import Fifo, Lifo, MaxHeap, MinHeap, Prioritized, Uniform, View
from jaxrl.run.directory import manifest
from jaxrl.run.loop import run_loop

ITERATIONS = 6
SAMPLERS = [Uniform(), Prioritized(0.6), Fifo(), Lifo(), MinHeap(), MaxHeap()]
REMOVERS = [Fifo(), Lifo(), MinHeap(), MaxHeap()]


@pytest.fixture(autouse=True)
def one_iteration_chunks(monkeypatch):
    monkeypatch.setattr(run_loop, "_CHUNK_SECONDS", 0.0)


def name(choices):
    return "-".join(
        type(x).__name__.lower() if hasattr(x, "__dataclass_fields__") else str(x) for x in choices.values()
    )


RING = [
    pytest.param({"sampling": Sampling(sampler=sampler, max_times_sampled=3)}, id=name({"sampler": sampler, "most": 3}))
    for sampler in SAMPLERS
]
# Two views of one ring beside the replay, each with so few items that most were removed.
VIEWS = [
    pytest.param(
        {"view": View(8, sampler, NUM_ENVS * 5, remover)},
        id=name({"view": "view", "sampler": sampler, "remover": remover}),
    )
    for sampler, remover in zip(SAMPLERS, itertools.cycle(REMOVERS))  # noqa: B905
]


@pytest.mark.long
@pytest.mark.parametrize("choices", RING + VIEWS)
def test_interrupted_and_started_again(choices, tmp_path):
    algo = DQN.replace(prioritized=None, **choices)

    def train(run_dir=None, loggers=()):
        settings = {"total_steps": ITERATIONS * ROWS, "checkpoint_every": ROWS, "evaluation_episodes": NUM_ENVS}
        return programs.train(run_dir, algo=algo, loggers=list(loggers), **settings)

    whole, half = train(), train(tmp_path / "run", [Interrupt(ITERATIONS // 2 * ROWS)])
    assert half.stopped == "interrupted" and half.total_steps < whole.total_steps
    resumed = train(tmp_path / "run")
    assert resumed.stopped == "finished"
    assert_equal(whole.state, resumed.state)
    assert all_finite(whole.state.learner) and int(whole.state.learner.updates) == 2 * (ITERATIONS - 1)
    index = jax.device_get(whole.state.buffers["replay"].index)
    assert sum(int(held.index.sampled) for held in whole.state.buffers.values()) == 32 * 2 * (ITERATIONS - 1)
    if "sampling" in choices:
        assert np.max(index.times_sampled) <= 3


@pytest.mark.long
def test_a_replay_that_was_saved_otherwise_is_refused_with_a_way_to_go_on(tmp_path):
    """As by an earlier version, which kept less of it."""
    algo = DQN.replace(prioritized=None, sampling=Sampling(sampler=Lifo(), max_times_sampled=3))
    settings = {"algo": algo, "evaluation_episodes": NUM_ENVS}
    before = programs.train(tmp_path / "before", total_steps=3 * ROWS, **settings)
    saved = tmp_path / "before" / "checkpoints" / f"{3 * ROWS:012d}"
    record = manifest.read(saved / manifest.FILE)
    missing = next(leaf for leaf in record.leaves if leaf.name.startswith("buffers/"))
    record.leaves.remove(missing)
    manifest.write(saved / manifest.FILE, record)
    with pytest.raises(CheckpointError, match=f"leaf {missing.name} ") as refused:
        programs.train(tmp_path / "before", total_steps=4 * ROWS, **settings)
    source = re.search(r"init_from='(.*)' \(--init-from\)", str(refused.value))[1]
    with pytest.warns(RuntimeWarning, match="too small for any update"):
        again = programs.train(tmp_path / "again", total_steps=ROWS, init_from=source, **settings)
    assert again.config["parent"]["step"] == 3 * ROWS and again.config["parent"]["fresh"] == []
    assert_equal(again.policy.actor.params, before.policy.actor.params)
