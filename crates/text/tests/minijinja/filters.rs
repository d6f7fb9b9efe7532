//! Filters that Jinja2 has and the template engine lacks, or has otherwise.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// The most bytes that a variable may hold, counting a few for each item of a list or map.
const MAX_BYTES: usize = 8 << 20;
/// How deep lists and maps may lie in a variable; deeper ones would overflow the stack when printed or dropped.
const MAX_DEPTH: usize = 64;

/// What a template may keep in a variable.
pub(super) fn bounded(value: Value) -> Result<Value, Error> {
    match size(&value, 0, MAX_BYTES) {
        Some(_) => Ok(value),
        None => {
            let problem =
                format!("a variable grows beyond {MAX_BYTES} bytes or {MAX_DEPTH} levels");
            Err(Error::new(ErrorKind::InvalidOperation, problem))
        }
    }
}

/// What is left of `budget` after `value`; `None` if it does not suffice.
fn size(value: &Value, depth: usize, budget: usize) -> Option<usize> {
    const ITEM_BYTES: usize = 16;
    let mut budget = budget.checked_sub(ITEM_BYTES)?;
    match value.kind() {
        ValueKind::String => budget.checked_sub(value.as_str().map_or(0, str::len)),
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable if depth == MAX_DEPTH => None,
        // Of a lazy sequence the length is known, if at all, without making its items.
        ValueKind::Iterable => {
            budget.checked_sub(value.len().unwrap_or(0).checked_mul(ITEM_BYTES)?)
        }
        ValueKind::Seq | ValueKind::Map => {
            budget.checked_sub(value.len().unwrap_or(0).checked_mul(ITEM_BYTES)?)?;
            let is_map = value.kind() == ValueKind::Map;
            for item in value.try_iter().ok()? {
                if is_map {
                    budget = size(&value.get_item(&item).ok()?, depth + 1, budget)?;
                }
                budget = size(&item, depth + 1, budget)?;
            }
            Some(budget)
        }
        _ => Some(budget),
    }
}

/// `value | int(default, base)`: the default, or 0, for what is no number.
pub(super) fn int(value: &Value, default: Option<Value>, base: Option<u32>) -> Value {
    let default = default.unwrap_or_else(|| Value::from(0));
    match value.kind() {
        ValueKind::Bool => Value::from(i64::from(value.is_true())),
        ValueKind::Number if value.is_integer() => value.clone(),
        ValueKind::Number => f64::try_from(value.clone()).map_or(default, truncated),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default().trim().replace('_', "");
            match i64::from_str_radix(
                &text,
                base.filter(|base| (2..=36).contains(base)).unwrap_or(10),
            ) {
                Ok(number) => Value::from(number),
                Err(_) => text.parse().map_or(default, truncated),
            }
        }
        _ => default,
    }
}

fn truncated(number: f64) -> Value {
    Value::from(number.trunc() as i64)
}

/// `value | float(default)`: the default, or 0.0, for what is no number.
pub(super) fn float(value: &Value, default: Option<Value>) -> Value {
    let number = match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None => f64::try_from(value.clone()).ok(),
    };
    number
        .map(Value::from)
        .or(default)
        .unwrap_or_else(|| Value::from(0.0))
}

/// `text | wordcount`: how many runs of letters, digits and underscores there are.
pub(super) fn wordcount(text: &str) -> usize {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_'))
        .filter(|word| !word.is_empty())
        .count()
}

/// How a value is printed: as Python does, where the engine does not.
pub(super) fn print(value: &Value) -> Result<Option<String>, Error> {
    if value.kind() == ValueKind::Number && !value.is_integer() {
        return Ok(Some(super::json::float(f64::try_from(value.clone())?)));
    }
    Ok(None)
}
