// Attention over the KV cache: normalises and rotates the heads, stores keys and values, attends.
//
// A Q4_0 cache stores heads after a Hadamard transform, which spreads outlier channels over 32 or more
// channels. Queries are transformed like keys, and the result is transformed back.
//
// Positions are divided into splits of kSplitKvBlocks KV blocks. Each split has its own running softmax, and
// splits are merged in order. Their limits depend only on positions, so a token's sum is the same for any
// distribution of the work.
//
// Compressed blocks of tokens have keys in a cache of their own. Its KV block holds, contiguously, the keys
// of the compressed blocks that end within its positions. A split attends to them after its tokens.
//
// In a layer with chosen keys (operations.Attention.chosen) the cache is by position (KvRows), and keys and
// values are gathered into slabs. A token that leaves out no block attends as in other layers, with the same
// bits. Otherwise splits are of the list of the positions that it attends to.
#include <algorithm>

#include "../facts.h"
#include "key_bias.h"
#include "kv_facts.h"
#include "kv_rows.h"

namespace hotset {
namespace {

constexpr int kMaxGroup = 256;  // most query heads per KV head

struct AttentionFacts {
    int q = -1, k = -1, v = -1, out = -1;  // k, v: -1 if another layer has stored them
    int n_head = 0;
    KvLayer kv;
    int blocks = -1;     // buffer with keys of compressed blocks; -1: none
    int block_size = 0;  // tokens per compressed block
    KvLayer block_kv;
    int chosen = -1;      // buffer with the numbers of the blocks that a token attends to; -1: all
    int chosen_size = 1;  // tokens per such block
    float scale = 1.0f;
    float softcap = 0.0f;       // 0: none
    int window = 0;             // 0: none
    int first_seen = 0;         // the first position that has keys and values
    bool causal = true;         // if false, a token sees all tokens of its sequence, which are in one step
    bool groups_only = false;   // a token sees its group instead
    bool groups_too = false;    // a token sees its group, too
    bool groups_ahead = false;  // of it only the tokens after it
    int rope = -1;              // index of a RoPE of the plan; -1: already rotated
    Norm q_norm, k_norm;        // per head; empty weight: none
    KeyBias bias;               // of the keys, not stored; empty: nothing is left out
    std::vector<float> sinks;   // per query head: a score without a value; empty: none
    std::vector<float> slopes;  // per query head: how fast scores fall with distance (ALiBi); empty: none
};

// Return the largest power of two that divides the head.
constexpr int hadamard_width(int head_dim) {
    return head_dim & -head_dim;
}

constexpr int kSplitTokens = kSplitKvBlocks * kKvBlockSize;
constexpr int kTileRows = 24;  // query rows (tokens × heads of a group) that attend together
constexpr int kStoreTokens = 4;
constexpr int kPrefetchPieces = 128;  // pieces of the cache that a waiting thread prefetches, for few tokens
constexpr int64_t kPrefetchBytes = 512;  // bytes of a piece
static_assert(kTileRows <= kMaxGroup);

class Attention : public Op {
  public:
    Attention(const Plan& plan, AttentionFacts facts) : plan_(plan), f_(std::move(facts)) {
        group_ = f_.n_head / f_.kv.n_head_kv;
        tile_tokens_ = std::max(1, kTileRows / group_);
        stride_ = f_.kv.value_stride();
        k_block_ = f_.kv.k_type == KvType::Q4_0 ? hadamard_width(f_.kv.head_dim) : 0;
        v_block_ = f_.kv.v_type == KvType::Q4_0 ? hadamard_width(f_.kv.head_dim_v) : 0;
        bias_floats_ = f_.bias.row_floats();
        max_splits_ = ceil_div(plan.max_kv_blocks(), kSplitKvBlocks);
        if (f_.chosen >= 0) {
            rows_ = KvRows(f_.kv), block_rows_ = KvRows(f_.block_kv);
            n_chosen_ = int(plan.buffer(f_.chosen).width);
            // Most positions of a token that leaves out no block, and of a list.
            const int64_t whole = (int64_t(n_chosen_) + 1) * f_.chosen_size - 1;
            const int64_t listed = f_.blocks < 0 ? whole : int64_t(f_.window) + n_chosen_;
            const int64_t longest = int64_t(plan.max_kv_blocks()) * kKvBlockSize + n_compressed();
            max_splits_ = ceil_div(std::min(longest, std::max(whole, listed)), kSplitTokens);
        }
        max_split_units_ = 4 * plan.n_threads() + f_.kv.n_head_kv;
        most_chunk_units_ = ceil_div(int64_t(plan.max_tokens()) * f_.kv.n_head_kv, kMaxChunks);
    }

    // 0: store; 1: attend; 2: merge, if splits have chunks of their own
    int n_phases(const StepTokens& step) const override { return splits_apart(step) ? 3 : 2; }

