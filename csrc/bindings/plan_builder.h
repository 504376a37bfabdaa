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

    int rope(bool neox, int n_rot, const std::vector<double>& frequencies, float magnitude);

    // Rows of tokens, or of positions + first_row.
    void embed(int type, const Rows& data, int64_t rows, bool positions, int first_row, int out);

    // The step begins with rows that `run` is given, one per token, in place of an embedding.
    void input(int out);
    void select(int x, int out);

    void norm(bool layer, const Floats& weight, const std::optional<Floats>& bias, float eps, int n_head,
              int x, int out);

    using NormArguments = std::optional<std::tuple<bool, Floats, std::optional<Floats>, float>>;
    using Part = std::tuple<int, Rows, std::optional<Floats>, int>;  // type, data, bias, out
    using ActivationArguments = std::pair<int, float>;               // kind, threshold
    // A matrix by channel: its outputs, those of a tile, and which of them is the part's first; the share of
    // channels below which these are read.
    using Channels = std::tuple<Bytes, int64_t, int64_t, int64_t, float>;

    // cutoffs: of the input (see Plan::add_linear, as for channels), of the activation, of the result. With
    // an activation and two parts, these are gate and up; with one part, it is applied to the result.
    // largest: of the one part, as LinearPart::largest.
    void linear(int x, const NormArguments& norm, const std::vector<Part>& parts, int residual, bool gated,
                const std::optional<ActivationArguments>& activation,
                const std::tuple<float, float, float>& cutoffs,
                const std::vector<std::optional<Channels>>& channels, int largest);

    // The values of an FFN's neurons (csrc/ops/neurons.cpp). predictor: buffer of scores, threshold, and how
    // many leading neurons have no score. missed: those alone that up's store missed, or had.
    void neurons(int x, const NormArguments& norm, const std::optional<Part>& gate, const Part& up,
                 const ActivationArguments& activation, std::optional<int> up_activation,
                 const std::optional<std::tuple<int, float, int64_t>>& predictor, bool sparse, int out,
                 const std::tuple<float, float, float>& cutoffs,
                 const std::vector<std::optional<Channels>>& channels, std::optional<bool> missed);

    // x times a matrix with a row per input (csrc/ops/axpy.cpp).
    void axpy(int x, int type, const Rows& data, const std::optional<Bytes>& scales,
              const std::optional<Floats>& bias, int residual, bool sparse, int out);

    // Rows of a group that operations behind it read (FetchFacts). by: any buffer, scores from neuron `first`
    // on, values, or a route.
    void fetch(std::shared_ptr<RowStore> store, int group, int which, int by, float threshold, int64_t first,
               bool waits);
    // next: as of Plan::add_finish_fetch.
    void finish_fetch(std::shared_ptr<RowStore> store, const std::vector<Bytes>& next);
    // See Plan::add_await_piece.
    void await_piece(std::shared_ptr<Stream> stream, int piece, bool waits);

    // See RouteFacts.
    void route(int x, int n_used, int scoring, const std::optional<Floats>& bias, bool normalised,
               float scale, int n_groups, int n_groups_used, int group_best, int out);

    // Neurons of a route's experts, as `neurons`; without an activation the products of up.
    void expert_neurons(int x, int route, int n_expert, const std::optional<ExpertPart>& gate,
                        const ExpertPart& up, const std::optional<ActivationArguments>& activation,
                        const std::optional<ActivationArguments>& up_activation,
                        const std::optional<std::pair<int, float>>& predictor, float cutoff, bool sparse,
                        int out, std::optional<bool> missed);

    // by_neuron: matrices have a row per neuron; sparse: those of zeros are left out then. apart: what would
    // be weighed and summed stands side by side.
    void expert_sum(int x, int route, int n_expert, const ExpertPart& down, int residual, bool by_neuron,
                    bool apart, bool sparse, int out);

    void mask(int x, int scores, float threshold, int64_t first, int out);
    void sign_scores(int x, const Bytes& rows, const std::optional<Floats>& bias, int out);
    void rotate(int x, int out, int n_head, int head_dim, int rope, int first);
    void heads(int x, int shared, int n_head, int first, int out);
    void transposed_heads(int x, int type, const Bytes& data, int n_head, int out);

    void attention(int q, int k, int v, int out, int n_head, int n_head_kv, int head_dim, int head_dim_v,
                   float scale, float softcap, int window, int rope,
                   const std::optional<std::pair<Floats, float>>& q_norm,
                   const std::optional<std::pair<Floats, float>>& k_norm, const std::optional<Floats>& sinks,
                   int kv_type, const WritableBytes& k_cache, const WritableBytes& v_cache,
                   const std::optional<WritableBytes>& k_scale, const std::optional<WritableBytes>& v_scale);

    // weight: [kernel, width]. states: [n_states, (kernel - 1) * width].
    void short_conv(int x, const FloatMatrix& weight, const WritableFloats& states, int out);

    // rate, step: [n_head]. states: [n_states, n_head * dim_k * dim_v].
    void delta_net(int x, int alpha, int beta, const Floats& rate, const Floats& step, int n_head,
                   int n_head_k, int dim_k, int dim_v, bool tiled, const WritableFloats& states, int out);

    void activate(int kind, float threshold, int x, int out);
    void cutoff(int x, float threshold, int out);
    void add(int a, int b, int out) { check_pair(a, b, out), plan_->add_add(a, b, out); }
    void multiply(int a, int b, int out);

    void finish();
    void cancel() { plan_->cancel(); }

    void run(const Ints& tokens, const Ints& positions, const Ints& sequences, const IntMatrix& pages,
             const Ints& outputs, const std::optional<FloatMatrix>& x, const std::optional<Bytes>& cut,
             const std::optional<Ints>& states, const std::optional<Ints>& saves);

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
    bool embeds_tokens() const { return n_vocab_ > 0 || input_ < 0; }
    int64_t width(int id) const { return widths_[checked(id)]; }
    // Of an operation that works on all tokens; all operations have as many slots.
    StateSlots make_states(int x, int out, const WritableFloats& states, int64_t size);
    // Tokens of a sequence follow one another; it begins anew or has a state; nothing that is read is
    // written.
    void check_states(const Ints& positions, const Ints& sequences, int n_sequences,
                      const std::optional<Ints>& states, const std::optional<Ints>& saves) const;
    // n_each cells of each operation, each below n_cells.
    void check_cells(const Ints& cells, int n_each, int n_cells) const;
    void same_rows(int a, int b) const;
    void check_pair(int a, int b, int out) const;
    Norm make_norm(const NormArguments& norm, int x) const;
    LinearPart make_part(const Part& part, int x);
    ChannelMatrix make_channels(const Channels& channels, const Matrix& by_row);
    // Experts that a token has.
    int check_route(int route, int n_expert, int out) const;
    static Norm make_norm(bool layer, const Floats& weight, const std::optional<Floats>& bias, float eps,
                          int64_t width);

    const int n_pages_;
    // A late thread may still read weights and cache when Python drops the plan: they must outlive plan_,
    // whose end waits for such threads. So they stand before it.
    std::vector<Bytes> weights_;
    std::vector<WritableBytes> caches_;
    std::vector<std::shared_ptr<RowStore>> stores_;
    std::vector<std::shared_ptr<Stream>> streams_;
    std::vector<WritableFloats> state_slots_;
    std::unique_ptr<Plan> plan_;
    std::vector<int64_t> widths_;
    std::vector<bool> outputs_;
    int input_ = -1;  // buffer of the rows that a step begins with; -1: it begins with tokens
    int64_t n_vocab_ = 0;
    int64_t n_positions_ = 0;  // 0: any
    bool has_states_ = false;
    int n_states_ = 0;
    int n_tokens_ = 0;
    int n_outputs_ = 0;
    bool finished_ = false;
};

}  // namespace hotset::bindings
