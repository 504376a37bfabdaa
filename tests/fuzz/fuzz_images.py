"""Fuzzes image files, damaged ones and sound ones with odd contents, by themselves and in requests.

usage: python tests/fuzz/fuzz_images.py [--seconds 60] [--seed 0] [--keep FOLDER]

One process decodes all files, and a server with an image encoder gets them in the messages of four APIs. Each
file gives the right pixels and an answer, or one error message, the same in both. Afterwards no process is
left, and memory is as after the first files. A case that does anything else is kept in a folder whose name is
printed, and the exit status is 1.
"""

from __future__ import annotations

import base64
import io
import itertools
import re
import shutil
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

if __name__ == "__main__":  # as pytest does for the tests
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("support", "")]

from byte_models import write_model
from fuzz import fuzz_models
from image_files import DAMAGE, FORMATS, ORIENTATION, Image, chunk, colours, cut_off, extreme, file_of, png
from tiny_server import Serving
from tiny_vision import N_EMBD, shared_encoder

from hotset.memory import own_memory
from hotset.text.child import Cause, Child, ChildError, encoded
from hotset.vision import pictures

N_WARM = 48  # cases after which memory is measured for the first time
GROWTH = 128 << 20  # bytes that the allocators may keep after larger images than the first ones
SENTENCES = (
    r"The image is not a JPEG, PNG, WebP or GIF file; send one of these\.",
    r"The image has \d+ x \d+ pixels, more than the limit of 50000000; send a smaller one\.",
    r"The image file is damaged \([^\n]{1,200}\)\.",
    r"The image takes more than \d+ (s|MiB of memory) to decode; send a smaller one\.",
    r"the data of an image is not valid base64",
    r"the data of an image must be a text in base64",
    r"the data URL of an image must begin with data:image/TYPE;base64,",
    r"the URL of an image must be a [^\n]{1,200}",
)
_SENTENCE = re.compile(r"(messages?[ .]\d+(\.\w+)*: )?(" + "|".join(SENTENCES) + ")")
_JPEG_SCAN, _JPEG_END = b"\xff\xda", b"\xff\xd9"


@dataclass(frozen=True)
class Case:
    """A file. pixels: the right ones, within `tolerance`; None: any, or a message. refused: only a message.

    text: in place of the file's base64 in a request.
    """

    data: bytes
    pixels: np.ndarray | None = None
    tolerance: int = 0
    refused: bool = False
    text: str | None = None


Rng = np.random.Generator


def sound(rng: Rng, format: str | None = None) -> bytes:
    """Return a sound file of any format, size and kind of pixels."""
    format = format or str(rng.choice(FORMATS))
    image = Image.fromarray(colours(*rng.integers(1, 60, 2)))
    modes = {"JPEG": ("RGB", "L", "CMYK"), "PNG": ("RGB", "RGBA", "L", "LA", "P", "1"), "GIF": ("P", "L")}
    image = image.convert(str(rng.choice(modes.get(format, ("RGB", "RGBA")))))
    options = {"progressive": bool(rng.integers(2))} if format == "JPEG" else {}
    return file_of(image, format, **options)


def damaged(rng: Rng) -> Case:
    return Case(list(DAMAGE.values())[rng.integers(len(DAMAGE))](sound(rng), rng))


def wrong_header(rng: Rng) -> Case:
    """Give a file the first bytes of another format, or random ones."""
    data, n = sound(rng), int(rng.integers(1, 40))
    head = sound(rng)[:n] if rng.integers(2) else rng.bytes(n)
    return Case(head + data[n:])


def huge(rng: Rng) -> Case:
    """Name a size at the limit, or beyond, in a header. Decoders may fill an image below it."""
    side = int(rng.choice([7000, 7072, 16383, 65535]))
    wide, high = (side, side) if rng.integers(2) else (65535, int(rng.choice([700, 763])))
    refused = wide * high > pictures.DEFAULT_LIMITS.n_pixels
    match rng.choice(FORMATS):
        case "PNG":
            return Case(png(wide, high, rows=1), refused=refused)
        case "GIF":
            data = bytearray(sound(rng, "GIF"))
            data[6:10] = struct.pack("<HH", wide, high)
            return Case(bytes(data), refused=refused)
        case "JPEG":
            data = bytearray(file_of(Image.fromarray(colours()), "JPEG"))
            at = data.index(b"\xff\xc0") + 5
            data[at : at + 4] = struct.pack(">HH", high, wide)
            return Case(bytes(data), refused=refused)
        case _:
            canvas = struct.pack("<I", 0x10) + b"".join(struct.pack("<I", n - 1)[:3] for n in (wide, high))
            body = b"WEBPVP8X" + struct.pack("<I", 10) + canvas + sound(rng, "WEBP")[12:]
            return Case(b"RIFF" + struct.pack("<I", len(body)) + body, refused=True)


