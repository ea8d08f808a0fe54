"""Rollouts of made-up time steps, with endings of each kind, as on-policy algorithms would collect them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import spaces
from jaxrl.core.keys import root_key
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import EnvSpec, Rollout, TimeStep
from jaxrl.parallel.replicas import MeshReplicas, SingleReplica
from jaxrl.parallel.rollout import first_timestep, with_previous_action

T, B, ACTIONS = 9, 8, 3
SPEC = EnvSpec("test", spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(ACTIONS))


def learner(algo, seed=0, spec=SPEC):
    return resolve_schedules(algo, jnp.float32(0)).init(root_key(seed), spec)


def moments(seed=0, shape=(T + 1, B)):
    """Return random time steps that keep the row convention, with both endings, time-major; rewards of about 3."""
    rng = np.random.default_rng(seed)
    terminated, truncated = rng.random(shape) < 0.15, rng.random(shape) < 0.15
    truncated &= ~terminated
    first = np.zeros(shape, bool)
    first[1:] = (terminated | truncated)[:-1]
    terminated, truncated = terminated & ~first, truncated & ~first
    first[1:] = (terminated | truncated)[:-1]
    return TimeStep(
        observation=jnp.asarray(rng.uniform(-1, 1, (*shape, 3)), jnp.float32),
        reward=jnp.asarray(np.where(first, 0.0, rng.normal(size=shape) * 1.5), jnp.float32),
        terminated=jnp.asarray(terminated),
        truncated=jnp.asarray(truncated),
        first=jnp.asarray(first),
    )


def broken_moments():
    """Return time steps of which environment 0 restarts at step 6, though none before was its episode's last."""
    timesteps = jax.tree.map(np.array, moments())
    for name in ("terminated", "truncated", "first"):
        getattr(timesteps, name)[3:, 0] = False
    timesteps.first[6, 0] = True
    timesteps.reward[6, 0] = 0.0
    return jax.tree.map(jnp.asarray, timesteps)


class Data:
    """A rollout in numpy: time steps [T + 1, B], actions and what was done [T, B]."""

    def __init__(self, rollout):
        steps = rollout.timesteps
        self.observation = np.asarray(steps.observation, np.float64)
        self.action = np.asarray(rollout.action)
        last, first = np.asarray(steps.last), np.asarray(steps.first)
        self.reward = np.asarray(steps.reward, np.float64)[1:]
        self.terminated, self.truncated = np.asarray(steps.terminated)[1:], np.asarray(steps.truncated)[1:]
        self.counts = ~last[:-1] & ~first[1:]
        self.acting = self.counts & np.asarray(True if rollout.active is None else rollout.active)
        broke = ~last[:-1] & first[1:]
        kinds = (self.counts & self.terminated, self.counts & self.truncated, self.counts[-1], last[:-1], broke)
        assert all(kind.any() for kind in kinds), "an ending of each kind"

    def following(self, t, b):
        """Yield the steps from `t` on that belong to the same stretch of experience."""
        while t < T and self.counts[t, b]:
            yield t
            if self.terminated[t, b] or self.truncated[t, b]:
                return
            t += 1

    def error(self, gamma, values, t, b):
        """Return the temporal-difference error of step `t`."""
        return self.reward[t, b] + gamma * (0.0 if self.terminated[t, b] else values[t + 1, b]) - values[t, b]


def vtrace(algo, data, values, rhos):
    """Return targets and advantages [T, B], both as sums over what follows (Espeholt et al., 2018, equation 1)."""
    targets, advantages = values[:-1].copy(), np.zeros((T, B))
    for s, b in np.argwhere(data.counts):
        trace = 1.0
        for t in data.following(s, b):
            clipped = min(algo.clip_rho, rhos[t, b])
            targets[s, b] += algo.gamma ** (t - s) * trace * clipped * data.error(algo.gamma, values, t, b)
            trace *= algo.trace_lambda * min(algo.clip_c, rhos[t, b])
    for s, b in np.argwhere(data.counts):
        inside = len(list(data.following(s, b))) > 1
        after = targets[s + 1, b] if inside else values[s + 1, b]
        after = 0.0 if data.terminated[s, b] else after
        error = data.reward[s, b] + algo.gamma * after - values[s, b]
        advantages[s, b] = min(algo.clip_pg_rho, rhos[s, b]) * error
    return targets, advantages


@functools.partial(jax.jit, static_argnames="spec")
def collect(algo, actor, timesteps, key, spec=SPEC):
    """Return what a topology would collect, acting with `actor`, in environments that show `timesteps` in any case."""
    algo = resolve_schedules(algo, jnp.float32(0))
    time, envs = timesteps.reward.shape
    start = jax.vmap(lambda index: algo.initial_carry(spec, index, envs))(jnp.arange(envs))
    first = first_timestep(jax.tree.map(lambda x: x[0], timesteps), spec)

    def step(moment, inputs):
        (timestep, carry), (following, keys) = moment, inputs
        output = algo.act(actor, timestep, carry, keys, spec=spec, explore=True)
        return (with_previous_action(following, output.action), output.carry), (timestep, output.action, output.extras)

    inputs = jax.tree.map(lambda x: x[1:], timesteps), jax.random.split(key, (time - 1, envs))
    (final, final_carry), (seen, actions, extras) = jax.lax.scan(step, (first, start), inputs)
    seen = jax.tree.map(lambda x, last: jnp.concatenate([x, last[None]]), seen, final)
    return Rollout(seen, actions, extras, carry=start, final_carry=final_carry, statistics=actor.statistics)


@functools.partial(jax.jit, static_argnames="spec")
def updated(algo, state, rollout, spec=SPEC):
    """Make an update; it is compiled once for all numbers of an algorithm."""
    algo = resolve_schedules(algo, jnp.float32(0))
    batch = {"rollout": rollout}
    return algo.update(state, batch, spec=spec, key=jax.random.key(0), replicas=SingleReplica())


@functools.partial(jax.jit, static_argnames="spec")
def updated_on_two(algo, state, rollout, spec=SPEC):
    """Make an update, of which two devices hold half of the environments each.

    The result is the same on both devices, for else `vmap` objects to `out_axes=None`.
    """
    algo = resolve_schedules(algo, jnp.float32(0))

    def halved(x, axis):
        return jnp.moveaxis(x.reshape(*x.shape[:axis], 2, -1, *x.shape[axis + 1 :]), axis, 0)

    def update(half):
        half = half.replace(statistics=rollout.statistics)
        key, replicas = jax.random.key(0), MeshReplicas("device")
        return algo.update(state, {"rollout": half}, spec=spec, key=key, replicas=replicas)

    by_time = jax.tree.map(lambda x: halved(x, 1), (rollout.timesteps, rollout.action, rollout.extras))
    carries = jax.tree.map(lambda x: halved(x, 0), (rollout.carry, rollout.final_carry))
    return jax.vmap(update, axis_name="device", out_axes=None)(Rollout(*by_time, *carries))
