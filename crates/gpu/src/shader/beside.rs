//! Two products in one dispatch: the workgroups of one after those of the other.
//!
//! Dispatches that depend on nothing of each other are still run one after the other where they write the same buffer, and a
//! product of few rows leaves most of the device idle. The text of the second shader is added to that of the first. What is the
//! same in both is there once, shared memory included; what isn't gets names of its own.

use std::collections::BTreeSet;
use std::ops::Range;

use super::text::wgsl;

/// What precedes names of the second shader that aren't the first's too.
const PREFIX: &str = "second_";

/// Buffers of which each has its own, although they are declared alike. The second's follow the bindings of the first.
const OWN_BUFFERS: [&str; 2] = ["codes", "scales"];

/// Parameters of which each has its own.
const OWN_PARAMS: [&str; 3] = ["n", "begin", "out_offset"];

/// The entry point as both have it.
const ENTRY: &str = "@compute @workgroup_size(WG)\nfn main(at: Invocation, group: Group)";

/// The entry point of both.
const BOTH: &str = wgsl!("../shaders/lib/side_by_side.wgsl");

/// What declarations begin with, after their attributes.
const KEYWORDS: [&str; 7] = [
    "fn", "struct", "const", "override", "alias", "var", "enable",
];

/// A declaration in the scope of a module.
struct Declaration<'a> {
    name: &'a str,
    text: &'a str,
}

/// The text of both shaders: `first`, which has the parameters of both, and `second`. Each alone has `n_bindings`.
///
/// Panics where they are written in a way that none of this crate's shaders is: all are tested.
pub(super) fn beside(first: &str, second: &str, n_bindings: usize) -> String {
    for text in [first, second] {
        assert_eq!(text.matches(ENTRY).count(), 1, "entry points: {text}");
    }
    let first = without_comments(first);
    let second = without_comments(&second.replace(ENTRY, "fn main(at: Invocation, group: Group)"));
    let known: BTreeSet<&str> = declarations(&first).map(|it| it.text).collect();
    // What both have as parameters is the first's.
    let others: Vec<_> = declarations(&second)
        .filter(|it| !["params", "Params"].contains(&it.name))
        .collect();
    let mut own: BTreeSet<&str> = OWN_BUFFERS.into();
    let differs = |it: &&Declaration<'_>| !known.contains(it.text);
    own.extend(others.iter().filter(differs).map(|it| it.name));
    loop {
        let uses_own =
            |it: &&Declaration<'_>| identifiers(it.text).any(|at| is_own(it.text, &at, &own));
        let n_before = own.len();
        let more: Vec<_> = others.iter().filter(uses_own).map(|it| it.name).collect();
        own.extend(more);
        if own.len() == n_before {
            break;
        }
    }
    let mut text = first.replace(ENTRY, "fn first_main(at: Invocation, group: Group)");
    for declaration in others.iter().filter(|it| own.contains(it.name)) {
        text.push('\n');
        text.push_str(&renamed(declaration.text, &own, n_bindings));
    }
    text + BOTH
}

/// A declaration of the second shader with names of its own.
fn renamed(text: &str, own: &BTreeSet<&str>, n_bindings: usize) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = 0;
    for at in identifiers(text).filter(|at| is_own(text, at, own)) {
        out.push_str(&text[rest..at.start]);
        out.push_str(PREFIX);
        rest = at.start;
    }
    out.push_str(&text[rest..]);
    for (i, _) in OWN_BUFFERS.iter().enumerate().rev() {
        let binding = |i| format!("@binding({i}) var");
        out = out.replace(&binding(i), &binding(n_bindings + i));
    }
    out
}

/// Whether the identifier there is for something that the second shader has of its own.
fn is_own(text: &str, at: &Range<usize>, own: &BTreeSet<&str>) -> bool {
    let name = &text[at.clone()];
    let is_field = text.starts_with("struct ") && text[at.end..].starts_with(':');
    match member_of(text, at) {
        Some(object) => object == "params" && OWN_PARAMS.contains(&name),
        None => own.contains(name) && !is_field,
    }
}

