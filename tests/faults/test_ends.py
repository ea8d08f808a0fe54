"""Processes with host environments that are told to end, or that hang: how they end, and that nothing outlives them."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.patience import PATIENCE

from jaxrl.run import checkpoint
from jaxrl.run.loggers import read_metrics

pytestmark = pytest.mark.faults

TESTS, ROOT = Path(__file__).parents[1], Path(__file__).parents[2]


def begun(folder, *words):
    """A process of its own group, whose output goes into files of the folder."""
    path = os.pathsep.join(map(str, (ROOT, TESTS)))
    env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        return subprocess.Popen(
            [sys.executable, *words], env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )


@contextlib.contextmanager
def running(folder, *words):
    process = begun(folder, *words)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def alive(session):
    """The processes of a session that run, by what they are; workers have groups of their own in it."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, of = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
    return found


def wait_for(condition, seconds, what):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, what()
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, 143, id="SIGTERM"),
    ],
)
def test_told_to_end_a_run_saves_and_leaves_no_worker(number, code, tmp_path):
    """All processes of the group are told, as a terminal and some schedulers do."""
    run = tmp_path / "run"
    words = ["train", "ppo", "--env", "gymnasium:host_probes:Counting-v0", "--env-params", "workers=2"]
    words += ["--total-steps", "100000000", "--num-envs", "4", "--rollout-length", "8", "--evaluate-every", "0"]
    words += ["--log-every", "1024"]
    with running(tmp_path, "-m", "jaxrl", *words, "--checkpoint-every", "0", "--run-dir", str(run)) as process:
        said = lambda: (tmp_path / "err").read_text()  # noqa: E731
        rows = run / "metrics.jsonl"
        wait_for(lambda: process.poll() is not None or rows.exists() and read_metrics(rows), PATIENCE, said)
        assert len([what for what in alive(process.pid).values() if "worker_program" in what]) == 2, said()
        os.killpg(process.pid, number)
        assert process.wait(PATIENCE) == code, said()
        wait_for(lambda: not alive(process.pid), PATIENCE, lambda: alive(process.pid))
        assert "Traceback" not in said() and "replaced" not in said()
    record = json.loads((run / "result.json").read_text())
    assert record["stopped"] == "interrupted" and 0 < record["total_steps"] < 100_000_000
    assert checkpoint.read_manifest(run / "checkpoints").step == record["total_steps"]


@pytest.mark.exhaustive
def test_a_run_whose_terminal_is_closed_saves(tmp_path):
    """The system tells its processes so, and what they still write there fails."""
    run = tmp_path / "run"
    words = ["-m", "jaxrl", "train", "ppo", "--env", "gymnax:CartPole-v1", "--total-steps", "1000000000"]
    words += ["--num-envs", "4", "--rollout-length", "8", "--evaluate-every", "0", "--checkpoint-every", "0"]
    words += ["--log-every", "1024"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore", "TERM": "xterm"}
    terminal, theirs = pty.openpty()
    # Who leads a session and opens a terminal has it from then on; a test run under `nohup` passes its deafness on.
    lead = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.open(os.ttyname(0), os.O_RDWR); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    words = [sys.executable, "-c", lead, *words, "--run-dir", str(run)]
    given = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = subprocess.Popen(words, env=env, start_new_session=True, **given)
    os.close(theirs)
    said, until = b"", time.monotonic() + PATIENCE
    try:
        rows = run / "metrics.jsonl"
        while not (rows.exists() and read_metrics(rows)):
            assert process.poll() is None and time.monotonic() < until, said.decode(errors="replace")
            if select.select([terminal], [], [], 0.05)[0]:
                said += os.read(terminal, 65536)
        os.close(terminal)
        status = process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert status == 129
    record = json.loads((run / "result.json").read_text())
    assert record["stopped"] == "interrupted" and 0 < record["total_steps"]
    assert checkpoint.read_manifest(run / "checkpoints").step == record["total_steps"]


# EnvPool waits in C++, where no signal reaches: for what was never sent.
STUCK = """
import jax
from jaxrl.envs.host.envpool import EnvPoolEnvironment
import jaxrl
from helpers.programs import PPO

class Deaf:
    def __init__(self, pool):
        self.pool, self.sent = pool, 0
    def send(self, *arguments):
        self.sent += 1
        if self.sent < 20:
            self.pool.send(*arguments)
    def __getattr__(self, name):
        return getattr(self.pool, name)

begin = EnvPoolEnvironment.__init__
def begin_deaf(self, *arguments):
    begin(self, *arguments)
    self._pool = Deaf(self._pool)
EnvPoolEnvironment.__init__ = begin_deaf
topology = jaxrl.Sebulba(num_envs=8, ready=4, step_timeout=2.0)
jaxrl.train(PPO, "envpool:CartPole-v1", total_steps=10_000, topology=topology, progress=False, evaluate_every=0)
"""

# What a Ray actor is, without Ray.
ACTOR = """
import threading
import jax, numpy as np
from helpers.spoiled import Spoiled
from jaxrl.parallel.sebulba.collector import Published
from jaxrl.parallel.host_rollout import HostSteps
from jaxrl.parallel.ray.actors import RolloutActor
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import env_spec
from helpers.programs import ENV, NUM_ENVS, PPO

env = Spoiled(ENV, at=3, then=lambda host: threading.Event().wait(600))
spec, algo = env_spec(env), resolve_schedules(PPO, np.float32(0.0))
actor = RolloutActor(NUM_ENVS, 0, 0, env, HostSteps(spec, NUM_ENVS, NUM_ENVS, 8), 0, 2.0)
actor.rollout(Published(algo, algo.actor(algo.init(jax.random.key(0), spec)), np.int32(0)), 0)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("program", "where", "words"),
    [
        pytest.param(STUCK, "in recv", "have been at envpool:CartPole-v1 is stepping environments [", id="EnvPool"),
        pytest.param(ACTOR, "in _step", "Timeout (0:00:02)!", id="an actor with the policy"),
    ],
)
def test_what_hangs_ends_its_process_with_the_stacks_shown(program, where, words, tmp_path):
    if program is STUCK:
        pytest.importorskip("envpool")
    with running(tmp_path, "-c", program) as process:
        code, said = process.wait(PATIENCE), (tmp_path / "err").read_text()
    assert code == 1, said
    assert words in said and where in said and "most recent call first" in said, said
