"""Pictures for the demo, drawn so that none is downloaded: image files of three formats."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SIZE = (640, 480)


def draw_all(directory: Path) -> list[Path]:
    """Write each picture into ``directory``, which is made."""
    directory.mkdir()
    files = []
    for name, picture in (
        ("chess.png", _chess()),
        ("sunset.jpg", _sunset()),
        ("rings.webp", _rings()),
    ):
        files.append(directory / name)
        picture.save(files[-1])
    return files


def noise() -> bytes:
    """Another picture, as a PNG file's bytes."""
    pixels = np.random.default_rng().integers(0, 256, (SIZE[1], SIZE[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _chess() -> Image.Image:
    picture = Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(picture)
    for row in range(8):
        for column in range(row % 2, 8, 2):
            draw.rectangle((80 * column, 60 * row, 80 * column + 79, 60 * row + 59), fill="black")
    draw.ellipse((200, 100, 440, 340), fill="red")
    return picture


def _sunset() -> Image.Image:
    height = np.linspace(0, 1, SIZE[1])[:, None].repeat(SIZE[0], axis=1)
    sky = np.stack([255 - 76 * height, 180 - 180 * height, 60 + 150 * height], axis=-1)
    picture = Image.fromarray(sky.astype(np.uint8))
    ImageDraw.Draw(picture).ellipse((280, 200, 360, 280), fill="yellow")
    return picture


def _rings() -> Image.Image:
    y, x = np.mgrid[: SIZE[1], : SIZE[0]]
    radius = np.hypot(x - SIZE[0] / 2, y - SIZE[1] / 2)
    waves = np.stack([np.sin(radius / 9), np.sin(radius / 13), np.cos(x / 20)], axis=-1)
    return Image.fromarray((127 + 127 * waves).astype(np.uint8))
