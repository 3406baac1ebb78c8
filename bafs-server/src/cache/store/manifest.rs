//! The manifest of a cache volume: every entry of its source, as it was when it was listed.
//! Fetches no data of files.

use std::path::Path;
use std::slice;

use bafs_proto::hash::{Digest, DigestHasher};
use bafs_proto::ids::{BlockIndex, FileIndex, ServerId};
use bafs_proto::limits::{MANIFEST_ENTRIES_MAX, PAGE_ENTRIES_MAX};
use bafs_proto::message::{
    ListSource, ManifestPage, PeerCheck, SourceEntry, SourceIdentity, SourceKind,
};
use bafs_proto::path::{check_relative, join};
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result, codec};

use crate::cache::errors::disk_fault;
use crate::home_clients::{HomeAddress, HomeClients};
use crate::source::{PAGE_BYTES_MAX, entry_bytes};

/// Where a cache volume's bytes come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HomeSource {
    /// Address of the home: that of a home server, or a URL of scheme and host.
    pub(crate) address: String,
    /// Path below its export.
    pub(crate) path: String,
    /// Which home server that is; `None` for any server at the address.
    pub(crate) id: Option<ServerId>,
}

impl HomeSource {
    fn at(&self) -> HomeAddress<'_> {
        HomeAddress {
            address: &self.address,
            id: self.id,
        }
    }
}

/// A source as it was when it was listed.
#[derive(Debug)]
pub(crate) struct Manifest {
    source: HomeSource,
    block_bytes: u32,
    /// The directory at the top of the volume.
    top: SourceEntry,
    entries: Vec<SourceEntry>,
    /// The source is itself a file, which is shown under its base name.
    is_file: bool,
    digest: Digest,
}

impl Manifest {
    /// Lists a source. The warnings name its entries that the volume cannot show as they are.
    ///
    /// # Errors
    /// What home answers; `Malformed` when its listing is out of order or too long.
    pub(crate) async fn list(
        homes: &HomeClients,
        source: HomeSource,
        block_bytes: u32,
        token: &Token,
        deadline: Deadline,
    ) -> Result<(Self, SourceWarnings)> {
        let mut listed: Vec<SourceEntry> = Vec::new();
        let mut warnings = SourceWarnings::default();
        loop {
            let after = listed.last().map(|entry| entry.path.clone());
            let call = ListSource {
                path: source.path.clone(),
                after,
            };
            let page = homes.list(source.at(), token, call, deadline).await?;
            if page.has_more && page.entries.is_empty() {
                return Err(bad_listing(&source, "has an empty page in the middle"));
            }
            warnings.extend(page.warnings);
            for entry in page.entries {
                check_relative(&entry.path)?;
                if listed
                    .last()
                    .is_some_and(|last| !comes_after(&entry.path, &last.path))
                {
                    return Err(bad_listing(&source, "is not in path order"));
                }
                listed.push(entry);
            }
            if listed.len() > MANIFEST_ENTRIES_MAX {
                return Err(bad_listing(
                    &source,
                    "has more files than a cache volume may have",
                ));
            }
            if !page.has_more {
                break;
            }
        }
        Ok((Self::of(source, block_bytes, listed)?, warnings))
    }

    fn of(source: HomeSource, block_bytes: u32, listed: Vec<SourceEntry>) -> Result<Self> {
        let is_file = matches!(&listed[..], [only] if only.path.is_empty()
            && only.kind == SourceKind::File);
        let mut entries = listed;
        if is_file {
            let name = source.path.rsplit('/').next().unwrap_or_default();
            entries[0].path = name.to_owned();
        }
        // The source itself is the top of the volume, not an entry in it.
        let top = match entries.first() {
            Some(only) if is_file => top_of_file(only),
            Some(first) if first.path.is_empty() && first.kind == SourceKind::Directory => {
                entries.remove(0)
            }
            _ => return Err(bad_listing(&source, "begins with no file or directory")),
        };
        let mut top = SourceEntry {
            path: String::new(),
            ..top
        };
        for entry in entries.iter_mut().chain([&mut top]) {
            if entry.kind == SourceKind::Directory {
                // A directory's size differs between file systems and says nothing.
                entry.identity.size = 0;
            }
        }
        let digest = digest_of(&source, block_bytes, is_file, &top, &entries)?;
        Ok(Self {
            source,
            block_bytes,
            top,
            entries,
            is_file,
            digest,
        })
    }

    /// Digest of everything in it: equal on all servers that show the same state of the source.
    pub(crate) fn digest(&self) -> Digest {
        self.digest
    }

