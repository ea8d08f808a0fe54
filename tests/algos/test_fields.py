"""A field that changes nothing is a bug: every field of every algorithm changes the traced program or its numbers."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import pytest
from helpers.registered import OWN_ALGORITHMS
from helpers.tiers import few

import jaxrl
from jaxrl.algos.base import changed, field_group, field_problems, has_effect
from jaxrl.algos.fields import CombinedReplayFields, ReplayFields, SequenceFields
from jaxrl.algos.optimizers import Adam, RMSProp
from jaxrl.core.schedules import Constant, resolve_schedules
from jaxrl.core.sources import FrameStack, Lifo, View
from jaxrl.networks import GRU, MLP, ActorCritic, CategoricalValues, QNetwork, QuantileValues
from jaxrl.sweeps.launcher import launch

TINY = ActorCritic(MLP((4,)))
DQN = jaxrl.DQN(learning_rate=2.5e-4, n_step=1, network=QNetwork(MLP((4,))), capacity=256, min_size=32, batch_size=16)
PQN = jaxrl.PQN(rollout_length=8, random_persistence=0.9, network=QNetwork(MLP((4,))))
PLAIN = {"rollout_length": 8, "entropy_cost": 0.01, "network": TINY}
BASES = {
    "ppo": jaxrl.PPO(**PLAIN, learning_rate=1e-3, epochs=2, normalize_observation=True, normalize_reward=True),
    "ppo-kl": jaxrl.PPO(**PLAIN, learning_rate=1e-3, epochs=2, objective="kl"),
    "a2c": jaxrl.A2C(**PLAIN, normalize_observation=True, normalize_reward=True, normalize_advantage=True),
    "impala": jaxrl.IMPALA(**PLAIN, normalize_observation=True, normalize_reward=True),
    "vmpo": jaxrl.VMPO(**PLAIN, minibatches=4, normalize_observation=True, normalize_reward=True),
    "dqn": DQN,
    "dqn-categorical": DQN.replace(
        network=QNetwork(MLP((4,)), head=CategoricalValues(3)), prioritized=True, ladder=True
    ),
    "dqn-munchausen": DQN.replace(network=QNetwork(MLP((4,)), head=QuantileValues(3)), munchausen=True),
    "dqn-recurrent": DQN.replace(
        network=QNetwork(MLP((4,)), core=GRU(4)), prioritized=True, sequence_length=4, value_rescaling=True
    ),
    "pqn": PQN,
    "pqn-ladder": PQN.replace(ladder=True),
}
STATIC = {
    "objective": "kl",
    "policy_loss": lambda log_ratio, advantage, clip: -log_ratio * advantage,
    "reduction": "mean",
    "reward_clipping": "abs_one",
    "rollout_length": 16,
    "epochs": 3,
    "minibatches": 2,
    "optimizer": None,
    "network": None,
    "target_period": 7,
    "frame_stack": FrameStack(2),
    "n_step": 3,
    "capacity": 512,
    "min_size": 64,
    "batch_size": 8,
    "replay_ratio": 0.5,
    "samples_per_insert": 24,
    "storage": "flashbax",
    "replay_memory": "host",
    "whole_episodes": 8,
    "sampler": Lifo(),
    "max_times_sampled": 3,
    "newest": 2,
    "view": View(2, Lifo()),
    "random_persistence": 0.5,
    "ladder": True,
    "sequence_length": 6,
    "burn_in": 4,
    "time_reduction": "sum",
}


# Values at the start, which the next test looks for in the initial state.
INITIAL = {"initial_penalty", "temperature", "alpha_mean", "alpha_std"}


def fields(name):
    algo = BASES[name]
    traced = [f.name for f in dataclasses.fields(algo) if f.metadata.get("pytree_node", True)]
    static = [f.name for f in dataclasses.fields(algo) if f.name not in traced]
    return traced, static


def program(algo):
    """The traced program of one iteration, and its inputs that come from the algorithm."""
    continuous = isinstance(algo, jaxrl.VMPO)  # which has fields for these alone
    env = jaxrl.make("gymnax:Pendulum-v1" if continuous else "gymnax:CartPole-v1")
    bound = jaxrl.Anakin(4, devices=1, shards=1).bind(algo, env)
    state = jax.eval_shape(bound.init, algo, env, jax.random.key(0))
    # Numbers are inputs of the program, so that a field shows up as one that is used or not.
    return jax.make_jaxpr(lambda algo, state: bound.iterate(algo, env, state, jnp.float32(1e3)))(algo, state)


def used_inputs(closed):
    """Which inputs the program's outputs depend on."""
    from jax.interpreters import partial_eval as pe

    return pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))[1]


