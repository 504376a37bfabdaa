// Compares every kernel of every instruction set of this machine with the scalar reference, bit for bit.
// Needs no Python, so that it also runs under emulators and sanitizers. Exit status 1 if there is a
// difference. With --selected it only prints which instruction set this processor gets.
//
// The reference's own results are hashed and compared with the hash below. This finds compilers and
// processors that round differently, for example by contracting a * b + c without -ffp-contract=off.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../kernels/kernels.h"

using namespace hotset;

namespace {

// The hash of every reference result that test_all compares, on all platforms. A new case or another order of
// accumulation changes it. Then store the hash that the test prints, once two architectures print the same.
constexpr uint64_t kReferenceHash = 0xa8547990a6bcd051;
// The hash of types that were added later, so that the one above does not change with each new type. Types
// with a larger id than the last of them are compared last, and have no hash.
constexpr Type kLaterTypes[] = {Type::MXFP4,   Type::TQ1_0,  Type::TQ2_0, Type::IQ1_S,   Type::IQ1_M,
                                Type::IQ2_XXS, Type::IQ2_XS, Type::IQ2_S, Type::IQ3_XXS, Type::IQ3_S};
constexpr int kLastHashed = int(std::ranges::max(kLaterTypes));
constexpr std::array<KvType, 2> kLaterCaches[] = {
    {KvType::Q4_0, KvType::Q4_0}, {KvType::Q8_0, KvType::Q4_0}, {KvType::Q4_0, KvType::F16}};
constexpr uint64_t kLaterHash = 0x6cdc7e717e0e8e73;

std::mt19937 random_engine;
int failures = 0;
uint64_t reference_hash;  // FNV-1a
uint64_t first_hash;      // reference_hash before the later types

// The input-major copy of a row-major matrix.
struct InputMajor {
    std::vector<uint8_t> data;
    ChannelMatrix view;

    InputMajor(Type type, const std::vector<uint8_t>& bytes, int64_t rows, int64_t cols) {
        const ChannelFormat format = channel_format(type);
        const int64_t row_bytes = int64_t(bytes.size()) / rows;
        data.resize(format.output_bytes(cols) * rows);
        view.type = type, view.data = data.data(), view.rows = cols, view.cols = rows;
        const int64_t tile_of = view.tile = rows > 1024 ? 1088 : 192;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t tile = r / tile_of * tile_of, c = r - tile, width = std::min(rows - tile, tile_of);
            uint8_t* out = &data[tile * format.output_bytes(cols)];
            for (int64_t b = 0; b < cols / 32; b++) {
                const uint8_t* row = &bytes[r * row_bytes];
                if (format.group_head && b % 8 == 0) {
                    const uint8_t* block = row + b / 8 * type_facts(type).block_bytes;
                    const uint8_t* heads = type == Type::Q6_K ? block + 208 : block;
                    for (int h = 0; h < format.group_head / 2; h++)
                        std::copy_n(heads + 2 * h, 2, out + 2 * (h * width + c));
                    out += width * format.group_head;
                }
                uint8_t head[4], codes[32];
                split(type, row, b, head, codes);
                const int head_size = format.group_head ? 1 : 2;
                for (int h = 0; h < format.block_head / head_size; h++)
                    std::copy_n(head + h * head_size, head_size, out + (h * width + c) * head_size);
                out += width * format.block_head;
                for (int i = 0; i < 32; i++) {
                    if (format.codes == 32) {
                        out[c] = codes[i];
                    } else {
                        out[c / 32 * 16 + c % 16] |= (codes[i] & 15) << c % 32 / 16 * 4;
                        const int bits = format.high_bits, fields = bits ? 8 / bits : 1, in = int(c % 32);
                        uint8_t* plane = out + width / 2;
                        if (bits)
                            plane[in / (4 * fields) * (width / 8) + c / 32 * 4 + in % 4] |=
                                codes[i] >> 4 << in % (4 * fields) / 4 * bits;
                    }
                    out += width * format.channel_bytes() / 32;
                }
            }
        }
    }

    // Split a block into its own scales and minimums, as stored, and its codes.
    static void split(Type type, const uint8_t* row, int64_t b, uint8_t* head, uint8_t* codes) {
        const int per_block = type_facts(type).block_size / 32, j = int(b % per_block);
        const uint8_t* p = row + b / per_block * type_facts(type).block_bytes;
        switch (type) {
            case Type::Q4_0:
            case Type::Q4_1:
            case Type::Q8_0: {
                const int n = type == Type::Q4_1 ? 4 : 2;
                std::copy_n(p, n, head);
                for (int i = 0; i < 32; i++)
                    codes[i] = type == Type::Q8_0 ? p[n + i] : (p[n + i % 16] >> i / 16 * 4) & 15;
                break;
            }
            case Type::Q4_K:
            case Type::Q5_K: {
                const uint8_t *s = p + 4, *low = p + (type == Type::Q4_K ? 16 : 48) + 32 * (j / 2);
                head[0] = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
                head[1] = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6) << 4;
                for (int i = 0; i < 32; i++)
                    codes[i] =
                        (low[i] >> 4 * (j % 2) & 15) | (type == Type::Q5_K ? (p[16 + i] >> j & 1) << 4 : 0);
                break;
            }
            default: {  // Q6_K
                const uint8_t *low = p + 64 * (j / 4) + 32 * (j % 2), *high = p + 128 + 32 * (j / 4);
                std::copy_n(p + 192 + 2 * j, 2, head);
                for (int i = 0; i < 32; i++)
                    codes[i] = (low[i] >> (j % 4 / 2 * 4) & 15) | (high[i] >> (2 * (j % 4)) & 3) << 4;
            }
        }
    }
};

// Approximately normal, and the same on all platforms, unlike std::normal_distribution.
float normal() {
    int total = 0;
    for (int i = 0; i < 6; i++) {
        const uint32_t bits = uint32_t(random_engine());
        total += int(bits & 0xffff) + int(bits >> 16);
    }
    return float(total - 6 * 0xffff) / 65536.0f;
}

std::vector<float> normals(int64_t n) {
    std::vector<float> v(n);
    for (float& x : v) x = normal();
    return v;
}

