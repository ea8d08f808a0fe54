"""Kernels and collectives, counted in programs whose loops are known, and in texts as other compilers write them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxrl.parallel import hlo
from jaxrl.parallel.mesh import data_mesh, over_devices

# As compilers for TPUs and GPUs write: the number of trips in the condition, a branch, what is started and done apart.
TEXT = """HloModule jit_f, is_scheduled=true

%fused (a: f32[8]) -> f32[8] {
  %a = f32[8]{0:T(8,128)S(1)} parameter(0)
  ROOT %n = f32[8]{0} negate(%a)
}

%counts (s: (s32[], f32[8])) -> pred[] {
  %other.limit = s32[]{:T(128)} constant(3)
  %limit = s32[]{:T(128)} constant(12)
  %s = (s32[]{:T(128)}, f32[8]{0:T(128)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT, metadata={op_name="jit(f)/while"}
}

%until (s: (s32[], f32[8])) -> pred[] {
  %s.1 = (s32[], f32[8]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  ROOT %lt.1 = pred[] compare(%i.1, %i.1), direction=LT
}

%scatter (y: f32[8]) -> f32[2] {
  ROOT %rs = f32[2]{0} reduce-scatter(%y), to_apply=%sum
}

%exchange (y.1: f32[8]) -> f32[8] {
  ROOT %ar = f32[8]{0} all-reduce(%y.1), to_apply=%sum
}

%step (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = f32[8]{0} fusion(%s.2), kind=kLoop, calls=%fused
  %r = f32[8]{0} all-reduce-start(%x), to_apply=%sum
  %d = f32[8]{0} all-reduce-done(%r)
  %c = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%d)
  %as = ((f32[8]{0}), f32[2]{0}, u32[]) async-start(%x), calls=%scatter
  %ad = f32[2]{0} async-done(%as)
  %m = f32[8]{0} fusion(%x), kind=kCustom, calls=%exchange
  %a2 = f32[8]{0} atan2(%x, %x)
  ROOT %e = f32[8]{0} copy-done(%c)
}

%small (s: f32[8]) -> f32[8] {
  ROOT %x.1 = f32[8]{0} fusion(%s.3), kind=kLoop, calls=%fused
}

%large (s: f32[8]) -> f32[8] {
  %x.2 = f32[8]{0} fusion(%s.4), kind=kLoop, calls=%fused
  ROOT %x.3 = (f32[8]{0}, /*index=1*/f32[8]{0}) custom-call(%x.2), custom_call_target="sort"
}

%iteration (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %w = (s32[]{:T(128)}, f32[8]{0:T(128)S(1)}) while(%t), condition=%counts, body=%step
  %b = f32[8]{0} conditional(%p, %q, %q), branch_computations={%small, %large}
  %g = f32[32]{0} all-gather(%b), dimensions={0}
  ROOT %o = f32[8]{0} bitcast(%g)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %u = (s32[], f32[8]) while(%p), condition=%until, body=%iteration
  ROOT %z = f32[8]{0} call(%u), to_apply=%small
}
"""


def test_a_text_is_read_loop_by_loop():
    program = hlo.read(TEXT)
    (iteration,) = program.loops
    (inner,) = iteration.loops
    assert (program.trips, iteration.trips, inner.trips) == (1, None, 12)
    assert program.kernels == {"fusion": 1}, "of what is called"
    assert iteration.kernels == {"fusion": 1, "custom-call": 1, "compare": 1}, "of the larger branch; the condition's"
    assert inner.kernels == {"fusion": 2, "copy": 1, "atan2": 1, "compare": 1}
    assert inner.collectives == {"all-reduce": 2, "reduce-scatter": 1}, "those within others too"
    assert iteration.collectives == {"all-gather": 1}
    assert iteration.all_collectives() == {"all-gather": 1, "all-reduce": 24, "reduce-scatter": 12}
    assert inner.exchanged == 2 * 32 + 8 and iteration.exchanged == 128, "bytes of what each gives"
    assert program.all_exchanged() == 128 + 12 * 72
    assert iteration.all_kernels() == 3 + 12 * 5 and program.all_kernels() == 1 + 63
    assert [(loop.trips, runs) for loop, runs in program.walk()] == [(1, 1), (None, 1), (12, 12)]


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        hlo.read("")


def test_a_program_has_the_collectives_and_loops_that_were_written():
    mesh, everywhere = data_mesh(2), PartitionSpec()

    def step(x, _):
        return jax.lax.psum(jnp.sin(x), "data"), None

    def run(x, length):
        return jax.lax.fori_loop(0, length, lambda _, x: jax.lax.scan(step, x, None, 7)[0], x)

    program = jax.jit(over_devices(run, mesh, (PartitionSpec("data"), everywhere), PartitionSpec("data")))
    found = hlo.read(program.lower(jnp.ones((4, 64)), jnp.int32(3)).compile().as_text())
    (outer,) = [loop for loop in found.loops if loop.trips is None]
    assert outer.all_collectives() == {"all-reduce": 7} and not found.collectives
    assert [loop.trips for loop in outer.loops] == [7]
    assert outer.all_exchanged() == 7 * 2 * 64 * 4, "of the half that a device has"
