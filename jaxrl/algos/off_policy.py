"""What the off-policy actor-critics share: an ensemble of critics, its targets, and acting within a bounded box."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl import spaces
from jaxrl.algos.base import field_problems
from jaxrl.algos.dqn import n_step_target
from jaxrl.algos.optimisers import descend, weighted_mean
from jaxrl.networks import BoundedPolicy, from_unit, to_unit
from jaxrl.types import (
    ActorOutput,
    ActorState,
    Carry,
    EnvSpec,
    Metrics,
    Params,
    PyTree,
    Replay,
    Replicas,
    TimeStep,
    TransitionBatch,
)


@struct.dataclass
class Learnt:
    """A network's parameters and what learning them needs."""

    params: Params
    target_params: Params  # () where nothing is bootstrapped from it
    optimiser: PyTree


def problems(algo: Any, spec: EnvSpec, *, stochastic: bool) -> list[str]:
    """Every problem with the settings of `algo`, one line each; `stochastic`: the kind of policy that it needs."""
    found, name, space = field_problems(algo), type(algo).__name__, spec.action_space
    if not (
        isinstance(space, spaces.Box) and len(space.shape) == 1 and space.bounded and (space.low < space.high).all()
    ):
        found.append(f"{name} needs a bounded Box of actions, shape (n,), but {spec.name} has {space!r}; use PPO")
    if algo.policy.recurrent:
        found.append(f"{name}'s replay draws single transitions; a recurrent policy needs sequence replay (to come)")
    if isinstance(algo.policy, BoundedPolicy) and algo.policy.stochastic != stochastic:
        found.append(f"{name}.policy={algo.policy!r} must have stochastic={stochastic}")
    return found


def replay(algo: Any) -> Replay:
    """The source that the fields of `algo` describe."""
    return Replay(
        capacity=algo.capacity,
        batch_size=algo.batch_size,
        min_size=algo.min_size,
        rollout_length=algo.rollout_length,
        updates=algo.updates,
        n_step=algo.n_step,
    )


def begin(algo: Any, params: Params, *, target: bool) -> Learnt:
    """Parameters that nothing was learnt of yet, with a target of their own buffers if wanted."""
    return Learnt(params, jax.tree.map(jnp.copy, params) if target else (), algo.optimiser.rule().init(params))


def step(algo: Any, learnt: Learnt, gradients: Params, learning_rate: Any, replicas: Replicas) -> Learnt:
    """One step of the optimiser down this device's gradients, averaged over replicas."""
    params, optimiser, _ = descend(
        algo.optimiser,
        learnt.params,
        gradients,
        learnt.optimiser,
        learning_rate=learning_rate,
        max_grad_norm=None,
        replicas=replicas,
    )
    return learnt.replace(params=params, optimiser=optimiser)


def follow(learnt: Learnt, tau: Any) -> Learnt:
    """The target moved by the share `tau` of its way to the parameters: Polyak averaging."""
    moved = jax.tree.map(lambda old, new: old + tau * (new - old), learnt.target_params, learnt.params)
    return learnt.replace(target_params=moved)


# --- networks over a batch -----------------------------------------------------------------------------------------


def evaluate_policy(algo: Any, params: Params, observation: PyTree, spec: EnvSpec) -> PyTree:
    """The policy's output for observations [batch, ...]: leaves [batch, ...]."""
    output, _ = algo.policy.apply(params, _moments(observation), (), spec=spec)
    return jax.tree.map(lambda x: x[0], output)


def evaluate_critic(algo: Any, params: Params, observation: PyTree, action: jax.Array, spec: EnvSpec) -> jax.Array:
    """Values [ensemble, batch] of observations [batch, ...] and actions [batch, n]."""
    return algo.critic.apply(params, _moments(observation), action[None], spec=spec)[:, 0]


def _moments(observation):
    """Moments [1, batch] of which nothing but the observation is known."""
    flags = jnp.zeros((1, jax.tree.leaves(observation)[0].shape[0]), bool)
    zero = jnp.zeros(flags.shape, jnp.float32)
    return TimeStep(jax.tree.map(lambda x: x[None], observation), zero, flags, flags, flags)


