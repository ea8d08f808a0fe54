"""Pictures as they are drawn: whatever is in them, every text is within the figure and none lies on another."""

import itertools
import warnings

import numpy as np
import pytest

from jaxrl.plots.curves import EVALUATION, TRAINING, Run, plot_run, plot_runs, plot_trials

FIELDS = {"learning_rate": 3e-4, "gamma": 0.99, "rollout_length": 128, "gae_lambda": 0.95, "epochs": 4, "clip": 0.2}
FIELDS |= {"minibatches": 4, "entropy_cost": 0.01, "value_cost": 0.5, "max_grad_norm": 0.5, "clip_value": True}
FIELDS |= {"normalize_advantage": True}
OTHER = {name: not value if isinstance(value, bool) else 3 * value for name, value in FIELDS.items()}


def run(algorithm="ppo", environment="CartPole-v1", seed=0, **settings):
    config = {"algorithm": {"type": f"algorithm:{algorithm}"} | FIELDS | settings}
    config |= {"environment": {"suite": "gymnax", "name": environment}}
    rows = [{"step": 1000 * i, TRAINING: float(i * (seed + 1)), EVALUATION: float(i)} for i in range(5)]
    return Run(f"run{seed}", config, rows, seed)


def boxes(figure):
    """The extents in pixels of everything that has a place of its own, by name."""
    renderer = figure.canvas.get_renderer()
    figure.draw_without_rendering()
    found = {f"panel {i}": axes.get_tightbbox(renderer) for i, axes in enumerate(figure.axes)}
    found |= {f"legend {i}": legend.get_window_extent(renderer) for i, legend in enumerate(figure.legends)}
    texts = [text for text in figure.texts if text.get_text()]
    texts += [figure._suptitle] if figure.get_suptitle() else []
    return found | {f"text {text.get_text()[:20]}": text.get_window_extent(renderer) for text in texts}


def check(figure):
    found = boxes(figure)
    width, height = figure.canvas.get_width_height()
    for name, box in found.items():
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, (name, box, width, height)
    for (name, one), (other, two) in itertools.combinations(found.items(), 2):
        apart = one.x1 <= two.x0 or two.x1 <= one.x0 or one.y1 <= two.y0 or two.y1 <= one.y0
        assert apart, (name, one, other, two)
    for axes in figure.axes:
        assert axes.get_window_extent().height > 120 and axes.get_window_extent().width > 120


def grid(**choices):
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


LONG = "an_environment_with_a_name_" * 8
PICTURES = {
    "two algorithms in two environments": [
        run(algorithm, environment, seed)
        for algorithm in ("ppo", "a2c")
        for environment in ("CartPole-v1", "Breakout-MinAtar")
        for seed in range(3)
    ],
    "a grid of twelve": [
        run(seed=seed, **one)
        for one in grid(learning_rate=[1e-4, 3e-4, 1e-3, 3e-3], rollout_length=[32, 128, 512])
        for seed in range(2)
    ],
    "twelve settings differ": [run(), run(**OTHER), run("a2c"), run(environment="Acrobot-v1")],
    "seventy curves": [run(clip=number / 100) for number in range(70)],
    "seven environments": [run(environment=f"Env{number}-v0", seed=seed) for number in range(7) for seed in range(2)],
    "names without an end": [run(environment=LONG + "a"), run(LONG, LONG + "a"), run(LONG, LONG + "b")],
    "a value without an end": [run(network="x" * 3000), run(network="y y" * 1000), run(network="z, " * 1000)],
    "formulas and control characters": [run(network="$a_{$"), run(network="\x1b[31m$\n"), run(environment="$x$")],
    "rows alone": [[{"step": 1, TRAINING: 1.0}], [{"step": 2, TRAINING: 2.0}]],
}


@pytest.mark.long
@pytest.mark.parametrize("name", PICTURES)
def test_every_text_has_a_place_of_its_own(name):
    with warnings.catch_warnings(action="error"):
        figure = plot_runs(PICTURES[name], resamples=20)
        check(figure)


def test_pictures_of_one_run_and_of_trials_have_their_texts_beside_one_another():
    for figure in (plot_run(run()), plot_run([]), plot_trials([1.0, np.nan, 3.0], title="PPO on " + LONG)):
        check(figure)


def test_an_environment_has_a_panel_and_the_legend_is_shared():
    figure = plot_runs([*PICTURES["two algorithms in two environments"], run("a2c", seed=7)], resamples=20)
    assert [axes.get_title() for axes in figure.axes] == ["gymnax:CartPole-v1", "gymnax:Breakout-MinAtar"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["PPO (3 runs)", "A2C (3 to 4 runs)"]
    colors = [[line.get_color() for line in axes.get_lines()] for axes in figure.axes]
    assert colors[0] == colors[1] and len(set(colors[0])) == 2
    assert [len(axes.collections) for axes in figure.axes] == [2, 2], "each curve has a band"


def test_of_many_curves_the_legend_says_how_many_it_leaves_out():
    (legend,) = plot_runs(PICTURES["seventy curves"]).legends
    assert len(legend.get_texts()) == 60 and legend.get_texts()[-1].get_text() == "... and 11 more"
