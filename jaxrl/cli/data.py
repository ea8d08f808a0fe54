"""The commands that write what a run learned or lived through, `jaxrl export` and its like, and `jaxrl dataset`."""

import re
from pathlib import Path
from typing import Any, Literal

from jaxrl.cli.commands import Command, OfRun, command
from jaxrl.cli.evaluate import Playing
from jaxrl.core.errors import ConfigError
from jaxrl.core.files import escape_for_terminal


@command
class Export(OfRun):
    """Writes a trained policy as a file that runs without jaxrl, or as a folder to share.

    Args:
      out: the file to write; of safetensors the folder, which must not exist.
      to: format.
      sample: sample actions as in training, by a key; only stablehlo.
    """

    out: Path
    to: str = ""  # the table has the formats
    sample: bool = False

    def execute(self) -> None:
        from jaxrl.export.policies import export_policy

        try:
            print(export_policy(self.run, self.out, **self.chosen("to", "sample", "step", "best")))
        except ConfigError as error:
            raise ConfigError([_with_flags(problem) for problem in error.problems]) from error


def _with_flags(problem):
    """Return a problem with flags in place of arguments: --to 'numpy' for to='numpy', --best for best=True."""

    def flag(found):
        name = "out" if found[1] == "path" else found[1]
        return f"--{name}" if found[2] else f"--{name} "

    return re.sub(r"\b(path|to|step|sample|best)=(True\b|(?=['\d-]))", flag, problem)


@command
class ExportEpisodes(Playing):
    """A command that plays episodes and writes them.

    Args:
      num_envs: number of environments; None: as many as episodes, at most 128.
      max_steps: longer episodes are cut off at this length.
      progress: show a progress bar.
    """

    episodes: int = 1000
    seed: int = 0
    num_envs: int | None = None
    max_steps: int = 27_000
    progress: bool = True

    def write(self, function: Any, output: Any, *options: str) -> None:
        """Call a function of `jaxrl.run.export` with these fields and those of every such command."""
        run = self.loaded()
        shared = ("episodes", "seed", "explore", "num_envs", "max_steps", "progress")
        print(function(run.policy, run.env, output, policy_version=run.step, **self.chosen(*shared, *options)))


@command
class ExportRlds(ExportEpisodes):
    """Plays episodes with a trained policy and writes them as an RLDS dataset that TFDS opens.

    Args:
      out: the directory to create; it must not exist.
      file_format: format of the records.
    """

    out: Path
    file_format: str = ""  # the table has the formats

    def execute(self) -> None:
        from jaxrl.run import export

        self.write(export.export_rlds, self.out, "file_format")


@command
class ExportMinari(ExportEpisodes):
    """Plays episodes with a trained policy and writes them as a Minari dataset, images without loss.

    Args:
      id: id of the dataset, NAME-v0 or NAMESPACE/NAME-v0.
      data_format: format of the files.
      data_dir: where datasets are stored; None: where Minari looks.
      env_spec: id of the Gymnasium environment that readers make.
    """

    id: str
    data_format: str = ""  # the table has the formats
    data_dir: Path | None = None
    env_spec: str | None = None

    def execute(self) -> None:
        from jaxrl.run import export

        self.write(export.export_minari, self.id, "data_format", "data_dir", "env_spec")


@command
class ExportReplay(OfRun):
    """Writes the episodes in the replay buffer of a run as an RLDS dataset that TFDS opens.

    Args:
      out: the directory to create; it must not exist.
      replay: which of the algorithm's replay buffers, if it has several.
      unfinished: also write unfinished episodes, as cut off.
    """

    out: Path
    replay: str | None = None
    unfinished: bool = False

    def execute(self) -> None:
        from jaxrl.run import replays

        print(replays.export_replay(self.run, self.out, **self.chosen("replay", "unfinished", "step", "best")))


@command
class Dataset(Command):
    """Reports what a dataset contains, and every fault. The exit code is 1 if there are faults.

    Args:
      what: info (required).
      source: the directory of an RLDS dataset, or minari:ID (required).
      split: the split to read.
    """

    positional = ("what", "source")
    what: Literal["info"] | None = None
    source: str | None = None
    split: str = "train"

    def checks(self) -> dict[str, Any]:
        return {"jaxrl dataset info DIR, or jaxrl dataset info minari:ID": None in (self.what, self.source)}

    def execute(self) -> int:
        from jaxrl.data import load_dataset

        source = str(self.source)
        named = source if source.startswith(("rlds:", "minari:")) else f"rlds:{source}"
        report = load_dataset(named, split=self.split).report()
        print(escape_for_terminal(str(report)))
        return 1 if report.faults else 0
