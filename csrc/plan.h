// The list of operations of one forward step, and its executor.
//
// A plan is built once from the description of a model (backends/cpu/backend.py lowers it) and run once per
// step: one call, no Python inside. Intermediates are float32 matrices [n_tokens][width] called buffers.
// After `select`, values have a row per *output* token instead of a row per token.
#pragma once

#include <algorithm>
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
    int every = 1;                    // positions are rounded down to a multiple of it
    std::vector<double> frequencies;  // [n_rot / 2]

    bool operator==(const Rope&) const = default;
};

// Adjacent tokens of one sequence. end: beyond the last position that the step has of it.
struct TokenTile {
    int first = 0;
    int count = 0;
    int sequence = 0;
    int end = 0;
};

constexpr int kSavedTokens = 17;  // of a sequence in a step, the last ones, whose states can be saved

// One step's tokens, and what is computed from them once for all layers.
struct StepTokens {
    int n_tokens = 0;
    int n_outputs = 0;
    int max_pages = 0;
    std::vector<int32_t> tokens, positions, sequences, pages, outputs;
    std::vector<TokenTile> stretches;  // all tokens, split where the next is of another sequence
    int n_positions = 0;               // beyond the last of all
    std::vector<uint8_t>
        thresholded;  // of each token, where the model has thresholds: its small values count as zero
    std::vector<int32_t> states;  // per sequence: the slot with its state, -1: it begins
    std::vector<int32_t> saves;   // per token: the slot that takes the state after it, -1: none
    std::vector<float> scales;    // [sequences][n_adapters], 0: the sequence does not have the adapter
    int n_adapters = 0;
    std::vector<std::vector<float>> rope_cos, rope_sin;  // per rope of the plan: [n_tokens][n_rot / 2]

    int rows(const Buffer& buffer) const { return buffer.outputs ? n_outputs : n_tokens; }
    // Of each of n_tokens; null: none is thresholded.
    void set_thresholded(const uint8_t* of_each) {
        if (of_each)
            std::copy_n(of_each, n_tokens, thresholded.begin());
        else
            std::fill_n(thresholded.begin(), n_tokens, uint8_t(0));
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
    // For thresholded tokens: smaller values are zero, of the activation and of the result.
    float gate_threshold = 0.0f, value_threshold = 0.0f;

    bool has_thresholds() const { return gate_threshold != 0.0f || value_threshold != 0.0f; }
};

constexpr int kMaxExperts = 1024;  // each has a chunk of its own at least: kMaxChunks
static_assert(kMaxExperts <= kMaxChunks);

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

// One operation's states of sequences, a slot each. A step never writes a slot that it reads: a chunk of it
// may run again, and a step that was cancelled too.
struct StateSlots {
    float* data = nullptr;
    int64_t size = 0;  // floats of a slot

    float* slot(int i) const { return data + i * size; }
};

class Plan {
  public:
    Plan(const Kernels& kernels, int max_tokens, int max_pages, std::shared_ptr<Runtime> runtime);
    ~Plan();  // waits for late threads that still read the plan

    int add_buffer(int64_t width, bool outputs);
    int add_rope(Rope rope);

    void add(std::unique_ptr<Op> op) { ops_.push_back(std::move(op)); }

    // What a batch must keep to; operations narrow it as they are added. 0: any.
    struct Limits {
        int n_pages = 0;          // of the KV cache
        int64_t n_vocab = 0;      // tokens
        int64_t n_positions = 0;  // of learned position embeddings
        int n_states = 0;         // slots for the states of sequences
        int n_adapters = 0;       // columns of the scales of sequences
    };
    Limits& limits() { return limits_; }
    const Limits& limits() const { return limits_; }

    // After the last operation: sees to it that the runtime has the memory that the operations need.
    void finish();

    // Runs one step. Arrays as in backends/base.py; thresholded: null for none; states, saves: null where no
    // operation has a state; scales: [n_sequences][limits().n_adapters], null where that is 0. Every index
    // must have been checked. poll: null, or asked every 10 ms by this thread, whether to cancel. False: the
    // step was cancelled. Then the buffers hold anything, the cache holds anything at the step's own
    // positions and in the states that it saves, and the next step runs as ever. Throws std::logic_error,
    // before anything is computed, if an operation breaks its contract (see Op).
    bool run(const Poll* poll, const int32_t* tokens, const int32_t* positions, const int32_t* sequences,
             int n_tokens, const int32_t* pages, int n_sequences, int max_pages, const int32_t* outputs,
             int n_outputs, const uint8_t* thresholded = nullptr, const int32_t* states = nullptr,
             const int32_t* saves = nullptr, const float* scales = nullptr);
    // Runs the operations [first_op, last_op) on rows that the caller wrote into their buffers: operations
    // that read neither tokens nor the cache, before any that selects outputs.
    // thresholded: as for `run`. n_threads: of the pool; 0: all.
    bool run_rows(int first_op, int last_op, int n_tokens, const uint8_t* thresholded = nullptr,
                  int n_threads = 0);
    // Ends the step in flight, out of a phase that one thread computes alone: `run` throws this.
    void fail(std::exception_ptr failure) const {
        failure_ = std::move(failure);
        cancel_.store(true);
    }
    // Cancels the step in flight, from any thread or a signal handler; without one nothing happens.
    void cancel() { cancel_.store(true); }

    const Buffer& buffer(int id) const { return *buffers_[id]; }
    int n_buffers() const { return int(buffers_.size()); }
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
    bool execute(const Runtime::Turn& turn, const Poll* poll, int slot, int first_op, int last_op,
                 int n_threads);

    const Kernels& kernels_;
    const int max_tokens_;
    const int max_pages_;
    Limits limits_;
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::vector<Rope> ropes_;
    std::vector<std::unique_ptr<Op>> ops_;
    std::vector<std::unique_ptr<Step>> steps_;  // one per slot of the thread pool
    const Step* latest_ = nullptr;
    mutable std::atomic<bool> cancel_{false};  // of the step in flight
    mutable std::exception_ptr failure_;       // of the same
    const std::shared_ptr<Runtime> runtime_;
};

// ops/rope.cpp: rotates one head; cos and sin are [n_rot / 2].
void rotate_head(const Rope& rope, const float* cos, const float* sin, int head_dim, const float* x,
                 float* out);

// operations.Threshold; a NaN stays.
inline void zero_small(float threshold, const float* x, int64_t n, float* out) {
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
