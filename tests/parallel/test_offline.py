"""Learning from a dataset, alone or beside one's own experience: on any number of devices, and in a whole run."""

import functools
import tempfile

import dm_env
import gymnasium
import numpy as np
import pytest
from algorithms import ALGORITHMS as TINY
from helpers.made import dataset_of
from helpers.programs import DQN, ENV, NUM_ENVS, anakin, assert_equal, plain
from helpers.refused import refused
from helpers.served import ServedFromHost
from helpers.strict_json import read_json
from helpers.tiers import one_quick

import jaxrl
from jaxrl.algos.base import algorithm
from jaxrl.algos.fields import Sampling
from jaxrl.algos.reward_scale import RewardScale
from jaxrl.buffers import fixed
from jaxrl.core.errors import ConfigError
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.sources import Dataset, Fifo, Lifo, MaxHeap, MinHeap, Replay, Uniform
from jaxrl.data import RldsWriter
from jaxrl.data import rings as data_rings
from jaxrl.data.rows import EpisodeCutter
from jaxrl.envs.configs import full_name
from jaxrl.parallel import memory, offline
from jaxrl.parallel import mesh as meshes
from jaxrl.parallel.experience import of_dataset
from jaxrl.run.recording import policy_rows

SHARDS = 4
IMITATING = {"sqil": TINY["sac_discrete"].replace(imitate=True), "gail": TINY["gail"]}


@functools.cache
def episodes():
    algo = resolve_schedules(DQN, np.float32(0.0))
    program = anakin().bind(algo, ENV)
    state = program.start(algo, ENV, 0)
    policy = jaxrl.Policy(algo, algo.actor(state.learner), program.layout.spec)
    cutter = EpisodeCutter(NUM_ENVS)
    which = {"env_index": np.arange(NUM_ENVS), "all_envs": NUM_ENVS}
    stream = policy_rows.play(policy, ENV, **which, seed=1, explore=True)
    found = [episode for _, episode in cutter.add(next(stream))][:40]
    stream.close()
    return dataset_of(*found)


def rings(program, algo):
    sources = program.layout.experience(algo).dataset_sources
    made = data_rings.rings(episodes(), sources, program.layout.spec, columns=program.layout.shards)[0]
    made = {of_dataset(name): ring for name, ring in made.items()}
    return meshes.sharded(made, program.layout.mesh, fixed.partition(made, "data"))


def run(topology, env=ENV, fraction=1.0, chunks=(12,), algo=DQN):
    program = topology.bind(algo, env, fraction)
    dataset = rings(program, algo)
    state = program.start(algo, env, 3, dataset=dataset)
    try:
        for length in chunks:
            state, report = program.chunk(algo, env, state, length, 100, dataset)
        return plain((state, report))
    finally:
        program.close()


@pytest.mark.long
def test_offline_two_devices_are_one_and_chunks_do_not_matter():
    one, report = run(jaxrl.Offline(shards=SHARDS))
    assert one.steps_per_env.low == 12 and report.iterations == 12 and report.failed_at == -1
    in_two, _ = run(jaxrl.Offline(shards=SHARDS), chunks=(5, 7))
    assert_equal(one, in_two)
    two, two_report = run(jaxrl.Offline(devices=2, shards=SHARDS))
    assert_equal(one, two, 1e-5)
    assert_equal(report, two_report, 1e-5)


@pytest.mark.long
def test_beside_an_environment_a_part_of_every_batch_is_the_datasets():
    one, report = run(anakin(), fraction=0.25)
    assert report.iterations > 5 and report.failed_at == -1
    metrics = report.metrics()
    assert metrics["update/replay_dataset_sampled"] == pytest.approx(metrics["update/replay_sampled"] / 3)
    assert one.buffers["replay_dataset"].ring is None, "the dataset is not part of what is saved"