// Return the byte offsets of a block's f16 fields, which must hold finite numbers.
std::vector<int> half_fields(Type type) {
    switch (type) {
        case Type::Q4_1:
        case Type::Q5_1:
        case Type::Q4_K:
        case Type::Q5_K:
            return {0, 2};
        case Type::Q2_K:
            return {80, 82};
        case Type::Q3_K:
            return {108};
        case Type::Q6_K:
            return {208};
        case Type::TQ1_0:
            return {52};
        case Type::TQ2_0:
            return {64};
        case Type::MXFP4:
        case Type::IQ1_M:
            return {};
        default:
            return {0};
    }
}

std::vector<uint8_t> random_matrix(Type type, int64_t rows, int64_t cols) {
    const TypeFacts facts = type_facts(type);
    std::vector<uint8_t> bytes(rows * (cols / facts.block_size) * facts.block_bytes);
    if (is_float(type)) {
        for (size_t i = 0; i < bytes.size(); i += facts.block_bytes) {
            const float x = normal();
            const uint16_t half =
                type == Type::F16 ? f32_to_f16(x) : uint16_t(std::bit_cast<uint32_t>(x) >> 16);
            std::memcpy(&bytes[i], type == Type::F32 ? static_cast<const void*>(&x) : &half,
                        facts.block_bytes);
        }
        return bytes;
    }
    for (uint8_t& b : bytes) b = uint8_t(random_engine());
    for (size_t i = 0; i < bytes.size(); i += facts.block_bytes)
        for (int field : half_fields(type)) {
            const uint16_t half = f32_to_f16(normal() * 0.05f);
            std::memcpy(&bytes[i + field], &half, 2);
        }
    if (type == Type::IQ1_M)  // the f16 is in the high bits of four words: about 2^-7
        for (size_t i = 0; i < bytes.size(); i += facts.block_bytes)
            bytes[i + 55] = uint8_t((bytes[i + 55] & 0x8f) | 0x20);
    if (type == Type::MXFP4)  // exponents of typical weights, and some tiny ones
        for (size_t i = 0; i < bytes.size(); i += facts.block_bytes)
            if (bytes[i] > 9) bytes[i] = uint8_t(118 + bytes[i] % 8);
    return bytes;
}

// Convert the codes of whole tokens from one interleaving to another.
std::vector<int8_t> interleaved(const std::vector<int8_t>& q, int from, int to) {
    std::vector<int8_t> out(q.size());
    for (int64_t b = 0; b < int64_t(q.size()) / 32; b++)
        for (int half = 0; half < 2; half++)
            std::copy_n(&q[half_at(from, b, half)], 16, &out[half_at(to, b, half)]);
    return out;
}

struct QuantizedInputs {
    std::vector<float> x;
    std::vector<int8_t> q, others;  // in the order of the quantising kernels, and of other kernels
    std::vector<float> scale, sum;
    std::vector<int32_t> isum, isum8;
    Inputs view;  // for the quantising kernels

    // Return the inputs in the order of `kernels`.
    Inputs view_for(const Kernels& kernels) {
        others = interleaved(q, interleaved_, kernels.interleaved);
        Inputs inputs = view;
        inputs.q = others.data();
        if (kernels.pack_token) {
            tiles.reset(static_cast<uint8_t*>(std::aligned_alloc(64, tiles_bytes(view.n, view.k))));
            for (int t = 0; t < view.n; t++) kernels.pack_token(inputs, t, t, tiles.get());
            inputs.tiles = tiles.get();
        }
        return inputs;
    }

    QuantizedInputs(const Kernels& kernels, std::vector<float> values, int n, int64_t k)
        : x(std::move(values)), interleaved_(kernels.interleaved) {
        const int64_t width = padded(k);
        q.resize(n * width);
        scale.resize(n * width / 32);
        sum.resize(n * width / 32);
        isum.resize(n * width / 16);
        isum8.resize(n * width / 32);
        for (int t = 0; t < n; t++)
            kernels.quantize(&x[t * k], k,
                             {&q[t * width], &scale[t * width / 32], &sum[t * width / 32],
                              &isum[t * width / 16], &isum8[t * width / 32]});
        view = {n, k, x.data(), q.data(), scale.data(), sum.data(), isum.data(), isum8.data()};
    }

  private:
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    std::unique_ptr<uint8_t, Free> tiles;
    int interleaved_;
};

template <class T>
void add_to_hash(const std::vector<T>& reference) {
    for (size_t i = 0; i < reference.size() * sizeof(T); i++)
        reference_hash =
            (reference_hash ^ reinterpret_cast<const uint8_t*>(reference.data())[i]) * 0x100000001b3;
}

// portable: whether the reference's results `b` are the same on all platforms.
template <class T>
void expect_equal(const char* what, const char* isa, const char* detail, const std::vector<T>& a,
                  const std::vector<T>& b, bool portable = true) {
    if (portable) add_to_hash(b);
    if (a.size() == b.size() && (a.empty() || !std::memcmp(a.data(), b.data(), a.size() * sizeof(T)))) return;
    failures++;
    for (size_t i = 0; i < a.size(); i++)
        if (std::memcmp(&a[i], &b[i], sizeof(T))) {
            std::printf("FAIL %s %s %s: element %zu of %zu is %.9g, scalar gives %.9g\n", isa, what, detail,
                        i, a.size(), double(a[i]), double(b[i]));
            return;
        }
}

// Copy bytes to an allocation of exactly their size, so that sanitizers detect reads past the end.
std::unique_ptr<uint8_t[]> exact_copy(const std::vector<uint8_t>& bytes) {
    std::unique_ptr<uint8_t[]> copy(new uint8_t[bytes.size()]);
    std::memcpy(copy.get(), bytes.data(), bytes.size());
    return copy;
}

