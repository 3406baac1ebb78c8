//! Notes what made the outputs of a job that is done, and forgets it when these are gone.

use bafs_proto::ids::ExecutionId;
use bafs_proto::job_report::ObservedInputs;
use bafs_proto::message::JobReport;
use bafs_proto::source::SourceIdentity;
use bafs_workflow::{JobIndex, VolumeIndex, VolumeKind};

use crate::earlier_work::{
    JobRecord, KeptVolume, ResultRecord, SeenSource, SourceRecord, describe_job_digest,
    written_volumes,
};
use crate::policy::View;
use crate::space::Space;
use crate::state::job_records::FinishedJob;
use crate::state::jobs::JobState;
use crate::state::scheduler_state::State;

/// What a job saw of a volume through all of its mounts; nothing if that is not known of each.
fn unite_inputs<'i>(
    mounts: impl Iterator<Item = Option<&'i ObservedInputs>>,
) -> Option<ObservedInputs> {
    let mounts: Vec<&ObservedInputs> = mounts.collect::<Option<_>>()?;
    let (first, others) = mounts.split_first()?;
    let mut all = (*first).clone();
    for other in others {
        all.files.extend_from_slice(&other.files);
        all.directories.extend_from_slice(&other.directories);
        all.listed.extend_from_slice(&other.listed);
        all.missing.extend_from_slice(&other.missing);
    }
    Some(all)
}

impl State {
    /// A job is done. Where nothing is noted for a journal, no later run will ask.
    pub(crate) fn record_job(&mut self, job: JobIndex, execution: ExecutionId, report: &JobReport) {
        if !self.graph.is_recording() {
            return;
        }
        let workflow = &self.graph.workflow;
        let before = self.producers(job).into_iter();
        let producers = before.filter_map(|producer| {
            let name = &workflow.job(producer).name;
            Some((producer, self.records.execution(producer, name)?))
        });
        let mounted = self.graph.mounted(job).into_iter();
        let inputs = mounted.filter_map(|(volume, _)| {
            let inputs = self.counted_inputs(volume, report)?;
            Some((volume, inputs))
        });
        let mut finished = FinishedJob {
            execution,
            producers: producers.collect(),
            inputs: inputs.collect(),
            results: Vec::new(),
        };
        // A million jobs are noted, and each list has room for four without this.
        finished.producers.shrink_to_fit();
        finished.inputs.shrink_to_fit();
        self.records.note(job, &workflow.job(job).name, finished);
    }

    /// What a job read of a cache volume; nothing where nobody counted it.
    fn counted_inputs(&self, volume: VolumeIndex, report: &JobReport) -> Option<ObservedInputs> {
        let spec = self.graph.workflow.volume(volume);
        if matches!(spec.kind, VolumeKind::Scratch { .. }) {
            return None;
        }
        let used = report.volumes.iter();
        let used = used.filter(|used| used.name == spec.name);
        unite_inputs(used.map(|used| used.inputs.as_ref()))
    }

    /// What a job saw of the source of a volume, if that has one. Where nobody counted it may be
    /// all of it, as it was before the volume was made.
    fn seen_source(&self, volume: VolumeIndex, finished: &FinishedJob) -> Option<SourceRecord> {
        let source = match &self.graph.workflow.volume(volume).kind {
            VolumeKind::Scratch { fill } => fill.as_ref()?,
            VolumeKind::Cache { source, .. } => source,
        };
        let counted = finished.inputs.iter().find(|(cache, _)| *cache == volume);
        let whole = || match self.records.sources.get(&volume) {
            Some(digest) => SeenSource::Whole(*digest),
            None => SeenSource::Unknown,
        };
        let exactly =
            |(_, inputs): &(_, ObservedInputs)| SeenSource::Exactly(Box::new(inputs.clone()));
        Some(SourceRecord {
            source: source.clone(),
            seen: counted.map_or_else(whole, exactly),
        })
    }

    /// The whole record of a job of this run.
    fn complete_record(&self, job: JobIndex, finished: &FinishedJob) -> JobRecord {
        let workflow = &self.graph.workflow;
        let spec = workflow.job(job);
        let mounts = spec.mounts.iter();
        let sources = mounts.filter_map(|mount| self.seen_source(mount.volume, finished));
        let named = |(job, execution): &(JobIndex, ExecutionId)| {
            (workflow.job(*job).name.clone(), *execution)
        };
        let sent = |(index, identity): &(u32, SourceIdentity)| ResultRecord {
            target: workflow.extracts[*index as usize].target.clone(),
            identity: *identity,
        };
        JobRecord {
            job: spec.name.clone(),
            execution: finished.execution,
            description: describe_job_digest(workflow, job, &self.producers(job), |volume| {
                self.graph.volume(volume).extracts.as_slice()
            }),
            program: self.records.programs.get(&job).cloned(),
            files: self.records.files.get(&job).cloned().unwrap_or_default(),
            sizes: self.declared_sizes(job),
            sources: sources.collect(),
            producers: finished.producers.iter().map(named).collect(),
            results: finished.results.iter().map(sent).collect(),
        }
    }

