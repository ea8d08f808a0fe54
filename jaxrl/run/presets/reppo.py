"""REPPO with its authors' settings for DeepMind Control."""

from jaxrl.algos.reppo import REPPO
from jaxrl.networks import MLP, Actor, Critic, SelfPredictiveValues
from jaxrl.run.presets import plain
from jaxrl.run.presets.description import Preset

PRESETS = (
    Preset(
        name="reppo",
        algorithm=REPPO(
            learning_rate=3e-4,
            policy_learning_rate=None,
            temperature_learning_rate=None,
            gamma=0.99,
            max_grad_norm=0.5,
            rollout_length=32,
            epochs=8,
            minibatches=16,
            normalize_observation=True,
            observation_clip=10.0,
            normalize_reward=False,
            whole_episodes=0,
            bootstrap_truncated=True,
            temperature=0.01,
            learn_temperature=True,
            target_entropy=-0.5,
            return_lambda=0.95,
            kl_limit=0.1,
            initial_penalty=0.01,
            prediction_cost=1.0,
            v_min=0.0,
            v_max=150.0,
            optimizer=plain.ADAM,
            policy=Actor(
                torso=MLP(()),
                widths=(512, 512),
                activation="silu",
                normalization="layer",
                gain=0.01,
                initial_log_std=0.0,
            ),
            critic=Critic(
                torso=MLP(()),
                widths=(512, 512),
                activation="silu",
                normalization="layer",
                ensemble=1,
                head=SelfPredictiveValues(
                    atoms=151, widths=(512,), activation="silu", normalization="layer", gain=0.01, smoothing=0.75
                ),
            ),
        ),
        env="brax:inverted_pendulum",
        total_steps=50_000_000,
        topology={"num_envs": 1024},
        source="github.com/cvoelcker/reppo, config/reppo.yaml with experiment_overrides/mjx_dmc_small_data.yaml, for "
        "environments whose rewards lie between 0 and 1. Layer normalization takes the place of root-mean-square "
        "normalization." + plain.ORTHOGONAL,
    ),
)
