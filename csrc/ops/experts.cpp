// The products of an MoE layer: up to the neurons of each token's experts, and down to their sum.
//
// Tokens are grouped by expert, so that an expert's rows are read once for all its tokens and multiplied by
// the kernels for many tokens. For one token each expert is a group of its own. Every worker finds the groups
// again from the ids, clamped to their range, because a straggler may read undefined ids. An expert's result
// for a token is bitwise identical in every group; results are added in the route's order.
#include <algorithm>
#include <bit>

#include "../facts.h"
#include "channel_input.h"
#include "linear.h"

namespace hotset {
namespace {

// The neurons of the routed experts side by side: f(gate) * g(up), or f(up) without a gate.
struct ExpertFacts {
    int x = -1, route = -1, out = -1;
    int n_used = 1;
    ExpertMatrices gate, up;  // gate without weights: the layer has none
    bool activated = false;   // always true with a gate
    Activation activation = Activation::Relu;
    float activation_threshold = 0.0f;
    float gate_threshold = 0.0f;  // for the activation of thresholded tokens
    bool up_activated = false;
    Activation up_activation = Activation::Relu;
    float up_threshold = 0.0f;
    int scores = -1;  // buffer of predictor scores, a column per column of `out`; -1: none
    float threshold = 0.0f;
    bool sparse = false;  // skip rows that are not needed: of up, and of neurons that are not predicted
    // [number of experts]; if set, compute only the experts whose flag equals `missed_which`.
    const uint8_t* missed = nullptr;
    bool missed_which = false;
};

// out = residual + the sum of weight * (part of x times its expert's matrix + bias), in the route's order.
struct ExpertSumFacts {
    int x = -1, route = -1, residual = -1, out = -1;
    int n_used = 1;
    ExpertMatrices down;
    std::vector<ChannelMatrix> channels;  // per expert; empty: none
    bool neuron_major = false;            // a row per neuron, which is a column of x
    bool apart = false;                   // results side by side, neither summed nor weighted
    bool sparse = false;                  // skip rows of neurons that are zero
};

constexpr int64_t kChunkBytes = 48 * 1024;  // of weights, for one token
constexpr int kDecodeChunks = 64;           // most chunks for one token
constexpr int kSparseChunks = 8;         // per thread, with scattered neurons: the start of a chunk is slow
constexpr int kPieces = 4;               // least per thread, for products with input-major copies
constexpr int kSumChunks = 8;            // per thread, of a sum: each chunk reads a piece of each expert
constexpr double kGatherBelow = 0.75;    // share of a chunk's up rows above which all are read
constexpr int kPrefetchPieces = 64;      // pieces of a later phase that a waiting thread prefetches
constexpr int64_t kPrefetchBytes = 512;  // bytes of a piece

// Tokens grouped by expert: groups ordered by expert, entries (token * n_used + rank) ordered by token.
class Groups {
  public:
    int n = 0;                   // number of groups
    int32_t* experts = nullptr;  // [n]
    int32_t* first = nullptr;    // [n + 1] indices into `entries`
    int32_t* entries = nullptr;  // [n_tokens * n_used]
    int32_t* places = nullptr;   // [n_tokens * n_used] index of each entry in `entries`

    static size_t bytes(int n_tokens, int n_used, int n_expert) {
        return (size_t(n_tokens) * n_used * 3 + size_t(n_expert) * 2 + 2) * sizeof(int32_t) + 64;
    }
    static constexpr size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

    Groups() = default;
    // Lay out the arrays in memory that may hold the result of an earlier `find`.
    Groups(uint8_t* memory, int n_tokens, int n_used, int n_expert) {
        const int64_t all = int64_t(n_tokens) * n_used;
        entries = reinterpret_cast<int32_t*>(memory);
        places = entries + all;
        ids_ = places + all;
        first = ids_ + all;
        experts = first + n_expert + 1;
        n_found_ = experts + n_expert;
        n_tokens_ = n_tokens, n_used_ = n_used, n_expert_ = n_expert;
    }
    void find(const Buffer& route) {
        for (int t = 0; t < n_tokens_; t++)
            for (int j = 0; j < n_used_; j++) {
                const float id = route.row(t)[j];  // read once, because it may change
                ids_[t * n_used_ + j] = id >= 0.0f && id < float(n_expert_) ? int32_t(id) : 0;
            }
        const int all = n_tokens_ * n_used_;
        int32_t counts[kMaxExperts] = {};  // counts, later the index of the next entry
        for (int i = 0; i < all; i++) counts[ids_[i]]++;
        n = 0;
        int32_t at = 0;
        for (int e = 0; e < n_expert_; e++) {
            if (!counts[e]) continue;
            experts[n] = e;
            first[n++] = at;
            at += counts[e];
            counts[e] = at - counts[e];
        }
        first[n] = at;
        for (int i = 0; i < all; i++) {
            places[i] = counts[ids_[i]]++;
            entries[places[i]] = i;
        }
        *n_found_ = n;
    }
    // Restore the result of an earlier `find` in the same memory.
    void recall() { n = *n_found_; }

    // The number of a group's tokens. Limited, because undefined ids may name an expert twice for a token.
    int count(int group) const { return std::min(first[group + 1] - first[group], n_tokens_); }
    const int32_t* of(int group) const { return entries + first[group]; }

  private:
    int32_t* ids_ = nullptr;  // [n_tokens * n_used]
    int32_t* n_found_ = nullptr;
    int n_tokens_ = 0, n_used_ = 0, n_expert_ = 0;
};

int64_t bytes_of(const ExpertMatrices& of) {  // of the largest expert
    int64_t most = 0;
    for (const Matrix& m : of.weights) most = std::max(most, m.rows * int64_t(m.row_bytes));
    return most;
}

// ---- up

class ExpertNeurons : public Op {
  public:
    ExpertNeurons(const Plan& plan, ExpertFacts facts)
        : plan_(plan),
          f_(std::move(facts)),
          input_(plan, f_.x, Norm{}),
          route_(plan.buffer(f_.route)),
          out_(plan.buffer(f_.out)),
          scores_(f_.scores < 0 ? nullptr : &plan.buffer(f_.scores)) {
        for (const ExpertMatrices* of : {&f_.gate, &f_.up}) {
            for (const Matrix& m : of->weights) input_.serves(m);
            bytes_ += bytes_of(*of);
        }
        few_at_ = results_bytes(std::min(plan.max_tokens(), kPrivateInputs));
    }

