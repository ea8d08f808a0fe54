"""Population-based training compared with random search at equal steps: PPO on Acrobot and Pendulum, SAC on Pendulum.

    python benchmarks/pbt.py [--only ppo-pendulum] [--repeats 5]
    python benchmarks/pbt.py --small    # quick test of the benchmark: minutes, without a record

Both use the same wide search space and the same number of environment steps. In each repeat, they use the same samples
and seeds: until members copy each other, the population and the random search train identical runs, so only the copies
differ. The best final evaluation wins. The result is the mean return of each winner in fresh episodes, not used in
training or selection. Over the repeats, the record has the median of each method, the median difference of pairs, and
the number of pairs in which PBT is better; also the median of all members at the end, and the winner's selection score.

Finished repeats are stored in `.cache/pbt.json`: the same command continues with the next pair after it was killed; at
another commit, it starts over. `--only` keeps the record's other tasks unchanged.
"""

import argparse
import json
import pathlib
import sys
import time
from typing import Any

import numpy as np

import jaxrl
from jaxrl import networks
from jaxrl.core.keys import held_out_seed

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

KEPT = record.ROOT / ".cache" / "pbt.json"
_RATE, _SMALL = jaxrl.LogUniform(1e-6, 1.0), networks.MLP((64, 64))
# Every field of the tables that `jaxrl.pbt` begins with is named: those in "space" differ, the others are fixed.
TASKS: dict[str, dict[str, Any]] = {
    "ppo-acrobot": {
        "algo": jaxrl.PPO(rollout_length=64),
        "env": "gymnax:Acrobot-v1",
        "num_envs": 8,
        "total_steps": 100_000,
        "population": 12,
        "space": {
            "learning_rate": _RATE,
            "entropy_cost": jaxrl.LogUniform(1e-4, 10.0),
            "clip": jaxrl.LogUniform(1e-3, 1.0),
            "gae_lambda": jaxrl.Uniform(0.0, 1.0),
        },
        "fixed": {"gamma": 0.99, "value_cost": 0.5, "max_grad_norm": 0.5},
    },
    "ppo-pendulum": {
        "algo": jaxrl.PPO(rollout_length=64),
        "env": "gymnax:Pendulum-v1",
        "num_envs": 16,
        "total_steps": 150_000,
        "population": 12,
        "space": {
            "learning_rate": _RATE,
            "entropy_cost": jaxrl.LogUniform(1e-6, 1.0),
            "clip": jaxrl.LogUniform(1e-3, 1.0),
            "gae_lambda": jaxrl.Uniform(0.0, 1.0),
            "gamma": [0.8, 0.9, 0.95, 0.99, 0.999],
        },
        "fixed": {"value_cost": 0.5, "max_grad_norm": 0.5},
    },
    "sac-pendulum": {
        "algo": jaxrl.SAC(
            batch_size=64,
            capacity=20_000,
            min_size=500,
            policy=networks.Actor(torso=_SMALL),
            critic=networks.Critic(torso=_SMALL),
        ),
        "env": "gymnax:Pendulum-v1",
        "num_envs": 4,
        "total_steps": 10_000,
        "population": 8,
        "exploit_from": 0.5,  # no member has learned before; chosen on repeat 2, which had failed
        "space": {
            "learning_rate": _RATE,
            "policy_learning_rate": _RATE,
            "temperature.learning_rate": _RATE,
            "tau": jaxrl.LogUniform(1e-4, 1.0),
        },
        "fixed": {"gamma": 0.99},
    },
}
KINDS = ("PBT", "random")
EPISODES = 256


