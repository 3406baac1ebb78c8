//! Whether a job that failed found no space in a volume. Why that was so say
//! `policy/failure/resize.rs` and `policy/failure/full_disk.rs`.

use bafs_proto::ErrorClass;
use bafs_proto::job_report::VolumeUse;
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::describe::describe;
use crate::policy::View;
use crate::space::Space;

/// A disk with less free is full, in bytes, for a job of whose calls nobody knows.
const FULL_BYTES: u64 = 16 << 20;

/// What a program says that found no space.
const NO_SPACE: &str = "No space left on device";

/// Whether a job that failed found no space in a volume that it may write: its environment
/// says so, or it ended by itview after calls that failed for that.
pub(crate) fn found_no_space(view: View<'_>, job: JobIndex, report: &JobReport) -> bool {
    match &report.outcome {
        JobOutcome::EnvironmentFailed(error) => error.class() == ErrorClass::NoSpace,
        // It does not begin where its output finds no place.
        JobOutcome::Exited(_) | JobOutcome::Signaled(_) | JobOutcome::NotStarted(_) => {
            !refused_for_space(view, job, report).is_empty()
        }
        JobOutcome::Killed => false,
    }
}

/// Scratch volumes that a job may write and in which calls of it failed for lack of space.
/// Where nothing is counted the disk tells that, as it was at the least.
pub(crate) fn refused_for_space(
    view: View<'_>,
    job: JobIndex,
    report: &JobReport,
) -> Vec<VolumeIndex> {
    let is_refused = |volume: &VolumeIndex| {
        let name = &view.graph.workflow.volume(*volume).name;
        let mut used = report.volumes.iter().filter(|used| used.name == *name);
        used.any(|used| used.no_space_errors > 0 || met_full_disk(view, *volume, used, report))
    };
    let mut written = view.scratch_written(job);
    written.retain(is_refused);
    written
}

/// Whether a job that failed met a full disk in a volume of which nothing is counted: it was as
/// good as full meanwhile, or the program says so, and it has less than the volume may take.
fn met_full_disk(
    view: View<'_>,
    volume: VolumeIndex,
    used: &VolumeUse,
    report: &JobReport,
) -> bool {
    let Some(disk) = disk_of(used).filter(|_| used.has_no_counts) else {
        return false;
    };
    let held = Space {
        bytes: used.used_bytes,
        files: used.used_files,
    };
    let is_short = !disk.can_hold(view.size_of(volume).saturating_sub(held));
    let is_full = disk.bytes < FULL_BYTES || disk.files == 0;
    is_short && (is_full || report.output_tail.contains(NO_SPACE))
}

/// What a job lacks that found too little space in these volumes.
pub(crate) fn describe_too_small(view: View<'_>, volumes: &[VolumeIndex]) -> String {
    let is_undeclared = |volume: &VolumeIndex| view.sizes.is_undeclared(*volume);
    // A size that was measured is not the user's.
    let undeclared = volumes.iter().filter(|volume| is_undeclared(volume));
    let had = undeclared.map(|volume| view.size_of(*volume));
    let had: Vec<Space> = had.collect();
    if had.is_empty() {
        return "needs a larger volume than declared".to_owned();
    }
    let had = had.into_iter().fold(Space::ZERO, Space::component_max);
    format!(
        "needs more than {}, but its pipeline does not fit on these nodes with a larger \
         volume; add storage",
        describe(had)
    )
}

/// What the disk below a volume had free, as far as that is known.
pub(super) fn disk_of(used: &VolumeUse) -> Option<Space> {
    let bytes = used.disk_free_bytes?;
    let files = used.disk_free_files.unwrap_or(u64::MAX);
    Some(Space { bytes, files })
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::RunId;

    use super::*;
    use crate::{Scheduler, Settings};

    #[test]
    fn measured_sizes_are_not_called_declared() {
        let text = "volume a scratch unknown\nvolume b scratch 1 MB\njob p {\nexecutable = x\n}\n\
            mount a p /a\nmount b p /b\n";
        let none = |path: &str| Err(path.to_owned());
        let checked = bafs_workflow::parse_workflow("w.bafs", text, &none);
        let workflow = checked.expect("it is right").workflow;
        let scheduler = Scheduler::new(RunId(0), workflow, Settings::default());
        let describe = |volumes: &[u32]| {
            let volumes: Vec<VolumeIndex> = volumes.iter().copied().map(VolumeIndex).collect();
            describe_too_small(View::new(&scheduler.state), &volumes)
        };
        assert_eq!(describe(&[1]), "needs a larger volume than declared");
        for volumes in [&[0][..], &[0, 1]] {
            assert!(!describe(volumes).contains("declared"));
        }
    }
}
