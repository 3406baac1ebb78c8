//! `bafs import image`: unpacks a container image or a squashfs into a directory that a home
//! exports, for jobs that have it as their root. It starts nothing of the image.
//!
//! The directory appears under its name when all of it is there and right, or not at all.

mod container_archive;
mod digest;
mod draft_directory;
mod layer;
mod squashfs;
mod target_tree;

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use bafs_proto::image::{IMAGE_DESCRIPTION_FILE, ImageDescription};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde_json::json;

use crate::args::ImportImageArgs;
use crate::output::{Printer, print_notice};
use crate::units::format_bytes;

use self::draft_directory::{DraftDirectory, run_until_stopped};
use self::target_tree::{TargetTree, UnpackCounts};

/// The tree in a draft; archives that are unpacked twice are beside it.
const ROOT_NAME: &str = "root";

/// How archives begin.
const SQUASHFS_MAGIC: [u8; 4] = *b"hsqs";
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Directories on which a job with this root has something of its own. Without them each job needs
/// a copy of the directory above, in memory.
const MOUNT_POINTS: [(&str, u32); 5] = [
    ("proc", 0o755),
    ("sys", 0o755),
    ("dev", 0o755),
    ("tmp", 0o1777),
    ("var/tmp", 0o1777),
];

/// Files in whose place a job sees those of its node.
const FILE_MOUNT_POINTS: [&str; 2] = ["etc/resolv.conf", "etc/hosts"];

/// Unpacks an image into a directory.
pub(crate) fn import_image(args: &ImportImageArgs, output: Printer) -> Result<()> {
    let ImportImageArgs {
        archive, directory, ..
    } = args;
    let target = resolve_target(directory)?;
    check_target(&target, args.replace)?;
    let parent = target.parent().unwrap_or_else(|| Path::new("/"));
    let prefix = format!(
        ".{}.import-",
        target.file_name().unwrap_or_default().to_string_lossy()
    );
    // On the same file system, so that it takes its name in one step. What fails goes with it.
    let draft = DraftDirectory::create(parent, &prefix)
        .with_context(|| format!("cannot write in {}", parent.display()))?;
    let (scratch, from) = (draft.path().to_owned(), archive.clone());
    let unpacked = run_until_stopped(&draft, move || unpack_image(&from, &scratch))?;
    let (description, counts) =
        unpacked.with_context(|| format!("cannot import {}", archive.display()))?;
    put_in_place(&draft.path().join(ROOT_NAME), &target, args.replace)
        .with_context(|| format!("cannot name the image {}", target.display()))?;
    print_summary(&target, &description, &counts, output)
}

/// Refuses a directory whose content would be lost.
fn check_target(target: &Path, is_replaced: bool) -> Result<()> {
    if target.symlink_metadata().is_err() {
        return Ok(());
    }
    ensure!(
        is_replaced,
        "{} exists; name a new directory, or give --replace to have it replaced at once when the \
         image is complete",
        target.display()
    );
    let is_empty = fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_none());
    ensure!(
        is_empty || target.join(IMAGE_DESCRIPTION_FILE).is_file(),
        "{} holds no image, so --replace does not delete it; name another directory, or remove \
         this one yourself",
        target.display()
    );
    Ok(())
}

fn unpack_image(archive: &Path, scratch: &Path) -> Result<(ImageDescription, UnpackCounts)> {
    let place = scratch.join(ROOT_NAME);
    fs::create_dir(&place)?;
    let mut tree = TargetTree::open(&place)?;
    let description = unpack(archive, &mut tree, scratch)?;
    finish_tree(&mut tree, &description)?;
    Ok((description, tree.finish()?))
}

/// The absolute path of the directory, whose parent exists.
fn resolve_target(directory: &Path) -> Result<PathBuf> {
    let absolute = std::path::absolute(directory)?;
    let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else {
        bail!("{} names no directory", directory.display());
    };
    let parent = parent
        .canonicalize()
        .with_context(|| format!("{} is no directory; create it first", parent.display()))?;
    Ok(parent.join(name))
}

