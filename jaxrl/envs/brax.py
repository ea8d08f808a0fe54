"""brax environments (Freeman et al., 2021, arXiv:2106.13281), without auto-reset.

brax is an optional extra, which is imported when the first brax environment is made.
"""

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree
from jaxrl.envs.physics import PhysicsEnv
from jaxrl.envs.suite import Key, add_suite, arguments_of, silent_import

BACKENDS = ("generalized", "spring", "positional", "mjx")

NAMES = (
    "ant",
    "fast",
    "halfcheetah",
    "hopper",
    "humanoid",
    "humanoidstandup",
    "inverted_double_pendulum",
    "inverted_pendulum",
    "pusher",
    "reacher",
    "swimmer",
    "walker2d",
)

# Pairs of environment and backend that brax 0.14.2 cannot run, and why; `tests/envs/test_brax.py` shows that there are
# no others.
BROKEN: dict[tuple[str, str], str] = {
    ("swimmer", "generalized"): "it calls jnp.clip(a_min=...), which JAX no longer accepts",
    ("swimmer", "spring"): "brax has no swimmer for this backend",
    ("swimmer", "positional"): "brax has no swimmer for this backend",
    ("swimmer", "mjx"): "brax has no swimmer for this backend",
}

# Parts of brax's `System` that brax's backends read, and the MuJoCo options with the same meaning.
_REPEATED = {"gravity": "opt.gravity", "viscosity": "opt.viscosity", "density": "opt.density"}

# Constructor arguments that have no effect, and why; `tests/envs/test_brax.py` shows that there are no others.
_IDLE = {"ant": dict.fromkeys(("contact_cost_weight", "contact_force_range"), "as brax computes no contact forces")}


class BraxEnvironment(PhysicsEnv):
    """A brax environment.

    The physical system is brax's `System`. Static parameters are the arguments of brax's constructor, such as
    `backend`, one of `BACKENDS`.
    """

    suite = "brax"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of brax's environments that run with at least one of its backends."""
        return tuple(n for n in NAMES if any((n, backend) not in BROKEN for backend in BACKENDS))

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        forwarded = {"n_frames": None, "debug": None} if name != "fast" else {}
        return arguments_of(module()._envs[name]) | forwarded

    @classmethod
    def make_foreign(cls, key: Key) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Brax System", UserWarning)  # about maintenance, see docs/environments.md
            return module().get_environment(key[0], **dict(key[1]))

    @classmethod
    def choices(cls, name: str) -> Mapping[str, Iterable[str]]:
        return {"backend": BACKENDS}

    @classmethod
    def check(cls, name: str, parameters: Mapping[str, Any]) -> None:
        backend = str(parameters.get("backend", "generalized"))
        if (name, backend) in BROKEN:
            raise ConfigError(f"brax:{name} does not run with backend={backend!r}: {BROKEN[name, backend]}")
        super().check(name, parameters)

    @classmethod
    def physical(cls, key: Key) -> Any:
        return getattr(cls.foreign_of(*key), "sys", None)

    def fit(self, name: str, value: Any) -> Any:
        parts = super().fit(name, value)
        twice = [(path, _REPEATED[path]) for path in parts if _REPEATED.get(path) in parts] if name == "system" else []
        if twice:
            raise ConfigError(
                [f"system of {self.name} has {a!r} and {b!r}, which mean the same; leave one out" for a, b in twice]
            )
        return parts

    def reads(self) -> str:
        backend = dict(self.key[1]).get("backend", "generalized")
        reads = "MuJoCo's parts (body_mass)" if backend == "mjx" else "brax's own parts (link.inertia.mass)"
        return f"; backend={backend!r} reads {reads}"

    def idle(self) -> Mapping[str, str]:
        return _IDLE.get(self.key[0], {})

    def library(self, drawn: PyTree) -> Any:
        if not self.system:
            return self.foreign
        env = copy.copy(self.foreign)
        follows = {part: self.system[option] for part, option in _REPEATED.items() if option in self.system}
        env.sys = env.sys.tree_replace({**self.system, **follows})
        return env


names, make = add_suite(BraxEnvironment)


def refused() -> tuple[str, ...]:
    """Return the names of brax's environments that cannot run with any backend."""
    return tuple(n for n in NAMES if n not in names())


def module() -> Any:
    """Return the module `brax.envs`, imported without the message that MuJoCo prints."""
    with silent_import():
        from brax import envs
    return envs
