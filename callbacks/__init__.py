"""Callbacks for any LightningModule and any dataloader. Import them from ``lit_data.callbacks``."""

from lit_data.callbacks.data_wait_monitor import DataWaitMonitor
from lit_data.callbacks.sample_digest import SampleDigest
from lit_data.callbacks.save_on_signal import SaveOnSignal

__all__ = ["DataWaitMonitor", "SampleDigest", "SaveOnSignal"]
