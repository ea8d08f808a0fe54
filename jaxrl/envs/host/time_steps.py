"""Seeds and time steps of host environments, shared by all adapters."""

from collections.abc import Mapping

import numpy as np

from jaxrl.core import episode_info
from jaxrl.core.limits import checked_seed
from jaxrl.core.types import Episode, PyTree, TimeStep


def environment_seeds(seed: int, num_envs: int, generation: int = 0, first_env: int = 0) -> list[int]:
    """Return a seed in [0, 2^31) for each environment, which depends on the environment's index, not on `num_envs`.

    Seeds of different runs are unrelated. With `seed + index`, the default of most suites, run 1 would share all but
    one of its environments with run 0.

    Args:
      seed: the run's seed.
      num_envs: number of environments.
      generation: number of times that environments were rebuilt; each time, they get new seeds.
      first_env: index in the run of the first environment.

    Raises:
      ConfigError: the seed is not a whole number from 0 to 2^63 - 1.
    """
    entropy = checked_seed("seed", seed)
    sequences = (
        np.random.SeedSequence(entropy=entropy, spawn_key=(generation, index))
        for index in range(first_env, first_env + num_envs)
    )
    return [int(sequence.generate_state(1)[0] >> np.uint32(1)) for sequence in sequences]


class Episodes:
    """A tracker of the episodes in a batch of environments, which makes time steps from the environments' results.

    An environment is reset on the step after its episode's end. So a row is the first of an episode if and only if the
    environment's previous row was the last of an episode.

    Args:
      num_envs: number of environments.
      games: whether a game may span several episodes; if true, `follow` needs `complete`.
      info: names of the scalars that become `TimeStep.info`, with their summary over an episode
        (`jaxrl.core.episode_info`); `follow` needs their values.

    Attributes:
      ended: bool array of shape [num_envs], True for environments that begin an episode with their next row.
    """

    def __init__(self, num_envs: int, games: bool = False, info: tuple[str, ...] = ()):
        self.ended = np.ones(num_envs, np.bool_)  # the previous row was an episode's last
        self._games = games
        self._over = np.ones(num_envs, np.bool_)  # the previous row was a game's last
        self._game, self._life = ((np.zeros(num_envs, np.float64), np.zeros(num_envs, np.int32)) for _ in range(2))
        self._info = {name: np.zeros(num_envs, np.float64) for name in info}

    def begin(self, index: int | slice | list[int] = slice(None)) -> None:
        """Mark that the next rows of these environments begin new games."""
        self.ended[index] = self._over[index] = True

    def follow(
        self,
        index: np.ndarray | slice,
        observation: PyTree,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        *,
        true_reward: np.ndarray | None = None,
        complete: np.ndarray | None = None,
        info: Mapping[str, np.ndarray] | None = None,
        discount: np.ndarray | None = None,
    ) -> TimeStep[np.ndarray]:
        """Add a row to the episodes of some environments; return the row as a time step.

        Args:
          index: indices of the environments, [B]; a slice of all environments is cheapest.
          observation: observations with leaves of shape [B, ...]; the caller must not write to them afterwards.
          reward: the reward for learning, [B]; ignored where an episode begins.
          terminated, truncated: [B]; an episode with both set counts as terminated.
          true_reward: the unmodified reward, [B]; None if `reward` is unmodified.
          complete: whether the game is over, [B]; ignored except where an episode ends; only valid if `games` is true.
          info: scalars reported by the environments, by name, each [B]; ignored where an episode begins.
          discount: discounts reported by the environments, [B]; ignored where an episode begins.
        """
        first, fresh = self.ended[index].copy(), self._over[index]
        terminated = np.asarray(terminated, np.bool_)
        truncated = truncated & ~terminated
        last = terminated | truncated
        reward = np.where(first, np.float32(0.0), reward).astype(np.float32, copy=False)
        gained = reward if true_reward is None else np.where(first, 0.0, true_reward)
        episode = _counted(self._game, index, fresh, gained, first)
        over = last if complete is None else last & complete
        current, reported, totals = info or {}, {}, {}
        for name, so_far in self._info.items():
            reported[name] = np.where(first, 0.0, current[episode_info.parts(name)[0]])
            before = np.where(fresh, 0.0, so_far[index])
            so_far[index] = np.where(first, before, episode_info.fold(name, before, reported[name], episode.length, np))
            totals[name] = so_far[index].astype(np.float32)
        self.ended[index], self._over[index] = last, over
        return TimeStep(
            observation=observation,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            first=first,
            episode=episode.replace(
                complete=over if self._games else None,
                life=_counted(self._life, index, first, gained, first) if self._games else None,
                info=totals or None,
            ),
            info={name: x.astype(np.float32) for name, x in reported.items()} or None,
            discount=None if discount is None else np.where(first, 1.0, discount).astype(np.float32),
        )


def _counted(totals, index, fresh, gained, first) -> Episode[np.ndarray]:
    """Add a row in place to `totals`, a pair (returns, lengths), which restarts at 0 where `fresh`; return the sums."""
    returns = np.where(fresh, 0.0, totals[0][index]) + gained
    lengths = np.where(fresh, 0, totals[1][index]) + ~first
    totals[0][index], totals[1][index] = returns, lengths
    return Episode(returns.astype(np.float32), lengths.astype(np.int32, copy=False))
