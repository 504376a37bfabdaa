#include "plan.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace hotset {

// The phases and tokens of one step: the contents of a slot of the thread pool.
class Plan::Step : public Job {
  public:
    struct Phase {
        const Op* op;
        int op_index;
        int phase;
        int n_chunks;
    };
    StepTokens tokens;
    std::vector<Phase> phases;
    // The start time of each phase and the end of the last one: [phases + 1].
    mutable std::vector<int64_t> reached_ns;

    int n_phases() const override { return int(phases.size()); }
    int n_chunks(int phase) const override { return phases[phase].n_chunks; }
    void run_chunk(int phase, int chunk, Worker& worker) const override {
        phases[phase].op->run(phases[phase].phase, chunk, tokens, worker);
    }
    bool alone(int phase) const override { return phases[phase].op->alone(phases[phase].phase); }
    bool prefetch(int phase, int chunk, int piece) const override {
        return phases[phase].op->prefetch(phases[phase].phase, chunk, piece, tokens);
    }
    void reached(int phase) const override { reached_ns[phase] = now_ns(); }
};

void Norm::apply(const Kernels& kernels, const float* x, int64_t n, float* out) const {
    if (layer)
        kernels.layer_norm(x, weight.data(), bias.empty() ? nullptr : bias.data(), eps, n, out);
    else
        kernels.rms_norm(x, weight.data(), eps, n, out);
}

Plan::Plan(const Kernels& kernels, int max_tokens, int max_kv_blocks, std::shared_ptr<Runtime> runtime)
    : kernels_(kernels),
      max_tokens_(max_tokens),
      max_kv_blocks_(max_kv_blocks),
      runtime_(std::move(runtime)) {
    for (int i = 0; i < runtime_->n_slots(); i++) steps_.push_back(std::make_unique<Step>());
}

Plan::~Plan() {
    runtime_->leave(this);
}

int Plan::add_buffer(int64_t width, bool outputs) {
    auto buffer = std::make_unique<Buffer>();
    buffer->width = width;
    buffer->outputs = outputs;
    buffer->memory = Memory(size_t(width) * max_tokens_ * sizeof(float));
    buffers_.push_back(std::move(buffer));
    return int(buffers_.size()) - 1;
}

int Plan::add_rope(Rope rope) {
    for (size_t i = 0; i < ropes_.size(); i++)
        if (ropes_[i] == rope) return int(i);
    ropes_.push_back(std::move(rope));
    return int(ropes_.size()) - 1;
}

void Plan::finish() {
    Needs most;
    for (const auto& op : ops_) {
        const Needs need = op->needs();
        most.result_floats = std::max(most.result_floats, need.result_floats);
        most.input_width = std::max(most.input_width, need.input_width);
        most.shared_bytes = std::max(most.shared_bytes, need.shared_bytes);
        most.private_bytes = std::max(most.private_bytes, need.private_bytes);
    }
    const int64_t width = padded(most.input_width);
    runtime_->reserve(
        {kernel_scratch_bytes(width), most.result_floats * sizeof(float),
         std::max<size_t>(size_t(kPrivateInputs) * width * 6, most.private_bytes),  // see InputsMemory
         most.shared_bytes});
    for (const auto& step : steps_) {
        StepTokens& t = step->tokens;
        // Allocate here, so that steps do not allocate.
        for (std::vector<int32_t>* v : {&t.tokens, &t.positions, &t.sequences, &t.outputs})
            v->resize(max_tokens_);
        t.thresholded.resize(max_tokens_);
        t.stretches.reserve(max_tokens_);
        t.rope_cos.resize(ropes_.size());
        t.rope_sin.resize(ropes_.size());
        for (size_t i = 0; i < ropes_.size(); i++) {
            t.rope_cos[i].resize(size_t(max_tokens_) * (ropes_[i].n_rot / 2));
            t.rope_sin[i].resize(size_t(max_tokens_) * (ropes_[i].n_rot / 2));
        }
        step->phases.reserve(ops_.size() * 2);  // most operations have one or two phases
    }
}

