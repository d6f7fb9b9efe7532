//! Calls in Gemma's notation: JSON whose keys have no quotes, and whose strings have marks in the place of theirs.
//!
//! Gemma 4: `<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:[1,true]}<tool_call|>`
//!
//! FunctionGemma: `<start_function_call>call:NAME{KEY:<escape>TEXT<escape>}<end_function_call>`

use std::collections::{HashMap, HashSet};

use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::tool::in_order;
use super::values::escaped;
use super::{CallEvent, MAX_HEAD, MAX_RULES, Tool, is_name, json_rule, quoted, say};
use crate::answer::scan::n_beginning;

/// What is around calls and strings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Marks {
    pub(super) call: &'static str,
    pub(super) call_end: &'static str,
    /// Before a string, and after it.
    pub(super) quote: &'static str,
}

pub(super) const GEMMA4: Marks = Marks {
    call: "<|tool_call>",
    call_end: "<tool_call|>",
    quote: "<|\"|>",
};

pub(super) const FUNCTION_GEMMA: Marks = Marks {
    call: "<start_function_call>",
    call_end: "<end_function_call>",
    quote: "<escape>",
};

/// What is before the name.
pub(super) const BEGIN: &str = "call:";

impl Marks {
    /// All of them.
    pub(super) fn all(&self) -> [&'static str; 3] {
        [self.call, self.call_end, self.quote]
    }

    /// How a call is written.
    pub(super) fn example(&self) -> String {
        let Marks {
            call,
            call_end,
            quote,
        } = self;
        format!("{call}{BEGIN}NAME{{KEY:{quote}TEXT{quote},KEY:VALUE}}{call_end}")
    }

    /// Rules of a Lark grammar that those of all tools share. `mark` says how a mark is spelled, which may be a control
    /// token.
    pub(super) fn shared_rules(&self, mark: &dyn Fn(&str) -> String) -> String {
        let quote = mark(self.quote);
        // Control tokens are in no text.
        let string = match quote == quoted(self.quote) {
            true => format!(
                "string: {quote} text\ntext[lazy]: /(?s:.*){}/\n",
                self.quote.replace('|', "\\|")
            ),
            false => format!("string: {quote} text {quote}\ntext: /(?s:.*)/\n"),
        };
        let scalar = json_rule("scalar", json!({"type": ["number", "boolean", "null"]}));
        format!(
            "any_value: string | scalar | any_list | any_map\n\
             any_list: \"[\" (any_value (\",\" any_value){{0,{MAX_ITEMS}}})? \"]\"\n\
             any_map: \"{{\" (any_member (\",\" any_member){{0,{MAX_ITEMS}}})? \"}}\"\n\
             any_member: {KEY} \":\" any_value\n\
             {string}{scalar}"
        )
    }
}

/// Values after the first in a list or an object that may have any, where a grammar says what may come.
const MAX_ITEMS: usize = 63;

/// Schemas of a tool at most, counting what references lead to once.
const MAX_SCHEMAS: usize = 1000;

/// Schemas inside one another at most.
const MAX_LEVELS: usize = 100;

/// Ways to have what is required of an object at most.
const MAX_WAYS: usize = 16;

/// Keys of objects that may have any.
const KEY: &str = "/[A-Za-z_][A-Za-z0-9_-]{0,63}/";

/// Kinds of values, as schemas call them.
const KINDS: [&str; 7] = [
    "string", "number", "integer", "boolean", "null", "array", "object",
];

/// What schemas are put together with: each stands alone.
const APPLICATORS: [&str; 6] = ["const", "enum", "$ref", "allOf", "anyOf", "oneOf"];

const OF_OBJECTS: [&str; 5] = [
    "properties",
    "required",
    "additionalProperties",
    "minProperties",
    "maxProperties",
];
const OF_LISTS: [&str; 5] = [
    "items",
    "prefixItems",
    "additionalItems",
    "minItems",
    "maxItems",
];
const OF_NUMBERS: [&str; 5] = [
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];

/// What no rules hold values to, beside what is said of strings.
const UNHELD: [&str; 13] = [
    "not",
    "if",
    "contains",
    "uniqueItems",
    "patternProperties",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
];

