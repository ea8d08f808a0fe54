"""The loop's memory: what a run that goes on holds at once."""

import gc

import jax
import pytest
from helpers.programs import DQN, ENV, NUM_ENVS, ROWS, anakin

import jaxrl
from jaxrl.run.checkpoint import Checkpointer


def live_bytes():
    """Of all arrays on devices."""
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def train(folder, **settings):
    algo = DQN.replace(capacity=NUM_ENVS * 8192)
    options = {"topology": anakin(), "evaluate_every": 0, "evaluation_episodes": 4, "progress": False}
    return jaxrl.train(algo, ENV, total_steps=3 * ROWS, run_dir=folder, **options | settings)


@pytest.mark.long
def test_a_run_that_goes_on_never_holds_two_replays(tmp_path, monkeypatch):
    buffers = train(tmp_path / "run").state.buffers
    replay = sum(x.nbytes for x in jax.tree.leaves(buffers))
    del buffers
    before, held, restore = live_bytes(), [], Checkpointer.restore

    def measured(self, template, step=None):
        held.append(live_bytes() - before)
        restored = restore(self, template, step)
        held.append(live_bytes() - before)
        return restored

    monkeypatch.setattr(Checkpointer, "restore", measured)
    train(tmp_path / "run")
    at_first, at_last = held
    assert replay > 1e6 and at_first < 0.2 * replay, "only shapes are made before"
    assert 0.9 * replay < at_last < 1.2 * replay