def batch_keys(key: jax.Array, batch: int, replicas: Replicas) -> jax.Array:
    """A key for each transition [batch], by its logical shard, so that it does not depend on the devices."""
    shards = replicas.first_shard + jnp.arange(replicas.shards, dtype=jnp.int32)
    draw = jax.vmap(lambda shard: jax.random.split(jax.random.fold_in(key, shard), batch // replicas.shards))
    return draw(shards).reshape(-1)


# --- the critic ----------------------------------------------------------------------------------------------------


def target(
    algo: Any, critic: Learnt, batch: TransitionBatch, next_action: jax.Array, bonus: jax.Array | float, spec: EnvSpec
) -> jax.Array:
    """What the critics should say of each transition [batch]; no gradient.

    The rewards of its steps, and unless the task terminated there the smallest of the target critics' values of the
    next action (Fujimoto et al., 2018, equation 10), plus `bonus` (SAC's entropy), each [batch].
    """
    values = evaluate_critic(algo, critic.target_params, batch.next_observation, next_action, spec)
    value = jnp.min(values, axis=0) + bonus
    return n_step_target(batch.rewards, batch.steps, batch.bootstrap, value, algo.gamma)


def fit_critic(
    algo: Any, critic: Learnt, batch: TransitionBatch, wanted: jax.Array, spec: EnvSpec, replicas: Replicas
) -> tuple[Learnt, Metrics]:
    """One step of every member of the ensemble towards the targets `wanted` [batch]."""

    def loss(params):
        values = evaluate_critic(algo, params, batch.observation, batch.action, spec)
        errors = wanted[None] - values
        each = jax.vmap(lambda x: weighted_mean(x, batch.weight, replicas))
        # A sum over the members: each learns as if it were alone.
        loss = jnp.sum(each(0.5 * jnp.square(errors)))
        return loss, {
            "critic_loss": loss,
            "q_value": jnp.mean(each(values)),
            "td_error": jnp.mean(each(jnp.abs(errors))),
        }

    gradients, metrics = jax.grad(loss, has_aux=True)(critic.params)
    return step(algo, critic, gradients, algo.learning_rate, replicas), metrics


# --- policies --------------------------------------------------------------------------------------------------------


def climb(
    algo: Any, policy: Learnt, critic: Learnt, batch: TransitionBatch, spec: EnvSpec, replicas: Replicas
) -> tuple[Learnt, jax.Array]:
    """One step of a deterministic policy towards actions that the first critic values more (Lillicrap et al., 2016).

    Args:
      algo: has `policy`, `critic`, `optimiser` and the learning rates.
      policy, critic: as they are.
      batch: transitions, of which the observations are used.
      spec, replicas: as handed to `update`.

    Returns:
      The policy after the step, and this device's share of the loss, minus the mean value.
    """

    def loss(params):
        action = evaluate_policy(algo, params, batch.observation, spec)
        first = jax.tree.map(lambda x: x[:1], critic.params)  # the others would be computed for nothing
        values = evaluate_critic(algo, first, batch.observation, action, spec)
        return weighted_mean(-values[0], batch.weight, replicas)

    value, gradients = jax.value_and_grad(loss)(policy.params)
    return step(algo, policy, gradients, policy_rate(algo), replicas), value


def policy_rate(algo: Any) -> Any:
    """The policy's learning rate: its own, or the critic's."""
    return algo.learning_rate if algo.policy_learning_rate is None else algo.policy_learning_rate


# --- acting --------------------------------------------------------------------------------------------------------


def actor(policy: Learnt, updates: jax.Array, **exploration: Any) -> ActorState:
    """What acting needs; until the first update, which the replay's `min_size` rows precede, actions are random."""
    values = {name: jnp.asarray(value, jnp.float32) for name, value in exploration.items()}
    return ActorState(params=policy.params, exploration=values | {"warm_up": updates == 0})


def random_at_first(action: jax.Array, key: jax.Array, actor: ActorState, space: spaces.Box) -> jax.Array:
    """The actions [B, n], or ones drawn uniformly from the box with the keys [B] before the first update."""
    random = jax.vmap(lambda k: space.sample(jax.random.fold_in(k, 1)))(key)
    return jnp.where(actor.exploration["warm_up"], random, action)


def add_noise(action: jax.Array, key: jax.Array, std: Any, space: spaces.Box, limit: Any | None = None) -> jax.Array:
    """Actions with Gaussian noise, clipped to the box.

    Args:
      action: [B, n].
      key: keys [B].
      std: of the noise, in units of half the box's range.
      space: the box.
      limit: the largest noise, in the same units; None: no limit.
    """
    noise = std * jax.vmap(lambda k: jax.random.normal(k, action.shape[1:]))(key)
    if limit is not None:
        noise = jnp.clip(noise, -limit, limit)
    return from_unit(to_unit(action, space) + noise, space)


def act_with_noise(
    algo: Any, actor: ActorState, timestep: TimeStep, carry: Carry, key: jax.Array, *, spec: EnvSpec, explore: bool
) -> ActorOutput:
    """The action [B, n] of a deterministic policy; if exploring with noise, or random before the first update."""
    action = evaluate_policy(algo, actor.params, timestep.observation, spec)
    if explore:
        action = add_noise(action, key, actor.exploration["noise"], spec.action_space)
        action = random_at_first(action, key, actor, spec.action_space)
    return ActorOutput(action, carry)