/// The rules of a Lark grammar for a call of `tool` up to its closing bracket, the first of which is `rule`. Where
/// they can't hold calls to the schema, they are those of no grammar, and its error says why.
pub(super) fn rules(
    rule: &str,
    tool: &Tool,
    marks: Marks,
    mark: &dyn Fn(&str) -> String,
) -> String {
    let mut writer = Writer {
        tool,
        root: rule,
        n_rules: 0,
        marks,
        quote: mark(marks.quote),
        references: HashMap::new(),
        n_left: MAX_SCHEMAS,
        n_levels: 0,
        rules: format!("{rule}: {} {rule}_arguments\n", quoted(&tool.name)),
    };
    let is_named = !tool.name.is_empty() && tool.name.chars().all(is_name);
    let written = match is_named && tool.name.len() < MAX_HEAD {
        true => writer.value(&format!("{rule}_arguments"), &tool.parameters, None),
        false => refused("expected a name of letters, digits, `_`, `.` and `-`"),
    };
    match written {
        Ok(()) => writer.rules,
        Err(No::Refused(why) | No::Never(why)) => {
            // A schema of an unknown type: that it is unknown is said with its name.
            let why = format!("the schema of tool {:?}: {why}", tool.name);
            format!("{rule}: %json {}\n", json!({"type": why}))
        }
    }
}

/// Why there is no rule for a schema.
enum No {
    /// No value matches it.
    Never(String),
    /// No rule would hold values to it.
    Refused(String),
}

impl No {
    /// The same, of what is called `name`.
    fn of(self, name: &str) -> No {
        match self {
            No::Never(why) => No::Never(format!("{name:?}: {why}")),
            No::Refused(why) => No::Refused(format!("{name:?}: {why}")),
        }
    }
}

fn never<T>(why: impl Into<String>) -> Result<T, No> {
    Err(No::Never(why.into()))
}

fn refused<T>(why: impl Into<String>) -> Result<T, No> {
    Err(No::Refused(why.into()))
}

/// Writes rules for values that match schemas. What schemas say of strings but `enum` and `const` isn't held to.
struct Writer<'a> {
    tool: &'a Tool,
    /// The first rule; the others are numbered.
    root: &'a str,
    n_rules: usize,
    marks: Marks,
    quote: String,
    /// The rules of what references lead to, by kind of value, which may be in it.
    references: HashMap<(&'a str, Option<&'a str>), String>,
    /// Schemas that may still have rules.
    n_left: usize,
    /// Schemas that the current one is in.
    n_levels: usize,
    rules: String,
}

impl<'a> Writer<'a> {
    fn rule(&mut self, rule: &str, body: &str) {
        self.rules += &format!("{rule}: {body}\n");
    }

    /// The name of a rule that isn't there yet.
    fn fresh(&mut self) -> String {
        self.n_rules += 1;
        format!("{}_{}", self.root, self.n_rules)
    }

    /// The rule `rule`, for values of `kind`, if there is one, that match `schema`, and those that it needs.
    fn value(&mut self, rule: &str, schema: &'a Value, kind: Option<&'a str>) -> Result<(), No> {
        if self.rules.len() > MAX_RULES {
            return refused(format!("expected at most {MAX_RULES} bytes of rules"));
        }
        if self.n_left == 0 {
            return refused(format!("expected at most {MAX_SCHEMAS} schemas"));
        }
        if self.n_levels == MAX_LEVELS {
            return refused(format!(
                "expected at most {MAX_LEVELS} schemas inside one another"
            ));
        }
        self.n_left -= 1;
        self.n_levels += 1;
        let written = self.value_of(rule, schema, kind);
        self.n_levels -= 1;
        written
    }

