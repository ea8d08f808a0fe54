"""Of Craftax: the agents with a memory on its board at a billion steps."""

from typing import Any

from jaxrl.algos.ppo import PPO
from jaxrl.algos.pqn import PQN
from jaxrl.core.schedules import Linear
from jaxrl.networks import GRU, LSTM, MLP, ActionValues, ActorCritic, Core, GTrXL, QNetwork, Torso
from jaxrl.run.presets import plain
from jaxrl.run.presets.description import Preset

_ENV, _STEPS, _TOPOLOGY = "craftax:Craftax-Symbolic-v1", 1_000_000_000, {"num_envs": 1024}
_RESETS = (
    " At most a sixteenth of its environments begin a new world at a step, which the others share. It treats time "
    "limits as terminations."
)


def _ppo(torso: Torso, core: Core, head_widths: tuple[int, ...], **fields: Any) -> PPO:
    network = ActorCritic(
        torso=torso,
        core=core,
        shared=True,
        previous_action=False,
        previous_reward=False,
        policy_gain=0.01,
        value_gain=1.0,
        head_widths=head_widths,
    )
    return plain.ppo(
        network, learning_rate=Linear(2e-4, 0.0), gae_lambda=0.8, max_grad_norm=1.0, epochs=4, minibatches=8, **fields
    )


PRESETS = (
    Preset(
        name="craftax-ppo-rnn",
        algorithm=_ppo(
            MLP((512,), activation="relu"), GRU(512), (512, 512), gamma=0.99, entropy_cost=0.01, rollout_length=64
        ),
        env=_ENV,
        total_steps=_STEPS,
        topology=_TOPOLOGY,
        source="github.com/MichaelTMatthews/Craftax_Baselines at 7ce36fa, ppo_rnn.py: 15.3 % of the largest return at "
        "1B steps (Craftax's README). Hidden layers of its heads have a gain of 2, here of sqrt(2)." + _RESETS,
    ),
    Preset(
        name="craftax-pqn-rnn",
        algorithm=PQN(
            learning_rate=Linear(3e-4, 0.0),
            gamma=0.99,
            return_lambda=0.5,
            epsilon=Linear(1.0, 0.005, 0.1),
            ladder=False,
            random_persistence=0.0,
            max_grad_norm=0.5,
            rollout_length=128,
            epochs=4,
            minibatches=4,
            optimizer=plain.RADAM,
            network=QNetwork(
                torso=MLP((512,), activation="relu", normalization="layer"),
                core=LSTM(512),
                head=ActionValues(dueling=False, widths=(), gain=1.0, noisy=False),
                previous_action=True,
                previous_reward=False,
            ),
        ),
        env=_ENV,
        total_steps=_STEPS,
        topology=_TOPOLOGY,
        source="github.com/mttga/purejaxql at 47af6d7, purejaxql/config/alg/pqn_rnn_craftax.yaml: 16.0 % at 1B steps. "
        "It also normalizes observations by batch renormalization, and computes targets of each minibatch anew, of 127 "
        "steps of 128; here once a rollout." + plain.ORTHOGONAL + _RESETS,
    ),
    Preset(
        name="craftax-gtrxl",
        algorithm=_ppo(
            MLP(()),
            GTrXL(width=256, layers=2, heads=8, memory=128, mlp_width=256, gate_bias=2.0),
            (256, 256),
            gamma=0.999,
            entropy_cost=0.002,
            rollout_length=128,
        ),
        env=_ENV,
        total_steps=_STEPS,
        topology=_TOPOLOGY,
        source="github.com/Reytuag/transformerXL_PPO_JAX at d914d55, train_PPO_trXL_pmap.py: 18.3 % at 1B steps. Its "
        "gradients end after 64 steps, here at the rollout's beginning; its attention has biases and its mlp a GELU."
        + _RESETS,
    ),
)
