// Rotary position embedding of the channels [first, first + n_rot) of a head.
struct Pair {
    uint one, other;  // the channels that are rotated together
    uint angle;  // index of their angle among a token's
    bool is_second;  // whether the channel is `other`
};

// Return the pair of a rotated channel of a head.
Pair pair_of(uint channel) {
    const uint at = channel - first, half_rot = n_rot / 2u;
    if (is_neox == 0u) return Pair(first + (at & ~1u), first + (at | 1u), at / 2u, (at & 1u) != 0u);
    const uint angle = at % half_rot;
    return Pair(first + angle, first + angle + half_rot, angle, at >= half_rot);
}

bool is_rotated(uint channel) {
    return channel >= first && channel < first + n_rot;
}

// Return the channel after the rotation. angle: cosine and sine.
float rotated(Pair pair, float one, float other, vec2 angle) {
    precise float y = pair.is_second ? one * angle.y + other * angle.x : one * angle.x - other * angle.y;
    return y;
}
