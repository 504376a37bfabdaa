// The operations of one forward step, and their executor.
//
// A plan is built once per model (backends/cpu/backend.py lowers the graph) and runs once per step, in one
// call without Python. Intermediate values are float32 matrices [n_tokens][width], called buffers. After the
// operation `select`, a buffer has one row per *output* token.
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
    bool outputs = false;  // one row per output token instead of one per token
    Memory memory;

    float* row(int64_t r) const { return memory.as<float>() + r * width; }
};

constexpr int kMaxAxes = 4;  // columns of StepPlaces::rotary

struct Rope {
    bool neox = false;  // rotates pairs (i, i + n_rot / 2) instead of (2i, 2i + 1)
    int n_rot = 0;
    float magnitude = 1.0f;
    int every = 1;                    // positions are rounded down to a multiple of this
    std::vector<double> frequencies;  // [n_rot / 2]
    std::vector<int> axes;            // [n_rot / 2], columns of StepPlaces::rotary; empty: positions

    bool operator==(const Rope&) const = default;
};

// Where the tokens of a step are, in addition to their positions; see Batch in backends/base.py.
struct StepPlaces {
    const int32_t* rotary = nullptr;  // [n_tokens][n_axes]; null: positions
    int n_axes = 0;
    const int32_t* groups = nullptr;  // [n_tokens][2]; null: each token is a group of its own
};

// Adjacent tokens of one sequence. end: one past the last position of that sequence in this step.
struct TokenTile {
    int first = 0;
    int count = 0;
    int sequence = 0;
    int end = 0;
};

constexpr int kSavedTokens = 17;  // the last tokens of a sequence in a step, whose states can be saved

// The tokens of one step, and values computed from them once for all layers.
struct StepTokens {
    int n_tokens = 0;
    int n_outputs = 0;
    int max_kv_blocks = 0;
    std::vector<int32_t> tokens, positions, sequences, kv_blocks, outputs;
    std::vector<int32_t>
        groups;  // per token: the first position of its group, one past the last; empty: none
    std::vector<TokenTile> stretches;  // all tokens, split at each change of sequence
    int n_positions = 0;               // one past the largest position
    std::vector<uint8_t> thresholded;  // per token: whether its small values count as zero
    std::vector<int32_t> states;       // per sequence: slot of its state; -1: the sequence begins
    std::vector<int32_t> saves;        // per token: slot that receives the state after it; -1: none
    std::vector<float> scales;         // [sequences][n_adapters]; 0: the sequence does not use the adapter
    int n_adapters = 0;
    // Rows of images, [tokens of images][width], and per token the row that replaces its embedding; -1: none.
    // Empty: no token of the step belongs to an image.
    std::vector<float> image_rows;
    std::vector<int32_t> image_row_of;
    std::vector<std::vector<float>> rope_cos, rope_sin;  // per RoPE of the plan: [n_tokens][n_rot / 2]

    int rows(const Buffer& buffer) const { return buffer.outputs ? n_outputs : n_tokens; }
    // of_each: a flag per token; null: no token is thresholded.
    void set_thresholded(const uint8_t* of_each) {
        if (of_each)
            std::copy_n(of_each, n_tokens, thresholded.begin());
        else
            std::fill_n(thresholded.begin(), n_tokens, uint8_t(0));
    }
};

// Rows that replace the embeddings of n tokens; places: the tokens, rising. See base.ImageRows.
struct ImageRows {
    const int32_t* places = nullptr;
    const float* rows = nullptr;  // [n][Limits::image_width]
    int n = 0;
};

struct Norm {
    bool layer = false;  // LayerNorm instead of RMSNorm
    std::vector<float> weight;
    std::vector<float> bias;  // empty: none
    float eps = 0.0f;

    void apply(const Kernels& kernels, const float* x, int64_t n, float* out) const;
};

// Upper bounds of the memory that an operation needs in addition to its buffers.
struct Needs {
    size_t result_floats = 0;  // per worker, for the results of one chunk
    int64_t input_width = 0;   // widest input of a matrix product
    size_t shared_bytes = 0;   // per plan, kept from one phase of the operation to the next
    size_t private_bytes = 0;  // per worker, in `inputs`, if not derived from `input_width`
};

constexpr int kPrivateInputs = 8;  // with at most this many tokens, each worker quantises the inputs itself

// Counts of the FFN operations of a step; see StepStats in backends/base.py.
struct FfnCounts {
    int64_t selected = 0, active = 0, gate_rows = 0, up_rows = 0, down_rows = 0;
    int64_t left_out = 0;  // bytes of channels that were skipped because their inputs are zero
};

