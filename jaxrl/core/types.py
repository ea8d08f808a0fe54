"""Data types and protocols shared by jaxrl's packages.

Everything is time-major, `[time, environment, ...]`. A *row* is an observation, the action taken there, and the reward
and ending that followed. The last observation of an episode is a separate row: its action is ignored, its `weight` is
False, and the next row is the first of the next episode, where recurrent carries reset. The value of the true last
observation is therefore computed in the same forward pass as every other.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.core import spaces
from jaxrl.core.native import NativeSpaces
from jaxrl.core.sources import Dataset as Dataset
from jaxrl.core.sources import Episodes as Episodes
from jaxrl.core.sources import Replay as Replay
from jaxrl.core.sources import Rollouts as Rollouts
from jaxrl.core.sources import Source as Source

if TYPE_CHECKING:
    import typing_extensions

# The type of leaves: JAX arrays by default; `TimeStep[np.ndarray]` is in the host's memory. Bracketed type parameters
# (UP046) have defaults only from Python 3.13 on.
if not TYPE_CHECKING:
    Array = TypeVar("Array")
else:
    Array = typing_extensions.TypeVar("Array", jax.Array, np.ndarray, default=jax.Array)

PyTree = Any
Params = PyTree
ModelState = PyTree
Carry = PyTree
Metrics = dict[str, jax.Array]


class Episode(Generic[Array], struct.PyTreeNode):  # noqa: UP046
    """True statistics of the running episode, unaffected by reward wrappers.

    If an episode is only part of a game (one life), the statistics are the game's, and `complete` marks the game's end.
    """

    returns: Array  # sum of unmodified rewards so far, float32
    length: Array  # transitions so far, int32
    complete: Array | None = None  # bool; None: the same as `TimeStep.last`
    life: "Episode[Array] | None" = None  # return and length of only this part; None: an episode is the whole game
    info: dict[str, Array] | None = None  # running values of `TimeStep.info`, float32 (`jaxrl.core.episode_info`)


class TimeStep(Generic[Array], struct.PyTreeNode):  # noqa: UP046
    """Output of an environment at one step; the reward and the ending arrived *together with* the observation."""

    observation: PyTree
    reward: Array  # float32; 0 where first
    terminated: Array  # bool: the task ended here, nothing follows
    truncated: Array  # bool: cut off here (time limit), the task would continue
    first: Array  # bool: an episode begins here
    # Bool, True where allowed, shape (n,); None: everything is allowed. A tree like the action if that has parts.
    action_mask: PyTree | None = None
    previous_action: PyTree | None = None  # filled in by the acting loop; zeros where first
    episode: Episode[Array] | None = None
    info: dict[str, Array] | None = None  # further reports: float32 scalars by name; 0 where first
    # Float32 in [-1, 1], the environment's own discount in addition to gamma, for everything after this observation; 1
    # where first, 0 where terminated, negative where the other of two players moves next. None: 1 until the task ends.
    discount: Array | None = None
    # Bool: the agent can act; False for an inactive agent, such as a dead unit that is still rewarded until its team's
    # episode ends. Such rows are included in returns and value learning, but on-policy algorithms do not train the
    # policy on them.
    active: Array | None = None  # None: the agent can always act

    @property
    def last(self) -> Array:
        """True where this observation is the last of its episode (bool); the action taken there is ignored."""
        return operator.or_(self.terminated, self.truncated)

    def __getitem__(self, index: int | slice | None) -> "TimeStep[Array]":
        """Index the first axis of every leaf; `[None]` adds an axis."""
        return jax.tree.map(lambda x: x[index], self)


class Trajectory(Generic[Array], struct.PyTreeNode):  # noqa: UP046
    """Rows in RLDS order, with leaves `[time, environment, ...]`."""

    observation: PyTree
    action: PyTree
    reward: Array  # followed the action; 0 where weight is False
    terminated: Array  # followed the action; False where weight is False
    truncated: Array  # followed the action; False where weight is False
    first: Array  # the observation begins an episode
    weight: Array  # bool: False at last observations (and masked rows), which are never learned from
    action_mask: PyTree | None = None
    extras: dict[str, PyTree] = struct.field(default_factory=dict)  # stored by the algorithm: log_prob, value, ...
    discount: Array | None = None  # float32, followed the action; None: see `discounts`

    @property
    def discounts(self) -> Array:
        """The `discount` as float32; if it is None, 0 where the task ended or `weight` is False, 1 elsewhere."""
        discounts: Any = self.weight & ~self.terminated if self.discount is None else self.discount
        return discounts.astype(np.float32)


class Rollout(struct.PyTreeNode):
    """Batch of a `Rollouts` or `Episodes` source: T + 1 time steps of B environments, and T actions.

    Observations are stored once, in `timesteps`; rows are derived from them. Slices and rows are free within a compiled
    program, because XLA reads them from the time steps.

    A recurrent network can be unrolled again from `carry` over `timesteps[:-1]`, where the actions were taken, and
    then over `final`, the time step to bootstrap from.
    """

    timesteps: TimeStep  # [T + 1, B, ...]
    action: PyTree  # [T, B, ...] from the algorithm; environments received it clipped to the bounds of their boxes
    extras: dict[str, PyTree]  # [T, B, ...] stored by the algorithm: log_prob, value, ...
    carry: Carry  # [B, ...] at the first time step
    final_carry: Carry  # [B, ...] at the last time step
    statistics: PyTree = ()  # frozen normalizer statistics used for acting; [B, ...] if environments differ
    version: jax.Array | None = None  # version of the actor state used for acting, int32
    # Groups of environments that collected equal parts of the batch, int32 [parts], if a replay stores them separately.
    groups: jax.Array | None = None
    # Whether each column is one episode, from its first row on, followed by rows of weight 0.
    whole_episodes: bool = struct.field(pytree_node=False, default=False)

    @property
    def final(self) -> TimeStep:
        """The time step [B, ...] after the last row."""
        return self.timesteps[-1]

    @property
    def active(self) -> jax.Array | None:
        """True where the agent of a row [T, B] could act (`TimeStep.active`), bool; None: all agents could act."""
        return jax.tree.map(lambda x: x[:-1], self.timesteps.active)

    @property
    def rows(self) -> Trajectory:
        """The rows [T, B, ...]: each time step with its action, and the reward and ending that followed."""
        now, following = self.timesteps[:-1], self.timesteps.replace(observation=(), action_mask=None)[1:]
        # A first time step after one that was not the last: the environment failed and was rebuilt.
        weight = ~now.last & ~following.first
        if self.whole_episodes:
            weight = jnp.cumsum((~weight).astype(jnp.int32), axis=0, dtype=jnp.int32) == 0
        discount = following.discount
        if discount is not None:
            discount = jnp.where(weight & ~following.terminated, discount, 0.0)
        return Trajectory(
            observation=now.observation,
            action=self.action,
            reward=jnp.where(weight, following.reward, 0.0),
            terminated=weight & following.terminated,
            truncated=weight & following.truncated,
            first=now.first,
            weight=weight,
            action_mask=now.action_mask,
            extras=self.extras,
            discount=discount,
        )


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """Static description of an environment for algorithms and networks."""

    name: str
    observation_space: spaces.Space
    action_space: spaces.Space
    masked: bool = False  # whether time steps carry an action mask
    native: NativeSpaces | None = None  # native spaces of an environment outside JAX
    num_agents: int = 1  # number of neighboring batch rows that are the agents of one environment
    discounted: bool = False  # whether time steps have the environment's own discount; recipes may declare it


# --- environments ------------------------------------------------------------------------------------------------


class HasSpaces(Protocol):
    """Object with a name and spaces: an environment, a recipe of host environments, or an `EnvSpec`."""

    @property
    def name(self) -> str: ...
    @property
    def observation_space(self) -> spaces.Space: ...
    @property
    def action_space(self) -> spaces.Space: ...


@runtime_checkable
class Environment(HasSpaces, Protocol):
    """Single environment in JAX, as pure functions that `jax.vmap` can batch.

    An environment is itself a pytree whose leaves are its physical parameters. If `resets` is True, as for environments
    from `jaxrl.make`, a `step` past the end of an episode (from a time step that was `last`) ignores the action and
    begins the next episode. Topologies wrap environments that do not reset.

    An environment with several agents has an attribute `num_agents`. Its spaces are those of one agent. Its actions and
    the leaves of its time steps have a leading axis of agents, which topologies turn into rows of the batch
    (`jaxrl.envs.agents`).
    """

    @property
    def resets(self) -> bool:
        """True if a step past the end of an episode begins the next episode."""
        ...

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]: ...
    def step(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, TimeStep]: ...


class HostEnvironment(Protocol):
    """Batch of environments outside JAX, with time steps as batched NumPy arrays; rows are as in `Environment`.

    Returned arrays are not modified afterwards. An environment that failed may be rebuilt: its time step is `first`
    although the previous one was not `last`, and the reward and ending of the previous row are unknown.
    """

    num_envs: int

    def reset(self) -> TimeStep[np.ndarray]: ...
    def step(self, actions: PyTree) -> TimeStep[np.ndarray]: ...
    def close(self) -> None: ...


class HostRecipe(HasSpaces, Protocol):
    """Recipe for building a `HostEnvironment`; `jaxrl.make` returns one for suites outside JAX.

    A recipe whose time steps have the environment's own discount may declare this by an attribute `discounted = True`;
    Dreamer needs this to learn from negative discounts.
    """

    def build(self, num_envs: int, seed: int, first_env: int = 0) -> HostEnvironment:
        """Build `num_envs` environments, each seeded with `seed` and its index, starting at `first_env`.

        The environments of a run are thus the same for any division into batches.
        """
        ...


@runtime_checkable
class NativeRecipe(HostRecipe, Protocol):
    """Recipe with the environment's native spaces, whose dtypes and `start` of integers may differ from jaxrl's."""

    @property
    def native(self) -> NativeSpaces | None:
        """The native spaces; None for a recipe from a file that lacks them."""
        ...


def env_spec(env: Environment | HostRecipe) -> EnvSpec:
    """Return the `EnvSpec` of an environment or recipe."""
    masked, discounted = False, bool(getattr(env, "discounted", False))  # a recipe may declare it
    native = env.native if isinstance(env, NativeRecipe) else None
    if isinstance(env, Environment):
        timestep = jax.eval_shape(lambda key: env.reset(key)[1], jax.random.key(0))
        masked, discounted = timestep.action_mask is not None, timestep.discount is not None
    return EnvSpec(env.name, env.observation_space, env.action_space, masked, native, num_agents(env), discounted)


def num_agents(env: Any) -> int:
    """Return the number of batch rows that share one environment's episode (`jaxrl.envs.agents`); usually 1."""
    while isinstance(env, Environment) and not hasattr(env, "num_agents"):
        env = getattr(env, "env", None)
    return getattr(env, "num_agents", 1) if isinstance(env, Environment) else 1


