"""With which options whole programs are compiled."""

import jax
import jax.numpy as jnp

from jaxrl.core import compiling
from jaxrl.core.compiling import compiler_options, whole_program


def test_the_level_is_of_the_cpu_alone_and_the_users_own_stays(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    assert compiler_options() == {"xla_backend_optimization_level": 1}
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=3")
    assert compiler_options() is None
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(compiling.jax, "default_backend", lambda: "gpu")
    assert compiler_options() is None


def test_a_whole_program_is_a_jitted_function_that_asks_for_its_options_when_it_is_used(monkeypatch):
    asked, options = [], compiler_options()
    monkeypatch.setattr(compiling, "compiler_options", lambda: asked.append(1) or options)

    @whole_program(static_argnums=0, donate_argnums=1)
    def add(number, x):
        return x + number

    assert not asked and add.__name__ == "add"
    x = jnp.arange(3.0)
    add.lower(2, x).compile()
    assert add._cache_size() == 0
    assert add(2, x).tolist() == [2.0, 3.0, 4.0] and x.is_deleted()
    assert add._cache_size() == 1 and asked == [1]
    assert isinstance(add.eval_shape(1, jnp.arange(3.0)), jax.ShapeDtypeStruct)
    assert not hasattr(add, "__jax_array__")
