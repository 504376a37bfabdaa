// The bias that all keys contain: a 4-bit cache stores keys without it, and attention adds its scores again.
//
// The bias of position p is b rotated by p, so its score with a query is a sum over pairs of channels of
// A cos(p f) + B sin(p f), where A and B depend only on the query. Few pairs are large. In place of the
// others, one mean is subtracted from all keys; its score is one number for each query.
#pragma once

#include <cmath>
#include <vector>

#include "../facts.h"

namespace hotset {

class KeyBias {
  public:
    KeyBias() = default;
    // rotated, same: [n_head_kv][head_dim], left out of each key: the first rotated to its position. Empty:
    // nothing is left out. rope: index of a RoPE of the plan; -1: keys are not rotated.
    KeyBias(const Plan& plan, std::vector<float> rotated, std::vector<float> same, int rope, int n_head_kv)
        : rotated_(std::move(rotated)),
          same_(std::move(same)),
          rope_(rope),
          heads_(same_.empty() ? 0 : n_head_kv) {
        require(rotated_.size() == same_.size(), "the bias of keys has two parts");
        if (empty()) return;
        head_dim_ = int(same_.size()) / n_head_kv;
        const int n_rot = rope < 0 ? 0 : plan.rope(rope).n_rot;
        for (int h = 0; h < n_head_kv; h++) {
            Head& head = heads_[h];
            const float* of_head = &rotated_[size_t(h) * head_dim_];
            for (int i = 0; i < n_rot / 2; i++) {
                const bool neox = plan.rope(rope).neox;
                const Pair pair = {neox ? i : 2 * i, neox ? i + n_rot / 2 : 2 * i + 1, i};
                if (of_head[pair.first] != 0 || of_head[pair.second] != 0) head.pairs.push_back(pair);
            }
            fill_tables(plan, head);
        }
    }

    bool empty() const { return same_.empty(); }
    // Floats of `row`, for any head.
    int row_floats() const {
        int most = 0;
        for (const Head& head : heads_) most = std::max(most, int(head.pairs.size()));
        return empty() ? 0 : 1 + 2 * most;
    }

    // Subtract the bias from the rotated keys of token t: heads [first, first + n_heads),
    // [n_heads][head_dim]. scratch: [head_dim].
    void subtract(const Plan& plan, const StepTokens& step, int t, int first, int n_heads, float* scratch,
                  float* keys) const {
        for (int h = 0; h < n_heads; h++, keys += head_dim_) {
            const int64_t of_head = int64_t(first + h) * head_dim_;
            for (int d = 0; d < head_dim_; d++) keys[d] -= same_[of_head + d];
            if (rope_ < 0) continue;
            const Rope& rope = plan.rope(rope_);
            const int64_t at = int64_t(t) * (rope.n_rot / 2);
            rotate_head(rope, &step.rope_cos[rope_][at], &step.rope_sin[rope_][at], head_dim_,
                        &rotated_[of_head], scratch);
            for (int d = 0; d < rope.n_rot; d++) keys[d] -= scratch[d];
        }
    }

    // Compute what BiasScores::rows needs of a query of KV head `head`: out [row_floats()].
    void row(int head, const float* q, float* out) const {
        const float *bias = &rotated_[size_t(head) * head_dim_], *same = &same_[size_t(head) * head_dim_];
        const auto& [pairs, slots, starts] = heads_[head];
        out[0] = 0.0f;
        for (int d = 0; d < head_dim_; d++) out[0] += q[d] * same[d];
        const size_t n = pairs.size();
        for (size_t i = 0; i < n; i++) {
            const auto [one, other, number] = pairs[i];
            out[1 + i] = q[one] * bias[one] + q[other] * bias[other];
            out[1 + n + i] = q[other] * bias[one] - q[one] * bias[other];
        }
    }

    // rows: a pointer per query row, to what `row` computed.
    BiasScores scores(int head, const float* const* rows) const {
        const Head& of = heads_[head];
        return {int(of.pairs.size()), of.slots.data(), of.starts.data(), rows};
    }

  private:
    struct Pair {
        int first, second, number;  // channels; number: index of its frequency
    };
    struct Head {
        std::vector<Pair> pairs;
        std::vector<float> slots, starts;  // as BiasScores has them
    };

    void fill_tables(const Plan& plan, Head& head) const {
        const size_t n = head.pairs.size();
        head.slots.resize(2 * n * kKvBlockSize);
        head.starts.resize(2 * n * plan.max_kv_blocks());
        for (size_t i = 0; i < n; i++) {
            const Rope& rope = plan.rope(rope_);
            const double frequency = rope.frequencies[head.pairs[i].number];
            for (int slot = 0; slot < kKvBlockSize; slot++) {
                head.slots[i * kKvBlockSize + slot] = float(std::cos(slot * frequency));
                head.slots[(n + i) * kKvBlockSize + slot] = float(std::sin(slot * frequency));
            }
            for (int block = 0; block < plan.max_kv_blocks(); block++) {
                const double angle = double(block) * kKvBlockSize * frequency;
                head.starts[block * 2 * n + i] = float(std::cos(angle)) * rope.magnitude;
                head.starts[block * 2 * n + n + i] = float(std::sin(angle)) * rope.magnitude;
            }
        }
    }

    std::vector<float> rotated_, same_;
    int rope_ = -1;
    int head_dim_ = 0;
    std::vector<Head> heads_;
};

}  // namespace hotset
