"""Update the table of EnvPool's families in docs/envpool.md, by testing one environment of each.

.venv/bin/python scripts/update_envpool_table.py [FAMILY ...]

Each environment is created, checked, stepped to its time limit and trained for one update, in a separate process, since
some may crash. Families given as arguments are tested and printed only. Run this after a new EnvPool release; it takes
about ten minutes.
"""

import collections
import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "envpool.md"
sys.path.insert(0, str(ROOT))

import jaxrl  # noqa: E402  needs the path above
from jaxrl.core import spaces  # noqa: E402
from jaxrl.core.errors import ConfigError  # noqa: E402
from jaxrl.envs.host import envpool as adapter  # noqa: E402

# An example of each family, by EnvPool module; other families use their first usable environment.
EXAMPLES = {
    "atari": "Pong-v5",
    "box2d": "LunarLander-v3",
    "classic_control": "CartPole-v1",
    "craftax": "Craftax-Classic-Symbolic-v1",
    "gfootball": "gfootball/academy_empty_goal_close-v1",
    "highway": "Highway-v0",
    "jumanji": "Jumanji/Snake-v1",
    "mujoco.dmc": "WalkerWalk-v1",
    "mujoco.gym": "HalfCheetah-v5",
    "mujoco.myosuite": "myoElbowPose1D6MRandom-v0",
    "mujoco.playground": "Go1JoystickFlatTerrain-v1",
    "mujoco.robotics": "FetchReach-v4",
    "procgen": "CoinrunEasy-v0",
    "toy_text": "FrozenLake-v1",
}
STEPS, LIMIT, NUM_ENVS, SECONDS = 50, 8, 4, 600


def families() -> dict[str, tuple[int, int, str]]:
    """Return, by family, the number of names, the number that can be trained, and an example."""
    usable, found = set(adapter.names()), collections.defaultdict(list)
    for name, (module, *_) in adapter._registered().items():
        found[module.removeprefix("envpool.")].append(name)
    return {
        family: (len(names), sum(name in usable for name in names), example(family, [x for x in names if x in usable]))
        for family, names in sorted(found.items())
    }


def example(family: str, usable: list[str]) -> str:
    """Return the family's example, which must be usable."""
    chosen = EXAMPLES.get(family, usable[0])
    return chosen if chosen in usable else usable[0]


def tried(name: str) -> dict[str, str]:
    """Return the results of testing one environment, by column of the table."""
    recipe = jaxrl.make(f"envpool:{name}", num_threads=1)
    found = {"observation": brief(recipe.observation_space), "action": brief(recipe.action_space)}
    jaxrl.check_env(recipe, steps=STEPS)
    found["ends"] = endings(name)
    result = jaxrl.train(
        jaxrl.PPO(rollout_length=16, epochs=1, minibatches=1),
        recipe,
        total_steps=16 * NUM_ENVS,
        num_envs=NUM_ENVS,
        evaluation_episodes=1,
        eval_env=limited(name) or recipe,
        progress=False,
    )
    assert result.metrics, "no update was made"
    return found | {"works": "checked, trained"}


def endings(name: str) -> str:
    """Return how a time limit of `LIMIT` steps is reported, and after how many steps EnvPool's own limit applies."""
    own = adapter._spec(name, {})[0].get("max_episode_steps")
    recipe = limited(name)
    if recipe is None:
        return "by its own rules"
    host = recipe.build(NUM_ENVS, 0)
    draw, cut, longest = random_actions(recipe), set(), 0
    try:
        host.reset()
        for _ in range(STEPS):
            timestep = host.step(draw())
            cut |= set(timestep.episode.length[timestep.truncated].tolist())
            longest = max(longest, int(timestep.episode.length.max()))
    finally:
        host.close()
    limit = f"{own:,} steps" if 0 < own < 2**31 - 1 else "none by default"
    if not cut:
        return f"{limit}; it terminates before, after {longest} here"
    return f"{limit}, truncated{', one step late' if cut == {LIMIT + 1} else ''}" + f", at {cut}" * (min(cut) < LIMIT)


def limited(name: str):
    """Return the environment with episodes of at most `LIMIT` steps, or None if EnvPool has no such option."""
    try:
        return jaxrl.make(f"envpool:{name}", num_threads=1, max_episode_steps=LIMIT)
    except ConfigError:
        return None


def random_actions(recipe):
    """Return a function that samples a batch of actions."""
    import jax

    keys = iter(jax.random.split(jax.random.key(0), STEPS))
    draw = jax.jit(jax.vmap(recipe.action_space.sample))
    return lambda: jax.tree.map(lambda x: jax.device_get(x), draw(jax.random.split(next(keys), NUM_ENVS)))


def brief(space: spaces.Space) -> str:
    """Return a space in a few characters."""
    if isinstance(space, spaces.Dict):
        parts = [f"{name} {brief(child)}" for name, child in space.items]
        return ", ".join(parts) if len(parts) <= 3 else f"{', '.join(parts[:2])} and {len(parts) - 2} more"
    if isinstance(space, spaces.Discrete):
        return f"{space.n} choices"
    if isinstance(space, spaces.MultiDiscrete):
        return f"{len(space.nvec)} of up to {max(space.nvec)} choices"
    return f"{space.dtype.name} {'x'.join(map(str, space.shape)) or 'number'}"


def in_a_process(name: str) -> dict[str, str]:
    """Run `tried` in a process; return its result, or the last line of its error."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--try", name], capture_output=True, text=True, timeout=SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"works": f"still busy after {SECONDS} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    said = done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"]
    return {"works": f"fails: {said[-1]}"}


def main(chosen: list[str]) -> None:
    all_of = {family: row for family, row in families().items() if not chosen or family in chosen}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        results = pool.map(in_a_process, [name for *_, name in all_of.values()])
        lines = [
            "| family | names | example | observation | action | time limit | tests |",
            "|---|---|---|---|---|---|---|",
        ]
        for (family, (count, usable, name)), row in zip(all_of.items(), results, strict=True):
            numbers = f"{count}" if usable == count else f"{count}, {usable} usable"
            cells = [row.get(key, "") for key in ("observation", "action", "ends", "works")]
            lines.append("| " + " | ".join([family, numbers, f"`{name}`", *cells]) + " |")
            print(lines[-1], flush=True)
    if not chosen:
        before, _, rest = PAGE.read_text().partition("<!-- families -->\n")
        _, _, after = rest.partition("<!-- end of families -->")
        PAGE.write_text(f"{before}<!-- families -->\n" + "\n".join(lines) + f"\n<!-- end of families -->{after}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--try"]:
        print(json.dumps(tried(sys.argv[2])))
    else:
        main(sys.argv[1:])