    int n_chunks(int phase, const StepTokens& step) const override {
        if (phase == 0) return store_chunks(step) * store_parts(step);
        const int units = n_units(step);
        if (splits_apart(step)) return phase == 1 ? units * n_splits(step) : units;
        return std::min(units, kMaxChunks);
    }

    void run(int phase, int chunk, const StepTokens& step, Worker& worker) const override {
        if (phase == 0) return store(chunk, step, worker);
        if (phase == 2) return merge(chunk, step, worker);
        if (splits_apart(step)) return attend_split(chunk, step, worker);
        attend_all(chunk, step, worker);
    }

    // The keys and values of the chunk's first KV blocks. With few tokens these reads are too short for the
    // hardware prefetcher.
    bool prefetch(int phase, int chunk, int piece, const StepTokens& step) const override {
        if (phase != 1 || step.n_tokens > kPrivateInputs || piece >= kPrefetchPieces || f_.chosen >= 0 ||
            splits_apart(step))
            return false;
        const int t = tile(step, chunk / f_.kv.n_head_kv).first, head = chunk % f_.kv.n_head_kv;
        const int64_t keys = int64_t(f_.kv.k_slab_bytes()), values = int64_t(f_.kv.v_slab_bytes());
        const int64_t at = piece * kPrefetchBytes, kv_block = at / (keys + values),
                      within = at % (keys + values);
        if (kv_block > step.positions[t] / kKvBlockSize) return false;
        const int64_t number = int64_t(kv_blocks(step, t)[kv_block]) * f_.kv.n_head_kv + head;
        const uint8_t* from =
            within < keys ? f_.kv.k + number * keys + within : f_.kv.v + number * values + within - keys;
        for (int64_t i = 0; i < kPrefetchBytes; i += 64) prefetch_line(from + i);
        return true;
    }

    Needs needs() const override {
        const size_t heads =
            size_t(kStoreTokens + plan_.max_tokens() / kMaxChunks + 1) *
                (size_t(f_.n_head + f_.kv.n_head_kv) * f_.kv.head_dim + size_t(f_.n_head) * bias_floats_ +
                 (v_block_ ? size_t(f_.kv.n_head_kv) * f_.kv.head_dim_v : 0)) +
            (f_.blocks < 0 ? 0 : f_.kv.head_dim);
        const size_t rows = tile_rows();
        const size_t splits = size_t(max_splits_) * rows * (stride_ + 2) + sink_floats() +
                              chunk_floats(most_chunk_units_) + rows * stride_;
        return {std::max(heads, splits) + size_t(f_.kv.head_dim) * (rows + 2), 0,
                (query_floats() + part_rows() * (stride_ + 2) +
                 size_t(plan_.max_tokens()) * f_.n_head * bias_floats_) *
                    sizeof(float),
                f_.chosen < 0 ? 0 : std::max(rows_.slab_bytes(), block_rows_.slab_bytes())};
    }

  private:
    int tile_rows() const { return tile_tokens_ * group_; }
    // Floats for the results of `units` units, in whole cache lines.
    size_t chunk_floats(int units) const {
        return (size_t(units) * tile_rows() * f_.kv.head_dim_v + 15) / 16 * 16;
    }

    // Call f for each tile from `first` on until it returns false. A tile has up to tile_tokens_ tokens of
    // one sequence. The work per chunk must not grow with the tokens of the step.
    template <class F>
    void for_tiles(const StepTokens& step, int first, F f) const {
        int before = 0;
        for (const TokenTile& all : step.stretches) {
            const int n = ceil_div(all.count, tile_tokens_);
            for (int i = std::max(first - before, 0); i < n; i++) {
                const int at = i * tile_tokens_;
                if (!f(before + i, TokenTile{all.first + at, std::min(tile_tokens_, all.count - at),
                                             all.sequence, all.end}))
                    return;
            }
            before += n;
        }
    }
    int n_tiles(const StepTokens& step) const {
        int n = 0;
        for (const TokenTile& all : step.stretches) n += ceil_div(all.count, tile_tokens_);
        return n;
    }
    // A unit of work is one tile and one KV head, numbered by tile, then by head.
    int n_units(const StepTokens& step) const { return n_tiles(step) * f_.kv.n_head_kv; }
    TokenTile tile(const StepTokens& step, int wanted) const {
        TokenTile found;
        for_tiles(step, wanted, [&](int, TokenTile tile) { return found = tile, false; });
        return found;
    }

    // The splits of tokens up to a position, `end` - 1. Some may be empty.
    int splits_to(int end) const {
        if (f_.chosen < 0) return ceil_div(end, kSplitTokens);
        return std::min(max_splits_, ceil_div(end + n_compressed(), kSplitTokens));
    }
    // Most compressed blocks in a list.
    int64_t n_compressed() const { return f_.blocks < 0 ? 0 : n_chosen_; }
    int n_splits(const StepTokens& step) const { return splits_to(step.n_positions); }
    // With few tiles and a long context, the splits are distributed as well.
    bool splits_apart(const StepTokens& step) const {
        const int units = n_units(step), splits = n_splits(step);
        return units <= max_split_units_ && units < 8 * plan_.n_threads() && splits > 1 &&
               units * splits <= kMaxChunks;
    }

