"""What a preset is."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl.core.types import Algorithm


@dataclasses.dataclass(frozen=True)
class Preset:
    """Settings of a whole run.

        preset = jaxrl.preset("purejaxrl-cartpole")
        topology = jaxrl.Anakin(**preset.topology)
        result = jaxrl.train(preset.algorithm, preset.env, total_steps=preset.total_steps, topology=topology)

    Attributes:
      name: as `jaxrl.preset` and `--preset` take it.
      algorithm: with all its fields.
      env: where it was used, "suite:name"; any other of its kind may take its place.
      total_steps: environment steps that it was trained for.
      topology: arguments of `Anakin` or `Sebulba`, "num_envs" among them.
      source: where the numbers are from, and where this differs.
    """

    name: str
    algorithm: Algorithm
    env: str
    total_steps: int
    topology: Mapping[str, Any]
    source: str
