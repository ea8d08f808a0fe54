"""Acting of off-policy actor-critics: exploration noise, and random actions before the first update."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.algos import off_policy, q_learning, train_state
from jaxrl.algos.base import changed, field_group, number, part, part_class, static
from jaxrl.algos.fields import ActorCriticFields, NormalizationFields
from jaxrl.algos.off_policy import LearnerState, Statistics
from jaxrl.algos.optimizers import Number
from jaxrl.core import spaces
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import (
    ActorOutput,
    ActorState,
    Carry,
    EnvSpec,
    Network,
    NetworkInputs,
    PyTree,
    Replicas,
    TimeStep,
    TransitionBatch,
)
from jaxrl.networks import Actor, from_unit, to_unit

Drawn = jax.Array | tuple[()]  # correlated, standard normal, [B, n]; () if steps are independent


class ActingCarry(struct.PyTreeNode):
    """Acting state that is carried from step to step of an environment."""

    network: Carry  # the policy's recurrent state; () if feed-forward
    noise: Drawn
    noise_steps: jax.Array | tuple[()] = ()  # int32, steps left to hold the noise; () if it is never held
    noise_scale: jax.Array | tuple[()] = ()  # float32, noise level of the episode; () if it is always the same
    discounted_return: jax.Array | tuple[()] = ()  # float32, of the episode so far; () if rewards are not scaled


@part_class
class Noise:
    """Dependence of exploration noise on that of previous steps."""

    correlation: float = static(
        0.0, low=0, below=1, help="correlation of exploration noise between consecutive steps; 0: independent"
    )
    random_correlation: float | None = static(
        None, low=0, below=1, help="correlation of random actions before the first update; None: correlation"
    )
    hold: int = static(1, low=1, help="maximum number of steps to hold exploration noise; n has probability ~ 1 / n^2")

    def initial(self, network: Carry, spec: EnvSpec) -> ActingCarry:
        """Return an environment's carry before its first step, with noise [n], and the policy's recurrent state."""
        if not isinstance(spec.action_space, spaces.Box):
            return ActingCarry(network, ())
        held = self.hold > 1
        noise = jnp.zeros(spec.action_space.shape, jnp.float32)
        noise = noise if held or self.correlation or self.random_correlation else ()
        return ActingCarry(network, noise, jnp.int32(0) if held else ())

    def levels(self) -> dict[str, jax.Array]:
        """Return the part of the actor state that is needed for the noise."""
        return {}

    def step(self, actor: ActorState, carry: ActingCarry, timestep: TimeStep, key: jax.Array) -> ActingCarry:
        """Return the carry with a step's noise: `next_noise`, or the previous noise while it is held.

        Args:
          actor: the actor state, which records whether there was an update.
          carry: the carry of the previous step, [B, ...].
          timestep: the time step to act at, [B, ...].
          key: keys [B].
        """
        correlation = self.correlation
        if self.random_correlation is not None:  # before the first update
            correlation = jnp.where(actor.exploration["warm_up"], self.random_correlation, correlation)
        noise = next_noise(carry.noise, correlation, timestep, key)
        if isinstance(carry.noise_steps, tuple):
            return carry.replace(noise=noise)
        again = timestep.first | (carry.noise_steps == 0)
        steps = jnp.where(again, held_steps(key, self.hold), carry.noise_steps) - 1
        held = jax.tree.map(lambda new, old: jnp.where(again[:, None], new, old), noise, carry.noise)
        return carry.replace(noise=held, noise_steps=steps)


@part_class
class GaussianNoise(Noise):
    """Noise that is added to the actions of a deterministic policy."""

    std: Scalar = number(
        0.1,
        low=0,
        only_with="not policy.stochastic",
        help="standard deviation of the exploration noise, in units of half the action range",
    )
    least_std: Scalar | None = number(
        None,
        low=0,
        at_most="std",
        only_with="not policy.stochastic",
        help="minimum of a noise level sampled per episode, up to std; None: always std",
    )

    def initial(self, network: Carry, spec: EnvSpec) -> ActingCarry:
        """Return an environment's carry before its first step, with a noise level if it is sampled."""
        carry = super().initial(network, spec)
        return carry if self.least_std is None else carry.replace(noise_scale=jnp.float32(0.0))

    def levels(self) -> dict[str, jax.Array]:
        """Return the standard deviation of the noise, and its minimum if it is sampled per episode."""
        levels = {"noise": self.std, "least_noise": self.least_std}
        return {name: jnp.asarray(level, jnp.float32) for name, level in levels.items() if level is not None}

    def step(self, actor: ActorState, carry: ActingCarry, timestep: TimeStep, key: jax.Array) -> ActingCarry:
        """Return the carry with a step's noise, and with noise levels [B], sampled uniformly when episodes begin.

        Different amounts of exploration per environment give better replay data than the same amount everywhere (Li et
        al., 2023, arXiv:2307.12983).
        """
        if not isinstance(carry.noise_scale, tuple):
            low, high = actor.exploration["least_noise"], actor.exploration["noise"]
            share = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, 3), (), jnp.float32))(key)
            scale = jnp.where(timestep.first, low + (high - low) * share, carry.noise_scale)
            carry = carry.replace(noise_scale=scale)
        return super().step(actor, carry, timestep, key)

    def added(
        self, action: jax.Array, actor: ActorState, carry: ActingCarry, key: jax.Array, space: spaces.Box
    ) -> jax.Array:
        """Return actions [B, n] with noise, clipped to the box; keys [B]."""
        std = actor.exploration["noise"] if isinstance(carry.noise_scale, tuple) else carry.noise_scale[:, None]
        if isinstance(carry.noise, tuple):
            return add_noise(action, key, std, space)
        return shifted(action, std * carry.noise, space)


