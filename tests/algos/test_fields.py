"""A field that changes nothing is a bug: every field of every algorithm changes the traced program or its numbers."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
from helpers import continuous
from helpers.other_fields import OPTIONAL, PARTS, assert_numbers_count, static_fields, with_another
from helpers.refused import refused
from helpers.registered import OWN_ALGORITHMS

import jaxrl
from jaxrl.algos.base import (
    algorithm,
    changed,
    field_group,
    field_problems,
    has_effect,
    number,
    owner_at,
    parts,
    replace,
)
from jaxrl.algos.ddpg import DeterministicLearner
from jaxrl.algos.fields import Memory, PeriodicTargetFields, PrioritizedReplay, ReplayFields
from jaxrl.algos.kl_penalty import KLPenalty
from jaxrl.algos.munchausen import Munchausen
from jaxrl.algos.q_learning import Ladder, QMemory
from jaxrl.algos.reward_scale import RewardScale
from jaxrl.algos.temperature import Temperature
from jaxrl.core.schedules import Constant, resolve_schedules
from jaxrl.networks import GRU, MLP, ActorCritic, CategoricalValues, Critic, QNetwork, QuantileValues
from jaxrl.sweeps.launcher import launch

TINY = ActorCritic(MLP((4,)))
DQN = jaxrl.DQN(learning_rate=2.5e-4, n_step=1, network=QNetwork(MLP((4,))), capacity=256, min_size=32, batch_size=16)
PLAIN = {"rollout_length": 8, "entropy_cost": 0.01, "network": TINY}
BASES = {
    "ppo": jaxrl.PPO(**PLAIN, learning_rate=1e-3, epochs=2, normalize_observation=True, normalize_reward=True),
    "ppo-kl": jaxrl.PPO(**PLAIN, learning_rate=1e-3, epochs=2, kl_penalty=KLPenalty()),
    "a2c": jaxrl.A2C(**PLAIN, normalize_observation=True, normalize_reward=True, normalize_advantage=True),
    "impala": jaxrl.IMPALA(**PLAIN, normalize_observation=True, normalize_reward=True),
    "vmpo": jaxrl.VMPO(**PLAIN, minibatches=4, normalize_observation=True, normalize_reward=True),
    "dqn": DQN,
    "dqn-categorical": DQN.replace(
        network=QNetwork(MLP((4,)), head=CategoricalValues(3)), prioritized=PrioritizedReplay(), ladder=Ladder()
    ),
    "dqn-munchausen": DQN.replace(network=QNetwork(MLP((4,)), head=QuantileValues(3)), munchausen=Munchausen()),
    "dqn-recurrent": DQN.replace(
        network=QNetwork(MLP((4,)), core=GRU(4)),
        prioritized=PrioritizedReplay(),
        memory=Memory(length=4, burn_in=0),
        value_rescaling=True,
    ),
    "pqn": jaxrl.PQN(rollout_length=8, random_persistence=0.9, ladder=Ladder(), network=QNetwork(MLP((4,)))),
}
BASES |= {name: algo.replace(normalize_observation=True) for name, algo in continuous.ALGORITHMS.items()}
CATEGORICAL, QUANTILE = (
    Critic(widths=(8,), ensemble=1, head=head) for head in (CategoricalValues(5), QuantileValues(5))
)
FIXED = BASES["sac"].replace(temperature=Temperature(learned=False), reward_scale=RewardScale())
BASES |= {"sac-categorical": FIXED.replace(critic=CATEGORICAL), "sac-quantile": FIXED.replace(critic=QUANTILE)}
BASES |= {f"{name}-categorical": BASES[name].replace(critic=CATEGORICAL) for name in ("mpo", "td3")}
BASES["td3-quantile"] = replace(BASES["td3"], critic=QUANTILE, **{"noise.least_std": 0.05})

MULTIPLIERS = ("kl_limits.temperature", "kl_limits.alpha_mean", "kl_limits.alpha_std")
# Values at the start, which the next test looks for in the initial state; and a share that is for discrete actions.
ELSEWHERE = {"temperature.initial", "temperature.target_fraction", *MULTIPLIERS}


def program(algo):
    """The traced program of one iteration, and its inputs that come from the algorithm."""
    boxed = isinstance(algo, jaxrl.VMPO) or hasattr(algo, "policy")  # which have fields for these alone
    env = jaxrl.make("gymnax:Pendulum-v1" if boxed else "gymnax:CartPole-v1")
    bound = jaxrl.Anakin(4, devices=1, shards=1).bind(algo, env)
    state = jax.eval_shape(bound.init, algo, env, jax.random.key(0))
    # Numbers are inputs of the program, so that a field shows up as one that is used or not.
    return jax.make_jaxpr(lambda algo, state: bound.iterate(algo, env, state, jnp.float32(1e3)))(algo, state)


@functools.cache
def traced(name):
    return program(BASES[name])


def changes(name, field):
    return str(program(with_another(BASES[name], field))) != str(traced(name))


@pytest.mark.long
@pytest.mark.parametrize("name", BASES)
def test_every_number_reaches_the_program(name):
    assert_numbers_count(BASES[name], traced(name), ELSEWHERE)


def test_the_initial_penalty_is_in_the_initial_state():
    env = jaxrl.make("gymnax:CartPole-v1")
    for penalty in (1.0, 3.0):
        algo = BASES["ppo-kl"].replace(kl_penalty=KLPenalty(initial=penalty))
        state = resolve_schedules(algo, jnp.float32(0)).init(
            jax.random.key(0), jaxrl.Anakin(4, devices=1).bind(algo, env).layout.spec
        )
        assert state.penalty == penalty


@pytest.mark.parametrize("name", MULTIPLIERS)
def test_the_initial_multipliers_are_in_the_initial_state(name):
    spec = jaxrl.Anakin(4, devices=1).bind(BASES["vmpo"], jaxrl.make("gymnax:Pendulum-v1")).layout.spec
    state = resolve_schedules(replace(BASES["vmpo"], **{name: 3.0}), jnp.float32(0)).init(jax.random.key(0), spec)
    dual = state.duals.params[name.removeprefix("kl_limits.").removeprefix("alpha_")]
    assert jax.nn.softplus(dual) == pytest.approx(3.0)


def effective(algo, path):
    return has_effect(algo, path.partition(".")[0]) and has_effect(*owner_at(algo, path), algo)


LEARNERS = ["ppo", "a2c", "impala", "vmpo", "dqn", "dqn-recurrent", "pqn", *continuous.ALGORITHMS]


@pytest.mark.long
@pytest.mark.parametrize("name", LEARNERS)
def test_every_static_field_changes_the_program(name):
    algo = BASES[name]
    optional = {field for field in OPTIONAL + PARTS if hasattr(algo, field)}
    names = {field for field in static_fields(algo) | optional if effective(algo, field)}
    names -= {"imitate"} | ({"storage"} if getattr(algo, "n_step", 1) != 1 else set())  # needs demonstrations; one step
    if name == "dqn-recurrent":
        names = {"memory.length", "memory.burn_in", "n_step", "prioritized", "memory.cross_episodes", "time_reduction"}
    assert [field for field in names if not changes(name, field)] == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["ppo", "a2c", "impala", "vmpo", "dqn", "pqn", "td3"])
def test_the_optimizer_changes_the_program(name):
    assert changes(name, "optimizer")


@pytest.mark.long
def test_optional_numbers_change_the_program():
    for field, value in {"value_learning_rate": 1e-3, "max_grad_norm": None, "target_kl": 0.01}.items():
        assert str(program(BASES["ppo"].replace(**{field: value}))) != str(traced("ppo")), field


def test_any_number_can_be_a_schedule():
    algo = BASES["ppo"]
    numbers = {f.name for f in dataclasses.fields(algo)} - static_fields(algo) - parts(algo).keys() - {"optimizer"}
    names = [f for f in numbers if getattr(algo, f) is not None]
    scheduled = resolve_schedules(algo.replace(**{f: Constant(getattr(algo, f)) for f in names}), jnp.float32(0.5))
    plain = resolve_schedules(algo, jnp.float32(0.5))
    assert all(getattr(scheduled, f) == getattr(plain, f) for f in names)


def test_a_field_with_its_switch_or_at_its_default_is_fine():
    assert field_problems(jaxrl.PPO(observation_clip=5.0, normalize_observation=True)) == []
    assert field_problems(jaxrl.PPO(observation_clip=jnp.float32(10.0))) == []
    head = QNetwork(MLP((4,)), head=CategoricalValues(3))
    assert field_problems(jaxrl.DQN(v_max=5.0, network=head)) == []


@pytest.mark.parametrize("name", OWN_ALGORITHMS)
def test_static_whole_numbers_take_nothing_else(name):
    algo = OWN_ALGORITHMS[name]()
    fields = [
        field.name
        for field in dataclasses.fields(algo)
        if field.type in (int, int | None) and not field.metadata.get("pytree_node", True)
    ]
    assert fields
    for field in fields:
        for wrong in (4.5, "4", True):
            problems = field_problems(dataclasses.replace(algo, **{field: wrong}))
            assert f"{type(algo).__name__}.{field}={wrong!r} must be a whole number" in problems


@pytest.mark.parametrize("function", [jaxrl.train, jaxrl.sweep, launch], ids=lambda function: function.__name__)
@pytest.mark.parametrize("name", OWN_ALGORITHMS)
def test_no_field_has_the_name_of_an_argument(function, name):
    """Both are flags of one command, and fields are keywords of `sweep`."""
    fields = {field.name for field in dataclasses.fields(OWN_ALGORITHMS[name])}
    assert not fields & set(inspect.signature(function).parameters)


def test_fields_that_algorithms_share_are_declared_once():
    """What an algorithm inherits from a group counts once, and once more where it restates the default."""
    ours = list(OWN_ALGORITHMS.values())
    classes = {base for cls in ours for base in cls.__mro__ if dataclasses.is_dataclass(base)}
    names = {cls: {field.name for field in dataclasses.fields(cls)} for cls in classes}
    declared = sum(name in names[cls] for cls in classes for name in inspect.get_annotations(cls))
    assert 2 * declared < sum(len(dataclasses.fields(cls)) for cls in ours)
    assert declared <= 245
    flat = [sum(not field.metadata.get("part") for field in dataclasses.fields(cls)) for cls in ours]
    assert sum(flat) <= 20 * len(flat) and max(flat) <= 25


def test_only_fields_of_groups_are_restated():
    with pytest.raises(TypeError, match="capcity"):

        @field_group
        class InvalidValue(ReplayFields):
            capcity: int = changed(3)


def test_a_condition_names_a_field():
    with pytest.raises(TypeError, match="critc"):

        @algorithm
        class InvalidValue(jaxrl.SAC):
            extra: float = number(1.0, only_with="critic and not critc.head")


def test_no_restated_default_is_lost_by_the_order_of_groups():
    with pytest.raises(TypeError, match="PeriodicTargetFields.*tau"):

        @field_group
        class InvalidValue(DeterministicLearner, PeriodicTargetFields):
            pass


def test_a_restated_field_keeps_what_is_not_restated():
    group, restated = (cls.__dataclass_fields__["replay_ratio"] for cls in (ReplayFields, jaxrl.DQN))
    assert (group.default, restated.default) == (1.0, 0.1)
    assert group.metadata == restated.metadata
    limits = jaxrl.GAIL.__dataclass_fields__["gamma"].metadata["limits"]
    assert limits == {"low": 0, "below": 1}


def test_a_part_of_a_base_class_is_completed_and_one_of_another_algorithm_is_refused():
    assert jaxrl.R2D2(prioritized=PrioritizedReplay()).prioritized.initial == "td_error"
    refused(lambda: jaxrl.Dreamer(memory=QMemory()), "Dreamer.memory=QMemory()")


@pytest.mark.parametrize(
    "name", [name for name, cls in OWN_ALGORITHMS.items() if hasattr(cls, "temperature_optimizer")]
)
def test_a_value_of_a_part_without_effect_may_be_the_algorithms_default(name):
    """REPPO's temperature has a target entropy of its own, which a fixed temperature does not read."""
    assert field_problems(replace(OWN_ALGORITHMS[name](), **{"temperature.learned": False})) == []
