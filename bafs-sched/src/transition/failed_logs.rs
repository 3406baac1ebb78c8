//! Logs of jobs that failed for good, on their way home: the files that took what a job printed, if
//! the workflow extracts them. All else that such a job wrote stays away from home.

use std::path::Path;

use bafs_proto::ids::{ExtractionId, VolumeId};
use bafs_proto::{Error, ErrorCode};
use bafs_workflow::{Extract, JobIndex};

use crate::action::{Action, MountedVolume};
use crate::policy::View;
use crate::policy::failure::extraction_failures::{LogVerdict, judge_log};
use crate::state::failed_logs::FailedLog;
use crate::state::scheduler_state::{Phase, State};
use crate::state::timers::Timer;
use crate::state::volumes::InstanceState;

impl State {
    /// Whether an extraction is that of the log of a job that failed.
    pub(crate) fn is_failed_log(&self, extract: ExtractionId) -> bool {
        self.extractions.logs.volume_of(extract).is_some()
    }

    /// A job is about to fail for good: those of its volumes that have a log of it stay until that
    /// is at home. Call it while it still has its volumes.
    pub(crate) fn keep_logs(&mut self, job: JobIndex) {
        if self.phase == Phase::Finishing {
            return;
        }
        for index in self.logs_of(job) {
            let volume = self.graph.workflow.extracts[index as usize].volume;
            let Some((id, server)) = self.volumes.scratch(volume) else {
                continue;
            };
            // A later volume of that name was never touched by this attempt.
            let attempt = self.attempts.get(&job);
            let is_other = attempt.is_some_and(|attempt| !attempt.uses(id));
            let instance = self.volumes.get(id);
            let is_ready = instance.is_some_and(|instance| instance.state == InstanceState::Ready);
            if is_other || !is_ready {
                continue;
            }
            // What was asked for is not asked for under another id.
            let (extract, is_asked) = match self.extractions.begun(index, id) {
                Some(begun) => begun,
                None if self.extractions.is_waiting(index) => (ExtractionId(self.next_id()), false),
                None => continue,
            };
            let log = FailedLog {
                job,
                index,
                volume: id,
                since: self.now,
                faults: 0,
                is_paused: false,
            };
            self.extractions.logs.logs.insert(extract, log);
            if !is_asked {
                let source = MountedVolume { volume, id, server };
                self.out.push(Action::ExtractFile {
                    extract,
                    index,
                    source,
                });
            }
        }
    }

    /// Positions of the extracts that are files which a job's output goes to.
    fn logs_of(&self, job: JobIndex) -> Vec<u32> {
        let spec = self.graph.workflow.job(job);
        let mut logs = Vec::new();
        for path in [&spec.command.stdout, &spec.command.stderr] {
            let Some(path) = path.as_deref().map(Path::new) else {
                continue;
            };
            for mount in spec.mounts.iter().filter(|mount| mount.writable) {
                let Ok(inner) = path.strip_prefix(&mount.path) else {
                    continue;
                };
                let extracts = self.graph.volume(mount.volume).extracts.iter().copied();
                let of = |index: &u32| &self.graph.workflow.extracts[*index as usize];
                // The set of a job that failed is not whole.
                let is_log = |it: &Extract| !it.is_set() && Path::new(&it.path) == inner;
                logs.extend(extracts.filter(|index| is_log(of(index))));
            }
        }
        logs.sort_unstable();
        logs.dedup();
        logs
    }

    /// Takes note of a log that is at home. Answers whether it was one.
    pub(crate) fn log_sent(&mut self, extract: ExtractionId) -> bool {
        self.end_log(extract, |path, target| format!("its {path} is at {target}"))
    }

    /// Takes note of a log that could not be sent. Answers whether it was one.
    pub(crate) fn log_failed(&mut self, extract: ExtractionId, error: &Error) -> bool {
        let Some(log) = self.extractions.logs.logs.get(&extract) else {
            return false;
        };
        let (volume, index) = (log.volume, log.index);
        match judge_log(View::new(self), log, error) {
            LogVerdict::Missing => {
                self.extractions.logs.logs.remove(&extract);
                self.release_log(volume);
            }
            LogVerdict::Retry(pause_ms) => {
                let anew = match error.code {
                    ErrorCode::UploadFenced => ExtractionId(self.next_id()),
                    _ => extract,
                };
                if let Some(mut log) = self.extractions.logs.logs.remove(&extract) {
                    log.faults += 1;
                    log.is_paused = true;
                    self.extractions.logs.logs.insert(anew, log);
                }
                self.timers
                    .set(self.now.plus_ms(pause_ms), Timer::Extract(index));
            }
            LogVerdict::GiveUp => {
                self.end_log(extract, |path, target| {
                    format!("its {path} could not be sent to {target}: {error}")
                });
            }
        }
        true
    }

    /// The last of what was to be done for a log; the message of the job's failure says how it
    /// went.
    fn end_log(&mut self, extract: ExtractionId, tell: impl Fn(&str, &str) -> String) -> bool {
        let Some(log) = self.extractions.logs.logs.remove(&extract) else {
            return false;
        };
        let spec = &self.graph.workflow.extracts[log.index as usize];
        let told = tell(&spec.path, &spec.target.to_string());
        // It failed a moment ago.
        let at = self
            .failures
            .last_position(|failure| failure.job == log.job);
        if let Some(failure) = at.map(|at| &mut self.failures[at]) {
            failure.reason = format!("{}; {told}", failure.reason);
        }
        self.release_log(log.volume);
        true
    }

    /// Deletes a volume that stayed only for its logs, when the last of them is done.
    fn release_log(&mut self, id: VolumeId) {
        let instance = self.volumes.get(id);
        let is_held = instance.is_some_and(|instance| instance.state == InstanceState::Held);
        if is_held && !self.extractions.logs.holds(id) {
            self.retire(id);
        }
    }

    /// Sends a log again that failed for the moment.
    pub(crate) fn send_log_again(&mut self, index: u32) {
        let logs = &mut self.extractions.logs.logs;
        let Some((&extract, _)) = logs.iter().find(|(_, log)| log.index == index) else {
            return;
        };
        let Some(log) = logs.get_mut(&extract) else {
            return;
        };
        if !std::mem::take(&mut log.is_paused) {
            return;
        }
        if let Some(instance) = self.volumes.get(log.volume) {
            let source = MountedVolume {
                volume: instance.volume,
                id: log.volume,
                server: instance.server,
            };
            self.out.push(Action::ExtractFile {
                extract,
                index,
                source,
            });
        }
    }
}
