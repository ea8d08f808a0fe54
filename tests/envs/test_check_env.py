"""`check_env` names what is wrong, and which leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers.refused import nothing_compiled, raises
from helpers.served import ServedFromHost

import jaxrl
from jaxrl import envs
from jaxrl.core import spaces
from jaxrl.core.errors import EnvironmentContractError
from jaxrl.envs.episode import restart, transition
from jaxrl.envs.host.time_steps import Episodes

# What replaces parts of time steps.
FIRST = {
    "discount type": {"discount": jnp.int32(1)},
    "active type": {"active": jnp.float32(1)},
    "first not set": {"first": jnp.bool_(False)},
}
LATER = {
    "reward type": lambda row: {"reward": jnp.int32(1)},
    "both endings": lambda row: {"truncated": row.terminated},
    "infinite reward": lambda row: {"reward": jnp.float32(jnp.inf)},
}
HOST = {
    "reward type": lambda row: {"reward": np.ones(4)},
    "shape": lambda row: {"observation": {"step": row.observation["step"][:, None]}},
    "leaf": lambda row: {"observation": row.observation | {"more": row.reward}},
    "no episode": lambda row: {"episode": None},
    "both endings": lambda row: {"truncated": row.terminated},
    "discount": lambda row: {"discount": np.float32(~row.terminated & (row.observation["step"] != 2))},
    "reward at first": lambda row: {"reward": np.ones(4, np.float32)},
}


@struct.dataclass
class State:
    time: Any
    key: Any


@struct.dataclass
class Walk:
    """Right, unless `fault` says what to break."""

    fault: str = struct.field(pytree_node=False, default="")

    name = "test:Walk"
    observation_space = spaces.Dict({"time": spaces.Box(0, 3, (), np.int32), "x": spaces.Box(-1.0, 1.0, (2,))})
    action_space = spaces.Discrete(2)
    resets = False

    def reset(self, key):
        if self.fault == "numpy randomness":
            key = jax.random.fold_in(key, int(np.random.default_rng().integers(1 << 30)))
        if self.fault == "host code" and float(jax.random.uniform(key)) > 0.5:
            pass
        time = 0 if self.fault == "weak" else jnp.int32(0)
        time_step = restart(self._observe(jnp.int32(0), key), discount=1.0 if "discount" in self.fault else None)
        time_step = time_step.replace(**FIRST.get(self.fault, {}))
        return State(time, key), time_step

    def step(self, state, action, key):
        time = state.time + 1
        if self.fault == "numpy randomness in step":
            key = jax.random.fold_in(key, int(np.random.default_rng().integers(1 << 30)))
        if self.fault == "dtype changes":
            time = time.astype(jnp.float32)
        seen, discount = self._observe(jnp.asarray(time, jnp.int32), key), None
        if "discount" in self.fault:
            discount = jnp.where(
                time == 2, {"large discount": 1.1, "discount of 0 within": 0.0}.get(self.fault, 0.9), 0.9
            )
        time_step = transition(seen, jnp.float32(1), time >= 3, time < 0, discount=discount)
        time_step = time_step.replace(**LATER.get(self.fault, lambda row: {})(time_step))
        if self.fault == "first within":
            time_step = time_step.replace(first=time == 2)
        if self.fault == "a key of its own":
            key = jax.random.key(3)
        if self.fault == "two kinds of keys":
            key = jnp.where(time > 1, key, jax.random.key(3))
        if self.fault == "tree changes":
            return (time, key), time_step
        return State(time, key), time_step

    def _observe(self, time, key):
        scale = 9.0 if self.fault == "outside" else 1.0
        x = scale * jax.random.uniform(key, (3 if self.fault == "shape" else 2,))
        return {"time": time, "x": x}


FAULTS = {
    "weak": "reset: state.time is weakly typed int32",
    "dtype changes": r"state.time: reset returns int32\[\], step returns float32\[\]",
    "tree changes": "state",
    "a key of its own": "state.key: reset and step return keys of different types; derive every key from the argument",
    "two kinds of keys": "step cannot be traced .* derive every key from the argument",
    "reward type": r"step: TimeStep.reward is int32\[\]; float32\[\] is required",
    "discount type": r"reset: TimeStep.discount is int32\[\]; float32\[\] is required",
    "active type": r"reset: TimeStep.active is float32\[\]; bool\[\] is required",
    "large discount": r"TimeStep.discount is 0 or outside \[-1, 1\] where the task continues",
    "discount of 0 within": r"TimeStep.discount is 0 or outside \[-1, 1\] where the task continues",
    "both endings": "terminated and TimeStep.truncated are both set",
    "infinite reward": "TimeStep.reward is not finite",
    "first within": "TimeStep.first is set within an episode",
    "first not set": "reset: TimeStep.first is not set where an episode begins",
    "numpy randomness": "reset returns different results for the same key, at .*x.*use the key for all randomness",
    "numpy randomness in step": "step returns different results for the same key, at .*x.*use the key for all",
    "host code": "reset cannot be traced by jit, vmap and scan: ",
    "outside": r"TimeStep.observation\['x'\] is outside its space",
    "shape": r"reset: TimeStep.observation\['x'\] is float32\[3\]; float32\[2\] is required",
}


def nothing():
    return jnp.zeros((), jnp.int32), restart(jnp.zeros(2))


class Parts:
    """What an environment has; each case below breaks one."""

    name, resets = "test:Parts", False
    observation_space, action_space = spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2)

    def reset(self, key):
        return nothing()

    def step(self, state, action, key):
        return state + 1, transition(jnp.zeros(2), jnp.float32(0), state > 2, jnp.asarray(False))


def wrong_step(change):
    return {"step": lambda self, state, action, key: change(*Parts.step(self, state, action, key))}


BROKEN = {
    "a number as name": ({"name": 3}, "name is 3; a string"),
    "a method as flag": ({"resets": lambda self: False}, "resets is <bound method.*True or False is required"),
    "a property that fails": (
        {"action_space": property(lambda self: 1 / 0)},
        "its action_space raises ZeroDivisionError",
    ),
    "a missing attribute": (
        {"observation_space": property(lambda self: self.sizes)},
        "its observation_space raises AttributeError: .* has no attribute 'sizes'",
    ),
    "no method": ({"reset": 3}, "reset is 3; a method is required"),
    "no key for reset": ({"reset": lambda self: nothing()}, r"reset takes \(\); reset\(key\) is required"),
    "no key for step": (
        {"step": lambda self, state, action: None},
        r"step takes \(state, action\); step\(state, action, key\) is required",
    ),
    "four values": (
        wrong_step(lambda state, row: (row.observation, row.reward, row.terminated, {})),
        r"step returns 4 values \(float32\[2\], float32\[\], bool\[\], dict\); the pair",
    ),
    "the wrong order": (wrong_step(lambda state, row: (row, state)), r"step returns 2 values \(TimeStep, int32\[\]\)"),
    "nothing": (wrong_step(lambda state, row: None), "step returns nothing; the pair"),
    "a state alone": ({"reset": lambda self, key: nothing()[0]}, r"reset returns int32\[\]; the pair"),
    "many rewards": (
        {"step": lambda self, state, *_: (state, transition(jnp.zeros(2), jnp.zeros(3), state > 2, state > 2))},
        r"step: reward has shape \(3,\); a single number",
    ),
    "many endings": (
        {"step": lambda self, state, *_: (state, transition(jnp.zeros(2), state, jnp.zeros(2), state > 2))},
        r"step: terminated has shape \(2,\); a single number",
    ),
    "an error of its own": (
        wrong_step(lambda state, row: {}["speed"]),
        r"step raises KeyError: 'speed' \(test_check_env.py, line \d+\)",
    ),
    "a branch": (
        wrong_step(lambda state, row: (state, row) if state > 2 else (state, row)),
        r"step cannot be traced by jit, vmap and scan: it raises TracerBoolConversionError.*\(test_check_env.py, line",
    ),
    "no number": (
        wrong_step(lambda state, row: (state, row.replace(observation=row.observation * jnp.nan))),
        "step: TimeStep.observation contains NaN",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_messages_name_what_is_wrong(case):
    changes, message = BROKEN[case]
    env = struct.dataclass(type("Broken", (Parts,), changes))()
    raises(EnvironmentContractError, message, envs.check_env, env, steps=5 if case == "no number" else 0)


@pytest.mark.long
def test_a_right_environment_passes():
    envs.check_env(Walk(), steps=10)
    envs.check_env(Walk("with a discount"), steps=10)
    envs.check_env(envs.make("gymnax:CartPole-v1", max_steps_in_episode=5), steps=20)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault):
    raises(EnvironmentContractError, FAULTS[fault], envs.check_env, Walk(fault), steps=10)


@pytest.mark.parametrize("fault", ["shape", "reward type", "host code"])
def test_training_refuses_before_anything_is_compiled(fault):
    with nothing_compiled(), pytest.raises(EnvironmentContractError, match=FAULTS[fault]):
        jaxrl.train("ppo", Walk(fault), total_steps=1000)


@struct.dataclass
class Masked(Walk):
    """A walk with actions of several parts, and a mask of them."""

    mask: Any = None

    action_space = spaces.Dict({"move": spaces.Tuple((spaces.Discrete(3), spaces.Box(0.0, 1.0, (2,))))})

    def reset(self, key):
        state, time_step = super().reset(key)
        return state, time_step.replace(action_mask=self.mask)

    def step(self, state, action, key):
        state, time_step = super().step(state, action, key)
        return state, time_step.replace(action_mask=self.mask)


THREE = jnp.ones((3,), bool)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (
            {"mvoe": (THREE, None)},
            r"reset: TimeStep.action_mask has the parts \['mvoe'\], which .* parts are \['move'\]",
        ),
        ({"move": (THREE,)}, r"TimeStep.action_mask\['move'\] has a tuple of length 1, but the space has"),
        ({"move": THREE}, r"TimeStep.action_mask\['move'\] has an array of shape \(3,\), but the space"),
        ({"move": (THREE[:2], None)}, r"TimeStep.action_mask\['move'\]\[0\] is bool\[2\]; bool\[3\] is required"),
        ({"move": (jnp.ones(3), None)}, r"TimeStep.action_mask\['move'\]\[0\] is float32\[3\]; bool\[3\] is required"),
        ({"move": (None, THREE)}, r"TimeStep.action_mask\['move'\]\[1\] is bool\[3\]; boxes have no mask"),
    ],
)
def test_masks_that_are_not_like_the_action_are_named(mask, said):
    raises(EnvironmentContractError, said, envs.check_env, Masked(mask=mask), steps=0)


@pytest.mark.long
@pytest.mark.parametrize("mask", [{"move": (None, None)}, {}, {"move": (THREE, None)}])
def test_masks_like_the_action_pass(mask):
    envs.check_env(Masked(mask=mask), steps=2)


def test_a_wrong_auto_reset_is_named():
    @struct.dataclass
    class NeverResets:
        env: Any = Walk()  # noqa: RUF009
        name, observation_space, action_space, resets = Walk.name, Walk.observation_space, Walk.action_space, True

        def reset(self, key):
            return self.env.reset(key)

        def step(self, state, action, key):
            state, time_step = self.env.step(state, action, key)
            return state, time_step.replace(observation={**time_step.observation, "time": jnp.int32(0)})

    raises(EnvironmentContractError, "first is not set", envs.check_env, NeverResets(), steps=10)


class Nothing:
    name = "test:Nothing"

    def reset(self, key):
        return None


class NoPytree(Walk):
    fault = ""

    def __init__(self):
        pass


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Parts, r"is a class; pass an instance, Parts\(\)"),
        (5, "5 has neither reset nor step"),
        (Nothing(), "it has no 'observation_space'"),
        (NoPytree(), "not a pytree"),
    ],
    ids=["a class", "a number", "no spaces", "no pytree"],
)
def test_what_is_no_environment_is_named(wrong, message):
    raises(EnvironmentContractError, message, envs.check_env, wrong)


# --- recipes of host environments ----------------------------------------------------------------------------------


class Clock:
    """Shows the step; episodes have three. Unless `fault` says what to break."""

    name = "test:Clock"
    observation_space = spaces.Dict({"step": spaces.Box(0.0, 3.0, ())})
    action_space = spaces.Discrete(2)

    def __init__(self, fault=""):
        self.fault = fault
        if fault == "no space":
            self.action_space = None

    def build(self, num_envs, seed):
        self.num_envs = 3 if self.fault == "size" else num_envs
        self._episodes, self._rows, self._shown = Episodes(num_envs), -1, np.zeros(num_envs, np.float32)
        self._rng = np.random.default_rng(None if self.fault == "chance" else seed)
        return self

    def reset(self):
        return self.step(None)

    def step(self, actions):
        self._rows += 1
        step = self._rows % 4
        if self.fault != "overwritten":
            self._shown = np.zeros(4, np.float32)
        self._shown[:] = 5 if self.fault == "outside" and step == 2 else step
        if self.fault == "chance":
            self._shown[:] = self._rng.uniform()
        flags = np.full(4, step == 3)
        timestep = self._episodes.follow(slice(None), {"step": self._shown}, np.ones(4), flags, np.zeros(4, np.bool_))
        if self.fault == "never first":
            return timestep.replace(first=np.full(4, self._rows == 0))
        return timestep.replace(**HOST.get(self.fault, lambda row: {})(timestep))

    def close(self):
        pass


HOST_FAULTS = {
    "no space": "action_space is None, which is not a space",
    "size": r"build\(4, seed\) makes num_envs=3",
    "reward type": r"reset: TimeStep.reward is float64\[4\]; numpy of float32\[4\] is required",
    "shape": r"TimeStep.observation\['step'\] is float32\[4, 1\]; numpy of float32\[4\]",
    "leaf": r"TimeStep.observation\['more'\] is not in the observation space",
    "no episode": "TimeStep.episode.returns is nothing",
    "overwritten": r"TimeStep.observation\['step'\] was overwritten after",
    "outside": r"TimeStep.observation\['step'\] is outside its space",
    "both endings": "terminated and TimeStep.truncated are both set",
    "discount": r"TimeStep.discount is 0 or outside \[-1, 1\] where the task continues",
    "never first": "step: TimeStep.first is not set where an episode begins",
    "reward at first": "reward is not 0 where first",
    "chance": r"TimeStep.observation\['step'\] differs between two batches with the same seed",
}


@pytest.mark.parametrize("fault", HOST_FAULTS)
def test_faults_of_host_environments_are_named(fault):
    raises(EnvironmentContractError, HOST_FAULTS[fault], envs.check_env, Clock(fault), steps=10)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gymnasium:CartPole-v1", {}),
        ("gymnasium:MountainCarContinuous-v0", {"max_episode_steps": 20}),
        ("gymnasium:host_probes:Counting-v0", {"workers": 2}),
        ("gymnasium:host_probes:Parts-v0", {}),
        ("envpool:CartPole-v1", {}),
        ("envpool:MiniGrid-DoorKey-5x5-v0", {"max_episode_steps": 20}),
    ],
)
def test_recipes_pass(name, parameters):
    envs.check_env(envs.make(name, **parameters), steps=60)


class AsyncClock(Clock):
    """The later half of those at work is ready first."""

    def build_async(self, num_envs, batch_size, seed):
        self.build(num_envs, seed)
        self.rows, self.at_work, self.batch_size = np.full(num_envs, -1), [], batch_size
        return self

    def async_reset(self):
        self.at_work = [0, 1, 2, 3]

    def send(self, actions, env_ids):
        assert actions.shape == (2,)
        self.at_work += env_ids.tolist()

    def recv(self):
        size = 3 if self.fault == "batch size" else self.batch_size
        env_ids, self.at_work = np.asarray(self.at_work[-size:], np.int32), self.at_work[:-size]
        self.rows[env_ids] += 1
        step = self.rows[env_ids] % 4
        if self.fault == "other rows" and self.rows.max() == 2:
            step += 1
        flags = step == 3
        shown = step.astype(np.float32)
        if self.fault == "batch size":
            return env_ids, None
        moment = self._episodes.follow(env_ids, {"step": shown}, np.ones(2), flags, np.zeros(2, np.bool_))
        return (env_ids * 0 if self.fault == "twice" else env_ids), moment


ASYNC_FAULTS = {
    "batch size": r"recv returns the indices \[1 2 3\]; 2 distinct indices from \[0, 1, 2, 3\]",
    "twice": r"recv returns the indices \[0 0\]; 2 distinct indices",
    "other rows": r"TimeStep.observation\['step'\] of recv differs from .* at environments \[2 3\], steps \[2 2\]",
}


@pytest.mark.parametrize("fault", ASYNC_FAULTS)
def test_faults_of_asynchronous_environments_are_named(fault):
    raises(EnvironmentContractError, ASYNC_FAULTS[fault], envs.check_env, AsyncClock(fault), steps=10)


def test_right_recipes_pass():
    envs.check_env(Clock(), steps=10)
    envs.check_env(AsyncClock(), steps=10)
    envs.check_env(ServedFromHost(envs.make("gymnax:CartPole-v1", max_steps_in_episode=5)), steps=20)
