"""Cache of compiled programs: JAX's persistent cache, in the user's cache folder.

JAX's environment variables and options for the cache take precedence. This module handles what JAX's cache does not:
damaged files, which JAX would read at every start and never replace; programs compiled for a processor with other
instructions; folders that other users can write to, which is dangerous because loaded programs are run; and a size
limit.
"""

import collections
import contextlib
import hashlib
import os
import platform
import shutil
import stat
import tempfile
import threading
import warnings
import zlib
from pathlib import Path

import jax
import jaxlib
from jax.experimental.compilation_cache import compilation_cache

from jaxrl.core import files
from jaxrl.core.errors import ConfigError
from jaxrl.parallel.mesh import cores
from jaxrl.parallel.threads import requested

MOST_BYTES = 2 * 2**30  # size limit of a processor's folder; the least recently used entries are deleted first
_LEAST_FREE_BYTES = 256 * 2**20  # minimum free space on the disk
_CHECKED = "checked"  # file whose modification time is the start of the last check of the entries
_JAX_VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
_lock = threading.Lock()
_COMPILED, _LOADED = "/jax/compilation_cache/cache_misses", "/jax/compilation_cache/cache_hits"
_events: collections.Counter[str] = collections.Counter()  # events of JAX, counted by name
_tried = False
_root: Path | None = None  # parent of the folders, one per kind of processor; None: jaxrl does not store programs


def keep_compiled_programs() -> Path | None:
    """Enable the cache, once per process and before the first compilation.

    The folder is `JAXRL_CACHE`, or `jaxrl` in the user's cache folder; `JAXRL_CACHE=off` disables the cache.

    Returns:
      The folder; None if the cache is disabled, JAX's own settings are used, this function was called before, or the
      folder cannot be used, which causes a warning.
    """
    global _tried, _root
    with _lock:
        if _tried:
            return None
        _tried = True
    by_user = jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache
    if by_user or any(name in os.environ for name in _JAX_VARIABLES):
        return None
    folder = Path(os.environ.get(files.CACHE) or "the user's cache folder")  # for the warning
    try:
        root = files.cache_folder()
        if root is None:
            return None
        folder = root / _processor(requested() or cores())
        _make_usable(folder)
    except (OSError, RuntimeError, ConfigError) as error:  # RuntimeError: the user has no home directory
        warnings.warn(
            f"compiled programs cannot be cached in {folder}: {error}; set {files.CACHE} to another folder, or to off",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    # If an entry cannot be read or written, only the start takes longer.
    warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache entry")
    # Store small programs too, because every start compiles dozens of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    _use(folder)
    _root = root
    return folder


def keep_apart(*, threads: int) -> None:
    """Store programs compiled from now on in the folder for this number of CPU threads.

    XLA splits loops by the number of threads when it compiles, but JAX's cache key does not include this number.
    """
    if _root is None:
        return
    folder: Path | None = _root / _processor(threads)
    try:
        _make_usable(folder)
    except OSError:
        folder = None  # without a cache, compiling only takes longer
    _use(folder)


def programs() -> tuple[int, int]:
    """Return the numbers of programs that this process compiled and stored in the cache, and loaded from the cache."""
    return _events[_COMPILED], _events[_LOADED]


def _count(event: str, **_: object) -> None:
    _events[event] += 1


jax.monitoring.register_event_listener(_count)


def cache_folder() -> str | None:
    """Return the folder of compiled programs, set by jaxrl or by JAX's own settings, or None."""
    return jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None


def _use(folder: Path | None) -> None:
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
    # JAX reads the option at the first compilation, which may have happened already in a notebook.
    compilation_cache.reset_cache()


def _processor(threads: int) -> str:
    """Return a hash of the processor, threads, flags and versions, because machines may share a home directory."""
    features = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), features)
    flags = os.environ.get("XLA_FLAGS", "")
    parts = [platform.machine(), features, str(threads), flags, jax.__version__, jaxlib.__version__]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _make_usable(folder: Path) -> None:
    """Create the folder, writable only by this user, and delete damaged entries and those beyond the size limit.

    Raises:
      OSError: the folder cannot be created or written to, other users can write to it, or its disk is almost full.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise PermissionError("other users can write to it, and jaxrl would run their programs")
    with tempfile.TemporaryFile(dir=folder):
        pass
    _discard_damaged(folder)
    if (free := shutil.disk_usage(folder).free) < _LEAST_FREE_BYTES:
        raise OSError(f"its disk has only {free // 2**20} MB of free space")


def _discard_damaged(folder: Path) -> None:
    """Delete new entries that cannot be decompressed, and the least recently used ones beyond the size limit."""
    checked = folder / _CHECKED
    since = checked.stat().st_mtime_ns if checked.exists() else 0
    began = folder / f"{_CHECKED}-{os.getpid()}"
    began.touch()  # entries that are written from now on are new at the next check
    entries = []
    for path in folder.glob("*-cache"):
        try:
            found = path.stat()
        except OSError:  # another process deleted it
            continue
        if found.st_ctime_ns >= since and not _decompresses(path):
            _delete(path)
        else:
            entries.append((max(found.st_atime, found.st_mtime), found.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= MOST_BYTES:
            break
        _delete(path)
        total -= size
    began.replace(checked)  # only after all entries are checked, so that an interrupted check is repeated


def _decompresses(path: Path) -> bool:
    """Return whether an entry is intact; JAX compresses entries with zlib, or zstandard if installed."""
    try:
        held = path.read_bytes()
        if held[:4] == b"\x28\xb5\x2f\xfd":
            return True  # zstandard, which is not checked
        zlib.decompress(held)
    except (OSError, zlib.error):
        return False
    return True


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):  # another process deleted it, or it cannot be deleted
        path.unlink()
