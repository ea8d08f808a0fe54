"""What actor-critics have in common as classes: their usual fields, and acting by them.

An algorithm derives from one of the two, says which defaults are its own, and adds `update`.
"""

from collections.abc import Mapping

import jax

from jaxrl.algos import off_policy, policy_gradient
from jaxrl.algos.base import family, field_problems, number, static
from jaxrl.algos.optimisers import Adam, Optimiser
from jaxrl.algos.policy_gradient import PolicyCarry, PolicyState
from jaxrl.networks import Actor, ActorCritic, Critic
from jaxrl.schedules import Scalar
from jaxrl.sources import Sampler, Uniform
from jaxrl.types import ActorOutput, ActorState, Carry, EnvSpec, Network, PyTree, Source, TimeStep


@family
class OnPolicyActorCritic:
    """Learns from rollouts, or whole episodes, of its own policy."""

    learning_rate: Scalar = number(2.5e-4, above=0, help="step size; of the policy, if the value has its own")
    value_learning_rate: Scalar | None = number(None, above=0, help="the value network's own step size")
    gamma: Scalar = number(0.99, low=0, high=1, help="discount")
    value_cost: Scalar = number(0.5, low=0, help="weight of the value loss")
    entropy_cost: Scalar = number(0.01, low=0, help="weight of the entropy bonus")
    max_grad_norm: Scalar | None = number(0.5, above=0, help="largest global norm of a gradient; None: no limit")
    observation_clip: Scalar = number(10.0, above=0, help="of normalised observations")
    reward_clip: Scalar = number(10.0, above=0, help="of normalised rewards")
    rollout_length: int = static(128, low=1, help="rows of every environment a batch; the longest episode, if whole")
    normalize_observation: bool = static(False, help="by running mean and deviation")
    normalize_reward: bool = static(False, help="by the running deviation of the discounted return")
    whole_episodes: bool = static(False, help="a batch is one whole episode of every environment")
    bootstrap_truncated: bool = static(True, help="False treats time limits as ends, as older code does")
    optimiser: Optimiser = number(Adam(eps=1e-5))
    network: Network = static(ActorCritic())

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        return field_problems(self) + policy_gradient.network_problems(self, spec)

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"rollout": policy_gradient.source(self)}

    def init(self, key: jax.Array, spec: EnvSpec) -> PolicyState:
        return policy_gradient.init(self, key, spec)

    def actor(self, state: PolicyState) -> ActorState:
        return policy_gradient.actor(state)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> PolicyCarry:
        return policy_gradient.initial_carry(self, spec)

    def act(
        self,
        actor: ActorState,
        timestep: TimeStep,
        carry: PolicyCarry,
        key: jax.Array,
        *,
        spec: EnvSpec,
        explore: bool,
    ) -> ActorOutput:
        return policy_gradient.act(self, actor, timestep, carry, key, spec=spec, explore=explore)


@family
class OffPolicyActorCritic:
    """Learns from a replay of transitions; its policy is stochastic, its critics are an ensemble."""

    # What the critics' losses ask of an algorithm; D4PG has them as fields.
    prioritised = False
    v_min = v_max = 0.0
    quantile_huber = 1.0

    learning_rate: Scalar = number(3e-4, above=0, help="step size of the critics")
    policy_learning_rate: Scalar | None = number(None, above=0, help="step size of the policy; None: the critics'")
    gamma: Scalar = number(0.99, low=0, high=1, help="discount")
    tau: Scalar = number(0.005, above=0, high=1, help="share of the new parameters at each target update")
    n_step: int = static(1, low=1, help="rewards summed before bootstrapping")
    capacity: int = static(1_000_000, low=1, help="rows that the replay holds, over all environments")
    min_size: int = static(1_000, low=1, help="rows before the first update, of random actions")
    batch_size: int = static(256, low=1, help="transitions an update")
    rollout_length: int = static(1, low=1, help="rows of every environment between two rounds of updates")
    updates: int = static(1, low=1, help="updates a round")
    optimiser: Optimiser = number(Adam(eps=1e-8))
    policy: Network = static(Actor())
    critic: Critic = static(Critic())

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        return off_policy.problems(self, spec, stochastic=True, discrete=True)

    def support_problems(self) -> list[str]:
        """Why its critics cannot be categorical; empty if they can."""
        name = type(self).__name__
        return [f"{name} has no ends of a support for {self.critic.head!r}; use QuantileValues(), or D4PG"]

    @property
    def sampler(self) -> Sampler:
        """How its replay is drawn from."""
        return Uniform()

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"replay": off_policy.replay(self)}

    def actor(self, state: PyTree) -> ActorState:
        return off_policy.actor(state.policy, state.updates)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> Carry:
        return ()

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: Carry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        return off_policy.act_by_sampling(self, actor, timestep, carry, key, spec=spec, explore=explore)
