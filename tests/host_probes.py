"""Gymnasium environments with known rows and on-call faults. Workers import this module by its name."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Counting(gymnasium.Env):
    """Shows (episode, step); the reward is the step's number; ends after `length` steps in one of the two ways.

    `fault`, "raise", "hang", "kill", "stop" (by SIGSTOP), "cut" (every connection of the process) or "terminate" (of
    what it started, which it waits for), strikes in `call` ("reset" or "step") of the episode and step given, in every
    environment whose first seed is in `seeds` (None: in all). There every step takes `pause` seconds, too.
    `closing`, "raise", "hang" or "exit", is what `close` does. `children` is a folder where a process that it forks has
    written its number.
    """

    def __init__(
        self,
        length=3,
        end="terminated",
        fault=None,
        call="step",
        at=(0, 0),
        seeds=None,
        pause=0.0,
        closing=None,
        children=None,
        **others,
    ):
        self.observation_space = spaces.Box(0.0, np.inf, (2,), np.float64)
        self.action_space = spaces.Discrete(2, start=1)
        self._length, self._end = length, end
        self._fault, self._call, self._at, self._seeds = fault, call, tuple(at), seeds
        self._seed, self._episode = None, -1
        self._pause, self._closing = pause, closing
        if others:
            raise TypeError(f"unknown options {others}")
        self._child = None if children is None else forked(pathlib.Path(children))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._seed = seed if self._seed is None else self._seed
        self._episode, self._step = self._episode + 1, 0
        self._strike("reset")
        return np.asarray([self._episode, self._step], np.float64), {}

    def step(self, action):
        assert action in self.action_space
        self._strike("step")
        if self._pause and self._is_struck:
            time.sleep(self._pause)
        self._step += 1
        over = self._step == self._length
        ends = {"terminated": (over, False), "truncated": (False, over), "both": (over, over)}[self._end]
        return (
            np.asarray([self._episode, self._step], np.float64),
            float(self._step),
            *ends,
            {"step": self._step, "kind": "probe"},
        )

    def close(self):
        if self._closing == "raise":
            raise ValueError("it cannot be closed")
        if self._closing == "exit":
            os._exit(7)
        if self._closing == "hang":
            time.sleep(3600)

    @property
    def _is_struck(self):
        return self._seeds is None or self._seed in self._seeds

    def _strike(self, call):
        if self._fault is None or (call, (self._episode, self._step)) != (self._call, self._at):
            return
        if not self._is_struck:
            return
        if self._fault == "raise":
            raise ValueError("the simulator is out of cheese")
        if self._fault == "kill":
            os.kill(os.getpid(), 9)
        if self._fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if self._fault == "cut":
            cut_connections()
            return
        if self._fault == "terminate":
            with subprocess.Popen(["sleep", "3600"]) as executed:
                executed.terminate()
            os.kill(self._child, signal.SIGTERM)
            os.waitpid(self._child, 0)
            return
        sys.stdout.flush()
        time.sleep(3600)


def cut_connections():
    """Ends every connection of this process over IP, as where the way to it is lost; it listens on."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6):
                    end.getpeername()
                    end.shutdown(socket.SHUT_RDWR)
        except OSError:  # no socket, or one that has no other end
            continue


def forked(folder):
    """The number of a process that sleeps, once it has written that into the folder."""
    ready, written = os.pipe()
    if (child := os.fork()) == 0:
        (folder / str(os.getpid())).touch()
        os.write(written, b".")
        time.sleep(3600)
    os.close(written)
    os.read(ready, 1)
    os.close(ready)
    return child


class Showing(gymnasium.Env):
    """Shows `value`, an array of the type `given`, in a space of the type `dtype` from 0 to 9."""

    def __init__(self, value=0.0, given="float64", dtype="float32", discrete=False):
        self.observation_space = spaces.Discrete(10) if discrete else spaces.Box(0, 9, (2,), dtype)
        self.action_space = spaces.Discrete(2)
        value = complex(value) if given == "complex128" else value
        self._shown = np.asarray(value, given) if discrete else np.full(2, value, given)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._shown, {}

    def step(self, action):
        return self._shown, 0.0, False, False, {}


