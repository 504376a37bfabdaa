// A matrix product of one token that leaves out channels whose input is zero, from a copy of the matrix by
// channel (ChannelMatrix): to the bit what the kernels of rows give. A block's dot product is exact however
// its terms are added, a block goes into its lane as ever, and one that is all zeros changes no lane.
//
// Written once over the sixteen lanes `V`; an instruction set has a function of its own, included before:
//     void block_dots<kFour>(rows, col, n_cols, start, dots)
// dots[i] holds, for the outputs 16 i .. 16 i + 15 from col on (n_cols of them, a multiple of 32 and at most
// kChannelColumns), the products of codes and of the quads' bytes, added up; of Q8_0 the code is code + 128.
// They begin with `start`, which takes off what codes are above their values. Beyond n_cols: anything.
// Included inside the namespace of an instruction set.

// While outputs of a block are computed, as large a share of a later block is fetched: about so many bytes
// ahead, and four channels side by side, since several long pieces at a time are what memory is quickest at.
constexpr int64_t kBytesAhead = 6144;
constexpr int64_t kMostBlocksAhead = 64;

// Outputs col0 .. col0 + n_cols of a matrix by channel, all of one tile.
template <bool kFour, bool kHasMin>
class ChannelTile {
  public:
    ChannelTile(const ChannelMatrix& w, const ActiveChannels& active, const Inputs& x, int64_t col0,
                int n_cols)
        : active_(active), x_(x), n_cols_(n_cols) {
        const int64_t tile = col0 / w.tile * w.tile, inside = col0 - tile;
        width_ = imin(w.cols - tile, w.tile);
        stride_ = width_ * kCodes / 32;
        block_bytes_ = width_ * (kScales + kCodes);
        blocks_ = w.data + tile * (w.rows / 32) * (kScales + kCodes);
        scales_at_ = inside * 2;
        codes_at_ = width_ * kScales + inside * kCodes / 32;
        row_bytes_ = n_cols * kCodes / 32;
        const int64_t n_blocks = imax(1, active.n_blocks);
        const int64_t bytes = n_cols * kScales + active.n_channels * row_bytes_ / n_blocks;
        ahead_ = int(imin(imax(1, kBytesAhead / bytes), kMostBlocksAhead));
    }

    // Adds the blocks of one lane to `lane`, [n_cols].
    void add_turn(int turn, float* lane) const {
        const int last = active_.first_of[16] - 1;
        for (int i = active_.first_of[turn]; i < active_.first_of[turn + 1]; i++)
            add_block(active_.blocks[i], active_.blocks[imin(i + ahead_, last)], lane);
    }

  private:
    static constexpr int kZero = kFour ? (kHasMin ? 0 : 8) : 128;  // what codes are above their values
    static constexpr int kScales = kHasMin ? 4 : 2,
                         kCodes = kFour ? 16 : 32;  // bytes of an output in a block

    const uint16_t* scales_of(const ActiveChannels::Block& block) const {
        return reinterpret_cast<const uint16_t*>(blocks_ + block.index * block_bytes_ + scales_at_);
    }
    void rows_of(const ActiveChannels::Block& block, ChannelRows& rows) const {
        const uint8_t* codes = blocks_ + block.index * block_bytes_ + codes_at_;
        const int32_t* channels = active_.channels + 4 * block.first_quad;
        rows.quads = active_.quads + block.first_quad;
        rows.n_quads = block.n_quads;
        for (int i = 0; i < 4 * rows.n_quads; i++) rows.row[i] = codes + channels[i] * stride_;
    }

    void add_block(const ActiveChannels::Block& block, const ActiveChannels::Block& later,
                   float* lane) const {
        const int64_t b = block.index, all = padded(x_.k) / 32;
        const int32_t isum = int32_t(uint32_t(x_.isum[b]) + uint32_t(x_.isum[all + b]));
        const int32_t start = int32_t(-uint32_t(kZero) * uint32_t(isum));
        const V scale = V::set(x_.scale[b]), sum = V::set(x_.sum[b]);
        const uint16_t *scales = scales_of(block), *later_scales = scales_of(later);
        ChannelRows here, next;
        rows_of(block, here);
        rows_of(later, next);
        const int n_steps = (n_cols_ + kChannelColumns - 1) / kChannelColumns;
        const int n_lines = (row_bytes_ + 63) / 64,
                  lines_a_step = (next.n_quads * n_lines + n_steps - 1) / n_steps;
        int quad = 0, line = 0;  // the next to fetch
        for (int c = 0; c < n_cols_; c += kChannelColumns) {
            for (int n = 0; n < lines_a_step && quad < next.n_quads; n++) {
                for (int i = 0; i < 4; i++) V::fetch(next.row[4 * quad + i] + 64 * line);
                if (++line == n_lines) quad++, line = 0;
            }
            for (int i = 0; i < kChannelColumns; i += 32) {
                V::fetch(later_scales + c + i);
                if constexpr (kHasMin) V::fetch(later_scales + width_ + c + i);
            }
            V dots[kChannelColumns / 16];
            const int n = imin(n_cols_ - c, kChannelColumns);
            block_dots<kFour>(here, c, n, start, dots);
            auto add = [&](int j) {
                float* to = lane + c + 16 * j;
                V acc = fma(V::load_f16(scales + c + 16 * j) * scale, dots[j], V::load(to));
                if constexpr (kHasMin) acc = fma(V::load_f16(scales + width_ + c + 16 * j), sum, acc);
                acc.store(to);
            };
            if (n == kChannelColumns)  // a loop that is unrolled: dots stay in registers
                for (int j = 0; j < kChannelColumns / 16; j++) add(j);
            else
                for (int j = 0; j < n / 16; j++) add(j);
        }
    }

    const ActiveChannels& active_;
    const Inputs& x_;
    const int n_cols_;
    const uint8_t* blocks_;                             // of the tile
    int64_t width_, stride_, block_bytes_, row_bytes_;  // outputs of the tile; bytes
    int64_t scales_at_, codes_at_;                      // of the outputs that are wanted, in a block
    int ahead_;                                         // blocks
};

template <bool kFour, bool kHasMin>
void channel_tile(const ChannelMatrix& w, const ActiveChannels& active, const Inputs& x, int64_t col0,
                  int n_cols, int first_turn, int n_turns, float* lanes, float* out) {
    const ChannelTile<kFour, kHasMin> tile(w, active, x, col0, n_cols);
    const int64_t padded_cols = (n_cols + 127) / 128 * 128;
    for (int turn = 0; turn < n_turns; turn++) {
        int open = __builtin_popcount(unsigned(turn));
        float* lane = lanes + open * padded_cols;
        for (int c = 0; c < n_cols; c += 16) V::zero().store(lane + c);
        tile.add_turn(first_turn + turn, lane);
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
        channel_tile<kFour, kHasMin>(w, active, x, c, n, turn, n_turns, scratch, out + (c - first));
        c += n;
    }
}

inline void add_channel_kernels(Kernels& table) {
    table.channel_linear[int(Type::Q4_0)] = channel_linear<true, false>;
    table.channel_linear[int(Type::Q4_1)] = channel_linear<true, true>;
    table.channel_linear[int(Type::Q8_0)] = channel_linear<false, false>;
}
