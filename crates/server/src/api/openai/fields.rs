//! What requests of OpenAI's dialect may have in common.

use super::super::shape::{Field, OBJECT, SAID, Shape, TEXT, field, items, required, some, word};
use super::{MAX_CHOICES, MAX_STOPS, MAX_TOP};

const ANY_NUMBER: Shape = Shape::Number(f32::MIN, f32::MAX);
const POSITIVE: Shape = Shape::Number(f32::MIN_POSITIVE, f32::MAX);
pub(crate) const TEMPERATURE: Shape = Shape::Number(0.0, f32::MAX);
pub(crate) const SHARE: Shape = Shape::Number(0.0, 1.0);
/// -1 keeps all, for some clients.
pub(crate) const TOP_K: Shape = Shape::Whole(-1, u64::MAX);
pub(crate) const SEED: Shape = Shape::Whole(i64::MIN, u64::MAX);

/// How tokens are sampled.
pub(crate) const SAMPLING: &[Field] = &[
    field("temperature", TEMPERATURE),
    field("top_p", SHARE),
    field("top_k", TOP_K),
    field("min_p", SHARE),
    field("frequency_penalty", ANY_NUMBER),
    field("presence_penalty", ANY_NUMBER),
    field("repetition_penalty", POSITIVE),
    field("repeat_penalty", POSITIVE),
    field("logit_bias", Shape::ById(&Shape::Number(-100.0, 100.0))),
    field("seed", SEED),
];

/// Text that ends the answer.
pub(crate) const STOPS: Shape = Shape::OneOf(&[SAID, Shape::Items(&SAID, "texts", 0, MAX_STOPS)]);

/// What chats and completions may ask of their answers.
pub(crate) const ANSWERS: &[Field] = &[
    field("n", Shape::Whole(1, MAX_CHOICES as u64)),
    field("stop", STOPS),
    field("stop_token_ids", IDS),
    field("ignore_eos", Shape::Flag),
    field("receipt", Shape::Flag),
    field("stream", Shape::Flag),
    field(
        "stream_options",
        Shape::Object(&[&[field("include_usage", Shape::Flag)]]),
    ),
    field("top_logprobs", Shape::Whole(0, MAX_TOP as u64)),
];

/// What the answer has to match, in the ways of several servers.
pub(crate) const GRAMMARS: &[Field] = &[
    field(
        "response_format",
        Shape::OneOf(&[
            Shape::Object(&[&[required("type", word(&["text"]))]]),
            Shape::Object(&[&[
                required("type", word(&["json_object"])),
                field("schema", Shape::Schema),
            ]]),
            Shape::Object(&[&[
                required("type", word(&["json_schema"])),
                required("json_schema", NAMED_SCHEMA),
            ]]),
            Shape::Object(&[&[
                required("type", word(FORMATS)),
                required("schema", Shape::Schema),
            ]]),
        ]),
    ),
    field(
        "structured_outputs",
        Shape::Object(&[&[
            field("json", Shape::Schema),
            field("json_object", Shape::Flag),
            field("regex", TEXT),
            field("choice", CHOICES),
            field("grammar", TEXT),
        ]]),
    ),
    field("guided_choice", CHOICES),
    field("guided_json", Shape::Schema),
    field("json_schema", Shape::Schema),
    field("guided_regex", TEXT),
    field("regex", TEXT),
    field("guided_grammar", TEXT),
    field("grammar", TEXT),
];

/// Texts of which the answer is one.
const CHOICES: Shape = Shape::Items(&TEXT, "texts", 1, 1024);

/// What an answer may be.
pub(crate) const FORMATS: &[&str] = &["text", "json_object", "json_schema"];
const NAMED_SCHEMA: Shape = Shape::Object(&[&[required("schema", Shape::Schema)]]);

const FUNCTION: &[Field] = &[
    required("name", Shape::Name),
    field("description", TEXT),
    field("parameters", OBJECT),
    field("strict", Shape::Flag),
];

