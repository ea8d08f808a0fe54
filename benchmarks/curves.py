"""Learning curves of every algorithm: short runs of one command each, evaluated twenty times.

    python benchmarks/curves.py [--seeds 3] [--only ppo sac]

Each algorithm is trained once per seed; all algorithms finish one seed before the next. After each run, its curve is
saved to `benchmarks/results/curve-NAME.json`, so a session that ends early leaves complete records with fewer seeds.
Offline algorithms use the dataset recorded by SAC's first run and the episodes of its policy.
`scripts/update_results.py` plots the curves.
"""

import argparse
import contextlib
import json
import pathlib
import shlex
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

EVALUATIONS, EPISODES = 20, 32
CARTPOLE = "--env gymnax:CartPole-v1 --total-steps 500000"
SMALL = "--learning-rate 1e-3 --batch-size 128 --policy.widths 64,64"
BOTH = f"{SMALL} --critic.widths 64,64"
PENDULUM = "--env gymnax:Pendulum-v1 --total-steps"
DATA = "--eval-env gymnax:Pendulum-v1 --total-steps"
# By page: what follows `jaxrl train`. On Pendulum with small networks, which two cores train in seconds.
COMMANDS = {
    "ppo": f"ppo {CARTPOLE}",
    "a2c": f"a2c {CARTPOLE}",
    "impala": f"impala {CARTPOLE}",
    "vmpo": f"vmpo {CARTPOLE}",
    "pqn": f"pqn {CARTPOLE}",
    "reppo": f"reppo {PENDULUM} 100000",
    "alphazero": (
        "alphazero --env pgx:tic_tac_toe --env-params opponent=turns --eval-env pgx:tic_tac_toe --num-envs 128 "
        "--total-steps 300000"
    ),
    "muzero": (
        "muzero --env gymnax:Catch-bsuite --tree-search 8 --v-min -1 --v-max 1 --value-cost 1 --batch-size 64 "
        "--num-envs 16 --learning-rate linear:3e-3:0 --total-steps 60000"
    ),
    "dqn": f"dqn {CARTPOLE}",
    "sac": f"sac {PENDULUM} 10000 {BOTH}",
    "crossq": f"crossq {PENDULUM} 10000 {BOTH}",
    "td3": f"td3 {PENDULUM} 15000 {BOTH}",
    "ddpg": f"ddpg {PENDULUM} 15000 {BOTH}",
    "d4pg": f"d4pg {PENDULUM} 15000 {BOTH} --v-min -1600 --v-max 0",
    "mpo": f"mpo {PENDULUM} 15000 {BOTH}",
    "gail": f"gail {PENDULUM} 10000 {BOTH} --dataset rlds:data/expert",
    "bc": f"bc --dataset rlds:data/expert {DATA} 10000 {SMALL}",
    "td3bc": f"td3bc --dataset rlds:data/mixed {DATA} 10000 {BOTH}",
    "iql": f"iql --dataset rlds:data/mixed {DATA} 10000 {BOTH}",
    "crr": f"crr --dataset rlds:data/mixed {DATA} 10000 {BOTH}",
    "cql": f"cql --dataset rlds:data/mixed {DATA} 5000 {BOTH} --samples 4 --policy-learning-rate 3e-4",
    "r2d2": (
        "r2d2 --env gymnax:MemoryChain-bsuite --env-params memory_length=10 --num-envs 64 --total-steps 40000 "
        "--network.torso mlp:32 --network.core gru:32 --memory length=25:burn_in=8 --learning-rate linear:3e-3:0 "
        "--capacity 16384 --min-size 2048 --batch-size 64 --rollout-length 8 --replay-ratio 0.0078125 "
        "--target-period 50"
    ),
    # A probe, which its smallest model learns within minutes; Catch and Pendulum are rows of the zoo.
    "dreamer": (
        "dreamer --env probe:ActionReward --env-params continuous=True --total-steps 12000 --num-envs 8 "
        "--network.deter 16 --network.stoch 4 --network.classes 4 --network.hidden 16 --network.units 16 "
        "--network.layers 1 --learning-rate 3e-3 --optimizer laprop:warm_up=20 --memory length=8 --rollout-length 4 "
        "--imagination-length 3 --min-size 256 --replay-ratio 0.0625 --capacity 4096 --gamma 0.9"
    ),
}
# Before those that learn from data: an agent whose episodes are the mixed data, and whose policy is the expert.
EXPERT = (
    f"train {COMMANDS['sac']} --seed 0 --run-dir runs/expert --record data/mixed --evaluate-every 0 --no-progress",
    "export-rlds runs/expert --out data/expert --episodes 20 --no-progress",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS), help="pages to run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            for name in arguments.only:
                steps, returns = curve(name, seed, pathlib.Path(folder))
                print(name, seed, f"{returns[-1]:.1f}", save(name, seed, steps, returns), flush=True)


def curve(name: str, seed: int, folder: pathlib.Path) -> tuple[list[int], list[float]]:
    """Train once; return the steps and mean returns of the evaluations."""
    words = shlex.split(COMMANDS[name])
    every = int(words[words.index("--total-steps") + 1]) // EVALUATIONS
    if "--dataset" in words and not (folder / "data").exists():
        for command in EXPERT:
            jaxrl(shlex.split(command), folder)
    run_dir = folder / "runs" / f"{name}-{seed}"
    more = f"--seed {seed} --evaluate-every {every} --evaluation-episodes {EPISODES} --checkpoint-every 0 --no-progress"
    jaxrl(["train", *words, *shlex.split(more), "--run-dir", str(run_dir)], folder)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    points = {row["step"]: row["evaluation/return_mean"] for row in rows if "evaluation/return_mean" in row}
    return list(points), [round(value, 2) for value in points.values()]


def jaxrl(words: list[str], folder: pathlib.Path) -> None:
    """Run a jaxrl command in a folder, in this process, since imports and tracing take longer than training."""
    from jaxrl.cli.main import main as run

    with contextlib.chdir(folder):
        if code := run(words):
            raise SystemExit(f"jaxrl {shlex.join(words)} ended with {code}")


def save(name: str, seed: int, steps: list[int], returns: list[float]) -> pathlib.Path:
    """Add one seed's curve to the record of its page; the first seed starts a new record."""
    path = record.HERE / "results" / f"curve-{name}.json"
    rows = json.loads(path.read_text())["rows"] if seed else []
    rows.append({"seed": seed, "steps": steps, "returns": returns})
    data = ", ".join(f"jaxrl {command}" for command in EXPERT) if "--dataset" in COMMANDS[name] else None
    return record.save(
        f"curve-{name}",
        rows,
        run=f"jaxrl train {COMMANDS[name]}",
        **({"data": data} if data else {}),
        evaluation_episodes=EPISODES,
    )


if __name__ == "__main__":
    main()
