"""Parsing of schedules from text, without importing JAX."""

import math

from jaxrl.core.errors import ConfigError, unknown

USAGE = {
    "constant": "constant:VALUE",
    "linear": "linear:START:END[:UNTIL]",
    "cosine": "cosine:START:END[:UNTIL]",
    "exponential": "exponential:START:END[:UNTIL]",
    "piecewise": "piecewise:VALUE:BOUNDARY:VALUE[:BOUNDARY:VALUE ...]",
}
# Minimum and maximum count of numbers per schedule; a test compares them with the classes of `jaxrl.core.schedules`.
COUNTS = {"constant": (1, 1), "linear": (2, 3), "cosine": (2, 3), "exponential": (2, 3)}


def split(text: str) -> float | tuple[str, tuple[float, ...]]:
    """Parse text into a number, or into the name of a schedule and its numbers, in the order of the text.

    The schedule's class checks whether the numbers are valid, for example increasing boundaries.

    Raises:
      ConfigError: the text is neither a number nor a schedule; the message explains what is allowed.
    """
    name, *parts = (part.strip() for part in text.split(":"))
    if not parts:
        number = _number(name)
        if number is None:
            if name.lower() in USAGE:
                raise ConfigError(f"{text!r} needs numbers; write {USAGE[name.lower()]}")
            raise ConfigError(f"{text!r} is neither a number nor a schedule; schedules: {', '.join(USAGE.values())}")
        if not math.isfinite(number):
            raise ConfigError(f"{text!r} is not a finite number")
        return number
    name = name.lower()
    if name not in USAGE:
        raise unknown("schedule", name, USAGE)
    numbers = []
    for part in parts:
        number = _number(part)
        if number is None:
            raise ConfigError(f"{part!r} in {text!r} is not a number; write {USAGE[name]}")
        numbers.append(number)
    fewest, most = COUNTS.get(name, (1, len(numbers)))
    if not fewest <= len(numbers) <= most or (name == "piecewise" and len(numbers) % 2 == 0):
        raise ConfigError(f"{text!r} has {len(numbers)} numbers; write {USAGE[name]}")
    return name, tuple(numbers)


def _number(text):
    try:
        return float(text)
    except ValueError:
        return None
