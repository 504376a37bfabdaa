// A predictor of one bit per weight: how many signs of the input agree with those of each row.
#include <algorithm>

#include "../facts.h"
#include "linear_input.h"

namespace hotset {
namespace {

constexpr int64_t kChunkBytes = 48 * 1024;

class SignScores : public Op {
  public:
    SignScores(const Plan& plan, int x, const uint8_t* rows, std::vector<float> bias, int out)
        : plan_(plan), x_(plan.buffer(x)), rows_(rows), bias_(std::move(bias)), out_(plan.buffer(out)) {}

    int n_phases(const StepTokens&) const override { return 1; }
    int n_chunks(int, const StepTokens& step) const override { return step.rows(x_) ? chunks_of_rows() : 0; }
    void run(int, int chunk, const StepTokens& step, Worker& worker) const override {
        const RowRange range(chunk, n_chunks(0, step), int(out_.width));
        const Kernels& kernels = plan_.kernels();
        const int n = step.rows(x_), count = range.count();
        float* results = worker.results.as<float>();
        uint64_t* signs = worker.kernel_scratch.as<uint64_t>();
        for (int t = 0; t < n; t++) {
            kernels.negative_bits(x_.row(t), x_.width, signs);
            kernels.sign_scores(rows_ + range.first * row_bytes(), count, reinterpret_cast<uint8_t*>(signs),
                                x_.width, results + int64_t(t) * count);
        }
        add_bias(kernels, bias_, range.first, n, count, results);
        if (!worker.begin_commit()) return;
        for (int t = 0; t < n; t++)
            std::copy_n(results + int64_t(t) * count, count, out_.row(t) + range.first);
        worker.end_commit();
    }
    bool prefetch(int, int chunk, int piece, const StepTokens& step) const override {
        const RowRange range(chunk, n_chunks(0, step), int(out_.width));
        prefetch_line(rows_ + range.first * row_bytes() + piece * 64);
        return piece < 128;
    }
    Needs needs() const override {
        const int chunks = chunks_of_rows();
        return {size_t(plan_.max_tokens()) * (out_.width / chunks + 1), x_.width, 0};
    }

  private:
    int64_t row_bytes() const { return (x_.width + 7) / 8; }
    int chunks_of_rows() const {
        return int(std::clamp<int64_t>(out_.width * row_bytes() / kChunkBytes, 1, 64));
    }

    const Plan& plan_;
    const Buffer& x_;
    const uint8_t* rows_;
    const std::vector<float> bias_;
    const Buffer& out_;
};

}  // namespace

static const Registered kSignScores("sign_scores", [](Facts& facts) -> std::unique_ptr<Op> {
    const int x = facts.buffer("x"), out = facts.buffer("out");
    facts.same_rows(x, out);
    const std::span<const uint8_t> rows = facts.tensor("weight").data;
    require(int64_t(rows.size()) == facts.width(out) * ((facts.width(x) + 7) / 8),
            "signs are a bit per channel and row");
    return std::make_unique<SignScores>(facts.plan(), x, rows.data(),
                                        facts.floats_or_none("bias", facts.width(out)), out);
});

}  // namespace hotset
