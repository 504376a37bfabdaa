#include "cpu_worker.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <exception>
#include <limits>
#include <sstream>
#include <utility>

namespace hotset {
namespace {

constexpr size_t kPageBytes = 4096;  // granularity at which a device maps memory
constexpr size_t kLineBytes = 64;
constexpr int64_t kSpin_ns = 20'000;  // before a waiting thread yields its core
constexpr int64_t kSpinBeforeSleep_ns = 2'000'000;
constexpr auto kNap = std::chrono::microseconds(50);
// A device without requests may be compiling its kernels: it gets many times a layer's timeout.
constexpr int kSilentTimeouts = 10;
constexpr int kTurns = 4;  // periods of the watchdog per timeout

// Scores of eight neurons by their bits: 1 for wanted, -1 for not.
struct ScoreTable {
    float scores[256][8];
    constexpr ScoreTable() : scores() {
        for (int byte = 0; byte < 256; byte++)
            for (int bit = 0; bit < 8; bit++) scores[byte][bit] = byte >> bit & 1 ? 1.0f : -1.0f;
    }
};
constexpr ScoreTable kScoreTable;

size_t round_up(size_t bytes, size_t to) {
    return (bytes + to - 1) / to * to;
}

std::string seconds(int64_t ns) {
    std::ostringstream text;
    text << double(ns) * 1e-9 << " s";
    return text.str();
}

// Wait one turn for a flag: spin, then yield, then sleep, depending on the time since `start_ns`.
void pause(int64_t start_ns, int turn) {
    relax();
    if (turn % 32) return;
    const int64_t waited = now_ns() - start_ns;
    if (waited > kSpinBeforeSleep_ns)
        std::this_thread::sleep_for(kNap);
    else if (waited > kSpin_ns)
        std::this_thread::yield();
}

}  // namespace

CpuWorkerPlan::CpuWorkerPlan(Plan& plan, int64_t width, int max_tokens, int64_t timeout_ns)
    : width_(width),
      max_tokens_(max_tokens),
      max_rows_(plan.max_tokens()),
      timeout_ns_(timeout_ns),
      thread_choice_(plan.n_threads()),
      plan_(plan),
      state_(new State) {
    thresholded_.resize(max_tokens_);
    row_thresholded_.resize(max_rows_);
}

CpuWorkerPlan::~CpuWorkerPlan() {
    if (state_->born != n_forks()) return;  // the threads, and perhaps the lock, belong to the parent
    close(*state_);
    delete state_;
}

// After a fork the parent's threads do not exist, and one of them may hold the lock. The inherited state is
// left untouched. A step that the parent had open is not open here.
CpuWorkerPlan::State& CpuWorkerPlan::state() const {
    if (state_->born != n_forks()) {
        State* inherited = state_;
        state_ = new State;
        state_->closed = inherited->closed;
    }
    return *state_;
}

int CpuWorkerPlan::add_layer(CpuWorkerLayer layer) {
    layers_.emplace_back().CpuWorkerLayer::operator=(std::move(layer));
    return n_layers() - 1;
}

int64_t CpuWorkerPlan::request_bytes(int layer) const {
    const Layer& of = layers_[layer];
    return of.n_used ? of.n_used * int64_t(sizeof(int32_t)) : ceil_div(of.n_neurons, 8);
}

int64_t CpuWorkerPlan::answer_width(int layer) const {
    return width_ * std::max(layers_[layer].n_used, 1);
}

void CpuWorkerPlan::start() {
    plan_.finish();
    int64_t requested = 0, answered = 0;
    for (int i = 0; i < n_layers(); i++) {
        requested = std::max(requested, request_bytes(i));
        answered = std::max(answered, answer_width(i));
        layers_[i].requested_route.reserve(size_t(max_tokens_) * layers_[i].n_used);
        misses_.reserve(size_t(max_tokens_) * layers_[i].n_used);
    }
    const size_t tokens = size_t(max_tokens_);
    done_offset_ = round_up(layers_.size() * kFlagBytes, kLineBytes);
    h_offset_ = 2 * done_offset_;
    bits_offset_ = round_up(h_offset_ + tokens * width_ * sizeof(float), kLineBytes);
    out_offset_ = round_up(bits_offset_ + tokens * requested, kLineBytes);
    memory_bytes_ = round_up(out_offset_ + tokens * answered * sizeof(float), kPageBytes);
    allocation_ = Memory(memory_bytes_ + kPageBytes);
    memory_ =
        reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(allocation_.data()), kPageBytes));
    std::memset(memory_, 0, memory_bytes_);
    for (int i = 0; i < n_layers(); i++) host_calls_.push_back({this, i});
    started_ = true;
    start_threads(state());
}