void test_linear(const Kernels& kernels, Type type, int64_t rows, int64_t cols, int n) {
    const Kernels& reference = *scalar_kernels();
    const std::vector<uint8_t> bytes = random_matrix(type, rows, cols);
    const auto exact = exact_copy(bytes);
    const Matrix w = {type, exact.get(), rows, cols, bytes.size() / size_t(rows)};
    QuantizedInputs x(reference, normals(n * cols), n, cols);
    const Inputs own = x.view_for(kernels);
    std::vector<float> expected(n * rows), got(n * rows, -1.0f);
    uint8_t* scratch =
        static_cast<uint8_t*>(std::aligned_alloc(64, (kernel_scratch_bytes(cols) + 63) / 64 * 64));
    reference.linear[int(type)](w, 0, rows, x.view, 0, n, expected.data(), rows, scratch);
    kernels.linear[int(type)](w, 0, rows, own, 0, n, got.data(), rows, scratch);
    char detail[64];
    std::snprintf(detail, sizeof detail, "%s %dx%d, %d tokens", type_facts(type).name, int(rows), int(cols),
                  n);
    expect_equal("linear", kernels.isa, detail, got, expected);
    if (rows > 3 && n > 1) {  // a part of the rows and of the tokens
        std::vector<float> part((n - 1) * (rows - 3)), want((n - 1) * (rows - 3));
        kernels.linear[int(type)](w, 2, rows - 1, own, 1, n, part.data(), rows - 3, scratch);
        for (int t = 1; t < n; t++)
            for (int64_t r = 2; r < rows - 1; r++)
                want[(t - 1) * (rows - 3) + r - 2] = expected[t * rows + r];
        expect_equal("linear part", kernels.isa, detail, part, want);
    }
    std::free(scratch);
}

// Test every number of tokens from `fewest` to `most`, at the beginning and at the end: kernels depend on it.
// Not part of the hash, and neither are the random numbers.
void test_token_counts(const Kernels& kernels, Type type, int64_t rows, int64_t cols, int fewest = 1,
                       int most = 35) {
    const std::mt19937 before = random_engine;
    const std::vector<uint8_t> bytes = random_matrix(type, rows, cols);
    const auto exact = exact_copy(bytes);
    const Matrix w = {type, exact.get(), rows, cols, bytes.size() / size_t(rows)};
    QuantizedInputs x(*scalar_kernels(), normals(most * cols), most, cols);
    const Inputs own = x.view_for(kernels);
    random_engine = before;
    uint8_t* scratch =
        static_cast<uint8_t*>(std::aligned_alloc(64, (kernel_scratch_bytes(cols) + 63) / 64 * 64));
    std::vector<float> all(most * rows);
    scalar_kernels()->linear[int(type)](w, 0, rows, x.view, 0, most, all.data(), rows, scratch);
    for (int n = fewest; n <= most; n++)
        for (const int t0 : {0, most - n}) {
            std::vector<float> got(n * rows, -1.0f);
            kernels.linear[int(type)](w, 0, rows, own, t0, t0 + n, got.data(), rows, scratch);
            char detail[64];
            std::snprintf(detail, sizeof detail, "%s %dx%d, tokens %d to %d", type_facts(type).name,
                          int(rows), int(cols), t0, t0 + n);
            expect_equal("linear", kernels.isa, detail, got,
                         {all.begin() + t0 * rows, all.begin() + (t0 + n) * rows}, false);
        }
    std::free(scratch);
}

void test_gather(const Kernels& kernels, Type type, int64_t rows, int64_t cols) {
    const std::vector<uint8_t> bytes = random_matrix(type, rows, cols);
    const auto exact = exact_copy(bytes);
    const Matrix w = {type, exact.get(), rows, cols, bytes.size() / size_t(rows)};
    QuantizedInputs x(*scalar_kernels(), normals(2 * cols), 2, cols);
    const Inputs own = x.view_for(kernels);
    char detail[64];
    std::snprintf(detail, sizeof detail, "%s %dx%d", type_facts(type).name, int(rows), int(cols));
    for (int step : {1, 3}) {
        std::vector<int32_t> wanted;
        for (int64_t r = step - 1; r < rows; r += step) wanted.push_back(int32_t(r));
        std::vector<const uint8_t*> at;
        at.reserve(wanted.size());
        for (int32_t r : wanted) at.push_back(w.row(r));
        at.insert(at.end(), kGatherAhead, nullptr);
        std::vector<float> got(wanted.size()), want(wanted.size());
        kernels.gather[int(type)](w, at.data(), int(wanted.size()), own, 1, got.data());
        for (size_t j = 0; j < wanted.size(); j++)
            scalar_kernels()->linear[int(type)](w, wanted[j], wanted[j] + 1, x.view, 1, 2, &want[j], 1,
                                                nullptr);
        expect_equal("gather", kernels.isa, detail, got, want);
    }
}

// Compare with the row kernels for any share of zeros. Not part of the hash, and neither are the random
// numbers, because the results equal hashed ones.
void test_channels(const Kernels& kernels, Type type, int64_t rows, int64_t cols) {
    const std::mt19937 before = random_engine;
    const std::vector<uint8_t> bytes = random_matrix(type, rows, cols);
    const InputMajor input_major(type, bytes, rows, cols);
    const auto exact = exact_copy(input_major.data);
    ChannelMatrix w = input_major.view;
    w.data = exact.get();
    const Matrix by_row = {type, bytes.data(), rows, cols, bytes.size() / size_t(rows)};
    for (const double kept : {0.0, 0.03, 0.5, 1.0})
        for (const float odd : {0.0f, NAN, INFINITY, -1e-44f}) {
            std::vector<float> values = normals(cols);
            for (float& v : values)
                if (double(random_engine() % 1000) >= 1000 * kept) v = 0.0f;
            if (kept == 0.5)
                for (int64_t i = 32; i < std::min<int64_t>(cols, 64); i++) values[i] = 0.0f;
            if (odd != 0.0f) values[cols / 2] = odd;
            const QuantizedInputs x(*scalar_kernels(), values, 1, cols);
            std::vector<uint8_t> memory(ActiveChannels::bytes(cols));
            const ActiveChannels active(memory.data(), x.view, scalar_kernels()->interleaved);
            std::vector<float> want(rows), got(rows, -1.0f), scratch(channel_scratch_floats(rows));
            auto product = [&](int64_t first, int64_t last, int turn, int n_turns, float* out) {
                kernels.channel_linear[int(type)](w, active, x.view, first, last - first, turn, n_turns,
                                                  scratch.data(), out);
            };
            scalar_kernels()->linear[int(type)](by_row, 0, rows, x.view, 0, 1, want.data(), rows, nullptr);
            const int64_t half = rows / 64 * 32;
            for (const auto& [first, last] : {std::pair(int64_t(0), half), std::pair(half, rows)})
                if (first < last) product(first, last, 0, 16, got.data() + first);
            // Like a fused matrix's part; lanes in one half, then a quarter and the other quarter.
            w.first_col = half;
            std::vector<float> part(rows - half), other(rows - half), last_quarter(rows - half);
            product(0, rows - half, 0, 8, part.data());
            product(0, rows - half, 8, 4, other.data());
            product(0, rows - half, 12, 4, last_quarter.data());
            for (size_t r = 0; r < part.size(); r++) part[r] += other[r] + last_quarter[r];
            w.first_col = 0;
            char detail[96];
            std::snprintf(detail, sizeof detail, "%s %dx%d, %g kept, %g", type_facts(type).name, int(rows),
                          int(cols), kept, double(odd));
            const bool nan = std::isnan(odd) || std::isinf(odd);
            for (std::vector<float>* v : {&got, &want, &part})
                for (float& f : *v)
                    if (nan && std::isnan(f)) f = NAN;  // any NaN equals any other
            expect_equal("channel_linear", kernels.isa, detail, got, want, false);
            want.erase(want.begin(), want.begin() + half);
            expect_equal("channel_linear of a part", kernels.isa, detail, part, want, false);
        }
    random_engine = before;
}