/// Lines without what follows `//`, and no empty ones.
fn without_comments(text: &str) -> String {
    let lines = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or(line).trim_end());
    let mut out = String::with_capacity(text.len());
    for line in lines.filter(|line| !line.is_empty()) {
        out.push_str(line);
        out.push('\n');
    }
    out
}

/// The declarations of a text without comments. Each begins with a line that isn't indented.
fn declarations(text: &str) -> impl Iterator<Item = Declaration<'_>> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let mut depth = 0;
        let end = rest.char_indices().find_map(|(i, c)| {
            depth += match c {
                '{' => 1,
                '}' => -1,
                _ => 0,
            };
            (depth == 0 && (c == ';' || c == '}')).then_some(i + 1)
        });
        let Some(end) = end else {
            assert_eq!(rest, "", "not a declaration");
            return None;
        };
        let (declaration, others) = rest.split_at(end);
        rest = others.trim_start();
        let mut words = identifiers(declaration).map(|at| &declaration[at]);
        let keyword = words.find(|word| KEYWORDS.contains(word));
        let name = match keyword {
            // Behind its address space.
            Some("var") => {
                let before = declaration.split(": ").next();
                before.and_then(|it| it.rsplit(['>', ' ']).next())
            }
            Some(_) => words.next(),
            None => None,
        };
        Some(Declaration {
            name: name.unwrap_or_else(|| panic!("not a declaration: {declaration}")),
            text: declaration,
        })
    })
}

/// Where identifiers are.
fn identifiers(text: &str) -> impl Iterator<Item = Range<usize>> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut at = 0;
    let words = std::iter::from_fn(move || {
        let start = at + text[at..].find(is_word)?;
        let rest = &text[start..];
        at = start + rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        Some(start..at)
    });
    words.filter(|at| !text[at.clone()].starts_with(|c: char| c.is_ascii_digit()))
}

/// What the identifier there is a member of, if it is one of something: the last part of its name.
fn member_of<'a>(text: &'a str, at: &Range<usize>) -> Option<&'a str> {
    let object = text[..at.start].strip_suffix('.')?;
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let begin = object.rfind(|c| !is_word(c)).map_or(0, |i| i + 1);
    Some(&object[begin..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_gets_a_name_of_its_own() {
        let shader = |scale: &str, of: &str| {
            format!(
                "override WG: u32 = 64u;
struct Invocation {{ @builtin(local_invocation_index) index: u32, }}
struct Group {{ @builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) count: vec3<u32>, }}
struct Params {{ n: u32, {of} }}
// A comment; with a semicolon.
@group(0) @binding(0) var<storage, read> codes: array<u32>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
var<immediate> params: Params;
const SCALE: f32 = {scale};
struct Both {{ codes: u32, scale: f32 }}
fn same(i: u32) -> u32 {{ return i + 1u; }}
fn last() -> u32 {{ return params.n - 1u; }}
fn value(i: u32) -> f32 {{
    let both = Both(codes[same(i)], SCALE);
    return f32(both.codes) * both.scale;
}}

{ENTRY} {{
    out[min(group.id.x, last())] = value(at.index);
}}
"
            )
        };
        let text = beside(
            &shader("1.0", "second_n: u32, first_groups: u32"),
            &shader("2.0", ""),
            2,
        );
        for expected in [
            "@binding(2) var<storage, read> second_codes: array<u32>;",
            "const second_SCALE: f32 = 2.0;",
            "fn second_last() -> u32 { return params.second_n - 1u; }",
            "let both = Both(second_codes[same(i)], second_SCALE);\n    return f32(both.codes) * both.scale;",
            "out[min(group.id.x, second_last())] = second_value(at.index);",
        ] {
            assert!(text.contains(expected), "{expected}\n{text}");
        }
        for once in [
            "fn same(",
            "struct Both",
            "struct Params",
            "read_write> out",
            "WG: u32",
            "// ",
        ] {
            assert!(text.matches(once).count() <= 1, "{once}\n{text}");
        }
        naga::front::wgsl::parse_str(&text).unwrap();
    }
}
