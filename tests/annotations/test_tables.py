"""Labels of images in text files."""

import pytest

from lit_data.annotations.tables import split_label


@pytest.mark.parametrize(
    ("line", "image", "label"),
    [
        ("images/1.png 3", "images/1.png", "3"),
        ("images/1.png\tscratch", "images/1.png", "scratch"),
        ("images/1.png, -1", "images/1.png", "-1"),
        ("images/1.png;3", "images/1.png", "3"),
        ("my photo 1.png  cat", "my photo 1.png", "cat"),
        ("images/1.png", "images/1.png", ""),
        ("images/1.png,", "images/1.png,", ""),
    ],
)
def test_a_line_is_an_image_and_its_label(line: str, image: str, label: str) -> None:
    assert split_label(line) == (image, label)
