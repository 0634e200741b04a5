import numpy as np

from lit_data.inference import find_defects


def test_regions_are_measured_and_sorted() -> None:
    probability = np.zeros((10, 12), np.float32)
    probability[1:3, 1:4] = 0.6
    probability[5, 5] = probability[6, 6] = 0.9
    probability[9, 11] = 0.7
    probability[0, 11] = 0.4
    defects = find_defects(probability, threshold=0.5)
    assert [(d.y, d.x, d.height_px, d.width_px, d.area_px) for d in defects] == [
        (5.5, 5.5, 2, 2, 2),
        (9.0, 11.0, 1, 1, 1),
        (1.5, 2.0, 2, 3, 6),
    ]
    assert [round(d.score, 3) for d in defects] == [0.9, 0.7, 0.6]
    assert len(find_defects(probability, threshold=0.5, min_area_px=2)) == 2
    assert find_defects(np.zeros((4, 4), np.float32)) == []
