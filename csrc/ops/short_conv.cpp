// A causal convolution over the tokens of a sequence, per channel. Its state is the last inputs.
#include <algorithm>

#include "../facts.h"
#include "token_states.h"

namespace hotset {
namespace {

constexpr int kMaxConvKernel = 64;

// See operations.ShortConv (model/operations.py). A state is [past][width], oldest inputs first.
struct ShortConvFacts {
    int x = -1, out = -1;
    int kernel = 1, dilation = 1;
    std::vector<float> weight;  // [kernel][width]
    std::vector<float> bias;    // [width]; empty: none
    StateSlots states;
};

class ShortConv : public TokenStates {
  public:
    ShortConv(const Plan& plan, ShortConvFacts facts)
        : TokenStates(plan, facts.out, facts.states),
          f_(std::move(facts)),
          past_((f_.kernel - 1) * f_.dilation) {}

  private:
    // Return the input `back` tokens before token t; null if it does not exist.
    const float* input(const StepTokens& step, int t, int back) const {
        const int in_step = tokens_in_step(step, t, back);
        if (in_step == back) return plan_.buffer(f_.x).row(t - back);
        const float* const state = before(step, t);
        return state ? state + (past_ - (back - in_step)) * width_ : nullptr;
    }

    void compute(const StepTokens& step, int t, float* out) const override {
        std::fill_n(out, width_, 0.0f);
        for (int j = 0; j < f_.kernel; j++) {
            const float* x = input(step, t, (f_.kernel - 1 - j) * f_.dilation);
            const float* weight = f_.weight.data() + j * width_;
            if (!x) continue;  // zeros do not change the sum
            for (int64_t c = 0; c < width_; c++) out[c] += weight[c] * x[c];
        }
        if (!f_.bias.empty())
            for (int64_t c = 0; c < width_; c++) out[c] += f_.bias[c];
    }

    void save(const StepTokens& step, int t, float* state) const override {
        for (int i = 0; i < past_; i++) {
            const float* x = input(step, t, past_ - 1 - i);
            if (x)
                std::copy_n(x, width_, state + i * width_);
            else
                std::fill_n(state + i * width_, width_, 0.0f);
        }
    }

    const ShortConvFacts f_;
    const int past_;  // inputs in a state
};

}  // namespace

static const Registered kShortConv("short_conv", [](Facts& facts) -> std::unique_ptr<Op> {
    ShortConvFacts f;
    f.x = facts.buffer("x"), f.out = facts.buffer("out");
    facts.same_shape(f.x, f.out);
    facts.of_all_tokens(f.x);
    require(f.x != f.out, "an operation with a state cannot write its input");
    f.kernel = facts.integer("kernel", 1, kMaxConvKernel);
    f.dilation = facts.integer("dilation", 1, kMaxConvKernel);
    const int64_t width = facts.width(f.x);
    const std::vector<float> weight = facts.floats("weight", width * f.kernel);  // [width][kernel]
    f.weight.resize(weight.size());
    for (int64_t c = 0; c < width; c++)
        for (int j = 0; j < f.kernel; j++) f.weight[j * width + c] = weight[c * f.kernel + j];
    f.bias = facts.floats_or_none("bias", width);
    f.states = facts.states("states", (f.kernel - 1) * f.dilation * width);
    return std::make_unique<ShortConv>(facts.plan(), std::move(f));
});

}  // namespace hotset
