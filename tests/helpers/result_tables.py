"""The tables of figures in README and pages, as the records in benchmarks/results have them.

`tests/test_docs.py` compares the pages with them; `scripts/update_results.py` writes them to the pages.
"""

import functools
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from typing import Any

from helpers import curve_pictures, zoo_tables

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import scaling  # noqa: E402  needs the path above

PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "results.md",
    ROOT / "docs" / "zoo.md",
    ROOT / "docs" / "choosing.md",
    ROOT / "docs" / "ablations.md",
    ROOT / "docs" / "gallery.md",
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "envpool.md",
    ROOT / "docs" / "scaling.md",
    ROOT / "docs" / "pbt.md",
    *sorted(curve_pictures.PAGES.glob("*.md")),
)
RECORDS = ROOT / "benchmarks" / "results"
_PLACE = re.compile(r"(<!-- records: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SCORES = "environment | algorithm | mean | worst | IQM | published | steps | seeds |"

CARTPOLE = ("ppo", "a2c", "impala", "pqn", "dqn")
# Longer trainings: environment and algorithm of each, by its record.
TRAININGS = {
    "minatar-breakout": ("MinAtar Breakout", "PPO (`purejaxrl-minatar`)"),
    "minatar-breakout-5m-ppo": ("MinAtar Breakout", "PPO (`purejaxrl-minatar`)"),
    "minatar-breakout-5m-dqn": ("MinAtar Breakout", "DQN"),
    "minatar-breakout-5m-rainbow": ("MinAtar Breakout", "Rainbow"),
    "host-pendulum-ppo": ("Pendulum-v1 (EnvPool)", "PPO"),
    "halfcheetah-defaults-clip": ("HalfCheetah-v4", "PPO"),
    "mujoco-halfcheetah-ppo": ("HalfCheetah-v4", "PPO"),
    "mujoco-hopper-ppo": ("Hopper-v4", "PPO"),
    "mujoco-walker2d-ppo": ("Walker2d-v4", "PPO"),
    "halfcheetah-defaults-kl": ("HalfCheetah-v4", "PPO, KL penalty"),
    "host-pendulum-sac": ("Pendulum-v1 (Gymnasium)", "SAC"),
    "halfcheetah-sac-defaults": ("HalfCheetah-v4", "SAC"),
    "halfcheetah-100k-sac": ("HalfCheetah-v4", "SAC, networks of 64"),
    "halfcheetah-100k-crossq": ("HalfCheetah-v4", "CrossQ, networks of 64"),
    "pong-ppo": ("Pong-v5 (EnvPool)", "PPO, a smaller network"),
}
# Runs until an evaluation reaches a mark, with and without demonstrations.
DEMONSTRATIONS = {
    "DQN in MountainCar, at the defaults": "mountaincar-dqn",
    "SAC in MountainCarContinuous, `--random-correlation none`": "mountaincarcontinuous",
    "the same, at the defaults": "mountaincarcontinuous-defaults",
    "SAC in Pendulum, (64, 64)": "pendulum",
}


def with_tables(text: str) -> str:
    """Return a page with the tables between `<!-- records: NAME -->` and `<!-- end -->` made again."""
    return _PLACE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def _read(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / f"{name}.json").read_text())


def _table(header: str, lines: list[str]) -> str:
    return "\n".join([f"| {header}", "|" + "---|" * header.count("|"), *lines])


def _trainings() -> str:
    """Return a table of scores, and the commands of its rows below it, folded in: beside scores they leave no room."""
    lines, commands = [], []
    for name, what in TRAININGS.items():
        record = _read(f"learning-{name}")
        [row], reference, settings = record["rows"], record["reference"], record["settings"]
        # Some were held against what an issue asked for, which nobody published.
        ours = any(word in reference["source"] for word in ("issue", "beside it"))
        published = "" if ours else f"{reference['score']:g} ({reference['source']})"
        scores = [f"{score:g}" for score in (row["mean"], min(row["scores"]), row["interquartile_mean"])]
        steps, seeds = _short(record["total_steps"]), str(len(row["scores"]))
        lines.append(f"| {' | '.join([*what, *scores, published, steps, seeds])} |")
        if isinstance(settings, dict) and "command" in settings:  # others have their settings in the record
            missing = "" if "--total-steps" in settings["command"] else f" --total-steps {record['total_steps']}"
            commands.append(settings["command"] + missing)
    shown, table = "\n".join(commands), _table(_SCORES, lines)
    return f'{table}\n\n<details markdown="1"><summary>The commands</summary>\n\n```shell\n{shown}\n```\n\n</details>'


