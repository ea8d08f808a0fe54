"""`jaxrl eval`: a trained policy plays, once or at every checkpoint of a run that another process trains."""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl.cli.flags import Flag, Group, parse
from jaxrl.cli.runs import make_environment, score
from jaxrl.core.errors import ConfigError
from jaxrl.envs.host.watchdog import STEP_TIMEOUT
from jaxrl.run import evaluation
from jaxrl.run.follow import follow
from jaxrl.run.loading import load_run


def evaluate(argv: Sequence[str]) -> int:
    """`jaxrl eval RUN [FLAGS]`; the exit code."""
    flags = [
        Flag("run", Path, None, "the run directory", shown="required", positional=True),
        Flag("episodes", int, 128, "complete episodes"),
        Flag(
            "seed",
            int | None,
            None,
            "of the episodes; None: other ones than those of the run's own evaluations, which play by the run's seed",
        ),
        Flag("explore", bool, False, "sample actions as in training, rather than take the best"),
        Flag("step_timeout", float, STEP_TIMEOUT, "seconds that host environments have for one step or reset"),
        Flag("env", str, None, "environment to evaluate in; None: the training environment"),
        Flag("env_params", str, (), "parameters of that environment, as key=value", many=True),
        Flag("step", int | None, None, "step of the checkpoint; None: the newest"),
        Flag("best", bool, False, "use the checkpoint with the highest evaluation"),
        Flag(
            "follow", bool, False, "evaluate every new checkpoint until the run, trained by another process, has ended"
        ),
        Flag("out", Path | None, None, "with --follow: file for the evaluations; None: RUN/evaluations.jsonl"),
    ]
    values, problems = parse(
        "jaxrl eval", "Plays complete episodes with a trained policy.", [Group("eval", flags)], argv
    )
    asked = values["eval"]
    if asked["run"] is None:
        problems.append("no run directory: jaxrl eval RUN")
    if asked["episodes"] < 1:
        problems.append(f"--episodes: {asked['episodes']} must be at least 1")
    if asked["step_timeout"] <= 0:
        problems.append(f"--step-timeout: {asked['step_timeout']:g} must be more than 0")
    if asked["env_params"] and asked["env"] is None:
        problems.append("--env-params needs --env")
    if asked["follow"] and (asked["step"] is not None or asked["best"]):
        problems.append("--follow evaluates every checkpoint; remove --step and --best")
    if asked["out"] is not None and not asked["follow"]:
        problems.append("--out needs --follow")
    if problems:
        raise ConfigError(problems)
    other = None if asked["env"] is None else make_environment(asked["env"], asked["env_params"])
    settings = {name: asked[name] for name in ("episodes", "seed", "explore", "step_timeout")}
    if asked["follow"]:
        return _follow(asked["run"], asked["out"] or asked["run"] / "evaluations.jsonl", other, settings)
    run = load_run(asked["run"], step=asked["step"], best=asked["best"], env=other)
    policy = run.policy
    settings["seed"] = run.held_out_seed if asked["seed"] is None else asked["seed"]
    found = evaluation.evaluate(policy.algo, policy.actor, run.env, policy.spec, **settings)
    print(f"{type(run.algo).__name__} on {run.env.name}, checkpoint at step {run.step:,}")
    print(score(found))
    return 0


def _follow(run, out, env, settings):
    if not (run / "config.json").exists():
        print(f"waiting for a run in {run}", file=sys.stderr, flush=True)  # or for ever, if it was misspelt
    count = 0
    for step, found in follow(run, env=env, out=out, **settings):
        count += 1
        print(f"step {step:,}: {score(found)}", flush=True)
    print(
        f"evaluations: {out}"
        if count
        else f"nothing new: {out} has every checkpoint; use another --out to evaluate again"
    )
    return 0
