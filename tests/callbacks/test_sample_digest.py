import hashlib
from typing import Any

import pytest
import torch

from lit_data.callbacks import SampleDigest


def _feed(batches: list[Any], **options: Any) -> SampleDigest:
    digest = SampleDigest(**options)
    for batch_idx, batch in enumerate(batches):
        digest.on_train_batch_start(None, None, batch, batch_idx)  # type: ignore[arg-type]
    return digest


def _samples() -> torch.Tensor:
    return torch.rand(12, 3, 4, generator=torch.Generator().manual_seed(0))


def test_the_digest_is_the_sum_of_the_samples_digests() -> None:
    samples = _samples()
    total = sum(int(hashlib.sha256(sample.numpy().tobytes()).hexdigest(), 16) for sample in samples) % 2**256
    summary = _feed([samples]).summary()
    assert summary == {"samples_sha256": f"{total:064x}", "train/samples_hashed": 12}


@pytest.mark.parametrize("size", [1, 5, 12])
def test_order_and_batch_size_do_not_matter(size: int) -> None:
    samples = _samples()
    expected = _feed([samples]).summary()
    assert _feed(list(samples.flip(0).split(size))).summary() == expected


def test_every_byte_and_every_key_matters() -> None:
    samples = _samples()
    changed = samples.clone()
    changed[7, 2, 3] += 1e-6
    assert _feed([samples]).summary() != _feed([changed]).summary()
    one, two = ({"image": samples, "mask": mask} for mask in (samples > 0.5, samples > 0.6))
    assert _feed([one]).summary() != _feed([two]).summary()
    assert _feed([one]).summary() == _feed([(samples, samples > 0.5)]).summary()  # image comes before mask


def test_bfloat16_batches_are_hashed() -> None:
    assert _feed([_samples().bfloat16()]).summary()["train/samples_hashed"] == 12


def test_hashing_stops_at_its_bound() -> None:
    batches = list(_samples().split(4))
    bounded = _feed(batches, max_samples=8)
    assert bounded.summary() == _feed(batches[:2]).summary()
    assert _feed(batches, max_samples=None).samples == 12


def test_it_goes_on_after_a_resume() -> None:
    batches = list(_samples().split(4))
    first, second = _feed(batches[:2]), SampleDigest()
    second.load_state_dict(first.state_dict())
    second.on_train_batch_start(None, None, batches[2], 2)  # type: ignore[arg-type]
    assert second.summary() == _feed(batches).summary()
    assert SampleDigest().summary() == {}
