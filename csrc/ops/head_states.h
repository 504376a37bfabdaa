// Operations with a state matrix per head that each token changes and reads. A task: a head of a sequence.
#pragma once

#include <algorithm>
#include <cmath>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "../plan.h"

namespace hotset {

constexpr int64_t kLargeState = 1 << 18;  // floats of a layer's slot

// Store a state, past the caches if it is large: weights would evict it before the next token reads it.
inline void store_state(const float* from, int64_t n, float* to, bool is_large) {
    int64_t i = 0;
#ifdef __x86_64__
    if (is_large && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
        for (; i + 4 <= n; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
        _mm_sfence();
    }
#endif
    std::copy_n(from + i, n - i, to + i);
}

constexpr int kMaxStateHeads = 1024;

// out: values [n_head][dim_v]. A state is [n_head][dim_k][dim_v]. scratch: floats that one token needs.
struct HeadStatesFacts {
    int out = -1;
    int n_head = 0, dim_k = 0, dim_v = 0, scratch = 0;
    StateSlots states;
};

class HeadStates : public Op {
  public:
    HeadStates(const Plan& plan, HeadStatesFacts facts) : plan_(plan), h_(facts) {
        // At the ends of KV blocks, and after the last tokens.
        max_saves_ = plan.max_tokens() / kKvBlockSize + 1 + kSavedTokens;
    }

    // Returns enough phases for all tasks.
    int n_phases(const StepTokens& step) const final { return ceil_div(n_units(step), kMaxChunks); }
    int n_chunks(int phase, const StepTokens& step) const final {
        return std::min(n_units(step) - phase * kMaxChunks, kMaxChunks);
    }

    void run(int phase, int chunk, const StepTokens& step, Worker& worker) const final {
        const int unit = phase * kMaxChunks + chunk, head = unit % h_.n_head;
        const TokenTile tile = step.stretches[unit / h_.n_head];
        const int64_t size = int64_t(h_.dim_k) * h_.dim_v;
        float* const out = worker.results.as<float>();  // [tokens][dim_v]
        float* const state = out + rounded(int64_t(plan_.max_tokens()) * h_.dim_v);
        float* const saved = state + rounded(size);
        float* const scratch = saved + max_saves_ * rounded(size);
        const int slot = step.states[tile.sequence];
        if (slot < 0)
            std::fill_n(state, size, 0.0f);
        else
            std::copy_n(h_.states.slot(slot) + head * size, size, state);
        int n_saved = 0;
        for (int i = 0; i < tile.count; i++) {
            if (i % kCancelTokens == 0 && worker.cancelled()) return;
            const int t = tile.first + i;
            advance(step, t, head, state, scratch, out + int64_t(i) * h_.dim_v);
            if (step.saves[t] >= 0 && i + 1 < tile.count)
                std::copy_n(state, size, saved + n_saved++ * rounded(size));
        }
        if (!worker.begin_commit()) return;
        n_saved = 0;
        for (int i = 0; i < tile.count; i++) {
            const int t = tile.first + i;
            std::copy_n(out + int64_t(i) * h_.dim_v, h_.dim_v, plan_.buffer(h_.out).row(t) + head * h_.dim_v);
            if (step.saves[t] >= 0) {
                const float* after = i + 1 < tile.count ? saved + n_saved++ * rounded(size) : state;
                store_state(after, size, h_.states.slot(step.saves[t]) + head * size,
                            h_.states.size >= kLargeState);
            }
        }
        worker.end_commit();
    }

    Needs needs() const final {
        Needs needs;
        needs.result_floats = size_t(rounded(int64_t(plan_.max_tokens()) * h_.dim_v) +
                                     (max_saves_ + 1) * rounded(int64_t(h_.dim_k) * h_.dim_v) + h_.scratch);
        return needs;
    }

  protected:
    // For token t: update the head's state in place, and write the head's result to out [dim_v].
    virtual void advance(const StepTokens& step, int t, int head, float* state, float* scratch,
                         float* out) const = 0;

    static double softplus(double x) { return x > 20.0 ? x : std::log1p(std::exp(x)); }

    const Plan& plan_;

  private:
    static constexpr int kCancelTokens = 64;  // between two checks for cancellation

    static int64_t rounded(int64_t floats) { return (floats + 15) / 16 * 16; }

    // The tokens of a sequence are adjacent.
    int n_units(const StepTokens& step) const { return int(step.stretches.size()) * h_.n_head; }

    const HeadStatesFacts h_;
    int64_t max_saves_;
};

}  // namespace hotset
