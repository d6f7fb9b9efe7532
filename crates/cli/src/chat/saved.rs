//! Conversations in files.
//!
//! A file has the messages, and fits every model, device and data type of a cache. Beside it lies what was computed
//! for them, which fits only those that it was computed with: elsewhere it is computed again.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use sterna::conversation::{Message, Role};
use sterna::native::Device;
use sterna::sequence::{Sequence, is_saved};
use sterna_delivery::PartialFile;

use crate::verbs::read_text;

/// The version of the form of the file.
const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    sterna_conversation: u32,
    /// What the model was called.
    model: String,
    messages: Vec<SavedMessage>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedMessage {
    role: String,
    content: String,
}

/// Writes `messages`, of a conversation with `model`, to `file`, which only this user may read. A file that
/// is no conversation is not replaced.
pub(super) fn save(file: &Path, model: &str, messages: &[Message]) -> Result<()> {
    let name = file.display();
    if file.exists() {
        read(file).context("not replaced")?;
    }
    let saved = Saved {
        sterna_conversation: VERSION,
        model: model.to_owned(),
        messages: (messages.iter())
            .map(|message| SavedMessage {
                role: message.role.as_str().to_owned(),
                content: message.content.clone(),
            })
            .collect(),
    };
    let mut text = serde_json::to_string_pretty(&saved)?;
    text.push('\n');
    let written = PartialFile::create_private(file).and_then(|mut to| {
        to.write_all(text.as_bytes())?;
        to.finish()
    });
    written.with_context(|| format!("{name}: cannot write"))
}

/// The model and the messages of the conversation in `file`.
pub(super) fn load(file: &Path) -> Result<(String, Vec<Message>)> {
    let saved = read(file)?;
    let messages = saved.messages.into_iter().enumerate();
    let messages = messages.map(|(i, message)| {
        let roles = [Role::System, Role::User, Role::Assistant];
        let role = roles.into_iter().find(|role| role.as_str() == message.role);
        match role.filter(|&role| role != Role::System || i == 0) {
            Some(role) => Ok(Message::new(role, message.content)),
            None => bail!(
                "{}: message {}: expected the role user or assistant (or system, of the first), found `{}`",
                file.display(),
                i + 1,
                message.role
            ),
        }
    });
    let messages: Vec<Message> = messages.collect::<Result<_>>()?;
    if (messages.last()).is_some_and(|message| message.role == Role::User) {
        bail!(
            "{}: expected an answer as the last message, found one of the user",
            file.display()
        );
    }
    Ok((saved.model, messages))
}

/// Where the cache of the conversation in `file` is.
pub(super) fn cache_of(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".cache");
    name.into()
}

/// Writes what `sequence` holds beside `file`; returns the bytes.
pub(super) fn save_cache(file: &Path, sequence: &mut Sequence<Device>) -> Result<u64> {
    let path = cache_of(file);
    if let Ok(old) = File::open(&path) {
        let mut start = Vec::new();
        old.take(64)
            .read_to_end(&mut start)
            .with_context(|| path.display().to_string())?;
        if !is_saved(&start) {
            let path = path.display();
            bail!(
                "{path}: expected what was computed for a conversation, found another file; not replaced"
            );
        }
    }
    let name = || format!("{}: cannot write", path.display());
    let mut to = BufWriter::with_capacity(
        1 << 20,
        PartialFile::create_private(&path).with_context(name)?,
    );
    sequence.save(&mut to).with_context(name)?;
    let to = to.into_inner().map_err(|error| error.into_error());
    to.and_then(PartialFile::finish).with_context(name)?;
    Ok(path.metadata().with_context(name)?.len())
}

/// Removes what was computed for an earlier conversation in `file`, if there is something.
pub(super) fn remove_cache(file: &Path) -> Result<()> {
    let path = cache_of(file);
    let mut start = Vec::new();
    let is_ours = match File::open(&path) {
        Ok(old) => old.take(64).read_to_end(&mut start).is_ok() && is_saved(&start),
        Err(_) => false,
    };
    match is_ours {
        true => std::fs::remove_file(&path).with_context(|| path.display().to_string()),
        false => Ok(()),
    }
}

/// Reads it into `sequence`; whether there is a file.
pub(super) fn load_cache(file: &Path, sequence: &mut Sequence<Device>) -> Result<bool> {
    let path = cache_of(file);
    let from = match File::open(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        from => from.with_context(|| format!("{}: cannot read", path.display()))?,
    };
    let mut from = BufReader::with_capacity(1 << 20, from);
    let restored = sequence.restore(&mut from);
    restored.with_context(|| path.display().to_string())?;
    Ok(true)
}

fn read(file: &Path) -> Result<Saved> {
    let name = file.display();
    let saved: Saved = serde_json::from_str(&read_text(file)?)
        .map_err(|_| anyhow!("{name}: expected a saved conversation, found another file"))?;
    match saved.sterna_conversation {
        VERSION => Ok(saved),
        found => bail!("{name}: expected version {VERSION} of a saved conversation, found {found}"),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn what_was_saved_is_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("chat.json");
        let messages = [
            Message::new(Role::System, "Be brief."),
            Message::new(Role::User, "Who \"are\" you?\n"),
            Message::new(Role::Assistant, "ü"),
        ];
        // Twice: a conversation may be replaced.
        let other = dir.path().join("chat.json.partial");
        fs::write(&other, "mine").unwrap();
        for messages in [&messages[..1], &messages] {
            save(&file, "tiny", messages).unwrap();
            assert_eq!(load(&file).unwrap(), ("tiny".to_owned(), messages.to_vec()));
        }
        // Nothing else is touched or left.
        assert_eq!(fs::read_to_string(&other).unwrap(), "mine");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = fs::metadata(&file).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
    }

    #[test]
    fn what_is_no_conversation_is_neither_loaded_nor_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("other.json");
        for (text, message) in [
            ("hello", "expected a saved conversation, found another file"),
            (
                r#"{"sterna_conversation": 2, "model": "", "messages": []}"#,
                "expected version 1 of a saved conversation, found 2",
            ),
        ] {
            fs::write(&file, text).unwrap();
            for error in [load(&file).unwrap_err(), save(&file, "", &[]).unwrap_err()] {
                let error = format!("{error:#}");
                assert_eq!(error.matches(message).count(), 1, "{error}");
            }
            assert_eq!(fs::read_to_string(&file).unwrap(), text);
        }
        for (messages, message) in [
            (
                r#"{"role": "user", "content": "a"}"#,
                "expected an answer as the last message",
            ),
            (
                r#"{"role": "user", "content": "a"}, {"role": "system", "content": "b"}"#,
                "message 2: expected the role user or assistant",
            ),
            (
                r#"{"role": "tool", "content": "b"}"#,
                "(or system, of the first), found `tool`",
            ),
        ] {
            let text =
                format!(r#"{{"sterna_conversation": 1, "model": "", "messages": [{messages}]}}"#);
            fs::write(&file, text).unwrap();
            let error = load(&file).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
