"""MuZero: whole updates against numpy in float64, its targets at ends, and runs that learn and resume."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.on_policy import ACTIONS, SPEC, broken_moments, collect, learner
from helpers.oracle import affine, close, exact, gradient, rescaled
from helpers.programs import resumed
from scipy.special import log_softmax

import jaxrl
from jaxrl.algos import q_learning
from jaxrl.algos.search import TreeSearch
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import SequenceBatch
from jaxrl.networks import MLP, ModelNetwork
from jaxrl.parallel.replicas import SingleReplica

RATE, GAMMA, UNROLL, N, EDGE, ATOMS, COST = 0.1, 0.9, 2, 2, 3.0, 7, 0.4
LENGTH = UNROLL + N + 1
NETWORK = ModelNetwork(MLP((4,)), width=3, widths=(4,), activation="tanh", atoms=ATOMS)
ALGO = jaxrl.MuZero(
    learning_rate=RATE,
    optimizer=optax.sgd,
    max_grad_norm=None,
    gamma=GAMMA,
    unroll_steps=UNROLL,
    n_step=N,
    v_min=-EDGE,
    v_max=EDGE,
    value_cost=COST,
    tree_search=TreeSearch(simulations=4, epsilon=0.0),
    network=NETWORK,
)
KEY = jax.random.key(7)


def stack(layers, x):
    return affine(layers["output"], np.tanh(affine(layers["hidden"]["layer_0"], x)))


def scaled(raw):
    low, high = raw.min(-1, keepdims=True), raw.max(-1, keepdims=True)
    return (raw - low) / (high - low + 1e-5)


def represented(params, observation):
    hidden = np.tanh(affine(params["torso"]["torso"]["dense"]["layer_0"], observation))
    return scaled(affine(params["encode"], hidden))


def followed(params, latent, action):
    chosen = np.concatenate([latent, np.eye(ACTIONS)[action]], -1)
    return scaled(latent + stack(params["dynamics"], chosen))


def two_hot(x):
    low, high = rescaled(-EDGE), rescaled(EDGE)
    place = (np.clip(rescaled(x), low, high) - low) / (high - low) * (ATOMS - 1)
    below = min(int(np.floor(place)), ATOMS - 2)
    found = np.zeros(ATOMS)
    found[below], found[below + 1] = below + 1 - place, place - below
    return found


@functools.cache
def batch_and_state(discounted):
    """Two windows of made-up experience, acted by other parameters than the learner's, with endings of each kind."""
    acted, state = learner(ALGO, 1), learner(ALGO, 0)
    resolved = resolve_schedules(ALGO, jnp.float32(0))
    rollout = collect(ALGO, resolved.actor(acted), broken_moments(), jax.random.key(3))
    parts = rollout.rows, rollout.timesteps[:-1]
    windows = [jax.tree.map(lambda x, at=at: x[at : at + LENGTH], parts) for at in (0, 4)]
    rows, timesteps = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *windows)
    if discounted:
        own = jnp.linspace(-1.0, 1.0, rows.weight.size, dtype=jnp.float32).reshape(rows.weight.shape)
        rows = rows.replace(discount=jnp.where(rows.weight & ~rows.terminated, own, 0.0))
    return SequenceBatch(rows, timesteps, jnp.ones(rows.weight.shape, bool), (), None), state


def targets_of(rows, random):
    """What each column of a batch is to learn: for each unrolled step, by plain loops."""
    found = []
    for b in range(rows.weight.shape[1]):
        column = jax.tree.map(lambda x, b=b: np.asarray(x)[:, b], rows)
        real, over, steps = True, False, []
        for k in range(UNROLL + 1):
            real = real and bool(column.weight[k])
            at, total, reach, goes_on = k, 0.0, 1.0, True
            for _ in range(N):
                if not column.weight[at]:
                    break
                total += reach * column.reward[at]
                reach *= GAMMA * (1.0 if column.discount is None else column.discount[at])
                at += 1
                if column.terminated[at - 1]:
                    goes_on = False
                if column.terminated[at - 1] or column.truncated[at - 1]:
                    break
            total += reach * column.extras["search_value"][at] if goes_on else 0.0
            action = column.action[k] if real else random[k, b] if k < UNROLL else 0
            reward, discount = column.reward[k] if real else 0.0, 0.0
            if real and column.discount is not None:
                discount = column.discount[k]
            policy = column.extras["search_policy"][k]
            steps.append(
                (real, real or over, two_hot(total if real else 0.0), two_hot(reward), policy, action, discount)
            )
            over = over or (real and bool(column.terminated[k]))
        found.append(steps)
    return found


