#include "replacement.h"

#include "bindings/bindings.h"

namespace hotset::bindings {
namespace {

std::unique_ptr<Replacement> make_replacement(int n_layers, int n_ids, const std::vector<int32_t>& slots,
                                              int half_life) {
    require(n_layers > 0 && n_ids > 0 && int64_t(n_layers) * n_ids < INT32_MAX,
            "a cache needs layers and entries");
    require(slots.size() == 1 || slots.size() == size_t(n_layers),
            "slots must be one number for all layers, or one per layer");
    int64_t n_slots = 0;
    for (int32_t n : slots) {
        require(n >= 0, "the number of slots is negative");
        n_slots += n;
    }
    require(n_slots < INT32_MAX, "a cache must have fewer than 2^31 slots");
    require(half_life >= 0 && half_life <= 1 << 20 && (half_life & (half_life - 1)) == 0,
            "a half-life must be a power of two, or 0");
    return std::make_unique<Replacement>(n_layers, n_ids, slots, half_life);
}

void require_entry(const Replacement& policy, int layer, int32_t id) {
    require(layer >= 0 && layer < policy.n_layers(), "there is no layer " + std::to_string(layer));
    require(id >= 0 && id < policy.n_ids(), "there is no entry " + std::to_string(id));
}

void expect(Replacement& policy, int layer, const Floats& shares) {
    require_entry(policy, layer, 0);
    require(shares.size() == size_t(policy.n_ids()), "there must be one share per entry");
    policy.expect(layer, shares.data());
}

// Returns int32 [3][n]: slots, whether each is a hit, evicted ids.
nb::object looked_up(Replacement& policy, int layer, const Ints& ids, bool credit) {
    const size_t n = ids.size();
    require_entry(policy, layer, 0);
    for (size_t i = 0; i < n; ++i) require_entry(policy, layer, ids.data()[i]);
    std::vector<Replacement::Place> places(n);
    policy.lookup(layer, ids.data(), n, credit, places.data());
    auto* answer = new int32_t[3 * n + 1];
    nb::capsule owner(answer, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
    for (size_t i = 0; i < n; ++i) {
        answer[i] = places[i].slot;
        answer[n + i] = places[i].hit;
        answer[2 * n + i] = places[i].evicted;
    }
    return nb::cast(nb::ndarray<nb::numpy, int32_t>(answer, {3, n}, owner));
}

std::vector<int64_t> replayed(Replacement& policy, const Ints& ids, const IntMatrix& counts, size_t first,
                              bool by_layer) {
    require(counts.shape(1) == size_t(policy.n_layers()), "the trace and the cache differ in their layers");
    int64_t n = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
        require(counts.data()[i] >= 0, "the length of a lookup is negative");
        n += counts.data()[i];
    }
    require(n == int64_t(ids.size()), "the number of ids differs from the sum of counts");
    for (size_t i = 0; i < ids.size(); ++i) require_entry(policy, 0, ids.data()[i]);
    std::vector<int64_t> hits(counts.shape(1));
    nb::gil_scoped_release release;
    policy.replay(ids.data(), counts.data(), counts.shape(0), first, by_layer, hits.data());
    return hits;
}

// spans: [n][3], the fields of Span.
int64_t optimal(const IntMatrix& spans, int32_t n_lookups, int32_t first, int64_t n_slots) {
    require(spans.shape(1) == 3 && first >= 0 && first <= n_lookups && n_slots >= 0, "spans do not fit");
    std::vector<Span> made(spans.shape(0));
    for (size_t i = 0; i < made.size(); ++i) {
        const int32_t* s = spans.data() + 3 * i;
        require(
            0 <= s[0] && s[0] < s[1] && s[1] < n_lookups && s[2] > 0 && (i == 0 || made[i - 1].from <= s[0]),
            "spans must begin in rising order, and end later, within the lookups");
        made[i] = {s[0], s[1], s[2]};
    }
    nb::gil_scoped_release release;
    return optimal_hits(made.data(), made.size(), n_lookups, first, n_slots);
}

}  // namespace

void bind_replacement(nb::module_& m) {
    nb::class_<Replacement>(m, "Replacement",
                            "The replacement policy of a cache with few slots (csrc/replacement.h).")
        .def(nb::new_(&make_replacement), "n_layers"_a, "n_ids"_a, "slots"_a, "half_life"_a)
        .def_prop_ro("n_slots", &Replacement::n_slots)
        .def("expect", &expect, "layer"_a, "shares"_a)
        .def("begin_step", &Replacement::begin_step)
        .def("lookup", &looked_up, "layer"_a, "ids"_a, "credit"_a)
        .def(
            "drop",
            [](Replacement& policy, int layer, int32_t id) {
                require_entry(policy, layer, id);
                policy.drop(layer, id);
            },
            "layer"_a, "id"_a)
        .def(
            "find",
            [](const Replacement& policy, int layer, int32_t id) {
                require_entry(policy, layer, id);
                return policy.find(layer, id);
            },
            "layer"_a, "id"_a)
        .def("replay", &replayed, "ids"_a, "counts"_a, "first"_a, "by_layer"_a);
    m.def("optimal_hits", &optimal, "spans"_a, "n_lookups"_a, "first"_a, "n_slots"_a,
          "Return the hits of a cache that knows the future (csrc/replacement.h).");
}

}  // namespace hotset::bindings
