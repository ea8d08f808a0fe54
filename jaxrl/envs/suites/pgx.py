"""PGX's games (Koyamada et al., 2023, arXiv:2303.17503) for one agent or for all players, without auto-reset."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import pgx
from flax import struct

from jaxrl.core import spaces
from jaxrl.core.types import PyTree
from jaxrl.envs.suite import Key, LibraryEnv, Step, add_suite, arguments_of, unbounded

OPPONENTS = ("random", "self", "turns")


class PgxState(struct.PyTreeNode):
    """The state of a game, and the agent's seat in the game."""

    game: PyTree  # PGX's state, without its observation
    seat: jax.Array  # int32, the agent's number among the players


class PgxEnvironment(LibraryEnv):
    """A PGX game.

    Static parameters are the arguments of the game's constructor, and `opponent`. With "random", the other players make
    random moves until it is the agent's turn again; with "self", all players are agents; with "turns", one agent moves
    for both players, and the discount is -1 when the turn passes to the other player.
    """

    opponent: str = struct.field(pytree_node=False)

    suite = "pgx"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of PGX's games, except bridge bidding, which needs a separate data set."""
        return pgx.available_envs()

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        game = cls.foreign_of(name)
        arguments = arguments_of(type(game))
        arguments.pop("size", None)  # go's names include it, and hex only runs with 11
        return arguments | ({"opponent": OPPONENTS[0]} if game.num_players > 1 else {})

    @classmethod
    def make_foreign(cls, key: Key) -> Any:
        arguments = {k: x for k, x in key[1] if k != "opponent"}
        game: Any = pgx.make(cast("Any", key[0]))
        fixed = {"size": game._game.size} if key[0].startswith("go_") else {}
        return type(game)(**fixed, **arguments) if arguments else game

    @classmethod
    def default(cls, key: Key) -> "PgxEnvironment":
        game = cls.foreign_of(*key)
        start = jax.eval_shape(game.init, jax.eval_shape(lambda: jax.random.key(0)))
        opponent = str(dict(key[1]).get("opponent", OPPONENTS[0]))
        return cls(key, unbounded(start.observation), spaces.Discrete(start.legal_action_mask.size), opponent)

    @classmethod
    def choices(cls, name: str) -> Mapping[str, Iterable[str]]:
        players = cls.foreign_of(name).num_players
        return {"opponent": OPPONENTS if players == 2 else OPPONENTS[:2]} if players > 1 else {}

    @property
    def num_agents(self) -> int:
        return self.foreign.num_players if self.opponent == "self" else 1

    def model(self, state: PgxState) -> tuple["PgxEnvironment", PgxState]:
        """Return the game with `opponent="turns"` if it has two players, so that a search moves for both of them."""
        if self.foreign.num_players != 2:
            return self, state
        return self.replace(opponent="turns"), state.replace(seat=state.game.current_player)

    def begin(self, key: jax.Array) -> tuple[PgxState, Step]:
        pgx_game = self.foreign
        key_deal, key_seat, key = jax.random.split(key, 3)
        game, seat = _unseen(pgx_game.init(key_deal)), jax.random.randint(key_seat, (), 0, pgx_game.num_players)

        def go_on(carry):  # if others end a game before the agent's first turn, a new game is dealt
            game, (key, key_deal, key_move, key_step) = carry[0], jax.random.split(carry[1], 4)
            moved = _unseen(pgx_game.step(game, self._opponent(game, key_move), key_step))
            dealt = _unseen(pgx_game.init(key_deal))
            return jax.tree.map(functools.partial(jnp.where, _is_over(game)), dealt, moved), key

        if self.opponent == "turns":
            seat = game.current_player
        elif pgx_game.num_players > 1 and self.num_agents == 1:
            game, _ = jax.lax.while_loop(lambda x: _is_over(x[0]) | (x[0].current_player != seat), go_on, (game, key))
        return (state := PgxState(game, seat)), self._seen(state, seat)

    def advance(self, state: PgxState, action: PyTree, key: jax.Array) -> tuple[PgxState, Step]:
        pgx_game, seat = self.foreign, state.seat

        def move(carry):
            game, action, rewards, key, _ = carry
            key, key_step, key_move = jax.random.split(key, 3)
            game = _unseen(pgx_game.step(game, action, key_step))
            waits = ~_is_over(game) & (game.current_player != seat)
            return game, self._opponent(game, key_move), rewards + game.rewards, key, waits

        one = action[state.game.current_player] if self.num_agents > 1 else action
        start = (state.game, one, jnp.zeros_like(state.game.rewards), key, jnp.ones((), bool))
        replies = pgx_game.num_players > 1 and self.opponent == "random"
        game, _, rewards, _, _ = jax.lax.while_loop(lambda carry: carry[-1], move, start) if replies else move(start)
        reward = rewards if self.num_agents > 1 else rewards[seat]
        state = PgxState(game, game.current_player if self.opponent == "turns" else seat)
        terminated = game.terminated & (self.key[0] != "minatar-freeway")  # it only ends by its timer
        return state, self._seen(state, seat)._replace(reward=reward, terminated=terminated, truncated=_is_over(game))

    def _opponent(self, game: Any, key: jax.Array) -> jax.Array:
        """Return a random legal move for the opponent whose turn it is."""
        return jax.random.categorical(key, jnp.where(game.legal_action_mask, 0.0, -jnp.inf)).astype(jnp.int32)

    def _seen(self, state: PgxState, seat_before: jax.Array) -> Step:
        # The game's observation is not used: it is for the player to move, who may be an opponent after the last move.
        observe, legal = functools.partial(self.foreign._observe, state.game), state.game.legal_action_mask
        if (agents := self.num_agents) > 1:
            seats, waiting = jnp.arange(agents, dtype=jnp.int32), jnp.arange(legal.size) == 0
            mask = jnp.where((seats == state.game.current_player)[:, None], legal, waiting)
            return Step(jax.vmap(observe)(seats), action_mask=mask)
        mask = None if self.key[0].startswith("minatar") else legal
        discount = jnp.where(state.seat == seat_before, 1.0, -1.0) if self.opponent == "turns" else None
        return Step(observe(state.seat), action_mask=mask, discount=discount)


names, make = add_suite(PgxEnvironment)


def _is_over(game: Any) -> jax.Array:
    return game.terminated | game.truncated


def _unseen(game: Any) -> Any:
    return game.replace(observation=None)  # computed only when needed
