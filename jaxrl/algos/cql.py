"""Conservative Q-learning (Kumar et al., 2020, arXiv:2006.04779): SAC with a penalty on actions outside the data."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos import off_policy, regression, soft_policies, train_state
from jaxrl.algos.acting import StochasticActing
from jaxrl.algos.base import algorithm, changed, number, static
from jaxrl.algos.fields import NStepReplayFields, TargetFields
from jaxrl.algos.kl_limits import step_log
from jaxrl.algos.off_policy import LearnerState
from jaxrl.algos.temperature import TemperatureFields
from jaxrl.algos.train_state import TrainState, Variables, weighted_mean
from jaxrl.core import spaces
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import (
    EnvSpec,
    Network,
    Replicas,
    TransitionBatch,
    UpdateInfo,
)
from jaxrl.networks import Critic

MAX_COEFFICIENT = 1e6  # limit of a learned coefficient, as in the authors' code


class CQLState(LearnerState):
    """State of the learner."""

    log_temperature: TrainState  # a float32 scalar; all fields are () if the temperature is fixed
    log_coefficient: TrainState  # a float32 scalar; all fields are () if the coefficient is fixed


@algorithm
class CQL(StochasticActing, NStepReplayFields, TargetFields, TemperatureFields):
    """Conservative Q-learning, CQL(H): SAC whose critic loss penalizes out-of-distribution actions."""

    offline = True  # designed for datasets; it also runs without one

    policy_learning_rate: Scalar | None = changed(3e-5)
    coefficient: Scalar = number(
        5.0, low=0, help="weight of the penalty relative to the squared error; the initial weight if learned"
    )
    lagrange_threshold: Scalar | None = number(
        None, help="target value of the penalty, used to learn the coefficient; None: the coefficient is fixed"
    )
    cloning_updates: Scalar = number(
        0.0, low=0, help="number of initial updates in which the policy clones the data's actions"
    )
    samples: int = static(
        10, low=1, help="continuous actions: samples per proposal (uniform, policy, policy at the next observation)"
    )
    entropy_in_target: bool = static(False, help="include the entropy of the next action in the critics' targets")

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems = self.actor_critic_problems(spec, stochastic=True, discrete=True)
        if self.lagrange_threshold is not None and self.coefficient == 0:
            problems.append("CQL.coefficient=0 cannot be learned (lagrange_threshold is set); it must be more than 0")
        return problems

    def init(self, key: jax.Array, spec: EnvSpec) -> CQLState:
        learned = self.lagrange_threshold is not None
        log_coefficient = jnp.log(jnp.asarray(self.coefficient, jnp.float32)) if learned else ()
        return CQLState(
            **self.learner(*jax.random.split(key), spec),
            log_temperature=self.temperature.init(self.temperature_optimizer),
            log_coefficient=train_state.create(log_coefficient, (), self.critic_optimizer),
        )

    def update(
        self, state: CQLState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[CQLState, UpdateInfo]:
        optimizer = self.critic_optimizer
        statistics, replay = self.learning_batch(state, batch, replicas)
        next_key, key = (replay.observation.keys(k, replicas) for k in jax.random.split(key))
        temperature = self.temperature.weight(state.log_temperature)
        coefficient = self.coefficient
        if self.lagrange_threshold is not None:
            coefficient = jnp.minimum(jnp.exp(state.log_coefficient.params), MAX_COEFFICIENT)

        following = replay.next_observation
        next_policy = following.policy_output(self.policy, state.policy.variables, spec)[0]
        value, log_prob, _ = soft_policies.value_and_log_prob(
            self.critic, state.critic.target_variables, next_policy, following, next_key, spec
        )
        if self.entropy_in_target:
            value = value - temperature * log_prob
        target = off_policy.expected_target(replay, value, self.gamma)
        drawn = None
        if not isinstance(spec.action_space, spaces.Discrete):
            drawn = proposals(self.policy, state.policy.variables, replay, next_key, self.samples, spec)

        def critic_loss(variables):
            """Return half the authors' loss: the squared errors, and the coefficient times the conservative gap.

            The gap is log of the sum or integral of exp Q over all actions, minus Q of the data's action.
            Equation 4 halves only the squared errors, which would double the penalty at the same coefficient.
            """
            loss, (fit, model_state) = off_policy.critic_loss(self.critic, variables, replay, target, spec, replicas)
            if drawn is None:
                maxima = jax.nn.logsumexp(fit.values, axis=-1)
            else:
                maxima = soft_maximum(self.critic, variables, replay, *drawn, spec)
            gaps = jax.vmap(lambda gap: weighted_mean(gap, replay.weight, replicas))(maxima - fit.taken)
            return loss + 0.5 * coefficient * jnp.sum(gaps), ((fit, jnp.mean(gaps)), model_state)

        critic, _, (fit, gap) = train_state.gradient(critic_loss, state.critic).step(optimizer, replicas)
        log_coefficient = state.log_coefficient
        if self.lagrange_threshold is not None:
            slope = -0.5 * coefficient * (gap - self.lagrange_threshold)  # gradient ascent on the critics' loss
            log_coefficient = step_log(log_coefficient, slope, optimizer, replicas)

        def policy_loss(variables):
            """Return SAC's loss, or in the first `cloning_updates` updates, one with the likelihood of the data."""
            with replay.observation.rows_that_count(replay.weight):
                distribution, model_state = replay.observation.policy_output(self.policy, variables, spec, train=True)
            value, log_prob, _ = soft_policies.value_and_log_prob(
                self.critic, critic.variables, distribution, replay.observation, key, spec
            )
            cloning = state.updates.astype(jnp.float32) < self.cloning_updates
            value = jnp.where(cloning, regression.log_likelihood(distribution, replay.action), value)
            loss = weighted_mean(temperature * log_prob - value, replay.weight, replicas)
            return loss, ((loss, log_prob), model_state)

        found = train_state.gradient(policy_loss, state.policy)
        policy, _, (loss, log_prob) = found.step(self.policy_optimizer, replicas)
        log_temperature = self.temperature.step(
            state.log_temperature, self.temperature_optimizer, replay, log_prob, spec, replicas
        )
        metrics = {"policy_loss": loss, "entropy": weighted_mean(-log_prob, replay.weight, replicas)}
        metrics = replicas.mean(fit.metrics | metrics | {"conservative_gap": gap})
        metrics |= {"temperature": temperature, "coefficient": jnp.asarray(coefficient, jnp.float32)}
        critic, updates = train_state.polyak_update(critic, self.tau), state.updates + 1
        new = CQLState(policy, critic, statistics, updates, log_temperature, log_coefficient)
        return new, UpdateInfo(metrics)


