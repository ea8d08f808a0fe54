"""Sebulba (Hessel et al., 2021, arXiv:2104.06272): environments on the host feed a learner on the accelerator.

Here in lockstep, one thread: act, step, learn, in turn. It is deterministic, and the same run as Anakin's where the
environments are the same.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl import keys
from jaxrl.errors import ConfigError
from jaxrl.parallel import learner
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.learner import Report
from jaxrl.parallel.replicas import SingleReplica
from jaxrl.parallel.rollout import RunState
from jaxrl.schedules import at
from jaxrl.types import Algorithm, Counter, EnvSpec, Episodes, HostEnvironment, HostRecipe, PyTree, env_spec


@dataclasses.dataclass(frozen=True)
class Sebulba:
    """Host environments, stepped in lockstep with the learner.

    Args:
      num_envs: environments.
      shards: logical groups of environments, as in `Anakin`.
      lockstep: act and learn in turn, in one thread. Threads that overlap the two are not built yet.
    """

    num_envs: int = 8
    shards: int | None = None
    lockstep: bool = True

    def bind(self, algo: Algorithm, env: HostRecipe) -> "SebulbaProgram":
        """Checks everything that can be checked before an environment is built.

        Raises:
          ConfigError: with every problem found.
        """
        if not self.lockstep:
            raise ConfigError("lockstep=False: overlapping actors and learner are not built yet; use lockstep=True")
        if any(isinstance(source, Episodes) for source in algo.experience.values()):
            raise ConfigError(
                "batches of whole episodes need environments that can be reset at will; use whole_episodes=False here"
            )
        spec = env_spec(env)
        shards = meshes.checked_layout(algo, spec, self.num_envs, 1, self.shards)
        return SebulbaProgram(spec, self.num_envs, shards)


class SebulbaProgram:
    """One run over host environments: the same calls as `AnakinProgram`, with the loop on the host."""

    devices = 1

    def __init__(self, spec: EnvSpec, num_envs: int, shards: int):
        self.spec, self.num_envs, self.shards = spec, num_envs, shards
        self._host: HostEnvironment | None = None
        self._steps = _Steps(spec, num_envs, SingleReplica(shards))

    def rows_per_iteration(self, algo: Algorithm) -> int:
        return ro.rollout_length(algo) * self.num_envs

    def place(self, tree: PyTree) -> PyTree:
        """Numbers as arrays on the device."""
        return jax.device_put(tree)

    def start(self, algo: Algorithm, env: HostRecipe, seed: int, *, saved: bool = True) -> RunState:
        """Builds the environments and begins their first episodes; `saved`: whether checkpoints will hold the replays.

        Raises:
          ConfigError: the replay would not fit in memory.
        """
        self.close()
        self._host = env.build(self.num_envs, seed)
        first, key = self._host.reset(), jax.random.key(seed)
        state = jax.eval_shape(self._steps.init, algo, first, key)
        learner.check_memory(algo, state, jax.local_devices()[:1], saved=saved)
        return self._steps.init(algo, first, key)

    def not_in_checkpoints(self, fresh: RunState) -> dict[str, Any]:
        """The parts of a state that a resumed run takes from a fresh one: host environments cannot be saved."""
        return {"timestep": fresh.timestep, "carry": fresh.carry}

    def emptied(self, algo: Algorithm, env: HostRecipe, state: RunState) -> RunState:
        """`state` with new buffers in place of what it has."""
        return self._steps.with_empty_buffers(algo, state.replace(buffers={}))

    def chunk(
        self, algo: Algorithm, env: HostRecipe, state: RunState, length: int, total_ticks: int
    ) -> tuple[RunState, Report]:
        """`length` iterations. The buffers of `state` are donated."""
        total = None
        for number in range(length):
            state, report = self._iterate(algo, state, jnp.float32(total_ticks))
            total = (total or Report.zeros_like(report)).add(report, jnp.int32(number))
        return state, total

    def _iterate(self, algo, state, total_ticks):
        tick, length = state.ticks.low, ro.rollout_length(algo)
        algo, actor, act_keys = self._steps.prepare(algo, state, total_ticks)
        timestep, carry, moments = state.timestep, state.carry, []
        for number in range(length):
            output = self._steps.act(algo, actor, timestep, carry, act_keys, number)
            moments.append((timestep, output.action, output.extras))
            following = self._host.step(jax.device_get(output.action))
            timestep, carry = self._steps.follow(following, output.action), output.carry
        initial = state.carry
        state = state.replace(timestep=timestep, carry=carry, ticks=state.ticks.add(length))
        return self._steps.learn(
            algo, state.replace(buffers={}), state.buffers, moments, initial, actor.statistics, tick
        )

    def close(self) -> None:
        """Closes the environments; may be called at any time and twice."""
        host, self._host = self._host, None
        if host is not None:
            host.close()


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The compiled pieces of the loop, static: a key of the compilation cache."""

    spec: EnvSpec
    num_envs: int
    replicas: SingleReplica

    @partial(jax.jit, static_argnums=0)
    def init(self, algo, timestep, key):
        resolved = at(algo, jnp.float32(0.0))
        env_index = jnp.arange(self.num_envs, dtype=jnp.int32)
        state = RunState(
            learner=resolved.init(keys.initial_key(key), self.spec),
            env_state=(),
            timestep=ro.first_timestep(timestep, self.spec),
            carry=jax.vmap(lambda index: resolved.initial_carry(self.spec, index, self.num_envs))(env_index),
            buffers={},
            key=key,
            ticks=Counter.zero(),
            empty_at=Counter.zero(),
        )
        return self.with_empty_buffers(algo, state)

    @partial(jax.jit, static_argnums=0)
    def with_empty_buffers(self, algo, state):
        rows = jax.eval_shape(lambda: self._example(at(algo, jnp.float32(0.0)), state))
        buffers = learner.empty_buffers(algo, rows, state.carry, num_envs=self.num_envs, shards=self.replicas.shards)
        return state.replace(buffers=buffers, empty_at=jax.tree.map(jnp.copy, state.ticks))

    def _example(self, algo, state):
        output = algo.act(
            algo.actor(state.learner),
            state.timestep,
            state.carry,
            self._act_keys(state, 1)[0],
            spec=self.spec,
            explore=True,
        )
        moment = (state.timestep, output.action, output.extras)
        return self._assemble([moment], state.timestep, state.carry, state.carry, ()).rows

    def _act_keys(self, state, length):
        env_index = jnp.arange(self.num_envs, dtype=jnp.int32)
        return keys.tick_keys(keys.policy_keys(state.key, env_index), state.ticks.low, length)

    def _assemble(self, moments, final, carry, final_carry, statistics):
        timesteps, action, extras = jax.tree.map(lambda *x: jnp.stack(x), *moments)
        return ro.assemble(
            timesteps,
            final,
            action,
            extras,
            carry=carry,
            final_carry=final_carry,
            statistics=statistics,
            whole_episodes=False,
        ).replace(timesteps=timesteps, final=final)

    @partial(jax.jit, static_argnums=0)
    def prepare(self, algo, state, total_ticks):
        algo = at(algo, jnp.minimum(state.ticks.as_float() / total_ticks, 1.0))
        return algo, algo.actor(state.learner), self._act_keys(state, ro.rollout_length(algo))

    @partial(jax.jit, static_argnums=0)
    def act(self, algo, actor, timestep, carry, act_keys, number):
        return algo.act(actor, timestep, carry, act_keys[number], spec=self.spec, explore=True)

    @partial(jax.jit, static_argnums=0)
    def follow(self, timestep, action):
        return ro.with_previous_action(timestep, action)

    @partial(jax.jit, static_argnums=0, donate_argnums=3)
    def learn(self, algo, state, buffers, moments, carry, statistics, tick):
        batch = self._assemble(moments, state.timestep, carry, state.carry, statistics)
        episodes = ro.episode_sums(batch.rows, batch.timesteps, batch.final)
        state, report = learner.learn(
            algo,
            state.replace(buffers=buffers),
            batch.replace(timesteps=batch.timesteps.replace(episode=None), final=batch.final.replace(episode=None)),
            episodes,
            tick=tick,
            spec=self.spec,
            num_envs=self.num_envs,
            replicas=self.replicas,
        )
        return state, report.with_state(state, jnp.int32(0))
