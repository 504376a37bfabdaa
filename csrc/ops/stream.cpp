// Loads a piece of a stream for later operations. It is loaded when this operation completes.
#include "../facts.h"
#include "alone.h"

namespace hotset {
namespace {

class AwaitPiece : public Op {
  public:
    AwaitPiece(const Plan& plan, Stream& stream, int piece, bool waits)
        : plan_(plan), stream_(stream), piece_(piece), waits_(waits) {}

    int n_phases(const StepTokens&) const override { return 1; }
    int n_chunks(int, const StepTokens&) const override { return 1; }
    bool alone(int) const override { return true; }

    void run(int, int, const StepTokens&, Worker& worker) const override {
        run_alone(plan_, worker, [&] {
            if (waits_) return stream_.acquire(piece_, [&] { return worker.cancelled(); });
            stream_.read_ahead(piece_);
            return true;
        });
    }
    Needs needs() const override { return {}; }

  private:
    const Plan& plan_;
    Stream& stream_;
    const int piece_;
    const bool waits_;
};

}  // namespace

// waits: later operations read the piece. If false, this step needs no more pieces, and reading ahead may
// start.
static const Registered kAwaitPiece("await_piece", [](Facts& facts) -> std::unique_ptr<Op> {
    Stream& stream = facts.stream("stream");
    const int64_t piece = facts.integer("piece");
    require(stream.allocated() && piece >= 0 && piece < stream.n_pieces(), "there is no such piece");
    return std::make_unique<AwaitPiece>(facts.plan(), stream, int(piece), facts.flag("waits"));
});

}  // namespace hotset
