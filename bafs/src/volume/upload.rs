//! `bafs volume put`: a file or directory of this machine goes into a scratch volume as a whole. It
//! is collected in a directory of its own there, made durable, and renamed to its place.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use bafs_proto::ids::InodeNo;
use bafs_proto::limits::BODY_BYTES_MAX;
use bafs_proto::path::{check_relative, from_bytes, to_bytes};
use bafs_proto::volume::VolumeKind;
use bytes::{Bytes, BytesMut};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt};

use super::connection::connect;
use super::writer_session::WriterSession;
use crate::args::{UsageError, VolumePutArgs};
use crate::failure::{ClassifiedError, FailureClass, class_of};
use crate::output::Printer;

/// Where a volume has what is not whole yet. The next command removes what an interrupted one left.
const STAGING_DIRECTORY: &str = ".bafs-put";

/// Permission bits of what comes from standard input.
const STDIN_MODE: u32 = 0o644;

/// Something of this machine that is put.
enum LocalEntry {
    File { mode: u32 },
    Directory { mode: u32 },
    Symlink(Vec<u8>),
}

/// What was put.
#[derive(Debug, Default)]
struct PutAmount {
    files: u64,
    bytes: u64,
}

/// Runs the command.
pub(super) async fn put_files(args: VolumePutArgs, output: Printer) -> Result<()> {
    let target = target_path(&args)?;
    let is_stdin = args.source == Path::new("-");
    let entries = match is_stdin {
        true => vec![(PathBuf::new(), LocalEntry::File { mode: STDIN_MODE })],
        false => find_entries(&args.source)?,
    };
    let client = connect(&args.client)?;
    let (node, status) = client.find_volume(&args.volume).await?;
    if !matches!(status.spec.kind, VolumeKind::Scratch { .. }) {
        return Err(ClassifiedError::with_remedy(
            FailureClass::WrongState,
            format!(
                "{} is a cache volume, which nobody writes",
                status.spec.name
            ),
            "name a scratch volume",
        ));
    }
    let wait = Duration::from_secs(args.wait);
    let volume = status.spec.id;
    let mut session = WriterSession::open(&client, &node, volume, wait).await?;
    let source = (!is_stdin).then_some(args.source.as_path());
    let put = put_at(&mut session, source, &entries, &target).await;
    let is_answered = |error: &anyhow::Error| class_of(error) != FailureClass::Unreachable;
    // What failed leaves nothing, if the node still answers. The next command looks again.
    if put.as_ref().err().is_none_or(is_answered) {
        let staging = STAGING_DIRECTORY.as_bytes();
        let cleaned = session.remove_all(InodeNo::ROOT, staging).await;
        if let (Ok(_), Err(error)) = (&put, &cleaned) {
            tracing::warn!(%error, "{STAGING_DIRECTORY} of the volume is left");
        }
        session.close().await;
    }
    let PutAmount { files, bytes } = put?;
    output.print_result(
        &format!(
            "{bytes} bytes of {files} files are at '{target}' of {}",
            status.spec.name
        ),
        &json!({
            "volume": volume.to_string(),
            "path": target,
            "files": files,
            "bytes": bytes,
        }),
    )
}

/// Where it goes: a path that ends with `/` is a directory, in which it keeps its name.
fn target_path(args: &VolumePutArgs) -> Result<String> {
    let own = || {
        let name = args.source.file_name().filter(|name| *name != "-");
        name.map(|name| from_bytes(name.as_bytes())).ok_or_else(|| {
            UsageError::from_reason(format!(
                "{} has no name of its own; give a path in the volume",
                args.source.display()
            ))
        })
    };
    let target = match args.path.as_deref() {
        None => own()?,
        Some(path) if path.ends_with('/') => {
            bafs_proto::path::join(path.trim_matches('/'), &own()?)
        }
        Some(path) => path.trim_start_matches('/').to_owned(),
    };
    check_relative(&target)?;
    let first = target.split('/').next().unwrap_or_default();
    if target.is_empty() || first == STAGING_DIRECTORY {
        let text = format!("'{target}' is no place for a file in a volume");
        return Err(UsageError::from_reason(text));
    }
    Ok(target)
}

/// What is at a place and below it, parents first.
fn find_entries(source: &Path) -> Result<Vec<(PathBuf, LocalEntry)>> {
    let mut found = Vec::new();
    let mut left = vec![PathBuf::new()];
    while let Some(relative) = left.pop() {
        let place = place_of(source, &relative);
        let failed = |error: io::Error| ClassifiedError::of_local_file(&place, &error);
        // The words may name a link; below them a link stays one.
        let metadata = match relative.as_os_str().is_empty() {
            true => fs::metadata(&place),
            false => fs::symlink_metadata(&place),
        };
        let metadata = metadata.map_err(failed)?;
        let mode = metadata.mode();
        let entry = if metadata.is_file() {
            LocalEntry::File { mode }
        } else if metadata.is_dir() {
            for below in fs::read_dir(&place).map_err(failed)? {
                left.push(relative.join(below.map_err(failed)?.file_name()));
            }
            LocalEntry::Directory { mode }
        } else if metadata.is_symlink() {
            let target = fs::read_link(&place).map_err(failed)?;
            LocalEntry::Symlink(target.as_os_str().as_bytes().to_vec())
        } else {
            let text = format!("{} is a special file", place.display());
            return Err(ClassifiedError::from_message(FailureClass::LocalFile, text));
        };
        found.push((relative, entry));
    }
    Ok(found)
}

