//! What a job waits for, and what a node has left, in words: for people who ask why. Decides
//! nothing.

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::time::Time;
use bafs_workflow::JobIndex;

use crate::describe::{bytes_only, describe, describe_bytes};
use crate::event::Event;
use crate::policy::View;
use crate::policy::admission::node_gathering::no_node;
use crate::space::Space;
use crate::state::jobs::JobState;
use crate::state::scheduler_state::{Phase, State};
use crate::state::timers::Timer;

/// Names that are given in full.
const NAMES_SHOWN: usize = 3;

impl State {
    /// What a job waits for now, or why it never ran; nothing when it runs, or has run.
    pub fn describe_wait(&self, job: JobIndex) -> Option<String> {
        match (self.phase, self.graph.state(job)) {
            (_, JobState::Done | JobState::Failed) => None,
            (_, JobState::Active) => self.missing_volumes(job),
            (_, JobState::Skipped) => Some(self.skipped_for(job)),
            (Phase::Finishing | Phase::Over, state) => Some(self.ended_before(job, state)),
            (Phase::Gathering, _) => Some(View::new(self).misfit().unwrap_or_else(no_node)),
            (Phase::Running, JobState::Waiting) => Some(self.awaited(job)),
            (Phase::Running, JobState::HeldBack) => {
                let due = self.timers.due(Timer::Job(job));
                let seconds = due.map_or(0, |due| due.ms_since(self.now).div_ceil(1_000));
                Some(format!(
                    "it failed; the scheduler retries it in {seconds} s"
                ))
            }
            (Phase::Running, JobState::Ready) => {
                Some(self.describe_hold(job).unwrap_or_else(|| self.lacking(job)))
            }
        }
    }

    /// Why a job will not run: the job before it with which that began.
    fn skipped_for(&self, job: JobIndex) -> String {
        let dead_before = |job: JobIndex| {
            let mut before = self.graph.before(job);
            before.find(|other| {
                self.graph.state(*other).is_dead()
                    && self.graph.waiting_for(*other).any(|later| later == job)
            })
        };
        let mut first = job;
        while let Some(before) = dead_before(first) {
            first = before;
        }
        let name = &self.graph.workflow.job(first).name;
        match self.graph.state(first) {
            JobState::Failed => format!("it depends on '{name}', which failed"),
            _ if first == job => "it was cancelled".to_owned(),
            _ => format!("it depends on '{name}', which was cancelled"),
        }
    }

    /// Why a job did not run that could have.
    fn ended_before(&self, job: JobIndex, state: JobState) -> String {
        let why = match self.messages.first() {
            _ if self.is_cancelled => "the run was cancelled".to_owned(),
            Some(message) => format!("the run ended: {message}"),
            None => "the run ended before it could start".to_owned(),
        };
        match state {
            JobState::Waiting => format!("{}; {why}", self.awaited(job)),
            _ => why,
        }
    }

    /// Of a job that has its node, the volumes that are still being made for it.
    fn missing_volumes(&self, job: JobIndex) -> Option<String> {
        let attempt = self.attempts.get(&job)?;
        let instances = attempt.missing.iter();
        let missing = instances.filter_map(|id| {
            let instance = self.volumes.get(*id)?;
            let name = &self.graph.workflow.volume(instance.volume).name;
            Some(format!("'{name}'"))
        });
        let missing: Vec<String> = missing.take(NAMES_SHOWN).collect();
        let node = self.fleet.name(attempt.server);
        let (noun, names) = match missing.len() {
            0 => return None,
            1 => ("volume", missing.concat()),
            _ => ("volumes", missing.join(", ")),
        };
        Some(format!(
            "it waits until node {node} has made {noun} {names}"
        ))
    }

