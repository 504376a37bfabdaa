// A matrix product of one token that leaves out channels whose input is zero, from a copy of the matrix by
// channel (ChannelMatrix): to the bit what the kernels of rows give. A block's dot product is exact however
// its terms are added, a block goes into its lane as ever, and one that is all zeros changes no lane.
//
// Written once over the sixteen lanes `V`; an instruction set has three functions of its own, included
// before:
//     V load_i32(p)                                     sixteen integers
//     void channel_dots<kFour>(rows, ahead, quads, n_quads, at, n_cols, start, isum, dots)
// which sets dots[c] = start + sum of code(rows[4 j + i], c) * (byte i of quads[j]) for c < n_cols, a
// multiple of 32 and at most kChannelColumns; rows begin `at` bytes further on, those of `ahead` are fetched;
// isum: the sum of all bytes of the quads. Included inside the namespace of an instruction set.

template <bool kFour, bool kHasMin>
void channel_linear(const ChannelMatrix& w, const ActiveChannels& active, const Inputs& x, int64_t col0,
                    int64_t n_cols, float* lanes, float* out) {
    constexpr int kZero = kFour && !kHasMin ? 8 : 0;
    const int64_t all = padded(x.k) / 32;
    for (int64_t c = 0; c < 16 * n_cols; c += 16) V::zero().store(lanes + c);
    alignas(64) int32_t dots[kChannelColumns];
    const uint8_t* rows[2][32];  // of this block and of the next
    auto point_at = [&](int i) {
        if (i >= active.n_blocks) return;
        const ActiveChannels::Block& block = active.blocks[i];
        for (int j = 0; j < 4 * block.n_quads; j++)
            rows[i % 2][j] = w.row(active.channels[4 * block.first_quad + j]);
    };
    const int64_t first_byte = (w.first_col + col0) / 32 * (kFour ? 16 : 32);
    point_at(0);
    for (int i = 0; i < active.n_blocks; i++) {
        const ActiveChannels::Block& block = active.blocks[i];
        point_at(i + 1);
        const int64_t b = block.index;
        const int n_ahead = i + 1 < active.n_blocks ? active.blocks[i + 1].n_quads : 0;
        const int32_t isum = int32_t(uint32_t(x.isum[b]) + uint32_t(x.isum[all + b]));
        const int32_t start = int32_t(-uint32_t(kZero) * uint32_t(isum));
        const V scale = V::set(x.scale[b]), sum = V::set(x.sum[b]);
        const uint16_t* scales = w.scales + b * w.cols + w.first_col + col0;
        const uint16_t* mins = kHasMin ? w.mins + b * w.cols + w.first_col + col0 : nullptr;
        float* lane = lanes + b % 16 * n_cols;
        for (int64_t c = 0; c < n_cols; c += kChannelColumns) {
            const int count = imin(n_cols - c, kChannelColumns);
            channel_dots<kFour>(rows[i % 2], rows[(i + 1) % 2], active.quads + block.first_quad,
                                block.n_quads, n_ahead, first_byte + c / 32 * (kFour ? 16 : 32), count, start,
                                isum, dots);
            for (int j = 0; j < count; j += 16) {
                V acc = V::load(lane + c + j);
                acc = fma(V::load_f16(scales + c + j) * scale, load_i32(dots + j), acc);
                if constexpr (kHasMin) acc = fma(V::load_f16(mins + c + j), sum, acc);
                acc.store(lane + c + j);
            }
        }
    }
    for (int64_t c = 0; c < n_cols; c += 16) {
        V lane[16];
        for (int l = 0; l < 16; l++) lane[l] = V::load(lanes + l * n_cols + c);
        for (int half = 8; half; half /= 2)
            for (int l = 0; l < half; l++) lane[l] = lane[l] + lane[l + half];
        lane[0].store(out + c);
    }
}

inline void add_channel_kernels(Kernels& table) {
    table.channel_linear[int(Type::Q4_0)] = channel_linear<true, false>;
    table.channel_linear[int(Type::Q4_1)] = channel_linear<true, true>;
    table.channel_linear[int(Type::Q8_0)] = channel_linear<false, false>;
}
