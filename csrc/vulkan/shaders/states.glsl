// Which slots hold the recurrent states of a step (backends/vulkan/inputs.py): `steps` has for each of max_tokens tokens
// the first of its sequence in the step, the slot with the state before that, and the slot that takes the state
// after the token; then the first tokens of the sequences.
const uint NO_STATE = 0xffffffffu;
#define first_of(token) steps[token]
#define state_before(token) steps[max_tokens + steps[token]]
#define state_after(token) steps[2u * max_tokens + (token)]
#define first_of_sequence(i) steps[3u * max_tokens + (i)]