// Every third row, and a range of columns that begins at a block.
void test_axpy(const Kernels& kernels, Type type, int64_t rows, int64_t cols) {
    const Kernels& reference = *scalar_kernels();
    std::vector<uint8_t> bytes =
        is_planes(type) ? std::vector<uint8_t>(size_t(rows) * cols / 32 * type_facts(type).block_bytes)
                        : random_matrix(type, rows, cols);
    if (is_planes(type))
        for (uint8_t& b : bytes) b = uint8_t(random_engine());
    const auto exact = exact_copy(bytes);
    std::vector<uint16_t> scales(size_t((rows + kPlaneRows - 1) / kPlaneRows) * cols);
    for (uint16_t& s : scales) s = f32_to_f16(normal() * 0.05f);
    const Matrix w = {type, exact.get(), rows, cols, bytes.size() / size_t(rows), scales.data()};
    std::vector<int32_t> wanted;
    for (int64_t r = 0; r < rows; r += 3) wanted.push_back(int32_t(r));
    const std::vector<float> values = normals(wanted.size());
    char detail[64];
    std::snprintf(detail, sizeof detail, "%s %dx%d", type_facts(type).name, int(rows), int(cols));
    for (int64_t first : {int64_t(0), cols / 2 / 256 * 256}) {
        const int64_t n = cols - first;
        std::vector<float> want = normals(n), got = want;
        kernels.axpy[int(type)](w, wanted.data(), values.data(), int(wanted.size()), first, n, got.data());
        reference.axpy[int(type)](w, wanted.data(), values.data(), int(wanted.size()), first, n, want.data());
        expect_equal("axpy", kernels.isa, detail, got, want);
        kernels.decode[int(type)](w, rows - 1, first, n, got.data());
        reference.decode[int(type)](w, rows - 1, first, n, want.data());
        expect_equal("decode", kernels.isa, detail, got, want);
        if (type == Type::F32) {  // equal to the values of a tile
            std::vector<float> of_tile = want = normals(cols);
            const float* tile = reinterpret_cast<const float*>(w.data);
            kernels.tile_axpy(tile, wanted.data(), values.data(), int(wanted.size()), cols, of_tile.data());
            reference.axpy[int(type)](w, wanted.data(), values.data(), int(wanted.size()), 0, cols,
                                      want.data());
            expect_equal("tile_axpy", kernels.isa, detail, of_tile, want);
        }
        if (is_planes(type)) continue;
        std::vector<float> decoded(cols);
        dequantize_row(type, w.row(rows - 1), cols, decoded.data());
        for (float& v : got) v += 0.0f;  // the sign of a zero does not matter
        for (float& v : decoded) v += 0.0f;
        expect_equal("decoded row", kernels.isa, detail, got, {decoded.begin() + first, decoded.end()});
    }
}

// Heavy tails, zeros of both signs, groups of equal values.
void test_encode(const Kernels& kernels, Type type, int64_t n) {
    const Kernels& reference = *scalar_kernels();
    if (!reference.encode[int(type)]) return;
    const std::mt19937 before = random_engine;  // neither bytes nor random numbers are part of the hash
    std::vector<float> x = normals(n);
    random_engine = before;
    for (int64_t i = 0; i < n; i++) {
        if (i % 7 == 0) x[i] *= x[i] * 4;
        if (i / 32 % 5 == 1) x[i] = i % 3 ? 0.0f : -0.0f;
        if (i / 32 % 5 == 2) x[i] = 1.5f;
    }
    const TypeFacts facts = type_facts(type);
    std::vector<uint8_t> got(size_t(n / facts.block_size) * facts.block_bytes), want = got;
    std::vector<float> importance(x);
    for (int64_t i = 0; i < n; i++) importance[i] = i / 32 % 5 == 3 ? 0.0f : fabsf(x[n - 1 - i]);
    for (const float* w :
         {static_cast<const float*>(nullptr), static_cast<const float*>(importance.data())}) {
        if (!kernels.encode[int(type)](x.data(), w, n, got.data()) ||
            !reference.encode[int(type)](x.data(), w, n, want.data()))
            failures++;
        expect_equal("encode", kernels.isa, facts.name, got, want, false);
    }
    x[n / 2] = NAN;
    if (type != Type::F32 && type != Type::BF16 &&
        kernels.encode[int(type)](x.data(), nullptr, n, got.data())) {
        std::printf("FAIL encode %s %s: accepts a NaN\n", kernels.isa, facts.name);
        failures++;
    }
}

void test_bits(const Kernels& kernels, int64_t n) {
    const Kernels& reference = *scalar_kernels();
    std::vector<float> x = normals(n);
    for (int64_t i = 0; i < n; i += 5) x[i] = i % 2 ? 0.0f : -0.0f;
    const std::string detail = "n = " + std::to_string(n);
    std::vector<uint64_t> got((n + 63) / 64), want((n + 63) / 64);
    kernels.nonzero_bits(x.data(), n, got.data());
    reference.nonzero_bits(x.data(), n, want.data());
    expect_equal("nonzero_bits", kernels.isa, detail.c_str(), got, want);
    x[0] = NAN;
    kernels.not_below_bits(x.data(), 0.3f, n, got.data());
    reference.not_below_bits(x.data(), 0.3f, n, want.data());
    expect_equal("not_below_bits", kernels.isa, detail.c_str(), got, want);
}

