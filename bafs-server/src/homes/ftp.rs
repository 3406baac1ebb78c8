//! A home behind FTP: plain, so for public data and networks that are trusted. An upload is a file
//! of another name beside its place: it is resumed where it ended, read back and compared, and
//! renamed over what was there.
//!
//! A connection does one thing at a time, so there are as many as there are calls at once. What a
//! file is, is asked before and after each read on the same connection.

mod control;
mod facts;

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bafs_proto::hash::{Digest, Hasher};
use bafs_proto::limits::MANIFEST_ENTRIES_MAX;
use bafs_proto::message::{
    PutProgress, PutReceipt, ReadSource, SourceData, SourceEntry, SourceIdentity, SourcePage,
};
use bafs_proto::source_warning::{SourceWarnings, WarningReason};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::time::timeout;

use super::host::Host;
use super::listing::{changed, digests, directory, file, page, unless_unreadable};
use super::settings::HomeSetting;
use super::{Put, beside};
use control::Control;
use facts::{Facts, Kind};

/// Connections that are kept for the next call.
const IDLE_MAX: usize = 8;

/// So long one is kept, in milliseconds: what stands between may forget it, and tell nobody.
const IDLE_MS: u64 = 60_000;

/// Time in which one that was kept must show that it is alive.
const ALIVE: Duration = Duration::from_secs(5);

/// How to log in where nothing else is said.
const ANONYMOUS: (&str, &str) = ("anonymous", "bafs@");

/// An FTP server.
pub(super) struct Ftp {
    host: String,
    user: String,
    password: String,
    /// Each with the time until which it is kept.
    idle: Mutex<Vec<(Deadline, Control)>>,
}

impl Ftp {
    /// The server of `address`, which is `ftp://HOST` or `ftp://HOST:PORT`.
    pub(super) fn new(address: &str, setting: Option<&HomeSetting>) -> Self {
        let host = address.trim_start_matches("ftp://");
        let has_port = matches!(host.rsplit_once(':'), Some((_, port)) if !port.ends_with(']'));
        let user = setting.and_then(|setting| setting.user.as_deref());
        let (user, password) = match user {
            Some(user) => {
                let password = setting.and_then(|setting| setting.password.as_deref());
                (user, password.unwrap_or_default())
            }
            None => ANONYMOUS,
        };
        Self {
            host: if has_port {
                host.to_owned()
            } else {
                format!("{host}:21")
            },
            user: user.to_owned(),
            password: password.to_owned(),
            idle: Mutex::default(),
        }
    }

    /// A connection that is alive and does nothing.
    async fn control(&self) -> Result<Control> {
        loop {
            let Some(mut control) = self.newest_idle() else {
                return Control::open(&self.host, &self.user, &self.password).await;
            };
            // The server may have ended it meanwhile.
            match timeout(ALIVE, control.done("NOOP", "")).await {
                Ok(Ok(_)) => return Ok(control),
                Ok(Err(_)) => {}
                // The others will be no better, and each would take as long.
                Err(_) => self.idle().clear(),
            }
        }
    }

    fn newest_idle(&self) -> Option<Control> {
        let mut idle = self.idle();
        idle.retain(|(kept_until, _)| !kept_until.left().is_zero());
        idle.pop().map(|(_, control)| control)
    }

