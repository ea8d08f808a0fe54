"""Off-policy learning from thousands of environments: large batches, fast targets, distributions of returns."""

from typing import Any

from jaxrl.algos.ddpg import TD3
from jaxrl.algos.optimizers import AdamW
from jaxrl.algos.sac import SAC
from jaxrl.networks import MLP, Actor, CategoricalValues, Critic
from jaxrl.run.presets import plain
from jaxrl.run.presets.description import Preset

_ENVS = 1_024
_MANY: dict[str, Any] = plain.OFF_POLICY | {
    "learning_rate": 3e-4,
    "min_size": 10 * _ENVS,
    "normalize_observation": True,
    "observation_clip": None,
}


def _many[Kind: (SAC, TD3)](kind: type[Kind], **fields: Any) -> Kind:
    return kind(**_MANY | fields)


def _critic(widths: tuple[int, ...], activation: str, normalization: str | None) -> Critic:
    head = CategoricalValues(101, dueling=False, widths=(), noisy=False, smoothing=0.0)
    return Critic(
        torso=MLP(()), widths=widths, activation=activation, normalization=normalization, ensemble=2, head=head
    )


PRESETS = (
    Preset(
        name="fasttd3",
        algorithm=_many(
            TD3,
            gamma=0.97,
            n_step=3,
            tau=0.1,
            capacity=10 * 1024 * _ENVS,
            batch_size=32_768,
            replay_ratio=2 / _ENVS,
            policy_delay=2,
            exploration_noise=0.4,
            least_noise=0.1,
            target_noise=0.1,
            target_noise_clip=0.5,
            v_min=-500.0,
            v_max=500.0,
            optimizer=AdamW(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1),
            policy=Actor(
                torso=MLP(()),
                widths=(512, 256, 128),
                activation="relu",
                normalization=None,
                stochastic=False,
                gain=0.01,
            ),
            critic=_critic((1024, 512, 256), "relu", None),
        ),
        env="playground:CheetahRun",
        total_steps=150_000 * _ENVS,
        topology={"num_envs": _ENVS},
        source="Seo et al. (2025), arXiv:2505.22642, and github.com/younggyoseo/FastTD3 at 229ed59, CheetahRunArgs of "
        "hyperparams.py. Targets move when the policy does, there at every update; the policy ascends the first "
        "critic, there the smaller of both; the first 10 steps are random, there the policy's, whose noise "
        "may leave the box; it computes in float32, there in bfloat16." + plain.ORTHOGONAL,
    ),
    Preset(
        name="fastsac",
        algorithm=_many(
            SAC,
            gamma=0.97,
            tau=0.125,
            capacity=1024 * _ENVS,
            batch_size=8_192,
            replay_ratio=8 / _ENVS,
            policy_delay=4,
            temperature=0.001,
            learn_temperature=True,
            temperature_learning_rate=None,
            target_entropy=0.0,
            target_value="mean",
            policy_value="mean",
            joint_batch=False,
            joint_policy=False,
            target_critics=None,
            normalize_reward=False,
            v_min=-40.0,
            v_max=40.0,
            optimizer=AdamW(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.001),
            policy=Actor(
                torso=MLP(()),
                widths=(512, 256, 128),
                activation="silu",
                normalization="layer",
                gain=0.01,
                initial_log_std=0.0,
                log_std_range=(-5.0, 0.0),
            ),
            critic=_critic((768, 384, 192), "silu", "layer"),
        ),
        env="playground:CheetahRun",
        total_steps=25_000 * _ENVS,
        topology={"num_envs": _ENVS},
        source="github.com/amazon-far/holosoma at fc600e7, FastSACConfig of config_types/algo.py, for humanoids of "
        "Isaac Gym, 4,096 at once, with a support of -20 to 20: CheetahRun's discounted returns reach 33. Each critic "
        "learns there from its own target, here from the mean of both distributions; it computes in float32."
        + plain.ORTHOGONAL,
    ),
)
