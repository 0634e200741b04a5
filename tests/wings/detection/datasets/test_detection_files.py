import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from lit_data.core.errors import ConfigError, DataError
from lit_data.core.leftovers import Leftovers
from lit_data.core.types import Ints
from lit_data.images.read_options import ReadOptions
from lit_data.wings.detection.files import DetectionFiles, find_detection_files

Corners = list[Ints]
LINE = "0 .5 .5 .2 .2\n"


def put(root: Path, *names: str, size_px: tuple[int, int] = (20, 30)) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        assert cv2.imwrite(str(root / name), np.zeros(size_px, np.uint8))


def write(root: Path, **texts: str) -> None:
    """Text files by their path without extension, with ``__`` for a slash; data is YAML, annotations are JSON."""
    for name, text in texts.items():
        suffix = {"data": ".yaml", "anno": ".json"}.get(name[:4], ".txt")
        path = root / (name.replace("__", "/") + suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def by_name(found: DetectionFiles) -> dict[str, list[str]]:
    stems = [Path(path).stem for path in found.images]
    return {split: [stems[n] for n in numbers] for split, numbers in found.splits.items()}


def coco(names: Sequence[str], *images: int) -> str:
    """A file of images, with a box in each of these numbers from 1, or in the first."""
    listed = [{"id": number, "file_name": name} for number, name in enumerate(names, 1)]
    box = {"category_id": 7, "bbox": [0, 0, 15, 10]}
    boxes = [{"image_id": image} | box for image in images or (1,)]
    content = {"images": listed, "annotations": boxes, "categories": [{"id": 7, "name": "cat"}]}
    return json.dumps(content)


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """Four images with YOLO text beside, and class names."""
    put(tmp_path, *(f"images/{name}.png" for name in "abcd"))
    two = LINE + "0 .2 .2 .1 .1\n"
    write(tmp_path, classes="cat\n", labels__a=LINE, labels__b=two, labels__c="")
    return tmp_path


def test_labels_beside_images(flat: Path) -> None:
    found = find_detection_files(flat)
    assert [Path(path).name for path in found.images] == ["a.png", "b.png", "c.png", "d.png"]
    assert [len(found.labels.of(image)) for image in range(4)] == [1, 2, 0, 0]
    assert sorted(map(len, found.splits.values())) == [1, 1, 2]
    assert by_name(find_detection_files(flat, splits={"train": 1.0}))["train"] == list("abcd")


@pytest.mark.parametrize("exclude", ["images/b.png", "**/b.*"])
def test_excluded_images_may_still_be_named(flat: Path, exclude: str) -> None:
    write(flat, train="a.png\nb.png\n", val="c.png\nd.png")
    found = find_detection_files(flat, exclude=[exclude])
    assert by_name(found) == {"train": ["a"], "val": ["c", "d"], "test": []}
    assert [len(found.labels.of(image)) for image in range(3)] == [1, 0, 0]
    write(flat, annotations__instances_train=coco([f"{name}.png" for name in "abcd"], 1, 2))
    of_coco = find_detection_files(flat, label_format="coco", exclude=[exclude])
    assert [Path(path).stem for path in of_coco.images] == ["a", "c", "d"]
    assert len(of_coco.labels.boxes) == 1


@pytest.mark.parametrize(
    "rows",
    [
        "a\nb",
        "./images/a.png\r\nimages/b.png\r\n",
        "\ufeff\na.png\n\nb.png",
        "{root}/images/a.png\n{root}/images/b.png",
    ],
)
def test_ways_of_lists_to_name_images(flat: Path, rows: str) -> None:
    write(flat, train=rows.format(root=flat), val="d")
    leftovers = Leftovers()
    found = find_detection_files(flat, leftovers=leftovers)
    assert by_name(found) == {"train": ["a", "b"], "val": ["d"], "test": []}
    assert found.labels.ends.tolist() == [1, 3, 3]
    assert (
        "1 image is not in the list of any split: images/c.png; 'data.splits={train: 0.7, val: 0.15, test: 0.15}' uses all"
        in (leftovers.describe())
    )


@pytest.mark.parametrize("path", ["", "path: .", "path: ../datasets/elsewhere"])
def test_data_yaml_with_lists_and_folders(tmp_path: Path, path: str) -> None:
    put(tmp_path, "images/one/a.png", "images/two/b.png", "images/c.png")
    write(
        tmp_path,
        data=f"{path}\ntrain: [images/one, images/two]\nval: rest.txt\nnames: {{0: cat}}",
        rest="c",
        labels__c=LINE,
    )
    found = find_detection_files(tmp_path)
    assert by_name(found) == {"train": ["a", "b"], "val": ["c"], "test": []}
    assert found.labels.classes == ("cat",)


def test_one_given_coco_file(tmp_path: Path) -> None:
    put(tmp_path, "images/a.png", "images/b.png", "images/c.png")
    write(tmp_path, annotations__boxes=coco(["a.png", "c.png", "b.png"], 2))
    found = find_detection_files(tmp_path, annotations="annotations/boxes.json")
    assert [len(found.labels.of(image)) for image in range(3)] == [0, 0, 1]
    assert sorted(number for numbers in found.splits.values() for number in numbers) == [0, 1, 2]
    with pytest.raises(ConfigError, match="annotations= is a COCO file, but label_format='voc'"):
        find_detection_files(tmp_path, annotations="annotations/boxes.json", label_format="voc")
    write(tmp_path, annotations__boxes=coco(["x/1.png", "x/2.png"], 2))
    message = r"none of its 3 images, such as .*/\w.png, is in .*; boxes.json names 'x/1.png'"
    with pytest.raises(DataError, match=message):
        find_detection_files(tmp_path, annotations="annotations/boxes.json")


def test_an_image_in_two_coco_files_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "images/a.png")
    for split in ("train", "val"):
        write(tmp_path, **{f"annotations__instances_{split}": coco(["a.png"])})
    message = r"instances_val.json: names an image that .*instances_train.json names too"
    with pytest.raises(DataError, match=message):
        find_detection_files(tmp_path)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"train": "a\nx\n", "val": "y"}, r"line 2: no image is named 'x' (.|\n)*2 problems"),
        ({"train": "a", "val": "b\na"}, "line 2: a is listed already, in train.txt, line 1"),
        ({"train": "a", "test": "\n"}, "test.txt: test is neither a list file with rows"),
        (
            {"data": "train: images/x\nnames: [cat]"},
            "images/x: train is neither a list file with rows",
        ),
        ({"labels__e": LINE}, r"e.txt: label file 4 of 4: no image is named 'e'(.|\n)*1 label"),
        ({"more__labels__a": LINE}, "label file 4 of 4: labels the same image as .*labels/a.txt"),
        ({"classes": "cat\ncat"}, "each only once"),
    ],
)
def test_row_49_names_without_an_image(flat: Path, texts: dict[str, str], message: str) -> None:
    write(flat, **texts)
    with pytest.raises(DataError, match=message):
        find_detection_files(flat)


