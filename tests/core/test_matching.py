"""Spaces of two things that must fit."""

import itertools

import numpy as np
import pytest

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.matching import check_spaces, space_problems
from jaxrl.core.types import EnvSpec

BOX = spaces.Box(-1.0, 1.0, (2,))
KINDS = (
    BOX,
    spaces.Box(-1.0, 1.0, (3,)),
    spaces.Box(-1.0, 1.0, (2, 1)),
    spaces.Box(0, 255, (2,), np.uint8),
    spaces.Discrete(2),
    spaces.Discrete(3),
    spaces.MultiDiscrete((2, 2)),
    spaces.MultiDiscrete((2, 3)),
    spaces.Dict({"a": BOX}),
    spaces.Dict({"b": BOX}),
    spaces.Dict({"a": BOX, "b": BOX}),
    spaces.Tuple((BOX,)),
    spaces.Tuple((BOX, BOX)),
)


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(KINDS, 2)))
def test_other_elements_are_refused_and_both_sides_named(one, other):
    for first, second, which in (
        (EnvSpec("my:A", one, BOX), EnvSpec("my:B", other, BOX), "observation_space"),
        (EnvSpec("my:A", BOX, one), EnvSpec("my:B", BOX, other), "action_space"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_spaces(first, second)
        (line,) = caught.value.problems
        assert line == f"my:B has the {which} {other}, but the policy was trained on my:A with {one}"


@pytest.mark.parametrize("space", KINDS)
def test_equal_elements_are_taken_whatever_their_bounds(space):
    def wider(part):
        if not isinstance(part, spaces.Box) or part.dtype.kind != "f":
            return part
        return spaces.Box(part.low * 3, np.inf, part.shape, part.dtype)

    other = wider(space)
    if isinstance(space, spaces.Composite):
        parts = {key: wider(child) for key, child in space.items}
        other = spaces.Dict(parts) if isinstance(space, spaces.Dict) else spaces.Tuple(tuple(parts.values()))
    assert space_problems(EnvSpec("a", space, space), EnvSpec("b", other, other), "it has") == []
