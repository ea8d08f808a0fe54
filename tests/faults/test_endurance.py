"""Hours of training as fast as it goes: what the process holds stays what it was after the first tenth.

`make faults FAULTS_MINUTES=5` is the short form of the two hours.
"""

import os

import numpy as np
import pytest
from helpers import endurance
from helpers.processes import environment, python
from helpers.strict_json import read_json

pytestmark = pytest.mark.faults

MINUTES = float(os.environ.get("FAULTS_MINUTES") or 120)
# Of memory: the rows of metrics, which a result has, are 2 KB a second, and allocators differ by some MiB from one
# moment to the next. Threads of XLA and TensorStore come and go; those that the first evaluation and the first
# checkpoint start were seven on two cores, and a short run has these after its first tenth.
MORE = {"resident memory": lambda before: 1.05 * before + 8 * 2**20, "open files": 4, "threads": 10}


@pytest.mark.endurance
@pytest.mark.parametrize("kind", ["anakin", "sebulba"])
def test_what_a_training_of_hours_holds_is_flat(kind, tmp_path):
    words = [endurance.__file__, kind, tmp_path / "run", MINUTES]
    python(*words, env=environment(), timeout=60 * (2 * MINUTES + 15))
    seen = read_json(tmp_path / "run" / "held.json")
    assert len(seen) > 10 * MINUTES, "it did not train"
    print(kind, *(f"{what}: {typical(seen, n)}" for n, what in enumerate(MORE)), sep="\n  ")
    assert grown(seen) == []


def typical(seen, column):
    """Return the median of every tenth of the time but the first."""
    seen = np.asarray(seen)
    tenths = (seen[:, 0] - seen[0, 0]) / (seen[-1, 0] - seen[0, 0]) * 10
    return [float(np.median(seen[(tenths >= n) & (tenths < n + 1), column + 1])) for n in range(1, 10)]


def grown(seen):
    """Return a line for each figure that is larger in the last tenth of the time than in the least of the others.

    The first tenth does not count.
    """
    lines = []
    for column, (what, more) in enumerate(MORE.items()):
        *earlier, last = typical(seen, column)
        least = min(earlier)  # memory that is given back meanwhile hides no growth
        if last > (more(least) if callable(more) else least + more):
            lines.append(f"{what}: {least:,.0f} in an earlier tenth of the time, {last:,.0f} in the last")
    return lines
