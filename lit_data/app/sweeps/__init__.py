"""Sweeps: several jobs of one command; Hydra's callback that ends one with its tables and its page."""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from typing_extensions import override


class SweepTable(Callback):
    """Prints the table of a sweep and writes sweep.csv, sweep.png, sweep.json and report.html."""

    @override
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        # With Matplotlib; Hydra makes this callback for single runs too.
        from lit_data.app.sweeps.table import report_sweep

        report_sweep(config, Path(config.hydra.sweep.dir))
