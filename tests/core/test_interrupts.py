"""Signals at exact moments: in processes that own theirs, and in functions that may be interrupted."""

import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest
from helpers.patience import PATIENCE
from helpers.tiers import one_quick

from jaxrl.core import interrupts
from jaxrl.core.interrupts import interruptible

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}

# A process that owns its signals, sends itself one somewhere, and never ends by itself.
OWNER = """
import atexit, contextlib, hashlib, os, signal, subprocess, sys, threading, time, weakref
from jaxrl.core import interrupts
interrupts.own()
def press():
    os.kill(os.getpid(), int(sys.argv[1]))
def never():
    time.sleep(600)
"""
IN_C = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"  # no handler of Python's runs until it returns


def ran(program, number=signal.SIGINT, **settings):
    """How a process ends that owns its signals: the exit code and what it wrote to standard error."""
    words = [sys.executable, "-c", OWNER + textwrap.dedent(program), str(int(number))]
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | settings
    return subprocess.run(words, timeout=PATIENCE, check=False, **settings)


PLACES = {
    "an import": """
        import importlib.abc, importlib.util
        class Slow(importlib.abc.MetaPathFinder, importlib.abc.Loader):
            def find_spec(self, name, path, target=None):
                return importlib.util.spec_from_loader(name, self) if name == "slow" else None
            def exec_module(self, module):
                press()
                never()
        sys.meta_path.insert(0, Slow())
        import slow
    """,
    "an import in a thread": """
        import importlib
        def find_spec(name, path, target=None):
            if name == "slow":
                press()
                never()
        sys.meta_path.insert(0, type("Slow", (), {"find_spec": staticmethod(find_spec)}))
        threading.Thread(target=importlib.import_module, args=("slow",), daemon=True).start()
        import slow
    """,
    "the callback of a weak reference": """
        class Thing: pass
        thing = Thing()
        reference = weakref.ref(thing, lambda _: (press(), never()))
        del thing
    """,
    "a finalizer": """
        class Thing:
            def __del__(self):
                press()
                never()
        Thing()
    """,
    "C code": f"""
        threading.Timer(0.2, press).start()
        {IN_C}
    """,
    "code that takes every exception": """
        while True:
            try:
                press()
                never()
            except BaseException:
                pass
    """,
    "a thread that is waited for": """
        threading.Timer(0.2, press).start()
        thread = threading.Thread(target=never, daemon=True)
        thread.start()
        thread.join()
    """,
    "the end of the interpreter": """
        atexit.register(never)
        atexit.register(press)
    """,
    "a thread that outlives the program": """
        threading.Thread(target=never).start()
        press()
    """,
}


@pytest.mark.parametrize("place", one_quick(PLACES, "an import", "C code", "the end of the interpreter"))
def test_a_signal_anywhere_ends_the_process_at_once(place):
    ended = ran(PLACES[place])
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("number", CODES)
def test_the_exit_code_is_that_of_the_signal(number):
    heard = functools.partial(signal.signal, number, signal.SIG_DFL)  # nohup has one of them ignored
    ended = ran("print('said', end='')\npress()\nnever()", number, preexec_fn=heard)
    assert (ended.returncode, ended.stderr, ended.stdout) == (CODES[number], "interrupted\n", "said")


def test_what_receives_signals_hears_all_of_them_also_during_c_code_and_none_afterwards():
    program = f"""
        heard, numbers = [], [signal.SIGTERM, signal.SIGINT, signal.SIGINT]
        def hear(number):
            heard.append(number)
            if numbers:
                os.kill(os.getpid(), numbers.pop())
            elif len(heard) == 4:
                interrupts.leave(heard[1])
        before = []
        with interrupts.receiving(before.append):
            with interrupts.receiving(lambda number: before.append(-number)):
                press()
                while not before:
                    time.sleep(0.01)
            press()
            while len(before) < 2:
                time.sleep(0.01)
        print(*before, flush=True)
        with interrupts.receiving(hear):
            threading.Timer(0.2, press).start()
            {IN_C}
    """
    ended = ran(program)
    assert (ended.returncode, ended.stdout) == (130, f"{-signal.SIGINT} {int(signal.SIGINT)}\n")
    program = """
        with interrupts.receiving(lambda number: 1 // 0):
            press()
            never()
    """
    assert ran(program).returncode == 130, "what receives it failed"


