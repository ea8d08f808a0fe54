"""Declaration of algorithms: fields and their validation, and the registry by name."""

import dataclasses
import functools
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self, cast, dataclass_transform, runtime_checkable

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.algos.optimizers import optimizer_problems
from jaxrl.core import registry, spaces
from jaxrl.core.config import WAS
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.limits import problem
from jaxrl.core.schedules import is_schedule, schedule_problems
from jaxrl.core.types import Algorithm, EnvSpec, ModelState, Params, PyTree
from jaxrl.networks.critic import Critic

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_LIMITS = {"low", "above", "high", "below", "choices"}
_RELATIONS = {"only_with", "at_most", "less_than", "part", WAS}
ALGORITHMS = registry.registered("algorithm")  # by lower-case name; importing `jaxrl.algos` adds the built-in ones


def _field(default, traced, *, help="", **settings):
    if wrong := settings.keys() - _LIMITS - _RELATIONS:
        raise TypeError(f"a field has no {', '.join(sorted(wrong))}; use {', '.join(sorted(_LIMITS | _RELATIONS))}")
    metadata = dict.fromkeys(_RELATIONS) | {name: item for name, item in settings.items() if name in _RELATIONS}
    metadata["limits"] = {name: item for name, item in settings.items() if name in _LIMITS and item is not None}
    metadata["help"] = help
    return struct.field(pytree_node=traced, default=default, metadata=metadata)


def number(default: Any, **limits) -> Any:
    """Declare a traced field, whose value is a number or a schedule and can be swept and vmapped.

    Args:
      default: a number, a schedule, or None.
      **limits: optional metadata. `low` and `high` are inclusive bounds, `above` and `below` are exclusive ones, and
        `help` is one line. `only_with` is the setting without which the field has no effect, such as "prioritized",
        "not kl_penalty" or "network.head=quantilevalues"; several are joined by "and" or "or". For a field of a part,
        these are settings of the part or of the algorithm. `at_most` and `less_than` name another setting, such as
        "critic.ensemble", as an inclusive or exclusive upper bound.
    """
    return _field(default, True, **limits)


def static(default: Any, **limits) -> Any:
    """Declare a static, hashable field, for a setting that changes shapes or control flow.

    The limits are those of `number`, and `choices`, the allowed values. A field declared as `int` or `int | None`
    accepts only whole numbers.
    """
    return _field(default, False, **limits)


def part(
    kind: type,
    *,
    default: Any = None,
    was: Mapping[str, str] | None = None,
    switch: str | None = None,
    **metadata: str,
) -> Any:
    """Declare a part of an algorithm, a field group with its own equations; None disables it.

    Args:
      kind: the part's class; instances of your own subclasses are accepted too, and those of a registered base class
        are converted, with the default's values of the fields that they lack.
      default: None, or an instance; then None is allowed only if the annotation contains it.
      was: the part's fields, by the names that they had as fields of the algorithm in older configurations.
      switch: a field of older configurations only, such as "sequence_length"; None: the field of the part's own name. A
        part that may be None was enabled if this field was true, or had the value after "=", as in "objective=kl".
      **metadata: `help` and `only_with`, as for `number`.
    """
    return _field(default, True, part=kind, was=was and (switch, was), **metadata)


def parts(algo: "DataclassInstance") -> dict[str, Any]:
    """Return the parts of an algorithm that are set, by field name."""
    kinds = {field.name: field.metadata.get("part") or () for field in dataclasses.fields(algo)}
    return {name: value for name, kind in kinds.items() if isinstance(value := getattr(algo, name), kind)}


@dataclasses.dataclass(frozen=True)
class _Change:
    """Override of a group's field: the new default and metadata."""

    default: Any
    metadata: dict[str, Any]


