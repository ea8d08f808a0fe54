"""A stand-in for a rollout, for tests that make rows by hand."""

from typing import Any

from flax import struct

from jaxrl.core.types import Trajectory


class RowsAlone(struct.PyTreeNode):
    """The rows of a rollout [T, B, ...], and its carry [B, ...]."""

    rows: Trajectory
    carry: Any = ()
    groups: None = None
