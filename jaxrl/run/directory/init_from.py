"""Initialization of a run from another run: fine-tuning, changed settings, or online after offline training.

`load_initial` compares the learner state of the new run with the source, leaf by leaf, before anything is compiled.
Leaves that match are copied, and all others are initialized; the parameters and statistics that the policy acts with
must match. Environments, replay buffers, steps and schedules always start from the beginning.
"""

import dataclasses
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.algos.train_state import TrainState
from jaxrl.core import files
from jaxrl.core.errors import ConfigError, JaxrlError
from jaxrl.core.matching import check_spaces
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.trees import named_leaves
from jaxrl.core.types import ActorState, Algorithm, Environment, EnvSpec, HostRecipe, PyTree
from jaxrl.run.directory.loading import load_run
from jaxrl.run.directory.manifest import differences, take
from jaxrl.run.directory.run_directory import read_config
from jaxrl.run.policies.policy import Policy

InitFrom = str | os.PathLike | Policy | PyTree


@dataclasses.dataclass(frozen=True)
class Initial:
    """The arrays from another run, policy or learner state that replace newly initialized arrays of a run.

    Attributes:
      parent: the entry "parent" of `config.json`, as JSON values.
      values: the arrays; each key is the index of the learner's leaf that the array replaces.
    """

    parent: dict[str, Any]
    values: Mapping[int, Any]

    def into(self, learner: PyTree, place: Callable[[PyTree], PyTree]) -> PyTree:
        """Return `learner` with leaves replaced by these arrays, which `place` moves to the run's devices."""
        leaves, structure = jax.tree.flatten(learner)
        values = place(dict(self.values))
        return jax.tree.unflatten(structure, [values.get(number, leaf) for number, leaf in enumerate(leaves)])


def parent_notes(parent: Mapping[str, Any]) -> list[str]:
    """Return lines of text that list the copied and the newly initialized parts of the learner state."""
    where = parent.get("run") or f"a {'policy' if 'policy' in parent else 'learner state'}"
    where += f" at step {parent['step']:,}" if "step" in parent else ""
    lines = [f"copied from {where}: {', '.join(parent['taken'])}"]
    return lines + ([f"newly initialized: {', '.join(parent['fresh'])}"] if parent["fresh"] else [])


def recorded_parent(run_dir: str | Path | None, source: InitFrom) -> dict[str, Any] | None:
    """Return the entry "parent" in the configuration of `run_dir` if it describes `source`, else None."""
    if run_dir is None:
        return None
    try:
        parent = read_config(run_dir).get("parent")
    except JaxrlError:  # there is no run, or opening the directory will report the error
        return None
    same = isinstance(parent, dict) and _identity(source).items() <= parent.items()
    whole = (
        same and isinstance(parent.get("step", 0), int) and all(map(_are_names, map(parent.get, ("taken", "fresh"))))
    )
    return parent if whole else None


def _are_names(value):
    return isinstance(value, list) and all(isinstance(name, str) and name.isprintable() for name in value)


