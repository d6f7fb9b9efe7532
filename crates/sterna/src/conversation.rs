//! Conversations, and their prompts.

use std::ops::Range;

use sterna_text::{ChatInput, ChatTemplate, DateTime, Tokenizer};

use crate::error::{Result, bail};

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
    /// Messages that were left out so that it fits.
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
    /// The oldest turns are left out of it if there is no `room` for all of them and an answer; the
    /// conversation keeps them.
    /// Errors: the template can't render this conversation; [`ErrorCode::ContextFull`](crate::ErrorCode) if
    /// the newest turn alone is longer than the context.
    pub fn prompt(
        &self,
        tokenizer: &Tokenizer,
        room: Room,
        now: Option<DateTime>,
    ) -> Result<ChatPrompt> {
        let is_user = |(_, message): &(usize, &Message)| message.role == Role::User;
        let turns = self.messages.iter().enumerate().filter(is_user);
        let turns: Vec<usize> = turns.map(|(index, _)| index).collect();
        // The newest `n_turns`, without the messages from the first turn on to the first of these.
        let render = |n_turns: usize| -> Result<ChatPrompt> {
            let forgotten = match turns.len().checked_sub(n_turns) {
                None | Some(0) => 0..0,
                Some(n) => turns[0]..turns[n],
            };
            Ok(ChatPrompt {
                n_forgotten: forgotten.len(),
                ids: self.render(forgotten, tokenizer, now)?,
            })
        };
        let mut prompt = render(1)?;
        let n_prompt = prompt.ids.len();
        if n_prompt >= room.ctx_len {
            bail!(
                ContextFull,
                "the prompt has {n_prompt} tokens, but the context holds {}",
                room.ctx_len
            );
        }
        // Twice as many as long as they fit, so that what was said long ago costs nothing; then bisection.
        let (mut fits, mut beyond) = (1, None);
        loop {
            let n_turns = beyond.map_or((2 * fits).min(turns.len()), |n| usize::midpoint(fits, n));
            if n_turns <= fits {
                return Ok(prompt);
            }
            let longer = render(n_turns)?;
            let left = room.ctx_len.saturating_sub(longer.ids.len());
            if left > room.max_tokens.min(room.ctx_len / 4) {
                (fits, prompt) = (n_turns, longer);
            } else {
                beyond = Some(n_turns);
            }
        }
    }

    /// The tokens of all messages but those `forgotten`.
    fn render(
        &self,
        forgotten: Range<usize>,
        tokenizer: &Tokenizer,
        now: Option<DateTime>,
    ) -> Result<Vec<u32>> {
        let (before, after) = (
            &self.messages[..forgotten.start],
            &self.messages[forgotten.end..],
        );
        let turns = before.iter().chain(after);
        let turns = turns.map(|message| (message.role.as_str(), message.content.as_str()));
        let input = ChatInput {
            now,
            ..ChatInput::conversation(turns)
        };
        Ok(tokenizer.encode_prompt(&self.template.prompt(&input, tokenizer)?)?)
    }
}

#[cfg(test)]
mod tests {
    use sterna_text::SpecialTokens;

    use super::*;
    use crate::ErrorCode;

    const TOKENIZER: &[u8] = include_bytes!("../models/tiny-tales/tokenizer.json");

    /// A conversation of `n_turns`, the last one not answered.
    fn conversation(n_turns: usize) -> (Conversation, Tokenizer) {
        let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
        let template = ChatTemplate::new(source, &SpecialTokens::default()).unwrap();
        let mut conversation = Conversation::new(template);
        conversation.set_system(Some("s".to_owned()));
        for i in 0..n_turns {
            if i > 0 {
                conversation.answered("no");
            }
            conversation.say(format!("{i} {}", "and ".repeat(i % 3)));
        }
        let tokenizer = Tokenizer::from_hf_json(TOKENIZER, None).unwrap();
        (conversation, tokenizer)
    }

    #[test]
    fn the_oldest_turns_are_left_out_of_the_prompt_alone() {
        for n_turns in [1, 2, 3, 4, 5, 8, 13] {
            let (conversation, tokenizer) = conversation(n_turns);
            let before = conversation.messages().to_vec();
            let prompt = |ctx_len, max_tokens| {
                let room = Room {
                    ctx_len,
                    max_tokens,
                };
                conversation.prompt(&tokenizer, room, None)
            };
            let whole = prompt(1 << 20, 9).unwrap();
            assert_eq!(whole.n_forgotten, 0);
            let mut n_forgotten = 2 * n_turns;
            for ctx_len in 0..whole.ids.len() + 12 {
                let prompt = match prompt(ctx_len, 0) {
                    Ok(prompt) => prompt,
                    Err(error) => {
                        assert_eq!(error.code(), ErrorCode::ContextFull);
                        assert_eq!(n_forgotten, 2 * n_turns, "what is longer fits, {ctx_len}");
                        continue;
                    }
                };
                // As many as fit: with one more token, no fewer.
                assert!(prompt.ids.len() < ctx_len);
                assert!(prompt.n_forgotten <= n_forgotten && prompt.n_forgotten.is_multiple_of(2));
                n_forgotten = prompt.n_forgotten;
                let mut rest = before.clone();
                rest.drain(1..1 + n_forgotten);
                let shorter = Conversation {
                    template: conversation.template.clone(),
                    messages: rest,
                };
                assert_eq!(shorter.render(0..0, &tokenizer, None).unwrap(), prompt.ids);
                if n_forgotten > 0 {
                    let longer = conversation.render(1..n_forgotten - 1, &tokenizer, None);
                    assert!(longer.unwrap().len() >= ctx_len);
                }
            }
            assert_eq!(n_forgotten, 0);
            assert_eq!(conversation.messages(), before);
        }
    }

    #[test]
    fn room_is_left_for_an_answer() {
        let (conversation, tokenizer) = conversation(9);
        let prompt = |ctx_len, max_tokens| {
            let room = Room {
                ctx_len,
                max_tokens,
            };
            conversation.prompt(&tokenizer, room, None).unwrap()
        };
        let ctx_len = prompt(1 << 20, 0).ids.len() + 1;
        assert_eq!(prompt(ctx_len, 0).n_forgotten, 0);
        let short = prompt(ctx_len, 8);
        assert!(short.n_forgotten > 0 && short.ids.len() + 8 < ctx_len);
        // A quarter of the context is enough.
        let long = prompt(ctx_len, usize::MAX);
        assert!(long.ids.len() + ctx_len / 4 < ctx_len);
    }
}