def changed(default: Any, **metadata) -> Any:
    """Override a group's field with another default, and optionally other `help`, `only_with` or limits.

    Args:
      default: the new default, as in `number` or `static`, depending on how the group declares the field.
      **metadata: the metadata to override; if it contains limits, they replace all limits of the group's field.
    """
    return _Change(default, metadata)


def _with_changes[T](cls: type[T]) -> type[T]:
    """Replace the overrides created by `changed` with complete fields."""
    inherited = {name: field for base in reversed(cls.__mro__) for name, field in _own_fields(base).items()}
    for name, change in [(name, value) for name, value in vars(cls).items() if isinstance(value, _Change)]:
        if name not in inherited:
            raise TypeError(f"{cls.__name__}.{name} = changed(...): no group of {cls.__name__} has this field")
        metadata = inherited[name].metadata
        settings = {key: metadata[key] for key in ("help", *_RELATIONS)} | change.metadata
        if not _LIMITS & settings.keys():
            settings |= metadata["limits"]
        setattr(cls, name, _field(change.default, metadata["pytree_node"], **settings))
    for name in inherited:
        first = next(base for base in cls.__mro__[1:] if name in vars(base).get("__annotations__", ()))
        # Dataclasses take a field from the last base that has it, even by inheritance, not from the first base to
        # declare it.
        if name not in vars(cls) and _own_fields(first)[name] is not inherited[name]:
            raise TypeError(f"{cls.__name__}: list {first.__name__}, which restates {name}, before other groups")
    return cls


def _own_fields(cls: type) -> dict[str, dataclasses.Field]:
    return vars(cls).get("__dataclass_fields__", {})


class StaticFunction(struct.PyTreeNode):
    """Static wrapper of a user's function in a traced field, such as an optimizer: pytree leaves must be numbers."""

    function: Callable[..., Any] = struct.field(pytree_node=False)

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


registry.add("function", static=StaticFunction)


def _check_parts_and_hold_functions(algo: "DataclassInstance") -> None:
    """Check the types of parts, and wrap the functions in an algorithm's traced fields as `StaticFunction`."""
    for field in dataclasses.fields(algo):
        value = getattr(algo, field.name)
        if kind := field.metadata.get("part"):
            # The subclasses in jaxrl have fields that only other algorithms use.
            fits = type(value) is kind or isinstance(value, kind) and not type(value).__module__.startswith("jaxrl.")
            if fits or (optional := _takes_none(field)) and value is None:
                continue
            if registry.name_of(type(value)) and issubclass(kind, type(value)):  # of a base class, with fewer fields
                default = field.default if isinstance(field.default, kind) else kind()
                object.__setattr__(algo, field.name, dataclasses.replace(default, **vars(value)))
                continue
            what = f"{type(algo).__name__}.{field.name}={value!r:.80} is not {kind.__name__}(...)"
            raise ConfigError(what + ", or None" * optional)
        if field.metadata.get("pytree_node", True) and callable(value) and jax.tree_util.all_leaves([value]):
            object.__setattr__(algo, field.name, StaticFunction(value))


@dataclass_transform(kw_only_default=True, frozen_default=True)
def field_group[T](cls: type[T]) -> type[T]:
    """Turn a class into a group of fields that algorithms share: a frozen, keyword-only dataclass and pytree.

    A group may have a method `problems()` that explains conflicts between its fields; `field_problems` calls the
    method of every group.
    """
    made: Any = _with_changes(cls)
    return cast("type[T]", struct.dataclass(made, kw_only=True))


@dataclass_transform(kw_only_default=True, frozen_default=True)
def part_class[T](cls: type[T]) -> type[T]:
    """Turn a class into a part of algorithms: a group of fields, registered by its lower-case name."""
    made = field_group(cls)
    _explain_unknown_fields(made)
    registry.add("part", made)
    return made


