// Operations on several residual streams of a token, which are side by side: additions, and scaling. Each is
// described by the class of the same name in model/operations.py.
#include <algorithm>
#include <cmath>

#include "../facts.h"
#include "row_op.h"

namespace hotset {

static const Registered kAddStreams("add_streams", [](Facts& facts) -> std::unique_ptr<Op> {
    const Plan& plan = facts.plan();
    const int x = facts.buffer_or_none("x"), y = facts.buffer("y"), out = facts.buffer("out");
    const int weights = facts.buffer_or_none("weights");
    if (x >= 0) facts.same_shape(x, out);
    facts.same_rows(y, out);
    const int n = facts.integer("n_streams", 1, INT32_MAX), first = facts.integer("first", 0, n);
    require(facts.width(out) % n == 0, "the width must be a multiple of the streams");
    require(x >= 0 || first == 0, "streams before `first` need an x");
    const int64_t width = facts.width(out) / n;
    require(facts.width(y) % width == 0, "the width of y must be a multiple of a stream's");
    const int n_added = int(facts.width(y) / width);
    if (weights >= 0) {
        facts.same_rows(weights, out);
        require(facts.width(weights) == int64_t(n) * n_added, "each pair of streams needs a weight");
    }
    const float plus = facts.real("plus");
    const Buffer& added = plan.buffer(y);
    const Buffer *in = x < 0 ? nullptr : &plan.buffer(x), *by = weights < 0 ? nullptr : &plan.buffer(weights);
    return make_row_op(plan, out, [=, &added](const StepTokens&, int r, float* result) {
        if (in) std::copy_n(in->row(r), first * width, result);
        for (int i = first; i < n; i++) {
            float* sum = result + i * width;
            std::fill_n(sum, width, 0.0f);
            for (int j = 0; j < n_added; j++) {
                const float weight = plus + (by ? by->row(r)[i * n_added + j] : 0.0f);
                const float* stream = added.row(r) + j * width;
                for (int64_t c = 0; c < width; c++) sum[c] += weight * stream[c];
            }
            if (!in) continue;
            const float* own = in->row(r) + i * width;
            for (int64_t c = 0; c < width; c++) sum[c] += own[c];
        }
    });
});

constexpr int kMaxStreams = 16;

// Divide the rows or columns of a matrix [n][n] by their sums, depending on the two strides.
static void divide_by_sums(double* matrix, int n, int step, int between, double eps) {
    for (int i = 0; i < n; i++) {
        double sum = eps;
        for (int j = 0; j < n; j++) sum += matrix[i * step + j * between];
        for (int j = 0; j < n; j++) matrix[i * step + j * between] /= sum;
    }
}

// See operations.HyperConnection. In double, because errors grow from sum to sum.
static const Registered kHyperConnection("hyper_connection", [](Facts& facts) -> std::unique_ptr<Op> {
    const int x = facts.buffer("x"), out = facts.buffer("out");
    facts.same_shape(x, out);
    const int n = facts.integer("n_streams", 1, kMaxStreams);
    const int n_iterations = facts.integer("n_iterations", 1, 1 << 16);
    const int64_t width = facts.width(x);
    require(width == n || width == n * (n + 2), "the width does not match the streams");
    const std::vector<float> scale = facts.floats("scale", width == n ? 1 : 3),
                             base = facts.floats("base", width);
    const double eps = facts.number("eps");
    const Buffer& in = facts.plan().buffer(x);
    return make_row_op(facts.plan(), out, [=, &in](const StepTokens&, int r, float* result) {
        const float* m = in.row(r);
        auto linear = [&](int i, int part) { return double(m[i]) * double(scale[part]) + double(base[i]); };
        for (int i = 0; i < n; i++) result[i] = float(1.0 / (1.0 + std::exp(-linear(i, 0))) + eps);
        if (width == n) return;
        double mixed[kMaxStreams * kMaxStreams];
        for (int i = 0; i < n; i++) {
            double *row = mixed + i * n, sum = 0.0;
            for (int j = 0; j < n; j++) row[j] = linear((2 + i) * n + j, 2);
            const double highest = *std::max_element(row, row + n);
            for (int j = 0; j < n; j++) sum += row[j] = std::exp(row[j] - highest);
            for (int j = 0; j < n; j++) row[j] = row[j] / sum + eps;
        }
        for (int i = 0; i < n_iterations; i++) {
            if (i) divide_by_sums(mixed, n, n, 1, eps);
            divide_by_sums(mixed, n, 1, n, eps);
        }
        for (int to = 0; to < n; to++) {
            float* weights = result + n + to * (n + 1);
            weights[0] = float(2.0 / (1.0 + std::exp(-linear(n + to, 1))));
            for (int from = 0; from < n; from++) weights[1 + from] = float(mixed[from * n + to]);
        }
    });
});

// Squares of floats are exact in double; they are added in order.
static double mean_square(const float* x, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += double(x[i]) * double(x[i]);
    return sum / double(n);
}

static const Registered kMatchMagnitude("match_magnitude", [](Facts& facts) -> std::unique_ptr<Op> {
    const int x = facts.buffer("x"), like = facts.buffer("like"), out = facts.buffer("out");
    facts.same_shape(x, out);
    facts.same_rows(like, out);
    const int64_t width = facts.width(like);
    require(facts.width(x) % width == 0, "the width of x must be a multiple of like's");
    const float least = facts.real("least");
    const Buffer &in = facts.plan().buffer(x), &model = facts.plan().buffer(like);
    return make_row_op(facts.plan(), out, [=, &in, &model](const StepTokens&, int r, float* result) {
        const double wanted = std::sqrt(mean_square(model.row(r), width));
        for (int64_t at = 0; at < in.width; at += width) {
            const float* part = in.row(r) + at;
            const double found = std::sqrt(std::max(mean_square(part, width), double(least)));
            const float factor = float(wanted / found);
            for (int64_t c = 0; c < width; c++) result[at + c] = part[c] * factor;
        }
    });
});

}  // namespace hotset
