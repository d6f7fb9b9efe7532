//! Methods of Python's strings, lists and dictionaries, and the functions of Jinja.

use std::cell::Cell;
use std::rc::Rc;

use super::args::Args;
use super::error::{Fault, cut};
use super::meter::Hold;
use super::render::Renderer;
use super::value::{self, Cycler, Joiner, List, Map, Text, Value};

/// The most items of a `range`, as in Jinja's sandbox.
const MAX_RANGE: i128 = 100_000;

pub(super) fn push_all(out: &mut Text, chars: impl IntoIterator<Item = char>) -> Result<(), Fault> {
    chars.into_iter().try_for_each(|c| out.push(c))
}

fn unknown(value: &Value, method: &str) -> Fault {
    let (kind, method) = (value.kind(), cut(method));
    Fault::new(format!("a value of kind {kind} has no method `{method}`"))
}

impl Renderer<'_> {
    /// `value.name(…)`.
    #[inline(never)]
    pub(super) fn method(
        &mut self,
        value: &Value,
        name: &str,
        args: &mut Args,
    ) -> Result<Value, Fault> {
        match value {
            Value::Str(text) => {
                let text = Rc::clone(text);
                self.meter.scan(text.len())?;
                self.string_method(value, text.as_str(), name, args)
            }
            Value::Map(map) => {
                // An entry that can be called hides a method.
                if let Some(found) = map.get_str(name).filter(|found| is_callable(found)) {
                    let found = found.clone();
                    return self.call(&found, args);
                }
                self.map_method(value, map, name, args)
            }
            Value::Namespace(_) => {
                let found = self.attribute(value, name)?;
                if is_callable(&found) {
                    return self.call(&found, args);
                }
                self.namespace_method(value, name, args)
            }
            Value::List(list) => match name {
                "count" => {
                    let wanted = args.required("value")?;
                    args.done()?;
                    let mut n = 0;
                    for item in list.items() {
                        n += usize::from(value::equal(item, &wanted, &self.meter)?);
                    }
                    Ok(Value::usize(n))
                }
                "index" => {
                    let wanted = args.required("value")?;
                    args.done()?;
                    for (at, item) in list.items().iter().enumerate() {
                        if value::equal(item, &wanted, &self.meter)? {
                            return Ok(Value::usize(at));
                        }
                    }
                    Err(Fault::new("the value isn't in the list"))
                }
                "copy" => {
                    args.done()?;
                    Ok(value.clone())
                }
                _ => Err(unknown(value, name)),
            },
            Value::Loop(state) => match name {
                "cycle" => {
                    let items = args.rest();
                    args.done()?;
                    if items.is_empty() {
                        return Err(Fault::new("`loop.cycle` needs values to choose from"));
                    }
                    Ok(items[state.index.get() % items.len()].clone())
                }
                "changed" => {
                    let state = Rc::clone(state);
                    self.loop_changed(&state, args)
                }
                _ => Err(unknown(value, name)),
            },
            Value::Cycler(cycler) => match name {
                "next" => {
                    args.done()?;
                    let (at, items) = (cycler.at.get(), cycler.items.items());
                    cycler.at.set((at + 1) % items.len());
                    Ok(items[at].clone())
                }
                _ => Err(unknown(value, name)),
            },
            Value::Undefined => {
                let name = cut(name);
                Err(Fault::new(format!("method `{name}` of an undefined value")))
            }
            other => Err(unknown(other, name)),
        }
    }

    fn map_method(
        &self,
        value: &Value,
        map: &Map,
        name: &str,
        args: &mut Args,
    ) -> Result<Value, Fault> {
        match name {
            "get" => {
                let key = args.required("key")?;
                let default = args.next("default")?.unwrap_or(Value::None);
                args.done()?;
                Ok(map.get(&key, &self.meter)?.cloned().unwrap_or(default))
            }
            "copy" => {
                args.done()?;
                Ok(value.clone())
            }
            "keys" | "values" | "items" => {
                args.done()?;
                self.listing(value, map.entries(), name)
            }
            _ => Err(unknown(value, name)),
        }
    }

    fn namespace_method(&self, value: &Value, name: &str, args: &mut Args) -> Result<Value, Fault> {
        let Value::Namespace(at) = value else {
            return Err(unknown(value, name));
        };
        match name {
            "get" => {
                let key = args.required("key")?;
                let default = args.next("default")?.unwrap_or(Value::None);
                args.done()?;
                let found = self.attribute(value, key.as_str().unwrap_or_default())?;
                Ok(if found.is_undefined() { default } else { found })
            }
            "keys" | "values" | "items" => {
                args.done()?;
                self.listing(value, &self.namespaces[*at], name)
            }
            _ => Err(unknown(value, name)),
        }
    }

    /// The keys, values or items of a map.
    fn listing(
        &self,
        value: &Value,
        entries: &[(Value, Value)],
        what: &str,
    ) -> Result<Value, Fault> {
        if what == "items" {
            return self.pairs(value);
        }
        self.meter.work(entries.len() / 4)?;
        let entries = entries.iter();
        let parts = entries.map(|(key, value)| if what == "keys" { key } else { value });
        Value::list(parts.cloned(), &self.meter)
    }

    /// A method of a string, of which every character has been paid for.
    #[inline(never)]
    pub(super) fn string_method(
        &mut self,
        value: &Value,
        text: &str,
        name: &str,
        args: &mut Args,
    ) -> Result<Value, Fault> {
        let meter = Rc::clone(&self.meter);
        let mut out = Text::new(&meter)?;
        match name {
            "upper" => {
                // A character gives up to three.
                let _hold = Hold::new(&meter, text.len().saturating_mul(3))?;
                out.push_str(&text.to_uppercase())?;
            }
            "lower" | "casefold" => {
                // Whole, because a sigma at a word's end is another.
                let _hold = Hold::new(&meter, text.len().saturating_mul(2))?;
                out.push_str(&text.to_lowercase())?;
            }
            "capitalize" => {
                let mut chars = text.chars();
                if let Some(first) = chars.next() {
                    push_all(&mut out, first.to_uppercase())?;
                }
                let _hold = Hold::new(&meter, text.len().saturating_mul(2))?;
                out.push_str(&chars.as_str().to_lowercase())?;
            }
            "title" => {
                let mut in_word = false;
                for c in text.chars() {
                    match in_word {
                        true => push_all(&mut out, c.to_lowercase())?,
                        false => push_all(&mut out, c.to_uppercase())?,
                    }
                    in_word = c.is_alphabetic();
                }
            }
            "swapcase" => {
                for c in text.chars() {
                    match c.is_uppercase() {
                        true => push_all(&mut out, c.to_lowercase())?,
                        false => push_all(&mut out, c.to_uppercase())?,
                    }
                }
            }
            "strip" | "lstrip" | "rstrip" => {
                let chars = args.string("chars")?;
                let chars = chars.as_ref().and_then(Value::as_str);
                let stripped = match chars {
                    None => match name {
                        "strip" => text.trim(),
                        "lstrip" => text.trim_start(),
                        _ => text.trim_end(),
                    },
                    Some(chars) => {
                        // Each character is looked for among those to strip, as long as that is paid for.
                        let strips = |c: char| {
                            meter.scan(chars.len().saturating_add(8)).is_ok() && chars.contains(c)
                        };
                        match name {
                            "strip" => text.trim_matches(strips),
                            "lstrip" => text.trim_start_matches(strips),
                            _ => text.trim_end_matches(strips),
                        }
                    }
                };
                meter.work(1)?;
                args.done()?;
                if stripped.len() == text.len() {
                    return Ok(value.clone());
                }
                out.push_str(stripped)?;
            }
            "removeprefix" | "removesuffix" => {
                let part = args.required_string("part")?;
                let part = part.as_str().unwrap_or_default();
                meter.copy(part.len())?;
                let rest = match name {
                    "removeprefix" => text.strip_prefix(part),
                    _ => text.strip_suffix(part),
                };
                args.done()?;
                out.push_str(rest.unwrap_or(text))?;
            }
            "replace" => {
                let old = args.required_string("old")?;
                let new = args.required_string("new")?;
                let most = args.int("count")?.unwrap_or(-1);
                args.done()?;
                let most = usize::try_from(most).unwrap_or(usize::MAX);
                let (old, new) = (
                    old.as_str().unwrap_or_default(),
                    new.as_str().unwrap_or_default(),
                );
                meter.scan(old.len())?;
                let mut from = 0;
                for (at, found) in text.match_indices(old).take(most) {
                    meter.work(1)?;
                    out.push_str(&text[from..at])?;
                    out.push_str(new)?;
                    from = at + found.len();
                }
                out.push_str(&text[from..])?;
            }
            "zfill" => {
                let width = args.count("width")?.unwrap_or(0);
                args.done()?;
                let missing = width.saturating_sub(text.chars().count());
                let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
                out.push_str(sign)?;
                out.repeat("0", missing)?;
                out.push_str(digits)?;
            }
            "ljust" | "rjust" | "center" => {
                let width = args.count("width")?.unwrap_or(0);
                let fill = args.string("fillchar")?;
                let fill = fill.as_ref().and_then(Value::as_str).unwrap_or(" ");
                if fill.chars().count() != 1 {
                    return Err(Fault::new("expected one character to fill with"));
                }
                let missing = width.saturating_sub(text.chars().count());
                let before = match name {
                    "ljust" => 0,
                    "rjust" => missing,
                    // CPython puts the odd one before if the width is odd.
                    _ => missing / 2 + (missing & width & 1),
                };
                out.repeat(fill, before)?;
                out.push_str(text)?;
                out.repeat(fill, missing - before)?;
            }
            "join" => {
                let items = args.required("iterable")?;
                args.done()?;
                let items = self.items(&items)?;
                for (at, item) in items.items().iter().enumerate() {
                    meter.work(1)?;
                    if at > 0 {
                        out.push_str(text)?;
                    }
                    self.print(item, &mut out)?;
                }
            }
            "format" => return self.str_format(text, args),
            _ => return self.string_query(value, text, name, args),
        }
        args.done()?;
        Ok(out.into_value())
    }

    /// Methods that make no string.
    #[inline(never)]
    fn string_query(
        &mut self,
        value: &Value,
        text: &str,
        name: &str,
        args: &mut Args,
    ) -> Result<Value, Fault> {
        let meter = Rc::clone(&self.meter);
        let all = |holds: fn(char) -> bool| !text.is_empty() && text.chars().all(holds);
        let result = match name {
            "split" | "rsplit" => {
                let separator = args.string("sep")?;
                let most = args.int("maxsplit")?.unwrap_or(-1);
                args.done()?;
                let most = usize::try_from(most).unwrap_or(usize::MAX);
                let separator = separator.as_ref().and_then(Value::as_str);
                return self.split(text, separator, most, name == "rsplit");
            }
            "splitlines" => {
                let keep = args.flag("keepends")?;
                args.done()?;
                let mut list = List::new(&meter)?;
                for line in text.split_inclusive('\n') {
                    meter.work(1)?;
                    let bare = line.strip_suffix('\n').unwrap_or(line);
                    let bare = bare.strip_suffix('\r').unwrap_or(bare);
                    list.push(Value::str(if keep { line } else { bare }, &meter)?)?;
                }
                list.into_value()
            }
            "partition" | "rpartition" => {
                let separator = args.required_string("sep")?;
                let separator = separator.as_str().unwrap_or_default();
                if separator.is_empty() {
                    return Err(Fault::new("the separator is empty"));
                }
                meter.scan(separator.len())?;
                let parts = match name {
                    "partition" => text.split_once(separator),
                    _ => text.rsplit_once(separator),
                };
                let parts = match parts {
                    Some((before, after)) => [before, separator, after],
                    None if name == "partition" => [text, "", ""],
                    None => ["", "", text],
                };
                let mut list = List::new(&meter)?;
                for part in parts {
                    list.push(Value::str(part, &meter)?)?;
                }
                list.into_tuple()
            }
            "find" | "rfind" | "index" | "rindex" | "count" => {
                let wanted = args.required_string("sub")?;
                let wanted = wanted.as_str().unwrap_or_default();
                meter.scan(wanted.len())?;
                if name == "count" {
                    args.done()?;
                    return Ok(Value::usize(text.matches(wanted).count()));
                }
                let found = match name {
                    "find" | "index" => text.find(wanted),
                    _ => text.rfind(wanted),
                };
                match found {
                    Some(at) => Value::usize(text[..at].chars().count()),
                    None if name.ends_with("find") => Value::Int(-1),
                    None => return Err(Fault::new("the text to find isn't there")),
                }
            }
            "startswith" | "endswith" => {
                let wanted = args.required("prefix")?;
                let wanted = match wanted {
                    Value::Str(_) => Value::tuple([wanted], &meter)?,
                    other => other,
                };
                let Value::List(wanted) = wanted else {
                    let kind = wanted.kind();
                    return Err(Fault::new(format!(
                        "`{name}`: expected a string or a list of them, found {kind}"
                    )));
                };
                let mut holds = false;
                for part in wanted.items() {
                    let Some(part) = part.as_str() else {
                        let kind = part.kind();
                        return Err(Fault::new(format!(
                            "`{name}`: expected strings, found {kind}"
                        )));
                    };
                    meter.work(1 + part.len().min(text.len()) / 128)?;
                    holds |= match name {
                        "startswith" => text.starts_with(part),
                        _ => text.ends_with(part),
                    };
                }
                Value::Bool(holds)
            }
            "islower" => {
                Value::Bool(text.contains(char::is_lowercase) && !text.contains(char::is_uppercase))
            }
            "isupper" => {
                Value::Bool(text.contains(char::is_uppercase) && !text.contains(char::is_lowercase))
            }
            "isspace" => Value::Bool(all(char::is_whitespace)),
            "isdigit" | "isnumeric" | "isdecimal" => Value::Bool(all(char::is_numeric)),
            "isalnum" => Value::Bool(all(char::is_alphanumeric)),
            "isalpha" => Value::Bool(all(char::is_alphabetic)),
            "isascii" => Value::Bool(text.is_ascii()),
            _ => return Err(unknown(value, name)),
        };
        args.done()?;
        Ok(result)
    }

    /// At most `most` splits, counted from the end if `last`.
    fn split(
        &self,
        text: &str,
        separator: Option<&str>,
        most: usize,
        last: bool,
    ) -> Result<Value, Fault> {
        if separator == Some("") {
            return Err(Fault::new("the separator is empty"));
        }
        self.meter.scan(separator.map_or(0, str::len))?;
        let mut parts = List::new(&self.meter)?;
        let mut rest = text;
        let mut n = 0;
        loop {
            self.meter.work(2)?;
            if separator.is_none() {
                rest = if last {
                    rest.trim_end()
                } else {
                    rest.trim_start()
                };
                if rest.is_empty() {
                    break;
                }
            }
            let found = match (separator, last) {
                _ if n == most => None,
                (Some(separator), false) => rest.split_once(separator),
                (Some(separator), true) => rest.rsplit_once(separator),
                (None, false) => rest.split_once(char::is_whitespace),
                (None, true) => rest.rsplit_once(char::is_whitespace),
            };
            let (part, others) = match found {
                Some((before, after)) if last => (after, Some(before)),
                Some((before, after)) => (before, Some(after)),
                None => (rest, None),
            };
            parts.push(Value::str(part, &self.meter)?)?;
            n += 1;
            match others {
                Some(others) => rest = others,
                None => break,
            }
        }
        if !last {
            return Ok(parts.into_value());
        }
        Value::list(parts.items().iter().rev().cloned(), &self.meter)
    }

    /// A function that every template has.
    #[inline(never)]
    pub(super) fn function(&mut self, name: &str, args: &mut Args) -> Result<Value, Fault> {
        let meter = Rc::clone(&self.meter);
        match name {
            "range" => {
                let first = args.int("start")?.unwrap_or(0);
                let second = args.int("stop")?;
                let step = args.int("step")?.unwrap_or(1);
                args.done()?;
                let (start, stop) = second.map_or((0, first), |stop| (first, stop));
                if step == 0 {
                    return Err(Fault::new("the step of a range is 0"));
                }
                let distance = match step > 0 {
                    true => stop.saturating_sub(start),
                    false => start.saturating_sub(stop),
                };
                let step_size = i128::try_from(step.unsigned_abs()).unwrap_or(i128::MAX);
                let n = match distance > 0 {
                    true => (distance - 1) / step_size + 1,
                    false => 0,
                };
                if n > MAX_RANGE {
                    return Err(Fault::new(format!(
                        "a range of more than {MAX_RANGE} numbers"
                    )));
                }
                meter.work(n as usize / 8)?;
                Value::list((0..n).map(|at| Value::Int(start + at * step)), &meter)
            }
            "dict" => {
                let base = args.next("mapping")?;
                let base = match &base {
                    Some(Value::Map(map)) => map.entries(),
                    None => &[],
                    Some(other) => {
                        let kind = other.kind();
                        return Err(Fault::new(format!("`dict`: expected a map, found {kind}")));
                    }
                };
                let named = std::mem::take(&mut args.named);
                args.done()?;
                let pairs = base.iter().cloned().chain(named).map(|pair| {
                    meter.work(1)?;
                    Ok(pair)
                });
                Ok(Value::Map(Rc::new(Map::new(&meter, pairs)?)))
            }
            "namespace" => {
                let mut attributes = match args.positional.pop() {
                    Some(Value::Map(map)) => {
                        meter.work(map.entries().len())?;
                        let _hold = Hold::new(&meter, map.entries().len() * 64)?;
                        map.entries().to_vec()
                    }
                    None => Vec::new(),
                    Some(other) => {
                        let kind = other.kind();
                        let problem = format!("`namespace`: expected a map, found {kind}");
                        return Err(Fault::new(problem));
                    }
                };
                attributes.append(&mut args.named);
                args.done()?;
                self.namespace(attributes)
            }
            "joiner" => {
                let separator = match args.next("sep")? {
                    Some(separator) => separator,
                    None => Value::str(", ", &meter)?,
                };
                args.done()?;
                // A joiner that keeps a joiner, and so on, would be dropped by recursion.
                if separator.depth() >= value::MAX_DEPTH {
                    return Err(Fault::new("values lie in values too deep"));
                }
                // Charged for good: joiners are few.
                meter.hold(128)?;
                Ok(Value::Joiner(Rc::new(Joiner {
                    separator,
                    used: Cell::new(false),
                })))
            }
            "cycler" => {
                let Value::List(items) = Value::list(args.rest(), &meter)? else {
                    return Ok(Value::Undefined);
                };
                args.done()?;
                if items.items().is_empty() {
                    return Err(Fault::new("`cycler` needs values to choose from"));
                }
                meter.hold(128)?;
                Ok(Value::Cycler(Rc::new(Cycler {
                    items,
                    at: Cell::new(0),
                })))
            }
            "raise_exception" => {
                let message = args.required("message")?;
                let message = self.string(&message)?;
                Err(Fault::raised(message.as_str().unwrap_or_default()))
            }
            "strftime_now" => {
                let format = args.required_string("format")?;
                args.done()?;
                let format = format.as_str().unwrap_or_default();
                meter.work(format.len())?;
                let Some(now) = self.now else {
                    let problem = "the template asks for the date and none was given";
                    return Err(Fault::new(problem));
                };
                // A code of two characters gives up to 24.
                let _hold = Hold::new(&meter, format.len().saturating_mul(32))?;
                let text = now.strftime(format).map_err(Fault::new)?;
                Value::str(&text, &meter)
            }
            _ => Err(Fault::new(format!("unknown function `{}`", cut(name)))),
        }
    }
}

fn is_callable(value: &Value) -> bool {
    matches!(
        value,
        Value::Macro(_) | Value::Function(_) | Value::Loop(_) | Value::Joiner(_)
    )
}