@pytest.mark.long
@pytest.mark.parametrize("discounted", [False, True])
def test_a_whole_update(discounted):
    batch, state = batch_and_state(discounted)
    keys = q_learning.transition_keys(KEY, batch.mask.shape[1], SingleReplica())
    draw = jax.vmap(lambda k: jax.random.randint(k, (UNROLL,), 0, ACTIONS, jnp.int32), out_axes=1)
    steps = targets_of(batch.rows, np.asarray(draw(keys)))
    kinds = {(one[k][0], one[k][1]) for one in steps for k in range(UNROLL + 1) if one[0][0]}
    assert kinds == {(True, True), (False, True), (False, False)}, "an end of each kind within the unrolled steps"
    observation = np.asarray(batch.rows.observation[0], np.float64)
    count = sum(one[0][0] for one in steps)

    def unrolled(params, fixed=None):
        """The states of each unrolled step; half of each is `fixed`, so that half of its gradient passes on."""
        latents = [represented(params, observation)]
        for k in range(UNROLL):
            latent = latents[-1] if fixed is None else 0.5 * (latents[-1] + fixed[k])
            latents.append(followed(params, latent, np.array([one[k][5] for one in steps])))
        return latents

    fixed = unrolled(exact(state.network.params))

    def parts(params):
        total = {"policy_loss": 0.0, "value_loss": 0.0, "reward_loss": 0.0}
        total |= {"discount_loss": 0.0} if discounted else {}
        for k, latent in enumerate(unrolled(params, fixed)):
            scale = 1.0 if k == 0 else 1.0 / UNROLL
            said = {name: log_softmax(stack(params[name], latent), -1) for name in ("policy", "value", "reward")}
            for b, one in enumerate(steps):
                if not one[0][0]:
                    continue
                real, known, value, _, policy, *_ = one[k]
                total["policy_loss"] -= scale * real * (policy * said["policy"][b]).sum() / count
                total["value_loss"] -= scale * known * (value * said["value"][b]).sum() / count
                if k:  # known where the step was taken, also if it was cut off after it, or the episode was over
                    _, taken, _, reward, *_, discount = one[k - 1]
                    total["reward_loss"] -= scale * taken * (reward * said["reward"][b]).sum() / count
                if k and discounted:
                    error = stack(params["discount"], latent)[b, 0] - discount
                    total["discount_loss"] += scale * taken * error**2 / count
        return total

    def loss(params):
        found = parts(params)
        return sum((COST if name == "value_loss" else 1.0) * x for name, x in found.items())

    algo = resolve_schedules(ALGO, jnp.float32(0))
    new, info = jax.jit(
        lambda state, batch: algo.update(state, {"replay": batch}, spec=SPEC, key=KEY, replicas=SingleReplica())
    )(state, batch)
    for name, value in parts(exact(state.network.params)).items():
        np.testing.assert_allclose(info.metrics[name], value, rtol=2e-5, err_msg=name)
    wanted = jax.tree.map(
        lambda x, g: np.asarray(x) - RATE * g, state.network.params, gradient(loss, state.network.params)
    )
    close(new.network.params, wanted)


def test_scalars_come_back_from_their_atoms():
    x = jnp.asarray([[-3.0, -0.7], [0.0, 2.9]])
    found = ALGO._scalar(jnp.log(ALGO._two_hot(x) + 1e-12))
    np.testing.assert_allclose(found, x, atol=0.2)  # the atoms are few, and the transform is not linear between them
    np.testing.assert_allclose(ALGO._scalar(jnp.log(ALGO._two_hot(x) + 1e-12))[0, 0], -3.0, atol=1e-3)


SMALL = ALGO.replace(
    optimizer=jaxrl.algos.optimizers.Adam(),
    learning_rate=1e-2,
    tree_search=TreeSearch(simulations=6, epsilon=0.0),
    capacity=4_096,
    min_size=256,
    batch_size=32,
    replay_ratio=1 / 16,
    v_min=-2.0,
    v_max=2.0,
    network=ModelNetwork(MLP((16,)), width=8, widths=(16,), atoms=11),
)


def test_it_learns_and_resumes_bit_for_bit(tmp_path):
    whole = resumed(tmp_path, SMALL, "probe:ActionReward", 4_096, num_envs=16, evaluation_episodes=16)
    assert whole.evaluation.return_mean == 1.0
    assert whole.policy(np.zeros(1, np.float32))[0] == 0
