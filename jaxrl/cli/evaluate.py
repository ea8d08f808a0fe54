"""The commands `jaxrl eval` and `jaxrl render`, which evaluate a trained policy or render its episodes."""

import sys
from pathlib import Path
from typing import Any

from jaxrl.cli import table
from jaxrl.cli.commands import OfRun, command
from jaxrl.cli.imports import announce_jax
from jaxrl.cli.run_summary import score
from jaxrl.core.limits import seed_problems


@command
class Playing(OfRun):
    """A command that plays episodes with a trained policy.

    Args:
      episodes: number of episodes.
      seed: seed of the episodes.
      explore: sample actions as in training, instead of taking the best.
      env: environment to play in; None: the training environment.
      env_params: parameters of that environment, as key=value.
    """

    episodes: int = 1
    seed: int | None = None
    explore: bool = False
    env: str | None = None
    env_params: tuple[str, ...] = ()

    def checks(self) -> dict[str, Any]:
        problems = [] if self.seed is None else seed_problems("--seed", self.seed)
        problems += [] if self.env is None else table.environment_problems(self.env)
        return dict.fromkeys(problems, True) | {
            f"--episodes: {self.episodes} must be at least 1": self.episodes < 1,
            "--env-params needs --env": self.env_params and self.env is None,
        }

    def environment(self) -> Any:
        """Return the environment to play in, or None for the training environment."""
        announce_jax()
        from jaxrl.cli.environment import make_environment

        return None if self.env is None else make_environment(self.env, self.env_params)

    def loaded(self) -> Any:
        """Load the chosen checkpoint of the run, with the environment to play in."""
        from jaxrl.run.directory.loading import load_run

        return load_run(self.run, step=self.step, best=self.best, env=self.environment())

    def seed_for(self, run: Any) -> int:
        """Return the seed of the episodes; the default seed is one that the run's evaluations do not use."""
        return run.held_out_seed if self.seed is None else self.seed


@command
class Evaluate(Playing):
    """Evaluate a trained policy on complete episodes.

    Args:
      episodes: number of complete episodes.
      seed: seed of the episodes; None: held-out episodes, not used in the evaluations of the run.
      step_timeout: seconds that a host environment may take for one step or reset.
      opponent: policy that plays all agents but one: random, or the directory of another run; None: the evaluated
        policy plays all agents.
      follow: evaluate every new checkpoint until the run, trained by another process, has ended.
      out: with --follow: output file for the evaluations; None: RUN/evaluations.jsonl.
    """

    episodes: int = 128
    step_timeout: float = 0.0  # the default is in the table
    opponent: str | None = None
    follow: bool = False
    out: Path | None = None

    def checks(self) -> dict[str, Any]:
        of_one = self.step is not None or self.best
        alone = self.opponent is not None and self.out is None
        apart = "--follow with --opponent needs --out: games against an opponent are written to a separate file"
        return super().checks() | {
            f"--step-timeout: {self.step_timeout:g} must be more than 0": self.step_timeout <= 0,
            "--follow evaluates every checkpoint; remove --step and --best": self.follow and of_one,
            apart: self.follow and alone,
            "--out needs --follow": self.out is not None and not self.follow,
        }

    def execute(self) -> None:
        from jaxrl.run.policies import evaluation

        settings = self.chosen("episodes", "seed", "explore", "step_timeout", "opponent")
        if self.follow:
            self._follow(self.out or self.run / "evaluations.jsonl", settings)
            return
        run = self.loaded()
        policy, settings["seed"] = run.policy, self.seed_for(run)
        found = evaluation.evaluate(policy.algo, policy.actor, run.env, policy.spec, **settings)
        print(f"{type(run.algo).__name__} on {run.env.name}, checkpoint at step {run.step:,}")
        print(score(found.metrics()))

    def _follow(self, out, settings):
        from jaxrl.run.directory.follow import follow
        from jaxrl.run.directory.run_directory import close_runs

        env = self.environment()
        if not (self.run / "config.json").exists():
            close = " or ".join(map(str, close_runs(self.run)))  # otherwise a misspelled name would wait forever
            meant = f"; did you mean {close}?" if close else ""
            print(f"waiting for a run in {self.run}{meant}", file=sys.stderr, flush=True)
        ended = f"nothing to evaluate: {out} has every checkpoint; use another --out to evaluate again"
        for step, found in follow(self.run, env=env, out=out, **settings):
            ended = f"evaluations: {out}"
            print(f"step {step:,}: {score(found.metrics())}", flush=True)
        print(ended)


@command
class Render(Playing):
    """Play episodes with a trained policy and render each to a GIF, an MP4 or, for brax, an HTML page.

    Args:
      out: file to write, .gif, .mp4 or, for brax, .html; None: episode.gif or episode.html in RUN.
      episodes: number of episodes, each in a separate file: episode-1.gif and so on.
      seed: seed of the first episode; None: the default of jaxrl eval.
      max_steps: maximum length of an episode; longer ones are truncated.
    """

    out: Path | None = None
    max_steps: int = 500

    def checks(self) -> dict[str, Any]:
        suffix = ".gif" if self.out is None else self.out.suffix.lower()
        return super().checks() | {
            f"--max-steps: {self.max_steps} must be at least 1": self.max_steps < 1,
            f"--out: {str(self.out)!r} must end in .gif, .mp4 or, for brax, .html": (
                suffix not in (".gif", ".mp4", ".html")
            ),
        }

    def execute(self) -> None:
        from jaxrl.run.recording import rendering

        run = self.loaded()
        out = self.out or self.run / f"episode{rendering.suffix_of(run.env)}"
        first, options = self.seed_for(run), self.chosen("max_steps", "explore")
        for number in range(self.episodes):
            path = out if self.episodes == 1 else out.with_stem(f"{out.stem}-{number + 1}")
            seed = (first + number) % 2**63
            print(rendering.render(run.policy, run.env, path, seed=seed, **options), flush=True)