@field_group
class Part:
    """Base of parts with work before training; by default, they need none."""

    def resolve(self, spec: EnvSpec) -> Self:
        """Return the part with values that depend on the environment."""
        return self

    def fit_problems(self, spec: EnvSpec) -> list[str]:
        """Explain why the part does not suit the environment, one line each."""
        return []

    def init(self, key: jax.Array, spec: EnvSpec) -> PyTree:
        """Return the part's initial state."""
        return ()


@dataclass_transform(kw_only_default=True, frozen_default=True)
def algorithm[T](cls: type[T]) -> type[T]:
    """Turn a class into an algorithm: a frozen, keyword-only dataclass and pytree, registered by lower-case name."""
    made: Any = _with_changes(cls)
    made.__post_init__ = _check_parts_and_hold_functions
    algorithm_class = cast("type[T]", struct.dataclass(made, kw_only=True))
    _check_relations(algorithm_class)
    _explain_unknown_fields(algorithm_class)
    registry.add("algorithm", algorithm_class)
    return algorithm_class


def _check_relations(cls: Any) -> None:
    """Raise a TypeError if a field that the class declares depends on a setting that the class does not have."""
    fields = cls.__dataclass_fields__
    for name in fields.keys() & vars(cls).get("__annotations__", {}).keys():
        for relation in ("only_with", "at_most", "less_than"):
            path = fields[name].metadata.get(relation) or ""
            for setting in re.findall(r"(?:^| or | and )(?:not )?(\w+)", path):
                if setting not in fields:
                    raise TypeError(f"{cls.__name__}.{name}: {relation}={path!r} names {setting!r}, which is no field")


def _explain_unknown_fields(cls: Any) -> None:
    """Make the constructor raise a ConfigError that lists the fields, instead of a bare TypeError."""
    original = cls.__init__

    @functools.wraps(original)
    def init(self, *arguments, **fields):
        if arguments:
            raise ConfigError(f"{cls.__name__} takes keyword arguments only, of the form learning_rate=1e-3")
        try:
            original(self, **fields)
        except TypeError:
            _check_names(type(self), fields)
            raise

    cls.__init__ = init


def _check_names(cls: type["DataclassInstance"], fields: Iterable[str]) -> None:
    """Raise a ConfigError if a class lacks one of these fields, which names its subclasses that have them."""
    known = [field.name for field in dataclasses.fields(cls)]
    kinds = {field.name: kind for field in dataclasses.fields(cls) if (kind := field.metadata.get("part"))}
    listed = known + [f"{name}.{field.name}" for name, kind in kinds.items() for field in dataclasses.fields(kind)]
    wrong = []
    for name in [name for name in fields if name not in known]:
        having = " or ".join(f"{sub.__name__} has it" for sub in cls.__subclasses__() if name in _own_fields(sub))
        wrong += unknown(f"field of {cls.__name__}", name, listed, having).problems
    if wrong:
        raise ConfigError(wrong)


def as_algorithm(algo: Algorithm | str) -> Algorithm:
    """Return `algo`, or create the algorithm of that name.

    Raises:
      ConfigError: `algo` is neither an algorithm nor the name of one.
    """
    if isinstance(algo, str):
        return make_algorithm(algo)
    if isinstance(algo, type):
        raise ConfigError(f"{algo.__name__} is a class; pass an instance: {algo.__name__}()")
    if isinstance(algo, Algorithm):
        return algo
    missing = [name for name in vars(Algorithm) if not name.startswith("_") and not hasattr(algo, name)]
    if hasattr(algo, "act") or hasattr(algo, "update"):
        raise ConfigError(
            f"{type(algo).__name__} lacks {', '.join(missing)}, which every algorithm needs (docs/new_algorithm.md)"
        )
    raise ConfigError(f"{algo!r:.80} is not an algorithm; pass an instance, such as jaxrl.PPO(), or its name")


