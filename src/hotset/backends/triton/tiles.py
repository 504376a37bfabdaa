"""How much a program of a kernel takes at a time: by the shapes of its product and by what its device has.

Never by timing, so that one model gives one result on a device.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_SHARED = (
    101_376  # bytes of shared memory for a block: what the smallest NVIDIA card of those compiled has
)


def pow2(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def row_tile(rows: int, most: int, n_words: int, lanes: int = 32) -> tuple[int, int]:
    """Words of each of some rows that a program multiplies with vectors at a time, and its warps.

    most: as many words as there is use for; n_words: of a whole row; lanes: threads of a warp.
    Of the tile of inputs, [words, 4], a thread has two numbers at least, and of the sums, [rows, words], one.
    With fewer, threads would add products that are in different threads, and the compiler fuses each
    thread's own product with the sum: every thread would have other last bits, and which of them is stored
    would be chance.
    """
    few = min(rows, 2)
    words = max(lanes // few, min(most, pow2(n_words)))
    return words, min(4, few * words // lanes)


@dataclass(frozen=True)
class AttentionTile:
    """Of attention: queries (tokens times the heads that share keys and values), positions that are read at a
    time, how many of these are on their way at once, warps, and bytes of shared memory, at most, on NVIDIA.
    """

    queries: int
    positions: int
    stages: int
    warps: int
    shared: int = 0


# By whether the cache is of halves, and by the larger of a head's widths, rounded up to a power of two. Of
# several the first that a device has the shared memory for. They are the largest that the registers hold:
# test_gpu_aot.py compiles them all, and says what is spilled.
_PROMPT = {
    (True, 64): (AttentionTile(32, 32, 3, 4, 32_768),),
    (True, 128): (AttentionTile(32, 32, 3, 4, 61_440),),
    (True, 256): (AttentionTile(32, 32, 3, 4, 118_784), AttentionTile(32, 32, 2, 4, 86_016)),
    (True, 512): (AttentionTile(16, 16, 2, 8, 82_944),),
    (False, 64): (AttentionTile(32, 32, 3, 4, 73_728),),
    (False, 128): (AttentionTile(16, 32, 2, 4, 86_016),),
    (False, 256): (AttentionTile(16, 16, 2, 8, 100_352),),
    (False, 512): (),  # 133,120 bytes at least, and thousands spilled
}
# Hopper's instruction multiplies 64 queries; of wider heads so many have no room in the registers.
_PROMPT_HOPPER = {
    (True, 64): (AttentionTile(64, 32, 3, 4, 40_992),),
    (True, 128): (AttentionTile(64, 32, 3, 4, 81_952),),
}
# Of one token; queries are heads.
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
    """Of the attention of many tokens. None: no tile has room, and each token is computed by itself.

    head: the larger width of a head, of keys or of values. is_half: whether the cache is. shared: bytes of
    shared memory that a block of the device may have.
    """
    size = max(64, pow2(head))
    if amd:
        # A fragment of a matrix product lies in the registers of two halves of a warp.
        return AttentionTile(32 if size <= 64 or (is_half and size <= 256) else 16, 16, 2, 8)
    tiles = (_PROMPT_HOPPER.get((is_half, size)) if hopper else None) or _PROMPT[is_half, size]
    return next((tile for tile in tiles if tile.shared <= shared), None)


def token_tile(head: int, group: int, *, is_half: bool, amd: bool = False) -> AttentionTile:
    """Of the attention of one token, whose heads of one KV head are `group`; the rest as in prompt_tile."""
    size = max(64, pow2(head))
    if amd:
        return AttentionTile(16, 16, 2, 8)
    (tile,) = _TOKEN[is_half, size]
    queries = max(16, min(pow2(group), tile.queries))  # a product of matrices takes no fewer
    return AttentionTile(queries, tile.positions, tile.stages, tile.warps, tile.shared)
