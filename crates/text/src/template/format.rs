//! `"%s" | format(…)` and `"{}".format(…)`.

use super::args::Args;
use super::error::Fault;
use super::render::Renderer;
use super::value::{Text, Value};

/// Widths and precisions have no more digits than this.
const MAX_DIGITS: usize = 18;
/// The most digits behind the point that a float has.
const MAX_PRECISION: usize = 400;

/// How one value is written.
#[derive(Debug, Default)]
struct Spec {
    fill: Option<char>,
    /// `<`, `>`, `^` or `=`.
    align: Option<char>,
    /// `+` or a space before numbers that aren't negative.
    sign: Option<char>,
    alternate: bool,
    zero: bool,
    comma: bool,
    width: usize,
    precision: Option<usize>,
    kind: Option<char>,
}

impl Renderer<'_> {
    /// Formats as `%` does.
    #[inline(never)]
    pub(super) fn printf(&mut self, format: &str, args: &mut Args) -> Result<Value, Fault> {
        let mut out = Text::new(&self.meter)?;
        self.meter.scan(format.len())?;
        let mut rest = format;
        while let Some(at) = rest.find('%') {
            self.meter.work(1)?;
            out.push_str(&rest[..at])?;
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix('%') {
                out.push('%')?;
                rest = after;
                continue;
            }
            let mut named = None;
            if let Some(after) = rest.strip_prefix('(') {
                let Some((name, after)) = after.split_once(')') else {
                    return Err(Fault::new("a name in a format has no `)`"));
                };
                named = Some(name);
                rest = after;
            }
            let mut spec = Spec::default();
            let flags = rest.len() - rest.trim_start_matches(['-', '+', ' ', '#', '0']).len();
            for flag in rest[..flags].chars() {
                match flag {
                    '-' => spec.align = Some('<'),
                    '+' => spec.sign = Some('+'),
                    ' ' if spec.sign.is_none() => spec.sign = Some(' '),
                    '#' => spec.alternate = true,
                    '0' => spec.zero = true,
                    _ => {}
                }
            }
            rest = &rest[flags..];
            spec.width = self.number(&mut rest, args)?.unwrap_or(0);
            if let Some(after) = rest.strip_prefix('.') {
                rest = after;
                spec.precision = Some(self.number(&mut rest, args)?.unwrap_or(0));
            }
            rest = rest.trim_start_matches(['h', 'l', 'L']);
            let Some(kind) = rest.chars().next() else {
                return Err(Fault::new("a format ends behind `%`"));
            };
            rest = &rest[kind.len_utf8()..];
            let value = match named {
                None => match args.positional.pop() {
                    Some(value) => value,
                    None => return Err(Fault::new("too few values for a format")),
                },
                Some(name) => match args.take(name)? {
                    Some(value) => value,
                    None => match args.positional.first() {
                        Some(Value::Map(map)) => {
                            map.get_str(name).cloned().unwrap_or(Value::Undefined)
                        }
                        _ => return Err(Fault::new("too few values for a format")),
                    },
                },
            };
            // Numbers stand right by default, and so do strings in this form.
            spec.align = spec.align.or(Some(if spec.zero { '=' } else { '>' }));
            let value = match kind {
                's' | 'r' | 'a' => {
                    spec.zero = false;
                    spec.align = spec
                        .align
                        .map(|align| if align == '=' { '>' } else { align });
                    match kind {
                        's' => self.string(&value)?,
                        _ => {
                            let list = Value::list([value], &self.meter)?;
                            let text = self.string(&list)?;
                            let text = text.as_str().unwrap_or_default();
                            Value::str(&text[1..text.len() - 1], &self.meter)?
                        }
                    }
                }
                'd' | 'i' | 'u' => match value.as_float() {
                    Some(number) => match value.as_int() {
                        Some(number) => Value::Int(number),
                        None => Value::Int(number as i128),
                    },
                    None => return Err(wrong(kind, &value)),
                },
                _ => value,
            };
            spec.kind = Some(match kind {
                'i' | 'u' => 'd',
                'r' | 'a' => 's',
                kind => kind,
            });
            self.write_formatted(&value, &spec, &mut out)?;
        }
        out.push_str(rest)?;
        args.positional.clear();
        args.named.clear();
        Ok(out.into_value())
    }

    /// A width or precision: digits, or `*` for the next value.
    fn number(&self, rest: &mut &str, args: &mut Args) -> Result<Option<usize>, Fault> {
        if let Some(after) = rest.strip_prefix('*') {
            *rest = after;
            let number = args.positional.pop().and_then(|value| value.as_int());
            let number = number.and_then(|number| usize::try_from(number).ok());
            return match number {
                Some(number) => Ok(Some(number)),
                None => Err(Fault::new("expected a number for `*` in a format")),
            };
        }
        digits(rest)
    }

    /// Formats as Python's `str.format` does.
    #[inline(never)]
    pub(super) fn str_format(&mut self, format: &str, args: &mut Args) -> Result<Value, Fault> {
        let mut out = Text::new(&self.meter)?;
        self.meter.scan(format.len())?;
        let values = args.rest();
        let mut next = 0;
        let mut rest = format;
        while let Some(at) = rest.find(['{', '}']) {
            self.meter.work(2)?;
            out.push_str(&rest[..at])?;
            let brace = &rest[at..=at];
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix(brace) {
                out.push_str(brace)?;
                rest = after;
                continue;
            }
            if brace == "}" {
                return Err(Fault::new("a single `}` in a format"));
            }
            let Some((field, after)) = rest.split_once('}') else {
                return Err(Fault::new("a `{` in a format has no `}`"));
            };
            if field.contains('{') {
                return Err(Fault::new("a format in a format isn't supported"));
            }
            rest = after;
            let (field, spec) = field.split_once(':').unwrap_or((field, ""));
            let (field, conversion) = match field.split_once('!') {
                Some((field, conversion)) => (field, Some(conversion)),
                None => (field, None),
            };
            let end = field.find(['.', '[']).unwrap_or(field.len());
            let (name, path) = field.split_at(end);
            let mut value = if name.is_empty() {
                next += 1;
                values.get(next - 1).cloned()
            } else if let Ok(place) = name.parse::<usize>() {
                values.get(place).cloned()
            } else {
                let mut named = args.named.iter();
                let found = named.find(|(known, _)| known.as_str() == Some(name));
                found.map(|(_, value)| value.clone())
            };
            for step in path.split(['.', '[']).skip(1) {
                self.meter.work(1)?;
                let step = step.strip_suffix(']').unwrap_or(step);
                value = match value {
                    Some(value) => Some(match step.parse() {
                        Ok(place) => self.item(&value, &Value::Int(place))?,
                        Err(_) => self.attribute(&value, step)?,
                    }),
                    None => None,
                };
            }
            let Some(mut value) = value else {
                return Err(Fault::new("too few values for a format"));
            };
            match conversion {
                None => {}
                Some("s") => value = self.string(&value)?,
                Some(_) => {
                    let list = Value::list([value], &self.meter)?;
                    let text = self.string(&list)?;
                    let text = text.as_str().unwrap_or_default();
                    value = Value::str(&text[1..text.len() - 1], &self.meter)?;
                }
            }
            let spec = parse(spec)?;
            self.write_formatted(&value, &spec, &mut out)?;
        }
        out.push_str(rest)?;
        Ok(out.into_value())
    }

    fn write_formatted(&self, value: &Value, spec: &Spec, out: &mut Text) -> Result<(), Fault> {
        let is_text = !matches!(value, Value::Int(_) | Value::Float(_) | Value::Bool(_))
            || spec.kind == Some('s')
            || matches!(value, Value::Bool(_)) && spec.kind.is_none();
        if is_text {
            if let Some(kind) = spec.kind.filter(|kind| !matches!(kind, 's' | 'c')) {
                return Err(wrong(kind, value));
            }
            let text = self.string(value)?;
            let text = text.as_str().unwrap_or_default();
            self.meter.scan(text.len())?;
            let end = spec.precision.unwrap_or(usize::MAX);
            let end = text.char_indices().nth(end).map_or(text.len(), |c| c.0);
            return pad("", "", &text[..end], spec, '<', out);
        }
        self.meter
            .work(digits_work(value, spec.precision.unwrap_or(0)))?;
        let (negative, prefix, digits) = number(value, spec)?;
        let sign = match (negative, spec.sign) {
            (true, _) => "-",
            (false, Some('+')) => "+",
            (false, Some(_)) => " ",
            (false, None) => "",
        };
        let digits = if spec.comma { grouped(&digits) } else { digits };
        pad(sign, prefix, &digits, spec, '>', out)
    }
}

