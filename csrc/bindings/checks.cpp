#include "bindings/bindings.h"

#include <cstdlib>

#include "plan.h"

namespace hotset::bindings {

const Kernels& chosen_kernels(const std::optional<std::string>& isa) {
    const char* forced = isa ? isa->c_str() : std::getenv("HOTSET_ISA");
    const char* error = nullptr;
    const Kernels* kernels = select_kernels(forced, &error);
    if (!kernels && forced && *forced)
        throw nb::value_error((std::string("HOTSET_ISA=") + forced + " cannot be used: " + error).c_str());
    if (!kernels) throw nb::value_error(error);
    return *kernels;
}

Matrix make_matrix(int type, const Bytes& data, int64_t rows, int64_t cols) {
    require(type >= 0 && type < kTypeCount, "tensor type " + std::to_string(type) + " has no kernel");
    return Facts::matrix({Type(type), {data.data(), data.size()}, {}, {}}, rows, cols);
}

}  // namespace hotset::bindings
