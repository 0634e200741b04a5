"""`PlaceGaussians`: a Gaussian of good features at each place, and one of whole images."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.checks import check_counts
from lit_data.core.errors import ConfigError
from lit_data.models.anomaly.normality import Normality, take_sizes

_SHRINKAGE = 0.02
_LEAST_STD = 0.05  # of a feature, as a fraction of the mean of all
_USUAL = 0.95  # fraction of good images that are no farther than what counts as a distance of 1
_LEAST_DISTANCE = 1e-6


class PlaceGaussians(Normality):
    """A Gaussian of good features at each place, for parts that have the same position in all images.

    Defard et al., "PaDiM: a patch distribution modeling framework for anomaly detection and
    localization", ICPR Workshops 2021, separately at each scale of the encoder; and another
    Gaussian for the mean and standard deviation of the finest features of whole images, after
    Rippel et al., "Modeling the distribution of normal data in pre-trained deep features for
    anomaly detection", ICPR 2020, which detects changes of the whole image. Distances are
    Mahalanobis distances, divided by the value below which 95 % of good images are at that scale,
    so that no scale outweighs another. Their mean is the distance of a place. The distance of a
    training image is computed as if only the other images had been fitted, in closed form.

    All images must have the same size. Fitting again uses only the new images.

    Args:
        images: Largest number of good images to fit, a uniform sample of all. They are in memory
            during training: 150 kB each for maps of EfficientNet-Lite0 at 256 x 256 px.
        width: Number of features at each place; maps with more channels are projected at random.
        seed: Seed of the sample and of the projections.

    Raises:
        ConfigError: An option is below 1.
    """

    has_places = True

    def __init__(self, images: int = 1000, *, width: int = 112, seed: int = 0) -> None:
        check_counts(images=images, width=width)
        super().__init__(images, seed)
        self.width = width
        self.seed = seed
        self.scales = nn.ModuleList()
        """A `_Scale` for each map, and for whole images."""
        self.register_load_state_dict_pre_hook(_add_scales)  # type: ignore[no-untyped-call]

    @property
    def _typed_scales(self) -> list["_Scale"]:
        return [scale for scale in self.scales if isinstance(scale, _Scale)]

    @property
    @override
    def is_fitted(self) -> bool:
        scales = self._typed_scales
        return len(scales) > 0 and all(scale.is_fitted for scale in scales)

    @override
    def add(self, maps: Sequence[Tensor]) -> None:
        """Add images to the sample.

        Raises:
            ConfigError: They are not of the size of those before.
        """
        if not len(self.candidates):
            self._lay_out(maps)
        rows = [features.flatten(1) for features in self.describe(maps)]
        self.candidates.add(torch.cat(rows, 1))

    def _lay_out(self, maps: Sequence[Tensor]) -> None:
        """Make the scales for maps of these sizes."""
        generator = torch.Generator().manual_seed(self.seed)
        scales = []
        for one in maps:
            channels, height, width = one.shape[1:]
            projection = _draw_projection(channels, self.width, generator)
            scales.append(_Scale((height, width), min(channels, self.width), projection))
        scales.append(_Scale((1, 1), 2 * scales[0].mean.shape[-1]))
        self.scales = nn.ModuleList(scales).to(self.limit.device)

    def describe(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Return the features of each scale; the last ones are of whole images.

        Args:
            maps: As for `add`.

        Returns:
            [B, h_i, w_i, D_i] for each scale.

        Raises:
            ConfigError: The maps are not as many, as wide or as large as before.
        """
        if len(maps) != len(self.scales) - 1:
            raise ConfigError(
                f"the encoder gives {len(maps)} maps, and {len(self.scales) - 1} were fitted: "
                "predict with the model.net of the training"
            )
        features = []
        for scale, one in zip(self._typed_scales, maps, strict=False):
            features.append(scale.project(one.float()))
        deviations, means = torch.std_mean(features[0], (1, 2), correction=0)
        return [*features, torch.cat([means, deviations], 1)[:, None, None]]

    @override
    def fit(self) -> None:
        """Fit the sample, and keep it, because an epoch may be validated more than once.

        Raises:
            ConfigError: There is one image alone.
        """
        count = len(self.candidates)
        if count < 2:
            raise ConfigError(
                "there is only 1 good training image, and a Gaussian needs at least 2: add "
                "images, or train with model=anomaly_texture"
            )
        scales = self._typed_scales
        parts = torch.split(self.candidates.rows, [scale.mean.numel() for scale in scales], 1)
        distances = []
        for scale, part in zip(scales, parts, strict=True):
            distances.append(scale.fit(part.view(count, *scale.mean.shape)))
        self.limit = self._combine(distances).max().to(self.limit.device)

    @override
    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        with torch.autocast(maps[0].device.type, enabled=False):
            features = self.describe(maps)
            distances = []
            for scale, part in zip(self.scales, features, strict=True):
                distances.append(scale(part))
            return self._combine(distances)

    def _combine(self, distances: Sequence[Tensor]) -> Tensor:
        """[B, 1, h, w] mean of the distances [B, h_i, w_i] of all scales, at the finest."""
        size = distances[0].shape[1:]
        resized = [F.interpolate(one[:, None], size, mode="bilinear") for one in distances]
        return torch.stack(resized).mean(0)


