"""Presets hold the numbers of their sources, written down here once more, from the sources."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_presets

import jaxrl
from jaxrl.core import spaces
from jaxrl.core.config import decode
from jaxrl.core.errors import ConfigError
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import EnvSpec
from jaxrl.run.directory import difference
from jaxrl.run.presets import PRESETS, preset

# github.com/facebookresearch/torchbeast at 3f3029c, torchbeast/polybeast_learner.py: the flags' defaults, and where
# the loss is a sum, `torch.optim.RMSprop` adds epsilon to the root, and `done` includes time limits.
TORCHBEAST = {
    "learning rate": 0.00048,
    "at the end": 0.0,
    "decay": 0.99,
    "epsilon": 0.01,
    "epsilon in the root": False,
    "largest gradient": 40.0,
    "discount": 0.99,
    "value cost": 0.5,
    "entropy cost": 0.0006,
    "rows": 80,
    "rollouts": 8,
    "rewards": "abs_one",
    "reduction": "sum",
    "bootstraps at time limits": False,
    "clips": (1.0, 1.0, 1.0),
    "lambda": 1.0,
}
# Espeholt et al. (2018), arXiv:1802.01561, table G.1; the decay, the sum, TensorFlow's RMSProp with epsilon in the root
# and `done` at time limits are those of github.com/google-deepmind/scalable_agent at 6c0c8a7, experiment.py.
PAPER = TORCHBEAST | {
    "learning rate": 0.0006,
    "epsilon in the root": True,
    "entropy cost": 0.01,
    "rows": 20,
    "rollouts": 32,
}


@pytest.mark.parametrize(
    ("name", "numbers"), [("torchbeast", TORCHBEAST), ("impala-paper", PAPER), ("impala-paper-shallow", PAPER)]
)
def test_impala(name, numbers):
    preset = PRESETS[name]
    algo, last = (resolve_schedules(preset.algorithm, jnp.float32(progress)) for progress in (0.0, 1.0))
    found = {
        "learning rate": float(algo.learning_rate),
        "at the end": float(last.learning_rate),
        "decay": algo.optimizer.decay,
        "epsilon": algo.optimizer.eps,
        "epsilon in the root": algo.optimizer.eps_in_root,
        "largest gradient": algo.max_grad_norm,
        "discount": algo.gamma,
        "value cost": algo.value_cost,
        "entropy cost": algo.entropy_cost,
        "rows": algo.rollout_length,
        "rollouts": preset.topology["num_envs"],
        "rewards": algo.reward_clipping,
        "reduction": algo.reduction,
        "bootstraps at time limits": algo.bootstrap_truncated,
        "clips": (algo.clip_rho, algo.clip_c, algo.clip_pg_rho),
        "lambda": algo.trace_lambda,
    }
    assert found.keys() == numbers.keys()
    for key, value in numbers.items():
        wanted = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        assert found[key] == wanted, key
    assert preset.total_steps * 4 == 200_000_000, "the frames of the paper's Atari runs, and of TorchBeast's paper"
    assert "preset=classic" in preset.source, "lost lives end episodes in both"
    # Nothing of jaxrl's own is added to them.
    assert not (algo.normalize_observation or algo.normalize_reward or algo.whole_episodes)
    assert algo.value_learning_rate is None and algo.network.shared


def conv(inputs, outputs, kernel):
    return inputs * outputs * kernel**2 + outputs


def dense(inputs, outputs):
    return (inputs + 1) * outputs


# Three sections, each a convolution and two blocks of two; 84 x 84 is halved to 11 x 11.
DEEP = sum(conv(i, o, 3) + 4 * conv(o, o, 3) for i, o in ((4, 16), (16, 32), (32, 32))) + dense(11 * 11 * 32, 256)
SHALLOW = conv(4, 16, 8) + conv(16, 32, 4) + dense(9 * 9 * 32, 256)
ACTIONS = 6
LSTM = 4 * dense(256 + ACTIONS + 1 + 256, 256)  # of the features, the previous action and reward, and its own output


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("torchbeast", DEEP + dense(256 + 1, ACTIONS) + dense(256 + 1, 1)),  # the previous reward, no LSTM
        ("impala-paper", DEEP + LSTM + dense(256, ACTIONS) + dense(256, 1)),
        ("impala-paper-shallow", SHALLOW + LSTM + dense(256, ACTIONS) + dense(256, 1)),
    ],
)
def test_networks_of_impala(name, parameters):
    spec = EnvSpec("pong", spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(ACTIONS))
    shapes, _ = jax.eval_shape(lambda key: PRESETS[name].algorithm.network.init(key, spec), jax.random.key(0))
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == parameters


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "factor"), [("batchppo-paper", 0.05), ("batchppo-recurrent", 0.05), ("batchppo-head", 0.1)]
)
def test_output_weights_of_batchppo_have_the_deviation_of_its_initializer(name, factor):
    """variance_scaling(f) over 100 inputs: sqrt(f / 100). Before, f itself was the gain: 0.005 for 0.022."""
    spec = EnvSpec("many", spaces.Box(-1.0, 1.0, (3,)), spaces.Box(-1.0, 1.0, (50,)))
    params, _ = PRESETS[name].algorithm.network.init(jax.random.key(0), spec)
    kernel = params["policy"]["head"]["output"]["kernel"]
    assert kernel.shape == (100, 50)
    assert float(jnp.std(kernel)) == pytest.approx(math.sqrt(factor / 100), rel=0.02)


def test_the_network_of_recurrent_batchppo():
    """Its last layer is a GRU of 100 units, of the policy and of the value; all else is as in batchppo-paper."""
    found, paper = PRESETS["batchppo-recurrent"], PRESETS["batchppo-paper"]
    assert found.algorithm.replace(network=paper.algorithm.network) == paper.algorithm
    assert (found.env, found.total_steps, found.topology) == (paper.env, paper.total_steps, paper.topology)
    network = found.algorithm.network
    spec = EnvSpec("walker", spaces.Box(-1.0, 1.0, (17,)), spaces.Box(-1.0, 1.0, (6,)))
    assert jax.tree.map(jnp.shape, network.initial_carry(spec)) == {"policy": (100,), "value": (100,)}
    shapes, _ = jax.eval_shape(lambda key: network.init(key, spec), jax.random.key(0))
    gru = dense(200, 300) + 100 * 300 + 100  # the recurrent product has a bias in the candidate alone
    for head, outputs in (("policy", dense(100, 6) + 6), ("value", dense(100, 1))):
        assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes[head])) == dense(17, 200) + gru + outputs


@pytest.mark.long
def test_recurrent_batchppo_learns_from_whole_episodes():
    """Shortened to episodes of 16 steps: the penalty of the KL divergence moves, and all are learned from."""
    preset = PRESETS["batchppo-recurrent"]
    result = jaxrl.train(
        preset.algorithm.replace(
            rollout_length=17, whole_episodes=8, max_episode_length=16, epochs=4, learning_rate=1e-3
        ),
        jaxrl.make("gymnax:Pendulum-v1", max_steps_in_episode=16),
        total_steps=8 * 17 * 4,
        num_envs=8,
        evaluation_episodes=2,
        progress=False,
    )
    rows = [row for row in result.metrics if "train/episodes" in row]
    assert [row["train/episodes"] for row in rows] == [8, 8, 8, 8], "an episode of every environment an update"
    assert [row["train/learned_fraction"] for row in rows] == [1.0] * 4
    assert {row["update/penalty"] for row in rows} != {1.0}
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))


# github.com/vwxyzjn/cleanrl at fe8d8a03, the arguments of each file, and what its networks are made with;
# github.com/DLR-RM/rl-baselines3-zoo at 22e3ff2, hyperparams/*.yml; github.com/luchris429/purejaxrl at 31756b1;
# github.com/mttga/purejaxql at 47af6d7; github.com/adityab/CrossQ, train.py;
# github.com/cvoelcker/reppo, config. Periods and starts in environment steps,
# as there.
TUNED = {
    "cleanrl-ppo-continuous": (1_000_000, 1, (3e-4, 0.0), {"steps": 2048, "batches": 32, "epochs": 10, "entropy": 0.0}),
    "cleanrl-ppo-atari": (10_000_000, 8, (2.5e-4, 0.0), {"steps": 128, "batches": 4, "epochs": 4, "clip": (0.1, 0.1)}),
    "cleanrl-pqn": (500_000, 4, (2.5e-4, 0.0), {"steps": 128, "batches": 4, "epochs": 4, "lambda": 0.65}),
    "cleanrl-dqn": (500_000, 1, (2.5e-4, 2.5e-4), {"target": 500, "starts": 10_000, "explores": (0.05, 0.5)}),
    "cleanrl-c51": (500_000, 1, (2.5e-4, 2.5e-4), {"target": 500, "starts": 10_000, "support": (-100.0, 100.0, 101)}),
    "cleanrl-sac": (1_000_000, 1, (1e-3, 1e-3), {"policy": 3e-4, "starts": 5_000, "batch": 256, "widths": (256, 256)}),
    "cleanrl-td3": (1_000_000, 1, (3e-4, 3e-4), {"policy": 3e-4, "starts": 25_000, "batch": 256, "ratio": 1.0}),
    "purejaxrl-brax": (50_000_000, 2048, (3e-4, 3e-4), {"steps": 10, "batches": 32, "epochs": 4, "entropy": 0.0}),
    "purejaxql-minatar": (10_000_000, 128, (5e-4, 0.0), {"steps": 32, "batches": 32, "epochs": 2, "lambda": 0.65}),
    "zoo-ppo-cartpole": (100_000, 8, (1e-3, 0.0), {"steps": 32, "batches": 1, "epochs": 20, "clip": (0.2, 0.0)}),
    "zoo-ppo-pendulum": (100_000, 4, (1e-3, 1e-3), {"steps": 1024, "batches": 64, "epochs": 10, "gamma": 0.9}),
    "zoo-ppo-mountaincar": (1_000_000, 16, (3e-4, 3e-4), {"steps": 16, "batches": 4, "epochs": 4, "entropy": 0.0}),
    "zoo-ppo-acrobot": (1_000_000, 16, (3e-4, 3e-4), {"steps": 256, "batches": 64, "epochs": 4, "entropy": 0.0}),
    "zoo-ppo-lunarlander": (
        1_000_000,
        16,
        (3e-4, 3e-4),
        {"steps": 1024, "batches": 256, "gamma": 0.999, "entropy": 0.01},
    ),
    "zoo-dqn-cartpole": (50_000, 1, (2.3e-3, 2.3e-3), {"ratio": 0.5, "explores": (0.04, 0.16), "capacity": 100_000}),
    "zoo-dqn-mountaincar": (120_000, 1, (4e-3, 4e-3), {"target": 600, "ratio": 0.5, "explores": (0.07, 0.2)}),
    "zoo-dqn-acrobot": (100_000, 1, (6.3e-4, 6.3e-4), {"target": 250, "ratio": 1.0, "explores": (0.1, 0.12)}),
    "zoo-sac-pendulum": (20_000, 1, (1e-3, 1e-3), {"policy": 1e-3, "starts": 100, "batch": 256, "capacity": 1_000_000}),
    "crossq": (1_000_000, 1, (1e-3, 1e-3), {"starts": 5_000, "batch": 256, "ratio": 1.0, "widths": (256, 256)}),
    "reppo": (
        50_000_000,
        1024,
        (3e-4, 3e-4),
        {"steps": 32, "batches": 16, "epochs": 8, "lambda": 0.95, "ends": (0.0, 150.0, 151), "widths": (512, 512)},
    ),
    "rlpyt-dqn": (50_000_000, 16, (1e-4, 1e-4), {"ratio": 1 / 16, "starts": 50_000, "explores": (0.01, 0.02)}),
    "rlpyt-categorical-dqn": (50_000_000, 16, (2.5e-4, 2.5e-4), {"batch": 128, "support": (-10.0, 10.0, 51)}),
    "rlpyt-prioritized-dueling-double": (50_000_000, 16, (1e-4, 1e-4), {"capacity": 1_000_000, "batch": 128}),
    "rlpyt-rainbow-minus-noisy": (50_000_000, 16, (6.25e-5, 6.25e-5), {"support": (-10.0, 10.0, 51), "ratio": 1 / 16}),
    "rlpyt-a2c": (50_000_000, 32, (3e-4, 3e-4), {"steps": 5, "entropy": 0.01}),
    "rlpyt-a2c-lstm": (50_000_000, 32, (3e-4, 3e-4), {"steps": 20, "entropy": 0.01}),
    "zoo-td3-pendulum": (
        20_000,
        1,
        (1e-3, 1e-3),
        {"policy": 1e-3, "starts": 10_000, "gamma": 0.98, "widths": (400, 300)},
    ),
}
READ = {
    "steps": lambda algo: algo.rollout_length,
    "batches": lambda algo: algo.minibatches,
    "epochs": lambda algo: algo.epochs,
    "entropy": lambda algo: algo.entropy_cost,
    "clip": lambda algo: tuple(float(resolve_schedules(algo, jnp.float32(at)).clip) for at in (0, 1)),
    "gamma": lambda algo: algo.gamma,
    "lambda": lambda algo: algo.return_lambda,
    "target": lambda algo: algo.target_period / algo.replay_ratio,
    "starts": lambda algo: algo.min_size,
    "explores": lambda algo: (algo.epsilon.end, algo.epsilon.until),
    "support": lambda algo: (algo.v_min, algo.v_max, algo.network.head.atoms),
    "ends": lambda algo: (algo.v_min, algo.v_max, algo.critic.head.atoms),
    "policy": lambda algo: algo.policy_learning_rate,
    "batch": lambda algo: algo.batch_size,
    "ratio": lambda algo: algo.replay_ratio,
    "capacity": lambda algo: algo.capacity,
    "widths": lambda algo: algo.policy.widths,
}


@pytest.mark.parametrize("name", TUNED)
def test_settings_of_other_libraries(name):
    total_steps, num_envs, rates, others = TUNED[name]
    found = PRESETS[name]
    algo = found.algorithm
    assert (found.total_steps, found.topology["num_envs"]) == (total_steps, num_envs)
    ends = (float(resolve_schedules(algo, jnp.float32(at)).learning_rate) for at in (0, 1))
    assert tuple(ends) == pytest.approx(rates)
    for what, value in others.items():
        assert READ[what](algo) == pytest.approx(value), what


def test_rainbow_explores_by_epsilon_beside_its_noise():
    rainbow = PRESETS["rainbow"]
    assert rainbow.algorithm.network.head.noisy
    steps = rainbow.total_steps
    for step, epsilon in ((0, 1.0), (50_000, 0.525), (100_000, 0.05), (steps, 0.05)):
        found = resolve_schedules(rainbow.algorithm, jnp.float32(step / steps)).epsilon
        assert float(found) == pytest.approx(epsilon, rel=1e-4)


def test_no_default_moves_a_preset():
    """If a default changed, write the field into the preset; if a field is new, run tests/golden/make_presets.py."""
    golden = json.loads(make_presets.FILE.read_text())
    assert set(golden) == set(PRESETS)
    for name, fixed in golden.items():
        now = json.loads(json.dumps(make_presets.encoded(PRESETS[name])))
        assert difference(fixed, now) == [], name
        assert decode(fixed["algorithm"]) == PRESETS[name].algorithm


def test_presets_by_name():
    found = jaxrl.preset("purejaxrl-cartpole")
    assert isinstance(found, jaxrl.Preset) and found.env == "gymnax:CartPole-v1" and found.total_steps == 500_000
    assert jaxrl.Anakin(**found.topology).num_envs == 4 and found.algorithm.gamma == 0.99
    with pytest.raises(ConfigError, match="unknown preset 'rainbo'; did you mean 'rainbow'"):
        preset("rainbo")