void CpuWorkerPlan::start_threads(State& state) {
    try {
        state.worker =
            start_thread("the thread of the CPU worker cannot be started", [this, &state] { serve(state); });
        state.watchdog = start_thread("the watchdog thread of the CPU worker cannot be started",
                                      [this, &state] { watch(state); });
    } catch (...) {
        close(state);
        throw;
    }
}

// ---- a step, from the device's side

std::string CpuWorkerPlan::begin(int n_tokens, const uint8_t* thresholded) {
    State& s = state();
    if (!s.closed && !s.worker.joinable()) {  // in a forked child
        in_step_.store(false);
        start_threads(s);
    }
    std::unique_lock lock(s.mutex);
    if (s.closed) return "the CPU worker was closed";
    if (s.open) return "the CPU worker is in the middle of a step";
    const auto limit = std::chrono::nanoseconds(timeout_ns_);
    if (!s.changed.wait_for(lock, limit, [&] { return !s.serving || s.closed; }))
        return "the CPU worker is still busy with a layer of the previous step";
    if (s.closed) return "the CPU worker was closed";
    for (int i = 0; i < n_layers(); i++) {
        request(i).store(0, std::memory_order_relaxed);
        done(i).store(0, std::memory_order_relaxed);
        layers_[i].counts = {};
        layers_[i].requested_route.clear();
    }
    s.reason.clear();
    poisoned_.store(false);
    n_tokens_.store(n_tokens);
    if (thresholded)
        std::copy_n(thresholded, n_tokens, thresholded_.begin());
    else
        std::fill(thresholded_.begin(), thresholded_.end(), uint8_t(0));
    computing_.store(-1);
    progress_ns_.store(now_ns());
    in_step_.store(true);
    s.open = s.serving = true;
    s.changed.notify_all();
    return {};
}

std::string CpuWorkerPlan::end() {
    State& s = state();
    std::unique_lock lock(s.mutex);
    if (!s.open) return s.closed ? "the CPU worker was closed" : "there is no step to end";
    for (int i = 0; i < n_layers() && s.reason.empty(); i++)
        if (request(i).load() || done(i).load() || computing_.load() == i)
            poison_locked(s, "the cold neurons of layer " + std::to_string(layers_[i].number) +
                                 " were submitted and not collected");
    in_step_.store(false);
    s.open = false;
    s.changed.notify_all();
    // If the worker is stuck in a layer, the next step waits for it instead of this one.
    if (s.reason.empty()) s.changed.wait(lock, [&] { return !s.serving; });
    return s.reason;
}

void CpuWorkerPlan::poison(const std::string& reason) {
    State& s = state();
    std::scoped_lock lock(s.mutex);
    poison_locked(s, reason);
}

void CpuWorkerPlan::poison_locked(State& state, const std::string& reason) {
    if (state.reason.empty()) state.reason = reason;
    poisoned_.store(true);
    plan_.cancel();
    for (int i = 0; i < n_layers(); i++) done(i).store(1, std::memory_order_release);
}

std::string CpuWorkerPlan::poisoned() const {
    State& s = state();
    std::scoped_lock lock(s.mutex);
    return s.reason;
}

void CpuWorkerPlan::close() {
    close(state());
}

void CpuWorkerPlan::close(State& s) {
    {
        std::scoped_lock lock(s.mutex);
        s.closed = true;
        if (started_) poison_locked(s, "the CPU worker was closed");
        in_step_.store(false);
        s.open = false;
        s.changed.notify_all();
    }
    if (s.worker.joinable()) s.worker.join();
    if (s.watchdog.joinable()) s.watchdog.join();
}

