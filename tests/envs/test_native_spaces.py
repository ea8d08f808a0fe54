"""Spaces of environments outside JAX: every action lies in the environment's own space, every observation in ours."""

import json
import shutil
import warnings

import gymnasium
import jax
import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces as foreign
from helpers.refused import raises, refused
from helpers.strict_json import read_json
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrl
from jaxrl.core import config, native, spaces
from jaxrl.core.errors import ConfigError, EnvironmentContractError
from jaxrl.core.native import Integers, NativeSpaces
from jaxrl.core.types import env_spec
from jaxrl.envs.host import conversion
from jaxrl.envs.host.dm_env import DmEnvRecipe
from jaxrl.networks import MLP, ActorCritic
from jaxrl.run.policies.policy import Policy

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64")


@st.composite
def float_boxes(draw):
    dtype = np.dtype(draw(st.sampled_from(FLOATS)))
    half = dtype == np.float16  # no subnormal numbers of float32, which ours cannot hold
    number = st.floats(-1e4, 1e4, width=16) if half else st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    size = int(np.prod(shape))
    ends = [sorted(draw(st.tuples(number, number))) for _ in range(size)]
    low, high = (np.asarray([end[i] for end in ends], dtype).reshape(shape) for i in (0, 1))
    open_ends = [np.asarray(draw(st.lists(st.booleans(), min_size=size, max_size=size))).reshape(shape) for _ in "ab"]
    low, high = np.where(open_ends[0], -np.inf, low), np.where(open_ends[1], np.inf, high)
    return foreign.Box(low.astype(dtype), high.astype(dtype), shape, dtype.type)


@st.composite
def integer_spaces(draw):
    dtype = np.dtype(draw(st.sampled_from(INTEGERS)))
    limits = np.iinfo(dtype)
    first = st.integers(max(int(limits.min), -(2**62)), min(int(limits.max), 2**62) - 8)
    kind = draw(st.sampled_from(["discrete", "multi", "binary", "box", "scalar", "bool"]))
    count = st.integers(1, 8)
    if kind == "discrete":
        dtype, start = np.dtype(np.int64), draw(st.integers(-(2**40), 2**40))
        return foreign.Discrete(draw(count), start=start, dtype=dtype.type)
    if kind == "multi":
        pairs = draw(st.lists(st.tuples(count, st.integers(-(2**40), 2**40)), min_size=1, max_size=3))
        return foreign.MultiDiscrete([n for n, _ in pairs], start=[start for _, start in pairs])
    if kind == "binary":
        return foreign.MultiBinary(draw(count))
    if kind == "bool":
        shape = draw(st.sampled_from([(), (2,)]))
        return foreign.Box(np.zeros(shape, bool), np.ones(shape, bool), shape, np.bool_)
    shape = () if kind == "scalar" else (2,)
    low = np.asarray([draw(first) for _ in range(int(np.prod(shape)))], dtype).reshape(shape)
    return foreign.Box(low, low + np.asarray(draw(count) - 1, dtype), shape, dtype.type)


ARRAYS = st.one_of(float_boxes(), integer_spaces())
NESTS = st.recursive(
    ARRAYS,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2).map(foreign.Dict),
        st.lists(inner, min_size=1, max_size=2).map(foreign.Tuple),
    ),
    max_leaves=3,
)


def elements(space, rng, count):
    """Elements [count, ...] of ours as a policy might act: boxes far beyond their bounds, both ends of counts."""

    def some(leaf):
        if isinstance(leaf, spaces.Box):
            return (rng.standard_normal((count, *leaf.shape)) * 10.0 ** rng.integers(-2, 30)).astype(np.float32)
        counts = np.asarray(leaf.n if isinstance(leaf, spaces.Discrete) else leaf.nvec)
        found = rng.integers(0, counts, (count, *leaf.shape))
        found[:2] = np.stack([0 * counts, counts - 1])
        return found.astype(np.int32)

    return spaces.tree_map(some, space)


