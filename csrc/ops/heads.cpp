// Multiplies x by an input-major matrix per head: the keys that heads derive from one latent vector.
//
// Each output is summed over the inputs in order, for any number of tokens. A chunk is one head. One token
// reads the rows in place; several tokens share a tile of decoded rows.
#include <algorithm>
#include <numeric>

#include "../facts.h"

namespace hotset {
namespace {

constexpr int64_t kTileRows = 64;

class TransposedHeads : public Op {
  public:
    TransposedHeads(const Plan& plan, int x, std::vector<Matrix> weights, int out)
        : plan_(plan), x_(plan.buffer(x)), weights_(std::move(weights)), out_(plan.buffer(out)) {}

    int n_phases(const StepTokens&) const override { return 1; }
    int n_chunks(int, const StepTokens& step) const override {
        return step.rows(x_) ? int(weights_.size()) : 0;
    }

    void run(int, int chunk, const StepTokens& step, Worker& worker) const override {
        const Matrix& weight = weights_[chunk];
        const int n = step.rows(x_);
        float* sums = worker.results.as<float>();  // [n][cols], then row indices and a tile
        int32_t* rows = reinterpret_cast<int32_t*>(sums + n * weight.cols);
        float* tile = reinterpret_cast<float*>(rows + kTileRows);
        std::iota(rows, rows + kTileRows, 0);
        std::fill_n(sums, n * weight.cols, 0.0f);
        for (int64_t first = 0; first < weight.rows; first += kTileRows) {
            if (worker.cancelled()) return;
            add_rows(weight, first, std::min(kTileRows, weight.rows - first), n, rows, tile, sums);
        }
        if (!worker.begin_commit()) return;
        for (int t = 0; t < n; t++)
            std::copy_n(sums + t * weight.cols, weight.cols, out_.row(t) + chunk * weight.cols);
        worker.end_commit();
    }

    bool prefetch(int, int chunk, int piece, const StepTokens&) const override {
        prefetch_line(weights_[chunk].data + piece * 64);
        return piece < 64 && (piece + 1) * 64 < weights_[chunk].rows * int64_t(weights_[chunk].row_bytes);
    }

    Needs needs() const override {
        const size_t cols = size_t(weights_[0].cols);
        return {plan_.max_tokens() * cols + kTileRows * (cols + 1), 0, 0};
    }

  private:
    // Add the products of `count` inputs, starting at `first`, to the sums of n tokens. rows: 0, 1, 2, ...
    void add_rows(const Matrix& weight, int64_t first, int64_t count, int n, const int32_t* rows, float* tile,
                  float* sums) const {
        const Kernels& kernels = plan_.kernels();
        if (n == 1) {
            const Matrix part = {weight.type, weight.row(first), count, weight.cols, weight.row_bytes};
            kernels.axpy[int(weight.type)](part, rows, x_.row(0) + first, int(count), 0, weight.cols, sums);
            return;
        }
        for (int64_t r = 0; r < count; r++)
            kernels.decode[int(weight.type)](weight, first + r, 0, weight.cols, tile + r * weight.cols);
        for (int t = 0; t < n; t++)
            kernels.tile_axpy(tile, rows, x_.row(t) + first, int(count), weight.cols, sums + t * weight.cols);
    }

    const Plan& plan_;
    const Buffer& x_;
    const std::vector<Matrix> weights_;
    const Buffer& out_;
};

}  // namespace

// weight: the matrices of all heads one after another, with a row per input.
static const Registered kTransposedHeads("transposed_heads", [](Facts& facts) -> std::unique_ptr<Op> {
    const int x = facts.buffer("x"), out = facts.buffer("out");
    facts.same_rows(x, out);
    const int n_head = facts.integer("n_head", 1, kMaxChunks);
    const int64_t width = facts.width(x);
    require(facts.width(out) % n_head == 0, "the width must be a multiple of the heads");
    const Matrix all = facts.matrix("weight", width * n_head, facts.width(out) / n_head);
    std::vector<Matrix> weights;
    weights.reserve(size_t(n_head));
    for (int h = 0; h < n_head; h++)
        weights.push_back({all.type, all.row(h * width), width, all.cols, all.row_bytes, nullptr});
    return std::make_unique<TransposedHeads>(facts.plan(), x, std::move(weights), out);
});

}  // namespace hotset
