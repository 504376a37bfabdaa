// Operations in which one thread waits for the disk, for all of the thread pool.
#pragma once

#include "../plan.h"

namespace hotset {

// Runs work(), which says whether it came to its end; a step that is cancelled does not go on, and one whose
// work throws fails.
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
