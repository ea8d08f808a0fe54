"""What a run warns of, from its metrics: a support that returns lie beyond, and that it did not learn."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers.programs import DQN, PPO, ROWS, train
from helpers.registered import nothing_registered_for_good
from helpers.tiers import one_quick

import jaxrl
from jaxrl.cli import main
from jaxrl.envs.episode import restart, transition
from jaxrl.networks import MLP, CategoricalValues, QNetwork
from jaxrl.run.loop import advice

RUN = {"total_steps": 12 * ROWS, "evaluate_every": ROWS, "evaluation_episodes": 4}


def trained(v_min, v_max):
    """A short run of C51, and the warnings of it that speak of the support."""
    network = QNetwork(torso=MLP((16,)), head=CategoricalValues(11))
    with warnings.catch_warnings(record=True, action="always") as caught:
        result = train(algo=DQN.replace(v_min=v_min, v_max=v_max, network=network), **RUN)
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


@pytest.mark.parametrize(
    ("ended", "unfinished", "warned"), [(9, 0, False), (120, 8, False), (18, 110, True), (0, 2, True)]
)
def test_evaluations_whose_episodes_do_not_end_call_for_a_time_limit(ended, unfinished, warned):
    found = advice.of({"evaluation/episodes": ended, "evaluation/unfinished": unfinished})
    assert bool(found) == warned
    if warned:
        assert f"{unfinished} of {ended + unfinished}" in found["unfinished"] and "TimeLimit" in found["unfinished"]


# --- runs that did not learn ---------------------------------------------------------------------------------------

EACH = 1_000  # steps of a row
POLICY_GRADIENT = {"on_policy": True, "discrete": True, "from_scratch": True, "same_env": True, "greedy": True}


def history(means, std=0.0, entropy=None, evaluations=(), evaluation_std=0.0, episodes=50, seed=0, lengths=20, kl=None):
    """The rows of a run whose episodes have these mean returns, drawn with this deviation; None: none ended."""
    rng, rows = np.random.default_rng(seed), []
    for number, mean in enumerate(means, 1):
        row = {"step": number * EACH, "train/updates": 5.0, "train/episodes": 0.0}
        if mean is not None:
            drawn = rng.normal(mean, std, episodes)
            row |= {"train/episodes": float(episodes), "train/length_mean": float(lengths)}
            row |= {"train/return_mean": drawn.mean(), "train/return_std": drawn.std()}
        if entropy is not None:
            row["update/entropy"] = entropy(number)
        if kl is not None:
            row["update/approximate_kl"] = kl
        rows.append(row)
    for number, mean in enumerate(evaluations, 1):
        drawn = rng.normal(mean, evaluation_std, 128)
        row = {"step": len(means) * EACH * number // len(evaluations), "evaluation/episodes": 128 * bool(mean == mean)}
        rows.append(row | {"evaluation/return_mean": drawn.mean(), "evaluation/return_std": drawn.std()})
    return sorted(rows, key=lambda row: row["step"])


def said_of(rows, **how):
    return advice.at_end(rows, **POLICY_GRADIENT | how)


def rise(low, high, number=100):
    return list(np.linspace(low, high, number))


FALLS = [20.0] + 99 * [9.3]
FINE = {
    "learns": (history(rise(20, 500), 10.0, evaluations=rise(60, 500, 10), evaluation_std=20.0), {}),
    "learns until it explores no more": (history(rise(20, 500), 10.0, lambda number: 0.6 * (number < 30)), {}),
    "learns a little at the top": (history(rise(95, 98), 2.0), {}),
    "at the top from the start, without noise": (history(100 * [500.0], 0.0, lambda number: 0.0), {}),
    "at the top from the start, trained before": (
        history(100 * [480.0], 30.0, lambda number: 0.0, 10 * [480.0], 30.0),
        {"from_scratch": False},
    ),
    "evaluations at the top from the first one": (history(rise(20, 400), 10.0, evaluations=10 * [500.0]), {}),
    "short": (history([20.0, 15.0, 12.0, 11.0, 9.3], 2.0, lambda number: 0.0), {}),
    "short, from a replay": (history(100 * [20.0], 5.0), {"on_policy": False}),
    "a curriculum": (history(rise(500, 100), 10.0, evaluations=10 * [100.0]), {"same_env": False}),
    "few episodes that hardly rise": (history(rise(10, 12, 10), 5.0, episodes=20, lengths=50), {}),
    "the first episodes are the short ones": (history([-20.0] * 30 + [-80.0] * 70, 2.0, lengths=2), {}),
    "only evaluations show it": (
        history(100 * [20.0], 10.0, evaluations=10 * [500.0]),
        {"discrete": False, "on_policy": True},
    ),
    "nothing ended": (history(100 * [None], evaluations=10 * [np.nan]), {}),
    "as random as can be, and learns": (history(100 * [20.0], 0.0, lambda number: 0.693, kl=1e-3), {}),
    "rises and comes back": (history(rise(20, 300, 50) + rise(300, 20, 50), 10.0), {}),
    "greedy actions keep most": (history(rise(1, 4), 1.0, evaluations=[3.0], evaluation_std=1.0), {}),
    "drawn actions are evaluated": (history(rise(1, 4), 1.0, evaluations=[0.7], evaluation_std=1.0), {"greedy": False}),
}


@pytest.mark.parametrize("name", FINE)
def test_nothing_is_said_of_runs_that_may_be_fine(name):
    rows, how = FINE[name]
    assert said_of(rows, **how) is None


def test_nothing_is_said_of_noise():
    """Between evaluations, and between episodes of a policy that was trained before."""
    for seed in range(200):
        means = np.random.default_rng(seed).normal(100.0, 40.0, 10)
        offline = history(100 * [None], evaluations=means, evaluation_std=40.0, seed=seed)
        assert said_of(offline) is None, f"seed {seed}: {means}"
        online = history(100 * [100.0], 50.0, evaluations=means, evaluation_std=40.0, seed=seed)
        assert said_of(online, from_scratch=False) is None, f"seed {seed}: {means}"


@pytest.mark.parametrize(
    ("rows", "how", "words"),
    [
        (
            history(FALLS, 0.7, lambda number: 0.6 * (number < 4)),
            {},
            ["fell from 20", "to 9.3", "entropy is 0 since step 4,000"],
        ),
        (history(FALLS, 0.7, lambda number: -3.0), {"discrete": False}, ["fell from 20", "to 9.3"]),
        (
            history(100 * [20.0], 10.0, lambda number: 0.693, 10 * [9.0]),
            {},
            ["did not change", "entropy stayed at 0.693"],
        ),
        (
            history(100 * [20.0], 10.0, lambda number: -1.4, kl=5e-13),
            {"discrete": False},
            ["approximate_kl is at most 5e-13", "entropy stayed at -1.4", "learning rate"],
        ),
        (history(100 * [20.0], 10.0), {"discrete": False}, ["stayed at that of the first episodes"]),
        (history(1100 * [-1200.0] + 100 * [-1500.0], 100.0), {"on_policy": False, "discrete": False}, ["fell from -1"]),
    ],
    ids=["collapsed", "fell", "did not change", "by its KL", "did not rise", "fell late"],
)
def test_a_run_that_did_not_learn_is_told_in_a_line(rows, how, words):
    said = said_of(rows, **how)
    assert said is not None and "\n" not in said and len(said) < 240 and "docs/debugging.md" in said
    assert all(word in said for word in words), said
    assert ("entropy" in said) == ("entropy" in str(words))


@pytest.mark.parametrize(
    ("means", "evaluations", "late"),
    [(rise(1, 4), [1.0, 0.7], "3.7"), (8 * [0.998], 8 * [0.0], "0.99")],
    ids=["rises", "short, and as good from the start"],
)
def test_greedy_actions_that_show_little_of_what_was_learned_are_told(means, evaluations, late):
    said = said_of(history(means, 0.02, evaluations=evaluations, evaluation_std=0.01))
    assert f"the sampled ones in training {late}" in said and "--explore-in-evaluation" in said


@pytest.mark.parametrize(
    ("evaluations", "std", "words"),
    [
        ([60.0, 500.0, 480.0, 230.0], 30.0, ["at step 50,000 returned 49", "jaxrl eval runs/a --best"]),
        ([-150.0, -1200.0, -900.0], 80.0, ["at step 33,333 returned -1", "no checkpoint"]),
        ([60.0, 500.0, 470.0], 10.0, None),  # within a tenth
        ([100.0, 130.0, 110.0], 80.0, None),  # by chance
    ],
    ids=str,
)
def test_a_run_that_ends_far_below_its_best_evaluation_says_so(evaluations, std, words):
    said = advice.below_best(history(100 * [None], evaluations=evaluations, evaluation_std=std), "runs/a", 50_000)
    assert (said is None) == (words is None) and all(word in said for word in words or ()), said


def test_the_return_in_training_is_that_of_its_end():
    assert advice.late_return(history(rise(0, 99))) == pytest.approx(89.5)
    assert advice.late_return(history([7.0] + 99 * [None])) == 7.0, "the last that ended"


class Both(struct.PyTreeNode):
    """Pays 1 where an action differs from the one before, which a greedy policy without memory never does."""

    name, resets = "Both", False
    observation_space, action_space = jaxrl.spaces.Box(0.0, 1.0, (1,)), jaxrl.spaces.Discrete(2)

    def reset(self, key):
        return (jnp.int32(0), jnp.int32(-1)), restart(jnp.zeros(1))

    def step(self, state, action, key):
        time, before = state
        changed = (before >= 0) & (action != before)
        step = transition(jnp.zeros(1), jnp.float32(changed), terminated=changed, truncated=(time >= 9) & ~changed)
        return (time + 1, action), step


@pytest.mark.long
def test_a_run_ends_with_the_returns_of_greedy_actions_and_of_training(capsys, tmp_path):
    command = ["train", "ppo", "--env", "mine:Both", "--total-steps", "4096", "--run-dir", str(tmp_path / "run")]
    with nothing_registered_for_good():
        jaxrl.register("mine:Both", Both)
        for first in (True, False):
            assert main.main([*command, "--evaluate-every", "0", "--network.torso", "mlp:8"]) == 0
            out, err = capsys.readouterr()
            returns, trained = out.rstrip().rsplit(" ", 1)
            assert returns.endswith("\nevaluation (greedy): 0.00 ± 0.00; in training") and float(trained) > 0.9
            assert ("greedy actions" in err) == first != ("the run had already finished" in out)


@pytest.mark.long
@pytest.mark.parametrize(("rate", "learns"), one_quick([(3.0, False), (1e-2, True)]))
def test_training_warns_once_at_its_end(rate, learns):
    algo = PPO.replace(learning_rate=rate, rollout_length=16, epochs=1)
    settings = {"total_steps": 60 * 16 * 64, "topology": jaxrl.Anakin(64), "evaluate_every": 0}
    with warnings.catch_warnings(record=True, action="always") as caught:
        train(algo=algo, env="gymnax:CartPole-v1", evaluation_episodes=4, **settings)
    said = [str(w.message) for w in caught if "did not learn" in str(w.message)]
    assert len(said) == (not learns)
    assert learns or "update/entropy is 0 since step" in said[0]