def _offline() -> str:
    lines = [
        f"| {row['run']} | {row['mean']:.2f} | {', '.join(f'{score:.2f}' for score in row['scores'])} |"
        for row in _read("learning-offline-pendulum")["rows"]
    ]
    return _table("training | mean | each seed |", lines)


def _imitation() -> str:
    lines = []
    for name in ("sqil", "gail"):
        record = _read(f"learning-{name}-pendulum")
        [row] = record["rows"]
        each = ", ".join(f"{score:.3f}" for score in row["scores"])
        lines.append(f"| {name.upper()}, Pendulum, {record['steps']:,} steps | {row['mean']:.3f} | {each} |")
    return _table("training | mean | each seed |", lines)


def _demonstrations() -> str:
    lines = []
    for what, name in DEMONSTRATIONS.items():
        record = _read(f"learning-demonstrations-{name}")
        steps = {row["demonstrations"]: f"{row['mean']:,.0f} ({max(row['steps']):,})" for row in record["rows"]}
        without, beside = steps["without"], steps["with"]
        lines.append(f"| {what} | {record['mark']:g} | {without} | {beside} | {record['share_of_steps']:.2f} |")
    return _table("training | mark | steps without | steps with | share |", lines)


def _memory_needed() -> str:
    lines = [
        f"| {row['run']} | {row['mean']:g} | {row['worst']:g} | {len(row['scores'])} |"
        for row in _read("learning-hidden-velocity")["rows"]
    ]
    return _table("training | mean | worst | seeds |", lines)


def _searches() -> str:
    record = _read("tune")
    names = {"tpe": "Bayesian (TPE)", "random": "random", "tpe - random": "the difference"}
    lines = [
        f"| {name} | {found['mean']:.0f} | {found['low']:.0f} to {found['high']:.0f} |"
        for name, found in ((name, record["summary"][kind]) for kind, name in names.items())
    ]
    return _table("search | mean | 95 % interval |", lines)


def _populations() -> str:
    lines = []
    for part in _read("pbt")["parts"].values():
        rows, about = part["rows"], part["settings"]
        repeats = {kind: [row for row in rows if row["kind"] == kind] for kind in ("PBT", "random")}
        steps = f"{about['population']} x {about['total_steps'] // 1000}k"
        algorithm = rows[0]["task"].partition("-")[0].upper()
        for kind, name in (("PBT", "population"), ("random", "random search")):
            each = ", ".join(f"{row['fresh']:.0f}" for row in repeats[kind])
            middle = statistics.median(row["median member"] for row in repeats[kind])
            task = f"{algorithm} on {about['env'].partition(':')[2]}, {steps}" if kind == "PBT" else ""
            lines.append(f"| {task} | {name} | {part['summary'][kind]:.0f} | {each} | {middle:.0f} |")
    return _table("task, members x steps | search | winner, median | each repeat | median member |", lines)


def _interrupted() -> str:
    record = _read("learning-halfcheetah-sac")
    scores = ", ".join(f"{row['return_mean']:,.0f} at {row['step'] // 1000}k" for row in record["rows"])
    return f"{record['reached_steps']:,} of {record['asked_steps']:,} steps (one seed): {scores}."