    /// Declared sizes of the volumes that a job writes. The run may have changed one that was
    /// unknown or too small: it counts as not declared.
    fn declared_sizes(&self, job: JobIndex) -> Vec<Space> {
        let mounts = self.graph.workflow.job(job).mounts.iter();
        let written = mounts.filter(|mount| mount.writable);
        let is_declared = written.map(|mount| !self.graph.is_resized(mount.volume));
        let sizes = written_volumes(&self.graph.workflow, job).zip(is_declared);
        sizes
            .map(|((_, size), is_declared)| match is_declared {
                true => size,
                false => Space::default(),
            })
            .collect()
    }

    /// Jobs whose execution that of a job depends on: parents, and writers before it of its
    /// volumes.
    fn producers(&self, job: JobIndex) -> Vec<JobIndex> {
        let mounted = self.graph.mounted(job).into_iter();
        let scratch = mounted.filter(|(volume, _)| !self.graph.volume(*volume).is_cache);
        let writers = scratch.flat_map(|(volume, _)| &self.graph.volume(volume).writers);
        let rank = self.graph.rank(job);
        let before = writers
            .copied()
            .filter(|writer| self.graph.rank(*writer) < rank);
        let parents = self.graph.workflow.job(job).parents.iter().copied();
        let mut all: Vec<JobIndex> = parents.chain(before).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// What a job wrote is gone, or was wrong.
    pub(crate) fn forget_record(&mut self, job: JobIndex) {
        let name = &self.graph.workflow.job(job).name;
        self.records.forget(job, name);
    }

    /// A result is at home, and is this there. Its last writer made it what it is: without that job
    /// in the workflow the result is another, so the writers before have none of it.
    pub(crate) fn result_identified(&mut self, index: u32, identity: SourceIdentity) {
        let workflow = &self.graph.workflow;
        let extract = &workflow.extracts[index as usize];
        let writers = &self.graph.volume(extract.volume).writers;
        let last = writers
            .iter()
            .max_by_key(|writer| self.graph.rank(**writer));
        for writer in writers {
            let is_last = last == Some(writer);
            if let Some(finished) = self.records.finished.get_mut(writer) {
                finished.results.retain(|(other, _)| *other != index);
                if is_last {
                    finished.results.reserve_exact(1);
                    finished.results.push((index, identity));
                }
            } else if let Some(record) = self.records.of_job.get_mut(&workflow.job(*writer).name) {
                let target = &extract.target;
                record.results.retain(|result| result.target != *target);
                if is_last {
                    let target = target.clone();
                    record.results.push(ResultRecord { target, identity });
                }
            }
        }
    }

    /// Records of jobs that are done, of this run and of earlier ones.
    pub fn job_records(&self) -> impl Iterator<Item = JobRecord> {
        let earlier = self.records.of_job.values().cloned();
        let finished = self.records.finished.iter();
        earlier.chain(finished.map(|(job, finished)| self.complete_record(*job, finished)))
    }

    /// Whether the nodes end with the run.
    pub fn is_temporary(&self) -> bool {
        self.records.is_temporary
    }

    /// Volumes that outlive the run, for the next one to use.
    pub fn kept_volumes(&self) -> Vec<KeptVolume> {
        let view = View::new(self);
        let kept = self.volumes.iter().filter_map(|(id, instance)| {
            let volume = instance.volume;
            let server = instance.server?;
            let is_worth = view.is_worth_keeping(volume) && self.volumes.scratch(volume)?.0 == id;
            let writers = self.graph.volume(volume).writers.iter().copied();
            let done = writers.filter(|writer| self.graph.state(*writer) == JobState::Done);
            let written = done.filter_map(|writer| {
                let name = self.graph.workflow.job(writer).name.clone();
                let execution = self.records.execution(writer, &name)?;
                Some((name, execution))
            });
            is_worth.then(|| KeptVolume {
                id,
                name: self.graph.workflow.volume(volume).name.clone(),
                server,
                size: instance.size,
                writers: written.collect(),
            })
        });
        kept.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_of_all_mounts_count() {
        let identity = SourceIdentity {
            size: 1,
            mtime_ns: 2,
            ctime_ns: 3,
        };
        let of = |name: &str| ObservedInputs {
            files: vec![(name.to_owned(), identity)],
            ..ObservedInputs::default()
        };
        let (one, other) = (of("a"), of("b"));
        let both = unite_inputs([Some(&one), Some(&other)].into_iter());
        let both = both.expect("both are known");
        assert_eq!(both.files, [one.files.clone(), other.files].concat());
        assert_eq!(unite_inputs([Some(&one), None].into_iter()), None);
        assert_eq!(unite_inputs(std::iter::empty()), None);
    }
}
