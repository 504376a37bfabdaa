#include "draw.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <type_traits>

#include "plan.h"
#include "ranked.h"
#include "sums.h"

namespace hotset {

// The rules, by their names in src/hotset/sampling_parameters.py, which has their meaning and defaults.
#define HOTSET_DRAW_RULES(RULE)       \
    RULE(double, temperature)         \
    RULE(int64_t, top_k)              \
    RULE(double, top_p)               \
    RULE(double, min_p)               \
    RULE(float, repetition_penalty)   \
    RULE(int64_t, penalty_last_n)     \
    RULE(float, frequency_penalty)    \
    RULE(float, presence_penalty)     \
    RULE(double, top_n_sigma)         \
    RULE(double, typical_p)           \
    RULE(double, xtc_probability)     \
    RULE(double, xtc_threshold)       \
    RULE(double, dynatemp_range)      \
    RULE(double, dynatemp_exponent)   \
    RULE(int64_t, mirostat)           \
    RULE(double, mirostat_tau)        \
    RULE(double, mirostat_eta)        \
    RULE(double, adaptive_target)     \
    RULE(double, adaptive_decay)      \
    RULE(double, dry_multiplier)      \
    RULE(double, dry_base)            \
    RULE(int64_t, dry_allowed_length) \
    RULE(int64_t, dry_penalty_last_n)

struct DrawRules {
#define HOTSET_RULE(Type, name) Type name;
    HOTSET_DRAW_RULES(HOTSET_RULE)
#undef HOTSET_RULE
};

namespace {

constexpr int64_t kMany = 4;         // groups per relevant token from which on reading groups is worth it
constexpr size_t kMostLikely = 100;  // tokens from which mirostat 1 estimates how fast the probabilities fall
constexpr size_t kFewExact = 512;    // logits whose exponentials come from the C library
constexpr size_t kSumBlock = 8192;   // values that NumPy converts and sums at a time
constexpr size_t kBlock = 512;       // tokens that are weighed at a time
constexpr double kDoubt = 1e-9;      // error of a surprise due to the order of a sum
constexpr double kUnit = 0x1p-53;    // the largest relative error of an addition
constexpr double kAdaptiveWidth = 0.3, kAdaptiveSharpness = 10.0;  // as in llama.cpp
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kOut = -std::numeric_limits<float>::infinity();

// Clamp to finite floats. NaN is kept.
float bounded(float value) {
    return value < -kLargest ? -kLargest : value > kLargest ? kLargest : value;
}

struct Logit {
    int64_t id;
    float value;
};

// A thread's scratch memory, kept for its next draw.
struct Scratch {
    std::vector<float> values, near, maxima, best, exponentials;
    std::vector<uint32_t> places;
    std::vector<double> wide, weights;
    std::vector<int32_t> longest;
    std::vector<Logit> changed;
    float group[kLogitGroup];
    Ranked ranked;
};

Scratch& scratch() {
    thread_local Scratch of_thread;
    return of_thread;
}

// Find the maximum of each group of kLogitGroup values, and of all: NaN if a value is NaN.
float find_maxima(const float* values, size_t n, std::vector<float>& maxima) {
    constexpr size_t kLanes = 8;  // compilers vectorise a loop over lanes
    maxima.resize((n + kLogitGroup - 1) / kLogitGroup);
    bool has_nan = false;
    float highest = kOut;
    for (size_t g = 0; g < maxima.size(); g++) {
        const size_t first = g * kLogitGroup, end = std::min(n, first + kLogitGroup);
        float most[kLanes];
        int32_t nan[kLanes] = {};
        std::fill_n(most, kLanes, kOut);
        size_t i = first;
        for (; i + kLanes <= end; i += kLanes)
            for (size_t lane = 0; lane < kLanes; lane++) {
                const float value = values[i + lane];
                most[lane] = value > most[lane] ? value : most[lane];
                nan[lane] |= value != value ? -1 : 0;
            }
        for (; i < end; i++) {
            most[0] = values[i] > most[0] ? values[i] : most[0];
            nan[0] |= values[i] != values[i] ? -1 : 0;
        }
        maxima[g] = *std::max_element(most, most + kLanes);
        highest = std::max(highest, maxima[g]);
        for (const int32_t lane : nan) has_nan |= lane != 0;
    }
    return has_nan ? std::numeric_limits<float>::quiet_NaN() : highest;
}

// Return the k-th largest maximum. The maxima are distinct logits, so it is at most the k-th largest logit.
// Returns -inf if there are fewer than k.
float bound_of(size_t k, const std::vector<float>& maxima, std::vector<float>& best) {
    if (k > maxima.size()) return kOut;
    best.assign(maxima.begin(), maxima.begin() + long(k));
    std::make_heap(best.begin(), best.end(), std::greater<>());
    for (size_t g = k; g < maxima.size(); g++) {
        if (!(maxima[g] > best.front())) continue;
        std::pop_heap(best.begin(), best.end(), std::greater<>());
        best.back() = maxima[g];
        std::push_heap(best.begin(), best.end(), std::greater<>());
    }
    return best.front();
}

// Call f(index, value, is_in) for all values of the groups whose maximum reaches the bound. is_in: whether
// the value reaches the bound and is not -inf.
template <class F>
void for_each_above(float bound, const float* values, size_t n, const std::vector<float>& maxima, F f) {
    for (size_t g = 0; g < maxima.size(); g++) {
        if (maxima[g] < bound) continue;
        const size_t end = std::min(n, (g + 1) * kLogitGroup);
        for (size_t i = g * kLogitGroup; i < end; i++)
            f(i, values[i], (values[i] >= bound) & (values[i] != kOut));
    }
}

// Takes rules from numbers, and checks that each is there and fits its type.
struct RuleReader {
    const RuleNumbers& numbers;
    size_t n_read = 0;

