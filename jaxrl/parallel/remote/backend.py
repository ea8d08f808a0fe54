"""The interface of the backends that run remote actors: processes of this machine, or a Ray cluster."""

from typing import Any, Protocol


class LostActorError(Exception):
    """An actor's process, machine or connection failed.

    Args:
      how: a short description, such as "died (exit status 1)".
      details: a longer description.
    """

    def __init__(self, how: str, details: str = ""):
        super().__init__(details or how)
        self.how = how


class ActorRaisedError(Exception):
    """An actor's method raised an error. The message is its traceback; the cause is the error if it can be sent."""


class Backend(Protocol):
    """A way to run objects, called actors, in other processes. Each actor answers one call at a time.

    Attributes:
      kind: the name of its actors, for messages.
    """

    kind: str

    def start(self, cls: type, arguments: tuple[Any, ...]) -> Any:
        """Start an actor, an object of class `cls`, without waiting, and return its handle."""
        ...

    def call(self, actor: Any, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method without waiting, and return a reference to its answer."""
        ...

    def answer(self, reference: Any, timeout: float) -> Any:
        """Wait at most `timeout` seconds for the answer of a call, and return it.

        Raises:
          TimeoutError: there was no answer in time.
          LostActorError: the actor was lost, or could not be made.
          ActorRaisedError: the method raised an error.
        """
        ...

    def shared(self, value: Any) -> Any:
        """Return a form of `value` to pass to calls of several actors."""
        ...

    def kill(self, actor: Any) -> None:
        """End an actor, even while another thread waits for its answer; do nothing if it has ended."""
        ...