    // Chunks are groups of tokens. If there is only one group, its heads are distributed over the threads.
    int store_chunks(const StepTokens& step) const {
        return std::min(ceil_div(step.n_tokens, kStoreTokens), kMaxChunks);
    }
    int store_parts(const StepTokens& step) const {
        return store_chunks(step) == 1 ? std::min(plan_.n_threads(), f_.kv.n_head_kv) : 1;
    }

    void store(int chunk, const StepTokens& step, Worker& worker) const {
        const int parts = store_parts(step), dim = f_.kv.head_dim;
        const RowRange rows(chunk / parts, store_chunks(step), step.n_tokens),
            heads_kv(chunk % parts, parts, f_.kv.n_head_kv);
        const int first_q = heads_kv.first * group_, n_q = heads_kv.count() * group_;
        float* q = worker.results.as<float>();
        float* k = q + int64_t(rows.count()) * n_q * dim;
        float* v = k + int64_t(rows.count()) * heads_kv.count() * dim;
        const int v_width = heads_kv.count() * f_.kv.head_dim_v;
        float* bias_rows = v + (v_block_ ? int64_t(rows.count()) * v_width : 0);
        float* scratch = bias_rows + int64_t(rows.count()) * n_q * bias_floats_;  // for one head
        for (int t = rows.first; t < rows.last; t++) {
            const int i = t - rows.first;
            float* heads = q + int64_t(i) * n_q * dim;
            head_rows(step, t, plan_.buffer(f_.q).row(t) + first_q * dim, n_q, f_.q_norm, scratch, heads);
            for (int64_t d = 0; d < int64_t(n_q) * dim; d++) heads[d] *= f_.scale;
            for (int h = 0; h < (f_.bias.empty() ? 0 : n_q); h++)
                f_.bias.row(heads_kv.first + h / group_, heads + h * dim,
                            bias_rows + (int64_t(i) * n_q + h) * bias_floats_);
            if (k_block_) plan_.kernels().hadamard(int64_t(n_q) * dim, k_block_, heads);
            if (f_.k < 0) continue;
            float* keys = k + int64_t(i) * heads_kv.count() * dim;
            head_rows(step, t, plan_.buffer(f_.k).row(t) + heads_kv.first * dim, heads_kv.count(), f_.k_norm,
                      scratch, keys);
            if (!f_.bias.empty())
                f_.bias.subtract(plan_, step, t, heads_kv.first, heads_kv.count(), scratch, keys);
            if (k_block_) plan_.kernels().hadamard(int64_t(heads_kv.count()) * dim, k_block_, keys);
            if (!v_block_) continue;
            float* values = v + int64_t(i) * v_width;
            std::copy_n(plan_.buffer(f_.v).row(t) + heads_kv.first * f_.kv.head_dim_v, v_width, values);
            plan_.kernels().hadamard(v_width, v_block_, values);
        }
        if (!worker.begin_commit()) return;
        for (int t = rows.first; t < rows.last; t++) {
            const int i = t - rows.first;
            std::copy_n(q + int64_t(i) * n_q * dim, n_q * dim, query(t) + first_q * dim);
            std::copy_n(bias_rows + int64_t(i) * n_q * bias_floats_, n_q * bias_floats_,
                        bias_row(t, first_q));
            if (f_.k < 0) continue;
            const int kv_block = kv_blocks(step, t)[step.positions[t] / kKvBlockSize],
                      slot = step.positions[t] % kKvBlockSize;
            const float* values = v_block_ ? v + int64_t(i) * v_width
                                           : plan_.buffer(f_.v).row(t) + heads_kv.first * f_.kv.head_dim_v;
            for (int h = 0; h < heads_kv.count(); h++) {
                store_at(f_.kv, rows_, {kv_block, slot}, heads_kv.first + h,
                         k + (int64_t(i) * heads_kv.count() + h) * dim, values + h * f_.kv.head_dim_v,
                         worker);
                store_block(step, t, heads_kv.first + h, scratch, worker);
            }
        }
        worker.end_commit();
    }

    void store_at(const KvLayer& kv, const KvRows& rows, KvRows::Place place, int head, const float* k,
                  const float* v, Worker& worker) const {
        if (f_.chosen >= 0)
            return rows.store(plan_.kernels(), rows.slab(worker.inputs.data()), place, head, k, v);
        plan_.kernels().store_key(kv, place.kv_block, place.slot, head, k);
        plan_.kernels().store_value(kv, place.kv_block, place.slot, head, v);
    }

    // Return the number of compressed blocks that end in this KV block, before position `within` of it.
    int blocks_before(int kv_block, int within) const {
        const int64_t start = int64_t(kv_block) * kKvBlockSize;
        return int((start + within) / f_.block_size - start / f_.block_size);
    }

