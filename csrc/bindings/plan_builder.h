// A plan as Python builds it: the same operations, with every argument checked.
#pragma once

#include "bindings/bindings.h"
#include "plan.h"

namespace hotset::bindings {

class PlanBuilder {
  public:
    PlanBuilder(int max_tokens, int n_pages, int max_pages, std::shared_ptr<Runtime> runtime,
                const std::optional<std::string>& isa);
    ~PlanBuilder();

    int buffer(int64_t width, bool outputs);

    // The step begins with rows that `run` is given, one per token, in place of an embedding.
    void input(int out);

    // Adds an operation; its facts as csrc/facts.h and the operation's file have them.
    void add(const std::string& operation, const nb::kwargs& facts);

    void finish();
    void cancel() { plan_->cancel(); }
    Plan& plan() { return *plan_; }
    int64_t width(int id) const { return plan_->buffer(checked(id)).width; }
    int n_ops() const { return plan_->n_ops(); }

    void run(const Ints& tokens, const Ints& positions, const Ints& sequences, const IntMatrix& pages,
             const Ints& outputs, const std::optional<FloatMatrix>& x,
             const std::optional<Bytes>& thresholded, const std::optional<Ints>& states,
             const std::optional<Ints>& saves, const std::optional<FloatMatrix>& scales);

    // A view of the buffer's rows of the last step.
    nb::ndarray<nb::numpy, float, nb::ndim<2>> rows(nb::handle self, int id);

    std::string isa() const { return plan_->kernels().isa; }
    size_t bytes() const { return plan_->bytes(); }
    size_t own_bytes() const { return plan_->own_bytes(); }

    // Sums over the latest step's operations [n_cells]: of their seconds, and of their FfnCounts. cells:
    // where each operation's are added, or each of the six counts of each operation. Here, since between two
    // steps little is in the caches, NumPy least.
    nb::ndarray<nb::numpy, double, nb::ndim<1>> op_seconds(const Ints& cells, int n_cells) const;
    nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> op_counts(const Ints& cells, int n_cells) const;

  private:
    int checked(int id) const;
    bool embeds_tokens() const { return plan_->limits().n_vocab > 0 || input_ < 0; }
    // Tokens of a sequence follow one another; it begins anew or has a state; nothing that is read is
    // written.
    void check_states(const Ints& positions, const Ints& sequences, int n_sequences,
                      const std::optional<Ints>& states, const std::optional<Ints>& saves) const;
    // n_each cells of each operation, each below n_cells.
    void check_cells(const Ints& cells, int n_each, int n_cells) const;

    // A late thread may still read weights and cache when Python drops the plan: they must outlive plan_,
    // whose end waits for such threads. So they are declared before it.
    std::vector<nb::object> kept_;
    std::unique_ptr<Plan> plan_;
    int input_ = -1;  // buffer of the rows that a step begins with; -1: it begins with tokens
    int n_tokens_ = 0;
    int n_outputs_ = 0;
    bool finished_ = false;
};

}  // namespace hotset::bindings
