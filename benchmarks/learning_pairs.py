"""Suite ``learning_pairs``: targets with a reference, compared by nets and without one."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import cv2
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from benchmarks.learning import MapLearningSuite
from benchmarks.learning_sets import read_split
from benchmarks.pair_sets import GOOD_SPLITS, SPLITS, read_grey

PAIR_SCORES = ("pixel_ap", "image_auroc", "false_alarms")
_FILES = ["data.layout=pairs", "data.files={target: target/*.png, ref1: ref/*.png}"]
_STRIPE = ["+experiment=stripe", *_FILES]
_ALONE = "+experiment=segmentation"
_BF16 = "callbacks.amp.precision=bf16"
_REAL = "_real"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLearningSuite(MapLearningSuite):
    """Pairs of a target and a reference after equal time of training.

    Ways: ``difference`` of images, see `benchmarks.pair_ways`; ``compare``, the net of
    ``+experiment=stripe``; ``compare_features``, which learns nothing; ``compare_lite0``;
    ``alone``, ``+experiment=segmentation`` of targets. Nets learn synthetic defects in good tiles,
    those with ``_real`` in their names the masks of the set.

    Args:
        root: A folder made by ``python -m benchmarks.pair_sets``.
        overrides: Further words for ``fit``.
        perturbations: Changes of all references of the test, of which each gives further lines:
            ``shift_2`` px to the right and down.
    """

    seconds: Sequence[int] = (60,)
    ways: Sequence[str] = ("difference", "compare_features", "compare", "compare_real")
    synthesis: str = "library"
    perturbations: Sequence[str] = ()

    scores: ClassVar[tuple[str, ...]] = PAIR_SCORES
    scripts: ClassVar[tuple[str, ...]] = ("difference",)
    nets: ClassVar[Mapping[str, Sequence[str]]] = {
        "compare": _STRIPE,
        "compare_features": [*_STRIPE, "model=compare_features", "model.net.references=1"],
        "compare_lite0": [*_STRIPE, "model=compare_lite0", "model.net.references=1", _BF16],
        "alone": [_ALONE, "data.patterns=[target/*]", "data.masks=masks"],
    }
    split_file: ClassVar[str] = SPLITS

    @override
    def list_ways(self) -> Sequence[str]:
        return [*self.scripts, *self.nets, *(f"{name}{_REAL}" for name in self.nets)]

    @override
    def list_variants(self) -> Sequence[str]:
        return ["", *self.perturbations]

    @override
    def copy_test_images(self, root: Path, folder: Path) -> None:
        for variant in self.list_variants():
            for role in ("target", "ref"):
                (folder / variant / role).mkdir(parents=True, exist_ok=True)
            for name in map(Path, read_split(root, "test")):
                shutil.copy(root / name, folder / variant / "target" / name.name)
                reference = shift(read_grey(root / "ref" / name.name), variant)
                cv2.imwrite(str(folder / variant / "ref" / name.name), reference)

    @override
    def run_way(self, way: str, root: Path, test_folder: Path, seed: int, out: Path) -> None:
        if way in self.scripts:
            for variant in self.list_variants():
                places = root, test_folder / variant, out / str(self.seconds[0]) / variant
                self.call_script("pair_ways", *places)
            return
        words = [*self.nets[way.removesuffix(_REAL)], f"data.root={root}"]
        is_real, is_alone = way.endswith(_REAL), words[0] == _ALONE
        words.append(f"data.splits={root / (SPLITS if is_real else GOOD_SPLITS)}")
        words.append(f"synthesis={'none' if is_real else self.synthesis}")
        if not is_alone:
            splits = "[train,val,test]" if is_real else "[test]"
            words += ["data.masks=masks", f"data.mask_splits={splits}"]
        elif not is_real:  # no patch shows a defect before it is drawn
            words.append("data.sampling.positives=null")

        def predict(folder: Path) -> list[str]:
            if is_alone:
                return [_ALONE, f"data.root={folder / 'target'}"]
            return [*_STRIPE, f"data.root={folder}"]

        self.run_ours(words, predict, test_folder, seed, out)

    @override
    def read_truth(self, root: Path, image: str) -> NDArray[np.bool_]:
        return read_grey(root / "masks" / Path(image).name) >= 128


def shift(image: NDArray[np.uint8], variant: str) -> NDArray[np.uint8]:
    """Move an image by ``shift_PX`` to the right and down; "" leaves it."""
    if not variant:
        return image
    px = float(variant.removeprefix("shift_"))
    matrix = np.array([[1, 0, px], [0, 1, px]], np.float32)
    moved = cv2.warpAffine(image, matrix, image.shape[::-1], borderMode=cv2.BORDER_REPLICATE)
    return np.asarray(moved, np.uint8)
