"""Pages of docs/scale as they are typed: their commands, scripts and YAML files, made small."""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

import lit_data
from tests.helpers.families import run_family
from tests.outputs import NO_TIMELINES

ROOT = Path(lit_data.__file__).parents[1]
PAGES = ROOT / "docs" / "scale"
LIMIT_S = 400.0

SMALL = [
    "trainer.max_epochs=1",
    "trainer.enable_progress_bar=false",
    "trainer.gradient_clip_val=null",
    "callbacks.amp.precision=fp32",
    "logger=none",
    "data.loader.num_workers=0",
    *NO_TIMELINES,
]
"""Words that make a training short, and alike on any number of ranks."""


def read_blocks(page: str, language: str) -> list[str]:
    """Blocks of a language on a page."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def list_commands(page: str) -> list[list[str]]:
    """Words behind ``lit-data`` of each command line of a page, in its Bash and YAML blocks."""
    blocks = [*read_blocks(page, "bash"), *read_blocks(page, "yaml")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(blocks))
    text = re.sub(r">-\n(\s+)(.*\n)((?:\1.*\n)*)", lambda m: m[0].replace("\n", " ") + "\n", text)
    commands = []
    for line in text.splitlines():
        match = re.search(r"(?:-m lit_data|(?<![\w-])lit-data) (.*)", line)
        if match:
            commands.append(shlex.split(match[1], comments=True))
    return commands


def settle(text: str, replacements: Mapping[str, str]) -> str:
    """Replace each of some texts, all of which must be there."""
    for old, new in replacements.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def run_python(words: Sequence[str], folder: Path, **variables: str) -> str:
    """Output of a Python process with its own cache, which must end well."""
    paths = os.pathsep.join((str(folder), str(ROOT)))
    code, output = run_family(
        [sys.executable, "-W", "ignore", *words],
        limit_s=LIMIT_S,
        cwd=folder,
        **{"PYTHONPATH": paths, "LIT_DATA_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
        **variables,
    )
    assert code == 0, output
    return output


def write_boards(root: Path, count: int = 12, side_px: int = 96) -> None:
    """Images with masks of a bright defect, for the experiment ``segmentation``."""
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True)
    for number in range(count):
        rng = np.random.default_rng(number)
        pixels = rng.integers(0, 128, (side_px, side_px, 3), dtype=np.uint8)
        mask = np.zeros((side_px, side_px), np.uint8)
        top, left = rng.integers(0, side_px - 16, 2)
        mask[top : top + 16, left : left + 16] = 255
        pixels[mask > 0] += 120
        cv2.imwrite(str(root / "images" / f"{number:03}.png"), pixels)
        cv2.imwrite(str(root / "masks" / f"{number:03}.png"), mask)


def read_digest(checkpoint: Path) -> dict[str, Any]:
    """Number and digest of the samples of a training, which ``samples_sha256`` says."""
    content = torch.load(checkpoint, map_location="cpu", weights_only=True)
    return content["callbacks"]["SampleDigest"]


def list_bytes(folder: Path) -> dict[str, bytes]:
    """Content of each file below a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