def make_algorithm(name: str, **fields: Any) -> Algorithm:
    """Make an algorithm by name, with some of its fields set.

    Raises:
      ConfigError: the algorithm or a field is unknown; the message lists all unknown names and the closest known ones.
    """
    try:
        cls = ALGORITHMS[name.lower()]
    except KeyError:
        raise unknown("algorithm", name, ALGORITHMS, "run jaxrl algos for a list") from None
    return as_algorithm(replace(cls(), **fields))


def replace[T: "DataclassInstance"](algo: T, **fields: Any) -> T:
    """Return `algo` with some fields changed.

    A dotted name, such as "exploration_bonus.gamma", changes a field of the object in a field.

    Raises:
      ConfigError: a field is unknown, or a dotted name leads to a field without an object; the message lists all
        unknown fields and the closest known ones.
    """
    dotted = {path: fields.pop(path) for path in list(fields) if "." in path}
    _check_names(type(algo), fields)
    algo = dataclasses.replace(algo, **fields)
    for path, value in dotted.items():
        owner, name = owner_at(algo, path)
        algo = replace(algo, **{path.rpartition(".")[0]: dataclasses.replace(owner, **{name: value})})
    return algo


def owner_at(algo: "DataclassInstance", path: str) -> "tuple[DataclassInstance, str]":
    """Return the object that has the field at a dotted path, and the name of the field.

    Raises:
      ConfigError: there is no such field, or no object that has it.
    """
    first, dot, rest = path.partition(".")
    _check_names(type(algo), [first])
    if not dot:
        return algo, path
    if not dataclasses.is_dataclass(owner := getattr(algo, first)):
        raise ConfigError(f"{path}: {first}={owner!r:.80} has no fields; set it first")
    return owner_at(owner, rest)


@runtime_checkable
class Readable(Protocol):
    """Interface of networks and ensembles of critics that declare which inputs they read."""

    @property
    def requires(self) -> frozenset[str]: ...
    def init(self, key: jax.Array, spec: EnvSpec) -> tuple[Params, ModelState]: ...


def action_problems(name: str, spec: EnvSpec, *, box: bool = False, discrete: bool = False) -> list[str]:
    """Explain why the action space does not suit the algorithm `name`; empty if it does.

    Args:
      name: the algorithm's name, for the message.
      spec: the environment's spec.
      box: whether the algorithm supports bounded boxes of shape (n,).
      discrete: whether the algorithm supports `Discrete` spaces.
    """
    space = spec.action_space
    if discrete and isinstance(space, spaces.Discrete):
        return []
    if box and isinstance(space, spaces.Box) and len(space.shape) == 1:
        if space.bounded and (space.low < space.high).all():
            return []
    kinds = ["a bounded Box of actions, shape (n,)"] * box + ["a Discrete space of actions"] * discrete
    return [f"{name} needs {' or '.join(kinds)}, but {spec.name} has {space!r}; PPO supports all action spaces"]


def network_problems(
    label: str,
    network: Readable,
    spec: EnvSpec,
    known: frozenset[str],
    *,
    discrete: bool = False,
    dropout: bool = False,
) -> list[str]:
    """Explain why a network does not fit the environment, or which of its inputs are missing, one line each.

    Args:
      label: name of the field that holds the network, such as `DQN.network`.
      network: the network; it is not evaluated.
      spec: the environment's spec.
      known: the available fields of `NetworkInputs`: `SEQUENCE_INPUTS`, or `TRANSITION_INPUTS` for a replay of single
        transitions.
      discrete: whether the network's outputs are for discrete actions.
      dropout: whether the algorithm uses the network's dropout.
    """
    if discrete and (problems := action_problems(label.partition(".")[0], spec, discrete=True)):
        return problems
    if not dropout and isinstance(network, Critic) and network.dropout:
        what = "only the critics of SAC, CrossQ and GAIL support dropout"
        return [f"{label}: dropout={network.dropout} has no effect here, as {what}; set dropout=0.0"]
    missing = sorted(network.requires - known)
    if missing:
        return [
            f"{label} reads {' and '.join(missing)}, which a replay of single transitions does not store; set "
            "previous_action=False and previous_reward=False, or use DQN, R2D2, SAC, TD3 or DDPG with a recurrent "
            "network (core=GRU()), which learn from sequences"
        ]
    try:
        jax.eval_shape(lambda key: network.init(key, spec), jax.random.key(0))
    except ValueError as error:  # a ConfigError, or an error raised by a user's module
        return [f"{label}: {error}"]
    return []


