"""Importance of settings against known functions and an analysis of variance by hand; parallel coordinates."""

import itertools
import math

import numpy as np
import pytest
from helpers.refused import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.plots.importance import importance, plot_parallel

GRID = [{"a": a, "b": b, "c": c} for a, b, c in itertools.product([1, 2, 3], [0.1, 1.0], ["x", "y"])]


def test_shares_of_a_full_grid_are_its_analysis_of_variance():
    """By means over the grid, with no fit: balanced, the sums of squares of settings do not depend on each other."""
    runs = GRID * 3  # seeds
    scores = np.random.default_rng(0).normal(size=len(runs)) + [one["a"] ** 2 for one in runs]
    total = np.sum((scores - scores.mean()) ** 2)
    effects = {}
    for name in "abc":
        levels = {one[name] for one in GRID}
        means = [scores[[one[name] == level for one in runs]].mean() for level in levels]
        effects[name] = np.sum((np.asarray(means) - scores.mean()) ** 2) * len(runs) / len(levels), len(levels) - 1
    noise = (total - sum(squares for squares, _ in effects.values())) / (len(runs) - 1 - 4)
    expected = {name: max(0, (squares - free * noise) / (total + noise)) for name, (squares, free) in effects.items()}
    assert importance(runs, scores) == pytest.approx(expected)


def test_effects_of_settings_together_belong_to_none():
    runs = [{"a": a, "b": b} for a in (1, 2) for b in (1, 2)] * 3
    assert importance(runs, [float(one["a"] == one["b"]) for one in runs]) == {"a": 0.0, "b": 0.0}


def test_random_draws_of_a_known_function():
    """The variance of a + 2b of independent uniform numbers is 1/5 of a and 4/5 of b; the third does nothing."""
    draws = np.random.default_rng(1).uniform(size=(2000, 3))
    runs = [dict(zip("abc", map(float, row), strict=True)) for row in draws]
    found = importance(runs, draws[:, 0] + 2 * draws[:, 1])
    assert found == pytest.approx({"b": 0.8, "a": 0.2, "c": 0.0}, abs=0.04)  # eight groups each


def test_what_chance_explains_is_none():
    shares = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        runs = [
            {"a": float(x), "b": str(y)} for x, y in zip(rng.uniform(size=40), rng.integers(4, size=40), strict=True)
        ]
        shares += importance(runs, rng.normal(size=40)).values()
    assert np.mean(shares) < 0.05, "without the correction it is a tenth"


def test_too_few_runs_tell_nothing():
    assert importance([{"a": 1}, {"a": 2}], [1.0, 2.0]) == {}
    assert importance(GRID, [1.0] * len(GRID)) == importance(GRID, [np.nan] * len(GRID)) == importance([], []) == {}
    assert importance([{}] * 9, range(9)) == {}


def test_a_run_that_failed_counts_as_the_worst():
    scores = [float(one["a"]) for one in GRID]
    failed = [np.nan if one["a"] == 1 else score for one, score in zip(GRID, scores, strict=True)]
    lowest = [max(score, 2.0) for score in scores]
    assert importance(GRID, failed) == importance(GRID, lowest)


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(-1e6, 1e6), st.text(max_size=3))
ROWS = st.lists(
    st.tuples(st.dictionaries(st.sampled_from("abc"), VALUES), st.floats(-1e9, 1e9) | st.just(float("nan"))),
    max_size=30,
)


@pytest.mark.long
@settings(max_examples=30)
@given(rows=ROWS)
def test_shares_are_shares_whatever_was_tried_and_it_can_be_drawn(rows):
    runs, scores = [tried for tried, _ in rows], [score for _, score in rows]
    found = importance(runs, scores)
    assert all(0 <= share <= 1 for share in found.values())
    assert list(found.values()) == sorted(found.values(), reverse=True)
    plot_parallel(runs, scores)


# --- parallel coordinates ------------------------------------------------------------------------------------------


def test_every_run_is_a_line_from_setting_to_setting_to_its_score(tmp_path):
    runs = [
        {"rate": 1e-4, "kind": "x"},
        {"rate": 1e-3, "kind": "y"},
        {"rate": 1e-2, "kind": "x"},
        {"rate": 1.0, "kind": "x"},
    ]
    (axes,) = plot_parallel(runs, [0.0, 5.0, 10.0, np.nan], tmp_path / "x.svg", title="$x <b>").axes
    labels = [label.get_text().split("\n")[0] for label in axes.get_xticklabels()]
    assert set(labels[:-1]) == {"rate", "kind"} and labels[-1] == "score"
    lines = [line for line in axes.get_lines() if len(line.get_xdata()) == 3]
    assert len(lines) == 3, "one failed"
    rate = labels.index("rate")
    assert [line.get_ydata()[rate] for line in lines] == pytest.approx([0, 0.5, 1]), "logarithmic"
    assert [line.get_ydata()[-1] for line in lines] == pytest.approx([0, 0.5, 1])
    kind = labels.index("kind")
    assert lines[0].get_ydata()[kind] == lines[2].get_ydata()[kind] != lines[1].get_ydata()[kind]
    assert (tmp_path / "x.svg").exists()


def test_of_many_runs_the_best_and_the_worst_are_drawn():
    (axes,) = plot_parallel([{"a": n} for n in range(1000)], [float(n) for n in range(1000)]).axes
    lines = [line for line in axes.get_lines() if line.get_color() != "#999999"]
    assert len(lines) == 400 and [lines[0].get_ydata()[-1], lines[-1].get_ydata()[-1]] == [0, 1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan, 10**400], ids=lambda odd: str(odd)[:4])
def test_settings_that_no_axis_holds_are_names(odd):
    (axes,) = plot_parallel([{"a": 1.0}, {"a": odd}, {"a": 2.0}], [1.0, 2.0, 3.0]).axes
    heights = [line.get_ydata()[0] for line in axes.get_lines() if line.get_color() != "#999999"]
    assert sorted(heights) == pytest.approx([1 / 6, 3 / 6, 5 / 6])


@pytest.mark.parametrize("draw", [plot_parallel, importance])
@pytest.mark.parametrize("scores", [[1.0], [1.0, 2.0, 3.0]])
def test_settings_and_scores_must_be_of_the_same_runs(draw, scores):
    refused(lambda: draw([{"a": 1}, {"a": 2}], scores), "settings are from 2 runs")


def test_a_picture_without_runs_says_so(tmp_path):
    (axes,) = plot_parallel([{"a": 1}], [np.nan]).axes
    assert "no run has a score" in [text.get_text() for text in axes.texts]
    refused(lambda: plot_parallel([{"a": 1}], [1.0], tmp_path / "x.zzz"), "unknown image format")


def test_random_draws_with_several_seeds_are_cut_into_groups():
    """Each number is there once for each seed; taken as they are, any setting would explain all."""
    rng = np.random.default_rng(2)
    draws = [{name: float(rng.uniform()) for name in "abc"} for _ in range(60)] * 3
    found = importance(draws, [one["b"] + 0.1 * rng.normal() for one in draws])
    assert list(found)[0] == "b" and found["b"] > 0.7 and found["a"] < 0.1 and found["c"] < 0.1


def test_a_single_setting_of_a_grid_is_taken_as_it_is():
    runs = [{"a": a} for a in range(5)] * 2
    scores = [float(a == 2) for a in range(5)] * 2
    assert importance(runs, scores) == pytest.approx({"a": 1.0})
    assert 0 < importance([{"a": float(a)} for a in range(30)], [float(a) for a in range(30)])["a"] < 1