    fn value_of(&mut self, rule: &str, schema: &'a Value, kind: Option<&'a str>) -> Result<(), No> {
        match schema {
            Value::Bool(false) => return never("`false` matches nothing"),
            Value::Bool(true) | Value::Object(_) => {}
            _ => return refused("expected a schema, which is an object or a boolean"),
        }
        check_keywords(schema)?;
        let kinds = kinds(schema, kind)?;
        let one;
        let values = match (schema.get("const"), schema.get("enum")) {
            (Some(value), _) => {
                one = [value.clone()];
                Some(&one[..])
            }
            (None, Some(Value::Array(values))) => Some(&values[..]),
            (None, Some(_)) => return refused("`enum`: expected a list"),
            (None, None) => None,
        };
        if let Some(values) = values {
            let is_one = |value: &&Value| match &kinds {
                Some(kinds) => kinds.iter().any(|kind| is_of(value, kind)),
                None => true,
            };
            let all = values.iter().filter(is_one);
            let all: Vec<String> = all
                .map(|value| self.literal(value))
                .collect::<Result<_, _>>()?;
            if all.is_empty() {
                return never("no value in `enum` or `const` is of its type");
            }
            self.rule(rule, &all.join(" | "));
            return Ok(());
        }
        let kind = match kinds.as_deref() {
            None => None,
            Some([kind]) => Some(*kind),
            Some(kinds) => {
                let all = kinds.iter().map(|kind| (schema, Some(*kind)));
                return self.one_of(rule, all);
            }
        };
        if let Some(at) = schema.get("$ref") {
            return self.reference(rule, at, kind);
        }
        if let (Some(all), None | Some("object")) = (ways(schema), kind) {
            let (mut rules, mut why_not) = (Vec::with_capacity(all.len()), String::new());
            for way in all {
                let one = self.fresh();
                match self.object(&one, schema, way.get("required")) {
                    Ok(()) => rules.push(one),
                    Err(No::Never(why)) => why_not = why,
                    refused => return refused,
                }
            }
            if rules.is_empty() {
                return never(why_not);
            }
            self.rule(rule, &rules.join(" | "));
            return Ok(());
        }
        for name in ["allOf", "anyOf", "oneOf"] {
            match schema.get(name) {
                None => {}
                Some(Value::Array(all)) if name == "allOf" => match &all[..] {
                    [] => {}
                    [schema] => return self.value(rule, schema, kind),
                    _ => return refused("`allOf`: expected one schema, found several"),
                },
                Some(Value::Array(all)) => {
                    return self.one_of(rule, all.iter().map(|schema| (schema, kind)));
                }
                Some(_) => return refused(format!("`{name}`: expected a list")),
            }
        }
        let has = |names: &[&str]| names.iter().any(|name| schema.get(name).is_some());
        match kind {
            Some("string") => self.rule(rule, "string"),
            Some("array") => return self.list(rule, schema),
            Some("object") => return self.object(rule, schema, None),
            Some(kind) => self.scalar(rule, schema, kind),
            // Other kinds would match, too, but aren't meant.
            None if has(&OF_OBJECTS) => return self.object(rule, schema, None),
            None if has(&OF_LISTS) => return self.list(rule, schema),
            None if has(&OF_NUMBERS) => self.scalar(rule, schema, "number"),
            None if has(&["pattern", "format", "minLength", "maxLength"]) => {
                self.rule(rule, "string");
            }
            None => self.rule(rule, "any_value"),
        }
        Ok(())
    }

    fn scalar(&mut self, rule: &str, schema: &Value, kind: &str) {
        let mut scalar = json!({"type": kind});
        if matches!(kind, "number" | "integer") {
            for name in OF_NUMBERS {
                if let Some(limit) = schema.get(name) {
                    scalar[name] = limit.clone();
                }
            }
        }
        self.rules += &json_rule(rule, scalar);
    }

    fn reference(&mut self, rule: &str, at: &'a Value, kind: Option<&'a str>) -> Result<(), No> {
        let tool = self.tool;
        let Some((at, schema)) = at.as_str().and_then(|at| Some((at, tool.at(at)?))) else {
            return refused(format!(
                "`$ref`: expected what is in the schema, found {at}"
            ));
        };
        match self.references.get(&(at, kind)).cloned() {
            Some(known) if known != rule => self.rule(rule, &known),
            // It leads back to itself.
            Some(_) => self.rule(rule, "any_value"),
            None => {
                self.references.insert((at, kind), rule.to_owned());
                return match self.value(rule, schema, kind) {
                    // Others may refer to it already.
                    Err(No::Never(why)) => refused(format!("`$ref` {at:?}: {why}")),
                    written => written,
                };
            }
        }
        Ok(())
    }

    fn one_of(
        &mut self,
        rule: &str,
        schemas: impl Iterator<Item = (&'a Value, Option<&'a str>)>,
    ) -> Result<(), No> {
        let mut all = Vec::new();
        let mut why_not = "nothing matches".to_owned();
        for (schema, kind) in schemas {
            let one = self.fresh();
            match self.value(&one, schema, kind) {
                Ok(()) => all.push(one),
                Err(No::Never(why)) => why_not = why,
                refused => return refused,
            }
        }
        if all.is_empty() {
            return never(why_not);
        }
        self.rule(rule, &all.join(" | "));
        Ok(())
    }