def in_one(space, tree, index):
    """Element `index` of a batch as an environment is handed it."""
    if isinstance(space, foreign.Dict):
        return {name: in_one(child, tree[name], index) for name, child in space.spaces.items()}
    if isinstance(space, foreign.Tuple):
        return tuple(in_one(child, part, index) for child, part in zip(space.spaces, tree, strict=True))
    return tree[index] if isinstance(space, foreign.Discrete) else tree[index, ...]


def dtypes(space):
    if isinstance(space, foreign.Dict):
        return [x for _, child in sorted(space.spaces.items()) for x in dtypes(child)]
    return [x for child in space.spaces for x in dtypes(child)] if isinstance(space, foreign.Tuple) else [space.dtype]


@pytest.mark.long
@given(NESTS, st.integers(0, 2**31))
@settings(max_examples=200)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of Gymnasium, on precision
def test_every_action_lies_in_the_environments_own_space(theirs, seed):
    got = conversion.actions(theirs, "it")
    written = got.convert(elements(got.space, np.random.default_rng(seed), 4))
    assert [x.dtype for x in jax.tree.leaves(written)] == dtypes(theirs)
    for index in range(4):
        action = in_one(theirs, written, index)
        assert theirs.contains(action), (theirs, action)
    for own, leaf in zip(got.native, spaces.leaves(got.space), strict=True):
        assert own.shape == leaf.shape
    kept = config.decode(json.loads(json.dumps(config.encode(NativeSpaces(got.native, got.native)))))
    assert kept.action == got.native and hash(kept) == hash(NativeSpaces(got.native, got.native))


@given(st.one_of(float_boxes(), integer_spaces()), st.integers(0, 2**31))
@settings(max_examples=200)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_observation_lies_in_ours(theirs, seed):
    try:
        got = conversion.observations(theirs, "it")
    except ConfigError as error:  # integers that 32 bits cannot hold, bounds that XLA takes for 0
        assert str(error).startswith("it has the observation space Box")
        assert "exceed" in str(error) or "allowed values: 0, 1.18e-38 to" in str(error)
        return
    theirs.seed(seed)
    for _ in range(3):
        try:
            sample = theirs.sample()
        except ValueError:  # Gymnasium's own, of bounds that are far apart
            continue
        if not theirs.contains(sample):  # nor are all its samples of small integers within its bounds
            continue
        try:
            found = got.convert(sample)
        except EnvironmentContractError:
            assert theirs.dtype.itemsize == 8, "a number beyond 32 bits"
            continue
        assert found.dtype == got.space.dtype and found.shape == got.space.shape
        # A float64 bound that float32 rounds inward is no bound of what is read.
        assert theirs.dtype == np.float64 or bool(got.space.contains(found))


@given(integer_spaces(), st.integers(0, 2**31))
@settings(max_examples=100)
def test_integers_of_ours_are_theirs_and_back(theirs, seed):
    got = conversion.actions(theirs, "it")
    ours = elements(got.space, np.random.default_rng(seed), 4)
    back = native.reader(got.space, got.native, "it")(got.convert(ours))
    np.testing.assert_array_equal(back, ours)
    assert back.dtype == np.int32


def test_actions_of_boxes_are_clipped_to_the_bounds_that_they_have():
    theirs = foreign.Box(np.asarray([-np.inf, -1.0, -np.inf]), np.asarray([0.3, np.inf, np.inf]), dtype=np.float64)
    written = conversion.actions(theirs, "it").convert(np.float32([[0.3, -5.0, 1e30]]))
    assert written.tolist() == [[0.3, -1.0, float(np.float32(1e30))]] and written.dtype == np.float64


@pytest.mark.parametrize(
    "theirs",
    [
        foreign.Box(-(2**63), 2**63 - 1, (2,), np.int64),
        foreign.Box(0, 2**64 - 1, (2,), np.uint64),
        foreign.Box(0, 2**31, (2,), np.int64),
    ],
)
def test_more_choices_than_can_be_counted_are_refused_by_name(theirs):
    raises(ConfigError, "action space Box.*nvec=", conversion.actions, theirs, "it")


