//! Known content without storage: the bytes at an offset follow from a seed.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

/// Pseudo-random bytes (SplitMix64; Steele, Lea, Flood 2014), held in memory for comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    bytes: Vec<u8>,
}

impl Content {
    /// So many bytes, other ones for each seed.
    pub fn new(seed: u64, length: usize) -> Self {
        let mut state = seed.wrapping_mul(0xff51_afd7_ed55_8ccd);
        let mut bytes = Vec::with_capacity(length + 8);
        while bytes.len() < length {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            bytes.extend((z ^ (z >> 31)).to_le_bytes());
        }
        bytes.truncate(length);
        Self { bytes }
    }

    /// All of it.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Writes it to a file.
    ///
    /// # Errors
    /// An I/O error, with the path.
    pub fn write_file(&self, path: &Path) -> Result<()> {
        let written = File::create(path).and_then(|mut file| file.write_all(&self.bytes));
        written.with_context(|| path.display().to_string())
    }

    /// How many bytes read at an offset are wrong; bytes beyond the end are.
    pub fn count_wrong_bytes(&self, offset: u64, found: &[u8]) -> u64 {
        let start = usize::try_from(offset).map_or(self.bytes.len(), |o| o.min(self.bytes.len()));
        let expected = &self.bytes[start..(start + found.len()).min(self.bytes.len())];
        if expected == found {
            return 0;
        }
        let different = expected.iter().zip(found).filter(|(a, b)| a != b).count();
        (different + found.len() - expected.len()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_bytes_are_counted() {
        let content = Content::new(1, 1003);
        assert_eq!(content.bytes().len(), 1003);
        assert_ne!(content, Content::new(2, 1003));
        let mut part = content.bytes()[500..].to_vec();
        assert_eq!(content.count_wrong_bytes(500, &part), 0);
        part[7] ^= 1;
        part.push(0);
        assert_eq!(content.count_wrong_bytes(500, &part), 2);
        assert_eq!(content.count_wrong_bytes(5000, &part), part.len() as u64);
    }
}
