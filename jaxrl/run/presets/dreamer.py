"""DreamerV3 in its authors' sizes, and in one that two cores carry."""

from typing import Any

from jaxrl.algos.dreamer import Dreamer
from jaxrl.algos.optimizers import LaProp
from jaxrl.networks import WorldModel
from jaxrl.run.presets.description import Preset

_SOURCE = (
    "github.com/danijar/dreamerv3 at e3f0224, dreamerv3/configs.yaml{0}. Computed in float32; sequences begin at "
    "stored states that are as old as their rows; convolutions begin orthogonal."
)


def _algorithm(network: WorldModel, **others: Any) -> Dreamer:
    """Return the settings that all sizes share, with every field written."""
    fields: dict[str, Any] = {
        "learning_rate": 4e-5,
        "optimizer": LaProp(b1=0.9, b2=0.999, eps=1e-20, clip=0.3, warm_up=1_000.0),
        "gamma": 1.0 - 1.0 / 333.0,
        "return_lambda": 0.95,
        "entropy_cost": 3e-4,
        "free_nats": 1.0,
        "observation_scale": 1.0,
        "dynamics_scale": 1.0,
        "representation_scale": 0.1,
        "replay_value_scale": 0.3,
        "return_decay": 0.99,
        "tau": 0.02,
        "imagination_length": 15,
        "sequence_length": 64,
        "burn_in": 0,
        "batch_size": 16,
        "min_size": 1_024,
        "capacity": 1_000_000,
        "rollout_length": 16,
        "replay_ratio": 0.03125,
        "storage": "ring",
        "sampler": None,
        "max_times_sampled": 0,
        "network": network,
    }
    return Dreamer(**(fields | others))


def _network(deter: int, units: int, classes: int, depth: int, **others: Any) -> WorldModel:
    fields: dict[str, Any] = {
        "deter": deter,
        "stoch": 32,
        "classes": classes,
        "hidden": units,
        "units": units,
        "depth": depth,
        "blocks": 8,
        "layers": 3,
        "multipliers": (2, 3, 4, 4),
        "kernel": 5,
        "uniform": 0.01,
        "min_std": 0.1,
        "max_std": 1.0,
    }
    return WorldModel(**(fields | others))


_SIZES = {  # of the recurrent state, of layers, classes of a latent, of images
    "12m": (2048, 256, 16, 16),
    "25m": (3072, 384, 24, 24),
    "50m": (4096, 512, 32, 32),
    "100m": (6144, 768, 48, 48),
    "200m": (8192, 1024, 64, 64),
}

PRESETS = (
    *(
        Preset(
            name=f"dreamer-{size}",
            algorithm=_algorithm(_network(*numbers)),
            env="gymnax:Breakout-MinAtar",
            total_steps=10_000_000,
            topology={"num_envs": 16},
            source=_SOURCE.format(f", size{size}, with the replay ratio of Atari; here on MinAtar"),
        )
        for size, numbers in _SIZES.items()
    ),
    Preset(
        name="dreamer-1m",
        algorithm=_algorithm(_network(512, 64, 4, 4), replay_ratio=1.0),
        env="dm_control:walker-walk",
        total_steps=1_100_000,
        topology={"num_envs": 16},
        source=_SOURCE.format(", dmc_proprio, with a replay of 1M rows in place of 5M"),
    ),
    Preset(
        name="dreamer-tiny",
        algorithm=_algorithm(
            _network(128, 64, 8, 4, stoch=16, layers=2),
            learning_rate=3e-3,
            entropy_cost=0.01,
            observation_scale=30.0,  # two of 50 numbers are not 0: their errors are small beside latents' divergence
            optimizer=LaProp(b1=0.9, b2=0.999, eps=1e-20, clip=0.3, warm_up=100.0),
            capacity=100_000,
            imagination_length=9,
            sequence_length=32,
            rollout_length=8,
            replay_ratio=0.125,
        ),
        env="gymnax:Catch-bsuite",
        total_steps=20_000,
        topology={"num_envs": 8},
        source="jaxrl's own, for two CPU cores: a smaller model at a larger learning rate, for small observations.",
    ),
)
