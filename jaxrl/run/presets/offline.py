"""Of data alone: for data most of which is poor, where the authors' defaults clone it."""

from jaxrl.algos.cql import CQL
from jaxrl.algos.td3_bc import TD3BC
from jaxrl.networks import MLP, Actor, Critic
from jaxrl.run.presets.description import Preset

_SOURCE = "jaxrl's own, chosen with single runs on the data of tests/learning/test_offline.py. {why}"
_WIDTHS = (64, 64)


def _actor(stochastic: bool) -> Actor:
    return Actor(torso=MLP(()), widths=_WIDTHS, stochastic=stochastic)


PRESETS = (
    Preset(
        name="mixed-td3bc",
        algorithm=TD3BC(
            learning_rate=1e-3,
            policy_learning_rate=1e-3,
            gamma=0.99,
            tau=0.005,
            alpha=100.0,
            target_noise=0.2,
            target_noise_clip=0.5,
            policy_delay=2,
            normalize_observation=True,
            n_step=1,
            batch_size=128,
            policy=_actor(stochastic=False),
            critic=Critic(torso=MLP(()), widths=_WIDTHS),
        ),
        env="gymnax:Pendulum-v1",
        total_steps=20_000,
        topology={},
        source=_SOURCE.format(
            why="The cloning term stands against values divided by their mean size; where the values of actions differ "
            "by little of it, the paper's 2.5 clones."
        ),
    ),
    Preset(
        name="mixed-cql",
        algorithm=CQL(
            learning_rate=1e-3,
            policy_learning_rate=1e-3,
            gamma=0.99,
            tau=0.005,
            temperature=1.0,
            learn_temperature=True,
            target_entropy=-1.0,
            coefficient=1.0,
            lagrange_threshold=None,
            cloning_updates=0.0,
            samples=4,
            entropy_in_target=False,
            normalize_observation=False,
            n_step=1,
            batch_size=128,
            policy=_actor(stochastic=True),
            critic=Critic(torso=MLP(()), widths=_WIDTHS),
        ),
        env="gymnax:Pendulum-v1",
        total_steps=6_000,
        topology={},
        source=_SOURCE.format(why="The authors' 5 keeps the policy at the data, most of which is random."),
    ),
)