def required(algo: Any, field: str) -> Any:
    """Return a field's value.

    Raises:
      ConfigError: the value is None: it depends on the environment, and `resolve` was not called.
    """
    if (value := getattr(algo, field)) is None:
        raise ConfigError(f"{type(algo).__name__}.{field} is not set; call algo.resolve(spec, num_envs) first")
    return value


def field_problems(algo: "DataclassInstance", name: str = "", usual: Any = None, owner: Any = None) -> list[str]:
    """Explain values of a wrong type, outside their limits or without effect, and conflicts between fields.

    Args:
      algo: an algorithm or a part.
      name: its name in the messages; by default, that of its class.
      usual: a part with the default values; None: those of the class.
      owner: the algorithm that has the part; None: `algo` is an algorithm.
    """
    problems, name = [], name or type(algo).__name__
    for field in dataclasses.fields(algo):
        value, label = getattr(algo, field.name), f"{name}.{field.name}"
        if has_effect(algo, field.name, owner):
            problems += _relation_problems(algo, owner, label, field, value)
        elif not _is_default(value, getattr(usual, field.name, field.default)):
            problems.append(f"{label}={value!r} has no effect unless {field.metadata['only_with']}")
        if field.metadata.get("part") is None:
            problems += _value_problems(label, field, value)
        elif value is not None:
            problems += field_problems(value, label, field.default, algo)
    groups = (vars(group).get("problems") for group in type(algo).__mro__)
    return problems + [problem for check in groups if check is not None for problem in check(algo)]


def _relation_problems(algo: Any, owner: Any, label: str, field: dataclasses.Field, value: Any) -> list[str]:
    """Explain which limiting setting a number exceeds; traced and scheduled numbers are not compared."""
    problems = []
    for relation, holds in (("at_most", operator.le), ("less_than", operator.lt)):
        path = field.metadata.get(relation)
        largest = _value_at(algo, owner, path) if path and isinstance(value, int | float) else None
        if isinstance(largest, int | float) and not holds(value, largest):
            problems.append(f"{label}={value:g} must be {relation.replace('_', ' ')} {path}={largest:g}")
    return problems


def _value_problems(label: str, field: dataclasses.Field, value: Any) -> list[str]:
    """Explain why the field cannot have this value, regardless of the other fields."""
    limits, traced = field.metadata.get("limits", {}), field.metadata.get("pytree_node", True)
    if "choices" in limits:
        allowed = ", ".join(repr(choice) for choice in limits["choices"])
        return [] if value in limits["choices"] else [f"{label}={value!r} is not one of {allowed}"]
    if isinstance(field.default, bool):
        return [] if isinstance(value, bool) else [f"{label}={value!r} must be True or False"]
    whole = _is_whole(field) and not traced and not (value is None and _takes_none(field))
    if whole and (not isinstance(value, int) or isinstance(value, bool)):
        return [f"{label}={value!r} must be a whole number"]
    if whole and abs(value) >= 2**31:  # programs count in int32
        return [f"{label}={value} must be less than 2^31"]
    if callable(field.default) and traced and not is_schedule(field.default):
        return optimizer_problems(label, value)
    if isinstance(value, StaticFunction):
        return [f"{label} is a function; to change a number, use a schedule, such as jaxrl.schedules.Linear"]
    if isinstance(field.default, Readable) and (isinstance(value, type) or not isinstance(value, Readable)):
        expected = type(field.default).__name__
        own = ", or your own module with from_linen, from_nnx or from_equinox (docs/own_network.md)"
        own = own if expected in ("ActorCritic", "QNetwork") else ""
        return [f"{label}={value!r:.80} is not a network; pass {expected}(...) of jaxrl.networks{own}"]
    if value is None and not _takes_none(field):
        return [f"{label}=None must be a number or a schedule"]
    return _limit_problems(label, value, limits) if limits or traced else []


