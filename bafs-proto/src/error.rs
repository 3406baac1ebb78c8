//! The closed set of numbered errors and their classes; no mapping to errno (the agent's part).

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::limits::ERROR_DETAIL_BYTES_MAX;
use crate::path::printable;

/// Result of a call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Who must act on an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ErrorClass {
    /// The same call may succeed later: the caller retries until its deadline.
    Transient,
    /// The volume is gone for good: the agent stops the job, the scheduler re-runs its producers.
    VolumeLost,
    /// The caller may not do this; retrying does not help.
    Denied,
    /// The call makes no sense; retrying does not help.
    Invalid,
    /// There is no space for it within a reservation.
    NoSpace,
}

macro_rules! error_codes {
    ($($(#[doc = $doc:literal])* $name:ident = $number:literal, $class:ident;)*) => {
        /// What went wrong, by number. Numbers are never reused.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u16)]
        pub enum ErrorCode {
            $($(#[doc = $doc])* $name = $number,)*
        }

        impl ErrorCode {
            /// Every code, for tests and documents.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The class of this code.
            pub fn class(self) -> ErrorClass {
                match self {
                    $(Self::$name => ErrorClass::$class,)*
                }
            }

            /// What the code means, in words: the text of the reference of errors.
            pub fn meaning(self) -> &'static str {
                match self {
                    $(Self::$name => concat!($($doc),*).trim_ascii(),)*
                }
            }

            fn from_number(number: u16) -> Option<Self> {
                match number {
                    $($number => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

error_codes! {
    /// No connection to the server, or it broke while the call was under way.
    Unreachable = 100, Transient;
    /// The call's deadline passed.
    DeadlineExceeded = 101, Transient;
    /// The server has too much to do, or is not ready yet.
    Busy = 102, Transient;
    /// The server no longer knows this tree session (it restarted): open the tree again.
    SessionUnknown = 103, Transient;
    /// The server could not do it for a local reason that may pass (an I/O error of its disk).
    ServerFault = 104, Transient;
    /// What was asked for is under way and takes longer: ask again for its result.
    InProgress = 105, Transient;
    /// Home does not answer the server that was asked in its place.
    HomeUnreachable = 106, Transient;
    /// The node of a job is asked to end, and the job ended with it.
    NodeLeaving = 107, Transient;

    /// The volume does not exist (any more): deleted, expired, or lost with its server.
    VolumeLost = 200, VolumeLost;
    /// The source changed after the cache volume was created.
    SourceChanged = 201, VolumeLost;
    /// The caller's writer lease was taken over by a later epoch.
    Fenced = 202, VolumeLost;
    /// The server that was meant lost its store: another one is at its address.
    StoreLost = 203, VolumeLost;

    /// The token is missing, malformed or not signed by this cluster's authority.
    TokenInvalid = 300, Denied;
    /// The token has expired.
    TokenExpired = 301, Denied;
    /// The token does not grant this right on this resource.
    RightMissing = 302, Denied;
    /// Another agent holds the writer lease of this volume.
    LeaseHeld = 303, Denied;
    /// The peer belongs to another cluster or speaks with a wrong role.
    PeerRefused = 304, Denied;

    /// The bytes do not decode, or a field is out of its range.
    Malformed = 400, Invalid;
    /// The peer speaks another version of the protocol.
    VersionMismatch = 401, Invalid;
    /// The named file or directory does not exist.
    NotFound = 402, Invalid;
    /// The id exists already with another meaning.
    Conflict = 403, Invalid;
    /// This server does not serve that call.
    Unsupported = 404, Invalid;
    /// The call is not possible in the volume's state or for its kind.
    WrongState = 405, Invalid;
    /// A digest did not match: the data were damaged on the way or at the source.
    DigestMismatch = 406, Invalid;
    /// The path leaves its tree, or is no valid path.
    BadPath = 407, Invalid;
    /// What a volume is to be filled with is larger than the volume may be, on every server.
    TooLarge = 408, Invalid;
    /// A job's temporary files take more than its share of the node.
    TemporaryFull = 409, Invalid;
    /// A job uses more memory than it asked for.
    MemoryExceeded = 410, Invalid;
    /// A job runs longer than it may.
    RuntimeExceeded = 411, Invalid;
    /// Another upload to the same target has a later fence.
    UploadFenced = 412, Invalid;

    /// Too few free bytes for the reservation.
    NoSpaceBytes = 500, NoSpace;
    /// Too few free files for the reservation.
    NoSpaceFiles = 501, NoSpace;
}

impl Serialize for ErrorCode {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (*self as u16).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ErrorCode {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = u16::deserialize(deserializer)?;
        Self::from_number(number)
            .ok_or_else(|| serde::de::Error::custom(format!("unknown error code {number}")))
    }
}

/// An error on the wire: a code that programs act on, and a text for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{detail} ({code:?})")]
pub struct Error {
    /// What went wrong.
    pub code: ErrorCode,
    /// What, where and why, for a person; never parsed.
    pub detail: String,
}

impl Error {
    /// An error with a text for the person who reads it; an over-long text is cut, and bytes of
    /// names that are no text are shown as numbers.
    pub fn new(code: ErrorCode, detail: impl Into<String>) -> Self {
        let mut detail = detail.into();
        if let Cow::Owned(readable) = printable(&detail) {
            detail = readable;
        }
        if detail.len() > ERROR_DETAIL_BYTES_MAX {
            let mut end = ERROR_DETAIL_BYTES_MAX;
            while !detail.is_char_boundary(end) {
                end -= 1;
            }
            detail.truncate(end);
        }
        Self { code, detail }
    }

    /// The class of its code.
    pub fn class(&self) -> ErrorClass {
        self.code.class()
    }

    /// Whether the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        self.class() == ErrorClass::Transient
    }

    /// The same error with what was being done put in front.
    #[must_use]
    pub fn context(self, doing: impl std::fmt::Display) -> Self {
        Self::new(self.code, format!("{doing}: {}", self.detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_codes_round_trip_and_group_by_class() {
        for &code in ErrorCode::ALL {
            assert_eq!(ErrorCode::from_number(code as u16), Some(code));
            let class = match code as u16 / 100 {
                1 => ErrorClass::Transient,
                2 => ErrorClass::VolumeLost,
                3 => ErrorClass::Denied,
                4 => ErrorClass::Invalid,
                _ => ErrorClass::NoSpace,
            };
            assert_eq!(code.class(), class, "{code:?}");
        }
        assert_eq!(ErrorCode::from_number(1), None);
    }

    #[test]
    fn long_details_are_cut_at_a_character() {
        let error = Error::new(ErrorCode::Malformed, "ä".repeat(2000));
        assert!(error.detail.len() <= ERROR_DETAIL_BYTES_MAX);
    }
}