// A kernel that reads past a row into the next must not add that row's infinite scales.
void test_next_row(const Kernels& kernels, Type type) {
    const TypeFacts facts = type_facts(type);
    const int64_t cols = facts.block_size <= 32 ? 96 : 256;
    std::vector<uint8_t> bytes = random_matrix(type, 8, cols);
    const size_t row_bytes = bytes.size() / 8;
    for (size_t i = row_bytes; i < bytes.size(); i += facts.block_bytes)
        for (int field : half_fields(type)) bytes[i + field] = 0x00, bytes[i + field + 1] = 0x7c;
    if (type == Type::IQ1_M)
        for (size_t i = row_bytes; i < bytes.size(); i += facts.block_bytes)
            for (int j : {49, 51, 53, 55})
                bytes[i + j] = uint8_t((bytes[i + j] & 15) | (j == 55 ? 0x70 : j == 53 ? 0xc0 : 0));
    const Matrix w = {type, bytes.data(), 8, cols, row_bytes};
    uint8_t* scratch =
        static_cast<uint8_t*>(std::aligned_alloc(64, (kernel_scratch_bytes(cols) + 63) / 64 * 64));
    std::mt19937 after;
    for (const int tokens : {2, kFewTokens + 1}) {
        QuantizedInputs x(*scalar_kernels(), normals(tokens * cols), tokens, cols);
        const Inputs own = x.view_for(kernels);
        if (tokens == 2) after = random_engine;
        for (int n = tokens > 2 ? tokens : 1; n <= tokens; n++) {
            std::vector<float> expected(n), got(n);
            scalar_kernels()->linear[int(type)](w, 0, 1, x.view, 0, n, expected.data(), 1, scratch);
            kernels.linear[int(type)](w, 0, 1, own, 0, n, got.data(), 1, scratch);
            expect_equal("next row", kernels.isa, facts.name, got, expected, tokens == 2);
        }
    }
    random_engine = after;  // results for many tokens are not part of the hash
    std::free(scratch);
}

void test_quantize(const Kernels& kernels, int64_t k) {
    std::vector<float> values = normals(k);
    for (int64_t i = 0; i < k && i < 32; i++) values[i] = 0.0f;  // a block of zeros
    const QuantizedInputs got(kernels, values, 1, k), want(*scalar_kernels(), values, 1, k);
    const std::string detail = "k = " + std::to_string(k);
    expect_equal("quantize q", kernels.isa, detail.c_str(),
                 interleaved(got.q, kernels.interleaved, scalar_kernels()->interleaved), want.q);
    expect_equal("quantize scale", kernels.isa, detail.c_str(), got.scale, want.scale);
    expect_equal("quantize sum", kernels.isa, detail.c_str(), got.sum, want.sum);
    expect_equal("quantize isum", kernels.isa, detail.c_str(), got.isum, want.isum);
    for (size_t b = 0; b < got.isum8.size(); b++) {
        if (got.isum8[b] == 8 * (got.isum[b] + got.isum[got.isum8.size() + b])) continue;
        std::printf("FAIL quantize isum8 (%s): block %zu of %s\n", kernels.isa, b, detail.c_str());
        failures++;
    }
}

// A block with a value that is not finite, or with values so small that their scale has no inverse. Other
// blocks must not change, and no conversion to an integer may overflow. Not part of the hash, and neither are
// the random numbers.
void test_extremes(const Kernels& kernels, Type type) {
    constexpr int64_t kRows = 5, kCols = 768;
    const std::mt19937 before = random_engine;
    const std::vector<uint8_t> bytes = random_matrix(type, kRows, kCols);
    const Matrix w = {type, bytes.data(), kRows, kCols, bytes.size() / size_t(kRows)};
    std::vector<uint8_t> scratch_memory(kernel_scratch_bytes(kCols) + 64);
    uint8_t* scratch = scratch_memory.data() + (64 - reinterpret_cast<uintptr_t>(scratch_memory.data()) % 64);
    constexpr float kTiny = 1e-38f, kHuge = 3e38f;
    for (const float extreme : {NAN, -NAN, INFINITY, -INFINITY, kTiny, -1e-44f, kHuge})
        for (const int n : {1, 2, 7, kFewTokens + 2}) {
            const int odd = n / 2;  // the token with the extreme value
            std::vector<float> values = normals(n * kCols), plain = values;
            for (int64_t i = 0; i < 32; i++) {
                float& value = values[odd * kCols + 64 + i];
                if (std::fabs(extreme) <= kTiny) value *= extreme;
                if (i == 21) value = extreme;
                plain[odd * kCols + 64 + i] = 0.0f;
            }
            const QuantizedInputs x(kernels, values, n, kCols), zeros(kernels, plain, n, kCols);
            std::vector<float> got(n * kRows), want(n * kRows);
            kernels.linear[int(type)](w, 0, kRows, x.view, 0, n, got.data(), kRows, scratch);
            kernels.linear[int(type)](w, 0, kRows, zeros.view, 0, n, want.data(), kRows, scratch);
            for (int i = 0; i < n * kRows; i++) {
                bool right = got[i] == want[i];
                if (i / kRows == odd && std::fabs(extreme) <= kTiny)
                    right = std::fabs(got[i] - want[i]) <= 1e-30f;
                else if (i / kRows == odd && extreme == kHuge)
                    continue;
                else if (i / kRows == odd)
                    right = !std::isfinite(got[i]);
                if (right) continue;
                failures++;
                std::printf("FAIL %s %s: with %g in token %d of %d, row %d of token %d is %g, without %g\n",
                            kernels.isa, type_facts(type).name, double(extreme), odd, n, int(i % kRows),
                            int(i / kRows), double(got[i]), double(want[i]));
            }
        }
    random_engine = before;
}

