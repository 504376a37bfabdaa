"""The place of an image in a prompt, and the sizes to which it is scaled; only its height and width count."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from hotset.errors import InvalidRequestError
from hotset.model.vision.config import VisionConfig
from hotset.text.image_text import DETAILS, Detail

LOW_TOKENS = 256  # of an image of a free size with detail "low"
_LOW_BUDGET = 70  # the same of Gemma 4, which was trained with 70, 140, 280, 560 and 1120
_MOST_SIDE = 4096  # pixels of a side of an image in tiles, before it is cut
_MOST_RATIO = 200  # of the sides of an image of a free size, or of which only the middle is used


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

    scalings: heights and widths to which it is scaled, one after the other. canvas: the size to which its
    borders are cut, or to which it gets black ones; None: the last one. rows, columns: tiles of that size;
    the whole image is one more; 0: no tiles. kept: rows and columns of the image tokens of all tiles, without
    borders, if each row ends with a token of its own; (1, 0) without tiles: only that token is added.
    """

    scalings: tuple[tuple[int, int], ...]
    rows: int = 0
    columns: int = 0
    canvas: tuple[int, int] | None = None
    kept: tuple[int, int] | None = None


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
        case "points":
            found = _in_points(config, height, width, detail, max_tokens)
        case "grid":
            found = _in_grid(config, height, width, detail, max_tokens)
        case "budget":
            found = _in_budget(config, height, width, detail, max_tokens)
        case "edge":
            found = _within(config, height, width, detail, max_tokens)
    if max_tokens is not None and (n := n_tokens_of(config, found)) > max_tokens:
        raise InvalidRequestError(
            f"an image has at least {n} tokens in this model, more than the limit of {max_tokens}"
        )
    return found


