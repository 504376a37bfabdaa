// A matrix product of one token that leaves out channels whose input is zero, from a copy of the matrix by
// channel (ChannelMatrix): to the bit what the kernels of rows give. A block's dot product is exact however
// its terms are added, a block goes into its lane as ever, and one that is all zeros changes no lane.
//
// Written once over the sixteen lanes `V`; an instruction set has two functions of its own, included before:
//     V load_i32(p)                                     sixteen integers
//     void channel_dots<kFour>(block, ahead, n_cols, start, isum, dots)
// which sets dots[c] = start + sum of code(channel[4 j + i], c) * (byte i of quads[j]) for c < n_cols, a
// multiple of 32 and at most kChannelColumns, and fetches what `ahead` will read; isum: the sum of all bytes
// of the quads. Included inside the namespace of an instruction set.

// How far ahead is fetched. More is slower: a core has only so many fetches in flight.
constexpr int64_t kBytesAhead = 10240;

template <bool kFour, bool kHasMin>
void channel_tile(const ChannelMatrix& w, const ActiveChannels& active, const Inputs& x, int64_t col0,
                  int n_cols, float* lanes, float* out) {
    constexpr int kZero = kFour && !kHasMin ? 8 : 0;
    constexpr int kScales = kHasMin ? 4 : 2, kCodes = kFour ? 16 : 32;  // bytes of an output in a block
    const int64_t tile = col0 / w.tile * w.tile, inside = col0 - tile, all = padded(x.k) / 32;
    const int64_t width = imin(w.cols - tile, w.tile), stride = width * kCodes / 32;
    const int64_t block_bytes = width * (kScales + kCodes);
    const uint8_t* blocks = w.data + tile * (w.rows / 32) * (kScales + kCodes);
    const int blocks_ahead = imax(1, kBytesAhead / block_bytes);
    for (int c = 0; c < 16 * n_cols; c += 16) V::zero().store(lanes + c);
    alignas(64) int32_t dots[kChannelColumns];
    auto block_of = [&](int i) {
        const ActiveChannels::Block& b = active.blocks[imin(i, active.n_blocks - 1)];
        const uint8_t* codes = blocks + b.index * block_bytes + width * kScales + inside * kCodes / 32;
        return ChannelBlock{codes, stride, active.channels + 4 * b.first_quad, active.quads + b.first_quad,
                            i < active.n_blocks ? b.n_quads : 0};
    };
    for (int i = 0; i < active.n_blocks; i++) {
        ChannelBlock block = block_of(i), ahead = block_of(i + blocks_ahead);
        const int64_t b = active.blocks[i].index;
        const int32_t isum = int32_t(uint32_t(x.isum[b]) + uint32_t(x.isum[all + b]));
        const int32_t start = int32_t(-uint32_t(kZero) * uint32_t(isum));
        const V scale = V::set(x.scale[b]), sum = V::set(x.sum[b]);
        auto scales_of = [&](int64_t block) { return blocks + block * block_bytes + inside * 2; };
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(scales_of(b));
        const uint16_t* mins = scales + width;
        if (ahead.n_quads) {
            const uint8_t* its = scales_of(active.blocks[i + blocks_ahead].index);
            for (int at = 0; at < 2 * n_cols; at += 64) {
                V::fetch(its + at);
                if constexpr (kHasMin) V::fetch(its + 2 * width + at);
            }
        }
        float* lane = lanes + b % 16 * n_cols;
        for (int c = 0; c < n_cols; c += kChannelColumns) {
            const int count = imin(n_cols - c, kChannelColumns);
            channel_dots<kFour>(block, ahead, count, start, isum, dots);
            block.at += kFour ? count / 2 : count;
            ahead.at += kFour ? count / 2 : count;
            for (int j = 0; j < count; j += 16) {
                V acc = V::load(lane + c + j);
                acc = fma(V::load_f16(scales + c + j) * scale, load_i32(dots + j), acc);
                if constexpr (kHasMin) acc = fma(V::load_f16(mins + c + j), sum, acc);
                acc.store(lane + c + j);
            }
        }
    }
    for (int c = 0; c < n_cols; c += 16) {
        V lane[16];
        for (int l = 0; l < 16; l++) lane[l] = V::load(lanes + l * n_cols + c);
        for (int half = 8; half; half /= 2)
            for (int l = 0; l < half; l++) lane[l] = lane[l] + lane[l + half];
        lane[0].store(out + c);
    }
}

template <bool kFour, bool kHasMin>
void channel_linear(const ChannelMatrix& w, const ActiveChannels& active, const Inputs& x, int64_t col0,
                    int64_t n_cols, float* lanes, float* out) {
    const int64_t first = w.first_col + col0;
    for (int64_t c = first; c < first + n_cols;) {
        const int n = imin((c / w.tile + 1) * w.tile, first + n_cols) - int(c);
        channel_tile<kFour, kHasMin>(w, active, x, c, n, lanes, out + (c - first));
        c += n;
    }
}

inline void add_channel_kernels(Kernels& table) {
    table.channel_linear[int(Type::Q4_0)] = channel_linear<true, false>;
    table.channel_linear[int(Type::Q4_1)] = channel_linear<true, true>;
    table.channel_linear[int(Type::Q8_0)] = channel_linear<false, false>;
}
