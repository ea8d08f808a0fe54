"""Names of leaves: each its own, and the joined keys wherever these are unique."""

import jax
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.core.trees import named_leaves

KEYS = st.sampled_from(["", "a", "b", "a/b", "b/a", "/", "0"])
TREES = st.recursive(st.integers(), lambda part: st.dictionaries(KEYS, part) | st.lists(part, max_size=2), max_leaves=9)


@given(TREES)
def test_every_leaf_has_a_name_of_its_own(tree):
    named = named_leaves(tree, root="array")
    assert list(named.values()) == jax.tree.leaves(tree)
    joined = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]
    assert {name for name in joined if name and joined.count(name) == 1} <= named.keys(), "old files have these names"
