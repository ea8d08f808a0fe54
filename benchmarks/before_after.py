"""This tree against another commit, in one run: the throughput of training, in alternating pairs.

A worker process for each tree holds its compiled programs; both do the same work in turn. What counts is the ratio of
a pair, with the interval of its mean over the pairs, since machines drift.

    python benchmarks/before_after.py --before COMMIT
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
TREE = "JAXRL_BENCHMARK_TREE"  # in the worker's environment: the checkout that it imports
if TREE in os.environ:
    sys.path.insert(0, os.environ[TREE])
sys.path.insert(0, str(HERE))

# Each case: algorithm, its settings, environment, number of environments, environment steps of a measurement.
WORK: dict[str, tuple[str, dict[str, Any], str, int, int]] = {
    "PPO CartPole, 4 environments": ("ppo", {"rollout_length": 128}, "gymnax:CartPole-v1", 4, 250_000),
    "PPO CartPole, 64 environments": ("ppo", {"rollout_length": 128}, "gymnax:CartPole-v1", 64, 1_000_000),
    "PPO CartPole, 2048 environments": ("ppo", {"rollout_length": 128}, "gymnax:CartPole-v1", 2048, 2_097_152),
    "DQN CartPole": ("dqn", {}, "gymnax:CartPole-v1", 8, 150_000),
    "SAC Pendulum": ("sac", {}, "gymnax:Pendulum-v1", 8, 6_000),
    "sweep of 8 seeds, PPO CartPole": ("ppo", {"rollout_length": 128}, "gymnax:CartPole-v1", 64, 200_000),
}
SEEDS = 8  # of the sweep


def steps_per_second(case: str) -> float:
    """Environment steps a second of the compiled loop, compiled before."""
    import jaxrl

    name, settings, env, num_envs, steps = WORK[case]
    if case.startswith("sweep"):
        swept = jaxrl.sweep(
            name, env, seeds=SEEDS, total_steps=steps, num_envs=num_envs, evaluation_episodes=1, progress=False
        )
        return float(swept.steps_per_second)
    algo = jaxrl.make_algorithm(name, **settings)
    result = jaxrl.train(
        algo, env, total_steps=steps, num_envs=num_envs, evaluate_every=0, evaluation_episodes=1, progress=False
    )
    return float(result.steps_per_second)


def interval(ratios: list[float]) -> tuple[float, float]:
    """Of the mean ratio, 95 percent, by Student's t."""
    from scipy import stats

    mean, error = statistics.mean(ratios), stats.sem(ratios)
    low, high = stats.t.interval(0.95, len(ratios) - 1, loc=mean, scale=error)
    return float(low), float(high)


def checkout(commit: str) -> pathlib.Path:
    """A work tree of `commit` under `.cache/before`."""
    full = subprocess.run(["git", "rev-parse", commit], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folder = ROOT / ".cache" / "before" / full.strip()[:12]
    if not folder.exists():
        subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
        subprocess.run(["git", "worktree", "add", "--detach", str(folder), full.strip()], cwd=ROOT, check=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", default="HEAD~1", help="the commit to compare with")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=list(WORK), choices=list(WORK), metavar="CASE")
    asked = parser.parse_args()
    import _record

    trees = {"before": checkout(asked.before), "now": ROOT}
    workers = {
        name: _record.Worker(sys.executable, pathlib.Path(__file__), {TREE: str(tree)}) for name, tree in trees.items()
    }
    rows = []
    for case in asked.only:
        speeds: dict[str, list[float]] = {name: [] for name in workers}
        for pair in range(-1, asked.pairs):  # the first one compiles
            for name in sorted(workers, reverse=pair % 2 == 0):
                speed = workers[name].ask(case=case)
                if pair >= 0:
                    speeds[name].append(speed)
        ratios = [now / before for now, before in zip(speeds["now"], speeds["before"], strict=True)]
        low, high = interval(ratios)
        medians = {f"{name} (steps/s)": statistics.median(values) for name, values in speeds.items()}
        rows.append({"work": case} | medians | {"ratio": statistics.mean(ratios), "low": low, "high": high})
        print(_record.table(rows[-1:]), flush=True)
    for worker in workers.values():
        worker.close()
    print(_record.save("before-after", rows, before=asked.before, pairs=asked.pairs))


if __name__ == "__main__":
    if "--serve" in sys.argv:
        import _record

        _record.serve(steps_per_second)
    else:
        main()