def searched(task: str, repeat: int, small: bool) -> list[dict[str, Any]]:
    """Run PBT and random search with the same samples; return winners' fresh returns and all scores."""
    about = TASKS[task]
    shared: dict[str, Any] = {"num_envs": about["num_envs"], "evaluation_episodes": EPISODES, "progress": False}
    shared["total_steps"] = about["total_steps"] // (20 if small else 1)
    how = {"population": about["population"], "seed": repeat, "fraction": 0.25}
    how["exploit_from"] = about.get("exploit_from", 0.0)
    began = time.monotonic()
    result: Any = jaxrl.pbt(about["algo"], about["env"], **how, **shared, **about["space"], **about["fixed"])
    scores, failed = result.scores[:, 0], int(result.failed.sum())
    rows = [row(task, "PBT", repeat, scores, failed, result.fresh_score, began)]

    began, runs = time.monotonic(), []
    for member, seed in enumerate(result.member_seeds):
        drawn = {name: float(values[0, member]) for name, values in result.lineage.hyperparameters.items()}
        algo = about["algo"].replace(**drawn, **about["fixed"])
        runs.append(jaxrl.train(algo, about["env"], seed=seed, evaluate_every=0, **shared))
    ended = [run.stopped == "finished" for run in runs]
    scores = np.asarray([run.evaluation.return_mean if run.evaluation else np.nan for run in runs])
    winner = runs[int(np.nanargmax(np.where(ended, scores, np.nan)))].policy
    found = jaxrl.evaluate(
        winner.algo, winner.actor, about["env"], winner.spec, episodes=EPISODES, seed=held_out_seed(repeat)
    )
    return [*rows, row(task, "random", repeat, scores, len(runs) - sum(ended), found.return_mean, began)]


def row(
    task: str, kind: str, repeat: int, scores: np.ndarray, failed: int, fresh: float, began: float
) -> dict[str, Any]:
    scores = np.nan_to_num(scores, nan=float(np.nanmin(scores)))  # failed members count as the worst
    return {
        "task": task,
        "kind": kind,
        "repeat": repeat,
        "fresh": fresh,
        "chosen by": float(scores.max()),
        "median member": float(np.median(scores)),
        "failed": failed,
        "seconds": time.monotonic() - began,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the medians over repeats of each method, and the paired results of PBT."""
    fresh = {kind: np.asarray([row["fresh"] for row in rows if row["kind"] == kind]) for kind in KINDS}
    found = {kind: float(np.median(values)) for kind, values in fresh.items()}
    difference = fresh["PBT"] - fresh["random"]
    return found | {"median difference": float(np.median(difference)), "pairs better": int(np.sum(difference > 0))}


def kept(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the searches that the same command finished before it was killed."""
    held = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return held["rows"] if held.get("settings") == settings else []


def keep(settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    KEPT.parent.mkdir(exist_ok=True)
    beside = KEPT.with_suffix(".tmp")
    beside.write_text(json.dumps({"settings": settings, "rows": rows}))
    beside.replace(KEPT)


def described(task: str) -> dict[str, Any]:
    """Return the description of a task for the record."""
    about = TASKS[task]
    found = {name: about[name] for name in ("env", "num_envs", "total_steps", "population", "fixed")}
    return found | {"space": {name: repr(values) for name, values in about["space"].items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(TASKS), help="run only this task")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a twentieth of the steps, 2 repeats, and no record")
    arguments = parser.parse_args()
    repeats = 2 if arguments.small else arguments.repeats
    tasks = [arguments.only] if arguments.only else list(TASKS)
    machine = record.machine()
    settings = {"tasks": tasks, "repeats": repeats, "commit": machine["commit"]}
    pairs = [(task, repeat) for task in tasks for repeat in range(repeats)]
    rows = [] if arguments.small else kept(settings)
    for task, repeat in pairs[len(rows) // len(KINDS) :]:
        rows += searched(task, repeat, arguments.small)
        print(record.table(rows[-len(KINDS) :]), flush=True)
        if not arguments.small:
            keep(settings, rows)
    path = record.HERE / "results" / "pbt.json"
    for task in tasks:
        found = [row for row in rows if row["task"] == task]
        print(task, summary(found))
        if not arguments.small:
            part = {"machine": machine, "settings": described(task), "summary": summary(found), "rows": found}
            record.save_part(path, task, part)
    if not arguments.small:
        print(path)
        KEPT.unlink()


if __name__ == "__main__":
    main()
