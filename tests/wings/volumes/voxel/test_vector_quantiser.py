import copy

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from lit_data.core.errors import ConfigError
from lit_data.wings.volumes import VectorQuantiser


def _clusters(count: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[4.0, 0.0], [-4.0, 0.0], [0.0, 4.0], [0.0, -4.0]])
    chosen = torch.randint(0, 4, (count,), generator=generator)
    return centres[chosen] + 0.1 * torch.randn(count, 2, generator=generator)


def _trained(codes: int = 4, steps: int = 40, **options: float) -> VectorQuantiser:
    torch.manual_seed(0)
    quantiser = VectorQuantiser(codes, 2, **options)
    for _ in range(steps):
        quantiser(_clusters())
        quantiser.update()
    return quantiser


def test_each_latent_gets_the_nearest_code() -> None:
    quantiser, latents = VectorQuantiser(8, 2).eval(), _clusters()
    found = quantiser(latents)
    distances = torch.cdist(latents, quantiser.codebook)
    assert torch.equal(found.codes, distances.argmin(1))
    assert_close(found.latents, quantiser.codebook[found.codes])
    assert_close(found.misses, distances.amin(1).square() / 2)


def test_gradients_pass_straight_and_the_misses_pull() -> None:
    quantiser, latents = VectorQuantiser(8, 2), _clusters().requires_grad_()
    weights = torch.randn(256, 2)
    (quantiser(latents).latents * weights).sum().backward()
    assert latents.grad is not None
    assert torch.equal(latents.grad, weights)
    latents.grad = None
    found = quantiser(latents)
    found.misses.sum().backward()
    assert_close(latents.grad, latents.detach() - quantiser.codebook[found.codes])
    assert not list(quantiser.parameters())


def test_codes_follow_the_latents_and_unused_ones_start_again() -> None:
    lost = _trained(restart_share=0.0)
    lost.codebook[2] = lost.sums[2] = 1e6
    lost(_clusters())
    lost.update()
    assert lost.codebook[2].max() > 1e3  # without restarts
    quantiser = _trained(16)
    found = quantiser.eval()(_clusters())
    assert len(found.codes.unique()) > 8
    assert found.misses.max() < 0.2
    quantiser.train()
    quantiser.codebook[2] = quantiser.sums[2] = 1e6  # where no latent is
    for _ in range(120):
        quantiser(_clusters())
        quantiser.update()
    assert quantiser.codebook.abs().max() < 5


def test_evaluation_and_broken_latents_leave_the_codes() -> None:
    quantiser = _trained()
    before = quantiser.codebook.clone()
    quantiser.eval()(_clusters())
    quantiser.update()
    quantiser.train()
    quantiser(torch.full((5, 2), torch.nan))
    quantiser.update()
    assert_close(quantiser.codebook, before)


def test_all_state_lies_in_buffers() -> None:
    one = _trained(steps=5)
    other = VectorQuantiser(4, 2)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for quantiser in (one, other):
        torch.manual_seed(torch.seed())
        quantiser(_clusters())
        quantiser.update()
    assert torch.equal(one.codebook, other.codebook)


def test_ranks_sum_what_they_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal ranks count everything twice, which leaves the running mean where one rank has it."""
    alone, ranked = _trained(steps=3), _trained(steps=3)
    for quantiser in (alone, ranked):
        quantiser(_clusters())
    counted, calls = ranked.seen_sizes.clone(), []
    alone.update()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    reduce = lambda tensor: calls.append("all_reduce") or tensor.mul_(2)  # noqa: E731
    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(dist, "broadcast", lambda _, source: calls.append(f"broadcast {source}"))
    ranked.update()
    assert calls == ["all_reduce", "all_reduce", "broadcast 0"]
    assert_close(ranked.sizes, alone.sizes + 0.03 * counted)
    assert not ranked.seen_sizes.any()


@pytest.mark.parametrize(
    "options", [{"codes": 1}, {"width": 0}, {"decay": 1.0}, {"restart_share": 1.0}], ids=str
)
def test_impossible_options(options: dict[str, float]) -> None:
    message = r"need codes >= 2, width >= 1, 0 <= decay < 1 and 0 <= restart_share < 1"
    with pytest.raises(ConfigError, match=message):
        VectorQuantiser(**options)  # type: ignore[arg-type]