def _is_whole(field: dataclasses.Field) -> bool:
    """Return whether a field is declared as `int` or `int | None`."""
    if isinstance(field.type, str):  # a string annotation, in a user's module
        return isinstance(field.default, int)
    of_tuple = typing.get_origin(field.type) is tuple
    return field.type is int or (int in typing.get_args(field.type) and not of_tuple)


def _takes_none(field: dataclasses.Field) -> bool:
    if field.default is None or isinstance(field.type, str):  # string annotations: a user's module
        return True
    return types.NoneType in typing.get_args(field.type)


def has_effect(algo: "DataclassInstance", name: str, owner: Any = None) -> bool:
    """Return whether the field `name` has an effect, given the settings that its `only_with` requires.

    Args:
      algo: an algorithm or a part.
      name: the name of one of its fields.
      owner: the algorithm that has the part; None: `algo` is an algorithm.
    """
    [field] = [field for field in dataclasses.fields(algo) if field.name == name]
    condition = field.metadata.get("only_with")
    if condition is None:
        return True
    return any(all(_holds(algo, owner, part) for part in group.split(" and ")) for group in condition.split(" or "))


def _holds(algo: "DataclassInstance", owner: Any, part: str) -> bool:
    """Return whether a condition holds, such as "clip_value", "not kl_penalty" or "network.head=quantilevalues"."""
    path, equals, expected = part.removeprefix("not ").partition("=")
    value = _value_at(algo, owner, path)
    if not equals:
        return bool(value) != part.startswith("not ")
    return value == expected or (registry.name_of(type(value)) or "").partition(":")[2] == expected


def _value_at(algo: Any, owner: Any, path: str) -> Any:
    """Return the setting of a part, or else of its owner; None if it does not exist, as in a user's network."""
    names = path.split(".")
    start = algo if hasattr(algo, names[0]) else owner
    return functools.reduce(lambda value, attribute: getattr(value, attribute, None), names, start)


def _is_default(value, default):
    """Return whether a field has its default value; True for traced and swept numbers."""
    if jax.tree.structure(value) != jax.tree.structure(default):
        return False
    for one, other in zip(jax.tree.leaves(value), jax.tree.leaves(default), strict=True):
        if isinstance(one, str | bool):
            if one != other:
                return False
        elif not (isinstance(one, jax.core.Tracer) or jnp.ndim(one)):
            if problem(one) or np.float32(one) != np.float32(other):
                return False
    return True


def _limit_problems(label: str, value: Any, limits: dict[str, float]) -> list[str]:
    leaves = jax.tree.leaves(value)
    if problems := schedule_problems(label, value):
        return problems
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return []  # checked before the numbers were traced
    several = value is not None and not is_schedule(value) and not jax.tree_util.all_leaves([value])
    if several or any(isinstance(leaf, (bool, str)) for leaf in leaves):
        return [f"{label}={value!r} must be a number or a schedule"]
    named = jax.tree_util.tree_leaves_with_path(value)
    for path, leaf in named:
        part = jax.tree_util.keystr(path).lstrip(".")
        if part.startswith(("until", "boundaries")):  # a schedule's fractions of the run, not values of the field
            continue
        what = problem(leaf, limits)
        # A schedule may end at an exclusive limit: a learning rate may decay to 0.
        if what and not (part and "above" in limits and leaf == limits["above"]):
            return [f"{label}={value!r:.200} {what}"]
    return []
