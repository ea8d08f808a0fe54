"""PGX's games (Koyamada et al., 2023, arXiv:2303.17503), as raw episodic environments of one player.

Games of several players are played against opponents, from a seat that is drawn anew for each episode.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pgx
from flax import struct

from jaxrl.core import registry, spaces
from jaxrl.core.errors import unknown
from jaxrl.core.types import PyTree
from jaxrl.envs.suite import Key, Step, SuiteEnv, constructing

OPPONENTS = ("random",)


class PgxState(struct.PyTreeNode):
    """A game, and the agent's part in it."""

    game: PyTree  # PGX's state, without its observation
    seat: jax.Array  # int32, the agent's number among the players


class PgxEnvironment(SuiteEnv):
    """One of PGX's games for one agent.

    A step is the agent's move and what follows, until it is the agent's turn again or the game is over. Observations
    are the agent's, and so are rewards, summed over the moves. Static parameters are the arguments of the game's
    constructor, and `opponent`, how the other players move: "random", uniformly among the legal moves.
    """

    key: Key = struct.field(pytree_node=False)
    observation_space: spaces.Box = struct.field(pytree_node=False)
    action_space: spaces.Discrete = struct.field(pytree_node=False)

    suite = "pgx"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return PGX's games; bridge bidding needs a data set of its own and is none of them."""
        return pgx.available_envs()

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        game = foreign((name, ()))
        arguments = {k: p.default for k, p in inspect.signature(type(game)).parameters.items()}
        arguments.pop("size", None)  # the names of go say it, and hex of another size than 11 does not run
        return arguments | ({"opponent": OPPONENTS[0]} if game.num_players > 1 else {})

    @classmethod
    def default(cls, key: Key) -> "PgxEnvironment":
        game = foreign(key)
        with constructing():
            start = jax.eval_shape(game.init, jax.eval_shape(lambda: jax.random.key(0)))
        return cls(key, _box(start.observation), spaces.Discrete(start.legal_action_mask.size))

    @classmethod
    def check(cls, name: str, parameters: Mapping[str, Any]) -> None:
        super().check(name, parameters)
        if (opponent := parameters.get("opponent", OPPONENTS[0])) not in OPPONENTS:
            raise unknown(f"opponent of pgx:{name}", str(opponent), OPPONENTS)

    def begin(self, key: jax.Array) -> tuple[PgxState, Step]:
        pgx_game = foreign(self.key)
        key_deal, key_seat, key = jax.random.split(key, 3)
        game, seat = _unseen(pgx_game.init(key_deal)), jax.random.randint(key_seat, (), 0, pgx_game.num_players)

        def waits(carry):
            return _is_over(carry[0]) | (carry[0].current_player != seat)

        def go_on(carry):  # others may end a game before the agent's first turn, which is then dealt anew
            key, key_deal, key_move, key_step = jax.random.split(carry[1], 4)
            game = jax.lax.cond(
                _is_over(carry[0]),
                lambda game: _unseen(pgx_game.init(key_deal)),
                lambda game: _unseen(pgx_game.step(game, self._opponent(game, key_move), key_step)),
                carry[0],
            )
            return game, key

        if pgx_game.num_players > 1:
            game, _ = jax.lax.while_loop(waits, go_on, (game, key))
        state = PgxState(game, seat)
        return state, self._seen(state)

    def advance(self, state: PgxState, action: PyTree, key: jax.Array) -> tuple[PgxState, Step]:
        pgx_game, seat = foreign(self.key), state.seat

        def move(carry):
            game, action, reward, key, _ = carry
            key, key_step, key_move = jax.random.split(key, 3)
            game = _unseen(pgx_game.step(game, action, key_step))
            waits = ~_is_over(game) & (game.current_player != seat)
            return game, self._opponent(game, key_move), reward + game.rewards[seat], key, waits

        start = (state.game, action, jnp.zeros_like(state.game.rewards[0]), key, jnp.ones((), bool))
        alone = pgx_game.num_players == 1
        game, _, reward, _, _ = move(start) if alone else jax.lax.while_loop(lambda carry: carry[-1], move, start)
        state = PgxState(game, seat)
        ended, timed = game.terminated, self.key[0] == "minatar-freeway"  # which nothing but its timer ends
        truncated = game.truncated | (ended & timed)
        return state, self._seen(state)._replace(reward=reward, terminated=ended & (not timed), truncated=truncated)

    def _opponent(self, game: Any, key: jax.Array) -> jax.Array:
        """Return the move of the player whose turn it is, who is not the agent."""
        return jax.random.categorical(key, jnp.where(game.legal_action_mask, 0.0, -jnp.inf)).astype(np.int32)

    def _seen(self, state: PgxState) -> Step:
        # Not the game's own observation, which is of the player to move: at the end of a game maybe an opponent.
        observation = foreign(self.key)._observe(state.game, state.seat)
        masked = not self.key[0].startswith("minatar")  # where everything is always allowed
        return Step(observation, action_mask=state.game.legal_action_mask if masked else None)


registry.add("suite", pgx=PgxEnvironment)
names, make = PgxEnvironment.names, PgxEnvironment.make


@functools.lru_cache(maxsize=64)
def foreign(key: Key) -> Any:
    """Return PGX's own game of this key."""
    arguments = {k: x for k, x in key[1] if k != "opponent"}
    with constructing():
        game: Any = pgx.make(cast("Any", key[0]))
        fixed = {"size": game._game.size} if key[0].startswith("go_") else {}
        return type(game)(**fixed, **arguments) if arguments else game


def _is_over(game: Any) -> jax.Array:
    return game.terminated | game.truncated


def _unseen(game: Any) -> Any:
    return game.replace(observation=None)  # made where it is needed, which is seldom


def _box(seen: jax.ShapeDtypeStruct) -> spaces.Box:
    if seen.dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, seen.shape, seen.dtype)
    low, high = (False, True) if seen.dtype.kind == "b" else (np.iinfo(seen.dtype).min, np.iinfo(seen.dtype).max)
    return spaces.Box(low, high, seen.shape, seen.dtype)
