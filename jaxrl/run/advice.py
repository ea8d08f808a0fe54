"""What the metrics of a chunk say is wrong with a run's settings, in one line each."""

from collections.abc import Mapping

CLIPPED_MASS = 0.01  # of the targets' probability, beyond the ends of a fixed support
EDGE_MASS = 0.1  # of it, on the two ends


def of(metrics: Mapping[str, float]) -> dict[str, str]:
    """The warnings that these metrics of a chunk call for, by a name each, so that none is given twice."""
    found = {}
    edge, clipped = (metrics.get(f"update/support_{name}_mass", 0.0) for name in ("edge", "clipped"))
    if edge > EDGE_MASS and clipped > CLIPPED_MASS:
        found["support"] = (
            f"the ends of the support hold {edge:.0%} of the critics' targets, {clipped:.0%} of them clipped: returns "
            "lie beyond v_min or v_max; set both to what discounted returns can be, or use a head without a support"
        )
    return found
