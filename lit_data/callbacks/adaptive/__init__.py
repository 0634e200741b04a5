"""The parts of `AdaptiveBatchSize`: micro-batches, the search for a size, and how a failed step is undone."""
