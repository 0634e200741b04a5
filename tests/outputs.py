"""What users get of every experiment at toy size, to compare before and after a change of the code.

``python -m tests.outputs write FILE`` runs ``fit``, ``test``, ``show``, ``predict`` and ``prepare``
for each experiment and writes exit codes, ``samples_sha256``, keys and metrics of the summaries,
and the names of all files. ``python -m tests.outputs compare FILE`` runs them again and lists what
differs; it ends with 1 if anything does. Further words choose experiments: ``python -m
tests.outputs compare FILE stripe ct``.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from lit_data.app.cli import main

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
QUICK = (
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "+trainer.enable_model_summary=false",
    "data.loader.batch_size=4",
    "data.loader.num_workers=0",
)
NO_TIMELINES = ("callbacks.memory.plot=false", "callbacks.data_wait.plot=false")
"""Overrides of runs whose memory.png and throughput.png nobody looks at."""
STRIPES = (
    "data.samples={count: 6, height_px: 128, width_px: 128}",
    "data.patch_px=64",
    "data.stride_px=64",
)
BOXES = (
    "data.samples={count: 8, size_px: [64, 80]}",
    "data.size_px=64",
    "data.mosaic.close_epochs=0",
    "model.net.width=8",
    "model.score_threshold=0.01",
)
VOLUMES = (
    "data.samples={count: 6, shape: [24, 24, 24]}",
    "data.max_points=100",
    "data.processes=1",
    "model.net.grid=8",
    "model.net.width=4",
    "model.net.hidden=8",
)
VOXELS = (
    "data.samples={count: 6, shape: [24, 24, 24]}",
    "data.windows.size=16",
    "data.windows.per_volume=2",
    "data.processes=1",
    "model.net.width=4",
    "model.net.depth=1",
)
MARKS = (
    "data.samples={count: 6, size_px: [96, 96]}",
    "data.patch_px=64",
    "data.samples_per_image=2",
    "data.progressive=[[0,32],[1,64]]",
)
OBJECTS = ("data.samples={count: 6, size_px: [16, 16], tiles: 2}", "data.image_px=16")
GENERATED = (
    "trainer.max_epochs=2",
    "trainer.check_val_every_n_epoch=1",
    "data.image_px=16",
    "data.splits={train: 0.5, val: 0.25, test: 0.25}",
    "model.latent_size=4",
    "model.generator.width=4",
    "model.generator.max_width=8",
    "model.discriminator.width=4",
    "model.discriminator.max_width=8",
    "callbacks.images.every_n_steps=3",
    "callbacks.images.count=4",
    "callbacks.metrics.every_n_steps=3",
    "callbacks.metrics.count=8",
    "callbacks.metrics.batch_size=4",
    "data.samples={count: 8, size_px: [16, 16], tiles: 2}",
)
RAYS = (
    "model.generator.plane_px=8",
    "model.generator.points=4",
    "model.patches.size_px=8",
    "model.generator.hidden=8",
)
PHOTOGRAPHS = ("data.samples={count: 24, size_px: [96, 96]}", "model.net.width=4")
EXPERIMENTS = {
    "stripe": STRIPES,
    "steel": (*STRIPES, "--config-dir", str(EXAMPLES)),
    "detection": BOXES,
    "ct": VOLUMES,
    "ct_segmentation": VOXELS,
    "watermark": MARKS,
    "gan": GENERATED,
    "gan_rays": (*GENERATED, *RAYS),
    "segmentation": (*PHOTOGRAPHS, "data.patch_px=32", "model=unet"),
    "classification": ("model=classifier", *PHOTOGRAPHS, "data.size_px=32"),
}
COMMANDS = {
    "fit": (),
    "test": (),
    "show": ("show.count=3",),
    "predict": ("predict.threshold=0.2",),
    "prepare": ("prepare.verify=true",),
}
CHANGING = re.compile(
    r"seconds|_s$|_per_s|_bytes|fraction|_ms$|_us$|speed|host_|memory|batch_s|share_of|rss|time|wait|^folder$|^pid$|"
    r"version|command_line|device$|workers|kind|commit|hostname|started|finished|loader|limited_by"
)


def run_all(wanted: list[str]) -> dict[str, Any]:
    """Everything that users get, by experiment and command."""
    found = {}
    for experiment, words in EXPERIMENTS.items():
        if wanted and experiment not in wanted:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder, first = Path(name), [f"+experiment={experiment}", *QUICK, *words]
            first += _make_images(folder / "images") if experiment == "steel" else []
            for command, options in COMMANDS.items():
                found[f"{experiment} {command}"] = _run(folder, command, [*first, *options])
                print(experiment, command, found[f"{experiment} {command}"]["exit"], flush=True)
    return found


def _make_images(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    folder.mkdir()
    for number in range(6):
        cv2.imwrite(
            str(folder / f"{number}.jpg"),
            cv2.merge([rng.integers(60, 180, (128, 128), dtype=np.uint8)] * 3),
        )
    (folder / "bad.jpg").write_bytes(b"no image")  # what a bad file does is part of what users see
    return [f"data.root={folder}", "data.on_bad=skip"]


def _run(folder: Path, command: str, words: list[str]) -> dict[str, Any]:
    run = folder / "run" / command
    if command in ("test", "predict"):
        words = [*words, f"ckpt={folder}/run/fit/checkpoints/last.ckpt"]
    code = main(
        [command, *words, f"paths.run={run}", f"hydra.run.dir={run}", f"paths.cache={folder}/cache"]
    )
    path = run / "summary.json"
    summary = json.loads(path.read_text()) if path.is_file() else {}
    kept = {key: value for key, value in summary.items() if not CHANGING.search(key)}
    files = sorted(_name(file.relative_to(run)) for file in run.rglob("*") if file.is_file())
    return {"exit": code, "keys": sorted(summary), "values": _plain(kept, folder), "files": files}


def _name(path: Path) -> str:
    return re.sub(r"events\.out\.tfevents.*", "events", path.as_posix())


def _plain(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part, folder) for key, part in value.items()}
    return value.replace(str(folder), "FOLDER") if isinstance(value, str) else value


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    lines = []
    for key in now:
        old, new = before.get(key, {}), now[key]
        for part in ("exit", "keys", "files"):
            if old.get(part) != new[part]:
                gone, come = (
                    [x for x in a if x not in b] for a, b in _pairs(old.get(part), new[part])
                )
                lines.append(f"{key}: {part}: gone {gone}, new {come}")
        for name in old.get("values", {}).keys() & new["values"].keys():
            if old["values"][name] != new["values"][name]:
                lines.append(f"{key}: {name}: {old['values'][name]!r}, now {new['values'][name]!r}")
    return lines


def _pairs(old: Any, new: Any) -> list[tuple[list[Any], list[Any]]]:
    old, new = (value if isinstance(value, list) else [value] for value in (old, new))
    return [(old, new), (new, old)]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mode, file, *names = sys.argv[1:]
    if mode == "write":
        Path(file).write_text(json.dumps(run_all(names), indent=1, sort_keys=True) + "\n")
    else:
        lines = _differences(json.loads(Path(file).read_text()), run_all(names))
        print("\n".join(lines) or "nothing differs")
        sys.exit(bool(lines))
