"""Long real trainings in EnvPool's environments, against the scores of others."""

import dataclasses

import jax
import numpy as np
import pytest
import scipy.stats

import jaxrl
from jaxrl.algos.kl_penalty import KLPenalty
from jaxrl.core.schedules import Linear
from jaxrl.networks import Actor, ActorCritic, Critic, NatureCNN
from jaxrl.run.presets import PRESETS

CLEANRL = "CleanRL's documentation"


class Scores:
    """Several runs as a sweep would give them; host environments cannot be swept in one program."""

    def __init__(self, results):
        self.configurations, self.seeds = [{}], len(results)
        self.scores = np.asarray([[result.evaluation.return_mean for result in results]])
        self.interquartile_means = [float(scipy.stats.trim_mean(self.scores[0], 0.25))]
        self.steps_per_second = float(np.mean([result.steps_per_second for result in results]))
        self.steps = max(result.total_steps for result in results)
        self.wall_seconds = float(sum(result.wall_seconds for result in results))


@pytest.fixture
def trained(record):
    """Trains several seeds of an algorithm, writes their scores down, and gives them.

    With `run_dir`, the runs of an interrupted test go on where they were. A command of None is not written down.
    """

    def scores_of(name, algo, env, total_steps, seeds, reference, source, command="", run_dir=None, **settings):
        settings = {"topology": None, "evaluate_every": 0, "evaluation_episodes": 128, "progress": False} | settings
        results = []
        for seed in range(seeds):
            folder = None if run_dir is None else run_dir / str(seed)
            results.append(jaxrl.train(algo, env, total_steps=total_steps, seed=seed, run_dir=folder, **settings))
        assert all(result.stopped in ("finished", "target_return") for result in results)
        scores, about = Scores(results), {"algorithm": str(algo), "env": str(env)}
        if settings["topology"] is not None:
            about |= {"num_envs": settings["topology"].num_envs}
        if command is not None:
            command = command or type(algo).__name__.lower()
            about |= {"command": f"jaxrl train {command} --env {env} --total-steps {total_steps}"}
        if "target_return" in settings:
            total_steps = scores.steps
        record(name, scores, total_steps=total_steps, reference=reference, source=source, settings=about)
        return scores.scores[0]

    return scores_of


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algo", "env", "total_steps", "published"),
    [
        ("ppo", "envpool:Pendulum-v1", 500_000, -172),
        ("sac", "gymnasium:Pendulum-v1", 20_000, -157),
    ],
)
def test_pendulum_on_the_host_at_the_defaults(algo, env, total_steps, published, trained):
    """`jaxrl train ALGO --env ENV --total-steps N`, five seeds: none below -200."""
    made = jaxrl.make_algorithm(algo)
    assert trained(f"host-pendulum-{algo}", made, env, total_steps, 5, published, "RL Zoo").min() >= -200.0


@pytest.mark.learning
def test_the_kl_penalty_in_halfcheetah(trained):
    """1M rows at the defaults, 5 seeds; the clipped ratio beside it, whose 25th percentile the mean must reach."""
    clip, kl = (
        trained(
            f"halfcheetah-defaults-{objective}",
            jaxrl.PPO(kl_penalty=part),
            "envpool:HalfCheetah-v4",
            1_000_000,
            5,
            1443,
            CLEANRL,
            f"ppo{' --kl-penalty' if part else ''}",
        )
        for objective, part in {"clip": None, "kl": KLPenalty()}.items()
    )
    assert kl.mean() >= np.percentile(clip, 25)


@pytest.mark.learning
def test_sac_in_halfcheetah_at_the_defaults(trained, kept_dir):
    """`jaxrl train sac --env envpool:HalfCheetah-v4 --total-steps 300000`, two seeds: issue 14 asks for 4,500."""
    name, env = "halfcheetah-sac-defaults", "envpool:HalfCheetah-v4"
    assert trained(name, jaxrl.SAC(), env, 300_000, 2, 4500, "issue 14", run_dir=kept_dir).mean() >= 4500