def load_initial(
    source: InitFrom, algo: Algorithm, env: Environment | HostRecipe, spec: EnvSpec, *, step: int | None = None
) -> Initial:
    """Return the initial arrays of a run of `algo` in `env`, copied from `source`.

    Args:
      source: a run directory, or one of its checkpoints (`runs/a/checkpoints/000000008192`); a policy, whose parameters
        and statistics are copied; or a learner state, such as `result.state.learner`.
      algo: resolved algorithm of the new run.
      env, spec: environment of the new run; its name and parameters may differ, but the spaces must be the same.
      step: the checkpoint of a run directory; None: the newest.

    Raises:
      ConfigError: arrays that the policy needs to act are missing or have other shapes or dtypes; the message lists
        them.
      RunDirectoryError: the path is not a run directory.
      CheckpointError: the run has no intact checkpoint.
    """
    parent, initial = _identity(source), resolve_schedules(algo, 0.0)
    shapes = jax.eval_shape(lambda key: initial.init(key, spec), jax.random.key(0))
    acting = _acting(initial, shapes)
    if isinstance(source, str | os.PathLike):
        run, at = _run_and_step(source)
        loaded = load_run(run, step=at if step is None else step)
        if loaded.learner is None:
            raise ConfigError(f"init_from: {run} contains only a policy; pass jaxrl.load({str(run)!r})")
        check_spaces(loaded.policy.spec, env)
        parent |= {"step": loaded.step, "algorithm": type(loaded.algo).__name__, "environment": loaded.env.name}
        learner, theirs = loaded.learner, loaded.policy.actor
        values = _matched(shapes, learner)
    elif isinstance(source, Policy):
        check_spaces(source.spec, env)
        parent |= {"algorithm": type(source.algo).__name__, "environment": source.spec.name}
        learner, theirs = None, source.actor
        values = _of_policy(acting, theirs, shapes)
    else:
        learner, theirs = source, None
        values = _matched(shapes, learner)
    if problems := _problems(acting, theirs, learner, shapes, values):
        what = parent.get("run") or ("the policy" if isinstance(source, Policy) else "the learner state")
        raise ConfigError([f"init_from: {what} does not fit this {type(algo).__name__}: {line}" for line in problems])
    taken, fresh = _names(shapes, values)
    return Initial(parent | {"taken": taken, "fresh": fresh}, values)


# --- the source ------------------------------------------------------------------------------------------------------


def _identity(source):
    """Return a key that identifies `source`: the run's path, or a checksum of its arrays."""
    if isinstance(source, str | os.PathLike):
        return {"run": str(_run_and_step(source)[0].absolute())}
    of_policy = isinstance(source, Policy)
    leaves = jax.tree.leaves(source.actor if of_policy else source)
    if not leaves or not all(isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves):
        raise ConfigError(
            f"init_from={source!r:.80} is not a run directory, a policy or a learner state; for a result, pass "
            "result.policy or result.state.learner"
        )
    checksum = 0
    for leaf in leaves:
        checksum = zlib.crc32(np.ascontiguousarray(take("", leaf)).tobytes(), checksum)
    return {"policy" if of_policy else "learner": checksum}


def _run_and_step(source):
    """Return a run directory, and the step if the path is one of its checkpoints."""
    path = files.expand(source)
    if path.absolute().parent.name == "checkpoints" and path.name.isdecimal():
        return path.absolute().parent.parent, int(path.name)
    return path, None


# --- matching of leaves ----------------------------------------------------------------------------------------------


def _acting(algo, shapes) -> ActorState:
    """Return an actor state whose leaves are indices among the learner's leaves; -1 for computed leaves."""
    found = []

    def trace(learner):
        number_of = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(learner))}
        actor = algo.actor(learner)
        found.append(jax.tree.map(lambda x: number_of.get(id(x), -1), actor))
        return actor

    jax.eval_shape(trace, shapes)
    return found[0]


def _needed(actor):
    """Return the parts of an actor state that determine its actions."""
    return {"parameters": actor.params, "model state": actor.model_state, "statistics": actor.statistics}


def _of_policy(acting, actor, shapes):
    """Return the policy's arrays, keyed by the index of the learner's leaf, with copies for the target networks."""
    values = {}
    for name, numbers in _needed(acting).items():
        theirs = _needed(actor)[name]
        if jax.tree.structure(numbers) == jax.tree.structure(theirs):
            pairs = zip(jax.tree.leaves(numbers), jax.tree.leaves(theirs), strict=True)
            values |= {number: x for number, x in pairs if number >= 0}
    leaves, structure = jax.tree.flatten(shapes)
    values = {number: x for number, x in values.items() if _kind(x) == _kind(leaves[number])}
    return values | _matched(shapes, jax.tree.unflatten(structure, map(values.get, range(len(leaves)))))


