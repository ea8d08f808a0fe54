"""Presets hold the numbers of their sources, and their networks have the sizes that are described there."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.golden import FOLDER
from helpers.refused import raises

import jaxrl
from jaxrl import networks
from jaxrl.algos.on_policy import WholeEpisodes
from jaxrl.core import spaces
from jaxrl.core.config import decode
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import EnvSpec
from jaxrl.run.presets import PRESETS, presets_of


def parameters(name, spec):
    """Return the number of parameters of a preset's network in an environment."""
    shapes, _ = jax.eval_shape(lambda key: PRESETS[name].algorithm.network.init(key, spec), jax.random.key(0))
    return sizes(shapes)


def sizes(shapes):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def conv(inputs, outputs, kernel):
    return inputs * outputs * kernel**2 + outputs


def dense(inputs, outputs):
    return (inputs + 1) * outputs


# Three sections, each a convolution and two blocks of two; 84 x 84 is halved to 11 x 11.
DEEP = sum(conv(i, o, 3) + 4 * conv(o, o, 3) for i, o in ((4, 16), (16, 32), (32, 32))) + dense(11 * 11 * 32, 256)
SHALLOW = conv(4, 16, 8) + conv(16, 32, 4) + dense(9 * 9 * 32, 256)
ACTIONS = 6
PONG = EnvSpec("pong", spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(ACTIONS))
LSTM = 4 * dense(256 + ACTIONS + 1 + 256, 256)  # of the features, the previous action and reward, and its own output


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torchbeast", DEEP + dense(256 + 1, ACTIONS) + dense(256 + 1, 1)),  # the previous reward, no LSTM
        ("impala-paper", DEEP + LSTM + dense(256, ACTIONS) + dense(256, 1)),
        ("impala-paper-shallow", SHALLOW + LSTM + dense(256, ACTIONS) + dense(256, 1)),
    ],
)
def test_networks_of_impala(name, expected):
    assert parameters(name, PONG) == expected


def test_the_network_of_beyond_the_rainbow():
    """Widened twice, pooled to 6 x 6, no dense layer before the quantiles, and noisy streams of 512."""
    torso = sum(conv(i, o, 3) + 4 * conv(o, o, 3) for i, o in ((4, 32), (32, 64), (64, 64)))
    pixels = 6 * 6 * 64
    streams = 2 * sum(dense(pixels, 512) + dense(512, outputs) for outputs in (ACTIONS, 1))  # mean and scale
    assert parameters("btr", PONG) == torso + dense(64, pixels) + streams


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


def gru(inputs, width):
    return dense(inputs, 3 * width) + width * 3 * width + width


def gtrxl(width, mlp):
    """Of a layer: five projections and two biases of the attention; two norms; two gates; the mlp."""
    return 5 * width**2 + 2 * width + 4 * width + 2 * (6 * width**2 + width) + dense(width, mlp) + dense(mlp, width)


def heads(inputs, width):
    return 2 * (dense(inputs, width) + dense(width, width)) + dense(width, 43) + dense(width, 1)


CRAFTAX = {  # parameters for observations of 8268 numbers and 43 actions
    "craftax-ppo-rnn": dense(8268, 512) + gru(512, 512) + heads(512, 512),
    "craftax-pqn-rnn": dense(8268, 512) + 2 * 512 + 4 * dense(512 + 43 + 512, 512) + dense(512, 43),
    "craftax-gtrxl": dense(8268, 256) + 2 * gtrxl(256, 256) + heads(256, 256),
}


@pytest.mark.parametrize("name", CRAFTAX)
def test_networks_on_craftax(name):
    spec = EnvSpec("craftax", spaces.Box(0.0, np.inf, (8268,)), spaces.Discrete(43))
    assert parameters(name, spec) == CRAFTAX[name]


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
        assert sizes(shapes[head]) == dense(17, 200) + gru + outputs


