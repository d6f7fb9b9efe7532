//! A conversation with a model on a terminal.
//!
//! [`input`] reads messages, [`command`] knows commands, [`settings`] and [`saved`] carry out two of them.

mod command;
mod input;
mod saved;
mod settings;

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use sterna::ErrorCode;
use sterna::conversation::{ChatPrompt, Conversation, Role, Room};
use sterna::generate::{Event, FirstWord, Generator, Request, Stats, TextOptions, TokenConstraint};
use sterna::native::Device;
use sterna::receipt::{Receipt, Setup};
use sterna::scheduler::{Scheduler, SequenceId};
use sterna::sequence::Sequence;
use sterna_engine::{Logits, Sampler, Session};
use sterna_text::{Encode, Tokenizer};

use crate::interrupt::{self, Answering};
use crate::model::Replaceable;
use crate::progress::Progress;
use crate::prompt::{EMPTY_PROMPT, now};
use crate::{folders, output, runtime};

use command::Command;
use input::{Editor, Lines};

/// A model, and what was said so far.
pub(crate) struct Chat {
    scheduler: Scheduler<Device>,
    /// The only sequence.
    sequence: SequenceId,
    /// Begins an empty session of the model, loaded again, if the first is lost with its device.
    open: Box<dyn FnMut() -> Result<Session<Device>>>,
    options: ChatOptions,
    /// The newest message, if it was answered.
    last: Option<String>,
    /// Messages that had no room in the newest prompt.
    n_forgotten: usize,
}

/// How to talk with a model.
pub(crate) struct ChatOptions {
    /// What the user calls the model.
    pub(crate) model: String,
    pub(crate) sampler: Sampler,
    pub(crate) tokenizer: Tokenizer,
    /// Turns the conversation into prompts; without it, every prompt is continued as it is.
    pub(crate) conversation: Option<Conversation>,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) stop_strings: Vec<String>,
    /// Maximum tokens of an answer.
    pub(crate) max_tokens: usize,
    /// Maximum tokens to draft.
    pub(crate) speculate: Option<usize>,
    /// What answers have to match.
    pub(crate) constraint: Option<Box<dyn TokenConstraint>>,
    /// Show timings after each answer of a conversation.
    pub(crate) shows_timings: bool,
    /// Save what was computed together with conversations.
    pub(crate) saves_cache: bool,
    /// The weights of the model.
    pub(crate) weights: Replaceable,
    /// What computes answers, if receipts of them are to be written.
    pub(crate) receipt: Option<Arc<Setup>>,
}

/// An answer, whole or interrupted.
pub(crate) struct Answer {
    pub(crate) text: String,
    pub(crate) ids: Vec<u32>,
    pub(crate) stats: Stats,
    /// If it was asked for and the answer is whole.
    pub(crate) receipt: Option<Receipt>,
    /// Messages that were left out for lack of room.
    n_forgotten: usize,
}

impl Chat {
    /// A chat using `session`, which is empty; `open` begins another, if its device is lost.
    pub(crate) fn new(
        session: Session<Device>,
        open: impl FnMut() -> Result<Session<Device>> + 'static,
        options: ChatOptions,
    ) -> Chat {
        let (scheduler, sequence) = runtime::alone(session);
        Chat {
            scheduler,
            sequence,
            open: Box::new(open),
            options,
            last: None,
            n_forgotten: 0,
        }
    }

    /// Answers `text`, which becomes the newest message, until done or asked to `stop`; passes each piece of
    /// the answer to `tell`.
    ///
    /// The oldest turns are left out if the context has no room for all of them and an answer.
    pub(crate) fn answer(
        &mut self,
        text: String,
        stop: impl Fn() -> bool,
        tell: impl FnMut(&str) -> Result<()>,
    ) -> Result<Answer> {
        let ChatPrompt { ids, n_forgotten } = self.prompt(text)?;
        let options = &self.options;
        let request = Request {
            max_tokens: options.max_tokens,
            stop_ids: options.stop_ids.clone(),
            speculate: options.speculate,
            constraint: options.constraint.clone(),
            receipt: options.receipt.clone(),
            text: Some(TextOptions {
                tokenizer: options.tokenizer.clone(),
                stop_strings: options.stop_strings.clone(),
            }),
            ..Request::new(ids, options.sampler.clone())
        };
        let started = self.scheduler.start(self.sequence, request);
        started.map_err(with_flag)?;
        let told = self.generate(stop, tell);
        let generator = self.scheduler.finish(self.sequence);
        let generator = generator.expect("an answer was started");
        let (ids, stats) = (generator.answer().to_vec(), *generator.stats());
        let receipt = generator.receipt();
        // The next answer continues its random sequence.
        self.options.sampler = generator.into_sampler();
        Ok(Answer {
            text: told?,
            ids,
            stats,
            receipt,
            n_forgotten,
        })
    }