    template <class T>
    T read(const char* name) {
        const auto found = numbers.find(name);
        const bool is_known = found != numbers.end() && std::isfinite(found->second);
        if (!is_known || (std::is_integral_v<T> && std::abs(found->second) > 0x1p53))
            throw std::invalid_argument(std::string("the sampling rule ") + name +
                                        " is missing or too large");
        n_read++;
        return T(found->second);
    }
};

std::shared_ptr<const DrawRules> rules_of(const RuleNumbers& numbers) {
    RuleReader reader{numbers};
#define HOTSET_RULE(Type, name) .name = reader.read<Type>(#name),
    const DrawRules rules{HOTSET_DRAW_RULES(HOTSET_RULE)};
#undef HOTSET_RULE
    if (reader.n_read < numbers.size()) throw std::invalid_argument("an unknown sampling rule");
    return std::make_shared<const DrawRules>(rules);
}

// Return the memory of a sequence before its first token: mirostat's mu, or adaptive-p's mean of the tokens'
// probabilities.
double first_memory(const DrawRules& rules) {
    return rules.mirostat ? 2.0 * rules.mirostat_tau : rules.adaptive_target;
}

}  // namespace

Draw::Draw(const RuleNumbers& numbers, Bias bias, const std::vector<std::vector<int64_t>>& dry_breakers,
           int64_t n_vocab, const std::vector<int64_t>& tokens)
    : rules_(rules_of(numbers)),
      bias_(std::move(bias)),
      n_vocab_(n_vocab),
      memory_(first_memory(*rules_)),
      next_memory_(memory_) {
    if (rules_->dry_multiplier > 0.0 && rules_->dry_penalty_last_n != 0)
        repetitions_.emplace(tokens, rules_->dry_penalty_last_n, dry_breakers);
    for (const int64_t token : tokens) count(token);
}

void Draw::accept(int64_t token) {
    memory_ = next_memory_;
    count(token);
    if (repetitions_) repetitions_->push(token);
}

bool Draw::penalises() const {
    const DrawRules& r = *rules_;
    return r.penalty_last_n != 0 &&
           (r.repetition_penalty != 1.0f || r.frequency_penalty != 0.0f || r.presence_penalty != 0.0f);
}

void Draw::count(int64_t token) {
    if (!penalises()) return;
    counts_[token]++;
    if (rules_->penalty_last_n < 0) return;
    if (int64_t(recent_.size()) < rules_->penalty_last_n) {
        recent_.push_back(token);
        return;
    }
    const auto oldest = counts_.find(recent_[oldest_]);
    if (--oldest->second == 0) counts_.erase(oldest);
    recent_[oldest_] = token;
    oldest_ = (oldest_ + 1) % recent_.size();
}

bool Draw::is_quick(const LogitRow& row) const {
    const DrawRules& r = *rules_;
    if (row.largest == nullptr || row.candidates || row.allowed_bits || row.allowed) return false;
    if (repetitions_ || r.mirostat) return false;
    const bool is_greedy = r.temperature == 0.0;
    const bool has_more = r.top_n_sigma > 0.0 || r.typical_p < 1.0;
    if (!is_greedy && (r.top_k <= 0 || r.top_k >= n_vocab_ || has_more)) return false;
    const int64_t n_groups = n_vocab_ / kLogitGroup, k = is_greedy ? 1 : r.top_k;
    return kMany * k <= n_groups && kMany * int64_t(bias_.size() + counts_.size()) <= n_groups;
}

// One draw. The `at` functions return a pointer to a token's logit, or null if the row does not have it.
class Draw::Work {
  public:
    Work(const Draw& draw, const LogitRow& row, const Kernels* kernels)
        : draw_(draw),
          rules_(*draw.rules_),
          row_(row),
          kernels_(kernels),
          s_(scratch()),
          memory_(draw.memory_) {}

