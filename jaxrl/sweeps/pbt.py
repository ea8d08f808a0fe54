"""`jaxrl.pbt`: population-based training (Jaderberg et al., 2017, arXiv:1711.09846) in one program."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrl.algos.base import as_algorithm, replace
from jaxrl.core import arguments, interrupts, keys, limits
from jaxrl.core.errors import ConfigError
from jaxrl.core.schedules import PiecewiseConstant
from jaxrl.core.types import Algorithm, Environment
from jaxrl.parallel.anakin import Anakin
from jaxrl.plots.lineage import Lineage, plot_lineage
from jaxrl.run.loggers import write_csv
from jaxrl.run.settings import RunSettings
from jaxrl.sweeps.distributions import COUNTS
from jaxrl.sweeps.make_train import CompiledRun, bind_run
from jaxrl.sweeps.population import Population, Score, Selection
from jaxrl.sweeps.results import SweepResult, leave
from jaxrl.sweeps.search_spaces import Range, ends, search_space
from jaxrl.sweeps.sweep_loop import gathered, identity_of, opened_session, settings_problems, train_many
from jaxrl.sweeps.vectorized import VectorizedRuns, devices_and_mapping

if TYPE_CHECKING:
    from jaxrl.plots.chart import Chart

_INTERVALS = 20  # the default number of intervals of a run


@dataclasses.dataclass(kw_only=True, repr=False)
class PBTResult(SweepResult):
    """The result of population-based training, with the members as the configurations of a sweep with one seed.

    `configurations` contains the final hyperparameters of each member, `metrics` the curves of each member, which
    continue after it copies another one, and `returns` the final evaluation, which determines the winner.

    Attributes:
      lineage: parents, scores and hyperparameters of all members in every interval.
      fresh_returns: returns of the winner in fresh episodes, shape (episodes,); NaN for unfinished episodes. The
        episodes were used neither for training nor to choose the winner, so unlike the best of many evaluations, their
        returns are not biased by the choice.
      member_seeds: the seed of each member's run until the member copies another one.
    """

    _MEMBER = "member {}"

    lineage: Lineage
    fresh_returns: np.ndarray
    member_seeds: list[int]

    _kind = "a population"

    def __repr__(self) -> str:
        points, members = self.lineage.scores.shape
        copies = int(np.sum(self.lineage.parents != np.arange(members)))
        found = f"{members} members, {int(self.steps.max()):,} steps each, {copies} copies in {points - 1} rounds"
        return f"PBTResult({found}; winner: {self.lineage.winner}, {self.fresh_score:.4g} in fresh episodes)"

    @property
    def fresh_score(self) -> float:
        """The winner's mean return in fresh episodes; NaN if none ended."""
        finished = self.fresh_returns[~np.isnan(self.fresh_returns)]
        return float(finished.mean()) if finished.size else float("nan")

    @property
    def schedules(self) -> dict[str, PiecewiseConstant]:
        """The hyperparameters of the winner's lineage as schedules, for a later run.

        `jaxrl.make_algorithm("ppo", **result.schedules)` makes an algorithm with them. If a hyperparameter is itself a
        schedule, its value in the middle of each interval is used.
        """
        return {name: self.lineage.schedule(name) for name in self.lineage.hyperparameters}

    def plot(self, path: str | Path | None = None, *, metric: str | None = None) -> "Chart":
        """Plot scores and hyperparameters over the steps, with the copies and the lineage of the winner.

        Args:
          path: image file to write, or None; its suffix sets the format.
          metric: plot the curves of this metric of all members instead; one of `metrics`.

        Raises:
          ConfigError: the metric does not exist, or the format is not supported.
        """
        if metric is not None:
            return super().plot(path, metric=metric)
        return plot_lineage(self.lineage, path, title=self.records()[0].title)

    def _draw(self, path: Path) -> dict[str, Any]:
        self.plot(path / "lineage.png")
        write_csv(path / "lineage.csv", self.lineage.table())
        fresh = {"return_mean": self.fresh_score, "episodes": int(np.sum(~np.isnan(self.fresh_returns)))}
        return {"lineage": self.lineage.to_json(), "fresh": fresh, "member_seeds": self.member_seeds}

    def _rows(self) -> list[dict[str, Any]]:
        """Return one row per member, sorted from best to worst."""
        copies = np.sum(self.lineage.parents != np.arange(len(self.configurations)), axis=0)
        return [
            {"member": int(member), **self._settings(int(member)), "score": float(self.scores[member, 0])}
            | {"copies": int(copies[member]), "failed": bool(self.failed[member, 0])}
            for member in np.argsort(-np.nan_to_num(self.scores[:, 0], nan=-np.inf), kind="stable")
        ]


