// A piece of a stream that the operations behind this one read: it is there when this one is done.
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

std::unique_ptr<Op> make_await_piece(const Plan& plan, Stream& stream, int piece, bool waits) {
    return std::make_unique<AwaitPiece>(plan, stream, piece, waits);
}

}  // namespace hotset
