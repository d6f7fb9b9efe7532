//! Jinja's tests: `value is name`.

use std::cmp::Ordering;
use std::rc::Rc;

use super::args::Args;
use super::error::{Fault, cut};
use super::filters;
use super::render::Renderer;
use super::value::{self, Value};

pub(super) const NAMES: [&str; 38] = [
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "endingwith",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "int",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "safe",
    "sameas",
    "sequence",
    "startingwith",
    "string",
    "test",
    "true",
    "undefined",
    "upper",
    "==",
];

impl Renderer<'_> {
    #[inline(never)]
    pub(super) fn test(
        &mut self,
        name: &str,
        value: &Value,
        args: &mut Args,
    ) -> Result<bool, Fault> {
        let meter = Rc::clone(&self.meter);
        let holds = match name {
            "defined" => !value.is_undefined(),
            "undefined" => value.is_undefined(),
            "none" => matches!(value, Value::None),
            "boolean" => matches!(value, Value::Bool(_)),
            "true" => matches!(value, Value::Bool(true)),
            "false" => matches!(value, Value::Bool(false)),
            "string" => matches!(value, Value::Str(_)),
            "number" => matches!(value, Value::Bool(_) | Value::Int(_) | Value::Float(_)),
            "integer" | "int" => matches!(value, Value::Int(_)),
            "float" => matches!(value, Value::Float(_)),
            "mapping" => matches!(value, Value::Map(_) | Value::Namespace(_)),
            "sequence" => matches!(value, Value::List(_) | Value::Undefined),
            // A loop over `none` is empty here, and no error.
            "iterable" => matches!(
                value,
                Value::Undefined
                    | Value::None
                    | Value::Str(_)
                    | Value::List(_)
                    | Value::Map(_)
                    | Value::Namespace(_)
            ),
            "callable" => matches!(
                value,
                Value::Function(_) | Value::Macro(_) | Value::Loop(_) | Value::Joiner(_)
            ),
            "odd" => value.as_int().is_some_and(|number| number % 2 != 0),
            "even" => value.as_int().is_some_and(|number| number % 2 == 0),
            "divisibleby" => {
                let by = args.required("num")?;
                match (value.as_int(), by.as_int()) {
                    (Some(a), Some(b)) => a.checked_rem(b) == Some(0),
                    _ => match (value.as_float(), by.as_float()) {
                        (Some(a), Some(b)) => a % b == 0.0,
                        _ => false,
                    },
                }
            }
            "eq" | "equalto" | "==" => value::equal(value, &args.required("other")?, &meter)?,
            "ne" => !value::equal(value, &args.required("other")?, &meter)?,
            "lt" | "lessthan" | "le" | "gt" | "greaterthan" | "ge" => {
                let order = value::compare(value, &args.required("other")?, &meter)?;
                match name {
                    "lt" | "lessthan" => order == Ordering::Less,
                    "le" => order != Ordering::Greater,
                    "gt" | "greaterthan" => order == Ordering::Greater,
                    _ => order != Ordering::Less,
                }
            }
            "in" => {
                let container = args.required("seq")?;
                self.contains(&container, value)?
            }
            "sameas" => match (value, &args.required("other")?) {
                (Value::List(a), Value::List(b)) => Rc::ptr_eq(a, b),
                (Value::Map(a), Value::Map(b)) => Rc::ptr_eq(a, b),
                (Value::Float(_), Value::Int(_)) | (Value::Int(_), Value::Float(_)) => false,
                (a, b) => a.kind() == b.kind() && value::equal(a, b, &meter)?,
            },
            "startingwith" | "endingwith" => {
                let part = args.required("other")?;
                meter.copy(part.as_str().map_or(0, str::len))?;
                match (value.as_str(), part.as_str()) {
                    (Some(text), Some(part)) if name == "startingwith" => text.starts_with(part),
                    (Some(text), Some(part)) => text.ends_with(part),
                    _ => false,
                }
            }
            "lower" | "upper" => {
                let text = value.as_str().unwrap_or_default();
                meter.scan(text.len())?;
                let lower = text.contains(char::is_lowercase);
                let upper = text.contains(char::is_uppercase);
                match name {
                    "lower" => lower && !upper,
                    _ => upper && !lower,
                }
            }
            // No string is marked as HTML.
            "safe" | "escaped" => false,
            "filter" => value
                .as_str()
                .is_some_and(|name| filters::NAMES.contains(&name)),
            "test" => value.as_str().is_some_and(Self::has_test),
            _ => return Err(Fault::new(format!("unknown test `{}`", cut(name)))),
        };
        args.done()?;
        Ok(holds)
    }
}
