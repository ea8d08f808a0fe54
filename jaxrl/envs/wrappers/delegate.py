"""What a wrapper leaves as it is."""

from typing import Any


def same(attribute: str) -> Any:
    """A property that is the wrapped environment's: `name = same("name")`."""
    return property(lambda self: getattr(self.env, attribute))