    Drawn run() {
        int64_t token = draw_.is_quick(row_) ? by_groups() : -1;
        if (token >= 0) return {token, memory_};
        prepare();
        if (n_ == 0) return {Drawn::kNothing, memory_};
        highest_ = find_maxima(values_, n_, s_.maxima);
        if (!std::isfinite(highest_))
            return {highest_ == kOut ? Drawn::kNothing : Drawn::kNotNumbers, memory_};
        if (rules_.temperature == 0.0)
            return {token_at(size_t(std::find(values_, values_ + n_, highest_) - values_)), memory_};
        if (rules_.mirostat) {
            token = mirostat(Order::fast);
            if (s_.ranked.in_doubt() || token < 0) token = mirostat(Order::exact);
            return {token, memory_};
        }
        if (rules_.top_n_sigma > 0.0) keep_near();
        token = filtered(adapts() ? Order::exact : Order::fast);
        return {token < 0 || s_.ranked.in_doubt() ? filtered(Order::exact) : token, memory_};
    }

    void adjust(float* out) const {
        std::copy_n(row_.logits, row_.n, out);
        change([&](int64_t id) { return out + id; });
    }

  private:
    template <class At>
    void change(At at) const {
        for (const auto& [id, bias] : draw_.bias_) {
            float* value = at(id);
            if (value) *value = bias == kOut || *value == kOut ? kOut : bounded(*value + bias);
        }
        const float penalty =
            std::max(std::numeric_limits<float>::min(), std::min(rules_.repetition_penalty, kLargest));
        for (const auto& [id, count] : draw_.counts_) {
            float* value = at(id);
            if (!value || *value == kOut) continue;
            *value = bounded(*value > 0.0f ? *value / penalty : *value * penalty);
            *value = bounded(*value - bounded(float(count) * rules_.frequency_penalty));
            *value = bounded(*value - rules_.presence_penalty);
        }
        if (!draw_.repetitions_) return;
        s_.longest.resize(std::max(s_.longest.size(), size_t(draw_.n_vocab_)));
        for (const auto& [id, length] :
             draw_.repetitions_->continued(rules_.dry_allowed_length, s_.longest)) {
            float* value = at(id);
            if (!value || *value == kOut) continue;
            const double power = std::pow(rules_.dry_base, double(length - rules_.dry_allowed_length));
            const double penalty = std::min(rules_.dry_multiplier * power, double(kLargest));
            *value = bounded(*value - float(penalty));
        }
    }

    bool adjusts() const {
        return !draw_.bias_.empty() || !draw_.counts_.empty() || draw_.repetitions_.has_value();
    }

    // Read only the groups that can matter. Returns -1 if they do not decide.
    int64_t by_groups() {
        find_changed();
        s_.maxima.assign(row_.largest, row_.largest + row_.n / kLogitGroup);
        for (size_t i = 0; i < s_.changed.size(); i++) {
            const size_t g = size_t(s_.changed[i].id) / kLogitGroup;
            if (i == 0 || size_t(s_.changed[i - 1].id) / kLogitGroup != g) {
                const float* values = group(g);
                s_.maxima[g] = values[0];
                for (size_t j = 0; j < kLogitGroup && !std::isnan(s_.maxima[g]); j++)
                    s_.maxima[g] = std::isnan(values[j]) ? values[j] : std::max(s_.maxima[g], values[j]);
            }
        }
        float highest = kOut;
        for (const float most : s_.maxima) {
            if (std::isnan(most)) return -1;
            highest = std::max(highest, most);
        }
        const size_t k = rules_.temperature == 0.0 ? 1 : size_t(rules_.top_k);
        const float bound = bound_of(k, s_.maxima, s_.best);
        if (!std::isfinite(highest) || bound == kOut) return -1;
        s_.ranked.begin(Order::fast, double(highest), 1.0, size_t(row_.n));
        size_t n_found = 0;
        for (size_t g = 0; g < s_.maxima.size(); g++) {
            if (s_.maxima[g] < bound) continue;
            const float* values = group(g);
            for (size_t i = 0; i < kLogitGroup; i++) {
                const bool is_in = values[i] >= bound;
                s_.ranked.add(values[i], g * kLogitGroup + i, is_in);
                n_found += is_in;
            }
        }
        if (n_found < k) return -1;  // `largest` does not belong to this row
        s_.ranked.rank(*kernels_);
        if (rules_.temperature == 0.0) return int64_t(s_.ranked.place(0));
        s_.ranked.keep_first(k);
        const size_t place = finish(0.0);
        return s_.ranked.in_doubt() ? -1 : int64_t(place);
    }

