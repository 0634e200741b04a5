"""What proves the claims of BENCHMARKS.md, beside the package: ``python -m benchmarks SUITE [overrides]``."""
