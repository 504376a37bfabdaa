"""Image files: formats, orientation and transparency, limits, and hundreds of damaged files."""

from __future__ import annotations

import io
import threading
import zlib

import numpy as np
import psutil
import pytest
from image_files import DAMAGE, FORMATS, ORIENTATION, chunk, colours, file_of, png

from hotset.errors import InvalidRequestError, StepCancelledError
from hotset.text.child import Child, encoded
from hotset.vision import ImageLimits, Picture, decoded, pictures

Image = pytest.importorskip("PIL.Image")


@pytest.mark.parametrize("format", FORMATS)
def test_formats_are_decoded(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {"quality": 95} if format == "JPEG" else {}
    found = decoded(file_of(Image.fromarray(colours()), format, **options))
    assert found.pixels.shape == (24, 40, 3)
    difference = np.abs(found.pixels.astype(int) - colours().astype(int))
    assert difference.max() <= {"PNG": 0, "WEBP": 0, "JPEG": 12, "GIF": 40}[format]
    assert len(found.digest) == 32
    assert not found.pixels.flags.writeable


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_images_are_turned_upright(format: str) -> None:
    from PIL import ImageOps

    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        data = file_of(Image.fromarray(colours()), format, exif=exif)
        with Image.open(io.BytesIO(data)) as image:
            expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        assert np.array_equal(decoded(data).pixels, expected), orientation


def test_damaged_exif_does_not_matter() -> None:
    data = file_of(Image.fromarray(colours()), "JPEG", exif=b"Exif\0\0II*\0" + b"\xff" * 40)
    assert decoded(data).pixels.shape == (24, 40, 3)


def test_transparent_pixels_are_white() -> None:
    image = Image.new("RGBA", (4, 2), (200, 0, 0, 255))
    image.putpixel((1, 0), (200, 0, 0, 0))
    image.putpixel((2, 0), (0, 0, 0, 128))
    pixels = decoded(file_of(image, "PNG")).pixels
    assert pixels[0].tolist() == [[200, 0, 0], [255, 255, 255], [127, 127, 127], [200, 0, 0]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert decoded(file_of(palette, "GIF", transparency=0)).pixels.tolist() == [[[255] * 3, [40, 50, 60]]]


def test_kinds_of_pixels() -> None:
    grey = Image.new("L", (2, 2), 77)
    assert decoded(file_of(grey, "PNG")).pixels[0, 0].tolist() == [77] * 3
    assert decoded(file_of(Image.new("1", (2, 2), 1), "PNG")).pixels[0, 0].tolist() == [255] * 3
    deep = Image.fromarray(np.full((2, 2), 0x4D4D, np.uint16))
    assert decoded(file_of(deep, "PNG")).pixels[0, 0].tolist() == [0x4D] * 3
    ink = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert np.allclose(decoded(file_of(ink, "JPEG")).pixels[0, 0], [254, 0, 0], atol=3)


def test_only_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (3, 3), colour) for colour in ("red", "blue")]
    for format in ("GIF", "WEBP", "PNG"):
        data = file_of(frames[0], format, save_all=True, append_images=frames[1:])
        assert np.allclose(decoded(data).pixels[0, 0], [255, 0, 0], atol=3)


def test_digests_tell_pixels_and_shapes_apart() -> None:
    zeros = [Picture.of(np.zeros(shape, np.uint8)).digest for shape in ((2, 3, 3), (3, 2, 3), (6, 1, 3))]
    same = decoded(file_of(Image.new("RGB", (3, 2)), "PNG")).digest
    assert len({*zeros, same}) == 3
    assert zeros[0] == same


@pytest.mark.parametrize(
    "pixels", [np.zeros((2, 2)), np.zeros((2, 2, 4), np.uint8), np.zeros((0, 2, 3), np.uint8)]
)
def test_other_arrays_are_refused(pixels: np.ndarray) -> None:
    with pytest.raises(InvalidRequestError, match=r"must be uint8 \[height, width, 3\], not "):
        Picture.of(pixels)


# ---- limits


