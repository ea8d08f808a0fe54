"""Files as somebody with bad intentions, or a broken disk, would leave them; and a watch over whoever reads them."""

import contextlib
import copy
import hashlib
import json
import os
import site
import sys
import sysconfig
import zlib
from pathlib import Path

import jax
import numpy as np

from helpers.patience import within

EVIL = "evil_module"  # can be found, and leaves a mark when it is imported
LONGEST = 20  # seconds that reading a file may take
_DEEP: object = 1
for _ in range(400):
    _DEEP = [_DEEP]
NEAR = [1, -1, 2**31, 2**63, -(2**63)]  # what is added to a number
LOOKS = {"array": [1], "shape": [1_000_000, 1_000_000], "dtype": "float32"}
# What takes the place of a part of a valid file.
VALUES = [
    None, True, -1, 0, 1e308, 2**70, 10**400, float("nan"), float("inf"), "", "x" * 10_000, "\x00\u202e\ud800", [], {},
    [[]], {"a": {"b": 1}}, _DEEP, "../../precious/file", "/dev/zero", f"{EVIL}:Evil", f"{EVIL}.Evil", "os:system",
    {"type": f"user:{EVIL}.Evil"}, {"type": f"{EVIL}:Evil"}, {"type": "subprocess:Popen", "args": "true"},
    {"registered": "os:system"}, {"type": "suite:gymnasium", "id": f"{EVIL}:Evil-v0", "options": {}},
    {"type": "suite:gymnax"}, {"type": "algorithm:ppo"}, {"type": "torso:mlp", "widths": [10**9, 10**9]},
    {"type": "space:dict"}, {"type": "space:box", "low": 0, "high": 1, "shape": [10**12], "dtype": "U400000000"},
    {"type": "space:discrete", "n": 2**70}, {"type": "space:box", "low": "a", "high": [], "shape": 3}, LOOKS,
    {"array": 3, "shape": 3, "dtype": 3}, {"array": [1], "shape": [67_108_864], "dtype": "float64"},
    {"dtype": "U400000000"}, {"dtype": "object"}, {"float": "nan"}, {"items": [[1, 2], [[], 3]]}, {"opaque": "x"},
    {"pythonClassName": f"{EVIL}.Evil"}, {"python_class_name": f"{EVIL}.Evil"}, ["1000000000000", "-5"], [2**70] * 3,
]  # fmt: skip


# --- making them -----------------------------------------------------------------------------------------------------


def changed(value, rng):
    """Return a copy of a JSON value with one part replaced, shifted, made like another, removed, or doubled."""
    value = copy.deepcopy(value)
    held = list(places(value))
    if not held:
        return VALUES[rng.integers(len(VALUES))]
    (holder, key), (there, other) = (held[place] for place in rng.integers(len(held), size=2))
    how = rng.integers(12)
    if how == 0 and type(holder[key]) in (int, float):
        holder[key] += NEAR[rng.integers(len(NEAR))]
    elif how < 7:
        holder[key] = VALUES[rng.integers(len(VALUES))]
    elif how < 9 and not isinstance(there[other], dict | list):
        holder[key] = there[other]
    elif how < 10:
        del holder[key]
    elif isinstance(holder, dict):
        holder[f"{key}_"] = holder[key]
    else:
        holder.append(holder[key])
    return value


def spoiled(data, rng):
    """Return the bytes with some of them flipped, cut, repeated, overwritten or inserted."""
    how, at = rng.integers(7), int(rng.integers(max(len(data), 1)))
    if how == 0:
        return data[:at]
    if how == 1:
        return data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1 :] if data else b"\xff"
    if how < 4:
        new = rng.bytes(int(rng.integers(1, 40)))
        return data[:at] + new + data[at + (how == 3) * len(new) :]
    if how == 4:
        return data[:at] + b"[" * 100_000 + data[at:]
    if how == 5:
        return data[:at] + data[at:] * 2
    return b"\xff\xfe" + data


def bytes_mutated(data, count, seed):
    """Yield `count` mutations of a file, as (name, bytes)."""
    for number in range(count):
        yield f"bytes {number}", spoiled(data, np.random.default_rng([seed, number]))


