"""NaN and infinities: the run stops within two chunks, says what and where, and keeps nothing that is not finite."""

import json
import re
from types import SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import programs
from helpers.programs import ENV, NUM_ENVS, ROWS, Spoiled, all_finite, anakin, assert_equal
from helpers.strict_json import read_json

import jaxrl
from jaxrl.core.report import EpisodeSums, make_report
from jaxrl.core.schedules import PiecewiseConstant
from jaxrl.parallel import iteration
from jaxrl.parallel.program import Program
from jaxrl.parallel.replicas import SingleReplica
from jaxrl.run.directory import checkpoint
from jaxrl.run.loop import run_loop, stopping

ITERATIONS = 10
TICKS = ROWS // NUM_ENVS  # of one iteration
# One program an algorithm: what goes wrong, and where, is numbers only.
CALM, EXPLODING = (PiecewiseConstant(values=(1e-3, rate), boundaries=(0.45,)) for rate in (1e-3, 1e30))
ALGORITHMS = {
    name: algo.replace(learning_rate=CALM)
    for name, algo in (("ppo", programs.PPO), ("recurrent_ppo", programs.RECURRENT_PPO), ("dqn", programs.DQN))
}
PPO, DQN = ALGORITHMS["ppo"], ALGORITHMS["dqn"]
FINE = Spoiled(ENV)


def spoiled(tick, value=np.nan, what="reward"):
    return Spoiled(
        ENV,
        tick=np.int32(tick),
        value=np.float32(value),
        in_reward=np.bool_(what == "reward"),
        in_observation=np.bool_(what == "observation"),
    )


@pytest.fixture(autouse=True)
def chunks(monkeypatch, one_iteration_chunks):
    """Make chunks of one iteration; return the list of those that were dispatched."""
    dispatched = []
    chunk = Program.chunk

    def counted(self, algo, env, state, length, *others):
        dispatched.append(length)
        return chunk(self, algo, env, state, length, *others)

    monkeypatch.setattr(Program, "chunk", counted)
    return dispatched


def train(algo, env=FINE, **settings):
    settings = {"evaluate_every": 0, "checkpoint_every": 2 * ROWS, "evaluation_episodes": 8} | settings
    return programs.train(algo=algo, env=env, total_steps=ITERATIONS * ROWS, **settings)


def state_after(algo, env, iterations):
    """Return the state of the same run after some iterations."""
    program = anakin().bind(algo, env)
    state = program.start(algo, env, 0)
    return program.chunk(algo, env, state, iterations, ITERATIONS * TICKS)[0]


