import pytest
import torch

from lit_data.modules.voxel.module import CodePerplexity, VoxelScores


def _errors(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_scores_of_two_volumes() -> None:
    metric = VoxelScores()
    metric.update(torch.tensor([6]), torch.tensor([10]), torch.tensor([8]), _errors(3, 1, 10))
    metric.update(torch.zeros(1), torch.full((1,), 5.0), torch.full((1,), 5.0), _errors(0, 0, 0))
    found = {name: float(value) for name, value in metric.compute().items()}
    expected = {"iou": 6 / 12 / 2, "f1": 12 / 18 / 2, "value_mae": 0.3, "psnr": 10.0}
    assert found == pytest.approx(expected)
    exact = VoxelScores()
    exact.update(torch.ones(1), torch.ones(1), torch.ones(1), _errors(0, 0, 5))
    assert float(exact.compute()["psnr"]) == pytest.approx(120)  # it is finite


def test_the_batching_does_not_matter() -> None:
    counts = torch.tensor([[3, 9, 4], [0, 0, 0], [5, 5, 5], [1, 70, 2]])
    one, many = VoxelScores(), VoxelScores()
    errors = _errors(0.4, 0.2, 4.0)
    one.update(*counts.unbind(1), errors)
    for row in counts:
        many.update(*row[None].unbind(1), errors / 4)
    for name, value in one.compute().items():
        torch.testing.assert_close(value, many.compute()[name])
    assert float(one.compute()["iou"]) == pytest.approx((3 / 10 + 1 + 1 + 1 / 71) / 4)


def test_perplexity_counts_codes_in_use() -> None:
    metric = CodePerplexity(8)
    metric.update(torch.zeros(0, dtype=torch.int64))
    assert float(metric.compute()) == 1
    metric.update(torch.tensor([[0, 1], [2, 3]]))
    assert float(metric.compute()) == pytest.approx(4)
    metric.update(torch.tensor([0] * 1000))
    assert 1 < float(metric.compute()) < 1.1
