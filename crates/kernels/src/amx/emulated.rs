//! What the instructions of AMX do, in software: for tests on machines without it.

use std::cell::RefCell;

use super::{ROW_BYTES, ROWS};

/// A tile register: its shape, and rows of which bytes past the shape are zero.
#[derive(Clone, Copy)]
struct Tile {
    rows: usize,
    row_bytes: usize,
    bytes: [[u8; ROW_BYTES]; ROWS],
}

impl Tile {
    const ZERO: Tile = Tile {
        rows: 0,
        row_bytes: 0,
        bytes: [[0; ROW_BYTES]; ROWS],
    };
}

thread_local! {
    static TILES: RefCell<[Tile; 8]> = const { RefCell::new([Tile::ZERO; 8]) };
}

/// Whether instructions are emulated.
pub(crate) fn is_on() -> bool {
    !super::is_offered()
}

/// `ldtilecfg`, of the rows of each register and their bytes.
pub(super) fn shape(shapes: impl Iterator<Item = (usize, usize)>) {
    TILES.with_borrow_mut(|tiles| {
        for (tile, (rows, row_bytes)) in tiles.iter_mut().zip(shapes) {
            *tile = Tile {
                rows,
                row_bytes,
                ..Tile::ZERO
            };
        }
    });
}

/// `tilerelease`.
pub(super) fn release() {
    TILES.set([Tile::ZERO; 8]);
}

/// Runs an instruction, as it is written in [`tiles`](super::tiles), with the pointers that it names.
///
/// # Safety
/// What it reads or writes is there.
pub(crate) unsafe fn run(instruction: &str, operands: &str, pointers: &[(&str, *const u8)]) {
    let operands: Vec<_> = operands.split(", ").collect();
    let register = |i: usize| -> usize {
        let name = operands[i].strip_prefix("tmm").expect("a register");
        name.parse().expect("its number")
    };
    let address = |i: usize| {
        let operand = operands[i].strip_prefix("[{").expect("an address");
        let (name, offset) = operand.split_once("} + {row}").expect("rows of 64 bytes");
        let offset = match offset.trim_end_matches(']') {
            "" => 0,
            offset => offset.trim_start_matches(" + ").parse().expect("bytes"),
        };
        let (_, pointer) = (pointers.iter().find(|(of, _)| *of == name)).expect("a known pointer");
        // SAFETY: the caller's promise.
        unsafe { pointer.add(offset) }
    };
    TILES.with_borrow_mut(|tiles| match instruction {
        "tilezero " => tiles[register(0)].bytes = Tile::ZERO.bytes,
        "tileloadd " => {
            let (tile, from) = (&mut tiles[register(0)], address(1));
            tile.bytes = Tile::ZERO.bytes;
            for (r, row) in tile.bytes[..tile.rows].iter_mut().enumerate() {
                for (i, byte) in row[..tile.row_bytes].iter_mut().enumerate() {
                    // SAFETY: the caller's promise.
                    *byte = unsafe { from.add(r * ROW_BYTES + i).read() };
                }
            }
        }
        "tilestored " => {
            let (to, tile) = (address(0).cast_mut(), &tiles[register(1)]);
            for (r, row) in tile.bytes[..tile.rows].iter().enumerate() {
                for (i, byte) in row[..tile.row_bytes].iter().enumerate() {
                    // SAFETY: the caller's promise.
                    unsafe { to.add(r * ROW_BYTES + i).write(*byte) };
                }
            }
        }
        "tdpbusd " | "tdpbsud " | "tdpbssd " => {
            let signs = instruction.as_bytes()[4..6]
                .iter()
                .map(|sign| *sign == b's');
            let [a_is_signed, b_is_signed] = signs.collect::<Vec<_>>()[..] else {
                unreachable!("two signs");
            };
            let (a, b) = (tiles[register(1)], tiles[register(2)]);
            let sums = &mut tiles[register(0)];
            assert_eq!((sums.rows, sums.row_bytes), (a.rows, b.row_bytes));
            assert_eq!(a.row_bytes, 4 * b.rows);
            let value = |byte: u8, is_signed: bool| match is_signed {
                true => i32::from(byte as i8),
                false => i32::from(byte),
            };
            for (sums, a) in sums.bytes[..a.rows].iter_mut().zip(&a.bytes) {
                for (n, sum) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let mut total = i32::from_ne_bytes(*sum);
                    for (k, a) in a.iter().enumerate() {
                        let b = b.bytes[k / 4][4 * n + k % 4];
                        let product = value(*a, a_is_signed) * value(b, b_is_signed);
                        total = total.wrapping_add(product);
                    }
                    *sum = total.to_ne_bytes();
                }
            }
        }
        _ => unreachable!("no instruction of tiles: {instruction}"),
    });
}
