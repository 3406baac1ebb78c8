//! A home behind SSH. An upload is a file of another name beside its place: it is resumed where it
//! ended, read back and compared, made durable, and renamed over what was there.

mod packet;
mod session;

use std::sync::Arc;

use bafs_proto::hash::{Digest, DigestHasher};
use bafs_proto::limits::MANIFEST_ENTRIES_MAX;
use bafs_proto::message::{
    PutProgress, PutReceipt, ReadSource, SourceData, SourceEntry, SourceIdentity, SourceKind,
    SourcePage,
};
use bafs_proto::net::BoxFuture;
use bafs_proto::path::from_bytes;
use bafs_proto::source_warning::{SourceWarnings, WarningReason};
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::stream::{StreamExt, TryStreamExt, iter};
use tokio::sync::Mutex;

use super::home_upload::{HomeUpload, is_upload_name, upload_path};
use super::host::PlainHost;
use super::listing::{changed_error, chunk_digests, make_page, note_unreadable};
use super::settings::HomeSetting;
use packet::{SftpAttributes, SftpReply, SftpRequestKind};
use session::SftpSession;

/// Bytes of one read or write: what every server takes.
const CHUNK_BYTES: u64 = 32 << 10;

/// Bytes that are read back as one, and how many of those are asked for ahead: fills a wide-area
/// link.
const WINDOW_BYTES: u64 = 1 << 20;
const WINDOWS_MAX: usize = 4;

/// Flags of an open file.
const OPEN_READ: u32 = 1;
const OPEN_WRITE: u32 = 2;
const OPEN_CREATE: u32 = 8;

/// Bits of a mode that tell the kind of a file.
const KIND_MASK: u32 = 0o170_000;
const KIND_DIRECTORY: u32 = 0o040_000;
const KIND_LINK: u32 = 0o120_000;
const KIND_FILE: u32 = 0o100_000;

const SYNC_EXTENSION: &str = "fsync@openssh.com";
const RENAME_EXTENSION: &str = "posix-rename@openssh.com";

/// A host that is reached by SSH.
pub(super) struct SftpHost {
    arguments: Vec<String>,
    session: Mutex<Option<Arc<SftpSession>>>,
}

impl SftpHost {
    /// The host of `address`, which is `sftp://HOST` or `sftp://HOST:PORT`.
    ///
    /// # Errors
    /// `Malformed` when that is no host.
    pub(super) fn new(address: &str, setting: &HomeSetting) -> Result<Self> {
        let arguments = ssh_arguments(address, setting).ok_or_else(|| {
            let text = format!("{address} is no host; write it as sftp://HOST or sftp://HOST:PORT");
            Error::new(ErrorCode::Malformed, text)
        })?;
        Ok(Self {
            arguments,
            session: Mutex::default(),
        })
    }

    async fn session(&self) -> Result<Arc<SftpSession>> {
        let mut session = self.session.lock().await;
        if let Some(session) = session.as_ref().filter(|session| !session.is_over()) {
            return Ok(session.clone());
        }
        let opened = Arc::new(SftpSession::open(&self.arguments).await?);
        *session = Some(opened.clone());
        Ok(opened)
    }
}

impl PlainHost for SftpHost {
    async fn list(&self, path: &str) -> Result<SourcePage> {
        let session = self.session().await?;
        let top = stat(&session, path).await?;
        let mut entries = vec![entry("", top)?];
        let mut warnings = SourceWarnings::default();
        let mut left = Vec::new();
        if top.mode & KIND_MASK == KIND_DIRECTORY {
            left.push(0);
        }
        while let Some(at) = left.pop() {
            let directory = entries[at].path.clone();
            let inside = list_names(&session, &child_path(path, &directory)).await;
            let Some(inside) = note_unreadable(inside, &mut entries[at], &mut warnings)? else {
                continue;
            };
            for (name, found) in inside {
                let name = child_path(&directory, &name);
                match found.mode & KIND_MASK {
                    KIND_DIRECTORY => left.push(entries.len()),
                    KIND_LINK => {
                        entries.push(link_entry(&session, path, &name, found).await?);
                        continue;
                    }
                    KIND_FILE => {}
                    _ => {
                        warnings.add(&name, WarningReason::SpecialFile);
                        continue;
                    }
                }
                entries.push(entry(&name, found)?);
            }
            if entries.len() > MANIFEST_ENTRIES_MAX {
                let text = "it has more files than a volume may have";
                return Err(Error::new(ErrorCode::Malformed, text));
            }
        }
        make_page(entries, warnings)
    }

