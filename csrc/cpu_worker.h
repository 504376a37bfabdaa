// The CPU's half of layers whose neurons are split between a device and the CPU.
//
// For each such layer the device hands over what the FFN reads and which neurons a predictor names; the CPU
// computes those that are cold, and hands back what they add. The exchange is one block of host memory and
// two flags a layer in it, which a device can write and wait for by itself, in the middle of a captured
// graph:
//
//     device                                    CPU (the serving thread)
//     ------                                    ------------------------
//     writes h and, with a predictor, bits
//     request = 1  ---------------------------> waits for request == 1
//     computes the hot half                     request = 0
//                                               computes the cold half, writes out
//     waits for done == 1  <------------------- done = 1
//     done = 0
//     reads out, adds it to its own
//
// In an MoE model's layer the device hands over the ids of each token's experts, those that it computes
// itself
// as -1 - id; out is then a row for each of a token's experts, neither weighed nor summed: the device adds
// its own and these in the route's order.
//
// Both values are constants, and after a layer both flags are zero again: a graph can be replayed as it is.
// Rows that come from a store (csrc/store/store.h) are fetched by the plan, as in any: those that are cold
// and wanted, of these alone.
//
// A native thread serves the requests, between `begin` and `end` of a step; no Python, hence no lock of it,
// is involved. It computes with the runtime's thread pool, and so takes turns with the plans of the same
// runtime.
//
// Poison: whatever fails on either side, no thread waits for ever. `poison` sets every `done`, cancels the
// layer that is being computed, and from then on a request is answered at once, with anything, until the step
// ends; `end` returns why. A second thread watches the time, and poisons a step in which a layer takes too
// long or the device falls silent.
//
// A child of the process has neither thread; it starts its own with its first step.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "plan.h"
#include "thread_choice.h"

namespace hotset {

// Of a layer since the step began.
struct CpuWorkerCounts {
    int64_t requests = 0;
    FfnCounts ffn;
    double seconds = 0.0;  // from seeing a request to answering it
};

// What the counts of an operation say: of gates alone it counts what is wanted, and of what is made of those
// that fire all but that.
enum class Counted : uint8_t { All, Gates, OfFiring };

// One layer: operations [first_op, end_op) of the plan, which read h in buffer x and leave the answer in
// `sum`.
struct CpuWorkerLayer {
    int number = 0;  // in the model
    int first_op = 0, end_op = 0;
    std::vector<Counted> counted;  // of each operation
    int x = -1, sum = -1;
    // Split neurons: which are cold, bit i % 8 of byte i / 8. scores: buffer that says which are wanted.
    // predicted: the device hands over bits; else all cold neurons are computed. neuron_bytes: weights of
    // one.
    int64_t n_neurons = 0, neuron_bytes = 0;
    std::vector<uint8_t> cold;
    bool predicted = false;
    int scores = -1;
    // In an MoE model: experts of a token. route: buffer of one expert of a token, its id and a weight of
    // 1; a
    // row of the plan is one expert of a token, so products with the weight are exact, and a sum of one is
    // that one (but for the sign of a zero, which no sum that begins with 0 ever shows).
    int n_used = 0, n_expert = 0;
    int route = -1;
};

class CpuWorkerPlan {
  public:
    static constexpr int kFlagBytes = 4;

    // What a host function of a device's stream gets as its argument.
    struct HostCall {
        CpuWorkerPlan* plan;
        int layer;
    };

    // plan: not finished; its owner keeps it until this is gone. Its rows are computed at a time; an
    // expert of a token is a row. width: of h and out. timeout_ns: how long a layer may take before the step
    // is given up.
    CpuWorkerPlan(Plan& plan, int64_t width, int max_tokens, int64_t timeout_ns);
    ~CpuWorkerPlan();

    // Returns the layer's index here.
    int add_layer(CpuWorkerLayer layer);
    void start();  // after the last layer; throws ThreadError

    // ---- the block of memory, all zero at first
    uint8_t* memory() const { return memory_; }  // page-aligned
    size_t memory_bytes() const { return memory_bytes_; }
    size_t bytes() const { return plan_.own_bytes() + memory_bytes_; }  // without the runtime's
    size_t h_offset() const { return h_offset_; }                       // float [max_tokens][width]
    size_t out_offset() const { return out_offset_; }                   // float [max_tokens][answer_width]
    size_t bits_offset() const { return bits_offset_; }                 // [max_tokens][asked_bytes]
    size_t request_offset() const { return 0; }                         // int32 [n_layers]
    size_t done_offset() const { return done_offset_; }                 // int32 [n_layers]

