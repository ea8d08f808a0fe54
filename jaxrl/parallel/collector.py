"""A group of host environments, and the rollouts that are collected in it, one compiled step a moment."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl import keys
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.rollout import EpisodeSums
from jaxrl.types import ActorState, Algorithm, EnvSpec, HostEnvironment, PyTree, RolloutBatch, TimeStep


@struct.dataclass
class Published:
    """What a learner gives its actors: the algorithm with its schedules resolved, and what acting needs."""

    algo: Algorithm
    actor: ActorState
    version: jax.Array  # int32, how many updates of the learner there were


@struct.dataclass
class Collected:
    """A group's share of what one iteration learns from."""

    batch: RolloutBatch  # [T, group]; its observations are in `rows` alone, see `whole`
    final: TimeStep  # [group] as in the batch, and with the episode's statistics
    episodes: EpisodeSums

    @property
    def whole(self) -> RolloutBatch:
        """The batch with its observations in both places; for use within a program, where that costs nothing."""
        rows, timesteps = self.batch.rows, self.batch.timesteps
        return self.batch.replace(timesteps=timesteps.replace(observation=rows.observation))


# Of indices that are the environments' own: each is there, and once.
_DISTINCT: dict[str, Any] = {"mode": "promise_in_bounds", "unique_indices": True}


class Collector:
    """One group: its environments, and where they are.

    Args:
      steps: the compiled pieces.
      host: the environments; the collector closes them.
      key: the run's root key.
      first_env: the index of its first environment among all.
      device: where `act` runs.
    """

    def __init__(self, steps: "Steps", host: HostEnvironment, key: jax.Array, first_env: int, device: jax.Device):
        self.host = host
        self.stepping_since: float | None = None  # monotonic seconds, while the environments have the word
        self.stepping_seconds = 0.0  # all in all
        self._steps, self._ticks = steps, 0
        with Watched(self):
            self._following = self._reset()
        self._env_index, self._roots = steps.environments(key, first_env, device)
        self._carry: PyTree = None
        self._action: PyTree = None

    def _reset(self) -> Any:
        """Begins the first episodes; their first moments, numpy `[group, ...]`."""
        return self.host.reset()

    def begin_at(self, ticks: int) -> None:
        """The next rollout begins after so many rows of each environment: it names the random numbers of acting."""
        self._ticks = ticks

    def first_moment(self) -> Any:
        """The moment that the run begins at, numpy `[group, ...]`."""
        return self._following

    def collect(self, published: Published, step: Callable[[PyTree], Callable[[], Any]]) -> Iterator[None]:
        """Collects one rollout; it is returned (`StopIteration.value`) on the learner's terms, `Collected`.

        Yields whenever the environments are at work, so that one thread can serve another group meanwhile.

        Args:
          published: on this collector's device.
          step: hands actions to the environments, and gives a function that waits for what follows.
        """
        steps, algo, actor = self._steps, published.algo, published.actor
        if self._carry is None:
            self._carry, self._action = steps.beginnings(algo, self._env_index)
        initial = self._carry
        storage = steps.storage(algo, actor, self._following, self._carry, self._action, self._roots)
        for place in range(steps.length):
            storage, self._action, self._carry = steps.act(
                algo,
                actor,
                storage,
                self._following,
                self._carry,
                self._action,
                self._roots,
                self._tick(place),
                np.int32(place),
            )
            action = jax.device_get(self._action)
            wait = step(action)
            yield
            self._following = wait()
        self._ticks += steps.length
        return steps.finish(
            storage, self._following, self._action, initial, self._carry, actor.statistics, published.version
        )

    def step_now(self, action: PyTree) -> Callable[[], Any]:
        """Steps the environments in this thread."""
        with Watched(self):
            following = self.host.step(action)
        return lambda: following

    def _tick(self, place):
        return np.uint32((self._ticks + place) % 2**32)


class Watched:
    """Says when a collector's environments have the word."""

    def __init__(self, collector):
        self._collector = collector

    def __enter__(self):
        self._collector.stepping_since = time.monotonic()

    def __exit__(self, *_):
        self._collector.stepping_seconds += time.monotonic() - self._collector.stepping_since
        self._collector.stepping_since = None


