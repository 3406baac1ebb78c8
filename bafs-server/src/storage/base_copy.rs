//! An older copy of what a volume is filled from: what it has of a file, piece by piece. What is
//! the same says the source by its digests; so whatever is here, nothing wrong comes of it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bafs_proto::hash::Digest;
use bafs_proto::message::SourceEntry;
use bafs_proto::replica::DataRange;
use bytes::Bytes;

use super::confined_directory::ConfinedDirectory;
use super::tree_listing::CHUNK_BYTES;

/// The tree of an older copy.
#[derive(Debug)]
pub(super) struct BaseCopy(ConfinedDirectory);

/// The beginning of a range as an older copy has it.
#[derive(Debug, Default)]
pub(super) struct KnownRange {
    data: Vec<u8>,
    /// Of its pieces.
    pub(super) digests: Vec<Digest>,
}

impl BaseCopy {
    /// Takes up the tree; `None` when it is gone.
    pub(super) fn open(tree: &Path) -> Option<Self> {
        ConfinedDirectory::open(tree).ok().map(Self)
    }

    /// What is known of a range of the file at the same path. The file is not kept open: it may be
    /// deleted meanwhile, and its room given to others. Blocks.
    pub(super) fn read_range(&self, path: &str, range: DataRange) -> KnownRange {
        let file = self.0.open_file(path);
        file.map_or_else(
            |_| KnownRange::default(),
            |file| KnownRange::read(&file, range),
        )
    }

    /// What is known of a small file. Blocks.
    pub(super) fn read_whole_file(&self, path: &str, entry: &SourceEntry) -> KnownRange {
        let length = entry.identity.size;
        match length {
            0 => KnownRange::default(),
            _ => self.read_range(path, DataRange { offset: 0, length }),
        }
    }
}

impl KnownRange {
    /// Reads a range as far as it goes. Blocks.
    fn read(file: &File, range: DataRange) -> Self {
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
        let digests = data.chunks(CHUNK_BYTES as usize).map(Digest::of).collect();
        Self { data, digests }
    }

    fn chunk(&self, number: usize) -> &[u8] {
        let mut pieces = self.data.chunks(CHUNK_BYTES as usize);
        pieces.nth(number).unwrap_or_default()
    }
}

/// Ranges of so many bytes one after the other, from the `digests` of all their pieces, what is
/// known of each, and the pieces of which nothing is. `None` when it does not fit together.
pub(super) fn join_ranges<'a>(
    ranges: impl Iterator<Item = (u64, &'a KnownRange)>,
    digests: &[Digest],
    unknown: &Bytes,
) -> Option<Bytes> {
    let (mut pieces, mut digests, mut rest) = (Vec::new(), digests.iter(), unknown.as_ref());
    let mut is_all_unknown = true;
    for (length, known) in ranges {
        let mut left = usize::try_from(length).ok()?;
        let mut number = 0;
        while left > 0 {
            let (size, digest) = (left.min(CHUNK_BYTES as usize), digests.next()?);
            if known.digests.get(number) == Some(digest) {
                let piece = known.chunk(number);
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
pub(super) fn split_unknown<'a>(
    data: Vec<u8>,
    ranges: impl Iterator<Item = (usize, &'a [Digest])>,
) -> (Vec<Digest>, Bytes) {
    let (mut digests, mut rest, mut unknown) = (Vec::new(), data.as_slice(), Vec::new());
    let mut is_all_unknown = true;
    for (length, known) in ranges {
        let (own, after) = rest.split_at(length);
        rest = after;
        for (number, piece) in own.chunks(CHUNK_BYTES as usize).enumerate() {
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

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: usize = CHUNK_BYTES as usize;

    fn known(data: &[u8]) -> KnownRange {
        KnownRange {
            data: data.to_vec(),
            digests: data.chunks(PIECE).map(Digest::of).collect(),
        }
    }

    /// Two and a half pieces, and one that has another byte in its second piece and is shorter.
    fn source_and_older() -> (Vec<u8>, Vec<u8>) {
        let source: Vec<u8> = (0..PIECE * 5 / 2).map(|at| (at / 251) as u8).collect();
        let mut older = source[..PIECE * 2].to_vec();
        older[PIECE + 7] ^= 1;
        (source, older)
    }

    #[test]
    fn known_chunks_are_not_transferred() {
        let (source, older) = source_and_older();
        for (own, travels) in [(known(&[]), source.len()), (known(&older), PIECE * 3 / 2)] {
            let ranges = [(source.len(), own.digests.as_slice())];
            let (digests, unknown) = split_unknown(source.clone(), ranges.into_iter());
            assert_eq!(unknown.len(), travels);
            let ranges = [(source.len() as u64, &own)];
            let joined = join_ranges(ranges.into_iter(), &digests, &unknown).unwrap();
            assert_eq!(joined, source);
        }
    }

    #[test]
    fn mismatched_replies_are_rejected() {
        let (source, older) = source_and_older();
        let (own, length) = (known(&older), source.len() as u64);
        let ranges = [(source.len(), own.digests.as_slice())];
        let (digests, unknown) = split_unknown(source, ranges.into_iter());
        let is_refused = |digests: &[Digest], unknown: &[u8]| {
            let unknown = Bytes::copy_from_slice(unknown);
            join_ranges([(length, &own)].into_iter(), digests, &unknown).is_none()
        };
        assert!(!is_refused(&digests, &unknown), "it fits as it is");
        let last = digests.len() - 1;
        assert!(
            is_refused(&digests[..last], &unknown),
            "a digest is missing"
        );
        let more = [digests.as_slice(), &digests[..1]].concat();
        assert!(is_refused(&more, &unknown), "a digest too many");
        assert!(is_refused(&digests, &unknown[1..]), "a byte is missing");
        assert!(
            is_refused(&digests, &[&unknown[..], b"x"].concat()),
            "a byte too many"
        );
        let mut damaged = unknown.to_vec();
        damaged[3] ^= 1;
        assert!(is_refused(&digests, &damaged), "not what its digest says");
        let mut swapped = digests.clone();
        swapped[last] = digests[0];
        assert!(
            is_refused(&swapped, &unknown),
            "a piece that came is said to be another"
        );
    }

    #[test]
    fn an_overlong_known_chunk_is_rejected() {
        let own = known(&[7; PIECE]);
        let joined = join_ranges([(10, &own)].into_iter(), &own.digests, &Bytes::new());
        assert_eq!(joined, None);
    }

    #[test]
    fn surplus_digests_are_ignored() {
        let garbage = vec![Digest::of(b"garbage"); 9];
        let ranges = [(10, garbage.as_slice())];
        let (digests, unknown) = split_unknown(vec![1; 10], ranges.into_iter());
        assert_eq!((digests.len(), unknown.len()), (1, 10));
    }
}
