"""Traces training where JAX computes with 64 bits; run as a program, with the names of cases, in a process of its own.

Nothing is compiled: a state that comes back with another type than it had is found while tracing.
"""

import os
import sys

os.environ["JAX_ENABLE_X64"] = "1"

import jax
from golden.make_programs import of_data

import jaxrl
from jaxrl.algos.acting import Noise
from jaxrl.algos.fields import Memory, PrioritizedReplay, Sampling
from jaxrl.algos.on_policy import WholeEpisodes
from jaxrl.core import sources
from jaxrl.core.types import env_spec
from jaxrl.networks import GRU, MLP, Actor, ActorCritic, CategoricalValues, Critic, QNetwork, QuantileValues
from jaxrl.parallel.experience import learns_from_dataset

DISCRETE, CONTINUOUS = "gymnax:CartPole-v1", "gymnax:Pendulum-v1"
SMALL = {"min_size": 8, "batch_size": 8, "capacity": 64}
SEQUENCES = {
    "min_size": 32,
    "batch_size": 4,
    "capacity": 512,
    "memory": Memory(length=6, burn_in=2),
    "rollout_length": 4,
}
TORSO = MLP((8,))


def _by_default():
    """Every registered algorithm at its defaults but for MuZero's sizes, in each environment that it takes."""
    for name, kind in jaxrl.ALGORITHMS.items():
        algo = kind(**SMALL | {"capacity": 512}) if name == "muzero" else kind()
        for word, env in (("discrete", DISCRETE), ("continuous", CONTINUOUS)):
            if not algo.resolve(spec := env_spec(jaxrl.make(env)), 8).validate(spec, 8, 1):
                yield f"{name} {word}", algo, env


def _kinds_of_replay():
    lifo = {"sampling": Sampling(sampler=sources.Lifo(), max_times_sampled=2)}
    yield "prioritized", jaxrl.DQN(**SMALL, prioritized=PrioritizedReplay()), DISCRETE
    yield "first in first out", jaxrl.DQN(**SMALL, sampling=Sampling(sampler=sources.Fifo())), DISCRETE
    yield "lifo", jaxrl.DQN(**SMALL, **lifo), DISCRETE
    yield "heap", jaxrl.DQN(**SMALL, sampling=Sampling(sampler=sources.MinHeap())), DISCRETE
    yield "flashbax", jaxrl.DQN(**SMALL, storage="flashbax", n_step=1), DISCRETE
    yield "frames", jaxrl.DQN(**SMALL), "gymnax:Breakout-MinAtar"
    yield "sequences", jaxrl.SAC(**SEQUENCES, policy=Actor(core=GRU(8)), critic=Critic(core=GRU(8))), CONTINUOUS
    yield "newest", jaxrl.SAC(**SMALL, view=sources.View(2, sources.Lifo(), max_times_sampled=1)), CONTINUOUS
    yield "priorities of a categorical head", jaxrl.D4PG(**SMALL), CONTINUOUS


def _other_state():
    noisy = QNetwork(torso=TORSO, head=CategoricalValues(noisy=True))
    yield "noise", jaxrl.SAC(**SMALL, normalize_observation=True, noise=Noise(correlation=0.5)), CONTINUOUS
    yield "noisy layers", jaxrl.DQN(**SMALL, network=noisy), DISCRETE
    yield "quantiles", jaxrl.DQN(**SMALL, network=QNetwork(torso=TORSO, head=QuantileValues())), DISCRETE
    yield "random actions that go on", jaxrl.DQN(**SMALL, random_persistence=0.5), DISCRETE
    yield "batch normalization", jaxrl.SAC(**SMALL, critic=Critic(normalization="batch")), CONTINUOUS
    yield "statistics", jaxrl.PPO(normalize_observation=True, normalize_reward=True), CONTINUOUS
    yield "whole episodes", jaxrl.PPO(whole_episodes=WholeEpisodes(episodes=8, max_length=100)), DISCRETE
    yield "a recurrent policy", jaxrl.PPO(network=ActorCritic(torso=TORSO, core=GRU(8))), DISCRETE
    yield "brax", jaxrl.SAC(**SMALL), "brax:fast"


def trace(algo, env):
    """Trace a training; of an algorithm that only learns from datasets its updates.

    Raises:
      TypeError: a state comes back with another type than it had.
    """
    if not learns_from_dataset(algo):
        return jax.eval_shape(jaxrl.make_train(algo, env, total_steps=64), jax.random.key(0))
    env = jaxrl.make(env)
    return of_data(algo.resolve(env_spec(env), 1), env)


if __name__ == "__main__":
    for group in (_by_default, _kinds_of_replay, _other_state):
        for case, algo, env in group():
            if len(sys.argv) == 1 or case in sys.argv[1:]:
                trace(algo, env)
                print(case, flush=True)
