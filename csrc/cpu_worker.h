// The CPU worker: computes the neurons or experts of a layer that a device lacks.
//
// For each such layer the device submits the FFN's input and the predicted neurons; the CPU computes the cold
// ones and returns their sum. They exchange data through one block of host memory with two flags per layer. A
// device can write and wait for these by itself, in the middle of a captured graph:
//
//     device                                    CPU (the worker thread)
//     ------                                    -----------------------
//     writes h and, with a predictor, bits
//     request = 1  ---------------------------> waits for request == 1
//     computes the hot neurons                  request = 0
//                                               computes the cold neurons, writes out
//     waits for done == 1  <------------------- done = 1
//     done = 0
//     reads out, adds it to its own sum
//
// In an MoE layer the device submits the expert ids of each token; an expert that the device computes is -1 -
// id. `out` then has one row per expert of a token, neither weighted nor summed. The device adds these and
// its own in the route's order.
//
// Both flag values are constants, and after a layer both flags are zero: a graph can be replayed unchanged.
// Rows of a store (csrc/store/store.h) are fetched by the plan as usual, but only the cold ones that are
// needed.
//
// A native thread serves the requests between `begin` and `end` of a step, without Python and its lock. It
// computes with the runtime's thread pool, and so takes turns with the other plans of the runtime.
//
// Poison: if either side fails, no thread waits forever. `poison` sets every `done` and cancels the layer in
// progress. Until the step ends, further requests are then answered at once with undefined results; `end`
// returns the reason. A watchdog thread poisons a step if a layer takes too long or the device submits
// nothing.
//
// A forked child has neither thread; it starts its own with its first step.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "plan.h"
#include "thread_choice.h"

namespace hotset {

// Counts of a layer since the step began.
struct CpuWorkerCounts {
    int64_t requests = 0;
    FfnCounts ffn;
    double seconds = 0.0;  // from seeing a request to answering it
};

// How the worker counts an operation. Gates: it computes only gates, so its rows are gate rows. OfFiring: it
// computes the neurons that fire, whose selection was already counted.
enum class Counted : uint8_t { All, Gates, OfFiring };

// One layer: the operations [first_op, end_op) of the plan, which read h from buffer x and write their result
// to `sum`.
struct CpuWorkerLayer {
    int number = 0;  // in the model
    int first_op = 0, end_op = 0;
    std::vector<Counted> counted;  // per operation
    int x = -1, sum = -1;
    // Split neurons. cold: bit i % 8 of byte i / 8 for neuron i. scores: the buffer that marks wanted
    // neurons. predicted: the device submits bits; otherwise all cold neurons are computed. neuron_bytes:
    // bytes of one neuron's weights.
    int64_t n_neurons = 0, neuron_bytes = 0;
    std::vector<uint8_t> cold;
    bool predicted = false;
    int scores = -1;
    // MoE layer. n_used: experts per token. route: buffer of one expert id and a weight of 1. A row of the
    // plan is one expert of a token. The product with the weight is exact, and so is the sum of one row,
    // except for the sign of a zero, which later sums that begin with 0 never show.
    int n_used = 0, n_expert = 0;
    int route = -1;
};

class CpuWorkerPlan {
  public:
    static constexpr int kFlagBytes = 4;

    // The argument of a host function in a device's stream.
    struct HostCall {
        CpuWorkerPlan* plan;
        int layer;
    };

    // plan: not finished; its owner must outlive this object. The worker computes up to the plan's maximum of
    // rows at a time; in an MoE layer each expert of a token is a row. width: of h and out. timeout_ns:
    // longest time for a layer before the step fails.
    CpuWorkerPlan(Plan& plan, int64_t width, int max_tokens, int64_t timeout_ns);
    ~CpuWorkerPlan();

    // Return the layer's index.
    int add_layer(CpuWorkerLayer layer);
    void start();  // call after the last layer; throws ThreadError

    // ---- the block of memory, initially zero
    uint8_t* memory() const { return memory_; }  // page-aligned
    size_t memory_bytes() const { return memory_bytes_; }
    size_t bytes() const { return plan_.own_bytes() + memory_bytes_; }  // without the runtime
    size_t h_offset() const { return h_offset_; }                       // float [max_tokens][width]
    size_t out_offset() const { return out_offset_; }                   // float [max_tokens][answer_width]
    size_t bits_offset() const { return bits_offset_; }                 // [max_tokens][request_bytes]
    size_t request_offset() const { return 0; }                         // int32 [n_layers]
    size_t done_offset() const { return done_offset_; }                 // int32 [n_layers]

