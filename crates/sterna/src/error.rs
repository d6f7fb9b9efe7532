//! The one error type of this library: a stable code, and messages from the outermost to the cause.

use std::error::Error as StdError;
use std::fmt;

/// A result of this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an [`Error`]. [`ErrorCode::as_str`] is the same in every version: it is used in HTTP bodies,
/// exit reports and JavaScript.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorCode {
    /// There is no such file, model or device.
    NotFound,
    /// The system could not read or write.
    Io,
    /// A file is invalid or damaged.
    InvalidFile,
    /// The files are valid, but not supported.
    Unsupported,
    /// An invalid request: an option out of range, a prompt without tokens.
    InvalidRequest,
    /// Bytes don't match their hash.
    HashMismatch,
    /// A signature that is wrong or not trusted.
    Untrusted,
    /// More tokens than the context holds.
    ContextFull,
    /// The device was lost.
    DeviceLost,
    /// The backend failed, or gave results that aren't finite.
    Compute,
    /// Out of memory.
    OutOfMemory,
}

impl ErrorCode {
    /// The code as written in HTTP bodies and JavaScript.
    pub const fn as_str(self) -> &'static str {
        match self {
            ErrorCode::NotFound => "not_found",
            ErrorCode::Io => "io",
            ErrorCode::InvalidFile => "invalid_file",
            ErrorCode::Unsupported => "unsupported",
            ErrorCode::InvalidRequest => "invalid_request",
            ErrorCode::HashMismatch => "hash_mismatch",
            ErrorCode::Untrusted => "untrusted",
            ErrorCode::ContextFull => "context_full",
            ErrorCode::DeviceLost => "device_lost",
            ErrorCode::Compute => "compute",
            ErrorCode::OutOfMemory => "out_of_memory",
        }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Why something failed: a code for programs, and for people a message with place, expected and found.
///
/// `{}` is the outermost message, `{:#}` the whole chain down to the cause, separated by colons.
pub struct Error(Box<Inner>);

struct Inner {
    code: ErrorCode,
    kind: Kind,
}

enum Kind {
    Message(String),
    /// Another crate's error, with its message.
    Typed(Box<dyn StdError + Send + Sync>),
    /// An error with context.
    Context {
        message: String,
        cause: Error,
    },
}

impl Error {
    /// An error without a cause.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Error {
        Error::of(code, Kind::Message(message.into()))
    }

    /// Wraps `error` with `code`; [`Error::find`] returns it.
    pub fn typed(code: ErrorCode, error: impl StdError + Send + Sync + 'static) -> Error {
        Error::of(code, Kind::Typed(Box::new(error)))
    }

    /// Adds context: `message` comes first, the code stays.
    #[must_use]
    pub fn context(self, message: impl Into<String>) -> Error {
        let kind = Kind::Context {
            message: message.into(),
            cause: self,
        };
        Error::of(kind.code(), kind)
    }

    fn of(code: ErrorCode, kind: Kind) -> Error {
        Error(Box::new(Inner { code, kind }))
    }

    /// The kind of failure.
    pub fn code(&self) -> ErrorCode {
        self.0.code
    }

    /// Whether it is an error of type `T` itself, not just caused by one.
    pub fn is_from<T: StdError + 'static>(&self) -> bool {
        matches!(&self.0.kind, Kind::Typed(error) if error.is::<T>())
    }

    /// The outermost error of type `T` in the chain.
    pub fn find<T: StdError + 'static>(&self) -> Option<&T> {
        let mut at: Option<&(dyn StdError + 'static)> = match &self.0.kind {
            Kind::Message(_) => None,
            Kind::Typed(error) => Some(&**error),
            Kind::Context { cause, .. } => return cause.find(),
        };
        while let Some(error) = at {
            if let Some(found) = error.downcast_ref::<T>() {
                return Some(found);
            }
            at = error.source();
        }
        None
    }
}

