"""`jaxrl eval`: a trained policy plays, once or at every checkpoint of a run that another process trains."""

import sys
from collections.abc import Sequence

from jaxrl.cli import imports, table
from jaxrl.cli.flags import BOOL, FLOAT, INT, PATH, TEXT, Flag, Group, optional, parse
from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import seed_problems


def evaluate(argv: Sequence[str]) -> int:
    """`jaxrl eval RUN [FLAGS]`; the exit code."""
    timeout = table.load()["constants"]["step_timeout"]
    flags = [
        Flag("run", PATH, None, "the run directory", shown="required", positional=True),
        Flag("episodes", INT, 128, "complete episodes"),
        Flag(
            "seed",
            optional(INT),
            None,
            "of the episodes; None: other ones than those of the run's own evaluations, which play by the run's seed",
        ),
        Flag("explore", BOOL, False, "sample actions as in training, rather than take the best"),
        Flag("step_timeout", FLOAT, timeout, "seconds that host environments have for one step or reset"),
        Flag("env", TEXT, None, "environment to evaluate in; None: the training environment"),
        Flag("env_params", TEXT, (), "parameters of that environment, as key=value", many=True),
        Flag("step", optional(INT), None, "step of the checkpoint; None: the newest"),
        Flag("best", BOOL, False, "use the checkpoint with the highest evaluation"),
        Flag(
            "follow", BOOL, False, "evaluate every new checkpoint until the run, trained by another process, has ended"
        ),
        Flag("out", optional(PATH), None, "with --follow: file for the evaluations; None: RUN/evaluations.jsonl"),
        imports.FLAG,
    ]
    values, problems = parse(
        "jaxrl eval", "Plays complete episodes with a trained policy.", [Group("eval", flags)], argv
    )
    asked = values["eval"]
    if asked["run"] is None:
        problems.append("no run directory: jaxrl eval RUN")
    if asked["episodes"] < 1:
        problems.append(f"--episodes: {asked['episodes']} must be at least 1")
    problems += [] if asked["seed"] is None else seed_problems("--seed", asked["seed"])
    if asked["step_timeout"] <= 0:
        problems.append(f"--step-timeout: {asked['step_timeout']:g} must be more than 0")
    if asked["env_params"] and asked["env"] is None:
        problems.append("--env-params needs --env")
    if asked["follow"] and (asked["step"] is not None or asked["best"]):
        problems.append("--follow evaluates every checkpoint; remove --step and --best")
    if asked["out"] is not None and not asked["follow"]:
        problems.append("--out needs --follow")
    if asked["env"] is not None:
        problems += table.environment_problems(asked["env"])
    if problems:
        raise ConfigError(problems)
    return _evaluate(asked)


def _evaluate(asked):
    from jaxrl.cli.training import make_environment, score
    from jaxrl.run import evaluation
    from jaxrl.run.loading import load_run

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
    from jaxrl.cli.training import score
    from jaxrl.run.directory import close_runs
    from jaxrl.run.follow import follow

    if not (run / "config.json").exists():
        close = " or ".join(map(str, close_runs(run)))  # it would wait for ever for one that was misspelt
        print(
            f"waiting for a run in {run}" + (f"; did you mean {close}?" if close else ""), file=sys.stderr, flush=True
        )
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
