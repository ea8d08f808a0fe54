"""Environments, policies, runs and data whose spaces must fit are compared before anything is compiled."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers.refused import nothing_compiled

import jaxrl
from jaxrl import spaces
from jaxrl.core.errors import ConfigError, DatasetError, EnvironmentContractError
from jaxrl.envs.episode import restart, transition
from jaxrl.networks import MLP, ActorCritic
from jaxrl.run.policies import evaluation


@struct.dataclass
class One:
    """Three steps of nothing."""

    observation_space: spaces.Space = struct.field(pytree_node=False)
    action_space: spaces.Space = struct.field(pytree_node=False)
    bonus: float = 0.0

    name = "my:One"
    resets = False

    def reset(self, key):
        return jnp.int32(0), restart(spaces.zeros(self.observation_space))

    def step(self, state, action, key):
        nothing = spaces.zeros(self.observation_space)
        return state + 1, transition(nothing, jnp.float32(self.bonus), state > 2, jnp.asarray(False))


VECTOR, CHOICES = spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(4)
ENV = One(VECTOR, CHOICES)
ALGO = jaxrl.PPO(rollout_length=8, epochs=1, minibatches=1, network=ActorCritic(torso=MLP((8,))))
SETTINGS = {"total_steps": 16, "num_envs": 2, "evaluation_episodes": 2, "evaluate_every": 0, "progress": False}
OTHERS = [
    (One(VECTOR, spaces.Discrete(2)), "action_space"),
    (One(VECTOR, spaces.Discrete(8)), "action_space"),
    (One(VECTOR, spaces.Box(-5.0, 5.0, (3,))), "action_space"),
    (One(VECTOR, spaces.MultiDiscrete((4,))), "action_space"),
    (One(spaces.Box(-1.0, 1.0, (6,)), CHOICES), "observation_space"),
    (One(spaces.Box(-1, 1, (2,), np.int32), CHOICES), "observation_space"),
    (One(spaces.Dict({"x": VECTOR}), CHOICES), "observation_space"),
    (One(CHOICES, CHOICES), "observation_space"),
]


@pytest.fixture(scope="module")
def result():
    return jaxrl.train(ALGO, ENV, **SETTINGS)


@pytest.mark.parametrize(("other", "which"), OTHERS)
def test_eval_env_with_other_spaces(other, which, tmp_path):
    with nothing_compiled(), pytest.raises(ConfigError) as caught:
        jaxrl.train(ALGO, ENV, eval_env=other, run_dir=tmp_path / "run", **SETTINGS)
    assert "eval_env: my:One has the" in str(caught.value) and which in str(caught.value)
    assert str(getattr(other, which)) in str(caught.value) and str(getattr(ENV, which)) in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_eval_env_with_other_bounds_parameters_and_time_limit():
    wide = jaxrl.envs.TimeLimit(One(spaces.Box(-9.0, 9.0, (2,)), CHOICES, bonus=2.0), 2)
    found = jaxrl.train(ALGO, ENV, eval_env=wide, **SETTINGS).evaluation
    np.testing.assert_array_equal(found.returns, 4.0)


@pytest.mark.long
@pytest.mark.parametrize(("other", "which"), OTHERS)
def test_policies_in_other_environments(result, other, which, tmp_path):
    policy = result.policy
    for play in (
        lambda: evaluation.evaluate(policy.algo, policy.actor, jaxrl.envs.prepared(other), policy.spec, episodes=2),
        lambda: jaxrl.render(policy, other, tmp_path / "a.gif"),
        lambda: jaxrl.export_rlds(policy, other, tmp_path / "data", episodes=1),
        lambda: jaxrl.train(ALGO, other, init_from=policy, **SETTINGS),
    ):
        with pytest.raises(ConfigError) as caught:
            play()
        told = f"my:One has the {which} {getattr(other, which)}, but the policy was trained on "
        assert told in str(caught.value) or "MLP cannot read a dictionary" in str(caught.value)


@pytest.mark.parametrize("which", ["observation_space", "action_space"])
def test_a_recipe_whose_environment_has_changed(which):
    """As one from a file, or on the machine of a Ray actor."""
    recipe = jaxrl.make("gymnasium:CartPole-v1")
    other = dataclasses.replace(recipe, **{which: spaces.Box(-1.0, 1.0, (7,))})
    with pytest.raises(EnvironmentContractError) as caught:
        other.build(1, 0)
    for part in (f"gymnasium:CartPole-v1 has the {which}", str(getattr(recipe, which)), "(7,)"):
        assert part in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize(("other", "which"), OTHERS)
def test_datasets_of_other_environments(result, other, which, tmp_path_factory):
    """Of a smaller number of actions alone a dataset knows nothing; those beyond it are refused."""
    path = tmp_path_factory.getbasetemp() / "spaces_that_must_fit"
    if not path.exists():
        jaxrl.export_rlds(result.policy, ENV, path, episodes=2, explore=True)
    if which == "action_space" and isinstance(other.action_space, spaces.Discrete):
        taken = np.concatenate([episode.action for episode in jaxrl.load_dataset(f"rlds:{path}")])
        if taken.max() < other.action_space.n:
            return
    bc = jaxrl.BC(batch_size=8)
    with pytest.raises((ConfigError, DatasetError)) as caught:
        jaxrl.train(bc, dataset=f"rlds:{path}", eval_env=other, total_steps=4, evaluation_episodes=2, progress=False)
    said = str(caught.value)
    assert f"{which.removesuffix('_space')} " in said and "environment's" in said or "BC" in said
