//! Whether jobs did what the workflow declares, and what the user is told of that and of other
//! things while a run goes on. What is not as declared says `policy/failure/undeclared_access.rs`.

use bafs_proto::ids::VolumeId;
use bafs_proto::message::JobReport;
use bafs_proto::path;
use bafs_proto::source_warning::SourceWarnings;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::policy::View;
use crate::policy::failure::refused_writes::{RefusedWrites, find_refused_writes};
use crate::policy::failure::undeclared_access::{
    AccessKind, find_undeclared, has_read, used_in_all,
};
use crate::state::observed_access::{RunWarning, has_written};
use crate::state::scheduler_state::State;

/// Warnings that are kept; more are counted.
const WARNINGS_MAX: usize = 100;

impl State {
    /// What the user should know so far, in the order in which it was found.
    pub fn warnings(&self) -> &[RunWarning] {
        &self.observed_access.warnings
    }

    /// Warnings that were not kept.
    pub fn warnings_omitted(&self) -> u64 {
        self.observed_access.omitted
    }

    /// Looks at what a job did that is done.
    pub(crate) fn compare_with_declared(&mut self, job: JobIndex, report: &JobReport) {
        for found in find_undeclared(View::new(self), job, report) {
            let kind = match found.kind {
                AccessKind::ReadBeforeWrite => 0,
                AccessKind::Unordered => 1,
                AccessKind::Unused => 2,
            };
            self.warn(kind, found.job, found.volume, found.text);
        }
        for (volume, _) in self.graph.mounted(job) {
            self.note_access(job, volume, report);
        }
    }

    /// Takes note of what a job did to a scratch volume, as long as others use that.
    fn note_access(&mut self, job: JobIndex, volume: VolumeIndex, report: &JobReport) {
        // This job is still one of them.
        if self.graph.volume(volume).users_left <= 1 {
            self.observed_access.forget(volume);
            return;
        }
        let name = &self.graph.workflow.volume(volume).name;
        let used = used_in_all(report, name).filter(|_| !self.graph.volume(volume).is_cache);
        match used {
            Some(used) if has_written(&used) => {
                let file = used.first_changed_path;
                self.observed_access.wrote.insert((volume, job), file);
            }
            Some(used) if has_read(&used) => {
                let file = used.first_read_path;
                self.observed_access.read.insert((volume, job), file);
            }
            _ => {}
        }
    }

    /// A job failed by its own fault: perhaps it tried to write where it must not.
    pub(crate) fn look_for_refused_writes(&mut self, job: JobIndex, report: &JobReport) {
        let (blamed, line) = match find_refused_writes(View::new(self), job, report) {
            None => return,
            Some(RefusedWrites::Disk(volume, line)) => {
                return self.warn_read_only_disk(job, volume, &line);
            }
            Some(RefusedWrites::Volumes(volumes, line)) => (volumes, line),
        };
        for volume in blamed {
            let kind = match self.graph.volume(volume).is_cache {
                true => "a read-only cache",
                false => "mounted 'ro' by this job",
            };
            let text = format!(
                "job '{}' seems to write to volume '{}', which is {kind}; its output: {line}",
                self.graph.workflow.job(job).name,
                self.graph.workflow.volume(volume).name
            );
            self.warn(3, job, volume, text);
        }
    }

    fn warn_read_only_disk(&mut self, job: JobIndex, volume: VolumeIndex, line: &str) {
        let server = self.attempts.get(&job).map(|attempt| attempt.server);
        let node = server.map_or_else(String::new, |server| self.fleet.name(server));
        let text = format!(
            "the disk of volume '{}' of job '{}' seems to be read-only; see `dmesg` on its node, \
             probably '{node}'; the job's output: {line}",
            self.graph.workflow.volume(volume).name,
            self.graph.workflow.job(job).name,
        );
        self.warn(4, job, volume, text);
    }

    fn warn(&mut self, kind: u8, job: JobIndex, volume: VolumeIndex, text: String) {
        if self.observed_access.known.insert((kind, job, volume)) {
            self.tell(RunWarning {
                job: Some(job),
                volume: Some(volume),
                node: None,
                text,
            });
        }
    }

    /// A volume does not have all as its source has it: the parts of a cache say the same.
    pub(crate) fn volume_warned(&mut self, id: VolumeId, warnings: &SourceWarnings) {
        let Some(volume) = self.volumes.get(id).map(|instance| instance.volume) else {
            return;
        };
        let name = self.graph.workflow.volume(volume).name.clone();
        for text in warnings.sentences(&name) {
            self.tell(RunWarning {
                job: None,
                volume: Some(volume),
                node: None,
                text,
            });
        }
    }

    /// Tells the user something, if it is not too much.
    pub(crate) fn tell(&mut self, mut warning: RunWarning) {
        // Agents tell of files by their names, which may be bytes.
        warning.text = path::printable(&warning.text).into_owned();
        if self.observed_access.warnings.contains(&warning) {
            return;
        }
        if self.observed_access.warnings.len() >= WARNINGS_MAX {
            self.observed_access.omitted += 1;
        } else {
            self.observed_access.warnings.push(warning);
        }
    }
}
