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
from helpers.curve_pictures import table

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
_SCORES = "environment | algorithm | mean | worst | IQM | published | steps | seeds"

_EACH = "training | mean | each seed"

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
    "SAC in MountainCarContinuous, `--noise random_correlation=none`": "mountaincarcontinuous",
    "the same, at the defaults": "mountaincarcontinuous-defaults",
    "SAC in Pendulum, (64, 64)": "pendulum",
}


def with_tables(text: str) -> str:
    """Return a page with the tables between `<!-- records: NAME -->` and `<!-- end -->` made again."""
    return _PLACE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def _read(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / f"{name}.json").read_text())


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
        lines.append([*what, *scores, published, steps, seeds])
        if isinstance(settings, dict) and "command" in settings:  # others have their settings in the record
            missing = "" if "--total-steps" in settings["command"] else f" --total-steps {record['total_steps']}"
            commands.append(settings["command"] + missing)
    shown = "\n".join(commands)
    folded = f'<details markdown="1"><summary>The commands</summary>\n\n```shell\n{shown}\n```\n\n</details>'
    return f"{table(_SCORES, lines)}\n\n{folded}"


def _offline() -> str:
    rows = _read("learning-offline-pendulum")["rows"]
    return table(_EACH, [[row["run"], f"{row['mean']:.2f}", _each(row["scores"], ".2f")] for row in rows])


def _imitation() -> str:
    lines = []
    for name in ("sqil", "gail"):
        record = _read(f"learning-{name}-pendulum")
        [row] = record["rows"]
        what = f"{name.upper()}, Pendulum, {record['steps']:,} steps"
        lines.append([what, f"{row['mean']:.3f}", _each(row["scores"], ".3f")])
    return table(_EACH, lines)


def _demonstrations() -> str:
    lines = []
    for what, name in DEMONSTRATIONS.items():
        record = _read(f"learning-demonstrations-{name}")
        steps = {row["demonstrations"]: f"{row['mean']:,.0f} ({max(row['steps']):,})" for row in record["rows"]}
        share = f"{record['share_of_steps']:.2f}"
        lines.append([what, f"{record['mark']:g}", steps["without"], steps["with"], share])
    return table("training | mark | steps without | steps with | share", lines)


def _memory_needed() -> str:
    rows = _read("learning-hidden-velocity")["rows"]
    lines = [[row["run"], f"{row['mean']:g}", f"{row['worst']:g}", len(row["scores"])] for row in rows]
    return table("training | mean | worst | seeds", lines)


def _searches() -> str:
    summary = _read("tune")["summary"]
    lines = []
    for kind, name in (("tpe", "Bayesian (TPE)"), ("random", "random"), ("tpe - random", "the difference")):
        found = summary[kind]
        lines.append([name, f"{found['mean']:.0f}", f"{found['low']:.0f} to {found['high']:.0f}"])
    return table("search | mean | 95 % interval", lines)


def _populations() -> str:
    lines = []
    for part in _read("pbt")["parts"].values():
        rows, about = part["rows"], part["settings"]
        repeats = {kind: [row for row in rows if row["kind"] == kind] for kind in ("PBT", "random")}
        steps = f"{about['population']} x {about['total_steps'] // 1000}k"
        algorithm = rows[0]["task"].partition("-")[0].upper()
        for kind, name in (("PBT", "population"), ("random", "random search")):
            each = _each((row["fresh"] for row in repeats[kind]), ".0f")
            middle = statistics.median(row["median member"] for row in repeats[kind])
            task = f"{algorithm} on {about['env'].partition(':')[2]}, {steps}" if kind == "PBT" else ""
            lines.append([task, name, f"{part['summary'][kind]:.0f}", each, f"{middle:.0f}"])
    return table("task, members x steps | search | winner, median | each repeat | median member", lines)


def _interrupted() -> str:
    record = _read("learning-halfcheetah-sac")
    scores = ", ".join(f"{row['return_mean']:,.0f} at {row['step'] // 1000}k" for row in record["rows"])
    return f"{record['reached_steps']:,} of {record['asked_steps']:,} steps (one seed): {scores}."


def _highlights() -> str:
    """README's figures, each with the command that makes its record."""
    speed = {row["work"]: row for row in _read("throughput")["rows"]}
    single = speed["PPO CartPole, 4"]["jaxrl / rejax, each with one thread"]
    many, sweep = (speed[f"PPO CartPole, {work}"]["jaxrl train / rejax"] for work in ("64", "64, 8 seeds"))
    host = {row["task"]: row["jaxrl / SB3"] for row in _read("host")["rows"] if "jaxrl / SB3" in row}
    took = _read("replay")["microseconds"]
    replays = (took[f"flashbax, {kind}"] / took[f"ours, {kind}"] for kind in ("prioritized", "uniform"))
    breakout = _read("learning-defaults-minatar-breakout-ppo")
    [scores] = breakout["rows"]
    lines = [
        [
            f"return of the worst of 50 runs: {', '.join(CARTPOLE).upper()} on CartPole, 10 seeds each",
            f"{min(_worst(f'defaults-cartpole-{algo}') for algo in CARTPOLE):.0f} of 500",
            "`benchmarks/zoo.py`",
        ],
        [
            "mean return of 3 runs: PPO on MinAtar Breakout, 10M steps",
            f"{scores['mean']:.1f} (gymnax: {breakout['published'].split()[0]})",
            f"`{breakout['run']}`",
        ],
        [
            "speed relative to rejax: PPO on CartPole, 4 environments (one thread each), 64, 64 with 8 seeds",
            ", ".join(f"{ratio:.2f}" for ratio in (single, many, sweep)),
            "`benchmarks/throughput.py`",
        ],
        [
            "speed relative to SB3: PPO on CartPole, 128 environments of EnvPool",
            f"{host['PPO in CartPole-v1']:.2f}",
            "`benchmarks/host.py`",
        ],
        [
            "speed relative to flashbax: prioritized and uniform replay of 1M transitions",
            " and ".join(f"{ratio:.2f}" for ratio in replays),
            "`benchmarks/replay.py`",
        ],
    ]
    return table("measurement | figure | command", lines)


