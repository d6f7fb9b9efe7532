//! A conversation with a model on a terminal.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use sterna::ErrorCode;
use sterna::conversation::{ChatPrompt, Conversation, Room};
use sterna::generate::{Event, FirstWord, Generator, Request, Stats, TextOptions};
use sterna::native::Device;
use sterna::scheduler::{Scheduler, SequenceId};
use sterna::sequence::Sequence;
use sterna_engine::{Sampler, Session};
use sterna_text::{DateTime, Encode, Tokenizer};

use crate::interrupt::{self, Answering};
use crate::output;
use crate::progress::Progress;
use crate::runtime;

/// A model, and what was said so far.
pub(crate) struct Chat {
    scheduler: Scheduler<Device>,
    /// The only sequence.
    sequence: SequenceId,
    /// Begins an empty session of the model, loaded again, if the first is lost with its device.
    open: Box<dyn FnMut() -> Result<Session<Device>>>,
    options: ChatOptions,
}

/// How to talk with a model.
pub(crate) struct ChatOptions {
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
}

/// An answer, whole or interrupted.
pub(crate) struct Answer {
    pub(crate) text: String,
    pub(crate) ids: Vec<u32>,
    pub(crate) stats: Stats,
    /// Messages that were forgotten for lack of room.
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
        }
    }

    /// Answers `text`, which becomes the newest message, until done or asked to `stop`; passes each piece of
    /// the answer to `tell`.
    ///
    /// The oldest turns are forgotten if the context has no room for all of them and an answer.
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
            text: Some(TextOptions {
                tokenizer: options.tokenizer.clone(),
                stop_strings: options.stop_strings.clone(),
            }),
            ..Request::new(ids, options.sampler.clone())
        };
        let started = self.scheduler.start(self.sequence, request);
        started.map_err(|error| match error.code() {
            ErrorCode::ContextFull => anyhow!("{error} (--ctx)"),
            _ => error.into(),
        })?;
        let told = self.generate(stop, tell);
        let generator = self.scheduler.finish(self.sequence);
        let generator = generator.expect("an answer was started");
        let (ids, stats) = (generator.answer().to_vec(), *generator.stats());
        // The next answer continues its random sequence.
        self.options.sampler = generator.into_sampler();
        Ok(Answer {
            text: told?,
            ids,
            stats,
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
            let options = Encode {
                add_special: true,
                parse_special: true,
            };
            return Ok(ChatPrompt {
                ids: tokenizer.encode(&text, options)?,
                n_forgotten: 0,
            });
        };
        conversation.say(text);
        let room = Room {
            ctx_len,
            max_tokens: *max_tokens,
        };
        Ok(conversation.prompt(tokenizer, room, Some(now()))?)
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
        output::note(format_args!("note: {message}; loading the model again"));
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

    /// Chats with the user at the terminal, until they leave.
    pub(crate) fn converse(&mut self) -> Result<()> {
        interrupt::install()?;
        let mut editor = DefaultEditor::new().context("cannot use the terminal")?;
        output::note("Say something, or /help. Ctrl-D leaves.");
        self.converse_by(|| {
            loop {
                let line = match editor.readline("> ") {
                    Ok(line) => line,
                    // Ctrl-C while typing drops the line.
                    Err(ReadlineError::Interrupted) => continue,
                    Err(ReadlineError::Eof) => return Ok(None),
                    Err(error) => return Err(error).context("cannot read from the terminal"),
                };
                // This only keeps the line out of the history; not worth ending the chat for.
                let _ = editor.add_history_entry(&line);
                return Ok(Some(line));
            }
        })
    }

    /// Chats with the lines that `next_line` returns, until there are none.
    fn converse_by(&mut self, mut next_line: impl FnMut() -> Result<Option<String>>) -> Result<()> {
        let mut stats = None;
        while let Some(line) = next_line()? {
            if line.trim().is_empty() {
                continue;
            }
            match Command::parse(&line) {
                Ok(Command::Say(text)) => {
                    let answering = Answering::begin();
                    match self.speak(text, || answering.asked_to_stop()) {
                        Ok(new) => stats = Some(new),
                        Err(error) if output::is_closed_stdout(&error) => return Err(error),
                        Err(error) => {
                            output::note(format_args!("error: {error:#}"));
                            self.unsay();
                        }
                    }
                }
                Ok(Command::Help) => output::note(HELP),
                Ok(Command::Reset) => self.forget(),
                Ok(Command::System(text)) => self.set_system(text),
                Ok(Command::Stats) => self.show_stats(stats.as_ref()),
                Ok(Command::Exit) => return Ok(()),
                Err(error) => output::note(error),
            }
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
        output::note("Forgot everything said.");
    }

    /// Answers `text` on stdout, until done or asked to `stop`.
    fn speak(&mut self, text: String, stop: impl Fn() -> bool) -> Result<Stats> {
        let mut first_word = FirstWord::new(self.options.conversation.is_some());
        let tell = |piece: &str| output::write_now(&first_word.push(piece));
        let Answer {
            text,
            stats,
            n_forgotten,
            ..
        } = self.answer(text, stop, tell)?;
        output::write_now(if text.ends_with('\n') { "" } else { "\n" })?;
        if stats.stop.is_none() && stats.n_generated == 0 {
            self.unsay();
            return Ok(stats);
        }
        if let Some(conversation) = &mut self.options.conversation {
            if n_forgotten > 0 {
                output::note("[forgot the oldest turns: the context is full]");
            }
            conversation.answered(text);
        }
        if let Some(stop) = stats.stop.filter(|stop| stop.is_cut_off()) {
            output::note(format_args!("[stopped {}]", stop.describe()));
        }
        Ok(stats)
    }

    fn set_system(&mut self, text: String) {
        let Some(conversation) = &mut self.options.conversation else {
            output::note("Without a chat template (--raw) there are no system instructions.");
            return;
        };
        let instructions = (!text.is_empty()).then_some(text);
        output::note(match instructions {
            None => "No system instructions from now on.",
            Some(_) => "These are the system instructions from now on.",
        });
        conversation.set_system(instructions);
    }

    fn show_stats(&self, stats: Option<&Stats>) {
        if let Some(stats) = stats {
            output::note(format_args!("last answer: {stats}"));
        }
        let (cached, ctx_len) = (self.sequence().len(), self.sequence().ctx_len());
        output::note(format_args!("context: {cached} of {ctx_len} tokens in use"));
    }
}

/// The time for templates that ask for it: UTC, so that this machine's time zone isn't disclosed.
pub(crate) fn now() -> DateTime {
    let since_1970 = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    DateTime::from_unix(since_1970.as_secs().try_into().unwrap_or(i64::MAX), 0)
}

const HELP: &str = "\
/help           show this
/reset          forget everything said
/system [TEXT]  set the instructions that precede the chat, or remove them
/stats          show what the last answer took, and how full the context is
/exit           leave, as Ctrl-D does
Ctrl-C stops an answer.";

/// A line that the user typed.
#[derive(Debug, PartialEq, Eq)]
enum Command {
    Say(String),
    Help,
    Reset,
    System(String),
    Stats,
    Exit,
}

/// A line that looks like a command and isn't one.
#[derive(Debug, PartialEq, Eq)]
struct UnknownCommand(String);

impl fmt::Display for UnknownCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "There is no command `{}`; /help lists all.", self.0)
    }
}

