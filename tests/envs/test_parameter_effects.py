"""Every parameter of a suite changes what its equations say, or is refused by name."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.refused import raises
from helpers.tiers import one_quick
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrl
from jaxrl import envs
from jaxrl.core.errors import ConfigError
from jaxrl.envs import brax as brax_adapter
from jaxrl.envs import gymnax as adapter
from jaxrl.envs import parameters, with_parameters
from jaxrl.envs.configs import from_config, to_config
from jaxrl.envs.probes import Probe

BATCH, STEPS = 4, 160
QUICK = ("CartPole-v1", "SimpleBandit-bsuite")
NAMES = one_quick(adapter.names(), *QUICK)

VALLEY = {"min_position": -0.45, "max_position": -0.5, "max_speed": 1e-4, "goal_position": -0.55}
# Values that show within random episodes, where half the default does not.
TELLING = {
    "Acrobot-v1": {"max_vel_1": 0.1, "max_vel_2": 0.1, "torque_noise_max": 1.0, "available_torque": [-3.0, 0.0, 3.0]},
    "Asterix-MinAtar": {"ramp_interval": 3},
    "BernoulliBandit-misc": {"reward_prob": 0.4, "t_max": 30},
    "CartPole-v1": {"x_threshold": 0.06, "theta_threshold_radians": 0.06},
    "DeepSea-bsuite": {"unscaled_move_cost": 0.5},
    "DiscountingChain-bsuite": {"reward_timestep": [2, 4, 11, 31, 99]},
    "MountainCar-v0": VALLEY | {"goal_velocity": -1.0},
    "MountainCarContinuous-v0": VALLEY | {"goal_velocity": 0.05},
    "MetaMaze-misc": {"punishment": -1.0},
    "Pendulum-v1": {"max_speed": 0.5},
    "PointRobot-misc": {"goal_radius": 2.0},
    "Pong-misc": {"ball_max_y_speed": 0, "ball_x_speed": 2, "paddle_y_speed": 2},
    "Seaquest-MinAtar": {"max_oxygen": 20, "diver_spawn_speed": 1},
}
# Goals that are not reached by chance: where they are, the other parameter of the goal shows. In Seaquest an episode
# lasts for as long as the submarine comes up with divers, and only then becomes faster.
DIVERS = {"diver_spawn_speed": 1, "diver_move_interval": 1, "init_spawn_speed": 60}
BESIDE = {
    "MountainCar-v0": {"goal_velocity": {"goal_position": -0.55}},
    "MountainCarContinuous-v0": {"goal_velocity": {"goal_position": -0.55}},
    "Seaquest-MinAtar": dict.fromkeys(("ramping", "init_move_interval", "enemy_shot_interval"), DIVERS)
    | {"diver_move_interval": {"diver_spawn_speed": 1}},
}


@functools.cache
def rollouts(name):
    """A compiled function from an environment to time steps [variant, step, episode] of the same actions."""
    default = jaxrl.make(name, auto_reset=None)

    def play(env, key):
        key_reset, key_actions, key_steps = jax.random.split(key, 3)
        state, first = env.reset(key_reset)
        # The defaults' actions for all, beyond the ends of episodes, so that rare events come.
        actions = jax.vmap(default.action_space.sample)(jax.random.split(key_actions, STEPS))

        def one(state, x):
            return env.step(state, *x)

        return first, jax.lax.scan(one, state, (actions, jax.random.split(key_steps, STEPS)))[1]

    return jax.jit(lambda env: jax.vmap(play, in_axes=(None, 0))(env, jax.random.split(jax.random.key(0), BATCH)))


def shown(name, env):
    """What the agent sees of random episodes, up to the end of each."""
    first, later = jax.device_get(rollouts(name)(env))
    over = np.cumsum(later.terminated | later.truncated, axis=1) - (later.terminated | later.truncated) > 0

    def until_over(x, after):
        return np.where(over.reshape(over.shape + (1,) * (x.ndim - 2)), after, x)

    ends = (until_over(x, 0) for x in (later.reward, later.terminated, later.truncated))
    return first.observation, until_over(later.observation, first.observation[:, None]), *ends


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def changed(name, parameter, default):
    if parameter in TELLING.get(name, {}):
        return TELLING[name][parameter]
    if parameter == "max_steps_in_episode":
        return type(default)(3)
    if isinstance(default, bool):
        return not default
    return default // 2 if isinstance(default, int) else default / 2


def made(name, **chosen):
    return jaxrl.make(f"gymnax:{name}", auto_reset=None, **chosen)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_of_gymnax_changes_what_an_agent_sees_or_is_refused(name):
    default, suite_name = made(name), f"gymnax:{name}"
    for parameter, value in parameters(default).items():
        beside = BESIDE.get(name, {}).get(parameter, {})
        new = changed(name, parameter, value)
        try:
            env = made(name, **{parameter: new}, **beside)
        except ConfigError as error:
            assert f"{parameter}=" in str(error) and ("changes nothing" in str(error) or "is computed as" in str(error))
            raises(
                ConfigError,
                f"{parameter}=",
                with_parameters,
                default,
                **{parameter: np.asarray(new) if isinstance(new, list) else new},
            )
            loaded = from_config(to_config(default) | {"parameters": to_config(default)["parameters"]})
            assert parameters(loaded).keys() == parameters(default).keys()
            if parameter not in adapter.DERIVED.get(name, {}):  # raw, as older files may hold it
                ignored = default.env.replace(params=default.env.params.replace(**{parameter: new}))
                assert same(shown(suite_name, default.replace(env=ignored)), shown(suite_name, default))
            continue
        one = shown(suite_name, env)
        assert not same(one, shown(suite_name, made(name, **beside))), parameter
        low, high = (np.reshape(f(one[1], axis=(0, 1)), env.observation_space.shape) for f in (np.min, np.max))
        assert env.observation_space.contains(low) and env.observation_space.contains(high), parameter
        curriculum = with_parameters(made(name, **beside), **{parameter: np.asarray(new) if type(new) is list else new})
        assert same(shown(suite_name, curriculum), one), parameter


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("Asterix-MinAtar", {"ramping": False, "ramp_interval": 5}),
        ("BernoulliBandit-misc", {"normalize_time": False, "t_max": 50}),
        ("DeepSea-bsuite", {"sample_action_map": True, "randomize_actions": False}),
        ("FourRooms-misc", {"resample_goal_pos": True, "goal_fixed": [1, 1]}),
        ("FrozenLake-misc", {"is_slippery": False, "success_rate": 0.5}),
        ("FrozenLake-misc", {"desc": ["SF", "FG"], "map_name": "8x8"}),
        ("Seaquest-MinAtar", {"use_minimal_action_set": False}),
    ],
)
def test_what_another_parameter_switches_off_is_refused(name, chosen):
    raises(ConfigError, f"{list(chosen)[-1]}=.* changes nothing", made, name, **chosen)


# --- against the equations -----------------------------------------------------------------------------------------


def cartpole(p, x, action):
    """Barto, Sutton and Anderson (1983), as in Gymnasium."""
    position, velocity, angle, spin = x
    force, total = (2 * action - 1) * p["force_mag"], p["masscart"] + p["masspole"]
    c, s, moment = np.cos(angle), np.sin(angle), p["masspole"] * p["length"]
    push = (force + moment * spin**2 * s) / total
    bend = (p["gravity"] * s - c * push) / (p["length"] * (4 / 3 - p["masspole"] * c**2 / total))
    tau = p["tau"]
    rates = (velocity, push - moment * bend * c / total, spin, bend)
    return np.asarray(x) + tau * np.asarray(rates)


VARIABLES = ("x", "x_dot", "theta", "theta_dot")
MASSES = ("masscart", "masspole", "length", "gravity", "force_mag", "tau")


@jax.jit
def one_step(env, state, action):
    return env.step(state, action, jax.random.key(0))[0]


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(*[st.floats(0.5, 2.0)] * len(MASSES)), st.tuples(*[st.floats(-0.3, 0.3)] * len(VARIABLES)), st.booleans()
)
def test_parameters_change_the_dynamics_as_the_equations_say(scales, x, right):
    """Of CartPole, which has parameters that are derived from others."""
    default = made("CartPole-v1")
    state, _ = default.env.reset(jax.random.key(0))
    chosen = {k: scale * float(parameters(default)[k]) for k, scale in zip(MASSES, scales, strict=True)}
    state = state.replace(**{k: jnp.float32(v) for k, v in zip(VARIABLES, x, strict=True)})
    expected = cartpole(parameters(default) | chosen, x, right)
    for env in (made("CartPole-v1", **chosen), with_parameters(default, **chosen)):
        after = one_step(env.env, state, jnp.int32(right))
        got = np.asarray([getattr(after, variable) for variable in VARIABLES])
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


# --- derived parameters ---------------------------------------------------------------------------------------------


def test_derived_parameters_follow_wherever_their_sources_are_set():
    default = made("CartPole-v1")
    by_hand = default.replace(env=default.env.replace(params=default.env.params.replace(masscart=10.0)))
    expected = shown("gymnax:CartPole-v1", made("CartPole-v1", masscart=10.0))
    for env in (with_parameters(default, masscart=10), by_hand, made("CartPole-v1", masscart=10, total_mass=10.1)):
        assert same(shown("gymnax:CartPole-v1", env), expected)
    mapped = parameters(with_parameters(default, masscart=np.asarray([1.0, 10.0])))
    np.testing.assert_allclose(mapped["total_mass"], [1.1, 10.1], rtol=1e-6)
    traced = jax.jit(lambda length: parameters(made("CartPole-v1", length=length))["polemass_length"])(2.0)
    np.testing.assert_allclose(traced, 0.2, rtol=1e-6)
    assert to_config(default)["parameters"]["total_mass"] == 1.1


def test_a_contradiction_to_their_sources_is_refused():
    default = made("CartPole-v1")
    for refused in (
        lambda: made("CartPole-v1", total_mass=5.0),
        lambda: made("CartPole-v1", masscart=10.0, total_mass=1.1),
        lambda: with_parameters(default, total_mass=2.0),
        lambda: with_parameters(default, masspole=1.0, polemass_length=0.05),
        lambda: from_config(to_config(default) | {"parameters": to_config(default)["parameters"] | {"masscart": 10.0}}),
        lambda: jax.vmap(lambda mass: parameters(made("CartPole-v1", total_mass=mass))["gravity"])(jnp.ones(2)),
    ):
        raises(ConfigError, "=.* is computed as mass", refused)


def test_files_may_hold_parameters_that_change_nothing():
    """Runs of earlier versions do."""
    config = to_config(made("Acrobot-v1"))
    loaded = from_config(config | {"parameters": config["parameters"] | {"link_length_2": 2.0}})
    assert parameters(loaded)["link_length_2"] == 2.0


# --- types ----------------------------------------------------------------------------------------------------------


def test_a_curriculum_gives_the_types_that_the_program_has():
    env = made("Asterix-MinAtar")
    changed = with_parameters(env, ramp_interval=50.0, ramping=0, max_steps_in_episode=np.float64(7))
    assert [type(parameters(changed)[k]) for k in ("ramp_interval", "ramping")] == [int, bool]
    placed = with_parameters(jax.device_put(env), ramp_interval=50.0, ramping=False)
    assert parameters(placed)["ramp_interval"].dtype == jnp.int32 and parameters(placed)["ramping"].dtype == jnp.bool_
    for name, value in (("ramp_interval", 0.5), ("ramp_interval", np.inf), ("ramping", 0.5), ("ramping", "yes")):
        for before in (env, jax.device_put(env)):
            raises(ConfigError, f"parameter {name}=", with_parameters, before, **{name: value})


# --- probes ---------------------------------------------------------------------------------------------------------

PROBE_VALUES = {
    "reward": 2.5,
    "observation_reward": 3.0,
    "action_reward": 2.0,
    "random_observation": 1,
    "terminate_after": 3,
    "endless": 1,
    "max_steps": 1,
}


@pytest.mark.long
@pytest.mark.parametrize("name", ["Constant", "RewardIsObservation", "TwoStepDiscount", "ActionReward", "Truncated"])
def test_every_parameter_of_probes_changes_what_an_agent_sees_or_is_refused(name):
    assert set(PROBE_VALUES) == set(Probe.__dataclass_fields__) - {"continuous", "composite"}
    default = jaxrl.make(f"probe:{name}", auto_reset=None)
    for parameter, value in PROBE_VALUES.items():
        if parameters(default)[parameter] == value:
            value = 1 - value
        for change in (
            lambda **chosen: jaxrl.make(f"probe:{name}", auto_reset=None, **chosen),
            lambda **chosen: with_parameters(default, **chosen),
        ):
            try:
                env = change(**{parameter: value})
            except ConfigError as error:
                assert f"{parameter}=" in str(error) and "changes nothing" in str(error)
                ignored = default.env.replace(**{parameter: jnp.asarray(value, parameters(default)[parameter].dtype)})
                assert same(shown("probe:Constant", default.replace(env=ignored)), shown("probe:Constant", default))
            else:
                assert not same(shown("probe:Constant", env), shown("probe:Constant", default)), parameter


def test_values_of_probes_are_checked():
    for wrong in ({"terminate_after": 1.5}, {"max_steps": 0}, {"endless": 0.5}, {"reward": "much"}, {"continuous": 3}):
        raises(ConfigError, f"{next(iter(wrong))}=", jaxrl.make, "probe:TwoStepDiscount", **wrong)


# --- brax -----------------------------------------------------------------------------------------------------------


def brax_program(name, **arguments):
    """What brax computes with these arguments of its constructor, as text with constants; compiles nothing."""
    env = brax_adapter.BraxEnvironment.foreign_of(name, tuple(sorted(arguments.items())))
    key = jax.ShapeDtypeStruct((2,), np.uint32)
    with envs.suite.foreign_rules():
        state = jax.eval_shape(env.reset, key)
        action = jax.ShapeDtypeStruct((env.action_size,), np.float32)
        return str(jax.make_jaxpr(env.reset)(key)) + str(jax.make_jaxpr(env.step)(state, action))


BRAX_VALUES = {
    "asymmetric_obs": None,  # needs another obs_mode
    "backend": None,  # other physics
    "debug": None,  # what brax keeps in its own state
    "n_frames": 7,
    "obs_mode": "dict_latent_state",
    "use_contact_forces": None,  # brax raises
}


# Of the others to build the system takes seconds for every argument.
SMALL_BRAX = ("fast", "inverted_pendulum")


@pytest.mark.long
@pytest.mark.parametrize("name", brax_adapter.names())
def test_every_argument_of_brax_changes_the_program_or_is_refused(name):
    constructor = inspect.signature(brax_adapter.module()._envs[name]).parameters
    default = brax_program(name, backend="spring") if "backend" in constructor else brax_program(name)
    backend = {"backend": "spring"} if "backend" in constructor else {}
    for argument in brax_adapter.BraxEnvironment.static_parameters(name):
        value = constructor[argument].default if argument in constructor else None
        new = BRAX_VALUES[argument] if argument in BRAX_VALUES else other_than(value)
        if new is None:
            continue
        try:
            envs.make(f"brax:{name}", auto_reset=None, **backend, **{argument: new})
        except ConfigError as error:
            assert f"{argument}=" in str(error) and "changes nothing" in str(error)
            assert brax_program(name, **backend, **{argument: new}) == default
        else:
            assert brax_program(name, **backend, **{argument: new}) != default, argument


def other_than(value):
    if isinstance(value, bool):
        return not value
    return tuple(x + 0.25 for x in value) if isinstance(value, tuple) else value + 0.25


@pytest.mark.long
def test_parts_of_braxs_system_change_the_dynamics_or_are_refused():
    """brax's own backends read `gravity`, MuJoCo's `opt.gravity`: one parameter. Compiles once."""
    pytest.importorskip("brax")
    reset_and_push = jax.jit(lambda env: env.step(env.reset(jax.random.key(0))[0], jnp.ones(1), jax.random.key(1))[1])

    def made(**system):
        return envs.make("brax:inverted_pendulum", backend="spring", auto_reset=None, system=system)

    observations = [
        reset_and_push(made(**{"opt.gravity": np.asarray([0.0, 0.0, z], np.float32)})).observation
        for z in (-9.81, -1.0)
    ]
    assert not np.array_equal(*observations)
    raises(
        ConfigError, "'gravity' and 'opt.gravity'", made, gravity=[0.0, 0.0, -1.0], **{"opt.gravity": [0.0, 0.0, -1.0]}
    )
    masses = envs.make(
        "brax:inverted_pendulum", backend="spring"
    ).env.env  # of MuJoCo, which this backend does not read
    body_mass = np.asarray(masses.foreign.sys.body_mass)
    raises(ConfigError, r"\['body_mass'\].*changes not", made, body_mass=body_mass * 2)
    lighter = made(**{"opt.gravity": [0.0, 0.0, -1.0]})
    heavier = with_parameters(lighter, **{"opt.gravity": np.asarray([0.0, 0.0, -9.81])})
    np.testing.assert_array_equal(reset_and_push(heavier).observation, observations[0])


def test_limits_of_brax_episodes_are_checked():
    pytest.importorskip("brax")
    for wrong in (0, 2.5, "long", None):
        raises(ConfigError, "episode_length=", envs.make, "brax:fast", episode_length=wrong)
    raises(ConfigError, "no physical system", envs.make, "brax:fast", system={"opt.gravity": [0.0, 0.0, -1.0]})
    raises(ConfigError, "must be a dictionary", envs.make, "brax:fast", system="opt.gravity")
