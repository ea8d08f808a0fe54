"""The acting loop for host environments: like `jaxrl.parallel.rollout.unroll`, but with one compiled call per step.

Each call also writes its time step into the rollout on the device, in place, so that rollouts need not be assembled
from separate steps.
"""

import dataclasses
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import keys
from jaxrl.core.types import ActorState, Algorithm, EnvSpec, PyTree, Rollout, TimeStep
from jaxrl.parallel import rollout as ro

# A function that sends numpy actions to the environments, and returns a function that waits for the next time step.
Step = Callable[[PyTree], Callable[[], TimeStep[np.ndarray]]]
Storage = tuple[TimeStep[jax.Array], PyTree, PyTree]  # a rollout's time steps [T + 1, B], actions and extras [T, B]

# Every index is unique. Indices past the last environment are padding: they read arbitrary values and write nothing.
_READ: dict[str, Any] = {"mode": "clip", "unique_indices": True}
_WRITTEN: dict[str, Any] = {"mode": "drop", "unique_indices": True}


@dataclasses.dataclass
class HostActing:
    """The acting state of host environments, the counterpart of `Acting`.

    Attributes:
      timestep: current time step of the environments, numpy arrays of shape `[B, ...]`.
      previous_action, carry: arrays of shape `[B, ...]` on the device that acts.
      roots: root keys for sampling actions, shape `[B]`.
      steps_per_env: number of steps of each environment so far, which is folded into `roots` for every step.
      extras: names of the extras that `act` returns; a complete rollout may have more.
    """

    timestep: TimeStep[np.ndarray]
    previous_action: PyTree
    carry: PyTree
    roots: jax.Array
    steps_per_env: int = 0
    extras: tuple[str, ...] = ()

    def tick(self, number: int = 0) -> np.uint32:
        """Return the integer to fold into the keys of a step: the next one if `number` is 0, the one after it if 1."""
        return np.uint32((self.steps_per_env + number) % 2**32)

    def storage(self, rollout: Rollout) -> Storage:
        """Return the arrays of a rollout that is no longer needed, to store the next rollout in them."""
        return rollout.timesteps, rollout.action, {name: rollout.extras[name] for name in self.extras}


@dataclasses.dataclass(frozen=True)
class HostSteps:
    """The compiled functions for acting in host environments. Hashable, as it is a static argument of these functions.

    Args:
      spec: the spec of the environments.
      num_envs: total number of environments in the run.
      group: number of environments that these functions act for.
      length: number of steps in a rollout.
      explore: True to sample actions as in training, False to take the best actions.
    """

    spec: EnvSpec
    num_envs: int
    group: int
    length: int
    explore: bool = True

    @partial(jax.jit, static_argnums=0)
    def roots(self, key: jax.Array, env_index: jax.Array) -> jax.Array:
        """Return the root keys [group] for sampling actions."""
        return keys.policy_keys(key, env_index)

    # In this function and in `storage`, `keep_unused` puts outputs that do not depend on the arguments on the device of
    # the arguments. The outputs of `act` are on this device, too, so `act` is compiled only once.
    @partial(jax.jit, static_argnums=0, keep_unused=True)
    def beginnings(self, algo: Algorithm, env_index: jax.Array) -> tuple[PyTree, PyTree]:
        """Return the initial carry, and zeros as the previous action, for the first time step."""
        carry = jax.vmap(lambda index: algo.initial_carry(self.spec, index, self.num_envs))(env_index)
        return carry, ro.no_action(self.spec, self.group)

    def begin(
        self, algo: Algorithm, timestep: TimeStep[np.ndarray], key: jax.Array, env_index: jax.Array
    ) -> HostActing:
        """Return the acting state at the environments' first time step; `key` is the run's root key."""
        carry, action = self.beginnings(algo, env_index)
        return HostActing(timestep, action, carry, self.roots(key, env_index))

    @partial(jax.jit, static_argnums=0, keep_unused=True)
    def storage(self, algo, actor, timestep, carry, action, roots) -> Storage:
        """Return zeros to store a rollout in."""
        timestep, action, extras = jax.eval_shape(self._step, algo, actor, timestep, carry, action, roots)[0]

        def room(tree, length):
            return jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), tree)

        return room(timestep, self.length + 1), room(action, self.length), room(extras, self.length)

    def _step(self, algo, actor, timestep, carry, action, act_keys):
        timestep, output, executed = ro.act(
            algo, actor, timestep, action, carry, act_keys, spec=self.spec, explore=self.explore
        )
        return (timestep, output.action, output.extras), executed, output.carry

    @partial(jax.jit, static_argnums=0, donate_argnums=3)
    def act(self, algo, actor, storage, timestep, carry, action, roots, tick, number):
        """Act at `timestep`, the result of `action`, and write this step into the storage at index `number`."""
        step, executed, carry = self._step(algo, actor, timestep, carry, action, keys.tick_keys(roots, tick, 1)[0])
        return ro.write(storage, step, number), executed, carry

    @partial(jax.jit, static_argnums=0, donate_argnums=3)
    def act_some(self, algo, actor, storage, timestep, carry, action, roots, ticks, numbers, env_ids):
        """Act only in the environments `env_ids` of the group, which may be at different steps of the rollout.

        `env_ids`, `timestep`, `ticks` and `numbers` have shape [B], with one entry for each of these environments.
        `carry`, `action` and `roots` cover the whole group, and so do the results, except for the last result: the
        actions of these environments. An index of `group` or more is padding and has no effect.
        """

        def one_key(root, tick):
            return keys.tick_keys(root[None], tick, 1)[0, 0]

        mine = jax.tree.map(lambda x: x.at[env_ids].get(**_READ), (carry, action, roots))
        step, executed, after = self._step(algo, actor, timestep, mine[0], mine[1], jax.vmap(one_key)(mine[2], ticks))
        storage = jax.tree.map(lambda all, x: all.at[numbers, env_ids].set(x, **_WRITTEN), storage, step)
        carry, action = jax.tree.map(
            lambda all, x: all.at[env_ids].set(x, **_WRITTEN), (carry, action), (after, executed)
        )
        return storage, action, carry, executed

    @partial(jax.jit, static_argnums=0, donate_argnums=3)
    def finish(self, algo, actor, storage, timestep, action, initial, carry, version) -> Rollout:
        """Return the rollout, given its storage and the time step after its last step."""
        timesteps, actions, extras = storage
        rollout = Rollout(
            timesteps=ro.write(timesteps, ro.with_previous_action(timestep, action), self.length),
            action=actions,
            extras=extras,
            carry=initial,
            final_carry=carry,
            statistics=actor.statistics,
            version=version,
        )
        return ro.with_extras(algo, actor, rollout, spec=self.spec, explore=self.explore)


