"""Reading and writing of untrusted files: reads are bounded in size, and writes never follow links."""

import contextlib
import errno
import json
import math
import os
import secrets
import stat
import sys
from collections.abc import Container, Generator
from pathlib import Path
from typing import IO, Any

from jaxrl.core.errors import ConfigError

LARGEST = 1 << 26  # maximum size, in bytes, of a file that is read completely
CACHE = "JAXRL_CACHE"  # environment variable that sets the cache folder
DEEPEST = 200  # maximum nesting of objects and lists


def expand(path: str | os.PathLike) -> Path:
    """Return a path from a user, with a leading `~` or `~user` replaced by the home directory.

    For a folder that is itself named `~`, the user writes `./~`.

    Raises:
      ConfigError: the path is empty, there is no such user, or the user has no home directory.
    """
    written = os.fspath(path)
    if not written:
        raise ConfigError("the path '' is empty; use '.' for the current directory")
    expanded = os.path.expanduser(written)
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise ConfigError(f"path={written!r}: {user} has no home directory; write ./{user} for a folder of that name")
    found = Path(expanded)  # "./~" becomes "~", which must not be expanded later
    return found.absolute() if str(found).startswith("~") else found


def cache_folder() -> Path | None:
    """Return the folder in JAXRL_CACHE, by default `jaxrl` in the user's cache folder; None if caching is off.

    Raises:
      ConfigError: JAXRL_CACHE is a path that `expand` rejects.
      RuntimeError: the user has no home directory.
    """
    if setting := os.environ.get(CACHE, ""):
        return None if setting.lower() in ("off", "0", "no", "false") else expand(setting)
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():  # the XDG specification requires absolute paths; an empty value counts as unset
        folder = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return folder / "jaxrl"


def open_to_read(path: str | os.PathLike) -> IO[bytes]:
    """Open a regular file for reading; reject pipes and devices, which could block.

    Raises:
      OSError: the file cannot be read.
    """
    return _regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", path)


def open_to_append(path: str | os.PathLike) -> IO[str]:
    """Open a regular file for appending; reject links, which could redirect the writes.

    Raises:
      OSError: the file cannot be written to.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return _regular(os.open(path, flags, 0o666), "a", path)


def check_regular(directory: str | os.PathLike) -> None:
    """Check that a directory contains only regular files, because a library that reads a pipe would block.

    Raises:
      OSError: a file is a pipe or a device, or links to one, or a folder is a symbolic link, which is not followed.
    """
    for folder, folders, names in os.walk(directory):
        for path in (os.path.join(folder, name) for name in folders):
            if os.path.islink(path):
                raise OSError(errno.EINVAL, "it is a symbolic link to a folder; replace the link with the folder", path)
        for path in (os.path.join(folder, name) for name in names):
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)


def read_json(path: str | os.PathLike) -> Any:
    """Return the content of a JSON file.

    Raises:
      OSError: the file cannot be read, or is not a regular file.
      ValueError: the file is too large, nested too deeply, or not JSON.
    """
    with open_to_read(path) as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"the file is larger than the limit of {LARGEST >> 20} MiB")
    return parse_json(data)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text.

    Raises:
      ValueError: the text is nested too deeply, or not JSON.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    level, depth = [value], 0
    while level := [item for one in level for item in _children(one)]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError("the JSON is nested too deeply")
    return value


def escape_for_terminal(text: str) -> str:
    """Escape unprintable characters, such as terminal control sequences, in untrusted text."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


@contextlib.contextmanager
def replacing(path: str | os.PathLike, mode: str = "w") -> Generator[IO[Any]]:
    """Open a temporary file that atomically replaces the file at `path` on exit.

    Raises:
      OSError: the file cannot be written.
    """
    path = Path(path)
    # A new file under a random name, because an existing entry may be a link to another location.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    as_text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    try:
        with open(temporary, mode.replace("w", "x"), **as_text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return `value` as strict JSON (RFC 8259); NaN and infinities become null.

    Raises:
      TypeError: `value` contains something other than JSON values and tuples.
    """
    return json.dumps(_with_null(value), indent=indent, allow_nan=False)


def as_read_back(value: Any) -> Any:
    """Return `value` after a round trip through JSON: tuples become lists, keys become strings, NaN becomes None."""
    return json.loads(to_json(value))


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write a JSON file atomically."""
    with replacing(path) as file:
        file.write(to_json(value, indent=2) + "\n")


def clear_temporaries(directory: Path, names: Container[str]) -> None:
    """Remove temporary files left by processes that were killed while writing files with these names."""
    for left in directory.glob(f".*.{'[0-9a-f]' * 16}.tmp"):
        if left.name[1:-21] in names:
            left.unlink()


def _regular(descriptor, mode, path):
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return os.fdopen(descriptor, mode, encoding=None if "b" in mode else "utf-8")


def _with_null(value):
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _with_null(item) for key, item in value.items()}
    return [_with_null(item) for item in value] if isinstance(value, list | tuple) else value


def _children(value):
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
