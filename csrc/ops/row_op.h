// Operations on single rows.
#pragma once

#include <algorithm>
#include <memory>

#include "../plan.h"

namespace hotset {

// Calls f(step, row, out) for each row of its output; a chunk is a group of rows.
template <class F>
class RowOp : public Op {
  public:
    RowOp(const Plan& plan, int out, F f, bool counts)
        : plan_(plan), out_(plan.buffer(out)), f_(std::move(f)), counts_(counts) {}

    int n_phases(const StepTokens&) const override { return 1; }
    int n_chunks(int, const StepTokens& step) const override {
        return int(std::min<int64_t>(ceil_div(step.rows(out_), rows_per_chunk()), kMaxChunks));
    }
    void run(int, int chunk, const StepTokens& step, Worker& worker) const override {
        const RowRange rows(chunk, n_chunks(0, step), step.rows(out_));
        float* results = worker.results.as<float>();
        for (int r = rows.first; r < rows.last; r++) f_(step, r, results + (r - rows.first) * out_.width);
        FfnCounts counts;
        if (counts_)
            counts.active = std::count_if(results, results + rows.count() * out_.width,
                                          [](float value) { return value != 0.0f; });
        if (!worker.begin_commit()) return;
        std::copy_n(results, rows.count() * out_.width, out_.row(rows.first));
        if (counts_) counters.add(counts, worker.index());
        worker.end_commit();
    }
    Needs needs() const override {
        const int64_t rows =
            std::max(rows_per_chunk(), int64_t(ceil_div(plan_.max_tokens(), kMaxChunks)) + 1);
        Needs needs;
        needs.result_floats = size_t(rows * out_.width);
        return needs;
    }

  private:
    static constexpr int64_t kChunkFloats = 16384;

    int64_t rows_per_chunk() const { return std::max<int64_t>(1, kChunkFloats / out_.width); }

    const Plan& plan_;
    const Buffer& out_;
    const F f_;
    const bool counts_;
};

// counts: the results are neurons; count those that are not zero.
template <class F>
std::unique_ptr<Op> make_row_op(const Plan& plan, int out, F f, bool counts = false) {
    return std::make_unique<RowOp<F>>(plan, out, std::move(f), counts);
}

}  // namespace hotset
