"""The export commands and `jaxrl dataset`."""

import re
from pathlib import Path
from typing import Any, Literal

from jaxrl.cli.commands import Command, OfRun, command
from jaxrl.cli.evaluate import Playing
from jaxrl.core.errors import ConfigError
from jaxrl.core.files import escape_for_terminal


@command
class Export(OfRun):
    """Export a trained policy to a file that runs without jaxrl, or to a folder for sharing.

    Args:
      out: file to write; for safetensors, the directory to create.
      to: export format.
      sample: sample actions with a random key, as in training, instead of taking the best; only for stablehlo.
    """

    out: Path
    to: str = ""  # formats are in the table
    sample: bool = False

    def execute(self) -> None:
        from jaxrl.export.policies import export_policy

        try:
            print(export_policy(self.run, self.out, **self.chosen("to", "sample", "step", "best")))
        except ConfigError as error:
            raise ConfigError([_with_flags(problem) for problem in error.problems]) from error


def _with_flags(problem):
    """Rewrite arguments in a message as flags: `to='numpy'` becomes `--to 'numpy'`, `best=True` becomes `--best`."""

    def flag(found):
        name = "out" if found[1] == "path" else found[1]
        return f"--{name}" if found[2] else f"--{name} "

    return re.sub(r"\b(path|to|step|sample|best)=(True\b|(?=['\d-]))", flag, problem)


@command
class ExportEpisodes(Playing):
    """A command that plays episodes and exports them.

    Args:
      num_envs: number of environments; None: the number of episodes, at most 128.
      max_steps: maximum length of an episode; longer ones are truncated.
      progress: show a progress bar.
    """

    episodes: int = 1000
    seed: int = 0
    num_envs: int | None = None
    max_steps: int = 27_000
    progress: bool = True

    def write(self, function: Any, output: Any, *options: str) -> None:
        """Call a function of `dataset_export` with the common options and these `options`; print the result."""
        run = self.loaded()
        shared = ("episodes", "seed", "explore", "num_envs", "max_steps", "progress")
        print(function(run.policy, run.env, output, policy_version=run.step, **self.chosen(*shared, *options)))


@command
class ExportRlds(ExportEpisodes):
    """Play episodes with a trained policy and export them as an RLDS dataset, readable with TFDS.

    Args:
      out: the directory to create; it must not exist.
      file_format: format of the records.
    """

    out: Path
    file_format: str = ""  # the table has the formats

    def execute(self) -> None:
        from jaxrl.run.recording import dataset_export

        self.write(dataset_export.export_rlds, self.out, "file_format")


@command
class ExportMinari(ExportEpisodes):
    """Play episodes with a trained policy and export them as a Minari dataset; images are stored losslessly.

    Args:
      id: ID of the dataset, NAME-v0 or NAMESPACE/NAME-v0.
      data_dir: directory of datasets; None: Minari's default directory.
      env_spec: ID of the Gymnasium environment to store in the dataset, which Minari can then recreate.
    """

    id: str
    data_dir: Path | None = None
    env_spec: str | None = None

    def execute(self) -> None:
        from jaxrl.run.recording import dataset_export

        self.write(dataset_export.export_minari, self.id, "data_dir", "env_spec")


@command
class ExportReplay(OfRun):
    """Export the episodes in the replay buffer of a run as an RLDS dataset, readable with TFDS.

    Args:
      out: the directory to create; it must not exist.
      replay: name of the replay buffer, if the algorithm has several.
      unfinished: also export unfinished episodes, as truncated.
    """

    out: Path
    replay: str | None = None
    unfinished: bool = False

    def execute(self) -> None:
        from jaxrl.run.recording import replay_export

        print(replay_export.export_replay(self.run, self.out, **self.chosen("replay", "unfinished", "step", "best")))


@command
class Dataset(Command):
    """Report the contents of a dataset and any faults in it. The exit code is 1 if there are faults.

    Args:
      what: the subcommand, info (required).
      source: the directory of an RLDS dataset, or minari:ID (required).
      split: split to read.
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
