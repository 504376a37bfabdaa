// The positions that a token sees: those of its sequence at most `behind` before its own and `ahead` after it, from `least`
// on. `positions` has for each of max_tokens tokens its position, the row of its sequence in the tables, and the sequence's
// last position.
uint first_seen(uint token) {
    const uint position = positions[token];
    return max(position > behind ? position - behind : 0u, least);
}

uint last_seen(uint token) {
    const uint position = positions[token];
    return position + min(ahead, positions[2u * max_tokens + token] - position);
}