fn place_of(source: &Path, relative: &Path) -> PathBuf {
    match relative.as_os_str().is_empty() {
        true => source.to_owned(),
        false => source.join(relative),
    }
}

/// Collects the entries, and renames the first one, which has the others below it, to its place.
async fn put_at(
    session: &mut WriterSession,
    source: Option<&Path>,
    entries: &[(PathBuf, LocalEntry)],
    target: &str,
) -> Result<PutAmount> {
    let is_directory = matches!(entries, [(_, LocalEntry::Directory { .. }), ..]);
    check_target(session, target, is_directory).await?;
    let staging_name = STAGING_DIRECTORY.as_bytes();
    session.remove_all(InodeNo::ROOT, staging_name).await?;
    let staging = session.make_directory(InodeNo::ROOT, staging_name).await?;
    let target = to_bytes(target);
    let mut names: Vec<&[u8]> = target.split(|byte| *byte == b'/').collect();
    let Some(name) = names.pop() else {
        return Ok(PutAmount::default());
    };
    let mut amount = PutAmount::default();
    let mut directories: BTreeMap<&Path, (InodeNo, u32)> = BTreeMap::new();
    for (relative, entry) in entries {
        let parent = relative.parent().and_then(|parent| directories.get(parent));
        let parent = parent.map_or(staging, |(ino, _)| *ino);
        let own = relative.file_name().map_or(name, OsStrExt::as_bytes);
        match entry {
            LocalEntry::Directory { mode } => {
                let made = session.make_directory(parent, own).await?;
                directories.insert(relative, (made, *mode));
            }
            LocalEntry::Symlink(to) => session.make_symlink(parent, own, to).await?,
            LocalEntry::File { mode } => {
                let place = source.map(|source| place_of(source, relative));
                amount.bytes += put_file(session, place.as_deref(), (parent, own), *mode).await?;
                amount.files += 1;
            }
        }
    }
    // Late, as it may close a directory to its own user: the top one cannot be moved then.
    let top = directories.remove(Path::new(""));
    for (ino, mode) in directories.values().rev() {
        session.sync_directory(*ino).await?;
        session.set_mode(*ino, *mode).await?;
    }
    if let Some((ino, _)) = top {
        session.sync_directory(ino).await?;
    }
    let directory = session.ensure_directory(&names).await?;
    session.rename((staging, name), (directory, name)).await?;
    session.sync_directory(directory).await?;
    if let Some((ino, mode)) = top {
        session.set_mode(ino, mode).await?;
    }
    Ok(amount)
}

/// Refuses a target that cannot be replaced, before anything is sent.
async fn check_target(session: &mut WriterSession, target: &str, is_directory: bool) -> Result<()> {
    let mut at = InodeNo::ROOT;
    let mut is_taken = false;
    for name in to_bytes(target).split(|byte| *byte == b'/') {
        let Some(found) = session.look_up(at, name).await? else {
            return Ok(());
        };
        at = found.ino;
        is_taken = is_directory || found.is_directory();
    }
    if is_taken {
        return Err(ClassifiedError::with_remedy(
            FailureClass::Exists,
            format!("'{target}' of the volume is a directory, or would become one"),
            "choose another path",
        ));
    }
    Ok(())
}

/// Copies a file of this machine, or standard input.
async fn put_file(
    session: &mut WriterSession,
    place: Option<&Path>,
    (parent, name): (InodeNo, &[u8]),
    mode: u32,
) -> Result<u64> {
    let shown = place
        .unwrap_or_else(|| Path::new("standard input"))
        .to_owned();
    let failed = |error: io::Error| ClassifiedError::of_local_file(&shown, &error);
    let mut reader: Box<dyn AsyncRead + Send + Unpin> = match place {
        Some(place) => Box::new(tokio::fs::File::open(place).await.map_err(failed)?),
        None => Box::new(tokio::io::stdin()),
    };
    let handle = session.create_file(parent, name, mode).await?;
    let mut offset = 0;
    loop {
        let part = read_part(&mut reader).await.map_err(failed)?;
        if part.is_empty() {
            break;
        }
        let length = part.len() as u64;
        session.write(name, handle, offset, part).await?;
        offset += length;
    }
    session.finish_file(name, handle).await?;
    Ok(offset)
}

/// As much as one call takes; nothing at the end.
async fn read_part(reader: &mut (dyn AsyncRead + Send + Unpin)) -> io::Result<Bytes> {
    let mut part = BytesMut::with_capacity(BODY_BYTES_MAX as usize);
    let mut limited = reader.take(BODY_BYTES_MAX.into());
    while limited.read_buf(&mut part).await? > 0 {}
    Ok(part.freeze())
}
