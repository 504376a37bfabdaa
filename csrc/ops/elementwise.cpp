// Operations on single rows: embedding, selection, norms, activations, sums and products. Each is described
// by the class of the same name in model/operations.py.
#include <algorithm>
#include <cmath>

#include "../facts.h"
#include "row_op.h"

namespace hotset {

// Every operation that reads rows of images reads rows of one width.
static void read_image_rows(Plan& plan, int64_t width) {
    int64_t& known = plan.limits().image_width;
    require(known == 0 || known == width, "the rows of images have one width");
    known = width;
}

static const Registered kEmbed("embed", [](Facts& facts) -> std::unique_ptr<Op> {
    const int out = facts.buffer("out");
    const Matrix weight = facts.matrix("weight", -1, facts.width(out));
    const std::string of = facts.text("of");
    const bool positions = of == "position";
    const int first_row = facts.integer("first_row", 0, weight.rows - 1);
    require(!positions || !weight.places, "position embeddings must be in memory");
    require(positions || first_row == 0, "first_row applies only to position embeddings");
    const int image_parts = facts.has("image_parts") ? facts.integer("image_parts", 0, INT32_MAX) : 0;
    require(!image_parts || of == "token", "rows of images replace only embeddings of tokens");
    if (of == "type") {
        require(!weight.places, "token type embeddings must be in memory");
        return make_row_op(facts.plan(), out, [=](const StepTokens&, int, float* result) {
            dequantize_row(weight.type, weight.row(0), weight.cols, result);
        });
    }
    Plan::Limits& limits = facts.plan().limits();
    int64_t& limit = positions ? limits.n_positions : limits.n_vocab;
    limit = limit ? std::min(limit, weight.rows - first_row) : weight.rows - first_row;
    const int64_t image_width = weight.cols * image_parts;
    if (image_parts) read_image_rows(facts.plan(), image_width);
    return make_row_op(facts.plan(), out, [=](const StepTokens& step, int r, float* result) {
        if (image_parts && !step.image_row_of.empty() && step.image_row_of[r] >= 0) {
            std::copy_n(&step.image_rows[step.image_row_of[r] * image_width], weight.cols, result);
            return;
        }
        const int row = positions ? step.positions[r] + first_row : step.tokens[r];
        dequantize_row(weight.type, weight.row(row), weight.cols, result);
    });
});

static const Registered kMixRows("mix_rows", [](Facts& facts) -> std::unique_ptr<Op> {
    const int at = facts.buffer("at"), out = facts.buffer("out");
    facts.same_rows(at, out);
    require(facts.width(at) % 2 == 0, "each row has a number and a share");
    const Matrix weight = facts.matrix("weight", -1, facts.width(out));
    require(!weight.places, "mixed rows must be in memory");
    const Buffer& in = facts.plan().buffer(at);
    return make_row_op(facts.plan(), out, [=, &in](const StepTokens&, int r, float* result) {
        constexpr int64_t kColumns = 256;  // a multiple of every block
        const TypeFacts type = type_facts(weight.type);
        const int64_t n = in.width / 2;
        const float* numbers = in.row(r);
        std::fill_n(result, weight.cols, 0.0f);
        for (int64_t i = 0; i < n; i++) {
            const bool known = numbers[i] >= 0.0f && numbers[i] < float(weight.rows);  // not NaN
            const uint8_t* row = weight.row(known ? int64_t(numbers[i]) : 0);
            for (int64_t c = 0; c < weight.cols; c += kColumns) {
                float part[kColumns];
                const int64_t count = std::min(kColumns, weight.cols - c);
                dequantize_row(weight.type, row + c / type.block_size * type.block_bytes, count, part);
                for (int64_t j = 0; j < count; j++) result[c + j] += numbers[n + i] * part[j];
            }
        }
    });
});

static const Registered kClip("clip", [](Facts& facts) -> std::unique_ptr<Op> {
    const int x = facts.buffer("x"), out = facts.buffer("out");
    facts.same_shape(x, out);
    const float low = facts.floats("low", 1)[0], high = facts.floats("high", 1)[0];
    const Buffer& in = facts.plan().buffer(x);
    return make_row_op(facts.plan(), out, [=, &in](const StepTokens&, int r, float* result) {
        const float* from = in.row(r);
        for (int64_t c = 0; c < in.width; c++) {
            const float raised = from[c] < low ? low : from[c];
            result[c] = raised > high ? high : raised;
        }
    });
});

static const Registered kAddImage("add_image", [](Facts& facts) -> std::unique_ptr<Op> {
    const int x = facts.buffer("x"), out = facts.buffer("out");
    facts.same_shape(x, out);
    facts.of_all_tokens(out);
    const int n_parts = facts.integer("n_parts", 1, INT32_MAX);
    const int index = facts.integer("index", 0, n_parts - 1);
    const int64_t width = facts.width(x), row = width * n_parts;
    read_image_rows(facts.plan(), row);
    const Buffer& in = facts.plan().buffer(x);
    return make_row_op(facts.plan(), out, [=, &in](const StepTokens& step, int r, float* result) {
        std::copy_n(in.row(r), width, result);
        if (step.image_row_of.empty() || step.image_row_of[r] < 0) return;
        const float* added = &step.image_rows[step.image_row_of[r] * row + index * width];
        for (int64_t c = 0; c < width; c++) result[c] += added[c];
    });
});

static const Registered kSelectOutputs("select_outputs", [](Facts& facts) -> std::unique_ptr<Op> {
    const int x = facts.buffer("x"), out = facts.buffer("out");
    const int n = facts.integer("n", 1, INT32_MAX);
    require(facts.width(x) * n == facts.width(out) && !facts.of_outputs(x) && facts.of_outputs(out),
            "select_outputs joins n rows of tokens to a row of outputs");
    facts.plan().limits().n_joined = std::max(facts.plan().limits().n_joined, n);
    const Buffer& in = facts.plan().buffer(x);
    const bool by_channel = facts.flag("by_channel", false);
    return make_row_op(facts.plan(), out, [&in, n, by_channel](const StepTokens& step, int r, float* result) {
        const float* from = in.row(step.outputs[r] + 1 - n);
        if (!by_channel) std::copy_n(from, n * in.width, result);
        for (int64_t c = 0; by_channel && c < in.width; c++)
            for (int j = 0; j < n; j++) result[c * n + j] = from[j * in.width + c];
    });
});

static std::unique_ptr<Op> make_norm(Facts& facts, bool layer, int n_head) {
    const int x = facts.buffer("x"), out = facts.buffer("out");
    facts.same_shape(x, out);
    require(n_head > 0 && facts.width(x) % n_head == 0, "the width must be a multiple of the heads");
    const int64_t width = facts.width(x) / n_head, n = layer ? facts.width(x) : width;
    const std::vector<float> weight =
        facts.has("weight") ? facts.floats("weight", n) : std::vector<float>(n, 1.0f);
    const std::vector<float> bias = layer ? facts.floats_or_none("bias", n) : std::vector<float>();
    const float eps = facts.real("eps");
    std::vector<Norm> norms;  // one per head, or one for all
    for (int64_t i = 0; i < n; i += width) {
        const auto part = [&](const std::vector<float>& of) {
            return of.empty() ? of : std::vector<float>(of.begin() + i, of.begin() + i + width);
        };
        norms.push_back({layer, part(weight), part(bias), eps});
    }
    const Buffer& in = facts.plan().buffer(x);
    const Kernels& kernels = facts.plan().kernels();
    auto normed = [=, norms = std::move(norms), &in, &kernels](const StepTokens&, int r, float* result) {
        for (int h = 0; h < n_head; h++)
            norms[layer ? h : 0].apply(kernels, in.row(r) + h * width, width, result + h * width);
    };
    return make_row_op(facts.plan(), out, std::move(normed));
}

static const Registered kRmsNorm("rms_norm", [](Facts& facts) -> std::unique_ptr<Op> {
    return make_norm(facts, false, facts.integer("n_head", 1, INT32_MAX));
});

static const Registered kUnitNorm("unit_norm", [](Facts& facts) -> std::unique_ptr<Op> {
    return make_norm(facts, false, facts.integer("n_head", 1, INT32_MAX));
});

static const Registered kLayerNorm("layer_norm", [](Facts& facts) -> std::unique_ptr<Op> {
    return make_norm(facts, true, facts.integer("n_head", 1, INT32_MAX));
});

static const Registered kRotate("rotate", [](Facts& facts) -> std::unique_ptr<Op> {
    Plan& plan = facts.plan();
    const int x = facts.buffer("x"), out = facts.buffer("out");
    facts.same_shape(x, out);
    const int n_head = facts.integer("n_head", 1, INT32_MAX),
              head_dim = facts.integer("head_dim", 1, INT32_MAX);
    require(facts.width(x) == int64_t(n_head) * head_dim, "the width does not match the heads");
    const int first = facts.integer("first", 0, head_dim), rope = facts.rope("rope");
    require(plan.rope(rope).n_rot <= head_dim - first, "the RoPE has more channels than a head");
    const Buffer& in = plan.buffer(x);
    return make_row_op(plan, out, [=, &plan, &in](const StepTokens& step, int r, float* result) {
        const Rope& facts = plan.rope(rope);  // looked up here: adding a RoPE may move the others
        const int half = facts.n_rot / 2;
        for (int h = 0; h < n_head; h++) {
            const float* head = in.row(r) + h * head_dim;
            std::copy_n(head, first, result + h * head_dim);
            rotate_head(facts, &step.rope_cos[rope][r * half], &step.rope_sin[rope][r * half],
                        head_dim - first, head + first, result + h * head_dim + first);
        }
    });
});

static const Registered kPositionGain("position_gain", [](Facts& facts) -> std::unique_ptr<Op> {
    const int out = facts.buffer("out");
    require(facts.width(out) == 1, "a position gain is one number per token");
    facts.of_all_tokens(out);
    const double beta = facts.number("beta");
    const int length = facts.integer("length", 1, INT32_MAX);
    return make_row_op(facts.plan(), out, [=](const StepTokens& step, int r, float* result) {
        const int n_full = step.positions[r] / length;  // original contexts before this position
        *result = float(1 + beta * std::log(1.0 + n_full));
    });
});

static const Registered kHeads("heads", [](Facts& facts) -> std::unique_ptr<Op> {
    Plan& plan = facts.plan();
    const int x = facts.buffer("x"), out = facts.buffer("out"), shared = facts.buffer_or_none("shared");
    facts.same_rows(x, out);
    if (shared >= 0) facts.same_rows(shared, out);
    const int n_head = facts.integer("n_head", 1, INT32_MAX);
    require(facts.width(x) % n_head == 0 && facts.width(out) % n_head == 0, "heads must fill the widths");
    const Buffer& in = plan.buffer(x);
    const Buffer* of_all = shared < 0 ? nullptr : &plan.buffer(shared);
    const int64_t stride = in.width / n_head, n_shared = of_all ? of_all->width : 0;
    const int64_t count = facts.width(out) / n_head - n_shared;
    const int first = facts.integer("first", 0, stride);
    require(count > 0 && first + count <= stride, "the selected channels are outside the head");
    return make_row_op(plan, out, [=, &in](const StepTokens&, int r, float* result) {
        for (int h = 0; h < n_head; h++, result += count + n_shared) {
            std::copy_n(in.row(r) + h * stride + first, count, result);
            if (of_all) std::copy_n(of_all->row(r), n_shared, result + count);
        }
    });
});

static std::unique_ptr<Op> make_activation(Facts& facts, Activation kind, float threshold) {
    const int x = facts.buffer("x"), out = facts.buffer("out");
    facts.same_shape(x, out);
    const Buffer& in = facts.plan().buffer(x);
    const Kernels& kernels = facts.plan().kernels();
    auto activated = [=, &in, &kernels](const StepTokens&, int r, float* result) {
        kernels.activate(kind, threshold, in.row(r), in.width, result);
    };
    return make_row_op(facts.plan(), out, std::move(activated), facts.flag("counts", false));
}

static const Registered kActivate("activate", [](Facts& facts) -> std::unique_ptr<Op> {
    return make_activation(facts, facts.activation("kind"), facts.real("threshold"));
});

static const Registered kXielu("xielu", [](Facts& facts) -> std::unique_ptr<Op> {
    const int x = facts.buffer("x"), out = facts.buffer("out");
    facts.same_shape(x, out);
    const Xielu f = {facts.real("positive"), facts.real("negative"), facts.real("linear"), facts.real("eps")};
    const Buffer& in = facts.plan().buffer(x);
    const Kernels& kernels = facts.plan().kernels();
    return make_row_op(facts.plan(), out, [=, &in, &kernels](const StepTokens&, int r, float* result) {
        kernels.xielu(f, in.row(r), in.width, result);
    });
});

static const Registered kSoftCap("soft_cap", [](Facts& facts) -> std::unique_ptr<Op> {
    return make_activation(facts, Activation::SoftCap, facts.real("cap"));
});

static const Registered kGaussianTopK("gaussian_top_k", [](Facts& facts) -> std::unique_ptr<Op> {
    const int x = facts.buffer("x"), out = facts.buffer("out");
    facts.same_shape(x, out);
    const float multiplier = facts.real("multiplier");
    const Buffer& in = facts.plan().buffer(x);
    const Kernels& kernels = facts.plan().kernels();
    return make_row_op(facts.plan(), out, [=, &in, &kernels](const StepTokens&, int r, float* result) {
        kernels.gaussian_top_k(in.row(r), multiplier, in.width, result);
    });
});

static const Registered kScale("scale", [](Facts& facts) -> std::unique_ptr<Op> {
    const float factor = facts.real("factor");
    if (!facts.has("weight")) return make_activation(facts, Activation::Scale, factor);
    const int x = facts.buffer("x"), out = facts.buffer("out");
    facts.same_shape(x, out);
    std::vector<float> weight = facts.floats("weight", facts.width(x));
    const Buffer& in = facts.plan().buffer(x);
    const Kernels& kernels = facts.plan().kernels();
    auto scaled = [=, weight = std::move(weight), &in, &kernels](const StepTokens&, int r, float* result) {
        kernels.activate(Activation::Scale, factor, in.row(r), in.width, result);
        kernels.multiply(result, weight.data(), in.width, result);
    };
    return make_row_op(facts.plan(), out, std::move(scaled));
});

static const Registered kMask("mask", [](Facts& facts) -> std::unique_ptr<Op> {
    const int x = facts.buffer("x"), scores = facts.buffer("scores"), out = facts.buffer("out");
    facts.same_shape(x, out);
    facts.same_rows(scores, out);
    const float threshold = facts.real("threshold");
    const int64_t first = facts.integer("first");
    require(first >= 0 && facts.width(scores) == facts.width(out) - first,
            "a mask needs one score per column from `first` on");
    const Buffer &in = facts.plan().buffer(x), &by = facts.plan().buffer(scores);
    return make_row_op(facts.plan(), out, [=, &in, &by](const StepTokens&, int r, float* result) {
        std::copy_n(in.row(r), in.width, result);
        for (int64_t i = first; i < in.width; i++)
            if (by.row(r)[i - first] < threshold) result[i] = 0.0f;
    });
});

static const Registered kThreshold("threshold", [](Facts& facts) -> std::unique_ptr<Op> {
    const int x = facts.buffer("x"), out = facts.buffer("out");
    facts.same_shape(x, out);
    facts.of_all_tokens(x);
    const float threshold = facts.real("threshold");
    const Buffer& in = facts.plan().buffer(x);
    return make_row_op(facts.plan(), out, [=, &in](const StepTokens& step, int r, float* result) {
        zero_small(step.thresholded[r] ? threshold : 0.0f, in.row(r), in.width, result);
    });
});

static const Registered kAdd("add", [](Facts& facts) -> std::unique_ptr<Op> {
    const int a = facts.buffer("a"), b = facts.buffer("b"), out = facts.buffer("out");
    facts.same_shape(a, b);
    facts.same_shape(a, out);
    const Buffer &left = facts.plan().buffer(a), &right = facts.plan().buffer(b);
    const Kernels& kernels = facts.plan().kernels();
    return make_row_op(facts.plan(), out, [&left, &right, &kernels](const StepTokens&, int r, float* result) {
        kernels.add(left.row(r), right.row(r), left.width, result);
    });
});

static const Registered kMultiply("multiply", [](Facts& facts) -> std::unique_ptr<Op> {
    const int a = facts.buffer("a"), b = facts.buffer("b"), out = facts.buffer("out");
    if (facts.width(b) != 1) facts.same_shape(a, b);
    facts.same_rows(a, b);
    facts.same_shape(a, out);
    const Buffer &left = facts.plan().buffer(a), &right = facts.plan().buffer(b);
    const Kernels& kernels = facts.plan().kernels();
    return make_row_op(facts.plan(), out, [&left, &right, &kernels](const StepTokens&, int r, float* result) {
        if (right.width == left.width)
            kernels.multiply(left.row(r), right.row(r), left.width, result);
        else
            kernels.activate(Activation::Scale, right.row(r)[0], left.row(r), left.width, result);
    });
});

static const Registered kGateHeads("gate_heads", [](Facts& facts) -> std::unique_ptr<Op> {
    const int x = facts.buffer("x"), gates = facts.buffer("gates"), out = facts.buffer("out");
    facts.same_shape(x, out);
    facts.same_rows(x, gates);
    const Buffer &in = facts.plan().buffer(x), &by = facts.plan().buffer(gates);
    require(by.width > 0 && in.width % by.width == 0, "the width must be a multiple of the gates");
    const int64_t head_dim = in.width / by.width;
    const Kernels& kernels = facts.plan().kernels();
    return make_row_op(facts.plan(), out, [=, &in, &by, &kernels](const StepTokens&, int r, float* result) {
        for (int64_t h = 0; h < by.width; h++) {
            float gate;
            kernels.activate(Activation::Sigmoid, 0.0f, by.row(r) + h, 1, &gate);
            kernels.activate(Activation::Scale, gate, in.row(r) + h * head_dim, head_dim,
                             result + h * head_dim);
        }
    });
});

}  // namespace hotset
