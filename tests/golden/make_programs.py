"""Writes `programs.json`: a hash of what every algorithm of the registry and every preset lowers to.

    .venv/bin/python tests/golden/make_programs.py

The programs are those of a chunk: in JAX environments and from a dataset one (`Program.chunk`), in host environments
those of acting and learning. They are only traced. A commit that changes a program names it.
"""

import dataclasses
import hashlib
import json
import os
import re
import sys
from pathlib import Path

FILE = Path(__file__).parent / "programs.json"
sys.path[:0] = [str(FILE.parents[1]), str(FILE.parents[2])]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402  all need the path or the platform above
import numpy as np  # noqa: E402
from algorithms import ALGORITHMS, ENVIRONMENTS, FROM_DATA  # noqa: E402
from helpers.made import made  # noqa: E402
from helpers.programs import NUM_ENVS  # noqa: E402

import jaxrl  # noqa: E402
from jaxrl.core import spaces  # noqa: E402
from jaxrl.core.report import EpisodeSums  # noqa: E402
from jaxrl.core.types import Environment, EnvSpec, env_spec  # noqa: E402
from jaxrl.data import rings  # noqa: E402
from jaxrl.envs.episode import restart  # noqa: E402
from jaxrl.envs.host.jax_host import ServedFromHost  # noqa: E402
from jaxrl.parallel.experience import of_dataset  # noqa: E402
from jaxrl.parallel.host_rollout import HostSteps  # noqa: E402
from jaxrl.parallel.program import _chunk  # noqa: E402
from jaxrl.parallel.sebulba.collector import Collected  # noqa: E402
from jaxrl.run.presets import PRESETS  # noqa: E402

# How many numbers are observed and acted with, in host environments: for suites that are not in the lock, and for brax,
# whose physics take half a minute to trace.
ELSEWHERE = {
    "brax:hopper": (11, 3),
    "brax:inverted_pendulum": (4, 1),
    "brax:walker2d": (17, 6),
    "craftax:Craftax-Symbolic-v1": (8268, spaces.Discrete(43)),
    "dm_control:walker-walk": (24, 6),
    "playground:CheetahRun": (17, 6),
}
KEY, ONE, STEPS = jax.eval_shape(lambda: jax.random.key(0)), np.int32(1), np.float32(1e3)


def programs():
    """Return by name the function and the arguments that lower a program; equal arguments have equal programs."""
    found = {}
    for name, env in ENVIRONMENTS.items():
        algo = ALGORITHMS[name].resolve(env_spec(env), NUM_ENVS)
        if name not in FROM_DATA:
            found[f"{name} anakin"] = of_rollouts, algo, env, NUM_ENVS
        if name not in (*FROM_DATA, "alphazero"):
            found[f"{name} sebulba"] = of_rollouts, algo, ServedFromHost(env), NUM_ENVS
        if "rollout" not in algo.experience and name not in ("muzero", "flashsac"):  # which need what acting keeps
            found[f"{name} offline"] = of_data, algo, env
    larger = [f"dreamer-{size}m" for size in (25, 50, 100, 200)]  # than dreamer-12m, in nothing but widths
    return found | {f"preset {name}": (of_preset, PRESETS[name]) for name in PRESETS if name not in larger}


def of_preset(preset):
    """Lower a chunk of a preset, in its environment or in one of the same spaces."""
    if preset.env in ELSEWHERE:
        seen, acted = ELSEWHERE[preset.env]
        acted = spaces.Box(-1.0, 1.0, (acted,)) if isinstance(acted, int) else acted
        env = ServedFromHost(EnvSpec("", spaces.Box(-np.inf, np.inf, (seen,)), acted))
    else:
        env = jaxrl.make(preset.env)
    num_envs = preset.topology["num_envs"]
    return of_rollouts(preset.algorithm.resolve(env_spec(env), num_envs), env, num_envs)


def of_rollouts(algo, env, num_envs):
    """Lower a chunk in environments."""
    topology = jaxrl.Anakin if isinstance(env, Environment) else jaxrl.Sebulba
    program = topology(num_envs=num_envs, devices=1).bind(algo, env)
    if program.host is None:
        state = jax.eval_shape(program.init, algo, env, KEY)
        return [_chunk.lower(program, None, algo, env, *halves(state), ONE, STEPS, None)]
    spec, learning = program.layout.spec, program.host._learning
    steps = HostSteps(spec, num_envs, num_envs, program.collects.steps_per_env(algo))
    roots = HostSteps.roots.eval_shape(steps, KEY, np.arange(num_envs))
    shown = jax.eval_shape(jax.vmap(restart), blank(spec.observation_space, num_envs))
    state = jax.eval_shape(program.init, algo, shown, KEY)
    prepare = learning.prepare.lower(learning, algo, state.replace(buffers={}), STEPS)
    algo, actor = prepare.out_info
    carry, action = state.carry, state.timestep.previous_action
    storage = HostSteps.storage.eval_shape(steps, algo, actor, shown, carry, action, roots)
    act = HostSteps.act.lower(steps, algo, actor, storage, shown, carry, action, roots, np.uint32(0), ONE)
    finish = HostSteps.finish.lower(steps, algo, actor, storage, shown, action, carry, carry, ONE)
    rollouts = [Collected(finish.out_info, jax.eval_shape(EpisodeSums.zero))]
    return [prepare, act, finish, learning.learn.lower(learning, algo, *halves(state), rollouts, None)]


def of_data(algo, env):
    """Lower a chunk of learning from a dataset in memory."""
    program = jaxrl.Offline(devices=1).bind(algo, env)
    layout, steps = program.layout, 65
    seen, acted = (blank(space, steps) for space in (layout.spec.observation_space, layout.spec.action_space))
    episode = dataclasses.replace(made(steps - 1, "truncated"), observation=seen, action=acted, extras={})
    sources = layout.experience(algo).dataset_sources
    dataset = rings.rings([episode], sources, layout.spec, columns=layout.shards)[0]
    dataset = {of_dataset(name): ring for name, ring in dataset.items()}
    state = jax.eval_shape(program.init, algo, None, KEY, dataset)
    return [_chunk.lower(program, None, algo, None, *halves(state), ONE, STEPS, dataset)]


def blank(space, size):
    return jax.tree.map(lambda x: np.zeros((size, *x.shape), x.dtype), spaces.zeros(space))


def halves(state):
    return state.replace(buffers={}), state.buffers


def text(lowered):
    """Return a program's text: functions are numbers, and neither it nor its results have a name."""
    found = re.sub(r' ?jax\.result_info = "[^"]*",?', "", lowered.as_text().partition("\n")[2])
    names = re.findall(r"func\.func \w+ @([\w.]+)", found)
    numbers = {name: str(number) for number, name in enumerate(names)}
    return re.sub(r"@([\w.]+)", lambda match: "@" + numbers.get(match[1], match[1]), found)


def forget():
    """Clear the caches of JAX and jaxrl: constants and functions that programs before had are else shared with one."""
    jax.clear_caches()
    for name in [name for name in sys.modules if name.startswith("jaxrl.")]:
        for cached in vars(sys.modules[name]).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()


def digest(lower, *arguments):
    """Return the hash of a program."""
    forget()
    return hashlib.sha256("".join(map(text, lower(*arguments))).encode()).hexdigest()[:16]


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")  # as in tests; it changes which calls programs share
    hashes = {name: digest(*program) for name, program in programs().items()}
    FILE.write_text(json.dumps(dict(sorted(({"jax": jax.__version__} | hashes).items())), indent=1) + "\n")
