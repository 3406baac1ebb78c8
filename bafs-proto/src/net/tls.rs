//! Mutual TLS 1.3 from an [`Identity`], and the only user of rustls and tokio-rustls.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{CipherSuite, ClientConfig, RootCertStore, ServerConfig};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::ALPN;
use crate::error::{Error, ErrorCode, Result};
use crate::identity::{Identity, SERVER_NAME};

/// A TCP connection whose ends have authenticated each other.
pub(super) type TlsTcpStream = tokio_rustls::TlsStream<TcpStream>;

/// Most bytes that are encrypted before the socket accepts them. It makes large writes: the
/// library's 64 KiB are sixteen for each MiB.
const TLS_BUFFER_BYTES_MAX: usize = 256 << 10;

/// Most bytes that are thrown away of a peer that was refused; see [`Acceptor::accept`].
const DISCARDED_BYTES_MAX: u64 = 64 << 10;

/// Configuration of a side that accepts connections: the peer must show a certificate of this
/// cluster's authority.
pub(super) fn server_config(identity: &Identity) -> Result<ServerConfig> {
    let provider = provider();
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots(identity)?), provider.clone())
            .build()
            .map_err(|e| unusable_identity_error(&e))?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|e| unusable_identity_error(&e))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain(identity), key(identity)?)
        .map_err(|e| unusable_identity_error(&e))?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

/// Configuration of a side that connects: shows its own certificate and checks the server's.
pub(super) fn client_config(identity: &Identity) -> Result<ClientConfig> {
    let provider = provider();
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|e| unusable_identity_error(&e))?
        .with_root_certificates(roots(identity)?)
        .with_client_auth_cert(chain(identity), key(identity)?)
        .map_err(|e| unusable_identity_error(&e))?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

/// Ring with the fastest cipher first: AES of 128 bits where the processor has instructions for it,
/// else ChaCha20. Peers may still choose any of TLS 1.3.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = rustls::crypto::ring::default_provider();
    let first = if has_aes() {
        CipherSuite::TLS13_AES_128_GCM_SHA256
    } else {
        CipherSuite::TLS13_CHACHA20_POLY1305_SHA256
    };
    provider.cipher_suites.sort_by_key(|s| s.suite() != first);
    Arc::new(provider)
}

#[cfg(target_arch = "x86_64")]
fn has_aes() -> bool {
    std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq")
}

#[cfg(target_arch = "aarch64")]
fn has_aes() -> bool {
    std::arch::is_aarch64_feature_detected!("aes")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn has_aes() -> bool {
    false
}

/// Secures TCP connections to servers.
pub(super) struct Connector(TlsConnector);

impl Connector {
    /// Shows `identity` to servers.
    pub(super) fn new(identity: &Identity) -> Result<Self> {
        Ok(Self(Arc::new(client_config(identity)?).into()))
    }

    /// Secures a connection. The server has not verified our certificate when this returns.
    pub(super) async fn connect(&self, stream: TcpStream) -> io::Result<TlsTcpStream> {
        let name = ServerName::try_from(SERVER_NAME).map_err(io::Error::other)?;
        let mut stream = self.0.connect(name, stream).await?;
        stream
            .get_mut()
            .1
            .set_buffer_limit(Some(TLS_BUFFER_BYTES_MAX));
        check_protocol(stream.get_ref().1.alpn_protocol())?;
        Ok(stream.into())
    }
}

/// Secures TCP connections to servers outside of the cluster, which show certificates for their
/// host names.
pub struct ForeignTlsConnector(TlsConnector);

/// A secured connection to such a server.
pub type ForeignTlsStream = tokio_rustls::client::TlsStream<TcpStream>;

impl ForeignTlsConnector {
    /// Trusts the authorities of a PEM file if one is given, else those of the system. Blocks.
    ///
    /// # Errors
    /// `NotFound` when the file cannot be read, `Malformed` when it has no certificate.
    pub fn new(authorities: Option<&Path>) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        match authorities {
            None => {
                let found = rustls_native_certs::load_native_certs();
                roots.add_parsable_certificates(found.certs);
            }
            Some(path) => {
                let fail = |code, why: &dyn std::fmt::Display| {
                    Error::new(code, format!("certificates {}: {why}", path.display()))
                };
                let pem = std::fs::read(path).map_err(|e| fail(ErrorCode::NotFound, &e))?;
                for certificate in CertificateDer::pem_slice_iter(&pem) {
                    let certificate = certificate.map_err(|e| fail(ErrorCode::Malformed, &e))?;
                    let added = roots.add(certificate);
                    added.map_err(|e| fail(ErrorCode::Malformed, &e))?;
                }
                if roots.is_empty() {
                    return Err(fail(ErrorCode::Malformed, &"it has no certificate"));
                }
            }
        }
        let config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|e| Error::new(ErrorCode::Malformed, format!("TLS: {e}")))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self(Arc::new(config).into()))
    }

    /// Secures a connection to `host`. Later connections resume the session of the first, which
    /// some FTP servers demand of data connections.
    ///
    /// # Errors
    /// As the handshake; `InvalidInput` when that is no host name.
    pub async fn connect(&self, host: &str, stream: TcpStream) -> io::Result<ForeignTlsStream> {
        let name = ServerName::try_from(host.to_owned());
        let name = name.map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
        self.0.connect(name, stream).await
    }
}