void test_rows(const Kernels& kernels, int64_t n) {
    const Kernels& reference = *scalar_kernels();
    const std::vector<float> a = normals(n), b = normals(n), c = normals(n);
    const std::string detail = "n = " + std::to_string(n);
    auto compare = [&](const char* what, auto call) {
        std::vector<float> got(n), want(n);
        call(kernels, got.data());
        call(reference, want.data());
        expect_equal(what, kernels.isa, detail.c_str(), got, want);
    };
    compare("rms_norm", [&](const Kernels& k, float* out) { k.rms_norm(a.data(), b.data(), 1e-5f, n, out); });
    compare("layer_norm",
            [&](const Kernels& k, float* out) { k.layer_norm(a.data(), b.data(), c.data(), 1e-5f, n, out); });
    compare("gaussian_top_k",
            [&](const Kernels& k, float* out) { k.gaussian_top_k(a.data(), 1.3f, n, out); });
    compare("softmax", [&](const Kernels& k, float* out) { k.softmax(a.data(), n, out); });
    const float highest = *std::max_element(a.begin(), a.end());
    std::vector<float> far(a);  // reaches denormals, and values that round to zero
    for (float& value : far) value = (value - highest) * 20.0f;
    compare("exponentials", [&](const Kernels& k, float* out) { k.exponentials(far.data(), 0.0f, n, out); });
    compare("weights", [&](const Kernels& k, float* out) {
        const std::vector<double> x(far.begin(), far.end());
        std::vector<double> found(x.size());
        k.weights(x.data(), 0.7, n, found.data());
        for (size_t i = 0; i < found.size(); i++) {
            const double exact = std::exp(x[i] / 0.7);
            out[i] = std::abs(found[i] - exact) <= 1e-15 * exact ? float(found[i]) : NAN;
        }
    });
    compare("add", [&](const Kernels& k, float* out) { k.add(a.data(), b.data(), n, out); });
    compare("multiply", [&](const Kernels& k, float* out) { k.multiply(a.data(), b.data(), n, out); });
    for (int i = 0; i <= int(Activation::Clamp); i++) {
        const Activation kind = Activation(i);
        if (kind == Activation::Exp || kind == Activation::Softplus) continue;  // tested below
        compare("activate", [&](const Kernels& k, float* out) { k.activate(kind, 0.3f, a.data(), n, out); });
        compare("gated",
                [&](const Kernels& k, float* out) { k.gated(kind, 0.3f, a.data(), b.data(), n, out); });
    }
}

void test_xielu(const Kernels& kernels, int64_t n) {
    const Xielu f = {0.8f, 1.3f, 0.5f, -1e-6f};
    const std::vector<float> x = normals(n);
    std::vector<float> got(n), want(n);
    kernels.xielu(f, x.data(), n, got.data());
    scalar_kernels()->xielu(f, x.data(), n, want.data());
    expect_equal("xielu", kernels.isa, ("n = " + std::to_string(n)).c_str(), got, want, true);
}

// Two tokens of each operation with a state: compare the outputs and the final state.
void test_states(const Kernels& kernels, int dim_k, int dim_v) {
    const std::vector<float> keys = normals(5 * dim_k), values = normals(3 * dim_v);
    const std::vector<float> rate = normals(dim_k * dim_v), before = normals(dim_k * dim_v);
    const float *k = keys.data(), *v = values.data();
    const std::string detail = std::to_string(dim_k) + " x " + std::to_string(dim_v);
    auto compare = [&](const char* what, auto token) {
        auto results = [&](const Kernels& table) {
            std::vector<float> state = before, out(dim_v);
            for (int t = 0; t < 2; t++) token(table, state.data(), out.data());
            state.insert(state.end(), out.begin(), out.end());
            return state;
        };
        expect_equal(what, kernels.isa, detail.c_str(), results(kernels), results(*scalar_kernels()), true);
    };
    compare("delta_rule", [&](const Kernels& table, float* state, float* out) {
        table.delta_rule(dim_k, dim_v, k, k + dim_k, v, 0.75f, 0.3f, state, out);
    });
    compare("selective_scan", [&](const Kernels& table, float* state, float* out) {
        table.selective_scan(dim_k, dim_v, k, k + dim_k, v, 0.75f, state, out);
    });
    compare("channel_scan", [&](const Kernels& table, float* state, float* out) {
        table.channel_scan(dim_k, dim_v, k, k + dim_k, v, v + dim_v, rate.data(), state, out);
    });
    compare("wkv", [&](const Kernels& table, float* state, float* out) {
        table.wkv(dim_k, dim_v, k, k + dim_k, k + 2 * dim_k, v, nullptr, nullptr, state, out);
    });
    compare("wkv with a correction", [&](const Kernels& table, float* state, float* out) {
        table.wkv(dim_k, dim_v, k, k + dim_k, k + 2 * dim_k, v, k + 3 * dim_k, k + 4 * dim_k, state, out);
    });
    for (const Activation kind : {Activation::Exp, Activation::Softplus}) {
        std::vector<float> got(dim_v), want(dim_v);
        kernels.activate(kind, 0.0f, v, dim_v, got.data());
        scalar_kernels()->activate(kind, 0.0f, v, dim_v, want.data());
        expect_equal("activate", kernels.isa, detail.c_str(), got, want, kind == Activation::Exp);
    }
}

