//! Operators, attributes, subscripts and slices.

use std::rc::Rc;

use super::ast::BinaryOp;
use super::error::Fault;
use super::meter::Hold;
use super::render::Renderer;
use super::value::{self, List, Text, Value};

/// `-value`, or `+value`.
pub(super) fn negate(value: &Value, negative: bool) -> Result<Value, Fault> {
    let overflow = || Fault::new("a number grows too large");
    match value {
        Value::Float(number) => Ok(Value::Float(if negative { -number } else { *number })),
        other => match other.as_int() {
            Some(number) if negative => Ok(Value::Int(number.checked_neg().ok_or_else(overflow)?)),
            Some(number) => Ok(Value::Int(number)),
            None => Err(Fault::new(format!(
                "expected a number behind a sign, found {}",
                value.kind()
            ))),
        },
    }
}

fn sign(op: BinaryOp) -> &'static str {
    match op {
        BinaryOp::Add => "+",
        BinaryOp::Subtract => "-",
        BinaryOp::Concat => "~",
        BinaryOp::Multiply => "*",
        BinaryOp::Divide => "/",
        BinaryOp::FloorDivide => "//",
        BinaryOp::Remainder => "%",
        BinaryOp::Power => "**",
    }
}

impl Renderer<'_> {
    #[inline(never)]
    pub(super) fn operate(
        &mut self,
        op: BinaryOp,
        left: &Value,
        right: &Value,
    ) -> Result<Value, Fault> {
        match (op, left, right) {
            (BinaryOp::Add, Value::Str(a), Value::Str(b)) => {
                let mut text = Text::new(&self.meter)?;
                text.push_str(a.as_str())?;
                text.push_str(b.as_str())?;
                return Ok(text.into_value());
            }
            (BinaryOp::Add, Value::List(a), Value::List(b)) if a.is_tuple == b.is_tuple => {
                let mut list = List::new(&self.meter)?;
                list.extend(a.items())?;
                list.extend(b.items())?;
                list.is_tuple = a.is_tuple;
                return Ok(list.into_value());
            }
            (BinaryOp::Concat, ..) => {
                let mut text = Text::new(&self.meter)?;
                self.print(left, &mut text)?;
                self.print(right, &mut text)?;
                return Ok(text.into_value());
            }
            (BinaryOp::Multiply, repeated @ (Value::Str(_) | Value::List(_)), count)
            | (BinaryOp::Multiply, count, repeated @ (Value::Str(_) | Value::List(_))) => {
                return self.repeat(repeated, count);
            }
            (BinaryOp::Remainder, Value::Str(format), value) => {
                let mut args = super::args::Args::default();
                match value {
                    Value::List(list) if list.is_tuple => {
                        args.positional = list.items().iter().rev().take(500).cloned().collect();
                    }
                    value => args.positional.push(value.clone()),
                }
                return self.printf(format.as_str(), &mut args);
            }
            _ => {}
        }
        self.arithmetic(op, left, right)
    }

    fn arithmetic(&self, op: BinaryOp, left: &Value, right: &Value) -> Result<Value, Fault> {
        let result = match (left.as_int(), right.as_int()) {
            (Some(a), Some(b)) => whole(op, a, b),
            _ => match (left.as_float(), right.as_float()) {
                (Some(a), Some(b)) => float(op, a, b),
                _ => {
                    let (op, left, right) = (sign(op), left.kind(), right.kind());
                    let problem = format!("`{op}` takes no {left} and {right}");
                    return Err(Fault::new(problem));
                }
            },
        };
        result.ok_or_else(|| {
            let op = sign(op);
            Fault::new(format!(
                "`{op}`: the result is too large, or a division by zero"
            ))
        })
    }

    fn repeat(&self, value: &Value, count: &Value) -> Result<Value, Fault> {
        let Some(count) = count.as_int() else {
            let (value, count) = (value.kind(), count.kind());
            return Err(Fault::new(format!("`*` takes no {value} and {count}")));
        };
        let count = usize::try_from(count.max(0)).unwrap_or(usize::MAX);
        match value {
            Value::Str(text) => {
                let mut out = Text::new(&self.meter)?;
                // Nothing, any number of times, is nothing.
                let count = if text.len() == 0 { 0 } else { count };
                out.repeat(text.as_str(), count)?;
                Ok(out.into_value())
            }
            Value::List(list) => {
                let mut out = List::new(&self.meter)?;
                if !list.items().is_empty() {
                    for _ in 0..count {
                        self.meter.work(1)?;
                        out.extend(list.items())?;
                    }
                }
                out.is_tuple = list.is_tuple;
                Ok(out.into_value())
            }
            _ => Ok(Value::Undefined),
        }
    }

    /// `value in container`.
    pub(super) fn contains(&self, container: &Value, value: &Value) -> Result<bool, Fault> {
        match container {
            Value::Undefined => Ok(false),
            Value::Str(text) => {
                let value = self.string(value)?;
                self.meter.scan(text.len())?;
                Ok(text.as_str().contains(value.as_str().unwrap_or_default()))
            }
            Value::List(list) => {
                for item in list.items() {
                    if value::equal(item, value, &self.meter)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            Value::Map(map) => Ok(map.get(value, &self.meter)?.is_some()),
            Value::Namespace(at) => {
                let attributes = &self.namespaces[*at];
                self.meter.work(attributes.len())?;
                let mut names = attributes.iter().map(|(name, _)| name.as_str());
                Ok(value.as_str().is_some() && names.any(|name| name == value.as_str()))
            }
            other => Err(Fault::new(format!(
                "`in` looks into no value of kind {}",
                other.kind()
            ))),
        }
    }

    /// `value.name`; undefined if there is no such attribute.
    pub(super) fn attribute(&self, value: &Value, name: &str) -> Result<Value, Fault> {
        Ok(match value {
            Value::Undefined => {
                let name = super::error::cut(name);
                let problem = format!("attribute `{name}` of an undefined value");
                return Err(Fault::new(problem));
            }
            Value::Map(map) => map.get_str(name).cloned().unwrap_or(Value::Undefined),
            Value::Namespace(at) => {
                let attributes = &self.namespaces[*at];
                self.meter.work(attributes.len() / 2)?;
                let mut known = attributes.iter();
                let found = known.find(|(known, _)| known.as_str() == Some(name));
                found.map_or(Value::Undefined, |(_, value)| value.clone())
            }
            Value::Loop(state) => {
                let (at, items) = (state.index.get(), state.items.items());
                let n = items.len();
                match name {
                    "index" => Value::usize(at + 1),
                    "index0" => Value::usize(at),
                    "revindex" => Value::usize(n - at),
                    "revindex0" => Value::usize(n - at - 1),
                    "first" => Value::Bool(at == 0),
                    "last" => Value::Bool(at + 1 == n),
                    "length" => Value::usize(n),
                    "depth" => Value::usize(state.level + 1),
                    "depth0" => Value::usize(state.level),
                    "previtem" if at > 0 => items[at - 1].clone(),
                    "nextitem" if at + 1 < n => items[at + 1].clone(),
                    _ => Value::Undefined,
                }
            }
            Value::Macro(value) => {
                let description = &self.program.macros[value.at];
                let names = &self.program.names;
                match name {
                    "name" => Value::str(&names[description.name as usize], &self.meter)?,
                    "arguments" => {
                        let mut list = List::new(&self.meter)?;
                        for (id, _) in &description.parameters {
                            list.push(Value::str(&names[*id as usize], &self.meter)?)?;
                        }
                        list.into_value()
                    }
                    _ => Value::Undefined,
                }
            }
            // A group of `groupby`.
            Value::List(list) if list.is_tuple && list.items().len() == 2 => match name {
                "grouper" => list.items()[0].clone(),
                "list" => list.items()[1].clone(),
                _ => Value::Undefined,
            },
            _ => Value::Undefined,
        })
    }

    /// `value[index]`; undefined if there is no such item.
    #[inline(never)]
    pub(super) fn item(&self, value: &Value, index: &Value) -> Result<Value, Fault> {
        if let Value::Map(map) = value {
            let found = map.get(index, &self.meter)?;
            return Ok(found.cloned().unwrap_or(Value::Undefined));
        }
        if let Some(name) = index.as_str() {
            return self.attribute(value, name);
        }
        let place = |n: usize| {
            let index = index.as_int()?;
            let at = if index < 0 { index + n as i128 } else { index };
            usize::try_from(at).ok().filter(|at| *at < n)
        };
        Ok(match value {
            Value::Undefined => return Err(Fault::new("item of an undefined value")),
            Value::List(list) => match place(list.items().len()) {
                Some(at) => list.items()[at].clone(),
                None => Value::Undefined,
            },
            Value::Str(text) => {
                let text = text.as_str();
                self.meter.scan(text.len())?;
                let n = text.chars().count();
                match place(n).and_then(|at| text.chars().nth(at)) {
                    Some(c) => Value::str(c.encode_utf8(&mut [0; 4]), &self.meter)?,
                    None => Value::Undefined,
                }
            }
            _ => Value::Undefined,
        })
    }

    /// `value[start:stop:step]` as Python has it.
    #[inline(never)]
    pub(super) fn slice(
        &self,
        value: &Value,
        [start, stop, step]: [Option<i128>; 3],
    ) -> Result<Value, Fault> {
        let limit = 1_i128 << 64;
        let [start, stop, step] =
            [start, stop, step].map(|bound| bound.map(|bound| bound.clamp(-limit, limit)));
        let step = step.unwrap_or(1);
        if step == 0 {
            return Err(Fault::new("the step of a slice is 0"));
        }
        match value {
            Value::Str(text) => {
                let text = text.as_str();
                self.meter.scan(text.len())?;
                let n = text.chars().count();
                let (first, count) = places(start, stop, step, n);
                let mut out = Text::new(&self.meter)?;
                if step == 1 {
                    let byte = |at: usize| text.char_indices().nth(at).map_or(text.len(), |c| c.0);
                    let first = byte(first);
                    let rest = &text[first..];
                    let end = rest.char_indices().nth(count).map_or(rest.len(), |c| c.0);
                    out.push_str(&rest[..end])?;
                } else {
                    let _hold = Hold::new(&self.meter, n * size_of::<char>())?;
                    let chars: Vec<char> = text.chars().collect();
                    for at in 0..count {
                        out.push(chars[(first as i128 + at as i128 * step) as usize])?;
                    }
                }
                Ok(out.into_value())
            }
            Value::List(list) => {
                let items = list.items();
                let (first, count) = places(start, stop, step, items.len());
                let mut out = List::new(&self.meter)?;
                self.meter.work(count / 4)?;
                for at in 0..count {
                    out.push(items[(first as i128 + at as i128 * step) as usize].clone())?;
                }
                out.is_tuple = list.is_tuple;
                Ok(out.into_value())
            }
            other => Err(Fault::new(format!(
                "a value of kind {} can't be sliced",
                other.kind()
            ))),
        }
    }

    /// The items of what can be looped over: those of a list, the keys of a map, the characters of a string, and
    /// nothing for what isn't there.
    pub(super) fn items(&self, value: &Value) -> Result<Rc<List>, Fault> {
        let mut list = List::new(&self.meter)?;
        match value {
            Value::List(list) => return Ok(Rc::clone(list)),
            Value::Undefined | Value::None => {}
            Value::Map(map) => {
                self.meter.work(map.entries().len() / 4)?;
                for (key, _) in map.entries() {
                    list.push(key.clone())?;
                }
            }
            Value::Str(text) => {
                self.meter.work(text.len() / 2)?;
                for c in text.as_str().chars() {
                    list.push(Value::str(c.encode_utf8(&mut [0; 4]), &self.meter)?)?;
                }
            }
            Value::Namespace(at) => {
                for (name, _) in &self.namespaces[*at] {
                    list.push(name.clone())?;
                }
            }
            other => {
                return Err(Fault::new(format!(
                    "a value of kind {} has no items",
                    other.kind()
                )));
            }
        }
        Ok(Rc::new(list))
    }
}

/// The first place that a slice of `len` items takes, and how many.
fn places(start: Option<i128>, stop: Option<i128>, step: i128, len: usize) -> (usize, usize) {
    let len = len as i128;
    // The ends lie one before the first and one behind the last place, as seen in the direction of the step.
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let place = |bound: Option<i128>, default: i128| match bound {
        None => default,
        Some(bound) if bound < 0 => (bound + len).max(low),
        Some(bound) => bound.min(high),
    };
    let (start, stop) = match step > 0 {
        true => (place(start, low), place(stop, high)),
        false => (place(start, high), place(stop, low)),
    };
    let distance = if step > 0 { stop - start } else { start - stop };
    if distance <= 0 {
        return (0, 0);
    }
    let step = step.abs();
    (start as usize, ((distance + step - 1) / step) as usize)
}

fn whole(op: BinaryOp, a: i128, b: i128) -> Option<Value> {
    Some(Value::Int(match op {
        BinaryOp::Add => a.checked_add(b)?,
        BinaryOp::Subtract => a.checked_sub(b)?,
        BinaryOp::Multiply => a.checked_mul(b)?,
        BinaryOp::Power if b >= 0 => a.checked_pow(u32::try_from(b).ok()?)?,
        BinaryOp::FloorDivide => {
            let quotient = a.checked_div(b)?;
            let inexact = a.checked_rem(b)? != 0;
            quotient - i128::from(inexact && (a < 0) != (b < 0))
        }
        BinaryOp::Remainder => {
            let remainder = a.checked_rem(b)?;
            match remainder != 0 && (remainder < 0) != (b < 0) {
                true => remainder.checked_add(b)?,
                false => remainder,
            }
        }
        BinaryOp::Divide | BinaryOp::Power => return float(op, a as f64, b as f64),
        BinaryOp::Concat => return None,
    }))
}

fn float(op: BinaryOp, a: f64, b: f64) -> Option<Value> {
    if b == 0.0
        && matches!(
            op,
            BinaryOp::Divide | BinaryOp::FloorDivide | BinaryOp::Remainder
        )
    {
        return None;
    }
    if a == 0.0 && b < 0.0 && op == BinaryOp::Power {
        return None;
    }
    Some(Value::Float(match op {
        BinaryOp::Add => a + b,
        BinaryOp::Subtract => a - b,
        BinaryOp::Multiply => a * b,
        BinaryOp::Divide => a / b,
        BinaryOp::Power => a.powf(b),
        BinaryOp::FloorDivide => divide(a, b).0,
        BinaryOp::Remainder => divide(a, b).1,
        BinaryOp::Concat => return None,
    }))
}

/// Quotient and remainder as Python has them: the remainder has the sign of the divisor.
fn divide(a: f64, b: f64) -> (f64, f64) {
    let mut remainder = a % b;
    let mut quotient = (a - remainder) / b;
    if remainder == 0.0 {
        remainder = 0.0_f64.copysign(b);
    } else if (remainder < 0.0) != (b < 0.0) {
        remainder += b;
        quotient -= 1.0;
    }
    let floored = quotient.floor();
    (floored + f64::from(quotient - floored > 0.5), remainder)
}
