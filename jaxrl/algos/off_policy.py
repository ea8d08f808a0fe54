"""What the off-policy actor-critics share: an ensemble of critics, its targets, and acting."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl import spaces
from jaxrl.algos import q_learning
from jaxrl.algos.base import field_problems
from jaxrl.algos.optimisers import descend, weighted_mean
from jaxrl.algos.q_learning import Returns
from jaxrl.networks import ActionValues, Actor, CategoricalValues, from_unit, to_unit
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


def problems(algo: Any, spec: EnvSpec, *, stochastic: bool, discrete: bool = False) -> list[str]:
    """Every problem with the settings of `algo`, one line each.

    Args:
      algo: the algorithm.
      spec: of the environment.
      stochastic: the kind of policy that it needs.
      discrete: whether it can choose among discrete actions.
    """
    found, name, space = field_problems(algo), type(algo).__name__, spec.action_space
    bounded = isinstance(space, spaces.Box) and len(space.shape) == 1 and space.bounded
    if not (bounded and (space.low < space.high).all()) and not (discrete and isinstance(space, spaces.Discrete)):
        wanted = "a bounded Box of actions, shape (n,)" + (", or a Discrete space" if discrete else "")
        found.append(f"{name} needs {wanted}, but {spec.name} has {space!r}; use PPO")
    if algo.policy.recurrent:
        found.append(f"{name}'s replay draws single transitions; use a policy without a recurrent core, or R2D2")
    if isinstance(algo.policy, Actor) and algo.policy.stochastic != stochastic:
        found.append(f"{name}.policy={algo.policy!r} must have stochastic={stochastic}")
    head = algo.critic.head
    if head.noisy:
        found.append(f"{name}.critic: the noise of {head!r} explores nothing here; set noisy=False")
    if stochastic and not isinstance(head, ActionValues):
        found.append(f"{name}'s targets are expected returns, not {head!r}; use ActionValues(), or D4PG")
    if isinstance(head, CategoricalValues):
        found += algo.support_problems()
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
        sampler=algo.sampler,
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


def evaluate_policy(
    algo: Any, params: Params, observation: PyTree, spec: EnvSpec, mask: jax.Array | None = None
) -> PyTree:
    """The policy's output for observations [batch, ...] and action masks [batch, n]: leaves [batch, ...]."""
    output, _ = algo.policy.apply(params, moments(observation, mask), (), spec=spec)
    return jax.tree.map(lambda x: x[0], output)


def evaluate_critic(
    algo: Any,
    params: Params,
    observation: PyTree,
    action: jax.Array | None,
    spec: EnvSpec,
    mask: jax.Array | None = None,
) -> PyTree:
    """The critics' output, leaves [ensemble, batch, actions, ...].

    Args:
      algo: has `critic`.
      params: of the ensemble.
      observation: [batch, ...].
      action: [batch, n] of a box, whose output is of 1 action; None where actions are discrete.
      spec: of the environment.
      mask: [batch, actions] where actions are discrete and some forbidden.
    """
    action = None if action is None else action[None]
    output = algo.critic.apply(params, moments(observation, mask), action, spec=spec)
    return jax.tree.map(lambda x: x[:, 0], output)


def expected_values(algo: Any, output: PyTree) -> jax.Array:
    """The expected returns [ensemble, batch, actions] that the critics' output stands for."""
    return q_learning.action_values(output, algo.v_min, algo.v_max)


def moments(observation, mask):
    """Moments [1, batch] of which nothing but the observation and the mask is known."""
    flags = jnp.zeros((1, jax.tree.leaves(observation)[0].shape[0]), bool)
    zero = jnp.zeros(flags.shape, jnp.float32)
    first = jax.tree.map(lambda x: x[None], (observation, mask))
    return TimeStep(first[0], zero, flags, flags, flags, action_mask=first[1])


# --- the critic ----------------------------------------------------------------------------------------------------


def expected_target(algo: Any, batch: TransitionBatch, value: jax.Array) -> Returns:
    """What the critics should say of each transition, if `value` [batch] is that of where it leads; no gradient."""
    target = q_learning.n_step_target(batch.rewards, batch.steps, batch.bootstrap, value, algo.gamma)
    return Returns(target[:, None], jnp.ones_like(target[:, None]))


def target(algo: Any, critic: Learnt, batch: TransitionBatch, next_action: jax.Array, spec: EnvSpec) -> Returns:
    """What the critics should say of each transition if `next_action` [batch, n] follows; no gradient.

    The rewards of its steps, and unless the task terminated there the returns that follow: those that the target
    critic expecting least has for the next action (Fujimoto et al., 2018, equation 10).
    """
    output = evaluate_critic(algo, critic.target_params, batch.next_observation, next_action, spec)
    least = jnp.argmin(expected_values(algo, output)[..., 0], axis=0)

    def of_least(x):
        return jnp.take_along_axis(x, least.reshape((1, -1) + (1,) * (x.ndim - 2)), axis=0)[0]

    only = jnp.zeros(least.shape, jnp.int32)
    following = q_learning.returns_of(jax.tree.map(of_least, output), only, algo.v_min, algo.v_max)
    return q_learning.n_step_returns(batch.rewards, batch.steps, batch.bootstrap, following, algo.gamma)


