"""SAC: a temperature with a schedule, and the first discrete actions. Its update: `test_oracles.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import (
    SAC,
    SPEC,
    initial,
    transitions,
    updated,
)

import jaxrl
from jaxrl.algos import acting
from jaxrl.algos.temperature import Temperature
from jaxrl.core import spaces
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import EnvSpec, TimeStep

KEY = jax.random.key(7)


@pytest.mark.long
def test_a_fixed_temperature_is_no_parameter_and_follows_its_schedule():
    algo = SAC.replace(temperature=Temperature(initial=jaxrl.schedules.Linear(1.0, 0.0), learned=False))
    assert initial(algo).log_temperature.params == ()
    assert algo.validate(SPEC, 4, 1) == []
    later = resolve_schedules(algo, jnp.float32(0.75))
    info = updated(later, initial(algo), transitions(), KEY)[1]
    assert float(info.metrics["temperature"]) == pytest.approx(0.25)


# --- discrete actions ----------------------------------------------------------------------------------------------

CHOICE = EnvSpec("choice", SPEC.observation_space, spaces.Discrete(3))


@pytest.mark.long
def test_until_the_first_update_discrete_actions_are_uniform_over_what_is_allowed():
    algo = resolve_schedules(SAC, jnp.float32(0))
    state, keys = algo.init(jax.random.key(0), CHOICE), jax.random.split(jax.random.key(1), 4096)
    flags = jnp.zeros(4096, bool)
    mask = jnp.broadcast_to(jnp.asarray([True, False, True]), (4096, 3))
    moments = TimeStep(jnp.ones((4096, 3)), jnp.zeros(4096), flags, flags, flags, action_mask=mask)
    action = algo.act(algo.actor(state), moments, acting.ActingCarry((), ()), keys, spec=CHOICE, explore=True).action
    assert np.bincount(action, minlength=3)[1] == 0 and np.mean(np.asarray(action) == 0) == pytest.approx(0.5, abs=0.03)
    greedy = algo.act(algo.actor(state), moments, acting.ActingCarry((), ()), keys, spec=CHOICE, explore=False).action
    assert len(np.unique(greedy)) == 1