void CpuWorkerPlan::submit(int layer) {
    request(layer).store(1, std::memory_order_release);
}

CpuWorkerPlan::Collected CpuWorkerPlan::collect(int layer, int64_t timeout_ns) {
    const int64_t start = now_ns();
    for (int turn = 1;; turn++) {
        if (done(layer).load(std::memory_order_acquire)) {
            done(layer).store(0, std::memory_order_relaxed);
            return poisoned_.load() ? Collected::Poisoned : Collected::Done;
        }
        if (poisoned_.load()) return Collected::Poisoned;
        pause(start, turn);
        if (turn % 32 == 0 && now_ns() - start > timeout_ns) return Collected::TimedOut;
    }
}

void cpu_worker_submit_on_stream(void* call) {
    const auto& [plan, layer] = *static_cast<CpuWorkerPlan::HostCall*>(call);
    plan->submit(layer);
}

void cpu_worker_collect_on_stream(void* call) {
    const auto& [plan, layer] = *static_cast<CpuWorkerPlan::HostCall*>(call);
    plan->collect(layer, INT64_MAX);  // the watchdog ends the wait
}

// ---- the worker thread

void CpuWorkerPlan::serve(State& s) {
    for (;;) {
        {
            std::unique_lock lock(s.mutex);
            s.changed.wait(lock, [&] { return s.serving || s.closed; });
            if (s.closed) return;
        }
        serve_step();
        std::scoped_lock lock(s.mutex);
        s.serving = false;
        s.changed.notify_all();
    }
}

void CpuWorkerPlan::serve_step() {
    int next = 0, turn = 1;
    int64_t start = now_ns();
    while (in_step_.load(std::memory_order_acquire)) {
        const int i = next_request(next);
        if (i < 0) {
            pause(start, turn++);
            continue;
        }
        start = now_ns();
        progress_ns_.store(start);
        computing_.store(i);
        request(i).store(0, std::memory_order_relaxed);
        try {
            if (!poisoned_.load()) compute(layers_[i]);
        } catch (const std::exception& error) {
            poison("the CPU worker's computation of layer " + std::to_string(layers_[i].number) +
                   " failed: " + error.what());
        }
        const int64_t end = now_ns();
        layers_[i].counts.seconds += double(end - start) * 1e-9;
        progress_ns_.store(end);
        computing_.store(-1);
        done(i).store(1, std::memory_order_release);
        next = (i + 1) % n_layers();
        start = end, turn = 1;
    }
}

// Find the next request. A device submits layers in order, but may skip some.
int CpuWorkerPlan::next_request(int from) const {
    for (int i = from; i < n_layers(); i++)
        if (request(i).load(std::memory_order_acquire)) return i;
    for (int i = 0; i < from; i++)
        if (request(i).load(std::memory_order_acquire)) return i;
    return -1;
}

void CpuWorkerPlan::compute(Layer& layer) {
    const int n = n_tokens_.load();
    layer.counts.requests++;
    if (layer.n_used) return compute_experts(layer);
    const int64_t bytes = expand(layer, n) * layer.neuron_bytes;
    if (!bytes) {  // no neurons to compute
        std::fill_n(out(), n * width_, 0.0f);
        return;
    }
    std::copy_n(h(), n * width_, plan_.buffer(layer.x).row(0));
    const int n_threads = thread_choice_.choose(bytes);
    const int64_t start = now_ns();
    if (!plan_.run_rows(layer.first_op, layer.end_op, n, thresholded_.data(), n_threads))
        return;  // poisoned: the result is not read
    thread_choice_.note(bytes, n_threads, now_ns() - start);
    std::copy_n(plan_.buffer(layer.sum).row(0), n * width_, out());
    count(layer);
}

