// The Vulkan loader, opened at run time: nothing links with it, and without one the rest of hotset works.
#pragma once

#define VK_NO_PROTOTYPES
#include <vulkan/vulkan_core.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace hotset::vulkan {

// A driver that is missing, refuses or fails; the sentence is for a person.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct OutOfMemory : Error {
    using Error::Error;
};

// A structure of Vulkan of a type, otherwise zero: so are enumerations that have no zero, which are set by
// who makes it.
template <class T>
T made(VkStructureType type) {
    T structure{};  // NOLINT(bugprone-invalid-enum-default-initialization)
    structure.sType = type;
    return structure;
}

// Makes the n-th call from now on of a function of Vulkan end with a result: of tests. n = 0: no call any
// more.
void fail_call(const std::string& name, int n, VkResult result);
// The result that a call of a function must end with, and has been counted for; else VK_SUCCESS.
VkResult injected_failure(const char* name);

// A function of Vulkan. One that is to fail (fail_call) is not called; a wait fails once it has waited, so
// that nothing is in use that is freed then.
template <class P>
class Function;
template <class R, class... A>
class Function<R(VKAPI_PTR*)(A...)> {
  public:
    void load(PFN_vkVoidFunction address, const char* name) {
        call_ = reinterpret_cast<R(VKAPI_PTR*)(A...)>(address);
        name_ = name;
    }
    R operator()(A... given) const {
        if constexpr (std::is_same_v<R, VkResult>) {
            const bool waits = !std::strcmp(name_, "vkWaitForFences");
            if (waits)
                if (const VkResult waited = call_(given...); waited != VK_SUCCESS) return waited;
            const VkResult failure = injected_failure(name_);
            if (waits || failure != VK_SUCCESS) return failure;
        }
        return call_(given...);
    }

  private:
    R(VKAPI_PTR* call_)(A...) = nullptr;
    const char* name_ = "";
};

// Throws OutOfMemory or Error unless the result is success; what: "allocating 3 MiB".
void check(VkResult result, const std::string& what);

#define HOTSET_VULKAN_INSTANCE_FUNCTIONS(F)     \
    F(vkDestroyInstance)                        \
    F(vkEnumeratePhysicalDevices)               \
    F(vkGetPhysicalDeviceProperties2)           \
    F(vkGetPhysicalDeviceFeatures2)             \
    F(vkGetPhysicalDeviceMemoryProperties2)     \
    F(vkGetPhysicalDeviceQueueFamilyProperties) \
    F(vkEnumerateDeviceExtensionProperties)     \
    F(vkCreateDevice)                           \
    F(vkGetDeviceProcAddr)

#define HOTSET_VULKAN_DEVICE_FUNCTIONS(F) \
    F(vkDestroyDevice)                    \
    F(vkGetDeviceQueue)                   \
    F(vkQueueSubmit)                      \
    F(vkDeviceWaitIdle)                   \
    F(vkAllocateMemory)                   \
    F(vkFreeMemory)                       \
    F(vkMapMemory)                        \
    F(vkCreateBuffer)                     \
    F(vkDestroyBuffer)                    \
    F(vkGetBufferMemoryRequirements)      \
    F(vkBindBufferMemory)                 \
    F(vkCreateFence)                      \
    F(vkDestroyFence)                     \
    F(vkResetFences)                      \
    F(vkWaitForFences)                    \
    F(vkCreateShaderModule)               \
    F(vkDestroyShaderModule)              \
    F(vkCreateDescriptorSetLayout)        \
    F(vkDestroyDescriptorSetLayout)       \
    F(vkCreatePipelineLayout)             \
    F(vkDestroyPipelineLayout)            \
    F(vkCreateComputePipelines)           \
    F(vkDestroyPipeline)                  \
    F(vkCreatePipelineCache)              \
    F(vkDestroyPipelineCache)             \
    F(vkGetPipelineCacheData)             \
    F(vkCreateDescriptorPool)             \
    F(vkDestroyDescriptorPool)            \
    F(vkAllocateDescriptorSets)           \
    F(vkUpdateDescriptorSets)             \
    F(vkCreateCommandPool)                \
    F(vkDestroyCommandPool)               \
    F(vkAllocateCommandBuffers)           \
    F(vkFreeCommandBuffers)               \
    F(vkBeginCommandBuffer)               \
    F(vkEndCommandBuffer)                 \
    F(vkCmdBindPipeline)                  \
    F(vkCmdBindDescriptorSets)            \
    F(vkCmdPushConstants)                 \
    F(vkCmdDispatch)                      \
    F(vkCmdDispatchIndirect)              \
    F(vkCmdPipelineBarrier)               \
    F(vkCmdCopyBuffer)                    \
    F(vkCmdFillBuffer)

