//! Errors, in the shape of each dialect.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use sterna::ErrorCode;
use sterna_engine::sampling::SamplerError;

use crate::answer::Unprepared;
use crate::engine::Refused;

/// Whose shape errors have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    OpenAi,
    Anthropic,
}

/// Why a request isn't answered.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    message: String,
    /// The field that is wrong.
    param: Option<String>,
    /// What programs tell it by.
    code: Option<&'static str>,
    retry_after: Option<Duration>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError {
            status,
            message: message.into(),
            param: None,
            code: None,
            retry_after: None,
        }
    }

    /// A request that can't be answered as it is.
    pub(crate) fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }

    /// The same error, of the field at `path`.
    pub(crate) fn at(mut self, path: &str) -> ApiError {
        self.param = Some(path.to_owned());
        self
    }

    /// The same error, with a code.
    pub(crate) fn with_code(mut self, code: &'static str) -> ApiError {
        self.code = Some(code);
        self
    }

    /// The same error, which is none after so long.
    pub(crate) fn retry_after(mut self, wait: Duration) -> ApiError {
        self.retry_after = Some(wait);
        self
    }

    #[cfg(test)]
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// What kind of error it is, in the words of OpenAI.
    fn openai_type(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// In those of Anthropic.
    fn anthropic_type(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        }
    }

    /// The error as JSON.
    pub(crate) fn body(&self, dialect: Dialect) -> Value {
        match dialect {
            Dialect::OpenAi => json!({"error": {
                "message": self.message,
                "type": self.openai_type(),
                "param": self.param,
                "code": self.code,
            }}),
            Dialect::Anthropic => json!({"type": "error", "error": {
                "type": self.anthropic_type(),
                "message": self.message,
            }}),
        }
    }

    /// The code and message of an error within the Responses API.
    pub(crate) fn response_error(&self) -> Value {
        json!({"code": self.code.unwrap_or(self.openai_type()), "message": self.message})
    }

    /// The response.
    pub(crate) fn respond(self, dialect: Dialect) -> Response {
        let mut response = (self.status, Json(self.body(dialect))).into_response();
        if let Some(wait) = self.retry_after {
            let seconds = HeaderValue::from((wait.as_secs_f64().ceil() as u64).max(1));
            response.headers_mut().insert(header::RETRY_AFTER, seconds);
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}

impl From<sterna::Error> for ApiError {
    fn from(error: sterna::Error) -> ApiError {
        let status = match error.code() {
            ErrorCode::InvalidRequest | ErrorCode::ContextFull | ErrorCode::Unsupported => {
                StatusCode::BAD_REQUEST
            }
            ErrorCode::NotFound => StatusCode::NOT_FOUND,
            ErrorCode::OutOfMemory | ErrorCode::DeviceLost => StatusCode::SERVICE_UNAVAILABLE,
            // What templates refuse, and what they can't do, is about the messages.
            ErrorCode::InvalidFile if error.find::<sterna_text::TemplateError>().is_some() => {
                StatusCode::BAD_REQUEST
            }
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let mut found =
            ApiError::new(status, format!("{error:#}")).with_code(error.code().as_str());
        match error.find::<SamplerError>() {
            Some(SamplerError::OutOfRange { name, .. }) => found.param = Some((*name).to_owned()),
            Some(SamplerError::UnknownToken { .. }) => found.param = Some("logit_bias".to_owned()),
            _ => {}
        }
        if error.find::<sterna_text::TemplateError>().is_some() {
            found.status = StatusCode::BAD_REQUEST;
            found.param = Some("messages".to_owned());
        }
        found
    }
}

impl From<Unprepared> for ApiError {
    fn from(unprepared: Unprepared) -> ApiError {
        match unprepared {
            Unprepared::Error(error) => error.into(),
            Unprepared::Grammar { at, error } => {
                let found = ApiError::from(error);
                ApiError {
                    message: format!("{at}: {}", found.message),
                    ..found
                }
                .at(&at)
            }
            Unprepared::TooLong { n_prompt, ctx_len } => ApiError::invalid(format!(
                "This model's maximum context length is {ctx_len} tokens. However, your prompt has {n_prompt} tokens, \
                 which leaves no room for an answer."
            ))
            .at("messages")
            .with_code("context_length_exceeded"),
        }
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> ApiError {
        match refused {
            Refused::Full { retry_after } => ApiError {
                retry_after: Some(retry_after),
                ..ApiError::new(
                    StatusCode::TOO_MANY_REQUESTS,
                    "the queue is full; try again later",
                )
                .with_code("queue_full")
            },
            Refused::TooMany { limit } => ApiError::invalid(format!(
                "expected at most {limit} answers at once (n of each prompt; --parallel and --queue), found more"
            )),
            Refused::Stopped => ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "no engine is left; the log says why",
            ),
        }
    }
}
