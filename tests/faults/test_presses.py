"""Ctrl-C and SIGTERM at any moment of a command: the process ends at once, and what was learned is there.

At exact places, by a command that signals itself there and then never goes on; while it trains, with all that it
started; and at moments drawn once and for all.
"""

import contextlib
import os
import pty
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import processes
from helpers.patience import PATIENCE, wait_for
from helpers.strict_json import read_json

from jaxrl.run.directory import checkpoint
from jaxrl.run.loggers import read_metrics

pytestmark = pytest.mark.faults

AT_ONCE = 10.0  # seconds in which a command ends, on a machine where Python starts in `START`
START = 0.5
SPREAD = 30.0  # seconds from the first line of a command, over which signals are spread
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
SMALL = ["--env", "gymnax:CartPole-v1", "--num-envs", "4", "--rollout-length", "8", "--network.torso", "mlp:8"]
FEW = ["--evaluation-episodes", "2"]

# The command of jaxrl in a process that presses Ctrl-C somewhere.
PRESSING = """
import hashlib, importlib, os, signal, sys, threading, time
from jaxrl.core import interrupts
interrupts.own()

def press(*_, **__):
    os.kill(os.getpid(), {number})

pressed = []

def press_once(*_, **__):
    if not pressed:
        pressed.append(press())

def press_for_ever(*_, **__):
    press()
    time.sleep(600)

def press_in_c(*_, **__):
    press()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # which no handler of Python's interrupts, as XLA

def instead(module, name, does, first=False):
    owner = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    before = getattr(owner, last)
    def both(*args, **kwargs):
        if first:
            does()
        found = before(*args, **kwargs)
        if not first:
            does()
        return found
    setattr(owner, last, both)

class Importing:
    def __init__(self, name, does):
        self.name, self.does = name, does
    def find_spec(self, name, path, target=None):
        if name == self.name:
            self.does()

def importing(name, does):
    sys.meta_path.insert(0, Importing(name, does))

{place}
from jaxrl.__main__ import main
sys.exit(main())
"""


QUIET = {"PYTHONWARNINGS": "ignore"}


def python(*words, check=True):
    """Run Python with these arguments to its end."""
    command, limits = [sys.executable, *words], {"timeout": PATIENCE, "check": check}
    return subprocess.run(command, env=processes.environment(**QUIET), capture_output=True, text=True, **limits)


def pressed(place, *words, number=signal.SIGINT):
    """Return the exit code of a command that presses there, and what it said."""
    ran = python("-c", PRESSING.format(place=place, number=int(number)), *words, check=False)
    said = ran.stdout + ran.stderr
    assert "Traceback" not in said, said
    return ran.returncode, said


def command(name, run, steps=256):
    training = ["ppo", *SMALL, *FEW, "--total-steps", str(steps), "--run-dir", str(run)]
    words = {
        "train": training,
        "sweep": [*training, "--seeds", "2"],
        "tune": [*training, "--trials", "2"],
        "eval": [str(run), "--episodes", "2"],
        "compile": training,
        "export-rlds": [str(run), "--out", f"{run}-rlds", "--episodes", "2"],
        "plot": [str(run), "--out", f"{run}.png"],
    }
    return [name, *words[name]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the directory of a run that has ended."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    python("-m", "jaxrl", *command("train", run_dir))
    return run_dir


# --- at exact places ---------------------------------------------------------------------------------------------

# Before anything was learned, or after all is saved: by command, what it is at.
PLACES = [
    ("train", "an import", 'importing("jax._src.lib", press_for_ever)'),
    ("train", "a compile", 'instead("jaxrl.parallel.program", "Program.compile_chunk", press_in_c, True)'),
    ("train", "the report", 'instead("jaxrl.cli.training", "_report", press_for_ever, True)'),
    ("train", "the table", 'instead("jaxrl.cli.table", "algorithm_flags", press_for_ever, True)'),
    ("train", "the environment", 'instead("jaxrl.envs", "make", press_for_ever, True)'),
    ("train", "late imports", 'importing("orbax.checkpoint", press_for_ever)'),
    ("sweep", "a compile", 'instead("jaxrl.sweeps.vectorized", "VectorizedRuns.start", press_in_c, True)'),
    ("sweep", "an evaluation", 'instead("jaxrl.sweeps.vectorized", "VectorizedRuns.evaluate", press_in_c, True)'),
    ("tune", "a trial", 'instead("jaxrl.sweeps.vectorized", "VectorizedRuns.evaluate", press_in_c, True)'),
    ("tune", "an import", 'importing("optuna", press_for_ever)'),
    ("eval", "a checkpoint", 'instead("jaxrl.run.directory.checkpoint", "restore", press_in_c, True)'),
    ("eval", "episodes", 'instead("jaxrl.run.policies.evaluation", "_play", press_in_c, True)'),
    ("export-rlds", "writing", 'instead("jaxrl.data.rlds", "RldsWriter.write", press_for_ever)'),
    ("compile", "a compile", 'instead("jaxrl.parallel.program", "Program.chunk", press_in_c)'),
    ("plot", "drawing", 'instead("jaxrl.run.plotting", "plot_runs", press_in_c, True)'),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "place"),
    [pytest.param(name, place, id=f"{name}: {what}") for name, what, place in PLACES],
)
def test_where_nothing_is_to_be_saved_a_command_ends_at_once(name, place, tmp_path, request):
    known = name in ("eval", "export-rlds", "plot")
    run = request.getfixturevalue("trained") if known else tmp_path / "run"
    number = signal.SIGTERM if name in ("tune", "eval") else signal.SIGINT
    code, said = pressed(place, *command(name, run), number=number)
    assert code == CODES[number] and said.endswith("interrupted\n"), said
    if "_report" in place:
        assert read_json(run / "result.json")["stopped"] == "finished"
    if name == "export-rlds":
        assert not list(run.parent.glob(f".{run.name}-rlds*")), "what was written was left behind"
    if name == "compile":
        assert not run.exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "place",
    [
        pytest.param('instead("jaxrl.run.loop.run_loop", "write_result", press, True)', id="the result is written"),
        pytest.param('instead("jaxrl.run.result", "plot_runs", press, True)', id="its curve is drawn"),
        pytest.param(
            'instead("jaxrl.run.loop.signals", "Signals.__exit__", press, True)', id="the run gives signals back"
        ),
        pytest.param('instead("jaxrl.cli.training", "_report", press)', id="all is done"),
    ],
)
def test_at_its_end_a_run_is_finished_and_the_exit_code_that_of_the_signal(place, tmp_path):
    code, said = pressed(place, *command("train", tmp_path / "run"))
    assert code == 130, said
    assert read_json(tmp_path / "run" / "result.json")["stopped"] == "finished"
    assert checkpoint.read_manifest(tmp_path / "run" / "checkpoints").step == 256


