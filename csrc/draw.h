// One token drawn from a row of logits of which the largest of each group are known (LinearPart::largest):
// only groups that can matter are read. engine/sampler.py does the same in NumPy, for any row; between two
// steps every call of it costs more than what it computes, since weights have taken its code out of the
// caches.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace hotset {

struct DrawRules {
    double temperature = 0.0;  // 0: the likeliest
    int64_t top_k = 1;         // at least 1, unless the temperature is 0
    double top_p = 1.0, min_p = 0.0;
    float repetition = 1.0f, frequency = 0.0f, presence = 0.0f;  // penalties
    std::vector<std::pair<int64_t, float>> bias;                 // by id; -inf: forbidden
};

// Of one sequence; it has memory that draws use again.
class Draw {
  public:
    Draw(DrawRules rules, int64_t n_vocab);

    int64_t n_vocab() const { return n_vocab_; }

    // largest: [n_vocab / kLogitGroup]. counts: of the tokens that penalties change. u: in [0, 1), by which
    // one is drawn. -1: groups do not decide (too many could matter, or no logit is finite).
    int64_t token(const float* logits, const float* largest,
                  const std::vector<std::pair<int64_t, int64_t>>& counts, double u);

  private:
    struct Logit {
        int64_t id;
        float value;
    };
    void change(const float* logits, const std::vector<std::pair<int64_t, int64_t>>& counts);
    // A group's logits as they are after bias and penalties.
    const float* group(const float* logits, int64_t g);
    float bound_of_best(int64_t k);
    int64_t drawn(double u);

    const DrawRules rules_;
    const int64_t n_vocab_;
    std::vector<Logit> changed_;  // by rising id
    std::vector<float> largest_, best_, values_;
    std::vector<Logit> likely_;
    std::vector<double> relative_, cumulative_;
};

}  // namespace hotset
