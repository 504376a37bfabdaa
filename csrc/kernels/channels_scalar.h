// The readable twin of channels_avx2.h, channels_avx512.h and channels_neon.h: see channel_kernels.h.
// Included inside the namespace of an instruction set.

inline V load_i32(const int32_t* p) {
    V r;
    for (int i = 0; i < 16; i++) r.v[i] = float(p[i]);
    return r;
}

template <bool kFour>
void channel_dots(const ChannelBlock& block, const ChannelBlock&, int n_cols, int32_t start, int32_t,
                  int32_t* dots) {
    for (int c = 0; c < n_cols; c++) {
        uint32_t sum = uint32_t(start);
        for (int j = 0; j < 4 * block.n_quads; j++) {
            const uint8_t* row = block.row(j);
            const int code = kFour ? (row[c / 32 * 16 + c % 16] >> c % 32 / 16 * 4) & 15 : int8_t(row[c]);
            sum += uint32_t(code * int8_t(block.quads[j / 4] >> j % 4 * 8));
        }
        dots[c] = int32_t(sum);
    }
}