    /// Block size in bytes.
    pub(crate) fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// All entries in path order.
    pub(crate) fn entries(&self) -> &[SourceEntry] {
        &self.entries
    }

    /// Bytes of all its files.
    pub(crate) fn source_bytes(&self) -> u64 {
        self.entries.iter().map(data_bytes).sum()
    }

    /// Whether the source is itself a file.
    pub(crate) fn is_file(&self) -> bool {
        self.is_file
    }

    /// The home that has it.
    pub(crate) fn home(&self) -> HomeAddress<'_> {
        self.source.at()
    }

    /// A regular file of the manifest.
    ///
    /// # Errors
    /// `Malformed` when there is none at this place.
    pub(crate) fn file(&self, file: FileIndex) -> Result<&SourceEntry> {
        let entry = self.entries.get(file.0 as usize);
        entry
            .filter(|entry| entry.kind == SourceKind::File)
            .ok_or_else(|| {
                Error::new(
                    ErrorCode::Malformed,
                    format!("the manifest has no file {file}"),
                )
            })
    }

    /// Path below the export of its home that was listed.
    pub(crate) fn home_top(&self) -> &str {
        &self.source.path
    }

    /// Path of a file below the export of its home.
    pub(crate) fn home_path(&self, entry: &SourceEntry) -> String {
        match &self.source.path {
            path if self.is_file => path.clone(),
            path => join(path, &entry.path),
        }
    }

    /// Number of blocks of a file.
    pub(crate) fn blocks_of(&self, entry: &SourceEntry) -> u64 {
        entry.identity.size.div_ceil(u64::from(self.block_bytes))
    }

    /// Length of a block of a file, in bytes; 0 behind its end.
    pub(crate) fn length_of(&self, entry: &SourceEntry, block: BlockIndex) -> u32 {
        let start = block.0.saturating_mul(u64::from(self.block_bytes));
        let left = entry.identity.size.saturating_sub(start);
        u32::try_from(left)
            .unwrap_or(u32::MAX)
            .min(self.block_bytes)
    }

    /// The entries from `first` on, as many as fit a header.
    pub(crate) fn page(&self, first: FileIndex, peer_check: PeerCheck) -> ManifestPage {
        let start = (first.0 as usize).min(self.entries.len());
        let length = page_length(&self.entries[start..]);
        ManifestPage {
            manifest: self.digest,
            block_bytes: self.block_bytes,
            peer_check,
            root: self.top.clone(),
            entries: self.entries[start..start + length].to_vec(),
            has_more: start + length < self.entries.len(),
        }
    }

    /// Writes it to a file and makes that durable.
    ///
    /// # Errors
    /// `ServerFault` when the disk fails.
    pub(crate) fn save(&self, path: &Path) -> Result<()> {
        let mut bytes = Vec::new();
        for page in [slice::from_ref(&self.top)]
            .into_iter()
            .chain(pages(&self.entries))
        {
            let encoded = codec::encode(&page.to_vec())?;
            bytes.extend((encoded.len() as u32).to_le_bytes());
            bytes.extend(encoded);
        }
        let written = std::fs::File::create(path).and_then(|mut file| {
            std::io::Write::write_all(&mut file, &bytes)?;
            file.sync_all()?;
            std::fs::File::open(path.parent().unwrap_or(path))?.sync_all()
        });
        written.map_err(|e| disk_fault("write the manifest", path, e))
    }

    /// Reads what [`Manifest::save`] wrote and compares it with its digest.
    ///
    /// # Errors
    /// `ServerFault` when it cannot be read, `DigestMismatch` or `Malformed` when it is damaged.
    pub(crate) fn load(
        path: &Path,
        source: HomeSource,
        block_bytes: u32,
        is_file: bool,
        digest: Digest,
    ) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|e| disk_fault("read the manifest", path, e))?;
        let damaged = || Error::new(ErrorCode::Malformed, "the manifest on disk is damaged");
        let mut entries = Vec::new();
        let mut rest = &bytes[..];
        while let Some((length, behind)) = rest.split_first_chunk::<4>() {
            let length = u32::from_le_bytes(*length) as usize;
            let (page, behind) = behind.split_at_checked(length).ok_or_else(damaged)?;
            entries.extend(codec::decode::<Vec<SourceEntry>>(page)?);
            rest = behind;
        }
        if !rest.is_empty() {
            return Err(damaged());
        }
        if entries.is_empty() {
            return Err(damaged());
        }
        let top = entries.remove(0);
        if digest_of(&source, block_bytes, is_file, &top, &entries)? != digest {
            let text = "the manifest on disk does not match its digest";
            return Err(Error::new(ErrorCode::DigestMismatch, text));
        }
        Ok(Self {
            source,
            block_bytes,
            top,
            entries,
            is_file,
            digest,
        })
    }
}

