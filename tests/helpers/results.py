"""Results of sweeps."""

import numpy as np

from jaxrl.plots.curves import TRAINING
from jaxrl.sweeps.results import SweepResult


def made(scores, **others):
    """A result whose runs were never trained."""
    scores = np.asarray(scores, float)
    count, seeds = scores.shape
    settings = {
        "configurations": [{"clip": 0.1 * (number + 1)} for number in range(count)],
        "seeds": list(range(seeds)),
        "steps": np.tile([64, 128], (count, 1)),
        "metrics": {TRAINING: np.stack([scores / 2, scores], axis=-1)},
        "returns": scores[..., None],
        "failed": np.isnan(scores),
        "learners": [],
        "steps_per_second": 1.0,
        "wall_seconds": 1.0,
    }
    settings |= others
    return SweepResult(**settings, configs=[{"algorithm": one} for one in settings["configurations"]])
