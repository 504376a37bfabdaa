"""The place of an image in a prompt, and the sizes to which it is scaled; only its height and width count."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from hotset.errors import InvalidRequestError
from hotset.model.vision.config import VisionConfig

Detail = Literal["auto", "low", "high"]
DETAILS: tuple[Detail, ...] = get_args(Detail)
LOW_TOKENS = 256  # of an image of a free size with detail "low"
_MOST_SIDE = 4096  # pixels of a side of an image in tiles, before it is cut
_MOST_RATIO = 200  # of the sides of an image of a free size


@dataclass(frozen=True)
class Layout:
    """An image's place in the prompt.

    pieces: text (special tokens allowed) and counts of image tokens, in order. n_tokens: the image tokens of
    all pieces. positions: int32 [n_tokens, 3], time, row and column of each image token relative to the
    image's first position, for M-RoPE; None: positions continue as in text. n_positions: how far the next
    text token's position moves.
    """

    pieces: tuple[str | int, ...]
    n_tokens: int
    positions: np.ndarray | None = None
    n_positions: int = 0


@dataclass(frozen=True)
class ScaledSizes:
    """The sizes of an image on its way to the encoder, in pixels.

    scalings: heights and widths to which it is scaled, one after the other. rows, columns: tiles of the last
    size, which the whole image follows as one more; 0: no tiles.
    """

    scalings: tuple[tuple[int, int], ...]
    rows: int = 0
    columns: int = 0


def scaled_sizes(
    config: VisionConfig, height: int, width: int, detail: Detail, max_tokens: int | None
) -> ScaledSizes:
    """Return the sizes of an image, as the processor of the family in transformers chooses them.

    detail: "low" is one tile, or LOW_TOKENS. max_tokens: most image tokens; None: no limit.
    Raises InvalidRequestError if no size of the image has so few tokens, or its sides differ too much.
    """
    if detail not in DETAILS:
        raise InvalidRequestError(f"detail must be one of {', '.join(DETAILS)}, not {detail!r}")
    match config.family.sizes:
        case "tiles":
            found = _in_tiles(config, height, width, detail, max_tokens)
        case "square":
            found = ScaledSizes(((config.side, config.side),))
        case "free":
            found = _free(config, height, width, detail, max_tokens)
        case "edge":
            found = _within(config, height, width, detail, max_tokens)
    if max_tokens is not None and (n := n_tokens_of(config, found)) > max_tokens:
        raise InvalidRequestError(
            f"an image has at least {n} tokens in this model, more than the limit of {max_tokens}"
        )
    return found


def n_tokens_of(config: VisionConfig, sizes: ScaledSizes) -> int:
    """Return the image tokens of an image of these sizes."""
    height, width = sizes.scalings[-1]
    n = height * width // config.token_side**2
    return n + (config.side // config.token_side) ** 2 if sizes.rows else n


def layout_of(config: VisionConfig, sizes: ScaledSizes) -> Layout:
    """Return the place in the prompt of an image of these sizes."""
    n, n_all = (config.side // config.token_side) ** 2, n_tokens_of(config, sizes)
    match config.projector:
        case "idefics3":
            pieces: list[str | int] = []
            before = ""
            for row in range(sizes.rows):
                for column in range(sizes.columns):
                    pieces += [f"{before}<fake_token_around_image><row_{row + 1}_col_{column + 1}>", n]
                    before = ""
                before = "\n"
            before = before and f"{before}\n"
            pieces += [f"{before}<fake_token_around_image><global-img>", n, "<fake_token_around_image>"]
            return Layout(tuple(pieces), n_all, n_positions=n_all)
        case "gemma3":
            pieces = ["\n\n<start_of_image>", n, "<end_of_image>\n\n"]
            return Layout(tuple(pieces), n, n_positions=n)
        case "pixtral":
            rows, columns = (side // config.token_side for side in sizes.scalings[-1])
            pieces = [columns, "[IMG_BREAK]"] * rows
            pieces[-1] = "[IMG_END]"
            return Layout(tuple(pieces), n_all, n_positions=n_all)
        case _:
            rows, columns = (side // config.token_side for side in sizes.scalings[-1])
            at = np.indices((1, rows, columns), np.int32).reshape(3, -1).T
            return Layout((n_all,), n_all, np.ascontiguousarray(at), max(rows, columns))


def _in_tiles(
    config: VisionConfig, height: int, width: int, detail: Detail, max_tokens: int | None
) -> ScaledSizes:
    """Return the sizes of Idefics 3: the longer side is `longest`, and the tiles have `side`."""
    side, longest = config.side, config.longest
    if detail == "low":
        return ScaledSizes((_of_longest(height, width, longest), (side, side)))
    while True:
        first = _of_longest(height, width, longest)
        sizes = ScaledSizes((first, _whole_tiles(*first, side)))
        rows, columns = (pixels // side for pixels in sizes.scalings[-1])
        if rows * columns > 1:
            sizes = replace(sizes, rows=rows, columns=columns)
        if max_tokens is None or n_tokens_of(config, sizes) <= max_tokens or rows * columns == 1:
            return sizes
        longest = (longest - 1) // side * side  # the next smaller grid


def _of_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """Return the size whose longer side is `longest`, the other one even, and at most _MOST_SIDE."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _MOST_SIDE:
        width, height = _MOST_SIDE, int(_MOST_SIDE / ratio)
    elif height > width and height > _MOST_SIDE:
        height, width = _MOST_SIDE, int(_MOST_SIDE * ratio)
    return max(height, 1), max(width, 1)


