//! How a template wants calls of earlier turns.

use std::collections::HashMap;

use serde_json::{Value, json};
use sterna_text::{ChatInput, DateTime};

use super::ToolFormat;
use super::marked::ID_BEGIN;

/// How past calls are written: by a template, and so by its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct CallStyle {
    /// The format of calls, if it is one that is known.
    pub(crate) format: Option<ToolFormat>,
    /// The template wants arguments as JSON text, not as a mapping.
    pub(super) text_arguments: bool,
    /// The template writes calls of messages that have no content, not even an empty one.
    pub(super) no_content: bool,
    /// The template writes ids of calls, by which the model knows what was called (Kimi K2).
    pub(super) ids: bool,
}

/// What is before tools in the prompt of an LFM2.
const TOOL_LIST: &str = "<|tool_list_start|>";

/// The name of the function in a call that is rendered to see how that is done.
pub(super) const PROBE: &str = "probe_call";

impl CallStyle {
    /// How `render` writes a call of an earlier turn.
    pub(crate) fn probe(render: impl Fn(&ChatInput) -> Option<String>) -> CallStyle {
        let call = json!({"id": "abcdefghi", "type": "function", "function": {
            "name": PROBE, "arguments": {"probe_key": 1},
        }});
        let tool = json!({"type": "function", "function": {
            "name": "probe_tool", "description": "", "parameters": {"type": "object", "properties": {}},
        }});
        let messages = [
            json!({"role": "user", "content": "x"}),
            json!({"role": "assistant", "content": "", "tool_calls": [call]}),
            json!({"role": "tool", "name": PROBE, "tool_call_id": "abcdefghi", "content": "1"}),
        ];
        let mut tells_list = false;
        let style = |text_arguments, no_content, ids| CallStyle {
            format: None,
            text_arguments,
            no_content,
            ids,
        };
        let styles = [
            style(false, false, false),
            style(false, true, false),
            style(true, false, false),
            style(true, true, false),
            style(false, false, true),
        ];
        let mut found = None;
        for style in styles {
            // Where calls are written, ids may be what says more of them.
            if found.is_some() && !style.ids {
                continue;
            }
            let mut messages = messages.to_vec();
            style.apply(&mut messages);
            let input = ChatInput {
                messages,
                tools: Some(vec![tool.clone()]),
                now: Some(DateTime::from_unix(0, 0)),
                ..ChatInput::default()
            };
            let text = render(&input).unwrap_or_default();
            // These templates leave it to the model's answer to have its calls.
            tells_list |= text.contains(TOOL_LIST);
            // A template that wants text writes a mapping as Python does.
            if [PROBE, "probe_key"].iter().all(|word| text.contains(word))
                && !text.contains("{'probe_key'")
            {
                let format = ToolFormat::of(&text);
                let style = CallStyle { format, ..style };
                if format.is_some() {
                    return style;
                }
                found.get_or_insert(style);
            }
        }
        found.unwrap_or(CallStyle {
            format: tells_list.then_some(ToolFormat::Python),
            ..CallStyle::default()
        })
    }

    /// Makes `messages` as the template wants them.
    pub(crate) fn apply(&self, messages: &mut Vec<Value>) {
        // The newest id that a call has for the template, by its own.
        let mut ids: HashMap<String, String> = HashMap::new();
        let mut n_calls = 0;
        for mut message in std::mem::take(messages) {
            let id = message.get_mut("tool_call_id").filter(|_| self.ids);
            if let Some(id) = id
                && let Some(known) = id.as_str().and_then(|id| ids.get(id))
            {
                *id = known.as_str().into();
            }
            let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
            let calls = calls.map(Vec::as_mut_slice).unwrap_or_default();
            let has_calls = !calls.is_empty();
            for call in calls.iter_mut().filter(|_| self.text_arguments) {
                let arguments = &mut call["function"]["arguments"];
                if !arguments.is_string() {
                    *arguments = arguments.to_string().into();
                }
            }
            for call in calls.iter_mut().filter(|_| self.ids) {
                let name = call["function"]["name"].as_str().unwrap_or_default();
                let id = format!("{ID_BEGIN}{name}:{n_calls}");
                n_calls += 1;
                if let Some(own) = call["id"].as_str() {
                    ids.insert(own.to_owned(), id.clone());
                }
                call["id"] = id.into();
            }
            if self.no_content && has_calls {
                // What was said beside them is a message of its own.
                let said = message["content"].take();
                if said.as_str().is_some_and(|said| !said.is_empty()) {
                    messages.push(json!({"role": message["role"], "content": said}));
                }
            }
            messages.push(message);
        }
    }
}
