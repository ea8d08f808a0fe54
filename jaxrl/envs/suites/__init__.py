"""Adapters for suites of JAX environments; the optional extra with a suite's name installs its package."""