class _Scale(nn.Module):
    """Gaussians of the places of one map.

    Args:
        size: Height and width of the map, in places.
        width: Features at each place, D.
        projection: [C, D] from the channels of the map to features; None: they are the features.
    """

    projection: Tensor | None
    mean: Tensor
    whitening: Tensor
    usual: Tensor

    def __init__(self, size: tuple[int, int], width: int, projection: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("projection", projection)
        self.register_buffer("mean", torch.zeros(*size, width))
        self.register_buffer("whitening", torch.zeros(0, 0, 0))
        self.register_buffer("usual", torch.ones(()))
        self.register_load_state_dict_pre_hook(take_sizes)  # type: ignore[no-untyped-call]

    @property
    def is_fitted(self) -> bool:
        return len(self.whitening) > 0

    def project(self, maps: Tensor) -> Tensor:
        """Features [B, h, w, D] of maps [B, C, h, w].

        Raises:
            ConfigError: Channels or places are not as many as before.
        """
        channels, *size = maps.shape[1:]
        height, width, fitted = self.mean.shape
        if self.projection is not None:
            fitted = len(self.projection)
        if channels != fitted:
            raise ConfigError(
                f"the encoder gives {channels} features, and {fitted} were fitted: predict with "
                "the model.net of the training"
            )
        if size != [height, width]:
            raise ConfigError(
                f"images of {size[0]} x {size[1]} places, and others were of {height} x {width}: "
                "this model needs images of one size. Set data.size_px for whole images, "
                "predict.tile_px to data.patch_px for patches, or train with "
                "model=anomaly_texture"
            )
        places = maps.permute(0, 2, 3, 1)
        return places.contiguous() if self.projection is None else places @ self.projection

    def fit(self, features: Tensor) -> Tensor:
        """Learn from features of good images on the host.

        Args:
            features: [N, h, w, D] float32, N at least 2.

        Returns:
            [N, h, w] distance of each image to Gaussians of the others.
        """
        count = len(features)
        mean = features.mean(0)
        centred = features - mean
        deviations = centred.pow(2).mean((0, 1, 2)).sqrt()
        deviations = deviations.maximum(_LEAST_STD * deviations.mean()).clamp(min=1e-6)
        places = (centred / deviations).flatten(1, 2).transpose(0, 1)
        correlations = (places.mT @ places).double() / count
        correlations += _SHRINKAGE * torch.eye(len(deviations), dtype=torch.float64)
        factors = torch.linalg.cholesky(correlations)
        identity = torch.eye(len(deviations), dtype=torch.float64).expand_as(factors)
        inverse = torch.linalg.solve_triangular(factors, identity, upper=False)
        device = self.mean.device
        self.mean = mean.to(device)
        self.whitening = (inverse.mT / deviations[:, None]).float().contiguous().to(device)
        self.usual = torch.ones_like(self.usual)
        distances = _leave_out(self(features.to(device)).cpu(), count)
        highest = distances.flatten(1).amax(1)
        usual = highest.quantile(_USUAL).clamp(min=_LEAST_DISTANCE)
        self.usual = usual.to(device)
        return distances / usual

    @override
    def forward(self, features: Tensor) -> Tensor:
        """Distances [B, h, w] of features [B, h, w, D], as multiples of what is usual."""
        centred = (features - self.mean).flatten(1, 2).transpose(0, 1)
        white = torch.bmm(centred, self.whitening)
        distances = white.pow(2).sum(2).clamp(min=_LEAST_DISTANCE**2).sqrt()
        scaled: Tensor = distances.T.reshape(features.shape[:3]) / self.usual
        return scaled


def _leave_out(distances: Tensor, count: int) -> Tensor:
    """Distances as if a training image were not among the `count` that were fitted.

    Sherman and Morrison, 1950: taking one row away changes covariance and mean by multiples of
    that row.
    """
    ratio = count / (count - 1)
    leverage = ratio * distances.pow(2) / count
    growth = (count - 1) / count / (1 - leverage).clamp(min=1e-6)
    left_out: Tensor = distances * ratio * growth.sqrt()
    return left_out


def _draw_projection(channels: int, width: int, generator: torch.Generator) -> Tensor | None:
    """Return [channels, width] random orthonormal columns; None for no more channels than columns."""
    if channels <= width:
        return None
    directions: Tensor = torch.linalg.qr(torch.randn(channels, width, generator=generator)).Q
    return directions


def _add_scales(
    module: PlaceGaussians, states: dict[str, object], prefix: str, *others: object
) -> None:
    """Make as many scales as a checkpoint has."""
    names = [name for name in states if name.startswith(f"{prefix}scales.")]
    count = len({name.removeprefix(prefix).split(".")[1] for name in names})
    empty = []
    for number in range(count):
        has_projection = f"{prefix}scales.{number}.projection" in states
        empty.append(_Scale((0, 0), 0, torch.zeros(0, 0) if has_projection else None))
    module.scales = nn.ModuleList(empty).to(module.limit.device)
