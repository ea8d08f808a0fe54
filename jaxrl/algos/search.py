"""Tree search over actions with mctx (Danihelka et al., 2022, https://openreview.net/forum?id=bERaNdoegnO)."""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.algos import q_learning
from jaxrl.algos.base import Part, field_group, number, part, part_class, static
from jaxrl.core.errors import MissingExtraError
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import PyTree


class Expansion(struct.PyTreeNode):
    """Node of the search tree: the network's outputs, and the reward and discount of the step to it; leaves `[...]`."""

    logits: jax.Array  # [..., actions] of the prior policy
    value: jax.Array
    node: PyTree  # the node's state, from which its children are expanded
    reward: jax.Array | float = 0.0  # of the action that leads to the node
    discount: jax.Array | float = 1.0  # of the node's value, from the parent's perspective; may be negative


class Plan(struct.PyTreeNode):
    """Outcome of a search, with leaves `[B, ...]`."""

    action: jax.Array  # int32
    policy: jax.Array  # [B, actions] probabilities, improved compared with the prior
    value: jax.Array  # of the root under that policy


@part_class
class TreeSearch(Part):
    """Tree search before each action."""

    simulations: int = static(32, low=1, help="number of simulations per search; each visits one new node")
    kind: str = static(
        "gumbel",
        choices=("gumbel", "puct"),
        help="Gumbel search with sequential halving, or PUCT with root noise and actions sampled by visit count",
    )
    considered_actions: int = static(
        16, low=1, only_with="kind=gumbel", help="maximum number of actions considered at the root"
    )
    noise_fraction: Scalar = number(
        0.25, low=0, high=1, only_with="kind=puct", help="fraction of Dirichlet noise in the prior at the root"
    )
    noise_concentration: Scalar = number(
        0.3, above=0, only_with="kind=puct", help="concentration of the Dirichlet noise (alpha)"
    )
    visit_temperature: Scalar = number(
        1.0,
        low=0,
        only_with="kind=puct",
        help="temperature T of sampling actions by visits^(1 / T); 0: the most visited action",
    )
    epsilon: Scalar = number(
        0.2,
        low=0,
        high=1,
        help="probability of a random action in training, to reach positions that the search avoids",
    )

    def problems(self) -> list[str]:
        """Check that mctx is installed, and return no problems.

        Raises:
          MissingExtraError: mctx is not installed.
        """
        if importlib.util.find_spec("mctx") is None:
            raise MissingExtraError("tree search", "search")
        return []

    def plan(
        self,
        root: Expansion,
        expand: Callable[[PyTree, jax.Array, jax.Array], Expansion],
        keys: jax.Array | None,
        *,
        mask: jax.Array | None,
        explore: bool,
    ) -> Plan:
        """Search from each of B roots with a separate key, so that a plan does not depend on the rest of the batch.

        Args:
          root: the root nodes [B, ...], for which actions are chosen.
          expand: a function `expand(node, action, key) -> Expansion` of the child, without batch axes; the action is an
            int32 scalar.
          keys: keys [B]; None only if `explore` is false and nothing is sampled.
          mask: bool [B, actions], True for actions that are allowed at the root; None: all are allowed.
          explore: whether to search with the noise of training; otherwise, the best action is returned.
        """
        import mctx  # an extra

        if keys is None:
            keys = jax.random.split(jax.random.key(0), root.value.shape[0])
        # Do not use fold_in: folding in 1 returns the second key of a split, which mctx uses for its noise.
        keys, of_chance = jnp.unstack(jax.vmap(jax.random.split)(keys), axis=1)
        options: dict[str, Any] = {"num_simulations": self.simulations}
        if self.kind == "gumbel":
            options |= {"max_num_considered_actions": self.considered_actions, "gumbel_scale": 1.0 if explore else 0.0}
        else:
            options |= {
                "dirichlet_fraction": self.noise_fraction if explore else 0.0,
                "dirichlet_alpha": self.noise_concentration,
                "temperature": self.visit_temperature if explore else 0.0,
            }
        policy: Any = mctx.gumbel_muzero_policy if self.kind == "gumbel" else mctx.muzero_policy

        def recurrent(_, key, action, node):
            found = expand(jax.tree.map(lambda x: x[0], node), action[0], key)
            found = jax.tree.map(lambda x: jnp.asarray(x)[None], found)
            known: Any = {name: getattr(found, name) for name in ("reward", "discount", "value")}
            return mctx.RecurrentFnOutput(prior_logits=found.logits, **known), found.node

        def one(root, key, invalid):
            root = jax.tree.map(lambda x: x[None], root)
            start = mctx.RootFnOutput(prior_logits=root.logits, value=root.value, embedding=root.node)
            output = policy((), key, start, recurrent, invalid_actions=invalid, **options)
            tree = jax.tree.map(lambda x: x[0], output.search_tree)
            weights = output.action_weights[0]
            return Plan(output.action[0], weights, jnp.sum(weights * _action_values(tree)))

        invalid = None if mask is None else ~mask[:, None]
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # mctx needs this
            plan = jax.vmap(one)(root.replace(reward=(), discount=()), keys, invalid)
        action = plan.action.astype(jnp.int32)
        if explore:
            epsilon = jnp.asarray(self.epsilon, jnp.float32)
            action = q_learning.epsilon_greedy(of_chance, action, mask, epsilon, root.logits.shape[-1])
        return plan.replace(action=action)


@field_group
class TreeSearchFields:
    """Tree search."""

    tree_search: TreeSearch = part(
        TreeSearch,
        default=TreeSearch(),
        was={field.name: field.name for field in dataclasses.fields(TreeSearch)} | {"tree_search": "kind"},
        switch="simulations",
        help="tree search before each action",
    )


def _action_values(tree) -> jax.Array:
    """Return the values [actions] of the root's actions; for unvisited actions, the mixed value of the root.

    The mixed value is defined by Danihelka et al. (2022, appendix D). The mean over all visits, mctx's value of the
    root, is not the policy's value: sequential halving visits bad actions about as often as good ones.
    """
    import mctx

    visits = jnp.max(tree.children_visits[tree.ROOT_INDEX])  # mctx multiplies the values by this
    values = mctx.qtransform_completed_by_mix_value(
        tree, tree.ROOT_INDEX, value_scale=1.0, maxvisit_init=0.0, rescale_values=False
    )
    return values / visits


def cross_entropy(policy: jax.Array, log_prob: jax.Array) -> jax.Array:
    """Return the cross-entropy -sum_a pi(a) log p(a) [...] of a search's policy and log-probabilities [..., actions].

    Actions with pi(a) = 0 add nothing, even if log p(a) is infinite.
    """
    # The inner `where` avoids 0 times infinity in the gradient of excluded actions.
    return -jnp.sum(policy * jnp.where(policy > 0.0, log_prob, 0.0), axis=-1)
