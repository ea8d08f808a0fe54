"""Functions of the Q-learning algorithms: exploration, distributions of returns, targets and losses.

A *return distribution* consists of atoms and their probabilities, `[batch, K]` each. An expected value is one atom, C51
has K fixed atoms and QR-DQN K equally likely ones, so the same code computes targets for all three.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxrl.algos import train_state
from jaxrl.algos.base import field_group, number, part, part_class, required, static
from jaxrl.algos.fields import DiscountFields, Memory, PrioritizedReplay
from jaxrl.algos.optimizers import Adam, Optimizer, clipped
from jaxrl.algos.train_state import TrainState, weighted_mean
from jaxrl.core import sources, spaces
from jaxrl.core.schedules import Linear, Scalar
from jaxrl.core.types import (
    ActorOutput,
    ActorState,
    Carry,
    EnvSpec,
    Metrics,
    Network,
    NetworkInputs,
    Replicas,
    TimeStep,
)
from jaxrl.networks import QNetwork
from jaxrl.networks.heads import mask_values
from jaxrl.networks.q_heads import CategoricalReturns, QuantileReturns


class QCarry(struct.PyTreeNode):
    """Carry of an environment: recurrent state, position on the ladder of epsilons, and repeated random action."""

    network: Carry
    ladder_position: jax.Array  # float32, i / (N - 1) for environment i of N: 0 explores most
    random_action: jax.Array | tuple[()] = ()  # int32, -1 while acting greedily; () if random actions are not repeated


class Returns(struct.PyTreeNode):
    """Distributions of returns, each as K atoms."""

    atoms: jax.Array  # [batch, K]
    probabilities: jax.Array  # [batch, K]


class QState(struct.PyTreeNode):
    """State of a Q-learner."""

    network: TrainState
    updates: jax.Array  # int32


@part_class
class Ladder:
    """Ape-X ladder of epsilons, from the first environment to the last (Horgan et al., 2018, arXiv:1803.00933)."""

    exponent: Scalar = number(7.0, low=0, help="the last environment uses epsilon^(1 + exponent)")

    def epsilons(self, first: Scalar, position: jax.Array) -> jax.Array:
        """Return epsilon^(1 + exponent i / (N - 1)) (section 4.1).

        Args:
          first: epsilon of the first environment.
          position: i / (N - 1) for environment i of N.
        """
        return jnp.power(first, 1.0 + self.exponent * position)


@part_class
class QMemory(Memory):
    """Sequences from a replay of a Q-learner, which may end with their episode."""

    cross_episodes: bool = static(
        True,
        only_with="network.recurrent",
        help="let sequences continue into the next episode; False: they end with their episode",
    )


@part_class
class QPrioritizedReplay(PrioritizedReplay):
    """Prioritized replay of a Q-learner: of sequences, and with initial priorities (Kapturowski et al., 2019)."""

    eta: Scalar = number(
        0.9,
        low=0,
        high=1,
        only_with="network.recurrent",
        help="weight of the maximum TD error in a sequence's priority; the mean has the remaining weight",
    )
    initial: Literal["max", "td_error"] = static(
        "max",
        choices=("max", "td_error"),
        help="priority of new items, the largest so far or based on the actor's TD errors",
    )

    @property
    def sampler(self) -> sources.Prioritized:
        """Return the sampler; it reads initial priorities from the rows' extra `priority`."""
        insertion = "priority" if self.initial == "td_error" else None
        return dataclasses.replace(super().sampler, insertion=insertion, eta=self.eta)