    fn awaited(&self, job: JobIndex) -> String {
        let name = |other: JobIndex| format!("'{}'", self.graph.workflow.job(other).name);
        let is_awaited = |other: &JobIndex| {
            self.graph.state(*other) != JobState::Done
                && self.graph.waiting_for(*other).any(|later| later == job)
        };
        let mut awaited: Vec<JobIndex> = self.graph.before(job).collect();
        awaited.sort_unstable();
        awaited.dedup();
        awaited.retain(is_awaited);
        let names: Vec<String> = awaited
            .iter()
            .take(NAMES_SHOWN)
            .copied()
            .map(name)
            .collect();
        let more = match awaited.len().saturating_sub(NAMES_SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        format!("it waits for {}{more} to finish", names.join(", "))
    }

    /// What the user holds, if that is why a job does not start.
    fn describe_hold(&self, job: JobIndex) -> Option<String> {
        let held = match (self.is_run_held(), self.is_held(job)) {
            (true, _) => "the run: no job",
            (false, true) => "its pipeline: no job of it",
            (false, false) => return None,
        };
        Some(format!("the user holds {held} starts until it is released"))
    }

    fn lacking(&self, job: JobIndex) -> String {
        let mounts = self.graph.mounted(job).into_iter();
        let mut written = mounts.filter(|(_, writable)| *writable);
        let busy = written.find(|(volume, _)| {
            self.graph.volume(*volume).writer.is_some() || self.is_being_copied(*volume)
        });
        if let Some((volume, _)) = busy {
            let name = &self.graph.workflow.volume(volume).name;
            return format!("another job writes volume '{name}', or the volume is being copied");
        }
        if self.waits_for_probe(self.graph.pipeline(job)) {
            return "its volume sizes are unknown: it waits until a similar pipeline is measured"
                .to_owned();
        }
        if self.waits_for_like(job) {
            return "its volume sizes are unknown: it waits until a similar job is measured"
                .to_owned();
        }
        if let Some(first) = self.protected.filter(|p| *p != self.graph.pipeline(job)) {
            let name = &self.graph.workflow.job(JobIndex(first)).name;
            return format!("the pipeline of '{name}' runs alone, because space is short");
        }
        if View::new(self).awaits_departure(job) {
            return "its data move to another node, because their node leaves".to_owned();
        }
        let (need, slots) = (self.need_of(job), self.slots_of(job));
        let live = self.fleet.live().map(|(server, _)| server);
        let able: Vec<ServerId> = live.filter(|s| self.could_run(job, *s, need)).collect();
        if able.is_empty() {
            return format!(
                "no live node can run it: it needs {slots} slot(s) and {} on a node that has not \
                 rejected it and on which it has not failed",
                describe(need)
            );
        }
        let ends = |server: &ServerId| View::new(self).can_end_in_time(job, *server);
        let able: Vec<ServerId> = able.into_iter().filter(ends).collect();
        if able.is_empty() {
            let seconds = self.graph.workflow.job(job).runtime_s.unwrap_or(0);
            return format!(
                "it takes {seconds} s by its description, and every node that can run it leaves \
                 before that"
            );
        }
        let has_memory = |server: &ServerId| View::new(self).has_room_for_job(job, *server);
        if !able.iter().any(has_memory) {
            return format!(
                "it asks for {} of memory, and other jobs use that of the nodes that can run it",
                describe_bytes(bytes_only(self.memory_of(job)))
            );
        }
        let has_slot = |server: &ServerId| self.fleet.free_slots(*server) >= slots;
        let free: Vec<ServerId> = able.iter().copied().filter(has_slot).collect();
        if free.is_empty() {
            return self.lacking_slots(&able, slots);
        }
        let room = free.iter().map(|server| self.fleet.available(*server));
        let most = room.max().unwrap_or(Space::ZERO);
        if !most.can_hold(need) {
            return format!(
                "it waits for space: it needs {}, but the nodes with a free slot have at most {}",
                describe(need),
                describe(most)
            );
        }
        "there is space for it, but started pipelines need that space to end, or other jobs go \
         first"
            .to_owned()
    }

    /// Of nodes without so many free slots.
    fn lacking_slots(&self, able: &[ServerId], slots: u32) -> String {
        let counted = |count: usize, noun: &str| match count {
            1 => format!("1 {noun}"),
            _ => format!("{count} {noun}s"),
        };
        let wanted = counted(slots as usize, "free slot");
        let kept = able.iter().filter(|server| {
            let limit = self.fleet.get(**server).and_then(|node| node.limit);
            limit.is_some_and(|limit| limit.is_shared && limit.slots < slots)
        });
        let mut told = match able.len() {
            1 => format!("it waits for {wanted} on the only node that can run it"),
            nodes => format!("it waits for {wanted} on one of {nodes} nodes"),
        };
        let kept = kept.count();
        if kept > 0 {
            let nodes = counted(kept, "node");
            told += &format!("; other runs hold the needed slots of {nodes}");
        }
        told
    }

    /// What a failure was of, with the node where it happened: before it is told to the core.
    pub fn describe_failed_call(&self, event: &Event) -> String {
        let of_volume = |id: &VolumeId| {
            let instance = self.volumes.get(*id)?;
            let name = &self.graph.workflow.volume(instance.volume).name;
            Some((format!("volume '{name}'"), instance.server))
        };
        let (doing, found) = match event {
            Event::JobEnded { execution, .. } | Event::JobStartFailed { execution, .. } => {
                let found = self.execution(*execution).map(|(job, server)| {
                    let name = &self.graph.workflow.job(job).name;
                    (format!("job '{name}'"), Some(server))
                });
                ("the environment of", found)
            }
            Event::VolumeCreateFailed { volume, .. } => ("making", of_volume(volume)),
            Event::ExtractFailed { extract, .. } => {
                let volume = self.extractions.volume_of(*extract);
                (
                    "sending a file home from",
                    volume.as_ref().and_then(of_volume),
                )
            }
            _ => ("a call of", None),
        };
        let (what, server) = found.unwrap_or_else(|| ("this run".to_owned(), None));
        match server {
            Some(server) => format!("{doing} {what} on node {}", self.fleet.name(server)),
            None => format!("{doing} {what}"),
        }
    }

    /// What a node has left for new work.
    pub fn describe_node(&self, server: ServerId) -> Option<String> {
        let node = self.fleet.get(server)?;
        if node.is_lost {
            return Some("it is lost".to_owned());
        }
        let left_s = |until: Time| until.ms_since(self.now).div_ceil(1_000);
        let standing = match (node.missing_since, node.aside_until) {
            _ if node.seen.departure.is_draining => ", and it drains".to_owned(),
            (Some(_), _) => ", and the catalog does not list it".to_owned(),
            (None, Some(until)) => format!(", and it is in quarantine for {} s", left_s(until)),
            (None, None) => String::new(),
        };
        Some(format!(
            "it has {} of {} slots in use, {} reserved, and {} free{standing}",
            node.busy,
            node.seen.slots,
            describe(node.reserved),
            describe(self.fleet.available(server))
        ))
    }
}