# --- networks ----------------------------------------------------------------------------------------------------


class NetworkInputs(struct.PyTreeNode):
    """Inputs of a network, with leaves `[T, B, ...]`; fields are None if unknown."""

    observation: PyTree
    first: jax.Array | None = None  # bool [T, B]: an episode begins here
    previous_action: PyTree | None = None  # zeros where first
    previous_reward: jax.Array | None = None  # float32 [T, B], arrived with the observation
    action_mask: PyTree | None = None  # None also if every action is allowed

    @classmethod
    def of_timesteps(cls, timesteps: TimeStep) -> "NetworkInputs":
        """Return the inputs for time steps `[T, B, ...]`, in acting, rollouts and sequences; all fields are known."""
        return cls(
            observation=timesteps.observation,
            first=timesteps.first,
            previous_action=timesteps.previous_action,
            previous_reward=timesteps.reward,
            action_mask=timesteps.action_mask,
        )

    @classmethod
    def of_transitions(cls, observation: PyTree, action_mask: PyTree | None = None) -> "NetworkInputs":
        """Return the inputs for single observations of replayed transitions, `[batch, ...]`, with a time axis added.

        A replay of single transitions does not store previous steps; see `TRANSITION_INPUTS`.
        """
        observation, action_mask = jax.tree.map(lambda x: x[None], (observation, action_mask))
        return cls(observation=observation, action_mask=action_mask)


