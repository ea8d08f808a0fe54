"""The commands `jaxrl eval` and `jaxrl render`: a trained policy plays, to be evaluated or watched."""

import sys
from collections.abc import Sequence

from jaxrl.cli import imports, table
from jaxrl.cli.flags import BOOL, CHECKPOINT, FLOAT, INT, PATH, TEXT, Flag, Group, optional, parse
from jaxrl.cli.summary import score
from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import seed_problems

_RUN = Flag("run", PATH, None, "the run directory", hint="required", positional=True)
# Flags of both commands.
_PLAYED = (
    Flag("explore", BOOL, False, "sample actions as in training, rather than take the best"),
    Flag("env", TEXT, None, "environment to play in; None: the training environment"),
    Flag("env_params", TEXT, (), "parameters of that environment, as key=value", many=True),
    *CHECKPOINT,
)


def evaluate(argv: Sequence[str]) -> int:
    """Run `jaxrl eval RUN [FLAGS]`; return the exit code."""
    timeout = table.load()["constants"]["step_timeout"]
    flags = [
        _RUN,
        Flag("episodes", INT, 128, "complete episodes"),
        Flag(
            "seed",
            optional(INT),
            None,
            "seed of the episodes; None: other episodes than those that the run was evaluated on",
        ),
        Flag("step_timeout", FLOAT, timeout, "seconds that host environments have for one step or reset"),
        Flag(
            "opponent",
            optional(TEXT),
            None,
            "what acts for all agents but one: random, or the directory of another run; None: this policy for all",
        ),
        *_PLAYED,
        Flag(
            "follow", BOOL, False, "evaluate every new checkpoint until the run, trained by another process, has ended"
        ),
        Flag("out", optional(PATH), None, "with --follow: file for the evaluations; None: RUN/evaluations.jsonl"),
        imports.FLAG,
    ]
    values, problems = parse(
        "jaxrl eval", "Plays complete episodes with a trained policy.", [Group("eval", flags)], argv
    )
    arguments = values["eval"]
    problems += _play_problems("eval", arguments)
    if arguments["step_timeout"] <= 0:
        problems.append(f"--step-timeout: {arguments['step_timeout']:g} must be more than 0")
    if arguments["follow"] and (arguments["step"] is not None or arguments["best"]):
        problems.append("--follow evaluates every checkpoint; remove --step and --best")
    if arguments["follow"] and arguments["opponent"] is not None and arguments["out"] is None:
        problems.append("--follow with --opponent needs --out, a file apart from the evaluations without one")
    if arguments["out"] is not None and not arguments["follow"]:
        problems.append("--out needs --follow")
    if problems:
        raise ConfigError(problems)
    return _evaluate(arguments)


def render(argv: Sequence[str]) -> int:
    """Run `jaxrl render RUN [FLAGS]`; return the exit code."""
    flags = [
        _RUN,
        Flag(
            "out",
            optional(PATH),
            None,
            "file to write, .gif, .mp4 or, of brax, .html; None: episode.gif or episode.html in RUN",
        ),
        Flag("episodes", INT, 1, "number of episodes, each in a file of its own: episode-1.gif, episode-2.gif, ..."),
        Flag("seed", optional(INT), None, "seed of the first episode; None: the one that jaxrl eval plays by"),
        Flag("max_steps", INT, 500, "longer episodes are cut off at this length"),
        *_PLAYED,
        imports.FLAG,
    ]
    what = "Plays episodes with a trained policy and draws them: one GIF, MP4 or, of brax, HTML page each."
    values, problems = parse("jaxrl render", what, [Group("render", flags)], argv)
    arguments = values["render"]
    problems += _play_problems("render", arguments)
    if arguments["max_steps"] < 1:
        problems.append(f"--max-steps: {arguments['max_steps']} must be at least 1")
    if arguments["out"] is not None and arguments["out"].suffix.lower() not in (".gif", ".mp4", ".html"):
        problems.append(f"--out: {str(arguments['out'])!r} must end in .gif, .mp4 or, of brax, .html")
    if problems:
        raise ConfigError(problems)
    from jaxrl.run import rendering

    run = _loaded(arguments)
    out = arguments["out"] or arguments["run"] / f"episode{rendering.suffix_of(run.env)}"
    first, options = _seed(arguments, run), {name: arguments[name] for name in ("max_steps", "explore")}
    for number in range(arguments["episodes"]):
        path = out if arguments["episodes"] == 1 else out.with_stem(f"{out.stem}-{number + 1}")
        seed = (first + number) % 2**63
        print(rendering.render(run.policy, run.env, path, seed=seed, **options), flush=True)
    return 0


def _play_problems(command, arguments):
    """Return the problems with the flags that both commands have."""
    problems = [f"no run directory: jaxrl {command} RUN"] if arguments["run"] is None else []
    if arguments["episodes"] < 1:
        problems.append(f"--episodes: {arguments['episodes']} must be at least 1")
    problems += [] if arguments["seed"] is None else seed_problems("--seed", arguments["seed"])
    if arguments["env_params"] and arguments["env"] is None:
        problems.append("--env-params needs --env")
    return problems if arguments["env"] is None else problems + table.environment_problems(arguments["env"])


def _other_environment(arguments):
    from jaxrl.cli.environment import make_environment

    return None if arguments["env"] is None else make_environment(arguments["env"], arguments["env_params"])


def _loaded(arguments):
    """Load the run at the checkpoint given by the flags."""
    from jaxrl.run.loading import load_run

    return load_run(arguments["run"], step=arguments["step"], best=arguments["best"], env=_other_environment(arguments))


def _seed(arguments, run):
    return run.held_out_seed if arguments["seed"] is None else arguments["seed"]


def _evaluate(arguments):
    from jaxrl.run import evaluation

    settings = {name: arguments[name] for name in ("episodes", "seed", "explore", "step_timeout", "opponent")}
    if arguments["follow"]:
        return _follow(
            arguments["run"],
            arguments["out"] or arguments["run"] / "evaluations.jsonl",
            _other_environment(arguments),
            settings,
        )
    run = _loaded(arguments)
    policy = run.policy
    settings["seed"] = _seed(arguments, run)
    found = evaluation.evaluate(policy.algo, policy.actor, run.env, policy.spec, **settings)
    print(f"{type(run.algo).__name__} on {run.env.name}, checkpoint at step {run.step:,}")
    print(score(found.metrics()))
    return 0


def _follow(run, out, env, settings):
    from jaxrl.run.directory import close_runs
    from jaxrl.run.follow import follow

    if not (run / "config.json").exists():
        close = " or ".join(map(str, close_runs(run)))  # otherwise it would wait forever for a misspelled name
        print(
            f"waiting for a run in {run}" + (f"; did you mean {close}?" if close else ""), file=sys.stderr, flush=True
        )
    count = 0
    for step, found in follow(run, env=env, out=out, **settings):
        count += 1
        print(f"step {step:,}: {score(found.metrics())}", flush=True)
    print(
        f"evaluations: {out}"
        if count
        else f"nothing new: {out} has every checkpoint; use another --out to evaluate again"
    )
    return 0
