//! Cooperative matrices without hardware for them, so that every machine can test the kernels that use them.
//!
//! The text of a shader is rewritten. In place of a subgroup are 32 consecutive invocations, two to a row of a matrix: both
//! have the row of the left factor, and each half a row of sums. The right factor stays in shared memory, which kernels
//! don't write between loading it and multiplying by it. All is computed in f32, as hardware does but for the order of sums.

use std::collections::{BTreeSet, HashMap};
use std::fmt;

/// A call of a function on matrices.
struct Call<'a> {
    function: &'a str,
    /// What it has in angle brackets, without the last of them.
    ty: &'a str,
    arguments: Vec<&'a str>,
    /// What follows it.
    rest: &'a str,
}

/// A matrix in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place<'a> {
    array: &'a str,
    /// Rows are one after the other, not columns.
    by_rows: bool,
}

/// A function that the rewritten text calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Helper<'a> {
    LoadFactor(Place<'a>),
    LoadSums(Place<'a>),
    StoreSums(Place<'a>),
    Multiply(Place<'a>),
}

/// The functions on matrices.
const FUNCTIONS: [&str; 3] = ["coopLoad", "coopStore", "coopMultiplyAdd"];

const SUBGROUP: &str = "    @builtin(subgroup_id) subgroup: u32,\n";
const LANE: &str = "    @builtin(subgroup_invocation_id) lane: u32,\n";

/// `source` without cooperative matrices.
///
/// Panics where it uses them in a way that none of this crate's shaders does: they are all tested.
pub(super) fn emulate(source: &str) -> String {
    let mut text = String::with_capacity(2 * source.len());
    let mut helpers = BTreeSet::new();
    // Right factors, by the names of their variables.
    let mut factors: HashMap<String, Place<'_>> = HashMap::new();
    let mut rest = source;
    while let Some(at) = FUNCTIONS.iter().filter_map(|name| rest.find(name)).min() {
        text.push_str(&rest[..at]);
        let call = Call::parse(&rest[at..]);
        rest = call.rest;
        let by_rows = call.function.ends_with('T');
        text += &match (call.function, &call.arguments[..]) {
            ("coopLoad" | "coopLoadT", [reference, stride]) => {
                let (place, at) = Place::of(reference, by_rows);
                match call.ty.rsplit(", ").next() {
                    Some("A") => {
                        helpers.insert(Helper::LoadFactor(place));
                        format!("load_factor_{place}({at}, {stride})")
                    }
                    Some("B") => {
                        factors.insert(last_variable(&text).to_owned(), place);
                        format!("vec2<u32>({at}, {stride})")
                    }
                    _ => {
                        helpers.insert(Helper::LoadSums(place));
                        format!("load_sums_{place}({at}, {stride})")
                    }
                }
            }
            ("coopStore" | "coopStoreT", [matrix, reference, stride]) => {
                let (place, at) = Place::of(reference, by_rows);
                helpers.insert(Helper::StoreSums(place));
                format!("store_sums_{place}({matrix}, {at}, {stride})")
            }
            ("coopMultiplyAdd", [left, right, sums]) => {
                let place = factors[*right];
                helpers.insert(Helper::Multiply(place));
                format!("multiply_{place}({left}, {right}, {sums})")
            }
            (function, arguments) => panic!("{function} of {arguments:?}"),
        };
    }
    text += rest;
    let mut text = with_places(&text);
    text += "\nvar<private> own_lane: u32;\n";
    for helper in &helpers {
        text += &helper.text(source);
    }
    text
}

/// The variable that is declared at the end of `text`.
fn last_variable(text: &str) -> &str {
    let before = text.strip_suffix(" = ").expect("a variable has a value");
    before.rsplit(' ').next().unwrap_or(before)
}

/// `text` with the subgroup and the place in it computed from the place in the workgroup.
fn with_places(text: &str) -> String {
    let has_lane = text.contains(LANE);
    let text = text.replace(
        SUBGROUP,
        "    @builtin(local_invocation_id) own_place: vec3<u32>,\n",
    );
    let text = text.replace(LANE, "");
    let (before, main) = text.split_once("fn main(").expect("an entry point");
    let (inputs, body) = main.split_once(") {\n").expect("a body");
    let lane = if has_lane {
        "    let lane = own_lane;\n"
    } else {
        ""
    };
    format!(
        "{before}fn main({inputs}) {{\n    let subgroup = own_place.x / 32u;\n    \
         own_lane = own_place.x % 32u;\n{lane}{body}"
    )
}

impl<'a> Call<'a> {
    /// The call that `text` begins with.
    fn parse(text: &'a str) -> Call<'a> {
        let open = text.find('(').expect("a call has arguments");
        let (function, ty) = match text[..open].split_once('<') {
            Some((function, ty)) => (function, ty.trim_end_matches('>')),
            None => (&text[..open], ""),
        };
        let mut arguments = Vec::new();
        let (mut depth, mut begin) = (0, open + 1);
        for (i, c) in text.char_indices().skip(open) {
            match c {
                '(' | '[' => depth += 1,
                ')' | ']' => depth -= 1,
                _ => {}
            }
            if depth == 0 || depth == 1 && c == ',' {
                arguments.push(text[begin..i].trim());
                begin = i + 1;
            }
            if depth == 0 {
                break;
            }
        }
        Call {
            function,
            ty,
            arguments,
            rest: &text[begin..],
        }
    }
}

impl<'a> Place<'a> {
    /// Of `&array[index]`, and the index.
    fn of(reference: &'a str, by_rows: bool) -> (Place<'a>, &'a str) {
        let reference = reference.strip_prefix('&');
        let parts = reference.and_then(|it| it.strip_suffix(']')?.split_once('['));
        let (array, index) = parts.expect("an element of an array");
        (Place { array, by_rows }, index)
    }

    /// The element in a row and a column, of a matrix that begins at `at`, lines `stride` apart; `source` declares the
    /// array.
    fn element(&self, source: &str, row: &str, column: &str) -> String {
        let (line, i) = match self.by_rows {
            true => (row, column),
            false => (column, row),
        };
        let array = self.array;
        match source.contains(&format!("var<workgroup> {array}: array<f32, ")) {
            true => format!("{array}[at + {line} * stride + {i}]"),
            false => format!("{array}[at + {line} * stride + ({i}) / 4u][({i}) % 4u]"),
        }
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = if self.by_rows { "rows" } else { "columns" };
        write!(f, "{lines}_of_{}", self.array)
    }
}

impl Helper<'_> {
    /// Its WGSL, for the shader `source`.
    fn text(self, source: &str) -> String {
        const ROW: &str = "(own_lane / 2u)";
        const COLUMN: &str = "own_lane % 2u * 8u + i";
        match self {
            Helper::LoadFactor(place) => format!(
                "
fn load_factor_{place}(at: u32, stride: u32) -> array<f32, 16> {{
    var row = array<f32, 16>();
    for (var i = 0u; i < 16u; i++) {{
        row[i] = f32({});
    }}
    return row;
}}
",
                place.element(source, ROW, "i")
            ),
            Helper::LoadSums(place) => format!(
                "
fn load_sums_{place}(at: u32, stride: u32) -> array<f32, 8> {{
    var half = array<f32, 8>();
    for (var i = 0u; i < 8u; i++) {{
        half[i] = {};
    }}
    return half;
}}
",
                place.element(source, ROW, &format!("({COLUMN})"))
            ),
            Helper::StoreSums(place) => format!(
                "
fn store_sums_{place}(sums: array<f32, 8>, at: u32, stride: u32) {{
    var half = sums;
    for (var i = 0u; i < 8u; i++) {{
        {} = half[i];
    }}
}}
",
                place.element(source, ROW, &format!("({COLUMN})"))
            ),
            Helper::Multiply(place) => format!(
                "
fn multiply_{place}(left: array<f32, 16>, right: vec2<u32>, sums: array<f32, 8>) -> array<f32, 8> {{
    var row = left;
    var half = sums;
    let at = right.x;
    let stride = right.y;
    for (var i = 0u; i < 8u; i++) {{
        for (var k = 0u; k < 16u; k++) {{
            half[i] += row[k] * f32({});
        }}
    }}
    return half;
}}
",
                place.element(source, "k", &format!("({COLUMN})"))
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_told_apart() {
        let call = Call::parse("coopLoadT<coop_mat16x16<f16, A>>(&tile[(r + 16u) * 18u], 18u);\n");
        assert_eq!(
            (call.function, call.ty, call.rest),
            ("coopLoadT", "coop_mat16x16<f16, A", ";\n")
        );
        assert_eq!(call.arguments, ["&tile[(r + 16u) * 18u]", "18u"]);
        let (place, index) = Place::of(call.arguments[0], true);
        assert_eq!((place.array, index), ("tile", "(r + 16u) * 18u"));
    }
}