    /// A rule of its own for values that match `schema`, if any do.
    fn maybe(&mut self, schema: Option<&'a Value>) -> Result<Option<String>, No> {
        let Some(schema) = schema else {
            return Ok(Some("any_value".to_owned()));
        };
        let rule = self.fresh();
        match self.value(&rule, schema, None) {
            Ok(()) => Ok(Some(rule)),
            Err(No::Never(_)) => Ok(None),
            Err(refused) => Err(refused),
        }
    }

    fn list(&mut self, rule: &str, schema: &'a Value) -> Result<(), No> {
        // Before 2020, the first items had another name.
        let (first, rest) = match (schema.get("prefixItems"), schema.get("items")) {
            (None, Some(Value::Array(first))) => (&first[..], schema.get("additionalItems")),
            (None, rest) => (&[][..], rest),
            (Some(Value::Array(first)), rest) => (&first[..], rest),
            (Some(_), _) => return refused("`prefixItems`: expected a list"),
        };
        let min = count(schema, "minItems")?.unwrap_or(0);
        let max = count(schema, "maxItems")?;
        if max.is_some_and(|max| min > max) {
            return never("`minItems` is more than `maxItems`");
        }
        let mut items = Vec::new();
        let mut is_whole = true;
        for item in first {
            if max.is_some_and(|max| items.len() as u64 >= max) {
                break;
            }
            let Some(item) = self.maybe(Some(item))? else {
                is_whole = false;
                break;
            };
            items.push(item);
        }
        let rest = match is_whole {
            true => self.maybe(rest)?,
            false => None,
        };
        let n_first = items.len() as u64;
        let most = match rest {
            None => Some(n_first),
            Some(_) => None,
        };
        if most.is_some_and(|most| min > most) {
            return never("`minItems` is more than the items that there may be");
        }
        let max = match (max, most) {
            (Some(max), Some(most)) => max.min(most),
            (Some(max), None) | (None, Some(max)) => max,
            (None, None) => min.max(n_first).saturating_add(1 + MAX_ITEMS as u64),
        };
        if let (Some(item), 0) = (&rest, n_first) {
            let body = match (min, max.checked_sub(1)) {
                (_, None) => "\"[\" \"]\"".to_owned(),
                (0, Some(more)) => format!("\"[\" ({item} (\",\" {item}){{0,{more}}})? \"]\""),
                (min, Some(more)) => {
                    format!("\"[\" {item} (\",\" {item}){{{},{more}}} \"]\"", min - 1)
                }
            };
            self.rule(rule, &body);
            return Ok(());
        }
        let mut next = self.fresh();
        self.rule(rule, &format!("\"[\" {next} \"]\""));
        for (index, item) in (0..).zip(&items) {
            let this = std::mem::replace(&mut next, self.fresh());
            let comma = if index > 0 { "\",\" " } else { "" };
            let end = if index >= min { " | \"\"" } else { "" };
            self.rule(&this, &format!("{comma}{item} {next}{end}"));
        }
        let body = match rest {
            Some(item) if max > n_first => format!(
                "(\",\" {item}){{{},{}}}",
                min.saturating_sub(n_first),
                max - n_first
            ),
            _ => "\"\"".to_owned(),
        };
        self.rule(&next, &body);
        Ok(())
    }