    // Collect the few logits that bias and penalties change, ordered by id.
    void find_changed() {
        std::vector<Logit>& changed = s_.changed;
        changed.clear();
        for (const auto& [id, bias] : draw_.bias_) changed.push_back({id, row_.logits[id]});
        for (const auto& [id, count] : draw_.counts_) changed.push_back({id, row_.logits[id]});
        const auto is_before = [](const Logit& a, const Logit& b) { return a.id < b.id; };
        std::sort(changed.begin(), changed.end(), is_before);
        const auto same = [](const Logit& a, const Logit& b) { return a.id == b.id; };
        changed.erase(std::unique(changed.begin(), changed.end(), same), changed.end());
        change([&](int64_t id) {
            return &std::lower_bound(changed.begin(), changed.end(), Logit{id, 0.0f}, is_before)->value;
        });
    }

    const float* group(size_t g) {
        const float* as_it_is = row_.logits + g * kLogitGroup;
        const int64_t first = int64_t(g) * kLogitGroup, end = first + kLogitGroup;
        auto at = std::lower_bound(s_.changed.begin(), s_.changed.end(), first,
                                   [](const Logit& of, int64_t id) { return of.id < id; });
        if (at == s_.changed.end() || at->id >= end) return as_it_is;
        std::copy_n(as_it_is, kLogitGroup, s_.group);
        for (; at != s_.changed.end() && at->id < end; ++at) s_.group[at->id - first] = at->value;
        return s_.group;
    }

    // Put the logits after bias, penalties and allowed tokens into values_ and n_.
    void prepare() {
        values_ = row_.logits;
        n_ = size_t(row_.n);
        if (adjusts() || row_.allowed_bits) {
            s_.values.assign(row_.logits, row_.logits + n_);
            values_ = s_.values.data();
        }
        if (adjusts()) adjust();
        if (row_.allowed) {
            n_ = size_t(row_.n_allowed);
            s_.near.resize(n_);
            for (size_t i = 0; i < n_; i++) s_.near[i] = values_[row_.allowed[i]];
            s_.values.swap(s_.near);
            values_ = s_.values.data();
        } else if (row_.allowed_bits) {
            allow();
        }
    }

    void adjust() {
        float* values = s_.values.data();
        if (!row_.candidates) return change([&](int64_t id) { return values + id; });
        const int32_t* end = row_.candidates + row_.n;
        change([&](int64_t id) {
            const int32_t* at = std::lower_bound(row_.candidates, end, id);
            return at != end && *at == id ? values + (at - row_.candidates) : nullptr;
        });
    }

    void allow() {
        for (size_t byte = 0; byte * 8 < n_; byte++) {
            const bool has_bits = int64_t(byte) < row_.n_allowed_bytes;
            const unsigned bits = has_bits ? row_.allowed_bits[byte] : 0;
            if (bits == 255) continue;
            const size_t end = std::min<size_t>(n_, byte * 8 + 8);
            for (size_t i = byte * 8; i < end; i++)  // NaN is kept
                s_.values[i] = s_.values[i] + (bits >> (i % 8) & 1 ? 0.0f : kOut);
        }
    }

    int64_t token_at(size_t place) const {
        if (is_near_) place = s_.places[place];
        if (row_.allowed) return row_.allowed[place];
        return row_.candidates ? int64_t(row_.candidates[place]) : int64_t(place);
    }

    // Keep the logits at most top_n_sigma standard deviations below the largest (arXiv 2411.07641). Mean and
    // deviation are over the finite logits.
    void keep_near() {
        s_.wide.resize(n_);
        size_t n = 0;
        for (size_t i = 0; i < n_; i++) {
            s_.wide[n] = double(values_[i]);
            n += values_[i] != kOut;
        }
        const double mean = pairwise_sum(s_.wide.data(), n) / double(n);
        for (size_t i = 0; i < n; i++) s_.wide[i] = (s_.wide[i] - mean) * (s_.wide[i] - mean);
        const double deviation = std::sqrt(pairwise_sum(s_.wide.data(), n) / double(n));
        const double bound = double(highest_) - rules_.top_n_sigma * deviation;
        s_.near.resize(n_);
        s_.places.resize(n_);
        size_t n_near = 0;
        for (size_t i = 0; i < n_; i++) {
            s_.near[n_near] = values_[i];
            s_.places[n_near] = uint32_t(i);
            n_near += double(values_[i]) >= bound;
        }
        is_near_ = true;
        values_ = s_.near.data();
        n_ = n_near;
        find_maxima(values_, n_, s_.maxima);
    }

