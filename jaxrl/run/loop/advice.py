"""Warnings about the metrics of a run."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

PAGE = "docs/debugging.md"
CLIPPED_MASS = 0.01  # fraction of the targets' probability beyond the ends of a fixed support
EDGE_MASS = 0.1  # fraction of the targets' probability on the two ends
UNFINISHED = 0.1  # fraction of an evaluation's episodes that may be unfinished
NOT_FINITE = f"lower the learning rate, normalize observations or rewards, or clip gradients ({PAGE})"
OF_ENVIRONMENT = f"check divisions, roots, logarithms and overflows in its reset and step ({PAGE})"

_SIGNIFICANT = 4.0  # standard errors by which returns must fall for a warning
_NOTABLE = 2.5  # standard errors by which returns may rise by chance
_LEAST_FALL = 0.1, 0.25  # minimum fall, as fractions of the return and of its standard deviation
_NO_ENTROPY = 1e-4  # nats
_COVERED = 0.75  # minimum fraction of the first steps in ended episodes, because short episodes end first
_FIRST, _LATE = 0.1, 0.2  # maximum fraction of the run that is its beginning, and fraction that is its end
_FEWEST = 20  # minimum number of episodes for an estimate of the mean return
_FEWEST_FLAT = 200  # minimum number of episodes at the end to conclude that the return did not rise
_SAME_ENTROPY, _NO_KL = 1e-4, 1e-8  # relative entropy change, and KL in nats, below which the policy is unchanged
_UPDATES = {True: 50, False: 5_000}  # updates after which learning is expected, for on-policy and other algorithms


def of(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return warnings about the metrics of a chunk or an evaluation, keyed by the name of the problem."""
    found = {}
    edge, clipped = (metrics.get(f"update/support_{name}_mass", 0.0) for name in ("edge", "clipped"))
    if edge > EDGE_MASS and clipped > CLIPPED_MASS:
        found["support"] = (
            f"the ends of the support have {edge:.0%} of the critics' targets, and {clipped:.0%} were clipped: returns "
            "exceed v_min or v_max; set them to the range of discounted returns, or use a head without a support"
        )
    ended, unfinished = (metrics.get(f"evaluation/{name}", 0) for name in ("episodes", "unfinished"))
    if unfinished > UNFINISHED * (ended + unfinished):
        found["unfinished"] = (
            f"{unfinished:.0f} of {ended + unfinished:.0f} episodes of the evaluation did not end and are not in its "
            "score; if episodes may be endless, add a time limit (jaxrl.envs.TimeLimit, docs/own_environment.md)"
        )
    return found


def at_end(
    rows: Sequence[Mapping[str, float]],
    *,
    on_policy: bool,
    discrete: bool,
    from_scratch: bool,
    same_env: bool,
    greedy: bool,
) -> str | None:
    """Return a warning if a run did not learn, or if its greedy actions are much worse than sampled ones, else None.

    There is no warning if chance, a short run, or a return that cannot improve would also explain the metrics.

    Args:
      rows: the metrics of the run, in the order in which they were logged.
      on_policy: whether the algorithm learns only from rollouts, and so makes few updates.
      discrete: whether all actions are discrete, so that a policy that no longer explores has entropy 0.
      from_scratch: whether the run started from an untrained policy.
      same_env: whether the training environment never changed.
      greedy: whether evaluations take the best actions and are in the training environment.
    """
    updates = sum(row.get("train/updates", 0.0) for row in rows)
    if not updates:
        return None
    total = max(row["step"] for row in rows)
    ended = _with_episodes(rows) if same_env else []
    first, last = _beginning(ended, total), _pooled([row for row in ended if row["step"] > (1.0 - _LATE) * total])
    evaluations, long = _evaluations(rows), updates >= _UPDATES[on_policy]
    if from_scratch and (stuck := _unmoved(rows, discrete)) is not None:
        what = stuck
    elif long and first is not None and last is not None and last.is_below(first):
        what = f"the return fell from {first.mean:.4g} to {last.mean:.4g} in training"
    elif greedy and (lost := _lost_by_greedy_actions(first, last, [x for at, x in evaluations if 2 * at >= total])):
        return lost
    elif not (long and from_scratch) or first is None or last is None or _rose(first, ended, evaluations, rows):
        return None
    elif first.std > 0.0 and last.count >= _FEWEST_FLAT:
        what = f"the return stayed at that of the first episodes ({first.mean:.4g}, then {last.mean:.4g})"
    else:
        return None
    since = _collapsed_at(rows) if discrete else None
    entropy = "" if since is None else f", and update/entropy is 0 since step {since:,}: the policy no longer explores"
    return f"this run did not learn: {what}{entropy} ({PAGE})"


def below_best(rows: Sequence[Mapping[str, float]], run_dir: Any, best_step: int | None) -> str | None:
    """Return a warning if the last evaluation of a run is far below its best evaluation, else None.

    Args:
      rows: the metrics of the run, in the order in which they were logged.
      run_dir: the run directory.
      best_step: step of the best checkpoint, or None.
    """
    evaluations = _evaluations(rows)
    if not evaluations:
        return None
    (step, best), (_, last) = max(evaluations, key=lambda one: one[1].mean), evaluations[-1]
    how = f"use jaxrl eval {run_dir} --best" if step == best_step else "there is no checkpoint of that step"
    line = f"the last evaluation returned {last.mean:.4g}, but the one at step {step:,} returned {best.mean:.4g}; {how}"
    return line if last.is_below(best) else None


