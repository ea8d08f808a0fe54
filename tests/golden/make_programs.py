"""Writes `programs.json`: a hash of what every algorithm of the registry and every preset computes.

    .venv/bin/python tests/golden/make_programs.py

The programs are those of a chunk: in JAX environments and from a dataset one (`Program.chunk`), in host environments
those of acting and learning. They are only traced. A hash is of the expressions that compute the outputs from the
inputs by their names in the algorithm and the state: it does not change with the order, repetition or names of
operations, nor with functions that are compiled apart. A commit that changes a program names it.
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
import jax.extend.core  # noqa: E402
import numpy as np  # noqa: E402
from algorithms import ALGORITHMS, ENVIRONMENTS, FROM_DATA  # noqa: E402
from helpers.made import dataset_of, made  # noqa: E402
from helpers.programs import NUM_ENVS  # noqa: E402
from helpers.served import ServedFromHost  # noqa: E402

import jaxrl  # noqa: E402
from jaxrl.core import spaces  # noqa: E402
from jaxrl.core.report import EpisodeSums  # noqa: E402
from jaxrl.core.types import Environment, EnvSpec, env_spec  # noqa: E402
from jaxrl.data import rings  # noqa: E402
from jaxrl.envs.episode import restart  # noqa: E402
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
    """Return by name the function and the arguments that trace a program; equal arguments have equal programs."""
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
    """Trace a chunk of a preset, in its environment or in one of the same spaces."""
    if preset.env in ELSEWHERE:
        seen, acted = ELSEWHERE[preset.env]
        acted = spaces.Box(-1.0, 1.0, (acted,)) if isinstance(acted, int) else acted
        env = ServedFromHost(EnvSpec("", spaces.Box(-np.inf, np.inf, (seen,)), acted))
    else:
        env = jaxrl.make(preset.env)
    num_envs = preset.topology["num_envs"]
    return of_rollouts(preset.algorithm.resolve(env_spec(env), num_envs), env, num_envs)


def of_rollouts(algo, env, num_envs):
    """Trace a chunk in environments."""
    topology = jaxrl.Anakin if isinstance(env, Environment) else jaxrl.Sebulba
    program = topology(num_envs=num_envs, devices=1).bind(algo, env)
    if program.host is None:
        state = jax.eval_shape(program.init, algo, env, KEY)
        return [_chunk.trace(program, None, algo, env, *halves(state), ONE, STEPS, None)]
    spec, learning = program.layout.spec, program.host._learning
    steps = HostSteps(spec, num_envs, num_envs, program.collects.steps_per_env(algo))
    roots = HostSteps.roots.eval_shape(steps, KEY, np.arange(num_envs))
    shown = jax.eval_shape(jax.vmap(restart), blank(spec.observation_space, num_envs))
    state = jax.eval_shape(program.init, algo, shown, KEY)
    prepare = learning.prepare.trace(learning, algo, state.replace(buffers={}), STEPS)
    algo, actor = prepare.out_info
    carry, action = state.carry, state.timestep.previous_action
    storage = HostSteps.storage.eval_shape(steps, algo, actor, shown, carry, action, roots)
    act = HostSteps.act.trace(steps, algo, actor, storage, shown, carry, action, roots, np.uint32(0), ONE)
    finish = HostSteps.finish.trace(steps, algo, actor, storage, shown, action, carry, carry, ONE)
    rollouts = [Collected(finish.out_info, jax.eval_shape(EpisodeSums.zero))]
    return [prepare, act, finish, learning.learn.trace(learning, algo, *halves(state), rollouts, None)]


def of_data(algo, env):
    """Trace a chunk of learning from a dataset in memory."""
    program = jaxrl.Offline(devices=1).bind(algo, env)
    layout, steps = program.layout, 65
    seen, acted = (blank(space, steps) for space in (layout.spec.observation_space, layout.spec.action_space))
    episode = dataclasses.replace(made(steps - 1, "truncated"), observation=seen, action=acted, extras={})
    sources = layout.experience(algo).dataset_sources
    dataset = rings.rings(dataset_of(episode), sources, layout.spec, columns=layout.shards)[0]
    dataset = {of_dataset(name): ring for name, ring in dataset.items()}
    state = jax.eval_shape(program.init, algo, None, KEY, dataset)
    return [_chunk.trace(program, None, algo, None, *halves(state), ONE, STEPS, dataset)]


def blank(space, size):
    return jax.tree.map(lambda x: np.zeros((size, *x.shape), x.dtype), spaces.zeros(space))


def halves(state):
    return state.replace(buffers={}), state.buffers


def outputs(traced):
    """Return the hash of every output of a traced function by its path, from its inputs by their paths."""
    inputs = jax.tree_util.tree_leaves_with_path(traced.args_info)
    hashes = computed(traced.jaxpr, [hashed(jax.tree_util.keystr(path), info) for path, info in inputs])
    paths = jax.tree_util.tree_leaves_with_path(traced.out_info)
    return sorted((jax.tree_util.keystr(path), found) for (path, _), found in zip(paths, hashes, strict=True))


def computed(jaxpr, inputs, depth=0):
    """Return the hashes of a jaxpr's outputs, given those of its inputs."""
    known = dict(
        zip(
            jaxpr.constvars, [hashed(x.dtype, x.shape, x.tobytes()) for x in map(np.asarray, jaxpr.consts)], strict=True
        )
    )
    known |= zip(jaxpr.invars, inputs, strict=True)

    def value(atom):
        return hashed(atom.aval, atom.val) if isinstance(atom, jax.extend.core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        assert eqn.outvars or not eqn.effects, f"the effects of {eqn.primitive} have no hash"
        found = of_equation(eqn.primitive.name, dict(eqn.params), list(map(value, eqn.invars)), depth)
        found = [hashed(found, n) for n in range(len(eqn.outvars))] if isinstance(found, str) else found
        known |= zip(eqn.outvars, found, strict=True)
    return list(map(value, jaxpr.outvars))


def of_equation(name, params, inputs, depth):
    """Return the hashes of an operation's outputs, or one hash of them all."""

    def loop(jaxpr, consts, carry, rest=()):
        """Return the hashes of a loop's outputs: all of its carry depends on all of its carry."""
        carried = [hashed("carry", depth, n, x) for n, x in enumerate(carry)]
        return computed(jaxpr, [*consts, *carried, *(hashed("slice", depth, x) for x in rest)], depth + 1)

    if name == "scan":
        consts, carry, rest = map(list, params.pop("ft_in").update(inputs).unpack())
        found = loop(params.pop("jaxpr"), consts, carry, rest)
        whole = hashed(name, params["length"], params["reverse"], carry, found[: len(carry)])
        return [hashed(whole, n if n < len(carry) else "row", x) for n, x in enumerate(found)]
    if name == "while":
        split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        consts, own, carry = inputs[: split[0]], inputs[split[0] : split[1]], inputs[split[1] :]
        return hashed(name, carry, loop(params["cond_jaxpr"], consts, carry), loop(params["body_jaxpr"], own, carry))
    if name == "cond":
        branches = [computed(branch, inputs[1:], depth) for branch in params["branches"]]
        return [hashed(name, inputs[0], found) for found in zip(*branches, strict=True)]
    inner = params.pop("call_jaxpr", params.get("jaxpr"))
    if inner is None or len(inner.invars) != len(inputs):  # as in a reduction, whose jaxpr is of two elements
        return hashed(name, sorted(params.items()), inputs)
    params.pop("jaxpr", None)
    found = computed(inner, inputs, depth)
    compiled_apart = name in ("jit", "custom_jvp_call", "custom_vjp_call")
    return found if compiled_apart else [hashed(name, sorted(params.items()), x) for x in found]


def hashed(*parts):
    return hashlib.sha256(re.sub(" at 0x[0-9a-f]+", "", repr(parts)).encode()).hexdigest()[:16]


def digest(trace, *arguments):
    """Return the hash of a program."""
    return hashed(*map(outputs, trace(*arguments)))


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")  # as in tests; it changes which calls programs share
    hashes = {name: digest(*program) for name, program in programs().items()}
    FILE.write_text(json.dumps(dict(sorted(({"jax": jax.__version__} | hashes).items())), indent=1) + "\n")
