//! The values of a rendering, each of which is paid for.

use std::cell::Cell;
use std::cmp::Ordering;
use std::rc::Rc;

use super::ast::NameId;
use super::error::Fault;
use super::meter::{Hold, Meter};

/// How deep values may lie in values: what walks or drops them recurses as deep.
pub(super) const MAX_DEPTH: u32 = 128;

/// What a heap value costs besides its content.
const OVERHEAD: usize = 64;

const ITEM: usize = size_of::<Value>();

/// A value. Values never change, except for namespaces, which belong to the renderer.
#[derive(Debug, Clone)]
pub(super) enum Value {
    Undefined,
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Rc<Text>),
    List(Rc<List>),
    Map(Rc<Map>),
    /// By its place in the renderer's table, so that no namespace owns itself.
    Namespace(usize),
    Function(&'static str),
    Macro(Rc<MacroValue>),
    Loop(Rc<LoopValue>),
    Joiner(Rc<Joiner>),
    Cycler(Rc<Cycler>),
}

#[derive(Debug)]
pub(super) struct MacroValue {
    /// Its place in the program.
    pub(super) at: usize,
    /// Variables of the blocks around its definition.
    pub(super) captured: Vec<(NameId, Value)>,
    pub(super) depth: u32,
    pub(super) _hold: Hold,
}

#[derive(Debug)]
pub(super) struct LoopValue {
    /// Its place in the program.
    pub(super) at: usize,
    pub(super) items: Rc<List>,
    pub(super) index: Cell<usize>,
    /// How many loops it recurses from.
    pub(super) level: usize,
    /// What `changed` was asked last, in the renderer's table.
    pub(super) changed: Cell<Option<usize>>,
}

#[derive(Debug)]
pub(super) struct Joiner {
    pub(super) separator: Value,
    pub(super) used: Cell<bool>,
}

#[derive(Debug)]
pub(super) struct Cycler {
    pub(super) items: Rc<List>,
    pub(super) at: Cell<usize>,
}

/// A string, growing or done.
#[derive(Debug)]
pub(super) struct Text {
    text: String,
    hold: Hold,
}

impl Text {
    pub(super) fn new(meter: &Rc<Meter>) -> Result<Self, Fault> {
        meter.work(1)?;
        Ok(Self {
            text: String::new(),
            hold: Hold::new(meter, OVERHEAD)?,
        })
    }

    pub(super) fn as_str(&self) -> &str {
        &self.text
    }

    #[cold]
    fn grow(&mut self, more: usize) -> Result<(), Fault> {
        let (len, old) = (self.text.len(), self.text.capacity());
        let capacity = len.saturating_add(more).max(old.saturating_mul(2)).max(16);
        let meter = self.hold.meter();
        meter.copy(len)?;
        // While the text moves, both buffers are there.
        self.hold.add(capacity)?;
        self.text.reserve_exact(capacity - len);
        self.hold
            .keep(OVERHEAD + self.text.capacity().max(capacity));
        Ok(())
    }

    pub(super) fn push_str(&mut self, text: &str) -> Result<(), Fault> {
        if self.text.capacity() - self.text.len() < text.len() {
            self.grow(text.len())?;
        }
        self.hold.meter().copy(text.len())?;
        self.text.push_str(text);
        Ok(())
    }

    pub(super) fn push(&mut self, c: char) -> Result<(), Fault> {
        if self.text.capacity() - self.text.len() < c.len_utf8() {
            self.grow(c.len_utf8())?;
        }
        self.text.push(c);
        Ok(())
    }

    /// `text`, `n` times.
    pub(super) fn repeat(&mut self, text: &str, n: usize) -> Result<(), Fault> {
        let len = text.len().saturating_mul(n);
        if self.text.capacity() - self.text.len() < len {
            self.grow(len)?;
        }
        self.hold.meter().work(n / 8)?;
        self.hold.meter().copy(len)?;
        for _ in 0..n {
            self.text.push_str(text);
        }
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.text.len()
    }

    pub(super) fn into_string(mut self) -> String {
        std::mem::take(&mut self.text)
    }

    pub(super) fn into_value(mut self) -> Value {
        if self.text.capacity() > 2 * self.text.len() + OVERHEAD {
            self.text.shrink_to_fit();
            self.hold.keep(OVERHEAD + self.text.capacity());
        }
        Value::Str(Rc::new(self))
    }
}

/// A list or tuple, growing or done.
#[derive(Debug)]
pub(super) struct List {
    items: Vec<Value>,
    depth: u32,
    pub(super) is_tuple: bool,
    hold: Hold,
}

impl List {
    pub(super) fn new(meter: &Rc<Meter>) -> Result<Self, Fault> {
        meter.work(1)?;
        Ok(Self {
            items: Vec::new(),
            depth: 1,
            is_tuple: false,
            hold: Hold::new(meter, OVERHEAD)?,
        })
    }

