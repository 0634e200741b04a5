"""From a dataset to batches: order, staging, workers."""

from lit_data.loading.loader import MicroBatchLoader
from lit_data.loading.options import LoaderOptions

__all__ = ["LoaderOptions", "MicroBatchLoader"]
