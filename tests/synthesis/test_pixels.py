import torch

from lit_data.synthesis.canvas import Canvas, ValueRange
from lit_data.synthesis.windows import Pixels, Surroundings, Windows


def test_pixels_are_those_of_the_image_that_are_covered() -> None:
    image = torch.arange(2 * 2 * 6 * 6.0).view(2, 2, 6, 6) / 200
    centre = torch.tensor([0.0, 4.0]), torch.tensor([2.0, 5.0])
    surroundings = Surroundings(Canvas(image, ValueRange()), torch.tensor([0, 1]), *centre)
    windows = Windows(surroundings, torch.tensor([0.1, -0.2]), slice(0, 2), (3, 3))
    cover = torch.zeros(2, 3, 3)
    cover[:, 0, 0], cover[:, 1, 1], cover[:, 1, 2] = 0.25, 1.0, -0.5
    pixels = Pixels(windows, cover)
    assert pixels.defect.tolist() == [0, 0, 1, 1]
    assert pixels.y.tolist() == [0, 0, 3, 4]
    assert pixels.x.tolist() == [2, 3, 4, 5]
    assert pixels.cover.tolist() == [1.0, -0.5, 0.25, 1.0]
    assert torch.equal(pixels.strength, torch.tensor([0.1, 0.1, -0.2, -0.2]))
    assert torch.equal(pixels.before, image[[0, 0, 1, 1], :, pixels.y, pixels.x])
    assert torch.equal(
        pixels.look(pixels.y - 1, pixels.x), image[[0, 0, 1, 1], :, (pixels.y - 1).abs(), pixels.x]
    )
    assert pixels.of_each(torch.tensor([7, 9])).tolist() == [7, 7, 9, 9]
