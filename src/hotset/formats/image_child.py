"""The program of the process that decodes an image file: Pillow, for four formats.

`vision/pictures.py` starts it (`text/child_main.py`). It gets the most pixels of an image, {"n_pixels": ...,
"n_raw": ...}, and the bytes of a file. It answers {"height": ..., "width": ...} and the pixels, three bytes
each, row by row, or {"error": "format" | "pixels" | "damaged", "reason": ...}. Only the first frame counts.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

from PIL import Image, UnidentifiedImageError
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

STACK_BYTES = 0  # 0: the main thread
FORMATS = tuple(kind.format for kind in (JpegImageFile, PngImageFile, WebPImageFile, GifImageFile))
_ORIENTATION = 0x0112  # the tag of EXIF
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
_MAX_REASON_CHARS = 200


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that answers requests. A first image triggers Pillow's late imports."""
    Image.MAX_IMAGE_PIXELS = None  # `answer` has its own limit
    for format in FORMATS:
        file = BytesIO()
        Image.new("RGB", (2, 2)).save(file, format)
        answer({"n_pixels": 4, "raw": file.getvalue()})
    return answer


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Decode the image of a request."""
    try:
        with Image.open(BytesIO(request["raw"]), formats=FORMATS) as image:
            width, height = image.size
            if width * height > request["n_pixels"]:
                return {"error": "pixels", "reason": f"{width} x {height}"}
            pixels = _upright(image)
    except MemoryError:
        raise
    except UnidentifiedImageError:
        return {"error": "format", "reason": ""}
    except Exception as error:  # a damaged file can make Pillow raise nearly anything
        return {"error": "damaged", "reason": _reason(error)}
    return {"height": pixels.height, "width": pixels.width, "raw": pixels.tobytes()}


def _upright(image: Image.Image) -> Image.Image:
    """Return the first frame in RGB, turned as its EXIF tag says, over white."""
    image.load()
    try:
        turn = _TURNS.get(image.getexif().get(_ORIENTATION) or 1)
    except MemoryError:
        raise
    except Exception:  # damaged EXIF does not matter
        turn = None
    if image.mode.startswith("I"):  # 16 bits of grey
        image = image.convert("I").point(lambda level: level * (1 / 257)).convert("L")
    if image.has_transparency_data:
        shown = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown)
    image = image.convert("RGB")
    return image if turn is None else image.transpose(turn)


def _reason(error: Exception) -> str:
    """Return the error in one line."""
    return " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__
