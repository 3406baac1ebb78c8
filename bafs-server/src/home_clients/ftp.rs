//! A home behind FTP: plain, so for public data and networks that are trusted, or over TLS. An
//! upload is a file of another name beside its place: it is resumed where it ended, read back and
//! compared, and renamed over what was there.
//!
//! A connection does one thing at a time, so there are as many as there are calls at once. What a
//! file is, is asked before and after each read on the same connection.

mod connection;
mod facts;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bafs_proto::hash::{Digest, DigestHasher};
use bafs_proto::limits::MANIFEST_ENTRIES_MAX;
use bafs_proto::message::{
    PutProgress, PutReceipt, ReadSource, SourceData, SourceEntry, SourceIdentity, SourcePage,
};
use bafs_proto::net::ForeignTlsConnector;
use bafs_proto::source_warning::{SourceWarnings, WarningReason};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::time::timeout;

use super::home_upload::{HomeUpload, is_upload_name, upload_path};
use super::host::PlainHost;
use super::listing::{
    changed_error, chunk_digests, directory_entry, file_entry, make_page, note_unreadable,
};
use super::settings::HomeSetting;
use connection::{FtpConnection, FtpServer};
use facts::{FileFacts, FtpFileKind};

/// Connections that are kept for the next call.
const IDLE_CONNECTIONS_MAX: usize = 8;

/// So long one is kept, in milliseconds: what stands between may forget it, and tell nobody.
const IDLE_TIMEOUT_MS: u64 = 60_000;

/// Time in which one that was kept must show that it is alive.
const ALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// How to log in where nothing else is said.
const ANONYMOUS: (&str, &str) = ("anonymous", "bafs@");

/// An FTP server.
pub(super) struct FtpHost {
    server: FtpServer,
    /// Each with the time until which it is kept.
    idle: Mutex<Vec<(Deadline, FtpConnection)>>,
}

impl FtpHost {
    /// The server of `address`, which is `ftp://HOST`, `ftps://HOST`, or one of them with a port.
    ///
    /// # Errors
    /// `NotFound` and `Malformed` when the setting names no certificates.
    pub(super) fn new(address: &str, setting: Option<&HomeSetting>) -> Result<Self> {
        let (scheme, host) = address.split_once("://").unwrap_or(("ftp", address));
        let authorities = setting.and_then(|setting| setting.authorities.as_deref());
        let tls = (scheme == "ftps").then(|| ForeignTlsConnector::new(authorities));
        let has_port = matches!(host.rsplit_once(':'), Some((_, port)) if !port.ends_with(']'));
        let user = setting.and_then(|setting| setting.user.as_deref());
        let (user, password) = match user {
            Some(user) => {
                let password = setting.and_then(|setting| setting.password.as_deref());
                (user, password.unwrap_or_default())
            }
            None => ANONYMOUS,
        };
        let place = if has_port {
            host.to_owned()
        } else {
            format!("{host}:21")
        };
        Ok(Self {
            server: FtpServer {
                place,
                user: user.to_owned(),
                password: password.to_owned(),
                tls: tls.transpose()?.map(Arc::new),
            },
            idle: Mutex::default(),
        })
    }

    /// A connection that is alive and does nothing.
    async fn connection(&self) -> Result<FtpConnection> {
        loop {
            let Some(mut control) = self.newest_idle() else {
                return FtpConnection::open(&self.server).await;
            };
            // The server may have ended it meanwhile.
            match timeout(ALIVE_TIMEOUT, control.run_command("NOOP", "")).await {
                Ok(Ok(_)) => return Ok(control),
                Ok(Err(_)) => {}
                // The others will be no better, and each would take as long.
                Err(_) => self.idle().clear(),
            }
        }
    }

    fn newest_idle(&self) -> Option<FtpConnection> {
        let mut idle = self.idle();
        idle.retain(|(kept_until, _)| !kept_until.remaining().is_zero());
        idle.pop().map(|(_, control)| control)
    }