def test_a_sweep_that_is_interrupted_after_its_last_point_has_saved_it(tmp_path):
    words = command("sweep", tmp_path / "run")
    code, said = pressed('instead("jaxrl.run.directory.checkpoint", "Checkpointer.save", press_once)', *words)
    assert code == 130, said
    assert checkpoint.read_manifest(tmp_path / "run" / "program-0" / "checkpoints").step > 0
    python("-m", "jaxrl", *words)


# --- while it trains -------------------------------------------------------------------------------------------------

UNENDING = "--total-steps 1000000000 --num-envs 4 --rollout-length 8 --evaluate-every 0 --checkpoint-every 0".split()
UNENDING += ["--log-every", "1024"]


def running(folder, *words, **variables):
    env = processes.environment(**QUIET, **variables)
    return processes.running([sys.executable, *words], folder / "said", env=env)


def alive(process, folder):
    """Return the command lines of the processes of a command's session, and of those that write into its folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            what = (path / "cmdline").read_text()
            if state != "Z" and (int(session) == process.pid or str(folder) in what):
                found.append(what)
    return found


def said_by(folder):
    return (folder / "said").read_text()


def assert_interrupted(run):
    record = read_json(run / "result.json")
    assert record["stopped"] == "interrupted" and 0 < record["total_steps"] < 1_000_000_000
    assert checkpoint.read_manifest(run / "checkpoints").step == record["total_steps"]


@pytest.mark.long
def test_processes_that_were_launched_end_with_the_command(tmp_path):
    """While they compile; the signal comes to the command alone, as from a terminal."""
    words = [*command("train", tmp_path / "run", 100_000_000), "--launch", "processes:2"]
    with running(tmp_path, "-m", "jaxrl", *words) as process:
        own = lambda: [what for what in alive(process, tmp_path) if str(tmp_path) in what]  # noqa: E731
        wait_for(lambda: process.poll() is not None or len(own()) == 3)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130, said_by(tmp_path)
        assert "Traceback" not in said_by(tmp_path)
        wait_for(lambda: not alive(process, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("number", CODES)
def test_told_to_end_a_run_saves_and_leaves_no_worker(number, tmp_path):
    """All processes of the group are told, as a terminal and some schedulers do."""
    run = tmp_path / "run"
    words = ["-m", "jaxrl", "train", "ppo", "--env", "gymnasium:host_probes:Counting-v0", "--env-params", "workers=2"]
    with running(tmp_path, *words, *UNENDING, "--run-dir", str(run)) as process:
        rows = run / "metrics.jsonl"
        wait_for(lambda: process.poll() is not None or rows.exists() and read_metrics(rows))
        workers = [what for what in alive(process, tmp_path) if "worker_program" in what]
        assert len(workers) == 2, said_by(tmp_path)
        os.killpg(process.pid, number)
        assert process.wait(PATIENCE) == CODES[number], said_by(tmp_path)
        wait_for(lambda: not alive(process, tmp_path))
        assert "Traceback" not in said_by(tmp_path) and "replaced" not in said_by(tmp_path)
    assert_interrupted(run)


def test_a_run_whose_terminal_is_closed_saves(tmp_path):
    """The system tells its processes so, and what they still write there fails."""
    run = tmp_path / "run"
    words = ["-m", "jaxrl", "train", "ppo", "--env", "gymnax:CartPole-v1", *UNENDING, "--run-dir", str(run)]
    terminal, theirs = pty.openpty()
    # Who leads a session and opens a terminal has it from then on; a test run under `nohup` passes its deafness on.
    lead = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.open(os.ttyname(0), os.O_RDWR); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    given = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    given["env"] = processes.environment(**QUIET, TERM="xterm")
    process = subprocess.Popen([sys.executable, "-c", lead, *words], start_new_session=True, **given)
    os.close(theirs)
    said, until = b"", time.monotonic() + PATIENCE
    try:
        rows = run / "metrics.jsonl"
        while not (rows.exists() and read_metrics(rows)):
            assert process.poll() is None and time.monotonic() < until, said.decode(errors="replace")
            if select.select([terminal], [], [], 0.05)[0]:
                said += os.read(terminal, 65536)
        os.close(terminal)
        assert process.wait(PATIENCE) == 129
    finally:
        process.kill()
        process.wait()
    assert_interrupted(run)


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


def test_what_hangs_ends_its_process_with_the_stacks_shown(tmp_path):
    pytest.importorskip("envpool")
    with running(tmp_path, "-c", STUCK) as process:
        code, said = process.wait(PATIENCE), said_by(tmp_path)
    assert code == 1, said
    for what in ("envpool:CartPole-v1 is stepping environments [", "in recv", "most recent call first"):
        assert what in said, said


# --- at any moment -----------------------------------------------------------------------------------------------


def is_owned(process):
    """Return whether the process has a handler for SIGTERM; until then, Python starts."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def press_at(moment, words, folder, cache, number):
    """Return how long a command took to end, in units of what a start takes on an idle machine."""
    began = time.monotonic()
    with running(folder, "-m", "jaxrl", *words, JAX_COMPILATION_CACHE_DIR=str(cache)) as process:
        wait_for(lambda: process.poll() is not None or is_owned(process))
        slowness = max(1.0, (time.monotonic() - began) / START)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(moment * min(slowness, 2.0))
        if process.poll() is not None:
            assert process.returncode == 0, said_by(folder)
            return 0.0
        os.killpg(process.pid, number)
        pressed_at = time.monotonic()
        code = process.wait(PATIENCE)
        took = time.monotonic() - pressed_at
        # It may have ended by itself in that very moment.
        assert code in (CODES[number], 0, -number), said_by(folder)
        assert "Traceback" not in said_by(folder) and "ignored in" not in said_by(folder), said_by(folder)
        return took / slowness


