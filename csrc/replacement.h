// The replacement policy of a cache of experts or neurons with few slots. It knows nothing about devices,
// files or bytes: the owner of the slots' memory asks which slots to use, and fills them.
//
// Each use of an entry earns a credit of 1, which halves every `half_life` steps. Among equal credits the
// least recently used entry is evicted first. With a half-life of 0 only recency counts (LRU). Entries keep
// their credit while they are not resident, so that a frequently used one returns and stays. Entries used in
// the current step are never evicted. If no other slot is left, an entry gets no slot, and its reader must do
// without one.
//
// An entry takes a free slot, or the slot of an entry with less credit than its own. A prompt's entries, and
// speculatively fetched ones, earn no credit. Nothing is random.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hotset {

class Replacement {
  public:
    static constexpr int32_t kNone = -1;

    // The result of a lookup. slot: where the entry is or will be stored; kNone: it gets no slot. evicted:
    // the id (layer * n_ids + id) of the slot's previous entry; kNone if the slot was free.
    struct Place {
        int32_t slot = kNone;
        bool hit = false;
        int32_t evicted = kNone;
    };

    // Each of n_layers has the ids 0..n_ids. slots: one number, shared by all layers, or one per layer.
    // half_life: in steps, a power of two, or 0 for LRU. n_layers * n_ids and all slots are below 2^31.
    Replacement(int n_layers, int n_ids, std::vector<int32_t> slots, int half_life);

    int n_layers() const { return n_layers_; }
    int n_ids() const { return n_ids_; }
    int32_t n_slots() const { return int32_t(slots_.size()); }

    // Before the first lookup: set the share of steps that used each entry of a layer in an earlier
    // measurement. It counts as a part of the credit that this use would have earned here.
    void expect(int layer, const float* shares);

    // Begin a step: entries are no longer in use, and credits age.
    void begin_step();
    // Do most of the work of the next begin_step in advance, when no thread waits for it.
    void settle();

    // Find the places of n ids of a layer. All resident ids are found before any entry is evicted for the
    // others, which take slots in the order of the ids. A repeated id gets the place of its first occurrence,
    // and is a hit if that has a slot. A step credits an entry once, whatever the number of lookups.
    void lookup(int layer, const int32_t* ids, size_t n, bool credit, Place* places);

    // Free the slot of an entry, if it has one: loading it failed.
    void drop(int layer, int32_t id);
    // Free the slots from `first` up to but not including `last`, of the only pool: their memory was reused.
    void drop_slots(int32_t first, int32_t last);

    // Look up a whole trace with credit. Each token is a step; with `by_layer` each layer of a token is a
    // step, so that entries used by earlier layers may be evicted. ids: the lookups one after another; counts
    // [n_tokens][n_layers]: their lengths. Adds each layer's hits, from token `first` on, to hits [n_layers].
    void replay(const int32_t* ids, const int32_t* counts, size_t n_tokens, size_t first, bool by_layer,
                int64_t* hits);

    // Return the slot of an entry, or kNone. Does not count as a use.
    int32_t find(int layer, int32_t id) const { return entries_[key(layer, id)].slot; }

  private:
    struct Entry {
        double credit = 0;      // times 2^(step / half_life): only the weight of a use changes per step
        uint64_t used = 0;      // number of the latest use with credit
        uint64_t step = 0;      // the latest step that needs it: its slot is not evicted in that step
        uint64_t credited = 0;  // step of the latest credit
        int32_t slot = kNone;
    };
    // A slot that holds an entry, with an earlier rank of the entry, which is never above the current.
    struct Node {
        double credit;
        uint64_t used;
        int32_t slot;
    };
    struct Pool {  // the slots of one layer, or of all layers
        std::vector<int32_t> free;
        std::vector<Node> heap;  // the lowest rank on top
        std::vector<Node> held;  // removed from the heap because they are in use, until the step ends
    };

    size_t key(int layer, int32_t id) const { return size_t(layer) * size_t(n_ids_) + size_t(id); }
    Pool& pool_of(int layer) { return pools_.size() == 1 ? pools_[0] : pools_[size_t(layer)]; }
    static bool goes_later(const Node& a, const Node& b);
    void use(Entry& entry, bool credit);
    bool find_victim(Pool& pool);
    void place_in(Pool& pool, int32_t entry, Place& place);
    void rescale();

    int n_layers_, n_ids_, half_life_;
    std::vector<Entry> entries_;
    std::vector<int32_t> slots_;  // the entry of each slot, or kNone
    std::vector<Pool> pools_;
    std::vector<double> powers_;  // 2^(i / half_life)
    uint64_t step_ = 1, uses_ = 0;
    double weight_ = 1;  // credit of a use in this step
    int exponent_ = 0;
};

// n entries of lookup `from` that are needed next in lookup `to`.
struct Span {
    int32_t from, to, n;
};

// Return the hits from lookup `first` on of an optimal cache, which knows the future (Belady). After each
// lookup it keeps the entries that are needed again soonest. spans: ordered by `from`; all lookups are below
// n_lookups. The cache starts with the best entries of the lookups before `first`.
int64_t optimal_hits(const Span* spans, size_t n_spans, int32_t n_lookups, int32_t first, int64_t n_slots);

}  // namespace hotset
