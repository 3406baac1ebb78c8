//! Why a job runs again, in words.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why a job must run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunReason {
    /// No run has finished it.
    NeverRan,
    /// It failed in the last run.
    Failed,
    /// The user wants it to run.
    Forced,
    /// Its command, its mounts or its results are declared otherwise.
    DescriptionChanged,
    /// The declared size of a volume that it writes is another one.
    SizeChanged {
        /// Which volume.
        volume: String,
    },
    /// Its program is another one.
    ProgramChanged {
        /// Where it is.
        program: String,
    },
    /// A file of this machine that its description names is another one.
    FileChanged {
        /// Where it is.
        file: String,
    },
    /// A file that it read, or looked for, is not as it was.
    InputChanged {
        /// Which.
        path: String,
    },
    /// What it read cannot be compared.
    InputUnknown {
        /// The source.
        source: String,
        /// Why.
        why: String,
    },
    /// A result is not at home.
    ResultMissing {
        /// Which.
        target: String,
    },
    /// A result was not sent home when the job had run.
    ResultUnsent {
        /// Which.
        target: String,
    },
    /// A result was changed at home, or replaced.
    ResultChanged {
        /// Which.
        target: String,
    },
    /// A result cannot be looked at.
    ResultUnknown {
        /// Which.
        target: String,
        /// Why.
        why: String,
    },
    /// A job before it has run since.
    ProducerRan {
        /// Which.
        producer: String,
    },
    /// A job before it runs again.
    ProducerRuns {
        /// Which.
        producer: String,
    },
    /// A job that runs reads a volume that is gone.
    VolumeGone {
        /// Which volume.
        volume: String,
        /// The job that reads it.
        reader: String,
    },
}

impl fmt::Display for RunReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NeverRan => write!(f, "it never ran to its end"),
            Self::Failed => write!(f, "it failed"),
            Self::Forced => write!(f, "you force it"),
            Self::DescriptionChanged => write!(f, "its description changed"),
            Self::SizeChanged { volume } => {
                write!(f, "the declared size of its volume {volume} changed")
            }
            Self::ProgramChanged { program } => write!(f, "its program {program} changed"),
            Self::FileChanged { file } => write!(f, "{file}, which it names, changed"),
            Self::InputChanged { path } => write!(f, "its input {path} changed"),
            Self::InputUnknown { source, why } => {
                write!(f, "its input {source} cannot be compared: {why}")
            }
            Self::ResultMissing { target } => write!(f, "its result {target} is missing"),
            Self::ResultUnsent { target } => write!(f, "it has not sent its result {target}"),
            Self::ResultChanged { target } => write!(f, "its result {target} changed at home"),
            Self::ResultUnknown { target, why } => {
                write!(f, "its result {target} cannot be compared: {why}")
            }
            Self::ProducerRan { producer } => write!(f, "job {producer} has run since"),
            Self::ProducerRuns { producer } => write!(f, "job {producer} runs again"),
            Self::VolumeGone { volume, reader } => {
                write!(f, "job {reader} needs its volume {volume}, which is gone")
            }
        }
    }
}

/// How many jobs run and why, in one sentence: the reasons in order of their first job.
pub fn summarise(reasons: &[Option<RunReason>]) -> String {
    let total = reasons.len();
    let running = reasons.iter().flatten().count();
    let noun = |count: usize| if count == 1 { "job" } else { "jobs" };
    if running == 0 {
        return match total {
            1 => "the only job is up to date".to_owned(),
            _ => format!("all {total} jobs are up to date"),
        };
    }
    let mut kinds: Vec<(&str, usize)> = Vec::new();
    for kind in reasons.iter().flatten().map(kind_of) {
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind, 1)),
        }
    }
    let why = kinds.iter().map(|(kind, count)| format!("{count} {kind}"));
    let why = why.collect::<Vec<_>>().join(", ");
    match total - running {
        0 => format!("{total} {} to run: {why}", noun(total)),
        done => {
            let are = if done == 1 { "is" } else { "are" };
            let run = if running == 1 { "runs" } else { "run" };
            format!("{done} of {total} jobs {are} up to date; {running} {run}: {why}")
        }
    }
}

fn kind_of(reason: &RunReason) -> &'static str {
    match reason {
        RunReason::NeverRan => "never ran to the end",
        RunReason::Failed => "failed",
        RunReason::Forced => "forced",
        RunReason::DescriptionChanged => "with a changed description",
        RunReason::SizeChanged { .. } => "with a changed size",
        RunReason::ProgramChanged { .. } => "with a changed program",
        RunReason::FileChanged { .. } => "with a changed file",
        RunReason::InputChanged { .. } => "with a changed input",
        RunReason::InputUnknown { .. } => "whose input cannot be compared",
        RunReason::ResultMissing { .. } => "with a missing result",
        RunReason::ResultUnsent { .. } => "with an unsent result",
        RunReason::ResultChanged { .. } => "with a changed result",
        RunReason::ResultUnknown { .. } => "whose result cannot be compared",
        RunReason::ProducerRan { .. } => "after a job that has run since",
        RunReason::ProducerRuns { .. } => "after a job that runs",
        RunReason::VolumeGone { .. } => "whose volume is gone",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_counts_jobs_by_reason() {
        let producer = "a".to_owned();
        let reasons = [
            None,
            Some(RunReason::Failed),
            Some(RunReason::ProducerRuns { producer }),
            None,
        ];
        let told = "2 of 4 jobs are up to date; 2 run: 1 failed, 1 after a job that runs";
        assert_eq!(summarise(&reasons), told);
        assert_eq!(summarise(&[None, None]), "all 2 jobs are up to date");
        let producer = "a".to_owned();
        let told = "1 of 2 jobs is up to date; 1 runs: 1 after a job that has run since";
        assert_eq!(
            summarise(&[None, Some(RunReason::ProducerRan { producer })]),
            told
        );
        let new = [Some(RunReason::NeverRan), Some(RunReason::NeverRan)];
        assert_eq!(summarise(&new), "2 jobs to run: 2 never ran to the end");
    }
}
