//! Files on their way home: when each is sent, and what its success or failure means.

use std::collections::BTreeMap;

use bafs_proto::ids::{ExtractId, VolumeId};
use bafs_proto::{Error, ErrorClass, ErrorCode};

use super::action::{Action, MountedVolume};
use super::graph::JobState;
use super::scheduler::Scheduler;
use super::timers::Timer;
use super::volumes::State;
use crate::workflow::VolumeIndex;

/// Where an extraction is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The volume's writers are not all done.
    Waiting,
    /// The server was asked.
    Sending(ExtractId, VolumeId),
    /// Failed for the moment; the same extraction goes on later.
    Paused(ExtractId, VolumeId),
    /// Durable at home.
    Done,
    /// Will not be.
    Failed,
}

/// All extractions, in the order of the workflow's list.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Extractions {
    stages: Vec<Stage>,
    faults: Vec<u32>,
    by_id: BTreeMap<ExtractId, u32>,
    pub(super) done: u64,
    pub(super) failed: u64,
    pub(super) bytes: u64,
}

impl Extractions {
    pub(super) fn new(extracts: usize) -> Self {
        Self {
            stages: vec![Stage::Waiting; extracts],
            faults: vec![0; extracts],
            by_id: BTreeMap::new(),
            done: 0,
            failed: 0,
            bytes: 0,
        }
    }

    /// Whether nothing is left to send.
    pub(super) fn is_final(&self) -> bool {
        self.done + self.failed == self.stages.len() as u64
    }

    /// Extractions that a server was asked for: position, id and volume.
    pub(super) fn under_way(&self) -> impl Iterator<Item = (u32, ExtractId, VolumeId)> {
        self.by_id
            .iter()
            .filter_map(|(id, index)| match self.stages[*index as usize] {
                Stage::Sending(_, volume) => Some((*index, *id, volume)),
                _ => None,
            })
    }

    /// Whether no server was asked for anything that it has not answered.
    pub(super) fn is_quiet(&self) -> bool {
        self.by_id.is_empty()
    }
}

impl Scheduler {
    /// Sends the files of a volume home if its last writer is done.
    pub(super) fn send_files(&mut self, volume: VolumeIndex) {
        let node = self.graph.volume(volume);
        if node.writers_left > 0 || node.extracts_left == 0 {
            return;
        }
        for index in node.extracts.clone() {
            if self.extractions.stages[index as usize] == Stage::Waiting {
                self.send(index, volume);
            }
        }
    }

    fn send(&mut self, index: u32, volume: VolumeIndex) {
        let Some((id, server)) = self.volumes.scratch(volume) else {
            return;
        };
        if self
            .volumes
            .get(id)
            .is_none_or(|instance| instance.state != State::Ready)
        {
            return;
        }
        let extract = ExtractId(self.next_id());
        self.extractions.stages[index as usize] = Stage::Sending(extract, id);
        self.extractions.by_id.insert(extract, index);
        let source = MountedVolume { volume, id, server };
        self.out.push(Action::ExtractFile {
            extract,
            index,
            source,
        });
    }

    pub(super) fn send_again(&mut self, index: u32) {
        let Stage::Paused(extract, id) = self.extractions.stages[index as usize] else {
            return;
        };
        self.extractions.stages[index as usize] = Stage::Sending(extract, id);
        let Some(instance) = self.volumes.get(id) else {
            return;
        };
        let source = MountedVolume {
            volume: instance.volume,
            id,
            server: instance.server,
        };
        self.out.push(Action::ExtractFile {
            extract,
            index,
            source,
        });
    }

    pub(super) fn file_extracted(&mut self, extract: ExtractId, bytes: u64) {
        let Some(index) = self.extractions.by_id.remove(&extract) else {
            return;
        };
        self.extractions.bytes += bytes;
        self.extractions.done += 1;
        self.close_extract(index, Stage::Done);
    }

