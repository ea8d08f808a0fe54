"""Runs that learn from whichever rollouts are full, and end while their actors wait for room for the next."""

import numpy as np
from algorithms import ALGORITHMS

import jaxrl
from helpers.patience import PATIENCE, wait_for, within
from helpers.programs import NUM_ENVS, Interrupt, actor_threads, all_finite, plain
from jaxrl.parallel.sebulba.actors import ActorThreads
from jaxrl.parallel.sebulba.learning import HostLearning
from jaxrl.run.loop import run_loop

BATCH = NUM_ENVS // 2
IMPALA = ALGORITHMS["impala"]


def watch_learning(monkeypatch):
    """Return the list that gets the observations of every rollout that is learned from."""
    learned, learn = [], HostLearning.learn

    def watched(self, algo, state, buffers, rollouts, dataset):
        learned.extend(np.array(one.rollout.timesteps.observation) for one in rollouts)
        return learn(self, algo, state, buffers, rollouts, dataset)

    monkeypatch.setattr(HostLearning, "learn", watched)
    return learned


def rows_learned(learned):
    """Return the number of rows that were learned from, each once."""
    rows = np.concatenate([one[:-1].reshape(-1, one.shape[-1]) for one in learned])
    assert len(np.unique(rows, axis=0)) == len(rows), "each is learned from once"
    return len(rows)


def check_ends_while_groups_wait(env, monkeypatch, *, interrupted, **layout):
    """A run in `env` ends, by itself or interrupted, while no group has room, and each rollout is learned from once.

    Args:
      env: on the host.
      monkeypatch: of the test.
      interrupted: whether it is ended by Ctrl-C.
      layout: fields of its topology.
    """
    learned, rollouts = watch_learning(monkeypatch), ActorThreads.rollouts

    def once_all_wait(self, *arguments):
        wait_for(lambda: all(len(full) > self._selection.queue for full in self._full) or self._error is not None)
        return rollouts(self, *arguments)

    monkeypatch.setattr(ActorThreads, "rollouts", once_all_wait)
    monkeypatch.setattr(run_loop, "_CHUNK_SECONDS", 0.0)  # an iteration each
    topology = jaxrl.Sebulba(num_envs=NUM_ENVS, learner_batch=BATCH, **layout)
    settings = {"total_steps": 6 * BATCH * 8, "log_every": BATCH * 8, "evaluate_every": 0, "evaluation_episodes": 2}
    with within(PATIENCE):
        result = jaxrl.train(
            IMPALA, env, topology=topology, loggers=[Interrupt()] if interrupted else [], progress=False, **settings
        )
    assert result.stopped == ("interrupted" if interrupted else "finished") and not actor_threads()
    updates = int(result.state.learner.updates)
    assert 1 <= updates < 6 if interrupted else updates == 6
    assert all_finite(plain(result.state.learner))
    assert rows_learned(learned) >= updates * BATCH * 8
