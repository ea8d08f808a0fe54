"""Rows of environments whose episodes have two steps and whose reward is the number of the step."""

import numpy as np


def assert_counted(shown):
    """Assert that these are eight moments of such environments, from a reset on, whose ends are terminations."""
    columns = {
        "reward": [0, 1, 2, 0, 1, 2, 0, 1],
        "first": [True, False, False] * 2 + [True, False],
        "terminated": [False, False, True] * 2 + [False, False],
        "truncated": [False] * 8,
    }
    for name, column in columns.items():
        found = np.stack([getattr(timestep, name) for timestep in shown], axis=1)
        np.testing.assert_array_equal(found, [column] * len(found), name)
    for name, column in {"returns": [0, 1, 3, 0, 1, 3, 0, 1], "length": [0, 1, 2, 0, 1, 2, 0, 1]}.items():
        found = np.stack([getattr(timestep.episode, name) for timestep in shown], axis=1)
        np.testing.assert_array_equal(found, [column] * len(found), name)
