"""The zoo: train the rows of `zoo.toml`, compare two of them, and record the results.

    python benchmarks/zoo.py                     # list rows: names, minutes, records
    python benchmarks/zoo.py --row cartpole-ppo
    python benchmarks/zoo.py --budget 60         # as many rows as fit into 60 minutes; also `make zoo BUDGET=60`
    python benchmarks/zoo.py --compare cartpole-ppo cartpole-dqn

With a budget, unfinished rows come first, then those without a record, then the oldest records. A row that takes longer
than expected is stopped when the budget is spent. Interrupted training is resumed by the same command, as long as the
commit is the same. Records are saved to `benchmarks/results`, and docs/zoo.md is updated. With another table (`--zoo`),
records and runs are stored next to it, and the page is not updated.

A comparison trains seeds in batches, three of each row, and tests the difference of their scores after each batch. It
ends once a difference is significant, or after `--max-seeds` (see `_sequential.py`).
"""

import argparse
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record
import _sequential
import _zoo

BATCH = 3
OTHERS = 10_000  # the first seed of a comparison's second row: seeds that both share would not be independent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--row", metavar="NAME", help="train this row")
    what.add_argument("--budget", type=float, metavar="MINUTES", help="train the rows that fit into this time")
    what.add_argument("--compare", nargs=2, metavar="ROW", help="test whether one row is better than another")
    parser.add_argument(
        "--max-seeds", type=int, default=15, help="maximum seeds per row in a comparison, a multiple of 3"
    )
    parser.add_argument("--zoo", type=pathlib.Path, default=_zoo.ZOO, help="use another table of rows")
    arguments = parser.parse_args()
    try:
        zoo = _zoo.read(arguments.zoo)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    named = [arguments.row] if arguments.row else arguments.compare or []
    if unknown := [name for name in named if name not in zoo.rows]:
        parser.error(f"no row {', '.join(unknown)}; python benchmarks/zoo.py lists them")
    if arguments.budget is not None and arguments.budget <= 0:
        parser.error(f"--budget {arguments.budget:g}: use more than 0 minutes")
    if arguments.row:
        code = run(zoo, zoo.rows[arguments.row])
        write_page(zoo)
        return code
    if arguments.budget is not None:
        return spend(zoo, arguments.budget)
    if arguments.compare:
        if arguments.max_seeds % BATCH:
            parser.error(f"--max-seeds {arguments.max_seeds}: use a multiple of {BATCH}")
        try:
            test = _sequential.Comparison(BATCH, arguments.max_seeds // BATCH)
        except ValueError as error:
            parser.error(f"--max-seeds {arguments.max_seeds}: {error}")
        compare(zoo, *arguments.compare, test)
        return 0
    for row in due(zoo):
        record = zoo.held(row)
        print(f"{row.name:30} {zoo.minutes(row):6.0f} min  {record['machine']['date'] if record else 'no record'}")
    return 0


def due(zoo: _zoo.Zoo) -> list[_zoo.Row]:
    """Return all rows: unfinished ones, then those without a record, then by the age of their records."""
    records = {row.name: zoo.held(row) for row in zoo.rows.values()}

    def place(row):
        record = records[row.name]
        return not zoo.runs(row.name).exists(), record["machine"]["date"] if record else ""

    return sorted(zoo.rows.values(), key=place)


def run(zoo: _zoo.Zoo, row: _zoo.Row) -> int:
    """Train a row and write its record; return 0 if it reached its targets, otherwise 1.

    Raises:
      SystemExit: training was stopped or failed; its progress is kept.
    """
    folder = zoo.begin(row.name)
    outcome = _zoo.train(row, folder)
    print(zoo.save(row, outcome), flush=True)
    shutil.rmtree(folder)
    try:
        _zoo.check(row, outcome.scores)
    except _zoo.Missed:
        print(f"{row.name}: below target, as noted in its row")
    except AssertionError:
        print(f"{row.name}: below target: {outcome.scores}")
        return 1
    return 0


def spend(zoo: _zoo.Zoo, minutes: float) -> int:
    """Train the rows that fit into a time, and write the page; return 1 if one failed or missed its targets."""
    end, code = time.monotonic() + 60 * minutes, 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for row in due(zoo):
        left = end - time.monotonic()
        if 60 * zoo.minutes(row) > left:
            continue
        print(f"{row.name}: about {zoo.minutes(row):.0f} of {left / 60:.0f} minutes", flush=True)
        timer = threading.Timer(left, os.kill, [os.getpid(), signal.SIGTERM])
        timer.daemon = True
        timer.start()
        try:
            code |= run(zoo, row)
        except SystemExit as ended:
            if ended.code not in (1, 2):  # a failed training run affects only its row
                write_page(zoo)
                if time.monotonic() < end:
                    raise
                print(f"{row.name}: the budget is spent; run the same command again to resume")
                return code
            code = 1
        finally:
            timer.cancel()
    write_page(zoo)
    return code


def compare(zoo: _zoo.Zoo, ours: str, theirs: str, test: _sequential.Comparison) -> str:
    """Train two rows until a difference is significant or no seeds are left; write and return the verdict."""
    scores: dict[str, list[float]] = {"A": [], "B": []}
    pairs, analyses, folders = (("A", ours, 0), ("B", theirs, OTHERS)), [], []
    while test.done < test.analyses:
        for which, name, first in pairs:
            start = first + test.done * test.batch
            seeds = range(start, start + test.batch)
            folders.append(zoo.begin(f"{name}-seeds-{seeds[0]}-{seeds[-1]}"))
            outcome = _zoo.train(zoo.rows[name], folders[-1], seeds)
            scores[which] += [round(float(score), 2) for score in outcome.scores]
        if unfinished := [which for which in scores if not all(map(math.isfinite, scores[which]))]:
            raise SystemExit(f"{', '.join(unfinished)}: a seed has no score, since it diverged or ended no episode")
        shown = test.add(*(scores[which][-test.batch :] for which in scores))
        means = {which: round(sum(found) / len(found), 2) for which, found in scores.items()}
        analyses.append({"seeds": len(scores["A"]), **means, "shown": test.verdict})
        print(f"{analyses[-1]['seeds']} seeds: A {means['A']:g}, B {means['B']:g}: {test.verdict}", flush=True)
        if shown:
            break
    path = _record.save(
        f"compare-{ours}-{theirs}",
        analyses,
        folder=zoo.path.parent / "results",
        A=f"jaxrl sweep {zoo.rows[ours].command}",
        B=f"jaxrl sweep {zoo.rows[theirs].command}",
        scores=scores,
        level=test.level,
        max_seeds=test.batch * test.analyses,
        verdict=test.verdict,
    )
    for folder in folders:
        shutil.rmtree(folder)
    print(f"A is {ours}, B is {theirs}: {test.verdict} ({len(scores['A'])} seeds of each)\n{path}")
    return test.verdict


def write_page(zoo: _zoo.Zoo) -> None:
    """Update docs/zoo.md and its figures, and the other tables and figures of these records."""
    if zoo.is_own:
        subprocess.run([sys.executable, str(_record.ROOT / "scripts" / "update_results.py")], check=True)


if __name__ == "__main__":
    sys.exit(main())
