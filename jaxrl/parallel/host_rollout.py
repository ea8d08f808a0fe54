"""Acting in environments on the host: the twin of `jaxrl.parallel.rollout.unroll`, one compiled call a step.

Time steps are written into the rollout on the device by the call that acts, in place, so that a rollout is never
stacked from pieces.
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

# Takes actions in numpy to the environments, and gives a function that waits for what they show then.
Step = Callable[[PyTree], Callable[[], TimeStep[np.ndarray]]]
Storage = tuple[TimeStep[jax.Array], PyTree, PyTree]  # of a rollout: time steps [T + 1, B], actions and extras [T, B]

# Each index is there once. Those beyond the environments pad a batch: what is read there is anything, and nothing is
# written.
_READ: dict[str, Any] = {"mode": "clip", "unique_indices": True}
_WRITTEN: dict[str, Any] = {"mode": "drop", "unique_indices": True}


@dataclasses.dataclass
class HostActing:
    """Where host environments stand, and who acts in them: the twin of `Acting`.

    Attributes:
      timestep: what they show, numpy `[B, ...]`.
      previous_action, carry: on the device that acts, `[B, ...]`.
      roots: of the random numbers of acting, keys `[B]`.
      steps_per_env: steps of each environment so far, which name those numbers.
      extras: names of the extras that acting gives; of a complete rollout there may be more.
    """

    timestep: TimeStep[np.ndarray]
    previous_action: PyTree
    carry: PyTree
    roots: jax.Array
    steps_per_env: int = 0
    extras: tuple[str, ...] = ()

    def tick(self, number: int = 0) -> np.uint32:
        """The number of the step `number` steps ahead, as keys are folded with it."""
        return np.uint32((self.steps_per_env + number) % 2**32)

    def storage(self, rollout: Rollout) -> Storage:
        """The room of a rollout from here, which nobody reads any more."""
        return rollout.timesteps, rollout.action, {name: rollout.extras[name] for name in self.extras}


@dataclasses.dataclass(frozen=True)
class HostSteps:
    """The compiled pieces of acting on the host, static: a key of the compilation cache.

    Args:
      spec: of the environments.
      num_envs: of all, among which those here are some.
      group: those here.
      length: steps of a rollout.
      explore: sample as in training, else the best action.
    """

    spec: EnvSpec
    num_envs: int
    group: int
    length: int
    explore: bool = True

    @partial(jax.jit, static_argnums=0)
    def roots(self, key: jax.Array, env_index: jax.Array) -> jax.Array:
        """The root keys [group] of action sampling."""
        return keys.policy_keys(key, env_index)

    # `keep_unused`, here and below: what is made of no argument is then bound to the device that they are bound to, as
    # is what `act` gives back of it, and `act` is compiled once.
    @partial(jax.jit, static_argnums=0, keep_unused=True)
    def beginnings(self, algo: Algorithm, env_index: jax.Array) -> tuple[PyTree, PyTree]:
        """The carry, and a previous action of zeros, at the first time step."""
        carry = jax.vmap(lambda index: algo.initial_carry(self.spec, index, self.num_envs))(env_index)
        return carry, ro.no_action(self.spec, self.group)

    def begin(
        self, algo: Algorithm, timestep: TimeStep[np.ndarray], key: jax.Array, env_index: jax.Array
    ) -> HostActing:
        """Where environments stand that show their first time steps; `key` is the root of all random numbers."""
        carry, action = self.beginnings(algo, env_index)
        return HostActing(timestep, action, carry, self.roots(key, env_index))

    @partial(jax.jit, static_argnums=0, keep_unused=True)
    def storage(self, algo, actor, timestep, carry, action, roots) -> Storage:
        """Room for a rollout."""
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
        """Acts at the time step `timestep`, which came of `action`; writes it down as that of step `number`."""
        step, executed, carry = self._step(algo, actor, timestep, carry, action, keys.tick_keys(roots, tick, 1)[0])
        return ro.write(storage, step, number), executed, carry

    @partial(jax.jit, static_argnums=0, donate_argnums=3)
    def act_some(self, algo, actor, storage, timestep, carry, action, roots, ticks, numbers, env_ids):
        """`act` for the environments `env_ids` [B] of the group alone, each at a tick and step of its own, [B].

        `timestep` is theirs, [B]; carry, previous action and roots are the group's, and so is what it returns, but for
        the actions of these environments, which come last. An index of `group` or more is of none, and changes nothing.
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
        """The rollout, from its storage and the time step after the last."""
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
    """Acts for `steps.length` steps in host environments, and moves `acting` on; the rollout is returned.

    Yields whenever `env.step` is running, so that one thread can serve others meanwhile; `complete` waits instead.

    Args:
      steps: the compiled pieces.
      algo: with its schedules resolved.
      actor: what acting needs.
      acting: where the environments stand.
      step: of the environments.
      version: of `actor`.
      storage: room for the rollout, which is written over; None: fresh memory, whose first touch costs page faults.
    """
    initial = acting.carry
    if storage is None:
        (device,) = acting.roots.devices()
        with jax.default_device(device):  # else it would be made on the first device, and moved
            storage = steps.storage(algo, actor, acting.timestep, acting.carry, acting.previous_action, acting.roots)
        acting.extras = tuple(storage[2])
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


def complete[T](unrolling: Generator[None, None, T]) -> T:
    """What a generator returns, once it has been run to its end."""
    while True:
        try:
            next(unrolling)
        except StopIteration as end:
            return end.value


def in_this_thread(env_step: Callable[[PyTree], TimeStep[np.ndarray]]) -> Step:
    """How `unroll` steps environments whose step returns when it is done."""

    def step(action):
        timestep = env_step(action)
        return lambda: timestep

    return step
