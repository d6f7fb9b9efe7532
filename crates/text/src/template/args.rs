//! The arguments of a call.

use super::error::{Fault, cut};
use super::value::Value;

/// Arguments that are taken one after the other.
#[derive(Debug, Default)]
pub(super) struct Args {
    /// The first of them last.
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(Value, Value)>,
}

impl Args {
    /// The next argument without a name, or else the one called `name`.
    pub(super) fn next(&mut self, name: &str) -> Result<Option<Value>, Fault> {
        match (self.positional.pop(), self.take(name)?) {
            (Some(_), Some(_)) => Err(Fault::new(format!("argument `{name}` is given twice"))),
            (positional, named) => Ok(positional.or(named)),
        }
    }

    /// The argument called `name`, which can't be given without.
    pub(super) fn take(&mut self, name: &str) -> Result<Option<Value>, Fault> {
        let at = self
            .named
            .iter()
            .position(|(n, _)| n.as_str() == Some(name));
        Ok(at.map(|at| self.named.swap_remove(at).1))
    }

    pub(super) fn required(&mut self, name: &str) -> Result<Value, Fault> {
        let missing = || Fault::new(format!("argument `{name}` is missing"));
        self.next(name)?.ok_or_else(missing)
    }

    /// The next argument, a string if there is one; `none` counts as missing.
    pub(super) fn string(&mut self, name: &str) -> Result<Option<Value>, Fault> {
        match self.next(name)? {
            None | Some(Value::None | Value::Undefined) => Ok(None),
            Some(value @ Value::Str(_)) => Ok(Some(value)),
            Some(other) => Err(wrong(name, "a string", &other)),
        }
    }

    pub(super) fn required_string(&mut self, name: &str) -> Result<Value, Fault> {
        match self.required(name)? {
            value @ Value::Str(_) => Ok(value),
            other => Err(wrong(name, "a string", &other)),
        }
    }

    pub(super) fn int(&mut self, name: &str) -> Result<Option<i128>, Fault> {
        match self.next(name)? {
            None | Some(Value::None | Value::Undefined) => Ok(None),
            Some(value) => match value.as_int() {
                Some(number) => Ok(Some(number)),
                None => Err(wrong(name, "a whole number", &value)),
            },
        }
    }

    /// The next argument as a count; negative ones are 0, and those beyond memory what is larger than any.
    pub(super) fn count(&mut self, name: &str) -> Result<Option<usize>, Fault> {
        let count = |number: i128| usize::try_from(number.max(0)).unwrap_or(usize::MAX);
        Ok(self.int(name)?.map(count))
    }

    pub(super) fn flag(&mut self, name: &str) -> Result<bool, Fault> {
        Ok(self.next(name)?.is_some_and(|value| value.is_true()))
    }

    /// Everything without a name that is left.
    pub(super) fn rest(&mut self) -> Vec<Value> {
        let mut rest = std::mem::take(&mut self.positional);
        rest.reverse();
        rest
    }

    /// All arguments must have been taken.
    pub(super) fn done(&self) -> Result<(), Fault> {
        if let Some((name, _)) = self.named.first() {
            let name = cut(name.as_str().unwrap_or_default());
            return Err(Fault::new(format!("unexpected argument `{name}`")));
        }
        match self.positional.len() {
            0 => Ok(()),
            n => Err(Fault::new(format!("{n} arguments too many"))),
        }
    }
}

fn wrong(name: &str, expected: &str, found: &Value) -> Fault {
    let found = found.kind();
    Fault::new(format!(
        "argument `{name}`: expected {expected}, found {found}"
    ))
}
