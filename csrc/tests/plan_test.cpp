// Checks the limits that a plan enforces: an operation that splits a step into too many chunks is an error,
// not a write past an array. Needs no Python, so that it also runs under sanitizers. Exit status 1 if a check
// fails.
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>

#include "../plan.h"

using namespace hotset;

namespace {

constexpr int kMaxTokens = 8;
constexpr int kPhases = 7;  // of one operation: more than any has
int failures = 0;

void check(bool condition, const std::string& what) {
    if (condition) return;
    failures++;
    std::printf("FAILED: %s\n", what.c_str());
}

// Counts its chunks in the only column of its output. The test chooses phases and chunks.
class Counting : public Op {
  public:
    using Chunks = std::function<int(int phase, int n_tokens)>;
    Counting(const Buffer& out, int n_phases, Chunks chunks)
        : out_(out), n_phases_(n_phases), chunks_(std::move(chunks)) {}
    int n_phases(const StepTokens&) const override { return n_phases_; }
    int n_chunks(int phase, const StepTokens& step) const override { return chunks_(phase, step.n_tokens); }
    void run(int, int, const StepTokens&, Worker& worker) const override {
        if (!worker.begin_commit()) return;
        std::atomic_ref<float>(*out_.row(0)).fetch_add(1.0f);
        worker.end_commit();
    }
    Needs needs() const override { return {1, 1, 0}; }

  private:
    const Buffer& out_;
    const int n_phases_;
    const Chunks chunks_;
};

struct Tested {
    Plan plan;
    int out;

    Tested(int n_threads, int n_phases, Counting::Chunks chunks)
        : plan(*scalar_kernels(), kMaxTokens, 1, std::make_shared<Runtime>(n_threads)),
          out(plan.add_buffer(1, false)) {
        plan.add(std::make_unique<Counting>(plan.buffer(out), n_phases, std::move(chunks)));
        plan.finish();
    }
    // Return the number of chunks that ran; -1 if the step was refused and nothing ran.
    float step(int n_tokens) {
        float& count = *plan.buffer(out).row(0);
        count = 0.0f;
        try {
            plan.run_rows(0, plan.n_ops(), n_tokens);
        } catch (const std::logic_error& error) {
            check(std::string(error.what()).starts_with("operation 0 splits phase"), error.what());
            check(count == 0.0f, "nothing runs of a refused step");
            return -1.0f;
        }
        return count;
    }
};

void test_bounds(int n_threads) {
    for (int phase = 0; phase < kPhases; phase++) {
        auto chunks_of = [&](int n) { return [=](int at, int) { return at == phase ? n : 1; }; };
        const std::string where = "phase " + std::to_string(phase) + ", threads " + std::to_string(n_threads);
        Tested most(n_threads, kPhases, chunks_of(kMaxChunks));
        for (int again = 0; again < 20; again++)
            check(most.step(1) == kMaxChunks + kPhases - 1, "a phase may have kMaxChunks chunks: " + where);
        for (int n : {kMaxChunks + 1, 2 * kMaxChunks, 1 << 30, -1})
            check(Tested(n_threads, kPhases, chunks_of(n)).step(1) == -1.0f,
                  std::to_string(n) + " chunks are refused: " + where);
        check(Tested(n_threads, kPhases, chunks_of(0)).step(1) == kPhases - 1,
              "a phase without chunks is skipped: " + where);
    }
    check(Tested(n_threads, 100, [](int, int) { return 1; }).step(1) == 100.0f,
          "there may be any number of phases");
    // A step that is too large does not damage the plan.
    Tested grows(n_threads, 1, [](int, int n_tokens) { return n_tokens * 300; });
    check(grows.step(3) == 900.0f && grows.step(4) == -1.0f && grows.step(2) == 600.0f,
          "steps before and after a refused one run");
}

}  // namespace

int main() {
    for (int n_threads : {1, 2, 5}) test_bounds(n_threads);
    std::printf(failures ? "%d failures\n" : "a plan holds its operations to their bounds\n", failures);
    return failures != 0;
}
