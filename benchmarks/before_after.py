"""Training throughput of this tree compared with another commit, measured in alternating pairs in one run.

A worker process for each tree holds its compiled programs. In a pair, both do the same work concurrently, but only one
runs at a time: they are stopped and continued in turn, every quarter of a second, so that changes in the machine's
speed affect both. A worker's clock is paused while the worker is stopped. The result is the ratio of each pair, and the
mean over pairs with its confidence interval. With `--before HEAD`, both trees are the same, and the ratios show the
noise of the measurement.

    python benchmarks/before_after.py --before COMMIT
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import mmap
import os
import pathlib
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
TREE = "JAXRL_BENCHMARK_TREE"  # in the worker's environment: the checkout that it imports
STOPPED = "JAXRL_BENCHMARK_STOPPED"  # likewise: the file that holds for how many seconds it has been stopped
SLICE = 0.25  # seconds
if TREE in os.environ:
    sys.path.insert(0, os.environ[TREE])
sys.path.insert(0, str(HERE))

# Each case: algorithm, its settings, environment, number of environments, environment steps of a measurement.
WORK: dict[str, tuple[str, dict[str, Any], str, int, int]] = {
    "PPO CartPole, 4 environments": ("ppo", {"rollout_length": 128}, "gymnax:CartPole-v1", 4, 500_000),
    "PPO CartPole, 64 environments": ("ppo", {"rollout_length": 128}, "gymnax:CartPole-v1", 64, 1_500_000),
    "PPO CartPole, 2048 environments": ("ppo", {"rollout_length": 128}, "gymnax:CartPole-v1", 2048, 2 * 2_097_152),
    "DQN CartPole": ("dqn", {"rollout_length": 4, "replay_ratio": 1 / 32}, "gymnax:CartPole-v1", 8, 500_000),
    "SAC Pendulum": ("sac", {"rollout_length": 1, "replay_ratio": 1 / 8}, "gymnax:Pendulum-v1", 8, 6_000),
    "sweep of 8 seeds, PPO CartPole": ("ppo", {"rollout_length": 128}, "gymnax:CartPole-v1", 64, 250_000),
}
SEEDS = 8  # of the sweep


def steps_per_second(case: str) -> float:
    """Return environment steps per second of the precompiled loop."""
    import jaxrl

    name, settings, env, num_envs, steps = WORK[case]
    if case.startswith("sweep"):
        swept = jaxrl.sweep(
            name, env, seeds=SEEDS, total_steps=steps, num_envs=num_envs, evaluation_episodes=1, progress=False
        )
        return float(swept.steps_per_second)
    if name == "dqn":  # whose defaults have changed
        network = jaxrl.networks.QNetwork(jaxrl.networks.MLP((64, 64)))
        settings = settings | {"network": network, "n_step": 1, "learning_rate": 2.5e-4}
    algo = jaxrl.make_algorithm(name, **settings)
    result = jaxrl.train(
        algo, env, total_steps=steps, num_envs=num_envs, evaluate_every=0, evaluation_episodes=1, progress=False
    )
    return float(result.steps_per_second)


def clock_without_stops() -> None:
    """Pause this process's `time.monotonic` while the process is stopped."""
    with open(os.environ[STOPPED], "rb") as file:
        stopped = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    real = time.monotonic
    time.monotonic = lambda: real() - struct.unpack("d", stopped[:8])[0]


class Stoppable:
    """A worker that can be stopped and continued.

    Args:
      tree: the checkout that it imports.
    """

    def __init__(self, tree: pathlib.Path):
        import _record

        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed with the worker)
        self._file.write(struct.pack("d", 0.0))
        self._file.flush()
        self._total = mmap.mmap(self._file.fileno(), 8)
        self._since: float | None = None
        more = {TREE: str(tree), STOPPED: self._file.name}
        self.worker = _record.Worker(sys.executable, pathlib.Path(__file__), more)

    def stop(self) -> None:
        os.kill(self.worker.pid, signal.SIGSTOP)
        self._since = time.monotonic()

    def go(self) -> None:
        """Continue the worker, after recording how long it was stopped."""
        if self._since is not None:
            (before,) = struct.unpack("d", self._total[:8])
            self._total[:8] = struct.pack("d", before + time.monotonic() - self._since)
            self._since = None
        os.kill(self.worker.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.worker.kill()
        self._file.close()


@contextlib.contextmanager
def running(trees: dict[str, pathlib.Path]) -> Iterator[dict[str, Stoppable]]:
    """Yield workers for these checkouts, and end them even if this process fails or is terminated."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    workers: dict[str, Stoppable] = {}
    try:
        for name, tree in trees.items():
            workers[name] = Stoppable(tree)
        yield workers
    finally:
        for worker in workers.values():
            worker.kill()


def together(workers: dict[str, Stoppable], case: str) -> dict[str, float]:
    """Return steps per second of each worker; they run in alternating time slices until both have answered."""
    with concurrent.futures.ThreadPoolExecutor(len(workers)) as threads:
        answers = {name: threads.submit(worker.worker.ask, case=case) for name, worker in workers.items()}
        try:
            for worker in workers.values():
                worker.stop()
            for name in itertools.cycle(workers):
                if all(answer.done() for answer in answers.values()):
                    break
                if not answers[name].done():
                    workers[name].go()
                    concurrent.futures.wait([answers[name]], timeout=SLICE)
                    workers[name].stop()
            for worker in workers.values():
                worker.go()
        except BaseException:
            for worker in workers.values():
                worker.kill()  # else the threads would wait for answers of processes that are stopped
            raise
        return {name: answer.result() for name, answer in answers.items()}


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 percent confidence interval of the mean ratio, by Student's t."""
    from scipy import stats

    mean, error = statistics.mean(ratios), stats.sem(ratios)
    low, high = stats.t.interval(0.95, len(ratios) - 1, loc=mean, scale=error)
    return float(low), float(high)


def checkout(commit: str) -> pathlib.Path:
    """Create and return a work tree of `commit` under `.cache/before`."""
    full = subprocess.run(["git", "rev-parse", commit], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folder = ROOT / ".cache" / "before" / full.strip()[:12]
    if not folder.exists():
        subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
        subprocess.run(["git", "worktree", "add", "--detach", str(folder), full.strip()], cwd=ROOT, check=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", default="HEAD~1", help="commit to compare with")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=list(WORK), choices=list(WORK), metavar="CASE")
    asked = parser.parse_args()
    import _record

    rows = []
    with running({"before": checkout(asked.before), "now": ROOT}) as workers:
        for case in asked.only:
            for worker in workers.values():
                worker.worker.ask(case=case)  # compiles
            orders = (dict(sorted(workers.items(), reverse=pair % 2 == 0)) for pair in range(asked.pairs))
            pairs = [together(order, case) for order in orders]
            speeds = {name: [pair[name] for pair in pairs] for name in workers}
            ratios = [now / before for now, before in zip(speeds["now"], speeds["before"], strict=True)]
            low, high = interval(ratios)
            medians = {f"{name} (steps/s)": statistics.median(values) for name, values in speeds.items()}
            rows.append({"work": case} | medians | {"ratio": statistics.mean(ratios), "low": low, "high": high})
            print(_record.table(rows[-1:]), flush=True)
    name = "noise" if asked.before == "HEAD" else "before-after"
    print(_record.save(name, rows, before=asked.before, pairs=asked.pairs, slice_seconds=SLICE))


if __name__ == "__main__":
    if "--serve" in sys.argv:
        import _record

        clock_without_stops()
        _record.serve(steps_per_second)
    else:
        main()
