"""Learning from 20 episodes of an expert on Pendulum: without rewards (SQIL, GAIL), and with them, beside its own.

A score of 0 is random, of 1 the expert.
"""

import dataclasses

import _record
import numpy as np
import pytest
from helpers.experts import EXPERT, NARROW, PENDULUM, figures

import jaxrl
from jaxrl.algos.acting import Noise

SEEDS, EPISODES, STEPS = 5, 20, 10_000
IMITATING = {
    "sqil": EXPERT.replace(imitate=True),
    "gail": jaxrl.GAIL(learning_rate=1e-3, batch_size=128, capacity=20_000, **NARROW),
}


@pytest.mark.learning
@pytest.mark.parametrize("name", IMITATING)
def test_imitation_is_nearly_the_expert(name, expert, tmp_path):
    dataset = expert.export(tmp_path / "shown", EPISODES, seed=1)
    scores = expert.scores(IMITATING[name], dataset, SEEDS, env=PENDULUM, total_steps=STEPS, num_envs=1)
    _record.save(
        f"learning-{name}-pendulum",
        [figures(scores)],
        seeds=list(range(SEEDS)),
        steps=STEPS,
        episodes=EPISODES,
        random_return=round(expert.returns[0], 1),
        expert_return=round(expert.returns[1], 1),
        settings=str(IMITATING[name]),
        reference={"score": 0.9, "source": "issue 18"},
    )
    assert scores.mean() >= 0.9


@dataclasses.dataclass(frozen=True)
class Task:
    """A task in which demonstrations may save steps until the evaluation of `algo` reaches `mark`.

    The teacher is `teacher` after `taught` steps. A run that has not reached the mark after `most` counts as that. With
    demonstrations it may take at most `share` of the steps without.
    """

    env: str
    teacher: jaxrl.SAC | jaxrl.DQN
    taught: int
    algo: jaxrl.SAC | jaxrl.DQN
    mark: float
    most: int = 20_000
    evaluate_every: int = 500
    share: float = 0.6


CONTINUOUS = "gymnax:MountainCarContinuous-v0"
TASKS = {
    # Solved in a few thousand steps without: demonstrations may not do harm.
    "pendulum": Task(PENDULUM, EXPERT, 15_000, EXPERT, -200.0, share=1.25),
    # The goal alone has a reward. With random actions that are independent from step to step, as SAC was published, no
    # episode comes upon it; with those of jaxrl's defaults they do.
    "mountaincarcontinuous": Task(CONTINUOUS, jaxrl.SAC(), 15_000, jaxrl.SAC(noise=Noise()), 90.0),
    "mountaincarcontinuous-defaults": Task(CONTINUOUS, jaxrl.SAC(), 15_000, jaxrl.SAC(), 90.0, share=1.25),
    "mountaincar-dqn": Task(
        "gymnax:MountainCar-v0", jaxrl.DQN(), 500_000, jaxrl.DQN(), -130.0, most=500_000, evaluate_every=10_000
    ),
}


@pytest.mark.learning
@pytest.mark.parametrize("name", TASKS)
def test_demonstrations_save_steps(name, tmp_path):
    """Half of each batch from an expert's episodes, rewards and all, against none of it."""
    task = TASKS[name]
    teacher = jaxrl.train(task.teacher, task.env, total_steps=task.taught, evaluate_every=0, progress=False)
    jaxrl.export_rlds(teacher.policy, task.env, tmp_path / "shown", episodes=EPISODES, seed=1, progress=False)
    dataset = jaxrl.load_dataset(f"rlds:{tmp_path / 'shown'}")
    arguments = {"total_steps": task.most, "target_return": task.mark, "evaluate_every": task.evaluate_every}
    arguments |= {"evaluation_episodes": 32, "progress": False}
    steps = {
        kind: [jaxrl.train(task.algo, task.env, seed=seed, **arguments, **more).total_steps for seed in range(SEEDS)]
        for kind, more in (("without", {}), ("with", {"dataset": dataset, "dataset_fraction": 0.5}))
    }
    share = np.mean(steps["with"]) / np.mean(steps["without"])
    rows = [{"demonstrations": kind, "steps": found, "mean": float(np.mean(found))} for kind, found in steps.items()]
    print(rows, share)
    _record.save(
        f"learning-demonstrations-{name}",
        rows,
        env=task.env,
        seeds=list(range(SEEDS)),
        share_of_steps=round(float(share), 3),
        mark=task.mark,
        most=task.most,
        expert_return=round(float(teacher.evaluation.return_mean), 1),
        episodes=EPISODES,
        settings=str(task.algo),
        reference={"score": task.share, "source": "issue 18 asks for 0.6 in one task"},
    )
    assert share <= task.share