#define HOTSET_VULKAN_MEMBER(name) Function<PFN_##name> name;  // NOLINT(bugprone-macro-parentheses): a member

struct InstanceFunctions {
    HOTSET_VULKAN_INSTANCE_FUNCTIONS(HOTSET_VULKAN_MEMBER)
};
struct DeviceFunctions {
    HOTSET_VULKAN_DEVICE_FUNCTIONS(HOTSET_VULKAN_MEMBER)
};

// What a device is, before it is opened. refusal: why it cannot be used; empty where it can. features: what
// it has beyond what is needed, for a person. subgroup: lanes of a subgroup.
struct DeviceInfo {
    int index = 0;
    std::string name, kind, driver, refusal;
    std::vector<std::string> features;
    uint32_t vendor = 0, device = 0, subgroup = 0;
    std::array<uint8_t, VK_UUID_SIZE> cache_uuid{};  // of the driver's compiler
    uint32_t api_version = 0;
    uint64_t memory = 0;  // bytes of its own heaps; of an integrated device those that it shares
    uint64_t free = 0;    // of these, as far as the driver reports it; else `memory`
    VkPhysicalDevice handle = VK_NULL_HANDLE;
    VkPhysicalDeviceLimits limits{};
    uint64_t max_allocation = 0;
    uint32_t queue_family = 0;
    bool is_subset = false;         // of Vulkan, as MoltenVK
    bool has_integer_dots = false;  // instructions for products of four bytes
    VkPhysicalDeviceMemoryProperties memories{};
};

// An instance of Vulkan, and the messages of its validation layer.
class Instance {
  public:
    // The one of this process; validate: with the validation layer and synchronisation validation, and then
    // every warning of them is an error of the call that caused it. Throws Error where there is no loader, no
    // driver, or no such layer.
    static std::shared_ptr<Instance> open(bool validate);
    ~Instance();
    Instance(const Instance&) = delete;
    Instance& operator=(const Instance&) = delete;

    std::vector<DeviceInfo> devices() const;
    // Throws Error with what the validation layer reported since the last call.
    void check_messages();
    // For calls that must not throw: what was reported is kept for `late_messages`.
    void set_messages_aside();
    // What was set aside since the last call: objects that their device outlived, above all.
    std::vector<std::string> late_messages();
    const InstanceFunctions& functions() const { return fn_; }

  private:
    Instance() = default;
    void start(bool validate);
    DeviceInfo describe(int index, VkPhysicalDevice handle) const;
    static VKAPI_ATTR VkBool32 VKAPI_CALL report(VkDebugUtilsMessageSeverityFlagBitsEXT,
                                                 VkDebugUtilsMessageTypeFlagsEXT,
                                                 const VkDebugUtilsMessengerCallbackDataEXT*, void*);

    VkInstance instance_ = VK_NULL_HANDLE;
    VkDebugUtilsMessengerEXT messenger_ = VK_NULL_HANDLE;
    PFN_vkGetInstanceProcAddr get_ = nullptr;
    InstanceFunctions fn_;
    std::mutex mutex_;
    std::vector<std::string> messages_, late_;
};

}  // namespace hotset::vulkan
