"""`ClassificationModule`: learn the class of whole images."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassConfusionMatrix
from typing_extensions import override

from lit_data.core.checks import check_count, check_counts
from lit_data.core.devices import widest_float
from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch, PathText
from lit_data.datasets.good_names import choose_good_classes
from lit_data.models.image_ranks import JudgedModule
from lit_data.models.layers import DEEPEST, count_outputs, run_in_float32
from lit_data.models.schedule import OptimizerFactory, Schedule
from lit_data.models.score_curves import ScoreCurves
from lit_data.models.scored import Confusion, balance_classes, check_class_weights
from lit_data.models.weights import load_weights_file


class ConvClassifier(nn.Module):
    """Convolutions at halved scales, then the mean over the image and one linear layer.

    Args:
        classes: Names of the classes, or their number.
        channels: Number of channels of the images.
        width: Channels at half the resolution; each scale has twice those of the finer one.
        depth: Number of times the resolution is halved.
        weights: File that the net starts from, see `load_weights_file`.

    Raises:
        ConfigError: A size is not positive.
    """

    def __init__(
        self,
        classes: int | Sequence[str] | None = None,
        *,
        channels: int = 3,
        width: int = 24,
        depth: int = 4,
        weights: PathText | None = None,
    ) -> None:
        super().__init__()
        count = count_outputs(classes)
        check_counts(classes=count, channels=channels, width=width)
        check_count("depth", depth, 1, DEEPEST)
        widths = [channels, *(width * 2**scale for scale in range(depth))]
        layers: list[nn.Module] = []
        for fine, coarse in pairwise(widths):
            layers += _halve(fine, coarse)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], count)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        load_weights_file(self, weights)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, classes] of images [B, C, H, W] float32 in 0..1."""
        # More precise than what goes in.
        means = self.layers(images).mean((2, 3), dtype=self.head.weight.dtype)
        return run_in_float32(self.head, means)


