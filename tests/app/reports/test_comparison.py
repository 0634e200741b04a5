import json
from pathlib import Path
from typing import Any

import pytest

from lit_data.app.reports import comparison, results
from lit_data.app.reports.page import make_comparison
from lit_data.app.reports.results import tabulate_confusion, tabulate_images
from lit_data.app.reports.runs import Run, read_run
from tests.app.reports.folders import CONFIG, SUMMARY, make_run


def read_runs(folder: Path, *parts: dict[str, Any]) -> list[Run]:
    folders = [make_run(folder / str(number), **part) for number, part in enumerate(parts)]
    return [read_run(path, path.name) for path in folders]


def test_only_options_that_differ_are_columns(tmp_path: Path) -> None:
    both = ("+experiment=stripe", "trainer=cpu", "paths.runs=x")
    other = {"overrides": (*both, "seed=2"), "config": CONFIG | {"seed": 2}}
    runs = read_runs(tmp_path / "seeds", other, {"overrides": both})
    # The default stands where no override does.
    assert comparison.find_differences(runs) == {"seed": ["2", "1"]}

    deep = CONFIG | {"model": {"depth": 3, "width": 8}}
    one = {"overrides": ("trainer=cpu", "+model.depth=3"), "config": deep}
    runs = read_runs(tmp_path / "keys", one, {"overrides": ("data.loader={batch_size:16}",)})
    assert comparison.find_differences(runs) == {"model.depth": ["3", "-"]}


def test_tags_of_runs_come_first(tmp_path: Path) -> None:
    tagged = {"overrides": ("seed=2",), "config": CONFIG | {"seed": 2, "tags": ["night", "line2"]}}
    differences = comparison.find_differences(read_runs(tmp_path, tagged, {}))
    assert next(iter(differences.items())) == ("tags", ['["night", "line2"]', "-"])


def test_ranks_follow_the_monitor_and_leave_out_what_has_no_number(tmp_path: Path) -> None:
    config = CONFIG | {"callbacks": {"checkpoint": {"monitor": "val/odd", "mode": "min"}}}
    summaries = [SUMMARY | {"val/odd": value} for value in (3.0, None, 1.0)]
    runs = read_runs(tmp_path, *({"config": config, "summary": each} for each in summaries))
    assert comparison.rank(runs, "val/odd") == [2, 0]
    assert comparison.rank(runs, "val/unheard_of") == []
    names = comparison.choose_metrics(runs, [])
    assert names[:3] == ["test/dice", "samples_per_s", "data_wait_fraction"]
    assert names[3:] == ["peak_rss_bytes", "seconds"]
    assert comparison.choose_metrics(runs, [], first="val/odd")[0] == "val/odd"
    assert comparison.choose_metrics(runs, ["a"]) == ["a"]


@pytest.mark.parametrize(
    ("root", "split", "unlike"),
    [("a/", "test", []), ("b", "test", ["val/dice"]), ("a", "val", ["val/dice"])],
)
def test_scores_of_different_images_are_not_compared(
    root: str, split: str, unlike: list[str], tmp_path: Path
) -> None:
    other = CONFIG | {"data": {"root": root}}
    runs = read_runs(tmp_path, {"config": CONFIG | {"data": {"root": "a"}}}, {"config": other})
    for run, of_run in zip(runs, ("test", split), strict=True):
        (run.folder / "splits.csv").write_text(f"image,split,class\n1.png,{of_run},good\n")
    runs = [read_run(run.folder) for run in runs]
    assert comparison.find_unlike(runs, ["val/dice", "seconds"]) == unlike
    page = make_comparison(runs, title="", folder=tmp_path, metrics=["val/dice"])
    assert ("scored on different images" in page) == bool(unlike)


