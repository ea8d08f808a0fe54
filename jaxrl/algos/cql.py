"""Conservative Q-learning (Kumar et al., 2020, arXiv:2006.04779): SAC whose critics think little of what data lack."""

import math

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl import spaces
from jaxrl.algos import off_policy, regression
from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.off_policy import Learnt
from jaxrl.algos.optimisers import weighted_mean
from jaxrl.algos.sac import SAC, SACState, log_half_range
from jaxrl.schedules import Scalar
from jaxrl.types import EnvSpec

MAX_COEFFICIENT = 1e6  # of a learnt one, as in the authors' code


@struct.dataclass
class CQLState(SACState):
    """All that the learner is."""

    log_coefficient: Learnt  # a float32 scalar; () throughout where the coefficient is fixed


@algorithm
class CQL(SAC):
    """SAC with a penalty on the soft maximum of the critics over all actions, less that of the data's: CQL(H)."""

    policy_learning_rate: Scalar | None = number(3e-5, above=0, help="step size of the policy; None: the critics'")
    coefficient: Scalar = number(5.0, low=0, help="weight of the penalty; where it is learnt, at the start")
    lagrange_threshold: Scalar | None = number(None, help="learn the coefficient: the penalty to aim at; None: fixed")
    cloning_updates: Scalar = number(0.0, low=0, help="first updates, in which the policy learns the data's actions")
    samples: int = static(10, low=1, help="actions of a box, each uniform, of the policy here, and of the policy next")
    entropy_in_target: bool = static(False, help="count the entropy of what follows in the critics' targets")

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems = super().validate(spec, num_envs, shards)
        if self.lagrange_threshold is not None and self.coefficient == 0:
            problems.append("CQL.coefficient=0 is where a learnt one would start, and stay; it must be more than 0")
        return problems

    def init(self, key: jax.Array, spec: EnvSpec) -> CQLState:
        log_coefficient = ()
        if self.lagrange_threshold is not None:
            log_coefficient = jnp.log(jnp.asarray(self.coefficient, jnp.float32))
        learnt = off_policy.begin(self, log_coefficient, target=False)
        return CQLState(**vars(super().init(key, spec)), log_coefficient=learnt)

    def _learn_values(self, state, replay, temperature, key, spec, replicas):
        value, log_prob = self._followed(
            state.policy.params,
            state.critic.target_params,
            replay.next_observation,
            replay.next_action_mask,
            key,
            spec,
        )
        if self.entropy_in_target:
            value = value - temperature * log_prob
        target = off_policy.expected_target(self, replay, value)
        coefficient, learnt = self.coefficient, self.lagrange_threshold is not None
        if learnt:
            coefficient = jnp.minimum(jnp.exp(state.log_coefficient.params), MAX_COEFFICIENT)
        soft_maximum = self._soft_maximum(state.policy.params, replay, key, spec)

        def penalty(params, values, taken):
            gaps = soft_maximum(params, values) - taken
            gaps = jax.vmap(lambda gap: weighted_mean(gap, replay.weight, replicas))(gaps)
            return coefficient * jnp.sum(gaps), {"conservative_gap": jnp.mean(gaps)}

        critic, metrics, _ = off_policy.fit_critic(self, state.critic, replay, target, spec, replicas, penalty)
        log_coefficient = state.log_coefficient
        if learnt:
            slope = -coefficient * (metrics["conservative_gap"] - self.lagrange_threshold)
            log_coefficient = off_policy.step(self, log_coefficient, slope, self.learning_rate, replicas)
        # The same on all devices, hence as it is also the mean over them.
        metrics |= {"coefficient": jnp.asarray(coefficient, jnp.float32)}
        return state.replace(critic=critic, log_coefficient=log_coefficient), metrics

    def _soft_maximum(self, policy, replay, key, spec):
        """log of the integral of exp Q over actions, [ensemble, batch], of the critics' parameters and their values.

        A sum where actions are discrete. Over a box by importance sampling: as many actions drawn uniformly, from the
        policy at the observation, and from the policy at the next one (appendix F), in units where the box is [-1, 1].
        """
        if isinstance(spec.action_space, spaces.Discrete):
            return lambda params, values: jax.nn.logsumexp(values, axis=-1)

        def draws(place):  # [samples, batch]
            split = lambda k: jax.random.split(jax.random.fold_in(k, place), self.samples)  # noqa: E731
            return jax.vmap(split, out_axes=1)(key)

        uniform, dimensions = jax.vmap(jax.vmap(spec.action_space.sample))(draws(0)), spec.action_space.shape[0]
        drawn = [(uniform, jnp.full(uniform.shape[:2], -dimensions * math.log(2.0), jnp.float32))]
        for place, observation in enumerate((replay.observation, replay.next_observation), 1):
            distribution = off_policy.evaluate_policy(self, policy, observation, spec)
            action, log_prob = jax.vmap(distribution.sample_and_log_prob)(draws(place))
            drawn.append((action, log_prob + log_half_range(spec.action_space)))
        actions, log_densities = (jnp.concatenate(parts) for parts in zip(*drawn, strict=True))

        def soft_maximum(params, values):
            # Mapped over the actions alone, so that an observation is encoded once.
            each = jax.vmap(lambda x: off_policy.evaluate_critic(self, params, replay.observation, x, spec)[..., 0])
            weighted = each(actions) - log_densities[:, None]
            return jax.nn.logsumexp(weighted, axis=0) - math.log(weighted.shape[0])

        return soft_maximum

    def _policy_value(self, params, state, replay, key, spec):
        value, log_prob = super()._policy_value(params, state, replay, key, spec)
        distribution = off_policy.evaluate_policy(self, params, replay.observation, spec, replay.action_mask)
        likelihood = regression.log_likelihood(distribution, replay.action)
        cloning = state.updates.astype(jnp.float32) < self.cloning_updates
        return jnp.where(cloning, likelihood, value), log_prob
