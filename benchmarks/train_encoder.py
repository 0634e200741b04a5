"""Train the encoder that `AnomalyModule` brings along, on textures that are drawn, and write its
weights.

``python -m benchmarks.train_encoder encoder.pt`` gives the same file each time on the same machine.
An episode is a texture of its own: crops of it fill a memory, and other crops, some with a defect,
are scored by their distance to it as `AnomalyModule` does. The loss asks that pixels of defects be
farther away than the farthest of the others, whatever the distances: what is learned is a metric,
not the look of textures or of defects (Snell et al., "Prototypical networks for few-shot learning",
NeurIPS 2017, for the episodes; Baradad et al., "Learning to see by looking at noise", NeurIPS 2021,
for images that nobody took).
"""

import argparse
import time
from pathlib import Path
from typing import Final, NamedTuple

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.textures import draw_defect, draw_texture
from lit_data.modules.anomaly.encoder import TextureEncoder

CROP_PX: Final = 96
_ROWS, _COLUMNS = 2, 4
_SUPPORT: Final = 4  # crops that fill the memory
_CLEAN: Final = 2  # of the others without a defect
_MEMORY: Final = 512  # places of them
_SCORED: Final = 0.3  # of the places without a defect, in each round
_MARGIN: Final = 0.3  # of logarithms of distances
_SHARPNESS: Final = 4.0


class Episode(NamedTuple):
    """What the fixed filters say of the crops of a texture, and what the queries among them show.

    Attributes:
        fine: [8, C, 24, 24] float16 at a stride of 4 px.
        coarse: [8, C, 12, 12] float16 at a stride of 8 px.
        cover: [N] of each place of the queries the fraction that shows a defect.
        touched: [N] bool, whether any of it does.
    """

    fine: Tensor
    coarse: Tensor
    cover: Tensor
    touched: Tensor


