// A matrix product for one token that skips channels whose input is zero, using an input-major copy of the
// matrix (ChannelMatrix). Its results are bitwise equal to the row kernels' results: a block's dot
// product is exact in any order, a block is added to the same lane, and a block of zeros changes no lane.
//
// Written once over the sixteen lanes `V`. An instruction set provides this function, included earlier:
//     void block_dots<kFour, kHigh>(rows, col, n_cols, start, dots)
// dots[i] receives, for outputs 16 i .. 16 i + 15 from col on, the sum of the products of codes and the
// quads' bytes. n_cols is a multiple of 32, at most kChannelColumns; lanes beyond it are undefined. An
// eight-bit code is stored as code + 128. A four-bit code has kHigh more bits above. The sum begins with
// `start`, which corrects for the codes' offset. Included inside the namespace of an instruction set.

// While some outputs of a block are computed, the same share of a later block is prefetched, about this many
// bytes ahead, four channels at a time: several long streams use the memory best.
constexpr int64_t kBytesAhead = 6144;
constexpr int64_t kMostBlocksAhead = 64;

// Outputs col0 .. col0 + n_cols of an input-major matrix, all in one tile.
template <Type kType>
class ChannelTile {
  public:
    ChannelTile(const ChannelMatrix& w, const ActiveChannels& active, const Inputs& x, int64_t col0,
                int n_cols)
        : active_(active), x_(x), n_cols_(n_cols) {
        const int64_t tile = col0 / w.tile * w.tile, inside = col0 - tile;
        width_ = imin(w.cols - tile, w.tile);
        stride_ = width_ * kFormat.channel_bytes() / 32;
        block_bytes_ = width_ * (kFormat.block_head + kFormat.channel_bytes());
        group_bytes_ = 8 * block_bytes_ + width_ * kFormat.group_head;
        data_ = w.data + tile * kFormat.output_bytes(w.rows);
        inside_ = inside;
        codes_at_ = width_ * kFormat.block_head + inside * kFormat.codes / 32;
        high_at_ = (width_ - inside) * kFormat.codes / 32 + inside / 8;
        code_lines_ = lines(n_cols * kFormat.codes / 32);
        lines_ = code_lines_ + kFormat.high_bits * lines(n_cols / 8);
        const int64_t n_blocks = imax(1, active.n_blocks);
        const int64_t bytes = n_cols * kFormat.block_head +
                              active.n_channels * n_cols * kFormat.channel_bytes() / 32 / n_blocks;
        ahead_ = int(imin(imax(1, kBytesAhead / bytes), kMostBlocksAhead));
    }

    // Add the blocks of one lane to `lane`, [n_cols].
    void add_turn(int turn, float* lane) const {
        const int last = active_.first_of[16] - 1;
        for (int i = active_.first_of[turn]; i < active_.first_of[turn + 1]; i++)
            add_block(active_.blocks[i], active_.blocks[imin(i + ahead_, last)], lane);
    }

  private:
    static constexpr ChannelFormat kFormat = channel_format(kType);
    static constexpr bool kFour = kFormat.codes == 16, kHasMin = has_min(kType),
                          kHalves = has_sub_blocks(kType);
    static constexpr bool kGrouped = kFormat.group_head > 0;
    // The offset of codes from their values.
    static constexpr int kZero = kType == Type::Q4_0 ? 8 : kType == Type::Q6_K ? 32 : kFour ? 0 : 128;

    static int lines(int64_t bytes) { return int((bytes + 63) / 64); }

