// The state spaces of Mamba-2 and Mamba: each head has a state matrix, which each token decays, adds to and
// reads (operations.SelectiveScan, operations.ChannelScan).
#include <cmath>

#include "../facts.h"
#include "head_states.h"

namespace hotset {
namespace {

// See operations.SelectiveScan. x: values [n_head][dim_v], then B and C, [n_group][dim_k] each. dt: one
// number per head. A state is [n_head][dim_k][dim_v].
struct SelectiveScanFacts {
    int x = -1, dt = -1, out = -1;
    int n_head = 0, n_group = 0, dim_k = 0, dim_v = 0;
    std::vector<float> rate, step, skip;  // [n_head]
    StateSlots states;
};

class SelectiveScan : public HeadStates {
  public:
    SelectiveScan(const Plan& plan, SelectiveScanFacts facts)
        : HeadStates(plan, {facts.out, facts.n_head, facts.dim_k, facts.dim_v, facts.dim_v, facts.states}),
          f_(std::move(facts)) {}

  private:
    void advance(const StepTokens&, int t, int head, float* state, float* scratch,
                 float* out) const override {
        const float* x = plan_.buffer(f_.x).row(t);
        const float* b =
            x + int64_t(f_.n_head) * f_.dim_v + int64_t(head / (f_.n_head / f_.n_group)) * f_.dim_k;
        const float* c = b + int64_t(f_.n_group) * f_.dim_k;
        const double dt = softplus(double(plan_.buffer(f_.dt).row(t)[head]) + f_.step[head]);
        const float decay = float(std::exp(f_.rate[head] * dt)), amount = float(dt);
        x += int64_t(head) * f_.dim_v;
        for (int i = 0; i < f_.dim_v; i++) scratch[i] = amount * x[i];
        plan_.kernels().selective_scan(f_.dim_k, f_.dim_v, b, c, scratch, decay, state, out);
        for (int i = 0; i < f_.dim_v; i++) out[i] += f_.skip[head] * x[i];
    }

    const SelectiveScanFacts f_;
};

// See operations.ChannelScan. x, dt: one number per channel. b, c: dim_k numbers for all channels. A task has
// a block of dim_v channels; there are n_head tasks. A state is [n_head][dim_k][dim_v].
struct ChannelScanFacts {
    int x = -1, dt = -1, b = -1, c = -1, out = -1;
    int n_head = 0, dim_k = 0, dim_v = 0;
    std::vector<float> rate;  // [n_head][dim_k][dim_v]
    std::vector<float> skip;  // [n_head][dim_v]
    StateSlots states;
};

class ChannelScan : public HeadStates {
  public:
    ChannelScan(const Plan& plan, ChannelScanFacts facts)
        : HeadStates(plan, {facts.out, facts.n_head, facts.dim_k, facts.dim_v, 0, facts.states}),
          f_(std::move(facts)) {}

  private:
    void advance(const StepTokens&, int t, int head, float* state, float*, float* out) const override {
        const int64_t first = int64_t(head) * f_.dim_v;
        const float* x = plan_.buffer(f_.x).row(t) + first;
        plan_.kernels().channel_scan(f_.dim_k, f_.dim_v, plan_.buffer(f_.b).row(t), plan_.buffer(f_.c).row(t),
                                     x, plan_.buffer(f_.dt).row(t) + first, f_.rate.data() + first * f_.dim_k,
                                     state, out);
        for (int i = 0; i < f_.dim_v; i++) out[i] += f_.skip[first + i] * x[i];
    }

    const ChannelScanFacts f_;
};

constexpr int kBlockChannels = 64;  // most channels of a task

}  // namespace

static const Registered kChannelScan("channel_scan", [](Facts& facts) -> std::unique_ptr<Op> {
    ChannelScanFacts f;
    f.x = facts.buffer("x"), f.dt = facts.buffer("dt"), f.b = facts.buffer("b"), f.c = facts.buffer("c");
    f.out = facts.buffer("out");
    for (int id : {f.x, f.dt, f.b, f.c, f.out}) facts.of_all_tokens(id);
    for (int id : {f.x, f.dt, f.b, f.c})
        require(id != f.out, "an operation with a state cannot write its input");
    facts.same_shape(f.x, f.dt);
    facts.same_shape(f.x, f.out);
    facts.same_shape(f.b, f.c);
    const int64_t width = facts.width(f.x);
    require(facts.width(f.b) <= kMaxHeadDim, "a state has too many numbers per channel");
    f.dim_k = int(facts.width(f.b)), f.dim_v = int(std::min<int64_t>(width, kBlockChannels));
    while (width % f.dim_v) f.dim_v--;
    f.n_head = int(width / f.dim_v);
    const std::vector<float> rate = facts.floats("rate", width * f.dim_k);  // [width][dim_k]
    f.rate.resize(rate.size());
    for (int64_t i = 0; i < width; i++)
        for (int k = 0; k < f.dim_k; k++)
            f.rate[(i / f.dim_v * f.dim_k + k) * f.dim_v + i % f.dim_v] = rate[i * f.dim_k + k];
    f.skip = facts.floats("skip", width);
    f.states = facts.states("states", width * f.dim_k);
    return std::make_unique<ChannelScan>(facts.plan(), std::move(f));
});

static const Registered kSelectiveScan("selective_scan", [](Facts& facts) -> std::unique_ptr<Op> {
    SelectiveScanFacts f;
    f.x = facts.buffer("x"), f.dt = facts.buffer("dt"), f.out = facts.buffer("out");
    for (int id : {f.x, f.dt, f.out}) facts.of_all_tokens(id);
    require(f.x != f.out && f.dt != f.out, "an operation with a state cannot write its input");
    f.n_head = facts.integer("n_head", 1, kMaxStateHeads);
    f.n_group = facts.integer("n_group", 1, f.n_head);
    f.dim_k = facts.integer("dim_k", 1, kMaxHeadDim);
    f.dim_v = facts.integer("dim_v", 1, kMaxHeadDim);
    require(f.n_head % f.n_group == 0, "the number of heads must be a multiple of the groups");
    const int64_t values = int64_t(f.n_head) * f.dim_v;
    require(facts.width(f.x) == values + 2 * int64_t(f.n_group) * f.dim_k && facts.width(f.out) == values &&
                facts.width(f.dt) == f.n_head,
            "the widths of a selective scan do not match its heads");
    f.rate = facts.floats("rate", f.n_head);
    f.step = facts.floats("step", f.n_head);
    f.skip = facts.floats("skip", f.n_head);
    f.states = facts.states("states", values * f.dim_k);
    return std::make_unique<SelectiveScan>(facts.plan(), std::move(f));
});

}  // namespace hotset
