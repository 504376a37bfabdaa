"""Tile sizes of kernels, chosen by the shapes of a product and by the properties of the device.

They are never chosen by timing, so that a model has one result on a device.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_SHARED = (
    101_376  # least bytes of shared memory per block on the NVIDIA cards for which kernels are compiled
)


def pow2(n: int) -> int:
    """Return the least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def row_tile(rows: int, most: int, n_words: int, lanes: int = 32) -> tuple[int, int]:
    """Return the words per row that a program multiplies with vectors at a time, and its warps.

    most: most words that are useful. n_words: words of a whole row. lanes: threads of a warp.
    A thread has at least two numbers of the tile of inputs, [words, 4], and one of the sums, [rows, words].
    With fewer, threads would add products of different threads, and the compiler would fuse each thread's own
    product with the sum. The last bits would then differ by thread, and it would be random whose are stored.
    """
    few = min(rows, 2)
    words = max(lanes // few, min(most, pow2(n_words)))
    return words, min(4, few * words // lanes)


@dataclass(frozen=True)
class AttentionTile:
    """The tile of an attention kernel.

    queries: tokens times the heads that share keys and values. positions: positions read at a time. stages:
    loads of positions in flight at once. shared: most bytes of shared memory on NVIDIA devices.
    """

    queries: int
    positions: int
    stages: int
    warps: int
    shared: int = 0


# Keys: whether the cache has halves, and the larger of a head's widths, rounded up to a power of two. A
# device uses the first tile whose shared memory it has. They are the largest that fit in the registers:
# test_gpu_aot.py compiles them all and reports spilled registers.
_PROMPT = {
    (True, 64): (AttentionTile(32, 32, 3, 4, 32_768),),
    (True, 128): (AttentionTile(32, 32, 3, 4, 61_440),),
    (True, 256): (AttentionTile(32, 32, 3, 4, 118_784), AttentionTile(32, 32, 2, 4, 86_016)),
    (True, 512): (AttentionTile(16, 16, 2, 8, 82_944),),
    (False, 64): (AttentionTile(32, 32, 3, 4, 73_728),),
    (False, 128): (AttentionTile(16, 32, 2, 4, 86_016),),
    (False, 256): (AttentionTile(16, 16, 2, 8, 100_352),),
    (False, 512): (),  # a tile would need at least 133,120 bytes and spill thousands
}
# Hopper's instruction multiplies 64 queries. With wider heads, 64 queries do not fit in the registers.
_PROMPT_HOPPER = {
    (True, 64): (AttentionTile(64, 32, 3, 4, 40_992),),
    (True, 128): (AttentionTile(64, 32, 3, 4, 81_952),),
}
# Tiles for one token; queries are heads.
_TOKEN = {
    (True, 64): (AttentionTile(32, 32, 3, 4, 33_024),),
    (True, 128): (AttentionTile(32, 32, 3, 4, 57_600),),
    (True, 256): (AttentionTile(16, 32, 3, 8, 69_888),),
    (True, 512): (AttentionTile(16, 16, 3, 4, 100_480),),
    (False, 64): (AttentionTile(32, 32, 3, 4, 41_216),),
    (False, 128): (AttentionTile(32, 32, 3, 4, 73_984),),
    (False, 256): (AttentionTile(16, 16, 3, 8, 67_712),),
    (False, 512): (AttentionTile(16, 16, 1, 4, 98_304),),
}


def prompt_tile(
    head: int, *, is_half: bool, shared: int, amd: bool = False, hopper: bool = False
) -> AttentionTile | None:
    """Return the tile for the attention of many tokens, or None if no tile fits.

    Then each token is computed separately.

    head: the larger of a head's widths of keys and of values. is_half: whether the cache has halves. shared:
    bytes of shared memory that a block of the device may have.
    """
    size = max(64, pow2(head))
    if amd:
        # A fragment of a matrix product is in the registers of both halves of a warp.
        return AttentionTile(32 if size <= 64 or (is_half and size <= 256) else 16, 16, 2, 8)
    tiles = (_PROMPT_HOPPER.get((is_half, size)) if hopper else None) or _PROMPT[is_half, size]
    return next((tile for tile in tiles if tile.shared <= shared), None)


def token_tile(head: int, group: int, *, is_half: bool, amd: bool = False) -> AttentionTile:
    """Return the tile for the attention of one token. group: heads per KV head; others as in prompt_tile."""
    size = max(64, pow2(head))
    if amd:
        return AttentionTile(16, 16, 2, 8)
    (tile,) = _TOKEN[is_half, size]
    queries = max(16, min(pow2(group), tile.queries))  # a product of matrices needs at least 16
    return AttentionTile(queries, tile.positions, tile.stages, tile.warps, tile.shared)
