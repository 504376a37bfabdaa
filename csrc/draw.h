// Draws a token from a row of logits. The parameters belong to SamplingParams (engine/sampler.py), which
// defines their meaning and order. tests/support/sampling_reference.py does the same in NumPy: the tokens are
// equal for every seed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "repetitions.h"
#include "runtime.h"

namespace hotset {

// The numbers of SamplingParams that decide a draw, by name: draw.cpp has the list of names.
using RuleNumbers = std::unordered_map<std::string, double>;
struct DrawRules;

// The input of a draw.
struct LogitRow {
    const float* logits;  // [n]
    int64_t n;
    const int32_t* candidates = nullptr;    // [n], rising: the tokens of the row; null: the whole vocabulary
    const float* largest = nullptr;         // [n / kLogitGroup]: LinearPart::largest of each group
    const uint8_t* allowed_bits = nullptr;  // bit i % 8 of byte i / 8 for token i; null: all are allowed
    int64_t n_allowed_bytes = 0;            // tokens beyond are forbidden
    const int64_t* allowed = nullptr;       // instead of bits: the allowed ids, if they are few
    int64_t n_allowed = 0;
    double u = 0.0;        // random number in [0, 1)
    bool has_xtc = false;  // whether XTC excludes top choices this time
};

struct Drawn {
    static constexpr int64_t kNothing = -1;     // no token is allowed
    static constexpr int64_t kNotNumbers = -2;  // a logit is NaN, or the largest is infinite

    int64_t token;
    double memory;  // the state for the next draw, such as mirostat's mu
};

// What converts a row of logits to log-probabilities, and the indices of the largest.
struct RowLogprobs {
    double log_total = 0.0;    // log(sum(exp(logits))), summed in float64 as NumPy does; NaN for damaged rows
    std::vector<int64_t> top;  // indices by falling logit, equal ones by rising index
};

// The sampler of one sequence. Several threads may call `draw` at once; other methods change it.
class Draw {
  public:
    using Bias = std::vector<std::pair<int64_t, float>>;

    // bias: ordered by id; -inf forbids the token. dry_breakers: see Repetitions. tokens: the prompt. Throws
    // std::invalid_argument if a rule is missing or unknown.
    Draw(const RuleNumbers& numbers, Bias bias, const std::vector<std::vector<int64_t>>& dry_breakers,
         int64_t n_vocab, const std::vector<int64_t>& tokens);

    int64_t n_vocab() const { return n_vocab_; }
    int64_t n_penalised() const { return int64_t(counts_.size()); }
    // Whether `largest` (LogitRow) may decide, so that a draw takes microseconds.
    bool is_quick(const LogitRow& row) const;

    Drawn draw(const LogitRow& row, const Kernels& kernels) const;
    // Make the next `accept` update the memory. If a rejected token is drawn again, it is updated once.
    void keep(const Drawn& drawn) { next_memory_ = drawn.memory; }
    void accept(int64_t token);

    // Compute the logits of all tokens with bias, penalties and DRY.
    void adjust(const float* logits, float* out) const;

  private:
    class Work;

    bool penalises() const;
    void count(int64_t token);

    std::shared_ptr<const DrawRules> rules_;
    Bias bias_;
    int64_t n_vocab_;
    double memory_, next_memory_;  // current, and after the drawn token
    std::vector<int64_t> recent_;  // the tokens that penalties count: a ring if their number is limited
    size_t oldest_ = 0;
    std::unordered_map<int64_t, int64_t> counts_;
    std::optional<Repetitions> repetitions_;
};

// One of several draws that may run at once, each for another sequence.
struct DrawJob {
    static constexpr int64_t kNoLogprobs = -1;

    Draw* draw;
    LogitRow row;
    int64_t n_top = kNoLogprobs;  // at most row.n; logprobs of the whole row with n_top largest
};

struct DrawnToken {
    int64_t token;
    RowLogprobs logprobs;
};

// Draw a token for each job. Slow jobs run on the runtime's threads; null: on this thread.
std::vector<DrawnToken> draw_tokens(const std::vector<DrawJob>& jobs, const Kernels& kernels,
                                    Runtime* runtime);

// Return the logprobs of logits [n_rows, n], with the n_top largest of each row.
std::vector<RowLogprobs> row_logprobs(const float* logits, int64_t n_rows, int64_t n, int64_t n_top,
                                      const Kernels& kernels, Runtime* runtime);

}  // namespace hotset
