//! A served model: its text side, which requests are prepared with, and its engine side.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use sterna::constraint::Constraints;
use sterna::embedding::Pooling;
use sterna::receipt::Setup;
use sterna::swap::SwappedGroup;
use sterna::{Adapted, AdapterFiles, ModelFiles, Result, Warning};
use sterna_engine::{Backend, Model, ModelPlan, SessionOptions};
use sterna_format::hf::GenerationConfig;
use sterna_text::{ChatInput, ChatTemplate, DateTime, Encode, Tokenizer};

use crate::adapters::OpenAdapter;
use crate::answer::thoughts::Thoughts;
use crate::answer::tools::{CallStyle, ToolFormat};
use crate::answer::{channels, recipients};
use crate::engine::{AdapterKey, AdapterSource, ModelSource};
use crate::infill::Infill;

/// A model to be served: what it is, and what it is loaded by.
pub struct Served<B: Backend> {
    pub(crate) text: ModelText,
    pub(crate) source: ModelSource<B>,
    /// Opens adapters that clients name.
    pub(crate) open: Option<Box<OpenAdapter>>,
}

impl<B: Backend> Served<B> {
    /// The model of `files`, under the name `name`, as `plan` says; its sequences have the settings `session`. What is
    /// odd about its files is added to `warnings`. Nothing is loaded yet: it needs [weights](Served::with_weights), or
    /// [to know](Served::with_loader) how they are loaded, or both.
    ///
    /// Errors: files without a tokenizer, or with one that can't be read.
    pub fn new(
        name: impl Into<String>,
        files: &ModelFiles,
        plan: ModelPlan,
        session: SessionOptions,
        warnings: &mut Vec<Warning>,
    ) -> Result<Served<B>> {
        let text = ModelText::new(name.into(), files, &plan, session.ctx_len, warnings)?;
        let source = ModelSource {
            name: text.name.clone(),
            hash: None,
            bytes: plan.memory_bytes(),
            session,
            cache_bytes: Arc::new(move |len, cache| plan.cache_bytes(len, cache)),
            describe: None,
            loaded: None,
            load: None,
            swap: None,
            adapters: Vec::new(),
        };
        Ok(Served {
            text,
            source,
            open: None,
        })
    }

    /// The same, which is there from the beginning: `adapted` has it for each engine, on a device of its own.
    #[must_use]
    pub fn with_weights(mut self, adapted: Vec<Adapted<B>>) -> Served<B> {
        self.source.loaded = Some(adapted);
        self
    }

    /// The same, which may be unloaded, and is loaded by `load` when it is asked for: once for each of the engines
    /// with these numbers.
    #[must_use]
    pub fn with_loader(
        mut self,
        load: impl Fn(&[usize]) -> Result<Vec<Adapted<B>>> + Send + Sync + 'static,
    ) -> Served<B> {
        self.source.load = Some(Box::new(load));
        self
    }

    /// Clients with the permission may replace groups of its weights while the model is served, by those of a revision:
    /// `swap` does so to all of the models that it is given, which are equal, for the revision of that name and the ids
    /// of groups, or all that differ if there are none. It returns what changed to what.
    #[must_use]
    pub fn with_revisions(
        mut self,
        swap: impl Fn(&[Arc<Model<B>>], &str, &[String]) -> Result<Vec<SwappedGroup>>
        + Send
        + Sync
        + 'static,
    ) -> Served<B> {
        self.source.swap = Some(Box::new(swap));
        self
    }

    /// The same, which was made of what is called `origin`: who loads that again is told that it is there.
    #[must_use]
    pub fn with_origin(mut self, origin: String) -> Served<B> {
        self.text.origin = Some(origin);
        self
    }

    /// Clients with the permission may load adapters while the model is served, which `open` opens by what they
    /// call them.
    #[must_use]
    pub fn with_adapters(
        mut self,
        open: impl Fn(&str) -> Result<AdapterFiles, String> + Send + Sync + 'static,
    ) -> Served<B> {
        self.open = Some(Box::new(open));
        self
    }

