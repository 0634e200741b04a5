"""The table of kinds of data by commands in docs/commands.md: each cell works, or is refused as it says."""

import re
from pathlib import Path

import pytest

from lit_data.cli import main
from tests import outputs

PAGE = (Path(__file__).resolve().parents[2] / "docs/commands.md").read_text(encoding="utf-8")
QUICK = (*outputs.QUICK, *outputs.NO_TIMELINES)
TOYS = {
    **{name: outputs.EXPERIMENTS[name] for name in ("stripe", "segmentation", "classification")},
    "anomaly": ("data.samples={count: 40, size_px: [128, 128]}", "data.size_px=128"),
    "detection": (
        *outputs.EXPERIMENTS["detection"],
        *("data.samples={count: 70, size_px: [64, 80]}", "data.mosaic.probability=0"),
        *("model.net.finest_stride_px=4", "trainer.max_epochs=12"),
    ),  # whose boxes are better than chance, and of which an image without any validates
    **{name: outputs.EXPERIMENTS[name] for name in ("ct", "ct_segmentation")},
    **{name: outputs.EXPERIMENTS[name] for name in ("watermark", "gan")},
}
REASONS = {  # what a refusal says, by the number of its reason on the page
    "1": r"calibrate is for verdicts on whole images, and a \w+ has none",
    "2": r"pod draws defects and looks for them in maps, which a \w+ has none of",
    "3": r"a \w+ is not exported, as lit_inspect",
    "4": r"pod draws defects at the size of the files",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]


def _read_table() -> dict[str, dict[str, str]]:
    """Cells of the table of the page, by kind and command."""
    lines = PAGE.split("## Kinds and commands")[1].split("\n\n## ")[0].splitlines()
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in lines
        if line[:1] == "|"
    ]
    kinds = rows[0][1:]
    table: dict[str, dict[str, str]] = {kind: {} for kind in kinds}
    for names, *cells in rows[2:]:
        for command in re.findall(r"\w+", names):
            for kind, cell in zip(kinds, cells, strict=True):
                table[kind][command] = cell
    return table


def _words(kind: str, command: str, folder: Path) -> list[str]:
    run, places = str(folder / "fit"), [f"paths.runs={folder}/runs", f"paths.cache={folder}/cache"]
    toy = [f"+experiment={kind}", *QUICK, *TOYS[kind]]
    checkpoint = f"ckpt={run}/checkpoints/best.ckpt"
    words = {
        "fit": [*toy, f"hydra.run.dir={run}", *places],
        "prepare": [*toy, "prepare.check=true", *places],
        "show": [*toy, "show.count=2", *places],
        "report": [run],
        "export": [run, f"{folder}/part.inspect"],
        "calibrate": [run, "images=val", "miss=0.96", "false_alarms=0.96", *places],
        "pod": [run, "images=val", "size_px=[2,16]", *places],
        "benchmark": [*toy, "benchmark.seconds_per_row=0.05", "benchmark.repeats=1", *places],
        "doctor": [*toy, *places],
    }
    return [command, *words.get(command, [*toy, checkpoint, *places])]


def test_the_table_names_each_kind_and_each_reason() -> None:
    table = _read_table()
    assert table.keys() == TOYS.keys()
    cells = {cell for kind in table.values() for cell in kind.values()}
    assert cells == {"yes", *REASONS}
    for number in REASONS:
        assert re.search(rf"^{number}\. ", PAGE.split("## Kinds and commands")[1], re.MULTILINE)


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("kind", TOYS)
def test_each_cell_works_or_says_why_not(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, cell in _read_table()[kind].items():
        code = main(_words(kind, command, tmp_path))
        said = capsys.readouterr().err
        if cell == "yes":
            assert code == 0, (command, said)
        else:
            assert code == 2, (command, said)
            assert re.search(REASONS[cell], said), (command, said)