def checkpoints(run_dir, template):
    """Return every checkpoint of a run, by iteration."""
    directory = run_dir / "checkpoints"
    steps = sorted(int(path.name) for path in directory.iterdir())
    return {step // ROWS: checkpoint.restore(directory, template, step)[0] for step in steps}


@pytest.mark.long
@pytest.mark.parametrize(("value", "devices"), [(np.nan, 1), (np.inf, 1), (np.nan, 2)])
def test_a_reward_that_is_not_finite(value, devices, chunks, tmp_path):
    env = spoiled(5 * TICKS + 3, value)
    at = f"at its step {5 * TICKS + 3}.*step {6 * ROWS}"
    said = f"environment 0 .index from 0. returned NaN or infinity as reward {at}"
    with pytest.warns(RuntimeWarning, match=f"{said}.*reward.*reset"):
        result = train(PPO, env, run_dir=tmp_path / "run", topology=anakin(devices))
    assert result.stopped == "non_finite" and result.total_steps == 5 * ROWS
    assert f"not finite in the iteration that ended at step {6 * ROWS}: " in result.problem
    assert "reward" in result.problem and "observation" not in result.problem
    assert "learner.network.params" in result.problem, "the leaves that the chunk left are named"
    assert len(chunks) <= 7, "the sixth iteration failed: at most one more was under way"
    assert all_finite(result.state) and all_finite(result.metrics)
    assert_equal(state_after(PPO, env, 5), result.state, 0.0 if devices == 1 else 1e-5)
    saved = checkpoints(tmp_path / "run", result.state)
    assert list(saved) == [2, 4, 5] and all(all_finite(state) for state in saved.values())
    assert_equal(saved[5], result.state)
    record = read_json(tmp_path / "run" / "result.json")
    assert record["stopped"] == "non_finite" and record["problem"] == result.problem
    rows = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == [ROWS * number for number in range(1, 6)]


@pytest.mark.long
@pytest.mark.parametrize(("tick", "kept"), [(2 * TICKS + 1, 2), (2 * TICKS, 1)], ids=["a row", "the last of a chunk"])
def test_an_observation_that_is_not_finite(tick, kept):
    """The last of a chunk is no row yet, but the state after it holds it: that one is not the last good one."""
    with pytest.warns(RuntimeWarning, match=f"environment 0 .*as observation at its step {tick} "):
        result = train(DQN, spoiled(tick, what="observation"))
    assert ("timestep.observation" in result.problem) == (kept == 1)
    assert result.stopped == "non_finite" and result.total_steps == kept * ROWS and all_finite(result.state)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_parameters_that_explode(name, tmp_path):
    with pytest.warns(RuntimeWarning, match="^not finite.*learning rate"):
        result = train(ALGORITHMS[name].replace(learning_rate=EXPLODING), run_dir=tmp_path / "run")
    assert result.stopped == "non_finite" and 5 * ROWS <= result.total_steps <= 7 * ROWS
    assert "loss" in result.problem and "gradient_norm" in result.problem and "learner.network.params" in result.problem
    assert "reward" not in result.problem
    assert all_finite(result.state) and all_finite(result.policy.actor)
    saved = checkpoints(tmp_path / "run", result.state)
    assert result.total_steps // ROWS in saved and all(all_finite(state) for state in saved.values())
    assert result.evaluate(episodes=4).episodes == 4


@pytest.mark.long
def test_a_replay_that_met_nan_is_emptied():
    env = spoiled(5 * TICKS + 3)
    with pytest.warns(RuntimeWarning, match="reward"):
        result = train(DQN, env)
    assert result.total_steps == 5 * ROWS and all_finite(result.state)
    good = state_after(DQN, env, 5)
    assert int(result.state.empty_at) == 5 * TICKS, "it fills anew before learning goes on"
    assert_equal(good.replace(buffers={}, empty_at=result.state.empty_at), result.state.replace(buffers={}))
    assert good.buffers["replay"].ring.filled > 0 and result.state.buffers["replay"].ring.filled == 0


@pytest.mark.long
def test_a_failure_in_the_first_chunk_leaves_the_first_state(tmp_path):
    env = spoiled(1)
    with pytest.warns(RuntimeWarning, match="the state at step 0"):
        result = train(PPO, env, run_dir=tmp_path / "run")
    assert result.total_steps == 0 and result.metrics == [] and not result.evaluation
    assert_equal(result.state, anakin().bind(PPO, env).start(PPO, env, 0))


@pytest.mark.long
def test_in_a_long_chunk_the_iteration_is_named(monkeypatch):
    monkeypatch.setattr(run_loop, "_CHUNK_SECONDS", 1e6)
    with pytest.warns(RuntimeWarning, match=f"ended at step {7 * ROWS}: .*reward.*leaves at step"):
        result = train(PPO, spoiled(6 * TICKS + 1), checkpoint_every=0)
    # Three chunks of one iteration, until it is known how long one takes; the fourth is of all the others.
    assert result.total_steps == 3 * ROWS


class Glitch(gymnasium.Env):
    """The third that a run makes (the first of all is looked at) shows NaN from its sixth step on."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space, made = gymnasium.spaces.Box(-1.0, 1.0, (1,)), []

    def __init__(self):
        self.made.append(self)
        self.seed, self.steps = None, 0

    def reset(self, *, seed=None, options=None):
        self.seed = self.seed or seed
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        shown = np.nan if self.made.index(self) == 3 and self.steps > 5 else 0.5
        return np.full(2, shown, np.float32), 1.0, False, self.steps % 4 == 0, {}


@pytest.mark.long
def test_an_environment_of_the_host_is_named_with_its_seed_and_what_it_returned():
    """Although the policy's actions, and most that is learned, are not finite either from then on."""
    algo = jaxrl.PPO(rollout_length=4, epochs=1, minibatches=1, network=PPO.network)
    with pytest.warns(RuntimeWarning, match="step 32.*in its reset and step"):
        result = jaxrl.train(algo, Glitch, total_steps=64, num_envs=4, evaluate_every=0, progress=False)
    who = f"environment 2 (index from 0, seed {Glitch.made[3].seed}) returned NaN or infinity as observation"
    who += " at its step 7"
    assert result.problem.startswith(who) and result.stopped == "non_finite"
    assert result.total_steps == 16 and all_finite(result.state)


STATE = SimpleNamespace(learner=np.zeros(1), carry=(), timestep=(), buffers={}, replace=lambda **_: None)
EXPERIENCE = SimpleNamespace(store=lambda *_: {}, num_envs=6, shards=1, replicas=SingleReplica(1))
LAYOUT = SimpleNamespace(num_envs=6, spec=SimpleNamespace(num_agents=2, native=None))


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [
        ({}, "not finite"),
        ({"observation": (2, 4)}, "environment 2 .*agent 0. returned NaN or infinity as observation.x at its step 8 "),
        ({"observation": (0, 5), "reward": (0, 0)}, "environment 2 .*agent 1. .*observation.x at its step 6 "),
        ({"observation": (3, 0), "reward": (1, 1)}, "environment 0 .*agent 1. .*reward at its step 8 "),
        ({"observation": (2, 4), "action": (2, 4)}, "environment 2 .*observation"),
        ({"observation": (2, 4), "action": (1, 5)}, "not finite"),
        ({"reward": (1, 0), "action": (1, 0)}, "not finite"),
    ],
    ids=str,
)
def test_what_came_first_is_blamed(spoiled, said):
    """The report names an environment, or else the policy, in 6 rows of two agents each, in the third iteration."""
    x = {"action": np.zeros((3, 6, 2)), "observation": np.zeros((4, 6, 2)), "reward": np.zeros((3, 6))}
    for name, place in spoiled.items():
        x[name][place] = np.inf
    timesteps = SimpleNamespace(first=np.zeros((4, 6)), observation={"x": x["observation"]})
    rollout = SimpleNamespace(action=x["action"], timesteps=timesteps, rows=SimpleNamespace(reward=x["reward"]))
    _, broken = iteration.store(EXPERIENCE, STATE, rollout)
    report = make_report(EpisodeSums.zero(), {"loss": jnp.float32(np.nan)}, jnp.float32(1.0), broken)
    stop = stopping.non_finite(report, STATE, 54, 54, SimpleNamespace(topology=anakin(), seed=0), LAYOUT)
    assert re.match(said, stop.problem)


