"""Optimizers: steps against the papers, their numbers traced, and any transformation of optax in their place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.programs import Interrupt, assert_equal
from helpers.refused import refused

import jaxrl
from jaxrl.algos import optimizers, train_state
from jaxrl.algos.optimizers import OPTIMIZERS, Adam, AdamW, LaProp, Muon, RMSProp, clip_by_norm, clipped
from jaxrl.core.config import decode, encode
from jaxrl.networks import MLP, ActorCritic, Critic
from jaxrl.parallel.replicas import SingleReplica

ONE = SingleReplica(1)
SMALL = ActorCritic(MLP((4,)))


def steps(transformation, params, gradients):
    """The parameters after a step down each of the gradients."""
    state = train_state.create(params, (), transformation)
    for gradient in gradients:
        state, _ = train_state.apply_gradients(state, gradient, transformation, ONE)
    return state.params


def test_adam_takes_the_textbook_step():
    state, m, v, x = train_state.create(jnp.asarray([1.0]), (), Adam()(0.1)), 0.0, 0.0, 1.0
    for t, g in enumerate([0.5, -2.0, 1.0], 1):
        state, _ = train_state.apply_gradients(state, jnp.asarray([g]), Adam(b1=0.9, b2=0.99, eps=1e-8)(0.1), ONE)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        x -= 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
        np.testing.assert_allclose(state.params, [x], rtol=1e-5)


def test_adamw_decays_weights_by_the_learning_rate_apart_from_the_gradient():
    rules = Adam(eps=1e-8), AdamW(eps=1e-8, weight_decay=0.2)
    plain, decayed = (steps(rule(0.1), jnp.asarray([3.0]), [jnp.asarray([0.5])]) for rule in rules)
    np.testing.assert_allclose(decayed, plain - 0.1 * 0.2 * 3.0, rtol=1e-6)


def test_rmsprop_has_its_eps_where_it_is_told():
    """In the root as tensorflow has it, or outside as torch has it."""
    g = np.asarray([0.01, -2.0])
    for in_root, divisor in ((True, lambda v: np.sqrt(v + 0.1)), (False, lambda v: np.sqrt(v) + 0.1)):
        rule = RMSProp(decay=0.9, eps=0.1, eps_in_root=in_root)
        average, expected = 0.0, np.zeros(2)
        for _ in range(2):
            average = 0.9 * average + 0.1 * g**2
            expected -= 0.5 * g / divisor(average)
        stepped = steps(rule(0.5), jnp.zeros(2), [jnp.asarray(g, jnp.float32)] * 2)
        np.testing.assert_allclose(stepped, expected, rtol=1e-5)


def test_laprop_normalizes_before_it_averages_and_clips_by_each_arrays_own_norm():
    """LaProp's algorithm 1 without its centering, after clipping of whole arrays, with a rate that grows at first."""
    params = {"big": np.asarray([3.0, -4.0]), "small": np.zeros(2)}
    draw = np.random.default_rng(0)
    gradients = [{name: draw.normal(size=2) * scale for name in params} for scale in (5.0, 0.1, 1e-6, 30.0)]
    rule = LaProp(b1=0.8, b2=0.9, eps=1e-20, clip=0.3, warm_up=2.0)
    found = steps(rule(0.1), *jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, gradients)))
    m, v = ({name: np.zeros(2) for name in params} for _ in range(2))
    clipped_once = False
    for t, gradient in enumerate(gradients, 1):
        for name, x in params.items():
            g, limit = gradient[name], 0.3 * max(np.linalg.norm(x), 1e-3)
            clipped_once |= np.linalg.norm(g) > limit
            g = g * min(1.0, limit / np.linalg.norm(g))
            v[name] = 0.9 * v[name] + 0.1 * g**2
            m[name] = 0.8 * m[name] + 0.2 * g / np.sqrt(v[name] / (1 - 0.9**t))
            params[name] = x - 0.1 * min((t - 1) / 2, 1.0) * m[name] / (1 - 0.8**t)
    assert clipped_once
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, params)
    free = LaProp(clip=None)(0.1), LaProp(clip=1e9)(0.1)
    one, other = (steps(each, jnp.ones(2), [jnp.asarray([5.0, 1.0])] * 2) for each in free)
    np.testing.assert_array_equal(one, other)


