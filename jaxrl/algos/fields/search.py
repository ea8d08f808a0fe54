"""Fields of the algorithms that act by tree search."""

import importlib.util

from jaxrl.algos.base import field_group, number, static
from jaxrl.core.errors import MissingExtraError
from jaxrl.core.schedules import Scalar


@field_group
class SearchFields:
    """Search by a model before each action."""

    simulations: int = static(32, low=1, help="number of simulations per search; each visits one new node")
    tree_search: str = static(
        "gumbel",
        choices=("gumbel", "puct"),
        help="Gumbel search with sequential halving, or PUCT with root noise and actions sampled by visit count",
    )
    epsilon: Scalar = number(
        0.0, low=0, high=1, help="probability of a random action in training, to reach positions that the search avoids"
    )
    considered_actions: int = static(
        16, low=1, only_with="tree_search=gumbel", help="maximum number of actions considered at the root"
    )
    noise_fraction: Scalar = number(
        0.25, low=0, high=1, only_with="tree_search=puct", help="fraction of Dirichlet noise in the prior at the root"
    )
    noise_concentration: Scalar = number(
        0.3, above=0, only_with="tree_search=puct", help="concentration of the Dirichlet noise (alpha)"
    )
    visit_temperature: Scalar = number(
        1.0,
        low=0,
        only_with="tree_search=puct",
        help="temperature T of sampling actions by visits^(1 / T); 0: the most visited action",
    )

    def problems(self) -> list[str]:
        """Return no problems, after checking that mctx is installed.

        Raises:
          MissingExtraError: mctx is not installed.
        """
        if importlib.util.find_spec("mctx") is None:
            raise MissingExtraError(type(self).__name__, "search")
        return []
