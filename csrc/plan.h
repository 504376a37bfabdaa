// The list of operations of one forward step, and its executor.
//
// A plan is built once from the description of a model (backends/cpu.py lowers it) and run once per step: one
// call, no Python inside. Intermediates are float32 matrices [n_tokens][width] called buffers. After
// `select`, values have a row per *output* token instead of a row per token.
#pragma once

#include <atomic>
#include <cmath>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "runtime.h"
#include "store/store.h"
#include "store/stream.h"

namespace hotset {

struct Buffer {
    int64_t width = 0;
    bool outputs = false;  // rows are output tokens, not tokens
    Memory memory;

    float* row(int64_t r) const { return memory.as<float>() + r * width; }
};

struct Rope {
    bool neox = false;  // pairs (i, i + n_rot / 2) rather than (2i, 2i + 1)
    int n_rot = 0;
    float magnitude = 1.0f;
    std::vector<double> frequencies;  // [n_rot / 2]

    bool operator==(const Rope&) const = default;
};

// Adjacent tokens of one sequence.
struct TokenTile {
    int first = 0;
    int count = 0;
    int sequence = 0;
};

// One step's tokens, and what is computed from them once for all layers.
struct StepTokens {
    int n_tokens = 0;
    int n_outputs = 0;
    int max_pages = 0;
    std::vector<int32_t> tokens, positions, sequences, pages, outputs;
    std::vector<TokenTile> stretches;  // all tokens, cut where the next is of another sequence
    int n_positions = 0;               // beyond the last of all
    std::vector<uint8_t> cut;  // of each token whether its small values are zero, where the model cuts them
    std::vector<int32_t> states;  // per sequence: the slot with its state, -1: it begins
    std::vector<int32_t> saves;   // per token: the slot that takes the state after it, -1: none
    std::vector<std::vector<float>> rope_cos, rope_sin;  // per rope of the plan: [n_tokens][n_rot / 2]

    int rows(const Buffer& buffer) const { return buffer.outputs ? n_outputs : n_tokens; }
    // Of each of n_tokens; null: nobody is cut.
    void set_cut(const uint8_t* of_each) {
        if (of_each)
            std::copy_n(of_each, n_tokens, cut.begin());
        else
            std::fill_n(cut.begin(), n_tokens, uint8_t(0));
    }
};

struct Norm {
    bool layer = false;  // LayerNorm, else RMSNorm
    std::vector<float> weight;
    std::vector<float> bias;  // empty: none
    float eps = 0.0f;

    void apply(const Kernels& kernels, const float* x, int64_t n, float* out) const;
};

// Upper bounds of the memory that an operation needs beside its buffers.
struct Needs {
    size_t result_floats = 0;  // of each worker, for the results of a chunk
    int64_t input_width = 0;   // widest input of a matrix product
    size_t shared_bytes = 0;   // of the plan, from one phase of the operation to the next
    size_t private_bytes = 0;  // of each worker's `inputs`, where they are not those of `input_width`
};

constexpr int kPrivateInputs = 8;  // up to this many tokens every worker quantises the inputs for itself

// What the FFN operations of a step did; see StepStats of backends/base.py.
struct FfnCounts {
    int64_t selected = 0, active = 0, gate_rows = 0, up_rows = 0, down_rows = 0;
    int64_t left_out = 0;  // bytes of channels that were not read, as their inputs are zero
};

class FfnCounters {
  public:
    // Most operations never count: their lines are not touched, lest each step fetches them.
    void reset() {
        if (!counted_.load(std::memory_order_relaxed)) return;
        for (Line& line : lines_)
            for (auto& value : line.values) value.store(0, std::memory_order_relaxed);
    }
    // thread: its index, lest threads wait for each other's cache line in every chunk.
    void add(const FfnCounts& c, int thread = 0) {
        const int64_t more[] = {c.selected, c.active, c.gate_rows, c.up_rows, c.down_rows, c.left_out};
        Line& line = lines_[thread % kLines];
        if (!counted_.load(std::memory_order_relaxed)) counted_.store(true, std::memory_order_relaxed);
        for (int i = 0; i < 6; i++)
            if (more[i]) line.values[i].fetch_add(more[i], std::memory_order_relaxed);
    }
    FfnCounts get() const {
        if (!counted_.load(std::memory_order_relaxed)) return {};
        int64_t sums[6] = {};
        for (const Line& line : lines_)
            for (int i = 0; i < 6; i++) sums[i] += line.values[i];
        return {sums[0], sums[1], sums[2], sums[3], sums[4], sums[5]};
    }