@field_group
class QLearningFields(DiscountFields):
    """Q-network, its optimizer, and epsilon-greedy exploration."""

    max_grad_norm: Scalar | None = number(10.0, above=0, help="clip gradients to this global norm; None: no clipping")
    epsilon: Scalar = number(Linear(1.0, 0.05, 0.1), low=0, high=1, help="probability of a random action")
    ladder: Ladder | None = part(
        Ladder,
        was={"ladder_exponent": "exponent"},
        help="Ape-X ladder: epsilon decreases from the first environment to the last; None: all use epsilon",
    )
    random_persistence: float = static(
        0.0, low=0, below=1, help="probability that a random action is repeated at the next step"
    )
    optimizer: Optimizer = number(Adam(eps=1e-8))
    network: Network = static(QNetwork())

    has_target = False  # whether the state has a target network

    @property
    def transformation(self) -> optax.GradientTransformation:
        """Return the optimizer with clipping of the gradients."""
        return clipped(self.optimizer(required(self, "learning_rate")), self.max_grad_norm)

    def init(self, key: jax.Array, spec: EnvSpec) -> QState:
        network = train_state.create(*self.network.init(key, spec), self.transformation, target=self.has_target)
        return QState(network, jnp.int32(0))

    def values_of(self, output: Any) -> jax.Array:
        """Return the expected values [..., actions] from the network's output."""
        return output

    def noise_keys(self, key: jax.Array) -> jax.Array | None:
        """Return keys [B] for the noise of the network's layers; None without noise."""
        return None

    def actor(self, state: QState) -> ActorState:
        values = {"epsilon": self.epsilon, "ladder": self.ladder}
        exploration = jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), values)
        return ActorState(state.network.params, model_state=state.network.model_state, exploration=exploration)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> QCarry:
        random_action = jnp.int32(-1) if required(self, "random_persistence") else ()
        position = env_index.astype(jnp.float32) / max(num_envs - 1, 1)
        return QCarry(self.network.initial_carry(spec), position, random_action)

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: QCarry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        """Return greedy actions; when exploring, those of `epsilon_greedy` or `persistent_epsilon_greedy`."""
        noise = self.noise_keys(key) if explore else None
        inputs = NetworkInputs.of_timesteps(jax.tree.map(lambda x: x[None], timestep))
        output, network, _ = self.network.apply(
            actor.params, inputs, carry.network, spec=spec, model_state=actor.model_state, train=False, key=noise
        )
        values = self.values_of(jax.tree.map(lambda x: x[0], output))
        greedy, carry = jnp.argmax(values, axis=-1).astype(jnp.int32), carry.replace(network=network)
        if not explore:
            return ActorOutput(greedy, carry)
        epsilon, ladder = actor.exploration["epsilon"], actor.exploration["ladder"]
        if ladder:
            epsilon = ladder.epsilons(epsilon, carry.ladder_position)
        choice = key, greedy, timestep.action_mask, epsilon, spaces.expect(spec.action_space, spaces.Discrete).n
        if not self.random_persistence:
            return ActorOutput(epsilon_greedy(*choice), carry)
        action, random = persistent_epsilon_greedy(
            *choice, previous=carry.random_action, first=timestep.first, persistence=self.random_persistence
        )
        return ActorOutput(action, carry.replace(random_action=random))


# --- exploration -----------------------------------------------------------------------------------------------------


def epsilon_greedy(
    key: jax.Array, greedy: jax.Array, mask: jax.Array | None, epsilon: jax.Array, actions: int
) -> jax.Array:
    """Return a uniformly random allowed action with probability epsilon, otherwise the greedy one.

    Args:
      key: keys [B].
      greedy: int32 [B].
      mask: bool [B, actions] or None.
      epsilon: a scalar, or [B].
      actions: number of actions.

    Returns:
      int32 [B].
    """
    draws = jax.vmap(lambda k: jax.random.uniform(k, (2,), jnp.float32))(key)
    return jnp.where(draws[:, 0] < epsilon, _uniform_action(draws[:, 1], mask, actions), greedy)


