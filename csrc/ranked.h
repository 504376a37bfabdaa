// The candidates of a token by falling logit, put in order no further than the samplers look.
//
// Full vocabularies are not sorted: candidates are spread over buckets by their logit, a bucket is sorted
// when a boundary lies in it (where top-p cuts, the token that is drawn), and sums run over whole buckets.
// Such sums have another order than those over sorted candidates, which the definition of a seed's tokens has
// (tests/support/sampling_reference.py). So each decision is compared with the largest difference that the
// order can make: if it is not certain, `in_doubt` becomes true, and the caller begins again with
// `Order::exact`, which sorts everything and adds up in the defined order. Few candidates are always exact.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/kernels.h"

namespace hotset {

enum class Order {
    fast,
    exact,
    given,        // by index, not by logit: nothing is left out
    given_exact,  // the same, with sums in the defined order
};

class Ranked {
  public:
    // Forgets all candidates, and makes room for so many. A candidate's relative logit is (key - base) /
    // divisor, at most 0.
    void begin(Order order, double base, double divisor, size_t most);
    // place: at most 2^32 - 1, rising; key: finite. is_in: false adds nothing, without a branch.
    void add(float key, size_t place, bool is_in = true) {
        const uint32_t bits = std::bit_cast<uint32_t>(key + 0.0f);  // -0 equals 0
        const uint32_t falling = bits & kSign ? bits : ~bits & ~kSign;
        const uint64_t item = uint64_t(falling) << 32 | uint64_t(place);
        const float below = (float_base_ - key) * float_scale_;
        const bool is_deep = !(below < float(kBuckets - 1));
        near_[n_near_] = item;
        buckets_[n_near_] = uint16_t(is_deep ? 0.0f : below);
        n_near_ += is_in & !is_deep;
        items_[items_.size() - 1 - n_deep_] = item;
        n_deep_ += is_in & is_deep;
    }
    void rank(const Kernels& kernels);

    size_t size() const { return last_ - first_; }
    bool in_doubt() const { return in_doubt_; }
    size_t place(size_t rank);  // of the candidate of this rank among those that are left
    double relative(size_t rank);

    // Filters: engine/sampler.py defines their parameters. They leave one candidate at least.
    void keep_first(size_t k);
    void keep_typical(double p);
    // total: of the exponentials of all logits, 0: of the candidates.
    void keep_top_p(double p, double total, double min_p);
    void drop_top_choices(double threshold);

    double dynamic_temperature(double low, double high, double exponent);
    // The rank of the candidate that u, in [0, 1), draws.
    size_t drawn(double temperature, double u);
    // log(sum of exponentials) - relative(rank): the surprise of a candidate.
    double surprise(size_t rank);

  private:
    static constexpr uint32_t kSign = 0x80000000;
    // Of relative logits from 0 to -16; the last bucket has all that are deeper, whose weights seldom matter.
    static constexpr size_t kBuckets = 4096;
    static constexpr double kPerUnit = 256.0;

    static double key_of(uint64_t item) {
        const uint32_t falling = uint32_t(item >> 32);
        return double(std::bit_cast<float>(falling & kSign ? falling : ~falling & ~kSign));
    }
    double relative_of(uint64_t item) const { return (key_of(item) - base_) / divisor_; }
    double shifted(size_t at) const { return relative_of(items_[at]) - shift_ - more_shift_; }
    bool is_exact() const { return order_ == Order::exact || order_ == Order::given_exact; }
    class Outwards;

    void spread();
    void settle(size_t bucket);
    void settle_range(size_t first, size_t last);
    std::pair<size_t, size_t> part(size_t bucket) const;
    double weight_of(size_t bucket) const;
    size_t bucket_at(size_t at) const;
    void narrow(size_t first, size_t last);
    void shift_to_first();
    void find_relatives(size_t first, size_t last);
    void weigh(double temperature);
    void weigh_range(size_t first, size_t last);
    double total() const;
    double margin(double total) const;
    size_t reached(double target, bool beyond, double total);
    size_t first_below(double relative, double doubt);
    size_t first_lighter(double weight);
    void keep_typical_exactly(double p);
    bool keep_typical_buckets(double p);

    Order order_ = Order::exact;
    const Kernels* kernels_ = nullptr;
    double base_ = 0.0, divisor_ = 1.0;
    double shift_ = 0.0, more_shift_ = 0.0;  // the relative logit of the first, once and twice
    bool is_shifted_ = false;
    double temperature_ = 0.0;  // of weights_; 0: there are none
    double slack_ = 0.0;        // of weights_ beyond that of their sums, relative
    bool in_doubt_ = false;
    size_t first_ = 0, last_ = 0;  // what is left of items_
    float float_base_ = 0.0f, float_scale_ = 0.0f;
    std::vector<uint64_t> items_;  // key, so that it falls, and place; those before first_ are none
    // Before they are ranked: the candidates of all buckets but the last, and their buckets. Those of the
    // last are at the end of items_.
    std::vector<uint64_t> near_;
    std::vector<uint16_t> buckets_;
    size_t n_near_ = 0, n_deep_ = 0;
    std::vector<uint32_t> starts_;  // [n_buckets + 1]
    std::vector<uint8_t> settled_;  // [n_buckets]
    std::vector<double> relatives_, weights_;
};

}  // namespace hotset
