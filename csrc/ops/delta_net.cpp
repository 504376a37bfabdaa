// The gated delta rule: a matrix per head, which each token lets decay, corrects and reads
// (operations.DeltaNet).
#include <algorithm>
#include <cmath>

#include "../facts.h"

namespace hotset {
namespace {

constexpr int kMaxStateHeads = 1024;

// See operations.DeltaNet. x: queries and keys [n_head_k][dim_k] each, values [n_head][dim_v]; alpha, beta: a
// number per head. A state: [n_head][dim_k][dim_v].
struct DeltaNetFacts {
    int x = -1, alpha = -1, beta = -1, out = -1;
    int n_head = 0, n_head_k = 0, dim_k = 0, dim_v = 0;
    bool tiled = false;
    std::vector<float> rate, step;  // [n_head]
    StateSlots states;
};

constexpr float kLengthEps = 1e-6f;  // of the squared length of a query or key
constexpr int kCancelTokens = 64;    // between two looks at the flag

class DeltaNet : public Op {
  public:
    DeltaNet(const Plan& plan, DeltaNetFacts facts) : plan_(plan), f_(std::move(facts)) {
        // x / sqrt(sum of squares + eps) as an RMS norm; a query is also divided by the root of its channels.
        const float n = float(f_.dim_k), length = 1.0f / std::sqrt(n);
        key_weight_.assign(f_.dim_k, length);
        query_weight_.assign(f_.dim_k, length / std::sqrt(n));
        eps_ = kLengthEps / n;
        max_saves_ = plan.max_tokens() / kPageSize + 2;  // at the ends of pages, and of the tokens
    }

    // A chunk is a head of one sequence; as many phases as that takes.
    int n_phases(const StepTokens& step) const override { return ceil_div(n_units(step), kMaxChunks); }
    int n_chunks(int phase, const StepTokens& step) const override {
        return std::min(n_units(step) - phase * kMaxChunks, kMaxChunks);
    }

    void run(int phase, int chunk, const StepTokens& step, Worker& worker) const override {
        const int unit = phase * kMaxChunks + chunk, head = unit % f_.n_head;
        const TokenTile tile = step.stretches[unit / f_.n_head];
        const int64_t size = int64_t(f_.dim_k) * f_.dim_v;
        float* const out = worker.results.as<float>();  // [tokens][dim_v]
        float* const state = out + rounded(int64_t(plan_.max_tokens()) * f_.dim_v);
        float* const saved = state + rounded(size);
        float* const scratch = saved + max_saves_ * rounded(size);
        const int slot = step.states[tile.sequence];
        if (slot < 0)
            std::fill_n(state, size, 0.0f);
        else
            std::copy_n(f_.states.slot(slot) + head * size, size, state);
        int n_saved = 0;
        for (int i = 0; i < tile.count; i++) {
            if (i % kCancelTokens == 0 && worker.cancelled()) return;
            const int t = tile.first + i;
            advance(t, head, state, scratch, out + int64_t(i) * f_.dim_v);
            if (step.saves[t] >= 0) std::copy_n(state, size, saved + n_saved++ * rounded(size));
        }
        if (!worker.begin_commit()) return;
        n_saved = 0;
        for (int i = 0; i < tile.count; i++) {
            const int t = tile.first + i;
            std::copy_n(out + int64_t(i) * f_.dim_v, f_.dim_v, plan_.buffer(f_.out).row(t) + head * f_.dim_v);
            if (step.saves[t] >= 0)
                std::copy_n(saved + n_saved++ * rounded(size), size,
                            f_.states.slot(step.saves[t]) + head * size);
        }
        worker.end_commit();
    }

    Needs needs() const override {
        Needs needs;
        needs.result_floats = size_t(rounded(int64_t(plan_.max_tokens()) * f_.dim_v) +
                                     (max_saves_ + 1) * rounded(int64_t(f_.dim_k) * f_.dim_v) + 2 * f_.dim_k);
        return needs;
    }

  private:
    static int64_t rounded(int64_t floats) { return (floats + 15) / 16 * 16; }

    // Tokens of one sequence are adjacent.
    int n_units(const StepTokens& step) const { return int(step.stretches.size()) * f_.n_head; }

    // Token t: the state of a head before it becomes that after it.
    void advance(int t, int head, float* state, float* scratch, float* out) const {
        const Kernels& kernels = plan_.kernels();
        const float* x = plan_.buffer(f_.x).row(t);
        const int key_head = f_.tiled ? head % f_.n_head_k : head / (f_.n_head / f_.n_head_k);
        const int64_t keys = int64_t(f_.n_head_k) * f_.dim_k;
        float *query = scratch, *key = scratch + f_.dim_k;
        kernels.rms_norm(x + key_head * f_.dim_k, query_weight_.data(), eps_, f_.dim_k, query);
        kernels.rms_norm(x + keys + key_head * f_.dim_k, key_weight_.data(), eps_, f_.dim_k, key);
        const double a = double(plan_.buffer(f_.alpha).row(t)[head]) + f_.step[head];
        const double softplus = a > 20.0 ? a : std::log1p(std::exp(a));
        const float decay = float(std::exp(f_.rate[head] * softplus));
        float beta;
        kernels.activate(Activation::Sigmoid, 0.0f, plan_.buffer(f_.beta).row(t) + head, 1, &beta);
        kernels.delta_rule(f_.dim_k, f_.dim_v, query, key, x + 2 * keys + int64_t(head) * f_.dim_v, decay,
                           beta, state, out);
    }

    const Plan& plan_;
    const DeltaNetFacts f_;
    std::vector<float> query_weight_, key_weight_;
    float eps_;
    int64_t max_saves_;
};

}  // namespace

static const Registered kDeltaNet("delta_net", [](Facts& facts) -> std::unique_ptr<Op> {
    DeltaNetFacts f;
    f.x = facts.buffer("x"), f.alpha = facts.buffer("alpha"), f.beta = facts.buffer("beta");
    f.out = facts.buffer("out");
    for (int id : {f.x, f.alpha, f.beta, f.out}) facts.of_all_tokens(id);
    require(f.x != f.out, "an operation with a state reads what it does not write");
    f.n_head = facts.integer("n_head", 1, kMaxStateHeads);
    f.n_head_k = facts.integer("n_head_k", 1, f.n_head);
    f.dim_k = facts.integer("dim_k", 1, kMaxHeadDim);
    f.dim_v = facts.integer("dim_v", 1, kMaxHeadDim);
    f.tiled = facts.flag("tiled");
    require(f.n_head % f.n_head_k == 0, "heads of values share those of keys");
    const int64_t values = int64_t(f.n_head) * f.dim_v;
    require(facts.width(f.x) == 2 * int64_t(f.n_head_k) * f.dim_k + values && facts.width(f.out) == values &&
                facts.width(f.alpha) == f.n_head && facts.width(f.beta) == f.n_head,
            "heads fill the widths of a delta net");
    f.rate = facts.floats("rate", f.n_head);
    f.step = facts.floats("step", f.n_head);
    f.states = facts.states("states", values * f.dim_k);
    return std::make_unique<DeltaNet>(facts.plan(), std::move(f));
});

}  // namespace hotset