def large(rng: Rng) -> Case:
    """Return an image of millions of pixels from a small file."""
    height, width = (int(n) for n in rng.integers(500, 3000, 2))
    return Case(png(width, height), np.zeros((height, width, 3), np.uint8))


def hostile_exif(rng: Rng) -> Case:
    """Add EXIF whose entries point anywhere, with orientations that do not exist."""
    entries = [
        (ORIENTATION, int(rng.integers(14)), int(rng.choice([0, 1, 1 << 31])), int(rng.choice([0, 9])))
    ]
    entries += [tuple(int(n) for n in rng.integers(0, 1 << 16, 4)) for _ in range(rng.integers(5))]
    after = int(rng.choice([0, 8, 1 << 31]))  # where further entries are: nowhere, here, outside
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    n = len(entries) if rng.integers(2) else 65535
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, n) + body + struct.pack("<I", after)
    image, format = Image.fromarray(colours()), str(rng.choice(["JPEG", "PNG", "WEBP"]))
    options = {"lossless": True} if format == "WEBP" else {}
    with Image.open(io.BytesIO(file_of(image, format, **options))) as plain:
        return Case(file_of(image, format, exif=exif, **options), np.asarray(plain.convert("RGB")))


def animated(rng: Rng) -> Case:
    """Return several frames, of which only the first one counts."""
    format = str(rng.choice(["GIF", "WEBP", "PNG"]))
    first = tuple(int(n) for n in rng.integers(0, 256, 3))
    others = [Image.new("RGB", (9, 7), tuple(int(n) for n in rng.integers(0, 256, 3))) for _ in range(9)]
    options = {"lossless": True} if format == "WEBP" else {}
    data = file_of(Image.new("RGB", (9, 7), first), format, save_all=True, append_images=others, **options)
    if rng.integers(2):
        return Case(extreme(data, rng))
    return Case(data, np.full((7, 9, 3), first, np.uint8))


def ink(rng: Rng) -> Case:
    """Return an image of cyan, magenta, yellow and black."""
    *colour, black = (int(n) for n in rng.integers(0, 256, 4))
    data = file_of(Image.new("CMYK", (16, 8), (*colour, black)), "JPEG", quality=95)
    if rng.integers(2):
        return Case(cut_off(data, rng))
    light = [round((255 - n) * (255 - black) / 255) for n in colour]
    return Case(data, np.full((8, 16, 3), light, np.uint8), 6)


def deep(rng: Rng) -> Case:
    """Return an image of 16 bits per channel: grey, with alpha or not, or colours."""
    colour, n = ((0, 1), (2, 3), (4, 2), (6, 4))[rng.integers(4)]
    values = rng.integers(0, 1 << 16, n)
    if n in (2, 4):
        values[-1] = 0xFFFF
    data = png(5, 4, depth=16, colour=colour, row=values.astype(">u2").tobytes() * 5)
    light = np.broadcast_to(values[: 3 if n > 2 else 1] / 257, 3)
    return Case(data, np.tile(light.round().astype(np.uint8), (4, 5, 1)), 1)


def palette(rng: Rng) -> Case:
    """Return colours of a palette, some of them transparent; some pixels may lie outside the palette."""
    depth = int(rng.choice([1, 2, 4, 8]))
    n = int(rng.integers(1, 1 << depth, endpoint=True))
    table = rng.integers(0, 256, (n, 3), np.uint8)
    alpha = rng.choice([0, 255, 128], rng.integers(1, n, endpoint=True)).astype(np.uint8)
    row = rng.bytes(2 * depth)  # 16 pixels
    more = [chunk(b"PLTE", table.tobytes()), chunk(b"tRNS", alpha.tobytes())]
    data = png(16, 3, depth=depth, colour=3, row=row, more=more)
    bits = np.unpackbits(np.frombuffer(row, np.uint8)).reshape(16, depth)
    places = bits @ (1 << np.arange(depth)[::-1])
    if places.max() >= n:
        return Case(data)
    opaque = np.append(alpha, np.full(n - len(alpha), 255))[places, None] / 255
    light = table[places] * opaque + 255 * (1 - opaque)
    return Case(data, np.broadcast_to(light.round(), (3, 16, 3)).astype(np.uint8), 1)