bool Plan::run(const Poll* poll, const int32_t* tokens, const int32_t* positions, const int32_t* sequences,
               int n_tokens, const int32_t* kv_blocks, int n_sequences, int max_kv_blocks,
               const int32_t* outputs, int n_outputs, const uint8_t* thresholded, const int32_t* states,
               const int32_t* saves, const float* scales, const StepPlaces& places, const ImageRows* images) {
    latest_ = nullptr;
    cancel_.store(false);
    const Runtime::Turn turn(*runtime_, cancel_, poll);
    if (!turn) return false;
    const int slot = turn.pool().free_slot();
    Step& step = *steps_[slot];
    StepTokens& t = step.tokens;
    t.n_tokens = n_tokens;
    t.n_outputs = n_outputs;
    t.max_kv_blocks = max_kv_blocks;
    std::copy_n(tokens, n_tokens, t.tokens.begin());
    std::copy_n(positions, n_tokens, t.positions.begin());
    std::copy_n(sequences, n_tokens, t.sequences.begin());
    std::copy_n(outputs, n_outputs, t.outputs.begin());
    t.stretches.clear();
    t.n_positions = 0;
    for (int i = 0; i < n_tokens; i++) {
        if (i == 0 || sequences[i] != sequences[i - 1]) t.stretches.push_back({i, 0, sequences[i], 0});
        t.stretches.back().count++;
        t.stretches.back().end = std::max(t.stretches.back().end, positions[i] + 1);
        t.n_positions = std::max(t.n_positions, positions[i] + 1);
    }
    t.set_thresholded(thresholded);
    t.kv_blocks.assign(kv_blocks, kv_blocks + size_t(n_sequences) * max_kv_blocks);
    t.n_adapters = limits_.n_adapters;
    if (scales) t.scales.assign(scales, scales + size_t(n_sequences) * t.n_adapters);
    if (states) t.states.assign(states, states + n_sequences);
    if (saves) t.saves.assign(saves, saves + n_tokens);
    t.groups.assign(places.groups, places.groups + (places.groups ? 2 * size_t(n_tokens) : 0));
    t.image_row_of.clear();
    if (images) {  // copied: a straggler may read them after the step
        t.image_rows.assign(images->rows, images->rows + images->n * limits_.image_width);
        t.image_row_of.assign(n_tokens, -1);
        for (int i = 0; i < images->n; i++) t.image_row_of[images->places[i]] = i;
    }
    for (size_t i = 0; i < ropes_.size(); i++) {
        const Rope& rope = ropes_[i];
        const int half = rope.n_rot / 2;
        for (int token = 0; token < n_tokens; token++)
            for (int j = 0; j < half; j++) {
                const int placed = places.rotary && !rope.axes.empty()
                                       ? places.rotary[int64_t(token) * places.n_axes + rope.axes[j]]
                                       : positions[token];
                const int position = placed / rope.every * rope.every;
                const double angle = position * rope.frequencies[j];
                t.rope_cos[i][token * half + j] = float(std::cos(angle)) * rope.magnitude;
                t.rope_sin[i][token * half + j] = float(std::sin(angle)) * rope.magnitude;
            }
    }
    return execute(turn, poll, slot, 0, n_ops(), 0);
}

bool Plan::run_rows(int first_op, int last_op, int n_tokens, const uint8_t* thresholded, int n_threads) {
    latest_ = nullptr;
    cancel_.store(false);
    const Runtime::Turn turn(*runtime_, cancel_, nullptr);
    if (!turn) return false;
    const int slot = turn.pool().free_slot();
    StepTokens& t = steps_[slot]->tokens;
    t.n_tokens = n_tokens;
    t.n_outputs = 0;
    t.set_thresholded(thresholded);
    return execute(turn, nullptr, slot, first_op, last_op, n_threads);
}

bool Plan::execute(const Runtime::Turn& turn, const Poll* poll, int slot, int first_op, int last_op,
                   int n_threads) {
    Step& step = *steps_[slot];
    step.phases.clear();
    for (int i = first_op; i < last_op; i++) {
        const Op* op = ops_[i].get();
        op->counters.reset();
        const int n_phases = op->n_phases(step.tokens);
        for (int phase = 0; phase < n_phases; phase++) {
            const int n = op->n_chunks(phase, step.tokens);
            // The arrays of the thread pool have kMaxChunks entries: a faulty operation must not write past
            // them.
            if (n < 0 || n > kMaxChunks)
                throw std::logic_error("operation " + std::to_string(i) + " splits phase " +
                                       std::to_string(phase) + " of " + std::to_string(n_phases) + " into " +
                                       std::to_string(n) + " chunks: a mistake in hotset");
            if (n) step.phases.push_back({op, i, phase, n});
        }
    }
    step.reached_ns.resize(step.phases.size() + 1);
    failure_ = nullptr;
    const bool done = turn.pool().run(slot, step, cancel_, poll, this, n_threads);
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    if (!done) return false;
    latest_ = &step;
    return true;
}

size_t Plan::bytes() const {
    return runtime_->bytes() + own_bytes();
}

size_t Plan::own_bytes() const {
    size_t bytes = 0;
    for (const auto& buffer : buffers_) bytes += size_t(buffer->width) * max_tokens_ * sizeof(float);
    for (const Rope& rope : ropes_)
        bytes += rope.frequencies.size() * 2 * max_tokens_ * sizeof(float) * steps_.size();
    return bytes;
}

std::vector<double> Plan::op_seconds() const {
    std::vector<double> seconds(ops_.size());
    if (!latest_) return seconds;
    for (size_t i = 0; i < latest_->phases.size(); i++)
        seconds[latest_->phases[i].op_index] +=
            double(latest_->reached_ns[i + 1] - latest_->reached_ns[i]) * 1e-9;
    return seconds;
}

}  // namespace hotset
