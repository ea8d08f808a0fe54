"""CrossQ (Bhatt et al., 2024, arXiv:1902.05605v4): soft actor-critic with batch normalization, without targets.

The observation and the next observation of a transition pass through the critics in one batch, so that batch
normalization sees the actions of the data and of the policy. This makes target networks unnecessary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos.acting import Noise
from jaxrl.algos.base import algorithm, changed, static
from jaxrl.algos.off_policy import DropoutKeys
from jaxrl.algos.optimizers import Adam, Optimizer
from jaxrl.algos.sac import SAC
from jaxrl.algos.train_state import TrainState, Variables
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import EnvSpec, ModelState, Network, TransitionBatch
from jaxrl.networks import Actor, Categorical, Critic, TanhGaussian


@algorithm
class CrossQ(SAC):
    """SAC without target networks: wide critics with batch renormalization over observations and next observations."""

    removed = {"joint_batch": True, "newest": 0}

    learning_rate: Scalar = changed(1e-3)
    tau: Scalar | None = changed(None)
    joint_policy: bool = static(
        False, help="pass next observations through the policy in its loss too, for its batch normalization (FlashSAC)"
    )
    policy_delay: int = changed(3)
    min_size: int = changed(5_000)
    noise: Noise = changed(Noise())
    optimizer: Optimizer = changed(Adam(b1=0.5, eps=1e-8))
    policy: Network = changed(Actor(normalization="batch_renorm", normalize_inputs=True))
    critic: Critic = changed(Critic(widths=(2048, 2048), normalization="batch_renorm", normalize_inputs=True))

    def critic_outputs(
        self,
        critic: TrainState,
        batch: TransitionBatch,
        next_action: jax.Array | None,
        drop: DropoutKeys,
        spec: EnvSpec,
    ) -> Callable[[Variables], tuple[Any, Any, ModelState]]:
        """Return the function of `SAC.critic_outputs`, with both ends of the transitions in one forward pass."""
        slow = None
        if self.tau is not None:
            slow = joint_outputs(self.critic, critic.target_variables, batch, next_action, spec, drop[0])[1]

        def outputs(variables):
            here, there, model_state = joint_outputs(self.critic, variables, batch, next_action, spec, drop[1])
            return here, there if slow is None else slow, model_state

        return outputs

    def train_policy(
        self, policy: Variables, batch: TransitionBatch, spec: EnvSpec
    ) -> tuple[TanhGaussian | Categorical, ModelState]:
        """Return the policy's distributions [batch] at the observations, in training mode, and the model state."""
        if not self.joint_policy:
            return super().train_policy(policy, batch, spec)
        both = batch.observation.joined(batch.next_observation)
        with both.rows_that_count(jnp.concatenate([batch.weight] * 2)):
            distribution, model_state = both.policy_output(self.policy, policy, spec, train=True)
        return jax.tree.map(lambda x: x[: batch.weight.shape[0]], distribution), model_state


def joint_outputs(
    network: Critic,
    critic: Variables,
    batch: TransitionBatch,
    next_action: jax.Array | None,
    spec: EnvSpec,
    key: jax.Array | None = None,
) -> tuple[Any, Any, ModelState]:
    """Return the critics' outputs at observations and next observations, from one training pass, and the model state.

    Args:
      network, critic: the ensemble and its variables.
      batch: transitions.
      next_action: box actions [batch, n]; None for discrete actions, for which the outputs cover all actions.
      spec: the environment's spec.
      key: keys [batch] for dropout; None: no dropout.
    """
    if key is not None:
        key = jnp.concatenate([key, jax.vmap(lambda k: jax.random.fold_in(k, 1))(key)])
    action = None if next_action is None else jnp.concatenate([batch.action, next_action])
    both = batch.observation.joined(batch.next_observation)
    with both.rows_that_count(jnp.concatenate([batch.weight] * 2)):
        output, model_state = both.critic_output(network, critic, action, spec, key, train=True)
    size = batch.weight.shape[0]
    here, there = (jax.tree.map(lambda x, part=part: x[:, part], output) for part in (slice(size), slice(size, None)))
    return here, there, model_state
