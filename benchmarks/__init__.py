"""Comparisons behind the figures of BENCHMARKS.md: ``python -m benchmarks SUITE [overrides]``."""
