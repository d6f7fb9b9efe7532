// Units of consecutive runs.

fn run_in(unit: u32, i: u32) -> u32 {
    return unit * UNIT + i;
}

fn unit_of(run: u32) -> u32 {
    return run / UNIT;
}

fn place_in_unit(run: u32) -> u32 {
    return run % UNIT;
}