    /// The same with the adapter that `open` opens, whose updates are scaled by `scale`, for requests that name the
    /// model and `:name` after it. It is loaded with the model.
    #[must_use]
    pub fn with_adapter(
        mut self,
        name: &str,
        scale: f32,
        open: impl Fn() -> Result<AdapterFiles> + Send + Sync + 'static,
    ) -> Served<B> {
        let adapters = &mut self.source.adapters;
        adapters.retain(|other| other.key.name != name);
        adapters.push(AdapterSource {
            key: AdapterKey::new(name),
            open: Box::new(open),
            scale,
        });
        self
    }

    /// The same, with receipts of answers for who asks for them; `describe` says what an engine's model computes them
    /// by.
    #[must_use]
    pub fn with_receipts(
        mut self,
        describe: impl Fn(&Adapted<B>) -> Result<Setup> + Send + Sync + 'static,
    ) -> Served<B> {
        self.source.describe = Some(Arc::new(describe));
        self.text.has_receipts = true;
        self
    }

    /// What clients call it.
    pub fn name(&self) -> &str {
        &self.text.name
    }

    /// Bytes that it takes on each engine.
    pub fn n_bytes(&self) -> u64 {
        self.source.bytes
    }

    /// The same, whose files have this digest. What is computed by a model without one isn't kept on disk.
    #[must_use]
    pub fn with_hash(mut self, hash: Option<String>) -> Served<B> {
        self.source.hash.clone_from(&hash);
        self.text.hash = hash;
        self
    }
}

/// The text side of a model.
pub(crate) struct ModelText {
    pub(crate) name: String,
    /// When it was loaded, in seconds since 1970.
    pub(crate) created: u64,
    /// What it was made of, where that is known.
    pub(crate) origin: Option<String>,
    /// The digest of its files, where that is known.
    pub(crate) hash: Option<String>,
    /// Whether receipts of its answers are written.
    pub(crate) has_receipts: bool,
    pub(crate) tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    /// For conversations with tools.
    tool_template: Option<ChatTemplate>,
    /// How it calls tools.
    pub(crate) tools: ToolFormat,
    /// How its template wants those of earlier turns.
    past_calls: CallStyle,
    /// Whether its template tells of the tools.
    tells_tools: bool,
    /// Whether it may think before it answers, and how it marks that.
    pub(crate) thinks: bool,
    pub(crate) thoughts: &'static Thoughts,
    pub(crate) stop_ids: Vec<u32>,
    /// How it fills in between two texts, if it can.
    pub(crate) infill: Option<Infill>,
    pub(crate) recommended: GenerationConfig,
    pub(crate) constraints: Constraints,
    pub(crate) ctx_len: usize,
    pub(crate) n_vocab: usize,
    pub(crate) model_dim: usize,
    pub(crate) pooling: Option<Pooling>,
    /// It has no answers, only vectors.
    pub(crate) is_encoder: bool,
}

/// A conversation to be answered, in the form that templates know: that of OpenAI's API.
#[derive(Debug, Clone, Default)]
pub(crate) struct Conversation {
    pub(crate) messages: Vec<Value>,
    /// Functions, each as `{"type": "function", "function": {...}}`.
    pub(crate) tools: Vec<Value>,
    /// Whether the model is to think; `None` leaves it to the template.
    pub(crate) thinking: Option<bool>,
    /// Other variables of the template.
    pub(crate) variables: serde_json::Map<String, Value>,
    /// What the answer begins with.
    pub(crate) begun: Option<Begun>,
}

/// What was said of an answer, which is to be continued.
#[derive(Debug, Clone, Default)]
pub(crate) struct Begun {
    pub(crate) thought: String,
    pub(crate) text: String,
}

impl Begun {
    /// Takes the last of `messages`, if that is the beginning of an answer: said by the model, with no call.
    pub(crate) fn take(messages: &mut Vec<Value>) -> Option<Begun> {
        let is_begun =
            |message: &mut Value| message["role"] == "assistant" && message["tool_calls"].is_null();
        let message = messages.pop_if(is_begun)?;
        let text = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
        Some(Begun {
            thought: text("reasoning_content"),
            text: text("content"),
        })
    }
}

/// The prompt of a conversation.
#[derive(Debug, Default)]
pub(crate) struct ChatPrompt {
    pub(crate) ids: Vec<u32>,
    /// The answer begins with what the model thinks.
    pub(crate) opens_thinking: bool,
    /// It goes on with what was said.
    pub(crate) is_begun: bool,
}

