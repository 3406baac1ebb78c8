//! A run goes on from what earlier runs of its workflow did: jobs that need not run are done, and
//! kept volumes are in use. Which these are says `earlier_work/`.

use std::collections::BTreeSet;

use bafs_workflow::JobIndex;

use crate::action::Action;
use crate::earlier_work::{AdoptedVolume, EarlierWork};
use crate::state::jobs::JobState;
use crate::state::scheduler_state::State;
use crate::state::volumes::InstanceState;

impl State {
    /// Takes up what earlier runs did.
    pub(crate) fn earlier_work_found(&mut self, work: EarlierWork) {
        // What a job made that runs now is valid no more, even if this run is interrupted.
        let up_to_date: BTreeSet<JobIndex> = work.up_to_date.iter().copied().collect();
        let jobs = self.graph.workflow.jobs.iter().zip(0u32..);
        let running = jobs.filter(|(_, index)| !up_to_date.contains(&JobIndex(*index)));
        let running: BTreeSet<String> = running.map(|(job, _)| job.name.clone()).collect();
        for record in work.records {
            if !running.contains(&record.job) {
                self.records.of_job.insert(record.job.clone(), record);
            }
        }
        for (volume, digest) in work.sources {
            self.records.sources.insert(volume, digest);
        }
        for (job, program) in work.programs {
            self.records.programs.insert(job, program);
        }
        for (job, files) in work.files {
            self.records.files.insert(job, files);
        }
        self.records.is_temporary = work.is_temporary;
        if !work.nodes.is_empty() {
            self.servers_seen(work.nodes, &[]);
        }
        for (id, server) in work.dropped {
            self.stale.insert(id, server);
            self.out.push(Action::DeleteVolume { id, server });
        }
        // Before jobs are done that wrote them: else these would run again.
        for adopted in work.adopted {
            let volume = adopted.volume;
            self.adopt(adopted);
            // Who reads it reads what these wrote.
            let writers = self.graph.volume(volume).writers.clone();
            for writer in writers.into_iter().filter(|it| up_to_date.contains(it)) {
                self.observed_access
                    .wrote
                    .insert((volume, writer), String::new());
            }
        }
        self.skip_extracts(&work.up_to_date);
        self.skip_redo(&work.up_to_date);
    }

    fn adopt(&mut self, adopted: AdoptedVolume) {
        let AdoptedVolume {
            id,
            volume,
            server,
            size,
        } = adopted;
        if self.volumes.is_live(volume) || self.fleet.get(server).is_none() {
            return;
        }
        let instance = self.reserve_instance(volume, server, size, InstanceState::Ready);
        self.volumes.add(id, instance);
        self.requeue_users(volume);
    }

    /// Results that are at home already: those of volumes of which no writer runs.
    fn skip_extracts(&mut self, done: &[JobIndex]) {
        let done: BTreeSet<JobIndex> = done.iter().copied().collect();
        for volume in self.graph.volume_indexes().collect::<Vec<_>>() {
            let node = self.graph.volume(volume);
            let is_done = |writer: &JobIndex| {
                done.contains(writer) || self.graph.state(*writer) == JobState::Done
            };
            if node.is_cache || node.extracts.is_empty() || !node.writers.iter().all(is_done) {
                continue;
            }
            for index in node.extracts.clone() {
                self.skip_extract(index);
            }
        }
    }
}