impl Kind {
    fn code(&self) -> ErrorCode {
        match self {
            Kind::Context { cause, .. } => cause.code(),
            Kind::Message(_) | Kind::Typed(_) => ErrorCode::InvalidFile,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.kind {
            Kind::Message(message) | Kind::Context { message, .. } => f.write_str(message)?,
            Kind::Typed(error) => write!(f, "{error}")?,
        }
        if f.alternate() {
            let mut at = self.source();
            while let Some(error) = at {
                write!(f, ": {error}")?;
                at = error.source();
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}] {self:#}", self.0.code)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match &self.0.kind {
            Kind::Message(_) => None,
            Kind::Typed(error) => error.source(),
            Kind::Context { cause, .. } => Some(cause),
        }
    }
}

/// Adds context to errors, in this library and the crates that share its errors.
#[doc(hidden)]
pub trait Context<T> {
    /// Prepends `message` to an error.
    fn context(self, message: impl Into<String>) -> Result<T>;
    /// The same; `message` is only computed for an error.
    fn with_context<M: Into<String>>(self, message: impl FnOnce() -> M) -> Result<T>;
}

impl<T, E: Into<Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, message: impl Into<String>) -> Result<T> {
        self.map_err(|error| error.into().context(message))
    }

    fn with_context<M: Into<String>>(self, message: impl FnOnce() -> M) -> Result<T> {
        self.map_err(|error| error.into().context(message()))
    }
}

/// An error for something missing from a file.
impl<T> Context<T> for Option<T> {
    fn context(self, message: impl Into<String>) -> Result<T> {
        self.ok_or_else(|| Error::new(ErrorCode::InvalidFile, message))
    }

    fn with_context<M: Into<String>>(self, message: impl FnOnce() -> M) -> Result<T> {
        self.ok_or_else(|| Error::new(ErrorCode::InvalidFile, message()))
    }
}

/// Returns an [`Error`] with the [`ErrorCode`] and the message given.
#[doc(hidden)]
#[macro_export]
macro_rules! bail {
    ($code:ident, $($message:tt)+) => {
        return Err($crate::Error::new($crate::ErrorCode::$code, format!($($message)+)))
    };
}
pub(crate) use bail;

/// The code of each error of other crates.
macro_rules! codes {
    ($($error:ty => $code:expr;)+) => {
        $(impl From<$error> for Error {
            fn from(error: $error) -> Error {
                let code: fn(&$error) -> ErrorCode = $code;
                Error::typed(code(&error), error)
            }
        })+
    };
}

codes! {
    sterna_delivery::hash::Mismatch => |_| ErrorCode::HashMismatch;
    sterna_engine::lora::AdapterError => |_| ErrorCode::InvalidFile;
    sterna_engine::EngineError => engine_code;
    sterna_engine::session::SaveError => save_code;
    sterna_engine::LoadError => load_code;
    sterna_engine::PlanError => |_| ErrorCode::Unsupported;
    sterna_engine::sampling::SamplerError => |_| ErrorCode::InvalidRequest;
    sterna_engine::swap::SwapError => swap_code;
    sterna_format::bundle::BundleError => |_| ErrorCode::InvalidFile;
    sterna_format::gguf::GgufError => |_| ErrorCode::InvalidFile;
    sterna_format::UnknownI2sLayout => |_| ErrorCode::InvalidFile;
    sterna_format::hf::AdapterNameError => |_| ErrorCode::InvalidFile;
    sterna_format::hf::ConfigError => |_| ErrorCode::InvalidFile;
    sterna_format::rdrr::Problems => |_| ErrorCode::InvalidFile;
    sterna_format::safetensors::SafeTensorsError => |_| ErrorCode::InvalidFile;
    sterna_kernels::quant::QuantError => |_| ErrorCode::InvalidFile;
    sterna_text::TemplateError => template_code;
    sterna_text::TokenizerError => |_| ErrorCode::InvalidFile;
    serde_json::Error => |_| ErrorCode::InvalidFile;
    std::io::Error => io_code;
    std::collections::TryReserveError => |_| ErrorCode::OutOfMemory;
    std::str::Utf8Error => |_| ErrorCode::InvalidFile;
}

#[cfg(all(feature = "native", not(target_family = "wasm")))]
codes! {
    sterna_delivery::LocalFileError => local_code;
    sterna_delivery::pull::PullError => pull_code;
}

