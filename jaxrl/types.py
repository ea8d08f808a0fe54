"""What crosses rooms: the data that flows, and the protocols that every room fulfils.

Everything is time-major, `[time, environment, ...]`. A *row* is an observation, the action taken there, and the
reward and ending that followed. The last observation of an episode is a row of its own: its action is ignored, its
`weight` is False, and the next row is the first of the next episode, where recurrent carries reset. Hence the value
of the true last observation falls out of the same forward pass as every other.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl import spaces
from jaxrl.sources import Dataset as Dataset
from jaxrl.sources import Episodes as Episodes
from jaxrl.sources import Replay as Replay
from jaxrl.sources import Rollout as Rollout
from jaxrl.sources import Source as Source

PyTree = Any
Params = PyTree
Carry = PyTree
Metrics = dict[str, jax.Array]


@struct.dataclass
class Episode:
    """The running episode's true statistics, whatever wrappers do to the reward.

    Where an episode is only part of a game (one life), they are the game's, and `complete` tells where it is over.
    """

    returns: jax.Array  # sum of unmodified rewards so far, float32
    length: jax.Array  # transitions so far, int32
    complete: jax.Array | None = None  # bool; None: wherever `TimeStep.last`
    life: "Episode | None" = None  # return and length of this part alone; None: an episode is the whole game


@struct.dataclass
class TimeStep:
    """What an environment shows at one moment; reward and endings are those that *arrived with* the observation."""

    observation: PyTree
    reward: jax.Array  # float32; 0 where first
    terminated: jax.Array  # bool: the task ended here, nothing follows
    truncated: jax.Array  # bool: cut off here (time limit), the task would go on
    first: jax.Array  # bool: an episode begins here
    action_mask: PyTree | None = None  # bool, True where allowed, shape (n,); None: everything is
    previous_action: PyTree | None = None  # filled in by whoever acts; zeros where first
    episode: Episode | None = None

    @property
    def last(self) -> jax.Array:
        """Bool: this observation is its episode's last; the action taken here is ignored."""
        return self.terminated | self.truncated


@struct.dataclass
class Trajectory:
    """Rows in RLDS order; leaves `[time, environment, ...]`."""

    observation: PyTree
    action: PyTree
    reward: jax.Array  # followed the action; 0 where weight is False
    terminated: jax.Array  # followed the action; False where weight is False
    truncated: jax.Array  # likewise
    first: jax.Array  # the observation begins an episode
    weight: jax.Array  # bool: False at last observations (and masked rows), which are never learned from
    action_mask: PyTree | None = None
    extras: dict[str, PyTree] = struct.field(default_factory=dict)  # what the algorithm kept: log_prob, value, ...


@struct.dataclass
class RolloutBatch:
    """What a `Rollout` source delivers: T rows of B environments, and the moment after the last row.

    `timesteps` are the moments the rows were taken at, with the reward and previous action that arrived there, so a
    recurrent network can be unrolled again from `carry`; `final` is the moment after the last row, to bootstrap from.
    """

    rows: Trajectory  # [T, B, ...]
    timesteps: TimeStep  # [T, B, ...]
    final: TimeStep  # [B, ...]
    carry: Carry  # [B, ...] at the first row
    final_carry: Carry  # [B, ...] at `final`
    statistics: PyTree = ()  # the frozen normaliser statistics that these rows were acted with
    version: jax.Array | None = None  # of the actor state that acted, int32


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """What an algorithm may know of an environment; static."""

    name: str
    observation_space: spaces.Space
    action_space: spaces.Space
    masked: bool = False  # whether time steps carry an action mask


# --- environments ------------------------------------------------------------------------------------------------


@runtime_checkable
class Environment(Protocol):
    """One environment in JAX, as pure functions; `jax.vmap` makes it many.

    It is itself a pytree whose leaves are its physical parameters. `step` past the end of an episode (the row whose
    time step was `last`) ignores the action and begins the next episode, if `resets` is True; what
    `jaxrl.make` returns does, and topologies wrap what does not.
    """

    @property
    def name(self) -> str: ...
    @property
    def observation_space(self) -> spaces.Space: ...
    @property
    def action_space(self) -> spaces.Space: ...
    @property
    def resets(self) -> bool:
        """Whether stepping past an episode's end begins the next one."""
        ...

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]: ...
    def step(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, TimeStep]: ...


class HostEnvironment(Protocol):
    """A batch of environments outside JAX: the same fields as batched numpy, the same row convention, closable.

    What it returned is never written to again. An environment that failed may be built again: its row is then `first`
    though the one before was not `last`, and that one's reward and ending are unknown.
    """

    num_envs: int

    def reset(self) -> TimeStep: ...
    def step(self, actions: PyTree) -> TimeStep: ...
    def close(self) -> None: ...