    async fn read(&self, call: &ReadSource) -> Result<(SourceData, Bytes)> {
        let path = &call.path;
        let session = self.session().await?;
        let file = open(&session, path, OPEN_READ, None)
            .await
            .map_err(|error| {
                if error.code == ErrorCode::NotFound {
                    return changed_error(path, "it no longer exists");
                }
                error
            })?;
        let left = call.identity.size.saturating_sub(call.offset);
        let length = left.min(u64::from(call.length));
        // Before and after the data; all of it on the way at once.
        let before = session.send_request(SftpRequestKind::Fstat, |it| it.bytes(file.handle()));
        let pieces = read_chunks(&session, file.handle(), call.offset, length);
        let data = pieces.await;
        let after = session.send_request(SftpRequestKind::Fstat, |it| it.bytes(file.handle()));
        let closed = file.close();
        for found in [before.await?, after.await?] {
            if identity(found.attributes()?) != call.identity {
                return Err(changed_error(path, "size or time differ"));
            }
        }
        closed.await?.check_status()?;
        let data = data?;
        if data.len() as u64 != length {
            return Err(changed_error(path, "it became shorter"));
        }
        let digests = chunk_digests(&data, call.block_bytes);
        Ok((SourceData { digests }, data.into()))
    }

    async fn identify(&self, path: &str) -> Result<Option<SourceIdentity>> {
        identify_target(&*self.session().await?, path).await
    }

    async fn begin(&self, put: &HomeUpload) -> Result<PutProgress> {
        let session = self.session().await?;
        let mut upper = String::new();
        let (above, _) = put.path.rsplit_once('/').unwrap_or_default();
        for part in above.split('/').filter(|part| !part.is_empty()) {
            upper = child_path(&upper, part);
            if stat(&session, &upper).await.is_err() {
                let made = session.send_request(SftpRequestKind::Mkdir, |it| {
                    it.text(&absolute_path(&upper)).mode(None)
                });
                made.await?.check_status()?;
            }
        }
        let temporary = upload_path(put);
        let received_bytes = match stat(&session, &temporary).await {
            Ok(found) if found.size <= put.size => found.size,
            Ok(_) => {
                remove(&session, &temporary).await?;
                0
            }
            Err(error) if error.code == ErrorCode::NotFound => 0,
            Err(error) => return Err(error),
        };
        Ok(PutProgress {
            received_bytes,
            receipt: None,
        })
    }

    async fn write(&self, put: &HomeUpload, offset: u64, data: &[u8]) -> Result<PutProgress> {
        let session = self.session().await?;
        // Nobody else may read it before it is whole.
        let file = open(
            &session,
            &upload_path(put),
            OPEN_WRITE | OPEN_CREATE,
            Some(0o600),
        )
        .await?;
        let mut at = offset;
        let mut written = Vec::new();
        for piece in data.chunks(CHUNK_BYTES as usize) {
            written.push(session.send_request(SftpRequestKind::Write, |it| {
                it.bytes(file.handle()).long(at).bytes(piece)
            }));
            at += piece.len() as u64;
        }
        let replies = join_all(written).await;
        file.close().await?.check_status()?;
        replies
            .into_iter()
            .try_for_each(|reply| reply?.check_status())?;
        Ok(PutProgress {
            received_bytes: at,
            receipt: None,
        })
    }

    async fn commit(&self, put: &HomeUpload, digest: Digest) -> Result<PutReceipt> {
        let session = self.session().await?;
        let temporary = upload_path(put);
        let flags = if put.size == 0 {
            OPEN_READ | OPEN_WRITE | OPEN_CREATE
        } else {
            OPEN_READ | OPEN_WRITE
        };
        let file = open(&session, &temporary, flags, Some(0o600)).await?;
        let finished = verify_and_sync(&session, file.handle(), put, digest).await;
        file.close().await?.check_status()?;
        if finished
            .as_ref()
            .is_err_and(|error| error.code == ErrorCode::DigestMismatch)
        {
            remove(&session, &temporary).await?;
        }
        finished?;
        let there = identify_target(&session, &put.path).await?;
        put.replaced.check(&put.path, there)?;
        let (from, to) = (absolute_path(&temporary), absolute_path(&put.path));
        let renamed = if session.has_extension(RENAME_EXTENSION) {
            session
                .send_request(SftpRequestKind::Extended, |it| {
                    it.text(RENAME_EXTENSION).text(&from).text(&to)
                })
                .await
        } else {
            // Fails where there is a file already: it cannot be replaced at once.
            session
                .send_request(SftpRequestKind::Rename, |it| it.text(&from).text(&to))
                .await
        };
        renamed?.check_status()?;
        Ok(PutReceipt {
            extraction: put.extract,
            path: put.path.clone(),
            size: put.size,
            digest,
        })
    }
}

/// A file or directory that the server holds open for this process, closed with this value: a
/// server has not many of them, and a caller may give up at any time.
struct SftpHandle<'a> {
    session: &'a SftpSession,
    handle: Option<Vec<u8>>,
}

