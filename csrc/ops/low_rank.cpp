// Adds adapters to a matrix product: out = y + (x @ a.T * scale) @ b.T, one adapter after another, for the
// sequences that have it (operations.LowRank).
//
// The first phase multiplies by the rows of a and scales, into the plan's shared memory. The second
// multiplies by the rows of b. Both use float kernels, whose order of accumulation does not depend on the
// other tokens. Each sum is rounded before the next adapter is added.
#include <algorithm>

#include "../facts.h"

namespace hotset {
namespace {

constexpr int64_t kPieceRows = 32;  // rows of a per chunk
constexpr int64_t kPanelCols = 256;
constexpr int kGroupTokens = 64;
constexpr int kMaxPieces = kMaxChunks / 4;

struct Adapter {
    int index = 0;  // column of the step's scales
    Matrix a, b;    // [rank][width of x], [width of out][rank]
    float factor = 1.0f;
};

class LowRank : public Op {
  public:
    LowRank(const Plan& plan, int x, int y, int out, std::vector<Adapter> adapters)
        : plan_(plan),
          x_(plan.buffer(x)),
          y_(plan.buffer(y)),
          out_(plan.buffer(out)),
          adapters_(std::move(adapters)) {
        int64_t rank = 0;
        for (const Adapter& adapter : adapters_) rank += adapter.a.rows;
        piece_rows_ = std::max<int64_t>(kPieceRows, ceil_div(rank, kMaxPieces - int(adapters_.size())));
        for (size_t j = 0; j < adapters_.size(); j++)
            for (int64_t first = 0; first < adapters_[j].a.rows; first += piece_rows_)
                pieces_.push_back({j, first, std::min(first + piece_rows_, adapters_[j].a.rows)});
        n_panels_ = int(std::clamp<int64_t>(out_.width / kPanelCols, 1, kMaxPieces));
        total_rank_ = rank;
    }

    int n_phases(const StepTokens&) const override { return 2; }
    int n_chunks(int phase, const StepTokens& step) const override {
        const int n = step.rows(out_);
        return n ? n_groups(phase, n) * n_parts(phase) : 0;
    }
    void run(int phase, int chunk, const StepTokens& step, Worker& worker) const override {
        const int n = step.rows(out_), parts = n_parts(phase);
        const RowRange tokens(chunk / parts, n_groups(phase, n), n);
        if (phase == 0)
            reduce(pieces_[size_t(chunk % parts)], tokens, step, worker);
        else
            expand(chunk % parts, tokens, step, worker);
    }
    Needs needs() const override {
        const int n = plan_.max_tokens();
        int64_t widest = x_.width;
        for (const Adapter& adapter : adapters_) widest = std::max(widest, adapter.a.rows);
        const int64_t reduced = int64_t(ceil_div(n, n_groups(0, n)) + 1) * piece_rows_;
        const int64_t expanded =
            int64_t(ceil_div(n, n_groups(1, n)) + 1) * (ceil_div(out_.width, n_panels_) + 1) * 2;
        return {size_t(std::max(reduced, expanded)), widest, size_t(n) * size_t(total_rank_) * sizeof(float)};
    }

  private:
    struct Piece {
        size_t adapter;
        int64_t first, last;
    };

    int n_parts(int phase) const { return phase == 0 ? int(pieces_.size()) : n_panels_; }
    int n_groups(int phase, int n) const {
        return std::min(ceil_div(n, kGroupTokens), kMaxChunks / n_parts(phase));
    }

    // Return the factor of an adapter for a row of the output; 0 if the row does not use it.
    float scale_of(const StepTokens& step, const Adapter& adapter, int row) const {
        const int token = out_.outputs ? step.outputs[row] : row;
        return step.scales[size_t(step.sequences[token]) * step.n_adapters + adapter.index];
    }
    // Call f(first, last) for adjacent rows that use the adapter.
    template <class F>
    void for_rows_of(const Adapter& adapter, const RowRange& rows, const StepTokens& step, F f) const {
        for (int r = rows.first; r < rows.last;) {
            int last = r;
            while (last < rows.last && scale_of(step, adapter, last) != 0.0f) last++;
            if (last > r) f(r, last);
            r = last + 1;
        }
    }
    // Return an adapter's results [tokens][rank], which follow the results of earlier adapters.
    float* reduced(size_t adapter) const {
        float* at = reinterpret_cast<float*>(plan_.shared());
        for (size_t j = 0; j < adapter; j++) at += plan_.max_tokens() * adapters_[j].a.rows;
        return at;
    }

