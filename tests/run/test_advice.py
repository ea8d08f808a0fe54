"""What a run warns of, from its metrics: a support that returns lie beyond."""

import warnings

import pytest
from helpers.programs import DQN, ENV, ROWS, anakin

import jaxrl
from jaxrl.networks import MLP, CategoricalValues, QNetwork
from jaxrl.run import advice

RUN = {"total_steps": 12 * ROWS, "evaluate_every": ROWS, "evaluation_episodes": 4, "progress": False}


def trained(v_min, v_max):
    """A short run of C51, and the warnings of it that speak of the support."""
    network = QNetwork(torso=MLP((16,)), head=CategoricalValues(11))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = jaxrl.train(DQN.replace(v_min=v_min, v_max=v_max, network=network), ENV, topology=anakin(), **RUN)
    return result, [str(w.message) for w in caught if "support" in str(w.message)]


@pytest.mark.long
def test_a_support_that_cannot_hold_the_returns_is_warned_of_once():
    result, said = trained(-1.0, 1.0)
    rows = [row for row in result.metrics if "update/support_edge_mass" in row]
    late = [row["step"] for row in rows if advice.of(row) and 2 * row["step"] >= result.total_steps]
    assert len(rows) > len(late) > 1, "each of several would say it, the first ones of the run too"
    (text,) = said
    assert f"at step {late[0]}:" in text and "v_min or v_max" in text


@pytest.mark.long
def test_a_support_that_holds_them_is_not():
    result, said = trained(-100.0, 100.0)
    assert said == [] and any("update/support_edge_mass" in row for row in result.metrics)


@pytest.mark.parametrize(("edge", "clipped", "warned"), [(0.5, 0.0, False), (0.05, 0.05, False), (0.2, 0.05, True)])
def test_mass_on_an_end_that_no_return_passes_is_fine(edge, clipped, warned):
    metrics = {"update/support_edge_mass": edge, "update/support_clipped_mass": clipped}
    assert bool(advice.of(metrics)) == warned and advice.of({}) == {}
