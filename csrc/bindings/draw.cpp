#include "draw.h"

#include "bindings/bindings.h"
#include "plan.h"

namespace hotset::bindings {
namespace {

using Biases = std::vector<std::pair<int64_t, float>>;

std::unique_ptr<Draw> make_draw(int64_t n_vocab, double temperature, int64_t top_k, double top_p,
                                double min_p, const std::tuple<float, float, float>& penalties, Biases bias) {
    require(n_vocab > 0 && n_vocab % kLogitGroup == 0, "groups of logits are whole");
    require(temperature >= 0 && (temperature == 0 || top_k > 0),
            "a token is drawn from a number of likely ones");
    for (const auto& [id, value] : bias) require(id >= 0 && id < n_vocab, "a bias is of a token");
    const auto& [repetition, frequency, presence] = penalties;
    return std::make_unique<Draw>(
        DrawRules{temperature, top_k, top_p, min_p, repetition, frequency, presence, std::move(bias)},
        n_vocab);
}

int64_t token(Draw& draw, const Floats& logits, const Floats& largest, const nb::dict& counts, double u) {
    require(
        int64_t(logits.size()) == draw.n_vocab() && int64_t(largest.size()) * kLogitGroup == draw.n_vocab(),
        "a row of logits has the largest of each group");
    std::vector<std::pair<int64_t, int64_t>> counted;
    counted.reserve(counts.size());
    for (const auto& [id, count] : counts) {
        counted.emplace_back(nb::cast<int64_t>(id), nb::cast<int64_t>(count));
        require(counted.back().first >= 0 && counted.back().first < draw.n_vocab(), "a count is of a token");
    }
    return draw.token(logits.data(), largest.data(), counted, u);
}

}  // namespace

void bind_draw(nb::module_& m) {
    nb::class_<Draw>(m, "Draw", "Draws tokens of one sequence by groups of logits (csrc/draw.h).")
        .def(nb::new_(&make_draw), "n_vocab"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a,
             "penalties"_a, "bias"_a)
        .def("token", &token, "logits"_a, "largest"_a, "counts"_a, "u"_a);
}

}  // namespace hotset::bindings
