"""Groups of fields that algorithms share: discounting, actor-critics, exploration noise, and replays.

A group checks its fields and creates the objects that they describe. Groups for only one kind of algorithm are in the
module for that kind, such as `on_policy`.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal

import optax

from jaxrl.algos.base import (
    Readable,
    action_problems,
    changed,
    field_group,
    field_problems,
    network_problems,
    number,
    part,
    part_class,
    static,
)
from jaxrl.algos.optimizers import Adam, Optimizer
from jaxrl.core import sources
from jaxrl.core.schedules import Linear, Scalar
from jaxrl.core.sources import (
    FrameStack,
    Sampler,
    Sequence,
    Source,
    Uniform,
    View,
    by_priority,
    steps_per_update,
)
from jaxrl.core.types import SEQUENCE_INPUTS, TRANSITION_INPUTS, EnvSpec, Network, Replay
from jaxrl.networks import ActionValues, Actor, CategoricalValues, Critic, QuantileValues, resolve_network


@field_group
class DiscountFields:
    """Discounting of rewards."""

    gamma: Scalar = number(0.99, low=0, high=1, help="discount factor")


@field_group
class ActorCriticFields(DiscountFields):
    """Policy, critics and their optimizers."""

    learning_rate: Scalar = number(3e-4, above=0, help="learning rate of the critics and values")
    policy_learning_rate: Scalar | None = number(None, above=0, help="learning rate of the policy; None: learning_rate")
    optimizer: Optimizer = number(Adam(eps=1e-8))
    policy: Network = static(Actor())
    critic: Critic = static(Critic())

    def resolved_networks(self, spec: EnvSpec) -> dict[str, Any]:
        """Return the networks by field name, with unset torsos replaced by defaults for the observations."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: resolve_network(value, spec) for name, value in values.items() if isinstance(value, Readable)}

    def resolve(self: Any, spec: EnvSpec, num_envs: int) -> Any:
        return dataclasses.replace(self, **self.resolved_networks(spec), rollout_length=self.steps_per_update(num_envs))

    def actor_critic_problems(
        self,
        spec: EnvSpec,
        *,
        stochastic: bool,
        discrete: bool = False,
        heads: tuple[type, ...] = (),
        dropout: bool = False,
    ) -> list[str]:
        """Explain wrong fields, and networks that do not suit the algorithm or the environment, one line each.

        Args:
          spec: the environment's spec.
          stochastic: whether the algorithm needs a stochastic policy, or a deterministic one.
          discrete: whether the algorithm supports discrete actions.
          heads: the allowed heads of the critics; empty: expected values, or any head if policies are deterministic.
          dropout: whether the critics may have dropout.
        """
        name, policy, critic = type(self).__name__, self.policy, self.critic
        found, head = action_problems(name, spec, box=True, discrete=discrete), critic.head
        recurrent = policy.recurrent or critic.recurrent
        if recurrent and not isinstance(self, SequenceFields):
            found.append(
                f"{name} learns from single transitions; use a policy and critics without a recurrent core, or SAC, "
                "TD3, DDPG or R2D2"
            )
        elif not found:
            known = SEQUENCE_INPUTS if recurrent else TRANSITION_INPUTS
            found += network_problems(f"{name}.policy", policy, spec, known)
            found += network_problems(f"{name}.critic", critic, spec, known, dropout=dropout)
        if isinstance(policy, Actor) and policy.stochastic != stochastic:
            found.append(f"{name}.policy={policy!r} must have stochastic={stochastic}")
        if head.noisy:
            found.append(f"{name}.critic: noisy heads are not supported ({head!r}); set noisy=False")
        heads = heads or ((ActionValues,) if stochastic else (ActionValues, CategoricalValues, QuantileValues))
        if not isinstance(head, heads):
            allowed = " or ".join(f"{kind.__name__}()" for kind in heads)
            found.append(f"{name}.critic.head={head!r} must be {allowed}; SAC, TD3 and MPO support categorical values")
        return field_problems(self) + found

    @property
    def critic_optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer at the learning rate of the critics."""
        return self.optimizer(self.learning_rate)

    @property
    def policy_optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer at the learning rate of the policy."""
        return self.optimizer_at(self.policy_learning_rate)

    def optimizer_at(self, rate: Scalar | None) -> optax.GradientTransformation:
        """Return the optimizer at a learning rate; None: that of the critics."""
        return self.optimizer(self.learning_rate if rate is None else rate)