    void reduce(const Piece& piece, const RowRange& tokens, const StepTokens& step, Worker& worker) const {
        const Adapter& adapter = adapters_[piece.adapter];
        const int64_t rows = piece.last - piece.first;
        float* results = worker.results.as<float>();
        const Inputs in = {step.rows(x_), x_.width, x_.row(0)};
        for_rows_of(adapter, tokens, step, [&](int first, int last) {
            float* out = results + (first - tokens.first) * rows;
            plan_.kernels().linear[int(adapter.a.type)](adapter.a, piece.first, piece.last, in, first, last,
                                                        out, rows, worker.kernel_scratch.data());
            for (int r = first; r < last; r++) {
                const float scale = scale_of(step, adapter, r) * adapter.factor;
                for (int64_t i = 0; i < rows; i++) out[(r - first) * rows + i] *= scale;
            }
        });
        if (!worker.begin_commit()) return;
        float* all = reduced(piece.adapter);
        for_rows_of(adapter, tokens, step, [&](int first, int last) {
            for (int r = first; r < last; r++)
                std::copy_n(results + (r - tokens.first) * rows, rows,
                            all + r * adapter.a.rows + piece.first);
        });
        worker.end_commit();
    }

    void expand(int panel, const RowRange& tokens, const StepTokens& step, Worker& worker) const {
        const Kernels& kernels = plan_.kernels();
        const int64_t first_col = out_.width * panel / n_panels_;
        const int64_t cols = out_.width * (panel + 1) / n_panels_ - first_col;
        float* sums = worker.results.as<float>();
        float* added = sums + tokens.count() * cols;
        for (int r = tokens.first; r < tokens.last; r++)
            std::copy_n(y_.row(r) + first_col, cols, sums + (r - tokens.first) * cols);
        for (size_t j = 0; j < adapters_.size(); j++) {
            const Matrix& b = adapters_[j].b;
            const Inputs in = {step.rows(x_), b.cols, reduced(j)};
            for_rows_of(adapters_[j], tokens, step, [&](int first, int last) {
                kernels.linear[int(b.type)](b, first_col, first_col + cols, in, first, last, added, cols,
                                            worker.kernel_scratch.data());
                float* to = sums + (first - tokens.first) * cols;
                kernels.add(to, added, (last - first) * cols, to);
            });
        }
        if (!worker.begin_commit()) return;
        for (int r = tokens.first; r < tokens.last; r++)
            std::copy_n(sums + (r - tokens.first) * cols, cols, out_.row(r) + first_col);
        worker.end_commit();
    }

    const Plan& plan_;
    const Buffer &x_, &y_, &out_;
    const std::vector<Adapter> adapters_;
    std::vector<Piece> pieces_;
    int64_t piece_rows_ = 0, total_rank_ = 0;
    int n_panels_ = 1;
};

}  // namespace

// n_adapters: columns of a step's scales. adapters: records {index, a, b, rank, factor}.
static const Registered kLowRank("low_rank", [](Facts& facts) -> std::unique_ptr<Op> {
    Plan& plan = facts.plan();
    const int x = facts.buffer("x"), y = facts.buffer("y"), out = facts.buffer("out");
    facts.same_rows(x, out);
    facts.same_shape(y, out);
    const int n_adapters = facts.integer("n_adapters", 1, kMaxPieces / 2);
    require(plan.limits().n_adapters == 0 || plan.limits().n_adapters == n_adapters,
            "all adapter operations of a plan need the same n_adapters");
    plan.limits().n_adapters = n_adapters;
    std::vector<Adapter> adapters;
    for (const std::unique_ptr<Facts>& each : facts.records("adapters")) {
        Adapter adapter;
        const int rank = each->integer("rank", 1, INT32_MAX);
        adapter.index =
            each->integer("index", adapters.empty() ? 0 : adapters.back().index + 1, n_adapters - 1);
        adapter.a = each->matrix("a", rank, facts.width(x));
        adapter.b = each->matrix("b", facts.width(out), rank);
        adapter.factor = each->real("factor");
        require(is_float(adapter.a.type) && is_float(adapter.b.type), "matrices of adapters must be floats");
        adapters.push_back(adapter);
    }
    require(!adapters.empty(), "there is no adapter");
    return std::make_unique<LowRank>(plan, x, y, out, std::move(adapters));
});

}  // namespace hotset