    // Return the drawn token, or -1 if it is in doubt.
    int64_t filtered(Order order) {
        const bool has_entropy = rules_.typical_p < 1.0 || rules_.dynatemp_range > 0.0;
        if (rules_.top_k > 0 && rules_.top_k < draw_.n_vocab_) {
            const size_t k = std::min(size_t(rules_.top_k), n_);
            s_.ranked.begin(order, double(highest_), 1.0, n_, has_entropy);
            for_each_above(bound_of(k, s_.maxima, s_.best), values_, n_, s_.maxima,
                           [&](size_t i, float value, bool is_in) { s_.ranked.add(value, i, is_in); });
            s_.ranked.rank(*kernels_);
            s_.ranked.keep_first(k);
            return token_at(finish(0.0));
        }
        double total = 0.0, cut = -std::numeric_limits<double>::infinity();
        if (rules_.typical_p == 1.0) {
            if (rules_.min_p > 0.0) cut = std::log(rules_.min_p);
            if (rules_.top_p < 1.0) {
                // All tokens less likely than (1 - top_p) / n together have less than 1 - top_p.
                total = sum_of_all();
                cut = std::max(cut, std::log((1.0 - rules_.top_p) * total / double(n_)));
            }
        }
        const bool is_ordered = std::isfinite(cut) || rules_.top_n_sigma > 0.0 || has_entropy ||
                                rules_.xtc_probability > 0.0 || adapts();
        if (!is_ordered) return by_index(order);
        const float bound = float(cut - 1e-3);  // margin for float32; the exact filter follows
        s_.ranked.begin(order, 0.0, 1.0, n_, has_entropy);
        for (size_t g = 0; g < s_.maxima.size(); g++) {
            if (s_.maxima[g] - highest_ < bound) continue;
            const size_t end = std::min(n_, (g + 1) * kLogitGroup);
            for (size_t i = g * kLogitGroup; i < end; i++) {
                const float relative = values_[i] - highest_;
                s_.ranked.add(relative, i, (relative >= bound) & (relative != kOut));
            }
        }
        s_.ranked.rank(*kernels_);
        return token_at(finish(total));
    }

    // Draw from all tokens in the order of their ids. Returns -1 if the token is in doubt.
    int64_t by_index(Order order) {
        if (order == Order::exact || n_ <= kFewExact) {
            s_.wide.resize(n_);
            double sum = 0.0;
            for (size_t i = 0; i < n_; i++) {
                sum += std::exp(double(values_[i] - highest_) / rules_.temperature);
                s_.wide[i] = sum;
            }
            // A float below 1 times the total can round up to it, past the last possible token.
            const auto begin = s_.wide.begin(), end = begin + long(n_);
            return token_at(size_t(
                std::min(std::upper_bound(begin, end, row_.u * sum), std::lower_bound(begin, end, sum)) -
                begin));
        }
        s_.wide.clear();  // sums of blocks
        double weights[kBlock];
        double total = 0.0;
        for (size_t first = 0; first < n_; first += kBlock) {
            s_.wide.push_back(pairwise_sum(weights, weigh_block(first, weights)));
            total += s_.wide.back();
        }
        const double target = row_.u * total, doubt = total * double(2 * n_ + 100) * kUnit;
        size_t block = 0;
        double sum = 0.0;
        while (block + 1 < s_.wide.size() && sum + s_.wide[block] < target - doubt) sum += s_.wide[block++];
        for (; block < s_.wide.size(); block++) {
            const size_t n = weigh_block(block * kBlock, weights);
            for (size_t i = 0; i < n; i++) {
                const double before = sum;
                sum += weights[i];
                if (sum <= target) continue;
                const bool is_first = block + i == 0;
                const bool is_certain = sum - target > doubt && (is_first || target - before > doubt);
                return is_certain ? token_at(block * kBlock + i) : -1;
            }
        }
        return -1;
    }

    // Weigh a block of tokens starting at `first`. Returns the number of tokens.
    size_t weigh_block(size_t first, double* weights) const {
        double relatives[kBlock];
        const size_t n = std::min(kBlock, n_ - first);
        for (size_t i = 0; i < n; i++) relatives[i] = double(values_[first + i] - highest_);
        kernels_->weights(relatives, rules_.temperature, int64_t(n), weights);
        return n;
    }

    // Return the sum of the exponentials in float32, as top-p is defined.
    double sum_of_all() {
        s_.exponentials.resize(n_);
        kernels_->exponentials(values_, highest_, int64_t(n_), s_.exponentials.data());
        return double(pairwise_sum(s_.exponentials.data(), n_));
    }

