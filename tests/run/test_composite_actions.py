"""Actions that are dictionaries and tuples, from the environment to the files: who takes them, and that runs agree."""

import gymnasium
import jax
import numpy as np
import pytest
from algorithms import ENVIRONMENTS
from helpers.programs import ROWS
from helpers.refused import raises
from helpers.registered import OWN_ALGORITHMS

import jaxrl
from jaxrl.buffers import fixed
from jaxrl.cli import main
from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.sources import Replay
from jaxrl.core.types import env_spec
from jaxrl.data import rings

ENV, HOST = ENVIRONMENTS["composite"], "gymnasium:host_probes:Parts-v0"
ON_POLICY = ("a2c", "impala", "ppo", "vmpo")
TAKE_THEM = (*ON_POLICY, "dreamer")


@pytest.mark.parametrize("name", OWN_ALGORITHMS)
def test_who_takes_them(name):
    """The others say so before anything is compiled, and what they take instead."""
    algo, topology = OWN_ALGORITHMS[name](), jaxrl.Anakin(num_envs=8)
    if name in TAKE_THEM:
        topology.bind(algo, ENV)
        return
    problems = algo.resolve(env_spec(ENV), 8).validate(env_spec(ENV), 8, 8)
    assert any("probe:Composite has Dict(" in problem and "MultiDiscrete" in problem for problem in problems), problems
    if "replay" in algo.experience and name not in ("bc", "cql", "crr", "iql", "td3bc"):
        raises(ConfigError, "probe:Composite has Dict", topology.bind, algo, ENV)


@pytest.mark.parametrize("name", ON_POLICY)
def test_a_box_among_the_parts_makes_actions_continuous(name):
    algo = OWN_ALGORITHMS[name]().resolve(env_spec(ENV), 8)
    assert algo.normalize_observation is True
    assert algo.entropy_cost == 0.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the command line trained in Gymnasium, and recorded; the run and the recording."""
    folder = tmp_path_factory.mktemp("composite")
    line = f"train ppo --env {HOST} --num-envs 8 --total-steps {2 * ROWS} --rollout-length 8 --epochs 1"
    line += " --minibatches 2 --network.torso mlp:8 --evaluation-episodes 2 --no-progress"
    line += f" --run-dir {folder / 'run'} --record {folder / 'lived'}"
    assert main.main(line.split()) == 0
    return folder / "run", folder / "lived"


@pytest.mark.long
def test_a_policy_gives_what_the_environment_takes(trained):
    policy = jaxrl.load(trained[0], env=HOST)
    env = gymnasium.make("host_probes:Parts-v0").unwrapped
    observation, _ = env.reset(seed=0)
    carry = None
    action, carry = policy(observation, carry)
    assert type(action["gear"]) is int and type(action["lights"]) is tuple and type(action["lights"][1]) is int
    assert action["speed"].dtype == np.float32 and action["lights"][0].shape == (2,)
    assert env.action_space.contains(action), "in its own dtypes and from its own first numbers"
    env.step(action)
    batch, _ = policy(np.stack([observation] * 3), key=jax.random.key(0))
    assert jax.tree.map(np.shape, batch) == {"gear": (3,), "lights": ((3, 2), (3,)), "speed": (3, 2)}


@pytest.mark.long
def test_recordings_name_the_parts_of_tuples_by_their_positions(trained, tmp_path):
    pytest.importorskip("tensorflow_datasets")
    [*lived] = jaxrl.load_dataset(f"rlds:{trained[1]}")
    assert len(lived) > 2
    policy, env = jaxrl.load(trained[0], env=HOST), jaxrl.make(HOST)
    jaxrl.export_minari(policy, env, "parts-v0", data_dir=tmp_path, episodes=2, env_spec=None, progress=False)
    dataset = jaxrl.load_dataset(f"minari:{tmp_path / 'parts-v0'}")
    exported = list(dataset)
    assert len(exported) == 2
    rows = rings.rings(dataset, {"replay": fixed.source_of(Replay(100, 4, 1))}, env_spec(env), columns=1)[0]
    action, zeros = rows["replay"].rows.action, spaces.zeros(env.action_space)
    assert jax.tree.structure(action) == jax.tree.structure(zeros), "tuples again, as the environment has them"
    jax.tree.map(
        lambda x, like: np.testing.assert_equal((x.dtype, x.shape[2:]), (like.dtype, like.shape)), action, zeros
    )
    for episode in [*lived, *exported]:
        assert sorted(episode.action) == ["gear", "lights", "speed"] and sorted(episode.action["lights"]) == ["0", "1"]
        for step in range(episode.length):  # it shows what it took
            taken = [*episode.action["speed"][step], episode.action["gear"][step], *episode.action["lights"]["0"][step]]
            taken.append(episode.action["lights"]["1"][step] + 1)
            np.testing.assert_allclose(episode.observation[step + 1], taken)
