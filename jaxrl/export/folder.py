"""Policies as folders of safetensors, with configuration, scores and a model card."""

import contextlib
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.core import files
from jaxrl.core.errors import ConfigError
from jaxrl.run.directory.run_status import is_number
from jaxrl.run.policies import policy_folder
from jaxrl.run.policies.policy import Policy

_OF_ACTING = ("algorithm", "environment", "native", "topology", "total_steps", "seed")
_SCORES = "evaluation/"


def write(
    path: Path, policy: Policy, config: Mapping[str, Any], step: int, metrics: Sequence[Mapping[str, Any]]
) -> None:
    """Write a policy as a folder, completely or not at all.

    Args:
      path: the folder, which must not exist.
      policy: the policy to write.
      config: configuration of the policy's run, as in config.json.
      step: environment steps that the policy has learned from.
      metrics: rows of the metrics of the policy's run.

    Raises:
      ConfigError: `path` exists, or a value of the policy is not finite.
      OSError: the folder cannot be written.
    """
    config = {name: config[name] for name in _OF_ACTING if name in config}
    scores = _scores(metrics)
    with building(path) as made:
        policy_folder.write(made, policy.actor, config, step)
        if scores:
            files.write_json(made / "scores.json", scores)
        with files.replacing(made / "README.md") as file:
            file.write(_card(policy, config, step, [row for row in scores if row["step"] == step]))


@contextlib.contextmanager
def building(path: Path) -> Generator[Path]:
    """Yield a temporary folder next to `path`; rename it to `path` on exit, or delete it after an error.

    Raises:
      ConfigError: `path` exists.
    """
    if path.exists() or path.is_symlink():
        raise ConfigError(f"path={str(path)!r} exists; use the path of a new folder")
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield made
        made.chmod(0o755)
        made.rename(path)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def read_scores(path: Path) -> list[dict[str, Any]]:
    """Return the evaluations stored in a folder, as rows of metrics; an empty list if they cannot be read."""
    try:
        found = files.read_json(path / "scores.json")
    except (OSError, ValueError):
        return []
    rows = (
        [row for row in found if isinstance(row, dict) and type(row.get("step")) is int]
        if isinstance(found, list)
        else []
    )
    return [{"step": row.pop("step")} | {_SCORES + name: x for name, x in row.items() if is_number(x)} for row in rows]


def _scores(metrics) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics that contain an evaluation, reduced to the step and the scores."""
    found = [
        {"step": row["step"]}
        | {name.removeprefix(_SCORES): x for name, x in row.items() if name.startswith(_SCORES) and x is not None}
        for row in metrics
    ]
    return [row for row in found if "return_mean" in row]


def _card(policy, config, step, scores) -> str:
    """Return the model card; names in its YAML header are written as JSON."""
    algorithm, environment = type(policy.algo).__name__, policy.spec.name
    tags = ["reinforcement-learning", "jaxrl", algorithm, environment]
    rows = [("Algorithm", algorithm), ("Environment", environment), ("Environment steps", f"{step:,}")]
    if "seed" in config:
        rows.append(("Seed", config["seed"]))
    for x in scores[-1:]:  # the best run of a sweep has only the mean
        episodes = f", {x['episodes']} episodes" if "episodes" in x else ""
        rows.append(
            (
                f"Return{episodes}",
                f"{x['return_mean']:.2f}" + (f" ± {x['return_std']:.2f}" if "return_std" in x else ""),
            )
        )
    text = f"""---
library_name: jaxrl
pipeline_tag: reinforcement-learning
tags: {files.to_json(tags)}
---

# {_inline(algorithm)} on {_inline(environment)}

| | |
|---|---|
"""
    text += "".join(f"| {name} | {_inline(str(value))} |\n" for name, value in rows)
    return (
        text
        + """
```python
import jaxrl

policy = jaxrl.load("PATH OF THIS FOLDER")
action, carry = policy(observation)
```

`config.json` has all settings, `model.safetensors` the parameters and the statistics of observations, and
`scores.json`, if it exists, all evaluations during training. Nothing in this folder is executed when it is loaded.
"""
    )


def _inline(text: str) -> str:
    """Return a name for a table cell, with unsafe characters replaced by spaces."""
    return "".join(c if c.isprintable() and c not in "|<>`[]" else " " for c in text)