    // Store the key of the compressed block that ends at token t. It also serves as the value.
    void store_block(const StepTokens& step, int t, int head, float* scratch, Worker& worker) const {
        const int position = step.positions[t], index = position / kKvBlockSize, dim = f_.kv.head_dim;
        if (f_.blocks < 0 || (position + 1) % f_.block_size != 0) return;
        const int kv_block = kv_blocks(step, t)[index], slot = blocks_before(index, position % kKvBlockSize);
        const float* block = plan_.buffer(f_.blocks).row(t) + head * dim;
        if (k_block_ || v_block_) {  // equal if both are set, because the head sizes are equal
            std::copy_n(block, dim, scratch);
            plan_.kernels().hadamard(dim, std::max(k_block_, v_block_), scratch);
        }
        store_at(f_.block_kv, block_rows_, {kv_block, slot}, head, k_block_ ? scratch : block,
                 v_block_ ? scratch : block, worker);
    }

    void head_rows(const StepTokens& step, int t, const float* x, int heads, const Norm& norm, float* scratch,
                   float* out) const {
        const int dim = f_.kv.head_dim;
        for (int h = 0; h < heads; h++) {
            const float* head = x + h * dim;
            if (!norm.weight.empty()) {
                norm.apply(plan_.kernels(), head, dim, scratch);
                head = scratch;
            }
            if (f_.rope >= 0) {
                const Rope& rope = plan_.rope(f_.rope);
                const int64_t at = int64_t(t) * (rope.n_rot / 2);
                rotate_head(rope, &step.rope_cos[f_.rope][at], &step.rope_sin[f_.rope][at], dim, head,
                            out + h * dim);
            } else {
                std::copy_n(head, dim, out + h * dim);
            }
        }
    }

    // The plan's shared memory holds the queries, normalised, rotated and scaled,
    // [max_tokens][n_head][head_dim]. If splits are apart, it also holds sums [units][max_splits][tile
    // rows][stride] and states [units][max_splits][tile rows]. Last are the rows of KeyBias,
    // [max_tokens][n_head][bias_floats_].
    size_t query_floats() const { return size_t(plan_.max_tokens()) * f_.n_head * f_.kv.head_dim; }
    size_t part_rows() const { return size_t(max_split_units_) * max_splits_ * tile_rows(); }
    float* query(int t) const {
        return reinterpret_cast<float*>(plan_.shared()) + int64_t(t) * f_.n_head * f_.kv.head_dim;
    }
    float* parts() const { return reinterpret_cast<float*>(plan_.shared()) + query_floats(); }
    AttentionState* states() const {
        return reinterpret_cast<AttentionState*>(parts() + part_rows() * stride_);
    }
    float* bias_row(int t, int head) const {
        return reinterpret_cast<float*>(states() + part_rows()) +
               (int64_t(t) * f_.n_head + head) * bias_floats_;
    }
    const int32_t* kv_blocks(const StepTokens& step, int t) const {
        return step.kv_blocks.data() + int64_t(step.sequences[t]) * step.max_kv_blocks;
    }

    // The first position of a token's group and one past its last; null: attention ignores groups.
    const int32_t* group_of(const StepTokens& step, int t) const {
        const bool counts = (f_.groups_only || f_.groups_too) && !step.groups.empty();
        return counts ? step.groups.data() + 2 * int64_t(t) : nullptr;
    }

    // Whether a token at this position leaves out no block.
    bool is_whole(int position) const {
        return f_.chosen < 0 || (int64_t(position) + 1) / f_.chosen_size <= n_chosen_;
    }

    // Attend all rows of a tile and KV head within one split.
    void attend(const StepTokens& step, TokenTile tile, int head, int split, Worker& worker,
                AttentionState* states, float* out) const {
        if (is_whole(step.positions[tile.first + tile.count - 1]))
            return attend_whole(step, tile, head, split, worker, states, out);
        for (int i = 0; i < tile.count; i++, states += group_, out += group_ * stride_) {
            const TokenTile one{tile.first + i, 1, tile.sequence, tile.end};
            if (is_whole(step.positions[one.first]))
                attend_whole(step, one, head, split, worker, states, out);
            else
                attend_listed(step, one.first, head, split, worker, states, out);
        }
    }

