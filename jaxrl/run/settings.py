"""Settings of a run: the arguments of `jaxrl.train` in one object, which checks and completes them."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl import envs
from jaxrl.algos.base import Readable, as_algorithm, field_problems
from jaxrl.core import files, limits
from jaxrl.core.config import encode
from jaxrl.core.errors import ConfigError
from jaxrl.core.host_types import only_instance
from jaxrl.core.limits import checked_seed, number_problems, seed_problems
from jaxrl.core.matching import space_problems
from jaxrl.core.resources import Resources
from jaxrl.core.resources import problems as resources_problems
from jaxrl.core.types import Algorithm, Environment, EnvSpec, NativeRecipe, env_spec, num_agents
from jaxrl.data.dataset import load_dataset
from jaxrl.envs.configs import to_config
from jaxrl.networks.network_summary import summary
from jaxrl.parallel.experience import dataset_problems, has_separate_dataset
from jaxrl.parallel.multihost.place import evaluator_problems, is_evaluator
from jaxrl.parallel.topology import choose
from jaxrl.run.callbacks import run_callbacks
from jaxrl.run.loggers import Logger
from jaxrl.run.policies.evaluation import EPISODES, default_episodes, episodes_problems
from jaxrl.run.recording.recorder import Record

_DATASET_FRACTION = 0.5  # default fraction of every batch
# Names of the maximum episode length among the parameters of environments and `TimeLimit`.
_TIME_LIMITS = ("max_steps_in_episode", "time_limit", "episode_length", "max_steps", "max_timesteps")
_DEAR = 10  # report evaluations that may take more than this multiple of the training steps


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunSettings:
    """The arguments of `jaxrl.train`, some of which `make_train`, `sweep`, `launch` and `tune` share.

    As passed, `algo`, `env`, `dataset` and `record` may be names, and None means a default. `prepared` resolves the
    names and chooses the topology; `resolved` sets the defaults that depend on the environment.
    """

    algo: Any
    env: Any = None
    total_steps: int
    dataset: Any = None
    dataset_fraction: Any = None
    init_from: Any = None
    seed: int = 0
    topology: Any = None
    num_envs: Any = None
    run_dir: Any = None
    overwrite: bool = False
    log_every: int | None = None
    evaluate_every: int | None = None
    evaluation_episodes: Any = None
    eval_env: Any = None
    explore_in_evaluation: bool = False
    async_evaluation: bool = False
    target_return: float | None = None
    callbacks: Any = ()
    callback_every: int | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    save_replay: bool = True
    record: Any = None
    video_every: int | None = None
    loggers: Sequence[Logger] = ()
    resources: Resources | None = None
    deterministic: bool = False
    progress: bool = True
    verbose: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "RunSettings":
        """Create settings from a function's arguments; arguments that are not settings are ignored."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in arguments.items() if name in names})

    def replace(self, **changes: Any) -> "RunSettings":
        """Return the settings with changed fields."""
        return dataclasses.replace(self, **changes)

    @property
    def acting_env(self) -> Any:
        """The environment that a prepared run acts in, or None if it learns only from a dataset."""
        return self.env if self.topology.problems(None) else None

    @property
    def logging(self) -> dict[str, Any]:
        """The entry "logging" of `config.json`: settings that may change when the run is resumed."""
        found: dict[str, Any] = {name: getattr(self, name) for name in ("evaluate_every", "evaluation_episodes")}
        found |= {name: True for name in ("explore_in_evaluation", "deterministic") if getattr(self, name)}
        return found | ({} if self.save_replay else {"save_replay": False})

    def config(self, **parts: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the contents of `config.json` for resolved settings.

        Args:
          **parts: additional entries, `dataset` and `parent`; entries that are None are left out.
        """
        config = {
            "algorithm": encode(self.algo),
            "environment": to_config(self.env),
            "topology": encode(self.topology),
            "total_steps": self.total_steps,
            "seed": self.seed,
            "logging": self.logging,
        }
        if isinstance(self.env, NativeRecipe) and self.env.native is not None:
            config["native"] = encode(self.env.native)
        return config | {name: dict(part) for name, part in parts.items() if part is not None}

    def prepared(self) -> "RunSettings":
        """Return the settings with names resolved to objects and a topology chosen.

        For offline training, `env` is the environment that the data comes from.

        Raises:
          ConfigError: settings are invalid or incompatible; the message lists all problems.
        """
        algo = as_algorithm(self.algo)
        problems = field_problems(algo)
        problems += limits.training_problems(**{name: getattr(self, name) for name in limits.LEAST})
        run_dir = None if self.run_dir is None else files.expand(self.run_dir)
        try:
            dataset = load_dataset(self.dataset) if isinstance(self.dataset, str) else self.dataset
            env, eval_env = (None if one is None else envs.as_environment(one) for one in (self.env, self.eval_env))
        except ConfigError as error:
            raise ConfigError([*error.problems, *problems]) from error.__cause__
        offline, has_dataset = env is None, dataset is not None
        about = eval_env if env is None else env
        if about is None or (offline and not has_dataset):
            raise ConfigError(
                ("dataset= needs an environment; pass" if has_dataset else "no environment; pass env, or dataset= and")
                + " eval_env=, the environment that the data comes from"
            )
        fraction, fraction_problems = _resolved_fraction(self.dataset_fraction, algo, has_dataset, offline)
        problems += fraction_problems
        if self.video_every is not None and run_dir is None:
            problems.append(f"video_every={self.video_every} needs run_dir=, to which the videos are written")
        problems += evaluator_problems(run_dir) + seed_problems("seed", self.seed)
        if isinstance(self.evaluation_episodes, int) and self.evaluation_episodes > 0:
            problems += episodes_problems("evaluation_episodes", self.evaluation_episodes)
        problems += self._kind_problems()
        env = envs.prepared(about)
        topology, topology_problems = choose(self.topology, None if offline else env, self.num_envs)
        problems += topology_problems
        if offline and self.record is not None:
            problems.append("record= needs an env, because only episodes of training are recorded; leave record out")
        eval_env = env if eval_env is None or offline else envs.prepared(eval_env)
        trained = f"the training environment {env.name} has"
        problems += [f"eval_env: {line}" for line in space_problems(eval_env, env, trained)]
        if not is_evaluator():  # an evaluator process uses other cores
            acting = None if offline else env
            problems += _resource_problems(self.resources, topology, acting, self.async_evaluation)
        problems += dataset_problems(algo, env_spec(env), fraction, dataset=has_dataset)
        if problems:
            raise ConfigError(problems)
        record = Record(self.record) if isinstance(self.record, str | os.PathLike) else self.record
        changes = {"algo": algo, "env": env, "eval_env": eval_env, "dataset": dataset, "dataset_fraction": fraction}
        changes |= {"topology": topology, "seed": checked_seed("seed", self.seed), "run_dir": run_dir, "record": record}
        return self.replace(**changes)

    def resolved(self) -> "RunSettings":
        """Return the prepared settings, with the defaults that depend on the environment filled in.

        Raises:
          ConfigError: settings are incompatible; the message lists all problems.
        """
        topology = self.topology.resolve(self.algo, num_agents(self.env))
        algo = self.algo.resolve(env_spec(self.env), topology.batch_envs or 0)
        problems = _instance_problems(self.acting_env, self.eval_env, topology, self.video_every)
        if problems := problems + _recording_problems(self.record, topology):
            raise ConfigError(problems)
        episodes = self.evaluation_episodes
        episodes = default_episodes(self.eval_env) if episodes is None else episodes
        return self.replace(algo=algo, topology=topology, evaluation_episodes=episodes)

    def _kind_problems(self):
        """Return one error message for each setting whose type `train` does not accept."""
        problems = []
        if self.target_return is not None:
            problems += number_problems("target_return", self.target_return)
        try:
            run_callbacks(self.callbacks, self.target_return)
        except ConfigError as error:
            problems += error.problems
        if not isinstance(self.loggers, Sequence) or not all(isinstance(one, Logger) for one in self.loggers):
            problems.append(f"loggers={self.loggers!r:.80} must be a list of loggers, which have `write` and `close`")
        return problems


def _resolved_fraction(fraction, algo, dataset, offline):
    """Return the dataset's fraction of every replay batch, and a list of error messages about it."""
    separate, problems = has_separate_dataset(algo), []
    if fraction is not None and (offline or not dataset):
        lacking = "environment" if dataset else "dataset"
        problems = [f"dataset_fraction={fraction} needs a dataset and an environment; pass the {lacking} too"]
    elif fraction is not None and separate:
        problems = [f"dataset_fraction={fraction} has no effect, because {type(algo).__name__} sets it; leave it out"]
    if not dataset or (separate and not offline):  # the dataset has a separate source
        return 0.0, problems
    return 1.0 if offline else _DATASET_FRACTION if fraction is None else fraction, problems


def _instance_problems(env, played, topology, video_every):
    """Return error messages about environments that were passed as single instances."""
    trained, evaluated = (None if one is None else only_instance(one) for one in (env, played))
    problems = []
    if trained is not None:
        fix = f"pass the class {type(trained.unwrapped).__name__}, or a function that makes one"
        one = f"{env.name} is a single environment, whose spec does not allow creating another"
        if (num_envs := topology.num_envs or 0) > 1:
            problems.append(f"num_envs={num_envs}: {one}; {fix}: lambda: {type(trained.unwrapped).__name__}(...)")
        if not topology.in_process:
            problems.append(f"remote: {one} in another process; {fix}")
        if evaluated is not None and evaluated.unwrapped is trained.unwrapped:
            problems.append(f"{one}, but evaluation needs another one; pass eval_env=, or {fix.partition(' ')[2]}")
    if evaluated is not None and video_every is not None:
        problems.append(
            f"video_every={video_every}: {played.name} is a single environment, but videos need another; pass a class"
        )
    return problems


def _recording_problems(record, topology):
    """Return error messages about recording the episodes of a run."""
    batch = getattr(topology, "learner_batch", None)
    if record is None or batch is None:
        return []
    why = f"a batch has the rollouts that are full first, of {batch} of the {topology.num_envs} environments"
    return [f"record: {why}, so an episode would have gaps; use learner_batch=None, or do not record"]


def _resource_problems(resources, topology, env, async_evaluation):
    """Return error messages about `resources` in this run."""
    if resources is None:
        return []
    if not isinstance(resources, Resources):
        return [f"resources={resources!r:.80} must be a jaxrl.Resources(...)"]
    absent = {} if async_evaluation else {"evaluator": "the learner evaluates, unless async_evaluation=True"}
    return resources_problems(resources, absent | topology.absent_resources(env), topology.worker_processes(env))


# --- notes for the user --------------------------------------------------------------------------------------------


def default_notes(prepared: RunSettings, resolved: RunSettings) -> list[str]:
    """Return one line for each default that depends on the environment and differs from the usual one."""
    episodes = resolved.evaluation_episodes
    chosen = prepared.evaluation_episodes is None and episodes != EPISODES
    notes = [f"evaluation_episodes: {episodes}"] if chosen else []
    notes += _evaluation_cost(resolved) + resolved_defaults(prepared.algo, resolved.algo)
    return notes + resolved_defaults(prepared.topology, resolved.topology, "topology.")


def _evaluation_cost(settings):
    """Return one line if evaluations may take many times the steps of training; otherwise, an empty list."""
    known = envs.parameters(settings.eval_env) if isinstance(settings.eval_env, Environment) else {}
    limit = min((int(np.max(known[name])) for name in _TIME_LIMITS if name in known), default=0)
    every, total = settings.evaluate_every, settings.total_steps
    count = -(-total // max(total // 10 if every is None else every or total, 1))
    steps = count * settings.evaluation_episodes * limit
    what = f"evaluations: up to {steps:,} steps, {steps // total} times as many as in training"
    return [f"{what} (evaluate_every, evaluation_episodes)"] if steps > _DEAR * total else []


def resolved_defaults(unresolved: Any, resolved: Any, prefix: str = "") -> list[str]:
    """Return one line, such as "epochs: 4", for each field except networks that was None and is now resolved."""
    lines = []
    for field in dataclasses.fields(resolved):
        before, after = getattr(unresolved, field.name), getattr(resolved, field.name)
        if before is None and after is not None:
            lines.append(f"{prefix}{field.name}: {after!r}")
        elif isinstance(after, Readable):
            continue  # described by `network_lines`
        elif dataclasses.is_dataclass(after) and type(before) is type(after):
            lines += resolved_defaults(before, after, f"{prefix}{field.name}.")
    return lines


def network_lines(algo: Algorithm, spec: EnvSpec) -> list[str]:
    """Return one line for each network of a resolved algorithm: its layers and its number of parameters."""
    networks = {field.name: getattr(algo, field.name) for field in dataclasses.fields(algo)}
    return [f"{name}: {summary(one, spec)}" for name, one in networks.items() if isinstance(one, Readable)]
