"""Adapters of suites of JAX environments; each suite's package is an extra with the suite's name."""