SEQUENCE_INPUTS = frozenset({"observation", "first", "previous_action", "previous_reward", "action_mask"})
TRANSITION_INPUTS = frozenset({"observation", "action_mask"})


@runtime_checkable
class Network(Protocol):
    """Network, as pure functions of a parameter tree; the network itself is frozen and hashable.

    State other than parameters, such as the running statistics of batch normalization, is in `model_state`, a pytree of
    arrays; `()` for most networks. The floats in `model_state` are averaged over replicas.
    """

    @property
    def recurrent(self) -> bool:
        """True if the network has a recurrent carry."""
        ...

    @property
    def requires(self) -> frozenset[str]:
        """The fields of `NetworkInputs` that the network needs."""
        ...

    def init(self, key: jax.Array, spec: EnvSpec) -> tuple[Params, ModelState]:
        """Initialize and return parameters and model state.

        Raises:
          ConfigError: the network does not fit the spaces.
        """
        ...

    def initial_carry(self, spec: EnvSpec) -> Carry:
        """Return one environment's initial recurrent state, without batch axis; `()` for feed-forward networks."""
        ...

    def apply(
        self,
        params: Params,
        inputs: NetworkInputs,
        carry: Carry,
        *,
        spec: EnvSpec,
        model_state: ModelState,
        train: bool,
        key: jax.Array | None = None,
    ) -> tuple[Any, Carry, ModelState]:
        """Unroll the network over time.

        Args:
          params: parameters, as from `init`.
          inputs: network inputs with leaves `[T, B, ...]`.
          carry: recurrent state `[B, ...]` at the first time step. Where `inputs.first` is True, the state is reset to
            `initial_carry` before the step.
          spec: the environment's spec.
          model_state: model state, as from `init`.
          train: whether to normalize batches by their own statistics and to update the statistics in `model_state`;
            otherwise the statistics in `model_state` are used unchanged.
          key: keys `[B]` for noisy layers; None: no noise.

        Returns:
          Outputs `[T, B, ...]`, the carry after the last time step, and the new model state.
        """
        ...


