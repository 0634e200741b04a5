"""Data, augmentation and callbacks for PyTorch Lightning.

They keep the accelerator fed and the run alive.

Import from the sub-packages (``lit_data.datamodules``, ``lit_data.callbacks``, ...). This file
re-exports nothing, so that a worker process which imports a dataset does not also import Lightning,
Kornia and Hydra.
"""

import sys

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError(
        "lit_data locks and maps files as Linux and macOS do: on Windows run it within WSL 2"
    )