void test_attention(const Kernels& kernels, std::array<KvType, 2> types, int head_dim, int n_rows, int last,
                    int window, float softcap, const float* slopes = nullptr, bool around = false,
                    int bias_pairs = -1) {
    const int heads = 2, kv_blocks = (last + kKvBlockSize - 1) / kKvBlockSize;
    KvLayer kv = {types[0], types[1], heads, head_dim, head_dim, nullptr, nullptr, nullptr, nullptr};
    struct Cache {
        std::vector<uint8_t> k, v;
        std::vector<uint16_t> ks, vs;
    } caches[2];
    std::vector<int32_t> table(kv_blocks);
    for (int i = 0; i < kv_blocks; i++) table[i] = kv_blocks - 1 - i;
    const std::vector<float> keys = normals(last * heads * head_dim),
                             values = normals(last * heads * head_dim);
    const std::vector<float> q = normals(n_rows * head_dim);
    const int n_pairs = std::max(bias_pairs, 0), bias_floats = 1 + 2 * n_pairs;
    std::vector<float> slots, starts, of_rows;
    std::vector<const float*> bias_rows;
    if (bias_pairs >= 0) {
        slots = normals(2 * n_pairs * kKvBlockSize), starts = normals(2 * n_pairs * kv_blocks);
        of_rows = normals(n_rows * bias_floats);
        for (int r = 0; r < n_rows; r++) bias_rows.push_back(&of_rows[r * bias_floats]);
    }
    const BiasScores bias = {n_pairs, slots.data(), starts.data(),
                             bias_pairs < 0 ? nullptr : bias_rows.data()};
    std::vector<float> out[2];
    std::vector<float> states[2];
    const Kernels* tables[2] = {&kernels, scalar_kernels()};
    for (int side = 0; side < 2; side++) {
        Cache& cache = caches[side];
        cache.k.resize(kv_blocks * kv.k_block_bytes());
        cache.v.resize(kv_blocks * kv.v_block_bytes());
        cache.ks.resize(kv_blocks * heads * (head_dim / 32 + 1) * kKvBlockSize);
        cache.vs.resize(kv_blocks * heads * (head_dim / 32 + 1) * kKvBlockSize);
        kv.k = cache.k.data(), kv.v = cache.v.data(), kv.k_scale = cache.ks.data(),
        kv.v_scale = cache.vs.data();
        for (int pos = 0; pos < last; pos++)
            for (int h = 0; h < heads; h++) {
                tables[side]->store_key(kv, table[pos / kKvBlockSize], pos % kKvBlockSize, h,
                                        &keys[(pos * heads + h) * head_dim]);
                tables[side]->store_value(kv, table[pos / kKvBlockSize], pos % kKvBlockSize, h,
                                          &values[(pos * heads + h) * head_dim]);
            }
        std::vector<const float*> rows(n_rows);
        std::vector<int32_t> first(n_rows), end(n_rows), at(n_rows);
        for (int r = 0; r < n_rows; r++) {
            rows[r] = &q[r * head_dim];
            end[r] = last - n_rows + 1 + r;
            first[r] = window && end[r] > window ? end[r] - window : 0;
            at[r] = around ? end[r] / 2 : end[r] - 1;
        }
        std::vector<AttentionState> state(n_rows);
        out[side].resize(n_rows * kv.value_stride());
        tables[side]->attention(kv, 1, table.data(), 0, last, n_rows, softcap, slopes, bias, rows.data(),
                                first.data(), end.data(), at.data(), state.data(), out[side].data(), false);
        for (const AttentionState& s : state) states[side].insert(states[side].end(), {s.max, s.sum});
        std::vector<float> merged(head_dim);
        tables[side]->merge_attention(n_rows, state.data(), out[side].data(), kv.value_stride(), head_dim,
                                      merged.data());
        out[side].insert(out[side].end(), merged.begin(), merged.end());
    }
    char detail[96];
    std::snprintf(detail, sizeof detail, "kv types %d %d, head_dim %d, %d rows, %d positions", int(types[0]),
                  int(types[1]), head_dim, n_rows, last);
    expect_equal("keys", kernels.isa, detail, caches[0].k, caches[1].k);
    expect_equal("values", kernels.isa, detail, caches[0].v, caches[1].v);
    expect_equal("attention", kernels.isa, detail, out[0], out[1]);
    expect_equal("attention state", kernels.isa, detail, states[0], states[1]);
}

// Compare with the explicit matrix, and check that the transform is its own inverse.
void test_hadamard(const Kernels& kernels, int width) {
    const int n = 3 * width;
    const std::vector<float> x = normals(n);
    std::vector<float> got = x, want = x;
    kernels.hadamard(n, width, got.data());
    scalar_kernels()->hadamard(n, width, want.data());
    const std::string detail = std::to_string(width);
    expect_equal("hadamard", kernels.isa, detail.c_str(), got, want);
    for (int i = 0; i < n; i++) {
        double sum = 0, magnitude = 0;
        for (int j = 0; j < width; j++) {
            const double term = x[i / width * width + j] / std::sqrt(double(width));
            sum += std::popcount(unsigned(i % width & j)) % 2 ? -term : term;
            magnitude += std::abs(term);
        }
        if (!(std::abs(got[i] - sum) <= 12 * 6e-8 * magnitude)) {  // at most ten additions, root, quotient
            std::printf("FAIL %s hadamard %d: %g, not %g\n", kernels.isa, width, got[i], sum);
            failures++;
        }
    }
}

void test_type(const Kernels& kernels, Type type) {
    const TypeFacts facts = type_facts(type);
    if (is_planes(type)) {
        for (int64_t cols : {32, 576, 1120})
            for (int64_t rows : {1, 5, 70}) test_axpy(kernels, type, rows, cols);
        return;
    }
    if (!kernels.linear[int(type)]) {
        std::printf("FAIL %s has no kernel for %s\n", kernels.isa, facts.name);
        failures++;
        return;
    }
    std::vector<int64_t> widths = {1, 15, 16, 24, 100, 576};
    if (facts.block_size == 32) widths = {32, 96, 160, 512, 576, 1536, 1120};
    if (facts.block_size > 32) widths = {256, 512, 768, 2304};
    if (facts.block_size == 128) widths.insert(widths.end(), {128, 384, 640});
    std::vector<float> decoded(768);
    dequantize_row(type, random_matrix(type, 1, 768).data(), 768, decoded.data());
    add_to_hash(decoded);
    for (int64_t cols : widths)
        for (int64_t rows : {1, 5, 19, 70})
            for (int n : {1, 2, 3, 7, 13}) test_linear(kernels, type, rows, cols, n);
    for (int64_t cols : widths)
        for (int64_t rows : {1, 2, 23}) test_token_counts(kernels, type, rows, cols);
    if (!is_float(type)) {
        test_token_counts(kernels, type, 70, 16384, 3, 3);  // rows that fill a cache
        test_token_counts(kernels, type, 17, 16384, 33, 33);
        for (int n : {48, 65, 127, 300}) test_token_counts(kernels, type, n == 65 ? 70 : 37, 768, n, n);
    }
    for (int64_t cols : widths)
        for (int64_t rows : {1, 5, 19}) {
            test_gather(kernels, type, rows, cols);
            test_axpy(kernels, type, rows, cols);
        }
    if (!is_float(type)) test_next_row(kernels, type);
    for (int64_t cols : widths) test_encode(kernels, type, cols);
    if (kernels.channel_linear[int(type)])
        for (int64_t cols : widths)
            for (int64_t rows : {32, 96, 288, 544}) test_channels(kernels, type, rows, cols);
    if (kernels.channel_linear[int(type)])
        test_channels(kernels, type, 2240, type_facts(type).block_size == 256 ? 768 : 576);  // wide tiles
    test_extremes(kernels, type);
}

