//! Encrypted connections.

#[cfg(feature = "tls")]
pub(super) use with::Tls;

/// How connections are encrypted: in this build, not at all.
#[cfg(not(feature = "tls"))]
#[derive(Clone)]
pub(super) enum Tls {}

#[cfg(feature = "tls")]
mod with {
    use std::path::Path;
    use std::sync::Arc;

    use anyhow::{Context, Result, ensure};
    use tokio_rustls::TlsAcceptor;
    use tokio_rustls::rustls::ServerConfig;
    use tokio_rustls::rustls::crypto::ring;
    use tokio_rustls::rustls::pki_types::pem::PemObject;
    use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

    /// How connections are encrypted.
    #[derive(Clone)]
    pub(in crate::serve) struct Tls(pub(in crate::serve) TlsAcceptor);

    impl Tls {
        /// With the certificate in `cert`, after which the file may have others, and its key in `key`.
        ///
        /// Errors: files that can't be read, or don't belong together.
        pub(in crate::serve) fn read(cert: &Path, key: &Path) -> Result<Tls> {
            let name = || cert.display().to_string();
            let certs = CertificateDer::pem_file_iter(cert).with_context(name)?;
            let certs = certs.collect::<Result<Vec<_>, _>>().with_context(name)?;
            ensure!(
                !certs.is_empty(),
                "{}: expected a certificate in PEM, found none",
                name()
            );
            let own = PrivateKeyDer::from_pem_file(key);
            let own = own.with_context(|| key.display().to_string())?;
            let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
                .with_safe_default_protocol_versions()
                .context("TLS")?
                .with_no_client_auth()
                .with_single_cert(certs, own);
            let mut config = config.with_context(name)?;
            config.alpn_protocols = vec![b"http/1.1".to_vec()];
            Ok(Tls(TlsAcceptor::from(Arc::new(config))))
        }
    }
}