    // Attend a token's rows within one split of the list of positions that it attends to: the chosen blocks
    // and the tokens after the last complete block or, with compressed blocks, the window and these blocks.
    void attend_listed(const StepTokens& step, int t, int head, int split, Worker& worker,
                       AttentionState* states, float* out) const {
        const float* const numbers = plan_.buffer(f_.chosen).row(t);
        const int32_t* const table = kv_blocks(step, t);
        const int end = step.positions[t] + 1, size = f_.chosen_size, n_complete = end / size;
        const int first_raw = f_.blocks < 0 ? n_complete * size
                              : f_.window   ? std::max(end - f_.window, 0)
                                            : 0;
        const int n_raw = end - first_raw, n_tokens = f_.blocks < 0 ? n_chosen_ * size + n_raw : n_raw;
        // The number of the j-th block. A straggler may read any value.
        auto block = [&](int j) {
            const float number = numbers[j];
            return number >= 0.0f && number < float(n_complete) ? int(number) : 0;
        };
        auto place = [&](int position) {
            return KvRows::Place{table[position / kKvBlockSize], position % kKvBlockSize};
        };
        auto token = [&](int j) {  // of the list
            if (f_.blocks >= 0) return place(first_raw + j);
            return place(j < n_chosen_ * size ? block(j / size) * size + j % size
                                              : first_raw + j - n_chosen_ * size);
        };
        auto compressed = [&](int j) {
            const int last = (block(j) + 1) * size - 1, index = last / kKvBlockSize;
            return KvRows::Place{table[index], blocks_before(index, last % kKvBlockSize)};
        };
        Gathered rows(*this, step, t, head, worker, states, out);
        const int n = n_tokens + int(n_compressed());
        const int last = std::min(n, (split + 1) * kSplitTokens);
        for (int j = split * kSplitTokens; j < last;) {
            const bool raw = j < n_tokens;
            const int count = std::min({kKvBlockSize, last - j, raw ? n_tokens - j : n - j});
            if (raw)
                rows.attend(rows_, count, [&](int i) { return token(j + i); });
            else
                rows.attend(block_rows_, count, [&](int i) { return compressed(j + i - n_tokens); });
            j += count;
        }
    }

    // The rows of one token and KV head, which attend to gathered keys.
    class Gathered {
      public:
        Gathered(const Attention& op, const StepTokens& step, int t, int head, Worker& worker,
                 AttentionState* states, float* out)
            : op_(op), head_(head), memory_(worker.inputs.data()), states_(states), out_(out) {
            for (int g = 0; g < op.group_; g++) {
                q_[g] = op.query(t) + int64_t(head * op.group_ + g) * op.f_.kv.head_dim;
                first_[g] = 0, at_[g] = step.positions[t];
            }
            call(op.rows_.slab(memory_), 0, false);  // initialises states and out
        }

        // place(i): where the i-th of n <= kKvBlockSize keys is.
        template <class F>
        void attend(const KvRows& rows, int n, F place) {
            const KvLayer slab = rows.slab(memory_);
            rows.gather(slab, head_, n, place);
            call(slab, n, true);
        }

      private:
        void call(const KvLayer& slab, int n, bool more) {
            const int32_t kv_block = 0;
            std::fill_n(last_, op_.group_, n);
            op_.plan_.kernels().attention(slab, 0, &kv_block, 0, n, op_.group_, op_.f_.softcap, nullptr, {},
                                          q_, first_, last_, at_, states_, out_, more);
        }

        const Attention& op_;
        const int head_;
        uint8_t* const memory_;
        AttentionState* const states_;
        float* const out_;
        const float* q_[kMaxGroup];
        int32_t first_[kMaxGroup], last_[kMaxGroup], at_[kMaxGroup];
    };

