//! JSON into the template engine, and out of it: the `tojson` filter as Transformers has it, which is `json.dumps`
//! with `ensure_ascii=False` and the keys in their order.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Values nested deeper than this are refused.
const MAX_DEPTH: usize = 64;
/// Longer JSON is refused, because one value may stand in many places.
const MAX_BYTES: usize = 16 << 20;

/// A JSON value as the engine's own, keys in their order.
pub(super) fn value(json: &serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(value), _) => Value::from(value),
            (_, Some(value)) => Value::from(value),
            _ => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(value).collect(),
        Json::Object(entries) => Value::from_pairs(
            entries
                .iter()
                .map(|(key, item)| (key.as_str(), value(item))),
        ),
    }
}

/// `value | tojson(indent=…, separators=…, ensure_ascii=…, sort_keys=…)`.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent = match options.get::<Option<Value>>("indent")? {
        None => None,
        Some(indent) if indent.is_none() => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(indent)?.min(64)),
        }),
    };
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "separators must be two strings",
            ));
        }
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    let mut writer = Writer {
        out: String::new(),
        indent,
        item,
        key,
        ascii: options
            .get::<Option<bool>>("ensure_ascii")?
            .unwrap_or(false),
        sort: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    writer.value(value, 0)?;
    Ok(Value::from(writer.out))
}

struct Writer {
    out: String,
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sort: bool,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let refuse = |why: String| Err(Error::new(ErrorKind::InvalidOperation, why));
        if depth > MAX_DEPTH || self.out.len() > MAX_BYTES {
            return refuse("a value is too deep or too large for JSON".into());
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self
                .out
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => self.out.push_str(&value.to_string()),
            ValueKind::Number => {
                let number = f64::try_from(value.clone())?;
                self.out.push_str(&float(number));
            }
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                self.group(('[', ']'), value.try_iter()?, depth, |writer, item| {
                    writer.value(&item, depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort {
                    keys.sort();
                }
                self.group(('{', '}'), keys.into_iter(), depth, |writer, key| {
                    match key.as_str() {
                        Some(text) => writer.string(text),
                        None => writer.string(&key.to_string()),
                    }
                    let separator = writer.key.clone();
                    writer.out.push_str(&separator);
                    writer.value(&value.get_item(&key)?, depth + 1)
                })?;
            }
            kind => return refuse(format!("a value of kind {kind} cannot be JSON")),
        }
        Ok(())
    }

    fn group(
        &mut self,
        (open, close): (char, char),
        items: impl Iterator<Item = Value>,
        depth: usize,
        mut write: impl FnMut(&mut Self, Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        let mut empty = true;
        for item in items {
            if !empty {
                let separator = self.item.clone();
                self.out.push_str(&separator);
            }
            empty = false;
            self.new_line(depth + 1);
            write(self, item)?;
        }
        if !empty {
            self.new_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{C}' => self.out.push_str("\\f"),
                c if c < ' ' || self.ascii && c > '~' => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// A float as Python's `repr` and `json` write it: the shortest digits, with an exponent below 1e-4 and from 1e16.
pub(super) fn float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".into();
    }
    if number.is_infinite() {
        return if number > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .into();
    }
    if number == 0.0 || (1e-4..1e16).contains(&number.abs()) {
        return format!("{number:?}");
    }
    let text = format!("{number:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    match exponent.strip_prefix('-') {
        Some(exponent) => format!("{digits}e-{exponent:0>2}"),
        None => format!("{digits}e+{exponent:0>2}"),
    }
}