impl Command {
    fn parse(line: &str) -> Result<Command, UnknownCommand> {
        let line = line.trim();
        if !line.starts_with('/') {
            return Ok(Command::Say(line.to_owned()));
        }
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match name {
            "/help" | "/?" => Ok(Command::Help),
            "/reset" => Ok(Command::Reset),
            "/system" => Ok(Command::System(rest.trim().to_owned())),
            "/stats" => Ok(Command::Stats),
            "/exit" | "/quit" => Ok(Command::Exit),
            _ => Err(UnknownCommand(name.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use anyhow::bail;
    use clap::Parser;
    use sterna::conversation::{Message, Role};
    use sterna::generate::StopReason;
    use sterna::native::BUILTIN;
    use sterna_engine::SamplerConfig;

    use super::*;
    use crate::args::ReportFlags;
    use crate::model;

    #[test]
    fn lines_are_said_unless_they_are_commands() {
        for (line, expected) in [
            ("  Hello / there ", Ok(Command::Say("Hello / there".into()))),
            ("/help", Ok(Command::Help)),
            (
                "/system  Be brief. ",
                Ok(Command::System("Be brief.".into())),
            ),
            ("/system", Ok(Command::System(String::new()))),
            ("/quit", Ok(Command::Exit)),
            ("/halp me", Err(UnknownCommand("/halp".into()))),
        ] {
            assert_eq!(Command::parse(line), expected, "{line}");
        }
    }

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
            sampler,
            conversation: template.map(Conversation::new),
            stop_ids: tokenizer.end_ids().to_vec(),
            tokenizer,
            stop_strings: Vec::new(),
            max_tokens: 12,
            speculate: None,
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

    #[test]
    fn commands_do_what_they_say() {
        let mut chat = chat();
        let say = |chat: &mut Chat, lines: &[&str]| {
            let mut lines = lines.iter();
            chat.converse_by(|| Ok(lines.next().map(|line| line.to_string())))
                .unwrap();
            lines.len()
        };
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
