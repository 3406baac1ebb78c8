//! The cluster's authority and the identities it gives out; the only user of rcgen.
//!
//! An identity is a directory: `ca.pem`, `cert.pem`, `key.pem`, `token.pub` and perhaps `token`,
//! a capability. The authority's directory holds the secret keys and stays with its owner.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::error::{Error, ErrorCode, Result};
use crate::hash::Digest;
use crate::message::Role;
use crate::token::{Signer, Token, Verifier};

/// Name in every server's certificate; what clients ask for.
pub const SERVER_NAME: &str = "server.bafs.internal";

const CA: &str = "ca.pem";
const CA_KEY: &str = "ca.key";
const CERTIFICATE: &str = "cert.pem";
const KEY: &str = "key.pem";
const TOKEN: &str = "token";
const TOKEN_KEY: &str = "token.key";
const TOKEN_PUBLIC: &str = "token.pub";

/// Identity of a process: its key and certificate prove that it belongs to a cluster. With the
/// authority's public keys it checks the certificates and tokens of others.
#[derive(Clone)]
pub struct Identity {
    /// What the process is.
    pub role: Role,
    /// The cluster, derived from its authority's certificate.
    pub cluster: u64,
    /// Certificate of the authority (DER).
    pub authority_der: Vec<u8>,
    /// Certificate of the process (DER).
    pub certificate_der: Vec<u8>,
    /// Secret key of the process (PKCS#8 DER).
    pub key_der: Vec<u8>,
    /// Checks capability tokens.
    pub verifier: Verifier,
    /// The capability that the process holds by itself; may be none.
    pub token: Token,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Identity({:?}, cluster {:016x})",
            self.role, self.cluster
        )
    }
}

/// The authority of a cluster: signs certificates and tokens.
pub struct Authority {
    certificate_pem: String,
    certificate_der: Vec<u8>,
    key: KeyPair,
    signer: Signer,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Authority")
    }
}

impl Authority {
    /// A new authority with new keys.
    ///
    /// # Errors
    /// `ServerFault` when keys cannot be made.
    pub fn generate() -> Result<Self> {
        let key = KeyPair::generate().map_err(|e| identity_error(&e))?;
        let mut params = CertificateParams::new(Vec::new()).map_err(|e| identity_error(&e))?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params
            .distinguished_name
            .push(DnType::CommonName, "BAFS cluster authority");
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).map_err(|e| identity_error(&e))?;
        Ok(Self {
            certificate_pem: certificate.pem(),
            certificate_der: certificate.der().to_vec(),
            key,
            signer: Signer::generate(),
        })
    }

    /// Reads the authority kept in `directory`.
    ///
    /// # Errors
    /// `NotFound` or `Malformed`, with the file named.
    pub fn load(directory: &Path) -> Result<Self> {
        let certificate_pem = read_text(&directory.join(CA))?;
        let key = KeyPair::from_pem(&read_text(&directory.join(CA_KEY))?)
            .map_err(|e| malformed(&directory.join(CA_KEY), &e))?;
        Ok(Self {
            certificate_der: parse_certificate(&directory.join(CA), &certificate_pem)?,
            certificate_pem,
            key,
            signer: Signer::from_text(&read_text(&directory.join(TOKEN_KEY))?)?,
        })
    }

    /// Keeps the authority in `directory`, readable by the owner only.
    ///
    /// # Errors
    /// `ServerFault` when a file cannot be written.
    pub fn save(&self, directory: &Path) -> Result<()> {
        make_directory(directory)?;
        write(&directory.join(CA), self.certificate_pem.as_bytes())?;
        write(&directory.join(CA_KEY), self.key.serialize_pem().as_bytes())?;
        write(&directory.join(TOKEN_KEY), self.signer.to_text().as_bytes())
    }

    /// Signs capability tokens.
    pub fn signer(&self) -> &Signer {
        &self.signer
    }

    /// Makes an identity for a process of this cluster that holds `token`.
    ///
    /// # Errors
    /// `ServerFault` when keys cannot be made.
    pub fn issue(&self, role: Role, token: Token) -> Result<Identity> {
        let key = KeyPair::generate().map_err(|e| identity_error(&e))?;
        let name = match role {
            Role::Server => SERVER_NAME,
            Role::Scheduler => "scheduler.bafs.internal",
            Role::Agent => "agent.bafs.internal",
        };
        let mut params =
            CertificateParams::new(vec![name.to_owned()]).map_err(|e| identity_error(&e))?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        if role == Role::Server {
            params
                .extended_key_usages
                .push(ExtendedKeyUsagePurpose::ServerAuth);
        }
        let issuer = Issuer::from_ca_cert_pem(&self.certificate_pem, &self.key)
            .map_err(|e| identity_error(&e))?;
        let certificate = params
            .signed_by(&key, &issuer)
            .map_err(|e| identity_error(&e))?;
        Ok(Identity {
            role,
            cluster: cluster_of(&self.certificate_der),
            authority_der: self.certificate_der.clone(),
            certificate_der: certificate.der().to_vec(),
            key_der: key.serialize_der(),
            verifier: self.signer.verifier(),
            token,
        })
    }
}

