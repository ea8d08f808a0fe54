"""Steps to a target score in a modified Pendulum: fine-tuning compared with training from scratch.

    python benchmarks/fine_tuning.py [--seeds 5] [--parent-steps 20000] [--steps 30000] [--mark -200]

SAC with its defaults, one update per step. For each seed, a parent is trained with gravity 10, and then two runs with
gravity 12: one initialized from the parent (`init_from`) and one from scratch. Both are evaluated every 500 steps, on
the same episodes, and stop when the mean return reaches the mark. The result is the number of steps; a run that does
not reach the mark counts all its steps and is flagged.
"""

import argparse
import pathlib
import statistics
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

EVERY = 500
GRAVITY = 12.0


def main() -> None:
    import jaxrl

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parent-steps", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--mark", type=float, default=-200.0)
    arguments = parser.parse_args()
    algo, usual = jaxrl.SAC(replay_ratio=1.0), jaxrl.make("gymnax:Pendulum-v1")
    changed = jaxrl.make("gymnax:Pendulum-v1", g=GRAVITY)
    settings = {"num_envs": 1, "progress": False, "evaluation_episodes": 32}

    def steps_to_mark(seed, parent):
        result = jaxrl.train(
            algo,
            changed,
            total_steps=arguments.steps,
            seed=seed,
            evaluate_every=EVERY,
            target_return=arguments.mark,
            init_from=parent,
            **settings,
        )
        return result.total_steps, result.stopped == "target_return"

    rows = []
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as folder:
            parent = pathlib.Path(folder) / "parent"
            steps = arguments.parent_steps
            before = jaxrl.train(
                algo, usual, total_steps=steps, seed=seed, evaluate_every=0, run_dir=parent, **settings
            )
            warm, warm_there = steps_to_mark(seed, parent)
        cold, cold_there = steps_to_mark(seed, None)
        rows.append(
            {
                "seed": seed,
                "parent's return": before.evaluation.return_mean,
                "steps with init_from": warm,
                "reached": warm_there,
                "steps from nothing": cold,
                "reached from nothing": cold_there,
            }
        )
        print(record.table(rows[-1:]), flush=True)
    medians = {
        name: statistics.median(row[name] for row in rows) for name in ("steps with init_from", "steps from nothing")
    }
    print(medians)
    print(record.save("fine-tuning", rows, medians=medians, settings=vars(arguments) | {"gravity": GRAVITY}))


if __name__ == "__main__":
    main()