@field_group
class ActingFields(NormalizationFields, ActorCriticFields):
    """Exploration noise, and the state of a learner with a policy and critics."""

    noise: Noise = part(
        Noise,
        default=Noise(),
        was={
            "noise_correlation": "correlation",
            "random_correlation": "random_correlation",
            "noise_hold": "hold",
            "exploration_noise": "std",
            "least_noise": "least_std",
        },
        switch="noise_correlation",
        help="continuous actions: how exploration noise depends on that of previous steps",
    )

    def init(self, key: jax.Array, spec: EnvSpec) -> PyTree:
        """Return a new state, with target networks of the policy and of the critics."""
        return LearnerState(**self.learner(*jax.random.split(key), spec, policy_target=True))

    def learner(
        self,
        policy_key: jax.Array,
        critic_key: jax.Array,
        spec: EnvSpec,
        *,
        policy_target: bool = False,
        critic_target: bool = True,
    ) -> dict[str, Any]:
        """Return the fields of a new `LearnerState`, with or without target networks."""
        policy, critic = self.policy.init(policy_key, spec), self.critic.init(critic_key, spec)
        return {
            "policy": train_state.create(*policy, self.policy_optimizer, target=policy_target),
            "critic": train_state.create(*critic, self.critic_optimizer, target=critic_target),
            "statistics": off_policy.init_statistics(spec, self.normalize_observation),
            "updates": jnp.int32(0),
        }

    def learning_batch(
        self: Any, state: LearnerState, batch: Mapping[str, Any], replicas: Replicas
    ) -> tuple[Statistics, TransitionBatch]:
        """Return the result of `off_policy.learning_batch` for the batch of an update."""
        return off_policy.learning_batch(state.statistics, batch, self.observation_clip, replicas, n_step=self.n_step)

    def actor(self, state: LearnerState) -> ActorState:
        """Return the actor state; actors act randomly until the first update (after the replay's `min_size` steps)."""
        exploration = self.noise.levels() | {"warm_up": state.updates == 0}
        return ActorState(state.policy.params, state.statistics, state.policy.model_state, exploration)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> ActingCarry:
        return self.noise.initial(self.policy.initial_carry(spec), spec)

    def acting_output(self, actor: ActorState, timestep: TimeStep, carry: Carry, spec: EnvSpec) -> tuple[Any, Carry]:
        """Return the result of `policy_output`; an algorithm whose policy has other inputs overrides this method."""
        return policy_output(self.policy, actor, timestep, carry, self.observation_clip, spec)

    def act(
        self: Any,
        actor: ActorState,
        timestep: TimeStep,
        carry: ActingCarry,
        key: jax.Array,
        *,
        spec: EnvSpec,
        explore: bool,
    ) -> ActorOutput:
        output, memory = self.acting_output(actor, timestep, carry.network, spec)
        if explore:
            carry = self.noise.step(actor, carry, timestep, key)
        action = self._action(output, actor, carry, key, spec.action_space, explore)
        if explore:
            action = random_at_first(action, key, actor, spec.action_space, timestep.action_mask, carry.noise)
        return ActorOutput(action, carry.replace(network=memory))


@field_group
class StochasticActing(ActingFields):
    """Acting by sampling from a stochastic policy, and randomly before the first update."""

    def _action(
        self, output: Any, actor: ActorState, carry: ActingCarry, key: jax.Array, space: spaces.Space, explore: bool
    ) -> jax.Array:
        """Return the policy's mode; if exploring, a sample, computed from the noise if steps are not independent."""
        if not explore:
            return output.mode()
        return output.sample(key) if isinstance(carry.noise, tuple) else output.of_noise(carry.noise)


