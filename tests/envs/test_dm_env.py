"""The adapter of dm_env: rows, endings, specs, seeds and misuse, in this process and in workers; dm_control's tasks."""

import functools
import json
import traceback

import dm_probes
import numpy as np
import pytest
from dm_env import specs
from helpers.counted import assert_counted
from helpers.programs import all_finite
from helpers.refused import raises, refused
from helpers.registered import nothing_registered_for_good

import jaxrl
from jaxrl.cli import main
from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError, EnvironmentFailedError, MissingExtraError
from jaxrl.envs.configs import from_config, to_config
from jaxrl.envs.host.time_steps import environment_seeds
from jaxrl.run.directory.loading import load_run

NAME = "dm_env:dm_probes:Counting"
SMALL = jaxrl.PPO(rollout_length=8, epochs=1)  # its torso is for dictionaries
ACTION = np.array([[0.5, 9.0], [-9.0, -0.5], [0.0, 0.0]], np.float32)


def play(host, steps, actions=ACTION):
    shown = [host.reset(), *(host.step(actions) for _ in range(steps))]
    host.close()
    return shown


@pytest.fixture(scope="module", params=[0, 2], ids=["in process", "workers"])
def counted(request):
    """Eight moments of three environments whose episodes have two steps."""
    recipe = jaxrl.from_dm_env(dm_probes.Counting, workers=request.param, length=2, info=("step", "drawn", "square"))
    return play(recipe.build(3, 0), 7)


def test_rows(counted):
    assert_counted(counted)
    for timestep, step in zip(counted, [0, 1, 2, 0, 1, 2, 0, 1], strict=True):
        assert timestep.observation["step"].tolist() == [step] * 3
        assert timestep.observation["early"].tolist() == [step < 2] * 3
    clipped = [[0.5, 2.0], [-1.0, -0.5], [0.0, 0.0]]
    np.testing.assert_allclose(counted[1].observation["last"]["action"], clipped, err_msg="within the spec's bounds")


def test_what_is_told(counted):
    """Parts of the observation, also of one number in an array, and what `get_info` gives."""
    for timestep in counted:
        told = timestep.info
        np.testing.assert_array_equal(told["step"], timestep.observation["step"])
        np.testing.assert_array_equal(told["square"], timestep.observation["step"] ** 2)
        drawn = np.where(timestep.first, 0.0, timestep.observation["drawn"][:, 0])
        np.testing.assert_array_equal(told["drawn"], drawn.astype(np.float32))


@pytest.mark.parametrize(("discount", "flags"), [(0.0, (True, False)), (1.0, (False, True)), (0.5, (False, True))])
def test_the_last_discount_says_how_it_ended(discount, flags):
    last = play(jaxrl.from_dm_env(dm_probes.Counting, discount=discount).build(1, 0), 3, ACTION[:1])[-1]
    assert (last.terminated[0], last.truncated[0]) == flags


SPECS = {
    "any in [0, 1]": (None, True),
    "one number": (specs.BoundedArray((), np.float64, 0.9, 0.9), True),
    "0 and 1": (specs.DiscreteArray(2), False),
    "1 alone": (specs.BoundedArray((), np.float32, 1.0, 1.0), False),
}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)], ids=["in process", "workers"])
@pytest.mark.parametrize(("spec", "discounted"), SPECS.values(), ids=SPECS)
def test_discounts_come_with_observations_unless_the_spec_has_0_and_1_alone(spec, discounted, workers):
    within = 0.9 if discounted else 1.0
    recipe = jaxrl.from_dm_env(dm_probes.Counting, length=3, within=within, spec=spec, workers=workers)
    jaxrl.check_env(recipe, steps=8)
    found = [timestep.discount for timestep in play(recipe.build(2, 0), 5, ACTION[:2])]
    if not discounted:
        assert found == [None] * 6
        return
    assert all(x.dtype == np.float32 for x in found)
    np.testing.assert_array_equal(found, np.float32([[x] * 2 for x in (1, 0.9, 0.9, 0, 1, 0.9)]))


@pytest.mark.long
def test_a_discount_that_the_spec_has_not_is_an_error():
    host = jaxrl.from_dm_env(dm_probes.Counting, within=0.9, spec=specs.DiscreteArray(2)).build(1, 0)
    host.reset()
    raises(EnvironmentFailedError, "discount is 0.9", host.step, ACTION[:1])


def test_the_contract():
    jaxrl.check_env(jaxrl.from_dm_env(dm_probes.Counting, info=("square",)), steps=10)
    jaxrl.check_env(jaxrl.from_dm_env(dm_probes.bandit), steps=5)


