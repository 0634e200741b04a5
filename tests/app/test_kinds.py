"""The table of kinds of data by commands in docs/commands.md: each cell works, or is refused as it says."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_data.app.cli import main
from tests import outputs
from tests.helpers.families import run_family

PAGE = (Path(__file__).resolve().parents[2] / "docs/commands.md").read_text(encoding="utf-8")
LIMIT_S = 600
QUICK = (*outputs.QUICK, *outputs.NO_TIMELINES)
TOYS = {
    "stripe": outputs.STRIPES,
    "segmentation": outputs.EXPERIMENTS["segmentation"],
    "classification": (
        *outputs.EXPERIMENTS["classification"],
        "model.net.width=8",
        "data.size_px=96",
        "trainer.max_epochs=6",  # after which images are ranked better than by chance
    ),
    "anomaly": ("data.samples={count: 40, size_px: [128, 128]}", "data.size_px=128"),
    # Two ranks share the samples of each split, and some validate without a box.
    "detection": (
        *outputs.BOXES,
        "data.samples.count=70",
        "data.mosaic.probability=0",
        "model.net.finest_stride_px=4",
        "trainer.max_epochs=12",  # after which boxes are better than chance
    ),
    "ct": (*outputs.VOLUMES, "data.samples.count=14"),
    "ct_segmentation": outputs.VOXELS,
    "watermark": outputs.MARKS,
    "gan": outputs.GENERATED,
}
RANKS = " trainer=ddp_cpu"
REASONS = {  # what a refusal says, by the number of its reason on the page
    "1": r"calibrate is for verdicts on whole images, and a \w+ has none",
    "2": r"pod draws defects and looks for them in maps, which a \w+ has none of",
    "3": r"a \w+ is not exported, as lit_inspect",
    "4": r"pod draws defects at the size of the files",
    "5": r"2 processes would each learn from a part of the images",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]


def _read_table() -> dict[str, dict[str, str]]:
    """Cells of the table of the page, by kind and command."""
    lines = PAGE.split("## Kinds and commands")[1].split("\n\n## ")[0].splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    kinds = [cell.strip("`") for cell in rows[0][1:]]
    table: dict[str, dict[str, str]] = {kind: {} for kind in kinds}
    for names, *cells in rows[2:]:
        for command in re.findall(r"`(.+?)`", names):
            for kind, cell in zip(kinds, cells, strict=True):
                table[kind][command] = cell
    return table


def _toy(kind: str, folder: Path) -> list[str]:
    places = [f"paths.runs={folder}/runs", f"paths.cache={folder}/cache"]
    return [f"+experiment={kind}", *QUICK, *TOYS[kind], *places]


def _words(kind: str, command: str, folder: Path) -> list[str]:
    run, toy = str(folder / "fit"), _toy(kind, folder)
    places = toy[-2:]
    words = {
        "fit": [*toy, f"hydra.run.dir={run}"],
        "fit -m": [*toy, "seed=1,2", "sweep.isolate=none", f"hydra.sweep.dir={folder}/sweep"],
        "prepare": [*toy, "prepare.check=true"],
        "show": [*toy, "show.count=2"],
        "report": [run],
        "export": [run, f"{folder}/part.inspect"],
        "calibrate": [run, "images=val", "miss=0.96", "false_alarms=0.96", *places],
        "pod": [run, "images=val", "size_px=[2,16]", *places],
        "benchmark": [*toy, "benchmark.seconds_per_row=0.05", "benchmark.repeats=1"],
        "doctor": toy,
    }
    words[f"fit{RANKS}"] = toy
    own = words.get(command, [*toy, f"ckpt={run}/checkpoints/best.ckpt"])
    return [*command.split(), *own]


def test_the_table_names_each_kind_and_each_reason() -> None:
    table = _read_table()
    assert table.keys() == TOYS.keys()
    cells = {cell for kind in table.values() for cell in kind.values()}
    assert cells == {"yes", *REASONS}
    for number in REASONS:
        assert re.search(rf"^{number}\. ", PAGE.split("## Kinds and commands")[1], re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("kind", TOYS)
def test_each_cell_works_or_says_why_not(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: str) -> tuple[int, str]:
        words = _words(kind, command, tmp_path)
        if command.endswith(RANKS):
            lit_data = [sys.executable, "-W", "ignore", "-m", "lit_data"]
            return run_family([*lit_data, *words], limit_s=LIMIT_S, cwd=tmp_path)
        code = main(words)
        return code, capsys.readouterr().err

    _check_cells(_read_table()[kind], run)
    assert len(list((tmp_path / "sweep").glob("*/checkpoints/best.ckpt"))) == 2


def _check_cells(cells: dict[str, str], run: Callable[[str], tuple[int, str]]) -> None:
    for command, cell in cells.items():
        code, said = run(command)
        if cell == "yes":
            assert code == 0, (command, said)
        else:
            assert code == 2, (command, said)
            assert re.search(REASONS[cell], said), (command, said)