    /// Members come in the order of their names, as templates write them. Where some have names, no others come.
    /// `more` are names that are required beside those that the schema says are.
    fn object(&mut self, rule: &str, schema: &'a Value, more: Option<&'a Value>) -> Result<(), No> {
        let additional = schema.get("additionalProperties");
        let (min, max) = (
            count(schema, "minProperties")?.unwrap_or(0),
            count(schema, "maxProperties")?,
        );
        if max.is_some_and(|max| min > max) {
            return never("`minProperties` is more than `maxProperties`");
        }
        let mut members: Vec<(&str, Option<&Value>)> = match schema.get("properties") {
            None => Vec::new(),
            Some(Value::Object(all)) => {
                all.iter().map(|(name, it)| (&name[..], Some(it))).collect()
            }
            Some(_) => return refused("`properties`: expected an object"),
        };
        let mut required: HashSet<&str> = HashSet::new();
        for names in schema.get("required").into_iter().chain(more) {
            let Value::Array(names) = names else {
                return refused("`required`: expected a list");
            };
            required.extend(names.iter().filter_map(Value::as_str));
        }
        let known: HashSet<&str> = members.iter().map(|(name, _)| *name).collect();
        members.extend(required.difference(&known).map(|name| (*name, additional)));
        let is_open = match additional {
            None => schema.get("properties").is_none(),
            Some(additional) => *additional != Value::Bool(false),
        };
        if members.is_empty() && is_open {
            return self.map(rule, additional, min, max);
        }
        members.sort_by_cached_key(|(name, _)| (name.to_lowercase(), *name));
        let mut all = Vec::with_capacity(members.len());
        for (name, schema) in members {
            let is_required = required.contains(name);
            let (member, value) = (self.fresh(), self.fresh());
            let key = self.key(name)?;
            let written = match schema {
                Some(schema) => self.value(&value, schema, None),
                None => {
                    self.rule(&value, "any_value");
                    Ok(())
                }
            };
            match written {
                Ok(()) => {}
                Err(No::Never(_)) if !is_required => continue,
                Err(no) => return Err(no.of(name)),
            }
            self.rule(&member, &format!("{key} {value}"));
            all.push((member, is_required));
        }
        let n_required = all.iter().filter(|(_, is_required)| *is_required).count();
        if min > n_required as u64 || max.is_some_and(|max| max < all.len() as u64) {
            return refused(
                "`minProperties` and `maxProperties`: expected what holds for any of `properties` with all of `required`",
            );
        }
        let members = self.fresh();
        self.rule(rule, &format!("\"{{\" {members} \"}}\""));
        self.rules += &in_order(&members, &all, "\",\"");
        Ok(())
    }

    /// An object with any names.
    fn map(
        &mut self,
        rule: &str,
        schema: Option<&'a Value>,
        min: u64,
        max: Option<u64>,
    ) -> Result<(), No> {
        let schema = schema.filter(|schema| **schema != Value::Bool(true));
        if schema.is_none() && (min, max) == (0, None) {
            self.rule(rule, "any_map");
            return Ok(());
        }
        let value = self.maybe(schema)?;
        let max = match value {
            Some(_) => max.unwrap_or(min.saturating_add(1 + MAX_ITEMS as u64)),
            None => 0,
        };
        // Names may come twice, and count once.
        if min > 1 {
            return refused("`minProperties`: expected at most 1 where any names may come");
        }
        let body = match (value, max.checked_sub(1)) {
            (Some(value), Some(more)) => {
                let member = self.fresh();
                self.rule(&member, &format!("{KEY} \":\" {value}"));
                let maybe = if min == 0 { "?" } else { "" };
                format!("\"{{\" ({member} (\",\" {member}){{0,{more}}}){maybe} \"}}\"")
            }
            _ if min > 0 => return never("`minProperties` is more than may come"),
            _ => "\"{\" \"}\"".to_owned(),
        };
        self.rule(rule, &body);
        Ok(())
    }

    /// `name` before a value. What has no quotes has to end where it is read to end.
    fn key(&self, name: &str) -> Result<String, No> {
        let is_read = !name.contains([':', '{', '}', '[', ']', '"'])
            && self.marks.all().iter().all(|mark| !name.contains(mark))
            && name.trim() == name
            && name.len() < MAX_HEAD;
        match is_read {
            true => Ok(quoted(&format!("{name}:"))),
            false => refused(format!(
                "the property {name:?}: expected a name of less than {MAX_HEAD} bytes without `:`, brackets, quotes \
                 and blanks around it, for calls of this model have names without quotes"
            )),
        }
    }

    /// `value` and nothing else.
    fn literal(&self, value: &Value) -> Result<String, No> {
        let joined = |all: Vec<String>| all.join(" \",\" ");
        Ok(match value {
            Value::String(text) if text.contains(self.marks.quote) => {
                return refused(format!(
                    "{value}: expected a text without {}",
                    self.marks.quote
                ));
            }
            Value::String(text) => format!("({0} {1} {0})", self.quote, quoted(text)),
            Value::Array(items) => {
                let items = items.iter().map(|item| self.literal(item));
                format!("(\"[\" {} \"]\")", joined(items.collect::<Result<_, _>>()?))
            }
            Value::Object(members) => {
                let members = members.iter().map(|(name, value)| {
                    Ok(format!("{} {}", self.key(name)?, self.literal(value)?))
                });
                let members = members.collect::<Result<_, _>>()?;
                format!("(\"{{\" {} \"}}\")", joined(members))
            }
            scalar => quoted(&scalar.to_string()),
        })
    }
}