def n_tokens_of(config: VisionConfig, sizes: ScaledSizes) -> int:
    """Return the image tokens of an image of these sizes."""
    n = (config.side // config.token_side) ** 2
    if sizes.kept is not None:
        rows, columns = sizes.kept
        return n + rows * (columns + 1)
    height, width = sizes.canvas or sizes.scalings[-1]
    return height * width // config.token_side**2 + (n if sizes.rows else 0)


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
        case "gemma4v":
            return Layout(("<|image>", n_all, "<image|>"), n_all, n_positions=n_all)
        case "mlp":
            return Layout((n_all,), n_all, n_positions=n_all)
        case "internvl":
            return Layout(("<img>", n_all, "</img>"), n_all, n_positions=n_all)
        case "pixtral":
            rows, columns = (side // config.token_side for side in sizes.scalings[-1])
            pieces = [columns, "[IMG_BREAK]"] * rows
            pieces[-1] = "[IMG_END]"
            return Layout(tuple(pieces), n_all, n_positions=n_all)
        case _:
            rows, columns = (side // config.token_side for side in sizes.scalings[-1])
            at = np.indices((1, rows, columns), np.int32).reshape(3, -1).T
            return Layout((n_all,), n_all, np.ascontiguousarray(at), max(rows, columns))


def in_rows(
    config: VisionConfig, sizes: ScaledSizes, embeddings: np.ndarray, newline: np.ndarray
) -> np.ndarray:
    """Return the embeddings of the whole image, and of all tiles row by row, with `newline` after each row.

    embeddings: float32 [n, n_embd], of the whole image and of each tile, of sizes with `kept`.
    """
    if not sizes.rows or sizes.kept is None:
        return np.concatenate([embeddings, newline[None]])
    side, (rows, columns) = config.side // config.token_side, sizes.kept
    whole, tiles = embeddings[: side**2], embeddings[side**2 :]
    grid = tiles.reshape(sizes.rows, sizes.columns, side, side, -1).swapaxes(1, 2)
    grid = grid.reshape(sizes.rows * side, sizes.columns * side, embeddings.shape[1])
    top, left = (sizes.rows * side - rows) // 2, (sizes.columns * side - columns) // 2
    grid = grid[top : top + rows, left : left + columns]
    lines = np.concatenate([grid, np.broadcast_to(newline, (rows, 1, len(newline)))], axis=1)
    return np.concatenate([whole, lines.reshape(-1, len(newline))])


def _in_points(
    config: VisionConfig, height: int, width: int, detail: Detail, max_tokens: int | None
) -> ScaledSizes:
    """Return the sizes of LLaVA: the middle of the image, or tiles of the grid that wastes least."""
    side = config.side
    if not config.grids:
        _check_ratio(height, width)
        longer = int(side * max(height, width) / min(height, width))
        scaled = (side, longer) if width >= height else (longer, side)
        return ScaledSizes((scaled,), canvas=(side, side))
    best, found = (0, 0), ScaledSizes(((side, side),), kept=(1, 0) if config.has_newline else None)
    for grid in config.grids if detail != "low" else ():
        sizes = _in_borders(config, height, width, *grid)
        if max_tokens is not None and n_tokens_of(config, sizes) > max_tokens:
            continue
        area = side**2 * grid[0] * grid[1]
        scale = min(side * grid[1] / width, side * grid[0] / height)
        used = min(int(width * scale) * int(height * scale), height * width)
        if (used, used - area) > best or not found.rows:
            best, found = (used, used - area), sizes
    return found


def _check_ratio(height: int, width: int) -> None:
    if max(height, width) > _MOST_RATIO * min(height, width):
        raise InvalidRequestError(
            f"an image of {width} x {height} pixels is too narrow: one side may be at most {_MOST_RATIO} "
            "times the other"
        )


def _in_borders(config: VisionConfig, height: int, width: int, rows: int, columns: int) -> ScaledSizes:
    """Return the sizes of an image in the middle of a grid of tiles."""
    side, canvas = config.side, (rows * config.side, columns * config.side)
    by_height, by_width = canvas[0] / height, canvas[1] / width
    if by_width < by_height:
        scaled = min(math.ceil(height * by_width), canvas[0]), canvas[1]
    else:
        scaled = canvas[0], min(math.ceil(width * by_height), canvas[1])
    if not config.has_newline:
        return ScaledSizes((scaled,), rows, columns, canvas)
    n = side // config.token_side
    n_rows, n_columns = rows * n, columns * n
    if width / height > n_columns / n_rows:
        n_rows -= (n_rows - int(round(height * (n_columns / width), 7))) // 2 * 2
    else:
        n_columns -= (n_columns - int(round(width * (n_rows / height), 7))) // 2 * 2
    return ScaledSizes((scaled,), rows, columns, canvas, (n_rows, n_columns))


def _in_grid(
    config: VisionConfig, height: int, width: int, detail: Detail, max_tokens: int | None
) -> ScaledSizes:
    """Return the sizes of InternVL: the grid whose sides differ most like the image's."""
    side, best, found = config.side, math.inf, ScaledSizes(((config.side, config.side),))
    for rows, columns in config.grids if detail != "low" else ():
        sizes = ScaledSizes(((rows * side, columns * side),), rows, columns)
        if rows * columns == 1:
            sizes = replace(sizes, rows=0, columns=0)
        if max_tokens is not None and n_tokens_of(config, sizes) > max_tokens:
            continue
        difference = abs(width / height - columns / rows)
        larger = difference == best and width * height > 0.5 * side**2 * rows * columns
        if difference < best or larger:
            best, found = difference, sizes
    return found


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
    _check_ratio(height, width)
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


def _in_budget(
    config: VisionConfig, height: int, width: int, detail: Detail, max_tokens: int | None
) -> ScaledSizes:
    """Return the sizes of Gemma 4: the most whole tokens of a number, also of small images."""
    side = config.token_side
    most = config.most // side**2
    if detail == "low":
        most = min(most, _LOW_BUDGET)
    if max_tokens is not None:
        most = max(min(most, max_tokens), 1)
    factor = math.sqrt(most * side**2 / (height * width))
    rows, columns = (math.floor(factor * n / side) for n in (height, width))
    if rows == 0:
        rows, columns = 1, max(min(width // height, most), 1)
    elif columns == 0:
        rows, columns = min(height // width, most), 1
    return ScaledSizes(((rows * side, columns * side),))


def _smaller(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Return rows and columns of tokens with at most `most` pixels, or more if one of them would be 0."""
    factor = math.sqrt(height * width / most)
    rows, columns = (max(1, math.floor(n / factor / side)) for n in (height, width))
    return rows, columns