  private:
    static constexpr int kLines = 4;
    struct alignas(64) Line {
        std::atomic<int64_t> values[6] = {};
    };
    std::atomic<bool> counted_{false};  // ever
    Line lines_[kLines];
};

class Op {
  public:
    virtual ~Op() = default;
    // Any number of phases, of kMaxChunks chunks at most: else the step is an error. Chunks must grow where
    // there is more to do than that.
    virtual int n_phases(const StepTokens& step) const = 0;
    virtual int n_chunks(int phase, const StepTokens& step) const = 0;  // 0: the phase is left out
    // A chunk that takes milliseconds looks at worker.cancelled() about once each, and may then return
    // without a commit.
    virtual void run(int phase, int chunk, const StepTokens& step, Worker& worker) const = 0;
    virtual Needs needs() const = 0;
    // As Job::alone.
    virtual bool alone(int /*phase*/) const { return false; }
    // As Job::prefetch. Most operations read nothing but what the last one wrote.
    virtual bool prefetch(int /*phase*/, int /*chunk*/, int /*piece*/, const StepTokens&) const {
        return false;
    }

    mutable FfnCounters counters;      // of the latest step; added to by the thread that commits a chunk
    FfnCounters* counted = &counters;  // what it adds to: one that works for another counts for that one
};

constexpr int kLogitGroup = 64;  // as LOGIT_GROUP of backends/base.py

struct LinearPart {
    Matrix weight;
    std::vector<float> bias;  // empty: none
    int out = -1;
    // Buffer of the largest of each kLogitGroup values of `out` side by side, NaN where one is not finite;
    // -1: none.
    int largest = -1;
};

// What becomes of the result of a matrix product.
struct LinearTail {
    enum Kind { None, Activated, Gated };  // Gated: parts are gate and up, out gets activate(gate) * up
    Kind kind = None;
    Activation activation = Activation::Relu;
    float threshold = 0.0f;
    // Of tokens that are cut: what is smaller is zero of the activation, and of the result.
    float gate_cutoff = 0.0f, value_cutoff = 0.0f;

