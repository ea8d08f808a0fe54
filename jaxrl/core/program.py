"""What a topology gives the training loop: a program, which begins a run and carries it on, chunk by chunk."""

from typing import Protocol, runtime_checkable

import jax

from jaxrl.core.recorded import Fetch, Recorded
from jaxrl.core.report import Report
from jaxrl.core.run_state import RunState
from jaxrl.core.types import Algorithm, EnvSpec, PyTree


class RunLayout(Protocol):
    """How a run lies over the devices that learn."""

    @property
    def spec(self) -> EnvSpec: ...
    @property
    def num_envs(self) -> int:
        """Environments over all devices; 1 where nothing acts."""
        ...

    @property
    def shards(self) -> int:
        """Logical shards over all devices."""
        ...

    @property
    def dataset_fraction(self) -> float:
        """The part of every batch that comes from a dataset."""
        ...

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices that learn."""
        ...

    def samples_per_update(self, algo: Algorithm) -> int:
        """Transitions that an update draws from what the run lived through; 0 where there is no replay of it."""
        ...

    def place[T: PyTree](self, tree: T) -> T:
        """Numbers as arrays on every device, where `chunk` finds them without a transfer at every call."""
        ...


class Program[Env, Data](Protocol):
    """One run of one algorithm in one topology, checked and ready to begin.

    `Env` is what it acts in, or None; `Data` is how it gets a dataset: rows on the devices, a stream of batches, or
    None. The algorithm given to each method is the one that was bound, its numbers maybe others.
    """

    @property
    def layout(self) -> RunLayout: ...

    def steps_per_iteration(self, algo: Algorithm) -> int:
        """Environment steps of an iteration, over all environments; updates, where nothing acts."""
        ...

    def start(
        self, algo: Algorithm, env: Env, seed: int, *, saved: bool = True, dataset: Data | None = None
    ) -> RunState:
        """The state of a run that has not begun, every leaf on its devices.

        Args:
          algo, env: what runs.
          seed: of all random numbers.
          saved: whether checkpoints will hold the replays.
          dataset: what is learned from besides.

        Raises:
          ConfigError: the replays would not fit in memory.
        """
        ...

    def template(
        self, algo: Algorithm, env: Env, seed: int, *, saved: bool = True, dataset: Data | None = None
    ) -> RunState:
        """The shapes and shardings of what `start` gives, for a run that goes on; its arrays are not made.

        Environments on the host are begun.
        """
        ...

    def unsaved_state(self, algo: Algorithm) -> dict[str, PyTree]:
        """The parts of a run's state, by field, that a run which goes on cannot restore and has anew."""
        ...

    def reset_buffers(self, algo: Algorithm, env: Env, state: RunState, dataset: Data | None = None) -> RunState:
        """`state` with new buffers in place of what it has."""
        ...

    def chunk(
        self,
        algo: Algorithm,
        env: Env,
        state: RunState,
        length: int,
        total_steps_per_env: int,
        dataset: Data | None = None,
    ) -> tuple[RunState, Report]:
        """`length` iterations, dispatched and not awaited. The buffers of `state` are donated."""
        ...

    def close(self) -> None:
        """Ends what the program began: threads and environments. May be called at any time and twice."""
        ...


@runtime_checkable
class RecordingProgram[Env, Data](Program[Env, Data], Protocol):
    """A program whose environments can be recorded."""

    def recorded(self, algo: Algorithm, every: int) -> Recorded:
        """What `recorded_chunk` is told, to record about one in `every` episodes."""
        ...

    def recorded_chunk(
        self,
        algo: Algorithm,
        env: Env,
        state: RunState,
        length: int,
        total_steps_per_env: int,
        dataset: Data | None = None,
        *,
        recorded: Recorded,
    ) -> tuple[RunState, Report, Fetch]:
        """`chunk`, of `recorded.iterations` iterations at most, and what fetches its rows."""
        ...


@runtime_checkable
class CompilableProgram[Env, Data](Program[Env, Data], Protocol):
    """A program whose chunks can be compiled before its state is there."""

    def compile_chunk(
        self, algo: Algorithm, env: Env, state: RunState, dataset: Data | None = None
    ) -> jax.stages.Compiled:
        """Compiles what `chunk` runs, and runs nothing; of the state the shapes and shardings are enough.

        Returns:
          The program, which tells its memory and its text.
        """
        ...
