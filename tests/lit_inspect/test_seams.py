"""Objects that are found in several windows of an image."""

import numpy as np

from lit_inspect.boxes import Objects, join_windows

FRAMES = np.array([[0, 0, 100, 100], [80, 0, 180, 100], [0, 80, 100, 180], [80, 80, 180, 180]])
SIZE = (180, 180)


def _found(*rows: tuple[float, ...]) -> Objects:
    """Objects as (left, top, right, bottom, class, score)."""
    table = np.array(rows, np.float32).reshape(-1, 6)
    return Objects(table[:, :4], table[:, 4].astype(np.int64), table[:, 5])


def _join(*parts: Objects) -> list[list[float]]:
    whole = [*parts, *[_found()] * (len(FRAMES) - len(parts))]
    joined = join_windows(whole, FRAMES, SIZE)
    columns = (joined.corners, joined.classes[:, None], joined.scores[:, None])
    return np.concatenate(columns, 1).round(3).tolist()


def _rows(*rows: tuple[float, ...]) -> list[list[float]]:
    return np.array(rows, np.float32).astype(float).round(3).tolist()


def test_an_object_on_a_seam_is_found_once() -> None:
    exact = (83.0, 40, 96, 52, 0, 0.9)
    shifted = (84.0, 41, 97, 53, 0, 0.8)
    assert _join(_found(exact), _found(shifted)) == _rows(exact)
    assert _join(_found(shifted), _found(exact)) == _rows(exact)


def test_a_box_that_a_window_cuts_yields_to_the_rest_of_it_with_any_score() -> None:
    cut = (92.0, 40, 100, 52, 0, 0.9)
    rest = (92.0, 40, 110, 52, 0, 0.6)
    assert _join(_found(cut), _found(rest)) == _rows(rest)
    alone = _join(_found(cut), _found())
    assert alone == _rows(cut)  # nothing better is known
    at_the_edge_of_the_image = (170.0, 40, 180, 52, 0, 0.9)
    assert _join(_found(), _found(at_the_edge_of_the_image)) == _rows(at_the_edge_of_the_image)


def test_other_classes_and_boxes_of_one_window_stay() -> None:
    one, other = (83.0, 40, 96, 52, 0, 0.9), (83.0, 40, 96, 52, 1, 0.8)
    assert _join(_found(one), _found(other)) == _rows(one, other)
    beside = (85.0, 40, 98, 52, 0, 0.7)
    assert _join(_found(one, beside), _found()) == _rows(one, beside)


def test_four_windows_that_see_one_object_in_their_corner() -> None:
    parts = [_found((84.0, 84, 94, 94, 0, score)) for score in (0.6, 0.7, 0.9, 0.8)]
    assert _join(*parts) == _rows((84.0, 84, 94, 94, 0, 0.9))
    assert _join(_found()) == []