    // Apply all filters and return the place of the drawn token. total: as for keep_top_p.
    size_t finish(double total) {
        Ranked& ranked = s_.ranked;
        if (rules_.typical_p < 1.0) ranked.keep_typical(rules_.typical_p);
        ranked.keep_top_p(rules_.top_p, total, rules_.min_p);
        if (row_.has_xtc) ranked.drop_top_choices(rules_.xtc_threshold);
        double temperature = rules_.temperature;
        if (rules_.dynatemp_range > 0.0)
            temperature =
                ranked.dynamic_temperature(std::max(temperature - rules_.dynatemp_range, 0.0),
                                           temperature + rules_.dynatemp_range, rules_.dynatemp_exponent);
        const bool is_near_target = adapts() && temperature > 0.0;
        return ranked.place(is_near_target ? adapted(temperature) : ranked.drawn(temperature, row_.u));
    }

    bool adapts() const { return rules_.adaptive_target >= 0.0; }

    // Return the rank of a candidate drawn by adaptive-p: the nearer a probability is to a target, the more
    // likely is the token. The target makes up for the mean of the tokens before.
    size_t adapted(double temperature) {
        const size_t n = s_.ranked.size();
        s_.weights.resize(n);
        s_.wide.resize(n);
        for (size_t i = 0; i < n; i++) s_.weights[i] = std::exp(s_.ranked.relative(i) / temperature);
        const double total = pairwise_sum(s_.weights.data(), n);
        const double target = std::clamp(2.0 * rules_.adaptive_target - draw_.memory_, 0.0, 1.0);
        double sum = 0.0;
        for (size_t i = 0; i < n; i++) {
            const double distance = std::abs(s_.weights[i] / total - target) / kAdaptiveWidth;
            sum += std::exp(-kAdaptiveSharpness * distance * distance / (1.0 + distance));
            s_.wide[i] = sum;
        }
        const auto begin = s_.wide.begin(), end = begin + long(n);
        const size_t rank = size_t(
            std::min(std::upper_bound(begin, end, row_.u * sum), std::lower_bound(begin, end, sum)) - begin);
        const double decay = rules_.adaptive_decay;
        memory_ = decay * draw_.memory_ + (1.0 - decay) * (s_.weights[rank] / total);
        return rank;
    }

    // Draw so that the surprise stays near tau bits (arXiv 2007.14966). Version 1 estimates with Zipf's law
    // how many tokens to keep; 2 keeps those with a surprise of at most mu. Negative: doubt.
    int64_t mirostat(Order order) {
        const double bit = std::log(2.0);
        const bool is_certain = rules_.mirostat == 1 ? keep_by_zipf(order) : keep_by_surprise(order);
        if (!is_certain) return -1;
        const size_t rank = s_.ranked.drawn(1.0, row_.u);
        const double observed = s_.ranked.surprise(rank) / bit;
        memory_ = draw_.memory_ - rules_.mirostat_eta * (observed - rules_.mirostat_tau);
        return token_at(s_.ranked.place(rank));
    }

    double relative(float value) const { return (double(value) - double(highest_)) / rules_.temperature; }

    bool keep_by_surprise(Order order) {
        const double bit = std::log(2.0);
        s_.ranked.begin(order, double(highest_), rules_.temperature, n_);
        if (order == Order::fast && n_ > kFewExact) {
            for (size_t i = 0; i < n_; i++) s_.ranked.add(values_[i], i, values_[i] != kOut);
            s_.ranked.rank(*kernels_);
            s_.ranked.keep_surprising(bit * draw_.memory_, kDoubt * (1.0 + std::abs(draw_.memory_)));
            return !s_.ranked.in_doubt();
        }
        s_.wide.resize(n_);
        s_.places.resize(n_);
        s_.weights.resize(n_);
        size_t n = 0;
        for (size_t i = 0; i < n_; i++) {
            s_.wide[n] = relative(values_[i]);
            s_.places[n] = uint32_t(i);
            n += values_[i] != kOut;
        }
        for (size_t i = 0; i < n; i++) s_.weights[i] = std::exp(s_.wide[i]);
        const double log_sum = std::log(pairwise_sum(s_.weights.data(), n));
        size_t n_kept = 0;
        for (size_t i = 0; i < n; i++) {
            if (!((log_sum - s_.wide[i]) / bit <= draw_.memory_)) continue;
            s_.ranked.add(values_[s_.places[i]], s_.places[i]);
            n_kept++;
        }
        if (n_kept == 0) {
            const auto end = s_.wide.begin() + long(n);
            const size_t first = size_t(std::max_element(s_.wide.begin(), end) - s_.wide.begin());
            s_.ranked.add(values_[s_.places[first]], s_.places[first]);
        }
        s_.ranked.rank(*kernels_);
        return true;
    }

