"""docs/scale/slurm.md, with submitit's local executor in the place of a cluster."""

from pathlib import Path

import pytest

from tests.scale.parts import PARTS, check_parts
from tests.scale.recipes import SMALL, list_bytes, list_commands, run_python, write_boards

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("without_pictures"),
]


def _localise(words: list[str], folder: Path) -> list[str]:
    """Words of a command of the page, for this machine."""
    changed = []
    for word in words:
        if word.startswith("hydra.launcher.gpus"):
            continue
        word = word.replace("/data", str(folder)).replace("=slurm", "=slurm_local")
        word = word.replace("range(0,64)", f"range(0,{PARTS})").replace("range(0,16)", "range(0,2)")
        changed.append(word.replace("of=64", f"of={PARTS}").replace("of=16", "of=2"))
    return changed


def test_an_array_of_jobs_prepares_parts(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="needs pip install -e '.[sweep]'")
    write_boards(tmp_path / "boards")
    commands = [words for words in list_commands("slurm") if words[0] == "prepare"]
    assert len(commands) == 2
    for words in commands:
        run_python(["-m", "lit_data", *_localise(words, tmp_path)], tmp_path)
    check_parts(tmp_path, died=False)


def test_an_array_of_jobs_predicts_parts(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="needs pip install -e '.[sweep]'")
    write_boards(tmp_path / "boards")
    (tmp_path / "new").symlink_to(tmp_path / "boards/images")
    words = ["fit", "+experiment=segmentation", f"data.root={tmp_path}/boards", "data.patch_px=64"]
    words += [*SMALL, "trainer=cpu", f"hydra.run.dir={tmp_path}/runs/night"]
    run_python(["-m", "lit_data", *words], tmp_path)
    commands = [words for words in list_commands("slurm") if words[0] == "predict"]
    assert len(commands) == 2
    for words in commands:
        run_python(["-m", "lit_data", *_localise(words, tmp_path)], tmp_path)
    alone = [word for word in _localise(commands[1], tmp_path) if not word.endswith("finish=true")]
    alone = [word.replace("/found", "/alone") for word in alone]
    run_python(["-m", "lit_data", *alone], tmp_path)
    for name in ("images.csv", "defects.csv"):
        assert (tmp_path / "found" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    maps = list_bytes(tmp_path / "found/maps")
    assert len(maps) == 12
    assert maps == list_bytes(tmp_path / "alone/maps")
