//! Mutual TLS 1.3 from an [`Identity`], and the only user of rustls' configuration.

use std::sync::Arc;

use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::ALPN;
use crate::error::{Error, ErrorCode, Result};
use crate::identity::Identity;

/// Configuration of a side that accepts connections: the peer must show a certificate of this
/// cluster's authority.
pub(super) fn server_config(identity: &Identity) -> Result<ServerConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots(identity)?), provider.clone())
            .build()
            .map_err(|e| bad(&e))?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|e| bad(&e))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain(identity), key(identity)?)
        .map_err(|e| bad(&e))?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

/// Configuration of a side that connects: shows its own certificate and checks the server's.
pub(super) fn client_config(identity: &Identity) -> Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|e| bad(&e))?
        .with_root_certificates(roots(identity)?)
        .with_client_auth_cert(chain(identity), key(identity)?)
        .map_err(|e| bad(&e))?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

/// Makes ring what TLS means in this process wherever nothing else is said: for clients of other
/// servers' certificates. Harmless to repeat.
pub fn use_ring() {
    // An error says that there is a default already.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

fn roots(identity: &Identity) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from(identity.authority_der.clone()))
        .map_err(|e| bad(&e))?;
    Ok(roots)
}

fn chain(identity: &Identity) -> Vec<CertificateDer<'static>> {
    vec![CertificateDer::from(identity.certificate_der.clone())]
}

fn key(identity: &Identity) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::try_from(identity.key_der.clone()).map_err(|e| bad(&e))
}

fn bad(error: &dyn std::fmt::Display) -> Error {
    Error::new(
        ErrorCode::Malformed,
        format!("TLS identity is not usable: {error}"),
    )
}
