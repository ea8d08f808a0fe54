"""Fields of the on-policy algorithms."""

from jaxrl.algos.base import field_group, number, static
from jaxrl.algos.fields.discount import DiscountFields
from jaxrl.algos.optimizers import Adam, Optimizer
from jaxrl.algos.rnd import RND
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import ValueNetwork
from jaxrl.networks import ActorCritic


@field_group
class RolloutFields(DiscountFields):
    """Rollouts and their normalization."""

    max_grad_norm: Scalar | None = number(0.5, above=0, help="clip gradients to this norm; None: no clipping")
    observation_clip: Scalar = number(
        10.0, above=0, only_with="normalize_observation", help="maximum absolute value of normalized observations"
    )
    reward_clip: Scalar = number(
        10.0, above=0, only_with="normalize_reward", help="maximum absolute value of normalized rewards"
    )
    rollout_length: int | None = static(
        128,
        low=1,
        help="steps per environment and batch; with whole_episodes: between checks for finished episodes",
    )
    normalize_observation: bool | None = static(
        None,
        choices=(None, True, False),
        help="normalize observations by running mean and standard deviation; None: only for continuous actions",
    )
    normalize_reward: bool | None = static(
        None,
        choices=(None, True, False),
        help="divide rewards by the running deviation of discounted returns; None: only for continuous actions",
    )
    whole_episodes: int = static(0, low=0, help="number of complete episodes per batch; 0: batches are rollouts")
    max_episode_length: int = static(
        1000, low=1, only_with="whole_episodes", help="maximum number of transitions per episode to learn from"
    )
    bootstrap_truncated: bool = static(True, help="bootstrap at time limits; False treats them as terminations")


@field_group
class AdvantageFields:
    """Generalized advantage estimation."""

    gae_lambda: Scalar = number(
        0.95, low=0, high=1, help="lambda of GAE; 0: one-step TD errors, 1: returns of the whole rollout"
    )


@field_group
class MinibatchFields:
    """Gradient steps on minibatches of one batch."""

    epochs: int | None = static(4, low=1, help="passes over each batch")
    minibatches: int | None = static(4, low=1, help="gradient steps per pass")


@field_group
class BonusFields:
    """A bonus added to the rewards, for policies that learn from advantages."""

    exploration_bonus: RND | None = number(
        None, options=RND, help="intrinsic reward for novel observations; None: no bonus"
    )


@field_group
class OnPolicyFields(RolloutFields):
    """Policy, value and their optimizer."""

    learning_rate: Scalar | None = number(
        None, above=0, help="learning rate (of the policy, if value_learning_rate is set)"
    )
    value_learning_rate: Scalar | None = number(None, above=0, help="learning rate of the value; None: learning_rate")
    value_cost: Scalar = number(0.5, low=0, help="weight of the value loss")
    entropy_cost: Scalar | None = number(
        None, low=0, help="weight of the entropy bonus; None: 0.01 for discrete actions, 0 for continuous ones"
    )
    joint_grad_norm: bool = static(
        False,
        help="clip policy and value gradients by their joint norm; False: separate networks by their own norms",
    )
    optimizer: Optimizer = number(Adam(eps=1e-5))
    network: ValueNetwork = static(ActorCritic())