def test_images_are_counted_by_split_and_class(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert results.list_results(read_run(folder))[0].title == "Scores"
    rows = "".join(f"{n}.png,{split},dent\n" for n, split in enumerate(("train", "train", "val")))
    (folder / "splits.csv").write_text(f"image,split,class\na.png,test,good\n{rows}")
    table = tabulate_images(read_run(folder))
    assert table.columns == ["class", "train", "val", "test", "all"]
    rows = [" ".join(row) for row in table.rows]
    assert rows == ["good 0 0 1 1", "dent 2 1 0 3", "all 2 1 1 4"]
    (folder / "splits.csv").write_text("image,split\na.png,test\nb.png,train\n")
    assert tabulate_images(read_run(folder)).rows == [["images", "1", "1", "2"]]


def test_scores_and_thresholds_stand_at_the_top(tmp_path: Path) -> None:
    scores = {"val/image_auroc": 0.9, "test/image_auroc": 0.8, "val/f1_max_threshold": 0.25}
    scores |= {"val/image_f1_max_threshold": 0.5, "test/image_f1_max_threshold": 0.6}
    run = read_run(make_run(tmp_path / "run", summary={**SUMMARY, **scores}))
    table = results.tabulate_scores(run)
    assert table.columns == ["score", "val", "test", "test baseline"]
    assert table.rows == [["dice", "0.8", "0.7", "0.3"], ["image auroc", "0.9", "0.8", "-"]]
    assert table.note == "of the checkpoint with the best dice"
    thresholds = {row[0]: row[1] for row in results.tabulate_thresholds(run).rows}
    assert thresholds == {"probability of a pixel": "0.25", "score of an image": "0.5"}
    of_good_images = {**SUMMARY, **scores, "val/threshold": 3.5}
    run = read_run(make_run(tmp_path / "anomaly", summary=of_good_images))
    assert [row[:2] for row in results.tabulate_thresholds(run).rows] == [
        ["distance of a pixel", "3.5"]
    ]
    scores |= {"val/threshold": 3.5, "val/good_images": 12, "val/false_alarms": 0.0}
    run = read_run(make_run(tmp_path / "good", summary={**SUMMARY, **scores}))
    assert "about 1 in 13 of new good images may" in results.tabulate_thresholds(run).note


def test_the_confusion_of_the_test_is_shown_and_a_damaged_one_left_out(tmp_path: Path) -> None:
    folder, classes = make_run(tmp_path / "run"), ["good", "bad"]

    def tabulate(**content: Any) -> results.ResultTable:
        (folder / "confusion.json").write_text(json.dumps(content))
        return tabulate_confusion(read_run(folder))

    table = tabulate(classes=classes, val=[[9, 9], [9, 9]], test=[[5, 1], [2, 3]])
    assert table.title == "Confusion matrix of images, test"
    assert table.columns == ["truth", "predicted good", "predicted bad"]
    assert table.rows == [["good", "5", "1"], ["bad", "2", "3"]]
    table = tabulate(classes=classes, val=[[9, 9], [9, 9]])
    assert table.title == "Confusion matrix of images, val"
    assert table.note == ""
    drawn = tabulate(classes=classes, val=[[9, 9], [9, 9]], synthetic=["val"])
    assert drawn.note.startswith("each as it is and with synthetic defects drawn into it")
    scored = make_run(
        folder / "scored", summary={**SUMMARY, "val/f1_max_threshold": 0.2, "val/f1": 1}
    )
    (scored / "confusion.json").write_text('{"synthetic": ["val"]}')
    run = read_run(scored)
    assert results.tabulate_thresholds(run).note.startswith("chosen on synthetic defects")
    assert "whole images of val are scored with synthetic" in results.tabulate_scores(run).note
    assert tabulate(classes=classes, test=[[1, 2]], synthetic=3).rows == []
    assert tabulate(classes=classes, test=[[1, 2], [3]]).rows == []
    assert tabulate(classes="good", test=3).rows == []
    assert tabulate(val=[[1]]).rows == []


WHOLE = {
    "precision_recall": {"images": {"recall": [0.5, 1.0], "precision": [1.0, 0.5]}},
    "image_scores": {
        "edges": [0.1, 0.5, 0.9], "good": [3, 0], "defective": [1, 2], "threshold": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "titles"),
    [
        ({}, ["Precision and recall", "Scores of images"]),
        ({"image_scores": None}, ["Precision and recall"]),
        ({"precision_recall": {"<b>": {"recall": [1], "precision": [1]}}}, ["Scores of images"]),
        ({"precision_recall": {"images": {"recall": [1], "precision": [2]}}}, ["Scores of images"]),
        ({"precision_recall": {"images": {"recall": [], "precision": []}}}, ["Scores of images"]),
        (
            {"precision_recall": {"images": {"recall": ["x"], "precision": [0]}}},
            ["Scores of images"],
        ),
        (
            {"precision_recall": 3, "image_scores": {"edges": [0.5], "good": [], "defective": []}},
            [],
        ),
        ({"precision_recall": [], "image_scores": WHOLE["image_scores"] | {"threshold": "x"}}, []),
        (
            {"precision_recall": [], "image_scores": WHOLE["image_scores"] | {"edges": [1, 1, 1]}},
            [],
        ),
        (
            {"precision_recall": [], "image_scores": WHOLE["image_scores"] | {"good": [1e999, 1]}},
            [],
        ),
        (
            {"precision_recall": [], "image_scores": WHOLE["image_scores"] | {"good": [1] * 9999}},
            [],
        ),
    ],
)
def test_curves_of_a_damaged_file_are_left_out(
    change: dict[str, Any], titles: list[str], tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "curves.json").write_text(json.dumps({"val": 3, "test": WHOLE | change}))
    drawn = results.draw_results(read_run(folder))
    assert [chart.title for chart in drawn] == titles
    (folder / "curves.json").write_text(json.dumps({"val": WHOLE, "test": WHOLE | change}))
    drawn = results.draw_results(read_run(folder))
    assert [chart.title for chart in drawn] == ["Precision and recall", "Scores of images"]
    assert {chart.title for chart in drawn if chart.unit == "test"} == set(titles)