/// The directory around a source that is a file: with the time and the permissions of the file.
fn top_of_file(file: &SourceEntry) -> SourceEntry {
    SourceEntry {
        path: String::new(),
        kind: SourceKind::Directory,
        identity: SourceIdentity {
            size: 0,
            ctime_ns: 0,
            ..file.identity
        },
        mode: (file.mode & 0o666) | ((file.mode & 0o444) >> 2),
    }
}

/// Whether `path` follows `before` in path order: components compared one by one.
fn comes_after(path: &str, before: &str) -> bool {
    // The source itself, the empty path, has no component and comes first.
    !path.is_empty() && (before.is_empty() || path.split('/').gt(before.split('/')))
}

fn page_length(entries: &[SourceEntry]) -> usize {
    let mut bytes = 0;
    let fitting = entries.iter().take(PAGE_ENTRIES_MAX).take_while(|entry| {
        bytes += entry_bytes(entry);
        bytes <= PAGE_BYTES_MAX
    });
    fitting.count()
}

fn pages(entries: &[SourceEntry]) -> impl Iterator<Item = &[SourceEntry]> {
    let mut rest = entries;
    std::iter::from_fn(move || {
        let (page, behind) = rest.split_at(page_length(rest));
        rest = behind;
        (!page.is_empty()).then_some(page)
    })
}

fn digest_of(
    source: &HomeSource,
    block_bytes: u32,
    is_file: bool,
    top: &SourceEntry,
    entries: &[SourceEntry],
) -> Result<Digest> {
    let mut hasher = DigestHasher::new();
    // The blocks also depend on these. All members of a cache must agree on them, even if some were
    // made after the home moved.
    let home = source.id.ok_or(&source.address);
    hasher.update(&codec::encode(&(home, &source.path, block_bytes, is_file))?);
    hasher.update(&codec::encode(top)?);
    for page in pages(entries) {
        hasher.update(&codec::encode(&page.to_vec())?);
    }
    Ok(hasher.digest())
}

fn bad_listing(source: &HomeSource, why: &str) -> Error {
    let text = format!(
        "the listing of '{}' from home {} {why}",
        source.path, source.address
    );
    Error::new(ErrorCode::Malformed, text)
}