/// Secures TCP connections of clients.
pub(super) struct Acceptor(TlsAcceptor);

impl Acceptor {
    /// Shows `identity` to clients.
    pub(super) fn new(identity: &Identity) -> Result<Self> {
        Ok(Self(Arc::new(server_config(identity)?).into()))
    }

    /// Secures a connection. The server reads a rejected peer's data to its end; otherwise the
    /// system would discard the alert together with unread data.
    pub(super) async fn accept(&self, stream: TcpStream) -> io::Result<TlsTcpStream> {
        let mut stream = match self.0.accept(stream).into_fallible().await {
            Ok(stream) => stream,
            Err((error, mut stream)) => {
                let _ = tokio::io::AsyncWriteExt::shutdown(&mut stream).await;
                let mut unheard = stream.take(DISCARDED_BYTES_MAX);
                let _ = tokio::io::copy(&mut unheard, &mut tokio::io::sink()).await;
                return Err(error);
            }
        };
        stream
            .get_mut()
            .1
            .set_buffer_limit(Some(TLS_BUFFER_BYTES_MAX));
        check_protocol(stream.get_ref().1.alpn_protocol())?;
        Ok(stream.into())
    }
}

/// Unlike QUIC, TLS accepts peers that offer no protocol at all.
fn check_protocol(agreed: Option<&[u8]>) -> io::Result<()> {
    if agreed == Some(ALPN) {
        return Ok(());
    }
    let text = "the peer does not say that it speaks BAFS";
    Err(io::Error::new(io::ErrorKind::InvalidData, text))
}

/// Whether a failure is permanent: one side does not accept the other's certificate or protocol.
pub(super) fn is_refusal(error: &io::Error) -> bool {
    let below = error.get_ref().and_then(|e| e.downcast_ref());
    matches!(
        below,
        Some(
            rustls::Error::AlertReceived(_)
                | rustls::Error::InvalidCertificate(_)
                | rustls::Error::NoCertificatesPresented
                | rustls::Error::NoApplicationProtocol
                | rustls::Error::PeerIncompatible(_)
        )
    )
}

/// Makes ring the default TLS provider of this process, for clients of other servers' certificates.
/// Harmless to repeat.
pub fn install_crypto_provider() {
    // An error means that a default exists already.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

fn roots(identity: &Identity) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from(identity.authority_der.clone()))
        .map_err(|e| unusable_identity_error(&e))?;
    Ok(roots)
}

fn chain(identity: &Identity) -> Vec<CertificateDer<'static>> {
    vec![CertificateDer::from(identity.certificate_der.clone())]
}

fn key(identity: &Identity) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::try_from(identity.key_der.clone()).map_err(|e| unusable_identity_error(&e))
}

fn unusable_identity_error(error: &dyn std::fmt::Display) -> Error {
    Error::new(
        ErrorCode::Malformed,
        format!("TLS identity is not usable: {error}"),
    )
}