class FfnCounters {
  public:
    // Most operations never count. Leaving their cache lines untouched saves a fetch in each step.
    void reset() {
        if (!counted_.load(std::memory_order_relaxed)) return;
        for (Line& line : lines_)
            for (auto& value : line.values) value.store(0, std::memory_order_relaxed);
    }
    // thread: the caller's index. Threads use separate cache lines, so that no chunk waits for a line.
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
    std::atomic<bool> counted_{false};  // since construction
    Line lines_[kLines];
};

class Op {
  public:
    virtual ~Op() = default;
    // The number of phases. A phase has at most kMaxChunks chunks, otherwise the step fails: larger
    // operations need larger chunks.
    virtual int n_phases(const StepTokens& step) const = 0;
    virtual int n_chunks(int phase, const StepTokens& step) const = 0;  // 0: the phase is skipped
    // A chunk that takes several milliseconds checks worker.cancelled() about once per millisecond, and may
    // then return without a commit.
    virtual void run(int phase, int chunk, const StepTokens& step, Worker& worker) const = 0;
    virtual Needs needs() const = 0;
    // See `alone` of Job.
    virtual bool alone(int /*phase*/) const { return false; }
    // See Job::prefetch. Most operations read only the output of the previous one.
    virtual bool prefetch(int /*phase*/, int /*chunk*/, int /*piece*/, const StepTokens&) const {
        return false;
    }

    mutable FfnCounters counters;      // of the latest step; the thread that commits a chunk updates them
    FfnCounters* counted = &counters;  // counters to update: a helper operation counts for its parent
};

constexpr int kLogitGroup = 64;  // equals LOGIT_GROUP in backends/base.py

struct LinearPart {
    Matrix weight;
    std::vector<float> bias;  // empty: none
    int out = -1;
    // Buffer for the maximum of each group of kLogitGroup adjacent values of `out`; NaN if a value of the
    // group is not finite. -1: none.
    int largest = -1;
};

// What happens to the result of a matrix product.
struct LinearTail {
    enum Kind { None, Activated, Gated };  // Gated: parts are gate and up, out gets activate(gate) * up
    Kind kind = None;
    Activation activation = Activation::Relu;
    float threshold = 0.0f;
    // For thresholded tokens: smaller activations, or smaller results, become zero.
    float gate_threshold = 0.0f, value_threshold = 0.0f;

    bool has_thresholds() const { return gate_threshold != 0.0f || value_threshold != 0.0f; }
};

constexpr int kMaxExperts = 1024;  // each expert has at least one chunk of its own
static_assert(kMaxExperts <= kMaxChunks);

// One matrix per expert, and the concatenated biases.
struct ExpertMatrices {
    std::vector<Matrix> weights;             // use `of` to get a matrix with its address
    std::vector<float> bias;                 // empty: none
    const uint8_t* const* places = nullptr;  // store only: the current address of each expert's bytes
    size_t skipped = 0;                      // bytes at that address before this matrix begins
    Matrix of(int expert) const {
        Matrix matrix = weights[size_t(expert)];
        if (places) matrix.data = places[expert] + skipped;
        return matrix;
    }
    const float* bias_of(int expert, int64_t rows) const {
        return bias.empty() ? nullptr : bias.data() + expert * rows;
    }
};

// The recurrent states of sequences for one operation, one slot each. A step never writes a slot that it
// reads, because a chunk of it, or a whole cancelled step, may run again.
struct StateSlots {
    float* data = nullptr;
    int64_t size = 0;  // floats per slot

    float* slot(int i) const { return data + i * size; }
};

class Plan {
  public:
    Plan(const Kernels& kernels, int max_tokens, int max_kv_blocks, std::shared_ptr<Runtime> runtime);
    ~Plan();  // waits for stragglers that still read the plan

    int add_buffer(int64_t width, bool outputs);
    int add_rope(Rope rope);

    void add(std::unique_ptr<Op> op) { ops_.push_back(std::move(op)); }

    // Limits that a batch must respect. Each added operation may narrow them. 0: no limit.
    struct Limits {
        int n_kv_blocks = 0;      // of the KV cache
        int64_t n_vocab = 0;      // tokens
        int64_t n_positions = 0;  // learned position embeddings
        int n_states = 0;         // slots for recurrent states
        int n_adapters = 0;       // columns of `scales`
        int n_axes = 0;           // columns of StepPlaces::rotary that a RoPE reads
        bool needs_groups = false;
        int n_joined = 1;         // tokens of the step up to each output, which it joins
        int64_t image_width = 0;  // of the rows of images; 0: no operation reads them
    };
    Limits& limits() { return limits_; }
    const Limits& limits() const { return limits_; }

