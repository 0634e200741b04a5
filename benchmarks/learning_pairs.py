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

from benchmarks.learning import LearningSuite, auroc, average_precision, score_image
from benchmarks.learning_sets import read_split
from benchmarks.pair_sets import GOOD_SPLITS, SPLITS, read_grey

PAIR_SCORES = ("pixel_ap", "image_auroc", "false_alarms")
PERTURBATIONS = ("shift", "gain", "noise", "blur")
_FILES = ["data.layout=pairs", "data.files={target: target/*.png, ref1: ref/*.png}"]
_STRIPE = ["+experiment=stripe", *_FILES]
_BF16 = "callbacks.amp.precision=bf16"
_REAL = "_real"
_RECALL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLearningSuite(LearningSuite):
    """Pairs of a target and a reference after equal time of training.

    Ways: ``difference`` of images, see `benchmarks.pair_ways`; ``compare``, the net of
    ``+experiment=stripe``; ``compare_features``, which learns nothing; ``compare_lite0``;
    ``unet_lite0``, which has target and reference as channels; ``alone``,
    ``+experiment=segmentation`` of targets. Nets learn synthetic defects in good tiles, those with
    ``_real`` in their names the masks of the set. Scores: average precision of pixels, AUROC of
    tiles, and the fraction of good tiles that are called defective where 95 % of the defective ones
    are found.

    Args:
        root: A folder made by ``python -m benchmarks.pair_sets``.
        overrides: Further words for ``fit``.
        perturbations: Changes of all references of the test, of which each gives further lines:
            ``shift_2`` px to the right and down, ``gain_0.8``, ``noise_0.05`` of the range,
            ``blur_1`` px.
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
        "unet_lite0": [*_STRIPE, "model=unet_lite0", _BF16],
        "alone": ["+experiment=segmentation", "data.patterns=[target/*]", "data.masks=masks"],
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
                reference = perturb(read_grey(root / "ref" / name.name), variant)
                cv2.imwrite(str(folder / variant / "ref" / name.name), reference)

    @override
    def run_way(self, way: str, root: Path, test_folder: Path, seed: int, out: Path) -> None:
        if way in self.scripts:
            for variant in self.list_variants():
                places = root, test_folder / variant, out / str(self.seconds[0]) / variant
                self.call_script("pair_ways", *places)
            return
        words = self.nets[way.removesuffix(_REAL)]
        data = [f"data.root={root}", f"data.splits={root / GOOD_SPLITS}"]
        if way.endswith(_REAL):
            data[1] = f"data.splits={root / SPLITS}"
            data += ["synthesis=none"]
        else:
            data += [f"synthesis={self.synthesis}"]
            if words[0] != _STRIPE[0]:
                data += [
                    "data.sampling.positives=null"
                ]  # no patch shows a defect before it is drawn
        if words[0] == _STRIPE[0]:
            splits = "[train,val,test]" if way.endswith(_REAL) else "[test]"
            data += ["data.masks=masks", f"data.mask_splits={splits}"]

        def predict(folder: Path) -> list[str]:
            if words[0] == _STRIPE[0]:
                return [*_STRIPE, f"data.root={folder}"]
            return [words[0], f"data.root={folder / 'target'}"]

        self.run_ours([*words, *data], predict, test_folder, seed, out)

    @override
    def score(self, folder: Path, root: Path) -> dict[str, float]:
        return score_pairs(folder / "maps", root)


def perturb(image: NDArray[np.uint8], change: str) -> NDArray[np.uint8]:
    """Change an image by ``NAME_AMOUNT``, with a NAME of `PERTURBATIONS`; nothing changes it not."""
    if not change:
        return image
    name, _, amount = change.partition("_")
    size = float(amount)
    if name == "shift":
        matrix = np.array([[1, 0, size], [0, 1, size]], np.float32)
        moved = cv2.warpAffine(image, matrix, image.shape[::-1], borderMode=cv2.BORDER_REPLICATE)
        return np.asarray(moved, np.uint8)
    if name == "blur":
        return np.asarray(cv2.GaussianBlur(image, (0, 0), size), np.uint8)
    changed = image * size
    if name == "noise":
        noise = np.random.default_rng(image.sum()).normal(0, size * 255, image.shape)
        changed = image + noise
    return changed.round().clip(0, 255).astype(np.uint8)


def score_pairs(maps: Path, root: Path) -> dict[str, float]:
    """Score maps of the test tiles of a set of pairs: a number for each of `PAIR_SCORES`."""
    scores, truths, image_scores, is_defective = [], [], [], []
    for name in map(Path, read_split(root, "test")):
        path = next(maps.rglob(f"{name.stem}.*"))
        values = np.asarray(cv2.imread(str(path), cv2.IMREAD_UNCHANGED), np.float64)
        truth = read_grey(root / "masks" / name.name) >= 128
        scores.append(values.ravel())
        truths.append(truth.ravel())
        image_scores.append(score_image(values))
        is_defective.append(bool(truth.any()))
    precision, _ = average_precision(np.concatenate(scores), np.concatenate(truths))
    tiles, defective = np.array(image_scores), np.array(is_defective)
    return {
        "pixel_ap": precision,
        "image_auroc": auroc(tiles, defective),
        "false_alarms": find_false_alarms(tiles, defective),
    }


def find_false_alarms(scores: NDArray[np.float64], truth: NDArray[np.bool_]) -> float:
    """Find the fraction of good images that score as high as 95 % of the defective ones."""
    found = np.sort(scores[truth])[::-1][: int(np.ceil(_RECALL * truth.sum()))]
    return float((scores[~truth] >= found[-1]).mean())