/// Unpacks an archive of any kind. What must be unpacked twice goes through a file in `scratch`.
fn unpack(archive: &Path, tree: &mut TargetTree, scratch: &Path) -> Result<ImageDescription> {
    let mut file = File::open(archive)?;
    let mut magic = [0; 4];
    let read = file.read(&mut magic)?;
    file.seek(SeekFrom::Start(0))?;
    let magic = &magic[..read];
    if magic == SQUASHFS_MAGIC {
        return squashfs::unpack_squashfs(file, tree);
    }
    let is_packed = magic.starts_with(&GZIP_MAGIC) || magic.starts_with(&ZSTD_MAGIC);
    if is_packed {
        // Its parts are read in another order than they have.
        let path = scratch.join("archive.tar");
        std::io::copy(&mut decompress(file)?, &mut File::create_new(&path)?)?;
        file = File::open(path)?;
    }
    container_archive::unpack_container(file, tree)
}

/// The bytes of a stream that may be compressed.
fn decompress<'r>(mut packed: impl Read + 'r) -> Result<Box<dyn Read + 'r>> {
    let mut magic = [0; 4];
    let mut read = 0;
    while read < magic.len() {
        match packed.read(&mut magic[read..])? {
            0 => break,
            bytes => read += bytes,
        }
    }
    let start = std::io::Cursor::new(magic[..read].to_vec());
    let whole = start.chain(packed);
    Ok(match &magic[..read] {
        magic if magic.starts_with(&GZIP_MAGIC) => {
            Box::new(flate2::read::MultiGzDecoder::new(whole))
        }
        magic if magic.starts_with(&ZSTD_MAGIC) => Box::new(zstd::Decoder::new(whole)?),
        _ => Box::new(whole),
    })
}

/// Adds what jobs need that an image lacks, and what it says of itself.
fn finish_tree(tree: &mut TargetTree, description: &ImageDescription) -> Result<()> {
    for (path, mode) in MOUNT_POINTS {
        tree.ensure_directory(path.as_bytes(), mode)?;
    }
    for path in FILE_MOUNT_POINTS {
        tree.ensure_file(path.as_bytes())?;
    }
    let text = serde_json::to_vec_pretty(description)?;
    tree.create_file(
        IMAGE_DESCRIPTION_FILE.as_bytes(),
        0o644,
        None,
        &mut &text[..],
    )
}

/// Gives the directory its name in one step; an old one of that name goes.
fn put_in_place(place: &Path, target: &Path, is_replaced: bool) -> Result<()> {
    match renameat_with(CWD, place, CWD, target, RenameFlags::NOREPLACE) {
        Err(Errno::EXIST) if is_replaced => {
            // The old one is removed with what is around the place of the new one.
            Ok(renameat_with(
                CWD,
                place,
                CWD,
                target,
                RenameFlags::EXCHANGE,
            )?)
        }
        renamed => Ok(renamed?),
    }
}

fn print_summary(
    target: &Path,
    description: &ImageDescription,
    counts: &UnpackCounts,
    output: Printer,
) -> Result<()> {
    if counts.devices > 0 {
        print_notice(&format!(
            "{} devices of the image are left out: jobs see the /dev of their node",
            counts.devices
        ));
    }
    let text = format!(
        "{}: {} files, {}\nNext: in a workflow whose home has this directory, write\n  \
         volume image cache bafs://home/{} {}\n  root image JOB",
        target.display(),
        counts.files,
        format_bytes(counts.bytes.into()),
        target.file_name().unwrap_or_default().to_string_lossy(),
        format_bytes((counts.bytes + counts.bytes / 10).max(1 << 20).into()),
    );
    let result = json!({
        "directory": target,
        "files": counts.files,
        "directories": counts.directories,
        "bytes": counts.bytes,
        "devices_left_out": counts.devices,
        "digest": description.digest,
        "names": description.names,
    });
    output.print_result(&text, &result)
}

#[cfg(test)]
mod tests;
