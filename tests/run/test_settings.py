"""RunSettings: one object with the arguments of `train`, which other functions share."""

import dataclasses
import inspect
from pathlib import Path

import pytest
from helpers.programs import ENV, PPO, ROWS

import jaxrl
from jaxrl.run.settings import RunSettings, default_notes
from jaxrl.sweeps.launcher import launch

FIELDS = {field.name: field.default for field in dataclasses.fields(RunSettings)}


def test_every_argument_of_train_is_a_field_with_its_default():
    parameters = inspect.signature(jaxrl.train).parameters.values()
    defaults = {one.name: dataclasses.MISSING if one.default is one.empty else one.default for one in parameters}
    assert list(FIELDS.items()) == list(defaults.items())


@pytest.mark.parametrize("function", [jaxrl.sweep, jaxrl.tune, jaxrl.make_train, launch], ids=lambda one: one.__name__)
def test_other_functions_take_the_arguments_that_their_runs_have(function):
    """Where they share a name they share its meaning; those of many runs at once are theirs alone."""
    own = {"seeds", "num_samples", "search_seed", "devices", "mapping", "points", "space", "trials", "search", "pruner"}
    own |= {"backend", "cpus_per_run", "gpus_per_run", "max_concurrent", "address", "restarts"}
    assert set(inspect.signature(function).parameters) - own <= FIELDS.keys()


def test_settings_are_what_an_argument_of_their_name_is():
    settings = RunSettings.of({"algo": PPO, "env": ENV, "total_steps": ROWS, "points": 3, "keep": 7})
    assert (settings.algo, settings.env, settings.total_steps, settings.keep) == (PPO, ENV, ROWS, 7)
    assert settings.replace(keep=1).keep == 1 and settings.keep == 7


@pytest.mark.parametrize(("every", "said"), [(None, ["evaluations: up to 640,000 steps, 32 times"]), (0, [])])
def test_evaluations_of_many_times_the_steps_of_training_are_said_before_it(every, said):
    prepared = RunSettings(algo=PPO, env="gymnax:CartPole-v1", total_steps=20_000, evaluate_every=every).prepared()
    notes = default_notes(prepared, prepared.resolved())
    assert [note.partition(" as many")[0] for note in notes if "evaluations" in note] == said


def test_what_is_resolved_leaves_no_default_of_the_environment_open():
    before = RunSettings(algo="ppo", env="gymnax:CartPole-v1", total_steps=ROWS, run_dir="~/run", record="data")
    prepared = before.prepared()
    after = prepared.resolved()
    assert prepared.algo == jaxrl.PPO() and prepared.topology == jaxrl.Anakin() and prepared.eval_env is prepared.env
    assert (prepared.run_dir, prepared.record.path) == (
        Path.home() / "run",
        "data",
    ) and prepared.dataset_fraction == 0.0
    assert after.algo.epochs is not None and after.topology.num_envs == 8 and after.evaluation_episodes == 128
    assert after.config()["logging"] == {"evaluate_every": None, "evaluation_episodes": 128}
    assert after.replace(explore_in_evaluation=True, save_replay=False).logging == {
        "evaluate_every": None,
        "evaluation_episodes": 128,
        "explore_in_evaluation": True,
        "save_replay": False,
    }
    assert list(after.config(dataset={"path": "x"}, parent=None)) == [*after.config(), "dataset"]
