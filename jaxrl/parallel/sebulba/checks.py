"""Checks of `Sebulba` settings before an environment is built; every function returns lines of text."""

from typing import TYPE_CHECKING

import jax

from jaxrl.core.planning import Planner
from jaxrl.core.types import Algorithm, Episodes, HostRecipe, Replay
from jaxrl.parallel.sebulba import ready_collector

if TYPE_CHECKING:
    from jaxrl.parallel.sebulba.topology import Sebulba


def problems(topology: "Sebulba", num_envs: int, algo: Algorithm, env: HostRecipe) -> list[str]:
    """Return all problems that can be found without the environment's spaces.

    Args:
      topology: the resolved topology.
      num_envs: its number of environments.
      algo, env: the algorithm and the environment.
    """
    return [
        *_out_of_range(topology),
        *_not_together(topology),
        *_not_dividing(topology, num_envs, env),
        *_not_in_any_order(topology, num_envs, algo),
        *_without_model(algo, env),
    ]


def _without_model(algo, env):
    if not isinstance(algo, Planner):
        return []
    name = type(algo).__name__
    return [f"{name} plans in the environment itself, and {env.name} is on the host; use one in JAX"]


def _out_of_range(topology):
    found = [
        f"{name}={value} must be at least 1"
        for name in ("actors", "groups", "actor_devices", "queue", "parameter_period")
        if (value := getattr(topology, name)) < 1
    ]
    if topology.groups > 2:
        found.append(f"groups={topology.groups} must be 1 or 2; use more actors instead")
    if topology.lag not in (0, 1) or (topology.lag and not topology.lockstep):
        found.append(f"lag={topology.lag} must be 0, or 1 with lockstep=True")
    platform = topology.actor_platform
    try:
        jax.local_devices(backend=platform)
    except (RuntimeError, AttributeError):
        found.append(
            f"actor_platform={platform!r} must be 'cpu', None, or a platform that JAX has started here; if "
            "JAX_PLATFORMS is set, it must name both, as cuda,cpu does"
        )
    if topology.step_timeout <= 0:
        found.append(f"step_timeout={topology.step_timeout} must be more than 0 seconds")
    return found


def _not_together(topology):
    """Check for settings that exclude each other."""
    processes, actors, groups, ready = jax.process_count(), topology.actors, topology.groups, topology.ready
    lockstep, remote = topology.lockstep and processes == 1, topology.remote is not None
    remote_policy = remote and topology.remote.policy
    pairs = [
        *(
            (
                processes > 1 and value is not None,
                f"{name}={value} with {processes} processes, which run in lockstep; use {name}=None, or one process",
            )
            for name in ("learner_batch", "ready", "error_buffer")
            for value in [getattr(topology, name)]
        ),
        (
            topology.error_buffer is not None and lockstep,
            f"error_buffer={topology.error_buffer} with lockstep: the learner is then in step with its actors; set "
            "lockstep=False and lag=None, or error_buffer=None",
        ),
        (
            processes > 1 and not topology.lockstep,
            f"{processes} processes need lockstep=True (and lag=1, to act while the learner learns)",
        ),
        (
            remote_policy and actors * groups > 1,
            f"actors={actors}, groups={groups}: both must be 1 with remote.policy=True",
        ),
        (
            topology.actor_platform is not None and remote_policy,
            f"actor_platform={topology.actor_platform!r} with remote.policy=True: Ray actors act themselves; use "
            "actor_platform=None",
        ),
        (
            ready is not None and groups == 2,
            f"ready={ready} with groups=2: some environments step already while others act; use groups=1",
        ),
        (
            ready is not None and lockstep,
            f"ready={ready} with lockstep=True: who is ready first differs by run; use ready=None",
        ),
        (
            ready is not None and remote,
            f"ready={ready} with remote: Ray actors step all their environments at once; use ready=None",
        ),
        (
            topology.learner_batch is not None and lockstep,
            f"learner_batch={topology.learner_batch} with lockstep=True: whose rollouts are full first differs by run; "
            "use lockstep=None and lag=None, in one process",
        ),
    ]
    return [why for both, why in pairs if both]


def _not_dividing(topology, num_envs, env):
    """Check that the environments divide into groups, and each group into its parts."""
    processes, groups = jax.process_count(), topology.all_groups
    if num_envs % groups or num_envs < groups:
        below, above = num_envs // groups * groups, -(-num_envs // groups) * groups
        return [
            f"num_envs={num_envs} does not divide over {groups} groups "
            f"(actors * groups{' * processes' if processes > 1 else ''}); use "
            + (f"{below} or {above}" if below else f"{above}")
        ]
    group, ready, found = num_envs // groups, topology.ready, []
    if topology.remote is not None:
        found += topology.remote.problems(groups // processes, group)
    if ready is not None:
        found += ready_collector.problems(ready, group, env)
    batch = topology.learner_batch
    if batch is not None and (batch % group or not 0 < batch <= num_envs):
        found.append(
            f"learner_batch={batch} must be a multiple of {group}, the environments of a group, and at most "
            f"num_envs={num_envs}; use {min(max(batch // group, 1) * group, num_envs)}, or other num_envs"
        )
    return found


def _not_in_any_order(topology, num_envs, algo):
    """Check the settings for learning from rollouts in the order in which they are full."""
    batch, found = topology.learner_batch, []
    if batch is None:
        of_no_batch = (
            f"max_lag={topology.max_lag} is for batches of learner_batch environments; set it, or max_lag=None"
        )
        return [] if topology.max_lag is None else [of_no_batch]
    if storing := [name for name, source in algo.experience.items() if isinstance(source, Replay | Episodes)]:
        found.append(
            f"learner_batch={batch}: {type(algo).__name__}'s source {storing[0]!r} stores a rollout of every "
            "environment at a time; use learner_batch=None"
        )
    at_hand, period = topology.batches_at_hand(num_envs), topology.parameter_period
    if topology.max_lag < at_hand + period:
        what = f"the {at_hand} batches that all groups' rollouts make"
        what += f" by parameter_period={period}" if period > 1 else ""
        found.append(
            f"max_lag={topology.max_lag} must be more than {what}; use at least {at_hand + period}, or max_lag=None"
        )
    return found
