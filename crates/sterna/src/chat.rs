//! A model with its text side, and a conversation with it: the shortest way to chat.

use sterna_engine::{Backend, Sampler, Session, SessionOptions};
use sterna_format::hf::GenerationConfig;
use sterna_text::{ChatTemplate, DateTime, Encode, Tokenizer};

use crate::adapted::Adapted;
#[cfg(feature = "constraint")]
use crate::constraint::{Constraints, Grammar};
use crate::conversation::{Conversation, Room};
use crate::error::{Context, Result, bail};
use crate::generate::{Event, FirstWord, Request, Stats, TextOptions, TokenConstraint};
use crate::model::ModelFiles;
use crate::sampling::SamplingOptions;
use crate::scheduler::{Scheduler, SchedulerOptions, SequenceId};
use crate::sequence::Sequence;
use crate::warning::Warning;

/// A loaded model with its tokenizer and template.
pub struct TextModel<B: Backend> {
    model: Adapted<B>,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    /// Tokens that end an answer.
    stop_ids: Vec<u32>,
    recommended: GenerationConfig,
    scheduling: SchedulerOptions,
    session: SessionOptions,
    #[cfg(feature = "constraint")]
    constraints: Constraints,
}

impl<B: Backend> TextModel<B> {
    /// `model`, which was made from `files`; recommendations in those that are ignored are added to
    /// `warnings`. Its sequences have the cache that a package asks for.
    ///
    /// Errors: files without a tokenizer, or with one that can't be read.
    pub fn new(
        model: Adapted<B>,
        files: &ModelFiles,
        scheduling: SchedulerOptions,
        warnings: &mut Vec<Warning>,
    ) -> Result<TextModel<B>> {
        let tokenizer = files.require_tokenizer()?;
        let recommended = files.generation_config(warnings)?;
        let max_ctx = model.model().config().max_ctx;
        Ok(TextModel {
            session: files.session(max_ctx.min(DEFAULT_CTX_LEN)),
            template: files.chat_template(&tokenizer)?,
            stop_ids: files.stop_ids(Some(&tokenizer), &recommended)?,
            #[cfg(feature = "constraint")]
            constraints: Constraints::new(tokenizer.clone()),
            model,
            tokenizer,
            recommended,
            scheduling,
        })
    }

    /// The same, with contexts of `ctx_len` tokens unless another size is asked for.
    #[must_use]
    pub fn with_ctx_len(mut self, ctx_len: usize) -> TextModel<B> {
        self.session.ctx_len = ctx_len;
        self
    }

    /// Settings of its sequences.
    pub fn session_options(&self) -> &SessionOptions {
        &self.session
    }

    /// The model, with its adapters.
    pub fn model(&self) -> &Adapted<B> {
        &self.model
    }

    /// Turns text into tokens, and back.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Turns messages into prompts; a base model has none.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// An empty sequence that holds `ctx_len` tokens.
    ///
    /// Errors: out of memory.
    pub fn sequence(&self, ctx_len: usize) -> Result<Sequence<B>> {
        Ok(Sequence::new(self.session(ctx_len)?))
    }

    fn session(&self, ctx_len: usize) -> Result<Session<B>> {
        self.model.session(SessionOptions {
            ctx_len,
            ..self.session
        })
    }

    /// A request to continue `prompt` as text; it ends where this model's answers end.
    ///
    /// Errors: sampling settings out of their ranges.
    pub fn request(&self, prompt: Vec<u32>, sampling: &SamplingOptions) -> Result<Request> {
        let n_vocab = self.model.model().config().n_vocab;
        let sampler = Sampler::new(sampling.config(&self.recommended), n_vocab)?;
        Ok(Request {
            max_tokens: self.recommended.max_new_tokens.unwrap_or(usize::MAX),
            stop_ids: self.stop_ids.clone(),
            text: Some(TextOptions {
                tokenizer: self.tokenizer.clone(),
                stop_strings: Vec::new(),
            }),
            ..Request::new(prompt, sampler)
        })
    }

    /// For [`Request::constraint`]: answers that match `grammar`.
    ///
    /// Errors: a grammar that isn't valid, isn't supported, or takes more than the limits allow.
    #[cfg(feature = "constraint")]
    pub fn constraint(&self, grammar: &Grammar) -> Result<Box<dyn TokenConstraint>> {
        self.constraints.of(grammar)
    }

    /// Begins a conversation.
    ///
    /// Errors: out of memory.
    pub fn chat(&self, options: ChatOptions) -> Result<Chat<'_, B>> {
        let mut scheduler = Scheduler::new(SchedulerOptions {
            draw_on_device: true,
            ..self.scheduling
        });
        let ctx_len = options.ctx_len.unwrap_or(self.session.ctx_len);
        let id = scheduler.add(self.sequence(ctx_len)?);
        let mut conversation = self.template.clone().map(Conversation::new);
        match &mut conversation {
            Some(conversation) => conversation.set_system(options.system.clone()),
            None if options.system.is_some() => bail!(
                Unsupported,
                "instructions: expected a model with a chat template, found a base model"
            ),
            None => {}
        }
        Ok(Chat {
            model: self,
            scheduler,
            id,
            conversation,
            options,
        })
    }
}