impl Identity {
    /// Reads the identity kept in `directory`.
    ///
    /// # Errors
    /// `NotFound` or `Malformed`, with the file named.
    pub fn load(directory: &Path, role: Role) -> Result<Self> {
        let path = directory.join(CA);
        let first = read_text(&path).map_err(|e| missing_identity_error(e, directory, role))?;
        let authority_der = parse_certificate(&path, &first)?;
        let path = directory.join(CERTIFICATE);
        let certificate_der = parse_certificate(&path, &read_text(&path)?)?;
        let path = directory.join(KEY);
        let key = PrivateKeyDer::from_pem_slice(read_text(&path)?.as_bytes())
            .map_err(|e| malformed(&path, &e))?;
        let path = directory.join(TOKEN);
        let token = if path.exists() {
            Token::from_bytes(read(&path)?)
        } else {
            Token::none()
        };
        Ok(Self {
            role,
            cluster: cluster_of(&authority_der),
            authority_der,
            certificate_der,
            key_der: key.secret_der().to_vec(),
            verifier: Verifier::from_text(&read_text(&directory.join(TOKEN_PUBLIC))?)?,
            token,
        })
    }

    /// Keeps the identity in `directory`, readable by the owner only.
    ///
    /// # Errors
    /// `ServerFault` when a file cannot be written.
    pub fn save(&self, directory: &Path) -> Result<()> {
        make_directory(directory)?;
        write(
            &directory.join(CA),
            pem("CERTIFICATE", &self.authority_der).as_bytes(),
        )?;
        write(
            &directory.join(CERTIFICATE),
            pem("CERTIFICATE", &self.certificate_der).as_bytes(),
        )?;
        write(
            &directory.join(KEY),
            pem("PRIVATE KEY", &self.key_der).as_bytes(),
        )?;
        write(
            &directory.join(TOKEN_PUBLIC),
            self.verifier.to_text().as_bytes(),
        )?;
        if self.token == Token::none() {
            return Ok(());
        }
        write(&directory.join(TOKEN), self.token.as_bytes())
    }
}

fn cluster_of(authority_der: &[u8]) -> u64 {
    let digest = Digest::of(authority_der);
    let mut first = [0; 8];
    first.copy_from_slice(&digest.0[..8]);
    u64::from_le_bytes(first)
}

fn pem(label: &str, der: &[u8]) -> String {
    pem::encode(&pem::Pem::new(label, der))
}

fn parse_certificate(path: &Path, text: &str) -> Result<Vec<u8>> {
    CertificateDer::from_pem_slice(text.as_bytes())
        .map(|der| der.to_vec())
        .map_err(|e| malformed(path, &e))
}

fn make_directory(directory: &Path) -> Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .and_then(|()| check_owner(directory))
        .map_err(|e| {
            Error::new(
                ErrorCode::ServerFault,
                format!("cannot create {}: {e}", directory.display()),
            )
        })
}

