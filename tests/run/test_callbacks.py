"""Callbacks: they see a run, stop it, change its environment, and are part of what is resumed."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import programs
from helpers.programs import DQN, ENV, NUM_ENVS, PPO, ROWS, assert_equal
from helpers.refused import raises, refused
from helpers.strict_json import read_json

import jaxrl
from jaxrl.core.errors import CheckpointError, ConfigError
from jaxrl.run.callbacks import Callbacks, Decision, FunctionCallback, Moment, StopAtReturn, as_callbacks
from jaxrl.run.directory.checkpoint import read_manifest

EVERY = 2 * ROWS
TOTAL = 8 * ROWS


def train(run_dir=None, *, total_steps=TOTAL, **settings):
    settings = {"evaluate_every": EVERY, "checkpoint_every": ROWS, "evaluation_episodes": 2} | settings
    return programs.train(run_dir, total_steps=total_steps, **settings)


def gravity(env):
    return env.env.env.params.gravity


def with_gravity(env, value):
    core = env.env.env
    return env.replace(env=env.env.replace(env=core.replace(params=core.params.replace(gravity=value))))


class Heavier:
    """A curriculum: gravity grows at every call, until the run stops; it remembers calls and the highest return."""

    name = "heavier"

    def __init__(self, last=None):
        self.calls, self.highest, self.last = 0, -1.0, last

    def __call__(self, moment):
        self.calls += 1
        self.highest = max(self.highest, float(moment.metrics["train/return_mean"]))
        metrics = {"gravity": 9.8 + self.calls, "calls": self.calls, "highest": self.highest}
        harder = with_gravity(moment.env, 9.8 + self.calls)
        return Decision(env=harder, metrics=metrics, stop="enough" if self.calls == self.last else None)

    def state_dict(self):
        return {"calls": self.calls, "highest": self.highest}

    def load_state_dict(self, state):
        self.calls, self.highest = state["calls"], state["highest"]


class Seen:
    """Keeps what it is shown."""

    name = "seen"

    def __init__(self):
        self.moments = []

    def __call__(self, moment):
        step = int(moment.state.steps_per_env) * NUM_ENVS
        self.moments.append((moment.step, step, moment.score, dict(moment.metrics)))

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


@pytest.mark.long
def test_they_see_step_metrics_and_state():
    seen = Seen()
    result = train(callbacks=[seen], callback_every=3 * ROWS)
    steps = [moment[0] for moment in seen.moments]
    assert steps == [2 * ROWS, 3 * ROWS, 4 * ROWS, 6 * ROWS, 8 * ROWS], "evaluations, and every third iteration"
    assert [moment[1] for moment in seen.moments] == steps, "the state is that of the step"
    scores = {row["step"]: row["evaluation/return_mean"] for row in result.metrics if "evaluation/return_mean" in row}
    for step, _, score, metrics in seen.moments:
        assert score == scores.get(step) and "update/value_loss" in metrics
        assert metrics["evaluation/return_mean"] == scores[step // EVERY * EVERY]


@pytest.mark.long
def test_a_callback_stops_the_run(tmp_path):
    def enough(moment):
        return Decision(stop="enough") if moment.step >= 4 * ROWS else None

    path = tmp_path / "run"
    result = train(path, callbacks=[FunctionCallback(enough)])
    assert (result.stopped, result.total_steps) == ("enough", 4 * ROWS)
    assert read_json(path / "result.json")["stopped"] == "enough"
    again = train(path, callbacks=[FunctionCallback(enough)])
    assert (again.stopped, again.total_steps) == ("enough", 4 * ROWS), "started again, it does not train on"
    assert train(path).stopped == "finished", "without the callback it does"


@pytest.mark.long
def test_a_curriculum_changes_what_is_trained_in_and_not_what_is_evaluated():
    heavier = Heavier()
    changed, plain = train(callbacks=[heavier]), train()
    assert heavier.calls == 4 and gravity(changed.env) == 9.8
    rows = [row for row in changed.metrics if "callback/gravity" in row]
    assert [row["callback/gravity"] for row in rows] == [10.8, 11.8, 12.8, 13.8]
    first, last = ([row for row in run.metrics if "evaluation/return_mean" in row] for run in (changed, plain))
    assert first[0]["evaluation/return_mean"] == last[0]["evaluation/return_mean"], "the same until it was changed"
    states = [jax.device_get(run.state.timestep.observation) for run in (changed, plain)]
    assert not np.array_equal(*states)


@pytest.mark.long
@pytest.mark.parametrize("algo", [PPO, DQN], ids=["ppo", "dqn"])
def test_a_killed_curriculum_equals_one_that_was_not(algo, tmp_path):
    """Its environments, what it tells, and where it ends."""

    def killed(moment):
        if moment.step == 4 * ROWS:
            raise KeyboardInterrupt

    whole = train(tmp_path / "whole", algo=algo, callbacks=[Heavier(3)])
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", algo=algo, callbacks=[Heavier(3), FunctionCallback(killed, "killed")])
    kept = read_manifest(tmp_path / "killed" / "checkpoints").callbacks["states"]
    assert kept["heavier"]["calls"] == 1 and kept["killed"] == {}, "the newest checkpoint is of step 3"
    resumed = train(tmp_path / "killed", algo=algo, callbacks=[Heavier(3)])
    assert whole.stopped == resumed.stopped == "enough" and whole.total_steps == resumed.total_steps == 6 * ROWS
    assert_equal(jax.device_get(resumed.state), jax.device_get(whole.state))
    names = ["callback/calls", "step", "callback/gravity", "callback/highest"]
    told = [[[row[name] for name in names] for row in run.metrics if names[0] in row] for run in (whole, resumed)]
    assert told[0] == told[1] and [row[0] for row in told[0]] == [1, 2, 3]


def moment(env=ENV):
    return Moment(step=0, total_steps=1, metrics={}, score=None, state=None, env=env)


def test_an_environment_of_another_form_is_refused():
    for wrong, words in (
        (jaxrl.make("gymnax:Acrobot-v1"), "another structure"),
        (with_gravity(ENV, np.zeros(3)), "changes the shape"),
    ):
        callbacks = Callbacks([FunctionCallback(lambda moment, wrong=wrong: Decision(env=wrong), "wrong")])
        raises(ConfigError, f"callback wrong .*{words}", callbacks, moment())
    callbacks = Callbacks([FunctionCallback(lambda moment: Decision(env=ENV), "wrong")])
    refused(lambda: callbacks(moment(None)), "on the host")


def test_the_type_of_every_leaf_stays():
    changed = Callbacks([FunctionCallback(lambda moment: Decision(env=with_gravity(moment.env, np.float64(3))), "x")])
    placed = jax.device_put(ENV)
    env = changed(moment(placed)).env
    assert jax.tree.map(jax.typeof, env) == jax.tree.map(jax.typeof, placed)


def test_several_are_asked_in_order():
    first = FunctionCallback(lambda moment: Decision(stop="one", env=with_gravity(moment.env, 1.0)), "a")
    second = FunctionCallback(lambda moment: Decision(stop="two", metrics={"g": gravity(moment.env)}), "b")
    decision = Callbacks([first, second])(moment())
    assert decision.stop == "one" and decision.metrics == {"callback/g": 1.0} and gravity(decision.env) == 1.0


@pytest.mark.parametrize(
    ("answer", "stop"), [(None, None), (True, None), (np.True_, None), (False, "mine"), (np.False_, "mine")]
)
def test_a_function_that_returns_what_stable_baselines3_takes(answer, stop):
    def mine(moment):
        return answer

    [callback] = as_callbacks([mine])
    assert Callbacks([callback])(moment()).stop == stop
    assert Callbacks([callback]).stop_reason(moment(), True) == stop


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("stop", "'stop'; it can return None or True"),
        ({"stop": "x"}, "{'stop': 'x'}; it can"),
        (0, "0; it can"),
        (np.zeros(2), "it can"),
        (Decision, "it can"),
        (Decision(stop=3), "a Decision whose stop=3 must be a string"),
        (Decision(metrics=[1]), "a Decision whose metrics=.1. must be a dictionary"),
        (Decision(metrics={"a": "1"}), "a Decision whose metrics.'a'.='1' must be a number"),
        (Decision(metrics={"a": np.zeros(2)}), "a Decision whose metrics.'a'.=.* must be a number"),
        (Decision(metrics={"a": None}), "a Decision whose metrics.'a'.=None must be a number"),
    ],
)
def test_other_answers_are_refused_with_the_name_of_the_callback(answer, said):
    callbacks = Callbacks([FunctionCallback(lambda moment: answer, "mine")])
    raises(ConfigError, f"callback mine returned .*{said}", callbacks, moment())
    refused(lambda: callbacks.stop_reason(moment(), True), "callback mine")


def test_functions_are_callbacks_and_have_names_of_their_own():
    def mine(moment):
        return None

    assert [one.name for one in as_callbacks([mine, mine, StopAtReturn(1.0)])] == ["mine", "mine_1", "target_return"]
    assert StopAtReturn(1.0)(dataclasses.replace(moment(), score=np.nan)), "no episode ended"
    assert train(callbacks=[mine, lambda moment: moment.step < EVERY], total_steps=2 * EVERY).stopped == "<lambda>"


def test_what_does_not_fit_is_told():
    refused(
        lambda: Callbacks([FunctionCallback(lambda moment: Decision(stop="finished"), "a")])(moment()), "'finished'"
    )

    class Odd(Seen):
        def state_dict(self):
            return {"x": object()}

    refused(lambda: Callbacks([Odd()]).keep(), "callback seen")
    for kept in ({"states": []}, {"stopped": 3}, {"env": "x"}):  # of a manifest that jaxrl did not write
        raises(CheckpointError, "the callbacks cannot be restored", Callbacks([Seen()]).restore, kept, None)


@pytest.mark.parametrize(
    "leaf",
    [
        "x",
        None,
        [1, 2],
        10**400,
        {"type": "algorithm:ppo"},
        {"type": "os:system"},
        {"array": [1, 2, 3], "shape": [3], "dtype": "float32"},
        {"array": [0.0], "shape": [1 << 28, 1 << 10], "dtype": "float32"},
        {"opaque": "x"},
    ],
)
def test_an_environment_of_somebody_elses_manifest_is_refused(leaf):
    leaves = len(jax.tree.leaves(ENV))
    raises(
        CheckpointError, "the environment in the checkpoint", Callbacks([Seen()]).restore, {"env": [leaf] * leaves}, ENV
    )
    assert Callbacks([Seen()]).restore({"env": [1] * leaves}, ENV) is not None


@pytest.mark.parametrize("state", ["x", 3, [1], {}, {"gravity": {}}])
def test_a_state_that_a_callback_does_not_take_back_is_told_with_its_name(state):
    class Remembers(Seen):
        def load_state_dict(self, state):
            self.gravity = float(state["gravity"])

    raises(CheckpointError, "callback seen", Callbacks([Remembers()]).restore, {"states": {"seen": state}}, None)
