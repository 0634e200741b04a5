"""Addresses in options that name folders of this machine."""

from pathlib import Path

import pytest

from lit_data.app.cli import main


@pytest.fixture(autouse=True)
def _work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        "fit paths.runs=s3://bucket/runs",
        "fit paths.cache=s3://bucket/cache",
        "fit data.cache_dir=gs://bucket/cache",
        "fit callbacks.memory.path=s3://bucket/memory",
        "fit callbacks.interrupt.path=s3:/bucket/now.ckpt",
        "predict predict.folder=s3:/bucket/masks",
        "prepare prepare.export=file:///data/export",
        "fit sweep.resume=s3://bucket/sweep -m seed=1,2",
    ],
)
def test_an_address_is_refused_where_a_folder_is_meant(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words.split(), "+experiment=stripe"]) == 2
    err = capsys.readouterr().err
    key, _, address = words.split()[1].partition("=")
    assert err.startswith(f"lit_data: {key}={address} is an address, but ")
    assert err.endswith("callbacks.last.dirpath=s3://BUCKET/RUN/checkpoints\n")
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