impl ModelText {
    fn new(
        name: String,
        files: &ModelFiles,
        plan: &ModelPlan,
        ctx_len: usize,
        warnings: &mut Vec<Warning>,
    ) -> Result<ModelText> {
        let tokenizer = files.require_tokenizer()?;
        let recommended = files.generation_config(warnings)?;
        let template = files.chat_template_for(&tokenizer, false)?;
        let tool_template = files.chat_template_for(&tokenizer, true)?;
        let probe = tool_template.as_ref().map(|template| {
            let calls = CallStyle::probe(|input| template.render(input).ok());
            (calls, probe_tools(template))
        });
        let (calls, told) = probe.unwrap_or_default();
        let thoughts = Thoughts::of(&tokenizer, &told);
        let created = SystemTime::now().duration_since(UNIX_EPOCH);
        Ok(ModelText {
            name,
            created: created.unwrap_or_default().as_secs(),
            origin: None,
            hash: None,
            has_receipts: false,
            thinks: thoughts.is_some(),
            thoughts: thoughts.unwrap_or_default(),
            stop_ids: files.stop_ids(Some(&tokenizer), &recommended)?,
            infill: Infill::of(&tokenizer),
            constraints: Constraints::new(tokenizer.clone()),
            pooling: files.pooling()?,
            tools: match channels::has(&tokenizer) {
                true => ToolFormat::Channels,
                false => calls.format.unwrap_or_default(),
            },
            tokenizer,
            template,
            tool_template,
            past_calls: calls,
            tells_tools: told.contains(PROBE_TOOL),
            recommended,
            ctx_len,
            n_vocab: plan.config().n_vocab,
            model_dim: plan.config().model_dim,
            is_encoder: plan.config().is_encoder(),
        })
    }

    /// Whether it has a chat template.
    pub(crate) fn can_chat(&self) -> bool {
        self.template.is_some() && !self.is_encoder
    }

    /// The prompt of `conversation`.
    ///
    /// Errors: the template refuses it.
    pub(crate) fn prompt(&self, conversation: &Conversation) -> Result<ChatPrompt> {
        let has_tools = !conversation.tools.is_empty();
        let template = match has_tools {
            true => self.tool_template.as_ref().or(self.template.as_ref()),
            false => self.template.as_ref(),
        };
        let Some(template) = template else {
            return Err(sterna::Error::new(
                sterna::ErrorCode::Unsupported,
                format!(
                    "the model {} has no chat template: expected a prompt for /v1/completions",
                    self.name
                ),
            ));
        };
        let mut messages = conversation.messages.clone();
        if has_tools && !self.tells_tools {
            tell_tools(&mut messages, &conversation.tools, self.tools);
        }
        self.past_calls.apply(&mut messages);
        let input = ChatInput {
            messages,
            tools: has_tools.then(|| conversation.tools.clone()),
            add_generation_prompt: true,
            enable_thinking: conversation.thinking,
            extra: conversation.variables.clone(),
            now: Some(now()),
            ..ChatInput::default()
        };
        let rendered = template.prompt(&input, &self.tokenizer)?;
        let text = rendered.text();
        let mut prompt = ChatPrompt {
            ids: self.tokenizer.encode_prompt(&rendered)?,
            opens_thinking: self.thoughts.are_opened_by(text),
            is_begun: false,
        };
        // An answer to one recipient only is begun for it, so that no stop string is in a header.
        let is_said = self.tools == ToolFormat::Recipients && !has_tools;
        let nothing = Begun::default();
        let begun = conversation.begun.as_ref();
        if let Some(begun) = begun.or(is_said.then_some(&nothing)) {
            let blank = || blank_before_answer(template, input, text);
            self.begin(&mut prompt, blank, (begun, is_said))?;
        }
        Ok(prompt)
    }