@runtime_checkable
class ValueNetwork(Network, Protocol):
    """Network for on-policy actor-critics, whose output is a `PolicyValue`."""

    def value(
        self, params: Params, inputs: NetworkInputs, carry: Carry, *, spec: EnvSpec, model_state: ModelState
    ) -> jax.Array:
        """Return the values `[T, B]` in evaluation mode."""
        ...


# --- replayed experience -----------------------------------------------------------------------------------------


class SampleInfo(struct.PyTreeNode):
    """Sampling statistics of a batch's items, `[batch]`; an algorithm returns new priorities in the same order.

    `position` and `step` identify an item by its storage position and its row. Once the row is overwritten, a new
    priority for the item is dropped.
    """

    position: jax.Array  # int32, over all logical shards, concatenated
    step: jax.Array  # uint32, the row's step in its environment
    probability: jax.Array  # float32, probability of sampling this item, over all shards; 0: nothing to sample
    importance: jax.Array  # float32, (N P)^-beta, normalized by the sampler; 1 without priorities
    priority: jax.Array  # float32
    age_steps: jax.Array  # int32, rows of its environment since the item's first row
    age_updates: jax.Array  # int32, batches sampled from this source since it was stored
    times_sampled: jax.Array  # int32, including this time


class TransitionBatch(Generic[Array], struct.PyTreeNode):  # noqa: UP046
    """Batch of a `Replay` source: n-step transitions with leaves `[batch, ...]` and undiscounted rewards.

    `rewards[:, k]` belongs to the k-th step: rewards after an ending are 0, and `bootstrap` is False where the episode
    terminated within the n steps. The update applies gamma (`q_learning.n_step_target`), so gamma stays traced.

    Discounts of the environment itself are already included: each reward is multiplied by the discounts of the steps
    before it, and `bootstrap` is their product over all steps (float32), 0 where the episode terminated.
    """

    observation: PyTree
    action: PyTree
    rewards: Array  # [batch, n]
    steps: Array  # [batch] actual number of steps of the transition, 1..n
    bootstrap: Array  # [batch] bool, or float32 with discounts
    next_observation: PyTree
    weight: Array  # [batch] bool: False for items to ignore in learning
    action_mask: PyTree | None = None
    next_action_mask: PyTree | None = None
    extras: dict[str, PyTree] = struct.field(default_factory=dict)  # at the transition's first row
    sample_info: SampleInfo | None = None

    def with_discounts(self) -> Self:
        """Return the same transitions with discounts, which are 1 if this batch has none."""
        return self.replace(bootstrap=self.bootstrap.astype(np.float32))

    @property
    def importance(self) -> jax.Array:
        """The importance weights [batch] of the samples; 1 without `sample_info`."""
        return jnp.ones(self.weight.shape, jnp.float32) if self.sample_info is None else self.sample_info.importance


