"""A field that changes nothing is a bug: every field of every algorithm changes the traced program or its numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxrl
from jaxrl.algos.optimisers import Adam, RMSProp
from jaxrl.networks import GRU, MLP, ActorCritic, CategoricalValues, QNetwork, QuantileValues
from jaxrl.schedules import Constant, at
from jaxrl.sources import FrameStack

TINY = ActorCritic(MLP((4,)))
DQN = jaxrl.DQN(network=QNetwork(MLP((4,))), capacity=256, min_size=32, batch_size=16)
PQN = jaxrl.PQN(rollout_length=8, network=QNetwork(MLP((4,))))
BASES = {
    "ppo": jaxrl.PPO(rollout_length=8, network=TINY, normalize_observation=True, normalize_reward=True),
    "ppo-kl": jaxrl.PPO(rollout_length=8, network=TINY, objective="kl"),
    "a2c": jaxrl.A2C(network=TINY, normalize_observation=True, normalize_reward=True, normalize_advantage=True),
    "impala": jaxrl.IMPALA(rollout_length=8, network=TINY, normalize_observation=True, normalize_reward=True),
    "dqn": DQN,
    "dqn-categorical": DQN.replace(
        network=QNetwork(MLP((4,)), head=CategoricalValues(3)), prioritised=True, ladder=True
    ),
    "dqn-munchausen": DQN.replace(network=QNetwork(MLP((4,)), head=QuantileValues(3)), munchausen=True),
    "dqn-recurrent": DQN.replace(
        network=QNetwork(MLP((4,)), core=GRU(4)), prioritised=True, sequence_length=4, value_rescaling=True
    ),
    "pqn": PQN,
    "pqn-ladder": PQN.replace(ladder=True),
}
STATIC = {
    "objective": "kl",
    "reduction": "mean",
    "reward_clipping": "abs_one",
    "rollout_length": 16,
    "epochs": 3,
    "minibatches": 2,
    "optimiser": None,
    "network": None,
    "target_period": 7,
    "frame_stack": FrameStack(2),
    "n_step": 3,
    "capacity": 512,
    "min_size": 64,
    "batch_size": 8,
    "updates": 2,
    "ladder": True,
    "sequence_length": 6,
    "burn_in": 4,
}
# Numbers that only one of the objectives looks at.
ONLY = dict.fromkeys(("kl_target", "kl_cutoff_cost", "initial_penalty"), ("ppo-kl",))
ONLY |= dict.fromkeys(("munchausen_scale", "munchausen_temperature", "munchausen_clip"), ("dqn-munchausen",))
ONLY |= {"quantile_huber": ("dqn-munchausen",), "priority_eta": ("dqn-recurrent",)}
ONLY |= dict.fromkeys(("v_min", "v_max"), ("dqn-categorical",))
ONLY |= dict.fromkeys(("priority_exponent", "importance_exponent"), ("dqn-categorical", "dqn-recurrent"))
RECURRENT = {"sequence_length", "burn_in"}
LADDERS = {"dqn-categorical", "pqn-ladder"}
NOT = {"ppo-kl": {"observation_clip", "reward_clip"}}


def fields(name):
    algo = BASES[name]
    traced = [f.name for f in dataclasses.fields(algo) if f.metadata.get("pytree_node", True)]
    static = [f.name for f in dataclasses.fields(algo) if f.name not in traced]
    return traced, static


def program(algo):
    """The traced program of one iteration, and its inputs that come from the algorithm."""
    env = jaxrl.make("gymnax:CartPole-v1")
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
    elsewhere = {f".{field}" for field, bases in ONLY.items() if name not in bases} | {
        f".{f}" for f in NOT.get(name, ())
    }
    elsewhere |= {".ladder_exponent"} - ({".ladder_exponent"} if name in LADDERS else set())
    unused = {leaf for leaf in unused if "." + leaf.split(".")[1] not in elsewhere}  # a schedule has several leaves
    # The penalty's initial value is made elsewhere.
    assert unused - {".initial_penalty"} == set()


def test_the_initial_penalty_is_in_the_initial_state():
    env = jaxrl.make("gymnax:CartPole-v1")
    for penalty in (1.0, 3.0):
        algo = BASES["ppo-kl"].replace(initial_penalty=penalty)
        state = at(algo, jnp.float32(0)).init(jax.random.key(0), jaxrl.Anakin(4, devices=1).bind(algo, env).spec)
        assert state.penalty == penalty


@pytest.mark.parametrize("name", ["ppo", "a2c", "impala", "dqn", "dqn-recurrent", "pqn"])
def test_every_static_field_changes_the_program(name, traced_programs):
    algo = BASES[name]
    same = []
    names = set(fields(name)[1]) - RECURRENT if name != "dqn-recurrent" else RECURRENT | {"n_step", "prioritised"}
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


@pytest.mark.parametrize("name", ["ppo", "a2c", "impala", "dqn", "pqn"])
def test_the_optimiser_changes_the_program(name, traced_programs):
    other = RMSProp() if isinstance(BASES[name].optimiser, Adam) else Adam()
    assert str(program(BASES[name].replace(optimiser=other))) != str(traced_programs[name])


def test_optional_numbers_change_the_program(traced_programs):
    for field, value in {"value_learning_rate": 1e-3, "max_grad_norm": None}.items():
        assert str(program(BASES["ppo"].replace(**{field: value}))) != str(traced_programs["ppo"]), field


def test_any_number_can_be_a_schedule():
    algo = BASES["ppo"]
    names = [f for f in fields("ppo")[0] if f != "optimiser" and getattr(algo, f) is not None]
    scheduled = at(algo.replace(**{f: Constant(getattr(algo, f)) for f in names}), jnp.float32(0.5))
    plain = at(algo, jnp.float32(0.5))
    assert all(getattr(scheduled, f) == getattr(plain, f) for f in names)