@pytest.mark.long
def test_muon_orthogonalizes_kernels_alone():
    """Of an ensemble each member's, and biases are Adam's, though an ensemble's are matrices too."""
    spec = jaxrl.core.types.env_spec(jaxrl.make("gymnax:Pendulum-v1"))
    params, _ = Critic(widths=(8, 8)).init(jax.random.key(0), spec)
    gradients = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), params)
    new = steps(Muon(eps=1e-7)(1.0), params, [gradients])
    adam = steps(optax.nadam(1.0, eps=1e-7), params, [gradients])
    step = jax.tree.map(jnp.subtract, params, new)["hidden"]["layer_1"]
    np.testing.assert_allclose(new["hidden"]["layer_1"]["bias"], adam["hidden"]["layer_1"]["bias"], rtol=1e-5)
    singular = np.linalg.svd(step["kernel"], compute_uv=False)
    assert singular.shape == (2, 8) and (singular > 0.6).all() and (singular < 1.3).all(), "near 1: Newton and Schulz"
    for member in range(2):
        u, _, v = np.linalg.svd(gradients["hidden"]["layer_1"]["kernel"][member])
        assert np.sum(step["kernel"][member] * (u @ v)) > 0.9 * 8 * singular[member].mean() / 1.1


def test_joint_clipping_is_by_the_global_norm_and_the_value_has_its_own_rate():
    params = {"policy": {"w": jnp.zeros(2)}, "value": {"w": jnp.zeros(2)}}
    gradients = {"policy": {"w": jnp.asarray([3.0, 0.0])}, "value": {"w": jnp.asarray([0.0, 4.0])}}
    rule = RMSProp(decay=0.0, eps=1.0)  # g / sqrt(g^2 + 1)
    algo = jaxrl.PPO(
        optimizer=rule, learning_rate=0.1, value_learning_rate=1.0, max_grad_norm=1.0, joint_grad_norm=True
    )
    state = train_state.create(params, (), algo.transformation)
    state, norm = train_state.apply_gradients(state, gradients, algo.transformation, ONE)
    assert norm == pytest.approx(5.0)
    np.testing.assert_allclose(state.params["policy"]["w"], [-0.1 * 0.6 / np.sqrt(0.36 + 1), 0.0], rtol=1e-5)
    np.testing.assert_allclose(state.params["value"]["w"], [0.0, -0.8 / np.sqrt(0.64 + 1)], rtol=1e-5)


def test_the_global_norm_is_that_of_all_leaves_small_and_large():
    random = np.random.default_rng(0)
    tree = {"a": random.normal(size=(200, 100)), "b": random.normal(size=3), "c": [random.normal(size=(4, 5)), ()]}
    expected = np.sqrt(sum(np.sum(np.square(x)) for x in (tree["a"], tree["b"], tree["c"][0])))
    tree = jax.tree.map(jnp.float32, tree)
    np.testing.assert_allclose(optimizers.global_norm(tree), expected, rtol=1e-6)
    mixed = {"a": jnp.ones(4, jnp.bfloat16), "b": jnp.ones(5, jnp.float32)}
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_allclose(optimizers.global_norm(mixed), 3.0, rtol=1e-6)
        assert optimizers.global_norm({}) == 0.0


