"""Wrong calls from Python: one error of jaxrl's own, before anything is compiled, which says what to do."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import struct

import jaxrl
from jaxrl.core.errors import JaxrlError
from jaxrl.envs.episode import restart, transition
from jaxrl.parallel.program import Program

ENV = "gymnax:CartPole-v1"


def train(algo="ppo", env=ENV, total_steps=1000, **settings):
    return jaxrl.train(algo, env, total_steps=total_steps, progress=False, **settings)


def sweep(**settings):
    settings = {"seeds": 2, "num_samples": 2} | settings
    return jaxrl.sweep("ppo", ENV, total_steps=1000, progress=False, **settings)


def print_moment(moment):
    print(moment)


PPO, DQN, SAC = jaxrl.PPO, jaxrl.DQN, jaxrl.SAC
MLP, ActorCritic, NatureCNN = jaxrl.networks.MLP, jaxrl.networks.ActorCritic, jaxrl.networks.NatureCNN
# What is said, and the call.
CALLS = [
    # In the words of Stable-Baselines3 and CleanRL.
    ("in jaxrl: 'entropy_cost'", lambda: PPO(ent_coef=0.1)),
    ("in jaxrl: 'rollout_length'", lambda: PPO(n_steps=128)),
    ("in jaxrl: 'epochs'", lambda: PPO(n_epochs=4)),
    ("in jaxrl: 'minibatches'", lambda: PPO(num_minibatches=4)),
    ("in jaxrl: 'clip'", lambda: PPO(clip_range=0.2)),
    ("in jaxrl: 'value_cost'", lambda: jaxrl.A2C(vf_coef=0.5)),
    ("in jaxrl: 'learning_rate'", lambda: PPO(lr=1e-3)),
    ("in jaxrl: 'capacity'", lambda: DQN(buffer_size=1000)),
    ("in jaxrl: 'min_size'", lambda: SAC(learning_starts=100)),
    ("in jaxrl: 'replay_ratio'", lambda: SAC(train_freq=1)),
    ("in jaxrl: 'target_period'", lambda: DQN(target_update_interval=500)),
    ("in jaxrl: 'policy_delay'", lambda: jaxrl.TD3(policy_frequency=2)),
    ("in jaxrl: 'network'", lambda: PPO(policy_kwargs={})),
    ("in jaxrl: 'epsilon'", lambda: jaxrl.make_algorithm("dqn", exploration_fraction=0.1)),
    # Names.
    ("did you mean 'gae_lambda'", lambda: PPO(gae_lamda=0.9)),
    ("unknown field of PPO 'nonsense'", lambda: PPO(nonsense=1)),
    ("PPO takes its settings by name", lambda: PPO(1e-3)),
    ("did you mean 'ppo'", lambda: jaxrl.make_algorithm("pppo")),
    ("did you mean 'CartPole-v1'", lambda: train(env="gymnax:CartPol-v1")),
    ("has no suite; did you mean", lambda: train(env="CartPole-v1")),
    ("unknown suite 'gymnx'; did you mean 'gymnax'", lambda: train(env="gymnx:CartPole-v1")),
    ("did you mean 'learning_rate'", lambda: jaxrl.sweep("ppo", ENV, total_steps=1000, seeds=2, learning_rat=[1])),
    ("did you mean 'purejaxrl-cartpole'", lambda: jaxrl.preset("purejaxrl-cartpol")),
    ("unknown parameter of gymnax:CartPole-v1 'foo'", lambda: jaxrl.make(ENV, foo=1)),
    ("force_mag='x' of gymnax:CartPole-v1 does not fit", lambda: jaxrl.make(ENV, force_mag="x")),
    ("did you mean 'relu'", lambda: train(PPO(network=ActorCritic(torso=MLP((64,), activation="rellu"))))),
    # Kinds.
    ("PPO is a class; pass one of it: PPO()", lambda: train(PPO)),
    ("PPO is a class", lambda: jaxrl.sweep(PPO, ENV, total_steps=1000, seeds=2)),
    ("PPO is a class", lambda: jaxrl.make_train(PPO, ENV, total_steps=1000)),
    ("3 is not an algorithm", lambda: train(3)),
    ("3 is no environment", lambda: train(env=3)),
    ("3 is no name of an environment", lambda: jaxrl.make(3)),
    ("there is no env; pass one", lambda: train(env=None)),
    ("optax", lambda: train(PPO(optimizer=optax.adam(1e-3)))),
    ("PPO.learning_rate is a function", lambda: train(PPO(learning_rate=lambda progress: 1e-3))),
    ("PPO.learning_rate='1e-3' must be a number", lambda: train(PPO(learning_rate="1e-3"))),
    ("A2C.learning_rate=None must be a number", lambda: train(jaxrl.A2C(learning_rate=None))),
    ("PPO.epochs=4.5 must be a whole number", lambda: train(PPO(epochs=4.5))),
    ("PPO.epochs='4' must be a whole number", lambda: train(PPO(epochs="4"))),
    ("PPO.clip_value=1 must be True or False", lambda: train(PPO(clip_value=1))),
    ("PPO.network=[64, 64] is not a network; pass ActorCritic", lambda: train(PPO(network=[64, 64]))),
    ("PPO.network='mlp' is not a network", lambda: train(PPO(network="mlp"))),
    ("SAC.critic=3 is not a network", lambda: train(SAC(critic=3), "gymnax:Pendulum-v1")),
    ("DQN.network=3 is not a network; pass QNetwork", lambda: train(jaxrl.DQN(network=3))),
    ("R2D2.network=None is not a network", lambda: train(jaxrl.R2D2(network=None))),
    ("your own module by from_linen", lambda: train(PPO(network=nn.Dense(2)))),
    ("is not a network; pass ActorCritic", lambda: train(PPO(network=ActorCritic))),
    ("the path '' is empty", lambda: train(run_dir="")),
    ("the path '' is empty", lambda: jaxrl.sweep("ppo", ENV, total_steps=1000, seeds=2, run_dir="")),
    ("the path '' is empty", lambda: jaxrl.load("")),
    ("ActorCritic.torso=[64, 64] is not a torso; pass one", lambda: train(PPO(network=ActorCritic(torso=[64, 64])))),
    ("widths='64' must be a tuple or a list", lambda: train(PPO(network=ActorCritic(torso=MLP("64"))))),
    ("total_steps=1000.5 must be a whole number", lambda: train(total_steps=1000.5)),
    ("total_steps='1000' must be a whole number", lambda: train(total_steps="1000")),
    ("total_steps=1000.5 must be a whole", lambda: jaxrl.sweep("ppo", ENV, total_steps=1000.5, seeds=2)),
    ("seed='0' must be a whole number", lambda: train(seed="0")),
    ("seed=0.5 must be a whole number", lambda: train(seed=0.5)),
    ("num_envs=4.5 must be a whole number", lambda: train(num_envs=4.5)),
    ("num_envs='8' must be a whole number", lambda: train(topology=jaxrl.Anakin(num_envs="8"))),
    ("evaluation_episodes=1.5 must be a whole number", lambda: train(evaluation_episodes=1.5)),
    ("checkpoint_every='all' must be a whole number", lambda: train(checkpoint_every="all")),
    ("topology='anakin' is none", lambda: train(topology="anakin")),
    ("is none; pass one, such as jaxrl.Anakin(", lambda: train(topology=jaxrl.Anakin)),
    ("target_return='high' must be a finite number", lambda: train(target_return="high")),
    ("callbacks[0]=3 is no callback", lambda: train(callbacks=[3])),
    ("loggers=[3] must be a list of loggers", lambda: train(loggers=[3])),
    # Values, and what does not fit together.
    ("PPO.gamma=1.5 must be at least 0 and at most 1", lambda: train(PPO(gamma=1.5))),
    ("PPO.objective='klip' is not one of 'clip', 'kl'", lambda: train(PPO(objective="klip"))),
    ("PPO.kl_target=0.5 has no effect unless objective=kl", lambda: train(PPO(kl_target=0.5))),
    ("DQN.batch_size=0 must be at least 1", lambda: train(DQN(batch_size=0))),
    ("capacity=10 is less than min_size=1000; raise it", lambda: train(DQN(capacity=10))),
    ("minibatches=3 does not divide", lambda: train(PPO(minibatches=3))),
    ("NatureCNN needs images", lambda: train(PPO(network=ActorCritic(torso=NatureCNN())))),
    ("DQN chooses among discrete actions", lambda: train("dqn", "gymnax:Pendulum-v1")),
    ("total_steps=0 must be at least 1", lambda: train(total_steps=0)),
    ("seed=-1 must be a whole number from 0", lambda: train(seed=-1)),
    ("num_envs=0 must be at least 1", lambda: train(num_envs=0)),
    ("evaluation_episodes=0 must be at least 1", lambda: train(evaluation_episodes=0)),
    ("evaluate_every=-1 must be at least 0", lambda: train(evaluate_every=-1)),
    ("keep=0 must be at least 1", lambda: train(keep=0)),
    ("set num_envs in the topology", lambda: train(num_envs=4, topology=jaxrl.Anakin(num_envs=4))),
    ("target_return=nan must be a finite number", lambda: train(target_return=float("nan"))),
    ("callbacks=<function", lambda: train(callbacks=print_moment)),
    ("callbacks[0]=<class", lambda: train(callbacks=[jaxrl.FunctionCallback])),
    ("total_steps='100' must be a whole number", lambda: jaxrl.make_train("ppo", ENV, total_steps="100")),
    ("num_envs=0 must be at least 1", lambda: jaxrl.make_train("ppo", ENV, total_steps=100, num_envs=0)),
    ("the ends must be finite, 0 < low < high", lambda: sweep(learning_rate=jaxrl.LogUniform(0, 1e-3))),
    ("the ends must be finite, 0 < low < high", lambda: sweep(learning_rate=jaxrl.LogUniform(1e-3, 1e-4))),
    ("the ends must be finite, low < high", lambda: sweep(learning_rate=jaxrl.Uniform(1e-3, 1e-4))),
    ("the ends must be finite, low < high", lambda: sweep(learning_rate=jaxrl.Uniform(float("nan"), 1.0))),
    ("the ends must be finite, low < high", lambda: sweep(learning_rate=jaxrl.Uniform("0", 1.0))),
    ("seeds: 3 is there twice", lambda: sweep(seeds=[3, 3])),
    ("learning_rate: 0.001 is there twice", lambda: sweep(num_samples=None, learning_rate=[1e-3, 2e-3, 1e-3])),
    ("num_envs: 4 is there twice", lambda: sweep(num_samples=None, num_envs=[4, np.int64(4)])),
    ("num_samples=3 of 2 different settings", lambda: sweep(num_samples=3, learning_rate=[1e-3, 2e-3])),
    ("num_samples=1.5 must be a whole number", lambda: sweep(num_samples=1.5)),
    ("search_seed=-1 must be a whole number", lambda: sweep(search_seed=-1)),
    ("seeds=None must be a whole number, or a list", lambda: sweep(seeds=None)),
    ("seeds='12' must be a whole number, or a list", lambda: sweep(seeds="12")),
    ("seeds=1.5 must be a whole number", lambda: sweep(seeds=1.5)),
    ("seeds=1.5 must be a whole number from 0", lambda: sweep(seeds=[1.5])),
    ("policy=3 must be Policy", lambda: jaxrl.render(3, ENV, "x.gif")),
    ("max_steps=0 must be at least 1", lambda: jaxrl.render(3, ENV, "x.gif", max_steps=0)),
    ("episodes='3' must be a whole number", lambda: jaxrl.export_rlds(3, ENV, "x", episodes="3")),
    ("path=3 must be a path", lambda: jaxrl.load(3)),
    ("step=-1 must be at least 0", lambda: jaxrl.load("runs/none", step=-1)),
    ("source=3 must be a path", lambda: jaxrl.load_dataset(3)),
    ("record: every='1' must be a whole number", lambda: train(record=jaxrl.Record("x", every="1"))),
    ("seeds: at least one", lambda: jaxrl.sweep("ppo", ENV, total_steps=1000, seeds=0)),
    ("runs/none is not a run directory", lambda: jaxrl.load("runs/none")),
]


@pytest.mark.parametrize(("said", "call"), CALLS)
def test_one_error_says_what_to_do(said, call, monkeypatch):
    def compile_nothing(*_, **__):
        raise AssertionError("training began")

    monkeypatch.setattr(Program, "start", compile_nothing)
    with pytest.raises(JaxrlError) as raised:
        call()
    assert said in str(raised.value)


class Own(struct.PyTreeNode):
    """An environment of a user's, with a mistake."""

    mistake: str = struct.field(pytree_node=False)
    name = "own"
    resets = False

    @property
    def observation_space(self):
        return jaxrl.spaces.Box(-1.0, 1.0, (2,))

    @property
    def action_space(self):
        return jaxrl.spaces.Discrete(2)

    def reset(self, key):
        size, kind = (3 if self.mistake == "shape" else 2), jnp.int32 if self.mistake == "dtype" else jnp.float32
        return jnp.int32(0), restart(jnp.zeros((size,), kind))

    def step(self, state, action, key):
        if self.mistake == "branch" and action:
            state = state + 1
        observation = jnp.zeros((2,))
        reward = jnp.ones((2,)) if self.mistake == "rewards" else jnp.float32(1.0)
        return state, transition(observation, reward, terminated=jnp.bool_(False), truncated=jnp.bool_(False))


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("shape", "TimeStep.observation: the space says float32[2], reset gives float32[3]"),
        ("dtype", "TimeStep.observation: the space says float32[2], reset gives int32[2]"),
        ("branch", "step cannot be traced by jit, vmap and scan"),
        ("rewards", "step: reward has shape (2,); one number is required"),
    ],
)
def test_mistakes_of_an_own_environment(mistake, said):
    with pytest.raises(JaxrlError, match="own breaks the contract of environments") as raised:
        train(env=Own(mistake))
    assert said in str(raised.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(JaxrlError) as raised:
        train(PPO(gamma=1.5, epochs=4.5), total_steps=0, seed="0", num_envs=0)
    for said in ("PPO.gamma=1.5", "PPO.epochs=4.5", "total_steps=0", "seed='0'", "num_envs=0"):
        assert said in str(raised.value)
    with pytest.raises(JaxrlError) as raised:
        train(PPO(gamma=1.5), env="gymnax:CartPol-v1", total_steps=0)
    for said in ("did you mean 'CartPole-v1'", "PPO.gamma=1.5", "total_steps=0"):
        assert said in str(raised.value)