void test_all(const Kernels& kernels) {
    random_engine.seed(1);
    reference_hash = 0xcbf29ce484222325;
    for (int type = 0; type <= kLastHashed; type++)
        if (type_facts(Type(type)).block_bytes && std::ranges::count(kLaterTypes, Type(type)) == 0)
            test_type(kernels, Type(type));
    for (int64_t k : {32, 96, 128, 512, 576, 1120}) test_quantize(kernels, k);
    for (int64_t n : {1, 7, 16, 33, 576}) {
        test_rows(kernels, n);
        test_bits(kernels, n);
    }
    for (KvType type : {KvType::F32, KvType::F16, KvType::Q8_0})
        for (int head_dim : {24, 32, 64, 96, 128}) {
            if (type == KvType::Q8_0 && head_dim % 32) continue;
            for (int rows : {1, 3, 6, 11})
                for (int last : {11, 64, 65, 200})
                    test_attention(kernels, {type, type}, head_dim, rows, last, rows == 3 ? 20 : 0,
                                   rows == 6 ? 3.0f : 0.0f);
        }
    first_hash = reference_hash;
    for (const Type type : kLaterTypes) test_type(kernels, type);
    const float slopes[4] = {0.25f, 0.0625f, 0.7071f, 0.0039f};
    for (int rows : {1, 3, 4})
        for (int last : {11, 65, 200})
            test_attention(kernels, {KvType::F32, KvType::F32}, 32, rows, last, 0, 0.0f, slopes);
    for (int last : {11, 65, 200})
        test_attention(kernels, {KvType::F32, KvType::F32}, 32, 3, last, 0, 0.0f, slopes, true);
    for (int64_t n : {1, 16, 33}) test_xielu(kernels, n);
    for (int dim_v : {5, 16, 64, 87})
        for (int dim_k : {1, 20}) test_states(kernels, dim_k, dim_v);
    for (const std::array<KvType, 2>& types : kLaterCaches)
        for (int head_dim : {32, 64, 96, 128})
            for (int rows : {1, 3, 6, 11})
                for (int last : {11, 64, 65, 200})
                    test_attention(kernels, types, head_dim, rows, last, rows == 3 ? 20 : 0,
                                   rows == 6 ? 3.0f : 0.0f);
    for (int width : {16, 32, 64, 128, 512}) test_hadamard(kernels, width);
    for (int pairs : {0, 1, 7, 16, 33})
        for (int rows : {1, 4, 11})
            test_attention(kernels, {KvType::Q4_0, KvType::Q4_0}, 64, rows, 200, 0, rows == 4 ? 3.0f : 0.0f,
                           nullptr, false, pairs);
}

// Attention for each number of query rows up to a few passes, over KV blocks that windows partly exclude. Not
// part of the reference's hash.
void test_row_tiles(const Kernels& kernels) {
    for (const KvType type : {KvType::F32, KvType::F16, KvType::Q8_0, KvType::Q4_0})
        for (int head_dim : {32, 96})
            for (int rows = 1; rows <= 24; rows++)
                for (int window : {0, 70})
                    test_attention(kernels, {type, type}, head_dim, rows, 200, window, 0.0f);
}

// Scores of an indexer, of some keys of a KV block. Not part of the reference's hash.
void test_index_scores(const Kernels& kernels) {
    for (const KvType type : {KvType::F32, KvType::F16, KvType::Q8_0, KvType::Q4_0})
        for (int head_dim : {32, 128})
            for (int n_head : {1, 5, 6, 13, 64}) {
                KvLayer kv = {type, type, 1, head_dim, 0, nullptr, nullptr, nullptr, nullptr};
                std::vector<uint8_t> codes(2 * kv.k_block_bytes());
                std::vector<uint16_t> scales(2 * head_dim / 32 * kKvBlockSize);
                kv.k = codes.data(), kv.k_scale = scales.data();
                const std::vector<float> values = normals(kKvBlockSize * head_dim),
                                         q = normals(n_head * head_dim), weights = normals(n_head);
                for (int slot = 0; slot < kKvBlockSize; slot++)
                    scalar_kernels()->store_key(kv, 1, slot, 0, &values[slot * head_dim]);
                const IndexKeys keys = {type, head_dim, kKvBlockSize, kv.k, kv.k_scale};
                for (int n : {1, 16, 50, 64}) {
                    std::vector<float> got(n), want(n);
                    kernels.index_scores(keys, 1, n, n_head, q.data(), weights.data(), got.data());
                    scalar_kernels()->index_scores(keys, 1, n, n_head, q.data(), weights.data(), want.data());
                    char detail[96];
                    std::snprintf(detail, sizeof detail, "kv type %d, head_dim %d, %d heads, %d keys",
                                  int(type), head_dim, n_head, n);
                    expect_equal("index scores", kernels.isa, detail, got, want);
                }
            }
}

void test_newer_types(const Kernels& kernels) {
    for (int type = kLastHashed + 1; type < kTypeCount; type++)
        if (type_facts(Type(type)).block_bytes) test_type(kernels, Type(type));
}

}  // namespace

int main(int argc, char** argv) {
    const Kernels* tables[7] = {scalar_kernels()};
    int n_tables = 1;
    const char* reason = nullptr;
    const Kernels* selected = select_kernels(nullptr, &reason);
    if (!selected) {
        std::printf("FAIL %s\n", reason);
        return 1;
    }
    if (argc > 1 && std::string(argv[1]) == "--selected") {
        std::printf("%s: selected\n", selected->isa);
        return 0;
    }
    for (const char* isa : {"avx2", "avxvnni", "avx512", "amx", "neon", "i8mm"}) {
        const char* error = nullptr;
        if (const Kernels* kernels = select_kernels(isa, &error)) tables[n_tables++] = kernels;
    }
    if (n_tables > 1)
        for (int type = 0; type < kTypeCount; type++)
            if (scalar_kernels()->linear[type]) test_extremes(*scalar_kernels(), Type(type));
    for (int i = n_tables > 1; i < n_tables; i++) {  // the reference with itself only if it is the only one
        test_row_tiles(*tables[i]);
        test_index_scores(*tables[i]);
        test_newer_types(*tables[i]);
        test_all(*tables[i]);
        std::printf("%s: compared with the scalar reference, %d failures so far\n", tables[i]->isa, failures);
    }
    std::printf("reference hash: %016llx %016llx\n", static_cast<unsigned long long>(first_hash),
                static_cast<unsigned long long>(reference_hash));
    if (first_hash != kReferenceHash || reference_hash != kLaterHash) {
        std::printf("FAIL scalar: the hash should be %016llx %016llx\n",
                    static_cast<unsigned long long>(kReferenceHash),
                    static_cast<unsigned long long>(kLaterHash));
        failures++;
    }
    return failures ? 1 : 0;
}