    /// Keeps a connection for the next call. After an error it is dropped instead: nobody knows
    /// what the server still has to say.
    fn return_connection(&self, control: FtpConnection) {
        let mut idle = self.idle();
        if idle.len() < IDLE_CONNECTIONS_MAX {
            idle.push((Deadline::after_ms(IDLE_TIMEOUT_MS), control));
        }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<(Deadline, FtpConnection)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PlainHost for FtpHost {
    async fn list(&self, path: &str) -> Result<SourcePage> {
        let mut control = self.connection().await?;
        let top = query_facts(&mut control, path).await?;
        let mut entries = vec![entry("", top)];
        let mut warnings = SourceWarnings::default();
        let mut left = Vec::new();
        if top.kind == FtpFileKind::Directory {
            left.push(0);
        }
        while let Some(at) = left.pop() {
            let above = entries[at].path.clone();
            let inside = list_names(&mut control, &child_path(path, &above)).await;
            let inside = inside.map_err(closed_error);
            let Some(inside) = note_unreadable(inside, &mut entries[at], &mut warnings)? else {
                continue;
            };
            for (name, found) in inside {
                let name = child_path(&above, &name);
                let left_out = match found.kind {
                    FtpFileKind::Directory => {
                        left.push(entries.len());
                        None
                    }
                    FtpFileKind::Special => Some(WarningReason::SpecialFile),
                    FtpFileKind::Unknown => Some(WarningReason::Unreachable),
                    FtpFileKind::File | FtpFileKind::SelfOrParent => None,
                };
                match left_out {
                    Some(reason) => warnings.add(&name, reason),
                    None => entries.push(entry(&name, found)),
                }
            }
            if entries.len() > MANIFEST_ENTRIES_MAX {
                let text = "it has more files than a volume may have";
                return Err(Error::new(ErrorCode::Malformed, text));
            }
        }
        self.return_connection(control);
        make_page(entries, warnings)
    }

    async fn read(&self, call: &ReadSource) -> Result<(SourceData, Bytes)> {
        let path = &call.path;
        let mut control = self.connection().await?;
        let left = call.identity.size.saturating_sub(call.offset);
        let length = left.min(u64::from(call.length));
        check_unchanged(&mut control, call).await?;
        let data = if length > 0 {
            // It is there: a server that does not find it now does not give it.
            let read = control
                .read(&absolute_path(path), call.offset, length)
                .await;
            read.map_err(closed_error)?
        } else {
            Vec::new()
        };
        check_unchanged(&mut control, call).await?;
        self.return_connection(control);
        if data.len() as u64 != length {
            return Err(Error::new(ErrorCode::Unreachable, "it sent too few bytes"));
        }
        let digests = chunk_digests(&data, call.block_bytes);
        Ok((SourceData { digests }, data.into()))
    }

    async fn identify(&self, path: &str) -> Result<Option<SourceIdentity>> {
        let mut control = self.connection().await?;
        let found = identify_target(&mut control, path).await?;
        self.return_connection(control);
        Ok(found)
    }

    async fn begin(&self, put: &HomeUpload) -> Result<PutProgress> {
        let mut control = self.connection().await?;
        let mut upper = String::new();
        let (above, _) = put.path.rsplit_once('/').unwrap_or_default();
        for part in above.split('/').filter(|part| !part.is_empty()) {
            upper = child_path(&upper, part);
            if control
                .send_command("CWD", &absolute_path(&upper))
                .await?
                .code
                == 250
            {
                continue;
            }
            let made = control.run_command("MKD", &absolute_path(&upper)).await;
            // Another upload may have made it meanwhile.
            if made.is_err()
                && control
                    .send_command("CWD", &absolute_path(&upper))
                    .await?
                    .code
                    != 250
            {
                made?;
            }
        }
        let received_bytes = match query_size(&mut control, &upload_path(put)).await? {
            Some(size) if size <= put.size => size,
            Some(_) => {
                control
                    .run_command("DELE", &absolute_path(&upload_path(put)))
                    .await?;
                0
            }
            None => 0,
        };
        self.return_connection(control);
        Ok(PutProgress {
            received_bytes,
            receipt: None,
        })
    }

    async fn write(&self, put: &HomeUpload, offset: u64, data: &[u8]) -> Result<PutProgress> {
        let mut control = self.connection().await?;
        let temporary = upload_path(put);
        let there = query_size(&mut control, &temporary).await?.unwrap_or(0);
        if offset > 0 && there != offset {
            let text = format!("it has {there} bytes, not {offset}; resuming the upload there");
            return Err(Error::new(ErrorCode::Conflict, text));
        }
        control
            .write(&absolute_path(&temporary), offset, data)
            .await?;
        self.return_connection(control);
        Ok(PutProgress {
            received_bytes: offset + data.len() as u64,
            receipt: None,
        })
    }

    async fn commit(&self, put: &HomeUpload, digest: Digest) -> Result<PutReceipt> {
        let mut control = self.connection().await?;
        let temporary = absolute_path(&upload_path(put));
        if put.size == 0 {
            control.write(&temporary, 0, b"").await?;
        }
        let (mut hasher, mut size) = (DigestHasher::new(), 0);
        let mut take = |piece: &[u8]| {
            hasher.update(piece);
            size += piece.len() as u64;
        };
        control.read_all(&temporary, &mut take).await?;
        if (size, hasher.digest()) != (put.size, digest) {
            control.run_command("DELE", &temporary).await?;
            let text = "the transfer is damaged; sending again";
            return Err(Error::new(ErrorCode::DigestMismatch, text));
        }
        let there = identify_target(&mut control, &put.path).await?;
        put.replaced.check(&put.path, there)?;
        let from = control.send_command("RNFR", &temporary).await?;
        if from.code != 350 {
            return Err(from.refusal_error());
        }
        control
            .run_command("RNTO", &absolute_path(&put.path))
            .await?;
        self.return_connection(control);
        Ok(PutReceipt {
            extraction: put.extract,
            path: put.path.clone(),
            size: put.size,
            digest,
        })
    }
}

/// An error about what was seen just now: that a server does not find it says that it is closed.
fn closed_error(error: Error) -> Error {
    match error.code {
        ErrorCode::NotFound => Error::new(ErrorCode::RightMissing, error.detail),
        _ => error,
    }
}

/// Demands that a file is what it was.
async fn check_unchanged(control: &mut FtpConnection, call: &ReadSource) -> Result<()> {
    match query_facts(control, &call.path).await {
        Ok(found) if found.kind == FtpFileKind::File && identity(found) == call.identity => Ok(()),
        Ok(_) => Err(changed_error(&call.path, "size or time differ")),
        Err(error) if error.code == ErrorCode::NotFound => {
            Err(changed_error(&call.path, "it no longer exists"))
        }
        Err(error) => Err(error),
    }
}

/// What there is at a path.
async fn query_facts(control: &mut FtpConnection, path: &str) -> Result<FileFacts> {
    if control.has_facts {
        let reply = control.run_command("MLST", &absolute_path(path)).await?;
        let found = reply.lines.iter().find_map(|line| {
            let (found, _) = facts::parse_facts(line)?;
            (found != FileFacts::default()).then_some(found)
        });
        if let Some(found) = found {
            // The directory itself goes by another name at its own top.
            let is_itself = found.kind == FtpFileKind::SelfOrParent;
            let kind = if is_itself {
                FtpFileKind::Directory
            } else {
                found.kind
            };
            if kind != FtpFileKind::Unknown {
                return Ok(FileFacts { kind, ..found });
            }
        }
    }
    if let Some(size) = query_size(control, path).await? {
        let time = control.run_command("MDTM", &absolute_path(path)).await?;
        let time = time.lines.first().and_then(|text| facts::parse_time(text));
        let mtime_ns = time.ok_or_else(|| {
            let text = "it sends no modification time, so BAFS cannot detect changes";
            Error::new(ErrorCode::Unsupported, text)
        })?;
        let kind = FtpFileKind::File;
        return Ok(FileFacts {
            kind,
            size,
            mtime_ns,
        });
    }
    let entered = control.send_command("CWD", &absolute_path(path)).await?;
    match entered.code {
        250 => Ok(FileFacts {
            kind: FtpFileKind::Directory,
            ..FileFacts::default()
        }),
        _ => Err(entered.refusal_error()),
    }
}

/// Size of a file; `None` when there is no file.
/// The file at the target of an upload; nothing where the server does not tell when it changed.
async fn identify_target(
    control: &mut FtpConnection,
    path: &str,
) -> Result<Option<SourceIdentity>> {
    match query_facts(control, path).await {
        Ok(found) => Ok(Some(identity(found))),
        Err(error) if matches!(error.code, ErrorCode::NotFound | ErrorCode::Unsupported) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

async fn query_size(control: &mut FtpConnection, path: &str) -> Result<Option<u64>> {
    let reply = control.send_command("SIZE", &absolute_path(path)).await?;
    match reply.code {
        213 => {
            let size = reply
                .lines
                .first()
                .and_then(|text| text.trim().parse().ok());
            let strange = || Error::new(ErrorCode::Malformed, "it sends an invalid size");
            size.map(Some).ok_or_else(strange)
        }
        550 => Ok(None),
        _ => Err(reply.refusal_error()),
    }
}

/// What is in a directory, without what is our own. What cannot be looked at stays unknown.
async fn list_names(control: &mut FtpConnection, path: &str) -> Result<Vec<(String, FileFacts)>> {
    let mut found = Vec::new();
    if control.has_facts {
        for line in control.list_lines("MLSD", &absolute_path(path)).await? {
            let (facts, name) =
                facts::parse_facts(&line).ok_or_else(|| unreadable_line_error(&line))?;
            found.push((name.to_owned(), facts));
        }
    } else {
        control.run_command("CWD", &absolute_path(path)).await?;
        // Names that begin with a dot are names.
        let lines = control.list_lines("LIST", "-a").await?;
        for line in lines.iter().filter(|line| !line.starts_with("total ")) {
            let (kind, name) =
                facts::parse_long(line).ok_or_else(|| unreadable_line_error(line))?;
            // Size and time are not exact in this form.
            let kind = if kind == FtpFileKind::File {
                FtpFileKind::Unknown
            } else {
                kind
            };
            let facts = FileFacts {
                kind,
                ..FileFacts::default()
            };
            found.push((name.to_owned(), facts));
        }
    }
    found.retain(|(name, facts)| facts.kind != FtpFileKind::SelfOrParent && !is_upload_name(name));
    for (name, facts) in &mut found {
        if facts.kind == FtpFileKind::Unknown {
            match query_facts(control, &child_path(path, name)).await {
                Err(error)
                    if matches!(error.code, ErrorCode::NotFound | ErrorCode::RightMissing) => {}
                found => *facts = found?,
            }
        }
    }
    Ok(found)
}

fn unreadable_line_error(line: &str) -> Error {
    let text = format!("it lists files in an unknown format: '{line}'");
    Error::new(ErrorCode::Malformed, text)
}

fn entry(path: &str, found: FileFacts) -> SourceEntry {
    match found.kind {
        FtpFileKind::File => file_entry(path, identity(found)),
        _ => SourceEntry {
            identity: SourceIdentity {
                size: 0,
                ..identity(found)
            },
            ..directory_entry(path)
        },
    }
}

fn identity(found: FileFacts) -> SourceIdentity {
    SourceIdentity {
        size: found.size,
        mtime_ns: found.mtime_ns,
        ctime_ns: 0,
    }
}

fn child_path(path: &str, name: &str) -> String {
    match (path, name) {
        ("", name) => name.to_owned(),
        (path, "") => path.to_owned(),
        (path, name) => format!("{path}/{name}"),
    }
}

/// The path as the server knows it.
fn absolute_path(path: &str) -> String {
    format!("/{path}")
}