    int n_phases(const StepTokens& step) const override { return input_.prepares_together(step) ? 2 : 1; }
    int n_chunks(int phase, const StepTokens& step) const override {
        const int n = input_.n_tokens(step);
        if (n == 0) return 0;
        if (phase == 0 && input_.prepares_together(step)) return input_.n_prepare_chunks(step);
        return most_groups(n) * panels(n);
    }

    void run(int phase, int chunk, const StepTokens& step, Worker& worker) const override {
        if (phase == 0 && input_.prepares_together(step)) return input_.prepare_chunk(chunk, step, worker);
        const Inputs all = input_.inputs(step, worker);
        const int panels = this->panels(all.n), group = chunk / panels, panel = chunk % panels;
        const int64_t first = panel_chunk(n_rows(), panels, panel),
                      last = panel_chunk(n_rows(), panels, panel + 1);
        uint8_t* const mine = own_memory(all.n, worker);
        const bool kept = all.n > kPrivateInputs;  // whether groups are kept between chunks
        Groups groups(mine + kMarkBytes, all.n, f_.n_used, n_expert());
        int32_t& gathered = *reinterpret_cast<int32_t*>(mine);
        if (!kept || worker.enter_inputs()) {
            groups.find(route_);
            gathered = -1;
        } else {
            groups.recall();
        }
        const bool is_other =
            group < groups.n && f_.missed && bool(f_.missed[groups.experts[group]]) != f_.missed_which;
        if (group >= groups.n || is_other) {  // there are fewer groups than the most possible
            if (worker.begin_commit()) worker.end_commit();
            return;
        }
        const int32_t* entries = groups.of(group);
        const int count = groups.count(group);
        Inputs in = all;
        if (all.n > 1) {
            const InputsMemory rows(mine + kMarkBytes + Groups::aligned(groups_bytes(all.n)), all.n, all.k,
                                    input_.kinds());
            if (gathered != group)
                for (int i = 0; i < count; i++) rows.copy(i, all, entries[i] / f_.n_used);
            gathered = group;
            in = rows.inputs(count);
        }
        float* values = worker.results.as<float>();
        FfnCounts counts;
        const bool ends = panel + 1 == panels;
        const Rows rows = {groups.experts[group], first, last,
                           groups.experts[ends ? std::min(group + 1, groups.n - 1) : group], ends ? 0 : last};
        compute(rows, in, entries, step, worker, values, counts);
        if (!worker.begin_commit()) return;
        for (int i = 0; i < count; i++)
            std::copy_n(values + i * (last - first), last - first,
                        out_.row(entries[i] / f_.n_used) + entries[i] % f_.n_used * n_rows() + first);
        counters.add(counts);
        worker.end_commit();
    }

    Needs needs() const override {
        const int n = plan_.max_tokens(), few = std::min(n, kPrivateInputs);
        Needs needs = input_.needs();
        needs.result_floats = std::max({needs.result_floats, results_bytes(n) / sizeof(float) + 1,
                                        (results_bytes(few) + memory_bytes(few)) / sizeof(float) + 1});
        needs.private_bytes = memory_bytes(n);
        return needs;
    }

  private:
    static constexpr size_t kMarkBytes = 64;  // for the number of the group whose inputs are gathered

    bool gated() const { return !f_.gate.weights.empty(); }
    int n_expert() const { return int(f_.up.weights.size()); }
    int64_t n_rows() const { return f_.up.weights[0].rows; }
    int most_groups(int n) const { return int(std::min<int64_t>(int64_t(n) * f_.n_used, n_expert())); }
    // The number of chunks per expert.
    int panels(int n) const {
        const int groups = most_groups(n);
        if (n == 1) {
            const int all =
                f_.sparse ? std::min(kDecodeChunks, kSparseChunks * plan_.n_threads()) : kDecodeChunks;
            const int64_t most = std::max(all / groups, 1);
            return int(std::clamp<int64_t>(bytes_ / kChunkBytes, 1,
                                           std::min<int64_t>(most, ceil_div(n_rows(), 16))));
        }
        return std::min(ceil_div(n_rows(), kPanelRows), std::max(kMaxChunks / groups, 1));
    }
    size_t groups_bytes(int n) const { return Groups::bytes(n, f_.n_used, n_expert()); }
    size_t memory_bytes(int n) const {
        return kMarkBytes + Groups::aligned(groups_bytes(n)) +
               InputsMemory::bytes(n, input_.width(), input_.kinds().floats) + 64;
    }
    // Bytes for up to n tokens: gates (later values), ups, products with gathered rows, and row indices.
    size_t results_bytes(int n) const {
        size_t most = 0;  // fewer tokens may have larger chunks
        for (int tokens = 1; tokens <= n; tokens++)
            most = std::max(most, size_t(largest_panel_chunk(n_rows(), panels(tokens))) * (tokens * 3 + 1));
        return Groups::aligned(most * sizeof(float));
    }
    // Return the memory for groups and gathered inputs. For few tokens it follows the results, because
    // `inputs` holds the quantised tokens.
    uint8_t* own_memory(int n, Worker& worker) const {
        return n > kPrivateInputs ? worker.inputs.data() : worker.results.data() + few_at_;
    }

    // Rows of an expert, and the beginning of the next chunk.
    struct Rows {
        int expert;
        int64_t first, last;
        int next_expert;
        int64_t next_first;
        int64_t size() const { return last - first; }
    };

