#include "device_tiles.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <utility>

#include "threads.h"

namespace hotset {
namespace {

constexpr size_t kClaim = 256 << 10;  // approximate bytes that a thread writes at a time
constexpr size_t kAhead = 256;        // least bytes of a row to prefetch
constexpr size_t kPartBytes = 16;     // sub-block scales of 256 columns

// The layout of a block. vectors: number of 16-byte vectors of codes per 32 columns. scale_bytes, high_bytes:
// bytes of scales, and of the codes' high bits.
struct Layout {
    Type type;
    size_t vectors, scale_bytes = 0, high_bytes = 0;

    constexpr bool is_k() const { return type_facts(type).block_size == 256; }
    constexpr size_t cols() const { return is_k() ? 256 : 32; }
    constexpr size_t more_bytes() const {  // for 32 rows
        return kTileRows * (scale_bytes + high_bytes + (is_k() ? kPartBytes : 0));
    }
};

constexpr Layout kLayouts[] = {
    {Type::F32, 8},         {Type::F16, 4},         {Type::BF16, 4},     {Type::Planes4, 1},
    {Type::Planes8, 2},     {Type::Q4_0, 1, 2},     {Type::Q4_1, 1, 4},  {Type::Q5_0, 1, 2, 4},
    {Type::Q5_1, 1, 4, 4},  {Type::Q8_0, 2, 2},     {Type::MXFP4, 1, 1}, {Type::Q4_K, 1, 4},
    {Type::Q5_K, 1, 4, 32}, {Type::Q6_K, 1, 2, 64},
};

template <class Word>
Word load(const uint8_t* p) {
    Word word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

template <class Word>
void store(uint8_t* p, Word word) {
    std::memcpy(p, &word, sizeof word);
}

// Permute the bits of 32 columns: byte i of the result holds columns i, i + 4, i + 8, ...
uint32_t by_fourths(uint32_t bits) {
    uint32_t word = 0;
    for (int k = 0; k < 8; k++) word |= ((bits >> 4 * k & 15) * 0x00204081 & 0x01010101) << k;
    return word;
}

// The same for the bits from `shift` on of each byte: one bit each of 32 bytes, or two each of 16.
template <int n_bits>
uint32_t by_fourths(const uint8_t* bytes, size_t shift) {
    uint64_t word = 0;  // eight columns at a time; the upper half holds the other four
    for (size_t j = 0; j < 4 / n_bits; j++)
        word |= (load<uint64_t>(bytes + 8 * j) >> shift & (2 * n_bits - 1) * 0x0101010101010101)
                << 2 * n_bits * j;
    return uint32_t(word | word >> (32 - n_bits));
}

// Interleave the bytes of two words.
uint64_t in_turn(uint64_t first, uint64_t second) {
    const auto apart = [](uint64_t bytes) {
        bytes = (bytes | bytes << 16) & 0x0000ffff0000ffff;
        return (bytes | bytes << 8) & 0x00ff00ff00ff00ff;
    };
    return apart(first) | apart(second) << 8;
}

// Store block `p` of row r of a tile, for blocks of 32 columns that begin with scales and high bits.
template <Layout l>
void put_plain(const uint8_t* p, size_t r, uint8_t* codes, uint8_t* more) {
    if constexpr (l.high_bytes > 0) store(more + 4 * r, by_fourths(load<uint32_t>(p + l.scale_bytes)));
    if constexpr (l.scale_bytes > 0)
        std::memcpy(more + kTileRows * l.high_bytes + l.scale_bytes * r, p, l.scale_bytes);
    for (size_t v = 0; v < l.vectors; v++)
        std::memcpy(codes + 16 * (kTileRows * v + r), p + l.scale_bytes + l.high_bytes + 16 * v, 16);
}

// The same for blocks of 256 columns (kernels/blocks.h). 32 columns have codes like a Q4_0 block.
template <Layout l>
void put_k(const uint8_t* p, size_t r, uint8_t* codes, uint8_t* more) {
    constexpr bool is_q6 = l.type == Type::Q6_K;
    const uint8_t *low = p + (is_q6 ? 0 : 16 + l.high_bytes), *high = p + (is_q6 ? 128 : 16);
    std::memcpy(more + l.scale_bytes * r, p + (is_q6 ? 208 : 0), l.scale_bytes);
    more += kTileRows * l.scale_bytes;
    uint8_t parts[kPartBytes];
    if constexpr (is_q6) {
        std::memcpy(parts, p + 192, kPartBytes);
    } else {  // interleave scales and minimums (unpack_scale_min)
        const uint32_t a = load<uint32_t>(p + 4), b = load<uint32_t>(p + 8), c = load<uint32_t>(p + 12);
        store(parts, in_turn(a & 0x3f3f3f3f, b & 0x3f3f3f3f));
        store(parts + 8, in_turn((c & 0x0f0f0f0f) | (a >> 2 & 0x30303030),
                                 (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)));
    }
    for (size_t w = 0; w < 4; w++) std::memcpy(more + 4 * (kTileRows * w + r), parts + 4 * w, 4);
    more += kTileRows * kPartBytes;
    for (size_t g = 0; g < 8; g++) {
        constexpr uint64_t kNibbles = 0x0f0f0f0f0f0f0f0f;
        const uint8_t* const nibbles = low + (is_q6 ? 64 * (g / 4) + 32 * (g % 2) : 32 * (g / 2));
        const size_t shift = 4 * (is_q6 ? g / 2 % 2 : g % 2);
        for (size_t i = 0; i < 16; i += 8) {
            const uint64_t first = load<uint64_t>(nibbles + i) >> shift & kNibbles;
            const uint64_t second = load<uint64_t>(nibbles + 16 + i) >> shift & kNibbles;
            store(codes + 16 * (kTileRows * g + r) + i, first | second << 4);
        }
        if constexpr (l.type == Type::Q5_K) store(more + 4 * (kTileRows * g + r), by_fourths<1>(high, g));
        if constexpr (is_q6)
            for (size_t half = 0; half < 2; half++)
                store(more + 4 * (kTileRows * (2 * g + half) + r),
                      by_fourths<2>(high + 32 * (g / 4) + 16 * half, 2 * (g % 4)));
    }
}

// Store one tile. next: the rows of the next tile, whose beginning is prefetched.
template <Layout l>
void put_tile(const uint8_t* const* rows, const uint8_t* const* next, int64_t cols, uint8_t* codes,
              uint8_t* more) {
    constexpr TypeFacts facts = type_facts(l.type);
    constexpr size_t kCodes = kTileRows * 16 * l.vectors * l.cols() / 32, kMore = l.more_bytes();
    constexpr size_t kBytes = l.cols() / facts.block_size * facts.block_bytes;
    constexpr size_t kBlocksAhead = (kAhead + kBytes - 1) / kBytes * kBytes;
    const size_t row_bytes = size_t(cols) / facts.block_size * facts.block_bytes;
    for (size_t at = 0; at < row_bytes; at += kBytes, codes += kCodes, more += kMore) {
        alignas(64) uint8_t own_codes[kCodes], own_more[std::max<size_t>(kMore, 1)];
        const bool is_next = at + kBlocksAhead >= row_bytes;
        const uint8_t* const* const fetched = is_next ? next : rows;
        const size_t ahead = at + kBlocksAhead - (is_next ? row_bytes : 0);
        for (size_t r = 0; r < kTileRows; r++) {
            const uint8_t* p = rows[r] + at;
            for (size_t line = 0; line < kBytes; line += 64) prefetch_line(fetched[r] + ahead + line);
            uint8_t last[kBytes];
            if (is_float(l.type) && row_bytes - at < kBytes) {  // less than a block is left
                std::fill(std::copy_n(p, row_bytes - at, last), last + kBytes, uint8_t(0));
                p = last;
            }
            if constexpr (l.is_k())
                put_k<l>(p, r, own_codes, own_more);
            else
                put_plain<l>(p, r, own_codes, own_more);
        }
        std::memcpy(codes, own_codes, kCodes);
        if constexpr (kMore > 0) std::memcpy(more, own_more, kMore);
    }
}

template <size_t... i>
constexpr auto tiles_of(std::index_sequence<i...>) {
    return std::array{&put_tile<kLayouts[i]>...};
}

constexpr auto kPutTile = tiles_of(std::make_index_sequence<std::size(kLayouts)>());

// Return the index of the type's layout; the number of layouts if no kernel decodes the type.
size_t find(Type type) {
    return size_t(std::find_if(std::begin(kLayouts), std::end(kLayouts),
                               [&](const Layout& layout) { return layout.type == type; }) -
                  std::begin(kLayouts));
}

}  // namespace

TileBytes tile_bytes(Type type, int64_t cols) {
    const size_t i = find(type);
    if (i == std::size(kLayouts)) return {};
    const Layout& layout = kLayouts[i];
    const size_t n_blocks = (size_t(cols) + 31) / 32;
    return {n_blocks * kTileRows * 16 * layout.vectors, n_blocks * 32 / layout.cols() * layout.more_bytes()};
}

void put_tiles(const TileRows& rows, size_t first, size_t last, uint8_t* codes, uint8_t* more,
               int n_threads) {
    const TileBytes bytes = tile_bytes(rows.type, rows.cols);
    const auto put = kPutTile.at(find(rows.type));
    const size_t claim = std::max<size_t>(kClaim / bytes.codes, 1);
    std::atomic<size_t> next{first};
    run_on_threads(int(std::min<size_t>(n_threads, (last - first + claim - 1) / claim)), [&] {
        for (size_t begin; (begin = next.fetch_add(claim)) < last;)
            for (size_t tile = begin; tile < std::min(begin + claim, last); tile++)
                put(&rows.places[tile * kTileRows], &rows.places[std::min(tile + 1, last - 1) * kTileRows],
                    rows.cols, codes + (tile - first) * bytes.codes, more + (tile - first) * bytes.more);
    });
}

}  // namespace hotset
