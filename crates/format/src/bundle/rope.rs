//! `rope.cache`: the parameters of the rotary embedding, from which an engine computes its angles.

use serde_json::{Map, Value, json};

use super::error::ensure;
use super::read::{Cursor, header};
use super::{BundleError, Location};
use crate::hf::{Config, parse_json};

const MAGIC: &[u8; 4] = b"TRRC";
/// The longest text that is taken. One with a factor for each of 256 pairs has 10 KiB.
const MAX_BYTES: u32 = 1 << 20;

/// What `rope.cache` says.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeFile {
    /// Base of the rotation frequencies.
    pub rope_theta: f64,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of each head that are rotated: an even number, at most all.
    pub rope_dim: usize,
    /// Positions that the model was made for.
    pub max_position_embeddings: usize,
    /// How the context is stretched, as `rope_scaling` in `config.json` says it. Its factors and lengths
    /// are finite and above 0.
    pub rope_scaling: Option<Map<String, Value>>,
}

impl RopeFile {
    /// Parses the whole of a file.
    ///
    /// # Errors
    ///
    /// [`BundleError`] says what is missing or wrong.
    pub fn parse(bytes: &[u8]) -> Result<RopeFile, BundleError> {
        let mut cursor = Cursor::new(bytes, bytes.len() as u64);
        cursor.magic(MAGIC)?;
        cursor.fixed(Location::Header, "reserved field", 0)?;
        let len = cursor.u32(Location::Header)?;
        let expected = format_args!("at most {MAX_BYTES}");
        ensure(len <= MAX_BYTES, Location::Rope, "length", expected, len)?;
        let json = cursor.bytes(len, Location::Rope)?;
        cursor.finish()?;
        // Checks the type of every value that there is.
        let json = parse_json(json)?;
        let config = Config::from_value(&json)?;
        let head_dim = required("head_dim", config.head_dim)?;
        let part = config.partial_rotary_factor.unwrap_or(1.0);
        let scaling = match json {
            Value::Object(mut members) => members.remove("rope_scaling"),
            _ => None,
        };
        let rope = RopeFile {
            rope_theta: required("rope_theta", config.rope_theta)?,
            head_dim,
            rope_dim: (head_dim as f64 * part) as usize,
            max_position_embeddings: required(
                "max_position_embeddings",
                config.max_position_embeddings,
            )?,
            rope_scaling: match scaling {
                Some(Value::Object(scaling)) => Some(scaling),
                _ => None,
            },
        };
        rope.check()?;
        Ok(rope)
    }

    /// The file as bytes.
    ///
    /// # Errors
    ///
    /// [`BundleError`] if [`RopeFile::parse`] would refuse it.
    pub fn to_bytes(&self) -> Result<Vec<u8>, BundleError> {
        self.check()?;
        let json = Value::Object(self.to_config()).to_string();
        let too_long = || {
            let expected = format_args!("at most {MAX_BYTES}").to_string();
            BundleError::field(Location::Rope, "length", expected, json.len())
        };
        let len = u32::try_from(json.len()).ok().filter(|&n| n <= MAX_BYTES);
        let len = len.ok_or_else(too_long)?;
        let mut out = header(MAGIC);
        out.extend_from_slice(&0_u32.to_le_bytes());
        out.extend_from_slice(&len.to_le_bytes());
        out.extend_from_slice(json.as_bytes());
        Ok(out)
    }

    /// The members of a `config.json` that say the same.
    pub fn to_config(&self) -> Map<String, Value> {
        let mut config = Map::new();
        config.insert("rope_theta".into(), json!(self.rope_theta));
        config.insert("head_dim".into(), json!(self.head_dim));
        if self.rope_dim != self.head_dim {
            let part = share(self.rope_dim, self.head_dim);
            config.insert("partial_rotary_factor".into(), json!(part));
        }
        let positions = json!(self.max_position_embeddings);
        config.insert("max_position_embeddings".into(), positions);
        if let Some(scaling) = &self.rope_scaling {
            config.insert("rope_scaling".into(), Value::Object(scaling.clone()));
        }
        config
    }

    fn check(&self) -> Result<(), BundleError> {
        let &RopeFile {
            rope_theta,
            head_dim,
            rope_dim,
            max_position_embeddings: positions,
            ref rope_scaling,
        } = self;
        let place = Location::Rope;
        let is_base = rope_theta.is_finite() && rope_theta > 0.0;
        ensure(is_base, place, "rope_theta", "a number above 0", rope_theta)?;
        let expected = format_args!("a number from 1 to {MAX_COUNT}");
        for (field, count) in [
            ("head_dim", head_dim),
            ("max_position_embeddings", positions),
        ] {
            let fits = (1..=MAX_COUNT).contains(&count);
            ensure(fits, place, field, expected, count)?;
        }
        let expected = format_args!("an even number from 2 to {head_dim}, the elements of a head");
        let fits = rope_dim.is_multiple_of(2) && (2..=head_dim).contains(&rope_dim);
        ensure(fits, place, "rotated elements", expected, rope_dim)?;
        rope_scaling.as_ref().map_or(Ok(()), check_scaling)
    }
}

/// Numbers of `rope_scaling` that something is divided or multiplied by.
const FACTORS: [&str; 8] = [
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "short_factor",
    "long_factor",
];

