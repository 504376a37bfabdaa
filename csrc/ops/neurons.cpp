// Computes one value per neuron of an FFN: f(gate) * g(up), or f(up) without a gate.
//
// Sparse: it does not read the rows of neurons that a predictor did not select, nor the up rows of neurons
// whose gate is zero. One token reads its rows in place. Several tokens read the rows that any of them needs,
// copied side by side, or all rows of a chunk if that is cheaper; each token keeps only its own neurons. A
// value is bitwise identical in all cases. For thresholded tokens small activations count as zero.
//
// If rows come from a store, there are two of these operations. While missing rows are read, the first
// computes the neurons whose rows were loaded, and zeros for the others.
#include <algorithm>
#include <bit>
#include <cstring>

#include "channel_input.h"
#include "linear.h"

namespace hotset {
namespace {

struct NeuronFacts {
    int x = -1, out = -1;
    Norm norm;        // applied to x first; empty weight: no norm
    LinearPart gate;  // without data: no gate; up has the activation
    LinearPart up;
    Activation activation = Activation::Relu;
    float activation_threshold = 0.0f;
    bool up_activated = false;
    Activation up_activation = Activation::Relu;
    bool sparse = false;  // skip rows that are not needed
    int scores = -1;      // buffer of predictor scores; -1: none
    float threshold = 0.0f;
    int64_t first = 0;  // earlier neurons are always selected and have no score
    // For thresholded tokens, smaller values become zero: of the normalised input, of the deciding
    // activation, and of the value.
    float input_threshold = 0.0f, gate_threshold = 0.0f, value_threshold = 0.0f;
    ChannelMatrix gate_channels, up_channels;  // input-major copies, if any
    // [number of neurons]; if set, compute only the neurons whose flag equals `missed_which`.
    const uint8_t* missed = nullptr;
    bool missed_which = false;
};

constexpr int kDecodeChunks = 64;        // most chunks for one token
constexpr int kPredictedChunks = 32;     // the same if most neurons are skipped
constexpr int64_t kChunkNeurons = 64;    // least neurons of a chunk for one token
constexpr int kPrefetchPieces = 64;      // pieces of this phase that a waiting thread prefetches
constexpr int64_t kPrefetchBytes = 512;  // bytes of a piece
constexpr double kGatherBelow = 0.75;    // share of a chunk's rows above which reading all is as fast

class Neurons : public Op {
  public:
    Neurons(const Plan& plan, NeuronFacts facts)
        : plan_(plan),
          facts_(std::move(facts)),
          input_(plan, facts_.x, facts_.norm, facts_.input_threshold),
          out_(plan.buffer(facts_.out)),
          scores_(facts_.scores < 0 ? nullptr : &plan.buffer(facts_.scores)) {
        input_.serves(facts_.up.weight);
        if (gated()) input_.serves(facts_.gate.weight);
    }

    int n_phases(const StepTokens& step) const override { return input_.prepares_together(step) ? 2 : 1; }

    int n_chunks(int phase, const StepTokens& step) const override {
        const int n = input_.n_tokens(step);
        if (n == 0) return 0;
        return phase == 0 && input_.prepares_together(step) ? input_.n_prepare_chunks(step)
                                                            : neuron_chunks(n);
    }

    void run(int phase, int chunk, const StepTokens& step, Worker& worker) const override {
        if (phase == 0 && input_.prepares_together(step)) return input_.prepare_chunk(chunk, step, worker);
        if (facts_.missed_which && !any_missed(chunk, step)) {
            if (worker.begin_commit()) worker.end_commit();
            return;
        }
        const bool lists = has_channels() && input_.n_tokens(step) == 1;
        const ChannelInput::One one =
            lists ? input_.one(step, worker) : ChannelInput::One{input_.inputs(step, worker), nullptr};
        const Inputs& in = one.inputs;
        const int chunks = neuron_chunks(in.n);
        const int64_t first = first_neuron(in.n, chunks, chunk), last = first_neuron(in.n, chunks, chunk + 1);
        Chunk c = {first,
                   last - first,
                   in,
                   lists ? &one : nullptr,
                   step.thresholded.data(),
                   worker,
                   Scratch(worker, last - first, in.n),
                   {}};
        if (in.n == 1 && facts_.sparse) {
            one_token(c);
        } else {
            select(c);
            compute(c);
        }
        if (!worker.begin_commit()) return;
        for (int t = 0; t < in.n; t++)
            commit(c.scratch.values + t * c.size, c.size, out_.row(t) + first, first);
        counters.add(c.counts, worker.index());
        worker.end_commit();
    }

