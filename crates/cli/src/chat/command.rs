//! What the user of a chat types: messages and commands.

use std::fmt;

use anyhow::Result;

use super::input::Message;

pub(super) const HELP: &str = "\
/help             show this
/regenerate       answer the last message again
/reset            forget everything said
/system [TEXT]    set the instructions that precede the chat, or remove them
/set [NAME VALUE] change a setting such as temperature, or show all
/save FILE        write the conversation to a file, and what was computed for it beside it
/load FILE        continue a conversation that was saved
/swap MODEL [GROUP...]  replace weights by those of another revision: the named groups, or all that differ
/stats            show what the last answer took, and how full the context is
/exit             leave, as /quit, /bye and Ctrl-D do
A line that ends with \\ goes on in the next; \"\"\" begins and ends a message of several lines.
Ctrl-C stops an answer.";

/// A message, or what is to be done.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Command {
    Say(String),
    Help,
    Regenerate,
    Reset,
    System(String),
    /// A setting and its value; none to show all.
    Set(Option<(String, String)>),
    Save(String),
    Load(String),
    /// A model, and the groups to take from it; none for all that differ.
    Swap(String, Vec<String>),
    Stats,
    Exit,
}

/// A line that looks like a command and isn't one.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoCommand {
    Unknown(String),
    /// A command, and what it lacks.
    Lacks(&'static str, &'static str),
    /// A command that stands alone, and what follows it.
    Followed(String, String),
}

impl fmt::Display for NoCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoCommand::Unknown(name) => {
                write!(f, "There is no command `{name}`; /help lists all.")
            }
            NoCommand::Lacks(command, what) => write!(f, "{command}: expected {what}."),
            NoCommand::Followed(command, rest) => {
                write!(f, "{command}: expected nothing after it, found `{rest}`.")
            }
        }
    }
}

impl Command {
    pub(super) fn parse(message: Message) -> Result<Command, NoCommand> {
        let text = match message {
            Message::Block(text) => return Ok(Command::Say(text)),
            Message::Line(line) => line,
        };
        let line = text.trim();
        if !line.starts_with('/') {
            return Ok(Command::Say(line.to_owned()));
        }
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let file = |command| match rest {
            "" => Err(NoCommand::Lacks(command, "the name of a file")),
            file => Ok(file.to_owned()),
        };
        let alone = |command| match rest {
            "" => Ok(command),
            rest => Err(NoCommand::Followed(name.to_owned(), rest.to_owned())),
        };
        match name {
            "/help" | "/?" => alone(Command::Help),
            "/regenerate" => alone(Command::Regenerate),
            "/reset" => alone(Command::Reset),
            "/system" => Ok(Command::System(rest.to_owned())),
            "/set" if rest.is_empty() => Ok(Command::Set(None)),
            "/set" => match rest.split_once(char::is_whitespace) {
                Some((name, value)) => Ok(Command::Set(Some((
                    name.to_owned(),
                    value.trim().to_owned(),
                )))),
                None => Err(NoCommand::Lacks("/set", "a name and a value")),
            },
            "/save" => Ok(Command::Save(file("/save")?)),
            "/load" => Ok(Command::Load(file("/load")?)),
            "/swap" => {
                let mut words = rest.split_whitespace().map(str::to_owned);
                let model = words.next();
                let model = model.ok_or(NoCommand::Lacks("/swap", "a model"))?;
                Ok(Command::Swap(model, words.collect()))
            }
            "/stats" => alone(Command::Stats),
            "/exit" | "/quit" | "/bye" => alone(Command::Exit),
            // Pasted text that begins with a path.
            _ if line.contains('\n') => Ok(Command::Say(line.to_owned())),
            _ => Err(NoCommand::Unknown(name.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_said_unless_they_are_commands() {
        let set = |name: &str, value: &str| Command::Set(Some((name.into(), value.into())));
        for (line, expected) in [
            ("  Hello / there ", Ok(Command::Say("Hello / there".into()))),
            ("/help", Ok(Command::Help)),
            (
                "/system  Be brief. ",
                Ok(Command::System("Be brief.".into())),
            ),
            ("/system", Ok(Command::System(String::new()))),
            ("/regenerate", Ok(Command::Regenerate)),
            ("/set", Ok(Command::Set(None))),
            ("/set top-k  4 ", Ok(set("top-k", "4"))),
            (
                "/set seed",
                Err(NoCommand::Lacks("/set", "a name and a value")),
            ),
            ("/save a file.json", Ok(Command::Save("a file.json".into()))),
            (
                "/load",
                Err(NoCommand::Lacks("/load", "the name of a file")),
            ),
            (
                "/swap new layer.3 head",
                Ok(Command::Swap(
                    "new".into(),
                    vec!["layer.3".into(), "head".into()],
                )),
            ),
            ("/swap", Err(NoCommand::Lacks("/swap", "a model"))),
            ("/exit", Ok(Command::Exit)),
            ("/quit", Ok(Command::Exit)),
            ("/bye", Ok(Command::Exit)),
            (
                "/quit  now ",
                Err(NoCommand::Followed("/quit".into(), "now".into())),
            ),
            (
                "/reset all",
                Err(NoCommand::Followed("/reset".into(), "all".into())),
            ),
            ("/halp me", Err(NoCommand::Unknown("/halp".into()))),
            ("/bin/sh\nexit", Ok(Command::Say("/bin/sh\nexit".into()))),
        ] {
            assert_eq!(
                Command::parse(Message::Line(line.into())),
                expected,
                "{line}"
            );
        }
        let block = Command::parse(Message::Block("/help".into()));
        assert_eq!(block, Ok(Command::Say("/help".into())));
    }
}