    pub(super) fn push(&mut self, value: Value) -> Result<(), Fault> {
        let (len, old) = (self.items.len(), self.items.capacity());
        if len == old {
            let capacity = (old * 2).max(4);
            self.hold.meter().work(capacity / 4)?;
            self.hold.add(capacity * ITEM)?;
            self.items.reserve_exact(capacity - len);
            self.hold.keep(OVERHEAD + capacity * ITEM);
        }
        self.depth = self.depth.max(deeper(&value)?);
        self.items.push(value);
        Ok(())
    }

    pub(super) fn extend(&mut self, values: &[Value]) -> Result<(), Fault> {
        self.hold.meter().work(values.len() / 2)?;
        values.iter().try_for_each(|value| self.push(value.clone()))
    }

    pub(super) fn items(&self) -> &[Value] {
        &self.items
    }

    pub(super) fn into_value(mut self) -> Value {
        if self.items.capacity() > 2 * self.items.len() + 4 {
            self.items.shrink_to_fit();
            self.hold.keep(OVERHEAD + self.items.capacity() * ITEM);
        }
        Value::List(Rc::new(self))
    }

    pub(super) fn into_tuple(mut self) -> Value {
        self.is_tuple = true;
        self.into_value()
    }
}

/// A dictionary, its entries in the order in which they were made.
#[derive(Debug)]
pub(super) struct Map {
    entries: Vec<(Value, Value)>,
    /// Places of the entries in the order of their keys, where there are many.
    sorted: Vec<u32>,
    depth: u32,
    _hold: Hold,
}

/// Up to so many entries are looked through.
const FEW: usize = 8;

impl Map {
    /// Of entries with the same key, the last counts.
    pub(super) fn new(
        meter: &Rc<Meter>,
        pairs: impl Iterator<Item = Result<(Value, Value), Fault>>,
    ) -> Result<Self, Fault> {
        let mut hold = Hold::new(meter, OVERHEAD)?;
        let mut entries: Vec<(Value, Value)> = Vec::new();
        let mut depth = 1;
        for pair in pairs {
            let (key, value) = pair?;
            depth = depth.max(deeper(&key)?).max(deeper(&value)?);
            if entries.len() == entries.capacity() {
                let capacity = (entries.len() * 2).max(4);
                hold.add(capacity * (2 * ITEM + 4))?;
                entries.reserve_exact(capacity - entries.len());
                hold.keep(OVERHEAD + capacity * (2 * ITEM + 4));
            }
            entries.push((key, value));
        }
        let mut map = Self {
            entries,
            sorted: Vec::new(),
            depth,
            _hold: hold,
        };
        map.index(meter)?;
        Ok(map)
    }

    /// Merges entries of the same key, and sorts where there are many.
    fn index(&mut self, meter: &Rc<Meter>) -> Result<(), Fault> {
        let n = self.entries.len();
        let places: Vec<u32> = (0..n as u32).collect();
        let key = |at: u32| &self.entries[at as usize].0;
        let sorted = sort(places, |a, b| compare(key(*a), key(*b), meter))?;
        let mut doubled = false;
        let mut replaced = vec![None; n];
        for pair in sorted.windows(2) {
            if compare(key(pair[0]), key(pair[1]), meter)? == Ordering::Equal {
                // The sort is stable: the later entry stands behind. Values move to the first of the run.
                doubled = true;
                let first = replaced[pair[0] as usize].unwrap_or(pair[0]);
                replaced[pair[1] as usize] = Some(first);
            }
        }
        if doubled {
            for (at, replaced) in replaced.iter().enumerate() {
                if let Some(first) = *replaced {
                    self.entries[first as usize].1 = self.entries[at].1.clone();
                }
            }
            let mut at = 0;
            self.entries.retain(|_| {
                at += 1;
                replaced[at - 1].is_none()
            });
            return self.index(meter);
        }
        if n > FEW {
            self.sorted = sorted;
        }
        Ok(())
    }

    pub(super) fn entries(&self) -> &[(Value, Value)] {
        &self.entries
    }

    pub(super) fn get(&self, key: &Value, meter: &Meter) -> Result<Option<&Value>, Fault> {
        if self.sorted.is_empty() {
            for (found, value) in &self.entries {
                if compare(found, key, meter)? == Ordering::Equal {
                    return Ok(Some(value));
                }
            }
            return Ok(None);
        }
        let (mut low, mut high) = (0, self.sorted.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            let (found, value) = &self.entries[self.sorted[middle] as usize];
            match compare(found, key, meter)? {
                Ordering::Less => low = middle + 1,
                Ordering::Greater => high = middle,
                Ordering::Equal => return Ok(Some(value)),
            }
        }
        Ok(None)
    }