#[cfg(all(feature = "native", not(target_family = "wasm")))]
fn pull_code(error: &sterna_delivery::pull::PullError) -> ErrorCode {
    use sterna_delivery::package::PackageError;
    use sterna_delivery::pull::PullError;
    use sterna_delivery::store::StoreError;
    match error {
        error if error.signature_error().is_some() => ErrorCode::Untrusted,
        PullError::NotFetched { source, .. } => pull_code(source),
        PullError::NoPackage { reasons } => {
            let first = reasons.first();
            first.map_or(ErrorCode::NotFound, |(_, error)| pull_code(error))
        }
        PullError::NoManifest { .. } => ErrorCode::NotFound,
        PullError::Folder { source, .. } => io_code(source),
        PullError::Mismatch { .. }
        | PullError::Package(PackageError::Mismatch { .. })
        | PullError::Store(StoreError::Mismatch { .. }) => ErrorCode::HashMismatch,
        PullError::Package(
            PackageError::NotSigned { .. } | PackageError::SignatureNotText { .. },
        ) => ErrorCode::Untrusted,
        PullError::Package(_) | PullError::Gguf(_) => ErrorCode::InvalidFile,
        PullError::NoSource
        | PullError::NotAFolder { .. }
        | PullError::NoName { .. }
        | PullError::NameInUse { .. }
        | PullError::NameTaken { .. }
        | PullError::Mirrors { .. }
        | PullError::Choice { .. }
        | PullError::Url(_) => ErrorCode::InvalidRequest,
        _ => ErrorCode::Io,
    }
}

#[cfg(all(feature = "native", not(target_family = "wasm")))]
fn local_code(error: &sterna_delivery::LocalFileError) -> ErrorCode {
    use sterna_delivery::LocalFileError;
    match error {
        LocalFileError::Open { source, .. } => io_code(source),
        LocalFileError::OutOfBounds { .. } => ErrorCode::InvalidFile,
        _ => ErrorCode::Io,
    }
}

#[cfg(feature = "constraint")]
codes! {
    sterna_constraint::ConstraintError => |_| ErrorCode::InvalidRequest;
}

#[cfg(feature = "gpu")]
codes! {
    sterna_gpu::GpuError => gpu_code;
}

#[cfg(feature = "gpu")]
fn gpu_code(error: &sterna_gpu::GpuError) -> ErrorCode {
    match error {
        sterna_gpu::GpuError::NoAdapter { .. } => ErrorCode::NotFound,
        sterna_gpu::GpuError::OutOfMemory { .. } => ErrorCode::OutOfMemory,
        error if error.is_lost() => ErrorCode::DeviceLost,
        _ => ErrorCode::Compute,
    }
}

fn io_code(error: &std::io::Error) -> ErrorCode {
    match error.kind() {
        std::io::ErrorKind::NotFound => ErrorCode::NotFound,
        _ => ErrorCode::Io,
    }
}

fn load_code(error: &sterna_engine::LoadError) -> ErrorCode {
    use sterna_engine::LoadError;
    match error {
        LoadError::Backend(error) => backend_code(error),
        _ => ErrorCode::InvalidFile,
    }
}

fn swap_code(error: &sterna_engine::swap::SwapError) -> ErrorCode {
    use sterna_engine::swap::SwapError;
    match error {
        SwapError::Load(error) => load_code(error),
        _ => ErrorCode::InvalidRequest,
    }
}

fn engine_code(error: &sterna_engine::EngineError) -> ErrorCode {
    use sterna_engine::EngineError;
    match error {
        EngineError::ContextFull { .. } => ErrorCode::ContextFull,
        EngineError::Backend(error) => backend_code(error),
        _ => ErrorCode::InvalidRequest,
    }
}

fn save_code(error: &sterna_engine::session::SaveError) -> ErrorCode {
    use sterna_engine::backend::SnapshotError;
    use sterna_engine::session::SaveError;
    match error {
        SaveError::Engine(error) => engine_code(error),
        SaveError::Snapshot(SnapshotError::Io(error)) => io_code(error),
        SaveError::Snapshot(SnapshotError::Backend(error)) => backend_code(error),
        _ => ErrorCode::InvalidFile,
    }
}

fn backend_code(error: &sterna_engine::BackendError) -> ErrorCode {
    match error {
        error if error.is_lost() => ErrorCode::DeviceLost,
        error if error.is_out_of_memory() => ErrorCode::OutOfMemory,
        _ => ErrorCode::Compute,
    }
}

