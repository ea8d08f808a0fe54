"""Fields of the algorithms that act by tree search."""

import importlib.util

from jaxrl.algos.base import field_group, number, static
from jaxrl.core.errors import MissingExtraError
from jaxrl.core.schedules import Scalar


@field_group
class SearchFields:
    """Search by a model before each action."""

    simulations: int = static(32, low=1, help="simulations of a search, each of which visits one new node")
    tree_search: str = static(
        "gumbel",
        choices=("gumbel", "puct"),
        help="Gumbel search with sequential halving, or PUCT with noise at the root and actions drawn by visits",
    )
    epsilon: Scalar = number(
        0.0, low=0, high=1, help="probability of a random action in training, for positions that no search would reach"
    )
    considered_actions: int = static(
        16, low=1, only_with="tree_search=gumbel", help="actions that are tried at the root, at most"
    )
    noise_fraction: Scalar = number(
        0.25, low=0, high=1, only_with="tree_search=puct", help="part of Dirichlet noise in the prior at the root"
    )
    noise_concentration: Scalar = number(
        0.3, above=0, only_with="tree_search=puct", help="concentration of the Dirichlet noise (alpha)"
    )
    visit_temperature: Scalar = number(
        1.0, low=0, only_with="tree_search=puct", help="actions are drawn by visits^(1 / this); 0: the most visited"
    )

    def problems(self) -> list[str]:
        """Explain which fields do not go together; none.

        Raises:
          MissingExtraError: mctx, which searches, is not installed.
        """
        if importlib.util.find_spec("mctx") is None:
            raise MissingExtraError(type(self).__name__, "search")
        return []
