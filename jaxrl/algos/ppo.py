"""Proximal policy optimization (Schulman et al., 2017, arXiv:1707.06347)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp

from jaxrl.algos import on_policy, returns, rnd
from jaxrl.algos.base import algorithm, changed, number, part, static
from jaxrl.algos.kl_penalty import KLPenalty
from jaxrl.algos.minibatches import MinibatchFields, steps_over_minibatches
from jaxrl.algos.on_policy import OnPolicy, PolicyState
from jaxrl.algos.rnd import RND
from jaxrl.algos.train_state import Variables, weighted_mean, weighted_means
from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.schedules import Linear, Scalar
from jaxrl.core.types import (
    EnvSpec,
    Replicas,
    Source,
    UpdateInfo,
)
from jaxrl.networks.torsos import has_grids


class PolicyLoss(Protocol):
    """Interface of custom policy losses: pure functions of arrays of the same shape, one entry per transition.

    Register the function with `jaxrl.register`, so that runs trained with it can be loaded.
    """

    def __call__(self, log_ratio: jax.Array, advantage: jax.Array, clip: Scalar, /) -> jax.Array:
        """Return the loss of every entry, which is minimized; `clipped_surrogate` is an example."""
        ...


@algorithm
class PPO(MinibatchFields, OnPolicy):
    """Proximal policy optimization with generalized advantage estimation; recurrent when its network is."""

    learning_rate: Scalar | None = changed(
        None,
        help="learning rate (of the policy, if value_learning_rate is set); None: linear decay to 0, from 3e-4 for "
        "continuous actions, 5e-3 for 10 x 10 grids (MinAtar), 2.5e-4 for several agents, otherwise 5e-4",
    )
    gae_lambda: Scalar = number(
        0.95, low=0, high=1, help="lambda of GAE; 0: one-step TD errors, 1: returns of the whole rollout"
    )
    exploration_bonus: RND | None = part(RND, help="intrinsic reward for novel observations; None: no bonus")
    clip: Scalar = number(
        0.2,
        above=0,
        only_with="not kl_penalty or clip_value or policy_loss",
        help="clip range of the probability ratio around 1",
    )
    target_kl: Scalar | None = number(
        None,
        above=0,
        help="stop a batch's gradient steps once a minibatch's approximate KL exceeds 1.5 times this; None: never",
    )
    kl_penalty: KLPenalty | None = part(
        KLPenalty,
        was={"kl_target": "target", "kl_cutoff_cost": "cutoff_cost", "initial_penalty": "initial"},
        switch="objective=kl",
        help="adaptive penalty on the KL divergence, with unclipped probability ratios; None: clipped ratios",
    )
    policy_loss: PolicyLoss | None = static(
        None, help="custom function of the probability ratio: (log_ratio, advantage, clip) -> loss"
    )
    epochs: int | None = changed(
        None, help="passes over each batch; None: 4 for discrete actions, 10 for continuous ones"
    )
    clip_value: bool = static(True, help="also clip changes of the value predictions, by the same range")
    normalize_advantage: bool = static(True, help="standardize advantages per minibatch")

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        found = self.resolved(spec)
        # The reasons, with figures, are in docs/algorithms/ppo.md.
        continuous = spaces.is_continuous(spec.action_space)
        if self.learning_rate is None:
            rate = 3e-4 if continuous else 2.5e-4 if spec.num_agents > 1 else 5e-4
            rate = 5e-3 if has_grids(spec.observation_space) else rate
            found["learning_rate"] = Linear(rate, 0.0)
        if self.epochs is None:
            found["epochs"] = 10 if continuous else 4
        return dataclasses.replace(self, **found)

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems = super().validate(spec, num_envs, shards)
        if self.policy_loss is not None and not callable(self.policy_loss):
            problems.append(f"PPO.policy_loss={self.policy_loss!r} must be a function (jaxrl.algos.ppo.PolicyLoss)")
        return problems

    @property
    def experience(self) -> Mapping[str, Source]:
        # The ratio is relative to the acting policy: a lag of one update is like one more epoch.
        return {"rollout": self.rollouts(max_policy_lag=1, unit=self.minibatches)}

    def update(
        self, state: PolicyState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[PolicyState, UpdateInfo]:
        statistics, rollout = self.prepare(state.statistics, batch, replicas)
        rows = rollout.rows
        bonus, intrinsic, explored = self.explored(state, rollout, spec=spec, key=key, replicas=replicas)
        segment = self.recorded_segment(rollout, state.network.variables, spec)
        advantages = returns.gae(segment, self.gamma, self.gae_lambda)
        targets = advantages + segment.values
        data = {
            "inputs": self.inputs(rollout),
            "action": rows.action,
            "old": rows.extras,
            "advantage": rnd.with_bonus(self.exploration_bonus, advantages, intrinsic),
            "target": targets,
            "weight": rows.weight,
            "active": rollout.active,
        }
        divided = self.divided(data, rollout.carry.network, key, replicas)

        def step(learned, indices):
            before, going = learned
            minibatch, carry = divided.take(indices)

            def loss(params):
                variables = Variables(params, before.model_state)
                return self._loss(variables, minibatch, carry, state.penalty, spec, replicas)

            gradients, (metrics, model_state) = jax.grad(loss, has_aux=True)(before.params)
            network, norms = self.apply_gradients(before, gradients, replicas, model_state)
            metrics |= norms
            if self.target_kl is not None:
                going &= replicas.mean(metrics["approximate_kl"]) <= 1.5 * self.target_kl
                network = jax.tree.map(lambda new, old: jnp.where(going, new, old), network, before)
                metrics["steps_made"] = going
            return (network, going), metrics

        going = () if self.target_kl is None else jnp.bool_(True)
        (network, _), metrics = steps_over_minibatches(step, (state.network, going), divided.indices)
        metrics = replicas.mean(metrics) | explored
        metrics["explained_variance"] = on_policy.explained_variance(targets, segment.values, rows.weight, replicas)
        metrics["learning_rate"] = jnp.asarray(self.learning_rate)
        new = state.replace(network=network, statistics=statistics, bonus=bonus, updates=state.updates + 1)
        if self.kl_penalty is not None:
            inputs, carry = data["inputs"], rollout.carry.network
            output, _, _ = self.unroll(network.variables, inputs, carry, spec, train=False)
            divergence = rows.extras["distribution"].kl(output.distribution)
            acting = on_policy.acting(rows.weight, rollout.active)
            divergence = replicas.mean(weighted_mean(divergence, acting, replicas))
            new = new.replace(penalty=self.kl_penalty.adapted(state.penalty, divergence))
            metrics |= {"penalty": new.penalty, "kl_after_update": divergence}
        return new, UpdateInfo(metrics)

    def _loss(self, network, minibatch, carry, penalty, spec, replicas):
        old, weight = minibatch["old"], minibatch["weight"]
        acting = on_policy.acting(weight, minibatch["active"])
        output, _, model_state = self.unroll(network, minibatch["inputs"], carry, spec, train=True)
        log_prob = output.distribution.log_prob(minibatch["action"])
        log_ratio = log_prob - old["log_prob"]
        advantage = minibatch["advantage"]
        if self.normalize_advantage:
            advantage = on_policy.standardized(advantage, acting, replicas)

        value_clip = self.clip if self.clip_value else None
        stopped = jax.lax.stop_gradient(log_ratio)  # otherwise, metrics could add 0 times infinity to the gradient
        values = {
            "value_loss": squared_value_error(output.value, old["value"], minibatch["target"], value_clip),
            "entropy": output.distribution.entropy(),
            "approximate_kl": jnp.expm1(stopped) - stopped,
            "clip_fraction": (jnp.abs(jnp.expm1(stopped)) > self.clip).astype(jnp.float32),
        }
        surrogate = self.policy_loss or (clipped_surrogate if self.kl_penalty is None else unclipped_surrogate)
        values["policy_loss"] = surrogate(log_ratio, advantage, self.clip)
        if (shape := jnp.shape(values["policy_loss"])) != log_ratio.shape:
            raise ConfigError(
                f"PPO.policy_loss={self.policy_loss!r} returned shape {shape}; it must return one loss per entry, "
                f"with shape {log_ratio.shape}"
            )
        if self.kl_penalty is not None:
            values["divergence"] = old["distribution"].kl(output.distribution)
        metrics = weighted_means(values, acting, replicas)
        if self.kl_penalty is not None:
            metrics["policy_loss"] += self.kl_penalty.loss(penalty, metrics.pop("divergence"), replicas)
        if acting is not weight:
            metrics["value_loss"] = weighted_mean(values["value_loss"], weight, replicas)
        loss = self.total_loss(metrics["policy_loss"], metrics["value_loss"], metrics["entropy"])
        return loss, (metrics, model_state)


def clipped_surrogate(log_ratio: jax.Array, advantage: jax.Array, clip: Scalar) -> jax.Array:
    """Return the clipped policy objective (equation 7), negated because losses are minimized.

    Args:
      log_ratio: log pi(a|o) of the current policy minus that of the acting policy, any shape.
      advantage: the same shape.
      clip: epsilon.

    Returns:
      The loss of every entry, the same shape.
    """
    ratio = jnp.exp(log_ratio)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1.0 - clip, 1.0 + clip) * advantage)


def unclipped_surrogate(log_ratio: jax.Array, advantage: jax.Array, clip: Scalar) -> jax.Array:
    """Return the negated policy objective without clipping (equation 6); arguments as for `clipped_surrogate`."""
    return -jnp.exp(log_ratio) * advantage


def squared_value_error(value: jax.Array, old_value: jax.Array, target: jax.Array, clip: Scalar | None) -> jax.Array:
    """Return half the squared error of `value`, or of `value` clipped to `old_value` +- `clip` if that is larger."""
    error = jnp.square(value - target)
    if clip is not None:
        limited = old_value + jnp.clip(value - old_value, -clip, clip)
        error = jnp.maximum(error, jnp.square(limited - target))
    return 0.5 * error
