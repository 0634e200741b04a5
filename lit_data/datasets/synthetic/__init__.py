"""Synthetic datasets, one for each kind of data, generated once in the cache for tests and first steps."""