def test_beside_an_environment_two_devices_are_one_and_the_host_is_no_other():
    one, _ = run(anakin(), fraction=0.125)  # 4 of 32, over 4 shards
    two, _ = run(anakin(devices=2), fraction=0.125)
    assert_equal(one, two, 1e-5)
    lockstep = jaxrl.Sebulba(num_envs=NUM_ENVS, shards=SHARDS, lockstep=True)
    on_host, _ = run(lockstep, env=ServedFromHost(ENV), fraction=0.125)
    assert_equal(one.replace(env_state=()), on_host, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", IMITATING)
def test_imitating_two_devices_are_one_and_the_host_is_no_other(name):
    algo = IMITATING[name]
    one, report = run(anakin(), fraction=0.0, algo=algo)
    metrics = report.metrics()
    assert report.failed_at == -1 and metrics["update/demonstrations_dataset_sampled"] > 0
    assert metrics["update/demonstrations_dataset_sampled"] == metrics["update/replay_sampled"]
    two, _ = run(anakin(devices=2), fraction=0.0, algo=algo)
    assert_equal(one, two, 1e-5)
    lockstep = jaxrl.Sebulba(num_envs=NUM_ENVS, shards=SHARDS, lockstep=True)
    on_host, _ = run(lockstep, env=ServedFromHost(ENV), fraction=0.0, algo=algo)
    assert_equal(one.replace(env_state=()), on_host, 1e-5)


def trained_twice(algo, env, folder, **settings):
    """A run in one call, and the first part of the same in two calls, which leave the same state."""
    settings |= {"evaluation_episodes": 4, "seed": 2, "progress": False}
    whole = jaxrl.train(algo, env, run_dir=folder / "whole", **settings)
    first = jaxrl.train(algo, env, run_dir=folder / "halves", target_return=-1e9, **settings)
    assert first.stopped == "target_return" and first.total_steps < whole.total_steps
    second = jaxrl.train(algo, env, run_dir=folder / "halves", **settings)
    assert_equal(whole.state, second.state)
    return whole, first


@pytest.mark.long
@pytest.mark.parametrize("name", IMITATING)
def test_imitating_goes_on_bit_for_bit_and_needs_an_environment(name, tmp_path):
    """Whatever the fraction: the replay is the run's own, and so it is what the demonstrations are beside."""
    arguments = {"dataset": written(tmp_path / "data"), "topology": anakin(), "checkpoint_every": 256}
    arguments |= {"evaluate_every": 256, "total_steps": 512}
    algo = IMITATING[name]
    whole, _ = trained_twice(algo, ENV, tmp_path, **arguments)
    assert int(whole.state.learner.updates) > 4
    config = read_json(tmp_path / "whole" / "config.json")
    assert config["dataset"]["dataset_fraction"] == 0.0
    for missing, said in (({"dataset": None}, "learns from a dataset"), ({"env": None, "eval_env": ENV}, "pass env=")):
        refused(lambda: jaxrl.train(algo, **({"env": ENV} | arguments | missing | {"topology": None})), said)  # noqa: B023


@pytest.mark.long
def test_a_run_goes_on_bit_for_bit(tmp_path):
    """The second half in another call; the dataset is read again, and must be the same."""
    arguments = {"dataset": written(tmp_path / "data"), "eval_env": ENV, "total_steps": 40}
    arguments |= {"topology": jaxrl.Offline(shards=SHARDS), "checkpoint_every": 10}
    whole, _ = trained_twice(DQN, None, tmp_path, **arguments)
    assert whole.stopped == "finished" and whole.total_steps == 40 and whole.evaluation.episodes == 4
    assert whole.metrics[-1]["evaluation/episodes"] == 4
    config = read_json(tmp_path / "whole" / "config.json")
    assert config["dataset"]["dataset_fraction"] == 1.0 and full_name(config["environment"]) == ENV.name
    policy = jaxrl.load(tmp_path / "whole")
    assert policy.spec.name == ENV.name
    other = written(tmp_path / "other", episodes()[1:])
    with pytest.raises(jaxrl.JaxrlError, match="dataset"):
        trained_twice(DQN, None, tmp_path, **arguments | {"dataset": other})


@pytest.mark.long
def test_a_stream_is_the_same_on_two_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(offline, "_MOST", 8)
    algo = FromData(network=DQN.network, learning_rate=1e-2, target_period=3)
    arguments = {"dataset": written(tmp_path / "data"), "eval_env": ENV, "evaluation_episodes": 4, "progress": False}
    one, two = (
        jaxrl.train(algo, total_steps=16, topology=jaxrl.Offline(devices, SHARDS, True), **arguments)
        for devices in (1, 2)
    )
    assert_equal(one.state, two.state, 1e-5)


@pytest.mark.long
def test_a_stream_goes_on_bit_for_bit(tmp_path, monkeypatch):
    """In blocks, so that the end may lie a little further; and without being told where rows do not fit."""
    monkeypatch.setattr(offline, "_MOST", 8)
    algo = FromData(network=DQN.network, learning_rate=1e-2, target_period=3)
    arguments = {"dataset": written(tmp_path / "data"), "eval_env": ENV, "total_steps": 30}
    arguments |= {"checkpoint_every": 8, "evaluate_every": 8}
    topology = jaxrl.Offline(shards=SHARDS, stream=True)
    whole, first = trained_twice(algo, None, tmp_path, topology=topology, **arguments)
    assert whole.total_steps == 32 and whole.state.learner.updates == 32 and first.total_steps == 8
    monkeypatch.setattr(memory, "free_on_host", lambda: 1_000)
    unasked = jaxrl.train(
        algo, topology=jaxrl.Offline(shards=SHARDS), evaluation_episodes=4, seed=2, progress=False, **arguments
    )
    assert_equal(whole.state, unasked.state)
    refused(lambda: jaxrl.train(DQN, topology=topology, **arguments), "a stream samples uniformly")


class Pole(dm_env.Environment):
    """Of dm_env, with CartPole's spaces; episodes end at once."""

    observation_spec = staticmethod(lambda: dm_env.specs.Array((4,), np.float32))
    action_spec = staticmethod(lambda: dm_env.specs.DiscreteArray(2))
    reset = staticmethod(lambda: dm_env.restart(np.zeros(4, np.float32)))
    step = staticmethod(lambda _: dm_env.termination(1.0, np.zeros(4, np.float32)))


HOST = "gymnasium:CartPole-v1", jaxrl.Sebulba(num_envs=NUM_ENVS)
TOPOLOGIES = {
    "anakin": (ENV, anakin(), None),
    "anakin and a dataset": (ENV, anakin(), episodes),
    "sebulba": (*HOST, None),
    "sebulba and a dataset": (*HOST, episodes),
    "offline": (None, jaxrl.Offline(shards=1), episodes),
    "stream": (None, jaxrl.Offline(shards=1, stream=True), lambda: written(tempfile.mkdtemp())),
}
EVALUATED_IN = {
    "none": lambda: None,
    "gymnax": lambda: "gymnax:CartPole-v1",
    "gymnasium": lambda: "gymnasium:CartPole-v1",
    "envpool": lambda: "envpool:CartPole-v1",
    "function": lambda: lambda: gymnasium.make("CartPole-v1"),
    "dm_env": lambda: jaxrl.from_dm_env(lambda seed: Pole()),
}
EVERY = [(topology, kind) for topology in TOPOLOGIES for kind in EVALUATED_IN]


@pytest.mark.parametrize(("topology", "kind"), one_quick(EVERY, ("offline", "function")))
def test_every_topology_evaluates_in_every_kind_of_environment(topology, kind, tmp_path):
    """Also where the run is resumed."""
    (env, where, dataset), eval_env, steps = TOPOLOGIES[topology], EVALUATED_IN[kind](), 64
    algo = jaxrl.DQN(min_size=NUM_ENVS, batch_size=8, capacity=256, rollout_length=2, network=DQN.network)
    arguments = {"dataset": dataset and dataset(), "eval_env": eval_env, "topology": where, "progress": False}
    arguments |= {"run_dir": tmp_path, "evaluation_episodes": 1, "evaluate_every": steps}
    if env is None and eval_env is None:
        with pytest.raises(ConfigError, match="pass eval_env="):
            jaxrl.train(algo, total_steps=steps, **arguments)
        return
    for total in steps, 2 * steps:
        result = jaxrl.train(algo, env, total_steps=total, **arguments)
    assert [row["step"] for row in result.metrics if row.get("evaluation/episodes") == 1] == [64, 128]


def written(path, what=None):
    with RldsWriter(path, "test") as writer:
        for episode in what or episodes():
            writer.write(episode)
        return f"rlds:{writer.close()}"


ALONE = jaxrl.Anakin(num_envs=NUM_ENVS, devices=1, shards=1)


@algorithm
class FromData(jaxrl.DQN):
    """An algorithm that asks for a dataset."""

    @property
    def experience(self):
        return {"replay": Dataset(batch_size=32)}


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"algo": "ppo"}, "PPO is on-policy"),
        ({"eval_env": None}, "dataset= needs an environment; pass eval_env="),
        ({"dataset": None}, "no environment; pass env, or dataset= and eval_env="),
        ({"num_envs": 4}, "num_envs has no meaning"),
        ({"topology": jaxrl.Anakin()}, r"the topology must be Offline\(\)"),
        ({"env": ENV, "topology": jaxrl.Offline()}, "leave env out"),
        ({"env": ENV, "dataset_fraction": 1.5}, "dataset_fraction=1.5 must be between 0 and 1"),
        (
            {"env": ENV, "dataset_fraction": 0.1, "topology": anakin()},
            "dataset_fraction=0.1 takes 3 of batch_size=32 items, .* 4 shards; use batch_size=32 and .*=0.125",
        ),
        (
            {"env": ENV, "dataset": None, "dataset_fraction": 0.5},
            "dataset_fraction=0.5 needs a dataset and an environment; pass the dataset",
        ),
        (
            {"dataset_fraction": 0.25},
            "dataset_fraction=0.25 needs a dataset and an environment; pass the environment",
        ),
        (
            {"env": ENV, "algo": jaxrl.SAC(imitate=True), "dataset_fraction": 0.25},
            "because SAC sets it; leave it out",
        ),
        ({"env": ENV, "algo": FromData()}, "learns only from a dataset"),
        ({"env": ENV, "algo": FromData(), "dataset": None}, "FromData learns from a dataset; pass one"),
        (
            {"env": ENV, "algo": jaxrl.SAC(imitate=True), "dataset": None},
            "^SAC with imitate=True learns from a dataset; pass one",
        ),
        (
            {"env": ENV, "algo": DQN.replace(batch_size=1), "topology": ALONE},
            "takes 0 of batch_size=1 items, .*; use batch_size=2 ",
        ),
        ({"topology": jaxrl.Offline(devices=7)}, "devices=7"),
        (
            {"algo": DQN.replace(sampling=Sampling(sampler=Lifo(), max_times_sampled=1))},
            "sampler, remover or max_times_sampled",
        ),
        (
            {"algo": jaxrl.SAC(reward_scale=RewardScale())},
            "SAC with reward_scale=.* learns from discounted_return, .* not contain; train without a dataset or ",
        ),
        (
            {"env": ENV, "algo": jaxrl.SAC(reward_scale=RewardScale())},
            "with reward_scale=.* not contain; train",
        ),
        (
            {"algo": "muzero"},
            "^MuZero learns from search_policy and search_value, .* not contain; train without a dataset",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_read(arguments, said):
    unread = dataset_of(None)  # which cannot be read
    arguments = {"algo": DQN, "dataset": unread, "eval_env": ENV, "total_steps": 8, "progress": False} | arguments
    with pytest.raises(ConfigError, match=said):
        jaxrl.train(**arguments)


@pytest.mark.parametrize("sampler", [Fifo(), Lifo(), MinHeap(), MaxHeap()], ids=repr)
def test_the_datasets_part_of_a_batch_is_not_the_same_item_again_and_again(sampler):
    asked = Replay(capacity=100, batch_size=8, min_size=8, sampler=sampler, max_times_sampled=2)
    assert fixed.source_of(asked).sampler == Uniform()


@pytest.mark.long
def test_an_algorithm_that_asks_for_a_dataset_gets_it():
    algo = FromData(network=DQN.network)
    result = jaxrl.train(
        algo, dataset=episodes(), eval_env=ENV, total_steps=4, evaluation_episodes=4, progress=False, evaluate_every=0
    )
    assert result.state.learner.updates == 4 and result.metrics[-2]["update/replay_dataset_items"] > 100
