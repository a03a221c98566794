"""Pictures from files, arrays and PIL objects."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from dlm_decode.errors import MediaError
from dlm_decode.media import open_image


def gradient(width=12, height=8):
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return np.stack([x * 20, y * 30, (x + y) * 5], axis=-1).astype(np.uint8)


def pixel(image, x, y):
    return tuple(np.asarray(image)[y, x].tolist())


def test_paths_arrays_and_pil_give_the_same(tmp_path):
    array = gradient()
    Image.fromarray(array).save(tmp_path / "a.png")
    for source in (tmp_path / "a.png", str(tmp_path / "a.png"), array, Image.fromarray(array)):
        image = open_image(source)
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), array)
    assert np.array_equal(np.asarray(open_image(array.astype(np.float64) / 255)), array)


def test_exif_rotation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    Image.fromarray(gradient()).save(tmp_path / "turned.png", exif=exif)
    image = open_image(tmp_path / "turned.png")
    assert image.size == (8, 12)
    assert np.array_equal(np.asarray(image), np.rot90(gradient(), k=-1))


def test_modes_become_rgb(tmp_path):
    rgb = Image.fromarray(gradient())
    for mode in ("L", "1", "P", "CMYK", "YCbCr", "HSV", "LAB", "RGBX"):
        assert open_image(rgb.convert(mode)).mode == "RGB"
    assert np.array_equal(np.asarray(open_image(rgb.convert("CMYK"))), gradient())
    grey = np.full((4, 4), 200, np.uint8)
    assert pixel(open_image(grey), 0, 0) == (200, 200, 200)


def test_transparent_parts_become_white():
    clear = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    clear.putpixel((1, 0), (255, 0, 0, 255))
    assert [pixel(open_image(clear), x, 0) for x in (0, 1)] == [(255, 255, 255), (255, 0, 0)]
    half = open_image(Image.new("LA", (1, 1), (0, 128)))
    assert pixel(half, 0, 0)[0] in (127, 128)
    palette = Image.new("P", (2, 1))
    palette.putpalette([0, 0, 255, 0, 255, 0])
    palette.putpixel((1, 0), 1)
    palette.info["transparency"] = 0
    assert [pixel(open_image(palette), x, 0) for x in (0, 1)] == [(255, 255, 255), (0, 255, 0)]


def test_wide_grey_values_are_scaled(tmp_path):
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    expected = [0, 1, 128, 255]
    image = open_image(tmp_path / "deep.png")
    assert [pixel(image, x, 0)[0] for x in range(4)] == expected
    dark = open_image(Image.fromarray(np.array([[0, 200]], dtype=np.uint16)))
    assert pixel(dark, 1, 0) == (1, 1, 1)  # still 16 bits, however dark
    real = open_image(Image.fromarray(np.array([[0.0, 0.5, 1.0]], dtype=np.float32)))
    assert [pixel(real, x, 0)[0] for x in range(3)] == [0, 128, 255]


@pytest.mark.parametrize("size", [(1, 1), (10000, 1)])
def test_extreme_sizes(size):
    assert open_image(Image.new("L", size)).size == size


def test_unreadable_images_are_named(tmp_path):
    with pytest.raises(MediaError, match=r"no image at '.*none.png'"):
        open_image(tmp_path / "none.png")
    with pytest.raises(MediaError, match="is a folder"):
        open_image(tmp_path)
    (tmp_path / "text.png").write_text("not an image")
    with pytest.raises(MediaError, match=r"text.png' is not an image"):
        open_image(tmp_path / "text.png")
    (tmp_path / "void.jpg").write_bytes(b"")
    with pytest.raises(MediaError, match=r"void.jpg' is not an image"):
        open_image(tmp_path / "void.jpg")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for name in ("cut.png", "cut.jpg"):
        Image.fromarray(noise).save(tmp_path / name)
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(MediaError, match=f"cannot read image .*{name}"):
            open_image(tmp_path / name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((2, 2, 5), np.uint8), r"must be \(H, W\)"),
        (np.zeros((0, 2, 3), np.uint8), "not empty"),
        (np.zeros((2, 2), np.int64), "must be uint8, or floats"),
        (np.full((2, 2), 3.0), "must lie in"),
        (np.full((2, 2), np.nan), "must lie in"),
        (None, "must be a path"),
        (b"bytes", "got bytes"),
    ],
)
def test_other_objects_are_refused(source, message):
    with pytest.raises(MediaError, match=message):
        open_image(source)
