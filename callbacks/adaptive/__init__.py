"""The parts of `AdaptiveBatchSize`: pieces of a batch, the search for a size, and how a failed step is undone."""