impl<'a> SftpHandle<'a> {
    fn new(session: &'a SftpSession, handle: Vec<u8>) -> Self {
        Self {
            session,
            handle: Some(handle),
        }
    }

    fn handle(&self) -> &[u8] {
        self.handle.as_deref().unwrap_or_default()
    }

    /// Closes it now; the reply tells whether all went well.
    fn close(mut self) -> BoxFuture<'static, Result<SftpReply>> {
        let handle = self.handle.take().unwrap_or_default();
        self.session
            .send_request(SftpRequestKind::Close, |it| it.bytes(&handle))
    }
}

impl Drop for SftpHandle<'_> {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            self.session.close(&handle);
        }
    }
}

/// How `ssh` is called: no questions, no masters that outlive it, no forwarding.
fn ssh_arguments(address: &str, setting: &HomeSetting) -> Option<Vec<String>> {
    let rest = address.strip_prefix("sftp://")?;
    let (host, port) = match rest.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port.parse::<u16>().ok()?)),
        _ => (rest, None),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
    if host.is_empty() || host.starts_with('-') || !host.chars().all(is_plain) {
        return None;
    }
    let mut arguments: Vec<String> = ["-x", "-a", "-T"].map(str::to_owned).into();
    let mut option = |text: String| arguments.extend(["-o".to_owned(), text]);
    for fixed in [
        "LogLevel=ERROR",
        "BatchMode=yes",
        "ConnectTimeout=15",
        "ServerAliveInterval=15",
        "ServerAliveCountMax=3",
        "ControlMaster=no",
        "ControlPath=none",
        "PermitLocalCommand=no",
        "ClearAllForwardings=yes",
    ] {
        option(fixed.to_owned());
    }
    if let Some(file) = &setting.known_hosts {
        option(format!("UserKnownHostsFile={}", file.display()));
        option("GlobalKnownHostsFile=none".to_owned());
    }
    if let Some(key) = &setting.key {
        option("IdentitiesOnly=yes".to_owned());
        arguments.extend(["-i".to_owned(), key.display().to_string()]);
    }
    if let Some(user) = &setting.user {
        arguments.extend(["-l".to_owned(), user.clone()]);
    }
    if let Some(port) = port {
        arguments.extend(["-p".to_owned(), port.to_string()]);
    }
    arguments.extend(["-s", "--", host, "sftp"].map(str::to_owned));
    Some(arguments)
}

async fn stat(session: &SftpSession, path: &str) -> Result<SftpAttributes> {
    let found = session.send_request(SftpRequestKind::Stat, |it| it.text(&absolute_path(path)));
    found.await?.attributes()
}

async fn identify_target(session: &SftpSession, path: &str) -> Result<Option<SourceIdentity>> {
    match stat(session, path).await {
        Ok(found) => Ok(Some(identity(found))),
        Err(error) if error.code == ErrorCode::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

async fn open<'a>(
    session: &'a SftpSession,
    path: &str,
    flags: u32,
    mode: Option<u32>,
) -> Result<SftpHandle<'a>> {
    let opened = session.send_request(SftpRequestKind::Open, |it| {
        it.text(&absolute_path(path)).number(flags).mode(mode)
    });
    Ok(SftpHandle::new(session, opened.await?.handle()?))
}

async fn remove(session: &SftpSession, path: &str) -> Result<()> {
    let removed = session.send_request(SftpRequestKind::Remove, |it| it.text(&absolute_path(path)));
    removed.await?.check_status()
}

/// Reads an upload back and makes it durable if it is right.
async fn verify_and_sync(
    session: &SftpSession,
    file: &[u8],
    put: &HomeUpload,
    digest: Digest,
) -> Result<()> {
    let mut hasher = DigestHasher::new();
    let mut at = 0;
    // One byte more than there should be, so that too many are noticed.
    let length = put.size + 1;
    let starts = (0..length).step_by(WINDOW_BYTES as usize);
    let windows = starts.map(|start| {
        let count = WINDOW_BYTES.min(length - start);
        read_chunks(session, file, start, count)
    });
    let mut windows = iter(windows).buffered(WINDOWS_MAX);
    while let Some(window) = windows.try_next().await? {
        at += window.len() as u64;
        hasher.update(&window);
    }
    if (at, hasher.digest()) != (put.size, digest) {
        let text = "the transfer is damaged; sending again";
        return Err(Error::new(ErrorCode::DigestMismatch, text));
    }
    let mode = Some(put.mode);
    let set = session.send_request(SftpRequestKind::Fsetstat, |it| it.bytes(file).mode(mode));
    set.await?.check_status()?;
    if session.has_extension(SYNC_EXTENSION) {
        let synced = session.send_request(SftpRequestKind::Extended, |it| {
            it.text(SYNC_EXTENSION).bytes(file)
        });
        synced.await?.check_status()?;
    }
    Ok(())
}