def test_clipping_leaves_what_is_small_enough():
    gradient = jnp.asarray([0.3, -0.4])
    for limit in (None, 0.6, jnp.float32(0.6)):
        np.testing.assert_array_equal(steps(clipped(optax.sgd(1.0), limit), jnp.zeros(2), [gradient]), -gradient)
    np.testing.assert_allclose(
        steps(clipped(optax.sgd(1.0), 0.25), jnp.zeros(2), [gradient]), -0.5 * gradient, rtol=1e-6
    )


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1.0, 1e8])
def test_clipping_is_optax_own(scale):
    gradients = {"a": scale * jnp.asarray([3.0, -4.0]), "b": scale * jnp.asarray([[12.0]])}
    own, of_optax = (
        clip.update(gradients, clip.init(gradients))[0] for clip in (clip_by_norm(6.5), optax.clip_by_global_norm(6.5))
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), own, of_optax)


@pytest.mark.long
@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_rates_and_numbers_are_traced(cls):
    """One program serves all learning rates and all numbers of an optimizer, also mapped over them."""
    traces = []

    @jax.jit
    def stepped(rule, rate):
        traces.append(None)
        params = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
        return steps(rule(rate), params, [jax.tree.map(lambda x: 0.5 * x, params)] * 2)

    rules = [jax.tree.map(lambda x, by=by: jnp.float32(x * by), cls()) for by in (1.0, 0.9)]
    alone = [stepped(rule, jnp.float32(rate)) for rule, rate in zip(rules, (0.1, 0.2), strict=True)]
    assert len(traces) == 1
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *rules)
    together = jax.vmap(stepped)(stacked, jnp.asarray([0.1, 0.2], jnp.float32))
    for i, one in enumerate(alone):
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(b[i], a, rtol=1e-5), one, together)
    assert not np.allclose(alone[0]["bias"], alone[1]["bias"])


def noisy(learning_rate):
    return optax.chain(optax.add_noise(0.01, 0.55, jax.random.key(0)), optax.sgd(learning_rate, momentum=0.9))


@pytest.mark.parametrize("optimizer", [optax.lion, noisy, functools.partial(optax.adam, b1=0.5)])
def test_any_transformation_of_optax_trains_and_resumes(optimizer, tmp_path):
    algo = jaxrl.PPO(optimizer=optimizer, rollout_length=8, network=SMALL, value_learning_rate=1e-3)

    def trained(name, *loggers):
        settings = {"loggers": loggers, "evaluate_every": 0, "checkpoint_every": 64, "progress": False}
        settings |= {"run_dir": tmp_path / name, "topology": jaxrl.Anakin(num_envs=8, devices=1)}
        return jaxrl.train(algo, "gymnax:CartPole-v1", total_steps=512, **settings)

    whole = trained("whole")
    assert any(row.get("update/gradient_norm", 0.0) > 0.0 for row in whole.metrics)
    assert trained("halved", Interrupt(128)).stopped == "interrupted"
    again = trained("halved")
    assert whole.stopped == again.stopped == "finished"
    assert_equal(whole.state.learner, again.state.learner)


def test_a_function_is_static_and_its_learning_rate_is_not():
    algo = jaxrl.PPO(optimizer=optax.lion)
    assert algo.replace(gamma=0.5).optimizer == algo.optimizer == jaxrl.PPO(optimizer=optax.lion).optimizer
    leaves, structure = jax.tree.flatten(algo)
    assert all(isinstance(leaf, float) for leaf in leaves)
    assert structure == jax.tree.structure(jaxrl.PPO(optimizer=optax.lion)) != jax.tree.structure(jaxrl.PPO())
    assert steps(algo.optimizer(0.25), jnp.zeros(1), [jnp.ones(1)]) == pytest.approx(-0.25), "steps of lion are signs"


def test_a_function_cannot_be_read_back_from_a_file():
    algo = jaxrl.PPO(optimizer=optax.lion)
    refused(lambda: decode(encode(algo)), "config.json")


@pytest.mark.parametrize("wrong", [optax.adam(1e-3), "adam", lambda rate: rate])
def test_what_is_no_optimizer_is_refused_before_anything_is_compiled(wrong):
    refused(
        lambda: jaxrl.train(jaxrl.PPO(optimizer=wrong), "gymnax:CartPole-v1", total_steps=64, num_envs=2),
        "PPO.optimizer",
    )