def test_skip_leaves_out_bad_files(flat: Path, caplog: pytest.LogCaptureFixture) -> None:
    (flat / "images" / "b.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"b.png: not a PNG(.|\n)*1 of 4 images is bad"):
        find_detection_files(flat)
    write(flat, labels__e=LINE, train="a\nb\nc", val="d")
    with pytest.raises(DataError, match="1 label file matches none"):
        find_detection_files(flat)
    found = find_detection_files(flat, on_bad="skip")
    assert by_name(found) == {"train": ["a", "c"], "val": ["d"], "test": []}
    assert found.splits == {"train": [0, 1], "val": [2], "test": []}
    assert found.labels.ends.tolist() == [1, 1, 1]
    assert "labels/e.txt" in caplog.text
    assert "1 of 4 images is bad; it is skipped" in caplog.text


def test_the_size_is_that_of_the_image_as_it_is_read(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    (tmp_path / "images").mkdir()
    Image.new("RGB", (30, 20)).save(tmp_path / "images" / "a.jpg", exif=exif)
    stated = coco(["a.jpg"]).replace('"id": 1,', '"id": 1, "height": 30, "width": 20,')
    write(tmp_path, annotations__instances_all=stated)
    with pytest.raises(
        DataError, match=r"rotated by EXIF .orientation 6.(.|\n)*set data.read.exif=apply"
    ):
        find_detection_files(tmp_path, splits={"train": 1.0})
    found = find_detection_files(tmp_path, splits={"train": 1.0}, read=ReadOptions(exif="apply"))
    assert found.labels.boxes[0, 3:] == pytest.approx(np.array([15 / 20, 10 / 30]))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"label_format": "json"}, ConfigError, "'json' is unknown: choose one of auto, yolo"),
        ({"splits": "random"}, ConfigError, "splits='random' is unknown"),
        (
            {"splits": "folders"},
            DataError,
            "4 images are not in a folder named after one of train, val, test",
        ),
        (
            {"splits": {"train": ["images/x.png"]}},
            DataError,
            "line 1: no image is named 'images/x.png'",
        ),
        ({"label_format": "voc"}, DataError, r"no labels \(data.label_format=voc\)"),
        ({"classes": ["cat", "cat"]}, ConfigError, "each only once"),
    ],
)
def test_wrong_arguments_are_refused(
    flat: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        find_detection_files(flat, **options)


def test_yolo_classes_without_names_are_called_by_their_numbers(
    flat: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (flat / "classes.txt").unlink()
    with caplog.at_level("INFO"):
        assert find_detection_files(flat).labels.classes == ("0",)
    assert "no data.yaml names the classes, so they are named by their numbers: 0" in caplog.text
    assert find_detection_files(flat, classes=["dog"]).labels.classes == ("dog",)


def draw_set(seed: int) -> tuple[list[tuple[int, int]], Corners]:
    """Random image sizes (height, width), and boxes (class, x1, y1, x2, y2) in whole px of each."""
    random = np.random.default_rng(seed)
    sizes = [tuple(random.integers(8, 60, 2).tolist()) for _ in range(5)]
    boxes = []
    for height, width in sizes:
        count = random.integers(0, 6)
        x1, y1 = random.integers(0, width, count), random.integers(0, height, count)
        x2, y2 = x1 + 1 + random.integers(0, width - x1), y1 + 1 + random.integers(0, height - y1)
        boxes.append(np.stack([random.integers(0, 3, count), x1, y1, x2, y2], 1))
    boxes[0] = np.array([[0, 0, 0, 1, 1], [1, 1, 1, 3, 3], [2, 0, 0, 2, 2]])  # every class occurs
    return sizes, boxes


def write_yolo(root: Path, sizes: Sequence[tuple[int, int]], boxes: Corners) -> None:
    write(root, classes="a\nb\nc\n")
    for image, ((height, width), rows) in enumerate(zip(sizes, boxes, strict=True)):
        lines = [
            f"{c} {(x1 + x2) / 2 / width:.9f} {(y1 + y2) / 2 / height:.9f} "
            f"{(x2 - x1) / width:.9f} {(y2 - y1) / height:.9f}"
            for c, x1, y1, x2, y2 in rows.tolist()
        ]
        write(root, **{f"labels__{image}": "\n".join(lines)})


def write_coco(root: Path, sizes: Sequence[tuple[int, int]], boxes: Corners) -> None:
    images = [
        {"id": 9 - n, "file_name": f"{n}.png", "height": h, "width": w}
        for n, (h, w) in enumerate(sizes)
    ]
    annotations = [
        {"image_id": 9 - image, "category_id": 10 * c + 1, "bbox": [x1, y1, x2 - x1, y2 - y1]}
        for image, rows in enumerate(boxes)
        for c, x1, y1, x2, y2 in rows.tolist()
    ]
    categories = [{"id": 10 * number + 1, "name": name} for number, name in enumerate("abc")]
    content = {"images": images, "annotations": annotations, "categories": categories}
    write(root, annotations__instances_all=json.dumps(content))


def write_voc(root: Path, sizes: Sequence[tuple[int, int]], boxes: Corners) -> None:
    (root / "Annotations").mkdir()
    for image, ((height, width), rows) in enumerate(zip(sizes, boxes, strict=True)):
        objects = "".join(
            f"<object><name>{'abc'[c]}</name><bndbox><xmin>{x1 + 1}</xmin><ymin>{y1 + 1}</ymin><xmax>{x2}</xmax>"
            f"<ymax>{y2}</ymax></bndbox></object>"
            for c, x1, y1, x2, y2 in rows.tolist()
        )
        size = f"<size><width>{width}</width><height>{height}</height></size>"
        (root / "Annotations" / f"{image}.xml").write_text(
            f"<annotation>{size}{objects}</annotation>"
        )


@pytest.mark.parametrize("seed", range(4))
def test_the_same_boxes_in_three_formats_give_equal_tables(seed: int, tmp_path: Path) -> None:
    sizes, boxes = draw_set(seed)
    writers = {"yolo": write_yolo, "coco": write_coco, "voc": write_voc}
    for name, writer in writers.items():
        for image, size_px in enumerate(sizes):
            put(tmp_path, f"{name}/images/{image}.png", size_px=size_px)
        writer(tmp_path / name, sizes, boxes)
    if seed % 2:  # names of other people's folders
        (tmp_path / "voc/Annotations").rename(tmp_path / "voc/ANNOTATIONS")
        (tmp_path / "yolo/labels").rename(tmp_path / "yolo/LABELS")
    yolo, coco_files, voc = (find_detection_files(tmp_path / name) for name in writers)
    assert yolo.labels.ends.tolist() == np.cumsum([len(rows) for rows in boxes]).tolist()
    for found in (coco_files, voc):
        assert found.labels.classes == ("a", "b", "c")
        assert found.splits == yolo.splits
        assert np.array_equal(found.labels.ends, yolo.labels.ends)
        assert np.abs(found.labels.boxes - yolo.labels.boxes).max() < 1e-6


@pytest.mark.parametrize(
    "name",
    [
        "data.yaml",
        "classes.txt",
        "labels/classes.txt",
        "annotations/instances_train.json",
        "train.txt",
        "boxes.json",  # that an option names
        "rows",  # that data.yaml names
    ],
)
def test_links_out_of_a_set(
    flat: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    secret = tmp_path_factory.mktemp("home") / "secret"
    secret.write_text("token = 123\n")
    (flat / name).parent.mkdir(exist_ok=True)
    (flat / name).unlink(missing_ok=True)
    (flat / name).symlink_to(secret)
    if name == "rows":
        (flat / "data.yaml").write_text("names: [a, b]\ntrain: rows\nval: rows\n")
    options = {"annotations": name} if name == "boxes.json" else {}
    with pytest.raises(DataError, match=r"leads out of the data folder, to .*/secret") as caught:
        find_detection_files(flat, **options)
    assert "token" not in str(caught.value)


def test_faults_of_every_kind_are_in_one_error(flat: Path) -> None:
    (flat / "images" / "d.png").write_bytes(b"no image")
    lines = (
        "3 .5 .5 .1 .1",
        "0 nan .5 .1 .1",
        "0 .5 .5 -.1 .1",
        "0 .5 .5 0 .1",
        "0 1.2 .5 .1 .1",
        "0 .5 .5 .1",
        "0 .5 .5 .1 .1",
    )
    write(flat, labels__a="\n".join(lines), labels__e=LINE, train="a\nb\nx", val="c\nd")
    os.mkfifo(flat / "labels" / "d.txt")
    with pytest.raises(DataError) as caught:
        find_detection_files(flat)
    faults = [
        (Path(path).name, "" if path.endswith(".png") else text.partition(":")[0])
        for path, text in caught.value.problems
    ]
    assert sorted(faults) == [
        ("a.txt", "line 1"),
        ("a.txt", "line 2"),
        ("a.txt", "line 3"),
        ("a.txt", "line 4"),
        ("a.txt", "line 5"),
        ("a.txt", "line 6"),
        ("d.png", ""),
        ("d.txt", "not a regular file (a named pipe)"),
        ("e.txt", "label file 4 of 4"),
        ("train.txt", "line 3"),
    ]
    headline = (
        f"1 bad name under {flat}; 1 label file matches none of 4 images, such as images/a.png; 1 problem with the lists of splits; "
        "1 of 4 images is bad; 6 problems with labels"
    )
    assert caught.value.headline.removesuffix(":") == headline


def test_other_text_among_labels_is_no_label(flat: Path) -> None:
    (flat / "labels/README.txt").write_text("These boxes were drawn in 2025.\n")
    assert len(find_detection_files(flat, splits={"train": 1.0}).labels.boxes) == 3
    (flat / "labels/gone.txt").write_text(LINE)
    with pytest.raises(DataError, match=r"gone\.txt: label file .* no image is named"):
        find_detection_files(flat)


def test_images_without_labels_are_taken_where_classes_are_named(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    with pytest.raises(DataError, match=r"no labels \(data.label_format=auto\)"):
        find_detection_files(tmp_path)
    for form in ("auto", "none"):
        options = {"classes": ["dot"], "splits": {"train": 1.0}}
        found = find_detection_files(tmp_path, label_format=form, **options)
        assert by_name(found)["train"] == ["a", "b"]
        assert (found.labels.classes, found.labels.ends.tolist()) == (("dot",), [0, 0])


def test_coco_beside_the_folders_is_found_and_several_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "images/a.png")
    (tmp_path / "annotations.json").write_text(coco(["a.png"]))
    (tmp_path / "settings.json").write_text('{"images": 1}')
    assert len(find_detection_files(tmp_path, splits={"train": 1.0}).labels.boxes) == 1
    (tmp_path / "labels.json").write_text(coco(["a.png"]))
    message = r"several COCO files: annotations.json, labels.json; choose one, data.annotations="
    with pytest.raises(DataError, match=message):
        find_detection_files(tmp_path)


def test_files_in_the_place_of_coco_are_named_by_their_format(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    write(tmp_path, annotations__train='{"info": {}, "categories": {}, "items": []}')
    with pytest.raises(DataError, match=r"train\.json: a file of Datumaro, not of COCO; convert"):
        find_detection_files(tmp_path)


@pytest.mark.parametrize("folder", ["", "Annotations/", "other/"])
def test_voc_files_with_another_name_count_for_the_image_that_they_name(
    folder: str, tmp_path: Path
) -> None:
    put(tmp_path, "images/a.png" if folder else "a.png")
    box = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox>"
    path = tmp_path / f"{folder}JOB_1.XML"
    path.parent.mkdir(exist_ok=True)
    text = "<annotation><filename>a.png</filename><object><name>cat</name>{}</object></annotation>"
    path.write_text(text.format(box))
    assert len(find_detection_files(tmp_path).labels.boxes) == 1
    path.write_text(text.format(box).replace("a.png", "b.png"))
    with pytest.raises(DataError, match=r"no image is named .*, and none 'b.png', which it names"):
        find_detection_files(tmp_path, label_format="voc")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("labels__train__a", "train/a"),  # the image of train is lost
        ("labels__train__x", "train/x"),
    ],
)
def test_labels_of_a_split_never_count_for_another(
    labels: str, message: str, tmp_path: Path
) -> None:
    put(tmp_path, "images/train/b.png", "images/val/a.png")
    write(tmp_path, classes="cat", labels__train__b=LINE, **{labels: LINE})
    with pytest.raises(DataError, match=f"no image is named '{message}'"):
        find_detection_files(tmp_path)
    write(tmp_path, train="data/images/train/a.png\nimages/train/b.png")
    (tmp_path / (labels.replace("__", "/") + ".txt")).unlink()
    missing = "line 1: no image is named 'data/images/train/a.png' or .* or 'a.png' among 2 images"
    with pytest.raises(DataError, match=missing):
        find_detection_files(tmp_path)
