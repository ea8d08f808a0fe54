"""Bayesian search compared with random search: `jaxrl.tune` with 30 trials of each sampler, PPO on Pendulum.

    python benchmarks/tune.py [--trials 30] [--repeats 10] [--total-steps 200000]
    python benchmarks/tune.py --small    # quick test of the benchmark: a minute, without a record

Both samplers use the same space (that of PPO in `jaxrl.sweeps.search_spaces`), pruner, seeds and budget; repeat i of
both uses `search_seed=i`. The best settings of each search are retrained with new seeds; the result is the mean return
of these runs. Over the repeats, the record has the mean and its 95 % bootstrap interval, for each sampler and for the
difference of pairs; also the score within the search and the number of pruned trials.

A search takes one to three minutes. Finished searches are stored in `.cache/tune.json`: the same command continues with
the next search after it was killed; with other settings, it starts over.
"""

import argparse
import json
import pathlib
import sys

import numpy as np

import jaxrl
from jaxrl.plots.curves import bootstrap_interval

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

ENV, NUM_ENVS = "gymnax:Pendulum-v1", 16
HELD_OUT = [1000, 1001, 1002, 1003, 1004]
KEPT = record.ROOT / ".cache" / "tune.json"


def searched(sampler: str, repeat: int, trials: int, total_steps: int) -> dict[str, object]:
    """Run one search; return its best score, the mean return of these settings on new seeds, and the pruned trials."""
    shared = {"total_steps": total_steps, "num_envs": NUM_ENVS, "progress": False}
    study = jaxrl.tune("ppo", ENV, trials=trials, seeds=2, search=sampler, search_seed=repeat, **shared)
    again = jaxrl.sweep(jaxrl.PPO(**study.best), ENV, seeds=HELD_OUT, points=1, **shared)
    return {
        "sampler": sampler,
        "repeat": repeat,
        "score": study.best_trial.score,
        "held out": float(np.nan_to_num(again.scores, nan=-2000.0).mean()),  # failed runs count as the worst
        "pruned": sum(trial.ended == "pruned" for trial in study.trials),
        "failed": sum(trial.ended == "failed" for trial in study.trials),
        "best": study.best,
    }


def interval(values: np.ndarray) -> dict[str, float]:
    """Return the mean over repeats and its bootstrap interval."""
    low, high = bootstrap_interval([values], statistic=lambda x: np.mean(x, axis=0))
    return {"mean": float(values.mean()), "low": float(low), "high": float(high)}


def kept(settings: dict[str, object]) -> list[dict[str, object]]:
    """Return the searches that the same command finished before it was killed."""
    held = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return held["rows"] if held.get("settings") == settings else []


def keep(settings: dict[str, object], rows: list[dict[str, object]]) -> None:
    KEPT.parent.mkdir(exist_ok=True)
    beside = KEPT.with_suffix(".tmp")
    beside.write_text(json.dumps({"settings": settings, "rows": rows}))
    beside.replace(KEPT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--total-steps", type=int, default=200_000)
    parser.add_argument("--small", action="store_true", help="3 trials of 20,000 steps, 2 repeats, and no record")
    arguments = parser.parse_args()
    small = {"trials": 3, "repeats": 2, "total_steps": 20_000} if arguments.small else {}
    asked = {"trials": arguments.trials, "repeats": arguments.repeats, "total_steps": arguments.total_steps} | small
    settings = asked | {"env": ENV, "num_envs": NUM_ENVS, "held_out_seeds": HELD_OUT}
    settings |= {"commit": record.machine()["commit"]}
    searches = [(sampler, repeat) for repeat in range(asked["repeats"]) for sampler in ("tpe", "random")]
    rows = [] if arguments.small else kept(settings)
    for sampler, repeat in searches[len(rows) :]:
        rows.append(searched(sampler, repeat, asked["trials"], asked["total_steps"]))
        print(record.table([{name: value for name, value in rows[-1].items() if name != "best"}]), flush=True)
        if not arguments.small:
            keep(settings, rows)
    held_out = {
        sampler: np.asarray([row["held out"] for row in rows if row["sampler"] == sampler])
        for sampler in ("tpe", "random")
    }
    summary = {sampler: interval(values) for sampler, values in held_out.items()}
    summary["tpe - random"] = interval(held_out["tpe"] - held_out["random"])
    for name, found in summary.items():
        print(f"{name}: {found['mean']:.1f} ({found['low']:.1f} to {found['high']:.1f})")
    if not arguments.small:
        print(record.save("tune", rows, summary=summary, settings=settings))
        KEPT.unlink()


if __name__ == "__main__":
    main()
