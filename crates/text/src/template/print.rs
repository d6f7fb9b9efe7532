//! Values as text, as Python prints them.

use super::error::Fault;
use super::render::Renderer;
use super::value::{MAX_DEPTH, Text, Value};

impl Renderer<'_> {
    /// Appends `str(value)`.
    pub(super) fn print(&self, value: &Value, out: &mut Text) -> Result<(), Fault> {
        match value {
            Value::Str(text) => out.push_str(text.as_str()),
            Value::Undefined => Ok(()),
            other => self.represent(other, out, 0),
        }
    }

    /// `str(value)` as a value.
    pub(super) fn string(&self, value: &Value) -> Result<Value, Fault> {
        if let Value::Str(_) = value {
            return Ok(value.clone());
        }
        let mut text = Text::new(&self.meter)?;
        self.print(value, &mut text)?;
        Ok(text.into_value())
    }

    /// Appends `repr(value)`.
    fn represent(&self, value: &Value, out: &mut Text, depth: u32) -> Result<(), Fault> {
        self.meter.work(1)?;
        if depth > MAX_DEPTH {
            return Err(Fault::new("a value that contains itself can't be printed"));
        }
        match value {
            Value::Undefined => out.push_str("undefined"),
            Value::None => out.push_str("None"),
            Value::Bool(true) => out.push_str("True"),
            Value::Bool(false) => out.push_str("False"),
            Value::Int(number) => out.push_str(&number.to_string()),
            Value::Float(number) => out.push_str(&float(*number)),
            Value::Str(text) => self.quote(text.as_str(), out),
            Value::List(list) => {
                out.push(if list.is_tuple { '(' } else { '[' })?;
                for (at, item) in list.items().iter().enumerate() {
                    if at > 0 {
                        out.push_str(", ")?;
                    }
                    self.represent(item, out, depth + 1)?;
                }
                if list.is_tuple && list.items().len() == 1 {
                    out.push(',')?;
                }
                out.push(if list.is_tuple { ')' } else { ']' })
            }
            Value::Map(map) => {
                out.push('{')?;
                for (at, (key, item)) in map.entries().iter().enumerate() {
                    if at > 0 {
                        out.push_str(", ")?;
                    }
                    self.represent(key, out, depth + 1)?;
                    out.push_str(": ")?;
                    self.represent(item, out, depth + 1)?;
                }
                out.push('}')
            }
            Value::Namespace(at) => {
                out.push('{')?;
                for (at, (name, item)) in self.namespaces[*at].iter().enumerate() {
                    if at > 0 {
                        out.push_str(", ")?;
                    }
                    self.represent(name, out, depth + 1)?;
                    out.push_str(": ")?;
                    self.represent(item, out, depth + 1)?;
                }
                out.push('}')
            }
            Value::Loop(value) => {
                let (at, n) = (value.index.get(), value.items.items().len());
                out.push_str(&format!("<loop {at}/{n}>"))
            }
            Value::Macro(value) => {
                let name = self.program.macros[value.at].name;
                out.push_str("<macro ")?;
                out.push_str(&self.program.names[name as usize])?;
                out.push('>')
            }
            other => {
                out.push('<')?;
                out.push_str(other.kind())?;
                out.push('>')
            }
        }
    }

    fn quote(&self, text: &str, out: &mut Text) -> Result<(), Fault> {
        self.meter.scan(text.len())?;
        let quote = match text.contains('\'') && !text.contains('"') {
            true => '"',
            false => '\'',
        };
        out.push(quote)?;
        let mut from = 0;
        for (at, c) in text.char_indices() {
            let special = c == quote || c == '\\' || c.is_control();
            if !special {
                continue;
            }
            out.push_str(&text[from..at])?;
            from = at + c.len_utf8();
            match c {
                '\n' => out.push_str("\\n")?,
                '\r' => out.push_str("\\r")?,
                '\t' => out.push_str("\\t")?,
                c if c.is_control() => out.push_str(&format!("\\x{:02x}", u32::from(c)))?,
                c => {
                    out.push('\\')?;
                    out.push(c)?;
                }
            }
        }
        out.push_str(&text[from..])?;
        out.push(quote)
    }
}

/// A float as Python writes it: the shortest digits, with an exponent below 1e-4 and from 1e16.
pub(super) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.into();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_as_python_writes_them() {
        let cases = [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5e-5, "-2.5e-05"),
            (1e16, "1e+16"),
            (123456789012345.0, "123456789012345.0"),
            (1e-4, "0.0001"),
            (1.5e300, "1.5e+300"),
            (0.0, "0.0"),
        ];
        for (number, expected) in cases {
            assert_eq!(float(number), expected);
        }
    }
}
