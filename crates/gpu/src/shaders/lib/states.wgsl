// States of a batch's sequences: `states` has [n_places, SLOTS, params.state_len], of whose second dimension a state is
// in the element of its position modulo SLOTS; `sequences` has the place of each sequence, from `params.places` on.

override SLOTS: u32 = 4u;

// Where the states of sequence s begin.
fn states_of(s: u32) -> u32 {
    return sequences[params.places + s] * SLOTS * params.state_len;
}

// Where the state at a position begins, of those that begin at `states`.
fn state_at(states: u32, position: u32) -> u32 {
    return states + position % SLOTS * params.state_len;
}
