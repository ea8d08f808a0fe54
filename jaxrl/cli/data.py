"""`jaxrl export-rlds`, `jaxrl export-minari`, `jaxrl export-replay` and `jaxrl dataset`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrl.cli.flags import Flag, Group, parse
from jaxrl.cli.runs import make_environment
from jaxrl.core.errors import ConfigError
from jaxrl.data import load_dataset
from jaxrl.data.minari import DATA_FORMATS
from jaxrl.data.rlds import FILE_FORMATS
from jaxrl.run import export, replays
from jaxrl.run.loading import load_run

_FLAGS = (
    Flag("episodes", int, 1000, "how many"),
    Flag("seed", int, 0, "of the episodes"),
    Flag("explore", bool, False, "sample actions as in training, rather than take the best"),
    Flag("env", str, None, "environment to evaluate in; None: the training environment"),
    Flag("env_params", str, (), "parameters of that environment, as key=value", many=True),
    Flag("num_envs", int | None, None, "number of environments; None: as many as episodes, at most 128"),
    Flag("max_steps", int, 27_000, "longer episodes are cut off at this length"),
    Flag("step", int | None, None, "step of the checkpoint; None: the newest"),
    Flag("best", bool, False, "use the checkpoint with the highest evaluation"),
    Flag("progress", bool, True, "show a progress bar"),
)


def export_rlds(argv: Sequence[str]) -> int:
    """`jaxrl export-rlds RUN --out DIR [FLAGS]`; the exit code."""
    flags = [
        Flag("out", Path, None, "the directory to create; it must not exist", shown="required"),
        Flag("file_format", str, FILE_FORMATS[0], "of the records", choices=FILE_FORMATS),
    ]
    what = "Plays episodes with a trained policy and writes them as an RLDS dataset that TFDS opens."
    return _export("export-rlds", what, flags, argv, export.export_rlds)


def export_minari(argv: Sequence[str]) -> int:
    """`jaxrl export-minari RUN --id ID [FLAGS]`; the exit code."""
    flags = [
        Flag("id", str, None, "of the dataset, NAME-v0 or NAMESPACE/NAME-v0", shown="required"),
        Flag("data_format", str, DATA_FORMATS[0], "of the files", choices=DATA_FORMATS),
        Flag("data_dir", Path | None, None, "where datasets are stored; None: where Minari looks"),
        Flag("env_spec", str | None, None, "id of the Gymnasium environment that readers make"),
    ]
    what = "Plays episodes with a trained policy and writes them as a Minari dataset, images without loss."
    return _export("export-minari", what, flags, argv, export.export_minari)


def _export(command, what, flags, argv, write: Callable[..., Path]) -> int:
    """Plays and writes; the first of the command's own flags says where to."""
    run_flag = Flag("run", Path, None, "the run directory", shown="required", positional=True)
    values, problems = parse(f"jaxrl {command}", what, [Group(command, [run_flag, *flags, *_FLAGS])], argv)
    asked: dict[str, Any] = values[command]
    target, word = flags[0].name, flags[0].name.upper() if flags[0].name == "id" else "DIR"
    if asked["run"] is None:
        problems.append(f"no run directory: jaxrl {command} RUN --{target} {word}")
    if asked[target] is None:
        problems.append(f"no output given: --{target} {word}")
    if asked["env_params"] and asked["env"] is None:
        problems.append("--env-params needs --env")
    if problems:
        raise ConfigError(problems)
    other = None if asked["env"] is None else make_environment(asked["env"], asked["env_params"])
    run = load_run(asked["run"], step=asked["step"], best=asked["best"], env=other)
    shared = ("episodes", "seed", "explore", "num_envs", "max_steps", "progress")
    options = {name: asked[name] for name in (*shared, *(flag.name for flag in flags[1:]))}
    print(write(run.policy, run.env, asked[target], policy_version=run.step, **options))
    return 0


def export_replay(argv: Sequence[str]) -> int:
    """`jaxrl export-replay RUN --out DIR [FLAGS]`; the exit code."""
    flags = [
        Flag("run", Path, None, "the run directory", shown="required", positional=True),
        Flag("out", Path, None, "the directory to create; it must not exist", shown="required"),
        Flag("replay", str | None, None, "which of the algorithm's replay buffers, if it has several"),
        Flag("unfinished", bool, False, "also write unfinished episodes, as cut off"),
        Flag("step", int | None, None, "step of the checkpoint; None: the newest"),
        Flag("best", bool, False, "use the checkpoint with the highest evaluation"),
    ]
    what = "Writes the episodes in the replay buffer of a run as an RLDS dataset that TFDS opens."
    values, problems = parse("jaxrl export-replay", what, [Group("export-replay", flags)], argv)
    asked = dict(values["export-replay"])
    run, out = asked.pop("run"), asked.pop("out")
    if run is None:
        problems.append("no run directory: jaxrl export-replay RUN --out DIR")
    if out is None:
        problems.append("no output given: --out DIR")
    if problems:
        raise ConfigError(problems)
    print(replays.export_replay(run, out, **asked))
    return 0


def dataset(argv: Sequence[str]) -> int:
    """`jaxrl dataset info SOURCE`; the exit code."""
    flags = [
        Flag("what", str, None, "info", shown="required", positional=True, choices=("info",)),
        Flag("source", str, None, "the directory of an RLDS dataset, or minari:ID", shown="required", positional=True),
        Flag("split", str, "train", "the split to read"),
    ]
    what = "Reports what a dataset contains, and every fault. The exit code is 1 if there are faults."
    values, problems = parse("jaxrl dataset", what, [Group("dataset", flags)], argv)
    asked = values["dataset"]
    if asked["what"] is None or asked["source"] is None:
        problems.append("jaxrl dataset info DIR, or jaxrl dataset info minari:ID")
    if problems:
        raise ConfigError(problems)
    source = asked["source"]
    named = source if source.startswith(("rlds:", "minari:")) else f"rlds:{source}"
    report = load_dataset(named, split=asked["split"]).report()
    print(report)
    return 1 if report.faults else 0