    bool cuts() const { return gate_cutoff != 0.0f || value_cutoff != 0.0f; }
};

struct NeuronFacts {
    int x = -1, out = -1;
    Norm norm;        // applied to x first; empty weight: none
    LinearPart gate;  // without data: none, and the activation is up's
    LinearPart up;
    Activation activation = Activation::Relu;
    float activation_threshold = 0.0f;
    bool up_activated = false;
    Activation up_activation = Activation::Relu;
    bool sparse = false;  // leave out what is not needed
    int scores = -1;      // buffer of a predictor, -1: none
    float threshold = 0.0f;
    int64_t first = 0;  // neurons before it are always selected and have no score
    // Of tokens that are cut: what is smaller is zero of the input behind the norm, of the activation that
    // decides, and of the value.
    float input_cutoff = 0.0f, gate_cutoff = 0.0f, value_cutoff = 0.0f;
    ChannelMatrix gate_channels, up_channels;  // copies by channel, where there are any
    // [number of neurons] Where it is given, those alone for which it has `missed_which`.
    const uint8_t* missed = nullptr;
    bool missed_which = false;
};

constexpr int kMaxExperts = 1024;  // each has a chunk of its own at least: kMaxChunks
static_assert(kMaxExperts <= kMaxChunks);

// See graph.Route (model/graph.py). out: [n_used] ids, [n_used] weights.
struct RouteFacts {
    enum Scoring { Softmax = 1, Sigmoid = 2, SoftmaxChosen = 3 };
    int x = -1, out = -1;
    int n_used = 1;
    Scoring scoring = Softmax;
    std::vector<float> bias;  // empty: none
    bool normalised = false;
    float scale = 1.0f;
    int n_groups = 1, n_groups_used = 1, group_best = 2;
};

// A matrix for each expert, and their biases one after the other.
struct ExpertMatrices {
    std::vector<Matrix> weights;             // where an expert is, ask `of`
    std::vector<float> bias;                 // empty: none
    const uint8_t* const* places = nullptr;  // of a store: where each expert's bytes are now,
    size_t skipped = 0;                      // of which so many are not the matrix's
    Matrix of(int expert) const {
        Matrix matrix = weights[size_t(expert)];
        if (places) matrix.data = places[expert] + skipped;
        return matrix;
    }
    const float* bias_of(int expert, int64_t rows) const {
        return bias.empty() ? nullptr : bias.data() + expert * rows;
    }
};

// The neurons of the experts that `route` names, side by side: f(gate) * g(up), or f(up) without a gate.
struct ExpertFacts {
    int x = -1, route = -1, out = -1;
    int n_used = 1;
    ExpertMatrices gate, up;  // gate without weights: none
    bool activated = false;   // always with a gate
    Activation activation = Activation::Relu;
    float activation_threshold = 0.0f;
    float cutoff = 0.0f;  // of what is activated, of tokens that are cut
    bool up_activated = false;
    Activation up_activation = Activation::Relu;
    float up_threshold = 0.0f;
    int scores = -1;  // buffer of the experts' predictors, a column for each of `out`; -1: none
    float threshold = 0.0f;
    bool sparse = false;  // leave out what is not needed: of up, and of what scores do not name
    // [number of experts] Where it is given, those alone for which it has `missed_which`.
    const uint8_t* missed = nullptr;
    bool missed_which = false;
};

// out = the sum of weight * (part of x times its expert's matrix + bias), in the order of `route`, +
// residual.
struct ExpertSumFacts {
    int x = -1, route = -1, residual = -1, out = -1;
    int n_used = 1;
    ExpertMatrices down;
    bool by_neuron = false;  // a row per neuron, which is a column of x
    bool apart = false;      // not summed and not weighed: side by side
    bool sparse = false;     // and rows of zeros are left out
};

// Which rows of a store's group the operations behind it read, of any token.
struct FetchFacts {
    enum Which { All, Selected, NonZero, Routed, Tokens };
    RowStore* store = nullptr;
    int group = -1;
    Which which = All;
    // Buffer: any, scores (of neurons from `first` on), values, or a route of `n_used`; of tokens any, too.
    int by = -1;
    float threshold = 0.0f;
    int64_t first = 0;
    int n_used = 0;
    bool waits = true;       // else the reads are on their way, until add_finish_fetch
    int rows_per_token = 1;  // of `by`: one, or one for each of its experts
};

constexpr int kMaxGroup = 256;  // query heads per KV head, at most

struct AttentionFacts {
    int q = -1, k = -1, v = -1, out = -1;
    int n_head = 0;
    KvLayer kv;
    float scale = 1.0f;
    float softcap = 0.0f;      // 0: none
    int window = 0;            // 0: none
    int rope = -1;             // index of a rope of the plan, -1: none (already rotated)
    Norm q_norm, k_norm;       // per head; empty weight: none
    std::vector<float> sinks;  // of each query head: a score without a value; empty: none
};

// One operation's states of sequences, a slot each. A step never writes a slot that it reads: a chunk of it
// may run again, and a step that was cancelled too.
struct StateSlots {
    float* data = nullptr;
    int64_t size = 0;  // floats of a slot

    float* slot(int i) const { return data + i * size; }
};

constexpr int kMaxConvKernel = 64;
constexpr int kMaxStateHeads = 1024;

// See graph.ShortConv (model/graph.py). A state: [kernel - 1][width], the oldest inputs first.
struct ShortConvFacts {
    int x = -1, out = -1;
    int kernel = 1;
    std::vector<float> weight;  // [kernel][width]
    StateSlots states;
};

// See graph.DeltaNet. x: queries and keys [n_head_k][dim_k] each, values [n_head][dim_v]; alpha, beta: a
// number per head. A state: [n_head][dim_k][dim_v].
struct DeltaNetFacts {
    int x = -1, alpha = -1, beta = -1, out = -1;
    int n_head = 0, n_head_k = 0, dim_k = 0, dim_v = 0;
    bool tiled = false;
    std::vector<float> rate, step;  // [n_head]
    StateSlots states;
};

class Plan {
  public:
    Plan(const Kernels& kernels, int max_tokens, int max_pages, std::shared_ptr<Runtime> runtime);
    ~Plan();  // waits for late threads that still read the plan

    int add_buffer(int64_t width, bool outputs);
    int add_rope(Rope rope);