def _highlights() -> str:
    """README's figures, each with the command that makes its record."""
    solved = min(_worst(f"defaults-cartpole-{algo}") for algo in CARTPOLE)
    acrobot, pendulum = _worst("defaults-acrobot-ppo"), _worst("defaults-pendulum-ppo")
    speed = {row["work"]: row for row in _read("throughput")["rows"]}
    against = ["jaxrl train / rejax", "jaxrl / rejax, each with one thread"]
    few = _times(speed["PPO CartPole, 4"][name] for name in against)
    many = _times(speed[f"PPO CartPole, {envs}"][against[0]] for envs in (64, 2048))
    sweep = _times(speed["PPO CartPole, 64, 8 seeds"][name] for name in ("seeds / one seed", "jaxrl train / rejax"))
    host = {row["task"]: row["jaxrl / SB3"] for row in _read("host")["rows"] if "jaxrl / SB3" in row}
    took = _read("replay")["microseconds"]
    theirs = (took[f"flashbax, prioritized{more}"] for more in ("", ", priorities depend on weights"))
    prioritized = _times(microseconds / took["ours, prioritized"] for microseconds in theirs)
    uniform = _times([took["flashbax, uniform"] / took["ours, uniform"]])
    breakout = _read("learning-defaults-minatar-breakout-ppo")
    [scores] = breakout["rows"]
    each = ", ".join(f"{score:.1f}" for score in scores["scores"])
    script = "`.venv/bin/python benchmarks/{}.py`".format
    lines = [
        f"| score of the worst seed with default settings: {', '.join(CARTPOLE).upper()} on CartPole, 10 seeds; PPO on "
        f"Acrobot; PPO on Pendulum, 5 seeds | {solved:.0f}; {acrobot:.0f}; {pendulum:.0f} "
        "| `.venv/bin/python benchmarks/zoo.py --row NAME`, with the names in the [zoo](docs/zoo.md) |",
        f"| PPO on MinAtar Breakout with default settings, 10M steps, 3 seeds: mean; each seed; published "
        f"| {scores['mean']:.1f}; {each}; {breakout['published']} | `{breakout['run']}` |",
        "| speed of PPO on CartPole relative to rejax: 4 environments (jaxrl with one thread, rejax with two); 4 (one "
        f"thread each); 64 and 2048 environments (two threads each) | {few}; {many} | {script('throughput')} |",
        f"| speed of a sweep of 8 seeds: relative to one seed; relative to rejax under `vmap` | {sweep} | the same |",
        "| speed of PPO with EnvPool relative to Stable-Baselines3, which steps 8 Gymnasium environments in its own "
        "process: CartPole with 128 EnvPool environments; HalfCheetah with 32 "
        f"| {_times(host[f'PPO in {name}'] for name in ('CartPole-v1', 'HalfCheetah-v4'))} | {script('host')} |",
        "| speed of a replay buffer of 1M transitions relative to flashbax: prioritized; prioritized, if new "
        "priorities depend on the weights; uniform "
        f"| {prioritized}; {uniform} | `.venv/bin/python benchmarks/replay.py --repeats 100` |",
    ]
    return _table("measurement | figure | command |", lines)


def _throughput() -> str:
    def ratio(row, name):
        return f"{row[name]:.2f}" if name in row else ""

    def of(row, peer):
        alike = ratio(row, f"jaxrl / {peer}, each with one thread")
        return ratio(row, f"jaxrl train / {peer}") + (f"; {alike}" if alike else "")

    lines = [
        f"| {row['work']} | {row['jaxrl train (steps/s)'] / 1e3:.3g}k | {of(row, 'rejax')} | {of(row, 'purejaxrl')} "
        f"| {ratio(row, 'one thread / one a core')} |"
        for row in _read("throughput")["rows"]
    ]
    return _table(
        "task, environments | steps/s | relative to rejax | relative to purejaxrl | one thread to one per core |",
        lines,
    )


def _limits() -> str:
    def of(row, name):
        return f"{row[name]:.3g}" if name in row else ""

    names = {"sac": "SAC Pendulum", "td3": "TD3 Pendulum", "dqn": "DQN CartPole", "ppo": "PPO CartPole"}
    lines = [
        f"| {names[row['algorithm']]}, {row['num_envs']} | {', '.join(str(width) for width in row['widths'])} "
        f"| {'one' if row['one thread'] else 'all'} | {row['jaxrl (steps/s)'] / 1e3:.3g}k "
        f"| {of(row, 'jaxrl / bare loop')} | {of(row, 'jaxrl / SBX')} |"
        for row in _read("limits")["rows"]
    ]
    return _table(
        "task, environments | units | threads | steps/s | relative to the bare loop | relative to SBX |", lines
    )


def _sampling() -> str:
    lines = [
        f"| {row['way']} | {row['steps/s'] / 1e3:.3g}k | {row['of serial']:.2f} |" for row in _read("sampling")["rows"]
    ]
    return _table("mode | steps/s | relative to serial |", lines)


def _step() -> str:
    shown = ("an actor steps", "an actor acts", "an actor waits for the learner", "the learner waits")
    lines = []
    for row in _read("host")["rows"]:
        if shares := row.get("shares of time"):
            each = " | ".join(f"{shares[name]:.0%}".replace("%", " %") for name in shown)
            lines.append(f"| {row['task'].removesuffix('-v5')}, {row['num_envs']} environments | {each} |")
    return _table(f"work | {' | '.join(shown)} |", lines)


