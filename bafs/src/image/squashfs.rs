//! Images in one file that Linux mounts as it is. Their checksums are none: what is damaged is
//! mostly found when it is decompressed.

use std::fs::File;
use std::io::{BufReader, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;

use anyhow::{Context, Result};
use backhand::{FilesystemReader, InnerNode};
use bafs_proto::image::ImageDescription;

use super::digest::HashingReader;
use super::target_tree::TargetTree;

/// Unpacks a squashfs.
///
/// # Errors
/// It is damaged, compressed in a way that is not known here, or the disk refuses something.
pub(super) fn unpack_squashfs(mut file: File, tree: &mut TargetTree) -> Result<ImageDescription> {
    let digest = HashingReader::new(BufReader::new(&file)).finish()?;
    file.seek(SeekFrom::Start(0))?;
    let read = "a squashfs with gzip or zstd is needed: others unpack with `unsquashfs`";
    let image = FilesystemReader::from_reader(BufReader::new(file)).context(read)?;
    for node in image.files() {
        // All are below the top, which is `/`.
        let path = node.fullpath.as_os_str().as_bytes();
        let path = path.strip_prefix(b"/").unwrap_or(path);
        let mode = u32::from(node.header.permissions);
        let modified = Some(i64::from(node.header.mtime));
        match &node.inner {
            InnerNode::Dir(_) => tree.create_directory(path, mode, modified)?,
            InnerNode::Symlink(link) => {
                let to = link.link.as_os_str().as_bytes();
                tree.create_link(path, to, modified)?;
            }
            InnerNode::File(content) => {
                let content = image.file(content);
                let mut content = content.reader_checked().context(read)?;
                tree.create_file(path, mode, modified, &mut content)?;
            }
            InnerNode::CharacterDevice(_)
            | InnerNode::BlockDevice(_)
            | InnerNode::NamedPipe
            | InnerNode::Socket => tree.count_device(),
        }
    }
    Ok(ImageDescription {
        digest: digest.to_string(),
        ..ImageDescription::default()
    })
}
