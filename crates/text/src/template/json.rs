//! The `tojson` filter as Transformers has it, which is `json.dumps` with `ensure_ascii=False` and the keys in their
//! order.

use std::rc::Rc;

use super::args::Args;
use super::error::Fault;
use super::render::Renderer;
use super::value::{self, MAX_DEPTH, Text, Value};

/// `value | tojson(indent=…, separators=…, ensure_ascii=…, sort_keys=…)`.
#[inline(never)]
pub(super) fn filter(
    renderer: &mut Renderer<'_>,
    value: &Value,
    args: &mut Args,
) -> Result<Value, Fault> {
    let meter = Rc::clone(&renderer.meter);
    let ascii = args
        .take("ensure_ascii")?
        .is_some_and(|flag| flag.is_true());
    let sort = args.take("sort_keys")?.is_some_and(|flag| flag.is_true());
    let separators = args.take("separators")?;
    let indent = match args.next("indent")? {
        None | Some(Value::None | Value::Undefined) => None,
        Some(text @ Value::Str(_)) => Some(text),
        Some(other) => {
            let Some(width) = other.as_int() else {
                let kind = other.kind();
                return Err(Fault::new(format!(
                    "`indent`: expected a number, found {kind}"
                )));
            };
            let mut spaces = Text::new(&meter)?;
            spaces.repeat(" ", width.clamp(0, 64) as usize)?;
            Some(spaces.into_value())
        }
    };
    args.done()?;
    let (item, key) = match separators {
        Some(Value::List(list)) => match list.items() {
            [item @ Value::Str(_), key @ Value::Str(_)] => (item.clone(), key.clone()),
            _ => return Err(Fault::new("`separators`: expected two strings")),
        },
        Some(Value::None) | None => {
            let item = if indent.is_some() { "," } else { ", " };
            (Value::str(item, &meter)?, Value::str(": ", &meter)?)
        }
        Some(_) => return Err(Fault::new("`separators`: expected two strings")),
    };
    let mut writer = Writer {
        out: Text::new(&meter)?,
        renderer,
        indent,
        item,
        key,
        ascii,
        sort,
    };
    writer.value(value, 0)?;
    Ok(writer.out.into_value())
}

struct Writer<'r, 'p> {
    renderer: &'r Renderer<'p>,
    out: Text,
    indent: Option<Value>,
    item: Value,
    key: Value,
    ascii: bool,
    sort: bool,
}

impl Writer<'_, '_> {
    fn value(&mut self, value: &Value, depth: u32) -> Result<(), Fault> {
        self.renderer.meter.work(1)?;
        if depth > MAX_DEPTH {
            return Err(Fault::new("a value that contains itself can't be JSON"));
        }
        match value {
            Value::None => self.out.push_str("null"),
            Value::Bool(true) => self.out.push_str("true"),
            Value::Bool(false) => self.out.push_str("false"),
            Value::Int(number) => self.out.push_str(&number.to_string()),
            Value::Float(number) if number.is_nan() => self.out.push_str("NaN"),
            Value::Float(number) if number.is_infinite() => {
                let text = if *number > 0.0 {
                    "Infinity"
                } else {
                    "-Infinity"
                };
                self.out.push_str(text)
            }
            Value::Float(number) => self.out.push_str(&super::print::float(*number)),
            Value::Str(text) => self.string(text.as_str()),
            Value::List(list) => {
                self.out.push('[')?;
                for (at, item) in list.items().iter().enumerate() {
                    self.before(at, depth)?;
                    self.value(item, depth + 1)?;
                }
                self.end(list.items().is_empty(), depth)?;
                self.out.push(']')
            }
            Value::Map(map) => self.map(map.entries(), depth),
            Value::Namespace(at) => {
                let renderer = self.renderer;
                self.map(&renderer.namespaces[*at], depth)
            }
            other => {
                let kind = other.kind();
                Err(Fault::new(format!("a value of kind {kind} can't be JSON")))
            }
        }
    }

    fn map(&mut self, entries: &[(Value, Value)], depth: u32) -> Result<(), Fault> {
        self.out.push('{')?;
        if self.sort {
            let meter = Rc::clone(&self.renderer.meter);
            let bytes = entries
                .len()
                .saturating_mul(2 * size_of::<&(Value, Value)>());
            let _hold = super::meter::Hold::new(&meter, bytes)?;
            let order =
                |a: &&(Value, Value), b: &&(Value, Value)| value::compare(&a.0, &b.0, &meter);
            for (at, (key, item)) in value::sort(entries.iter().collect(), order)?
                .into_iter()
                .enumerate()
            {
                self.entry(at, key, item, depth)?;
            }
        } else {
            for (at, (key, item)) in entries.iter().enumerate() {
                self.entry(at, key, item, depth)?;
            }
        }
        self.end(entries.is_empty(), depth)?;
        self.out.push('}')
    }

    fn entry(&mut self, at: usize, key: &Value, item: &Value, depth: u32) -> Result<(), Fault> {
        self.before(at, depth)?;
        let key = match key {
            Value::Str(_) => key.clone(),
            Value::None => Value::str("null", &self.renderer.meter)?,
            Value::Bool(true) => Value::str("true", &self.renderer.meter)?,
            Value::Bool(false) => Value::str("false", &self.renderer.meter)?,
            other => self.renderer.string(other)?,
        };
        self.string(key.as_str().unwrap_or_default())?;
        let separator = self.key.clone();
        self.out.push_str(separator.as_str().unwrap_or_default())?;
        self.value(item, depth + 1)
    }

    /// What stands before the item at a place.
    fn before(&mut self, at: usize, depth: u32) -> Result<(), Fault> {
        if at > 0 {
            self.out.push_str(self.item.as_str().unwrap_or_default())?;
        }
        self.new_line(depth + 1)
    }

    fn end(&mut self, is_empty: bool, depth: u32) -> Result<(), Fault> {
        if is_empty {
            return Ok(());
        }
        self.new_line(depth)
    }

    fn new_line(&mut self, depth: u32) -> Result<(), Fault> {
        if let Some(indent) = self.indent.as_ref().and_then(Value::as_str) {
            self.out.push('\n')?;
            self.out.repeat(indent, depth as usize)?;
        }
        Ok(())
    }

    fn string(&mut self, text: &str) -> Result<(), Fault> {
        self.renderer.meter.scan(text.len())?;
        self.out.push('"')?;
        let mut from = 0;
        for (at, c) in text.char_indices() {
            let special = c < ' ' || c == '"' || c == '\\' || self.ascii && c > '~';
            if !special {
                continue;
            }
            self.out.push_str(&text[from..at])?;
            from = at + c.len_utf8();
            match c {
                '"' => self.out.push_str("\\\"")?,
                '\\' => self.out.push_str("\\\\")?,
                '\n' => self.out.push_str("\\n")?,
                '\r' => self.out.push_str("\\r")?,
                '\t' => self.out.push_str("\\t")?,
                '\u{8}' => self.out.push_str("\\b")?,
                '\u{C}' => self.out.push_str("\\f")?,
                c => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"))?;
                    }
                }
            }
        }
        self.out.push_str(&text[from..])?;
        self.out.push('"')
    }
}
