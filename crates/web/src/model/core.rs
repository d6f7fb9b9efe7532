//! A model on one backend: its sessions, their answers, adapters.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use js_sys::Function;
use serde_json::Value;
use sterna::generate::{self, Event, Logprobs, Request, StopReason, Token, TokenConstraint};
use sterna::receipt::{AdapterId, Checked, Device, Receipt, Setup};
use sterna::sampling::SamplingOptions;
use sterna::scheduler::{Scheduler, SchedulerOptions, SequenceId};
use sterna::sequence::Sequence;
use sterna::swap::{GroupRevision, Revisions};
use sterna::{
    Adapted, AdapterFiles, DEFAULT_CTX_LEN, EarlyPrompt, LoadOptions, ModelEntry, ModelFiles,
    Result, TextModel, Verification, Warning,
};
use sterna_engine::lora::{ActiveAdapter, Adapter, AdapterOptions};
use sterna_engine::plan::PlanOptions;
use sterna_engine::{Backend, Logits, Model, ModelPlan, Sampler, Session, SessionOptions};
use sterna_format::digest::Digest;
use sterna_format::hf::GenerationConfig;
use sterna_text::{ChatInput, ChatTemplate, Decode, Encode, Tokenizer};

use super::{invalid, open};
use crate::files::drive;
use crate::js::{self, Files};
use crate::options::{
    AdapterUse, EventKind, GenerateOptions, ModelInfo, Prefill, PromptOptions, Revision,
    SessionEvent, Swapped, TopToken,
};

pub(super) struct Core<B: Backend> {
    model: Arc<Model<B>>,
    /// `None` for a model without a tokenizer, which works on ids.
    text: Option<TextModel<B>>,
    scheduler: Scheduler<B>,
    sessions: BTreeMap<u32, SequenceId>,
    next_session: u32,
    /// With the digests of their files.
    adapters: BTreeMap<String, (Arc<Adapter<B>>, Digest)>,
    /// The adapters of sessions that have any.
    uses: BTreeMap<u32, Vec<AdapterUse>>,
    revisions: Revisions,
    options: SessionOptions,
    /// What was computed while weights arrived, until the first session begins.
    early: Option<Sequence<B>>,
    plan: Sizes,
    warnings: Vec<String>,
}

/// What the plan said.
struct Sizes {
    parameters: u64,
    weight_bytes: u64,
    cache_bytes_per_token: u64,
}

/// What to compute while weights arrive.
pub(super) struct Early {
    pub(super) prefill: Prefill,
    pub(super) ctx_len: Option<usize>,
}

impl Early {
    /// Its tokens but the last, which the answer begins with. None if there are no others.
    fn prompt(&self, files: &ModelFiles, session: SessionOptions) -> Result<Option<EarlyPrompt>> {
        let tokenizer = files.require_tokenizer()?;
        let mut ids = match &self.prefill {
            Prefill::Text(text) => tokenizer.encode(text, Encode::TEXT)?,
            Prefill::Messages(messages) => match files.chat_template(&tokenizer)? {
                Some(template) => {
                    let input = ChatInput {
                        messages: messages.clone(),
                        ..ChatInput::default()
                    };
                    rendered(&template, &input, &tokenizer)?
                }
                // A model without a template continues a text.
                None => {
                    let contents = messages.iter().map(|message| message["content"].as_str());
                    let text: String = contents.map(Option::unwrap_or_default).collect();
                    tokenizer.encode(&text, Encode::TEXT)?
                }
            },
        };
        let session = SessionOptions {
            ctx_len: self.ctx_len.unwrap_or(session.ctx_len),
            ..session
        };
        ids.pop();
        ids.truncate(session.ctx_len);
        Ok((!ids.is_empty()).then_some(EarlyPrompt { ids, session }))
    }
}

/// The tokens of a prompt that the template makes.
fn rendered(template: &ChatTemplate, input: &ChatInput, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    Ok(tokenizer.encode_prompt(&template.prompt(input, tokenizer)?)?)
}

