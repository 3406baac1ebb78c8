//! What lost volumes, and volumes that failed attempts leave half-written, make necessary: the
//! smallest set of jobs that must run again. `transition/roll_back.rs` carries it out. Whose fault
//! a failure is says `policy/failure/attribution.rs`.

use std::collections::BTreeSet;

use bafs_proto::ErrorCode;
use bafs_proto::ids::VolumeId;
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::policy::View;
use crate::state::attempts::{Attempt, AttemptState};
use crate::state::jobs::JobState;
use crate::state::observed_access::has_written;
use crate::state::scheduler_state::Phase;

/// How a volume that is gone comes back.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Recovery {
    /// It is there, or nobody needs it.
    Unneeded,
    /// This copy takes its place.
    Restore(VolumeId),
    /// Its writers run again, if they are done, but for those of whose output there is a copy.
    Redo(Vec<JobIndex>),
}

/// How a volume comes back. Of what an older copy has nothing needs to run again: it takes the
/// volume's place once the others are undone.
pub(crate) fn find_recovery(view: View<'_>, volume: VolumeIndex) -> Recovery {
    if view.volumes.is_live(volume) || !view.graph.volume(volume).is_needed() {
        return Recovery::Unneeded;
    }
    if let Some(copy) = view.good_copy(volume) {
        return Recovery::Restore(copy);
    }
    let copied = view.copied_writers(volume);
    let writers = view.graph.volume(volume).writers.iter().copied();
    Recovery::Redo(writers.filter(|writer| !copied.contains(writer)).collect())
}

/// Whether a job can run again: it is done, and the run goes on.
pub(crate) fn may_run_again(view: View<'_>, job: JobIndex) -> bool {
    view.graph.state(job) == JobState::Done && view.phase != Phase::Finishing
}

/// Whether a volume of a job that runs again is not what the job found there: it wrote it, or what
/// a later job made of it is not what this one read.
pub(crate) fn is_outdated(
    view: View<'_>,
    volume: VolumeIndex,
    job: JobIndex,
    writable: bool,
) -> bool {
    writable || is_changed_since(view, volume, job)
}

/// Whether a job that comes after this one wrote the volume, or does so now.
fn is_changed_since(view: View<'_>, volume: VolumeIndex, job: JobIndex) -> bool {
    let is_later = |writer: &JobIndex| view.graph.rank(*writer) > view.graph.rank(job);
    let has_written = |writer: &JobIndex| {
        view.graph.state(*writer) == JobState::Done || view.attempts.contains_key(writer)
    };
    let mut writers = view.graph.volume(volume).writers.iter();
    writers.any(|writer| is_later(writer) && has_written(writer))
}

/// The volume that an attempt may have left half-written when it ended without success. The next
/// attempt must not find half of this one's work.
pub(crate) fn find_half_written(
    view: View<'_>,
    attempt: &Attempt,
    volume: VolumeIndex,
) -> Option<VolumeId> {
    if attempt.stage == AttemptState::Preparing || attempt.unchanged.contains(&volume) {
        return None;
    }
    let (id, _) = view.volumes.scratch(volume)?;
    let is_used = !view.users_of(id, volume).is_empty();
    // A later volume of that name was never touched by this attempt.
    (!is_used && attempt.uses(id)).then_some(id)
}

/// Volumes that an attempt left as they were, as far as its report tells.
pub(crate) fn find_unchanged(
    view: View<'_>,
    job: JobIndex,
    report: &JobReport,
) -> BTreeSet<VolumeIndex> {
    let has_run = may_have_run(report);
    let is_unchanged = |volume: &VolumeIndex| {
        let spec = view.graph.workflow.volume(*volume);
        let mut used = report.volumes.iter().filter(|used| used.name == spec.name);
        let is_told = used.clone().next().is_some();
        !has_run || is_told && used.all(|used| !has_written(used))
    };
    let mounted = view.graph.mounted(job).into_iter();
    let mounted = mounted.map(|(volume, _)| volume);
    mounted.filter(is_unchanged).collect()
}

/// Volumes that a job which runs again needs, and that went with an attempt that failed although
/// finished jobs had written them.
pub(crate) fn find_missing_inputs(view: View<'_>, job: JobIndex) -> Vec<VolumeIndex> {
    let is_done = |writer: &JobIndex| view.graph.state(*writer) == JobState::Done;
    let is_gone = |volume: &VolumeIndex| {
        let node = view.graph.volume(*volume);
        !node.is_cache && !view.volumes.is_live(*volume) && node.writers.iter().any(is_done)
    };
    let mounted = view.graph.mounted(job).into_iter();
    let mounted = mounted.map(|(volume, _)| volume);
    mounted.filter(is_gone).collect()
}

/// Whether the program of an execution may have run. An agent that could not mount its volumes
/// says so before; of one that died, by itself (`ServerFault`) or with its node (`NodeLeaving`),
/// nothing is known.
fn may_have_run(report: &JobReport) -> bool {
    match &report.outcome {
        JobOutcome::NotStarted(_) => false,
        JobOutcome::EnvironmentFailed(error) => {
            let has_died = matches!(error.code, ErrorCode::ServerFault | ErrorCode::NodeLeaving);
            has_died || !report.volumes.is_empty() || report.wall_ms > 0
        }
        JobOutcome::Exited(_) | JobOutcome::Signaled(_) | JobOutcome::Killed => true,
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::Error;

    use super::*;

    #[test]
    fn program_of_a_dead_agent_may_have_run() {
        let silent = |code| JobReport {
            outcome: JobOutcome::EnvironmentFailed(Error::new(code, "x")),
            wall_ms: 0,
            cpu_ms: 0,
            memory_bytes_max: 0,
            output_tail: String::new(),
            volumes: Vec::new(),
        };
        assert!(may_have_run(&silent(ErrorCode::ServerFault)));
        assert!(may_have_run(&silent(ErrorCode::NodeLeaving)));
        assert!(!may_have_run(&silent(ErrorCode::Unsupported)));
    }
}
