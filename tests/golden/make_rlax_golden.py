"""Makes `rlax_returns.json`: what rlax says about the functions of `jaxrl.algos.returns`. Not run by the tests.

rlax knows neither batches nor truncation, so it is asked one stretch of rows at a time: from an episode's (or the
rollout's) first row to its end, with discount 0 after a terminal row and the value of the next observation after any
other. rlax is no dependency of ours (it wants a nightly of TensorFlow Probability); run this in a place of its own:

    uv venv /tmp/rlax --python 3.12 && uv pip install --python /tmp/rlax/bin/python rlax==0.1.9
    JAX_PLATFORMS=cpu /tmp/rlax/bin/python tests/golden/make_rlax_golden.py
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import rlax

T, B, ACTIONS, SEED = 24, 3, 4, 20240607
GAMMA, LAMBDA = 0.97, 0.9
CLIPS = {"clip_rho": 1.3, "clip_pg_rho": 1.1}  # rlax has no c-bar: it is 1


def rollout():
    """Rows with both kinds of endings, inside and at the rollout's end, as float32."""
    rng = np.random.default_rng(SEED)
    terminated, truncated = np.zeros((T, B), bool), np.zeros((T, B), bool)
    terminated[[4, 17, 10, 23], [0, 0, 1, 2]] = True
    truncated[[11, 5, 23, 8], [0, 1, 1, 2]] = True
    weight = np.ones((T, B), bool)
    weight[1:] = ~(terminated | truncated)[:-1]

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    q_values = normal(T + 1, B, ACTIONS)
    policy, behavior = (np.asarray(jax.nn.softmax(normal(T + 1, B, ACTIONS))) for _ in range(2))
    return {
        "rewards": normal(T, B) * weight,
        "values": normal(T + 1, B),
        "q_values": q_values,
        "policy": policy,
        "behavior": behavior,
        "actions": rng.integers(0, ACTIONS, (T + 1, B)),
        "terminated": terminated,
        "truncated": truncated,
        "weight": weight,
    }


def stretches(data):
    """(first row, last row, environment) of every run of rows that belong together."""
    for b in range(B):
        first = None
        for t in range(T):
            if data["weight"][t, b] and first is None:
                first = t
            if first is not None and (data["terminated"][t, b] or data["truncated"][t, b] or t == T - 1):
                yield first, t, b
                first = None


def answers(data, first, last, b):
    """rlax's results for one stretch, each of its length."""
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
    clipped = vtrace(clip_rho_threshold=CLIPS["clip_rho"], clip_pg_rho_threshold=CLIPS["clip_pg_rho"])
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
    data = rollout()
    results = {}
    for first, last, b in stretches(data):
        for name, answer in answers(data, first, last, b).items():
            results.setdefault(name, np.zeros((T, B), np.float32))[first : last + 1, b] = answer
    golden = {
        "made_with": {"rlax": rlax.__version__, "jax": jax.__version__, "numpy": np.__version__},
        "settings": {"gamma": GAMMA, "lambda": LAMBDA, **CLIPS},
        "inputs": {name: array.tolist() for name, array in data.items()},
        "results": {name: array.tolist() for name, array in results.items()},
    }
    shown = json.dumps(json.loads(json.dumps(golden), parse_float=lambda text: float(f"{float(text):.9g}")))
    path = pathlib.Path(__file__).with_name("rlax_returns.json")
    path.write_text(shown + "\n")
    print(f"{path}: {len(results)} results, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
