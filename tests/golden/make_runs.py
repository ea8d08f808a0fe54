"""Makes `tests/golden/runs/`: a small run directory of each kind, which every later jaxrl must load and evaluate.

    .venv/bin/python tests/golden/make_runs.py

Runs are made anew only where the layout of a state changes before a release, or with a new format number of
config.json; `tests/run/test_golden_runs.py` reads them. Not run by the tests.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
RUNS = Path(__file__).parent / "runs"
sys.path[:0] = [str(RUNS.parents[2]), str(RUNS.parents[1])]

import numpy as np  # noqa: E402  all need the path or the platform above

import jaxrl  # noqa: E402
from jaxrl.core.schedules import Linear  # noqa: E402
from jaxrl.networks import GRU, MLP, Actor, ActorCritic, QNetwork  # noqa: E402
from jaxrl.sweeps.launcher import _name, launch  # noqa: E402

OBSERVATIONS = np.linspace(-1.0, 1.0, 48, dtype=np.float32)
CARTPOLE = "gymnax:CartPole-v1"
PPO = jaxrl.PPO(
    learning_rate=Linear(1e-2, 0.0),
    rollout_length=16,
    epochs=2,
    minibatches=2,
    normalize_observation=True,
    network=ActorCritic(torso=MLP((8,))),
)
RECURRENT_DQN = jaxrl.DQN(
    prioritized=True,
    capacity=128,
    min_size=32,
    batch_size=4,
    rollout_length=8,
    sequence_length=8,
    network=QNetwork(torso=MLP((8,)), core=GRU(4), previous_action=True),
)
BC = jaxrl.BC(batch_size=16, policy=Actor(widths=(8,)))
QUIET = {"evaluation_episodes": 2, "progress": False}
SWEEP = {"learning_rate": [1e-2, 1e-3]}
SWEEP_ALGO = PPO.replace(learning_rate=1e-2)
SWEEP_RUN = {"total_steps": 64, "num_envs": 4, **QUIET}


def train_ppo(path, total_steps=128):
    """PPO over a JAX environment, with normalized observations and a schedule."""
    return jaxrl.train(PPO, CARTPOLE, total_steps=total_steps, num_envs=4, run_dir=path, **QUIET)


def train_recurrent_dqn(path):
    """A recurrent DQN whose checkpoints hold its prioritized replay."""
    return jaxrl.train(RECURRENT_DQN, CARTPOLE, total_steps=128, num_envs=4, run_dir=path, **QUIET)


def train_sebulba(path):
    """PPO over EnvPool's environments."""
    env = jaxrl.make("envpool:CartPole-v1", max_episode_steps=50)
    topology = jaxrl.Sebulba(num_envs=4, lockstep=True)
    return jaxrl.train(PPO, env, total_steps=128, topology=topology, run_dir=path, **QUIET)


def train_offline(path):
    """Behavior cloning from a dataset that an untrained policy wrote."""
    with tempfile.TemporaryDirectory() as temporary:
        policy = jaxrl.train(PPO, CARTPOLE, total_steps=64, num_envs=4, **QUIET).policy
        where = jaxrl.export_rlds(policy, jaxrl.make(CARTPOLE), Path(temporary) / "data", episodes=8, progress=False)
        return jaxrl.train(BC, dataset=f"rlds:{where}", eval_env=CARTPOLE, total_steps=32, run_dir=path, **QUIET)


def train_sweep(path):
    """The run directories that `jaxrl sweep --backend ray` makes, one after another in this process."""
    for rate in SWEEP["learning_rate"]:
        run_dir = path / _name({"learning_rate": rate}) / "seed=0"
        jaxrl.train(SWEEP_ALGO.replace(learning_rate=rate), CARTPOLE, run_dir=run_dir, **SWEEP_RUN)


def gather_sweep(path):
    """What the sweep found; nothing is run again."""
    return launch(SWEEP_ALGO, CARTPOLE, run_dir=path, seeds=1, **SWEEP_RUN, **SWEEP)


KINDS = {
    "ppo": train_ppo,
    "recurrent_dqn": train_recurrent_dqn,
    "sebulba": train_sebulba,
    "offline": train_offline,
    "sweep": train_sweep,
}


def play(policy):
    """The actions for fixed observations, one after another, with the carry handed on."""
    carry, actions = None, []
    for observation in OBSERVATIONS.reshape(-1, 4):
        action, carry = policy(observation, carry)
        actions.append(np.asarray(action).tolist())
    return actions


def run_directories(path):
    """Every run directory at or below `path`, by its name relative to it."""
    return {str(file.parent.relative_to(path)): file.parent for file in sorted(path.rglob("config.json"))}


def main():
    shutil.rmtree(RUNS, ignore_errors=True)
    for kind, train in KINDS.items():
        train(RUNS / kind)
        print(kind)
    for path in run_directories(RUNS).values():
        for name in ("learning_curve.png", ".lock"):
            (path / name).unlink(missing_ok=True)
        shutil.rmtree(path / "tensorboard", ignore_errors=True)
        for note in path.rglob("commit_success.txt"):
            note.write_text("Committed.\n")  # Orbax looks for the file alone, and writes the path of this machine
    actions = {name: play(jaxrl.load(path)) for name, path in run_directories(RUNS).items()}
    (RUNS / "actions.json").write_text(json.dumps(actions, indent=1) + "\n")
    size = sum(file.stat().st_size for file in RUNS.rglob("*") if file.is_file())
    print(f"{size / 1000:.0f} kB in {RUNS}")


if __name__ == "__main__":
    main()
