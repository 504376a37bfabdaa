// Several residual streams of a token, side by side: what is added to them, and how large they are made. Each
// is described by the class of its name in model/operations.py.
#include <algorithm>
#include <cmath>

#include "../facts.h"
#include "row_op.h"

namespace hotset {

static const Registered kAddStreams("add_streams", [](Facts& facts) -> std::unique_ptr<Op> {
    const Plan& plan = facts.plan();
    const int x = facts.buffer("x"), y = facts.buffer("y"), out = facts.buffer("out");
    const int weights = facts.buffer_or_none("weights");
    facts.same_shape(x, out);
    facts.same_rows(y, out);
    const int n = facts.integer("n_streams", 1, INT32_MAX), first = facts.integer("first", 0, n);
    require(facts.width(x) % n == 0, "streams fill the width");
    const int64_t width = facts.width(x) / n;
    require(facts.width(y) % width == 0, "what is added are streams");
    const int n_added = int(facts.width(y) / width);
    if (weights >= 0) {
        facts.same_rows(weights, out);
        require(facts.width(weights) == int64_t(n) * n_added, "each pair of streams has a weight");
    }
    const float plus = facts.real("plus");
    const Buffer &in = plan.buffer(x), &added = plan.buffer(y);
    const Buffer* by = weights < 0 ? nullptr : &plan.buffer(weights);
    return make_row_op(plan, out, [=, &in, &added](const StepTokens&, int r, float* result) {
        std::copy_n(in.row(r), first * width, result);
        for (int i = first; i < n; i++) {
            float* sum = result + i * width;
            std::fill_n(sum, width, 0.0f);
            for (int j = 0; j < n_added; j++) {
                const float weight = plus + (by ? by->row(r)[i * n_added + j] : 0.0f);
                const float* stream = added.row(r) + j * width;
                for (int64_t c = 0; c < width; c++) sum[c] += weight * stream[c];
            }
            const float* own = in.row(r) + i * width;
            for (int64_t c = 0; c < width; c++) sum[c] += own[c];
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
    require(facts.width(x) % width == 0, "parts fill the width");
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
