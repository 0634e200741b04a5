"""Train the encoder that `AnomalyModule` brings along, on drawn textures, and write its weights.

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
from typing import NamedTuple

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.textures import draw_defect, draw_texture
from lit_data.modules.anomaly.encoder import TextureEncoder

CROP_PX = 96
_ROWS, _COLUMNS = 2, 4
_SUPPORT = 4  # crops that fill the memory
_CLEAN = 2  # of the others without a defect
_MEMORY = 512  # cells of them
_SCORED = 0.3  # of the cells without a defect, in each round
_MARGIN = 0.3  # of logarithms of distances
_SHARPNESS = 4.0


class Episode(NamedTuple):
    """Output of the fixed filters for the crops of a texture, and the truth about its queries.

    Attributes:
        fine: [8, C, 24, 24] float16 at a stride of 4 px.
        coarse: [8, C, 12, 12] float16 at a stride of 8 px.
        cover: [N] of each place of the queries the fraction that shows a defect.
        touched: [N] bool, True if any of it does.
    """

    fine: Tensor
    coarse: Tensor
    cover: Tensor
    touched: Tensor


def draw_episode(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Draw crops of a texture [8, 3, 96, 96], the last with a defect, and masks [8, 1, 96, 96]."""
    canvas = draw_texture(rng, _ROWS * CROP_PX, _COLUMNS * CROP_PX)
    order = rng.permutation(_ROWS * _COLUMNS)
    crops = []
    for number in order:
        top, left = (number // _COLUMNS) * CROP_PX, (number % _COLUMNS) * CROP_PX
        crops.append(canvas[top : top + CROP_PX, left : left + CROP_PX])
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
    """Join both scales at the finer one, each the mean of 3 x 3 cells: [B, C, h, w]."""
    size = maps[0].shape[2:]
    joined = []
    for features in maps:
        padded = F.pad(features, (1, 1, 1, 1), mode="replicate")
        pooled = F.avg_pool2d(padded, 3, 1)
        if pooled.shape[2:] != size:
            pooled = F.interpolate(pooled, size, mode="bilinear")
        joined.append(pooled)
    return torch.cat(joined, 1)


def describe_episode(net: TextureEncoder, number: int, seed: int) -> Episode:
    """Run the fixed filters over an episode, and find the cells of its queries with a defect."""
    images, masks = draw_episode(np.random.default_rng([seed, number]))
    with torch.inference_mode():
        fine, coarse = net.describe(images)
    cover = F.avg_pool2d(masks[_SUPPORT:], 4).flatten()
    touched = F.max_pool2d(masks[_SUPPORT:], 4).flatten() > 0
    return Episode(fine.half(), coarse.half(), cover, touched)


def find_loss(
    net: TextureEncoder, episode: Episode, generator: torch.Generator
) -> tuple[Tensor, float]:
    """Return the loss of an episode, and the fraction of hard pairs in the right order."""
    maps = [net.fine(episode.fine.float()), net.coarse(episode.coarse.float())]
    features = join_features(maps).permute(0, 2, 3, 1)
    width = features.shape[-1]
    memory = features[:_SUPPORT].reshape(-1, width)
    memory = memory[torch.randperm(len(memory), generator=generator)[:_MEMORY]]
    queries = features[_SUPPORT:].reshape(-1, width)
    is_drawn = torch.rand(len(queries), generator=generator) < _SCORED
    chosen = torch.nonzero(episode.touched | is_drawn).flatten()
    queries, cover, touched = queries[chosen], episode.cover[chosen], episode.touched[chosen]
    norms = queries.pow(2).sum(1, keepdim=True) + memory.pow(2).sum(1)
    squared = (norms - 2 * queries @ memory.T).clamp(min=1e-6)
    scores = 0.5 * squared.amin(1).log()  # of the distance to the nearest of the memory
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
    began_s = time.process_time()
    net = TextureEncoder(None)
    drawn = []
    for number in range(episodes):
        drawn.append(describe_episode(net, number, seed))
        if (number + 1) % 50 == 0:
            spent_s = time.process_time() - began_s
            print(f"{number + 1} episodes drawn, {spent_s:.0f} s", flush=True)
    for head, name in ((net.fine, "fine"), (net.coarse, "coarse")):
        rows = []
        for episode in drawn:
            features = getattr(episode, name)[::3].float().permute(0, 2, 3, 1)
            rows.append(features.flatten(0, 2)[::5])
        joined = torch.cat(rows)
        head.mean.copy_(joined.mean(0))
        head.std.copy_(joined.std(0).clamp(min=1e-3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=learning_rate, weight_decay=1e-2)
    steps = episodes * rounds
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=0.1
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(rounds):
        results = []
        for number in torch.randperm(episodes, generator=generator).tolist():
            optimizer.zero_grad()
            loss, in_order = find_loss(net, drawn[number], generator)
            loss.backward()  # type: ignore[no-untyped-call]
            results.append((float(loss.detach()), in_order))
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        mean_loss, mean_in_order = np.mean(results, axis=0)
        spent_s = time.process_time() - began_s
        print(f"loss {mean_loss:.4f}, in order {mean_in_order:.4f}, {spent_s:.0f} s", flush=True)
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
    options = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    train(options.episodes, options.rounds, options.seed, options.path, options.learning_rate)


if __name__ == "__main__":
    main()
