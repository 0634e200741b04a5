"""The verdict on a model comes first, and what may help where it is wrong in most cases."""

import json
from pathlib import Path
from typing import Any

import pytest

from lit_data.app.quality import Evidence, describe_threshold, judge
from lit_data.app.report import write_report
from lit_data.app.result import write_summary
from lit_data.app.terminal import print_end

KINDS = ["good", "defect"]


def evidence(
    confusion: dict[str, Any] | None = None,
    scores: dict[str, float] | None = None,
    splits: list[tuple[str, str]] | None = None,
    **config: Any,
) -> Evidence:
    return Evidence(scores or {}, confusion or {}, splits or [], config)


def of_images(
    *counts: list[int], classes: list[str] = KINDS, stage: str = "test"
) -> dict[str, Any]:
    return {"classes": classes, stage: list(counts)}


@pytest.mark.parametrize(
    ("confusion", "words"),
    [
        (
            of_images([30, 1], [18, 7]),
            "the model finds 28% of the defective images (7 of 25 in test) and marks 3% of the good "
            "images as defective (1 of 31 in test). What",
        ),
        (
            of_images([1, 9], [0, 20], stage="val"),
            "and marks 90% of the good images as defective (9 of 10 in val)",
        ),
        (
            of_images([30, 1], [2, 1]),
            "finds 33% of the defective images (1 of 3 in test) and marks 3% of the good images "
            "as defective (1 of 31 in test); measured on few defective images. What",
        ),
        (
            of_images([9, 0, 0], [5, 4, 0], [8, 0, 1], classes=["good", "dent", "crack"]),
            "the model finds 28% of the defective images (5 of 18",
        ),
        (
            # Verdicts go before what the likeliest class says.
            {
                **of_images([9, 0, 0], [5, 4, 0], [8, 0, 1], classes=["ok", "dent", "crack"]),
                "verdicts": {"test": [[8, 1], [14, 4]]},
            },
            "the model finds 22% of the defective images (4 of 18 in test) and marks 11% of the good",
        ),
        (
            of_images([2, 6], [3, 1], classes=["cat", "dog"]),
            "the model classifies 25% of the images correctly (3 of 12 in test)",
        ),
    ],
)
def test_the_share_of_images_that_are_wrong_is_named_with_their_count(
    confusion: dict[str, Any], words: str
) -> None:
    verdict = judge(evidence(confusion))
    assert words in verdict.text
    assert verdict.cures


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (
            {"test/froc_1": 0.28, "val/froc_1": 0.9},
            "the model finds 28% of the objects at one false alarm per image, in test",
        ),
        (
            {"val/defect_recall": 0.1},
            "the model finds 10% of the defects at 0.5 false alarms per patch, in val",
        ),
        ({"val/image_auroc": 0.55}, "val/image_auroc of the model is 0.55, which is no better"),
        ({"val/map50": 0.01}, "val/map50 of the model is 0.01, which is no better than chance"),
    ],
)
def test_without_counted_images_scores_judge(scores: dict[str, float], words: str) -> None:
    verdict = judge(evidence(scores=scores, model={"false_alarms_per_patch": 0.5}))
    assert verdict.sentence.startswith(words)
    assert verdict.cures


@pytest.mark.parametrize(
    ("confusion", "scores", "words"),
    [
        (of_images([30, 1], [4, 21]), {"val/image_auroc": 0.93}, "finds 84% of the defective"),
        # No defect in the split.
        (
            of_images([30, 1], [0, 0]),
            {"val/f1_max": float("nan")},
            "the model marks 3% of the good",
        ),
        (
            of_images([0, 0], [2, 20]),
            {},
            "the model finds 91% of the defective images (20 of 22 in",
        ),
        (
            of_images([6, 2], [1, 3], classes=["cat", "dog"]),
            {},
            "classifies 75% of the images correctly",
        ),
        (None, {"test/froc_1": 0.8}, "the model finds 80% of the objects"),
        (
            None,
            {"test/dice": 0.75, "test/dice_baseline": 0.5},
            "dice of the model is 0.75 (baseline",
        ),
        (None, {"test/defect_recall": float("nan")}, ""),
        (None, {}, ""),
        ({"classes": KINDS, "test": [[1, "x"], [None, 0]]}, {}, ""),  # a file of anybody's
        ({"classes": {"a": 1}, "test": 3}, {}, ""),
        ({"classes": KINDS, "test": [[0, 0], [0, 0]]}, {}, ""),
    ],
)
def test_no_cure_is_named_for_a_good_model_or_for_what_was_not_measured(
    confusion: dict[str, Any] | None, scores: dict[str, float], words: str
) -> None:
    config = {"callbacks": {"checkpoint": {"monitor": "val/dice"}}}
    verdict = judge(evidence(confusion, scores, **config))
    assert not verdict.cures
    assert words in verdict.sentence
    assert bool(words) == bool(verdict.sentence)