    // entries: the tokens and ranks of the inputs.
    void compute(const Rows& rows, const Inputs& in, const int32_t* entries, const StepTokens& step,
                 Worker& worker, float* values, FfnCounts& counts) const {
        const Kernels& kernels = plan_.kernels();
        const int expert = rows.expert;
        const int64_t first = rows.first, last = rows.last, size = rows.size(), n = in.n * size;
        int32_t* const wanted = reinterpret_cast<int32_t*>(values + 3 * n);
        const int found = scores_ ? list_selected(first, size, in.n, entries, wanted, counts) : int(size);
        if (!scores_) counts.selected = n;
        if (!gated()) {
            product(f_.up, expert, first, last, in, worker, values);
            if (f_.activated) kernels.activate(f_.activation, f_.activation_threshold, values, n, values);
            apply_threshold(step, entries, in.n, size, values);
            counts.up_rows = size;
        } else {
            if (f_.sparse && found <= kGatherBelow * double(size)) {
                gathered(f_.gate, rows, in, wanted, found, values, values + 2 * n, worker);
                counts.gate_rows = found;
            } else {
                gates(rows, in, worker, values);
                counts.gate_rows = size;
            }
            kernels.activate(f_.activation, f_.activation_threshold, values, n, values);
            apply_threshold(step, entries, in.n, size, values);
            if (scores_) drop_others(first, size, in.n, entries, values);
            multiply_by_up(rows, in, worker, values, counts);
        }
        if (scores_) drop_others(first, size, in.n, entries, values);  // 0 times infinity or NaN
        int32_t active = 0;
        for (int64_t i = 0; i < n; i++) active += values[i] != 0.0f;
        counts.active += active;
    }

    void apply_threshold(const StepTokens& step, const int32_t* entries, int n, int64_t size,
                         float* values) const {
        if (f_.gate_threshold == 0.0f) return;
        for (int t = 0; t < n; t++)
            if (step.thresholded[entries[t] / f_.n_used])
                zero_small(f_.gate_threshold, values + t * size, size, values + t * size);
    }

    // Return the predictor's scores for an entry, starting at row `first`.
    const float* scores_of(int32_t entry, int64_t first) const {
        return scores_->row(entry / f_.n_used) + entry % f_.n_used * n_rows() + first;
    }
    // List the rows that any of n tokens selects.
    int list_selected(int64_t first, int64_t size, int n, const int32_t* entries, int32_t* wanted,
                      FfnCounts& counts) const {
        int found = 0;
        for (int64_t i = 0; i < size; i++) {
            int tokens = 0;
            for (int t = 0; t < n; t++) tokens += !(scores_of(entries[t], first)[i] < f_.threshold);
            counts.selected += tokens;
            wanted[found] = int32_t(i);
            found += tokens > 0;
        }
        return found;
    }
    void drop_others(int64_t first, int64_t size, int n, const int32_t* entries, float* values) const {
        for (int t = 0; t < n; t++) {
            const float* scores = scores_of(entries[t], first);
            for (int64_t i = 0; i < size; i++)
                if (scores[i] < f_.threshold) values[t * size + i] = 0.0f;
        }
    }

    // Compute all gates. With one token and a sparse layer in two parts: while the second is computed, the
    // first up rows are prefetched.
    void gates(const Rows& rows, const Inputs& in, Worker& worker, float* out) const {
        const int64_t size = rows.size(), part = f_.sparse && in.n == 1 ? size * 3 / 4 : 0;
        if (part) product(f_.gate, rows.expert, rows.first, rows.first + part, in, worker, out);
        const Matrix up = f_.up.of(rows.expert);
        for (int64_t i = 0, found = 0; i < part && found < kGatherAhead; i++)
            if (out[i] > 0.0f) fetch_row(up, rows.first + i), found++;
        product(f_.gate, rows.expert, rows.first + part, rows.last, in, worker, out + part);
    }
    static void fetch_row(const Matrix& w, int64_t row) {
        for (size_t at = 0; at < w.row_bytes; at += 64) prefetch_line(w.row(row) + at);
    }

    void multiply_by_up(const Rows& rows, const Inputs& in, Worker& worker, float* values,
                        FfnCounts& counts) const {
        const Kernels& kernels = plan_.kernels();
        const int64_t size = rows.size(), n = in.n * size;
        float* up = values + n;
        int32_t* const wanted = reinterpret_cast<int32_t*>(up + 2 * n);  // rows that any token needs
        const int found = f_.sparse ? list_nonzero(values, size, in.n, wanted) : int(size);
        if (found > kGatherBelow * double(size)) {
            product(f_.up, rows.expert, rows.first, rows.last, in, worker, up);
            counts.up_rows = size;
        } else {
            gathered(f_.up, rows, in, wanted, found, up, up + n, worker);
            counts.up_rows = found;
        }
        if (f_.up_activated) kernels.activate(f_.up_activation, f_.up_threshold, up, n, up);
        if (f_.sparse)                         // products of rows that were not read are undefined
            for (int64_t i = 0; i < n; i++) {  // a mask, because compilers turn ?: into a branch
                const uint32_t kept = values[i] != 0.0f ? ~uint32_t(0) : 0;
                values[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(values[i] * up[i]) & kept);
            }
        else
            kernels.multiply(values, up, n, values);
    }

    // List the rows that are not zero for any of n tokens.
    int list_nonzero(const float* values, int64_t size, int n, int32_t* wanted) const {
        int found = 0;
        for (int64_t first = 0; first < size; first += 64) {
            uint64_t any = 0;
            for (int t = 0; t < n; t++) {
                uint64_t bits;
                plan_.kernels().nonzero_bits(values + t * size + first, std::min<int64_t>(size - first, 64),
                                             &bits);
                any |= bits;
            }
            for (; any; any &= any - 1) wanted[found++] = int32_t(first + std::countr_zero(any));
        }
        return found;
    }