@runtime_checkable
class WatchedEnvironment(HostEnvironment, Protocol):
    """A host environment that a watchdog can ask, from another thread, what it is waiting for."""

    name: str

    @property
    def failures(self) -> int:
        """How often something was built again after a fault."""
        ...

    @property
    def doing(self) -> str:
        """Which environments it is waiting for, and in what, in words; empty when it is not."""
        ...


@runtime_checkable
class AsyncEnvironment(HostEnvironment, Protocol):
    """A host environment that gives the `batch_size` of its environments that are ready first.

    `async_reset` begins all episodes; then `recv` and `send` as often as there is somebody to receive or to send to,
    from one thread. Where `batch_size` is `num_envs`, `reset` and `step` are these in one.
    """

    batch_size: int

    def async_reset(self) -> None: ...

    def send(self, actions: PyTree, env_ids: Any) -> None:
        """Actions `[B, ...]` for the environments `env_ids` [B], which `recv` gave and were sent none since.

        Returns at once. The actions are never written to again.
        """
        ...

    def recv(self) -> tuple[Any, TimeStep]:
        """The indices, int32 `[batch_size]`, of what is ready, in any order, and its moments; waits for them.

        Never fewer: as many must have been sent actions, or been reset, and not been received.
        """
        ...


class HostRecipe(Protocol):
    """How to build a `HostEnvironment`; what `jaxrl.make` returns for suites that are not JAX."""

    @property
    def name(self) -> str: ...
    @property
    def observation_space(self) -> spaces.Space: ...
    @property
    def action_space(self) -> spaces.Space: ...
    def build(self, num_envs: int, seed: int, first_env: int = 0) -> HostEnvironment:
        """`num_envs` environments, each begun from `seed` and its index: `first_env` and those that follow.

        So the environments of a run are the same however they are grouped.
        """
        ...


@runtime_checkable
class AsyncRecipe(HostRecipe, Protocol):
    """A recipe whose environments can be asynchronous too."""

    def build_async(self, num_envs: int, batch_size: int, seed: int, first_env: int = 0) -> AsyncEnvironment:
        """The environments that `build` makes, of which every `recv` gives `batch_size`."""
        ...


def env_spec(env: Environment | HostRecipe) -> EnvSpec:
    """What an algorithm may know of `env`."""
    masked = False
    if isinstance(env, Environment):
        masked = jax.eval_shape(lambda key: env.reset(key)[1], jax.random.key(0)).action_mask is not None
    return EnvSpec(env.name, env.observation_space, env.action_space, masked)


# --- networks ----------------------------------------------------------------------------------------------------


class Network(Protocol):
    """A network as a pair of pure functions over a parameter tree; frozen and hashable itself."""

    def init(self, key: jax.Array, spec: EnvSpec) -> Params: ...

    def initial_carry(self, spec: EnvSpec) -> Carry:
        """The recurrent state of one environment, no batch axis; `()` for feed-forward networks."""
        ...

    def apply(
        self, params: Params, timesteps: TimeStep, carry: Carry, *, spec: EnvSpec, key: jax.Array | None = None
    ) -> tuple[Any, Carry]:
        """Unrolls over time: time steps `[T, B, ...]`, carry `[B, ...]` -> outputs `[T, B, ...]`, carry after the last.

        The carry is reset to `initial_carry` wherever `timesteps.first`, before the step. `key` is for noisy layers.
        """
        ...


# --- replayed experience -----------------------------------------------------------------------------------------


@struct.dataclass
class Drawn:
    """What a replay tells of the items it drew, `[batch]`; an algorithm hands back new priorities in this order.

    `place` and `tick` name an item: the place it was at, and the row that was there. Once the row is overwritten, a
    new priority for it is dropped.
    """

    place: jax.Array  # int32, within the logical shard
    tick: jax.Array  # uint32
    probability: jax.Array  # float32, the chance of each draw to be this item, over all shards; 0: nothing to draw
    importance: jax.Array  # float32, (N P)^-beta as the sampler normalises it; 1 without priorities
    priority: jax.Array  # float32
    age_steps: jax.Array  # int32, rows of its environment since
    age_updates: jax.Array  # int32, draws from this source since it was stored
    times_sampled: jax.Array  # int32, this time included


@struct.dataclass
class TransitionBatch:
    """What a `Replay` source delivers: n-step transitions, leaves `[batch, ...]`; rewards not yet discounted.

    `rewards[:, k]` and `discounts[:, k]` belong to the k-th step: rewards after an ending are 0, and `bootstrap` is
    False where the episode terminated within the n steps. gamma is applied by the update, so it stays traced.
    """

    observation: PyTree
    action: PyTree
    rewards: jax.Array  # [batch, n]
    steps: jax.Array  # [batch] how many steps the transition really spans, 1..n
    bootstrap: jax.Array  # [batch] bool
    next_observation: PyTree
    weight: jax.Array  # [batch] bool: False where there is nothing to learn from
    action_mask: PyTree | None = None
    next_action_mask: PyTree | None = None
    extras: dict[str, PyTree] = struct.field(default_factory=dict)  # at the transition's first row
    drawn: Drawn | None = None