def _halve(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class ClassificationModule(JudgedModule):
    """A net that predicts the class of an image, with cross entropy and the scores of each class.

    Takes batches with ``image`` [B, C, H, W] float32 in 0..1 and ``label`` [B] int64.

    Logs ``train/loss`` in each step, ``val/loss`` in training, and after validation and test, with
    ``val/`` or ``test/`` before it: ``accuracy``; ``f1`` and ``recall``, the means over the classes
    that have images; ``f1_NAME`` of each of these classes; and, if a class is good, by its name or
    in the datamodule, the scores of `JudgedModule`. The score of an image is the probability that
    it belongs to no good class.

    Args:
        net: From [B, C, H, W] images to [B, classes] logits, such as `ConvClassifier` or a
            classifier of torchvision.
        classes: Names of the classes.
        optimizer: Makes the optimizer from the parameters; AdamW by default.
        schedule: Learning rate over the run, see `learning_rate_factor`.
        label_smoothing: Fraction of the target that is spread evenly over all classes.
        class_weights: Factors on the loss of images by their class; `balanced`: ``images / (classes
            * images of the class)`` in the training split.

    Raises:
        ConfigError: The schedule is unknown, or `class_weights` are not one for each class; later,
            that net or datamodule have other classes.
    """

    weights: Tensor
    not_in_bar: ClassVar[tuple[str, ...]] = ("recall", "image_", "misses", "false_alarms")
    exported_as = "labels"
    notes_loss = True

    def __init__(
        self,
        net: nn.Module,
        *,
        classes: Sequence[str] | None = None,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule = "one_cycle",
        label_smoothing: float = 0.0,
        class_weights: Literal["balanced"] | Sequence[float] | None = None,
    ) -> None:
        optimizer = optimizer or partial(torch.optim.AdamW, lr=3e-3, weight_decay=1e-2)
        super().__init__(net, optimizer=optimizer, schedule=schedule)
        self.classes = tuple(map(str, classes or ()))
        self.label_smoothing = label_smoothing
        self.class_weights = class_weights
        check_class_weights(class_weights, self.classes)
        if class_weights is None or class_weights == "balanced":
            weights = torch.ones(len(self.classes))
        else:
            weights = torch.tensor(list(class_weights))
        self.register_buffer("weights", weights, persistent=False)
        self.scores = nn.ModuleDict()
        for stage in ("val", "test"):
            self.scores[f"{stage}_labels"] = LabelScores(self.classes or ("",))
        self.good = choose_good_classes(self.classes)
        self.save_hyperparameters("classes", "schedule", "label_smoothing", "class_weights")

    @override
    def setup(self, stage: str) -> None:
        """Refuse a datamodule with other classes, and read which classes are good.

        Raises:
            ConfigError: It has.
        """
        datamodule: Any = getattr(self.trainer, "datamodule", None)
        known = tuple(getattr(datamodule, "classes", self.classes) or ())
        if stage != "predict" and (known != self.classes or not known):
            raise ConfigError(
                f"the datamodule has the classes {list(known) or 'none'} and the model "
                f"{list(self.classes) or 'none'}: set data.classes, and model.classes and the "
                "outputs of model.net to match"
            )
        self.good = tuple(getattr(datamodule, "good_classes", self.good))

    @override
    def on_fit_start(self) -> None:
        if self.class_weights == "balanced":
            self.weights.copy_(balance_classes(self.trainer))

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, classes] of images.

        Raises:
            ConfigError: The net gives others.
        """
        logits: Tensor = self.net(images)
        if logits.ndim != 2 or logits.shape[1] != len(self.classes):
            raise ConfigError(
                f"the net gives {list(logits.shape)} for {len(self.classes)} classes "
                f"({', '.join(self.classes)}): set model.net.classes, or the option of your net"
            )
        return logits

    @override
    def find_loss(self, batch: Batch) -> Tensor:
        return self._compare(self(batch["image"]), batch)

    def _compare(self, answers: Tensor, batch: Batch) -> Tensor:
        """Return the loss of logits."""
        logits = answers.float()
        losses = F.cross_entropy(
            logits, batch["label"], reduction="none", label_smoothing=self.label_smoothing
        )
        # The weights' own mean, as torch divides by, would let one sample change the weight of
        # another.
        loss: Tensor = (losses * self.weights[batch["label"]]).mean()
        return loss

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the probability of each class, [B, classes]."""
        probability: Tensor = self(batch["image"]).float().softmax(1)
        return probability

    @override
    def invert(self, answers: Tensor, images: Tensor) -> Tensor:
        """Return the logits of probabilities [B, classes]."""
        return answers.clamp(min=torch.finfo(answers.dtype).tiny).log()

    @override
    def score(self, batch: Batch, stage: str) -> None:
        scores: Any = self.scores[f"{stage}_labels"]
        logits, labels = self(batch["image"]), batch["label"]
        self.note_loss(batch, lambda: self._compare(logits, batch))
        scores.update(logits, labels)
        if self.good:
            is_bad = [name not in self.good for name in self.classes]
            bad = torch.tensor(is_bad, device=logits.device)
            self.rank(stage, logits.float().softmax(1)[:, bad].sum(1), bad[labels])

    @override
    def take_scores(self, stage: str) -> dict[str, Tensor]:
        scores: Any = self.scores[f"{stage}_labels"]
        values: dict[str, Tensor] = scores.compute()
        self.confusion[stage] = Confusion(self.classes, scores.counts)
        scores.reset()
        if not self.good:
            return values
        values |= self.take_ranks(stage)
        ranking = self.find_ranking(stage)
        if ranking is not None:
            verdicts = ranking.confusion.counts
            self.confusion[stage] = self.confusion[stage]._replace(verdicts=verdicts)
            self.curves[stage] = ScoreCurves({"images": ranking.curve}, ranking.image_scores)
        return values


class LabelScores(MulticlassConfusionMatrix):
    """Accuracy, F1 of each class, and the means of F1 and recall over the classes that have images.

    Args:
        classes: Names of the classes.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        super().__init__(max(2, len(classes)))
        self.classes = classes
        self.counts: list[list[int]] = []

    @override
    def compute(self) -> dict[str, Tensor]:  # type: ignore[override]  # the matrix is what these are made of
        """Return the scores; NaN for a class without images."""
        counts = super().compute()
        self.counts = counts.tolist()  # by true class and the class that the model says
        matrix = counts.to(widest_float(counts.device))
        true_counts = matrix.sum(1)
        hits = matrix.diagonal()
        absent = true_counts == 0
        f1 = (2 * hits / (true_counts + matrix.sum(0))).masked_fill(absent, torch.nan)
        recall = hits / true_counts
        values = {
            "accuracy": hits.sum() / true_counts.sum(),
            "f1": f1[~absent].mean(),
            "recall": recall[~absent].mean(),
        }
        values |= {f"f1_{name}": score for name, score in zip(self.classes, f1, strict=False)}
        return {name: value.float() for name, value in values.items()}