def persistent_epsilon_greedy(
    key: jax.Array,
    greedy: jax.Array,
    mask: jax.Array | None,
    epsilon: jax.Array,
    actions: int,
    *,
    previous: jax.Array,
    first: jax.Array,
    persistence: float,
) -> tuple[jax.Array, jax.Array]:
    """Return `epsilon_greedy` actions; a random action is repeated at the next step with probability `persistence`.

    Independent random actions cancel out; repeated ones reach more distant states (temporally extended epsilon-greedy,
    Dabney et al., 2021, arXiv:2006.01782, with geometric durations of mean 1 / (1 - persistence)). Every action is
    random with probability epsilon, as without persistence: the first action of an episode is random with that
    probability; at later steps without a repeated action, a new random action has probability
    epsilon (1 - persistence) / (1 - epsilon persistence). A forbidden action is not repeated but replaced by another
    random one.

    Args:
      key, greedy, mask, epsilon, actions: as in `epsilon_greedy`.
      previous: the random action of the previous step, int32 [B]; -1 if the previous action was greedy.
      first: bool [B], True at an episode's first step, where nothing is repeated.
      persistence: probability of repeating a random action, in [0, 1).

    Returns:
      The actions, int32 [B], and the next step's `previous`: the same actions, with -1 for greedy ones.
    """
    draws = jax.vmap(lambda k: jax.random.uniform(k, (3,), jnp.float32))(key)
    goes_on = ~first & (previous >= 0) & (draws[:, 2] < persistence)
    begins = draws[:, 0] < jnp.where(first, epsilon, epsilon * (1.0 - persistence) / (1.0 - epsilon * persistence))
    same = goes_on
    if mask is not None:
        same = goes_on & jnp.take_along_axis(mask, jnp.maximum(previous, 0)[:, None], axis=-1)[:, 0]
    fresh = jnp.where(goes_on | begins, _uniform_action(draws[:, 1], mask, actions), -1)
    random = jnp.where(same, previous, fresh)
    return jnp.where(random >= 0, random, greedy), random


def _uniform_action(draw, mask, actions):
    """Select a uniformly distributed allowed action [B] from a uniform number [B] in [0, 1)."""
    if mask is None:
        return (draw * actions).astype(jnp.int32)
    rank = (draw * jnp.sum(mask, axis=-1, dtype=jnp.int32).astype(jnp.float32)).astype(jnp.int32)
    allowed = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
    return jnp.argmax(allowed > rank[:, None], axis=-1).astype(jnp.int32)