@dataclasses.dataclass(frozen=True)
class Steps:
    """The compiled pieces of collecting, static: a key of the compilation cache.

    Args:
      spec: of the environments.
      num_envs: over all groups.
      group: environments of the group.
      length: rows of a rollout.
    """

    spec: EnvSpec
    num_envs: int
    group: int
    length: int

    def environments(self, key, first_env, device):
        """The indices [group] of the environments from `first_env` on, and their root keys, on `device`."""
        key, env_index = jax.device_put((key, first_env + np.arange(self.group, dtype=np.int32)), device)
        return env_index, self.roots(key, env_index)

    @partial(jax.jit, static_argnums=0)
    def roots(self, key, env_index):
        """The root keys [group] of action sampling."""
        return keys.policy_keys(key, env_index)

    @partial(jax.jit, static_argnums=0)
    def beginnings(self, algo, env_index):
        """The carry, and a previous action of zeros, at the run's first moment."""
        carry = jax.vmap(lambda index: algo.initial_carry(self.spec, index, self.num_envs))(env_index)
        return carry, ro.no_action(self.spec, self.group)

    @partial(jax.jit, static_argnums=0)
    def storage(self, algo, actor, following, carry, action, roots):
        """Room for a rollout's moments, leaves [length, group, ...]."""
        moment = jax.eval_shape(self._moment, algo, actor, following, carry, action, roots)[0]
        return jax.tree.map(lambda x: jnp.zeros((self.length, *x.shape), x.dtype), moment)

    def _moment(self, algo, actor, following, carry, action, act_key):
        timestep = ro.with_previous_action(following, action)
        output = algo.act(actor, timestep, carry, act_key, spec=self.spec, explore=True)
        return (timestep, output.action, output.extras), output.carry

    @partial(jax.jit, static_argnums=0, donate_argnums=3)
    def act(self, algo, actor, storage, following, carry, action, roots, tick, place):
        """Acts at the moment `following`, which came of `action`; writes it down at `place`."""
        act_key = keys.tick_keys(roots, tick, 1)[0]
        moment, carry = self._moment(algo, actor, following, carry, action, act_key)
        storage = jax.tree.map(lambda all, x: jax.lax.dynamic_update_index_in_dim(all, x, place, 0), storage, moment)
        return storage, moment[1], carry

    @partial(jax.jit, static_argnums=0, donate_argnums=3)
    def act_some(self, algo, actor, storage, following, carry, action, roots, ticks, places, env_ids):
        """`act` for the environments `env_ids` [B] of the group alone, each at a tick and a place of its own, [B].

        `following` is theirs, [B]; carry, previous action and roots are the group's, and so is what is given back,
        but for the actions of these environments, which come last.
        """

        def one_key(root, tick):
            return keys.tick_keys(root[None], tick, 1)[0, 0]

        mine = jax.tree.map(lambda x: x.at[env_ids].get(**_DISTINCT), (carry, action, roots))
        act_key = jax.vmap(one_key)(mine[2], ticks)
        moment, after = self._moment(algo, actor, following, mine[0], mine[1], act_key)
        storage = jax.tree.map(lambda all, x: all.at[places, env_ids].set(x, **_DISTINCT), storage, moment)
        carry, action = jax.tree.map(
            lambda all, x: all.at[env_ids].set(x, **_DISTINCT), (carry, action), (after, moment[1])
        )
        return storage, action, carry, moment[1]

    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def finish(self, storage, following, action, initial, carry, statistics, version):
        """The rollout, from its moments and the one after them; see `Collected` for where the observations are."""
        timesteps, actions, extras = storage
        final = ro.with_previous_action(following, action)
        batch = ro.assemble(
            timesteps,
            final,
            actions,
            extras,
            carry=initial,
            final_carry=carry,
            statistics=statistics,
            whole_episodes=False,
        )
        # Two results that are one array would be copied, and frames are most of what there is.
        once = batch.replace(version=version, timesteps=batch.timesteps.replace(observation=()))
        return Collected(once, final, ro.episode_sums(batch.rows, timesteps, final))