    int n_layers() const { return int(layers_.size()); }
    int64_t width() const { return width_; }
    int max_tokens() const { return max_tokens_; }
    // Of a token: what the device says of its neurons, a bit for each, or of its experts, an int32 for each;
    // and floats of the answer.
    int64_t asked_bytes(int layer) const;
    int64_t answer_width(int layer) const;
    HostCall* host_call(int layer) { return &host_calls_[layer]; }

    // ---- a step

    // Between begin and end requests are served. thresholded: of each token, whether small values count as
    // zero; null: no token. Empty string: done; else why it cannot be.
    std::string begin(int n_tokens, const uint8_t* thresholded = nullptr);
    // Ends the step, whatever its state; why it failed, or an empty string. Nothing may touch the flags on
    // the device's side any more.
    std::string end();
    void poison(const std::string& reason);
    std::string poisoned() const;  // the reason, or empty
    // Poison for good, and the threads end; safe to call twice and while others wait.
    void close();

    // The device's side of the flags, for a device that is this processor.
    void post(int layer);
    enum class Wait { Done, Poisoned, TimedOut };
    Wait wait(int layer, int64_t timeout_ns);  // resets `done` when it was set

    // Of the latest step; only after it has ended.
    const CpuWorkerCounts& counts(int layer) const { return layers_[layer].counts; }
    // What the device asked for of an MoE model's layer, [n_tokens * n_used]; empty where it did not ask.
    const std::vector<int32_t>& route(int layer) const { return layers_[layer].asked_route; }

  private:
    struct Layer : CpuWorkerLayer {
        std::vector<int32_t> asked_route;
        CpuWorkerCounts counts;
    };

    using Flag = std::atomic<int32_t>;
    static_assert(sizeof(Flag) == kFlagBytes && Flag::is_always_lock_free);

    Flag& request(int layer) const { return reinterpret_cast<Flag*>(memory_)[layer]; }
    Flag& done(int layer) const { return reinterpret_cast<Flag*>(memory_ + done_offset_)[layer]; }
    float* h() const { return reinterpret_cast<float*>(memory_ + h_offset_); }
    float* out() const { return reinterpret_cast<float*>(memory_ + out_offset_); }
    // Lock, threads, and what the lock protects.
    struct Service {
        const uint64_t born = n_forks();
        std::mutex mutex;
        std::condition_variable changed;
        bool open = false, serving = false, closed = false;
        std::string reason;
        std::thread server, watchdog;
    };
    Service& service() const;
    void start_threads(Service& service);
    void close(Service& service);
    void serve(Service& service);
    void serve_step();
    int next_request(int from) const;
    void compute(Layer& layer);
    void compute_experts(Layer& layer);
    void count(Layer& layer);
    int64_t expand(const Layer& layer, int n_tokens);
    void watch(Service& service);
    void poison_locked(Service& service, const std::string& reason);

    const int64_t width_;
    const int max_tokens_, max_rows_;
    const int64_t timeout_ns_;
    std::vector<Layer> layers_;
    std::vector<HostCall> host_calls_;
    ThreadChoice thread_choice_;   // for split neurons
    std::vector<int32_t> misses_;  // places in a route, by expert
    std::vector<uint8_t> thresholded_,
        row_thresholded_;  // of the step's tokens, and of the rows that are computed
    Memory allocation_;
    uint8_t* memory_ = nullptr;
    size_t memory_bytes_ = 0, done_offset_ = 0, h_offset_ = 0, bits_offset_ = 0, out_offset_ = 0;
    Plan& plan_;

    mutable Service* service_;  // of this process; a parent's is left as it is
    bool started_ = false;
    std::atomic<bool> in_step_{false}, poisoned_{false};
    std::atomic<int> n_tokens_{0};
    std::atomic<int> computing_{-1};       // layer whose request is being served
    std::atomic<int64_t> progress_ns_{0};  // when a request or an answer came last
};

// Host functions for a device's stream, as CUDA takes them; the argument is a CpuWorkerPlan::HostCall.
void cpu_worker_submit_on_stream(void* call);
void cpu_worker_wait_on_stream(void* call);

}  // namespace hotset
