"""Milliseconds of one gradient's all-reduce between processes of this machine, by the number of its arrays.

    python benchmarks/collectives.py [--processes 2]

XLA for CPUs reduces the arrays of a gradient one after another, and in each, all processes wait for each other. The
arrays are replicated; each row is the mean of 300 reductions in one compiled loop.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

SHAPES = {"1 array of 10": (1, 10), "1 array of 10,000": (1, 10_000), "12 arrays of 1,000": (12, 1_000)}
STEPS = 300


def measured(count, size):
    """Return the milliseconds of a reduction of `count` arrays of `size` numbers over all devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("data",))

    def reduce(arrays):
        step = lambda carry, _: (jax.lax.pmean([x * 1.0001 for x in carry], "data"), None)  # noqa: E731
        return jax.lax.scan(step, arrays, None, length=STEPS)[0]

    every = PartitionSpec()
    program = jax.jit(jax.shard_map(reduce, mesh=mesh, in_specs=every, out_specs=every, check_vma=False))
    arrays = [jax.device_put(jnp.ones(size), NamedSharding(mesh, every)) for _ in range(count)]
    jax.block_until_ready(program(arrays))
    start = time.perf_counter()
    jax.block_until_ready(program(arrays))
    return (time.perf_counter() - start) / STEPS * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    record.add_process_flags(parser)
    arguments = parser.parse_args()
    if not record.join_processes(arguments):
        from jaxrl.parallel.multihost.local import free_port

        place = ["--distributed", "--coordinator", f"127.0.0.1:{free_port('127.0.0.1')}"]
        place += ["--num-processes", str(arguments.processes)]
        words = [[sys.executable, __file__, *place, "--process-id", str(n)] for n in range(arguments.processes)]
        processes = [subprocess.Popen(each) for each in words]
        sys.exit(max(process.wait() for process in processes))
    import jax

    rows = [{"gradient": name, "ms": measured(*shape)} for name, shape in SHAPES.items()]
    if jax.process_index() == 0:
        print(record.table(rows))
        print(record.save("collectives", rows, processes=jax.process_count(), load=os.getloadavg()[0]))


if __name__ == "__main__":
    main()
