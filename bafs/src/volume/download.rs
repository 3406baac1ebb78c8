//! `bafs volume get`: files of a volume come to this machine whole, under a temporary name first.
//! What fails leaves nothing.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::Result;
use bafs_proto::message::{SourceEntry, SourceKind};
use bafs_proto::path::to_bytes;
use bafs_proto::{Error, ErrorCode};
use serde_json::json;

use super::connection::connect;
use super::file_list::{ListedEntry, VolumeFiles};
use crate::args::{UsageError, VolumeGetArgs};
use crate::failure::{ClassifiedError, FailureClass};
use crate::output::{Printer, is_stdout, print_bytes};

/// First part of a temporary name, beside the target.
const TEMPORARY_PREFIX: &str = ".bafs-get-";

/// What was copied.
#[derive(Debug, Default)]
struct CopiedAmount {
    files: u64,
    bytes: u64,
}

/// Runs the command.
pub(super) async fn get_files(args: VolumeGetArgs, output: Printer) -> Result<()> {
    let client = connect(&args.client)?;
    let (node, status) = client.find_volume(&args.volume).await?;
    let files = VolumeFiles::new(&client, node, &status);
    let path = args.path.trim_matches('/');
    let listed = files.list(path).await?;
    let top = listed.first().filter(|_| !path.is_empty());
    let (target, amount) = match top.map(|top| &top.entry.kind) {
        Some(SourceKind::File) if is_stdout(&args.target) => {
            copy_to_stdout(&files, &listed[0]).await?;
            return Ok(());
        }
        Some(SourceKind::File) => copy_file(&files, &listed[0], &args.target).await?,
        _ if is_stdout(&args.target) => {
            let text = format!("'{path}' is no file; name a target instead of '-'");
            return Err(UsageError::from_reason(text));
        }
        Some(SourceKind::Directory) => {
            copy_directory(&files, path, &listed[1..], &args.target).await?
        }
        None => copy_directory(&files, "", &listed, &args.target).await?,
        Some(SourceKind::Symlink(_) | SourceKind::UnreadableDirectory) => {
            let text = format!("'{path}' is neither a file nor a directory that can be read");
            return Err(Error::new(ErrorCode::WrongState, text).into());
        }
    };
    let CopiedAmount { files, bytes } = amount;
    output.print_result(
        &format!("{bytes} bytes of {files} files are at {}", target.display()),
        &json!({
            "volume": status.spec.id.to_string(),
            "path": path,
            "target": target.to_string_lossy(),
            "files": files,
            "bytes": bytes,
        }),
    )
}

async fn copy_to_stdout(files: &VolumeFiles<'_>, file: &ListedEntry) -> Result<()> {
    let mut offset = 0;
    while offset < file.entry.identity.size {
        let part = files.read(file, offset).await?;
        print_bytes(&part)?;
        offset += part.len() as u64;
    }
    Ok(())
}

/// Copies a file to a target, or below it if that is a directory.
async fn copy_file(
    files: &VolumeFiles<'_>,
    file: &ListedEntry,
    target: &Path,
) -> Result<(PathBuf, CopiedAmount)> {
    let path = &file.entry.path;
    let target = match target.is_dir() {
        true => target.join(local_path(path.rsplit('/').next().unwrap_or(path))),
        false => target.to_owned(),
    };
    let failed = |error: io::Error| ClassifiedError::of_local_file(&target, &error);
    let mut builder = tempfile::Builder::new();
    let draft = builder
        .prefix(TEMPORARY_PREFIX)
        .tempfile_in(parent_of(&target));
    let mut draft = draft.map_err(failed)?;
    let bytes = write_content(files, file, draft.as_file_mut(), &target).await?;
    draft.persist(&target).map_err(|e| failed(e.error))?;
    Ok((target, CopiedAmount { files: 1, bytes }))
}

/// Copies what is below a directory to a target that does not exist.
async fn copy_directory(
    files: &VolumeFiles<'_>,
    top: &str,
    below: &[ListedEntry],
    target: &Path,
) -> Result<(PathBuf, CopiedAmount)> {
    if target.symlink_metadata().is_ok() {
        let text = format!("{} exists already", target.display());
        return Err(ClassifiedError::from_message(FailureClass::Exists, text));
    }
    let failed = |error: io::Error| ClassifiedError::of_local_file(target, &error);
    let mut builder = tempfile::Builder::new();
    let draft = builder
        .prefix(TEMPORARY_PREFIX)
        .tempdir_in(parent_of(target));
    let draft = draft.map_err(failed)?;
    let mut amount = CopiedAmount::default();
    let (mut directories, mut modes) = (BTreeSet::from([String::new()]), Vec::new());
    for listed in below {
        let entry = &listed.entry;
        let path = entry.path.strip_prefix(top).unwrap_or(&entry.path);
        let path = path.trim_start_matches('/');
        // A node that tells lies must not lead out of the target, by a link.
        let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
        if !directories.contains(parent) {
            let text = format!("the listing has '{}' before its directory", entry.path);
            return Err(Error::new(ErrorCode::Malformed, text).into());
        }
        let place = draft.path().join(local_path(path));
        match &entry.kind {
            SourceKind::File => {
                let mut file = File::create_new(&place).map_err(failed)?;
                amount.bytes += write_content(files, listed, &mut file, target).await?;
                amount.files += 1;
            }
            SourceKind::Directory => {
                fs::create_dir(&place).map_err(failed)?;
                directories.insert(path.to_owned());
                modes.push((place, permissions(entry)));
            }
            SourceKind::Symlink(to) => {
                symlink(Path::new(OsStr::from_bytes(to)), &place).map_err(failed)?;
            }
            SourceKind::UnreadableDirectory => {
                let text = format!("'{}' cannot be read", entry.path);
                return Err(Error::new(ErrorCode::RightMissing, text).into());
            }
        }
    }
    for (place, mode) in modes.into_iter().rev() {
        fs::set_permissions(place, mode).map_err(failed)?;
    }
    fs::set_permissions(draft.path(), Permissions::from_mode(0o755)).map_err(failed)?;
    fs::rename(draft.path(), target).map_err(failed)?;
    // It has another name now.
    let _ = draft.keep();
    Ok((target.to_owned(), amount))
}

/// Writes a file's content, and sets its mode.
async fn write_content(
    files: &VolumeFiles<'_>,
    source: &ListedEntry,
    file: &mut File,
    target: &Path,
) -> Result<u64> {
    let failed = |error: io::Error| ClassifiedError::of_local_file(target, &error);
    let mut offset = 0;
    while offset < source.entry.identity.size {
        let part = files.read(source, offset).await?;
        file.write_all(&part).map_err(failed)?;
        offset += part.len() as u64;
    }
    file.set_permissions(permissions(&source.entry))
        .map_err(failed)?;
    Ok(offset)
}

fn permissions(entry: &SourceEntry) -> Permissions {
    Permissions::from_mode(entry.mode & 0o777)
}

fn local_path(path: &str) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(&to_bytes(path)))
}

fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}
