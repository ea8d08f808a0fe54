"""What BC, TD3+BC, CQL, IQL and CRR share: fields that matter, what is refused, and what the online ones do instead."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import BATCH, SAC, SPEC, TD3, transitions
from helpers.offline import ALGORITHMS, CHOICE, QUICK, from_best, initial, learned
from helpers.tiers import one_quick

from jaxrl.algos.optimizers import RMSProp
from jaxrl.core import spaces
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.sources import Lifo
from jaxrl.core.types import EnvSpec
from jaxrl.networks import Actor, CategoricalValues, Critic
from jaxrl.parallel.replicas import SingleReplica

KEY = jax.random.key(0)
STATIC = {"n_step": 3, "capacity": 512, "min_size": 64, "batch_size": 8, "rollout_length": 4, "replay_ratio": 0.5}
STATIC |= {"samples_per_insert": 24, "sampler": Lifo(), "remover": Lifo(), "max_times_sampled": 3}
STATIC |= {"target_period": 3, "samples": 5, "policy_delay": 3, "learn_temperature": False, "optimizer": RMSProp()}
STATIC |= {"temperature_learning_rate": 1e-3, "noise_correlation": 0.5, "random_correlation": 0.5, "noise_hold": 4}
STATIC |= {"reset_at": (3,)}
STATIC |= {"entropy_in_target": True, "normalize_observation": False, "weighting": "indicator", "baseline": "max"}
STATIC |= {
    "storage": "flashbax",
    "replay_memory": "host",
    "critic": Critic(widths=(5,)),
    "value": Critic(widths=(5,), ensemble=1),
}
# Of no use to these settings: to discrete actions, to the first state, to actors, to heads of quantiles and categories.
ELSEWHERE = {".target_entropy_fraction", ".temperature", ".exploration_noise", ".quantile_huber", ".v_min", ".v_max"}


def program(algo):
    """The traced update, whose inputs begin with the algorithm's numbers."""
    state = jax.eval_shape(lambda algo: resolve_schedules(algo, jnp.float32(0)).init(KEY, SPEC), algo)

    def update(algo, state):
        algo = resolve_schedules(algo, jnp.float32(0))
        return algo.update(state, {"replay": transitions()}, spec=SPEC, key=KEY, replicas=SingleReplica())

    return jax.make_jaxpr(update)(algo, state)


@pytest.mark.long
@pytest.mark.parametrize("name", one_quick(ALGORITHMS, "bc", "td3bc"))
def test_every_field_changes_something(name):
    from jax.interpreters import partial_eval as pe

    algo = ALGORITHMS[name].replace(normalize_observation=True, observation_clip=10.0)
    if name == "cql":
        algo = algo.replace(lagrange_threshold=1.0)  # its start is in the first state
    closed = program(algo)
    used = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))[1]
    leaves = jax.tree_util.tree_leaves_with_path(algo)
    unused = {jax.tree_util.keystr(path) for (path, _), hit in zip(leaves, used[: len(leaves)], strict=True) if not hit}
    starts = {".coefficient"} if name == "cql" else set()
    fields = {"." + field.name for field in dataclasses.fields(algo)}
    assert unused == (ELSEWHERE - ({".temperature"} if name == "crr" else set()) | starts) & fields

    same = []
    for field in dataclasses.fields(algo):
        value = getattr(algo, field.name)
        if field.name == "policy":
            other = Actor(widths=(5,), stochastic=algo.policy.stochastic)
        elif field.name in ("policy_learning_rate", "lagrange_threshold"):
            other = 1e-3 if value is None else None
        elif field.name in STATIC:
            other = STATIC[field.name]
        else:
            assert field.metadata.get("pytree_node", True), field.name
            continue
        assert other != value, field.name
        changed = algo.replace(**{field.name: other})
        carries = [jax.tree.leaves(x.initial_carry(SPEC, jnp.int32(0), 1)) for x in (algo, changed)]
        if (
            changed.experience == algo.experience
            and len(set(map(len, carries))) == 1
            and str(program(changed)) == str(closed)
        ):
            same.append(field.name)
    assert same == []


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_array_is_in_the_state_twice(name):
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(initial(ALGORITHMS[name]))]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_does_not_fit_is_said(name):
    algo = ALGORITHMS[name]
    assert algo.validate(SPEC, 4, 4) == []
    for space in (spaces.MultiDiscrete((3, 2)), spaces.Box(-np.inf, np.inf, (2,)), spaces.Box(-1, 1, (2, 2))):
        (problem,) = algo.validate(EnvSpec("x", SPEC.observation_space, space), 4, 4)
        assert "bounded Box" in problem and repr(space) in problem
    assert (algo.validate(CHOICE, 4, 4) == []) == (name != "td3bc")
    if name == "bc":
        return
    wrong = algo.replace(policy=Actor(stochastic=name == "td3bc"))
    assert f"must have stochastic={name != 'td3bc'}" in wrong.validate(SPEC, 4, 4)[0]
    assert "tau=0" in algo.replace(tau=0.0).validate(SPEC, 4, 4)[0]
    categorical = algo.replace(critic=Critic(head=CategoricalValues()))
    assert (categorical.validate(SPEC, 4, 4) == []) == (name == "td3bc")
    assert algo.experience["replay"].batch_size == BATCH


# --- those that it takes them for ------------------------------------------------------------------------------------


@pytest.mark.long
def test_td3_leaves_the_data_for_a_corner():
    assert from_best(TD3.replace(**QUICK, tau=0.1)) > 0.8


@pytest.mark.long
def test_sac_does_what_was_never_done():
    assert (learned(SAC.replace(**QUICK), CHOICE) == 2).all()
