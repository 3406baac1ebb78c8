//! One layer of a container image, over those before: its entries, and what it removes of theirs
//! (OCI image specification, "Image Layer Filesystem Changeset").

use std::collections::BTreeSet;
use std::io::Read;
use std::path::PathBuf;

use anyhow::{Context, Result};
use tar::{Archive, Entry, EntryType};

use super::target_tree::{TargetTree, split_path};

/// Begins the name of a file that stands for the removal of another.
const WHITEOUT: &[u8] = b".wh.";

/// The name of a file that stands for the removal of all that layers before have in its directory.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Begins the names of files that some tools keep for themselves.
const RESERVED: &[u8] = b".wh..wh.";

/// Unpacks the entries of a layer.
///
/// # Errors
/// It is no tar, a path leaves the image, or the disk refuses something.
pub(super) fn unpack_layer(layer: impl Read, tree: &mut TargetTree) -> Result<()> {
    let mut archive = Archive::new(layer);
    let mut unpacker = LayerUnpacker {
        tree,
        own: BTreeSet::new(),
    };
    for entry in archive.entries().context("a layer is no tar archive")? {
        unpacker.unpack(entry.context("a layer is no whole tar archive")?)?;
    }
    Ok(())
}

struct LayerUnpacker<'t> {
    tree: &'t mut TargetTree,
    /// Paths of this layer, with those above: it never removes its own.
    own: BTreeSet<PathBuf>,
}

impl LayerUnpacker<'_> {
    fn unpack<R: Read>(&mut self, mut entry: Entry<'_, R>) -> Result<()> {
        let kind = entry.header().entry_type();
        let is_metadata = matches!(kind, EntryType::XGlobalHeader | EntryType::XHeader);
        if is_metadata {
            return Ok(());
        }
        let path = entry.path_bytes().into_owned();
        let path = path.strip_suffix(b"/").unwrap_or(&path).to_vec();
        let parts = split_path(&path)?;
        let name = parts
            .last()
            .map_or(&b""[..], |name| name.as_encoded_bytes());
        if let Some(removed) = name.strip_prefix(WHITEOUT) {
            let above = &path[..path.len() - name.len()];
            return match name {
                OPAQUE => self.clear(above),
                name if name.starts_with(RESERVED) => Ok(()),
                _ => self.remove(above, removed),
            };
        }
        let whole: PathBuf = parts.iter().collect();
        self.own.extend(whole.ancestors().map(PathBuf::from));
        let (mode, modified) = (entry.header().mode()?, entry.header().mtime()?);
        let modified = i64::try_from(modified).ok();
        match kind {
            EntryType::Directory => self.tree.create_directory(&path, mode, modified),
            EntryType::Symlink => {
                let to = link_of(&entry)?;
                self.tree.create_link(&path, &to, modified)
            }
            EntryType::Link => {
                let to = link_of(&entry)?;
                self.tree.create_hard_link(&path, &to)
            }
            EntryType::Char | EntryType::Block | EntryType::Fifo => {
                self.tree.count_device();
                Ok(())
            }
            _ => self.tree.create_file(&path, mode, modified, &mut entry),
        }
    }

    /// Removes what layers before have at a path.
    fn remove(&mut self, above: &[u8], name: &[u8]) -> Result<()> {
        let path = [above, name].concat();
        let whole: PathBuf = split_path(&path)?.iter().collect();
        if self.own.contains(&whole) {
            return self.clear(&path);
        }
        self.tree.remove(&path)
    }

    /// Removes what layers before have in a directory.
    fn clear(&mut self, directory: &[u8]) -> Result<()> {
        let directory = directory.strip_suffix(b"/").unwrap_or(directory);
        for name in self.tree.names_in(directory)? {
            let prefix: &[u8] = match directory.is_empty() {
                true => b"",
                false => b"/",
            };
            let path = [directory, prefix, &name].concat();
            let whole: PathBuf = split_path(&path)?.iter().collect();
            match self.own.contains(&whole) {
                true => self.clear(&path)?,
                false => self.tree.remove(&path)?,
            }
        }
        Ok(())
    }
}

fn link_of<R: Read>(entry: &Entry<'_, R>) -> Result<Vec<u8>> {
    let link = entry.link_name_bytes();
    link.map(|it| it.into_owned())
        .with_context(|| format!("a link without a place: {}", shown(entry)))
}

fn shown<R: Read>(entry: &Entry<'_, R>) -> String {
    String::from_utf8_lossy(&entry.path_bytes()).into_owned()
}
