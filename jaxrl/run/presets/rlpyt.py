"""Of rlpyt (Stooke and Abbeel, 2019): its Atari configurations, of the figures of its paper."""

from typing import Any

from jaxrl.algos.a2c import A2C
from jaxrl.algos.dqn import DQN
from jaxrl.algos.optimizers import Adam
from jaxrl.core.schedules import Linear
from jaxrl.core.sources import FrameStack
from jaxrl.networks import LSTM, ActionValues, ActorCritic, CategoricalValues, Core, ImpalaCNN, NatureCNN, QNetwork
from jaxrl.run.presets import plain
from jaxrl.run.presets.description import Preset

_SOURCE = (
    "github.com/astooke/rlpyt at f04f23d, rlpyt/experiments/configs/atari/{file}.py ({name}), of figure {figure} of "
    "arXiv:1909.01500. Its frames are 80 x 104, here 84 x 84, and its episodes end with a life: --env-params "
    "preset=classic{more}. Initialization differs: here it is orthogonal, and convolutions are not padded."
)
_DQN_DIFFERS = (
    " Ramps of epsilon and of the importance exponent begin at the first step, there after 50,000, and greedy "
    "evaluation stands for its epsilon of 0.001."
)
_DUELING_DIFFERS = " A dense layer of 512 comes before both dueling streams, where gradients are not rescaled."
_BATCH = 128


def _dqn(
    name: str,
    head: ActionValues | CategoricalValues,
    *,
    learning_rate: float = 1e-4,
    eps: float = 1e-8,
    **fields: Any,
) -> Preset:
    shared: dict[str, Any] = {
        "gamma": 0.99,
        "epsilon": Linear(1.0, 0.01, 0.02),  # over 1M steps
        "max_grad_norm": 10.0,
        "target_period": 312,  # updates, of 16 environment steps each
        "capacity": 1_000_000,
        "min_size": 50_000,
        "batch_size": _BATCH,
        "rollout_length": 2,
        "replay_ratio": 1 / 16,
        "optimizer": Adam(b1=0.9, b2=0.999, eps=eps),
        "network": QNetwork(torso=NatureCNN(), core=None, head=head),
        "huber": 1.0,
        "frame_stack": FrameStack(4, axis=0, fill="repeat"),
    }
    return Preset(
        name=f"rlpyt-{name}",
        algorithm=DQN(learning_rate=learning_rate, **plain.DQN | shared | fields),
        env="envpool:Pong-v5",
        total_steps=50_000_000,
        topology={"num_envs": 16},
        source=_SOURCE.format(file="dqn/atari_dqn", name=_CONFIGURATIONS[name], figure=6, more="")
        + _DQN_DIFFERS
        + (_DUELING_DIFFERS if head.dueling else ""),
    )


_CONFIGURATIONS = {
    "dqn": "dqn",
    "categorical-dqn": "catdqn",
    "prioritized-dueling-double": "double_pri_duel",
    "rainbow-minus-noisy": "ernbw",
}
# Priorities of new transitions are the largest so far, there always 1.
_PRIORITIZED: dict[str, Any] = {
    "prioritized": True,
    "priority_exponent": 0.6,
    "importance_exponent": Linear(0.4, 1.0),
    "double": True,
}
_ATOMS: dict[str, Any] = {"v_min": -10.0, "v_max": 10.0, "huber": None, "eps": 0.01 / _BATCH}


def _a2c(name: str, core: Core | None, rollout_length: int, config: str) -> Preset:
    recurrent = core is not None
    return Preset(
        name=f"rlpyt-{name}",
        algorithm=A2C(
            learning_rate=3e-4,
            value_learning_rate=None,
            gamma=0.99,
            gae_lambda=1.0,
            value_cost=0.5,
            entropy_cost=0.01,
            max_grad_norm=1.0,
            rollout_length=rollout_length,
            normalize_advantage=False,
            normalize_observation=False,
            normalize_reward=False,
            whole_episodes=0,
            bootstrap_truncated=False,
            optimizer=plain.ADAM,
            network=ActorCritic(
                torso=ImpalaCNN(filters=(16, 32), width=512),
                core=core,
                shared=True,
                previous_action=recurrent,
                previous_reward=recurrent,
            ),
        ),
        env="envpool:Pong-v5",
        total_steps=50_000_000,
        topology={"num_envs": 32},
        source=_SOURCE.format(file=f"pg/{config}", name="0", figure=5, more=" stack_num=1" if recurrent else ""),
    )


PRESETS = (
    _dqn("dqn", ActionValues(dueling=False, widths=(), noisy=False)),
    _dqn(
        "categorical-dqn",
        CategoricalValues(atoms=51, dueling=False, widths=(), noisy=False),
        learning_rate=2.5e-4,
        **_ATOMS,
    ),
    _dqn("prioritized-dueling-double", ActionValues(dueling=True, widths=(512,), noisy=False), **_PRIORITIZED),
    _dqn(
        "rainbow-minus-noisy",
        CategoricalValues(atoms=51, dueling=True, widths=(512,), noisy=False),
        learning_rate=6.25e-5,
        n_step=3,
        **_PRIORITIZED | _ATOMS,
    ),
    _a2c("a2c", None, 5, "atari_ff_a2c"),
    _a2c("a2c-lstm", LSTM(512), 20, "atari_lstm_a2c"),
)
