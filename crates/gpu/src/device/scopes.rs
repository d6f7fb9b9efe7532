//! Error scopes: what a device reports for a call, at once or, in a browser, later.

use crate::{Device, GpuError};

#[cfg(not(target_arch = "wasm32"))]
mod kept {
    use crate::wgpu;

    /// Natively no scope stays open.
    #[derive(Debug)]
    pub(crate) enum OpenScope {}

    /// The scopes that have not reported yet: none.
    #[derive(Debug)]
    pub(in crate::device) struct Scopes;

    impl Scopes {
        pub(in crate::device) fn new() -> Scopes {
            Scopes
        }

        /// The error that `scope` caught.
        #[allow(clippy::unused_self)]
        pub(in crate::device) fn pop(
            &self,
            _: &str,
            scope: wgpu::ErrorScopeGuard,
        ) -> Option<wgpu::Error> {
            // Natively, the result is ready by now.
            pollster::block_on(scope.pop())
        }

        #[allow(clippy::unused_self)]
        pub(in crate::device) fn take(&self) -> Vec<OpenScope> {
            Vec::new()
        }

        #[allow(clippy::unused_self)]
        pub(in crate::device) fn give(&self, _: &mut Vec<OpenScope>) {}
    }
}

#[cfg(target_arch = "wasm32")]
mod kept {
    use std::fmt;
    use std::pin::Pin;
    use std::sync::{Mutex, PoisonError};

    use crate::wgpu;

    /// A scope whose error a browser reports later.
    pub(crate) struct OpenScope {
        pub(super) what: String,
        pub(super) error: Pin<Box<dyn Future<Output = Option<wgpu::Error>>>>,
    }

    impl fmt::Debug for OpenScope {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_tuple("OpenScope").field(&self.what).finish()
        }
    }

    /// The scopes that have not reported yet.
    #[derive(Debug)]
    pub(in crate::device) struct Scopes(Mutex<Vec<OpenScope>>);

    impl Scopes {
        pub(in crate::device) fn new() -> Scopes {
            Scopes(Mutex::default())
        }

        /// Keeps `scope` until the next submission.
        pub(in crate::device) fn pop(
            &self,
            what: &str,
            scope: wgpu::ErrorScopeGuard,
        ) -> Option<wgpu::Error> {
            let scope = OpenScope {
                what: what.into(),
                error: Box::pin(scope.pop()),
            };
            let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            open.push(scope);
            None
        }

        pub(in crate::device) fn take(&self) -> Vec<OpenScope> {
            std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
        }

        /// Keeps those of a submission that nobody waited for until the next.
        pub(in crate::device) fn give(&self, scopes: &mut Vec<OpenScope>) {
            let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            open.append(scopes);
        }
    }
}

use std::task::{Context, Poll};

pub(crate) use kept::OpenScope;
pub(super) use kept::Scopes;

impl OpenScope {
    /// Ready once the scope has reported what it caught.
    #[cfg(target_arch = "wasm32")]
    pub(crate) fn poll(
        &mut self,
        device: &Device,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), GpuError>> {
        self.error.as_mut().poll(cx).map(|error| match error {
            None => Ok(()),
            Some(error) => Err(device.error(&self.what, &error.into())),
        })
    }

    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn poll(&mut self, _: &Device, _: &mut Context<'_>) -> Poll<Result<(), GpuError>> {
        match *self {}
    }
}
