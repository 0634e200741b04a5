"""Plain mosaics and windows: boxes lie around their objects, and windows around the foreground."""

import numpy as np

from benchmarks.seed_ways import PlainMosaics

SIZE_PX = 60, 80


def test_boxes_of_plain_mosaics_lie_around_their_objects() -> None:
    image = np.zeros((3, *SIZE_PX), np.uint8)
    image[:, 20:40, 30:60] = 255
    box = np.array([[2, 45 / 80, 0.5, 30 / 80, 20 / 60]], np.float32)
    mosaics = PlainMosaics([image] * 5, [box] * 5, SIZE_PX)
    assert len(mosaics) == 5
    seen = 0
    for number in range(50):
        sample = mosaics[number % 5]
        white = sample["image"][0].numpy() > 127
        covered = np.zeros_like(white)
        for kind, x, y, width, height in sample["boxes"].numpy()[:4]:
            if not width:
                continue
            assert kind == 2
            ends = np.array((y - height / 2, y + height / 2, x - width / 2, x + width / 2))
            top, bottom, left, right = ends * (60, 60, 80, 80)
            # Less the pixel by which interpolation moves an edge.
            assert white[int(top) + 2 : int(bottom) - 1, int(left) + 2 : int(right) - 1].all()
            covered[int(top) : int(bottom) + 2, int(left) : int(right) + 2] = True
            seen += 1
        # What no box covers are slivers of four objects of 45 px that were cut off.
        assert (white & ~covered).sum() < 4 * 45 * 2
    assert seen >= 50