/// Keys are not put where somebody else could read or replace them: the directory of a role and
/// that of the cluster belong to the caller or root, and not everybody may write there.
fn check_owner(directory: &Path) -> std::io::Result<()> {
    let own = rustix::process::geteuid().as_raw();
    for place in [Some(directory), directory.parent()].into_iter().flatten() {
        let place = match place.as_os_str().is_empty() {
            true => Path::new("."),
            false => place,
        };
        let found = fs::metadata(place)?;
        let is_sticky = found.mode() & 0o1000 != 0;
        let is_open = found.mode() & 0o002 != 0 && !is_sticky;
        if is_open || ![own, 0].contains(&found.uid()) {
            let text = format!(
                "other users may write to {} or own it; name a new directory",
                place.display()
            );
            return Err(std::io::Error::new(
                std::io::ErrorKind::PermissionDenied,
                text,
            ));
        }
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let removed = match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    };
    let mut options = fs::OpenOptions::new();
    // A new file: another one may be a link, or open to others.
    options.write(true).create_new(true).mode(0o600);
    removed
        .and_then(|()| options.open(path))
        .and_then(|mut file| file.write_all(bytes))
        .map_err(|e| {
            Error::new(
                ErrorCode::ServerFault,
                format!("cannot write {}: {e}", path.display()),
            )
        })
}

/// Says what to do where the identity of a role is not in its directory.
fn missing_identity_error(error: Error, directory: &Path, role: Role) -> Error {
    let above = directory.parent().unwrap_or(directory);
    let what_to_do = if above.join(CA).is_file() {
        format!(
            "{} belongs to one role; give its parent directory",
            above.display()
        )
    } else if !above.is_dir() {
        "the directory does not exist; give the one that `bafs init` created".to_owned()
    } else {
        match role {
            // It may do everything, and is not for machines of others.
            Role::Scheduler => "this command needs `scheduler`, which only the cluster's owner \
                                has; run it there, or ask the owner for a `bafs grant`"
                .to_owned(),
            Role::Server | Role::Agent => {
                "copy this directory from where `bafs init` was run".to_owned()
            }
        }
    };
    Error::new(error.code, format!("{}; {what_to_do}", error.detail))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|e| {
        let text = format!("cannot read {}: {e}", path.display());
        Error::new(ErrorCode::NotFound, text)
    })
}

fn read_text(path: &Path) -> Result<String> {
    String::from_utf8(read(path)?).map_err(|e| malformed(path, &e))
}

fn malformed(path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::new(
        ErrorCode::Malformed,
        format!("{} is damaged: {error}", path.display()),
    )
}

fn identity_error(error: &dyn std::fmt::Display) -> Error {
    Error::new(
        ErrorCode::ServerFault,
        format!("cannot make an identity: {error}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saving_keys_follows_no_links_and_restricts_access() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let cluster = tempfile::tempdir().expect("a directory");
        let agent = cluster.path().join("agent");
        fs::create_dir(&agent).expect("a directory");
        let elsewhere = cluster.path().join("elsewhere");
        fs::write(&elsewhere, "kept").expect("a file");
        symlink(&elsewhere, agent.join(KEY)).expect("a link");
        let authority = Authority::generate().expect("keys");
        let identity = authority.issue(Role::Agent, Token::none()).expect("keys");
        identity.save(&agent).expect("files");
        assert_eq!(fs::read(&elsewhere).expect("a file"), b"kept");
        let mode = fs::symlink_metadata(agent.join(KEY)).expect("a key").mode();
        assert_eq!(mode & 0o7777, 0o600);
        let open = fs::Permissions::from_mode(0o777);
        fs::set_permissions(cluster.path(), open).expect("chmod");
        let refused = identity.save(&agent).expect_err("anybody may replace it");
        assert!(
            refused.detail.contains("other users may write to"),
            "{refused}"
        );
    }

    #[test]
    fn missing_identity_errors_say_what_to_do() {
        let cluster = tempfile::tempdir().expect("a directory");
        let refusal = |directory: &Path, role| {
            let refused = Identity::load(directory, role).expect_err("there is none");
            refused.to_string()
        };
        let agent = cluster.path().join("agent");
        let said = refusal(&cluster.path().join("scheduler"), Role::Scheduler);
        assert!(
            said.contains("or ask the owner for a `bafs grant`"),
            "{said}"
        );
        let said = refusal(&agent, Role::Agent);
        assert!(said.contains("copy this directory"), "{said}");
        let authority = Authority::generate().expect("keys");
        let identity = authority.issue(Role::Agent, Token::none());
        identity.expect("keys").save(&agent).expect("files");
        let said = refusal(&agent.join("scheduler"), Role::Scheduler);
        assert!(said.contains("give its parent directory"), "{said}");
        let said = refusal(&cluster.path().join("typo/agent"), Role::Agent);
        assert!(said.contains("the directory does not exist"), "{said}");
    }
}
