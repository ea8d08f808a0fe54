"""Suites of JAX environments, each for a package that is an extra with the suite's name."""