    pub(super) fn get_str(&self, name: &str) -> Option<&Value> {
        if self.sorted.is_empty() {
            let mut entries = self.entries.iter();
            let found = entries.find(|(key, _)| key.as_str() == Some(name))?;
            return Some(&found.1);
        }
        let place = self.sorted.binary_search_by(|at| {
            let key = &self.entries[*at as usize].0;
            match key.as_str() {
                Some(key) => key.cmp(name),
                None => rank(key).cmp(&STR_RANK),
            }
        });
        Some(&self.entries[self.sorted[place.ok()?] as usize].1)
    }
}

/// How deep a list with `value` in it is.
fn deeper(value: &Value) -> Result<u32, Fault> {
    let depth = value.depth() + 1;
    if depth > MAX_DEPTH {
        let problem = format!("values lie in values deeper than {MAX_DEPTH} levels");
        return Err(Fault::new(problem));
    }
    Ok(depth)
}

impl Value {
    pub(super) fn str(text: &str, meter: &Rc<Meter>) -> Result<Self, Fault> {
        let mut value = Text::new(meter)?;
        value.push_str(text)?;
        Ok(value.into_value())
    }

    pub(super) fn list(
        values: impl IntoIterator<Item = Value>,
        meter: &Rc<Meter>,
    ) -> Result<Self, Fault> {
        let mut list = List::new(meter)?;
        for value in values {
            list.push(value)?;
        }
        Ok(list.into_value())
    }

    pub(super) fn tuple(
        values: impl IntoIterator<Item = Value>,
        meter: &Rc<Meter>,
    ) -> Result<Self, Fault> {
        let mut list = List::new(meter)?;
        for value in values {
            list.push(value)?;
        }
        Ok(list.into_tuple())
    }

    pub(super) fn usize(number: usize) -> Self {
        Self::Int(number as i128)
    }

    /// A JSON value, keys in their order.
    pub(super) fn from_json(json: &serde_json::Value, meter: &Rc<Meter>) -> Result<Self, Fault> {
        Self::from_json_at(json, meter, 0)
    }

    fn from_json_at(
        json: &serde_json::Value,
        meter: &Rc<Meter>,
        depth: u32,
    ) -> Result<Self, Fault> {
        use serde_json::Value as Json;
        if depth > MAX_DEPTH {
            return Err(Fault::new(format!(
                "the conversation nests deeper than {MAX_DEPTH} levels"
            )));
        }
        Ok(match json {
            Json::Null => Value::None,
            Json::Bool(value) => Value::Bool(*value),
            Json::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(value), _) => Value::Int(value.into()),
                (_, Some(value)) => Value::Int(value.into()),
                _ => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => Value::str(text, meter)?,
            Json::Array(items) => {
                let mut list = List::new(meter)?;
                for item in items {
                    list.push(Self::from_json_at(item, meter, depth + 1)?)?;
                }
                list.into_value()
            }
            Json::Object(entries) => {
                let pairs = entries.iter().map(|(key, item)| {
                    let value = Self::from_json_at(item, meter, depth + 1)?;
                    Ok((Value::str(key, meter)?, value))
                });
                Value::Map(Rc::new(Map::new(meter, pairs)?))
            }
        })
    }

    /// How deep values lie in this one.
    pub(super) fn depth(&self) -> u32 {
        match self {
            Value::List(list) => list.depth,
            Value::Map(map) => map.depth,
            Value::Macro(value) => value.depth,
            Value::Loop(value) => value.items.depth + 1,
            Value::Joiner(joiner) => joiner.separator.depth() + 1,
            Value::Cycler(cycler) => cycler.items.depth + 1,
            _ => 0,
        }
    }

    pub(super) fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(text) => Some(text.as_str()),
            _ => None,
        }
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Value::Undefined)
    }

    /// An integer, or what Python takes for one.
    pub(super) fn as_int(&self) -> Option<i128> {
        match self {
            Value::Int(number) => Some(*number),
            Value::Bool(value) => Some(i128::from(*value)),
            _ => None,
        }
    }

    pub(super) fn as_float(&self) -> Option<f64> {
        match self {
            Value::Float(number) => Some(*number),
            other => other.as_int().map(|number| number as f64),
        }
    }

    pub(super) fn is_true(&self) -> bool {
        match self {
            Value::Undefined | Value::None => false,
            Value::Bool(value) => *value,
            Value::Int(number) => *number != 0,
            Value::Float(number) => *number != 0.0,
            Value::Str(text) => !text.as_str().is_empty(),
            Value::List(list) => !list.items.is_empty(),
            Value::Map(map) => !map.entries.is_empty(),
            _ => true,
        }
    }

    /// What kind of value this is, for messages.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Value::Undefined => "undefined",
            Value::None => "none",
            Value::Bool(_) => "bool",
            Value::Int(_) | Value::Float(_) => "number",
            Value::Str(_) => "string",
            Value::List(list) if list.is_tuple => "tuple",
            Value::List(_) => "list",
            Value::Map(_) => "map",
            Value::Namespace(_) => "namespace",
            Value::Function(_) => "function",
            Value::Macro(_) => "macro",
            Value::Loop(_) => "loop",
            Value::Joiner(_) => "joiner",
            Value::Cycler(_) => "cycler",
        }
    }
}

