"""One-line summary of a network for an environment: the sizes of its layers and the number of parameters."""

import math
from itertools import groupby
from typing import Any

import jax
from flax import nnx

from jaxrl.core.types import EnvSpec

_SIDE_BY_SIDE = ("policy", "value", "advantage", "state_value")  # modules that read the same features


def summary(network: Any, spec: EnvSpec) -> str:
    """Return a line such as "ActorCritic, layers policy 64, 64, 2; value 64, 64, 1; 9,155 parameters".

    The numbers are the sizes of the layers in order; a convolution with 16 filters is "conv 16", and the layers of an
    ensemble of 2 begin with "2 x". For a user-defined network, the line has only its name and number of parameters.

    Args:
      network: a network of `jaxrl.networks`, or a user-defined network.
      spec: the environment's spec.
    """
    params, _ = jax.eval_shape(lambda key: network.init(key, spec), jax.random.key(0))
    count = f"{sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)):,} parameters"
    layers = _layers_of(network, spec)
    ensemble = getattr(network, "ensemble", 1)
    several = f"{ensemble} x " if layers and ensemble > 1 else ""
    return f"{type(network).__name__}, {f'layers {several}{layers}; ' if layers else ''}{count}"


def _layers_of(network: Any, spec: EnvSpec) -> str:
    if not hasattr(network, "torso"):
        return ""  # the parts of a user's module have other names
    found = []
    jax.eval_shape(lambda key: found.append(_text(network.build(spec, nnx.Rngs(params=key)))), jax.random.key(0))
    return found[0]


def _text(module: nnx.Module) -> str:
    chain, groups = _layers(module)
    runs = [(layer, len(list(same))) for layer, same in groupby(chain)]
    text = ", ".join(f"{n} x {layer}" if n > 2 else ", ".join([layer] * n) for layer, n in runs)
    if len(groups) == 1:  # a single group needs no name
        return ", ".join(filter(None, (text, groups[0].partition(" ")[2])))
    return "; ".join(filter(None, (text, *groups)))


def _layers(module: nnx.Module) -> tuple[list[str], list[str]]:
    """Return a module's sequential layers, in the order of creation, and its named groups of parallel layers."""
    if isinstance(module, nnx.Conv):
        return [f"conv {module.out_features}"], []
    core = getattr(module, "core", None)
    if hasattr(core, "width"):  # a recurrent core
        return [f"{type(core).__name__} {core.width}"] * getattr(core, "layers", 1), []
    kernel = vars(module).get("kernel", vars(module).get("unit_kernel"))
    if kernel is not None:
        return [str(kernel.shape[-1])], []
    chain: list[str] = []
    groups: list[str] = []
    for name, child in vars(module).items():
        if not isinstance(child, nnx.Module):
            continue
        if name in _SIDE_BY_SIDE or name.startswith(("part_", "encode_")):
            groups.append(f"{name.removeprefix('part_').removeprefix('encode_')} {_text(child)}")
            continue
        inner, inner_groups = _layers(child)
        if name == "log_std_output":
            chain[-1] += f" + {inner[0]}"
        else:
            chain += inner
        groups += inner_groups
    return chain, groups