class SequenceBatch(Generic[Array], struct.PyTreeNode):  # noqa: UP046
    """Batch of a `Replay` source with a `sequence`: sequences of rows, with leaves `[length, batch, ...]`.

    `timesteps` are those at which the actions were taken, so that a recurrent network can be unrolled from `carry`. The
    first `burn_in` rows only warm up the recurrent state: their weight is False.
    """

    rows: Trajectory[Array]  # [L, batch, ...]; zeros where not in the mask
    timesteps: TimeStep[Array]  # [L, batch, ...]
    mask: Array  # [L, batch] bool: the row belongs to the sequence
    carry: Carry  # [batch, ...] at the first row
    sample_info: SampleInfo | None
    burn_in: int = struct.field(pytree_node=False, default=0)

    def with_discounts(self) -> Self:
        """Return the same sequences with discounts, which are 1 if the rows have none."""
        discount: Any = ~self.timesteps.terminated if self.timesteps.discount is None else self.timesteps.discount
        timesteps = self.timesteps.replace(discount=discount.astype(np.float32))
        return self.replace(rows=self.rows.replace(discount=self.rows.discounts), timesteps=timesteps)


# --- algorithms --------------------------------------------------------------------------------------------------


class ActorState(struct.PyTreeNode):
    """Subset of a learner's state needed for acting, published to actors and versioned."""

    params: Params
    statistics: PyTree = ()  # frozen normalizer statistics
    model_state: ModelState = ()  # model state of the acting network
    exploration: dict[str, PyTree] = struct.field(default_factory=dict)  # epsilon, ...


class ActorOutput(struct.PyTreeNode):
    """Output of acting at one time step, with leaves `[environment, ...]`."""

    action: PyTree
    carry: Carry
    extras: dict[str, PyTree] = struct.field(default_factory=dict)  # for `update`, at this time step


class UpdateInfo(struct.PyTreeNode):
    """Output of an update in addition to the state: scalar metrics, and new priorities for prioritized sources."""

    metrics: Metrics
    priorities: dict[str, jax.Array] = struct.field(default_factory=dict)


class Replicas(Protocol):
    """Reductions over devices, passed to `update` by a topology; on one device, they are the identity.

    A *shard* is one of a fixed number of logical groups of environments; minibatches are formed within shards, so their
    content does not depend on the number of devices. This device holds `shards` of them, numbered `first_shard,
    first_shard + 1, ...` over all devices.
    """

    @property
    def shards(self) -> int:
        """The number of logical shards on this device, a Python integer."""
        ...

    @property
    def devices(self) -> int:
        """The number of devices that share the work, a Python integer."""
        ...

    @property
    def first_shard(self) -> jax.Array | int: ...

    @property
    def platform(self) -> str:
        """The platform of the devices, such as "cpu"."""
        ...

    def mean(self, tree: PyTree) -> PyTree: ...
    def sum(self, tree: PyTree) -> PyTree: ...
    def max(self, tree: PyTree) -> PyTree: ...
    def any(self, flag: jax.Array) -> jax.Array: ...


