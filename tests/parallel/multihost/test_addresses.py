"""At which addresses processes meet; a second address of the loopback stands for a network."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.patience import PATIENCE
from helpers.processes import environment, free_port

from jaxrl.cli import multihost
from jaxrl.core.errors import ConfigError
from jaxrl.parallel.multihost import addresses, distributed

TWO = """
import sys, time, jax
from jax.experimental import multihost_utils
from jaxrl.parallel.multihost import addresses, distributed
port, index = sys.argv[1:]
addresses.towards = lambda host: f"127.0.0.{int(index) + 2}"
distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
print(multihost_utils.process_allgather(jax.numpy.int32(index)).tolist(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def port():
    return free_port()


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and needs all of 127.0.0.0/8")
def test_collectives_use_the_address_and_sigterm_ends_a_process_that_does_not_train(port):
    with contextlib.ExitStack() as stack:
        processes = []
        for index in range(2):
            words = [sys.executable, "-c", TWO, str(port), str(index)]
            process = stack.enter_context(subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            processes.append(process)
        end = threading.Timer(PATIENCE, lambda: [process.kill() for process in processes])
        end.start()
        stack.callback(end.cancel)
        for process in processes:
            assert next(line for line in process.stdout if not line.startswith("[Gloo]")) == "[0, 1]\n"
        local = {line.split()[1].partition(":")[0] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]}
        assert {"0200007F", "0300007F"} <= local
        processes[1].terminate()
        assert processes[1].wait(PATIENCE) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("ways", "found"),
    [
        ([{"host-0": "10.0.0.1"}, {"host-0": "10.0.0.2"}], ["10.0.0.1", "10.0.0.2"]),
        # A machine's own name is its loopback, as Debian writes it.
        ([{"host-0": "127.0.0.1", "10.0.0.2": "10.0.0.1"}, {"host-0": "10.0.0.2"}], ["10.0.0.1", "10.0.0.2"]),
        ([{"host-0": "127.0.0.1"}, {"host-0": "127.0.0.1"}], ["127.0.0.1", "127.0.0.1"]),
        ([{"host-0": "::1", "fd00::2": "fd00::1"}, {"host-0": "fd00::2"}], ["fd00::1", "fd00::2"]),
        ([{"host-0": "10.0.0.1"}, {"10.0.0.1": None}], ["10.0.0.1", None]),
    ],
)
def test_the_interface_is_the_one_that_leads_to_the_others(ways, found, monkeypatch):
    for way, mine in zip(ways, found, strict=True):
        monkeypatch.setattr(addresses, "towards", way.get)
        assert addresses.own("host-0:8476", lambda *_: [each.get("host-0") for each in ways]) == mine


def test_a_port_in_use_is_told_before_jax_meets_it(port):
    assert not addresses.is_taken(f"127.0.0.1:{port}") and not addresses.is_taken(f"[::]:{port}")
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        assert addresses.is_taken(f"127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}'.*in use"):
            distributed.initialize(f"127.0.0.1:{port}", 2, 0)


def test_what_keeps_processes_apart_is_told_while_they_wait(port, monkeypatch, capsys):
    place = f"127.0.0.1:{port}"
    assert addresses.towards("127.0.0.1") == "127.0.0.1"
    assert "connecting there failed" in addresses.diagnose_connection(place, 1)
    assert "192.0.2.1 is not an address of this machine" in addresses.diagnose_connection(f"192.0.2.1:{port}", 0)
    with socket.socket() as coordinator:
        coordinator.bind(("127.0.0.1", port))
        coordinator.listen()
        assert addresses.diagnose_connection(place, 0) is None and addresses.diagnose_connection(place, 1) is None
    multihost._say_what_is_awaited(place, 1)
    assert f"waiting for the other processes at {place}; connecting there failed" in capsys.readouterr().err

    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(addresses.socket, "getaddrinfo", unknown)
    assert addresses.diagnose_connection("host-0:1", 1).startswith("host-0 cannot be resolved")
    assert addresses.towards("host-0") is None