const STR_RANK: u8 = 3;

fn rank(value: &Value) -> u8 {
    match value {
        Value::Undefined => 0,
        Value::None => 1,
        Value::Bool(_) | Value::Int(_) | Value::Float(_) => 2,
        Value::Str(_) => STR_RANK,
        Value::List(list) => 4 + u8::from(list.is_tuple),
        Value::Map(_) => 6,
        Value::Namespace(_) => 7,
        Value::Function(_) => 8,
        Value::Macro(_) => 9,
        Value::Loop(_) => 10,
        Value::Joiner(_) => 11,
        Value::Cycler(_) => 12,
    }
}

/// An order of all values: numbers by size, strings by code points, lists item by item; else by kind. What is no data
/// is equal to itself alone.
pub(super) fn compare(a: &Value, b: &Value, meter: &Meter) -> Result<Ordering, Fault> {
    meter.work(1)?;
    let address = |value: &Value| match value {
        Value::Namespace(at) => *at,
        Value::Function(name) => name.as_ptr().addr(),
        Value::Macro(value) => Rc::as_ptr(value).addr(),
        Value::Loop(value) => Rc::as_ptr(value).addr(),
        Value::Joiner(value) => Rc::as_ptr(value).addr(),
        Value::Cycler(value) => Rc::as_ptr(value).addr(),
        _ => 0,
    };
    Ok(match (a, b) {
        (Value::Str(a), Value::Str(b)) => {
            meter.copy(a.len().min(b.len()))?;
            a.as_str().cmp(b.as_str())
        }
        (Value::List(a), Value::List(b)) if a.is_tuple == b.is_tuple => {
            if Rc::ptr_eq(a, b) {
                return Ok(Ordering::Equal);
            }
            for (a, b) in a.items.iter().zip(&b.items) {
                let order = compare(a, b, meter)?;
                if order != Ordering::Equal {
                    return Ok(order);
                }
            }
            a.items.len().cmp(&b.items.len())
        }
        (Value::Map(a), Value::Map(b)) => {
            if Rc::ptr_eq(a, b) {
                return Ok(Ordering::Equal);
            }
            let order = a.entries.len().cmp(&b.entries.len());
            if order != Ordering::Equal {
                return Ok(order);
            }
            for (key, value) in &a.entries {
                let order = match b.get(key, meter)? {
                    Some(other) => compare(value, other, meter)?,
                    None => Ordering::Less,
                };
                if order != Ordering::Equal {
                    return Ok(order);
                }
            }
            Ordering::Equal
        }
        _ => match (a.as_int(), b.as_int(), a.as_float(), b.as_float()) {
            (Some(a), Some(b), ..) => a.cmp(&b),
            (_, _, Some(a), Some(b)) if a == b => Ordering::Equal,
            (_, _, Some(a), Some(b)) => a.total_cmp(&b),
            _ => rank(a).cmp(&rank(b)).then(address(a).cmp(&address(b))),
        },
    })
}

pub(super) fn equal(a: &Value, b: &Value, meter: &Meter) -> Result<bool, Fault> {
    if let (Value::Str(a), Value::Str(b)) = (a, b)
        && a.len() != b.len()
    {
        return Ok(false);
    }
    Ok(compare(a, b, meter)? == Ordering::Equal)
}

/// Sorts, stably, by an order that may fail.
pub(super) fn sort<T: Clone>(
    mut items: Vec<T>,
    mut order: impl FnMut(&T, &T) -> Result<Ordering, Fault>,
) -> Result<Vec<T>, Fault> {
    let n = items.len();
    let mut sorted = items.clone();
    let mut run = 1;
    while run < n {
        sorted.clear();
        for pair in items.chunks(2 * run) {
            let (mut left, mut right) = pair.split_at(run.min(pair.len()));
            while let ([a, rest_a @ ..], [b, rest_b @ ..]) = (left, right) {
                if order(a, b)? == Ordering::Greater {
                    sorted.push(b.clone());
                    right = rest_b;
                } else {
                    sorted.push(a.clone());
                    left = rest_a;
                }
            }
            sorted.extend_from_slice(left);
            sorted.extend_from_slice(right);
        }
        std::mem::swap(&mut items, &mut sorted);
        run *= 2;
    }
    Ok(items)
}
