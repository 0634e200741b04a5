import hashlib
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.trainer.states import RunningStage

from lit_data.callbacks import SampleDigest

RUNS = {"state": SimpleNamespace(stage=RunningStage.TRAINING), "train_dataloader": None}
ALONE = SimpleNamespace(world_size=1, **RUNS)


def _feed(batches: list[Any], trainer: Any = ALONE, **options: Any) -> SampleDigest:
    digest = SampleDigest(**options)
    for batch_idx, batch in enumerate(batches):
        digest.on_train_batch_start(trainer, trainer, batch, batch_idx)
    return digest


def _samples() -> torch.Tensor:
    return torch.rand(12, 3, 4, generator=torch.Generator().manual_seed(0))


def _known(batch_size: int) -> Any:
    """A trainer whose loader tells its batch size."""
    loader = SimpleNamespace(batch_size=batch_size, sampler=range(12))
    return SimpleNamespace(**vars(ALONE) | {"train_dataloader": loader})


def test_the_digest_is_the_sum_of_the_samples_digests() -> None:
    samples, total = _samples(), 0
    for sample in samples:
        total += int(hashlib.sha256(sample.numpy().tobytes()).hexdigest(), 16)
    expected = {"samples_sha256": f"{total % 2**256:064x}", "train/samples_hashed": 12}
    assert _feed([samples]).summary() == expected
    for size in (1, 5, 12):  # in another order too
        assert _feed(list(samples.flip(0).split(size))).summary() == expected


def test_every_byte_and_every_key_matters() -> None:
    samples = _samples()
    changed = samples.clone()
    changed[7, 2, 3] += 1e-6
    assert _feed([samples]).summary() != _feed([changed]).summary()
    one, two = ({"image": samples, "mask": mask} for mask in (samples > 0.5, samples > 0.6))
    assert _feed([one]).summary() != _feed([two]).summary()
    # Image comes before mask.
    assert _feed([one]).summary() == _feed([(samples, samples > 0.5)]).summary()
    assert _feed([samples.bfloat16()]).summary()["train/samples_hashed"] == 12


def test_boxes_and_voxels_are_hashed_with_their_sample_whatever_its_row() -> None:
    images, counts = _samples(), torch.tensor([2, 0, 3, 1] * 3)
    boxes = torch.rand(int(counts.sum()), 5, generator=torch.Generator().manual_seed(1))
    values = boxes[:, :1].clone()

    def cut(start: int, stop: int) -> dict[str, torch.Tensor]:
        mine = slice(int(counts[:start].sum()), int(counts[:stop].sum()))
        rows = torch.arange(stop - start).repeat_interleave(counts[start:stop])[:, None]
        flat = torch.cat((rows, boxes[mine]), dim=1)
        return {
            "image": images[start:stop], "boxes": flat, "boxes_count": counts[start:stop], "value": values[mine]
        }  # fmt: skip

    whole = _feed([cut(0, 12)]).summary()
    assert _feed([cut(8, 12), cut(0, 3), cut(3, 8)]).summary() == whole
    for changed in (boxes, values):
        changed[7, -1] += 1e-6
        assert _feed([cut(0, 12)]).summary() != whole
        changed[7, -1] -= 1e-6
    flat = cut(0, 12)  # the loader says which of the two are samples
    pair = flat["image"], flat["boxes"]
    assert _feed([pair], _known(12)).summary() == _feed([images]).summary()


def test_hashing_stops_at_its_bound() -> None:
    batches = list(_samples().split(4))
    bounded = _feed(batches, max_samples=8)
    assert bounded.summary() == _feed(batches[:2]).summary()
    assert _feed(batches, max_samples=None).samples == 12


def test_the_bound_is_that_of_all_ranks_together() -> None:
    # The other rank has the same.
    strategy = SimpleNamespace(root_device="cpu", reduce=lambda mine, reduce_op: 2 * mine)
    batches = list(_samples().split(4))
    both = _feed(batches, SimpleNamespace(world_size=2, strategy=strategy, **RUNS), max_samples=8)
    assert both.summary() == _feed([batches[0], batches[0]]).summary()


def test_it_goes_on_after_a_resume() -> None:
    batches = list(_samples().split(4))
    first, second = _feed(batches[:2]), SampleDigest()
    second.load_state_dict(first.state_dict())
    second.on_train_batch_start(ALONE, ALONE, batches[2], 2)
    assert second.summary() == _feed(batches).summary()
    assert SampleDigest().summary() == {}


def test_samples_in_lists_are_hashed_whatever_their_size_and_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    samples = []
    for number in range(12):
        boxes = torch.rand(number % 4, 4, generator=generator)
        samples.append((torch.rand(3, 4 + number % 3, 5, generator=generator), {"boxes": boxes}))

    def together(size: int) -> list[Any]:
        parts = [samples[first : first + size] for first in range(0, 12, size)]
        return [list(zip(*part, strict=True)) for part in parts]

    digests = [_feed(together(size), _known(size)).summary() for size in (12, 6, 4, 2)]
    assert digests[0]["train/samples_hashed"] == 12
    assert digests.count(digests[0]) == 4
    samples[7][1]["boxes"][0, 0] += 1
    assert _feed(together(6), _known(6)).summary() != digests[0]
    assert _feed([list(samples)], _known(12)).summary()["train/samples_hashed"] == 12


def test_a_module_that_cuts_its_batches_says_what_a_sample_is() -> None:
    rows, counts = _samples(), torch.tensor([2, 4, 6])

    def cut(batch: Any, start: int, stop: int) -> Any:
        first, end = int(batch["n"][:start].sum()), int(batch["n"][:stop].sum())
        return {"rows": batch["rows"][first:end], "n": batch["n"][start:stop]}

    module = SimpleNamespace(count_samples=lambda batch: len(batch["n"]), slice_batch=cut)
    trainer = SimpleNamespace(**vars(ALONE), lightning_module=module)
    batch = {"rows": rows, "n": counts}
    digest = _feed([batch], trainer).summary()
    assert digest["train/samples_hashed"] == 3
    assert _feed([cut(batch, 2, 3), cut(batch, 0, 2)], trainer).summary() == digest
    assert _feed([{"rows": rows + 1, "n": counts}], trainer).summary() != digest