class Misbehaving(gymnasium.Env):
    """Does one thing otherwise than Gymnasium asks for: `what`, a key of `STEPS` or of `RESETS`."""

    STEPS = {
        "four values": lambda seen: (seen, 0.0, False, {}),
        "nothing": lambda seen: None,
        "no reward": lambda seen: (seen, None, False, False, {}),
        "a text as reward": lambda seen: (seen, "1.5", False, False, {}),
        "a complex reward": lambda seen: (seen, 1j, False, False, {}),
        "rewards": lambda seen: (seen, np.zeros(2), False, False, {}),
        "a huge reward": lambda seen: (seen, 1e300, False, False, {}),
        "no ending": lambda seen: (seen, 0.0, None, False, {}),
        "a text as ending": lambda seen: (seen, 0.0, False, "no", {}),
        "endings": lambda seen: (seen, 0.0, np.zeros(2, bool), False, {}),
        "sys.exit": lambda seen: sys.exit(3),
    }
    RESETS = {
        "no info": lambda seen: seen,
        "nothing at all": lambda seen: None,
        "another shape": lambda seen: (np.zeros(3, np.float32), {}),
        "sys.exit in reset": lambda seen: sys.exit(3),
    }

    def __init__(self, what=""):
        self.observation_space, self.action_space = spaces.Box(0, 9, (2,), np.float32), spaces.Discrete(2)
        self._what = what

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.RESETS.get(self._what, lambda seen: (seen, {}))(np.zeros(2, np.float32))

    def step(self, action):
        return self.STEPS.get(self._what, lambda seen: (seen, 0.0, False, False, {}))(np.zeros(2, np.float32))


class Parts(gymnasium.Env):
    """Takes a dictionary with a tuple in it, and shows what it took; 1 a step where gear 2 goes with light 1."""

    action_space = spaces.Dict(
        speed=spaces.Box(-1.0, 2.0, (2,)),
        gear=spaces.Discrete(3),
        lights=spaces.Tuple((spaces.MultiBinary(2), spaces.Discrete(2, start=1))),
    )
    observation_space = spaces.Box(-1.0, 2.0, (6,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return np.zeros(6, np.float32), {}

    def step(self, action):
        assert action in self.action_space, action
        self._step += 1
        switches, light = action["lights"]
        shown = np.asarray([*action["speed"], action["gear"], *switches, light], np.float32)
        return shown, float(action["gear"] == 2 and light == 1), self._step == 4, False, {}


class Hungry(gymnasium.Env):
    """Takes `mebibytes` of memory in its third step, and keeps them."""

    def __init__(self, mebibytes=1024):
        self.observation_space, self.action_space = spaces.Box(0.0, np.inf, (1,), np.float64), spaces.Discrete(2)
        self._mebibytes, self._kept = mebibytes, b""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return np.zeros(1), {}

    def step(self, action):
        self._step += 1
        if self._step == 3:
            self._kept = bytearray(self._mebibytes << 20)
        return np.full(1, self._step, np.float64), 0.0, False, False, {}


class Tripled(gymnasium.RewardWrapper):
    """A wrapper that workers import."""

    def reward(self, reward):
        return 3.0 * reward


gymnasium.register("Hungry-v0", entry_point=f"{__name__}:Hungry")
gymnasium.register("Parts-v0", entry_point=f"{__name__}:Parts")
gymnasium.register("Misbehaving-v0", entry_point=f"{__name__}:Misbehaving")
gymnasium.register("Counting-v0", entry_point=f"{__name__}:Counting")
gymnasium.register("Showing-v0", entry_point=f"{__name__}:Showing")
