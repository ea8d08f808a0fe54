import dataclasses
import io
import itertools
import json

import matplotlib.image
import numpy as np
import pytest
from helpers.processes import python
from helpers.refused import refused
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jaxrl
from jaxrl.core.config import encode
from jaxrl.core.errors import ConfigError, RunDirectoryError
from jaxrl.plots import curves, statistics
from jaxrl.plots.curves import Run, bootstrap_interval, interquartile_mean, plot_run, plot_runs, plot_trials
from jaxrl.plots.labels import grouped
from jaxrl.run import plotting

FLOATS = st.floats(-1e6, 1e6)


@given(hnp.arrays(np.float64, hnp.array_shapes(min_dims=1, max_dims=3, max_side=9), elements=FLOATS))
def test_interquartile_mean_is_that_of_the_sorted_middle(scores):
    cut = len(scores) // 4
    middle = np.sort(scores, axis=0)[cut : len(scores) - cut].mean(axis=0)
    np.testing.assert_allclose(interquartile_mean(scores), middle, atol=1e-6)


def test_bootstrap_interval_against_every_resample():
    """With three runs there are 27 resamples, equally likely: the exact percentiles are known."""
    scores = np.array([0.0, 3.0, 12.0])
    exact = [np.mean(picks) for picks in itertools.product(scores, repeat=3)]
    low, high = bootstrap_interval([scores], confidence=0.8, resamples=40_000)
    np.testing.assert_allclose([low, high], np.percentile(exact, [10, 90]), atol=1e-9)


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
    refused(lambda: bootstrap_interval([scores, scores[:1]]), "a stratum has 1 runs")


def test_scipys_statistics_are_imported_for_curves_of_several_runs_alone():
    script = "import sys, jaxrl, jaxrl.plots.curves; assert 'scipy.stats' not in sys.modules"
    python("-c", script)


def run(seed=0, gamma=0.99, steps=(0, 100, 200), values=(0.0, 1.0, 2.0), metric=curves.TRAINING):
    config = {
        "algorithm": {"type": "algorithm:ppo", "gamma": gamma},
        "environment": {"suite": "gymnax", "name": "CartPole-v1"},
    }
    rows = [{"step": step, metric: value} for step, value in zip(steps, values, strict=True)]
    return Run(f"run{seed}", config, rows, seed)


def test_runs_are_interpolated_between_their_own_points_only():
    """A curve begins where the first of its runs does, and one that ends earlier ends earlier."""
    first = run(steps=(0, 100, 200), values=(0.0, 1.0, 2.0)).curve(curves.TRAINING)
    second = run(steps=(50, 150), values=(5.0, 7.0)).curve(curves.TRAINING)
    nan = np.nan
    steps, values = statistics.align([first, second])
    np.testing.assert_array_equal(steps, [0, 50, 100, 150, 200])
    np.testing.assert_array_equal(values, [[0.0, 0.5, 1.0, 1.5, 2.0], [nan, 5.0, 6.0, 7.0, nan]])


RUNS = st.lists(
    st.lists(st.tuples(st.integers(0, 40), FLOATS), min_size=1, max_size=6, unique_by=lambda point: point[0]),
    min_size=1,
    max_size=5,
)


@pytest.mark.long
@given(RUNS)
def test_the_summary_is_that_of_the_runs_that_have_a_value_there(runs):
    read = [tuple(np.array(sorted(points), float).T) for points in runs]
    found = statistics.summarize(read, resamples=20)
    assert found.steps[0] == min(steps[0] for steps, _ in read)
    assert found.steps[-1] == max(steps[-1] for steps, _ in read)
    for place, step in enumerate(found.steps):
        there = [np.interp(step, steps, values) for steps, values in read if steps[0] <= step <= steps[-1]]
        assert there, "a curve has no points where no run has data"
        np.testing.assert_allclose(found.center[place], interquartile_mean(np.array(there)), atol=1e-6)
        assert np.isfinite(found.low[place]) == np.isfinite(found.high[place]) == (len(there) > 1)


def test_long_curves_of_several_runs_are_thinned_and_keep_their_ends():
    rng = np.random.default_rng(0)
    runs = [(np.sort(rng.choice(10**6, 4000, replace=False)).astype(float), rng.normal(size=4000)) for _ in range(3)]
    steps, values = statistics.align(runs)
    assert len(steps) <= 1000 and {s[place] for s, _ in runs for place in (0, -1)} <= set(steps)
    np.testing.assert_array_equal(values[0], np.interp(steps, *runs[0], left=np.nan, right=np.nan))
    assert len(statistics.align(runs[:1])[0]) == 4000, "a single run is drawn as it is"


FIRST, LONGER = run(0), run(0, values=(1.0, 2.0, 4.0))


