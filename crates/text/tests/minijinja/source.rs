//! Rewriting of template sources before they are compiled.

use std::borrow::Cow;

/// The filter that limits what a template may keep in a variable.
pub(super) const BOUNDED: &str = "bounded__";

/// The method that slices; see [`super::methods`].
pub(super) const SLICE: &str = "slice__";

/// How deep brackets may nest; the engine itself goes to 150.
const MAX_BRACKETS: usize = 64;

/// The source as the engine gets it.
///
/// The `generation` blocks of Transformers, which mark answers for training, become blocks that do nothing. What a
/// `set` keeps goes through [`BOUNDED`]: a variable that is joined to itself in a loop doubles with every step, which
/// no limit on steps would notice in time. Slices become calls of [`SLICE`], because the engine's own panic on an empty
/// text read backwards, and read `[:0:-1]` otherwise than Python.
pub(super) fn prepare(source: &str) -> Result<String, String> {
    let mut out = String::with_capacity(source.len() + source.len() / 8);
    let mut rest = source;
    let mut raw = false;
    while let Some(start) = rest.find('{') {
        let (before, marked) = rest.split_at(start);
        out.push_str(before);
        let end = match marked.as_bytes().get(1) {
            Some(b'#') if !raw => marked.find("#}").map(|at| at + 2),
            Some(b'{') if !raw => closing(&marked[2..], "}}").map(|at| at + 4),
            Some(b'%') => closing(&marked[2..], "%}").map(|at| at + 4),
            _ => Some(1),
        };
        let Some(end) = end else {
            rest = marked;
            break;
        };
        let (part, tail) = marked.split_at(end);
        rest = tail;
        match part
            .strip_prefix("{%")
            .and_then(|part| part.strip_suffix("%}"))
        {
            Some(tag) => {
                let name = trimmed(tag);
                raw = if raw { name != "endraw" } else { name == "raw" };
                let tag = if raw {
                    Cow::Borrowed(tag)
                } else {
                    rewrite(tag)
                };
                let tag = if raw {
                    tag
                } else {
                    Cow::Owned(without_slices(&tag)?)
                };
                out.extend(["{%", &tag, "%}"]);
            }
            None if !raw && part.starts_with("{{") => out.push_str(&without_slices(part)?),
            None => out.push_str(part),
        }
    }
    out.push_str(rest);
    Ok(out)
}

/// Replaces `[a:b:c]` by a call of [`SLICE`]. No other bracket holds a colon at its own level.
fn without_slices(code: &str) -> Result<String, String> {
    /// An open bracket: where it stands in the output, and the colons at its level.
    struct Open {
        bracket: char,
        start: usize,
        colons: Vec<usize>,
    }

    let mut out = String::with_capacity(code.len());
    let mut open: Vec<Open> = Vec::new();
    let mut quote = None;
    let mut escaped = false;
    for c in code.chars() {
        if quote.is_none() {
            match c {
                '[' | '(' | '{' => {
                    if open.len() == MAX_BRACKETS {
                        let problem = format!("brackets nest deeper than {MAX_BRACKETS}");
                        return Err(problem);
                    }
                    open.push(Open {
                        bracket: c,
                        start: out.len(),
                        colons: Vec::new(),
                    });
                }
                ':' => {
                    if let Some(open) = open.last_mut().filter(|open| open.bracket == '[') {
                        open.colons.push(out.len());
                    }
                }
                ']' | ')' | '}' => {
                    if let Some(Open { start, colons, .. }) = open.pop()
                        && c == ']'
                        && let (1..=2, Some(&first)) = (colons.len(), colons.first())
                    {
                        let second = colons.get(1).copied();
                        let bounds = [
                            &out[start + 1..first],
                            &out[first + 1..second.unwrap_or(out.len())],
                            second.map_or("", |second| &out[second + 1..]),
                        ];
                        let bounds = bounds.map(|bound| {
                            if bound.trim().is_empty() {
                                "none"
                            } else {
                                bound
                            }
                        });
                        let call = format!(".{SLICE}({})", bounds.join(","));
                        out.truncate(start);
                        out.push_str(&call);
                        continue;
                    }
                }
                '\'' | '"' => quote = Some(c),
                _ => {}
            }
        } else if escaped {
            escaped = false;
        } else if c == '\\' {
            escaped = true;
        } else if quote == Some(c) {
            quote = None;
        }
        out.push(c);
    }
    Ok(out)
}

/// A tag without the marks that trim white space.
fn trimmed(tag: &str) -> &str {
    tag.trim_start_matches(['-', '+'])
        .trim_end_matches(['-', '+'])
        .trim()
}

fn rewrite(tag: &str) -> Cow<'_, str> {
    let statement = trimmed(tag);
    let rewritten = match statement {
        "generation" => "if true".to_owned(),
        "endgeneration" => "endif".to_owned(),
        _ => match statement
            .strip_prefix("set")
            .filter(|rest| rest.starts_with(char::is_whitespace))
        {
            Some(assignment) => match assignment_operator(assignment) {
                Some(at) => {
                    let (target, value) = assignment.split_at(at);
                    format!("set{target}= ({}\n) | {BOUNDED}", &value[1..])
                }
                None => format!("{statement} | {BOUNDED}"),
            },
            None => return Cow::Borrowed(tag),
        },
    };
    let start = statement.as_ptr() as usize - tag.as_ptr() as usize;
    let (before, after) = (&tag[..start], &tag[start + statement.len()..]);
    Cow::Owned(format!("{before}{rewritten}{after}"))
}

/// The position of the first `=` that is neither in a string nor part of another operator.
fn assignment_operator(assignment: &str) -> Option<usize> {
    // A target holds no string, bracket or comparison, so that the first `=` is the one; a filter of a block does.
    let at = assignment.find(['=', '|', '\'', '"', '('])?;
    (assignment.as_bytes()[at] == b'=').then_some(at)
}

/// The position of `end` outside of strings and brackets.
fn closing(text: &str, end: &str) -> Option<usize> {
    let mut quote = None;
    let mut depth = 0_usize;
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match quote {
            _ if escaped => escaped = false,
            Some(_) if byte == b'\\' => escaped = true,
            Some(mark) if mark == byte => quote = None,
            Some(_) => {}
            None if depth == 0 && text.as_bytes()[at..].starts_with(end.as_bytes()) => {
                return Some(at);
            }
            None => match byte {
                b'\'' | b'"' => quote = Some(byte),
                b'{' | b'[' | b'(' => depth += 1,
                b'}' | b']' | b')' => depth = depth.saturating_sub(1),
                _ => {}
            },
        }
    }
    None
}