    // Prefetch the first rows of the chunk, if all rows are read.
    bool prefetch(int phase, int chunk, int piece, const StepTokens& step) const override {
        if ((phase == 0 && input_.prepares_together(step)) || piece >= kPrefetchPieces || scores_)
            return false;
        if (has_channels() && input_.n_tokens(step) == 1) return false;
        const Matrix& weight = gated() ? facts_.gate.weight : facts_.up.weight;
        const int64_t first = panel_chunk(n_neurons(), neuron_chunks(input_.n_tokens(step)), chunk);
        const uint8_t* at = weight.row(first) + piece * kPrefetchBytes;
        for (int64_t i = 0; i < kPrefetchBytes; i += 64) prefetch_line(at + i);
        return true;
    }

    Needs needs() const override {
        Needs needs = input_.needs();
        for (int n : {1, plan_.max_tokens()})
            needs.result_floats =
                std::max(needs.result_floats,
                         Scratch::bytes(largest_chunk(n), n, packed_bytes(n)) / sizeof(float) + 1);
        return needs;
    }

  private:
    // The memory of a chunk of `size` neurons and n tokens, in the worker's results.
    struct Scratch {
        float* values;         // [n][size] results; gates at first
        float* up;             // [n][size]
        float* packed;         // [n][size] products with gathered rows
        uint64_t* bits;        // [size / 64] wanted neurons of one token
        const uint8_t** rows;  // [size + kGatherAhead] addresses of gathered rows
        int32_t* neurons;      // [size] their indices in the chunk
        uint8_t* wanted;       // [n][size] whether the token needs the neuron
        uint8_t* weights;      // gathered rows side by side, or
        float* lanes;          // channel_scratch_floats, for one token with skipped channels

        Scratch(Worker& worker, int64_t size, int n) {
            bits = worker.results.as<uint64_t>();
            rows = reinterpret_cast<const uint8_t**>(bits + ceil_div(size, 64));
            values = reinterpret_cast<float*>(rows + size + kGatherAhead);
            up = values + n * size;
            packed = up + n * size;
            neurons = reinterpret_cast<int32_t*>(packed + n * size);
            wanted = reinterpret_cast<uint8_t*>(neurons + size);
            weights = wanted + (n * size + 63) / 64 * 64;
            lanes = reinterpret_cast<float*>(weights);
        }
        static size_t bytes(int64_t size, int n, size_t row_bytes) {
            return size_t(n) * size * 13 + size * 13 + 128 + size * row_bytes +
                   channel_scratch_floats(1) * sizeof(float);
        }
    };
    struct Chunk {
        int64_t first, size;
        Inputs in;
        const ChannelInput::One* one;  // one token's active channels; null: not needed
        const uint8_t* thresholded;    // per token
        Worker& worker;
        Scratch scratch;
        FfnCounts counts;
    };

    // Whether the other operation computes this neuron.
    bool is_others(int64_t i) const { return facts_.missed && bool(facts_.missed[i]) != facts_.missed_which; }
    bool any_missed(int chunk, const StepTokens& step) const {
        const int n = input_.n_tokens(step), chunks = neuron_chunks(n);
        const auto* const end = facts_.missed + first_neuron(n, chunks, chunk + 1);
        return std::find(facts_.missed + first_neuron(n, chunks, chunk), end, uint8_t(1)) != end;
    }
    // The second operation writes only the neurons that the first skipped.
    void commit(const float* values, int64_t size, float* out, int64_t first) const {
        if (!facts_.missed_which) return void(std::copy_n(values, size, out));
        for (int64_t i = 0; i < size; i++)
            if (!is_others(first + i)) out[i] = values[i];
    }