    /// Puts what was said of the answer after its prompt, and `blank` before its first word; where `is_said`, it is begun
    /// also if that is nothing. What people write are no control tokens.
    fn begin(
        &self,
        prompt: &mut ChatPrompt,
        blank: impl FnOnce() -> String,
        (begun, is_said): (&Begun, bool),
    ) -> Result<()> {
        let mut add = |text: &str, encode| {
            prompt.ids.extend(self.tokenizer.encode(text, encode)?);
            Ok::<(), sterna::Error>(())
        };
        let Begun { thought, text } = begun;
        if self.tools == ToolFormat::Channels {
            if !thought.is_empty() {
                add(channels::THINK, Encode::TEMPLATE)?;
                add(thought, Encode::PLAIN)?;
            }
            let (has_thought, has_text) = (!thought.is_empty(), !text.is_empty());
            if has_text {
                let before = if has_thought {
                    channels::THOUGHT
                } else {
                    channels::SAY
                };
                add(before, Encode::TEMPLATE)?;
                add(text, Encode::PLAIN)?;
            }
            prompt.opens_thinking = has_thought && !has_text;
            prompt.is_begun = has_text;
            return Ok(());
        }
        if self.tools == ToolFormat::Recipients {
            if is_said || !text.is_empty() {
                add(&format!("{}{text}", recipients::SAY), Encode::PLAIN)?;
                prompt.is_begun = true;
            }
            return Ok(());
        }
        let [before_thought, after_thought] = self.thoughts.written;
        if self.thinks && !thought.is_empty() {
            if !prompt.opens_thinking {
                add(before_thought, Encode::TEMPLATE)?;
                prompt.opens_thinking = true;
            }
            add(thought, Encode::PLAIN)?;
        }
        if !text.is_empty() {
            if prompt.opens_thinking {
                add(after_thought, Encode::TEMPLATE)?;
                prompt.opens_thinking = false;
                add(text, Encode::PLAIN)?;
            } else {
                if let Some([begin, _]) = self.thoughts.said {
                    add(begin, Encode::TEMPLATE)?;
                }
                add(&format!("{}{text}", blank()), Encode::PLAIN)?;
            }
            prompt.is_begun = true;
        }
        Ok(())
    }
}

/// The white space that `template` has between the prompt `text` of `input` and the first word of an answer.
fn blank_before_answer(template: &ChatTemplate, mut input: ChatInput, text: &str) -> String {
    const MARK: &str = "beginning-of-the-answer";
    let answer = json!({"role": "assistant", "content": MARK});
    input.messages.push(answer);
    input.add_generation_prompt = false;
    let rendered = template.render(&input).unwrap_or_default();
    let after = rendered.strip_prefix(text);
    let blank = after.and_then(|after| Some(after.split_once(MARK)?.0));
    // A template that writes past answers otherwise doesn't say.
    let blank = blank.filter(|blank| blank.trim().is_empty());
    blank.unwrap_or_default().to_owned()
}

/// The name of the tool that is rendered to see whether a template tells of tools.
const PROBE_TOOL: &str = "probe_of_tools";

/// The prompt of a conversation with a tool.
pub(crate) fn probe_tools(template: &ChatTemplate) -> String {
    let tool = json!({"type": "function", "function": {
        "name": PROBE_TOOL, "description": "", "parameters": {"type": "object", "properties": {}},
    }});
    let input = ChatInput {
        tools: Some(vec![tool]),
        now: Some(now()),
        ..ChatInput::conversation([("user", "x")])
    };
    template.render(&input).unwrap_or_default()
}

/// Tells of `tools` in the system message, and that calls have this format, for templates that don't.
fn tell_tools(messages: &mut Vec<Value>, tools: &[Value], format: ToolFormat) {
    let list: Vec<String> = tools.iter().map(Value::to_string).collect();
    let text = format!(
        "You may call these functions:\n<tools>\n{}\n</tools>\nA call has a name and arguments: {}",
        list.join("\n"),
        format.example()
    );
    let system = (messages.first_mut()).filter(|message| message["role"] == "system");
    match system.map(|message| &mut message["content"]) {
        Some(Value::String(said)) => {
            said.push_str("\n\n");
            said.push_str(&text);
        }
        _ => messages.insert(0, json!({"role": "system", "content": text})),
    }
}

/// The time, in UTC, for templates that ask for it.
fn now() -> DateTime {
    let since_1970 = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    DateTime::from_unix(since_1970.as_secs().try_into().unwrap_or(i64::MAX), 0)
}