/// Bytes of an entry that are stored as blocks.
pub(crate) fn data_bytes(entry: &SourceEntry) -> u64 {
    match entry.kind {
        SourceKind::File => entry.identity.size,
        SourceKind::Directory | SourceKind::UnreadableDirectory | SourceKind::Symlink(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::message::{Reply, ReplyHead};

    use super::*;

    fn entry(path: &str, kind: SourceKind, size: u64) -> SourceEntry {
        let identity = SourceIdentity {
            size,
            mtime_ns: 5,
            ctime_ns: 7,
        };
        SourceEntry {
            path: path.to_owned(),
            kind,
            identity,
            mode: 0o644,
        }
    }

    /// A listing: the source itself comes first.
    fn listed(entries: &[SourceEntry]) -> Vec<SourceEntry> {
        [&[entry("", SourceKind::Directory, 4096)], entries].concat()
    }

    fn source(path: &str) -> HomeSource {
        HomeSource {
            address: "home:1".to_owned(),
            path: path.to_owned(),
            id: Some(ServerId(1)),
        }
    }

    #[test]
    fn manifest_pages_fit_a_header_and_join_losslessly() {
        let kind = SourceKind::Symlink(vec![b'x'; 4000]);
        let path = |n: u32| format!("{n:05}{}", "y".repeat(4000));
        let entries: Vec<_> = (0..1_000)
            .map(|n| entry(&path(n), kind.clone(), 0))
            .collect();
        let manifest = Manifest::of(source("a"), 65_536, listed(&entries)).expect("manifest");
        let mut joined = Vec::new();
        loop {
            let page = manifest.page(FileIndex(joined.len() as u32), PeerCheck::Home);
            let more = page.has_more;
            assert!(!page.entries.is_empty());
            joined.extend(page.entries.clone());
            let head: ReplyHead = Ok(Reply::ReadManifest(page));
            assert!(codec::encode(&head).is_ok());
            if !more {
                break;
            }
        }
        assert_eq!(joined, entries);
        assert_eq!(
            manifest.page(FileIndex(u32::MAX), PeerCheck::Home).entries,
            []
        );
    }

    #[test]
    fn a_damaged_manifest_is_not_loaded() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("manifest");
        let entries = vec![
            entry("a", SourceKind::File, 9),
            entry("b", SourceKind::Directory, 7),
        ];
        let manifest = Manifest::of(source("s"), 4096, listed(&entries)).expect("manifest");
        manifest.save(&path).expect("save");
        let load = || Manifest::load(&path, source("s"), 4096, false, manifest.digest());
        assert_eq!(load().expect("load").entries(), manifest.entries());
        assert_eq!(load().expect("load").top, manifest.top);
        let bytes = std::fs::read(&path).expect("read");
        for place in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[place] ^= 1;
            std::fs::write(&path, &damaged).expect("write");
            assert!(load().is_err(), "byte {place}");
            std::fs::write(&path, &bytes[..place]).expect("write");
            assert!(load().is_err(), "cut at {place}");
        }
    }

    #[test]
    fn the_digest_covers_source_block_size_and_entries() {
        let entries = vec![entry("a", SourceKind::File, 9)];
        let digest = |source: HomeSource, block_bytes, entries: &[SourceEntry]| {
            Manifest::of(source, block_bytes, listed(entries))
                .expect("manifest")
                .digest()
        };
        let base = digest(source("s"), 4096, &entries);
        assert_ne!(base, digest(source("t"), 4096, &entries));
        assert_ne!(base, digest(source("s"), 8192, &entries));
        let at = |address: &str, id| HomeSource {
            address: address.to_owned(),
            id,
            ..source("s")
        };
        let moved = digest(at("home:2", Some(ServerId(1))), 4096, &entries);
        assert_eq!(base, moved, "the same home at another address");
        let other = digest(at("home:1", Some(ServerId(2))), 4096, &entries);
        assert_ne!(base, other, "another home at this address");
        let unknown = |address| digest(at(address, None), 4096, &entries);
        assert_ne!(unknown("home:1"), unknown("home:2"));
        assert_ne!(
            base,
            digest(source("s"), 4096, &[entry("a", SourceKind::File, 8)])
        );
    }

    #[test]
    fn a_single_file_has_its_base_name() {
        let listed = vec![entry("", SourceKind::File, 9)];
        let manifest = Manifest::of(source("db/nr.psq"), 4096, listed).expect("manifest");
        assert_eq!(manifest.entries()[0].path, "nr.psq");
        assert_eq!(manifest.home_path(&manifest.entries()[0]), "db/nr.psq");
    }

    #[test]
    fn the_root_entry_has_the_source_attributes() {
        let mut top = entry("", SourceKind::Directory, 4096);
        (top.mode, top.identity.mtime_ns) = (0o1750, 77);
        let of = |listed| Manifest::of(source("d/f"), 4096, listed).expect("manifest");
        let shown = of(vec![top]);
        let page = shown.page(FileIndex(0), PeerCheck::Home);
        assert_eq!((page.root.mode, page.root.identity.mtime_ns), (0o1750, 77));
        assert_ne!(shown.digest(), of(listed(&[])).digest(), "it is compared");
        let file = of(vec![entry("", SourceKind::File, 9)]).page(FileIndex(0), PeerCheck::Home);
        assert_eq!((file.root.mode, file.root.identity.mtime_ns), (0o755, 5));
        assert_eq!(file.root.kind, SourceKind::Directory);
        let nothing = Manifest::of(source("d"), 4096, Vec::new());
        assert_eq!(nothing.expect_err("no top").code, ErrorCode::Malformed);
    }

    #[test]
    fn the_last_block_has_the_remaining_length() {
        for (size, blocks, last) in [(0, 0, 0), (1, 1, 1), (4096, 1, 4096), (4097, 2, 1)] {
            let listed = listed(&[entry("f", SourceKind::File, size)]);
            let manifest = Manifest::of(source(""), 4096, listed).expect("manifest");
            let file = &manifest.entries()[0];
            assert_eq!(manifest.blocks_of(file), blocks);
            assert_eq!(
                manifest.length_of(file, BlockIndex(blocks.saturating_sub(1))),
                last
            );
            assert_eq!(manifest.length_of(file, BlockIndex(blocks)), 0);
            assert_eq!(manifest.length_of(file, BlockIndex(u64::MAX)), 0);
        }
    }

    #[test]
    fn path_order_compares_components() {
        assert!(comes_after("a/b", "a"));
        assert!(comes_after("a.b", "a/b"));
        assert!(comes_after("\u{1}", ""));
        assert!(!comes_after("a", "a"));
    }
}