    // Whether all rows of the chunk are read, `count` of them wanted. Rows of a store are not contiguous.
    bool reads_all(const Matrix& w, int count, const Chunk& c) const {
        return !w.places && (!facts_.sparse || count > kGatherBelow * double(c.size));
    }
    bool gated() const { return facts_.gate.weight.data != nullptr; }
    int64_t n_neurons() const { return facts_.up.weight.rows; }
    // Bytes per copied row, for several tokens and for stores; otherwise per output for kOpenLanes
    // input-major lanes.
    size_t packed_bytes(int n) const {
        const bool in_place = n == 1 && !facts_.up.weight.places && !facts_.gate.weight.places;
        const size_t lanes = has_channels() ? sizeof(float) * channel_scratch_floats(128) / 128 : 0;
        return in_place ? lanes : std::max({facts_.up.weight.row_bytes, facts_.gate.weight.row_bytes, lanes});
    }
    bool has_channels() const { return facts_.gate_channels.data || facts_.up_channels.data; }
    bool by_tiles(int n) const { return n == 1 && has_channels(); }
    // The neurons of a tile for one token with skipped channels: as many as the threads allow.
    int64_t tile() const {
        const int64_t share = ceil_div(n_neurons(), 2 * plan_.n_threads() * kChannelColumns);
        return std::max<int64_t>(share, 2) * kChannelColumns;
    }
    int64_t tiles() const { return ceil_div(n_neurons(), tile()); }
    // Return a chunk's first neuron. For one token with skipped channels a chunk is whole tiles.
    int64_t first_neuron(int n, int chunks, int chunk) const {
        if (!by_tiles(n)) return panel_chunk(n_neurons(), chunks, chunk);
        return std::min(tiles() * chunk / chunks * tile(), n_neurons());
    }
    int64_t largest_chunk(int n) const {
        const int chunks = neuron_chunks(n);
        return by_tiles(n) ? ceil_div(tiles(), chunks) * tile() : largest_panel_chunk(n_neurons(), chunks);
    }
    int neuron_chunks(int n) const {
        if (n > 1) return many_token_chunks(n_neurons(), plan_.n_threads());
        if (has_channels()) return int(std::clamp<int64_t>(tiles(), 1, kDecodeChunks));
        const int64_t most = scores_ && facts_.sparse ? kPredictedChunks : kDecodeChunks;
        return int(std::clamp<int64_t>(n_neurons() / kChunkNeurons, 1, most));
    }

    // ---- one token, sparse: lists of neurons, so that skipped ones cost nothing

    void one_token(Chunk& c) const {
        const Kernels& kernels = plan_.kernels();
        const LinearPart& deciding = gated() ? facts_.gate : facts_.up;
        float* decided = c.scratch.packed;  // activations of the listed neurons
        int count = select_one(c);
        c.counts.selected += count;
        if (reads_all(deciding.weight, count, c)) {
            if (!input_major(c, gated() ? facts_.gate_channels : facts_.up_channels, deciding.weight))
                all_rows(c, deciding.weight, gated() ? &facts_.up.weight : nullptr, c.scratch.up);
            (gated() ? c.counts.gate_rows : c.counts.up_rows) += c.size;
            for (int j = 0; j < count; j++) decided[j] = c.scratch.up[c.scratch.neurons[j]];
        } else {
            gathered_rows(c, deciding.weight, gated() ? &facts_.up.weight : nullptr, count);
            (gated() ? c.counts.gate_rows : c.counts.up_rows) += count;
        }
        add_bias_of_list(c, deciding, count, decided);
        kernels.activate(facts_.activation, facts_.activation_threshold, decided, count, decided);
        if (c.thresholded[0]) zero_small(facts_.gate_threshold, decided, count, decided);
        int fired = 0;
        float* values = c.scratch.values;
        std::fill_n(values, c.size, 0.0f);
        for (int j = 0; j < count; j++) {
            const int32_t i = c.scratch.neurons[j];
            c.scratch.neurons[fired] = i;
            values[i] = decided[j];
            fired += decided[j] != 0.0f;
        }
        if (gated() && fired) multiply_by_up(c, fired, values);
        if (c.thresholded[0]) zero_small(facts_.value_threshold, values, c.size, values);
        for (int j = 0; j < fired; j++) c.counts.active += values[c.scratch.neurons[j]] != 0.0f;
    }