@field_group
class TargetFields:
    """Target networks, updated by Polyak averaging."""

    tau: Scalar = number(
        0.005, above=0, high=1, help="soft update coefficient of the target networks (Polyak averaging)"
    )


@field_group
class TargetPeriodFields:
    """Target networks that are updated every `target_period` updates."""

    target_period: int = static(100, low=1, help="gradient updates between target network updates")


@field_group
class PeriodicTargetFields(TargetFields, TargetPeriodFields):
    """Target networks that are replaced every `target_period` updates."""

    tau: Scalar = changed(1.0)


_SUPPORT = "critic.head=categoricalvalues or critic.head=selfpredictivevalues"


@field_group
class SupportFields:
    """Support of categorical values."""

    v_min: Scalar = number(-150.0, only_with=_SUPPORT, less_than="v_max", help="minimum of the categorical support")
    v_max: Scalar = number(150.0, only_with=_SUPPORT, help="maximum of the categorical support")

    @property
    def support(self) -> dict[str, Any]:
        """Return the ends of the support as keyword arguments of losses and targets."""
        return {"v_min": self.v_min, "v_max": self.v_max}


@field_group
class DistributionFields(SupportFields):
    """Losses of categorical and quantile heads."""

    quantile_huber: Scalar = number(
        1.0,
        above=0,
        only_with="critic.head=quantilevalues",
        help="Huber threshold of the quantile loss, above which it is linear",
    )

    @property
    def loss_options(self) -> dict[str, Any]:
        """Return the numbers of these fields as keyword arguments of `off_policy.output_loss`."""
        return self.support | {"quantile_huber": self.quantile_huber}


@field_group
class NormalizationFields:
    """Normalization of observations."""

    normalize_observation: bool = static(False, help="normalize observations by running statistics")
    observation_clip: Scalar | None = number(
        10.0,
        above=0,
        only_with="normalize_observation",
        help="maximum absolute value of normalized observations; None: no clipping",
    )


@part_class
class Sampling:
    """Sampling of items from a replay, and limits of how often they are sampled."""

    sampler: Sampler | None = static(
        None, only_with="not prioritized", help="selection rule for sampling items; None: uniform"
    )
    max_times_sampled: int = static(
        0, low=0, help="number of times an item is sampled before it is removed; 0: no limit"
    )
    samples_per_insert: float | None = static(
        None, above=0, help="transitions sampled per transition inserted, instead of replay_ratio"
    )


