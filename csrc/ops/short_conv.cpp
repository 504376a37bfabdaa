// A causal convolution over the tokens of a sequence, channel by channel. Its state are the last inputs.
#include <algorithm>

#include "../facts.h"

namespace hotset {
namespace {

constexpr int kMaxConvKernel = 64;

// See operations.ShortConv (model/operations.py). A state: [past][width], the oldest inputs first.
struct ShortConvFacts {
    int x = -1, out = -1;
    int kernel = 1, dilation = 1;
    std::vector<float> weight;  // [kernel][width]
    std::vector<float> bias;    // [width], or none
    StateSlots states;
};

class ShortConv : public Op {
  public:
    ShortConv(const Plan& plan, ShortConvFacts facts)
        : plan_(plan),
          f_(std::move(facts)),
          width_(plan.buffer(f_.out).width),
          past_((f_.kernel - 1) * f_.dilation) {}

    int n_phases(const StepTokens&) const override { return 1; }
    int n_chunks(int, const StepTokens& step) const override {
        return int(std::min<int64_t>(ceil_div(step.n_tokens, rows_per_chunk()), kMaxChunks));
    }
    void run(int, int chunk, const StepTokens& step, Worker& worker) const override {
        const RowRange rows(chunk, n_chunks(0, step), step.n_tokens);
        float* const results = worker.results.as<float>();
        for (int t = rows.first; t < rows.last; t++) convolve(step, t, results + (t - rows.first) * width_);
        if (!worker.begin_commit()) return;
        std::copy_n(results, rows.count() * width_, plan_.buffer(f_.out).row(rows.first));
        for (int t = rows.first; t < rows.last; t++)
            if (step.saves[t] >= 0) save(step, t, f_.states.slot(step.saves[t]));
        worker.end_commit();
    }
    Needs needs() const override {
        const int64_t rows =
            std::max(rows_per_chunk(), int64_t(ceil_div(plan_.max_tokens(), kMaxChunks)) + 1);
        Needs needs;
        needs.result_floats = size_t(rows * width_);
        return needs;
    }

  private:
    static constexpr int64_t kChunkFloats = 16384;

    int64_t rows_per_chunk() const { return std::max<int64_t>(1, kChunkFloats / width_); }

    // The inputs `back` tokens before token t of the step; null: there was none.
    const float* input(const StepTokens& step, int t, int back) const {
        const int sequence = step.sequences[t];
        int in_step = 0;  // tokens of the sequence before it, as far as they count
        while (in_step < back && in_step < t && step.sequences[t - in_step - 1] == sequence) in_step++;
        if (in_step == back) return plan_.buffer(f_.x).row(t - back);
        const int slot = step.states[sequence];
        const int at = past_ - (back - in_step);  // the oldest come first
        return slot < 0 ? nullptr : f_.states.slot(slot) + at * width_;
    }

    void convolve(const StepTokens& step, int t, float* out) const {
        std::fill_n(out, width_, 0.0f);
        for (int j = 0; j < f_.kernel; j++) {
            const float* x = input(step, t, (f_.kernel - 1 - j) * f_.dilation);
            const float* weight = f_.weight.data() + j * width_;
            if (!x) continue;  // zeros, whose products would change no sum
            for (int64_t c = 0; c < width_; c++) out[c] += weight[c] * x[c];
        }
        if (!f_.bias.empty())
            for (int64_t c = 0; c < width_; c++) out[c] += f_.bias[c];
    }

    // Within a commit: no thread writes the slot that is read, nor the inputs.
    void save(const StepTokens& step, int t, float* state) const {
        for (int i = 0; i < past_; i++) {
            const float* x = input(step, t, past_ - 1 - i);
            if (x)
                std::copy_n(x, width_, state + i * width_);
            else
                std::fill_n(state + i * width_, width_, 0.0f);
        }
    }

    const Plan& plan_;
    const ShortConvFacts f_;
    const int64_t width_;
    const int past_;  // inputs that a state holds
};

}  // namespace

static const Registered kShortConv("short_conv", [](Facts& facts) -> std::unique_ptr<Op> {
    ShortConvFacts f;
    f.x = facts.buffer("x"), f.out = facts.buffer("out");
    facts.same_shape(f.x, f.out);
    facts.of_all_tokens(f.x);
    require(f.x != f.out, "an operation with a state reads what it does not write");
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