def transition_keys(key: jax.Array, batch: int, replicas: Replicas) -> jax.Array:
    """Return keys [batch] for this device's transitions, which depend on logical shards, not on the devices."""
    shards = replicas.first_shard + jnp.arange(replicas.shards, dtype=jnp.int32)
    draw = jax.vmap(lambda shard: jax.random.split(jax.random.fold_in(key, shard), batch // replicas.shards))
    return draw(shards).reshape(-1)


# --- distributions of returns ----------------------------------------------------------------------------------------


def support(low: Scalar, high: Scalar, atoms: int) -> jax.Array:
    """Return C51's support [atoms]: evenly spaced returns from `low` to `high`."""
    return low + (high - low) * jnp.arange(atoms, dtype=jnp.float32) / max(atoms - 1, 1)


def action_values(output: Any, low: Scalar, high: Scalar) -> jax.Array:
    """Return expected returns `[..., actions]`; for forbidden actions, the most negative finite number.

    Args:
      output: a Q-network's output: values, `CategoricalReturns` or `QuantileReturns`.
      low, high: the ends of C51's support.
    """
    if isinstance(output, CategoricalReturns):
        probabilities = jax.nn.softmax(output.logits, axis=-1)
        # Computed in float32 on every device: TF32 and bfloat16 would round the values that select actions.
        atoms = support(low, high, probabilities.shape[-1])
        return mask_values(jnp.matmul(probabilities, atoms, precision=jax.lax.Precision.HIGHEST), output.mask)
    if isinstance(output, QuantileReturns):
        return mask_values(jnp.mean(output.quantiles, axis=-1), output.mask)
    return output


def of_action(output: Any, action: jax.Array) -> jax.Array:
    """Select the output for the given actions [batch]: values [batch, 1], logits [batch, K] or quantiles [batch, K]."""
    if isinstance(output, CategoricalReturns):
        per_action = output.logits
    elif isinstance(output, QuantileReturns):
        per_action = output.quantiles
    else:
        per_action = output[..., None]
    return jnp.take_along_axis(per_action, action[:, None, None], axis=1)[:, 0]


def returns_of(output: Any, action: jax.Array, low: Scalar, high: Scalar) -> Returns:
    """Return the distribution of returns for the given actions [batch]."""
    chosen = of_action(output, action)
    if isinstance(output, CategoricalReturns):
        atoms = jnp.broadcast_to(support(low, high, chosen.shape[-1])[None], chosen.shape)
        return Returns(atoms, jax.nn.softmax(chosen, axis=-1))
    return Returns(chosen, jnp.full_like(chosen, 1.0 / chosen.shape[-1]))


# --- targets ---------------------------------------------------------------------------------------------------------


def n_step_target(
    rewards: jax.Array, steps: jax.Array, bootstrap: jax.Array, value: jax.Array, gamma: Scalar
) -> jax.Array:
    """Return the n-step target: the sum of gamma^k r_k, plus gamma^steps V unless the task ended; no gradient.

    Args:
      rewards: [batch, n], 0 after the end of an episode.
      steps: [batch] number of steps taken, 1..n.
      bootstrap: [batch] bool, False if the task terminated; float32 with discounts, as in `TransitionBatch`.
      value: [batch] value of the observation after `steps` steps.
      gamma: discount.
    """
    powers = jnp.power(jnp.asarray(gamma, jnp.float32), jnp.arange(rewards.shape[-1], dtype=jnp.float32))
    reach = jnp.power(jnp.asarray(gamma, jnp.float32), steps.astype(jnp.float32))
    if bootstrap.dtype != jnp.bool_:
        reach, bootstrap = reach * bootstrap, bootstrap != 0.0
    total = jnp.sum(rewards * powers[None], axis=-1) + jnp.where(bootstrap, reach * value, 0.0)
    return jax.lax.stop_gradient(total)


def n_step_returns(
    rewards: jax.Array, steps: jax.Array, bootstrap: jax.Array, next_returns: Returns, gamma: Scalar
) -> Returns:
    """Apply `n_step_target` to every atom of the next distribution, and keep the probabilities."""
    each = jax.vmap(n_step_target, in_axes=(None, None, None, 1, None), out_axes=1)
    atoms = each(rewards, steps, bootstrap, next_returns.atoms, gamma)
    return Returns(atoms, jax.lax.stop_gradient(next_returns.probabilities))


def rescaled(x: jax.Array, epsilon: float = 1e-3) -> jax.Array:
    """Return h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x (Pohlen et al., 2018, arXiv:1805.11593, section 3.2)."""
    return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1.0) - 1.0) + epsilon * x


def unscaled(y: jax.Array, epsilon: float = 1e-3) -> jax.Array:
    """Invert `rescaled`: sign(y) (s^2 - 1), s = (sqrt(1 + 4 epsilon (|y| + 1 + epsilon)) - 1) / 2 epsilon.

    This is proposition A.2 of the same paper. The difference in s is between two numbers near 1 and would cost float32
    three digits, so an equivalent quotient is computed instead.
    """
    inner = 4.0 * epsilon * (jnp.abs(y) + 1.0 + epsilon)
    root = 2.0 * (jnp.abs(y) + 1.0 + epsilon) / (jnp.sqrt(1.0 + inner) + 1.0)
    return jnp.sign(y) * (root - 1.0) * (root + 1.0)


# --- losses ----------------------------------------------------------------------------------------------------------