@field_group
class ReplayFields:
    """Storage and sampling of a replay."""

    capacity: int = static(1_000_000, low=1, help="transitions stored, over all environments")
    min_size: int = static(
        1_000, low=1, help="transitions collected before the first update; actor-critics act randomly until then"
    )
    batch_size: int = static(256, low=1, help="transitions per update, in whole sequences")
    rollout_length: int | None = static(
        None,
        low=1,
        help="steps per environment and iteration; None: one update's worth, or a quarter of memory.length",
    )
    replay_ratio: float | None = static(1.0, above=0, help="gradient updates per environment step")
    storage: Literal["ring", "host", "flashbax"] = static(
        "ring",
        choices=("ring", "host", "flashbax"),
        was="replay_memory",
        help="ring: rows; host: the same, with observations in host memory; flashbax: one-step transitions",
    )
    sampling: Sampling = part(
        Sampling,
        default=Sampling(),
        was={name: name for name in ("sampler", "max_times_sampled", "samples_per_insert")},
        switch="max_times_sampled",
        help="which items are sampled, and how often",
    )

    @property
    def recurrent(self) -> bool:
        """Return whether the policy, the critics or the network are recurrent."""
        # Values that are not networks are rejected later, by validation.
        networks = (getattr(self, name, None) for name in ("policy", "critic", "network"))
        return any(getattr(network, "recurrent", False) for network in networks)

    def source(
        self,
        sampler: Sampler | None = None,
        *,
        sequence: Sequence | None = None,
        batch_size: int | None = None,
        frame_stack: FrameStack | None = None,
        n_step: int = 1,
    ) -> Replay:
        """Return the replay that these fields describe.

        Args:
          sampler: selection rule if `sampling.sampler` is None; None: uniform.
          sequence: settings of sequences, which become the items; None: items are transitions.
          batch_size: number of items per batch; None: the field `batch_size`.
          frame_stack: frame stacking of the observations.
          n_step: number of rewards summed before bootstrapping.
        """
        items = self.batch_size if batch_size is None else batch_size
        return Replay(
            capacity=self.capacity,
            batch_size=items,
            min_size=self.min_size,
            rollout_length=self.rollout_length or 1,
            replay_ratio=self._updates_per_step(items * (1 if sequence is None else sequence.length - 1)),
            n_step=n_step,
            sequence=sequence,
            frame_stack=frame_stack,
            storage=self.storage,
            sampler=self.sampling.sampler or sampler or Uniform(),
            max_times_sampled=self.sampling.max_times_sampled,
        )

    def steps_per_update(self, num_envs: int) -> int:
        """Return `rollout_length`, or if it is None, the number of steps per environment for one update."""
        if self.rollout_length is not None:
            return self.rollout_length
        return steps_per_update(self._updates_per_step(self.batch_size), num_envs)

    def _updates_per_step(self, transitions: int) -> float:
        """Return the number of updates per environment step, if each update samples `transitions` transitions."""
        if (samples := self.sampling.samples_per_insert) is not None:
            return samples / max(transitions, 1)
        return self.replay_ratio or 1.0  # `problems` reports if both are None

    def problems(self) -> list[str]:
        """Explain conflicts between the fields, one line each."""
        name, found, sampler = type(self).__name__, [], self.sampling.sampler
        label = f"{name}.sampling.sampler={sampler!r:.120}"
        if not isinstance(sampler, Sampler | None):
            names = ", ".join(f"{kind.__name__}()" for kind in typing.get_args(Sampler))
            found.append(f"{label} is not one of {names} of jaxrl.core.sources, or None")
        elif by_priority(sampler) and not isinstance(self, PrioritizedFields):
            found.append(
                f"{label} needs priorities, but {name} returns none; use Uniform(), Fifo() or Lifo(), or another "
                "algorithm: DQN, R2D2 or D4PG"
            )
        if isinstance(sampler, sources.Prioritized):
            found += [f"{label}: {line}" for line in sampler.problems()]
        ratio, samples = self.replay_ratio, self.sampling.samples_per_insert
        default = type(self).__dataclass_fields__["replay_ratio"].default
        if samples is not None and ratio not in (None, default):
            found.append(
                f"{name}.replay_ratio={ratio} and sampling.samples_per_insert={samples} set the same ratio; set one "
                "of them and the other to None"
            )
        if samples is None and ratio is None:
            found.append(f"{name}.replay_ratio=None and sampling.samples_per_insert=None; set one of them")
        return found


@field_group
class NStepFields:
    """Multi-step returns."""

    n_step: int = static(1, low=1, help="number of rewards summed before bootstrapping")


@part_class
class PrioritizedReplay:
    """Prioritized experience replay (Schaul et al., 2016, arXiv:1511.05952)."""

    removed = {"eta": 0.9, "initial": "max"}

    exponent: Scalar = number(0.5, low=0, help="exponent of the priorities (alpha)")
    beta: Scalar = number(Linear(0.4, 1.0), low=0, high=1, help="exponent of the importance weights (beta)")

    @property
    def sampler(self) -> sources.Prioritized:
        """Return the sampler."""
        return sources.Prioritized(self.exponent, self.beta)


@field_group
class PrioritizedFields(ReplayFields):
    """Prioritized replay."""

    prioritized: PrioritizedReplay | None = part(
        PrioritizedReplay,
        was={
            "priority_exponent": "exponent",
            "importance_exponent": "beta",
            "priority_eta": "eta",
            "initial_priorities": "initial",
        },
        help="prioritized experience replay: sample by the last TD error; None: by sampling.sampler",
    )


@field_group
class NStepReplayFields(ReplayFields, NStepFields):
    """Uniform replay of multi-step transitions."""

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"replay": self.source(n_step=self.n_step)}


