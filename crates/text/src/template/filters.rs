//! Jinja's filters: `value | name(…)`.

use std::cmp::Ordering;
use std::rc::Rc;

use super::args::Args;
use super::error::{Fault, cut};
use super::meter::Hold;
use super::parser::MAX_ARGUMENTS;
use super::render::Renderer;
use super::value::{self, List, Map, Text, Value};
use super::{json, methods};

pub(super) const NAMES: [&str; 55] = [
    "abs",
    "attr",
    "batch",
    "bool",
    "capitalize",
    "chain",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "lines",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "split",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
    "xmlattr",
    "zip",
    "center",
    "striptags",
];

/// What `sort` and its kin need for each item while they work.
const SORTED_BYTES: usize = 4 * size_of::<Value>() + 16;

impl Renderer<'_> {
    #[inline(never)]
    pub(super) fn filter(
        &mut self,
        name: &str,
        value: Value,
        args: &mut Args,
    ) -> Result<Value, Fault> {
        let result = match name {
            // Nothing is HTML, so nothing is marked as safe.
            "safe" => value,
            "default" | "d" => {
                let other = args.next("default_value")?;
                if value.is_undefined() || args.flag("boolean")? && !value.is_true() {
                    match other {
                        Some(other) => other,
                        None => Value::str("", &self.meter)?,
                    }
                } else {
                    value
                }
            }
            "tojson" => return json::filter(self, &value, args),
            "string" => self.string(&value)?,
            "bool" => Value::Bool(value.is_true()),
            "list" => match &value {
                Value::List(list) if !list.is_tuple => value,
                Value::List(tuple) => {
                    let mut list = List::new(&self.meter)?;
                    list.extend(tuple.items())?;
                    list.into_value()
                }
                other => Value::List(self.items(other)?),
            },
            "length" | "count" => self.length(&value)?,
            "first" | "last" => self.first_or_last(name, &value)?,
            "items" => match &value {
                Value::Map(_) | Value::Namespace(_) => self.pairs(&value)?,
                other => {
                    let kind = other.kind();
                    return Err(Fault::new(format!("expected a map to list, found {kind}")));
                }
            },
            "abs" => match &value {
                Value::Float(number) => Value::Float(number.abs()),
                other => match other.as_int().and_then(i128::checked_abs) {
                    Some(number) => Value::Int(number),
                    None => return Err(Fault::new("expected a number")),
                },
            },
            "attr" => {
                let key = args.required("name")?;
                self.item(&value, &key)?
            }
            _ => return self.other_filter(name, value, args),
        };
        args.done()?;
        Ok(result)
    }

    #[inline(never)]
    fn other_filter(&mut self, name: &str, value: Value, args: &mut Args) -> Result<Value, Fault> {
        match name {
            "upper" | "lower" | "title" | "capitalize" | "trim" | "replace" | "split" | "lines"
            | "e" | "escape" | "forceescape" | "indent" | "wordcount" | "format" | "reverse"
            | "urlencode" | "center" | "truncate" => self.text_filter(name, &value, args),
            "int" | "float" | "round" => self.number_filter(name, &value, args),
            "join" => self.join_filter(&value, args),
            "sort" | "dictsort" | "groupby" | "unique" | "min" | "max" => {
                self.ordering_filter(name, &value, args)
            }
            "map" => self.map_filter(&value, args),
            "select" | "reject" | "selectattr" | "rejectattr" => {
                self.select_filter(name, &value, args)
            }
            "sum" | "batch" | "slice" | "chain" | "zip" | "pprint" => {
                self.list_filter(name, &value, args)
            }
            _ => Err(Fault::new(format!("unknown filter `{}`", cut(name)))),
        }
    }

    fn length(&self, value: &Value) -> Result<Value, Fault> {
        Ok(Value::usize(match value {
            Value::Str(text) => {
                self.meter.scan(text.len())?;
                text.as_str().chars().count()
            }
            Value::List(list) => list.items().len(),
            Value::Map(map) => map.entries().len(),
            Value::Namespace(at) => self.namespaces[*at].len(),
            Value::Undefined => 0,
            other => {
                let kind = other.kind();
                return Err(Fault::new(format!("a value of kind {kind} has no length")));
            }
        }))
    }

    fn first_or_last(&self, name: &str, value: &Value) -> Result<Value, Fault> {
        let first = name == "first";
        Ok(match value {
            Value::Str(text) => {
                let mut chars = text.as_str().chars();
                let found = if first {
                    chars.next()
                } else {
                    chars.next_back()
                };
                match found {
                    Some(c) => Value::str(c.encode_utf8(&mut [0; 4]), &self.meter)?,
                    None => Value::Undefined,
                }
            }
            other => {
                let list = self.items(other)?;
                let items = list.items();
                let found = if first { items.first() } else { items.last() };
                found.cloned().unwrap_or(Value::Undefined)
            }
        })
    }

    /// The entries of a map or namespace as a list of pairs.
    pub(super) fn pairs(&self, value: &Value) -> Result<Value, Fault> {
        let entries: &[(Value, Value)] = match value {
            Value::Map(map) => map.entries(),
            Value::Namespace(at) => &self.namespaces[*at],
            _ => &[],
        };
        let mut list = List::new(&self.meter)?;
        for (key, value) in entries {
            self.meter.work(1)?;
            list.push(Value::tuple([key.clone(), value.clone()], &self.meter)?)?;
        }
        Ok(list.into_value())
    }

    #[inline(never)]
    fn text_filter(&mut self, name: &str, value: &Value, args: &mut Args) -> Result<Value, Fault> {
        if name == "reverse" && !matches!(value, Value::Str(_)) {
            args.done()?;
            let items = self.items(value)?;
            let mut list = List::new(&self.meter)?;
            self.meter.work(items.items().len() / 4)?;
            for item in items.items().iter().rev() {
                list.push(item.clone())?;
            }
            return Ok(list.into_value());
        }
        let value = self.string(value)?;
        let text = value.as_str().unwrap_or_default();
        let meter = Rc::clone(&self.meter);
        meter.scan(text.len())?;
        let mut out = Text::new(&meter)?;
        match name {
            "upper" | "lower" | "capitalize" | "split" => {
                return self.string_method(&value, text, name, args);
            }
            "lines" => return self.string_method(&value, text, "splitlines", args),
            "trim" => return self.string_method(&value, text, "strip", args),
            "replace" => {
                for (at, name) in ["old", "new"].into_iter().enumerate() {
                    // Jinja makes strings of what is to be replaced.
                    let n = args.positional.len();
                    if let Some(place) = n.checked_sub(at + 1) {
                        let text = self.string(&args.positional[place])?;
                        args.positional[place] = text;
                    } else if let Some(text) = args.take(name)? {
                        let text = self.string(&text)?;
                        args.positional.insert(0, text);
                    }
                }
                return self.string_method(&value, text, "replace", args);
            }
            "title" => {
                let mut starts = true;
                for c in text.chars() {
                    if matches!(c, '-' | '(' | '{' | '[' | '<') || c.is_whitespace() {
                        starts = true;
                        out.push(c)?;
                    } else {
                        match std::mem::take(&mut starts) {
                            true => methods::push_all(&mut out, c.to_uppercase())?,
                            false => methods::push_all(&mut out, c.to_lowercase())?,
                        }
                    }
                }
            }
            "reverse" => {
                for c in text.chars().rev() {
                    out.push(c)?;
                }
            }
            "e" | "escape" | "forceescape" => {
                for c in text.chars() {
                    match c {
                        '&' => out.push_str("&amp;")?,
                        '<' => out.push_str("&lt;")?,
                        '>' => out.push_str("&gt;")?,
                        '"' => out.push_str("&#34;")?,
                        '\'' => out.push_str("&#39;")?,
                        c => out.push(c)?,
                    }
                }
            }
            "urlencode" => {
                for byte in text.bytes() {
                    match byte {
                        b'/' | b'.' | b'-' | b'_' => out.push(byte.into())?,
                        byte if byte.is_ascii_alphanumeric() => out.push(byte.into())?,
                        byte => out.push_str(&format!("%{byte:02X}"))?,
                    }
                }
            }
            "wordcount" => {
                args.done()?;
                let words = text.split(|c: char| !(c.is_alphanumeric() || c == '_'));
                return Ok(Value::usize(words.filter(|word| !word.is_empty()).count()));
            }
            "format" => return self.printf(text, args),
            "center" => {
                let width = args.count("width")?.unwrap_or(80);
                let missing = width.saturating_sub(text.chars().count());
                out.repeat(" ", missing / 2)?;
                out.push_str(text)?;
                out.repeat(" ", missing - missing / 2)?;
            }
            "truncate" => {
                let length = args.count("length")?.unwrap_or(255);
                let kill_words = args.flag("killwords")?;
                let end = args.string("end")?;
                let end = end.as_ref().and_then(Value::as_str).unwrap_or("...");
                let leeway = args.count("leeway")?.unwrap_or(5);
                meter.scan(end.len())?;
                if text.chars().count() <= length.saturating_add(leeway) {
                    out.push_str(text)?;
                } else {
                    let kept = length.saturating_sub(end.chars().count());
                    let at = text.char_indices().nth(kept).map_or(text.len(), |c| c.0);
                    let start = &text[..at];
                    let words = start.rfind(' ').map_or(start, |space| &start[..space]);
                    out.push_str(if kill_words { start } else { words })?;
                    out.push_str(end)?;
                }
            }
            _ => self.indent(text, args, &mut out)?,
        }
        args.done()?;
        Ok(out.into_value())
    }

    fn indent(&mut self, text: &str, args: &mut Args, out: &mut Text) -> Result<(), Fault> {
        let width = args.next("width")?;
        let first = args.flag("first")?;
        let blank = args.flag("blank")?;
        let indentation = match &width {
            Some(width @ Value::Str(_)) => width.clone(),
            width => {
                let width = width.as_ref().map_or(Some(4), Value::as_int);
                let Some(width) = width else {
                    return Err(Fault::new(
                        "expected a number of spaces or a text to indent by",
                    ));
                };
                let mut spaces = Text::new(&self.meter)?;
                spaces.repeat(" ", usize::try_from(width.max(0)).unwrap_or(usize::MAX))?;
                spaces.into_value()
            }
        };
        let indentation = indentation.as_str().unwrap_or_default();
        let text = text.strip_suffix('\n').unwrap_or(text);
        let text = text.strip_suffix('\r').unwrap_or(text);
        for (at, line) in text.split('\n').enumerate() {
            self.meter.work(1)?;
            if at > 0 {
                out.push('\n')?;
            }
            let is_blank = line.is_empty() || line == "\r";
            if if at == 0 { first } else { blank || !is_blank } {
                out.push_str(indentation)?;
            }
            out.push_str(line)?;
        }
        Ok(())
    }

    #[inline(never)]
    fn number_filter(
        &mut self,
        name: &str,
        value: &Value,
        args: &mut Args,
    ) -> Result<Value, Fault> {
        self.meter.scan(value.as_str().map_or(0, str::len))?;
        let whole = |number: f64| Value::Int(number.trunc() as i64 as i128);
        let result = match name {
            "int" => {
                let default = args.next("default")?.unwrap_or(Value::Int(0));
                let base = args.int("base")?.and_then(|base| u32::try_from(base).ok());
                let base = base.filter(|base| (2..=36).contains(base)).unwrap_or(10);
                match value {
                    Value::Bool(value) => Value::Int(i128::from(*value)),
                    Value::Int(number) => Value::Int(*number),
                    Value::Float(number) => whole(*number),
                    Value::Str(text) => {
                        let text = short(text.as_str().trim()).replace('_', "");
                        match i64::from_str_radix(&text, base) {
                            Ok(number) => Value::Int(number.into()),
                            Err(_) => text.parse().map_or(default, whole),
                        }
                    }
                    _ => default,
                }
            }
            "float" => {
                let default = args.next("default")?.unwrap_or(Value::Float(0.0));
                let number = match value {
                    Value::Str(text) => short(text.as_str().trim()).parse().ok(),
                    other => other.as_float(),
                };
                number.map_or(default, Value::Float)
            }
            _ => {
                let precision = args.int("precision")?.unwrap_or(0).clamp(-400, 400) as i32;
                let digits = precision.unsigned_abs() as usize;
                self.meter.work(super::format::digits_work(value, digits))?;
                let method = args.string("method")?;
                let method = method.as_ref().and_then(Value::as_str).unwrap_or("common");
                round(value, precision, method)?
            }
        };
        args.done()?;
        Ok(result)
    }

    #[inline(never)]
    fn join_filter(&mut self, value: &Value, args: &mut Args) -> Result<Value, Fault> {
        let separator = match args.next("d")? {
            None | Some(Value::None | Value::Undefined) => Value::str("", &self.meter)?,
            Some(other) => self.string(&other)?,
        };
        let attribute = args.next("attribute")?;
        args.done()?;
        let items = self.items(value)?;
        let mut out = Text::new(&self.meter)?;
        for (at, item) in items.items().iter().enumerate() {
            self.meter.work(1)?;
            if at > 0 {
                out.push_str(separator.as_str().unwrap_or_default())?;
            }
            match &attribute {
                Some(path) => {
                    let item = self.path_or(item, path, &Value::Undefined)?;
                    self.print(&item, &mut out)?;
                }
                None => self.print(item, &mut out)?,
            }
        }
        Ok(out.into_value())
    }

    /// The attribute of an item by a path such as `a.0.b`, or a place.
    pub(super) fn path(&self, item: &Value, path: &Value) -> Result<Value, Fault> {
        let Some(names) = path.as_str() else {
            return self.item(item, path);
        };
        let mut value = item.clone();
        for name in names.split('.') {
            self.meter.work(1)?;
            value = match name.parse() {
                Ok(place) => self.item(&value, &Value::Int(place))?,
                Err(_) => self.attribute(&value, name)?,
            };
        }
        Ok(value)
    }

    /// The same, or a default where there is nothing.
    fn path_or(&self, item: &Value, path: &Value, default: &Value) -> Result<Value, Fault> {
        let Some(names) = path.as_str() else {
            return self.item(item, path);
        };
        let mut value = item.clone();
        for name in names.split('.') {
            self.meter.work(1)?;
            if value.is_undefined() {
                return Ok(default.clone());
            }
            value = match name.parse() {
                Ok(place) => self.item(&value, &Value::Int(place))?,
                Err(_) => self.attribute(&value, name)?,
            };
        }
        Ok(if value.is_undefined() {
            default.clone()
        } else {
            value
        })
    }

    /// What items are ordered by: strings in lower case unless case counts.
    fn key(&self, key: Value, case_sensitive: bool) -> Result<Value, Fault> {
        match (&key, case_sensitive) {
            (Value::Str(text), false) => {
                self.meter.scan(text.len())?;
                let mut out = Text::new(&self.meter)?;
                for c in text.as_str().chars() {
                    methods::push_all(&mut out, c.to_lowercase())?;
                }
                Ok(out.into_value())
            }
            _ => Ok(key),
        }
    }

    /// Items with what they are ordered by.
    fn keyed(
        &self,
        items: &[Value],
        attribute: Option<&Value>,
        default: &Value,
        case_sensitive: bool,
    ) -> Result<(Hold, Vec<(Value, Value)>), Fault> {
        let hold = Hold::new(&self.meter, items.len().saturating_mul(SORTED_BYTES))?;
        let mut keyed = Vec::with_capacity(items.len());
        for item in items {
            self.meter.work(1)?;
            let paths = attribute.and_then(Value::as_str).unwrap_or_default();
            let key = match attribute {
                None => self.key(item.clone(), case_sensitive)?,
                Some(_) if paths.contains(',') => {
                    let mut parts = List::new(&self.meter)?;
                    for path in paths
                        .split(',')
                        .map(str::trim)
                        .filter(|path| !path.is_empty())
                    {
                        let path = Value::str(path, &self.meter)?;
                        let part = self.path_or(item, &path, default)?;
                        parts.push(self.key(part, case_sensitive)?)?;
                    }
                    parts.into_value()
                }
                Some(path) => {
                    let key = self.path_or(item, path, default)?;
                    self.key(key, case_sensitive)?
                }
            };
            keyed.push((key, item.clone()));
        }
        Ok((hold, keyed))
    }

    #[inline(never)]
    fn ordering_filter(
        &mut self,
        name: &str,
        value: &Value,
        args: &mut Args,
    ) -> Result<Value, Fault> {
        let meter = Rc::clone(&self.meter);
        let reverse = match name {
            "sort" => args.flag("reverse")?,
            _ => false,
        };
        let case_sensitive = match name {
            "groupby" => false,
            _ => args.flag("case_sensitive")?,
        };
        let by_value = match name {
            "dictsort" => {
                let by = args.string("by")?;
                by.as_ref().and_then(Value::as_str) == Some("value")
            }
            _ => false,
        };
        let reverse = reverse || name == "dictsort" && args.flag("reverse")?;
        let attribute = match name {
            "groupby" => Some(args.required("attribute")?),
            "dictsort" => Some(Value::Int(i128::from(by_value))),
            _ => args
                .next("attribute")?
                .filter(|path| !matches!(path, Value::None)),
        };
        let default = match name {
            "groupby" => args.next("default")?.unwrap_or(Value::Undefined),
            _ => Value::Undefined,
        };
        let case_sensitive = case_sensitive || name == "groupby" && args.flag("case_sensitive")?;
        args.done()?;
        let items = match (name, value) {
            ("dictsort", Value::Map(_)) => self.items(&self.pairs(value)?)?,
            ("dictsort", other) => {
                let kind = other.kind();
                return Err(Fault::new(format!("expected a map to sort, found {kind}")));
            }
            _ => self.items(value)?,
        };
        let (_hold, keyed) =
            self.keyed(items.items(), attribute.as_ref(), &default, case_sensitive)?;
        let order = |a: &(Value, Value), b: &(Value, Value)| value::compare(&a.0, &b.0, &meter);
        let mut out = List::new(&meter)?;
        match name {
            "min" | "max" => {
                let mut best: Option<&(Value, Value)> = None;
                for item in &keyed {
                    let better = match best {
                        None => true,
                        Some(best) if name == "min" => order(item, best)? == Ordering::Less,
                        Some(best) => order(item, best)? != Ordering::Less,
                    };
                    if better {
                        best = Some(item);
                    }
                }
                return Ok(best.map_or(Value::Undefined, |(_, item)| item.clone()));
            }
            "unique" => {
                // Equal items stand together once sorted, the first of them first.
                let places: Vec<u32> = (0..keyed.len() as u32).collect();
                let at = |place: u32| &keyed[place as usize];
                let sorted = value::sort(places, |a, b| order(at(*a), at(*b)))?;
                let mut first: Vec<u32> = Vec::new();
                for place in sorted {
                    let doubled = match first.last() {
                        Some(last) => order(at(*last), at(place))? == Ordering::Equal,
                        None => false,
                    };
                    if !doubled {
                        first.push(place);
                    }
                }
                first.sort_unstable();
                for place in first {
                    out.push(at(place).1.clone())?;
                }
            }
            "groupby" => {
                let sorted = value::sort(keyed, order)?;
                let mut rest = sorted.as_slice();
                while let Some(first) = rest.first() {
                    let mut group = List::new(&meter)?;
                    let mut n = 0;
                    while n < rest.len() && order(first, &rest[n])? == Ordering::Equal {
                        group.push(rest[n].1.clone())?;
                        n += 1;
                    }
                    let path = attribute.as_ref().unwrap_or(&Value::Undefined);
                    let last = &rest[n - 1].1;
                    let grouper = self.path_or(last, path, &default)?;
                    out.push(Value::tuple([grouper, group.into_value()], &meter)?)?;
                    rest = &rest[n..];
                }
            }
            _ => {
                let sorted = value::sort(keyed, |a, b| {
                    let order = order(a, b)?;
                    Ok(if reverse { order.reverse() } else { order })
                })?;
                for (_, item) in sorted {
                    out.push(item)?;
                }
            }
        }
        Ok(out.into_value())
    }

    #[inline(never)]
    fn map_filter(&mut self, value: &Value, args: &mut Args) -> Result<Value, Fault> {
        let items = self.items(value)?;
        let mut out = List::new(&self.meter)?;
        if let Some(attribute) = args.take("attribute")? {
            let default = args.take("default")?;
            args.done()?;
            for item in items.items() {
                self.meter.work(1)?;
                let found = match &default {
                    Some(default) => self.path_or(item, &attribute, default)?,
                    None => self.path(item, &attribute)?,
                };
                out.push(found)?;
            }
            return Ok(out.into_value());
        }
        let name = args.required_string("name")?;
        self.enter()?;
        for item in items.items() {
            self.meter
                .work(1 + args.positional.len() + args.named.len())?;
            let mut args = Args {
                positional: args.positional.clone(),
                named: args.named.clone(),
            };
            let name = name.as_str().unwrap_or_default();
            out.push(self.filter(name, item.clone(), &mut args)?)?;
        }
        self.leave();
        Ok(out.into_value())
    }

    #[inline(never)]
    fn select_filter(
        &mut self,
        name: &str,
        value: &Value,
        args: &mut Args,
    ) -> Result<Value, Fault> {
        let items = self.items(value)?;
        let attribute = match name {
            "selectattr" | "rejectattr" => Some(args.required("attribute")?),
            _ => None,
        };
        let test = args.string("test")?;
        let wanted = name.starts_with("select");
        let mut out = List::new(&self.meter)?;
        for item in items.items() {
            self.meter
                .work(1 + args.positional.len() + args.named.len())?;
            let tested = match &attribute {
                Some(path) => self.path(item, path)?,
                None => item.clone(),
            };
            let holds = match test.as_ref().and_then(Value::as_str) {
                None => tested.is_true(),
                Some(test) => {
                    let mut args = Args {
                        positional: args.positional.clone(),
                        named: args.named.clone(),
                    };
                    self.test(test, &tested, &mut args)?
                }
            };
            if holds == wanted {
                out.push(item.clone())?;
            }
        }
        Ok(out.into_value())
    }

    #[inline(never)]
    fn list_filter(&mut self, name: &str, value: &Value, args: &mut Args) -> Result<Value, Fault> {
        let meter = Rc::clone(&self.meter);
        let mut out = List::new(&meter)?;
        match name {
            "sum" => {
                let attribute = args
                    .next("attribute")?
                    .filter(|path| !matches!(path, Value::None));
                let mut sum = args.next("start")?.unwrap_or(Value::Int(0));
                args.done()?;
                for item in self.items(value)?.items() {
                    meter.work(1)?;
                    let item = match &attribute {
                        Some(path) => self.path_or(item, path, &Value::Undefined)?,
                        None => item.clone(),
                    };
                    if !item.is_undefined() {
                        sum = self.operate(super::ast::BinaryOp::Add, &sum, &item)?;
                    }
                }
                return Ok(sum);
            }
            "batch" => {
                let n = count(args, "linecount")?;
                let fill = args
                    .next("fill_with")?
                    .filter(|fill| !matches!(fill, Value::None));
                args.done()?;
                let items = self.items(value)?;
                for chunk in items.items().chunks(n) {
                    let mut list = List::new(&meter)?;
                    list.extend(chunk)?;
                    if let Some(fill) = &fill {
                        for _ in chunk.len()..n {
                            list.push(fill.clone())?;
                            meter.work(1)?;
                        }
                    }
                    meter.work(1)?;
                    out.push(list.into_value())?;
                }
            }
            "slice" => {
                let n = count(args, "slices")?;
                let fill = args
                    .next("fill_with")?
                    .filter(|fill| !matches!(fill, Value::None));
                args.done()?;
                let items = self.items(value)?;
                let items = items.items();
                let (each, extra) = (items.len() / n, items.len() % n);
                let mut start = 0;
                for at in 0..n {
                    meter.work(2)?;
                    let end = start + each + usize::from(at < extra);
                    let mut list = List::new(&meter)?;
                    list.extend(&items[start..end])?;
                    if let Some(fill) = &fill
                        && at >= extra
                    {
                        list.push(fill.clone())?;
                    }
                    out.push(list.into_value())?;
                    start = end;
                }
            }
            "chain" => {
                let others = args.rest();
                args.done()?;
                let mut values = vec![value.clone()];
                values.extend(others);
                if values.iter().all(|value| matches!(value, Value::Map(_))) {
                    let maps = values.iter().filter_map(|value| match value {
                        Value::Map(map) => Some(map.entries()),
                        _ => None,
                    });
                    let pairs = maps.flatten().map(|pair| {
                        meter.work(1)?;
                        Ok(pair.clone())
                    });
                    return Ok(Value::Map(Rc::new(Map::new(&meter, pairs)?)));
                }
                for value in &values {
                    out.extend(self.items(value)?.items())?;
                }
            }
            "zip" => {
                let mut lists = vec![self.items(value)?];
                for other in args.rest() {
                    lists.push(self.items(&other)?);
                }
                args.done()?;
                let n = lists
                    .iter()
                    .map(|list| list.items().len())
                    .min()
                    .unwrap_or(0);
                for at in 0..n {
                    meter.work(1 + lists.len())?;
                    let row = lists.iter().map(|list| list.items()[at].clone());
                    out.push(Value::tuple(row, &meter)?)?;
                }
            }
            _ => {
                args.done()?;
                let list = Value::list([value.clone()], &meter)?;
                let text = self.string(&list)?;
                let text = text.as_str().unwrap_or_default();
                return Value::str(&text[1..text.len() - 1], &meter);
            }
        }
        Ok(out.into_value())
    }
}