@pytest.mark.long
def test_recurrent_batchppo_learns_from_whole_episodes():
    """Shortened to episodes of 16 steps: the penalty of the KL divergence moves, and all are learned from."""
    preset = PRESETS["batchppo-recurrent"]
    result = jaxrl.train(
        preset.algorithm.replace(
            rollout_length=17, whole_episodes=WholeEpisodes(episodes=8, max_length=16), epochs=4, learning_rate=1e-3
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


# `presets.json`, which never changes, has the numbers of these:
# github.com/facebookresearch/torchbeast at 3f3029c, torchbeast/polybeast_learner.py: the flags' defaults, and where the
# loss is a sum, `torch.optim.RMSprop` adds epsilon to the root, and `done` includes time limits;
# Espeholt et al. (2018), arXiv:1802.01561, table G.1; the decay, the sum, TensorFlow's RMSProp with epsilon in the root
# and `done` at time limits are those of github.com/google-deepmind/scalable_agent at 6c0c8a7, experiment.py;
# github.com/MichaelTMatthews/Craftax_Baselines at 7ce36fa, ppo_rnn.py, the flags' defaults;
# github.com/Reytuag/transformerXL_PPO_JAX at d914d55, train_PPO_trXL_pmap.py, its `config`;
# github.com/vwxyzjn/cleanrl at fe8d8a03, the arguments of each file, and what its networks are made with;
# github.com/DLR-RM/rl-baselines3-zoo at 22e3ff2, hyperparams/*.yml; github.com/luchris429/purejaxrl at 31756b1;
# github.com/mttga/purejaxql at 47af6d7, purejaxql/config/alg; github.com/adityab/CrossQ, train.py;
# github.com/cvoelcker/reppo, config; github.com/Holiday-Robot/FlashSAC at 87edc90, configs/agent;
# github.com/danielpalenicek/xqc, conf/agent; github.com/DAVIAN-Robotics/SimbaV2, configs/agent;
# github.com/SamsungLabs/tqc_pytorch, main.py; github.com/watchernyu/REDQ.
def test_no_default_moves_a_preset():
    """If a default changed, write the field into the preset. A field that is new has its default in all of them."""
    golden = json.loads((FOLDER / "presets.json").read_text())
    assert set(golden) == set(PRESETS)
    for name, fixed in golden.items():
        now = PRESETS[name]
        assert decode(fixed.pop("algorithm")) == now.algorithm, name
        others = {"environment": now.env, "total_steps": now.total_steps, "topology": now.topology}
        assert fixed == json.loads(json.dumps(others)), name


def test_presets_by_name():
    found = jaxrl.preset("purejaxrl-cartpole")
    assert isinstance(found, jaxrl.Preset) and found.env == "gymnax:CartPole-v1" and found.total_steps == 500_000
    assert jaxrl.Anakin(**found.topology).num_envs == 4 and found.algorithm.gamma == 0.99


GOOD = """
[_shared]
topology = {num_envs = 2}
source = "A paper."
[_shared.algorithm]
type = "algorithm:ppo"
clip = 0.1
network = {type = "network:actorcritic", core = {type = "core:gru", width = 4}}
[one]
base = "_shared"
env = "gymnax:CartPole-v1"
total_steps = 10
source = "{base} Differs."
unset = ["max_grad_norm"]
algorithm = {clip = 0.3, network = {core = {type = "core:lru"}}}
[two]
base = ["one"]
unset = ["network.core"]
"""


def test_a_table_extends_others():
    found = presets_of([GOOD])
    assert list(found) == ["one", "two"] and len(found) == 2 and "_shared" not in found
    one, two = found.values()
    assert one.algorithm == jaxrl.PPO(clip=0.3, max_grad_norm=None, network=networks.ActorCritic(core=networks.LRU()))
    assert (one.env, one.total_steps, one.topology) == ("gymnax:CartPole-v1", 10, {"num_envs": 2})
    assert one.source == two.source == "A paper. Differs."
    assert two.algorithm == one.algorithm.replace(network=networks.ActorCritic(core=None))


@pytest.mark.parametrize(
    ("there", "instead", "named"),
    [
        ("clip = 0.3", "clipp = 0.3", "clipp"),
        ("clip = 0.3", "clip = false", "clip"),
        ("clip = 0.3", 'clip = "a"', "clip"),
        ("core = {type", "heart = {type", "heart"),
        ('"core:lru"', '"core:lrv"', "lrv"),
        ("total_steps = 10", "", "total_steps"),
        ("total_steps = 10", "total_step = 10", "total_step"),
        ('base = "_shared"', 'base = "_other"', "_other"),
        ('base = "_shared"', 'base = "two"', "one"),
        ('["max_grad_norm"]', '["max_grad"]', "max_grad"),
    ],
)
def test_a_preset_takes_nothing_that_it_does_not_know(there, instead, named):
    assert there in GOOD
    with pytest.raises(ConfigError, match=named):
        presets_of([GOOD.replace(there, instead)])["one"]


def test_a_name_stands_in_one_file():
    raises(ConfigError, "one", presets_of, [GOOD, "[one]"])