def test_what_is_cleaned_up_may_fail_and_hang():
    program = """
        interrupts._FAREWELL = 0.5
        def hang():
            print("hangs", flush=True)
            never()
        with interrupts.cleaning_up(lambda: print("not this")):
            pass
        with interrupts.cleaning_up(hang), interrupts.cleaning_up(lambda: 1 // 0):
            with interrupts.cleaning_up(lambda: print("last in, first out")):
                press()
                never()
    """
    ended = ran(program)
    assert (ended.returncode, ended.stdout) == (130, "last in, first out\nhangs\n")


def test_a_pipe_that_nobody_reads_holds_nothing_up():
    program = """
        os.set_blocking(2, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(2, b"x" * 65536)
        os.set_blocking(2, True)
        press()
        never()
    """
    process = subprocess.Popen([sys.executable, "-c", OWNER + textwrap.dedent(program), "2"], stderr=subprocess.PIPE)
    try:
        assert process.wait(PATIENCE) == 130
    finally:
        process.kill()
        process.communicate()


def test_children_have_signals_of_their_own():
    program = """
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            never()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        text = "import signal; print(signal.getsignal(signal.SIGINT), signal.pthread_sigmask(0, []))"
        for how in (contextlib.nullcontext, interrupts.blocked):
            with how():
                subprocess.run([sys.executable, "-c", text], check=True)
        time.sleep(0.2)
        os._exit(7)
    """
    ended = ran(program)
    first, second = ended.stdout.splitlines()
    assert ended.returncode == 7 and "interrupted" not in ended.stderr
    assert "default_int_handler" in first and "set()" in first and "SIGINT" in second


@pytest.mark.parametrize(
    "taken",
    [
        pytest.param("signal.set_wakeup_fd(other)", id="an event loop has the descriptor"),
        pytest.param("signal.signal(signal.SIGTERM, lambda *_: None); interrupts.own()", id="owned again"),
        pytest.param("signal.signal(signal.SIGTERM, lambda *_: None)", id="with a handler of its own"),
    ],
)
def test_what_a_library_takes_is_acted_on_all_the_same(taken):
    program = f"""
        other = os.open(os.devnull, os.O_WRONLY | os.O_NONBLOCK)
        {taken}
        press()
        never()
    """
    assert ran(program, signal.SIGTERM).returncode == 143


def test_sighup_stays_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ran("press()\ntime.sleep(0.3)\nos._exit(7)", signal.SIGHUP).returncode == 7
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sigint_that_came_while_it_was_blocked_is_acted_on():
    program = "import os, signal; os.kill(os.getpid(), 2)\n" + OWNER + "never()"
    with interrupts.blocked():
        process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert process.communicate(timeout=PATIENCE)[1] == "interrupted\n" and process.returncode == 130


AFTER = {
    "nothing": ("", 130),
    "a failure": ("; code = 3", 3),
    "an exit hook that hangs": ("; interrupts._LAST = 0.5; atexit.register(never)", 130),
    "a thread that outlives it": ("; interrupts._LAST = 0.5; threading.Thread(target=never).start()", 130),
}


@pytest.mark.parametrize("what", one_quick(AFTER, "nothing", "an exit hook that hangs"))
def test_an_interrupted_command_ends_within_seconds_once_it_has_returned(what):
    text, code = AFTER[what]
    program = f"""
        heard = []
        code = 0{text}
        atexit.register(lambda: print("goodbye", flush=True))
        with interrupts.receiving(heard.append):
            press()
            while not heard:
                time.sleep(0.01)
        sys.exit(interrupts.returned(code))
    """
    ended = ran(program)
    assert ended.returncode == code and ended.stdout in ("goodbye\n", "")
    assert ended.stdout or "outlives" in what


def test_a_command_that_was_not_interrupted_ends_as_ever():
    ended = ran("atexit.register(print, 'bye'); print('all'); sys.exit(interrupts.returned(3))")
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "all\nbye\n", "")


