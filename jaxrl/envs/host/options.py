"""A check of host environments' options from files, which must not name programs, files or places."""

import re
from collections.abc import Mapping
from typing import Any

from jaxrl.core.errors import ConfigError

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def check_recorded(env: str, options: Mapping[str, Any]) -> None:
    """Check that options from a file are numbers, booleans and plain words, or lists and tables of them.

    The author of the file chose them, and an environment may open, load or run what a text names.

    Args:
      env: the environment's name, for the message.
      options: the options by name.

    Raises:
      ConfigError: some are not; names all of them.
    """
    if strange := sorted(str(name) for name, value in options.items() if not _is_plain(value)):
        raise ConfigError(
            f"{env} is to be made with {', '.join(strange)[:200]}, whose values a file may not choose: only numbers, "
            "True, False and plain words; hand the environment in: env=jaxrl.make(...)"
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None
    if isinstance(value, Mapping):
        return all(_is_plain(part) for part in (*value.keys(), *value.values()))
    if isinstance(value, list | tuple):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, bool | int | float)