    // Multiply the wanted rows by one token after another, so that the rows stay in cache; other outputs are
    // 0. Prefetches the beginning of the next chunk.
    void gathered(const ExpertMatrices& of, const Rows& chunk, const Inputs& in, const int32_t* wanted,
                  int found, float* out, float* packed, Worker& worker) const {
        const Matrix w = of.of(chunk.expert), next = f_.gate.of(chunk.next_expert);
        const int64_t first = chunk.first, size = chunk.size();
        const uint8_t** rows = reinterpret_cast<const uint8_t**>(worker.kernel_scratch.data());
        for (int j = 0; j < found; j++) rows[j] = w.row(first + wanted[j]);
        for (int j = 0; j < kGatherAhead; j++)
            rows[found + j] = next.row(std::min(chunk.next_first + j, next.rows - 1));
        std::fill_n(out, in.n * size, 0.0f);
        const float* bias = of.bias_of(chunk.expert, n_rows());
        for (int t = 0; t < in.n && found; t++) {
            plan_.kernels().gather[int(w.type)](w, rows, found, in, t, packed);
            for (int j = 0; j < found; j++)
                out[t * size + wanted[j]] = bias ? packed[j] + bias[first + wanted[j]] : packed[j];
        }
    }

    void product(const ExpertMatrices& of, int expert, int64_t first, int64_t last, const Inputs& in,
                 Worker& worker, float* out) const {
        const Matrix w = of.of(expert);
        const int64_t size = last - first;
        plan_.kernels().linear[int(w.type)](w, first, last, in, 0, in.n, out, size,
                                            worker.kernel_scratch.data());
        if (const float* bias = of.bias_of(expert, n_rows()))
            for (int t = 0; t < in.n; t++)
                plan_.kernels().add(out + t * size, bias + first, size, out + t * size);
    }

    const Plan& plan_;
    const ExpertFacts f_;
    LinearInput input_;
    const Buffer& route_;
    const Buffer& out_;
    const Buffer* scores_;
    int64_t bytes_ = 0;  // bytes of an expert's gate and up
    size_t few_at_ = 0;  // offset in a worker's results
};

// ---- down

class ExpertSum : public Op {
  public:
    ExpertSum(const Plan& plan, ExpertSumFacts facts)
        : plan_(plan),
          f_(std::move(facts)),
          x_(plan.buffer(f_.x)),
          route_(plan.buffer(f_.route)),
          out_(plan.buffer(f_.out)),
          residual_(f_.residual < 0 ? nullptr : &plan.buffer(f_.residual)) {
        for (const Matrix& m : f_.down.weights) kinds_.serves(m);
        bytes_ = bytes_of(f_.down);
        const int most = std::min(kPieces * plan.n_threads(), kMaxChunks / 2);
        while (splits_ < kLanes && f_.n_used * splits_ < most) splits_ *= 2;
    }

    // With several tokens, the first phase arranges the neurons in the order of the groups and quantises
    // them. With one token and input-major copies, the first phase multiplies: a chunk is some of the lanes
    // of one expert, so that channels are read in long pieces.
    int n_phases(const StepTokens& step) const override {
        return step.rows(x_) > 1 || !f_.channels.empty() ? 2 : 1;
    }
    int n_chunks(int phase, const StepTokens& step) const override {
        const int n = step.rows(x_);
        if (n == 0) return 0;
        if (n == 1 && phase == 0 && !f_.channels.empty()) return f_.n_used * splits_;
        return n > 1 && phase == 0 ? prepare_chunks(n) : row_chunks(n);
    }

    void run(int phase, int chunk, const StepTokens& step, Worker& worker) const override {
        const int n = step.rows(x_);
        if (n > 1 && phase == 0) return prepare(chunk, n, worker);
        if (phase == 0 && !f_.channels.empty()) return multiply(chunk / splits_, chunk % splits_, worker);
        const int chunks = row_chunks(n);
        const int64_t first = panel_chunk(n_out(), chunks, chunk),
                      last = panel_chunk(n_out(), chunks, chunk + 1);
        float* sums = worker.results.as<float>();
        FfnCounts counts;  // with input-major copies, multiply() counts one token
        if (n > 1)
            counts.down_rows = int64_t(groups(n, worker).n) * width();
        else if (f_.channels.empty())
            counts.down_rows = int64_t(f_.n_used) * width();
        if (!(n == 1 ? one_token(first, last, worker, sums) : several(first, last, n, worker, sums))) return;
        const Kernels& kernels = plan_.kernels();
        const int64_t size = last - first;
        if (residual_)
            for (int t = 0; t < n; t++)
                kernels.add(sums + t * size, residual_->row(t) + first, size, sums + t * size);
        if (!worker.begin_commit()) return;
        const int parts = f_.apart ? f_.n_used : 1;
        for (int i = 0; i < n * parts; i++)
            std::copy_n(sums + i * size, size, out_.row(i / parts) + i % parts * n_out() + first);
        if (chunk == 0) counters.add(counts, worker.index());
        worker.end_commit();
    }

    // Prefetch the first rows of the chunk, a part of each expert's.
    bool prefetch(int phase, int chunk, int piece, const StepTokens& step) const override {
        const int n = step.rows(x_);
        if (n != 1 || phase != 0 || piece >= kPrefetchPieces || !f_.channels.empty()) return false;
        const int64_t first = panel_chunk(n_out(), row_chunks(1), chunk);
        const Matrix w = f_.down.of(expert_of(piece % f_.n_used));
        const uint8_t* at = w.row(first) + piece / f_.n_used * kPrefetchBytes;
        for (int64_t i = 0; i < kPrefetchBytes; i += 64) prefetch_line(at + i);
        return true;
    }

    Needs needs() const override {
        const int n = plan_.max_tokens();
        const int64_t one = largest_panel_chunk(n_out(), row_chunks(1)),
                      many = largest_panel_chunk(n_out(), row_chunks(std::max(n, 2)));
        const int64_t prepared = ceil_div(n, prepare_chunks(std::max(n, 2))) + 1;
        Needs needs;
        const int sums = f_.apart ? f_.n_used : 1;  // per token
        needs.result_floats = std::max<size_t>(
            {size_t(one) * (f_.n_used + 1), size_t(n) * (f_.n_used + sums) * many + many,
             InputsMemory::bytes(prepared * f_.n_used, width(), kinds_.floats) / sizeof(float) + 1});
        needs.input_width = width();
        needs.private_bytes = std::max(Groups::bytes(n, f_.n_used, n_expert()), list_at(f_.n_used));
        if (n > 1) needs.shared_bytes = InputsMemory::bytes(int64_t(n) * f_.n_used, width(), kinds_.floats);
        if (!f_.channels.empty()) {
            const int64_t folded = int64_t(one) * (f_.n_used + 5), outputs = n_out();
            needs.result_floats = std::max(
                {needs.result_floats, size_t(folded), size_t(outputs + channel_scratch_floats(outputs))});
            needs.shared_bytes =
                std::max<size_t>(needs.shared_bytes, size_t(f_.n_used * splits_) * n_out() * sizeof(float));
        }
        return needs;
    }

