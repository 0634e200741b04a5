"""Pieces of a planned batch give what the whole gives: memory may run out while it is drawn and augmented."""

from pathlib import Path

import pytest
import torch

from lit_data.app.build import build_datamodule
from lit_data.app.configuration.compose import compose
from lit_data.core.batch_form import slice_batch
from tests.outputs import MARKS, OBJECTS, QUICK, STRIPES

TOYS = {"stripe": (*STRIPES, "data.backend=device"), "watermark": MARKS, "gan": OBJECTS}


@pytest.mark.parametrize("experiment", TOYS)
def test_a_planned_batch_may_be_finished_in_pieces(experiment: str, tmp_path: Path) -> None:
    words = [
        f"+experiment={experiment}",
        *QUICK,
        *TOYS[experiment],
        f"paths.run={tmp_path}",
        "data.loader.batch_size=4",
    ]
    data = build_datamodule(compose("fit", words))
    data.setup("fit")
    loader = data.make_loader("train")
    planned = data.plan_batch(next(iter(loader)), "train")
    count = len(planned["index"])
    assert count > 2
    whole = data.finish_batch(dict(planned), "train")
    pieces = [slice_batch(planned, start, start + 1, count) for start in range(count)]
    finished = [data.finish_batch(piece, "train") for piece in pieces]
    for name, values in whole.items():
        if isinstance(values, torch.Tensor) and values.ndim:
            torch.testing.assert_close(torch.cat([piece[name] for piece in finished]), values)
    loader.close()
