"""Makes the results in `rlax_returns.json` again: what rlax says about the inputs there. Not run by the tests.

The inputs are rows with both kinds of endings, inside and at the rollout's end. rlax knows neither batches nor
truncation, so it is asked one stretch of rows at a time: from an episode's (or the rollout's) first row to its end,
with discount 0 after a terminal row and the value of the next observation after any other. rlax is not a dependency of
ours (it wants a nightly of TensorFlow Probability); run this in an environment of its own:

    uv venv /tmp/rlax --python 3.12 && uv pip install --python /tmp/rlax/bin/python rlax==0.1.9
    JAX_PLATFORMS=cpu /tmp/rlax/bin/python tests/golden/make_rlax_golden.py
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import rlax

FILE = pathlib.Path(__file__).with_name("rlax_returns.json")
GOLDEN = json.loads(FILE.read_text())
GAMMA, LAMBDA = GOLDEN["settings"]["gamma"], GOLDEN["settings"]["lambda"]
CLIPS = {f"{name}_threshold": GOLDEN["settings"][name] for name in ("clip_rho", "clip_pg_rho")}  # its c-bar is 1


def stretches(data):
    """Yield (first row, last row, environment) of every run of rows that belong together."""
    steps, envs = data["weight"].shape
    for b in range(envs):
        first = None
        for t in range(steps):
            if data["weight"][t, b] and first is None:
                first = t
            if first is not None and (data["terminated"][t, b] or data["truncated"][t, b] or t == steps - 1):
                yield first, t, b
                first = None


def answers(data, first, last, b):
    """Return rlax's results for one stretch, each of its length."""
    now, next_rows = slice(first, last + 1), slice(first + 1, last + 2)
    rewards = jnp.asarray(data["rewards"][now, b])
    discounts = jnp.asarray(GAMMA * ~data["terminated"][now, b], jnp.float32)
    values = jnp.asarray(data["values"][first : last + 2, b])
    taken = data["actions"][:, b, None]
    probability, old_probability = (
        np.take_along_axis(data[name][:, b], taken, -1)[:, 0] for name in ("policy", "behavior")
    )
    rhos = jnp.asarray(probability / old_probability)[now]
    q = jnp.asarray(data["q_values"][:, b])

    def vtrace(**settings):
        return rlax.vtrace_td_error_and_advantage(values[:-1], values[1:], rewards, discounts, rhos, **settings)

    plain = vtrace()
    clipped = vtrace(**CLIPS)
    return {
        "gae": rlax.truncated_generalized_advantage_estimation(rewards, discounts, LAMBDA, values),
        "lambda_returns": rlax.lambda_returns(rewards, discounts, values[1:], LAMBDA),
        "discounted_returns": rlax.discounted_returns(rewards, discounts, values[1:]),
        "vtrace_values": plain.errors + values[:-1],
        "vtrace_advantages": plain.pg_advantage,
        "vtrace_clipped_values": clipped.errors + values[:-1],
        "vtrace_clipped_advantages": clipped.pg_advantage,
        # rlax also mixes lambda into the advantage; the paper does not, so only the values are held against it.
        "vtrace_lambda_values": vtrace(lambda_=LAMBDA).errors + values[:-1],
        "q_lambda": rlax.lambda_returns(rewards, discounts, jnp.max(q[next_rows], axis=-1), LAMBDA),
    }


def main():
    data = {name: np.asarray(x) for name, x in GOLDEN["inputs"].items()}
    data = {name: x.astype(np.float32) if x.dtype.kind == "f" else x for name, x in data.items()}
    results = {}
    for first, last, b in stretches(data):
        for name, answer in answers(data, first, last, b).items():
            results.setdefault(name, np.zeros(data["weight"].shape, np.float32))[first : last + 1, b] = answer
    golden = GOLDEN | {
        "made_with": {"rlax": rlax.__version__, "jax": jax.__version__, "numpy": np.__version__},
        "results": {name: array.tolist() for name, array in results.items()},
    }
    shown = json.dumps(json.loads(json.dumps(golden), parse_float=lambda text: float(f"{float(text):.9g}")))
    FILE.write_text(shown + "\n")


if __name__ == "__main__":
    main()
