"""From a dataset to batches: order, micro-batches, workers."""

from lit_data.loading.loader import MicroBatchLoader
from lit_data.loading.options import LoaderOptions

__all__ = ["LoaderOptions", "MicroBatchLoader"]
