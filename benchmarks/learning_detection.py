"""Boxes of the benchmark of learning: their score, and a plain training loop.

The loop is what people write without a framework. It needs torch, OpenCV and NumPy alone, and nothing
of it is shared with `lit_data`: neither the reading of labels nor the score.
``python -m benchmarks.learning_detection plain ROOT SEED SECONDS OUT`` writes ``OUT/detections.json``.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from faster_coco_eval import COCO, COCOeval_faster
from numpy.typing import NDArray
from torch import Tensor, nn

log = logging.getLogger(__name__)

Clock = Callable[[], float]


class Box(NamedTuple):
    """An object of an image.

    Attributes:
        class_number: From 0.
        corners: (left, top, right, bottom), px of the image on the disk.
        score: In 0..1; 1 for a true box.
    """

    class_number: int
    corners: tuple[float, float, float, float]
    score: float = 1.0


Boxes = Mapping[str, Sequence[Box]]
"""Boxes of images, by the stem of their file names."""


def list_images(folder: Path, split: str) -> list[Path]:
    """Return the images of ``train``, ``val`` or ``test`` of a dataset with list files."""
    names = (folder / f"{split}.txt").read_text().split()
    return [folder / name for name in names]


def read_truth(folder: Path, split: str) -> dict[str, list[Box]]:
    """Read the YOLO text of one split of a dataset with list files."""
    truth = {}
    for image in list_images(folder, split):
        height_px, width_px = _read_image(image).shape[:2]
        label_path = folder / "labels" / f"{image.stem}.txt"
        truth[image.stem] = _read_labels(label_path, height_px, width_px)
    return truth


def _read_labels(path: Path, height_px: int, width_px: int) -> list[Box]:
    boxes = []
    for line in path.read_text().splitlines():
        number, x, y, width, height = map(float, line.split())
        left, top = (x - width / 2) * width_px, (y - height / 2) * height_px
        right, bottom = left + width * width_px, top + height * height_px
        boxes.append(Box(int(number), (left, top, right, bottom)))
    return boxes


def read_detections(path: Path) -> dict[str, list[Box]]:
    """Read a COCO file with scores, such as the ``detections.json`` of ``lit_data predict``."""
    table = json.loads(path.read_text())
    stems = {image["id"]: Path(image["file_name"]).stem for image in table["images"]}
    detections: dict[str, list[Box]] = {stem: [] for stem in stems.values()}
    for row in table["annotations"]:
        left, top, width, height = row["bbox"]
        corners = (left, top, left + width, top + height)
        box = Box(row["category_id"] - 1, corners, row["score"])
        detections[stems[row["image_id"]]].append(box)
    return detections


def write_detections(predictions: Boxes, path: Path) -> None:
    """Write boxes as `read_detections` reads them."""
    images = [{"id": number, "file_name": stem} for number, stem in enumerate(predictions)]
    table = {"images": images, "annotations": _list_rows(predictions, list(predictions))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table))


def _list_rows(boxes: Boxes, stems: Sequence[str]) -> list[dict[str, Any]]:
    """List the boxes of images as annotations of COCO; the number of an image is its place."""
    rows: list[dict[str, Any]] = []
    for number, stem in enumerate(stems):
        for box in boxes.get(stem, ()):
            left, top, right, bottom = box.corners
            rows.append(
                {
                    "id": len(rows) + 1,
                    "image_id": number,
                    "category_id": box.class_number + 1,
                    "bbox": [left, top, right - left, bottom - top],
                    "area": (right - left) * (bottom - top),
                    "iscrowd": 0,
                    "score": box.score,
                }
            )
    return rows


def score_boxes(predictions: Boxes, truth: Boxes) -> float:
    """Return mAP50: the mean over the true classes of COCO's average precision at IoU 0.5.

    Args:
        predictions: Of the images of `truth`; an image that is missing has none.
        truth: Every image that counts, also those without an object.
    """
    stems = list(truth)
    true_rows, found_rows = _list_rows(truth, stems), _list_rows(predictions, stems)
    classes = sorted({row["category_id"] for row in true_rows})
    if not found_rows or not classes:
        return 0.0
    table = {
        "images": [{"id": number} for number in range(len(stems))],
        "categories": [{"id": number} for number in classes],
        "annotations": true_rows,
    }
    coco = COCO(table)
    evaluator: Any = COCOeval_faster(
        coco, coco.loadRes(found_rows), "bbox", print_function=log.debug
    )
    evaluator.params.iouThrs = np.array([0.5])
    evaluator.evaluate()
    evaluator.accumulate()
    # [IoU, recall, class, area, most boxes]
    return float(evaluator.eval["precision"][0, :, :, 0, -1].mean())


class PlainNet(nn.Module):
    """Four strided stages and a head of 1 x 1 at stride 8.

    Its outputs are a logit for each class, and (x, y, log w, log h).

    Args:
        classes: Number of classes.
    """

    stride_px = 8

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for outputs, stride in ((16, 2), (32, 2), (64, 2), (128, 1), (128, 1), (128, 1)):
            layers += [
                nn.Conv2d(channels, outputs, 3, stride, 1),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            ]
            channels = outputs
        self.layers = nn.Sequential(*layers)
        self.head = nn.Conv2d(channels, classes + 4, 1)
        nn.init.constant_(self.head.bias[:classes], -4.0)  # type: ignore[index]  # objects are rare

    def forward(self, images: Tensor) -> Tensor:
        """From [B, 3, H, W] in 0..1 to [B, classes + 4, H / 8, W / 8]."""
        answer: Tensor = self.head(self.layers(images))
        return answer


def train_plain(
    folder: Path,
    *,
    seconds: float,
    seed: int = 0,
    size_px: int = 320,
    batch_size: int = 8,
    clock: Clock | None = None,
) -> dict[str, list[Box]]:
    """Train `PlainNet` the usual way, and predict the test images.

    Adam, random flips, binary cross entropy and L1.

    Args:
        folder: A dataset with list files and YOLO text, see
            `benchmarks.learning_sets.prepare_boards`.
        seconds: Time to train for.
        seed: Of weights, order and flips.
        size_px: Side that images are scaled to.
        batch_size: Images of a step.
        clock: Measures the time, in seconds; that of all threads of this process by default.
    """
    torch.manual_seed(seed)
    classes = len((folder / "classes.txt").read_text().split())
    images, boxes = _load(folder, "train", size_px)
    net = PlainNet(classes).train()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for rows in _batches(len(images), batch_size, seconds, seed, clock or time.process_time):
        flips = torch.rand(len(rows)) < 0.5
        batch, targets = [], []
        for row, flip in zip(rows, flips, strict=True):
            batch.append(images[row].flip(-1) if flip else images[row])
            targets.append(_flip(boxes[row], size_px) if flip else boxes[row])
        loss = _plain_loss(net(torch.stack(batch)), targets, classes)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return _predict_plain(net.eval(), folder, size_px, classes)


def _batches(
    count: int, batch_size: int, seconds: float, seed: int, clock: Clock
) -> Iterator[list[int]]:
    """Yield shuffled numbers of images until the time is over."""
    generator = torch.Generator().manual_seed(seed)
    began = clock()
    while True:
        order = torch.randperm(count, generator=generator).tolist()
        for start in range(0, count, batch_size):
            if clock() - began >= seconds:
                return
            yield order[start : start + batch_size]


def _load(folder: Path, split: str, size_px: int) -> tuple[list[Tensor], list[Tensor]]:
    """Read images as [3, S, S] in 0..1, and boxes as [n, 5] in px of these.

    Columns of boxes are class, left, top, right, bottom.
    """
    images, boxes = [], []
    for path in list_images(folder, split):
        image = _read_image(path)
        height_px, width_px = image.shape[:2]
        scale = np.array((size_px / width_px, size_px / height_px) * 2)
        images.append(_to_tensor(image, size_px))
        labels = _read_labels(folder / "labels" / f"{path.stem}.txt", height_px, width_px)
        rows = [(box.class_number, *(np.array(box.corners) * scale)) for box in labels]
        boxes.append(torch.tensor(rows, dtype=torch.float32).view(-1, 5))
    return images, boxes


def _read_image(path: Path) -> NDArray[np.uint8]:
    image = cv2.imread(str(path), cv2.IMREAD_COLOR)
    if image is None:
        raise ValueError(f"{path} is no image that OpenCV can read")
    return np.asarray(image[..., ::-1], np.uint8)


def _to_tensor(image: NDArray[np.uint8], size_px: int) -> Tensor:
    resized = cv2.resize(image, (size_px, size_px), interpolation=cv2.INTER_AREA)
    return torch.from_numpy(resized).permute(2, 0, 1).float() / 255


def _flip(boxes: Tensor, size_px: int) -> Tensor:
    """Mirror boxes [n, 5] left-right."""
    number, left, top, right, bottom = boxes.unbind(1)
    return torch.stack((number, size_px - right, top, size_px - left, bottom), 1)


def _plain_loss(answers: Tensor, targets: Sequence[Tensor], classes: int) -> Tensor:
    """Return the cross entropy of all cells and L1 of those with an object, by their number.

    An object belongs to the cell that holds its middle.
    """
    expected = torch.zeros_like(answers)
    has_object = torch.zeros_like(answers[:, 0], dtype=torch.bool)
    rows, columns = answers.shape[2:]
    stride_px = PlainNet.stride_px
    for image, boxes in enumerate(targets):
        for number, left, top, right, bottom in boxes.tolist():
            x, y = (left + right) / 2 / stride_px, (top + bottom) / 2 / stride_px
            cell_x, cell_y = min(int(x), columns - 1), min(int(y), rows - 1)
            offset = torch.tensor([x - cell_x, y - cell_y])
            sizes_px = torch.tensor([max(right - left, 1.0), max(bottom - top, 1.0)])
            expected[image, int(number), cell_y, cell_x] = 1
            numbers = torch.cat((offset, (sizes_px / stride_px).log()))
            expected[image, classes:, cell_y, cell_x] = numbers
            has_object[image, cell_y, cell_x] = True
    objects = max(1, int(has_object.sum()))
    entropy = F.binary_cross_entropy_with_logits(
        answers[:, :classes], expected[:, :classes], reduction="sum"
    )
    distances = (answers[:, classes:] - expected[:, classes:]).abs().sum(1)
    return (entropy + distances[has_object].sum()) / objects


@torch.no_grad()
def _predict_plain(net: PlainNet, folder: Path, size_px: int, classes: int) -> dict[str, list[Box]]:
    predictions = {}
    for path in list_images(folder, "test"):
        image = _read_image(path)
        answer = net(_to_tensor(image, size_px)[None])[0]
        rows, columns = answer.shape[1:]
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        middle = torch.stack((x, y), 0) + answer[classes : classes + 2]
        half = answer[classes + 2 :].clamp(max=6).exp() / 2
        corners = torch.cat((middle - half, middle + half)).flatten(1).T * PlainNet.stride_px
        scale = torch.tensor([image.shape[1] / size_px, image.shape[0] / size_px] * 2)
        scores = answer[:classes].flatten(1).T.sigmoid()
        predictions[path.stem] = _choose_best(scores, corners * scale)
    return predictions


def _choose_best(
    scores: Tensor, corners: Tensor, *, most: int = 300, least: float = 0.01
) -> list[Box]:
    """Suppress boxes that overlap a better one of their class by more than half.

    Args:
        scores: [cells, classes].
        corners: [cells, 4].
        most: Boxes that are looked at.
        least: Score of a box.
    """
    best, flat = scores.flatten().topk(min(most, scores.numel()))
    classes, boxes = flat % scores.shape[1], corners[flat // scores.shape[1]]
    rectangles = torch.cat((boxes[:, :2], boxes[:, 2:] - boxes[:, :2]), 1)
    values = rectangles.tolist(), best.tolist(), classes.tolist()
    objects = []
    for row in cv2.dnn.NMSBoxesBatched(*values, score_threshold=least, nms_threshold=0.5):
        left, top, right, bottom = boxes[row].tolist()
        objects.append(Box(int(classes[row]), (left, top, right, bottom), float(best[row])))
    return objects


def main(folder: Path, seed: int, seconds: float, out: Path) -> None:
    """Train the script for a time on the wall clock, and write its boxes of the test images."""
    predictions = train_plain(folder, seconds=seconds, seed=seed, clock=time.monotonic)
    write_detections(predictions, out / "detections.json")


if __name__ == "__main__":
    main(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