def _throughput() -> str:
    def of(row, peer):
        alike = _maybe(row, f"jaxrl / {peer}, each with one thread", ".2f")
        return _maybe(row, f"jaxrl train / {peer}", ".2f") + (f"; {alike}" if alike else "")

    lines = []
    for row in _read("throughput")["rows"]:
        peers, threads = [of(row, peer) for peer in ("rejax", "purejaxrl")], "one thread / one a core"
        lines.append([row["work"], _thousands(row["jaxrl train (steps/s)"]), *peers, _maybe(row, threads, ".2f")])
    header = "task, environments | steps/s | relative to rejax | relative to purejaxrl | one thread / one per core"
    return table(header, lines)


def _limits() -> str:
    names = {"sac": "SAC Pendulum", "td3": "TD3 Pendulum", "dqn": "DQN CartPole", "ppo": "PPO CartPole"}
    lines = []
    for row in _read("limits")["rows"]:
        what = [f"{names[row['algorithm']]}, {row['num_envs']}", _each(row["widths"])]
        threads, speed = "one" if row["one thread"] else "all", _thousands(row["jaxrl (steps/s)"])
        others = [_maybe(row, f"jaxrl / {other}", ".3g") for other in ("bare loop", "SBX")]
        lines.append([*what, threads, speed, *others])
    header = "task, environments | units | threads | steps/s | relative to the bare loop | relative to SBX"
    return table(header, lines)


def _sampling() -> str:
    rows = _read("sampling")["rows"]
    lines = [[row["way"], _thousands(row["steps/s"]), f"{row['of serial']:.2f}"] for row in rows]
    return table("mode | steps/s | relative to serial", lines)


def _step() -> str:
    shown = ("an actor steps", "an actor acts", "an actor waits for the learner", "the learner waits")
    lines = []
    for row in _read("host")["rows"]:
        if shares := row.get("shares of time"):
            each = [f"{shares[name]:.0%}".replace("%", " %") for name in shown]
            lines.append([f"{row['task'].removesuffix('-v5')}, {row['num_envs']} environments", *each])
    return table(f"work | {' | '.join(shown)}", lines)


def _jax_or_envpool() -> str:
    lines = []
    for row in _read("jax-or-envpool")["rows"]:
        speeds = [_short(row[f"{name} (steps/s)"]) for name in ("JAX", "EnvPool")]
        lines.append([row["jax"], f"{row['num_envs']:,}", *speeds, f"{row['JAX / EnvPool']:.2g}"])
    return table("JAX environment | environments | JAX | EnvPool | JAX / EnvPool", lines)


def _memory() -> str:
    lines = []
    for row in _read("memory")["rows"]:
        sizes = [f"{row[f'{name} (bytes)'] / 1e6:.0f} MB" for name in ("predicted", "measured")]
        lines.append([row["work"], *sizes, f"{row['measured / predicted']:.2f}"])
    return table("work | predicted | measured | measured / predicted", lines)


def _accelerator() -> str:
    """Return the throughput on an accelerator, and what peers come to in the same run."""
    parts = _read("accelerator-nvidia-h200")["parts"]
    lines = []
    for row in parts["throughput"]["rows"]:
        if "left out" in row:
            continue
        runs = f"{row['seeds']} x " if "seeds" in row else ""
        what = f"{row['work']}, {runs}{row['num_envs']:,}"
        lines.append([what, _short(row["steps/s"]), _maybe(row, "ms an iteration", ".3g")])
    beside: dict[tuple[int, int], dict[str, float]] = {}
    for row in parts["peers"]["rows"]:
        peer = row["work"].removeprefix("PPO CartPole beside ")
        beside.setdefault((row["num_envs"], row["seeds"]), {})[peer] = row[f"jaxrl / {peer}"]
    peers = [
        [f"{num_envs:,}", seeds, f"{ratios['rejax']:.2f}", f"{ratios['purejaxrl']:.2f}"]
        for (num_envs, seeds), ratios in sorted(beside.items())
    ]
    return (
        table("work, environments | steps/s | ms per iteration", lines)
        + "\n\nThe next table shows jaxrl's speed on CartPole divided by that of others, measured in alternation.\n\n"
        + table("environments | seeds | rejax | purejaxrl", peers)
    )


def _each(values: Iterable[float], form: str = "") -> str:
    return ", ".join(format(value, form) for value in values)


def _maybe(row: dict[str, Any], name: str, form: str) -> str:
    """Return a number of a row that not every row has."""
    return format(row[name], form) if name in row else ""


def _thousands(rate: float) -> str:
    return f"{rate / 1e3:.3g}k"


def _short(rate: float) -> str:
    size, unit = next((size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if rate >= size)
    return f"{rate / size:.3g}{unit}"


def _gallery() -> str:
    """Return what `benchmarks/gallery.py` trained: a picture, the command and the score of each."""
    lines = []
    for name, part in _read("gallery")["parts"].items():
        found, picture = part["evaluation"], f"![{part['what']}](assets/gallery/{name}.gif)"
        score = f"{found['return_mean']:.4g} ± {found['return_std']:.2g} over {found['episodes']} episodes"
        lines.append([picture, f"**{part['what']}**: {score.replace('-', chr(0x2212))}. `{part['run']}`"])
    return table("|", lines)


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
