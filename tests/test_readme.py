"""What README.md says can be typed."""

import re
import shlex
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import cv2
import lightning as L
import numpy as np
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from lit_data.app import ON_RUNS, TOOLS, api
from lit_data.app.build import Run as Objects
from lit_data.app.configuration.compose import compose
from lit_data.testing import QUIET
from lit_inspect import Verdict
from lit_inspect.overlay import Shown
from lit_inspect.rows import ArrayRows

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PATHS = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/scale").glob("*.md"))]
PAGES = {
    path.relative_to(ROOT / "docs").with_suffix("").as_posix(): path.read_text(encoding="utf-8")
    for path in PATHS
}

_Trainer = L.Trainer
_PROGRAM = re.compile(r"(?:python -m lit_data|(?<![\w-])lit-data) (?=[a-z])")


def _list_commands(text: str) -> list[str]:
    """The command lines that can be run as they stand."""
    lines = [
        line.split("#")[0].replace("--cfg job", "").strip()
        for line in text.splitlines()
        if _PROGRAM.search(line)
    ]
    # `parts` is the package that tests/test_extend writes, installs and runs.
    elsewhere = "`|--config-dir|my_conf|experiment=parts"
    return [line for line in lines if line and not re.search(elsewhere, line)]


def _list_short_commands(text: str) -> list[str]:
    """The commands within the text of pages that say that these begin with the name of the program."""
    if not re.search("begins? with `lit-data`", text):
        return []
    lines = re.findall(r"`((?:fit|predict|prepare|show|test) [^`]*experiment=[^`]*)`", text)
    return [f"lit-data {line}" for line in lines]


COMMANDS = [
    *_list_commands(README),
    *(
        pytest.param(line, marks=pytest.mark.slow)
        for name, page in PAGES.items()
        if not name.startswith("scale/")  # tests/scale composes those
        for line in (*_list_commands(page), *_list_short_commands(page))
    ),
]


def test_it_stays_short() -> None:
    assert len(README.splitlines()) <= 120


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *PATHS):
        for target in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), (page.name, target)


def test_pages_and_notebooks_type_one_name_of_the_command() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "notebooks").glob("*.ipynb")]
    for text in (*PAGES.values(), *texts):
        # Not behind `torchrun -m`, which starts a module.
        assert not re.search(r"python -m lit_data [a-z]", text)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_compose(line: str, tmp_path: Path) -> None:
    rest = _PROGRAM.split(line)[1]
    command, *words = shlex.split(rest)
    if command in ON_RUNS and "=" not in words[0]:
        words.pop(0)  # the run, whose own words a test of it follows
    if command in TOOLS:  # has no configuration
        return
    packages = [name for flag, name in pairwise(words) if flag == "--package"]
    overrides = [word for word in words if word not in ("-m", "--package", *packages)]
    overrides = [word for word in overrides if "interval(" not in word]  # of a search alone
    single = [re.sub(r"=(range\()?([\w.]+),[\w.,]+\)?$", r"=\2", word) for word in overrides]
    cfg = compose(command, [*single, f"paths.run={tmp_path}"], packages=packages)
    assert cfg.command == command


@pytest.mark.parametrize(
    "page", sorted({*PAGES} - {"folders"})
)  # which is made of what datasets say
def test_options_in_the_text_are_quoted_as_a_shell_needs_them(page: str) -> None:
    parser = OverridesParser.create()
    for text in re.findall(r"`([^`\n]+)`", PAGES[page]):
        if not re.match(r"'?(data|model|predict|synthesis|trainer)\.[\w.]+=", text) or "<" in text:
            continue
        for word in shlex.split(text):
            # The program itself quotes texts beyond ASCII; words such as --package are no options.
            if "=" in word and word.isascii():
                assert parser.parse_override(word).key_or_group


def test_layouts_of_the_table_compose(tmp_path: Path) -> None:
    overrides = [
        text.strip("'") for text in re.findall(r"`('?data\.[^`]*=[^`]*)`", PAGES["stripe"])
    ]
    assert len(overrides) >= 4
    for text in overrides:
        value = text.replace("<folder>", "folder")
        assert compose("fit", [value, f"paths.run={tmp_path}"]).command == "fit"


def test_the_python_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class YourModule(BoringModel):
        def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
            target, ref1, ref2, mask = batch
            assert target.shape == ref1.shape == ref2.shape == mask.shape
            return self.layer(target[:, 0, 0, :32]).sum()

        def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
            assert len(batch) == 4

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_DATA_CACHE", str(tmp_path / "cache"))

    class QuietTrainer(_Trainer):
        def __init__(self, callbacks: list[L.Callback]) -> None:
            super().__init__(max_epochs=1, callbacks=callbacks, **QUIET)

    monkeypatch.setattr(L, "Trainer", QuietTrainer)
    Path("images").mkdir()
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (128, 128, 3), dtype=np.uint8)
        cv2.imwrite(f"images/{number}.png", pixels)
    code = _find_code(README)
    assert len(code) == 2
    exec(code[0], {"YourModule": YourModule})


def _find_code(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("code", [*_find_code(README)[1:], *_find_code(PAGES["commands"])])
def test_examples_of_commands_name_what_there_is(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Run:
        folder = Path("run")
        metrics: ClassVar = {"test/average_precision": 0.5}

        def predict(self, *words: str) -> "Run":
            assert compose("predict", ["experiment=stripe", *words, "paths.run=run"])
            return self

        def load_model(self) -> None: ...

        def predict_image(self, image: str) -> Verdict:
            probability, pixels = (
                np.zeros((8, 8), np.float32),
                ArrayRows(np.zeros((3, 8, 8), np.uint8)),
            )
            return Verdict("good", 0.1, (), probability, shown=Shown(pixels, (0, 1, 2), 0.5))

    def fit(experiment: str, *words: str) -> Run:
        assert compose("fit", [f"experiment={experiment}", *words, "paths.run=run"])
        return Run()

    def build(experiment: str, *words: str) -> SimpleNamespace:
        fit(experiment, *words)
        assert {"trainer", "model", "datamodule", "start"} <= {*Objects.__annotations__}
        trainer = SimpleNamespace(fit=lambda model, data, ckpt_path: None)
        return SimpleNamespace(trainer=trainer, model=None, datamodule=None, start=None)

    parts = {*vars(api.Run), *api.Run.__annotations__}
    assert {"predict", "predict_image", "load_model", "metrics", "folder"} <= parts
    monkeypatch.setattr(api, "fit", fit)
    monkeypatch.setattr(api, "build", build)
    monkeypatch.setattr(api, "open_run", lambda folder: Run())
    exec(code, {})


def test_the_loader_example_runs() -> None:
    [code] = _find_code(PAGES["loading"])
    names = {"your_dataset": [(torch.zeros(3), number) for number in range(100)]}
    exec(code + "    seen = [*globals().get('seen', []), *batch[1].tolist()]\n", names)
    assert sorted(names["seen"]) == list(range(100))


def test_the_callbacks_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make = lambda max_epochs, callbacks: _Trainer(callbacks=callbacks, max_epochs=1, **QUIET)  # noqa: E731
    monkeypatch.setattr(L, "Trainer", make)
    [code] = _find_code(PAGES["callbacks"])
    module = BoringModel()
    exec(code, {"your_module": module, "your_dataloader": module.train_dataloader()})
    assert list(tmp_path.iterdir()) == []  # without a logger or a path nothing is drawn
