"""The address at which the other processes of a run reach this process, and checks of the connection."""

import errno
import ipaddress
import socket
import warnings
from collections.abc import Callable
from typing import Any

import jax.extend.backend

_ANSWER_SECONDS = 5.0


def own(coordinator: str, exchange: Callable[[str, Any], list[Any]]) -> str | None:
    """Return the address at which the other processes can reach this machine; all processes must call this.

    The address belongs to the network interface towards the coordinator. If the machine's hostname resolves to the
    loopback address, as in Debian's /etc/hosts, process 0 uses the interface towards another process instead.

    Args:
      coordinator: HOST:PORT.
      exchange: `distributed.exchange`.

    Returns:
      An IP address, which is the loopback address if all processes are on one machine; None if there is no route.
    """
    mine = towards(_parts(coordinator)[0])
    elsewhere = [address for address in exchange("addresses", mine) if address and not _is_loopback(address)]
    if elsewhere and (mine is None or _is_loopback(mine)):
        return towards(elsewhere[0])
    return mine


def towards(host: str) -> str | None:
    """Return the address from which this machine reaches `host`, or None if there is no route; sends nothing."""
    try:
        family, kind, protocol, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)
            return probe.getsockname()[0]
    except OSError:
        return None


def diagnose_connection(coordinator: str, process_id: int) -> str | None:
    """Return the reason why this process cannot reach the coordinator, or None if it can.

    Args:
      coordinator: HOST:PORT.
      process_id: index of this process; the coordinator runs in process 0.
    """
    host, port = _parts(coordinator)
    try:
        found = [there for *_, there in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError as error:
        return f"{host} cannot be resolved on this machine ({error.strerror})"
    if process_id == 0 and not any(_is_here(there[0]) for there in found):
        return f"process 0 must run at this address, but {found[0][0]} is not an address of this machine"
    try:
        with socket.create_connection((host, port), timeout=_ANSWER_SECONDS):
            return None
    except OSError as error:
        return f"connecting there failed ({error})"


def is_taken(bind: str) -> bool:
    """Return whether a process on this machine listens at HOST:PORT; the host `[::]` means all addresses."""
    host, port = _parts(bind)
    try:
        family, kind, protocol, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # count a port that was just closed as free
            probe.bind(there)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def use(address: str) -> None:
    """Make collectives between CPU devices use this address of the machine; call this before JAX creates its devices.

    By default, Gloo uses the address that the hostname resolves to, and JAX has no setting for the address. This
    function uses JAX's internals; if these have changed, it warns and does nothing.
    """
    try:
        from jax._src import distributed as engine
        from jax._src import xla_bridge as bridge
        from jax._src.lib import _jax

        make_gloo, make_client = _jax.make_gloo_tcp_collectives, bridge.make_cpu_client
    except (ImportError, AttributeError) as error:
        message = f"JAX's internals changed; CPU collectives use the address of the hostname, not {address}: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return

    def client():
        gloo = make_gloo(distributed_client=engine.global_state.client, hostname=address, interface=None)
        return make_client(gloo)

    jax.extend.backend.register_backend_factory("cpu", client, priority=0, fail_quietly=False)


def _parts(coordinator):
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def _is_here(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _is_loopback(address):
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