    int n_layers() const { return int(layers_.size()); }
    int64_t width() const { return width_; }
    int max_tokens() const { return max_tokens_; }
    // Per token: the bytes that the device submits, a bit per neuron or an int32 per expert; and the floats
    // of the answer.
    int64_t request_bytes(int layer) const;
    int64_t answer_width(int layer) const;
    HostCall* host_call(int layer) { return &host_calls_[layer]; }

    // ---- a step

    // Serve requests until `end`. thresholded: per token, whether its small values count as zero; null: no
    // token is thresholded. Returns an empty string, or the reason why the step cannot begin.
    std::string begin(int n_tokens, const uint8_t* thresholded = nullptr);
    // End the step in any state. Returns the reason of a failure, or an empty string. The device must not
    // touch the flags afterwards.
    std::string end();
    void poison(const std::string& reason);
    std::string poisoned() const;  // the reason, or an empty string
    // Poison permanently and end the threads. Safe to call twice, and while others wait.
    void close();

    // The device's side of the flags, for devices that run on this processor.
    void submit(int layer);
    enum class Collected { Done, Poisoned, TimedOut };
    Collected collect(int layer, int64_t timeout_ns);  // resets `done` if it was set

    // Counts of the latest step, valid after it has ended.
    const CpuWorkerCounts& counts(int layer) const { return layers_[layer].counts; }
    // The experts that the device submitted for an MoE layer, [n_tokens * n_used]; empty: none.
    const std::vector<int32_t>& route(int layer) const { return layers_[layer].requested_route; }

  private:
    struct Layer : CpuWorkerLayer {
        std::vector<int32_t> requested_route;
        CpuWorkerCounts counts;
    };

    using Flag = std::atomic<int32_t>;
    static_assert(sizeof(Flag) == kFlagBytes && Flag::is_always_lock_free);

    Flag& request(int layer) const { return reinterpret_cast<Flag*>(memory_)[layer]; }
    Flag& done(int layer) const { return reinterpret_cast<Flag*>(memory_ + done_offset_)[layer]; }
    float* h() const { return reinterpret_cast<float*>(memory_ + h_offset_); }
    float* out() const { return reinterpret_cast<float*>(memory_ + out_offset_); }
    // The lock, the threads, and the fields that the lock protects, of one process.
    struct State {
        const uint64_t born = n_forks();
        std::mutex mutex;
        std::condition_variable changed;
        bool open = false, serving = false, closed = false;
        std::string reason;
        std::thread worker, watchdog;
    };
    State& state() const;
    void start_threads(State& state);
    void close(State& state);
    void serve(State& state);
    void serve_step();
    int next_request(int from) const;
    void compute(Layer& layer);
    void compute_experts(Layer& layer);
    void count(Layer& layer);
    int64_t expand(const Layer& layer, int n_tokens);
    void watch(State& state);
    void poison_locked(State& state, const std::string& reason);

    const int64_t width_;
    const int max_tokens_, max_rows_;
    const int64_t timeout_ns_;
    std::vector<Layer> layers_;
    std::vector<HostCall> host_calls_;
    ThreadChoice thread_choice_;            // for split neurons
    std::vector<int32_t> misses_;           // positions in a route, by expert
    std::vector<uint8_t> thresholded_;      // per token of the step
    std::vector<uint8_t> row_thresholded_;  // per computed row
    Memory allocation_;
    uint8_t* memory_ = nullptr;
    size_t memory_bytes_ = 0, done_offset_ = 0, h_offset_ = 0, bits_offset_ = 0, out_offset_ = 0;
    Plan& plan_;

    mutable State* state_;  // of this process; a parent's state is left untouched
    bool started_ = false;
    std::atomic<bool> in_step_{false}, poisoned_{false};
    std::atomic<int> n_tokens_{0};
    std::atomic<int> computing_{-1};       // index of the layer that is being computed, or -1
    std::atomic<int64_t> progress_ns_{0};  // time of the latest request or answer
};

// Host functions for a device's stream, with CUDA's signature. The argument is a CpuWorkerPlan::HostCall.
void cpu_worker_submit_on_stream(void* call);
void cpu_worker_collect_on_stream(void* call);

}  // namespace hotset