def fit_critic(
    algo: Any,
    critic: Learnt,
    batch: TransitionBatch,
    wanted: Returns,
    spec: EnvSpec,
    replicas: Replicas,
    penalty: Callable[[Params, jax.Array, jax.Array], tuple[jax.Array, Metrics]] | None = None,
) -> tuple[Learnt, Metrics, jax.Array]:
    """One step of every member of the ensemble towards the targets.

    Args:
      algo, critic, batch: as they are.
      wanted: what the critics should say of each transition.
      spec, replicas: as handed to `update`.
      penalty: of the critics' parameters, their expected values [ensemble, batch, actions], and those of the actions
        that were taken, [ensemble, batch]: this device's share of what is added to the loss, and of metrics.

    Returns:
      The critics, this device's share of the metrics, and how wrong they were on average, [batch].
    """
    discrete = isinstance(spec.action_space, spaces.Discrete)
    action = batch.action if discrete else jnp.zeros(batch.weight.shape, jnp.int32)
    low, high, huber = algo.v_min, algo.v_max, algo.quantile_huber

    def loss(params):
        taken = None if discrete else batch.action
        output = evaluate_critic(algo, params, batch.observation, taken, spec, batch.action_mask)
        losses, errors = jax.vmap(lambda one: q_learning.td_loss(one, action, wanted, low, high, huber))(output)
        if algo.prioritised:
            losses = losses * batch.drawn.importance[None]
        each = jax.vmap(lambda x: weighted_mean(x, batch.weight, replicas))
        # A sum over the members: each learns as if it were alone.
        loss = jnp.sum(each(losses))
        expected = expected_values(algo, output)
        values = jnp.take_along_axis(expected, action[None, :, None], axis=-1)[..., 0]
        metrics = {"critic_loss": loss, "q_value": jnp.mean(each(values)), "td_error": jnp.mean(each(errors))}
        if penalty is not None:
            added, told = penalty(params, expected, values)
            loss, metrics = loss + added, metrics | told
        return loss, (metrics, jnp.mean(errors, axis=0))

    gradients, (metrics, error) = jax.grad(loss, has_aux=True)(critic.params)
    return step(algo, critic, gradients, algo.learning_rate, replicas), metrics, error


def new_priorities(algo: Any, error: jax.Array) -> dict[str, jax.Array]:
    """The priorities of the batch, if the replay of `algo` keeps any, from how wrong the critics were [batch]."""
    return {"replay": error + q_learning.LEAST_PRIORITY} if algo.prioritised else {}


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
        output = evaluate_critic(algo, first, batch.observation, action, spec)
        return weighted_mean(-expected_values(algo, output)[0, :, 0], batch.weight, replicas)

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


def random_at_first(
    action: jax.Array, key: jax.Array, actor: ActorState, space: spaces.Space, mask: jax.Array | None = None
) -> jax.Array:
    """The actions [B, ...], or before the first update ones drawn uniformly with the keys [B] from what is allowed."""
    key, warm_up = jax.vmap(lambda k: jax.random.fold_in(k, 1))(key), actor.exploration["warm_up"]
    if isinstance(space, spaces.Discrete):
        return q_learning.epsilon_greedy(key, action, mask, warm_up.astype(jnp.float32), space.n)
    return jnp.where(warm_up, jax.vmap(space.sample)(key), action)


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


def act_by_sampling(
    algo: Any, actor: ActorState, timestep: TimeStep, carry: Carry, key: jax.Array, *, spec: EnvSpec, explore: bool
) -> ActorOutput:
    """An action of a stochastic policy: its best one, or if exploring a sample, or random before the first update."""
    mask = timestep.action_mask
    distribution = evaluate_policy(algo, actor.params, timestep.observation, spec, mask)
    if not explore:
        return ActorOutput(distribution.mode(), carry)
    action = distribution.sample(key)
    return ActorOutput(random_at_first(action, key, actor, spec.action_space, mask), carry)


def act_with_noise(
    algo: Any, actor: ActorState, timestep: TimeStep, carry: Carry, key: jax.Array, *, spec: EnvSpec, explore: bool
) -> ActorOutput:
    """The action [B, n] of a deterministic policy; if exploring with noise, or random before the first update."""
    action = evaluate_policy(algo, actor.params, timestep.observation, spec)
    if explore:
        action = add_noise(action, key, actor.exploration["noise"], spec.action_space)
        action = random_at_first(action, key, actor, spec.action_space)
    return ActorOutput(action, carry)
