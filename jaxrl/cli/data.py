"""The commands `jaxrl export-rlds`, `jaxrl export-minari`, `jaxrl export-replay` and `jaxrl dataset`."""

from collections.abc import Sequence
from typing import Any

from jaxrl.cli import imports, table
from jaxrl.cli.flags import BOOL, CHECKPOINT, INT, PATH, TEXT, Flag, Group, optional, parse
from jaxrl.core.errors import ConfigError
from jaxrl.core.files import escape_for_terminal

_FLAGS = (
    Flag("episodes", INT, 1000, "number of episodes"),
    Flag("seed", INT, 0, "seed of the episodes"),
    Flag("explore", BOOL, False, "sample actions as in training, rather than take the best"),
    Flag("env", TEXT, None, "environment to play in; None: the training environment"),
    Flag("env_params", TEXT, (), "parameters of that environment, as key=value", many=True),
    Flag("num_envs", optional(INT), None, "number of environments; None: as many as episodes, at most 128"),
    Flag("max_steps", INT, 27_000, "longer episodes are cut off at this length"),
    *CHECKPOINT,
    Flag("progress", BOOL, True, "show a progress bar"),
    imports.FLAG,
)


def export_rlds(argv: Sequence[str]) -> int:
    """Run `jaxrl export-rlds RUN --out DIR [FLAGS]`; return the exit code."""
    formats = tuple(table.load()["constants"]["file_formats"])
    flags = [
        Flag("out", PATH, None, "the directory to create; it must not exist", hint="required"),
        Flag("file_format", TEXT, formats[0], "format of the records", choices=formats),
    ]
    what = "Plays episodes with a trained policy and writes them as an RLDS dataset that TFDS opens."
    return _export("export-rlds", what, flags, argv)


def export_minari(argv: Sequence[str]) -> int:
    """Run `jaxrl export-minari RUN --id ID [FLAGS]`; return the exit code."""
    formats = tuple(table.load()["constants"]["data_formats"])
    flags = [
        Flag("id", TEXT, None, "id of the dataset, NAME-v0 or NAMESPACE/NAME-v0", hint="required"),
        Flag("data_format", TEXT, formats[0], "format of the files", choices=formats),
        Flag("data_dir", optional(PATH), None, "where datasets are stored; None: where Minari looks"),
        Flag("env_spec", optional(TEXT), None, "id of the Gymnasium environment that readers make"),
    ]
    what = "Plays episodes with a trained policy and writes them as a Minari dataset, images without loss."
    return _export("export-minari", what, flags, argv)


def _export(command, what, flags, argv) -> int:
    """Play episodes and write them; the first of the command's own flags is the output."""
    run_flag = Flag("run", PATH, None, "the run directory", hint="required", positional=True)
    values, problems = parse(f"jaxrl {command}", what, [Group(command, [run_flag, *flags, *_FLAGS])], argv)
    arguments: dict[str, Any] = values[command]
    target, word = flags[0].name, flags[0].name.upper() if flags[0].name == "id" else "DIR"
    if arguments["run"] is None:
        problems.append(f"no run directory: jaxrl {command} RUN --{target} {word}")
    if arguments[target] is None:
        problems.append(f"no output given: --{target} {word}")
    if arguments["env_params"] and arguments["env"] is None:
        problems.append("--env-params needs --env")
    if arguments["env"] is not None:
        problems += table.environment_problems(arguments["env"])
    if problems:
        raise ConfigError(problems)
    from jaxrl.cli.environment import make_environment
    from jaxrl.run import export
    from jaxrl.run.loading import load_run

    write = {"export-rlds": export.export_rlds, "export-minari": export.export_minari}[command]
    other = None if arguments["env"] is None else make_environment(arguments["env"], arguments["env_params"])
    run = load_run(arguments["run"], step=arguments["step"], best=arguments["best"], env=other)
    shared = ("episodes", "seed", "explore", "num_envs", "max_steps", "progress")
    options = {name: arguments[name] for name in (*shared, *(flag.name for flag in flags[1:]))}
    print(write(run.policy, run.env, arguments[target], policy_version=run.step, **options))
    return 0


def export_replay(argv: Sequence[str]) -> int:
    """Run `jaxrl export-replay RUN --out DIR [FLAGS]`; return the exit code."""
    flags = [
        Flag("run", PATH, None, "the run directory", hint="required", positional=True),
        Flag("out", PATH, None, "the directory to create; it must not exist", hint="required"),
        Flag("replay", optional(TEXT), None, "which of the algorithm's replay buffers, if it has several"),
        Flag("unfinished", BOOL, False, "also write unfinished episodes, as cut off"),
        *CHECKPOINT,
        imports.FLAG,
    ]
    what = "Writes the episodes in the replay buffer of a run as an RLDS dataset that TFDS opens."
    values, problems = parse("jaxrl export-replay", what, [Group("export-replay", flags)], argv)
    arguments = dict(values["export-replay"])
    run, out, _ = arguments.pop("run"), arguments.pop("out"), arguments.pop("import_")
    if run is None:
        problems.append("no run directory: jaxrl export-replay RUN --out DIR")
    if out is None:
        problems.append("no output given: --out DIR")
    if problems:
        raise ConfigError(problems)
    from jaxrl.run import replays

    print(replays.export_replay(run, out, **arguments))
    return 0


def dataset(argv: Sequence[str]) -> int:
    """Run `jaxrl dataset info SOURCE`; return the exit code."""
    flags = [
        Flag("what", TEXT, None, "info", hint="required", positional=True, choices=("info",)),
        Flag("source", TEXT, None, "the directory of an RLDS dataset, or minari:ID", hint="required", positional=True),
        Flag("split", TEXT, "train", "the split to read"),
    ]
    what = "Reports what a dataset contains, and every fault. The exit code is 1 if there are faults."
    values, problems = parse("jaxrl dataset", what, [Group("dataset", flags)], argv)
    arguments = values["dataset"]
    if arguments["what"] is None or arguments["source"] is None:
        problems.append("jaxrl dataset info DIR, or jaxrl dataset info minari:ID")
    if problems:
        raise ConfigError(problems)
    from jaxrl.data import load_dataset

    source = arguments["source"]
    named = source if source.startswith(("rlds:", "minari:")) else f"rlds:{source}"
    report = load_dataset(named, split=arguments["split"]).report()
    print(escape_for_terminal(str(report)))
    return 1 if report.faults else 0