def td_loss(
    output: Any,
    action: jax.Array,
    target: Returns,
    low: Scalar,
    high: Scalar,
    quantile_huber: Scalar,
    huber: Scalar | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the loss and the priority of each transition, according to the type of the network's output.

    Args:
      output: the learning network's output: values, `CategoricalReturns` or `QuantileReturns`, `[batch, actions, ...]`.
      action: int32 [batch].
      target: the target distribution of returns.
      low, high: the ends of C51's support.
      quantile_huber: kappa, the absolute error above which QR-DQN's loss is linear.
      huber: Huber threshold of expected values; None: squared error.

    Returns:
      The loss [batch] and the priority [batch]. For values, these are half the squared error, or Huber's loss, and the
      absolute error; for categorical returns, the cross-entropy and the KL divergence from the target (Hessel et al.,
      2018); for quantiles, the quantile loss is also the priority.
    """
    chosen = of_action(output, action)
    if isinstance(output, CategoricalReturns):
        target_probs = categorical_projection(target, low, high, chosen.shape[-1], output.smoothing)
        loss = -jnp.sum(target_probs * jax.nn.log_softmax(chosen, axis=-1), axis=-1)
        entropy = -jnp.sum(jax.scipy.special.xlogy(target_probs, target_probs), axis=-1)
        return loss, jnp.maximum(loss - entropy, 0.0)
    if isinstance(output, QuantileReturns):
        loss = quantile_huber_loss(chosen, target.atoms, quantile_huber, output.fractions)
        return loss, loss
    error = target.atoms[:, 0] - chosen[:, 0]
    loss = 0.5 * jnp.square(error) if huber is None else optax.losses.huber_loss(error, delta=huber)
    return loss, jnp.abs(error)


def prediction_error(
    prediction: jax.Array, action: jax.Array, reward: jax.Array, next_features: jax.Array
) -> jax.Array:
    """Return the mean squared error [batch] of self-predictive heads, over the reward and the next features.

    Args:
      prediction: predicted reward and features, [ensemble, batch, actions, 1 + features].
      action: the actions taken, int32 [batch]; unused if `actions` is 1.
      reward: [batch].
      next_features: [batch, ensemble, features].
    """
    index = action if prediction.shape[2] > 1 else jnp.zeros(reward.shape, jnp.int32)
    taken = jnp.take_along_axis(prediction, index[None, :, None, None], axis=2)[:, :, 0]
    features = jnp.moveaxis(next_features, 1, 0)
    reward = jnp.broadcast_to(reward[None, :, None], (*features.shape[:2], 1))
    return jnp.mean(jnp.square(taken - jnp.concatenate([reward, features], axis=-1)), axis=(0, 2))


def categorical_projection(
    returns: Returns, low: Scalar, high: Scalar, atoms: int, smoothing: float = 0.0
) -> jax.Array:
    """Project `returns` onto C51's support, as probabilities (Bellemare et al., 2017, arXiv:1707.06887, equation 7).

    Args:
      returns: distributions with K atoms; atoms outside the support are clipped to its ends.
      low, high: the ends of the support.
      atoms: number of atoms of the support.
      smoothing: HL-Gauss's standard deviation in units of the atom spacing: each return becomes a normal distribution,
        and each atom gets the mass within half a spacing of it (Farebrother et al., 2024, arXiv:2403.03950, equation
        4); 0: each return is split between its two neighbors.

    Returns:
      [batch, atoms], no gradient.
    """
    places = (jnp.clip(returns.atoms, low, high) - low) / (high - low) * (atoms - 1)
    if smoothing:
        edges = jnp.arange(atoms + 1, dtype=jnp.float32) - 0.5
        below = jax.scipy.special.ndtr((edges[None, :, None] - places[:, None, :]) / smoothing)
        shares = (below[:, 1:] - below[:, :-1]) / (below[:, -1:] - below[:, :1])
        return jax.lax.stop_gradient(jnp.sum(shares * returns.probabilities[:, None, :], axis=-1))
    # On CPUs, a scatter replaces the K x K products: 256 x 101 x 101 take 1 ms instead of 11, and a whole update of TD3
    # with small networks takes two thirds of the time. On GPUs, a scatter would add in a nondeterministic order.
    scattered, nearby = (functools.partial(share_out, atoms=atoms) for share_out in (_scattered, _nearby))
    shared = jax.lax.platform_dependent(places, returns.probabilities, cpu=scattered, default=nearby)
    return jax.lax.stop_gradient(shared)


def _nearby(places: jax.Array, probabilities: jax.Array, atoms: int) -> jax.Array:
    """Split each return [batch, K] between its two neighboring atoms, by a triangle of one spacing to each side."""
    distance = jnp.abs(places[:, None, :] - jnp.arange(atoms, dtype=jnp.float32)[None, :, None])
    return jnp.sum(jnp.maximum(1.0 - distance, 0.0) * probabilities[:, None, :], axis=-1)


def _scattered(places: jax.Array, probabilities: jax.Array, atoms: int) -> jax.Array:
    """Return the result of `_nearby`, computed by scattering the two shares of each return."""
    # A NaN stays NaN, in the first atoms.
    lower = jnp.clip(jnp.floor(jnp.nan_to_num(places)), 0, max(atoms - 2, 0))
    share = places - lower

    def of_row(lower, share, mass):
        empty = jnp.zeros(atoms, mass.dtype)
        return empty.at[lower].add((1.0 - share) * mass).at[lower + 1].add(share * mass)

    return jax.vmap(of_row)(lower.astype(jnp.int32), share, probabilities)


def support_metrics(
    output: Any, target: Returns, low: Scalar, high: Scalar, weight: jax.Array, replicas: Replicas
) -> Metrics:
    """Return this device's share of metrics of how well the targets fit C51's support; empty for other heads.

    `support_edge_mass` is the probability of the two end atoms after the projection, `support_clipped_mass` that of
    returns outside the support. Mass at an end is fine if returns cannot be more extreme; clipped mass is not.

    Args:
      output: the learning network's output.
      target: the target distribution of returns, before the projection.
      low, high: the ends of the support.
      weight: which transitions count, [batch].
      replicas: as passed to `update`.
    """
    if not isinstance(output, CategoricalReturns):
        return {}
    projected = categorical_projection(target, low, high, output.logits.shape[-1], output.smoothing)
    slack = 1e-3 * (high - low)  # tolerance for rounding
    beyond = (target.atoms < low - slack) | (target.atoms > high + slack)
    clipped = jnp.sum(jnp.where(beyond, target.probabilities, 0.0), axis=-1)
    masses = {"support_edge_mass": projected[:, 0] + projected[:, -1], "support_clipped_mass": clipped}
    return {name: weighted_mean(mass, weight, replicas) for name, mass in masses.items()}


def quantile_huber_loss(
    quantiles: jax.Array, targets: jax.Array, huber: Scalar, levels: jax.Array | None = None
) -> jax.Array:
    """Return sum_i mean_j |tau_i - 1[u_ij < 0]| L(u_ij) / kappa (Dabney et al., 2018, eq. 10), u_ij = y_j - theta_i.

    Args:
      quantiles: theta [batch, N], at tau_i.
      targets: y [batch, M], equally likely; no gradient.
      huber: kappa, more than 0: L(u) is u^2 / 2 for |u| up to kappa, and linear above.
      levels: tau [batch, N]; None: (2 i + 1) / 2 N for i = 0 .. N-1.

    Returns:
      [batch].
    """
    count = quantiles.shape[-1]
    if levels is None:
        levels = (jnp.arange(count, dtype=jnp.float32)[None] + 0.5) / count
    error = jax.lax.stop_gradient(targets)[:, None, :] - quantiles[:, :, None]
    size = jnp.abs(error)
    loss = jnp.where(size <= huber, 0.5 * jnp.square(error), huber * (size - 0.5 * huber)) / huber
    weight = jnp.abs(levels[:, :, None] - (error < 0.0).astype(jnp.float32))
    return jnp.sum(jnp.mean(weight * loss, axis=-1), axis=-1)
