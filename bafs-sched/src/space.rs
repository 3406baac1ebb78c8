//! An amount of storage: bytes and files counted together. Does not know whose it is.

use serde::{Deserialize, Serialize};

/// Bytes and files, added and compared together.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Space {
    /// Bytes.
    pub bytes: u64,
    /// Files and directories.
    pub files: u64,
}

impl Space {
    /// Nothing.
    pub const ZERO: Self = Self { bytes: 0, files: 0 };

    /// Whether `need` fits into this in both respects.
    pub fn can_hold(self, need: Self) -> bool {
        need.bytes <= self.bytes && need.files <= self.files
    }

    /// The sum; stops at the end of the range.
    #[must_use]
    pub fn saturating_add(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            files: self.files.saturating_add(other.files),
        }
    }

    /// The larger of both, in each respect.
    #[must_use]
    pub fn component_max(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.max(other.bytes),
            files: self.files.max(other.files),
        }
    }

    /// The smaller of both, in each respect.
    #[must_use]
    pub fn component_min(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.min(other.bytes),
            files: self.files.min(other.files),
        }
    }

    /// The difference, zero where `other` is larger.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(other.bytes),
            files: self.files.saturating_sub(other.files),
        }
    }
}

/// `amount` times `numerator` over `denominator` without overflow, rounded up; 0 over 0 is 0.
pub(crate) fn scale_up(amount: u64, numerator: u64, denominator: u64) -> u64 {
    if denominator == 0 {
        return 0;
    }
    let product = u128::from(amount) * u128::from(numerator);
    u64::try_from(product.div_ceil(u128::from(denominator))).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_holds_only_if_bytes_and_files_do() {
        let have = Space {
            bytes: 10,
            files: 1,
        };
        assert!(have.can_hold(Space {
            bytes: 10,
            files: 1
        }));
        assert!(!have.can_hold(Space { bytes: 1, files: 2 }));
        assert!(!have.can_hold(Space {
            bytes: 11,
            files: 0
        }));
        assert_eq!(
            have.saturating_sub(Space { bytes: 3, files: 5 }),
            Space { bytes: 7, files: 0 }
        );
    }

    #[test]
    fn scaling_rounds_up_and_survives_large_numbers() {
        assert_eq!(scale_up(10, 1, 3), 4);
        assert_eq!(scale_up(u64::MAX, u64::MAX, u64::MAX), u64::MAX);
        assert_eq!(scale_up(5, 1, 0), 0);
    }
}