def _whole_tiles(height: int, width: int, side: int) -> tuple[int, int]:
    """Return the next larger size of whole tiles."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return max(height, side), max(width, side)


def _free(
    config: VisionConfig, height: int, width: int, detail: Detail, max_tokens: int | None
) -> ScaledSizes:
    """Return the sizes of Qwen-VL: whole tokens, of `least` to `most` pixels."""
    side = config.token_side
    if max(height, width) > _MOST_RATIO * min(height, width):
        raise InvalidRequestError(
            f"an image of {width} x {height} pixels is too narrow: one side may be at most {_MOST_RATIO} "
            "times the other"
        )
    most = min(config.most, LOW_TOKENS * side**2) if detail == "low" else config.most
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side**2 > most:
        rows, columns = _smaller(height, width, side, most)
    elif rows * columns * side**2 < config.least:
        factor = math.sqrt(config.least / (height * width))
        rows, columns = (math.ceil(n * factor / side) for n in (height, width))
    if max_tokens is not None and rows * columns > max_tokens > 0:
        rows, columns = _smaller(height, width, side, max_tokens * side**2)
        rows = min(rows, max(max_tokens // columns, 1))
        columns = min(columns, max_tokens // rows)
    return ScaledSizes(((rows * side, columns * side),))


def _within(
    config: VisionConfig, height: int, width: int, detail: Detail, max_tokens: int | None
) -> ScaledSizes:
    """Return the sizes of Pixtral: whole tokens, with both sides at most `side` pixels."""
    side, longest = config.token_side, config.side
    if detail == "low":
        longest = min(longest, math.isqrt(LOW_TOKENS) * side)
    while True:
        ratio = max(height / longest, width / longest, 1)
        rows, columns = (max((math.floor(n / ratio) - 1) // side + 1, 1) for n in (height, width))
        if max_tokens is None or rows * columns <= max_tokens or longest <= side:
            return ScaledSizes(((rows * side, columns * side),))
        longest -= side


def _smaller(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Return rows and columns of tokens with at most `most` pixels, or more if one of them would be 0."""
    factor = math.sqrt(height * width / most)
    rows, columns = (max(1, math.floor(n / factor / side)) for n in (height, width))
    return rows, columns