@pytest.fixture(scope="module")
def traced_programs():
    return {name: program(algo) for name, algo in BASES.items()}


@pytest.mark.long
@pytest.mark.parametrize("name", BASES)
def test_every_number_reaches_the_program(name, traced_programs):
    algo = BASES[name]
    used = used_inputs(traced_programs[name])
    leaves = jax.tree_util.tree_leaves_with_path(algo)
    unused = {
        jax.tree_util.keystr(path)
        for (path, _), is_used in zip(leaves, used[: len(leaves)], strict=True)
        if not is_used
    }
    # Exactly what says so of itself: a field without effect must not be used, one with an effect must be.
    idle = {field for field in fields(name)[0] if not has_effect(algo, field) and getattr(algo, field) is not None}
    unused = {leaf.split(".")[1] for leaf in unused}  # a schedule has several leaves
    assert unused - INITIAL == idle - INITIAL


def test_the_initial_penalty_is_in_the_initial_state():
    env = jaxrl.make("gymnax:CartPole-v1")
    for penalty in (1.0, 3.0):
        algo = BASES["ppo-kl"].replace(initial_penalty=penalty)
        state = resolve_schedules(algo, jnp.float32(0)).init(
            jax.random.key(0), jaxrl.Anakin(4, devices=1).bind(algo, env).layout.spec
        )
        assert state.penalty == penalty


@pytest.mark.parametrize("name", ["temperature", "alpha_mean", "alpha_std"])
def test_the_initial_multipliers_are_in_the_initial_state(name):
    spec = jaxrl.Anakin(4, devices=1).bind(BASES["vmpo"], jaxrl.make("gymnax:Pendulum-v1")).layout.spec
    state = resolve_schedules(BASES["vmpo"].replace(**{name: 3.0}), jnp.float32(0)).init(jax.random.key(0), spec)
    assert jax.nn.softplus(state.duals.params[name.removeprefix("alpha_")]) == pytest.approx(3.0)


@pytest.mark.long
@pytest.mark.parametrize("name", few(["ppo", "a2c", "impala", "vmpo", "dqn", "dqn-recurrent", "pqn"], "ppo", "dqn"))
def test_every_static_field_changes_the_program(name, traced_programs):
    algo = BASES[name]
    same = []
    names = {field for field in fields(name)[1] if has_effect(algo, field)} - {"remover"}  # of a table
    if name == "dqn-recurrent":
        names = {"sequence_length", "burn_in", "n_step", "prioritized", "cross_episodes", "time_reduction"}
    for field in names:
        value = getattr(algo, field)
        if isinstance(value, bool):
            other = not value
        elif field == "network":
            other = type(value)(MLP((5,)))
        else:
            other = STATIC[field]
        assert other != value, field
        changed = algo.replace(**{field: other})
        if str(program(changed)) == str(traced_programs[name]):
            same.append(field)
    assert same == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["ppo", "a2c", "impala", "vmpo", "dqn", "pqn"])
def test_the_optimizer_changes_the_program(name, traced_programs):
    other = RMSProp() if isinstance(BASES[name].optimizer, Adam) else Adam()
    assert str(program(BASES[name].replace(optimizer=other))) != str(traced_programs[name])


@pytest.mark.long
def test_optional_numbers_change_the_program(traced_programs):
    for field, value in {"value_learning_rate": 1e-3, "max_grad_norm": None, "target_kl": 0.01}.items():
        assert str(program(BASES["ppo"].replace(**{field: value}))) != str(traced_programs["ppo"]), field


def test_any_number_can_be_a_schedule():
    algo = BASES["ppo"].replace(learning_rate=1e-3)
    names = [f for f in fields("ppo")[0] if f != "optimizer" and getattr(algo, f) is not None]
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
    assert declared <= 299


def test_only_fields_of_groups_are_restated():
    with pytest.raises(TypeError, match="capcity"):

        @field_group
        class InvalidValue(ReplayFields):
            capcity: int = changed(3)


def test_no_restated_default_is_lost_by_the_order_of_groups():
    with pytest.raises(TypeError, match="ReplayFields.*sampler"):

        @field_group
        class InvalidValue(CombinedReplayFields, SequenceFields):
            pass


def test_a_restated_field_keeps_what_is_not_restated():
    group, restated = (cls.__dataclass_fields__["replay_ratio"] for cls in (ReplayFields, jaxrl.DQN))
    assert (group.default, restated.default) == (1.0, 0.1)
    assert group.metadata == restated.metadata
    limits = jaxrl.GAIL.__dataclass_fields__["gamma"].metadata["limits"]
    assert limits == {"low": 0, "below": 1}