def bomb(rng: Rng) -> Case:
    """Return a PNG file that expands a thousandfold, or has very many parts."""
    packed = b"a\0\0" + zlib.compress(bytes(int(rng.integers(1 << 20, 1 << 27))), 9)
    match rng.integers(5):
        case 0:
            return Case(png(64, 2, rows=int(rng.integers(3, 300_000))), np.zeros((2, 64, 3), np.uint8))
        case 1:
            return Case(png(4, 4, more=[chunk(b"zTXt", packed)]), refused=True)
        case 2:
            return Case(png(4, 4, more=[chunk(b"iTXt", b"a\0\1\0\0\0" + packed[3:])]), refused=True)
        case 3:
            return Case(png(4, 4, more=[chunk(b"iCCP", packed)]))
        case _:
            return Case(png(4, 4, more=[chunk(b"abCd", b"")] * int(rng.integers(1, 30_000))))


def many_scans(rng: Rng) -> Case:
    """Repeat the last scan of a progressive JPEG file."""
    data = file_of(Image.fromarray(colours()), "JPEG", progressive=True)
    start, end = data.rindex(_JPEG_SCAN), data.rindex(_JPEG_END)
    return Case(data[:end] + data[start:end] * int(rng.integers(1, 2000)) + data[end:])


def followed(rng: Rng) -> Case:
    """Append another file, which decoders ignore."""
    data = file_of(Image.fromarray(colours()), "PNG")
    return Case(data + sound(rng) + rng.bytes(int(rng.integers(1, 5000))), colours())


def other_format(rng: Rng) -> Case:
    """Return a sound file of a format that hotset does not read, or no image at all."""
    format = str(rng.choice(["BMP", "TIFF", "ICO", "PPM", "TGA", "EPS", ""]))
    data = file_of(Image.fromarray(colours(16, 16)), format) if format else rng.bytes(int(rng.integers(200)))
    return Case(data, refused=True)


def bad_text(rng: Rng) -> Case:
    """Return invalid base64, or an invalid data URL."""
    data = base64.b64encode(sound(rng)).decode()
    at = int(rng.integers(1, len(data)))
    texts = ("", data[:at] + "*" + data[at:], data[:-3], "data:text/plain,a", "data:;base64", "é")
    return Case(b"", refused=True, text=str(rng.choice(texts)))


KINDS: tuple[Callable[[Rng], Case], ...] = (
    damaged, wrong_header, damaged, huge, hostile_exif, animated, damaged, ink, deep, palette, bomb,
    many_scans, followed, other_format, bad_text, large,
)  # fmt: skip


def case_of(seed: int, number: int) -> Case:
    """Return a case, which depends only on the arguments."""
    return KINDS[number % len(KINDS)](np.random.default_rng([seed, number]))


# ---- the process that decodes


class Decoder:
    """One process for all files, which is started again only after a limit. n_started: how often."""

    def __init__(self) -> None:
        self.n_started = 0
        self.child = self._started()

    def _started(self) -> Child:
        self.n_started += 1
        return Child("hotset.formats.image_child", ("PIL",), pictures.LIMITS)

    def memory(self) -> int:
        return int(psutil.Process(self.child.process.pid).memory_info().rss)

    def decoded(self, data: bytes) -> np.ndarray | str:
        """Return the pixels, or the kind of the error. Raises ChildError if the process was lost."""
        limits = pictures.DEFAULT_LIMITS
        request, most = encoded({"n_pixels": limits.n_pixels, "n_raw": len(data)}), 3 * limits.n_pixels
        try:
            answer = self.child.ask(request, data, most, height=int, width=int, raw=bytes)
        except ChildError as error:
            self.child.end()
            self.child = self._started()
            if error.cause not in (Cause.TIME, Cause.MEMORY):
                raise
            return "takes more than"
        if "error" in answer:
            kinds = {"format": "is not a JPEG", "pixels": "more than the limit", "damaged": "is damaged"}
            return kinds[answer["error"]]
        return np.frombuffer(answer["raw"], np.uint8).reshape(answer["height"], answer["width"], 3)

    def close(self) -> None:
        self.child.end()


# ---- the server


def in_chat(url: str, _: str) -> tuple[str, dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}