    // Return the scales of a block, and of its group for types with groups.
    const uint8_t* head_of(const ActiveChannels::Block& block) const {
        if constexpr (!kGrouped) return data_ + block.index * block_bytes_;
        return group_of(block) + width_ * kFormat.group_head + block.index % 8 * block_bytes_;
    }
    const uint8_t* group_of(const ActiveChannels::Block& block) const {
        return data_ + block.index / 8 * group_bytes_;
    }
    // Prefetch a head of kBytes per output, in numbers of kSize bytes, for some columns.
    template <int kBytes, int kSize>
    void fetch_head(const uint8_t* head, int64_t c) const {
        for (int h = 0; h < kBytes / kSize; h++)
            for (int i = 0; i < kChannelColumns * kSize; i += 64)
                V::fetch(head + (h * width_ + inside_ + c) * kSize + i);
    }
    // Load numbers of a head, starting at output `at` of the tile.
    V half_floats(const uint8_t* head, int64_t at) const {
        return V::load_f16(reinterpret_cast<const uint16_t*>(head) + at);
    }
    V bytes(const uint8_t* head, int64_t at) const {
        return V::load_i8(reinterpret_cast<const int8_t*>(head) + at);
    }
    void rows_of(const ActiveChannels::Block& block, ChannelRows& rows) const {
        const uint8_t* codes = head_of(block) + codes_at_;
        const int32_t* channels = active_.channels + 4 * block.first_quad;
        rows.quads = active_.quads + block.first_quad;
        rows.n_quads = block.n_quads;
        rows.high = high_at_, rows.plane = width_ / 8;
        for (int i = 0; i < 4 * rows.n_quads; i++) rows.row[i] = codes + channels[i] * stride_;
    }
    // Return a cache line of a channel's codes or high bits.
    const uint8_t* line_of(const ChannelRows& rows, int channel, int line) const {
        const uint8_t* row = rows.row[channel];
        if constexpr (kFormat.high_bits > 0) {
            if (const int above = line - code_lines_; above >= 0) {
                const int of_plane = lines(n_cols_ / 8);
                return row + rows.high + above / of_plane * rows.plane + above % of_plane * 64;
            }
        }
        return row + 64 * line;
    }

    // The channels of one half of a block. A quad of both halves is in each, the other's bytes zero.
    struct Half {
        ChannelRows rows;
        uint32_t quads[5];

        Half(const ChannelRows& of, int n_first, bool second) {
            const int first = second ? n_first / 4 : 0, last = second ? of.n_quads : (n_first + 3) / 4;
            const uint32_t before = (uint32_t(1) << 8 * (n_first % 4)) - 1;  // first half's bits of a quad
            rows.n_quads = last - first, rows.quads = quads, rows.high = of.high, rows.plane = of.plane;
            for (int j = first; j < last; j++) {
                const uint32_t mask = j != n_first / 4 ? ~uint32_t(0) : second ? ~before : before;
                quads[j - first] = of.quads[j] & mask;
            }
            for (int i = 4 * first; i < 4 * last; i++) rows.row[i - 4 * first] = of.row[i];
        }
    };

    struct Halves {
        Half first, second;
        Halves(const ChannelRows& of, int n_first) : first(of, n_first, false), second(of, n_first, true) {}
    };
    struct NoHalves {
        NoHalves(const ChannelRows&, int) {}
    };

