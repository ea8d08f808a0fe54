"""Cost of each sampler of a replay buffer of a million rows: gradient updates per second of SAC and DQN.

    python benchmarks/samplers.py [--capacity 1000000] [--repeats 5]

SAC in Pendulum and DQN in CartPole, with their defaults: a ring of rows, and every sampler without a limit and with
`max_times_sampled=4`; with uniform sampling also a view next to the replay buffer, with and without a remover. SAC does
not return priorities, so it has no heaps. Acting, storing and learning run in one compiled program, warm, with as many
threads as `jaxrl train` uses, and the samplers alternate in one run. The buffer holds few rows; this affects neither
the cost of sampling nor that of a pass over the capacity.
"""

import argparse
import functools
import os
import pathlib
import statistics
import sys
import time

import jax

import jaxrl
from jaxrl.algos.fields import Sampling
from jaxrl.core.sources import Fifo, Lifo, MaxHeap, MinHeap, Uniform, View

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

MOST = 4
SAMPLERS = (Uniform(), Fifo(), Lifo(), MinHeap(), MaxHeap())
# So small that they are full.
VIEWS = {
    "Uniform and a view": View(16),
    "Uniform and a view, remover Fifo": View(16, capacity=512, remover=Fifo()),
    "Uniform and a view, remover MinHeap": View(16, capacity=512, remover=MinHeap()),
}
RUNS = {
    "SAC": (jaxrl.SAC(), "gymnax:Pendulum-v1", SAMPLERS[:3]),
    "DQN": (jaxrl.DQN(prioritized=None), "gymnax:CartPole-v1", SAMPLERS),
}


@functools.cache
def prepared(name, env, sampler, most, capacity, iterations):
    """Return a function that trains for a number of further iterations, and its number of updates."""
    algo, env = algorithm(name, sampler, most, capacity), jaxrl.make(env)
    num_envs = jaxrl.Anakin().resolve(algo).num_envs
    algo = record.resolved(algo, env, num_envs)
    program = jaxrl.Anakin(num_envs=num_envs, devices=1).bind(algo, env)
    # Past the rows before the first update.
    first = -(-algo.min_size // (num_envs * algo.rollout_length)) + 2
    held = [program.chunk(algo, env, program.start(algo, env, 0), first, 10**9)[0]]

    def train():
        held[0], _ = jax.block_until_ready(program.chunk(algo, env, held[0], iterations, 10**9))
        return int(held[0].learner.updates)

    before = train()
    return train, train() - before


def algorithm(name, sampler, most, capacity):
    view, samplers = VIEWS.get(sampler), {type(one).__name__: one for one in SAMPLERS}
    chosen = Uniform() if view else samplers[sampler]
    return RUNS[name][0].replace(
        capacity=capacity, sampling=Sampling(sampler=chosen, max_times_sampled=most), view=view
    )


def answer(**case):
    """Return updates per second of one case."""
    train, updates = prepared(**case)
    start = time.perf_counter()
    train()
    return updates / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        record.serve(answer)
        return
    rows = []
    for name, (algo, env, samplers) in RUNS.items():
        one = record.one_thread_suffices(algo, jaxrl.make(env), jaxrl.Anakin().resolve(algo).num_envs)
        more = {"PYTHONPATH": str(record.ROOT)} | (record.ONE_THREAD if one else {})
        worker = record.Worker(sys.executable, pathlib.Path(__file__), more)
        fixed = {"name": name, "env": env, "capacity": arguments.capacity, "iterations": arguments.iterations}
        cases = [(type(sampler).__name__, most) for sampler in samplers for most in (0, MOST)]
        cases += [(label, 0) for label, view in VIEWS.items() if view.remover == Fifo() or MinHeap() in samplers]
        rates = {case: [] for case in cases}
        for _ in range(arguments.repeats):
            for sampler, most in cases:
                rates[sampler, most].append(worker.ask(sampler=sampler, most=most, **fixed))
        worker.close()
        median = {case: statistics.median(found) for case, found in rates.items()}
        for (sampler, most), rate in median.items():
            of_uniform = {"updates/s": rate, "times slower than uniform": median["Uniform", 0] / rate}
            rows.append({"algorithm": name, "sampler": sampler, "max_times_sampled": most} | of_uniform)
    print(record.table(rows))
    settings = {"capacity": arguments.capacity, "iterations": arguments.iterations}
    print(record.save("samplers", rows, repeats=arguments.repeats, settings=settings, load=os.getloadavg()[0]))


if __name__ == "__main__":
    main()
