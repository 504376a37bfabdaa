// The slots of the recurrent states of a step (backends/vulkan/inputs.py). For each of max_tokens tokens,
// `steps` has: the sequence's first token in the step, the slot of the state before that, and the slot for
// the state after the token. The first tokens of all sequences follow.
const uint NO_STATE = 0xffffffffu;
#define first_of(token) steps[token]
#define state_before(token) steps[max_tokens + steps[token]]
#define state_after(token) steps[2u * max_tokens + (token)]
#define first_of_sequence(i) steps[3u * max_tokens + (i)]
