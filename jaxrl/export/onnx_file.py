"""Export of policies to ONNX with jax2onnx, for onnxruntime and other runtimes."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.core import files
from jaxrl.core.errors import ConfigError
from jaxrl.core.trees import named_leaves
from jaxrl.export.function import ActFunction

# jax2onnx requires an older orbax-checkpoint than jaxrl does; both run with this version.
OVERRIDE = "orbax-checkpoint==0.11.36"
HOW = (
    f"echo '{OVERRIDE}' > onnx.txt; uvx --overrides onnx.txt --from jaxrl --with jax2onnx "
    "jaxrl export RUN --to onnx --out FILE"
)


def write(path: Path, function: ActFunction) -> None:
    """Write a policy as an ONNX model for any batch size.

    The inputs are "observation", "carry_0", ..., "first", "reward" and "action_mask"; the outputs are "action" and
    "next_carry_0", ... Parts of nested observations and actions are named "observation/PART" and "action/PART".

    Raises:
      ConfigError: jax2onnx is not installed, or does not support an operation of the policy.
      OSError: the file cannot be written.
    """
    try:
        import jax2onnx  # installed in a separate environment
    except ImportError as error:
        raise ConfigError(
            f"to='onnx' needs jax2onnx, which conflicts with the installed orbax-checkpoint; use a separate "
            f"environment: {HOW}"
        ) from error
    arguments, structure = jax.tree.flatten(tuple(function.arguments.values()))

    def flat(*leaves):
        action, carry = function(*jax.tree.unflatten(structure, leaves))
        # An action may also be part of the carry, and each output needs a name.
        return *jax.tree.leaves(action), *(jnp.copy(x) for x in carry)

    logger = logging.getLogger("onnx_ir")  # it warns about every constant
    level = logger.level
    logger.setLevel(logging.ERROR)
    inputs = [name for part, tree in function.arguments.items() for name in _names(part, tree)]
    outputs = _names("action", function.action) + _names("next_carry", function.arguments["carry"])
    try:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            model = jax2onnx.to_onnx(flat, arguments, input_names=inputs, output_names=outputs, model_name="policy")
    except Exception as error:
        what = f"{type(error).__name__}: {error!s:.300}".splitlines()[0]
        raise ConfigError(f"jax2onnx cannot write this policy: {what}; use to='stablehlo'") from error
    finally:
        logger.setLevel(level)
    with files.replacing(path, "wb") as file:
        file.write(model.SerializeToString())


def _names(part: str, tree: Any) -> list[str]:
    """Return a name for each leaf: "carry_0" in a tuple, "observation/camera" in a dictionary."""
    joint = "_" if part.endswith("carry") else "/"
    return [f"{part}{joint}{path}" if path else part for path in named_leaves(tree)]