    void add(std::unique_ptr<Op> op) { ops_.push_back(std::move(op)); }
    void add_embed(const Matrix& weight, bool positions, int first_row, int out);
    void add_select(int x, int out);
    void add_norm(Norm norm, int n_head, int x, int out);
    // Matrix products of one input. With a norm, it is applied to the input first; with a residual, it is
    // added to the one output. cutoff: below which inputs are zero, behind the norm, of tokens that are cut;
    // channels: of each part its copy by channel, where it has one; empty: none has.
    void add_linear(int x, Norm norm, std::vector<LinearPart> parts, int residual, LinearTail tail,
                    float cutoff = 0.0f, std::vector<ChannelMatrix> channels = {});
    void add_neurons(NeuronFacts facts);
    // part.out = x times part.weight (rows = inputs) + bias + residual. Sparse: rows of zeros are left out.
    void add_axpy(int x, LinearPart part, int residual, bool sparse);
    // out = x where not scores < threshold, else 0; columns before `first` have no score and are kept.
    void add_route(RouteFacts facts);
    void add_fetch(FetchFacts facts);
    // next: what operations behind it read, in the order of its use: while the disk is waited for it is
    // fetched into the cache that threads share, as far as that has room.
    void add_finish_fetch(RowStore& store, std::vector<std::pair<const uint8_t*, size_t>> next = {});
    // Operations behind it read a piece of a stream. waits: they do; else the stream's user has no more to
    // do, and what comes next may be read.
    void add_await_piece(Stream& stream, int piece, bool waits);
    void add_expert_neurons(ExpertFacts facts);
    void add_expert_sum(ExpertSumFacts facts);
    void add_mask(int x, int scores, float threshold, int64_t first, int out);
    // out = x, of tokens that are cut 0 where |x| < threshold.
    void add_cutoff(int x, float threshold, int out);
    // out = sign_scores of x and `rows` (out.width rows of signs) + bias.
    void add_sign_scores(int x, const uint8_t* rows, std::vector<float> bias, int out);
    void add_rotate(int x, int out, int n_head, int head_dim, int rope, int first);
    // See graph.Heads; shared -1: none.
    void add_heads(int x, int shared, int n_head, int first, int out);
    // See graph.TransposedHeads; a matrix for each head, with a row per input.
    void add_transposed_heads(int x, std::vector<Matrix> weights, int out);
    void add_attention(AttentionFacts facts);
    void add_short_conv(ShortConvFacts facts);
    void add_delta_net(DeltaNetFacts facts);
    void add_activate(Activation kind, float threshold, int x, int out);
    void add_add(int a, int b, int out);
    void add_multiply(int a, int b, int out);

    // After the last operation: sees to it that the runtime has the memory that the operations need.
    void finish();

    // Runs one step. Arrays as in backends/base.py; cut: null for nobody; states, saves: null where no
    // operation has a state. Every index must have been checked. poll: null, or asked every 10 ms by this
    // thread, whether to cancel. False: the step was cancelled. Then the buffers hold anything, the cache
    // holds anything at the step's own positions and in the states that it saves, and the next step runs as
    // ever. Throws std::logic_error, before anything is computed, if an operation breaks its contract (see
    // Op).
    bool run(const Poll* poll, const int32_t* tokens, const int32_t* positions, const int32_t* sequences,
             int n_tokens, const int32_t* pages, int n_sequences, int max_pages, const int32_t* outputs,
             int n_outputs, const uint8_t* cut = nullptr, const int32_t* states = nullptr,
             const int32_t* saves = nullptr);
    // Runs the operations [first_op, last_op) on rows that the caller wrote into their buffers: operations
    // that read neither tokens nor the cache, before any that selects outputs.
    // cut: as for `run`.
    bool run_rows(int first_op, int last_op, int n_tokens, const uint8_t* cut = nullptr);
    // Ends the step in flight, out of a phase that one thread computes alone: `run` throws this.
    void fail(std::exception_ptr failure) const {
        failure_ = failure;
        cancel_.store(true);
    }
    // Cancels the step in flight, from any thread or a signal handler; without one nothing happens.
    void cancel() { cancel_.store(true); }

    const Buffer& buffer(int id) const { return *buffers_[id]; }
    const Kernels& kernels() const { return kernels_; }
    int max_tokens() const { return max_tokens_; }
    int max_pages() const { return max_pages_; }
    int n_threads() const { return runtime_->n_threads(); }
    int ahead() const { return n_threads() == 1 ? kernels_.ahead_alone : kernels_.ahead; }
    size_t bytes() const;      // of buffers, and of the runtime's scratch
    size_t own_bytes() const;  // of these without the runtime's
    const Rope& rope(int id) const { return ropes_[id]; }
    int n_ropes() const { return int(ropes_.size()); }
    int n_ops() const { return int(ops_.size()); }
    const Op& op(int i) const { return *ops_[i]; }
    // Seconds that each operation of the latest step took; zeros where it was cancelled.
    std::vector<double> op_seconds() const;
    uint8_t* shared() const { return runtime_->shared(); }