/// What the digits of a number cost: very large and small ones have hundreds, each found by long division.
pub(super) fn digits_work(value: &Value, precision: usize) -> usize {
    match value {
        Value::Float(number) if !(1e-9..1e18).contains(&number.abs()) || precision > 17 => 4000,
        _ => 40,
    }
}

fn wrong(kind: char, value: &Value) -> Fault {
    let found = value.kind();
    Fault::new(format!("format `{kind}` takes no value of kind {found}"))
}

fn digits(rest: &mut &str) -> Result<Option<usize>, Fault> {
    let n = rest.bytes().take_while(u8::is_ascii_digit).count();
    let (number, after) = rest.split_at(n);
    *rest = after;
    match n {
        0 => Ok(None),
        n if n > MAX_DIGITS => Err(Fault::new("a width in a format is too large")),
        _ => Ok(number.parse().ok()),
    }
}

/// `[[fill]align][sign][#][0][width][,][.precision][kind]`.
fn parse(text: &str) -> Result<Spec, Fault> {
    let mut spec = Spec::default();
    let mut rest = text;
    let is_align = |c: char| matches!(c, '<' | '>' | '^' | '=');
    let mut chars = rest.chars();
    match (chars.next(), chars.next()) {
        (Some(fill), Some(align)) if is_align(align) => {
            spec.fill = Some(fill);
            spec.align = Some(align);
            rest = chars.as_str();
        }
        (Some(align), _) if is_align(align) => {
            spec.align = Some(align);
            rest = &rest[1..];
        }
        _ => {}
    }
    if let Some(sign) = rest.chars().next().filter(|c| matches!(c, '+' | '-' | ' ')) {
        spec.sign = Some(sign).filter(|sign| *sign != '-');
        rest = &rest[1..];
    }
    if let Some(after) = rest.strip_prefix('#') {
        spec.alternate = true;
        rest = after;
    }
    if rest.starts_with('0') {
        spec.zero = true;
        spec.align = spec.align.or(Some('='));
    }
    spec.width = digits(&mut rest)?.unwrap_or(0);
    if let Some(after) = rest.strip_prefix([',', '_']) {
        spec.comma = true;
        rest = after;
    }
    if let Some(after) = rest.strip_prefix('.') {
        rest = after;
        spec.precision = digits(&mut rest)?;
    }
    let mut chars = rest.chars();
    spec.kind = chars.next();
    if chars.next().is_some() {
        return Err(Fault::new("a format can't be understood"));
    }
    Ok(spec)
}

