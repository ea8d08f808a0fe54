"""The former place of `restart` and `transition`; new code imports them from `jaxrl.envs.episode`."""

from jaxrl.envs.episode import restart, transition

__all__ = ["restart", "transition"]
