//! Rewriting of template sources before they are compiled.

use std::borrow::Cow;

/// The filter that limits what a template may keep in a variable.
pub(super) const BOUNDED: &str = "bounded__";

/// The source as the engine gets it.
///
/// The `generation` blocks of Transformers, which mark answers for training, become blocks that do nothing. What a
/// `set` keeps goes through [`BOUNDED`]: a variable that is joined to itself in a loop doubles with every step, which
/// no limit on steps would notice in time.
pub(super) fn prepare(source: &str) -> String {
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
                out.extend(["{%", &tag, "%}"]);
            }
            None => out.push_str(part),
        }
    }
    out.push_str(rest);
    out
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

/// Where the first `=` stands that is neither in a string nor part of another operator.
fn assignment_operator(assignment: &str) -> Option<usize> {
    // A target holds no string, bracket or comparison, so that the first `=` is the one; a filter of a block does.
    let at = assignment.find(['=', '|', '\'', '"', '('])?;
    (assignment.as_bytes()[at] == b'=').then_some(at)
}

/// Where `end` stands outside of strings and brackets.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_for_training_do_nothing_and_variables_are_bounded() {
        let cases = [
            (
                "a {%- generation -%} b {% endgeneration %}",
                "a {%- if true -%} b {% endif %}",
            ),
            (
                "{% set x = 'a' ~ '%}=' -%}",
                "{% set x = ( 'a' ~ '%}='\n) | bounded__ -%}",
            ),
            ("{%- set ns.x=1 %}", "{%- set ns.x= (1\n) | bounded__ %}"),
            (
                "{% set x %}y{% endset %}",
                "{% set x | bounded__ %}y{% endset %}",
            ),
            (
                "{% set x | join('=') %}",
                "{% set x | join('=') | bounded__ %}",
            ),
            ("{{ '{% set x = 1 %}' }}", "{{ '{% set x = 1 %}' }}"),
            (
                "{{ {'a': {}} }}{# {% set x = 1 %} #}",
                "{{ {'a': {}} }}{# {% set x = 1 %} #}",
            ),
            (
                "{% raw %}{% set x = 1 %}{{{% endraw %}",
                "{% raw %}{% set x = 1 %}{{{% endraw %}",
            ),
            (
                "{% settings %} { {% generation",
                "{% settings %} { {% generation",
            ),
        ];
        for (source, expected) in cases {
            assert_eq!(prepare(source), expected);
        }
    }
}
