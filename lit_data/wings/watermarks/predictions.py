"""Predictions of watermarks: mask, overlay, and cleaned image of each image."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from lit_data.core.types import Array, Bytes
from lit_data.images.readers import read_image
from lit_data.images.writing import write_png_parts
from lit_data.predict.figures import new_axes, save_figure
from lit_data.predict.journal import Entry
from lit_data.predict.maps import ImageWriter, ProbabilityMap, WholeImages
from lit_data.predict.net_facts import NetFacts, describe_maps
from lit_data.predict.options import ExportRequest, PredictOptions, PredictRun, Use
from lit_data.predict.pixels import PixelTask
from lit_data.predict.writer import Written
from lit_data.wings.watermarks.datamodule import WatermarkDataModule
from lit_inspect.marks import measure_marked, tint
from lit_inspect.regions import slabs

log = logging.getLogger(__name__)


COLUMNS = ("image", "marked_share", "mean_score", "height_px", "width_px", "seconds")
SHOWN = 5
_GROW_PX = 2  # on each side, for the soft edges of letters
_INPAINT_PX = 3  # radius of the pixels that an inpainted one is computed from
_CONTEXT_PX = 64  # rows above and below a part that inpainting also sees
_CELL_INCHES = 3.2
_DRAWN_PX = 600  # longest side in predictions.png


class MarkTask(PixelTask[WatermarkDataModule]):
    """Task of images with masks of their watermarks; predictions are masks and overlays."""

    uses = Use.INPUTS | Use.FINDING | Use.TILES | Use.CLEANING

    @override
    def writer(self, run: PredictRun, options: PredictOptions) -> "MarkWriter":
        options.refuse_unused("masks of watermarks", self.uses)
        return MarkWriter(self.open_images(), run.folder, options)

    @override
    def export(self, request: ExportRequest) -> NetFacts:
        request.options.refuse_unused("masks of watermarks", self.uses)
        return describe_maps(self.datamodule, self.open_images(), request, shows="marks")


class MarkWriter(ImageWriter):
    """Writer of ``masks/<image>.png`` and ``overlays/<image>.png``.

    Masks have 8 bits, where 255 is probability 1; overlays are tinted red.

    With `clean`, it also writes ``cleaned/<image>.png``: the marked pixels, grown by 2 px, are
    inpainted from their border inward (Telea, "An image inpainting technique based on the fast
    marching method", 2004; OpenCV). This is a preview, because inpainting does not recover the
    image under a mark.

    At the end it writes ``marks.csv``, and ``predictions.png`` with the images that have the
    highest scores, except those larger than `large_px`.

    Args:
        images: Images to predict.
        folder: Output folder.
        options: Threshold, and whether to clean.
    """

    def __init__(self, images: WholeImages, folder: Path, options: PredictOptions) -> None:
        super().__init__(images, folder, options)
        self._kinds = ("masks", "overlays", "cleaned") if options.clean else ("masks", "overlays")

    @override
    def write(self, number: int, answer: ProbabilityMap, seconds: float) -> Written:
        """Write the pictures of an image, part by part."""
        name = self.names[number]
        pixels = self.images.bank[number]
        threshold = self.options.least_score
        height, width = answer.shape
        parts = list(slabs(*answer.shape))
        masks = (answer.encode(part, np.uint8) for part in parts)
        overlays = (tint(pixels[:, part], answer.rows(part), threshold) for part in parts)
        paths = [self.path_of(kind, name) for kind in self._kinds]
        write_png_parts(paths[0], answer.shape, masks)
        write_png_parts(paths[1], answer.shape, overlays)
        if self.options.clean:
            write_png_parts(paths[2], answer.shape, paint_over(pixels, answer, threshold))
        marked, score = measure_marked((answer.rows(part) for part in parts), threshold)
        row = {
            "marked_share": round(marked / (height * width), 6),
            "mean_score": round(score, 4),
            "height_px": height,
            "width_px": width,
            "seconds": round(seconds, 4),
        }
        return Written(paths, [row], score)

    @override
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        rows = [{"image": entry.image, **entry.rows[0]} for entry in entries]
        path = self.write_rows(self.folder / "marks", COLUMNS, rows)
        log.info("marks: %s", path)
        surest = self.choose_shown(entries, SHOWN)
        if surest:
            self._draw(surest)
        fractions = [row["marked_share"] for row in rows]
        return {
            "predict/images": len(entries),
            "predict/images_with_marks": sum(fraction > 0 for fraction in fractions),
            "predict/marked_share": float(np.mean(fractions)) if fractions else None,
        }

    def _draw(self, entries: Sequence[Entry]) -> None:
        titles = ("image", *(kind.removesuffix("s") for kind in self._kinds))
        tallest = max(entry.rows[0]["height_px"] / entry.rows[0]["width_px"] for entry in entries)
        row_inches = _CELL_INCHES * min(tallest, 1.4) + 0.2
        height_inches = row_inches * len(entries) + 0.7
        width_inches = _CELL_INCHES * len(titles)
        figure, axes = new_axes(len(entries), len(titles), height_inches, width_inches=width_inches)
        for title, cell in zip(titles, axes[0], strict=True):
            cell.set_title(title, fontsize=10)
        for entry, cells in zip(entries, axes, strict=True):
            pictures = [self.images.bank[self.numbers[entry.image]]]
            for kind in self._kinds:
                pictures.append(read_image(self.bring(self.path_of(kind, entry.image))))
            for picture, cell in zip(pictures, cells, strict=True):
                cell.imshow(_shrink(picture), cmap="gray", vmin=0, vmax=255)
            fraction = entry.rows[0]["marked_share"]
            score = entry.rows[0]["mean_score"]
            description = f"{fraction:.2%} marked, score {score:.2f}"
            cells[0].set_ylabel(f"{entry.image[-28:]}\n{description}", fontsize=8)
        save_figure(figure, self.folder / "predictions.png", "images with the highest scores", ())


def paint_over(pixels: Array, probability: ProbabilityMap, threshold: float) -> Iterator[Bytes]:
    """Paint over the marked pixels of an image, in parts that see some rows of their neighbors.

    Args:
        pixels: [3, H, W] uint8.
        probability: Probability of each pixel.
        threshold: Lowest probability of a marked pixel.

    Yields:
        [h, W, 3] uint8, from the top.
    """
    import cv2

    kernel = np.ones((2 * _GROW_PX + 1,) * 2, np.uint8)
    height = probability.shape[0]
    for part in slabs(*probability.shape):
        # With the rows around it, so that a mark across a seam is painted equally in both parts.
        top = max(part.start - _CONTEXT_PX, 0)
        bottom = min(part.stop + _CONTEXT_PX, height)
        is_marked = probability.rows(slice(top, bottom)) >= threshold
        marked = cv2.dilate(is_marked.astype(np.uint8), kernel)
        painted = np.ascontiguousarray(np.moveaxis(pixels[:, top:bottom], 0, -1))
        if marked.any():
            painted = cv2.inpaint(painted, marked, _INPAINT_PX, cv2.INPAINT_TELEA)
        yield painted[part.start - top : part.stop - top]


def _shrink(picture: Array) -> Array:
    """Shrink a picture [C, H, W] to [h, w, C], or to [h, w] if it has one channel, for a cell."""
    step = -(-max(picture.shape[1:]) // _DRAWN_PX)
    small = np.moveaxis(picture[:, ::step, ::step], 0, -1)
    return small[..., 0] if small.shape[2] == 1 else small
