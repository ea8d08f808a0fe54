"""Checks of run settings that do not fit the topology."""

from jaxrl.core.host_types import only_instance
from jaxrl.core.resources import Resources
from jaxrl.core.resources import problems as core_problems


def instance_problems(env, played, topology, video_every):
    """Return one line for each problem with environments that exist as a single instance."""
    trained, evaluated = (None if one is None else only_instance(one) for one in (env, played))
    problems = []
    if trained is not None:
        fix = f"pass the class {type(trained.unwrapped).__name__}, or a function that makes one"
        one = f"{env.name} is one environment, whose spec does not say how to make another"
        if (num_envs := topology.num_envs or 0) > 1:
            problems.append(f"num_envs={num_envs}: {one}; {fix}: lambda: {type(trained.unwrapped).__name__}(...)")
        if not topology.in_process:
            problems.append(f"remote: {one} in another process; {fix}")
        if evaluated is not None and evaluated.unwrapped is trained.unwrapped:
            problems.append(f"{one}, and evaluation needs one of its own; pass eval_env=, or {fix.partition(' ')[2]}")
    if evaluated is not None and video_every is not None:
        problems.append(
            f"video_every={video_every}: {played.name} is one environment, and videos need one of their own"
        )
    return problems


def recording_problems(record, topology):
    """Return one line for each problem with recording the episodes of a run."""
    if record is None or topology.batch_envs == topology.num_envs:
        return []
    some = f"{topology.batch_envs} of the {topology.num_envs} environments"
    why = f"every batch holds the rollouts of {some}, and an episode's would not be one after another"
    return [f"record: {why}; use learner_batch=None, or do not record"]


def resource_problems(resources, topology, env, async_evaluation):
    """Return one line for each problem with `resources` in this run."""
    if resources is None:
        return []
    if not isinstance(resources, Resources):
        return [f"resources={resources!r:.80} are none; pass jaxrl.Resources(...)"]
    absent = {} if async_evaluation else {"evaluator": "evaluations are the learner's, without async_evaluation=True"}
    return core_problems(resources, absent | topology.absent_resources(env), topology.worker_processes(env))
