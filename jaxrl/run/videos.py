"""Episodes written down as videos while a run goes on.

What draws is imported by the functions that draw, because most runs draw nothing.
"""

import dataclasses
import warnings
from pathlib import Path

from jaxrl.core.errors import JaxrlError
from jaxrl.core.types import Environment, EnvSpec, HostRecipe
from jaxrl.run.policy import Policy

FOLDER = "videos"  # of a run directory


@dataclasses.dataclass(frozen=True)
class Videos:
    """An episode every so many environment steps, `videos/000000050176.gif` by the step.

    Attributes:
      env: that is played in.
      every: environment steps between two.
      seed: of the run; all of them play the first episode of its evaluations.
      explore: sample actions as in training, rather than take the best.
    """

    env: Environment | HostRecipe
    every: int
    seed: int
    explore: bool

    def check(self, spec: EnvSpec) -> None:
        """Whether the environment can be drawn; one on the host is built for it and draws itself once.

        Raises:
          ConfigError: it cannot.
        """
        from jaxrl.run import rendering

        rendering.check_drawable(self.env, spec)

    def write(self, run_dir: Path, step: int, policy: Policy) -> Path | None:
        """Plays and writes the episode of `step`; what goes wrong is warned of, and costs no run its end.

        Returns:
          The file; None where it went wrong.
        """
        from jaxrl.run import rendering

        path = run_dir / FOLDER / f"{step:012d}{rendering.suffix_of(self.env)}"
        try:
            return rendering.render(policy, self.env, path, seed=self.seed, explore=self.explore)
        except (OSError, JaxrlError) as error:
            warnings.warn(f"no video at step {step}: {error}", RuntimeWarning, stacklevel=2)
            return None
