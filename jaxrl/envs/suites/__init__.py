"""Suites of JAX environments, each from a package that may not be installed, with an extra of its name."""
