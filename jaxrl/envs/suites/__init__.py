"""Suites of JAX environments, each of a package of its own, which may not be installed: an extra a suite."""