@pytest.mark.parametrize(
    ("runs", "labels", "caption"),
    [
        ([FIRST, FIRST, run(1)], ["PPO"], "over 2 runs"),  # what is there twice counts once
        ([FIRST, LONGER, run(1)], ["PPO"], "over 3 runs"),
        ([FIRST, run(1), run(0, 0.9), run(1, 0.9)], ["gamma=0.99", "gamma=0.9"], "over 2 runs"),
        ([FIRST, run(1), run(0, 0.9)], ["gamma=0.99 (2 runs)", "gamma=0.9 (1 run)"], "over runs"),
        (
            [FIRST, run(1), run(gamma=0.9, steps=(0,), values=(None,))],
            ["gamma=0.99 (2 runs)", "gamma=0.9 (no values)"],
            "over runs",
        ),
    ],
)
def test_a_legend_has_what_differs_and_the_caption_what_all_share(runs, labels, caption):
    figure = plot_runs(runs, resamples=20)
    assert [line.get_label() for line in figure.axes[0].get_lines()] == labels
    legends = [[text.get_text() for text in legend.get_texts()] for legend in figure.legends]
    assert legends == ([labels] if len(labels) > 1 else []) and caption in figure.texts[0].get_text()


def test_a_configuration_has_one_style_in_the_pictures_of_all_and_of_some():
    groups = grouped([run(0, gamma) for gamma in (0.9, 0.95, 0.99)])
    whole, some = (plot_runs(drawn).axes[0].get_lines() for drawn in (groups, groups[2:]))
    assert [line.get_color() for line in whole][2:] == [line.get_color() for line in some]
    assert len({line.get_color() for line in whole}) == 3


def test_rows_without_the_metric_are_left_out():
    rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": None}, {"step": 3}, {"step": 4, "a": float("nan")}]
    steps, values = Run("x", {}, rows).curve("a")
    assert (steps.tolist(), values.tolist()) == ([1.0], [1.0])


def test_a_notebook_shows_the_picture_that_is_saved(tmp_path):
    runs = [run(seed, gamma, values=(0, seed, 2 * seed)) for seed in range(3) for gamma in (0.9, 0.99)]
    path = tmp_path / "plots" / "curves.png"
    chart = plot_runs(runs, path, resamples=100)
    assert chart.axes[0].get_title() == "PPO on gymnax:CartPole-v1"
    again = matplotlib.image.imread(io.BytesIO(plot_runs(runs, resamples=100)._repr_png_()))
    np.testing.assert_array_equal(again, matplotlib.image.imread(path))


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


def test_a_run_from_before_a_field_is_of_the_configuration_with_its_default(tmp_path):
    for seed, algo in enumerate((jaxrl.PPO(), jaxrl.PPO(), jaxrl.PPO(clip=0.3))):
        config = {"format": 1, "algorithm": encode(algo), "environment": run().config["environment"], "seed": seed}
        if seed == 0:
            del config["algorithm"]["target_kl"]
        (tmp_path / str(seed)).mkdir()
        (tmp_path / str(seed) / "config.json").write_text(json.dumps(config))
        (tmp_path / str(seed) / "metrics.jsonl").write_text(json.dumps({"step": 1, curves.TRAINING: seed}))
    (axes,) = plotting.plot_runs([tmp_path / str(seed) for seed in range(3)], tmp_path / "x.png").axes
    assert [line.get_label() for line in axes.get_lines()] == ["clip=0.2 (2 runs)", "clip=0.3 (1 run)"]


def test_bad_input_is_told(tmp_path):
    refused(lambda: plot_runs([], tmp_path / "x.png"), "no runs to plot")
    with pytest.raises(ConfigError, match=r"'loss'.*searched: run0, run1"):
        plot_runs([run(), run(1)], tmp_path / "x.png", metric="loss")
    sweeps = [dataclasses.replace(run(seed), name=f"sweep{place}") for place in range(5) for seed in range(2)]
    with pytest.raises(ConfigError, match=r"sweep2 and 2 more\)$"):
        plot_runs(sweeps, tmp_path / "x.png", metric="loss")
    refused(lambda: plot_runs([Run("empty", {}, [])], tmp_path / "x.png"), "train/return_mean in empty")
    (axes,) = plot_runs([run(steps=(0,), values=(None,)), run(1, steps=(0,), values=(None,))]).axes
    assert [text.get_text() for text in axes.texts] == ["no episode has ended yet"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("metric", "meant"),
    [("entropy", "update/entropy"), ("Return_Mean", "train/return_mean"), ("update/entropie", "update/entropy")],
)
def test_a_metric_that_nobody_has_offers_those_with_its_name(metric, meant):
    row = {"step": 1, "update/entropy": 1.0, "update/policy_loss": 1.0, "train/return_mean": 2.0, "seconds": 0.1}
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        plot_runs([Run("one", {}, [row])], metric=metric)


def test_the_best_of_trials_so_far(tmp_path):
    """Those that did not finish are left out, and the first of all may be one."""
    (axes,) = plot_trials([np.nan, 1.0, 3.0, np.nan, 2.0], tmp_path / "trials.svg", title="PPO on $").axes
    drawn = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    np.testing.assert_array_equal(drawn["trial"], [np.nan, 1.0, 3.0, np.nan, 2.0])
    np.testing.assert_array_equal(drawn["best so far"], [np.nan, 1.0, 3.0, 3.0, 3.0])
    assert (tmp_path / "trials.svg").read_text().startswith("<?xml")
    refused(lambda: plot_trials([1.0], tmp_path / "trials.txt"), "unknown image format")
