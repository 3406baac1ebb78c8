//! Whether each scratch volume is written before it is read, and by one job at a time. It works on
//! a graph without cycle and reports; it changes nothing.
//!
//! Two jobs that use a volume must be ordered unless both only read. Checking all pairs would be
//! quadratic, so the users of a volume are taken in topological order and only neighbours are
//! asked about: each writer and the readers up to the next writer, and each of these readers and
//! that next writer. All other pairs follow, because "is before" is transitive.

use super::diagnostic::{Diagnostics, SourceLocation};
use super::job_order::{OrderSearch, SearchTooLong};
use super::model::{JobIndex, Volume, VolumeKind, Workflow};

/// One job's use of a volume, over all its mounts of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct JobAccess {
    pub(super) job: JobIndex,
    pub(super) writable: bool,
    /// Where the first mount is declared.
    pub(super) location: SourceLocation,
}

/// Reports at most one error or warning for each volume. `uses` is indexed as the volumes are and
/// has each job once.
pub(super) fn check_access(
    workflow: &Workflow,
    mut uses: Vec<Vec<JobAccess>>,
    diagnostics: &mut Diagnostics,
) {
    let search = OrderSearch::new(&workflow.jobs);
    let mut check = AccessCheck {
        workflow,
        search,
        diagnostics,
    };
    for (volume, uses) in workflow.volumes.iter().zip(&mut uses) {
        uses.sort_by_key(|used| check.search.rank(used.job));
        let VolumeKind::Scratch { fill } = &volume.kind else {
            continue;
        };
        if check.volume(volume, fill.is_some(), uses) == Err(SearchTooLong) {
            let Some(used) = uses.first() else { continue };
            let message = format!(
                "the order of jobs is too complex to check from '{}' on",
                volume.name
            );
            let hint = "make sure that users of one scratch volume are ordered by 'parent'";
            return check.diagnostics.warn(used.location, message, hint);
        }
    }
}

struct AccessCheck<'w, 'd> {
    workflow: &'w Workflow,
    search: OrderSearch<'w>,
    diagnostics: &'d mut Diagnostics,
}

impl AccessCheck<'_, '_> {
    fn volume(
        &mut self,
        volume: &Volume,
        filled: bool,
        uses: &[JobAccess],
    ) -> Result<(), SearchTooLong> {
        let first_writer = uses.iter().position(|used| used.writable);
        if !filled && self.check_first_use(volume, uses, first_writer)? {
            return Ok(());
        }
        let mut writer: Option<JobAccess> = None;
        let mut readers: Vec<JobAccess> = Vec::new();
        for &used in uses {
            let before: &[JobAccess] = match &writer {
                _ if used.writable && !readers.is_empty() => &readers,
                Some(writer) => std::slice::from_ref(writer),
                None => &[],
            };
            for &earlier in before {
                if !self.search.is_before(earlier.job, used.job)? {
                    self.report_unordered(volume, filled, earlier, used);
                    return Ok(());
                }
            }
            if used.writable {
                writer = Some(used);
                readers.clear();
            } else {
                readers.push(used);
            }
        }
        Ok(())
    }

    /// Reports the first job when it reads what nobody can have written by then.
    fn check_first_use(
        &mut self,
        volume: &Volume,
        uses: &[JobAccess],
        first_writer: Option<usize>,
    ) -> Result<bool, SearchTooLong> {
        let Some(&first) = uses.first() else {
            return Ok(false);
        };
        if first.writable {
            return Ok(false);
        }
        let reader = &self.workflow.job(first.job).name;
        let name = &volume.name;
        let Some(first_writer) = first_writer else {
            let message =
                format!("job '{reader}' reads scratch volume '{name}', which no job writes");
            let hint = format!(
                "mount it 'rw' in the job that writes it, or fill it: \
                 volume {name} scratch SIZE from URL"
            );
            self.diagnostics.error_hint(first.location, message, hint);
            return Ok(true);
        };
        let writer = uses[first_writer];
        if !self.search.is_before(first.job, writer.job)? {
            // Not ordered at all: that is what the caller reports.
            return Ok(false);
        }
        let writer = &self.workflow.job(writer.job).name;
        let message =
            format!("job '{reader}' reads scratch volume '{name}' before job '{writer}' writes it");
        let hint = format!("order them with 'parent {writer} child {reader}', or mount it 'rw'");
        self.diagnostics.error_hint(first.location, message, hint);
        Ok(true)
    }

    fn report_unordered(
        &mut self,
        volume: &Volume,
        filled: bool,
        one: JobAccess,
        other: JobAccess,
    ) {
        // In the order of the text, which is how the user thinks of them.
        let (one, other) = if one.location <= other.location {
            (one, other)
        } else {
            (other, one)
        };
        let (x, y) = (
            &self.workflow.job(one.job).name,
            &self.workflow.job(other.job).name,
        );
        let message = format!(
            "jobs '{x}' and '{y}' both use scratch volume '{}' \
             but neither is ordered before the other",
            volume.name
        );
        let hint = if filled {
            format!("write 'parent {x} child {y}', or mount it 'ro' in both")
        } else {
            format!("write 'parent {x} child {y}', or give each job a volume of its own")
        };
        if filled {
            self.diagnostics.warn(other.location, message, hint);
        } else {
            self.diagnostics.error_hint(other.location, message, hint);
        }
    }
}
