//! A conversation with a model, and its interactive form on a terminal.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use sterna_text::{ChatInput, ChatTemplate, DateTime, Encode, Tokenizer};

use crate::display::FirstWord;
use crate::interrupt::{self, Answering};
use crate::output;
use crate::progress::Progress;
use crate::runtime::{Generation, Request, Runtime, Stats};

/// One turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    role: Role,
    content: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    System,
    User,
    Assistant,
}

impl Role {
    /// As chat templates call it.
    const fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

impl Message {
    fn new(role: Role, content: impl Into<String>) -> Message {
        Message {
            role,
            content: content.into(),
        }
    }

    /// Instructions that precede the conversation.
    pub(crate) fn system(content: impl Into<String>) -> Message {
        Message::new(Role::System, content)
    }
}

/// A model, and what was said so far.
pub(crate) struct Chat {
    pub(crate) runtime: Runtime,
    pub(crate) tokenizer: Tokenizer,
    /// Turns messages into a prompt; without one, every prompt is continued as it is.
    pub(crate) template: Option<ChatTemplate>,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) stop_strings: Vec<String>,
    /// Tokens of an answer at most.
    pub(crate) max_tokens: usize,
    /// Tokens to draft at most.
    pub(crate) speculate: Option<usize>,
    pub(crate) messages: Vec<Message>,
}

impl Chat {
    /// Begins the answer to `text`, which becomes the newest message.
    ///
    /// The oldest turns are forgotten if the context has no room for all of them and an answer.
    pub(crate) fn answer(&mut self, text: String) -> Result<Generation<'_>> {
        let prompt = match &self.template {
            None => self.tokenizer.encode(
                &text,
                Encode {
                    add_special: true,
                    parse_special: true,
                },
            )?,
            Some(template) => {
                self.messages.push(Message::new(Role::User, text));
                loop {
                    let ids = render(template, &self.tokenizer, &self.messages)?;
                    let room = self.runtime.ctx_len().saturating_sub(ids.len());
                    let enough = room > self.max_tokens.min(self.runtime.ctx_len() / 4);
                    if enough || !forget_oldest(&mut self.messages) {
                        break ids;
                    }
                }
            }
        };
        let request = Request {
            prompt,
            max_tokens: self.max_tokens,
            stop_ids: &self.stop_ids,
            speculate: self.speculate,
        };
        let answer = self.runtime.start(request)?;
        let stop_strings = self.stop_strings.clone();
        Ok(Generation::new(answer, &self.tokenizer, stop_strings))
    }

    /// Talks with whoever sits at the terminal, until they leave.
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
                // Only keeps the line from being recalled; not worth ending the chat for.
                let _ = editor.add_history_entry(&line);
                return Ok(Some(line));
            }
        })
    }

    /// Talks with whoever writes the lines that `next_line` returns, until there is none.
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
                Ok(Command::Reset) => {
                    self.messages.retain(|message| message.role == Role::System);
                    self.runtime.reset();
                    output::note("Forgot everything said.");
                }
                Ok(Command::System(text)) => self.set_system(text),
                Ok(Command::Stats) => self.show_stats(stats.as_ref()),
                Ok(Command::Exit) => return Ok(()),
                Err(error) => output::note(error),
            }
        }
        Ok(())
    }

    /// Forgets the newest message if it wasn't answered: it counts as not said.
    fn unsay(&mut self) {
        self.messages.pop_if(|message| message.role == Role::User);
    }

    /// Answers `text` on stdout, until done or asked to `stop`.
    fn speak(&mut self, text: String, stop: impl Fn() -> bool) -> Result<Stats> {
        let mut first_word = FirstWord::new(self.template.is_some());
        let n_messages = self.messages.len() + 1;
        let mut answer = self.answer(text)?;
        let mut said = String::new();
        prefill(&mut answer, &stop)?;
        while !stop() {
            let Some(piece) = answer.next().transpose()? else {
                break;
            };
            output::write_now(&first_word.push(&piece))?;
            said += &piece;
        }
        let stats = answer.stats();
        output::write_now(if said.ends_with('\n') { "" } else { "\n" })?;
        if stats.stop.is_none() && stats.n_generated == 0 {
            self.unsay();
            return Ok(stats);
        }
        if self.template.is_some() {
            if self.messages.len() < n_messages {
                output::note("[forgot the oldest turns: the context is full]");
            }
            self.messages.push(Message::new(Role::Assistant, said));
        }
        if let Some(stop) = stats.stop.filter(|stop| stop.is_cut_off()) {
            output::note(format_args!("[stopped {}]", stop.describe()));
        }
        Ok(stats)
    }

    fn set_system(&mut self, text: String) {
        if self.template.is_none() {
            output::note("Without a chat template (--raw) there are no system instructions.");
            return;
        }
        self.messages.retain(|message| message.role != Role::System);
        if text.is_empty() {
            output::note("No system instructions from now on.");
        } else {
            self.messages.insert(0, Message::system(text));
            output::note("These are the system instructions from now on.");
        }
    }

    fn show_stats(&self, stats: Option<&Stats>) {
        if let Some(stats) = stats {
            output::note(format_args!("last answer: {stats}"));
        }
        let (cached, ctx_len) = (self.runtime.n_cached(), self.runtime.ctx_len());
        output::note(format_args!("context: {cached} of {ctx_len} tokens in use"));
    }
}