def _jax_or_envpool() -> str:
    lines = [
        f"| {row['jax']} | {row['num_envs']:,} | {_short(row['JAX (steps/s)'])} | {_short(row['EnvPool (steps/s)'])} "
        f"| {row['JAX / EnvPool']:.2g} |"
        for row in _read("jax-or-envpool")["rows"]
    ]
    return _table("JAX environment | how many | JAX | EnvPool | JAX / EnvPool |", lines)


def _memory() -> str:
    lines = [
        f"| {row['work']} | {row['predicted (bytes)'] / 1e6:.0f} MB | {row['measured (bytes)'] / 1e6:.0f} MB "
        f"| {row['measured / predicted']:.2f} |"
        for row in _read("memory")["rows"]
    ]
    return _table("work | predicted | measured | measured / predicted |", lines)


def _accelerator() -> str:
    """Return the throughput on an accelerator, and what peers come to in the same run."""
    parts = _read("accelerator-nvidia-h200")["parts"]
    lines = []
    for row in parts["throughput"]["rows"]:
        if "left out" in row:
            continue
        runs = f"{row['seeds']} x " if "seeds" in row else ""
        milliseconds = f"{row['ms an iteration']:.3g}" if "ms an iteration" in row else ""
        lines.append(f"| {row['work']}, {runs}{row['num_envs']:,} | {_short(row['steps/s'])} | {milliseconds} |")
    beside: dict[tuple[int, int], dict[str, float]] = {}
    for row in parts["peers"]["rows"]:
        peer = row["work"].removeprefix("PPO CartPole beside ")
        beside.setdefault((row["num_envs"], row["seeds"]), {})[peer] = row[f"jaxrl / {peer}"]
    peers = [
        f"| {num_envs:,} | {seeds} | {ratios['rejax']:.2f} | {ratios['purejaxrl']:.2f} |"
        for (num_envs, seeds), ratios in sorted(beside.items())
    ]
    return (
        _table("work, environments | steps/s | ms per iteration |", lines)
        + "\n\nThe next table has jaxrl's speed on CartPole divided by that of others, alternating in one run.\n\n"
        + _table("environments | seeds | rejax | purejaxrl |", peers)
    )


def _short(rate: float) -> str:
    size, unit = next((size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if rate >= size)
    return f"{rate / size:.3g}{unit}"


def _gallery() -> str:
    """Return what `benchmarks/gallery.py` trained: a picture, the command and the score of each."""
    lines = []
    for name, part in _read("gallery")["parts"].items():
        found, picture = part["evaluation"], f"![{part['what']}](assets/gallery/{name}.gif)"
        score = f"{found['return_mean']:.4g} ± {found['return_std']:.2g} over {found['episodes']} episodes"
        lines.append(f"| {picture} | **{part['what']}**: {score.replace('-', chr(0x2212))}. `{part['run']}` |")
    return _table("| |", lines)


def _times(ratios: Iterable[float]) -> str:
    return "; ".join(f"{ratio:.2f} times" for ratio in ratios)


def _worst(name: str) -> float:
    return min(_read(f"learning-{name}")["rows"][0]["scores"])


TABLES: dict[str, Callable[[], str]] = {
    "zoo": zoo_tables.block,
    "compared": zoo_tables.comparisons,
    **{f"ablation-{name}": functools.partial(zoo_tables.ablation, name) for name in ("muon", "hl-gauss", "symlog")},
    "trainings": _trainings,
    "halfcheetah": _interrupted,
    "imitation": _imitation,
    "demonstrations": _demonstrations,
    "memory-needed": _memory_needed,
    "searches": _searches,
    "populations": _populations,
    "offline": _offline,
    "highlights": _highlights,
    "gallery": _gallery,
    "throughput": _throughput,
    "limits": _limits,
    "sampling": _sampling,
    "step": _step,
    "memory": _memory,
    "jax-or-envpool": _jax_or_envpool,
    **{
        f"curve-{path.stem}": functools.partial(curve_pictures.block, path.stem)
        for path in curve_pictures.PAGES.glob("*.md")
    },
    "accelerator": _accelerator,
    "scaling-work": scaling.work,
    "scaling-weak": scaling.weak,
    "scaling-strong": scaling.strong,
}