    /// Keeps a connection for the next call. After an error it is dropped instead: nobody knows
    /// what the server still has to say.
    fn keep(&self, control: Control) {
        let mut idle = self.idle();
        if idle.len() < IDLE_MAX {
            idle.push((Deadline::after_ms(IDLE_MS), control));
        }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<(Deadline, Control)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Host for Ftp {
    async fn list(&self, path: &str) -> Result<SourcePage> {
        let mut control = self.control().await?;
        let top = look(&mut control, path).await?;
        let mut entries = vec![entry("", top)];
        let mut warnings = SourceWarnings::default();
        let mut left = Vec::new();
        if top.kind == Kind::Directory {
            left.push(0);
        }
        while let Some(at) = left.pop() {
            let above = entries[at].path.clone();
            let inside = names(&mut control, &below(path, &above)).await;
            let inside = inside.map_err(closed);
            let Some(inside) = unless_unreadable(inside, &mut entries[at], &mut warnings)? else {
                continue;
            };
            for (name, found) in inside {
                let name = below(&above, &name);
                let left_out = match found.kind {
                    Kind::Directory => {
                        left.push(entries.len());
                        None
                    }
                    Kind::Special => Some(WarningReason::SpecialFile),
                    Kind::Unknown => Some(WarningReason::Unreachable),
                    Kind::File | Kind::Itself => None,
                };
                match left_out {
                    Some(reason) => warnings.add(&name, reason),
                    None => entries.push(entry(&name, found)),
                }
            }
            if entries.len() > MANIFEST_ENTRIES_MAX {
                let text = "it has more files than a volume can show";
                return Err(Error::new(ErrorCode::Malformed, text));
            }
        }
        self.keep(control);
        page(entries, warnings)
    }

    async fn read(&self, call: &ReadSource) -> Result<(SourceData, Bytes)> {
        let path = &call.path;
        let mut control = self.control().await?;
        let left = call.identity.size.saturating_sub(call.offset);
        let length = left.min(u64::from(call.length));
        same(&mut control, call).await?;
        let data = if length > 0 {
            // It is there: a server that does not find it now does not give it.
            let read = control.read(&rooted(path), call.offset, length).await;
            read.map_err(closed)?
        } else {
            Vec::new()
        };
        same(&mut control, call).await?;
        self.keep(control);
        if data.len() as u64 != length {
            return Err(Error::new(ErrorCode::Unreachable, "it sent too little"));
        }
        let digests = digests(&data, call.block_bytes);
        Ok((SourceData { digests }, data.into()))
    }

    async fn begin(&self, put: &Put) -> Result<PutProgress> {
        let mut control = self.control().await?;
        let mut upper = String::new();
        let (above, _) = put.path.rsplit_once('/').unwrap_or_default();
        for part in above.split('/').filter(|part| !part.is_empty()) {
            upper = below(&upper, part);
            if control.ask("CWD", &rooted(&upper)).await?.code == 250 {
                continue;
            }
            let made = control.done("MKD", &rooted(&upper)).await;
            // Another upload may have made it meanwhile.
            if made.is_err() && control.ask("CWD", &rooted(&upper)).await?.code != 250 {
                made?;
            }
        }
        let received_bytes = match size(&mut control, &beside(put)).await? {
            Some(size) if size <= put.size => size,
            Some(_) => {
                control.done("DELE", &rooted(&beside(put))).await?;
                0
            }
            None => 0,
        };
        self.keep(control);
        Ok(PutProgress {
            received_bytes,
            receipt: None,
        })
    }

    async fn write(&self, put: &Put, offset: u64, data: &[u8]) -> Result<PutProgress> {
        let mut control = self.control().await?;
        let temporary = beside(put);
        let there = size(&mut control, &temporary).await?.unwrap_or(0);
        if offset > 0 && there != offset {
            let text = format!("it has {there} bytes, not {offset}; the upload is resumed there");
            return Err(Error::new(ErrorCode::Conflict, text));
        }
        control.write(&rooted(&temporary), offset, data).await?;
        self.keep(control);
        Ok(PutProgress {
            received_bytes: offset + data.len() as u64,
            receipt: None,
        })
    }

    async fn commit(&self, put: &Put, digest: Digest) -> Result<PutReceipt> {
        let mut control = self.control().await?;
        let temporary = rooted(&beside(put));
        if put.size == 0 {
            control.write(&temporary, 0, b"").await?;
        }
        let (mut hasher, mut size) = (Hasher::new(), 0);
        let mut take = |piece: &[u8]| {
            hasher.update(piece);
            size += piece.len() as u64;
        };
        control.read_all(&temporary, &mut take).await?;
        if (size, hasher.digest()) != (put.size, digest) {
            control.done("DELE", &temporary).await?;
            let text = "what arrived is damaged; it is sent again";
            return Err(Error::new(ErrorCode::DigestMismatch, text));
        }
        let from = control.ask("RNFR", &temporary).await?;
        if from.code != 350 {
            return Err(from.refused());
        }
        control.done("RNTO", &rooted(&put.path)).await?;
        self.keep(control);
        Ok(PutReceipt {
            extract: put.extract,
            path: put.path.clone(),
            size: put.size,
            digest,
        })
    }
}

/// An error about what was seen just now: that a server does not find it says that it is closed.
fn closed(error: Error) -> Error {
    match error.code {
        ErrorCode::NotFound => Error::new(ErrorCode::RightMissing, error.detail),
        _ => error,
    }
}

/// Demands that a file is what it was.
async fn same(control: &mut Control, call: &ReadSource) -> Result<()> {
    match look(control, &call.path).await {
        Ok(found) if found.kind == Kind::File && identity(found) == call.identity => Ok(()),
        Ok(_) => Err(changed(&call.path, "size or time differ")),
        Err(error) if error.code == ErrorCode::NotFound => Err(changed(&call.path, "it is gone")),
        Err(error) => Err(error),
    }
}

/// What there is at a path.
async fn look(control: &mut Control, path: &str) -> Result<Facts> {
    if control.has_facts {
        let reply = control.done("MLST", &rooted(path)).await?;
        let found = reply.lines.iter().find_map(|line| {
            let (found, _) = facts::parse_facts(line)?;
            (found != Facts::default()).then_some(found)
        });
        if let Some(found) = found {
            // The directory itself goes by another name at its own top.
            let is_itself = found.kind == Kind::Itself;
            let kind = if is_itself {
                Kind::Directory
            } else {
                found.kind
            };
            if kind != Kind::Unknown {
                return Ok(Facts { kind, ..found });
            }
        }
    }
    if let Some(size) = size(control, path).await? {
        let time = control.done("MDTM", &rooted(path)).await?;
        let time = time.lines.first().and_then(|text| facts::time(text));
        let mtime_ns = time.ok_or_else(|| {
            let text = "it tells no time of the file, so that a change would not be noticed";
            Error::new(ErrorCode::Unsupported, text)
        })?;
        let kind = Kind::File;
        return Ok(Facts {
            kind,
            size,
            mtime_ns,
        });
    }
    let entered = control.ask("CWD", &rooted(path)).await?;
    match entered.code {
        250 => Ok(Facts {
            kind: Kind::Directory,
            ..Facts::default()
        }),
        _ => Err(entered.refused()),
    }
}

/// Size of a file; `None` when there is no file.
async fn size(control: &mut Control, path: &str) -> Result<Option<u64>> {
    let reply = control.ask("SIZE", &rooted(path)).await?;
    match reply.code {
        213 => {
            let size = reply
                .lines
                .first()
                .and_then(|text| text.trim().parse().ok());
            let strange = || Error::new(ErrorCode::Malformed, "it tells a size that is none");
            size.map(Some).ok_or_else(strange)
        }
        550 => Ok(None),
        _ => Err(reply.refused()),
    }
}

/// What is in a directory, without what is our own. What cannot be looked at stays unknown.
async fn names(control: &mut Control, path: &str) -> Result<Vec<(String, Facts)>> {
    let mut found = Vec::new();
    if control.has_facts {
        for line in control.lines("MLSD", &rooted(path)).await? {
            let (facts, name) = facts::parse_facts(&line).ok_or_else(|| strange(&line))?;
            found.push((name.to_owned(), facts));
        }
    } else {
        control.done("CWD", &rooted(path)).await?;
        // Names that begin with a dot are names.
        let lines = control.lines("LIST", "-a").await?;
        for line in lines.iter().filter(|line| !line.starts_with("total ")) {
            let (kind, name) = facts::parse_long(line).ok_or_else(|| strange(line))?;
            // Size and time are not exact in this form.
            let kind = if kind == Kind::File {
                Kind::Unknown
            } else {
                kind
            };
            let facts = Facts {
                kind,
                ..Facts::default()
            };
            found.push((name.to_owned(), facts));
        }
    }
    found.retain(|(name, facts)| facts.kind != Kind::Itself && !super::is_own(name));
    for (name, facts) in &mut found {
        if facts.kind == Kind::Unknown {
            match look(control, &below(path, name)).await {
                Err(error)
                    if matches!(error.code, ErrorCode::NotFound | ErrorCode::RightMissing) => {}
                found => *facts = found?,
            }
        }
    }
    Ok(found)
}

fn strange(line: &str) -> Error {
    let text = format!("it lists files in a form that is not understood: '{line}'");
    Error::new(ErrorCode::Malformed, text)
}

fn entry(path: &str, found: Facts) -> SourceEntry {
    match found.kind {
        Kind::File => file(path, identity(found)),
        _ => SourceEntry {
            identity: SourceIdentity {
                size: 0,
                ..identity(found)
            },
            ..directory(path)
        },
    }
}

fn identity(found: Facts) -> SourceIdentity {
    SourceIdentity {
        size: found.size,
        mtime_ns: found.mtime_ns,
        ctime_ns: 0,
    }
}

fn below(path: &str, name: &str) -> String {
    match (path, name) {
        ("", name) => name.to_owned(),
        (path, "") => path.to_owned(),
        (path, name) => format!("{path}/{name}"),
    }
}

/// The path as the server knows it.
fn rooted(path: &str) -> String {
    format!("/{path}")
}