    // List the neurons that the predictor selects.
    int select_one(Chunk& c) const {
        int count = 0;
        auto add = [&](int64_t i) {
            c.scratch.neurons[count] = int32_t(i);
            count += !is_others(c.first + i);
        };
        const int64_t unscored = scores_ ? std::clamp<int64_t>(facts_.first - c.first, 0, c.size) : c.size;
        for (int64_t i = 0; i < unscored; i++) add(i);
        if (unscored == c.size) return count;
        const float* scores = scores_->row(0) + c.first + unscored - facts_.first;
        plan_.kernels().not_below_bits(scores, facts_.threshold, c.size - unscored, c.scratch.bits);
        for (int64_t word = 0; word < ceil_div(c.size - unscored, 64); word++)
            for (uint64_t rest = c.scratch.bits[word]; rest; rest &= rest - 1)
                add(unscored + word * 64 + std::countr_zero(rest));
        return count;
    }

    void multiply_by_up(Chunk& c, int fired, float* values) const {
        const Kernels& kernels = plan_.kernels();
        float* up = c.scratch.packed;
        const bool fewer = facts_.up_channels.data && c.one->share() < double(fired) / double(c.size);
        if (reads_all(facts_.up.weight, fired, c) || (fewer && c.one->pays(facts_.up_channels))) {
            if (!input_major(c, facts_.up_channels, facts_.up.weight))
                all_rows(c, facts_.up.weight, nullptr, c.scratch.up);
            c.counts.up_rows += c.size;
            for (int j = 0; j < fired; j++) up[j] = c.scratch.up[c.scratch.neurons[j]];
        } else {
            gathered_rows(c, facts_.up.weight, nullptr, fired);
            c.counts.up_rows += fired;
        }
        add_bias_of_list(c, facts_.up, fired, up);
        if (facts_.up_activated) kernels.activate(facts_.up_activation, 0.0f, up, fired, up);
        for (int j = 0; j < fired; j++) values[c.scratch.neurons[j]] *= up[j];
    }

    // Multiply all rows of the chunk by one token, using only its active channels, into `up`. Returns false
    // without an input-major copy, or if too many channels are active.
    bool input_major(Chunk& c, const ChannelMatrix& channels, const Matrix& w) const {
        if (!c.one || !c.one->pays(channels)) return false;
        plan_.kernels().channel_linear[int(w.type)](channels, *c.one->active, c.in, c.first, c.size, 0, 16,
                                                    c.scratch.lanes, c.scratch.up);
        c.counts.left_out += c.one->left_out(channels, c.size);
        return true;
    }

    void add_bias_of_list(const Chunk& c, const LinearPart& part, int count, float* sums) const {
        if (part.bias.empty()) return;
        for (int j = 0; j < count; j++) sums[j] += part.bias[c.first + c.scratch.neurons[j]];
    }

    // Multiply the listed rows, into `packed`, and prefetch the next reads: after gates the first up rows,
    // otherwise the first rows of the neurons after the chunk, which are likely to follow.
    void gathered_rows(Chunk& c, const Matrix& w, const Matrix* then, int count) const {
        if (count == 0) return;
        const uint8_t** rows = c.scratch.rows;
        for (int j = 0; j < count; j++) rows[j] = w.row(c.first + c.scratch.neurons[j]);
        const Matrix& next = gated() ? facts_.gate.weight : facts_.up.weight;
        int64_t behind = c.first + c.size;
        for (int j = 0; j < kGatherAhead; j++) {
            if (then) {
                rows[count + j] = then->row(c.first + c.scratch.neurons[std::min(j, count - 1)]);
                continue;
            }
            while (behind < n_neurons() && scores_ && behind >= facts_.first &&
                   scores_->row(0)[behind - facts_.first] < facts_.threshold)
                behind++;
            rows[count + j] = next.row(std::min(behind++, n_neurons() - 1));
        }
        plan_.kernels().gather[int(w.type)](w, rows, count, c.in, 0, c.scratch.packed);
    }

