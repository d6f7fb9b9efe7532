//! Messages as they are typed: of one line or several, with a history.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use crate::{folders, output};

/// Begins and ends a message of several lines.
const QUOTES: &str = "\"\"\"";
const PROMPT: &str = "> ";
/// Before lines that continue a message.
const CONTINUED: &str = ". ";

/// What was typed at a prompt.
pub(super) enum Typed {
    Line(String),
    /// Ctrl-C, which drops the line.
    Interrupted,
    /// Ctrl-D.
    End,
}

/// Where lines come from.
pub(super) trait Lines {
    /// The next line, which may have line breaks if it was pasted.
    fn next(&mut self, prompt: &str) -> Result<Typed>;

    /// Adds a message to the history.
    fn remember(&mut self, _message: &str) {}
}

/// A message of the user.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// One line, or several that were pasted or end with backslashes.
    Line(String),
    /// What was between quotes, which is no command.
    Block(String),
}

/// The next message of `lines`; `None` at their end.
pub(super) fn next_message(lines: &mut dyn Lines) -> Result<Option<Message>> {
    'message: loop {
        let mut text = match lines.next(PROMPT)? {
            Typed::Line(line) => line,
            Typed::Interrupted => {
                output::reply("Ctrl-D or /exit leaves.");
                continue;
            }
            Typed::End => return Ok(None),
        };
        let block = text.trim_start().strip_prefix(QUOTES).map(str::to_owned);
        let is_block = block.is_some();
        text = block.unwrap_or(text);
        let text = loop {
            let whole = match is_block {
                true => text.trim_end().strip_suffix(QUOTES),
                false if text.ends_with('\\') => None,
                false => Some(&*text),
            };
            if let Some(whole) = whole {
                break whole.to_owned();
            }
            if !is_block {
                text.pop();
            }
            match lines.next(CONTINUED)? {
                Typed::Line(line) => text = text + "\n" + &line,
                Typed::Interrupted => continue 'message,
                Typed::End => return Ok(None),
            }
        };
        let text = text.trim_matches('\n');
        if text.trim().is_empty() {
            continue;
        }
        lines.remember(text);
        let text = text.to_owned();
        return Ok(Some(match is_block {
            true => Message::Block(text),
            false => Message::Line(text),
        }));
    }
}

/// Maximum number of messages in the history.
const MAX_HISTORY: usize = 1000;
/// Longest message in the history, in bytes.
const MAX_ENTRY_BYTES: usize = 4096;

/// The terminal, with line editing and a history.
pub(super) struct Editor {
    editor: DefaultEditor,
    /// Where the history is kept.
    file: Option<PathBuf>,
}

impl Editor {
    /// The terminal of this process; with the history of earlier chats if that `is_kept`.
    pub(super) fn open(is_kept: bool) -> Result<Editor> {
        let config = rustyline::Config::builder()
            .max_history_size(MAX_HISTORY)
            .and_then(|config| config.history_ignore_dups(true))
            .context("cannot keep a history")?
            .history_ignore_space(true)
            .build();
        let editor = DefaultEditor::with_config(config).context("cannot use the terminal")?;
        let mut editor = Editor { editor, file: None };
        if is_kept && let Err(error) = editor.load() {
            output::note(format_args!("note: the history is not kept: {error:#}"));
        }
        Ok(editor)
    }

    fn load(&mut self) -> Result<()> {
        let file = folders::history()?;
        let name = file.display().to_string();
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        }
        if file.exists() {
            self.editor.load_history(&file).context(name)?;
        } else {
            // For this user alone, which saving sees to.
            self.editor.save_history(&file).context(name)?;
        }
        self.file = Some(file);
        Ok(())
    }
}

impl Lines for Editor {
    fn next(&mut self, prompt: &str) -> Result<Typed> {
        match self.editor.readline(prompt) {
            Ok(line) => Ok(Typed::Line(line)),
            Err(ReadlineError::Interrupted) => Ok(Typed::Interrupted),
            Err(ReadlineError::Eof) => Ok(Typed::End),
            Err(error) => Err(error).context("cannot read from the terminal"),
        }
    }

    fn remember(&mut self, message: &str) {
        if message.len() > MAX_ENTRY_BYTES {
            return;
        }
        // A failure only keeps the message out of the history; not worth ending the chat for.
        if let Ok(true) = self.editor.add_history_entry(message)
            && let Some(file) = &self.file
        {
            let _ = self.editor.append_history(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// Lines, `^C` for Ctrl-C, and what was remembered of them.
    struct Script(VecDeque<&'static str>, Vec<String>);

    impl Lines for Script {
        fn next(&mut self, _prompt: &str) -> Result<Typed> {
            Ok(match self.0.pop_front() {
                None => Typed::End,
                Some("^C") => Typed::Interrupted,
                Some(line) => Typed::Line(line.to_owned()),
            })
        }

        fn remember(&mut self, message: &str) {
            self.1.push(message.to_owned());
        }
    }

    #[test]
    fn messages_may_have_several_lines() {
        let line = |text: &str| Message::Line(text.to_owned());
        let block = |text: &str| Message::Block(text.to_owned());
        for (lines, expected) in [
            (&["one", " ", "two"][..], vec![line("one"), line("two")]),
            (&["one\\", "two\\", "three"], vec![line("one\ntwo\nthree")]),
            (
                &["\"\"\"one", "  two\\", "\"\"\"", "three"],
                vec![block("one\n  two\\"), line("three")],
            ),
            (&["\"\"\"", "/help", "\"\"\""], vec![block("/help")]),
            (&["\"\"\"one\"\"\""], vec![block("one")]),
            (
                &["\"\"\"\nfrom a\npaste\n\"\"\"\n"],
                vec![block("from a\npaste")],
            ),
            (&["pasted \\\ntext"], vec![line("pasted \\\ntext")]),
            (&["\"\"\"dropped", "^C", "^C", "kept"], vec![line("kept")]),
            (&["dropped\\", "^C", "kept"], vec![line("kept")]),
            (
                &["\"\"\"\"\"\"", "kept", "unfinished\\"],
                vec![line("kept")],
            ),
        ] {
            let mut script = Script(lines.iter().copied().collect(), Vec::new());
            let mut found = Vec::new();
            while let Some(message) = next_message(&mut script).unwrap() {
                found.push(message);
            }
            assert_eq!(found, expected, "{lines:?}");
            let texts: Vec<&str> = found
                .iter()
                .map(|(Message::Line(text) | Message::Block(text))| &**text)
                .collect();
            assert_eq!(script.1, texts);
        }
    }
}
