"""The parts of `AdaptiveBatchSize`: micro-batches, the search for a size, and undoing failed steps."""