    // ---- several tokens, or dense

    // Find each token's neurons, as the predictor selects them.
    void select(Chunk& c) const {
        for (int t = 0; t < c.in.n; t++) {
            uint8_t* wanted = c.scratch.wanted + t * c.size;
            int64_t i = 0;
            if (scores_) {
                const float* scores = scores_->row(t) - facts_.first;
                for (; i < c.size && c.first + i < facts_.first; i++) wanted[i] = 1;
                for (; i < c.size; i++) wanted[i] = !(scores[c.first + i] < facts_.threshold);
            }
            std::fill(wanted + i, wanted + c.size, uint8_t(1));
            if (facts_.missed)
                for (i = 0; i < c.size; i++) wanted[i] &= !is_others(c.first + i);
            for (int64_t j = 0; j < c.size; j++) c.counts.selected += wanted[j];
        }
    }

    void compute(Chunk& c) const {
        const Kernels& kernels = plan_.kernels();
        const int64_t n_values = c.in.n * c.size;
        float* values = c.scratch.values;
        if (gated()) {
            product(c, facts_.gate, values, c.counts.gate_rows);
            kernels.activate(facts_.activation, facts_.activation_threshold, values, n_values, values);
            apply_threshold(c, facts_.gate_threshold);
            if (facts_.sparse)
                for (int64_t i = 0; i < n_values; i++) c.scratch.wanted[i] &= values[i] != 0.0f;
            float* up = c.scratch.up;
            product(c, facts_.up, up, c.counts.up_rows);
            if (facts_.up_activated) kernels.activate(facts_.up_activation, 0.0f, up, n_values, up);
            kernels.multiply(values, up, n_values, values);
        } else {
            product(c, facts_.up, values, c.counts.up_rows);
            kernels.activate(facts_.activation, facts_.activation_threshold, values, n_values, values);
            apply_threshold(c, facts_.gate_threshold);
        }
        apply_threshold(c, facts_.value_threshold);
        for (int64_t i = 0; i < n_values; i++) {
            values[i] = c.scratch.wanted[i] ? values[i] : 0.0f;
            c.counts.active += values[i] != 0.0f;
        }
    }

    // Set the small values of the chunk's thresholded tokens to zero.
    static void apply_threshold(const Chunk& c, float threshold) {
        if (threshold == 0.0f) return;
        for (int t = 0; t < c.in.n; t++) {
            float* values = c.scratch.values + t * c.size;
            if (c.thresholded[t]) zero_small(threshold, values, c.size, values);
        }
    }

    // out[t][i] = row i of the chunk times token t, for all wanted rows; others are undefined.
    void product(Chunk& c, const LinearPart& part, float* out, int64_t& n_rows) const {
        const Matrix& w = part.weight;
        const int n = c.in.n, count = facts_.sparse || w.places ? list_wanted(c) : int(c.size);
        const bool all = reads_all(w, count, c);
        n_rows += all ? c.size : count;
        if (all) {
            all_rows(c, w, nullptr, out);
            add_bias(plan_.kernels(), part.bias, c.first, n, c.size, out);
            return;
        }
        std::fill_n(out, n * c.size, 0.0f);
        if (count == 0) return;
        float* packed = c.scratch.packed;
        packed_rows(c, w, count);
        for (int t = 0; t < n; t++)
            for (int j = 0; j < count; j++) {
                const int32_t i = c.scratch.neurons[j];
                const float sum = packed[t * count + j];
                out[t * c.size + i] = part.bias.empty() ? sum : sum + part.bias[c.first + i];
            }
    }

    // List the neurons that any token needs.
    int list_wanted(Chunk& c) const {
        int count = 0;
        for (int64_t i = 0; i < c.size; i++) {
            uint8_t any = 0;
            for (int t = 0; t < c.in.n && !any; t++) any = c.scratch.wanted[t * c.size + i];
            c.scratch.neurons[count] = int32_t(i);
            count += any;
        }
        return count;
    }

