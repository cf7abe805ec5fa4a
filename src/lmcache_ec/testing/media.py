"""Pictures and sounds for tests and the demo: real files, drawn here so that none is downloaded."""

from __future__ import annotations

import io
import wave
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from pathlib import Path

_SIZE = (640, 480)
_SAMPLE_RATE_HZ = 16_000


def noise_picture(
    seed: int | None, width: int = 64, height: int = 64, file_format: str = "PNG"
) -> bytes:
    """An image file of random pixels, another one for each ``seed``; None draws a new one.

    Args:
        seed: Names the picture.
        width: In pixels.
        height: In pixels.
        file_format: As Pillow names it, for example "JPEG".
    """
    shape = (height, width, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, file_format)
    return file.getvalue()


def tone(hertz: float, duration_s: float = 1.0) -> bytes:
    """A WAV file of one tone, 16 bits, 16 kHz, mono."""
    times = np.arange(int(duration_s * _SAMPLE_RATE_HZ)) / _SAMPLE_RATE_HZ
    samples = (20_000 * np.sin(2 * np.pi * hertz * times)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(_SAMPLE_RATE_HZ)
        writer.writeframes(samples.tobytes())
    return file.getvalue()


def draw_pictures(directory: Path) -> list[Path]:
    """Draw three pictures of 640 x 480 into ``directory``, which is made; one of each format."""
    directory.mkdir()
    pictures = {"chess.png": _chess(), "sunset.jpg": _sunset(), "rings.webp": _rings()}
    for name, picture in pictures.items():
        picture.save(directory / name)
    return [directory / name for name in pictures]


def _chess() -> Image.Image:
    picture = Image.new("RGB", _SIZE, "white")
    draw = ImageDraw.Draw(picture)
    for row in range(8):
        for column in range(row % 2, 8, 2):
            draw.rectangle((80 * column, 60 * row, 80 * column + 79, 60 * row + 59), fill="black")
    draw.ellipse((200, 100, 440, 340), fill="red")
    return picture


def _sunset() -> Image.Image:
    depth = np.linspace(0, 1, _SIZE[1])[:, None].repeat(_SIZE[0], axis=1)
    sky = np.stack([255 - 76 * depth, 180 - 180 * depth, 60 + 150 * depth], axis=-1)
    picture = Image.fromarray(sky.astype(np.uint8))
    ImageDraw.Draw(picture).ellipse((280, 200, 360, 280), fill="yellow")
    return picture


def _rings() -> Image.Image:
    y, x = np.mgrid[: _SIZE[1], : _SIZE[0]]
    radius = np.hypot(x - _SIZE[0] / 2, y - _SIZE[1] / 2)
    waves = np.stack([np.sin(radius / 9), np.sin(radius / 13), np.cos(x / 20)], axis=-1)
    return Image.fromarray((127 + 127 * waves).astype(np.uint8))