/// Refuses what of `schema` no rules hold values to.
fn check_keywords(schema: &Value) -> Result<(), No> {
    let says = |name: &&&str| {
        schema
            .get(name)
            .is_some_and(|told| *told != Value::Bool(false))
    };
    if let Some(name) = UNHELD.iter().find(says) {
        return refused(format!("calls of this model can't be held to `{name}`"));
    }
    // What applies to the same value twice would have to be one.
    let has = |name: &&&str| schema.get(name).is_some();
    if ways(schema).is_some() {
        return Ok(());
    }
    let mut alone = APPLICATORS.iter().filter(has);
    if let Some(name) = alone.next() {
        let others = [&OF_OBJECTS[..], &OF_LISTS, &OF_NUMBERS].concat();
        if let Some(other) = alone.next().or_else(|| others.iter().find(has)) {
            return refused(format!("expected `{name}` or `{other}`, found both"));
        }
    }
    Ok(())
}

/// What `anyOf` says beside `properties`, if that is only which of them are required, and nothing else applies.
fn ways(schema: &Value) -> Option<&[Value]> {
    let says = |name: &str| schema.get(name).is_some();
    if APPLICATORS.iter().filter(|name| says(name)).count() != 1 {
        return None;
    }
    schema.get("properties")?;
    if OF_LISTS.iter().chain(&OF_NUMBERS).any(|name| says(name)) {
        return None;
    }
    let all = schema.get("anyOf")?.as_array()?;
    let is_way = |way: &Value| {
        way.as_object()
            .is_some_and(|way| way.keys().all(|name| name == "required"))
    };
    // Each has rules for all properties.
    ((1..=MAX_WAYS).contains(&all.len()) && all.iter().all(is_way)).then_some(all)
}

/// The kinds of values that `schema` has, of `kind` if there is one; `None` for all.
fn kinds<'s>(schema: &'s Value, kind: Option<&'s str>) -> Result<Option<Vec<&'s str>>, No> {
    let names = match schema.get("type") {
        None => return Ok(kind.map(|kind| vec![kind])),
        Some(Value::Array(names)) => &names[..],
        Some(name) => std::slice::from_ref(name),
    };
    let mut found: Vec<&str> = Vec::new();
    for name in names {
        match name.as_str().filter(|name| KINDS.contains(name)) {
            Some(name) if !found.contains(&name) => found.push(name),
            Some(_) => {}
            None => return refused(format!("`type`: expected a kind of value, found {name}")),
        }
    }
    let found = match kind {
        None => found,
        Some(kind) if found.contains(&kind) => vec![kind],
        Some("number") if found.contains(&"integer") => vec!["integer"],
        Some("integer") if found.contains(&"number") => vec!["integer"],
        Some(_) => Vec::new(),
    };
    match found.is_empty() {
        true => never("no value is of all its types"),
        false => Ok(Some(found)),
    }
}

/// Whether `value` is of the kind `kind`.
fn is_of(value: &Value, kind: &str) -> bool {
    match value {
        Value::String(_) => kind == "string",
        Value::Number(number) => {
            let is_whole = number.as_f64().is_some_and(|number| number.fract() == 0.0);
            kind == "number" || kind == "integer" && is_whole
        }
        Value::Bool(_) => kind == "boolean",
        Value::Null => kind == "null",
        Value::Array(_) => kind == "array",
        Value::Object(_) => kind == "object",
    }
}

/// How many `schema` says there are under `name`.
fn count(schema: &Value, name: &str) -> Result<Option<u64>, No> {
    match schema.get(name) {
        None => Ok(None),
        Some(count) => match count.as_u64() {
            Some(count) => Ok(Some(count)),
            None => refused(format!("`{name}`: expected a count, found {count}")),
        },
    }
}

