"""The environments and backends of brax 0.14.2, and settings that fail, repeat others or do nothing."""

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

# Combinations that brax 0.14.2 itself cannot run, and why; `tests/envs/test_brax.py` shows that there are no others.
BROKEN: dict[tuple[str, str], str] = {
    ("swimmer", "generalized"): "it calls jnp.clip(a_min=...), which JAX no longer has",
    ("swimmer", "spring"): "brax has no swimmer of this backend",
    ("swimmer", "positional"): "brax has no swimmer of this backend",
    ("swimmer", "mjx"): "brax has no swimmer of this backend",
}


# Parts of brax's `System` that MuJoCo's options repeat, by the part that brax's own backends read.
REPEATED = {"gravity": "opt.gravity", "viscosity": "opt.viscosity", "density": "opt.density"}

# Arguments of constructors that change nothing, and why; `tests/envs/test_brax.py` shows that there are no others.
UNUSED: dict[str, dict[str, str]] = {
    "ant": dict.fromkeys(("contact_cost_weight", "contact_force_range"), "brax computes no contact forces"),
}