    /// The prompt for answering `text`.
    fn prompt(&mut self, text: String) -> Result<ChatPrompt> {
        let ctx_len = self.sequence().ctx_len();
        let ChatOptions {
            tokenizer,
            conversation,
            max_tokens,
            ..
        } = &mut self.options;
        let Some(conversation) = conversation else {
            return Ok(ChatPrompt {
                ids: tokenizer.encode(&text, Encode::RAW)?,
                n_forgotten: 0,
            });
        };
        if text.trim().is_empty() {
            bail!(EMPTY_PROMPT);
        }
        conversation.say(text);
        let room = Room {
            ctx_len,
            max_tokens: *max_tokens,
        };
        let prompt = conversation.prompt(tokenizer, room, Some(now()));
        prompt.map_err(with_flag)
    }

    /// Computes the answer that was started, with a progress bar for the prompt; returns its text.
    fn generate(
        &mut self,
        stop: impl Fn() -> bool,
        mut tell: impl FnMut(&str) -> Result<()>,
    ) -> Result<String> {
        let mut left = self.n_prompt_left();
        let mut progress = Some(Progress::items("reading the prompt", left as u64));
        let mut said = String::new();
        while !self.scheduler.is_idle() && !stop() {
            let events = self.scheduler.step()?;
            if let Some(bar) = &progress {
                let before = std::mem::replace(&mut left, self.n_prompt_left());
                bar.add((before - left) as u64);
                // Before anything is printed on its line.
                progress = progress.filter(|_| left > 0);
            }
            for (_, event) in events {
                let text = match event {
                    Event::Token(token) => token.text,
                    Event::Ended { text, .. } => text,
                    Event::Failed(error) => return Err(error.into()),
                    Event::DeviceLost { message } => {
                        self.restore(&message)?;
                        continue;
                    }
                    _ => continue,
                };
                if !text.is_empty() {
                    tell(&text)?;
                    said += &text;
                }
            }
        }
        Ok(said)
    }

    /// Loads the model again, whose device was lost.
    fn restore(&mut self, message: &str) -> Result<()> {
        let undone = match self.options.weights.load_again() {
            true => "; what /swap replaced is as before",
            false => "",
        };
        output::note(format_args!(
            "note: {message}; loading the model again{undone}"
        ));
        let restored = self.scheduler.restore(|_| (self.open)());
        restored.with_context(|| format!("{message}, and the model cannot be loaded again"))
    }

    fn sequence(&self) -> &Sequence<Device> {
        let sequence = self.scheduler.sequence(self.sequence);
        sequence.expect("the sequence is never taken out")
    }

    /// Tokens of the prompt that are still to be computed.
    fn n_prompt_left(&self) -> usize {
        let generator = self.scheduler.generator(self.sequence);
        generator.map_or(0, Generator::n_prompt_left)
    }

    /// Chats with the user at the terminal, until they leave; `is_kept` is whether messages are remembered for
    /// later chats.
    pub(crate) fn converse(&mut self, is_kept: bool) -> Result<()> {
        interrupt::install()?;
        let mut editor = Editor::open(is_kept)?;
        output::note("Say something, or /help. Ctrl-D leaves.");
        self.converse_by(&mut editor)
    }

