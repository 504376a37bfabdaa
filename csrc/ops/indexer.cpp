// Chooses the blocks of tokens that a token attends to: operations.Indexer (model/operations.py).
//
// Index keys have a cache of their own (IndexKeys). Its KV block holds, contiguously, the keys of the blocks
// that end within its positions. A token that has at most top_k complete blocks chooses all of them without
// reading a key. The scores of few tokens are distributed over the threads by KV blocks.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <utility>

#include "../facts.h"
#include "kv_facts.h"
#include "kv_rows.h"

namespace hotset {
namespace {

constexpr int kBlocksPerPart = 8;  // KV blocks of a chunk of the scores of one token

struct IndexerFacts {
    int q = -1, k = -1, weights = -1, out = -1;  // weights: -1: ones
    int n_head = 0, size = 0;
    IndexKeys keys;
};

// Return a number that sorts like the score; NaN is the lowest, and both zeros are equal.
uint32_t sort_key(float score) {
    if (std::isnan(score)) return 0;
    const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Write the numbers of the top_k < n highest scores, rising; of equal ones the first. A straggler may read
// scores that change meanwhile; the result is then dropped.
void choose(const float* scores, int n, int top_k, float* out) {
    uint32_t lowest = 0;  // the leading bits of the sort key of the last chosen score
    int wanted = top_k;   // how many scores with these leading bits are chosen
    constexpr std::pair<int, int> kDigits[] = {{21, 11}, {10, 11}, {0, 10}};  // shift and bits
    for (const auto& [shift, bits] : kDigits) {
        std::array<int, 1 << 11> counts = {};
        const int below = shift + bits;
        for (int i = 0; i < n; i++) {
            const uint32_t key = sort_key(scores[i]);
            if (below == 32 || key >> below == lowest >> below) counts[(key >> shift) & ((1u << bits) - 1)]++;
        }
        int digit = (1 << bits) - 1;
        while (digit > 0 && counts[size_t(digit)] < wanted) wanted -= counts[size_t(digit--)];
        lowest |= uint32_t(digit) << shift;
    }
    int n_out = 0;
    for (int i = 0; i < n && n_out < top_k; i++) {
        const uint32_t key = sort_key(scores[i]);
        if (key > lowest || (key == lowest && wanted-- > 0)) out[n_out++] = float(i);
    }
    std::fill(out + n_out, out + top_k, -1.0f);
}

class Indexer : public Op {
  public:
    Indexer(const Plan& plan, IndexerFacts facts) : plan_(plan), f_(std::move(facts)) {
        top_k_ = int(plan.buffer(f_.out).width);
        most_ = (int64_t(plan.max_kv_blocks()) * kKvBlockSize / f_.size + 15) / 16 * 16;
        most_rows_ = ceil_div(plan.max_tokens(), kMaxChunks);
        ones_.assign(size_t(f_.n_head), 1.0f);
        KvLayer of_one;
        of_one.k_type = f_.keys.type, of_one.n_head_kv = 1, of_one.head_dim = f_.keys.head_dim;
        slab_ = KvRows(of_one);
        transformed_ = f_.keys.type == KvType::Q4_0 ? f_.keys.head_dim & -f_.keys.head_dim : 0;
    }

    // 0: store; 1: choose, or scores of few tokens; 2: choose from these
    int n_phases(const StepTokens& step) const override { return apart(step) ? 3 : 2; }

    int n_chunks(int phase, const StepTokens& step) const override {
        if (apart(step) && phase > 0) return phase == 1 ? step.n_tokens * n_parts(step) : step.n_tokens;
        return std::min(step.n_tokens, kMaxChunks);
    }

    void run(int phase, int chunk, const StepTokens& step, Worker& worker) const override {
        if (phase == 0) return store(chunk, step, worker);
        if (!apart(step)) return choose_all(chunk, step, worker);
        return phase == 1 ? score_part(chunk, step, worker) : choose_one(chunk, step, worker);
    }

    Needs needs() const override {
        const size_t rows = size_t(most_rows_) * top_k_ + size_t(f_.keys.head_dim);
        const size_t query = size_t(f_.n_head) * f_.keys.head_dim;
        return {rows + size_t(most_) + query, 0, size_t(most_apart()) * most_ * sizeof(float),
                slab_.slab_bytes()};
    }

  private:
    // With fewer tokens than threads, the scores of a token are distributed.
    int most_apart() const { return std::max(plan_.n_threads() - 1, 1); }
    bool apart(const StepTokens& step) const {
        return step.n_tokens <= most_apart() && !is_whole(step.n_positions - 1);
    }
    int n_parts(const StepTokens& step) const {
        const int parts = ceil_div(ceil_div(step.n_positions, kKvBlockSize), kBlocksPerPart);
        return std::clamp(parts, 1, kMaxChunks / step.n_tokens);
    }
    int n_complete(int position) const { return int((int64_t(position) + 1) / f_.size); }
    bool is_whole(int position) const { return n_complete(position) <= top_k_; }
    const int32_t* kv_blocks(const StepTokens& step, int t) const {
        return step.kv_blocks.data() + int64_t(step.sequences[t]) * step.max_kv_blocks;
    }
    // The first block that ends in a KV block or after it.
    int first_in(int kv_block) const { return int(int64_t(kv_block) * kKvBlockSize / f_.size); }

    void store(int chunk, const StepTokens& step, Worker& worker) const {
        const RowRange rows(chunk, n_chunks(0, step), step.n_tokens);
        if (!worker.begin_commit()) return;
        float* key = worker.results.as<float>();
        const KvLayer slab = slab_.slab(worker.inputs.data());
        const int bytes = bits_of(f_.keys.type) <= 8 ? 1 : bits_of(f_.keys.type) / 8;
        const int64_t n = int64_t(slab.k_slab_bytes()) / kKvBlockSize / bytes, slots = f_.keys.slots;
        for (int t = rows.first; t < rows.last; t++) {
            const int position = step.positions[t], index = position / kKvBlockSize;
            if ((position + 1) % f_.size != 0) continue;
            const int slot = n_complete(position) - 1 - first_in(index), kv_block = kv_blocks(step, t)[index];
            std::copy_n(plan_.buffer(f_.k).row(t), f_.keys.head_dim, key);
            if (transformed_) plan_.kernels().hadamard(f_.keys.head_dim, transformed_, key);
            plan_.kernels().store_key(slab, 0, 0, 0, key);
            copy_elements(n, bytes, slab.k, kKvBlockSize,
                          f_.keys.keys + kv_block * f_.keys.block_bytes() + size_t(slot) * bytes, slots);
            if (!f_.keys.scales) continue;
            uint16_t* scales = f_.keys.scales + kv_block * f_.keys.block_scales() + slot;
            for (int b = 0; b < f_.keys.head_dim / 32; b++)
                scales[b * slots] = slab.k_scale[b * kKvBlockSize];
        }
        worker.end_commit();
    }

    // Write the scores of a token's blocks that end in KV blocks [first, last). scores: of block 0 on. query:
    // scratch. Returns false if the step is being cancelled.
    bool score(const StepTokens& step, int t, int first, int last, Worker& worker, float* query,
               float* scores) const {
        const int32_t* const table = kv_blocks(step, t);
        const float* q = plan_.buffer(f_.q).row(t);
        if (transformed_) {
            const int64_t n = int64_t(f_.n_head) * f_.keys.head_dim;
            std::copy_n(q, n, query);
            plan_.kernels().hadamard(n, transformed_, query);
            q = query;
        }
        const float* weights = f_.weights < 0 ? ones_.data() : plan_.buffer(f_.weights).row(t);
        const int end = n_complete(step.positions[t]);
        for (int kv_block = first; kv_block < last; kv_block++) {
            if (worker.cancelled()) return false;
            const int from = first_in(kv_block), n = std::min(first_in(kv_block + 1), end) - from;
            if (n > 0)
                plan_.kernels().index_scores(f_.keys, table[kv_block], n, f_.n_head, q, weights,
                                             scores + from);
        }
        return true;
    }

    void choose_row(int position, const float* scores, float* out) const {
        const int n = n_complete(position);
        if (!is_whole(position)) return choose(scores, n, top_k_, out);
        for (int i = 0; i < top_k_; i++) out[i] = i < n ? float(i) : -1.0f;
    }

    void choose_all(int chunk, const StepTokens& step, Worker& worker) const {
        const RowRange rows(chunk, n_chunks(1, step), step.n_tokens);
        float* const out = worker.results.as<float>();
        float* const scores = out + int64_t(rows.count()) * top_k_;
        float* const query = scores + most_;
        for (int t = rows.first; t < rows.last; t++) {
            const int position = step.positions[t];
            if (!is_whole(position) && !score(step, t, 0, position / kKvBlockSize + 1, worker, query, scores))
                return;
            choose_row(position, scores, out + int64_t(t - rows.first) * top_k_);
        }
        if (!worker.begin_commit()) return;
        std::copy_n(out, int64_t(rows.count()) * top_k_, plan_.buffer(f_.out).row(rows.first));
        worker.end_commit();
    }

    float* scores_of(int t) const { return reinterpret_cast<float*>(plan_.shared()) + int64_t(t) * most_; }

    void score_part(int chunk, const StepTokens& step, Worker& worker) const {
        const int parts = n_parts(step), t = chunk / parts, position = step.positions[t];
        const RowRange blocks(chunk % parts, parts, position / kKvBlockSize + 1);
        float* const scores = worker.results.as<float>();
        if (is_whole(position)) return commit_nothing(worker);
        if (!score(step, t, blocks.first, blocks.last, worker, scores + most_, scores)) return;
        const int first = first_in(blocks.first),
                  last = std::min(first_in(blocks.last), n_complete(position));
        if (!worker.begin_commit()) return;
        std::copy(scores + first, scores + std::max(first, last), scores_of(t) + first);
        worker.end_commit();
    }

    static void commit_nothing(Worker& worker) {
        if (worker.begin_commit()) worker.end_commit();
    }

    void choose_one(int t, const StepTokens& step, Worker& worker) const {
        float* const out = worker.results.as<float>();
        choose_row(step.positions[t], scores_of(t), out);
        if (!worker.begin_commit()) return;
        std::copy_n(out, top_k_, plan_.buffer(f_.out).row(t));
        worker.end_commit();
    }

    const Plan& plan_;
    const IndexerFacts f_;
    int top_k_;
    int64_t most_;   // scores of a token, padded
    int most_rows_;  // tokens of a chunk
    std::vector<float> ones_;
    KvRows slab_;
    int transformed_;  // channels that are transformed together; 0: no transform
};

}  // namespace

static const Registered kIndexer("indexer", [](Facts& facts) -> std::unique_ptr<Op> {
    Plan& plan = facts.plan();
    IndexerFacts f;
    f.q = facts.buffer("q"), f.k = facts.buffer("k"), f.out = facts.buffer("out");
    f.weights = facts.buffer_or_none("weights");
    for (int id : {f.q, f.k, f.weights, f.out})
        if (id >= 0) facts.of_all_tokens(id);
    f.n_head = facts.integer("n_head", 1, INT32_MAX);
    f.size = facts.integer("size", 1, INT32_MAX);
    f.keys.type = kv_types(facts.text("kv_type"))[0];
    f.keys.head_dim = facts.integer("head_dim", 1, kMaxHeadDim);
    f.keys.slots = (ceil_div(kKvBlockSize, f.size) + 15) / 16 * 16;
    require(facts.width(f.q) == int64_t(f.n_head) * f.keys.head_dim && facts.width(f.k) == f.keys.head_dim &&
                (f.weights < 0 || facts.width(f.weights) == f.n_head),
            "heads fill the widths of q, k and weights");
    require(f.out != f.q && f.out != f.k && f.out != f.weights, "the chosen blocks overwrite no input");
    const std::span<uint8_t> keys = facts.writable_bytes("k_cache");
    const size_t n_kv_blocks = size_t(plan.limits().n_kv_blocks);
    f.keys.keys = keys.data();
    require(keys.size() == n_kv_blocks * f.keys.block_bytes(), "the size of the index keys");
    f.keys.scales =
        scales_of(facts, "k_scale", f.keys.type, f.keys.head_dim, n_kv_blocks * size_t(f.keys.slots));
    return std::make_unique<Indexer>(plan, std::move(f));
});

}  // namespace hotset