    void attend_whole(const StepTokens& step, TokenTile tile, int head, int split, Worker& worker,
                      AttentionState* states, float* out) const {
        const float *q[kMaxGroup], *bias_rows[kMaxGroup];
        float slopes[kMaxGroup];
        int32_t first[kMaxGroup], last[kMaxGroup], at[kMaxGroup];
        int end = 0, begin = INT32_MAX;
        for (int i = 0, row = 0; i < tile.count; i++)
            for (int g = 0; g < group_; g++, row++) {
                const int t = tile.first + i, position = step.positions[t];
                q[row] = query(t) + int64_t(head * group_ + g) * f_.kv.head_dim;
                if (bias_floats_) bias_rows[row] = bias_row(t, head * group_ + g);
                at[row] = position;
                if (f_.causal) {
                    first[row] = std::max(f_.first_seen, f_.window ? position + 1 - f_.window : 0);
                    last[row] = position + 1;
                } else {
                    const int reach = f_.window ? f_.window / 2 : tile.end;
                    first[row] = std::max(0, position - reach);
                    last[row] = reach < tile.end - position ? position + reach + 1 : tile.end;
                }
                if (const int32_t* group = group_of(step, t)) {
                    if (!f_.groups_ahead)
                        first[row] = f_.groups_only ? group[0] : std::min(first[row], group[0]);
                    last[row] = f_.groups_only ? group[1] : std::max(last[row], group[1]);
                }
                if (!f_.slopes.empty()) slopes[row] = f_.slopes[head * group_ + g];
                begin = std::min(begin, first[row]);
                end = std::max(end, last[row]);
            }
        begin = std::max(begin, split * kSplitTokens);
        end = std::min(end, (split + 1) * kSplitTokens);
        const BiasScores bias = f_.bias.empty() ? BiasScores{} : f_.bias.scores(head, bias_rows);
        const int n_rows = tile.count * group_;
        // Attend to slots [from, to) of the KV blocks in a table; the limits of rows count from its start.
        auto attend = [&](const KvLayer& kv, const KvRows& rows, const int32_t* table, int from, int to,
                          bool more) {
            if (f_.chosen < 0)
                return plan_.kernels().attention(
                    kv, head, table, from, to, n_rows, f_.softcap, f_.slopes.empty() ? nullptr : slopes,
                    more ? BiasScores{} : bias, q, first, last, at, states, out, more);
            const KvLayer slab = rows.slab(worker.inputs.data());
            const int32_t zero = 0;
            auto call = [&](const int32_t* firsts, const int32_t* lasts, int begin, int end, bool more) {
                plan_.kernels().attention(slab, 0, &zero, begin, end, n_rows, f_.softcap, nullptr, {}, q,
                                          firsts, lasts, at, states, out, more);
            };
            if (!more) call(first, last, 0, 0, false);
            int32_t from_slot[kMaxGroup], to_slot[kMaxGroup];
            for (int start = from / kKvBlockSize * kKvBlockSize; start < to; start += kKvBlockSize) {
                for (int row = 0; row < n_rows; row++)
                    from_slot[row] = first[row] - start, to_slot[row] = last[row] - start;
                const int end = std::min(to - start, kKvBlockSize);
                rows.gather(slab, head, end,
                            [&](int slot) { return KvRows::Place{table[start / kKvBlockSize], slot}; });
                call(from_slot, to_slot, std::max(from - start, 0), end, true);
            }
        };
        attend(f_.kv, rows_, kv_blocks(step, tile.first), begin, end, false);
        if (f_.blocks < 0) return;
        std::fill_n(first, tile.count * group_, 0);
        const int n_positions = step.positions[tile.first + tile.count - 1] + 1;
        const int end_kv_block = std::min((split + 1) * kSplitKvBlocks, ceil_div(n_positions, kKvBlockSize));
        for (int kv_block = split * kSplitKvBlocks; kv_block < end_kv_block; kv_block++) {
            const int start = kv_block * kKvBlockSize;
            for (int row = 0; row < tile.count * group_; row++)
                last[row] = blocks_before(kv_block, std::clamp(at[row] + 1 - start, 0, kKvBlockSize));
            const int n_blocks = *std::max_element(last, last + tile.count * group_);
            if (n_blocks)
                attend(f_.block_kv, block_rows_, kv_blocks(step, tile.first) + kv_block, 0, n_blocks, true);
        }
    }

    void attend_split(int chunk, const StepTokens& step, Worker& worker) const {
        const int splits = n_splits(step), unit = chunk / splits, split = chunk % splits;
        const TokenTile tile = this->tile(step, unit / f_.kv.n_head_kv);
        const int rows = tile.count * group_;
        float* out = worker.results.as<float>();
        AttentionState* states = reinterpret_cast<AttentionState*>(out + int64_t(rows) * stride_);
        attend(step, tile, unit % f_.kv.n_head_kv, split, worker, states, out);
        if (!worker.begin_commit()) return;
        const int64_t at = (int64_t(unit) * max_splits_ + split) * tile_rows();
        std::copy_n(out, int64_t(rows) * stride_, this->parts() + at * stride_);
        std::copy_n(states, rows, this->states() + at);
        worker.end_commit();
    }

    void merge(int chunk, const StepTokens& step, Worker& worker) const {
        const TokenTile tile = this->tile(step, chunk / f_.kv.n_head_kv);
        const int64_t at = int64_t(chunk) * max_splits_ * tile_rows();
        float* out = worker.results.as<float>();
        merge_rows(tile.count * group_, chunk % f_.kv.n_head_kv, n_splits(step), this->parts() + at * stride_,
                   this->states() + at, tile_rows(), out + int64_t(tile.count) * group_ * f_.kv.head_dim_v,
                   out);
        if (!worker.begin_commit()) return;
        write(tile, chunk % f_.kv.n_head_kv, out);
        worker.end_commit();
    }

    // A chunk computes one unit, or several if there are more units than chunks allowed.
    void attend_all(int chunk, const StepTokens& step, Worker& worker) const {
        const RowRange units(chunk, n_chunks(1, step), n_units(step));
        float* const out = worker.results.as<float>();  // [units][rows of the unit][head_dim_v]
        float* scratch = out + chunk_floats(units.count());
        float* unit_out = out;
        const bool done = for_units(step, units, [&](TokenTile tile, int head) {
            if (!attend_unit(step, tile, head, worker, scratch, unit_out)) return false;
            unit_out += int64_t(tile.count) * group_ * f_.kv.head_dim_v;
            return true;
        });
        if (!done || !worker.begin_commit()) return;
        unit_out = out;
        for_units(step, units, [&](TokenTile tile, int head) {
            write(tile, head, unit_out);
            unit_out += int64_t(tile.count) * group_ * f_.kv.head_dim_v;
            return true;
        });
        worker.end_commit();
    }