def proposals(
    network: Network, policy: Variables, batch: TransitionBatch, key: jax.Array, samples: int, spec: EnvSpec
) -> tuple[jax.Array, jax.Array]:
    """Sample box actions [K, batch, n] with keys [batch]; return them with their log-densities [K, batch].

    `soft_maximum` integrates over these samples. Equal numbers are sampled uniformly, from the policy at the
    observation, and from the policy at the next observation (appendix F). Densities are over actions scaled to [-1, 1].
    """

    def draws(place):  # [samples, batch]
        split = lambda k: jax.random.split(jax.random.fold_in(k, place), samples)  # noqa: E731
        return jax.vmap(split, out_axes=1)(key)

    box = spaces.expect(spec.action_space, spaces.Box)
    uniform = jax.vmap(jax.vmap(box.sample))(draws(0))
    drawn = [(uniform, jnp.full(uniform.shape[:2], -box.shape[0] * math.log(2.0), jnp.float32))]
    for place, observation in enumerate((batch.observation, batch.next_observation), 1):
        distribution = observation.policy_output(network, policy, spec)[0]
        action, log_prob = jax.vmap(distribution.sample_and_log_prob)(draws(place))
        drawn.append((action, log_prob + soft_policies.log_half_range(box)))
    actions, log_densities = (jnp.concatenate(parts) for parts in zip(*drawn, strict=True))
    return actions, log_densities


def soft_maximum(
    network: Critic,
    critic: Variables,
    batch: TransitionBatch,
    actions: jax.Array,
    log_densities: jax.Array,
    spec: EnvSpec,
) -> jax.Array:
    """Return log of the integral of exp Q over actions, [ensemble, batch], by importance sampling from `proposals`."""
    # vmap over the actions only, so that each observation is encoded once.
    each = jax.vmap(lambda x: batch.observation.critic_output(network, critic, x, spec)[0][..., 0])
    weighted = each(actions) - log_densities[:, None]
    return jax.nn.logsumexp(weighted, axis=0) - math.log(weighted.shape[0])