def test_specs_of_dm_env():
    """At both ends: what is handed over passes the spec's own check."""
    of_action = {
        "gear": specs.BoundedArray((), np.int8, -3, 2),
        "keys": specs.BoundedArray((2,), np.uint8, [1, 0], [3, 255]),
        "lift": specs.BoundedArray((2,), np.float64, [-np.inf, -0.3], [0.3, np.inf]),
        "push": specs.Array((), np.float32),
        "door": specs.DiscreteArray(4, np.int64),
    }
    of_observation = {"door": specs.DiscreteArray(4), "open": specs.Array((2,), bool), "at": specs.Array((1,), float)}
    observations, actions = DmEnvRecipe.converted(of_observation, of_action, "it")
    batch = actions.convert(elements(actions.space, np.random.default_rng(0), 5))
    for index in range(5):
        for name, spec in of_action.items():
            spec.validate(batch[name][index, ...])
            assert batch[name].dtype == spec.dtype
    read = observations.convert({"door": np.int32(3), "open": np.asarray([True, False]), "at": np.asarray([0.5])})
    assert bool(observations.space.contains(read)) and read["at"].dtype == np.float32


# --- policies in plain Gymnasium -------------------------------------------------------------------------------------

OBSERVED = foreign.Dict(
    where=foreign.Discrete(3, start=-3),
    bits=foreign.MultiBinary(2),
    pair=foreign.MultiDiscrete([2, 3], start=[5, -1]),
    bytes=foreign.Box(0, 255, (2,), np.uint8),
    far=foreign.Box(-np.inf, 1e300, (1,), np.float64),
    many=foreign.Box(0, 2**40, (), np.int64),
)
TAKEN = foreign.Tuple(
    (
        foreign.Discrete(3, start=1),
        foreign.Dict(
            pair=foreign.MultiDiscrete([2, 3], start=[5, -1]),
            bits=foreign.MultiBinary(2),
            whole=foreign.Box(np.asarray([-3, 7], np.int8), np.asarray([2, 9], np.int8), dtype=np.int8),
            lever=foreign.Box(-2, 4, (), np.int64),
            half=foreign.Box(np.asarray([-np.inf, 0.1]), np.asarray([0.3, np.inf]), dtype=np.float64),
            small=foreign.Box(-1, 1, (1,), np.float16),
        ),
    )
)


class Strict(gymnasium.Env):
    """Takes what lies in its space alone, and shows what lies in its space."""

    observation_space, action_space = OBSERVED, TAKEN

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.time = 0
        return self.shown(), {}

    def step(self, action):
        with warnings.catch_warnings(action="error"):  # Gymnasium warns where it converts
            assert self.action_space.contains(action), action
        self.time += 1
        return self.shown(), 1.0, False, self.time >= 5, {}

    def shown(self):
        found = self.observation_space.sample()
        return found | {"far": np.asarray([self.np_random.normal()]), "many": np.asarray(self.time)}


@pytest.fixture(scope="module")
def strict():
    gymnasium.register("Strict-v0", entry_point=Strict)
    yield "gymnasium:Strict-v0"
    del gymnasium.registry["Strict-v0"]


ALGO = jaxrl.PPO(rollout_length=8, epochs=1, minibatches=1, network=ActorCritic(torso=MLP((8,))))


@pytest.fixture(scope="module")
def policy(strict):
    """Untrained, of all these spaces."""
    spec = env_spec(jaxrl.make(strict))
    algo = jaxrl.PPO(network=ActorCritic(torso=None)).resolve(spec, 0)
    return Policy(algo, algo.actor(algo.init(jax.random.key(0), spec)), spec)


@pytest.mark.long
def test_a_policy_plays_in_the_environment_as_it_is(policy):
    env, carry = Strict(), None
    observation, _ = env.reset(seed=0)
    for number in range(4):
        action, carry = policy(observation, carry, key=jax.random.key(number))
        observation, *_ = env.step(action)
    assert type(action[0]) is int and action[1]["lever"].shape == () and action[1]["lever"].dtype == np.int64


