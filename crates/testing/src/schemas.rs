//! Random JSON schemas of the kinds that answers are asked for with.

use serde_json::{Map, Value, json};

/// The schema of `seed`, nested up to two levels, which some values match.
pub fn random(seed: u64) -> Value {
    let mut random = Random {
        state: seed,
        definitions: Vec::new(),
    };
    for name in ["item", "node"].into_iter().take(random.below(3)) {
        // One that may refer to those before it.
        let schema = random.schema(1);
        random.definitions.push((name.to_owned(), schema));
    }
    let mut schema = match random.below(4) {
        0 => random.schema(2),
        _ => random.object(2),
    };
    if !random.definitions.is_empty()
        && let Value::Object(members) = &mut schema
    {
        let definitions: Map<String, Value> = random.definitions.into_iter().collect();
        members.insert("$defs".to_owned(), definitions.into());
    }
    schema
}

struct Random {
    state: u64,
    definitions: Vec<(String, Value)>,
}

impl Random {
    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.state;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }

    fn schema(&mut self, depth: usize) -> Value {
        if depth == 0 {
            return self.scalar();
        }
        match self.below(10) {
            0..=2 => self.scalar(),
            3 | 4 => self.array(depth),
            5 => {
                let n = 2 + self.below(2);
                let all: Vec<Value> = (0..n).map(|_| self.schema(depth - 1)).collect();
                json!({"anyOf": all})
            }
            6 if !self.definitions.is_empty() => {
                let at = self.below(self.definitions.len());
                json!({"$ref": format!("#/$defs/{}", self.definitions[at].0)})
            }
            _ => self.object(depth),
        }
    }

    fn scalar(&mut self) -> Value {
        match self.below(12) {
            0 => json!({"type": "boolean"}),
            1 => json!({"type": ["integer", "null"]}),
            2 | 3 => {
                let least = self.below(2000) as i64 - 1000;
                json!({"type": "integer", "minimum": least, "maximum": least + self.below(5000) as i64})
            }
            4 => json!({"type": "number", "minimum": 0, "exclusiveMaximum": 1 + self.below(50)}),
            5 => {
                json!({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 300 + self.below(9)}]})
            }
            6 => {
                let all = [
                    json!("red"),
                    json!("grün"),
                    json!("a \"b\"\\\n"),
                    json!(7),
                    json!(null),
                    json!(true),
                ];
                let from = self.below(all.len());
                json!({"enum": &all[from..]})
            }
            7 => json!({"const": self.pick(&["fixed", "x y", "☃"])}),
            8 => {
                let formats = ["date", "time", "date-time", "uuid", "email", "ipv4"];
                json!({"type": "string", "format": self.pick(&formats)})
            }
            9 => {
                let patterns = [
                    "^[a-z]{2,9}$",
                    "^(SKU|ID)-[0-9]{4}$",
                    "^[A-Za-z0-9_]+@[a-z]{1,9}$",
                ];
                json!({"type": "string", "pattern": self.pick(&patterns), "maxLength": 40})
            }
            _ => {
                let least = self.below(4);
                json!({"type": "string", "minLength": least, "maxLength": least + self.below(24)})
            }
        }
    }

    fn array(&mut self, depth: usize) -> Value {
        let least = self.below(3);
        json!({
            "type": "array",
            "items": self.schema(depth - 1),
            "minItems": least,
            "maxItems": least + self.below(3),
        })
    }

    fn object(&mut self, depth: usize) -> Value {
        let names = [
            "name",
            "id",
            "tags",
            "value of it",
            "straße",
            "\"quoted\"",
            "x",
            "createdAt",
        ];
        let first = self.below(names.len());
        let n = 1 + self.below(4);
        let names: Vec<&str> = names.into_iter().cycle().skip(first).take(n).collect();
        let properties = names
            .iter()
            .map(|name| ((*name).to_owned(), self.schema(depth - 1)));
        let properties: Map<String, Value> = properties.collect();
        let mut required: Vec<&str> = names.clone();
        if self.below(2) == 0 {
            required.retain(|name| (name.len() + first).is_multiple_of(2));
        }
        json!({
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": false,
        })
    }
}