def test_seeds_are_by_index_and_workers_change_nothing():
    def drawn(num_envs, seed, workers=0):
        shown = play(jaxrl.from_dm_env(dm_probes.Counting, workers=workers).build(num_envs, seed), 6, ACTION[:num_envs])
        return np.stack([timestep.observation["drawn"] for timestep in shown])

    alone = drawn(3, 0)
    np.testing.assert_array_equal(alone, drawn(3, 0, workers=2))
    np.testing.assert_array_equal(alone[:, :2], drawn(2, 0))
    generators = [np.random.default_rng(seed) for seed in environment_seeds(0, 3)]
    np.testing.assert_array_equal(alone[0, :, 0], [rng.random(1, np.float32)[0] for rng in generators])
    assert len(np.unique(np.concatenate([alone[0], drawn(3, 1)[0]]))) == 6


# --- specs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "spec", "ours"),
    [
        ("observation", specs.DiscreteArray(4), spaces.Discrete(4)),
        ("observation", specs.Array((2, 3), np.float64), spaces.Box(-np.inf, np.inf, (2, 3))),
        ("observation", specs.BoundedArray((2, 2, 3), np.uint8, 0, 255), spaces.Box(0, 255, (2, 2, 3), np.uint8)),
        ("observation", specs.Array((2,), np.int16), spaces.Box(-(2**15), 2**15 - 1, (2,), np.int16)),
        ("observation", specs.Array((2,), bool), spaces.Box(False, True, (2,), np.bool_)),
        ("action", specs.DiscreteArray(4), spaces.Discrete(4)),
        ("action", specs.BoundedArray((), np.int64, -1, 1), spaces.Discrete(3)),
        ("action", specs.BoundedArray((2,), np.int32, 0, [1, 3]), spaces.MultiDiscrete((2, 4))),
        ("action", specs.BoundedArray((2,), np.float32, [0, -1], 1), spaces.Box([0.0, -1.0], [1.0, 1.0], (2,))),
        ("action", specs.Array((2,), np.float32), spaces.Box(-np.inf, np.inf, (2,))),
        (
            "action",
            {"b": specs.DiscreteArray(3), "a": (specs.Array((1,), np.float32), specs.DiscreteArray(2))},
            spaces.Dict(
                {
                    "a": spaces.Tuple((spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(2))),
                    "b": spaces.Discrete(3),
                }
            ),
        ),
    ],
    ids=str,
)
def test_specs(what, spec, ours):
    recipe = jaxrl.from_dm_env(dm_probes.bandit, what=what, spec=spec)
    assert getattr(recipe, f"{what}_space") == ours


@pytest.mark.parametrize(
    ("what", "spec", "words"),
    [
        ("observation", (specs.Array((), float),), r"the observation spec \(Array.*to one of these: numeric arrays"),
        ("observation", {"a": specs.StringArray(())}, r"bandit\['a'\] has the observation spec StringArray"),
        ("action", {"a": specs.StringArray(())}, r"bandit\['a'\] has the action spec StringArray.*an array of floats"),
        ("action", specs.Array((), np.int32), "the action spec Array.*bounded integers"),
        ("action", specs.BoundedArray((2, 2), np.int32, 0, 1), "the action spec BoundedArray"),
        ("reward", specs.Array((2,), float), r"the reward_spec is Array\(shape=\(2,\).*a single number"),
        ("reward", (specs.Array((), float),) * 2, "the reward_spec is .*a single number"),
    ],
    ids=str,
)
def test_specs_that_are_refused(what, spec, words):
    raises(ConfigError, words, jaxrl.from_dm_env, dm_probes.bandit, what=what, spec=spec)


def test_actions_are_counted_from_the_specs_lowest():
    shown = play(jaxrl.from_dm_env(dm_probes.bandit).build(2, 0), 1, np.array([0, 1]))
    assert shown[1].reward.tolist() == [1.0, 2.0] and shown[1].terminated.all()
    assert shown[1].observation.tolist() == [[4], [4]]


# --- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1], ids=["in process", "workers"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "out of cheese"),
        ("first", "began another episode before StepType.LAST"),
        ("zero", "the discount is 0 within an episode"),
        ("none", "the discount must be a number from 0 to 1, not None"),
        ("reward", "reward must be a number, not None"),
    ],
)
def test_faults_are_named(fault, words, workers):
    host = jaxrl.from_dm_env(dm_probes.Counting, workers=workers, fault=fault).build(2, 0)
    host.reset()
    with pytest.raises(EnvironmentFailedError) as caught:
        for _ in range(3):
            host.step(ACTION[:2])
    text = "".join(traceback.format_exception(caught.value))
    assert words in text and f"{NAME}: environment 0 (seed {environment_seeds(0, 1)[0]}) in step" in text
    assert caught.value.index == 0 and caught.value.action.tolist() == [0.5, 2.0]


