// A matrix product of one token that leaves out channels whose input is zero, from a copy of the matrix by
// channel (ChannelMatrix): to the bit what the kernels of rows give. A block's dot product is exact however
// its terms are added, a block goes into its lane as ever, and one that is all zeros changes no lane.
//
// Written once over the sixteen lanes `V`; an instruction set has three functions of its own, included
// before:
//     V load_i32(p)                                      sixteen integers
//     void add_quad<kFour, kFetch>(here, ahead, q, n_cols, first, start, sums)
//     void order_sums<kFour>(sums, dots)                 for kChannelColumns outputs
// add_quad adds to sums, in an order of its own, for all c < n_cols (a multiple of 32) the four products
// code(row i of here, c) * (byte i of q), of Q8_0 code + 128; these begin with `start` where it is the first
// quad. sums has room for whole kChannelColumns. kFetch: it fetches the same of `ahead` meanwhile. Included
// inside the namespace of an instruction set.

// Of tiles so wide four channels are fetched while four are computed: several long pieces at a time
// are what memory is quickest at. Of narrower ones a block is, so many bytes ahead (more is slower: a core
// has only so many fetches in flight).
constexpr int64_t kWideBytes = 512;
constexpr int64_t kBytesAhead = 10240;

template <bool kFour, bool kHasMin, bool kWide>
void channel_tile(const ChannelMatrix& w, const ActiveChannels& active, const Inputs& x, int64_t col0,
                  int n_cols, int first_turn, int n_turns, float* scratch, float* out) {
    constexpr int kZero = kFour ? (kHasMin ? 0 : 8) : 128;              // what codes are above their values
    constexpr int kScales = kHasMin ? 4 : 2, kCodes = kFour ? 16 : 32;  // bytes of an output in a block
    const int64_t tile = col0 / w.tile * w.tile, inside = col0 - tile, all = padded(x.k) / 32;
    const int64_t width = imin(w.cols - tile, w.tile), stride = width * kCodes / 32;
    const int64_t block_bytes = width * (kScales + kCodes), row_bytes = int64_t(n_cols) * kCodes / 32;
    const uint8_t* blocks = w.data + tile * (w.rows / 32) * (kScales + kCodes);
    const int blocks_ahead = imax(1, kBytesAhead / block_bytes), last = active.first_of[16] - 1;
    const int64_t padded_cols = (n_cols + 127) / 128 * 128;
    int32_t* sums = reinterpret_cast<int32_t*>(scratch);
    float* lanes = scratch + padded_cols;
    alignas(64) int32_t dots[kChannelColumns];
    auto scales_of = [&](int64_t block) { return blocks + block * block_bytes + inside * 2; };
    auto quad_of = [&](const ActiveChannels::Block& b, int j) {
        const uint8_t* codes = blocks + b.index * block_bytes + width * kScales + inside * kCodes / 32;
        const int32_t* channels = active.channels + 4 * (b.first_quad + j);
        ChannelQuad quad;
        for (int i = 0; i < 4; i++) quad.row[i] = codes + channels[i] * stride;
        return quad;
    };
    auto fetch_scales = [&](int64_t block, int64_t from, int64_t to) {
        for (int64_t at = from / 64 * 64; at < to; at += 64) {
            V::fetch(scales_of(block) + at);
            if constexpr (kHasMin) V::fetch(scales_of(block) + 2 * width + at);
        }
    };
    for (int turn = 0; turn < n_turns; turn++) {
        int open = __builtin_popcount(unsigned(turn));
        float* lane = lanes + open * padded_cols;
        for (int c = 0; c < n_cols; c += 16) V::zero().store(lane + c);
        const int end = active.first_of[first_turn + turn + 1];
        for (int i = active.first_of[first_turn + turn]; i < end; i++) {
            const ActiveChannels::Block& block = active.blocks[i];
            const int64_t b = block.index;
            const int32_t isum = int32_t(uint32_t(x.isum[b]) + uint32_t(x.isum[all + b]));
            const int32_t start = int32_t(-uint32_t(kZero) * uint32_t(isum));
            // Of a wide tile no more quads than there are: there a loop's end that nobody foresees is cheap.
            const int n_quads = kWide ? (block.n_channels + 3) / 4 : block.n_quads;
            if constexpr (!kWide)
                if (i + blocks_ahead <= last) {
                    const ActiveChannels::Block& next = active.blocks[i + blocks_ahead];
                    fetch_scales(next.index, 0, 2 * n_cols);
                    for (int j = 0; j < (next.n_channels + 3) / 4; j++)
                        for (const uint8_t* row : quad_of(next, j).row)
                            for (int64_t at = 0; at < row_bytes; at += 64) V::fetch(row + at);
                }
            // While a quad is computed the one after the next is fetched, beside the last the next block's
            // first and beside the scales its second: memory is never idle.
            const ActiveChannels::Block& next = active.blocks[imin(i + 1, last)];
            const ChannelQuad first_ahead = quad_of(next.n_quads ? next : block, 0);
            const ChannelQuad second_ahead = quad_of(next.n_quads ? next : block, next.n_channels > 4);
            for (int j = 0; j < n_quads; j++) {
                const ChannelQuad here = quad_of(block, j);
                const ChannelQuad ahead = j + 2 < n_quads   ? quad_of(block, j + 2)
                                          : j + 1 < n_quads ? here
                                                            : first_ahead;
                if constexpr (kWide)
                    fetch_scales(b, 2 * n_cols * j / n_quads, 2 * n_cols * (j + 1) / n_quads);
                add_quad<kFour, kWide>(here, ahead, active.quads[block.first_quad + j], n_cols, j == 0, start,
                                       sums);
            }
            const V scale = V::set(x.scale[b]), sum = V::set(x.sum[b]);
            const uint16_t* scales = reinterpret_cast<const uint16_t*>(scales_of(b));
            const uint16_t* mins = scales + width;
            for (int c = 0; c < n_cols; c += kChannelColumns) {
                if (n_quads) order_sums<kFour>(sums + c, dots);
                const int count = imin(n_cols - c, kChannelColumns);
                if constexpr (kWide)
                    for (const uint8_t* row : second_ahead.row)
                        for (int at = 0; at < kChannelColumns; at += 2048 / kCodes)
                            V::fetch(row + (c + at) * kCodes / 32);
                for (int j = 0; j < count; j += 16) {
                    V acc = V::load(lane + c + j);
                    const V dot = n_quads ? load_i32(dots + j) : V::zero();
                    acc = fma(V::load_f16(scales + c + j) * scale, dot, acc);
                    if constexpr (kHasMin) acc = fma(V::load_f16(mins + c + j), sum, acc);
                    acc.store(lane + c + j);
                }
            }
        }
        for (int done = turn; done & 1; done /= 2, open--) {  // lanes that wait for this one
            float *to = lanes + (open - 1) * padded_cols, *from = to + padded_cols;
            for (int c = 0; c < n_cols; c += 16) (V::load(to + c) + V::load(from + c)).store(to + c);
        }
    }
    for (int c = 0; c < n_cols; c += 16) V::load(lanes + c).store(out + c);
}

template <bool kFour, bool kHasMin>
void channel_linear(const ChannelMatrix& w, const ActiveChannels& active, const Inputs& x, int64_t col0,
                    int64_t n_cols, int turn, int n_turns, float* scratch, float* out) {
    const int64_t first = w.first_col + col0;
    for (int64_t c = first; c < first + n_cols;) {
        const int n = imin((c / w.tile + 1) * w.tile, first + n_cols) - int(c);
        float* its = out + (c - first);
        if (w.code_bytes(n) >= kWideBytes)
            channel_tile<kFour, kHasMin, true>(w, active, x, c, n, turn, n_turns, scratch, its);
        else
            channel_tile<kFour, kHasMin, false>(w, active, x, c, n, turn, n_turns, scratch, its);
        c += n;
    }
}

inline void add_channel_kernels(Kernels& table) {
    table.channel_linear[int(Type::Q4_0)] = channel_linear<true, false>;
    table.channel_linear[int(Type::Q4_1)] = channel_linear<true, true>;
    table.channel_linear[int(Type::Q8_0)] = channel_linear<false, false>;
}
