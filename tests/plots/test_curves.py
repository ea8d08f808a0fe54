import io
import itertools
import json
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl.core.errors import ConfigError, RunDirectoryError
from jaxrl.plots import curves
from jaxrl.plots.curves import (
    Curves,
    Run,
    bootstrap_interval,
    interquartile_mean,
    plot_run,
    plot_runs,
    plot_sweep,
    plot_trials,
)
from jaxrl.run import plotting

FLOATS = st.floats(-1e6, 1e6)


@given(hnp.arrays(np.float64, hnp.array_shapes(min_dims=1, max_dims=3, max_side=9), elements=FLOATS))
def test_interquartile_mean_is_that_of_the_sorted_middle(scores):
    cut = len(scores) // 4
    middle = np.sort(scores, axis=0)[cut : len(scores) - cut].mean(axis=0)
    np.testing.assert_allclose(interquartile_mean(scores), middle, atol=1e-6)


def test_interquartile_mean_by_hand():
    assert interquartile_mean(np.array([100.0, 2.0, 1.0, -50.0])) == 1.5
    assert interquartile_mean(np.array([7.0])) == 7.0
    np.testing.assert_array_equal(interquartile_mean(np.array([[0.0, 5.0], [2.0, 7.0]])), [1.0, 6.0])


def test_bootstrap_interval_against_every_resample():
    """With three runs there are 27 resamples, equally likely: the exact percentiles are known."""
    scores = np.array([0.0, 3.0, 12.0])
    exact = [np.mean(picks) for picks in itertools.product(scores, repeat=3)]
    low, high = bootstrap_interval([scores], confidence=0.8, resamples=40_000)
    np.testing.assert_allclose([low, high], np.percentile(exact, [10, 90]), atol=1e-9)


def test_bootstrap_agrees_with_a_plain_loop():
    rng = np.random.default_rng(1)
    scores = np.random.default_rng(0).normal(size=(30, 4)) + [0, 1, 2, 3]
    low, high = bootstrap_interval([scores], resamples=20_000)
    found = [interquartile_mean(scores[rng.integers(30, size=30)]) for _ in range(5_000)]
    reference = np.percentile(found, [2.5, 97.5], axis=0)
    np.testing.assert_allclose([low, high], reference, atol=0.03)


def test_resampling_keeps_to_its_stratum():
    """Strata without spread of their own have an interval without width, however far apart they are."""
    strata = [np.zeros((5, 2)), np.full((5, 2), 100.0)]
    for end in bootstrap_interval(strata):
        np.testing.assert_array_equal(end, [50.0, 50.0])
    low, high = bootstrap_interval([np.concatenate(strata)])
    assert np.all(low < high)


def test_the_interval_does_not_depend_on_how_it_is_chunked():
    scores = np.random.default_rng(0).normal(size=(8, 1))
    wide = np.repeat(scores, 3000, axis=1)  # so long a curve that resamples are taken few at a time
    low, high = bootstrap_interval([wide], resamples=500)
    expected = bootstrap_interval([scores], resamples=500)
    np.testing.assert_allclose(low, np.repeat(expected[0], 3000))
    np.testing.assert_allclose(high, np.repeat(expected[1], 3000))
    with pytest.raises(ConfigError, match=r"confidence=95"):
        bootstrap_interval([scores], confidence=95)
    with pytest.raises(ConfigError, match="a stratum has 1 runs"):
        bootstrap_interval([scores, scores[:1]])


def test_scipys_statistics_are_imported_for_curves_of_several_runs_alone():
    script = "import sys, jaxrl, jaxrl.plots.curves; assert 'scipy.stats' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def run(seed=0, gamma=0.99, steps=(0, 100, 200), values=(0.0, 1.0, 2.0), metric=curves.TRAINING):
    config = {
        "algorithm": {"type": "algorithm:ppo", "gamma": gamma},
        "environment": {"suite": "gymnax", "name": "CartPole-v1"},
    }
    rows = [{"step": step, metric: value} for step, value in zip(steps, values, strict=True)]
    return Run(f"run{seed}", config, rows)


def test_runs_are_grouped_by_configuration():
    groups = curves._groups([run(0), run(1), run(2, gamma=0.9)])
    assert {label: [r.name for r in members] for label, members in groups.items()} == {
        "gamma=0.99": ["run0", "run1"],
        "gamma=0.9": ["run2"],
    }
    assert list(curves._groups([run(0), run(1)])) == [""]