def unroll(
    steps: HostSteps,
    algo: Algorithm,
    actor: ActorState,
    acting: HostActing,
    step: Step,
    version: jax.Array | np.int32 | None = None,
    storage: Storage | None = None,
) -> Generator[None, None, Rollout]:
    """Act for `steps.length` steps in host environments, update `acting`, and return the rollout.

    Yields while the environments are stepping, so that one thread can serve several groups. `complete` runs the
    generator without serving other groups.

    Args:
      steps: the compiled functions.
      algo: the algorithm, with its schedules resolved.
      actor: the state that acting needs.
      acting: the acting state, updated in place.
      step: function that steps the environments.
      version: the version of `actor`.
      storage: memory to overwrite with the rollout; None: allocate new memory, which causes page faults on first use.
    """
    initial = acting.carry
    storage = new_storage(steps, algo, actor, acting) if storage is None else storage
    for number in range(steps.length):
        storage, acting.previous_action, acting.carry = steps.act(
            algo,
            actor,
            storage,
            acting.timestep,
            acting.carry,
            acting.previous_action,
            acting.roots,
            acting.tick(number),
            np.int32(number),
        )
        wait = step(jax.device_get(acting.previous_action))
        yield
        acting.timestep = wait()
    acting.steps_per_env += steps.length
    return steps.finish(algo, actor, storage, acting.timestep, acting.previous_action, initial, acting.carry, version)


def new_storage(steps: HostSteps, algo: Algorithm, actor: ActorState, acting: HostActing) -> Storage:
    """Return zeros to store a rollout in, on the device that acts."""
    (device,) = acting.roots.devices()
    with jax.default_device(device):  # otherwise it would be allocated on the first device and then moved
        storage = steps.storage(algo, actor, acting.timestep, acting.carry, acting.previous_action, acting.roots)
    acting.extras = tuple(storage[2])
    return storage


def complete[T](unrolling: Generator[None, None, T]) -> T:
    """Run a generator to its end, and return its result."""
    while True:
        try:
            next(unrolling)
        except StopIteration as end:
            return end.value


def in_this_thread(env_step: Callable[[PyTree], TimeStep[np.ndarray]]) -> Step:
    """Return a `Step` that calls `env_step` and blocks until it returns."""

    def step(action):
        timestep = env_step(action)
        return lambda: timestep

    return step
