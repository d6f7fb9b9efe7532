//! Methods of Python's strings, lists and dictionaries that the template engine's own set lacks.

use minijinja::value::{Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::source;

/// Calls `method` of `value`.
pub(super) fn call(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if method == source::SLICE {
        return slice(value, args);
    }
    let own = match value.as_str() {
        Some(text) => string_method(text, method, args)?,
        // Values never change, so that a copy is the value itself.
        None if method == "copy" && matches!(value.kind(), ValueKind::Map | ValueKind::Seq) => {
            Some(value.clone())
        }
        None => None,
    };
    match own {
        Some(result) => Ok(result),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// `value[start:stop:step]` as Python has it.
fn slice(value: &Value, args: &[Value]) -> Result<Value, Error> {
    let (start, stop, step): (Option<i64>, Option<i64>, Option<i64>) = from_args(args)?;
    match value.kind() {
        ValueKind::String => {
            let chars: Vec<char> = value.as_str().unwrap_or_default().chars().collect();
            let indices = indices(start, stop, step, chars.len())?;
            Ok(Value::from(indices.map(|at| chars[at]).collect::<String>()))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            let indices = indices(start, stop, step, items.len())?;
            let taken: Vec<Value> = indices.map(|at| items[at].clone()).collect();
            Ok(if value.is_tuple() {
                Value::from(Tuple::from(taken))
            } else {
                Value::from(taken)
            })
        }
        kind => {
            let problem = format!("a value of kind {kind} cannot be sliced");
            Err(Error::new(ErrorKind::InvalidOperation, problem))
        }
    }
}

/// The places that a slice of `len` items takes, in order.
fn indices(
    start: Option<i64>,
    stop: Option<i64>,
    step: Option<i64>,
    len: usize,
) -> Result<impl Iterator<Item = usize>, Error> {
    let step = i128::from(step.unwrap_or(1));
    if step == 0 {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "the step of a slice is 0",
        ));
    }
    let len = len as i128;
    // The ends lie one before the first and one behind the last place, as seen in the direction of the step.
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let place = |bound: Option<i64>, default: i128| match bound.map(i128::from) {
        None => default,
        Some(bound) if bound < 0 => (bound + len).max(low),
        Some(bound) => bound.min(high),
    };
    let (start, stop) = if step > 0 {
        (place(start, low), place(stop, high))
    } else {
        (place(start, high), place(stop, low))
    };
    let inside = move |at: &i128| if step > 0 { *at < stop } else { *at > stop };
    let places = std::iter::successors(Some(start), move |at| Some(at + step)).take_while(inside);
    Ok(places.map(|at| at as usize))
}

fn string_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "title" => {
            let () = from_args(args)?;
            Value::from(title(text))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            let parts = text.split_once(not_empty(separator)?);
            triple(parts.map_or((text, "", ""), |(before, after)| (before, separator, after)))
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let parts = text.rsplit_once(not_empty(separator)?);
            triple(parts.map_or(("", "", text), |(before, after)| (before, separator, after)))
        }
        "rsplit" => {
            let (separator, max): (Option<&str>, Option<i64>) = from_args(args)?;
            let max = max
                .and_then(|max| usize::try_from(max).ok())
                .unwrap_or(usize::MAX);
            let mut parts = match separator {
                Some(separator) => text
                    .rsplitn(max.saturating_add(1), not_empty(separator)?)
                    .map(Value::from)
                    .collect(),
                None => split_words_from_end(text, max),
            };
            parts.reverse();
            Value::from(parts)
        }
        "index" => {
            let (needle,): (&str,) = from_args(args)?;
            match text.find(needle) {
                Some(at) => Value::from(text[..at].chars().count()),
                None => {
                    return Err(Error::new(
                        ErrorKind::InvalidOperation,
                        "substring not found",
                    ));
                }
            }
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let missing = width.min(1 << 16).saturating_sub(text.chars().count());
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            Value::from(format!("{sign}{}{digits}", "0".repeat(missing)))
        }
        "swapcase" => {
            let () = from_args(args)?;
            let swap = |c: char| {
                if c.is_uppercase() {
                    c.to_lowercase().to_string()
                } else {
                    c.to_uppercase().to_string()
                }
            };
            Value::from(text.chars().map(swap).collect::<String>())
        }
        "casefold" => {
            let () = from_args(args)?;
            Value::from(text.to_lowercase())
        }
        _ => return Ok(None),
    }))
}

fn not_empty(separator: &str) -> Result<&str, Error> {
    if separator.is_empty() {
        return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
    }
    Ok(separator)
}

fn triple((a, b, c): (&str, &str, &str)) -> Value {
    Value::from(Tuple::from(vec![
        Value::from(a),
        Value::from(b),
        Value::from(c),
    ]))
}

fn split_words_from_end(text: &str, max: usize) -> Vec<Value> {
    let mut parts = Vec::new();
    let mut rest = text.trim_end();
    while !rest.is_empty() && parts.len() < max {
        let word = rest.rsplit(char::is_whitespace).next().unwrap_or(rest);
        parts.push(Value::from(word));
        rest = rest[..rest.len() - word.len()].trim_end();
    }
    if !rest.is_empty() {
        parts.push(Value::from(rest));
    }
    parts
}

/// Every letter that follows a letter in lower case, every other in upper case: `don't` becomes `Don'T`.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        if in_word {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        in_word = c.is_alphabetic();
    }
    out
}
