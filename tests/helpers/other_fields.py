"""Other values of an algorithm's fields, and which of its numbers a program does not depend on."""

import dataclasses

import jax
from jax.interpreters import partial_eval

from jaxrl.algos.base import has_effect, owner_at, parts, replace
from jaxrl.algos.fields import PrioritizedReplay
from jaxrl.algos.kl_penalty import KLPenalty
from jaxrl.algos.on_policy import WholeEpisodes
from jaxrl.algos.optimizers import Adam, RMSProp
from jaxrl.algos.q_learning import Ladder
from jaxrl.algos.resets import Resets
from jaxrl.algos.reward_scale import RewardScale
from jaxrl.core.sources import FrameStack, Lifo, View
from jaxrl.networks import MLP, Actor, Critic

OPTIONAL = ("policy_learning_rate", "lagrange_threshold", "discriminator_learning_rate")
PARTS = ("kl_penalty", "ladder", "prioritized", "resets", "reward_scale", "whole_episodes")
OTHER = {
    "kl_penalty": KLPenalty(),
    "ladder": Ladder(),
    "prioritized": PrioritizedReplay(),
    "initial": "td_error",
    "episodes": 4,
    "max_length": 500,
    "policy_loss": lambda log_ratio, advantage, clip: -log_ratio * advantage,
    "reduction": "mean",
    "reward_clipping": "abs_one",
    "rollout_length": 16,
    "epochs": 3,
    "minibatches": 2,
    "target_period": 7,
    "frame_stack": FrameStack(2),
    "n_step": 3,
    "capacity": 512,
    "min_size": 64,
    "batch_size": 8,
    "replay_ratio": 0.5,
    "samples_per_insert": 24,
    "storage": "flashbax",
    "whole_episodes": WholeEpisodes(episodes=8),
    "sampler": Lifo(),
    "max_times_sampled": 3,
    "view": View(2, Lifo()),
    "random_persistence": 0.5,
    "length": 6,
    "burn_in": 4,
    "time_reduction": "sum",
    "correlation": 0.5,
    "random_correlation": 0.6,
    "hold": 4,
    "at": (2, 5),
    "resets": Resets(at=(2, 5)),
    "reward_scale": RewardScale(),
    "target": "mean",
    "policy": "mean",
    "sampled": 1,
    "policy_delay": 3,
    "samples": 5,
    "weighting": "indicator",
    "baseline": "max",
    "reward": "gail",
}


def static_fields(algo):
    """Return the paths of the fields that are part of the program, and of the parts' fields that are."""
    own = {field.name for field in dataclasses.fields(algo) if not field.metadata.get("pytree_node", True)}
    return own | {f"{name}.{path}" for name, part in parts(algo).items() for path in static_fields(part)}


def with_another(algo, path):
    """Return the algorithm with another value of the field at a dotted path."""
    owner, name = owner_at(algo, path)
    value = getattr(owner, name)
    if isinstance(value, bool):
        other = not value
    elif isinstance(value, Actor | Critic):
        other = dataclasses.replace(value, widths=(5,))
    elif name == "network":
        other = type(value)(MLP((5,)))
    elif name == "optimizer":
        other = RMSProp() if isinstance(value, Adam) else Adam()
    elif name in OPTIONAL:
        other = 1e-3 if value is None else None
    else:
        other = None if name in PARTS and value is not None else OTHER[name]
    assert other != value, name
    return replace(algo, **{path: other})


def assert_numbers_count(algo, program, elsewhere):
    """Assert that a traced program, whose inputs begin with the algorithm's numbers, depends on each with an effect.

    A field that says of itself that it has none must not be used.

    Args:
      elsewhere: names of fields that have their effect in another program.
    """
    used = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))[1]
    leaves = jax.tree_util.tree_leaves_with_path(algo)
    paths = [path for (path, _), hit in zip(leaves, used[: len(leaves)], strict=True) if not hit]
    within = parts(algo)
    # A schedule has several leaves.
    unused = {".".join(key.name for key in path[: 1 + (path[0].name in within)]) for path in paths}
    idle = set()
    for prefix, owner in {"": algo, **{f"{name}.": part for name, part in within.items()}}.items():
        names = {field.name for field in dataclasses.fields(owner)} - static_fields(owner) - within.keys()
        names = {name for name in names if not has_effect(owner, name, algo) and getattr(owner, name) is not None}
        idle |= {prefix + name for name in names}
    assert unused - elsewhere == idle - elsewhere
