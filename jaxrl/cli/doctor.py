"""The command `jaxrl doctor`: checks of this machine and installation."""

import dataclasses
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
from packaging.requirements import Requirement

from jaxrl.core import files, ownership
from jaxrl.core.errors import RunDirectoryError
from jaxrl.core.versions import installed_version, own_version
from jaxrl.parallel import targets
from jaxrl.parallel.mesh import cores
from jaxrl.parallel.threads import VARIABLES
from jaxrl.run.directory.run_directory import check_no_pattern

OK, NOTE, PROBLEM = "ok", "note", "PROBLEM"
_ENOUGH_DISK = 1 << 30  # bytes


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check: `verdict` is OK, NOTE or PROBLEM."""

    verdict: str
    what: str
    detail: str


def examine(run_dir: str | os.PathLike = "runs") -> int:
    """Print every finding; return 1 if there is a problem, otherwise 0."""
    problems, at_run_dir = 0, partial(disk, files.expand(run_dir))
    for check in (python, packages, extras, devices, gpu_processes, randomness, compiler, threads, at_run_dir):
        for finding in check():
            print(f"{finding.verdict:>7}  {finding.what}: {finding.detail}")
            problems += finding.verdict == PROBLEM
    print("no problem found" if not problems else f"{problems} problem{'s' if problems > 1 else ''} found")
    return 1 if problems else 0


def describe_device(out: Path | None = None) -> int:
    """Print a description of the first accelerator, in the format of `jaxrl compile --target`; return 0.

    Args:
      out: file that the description is also written to, or None.

    Raises:
      ConfigError: there is no accelerator, JAX does not report everything that a description needs, or `out` exists and
        was not written by jaxrl.
    """
    if out is not None:
        ownership.check_output(out, "description")
    description = targets.describe(jax.local_devices()[0])
    print(files.to_json(description, indent=2))
    if out is not None:
        files.write_json(out, description)
        print(f"written to {out}; to use it: jaxrl compile ... --target {out}", file=sys.stderr)
    return 0


def python() -> Iterator[Finding]:
    """Report the version of Python. It is always supported, since older versions cannot parse this file."""
    yield Finding(OK, "python", f"{platform.python_version()} at {sys.executable}")


def packages(required: Callable[[str], list[str] | None] = metadata.requires) -> Iterator[Finding]:
    """Check that every required package is installed in a supported version."""
    installed = installed_version("jaxrl") is not None
    advice = "" if installed else ": not installed, so its requirements are unknown; run pip install -e ."
    yield Finding(OK if installed else NOTE, "jaxrl", f"{own_version()} at {Path(__file__).parents[1]}{advice}")
    for requirement in _requirements("jaxrl", required):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _installed(requirement, PROBLEM)


def extras() -> Iterator[Finding]:
    """Report which extras are installed."""
    if installed_version("jaxrl") is None:
        return
    names = metadata.metadata("jaxrl").get_all("Provides-Extra") or []
    for extra in sorted(set(names) - {"all", "dev", "docs", "test"}):
        if all(_installed(member, NOTE).verdict == OK for member in _brought_by("jaxrl", extra)):
            yield Finding(OK, f"extra {extra}", "installed")
        else:
            yield Finding(NOTE, f"extra {extra}", f"not installed: pip install 'jaxrl[{extra}]'")


def _brought_by(package, extra):
    """Yield the requirements of an extra, including those of nested extras."""
    for requirement in _requirements(package):
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": extra}):
            continue
        yield requirement
        for further in requirement.extras:
            yield from _brought_by(requirement.name, further)


def _requirements(package, required=metadata.requires):
    try:
        return [Requirement(line) for line in required(package) or []]
    except metadata.PackageNotFoundError:
        return []


def _installed(requirement, verdict):
    window = str(requirement.specifier) or "any version"
    version = installed_version(requirement.name)
    if version is None:
        return Finding(verdict, requirement.name, f"not installed, requires {window}")
    if requirement.specifier.contains(version, prereleases=True):
        return Finding(OK, requirement.name, f"{version} ({window})")
    return Finding(verdict, requirement.name, f"{version}, requires {window}: pip install '{requirement.name}{window}'")


def devices() -> Iterator[Finding]:
    """Report the devices that JAX uses."""
    try:
        here = jax.local_devices()
    except RuntimeError as error:
        yield Finding(PROBLEM, "devices", f"JAX failed to initialize: {error}")
        return
    kinds = ", ".join(sorted({device.device_kind for device in here}))
    yield Finding(OK, "devices", f"{len(here)} x {kinds} ({jax.default_backend()})")
    if jax.default_backend() == "cpu" and Path("/dev/nvidia0").exists():
        yield Finding(NOTE, "GPU", "found, but JAX does not use it: pip install 'jaxrl[cuda13]'")


def gpu_processes() -> Iterator[Finding]:
    """Report other processes on the GPUs; processes that share a GPU run several times slower."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return
    query = [command, "--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding(NOTE, "GPU", f"nvidia-smi failed: {error!s:.200}")
        return
    own = str(os.getpid())
    others = [line.strip() for line in lines if line.strip() and line.partition(",")[0].strip() != own]
    if others:
        advice = "processes sharing a GPU run several times slower; train one at a time, or use jaxrl sweep for seeds"
        yield Finding(NOTE, "GPU", f"also used by other processes ({'; '.join(others)}): {advice}")


def randomness() -> Iterator[Finding]:
    """Check that a seed leads to the same run under `vmap` and on any number of devices."""
    implementation = jax.config.jax_default_prng_impl
    if implementation == "threefry2x32" and jax.config.jax_threefry_partitionable:
        yield Finding(OK, "random numbers", implementation)
    else:
        advice = "a seed has other results in a sweep; unset JAX_DEFAULT_PRNG_IMPL and JAX_THREEFRY_PARTITIONABLE"
        yield Finding(PROBLEM, "random numbers", f"{implementation}: {advice}")


def compiler() -> Iterator[Finding]:
    """Compile and run a small program."""
    began = time.monotonic()
    try:
        value = float(jax.jit(lambda x: jnp.sum(x @ x))(jnp.ones((8, 8), jnp.float32)))
    except Exception as error:  # anything a broken driver or compiler raises
        yield Finding(PROBLEM, "compiler", " ".join(str(error).split())[:300])
        return
    fine = value == 512.0
    advice = "" if fine else f": computed {value}, not 512"
    yield Finding(OK if fine else PROBLEM, "compiler", f"{time.monotonic() - began:.2f} s for a small program{advice}")


def threads() -> Iterator[Finding]:
    """Report the cores available to this process, and the environment variables that limit them."""
    known = ("XLA_FLAGS", "OMP_NUM_THREADS", *VARIABLES)
    limits = [f"{name}={os.environ[name]}" for name in known if name in os.environ]
    yield Finding(OK, "threads", ", ".join([f"{cores()} of {os.cpu_count()} cores", *limits]))


def disk(run_dir: Path) -> Iterator[Finding]:
    """Check that run directories can be written, and report the free disk space."""
    try:
        check_no_pattern(run_dir)
    except RunDirectoryError as error:
        yield Finding(PROBLEM, "disk", str(error))
    place = run_dir.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(4096))
            file.flush()
        free = shutil.disk_usage(place).free
    except OSError as error:
        yield Finding(PROBLEM, "disk", f"{place} is not writable: {error}")
        return
    verdict = OK if free > _ENOUGH_DISK else NOTE
    yield Finding(verdict, "disk", f"{place} is writable, {free / (1 << 30):,.1f} GiB free")
