#include "bindings/bindings.h"

#include <cstdlib>

#include "plan.h"

namespace hotset::bindings {

const Kernels& chosen_kernels(const std::optional<std::string>& isa) {
    const char* forced = isa ? isa->c_str() : std::getenv("HOTSET_ISA");
    const char* error = nullptr;
    const Kernels* kernels = select_kernels(forced, &error);
    if (!kernels && forced && *forced)
        throw nb::value_error((std::string("HOTSET_ISA=") + forced + " cannot be used: " + error).c_str());
    if (!kernels) throw nb::value_error(error);
    return *kernels;
}

Matrix make_matrix(int type, const Bytes& data, int64_t rows, int64_t cols) {
    require(type >= 0 && type < kTypeCount, "tensor type " + std::to_string(type) + " has no kernel");
    return Facts::matrix({Type(type), {data.data(), data.size()}, {}, {}}, rows, cols);
}

void check_threads(int n_threads) {
    require(n_threads > 0 && n_threads <= kMaxThreads,
            "the number of threads must be 1 to " + std::to_string(kMaxThreads));
}

void check_batch(const BatchLimits& limits, const BatchArrays& batch) {
    const int n = int(batch.tokens.size()), n_outputs = int(batch.outputs.size());
    const int n_sequences = int(batch.kv_blocks.shape(0)), max_kv_blocks = int(batch.kv_blocks.shape(1));
    require(n > 0 && n <= limits.max_tokens,
            "a step takes 1 to " + std::to_string(limits.max_tokens) + " tokens, not " + std::to_string(n));
    require(int(batch.positions.size()) == n && int(batch.sequences.size()) == n,
            "tokens, positions and sequences of a batch differ in length");
    const int32_t *tokens = batch.tokens.data(), *positions = batch.positions.data();
    const int32_t *sequences = batch.sequences.data(), *outputs = batch.outputs.data();
    for (int t = 0; t < n; t++) {
        const int sequence = sequences[t], position = positions[t], last = position / kKvBlockSize;
        require(!limits.n_vocab || (tokens[t] >= 0 && tokens[t] < *limits.n_vocab),
                "a token id is outside the vocabulary of " + std::to_string(limits.n_vocab.value_or(0)));
        require(sequence >= 0 && sequence < n_sequences, "a sequence of the batch has no block table");
        require(!limits.n_positions || position < limits.n_positions,
                "position " + std::to_string(position) + " is beyond the model's context of " +
                    std::to_string(limits.n_positions));
        const bool adjacent = t > 0 && sequences[t - 1] == sequence;
        require(!adjacent || positions[t - 1] < position, "positions of a sequence must rise");
        bool has_kv_blocks = position >= 0 && last < max_kv_blocks;
        for (int i = adjacent ? positions[t - 1] / kKvBlockSize : 0; has_kv_blocks && i <= last; i++) {
            const int kv_block = batch.kv_blocks.data()[int64_t(sequence) * max_kv_blocks + i];
            has_kv_blocks = kv_block >= 0 && kv_block < limits.n_kv_blocks;
        }
        require(has_kv_blocks, "position " + std::to_string(position) + " of sequence " +
                                   std::to_string(sequence) + " has no KV block in the cache");
    }
    for (int i = 0; i < n_outputs; i++) {
        require(outputs[i] >= 0 && outputs[i] < n, "an output index is outside the batch");
        require(i == 0 || outputs[i - 1] < outputs[i], "output indices of a batch must rise");
    }
}

namespace {

nb::object cache_slots(const Ints& tokens, const Ints& positions, const Ints& sequences,
                       const IntMatrix& kv_blocks, const Ints& outputs, int max_tokens, int n_kv_blocks,
                       const std::optional<int64_t>& n_vocab) {
    check_batch({max_tokens, n_kv_blocks, n_vocab}, {tokens, positions, sequences, kv_blocks, outputs});
    int64_t* out;
    auto result = new_array<int64_t>(out, int64_t(tokens.size()));
    for (size_t t = 0; t < tokens.size(); t++) {
        const int position = positions.data()[t];
        const int64_t row = int64_t(sequences.data()[t]) * int64_t(kv_blocks.shape(1));
        out[t] =
            int64_t(kv_blocks.data()[row + position / kKvBlockSize]) * kKvBlockSize + position % kKvBlockSize;
    }
    return nb::cast(result);
}

}  // namespace

void bind_checks(nb::module_& m) {
    m.def("cache_slots", &cache_slots, "tokens"_a, "positions"_a, "sequences"_a, "kv_blocks"_a, "outputs"_a,
          "max_tokens"_a, "n_kv_blocks"_a, "n_vocab"_a.none(),
          "Return each token's slot in the cache, int64 [n_tokens]; checks the batch (backends/base.py).");
}

}  // namespace hotset::bindings