@runtime_checkable
class Algorithm(Protocol):
    """Algorithm: a frozen dataclass and pytree, whose leaves are its numeric settings.

    Its methods are pure functions, which contain the losses, targets and exploration. Schedules are resolved before any
    method is called (`jaxrl.schedules.resolve_schedules`): the methods only receive numbers.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # algorithms are dataclasses

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        """Return the algorithm with all environment-dependent defaults filled in; called once, before anything else.

        Before that, a field whose default depends on the environment is None. `num_envs` is 0 in training without
        acting.
        """
        ...

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        """Return one line per problem of these settings; empty if they are valid. Called before compilation."""
        ...

    @property
    def experience(self) -> Mapping[str, Source]: ...

    def init(self, key: jax.Array, spec: EnvSpec) -> PyTree: ...
    def actor(self, state: PyTree) -> ActorState: ...
    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> Carry:
        """Return the carry of one environment before its first step, without a batch axis.

        Args:
          spec: spec of the environment.
          env_index: index of the environment among all environments of the run, a scalar.
          num_envs: total number of environments, over all devices.
        """
        ...

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: Carry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        """Return one action per environment, given the time step and carry `[B, ...]` and keys `[B]`.

        If `explore` is False, nothing is sampled, so that a policy can be exported, and `key` is None.
        """
        ...

    def update(
        self, state: PyTree, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[PyTree, UpdateInfo]: ...


@runtime_checkable
class RolloutExtras(Protocol):
    """Algorithm that adds extras to complete rollouts, such as priorities at insertion."""

    def rollout_extras(self, actor: ActorState, rollout: Rollout, *, spec: EnvSpec) -> dict[str, jax.Array]:
        """Return additional entries `[T, B]` of the rows' `extras`; a pure function, the same in every topology.

        Args:
          actor: the actor state used in the rollout.
          rollout: a training rollout, including the time step after its last row, to bootstrap from.
          spec: the environment's spec.
        """
        ...


# --- exact counters ----------------------------------------------------------------------------------------------


class Counter(struct.PyTreeNode):
    """Step counter, exact beyond 2^31: two uint32 words."""

    high: jax.Array
    low: jax.Array

    @classmethod
    def zero(cls) -> "Counter":
        return cls(jnp.uint32(0), jnp.uint32(0))

    def add(self, n: int | jax.Array) -> "Counter":
        """Return the counter plus `n`, at most 2^32 - 1."""
        low = self.low + jnp.asarray(n, jnp.uint32)
        return Counter(self.high + (low < self.low).astype(jnp.uint32), low)

    def since(self, before: "Counter") -> jax.Array:
        """Return the difference from `before` as float32, rounded once."""
        borrow = (self.low < before.low).astype(jnp.uint32)
        return Counter(self.high - before.high - borrow, self.low - before.low).as_float()

    def modulo(self, divisor: int) -> jax.Array:
        """Return the remainder, uint32, of the division by `divisor`, which is at most 2^16."""
        rest = jnp.uint32(0)
        for word in (self.high >> 16, self.high & 0xFFFF, self.low >> 16, self.low & 0xFFFF):
            rest = ((rest << 16) + word) % divisor
        return rest

    def as_float(self) -> jax.Array:
        """Return the count as float32, rounded."""
        return self.high.astype(jnp.float32) * 4294967296.0 + self.low.astype(jnp.float32)

    def __int__(self) -> int:
        return (int(self.high) << 32) + int(self.low)


def where_first(first: jax.Array, initial: PyTree, carry: PyTree) -> PyTree:
    """Return, leaf by leaf, `initial` (no batch axis) where `first` [B] is True, and `carry` [B, ...] elsewhere."""

    def pick(start, now):
        mask = first.reshape(first.shape + (1,) * (now.ndim - first.ndim))
        return jnp.where(mask, jnp.asarray(start, now.dtype), now)

    return jax.tree.map(pick, initial, carry)


EnvironmentFactory = Callable[..., Environment | HostRecipe]