/// Functions, told of in an object of their own, as chats do, or not, as responses do.
const TOOL: Shape = Shape::OneOf(&[
    Shape::Object(&[&[
        field("type", word(&["function"])),
        required("function", Shape::Object(&[FUNCTION])),
    ]]),
    Shape::Object(&[&[field("type", word(&["function"]))], FUNCTION]),
    Shape::Object(&[&[required("type", Shape::OtherThan(&["function"]))]]),
]);

/// Functions that may be called, and how. Tools of other kinds are left out.
pub(crate) const TOOLS: &[Field] = &[
    field("tools", items(&TOOL, "tools")),
    field(
        "tool_choice",
        Shape::OneOf(&[
            Shape::Word(
                &["none", "auto", "required", "any"],
                ", or the name of a function",
            ),
            Shape::Object(&[&[
                required("type", word(&["allowed_tools"])),
                field("mode", word(&["none", "auto", "required"])),
            ]]),
            Shape::Object(&[&[
                required("type", word(&["function"])),
                required(
                    "function",
                    Shape::Object(&[&[required("name", Shape::Name)]]),
                ),
            ]]),
            Shape::Object(&[&[
                required("type", word(&["function"])),
                required("name", Shape::Name),
            ]]),
        ]),
    ),
    field("parallel_tool_calls", Shape::Flag),
];

/// What templates are told beside the conversation.
pub(crate) const TEMPLATE: &[Field] = &[
    field(
        "chat_template_kwargs",
        Shape::Object(&[&[field("enable_thinking", Shape::Flag)]]),
    ),
    field("reasoning_effort", TEXT),
    field("thinking_token_budget", Shape::Whole(0, u64::MAX)),
    field(
        "reasoning",
        Shape::Object(&[&[
            field("effort", TEXT),
            field("summary", Shape::Any),
            field("max_tokens", Shape::Whole(0, u64::MAX)),
        ]]),
    ),
];

/// Parts of a message's content.
const PART: Shape = Shape::OneOf(&[
    Shape::Object(&[&[
        field(
            "type",
            Shape::Word(
                &["text", "input_text", "output_text"],
                ", which is all that models read",
            ),
        ),
        required("text", TEXT),
    ]]),
    Shape::Object(&[&[
        required("type", word(&["refusal"])),
        required("refusal", TEXT),
    ]]),
]);

/// What is said in a message: text, or its parts.
pub(crate) const CONTENT: Shape = Shape::OneOf(&[TEXT, items(&PART, "parts")]);

const CALL: Shape = Shape::Object(&[&[
    field("id", TEXT),
    required(
        "function",
        Shape::Object(&[&[required("name", TEXT), field("arguments", Shape::Any)]]),
    ),
]]);

const MESSAGE_FIELDS: &[Field] = &[
    field("reasoning", Shape::Any),
    field("reasoning_content", Shape::Any),
    field("tool_calls", items(&CALL, "calls")),
    field("tool_call_id", TEXT),
    field("name", TEXT),
];

const MESSAGE: Shape = Shape::OneOf(&[
    Shape::Object(&[
        &[
            required("role", word(&["assistant"])),
            field("content", CONTENT),
        ],
        MESSAGE_FIELDS,
    ]),
    Shape::Object(&[
        &[required("role", word(ROLES)), required("content", CONTENT)],
        MESSAGE_FIELDS,
    ]),
]);

/// Who speaks. What developers say is what systems said once.
const ROLES: &[&str] = &[
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
];

/// A conversation.
pub(crate) const MESSAGES: Field = required("messages", some(&MESSAGE, "messages"));

pub(crate) const IDS: Shape = items(&Shape::Id, "ids");

/// Texts, or texts as tokens.
pub(crate) const INPUTS: Shape = Shape::OneOf(&[
    TEXT,
    items(&TEXT, "texts"),
    IDS,
    items(&IDS, "arrays of ids"),
]);
