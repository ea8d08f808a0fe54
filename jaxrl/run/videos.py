"""Videos of episodes, written during a run.

Drawing code is imported by the functions that use it, because most runs draw nothing.
"""

import dataclasses
import warnings
from pathlib import Path

from jaxrl.core.errors import JaxrlError
from jaxrl.core.types import Environment, EnvSpec, HostRecipe
from jaxrl.run.policy import Policy

FOLDER = "videos"  # in a run directory


@dataclasses.dataclass(frozen=True)
class Videos:
    """A writer of an episode every `every` environment steps, to `videos/000000050176.gif`, named by step.

    Attributes:
      env: environment to play in.
      every: environment steps between two videos.
      seed: seed of the run; every video shows the first episode of its evaluations.
      explore: sample actions as in training, rather than take the best.
    """

    env: Environment | HostRecipe
    every: int
    seed: int
    explore: bool

    def check(self, spec: EnvSpec) -> None:
        """Check that the environment can be drawn; a host environment is built and draws itself once.

        Raises:
          ConfigError: it cannot be drawn.
        """
        from jaxrl.run import rendering

        rendering.check_drawable(self.env, spec)

    def write(self, run_dir: Path, step: int, policy: Policy) -> Path | None:
        """Play and write the episode of `step`; a failure warns and does not end the run.

        Returns:
          The file, or None if it failed.
        """
        from jaxrl.run import rendering

        path = run_dir / FOLDER / f"{step:012d}{rendering.suffix_of(self.env)}"
        try:
            return rendering.render(policy, self.env, path, seed=self.seed, explore=self.explore)
        except (OSError, JaxrlError) as error:
            warnings.warn(f"no video at step {step}: {error}", RuntimeWarning, stacklevel=2)
            return None
