"""Overhead of the adapters of JAX suites: random steps with jaxrl compared with each suite's own functions.

    python benchmarks/suites.py [SUITE ...] [--num-envs 256] [--steps 50] [--repeats 7] [--resets]

Both sides are compiled, take the same actions from the same keys, sum every observation, reward and ending, and do not
reset: only the adapter differs. With --resets, the columns `exact` and `pooled` are jaxrl with its automatic resets, as
in training, and `own resets` is the suite with its own, if it has them. Results are medians over alternations, in steps
per second. A suite is a function in ROWS that creates its own environment from a name and parameters. Without SUITE,
writes benchmarks/results/suites.json.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _play
import _record
import jax
from _play import Functions

import jaxrl
from jaxrl.envs.parameters import unwrapped
from jaxrl.envs.suite import foreign_rules

SECONDS = 0.2  # that one side plays at least, before it is the other's turn


def craftax(name: str, parameters: dict[str, Any]) -> Functions:
    from craftax.craftax_env import make_craftax_env_from_name

    plain, resetting = (make_craftax_env_from_name(name, auto_reset=choice) for choice in (False, True))
    params = plain.default_params.replace(**parameters)

    def step_of(step):
        def step_one(state, action, key):
            observation, state, reward, done, _ = step(key, state, action, params)
            return state, (observation, reward, done)

        return step_one

    return Functions(lambda key: plain.reset_env(key, params)[1], step_of(plain.step_env), step_of(resetting.step))


def xminigrid(name: str, parameters: dict[str, Any]) -> Functions:
    import xminigrid as package
    from xminigrid.wrappers import GymAutoResetWrapper

    env, params = package.make(name)
    params = params.replace(**parameters)

    def step_of(env):
        def step_one(state, action, key):
            state = env.step(params, state, action)
            return state, (state.observation, state.reward, state.discount, state.last())

        return step_one

    return Functions(lambda key: env.reset(params, key), step_of(env), step_of(GymAutoResetWrapper(env)))


def navix(name: str, parameters: dict[str, Any]) -> Functions:
    import navix as package

    def step_of(env):
        def step_one(state, action, key):
            state = env.step(state, action)
            return state, (state.observation, state.reward, state.step_type)

        return step_one

    plain = package.make(name, disable_autoreset=True, **parameters)
    return Functions(plain.reset, step_of(plain), step_of(package.make(name, **parameters)))


def jumanji(name: str, parameters: dict[str, Any]) -> Functions:
    import jumanji as package

    env = package.make(name, **parameters)

    def step(state, action, key):
        state, seen = env.step(state, action)
        return state, (seen.observation, seen.reward, seen.discount, seen.last())

    return Functions(lambda key: env.reset(key)[0], step)


def octax(name: str, parameters: dict[str, Any]) -> Functions:
    from octax.environments import create_environment

    env = create_environment(name, **parameters)[0]

    def step(state, action, key):
        state, observation, reward, terminated, truncated, _ = env.step(state, action)
        return state, (observation, reward, terminated, truncated)

    return Functions(lambda key: env.reset(key)[0], step)


def playground(name: str, parameters: dict[str, Any]) -> Functions:
    from mujoco_playground import registry

    env = registry.load(name, config_overrides={"impl": "jax"} | parameters)

    def step(state, action, key):
        state = env.step(state, action)
        return state, (state.obs, state.reward, state.done)

    return Functions(lambda key: env.reset(jax.random.key_data(key)), step)


ROWS: list[tuple[Callable[[str, dict[str, Any]], Functions], str, dict[str, Any]]] = [
    (craftax, "Craftax-Classic-Symbolic-v1", {}),
    (xminigrid, "MiniGrid-DoorKey-5x5", {}),
    (xminigrid, "MiniGrid-FourRooms", {}),
    (navix, "Navix-DoorKey-5x5-v0", {}),
    (navix, "Navix-Dynamic-Obstacles-8x8-v0", {}),
    (jumanji, "Game2048-v1", {}),
    (jumanji, "Snake-v1", {}),
    (octax, "pong", {}),
    (playground, "CartpoleBalance", {}),
]


def prepared(make: Callable[..., Functions], name: str, parameters: dict[str, Any], arguments: Any) -> dict[str, Any]:
    """Return the play functions by mode, compiled and warm."""
    label = f"{make.__name__}:{name}"
    env = unwrapped(jaxrl.make(label, auto_reset=None, **parameters))
    ways = {"adapter": _play.of_jaxrl(env)}
    if arguments.resets:
        ways |= {x: _play.of_jaxrl(jaxrl.make(label, auto_reset=x, **parameters)) for x in ("exact", "pooled")}
    with foreign_rules():
        ways |= {"own": (own := make(name, parameters))}
        if arguments.resets and own.resetting_step is not None:
            ways |= {"own resets": own._replace(step=own.resetting_step)}
        _play.progress(f"compiling {label}")
        return {k: _play.plays(way, env.action_space, arguments.num_envs, arguments.steps) for k, way in ways.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("suites", nargs="*", help="suites, or environments as suite:name, to run instead of all")
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--resets", action="store_true", help="also with automatic resets: three more programs")
    arguments = parser.parse_args()
    chosen = [
        (make, name, parameters)
        for make, name, parameters in ROWS
        if not arguments.suites or {make.__name__, f"{make.__name__}:{name}"} & {*arguments.suites}
    ]
    plays, rows = [prepared(*one, arguments) for one in chosen], []  # compiled first, then timed
    for (make, name, parameters), ways in zip(chosen, plays, strict=True):
        seconds = _record.alternate({k: _play.at_least(SECONDS, play) for k, play in ways.items()}, arguments.repeats)
        speeds = {k: arguments.num_envs * arguments.steps / taken for k, taken in seconds.items()}
        row = {"env": f"{make.__name__}:{name}", **parameters, "num_envs": arguments.num_envs, **speeds}
        rows.append(row | {"adapter/own": speeds["adapter"] / speeds["own"]})
        print(_record.table(rows[-1:]), flush=True)
    if not arguments.suites:
        print(_record.save("suites", rows, steps=arguments.steps, repeats=arguments.repeats))


if __name__ == "__main__":
    main()