@pytest.mark.long
def test_the_state_has_its_own_word():
    """Metrics are of the parameters before the last update, so the report looks at the state as well."""
    program = anakin().bind(PPO, FINE)
    state, report = program.chunk(PPO, FINE, program.start(PPO, FINE, 0), 2, 100)
    assert report.failed_at == -1 and report.with_state(state, jnp.int32(1)).failed_at == -1
    for spoil in (
        lambda s: s.replace(learner=jax.tree.map(lambda x: x / 0 if x.dtype == jnp.float32 else x, s.learner)),
        lambda s: s.replace(timestep=s.timestep.replace(observation=s.timestep.observation.at[3, 1].set(jnp.nan))),
        lambda s: s.replace(timestep=s.timestep.replace(reward=s.timestep.reward.at[7].set(-jnp.inf))),
    ):
        assert report.with_state(spoil(state), jnp.int32(1)).failed_at == 1
    # Of many runs, the one is marked.
    many = jax.tree.map(lambda x: jnp.stack([x, x, x]), state)
    reward = many.timestep.reward.at[1, 0].set(jnp.nan)
    many = many.replace(timestep=many.timestep.replace(reward=reward))
    reports = jax.tree.map(lambda x: jnp.stack([x, x, x]), report).with_state(many, jnp.int32(1))
    np.testing.assert_array_equal(reports.failed_at, [-1, 1, -1])
