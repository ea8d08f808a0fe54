"""Critics and actors: shapes, the ensemble against its members one by one, bounds, units, every field."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.refused import raises, refused

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import EnvSpec, NetworkInputs
from jaxrl.networks import (
    GRU,
    MLP,
    Actor,
    Categorical,
    Critic,
    QuantileValues,
    TanhGaussian,
    from_unit,
    to_unit,
)

T, B = 4, 3
BOX = spaces.Box(np.float32([-2, 0]), np.float32([2, 10]), (2,))
SPEC = EnvSpec("box", spaces.Box(-1, 1, (3,)), BOX)
IMAGES = EnvSpec("images", spaces.Box(0, 255, (10, 10, 2), np.uint8), BOX)
SMALL = Critic(widths=(8, 4))
POLICY = Actor(widths=(8,), gain=3.0)


def inputs(spec, seed=0):
    rng = np.random.default_rng(seed)
    space = spec.observation_space
    if space.dtype == np.uint8:
        observation = rng.integers(0, 256, (T, B, *space.shape), np.uint8)
    else:
        observation = rng.normal(size=(T, B, *space.shape)).astype(np.float32)
    return NetworkInputs(jnp.asarray(observation))


def actions(seed=1):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.uniform(BOX.low, BOX.high, (T, B, 2)), jnp.float32)


def evaluate(network, params, read, second, spec=SPEC):
    """The output of a network without model state."""
    return network.apply(params, read, second, spec=spec, model_state=(), train=False)[0]


def test_units():
    ends = jnp.stack([jnp.asarray(BOX.low), jnp.asarray(BOX.high), jnp.float32([1.0, 5.0])])
    np.testing.assert_allclose(to_unit(ends, BOX), [[-1, -1], [1, 1], [0.5, 0.0]], atol=1e-6)
    np.testing.assert_allclose(from_unit(to_unit(actions(), BOX), BOX), actions(), atol=1e-5)
    beyond = from_unit(jnp.float32([[-3.0, 7.0]]), BOX)
    np.testing.assert_array_equal(beyond, [[-2, 10]])


@pytest.mark.long
def test_members_begin_apart_and_learn_apart():
    params, _ = SMALL.init(jax.random.key(0), SPEC)
    values = evaluate(SMALL, params, inputs(SPEC), actions())
    assert jnp.abs(values[0] - values[1]).max() > 1e-2
    gradients = jax.grad(lambda p: evaluate(SMALL, p, inputs(SPEC), actions())[0].sum())(params)
    kernel = gradients["head"]["advantage"]["output"]["kernel"]
    assert jnp.abs(kernel[0]).max() > 0 and jnp.abs(kernel[1]).max() == 0


def test_images_are_read_by_a_cnn_and_by_the_torso_asked_for():
    for torso in (None, MLP((5,))):
        critic, policy = dataclasses.replace(SMALL, torso=torso), dataclasses.replace(POLICY, torso=torso)

        def run(key, timesteps, action, critic=critic, policy=policy):
            values = evaluate(critic, critic.init(key, IMAGES)[0], timesteps, action, IMAGES)
            return values, evaluate(policy, policy.init(key, IMAGES)[0], timesteps, (), IMAGES).mean

        values, mean = jax.eval_shape(run, jax.random.key(0), inputs(IMAGES), actions())
        assert values.shape == (2, T, B, 1) and mean.shape == (T, B, 2)


@pytest.mark.long
def test_policies_stay_within_the_box_and_begin_in_its_middle():
    middle = np.broadcast_to([0.0, 5.0], (T, B, 2))
    for stochastic in (True, False):
        for gain in (0.001, 100.0):
            policy = Actor(widths=(8,), stochastic=stochastic, gain=gain)
            output = evaluate(policy, policy.init(jax.random.key(0), SPEC)[0], inputs(SPEC), ())
            assert policy.initial_carry(SPEC) == () and isinstance(output, TanhGaussian) == stochastic
            action = np.asarray(output.mode() if stochastic else output)
            assert (action >= BOX.low).all() and (action <= BOX.high).all()
            if gain < 1:
                np.testing.assert_allclose(action, middle, atol=0.05)
            else:
                assert np.abs(to_unit(jnp.asarray(action), BOX)).max() > 0.9


def test_the_deviation_depends_on_the_observation():
    output = evaluate(POLICY, POLICY.init(jax.random.key(0), SPEC)[0], inputs(SPEC), ())
    assert output.log_std.std() > 1e-2


def test_a_range_squashes_the_deviation():
    """By tanh, as the codes of several soft actor-critics have it; the same parameters."""
    params = POLICY.init(jax.random.key(0), SPEC)[0]
    free, within = (
        evaluate(dataclasses.replace(POLICY, log_std_range=ends), params, inputs(SPEC), ()).log_std
        for ends in (None, (-5.0, 1.0))
    )
    np.testing.assert_allclose(within, -5.0 + 3.0 * (1.0 + np.tanh(free)), rtol=1e-5)
    for wrong in ((1.0, -5.0), (-5.0,), (-np.inf, 0.0), ("a", 1.0)):
        refused(lambda ends=wrong: dataclasses.replace(POLICY, log_std_range=ends), "Actor.log_std_range")
    refused(lambda: Actor(stochastic=False, log_std_range=(-5.0, 1.0)), "has no standard deviation")


@pytest.mark.long
@pytest.mark.parametrize("network", [SMALL, POLICY], ids=["critic", "policy"])
def test_every_field_changes_the_program(network):
    other = {"torso": MLP((3,)), "widths": (5,), "activation": "tanh", "normalization": "layer"}
    other |= {"ensemble": 3, "stochastic": False, "gain": 2.0, "initial_log_std": -1.0, "log_std_range": (-5.0, 1.0)}
    other |= {"head": QuantileValues(3), "dtype": "bfloat16"}
    other |= {"core": GRU(3), "previous_action": True, "previous_reward": True}
    other |= {"normalize_inputs": True, "trunk": MLP((3,))}

    def program(changed):
        def run(key, action):
            params, _ = changed.init(key, SPEC)
            if changed.requires != network.requires:  # what these inputs lack; tests/algos/test_histories.py has it
                return params
            second = action if isinstance(changed, Critic) else ()
            return params, evaluate(changed, params, inputs(SPEC), second)

        return str(jax.make_jaxpr(run)(jax.random.key(0), actions()))

    for field in dataclasses.fields(network):
        if field.name in ("observation_keys", "dropout"):
            continue  # of dictionary observations, below; of learning alone, in tests/algos/test_sac_parts.py
        # Where inputs are normalized matters to networks that normalize.
        base = dataclasses.replace(network, normalization="layer") if field.name == "normalize_inputs" else network
        changed = dataclasses.replace(base, **{field.name: other[field.name]})
        assert program(changed) != program(base), field.name


@pytest.mark.long
def test_of_a_discrete_space_a_member_says_what_every_action_is_worth():
    spec = EnvSpec("discrete", SPEC.observation_space, spaces.Discrete(3))
    mask = jnp.broadcast_to(jnp.asarray([True, False, True]), (T, B, 3))
    timesteps = inputs(SPEC).replace(action_mask=mask)
    params, _ = SMALL.init(jax.random.key(0), spec)
    values = evaluate(SMALL, params, timesteps, None, spec)
    assert values.shape == (2, T, B, 3)
    assert (values[..., 1] == jnp.finfo(jnp.float32).min).all() and jnp.abs(values[..., ::2]).max() < 1e3
    free = evaluate(SMALL, params, inputs(SPEC), None, spec)
    np.testing.assert_array_equal(free[..., ::2], values[..., ::2])

    policy = evaluate(POLICY, POLICY.init(jax.random.key(0), spec)[0], timesteps, (), spec)
    probabilities = jnp.exp(policy.log_probs())
    assert isinstance(policy, Categorical) and (probabilities[..., 1] == 0).all()
    np.testing.assert_allclose(probabilities.sum(axis=-1), 1.0, rtol=1e-5)
    refused(lambda: Actor(stochastic=False).init(jax.random.key(0), spec), "stochastic=False")


def test_unbounded_actions_are_refused():
    for space in (spaces.MultiDiscrete((3, 2)), spaces.Box(-np.inf, np.inf, (2,)), spaces.Box(-1, 1, (2, 2))):
        for network in (SMALL, POLICY):
            raises(
                ConfigError, "Box|bounds", network.init, jax.random.key(0), EnvSpec("x", SPEC.observation_space, space)
            )


def test_an_empty_ensemble_is_refused():
    refused(lambda: Critic(ensemble=0), "ensemble=0")


@pytest.mark.long
def test_the_members_of_an_ensemble_keep_batch_statistics_of_their_own():
    critic = dataclasses.replace(SMALL, normalization="batch")
    params, state = critic.init(jax.random.key(0), SPEC)
    assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(state))
    _, trained = critic.apply(params, inputs(SPEC), actions(), spec=SPEC, model_state=state, train=True)
    mean = trained["hidden"]["norm_0"]["mean"]
    assert jnp.abs(mean[0] - mean[1]).max() > 1e-4 and jnp.abs(mean).min() > 0
    values, kept = critic.apply(params, inputs(SPEC), actions(), spec=SPEC, model_state=trained, train=False)
    jax.tree.map(np.testing.assert_array_equal, kept, trained)
    assert values.shape == (2, T, B, 1)


@pytest.mark.long
def test_actor_and_critic_may_read_different_keys_of_the_observation():
    privileged = spaces.Box(-1, 1, (5,))
    spec = EnvSpec("states", spaces.Dict({"state": SPEC.observation_space, "privileged_state": privileged}), BOX)
    policy = dataclasses.replace(POLICY, observation_keys=["state"])
    params, _ = policy.init(jax.random.key(0), spec)
    assert params["hidden"]["layer_0"]["kernel"].shape[0] == 3
    params, _ = SMALL.init(jax.random.key(0), spec)
    assert "encode_state" in params["body"]["torso"]
    critic = dataclasses.replace(SMALL, observation_keys=("privileged_state",))
    params, _ = critic.init(jax.random.key(0), spec)
    assert params["hidden"]["layer_0"]["kernel"].shape[1] == 5 + 2
    refused(
        lambda: dataclasses.replace(SMALL, observation_keys=("privileged",)).init(jax.random.key(0), spec),
        "privileged_state",
    )
