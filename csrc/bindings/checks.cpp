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
    const int n_sequences = int(batch.pages.shape(0)), max_pages = int(batch.pages.shape(1));
    require(n > 0 && n <= limits.max_tokens,
            "a step takes 1 to " + std::to_string(limits.max_tokens) + " tokens, not " + std::to_string(n));
    require(int(batch.positions.size()) == n && int(batch.sequences.size()) == n,
            "tokens, positions and sequences of a batch differ in length");
    const int32_t *tokens = batch.tokens.data(), *positions = batch.positions.data();
    const int32_t *sequences = batch.sequences.data(), *outputs = batch.outputs.data();
    for (int t = 0; t < n; t++) {
        const int sequence = sequences[t], position = positions[t], last = position / kPageSize;
        require(!limits.n_vocab || (tokens[t] >= 0 && tokens[t] < *limits.n_vocab),
                "a token id lies outside the vocabulary of " + std::to_string(limits.n_vocab.value_or(0)));
        require(sequence >= 0 && sequence < n_sequences, "a sequence of the batch has no page table");
        require(!limits.n_positions || position < limits.n_positions,
                "position " + std::to_string(position) + " lies beyond the model's context of " +
                    std::to_string(limits.n_positions));
        const bool adjacent = t > 0 && sequences[t - 1] == sequence;
        require(!adjacent || positions[t - 1] < position, "positions of a sequence must rise");
        bool has_pages = position >= 0 && last < max_pages;
        for (int i = adjacent ? positions[t - 1] / kPageSize : 0; has_pages && i <= last; i++) {
            const int page = batch.pages.data()[int64_t(sequence) * max_pages + i];
            has_pages = page >= 0 && page < limits.n_pages;
        }
        require(has_pages, "position " + std::to_string(position) + " of sequence " +
                               std::to_string(sequence) + " has no page in the cache");
    }
    for (int i = 0; i < n_outputs; i++) {
        require(outputs[i] >= 0 && outputs[i] < n, "an output index lies outside the batch");
        require(i == 0 || outputs[i - 1] < outputs[i], "output indices of a batch must rise");
    }
}

namespace {

nb::object cache_slots(const Ints& tokens, const Ints& positions, const Ints& sequences,
                       const IntMatrix& pages, const Ints& outputs, int max_tokens, int n_pages,
                       const std::optional<int64_t>& n_vocab) {
    check_batch({max_tokens, n_pages, n_vocab}, {tokens, positions, sequences, pages, outputs});
    int64_t* out;
    auto result = new_array<int64_t>(out, int64_t(tokens.size()));
    for (size_t t = 0; t < tokens.size(); t++) {
        const int position = positions.data()[t];
        const int64_t row = int64_t(sequences.data()[t]) * int64_t(pages.shape(1));
        out[t] = int64_t(pages.data()[row + position / kPageSize]) * kPageSize + position % kPageSize;
    }
    return nb::cast(result);
}

}  // namespace

void bind_checks(nb::module_& m) {
    m.def("cache_slots", &cache_slots, "tokens"_a, "positions"_a, "sequences"_a, "pages"_a, "outputs"_a,
          "max_tokens"_a, "n_pages"_a, "n_vocab"_a.none(),
          "Where the cache holds each token of a batch, int64 [n_tokens]; checks the batch "
          "(backends/base.py).");
}

}  // namespace hotset::bindings
