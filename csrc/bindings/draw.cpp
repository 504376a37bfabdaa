#include "draw.h"

#include <nanobind/stl/unordered_map.h>

#include "bindings/bindings.h"
#include "plan.h"

namespace hotset::bindings {
namespace {

using Tokens = std::vector<int64_t>;
using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The input of one draw: the sampler, logits, maxima of groups, candidates, allowed tokens as bits and as
// ids, u (a random number in [0, 1)), whether XTC applies (LogitRow), and DrawJob::n_top.
using PythonJob = std::tuple<Draw*, Floats, std::optional<Floats>, std::optional<Ints>, std::optional<Bytes>,
                             std::optional<Ids>, double, bool, std::optional<int64_t>>;
using PythonLogprobs = std::pair<double, Tokens>;

void require_tokens(const Tokens& tokens, int64_t n_vocab) {
    for (const int64_t token : tokens) require(token >= 0 && token < n_vocab, "a token is out of range");
}

std::unique_ptr<Draw> make_draw(int64_t n_vocab, const RuleNumbers& rules, Draw::Bias bias,
                                const std::vector<Tokens>& breakers, const Tokens& tokens) {
    require(n_vocab > 0 && n_vocab <= std::numeric_limits<int32_t>::max(), "n_vocab is out of range");
    require_tokens(tokens, n_vocab);
    for (const auto& [id, value] : bias) require_tokens({id}, n_vocab);
    for (const Tokens& breaker : breakers) require(!breaker.empty(), "a DRY breaker is empty");
    return std::make_unique<Draw>(rules, std::move(bias), breakers, n_vocab, tokens);
}

DrawJob job_of(const PythonJob& from) {
    const auto& [draw, logits, largest, candidates, bits, ids, u, has_xtc, n_top] = from;
    LogitRow row = {logits.data(), int64_t(logits.size())};
    row.u = u;
    row.has_xtc = has_xtc;
    require(draw != nullptr && row.n > 0, "a draw needs logits");
    if (candidates) {
        require(int64_t(candidates->size()) == row.n, "candidates and logits differ in length");
        row.candidates = candidates->data();
        for (int64_t i = 0; i < row.n; i++) {
            const int64_t id = row.candidates[i];
            require(id >= 0 && id < draw->n_vocab() && (i == 0 || row.candidates[i - 1] < id),
                    "candidates must be token ids in rising order");
        }
    } else {
        require(row.n == draw->n_vocab(), "there must be one logit per token of the vocabulary");
    }
    require(!(candidates && (bits || ids)), "allowed tokens cannot be combined with candidates");
    if (largest && !candidates) {
        require(int64_t(largest->size()) * kLogitGroup == row.n, "each group needs one maximum");
        row.largest = largest->data();
    }
    if (ids) {
        row.allowed = ids->data();
        row.n_allowed = int64_t(ids->size());
        for (int64_t i = 0; i < row.n_allowed; i++)
            require(row.allowed[i] >= 0 && row.allowed[i] < row.n, "an allowed token is out of range");
    } else if (bits) {
        row.allowed_bits = bits->data();
        row.n_allowed_bytes = int64_t(bits->size());
    }
    require(!n_top || (!candidates && *n_top >= 0 && *n_top <= row.n), "logprobs need a whole row");
    return {draw, row, n_top.value_or(DrawJob::kNoLogprobs)};
}

std::vector<std::pair<int64_t, std::optional<PythonLogprobs>>> draw(const std::vector<PythonJob>& jobs,
                                                                    const std::shared_ptr<Runtime>& runtime) {
    std::vector<DrawJob> checked;
    checked.reserve(jobs.size());
    for (const PythonJob& job : jobs) checked.push_back(job_of(job));
    const Kernels& kernels = chosen_kernels(std::nullopt);
    std::vector<DrawnToken> drawn;
    {
        // This thread draws candidates in microseconds. If it released the GIL, another thread could keep it
        // for longer.
        const bool is_long =
            std::ranges::any_of(checked, [](const DrawJob& job) { return !job.row.candidates; });
        std::optional<nb::gil_scoped_release> release;
        if (is_long) release.emplace();
        drawn = draw_tokens(checked, kernels, is_long ? runtime.get() : nullptr);
    }
    std::vector<std::pair<int64_t, std::optional<PythonLogprobs>>> result;
    for (size_t i = 0; i < drawn.size(); i++) {
        result.emplace_back(drawn[i].token, std::nullopt);
        if (checked[i].n_top != DrawJob::kNoLogprobs)
            result.back().second.emplace(drawn[i].logprobs.log_total, std::move(drawn[i].logprobs.top));
    }
    return result;
}

void accept(Draw& draw, int64_t token) {
    require_tokens({token}, draw.n_vocab());
    draw.accept(token);
}

nb::object adjusted(const Draw& draw, const Floats& logits) {
    require(int64_t(logits.size()) == draw.n_vocab(), "there must be one logit per token of the vocabulary");
    float* out;
    auto result = new_array<float>(out, draw.n_vocab());
    draw.adjust(logits.data(), out);
    return nb::cast(result);
}

std::vector<PythonLogprobs> logprobs(const FloatMatrix& rows, int64_t n_top,
                                     const std::shared_ptr<Runtime>& runtime) {
    const auto n_rows = int64_t(rows.shape(0)), n = int64_t(rows.shape(1));
    require(n > 0 && n_top >= 0 && n_top <= n, "n_top must be between 0 and the number of logits");
    const Kernels& kernels = chosen_kernels(std::nullopt);
    std::vector<PythonLogprobs> result;
    const nb::gil_scoped_release release;
    for (RowLogprobs& row : row_logprobs(rows.data(), n_rows, n, n_top, kernels, runtime.get()))
        result.emplace_back(row.log_total, std::move(row.top));
    return result;
}

}  // namespace

void bind_draw(nb::module_& m) {
    m.attr("NOTHING_ALLOWED") = Drawn::kNothing;
    m.attr("NOT_NUMBERS") = Drawn::kNotNumbers;
    nb::class_<Draw>(m, "Draw", "Draws the tokens of one sequence (csrc/draw.h).")
        .def(nb::new_(&make_draw), "n_vocab"_a, "rules"_a, "bias"_a, "breakers"_a, "tokens"_a)
        .def_prop_ro("n_penalised", &Draw::n_penalised)
        .def("accept", &accept, "token"_a)
        .def("adjusted", &adjusted, "logits"_a)
        .def("clone", [](const Draw& draw) { return std::make_unique<Draw>(draw); });
    m.def("draw_tokens", &draw, "jobs"_a, "runtime"_a.none());
    m.def("row_logprobs", &logprobs, "rows"_a, "n_top"_a, "runtime"_a.none());
}

}  // namespace hotset::bindings