@struct.dataclass
class SequenceBatch:
    """What a `Replay` source with a `sequence` delivers: stretches of rows, leaves `[length, batch, ...]`.

    `timesteps` are the moments the rows were taken at, as in `RolloutBatch`, so that a recurrent network can be
    unrolled from `carry`. The first `burn_in` rows are there for that only: their weight is False.
    """

    rows: Trajectory  # [L, batch, ...]; zeros where not in the mask
    timesteps: TimeStep  # [L, batch, ...]
    mask: jax.Array  # [L, batch] bool: the row belongs to the sequence
    carry: Carry  # [batch, ...] at the first row
    drawn: Drawn
    burn_in: int = struct.field(pytree_node=False, default=0)


# --- algorithms --------------------------------------------------------------------------------------------------


@struct.dataclass
class ActorState:
    """What acting needs of a learner; this is what is published to actors and versioned."""

    params: Params
    statistics: PyTree = ()  # frozen normaliser statistics
    exploration: dict[str, jax.Array] = struct.field(default_factory=dict)  # epsilon, ...


@struct.dataclass
class ActorOutput:
    """What acting at one moment gives, `[environment, ...]`."""

    action: PyTree
    carry: Carry
    extras: dict[str, PyTree] = struct.field(default_factory=dict)  # what `update` needs of this moment


@struct.dataclass
class UpdateInfo:
    """What an update tells: scalar metrics, and new priorities for the sources that want them."""

    metrics: Metrics
    priorities: dict[str, jax.Array] = struct.field(default_factory=dict)


class Replicas(Protocol):
    """What a topology hands to `update` so that an algorithm need not know devices; the identity on one device.

    A *shard* is one of a fixed number of logical groups of environments; minibatches are drawn within shards, so
    their content does not depend on how many devices there are. This device holds `shards` of them, numbered
    `first_shard, first_shard + 1, ...` over all devices.
    """

    shards: int  # logical shards on this device, static
    devices: int  # how many devices share the work, static
    first_shard: jax.Array | int

    def mean(self, tree: PyTree) -> PyTree: ...
    def sum(self, tree: PyTree) -> PyTree: ...
    def max(self, tree: PyTree) -> PyTree: ...
    def any(self, flag: jax.Array) -> jax.Array: ...


class Algorithm(Protocol):
    """Losses, targets and exploration, as pure functions; a frozen pytree whose leaves are its numbers.

    Schedules are resolved before any of these is called (`jaxrl.schedules.at`): an algorithm sees numbers.
    """

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        """Every problem with these settings, one line each; empty when they are fine. Called before any compile."""
        ...

    @property
    def experience(self) -> Mapping[str, Source]: ...

    def init(self, key: jax.Array, spec: EnvSpec) -> PyTree: ...
    def actor(self, state: PyTree) -> ActorState: ...
    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> Carry:
        """The carry of environment `env_index` (a scalar) of `num_envs` over all devices, no batch axis."""
        ...

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: Carry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        """One action for each environment: time step and carry `[B, ...]`, keys `[B]`."""
        ...

    def update(
        self, state: PyTree, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[PyTree, UpdateInfo]: ...


# --- exact counters ----------------------------------------------------------------------------------------------


@struct.dataclass
class Counter:
    """A step counter exact beyond 2^31: two uint32 words."""

    high: jax.Array
    low: jax.Array

    @classmethod
    def zero(cls) -> "Counter":
        return cls(jnp.uint32(0), jnp.uint32(0))

    def add(self, n: int | jax.Array) -> "Counter":
        """Adds `n`, at most 2^32 - 1."""
        low = self.low + jnp.asarray(n, jnp.uint32)
        return Counter(self.high + (low < self.low).astype(jnp.uint32), low)

    def since(self, before: "Counter") -> jax.Array:
        """How much more this is than `before`, float32, rounded once."""
        borrow = (self.low < before.low).astype(jnp.uint32)
        return Counter(self.high - before.high - borrow, self.low - before.low).as_float()

    def as_float(self) -> jax.Array:
        """float32, rounded."""
        return self.high.astype(jnp.float32) * 4294967296.0 + self.low.astype(jnp.float32)

    def __int__(self) -> int:
        return (int(self.high) << 32) + int(self.low)


def where_first(first: jax.Array, initial: PyTree, carry: PyTree) -> PyTree:
    """`initial` (no batch axis) where `first` [B], else `carry` [B, ...]; leaf by leaf."""

    def pick(start, now):
        mask = first.reshape(first.shape + (1,) * (now.ndim - first.ndim))
        return jnp.where(mask, jnp.asarray(start, now.dtype), now)

    return jax.tree.map(pick, initial, carry)


EnvironmentFactory = Callable[..., Environment | HostRecipe]
