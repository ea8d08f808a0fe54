"""Of IMPALA: the paper and TorchBeast."""

from jaxrl.algos.impala import IMPALA
from jaxrl.algos.optimizers import RMSProp
from jaxrl.core.schedules import Linear
from jaxrl.networks import LSTM, ActorCritic, Core, ImpalaCNN, ImpalaResNet, Torso
from jaxrl.run.presets.description import Preset


def _impala(
    learning_rate: float, entropy_cost: float, rollout_length: int, optimizer: RMSProp, torso: Torso, core: Core | None
) -> IMPALA:
    return IMPALA(
        learning_rate=Linear(learning_rate, 0.0),
        value_learning_rate=None,
        gamma=0.99,
        trace_lambda=1.0,
        clip_rho=1.0,
        clip_c=1.0,
        clip_pg_rho=1.0,
        value_cost=0.5,
        entropy_cost=entropy_cost,
        max_grad_norm=40.0,
        rollout_length=rollout_length,
        reduction="sum",
        reward_clipping="abs_one",
        normalize_observation=False,
        normalize_reward=False,
        whole_episodes=0,
        bootstrap_truncated=False,
        optimizer=optimizer,
        network=ActorCritic(
            torso=torso, core=core, shared=True, previous_action=core is not None, previous_reward=True
        ),
    )


def _impala_paper(torso: Torso) -> IMPALA:
    optimizer = RMSProp(decay=0.99, eps=0.01, eps_in_root=True)
    return _impala(6e-4, 0.01, 20, optimizer, torso, LSTM(256))


_IMPALA_PAPER = (
    "Espeholt et al. (2018), arXiv:1802.01561: figure 3 {side} and the settings of its appendix on Atari, in batches "
    "of 32 rollouts; what they are silent on from its code, github.com/google-deepmind/scalable_agent. Its episodes "
    "end with a life: --env-params preset=classic. --network.core none leaves out the LSTM."
)


PRESETS = (
    Preset(
        name="torchbeast",
        algorithm=_impala(
            learning_rate=4.8e-4,
            entropy_cost=6e-4,
            rollout_length=80,
            optimizer=RMSProp(decay=0.99, eps=0.01, eps_in_root=False),
            torso=ImpalaResNet(),
            core=None,
        ),
        env="envpool:Pong-v5",
        total_steps=50_000_000,
        topology={"num_envs": 8},
        source="github.com/facebookresearch/torchbeast at 3f3029c, the defaults of polybeast_learner.py (monobeast "
        "has the same ones, with another network), in batches of 8 rollouts; the length is its paper's, "
        "arXiv:1910.03552, whose 48 environments fill such batches with --num-envs 48 --actors 12 --learner-batch 8. "
        "Its episodes end with a life: --env-params preset=classic. --network.core lstm:256 is its --use_lstm.",
    ),
    Preset(
        name="impala-paper",
        algorithm=_impala_paper(ImpalaResNet()),
        env="envpool:Pong-v5",
        total_steps=50_000_000,
        topology={"num_envs": 32},
        source=_IMPALA_PAPER.format(side="right (deep)"),
    ),
    Preset(
        name="impala-paper-shallow",
        algorithm=_impala_paper(ImpalaCNN()),
        env="envpool:Pong-v5",
        total_steps=50_000_000,
        topology={"num_envs": 32},
        source=_IMPALA_PAPER.format(side="left (shallow)"),
    ),
)
