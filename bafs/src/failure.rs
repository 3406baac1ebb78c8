//! Why a command about volumes failed, for programs: a class with an exit code of its own, and what
//! to do. The table is the page `volume-commands.md` of the reference; prints nothing itself.

use std::fmt;

use anyhow::Error;
use bafs_proto::ErrorCode;
use serde_json::{Value, json};

use crate::args::UsageError;

macro_rules! failure_classes {
    ($(
        $(#[doc = $doc:literal])*
        $class:ident = $code:literal, $name:literal, $remedy:literal;
    )*) => {
        /// Class of a failure. Neither names nor exit codes are ever used again for another class.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum FailureClass {
            $($(#[doc = $doc])* $class,)*
        }

        impl FailureClass {
            /// Every class, in the order of the reference.
            #[cfg(test)]
            pub(crate) const ALL: &[Self] = &[$(Self::$class,)*];

            /// The name in JSON.
            pub(crate) fn name(self) -> &'static str {
                match self {
                    $(Self::$class => $name,)*
                }
            }

            /// The exit code of the command.
            pub(crate) fn exit_code(self) -> u8 {
                match self {
                    $(Self::$class => $code,)*
                }
            }

            /// What a caller does about it, unless the failure says something nearer.
            pub(crate) fn remedy(self) -> &'static str {
                match self {
                    $(Self::$class => $remedy,)*
                }
            }

            /// What the class means: the text of the reference.
            #[cfg(test)]
            pub(crate) fn meaning(self) -> &'static str {
                match self {
                    $(Self::$class => concat!($($doc),*).trim_ascii(),)*
                }
            }
        }
    };
}

failure_classes! {
    /// Any other failure.
    Failed = 1, "failed", "read the message";
    /// The words of the command are wrong: an option, a size, a name, a path, an id.
    InvalidUse = 2, "invalid_use", "correct the command";
    /// The identity does not grant this, or it has expired.
    Denied = 3, "denied", "use an identity that grants it (`bafs grant`)";
    /// No live node has the volume, or the volume lacks the file.
    NotFound = 4, "not_found", "list what there is with `bafs volume list` or `bafs volume ls`";
    /// The command does not fit the kind, the state or the content of the volume.
    WrongState = 5, "wrong_state", "look at the volume with `bafs volume show`";
    /// The node, the volume or a disk has too little space.
    NoSpace = 6, "no_space", "delete or resize a volume, or choose another node";
    /// The id, or what is at the target, is something else already.
    Exists = 7, "exists", "choose another id or another target";
    /// Somebody else uses the volume, or work on it goes on.
    Busy = 8, "busy", "repeat the command later";
    /// The volume was deleted, has expired, or is lost with its node; the id is used up.
    Lost = 9, "lost", "make the data again, under a new id";
    /// Several volumes or nodes have the name.
    Ambiguous = 10, "ambiguous", "give the id of the volume, or the address of the node";
    /// The source or the file changed while it was read.
    Changed = 11, "changed", "invalidate the cache, or repeat when its writer has ended";
    /// Data do not match their digest.
    Damaged = 12, "damaged", "check the network and the disks, then repeat the command";
    /// A file of this machine cannot be read or written.
    LocalFile = 13, "local_file", "check the path and the rights on this machine";
    /// The disk of a server failed.
    ServerFault = 14, "server_fault", "read the server's log, then repeat the command";
    /// No server answers: the catalog, the node or the home is not alive, or stopped meanwhile.
    Unreachable = 75, "unreachable", "check `bafs servers`, then repeat the command";
}

impl FailureClass {
    /// The class of what a server answers.
    pub(crate) fn of_code(code: ErrorCode) -> Self {
        match code {
            ErrorCode::Unreachable
            | ErrorCode::DeadlineExceeded
            | ErrorCode::SessionUnknown
            | ErrorCode::HomeUnreachable
            | ErrorCode::NodeLeaving => Self::Unreachable,
            // Who fences another one uses the volume, or the target, now.
            ErrorCode::Busy
            | ErrorCode::InProgress
            | ErrorCode::LeaseHeld
            | ErrorCode::Fenced
            | ErrorCode::UploadFenced => Self::Busy,
            ErrorCode::ServerFault => Self::ServerFault,
            ErrorCode::VolumeLost | ErrorCode::StoreLost => Self::Lost,
            ErrorCode::SourceChanged => Self::Changed,
            ErrorCode::TokenInvalid
            | ErrorCode::TokenExpired
            | ErrorCode::RightMissing
            | ErrorCode::PeerRefused => Self::Denied,
            ErrorCode::Malformed | ErrorCode::BadPath => Self::InvalidUse,
            ErrorCode::NotFound => Self::NotFound,
            ErrorCode::Conflict => Self::Exists,
            ErrorCode::WrongState => Self::WrongState,
            ErrorCode::DigestMismatch => Self::Damaged,
            ErrorCode::TooLarge | ErrorCode::NoSpaceBytes | ErrorCode::NoSpaceFiles => {
                Self::NoSpace
            }
            ErrorCode::VersionMismatch
            | ErrorCode::Unsupported
            | ErrorCode::TemporaryFull
            | ErrorCode::MemoryExceeded
            | ErrorCode::RuntimeExceeded => Self::Failed,
        }
    }