NARROW = {"widths": (64, 64)}
NORMALIZED = NARROW | {"normalization": "batch_renorm", "normalize_inputs": True}
IN_100K = {
    "sac": (
        jaxrl.SAC(replay_ratio=1, policy=Actor(**NARROW), critic=Critic(**NARROW)),
        "sac --replay-ratio 1 --policy.widths 64,64 --critic.widths 64,64",
    ),
    "crossq": (
        jaxrl.CrossQ(replay_ratio=1, policy=Actor(**NORMALIZED), critic=Critic(**NORMALIZED)),
        "crossq --replay-ratio 1 --policy.widths 64,64 --critic.widths 64,64",
    ),
    **{
        name: (
            dataclasses.replace(PRESETS[f"{name}-narrow"].algorithm, learning_rate=3e-4),
            f"--preset {name}-narrow --learning-rate 3e-4",
        )
        for name in ("flashsac", "xqc")
    },
}
# The same run every time, and the environments step while the learner learns.
LAGGING = jaxrl.Sebulba(num_envs=8, lockstep=True, lag=1)


@pytest.mark.learning
@pytest.mark.parametrize("name", list(IN_100K)[1:])
def test_more_than_sac_from_equal_steps(name, trained, kept_dir):
    """100k rows, 3 seeds, narrow networks: two cores need 20 minutes for SAC and CrossQ, hours for the others."""
    means = {"sac": None}
    for each in ("sac", name):
        algo, command = IN_100K[each]
        means[each] = trained(
            f"halfcheetah-100k-{each}",
            algo,
            "envpool:HalfCheetah-v4",
            100_000,
            3,
            means["sac"],
            "SAC with networks of 64, beside it",
            f"{command} --num-envs 8 --lockstep --lag 1",
            run_dir=kept_dir / each,
            topology=LAGGING,
        ).mean()
    assert means[name] >= 1.3 * means["sac"], means


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algo", "reference"),
    [
        # CleanRL's settings: an update a row, from the 5,000th on.
        (jaxrl.SAC(learning_rate=1e-3, policy_learning_rate=3e-4, min_size=5_000, replay_ratio=1), 9635),
        (jaxrl.TD3(learning_rate=3e-4, min_size=25_000, replay_ratio=1), 9583),
    ],
    ids=["sac", "td3"],
)
def test_off_policy_in_halfcheetah(algo, reference, trained):
    """1M rows in 8 environments, 3 seeds where there is an accelerator; on 2 cores one takes 50 minutes."""
    seeds, name = 1 if jax.default_backend() == "cpu" else 3, f"halfcheetah-{type(algo).__name__.lower()}"
    how = {"command": None, "topology": LAGGING, "evaluation_episodes": 16}
    assert trained(name, algo, "envpool:HalfCheetah-v4", 1_000_000, seeds, reference, CLEANRL, **how).mean() >= 8200


# After 1M steps, where rlpyt's figure 4 ends too; DDPG's is that of its JAX version.
CLEANRL_1M = {
    ("ppo", "HalfCheetah"): 1443,
    ("ppo", "Hopper"): 2383,
    ("ppo", "Walker2d"): 2288,
    ("sac", "HalfCheetah"): 9635,
    ("sac", "Hopper"): 2310,
    ("sac", "Walker2d"): 3591,
    ("td3", "HalfCheetah"): 9583,
    ("td3", "Hopper"): 3135,
    ("td3", "Walker2d"): 4058,
    ("ddpg", "HalfCheetah"): 8639,
}


@pytest.mark.learning
@pytest.mark.parametrize("task", ["HalfCheetah", "Hopper", "Walker2d"])
@pytest.mark.parametrize("algo", ["ppo", "ddpg", "td3", "sac"])
def test_mujoco_at_the_defaults(algo, task, trained, kept_dir):
    """`jaxrl train ALGO --env envpool:TASK-v4 --total-steps N`, three seeds; two cores take 5 to 30 minutes for one."""
    name, total_steps = f"mujoco-{task.lower()}-{algo}", 1_000_000 if algo == "ppo" else 300_000
    about = CLEANRL_1M.get((algo, task)), f"{CLEANRL}, at 1M steps"
    how = {"run_dir": kept_dir, "evaluation_episodes": 16}
    scores = trained(name, jaxrl.make_algorithm(algo), f"envpool:{task}-v4", total_steps, 3, *about, **how)
    assert scores.mean() >= {"HalfCheetah": 1000.0, "Hopper": 500.0, "Walker2d": 500.0}[task]


