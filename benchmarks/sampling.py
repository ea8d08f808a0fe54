"""Collection modes compared: environment steps per second of PPO in Acrobot, 16 environments, rollouts of 64.

    python benchmarks/sampling.py [--repeats 5]
    python benchmarks/sampling.py --env envpool:HalfCheetah-v4 envpool:Pong-v5 gymnasium:Acrobot-v1

| mode | description |
|---|---|
| serial | one process steps Gymnasium's environments one after another, and learns in between |
| parallel | two worker processes step the environments, one call selects all actions |
| alternating | the same in two groups: one acts while the other steps |
| asynchronous | as parallel, but learning from one rollout overlaps with collecting the next |
| threads with environments | two threads act and step, each for half of the environments |
| policies with environments | two processes act and step, each for half of the environments |
| the same on Ray | two Ray actors do |
| EnvPool | C++ threads step the environments, one call selects all actions |
| EnvPool, of those that are ready | one call acts for the first eight environments that are ready |
| compiled | gymnax's Acrobot, in one program with the learner |

Compiled and warm, alternating in one run. All modes use the same task; only the stepping differs. With `--env`, only
actor threads and actor processes are measured, with IMPALA and rollouts of 16.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import sys
import time

import jax

import jaxrl

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

ENVS, ROLLOUT = 16, 64
IN_STEP = {"lockstep": True, "lag": 0}


def ways():
    """Return the environment and the topology of each mode."""
    here = jaxrl.make("gymnasium:Acrobot-v1")
    workers = jaxrl.make("gymnasium:Acrobot-v1", workers=2)
    pool = jaxrl.make("envpool:Acrobot-v1", num_threads=2)
    sebulba = functools.partial(jaxrl.Sebulba, num_envs=ENVS)
    remote = jaxrl.Remote(actors=2, policy=True)
    return {
        "serial": (here, sebulba(**IN_STEP)),
        "parallel": (workers, sebulba(**IN_STEP)),
        "alternating": (workers, sebulba(groups=2, **IN_STEP)),
        "asynchronous": (workers, sebulba(lockstep=False, queue=2)),
        "threads with environments": (here, sebulba(actors=2)),
        "policies with environments": (here, sebulba(remote=remote)),
        "the same on Ray": (here, sebulba(remote=dataclasses.replace(remote, backend="ray", cpus=0.5))),
        "EnvPool": (pool, sebulba()),
        "EnvPool, of those that are ready": (pool, sebulba(ready=ENVS // 2)),
        "compiled": (jaxrl.make("gymnax:Acrobot-v1"), jaxrl.Anakin(num_envs=ENVS)),
    }


def seconds_of(env, topology, iterations, algo=None):
    """Return the seconds of a number of iterations, with no other work of the run."""
    algo = record.resolved(algo or jaxrl.PPO(rollout_length=ROLLOUT), env, ENVS)
    program = topology.bind(algo, env)
    try:
        state = program.start(algo, env, 0)
        state, _ = jax.block_until_ready(program.chunk(algo, env, state, 2, 10**9))
        start = time.perf_counter()
        jax.block_until_ready(program.chunk(algo, env, state, iterations, 10**9))
        return time.perf_counter() - start
    finally:
        program.close()


def actors(env, arguments):
    """Compare two actor threads with two actor processes."""
    algo = jaxrl.IMPALA(rollout_length=16)
    topologies = {"threads": {"actors": 2}, "processes": {"remote": jaxrl.Remote(actors=2, policy=True)}}
    asks = {
        name: functools.partial(seconds_of, env, jaxrl.Sebulba(num_envs=ENVS, **settings), arguments.iterations, algo)
        for name, settings in topologies.items()
    }
    seconds = record.alternate(asks, arguments.repeats)
    steps = arguments.iterations * ENVS * algo.rollout_length
    rates = {f"{name} (steps/s)": steps / s for name, s in seconds.items()}
    return {"environment": env.name, **rates, "processes / threads": seconds["threads"] / seconds["processes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--env", nargs="+", default=[])
    arguments = parser.parse_args()
    if arguments.env:
        rows = [actors(jaxrl.make(name), arguments) for name in arguments.env]
        print(record.table(rows))
        print(record.save("actor-processes", rows, repeats=arguments.repeats, load=os.getloadavg()[0]))
        return
    asks = {name: functools.partial(seconds_of, *way, arguments.iterations) for name, way in ways().items()}
    seconds = record.alternate(asks, arguments.repeats)
    steps = arguments.iterations * ENVS * ROLLOUT
    rows = [{"way": name, "steps/s": steps / s, "of serial": seconds["serial"] / s} for name, s in seconds.items()]
    print(record.table(rows))
    settings = {"environments": ENVS, "rollout": ROLLOUT, "iterations": arguments.iterations}
    print(record.save("sampling", rows, repeats=arguments.repeats, settings=settings, load=os.getloadavg()[0]))


if __name__ == "__main__":
    main()