def _matched(shapes, learner):
    """Return the arrays of `learner`, keyed by leaf index, for the parts whose names and shapes match `shapes`."""
    values: dict[int, Any] = {}

    def copy(numbers, theirs):
        values.update(zip(jax.tree.leaves(numbers), jax.tree.leaves(theirs), strict=True))

    def same(mine, theirs):
        return jax.tree.structure(mine) == jax.tree.structure(theirs) and all(
            _kind(a) == _kind(b) for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True)
        )

    def match(mine, numbers, theirs):
        if same(mine, theirs):
            copy(numbers, theirs)
        elif isinstance(mine, TrainState) and isinstance(theirs, TrainState):
            for name in ("params", "model_state"):
                if same(getattr(mine, name), getattr(theirs, name)):
                    copy(getattr(numbers, name), getattr(theirs, name))
                for candidate in (getattr(theirs, f"target_{name}"), getattr(theirs, name)):
                    if same(getattr(mine, f"target_{name}"), candidate):
                        copy(getattr(numbers, f"target_{name}"), candidate)
                        break
        else:
            parts, ours, others = _parts(mine), _parts(numbers), _parts(theirs)
            for name in parts.keys() & others.keys():
                match(parts[name], ours[name], others[name])

    match(shapes, _numbered(shapes), learner)
    return values


def _parts(tree):
    """Return the parts of a dataclass or a dictionary, by name."""
    if isinstance(tree, dict):
        return tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return {}


def _numbered(tree):
    structure = jax.tree.structure(tree)
    return jax.tree.unflatten(structure, range(structure.num_leaves))


def _kind(x):
    return tuple(x.shape), x.dtype


# --- reports ---------------------------------------------------------------------------------------------------------


def _problems(acting, theirs, learner, shapes, values):
    """Return one error message for each missing or mismatched leaf that the policy needs to act."""
    paths, leaves, problems = list(named_leaves(shapes, ".")), jax.tree.leaves(shapes), []
    for name, numbers in _needed(acting).items():
        if name == "statistics" and theirs is not None:
            there, here = set(named_leaves(theirs.statistics, ".")), set(named_leaves(numbers, "."))
            if there != here:
                more = "normalizes more than this run" if there - here else "normalizes less than this run"
                differing = ", ".join(sorted({path.partition(".")[0] for path in there ^ here}))
                problems.append(f"it {more} ({differing}); use its normalize_observation and normalize_reward")
                continue
        lacking = {path: number for path, number in named_leaves(numbers, ".").items() if number not in values}
        if learner is not None:
            lacking = {paths[number]: number for number in lacking.values() if number >= 0}
        elif -1 in lacking.values():
            problems.append(f"the {name} are computed from the learner; pass a run or the learner state instead")
            continue
        others = named_leaves(_needed(theirs)[name] if learner is None else learner, ".")
        found = {path: (tuple(x.shape), str(x.dtype)) for path, x in others.items()}
        lines = differences({path: leaves[number] for path, number in lacking.items()}, found, partial=True)
        problems += lines if lines or not lacking else [f"the {name} differ in structure from this run's"]
    return problems


def _names(shapes, values):
    """Return the names of the largest parts that are entirely copied, and of those that are entirely initialized."""
    numbers = _numbered(shapes)

    def divide(name, part):
        inside = jax.tree.leaves(part)
        if not inside:
            return [], []
        if name and all(number in values for number in inside):
            return [name], []
        if name and not any(number in values for number in inside):
            return [], [name]
        taken, fresh = [], []
        for child, below in _parts(part).items():
            more = divide(f"{name}.{child}" if name else child, below)
            taken, fresh = taken + more[0], fresh + more[1]
        return (taken, fresh) if taken or fresh else ([f"part of {name}"], [])

    return divide("" if _parts(numbers) else "learner", numbers)
