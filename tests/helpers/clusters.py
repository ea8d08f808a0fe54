"""A Ray cluster of this machine, for tests."""

import contextlib
import logging
import os
import pathlib

import pytest
import ray

from helpers.patience import PATIENCE, within

# Ray gives its agents 15 s to start, which are short on a busy machine; the next try finds their files in memory.
TRIES = 3
TESTS = pathlib.Path(__file__).parents[1]  # of `host_probes`, which actors import too


@contextlib.contextmanager
def cluster(**options):
    """Ray, connected to the cluster that RAY_ADDRESS names, or to a new one of this machine that ends with this."""
    options = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80_000_000} | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
        patch.setenv("RAY_worker_niceness", "0")  # 15 by default: beside other tests, actors would hardly run
        for again in reversed(range(TRIES)):
            try:
                with within(PATIENCE):
                    ray.init(logging_level=logging.ERROR, **({} if "RAY_ADDRESS" in os.environ else options))
                break
            except Exception:
                ray.shutdown()
                if not again:
                    raise
        try:
            yield ray
        finally:
            ray.shutdown()


def fixtures(**options):
    """The fixtures `started` and `cluster` of a module, to be called so: one cluster, five minutes for each test."""

    @pytest.fixture(scope="module", name="started")
    def started():
        with cluster(**options) as ray:
            yield ray

    @pytest.fixture(name="cluster")
    def for_a_test(started):
        with within(PATIENCE):
            yield started

    return started, for_a_test