    void add_block(const ActiveChannels::Block& block, const ActiveChannels::Block& later,
                   float* lane) const {
        const int64_t b = block.index, all = padded(x_.k) / 32;
        const uint32_t isum[2] = {uint32_t(x_.isum[b]), uint32_t(x_.isum[all + b])};
        auto start = [](uint32_t sum) { return int32_t(-uint32_t(kZero) * sum); };
        const V scale = V::set(x_.scale[b]), sum = V::set(x_.sum[b]);
        const uint8_t *head = head_of(block), *later_head = head_of(later);
        const uint8_t *group = group_of(block), *later_group = group_of(later);
        ChannelRows here, next;
        rows_of(block, here);
        rows_of(later, next);
        const int n_steps = (n_cols_ + kChannelColumns - 1) / kChannelColumns;
        const int lines_a_step = (next.n_quads * lines_ + n_steps - 1) / n_steps;
        int quad = 0, line = 0;  // the next line to prefetch
        const std::conditional_t<kHalves, Halves, NoHalves> halves(here, block.n_first);
        for (int c = 0; c < n_cols_; c += kChannelColumns) {
            for (int n = 0; n < lines_a_step && quad < next.n_quads; n++) {
                for (int i = 0; i < 4; i++) V::fetch(line_of(next, 4 * quad + i, line));
                if (++line == lines_) quad++, line = 0;
            }
            fetch_head<kFormat.block_head, kGrouped ? 1 : 2>(later_head, c);
            if constexpr (kGrouped) fetch_head<kFormat.group_head, 2>(later_group, c);
            const int n = imin(n_cols_ - c, kChannelColumns);
            V dots[kChannelColumns / 16], others[kChannelColumns / 16];
            if constexpr (kHalves) {
                block_dots<kFour, kFormat.high_bits>(halves.first.rows, c, n, start(isum[0]), dots);
                block_dots<kFour, kFormat.high_bits>(halves.second.rows, c, n, start(isum[1]), others);
            } else {
                block_dots<kFour, kFormat.high_bits>(here, c, n, start(isum[0] + isum[1]), dots);
            }
            auto add = [&](int j) {
                const int64_t at = inside_ + c + 16 * j;
                V weight = half_floats(kGrouped ? group : head, at), product = dots[j], min = V::zero();
                if constexpr (kHalves) {  // exact, since below 2^24; adding zero removes a negative zero
                    product = fma(bytes(head, at), product, bytes(head, width_ + at) * others[j]) + V::zero();
                } else if constexpr (kGrouped) {
                    weight = weight * bytes(head, at);
                    min = half_floats(group, width_ + at) * (bytes(head, width_ + at) * V::set(-1.0f));
                } else if constexpr (kHasMin) {
                    min = half_floats(head, width_ + at);
                }
                float* to = lane + c + 16 * j;
                V acc = fma(weight * scale, product, V::load(to));
                if constexpr (kHasMin) acc = fma(min, sum, acc);
                acc.store(to);
            };
            if (n == kChannelColumns)  // an unrolled loop keeps dots in registers
                for (int j = 0; j < kChannelColumns / 16; j++) add(j);
            else
                for (int j = 0; j < n / 16; j++) add(j);
        }
    }

    const ActiveChannels& active_;
    const Inputs& x_;
    const int n_cols_;
    const uint8_t* data_;                                 // of the tile
    int64_t width_, stride_, block_bytes_, group_bytes_;  // outputs per tile; bytes
    int64_t inside_, codes_at_, high_at_;  // offsets: of the outputs in the tile, in a block, after the codes
    int code_lines_, lines_;               // cache lines per channel: codes only, and with high bits
    int ahead_;                            // blocks to prefetch ahead
};

template <Type kType>
void channel_tile(const ChannelMatrix& w, const ActiveChannels& active, const Inputs& x, int64_t col0,
                  int n_cols, int first_turn, int n_turns, float* lanes, float* out) {
    const ChannelTile<kType> tile(w, active, x, col0, n_cols);
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

template <Type kType>
void channel_linear(const ChannelMatrix& w, const ActiveChannels& active, const Inputs& x, int64_t col0,
                    int64_t n_cols, int turn, int n_turns, float* scratch, float* out) {
    const int64_t first = w.first_col + col0;
    for (int64_t c = first; c < first + n_cols;) {
        const int n = imin((c / w.tile + 1) * w.tile, first + n_cols) - int(c);
        channel_tile<kType>(w, active, x, c, n, turn, n_turns, scratch, out + (c - first));
        c += n;
    }
}

template <Type... kTypes>
void add_channel_kernels_of(Kernels& table) {
    ((table.channel_linear[int(kTypes)] = channel_linear<kTypes>), ...);
}

inline void add_channel_kernels(Kernels& table) {
    add_channel_kernels_of<Type::Q4_0, Type::Q4_1, Type::Q8_0, Type::Q4_K, Type::Q5_K, Type::Q6_K>(table);
}