/// Reads one call, piece by piece, from what follows its mark.
#[derive(Debug, Clone)]
pub(super) struct GemmaReader {
    marks: Marks,
    state: State,
    /// Text that isn't read yet.
    held: String,
    /// Bytes of it in which a value that is no string has no end.
    searched: usize,
    /// Brackets that are open, and whether there is something in them.
    open: Vec<(char, bool)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the arguments.
    Head,
    /// Before a key, or in it.
    Key,
    /// Before a value, or in one that is no string.
    Value,
    /// In a string.
    Text,
    /// After a value.
    After,
    /// Before what ends the call.
    Tail,
    Over,
}

impl GemmaReader {
    /// Of a call with `marks`.
    pub(super) fn new(marks: Marks) -> GemmaReader {
        GemmaReader {
            marks,
            state: State::Head,
            held: String::new(),
            searched: 0,
            open: Vec::new(),
        }
    }

    /// Reads `text`; returns what of it doesn't belong to the call any more, if that is over.
    pub(super) fn push(&mut self, text: &str, events: &mut Vec<CallEvent>) -> Option<String> {
        self.held += text;
        while self.advance(events) {}
        (self.state == State::Over).then(|| std::mem::take(&mut self.held))
    }

    /// The end of the answer. Arguments that were cut off stay so.
    pub(super) fn finish(&mut self, events: &mut Vec<CallEvent>) {
        match self.state {
            State::Head => {
                let text = std::mem::take(&mut self.held);
                events.push(CallEvent::Text(format!("{}{text}", self.marks.call)));
            }
            State::Text => {
                let n_end = n_beginning(&self.held, self.marks.quote);
                say(escaped(&self.held[..self.held.len() - n_end]), events);
                events.push(CallEvent::Ended);
            }
            State::Value => {
                let word = std::mem::take(&mut self.held);
                if !word.trim().starts_with('<') {
                    say(word.trim(), events);
                }
                events.push(CallEvent::Ended);
            }
            State::Key | State::After => events.push(CallEvent::Ended),
            State::Tail | State::Over => {}
        }
        self.state = State::Over;
    }

    /// Reads as much as is certain; true if there may be more.
    fn advance(&mut self, events: &mut Vec<CallEvent>) -> bool {
        if self.state != State::Text {
            let n_blank = self.held.len() - self.held.trim_start().len();
            self.held.drain(..n_blank);
        }
        if self.held.is_empty() {
            return false;
        }
        match self.state {
            State::Head => self.head(events),
            State::Key => self.key(events),
            State::Value => self.value(events),
            State::Text => self.text(events),
            State::After => self.after(events),
            State::Tail => {
                let end = self.marks.call_end;
                if self.held.starts_with(end) {
                    self.held.drain(..end.len());
                } else if end.starts_with(&self.held) {
                    return false;
                }
                self.state = State::Over;
                false
            }
            State::Over => false,
        }
    }

    fn head(&mut self, events: &mut Vec<CallEvent>) -> bool {
        let found = match self.held.strip_prefix(BEGIN) {
            None if BEGIN.starts_with(&self.held) => return false,
            None => None,
            Some(rest) => match rest.split_once('{') {
                None if rest.len() <= MAX_HEAD && rest.trim_end().chars().all(is_name) => {
                    return false;
                }
                None => None,
                Some((name, rest)) => Some((name.trim().to_owned(), rest.to_owned())),
            },
        };
        let found = found.filter(|(name, _)| !name.is_empty() && name.chars().all(is_name));
        let Some((name, rest)) = found else {
            // It is no call.
            events.push(CallEvent::Text(self.marks.call.to_owned()));
            self.state = State::Over;
            return false;
        };
        events.push(CallEvent::Begun { name });
        self.held = rest;
        self.begin('{', events);
        true
    }

    /// A list or an object begins.
    fn begin(&mut self, open: char, events: &mut Vec<CallEvent>) {
        say(if open == '{' { "{" } else { "[" }, events);
        self.open.push((open, false));
        self.state = match open {
            '{' => State::Key,
            _ => State::Value,
        };
    }

    /// The innermost of them ends, or with the outermost the call.
    fn end(&mut self, events: &mut Vec<CallEvent>) {
        let open = self.open.pop();
        let is_list = open.is_some_and(|(open, _)| open == '[');
        say(if is_list { "]" } else { "}" }, events);
        self.state = State::After;
        if self.open.is_empty() {
            events.push(CallEvent::Ended);
            self.state = State::Tail;
        }
    }