def in_responses(url: str, _: str) -> tuple[str, dict[str, Any]]:
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "?"}]
    return "/v1/responses", {"input": [{"role": "user", "content": parts}], "max_output_tokens": 16}


def in_message(_: str, data: str) -> tuple[str, dict[str, Any]]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "?"}]
    return "/v1/messages", {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}


def in_ollama(_: str, data: str) -> tuple[str, dict[str, Any]]:
    message = {"role": "user", "content": "?", "images": [data]}
    return "/api/chat", {"messages": [message], "stream": False, "options": {"num_predict": 1}}


SCHEMAS = (in_chat, in_responses, in_message, in_ollama)


def asked(server: Serving, number: int, case: Case) -> str:
    """Return the error message of a request with the image; "" for an answer. Raises AssertionError."""
    text = base64.b64encode(case.data).decode() if case.text is None else case.text
    is_url = case.text is not None and case.text.startswith("data:")
    url = text if is_url else f"data:image/png;base64,{text}"
    route, body = SCHEMAS[number // len(KINDS) % len(SCHEMAS)](url, text)
    reply = server.client.post(route, json={"model": "tiny", "temperature": 0} | body)
    if reply.status_code == 200:
        return ""
    assert reply.status_code == 400, f"{route}: {reply.status_code} {reply.text[:300]}"
    error = reply.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


def problem_of(number: int, case: Case, decoder: Decoder, server: Serving) -> str:
    """Return the problem of a case; "" if its results are right."""
    message = asked(server, number, case)
    if message and not _SENTENCE.fullmatch(message):
        return f"an unknown message: {message}"
    if case.text is not None:
        return "" if message else "it was answered"
    found = decoder.decoded(case.data)
    if isinstance(found, str):
        if found not in message:
            return f"the process says {found!r}, and the server {message!r}"
        return "" if case.pixels is None else f"it was refused: {message}"
    if message:
        return f"the process decodes it, and the server says {message!r}"
    if case.refused:
        return "it was answered"
    if case.pixels is None:
        return ""
    if found.shape != case.pixels.shape:
        return f"its shape is {found.shape}, not {case.pixels.shape}"
    off = int(np.abs(found.astype(int) - case.pixels).max())
    return f"its pixels are off by {off}" if off > case.tolerance else ""


def attack(
    seed: int, more: Callable[[int], bool], on_problem: Callable[[int, Path, str], None]
) -> tuple[int, int]:
    """Run cases while more(number of the case). Return the numbers of all cases and of failed cases.

    on_problem: called with the number of a failed case, its folder, and a text with the problem.
    """
    n_failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder, case_folder = Path(scratch) / "model", Path(scratch) / "case"
        folder.mkdir()
        case_folder.mkdir()

        def failed(number: int, problem: str) -> None:
            nonlocal n_failed
            n_failed += 1
            on_problem(number, case_folder, problem)

        shutil.copy(shared_encoder("idefics3", Path(scratch)), folder / "mmproj.gguf")
        keys = {"llama.context_length": 1024}
        path = write_model(folder / "tiny.gguf", n_embd=N_EMBD, **keys)
        with closing(Decoder()) as decoder, Serving(path, load={"n_ctx": 1024}) as server:
            before: tuple[int, int, int] | None = None
            for number in itertools.count():
                if number == N_WARM:
                    before = own_memory(), decoder.memory(), decoder.n_started
                if not more(number):
                    break
                case, kind = case_of(seed, number), KINDS[number % len(KINDS)].__name__
                (case_folder / "image").write_bytes(case.data)
                try:
                    problem = problem_of(number, case, decoder, server)
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
                if problem:
                    failed(number, f"{kind}: {problem}")
            server.wait_until_idle()
            if before is not None:
                grown = own_memory() - before[0]
                if grown > GROWTH:
                    failed(number, f"the server has grown by {grown >> 20} MiB")
                grown = decoder.memory() - before[1]
                if grown > GROWTH and decoder.n_started == before[2]:
                    failed(number, f"the process that decodes has grown by {grown >> 20} MiB")
            of_images = [
                one.pid
                for one in psutil.Process().children(recursive=True)
                if "hotset.formats.image_child" in one.cmdline() and one.pid != decoder.child.process.pid
            ]
            if of_images:
                failed(number, f"processes that decode are left: {of_images}")
    return number, n_failed


if __name__ == "__main__":
    sys.exit(fuzz_models.work_through(attack, "images", __doc__))
