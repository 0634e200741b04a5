import pytest
import torch

from lit_data.errors import ConfigError
from lit_data.modules import DetectorNet
from lit_data.modules.detection.net import Level, decode, place_centres

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")


@pytest.mark.parametrize(
    ("height", "width", "levels"),
    [
        (320, 256, ((40, 32), (20, 16), (10, 8))),
        (100, 36, ((13, 5), (7, 3), (4, 2))),  # no multiple of a stride
        (1, 1, ((1, 1), (1, 1), (1, 1))),
    ],
)
def test_shapes(height: int, width: int, levels: tuple[tuple[int, int], ...]) -> None:
    net = DetectorNet(5, width=4).eval()
    with torch.no_grad():
        logits, boxes, found = net(torch.rand(2, 3, height, width))
    assert found == tuple(
        Level(stride, *size) for stride, size in zip((8, 16, 32), levels, strict=True)
    )
    places = sum(rows * columns for rows, columns in levels)
    assert logits.shape == (2, places, 5)
    assert boxes.shape == (2, places, 4)
    assert (boxes[..., 2:] > boxes[..., :2]).all()


def test_it_is_small() -> None:
    assert sum(weight.numel() for weight in DetectorNet(3).parameters()) == 942_597
    assert sum(weight.numel() for weight in DetectorNet(80, width=24).parameters()) < 3_000_000


def test_places_lie_in_the_middle_of_their_cells() -> None:
    centres, strides = place_centres((Level(8, 2, 3), Level(16, 1, 2)), torch.device("cpu"))
    assert centres[:6].tolist() == [[x, y] for y in (4, 12) for x in (4, 12, 20)]
    assert centres[6:].tolist() == [[8, 8], [24, 8]]
    assert strides.flatten().tolist() == [8] * 6 + [16] * 2


def test_codes_are_offsets_and_logarithms_of_sizes() -> None:
    codes = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [0.5, -1.0, -1.0, 99.0]]])
    low, high = decode(codes, (Level(8, 1, 2),))[0].split(2, dim=1)
    assert ((low + high) / 2).tolist() == [[4, 4], [16, -4]]
    assert (high - low)[0].tolist() == [32, 32]
    assert (high - low)[1].tolist() == pytest.approx([32 * 0.36788, 32 * 403.42], rel=1e-4)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_outputs_are_float32_and_the_untrained_net_finds_little(precision: torch.dtype) -> None:
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
        found = DetectorNet(2, width=4)(torch.rand(2, 3, 64, 64))
    assert found.logits.dtype == found.boxes.dtype == torch.float32
    assert found.logits.sigmoid().max() < 0.05


@pytest.mark.parametrize(("classes", "width"), [(0, 16), (3, 0), (3, 7)])
def test_impossible_sizes(classes: int, width: int) -> None:
    message = f"classes={classes}, width={width}: need classes >= 1 and an even"
    with pytest.raises(ConfigError, match=message):
        DetectorNet(classes, width=width)