def press_often(count, spread, trained, folder):
    """Send signals to four commands, with and without compiled programs; return the longest time that an end took.

    The moments are drawn once and for all, each command's from all parts of the spread.
    """
    rng, warm, longest = random.Random(33), folder / "warm", 0.0
    for number in range(count):
        name = ("train", "sweep", "tune", "eval")[number % 4]
        cold = rng.random() < 0.5
        run = folder / f"{name}-{'cold' if cold else 'warm'}"
        words = command(name, trained if name == "eval" else run, 10_000_000)
        words += {"eval": ["--episodes", "20000"], "sweep": ["--points", "500"]}.get(name, [])
        cache = folder / f"cold-{number}" if cold else warm
        moment, kind = spread * (number + rng.random()) / count, rng.choice(list(CODES))
        took = press_at(moment, words, folder, cache, kind)
        print(
            f"{number}: {name} {'cold' if cold else 'warm'} {moment:.2f} s: {kind.name} took {took:.2f} s", flush=True
        )
        longest = max(longest, took)
        if name == "train" and (run / "metrics.jsonl").exists():
            rows = read_metrics(run / "metrics.jsonl")
            saved = checkpoint.complete_steps(run / "checkpoints")
            assert max((row["step"] for row in rows), default=0) <= max(saved, default=0), "something was lost"
    return longest


@pytest.mark.long
def test_twenty_signals_at_any_moment(trained, tmp_path):
    """They come while a command starts and compiles, and shortly after; `test_told_to_end` has those of later."""
    press_often(20, SPREAD / 5, trained, tmp_path)


@pytest.mark.endurance
def test_many_signals_at_any_moment(trained, tmp_path):
    count = int(os.environ.get("FAULTS_PRESSES") or 200)
    assert press_often(count, SPREAD, trained, tmp_path) < AT_ONCE
