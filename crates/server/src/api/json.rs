//! Reading what clients send: fields by name, errors with their path. Fields that nobody reads are tolerated.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::ApiError;

/// A value, and where it is.
#[derive(Debug, Clone)]
pub(crate) struct At<'a> {
    value: &'a Value,
    path: String,
}

type Result<T> = std::result::Result<T, ApiError>;

impl<'a> At<'a> {
    /// The whole body.
    pub(crate) fn body(value: &'a Value) -> At<'a> {
        At {
            value,
            path: String::new(),
        }
    }

    /// The field called `name`; null if there is none.
    pub(crate) fn get(&self, name: &str) -> At<'a> {
        const NULL: &Value = &Value::Null;
        At {
            value: self.value.get(name).unwrap_or(NULL),
            path: match self.path.is_empty() {
                true => name.to_owned(),
                false => format!("{}.{name}", self.path),
            },
        }
    }

    /// The first of the fields called `names` that is there.
    pub(crate) fn get_any(&self, names: &[&str]) -> At<'a> {
        let there = names.iter().find(|name| !self.get(name).is_absent());
        self.get(there.or(names.first()).unwrap_or(&""))
    }

    /// The value.
    pub(crate) fn value(&self) -> &'a Value {
        self.value
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Whether it isn't there, or null.
    pub(crate) fn is_absent(&self) -> bool {
        self.value.is_null()
    }

    /// What is wrong with it.
    pub(crate) fn wrong(&self, expected: &str) -> ApiError {
        let found = match self.value {
            Value::Null => "nothing".to_owned(),
            Value::Bool(value) => value.to_string(),
            Value::Number(value) => value.to_string(),
            Value::String(text) if text.len() <= 40 => format!("{text:?}"),
            Value::String(_) => "text".to_owned(),
            Value::Array(_) => "an array".to_owned(),
            Value::Object(_) => "an object".to_owned(),
        };
        self.refused(format!("expected {expected}, found {found}"))
    }

    /// The error `message`, of this place.
    pub(crate) fn refused(&self, message: impl std::fmt::Display) -> ApiError {
        match self.path.is_empty() {
            true => ApiError::invalid(message.to_string()),
            false => ApiError::invalid(format!("{}: {message}", self.path)).at(&self.path),
        }
    }

    fn read<T>(
        &self,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.value {
            Value::Null => Ok(None),
            value => read(value).map(Some).ok_or_else(|| self.wrong(expected)),
        }
    }

    pub(crate) fn text(&self) -> Result<Option<&'a str>> {
        self.read("text", Value::as_str)
    }

    /// Text that has to be there.
    pub(crate) fn required_text(&self) -> Result<&'a str> {
        self.text()?.ok_or_else(|| self.wrong("text"))
    }

    pub(crate) fn flag(&self) -> Result<Option<bool>> {
        self.read("true or false", Value::as_bool)
    }

    pub(crate) fn number(&self, range: RangeInclusive<f32>) -> Result<Option<f32>> {
        let expected = match (*range.start() == f32::MIN, *range.end() == f32::MAX) {
            (true, true) => "a number".to_owned(),
            (false, true) => format!("a number of at least {}", range.start()),
            _ => format!("a number from {} to {}", range.start(), range.end()),
        };
        self.read(&expected, |value| {
            let number = value.as_f64()? as f32;
            range.contains(&number).then_some(number)
        })
    }

    pub(crate) fn whole(&self, range: RangeInclusive<usize>) -> Result<Option<usize>> {
        let expected = match *range.end() == usize::MAX {
            true => format!("a whole number of at least {}", range.start()),
            false => format!("a whole number from {} to {}", range.start(), range.end()),
        };
        self.read(&expected, |value| {
            // Some clients write whole numbers with a fraction.
            let float = || {
                value
                    .as_f64()
                    .filter(|x| x.fract() == 0.0 && (0.0..1e15).contains(x))
            };
            let whole = value.as_u64().or_else(|| float().map(|x| x as u64))?;
            let whole = usize::try_from(whole).ok()?;
            range.contains(&whole).then_some(whole)
        })
    }

    /// A seed: any whole number.
    pub(crate) fn seed(&self) -> Result<Option<u64>> {
        self.read("a whole number", |value| {
            value.as_u64().or_else(|| value.as_i64().map(|n| n as u64))
        })
    }

    pub(crate) fn object(&self) -> Result<Option<&'a Map<String, Value>>> {
        self.read("an object", Value::as_object)
    }

    /// The elements of an array; none if it isn't there.
    pub(crate) fn items(&self) -> Result<Vec<At<'a>>> {
        let items = self.read("an array", Value::as_array)?;
        let items = items.map(Vec::as_slice).unwrap_or_default();
        let item = |(index, value)| At {
            value,
            path: format!("{}[{index}]", self.path),
        };
        Ok(items.iter().enumerate().map(item).collect())
    }

    /// A text, or an array of them.
    pub(crate) fn texts(&self) -> Result<Vec<String>> {
        match self.value {
            Value::Null => Ok(Vec::new()),
            Value::String(text) => Ok(vec![text.clone()]),
            Value::Array(_) => self
                .items()?
                .iter()
                .map(|item| item.required_text().map(str::to_owned))
                .collect(),
            _ => Err(self.wrong("text or an array of texts")),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn errors_name_the_place_and_what_was_found() {
        let body = json!({"a": [{"b": 3}], "t": 2.5, "n": -1, "s": ["x", 4]});
        let body = At::body(&body);
        let message = |error: ApiError| error.message().to_owned();
        let inner = body.get("a").items().unwrap().remove(0);
        assert_eq!(
            message(inner.get("b").text().unwrap_err()),
            "a[0].b: expected text, found 3"
        );
        assert_eq!(
            message(body.get("t").number(0.0..=2.0).unwrap_err()),
            "t: expected a number from 0 to 2, found 2.5"
        );
        assert_eq!(
            message(body.get("n").whole(1..=usize::MAX).unwrap_err()),
            "n: expected a whole number of at least 1, found -1"
        );
        assert_eq!(
            message(body.get("s").texts().unwrap_err()),
            "s[1]: expected text, found 4"
        );
        assert_eq!(
            message(body.get("model").required_text().unwrap_err()),
            "model: expected text, found nothing"
        );
        assert_eq!(body.get("x").flag().unwrap(), None);
        assert_eq!(body.get("n").seed().unwrap(), Some(u64::MAX));
    }
}