/// Computes the prompt of `answer` under a progress bar, unless asked to stop.
pub(crate) fn prefill(answer: &mut Generation<'_>, stop: impl Fn() -> bool) -> Result<()> {
    let mut left = answer.n_left();
    let progress = Progress::items("reading the prompt", left as u64);
    while left > 0 && !stop() {
        let before = left;
        left = answer.prefill()?;
        progress.add((before - left) as u64);
    }
    Ok(())
}

fn render(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    messages: &[Message],
) -> Result<Vec<u32>> {
    let turns = messages
        .iter()
        .map(|message| (message.role.name(), message.content.as_str()));
    let input = ChatInput {
        now: Some(now()),
        ..ChatInput::conversation(turns)
    };
    Ok(tokenizer.encode_prompt(&template.prompt(&input, tokenizer)?)?)
}

/// The time for templates that ask for it: UTC, as this machine's time zone is nobody's business.
pub(crate) fn now() -> DateTime {
    let since_1970 = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    DateTime::from_unix(since_1970.as_secs().try_into().unwrap_or(i64::MAX), 0)
}

/// Drops the oldest turn, up to the next thing the user said; false if only the newest is left.
fn forget_oldest(messages: &mut Vec<Message>) -> bool {
    let is_user = |message: &Message| message.role == Role::User;
    let Some(first) = messages.iter().position(is_user) else {
        return false;
    };
    let Some(next) = messages[first + 1..].iter().position(is_user) else {
        return false;
    };
    messages.drain(first..first + 1 + next);
    true
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

/// A line that looks like a command and is none.
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

    use clap::Parser;
    use sterna_engine::{Sampler, SamplerConfig};

    use super::*;
    use crate::args::ReportFlags;
    use sterna::native::BUILTIN;
    use crate::model;
    use crate::runtime::StopReason;

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

    /// A chat with the built-in model that takes the best token each time.
    fn chat() -> Chat {
        let TestFlags { flags } = TestFlags::parse_from(["test", "--threads", "1"]);
        let files = model::open(BUILTIN).unwrap();
        let tokenizer = files.require_tokenizer().unwrap();
        let plan = model::plan(&files, &flags.files).unwrap();
        let sampler = Sampler::new(SamplerConfig::default(), plan.config().n_vocab).unwrap();
        let session = model::session(&files, plan, &flags.engine, 256).unwrap();
        Chat {
            runtime: Runtime::new(session, sampler),
            template: files.chat_template(&tokenizer).unwrap(),
            stop_ids: tokenizer.end_ids().to_vec(),
            tokenizer,
            stop_strings: Vec::new(),
            max_tokens: 12,
            speculate: None,
            messages: Vec::new(),
        }
    }

    #[derive(Parser)]
    struct TestFlags {
        #[command(flatten)]
        flags: ReportFlags,
    }

    /// The roles of what was said.
    fn roles(chat: &Chat) -> Vec<Role> {
        chat.messages.iter().map(|message| message.role).collect()
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
        // All that the first turn left in the cache.
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
        let before = chat.messages.clone();
        let stats = chat.speak("Tell me a story.".into(), || true).unwrap();
        assert_eq!((stats.n_generated, stats.stop), (0, None));
        assert_eq!(chat.messages, before);
        // Asked before the prompt, and after it and each of three tokens.
        let polls = Cell::new(0);
        let stop = || polls.replace(polls.get() + 1) == 4;
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
        assert_eq!(chat.messages, [Message::system("Be brief.")]);
        say(&mut chat, &["What is 3 plus 4?", "/stats"]);
        assert_eq!(roles(&chat), [Role::System, Role::User, Role::Assistant]);
        assert!(chat.runtime.n_cached() > 0);
        say(&mut chat, &["/reset"]);
        assert_eq!(roles(&chat), [Role::System]);
        assert_eq!(chat.runtime.n_cached(), 0);
        say(&mut chat, &["/system"]);
        assert_eq!(chat.messages, []);
        assert_eq!(say(&mut chat, &["/exit", "never said"]), 1);
        // Too long for the context: an error, and the chat goes on without it.
        let long = "and then ".repeat(400);
        say(&mut chat, &[&long, "What is 3 plus 4?"]);
        assert_eq!(roles(&chat), [Role::User, Role::Assistant]);
    }

    #[test]
    fn the_oldest_turns_are_forgotten_first() {
        let (system, user, assistant) = (Role::System, Role::User, Role::Assistant);
        let mut messages: Vec<_> = [
            (system, "s"),
            (user, "1"),
            (assistant, "2"),
            (user, "3"),
            (assistant, "4"),
            (user, "5"),
        ]
        .map(|(role, content)| Message::new(role, content))
        .to_vec();
        let left = |messages: &[Message]| {
            messages
                .iter()
                .map(|m| m.content.clone())
                .collect::<String>()
        };
        assert!(forget_oldest(&mut messages));
        assert_eq!(left(&messages), "s345");
        assert!(forget_oldest(&mut messages));
        assert_eq!(left(&messages), "s5");
        assert!(!forget_oldest(&mut messages));
        assert_eq!(left(&messages), "s5");
    }
}
