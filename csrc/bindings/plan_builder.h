// Builds a plan from Python, with every argument checked.
#pragma once

#include "bindings/bindings.h"
#include "plan.h"

namespace hotset::bindings {

class PlanBuilder {
  public:
    PlanBuilder(int max_tokens, int n_kv_blocks, int max_kv_blocks, std::shared_ptr<Runtime> runtime,
                const std::optional<std::string>& isa);
    ~PlanBuilder();

    int buffer(int64_t width, bool outputs);

    // Make the step begin with rows that are passed to `run`, one per token, instead of an embedding.
    void input(int out);

    // Add an operation. Its facts are described in csrc/facts.h and the operation's file.
    void add(const std::string& operation, const nb::kwargs& facts);

    void finish();
    void cancel() { plan_->cancel(); }
    Plan& plan() { return *plan_; }
    int64_t width(int id) const { return plan_->buffer(checked(id)).width; }
    int n_ops() const { return plan_->n_ops(); }

    void run(const Ints& tokens, const Ints& positions, const Ints& sequences, const IntMatrix& kv_blocks,
             const Ints& outputs, const std::optional<FloatMatrix>& x,
             const std::optional<Bytes>& thresholded, const std::optional<Ints>& states,
             const std::optional<Ints>& saves, const std::optional<FloatMatrix>& scales,
             const std::optional<IntMatrix>& rotary, const std::optional<IntMatrix>& groups,
             const std::optional<Ints>& image_places, const std::optional<FloatMatrix>& image_rows);

    // Return a view of the buffer's rows of the latest step.
    nb::ndarray<nb::numpy, float, nb::ndim<2>> rows(nb::handle self, int id);

    std::string isa() const { return plan_->kernels().isa; }
    size_t bytes() const { return plan_->bytes(); }
    size_t own_bytes() const { return plan_->own_bytes(); }

    // Return sums over the operations of the latest step, [n_cells]: of their seconds, or of their FfnCounts.
    // cells: the sum to which each operation is added, or each of its six counts. Computed here because NumPy
    // would be slow with cold caches between two steps.
    nb::ndarray<nb::numpy, double, nb::ndim<1>> op_seconds(const Ints& cells, int n_cells) const;
    nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> op_counts(const Ints& cells, int n_cells) const;

  private:
    int checked(int id) const;
    bool embeds_tokens() const { return plan_->limits().n_vocab > 0 || input_ < 0; }
    // Return rows that replace embeddings, with every place and the width checked; n is 0 without any.
    ImageRows checked_images(int n_tokens, const std::optional<Ints>& places,
                             const std::optional<FloatMatrix>& rows) const;
    // Check that a sequence's tokens are consecutive, that it begins or has a state, and that no slot is both
    // read and written.
    void check_states(const Ints& positions, const Ints& sequences, int n_sequences,
                      const std::optional<Ints>& states, const std::optional<Ints>& saves) const;
    // Check the rotary positions, and that a group is around its token and within its sequence in the step.
    StepPlaces checked_places(const Ints& positions, const Ints& sequences,
                              const std::optional<IntMatrix>& rotary,
                              const std::optional<IntMatrix>& groups) const;
    // Check that each operation has n_each cells, each below n_cells.
    void check_cells(const Ints& cells, int n_each, int n_cells) const;

    // Declared before plan_, whose destructor waits for stragglers: these may still read weights and cache
    // when Python drops the plan.
    std::vector<nb::object> kept_;
    std::unique_ptr<Plan> plan_;
    int input_ = -1;  // buffer of the input rows; -1: the plan begins with tokens
    int n_tokens_ = 0;
    int n_outputs_ = 0;
    bool finished_ = false;
};

}  // namespace hotset::bindings