impl<B: Backend + 'static> Core<B> {
    pub(super) async fn load(
        files: &Rc<ModelFiles>,
        from: &Files,
        plan: ModelPlan,
        backend: B,
        scheduling: SchedulerOptions,
        early: Option<&Early>,
        progress: &Function,
    ) -> Result<Core<B>> {
        let options = files.session(plan.config().max_ctx.min(DEFAULT_CTX_LEN));
        let prompt = match early {
            Some(early) => early.prompt(files, options)?,
            None => None,
        };
        let cache = options.cache_on(&backend);
        let sizes = Sizes {
            parameters: files.tensors().n_parameters(),
            weight_bytes: plan.memory_bytes(),
            cache_bytes_per_token: plan.cache_bytes(2, cache) - plan.cache_bytes(1, cache),
        };
        let revisions = Revisions::of(files, &plan);
        let total = plan.weight_bytes();
        let mut done = 0;
        let load = LoadOptions {
            verification: Verification::BySource,
            progress: Some(Box::new(|bytes| {
                done += bytes;
                js::call(progress, &[(done as f64).into(), (total as f64).into()]);
            })),
            prompt,
        };
        let loaded = drive(files.load(plan, backend, load), from).await?;
        let mut warnings = loaded.warnings;
        let scheduling = SchedulerOptions {
            clock: Some(js::now),
            draw_on_device: true,
            ..scheduling
        };
        let model = loaded.model;
        let text = match files.tokenizer()? {
            Some(_) => {
                let adapted = Adapted::new(Arc::clone(&model));
                Some(TextModel::new(adapted, files, scheduling, &mut warnings)?)
            }
            None => None,
        };
        Ok(Core {
            model,
            text,
            scheduler: Scheduler::new(scheduling),
            sessions: BTreeMap::new(),
            next_session: 0,
            adapters: BTreeMap::new(),
            uses: BTreeMap::new(),
            revisions,
            options,
            early: loaded.sequence,
            plan: sizes,
            warnings: warnings.iter().map(Warning::to_string).collect(),
        })
    }

    /// Continues the sessions of `old`, whose device was lost: what they held is computed again here, with
    /// adapters of the same names.
    pub(super) fn take_over<O: Backend + 'static>(&mut self, old: &mut Core<O>) -> Result<()> {
        self.next_session = old.next_session;
        for (session, id) in std::mem::take(&mut old.sessions) {
            let ctx_len = old
                .scheduler
                .sequence(id)
                .map_or(self.options.ctx_len, Sequence::ctx_len);
            let generator = old.scheduler.finish(id);
            let mut sequence = self.sequence(ctx_len)?;
            if let Some(uses) = old.uses.remove(&session) {
                sequence.set_adapters(self.active(&uses)?)?;
                self.uses.insert(session, uses);
            }
            let id = self.scheduler.add(sequence);
            if let Some(generator) = generator {
                self.scheduler.resume(id, generator)?;
            }
            self.sessions.insert(session, id);
        }
        // Those that only sessions still have.
        self.adapters
            .retain(|name, _| old.adapters.contains_key(name));
        Ok(())
    }

    pub(super) fn backend(&self) -> &B {
        self.model.backend()
    }

    pub(super) fn info(&self, files: &ModelFiles) -> Result<ModelInfo> {
        let config = self.model.config();
        Ok(ModelInfo {
            architecture: config.family.name.to_owned(),
            parameters: self.plan.parameters,
            max_context: config.max_ctx,
            vocabulary: config.n_vocab,
            has_template: self
                .text
                .as_ref()
                .is_some_and(|text| text.template().is_some()),
            backend: "cpu",
            backend_reason: None,
            adapter: None,
            weight_bytes: self.plan.weight_bytes,
            cache_bytes_per_token: self.plan.cache_bytes_per_token,
            warnings: {
                let odd = files.warnings();
                let known = self.warnings.iter().cloned();
                known.chain(odd.iter().map(Warning::to_string)).collect()
            },
        })
    }

    fn text(&self) -> Result<&TextModel<B>> {
        let text = self.text.as_ref();
        text.ok_or_else(|| invalid("expected a model with a tokenizer, found one without"))
    }

    fn tokenizer(&self) -> Result<&Tokenizer> {
        Ok(self.text()?.tokenizer())
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer()?.encode(text, Encode::TEXT)?)
    }

    pub(super) fn decode(&self, ids: &[u32]) -> Result<String> {
        Ok(self.tokenizer()?.decode(ids, Decode::default()))
    }

    pub(super) fn spellings(&self) -> Result<Vec<Vec<u8>>> {
        Ok(generate::spellings(self.tokenizer()?))
    }

    pub(super) fn prompt(&self, messages: Vec<Value>, options: PromptOptions) -> Result<Vec<u32>> {
        let text = self.text()?;
        let template = text.template();
        let template = template.ok_or_else(|| {
            invalid("expected a model with a chat template, found a base model; give a text")
        })?;
        let input = ChatInput {
            messages,
            tools: options.tools,
            add_generation_prompt: options.add_generation_prompt.unwrap_or(true),
            enable_thinking: options.enable_thinking,
            ..ChatInput::default()
        };
        rendered(template, &input, text.tokenizer())
    }

    fn sequence(&self, ctx_len: usize) -> Result<Sequence<B>> {
        let options = SessionOptions {
            ctx_len,
            ..self.options
        };
        Ok(Sequence::new(Session::new(
            Arc::clone(&self.model),
            options,
        )?))
    }

    pub(super) fn open_session(&mut self, ctx_len: Option<usize>) -> Result<u32> {
        let ctx_len = ctx_len.unwrap_or(self.options.ctx_len);
        let sequence = match self.early.take() {
            Some(early) if early.ctx_len() == ctx_len => early,
            _ => self.sequence(ctx_len)?,
        };
        let session = self.next_session;
        self.next_session += 1;
        self.sessions.insert(session, self.scheduler.add(sequence));
        Ok(session)
    }

    pub(super) fn close_session(&mut self, session: u32) {
        self.uses.remove(&session);
        if let Some(id) = self.sessions.remove(&session) {
            self.scheduler.remove(id);
        }
    }

    fn id(&self, session: u32) -> Result<SequenceId> {
        let id = self.sessions.get(&session).copied();
        id.ok_or_else(|| invalid(format!("there is no session {session}")))
    }

    pub(super) fn start(
        &mut self,
        session: u32,
        prompt: Vec<u32>,
        options: &GenerateOptions,
        constraint: Option<Box<dyn TokenConstraint>>,
    ) -> Result<()> {
        let id = self.id(session)?;
        let mut request = self.request(prompt, &options.sampling())?;
        if let Some(max_tokens) = options.max_tokens {
            request.max_tokens = max_tokens;
        }
        if let Some(text) = &mut request.text {
            text.stop_strings.clone_from(&options.stop);
        } else if !options.stop.is_empty() {
            return Err(invalid(
                "stop strings need a tokenizer, and the model has none",
            ));
        }
        request.logprobs = options.logprobs;
        request.constraint = constraint;
        self.scheduler.start(id, request)
    }

    fn request(&self, prompt: Vec<u32>, sampling: &SamplingOptions) -> Result<Request> {
        match &self.text {
            Some(text) => text.request(prompt, sampling),
            None => {
                let config = sampling.config(&GenerationConfig::default());
                let sampler = Sampler::new(config, self.model.config().n_vocab)?;
                Ok(Request::new(prompt, sampler))
            }
        }
    }

    pub(super) fn cancel(&mut self, session: u32) {
        if let Some(&id) = self.sessions.get(&session) {
            self.scheduler.finish(id);
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    pub(super) async fn step(&mut self) -> Result<Vec<SessionEvent>> {
        let events = self.scheduler.step_async().await?;
        let mut told = Vec::with_capacity(events.len());
        for (id, event) in events {
            let session = self.sessions.iter().find(|(_, known)| **known == id);
            let Some((&session, _)) = session else {
                continue;
            };
            let event = match event {
                Event::Token(token) => self.token(token),
                Event::Ended { reason, text } => {
                    let stats = self
                        .scheduler
                        .generator(id)
                        .map(|generator| *generator.stats());
                    let stats = stats.unwrap_or_default();
                    EventKind::End {
                        text,
                        reason: match reason {
                            StopReason::StopToken
                            | StopReason::Complete
                            | StopReason::StopString => "stop",
                            StopReason::MaxTokens => "length",
                            StopReason::ContextFull => "context",
                        },
                        prompt_tokens: stats.n_prompt,
                        cached_tokens: stats.n_reused,
                        completion_tokens: stats.n_generated,
                    }
                }
                Event::Failed(error) => EventKind::Failed {
                    code: error.code().as_str(),
                    message: format!("{error:#}"),
                },
                Event::DeviceLost { message } => EventKind::DeviceLost { message },
                _ => continue,
            };
            told.push(SessionEvent { session, event });
        }
        Ok(told)
    }

    fn token(&self, token: Token) -> EventKind {
        let top = |logprobs: &Logprobs| {
            let top = logprobs.top.iter();
            let text = |id| match &self.text {
                Some(text) => text.tokenizer().decode(&[id], Decode::default()),
                None => String::new(),
            };
            top.map(|&(id, logprob)| TopToken {
                id,
                text: text(id),
                logprob,
            })
            .collect()
        };
        EventKind::Token {
            id: token.id,
            text: token.text,
            logprob: token.logprobs.as_ref().map(|logprobs| logprobs.chosen),
            top: token.logprobs.as_ref().map(top),
        }
    }

    pub(super) async fn logits(&self, ids: &[u32], all: bool) -> Result<Vec<f32>> {
        let options = SessionOptions {
            ctx_len: self.options.ctx_len.max(ids.len()),
            ..self.options
        };
        let mut session = Session::new(Arc::clone(&self.model), options)?;
        let logits = if all { Logits::All } else { Logits::Last };
        Ok(session.forward_async(ids, logits).await?)
    }

    pub(super) async fn add_adapter(
        &mut self,
        name: String,
        files: &Files,
        base: &ModelFiles,
    ) -> Result<()> {
        let adapter = drive(
            AdapterFiles::open(open(&name), Verification::BySource),
            files,
        )
        .await?;
        let mut warnings = Vec::new();
        adapter.check_base(base, &mut warnings)?;
        let digest = adapter.digest();
        let loaded = self
            .model
            .load_adapter(adapter.source, AdapterOptions { dtype: None })?;
        self.adapters.insert(name, (loaded, digest));
        self.warnings
            .extend(warnings.iter().map(Warning::to_string));
        Ok(())
    }

    pub(super) fn remove_adapter(&mut self, name: &str) {
        self.adapters.remove(name);
    }

    /// Whether a session has the adapter of that name.
    pub(super) fn is_adapter_used(&self, name: &str) -> bool {
        self.uses.values().flatten().any(|used| used.name == name)
    }

    fn active(&self, uses: &[AdapterUse]) -> Result<Vec<ActiveAdapter<B>>> {
        let active = |used: &AdapterUse| {
            let (adapter, _) = self.adapter(&used.name)?;
            Ok(ActiveAdapter {
                adapter: Arc::clone(adapter),
                scale: used.scale.unwrap_or(1.0),
            })
        };
        uses.iter().map(active).collect()
    }

    fn adapter(&self, name: &str) -> Result<&(Arc<Adapter<B>>, Digest)> {
        let adapter = self.adapters.get(name);
        adapter.ok_or_else(|| invalid(format!("there is no adapter {name:?}")))
    }

    /// Computes the answer of `receipt` again, with the adapters `uses`; the model is that of `files`, whose digest is
    /// `digest`, on `device`.
    pub(super) async fn check(
        &self,
        receipt: &Receipt,
        files: &ModelFiles,
        digest: Digest,
        device: Device,
        uses: &[AdapterUse],
    ) -> Result<Checked> {
        let plan = files.plan(&PlanOptions::default())?;
        let activations = files.activations().unwrap_or_default();
        let options = receipt.settings().session();
        let cache = options.cache_on(self.backend());
        let (name, ctx_len) = (files.stem(), options.ctx_len);
        let setup = Setup::new(name, digest, &plan, activations, ctx_len, cache, device);
        let mut setup = setup.with_adapters(&Adapted::new(Arc::clone(&self.model)))?;
        for used in uses {
            let (_, digest) = self.adapter(&used.name)?;
            setup.extend_adapters([AdapterId {
                name: used.name.clone(),
                blake3: (*digest).into(),
                scale: used.scale.unwrap_or(1.0),
                dtype: None,
            }]);
        }
        let mut session = Session::new(Arc::clone(&self.model), options)?;
        session.set_adapters(self.active(uses)?)?;
        receipt.check_async(&setup, &mut session).await
    }

    pub(super) fn use_adapters(&mut self, session: u32, uses: Vec<AdapterUse>) -> Result<()> {
        let id = self.id(session)?;
        let active = self.active(&uses)?;
        self.scheduler.finish(id);
        if let Some(sequence) = self.scheduler.sequence_mut(id) {
            sequence.set_adapters(active)?;
            // What its cache holds was made with the others.
            sequence.reset();
        }
        self.uses.insert(session, uses);
        Ok(())
    }

    pub(super) async fn swap(
        &mut self,
        files: &Files,
        name: &str,
        groups: &[String],
    ) -> Result<Vec<Swapped>> {
        let other = drive(ModelFiles::open(ModelEntry::Folder, open(name)), files).await?;
        let plan = other.plan(&PlanOptions::default())?;
        let revisions = Revisions::of(&other, &plan);
        let chosen = self.revisions.choose(&revisions, groups)?;
        let load = LoadOptions {
            verification: Verification::BySource,
            ..LoadOptions::default()
        };
        let (_, warnings) = drive(other.swap(&self.model, plan, &chosen, load), files).await?;
        self.warnings
            .extend(warnings.iter().map(Warning::to_string));
        // What caches hold was made by the old weights.
        self.early = None;
        for &id in self.sessions.values() {
            self.scheduler.finish(id);
            if let Some(sequence) = self.scheduler.sequence_mut(id) {
                sequence.reset();
            }
        }
        let swapped = self.revisions.replace(&revisions, &chosen).into_iter();
        let revision = |group: &GroupRevision| Revision {
            version: group.version.as_ref().map(ToString::to_string),
            hash: group.hash.as_ref().map(ToString::to_string),
        };
        Ok(swapped
            .map(|swapped| Swapped {
                group: swapped.to.id.clone(),
                from: swapped
                    .from
                    .as_ref()
                    .map_or_else(Revision::default, revision),
                to: revision(&swapped.to),
            })
            .collect())
    }
}