// Compute the experts that the device lacks, by expert: its rows are read once for all tokens.
void CpuWorkerPlan::compute_experts(Layer& layer) {
    const int32_t* requested = reinterpret_cast<const int32_t*>(memory_ + bits_offset_);
    layer.requested_route.assign(requested, requested + n_tokens_.load() * layer.n_used);
    misses_.clear();
    for (int i = 0; i < int(layer.requested_route.size()); i++) {
        int32_t& id = layer.requested_route[i];
        id = std::clamp(id, -layer.n_expert, layer.n_expert - 1);
        if (id >= 0) misses_.push_back(i);
    }
    std::ranges::stable_sort(misses_, {}, [&](int32_t i) { return layer.requested_route[i]; });
    for (size_t first = 0; first < misses_.size(); first += size_t(max_rows_)) {
        const int n = int(std::min(misses_.size() - first, size_t(max_rows_)));
        const int32_t* places = misses_.data() + first;
        for (int i = 0; i < n; i++) {
            const int64_t token = places[i] / layer.n_used;
            std::copy_n(h() + token * width_, width_, plan_.buffer(layer.x).row(i));
            row_thresholded_[i] = thresholded_[token];
            plan_.buffer(layer.route).row(i)[0] = float(layer.requested_route[places[i]]);
            plan_.buffer(layer.route).row(i)[1] = 1.0f;
        }
        if (!plan_.run_rows(layer.first_op, layer.end_op, n, row_thresholded_.data())) return;  // poisoned
        for (int i = 0; i < n; i++)
            std::copy_n(plan_.buffer(layer.sum).row(i), width_, out() + places[i] * width_);
        count(layer);
    }
}

// Add the latest counts of a layer's operations.
void CpuWorkerPlan::count(Layer& layer) {
    for (int op = layer.first_op; op < layer.end_op; op++) {
        FfnCounts c = plan_.op(op).counters.get();
        const Counted counted = layer.counted[op - layer.first_op];
        if (counted == Counted::Gates) c = {c.selected, 0, c.up_rows, 0, 0, 0};
        if (counted == Counted::OfFiring) c.selected = 0;
        FfnCounts& sum = layer.counts.ffn;
        sum.selected += c.selected, sum.active += c.active, sum.gate_rows += c.gate_rows;
        sum.up_rows += c.up_rows, sum.down_rows += c.down_rows;
    }
}

// Write the scores: positive if a neuron is cold and, with a predictor, predicted. Returns the number of
// positive scores over all tokens.
int64_t CpuWorkerPlan::expand(const Layer& layer, int n_tokens) {
    const int64_t n = layer.n_neurons, n_bytes = ceil_div(n, 8);
    const Buffer& scores = plan_.buffer(layer.scores);
    int64_t n_wanted = 0;
    for (int t = 0; t < n_tokens; t++) {
        const uint8_t* bits = memory_ + bits_offset_ + t * n_bytes;
        float* row = scores.row(t);
        for (int64_t b = 0; b < n_bytes; b++) {
            const uint8_t wanted = layer.predicted ? bits[b] & layer.cold[b] : layer.cold[b];
            n_wanted += std::popcount(wanted);
            std::memcpy(row + b * 8, kScoreTable.scores[wanted],
                        std::min<int64_t>(8, n - b * 8) * sizeof(float));
        }
    }
    return n_wanted;
}

// ---- the watchdog thread

// The watchdog counts its own periods, so that the time in which the process is stopped does not count.
void CpuWorkerPlan::watch(State& s) {
    std::unique_lock lock(s.mutex);
    const auto period = std::chrono::nanoseconds(std::max<int64_t>(timeout_ns_ / kTurns, 100'000));
    int64_t progress = 0;
    int turns = 0;  // without progress
    while (!s.closed) {
        if (!s.open) {
            s.changed.wait(lock, [&] { return s.open || s.closed; });
            continue;
        }
        s.changed.wait_for(lock, period, [&] { return !s.open || s.closed; });
        if (!s.open || s.closed || !s.reason.empty()) continue;
        turns = progress_ns_.load() == progress ? turns + 1 : 0;
        progress = progress_ns_.load();
        const int layer = computing_.load();
        if (layer >= 0 && turns >= kTurns)
            poison_locked(s, "layer " + std::to_string(layers_[layer].number) + " of the CPU worker" +
                                 " took more than " + seconds(timeout_ns_));
        else if (layer < 0 && turns >= kTurns * kSilentTimeouts)
            poison_locked(s, "the device submitted no layer for " + seconds(kSilentTimeouts * timeout_ns_));
    }
}

}  // namespace hotset
