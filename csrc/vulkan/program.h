// Dispatches in order, recorded once and submitted as often as wanted.
#pragma once

#include <array>
#include <functional>

#include "vulkan/device.h"

namespace hotset::vulkan {

// A part of a buffer that a dispatch reads or, `written`, writes.
struct Binding {
    std::shared_ptr<Buffer> buffer;
    uint64_t offset = 0, size = 0;
    bool written = false;
};

// Records dispatches with the barriers that their bindings ask for. Each dispatch may read what those before
// it wrote; what reads and writes nothing in common runs at the same time.
class Program {
  public:
    explicit Program(std::shared_ptr<Device> device);
    ~Program() { free(); }
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    // groups: of workgroups, in three dimensions. Throws std::invalid_argument for bindings outside their
    // buffers, or what the device's limits do not allow.
    void dispatch(const std::shared_ptr<Kernel>& kernel, const std::vector<Binding>& bindings,
                  std::span<const uint8_t> push, const std::array<uint32_t, 3>& groups);
    // The same; the groups are three numbers at `offset` of a buffer that the host writes before each run.
    void dispatch_indirect(const std::shared_ptr<Kernel>& kernel, const std::vector<Binding>& bindings,
                           std::span<const uint8_t> push, const std::shared_ptr<Buffer>& counts,
                           uint64_t offset);
    // What follows is submitted apart: a run can be cancelled here, and no submission takes long. The host
    // sees what was written before.
    void cut();
    // The same; what follows also reads what the host computes of layer `layer` (run, below), from what was
    // written before the last cut. What is between that cut and this one runs at the same time.
    void cut_for_host(int layer);
    // Ends the recording.
    void finish();

  private:
    friend bool run(const std::vector<Program*>&, const std::function<bool()>&,
                    const std::function<bool(int)>&);
    struct Segment {  // one submission
        VkCommandBuffer commands;
        int host_layer;  // what the host computes before it; -1: nothing
    };
    struct Range {
        VkBuffer buffer;
        uint64_t begin, end;
        bool written;
    };
    VkDescriptorSet new_set(VkDescriptorSetLayout layout);
    void prepare(const std::shared_ptr<Kernel>& kernel, const std::vector<Binding>& bindings,
                 std::span<const uint8_t> push);
    void barrier();
    void begin(int host_layer);
    void end();
    void free();
    VkCommandBuffer commands() const { return segments_.back().commands; }

    std::shared_ptr<Device> device_;
    std::vector<Segment> segments_;
    std::vector<VkDescriptorPool> pools_;
    uint32_t sets_left_ = 0, buffers_left_ = 0;
    std::vector<Range> since_barrier_;
    std::vector<std::shared_ptr<Kernel>> kernels_;  // and buffers: what the recording names stays
    std::vector<std::shared_ptr<Buffer>> buffers_;
    bool finished_ = false;
};

// Runs programs of one device one after the other, and waits. is_cancelled: asked between; true ends the run
// after what was submitted. on_host: computes what cut_for_host asks for, while the device goes on; false
// ends the run; null where no program asks. Returns whether all ran. Throws Error where the device fails.
bool run(const std::vector<Program*>& programs, const std::function<bool()>& is_cancelled,
         const std::function<bool(int)>& on_host);

}  // namespace hotset::vulkan
