//! Digests of data, and the only user of BLAKE3.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A BLAKE3 digest of some bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// In answers to servers: a block that is not to be had there. No bytes have this digest.
    pub const ABSENT: Self = Self([0; 32]);

    /// In answers to servers: a block that is not to be had there, but was read from home by that
    /// server as its primary. No bytes have this digest.
    pub const EVICTED: Self = Self([0xff; 32]);

    /// Whether it stands for a block that a server does not have.
    pub fn is_of_no_bytes(&self) -> bool {
        [Self::ABSENT, Self::EVICTED].contains(self)
    }

    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0 {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// Digest of data that comes in pieces.
#[derive(Default)]
pub struct DigestHasher(blake3::Hasher);

impl DigestHasher {
    /// A hasher that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next piece.
    pub fn update(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.update(bytes);
        self
    }

    /// The digest of all pieces so far.
    pub fn digest(&self) -> Digest {
        Digest(*self.0.finalize().as_bytes())
    }
}

impl fmt::Debug for DigestHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DigestHasher")
    }
}

/// A secret that makes digests which nobody makes without it.
#[derive(Clone)]
pub(crate) struct DigestKey([u8; 32]);

impl DigestKey {
    /// The key for `purpose` that follows from a secret and where it is used. Other purposes and
    /// other places have keys from which this one cannot be guessed.
    pub(crate) fn derive(purpose: &str, secret: &[u8], place: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(purpose);
        hasher.update(&(secret.len() as u64).to_le_bytes());
        hasher.update(secret).update(place);
        Self(*hasher.finalize().as_bytes())
    }

    /// The digest of `bytes` under this key.
    pub(crate) fn digest(&self, bytes: &[u8]) -> Digest {
        Digest(*blake3::keyed_hash(&self.0, bytes).as_bytes())
    }

    /// Whether `digest` is [`Self::digest`] of `bytes`, in a time that does not tell where it
    /// differs.
    pub(crate) fn is_digest_of(&self, digest: &[u8], bytes: &[u8]) -> bool {
        let made = blake3::keyed_hash(&self.0, bytes);
        blake3::Hash::from_slice(digest).is_ok_and(|digest| digest == made)
    }
}

/// A 64-bit weight that is the same on every machine for the same parts: the score of rendezvous
/// hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998).
pub fn rendezvous_score(parts: &[&[u8]]) -> u64 {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    let mut first = [0; 8];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    u64::from_le_bytes(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incremental_hashing_equals_one_shot_hashing() {
        let mut hasher = DigestHasher::new();
        hasher.update(b"ab").update(b"c");
        assert_eq!(hasher.digest(), Digest::of(b"abc"));
    }

    #[test]
    fn keys_differ_by_purpose_secret_and_place() {
        let key = |purpose, secret: &str, place: &str| {
            DigestKey::derive(purpose, secret.as_bytes(), place.as_bytes())
        };
        let ours = key("reset", "ab", "c");
        let digest = ours.digest(b"id");
        assert!(key("reset", "ab", "c").is_digest_of(&digest.0, b"id"));
        assert!(
            !ours.is_digest_of(&digest.0, b"other") && !ours.is_digest_of(&digest.0[..16], b"id")
        );
        for other in [key("else", "ab", "c"), key("reset", "a", "bc")] {
            assert_ne!(other.digest(b"id"), digest);
        }
    }

    #[test]
    fn scores_depend_on_part_boundaries() {
        assert_ne!(
            rendezvous_score(&[b"ab", b"c"]),
            rendezvous_score(&[b"a", b"bc"])
        );
    }
}
