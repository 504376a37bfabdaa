// How operations read the types of a KV cache, and its scales.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "../facts.h"

namespace hotset {

constexpr std::pair<std::string_view, KvType> kKvTypes[] = {
    {"f32", KvType::F32}, {"f16", KvType::F16}, {"q8_0", KvType::Q8_0}, {"q4_0", KvType::Q4_0}};

// "f16": keys and values; "q8_0/q4_0": keys, then values.
inline std::array<KvType, 2> kv_types(const std::string& text) {
    const size_t slash = text.find('/');
    const std::string names[2] = {text.substr(0, slash),
                                  slash == std::string::npos ? text : text.substr(slash + 1)};
    std::array<KvType, 2> types;
    for (int i = 0; i < 2; i++) {
        const auto known = std::ranges::find(kKvTypes, names[i], [](const auto& pair) { return pair.first; });
        require(known != std::end(kKvTypes), "a cache is F32, F16, Q8_0 or Q4_0");
        types[i] = known->second;
    }
    return types;
}

inline uint16_t* scales_of(Facts& facts, const std::string& name, KvType type, int dim, size_t places) {
    if (bits_of(type) > 8) return nullptr;
    require(dim % 32 == 0, "a Q8_0 or Q4_0 cache needs heads of whole 32-blocks");
    const std::span<uint8_t> scales = facts.writable_bytes(name.c_str());
    require(scales.size() == places * (dim / 32) * sizeof(uint16_t), "a Q8_0 or Q4_0 cache has scales");
    return reinterpret_cast<uint16_t*>(scales.data());
}

}  // namespace hotset