@pytest.mark.parametrize(
    ("factory", "parameters", "words"),
    [
        (dm_probes.unseeded, {}, "dm_env:dm_probes:unseeded needs a parameter `seed`"),
        (3, {}, "3 must be a function that makes an environment"),
        (dm_probes.none, {}, "the factory returned a NoneType, not a dm_env.Environment"),
        (dm_probes.Counting, {"lenth": 3}, "cannot be made with lenth=3.*lenth"),
        (lambda seed: dm_probes.Counting(seed), {"workers": 1}, "within a function, where workers cannot import it"),
    ],
)
def test_mistakes(factory, parameters, words):
    raises(ConfigError, words, jaxrl.from_dm_env, factory, **parameters)


# --- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_it_is_registered_trained_and_loaded(tmp_path):
    """A factory of a user's, from Python and, by the name that it was registered under, on the command line."""
    with nothing_registered_for_good():
        jaxrl.register("mine:Counting-v0", functools.partial(jaxrl.from_dm_env, dm_probes.Counting, info=("square",)))
        env = jaxrl.make("mine:Counting-v0", length=2)
        result = jaxrl.train(
            SMALL, env, total_steps=256, num_envs=4, evaluation_episodes=2, run_dir=tmp_path / "a", progress=False
        )
        assert all_finite(result.state.learner) and result.evaluation.metrics()["return_mean"] == 3.0
        rows = [row for row in result.metrics if row.get("train/episodes")]
        assert rows and all(row["train/info/square"] == 2.5 for row in rows)  # 1, 4
        assert load_run(tmp_path / "a").env == env
        words = ["train", "ppo", "--env", "mine:Counting-v0", "--env-params", "length=2", "--total-steps", "256"]
        words += ["--num-envs", "4", "--rollout-length", "8", "--epochs", "1", "--evaluation-episodes", "2"]
        assert main.main([*words, "--no-progress"]) == 0


# --- dm_control ----------------------------------------------------------------------------------------------------


def test_without_dm_control_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("jaxrl.core.suites.installed", lambda suite: suite != "dm_control")
    raises(MissingExtraError, r"jaxrl\[dm_control\].*--no-deps", jaxrl.make, "dm_control:cartpole-balance")


@pytest.fixture
def control():
    found = pytest.importorskip("dm_control")
    # What the extra asks for; the lock, which is without that extra, has a newer one.
    if int(pytest.importorskip("mujoco").__version__.split(".")[0]) >= 4:
        pytest.skip("this dm_control needs mujoco<4, as the extra dm_control installs it")
    return found


@pytest.mark.long
def test_a_task_of_dm_control(control):
    recipe = jaxrl.make("dm_control:cartpole-balance", time_limit=0.05, info=("position",), flat_observation=True)
    assert recipe.observation_space == spaces.Dict({"observations": spaces.Box(-np.inf, np.inf, (5,))})
    recipe = jaxrl.make("dm_control:cartpole-balance", time_limit=0.05)
    assert recipe.action_space == spaces.Box(-1.0, 1.0, (1,))
    assert [name for name, _ in recipe.observation_space.items] == ["position", "velocity"]
    assert from_config(json.loads(json.dumps(to_config(recipe)))) == recipe
    jaxrl.check_env(recipe, steps=12)
    shown = play(recipe.build(2, 0), 6, np.zeros((2, 1), np.float32))
    assert [timestep.truncated.all() for timestep in shown] == [False] * 5 + [True, False], "its time limit"
    assert not np.any([timestep.terminated for timestep in shown])
    of_worker = play(jaxrl.make("dm_control:cartpole-balance", time_limit=0.05, workers=1).build(2, 0), 0)
    np.testing.assert_array_equal(of_worker[0].observation["position"], shown[0].observation["position"])
    apart = [play(recipe.build(2, seed), 0)[0].observation["position"] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(apart[0], apart[1])
    assert len(np.unique(np.concatenate([apart[0], apart[2]]), axis=0)) == 4


@pytest.mark.long
def test_names_and_mistakes_of_dm_control(control, capsys):
    assert {"dm_control:cartpole-balance", "dm_control:humanoid_CMU-run"} <= set(jaxrl.environments())
    refused(lambda: jaxrl.make("dm_control:cartpole-balanc"), "'cartpole-balance'")
    refused(lambda: jaxrl.make("dm_control:cartpole-balance", time_limt=3), "time_limt=3")
    assert main.main(["train", "ppo", "--env", "dm_control:cartpole-balanc", "--total-steps", "64"]) == 2
    assert "did you mean 'cartpole-balance'" in capsys.readouterr().err


@pytest.mark.long
def test_training_on_the_command_line(control, tmp_path):
    words = ["train", "ppo", "--env", "dm_control:cartpole-balance", "--env-params", "time_limit=0.1"]
    words += ["--total-steps", "256", "--num-envs", "4", "--rollout-length", "8", "--epochs", "1"]
    assert main.main([*words, "--evaluation-episodes", "4", "--no-progress", "--run-dir", str(tmp_path / "run")]) == 0
    assert jaxrl.load(tmp_path / "run").spec.name == "dm_control:cartpole-balance"