    // Call f for each unit until it returns false. Returns whether all calls returned true.
    template <class F>
    bool for_units(const StepTokens& step, RowRange units, F f) const {
        const int heads = f_.kv.n_head_kv;
        bool done = true;
        for_tiles(step, units.first / heads, [&](int index, TokenTile tile) {
            for (int unit = std::max(units.first, index * heads);
                 done && unit < std::min(units.last, (index + 1) * heads); unit++)
                done = f(tile, unit % heads);
            return done && (index + 1) * heads < units.last;
        });
        return done;
    }

    // Return false if the step is being cancelled; `out` is then undefined.
    bool attend_unit(const StepTokens& step, TokenTile tile, int head, Worker& worker, float* scratch,
                     float* out) const {
        const int rows = tile.count * group_;
        int last = f_.causal ? 0 : tile.end;
        for (int i = 0; i < tile.count; i++) {
            const int t = tile.first + i;
            const int32_t* group = group_of(step, t);
            last = std::max({last, step.positions[t] + 1, group ? group[1] : 0});
        }
        const int splits = splits_to(last);
        float* parts = scratch;
        AttentionState* states = reinterpret_cast<AttentionState*>(parts + int64_t(splits) * rows * stride_);
        for (int split = 0; split < splits; split++) {
            if (worker.cancelled()) return false;
            attend(step, tile, head, split, worker, states + split * rows,
                   parts + int64_t(split) * rows * stride_);
        }
        merge_rows(rows, head, splits, parts, states, rows, reinterpret_cast<float*>(states + splits * rows),
                   out);
        return true;
    }

    // out: [rows][head_dim_v]. parts: [n_splits][row_stride][stride_]. states: [n_splits][row_stride]. A sink
    // counts as one more split whose values are zeros.
    void merge_rows(int rows, int head, int splits, const float* parts, const AttentionState* states,
                    int row_stride, float* scratch, float* out) const {
        const int dim = f_.kv.head_dim_v;
        AttentionState* row_states = reinterpret_cast<AttentionState*>(scratch);
        float* own = scratch + 2 * (max_splits_ + 1);
        const int with_sink = f_.sinks.empty() ? splits : splits + 1;
        if (!f_.sinks.empty()) std::fill_n(own + int64_t(splits) * stride_, stride_, 0.0f);
        for (int row = 0; row < rows; row++) {
            for (int s = 0; s < splits; s++) row_states[s] = states[s * row_stride + row];
            const float* of_row = parts + int64_t(row) * stride_;
            int64_t apart = int64_t(row_stride) * stride_;
            if (!f_.sinks.empty()) {
                row_states[splits] = {f_.sinks[head * group_ + row % group_], 1.0f};
                for (int s = 0; s < splits; s++) std::copy_n(of_row + s * apart, stride_, own + s * stride_);
                of_row = own;
                apart = stride_;
            }
            plan_.kernels().merge_attention(with_sink, row_states, of_row, apart, dim, out + row * dim);
        }
        if (v_block_) plan_.kernels().hadamard(int64_t(rows) * dim, v_block_, out);
    }
    // Scratch floats for merge_rows.
    size_t sink_floats() const {
        return 2 * size_t(max_splits_ + 1) + (f_.sinks.empty() ? 0 : size_t(max_splits_ + 1) * stride_);
    }

    // Copy a unit's rows out, within a commit.
    void write(TokenTile tile, int head, const float* rows) const {
        const Buffer& target = plan_.buffer(f_.out);
        const int dim = f_.kv.head_dim_v;
        for (int row = 0; row < tile.count * group_; row++)
            std::copy_n(rows + row * dim, dim,
                        target.row(tile.first + row / group_) + (head * group_ + row % group_) * dim);
    }