def draw_episode(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Crops of a texture [8, 3, 96, 96], the last of them with a defect, and the masks [8, 1, 96, 96]."""
    canvas = draw_texture(rng, _ROWS * CROP_PX, _COLUMNS * CROP_PX)
    order = rng.permutation(_ROWS * _COLUMNS)
    crops = [
        canvas[(n // _COLUMNS) * CROP_PX :, (n % _COLUMNS) * CROP_PX :][:CROP_PX, :CROP_PX]
        for n in order
    ]
    masks = [np.zeros((CROP_PX, CROP_PX), np.float32) for _ in crops]
    spread = float(canvas.std())
    for number, crop in enumerate(crops):
        crop = crop.copy()
        if number >= _SUPPORT + _CLEAN:
            crop, masks[number] = draw_defect(rng, crop, canvas)
        gain, shift = rng.normal(1, 0.04), rng.normal(0, 0.06) * spread
        crops[number] = crop * np.float32(gain) + np.float32(shift)
    images = torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).float()
    support = images[:_SUPPORT]
    mean, std = support.mean((0, 2, 3), keepdim=True), support.std().clamp(min=1e-3)
    return ((images - mean) / std).contiguous(), torch.from_numpy(np.stack(masks))[:, None]


def join_features(maps: list[Tensor]) -> Tensor:
    """[B, C, h, w] of both scales at the finer one, each the mean of 3 x 3 places."""
    pooled = [F.avg_pool2d(F.pad(one, (1, 1, 1, 1), mode="replicate"), 3, 1) for one in maps]
    size = pooled[0].shape[2:]
    return torch.cat([pooled[0], *(F.interpolate(p, size, mode="bilinear") for p in pooled[1:])], 1)


def describe_episode(net: TextureEncoder, number: int, seed: int) -> Episode:
    """The fixed filters' numbers of an episode, as float16, and which places of the queries show a defect."""
    images, masks = draw_episode(np.random.default_rng([seed, number]))
    with torch.inference_mode():
        fine, coarse = net.describe(images)
    cover = F.avg_pool2d(masks[_SUPPORT:], 4).flatten()
    touched = F.max_pool2d(masks[_SUPPORT:], 4).flatten() > 0
    return Episode(fine.half(), coarse.half(), cover, touched)


def find_loss(
    net: TextureEncoder, episode: Episode, generator: torch.Generator
) -> tuple[Tensor, float]:
    """The loss of an episode, and the fraction of pairs of hard places that are in the right order."""
    features = join_features(
        [net.fine(episode.fine.float()), net.coarse(episode.coarse.float())]
    ).permute(0, 2, 3, 1)
    width = features.shape[-1]
    memory = features[:_SUPPORT].reshape(-1, width)
    memory = memory[torch.randperm(len(memory), generator=generator)[:_MEMORY]]
    queries, cover, touched = features[_SUPPORT:].reshape(-1, width), episode.cover, episode.touched
    chosen = torch.nonzero(
        touched | (torch.rand(len(queries), generator=generator) < _SCORED)
    ).flatten()
    queries, cover, touched = queries[chosen], cover[chosen], touched[chosen]
    squared = (
        queries.pow(2).sum(1, keepdim=True) + memory.pow(2).sum(1) - 2 * queries @ memory.T
    ).clamp(min=1e-6)
    scores = 0.5 * squared.amin(1).log()
    bad, good = scores[cover > 0.3], scores[~touched]
    if not len(bad):
        bad = scores[touched]
    hard = good.topk(max(1, len(good) // 20)).values  # the farthest decide about images
    strong = bad.topk(max(1, len(bad) // 2)).values  # half of a defect is enough to be found
    pairs = hard[None] - strong[:, None]
    everywhere = good[::7][None] - bad[:, None]
    loss = _rank(pairs) + 0.5 * _rank(everywhere)
    return loss, float((pairs.detach() < 0).float().mean())


def _rank(pairs: Tensor) -> Tensor:
    return F.softplus(_SHARPNESS * (pairs + _MARGIN)).mean() / _SHARPNESS


def train(episodes: int, rounds: int, seed: int, path: Path, learning_rate: float) -> None:
    """Draw episodes, train on them in rounds, and write the weights as float16."""
    torch.manual_seed(seed)
    net, before_s = TextureEncoder(None), time.process_time()
    drawn = []
    for number in range(episodes):
        drawn.append(describe_episode(net, number, seed))
        if (number + 1) % 50 == 0:
            print(
                f"{number + 1} episodes drawn, {time.process_time() - before_s:.0f} s", flush=True
            )
    for head, name in ((net.fine, "fine"), (net.coarse, "coarse")):
        rows = torch.cat(
            [
                getattr(one, name)[::3].float().permute(0, 2, 3, 1).flatten(0, 2)[::5]
                for one in drawn
            ]
        )
        head.mean.copy_(rows.mean(0))
        head.std.copy_(rows.std(0).clamp(min=1e-3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=learning_rate, weight_decay=1e-2)
    steps = episodes * rounds
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=0.1
    )
    generator, shown = torch.Generator().manual_seed(seed), list[tuple[float, float]]()
    for _ in range(rounds):
        for number in torch.randperm(episodes, generator=generator).tolist():
            optimizer.zero_grad()
            loss, right = find_loss(net, drawn[number], generator)
            loss.backward()  # type: ignore[no-untyped-call]
            shown.append((float(loss.detach()), right))
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        mean = np.mean(shown[-episodes:], axis=0)
        print(
            f"loss {mean[0]:.4f}, in order {mean[1]:.4f}, {time.process_time() - before_s:.0f} s",
            flush=True,
        )
        save(net, path)


def save(net: TextureEncoder, path: Path) -> None:
    """Write the weights as float16."""
    torch.save({name: weight.half() for name, weight in net.state_dict().items()}, path)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, help="where the weights go")
    parser.add_argument("--episodes", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    train(given.episodes, given.rounds, given.seed, given.path, given.learning_rate)


if __name__ == "__main__":
    main()
