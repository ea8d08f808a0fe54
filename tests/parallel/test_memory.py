"""Replays that would not fit in memory are refused before anything is allocated, with the capacity that would fit."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest
from helpers.streams import rows_of

from jaxrl.buffers import replay
from jaxrl.core.errors import ConfigError
from jaxrl.core.sources import Replay
from jaxrl.parallel import memory
from jaxrl.parallel.replicas import SingleReplica

SOURCE = Replay(capacity=10**9, batch_size=8, min_size=8)


def bound(source):
    replicas = SingleReplica()
    return replay.bind({"replay": source}, num_envs=4, rollout_length=4, shards=1, replicas=replicas)["replay"]


def check(shapes, source, **changes):
    algo, state = SimpleNamespace(experience={"replay": source}), SimpleNamespace(buffers={"replay": shapes})
    memory.check_run(algo, state, jax.devices()[:1], **changes)


def test_memory_is_asked_for_before_it_is_taken(monkeypatch):
    monkeypatch.setattr(memory, "free_on_host", lambda: 2**30)
    rows = rows_of([[8]] * 4)
    shapes = jax.eval_shape(lambda: bound(SOURCE).init(rows, ()))  # 20-odd GB
    with pytest.raises(ConfigError) as error:
        check(shapes, SOURCE)
    message = str(error.value)
    assert "its copy in an asynchronous save" in message and "1 GiB are free" in message
    fitting = int(message.split("capacity=")[1].split()[0])
    assert 0 < fitting < 10**8

    def fits(capacity, **changes):
        source = dataclasses.replace(SOURCE, capacity=capacity)
        check(jax.eval_shape(lambda: bound(source).init(rows, ())), source, **changes)

    fits(fitting)
    fits(int(fitting * 1.9), saved=False)
    with pytest.raises(ConfigError):
        fits(int(fitting * 1.2))
    with pytest.raises(ConfigError):
        fits(fitting, runs=2)


def test_free_memory_is_known_here():
    free = memory.free_on_host()
    assert free is None or 2**24 < free < 2**50
    assert memory.free_on_device(jax.devices()[0]) is None
