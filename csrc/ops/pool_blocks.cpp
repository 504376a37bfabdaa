// Computes the mean over a compressed block's tokens, per channel, weighted by the softmax of their scores.
#include <algorithm>
#include <cmath>

#include "../facts.h"
#include "head_states.h"

namespace hotset {
namespace {

constexpr int kBlockChannels = 64;  // most channels of a task

// See operations.PoolBlocks (model/operations.py). A task has dim_v channels. For each of n_head tasks the
// state has the rows highest, total and sums of the token's block and, if blocks overlap, of the next one.
struct PoolFacts {
    int x = -1, scores = -1, out = -1;
    int size = 0, n_head = 0, dim_v = 0;
    bool overlaps = false;
    std::vector<float> bias;  // [size][width of x]; empty without scores
    StateSlots states;
};

class PoolBlocks : public HeadStates {
  public:
    PoolBlocks(const Plan& plan, PoolFacts facts)
        : HeadStates(plan, {facts.out, facts.n_head, facts.overlaps ? 6 : 3, facts.dim_v, 2 * facts.dim_v,
                            facts.states}),
          f_(std::move(facts)),
          width_(int64_t(f_.n_head) * f_.dim_v) {}

  private:
    void advance(const StepTokens& step, int t, int head, float* state, float* scratch,
                 float* out) const override {
        const int within = step.positions[t] % f_.size, dim = f_.dim_v;
        float* const next = state + 3 * dim;
        if (within == 0 && f_.overlaps) std::copy_n(next, 3 * dim, state);
        if (within == 0) std::fill_n(f_.overlaps ? next : state, 3 * dim, 0.0f);
        const int64_t at = int64_t(head) * dim, own = f_.overlaps ? width_ + at : at;
        take(t, within, own, state, scratch);
        if (f_.overlaps) take(t, within, at, next, scratch);
        for (int c = 0; c < dim; c++) out[c] = state[2 * dim + c] / state[dim + c];
    }

    // Add a token's channels, starting at `at`, to a block, with their scores.
    void take(int t, int within, int64_t at, float* block, float* scratch) const {
        const int dim = f_.dim_v;
        const float* x = plan_.buffer(f_.x).row(t) + at;
        const float* scores = f_.scores < 0 ? nullptr : plan_.buffer(f_.scores).row(t) + at;
        const float* bias = f_.scores < 0 ? nullptr : f_.bias.data() + within * plan_.buffer(f_.x).width + at;
        float *highest = block, *total = block + dim, *sums = block + 2 * dim;
        float *kept = scratch, *own = scratch + dim;
        for (int c = 0; c < dim; c++) {
            const float score = scores ? scores[c] + bias[c] : 0.0f;
            const float higher = total[c] > 0.0f && highest[c] > score ? highest[c] : score;
            kept[c] = total[c] > 0.0f ? highest[c] - higher : 0.0f;  // multiplied by a total of zero
            own[c] = score - higher;
            highest[c] = higher;
        }
        plan_.kernels().activate(Activation::Exp, 0.0f, scratch, 2 * dim, scratch);
        for (int c = 0; c < dim; c++) {
            total[c] = total[c] * kept[c] + own[c];
            sums[c] = sums[c] * kept[c] + x[c] * own[c];
        }
    }

    const PoolFacts f_;
    const int64_t width_;
};

}  // namespace

static const Registered kPoolBlocks("pool_blocks", [](Facts& facts) -> std::unique_ptr<Op> {
    PoolFacts f;
    f.x = facts.buffer("x"), f.scores = facts.buffer_or_none("scores"), f.out = facts.buffer("out");
    for (int id : {f.x, f.scores, f.out})
        if (id >= 0) facts.of_all_tokens(id);
    require(f.x != f.out && f.scores != f.out, "an operation with a state cannot write its input");
    if (f.scores >= 0) facts.same_shape(f.x, f.scores);
    const int64_t width = facts.width(f.out);
    f.overlaps = facts.width(f.x) != width;
    require(facts.width(f.x) == width || facts.width(f.x) == 2 * width, "x must have one series or two");
    f.size = facts.integer("size", 1, INT32_MAX);
    if (f.scores >= 0) f.bias = facts.floats("bias", f.size * facts.width(f.x));
    f.dim_v = int(std::min<int64_t>(width, kBlockChannels));
    while (width % f.dim_v) f.dim_v--;
    f.n_head = int(width / f.dim_v);
    f.states = facts.states("states", width * (f.overlaps ? 6 : 3));
    return std::make_unique<PoolBlocks>(facts.plan(), std::move(f));
});

}  // namespace hotset
