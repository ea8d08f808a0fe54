"""Episodes made up by hypothesis, of finite numbers that sums of float32 keep exactly; and datasets in memory."""

from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from jaxrl.data import Dataset
from jaxrl.data.episodes import CUT_OFF, TERMINATED, TRUNCATED, Episode

ENDINGS = (TERMINATED, TRUNCATED, CUT_OFF)


def whole(observation, action, reward, discount, ending, score=0.0, extras=None):
    """Return an episode of arrays `[T + 1, ...]`; if it terminated, its discount says so too."""
    is_first, is_last, is_terminal = np.zeros((3, len(reward)), bool)
    is_first[0] = is_last[-1] = True
    if ending == TERMINATED:
        is_terminal[-1], discount[-2:-1] = True, 0
    marks = (is_first, is_last, is_terminal)
    return Episode(observation, action, reward, discount, *marks, {"ending": ending, "score": score}, extras or {})


def made(transitions, ending, seed=0, garbage=False, discounted=False):
    """Return an episode of chance.

    Args:
      garbage: its last action, reward and discount are not zero, as other programs leave them.
      discounted: it has discounts of its own.
    """
    rng, steps = np.random.default_rng(seed), transitions + 1
    number = 1000 * seed + np.arange(steps, dtype=np.int32)
    observation = {
        "number": number,
        "vector": rng.integers(-8, 8, (steps, 2)).astype(np.float32),
        "picture": rng.integers(0, 256, (steps, 2, 3, 2), np.uint8),
    }
    action = {"which": rng.integers(0, 9, steps).astype(np.int64), "how": rng.normal(size=(steps, 1))}
    reward, discount = rng.integers(-16, 16, steps).astype(np.float32) / 4, np.ones(steps, np.float32)
    if discounted:
        discount = rng.choice(np.float32([0.25, 0.5, 1.0]), steps)
    for x in (*action.values(), reward, discount):
        x[-1] = 77 if garbage else 0
    extras = {"value": number.astype(np.float32) / 2}
    return whole(observation, action, reward, discount, ending, float(seed), extras)


def episodes(min_transitions=1, max_transitions=9):
    return st.builds(
        made,
        st.integers(min_transitions, max_transitions),
        st.sampled_from(ENDINGS),
        st.integers(0, 50),
        st.booleans(),
        st.booleans(),
    )


def transitions_in_words(episode, n):
    """Yield (first step, rewards, number of steps, bootstrap) of every n-step transition of an episode, by loops."""
    for t in range(episode.length):
        rewards, steps, bootstrap = [0.0] * n, 0, 1.0
        while steps < n and not episode.is_last[t + steps]:
            rewards[steps] = bootstrap * float(episode.reward[t + steps])
            bootstrap *= float(episode.discount[t + steps])
            steps += 1
        yield t, rewards, steps, 0.0 if episode.is_terminal[t + steps] else bootstrap


class InMemory:
    """A reader of episodes in memory."""

    path, name, absent = Path("made"), "made", ()

    def __init__(self, episodes):
        self._episodes = episodes

    def __len__(self):
        return len(self._episodes)

    def records(self, places):
        return (self._episodes[place] for place in places)

    def episode(self, record, where):
        return record

    def summary(self, record, where):
        return record.summary


def dataset_of(*episodes):
    """Return a dataset of these episodes, which is on no disk."""
    return Dataset("made", [InMemory(episodes)])