def late_return(rows: Sequence[Mapping[str, float]]) -> float | None:
    """Return the mean return of the episodes that ended in the last fifth of training.

    If there are none, return the mean of the last metrics with episodes; if no episode ended in the run, return None.
    """
    ended = _with_episodes(rows)
    late = [row for row in ended if row["step"] > (1.0 - _LATE) * rows[-1]["step"]]
    found = _pooled(late or ended[-1:], fewest=1)
    return None if found is None else found.mean


@dataclasses.dataclass(frozen=True)
class _Returns:
    """The mean, standard deviation and count of returns."""

    mean: float
    std: float
    count: float

    def above(self, other: "_Returns") -> float:
        """Return the difference from `other` in standard errors, positive if `self` is higher."""
        error = math.hypot(self.std / math.sqrt(self.count), other.std / math.sqrt(other.count))
        return (self.mean - other.mean) / max(error, 1e-6 * max(abs(self.mean), abs(other.mean)), 1e-12)

    def is_below(self, other: "_Returns") -> bool:
        of_mean, of_std = _LEAST_FALL
        least = max(of_mean * max(abs(self.mean), abs(other.mean)), of_std * other.std)
        return self.above(other) < -_SIGNIFICANT and other.mean - self.mean > least


def _evaluations(rows) -> list[tuple[float, _Returns]]:
    names = ("return_mean", "return_std", "episodes")
    played = [row for row in rows if row.get("evaluation/episodes", 0) > 0]
    return [(row["step"], _Returns(*(row[f"evaluation/{name}"] for name in names))) for row in played]


def _with_episodes(rows):
    return [row for row in rows if "train/return_std" in row]


def _pooled(rows, fewest=_FEWEST) -> _Returns | None:
    """Return the pooled returns of the episodes in these rows, or None if there are fewer than `fewest`."""
    count = sum(row["train/episodes"] for row in rows)
    if count < fewest:
        return None
    mean = sum(row["train/episodes"] * row["train/return_mean"] for row in rows) / count
    squares = (row["train/return_std"] ** 2 + (row["train/return_mean"] - mean) ** 2 for row in rows)
    variance = sum(row["train/episodes"] * square for row, square in zip(rows, squares, strict=True)) / count
    return _Returns(mean, math.sqrt(variance), count)


def _beginning(rows, total) -> _Returns | None:
    """Return the returns of the first episodes, or None if they ended too late to represent the initial policy."""
    steps = 0.0
    for number, row in enumerate(rows, 1):
        if row["step"] > _FIRST * total:
            return None
        steps += row["train/episodes"] * row["train/length_mean"]
        if steps >= _COVERED * row["step"] and (found := _pooled(rows[:number])) is not None:
            return found
    return None


def _rose(first, ended, evaluations, rows) -> bool:
    """Return whether returns later in the run, or in an evaluation, may exceed those at the beginning of the run."""
    last = ended[-1]["step"] + 1
    parts = [[row for row in ended if row["step"] * 20 // last == part] for part in range(20)]
    later = [found for part in parts if (found := _pooled(part)) is not None]
    if any(found.above(first) > _NOTABLE for found in later):
        return True
    entropies = [row["update/entropy"] for row in rows if "update/entropy" in row]
    if not entropies or abs(entropies[-1] - entropies[0]) > 0.01 * abs(entropies[0]):
        evaluations = [(0, first), *evaluations]  # otherwise, evaluations may differ only by the best actions
    return any(found.above(evaluations[0][1]) > _NOTABLE for _, found in evaluations)


def _lost_by_greedy_actions(first, last, evaluations) -> str | None:
    """Return a warning if even the best late evaluation is far below the return in training, else None.

    The difference must exceed half of the improvement in training or, without an improvement, half of the return.
    """
    if last is None or not evaluations:
        return None
    best = max(evaluations, key=lambda found: found.mean)
    learned = last.mean - first.mean if first is not None and first.is_below(last) else abs(last.mean)
    if not best.is_below(last) or 2.0 * (last.mean - best.mean) <= learned:
        return None
    return (
        f"the greedy actions in evaluations returned {evaluations[-1].mean:.4g}, but the sampled ones in training "
        f"{last.mean:.4g}; explore_in_evaluation=True (--explore-in-evaluation) samples actions as in training ({PAGE})"
    )


def _unmoved(rows, discrete) -> str | None:
    """Return a description of entropies and KL divergences that show an unchanged policy, or None."""
    entropy, kl = ([row[name] for row in rows if name in row] for name in ("update/entropy", "update/approximate_kl"))
    if len(entropy) < 2 or max(entropy) - min(entropy) > _SAME_ENTROPY * abs(entropy[0]) or abs(entropy[0]) < 1e-3:
        return None
    if max(kl, default=0.0 if discrete else math.inf) > _NO_KL:
        return None
    by_kl = f"update/approximate_kl is at most {max(kl):.1g}, " if kl else ""
    return f"the policy did not change: {by_kl}update/entropy stayed at {entropy[0]:.4g}; raise the learning rate"


def _collapsed_at(rows) -> int | None:
    """Return the step since which the entropy has been 0 for at least half of the run, or None."""
    since, step = None, 0
    for row in rows:
        if "update/entropy" in row:
            step = row["step"]
            since = None if row["update/entropy"] > _NO_ENTROPY else since or step
    return since if since is not None and 2 * since <= step else None
