// Activations. Needs the constant ACTIVATION.
const uint SILU = 0, GELU_TANH = 1, RELU = 2, RELU2 = 3, FATRELU = 4, SIGMOID = 5, CLAMPED_SILU = 6,
           CLAMPED_PLUS_ONE = 7, EXP = 8, GELU = 9, XIELU = 10, SOFTPLUS = 11;

// Compute 1 + erf(x / sqrt(2)) with an error below 2.2e-7, by polynomials fitted at Chebyshev nodes. Below 2
// the polynomial in x^2 approximates erf(x / sqrt(2)) / x; above, one approximates the logarithm of 1 - erf.
float one_and_erf(float x) {
    const float OF_SQUARE[10] =
        float[](0.7978845834732056, -0.13298076391220093, 0.01994710974395275, -0.0023746443912386894,
                0.0002308496186742559, -1.887041980808135e-05, 1.3208330074121477e-06, -7.834236726012023e-08,
                3.5954033084095727e-09, -9.369993669849919e-11);
    const float OF_REST[9] =
        float[](-9.666954040527344, -4.225606918334961, -0.47666361927986145, -0.0029761474579572678,
                0.0003961921320296824, -5.200348823564127e-05, 6.522220701299375e-06, -8.167075407072844e-07,
                9.017059454663467e-08);
    precise float sum, y;
    if (abs(x) < 2.0) {
        precise float square = x * x;
        sum = OF_SQUARE[9];
        for (int i = 8; i >= 0; i--) sum = sum * square + OF_SQUARE[i];
        y = 1.0 + sum * x;
        return y;
    }
    precise float u = min(abs(x), 5.7) - 4.0;
    sum = OF_REST[8];
    for (int i = 7; i >= 0; i--) sum = sum * u + OF_REST[i];
    precise float erf = 1.0 - exp_of(sum);
    y = 1.0 + (x < 0.0 ? -erf : erf);
    return y;
}

// Compute ln(1 + e^x): the logarithm of 1 + u is twice artanh(u / (2 + u)), computed by its series up to 1/3.
float softplus(float x) {
    const float u = exp_of(-abs(x));
    precise float s = u / (2.0 + u), square = s * s, sum = 1.0 / 15.0;
    [[unroll]] for (int i = 13; i > 0; i -= 2) sum = sum * square + 1.0 / float(i);
    precise float y = max(x, 0.0) + 2.0 * (s * sum);
    return y;
}

// Return a times the sigmoid of x.
float gated_by(float a, float x) {
    precise float more = 1.0 + exp_of(-x);
    return quotient(a, more);
}

// Return the activation ACTIVATION of x. number: its parameter, if it has one. xielu: the factors `positive`, `negative` and
// `linear` of XIELU.
float activated(float x, float number, vec3 xielu) {
    precise float y = x;
    if (ACTIVATION == SILU) y = gated_by(x, x);
    if (ACTIVATION == GELU_TANH) {
        precise float square = x * x;
        precise float u = x * fused(square, 0.0713548162726, 1.59576912161);
        y = gated_by(x, u);
    }
    if (ACTIVATION == RELU) y = max(x, 0.0);
    if (ACTIVATION == RELU2) y = max(x, 0.0) * max(x, 0.0);
    if (ACTIVATION == FATRELU) y = x >= number ? x : 0.0;
    if (ACTIVATION == SIGMOID) y = gated_by(1.0, x);
    if (ACTIVATION == CLAMPED_SILU) {
        const float m = min(x, number);
        precise float u = 1.702 * m;
        y = gated_by(m, u);
    }
    if (ACTIVATION == CLAMPED_PLUS_ONE) y = max(min(x, number), -number) + 1.0;
    if (ACTIVATION == EXP) y = exp_of(x);
    if (ACTIVATION == GELU) y = 0.5 * x * one_and_erf(x);
    if (ACTIVATION == SOFTPLUS) y = softplus(x);
    if (ACTIVATION == XIELU) {
        precise float above = xielu.x * x, bent = (exp_of(min(x, number)) - 1.0) - x, line = xielu.z * x;
        y = x > 0.0 ? fused(above, x, line) : fused(xielu.y, bent, line);
    }
    return y;
}
