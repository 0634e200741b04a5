"""Every command gives from shards what it gives from files, for each kind of data."""

import json
from pathlib import Path

import pytest

from lit_data.app.cli import main
from tests.outputs import BOXES, GENERATED, MARKS, PHOTOGRAPHS, STRIPES, VOLUMES

KINDS = {
    "stripe": (*STRIPES, "data.patterns=['train/*','val/*','test/*']"),
    "segmentation": (*PHOTOGRAPHS, "data.patch_px=32", "model=unet"),
    "classification": ("model=classifier", *PHOTOGRAPHS, "data.size_px=32"),
    "detection": (*BOXES, "data.mosaic_on=device"),
    "watermark": MARKS,
    "ct": VOLUMES,
    "gan": (*GENERATED, "data.loader.batch_size=2"),
}
PACKED = ("stripe", "segmentation", "detection")
"""Kinds with references, masks and boxes; packed images of the others are read as those are."""
QUICK = (
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "trainer.accelerator=cpu",
    "+trainer.enable_model_summary=false",
    "data.loader.num_workers=0",
)
MEASURED = (
    "benchmark.repeats=1",
    "benchmark.seconds_per_row=0.01",
    "benchmark.samples_per_row=4",
    "benchmark.workers=[1]",
    "benchmark.batch_sizes=[2]",
    "benchmark.micro_batch_sizes=[2]",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("kind", KINDS)
def test_commands_give_what_they_give_from_files(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(command: str, name: str, *words: str, code: int = 0) -> Path:
        folder = tmp_path / name
        places = [f"paths.run={folder}", f"hydra.run.dir={folder}", f"paths.cache={tmp_path}/cache"]
        options = [f"+experiment={kind}", *KINDS[kind], *QUICK, *places, *words]
        assert main([command, *options]) == code
        return folder

    run("prepare", "drawn")
    (drawn,) = (path for path in (tmp_path / "cache/samples").iterdir() if path.is_dir())
    files, shards = f"data.root={drawn}", "data.root=set.shards"
    run("prepare", "prepared", files, "prepare.shards=set.shards", "prepare.shard_bytes=40000")
    assert f"read it with {shards}" in capsys.readouterr().out
    folders = [run("fit", "files", files), run("fit", "shards", shards)]
    if kind in PACKED:
        packing = ["prepare.encoding=source", "prepare.shard_bytes=40000"]
        run("prepare", "packed", files, "prepare.shards=packed.shards", *packing)
        folders.append(run("fit", "from_packed", "data.root=packed.shards"))
    _assert_equal_runs(folders)
    ckpt = f"ckpt={tmp_path}/files/checkpoints/last.ckpt"
    found = [run("predict", "from_files", ckpt, files), run("predict", "from_shards", ckpt, shards)]
    names, others = (
        {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        for folder in found
    )
    assert names == others
    _assert_equal_files(found, names)
    if kind in ("segmentation", "ct"):
        go_on = ["predict.resume=true", f"predict.folder={found[1]}"]
        resumed = run("predict", "from_shards", ckpt, shards, *go_on)
        kept = json.loads((resumed / "summary.json").read_text())["predict/images_kept"]
        assert kept == len((resumed / "images.jsonl").read_text().splitlines()) > 4
    if kind in ("segmentation", "ct"):
        run("prepare", "verified", shards, "prepare.verify=true")
        run("fit", "refused", shards, "prepare.shards=x", code=2)
    if kind == "segmentation":
        capsys.readouterr()
        places = [f"paths.runs={tmp_path}", f"paths.cache={tmp_path}/cache"]
        assert main(["prepare", "+experiment=ct", shards, *places]) == 4
        message = "no volume shards of version 2 (it holds 'shards' of version 2)"
        assert message in capsys.readouterr().err
    if kind in ("stripe", "ct"):  # the others' loaders read the same banks
        run("show", "shown", shards)
        run("benchmark", "measured", shards, *MEASURED)


def _assert_equal_runs(folders: list[Path]) -> None:
    """Equal scores on the test split, and the same samples."""
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    scores = [{key: value for key, value in each.items() if "test/" in key} for each in summaries]
    assert scores == [scores[0]] * len(scores)
    digests = {summary["samples_sha256"] for summary in summaries}
    assert len(digests) == 1
    assert digests != {None}


def _assert_equal_files(folders: list[Path], names: set[Path]) -> None:
    """Tables, pictures and detections of two predictions are the same, but for seconds."""
    suffixes = (".csv", ".png", ".txt", ".npy")
    same = [name for name in names if name.suffix in suffixes or name.name == "detections.json"]
    assert len(same) > 1
    for name in same:
        assert _without_seconds(folders[0] / name) == _without_seconds(folders[1] / name), name


def _without_seconds(path: Path) -> bytes:
    """What a file holds; of a table with seconds in its last column all others."""
    lines = path.read_bytes().split(b"\r\n")
    if not lines[0].endswith(b",seconds"):
        return b"\n".join(lines)
    return b"\n".join(line.rpartition(b",")[0] for line in lines)
