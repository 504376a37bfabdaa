#include "replacement.h"

#include <algorithm>
#include <cmath>
#include <queue>

#include "threads.h"

namespace hotset {

namespace {

constexpr int kLargestExponent = 512;  // of a credit's weight, before all are scaled down, with room for sums
constexpr double kTrust = 0.25;        // weight of expected use: other texts use other entries (decision 013)
constexpr size_t kAhead = 16;          // entries to prefetch, since they are scattered in memory

}  // namespace

Replacement::Replacement(int n_layers, int n_ids, std::vector<int32_t> slots, int half_life)
    : n_layers_(n_layers),
      n_ids_(n_ids),
      half_life_(half_life),
      entries_(size_t(n_layers) * size_t(n_ids)),
      pools_(slots.size()) {
    int32_t first = 0;
    for (size_t i = 0; i < slots.size(); ++i) {
        pools_[i].free.resize(size_t(slots[i]));
        for (int32_t j = 0; j < slots[i]; ++j) pools_[i].free[size_t(j)] = first + slots[i] - 1 - j;
        first += slots[i];
    }
    slots_.resize(size_t(first), kNone);
    // Square roots and products round the same on every machine.
    double root = 2;
    for (int n = half_life; n > 1; n /= 2) root = std::sqrt(root);
    for (int i = 0; i < std::max(half_life, 1); ++i) powers_.push_back(i ? powers_.back() * root : 1.0);
}

bool Replacement::goes_later(const Node& a, const Node& b) {
    if (a.credit != b.credit) return a.credit > b.credit;
    if (a.used != b.used) return a.used > b.used;
    return a.slot > b.slot;
}

void Replacement::expect(int layer, const float* shares) {
    if (half_life_ == 0) return;
    const double root = half_life_ > 1 ? powers_[1] : 2.0;
    const double always = root / (root - 1);  // the credit of an entry that every step uses
    for (int32_t id = 0; id < n_ids_; ++id)
        entries_[key(layer, id)].credit = double(shares[id]) * (kTrust * always * weight_);
}

void Replacement::settle() {
    for (Pool& pool : pools_) {
        for (const Node& node : pool.held) {
            const Entry& entry = entries_[size_t(slots_[size_t(node.slot)])];
            pool.heap.push_back({entry.credit, entry.used, node.slot});
            std::push_heap(pool.heap.begin(), pool.heap.end(), goes_later);
        }
        pool.held.clear();
    }
}

void Replacement::begin_step() {
    settle();
    ++step_;
    if (half_life_ == 0) return;
    const uint64_t place = step_ % uint64_t(half_life_);
    if (place == 0 && ++exponent_ > kLargestExponent) rescale();
    weight_ = std::ldexp(powers_[size_t(place)], exponent_);
}

void Replacement::rescale() {
    for (Entry& entry : entries_) entry.credit = std::ldexp(entry.credit, -exponent_);
    for (Pool& pool : pools_) {
        for (Node& node : pool.heap) node.credit = std::ldexp(node.credit, -exponent_);
        std::make_heap(pool.heap.begin(), pool.heap.end(), goes_later);  // tiny credits have become equal
    }
    exponent_ = 0;
}

void Replacement::use(Entry& entry, bool credit) {
    entry.step = step_;
    if (!credit || entry.credited == step_) return;
    entry.credited = step_;
    entry.used = ++uses_;
    if (half_life_ > 0) entry.credit += weight_;
}

void Replacement::lookup(int layer, const int32_t* ids, size_t n, bool credit, Place* places) {
    bool missing = false;
    for (size_t i = 0; i < n; ++i) {
        if (i + kAhead < n) prefetch_line(&entries_[key(layer, ids[i + kAhead])]);
        Entry& entry = entries_[key(layer, ids[i])];
        places[i] = {entry.slot, entry.slot != kNone, kNone};
        if (places[i].hit)
            use(entry, credit);
        else
            missing = true;
    }
    if (!missing) return;
    Pool& pool = pool_of(layer);
    for (size_t i = 0; i < n; ++i) {
        if (places[i].hit) continue;
        const size_t entry = key(layer, ids[i]);
        places[i].slot = entries_[entry].slot;
        places[i].hit = places[i].slot != kNone;  // an earlier id of this lookup is the same
        if (places[i].hit) continue;
        use(entries_[entry], credit);
        place_in(pool, int32_t(entry), places[i]);
    }
}

// Bring the slot to evict next to the top of the pool's heap. Returns false if every slot is in use.
bool Replacement::find_victim(Pool& pool) {
    while (!pool.heap.empty()) {
        Node node = pool.heap.front();
        const Entry& entry = entries_[size_t(slots_[size_t(node.slot)])];
        const bool held = entry.step == step_;
        if (!held && entry.credit == node.credit && entry.used == node.used) return true;
        std::pop_heap(pool.heap.begin(), pool.heap.end(), goes_later);
        pool.heap.pop_back();
        node = {entry.credit, entry.used, node.slot};
        (held ? pool.held : pool.heap).push_back(node);
        if (!held) std::push_heap(pool.heap.begin(), pool.heap.end(), goes_later);
    }
    return false;
}

void Replacement::place_in(Pool& pool, int32_t number, Place& place) {
    Entry& entry = entries_[size_t(number)];
    if (!pool.free.empty()) {
        place.slot = pool.free.back();
        pool.free.pop_back();
    } else {
        if (!find_victim(pool)) return;
        const Node& first = pool.heap.front();
        const Node own{entry.credit, entry.used, first.slot};
        if (!goes_later(own, first)) return;
        place.slot = first.slot;
        place.evicted = slots_[size_t(place.slot)];
        entries_[size_t(place.evicted)].slot = kNone;
        std::pop_heap(pool.heap.begin(), pool.heap.end(), goes_later);
        pool.heap.pop_back();
    }
    slots_[size_t(place.slot)] = number;
    entry.slot = place.slot;
    pool.held.push_back({entry.credit, entry.used, place.slot});
}

void Replacement::drop(int layer, int32_t id) {
    Entry& entry = entries_[key(layer, id)];
    if (entry.slot == kNone) return;
    Pool& pool = pool_of(layer);
    const auto of_slot = [&](const Node& node) { return node.slot == entry.slot; };
    std::erase_if(pool.held, of_slot);
    if (std::erase_if(pool.heap, of_slot) > 0) std::make_heap(pool.heap.begin(), pool.heap.end(), goes_later);
    slots_[size_t(entry.slot)] = kNone;
    pool.free.push_back(entry.slot);
    entry.slot = kNone;
}

void Replacement::drop_slots(int32_t first, int32_t last) {
    Pool& pool = pools_[0];
    const size_t n_free = pool.free.size();
    for (int32_t slot = first; slot < last; ++slot) {
        int32_t& entry = slots_[size_t(slot)];
        if (entry == kNone) continue;
        entries_[size_t(entry)].slot = kNone;
        entry = kNone;
        pool.free.push_back(slot);
    }
    if (pool.free.size() == n_free) return;
    const auto is_free = [&](const Node& node) { return slots_[size_t(node.slot)] == kNone; };
    std::erase_if(pool.held, is_free);
    std::erase_if(pool.heap, is_free);
    std::make_heap(pool.heap.begin(), pool.heap.end(), goes_later);
}

void Replacement::replay(const int32_t* ids, const int32_t* counts, size_t n_tokens, size_t first,
                         bool by_layer, int64_t* hits) {
    std::vector<Place> places;
    for (size_t token = 0; token < n_tokens; ++token) {
        for (int layer = 0; layer < n_layers_; ++layer) {
            const size_t n = size_t(*counts++);
            places.resize(n);
            if (layer == 0 || by_layer) begin_step();
            lookup(layer, ids, n, true, places.data());
            ids += n;
            if (token < first) continue;
            hits[layer] += std::count_if(places.begin(), places.end(), [](const Place& p) { return p.hit; });
        }
    }
}

int64_t optimal_hits(const Span* spans, size_t n_spans, int32_t n_lookups, int32_t first, int64_t n_slots) {
    // Entries that are needed again in the same lookup are interchangeable: counting them is enough.
    std::vector<int64_t> held(size_t(n_lookups), 0);
    std::priority_queue<int32_t> later;  // lookups that need held entries, the latest on top
    int64_t n_held = 0, hits = 0;
    size_t next = 0;
    const auto take = [&](int32_t now) {
        for (; next < n_spans && spans[next].from <= now; ++next) {
            const Span& span = spans[next];
            if (span.to < first) continue;
            if (held[size_t(span.to)] == 0) later.push(span.to);
            held[size_t(span.to)] += span.n;
            n_held += span.n;
        }
        while (n_held > n_slots) {
            int64_t& last = held[size_t(later.top())];
            const int64_t n = std::min(last, n_held - n_slots);
            last -= n;
            n_held -= n;
            if (last == 0) later.pop();
        }
    };
    take(first - 1);
    for (int32_t lookup = first; lookup < n_lookups; ++lookup) {
        hits += held[size_t(lookup)];
        n_held -= held[size_t(lookup)];
        held[size_t(lookup)] = 0;  // its stale entry in the queue is harmless
        take(lookup);
    }
    return hits;
}

}  // namespace hotset