/// Whether a number is negative, what stands before its digits, and these.
fn number(value: &Value, spec: &Spec) -> Result<(bool, &'static str, String), Fault> {
    let precision = spec.precision.unwrap_or(6).min(MAX_PRECISION);
    let kind = spec.kind.unwrap_or(match value {
        Value::Float(_) => 'g',
        _ => 'd',
    });
    let prefix = |text| if spec.alternate { text } else { "" };
    if let ('d' | 'x' | 'X' | 'o' | 'b' | 'c', Some(number)) = (kind, value.as_int()) {
        let size = number.unsigned_abs();
        let (prefix, digits) = match kind {
            'd' => ("", size.to_string()),
            'x' => (prefix("0x"), format!("{size:x}")),
            'X' => (prefix("0X"), format!("{size:X}")),
            'o' => (prefix("0o"), format!("{size:o}")),
            'b' => (prefix("0b"), format!("{size:b}")),
            _ => {
                let c = u32::try_from(number).ok().and_then(char::from_u32);
                let c = c.ok_or_else(|| Fault::new("format `c`: no such character"))?;
                return Ok((false, "", c.to_string()));
            }
        };
        return Ok((number < 0, prefix, digits));
    }
    let number = value.as_float().ok_or_else(|| wrong(kind, value))?;
    let size = number.abs();
    if !number.is_finite() {
        return Ok((number < 0.0, "", super::print::float(size)));
    }
    let exponential = |precision: usize| {
        let text = format!("{size:.precision$e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        format!("{digits}e{sign}{exponent:0>2}")
    };
    let digits = match kind {
        'f' | 'F' => format!("{size:.precision$}"),
        'e' => exponential(precision),
        'E' => exponential(precision).to_uppercase(),
        '%' => format!("{:.precision$}%", size * 100.0),
        'g' | 'G' if spec.kind.is_none() && spec.precision.is_none() => super::print::float(size),
        'g' | 'G' => {
            let significant = precision.max(1);
            let text = exponential(significant - 1);
            let exponent = text
                .split_once('e')
                .and_then(|(_, e)| e.parse::<i32>().ok());
            let exponent = exponent.unwrap_or(0);
            let plain = (-4..significant as i32).contains(&exponent);
            let text = match plain {
                true => {
                    let places = (significant as i32 - 1 - exponent).max(0) as usize;
                    format!("{size:.places$}")
                }
                false => text,
            };
            let (digits, exponent) = match text.split_once('e') {
                Some((digits, exponent)) => (digits, format!("e{exponent}")),
                None => (text.as_str(), String::new()),
            };
            let digits = match digits.contains('.') {
                true => digits.trim_end_matches('0').trim_end_matches('.'),
                false => digits,
            };
            format!("{digits}{exponent}")
        }
        kind => return Err(wrong(kind, value)),
    };
    Ok((number.is_sign_negative(), "", digits))
}

/// Digits with a comma before each group of three.
fn grouped(digits: &str) -> String {
    let end = digits
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(digits.len());
    let (whole, rest) = digits.split_at(end);
    let mut out = String::with_capacity(digits.len() * 4 / 3 + 1);
    for (at, c) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out.push_str(rest);
    out
}

fn pad(
    sign: &str,
    prefix: &str,
    digits: &str,
    spec: &Spec,
    default: char,
    out: &mut Text,
) -> Result<(), Fault> {
    let len = sign.len() + prefix.len() + digits.chars().count();
    let missing = spec.width.saturating_sub(len);
    let fill = spec.fill.unwrap_or(if spec.zero { '0' } else { ' ' });
    let mut encoded = [0; 4];
    let fill = fill.encode_utf8(&mut encoded);
    let (before, inner, after) = match spec.align.unwrap_or(default) {
        '<' => (0, 0, missing),
        '^' => (missing / 2, 0, missing - missing / 2),
        '=' => (0, missing, 0),
        _ => (missing, 0, 0),
    };
    out.repeat(fill, before)?;
    out.push_str(sign)?;
    out.push_str(prefix)?;
    out.repeat(fill, inner)?;
    out.push_str(digits)?;
    out.repeat(fill, after)
}
