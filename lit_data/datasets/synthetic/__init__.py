"""Drawn sets, one for each kind of data: made once in the cache, for tests and first steps."""
