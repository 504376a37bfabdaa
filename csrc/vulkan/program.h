// Dispatches that are recorded once and submitted repeatedly.
#pragma once

#include <array>
#include <functional>

#include "vulkan/device.h"

namespace hotset::vulkan {

// A range of a buffer that a dispatch reads or, if `written`, writes.
struct Binding {
    std::shared_ptr<Buffer> buffer;
    uint64_t offset = 0, size = 0;
    bool written = false;
};

// Records dispatches with the barriers that their bindings require. A dispatch sees the writes of earlier
// ones. Dispatches without common data run concurrently.
class Program {
  public:
    // timed: write a timestamp before and after each dispatch (see times). Throws Error if the device has no
    // timestamps.
    explicit Program(std::shared_ptr<Device> device, bool timed = false);
    ~Program() { free(); }
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    // groups: workgroups in three dimensions. Throws std::invalid_argument for bindings outside their
    // buffers, or beyond the device's limits.
    void dispatch(const std::shared_ptr<Kernel>& kernel, const std::vector<Binding>& bindings,
                  std::span<const uint8_t> push, const std::array<uint32_t, 3>& groups);
    // The same with the groups in three numbers at `offset` of a buffer that the host writes before.
    void dispatch_indirect(const std::shared_ptr<Kernel>& kernel, const std::vector<Binding>& bindings,
                           std::span<const uint8_t> push, const std::shared_ptr<Buffer>& counts,
                           uint64_t offset);
    // Put the following dispatches into another submission. A run can be cancelled here, and submissions stay
    // short.
    void cut();
    // Let the host see all earlier writes, from which it computes its part of a layer. The following
    // dispatches run meanwhile, up to wait_for_host. Throws Error if the device has no timeline semaphores.
    void hand_over();
    // Let the following dispatches wait for the host's result for layer `layer` (see run).
    void wait_for_host(int layer);
    // End the recording.
    void finish();
    // Return the ticks of the device's clock (limits.timestampPeriod) at which each dispatch of the latest
    // complete run began and ended. A dispatch begins when all before it have ended. Empty unless timed.
    std::vector<std::array<uint64_t, 2>> times() const;
    // Return the number of groups of dispatches between two barriers. Those of a group run concurrently.
    int n_groups() const { return n_groups_; }

  private:
    friend class Run;
    struct Segment {  // a batch of a submission
        VkCommandBuffer commands;
        int host_layer;               // layer that the host computes before it; -1: none
        bool is_cut;                  // it begins a submission
        bool is_handed_over = false;  // the host waits for its end
    };
    struct Range {
        VkBuffer buffer;
        uint64_t begin, end;
        bool written;
    };
    struct Timestamps {  // of dispatches of one segment: one before the first, then one after each
        VkQueryPool pool;
        size_t segment;
        uint32_t n;
    };
    void begin_timing();
    void end_timing();
    VkDescriptorSet new_set(VkDescriptorSetLayout layout);
    void prepare(const std::shared_ptr<Kernel>& kernel, const std::vector<Binding>& bindings,
                 std::span<const uint8_t> push);
    void barrier();
    void begin(int host_layer, bool is_cut);
    void end();
    void free();
    VkCommandBuffer commands() const { return segments_.back().commands; }

    std::shared_ptr<Device> device_;
    std::vector<Segment> segments_;
    std::vector<VkDescriptorPool> pools_;
    uint32_t sets_left_ = 0, buffers_left_ = 0;
    std::vector<Range> since_barrier_;
    std::vector<std::shared_ptr<Kernel>> kernels_;  // kept alive for the recording, like the buffers
    std::vector<std::shared_ptr<Buffer>> buffers_;
    bool finished_ = false, timed_ = false;
    int n_groups_ = 0;
    std::vector<Timestamps> timestamps_;
};

// Run programs of one device in order, and wait. They are one submission, or more with cuts, which a program
// of many tokens has between its layers. is_cancelled: called now and then; true ends the run after the
// submissions in flight. on_host: computes the layer of wait_for_host, after hand_over; false ends the run;
// null: not needed. A run that ends early lets the device compute with undefined results of the host. Returns
// whether all programs ran. Throws Error if the device fails or was given up. An exception of is_cancelled
// or on_host ends the run early too, and run throws it again.
bool run(const std::vector<Program*>& programs, const std::function<bool()>& is_cancelled,
         const std::function<bool(int)>& on_host);

}  // namespace hotset::vulkan
