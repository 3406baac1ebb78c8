//! Kinds of faults that are known before anything runs, with the words for each. Looks at nothing.

use serde::Serialize;

/// Places of one kind of finding that a person is shown.
const PLACES_SHOWN_MAX: usize = 5;

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FindingKind {
    SourceMissing,
    SourceUnreadable,
    ProgramMissing,
    ProgramIsDirectory,
    ProgramNotExecutable,
    InterpreterMissing,
    RequiredFileMissing,
    ArgumentMissing,
    TargetIsDirectory,
    TargetIsFile,
    TargetBelowFile,
    HomeUnknown,
    HomeNotListed,
    TooMuchMemory,
    TooMuchDisk,
    RootIsFile,
    RootIsEnvironment,
    ProgramOnNoNode,
    ProgramOnSomeNodes,
    NotLookedAt,
}

/// All faults of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) kind: FindingKind,
    /// Whether jobs will fail of it.
    pub(crate) is_error: bool,
    /// What is wrong with each of the places.
    pub(crate) message: &'static str,
    /// Each with what names it.
    pub(crate) places: Vec<String>,
    /// What to do about it.
    pub(crate) remedy: &'static str,
}

impl FindingKind {
    fn message(self) -> &'static str {
        match self {
            Self::SourceMissing => "sources of volumes are not at their home",
            Self::SourceUnreadable => "sources of volumes cannot be read by their home",
            Self::ProgramMissing => "programs do not exist",
            Self::ProgramIsDirectory => "programs are directories",
            Self::ProgramNotExecutable => "programs have no permission to run",
            Self::InterpreterMissing => "interpreters of scripts do not exist on this machine",
            Self::RequiredFileMissing => "required files do not exist",
            Self::ArgumentMissing => "arguments name files that do not exist",
            Self::TargetIsDirectory => "extracts would replace directories",
            Self::TargetIsFile => "directories of sets are files",
            Self::TargetBelowFile => "extracts go below files",
            Self::HomeUnknown => "homes do not exist in a temporary cluster",
            Self::HomeNotListed => "homes are not in the catalog",
            Self::TooMuchMemory => "jobs ask for more memory than any node has",
            Self::TooMuchDisk => "jobs ask for more space in /tmp than any node has",
            Self::RootIsFile => "roots of jobs are files",
            Self::RootIsEnvironment => "roots of jobs are environments without a system",
            Self::ProgramOnNoNode => "programs are on no node",
            Self::ProgramOnSomeNodes => {
                "programs are on some nodes only, and jobs may start on others"
            }
            Self::NotLookedAt => "places could not be looked at",
        }
    }

    fn remedy(self) -> &'static str {
        match self {
            Self::SourceMissing => "correct the URL, or put the files there",
            Self::SourceUnreadable => "give the user of `bafs home` permission to read them",
            Self::ProgramMissing => {
                "correct 'executable' or 'interpreter', or put the program there"
            }
            Self::ProgramIsDirectory => "name the program inside",
            Self::ProgramNotExecutable => "run `chmod +x` on them, or name an 'interpreter'",
            Self::InterpreterMissing => "correct the '#!' line, or install the interpreter",
            Self::RequiredFileMissing => "correct 'requires', or put the files there",
            Self::ArgumentMissing => "correct the words, if they are meant as paths",
            Self::TargetIsDirectory => "name a file, or end the URL with '/' to send a set",
            Self::TargetIsFile => "choose a directory, or remove the file",
            Self::TargetBelowFile => "choose a directory, or remove the file",
            Self::HomeUnknown => {
                "write bafs://home/, or give --identity and --catalog of a cluster that has them"
            }
            Self::HomeNotListed => {
                "correct the names in the URLs, or start the homes with `bafs home --name`; jobs \
                 that need them wait, at most for --resource-timeout"
            }
            Self::TooMuchMemory => "ask for less, or add a larger node",
            Self::TooMuchDisk => "ask for less, or start nodes with a larger --tmp",
            Self::RootIsFile => "unpack the image with `bafs import image`, and name the directory",
            Self::RootIsEnvironment => {
                "mount it where it was made, with its bin on 'PATH'; or import an image that has it"
            }
            Self::ProgramOnNoNode | Self::ProgramOnSomeNodes => {
                "install them, write 'program NAME from URL', or give the jobs a 'root' with them"
            }
            Self::NotLookedAt => "give --local, or --identity and --catalog of a live cluster",
        }
    }

    fn is_error(self) -> bool {
        !matches!(
            self,
            Self::InterpreterMissing
                | Self::ArgumentMissing
                | Self::HomeNotListed
                | Self::TooMuchMemory
                | Self::TooMuchDisk
                | Self::ProgramOnNoNode
                | Self::ProgramOnSomeNodes
                | Self::NotLookedAt
        )
    }
}

impl Finding {
    /// A fault of these places.
    pub(crate) fn new(kind: FindingKind, places: Vec<String>) -> Self {
        Self {
            kind,
            is_error: kind.is_error(),
            message: kind.message(),
            places,
            remedy: kind.remedy(),
        }
    }

    /// As a person reads it.
    pub(crate) fn describe(&self) -> String {
        let severity = if self.is_error { "error" } else { "warning" };
        let mut text = format!("{severity}: {} {}", self.places.len(), self.message);
        for place in self.places.iter().take(PLACES_SHOWN_MAX) {
            text += &format!("\n  {place}");
        }
        let more = self.places.len().saturating_sub(PLACES_SHOWN_MAX);
        if more > 0 {
            text += &format!("\n  and {more} more");
        }
        text + &format!("\n  to do: {}", self.remedy)
    }
}
