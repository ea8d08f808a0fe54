"""Which topology a run has, and the settings that do not go with it."""

import dataclasses

from jaxrl.core.resources import Resources
from jaxrl.core.resources import problems as core_problems
from jaxrl.core.types import Environment, HostRecipe, only_instance
from jaxrl.parallel.anakin import Anakin
from jaxrl.parallel.offline import Offline
from jaxrl.parallel.sebulba.topology import Sebulba

Topology = Anakin | Sebulba | Offline


def default_topology(env: Environment | HostRecipe, num_envs: int | None = None) -> Topology:
    """`Anakin` for JAX environments, `Sebulba` for those on the host."""
    topology = Anakin() if isinstance(env, Environment) else Sebulba()
    return topology if num_envs is None else dataclasses.replace(topology, num_envs=num_envs)


def topology_problems(topology, num_envs, offline, record):
    """Return a line for each setting that does not go with the topology, or without an environment."""
    problems = []
    if topology is not None and num_envs is not None:
        problems.append(f"num_envs={num_envs} and topology={topology}: set num_envs in the topology")
    if offline and (num_envs is not None or not isinstance(topology, Offline | None)):
        problems.append("without an env nothing acts: num_envs has no meaning, and the topology is Offline()")
    if not offline and isinstance(topology, Offline):
        problems.append("topology=Offline() learns from a dataset alone; leave env out and pass eval_env")
    if offline and record is not None:
        problems.append("record= without an env: nothing acts, so there is nothing to record")
    return problems


def instance_problems(env, played, topology, video_every):
    """Return a line for each problem with environments of which there is one instance and no more."""
    trained, evaluated = (None if one is None else only_instance(one) for one in (env, played))
    problems = []
    if trained is not None:
        fix = f"pass the class {type(trained.unwrapped).__name__}, or a function that makes one"
        one = f"{env.name} is one environment, whose spec does not say how to make another"
        if (num_envs := topology.num_envs or 0) > 1:
            problems.append(f"num_envs={num_envs}: {one}; {fix}: lambda: {type(trained.unwrapped).__name__}(...)")
        if getattr(topology, "remote", None) is not None:
            problems.append(f"remote: {one} in another process; {fix}")
        if evaluated is not None and evaluated.unwrapped is trained.unwrapped:
            problems.append(f"{one}, and evaluation needs one of its own; pass eval_env=, or {fix.partition(' ')[2]}")
    if evaluated is not None and video_every is not None:
        problems.append(
            f"video_every={video_every}: {played.name} is one environment, and videos need one of their own"
        )
    return problems


def resource_problems(resources, topology, env, async_evaluation):
    """Return a line for each problem with `resources` in this run."""
    if resources is None:
        return []
    if not isinstance(resources, Resources):
        return [f"resources={resources!r:.80} are none; pass jaxrl.Resources(...)"]
    absent = {} if async_evaluation else {"evaluator": "evaluations are the learner's, without async_evaluation=True"}
    on_host, workers = env is not None and not isinstance(env, Environment), getattr(env, "workers", None)
    remote = topology.remote if isinstance(topology, Sebulba) else None
    threads = topology.threads * topology.groups if isinstance(topology, Sebulba) else 1
    if not on_host:
        absent |= dict.fromkeys(("actors", "environments", "worker_memory"), "the run has none, in one program")
    elif remote is not None:
        absent |= dict.fromkeys(("environments", "worker_memory"), "Ray places its actors, by remote.cpus")
    elif not workers:
        absent["worker_memory"] = f"{env.name} has no worker processes; make it with workers=N"
        if workers == 0:
            absent["environments"] = "the actor threads step these; set actors, or make it with workers=N"
    count = (workers or 0) * threads if on_host and remote is None else 0
    return core_problems(resources, absent, count)