    /// Chats with the messages of `lines`, until there are none.
    fn converse_by(&mut self, lines: &mut dyn Lines) -> Result<()> {
        let mut stats = None;
        while let Some(message) = input::next_message(lines)? {
            let command = match Command::parse(message) {
                Ok(command) => command,
                Err(error) => {
                    output::reply(error);
                    continue;
                }
            };
            let answering = Answering::begin();
            let stop = || answering.asked_to_stop();
            let done = match command {
                Command::Say(text) => self.speak(text, stop).map(|new| stats = Some(new)),
                Command::Regenerate => self.regenerate(stop).map(|new| stats = Some(new)),
                Command::Help => {
                    output::reply(command::HELP);
                    Ok(())
                }
                Command::Reset => {
                    self.forget();
                    Ok(())
                }
                Command::System(text) => {
                    self.set_system(text);
                    Ok(())
                }
                Command::Set(None) => {
                    self.show_settings();
                    Ok(())
                }
                Command::Set(Some((name, value))) => self.set(&name, &value),
                Command::Save(file) => self.save(&folders::expanded(&file)),
                Command::Load(file) => self.load(&folders::expanded(&file), stop),
                Command::Swap(model, groups) => self.swap(&model, &groups),
                Command::Stats => {
                    self.show_stats(stats.as_ref());
                    Ok(())
                }
                Command::Exit => return Ok(()),
            };
            match done {
                Err(error) if output::is_closed_stdout(&error) || interrupt::is_ending() => {
                    return Err(error);
                }
                Err(error) => output::error(format_args!("{error:#}")),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Replaces groups of weights; what was said is read again by the new ones with the next message.
    fn swap(&mut self, name: &str, groups: &[String]) -> Result<()> {
        let model = Arc::clone(self.sequence().session().model());
        let swapped = self.options.weights.swap(&[model], name, groups)?;
        if let Some(sequence) = self.scheduler.sequence_mut(self.sequence) {
            sequence.reset();
        }
        for group in &swapped {
            output::reply(group);
        }
        Ok(())
    }

    fn unsay(&mut self) {
        if let Some(conversation) = &mut self.options.conversation {
            conversation.unsay();
        }
    }

    fn forget(&mut self) {
        if let Some(conversation) = &mut self.options.conversation {
            conversation.reset();
        }
        if let Some(sequence) = self.scheduler.sequence_mut(self.sequence) {
            sequence.reset();
        }
        self.last = None;
        self.n_forgotten = 0;
        output::reply("Forgot everything said.");
    }

    /// Answers `text` on stdout, until done or asked to `stop`. What was stopped before its first word, or
    /// failed, was not said.
    fn speak(&mut self, text: String, stop: impl Fn() -> bool) -> Result<Stats> {
        let mut first_word = FirstWord::new(self.options.conversation.is_some());
        let tell = |piece: &str| output::write_now(&first_word.push(piece));
        let answered = self.answer(text.clone(), stop, tell);
        let Answer {
            text: answer,
            stats,
            n_forgotten,
            ..
        } = answered.inspect_err(|_| self.unsay())?;
        output::write_now(if answer.ends_with('\n') { "" } else { "\n" })?;
        if stats.stop.is_none() && stats.n_generated == 0 {
            self.unsay();
            return Ok(stats);
        }
        self.last = Some(text);
        if let Some(conversation) = &mut self.options.conversation {
            conversation.answered(answer);
        }
        self.tell_forgotten(n_forgotten);
        if let Some(stop) = stats.stop.filter(|stop| stop.is_cut_off()) {
            output::note(format_args!("[stopped {}]", stop.describe()));
        }
        if self.options.shows_timings {
            output::reply(format_args!("[{stats}]"));
        }
        Ok(stats)
    }

    /// Says so if more messages than before have no room.
    fn tell_forgotten(&mut self, n_forgotten: usize) {
        if n_forgotten > self.n_forgotten {
            output::note("[forgot the oldest turns: the context is full]");
        }
        self.n_forgotten = n_forgotten;
    }

    /// Answers the newest message again. If nothing comes of it, the answer before stays.
    fn regenerate(&mut self, stop: impl Fn() -> bool) -> Result<Stats> {
        let before = self.options.conversation.clone();
        let text = match &mut self.options.conversation {
            Some(conversation) => conversation.retract(),
            None => self.last.clone(),
        };
        let text = text.context("/regenerate: expected a message that was answered, found none")?;
        if self.options.sampler.config().temperature == 0.0 {
            output::note(
                "The temperature is 0, so the answer is the same; /set temperature 0.8 varies it.",
            );
        }
        let answered = self.speak(text, stop);
        let is_new =
            (answered.as_ref()).is_ok_and(|stats| stats.stop.is_some() || stats.n_generated > 0);
        if !is_new {
            self.options.conversation = before;
        }
        answered
    }

    fn save(&mut self, file: &Path) -> Result<()> {
        let conversation = (self.options.conversation.as_ref())
            .context("/save: expected a conversation, found a text (--raw, or a base model)")?;
        let messages = conversation.messages();
        saved::save(file, &self.options.model, messages)?;
        let n = messages.len();
        output::reply(format_args!("Saved {n} messages to {}.", file.display()));
        let sequence = self.scheduler.sequence_mut(self.sequence);
        let sequence = sequence.expect("the sequence is never taken out");
        if !self.options.saves_cache || sequence.is_empty() {
            return saved::remove_cache(file);
        }
        let n = sequence.len();
        match saved::save_cache(file, sequence) {
            Ok(bytes) => output::reply(format_args!(
                "What was computed for them, of {n} tokens, is in {} ({}); /set save-cache off leaves it out.",
                saved::cache_of(file).display(),
                output::Bytes(bytes)
            )),
            Err(error) => {
                output::note(format_args!(
                    "note: what was computed for them isn't saved: {error:#}"
                ));
                return saved::remove_cache(file);
            }
        }
        Ok(())
    }

    /// Continues the conversation in `file`, which is computed until done or asked to `stop`; the next answer
    /// computes the rest.
    fn load(&mut self, file: &Path, stop: impl Fn() -> bool) -> Result<()> {
        if self.options.conversation.is_none() {
            bail!(
                "/load: expected a model with a chat template, found a text (--raw, or a base model)"
            );
        }
        let (model, messages) = saved::load(file)?;
        if model != self.options.model {
            output::note(format_args!("note: this conversation was with {model}"));
        }
        let n = messages.len();
        if let Some(conversation) = &mut self.options.conversation {
            conversation.set_system(None);
            conversation.reset();
            messages
                .into_iter()
                .for_each(|message| conversation.push(message));
        }
        self.n_forgotten = 0;
        output::reply(format_args!("Loaded {n} messages from {}.", file.display()));
        let sequence = self.scheduler.sequence_mut(self.sequence);
        let sequence = sequence.expect("the sequence is never taken out");
        if let Err(error) = saved::load_cache(file, sequence) {
            output::note(format_args!(
                "note: {error:#}; the conversation is computed again"
            ));
        }
        self.prefill(stop)
    }

    /// Computes what was said so far.
    fn prefill(&mut self, stop: impl Fn() -> bool) -> Result<()> {
        let room = Room {
            ctx_len: self.sequence().ctx_len(),
            max_tokens: self.options.max_tokens,
        };
        let ChatOptions {
            conversation,
            tokenizer,
            ..
        } = &self.options;
        let Some(conversation) = conversation else {
            return Ok(());
        };
        if !conversation
            .messages()
            .iter()
            .any(|message| message.role == Role::User)
        {
            return Ok(());
        }
        let ChatPrompt { ids, n_forgotten } =
            match conversation.prompt(tokenizer, room, Some(now())) {
                // The next message may have room without this turn.
                Err(error) if error.code() == ErrorCode::ContextFull => return Ok(()),
                prompt => prompt?,
            };
        self.tell_forgotten(n_forgotten);
        let chunk = runtime::scheduling(self.sequence().session()).chunk;
        let sequence = self.scheduler.sequence_mut(self.sequence);
        let sequence = sequence.expect("the sequence is never taken out");
        let held = sequence.ids().iter().zip(&ids);
        let n_held = held.take_while(|(held, id)| held == id).count();
        sequence.truncate(n_held);
        let n_held = sequence.len();
        let progress = Progress::items("reading the conversation", (ids.len() - n_held) as u64);
        for chunk in ids[n_held..].chunks(chunk) {
            if stop() {
                break;
            }
            sequence.forward(chunk, Logits::None)?;
            progress.add(chunk.len() as u64);
        }
        Ok(())
    }

    fn set_system(&mut self, text: String) {
        let Some(conversation) = &mut self.options.conversation else {
            output::reply("Without a chat template (--raw) there are no system instructions.");
            return;
        };
        let instructions = (!text.is_empty()).then_some(text);
        output::reply(match instructions {
            None => "No system instructions from now on.",
            Some(_) => "These are the system instructions from now on.",
        });
        conversation.set_system(instructions);
    }

    fn show_stats(&self, stats: Option<&Stats>) {
        if let Some(stats) = stats {
            output::reply(format_args!("last answer: {stats}"));
        }
        let (cached, ctx_len) = (self.sequence().len(), self.sequence().ctx_len());
        output::reply(format_args!("context: {cached} of {ctx_len} tokens in use"));
    }
}

/// The error, with the flag that makes room.
fn with_flag(error: sterna::Error) -> anyhow::Error {
    match error.code() {
        ErrorCode::ContextFull => anyhow!("{error} (--ctx)"),
        _ => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use anyhow::bail;
    use clap::Parser;
    use sterna::conversation::Message;
    use sterna::generate::StopReason;
    use sterna::native::BUILTIN;
    use sterna_engine::SamplerConfig;
    use sterna_engine::plan::{HeadOptions, PlanOptions};

    use super::input::Typed;
    use super::*;
    use crate::args::ReportFlags;
    use crate::model;

    /// A greedy chat with the built-in model.
    fn chat() -> Chat {
        chat_on("cpu").unwrap()
    }

    fn chat_on(backend: &str) -> Result<Chat> {
        let flags = ["test", "--threads", "1", "--backend", backend];
        let TestFlags { flags } = TestFlags::parse_from(flags);
        let files = model::open(BUILTIN).unwrap();
        let tokenizer = files.require_tokenizer().unwrap();
        let plan = model::plan(&files, &flags.files).unwrap();
        let sampler = Sampler::new(SamplerConfig::default(), plan.config().n_vocab).unwrap();
        let template = files.chat_template(&tokenizer).unwrap();
        let options = ChatOptions {
            model: BUILTIN.to_owned(),
            sampler,
            conversation: template.map(Conversation::new),
            stop_ids: tokenizer.end_ids().to_vec(),
            tokenizer,
            stop_strings: Vec::new(),
            max_tokens: 12,
            speculate: None,
            constraint: None,
            shows_timings: false,
            saves_cache: true,
            weights: Replaceable::new(
                &files,
                &plan,
                PlanOptions::default(),
                HeadOptions::default(),
            ),
            receipt: None,
        };
        let session = model::session(&files, plan, &flags.engine, 256)?;
        Ok(Chat::new(session, || bail!("no such file"), options))
    }

    #[derive(Parser)]
    struct TestFlags {
        #[command(flatten)]
        flags: ReportFlags,
    }

    /// What was said.
    fn messages(chat: &Chat) -> &[Message] {
        chat.options.conversation.as_ref().unwrap().messages()
    }

    /// The roles of what was said.
    fn roles(chat: &Chat) -> Vec<Role> {
        messages(chat).iter().map(|message| message.role).collect()
    }

    #[test]
    fn what_was_said_is_not_computed_again() {
        let mut chat = chat();
        let first = chat.speak("What is 3 plus 4?".into(), || false).unwrap();
        assert_eq!(
            (first.n_reused, first.stop),
            (0, Some(StopReason::StopToken))
        );
        let second = chat.speak("Who are you?".into(), || false).unwrap();
        // Everything that the first turn left in the cache.
        assert_eq!(second.n_reused, first.n_prompt + first.n_decoded);
        assert!(second.n_reused < second.n_prompt);
        assert_eq!(
            roles(&chat),
            [Role::User, Role::Assistant, Role::User, Role::Assistant]
        );
    }

    #[test]
    fn what_is_interrupted_before_the_first_word_was_not_said() {
        let mut chat = chat();
        chat.speak("What is 3 plus 4?".into(), || false).unwrap();
        let before = messages(&chat).to_vec();
        let stats = chat.speak("Tell me a story.".into(), || true).unwrap();
        assert_eq!((stats.n_generated, stats.stop), (0, None));
        assert_eq!(messages(&chat), before);
        // Asked before the prompt, and after each of three tokens.
        let polls = Cell::new(0);
        let stop = || polls.replace(polls.get() + 1) == 3;
        let stats = chat.speak("Tell me a story.".into(), stop).unwrap();
        assert_eq!((stats.n_generated, stats.stop), (3, None));
        assert_eq!(roles(&chat).len(), before.len() + 2);
        // And the chat goes on.
        let stats = chat.speak("Who are you?".into(), || false).unwrap();
        assert!(stats.n_generated > 0);
    }

    /// Lines, one after the other.
    struct Script<'a>(std::slice::Iter<'a, &'a str>);

    impl Lines for Script<'_> {
        fn next(&mut self, _prompt: &str) -> Result<Typed> {
            let line = self.0.next();
            Ok(line.map_or(Typed::End, |line| Typed::Line(line.to_string())))
        }
    }

    /// Types `lines`; returns how many were not asked for.
    fn say(chat: &mut Chat, lines: &[&str]) -> usize {
        let mut script = Script(lines.iter());
        chat.converse_by(&mut script).unwrap();
        script.0.len()
    }

    #[test]
    fn commands_do_what_they_say() {
        let mut chat = chat();
        say(&mut chat, &["/system Be brief.", "/help", " ", "/halp"]);
        let system = Message::new(Role::System, "Be brief.");
        assert_eq!(messages(&chat), [system]);
        say(&mut chat, &["What is 3 plus 4?", "/stats"]);
        assert_eq!(roles(&chat), [Role::System, Role::User, Role::Assistant]);
        assert!(!chat.sequence().is_empty());
        say(&mut chat, &["/reset"]);
        assert_eq!(roles(&chat), [Role::System]);
        assert!(chat.sequence().is_empty());
        say(&mut chat, &["/system"]);
        assert_eq!(messages(&chat), []);
        assert_eq!(say(&mut chat, &["/exit", "never said"]), 1);
        // Too long for the context: an error, and the chat goes on without it.
        let long = "and then ".repeat(400);
        say(&mut chat, &[&long, "What is 3 plus 4?"]);
        assert_eq!(roles(&chat), [Role::User, Role::Assistant]);
    }

    #[test]
    fn a_message_without_room_forgets_nothing() {
        let mut chat = chat();
        say(&mut chat, &["What is 3 plus 4?", "Who are you?"]);
        let before = messages(&chat).to_vec();
        let long = "and then ".repeat(400);
        let error = chat.speak(long, || false).unwrap_err().to_string();
        assert!(
            error.contains("but the context holds 256 (--ctx)"),
            "{error}"
        );
        assert_eq!(messages(&chat), before);
        // One that has room only without the first turn, stopped before its first word, and then not.
        let alone = "and then ".repeat(100);
        chat.speak(alone.clone(), || true).unwrap();
        assert_eq!((messages(&chat), chat.n_forgotten), (&before[..], 0));
        chat.speak(alone, || false).unwrap();
        assert_eq!(messages(&chat)[..4], before);
        assert_eq!((messages(&chat).len(), chat.n_forgotten), (6, 2));
    }

    #[test]
    fn settings_apply_to_the_next_answer() {
        let mut chat = chat();
        let story = "Tell me a story about a fox.";
        say(&mut chat, &["/set max-tokens 3", "/set top_k 4", story]);
        let config = chat.options.sampler.config();
        assert_eq!((chat.options.max_tokens, config.top_k), (3, 4));
        let n_generated = chat.sequence().len();
        // None of these is accepted, and the others stay.
        for wrong in [
            "/set top-k -1",
            "/set temperature -1",
            "/set nothing 1",
            "/set timings maybe",
            "/set seed",
        ] {
            say(&mut chat, &[wrong]);
        }
        let config = chat.options.sampler.config();
        assert_eq!((config.top_k, config.temperature), (4, 0.0));
        assert_eq!(chat.sequence().len(), n_generated);
        let error = chat.set("temperature", "hot").unwrap_err().to_string();
        assert_eq!(error, "temperature: expected a number, found `hot`");
        say(&mut chat, &["/set", "/set timings on"]);
        assert!(chat.options.shows_timings);
    }

    #[test]
    fn a_message_is_answered_again() {
        let mut chat = chat();
        let error = chat.regenerate(|| false).unwrap_err().to_string();
        assert!(error.contains("found none"), "{error}");
        say(
            &mut chat,
            &["/set temperature 1", "/set seed 5", "/set max-tokens 20"],
        );
        say(&mut chat, &["Tell me a story about a fox.", "/regenerate"]);
        let second = messages(&chat).to_vec();
        assert_eq!(roles(&chat), [Role::User, Role::Assistant]);
        // The random sequence goes on, and begins again with its seed.
        say(&mut chat, &["/set seed 5", "/regenerate"]);
        let first = messages(&chat).to_vec();
        assert_eq!(first[0], second[0]);
        assert_ne!(first[1], second[1]);
        say(&mut chat, &["/regenerate"]);
        assert_eq!(messages(&chat), second);
        // Stopped before its first word, it leaves the one before.
        chat.regenerate(|| true).unwrap();
        assert_eq!(messages(&chat), second);
    }

    #[test]
    fn a_loaded_conversation_goes_on_as_the_saved_one() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("chat.json");
        let file = file.to_str().unwrap();
        let mut chat = chat();
        let turns = ["/system Be brief.", "What is 3 plus 4?", "Who are you?"];
        say(&mut chat, &turns);
        say(&mut chat, &[&format!("/save {file}"), "Tell me a story."]);
        let mut other = chat_on("cpu").unwrap();
        say(&mut other, &["Something else.", &format!("/load {file}")]);
        assert_eq!(messages(&other), &messages(&chat)[..5]);
        let n_held = other.sequence().len();
        // What was computed for it is there, too, and fits no other cache.
        let mut third = chat_on("cpu").unwrap();
        let sequence = third.scheduler.sequence_mut(third.sequence).unwrap();
        assert!(saved::load_cache(Path::new(file), sequence).unwrap());
        let saved_ids = sequence.ids();
        let held = other.sequence().ids().iter().zip(saved_ids);
        let n_same = held.take_while(|(a, b)| a == b).count();
        assert!(n_same > 30 && n_same + 4 >= saved_ids.len(), "{n_same}");
        // A damaged one is not believed, and what is something else is not replaced.
        let cache = saved::cache_of(Path::new(file));
        let mut bytes = std::fs::read(&cache).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&cache, &bytes).unwrap();
        assert!(saved::load_cache(Path::new(file), sequence).is_err());
        assert!(sequence.is_empty() && sequence.session().is_empty());
        // Cut off within its digest.
        bytes[middle] ^= 1;
        std::fs::write(&cache, &bytes[..bytes.len() - 3]).unwrap();
        assert!(saved::load_cache(Path::new(file), sequence).is_err());
        assert!(sequence.is_empty() && sequence.session().is_empty());
        say(&mut third, &[&format!("/load {file}")]);
        assert_eq!(third.sequence().len(), n_held);
        // One of another conversation doesn't stay.
        std::fs::write(&cache, &bytes).unwrap();
        say(
            &mut third,
            &["/set save-cache off", &format!("/save {file}")],
        );
        assert!(!cache.exists());
        say(&mut third, &["/set save-cache on"]);
        std::fs::write(&cache, "mine").unwrap();
        say(&mut third, &[&format!("/save {file}")]);
        assert_eq!(std::fs::read_to_string(&cache).unwrap(), "mine");
        let stats = other.speak("Tell me a story.".into(), || false).unwrap();
        assert_eq!(messages(&other), messages(&chat));
        // Only what begins the answer differs.
        assert!(
            n_held > 30 && stats.n_reused + 4 >= n_held,
            "{stats:?} {n_held}"
        );
        say(&mut other, &["/load no/such/file", "/save"]);
        assert_eq!(messages(&other), messages(&chat));
    }

    #[test]
    fn a_model_that_is_loaded_again_is_without_what_was_swapped() {
        let mut chat = chat();
        say(&mut chat, &["/swap builtin layer.9999"]);
        assert!(!chat.options.weights.load_again());
        say(&mut chat, &["Who are you?", "/swap builtin layer.0"]);
        assert!(chat.sequence().is_empty());
        assert!(chat.options.weights.load_again());
        // Once it is.
        assert!(!chat.options.weights.load_again());
    }

    #[test]
    fn an_empty_message_is_refused() {
        let mut chat = chat();
        let error = chat.speak(" \n".into(), || false).unwrap_err().to_string();
        assert!(error.contains("the prompt is empty"), "{error}");
        assert_eq!(messages(&chat), []);
    }

    #[test]
    #[cfg(feature = "gpu")]
    fn a_device_that_is_lost_for_good_is_named() {
        if !sterna_testing::gpu::is_there() {
            return;
        }
        let mut chat = chat_on("gpu").unwrap();
        let model = chat.sequence().session().model();
        let gpu = model.backend().device().expect("a model on a GPU");
        gpu.device().lose();
        let error = chat.speak("Who are you?".into(), || false).unwrap_err();
        let error = format!("{error:#}");
        assert!(
            error.contains("GPU device was lost")
                && error.contains("cannot be loaded again: no such file"),
            "{error}"
        );
    }
}
