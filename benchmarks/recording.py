"""Slowdown of training while it records the agent's episodes.

    python benchmarks/recording.py [--total-steps 2000000] [--repeats 5]

PPO on MinAtar's Breakout with the settings of the preset purejaxrl-minatar (64 environments x 128 steps, networks of
2 x 64, which are fast: a slower learner leaves more time to write), without recording, recording every 20th episode,
and recording every episode; alternating in one process, with everything compiled. The time covers the whole call of
`train`, from the first row to the closed, re-read and renamed dataset, in two parts; the slowdown compares medians.
"""

import argparse
import os
import pathlib
import shutil
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

EVERY = {"nothing": None, "every 20th episode": 20, "every episode": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--total-steps", type=int, default=2_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()

    import jaxrl
    from jaxrl.run.presets import PRESETS

    preset = PRESETS["purejaxrl-minatar"]
    env = jaxrl.make("gymnax:Breakout-MinAtar")
    made = {}

    def training(name, every, folder):
        def run():
            path = pathlib.Path(folder) / "recording"
            start = time.perf_counter()
            jaxrl.train(
                preset.algorithm,
                env,
                total_steps=asked.total_steps,
                num_envs=preset.topology["num_envs"],
                evaluate_every=0,
                evaluation_episodes=1,
                checkpoint_every=asked.total_steps // 2,
                run_dir=pathlib.Path(folder) / "run",
                overwrite=True,
                record=None if every is None else jaxrl.Record(path, every),
                progress=False,
            )
            seconds = time.perf_counter() - start
            if every is not None and name not in made:
                parts = [jaxrl.load_dataset(f"rlds:{part}") for part in sorted(path.glob("part-*"))]
                size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                transitions = sum(episode.length for part in parts for episode in part)
                made[name] = {"episodes": sum(map(len, parts)), "transitions": transitions, "file_mb": size / 2**20}
            shutil.rmtree(path, ignore_errors=True)
            return seconds

        return run

    with tempfile.TemporaryDirectory() as folder:
        seconds = record.alternate(
            {name: training(name, every, folder) for name, every in EVERY.items()}, asked.repeats
        )
    nothing = {"episodes": 0, "transitions": 0, "file_mb": 0.0}
    rows = [
        {
            "recorded": name,
            "seconds": took,
            "steps_per_second": asked.total_steps / took,
            "slowdown": took / seconds["nothing"] - 1.0,
        }
        | made.get(name, nothing)
        for name, took in seconds.items()
    ]
    print(record.table(rows))
    print(record.save("recording", rows, total_steps=asked.total_steps, load=os.getloadavg()[0]))


if __name__ == "__main__":
    main()