  private:
    int n_expert() const { return int(f_.down.weights.size()); }
    int64_t n_out() const { return f_.down.weights[0].rows; }
    int64_t width() const { return f_.down.weights[0].cols; }  // neurons of an expert
    int prepare_chunks(int n) const { return std::min(ceil_div(n, kPrepareTokens), kMaxChunks); }
    int row_chunks(int n) const {
        if (n > 1) return many_token_chunks(n_out(), plan_.n_threads());
        const int64_t most = std::min(kDecodeChunks, kSumChunks * plan_.n_threads());
        return int(std::clamp<int64_t>(bytes_ * f_.n_used / kChunkBytes, 1,
                                       std::min<int64_t>(most, ceil_div(n_out(), 16))));
    }
    int expert_of(int rank) const {  // for a single token
        const float id = route_.row(0)[rank];
        return id >= 0.0f && id < float(n_expert()) ? int(id) : 0;
    }

    // Compute sum += weight * part.
    void add(float weight, const float* part, int64_t size, float* scratch, float* sum) const {
        const Kernels& kernels = plan_.kernels();
        kernels.activate(Activation::Scale, weight, part, size, scratch);
        kernels.add(sum, scratch, size, sum);
    }

    // Return the offset of a worker's list of active channels for a part. The lists follow the inputs.
    size_t list_at(int part) const {
        const size_t inputs = (InputsMemory::bytes(f_.n_used, width(), kinds_.floats) + 63) / 64 * 64;
        const size_t list = sizeof(ActiveChannels) + ActiveChannels::bytes(width());
        return inputs + (f_.channels.empty() ? 0 : size_t(part) * ((list + 63) / 64 * 64));
    }
    // Return the inputs of a token's experts, and list their active channels.
    Inputs parts_of_token(Worker& worker) const {
        const InputsMemory rows(worker.inputs.data(), f_.n_used, width(), kinds_);
        const Inputs in = rows.inputs(f_.n_used);
        if (!worker.enter_inputs()) return in;
        for (int j = 0; j < f_.n_used; j++) {
            rows.set(plan_.kernels(), j, x_.row(0) + j * width());
            if (f_.channels.empty()) continue;
            uint8_t* list = worker.inputs.data() + list_at(j);
            new (list)
                ActiveChannels(list + sizeof(ActiveChannels), token_of(in, j), plan_.kernels().interleaved);
        }
        return in;
    }
    const ActiveChannels& active(const Worker& worker, int part) const {
        return *reinterpret_cast<const ActiveChannels*>(worker.inputs.data() + list_at(part));
    }
    bool by_channel(const Worker& worker, int part, int expert) const {
        const double share = double(active(worker, part).n_channels) / double(width());
        return share < f_.channels[size_t(expert)].below;
    }
    float* products(int part, int split) const {
        return reinterpret_cast<float*>(plan_.shared()) + (int64_t(part) * splits_ + split) * n_out();
    }

    // Sum some of the lanes of an expert's products, or multiply a share of its rows.
    void multiply(int part, int split, Worker& worker) const {
        const Kernels& kernels = plan_.kernels();
        const Inputs in = parts_of_token(worker);
        const int expert = expert_of(part);
        const Matrix w = f_.down.of(expert);
        float* results = worker.results.as<float>();
        int64_t first = 0, last = n_out();
        FfnCounts counts;
        const bool is_by_channel = by_channel(worker, part, expert);
        if (is_by_channel) {
            const ActiveChannels& channels = active(worker, part);
            kernels.channel_linear[int(w.type)](f_.channels[size_t(expert)], channels, token_of(in, part), 0,
                                                n_out(), split * kLanes / splits_, kLanes / splits_,
                                                results + n_out(), results);
            if (split == 0) counts.down_rows = channels.n_channels;
        } else {
            first = n_out() * split / splits_, last = n_out() * (split + 1) / splits_;
            kernels.linear[int(w.type)](w, first, last, in, part, part + 1, results, last - first,
                                        worker.kernel_scratch.data());
            if (split == 0) counts.down_rows = width();
        }
        if (!worker.begin_commit()) return;
        std::copy_n(results, last - first, products(part, is_by_channel ? split : 0) + first);
        counters.add(counts, worker.index());
        worker.end_commit();
    }

    bool one_token(int64_t first, int64_t last, Worker& worker, float* sums) const {
        const Kernels& kernels = plan_.kernels();
        const int64_t size = last - first;
        const Inputs in = parts_of_token(worker);
        float* part = sums + size;
        if (!f_.apart) std::fill_n(sums, size, 0.0f);
        for (int j = 0; j < f_.n_used; j++) {
            const int expert = expert_of(j);
            const Matrix w = f_.down.of(expert);
            if (f_.apart) part = sums + j * size;
            if (!f_.channels.empty())
                fold_lanes(kernels, products(j, 0) + first, n_out(),
                           by_channel(worker, j, expert) ? splits_ : 1, size, part + size, part);
            else
                kernels.linear[int(w.type)](w, first, last, in, j, j + 1, part, size,
                                            worker.kernel_scratch.data());
            if (const float* bias = f_.down.bias_of(expert, n_out()))
                kernels.add(part, bias + first, size, part);
            if (!f_.apart) add(route_.row(0)[f_.n_used + j], part, size, part, sums);
        }
        return true;
    }