  private:
    class Step;
    bool execute(const Runtime::Turn& turn, const Poll* poll, int slot, int first_op, int last_op);

    const Kernels& kernels_;
    const int max_tokens_;
    const int max_pages_;
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::vector<Rope> ropes_;
    std::vector<std::unique_ptr<Op>> ops_;
    std::vector<std::unique_ptr<Step>> steps_;  // one per slot of the team
    const Step* latest_ = nullptr;
    mutable std::atomic<bool> cancel_{false};  // of the step in flight
    mutable std::exception_ptr failure_;       // of the same
    const std::shared_ptr<Runtime> runtime_;
};

// ops/*.cpp
// `positions`: rows are positions + first_row, not tokens.
std::unique_ptr<Op> make_embed(const Plan& plan, const Matrix& weight, bool positions, int first_row,
                               int out);
std::unique_ptr<Op> make_select(const Plan& plan, int x, int out);
std::unique_ptr<Op> make_norm(const Plan& plan, Norm norm, int n_head, int x, int out);
std::unique_ptr<Op> make_linear(const Plan& plan, int x, Norm norm, std::vector<LinearPart> parts,
                                int residual, LinearTail tail, float cutoff = 0.0f);
std::unique_ptr<Op> make_channel_linear(const Plan& plan, int x, Norm norm, std::vector<LinearPart> parts,
                                        std::vector<ChannelMatrix> channels, int residual, LinearTail tail,
                                        float cutoff);
std::unique_ptr<Op> make_neurons(const Plan& plan, NeuronFacts facts);
std::unique_ptr<Op> make_axpy(const Plan& plan, int x, LinearPart part, int residual, bool sparse);
std::unique_ptr<Op> make_fetch(const Plan& plan, FetchFacts facts);
std::unique_ptr<Op> make_finish_fetch(const Plan& plan, RowStore& store,
                                      std::vector<std::pair<const uint8_t*, size_t>> next);
std::unique_ptr<Op> make_await_piece(const Plan& plan, Stream& stream, int piece, bool waits);
std::unique_ptr<Op> make_route(const Plan& plan, RouteFacts facts);
std::unique_ptr<Op> make_expert_neurons(const Plan& plan, ExpertFacts facts);
std::unique_ptr<Op> make_expert_sum(const Plan& plan, ExpertSumFacts facts);
std::unique_ptr<Op> make_sign_scores(const Plan& plan, int x, const uint8_t* rows, std::vector<float> bias,
                                     int out);
std::unique_ptr<Op> make_rotate(const Plan& plan, int x, int out, int n_head, int head_dim, int rope,
                                int first);
std::unique_ptr<Op> make_heads(const Plan& plan, int x, int shared, int n_head, int first, int out);
std::unique_ptr<Op> make_transposed_heads(const Plan& plan, int x, std::vector<Matrix> weights, int out);
std::unique_ptr<Op> make_attention(const Plan& plan, AttentionFacts facts);
std::unique_ptr<Op> make_short_conv(const Plan& plan, ShortConvFacts facts);
std::unique_ptr<Op> make_delta_net(const Plan& plan, DeltaNetFacts facts);
std::unique_ptr<Op> make_activate(const Plan& plan, Activation kind, float threshold, int x, int out);
std::unique_ptr<Op> make_mask(const Plan& plan, int x, int scores, float threshold, int64_t first, int out);
std::unique_ptr<Op> make_cutoff(const Plan& plan, int x, float threshold, int out);
std::unique_ptr<Op> make_add(const Plan& plan, int a, int b, int out);
std::unique_ptr<Op> make_multiply(const Plan& plan, int a, int b, int out);

// ops/rope.cpp: rotates one head; cos and sin are [n_rot / 2].
void rotate_head(const Rope& rope, const float* cos, const float* sin, int head_dim, const float* x,
                 float* out);

// graph.Cutoff; a NaN stays.
inline void cut_small(float threshold, const float* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i++) out[i] = std::fabs(x[i]) < threshold ? 0.0f : x[i];
}

inline int ceil_div(int64_t a, int64_t b) {
    return int((a + b - 1) / b);
}

// Rows [first, last) of chunk `chunk` of `n_chunks`.
struct RowRange {
    int first, last;
    RowRange(int chunk, int n_chunks, int n_rows)
        : first(int(int64_t(n_rows) * chunk / n_chunks)),
          last(int(int64_t(n_rows) * (chunk + 1) / n_chunks)) {}
    int count() const { return last - first; }
};

}  // namespace hotset
