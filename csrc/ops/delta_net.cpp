// The gated delta rule: each head has a state matrix, which each token decays, corrects and reads
// (operations.DeltaNet).
#include <cmath>

#include "../facts.h"
#include "head_states.h"

namespace hotset {
namespace {

// See operations.DeltaNet. x: queries and keys, [n_head_k][dim_k] each, and values [n_head][dim_v]. beta: a
// number per head; alpha too or, with by_channel, [n_head][dim_k]. A state: [n_head][dim_k][dim_v].
struct DeltaNetFacts {
    int x = -1, alpha = -1, beta = -1, out = -1;
    int n_head = 0, n_head_k = 0, dim_k = 0, dim_v = 0;
    bool tiled = false, by_channel = false;
    std::vector<float> rate;  // [n_head]
    std::vector<float> step;  // same shape as alpha
    StateSlots states;

    int scratch() const { return 2 * dim_k + (by_channel ? 3 * dim_k + dim_v : 0); }
};

constexpr float kLengthEps = 1e-6f;  // added to the squared length of a query or key

class DeltaNet : public HeadStates {
  public:
    DeltaNet(const Plan& plan, DeltaNetFacts facts)
        : HeadStates(plan,
                     {facts.out, facts.n_head, facts.dim_k, facts.dim_v, facts.scratch(), facts.states}),
          f_(std::move(facts)) {
        // x / sqrt(sum of squares + eps) as an RMS norm. A query is also divided by the root of its length.
        const float n = float(f_.dim_k), length = 1.0f / std::sqrt(n);
        key_weight_.assign(f_.dim_k, length);
        query_weight_.assign(f_.dim_k, length / std::sqrt(n));
        eps_ = kLengthEps / n;
    }

  private:
    void advance(const StepTokens&, int t, int head, float* state, float* scratch,
                 float* out) const override {
        const Kernels& kernels = plan_.kernels();
        const float* x = plan_.buffer(f_.x).row(t);
        const int key_head = f_.tiled ? head % f_.n_head_k : head / (f_.n_head / f_.n_head_k);
        const int64_t keys = int64_t(f_.n_head_k) * f_.dim_k;
        float *query = scratch, *key = scratch + f_.dim_k;
        kernels.rms_norm(x + key_head * f_.dim_k, query_weight_.data(), eps_, f_.dim_k, query);
        kernels.rms_norm(x + keys + key_head * f_.dim_k, key_weight_.data(), eps_, f_.dim_k, key);
        const float* value = x + 2 * keys + int64_t(head) * f_.dim_v;
        float beta;
        kernels.activate(Activation::Sigmoid, 0.0f, plan_.buffer(f_.beta).row(t) + head, 1, &beta);
        if (f_.by_channel) {
            advance_channels(t, head, query, key, value, beta, scratch + 2 * f_.dim_k, state, out);
            return;
        }
        const double a = double(plan_.buffer(f_.alpha).row(t)[head]) + f_.step[head];
        const float decay = float(std::exp(f_.rate[head] * softplus(a)));
        kernels.delta_rule(f_.dim_k, f_.dim_v, query, key, value, decay, beta, state, out);
    }

    // With decays w the state becomes diag(w) S - (beta k) ((w k)^T S) + k (beta v)^T, which is a step of
    // RWKV's attention.
    void advance_channels(int t, int head, const float* query, const float* key, const float* value,
                          float beta, float* scratch, float* state, float* out) const {
        const Kernels& kernels = plan_.kernels();
        const int n = f_.dim_k;
        const int64_t first = int64_t(head) * n;
        const float *alpha = plan_.buffer(f_.alpha).row(t) + first, *step = f_.step.data() + first;
        float *decay = scratch, *read = decay + n, *written = read + n, *added = written + n;
        for (int i = 0; i < n; i++) read[i] = alpha[i] + step[i];
        kernels.activate(Activation::Softplus, 0.0f, read, n, written);
        for (int i = 0; i < n; i++) read[i] = f_.rate[head] * written[i];
        kernels.activate(Activation::Exp, 0.0f, read, n, decay);
        for (int i = 0; i < n; i++) read[i] = decay[i] * key[i], written[i] = -beta * key[i];
        for (int j = 0; j < f_.dim_v; j++) added[j] = beta * value[j];
        kernels.wkv(n, f_.dim_v, query, decay, key, added, read, written, state, out);
    }

    const DeltaNetFacts f_;
    std::vector<float> query_weight_, key_weight_;
    float eps_;
};

}  // namespace

static const Registered kDeltaNet("delta_net", [](Facts& facts) -> std::unique_ptr<Op> {
    DeltaNetFacts f;
    f.x = facts.buffer("x"), f.alpha = facts.buffer("alpha"), f.beta = facts.buffer("beta");
    f.out = facts.buffer("out");
    for (int id : {f.x, f.alpha, f.beta, f.out}) facts.of_all_tokens(id);
    require(f.x != f.out, "an operation with a state cannot write its input");
    f.n_head = facts.integer("n_head", 1, kMaxStateHeads);
    f.n_head_k = facts.integer("n_head_k", 1, f.n_head);
    f.dim_k = facts.integer("dim_k", 1, kMaxHeadDim);
    f.dim_v = facts.integer("dim_v", 1, kMaxHeadDim);
    f.tiled = facts.flag("tiled");
    require(f.n_head % f.n_head_k == 0, "the number of value heads must be a multiple of the key heads");
    const int64_t values = int64_t(f.n_head) * f.dim_v;
    const int64_t decays = facts.width(f.alpha);
    f.by_channel = decays != f.n_head;
    require(facts.width(f.x) == 2 * int64_t(f.n_head_k) * f.dim_k + values && facts.width(f.out) == values &&
                (!f.by_channel || decays == int64_t(f.n_head) * f.dim_k) && facts.width(f.beta) == f.n_head,
            "the widths of a delta net do not match its heads");
    f.rate = facts.floats("rate", f.n_head);
    f.step = facts.floats("step", decays);
    f.states = facts.states("states", values * f.dim_k);
    return std::make_unique<DeltaNet>(facts.plan(), std::move(f));
});

}  // namespace hotset
