// Which entries (experts, neurons) a cache of few slots holds: the policy alone. It knows nothing of devices,
// files or bytes; the owner of the slots' memory asks which to use, and fills the empty ones.
//
// Each use of an entry is a credit of 1 that halves every `half_life` steps; of equal credit the one that was
// used longest ago goes first, and with a half-life of 0 that alone counts (LRU). Entries keep their credit
// while they are not resident, so that one that is needed often comes back to stay. What the step in progress
// has used is never evicted: where nothing else is left, an entry gets no slot, and its reader must do
// without one.
//
// An entry takes a free slot, or that of an entry with less credit than its own: what is needed more often
// stays. A prompt's entries, and those fetched on a guess, are used without credit. Nothing is drawn by
// chance.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hotset {

class Replacement {
  public:
    static constexpr int32_t kNone = -1;

    // What becomes of an entry that is looked up. slot: where it is or is to be put; kNone: it gets none.
    // evicted: the id (layer * n_ids + id) of what was in the slot before, kNone where that was free.
    struct Place {
        int32_t slot = kNone;
        bool hit = false;
        int32_t evicted = kNone;
    };

    // Ids 0..n_ids of each of n_layers. slots: one number, of slots that all layers share, or one a layer.
    // half_life: in steps, a power of two, or 0 for LRU. n_layers * n_ids and all slots lie below 2^31.
    Replacement(int n_layers, int n_ids, std::vector<int32_t> slots, int half_life);

    int n_layers() const { return n_layers_; }
    int n_ids() const { return n_ids_; }
    int32_t n_slots() const { return int32_t(slots_.size()); }

    // Before the first lookup: the share of the steps that have used each entry of a layer, elsewhere. It is
    // worth a part of the credit that so many uses would have come to here.
    void expect(int layer, const float* shares);

    // What was used before is no longer in use, and credits have aged by a step.
    void begin_step();
    // Does the larger part of the next begin_step beforehand, when no thread waits for it.
    void settle();

    // The places of n ids of a layer. Those that are resident are found before any is evicted for the others,
    // which take their slots in the order of the ids. An id that comes again has the place of the first,
    // as a hit if it has a slot. A step credits an entry once, in however many lookups it occurs.
    void lookup(int layer, const int32_t* ids, size_t n, bool credit, Place* places);

    // Frees the slot of an entry, if it has one: what should be in it could not be brought.
    void drop(int layer, int32_t id);
    // Frees slots from `first` on, before `last`, of those that one layer has or all share: their memory was
    // used for something else.
    void drop_slots(int32_t first, int32_t last);

    // Looks up a whole trace with credit, a step for each token (or, `by_layer`, for each of its layers: what
    // the token has used elsewhere may then be evicted): ids one lookup after the other, of which counts
    // [n_tokens][n_layers] says how long each is. Adds the hits of each layer, of the tokens from `first` on,
    // to hits [n_layers].
    void replay(const int32_t* ids, const int32_t* counts, size_t n_tokens, size_t first, bool by_layer,
                int64_t* hits);

    // The slot of an entry or kNone; not a use of it.
    int32_t find(int layer, int32_t id) const { return entries_[key(layer, id)].slot; }

  private:
    struct Entry {
        double credit = 0;      // times 2^(step / half_life), so that nothing ages but what a use is worth
        uint64_t used = 0;      // number of the latest use with credit
        uint64_t step = 0;      // that needs it: its slot is not to be taken meanwhile
        uint64_t credited = 0;  // step of the latest credit
        int32_t slot = kNone;
    };
    // A slot that holds an entry, and the entry's rank: at an earlier time, perhaps, which is never too high.
    struct Node {
        double credit;
        uint64_t used;
        int32_t slot;
    };
    struct Pool {  // the slots of a layer, or of all
        std::vector<int32_t> free;
        std::vector<Node> heap;  // the least rank on top
        std::vector<Node> held;  // what was on top but is in use, until the step ends
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
    std::vector<int32_t> slots_;  // the entry in each, or kNone
    std::vector<Pool> pools_;
    std::vector<double> powers_;  // 2^(i / half_life)
    uint64_t step_ = 1, uses_ = 0;
    double weight_ = 1;  // of a use in this step
    int exponent_ = 0;
};

// Of n entries that lookup number `from` asks for, `to` is the lookup that asks for them again.
struct Span {
    int32_t from, to, n;
};

// Hits, from lookup `first` on, of a cache that knows what will be asked for (Belady): after each lookup it
// keeps, of that and what is there, what is needed again the soonest. spans: by `from`, which rises; all
// below n_lookups. It begins with the best of what was asked for before `first`.
int64_t optimal_hits(const Span* spans, size_t n_spans, int32_t n_lookups, int32_t first, int64_t n_slots);

}  // namespace hotset