    fn key(&mut self, events: &mut Vec<CallEvent>) -> bool {
        if self.ends(events) {
            return true;
        }
        let Some(at) = self.held.find([':', '}', '{', '[', ']']) else {
            // No key is that long.
            if self.held.len() > MAX_HEAD {
                self.held.clear();
            }
            return false;
        };
        if !self.held[at..].starts_with(':') {
            // Without a value, it says nothing; other brackets aren't there.
            let n_wrong = usize::from(!self.held[at..].starts_with('}'));
            self.held.drain(..at + n_wrong);
            return true;
        }
        let key = self.held[..at].replace(self.marks.quote, "");
        let key = Value::from(key.trim().trim_matches('"'));
        self.separate(events);
        say(format!("{key}: "), events);
        self.held.drain(..=at);
        self.state = State::Value;
        true
    }

    /// What comes next follows others.
    fn separate(&mut self, events: &mut Vec<CallEvent>) {
        if let Some((_, has_some)) = self.open.last_mut()
            && std::mem::replace(has_some, true)
        {
            say(", ", events);
        }
    }

    fn value(&mut self, events: &mut Vec<CallEvent>) -> bool {
        let quote = self.marks.quote;
        let in_list = self.open.last().is_some_and(|(open, _)| *open == '[');
        if self.held.starts_with(quote) {
            self.held.drain(..quote.len());
            self.begin_value(in_list, events);
            say("\"", events);
            self.state = State::Text;
            return true;
        }
        if quote.starts_with(&self.held) {
            return false;
        }
        let first = self.held.chars().next();
        if let Some(open @ ('{' | '[')) = first {
            self.held.drain(..1);
            self.begin_value(in_list, events);
            self.begin(open, events);
            return true;
        }
        if in_list && first == Some(']') {
            self.held.drain(..1);
            self.end(events);
            return true;
        }
        let ends = [",", "]", "}", quote, self.marks.call_end];
        // An end may have begun before what came last.
        let longest = ends.iter().map(|end| end.len()).max().unwrap_or(0);
        let mut from = self.searched.saturating_sub(longest);
        while !self.held.is_char_boundary(from) {
            from -= 1;
        }
        let new = &self.held[from..];
        let Some(at) = ends.iter().filter_map(|end| new.find(end)).min() else {
            self.searched = self.held.len();
            return false;
        };
        let at = from + at;
        self.searched = 0;
        let word: String = self.held.drain(..at).collect();
        self.begin_value(in_list, events);
        match word.trim() {
            "" | "None" | "none" => say("null", events),
            "True" => say("true", events),
            "False" => say("false", events),
            // Numbers may be beyond what any type holds.
            word if serde_json::from_str::<IgnoredAny>(word).is_ok() => say(word, events),
            word => say(Value::from(word).to_string(), events),
        }
        self.state = State::After;
        true
    }

    /// Values of a list are separated, those of an object are with their keys.
    fn begin_value(&mut self, in_list: bool, events: &mut Vec<CallEvent>) {
        if in_list {
            self.separate(events);
        }
    }

    fn text(&mut self, events: &mut Vec<CallEvent>) -> bool {
        let quote = self.marks.quote;
        if let Some(at) = self.held.find(quote) {
            say(&(escaped(&self.held[..at]) + "\""), events);
            self.held.drain(..at + quote.len());
            self.state = State::After;
            return true;
        }
        let n_certain = self.held.len() - n_beginning(&self.held, quote);
        let certain: String = self.held.drain(..n_certain).collect();
        say(escaped(&certain), events);
        false
    }

    fn after(&mut self, events: &mut Vec<CallEvent>) -> bool {
        if self.ends(events) {
            return true;
        }
        if self.marks.call_end.starts_with(&self.held) {
            return false;
        }
        let is_comma = self.held.starts_with(',');
        let n = self.held.chars().next().map_or(0, char::len_utf8);
        self.held.drain(..n);
        if is_comma {
            self.state = match self.open.last() {
                Some(('[', _)) => State::Value,
                _ => State::Key,
            };
        }
        // Anything else isn't there.
        true
    }

    /// Ends what a bracket ends, or what is left open at the end of the call.
    fn ends(&mut self, events: &mut Vec<CallEvent>) -> bool {
        if self.held.starts_with(self.marks.call_end) {
            while self.state != State::Tail {
                self.end(events);
            }
            return true;
        }
        if self.held.starts_with(['}', ']']) {
            self.held.drain(..1);
            self.end(events);
            return true;
        }
        false
    }
}
