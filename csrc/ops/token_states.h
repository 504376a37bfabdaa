// Operations whose state is data of a sequence's last tokens, oldest first. A task is some tokens.
#pragma once

#include <algorithm>

#include "../plan.h"

namespace hotset {

class TokenStates : public Op {
  public:
    TokenStates(const Plan& plan, int out, StateSlots states)
        : plan_(plan), width_(plan.buffer(out).width), states_(states), out_(out) {}

    int n_phases(const StepTokens&) const final { return 1; }
    int n_chunks(int, const StepTokens& step) const final {
        return int(std::min<int64_t>(ceil_div(step.n_tokens, rows_per_chunk()), kMaxChunks));
    }
    void run(int, int chunk, const StepTokens& step, Worker& worker) const final {
        const RowRange rows(chunk, n_chunks(0, step), step.n_tokens);
        float* const results = worker.results.as<float>();
        for (int t = rows.first; t < rows.last; t++) compute(step, t, results + (t - rows.first) * width_);
        if (!worker.begin_commit()) return;
        std::copy_n(results, rows.count() * width_, plan_.buffer(out_).row(rows.first));
        for (int t = rows.first; t < rows.last; t++)
            if (step.saves[t] >= 0) save(step, t, states_.slot(step.saves[t]));
        worker.end_commit();
    }
    Needs needs() const final {
        const int64_t rows =
            std::max(rows_per_chunk(), int64_t(ceil_div(plan_.max_tokens(), kMaxChunks)) + 1);
        Needs needs;
        needs.result_floats = size_t(rows * width_);
        return needs;
    }

  protected:
    // Compute the result of token t, out [width].
    virtual void compute(const StepTokens& step, int t, float* out) const = 0;
    // Store the state after token t, within a commit: no thread writes what this reads.
    virtual void save(const StepTokens& step, int t, float* state) const = 0;

    // Return how many of the `back` tokens before token t are in the step and of the same sequence.
    static int tokens_in_step(const StepTokens& step, int t, int back) {
        const int sequence = step.sequences[t];
        int n = 0;
        while (n < back && n < t && step.sequences[t - n - 1] == sequence) n++;
        return n;
    }
    // Return the state that token t's sequence had before the step; null if it begins.
    const float* before(const StepTokens& step, int t) const {
        const int slot = step.states[step.sequences[t]];
        return slot < 0 ? nullptr : states_.slot(slot);
    }

    const Plan& plan_;
    const int64_t width_;

  private:
    static constexpr int64_t kChunkFloats = 16384;

    int64_t rows_per_chunk() const { return std::max<int64_t>(1, kChunkFloats / width_); }

    const StateSlots states_;
    const int out_;
};

}  // namespace hotset