@field_group
class DeterministicActing(ActingFields):
    """Acting by a deterministic policy with noise, and randomly before the first update."""

    noise: GaussianNoise = changed(
        GaussianNoise(), part=GaussianNoise, help="exploration noise, and how it depends on that of previous steps"
    )
    policy: Network = changed(Actor(stochastic=False))

    def _action(
        self, output: jax.Array, actor: ActorState, carry: ActingCarry, key: jax.Array, space: Any, explore: bool
    ) -> jax.Array:
        """Return the policy's action; if exploring, with noise."""
        return self.noise.added(output, actor, carry, key, space) if explore else output


def policy_output(
    network: Network, actor: ActorState, timestep: TimeStep, carry: Carry, clip: Number | None, spec: EnvSpec
) -> tuple[PyTree, Carry]:
    """Return the policy's output [B, ...] for time steps [B, ...], and the policy's next recurrent state.

    Observations are normalized if the actor state has statistics.
    """
    observation = off_policy.normalize_observation(actor.statistics, timestep.observation, clip)
    inputs = NetworkInputs.of_timesteps(jax.tree.map(lambda x: x[None], timestep.replace(observation=observation)))
    output, carry, _ = network.apply(actor.params, inputs, carry, spec=spec, model_state=actor.model_state, train=False)
    return jax.tree.map(lambda x: x[0], output), carry


def held_steps(key: jax.Array, most: int) -> jax.Array:
    """Sample the number of steps to hold noise with keys [B]: int32 [B] in 1 .. `most`, n with probability ~ 1 / n^2.

    This is the zeta distribution of Dabney et al. (2021, arXiv:2006.01782), who use it for epsilon-greedy exploration.
    """
    mass = 1.0 / np.arange(1, most + 1) ** 2
    below = jnp.asarray(np.cumsum(mass)[:-1] / np.sum(mass), jnp.float32)
    draw = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, 2), (), jnp.float32))(key)
    return 1 + jnp.sum(draw[:, None] >= below[None], axis=-1, dtype=jnp.int32)


def next_noise(noise: Drawn, correlation: Number, timestep: TimeStep, key: jax.Array) -> Drawn:
    """Return the noise of a step, correlated with the previous step's noise and independent of previous episodes.

    The noise of each step is standard normal, so a single action has the same distribution as with independent noise.
    Correlated noise averages out more slowly, and so reaches more states (Eberhard et al., 2023,
    https://openreview.net/forum?id=hQ9V5QN27eS).

    Args:
      noise: noise of the previous step; () stays ().
      correlation: correlation of the noise between successive steps.
      timestep: the time step to act at, [B, ...].
      key: keys [B].
    """
    if isinstance(noise, tuple):
        return ()
    fresh = jax.vmap(lambda k: jax.random.normal(k, noise.shape[1:], jnp.float32))(key)
    return jnp.where(timestep.first[:, None], fresh, correlation * noise + jnp.sqrt(1.0 - correlation**2) * fresh)


def random_at_first(
    action: jax.Array,
    key: jax.Array,
    actor: ActorState,
    space: spaces.Space,
    mask: jax.Array | None = None,
    noise: Drawn = (),
) -> jax.Array:
    """Return the actions [B, ...], or before the first update, allowed actions sampled uniformly with keys [B].

    With `noise`, the random actions are computed from it: they are also uniform, and as correlated as the noise.
    """
    key, warm_up = jax.vmap(lambda k: jax.random.fold_in(k, 1))(key), actor.exploration["warm_up"]
    if isinstance(space, spaces.Discrete):
        return q_learning.epsilon_greedy(key, action, mask, warm_up.astype(jnp.float32), space.n)
    box = spaces.expect(space, spaces.Box)
    if isinstance(noise, tuple):
        return jnp.where(warm_up, jax.vmap(box.sample)(key), action)
    return jnp.where(warm_up, from_unit(2.0 * jax.scipy.stats.norm.cdf(noise) - 1.0, box), action)


def add_noise(
    action: jax.Array, key: jax.Array, std: Number, space: spaces.Box, limit: Number | None = None
) -> jax.Array:
    """Add Gaussian noise to actions, clipped to the box.

    Args:
      action: [B, n].
      key: keys [B].
      std: standard deviation of the noise in units of half the box's range, a scalar or [B, 1].
      space: the box.
      limit: maximum absolute noise, in the same units; None: no limit.
    """
    noise = std * jax.vmap(lambda k: jax.random.normal(k, action.shape[1:], jnp.float32))(key)
    if limit is not None:
        noise = jnp.clip(noise, -limit, limit)
    return shifted(action, noise, space)


def shifted(action: jax.Array, noise: jax.Array, space: spaces.Box) -> jax.Array:
    """Add noise [B, n] in units of half the box's range to actions [B, n], clipped to the box."""
    return from_unit(to_unit(action, space) + noise, space)
