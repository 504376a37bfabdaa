// The positions that a token sees: at most `behind` before its own and `ahead` after it, from `least` on, in
// its sequence. For each of max_tokens tokens, `positions` has its position, its sequence's row in the
// tables, and its sequence's last position.
uint first_seen(uint token) {
    const uint position = positions[token];
    return max(position > behind ? position - behind : 0u, least);
}

uint last_seen(uint token) {
    const uint position = positions[token];
    return position + min(ahead, positions[2u * max_tokens + token] - position);
}