def test_limits_come_before_decoding() -> None:
    with pytest.raises(InvalidRequestError, match=r"The image has 1\.0 KiB, more than the limit of 1000 B\."):
        decoded(b"x" * 1024, ImageLimits(n_bytes=1000))
    with pytest.raises(
        InvalidRequestError, match="has 60000 x 60000 pixels, more than the limit of 50000000"
    ):
        decoded(png(60000, 60000, rows=1))
    with pytest.raises(InvalidRequestError, match="has 40 x 24 pixels, more than the limit of 959"):
        decoded(file_of(Image.fromarray(colours()), "PNG"), ImageLimits(n_pixels=959))
    assert decoded(file_of(Image.fromarray(colours()), "PNG"), ImageLimits(n_pixels=960)).pixels.size


def test_bombs_end_with_a_message() -> None:
    """Decode data that expand a thousandfold: more rows than the header says, and comments of gigabytes."""
    assert decoded(png(64, 2, rows=200_000)).pixels.shape == (2, 64, 3)
    bomb = zlib.compress(bytes(1 << 28), 9)
    with pytest.raises(InvalidRequestError, match="The image file is damaged"):
        decoded(png(4, 4, more=[chunk(b"zTXt", b"a\0\0" + bomb)]))


def test_slow_and_large_images_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    data = png(5000, 5000)
    limits = pictures.LIMITS
    monkeypatch.setattr(pictures, "LIMITS", type(limits)(seconds=0.02, longest=60.0, n_bytes=1 << 30))
    with pytest.raises(InvalidRequestError, match=r"takes more than 0\.02 s to decode"):
        decoded(data)
    monkeypatch.setattr(pictures, "LIMITS", type(limits)(seconds=60.0, longest=60.0, n_bytes=16 << 20))
    with pytest.raises(InvalidRequestError, match="takes more than 16 MiB of memory to decode"):
        decoded(data)


def test_decoding_ends_once_it_is_stopped() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(StepCancelledError):
        decoded(png(5000, 5000), stop=stop)


def test_missing_pillow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_package(*_: object) -> Child:
        raise pictures.ChildError(pictures.Cause.NO_PACKAGE, "PIL")

    monkeypatch.setattr(pictures, "Child", no_package)
    with pytest.raises(
        InvalidRequestError, match=r"need the package Pillow; install it with pip install '\.\["
    ):
        decoded(b"")


# ---- damaged files


@pytest.mark.parametrize("format", FORMATS)
def test_damaged_files_bring_nothing_down(format: str) -> None:
    """Send 150 damaged files of a format to one process, which must answer each, and keep its memory."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    image = Image.fromarray(colours()).convert("P" if format == "GIF" else "RGB")
    data = file_of(image, format, **({} if format == "GIF" else {"exif": exif}))
    limits, refused = ImageLimits(n_pixels=1 << 20), 0
    with Child("hotset.formats.image_child", ("PIL",), pictures.LIMITS) as child:
        process = None
        rng, kinds = np.random.default_rng(3), list(DAMAGE.values())
        for i in range(150):
            file = kinds[i % len(kinds)](data, rng)
            request = encoded({"n_pixels": limits.n_pixels, "n_raw": len(file)})
            answer = child.ask(request, file, 3 * limits.n_pixels, height=int, width=int, raw=bytes)
            if "error" in answer:
                refused += 1
                assert answer["error"] in ("format", "pixels", "damaged")
                assert "\n" not in answer["reason"]
            else:
                assert len(answer["raw"]) == 3 * answer["height"] * answer["width"]
            if i == 20:
                process = psutil.Process(child.process.pid)
                before = process.memory_info().rss
        assert process is not None
        assert process.memory_info().rss < before + (64 << 20)
        child.ask(encoded({"n_pixels": 960, "n_raw": len(data)}), data, 2880, raw=bytes)
    assert 30 < refused < 150


def test_a_damaged_file_is_one_message() -> None:
    data = file_of(Image.fromarray(colours()), "PNG")
    for file, message in (
        (b"", "is not a JPEG, PNG, WebP or GIF file"),
        (b"BM" + bytes(100), "is not a JPEG, PNG, WebP or GIF file"),
        (file_of(Image.fromarray(colours()), "BMP"), "is not a JPEG, PNG, WebP or GIF file"),
        (file_of(Image.fromarray(colours()), "TIFF"), "is not a JPEG, PNG, WebP or GIF file"),
        (data[: len(data) * 2 // 3], r"The image file is damaged \(.+\)\."),
    ):
        with pytest.raises(InvalidRequestError, match=message) as error:
            decoded(file)
        assert "\n" not in str(error.value)
