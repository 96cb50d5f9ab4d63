"""Draws one image of the "shapes" data set: NumPy only, so no library's version moves a pixel.

H, W height and width (equal), V vertices of a polygon. Points are (x, y) in pixels; the centre
of the top left pixel is (0.5, 0.5), as COCO's polygons have it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .shapes_spec import CLASS_NAMES, SPLITS, ShapesSpec

MIN_VISIBLE = 0.3  # a shape that shows less of its own pixels than this is not annotated
RADIUS_RANGE = (0.06, 0.22)  # circumscribed circle, as a share of the image's size
# Class -> vertices and the angle of the first one: squares lie flat, triangles point upwards,
# and the circle is drawn as the polygon that annotates it.
OUTLINES = {"circle": (32, 0.0), "square": (4, math.pi / 4), "triangle": (3, -math.pi / 2)}
MAX_TILT = math.radians(15)
TEXTURE_OCTAVES = ((4, 45.0), (16, 18.0), (64, 8.0))  # (grid cells a side, amplitude)


@dataclass(frozen=True)
class Shape:
    """An annotated shape: its class (an index into CLASS_NAMES) and its whole outline.

    polygon: (V, 2) float64, convex, inside the image, to 0.01 pixel. The outline is the whole
    shape's, also where a later shape covers it.
    """

    category: int
    polygon: np.ndarray


def draw_image(spec: ShapesSpec, split: str, index: int) -> tuple[np.ndarray, list[Shape]]:
    """Draw image index (from 0) of split "train" or "val".

    Returns (H, W, 3) uint8 RGB and the annotated shapes in drawing order, the last on top.
    Depends on (spec.seed, split, index) alone, never on what was drawn before.
    A shape is left out of the list when later shapes leave less than MIN_VISIBLE of it.
    """
    rng = np.random.default_rng([spec.seed, SPLITS.index(split), index])
    base = rng.uniform(50, 205, size=3)
    canvas = base + _texture(rng, spec.size)
    count = 0 if spec.is_empty(index) else int(rng.integers(1, spec.max_objects + 1))
    shapes, masks = [], []
    for _ in range(count):
        shape = _random_shape(rng, spec.size)
        masks.append(_paint(canvas, shape.polygon, _contrasting_colour(rng, base)))
        shapes.append(shape)
    visible = _visible_shares(masks)
    kept = [s for s, share in zip(shapes, visible, strict=True) if share >= MIN_VISIBLE]
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8), kept


def _texture(rng: np.random.Generator, size: int) -> np.ndarray:
    """(H, W, 3): smooth noise on several scales. Smooth, because white noise triples the PNG."""
    total = np.zeros((3, size, size))
    for cells, amplitude in TEXTURE_OCTAVES:
        grid = rng.uniform(-amplitude, amplitude, size=(3, cells + 1, cells + 1))
        # Not as a matrix product: BLAS threads stall when other processes keep the cores busy.
        left, weight = _grid_position(size, cells)
        rows = grid[:, left] * (1 - weight[:, None]) + grid[:, left + 1] * weight[:, None]
        total += rows[:, :, left] * (1 - weight) + rows[:, :, left + 1] * weight
    return np.ascontiguousarray(total.transpose(1, 2, 0))


def _grid_position(size: int, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """For each pixel along a side: the grid point before it, and the weight of the next."""
    position = (np.arange(size) + 0.5) * cells / size
    left = position.astype(np.int64)
    return left, position - left


def _random_shape(rng: np.random.Generator, size: int) -> Shape:
    """A shape that lies inside the image, slightly tilted."""
    category = int(rng.integers(len(CLASS_NAMES)))
    vertices, first = OUTLINES[CLASS_NAMES[category]]
    radius = size * rng.uniform(*RADIUS_RANGE)
    centre = rng.uniform(radius + 1, size - radius - 1, size=2)
    tilt = rng.uniform(-MAX_TILT, MAX_TILT)
    angles = first + tilt + np.arange(vertices) * (2 * math.pi / vertices)
    outline = centre + radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return Shape(category, np.round(outline, 2))


def _contrasting_colour(rng: np.random.Generator, base: np.ndarray) -> np.ndarray:
    """(3,): of four random colours the one farthest from the background's."""
    colours = rng.uniform(0, 255, size=(4, 3))
    return colours[np.argmax(np.linalg.norm(colours - base, axis=1))]


def _paint(canvas: np.ndarray, polygon: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """Fill the polygon on the canvas in place, edges smoothed; return its (H, W) bool mask."""
    size = canvas.shape[0]
    x0, y0 = np.floor(polygon.min(axis=0)).astype(int) - 1
    x1, y1 = np.ceil(polygon.max(axis=0)).astype(int) + 1
    window = np.s_[max(y0, 0) : min(y1, size), max(x0, 0) : min(x1, size)]
    rows, columns = np.ogrid[window]
    distance = _distance_outside(polygon, columns + 0.5, rows + 0.5)
    alpha = np.clip(0.5 - distance, 0, 1)[..., None]
    canvas[window] += alpha * (colour - canvas[window])
    mask = np.zeros((size, size), dtype=bool)
    mask[window] = distance <= 0
    return mask


def _distance_outside(polygon: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """How far pixels lie outside a convex polygon's edge lines; negative inside.

    x: (1, w) and y: (h, 1) pixel centres of a window; returns (h, w), in pixels.
    """
    distance = np.full((y.size, x.size), -np.inf)
    for (ax, ay), (bx, by) in zip(polygon, np.roll(polygon, -1, axis=0), strict=True):
        length = math.hypot(bx - ax, by - ay)
        # A column plus a row: one addition a pixel for each edge.
        side = (by - ay) / length * (x - ax) - (bx - ax) / length * (y - ay)
        np.maximum(distance, side, out=distance)
    return distance


def _visible_shares(masks: list[np.ndarray]) -> list[float]:
    """For each mask the share of its pixels that no later mask covers."""
    shares: list[float] = []
    covered: np.ndarray | bool = False
    for mask in reversed(masks):
        shares.append(float((mask > covered).sum() / mask.sum()))
        covered = mask | covered
    return shares[::-1]