    // then: the matrix that this chunk reads next; null: none.
    void all_rows(Chunk& c, const Matrix& w, const Matrix* then, float* out) const {
        const auto linear = plan_.kernels().linear[int(w.type)];
        uint8_t* scratch = c.worker.kernel_scratch.data();
        // Gates of one token are computed in two parts: while the second is computed, the first up rows are
        // prefetched.
        const int64_t part = then ? c.size * 3 / 4 : 0;
        if (part) {
            linear(w, c.first, c.first + part, c.in, 0, 1, out, c.size, scratch);
            int found = 0;
            for (int64_t i = 0; i < part && found < kGatherAhead; i++)
                if (out[i] > 0.0f) fetch_row(*then, c.first + i), found++;
        }
        linear(w, c.first + part, c.first + c.size, c.in, 0, c.in.n, out + part, c.size, scratch);
    }

    static void fetch_row(const Matrix& w, int64_t row) {
        for (size_t at = 0; at < w.row_bytes; at += 64) prefetch_line(w.row(row) + at);
    }

    // Copy the listed rows side by side and multiply them with the many-token kernels.
    void packed_rows(Chunk& c, const Matrix& w, int count) const {
        for (int j = 0; j < count; j++)
            std::memcpy(c.scratch.weights + j * w.row_bytes, w.row(c.first + c.scratch.neurons[j]),
                        w.row_bytes);
        const Matrix side_by_side = {w.type, c.scratch.weights, count, w.cols, w.row_bytes};
        plan_.kernels().linear[int(w.type)](side_by_side, 0, count, c.in, 0, c.in.n, c.scratch.packed, count,
                                            c.worker.kernel_scratch.data());
    }

    const Plan& plan_;
    const NeuronFacts facts_;
    ChannelInput input_;
    const Buffer& out_;
    const Buffer* scores_;
};

}  // namespace

// gate, up: records {weight, bias, channels}. scores: a predictor's; without it all neurons are selected.
// missed: compute only the neurons whose rows the store missed (true) or had (false).
static const Registered kNeurons("neurons", [](Facts& facts) -> std::unique_ptr<Op> {
    NeuronFacts f;
    f.x = facts.buffer("x"), f.out = facts.buffer("out");
    f.sparse = facts.flag("sparse");
    f.input_threshold = facts.real("input_threshold", 0.0f);
    f.gate_threshold = facts.real("gate_threshold", 0.0f);
    f.value_threshold = facts.real("value_threshold", 0.0f);
    require(f.input_threshold >= 0.0f && f.gate_threshold >= 0.0f && f.value_threshold >= 0.0f,
            "a threshold must be at least 0");
    f.norm = facts.norm("norm", facts.width(f.x));
    const std::unique_ptr<Facts> up = facts.record("up");
    f.up = linear_part(*up, f.x, f.out);
    f.up_channels = channels_of(*up, f.up.weight);
    const bool gated = facts.has("gate");
    if (gated) {
        const std::unique_ptr<Facts> gate = facts.record("gate");
        f.gate = linear_part(*gate, f.x, f.out);
        f.gate_channels = channels_of(*gate, f.gate.weight);
    }
    f.activation = facts.activation("activation");
    f.activation_threshold = facts.real("activation_threshold", 0.0f);
    f.up_activated = facts.has("up_activation");
    require(gated || !f.up_activated, "up_activation requires a gate");
    if (f.up_activated) f.up_activation = facts.activation("up_activation");
    if ((f.scores = facts.buffer_or_none("scores")) >= 0) {
        facts.same_rows(f.scores, f.out);
        f.threshold = facts.real("threshold");
        f.first = facts.integer("first");
        require(f.first >= 0 && facts.width(f.scores) == facts.width(f.out) - f.first,
                "there must be one score per neuron");
    }
    if (facts.has("missed")) {
        f.missed = facts.missed_rows(up->tensor("weight").stored, facts.width(f.out));
        f.missed_which = facts.flag("missed");
    }
    return std::make_unique<Neurons>(facts.plan(), std::move(f));
});

}  // namespace hotset