    Groups groups(int n, Worker& worker) const {
        Groups groups(worker.inputs.data(), n, f_.n_used, n_expert());
        if (worker.enter_inputs())
            groups.find(route_);
        else
            groups.recall();
        return groups;
    }
    InputsMemory shared_rows(int n) const {
        return {plan_.shared(), int64_t(n) * f_.n_used, width(), kinds_};
    }

    void prepare(int chunk, int n, Worker& worker) const {
        const RowRange tokens(chunk, prepare_chunks(n), n);
        const Groups groups = this->groups(n, worker);
        const int64_t count = int64_t(tokens.count()) * f_.n_used, first = int64_t(tokens.first) * f_.n_used;
        const InputsMemory own(worker.results.data(), count, width(), kinds_);
        for (int64_t i = 0; i < count; i++)
            own.set(plan_.kernels(), i, x_.row((first + i) / f_.n_used) + (first + i) % f_.n_used * width());
        if (!worker.begin_commit()) return;
        const InputsMemory all = shared_rows(n);
        const Inputs in = own.inputs(int(count));
        for (int64_t i = 0; i < count; i++) all.copy(groups.places[first + i], in, i);
        worker.end_commit();
    }

    // Return false if the step is being cancelled.
    bool several(int64_t first, int64_t last, int n, Worker& worker, float* sums) const {
        const Kernels& kernels = plan_.kernels();
        const int64_t size = last - first;
        const Groups groups = this->groups(n, worker);
        const Inputs in = shared_rows(n).inputs(n * f_.n_used);
        const int64_t n_sums = int64_t(n) * (f_.apart ? f_.n_used : 1);
        float* parts = sums + n_sums * size;  // in the order of the groups
        float* scratch = parts + int64_t(n) * f_.n_used * size;
        for (int g = 0; g < groups.n; g++) {
            if (worker.cancelled()) return false;
            const Matrix w = f_.down.of(groups.experts[g]);
            const int begin = groups.first[g], end = groups.first[g + 1];
            float* part = parts + begin * size;
            kernels.linear[int(w.type)](w, first, last, in, begin, end, part, size,
                                        worker.kernel_scratch.data());
            if (const float* bias = f_.down.bias_of(groups.experts[g], n_out()))
                for (int i = 0; i < end - begin; i++)
                    kernels.add(part + i * size, bias + first, size, part + i * size);
        }
        for (int64_t i = 0; i < n_sums && f_.apart; i++)
            std::copy_n(parts + int64_t(groups.places[i]) * size, size, sums + i * size);
        for (int t = 0; t < n && !f_.apart; t++) {
            float* sum = sums + t * size;
            std::fill_n(sum, size, 0.0f);
            for (int j = 0; j < f_.n_used; j++)
                add(route_.row(t)[f_.n_used + j], parts + int64_t(groups.places[t * f_.n_used + j]) * size,
                    size, scratch, sum);
        }
        return true;
    }

    const Plan& plan_;
    const ExpertSumFacts f_;
    InputKinds kinds_;
    const Buffer& x_;
    const Buffer& route_;
    const Buffer& out_;
    const Buffer* residual_;
    int64_t bytes_ = 0;  // of an expert
    int splits_ = 1;     // parts of an expert's lanes, with copies: a power of two
};

// ---- down, with one row per neuron

// The neurons of an expert are split into kRanges ranges, as in axpy.cpp. Each output is summed over a
// range's neurons in order, then over the ranges, then over the experts. With one token, a chunk is a range
// of an expert. With several tokens, a chunk is some of the outputs; it decodes a tile of an expert's neurons
// once for all its tokens.
class ExpertAxpy : public Op {
  public:
    ExpertAxpy(const Plan& plan, ExpertSumFacts facts)
        : plan_(plan),
          f_(std::move(facts)),
          x_(plan.buffer(f_.x)),
          route_(plan.buffer(f_.route)),
          out_(plan.buffer(f_.out)),
          residual_(f_.residual < 0 ? nullptr : &plan.buffer(f_.residual)),
          range_(int64_t(ceil_div(ceil_div(n_neurons(), kTileNeurons), kRanges)) * kTileNeurons) {}

    int n_phases(const StepTokens& step) const override { return step.rows(x_) == 1 ? 2 : 1; }
    int n_chunks(int phase, const StepTokens& step) const override {
        const int n = step.rows(x_);
        if (n == 0) return 0;
        return n == 1 && phase == 0 ? f_.n_used * n_ranges() : column_chunks(n);
    }

    void run(int phase, int chunk, const StepTokens& step, Worker& worker) const override {
        const int n = step.rows(x_);
        if (n == 1 && phase == 0) return add_range(chunk / n_ranges(), chunk % n_ranges(), worker);
        const int64_t first = first_column(chunk, column_chunks(n)),
                      count = first_column(chunk + 1, column_chunks(n)) - first;
        const Kernels& kernels = plan_.kernels();
        float* sums = worker.results.as<float>();  // [n][count], then parts [n * n_used][count] by entry
        float* parts = sums + n * count;
        Groups groups(worker.inputs.data(), n, f_.n_used, n_expert());
        if (worker.enter_inputs())
            groups.find(route_);
        else
            groups.recall();
        FfnCounts counts;
        if (n == 1)
            add_ranges(groups, first, count, parts);
        else if (!add_tiles(groups, n, first, count, parts, worker, counts))
            return;
        for (int g = 0; g < groups.n; g++)
            if (const float* bias = f_.down.bias_of(groups.experts[g], n_out()))
                for (int i = groups.first[g]; i < groups.first[g + 1]; i++)
                    kernels.add(parts + i * count, bias + first, count, parts + i * count);
        for (int t = 0; t < n; t++) {
            float* sum = sums + t * count;
            std::fill_n(sum, count, 0.0f);
            for (int j = 0; j < f_.n_used; j++) {
                float* part = parts + int64_t(groups.places[t * f_.n_used + j]) * count;
                kernels.activate(Activation::Scale, route_.row(t)[f_.n_used + j], part, count, part);
                kernels.add(sum, part, count, sum);
            }
            if (residual_) kernels.add(sum, residual_->row(t) + first, count, sum);
        }
        if (!worker.begin_commit()) return;
        for (int t = 0; t < n; t++) std::copy_n(sums + t * count, count, out_.row(t) + first);
        if (chunk == 0) counters.add(counts);  // all chunks read the same rows: count them once
        worker.end_commit();
    }

