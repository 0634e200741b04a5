"""`RayGenerator`: pictures of a field of density and color, rendered along the rays of a camera."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.checks import check_counts
from lit_data.core.errors import ConfigError
from lit_data.core.grid import pair_px
from lit_data.core.types import Size
from lit_data.wings.gan.model.conditions import Conditions, make_grid
from lit_data.wings.gan.model.nets import (
    StyleNet,
    double,
    make_growth,
    plan_sizes,
    start_weights,
    widen,
)

_SIDES = ((0, 1), (0, 2), (1, 2))  # axes of the three planes
# Shifted so that an untrained field is transparent (Barron et al., "Mip-NeRF", ICCV 2021), and
# steep, so that small weights make a surface within a step of a ray.
_SHIFT = 3.0
_SHARPNESS = 20.0


class RayGenerator(nn.Module):
    """Maps latents to an object in space, and renders it from a camera.

    A convolutional generator makes three planes of features, onto which each point is projected; a
    small perceptron maps the sum of the features there to density and color (Chan et al.,
    "Efficient geometry-aware 3D generative adversarial networks", CVPR 2022). These are integrated
    along rays like light (Mildenhall et al., "NeRF", ECCV 2020), in front of a background of one
    color. Memory grows with the number of rays: a patch in training, and `ray_chunk` at a time
    without gradients.

    The camera looks at the origin from `distance`; z is up, the azimuth turns from x to y, and the
    elevation is measured from the plane of x and y. The object is within a ball around the origin.

    Args:
        image_px: Height and width of whole images, or both in one number.
        channels: Number of channels of the images.
        latent_size: Length of the latents.
        num_labels: Number of labels; 0 for none.
        plane_px: Size of the planes; halving it must lead to 4 to 7 px in whole numbers.
        features: Channels of the planes.
        width: Channels at full size of the net that makes the planes, doubled at each halving.
        max_width: Maximum number of these channels.
        hidden: Width of the perceptron.
        points: Points of each ray within the ball.
        ray_chunk: Rays of a batch that are rendered at once without gradients.
        distance: Distance of the camera from the origin.
        field_of_view_deg: Angle from the lower to the upper edge of the image.
        radius: Radius of the ball.
        style_size: Length of the style.

    Raises:
        ConfigError: A number is out of range, or the camera is within the ball.
    """

    posed = True
    repeatable = False  # the gradient of grid_sample

    def __init__(
        self,
        *,
        image_px: int | Size = 64,
        channels: int = 3,
        latent_size: int = 64,
        num_labels: int = 0,
        plane_px: int = 32,
        features: int = 16,
        width: int = 32,
        max_width: int = 128,
        hidden: int = 32,
        points: int = 16,
        ray_chunk: int = 16384,
        distance: float = 4.0,
        field_of_view_deg: float = 30.0,
        radius: float = 1.0,
        style_size: int = 128,
    ) -> None:
        super().__init__()
        check_counts(
            channels=channels,
            latent_size=latent_size,
            features=features,
            width=width,
            max_width=max_width,
            hidden=hidden,
            points=points,
            ray_chunk=ray_chunk,
            style_size=style_size,
        )
        if not 0 < radius < distance or not 0 < field_of_view_deg < 180:
            raise ConfigError(
                f"radius={radius}, distance={distance}, field_of_view_deg={field_of_view_deg}: need 0 < radius < "
                "distance, and an angle between 0 and 180"
            )
        self.image_px = pair_px("image_px", image_px)
        self.channels = channels
        self.latent_size = latent_size
        self.num_labels = num_labels
        self.points = points
        self.ray_chunk = ray_chunk
        self.distance = distance
        self.radius = radius
        self.half_height = math.tan(math.radians(field_of_view_deg) / 2)
        self.style = StyleNet(latent_size, num_labels, posed=False, style_size=style_size)
        self.planes = PlaneNet(
            plane_px, features, width=width, max_width=max_width, style_size=style_size
        )
        self.field = nn.Sequential(
            nn.Linear(features, hidden), nn.Softplus(), nn.Linear(hidden, 1 + channels)
        )
        self.ground = nn.Linear(style_size, channels)
        start_weights(self)

    @override
    def forward(self, latents: Tensor, conditions: Conditions) -> Tensor:
        """Render the camera's view.

        Args:
            latents: [B, latent_size] float32.
            conditions: Poses, and the places of the rays.

        Returns:
            [B, C, K, L] in -1..1 at the grids; [B, C, H, W] without grids.
        """
        styles = self.style(latents, conditions)
        planes = widen(self.planes(styles))
        ground = widen(self.ground(styles))
        poses = conditions.poses.to(planes.dtype)
        grids = conditions.grids
        if grids is None:
            grids = make_grid(*self.image_px, latents.device).expand(len(latents), -1, -1, -1)
        places = grids.flatten(1, 2).to(planes.dtype)  # [B, R, 2]
        if conditions.offsets is None:
            offsets = torch.full_like(places[..., 0], 0.5)
        else:
            offsets = conditions.offsets.flatten(1)
        # With gradients, chunks save nothing: the graph keeps them all.
        ray_count = places.shape[1]
        if not torch.is_grad_enabled():
            ray_count = max(1, self.ray_chunk // len(latents))
        chunks = zip(
            torch.split(places, ray_count, 1), torch.split(offsets, ray_count, 1), strict=True
        )
        colours = [self._follow(planes, ground, poses, *chunk) for chunk in chunks]
        return torch.cat(colours, dim=1).mT.reshape(len(latents), self.channels, *grids.shape[1:3])

    def _follow(
        self, planes: Tensor, ground: Tensor, poses: Tensor, places: Tensor, offsets: Tensor
    ) -> Tensor:
        """Return the colors [B, R, C] of rays through places [B, R, 2]."""
        height, width = self.image_px
        origins, directions = find_rays(
            poses, places, self.distance, self.half_height, width / height
        )
        step = 2 * self.radius / self.points
        numbers = torch.arange(self.points, device=places.device) + offsets[..., None]
        depths = self.distance - self.radius + step * numbers.to(places.dtype)  # [B, R, points]
        points = origins[:, None, None] + depths[..., None] * directions[:, :, None]
        features = read_planes(planes, points.flatten(1, 2) / self.radius)
        values = widen(self.field(features)).view(*points.shape[:3], -1)
        is_inside = points.norm(dim=-1) < self.radius
        density = _SHARPNESS / self.radius * F.softplus(values[..., 0] - _SHIFT) * is_inside
        colours = values[..., 1:].sigmoid().mul(2).sub(1)
        return sum_up(density * step, colours, ground[:, None].tanh())


class PlaneNet(nn.Module):
    """Maps styles to three planes of features.

    Args:
        plane_px: Size of the planes.
        features: Channels of each plane.
        width: Channels at full size, doubled at each halving.
        max_width: Maximum number of channels.
        style_size: Length of the style.
    """

    def __init__(
        self, plane_px: int, features: int, *, width: int, max_width: int, style_size: int
    ) -> None:
        super().__init__()
        _, coarsest, widths = plan_sizes(plane_px, width, max_width)
        self.start, self.blocks = make_growth(coarsest, widths, style_size)
        self.last = nn.Conv2d(widths[0], 3 * features, 1)

    @override
    def forward(self, styles: Tensor) -> Tensor:
        """Return planes [B, 3, features, P, P] of styles [B, style_size]."""
        features = self.start.expand(len(styles), -1, -1, -1)
        for number, block in enumerate(self.blocks):
            if number > 0:
                features = double(features)
            features = block(features, styles)
        planes: Tensor = self.last(features)
        return planes.view(len(planes), 3, -1, *planes.shape[2:])


def find_rays(
    poses: Tensor, places: Tensor, distance: float, half_height: float, aspect: float
) -> tuple[Tensor, Tensor]:
    """Return the rays of cameras that look at the origin, z up.

    Args:
        poses: [B, 2] azimuth and elevation, rad.
        places: [B, R, 2] (x, y) in the image, -1..1 from edge to edge, y down.
        distance: Distance of the camera from the origin.
        half_height: Tangent of half the field of view.
        aspect: Width of the image divided by its height.

    Returns:
        Origins [B, 3], and directions [B, R, 3] whose component toward the origin has length 1.
    """
    azimuth, elevation = poses.unbind(1)
    x = elevation.cos() * azimuth.cos()
    y = elevation.cos() * azimuth.sin()
    outward = torch.stack((x, y, elevation.sin()), dim=1)
    right = torch.stack((-azimuth.sin(), azimuth.cos(), torch.zeros_like(azimuth)), dim=1)
    up = torch.linalg.cross(outward, right)
    across, down = (places * half_height)[..., None].unbind(2)
    directions = aspect * across * right[:, None] - down * up[:, None] - outward[:, None]
    return distance * outward, directions


def read_planes(planes: Tensor, points: Tensor) -> Tensor:
    """Return the sum of the features of three planes at points.

    Args:
        planes: [B, 3, F, P, P] float32, over x and y, x and z, y and z.
        points: [B, N, 3] in -1..1.

    Returns:
        [B, N, F].
    """
    total = planes.new_zeros(())
    for plane, axes in zip(planes.unbind(1), _SIDES, strict=True):
        row = torch.stack([points[..., axis] for axis in axes], dim=-1)
        grid = row[:, None]  # an image of one row
        features = F.grid_sample(plane, grid, padding_mode="border", align_corners=False)
        total = total + features[:, :, 0]
    return total.mT


def sum_up(thickness: Tensor, colours: Tensor, ground: Tensor) -> Tensor:
    """Integrate color along rays, front to back.

    See Max, "Optical models for direct volume rendering", TVCG 1995.

    Args:
        thickness: [B, R, N] density times length of each step of a ray, the nearest first.
        colours: [B, R, N, C].
        ground: [B, 1, C] color of the background.

    Returns:
        [B, R, C].
    """
    thickness_before = F.pad(_accumulate(thickness), (1, 0))
    passing = torch.exp(-thickness_before)  # fraction of the light that comes so far
    weights = passing[..., :-1] - passing[..., 1:]
    return (weights[..., None] * colours).sum(2) + passing[..., -1:] * ground


def _accumulate(thickness: Tensor) -> Tensor:
    """Return cumulative sums along the last axis."""
    if not thickness.is_cuda or not torch.are_deterministic_algorithms_enabled():
        return thickness.cumsum(-1)
    # `cumsum` of floats has no deterministic kernel on CUDA, but a matrix product has one.
    with torch.autocast(thickness.device.type, enabled=False):
        return thickness @ thickness.new_ones(thickness.shape[-1:] * 2).triu()