/// Of the template's own refusals, the conversation is to blame.
fn template_code(error: &sterna_text::TemplateError) -> ErrorCode {
    use sterna_text::TemplateError;
    match error {
        TemplateError::Raised(_) | TemplateError::ConversationTooLarge { .. } => {
            ErrorCode::InvalidRequest
        }
        _ => ErrorCode::InvalidFile,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_chain_and_the_code_of_the_cause_stays() {
        let parsed: Result<u8, _> = serde_json::from_str("x");
        let error = parsed.context("config.json").unwrap_err().context("model");
        assert_eq!(error.code(), ErrorCode::InvalidFile);
        assert_eq!(error.to_string(), "model");
        assert_eq!(
            format!("{error:#}"),
            "model: config.json: expected value at line 1 column 1"
        );
        assert!(error.find::<serde_json::Error>().is_some());
        assert!(error.find::<std::str::Utf8Error>().is_none());
    }

    #[test]
    fn codes_say_whose_fault_it_is() {
        use sterna_engine::backend::{DeviceError, DeviceErrorKind};
        use sterna_engine::{BackendError, EngineError, LoadError};
        use sterna_text::TemplateError;

        for (kind, code) in [
            (DeviceErrorKind::Lost, ErrorCode::DeviceLost),
            (DeviceErrorKind::OutOfMemory, ErrorCode::OutOfMemory),
            (DeviceErrorKind::Other, ErrorCode::Compute),
        ] {
            let error = || BackendError::Device(DeviceError::new(kind, "driver"));
            assert_eq!(Error::from(EngineError::Backend(error())).code(), code);
            assert_eq!(Error::from(LoadError::Backend(error())).code(), code);
        }
        let (len, limit) = (2, 1);
        for (error, code) in [
            (
                TemplateError::Raised("no".into()),
                ErrorCode::InvalidRequest,
            ),
            (
                TemplateError::ConversationTooLarge { len, limit },
                ErrorCode::InvalidRequest,
            ),
            (
                TemplateError::TooLarge { len, limit },
                ErrorCode::InvalidFile,
            ),
        ] {
            assert_eq!(Error::from(error).code(), code);
        }
    }

    #[test]
    #[cfg(all(feature = "native", not(target_family = "wasm")))]
    fn codes_of_fetching_are_those_of_the_cause() {
        use std::io;

        use sterna_delivery::hash::{Algorithm, Expected};
        use sterna_delivery::package::PackageError;
        use sterna_delivery::pull::PullError;

        let from = || "here".to_owned();
        let expected = Expected::digest(Algorithm::Sha256, &"0".repeat(64)).unwrap();
        let mismatch = || expected.verify(b"other").unwrap_err();
        for (error, code) in [
            (PullError::NoManifest { from: from() }, ErrorCode::NotFound),
            (
                PullError::Mismatch {
                    file: from(),
                    problem: mismatch(),
                },
                ErrorCode::HashMismatch,
            ),
            (
                PullError::Package(PackageError::Mismatch {
                    from: from(),
                    file: from(),
                    problem: mismatch(),
                }),
                ErrorCode::HashMismatch,
            ),
            (
                PullError::Package(PackageError::NotSigned {
                    from: from(),
                    signer: "me".into(),
                }),
                ErrorCode::Untrusted,
            ),
            (
                PullError::Package(PackageError::NotJson {
                    from: from(),
                    problem: serde_json::from_str::<u8>("x").unwrap_err(),
                }),
                ErrorCode::InvalidFile,
            ),
            (
                PullError::Folder {
                    address: from(),
                    source: io::ErrorKind::NotFound.into(),
                },
                ErrorCode::NotFound,
            ),
            (PullError::NoSource, ErrorCode::InvalidRequest),
            (PullError::Ended, ErrorCode::Io),
        ] {
            let wrapped = PullError::NotFetched {
                file: from(),
                source: Box::new(error),
            };
            assert_eq!(Error::from(wrapped).code(), code);
        }
    }

    #[test]
    fn what_is_missing_has_no_cause() {
        let error = None::<u8>
            .context("expected a number, found none")
            .unwrap_err();
        assert_eq!(format!("{error:#}"), "expected a number, found none");
        assert_eq!(
            format!("{error:?}"),
            "[invalid_file] expected a number, found none"
        );
    }
}