    bool keep_by_zipf(Order order) {
        const size_t n = size_t(std::count_if(values_, values_ + n_, [](float v) { return v != kOut; }));
        const size_t n_likely = std::min(kMostLikely, n);
        rank_likely(n_likely, order);
        const size_t n_kept = kept_by_zipf(n_likely, n);
        if (n_kept > n_likely) rank_likely(n_kept, order);
        s_.ranked.keep_first(n_kept);
        return true;
    }

    // Rank at least the k most likely tokens.
    void rank_likely(size_t k, Order order) {
        const float bound = bound_of(k, s_.maxima, s_.best);
        const double lowest = relative(bound);  // includes tokens that are equal after the division
        const float lower = float(bound - 1e-6 * (double(highest_) - double(bound)));  // no lower one is
        s_.ranked.begin(order, double(highest_), rules_.temperature, n_);
        for (size_t g = 0; g < s_.maxima.size(); g++) {
            if (relative(s_.maxima[g]) < lowest) continue;
            const size_t end = std::min(n_, (g + 1) * kLogitGroup);
            for (size_t i = g * kLogitGroup; i < end; i++) {  // compare first: a division is slow
                const float value = values_[i];
                const bool is_in = value >= bound || (value >= lower && relative(value) >= lowest);
                s_.ranked.add(value, i, is_in & (value != kOut));
            }
        }
        s_.ranked.rank(*kernels_);
    }

    size_t kept_by_zipf(size_t n_likely, size_t n) {
        if (n_likely < 2) return 1;
        std::vector<double> falls(n_likely - 1), squares(n_likely - 1);
        for (size_t i = 0; i + 1 < n_likely; i++) {
            const double step = std::log(double(i + 2) / double(i + 1));
            falls[i] = step * (s_.ranked.relative(i) - s_.ranked.relative(i + 1));
            squares[i] = step * step;
        }
        const double s =
            pairwise_sum(falls.data(), falls.size()) / pairwise_sum(squares.data(), squares.size());
        const double n_vocab = double(draw_.n_vocab_), power = std::pow(2.0, draw_.memory_);
        const double rest = 1.0 - std::pow(n_vocab, 1.0 - s);
        const double k = rest == 0.0  // s = 1: the limit of (s - 1) / rest
                             ? power / std::log(std::max(n_vocab, 2.0))
                             : std::pow((s - 1.0) * power / rest, 1.0 / s);
        return std::isfinite(k) ? size_t(std::min(std::max(k, 1.0), double(n))) : n;
    }

    const Draw& draw_;
    const DrawRules& rules_;
    const LogitRow& row_;
    const Kernels* kernels_;
    Scratch& s_;
    double memory_;  // after this draw
    const float* values_ = nullptr;
    size_t n_ = 0;
    float highest_ = kOut;
    bool is_near_ = false;
};

Drawn Draw::draw(const LogitRow& row, const Kernels& kernels) const {
    return Work(*this, row, &kernels).run();
}

void Draw::adjust(const float* logits, float* out) const {
    Work(*this, {logits, n_vocab_}, nullptr).adjust(out);
}

namespace {

// Return log(sum(exp(logits))).
double log_sum_exp(const float* logits, int64_t n, const Kernels& kernels) {
    Scratch& s = scratch();
    const float highest = find_maxima(logits, size_t(n), s.maxima);
    if (!std::isfinite(highest)) return std::numeric_limits<double>::quiet_NaN();
    s.exponentials.resize(size_t(n));
    kernels.exponentials(logits, highest, n, s.exponentials.data());
    double sum = 0.0;
    for (size_t first = 0; first < size_t(n); first += kSumBlock) {
        const size_t end = std::min(size_t(n), first + kSumBlock);
        s.wide.assign(s.exponentials.begin() + long(first), s.exponentials.begin() + long(end));
        sum += pairwise_sum(s.wide.data(), s.wide.size());
    }
    return double(highest) + std::log(sum);
}

// Return the k largest logits. It must follow log_sum_exp of the same row, which finds the maxima of groups.
std::vector<int64_t> largest_logits(const float* logits, int64_t n, int64_t k) {
    Scratch& s = scratch();
    std::vector<Logit>& found = s.changed;
    found.clear();
    for_each_above(bound_of(size_t(k), s.maxima, s.best), logits, size_t(n), s.maxima,
                   [&](size_t i, float value, bool is_in) {
                       if (is_in) found.push_back({int64_t(i), value});
                   });
    const size_t n_found = std::min(found.size(), size_t(k));
    std::partial_sort(
        found.begin(), found.begin() + long(n_found), found.end(),
        [](const Logit& a, const Logit& b) { return a.value != b.value ? a.value > b.value : a.id < b.id; });
    std::vector<int64_t> ids;
    ids.reserve(size_t(k));
    for (size_t i = 0; i < n_found; i++) ids.push_back(found[i].id);
    for (int64_t i = 0; i < n && int64_t(ids.size()) < k; i++)
        if (logits[i] == kOut) ids.push_back(i);
    return ids;
}

RowLogprobs logprobs_of(const float* logits, int64_t n, int64_t n_top, const Kernels& kernels) {
    RowLogprobs found{log_sum_exp(logits, n, kernels), {}};
    if (n_top > 0) found.top = largest_logits(logits, n, n_top);
    return found;
}

// Set the results of `places` to f(place), in one chunk each.
template <class T, class F>
class EachPlace : public Job {
  public:
    EachPlace(const std::vector<size_t>& places, const F& f, std::vector<T>& results)
        : places_(places), f_(f), results_(results) {}