@part_class
class Memory:
    """Sequences from a replay."""

    removed = {"cross_episodes": True}

    length: int = static(17, low=2, help="time steps per sequence; the last one is only used for bootstrapping")
    burn_in: int = static(8, low=0, help="steps before each sequence, only used to warm up the recurrent states")


@field_group
class MemoryFields(ReplayFields):
    """Sequences for recurrent networks; each rollout begins a new sequence."""

    memory: Memory = part(
        Memory,
        default=Memory(),
        was={"sequence_length": "length", "burn_in": "burn_in", "cross_episodes": "cross_episodes"},
        switch="sequence_length",
        only_with="policy.recurrent or critic.recurrent",
        help="sequences for recurrent networks",
    )

    @property
    def sequence(self) -> Sequence:
        """Return the settings of sequences that these fields describe."""
        return Sequence(self.memory.length, self.rollout_length or 1, burn_in=self.memory.burn_in, stored_carry=True)

    def steps_per_update(self, num_envs: int) -> int:
        """Return the steps per environment for one update; recurrent networks default to a quarter of a sequence."""
        if self.rollout_length is None and self.recurrent:
            return max(self.memory.length // 4, 1)
        return super().steps_per_update(num_envs)


@field_group
class CombinedReplayFields(ReplayFields):
    """Batches of two parts: one sampled from a view of the storage, with its own sampler and items.

    In a large replay, new transitions are sampled late. In combined experience replay (Zhang and Sutton, 2017,
    arXiv:1712.01275), the view contains the newest transitions: `View(8, Lifo(), max_times_sampled=1)`.
    """

    removed = {"newest": 0}  # by field of older configurations: the value that changes nothing

    view: View | None = static(
        None,
        only_with="not imitate",
        help="additional part of each batch, sampled from a view of the same rows with its own sampler and remover",
    )

    def combined_sources(self, replay: Replay) -> dict[str, Source]:
        """Return the replay for the rest of each batch, and the source of `view`."""
        # Values that are not views, and invalid views, are rejected later, by `problems`.
        if not isinstance(self.view, View) or self.view.problems():
            return {"replay": replay}
        own = dataclasses.replace(replay, batch_size=replay.batch_size - self.view.items)
        return {"replay": own, "view": self.view.of("replay", replay)}

    def problems(self) -> list[str]:
        """Explain why batches cannot have the part `view`, one line each."""
        if self.view is None:
            return []
        name, found = type(self).__name__, []
        label = f"{name}.view={self.view!r:.120}"
        if not isinstance(self.view, View):
            return [f"{label} is not a jaxrl.core.sources.View, or None"]
        if wrong := self.view.problems():
            return [f"{label}: {line}" for line in wrong]
        if isinstance(self.batch_size, int) and self.view.items >= self.batch_size:
            found.append(f"{label} must be less than batch_size={self.batch_size}, because it is a part of the batch")
        if self.storage == "flashbax":
            found.append(f"{label} needs a ring, from which all parts of a batch sample; use storage='ring'")
        if self.recurrent:
            found.append(f"{label} works with transitions only; use networks without a recurrent core")
        if not isinstance(self, PrioritizedFields) and by_priority(self.view.sampler, self.view.remover):
            found.append(
                f"{label} needs priorities, but {name} returns none; use other rules, or another algorithm: DQN, R2D2 "
                "or D4PG"
            )
        return found


@field_group
class SequenceFields(NStepReplayFields, MemoryFields, CombinedReplayFields):
    """Sequences instead of transitions, for recurrent policies or critics."""

    def source_with_memory(self) -> Replay:
        """Return the replay of transitions, or if recurrent, of sequences with about `batch_size` steps per batch."""
        if not self.recurrent:
            return self.source(n_step=self.n_step)
        # With `batch_size` sequences, the cost of an update would grow with their length.
        whole = max(self.batch_size // max(self.memory.length - 1, 1), 1)
        return self.source(sequence=self.sequence, batch_size=whole, n_step=self.n_step)

    @property
    def experience(self) -> Mapping[str, Source]:
        return self.combined_sources(self.source_with_memory())