    pub(super) fn extract_failed(&mut self, extract: ExtractId, error: &Error) {
        let Some(&index) = self.extractions.by_id.get(&extract) else {
            return;
        };
        let Stage::Sending(_, id) = self.extractions.stages[index as usize] else {
            return;
        };
        if error.code == ErrorCode::NotFound {
            self.extractions.by_id.remove(&extract);
            self.extractions.stages[index as usize] = Stage::Waiting;
            self.not_written(index);
            return;
        }
        let faults = &mut self.extractions.faults[index as usize];
        *faults += 1;
        let faults = *faults;
        let is_hopeless = matches!(error.class(), ErrorClass::Denied | ErrorClass::Invalid);
        if is_hopeless || faults >= self.settings.extract_attempts_max {
            let spec = &self.graph.workflow.extracts[index as usize];
            let volume = &self.graph.workflow.volume(spec.volume).name;
            let (path, target) = (&spec.path, &spec.target);
            self.messages.push(format!(
                "file '{path}' of volume '{volume}' could not be sent to {target}: {error}"
            ));
            self.extractions.by_id.remove(&extract);
            self.extractions.failed += 1;
            self.close_extract(index, Stage::Failed);
            return;
        }
        self.extractions.stages[index as usize] = Stage::Paused(extract, id);
        let pause_ms = self.settings.pause_ms(faults);
        self.timers
            .set(self.now.plus_ms(pause_ms), Timer::Extract(index));
        if let Some(server) = self.volumes.get(id).and_then(|instance| instance.server) {
            self.out.push(Action::ProbeVolumes {
                server,
                volumes: vec![id],
            });
        }
    }

    /// The volume of these extractions is gone: they start afresh when it is written again.
    pub(super) fn take_back_extracts(&mut self, volume: VolumeIndex, id: VolumeId) {
        for index in self.graph.volume(volume).extracts.clone() {
            let stage = &mut self.extractions.stages[index as usize];
            if let Stage::Sending(extract, of) | Stage::Paused(extract, of) = *stage
                && of == id
            {
                *stage = Stage::Waiting;
                self.extractions.by_id.remove(&extract);
            }
        }
    }

    /// Gives up the extracts of a volume that a dead job should have written.
    pub(super) fn give_up_extracts(&mut self, volume: VolumeIndex) {
        if self.graph.volume(volume).writers_dead == 0 {
            return;
        }
        for index in self.graph.volume(volume).extracts.clone() {
            match self.extractions.stages[index as usize] {
                Stage::Done | Stage::Failed => continue,
                Stage::Sending(extract, _) | Stage::Paused(extract, _) => {
                    self.extractions.by_id.remove(&extract);
                }
                Stage::Waiting => {}
            }
            self.extractions.failed += 1;
            self.close_extract(index, Stage::Failed);
        }
    }

    /// The last writer finished without writing what was to be extracted: its fault.
    fn not_written(&mut self, index: u32) {
        let spec = &self.graph.workflow.extracts[index as usize];
        let (volume, path) = (spec.volume, spec.path.clone());
        let writers = self.graph.volume(volume).writers.iter().copied();
        let Some(job) = writers.max_by_key(|job| self.graph.rank(*job)) else {
            return;
        };
        if self.graph.state(job) != JobState::Done {
            return;
        }
        let name = &self.graph.workflow.volume(volume).name;
        let reason = format!("finished, but did not write '{path}' in volume '{name}'");
        if self.count_own_fault(job) {
            self.fail(job, reason, String::new());
        } else {
            self.redo(vec![job], Vec::new());
        }
    }

    fn close_extract(&mut self, index: u32, stage: Stage) {
        self.extractions.stages[index as usize] = stage;
        let volume = self.graph.workflow.extracts[index as usize].volume;
        let pipeline = self.graph.close_extract(volume);
        self.release_if_unneeded(volume);
        if let Some(pipeline) = pipeline {
            self.release_kept(pipeline);
        }
    }
}
