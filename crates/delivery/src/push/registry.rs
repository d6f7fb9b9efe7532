//! Repositories of registries as targets.

use std::time::Duration;

use futures_util::StreamExt as _;
use oci_client::errors::OciDistributionError;

use super::{Body, Current, PushError, Target, TargetError};
use crate::{
    artifact::MANIFEST_TYPE,
    blocking::Activity,
    fetch::{Cancel, Fault},
    hash::Digest,
    source::{Registry, chain},
};

/// How long a registry may be silent; it may hash a whole blob before it answers.
const PATIENCE: Duration = Duration::from_secs(120);

/// A tag of a repository.
pub(super) struct RegistryTarget {
    registry: Registry,
    reference: oci_client::Reference,
}

impl RegistryTarget {
    /// Errors: [`PushError::Pinned`].
    pub(super) fn new(registry: Registry) -> Result<Self, PushError> {
        let Some(tag) = registry.address().tag() else {
            return Err(PushError::Pinned {
                address: registry.name().to_owned(),
            });
        };
        let reference = registry.reference(tag);
        Ok(Self {
            registry,
            reference,
        })
    }

    /// Waits for what the client does, once it knows who we are.
    fn ask<T>(
        &self,
        cancel: &Cancel,
        activity: &Activity,
        request: impl Future<Output = oci_client::errors::Result<T>>,
    ) -> Result<T, TargetError> {
        let (client, auth) = (self.registry.client(), self.registry.auth());
        let host = self.reference.resolve_registry();
        let asked = self
            .registry
            .bridge()
            .wait(PATIENCE, activity, Some(cancel), async {
                client.store_auth_if_needed(host, auth).await;
                request.await
            });
        asked?.map_err(failed)
    }
}

/// What an error of the client means for a push.
fn failed(error: OciDistributionError) -> TargetError {
    use OciDistributionError as E;
    let message = chain(&error);
    match error {
        E::UnauthorizedError { .. } | E::AuthenticationFailure(_) => refused_login(&message),
        E::ServerError {
            code: 401 | 403, ..
        } => refused_login(&message),
        E::ServerError { code, .. } if code >= 500 || matches!(code, 408 | 429) => {
            TargetError::Failed(message)
        }
        E::RequestError(error) => match error.status().map(|status| status.as_u16()) {
            Some(401 | 403) => refused_login(&message),
            Some(code) if code < 500 && !matches!(code, 408 | 429) => TargetError::Refused(message),
            _ => TargetError::Failed(message),
        },
        E::IoError(_) => TargetError::Failed(message),
        _ => TargetError::Refused(message),
    }
}

fn refused_login(message: &str) -> TargetError {
    TargetError::Refused(format!(
        "not allowed with what `docker login` keeps for it: {message}"
    ))
}

/// What a failed look means for a push.
fn looked(fault: &Fault) -> TargetError {
    match fault {
        Fault::Refused { status: 401 | 403 } => refused_login(&fault.to_string()),
        fault if fault.may_pass() => TargetError::Failed(fault.to_string()),
        fault => TargetError::Refused(fault.to_string()),
    }
}

impl Target for RegistryTarget {
    fn name(&self) -> &str {
        self.registry.name()
    }

    fn current(&self, _: &Cancel) -> Result<Current, TargetError> {
        let found = self.registry.current().map_err(|fault| looked(&fault))?;
        Ok(Current {
            digest: found.map(|(_, digest)| digest),
            state: None,
        })
    }

    fn has(&self, digest: &Digest, _: u64, cancel: &Cancel) -> Result<bool, TargetError> {
        let digest = format!("sha256:{digest}");
        let client = self.registry.client();
        let asked = client.blob_exists(&self.reference, &digest);
        self.ask(cancel, &Activity::new(), asked)
    }

    /// The registry keeps nothing that doesn't have the digest.
    fn put(&self, body: &Body, cancel: &Cancel) -> Result<(), TargetError> {
        let (digest, size) = (format!("sha256:{}", body.digest()), body.size());
        let pieces = body.stream();
        let pieces = pieces.map(|piece| piece.map_err(OciDistributionError::from));
        let client = self.registry.client();
        let sent = client.push_blob_stream(&self.reference, pieces, &digest, Some(size));
        self.ask(cancel, body.activity(), sent).map(drop)
    }

    /// Registries have no conditions, so this looks before and after: of two that come between, the last one's
    /// manifest is there, whole, and the other hears of it.
    fn commit(
        &self,
        manifest: &[u8],
        digest: &Digest,
        before: &Current,
        cancel: &Cancel,
    ) -> Result<(), TargetError> {
        let now = self.current(cancel)?;
        // An answer may have been lost.
        if now.digest == Some(*digest) {
            return Ok(());
        }
        if now != *before {
            return Err(TargetError::Conflict(now.digest));
        }
        let kind = MANIFEST_TYPE.parse().expect("it is a header's value");
        let client = self.registry.client();
        let put = client.push_manifest_raw(&self.reference, manifest.to_vec(), kind);
        self.ask(cancel, &Activity::new(), put)?;
        self.confirm(digest, cancel)
    }
}
