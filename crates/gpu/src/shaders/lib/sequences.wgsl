// The sequences of a batch: `sequences` has eight words for each, from `params.sequences` on: the position of
// its first row, the token there, the number of that row in the batch, how many rows it has, how many positions
// its pages hold, and what is added to a position for its row of angles.

struct Sequence {
    // Of its first row.
    position: u32,
    first_row: u32,
    n_rows: u32,
    // Positions that it has pages for.
    capacity: u32,
    angles: u32,
}

fn sequence_of(s: u32) -> Sequence {
    let at = params.sequences + 8u * s;
    return Sequence(
        sequences[at],
        sequences[at + 2u],
        sequences[at + 3u],
        sequences[at + 4u],
        sequences[at + 5u],
    );
}
