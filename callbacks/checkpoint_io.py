"""`AtomicCheckpointIO`: a checkpoint is there as a whole or as it was before, whatever happens while it is written."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lit_data.files import replacing


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, brings it to the disk, and renames it.

    Lightning builds a checkpoint in memory and then in TMPDIR, and moves it from there: where that is another file
    system, the move is a copy over the old checkpoint, which a kill leaves cut short. Addresses such as ``s3://`` are
    written as Lightning writes them.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            torch.save(checkpoint, file)
