"""Names of leaves: each its own, and the joined keys wherever these are unique."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.core.errors import ConfigError
from jaxrl.core.paths import named_leaves

KEYS = st.sampled_from(["", "a", "b", "a/b", "b/a", "a/b/a", "/", "0"])
TREES = st.recursive(
    st.integers(0, 9), lambda part: st.dictionaries(KEYS, part, max_size=4) | st.lists(part, max_size=2), max_leaves=12
)


@given(TREES)
def test_every_leaf_has_a_name_of_its_own(tree):
    assert list(named_leaves(tree, root="array").values()) == jax.tree.leaves(tree)


def test_names_that_are_unique_are_the_joined_keys():
    assert named_leaves({"a/b": 1, "a": {"b": 2, "c": (3,)}, "d": 4}) == {
        "['a']['b']": 2,
        "a/c/0": 3,
        "['a/b']": 1,
        "d": 4,
    }
    assert named_leaves({"walker/joints": 1, "walker": {"camera": 2}}) == {"walker/camera": 2, "walker/joints": 1}
    assert named_leaves({"a": {"b": 1}}, ".") == {"a.b": 1}
    assert named_leaves(1, root="array") == {"array": 1}
    with pytest.raises(ConfigError, match="rename"):
        named_leaves({"a/b": 1, "a": {"b": 2}, "['a/b']": 3})
