// Helper for operations in which one thread waits for a disk while the others sleep.
#pragma once

#include "../plan.h"

namespace hotset {

// Run work(), which returns whether it completed. If it returns false, the step is being cancelled; if it
// throws, the step fails.
template <class Work>
void run_alone(const Plan& plan, Worker& worker, const Work& work) {
    try {
        if (!work()) return;
    } catch (...) {
        return plan.fail(std::current_exception());
    }
    if (worker.begin_commit()) worker.end_commit();
}

}  // namespace hotset
