// The readable reference of channels_avx2.h, channels_avx512.h and channels_neon.h; see channel_kernels.h.
// Included inside the namespace of an instruction set.

template <bool kFour, int kHigh>
void block_dots(const ChannelRows& rows, int64_t col, int n_cols, int32_t start, V* dots) {
    for (int i = 0; i < n_cols; i++) {
        const int64_t c = col + i;
        uint32_t sum = uint32_t(start);
        for (int j = 0; j < 4 * rows.n_quads; j++) {
            const uint8_t* row = rows.row[j];
            int code = kFour ? (row[c / 32 * 16 + c % 16] >> c % 32 / 16 * 4) & 15 : row[c] ^ 128;
            if constexpr (kHigh > 0) {
                constexpr int kOfPlane = 32 / kHigh;
                const int in = int(c % 32);
                const uint8_t* bits = row + rows.high + in / kOfPlane * rows.plane + c / 32 * 4 + in % 4;
                code |= (*bits >> in % kOfPlane / 4 * kHigh & ((1 << kHigh) - 1)) << 4;
            }
            sum += uint32_t(code * int8_t(rows.quads[j / 4] >> j % 4 * 8));
        }
        dots[i / 16].v[i % 16] = float(int32_t(sum));
    }
}
