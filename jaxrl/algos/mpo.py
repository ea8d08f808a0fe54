"""Maximum a posteriori policy optimisation (Abdolmaleki et al., 2018, arXiv:1806.06920), with the Gaussian's mean and
deviation held back apart (Abdolmaleki et al., 2018, arXiv:1812.02256).

Where actions are discrete, expectations over them are exact.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl import spaces
from jaxrl.algos import off_policy, q_learning
from jaxrl.algos.actor_critic import OffPolicyActorCritic
from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.off_policy import Learnt
from jaxrl.algos.optimisers import weighted_mean
from jaxrl.networks import Critic, from_unit
from jaxrl.networks.distributions import Categorical, DiagonalGaussian, TanhGaussian
from jaxrl.schedules import Scalar
from jaxrl.types import EnvSpec, Params, Replicas, TransitionBatch, UpdateInfo

LEAST_DUAL = -18.0  # before the softplus, which makes 1.5e-8 of it


@struct.dataclass
class MPOState:
    """All that the learner is."""

    policy: Learnt
    critic: Learnt
    duals: Learnt  # float32: "temperature" [], "mean" [k] and for boxes "std" [k], before the softplus
    updates: jax.Array  # int32


@struct.dataclass
class Candidates:
    """Actions that a policy may take, of which the critics think something; K of them."""

    distribution: TanhGaussian | Categorical  # the policy's
    points: jax.Array | None  # [K, batch, n] sampled from it, before the tanh; None: all actions, in order
    values: jax.Array  # [batch, K]
    log_prior: jax.Array  # [batch, K] what the policy thinks of them: sums to 1


@algorithm
class MPO(OffPolicyActorCritic):
    """A policy fitted to its own actions, the better the more, and never far from what it was; a uniform replay."""

    dual_learning_rate: Scalar = number(1e-2, above=0, help="step size of the temperature and the multipliers")
    tau: Scalar = number(1.0, above=0, high=1, help="share of the new parameters at each target update")
    target_period: int = static(100, low=1, help="updates between two target updates")
    samples: int = static(20, low=1, help="actions of a box that stand for the policy, an observation")
    epsilon: Scalar = number(0.1, above=0, help="divergence of the improved actions from the policy's, in nats")
    epsilon_mean: Scalar = number(2.5e-3, above=0, help="divergence by the mean, or of discrete actions, in nats")
    epsilon_std: Scalar = number(1e-4, above=0, help="divergence by the deviation, in nats")
    temperature: Scalar = number(1.0, above=0, help="of the improved actions, at the start")
    alpha_mean: Scalar = number(1.0, above=0, help="weight of the divergence by the mean, at the start")
    alpha_std: Scalar = number(10.0, above=0, help="weight of the divergence by the deviation, at the start")
    per_dimension: bool = static(True, help="limit the divergence in each dimension of a box, not their sum")
    critic: Critic = static(Critic(ensemble=1))

    def init(self, key: jax.Array, spec: EnvSpec) -> MPOState:
        policy_key, critic_key = jax.random.split(key)
        policy = off_policy.begin(self, self.policy.init(policy_key, spec), target=True)
        critic = off_policy.begin(self, self.critic.init(critic_key, spec), target=True)
        discrete = isinstance(spec.action_space, spaces.Discrete)
        multipliers = {"mean": self.alpha_mean} | ({} if discrete else {"std": self.alpha_std})
        each = (spec.action_space.shape[0] if self.per_dimension and not discrete else 1,)
        duals = {name: jnp.full(each, before_softplus(value)) for name, value in multipliers.items()}
        duals["temperature"] = before_softplus(self.temperature)
        return MPOState(policy, critic, off_policy.begin(self, duals, target=False), jnp.int32(0))

    def update(
        self, state: MPOState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[MPOState, UpdateInfo]:
        replay: TransitionBatch = batch["replay"]
        next_key, key = (q_learning.transition_keys(k, replay.weight.shape[0], replicas) for k in jax.random.split(key))
        following = self._candidates(state, replay.next_observation, replay.next_action_mask, next_key, spec)
        value = jnp.sum(jnp.exp(following.log_prior) * following.values, axis=-1)
        target = off_policy.expected_target(self, replay, value)
        critic, metrics, _ = off_policy.fit_critic(self, state.critic, replay, target, spec, replicas)

        old = self._candidates(state, replay.observation, replay.action_mask, key, spec)
        epsilons = {"mean": self.epsilon_mean, "std": self.epsilon_std}

        def mean(x):
            return weighted_mean(x, replay.weight, replicas)

        def loss(learnt: tuple[Params, Params]):
            duals = jax.tree.map(jax.nn.softplus, learnt[1])
            new = off_policy.evaluate_policy(self, learnt[0], replay.observation, spec, replay.action_mask)
            weights = improved(old.values, old.log_prior, jax.lax.stop_gradient(duals["temperature"]))
            fit = mean(self._fit(new, old, weights))
            divergences = jax.tree.map(lambda x: jax.vmap(mean, in_axes=-1)(x), self._divergences(new, old))
            bounds = [jnp.sum(bounded(divergences[name], duals[name], epsilons[name])) for name in divergences]
            temperature = mean(temperature_loss(old.values, old.log_prior, duals["temperature"], self.epsilon))
            told = {"policy_loss": fit, "kl_improved": mean(divergence(weights, old.log_prior))}
            told |= {f"kl_{name}": jnp.mean(x) for name, x in divergences.items()}
            return fit + sum(bounds) + temperature, told

        gradients, told = jax.grad(loss, has_aux=True)((state.policy.params, state.duals.params))
        policy = off_policy.step(self, state.policy, gradients[0], off_policy.policy_rate(self), replicas)
        duals = off_policy.step(self, state.duals, gradients[1], self.dual_learning_rate, replicas)
        duals = duals.replace(params=jax.tree.map(lambda x: jnp.maximum(x, LEAST_DUAL), duals.params))

        used = {name: jnp.mean(jax.nn.softplus(x)) for name, x in state.duals.params.items()}
        told |= {"temperature": used.pop("temperature")} | {f"alpha_{name}": x for name, x in used.items()}
        updates = state.updates + 1
        share = jnp.where(updates % self.target_period == 0, self.tau, 0.0)
        policy, critic = off_policy.follow(policy, share), off_policy.follow(critic, share)
        return MPOState(policy, critic, duals, updates), UpdateInfo(replicas.mean(metrics | told))

    def _candidates(self, state, observation, mask, key, spec) -> Candidates:
        """What the target policy may do at observations [batch], and the smallest target critic's values of it.

        All actions of a discrete space; actions sampled with keys [batch] from a box.
        """
        distribution = off_policy.evaluate_policy(self, state.policy.target_params, observation, spec, mask)

        def values(action):
            output = off_policy.evaluate_critic(self, state.critic.target_params, observation, action, spec, mask)
            return jnp.min(output, axis=0)

        if isinstance(spec.action_space, spaces.Discrete):
            # A forbidden action has probability 0, and the most negative finite number for a value.
            allowed = values(None) if mask is None else jnp.where(mask, values(None), 0.0)
            return Candidates(distribution, None, allowed, distribution.log_probs())
        keys = jax.vmap(lambda k: jax.random.split(k, self.samples), out_axes=1)(key)
        points = jax.vmap(distribution.base.sample)(keys)
        # Mapped over the actions alone, so that an observation is encoded once.
        each = jax.vmap(lambda x: values(from_unit(jnp.tanh(x), spec.action_space))[:, 0], out_axes=1)(points)
        return Candidates(distribution, points, each, jnp.full_like(each, -jnp.log(self.samples)))

    def _fit(self, new, old, weights):
        """Minus the weighted log-likelihood [batch] of the candidates, of weights [batch, K], under the new policy.

        The mean and the deviation of a Gaussian are fitted each beside the old other. Both policies are squashed
        alike, so that likelihoods before the tanh differ from those after it by no more than a constant.
        """
        if old.points is None:
            return -jnp.sum(weights * new.log_probs(), axis=-1)
        now, before = new.base, old.distribution.base
        parts = (DiagonalGaussian(now.mean, before.log_std), DiagonalGaussian(before.mean, now.log_std))
        return -sum(jnp.sum(weights.T * jax.vmap(part.log_prob)(old.points), axis=0) for part in parts)

    def _divergences(self, new, old):
        """How far the new policy is from the old, by the name of what is limited, each [batch, k]."""
        if old.points is None:
            return {"mean": old.distribution.kl(new)[:, None]}
        mean, std = decoupled_kl(old.distribution.base, new.base)
        if not self.per_dimension:
            mean, std = (jnp.sum(x, axis=-1, keepdims=True) for x in (mean, std))
        return {"mean": mean, "std": std}


# --- the equations ---------------------------------------------------------------------------------------------------


def before_softplus(x: Scalar) -> jax.Array:
    """The number whose softplus, log(1 + exp), is x > 0; float32."""
    x = jnp.asarray(x, jnp.float32)
    return x + jnp.log(-jnp.expm1(-x))


def improved(values: jax.Array, log_prior: jax.Array, temperature: Scalar) -> jax.Array:
    """q proportional to pi exp(Q / eta): the policy that is best within a divergence of pi (section 4.1).

    Args:
      values: Q [batch, K].
      log_prior: log pi [batch, K] of the same actions; -log K where they were sampled from it.
      temperature: eta, more than 0.

    Returns:
      [batch, K], each row sums to 1.
    """
    return jax.nn.softmax(values / temperature + log_prior, axis=-1)


def temperature_loss(values: jax.Array, log_prior: jax.Array, temperature: Scalar, epsilon: Scalar) -> jax.Array:
    """eta epsilon + eta log sum pi exp(Q / eta), whose minimum over eta is where KL(q || pi) is epsilon.

    Args:
      values, log_prior, temperature: as of `improved`.
      epsilon: in nats.

    Returns:
      [batch].
    """
    return temperature * (epsilon + jax.nn.logsumexp(values / temperature + log_prior, axis=-1))


def divergence(weights: jax.Array, log_prior: jax.Array) -> jax.Array:
    """KL(q || pi) [batch] in nats, of weights q and log pi [batch, K]."""
    return jnp.sum(jax.scipy.special.xlogy(weights, weights) - weights * log_prior, axis=-1)


def decoupled_kl(old: DiagonalGaussian, new: DiagonalGaussian) -> tuple[jax.Array, jax.Array]:
    """KL(old || new) in nats of each dimension, [batch, n]: if the mean alone were new, and the deviation alone."""
    mean, std, new_mean, new_std = (x[..., None] for x in (old.mean, old.log_std, new.mean, new.log_std))
    before = DiagonalGaussian(mean, std)
    return before.kl(DiagonalGaussian(new_mean, std)), before.kl(DiagonalGaussian(mean, new_std))


def bounded(kl: jax.Array, alpha: jax.Array, epsilon: Scalar) -> jax.Array:
    """The Lagrangian of kl <= epsilon: alpha kl for the policy, alpha (epsilon - kl) for alpha; kl and alpha [k].

    Going down its gradient, the policy lowers what it pays for, and alpha rises where kl is more than epsilon.
    """
    return jax.lax.stop_gradient(alpha) * kl + alpha * (epsilon - jax.lax.stop_gradient(kl))