@pytest.mark.long
def test_a_command_ends_while_a_thread_waits_for_jax():
    """Python ends daemon threads where they next ask for its lock, which within C++ aborts the process."""
    program = """
        import jax, jax.numpy as jnp
        once, some = jax.jit(lambda x: x @ x), jnp.ones((300, 300))
        def work():
            while True:
                jax.block_until_ready(once(some))
        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(1.0)
        sys.exit(interrupts.returned(0))
    """
    ended = ran(program)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_command_whose_output_is_lost_ends_as_a_failure():
    with open("/dev/full", "w") as full:
        program = OWNER + "print('all', end=''); sys.exit(interrupts.returned(0))"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        assert subprocess.run([sys.executable, "-c", program], stdout=full, env=environment).returncode == 120


@pytest.mark.parametrize("closed", ["", "; sys.stdout.close()"])
def test_a_command_without_an_output_has_lost_none(closed):
    program = OWNER + f"print('all'){closed}; sys.exit(interrupts.returned(0))"
    command = [sys.executable, "-c", program]
    if not closed:
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0


# --- in a process of somebody else's -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def python_s_own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler), sys.unraisablehook
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and sys.unraisablehook is before[1]
    signal.signal(signal.SIGINT, before[0])


def press():
    signal.raise_signal(signal.SIGINT)


def wait():
    """Waits for the interrupt that must come."""
    threading.Event().wait(PATIENCE)


def test_an_interrupt_is_raised_where_it_comes():
    def pressed():
        press()
        pytest.fail("it went on")

    with pytest.raises(KeyboardInterrupt):
        interruptible(pressed)()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that is imported to its end, pressed while it was."""
    monkeypatch.syspath_prepend(tmp_path)

    def written(text):
        (tmp_path / "pressed_module.py").write_text(f"import signal\n{text}\ncomplete = True\n")

    yield written
    sys.modules.pop("pressed_module", None)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("signal.raise_signal(signal.SIGINT)", id="by the import"),
        pytest.param(
            "from jaxrl.core.interrupts import interruptible\n"
            "interruptible(signal.raise_signal)(signal.SIGINT)\n"
            "interruptible(interruptible(signal.raise_signal))(signal.SIGINT)",
            id="by what may be interrupted elsewhere",
        ),
    ],
)
def test_an_import_is_completed_first(module, text):
    module(text)

    def importing():
        import pressed_module

        assert pressed_module.complete
        wait()

    with pytest.raises(KeyboardInterrupt):
        interruptible(importing)()
    assert sys.modules["pressed_module"].complete


def test_an_import_that_is_the_last_thing_is_completed_too(module):
    module("signal.raise_signal(signal.SIGINT)")

    @interruptible
    def importing():
        import pressed_module

        return pressed_module.complete

    with pytest.raises(KeyboardInterrupt):
        importing()
    assert sys.modules["pressed_module"].complete
    assert not interrupts._tries


def test_what_a_program_that_is_imported_calls_can_be_interrupted(module):
    module("from jaxrl.core.interrupts import interruptible\nimport test_interrupts_called as called\ncalled.call()")
    called = type(sys)("test_interrupts_called")
    called.call = interruptible(press)
    sys.modules["test_interrupts_called"] = called
    try:
        with pytest.raises(KeyboardInterrupt):
            import pressed_module  # noqa: F401
    finally:
        del sys.modules["test_interrupts_called"]


class Finalized:
    def __del__(self):
        press()


class Referred:
    pass


def drop_referred():
    thing = Referred()
    reference = weakref.ref(thing, lambda _: press())
    del thing
    return reference


@pytest.mark.parametrize("drop", [Finalized, drop_referred])
def test_an_interrupt_is_not_lost_where_exceptions_are(drop, capsys):
    def dropping():
        drop()
        wait()

    with pytest.raises(KeyboardInterrupt):
        interruptible(dropping)()
    assert "KeyboardInterrupt" not in capsys.readouterr().err


def test_what_else_is_lost_is_told_as_before(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: told.append(found.exc_type))

    class Failing:
        def __del__(self):
            raise ValueError

    interruptible(Failing)()
    assert told == [ValueError]
    monkeypatch.undo()


def test_handlers_that_are_not_python_s_stay_and_threads_have_none():
    heard = []

    @interruptible
    def pressed():
        press()
        return signal.getsignal(signal.SIGINT)

    def own(*_):
        heard.append(1)

    signal.signal(signal.SIGINT, own)
    try:
        assert pressed() is own and heard == [1]
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    found = []
    thread = threading.Thread(target=interruptible(lambda: found.append(signal.getsignal(signal.SIGINT))))
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_the_handler_is_put_back_after_an_error_too():
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0)()
