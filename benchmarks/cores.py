"""Speed of the recurrent cores compared with the GRU: forward and backward passes over sequences of 1,024 steps.

    python benchmarks/cores.py [--repeats 7] [--batches 1 16]

Each core is one layer of width 128, with inputs of size 128 and an episode start about every 100 steps; GTrXL has a
memory of 64 steps. A call computes the gradient of the squared outputs with respect to parameters and inputs. All cores
are compiled and warm, and alternate. On a CPU, the loop of a GRU is bound by the latency of a step if the batch is
small, and by arithmetic if it is large; on an accelerator, always by latency. Writes benchmarks/results/cores.json.
"""

import argparse
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

LENGTH, WIDTH, MEMORY = 1024, 128, 64


def cores():
    """Return the compared cores by name."""
    from jaxrl.networks import GRU, LRU, LSTM, GTrXL, MinGRU

    made = (GRU(WIDTH), LSTM(WIDTH), MinGRU(WIDTH), LRU(WIDTH), GTrXL(WIDTH, layers=1, memory=MEMORY))
    return {type(core).__name__: core for core in made}


def gradient(core, batch):
    """Return a function that computes a gradient once and returns the seconds."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    graph, state = nnx.split(core.build(WIDTH, nnx.Rngs(params=0)))
    x = jax.random.normal(jax.random.key(0), (LENGTH, batch, WIDTH))
    first = jax.random.bernoulli(jax.random.key(1), 0.01, (LENGTH, batch))
    carry = jax.tree.map(lambda c: jnp.broadcast_to(c, (batch, *c.shape)), core.initial_carry())

    @jax.jit
    def compute(state, x):
        def loss(state, x):
            return jnp.sum(nnx.merge(graph, state)(x, first, carry)[0] ** 2)

        return jax.grad(loss, argnums=(0, 1))(state, x)

    def run():
        start = time.perf_counter()
        jax.block_until_ready(compute(state, x))
        return time.perf_counter() - start

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    arguments = parser.parse_args()
    rows = []
    for batch in arguments.batches:
        seconds = record.alternate({name: gradient(core, batch) for name, core in cores().items()}, arguments.repeats)
        for name, taken in seconds.items():
            row = {"core": name, "batch": batch, "steps/s": LENGTH * batch / taken}
            rows.append(row | {"of the GRU's": seconds["GRU"] / taken})
        print(record.table(rows[-len(seconds) :]), flush=True)
    print(record.save("cores", rows, length=LENGTH, width=WIDTH, memory=MEMORY, repeats=arguments.repeats))


if __name__ == "__main__":
    main()