    Needs needs() const override {
        const int n = plan_.max_tokens();
        Needs needs;
        needs.result_floats = size_t(n_out()) + 2 * range_;
        for (int tokens : {1, std::min(n, 2), n}) {
            const size_t count = size_t(ceil_div(ceil_div(n_out(), 32), column_chunks(tokens)) + 1) * 32;
            const size_t floats = count * (size_t(tokens) * (2 + f_.n_used) + kTileNeurons) +
                                  size_t(tokens) * (2 * kTileNeurons + 1) + 64;
            needs.result_floats = std::max(needs.result_floats, floats);
        }
        needs.private_bytes = Groups::bytes(n, f_.n_used, n_expert());
        needs.shared_bytes = size_t(f_.n_used) * n_ranges() * n_out() * sizeof(float);
        return needs;
    }

  private:
    static constexpr int kRanges = 8;
    static constexpr int kTileNeurons = 64;       // one bit each of a word; ranges begin at whole tiles
    static constexpr int64_t kTileColumns = 128;  // of a chunk of several tokens
    static constexpr int64_t kSumColumns = 1024;  // of a chunk that sums the ranges

    int n_expert() const { return int(f_.down.weights.size()); }
    int64_t n_out() const { return f_.down.weights[0].cols; }
    int64_t n_neurons() const { return f_.down.weights[0].rows; }
    int n_ranges() const { return ceil_div(n_neurons(), range_); }
    int column_chunks(int n) const {
        return std::min(ceil_div(n_out(), n == 1 ? kSumColumns : kTileColumns), kMaxChunks);
    }
    int64_t first_column(int chunk, int chunks) const {
        return chunk == chunks ? n_out() : int64_t(ceil_div(n_out(), 32)) * chunk / chunks * 32;
    }
    float* shared_sums(int rank, int range) const {
        return reinterpret_cast<float*>(plan_.shared()) + (int64_t(rank) * n_ranges() + range) * n_out();
    }

    // Return a bit per neuron that a token adds; all neurons if none are skipped.
    uint64_t wanted(const float* values, int64_t count) const {
        uint64_t bits = ~uint64_t(0);
        if (f_.sparse) plan_.kernels().nonzero_bits(values, count, &bits);
        return count < kTileNeurons ? bits & ((uint64_t(1) << count) - 1) : bits;
    }

    void add_range(int rank, int range, Worker& worker) const {
        const float id = route_.row(0)[rank];
        const Matrix w = f_.down.of(id >= 0.0f && id < float(n_expert()) ? int(id) : 0);
        const int64_t first = range * range_, last = std::min(first + range_, n_neurons());
        const float* x = x_.row(0) + rank * n_neurons();
        float* sums = worker.results.as<float>();
        float* values = sums + n_out();
        int32_t* neurons = reinterpret_cast<int32_t*>(values + range_);
        int n = 0;
        for (int64_t at = first; at < last; at += kTileNeurons)
            for (uint64_t rest = wanted(x + at, std::min<int64_t>(last - at, kTileNeurons)); rest;
                 rest &= rest - 1) {
                neurons[n] = int32_t(at + std::countr_zero(rest));
                values[n] = x[neurons[n]];
                n++;
            }
        std::fill_n(sums, n_out(), 0.0f);
        plan_.kernels().axpy[int(w.type)](w, neurons, values, n, 0, n_out(), sums);
        if (!worker.begin_commit()) return;
        std::copy_n(sums, n_out(), shared_sums(rank, range));
        FfnCounts counts;
        counts.down_rows = n;
        counters.add(counts);
        worker.end_commit();
    }

    void add_ranges(const Groups& groups, int64_t first, int64_t count, float* parts) const {
        for (int j = 0; j < f_.n_used; j++) {
            float* part = parts + int64_t(groups.places[j]) * count;
            std::copy_n(shared_sums(j, 0) + first, count, part);
            for (int r = 1; r < n_ranges(); r++)
                plan_.kernels().add(part, shared_sums(j, r) + first, count, part);
        }
    }

    // Return false if the step is being cancelled.
    bool add_tiles(const Groups& groups, int n, int64_t first, int64_t count, float* parts, Worker& worker,
                   FfnCounts& counts) const {
        const Kernels& kernels = plan_.kernels();
        float* range_sums = parts + int64_t(n) * f_.n_used * count;
        float* tile = range_sums + int64_t(n) * count;
        float* values = tile + kTileNeurons * count;
        int32_t* neurons = reinterpret_cast<int32_t*>(values + n * kTileNeurons);
        int32_t* found = neurons + n * kTileNeurons;
        std::fill_n(parts, int64_t(n) * f_.n_used * count, 0.0f);
        for (int g = 0; g < groups.n; g++) {
            if (worker.cancelled()) return false;
            const Matrix w = f_.down.of(groups.experts[g]);
            const int32_t* entries = groups.of(g);
            const int tokens = groups.count(g);
            float* own = parts + int64_t(groups.first[g]) * count;
            std::fill_n(range_sums, tokens * count, 0.0f);
            for (int64_t neuron = 0; neuron < n_neurons(); neuron += kTileNeurons) {
                const int64_t size = std::min<int64_t>(n_neurons() - neuron, kTileNeurons);
                uint64_t any = 0;
                for (int i = 0; i < tokens; i++) {
                    const float* x =
                        x_.row(entries[i] / f_.n_used) + entries[i] % f_.n_used * n_neurons() + neuron;
                    const uint64_t bits = wanted(x, size);
                    any |= bits;
                    found[i] = 0;
                    for (uint64_t rest = bits; rest; rest &= rest - 1) {
                        const int at = i * kTileNeurons + found[i]++;
                        neurons[at] = std::countr_zero(rest);
                        values[at] = x[neurons[at]];
                    }
                }
                counts.down_rows += std::popcount(any);
                for (uint64_t rest = any; rest; rest &= rest - 1) {
                    const int i = std::countr_zero(rest);
                    kernels.decode[int(w.type)](w, neuron + i, first, count, tile + i * count);
                }
                for (int i = 0; i < tokens && any; i++)
                    kernels.tile_axpy(tile, neurons + i * kTileNeurons, values + i * kTileNeurons, found[i],
                                      count, range_sums + i * count);
                if ((neuron + kTileNeurons) % range_ == 0 || neuron + kTileNeurons >= n_neurons()) {
                    kernels.add(own, range_sums, tokens * count, own);
                    std::fill_n(range_sums, tokens * count, 0.0f);
                }
            }
        }
        return true;
    }