@interrupts.interruptible
@arguments.whole_arguments
def pbt(
    algo: Algorithm | str,
    env: Environment | str,
    *,
    total_steps: int,
    population: int = 16,
    exploit_every: int | None = None,
    score: Score = "training",
    fraction: float = 0.2,
    factor: float = 1.25,
    resample: float = 0.25,
    exploit_from: float = 0.25,
    copy_replay: bool = False,
    seed: int = 0,
    num_envs: int | None = None,
    topology: Anakin | None = None,
    devices: int | None = None,
    mapping: str | None = None,
    evaluation_episodes: int = 128,
    explore_in_evaluation: bool = False,
    run_dir: str | Path | None = None,
    checkpoint_every: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **space: Any,
) -> PBTResult:
    """Train a population in one program, in which the worst members copy the best ones and vary their hyperparameters.

    This is population-based training (Jaderberg et al., 2017, arXiv:1711.09846) with truncation selection: every
    `exploit_every` steps, each of the worst members copies the learner (parameters, optimizer, normalization) of a
    randomly chosen member of the best. It continues in the same environments as before, with hyperparameters that are
    perturbed or sampled again. Settings thus become schedules within a single training run.

    Until it copies another member, each member equals the run of `jaxrl.train` with its seed and settings. If
    `mapping` is "in_turn", the result is the same on any number of devices. With several processes, each process trains
    some of the members, and all return the complete result.

    Args:
      algo, env, num_envs, topology: settings of every member, as for `make_train`.
      total_steps: environment steps of every member.
      population: number of members.
      exploit_every: environment steps of a member between rounds of copying, which are spaced evenly over the
        iterations; None: a twentieth of the run.
      score: score of a member: "training", the mean return of the episodes that ended since the last round, or
        "evaluation", the mean return of `evaluation_episodes` other episodes in each round, the same for all members.
      fraction: fraction of the members that copy others, and fraction that may be copied; each is at least one member.
      factor: factor that a copied hyperparameter is multiplied or divided by, within its range. In a uniform range, it
        changes by ln(factor) times the width; in a list, to a neighboring entry.
      resample: probability that a copied hyperparameter is sampled from its range instead.
      exploit_from: fraction of the run, at its beginning, in which only failed members copy others, because early
        returns say little about settings, especially while a replay buffer fills.
      copy_replay: also copy the replay buffer.
      seed: seed of all random numbers of the population.
      devices: number of devices of this process to use; None: all. On a CPU, JAX is set up with one device per core,
        unless it has started already.
      mapping: how the members on one device are executed: together ("vmap") or one after another ("in_turn"); None: the
        faster way on this platform.
      evaluation_episodes: complete episodes of each evaluation. At the end, an evaluation of all members determines the
        winner, which is then evaluated on the same number of fresh episodes.
      explore_in_evaluation: sample actions as in training in these evaluations.
      run_dir: directory for checkpoints, from which the same call resumes bit for bit after it was killed or
        interrupted, and for the final lineage, curves, table, plot and the winner's policy; one process only. None:
        nothing is saved.
      checkpoint_every: environment steps of a member between checkpoints, which are saved after rounds; None: a tenth
        of the run.
      overwrite: delete an earlier population in `run_dir` and start again.
      progress: show a progress bar.
      **space: hyperparameters, replacing or extending the default space of `jaxrl.tune`: `LogUniform`, `Uniform`, a
        list of numbers or of schedules of one kind, or a single value, which fixes the field. Only traced fields are
        allowed.

    Returns:
      The learning curves, final learner states and hyperparameters of all members, and the winner.

    Raises:
      ConfigError: settings are invalid; the message lists all of them.
      RunDirectoryError: `run_dir` is in use, contains anything other than this population, or contains a foreign
        file with a name that jaxrl uses.
      KeyboardInterrupt: after Ctrl-C, once progress is saved in `run_dir`.
      SystemExit: after SIGTERM or when the terminal is closed, once progress is saved in `run_dir`.
    """
    devices, mapping = devices_and_mapping(devices, mapping)
    run, selection = RunSettings.of(locals()), Selection(fraction, factor, resample, exploit_from, score, copy_replay)
    problems = arguments.problems_of(
        pbt,
        locals(),
        **COUNTS,
        population={"low": 2},
        fraction={"above": 0, "high": 0.5},
        factor={"above": 1},
        resample={"low": 0, "high": 1},
        exploit_from={"low": 0, "below": 1},
    )
    if problems := problems + settings_problems("a population", run, space):
        raise ConfigError(problems)
    seed = limits.checked_seed("seed", seed)
    first, ranges = _bound(run.replace(algo=as_algorithm(run.algo)), space)
    every = run.total_steps / _INTERVALS if exploit_every is None else exploit_every
    points = min(max(1, round(run.total_steps / every)), first.iterations)
    if points > 1_000_000:  # the scores and hyperparameters of each round are recorded
        raise ConfigError(
            f"exploit_every={exploit_every} results in {points:,} rounds, but at most 1,000,000 can be recorded; "
            "increase exploit_every"
        )
    if points - 1 < max(1, exploit_from * points - 1e-9):
        raise ConfigError(
            f"total_steps={run.total_steps} with exploit_every={exploit_every} and exploit_from={exploit_from:g}: no "
            f"member would copy another before the end of the {first.iterations} iterations of {first.rows} steps; use "
            "at least two iterations, exploit_every of at most half of the steps, and a smaller exploit_from"
        )

    identity = identity_of(first.settings, mapping) | {"seed": seed, "points": points, "population": population}
    identity |= dataclasses.asdict(selection) | {"space": {name: repr(values) for name, values in ranges.items()}}
    members = VectorizedRuns(first.program, devices, mapping, -(-population // jax.process_count()))
    evolution = Population(members, first, ranges, selection, members=population, seed=seed, points=points)
    seeds = [keys.member_seed(seed, member) for member in range(population)]
    algos, roots = evolution.algos(0), members.stack([keys.root_key(seeds[member]) for member in evolution.mine])
    total = first.iterations * first.rows * members.runs
    with opened_session(run, "a population", identity, [{"devices": devices}], total, [], [seed]) as session:
        session.display.note(f"evolving: {', '.join(ranges)}")
        part = train_many(session, 0, members, algos, first, roots, points, evolution)
        last = evolution.algos(points - 1)
        for point, name in ((points, "returns"), (points + 1, "fresh")):
            part[name] = evolution.evaluate(last, part["learner"], point)
        part = gathered(part, members.runs)
        result = _result(part, first, evolution, seed, seeds, session.figures())
        return leave(result, session.run_dir, trained=bool(session.timed))


def _bound(run: RunSettings, space: Mapping[str, Any]) -> tuple[CompiledRun, dict[str, Range]]:
    """Return the compiled run shared by all members, and the ranges of their hyperparameters.

    Raises:
      ConfigError: settings are invalid; the message lists all of them.
    """
    fixed, ranges = search_space(run.algo, space, schedules=True)
    run = run.replace(algo=replace(run.algo, **fixed))
    runs = {
        name: [bind_run(run.replace(algo=replace(run.algo, **{name: value}))) for value in ends(values)]
        for name, values in ranges.items()
    }
    if problems := [
        f"{name}={ranges[name]!r:.200}: values must be numbers or schedules of one kind; use jaxrl.sweep for others"
        for name, bound in runs.items()
        if len({(jax.tree.structure(one.algo), one.program) for one in bound}) > 1
    ]:
        raise ConfigError(problems)
    return list(runs.values())[-1][-1], ranges


def _result(part, first, population, seed, seeds, figures) -> PBTResult:
    """Return the result of a trained population."""
    members, record = population.members, population.record
    steps = np.asarray(first.steps(len(record["parents"])))
    middles = (steps + np.asarray([0, *steps[:-1]])) / (2 * steps[-1])
    values = {
        one.name: np.asarray(
            [[one.number(x, t) for x in row] for row, t in zip(record["values"][:, place], middles, strict=True)]
        )
        for place, one in enumerate(population.hyperparameters)
    }
    configurations = [population.settings(len(steps) - 1, member) for member in range(members)]
    configs = [
        dataclasses.replace(first, settings=first.settings.replace(algo=replace(first.algo, **one))).config(None)
        for one in configurations
    ]
    learners = jax.device_get(part["learner"])  # indexing an array on several devices loses the sign of zeros
    result = SweepResult(
        configurations=configurations,
        seeds=[seed],
        steps=np.tile(steps, (members, 1)),
        metrics={name: curve[:members, None] for name, curve in sorted(part["metrics"].items())},
        returns=part["returns"][:members, None],
        failed=part["failed"][:members, -1:],  # members that failed earlier have copied others
        learners=[jax.tree.map(lambda x, member=member: x[member][None], learners) for member in range(members)],
        configs=configs,
        **figures,
    )
    winner, _ = result.best_run() or (0, 0)
    lineage = Lineage(steps, first.rows, record["scores"], record["parents"], values, winner)
    fresh = np.where(np.isfinite(result.scores[winner]), part["fresh"][winner], np.nan)
    return PBTResult(**vars(result), lineage=lineage, fresh_returns=fresh, member_seeds=seeds)
