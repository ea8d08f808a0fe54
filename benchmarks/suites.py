"""What the adapters of JAX suites cost: random steps through jaxrl against each suite's own functions.

    python benchmarks/suites.py [SUITE ...] [--num-envs 256] [--steps 200] [--repeats 7] [--resets] [--out PATH]

Both sides are compiled, take the same actions from the same keys, add up every observation, reward and ending, and
begin no new episode: what differs is the adapter. With --resets, columns `exact` and `pooled` are jaxrl with its
automatic resets, as in training, and `own resets` the suite with its own, where it has them. Medians over
alternations, in steps a second. A suite is a function of ROWS that makes its own environment from a name and
parameters.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record
import jax
import jax.numpy as jnp

import jaxrl
from jaxrl.envs.parameters import unwrapped
from jaxrl.envs.suite import foreign_rules

AUTO_RESETS = {"exact": "exact", "pooled": "pooled"}


class Own(NamedTuple):
    """A suite's own functions for one environment.

    Attributes:
      reset: from a key to a state.
      step: from a state, an action and a key to the next state and what there is to see: a pytree of arrays with the
        observation, the reward and the ending.
      resetting_step: as `step`, with the suite's own automatic reset; None if it has none.
    """

    reset: Callable[[jax.Array], Any]
    step: Callable[[Any, Any, jax.Array], tuple[Any, Any]]
    resetting_step: Callable[[Any, Any, jax.Array], tuple[Any, Any]] | None = None


def craftax(name: str, parameters: dict[str, Any]) -> Own:
    from craftax.craftax_env import make_craftax_env_from_name

    plain, resetting = (make_craftax_env_from_name(name, auto_reset=choice) for choice in (False, True))
    params = plain.default_params.replace(**parameters)

    def step_of(step):
        def step_one(state, action, key):
            observation, state, reward, done, _ = step(key, state, action, params)
            return state, (observation, reward, done)

        return step_one

    return Own(lambda key: plain.reset_env(key, params)[1], step_of(plain.step_env), step_of(resetting.step))


def xminigrid(name: str, parameters: dict[str, Any]) -> Own:
    import xminigrid as package
    from xminigrid.wrappers import GymAutoResetWrapper

    env, params = package.make(name)
    params = params.replace(**parameters)

    def step_of(env):
        def step_one(state, action, key):
            state = env.step(params, state, action)
            return state, (state.observation, state.reward, state.discount, state.last())

        return step_one

    return Own(lambda key: env.reset(params, key), step_of(env), step_of(GymAutoResetWrapper(env)))


def navix(name: str, parameters: dict[str, Any]) -> Own:
    import navix as package

    def step_of(env):
        def step_one(state, action, key):
            state = env.step(state, action)
            return state, (state.observation, state.reward, state.step_type)

        return step_one

    plain = package.make(name, disable_autoreset=True, **parameters)
    return Own(plain.reset, step_of(plain), step_of(package.make(name, **parameters)))


ROWS: list[tuple[Callable[[str, dict[str, Any]], Own], str, dict[str, Any]]] = [
    (craftax, "Craftax-Classic-Symbolic-v1", {}),
    (craftax, "Craftax-Symbolic-v1", {}),
    (xminigrid, "MiniGrid-DoorKey-5x5", {}),
    (xminigrid, "MiniGrid-FourRooms", {}),
    (navix, "Navix-DoorKey-5x5-v0", {}),
    (navix, "Navix-Dynamic-Obstacles-8x8-v0", {}),
]


def _total(seen):
    """Return the sum of all numbers in a batch, so that none is left out of the program."""
    return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(seen))


def _plays(functions: Own, action_space: Any, num_envs: int, steps: int, keys: jax.Array) -> Callable[[], float]:
    """Return a function that plays on and returns its seconds; compiled and warm."""

    @jax.jit
    def rollout(state, key):
        def one(state, key):
            key_action, key_step = jax.random.split(key)
            action = jax.vmap(action_space.sample)(jax.random.split(key_action, num_envs))
            state, seen = jax.vmap(functions.step)(state, action, jax.random.split(key_step, num_envs))
            return state, _total(seen)

        return jax.lax.scan(one, state, jax.random.split(key, steps))

    state = jax.jit(jax.vmap(functions.reset))(jax.random.split(keys[0], num_envs))
    # States begin with Python's numbers, whose types a scan does not keep.
    kept = jax.eval_shape(lambda s, a, k: functions.step(s, a, k)[0], *_one(state, action_space, keys[0]))
    is_key = lambda kind: jnp.issubdtype(kind, jax.dtypes.extended)  # noqa: E731
    state = jax.tree.map(lambda x, to: x if is_key(to.dtype) else x.astype(to.dtype), state, kept)
    rest = iter(keys[1:])

    def play() -> float:
        nonlocal state
        start = time.perf_counter()
        state, _ = jax.block_until_ready(rollout(state, next(rest)))
        return time.perf_counter() - start

    play()
    return play


def _one(state, action_space, key):
    return jax.tree.map(lambda x: x[0], state), action_space.sample(key), key


def _through_jaxrl(env: Any) -> Own:
    def step(state, action, key):
        state, shown = env.step(state, action, key)
        return state, (shown.observation, shown.reward, shown.terminated, shown.truncated)

    return Own(lambda key: env.reset(key)[0], step)


def measured(make: Callable[..., Own], name: str, parameters: dict[str, Any], arguments: Any) -> dict[str, Any]:
    """Return a row: steps a second of the suite and of jaxrl, and how many of the suite's the adapter reaches."""
    label = f"{make.__name__}:{name}"
    env = unwrapped(jaxrl.make(label, auto_reset=None, **parameters))
    ways = {"adapter": _through_jaxrl(env)}
    ways |= {k: _through_jaxrl(jaxrl.make(label, auto_reset=x, **parameters)) for k, x in AUTO_RESETS.items()}
    with foreign_rules():
        own = make(name, parameters)
        ways |= {"own": own}
        if own.resetting_step is not None:
            ways |= {"own resets": own._replace(step=own.resetting_step)}
        keys = jax.random.split(jax.random.key(0), arguments.repeats + 3)
        plays = {
            k: _plays(ways[k], env.action_space, arguments.num_envs, arguments.steps, keys)
            for k in ("own", "adapter", "own resets", "exact", "pooled")
            if k in ways and (arguments.resets or k in ("own", "adapter"))
        }
        rates = _record.alternate(plays, arguments.repeats)
    count = arguments.num_envs * arguments.steps
    speeds = {k: count / seconds for k, seconds in rates.items()}
    row = {"env": label, **parameters, "num_envs": arguments.num_envs, **speeds}
    return row | {"adapter/own": speeds["adapter"] / speeds["own"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("suites", nargs="*", help="some suites, or environments as suite:name, instead of all")
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--resets", action="store_true", help="also with automatic resets: three more programs")
    parser.add_argument("--out", type=pathlib.Path, help="where to write the rows as JSON; default: nowhere")
    arguments = parser.parse_args()
    rows = []
    for make, name, parameters in ROWS:
        if not arguments.suites or {make.__name__, f"{make.__name__}:{name}"} & {*arguments.suites}:
            rows.append(measured(make, name, parameters, arguments))
            print(_record.table(rows[-1:]), flush=True)
    if arguments.out:
        record = {"machine": _record.machine(), "steps": arguments.steps, "repeats": arguments.repeats, "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