    const Plan& plan_;
    const ExpertSumFacts f_;
    const Buffer& x_;
    const Buffer& route_;
    const Buffer& out_;
    const Buffer* residual_;
    const int64_t range_;  // neurons of a range
};

}  // namespace

namespace {

// Return the number of experts per token in a route.
int n_used_of(const Facts& facts, int route, int out, int n_expert) {
    facts.same_rows(route, out);
    const int64_t width = facts.width(route);
    require(width % 2 == 0 && width / 2 <= n_expert, "a route must have ids and weights of existing experts");
    return int(width / 2);
}

}  // namespace

// Return the input-major copies of the experts' matrices, which are stored one after another.
std::vector<ChannelMatrix> expert_channels(Facts& facts, const ExpertMatrices& by_row) {
    const std::unique_ptr<Facts> of = facts.record("channels");
    const std::span<const uint8_t> data = of->bytes("data");
    const size_t n = by_row.weights.size();
    std::vector<ChannelMatrix> made;
    require(data.size() % n == 0, "every expert needs a copy");
    for (size_t e = 0; e < n; e++) {
        made.push_back(
            channels_of(*of, by_row.weights[e], data.subspan(data.size() / n * e, data.size() / n)));
        require(made.back().first_col == 0, "an expert's copy must have all of its outputs");
    }
    return made;
}

// The neurons of a route's experts; without an activation, the products with up. missed: compute only the
// experts that the store of up missed (true) or had (false).
static const Registered kExpertNeurons("expert_neurons", [](Facts& facts) -> std::unique_ptr<Op> {
    ExpertFacts f;
    f.x = facts.buffer("x"), f.route = facts.buffer("route"), f.out = facts.buffer("out");
    facts.same_rows(f.x, f.out);
    const int n_expert = facts.integer("n_expert", 1, kMaxExperts);
    f.n_used = n_used_of(facts, f.route, f.out, n_expert);
    require(f.n_used > 0 && facts.width(f.out) % f.n_used == 0, "the width must be a multiple of n_used");
    const int64_t rows = facts.width(f.out) / f.n_used, width = facts.width(f.x);
    f.sparse = facts.flag("sparse");
    const bool gated = facts.has("gate");
    if (gated) f.gate = facts.experts("gate", n_expert, rows, width, rows);
    f.up = facts.experts("up", n_expert, rows, width, rows);
    f.activated = facts.has("activation");
    f.up_activated = facts.has("up_activation");
    require((!gated || f.activated) && (gated || !f.up_activated), "the activations do not fit");
    f.gate_threshold = facts.real("gate_threshold", 0.0f);
    require(f.gate_threshold >= 0.0f && (f.activated || f.gate_threshold == 0.0f),
            "a threshold needs an activation");
    if (f.activated) f.activation = facts.activation("activation");
    f.activation_threshold = facts.real("activation_threshold", 0.0f);
    if (f.up_activated) f.up_activation = facts.activation("up_activation");
    f.up_threshold = facts.real("up_threshold", 0.0f);
    if ((f.scores = facts.buffer_or_none("scores")) >= 0) {
        f.threshold = facts.real("threshold");
        facts.same_shape(f.scores, f.out);
        require(f.activated, "a predictor needs an activation");
    }
    if (facts.has("missed")) {
        f.missed = facts.missed_rows(facts.record("up")->tensors("tensors").front().stored, n_expert);
        f.missed_which = facts.flag("missed");
    }
    return std::make_unique<ExpertNeurons>(facts.plan(), std::move(f));
});

// neuron_major: matrices have a row per neuron; `sparse` then skips rows of neurons that are zero. apart:
// return the experts' results side by side, neither weighted nor summed.
static const Registered kExpertSum("expert_sum", [](Facts& facts) -> std::unique_ptr<Op> {
    ExpertSumFacts f;
    f.x = facts.buffer("x"), f.route = facts.buffer("route"), f.out = facts.buffer("out");
    facts.same_rows(f.x, f.out);
    const int n_expert = facts.integer("n_expert", 1, kMaxExperts);
    f.n_used = n_used_of(facts, f.route, f.out, n_expert);
    require(f.n_used > 0 && facts.width(f.x) % f.n_used == 0, "the width must be a multiple of n_used");
    f.residual = facts.residual(f.x, f.out);
    f.neuron_major = facts.flag("neuron_major"), f.apart = facts.flag("apart"),
    f.sparse = facts.flag("sparse");
    require(!f.apart || (!f.neuron_major && f.residual < 0 && facts.width(f.out) % f.n_used == 0),
            "separate results need row-major matrices and no residual");
    const int64_t neurons = facts.width(f.x) / f.n_used,
                  outputs = facts.width(f.out) / (f.apart ? f.n_used : 1);
    f.down = f.neuron_major ? facts.experts("down", n_expert, neurons, outputs, outputs)
                            : facts.experts("down", n_expert, outputs, neurons, outputs);
    if (f.neuron_major) return std::make_unique<ExpertAxpy>(facts.plan(), std::move(f));
    if (facts.has("channels")) f.channels = expert_channels(facts, f.down);
    return std::make_unique<ExpertSum>(facts.plan(), std::move(f));
});

}  // namespace hotset
