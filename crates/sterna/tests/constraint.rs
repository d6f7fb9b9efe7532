//! That answers match what they are constrained to, whatever the model, the sampling and the drafts.
#![cfg(feature = "constraint")]

use std::fmt::Write as _;

use crate::common::{Files, cpu, sampled, session};
use serde_json::Value;
use sterna::ErrorCode;
use sterna::constraint::{Constraints, Grammar};
use sterna::generate::{
    Allowed, Event, Generator, Request, StopReason, TextOptions, TokenConstraint,
};
use sterna::scheduler::{Scheduler, SchedulerOptions, SequenceId};
use sterna::sequence::Sequence;
use sterna_engine::{Backend, Cpu, Sampler, SamplerConfig};
use sterna_testing::schemas;
use sterna_text::Decode;

/// A schema, and whether a value is what it describes.
type Schema = (&'static str, fn(&Value) -> bool);

const SCHEMAS: [Schema; 12] = [
    (r#"{"type": "boolean"}"#, Value::is_boolean),
    (r#"{"type": "null"}"#, Value::is_null),
    (r#"{"enum": ["fox", "otter", 7]}"#, |value| {
        *value == "fox" || *value == "otter" || *value == 7
    }),
    (r#"{"const": {"a": [1, "ä"]}}"#, |value| {
        *value == serde_json::json!({"a": [1, "ä"]})
    }),
    (
        r#"{"type": "integer", "minimum": -20, "maximum": 120}"#,
        |value| value.as_i64().is_some_and(|n| (-20..=120).contains(&n)),
    ),
    (
        r#"{"type": "string", "minLength": 2, "maxLength": 12}"#,
        |value| {
            let text = value.as_str();
            text.is_some_and(|text| (2..=12).contains(&text.chars().count()))
        },
    ),
    (
        r#"{"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"}"#,
        |value| {
            let text = value.as_str().unwrap_or_default();
            let (first, rest) = text.split_at(1.min(text.len()));
            first.chars().all(|c| c.is_ascii_uppercase())
                && (1..=8).contains(&rest.len())
                && rest.chars().all(|c| c.is_ascii_lowercase())
        },
    ),
    (
        r#"{"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}"#,
        |value| {
            let items = value.as_array();
            items.is_some_and(|items| {
                (1..=3).contains(&items.len()) && items.iter().all(Value::is_boolean)
            })
        },
    ),
    (
        r#"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9},
            "age": {"type": "integer", "minimum": 0, "maximum": 999}},
            "required": ["name", "age"], "additionalProperties": false}"#,
        |value| {
            let members = value.as_object();
            members.is_some_and(|members| members.len() == 2)
                && value["name"]
                    .as_str()
                    .is_some_and(|name| name.chars().count() <= 9)
                && value["age"].as_u64().is_some_and(|age| age <= 999)
        },
    ),
    (
        r#"{"anyOf": [{"type": "null"}, {"type": "object", "properties": {"x": {"enum": [1, 2]}},
            "required": ["x"], "additionalProperties": false}]}"#,
        |value| value.is_null() || value["x"] == 1 || value["x"] == 2,
    ),
    (
        r##"{"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties":
            {"leaf": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/end"}, {"type": "null"}]}},
            "required": ["leaf", "next"], "additionalProperties": false},
            "end": {"type": "object", "properties": {"end": {"const": true}}, "required": ["end"],
            "additionalProperties": false}}}"##,
        |value| {
            value["leaf"].is_boolean() && (value["next"].is_null() || value["next"]["end"] == true)
        },
    ),
    (
        r#"{"type": "object", "properties": {"kind": {"type": "string", "format": "date"}},
            "required": ["kind"], "additionalProperties": false}"#,
        |value| value["kind"].as_str().is_some_and(|date| date.len() == 10),
    ),
];