/// Up to `length` bytes from `offset`, fewer only at the end of the file.
async fn read_chunks(
    session: &SftpSession,
    file: &[u8],
    offset: u64,
    length: u64,
) -> Result<Vec<u8>> {
    let ask = |at: u64, count: u64| {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        session.send_request(SftpRequestKind::Read, |it| {
            it.bytes(file).long(at).number(count)
        })
    };
    let starts = (0..length).step_by(CHUNK_BYTES as usize);
    let wanted = starts.map(|start| (start, CHUNK_BYTES.min(length - start)));
    let replies = wanted.map(|(start, count)| async move {
        let mut piece = ask(offset + start, count).await?.data()?;
        // A server may send less than it could.
        while !piece.is_empty() && (piece.len() as u64) < count {
            let more = piece.len() as u64;
            let rest = ask(offset + start + more, count - more).await?.data()?;
            if rest.is_empty() {
                break;
            }
            piece.extend(rest);
        }
        Ok((count, piece))
    });
    let mut data = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
    for reply in join_all(replies).await {
        let (count, piece) = reply?;
        let is_short = (piece.len() as u64) < count;
        data.extend(piece);
        if is_short {
            break;
        }
    }
    Ok(data)
}

async fn list_names(session: &SftpSession, path: &str) -> Result<Vec<(String, SftpAttributes)>> {
    let opened = session.send_request(SftpRequestKind::Opendir, |it| it.text(&absolute_path(path)));
    let directory = SftpHandle::new(session, opened.await?.handle()?);
    let (mut all, mut is_empty) = (Vec::new(), true);
    loop {
        let page =
            session.send_request(SftpRequestKind::Readdir, |it| it.bytes(directory.handle()));
        let page = page.await?.names()?;
        if page.is_empty() {
            break;
        }
        is_empty = false;
        for (name, found) in page {
            let name = from_bytes(&name);
            if name != "." && name != ".." && !is_upload_name(&name) {
                all.push((name, found));
            }
        }
    }
    directory.close().await?.check_status()?;
    if is_empty {
        // Not even the directory itself: OpenSSH leaves out what it may not look at.
        stat(session, &child_path(path, ".")).await?;
    }
    Ok(all)
}

async fn link_entry(
    session: &SftpSession,
    top: &str,
    name: &str,
    found: SftpAttributes,
) -> Result<SourceEntry> {
    let place = absolute_path(&child_path(top, name));
    let read = session.send_request(SftpRequestKind::Readlink, |it| it.text(&place));
    let target = read.await?.names()?.pop().map(|(target, _)| target);
    let target = target.ok_or_else(|| {
        Error::new(
            ErrorCode::Malformed,
            format!("the link '{name}' has no target"),
        )
    })?;
    Ok(SourceEntry {
        path: name.to_owned(),
        kind: SourceKind::Symlink(target),
        identity: SourceIdentity {
            size: 0,
            ..identity(found)
        },
        mode: 0o777,
    })
}

fn entry(path: &str, found: SftpAttributes) -> Result<SourceEntry> {
    let kind = match found.mode & KIND_MASK {
        KIND_FILE => SourceKind::File,
        KIND_DIRECTORY => SourceKind::Directory,
        _ => {
            let text = "it is neither a file nor a directory";
            return Err(Error::new(ErrorCode::WrongState, text));
        }
    };
    let is_file = kind == SourceKind::File;
    let size = if is_file { found.size } else { 0 };
    Ok(SourceEntry {
        path: path.to_owned(),
        kind,
        identity: SourceIdentity {
            size,
            ..identity(found)
        },
        mode: found.mode & 0o7777,
    })
}

fn identity(found: SftpAttributes) -> SourceIdentity {
    SourceIdentity {
        size: found.size,
        mtime_ns: i64::from(found.mtime_s) * 1_000_000_000,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_names_never_become_ssh_options() {
        let of = |address: &str| ssh_arguments(address, &HomeSetting::default());
        let plain = of("sftp://h.example:22").expect("a host");
        assert_eq!(
            plain[plain.len() - 6..],
            ["-p", "22", "-s", "--", "h.example", "sftp"]
        );
        let six = of("sftp://[::1]").expect("a host");
        assert_eq!(six[six.len() - 4..], ["-s", "--", "::1", "sftp"]);
        for wrong in [
            "sftp://-oProxyCommand=x",
            "sftp://",
            "sftp://a b",
            "sftp://h:x",
        ] {
            assert_eq!(of(wrong), None, "{wrong}");
        }
    }
}