    const Plan& plan_;
    const AttentionFacts f_;
    KvRows rows_, block_rows_;  // with chosen keys
    int n_chosen_ = 0;          // most blocks that a token attends to
    int group_;                 // query heads per KV head
    int tile_tokens_;
    int stride_;
    int k_block_, v_block_;  // channels that are transformed together; 0: no transform
    int bias_floats_;        // of a query's row of KeyBias; 0: no bias
    int max_splits_;
    int max_split_units_;
    int most_chunk_units_;  // most units of one chunk
};

// Return the cache whose facts begin with `prefix`.
KvLayer cache_of(Facts& facts, const std::string& prefix, int n_head_kv, int head_dim, int head_dim_v) {
    const auto [k_type, v_type] = kv_types(facts.text("kv_type"));
    const std::span<uint8_t> k = facts.writable_bytes((prefix + "k_cache").c_str()),
                             v = facts.writable_bytes((prefix + "v_cache").c_str());
    const int n_kv_blocks = facts.plan().limits().n_kv_blocks;
    const size_t places = size_t(n_kv_blocks) * n_head_kv * kKvBlockSize;
    const KvLayer kv = {k_type,
                        v_type,
                        n_head_kv,
                        head_dim,
                        head_dim_v,
                        k.data(),
                        v.data(),
                        scales_of(facts, prefix + "k_scale", k_type, head_dim, places),
                        scales_of(facts, prefix + "v_scale", v_type, head_dim_v, places)};
    require(k.size() == n_kv_blocks * kv.k_block_bytes() && v.size() == n_kv_blocks * kv.v_block_bytes(),
            "the size of the cache does not match its KV blocks");
    return kv;
}

}  // namespace

static const Registered kAttention("attention", [](Facts& facts) -> std::unique_ptr<Op> {
    Plan& plan = facts.plan();
    AttentionFacts f;
    f.q = facts.buffer("q"), f.out = facts.buffer("out");
    f.k = facts.buffer_or_none("k"), f.v = facts.buffer_or_none("v");
    require((f.k < 0) == (f.v < 0), "keys and values must be stored together");
    for (int id : {f.q, f.k, f.v, f.out})
        if (id >= 0) facts.of_all_tokens(id);
    f.n_head = facts.integer("n_head", 1, INT32_MAX);
    const int n_head_kv = facts.integer("n_head_kv", 1, f.n_head);
    require(f.n_head % n_head_kv == 0 && f.n_head / n_head_kv <= kMaxGroup,
            "the number of query heads must be a multiple of the KV heads");
    const int head_dim = facts.integer("head_dim", 1, kMaxHeadDim);
    const int head_dim_v = facts.integer("head_dim_v", 1, kMaxHeadDim);
    require(facts.width(f.q) == int64_t(f.n_head) * head_dim &&
                (f.k < 0 || (facts.width(f.k) == int64_t(n_head_kv) * head_dim &&
                             facts.width(f.v) == int64_t(n_head_kv) * head_dim_v)) &&
                facts.width(f.out) == int64_t(f.n_head) * head_dim_v,
            "heads fill the widths of q, k, v and out");
    f.scale = facts.real("scale");
    f.softcap = facts.real("softcap");
    f.window = facts.integer("window", 0, INT32_MAX);
    if (facts.has("first_seen")) f.first_seen = facts.integer("first_seen", 0, INT32_MAX);
    f.causal = facts.flag("causal", true);
    const std::string groups = facts.has("groups") ? facts.text("groups") : "none";
    f.groups_only = groups == "only", f.groups_ahead = groups == "ahead";
    f.groups_too = groups == "also" || f.groups_ahead;
    require(groups == "none" || f.groups_only || f.groups_too, "groups are none, only, also or ahead");
    require(!f.groups_only || !f.causal, "attention to the own group alone is not causal");
    plan.limits().needs_groups |= f.groups_only;
    f.rope = facts.has("rope") ? facts.rope("rope") : -1;
    require(f.rope < 0 || plan.rope(f.rope).n_rot <= head_dim, "the RoPE has more channels than a head");
    f.q_norm = facts.norm("q_norm", head_dim);
    f.k_norm = facts.norm("k_norm", head_dim);
    require(!f.q_norm.layer && !f.k_norm.layer, "head norms must be RMS norms");
    const int bias_rope = facts.has("bias_rope") ? facts.rope("bias_rope") : -1;
    require(bias_rope < 0 || (plan.rope(bias_rope).n_rot <= head_dim && plan.rope(bias_rope).every == 1),
            "the RoPE of the bias of keys must turn each position");
    const int64_t n_bias = int64_t(n_head_kv) * head_dim;
    f.bias = KeyBias(plan, facts.floats_or_none("rotated_bias", n_bias),
                     facts.floats_or_none("same_bias", n_bias), bias_rope, n_head_kv);
    f.sinks = facts.floats_or_none("sinks", f.n_head);
    f.slopes = facts.floats_or_none("slopes", f.n_head);
    f.kv = cache_of(facts, "", n_head_kv, head_dim, head_dim_v);
    f.blocks = facts.buffer_or_none("blocks");
    f.block_size = facts.integer("block_size", 0, INT32_MAX);
    if (f.blocks >= 0) {
        facts.of_all_tokens(f.blocks);
        require(f.block_size > 0 && f.causal && f.k >= 0 && f.slopes.empty() && head_dim == head_dim_v &&
                    facts.width(f.blocks) == int64_t(n_head_kv) * head_dim,
                "compressed blocks must be as wide as keys and values, which the layer itself stores");
        f.block_kv = cache_of(facts, "block_", n_head_kv, head_dim, head_dim_v);
    }
    f.chosen = facts.buffer_or_none("chosen");
    if (facts.has("chosen_size")) f.chosen_size = facts.integer("chosen_size", 1, INT32_MAX);
    if (f.chosen >= 0) {
        facts.of_all_tokens(f.chosen);
        require(f.causal && f.k >= 0 && f.slopes.empty() && f.bias.empty() && f.first_seen == 0 &&
                    !f.groups_only && !f.groups_too &&
                    (f.blocks < 0 ? f.window == 0 : f.chosen_size == f.block_size),
                "chosen keys must be the layer's own, without a window, slopes or a bias");
    }
    return std::make_unique<Attention>(plan, std::move(f));
});

}  // namespace hotset
