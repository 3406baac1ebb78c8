//! Names of things on the wire, as distinct types; no decisions about them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An id did not parse: it must be hexadecimal digits of the right number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a valid id: expected {expected_digits} hexadecimal digits")]
pub struct ParseIdError {
    expected_digits: usize,
}

macro_rules! hex_id {
    ($(#[$doc:meta])* $name:ident, $inner:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub $inner);

        impl $name {
            /// A fresh id that has not been used before (random bits of the full width).
            pub fn random() -> Self {
                Self(rand::random())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:0width$x}", self.0, width = size_of::<$inner>() * 2)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl FromStr for $name {
            type Err = ParseIdError;

            fn from_str(text: &str) -> Result<Self, ParseIdError> {
                let expected_digits = size_of::<$inner>() * 2;
                let bad = ParseIdError { expected_digits };
                if text.len() != expected_digits || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
                    return Err(bad);
                }
                <$inner>::from_str_radix(text, 16).map(Self).map_err(|_| bad)
            }
        }
    };
}

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident, $inner:ty) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[derive(Serialize, Deserialize)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

hex_id!(
    /// A volume. Chosen by the caller, never reused.
    VolumeId, u128
);
hex_id!(
    /// One execution of one job on one node. Chosen by the scheduler; a retry is a new execution.
    ExecutionId, u128
);
hex_id!(
    /// One extraction of one file to home; the key of exactly-once delivery.
    ExtractionId, u128
);
hex_id!(
    /// A server, as recorded in its store: it keeps the id over restarts.
    ServerId, u64
);
hex_id!(
    /// One run of one workflow.
    RunId, u64
);
hex_id!(
    /// One agent process.
    AgentId, u64
);

impl ExtractionId {
    /// The number of an id that [`RunId::derive`] made: a run's later ids have larger ones.
    pub fn counter(self) -> u64 {
        // The upper half is the run.
        self.0 as u64
    }
}

impl RunId {
    /// Derives the 128-bit id with number `counter` of this run: unique and reproducible.
    pub fn derive(self, counter: u64) -> u128 {
        (u128::from(self.0) << 64) | u128::from(counter)
    }

    /// The run from whose id another was derived.
    pub fn from_derived(derived: u128) -> Self {
        Self((derived >> 64) as u64)
    }
}

number_id!(
    /// A file or directory within one tree. The root is [`InodeNo::ROOT`].
    InodeNo, u64
);
number_id!(
    /// An open file or directory stream within one tree session.
    HandleId, u64
);
number_id!(
    /// A file of a cache volume, by its place in the manifest.
    FileIndex, u32
);
number_id!(
    /// A block of a file, counted from 0.
    BlockIndex, u64
);
number_id!(
    /// Fencing number of a writer lease: a later holder always has a larger one.
    Epoch, u64
);
number_id!(
    /// Fencing number that a home issues to who sends it files: a later one is always larger. All
    /// processes that serve one exported directory issue from one sequence.
    UploadEpoch, u64
);

impl InodeNo {
    /// The root directory of every tree.
    pub const ROOT: Self = Self(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip_as_text() {
        let id = VolumeId(0xabc);
        assert_eq!(id.to_string(), "00000000000000000000000000000abc");
        assert_eq!(id.to_string().parse(), Ok(id));
        assert!("abc".parse::<VolumeId>().is_err());
        assert!(
            "+0000000000000000000000000000abc"
                .parse::<VolumeId>()
                .is_err()
        );
    }

    #[test]
    fn derived_ids_are_distinct() {
        let run = RunId(7);
        assert_ne!(run.derive(1), run.derive(2));
        assert_ne!(run.derive(1), RunId(8).derive(1));
        assert_eq!(RunId::from_derived(run.derive(u64::MAX)), run);
    }
}
