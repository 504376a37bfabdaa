// Operations that treat each row by itself: embedding, selection, norms, activations, sums and products.
#include <algorithm>

#include "row_op.h"

namespace hotset {

std::unique_ptr<Op> make_embed(const Plan& plan, const Matrix& weight, bool positions, int first_row,
                               int out) {
    return make_row_op(plan, out, [=](const StepTokens& step, int r, float* result) {
        const int row = positions ? step.positions[r] + first_row : step.tokens[r];
        dequantize_row(weight.type, weight.row(row), weight.cols, result);
    });
}

std::unique_ptr<Op> make_select(const Plan& plan, int x, int out) {
    const Buffer& in = plan.buffer(x);
    return make_row_op(plan, out, [&in](const StepTokens& step, int r, float* result) {
        std::copy_n(in.row(step.outputs[r]), in.width, result);
    });
}

std::unique_ptr<Op> make_norm(const Plan& plan, Norm norm, int n_head, int x, int out) {
    const Buffer& in = plan.buffer(x);
    const Kernels& kernels = plan.kernels();
    const int64_t width = in.width / n_head;
    return make_row_op(plan, out,
                       [=, &in, &kernels, norm = std::move(norm)](const StepTokens&, int r, float* result) {
                           for (int h = 0; h < n_head; h++)
                               norm.apply(kernels, in.row(r) + h * width, width, result + h * width);
                       });
}

std::unique_ptr<Op> make_rotate(const Plan& plan, int x, int out, int n_head, int head_dim, int rope,
                                int first) {
    const Buffer& in = plan.buffer(x);
    return make_row_op(plan, out, [=, &plan, &in](const StepTokens& step, int r, float* result) {
        const Rope& facts = plan.rope(rope);  // asked now: those that are added later move it
        const int half = facts.n_rot / 2;
        for (int h = 0; h < n_head; h++) {
            const float* head = in.row(r) + h * head_dim;
            std::copy_n(head, first, result + h * head_dim);
            rotate_head(facts, &step.rope_cos[rope][r * half], &step.rope_sin[rope][r * half],
                        head_dim - first, head + first, result + h * head_dim + first);
        }
    });
}

std::unique_ptr<Op> make_heads(const Plan& plan, int x, int shared, int n_head, int first, int out) {
    const Buffer& in = plan.buffer(x);
    const Buffer* of_all = shared < 0 ? nullptr : &plan.buffer(shared);
    const int64_t stride = in.width / n_head, n_shared = of_all ? of_all->width : 0;
    const int64_t count = plan.buffer(out).width / n_head - n_shared;
    return make_row_op(plan, out, [=, &in](const StepTokens&, int r, float* result) {
        for (int h = 0; h < n_head; h++, result += count + n_shared) {
            std::copy_n(in.row(r) + h * stride + first, count, result);
            if (of_all) std::copy_n(of_all->row(r), n_shared, result + count);
        }
    });
}

std::unique_ptr<Op> make_activate(const Plan& plan, Activation kind, float threshold, int x, int out) {
    const Buffer& in = plan.buffer(x);
    const Kernels& kernels = plan.kernels();
    return make_row_op(plan, out, [=, &in, &kernels](const StepTokens&, int r, float* result) {
        kernels.activate(kind, threshold, in.row(r), in.width, result);
    });
}

std::unique_ptr<Op> make_mask(const Plan& plan, int x, int scores, float threshold, int64_t first, int out) {
    const Buffer &in = plan.buffer(x), &by = plan.buffer(scores);
    return make_row_op(plan, out, [=, &in, &by](const StepTokens&, int r, float* result) {
        std::copy_n(in.row(r), in.width, result);
        for (int64_t i = first; i < in.width; i++)
            if (by.row(r)[i - first] < threshold) result[i] = 0.0f;
    });
}

std::unique_ptr<Op> make_cutoff(const Plan& plan, int x, float threshold, int out) {
    const Buffer& in = plan.buffer(x);
    return make_row_op(plan, out, [=, &in](const StepTokens& step, int r, float* result) {
        cut_small(step.cut[r] ? threshold : 0.0f, in.row(r), in.width, result);
    });
}

std::unique_ptr<Op> make_add(const Plan& plan, int a, int b, int out) {
    const Buffer &left = plan.buffer(a), &right = plan.buffer(b);
    const Kernels& kernels = plan.kernels();
    return make_row_op(plan, out, [&left, &right, &kernels](const StepTokens&, int r, float* result) {
        kernels.add(left.row(r), right.row(r), left.width, result);
    });
}

std::unique_ptr<Op> make_multiply(const Plan& plan, int a, int b, int out) {
    const Buffer &left = plan.buffer(a), &right = plan.buffer(b);
    const Kernels& kernels = plan.kernels();
    return make_row_op(plan, out, [&left, &right, &kernels](const StepTokens&, int r, float* result) {
        if (right.width == left.width)
            kernels.multiply(left.row(r), right.row(r), left.width, result);
        else
            kernels.activate(Activation::Scale, right.row(r)[0], left.row(r), left.width, result);
    });
}

}  // namespace hotset
