"""Callbacks for any LightningModule and any dataloader. Import them from ``lit_data.callbacks``."""

from lit_data.callbacks.adaptive_batch_size import AdaptiveBatchSize
from lit_data.callbacks.amp import AMP
from lit_data.callbacks.data_wait_monitor import DataWaitMonitor
from lit_data.callbacks.ema import EMA
from lit_data.callbacks.empty_cache import EmptyCache
from lit_data.callbacks.gradient_checkpointing import GradientCheckpointing
from lit_data.callbacks.image_metrics import ImageMetrics
from lit_data.callbacks.memory_monitor import MemoryMonitor
from lit_data.callbacks.sample_digest import SampleDigest
from lit_data.callbacks.sample_images import SampleImages
from lit_data.callbacks.save_on_signal import SaveOnSignal

__all__ = [
    "AMP",
    "EMA",
    "AdaptiveBatchSize",
    "DataWaitMonitor",
    "EmptyCache",
    "GradientCheckpointing",
    "ImageMetrics",
    "MemoryMonitor",
    "SampleDigest",
    "SampleImages",
    "SaveOnSignal",
]