def _every_third_of_bytes(data, count, seed, change):
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        if number % 3 == 2:
            yield f"bytes {number}", spoiled(data, rng)
        else:
            yield f"values {number}", change(rng).encode(errors="surrogatepass")


def json_mutated(data, count, seed, write=json.dumps):
    """Yield the same of a JSON file, which `write` makes text of; every third is of its bytes."""

    def change(rng):
        value = json.loads(data)
        for _ in range(int(rng.integers(1, 4))):
            value = changed(value, rng)
        return write(value)

    return _every_third_of_bytes(data, count, seed, change)


def lines_mutated(data, count, seed):
    """Yield the same of a file with a JSON object a line."""

    def change(rng):
        lines = data.decode().split("\n")[:-1]
        at = rng.integers(len(lines))
        lines[at] = json.dumps(changed(json.loads(lines[at]), rng))
        return "\n".join(lines) + "\n"

    return _every_third_of_bytes(data, count, seed, change)


def checksummed(body):
    """A manifest as JSON text, its checksum what jaxrl would have written."""
    if not isinstance(body, dict):
        return json.dumps(body)
    body = {name: value for name, value in body.items() if name != "crc32"}
    with contextlib.suppress(TypeError, ValueError):
        body["crc32"] = zlib.crc32(json.dumps(json.loads(json.dumps(body)), sort_keys=True).encode())
    return json.dumps(body)


def places(value):
    """(what holds it, its key) of every part."""
    if not isinstance(value, dict | list):
        return
    for key, child in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(child, dict | list):
            yield from places(child)


# --- watching --------------------------------------------------------------------------------------------------------

_NEVER = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.spawn", "subprocess.Popen")
_LIBRARIES = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib")] + site.getsitepackages()
_watching = None


def _hook(event, arguments):
    if _watching is not None and (event in _NEVER or event in ("import", "exec", "open", "ctypes.dlopen")):
        _watching.see(event, arguments)


class Watch:
    """A record of what reading files does: processes, imports, libraries, code, and files that are written to.

    Args:
      own: the directory that may be written to.
    """

    installed = False

    def __init__(self, own):
        self.own, self.found = os.path.realpath(own), []
        # Where compiled programs are kept, and devices that take anything.
        self.allowed = (self.own, "/dev/null", os.path.realpath(jax.config.jax_compilation_cache_dir or self.own))

    def see(self, event, arguments):
        if event == "import":
            wrong = EVIL in str(arguments[0])
        elif event == "exec":
            code = arguments[0]
            named = f"{getattr(code, 'co_filename', '')} {getattr(code, 'co_names', '')}"
            wrong = EVIL in named or self.own in named
        elif event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            wrong = bool(writes) and isinstance(path, str | bytes | os.PathLike) and not self._may_write(path)
        else:
            wrong = True
        if wrong:
            self.found.append(f"{event} {str(arguments)[:200]}")

    def _may_write(self, path):
        folder, name = os.path.split(os.fsdecode(os.path.abspath(os.fsdecode(path))))
        return os.path.join(os.path.realpath(folder), name).startswith(self.allowed)

    def __enter__(self):
        global _watching
        if not Watch.installed:
            sys.addaudithook(_hook)
            Watch.installed = True
        self._modules = set(sys.modules)
        _watching = self
        return self

    def __exit__(self, *_):
        global _watching
        _watching = None
        for name in set(sys.modules) - self._modules:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file and not file.startswith((*_LIBRARIES, os.fspath(Path(__file__).parents[2]))):
                self.found.append(f"module {name} of {file}")


class Overdue(BaseException):
    """It took too long; no handler of errors stops it."""


def bounded(seconds=LONGEST):
    """End what takes longer."""
    return within(seconds, Overdue)


def snapshot(folder):
    """Return the kinds, sizes, times and contents of all files below a folder."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        status = path.lstat()
        held = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() and not path.is_symlink() else ""
        found[os.fspath(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, held)
    return found