    /// Whether the same command may succeed later, without a change.
    pub(crate) fn is_transient(self) -> bool {
        matches!(self, Self::Busy | Self::ServerFault | Self::Unreachable)
    }
}

/// A failure whose class no server told.
#[derive(Debug)]
pub(crate) struct ClassifiedError {
    /// Its class.
    pub(crate) class: FailureClass,
    message: String,
    remedy: Option<String>,
}

impl ClassifiedError {
    /// A failure with the usual remedy of its class.
    pub(crate) fn from_message(class: FailureClass, message: impl fmt::Display) -> Error {
        Error::new(Self {
            class,
            message: message.to_string(),
            remedy: None,
        })
    }

    /// A failure with a remedy of its own.
    pub(crate) fn with_remedy(
        class: FailureClass,
        message: impl fmt::Display,
        remedy: impl fmt::Display,
    ) -> Error {
        Error::new(Self {
            class,
            message: message.to_string(),
            remedy: Some(remedy.to_string()),
        })
    }

    /// The failure of a file of this machine.
    pub(crate) fn of_local_file(path: &std::path::Path, error: &std::io::Error) -> Error {
        let class = match error.kind() {
            std::io::ErrorKind::AlreadyExists => FailureClass::Exists,
            _ => FailureClass::LocalFile,
        };
        Self::from_message(class, format!("{}: {error}", path.display()))
    }
}

impl fmt::Display for ClassifiedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.remedy {
            Some(remedy) => write!(f, "{}; {remedy}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for ClassifiedError {}

/// The class of a failure.
pub(crate) fn class_of(error: &Error) -> FailureClass {
    if let Some(known) = error.downcast_ref::<ClassifiedError>() {
        return known.class;
    }
    if UsageError::is_cause_of(error) {
        return FailureClass::InvalidUse;
    }
    match error.downcast_ref::<bafs_proto::Error>() {
        Some(told) => FailureClass::of_code(told.code),
        None => FailureClass::Failed,
    }
}

/// What `--json` prints of a failure.
pub(crate) fn failure_json(error: &Error) -> Value {
    let class = class_of(error);
    let known = error.downcast_ref::<ClassifiedError>();
    let remedy = known.and_then(|known| known.remedy.as_deref());
    let message = match known {
        Some(known) => known.message.clone(),
        None => format!("{error:#}"),
    };
    let told = error.downcast_ref::<bafs_proto::Error>();
    json!({
        "error": {
            "class": class.name(),
            "message": message,
            "remedy": remedy.unwrap_or_else(|| class.remedy()),
            "repeat": class.is_transient(),
            "code": told.map(|told| format!("{:?}", told.code)),
        },
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use anyhow::Context;

    use super::*;

    #[test]
    fn failure_classes_have_distinct_names_and_codes() {
        let all = FailureClass::ALL;
        let names: BTreeSet<_> = all.iter().map(|class| class.name()).collect();
        let codes: BTreeSet<_> = all.iter().map(|class| class.exit_code()).collect();
        assert_eq!((names.len(), codes.len()), (all.len(), all.len()));
        // What a shell says of a signal, and of a program that it does not find.
        assert!(codes.iter().all(|code| (1..126).contains(code)));
        let used: BTreeSet<_> = ErrorCode::ALL
            .iter()
            .map(|code| FailureClass::of_code(*code).name())
            .collect();
        assert!(used.contains("lost") && used.contains("exists") && used.contains("damaged"));
    }

    #[test]
    fn failures_keep_their_class_in_any_context() {
        let told = bafs_proto::Error::new(ErrorCode::NoSpaceBytes, "10 bytes are free");
        let error = Error::new(told).context("create").context("volume v");
        assert_eq!(class_of(&error), FailureClass::NoSpace);
        let shown = failure_json(&error);
        assert_eq!(shown["error"]["class"], "no_space");
        assert_eq!(shown["error"]["code"], "NoSpaceBytes");
        let message = shown["error"]["message"].as_str().unwrap_or_default();
        assert!(
            message.starts_with("volume v: create: 10 bytes are free"),
            "{message}"
        );
        let own = ClassifiedError::with_remedy(FailureClass::Busy, "it is used", "wait");
        let own: anyhow::Result<()> = Err(own);
        let own = own.context("put").unwrap_err();
        assert_eq!(format!("{own:#}"), "put: it is used; wait");
        let shown = failure_json(&own);
        assert_eq!(shown["error"]["remedy"], "wait");
        assert_eq!(shown["error"]["message"], "it is used");
        assert_eq!(shown["error"]["repeat"], true);
        assert_eq!(class_of(&anyhow::anyhow!("else")), FailureClass::Failed);
    }
}