@pytest.mark.long
def test_a_batch_is_as_the_environment_has_it_and_in_jax_it_is_ours(policy):
    env = Strict()
    env.reset(seed=1)
    batch = jax.tree.map(lambda *x: np.stack(x), *(env.shown() for _ in range(3)))
    actions, _ = policy(batch)
    for index in range(3):
        assert TAKEN.contains(in_one(TAKEN, actions, index))
    ours = conversion.observations(OBSERVED, "it").convert(batch)
    in_jax, _ = policy(jax.tree.map(jax.numpy.asarray, ours))
    assert bool(policy.spec.action_space.contains(jax.tree.map(lambda x: x[0], in_jax)))
    written = native.writer(policy.spec.action_space, policy.spec.native.action)(in_jax)
    jax.tree.map(np.testing.assert_array_equal, actions, written)


def test_an_observation_outside_is_refused_by_name(policy):
    shown, _ = Strict().reset(seed=0)
    for name, wrong in (("where", 0), ("pair", [4, 0]), ("bits", np.int8([0, 2]))):
        raises(ConfigError, "not an integer within its space", policy, shown | {name: np.asarray(wrong)})


class Counting(gymnasium.Env):
    """Of three choices that begin at 1 the second is rewarded; it tells how many steps there are left, from 5 on."""

    observation_space, action_space = foreign.Discrete(5, start=1), foreign.Discrete(3, start=1)

    def reset(self, *, seed=None, options=None):
        self.left = 5
        return self.left, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.left -= 1
        return max(self.left, 1), float(action == 2), False, self.left == 1, {}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    gymnasium.register("Counting5-v0", entry_point=Counting)
    path = tmp_path_factory.mktemp("counting") / "run"
    settings = {"num_envs": 2, "evaluate_every": 0, "evaluation_episodes": 2, "progress": False}

    def train(total_steps, path=path):
        return jaxrl.train(ALGO, "gymnasium:Counting5-v0", total_steps=total_steps, run_dir=path, **settings)

    yield train(32), path, train
    del gymnasium.registry["Counting5-v0"]


@pytest.mark.long
def test_a_loaded_policy_counts_as_the_environment_does(run):
    result, path, _ = run
    loaded = jaxrl.load(path)
    assert loaded.spec == result.policy.spec == env_spec(jaxrl.make("gymnasium:Counting5-v0"))
    for policy in (result.policy, loaded):
        env = Counting()
        observation, _ = env.reset()
        found = set()
        for number in range(4):
            action, _ = policy(observation, key=jax.random.key(number))
            observation, *_ = env.step(action)
            found.add(action)
        assert all(type(action) is int for action in found)
    batch, _ = loaded(np.asarray([5, 4, 1]))
    in_jax, _ = loaded(jax.numpy.asarray([4, 3, 0]))
    assert batch.dtype == np.int64 and batch.tolist() == (np.asarray(in_jax) + 1).tolist()
    refused(lambda: loaded(0), "not an integer within its space")


@pytest.mark.long
def test_runs_of_earlier_versions_have_no_native_spaces_and_go_on(run, tmp_path):
    _, path, train = run
    shutil.copytree(path, tmp_path / "run")
    path = tmp_path / "run"
    written = read_json(path / "config.json")
    assert written["native"]["type"] == "space:native"
    (path / "config.json").write_text(json.dumps({k: x for k, x in written.items() if k != "native"}))
    assert jaxrl.load(path).spec.native is None
    assert train(64, path).total_steps == 64
    assert read_json(path / "config.json")["native"] == written["native"]
    for wrong in (3, {"type": "space:discrete", "n": 2}, written["native"] | {"action": []}):
        (path / "config.json").write_text(json.dumps(written | {"native": wrong}))
        raises(ConfigError, "native", jaxrl.load, path)


def test_where_nothing_differs_policies_act_as_before():
    assert env_spec(jaxrl.make("gymnax:CartPole-v1")).native is None
    spec = env_spec(jaxrl.make("envpool:CartPole-v1"))
    assert isinstance(spec.native.action[0], Integers) and spec.native.action[0].last == 1
    assert not native.differs(spec.observation_space, spec.native.observation)