    // Call after the last operation. Reserves the memory that the operations need.
    void finish();

    // Run one step. Arrays are as in backends/base.py. thresholded: null for none. states, saves: null if no
    // operation has a state. scales: [n_sequences][limits().n_adapters], null if that is 0. The caller must
    // have checked every index. images: null for none. poll: null, or a function that this thread calls every
    // 10 ms to ask whether to cancel. Returns false if the step was cancelled. Buffers, the cache at the
    // step's positions and the saved states are then undefined; the next step runs normally. Throws
    // std::logic_error, before any computation, if an operation breaks its contract (see Op).
    bool run(const Poll* poll, const int32_t* tokens, const int32_t* positions, const int32_t* sequences,
             int n_tokens, const int32_t* kv_blocks, int n_sequences, int max_kv_blocks,
             const int32_t* outputs, int n_outputs, const uint8_t* thresholded = nullptr,
             const int32_t* states = nullptr, const int32_t* saves = nullptr, const float* scales = nullptr,
             const StepPlaces& places = {}, const ImageRows* images = nullptr);
    // Run the operations [first_op, last_op) on rows that the caller wrote into their buffers. These
    // operations read neither tokens nor the cache, and precede any that selects outputs. thresholded: as for
    // `run`. n_threads: threads of the pool to use; 0: all.
    bool run_rows(int first_op, int last_op, int n_tokens, const uint8_t* thresholded = nullptr,
                  int n_threads = 0);
    // End the current step, from a phase of a single thread: `run` throws `failure`.
    void fail(std::exception_ptr failure) const {
        failure_ = std::move(failure);
        cancel_.store(true);
    }
    // Cancel the current step, from any thread or a signal handler. Without a step this has no effect.
    void cancel() { cancel_.store(true); }

    const Buffer& buffer(int id) const { return *buffers_[id]; }
    int n_buffers() const { return int(buffers_.size()); }
    const Kernels& kernels() const { return kernels_; }
    int max_tokens() const { return max_tokens_; }
    int max_kv_blocks() const { return max_kv_blocks_; }
    int n_threads() const { return runtime_->n_threads(); }
    size_t bytes() const;      // buffers and the runtime's scratch memory
    size_t own_bytes() const;  // without the runtime's scratch memory
    const Rope& rope(int id) const { return ropes_[id]; }
    int n_ropes() const { return int(ropes_.size()); }
    int n_ops() const { return int(ops_.size()); }
    const Op& op(int i) const { return *ops_[i]; }
    // Seconds of each operation in the latest step; zeros if it was cancelled.
    std::vector<double> op_seconds() const;
    uint8_t* shared() const { return runtime_->shared(); }

  private:
    class Step;
    bool execute(const Runtime::Turn& turn, const Poll* poll, int slot, int first_op, int last_op,
                 int n_threads);

    const Kernels& kernels_;
    const int max_tokens_;
    const int max_kv_blocks_;
    Limits limits_;
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::vector<Rope> ropes_;
    std::vector<std::unique_ptr<Op>> ops_;
    std::vector<std::unique_ptr<Step>> steps_;  // one per slot of the thread pool
    const Step* latest_ = nullptr;
    mutable std::atomic<bool> cancel_{false};  // the current step's
    mutable std::exception_ptr failure_;       // the current step's
    const std::shared_ptr<Runtime> runtime_;
};

// ops/rope.cpp: rotate one head. cos and sin are [n_rot / 2].
void rotate_head(const Rope& rope, const float* cos, const float* sin, int head_dim, const float* x,
                 float* out);

// operations.Threshold. NaN is kept.
inline void zero_small(float threshold, const float* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i++) out[i] = std::fabs(x[i]) < threshold ? 0.0f : x[i];
}

inline int ceil_div(int64_t a, int64_t b) {
    return int((a + b - 1) / b);
}

// Rows [first, last) of chunk `chunk` out of `n_chunks`.
struct RowRange {
    int first, last;
    RowRange(int chunk, int n_chunks, int n_rows)
        : first(int(int64_t(n_rows) * chunk / n_chunks)),
          last(int(int64_t(n_rows) * (chunk + 1) / n_chunks)) {}
    int count() const { return last - first; }
};

}  // namespace hotset
