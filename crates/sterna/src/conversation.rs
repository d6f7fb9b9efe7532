//! Conversations, and their prompts.

use sterna_text::{ChatInput, ChatTemplate, DateTime, Tokenizer};

use crate::error::Result;

/// The role of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// System instructions.
    System,
    /// The user.
    User,
    /// The assistant.
    Assistant,
}

impl Role {
    /// Its name in chat templates.
    pub const fn as_str(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Its role.
    pub role: Role,
    /// Its text.
    pub content: String,
}

impl Message {
    /// `content` with `role`.
    pub fn new(role: Role, content: impl Into<String>) -> Message {
        Message {
            role,
            content: content.into(),
        }
    }
}

/// Limits of a prompt.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// Context size in tokens.
    pub ctx_len: usize,
    /// Maximum tokens of the answer.
    pub max_tokens: usize,
}

/// A prompt of a [`Conversation`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatPrompt {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// Messages that were forgotten so that it fits.
    pub n_forgotten: usize,
}

/// The messages so far, for a model with a chat template.
#[derive(Debug, Clone)]
pub struct Conversation {
    template: ChatTemplate,
    messages: Vec<Message>,
}

impl Conversation {
    /// An empty conversation, rendered by `template`.
    pub fn new(template: ChatTemplate) -> Conversation {
        Conversation {
            template,
            messages: Vec::new(),
        }
    }

    /// The messages so far.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Sets the system instructions, or removes them.
    pub fn set_system(&mut self, instructions: Option<String>) {
        self.messages.retain(|message| message.role != Role::System);
        let instructions = instructions.map(|text| Message::new(Role::System, text));
        self.messages.splice(0..0, instructions);
    }

    /// Forgets all messages; the instructions stay.
    pub fn reset(&mut self) {
        self.messages.retain(|message| message.role == Role::System);
    }

    /// Adds a message of any role, such as one of a stored conversation.
    pub fn push(&mut self, message: Message) {
        self.messages.push(message);
    }

    /// Adds a message of the user.
    pub fn say(&mut self, text: impl Into<String>) {
        self.push(Message::new(Role::User, text));
    }

    /// Adds an answer of the model.
    pub fn answered(&mut self, text: impl Into<String>) {
        self.push(Message::new(Role::Assistant, text));
    }

    /// Removes the newest message if it wasn't answered.
    pub fn unsay(&mut self) {
        self.messages.pop_if(|message| message.role == Role::User);
    }

    /// Removes the user's newest message and what follows it; returns its text.
    pub fn retract(&mut self) -> Option<String> {
        let is_user = |message: &Message| message.role == Role::User;
        let newest = self.messages.iter().rposition(is_user)?;
        self.messages.truncate(newest + 1);
        self.messages.pop().map(|message| message.content)
    }

    /// The prompt to answer, for `tokenizer`'s model; `now` is for templates that ask for the date.
    ///
    /// The oldest turns are forgotten if there is no `room` for all of them and an answer.
    /// Errors: the template can't render this conversation.
    pub fn prompt(
        &mut self,
        tokenizer: &Tokenizer,
        room: Room,
        now: Option<DateTime>,
    ) -> Result<ChatPrompt> {
        let n_messages = self.messages.len();
        loop {
            let ids = self.render(tokenizer, now)?;
            let left = room.ctx_len.saturating_sub(ids.len());
            let is_enough = left > room.max_tokens.min(room.ctx_len / 4);
            if is_enough || !forget_oldest(&mut self.messages) {
                let n_forgotten = n_messages - self.messages.len();
                return Ok(ChatPrompt { ids, n_forgotten });
            }
        }
    }

    fn render(&self, tokenizer: &Tokenizer, now: Option<DateTime>) -> Result<Vec<u32>> {
        let turns = self
            .messages
            .iter()
            .map(|message| (message.role.as_str(), message.content.as_str()));
        let input = ChatInput {
            now,
            ..ChatInput::conversation(turns)
        };
        Ok(tokenizer.encode_prompt(&self.template.prompt(&input, tokenizer)?)?)
    }
}

/// Drops the oldest turn, up to the user's next message; false if only the newest is left.
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

#[cfg(test)]
mod tests {
    use super::*;

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
