"""Objects of a run, and their data before a Trainer has them."""

from pathlib import Path
from typing import Any

import pytest

from lit_data.app import api
from lit_data.app.build import prepare
from lit_data.datamodules.inspection import InspectionDataModule
from lit_data.datamodules.source import Source


def test_data_to_learn_from_are_refreshed_once_and_checked_before_they_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def note(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def call(self: object) -> Any:
            calls.append(name)
            return method(self)

        monkeypatch.setattr(owner, name, call)

    folders = (f"paths.run={tmp_path}/run", f"paths.cache={tmp_path}/cache")
    samples = "data.samples={count: 4, size_px: [64, 64]}"
    built = api.build("segmentation", samples, "data.patch_px=32", *folders)
    note(Source, "refresh")
    note(InspectionDataModule, "check_files")
    note(type(built.datamodule), "open_source")
    prepare(built.datamodule, learns=True)
    assert calls == ["refresh", "check_files", "open_source"]