@pytest.mark.parametrize(
    ("auroc", "words"),
    [
        (
            0.43,
            "(1 of 31 in test); image AUROC 0.43, hardly better than chance. What may help: look",
        ),
        (0.7, "(1 of 31 in test); image AUROC 0.70. What may help: look"),
        (
            0.93,
            "image AUROC 0.93. What may help: set another threshold with predict.image_threshold",
        ),
    ],
)
def test_the_ranking_of_images_tells_a_bad_model_from_a_bad_threshold(
    auroc: float, words: str
) -> None:
    verdict = judge(evidence(of_images([30, 1], [18, 7]), {"test/image_auroc": auroc}))
    assert words in verdict.text


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (
            {"good_images": 12, "false_alarms": 0.0},
            "about 1 in 13 of new good images may count as",
        ),
        (
            {"good_images": 49, "false_alarms": 4 / 49},
            "from 49 good validation images: about 10% of new good images may",
        ),
        (
            {"good_images": 49, "false_alarms": 9 / 49, "defective_images": 9, "misses": 1 / 9},
            "from 49 good and 9 defective validation images: about 20% of new good images may count as "
            "defective, and about 20% of new defective ones missed",
        ),
        (
            {"good_images": 12, "false_alarms": 0.0, "defective_images": 0.0, "misses": 0.5},
            "from 12 good validation",
        ),
        ({}, ""),
    ],
)
def test_a_threshold_says_how_sure_it_is(scores: dict[str, float], words: str) -> None:
    told = describe_threshold({f"val/{name}": score for name, score in scores.items()})
    assert words in told
    assert bool(told) == bool(scores)


@pytest.mark.parametrize(
    ("config", "splits", "cure"),
    [
        (
            {"trainer": {"max_epochs": 3}},
            [],
            "train longer than 3 epochs, such as trainer.max_epochs=15",
        ),
        (
            {"data": {"size_px": 256}},
            [],
            "small defects vanish when images are scaled down: raise data.size_px above 256; look",
        ),
        (
            {"data": {"size_px": 256, "patch_px": None}},
            [],
            "raise data.size_px above 256, or set data.size_px=null data.patch_px=128; look",
        ),
        ({"data": {"scale": 0.5}}, [], "raise data.scale above 0.5"),
        (
            {"model": {"net": {"weights": None}}},
            [],
            "start from a pretrained net, see docs/pretrained.md",
        ),
        (
            {},
            [("train", "dent")] * 4 + [("train", "good")] * 90,
            "train on more than 4 defective images",
        ),
        (
            {"model": {"_target_": "lit_data.models.AnomalyModule"}, "trainer": {"max_epochs": 1}},
            [("train", "good")] * 7,
            "train on more than 7 good images; see docs/anomaly.md",
        ),
        ({}, [("train", "a")] * 3 + [("train", "b")] * 4, "train on more than 7 images; look"),
        ({}, [("train", "dent")] * 90, "What may help: look at predictions.png"),
    ],
)
def test_the_cure_goes_by_what_the_run_was_trained_with(
    config: dict[str, Any], splits: list[tuple[str, str]], cure: str
) -> None:
    verdict = judge(evidence(of_images([9, 0], [9, 1]), splits=splits, **config))
    assert cure in verdict.text


def test_terminal_and_report_say_it_before_any_word_on_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = {"seconds": 9.0, "test/image_auroc": 0.7, "train/limited_by": "the model takes 97%"}
    write_summary(tmp_path, "fit", "segmentation", metrics)
    (tmp_path / "confusion.json").write_text(json.dumps(of_images([30, 1], [18, 7])))
    print_end(metrics, tmp_path)
    page = write_report([tmp_path]).read_text()
    for text in (capsys.readouterr().out, page):
        assert (
            0 < text.index("he model finds 28% of the defective images") < text.index("takes 97%")
        )
