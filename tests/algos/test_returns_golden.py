"""Returns against the committed golden values of rlax, which `tests/golden/make_rlax_golden.py` made."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algos import returns

GOLDEN = json.loads((pathlib.Path(__file__).parent.parent / "golden" / "rlax_returns.json").read_text())
NARROW = {"f": jnp.float32, "i": jnp.int32, "b": jnp.bool_}
INPUTS = {name: np.asarray(x) for name, x in GOLDEN["inputs"].items()}
INPUTS = {name: jnp.asarray(x.astype(NARROW[x.dtype.kind])) for name, x in INPUTS.items()}
GAMMA, LAMBDA = GOLDEN["settings"]["gamma"], GOLDEN["settings"]["lambda"]
CLIPS = {name: GOLDEN["settings"][name] for name in ("clip_rho", "clip_pg_rho")}

RHOS = INPUTS["policy"] / INPUTS["behavior"]
RHOS = jnp.take_along_axis(RHOS, INPUTS["actions"][..., None], -1)[:-1, :, 0]
ROWS = {name: INPUTS[name] for name in ("rewards", "terminated", "truncated", "weight")}
VALUES = returns.Segment(**ROWS, values=INPUTS["values"][:-1], bootstrap_value=INPUTS["values"][-1])
BEST = jnp.max(INPUTS["q_values"], axis=-1)
GREEDY = returns.Segment(**ROWS, values=BEST[:-1], bootstrap_value=BEST[-1])

OURS = {
    "gae": (VALUES, lambda x, gamma: returns.gae(x, gamma, LAMBDA)),
    "lambda_returns": (VALUES, lambda x, gamma: returns.lambda_returns(x, gamma, LAMBDA)),
    "discounted_returns": (VALUES, lambda x, gamma: returns.lambda_returns(x, gamma, 1.0)),
    "q_lambda": (GREEDY, lambda x, gamma: returns.lambda_returns(x, gamma, LAMBDA)),
}
for prefix, settings in {"": {}, "clipped_": CLIPS, "lambda_": {"trace_lambda": LAMBDA}}.items():
    for part in ("values", "advantages"):
        OURS[f"vtrace_{prefix}{part}"] = (
            (VALUES, RHOS),
            lambda x, gamma, s=settings, part=part: getattr(returns.vtrace(*x, gamma, **s), part),
        )


def check(name, result):
    counts = np.asarray(ROWS["weight"])
    golden = np.asarray(GOLDEN["results"][name], np.float32)
    np.testing.assert_allclose(np.asarray(result)[counts], golden[counts], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(GOLDEN["results"]))
def test_golden_values_of_rlax(name):
    """As compiled, with a traced gamma, and mapped over a leading axis of all that is given."""
    inputs, function = OURS[name]
    check(name, jax.jit(function)(inputs, GAMMA))
    doubled = jax.tree.map(lambda x: jnp.stack([jnp.zeros_like(x), x]), inputs)
    check(name, jax.jit(jax.vmap(function, (0, None)))(doubled, jnp.float32(GAMMA))[1])