@pytest.mark.learning
@pytest.mark.parametrize("task", ["Walker2d", "Hopper", "HalfCheetah"])
@pytest.mark.parametrize("name", ["batchppo-paper", "batchppo-recurrent"])
def test_batchppo_in_mujoco(name, task, record_rows, kept_dir):
    """1M steps, where its figures end at 10M; three seeds, by the mean action and by samples."""
    preset, rows, curves = PRESETS[name], [], []
    for seed in range(3):
        result = jaxrl.train(
            preset.algorithm,
            f"envpool:{task}-v4",
            total_steps=1_000_000,
            seed=seed,
            progress=False,
            evaluate_every=100_000,
            evaluation_episodes=16,
            run_dir=kept_dir / str(seed),
            **preset.topology,
        )
        training = [row for row in result.metrics if "train/transitions" in row]
        learned = sum(row["train/learned_fraction"] * row["train/transitions"] for row in training)
        curves.append([row["evaluation/return_mean"] for row in result.metrics if "evaluation/return_mean" in row])
        rows.append(
            {
                "mean action": round(float(result.evaluate(32).return_mean), 1),
                "samples": round(float(result.evaluate(32, explore=True).return_mean), 1),
                "learned_fraction": round(learned / sum(row["train/transitions"] for row in training), 4),
                "wall_seconds": round(result.wall_seconds),
            }
        )
    quartiles = np.percentile(np.asarray(curves), (25, 50, 75), axis=0).round(1).tolist()
    record_rows(
        f"mujoco-{task.lower()}-{name}",
        rows,
        total_steps=1_000_000,
        settings={"command": f"jaxrl train --preset {name} --env envpool:{task}-v4 --total-steps 1000000"},
        curve={"every": 100_000, "25 %": quartiles[0], "50 %": quartiles[1], "75 %": quartiles[2]},
    )
    assert min(row["learned_fraction"] for row in rows) >= 0.9, rows
    assert np.mean([row["mean action"] for row in rows]) >= 300.0, rows


@pytest.mark.learning
@pytest.mark.skipif("jax.default_backend() == 'cpu'")
@pytest.mark.parametrize("name", ["impala", "ppo"])
def test_pong_is_solved(name, trained):
    """Issue 4: 20 within 10M rows, where there is an accelerator."""
    network = ActorCritic(NatureCNN(), shared=True)
    ppo = jaxrl.PPO(learning_rate=Linear(2.5e-4, 0.0), clip=0.1, rollout_length=128, minibatches=4, network=network)
    algo = PRESETS["impala-paper"].algorithm if name == "impala" else ppo
    how = {"command": None, "topology": jaxrl.Sebulba(num_envs=32, actors=4), "evaluation_episodes": 16}
    env = jaxrl.make("envpool:Pong-v5", preset="classic")
    assert trained(f"pong-10m-{name}", algo, env, 10_000_000, 1, 20, "issue 4", **how).mean() >= 20


@pytest.mark.learning
def test_ppo_in_pong(trained):
    """2M rows on a CPU, issue 4: above -15, where it ends; CleanRL's settings for Atari, in 16 environments."""
    algo = jaxrl.PPO(
        learning_rate=Linear(5e-4, 0.0),
        clip=0.1,
        rollout_length=128,
        minibatches=8,
        network=ActorCritic(NatureCNN(filters=(16, 32, 32), width=256), shared=True),
    )
    how = {"target_return": -14.0, "evaluate_every": 200_000, "evaluation_episodes": 8}
    how |= {"command": None, "topology": jaxrl.Sebulba(num_envs=16, actors=2)}
    env = jaxrl.make("envpool:Pong-v5", preset="classic")
    assert trained("pong-ppo", algo, env, 2_000_000, 1, -15, "issue 4", **how).mean() > -15