def test_curves_are_aligned_on_shared_steps():
    first = run(steps=(0, 100, 200), values=(0.0, 1.0, 2.0)).curve(curves.TRAINING)
    second = run(steps=(50, 150), values=(5.0, 7.0)).curve(curves.TRAINING)
    steps, values = curves._align([first, second])
    np.testing.assert_array_equal(steps, [50, 100, 150])
    np.testing.assert_array_equal(values, [[0.5, 1.0, 1.5], [5.0, 6.0, 7.0]])
    with pytest.raises(ConfigError, match="share no steps"):
        curves._align([first, run(steps=(300,), values=(1.0,)).curve(curves.TRAINING)])


def test_rows_without_the_metric_are_left_out():
    rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": None}, {"step": 3}, {"step": 4, "a": float("nan")}]
    steps, values = Run("x", {}, rows).curve("a")
    assert (steps.tolist(), values.tolist()) == ([1.0], [1.0])


def test_a_picture_is_drawn_of_many_runs(tmp_path):
    runs = [run(seed, gamma, values=(0, seed, 2 * seed)) for seed in range(3) for gamma in (0.9, 0.99)]
    path = tmp_path / "plots" / "curves.png"
    chart = plot_runs(runs, path, resamples=100)
    assert chart.axes[0].get_title() == "PPO on gymnax:CartPole-v1"
    picture = matplotlib.image.imread(path)
    assert picture.shape == (540, 840, 4)
    assert picture.std() > 0.05
    again = io.BytesIO(plot_runs(runs, resamples=100)._repr_png_())
    np.testing.assert_array_equal(matplotlib.image.imread(again), picture)


def test_a_picture_is_drawn_of_a_run_directory(tmp_path):
    path = tmp_path / "learning_curve.png"
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        plotting.plot_runs([tmp_path], path)
    (tmp_path / "config.json").write_text(json.dumps({"format": 1} | run().config))
    plotting.plot_runs([tmp_path], path)
    empty = matplotlib.image.imread(path)
    rows = [{"step": 1, curves.TRAINING: 1.0}, {"step": 2, curves.TRAINING: 3.0, curves.EVALUATION: 4.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plotting.plot_runs([tmp_path], path)
    assert not np.array_equal(empty, matplotlib.image.imread(path))
    plot_runs([plotting.read_run(tmp_path), rows], tmp_path / "runs.svg")
    assert (tmp_path / "runs.svg").read_text().startswith("<?xml")
    assert [line.get_label() for line in plot_run(rows).axes[0].get_lines()] == ["training", "evaluation"]


def test_bad_input_is_told(tmp_path):
    with pytest.raises(ConfigError, match="no runs to plot"):
        plot_runs([], tmp_path / "x.png")
    with pytest.raises(ConfigError, match=r"run0 has no values of 'loss'; it has: train/return_mean"):
        plot_runs([run()], tmp_path / "x.png", metric="loss")
    with pytest.raises(ConfigError, match="no metrics"):
        plot_runs([Run("empty", {}, [])], tmp_path / "x.png")


def test_a_sweep_is_drawn_by_configuration_with_the_band_between_its_quartiles(tmp_path):
    nan, steps = np.nan, np.array([10, 20, 30])
    one = Curves("rate=0.1", steps, np.array([[nan, 0.0, 4.0], [nan, 1.0, 8.0], [nan, 2.0, nan], [nan, 5.0, 0.0]]))
    alone = Curves("rate=$2$", steps, np.array([[1.0, 2.0, np.inf]]))
    figure = plot_sweep([one, alone], tmp_path / "x.png", title="a sweep")
    (axes,) = figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines == {"rate=0.1": [[20, 2], [30, 4]], r"rate=\$2\$": [[10, 1], [20, 2]]}
    (band,) = axes.collections  # one seed has none
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert corners == {(20, 0.75), (20, 2.75), (30, 2), (30, 6)}
    assert matplotlib.image.imread(tmp_path / "x.png").shape[2] == 4
    with pytest.raises(ConfigError, match="no curves to plot"):
        plot_sweep([])


def test_the_best_of_trials_so_far(tmp_path):
    """Those that did not finish are left out, and the first of all may be one."""
    (axes,) = plot_trials([np.nan, 1.0, 3.0, np.nan, 2.0], tmp_path / "trials.svg", title="PPO on $").axes
    drawn = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    np.testing.assert_array_equal(drawn["trial"], [np.nan, 1.0, 3.0, np.nan, 2.0])
    np.testing.assert_array_equal(drawn["best so far"], [np.nan, 1.0, 3.0, 3.0, 3.0])
    assert (tmp_path / "trials.svg").read_text().startswith("<?xml")
    with pytest.raises(ConfigError, match="unknown format of pictures"):
        plot_trials([1.0], tmp_path / "trials.txt")
