//! Digests of images: what passes through a reader is hashed, and compared at the end.

use std::io::{self, Read};

use anyhow::{Result, bail};
use sha2::{Digest, Sha256};

/// What images write before a digest of this kind; they have no other.
const PREFIX: &str = "sha256:";

/// A digest as an image writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ImageDigest(String);

impl ImageDigest {
    /// # Errors
    /// It is no SHA-256.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let digits = text.strip_prefix(PREFIX).unwrap_or_default();
        let is_digit = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
        if digits.len() != 64 || !digits.chars().all(is_digit) {
            bail!("'{text}' is no SHA-256 digest, and images with others are not known");
        }
        Ok(Self(digits.to_owned()))
    }

    /// The digits without what kind of digest it is.
    pub(super) fn digits(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for ImageDigest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{PREFIX}{}", self.0)
    }
}

/// The digest of some bytes.
pub(super) fn digest_of(bytes: &[u8]) -> ImageDigest {
    ImageDigest(to_hex(&Sha256::digest(bytes)))
}

/// Hashes what is read through it.
pub(super) struct HashingReader<R> {
    inner: R,
    hasher: Sha256,
}

impl<R: Read> HashingReader<R> {
    pub(super) fn new(inner: R) -> Self {
        Self {
            inner,
            hasher: Sha256::new(),
        }
    }

    /// Reads to the end; the digest of all.
    ///
    /// # Errors
    /// Those of reading.
    pub(super) fn finish(mut self) -> io::Result<ImageDigest> {
        io::copy(&mut self, &mut io::sink())?;
        Ok(ImageDigest(to_hex(&self.hasher.finalize())))
    }
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..read]);
        Ok(read)
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_hash_all_bytes() {
        let of_nothing = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(digest_of(b"").to_string(), of_nothing);
        let mut reader = HashingReader::new(&b"some bytes"[..]);
        reader.read_exact(&mut [0; 3]).expect("three");
        assert_eq!(reader.finish().expect("all"), digest_of(b"some bytes"));
        assert!(ImageDigest::parse("sha512:00").is_err());
        assert!(ImageDigest::parse("sha256:../../x").is_err());
    }
}
