//! An older copy of what a volume is filled from: what it has of a file, piece by piece. What is
//! the same says the source by its digests; so whatever is here, nothing wrong comes of it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bafs_proto::hash::Digest;
use bafs_proto::message::SourceEntry;
use bafs_proto::replica::DataRange;
use bytes::Bytes;

use super::beneath::Beneath;
use super::listing::PIECE_BYTES;

/// The tree of an older copy.
#[derive(Debug)]
pub(super) struct Older(Beneath);

/// The beginning of a range as an older copy has it.
#[derive(Debug, Default)]
pub(super) struct Known {
    data: Vec<u8>,
    /// Of its pieces.
    pub(super) digests: Vec<Digest>,
}

impl Older {
    /// Takes up the tree; `None` when it is gone.
    pub(super) fn open(tree: &Path) -> Option<Self> {
        Beneath::open(tree).ok().map(Self)
    }

    /// The file at the same path, if there is one.
    pub(super) fn file(&self, path: &str) -> Option<File> {
        self.0.open_file(path).ok()
    }

    /// What is known of a small file. Blocks.
    pub(super) fn whole(&self, path: &str, entry: &SourceEntry) -> Known {
        let range = DataRange {
            offset: 0,
            length: entry.identity.size,
        };
        let file = self.file(path).filter(|_| range.length > 0);
        file.map_or_else(Known::default, |file| Known::read(&file, range))
    }
}

impl Known {
    /// Reads a range as far as it goes. Blocks.
    pub(super) fn read(file: &File, range: DataRange) -> Self {
        let mut data = vec![0; usize::try_from(range.length).unwrap_or(0)];
        let mut filled = 0;
        while filled < data.len() {
            match file.read_at(&mut data[filled..], range.offset + filled as u64) {
                Ok(0) => break,
                Ok(bytes) => filled += bytes,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        data.truncate(filled);
        let digests = data.chunks(PIECE_BYTES as usize).map(Digest::of).collect();
        Self { data, digests }
    }

    fn piece(&self, number: usize) -> &[u8] {
        let mut pieces = self.data.chunks(PIECE_BYTES as usize);
        pieces.nth(number).unwrap_or_default()
    }
}

/// Ranges of so many bytes one after the other, from the `digests` of all their pieces, what is
/// known of each, and the pieces of which nothing is. `None` when it does not fit together.
pub(super) fn join<'a>(
    ranges: impl Iterator<Item = (u64, &'a Known)>,
    digests: &[Digest],
    unknown: &Bytes,
) -> Option<Bytes> {
    let (mut pieces, mut digests, mut rest) = (Vec::new(), digests.iter(), unknown.as_ref());
    let mut is_all_unknown = true;
    for (length, known) in ranges {
        let mut left = usize::try_from(length).ok()?;
        let mut number = 0;
        while left > 0 {
            let (size, digest) = (left.min(PIECE_BYTES as usize), digests.next()?);
            if known.digests.get(number) == Some(digest) {
                let piece = known.piece(number);
                pieces.push(piece);
                left = left.checked_sub(piece.len())?;
                is_all_unknown = false;
            } else {
                let (own, after) = rest.split_at_checked(size)?;
                if Digest::of(own) != *digest {
                    return None;
                }
                pieces.push(own);
                (rest, left) = (after, left - size);
            }
            number += 1;
        }
    }
    let fits = rest.is_empty() && digests.next().is_none();
    fits.then(|| match is_all_unknown {
        true => unknown.clone(),
        false => pieces.concat().into(),
    })
}

/// The digests of the pieces of ranges that follow each other in `data`, and the pieces that the
/// asker does not know.
pub(super) fn split<'a>(
    data: Vec<u8>,
    ranges: impl Iterator<Item = (usize, &'a [Digest])>,
) -> (Vec<Digest>, Bytes) {
    let (mut digests, mut rest, mut unknown) = (Vec::new(), data.as_slice(), Vec::new());
    let mut is_all_unknown = true;
    for (length, known) in ranges {
        let (own, after) = rest.split_at(length);
        rest = after;
        for (number, piece) in own.chunks(PIECE_BYTES as usize).enumerate() {
            let digest = Digest::of(piece);
            match known.get(number) == Some(&digest) {
                true => is_all_unknown = false,
                false => unknown.push(piece),
            }
            digests.push(digest);
        }
    }
    // Without an older copy the data go as they are.
    let body = match is_all_unknown {
        true => data.into(),
        false => unknown.concat().into(),
    };
    (digests, body)
}
