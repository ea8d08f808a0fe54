"""Networks with a model state, and dictionary observations of which actor and critic read different keys, in runs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers.programs import SMALL, assert_equal, resumed

import jaxrl
from jaxrl.core import spaces
from jaxrl.envs.episode import restart, transition
from jaxrl.networks import MLP, Actor, ActorCritic, Critic, QNetwork


@struct.dataclass
class Guess:
    """One step an episode: reward 1 if the action has the sign of `state`, and thrice `privileged_state`."""

    scale: Any = np.float32(3.0)
    continuous: bool = struct.field(pytree_node=False, default=False)

    name, resets = "test:Guess", False
    observation_space = spaces.Dict({"state": spaces.Box(-1, 1, (1,)), "privileged_state": spaces.Box(-1, 1, (1,))})

    @property
    def action_space(self):
        return spaces.Box(-1, 1, (1,)) if self.continuous else spaces.Discrete(2)

    def reset(self, key):
        signs = jnp.sign(jax.random.normal(key, (2, 1)))
        observation = {"state": signs[0], "privileged_state": signs[1]}
        return observation, restart(observation)

    def step(self, state, action, key):
        up = action[0] > 0 if self.continuous else action == 1
        right = (up == (state["state"][0] > 0)).astype(jnp.float32)
        reward = right + self.scale * state["privileged_state"][0]
        return state, transition(state, reward, terminated=True, truncated=False)


POLICY, BOTH = ("state",), ("privileged_state", "state")
SETTINGS = {"num_envs": 8, "evaluate_every": 0, "progress": False, "seed": 1}


def last(result, name):
    return float([entry[name] for entry in result.metrics if name in entry][-1])


@pytest.mark.long
def test_ppo_with_a_critic_that_knows_more_than_the_actor():
    """Read with the actor's key alone, nine tenths of the reward's variance is noise to the critic."""
    explained = {}
    for keys in (POLICY, BOTH):
        network = ActorCritic(policy_observation_keys=POLICY, value_observation_keys=keys)
        algo = jaxrl.PPO(network=network, rollout_length=16, learning_rate=1e-2, clip_value=False)
        result = jaxrl.train(algo, Guess(), total_steps=8_192, **SETTINGS)
        explained[keys] = last(result, "update/explained_variance")
        torso = result.state.learner.network.params["policy"]["body"]["torso"]
        assert torso["dense"]["layer_0"]["kernel"].shape[0] == 1
    assert explained[BOTH] > 0.9 and explained[POLICY] < 0.5, explained


def test_sac_with_critics_that_know_more_than_the_policy():
    policy, critic = Actor(widths=(16,), observation_keys=POLICY), Critic(widths=(16,), observation_keys=BOTH)
    algo = jaxrl.SAC(policy=policy, critic=critic, capacity=256, min_size=32, batch_size=16)
    result = jaxrl.train(algo, Guess(continuous=True), total_steps=128, **SETTINGS)
    assert result.state.learner.policy.params["hidden"]["layer_0"]["kernel"].shape == (1, 16)
    assert np.isfinite(last(result, "update/critic_loss"))


NORMED = MLP((16,), normalization="batch")
WITH_STATISTICS = {
    # Numbers, no schedules: these would have another length in the run that stops earlier.
    "ppo": jaxrl.PPO(rollout_length=8, learning_rate=1e-3, network=ActorCritic(NORMED)),
    "dqn": jaxrl.DQN(
        learning_rate=2.5e-4,
        rollout_length=8,
        capacity=256,
        min_size=64,
        batch_size=16,
        replay_ratio=1 / 32,
        target_period=2,  # so the last of an even number of updates moved the target
        epsilon=0.1,
        network=QNetwork(NORMED),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_STATISTICS)
def test_running_statistics_are_learned_saved_and_acted_with(name, tmp_path):
    """They move, a run that was stopped goes on from them bit for bit, and the policy acts with the last ones."""
    algo = WITH_STATISTICS[name]
    whole = resumed(tmp_path, algo, "gymnax:CartPole-v1", 512, **SETTINGS)
    network = whole.state.learner.network
    assert all(np.abs(np.asarray(x)).max() > 0 for x in jax.tree.leaves(network.model_state))
    if name == "dqn":
        assert_equal(network.target_model_state, network.model_state)
    assert_equal(whole.policy.actor.model_state, network.model_state)


def test_a_network_without_statistics_has_none():
    network = dataclasses.replace(WITH_STATISTICS["ppo"].network, torso=SMALL)
    assert network.init(jax.random.key(0), jaxrl.core.types.env_spec(jaxrl.make("probe:Constant")))[1] == ()