/// Longest default context, in tokens: a cache for all that some models allow would not fit.
pub const DEFAULT_CTX_LEN: usize = 4096;

/// Settings of a [`Chat`].
#[derive(Debug, Clone, Default)]
pub struct ChatOptions {
    /// Context size in tokens; if not given, that of [`TextModel::session_options`]: what the model was made
    /// for, at most [`DEFAULT_CTX_LEN`], unless it was opened with another.
    pub ctx_len: Option<usize>,
    /// System instructions.
    pub system: Option<String>,
    /// How to sample tokens.
    pub sampling: SamplingOptions,
    /// Maximum tokens of an answer.
    pub max_tokens: Option<usize>,
    /// What answers have to match.
    pub constraint: Option<Box<dyn TokenConstraint>>,
    /// The time, for templates that ask for it.
    pub now: Option<DateTime>,
}

/// A conversation with a model. A base model, which has no chat template, continues each text separately.
pub struct Chat<'a, B: Backend> {
    model: &'a TextModel<B>,
    scheduler: Scheduler<B>,
    id: SequenceId,
    conversation: Option<Conversation>,
    options: ChatOptions,
}

impl<'a, B: Backend> Chat<'a, B> {
    /// Begins to answer `text`. The oldest turns are left out if the context has no room for all of them and
    /// an answer. An answer that isn't read to its end is kept as far as it was read; so is one whose device
    /// is lost, after which [`Chat::restore`] lets the chat go on.
    ///
    /// Errors: `text` is longer than the context.
    pub fn say(&mut self, text: &str) -> Result<Answer<'_, 'a, B>> {
        let max_tokens = self.options.max_tokens.unwrap_or(usize::MAX);
        let sequence = self.scheduler.sequence(self.id);
        let ctx_len = sequence.map_or(0, Sequence::ctx_len);
        let tokenizer = &self.model.tokenizer;
        let prompt = match &mut self.conversation {
            None => tokenizer.encode(text, Encode::TEXT)?,
            Some(conversation) => {
                conversation.say(text);
                let room = Room {
                    ctx_len,
                    max_tokens,
                };
                let prompt = conversation.prompt(tokenizer, room, self.options.now);
                prompt.inspect_err(|_| conversation.unsay())?.ids
            }
        };
        let mut request = self.model.request(prompt, &self.options.sampling)?;
        request.max_tokens = request.max_tokens.min(max_tokens);
        request.constraint.clone_from(&self.options.constraint);
        if let Err(error) = self.scheduler.start(self.id, request) {
            self.conversation.iter_mut().for_each(Conversation::unsay);
            return Err(error);
        }
        Ok(Answer {
            first_word: FirstWord::new(
                self.conversation.is_some() && self.options.constraint.is_none(),
            ),
            chat: self,
            said: String::new(),
            is_over: false,
        })
    }

    /// Goes on with `model`, the same one loaded again, after an answer has ended with
    /// [`ErrorCode::DeviceLost`](crate::ErrorCode::DeviceLost). What was said is computed again with the next
    /// answer.
    ///
    /// Errors: out of memory.
    pub fn restore(&mut self, model: &'a TextModel<B>) -> Result<()> {
        self.scheduler
            .restore(|lost| model.session(lost.ctx_len()))?;
        self.model = model;
        Ok(())
    }

    /// The messages so far; `None` for a base model.
    pub fn conversation(&self) -> Option<&Conversation> {
        self.conversation.as_ref()
    }

    /// Statistics of the newest answer.
    pub fn stats(&self) -> Option<Stats> {
        self.scheduler
            .generator(self.id)
            .map(|answer| *answer.stats())
    }
}

/// An answer in progress: an iterator over pieces of text, none of them empty.
pub struct Answer<'c, 'a, B: Backend> {
    chat: &'c mut Chat<'a, B>,
    first_word: FirstWord,
    /// All of it so far, exactly as generated.
    said: String,
    is_over: bool,
}

impl<B: Backend> Answer<'_, '_, B> {
    fn step(&mut self) -> Result<String> {
        let mut text = String::new();
        for (_, event) in self.chat.scheduler.step()? {
            match event {
                Event::Token(token) => text += &token.text,
                Event::Ended { text: held, .. } => {
                    text += &held;
                    self.is_over = true;
                }
                Event::Failed(error) => return Err(error).context("the answer"),
                Event::DeviceLost { message } => bail!(DeviceLost, "{message}"),
            }
        }
        self.said += &text;
        Ok(self.first_word.push(&text))
    }
}

impl<B: Backend> Iterator for Answer<'_, '_, B> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Result<String>> {
        while !self.is_over {
            let step = self.step();
            self.is_over |= step.is_err();
            match step {
                Ok(text) if text.is_empty() => {}
                piece => return Some(piece),
            }
        }
        None
    }
}

impl<B: Backend> Drop for Answer<'_, '_, B> {
    fn drop(&mut self) {
        if let Some(conversation) = &mut self.chat.conversation {
            match self.said.is_empty() {
                true => conversation.unsay(),
                false => conversation.answered(std::mem::take(&mut self.said)),
            }
        }
    }
}
