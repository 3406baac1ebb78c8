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
    HomeAway,
    TooMuchMemory,
    TooMuchDisk,
    RootIsFile,
    RootIsEnvironment,
    ProgramOnNoNode,
    ProgramOnSomeNodes,
    ProgramNotHere,
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
    /// What is wrong with one place, and with several.
    fn messages(self) -> [&'static str; 2] {
        match self {
            Self::SourceMissing => [
                "source of a volume is not at its home",
                "sources of volumes are not at their home",
            ],
            Self::SourceUnreadable => [
                "source of a volume cannot be read by its home",
                "sources of volumes cannot be read by their home",
            ],
            Self::ProgramMissing => ["program does not exist", "programs do not exist"],
            Self::ProgramIsDirectory => ["program is a directory", "programs are directories"],
            Self::ProgramNotExecutable => [
                "program has no permission to run",
                "programs have no permission to run",
            ],
            Self::InterpreterMissing => [
                "interpreter of a script does not exist on this machine",
                "interpreters of scripts do not exist on this machine",
            ],
            Self::RequiredFileMissing => [
                "required file does not exist",
                "required files do not exist",
            ],
            Self::ArgumentMissing => [
                "argument names a file that does not exist",
                "arguments name files that do not exist",
            ],
            Self::TargetIsDirectory => [
                "extract would replace a directory",
                "extracts would replace directories",
            ],
            Self::TargetIsFile => [
                "directory of a set is a file",
                "directories of sets are files",
            ],
            Self::TargetBelowFile => ["extract goes below a file", "extracts go below files"],
            Self::HomeUnknown => [
                "home does not exist in a temporary cluster",
                "homes do not exist in a temporary cluster",
            ],
            Self::HomeNotListed => ["home is not in the catalog", "homes are not in the catalog"],
            Self::HomeAway => ["home does not answer", "homes do not answer"],
            Self::TooMuchMemory => [
                "job asks for more memory than any node has",
                "jobs ask for more memory than any node has",
            ],
            Self::TooMuchDisk => [
                "job asks for more space in /tmp than any node has",
                "jobs ask for more space in /tmp than any node has",
            ],
            Self::RootIsFile => ["root of jobs is a file", "roots of jobs are files"],
            Self::RootIsEnvironment => [
                "root of jobs is an environment without a system",
                "roots of jobs are environments without a system",
            ],
            Self::ProgramOnNoNode => ["program is on no node", "programs are on no node"],
            Self::ProgramOnSomeNodes => [
                "program is on some nodes only, and jobs may start on others",
                "programs are on some nodes only, and jobs may start on others",
            ],
            Self::ProgramNotHere => [
                "program is not on this machine",
                "programs are not on this machine",
            ],
            Self::NotLookedAt => ["place was not looked at", "places were not looked at"],
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
            Self::HomeAway => "start them; a run waits for them",
            Self::TooMuchMemory => "ask for less, or add a larger node",
            Self::TooMuchDisk => "ask for less, or start nodes with a larger --tmp",
            Self::RootIsFile => "unpack the image with `bafs import image`, and name the directory",
            Self::RootIsEnvironment => {
                "mount it where it was made, with its bin on 'PATH'; or import an image that has it"
            }
            Self::ProgramOnNoNode | Self::ProgramOnSomeNodes => {
                "install them, write 'program NAME from URL', or give the jobs a 'root' with them"
            }
            Self::ProgramNotHere => {
                "install them to run with --local; to ask the nodes of a cluster, give --identity \
                 and --catalog"
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
                | Self::ProgramNotHere
                | Self::HomeAway
                | Self::NotLookedAt
        )
    }

    /// Whether a run begins nothing because of it. Nodes may be added to a cluster, but a job does
    /// not wait for them: it fails where its program is not.
    pub(crate) fn stops_run(self) -> bool {
        self.is_error() || self == Self::ProgramOnNoNode
    }
}

impl Finding {
    /// A fault of these places.
    pub(crate) fn new(kind: FindingKind, places: Vec<String>) -> Self {
        Self {
            kind,
            is_error: kind.is_error(),
            message: kind.messages()[usize::from(places.len() != 1)],
            places,
            remedy: kind.remedy(),
        }
    }

    /// As a person reads it.
    pub(crate) fn describe(&self) -> String {
        let severity = match (self.is_error, self.kind) {
            (true, _) => "error",
            // Nothing is known of it, good or bad.
            (false, FindingKind::NotLookedAt) => "note",
            (false, _) => "warning",
        };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_place_is_told_in_the_singular() {
        let told = |places: &[&str]| {
            let places = places.iter().map(|place| (*place).to_owned()).collect();
            Finding::new(FindingKind::ProgramOnNoNode, places).describe()
        };
        let one = told(&["STAR (job a)"]);
        assert!(
            one.starts_with("warning: 1 program is on no node\n"),
            "{one}"
        );
        let two = told(&["STAR (job a)", "bwa (job b)"]);
        assert!(
            two.starts_with("warning: 2 programs are on no node\n"),
            "{two}"
        );
    }
}