/// A regular expression, and whether a text matches it.
type Regex = (&'static str, fn(&str) -> bool);

const REGEXES: [Regex; 6] = [
    ("yes|no", |text| text == "yes" || text == "no"),
    ("", str::is_empty),
    ("[0-9]{3}-[0-9]{4}", |text| {
        text.len() == 8 && text.as_bytes()[3] == b'-'
    }),
    (" {2}once upon a time", |text| text == "  once upon a time"),
    ("(ab|c){1,5}", |text| {
        !text.is_empty() && text.replace("ab", "").replace('c', "").is_empty()
    }),
    ("[äöü€😀]{2,4}", |text| {
        (2..=4).contains(&text.chars().count())
    }),
];

const PROMPTS: [&str; 2] = [
    "Once upon a time",
    "Describe a fox as JSON: {\"name\": \"Ruby\"}",
];

/// A model to be constrained.
struct Subject<B: Backend = Cpu> {
    files: Files,
    model: std::sync::Arc<sterna_engine::Model<B>>,
    constraints: Constraints,
}

/// What an answer is asked for with.
#[derive(Debug, Clone)]
struct Asked {
    prompt: &'static str,
    grammar: Option<Grammar>,
    sampling: SamplerConfig,
    speculate: Option<usize>,
}

impl Subject {
    fn new(files: Files) -> Subject {
        Subject::on(cpu(), files)
    }
}

impl<B: Backend> Subject<B> {
    fn on(backend: B, files: Files) -> Subject<B> {
        Subject {
            model: files.load(backend),
            constraints: Constraints::new(files.tokenizer.clone()),
            files,
        }
    }

    fn request(&self, asked: &Asked) -> Request {
        let n_vocab = self.model.config().n_vocab;
        let grammar = asked.grammar.as_ref();
        let constraint = grammar.map(|grammar| self.constraints.of(grammar).unwrap());
        Request {
            max_tokens: 400,
            stop_ids: self.files.tokenizer.end_ids().to_vec(),
            speculate: asked.speculate,
            text: Some(TextOptions {
                tokenizer: self.files.tokenizer.clone(),
                stop_strings: Vec::new(),
            }),
            constraint,
            ..Request::new(
                self.files.encode(asked.prompt),
                Sampler::new(asked.sampling.clone(), n_vocab).unwrap(),
            )
        }
    }

    fn add(&self, scheduler: &mut Scheduler<B>) -> SequenceId {
        scheduler.add(Sequence::new(session(&self.model, 512)))
    }

    /// The answers to all of `asked`, in shared steps.
    fn together(&self, asked: &[Asked]) -> Vec<(String, Generator)> {
        self.together_as(asked, SchedulerOptions::default())
    }

    fn together_as(&self, asked: &[Asked], options: SchedulerOptions) -> Vec<(String, Generator)> {
        let mut scheduler = Scheduler::new(options);
        let ids: Vec<SequenceId> = asked.iter().map(|_| self.add(&mut scheduler)).collect();
        for (&id, asked) in ids.iter().zip(asked) {
            scheduler.start(id, self.request(asked)).unwrap();
        }
        let mut texts = vec![String::new(); asked.len()];
        while !scheduler.is_idle() {
            for (id, event) in scheduler.step().unwrap() {
                let at = ids.iter().position(|known| *known == id).unwrap();
                match event {
                    Event::Token(token) => texts[at] += &token.text,
                    Event::Ended { text, .. } => texts[at] += &text,
                    event => panic!("{:?}: {event:?}", asked[at]),
                }
            }
        }
        let generators = ids.iter().map(|&id| scheduler.finish(id).unwrap());
        texts.into_iter().zip(generators).collect()
    }

    fn answer(&self, asked: &Asked) -> (String, Generator) {
        self.together(std::slice::from_ref(asked)).remove(0)
    }
}

/// Whether a text is what a grammar describes.
type Check = Box<dyn Fn(&str) -> bool>;

fn grammars() -> Vec<(Grammar, Check)> {
    let schemas = SCHEMAS.into_iter().map(|(schema, holds)| {
        let check = move |text: &str| serde_json::from_str(text).is_ok_and(|value| holds(&value));
        (Grammar::JsonSchema(schema.into()), Box::new(check) as Check)
    });
    let regexes = REGEXES
        .into_iter()
        .map(|(regex, holds)| (Grammar::Regex(regex.into()), Box::new(holds) as Check));
    schemas.chain(regexes).collect()
}

fn samplings() -> Vec<SamplerConfig> {
    let penalised = SamplerConfig {
        repeat_penalty: 1.3,
        ..sampled(5)
    };
    let wild = SamplerConfig {
        temperature: 2.0,
        seed: 9,
        ..SamplerConfig::default()
    };
    vec![SamplerConfig::default(), sampled(3), penalised, wild]
}

fn answers_match(files: Files) {
    let subject = Subject::new(files);
    let mut n_accepted = 0;
    for (grammar, holds) in grammars() {
        for sampling in samplings() {
            for prompt in PROMPTS {
                let asked = Asked {
                    prompt,
                    grammar: Some(grammar.clone()),
                    sampling: sampling.clone(),
                    speculate: None,
                };
                let (text, generator) = subject.answer(&asked);
                let stats = *generator.stats();
                assert!(holds(&text), "{asked:?}: {text}");
                assert!(
                    matches!(
                        stats.stop,
                        Some(StopReason::StopToken | StopReason::Complete)
                    ),
                    "{asked:?}: {:?}",
                    stats.stop
                );
                // Drafts change nothing.
                let asked = Asked {
                    speculate: Some(8),
                    ..asked
                };
                let (drafted, with_drafts) = subject.answer(&asked);
                assert_eq!(drafted, text, "{asked:?}");
                assert_eq!(with_drafts.answer(), generator.answer(), "{asked:?}");
                n_accepted += with_drafts.stats().n_accepted;
            }
        }
    }
    assert!(n_accepted > 0);
}

#[test]
fn answers_of_a_trained_model_match() {
    answers_match(Files::tiny_tales());
}

#[test]
fn answers_of_a_model_that_never_saw_json_match() {
    answers_match(Files::stories());
}

/// Random schemas whose answers are checked by a validator that isn't ours.
const N_RANDOM: u64 = 1000;
/// Those that are answered in shared steps.
const N_TOGETHER: usize = 10;

#[test]
fn answers_to_random_schemas_are_valid() {
    let subject = Subject::new(Files::tiny_tales());
    let seeds: Vec<u64> = (0..N_RANDOM).collect();
    let mut wrong = String::new();
    for seeds in seeds.chunks(N_TOGETHER) {
        let schemas: Vec<Value> = seeds.iter().map(|&seed| schemas::random(seed)).collect();
        let asked = schemas.iter().zip(seeds).map(|(schema, &seed)| Asked {
            prompt: PROMPTS[seed as usize % 2],
            grammar: Some(Grammar::JsonSchema(schema.to_string())),
            sampling: match seed % 4 {
                0 => SamplerConfig::default(),
                _ => sampled(seed),
            },
            speculate: (seed % 5 == 0).then_some(4),
        });
        let asked: Vec<Asked> = asked.collect();
        for ((schema, seed), (text, generator)) in
            schemas.iter().zip(seeds).zip(subject.together(&asked))
        {
            let validator = jsonschema::options()
                .should_validate_formats(true)
                .build(schema);
            let validator = validator.unwrap_or_else(|error| panic!("{seed}: {schema}: {error}"));
            let is_valid =
                serde_json::from_str(&text).is_ok_and(|value| validator.is_valid(&value));
            if !is_valid {
                let stop = generator.stats().stop;
                writeln!(wrong, "{seed}: {schema}: {text} ({stop:?})").unwrap();
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn what_shares_a_step_changes_nothing() {
    let subject = Subject::new(Files::stories());
    let asked: Vec<Asked> = grammars()
        .into_iter()
        .zip(samplings().into_iter().cycle())
        .enumerate()
        .map(|(i, ((grammar, _), sampling))| Asked {
            prompt: PROMPTS[i % 2],
            // Every third is free.
            grammar: (i % 3 > 0).then_some(grammar),
            sampling,
            speculate: (i % 4 == 1).then_some(6),
        })
        .collect();
    for (asked, (text, generator)) in asked.iter().zip(subject.together(&asked)) {
        let (alone, by_itself) = subject.answer(asked);
        assert_eq!(text, alone, "{asked:?}");
        assert_eq!(generator.answer(), by_itself.answer());
    }
}

#[test]
fn the_only_tokens_that_may_come_need_no_logits() {
    let subject = Subject::new(Files::stories());
    // A letter that is only spelled by its bytes.
    let snowmen = "☃".repeat(9);
    let asked = Asked {
        prompt: "One",
        grammar: Some(Grammar::Regex(snowmen.clone())),
        sampling: SamplerConfig::default(),
        speculate: None,
    };
    let mut scheduler = Scheduler::new(SchedulerOptions::default());
    let id = subject.add(&mut scheduler);
    scheduler.start(id, subject.request(&asked)).unwrap();
    let (mut text, mut n_steps) = (String::new(), 0);
    while !scheduler.is_idle() {
        for (_, event) in scheduler.step().unwrap() {
            match event {
                Event::Token(token) => text += &token.text,
                Event::Ended { reason, .. } => assert_eq!(reason, StopReason::Complete),
                event => panic!("{event:?}"),
            }
        }
        n_steps += 1;
    }
    assert_eq!((text, n_steps), (snowmen, 1));
    assert_eq!(scheduler.generator(id).unwrap().answer().len(), 27);
}

#[test]
fn limits_cut_answers_off() {
    let subject = Subject::new(Files::stories());
    let mut request = subject.request(&Asked {
        prompt: "One",
        grammar: Some(Grammar::Regex("a{90}".into())),
        sampling: SamplerConfig::default(),
        speculate: None,
    });
    request.max_tokens = 3;
    let mut scheduler = Scheduler::new(SchedulerOptions::default());
    let id = subject.add(&mut scheduler);
    scheduler.start(id, request).unwrap();
    let mut log = String::new();
    while !scheduler.is_idle() {
        for (_, event) in scheduler.step().unwrap() {
            writeln!(log, "{event:?}").unwrap();
        }
    }
    assert!(log.contains("MaxTokens"), "{log}");
}

#[test]
fn tokens_that_are_all_banned_are_an_error() {
    let subject = Subject::new(Files::stories());
    let n_vocab = subject.model.config().n_vocab as u32;
    let sampling = SamplerConfig {
        logit_bias: (0..n_vocab).map(|id| (id, f32::NEG_INFINITY)).collect(),
        ..SamplerConfig::default()
    };
    let request = subject.request(&Asked {
        prompt: "One",
        grammar: Some(Grammar::Regex("yes|no".into())),
        sampling,
        speculate: None,
    });
    let mut scheduler = Scheduler::new(SchedulerOptions::default());
    let id = subject.add(&mut scheduler);
    scheduler.start(id, request).unwrap();
    let events = scheduler.step().unwrap();
    let [(_, Event::Failed(error))] = &events[..] else {
        panic!("{events:?}");
    };
    assert_eq!(error.code(), ErrorCode::InvalidRequest);
    let error = subject.constraints.of(&Grammar::Regex("(".into()));
    assert_eq!(error.unwrap_err().code(), ErrorCode::InvalidRequest);
}

/// Anything up to a token, and then the same text.
#[derive(Debug, Clone)]
struct FreeUntil {
    token: u32,
    rest: Box<dyn TokenConstraint>,
    is_free: bool,
}

impl TokenConstraint for FreeUntil {
    fn allowed(&mut self) -> sterna::Result<Allowed> {
        assert!(!self.is_free, "nobody has to ask");
        self.rest.allowed()
    }

    fn is_free(&self) -> bool {
        self.is_free
    }

    fn accept(&mut self, id: u32) -> sterna::Result<()> {
        match self.is_free {
            true => self.is_free = id != self.token,
            false => self.rest.accept(id)?,
        }
        Ok(())
    }

    fn n_allowed(&mut self, ids: &[u32]) -> usize {
        let begun = ids.iter().position(|id| *id == self.token);
        match (self.is_free, begun) {
            (true, begun) => begun.map_or(ids.len(), |at| at + 1),
            (false, _) => self.rest.n_allowed(ids),
        }
    }

    fn boxed(&self) -> Box<dyn TokenConstraint> {
        Box::new(self.clone())
    }
}

#[test]
fn what_is_free_is_as_without_a_constraint() {
    let subject = Subject::new(Files::stories());
    for sampling in samplings() {
        for speculate in [None, Some(4)] {
            let asked = Asked {
                prompt: PROMPTS[0],
                grammar: None,
                sampling: sampling.clone(),
                speculate,
            };
            let (text, plain) = subject.answer(&asked);
            let ids = plain.answer();
            for n_free in [1, 5, 9] {
                let token = ids[n_free - 1];
                let n_free = ids.iter().position(|id| *id == token).unwrap() + 1;
                let rest = Grammar::Regex(" {2}once upon a time".to_owned());
                let mut request = subject.request(&asked);
                request.constraint = Some(Box::new(FreeUntil {
                    token,
                    rest: subject.constraints.of(&rest).unwrap(),
                    is_free: true,
                }));
                let mut scheduler = Scheduler::new(SchedulerOptions::default());
                let id = subject.add(&mut scheduler);
                scheduler.start(id, request).unwrap();
                while !scheduler.is_idle() {
                    scheduler.step().unwrap();
                }
                let held = scheduler.finish(id).unwrap();
                let found = held.answer();
                assert_eq!(found[..n_free], ids[..n_free], "{text}");
                let options = Decode { skip_special: true };
                let rest = subject.files.tokenizer.decode(&found[n_free..], options);
                assert_eq!(rest.trim_start(), "once upon a time");
            }
        }
    }
}

/// On a device that chooses tokens itself, of many answers that begin together and end one after the other.
#[test]
#[cfg(feature = "gpu")]
fn answers_that_a_gpu_chooses_match() {
    let Some(gpu) = crate::common::gpu() else {
        return;
    };
    let subject = Subject::on(gpu, Files::stories());
    let options = SchedulerOptions {
        draw_on_device: true,
        ..SchedulerOptions::gpu()
    };
    let (grammars, checks): (Vec<Grammar>, Vec<Check>) = grammars().into_iter().unzip();
    for turn in 0..2 {
        let samplings = samplings().into_iter().cycle().skip(turn);
        let asked = grammars.iter().zip(samplings).enumerate();
        let asked = asked.map(|(i, (grammar, sampling))| Asked {
            prompt: PROMPTS[(i + turn) % 2],
            // Every fifth is free.
            grammar: (i % 5 != 4).then(|| grammar.clone()),
            sampling,
            speculate: None,
        });
        let asked: Vec<Asked> = asked.collect();
        for ((asked, holds), (text, generator)) in
            (asked.iter().zip(&checks)).zip(subject.together_as(&asked, options))
        {
            if asked.grammar.is_none() {
                continue;
            }
            assert!(holds(&text), "{asked:?}: {text}");
            let stop = generator.stats().stop;
            let is_whole = matches!(stop, Some(StopReason::StopToken | StopReason::Complete));
            assert!(is_whole, "{asked:?}: {stop:?}");
        }
    }
}