fn count(args: &mut Args, name: &str) -> Result<usize, Fault> {
    match args.count(name)? {
        Some(0) | None => Err(Fault::new(format!(
            "argument `{name}`: expected a number above 0"
        ))),
        // As many parts as there are arguments at most would be too few; memory bounds them.
        Some(n) => Ok(n.max(1)),
    }
}

/// No number is longer than this; its digits are looked at several times.
fn short(text: &str) -> &str {
    const MAX_DIGITS: usize = 2 * MAX_ARGUMENTS;
    if text.len() > MAX_DIGITS { "" } else { text }
}

fn round(value: &Value, precision: i32, method: &str) -> Result<Value, Fault> {
    if let Value::Int(_) | Value::Bool(_) = value
        && precision >= 0
    {
        return Ok(value.clone());
    }
    let Some(number) = value.as_float() else {
        let kind = value.kind();
        return Err(Fault::new(format!(
            "expected a number to round, found {kind}"
        )));
    };
    if !number.is_finite() {
        return Ok(Value::Float(number));
    }
    let factor = 10_f64.powi(precision);
    let rounded = match method {
        "ceil" => (number * factor).ceil() / factor,
        "floor" => (number * factor).floor() / factor,
        // The decimal digits are rounded, half to even, as Python does.
        "common" if precision >= 0 => {
            let digits = format!("{number:.0$}", precision as usize);
            digits.parse().unwrap_or(number)
        }
        "common" => (number * factor).round_ties_even() / factor,
        _ => {
            return Err(Fault::new(
                "expected `common`, `ceil` or `floor` to round by",
            ));
        }
    };
    let rounded = if rounded.is_finite() { rounded } else { number };
    Ok(match value {
        Value::Int(_) => Value::Int(rounded as i128),
        _ => Value::Float(rounded),
    })
}
