"""Masks are paired with images by names as the field gives them, and what cannot be paired is refused with names."""

import unicodedata
from pathlib import Path

import pytest

from lit_data.core.errors import DataError
from lit_data.core.leftovers import Leftovers
from lit_data.datasets.layouts import InspectionSet, find_inspection_set
from tests.helpers.files import touch


def _pairs(folder: Path, image_set: InspectionSet) -> dict[str, str | None]:
    pairs = {}
    for image, mask in zip(image_set.images, image_set.masks, strict=True):
        name = image.relative_to(folder).as_posix()
        pairs[name] = None if mask is None else mask.relative_to(folder).as_posix()
    return pairs


PAIRS = {
    "endings of both": ("{n}_sat.jpg", "{n}_mask.png"),
    "endings of both in folders": ("images/{n}_sat.jpg", "masks/{n}_mask.png"),
    "a start of all": ("RGB/top_2_{n}_RGBIR.tif", "Labels/top_2_{n}_label.tif"),
    "starts": ("images/image_000{n}.png", "gt/gt_000{n}.png"),
    "starts side by side": ("image_{n}.png", "gt_{n}.png"),
    "brackets": ("img/img({n}).png", "target/target({n}).png"),
    "no separator": ("images/frame{n}.png", "masks/mask{n}.png"),
    "masks above": ("images/{n}.jpg", "{n}_GT.png"),
    "a short ending": ("output/N_{n}.jpg", "output/N_{n}_m.png"),
    "a folder for each": ("{n}_json/img.png", "{n}_json/label.png"),
    "channels of nnU-Net": ("imagesTr/x_{n}_0000.png", "labelsTr/x_{n}.png"),
    "images of several types": ("a/images_png/{n}.png", "a/masks_png/{n}.png"),
    "img_dir": ("img_dir/val/{n}.jpg", "ann_dir/val/{n}.png"),
    "SemSeg": ("RGB/{n}.png", "SemSeg/{n}.png"),
    "targets": ("images/{n}_pre.png", "targets/{n}_pre_target.png"),
    "instances alone": ("train/images/0001/{n}.png", "train/instances/0001/{n}.png"),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", PAIRS)
def test_names_of_the_field_are_paired(name: str, count: int, tmp_path: Path) -> None:
    image, mask = PAIRS[name]
    if count == 1 and name in ("a start of all", "no separator", "channels of nnU-Net"):
        pytest.skip("one image does not tell what all have in common")
    pairs = {image.format(n=n): mask.format(n=n) for n in range(1, count + 1)}
    touch(tmp_path, *pairs, *pairs.values())
    assert _pairs(tmp_path, find_inspection_set(tmp_path)) == pairs


def test_a_folder_of_masks_may_lie_in_each_split(tmp_path: Path) -> None:
    pairs: dict[str, str | None] = {}
    for split in ("train", "val"):
        for number in (1, 2):
            pairs[f"{split}/photos_a/{number}.jpg"] = f"{split}/inst/{number}.png"
    touch(tmp_path, *pairs, *filter(None, pairs.values()))
    assert _pairs(tmp_path, find_inspection_set(tmp_path, "inst")) == pairs
    one_split = touch(tmp_path / "other", *pairs, "train/instances/1.png")
    image_set = find_inspection_set(one_split, "train/instances", exclude=["**/inst"])
    assert _pairs(one_split, image_set)["train/photos_a/1.jpg"] == "train/instances/1.png"
    with pytest.raises(DataError, match=r"marks: no such folder of masks; check data\.masks"):
        find_inspection_set(tmp_path, "marks")


REPEATING = {
    "ADE": ("{n}.jpg", "{n}_seg.png", ["{n}_parts_1.png", "{n}_parts_2.png"]),
    "ADE of 2020": ("A_{n}.jpg", "A_{n}_seg.png", ["A_{n}_parts_1.png", "A_{n}/instance_000_A_{n}.png"]),
    "Cityscapes": (
        "leftImg8bit/val/ulm/ulm_{n}_19_leftImg8bit.png",
        "gtFine/val/ulm/ulm_{n}_19_gtFine_labelIds.png",
        [f"gtFine/val/ulm/ulm_{{n}}_19_gtFine_{end}.png" for end in ("color", "instanceIds", "labelTrainIds")],
    ),
    "LabelMe": ("{n}_json/img.png", "{n}_json/label.png", ["{n}_json/label_viz.png"]),
    "elevation": ("{n}_rgb.tif", "{n}_seg.tif", ["{n}_dem.tif"]),
    "VOC": ("JPEGImages/{n}.jpg", "SegmentationClass/{n}.png", ["SegmentationObject/{n}.png"]),
    "Mapillary": ("train/images/{n}.jpg", "train/labels/{n}.png", ["train/instances/{n}.png", "train/panoptic/{n}.png"]),
    "depth": ("RGB/{n}.png", "GT/LABELS/{n}.png", ["Depth/{n}.png"]),
    "points": ("test/bent/rgb/{n}.png", "test/bent/gt/{n}.png", ["test/bent/xyz/{n}.tiff"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATING)
def test_what_shows_masks_in_another_way_is_no_good_image(name: str, tmp_path: Path) -> None:
    image, mask, others = REPEATING[name]
    pairs = {image.format(n=n): mask.format(n=n) for n in (1, 2)}
    left_out = [other.format(n=n) for other in others for n in (1, 2)]
    touch(tmp_path, *pairs, *pairs.values(), *left_out)
    leftovers = Leftovers()
    assert _pairs(tmp_path, find_inspection_set(tmp_path, leftovers=leftovers)) == pairs
    (line,) = leftovers.describe()
    assert f"{len(left_out)} images are renderings of masks or of other images" in line
    assert min(left_out) in line


def test_photos_with_such_endings_are_images_where_there_are_no_masks(tmp_path: Path) -> None:
    touch(tmp_path, "1.png", "1_color.png", "2.png", "2_depth.png")
    assert len(find_inspection_set(tmp_path).images) == 4


def test_exact_stems_go_first(tmp_path: Path) -> None:
    pairs = {"images/001.png": "masks/001.png", "images/1.png": "masks/1_mask.png"}
    touch(tmp_path, *pairs, *pairs.values())
    assert _pairs(tmp_path, find_inspection_set(tmp_path)) == pairs


@pytest.mark.parametrize(("image_form", "mask_form"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_accents_are_composed_in_any_way(image_form: str, mask_form: str, tmp_path: Path) -> None:
    for name in ("Gehäuse_ü1", "é2"):
        image, mask = (unicodedata.normalize(form, name) for form in (image_form, mask_form))
        touch(tmp_path / "folders", f"images/{image}.png", f"masks/{mask}_mask.png")
        touch(tmp_path / "beside", f"{image}.png", f"{mask}_mask.png")
    for layout in ("folders", "beside"):
        assert None not in find_inspection_set(tmp_path / layout).masks


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("L/1.png R/1.png masks/1.png", r"in others: L/1\.png, R/1\.png"),
        ("images/a.png images/b.png masks/a.png masks/a_mask.png", "a second mask of"),
        ("images/01.png images/1.png masks/001.png", r"2 images have its name: images/01\.png, images/1"),
        ("images/1_a.png images/2_a.png masks/3.png", "a mask without an image of its name"),
        ("A_dem.tif A_seg.tif", "no images but the masks beside them"),
    ],
)  # fmt: skip
def test_what_fits_none_or_several_is_named(files: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        find_inspection_set(touch(tmp_path, *files.split()))