    int n_phases() const override { return 1; }
    int n_chunks(int) const override { return int(std::min(places_.size(), size_t(kMaxChunks))); }
    bool prefetch(int, int, int) const override { return false; }
    void reached(int) const override {}
    void run_chunk(int, int chunk, Worker& worker) const override {
        std::vector<T> found;
        std::exception_ptr failure;
        try {
            for (size_t i = size_t(chunk); i < places_.size(); i += size_t(n_chunks(0)))
                found.push_back(f_(places_[i]));
        } catch (...) {  // out of memory
            failure = std::current_exception();
        }
        if (!worker.begin_commit()) return;
        for (size_t i = 0; i < found.size(); i++)
            results_[places_[size_t(chunk) + i * size_t(n_chunks(0))]] = std::move(found[i]);
        if (failure) failures_[chunk] = failure;
        worker.end_commit();
    }
    void rethrow() const {
        for (const std::exception_ptr& failure : failures_)
            if (failure) std::rethrow_exception(failure);
    }

  private:
    const std::vector<size_t>& places_;
    const F& f_;
    std::vector<T>& results_;
    mutable std::vector<std::exception_ptr> failures_ = std::vector<std::exception_ptr>(size_t(kMaxChunks));
};

// Set the results of `places` to f(place), on the runtime's threads unless it is null or has a single thread.
// A late thread may compute a place again, and discards the result.
template <class T, class F>
void fill(std::vector<T>& results, const std::vector<size_t>& places, Runtime* runtime, const F& f) {
    if (runtime == nullptr || runtime->n_threads() == 1 || places.size() < 2) {
        const DefaultFloats floats;
        for (const size_t place : places) results[place] = f(place);
        return;
    }
    const EachPlace<T, F> step(places, f, results);
    std::atomic<bool> never{false};
    const Runtime::Turn turn(*runtime, never, nullptr);
    turn.pool().run(turn.pool().free_slot(), step, never, nullptr, &step);
    turn.pool().leave(&step);
    step.rethrow();
}

}  // namespace

std::vector<DrawnToken> draw_tokens(const std::vector<DrawJob>& jobs, const Kernels& kernels,
                                    Runtime* runtime) {
    struct Found {
        Drawn drawn;
        RowLogprobs logprobs;
    };
    const auto find = [&](size_t i) {
        const DrawJob& job = jobs[i];
        Found found{job.draw->draw(job.row, kernels), {}};
        if (job.n_top != DrawJob::kNoLogprobs && found.drawn.token >= 0)
            found.logprobs = logprobs_of(job.row.logits, job.row.n, job.n_top, kernels);
        return found;
    };
    std::vector<Found> found(jobs.size());
    std::vector<size_t> quick, slow;
    for (size_t i = 0; i < jobs.size(); i++) {
        const bool is_quick = jobs[i].n_top == DrawJob::kNoLogprobs && jobs[i].draw->is_quick(jobs[i].row);
        (is_quick ? quick : slow).push_back(i);
    }
    fill(found, quick, nullptr, find);
    fill(found, slow, runtime, find);
    std::vector<DrawnToken> tokens;
    for (size_t i = 0; i < jobs.size(); i++) {
        jobs[i].draw->keep(found[i].drawn);
        tokens.push_back({found[i].drawn.token, std::move(found[i].logprobs)});
    }
    return tokens;
}

std::vector<RowLogprobs> row_logprobs(const float* logits, int64_t n_rows, int64_t n, int64_t n_top,
                                      const Kernels& kernels, Runtime* runtime) {
    std::vector<RowLogprobs> found(static_cast<size_t>(n_rows));
    std::vector<size_t> rows(found.size());
    std::iota(rows.begin(), rows.end(), size_t(0));
    fill(found, rows, runtime,
         [&](size_t i) { return logprobs_of(logits + int64_t(i) * n, n, n_top, kernels); });
    return found;
}

}  // namespace hotset