/// Checks the numbers of `rope_scaling`, as far as they are known.
fn check_scaling(scaling: &Map<String, Value>) -> Result<(), BundleError> {
    for field in FACTORS {
        let numbers = match scaling.get(field) {
            None => &[],
            Some(Value::Array(numbers)) => &numbers[..],
            Some(number) => std::slice::from_ref(number),
        };
        for number in numbers {
            let is_factor = number.as_f64().is_some_and(|x| x.is_finite() && x > 0.0);
            ensure(is_factor, Location::Rope, field, "a number above 0", number)?;
        }
    }
    let field = "original_max_position_embeddings";
    let Some(count) = scaling.get(field) else {
        return Ok(());
    };
    let fits = (count.as_u64()).is_some_and(|n| (1..=MAX_COUNT as u64).contains(&n));
    let expected = format_args!("a number from 1 to {MAX_COUNT}");
    ensure(fits, Location::Rope, field, expected, count)
}

/// The largest count that a `config.json` may hold.
const MAX_COUNT: usize = i32::MAX as usize;

/// The share of `whole` that `part` is, such that their product, rounded down, is `part` again.
fn share(part: usize, whole: usize) -> f64 {
    let share = part as f64 / whole as f64;
    match (whole as f64 * share) as usize == part {
        true => share,
        false => share.next_up(),
    }
}

fn required<T>(field: &'static str, value: Option<T>) -> Result<T, BundleError> {
    value.ok_or_else(|| BundleError::field(Location::Rope, field, "a number", "nothing"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(rope_dim: usize) -> RopeFile {
        RopeFile {
            rope_theta: 500_000.1,
            head_dim: 128,
            rope_dim,
            max_position_embeddings: 4096,
            rope_scaling: None,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        for rope_dim in (2..=128).step_by(2) {
            let file = rope(rope_dim);
            assert_eq!(RopeFile::parse(&file.to_bytes().unwrap()).unwrap(), file);
        }
        let mut file = rope(128);
        let scaling = json!({"rope_type": "yarn", "factor": 4.1, "beta_fast": 32.0,
            "original_max_position_embeddings": 1024});
        file.rope_scaling = scaling.as_object().cloned();
        let bytes = file.to_bytes().unwrap();
        assert_eq!(RopeFile::parse(&bytes).unwrap(), file);
        for n in 0..bytes.len() {
            assert!(RopeFile::parse(&bytes[..n]).is_err());
        }
    }

    #[test]
    fn shares_lead_back() {
        for whole in 1..200 {
            for part in 1..=whole {
                assert_eq!((whole as f64 * share(part, whole)) as usize, part);
            }
        }
    }

    #[test]
    fn bad_files_say_what_is_wrong() {
        let with = |json: &str| {
            let mut bytes = header(MAGIC);
            bytes.extend_from_slice(&[0; 4]);
            bytes.extend_from_slice(&(json.len() as u32).to_le_bytes());
            bytes.extend_from_slice(json.as_bytes());
            RopeFile::parse(&bytes).unwrap_err().to_string()
        };
        for (json, message) in [
            (
                "{}",
                "the parameters of the rotary embedding: head_dim: expected a number, found nothing",
            ),
            (
                r#"{"rope_theta":"x"}"#,
                "the rotary embedding: `rope_theta`: expected a number, found a string",
            ),
            (
                r#"{"rope_theta":-1,"head_dim":4,"max_position_embeddings":9}"#,
                "the parameters of the rotary embedding: rope_theta: expected a number above 0, found -1",
            ),
            (
                r#"{"rope_theta":1e4,"head_dim":4,"max_position_embeddings":9,"rope_scaling":
                    {"rope_type":"yarn","factor":0}}"#,
                "the parameters of the rotary embedding: factor: expected a number above 0, found 0",
            ),
            (
                r#"{"rope_theta":1e4,"head_dim":4,"max_position_embeddings":9,"partial_rotary_factor":2}"#,
                "the parameters of the rotary embedding: rotated elements: expected an even number from 2 to 4, the elements of a head, found 8",
            ),
            (
                "[]",
                "the rotary embedding: the file: expected an object, found a list",
            ),
        ] {
            assert!(with(json).contains(message), "{}", with(json));
        }
        let mut file = rope(2);
        file.rope_theta = f64::NAN;
        assert!(file.to_bytes().is_err());
        for rope_dim in [0, 1, 63, 130] {
            assert!(rope(rope_dim).to_bytes().is_err(), "{rope_dim}");
        }
    }

    #[test]
    fn numbers_that_scale_are_checked() {
        let with = |key: &str, value: Value| {
            let mut file = rope(128);
            let mut scaling = Map::new();
            scaling.insert("rope_type".into(), json!("yarn"));
            scaling.insert(key.into(), value);
            file.rope_scaling = Some(scaling);
            file
        };
        for field in FACTORS {
            // What is no number is null in JSON.
            for bad in [json!(f64::NAN), json!(f64::INFINITY), json!(0), json!(-1.5)] {
                let error = with(field, bad).to_bytes().unwrap_err().to_string();
                let message = format!(": {field}: expected a number above 0, found ");
                assert!(error.contains(&message), "{error}");
            }
            assert!(with(field, json!(0.5)).to_bytes().is_ok());
        }
        let field = "original_max_position_embeddings";
        for bad in [json!(0), json!(-1), json!(1.5), json!(1_u64 << 31)] {
            let error = with(field, bad).to_bytes().unwrap_err().to_string();
            assert!(
                error.contains("expected a number from 1 to 2147483647"),
                "{error}"
            );
        }
        assert!(with("long_factor", json!([1.0, 0.0])).to_bytes().is_err());
    }
}
