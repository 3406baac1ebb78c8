//! Disks that are full although their nodes offer more: how that is told from a volume that is too
//! small, and how such a node is tried again. What becomes of volumes that are too small is
//! `policy/failure/resize.rs`.

use std::collections::BTreeSet;

use bafs_proto::ids::ServerId;
use bafs_proto::job_report::VolumeUse;
use bafs_proto::message::JobReport;
use bafs_workflow::{JobIndex, VolumeIndex, VolumeKind};

use crate::describe::describe_bytes;
use crate::space::Space;
use crate::state::disk_fullness::{Finder, Fullness};
use crate::state::jobs::JobState;
use crate::state::observed_access::RunWarning;
use crate::state::scheduler_state::State;
use crate::state::timers::Timer;

/// Where nobody knows what the disk had free: so often a job may have met it as it seems, before a
/// lack of space is the declaration's fault.
const FULL_DISKS_MAX: u32 = 2;

/// A disk may have no space so often, one time after the other, before it is believed to be full:
/// somebody else may have taken it, and the next listing shows that.
const PASSING_MAX: u32 = 1;

/// A disk with less free is full, in bytes, for a job of whose calls nobody knows.
const FULL_BYTES: u64 = 16 << 20;

/// What a program says that found no space.
const NO_SPACE: &str = "No space left on device";

/// What a user can do about a full disk.
pub const FULL_DISK_HINT: &str = "free some of it, or start the node with a smaller --size";

/// What a user can do about a disk that has bytes, but no inodes.
pub const INODES_EXHAUSTED_HINT: &str =
    "remove files from its disk, or start the node on another disk";

/// What tells in a reason that a disk lacks files, and not bytes.
const NO_FILES: &str = "files (inodes) left";

/// What a user can do when the run has ended.
pub const RERUN_HINT: &str =
    "delete the journal of this run and start it again; results at home are kept";

/// Jobs that are named when all wait for a full disk.
const NAMES_SHOWN: usize = 3;

/// What refused a job space: the disk below this volume, not the volume.
struct Refusal {
    volume: VolumeIndex,
    /// What the disk had free; nothing where that is only believed.
    disk: Option<Space>,
}

impl State {
    /// Which node's disk had no space, and why it was that: it has less than the volume may still
    /// take. Where nobody knows that, volumes there refused the job that were not half full; as a
    /// single call may ask for more than a whole volume is to have, this is believed a few times.
    pub(crate) fn disk_was_full(
        &self,
        job: JobIndex,
        report: &JobReport,
    ) -> Option<(ServerId, String)> {
        if !self.found_no_space(job, report) {
            return None;
        }
        let Refusal { volume, disk } = self.refused_by_disk(job, report)?;
        let server = self.node_of(job, volume)?;
        let times = self.graph.job(job).troubles.environment.full_disks;
        if disk.is_none() && times >= FULL_DISKS_MAX {
            return None;
        }
        let name = &self.graph.workflow.volume(volume).name;
        let why = match disk {
            Some(free) => format!(
                "volume '{name}' ran out of space below its limit of {}",
                self.describe_disk(server, self.limit_of(volume), free)
            ),
            None => format!(
                "volume '{name}' ran out of space when less than half full: the disk of node {} \
                 may be full",
                self.fleet.name(server)
            ),
        };
        Some((server, why))
    }

    /// What a volume may hold and the disk of its node has free, in what that lacks.
    fn describe_disk(&self, server: ServerId, size: Space, free: Space) -> String {
        let node = self.fleet.name(server);
        let lacks_files = free.files == 0 || (free.files < size.files && free.bytes >= size.bytes);
        if !lacks_files {
            let (size, free) = (describe_bytes(size), describe_bytes(free));
            return format!("{size}: the disk of node {node} has {free} free");
        }
        let offered = self
            .fleet
            .get(server)
            .map_or(0, |node| node.seen.capacity.files);
        let [size, free, all] = [size.files, free.files, offered].map(with_commas);
        let left = if free == "0" { "no" } else { "few" };
        format!(
            "{size} files: the disk of node {node} has {left} {NO_FILES}: {free} of the \
             {all} that it offers"
        )
    }

    /// Whether a job that failed met a full disk in a volume of which nothing is counted: it was as
    /// good as full meanwhile, or the program says so, and it has less than the volume may take.
    pub(crate) fn met_full_disk(
        &self,
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
        let is_short = !disk.can_hold(self.size_of(volume).saturating_sub(held));
        let is_full = disk.bytes < FULL_BYTES || disk.files == 0;
        is_short && (is_full || report.output_tail.contains(NO_SPACE))
    }

    /// The most that a volume may hold, which of a watched one is less than its reservation.
    fn limit_of(&self, volume: VolumeIndex) -> Space {
        let (size, spec) = (self.size_of(volume), self.graph.workflow.volume(volume));
        let (bytes, files) = spec.limit.limit_for_reservation(size.bytes, size.files);
        Space { bytes, files }
    }

    /// The node of a scratch volume of a job; the job's own where the volume is gone.
    fn node_of(&self, job: JobIndex, volume: VolumeIndex) -> Option<ServerId> {
        let scratch = self.volumes.scratch(volume).and_then(|(_, server)| server);
        scratch.or_else(|| self.graph.job(job).last_server)
    }

    /// The first of the volumes that refused a job space because of the disk below it.
    fn refused_by_disk(&self, job: JobIndex, report: &JobReport) -> Option<Refusal> {
        let mut refused = self.refused_for_space(job, report);
        if refused.is_empty() {
            refused = self.scratch_written(job);
        }
        let used_of = |volume: VolumeIndex| {
            let name = &self.graph.workflow.volume(volume).name;
            report.volumes.iter().find(|used| used.name == *name)
        };
        let mut known = refused.iter().filter_map(|volume| {
            let used = used_of(*volume)?;
            let (size, disk) = (self.size_of(*volume), disk_of(used)?);
            let held = Space {
                bytes: used.used_bytes,
                files: used.used_files,
            };
            Some((*volume, disk, disk.can_hold(size.saturating_sub(held))))
        });
        if let Some((volume, disk, _)) = known.clone().find(|(.., has_room)| !has_room) {
            let disk = Some(disk);
            return Some(Refusal { volume, disk });
        }
        let is_half_full = |volume: &VolumeIndex| {
            let (size, used) = (self.size_of(*volume), used_of(*volume));
            // What a program removed before it ended may have filled the volume.
            used.is_none_or(|used| {
                used.used_bytes.max(used.written_bytes) >= size.bytes.div_ceil(2)
                    || used.used_files.max(used.changes) >= size.files.div_ceil(2)
            })
        };
        let is_unknown = known.next().is_none() && !refused.iter().any(is_half_full);
        let volume = *refused.first().filter(|_| is_unknown)?;
        Some(Refusal { volume, disk: None })
    }

    /// What to add to the reason of a failure that a lack of space explains.
    pub(crate) fn describe_full(&self, job: JobIndex, report: &JobReport) -> String {
        let full = self.refused_for_space(job, report).into_iter();
        let names = full.map(|volume| format!("'{}'", self.graph.workflow.volume(volume).name));
        let names: Vec<String> = names.collect();
        if names.is_empty() {
            return String::new();
        }
        let names = names.join(" and ");
        let refusal = self.refused_by_disk(job, report);
        if let Some(server) = refusal.and_then(|refusal| self.node_of(job, refusal.volume)) {
            let node = self.fleet.name(server);
            return format!(
                " when volume {names} ran out of space without being full: the disk of node {node} \
                 may be full; {FULL_DISK_HINT}"
            );
        }
        let full = self.refused_for_space(job, report);
        let lack = self.describe_too_small(&full);
        format!(" when volume {names} ran out of space: it {lack}")
    }

    /// The disk of a node was full for a job that wrote there, as it seems. It runs again, on
    /// another node if one can run it, and is not blamed.
    pub(crate) fn pass_by_full_disk(&mut self, job: JobIndex, server: ServerId, why: &str) {
        let Some(ran_on) = self.attempts.get(&job).map(|attempt| attempt.server) else {
            return;
        };
        self.abandon_attempt(job);
        let times = self.note_full(server, why, Finder::Writer);
        let stays = self.leave_full_disk(job, server);
        let node = self.graph.job_mut(job);
        node.troubles.environment.full_disks += 1;
        if ran_on == server && !stays {
            node.troubles.full_on.insert(server);
        }
        if times <= PASSING_MAX {
            let name = &self.graph.workflow.job(job).name;
            let text = format!("job '{name}' failed and runs again: {why}; {}", remedy(why));
            self.tell(RunWarning {
                job: Some(job),
                volume: None,
                node: Some(server),
                text,
            });
        }
        self.tell_full(server, why);
        if ran_on != server && stays {
            // It does not wait for the full disk where it runs: nothing else would end that.
            let faults = self.count_environment_fault(job);
            let pause_ms = self.settings.pause_ms(faults);
            return self.try_again(job, faults, pause_ms, &format!("{why}; {}", remedy(why)));
        }
        self.settle(job, 0);
    }

    /// A node had no space for a volume of a job that fits into what it offers. The job runs on
    /// another node if one can run it, and else waits, however long.
    pub(crate) fn lacks_room(&mut self, job: JobIndex, server: ServerId, fault: &str) {
        self.abandon_attempt(job);
        if !self.leave_full_disk(job, server) {
            self.graph.job_mut(job).troubles.no_room_on.insert(server);
        }
        self.tell_full(server, fault);
        self.settle(job, 0);
    }

    /// Volumes on a full disk that hold nobody's work go, so that they are made elsewhere: what an
    /// attempt left half-written went when that ended, so they are as if no job had ever run. What
    /// was filled goes when the disk was full twice: it crosses the link to home again. Answers
    /// whether others stay, which hold the job there.
    fn leave_full_disk(&mut self, job: JobIndex, server: ServerId) -> bool {
        let node = self.fleet.get(server);
        let may_pass = node.is_some_and(|node| node.full.times() <= PASSING_MAX);
        let mut stays = false;
        for volume in self.scratch_written(job) {
            let Some((id, Some(on))) = self.volumes.scratch(volume) else {
                continue;
            };
            if on != server {
                continue;
            }
            let mut writers = self.graph.volume(volume).writers.iter();
            let is_empty = writers.all(|writer| self.graph.state(*writer) != JobState::Done);
            let mut uses = self.attempts.values().flat_map(|attempt| &attempt.uses);
            let is_used = uses.any(|used| used.id == id);
            let kind = &self.graph.workflow.volume(volume).kind;
            let is_filled = !matches!(kind, VolumeKind::Scratch { fill: None });
            if !is_empty || is_used || (is_filled && may_pass) {
                stays = true;
                continue;
            }
            self.retire(id);
            self.take_back_extracts(volume, id);
            self.drop_copies(volume);
        }
        stays
    }

    /// A node had no space where it should have: it gets no new work for a moment, and then one job
    /// at a time of those that tell whether that is over. Answers how often it was so in a row.
    pub(crate) fn note_full(&mut self, server: ServerId, why: &str, finder: Finder) -> u32 {
        let now = self.now;
        let times = self.fleet.update(server, |node| {
            let is_another = node.aside_until.is_none();
            node.full.note(finder, why, is_another, now);
            node.full.times()
        });
        let times = times.unwrap_or(0);
        let timer = match times >= self.settings.environment_faults_max {
            true => Timer::Full(server),
            false => Timer::Aside(server),
        };
        self.set_aside_until(server, self.settings.retry_pause_ms_max, timer);
        times
    }

    /// Names a node whose disk seems to be full, once.
    fn tell_full(&mut self, server: ServerId, fault: &str) {
        let is_news = self.fleet.update(server, |node| {
            let is_full = node.full.times() > PASSING_MAX;
            is_full && !std::mem::replace(&mut node.full.is_told, true)
        });
        if is_news == Some(true) {
            let name = self.fleet.name(server);
            let text = format!(
                "the disk of node {name} seems to be full: {fault}; {}; the scheduler retries the \
                 node later",
                remedy(fault)
            );
            self.tell(RunWarning {
                job: None,
                volume: None,
                node: Some(server),
                text,
            });
        }
    }

    /// Whether the disk of a node was full so often in a row that nobody waits for it any more when
    /// nothing else goes on.
    fn is_long_full(&self, server: ServerId) -> bool {
        let node = self.fleet.get(server);
        node.is_some_and(|node| node.full.times() >= self.settings.environment_faults_max)
    }

    /// Whether a job that begins on a node, and lets these make volumes, tells if the node's disk
    /// has space again.
    pub(crate) fn is_probe(
        &self,
        job: JobIndex,
        server: ServerId,
        made_on: &BTreeSet<ServerId>,
    ) -> bool {
        let full = self.fleet.get(server).map(|node| &node.full);
        full.is_some_and(|full| {
            full.for_volumes > 0 && made_on.contains(&server)
                || full.for_writers > 0 && self.written_nodes(job).contains(&server)
        })
    }

    /// All volumes of a job were made on these nodes, which it asked for that when it began: they
    /// have the room that they refused before. What more it tells it tells when it ends.
    pub(crate) fn prove_room(&mut self, job: JobIndex, made_on: &BTreeSet<ServerId>) {
        let asked_at = self.attempts[&job].since;
        for &server in made_on {
            let node = self.fleet.get(server);
            if node.is_none_or(|node| node.full.for_volumes == 0) {
                continue;
            }
            let is_writer = self.written_nodes(job).contains(&server);
            self.fleet.update(server, |node| {
                node.full.note_made(asked_at);
                let is_over = !is_writer || node.full.for_writers == 0;
                node.probe.take_if(|probe| *probe == job && is_over);
            });
            self.queues.wake(server);
        }
    }

    /// A job succeeded: disks that it wrote to have space.
    pub(crate) fn prove_space(&mut self, job: JobIndex) {
        for server in self.written_nodes(job) {
            let node = self.fleet.get(server);
            if node.is_some_and(|node| node.full.times() > 0) {
                self.fleet.update(server, |node| {
                    node.full = Fullness::default();
                    node.probe = None;
                });
                self.queues.wake(server);
            }
        }
    }

    /// Where the scratch volumes are that a job writes.
    fn written_nodes(&self, job: JobIndex) -> BTreeSet<ServerId> {
        let written = self.scratch_written(job).into_iter();
        let servers = written.filter_map(|volume| self.volumes.scratch(volume)?.1);
        servers.collect()
    }

    /// What to tell when nothing goes on because all nodes that could run these jobs have had full
    /// disks for long.
    pub(crate) fn describe_full_disks(&self, waiting: &[JobIndex]) -> Option<String> {
        let mut nodes: Vec<ServerId> = Vec::new();
        for &job in waiting {
            let (need, slots) = (self.need_of(job), self.slots_of(job));
            let refused_by = &self.graph.job(job).troubles.refused_by;
            let able = self.fleet.live().filter(|(id, node)| {
                node.seen.slots >= slots
                    && !refused_by.contains(id)
                    && self.can_ever_hold(job, *id, need)
            });
            let able: Vec<ServerId> = able.map(|(id, _)| id).collect();
            let first = *able.first()?;
            if !able.into_iter().all(|id| self.is_long_full(id)) {
                return None;
            }
            if !nodes.contains(&first) {
                nodes.push(first);
            }
        }
        let server = *nodes.first()?;
        let name = |job: &JobIndex| format!("'{}'", self.graph.workflow.job(*job).name);
        let names: Vec<String> = waiting.iter().take(NAMES_SHOWN).map(name).collect();
        let left = self.graph.workflow.jobs.len() as u64 - self.graph.finals();
        let more = match left.saturating_sub(names.len() as u64) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let node = self.fleet.get(server)?;
        Some(format!(
            "no node can run job {}{more}: the disk of node {} was full {} times in a row (last: \
             {}); {}; then {RERUN_HINT}",
            names.join(", "),
            self.fleet.name(server),
            node.full.times(),
            node.full.why,
            remedy(&node.full.why)
        ))
    }
}

/// What helps against a disk that is full in this way.
fn remedy(why: &str) -> &'static str {
    match why.contains(NO_FILES) {
        true => INODES_EXHAUSTED_HINT,
        false => FULL_DISK_HINT,
    }
}

/// A number with commas between its thousands.
fn with_commas(number: u64) -> String {
    let digits = number.to_string();
    let first = digits.len() % 3;
    let with_comma = |(at, digit): (usize, char)| {
        let comma = (at > 0 && at % 3 == first).then_some(',');
        [comma, Some(digit)]
    };
    let shown = digits.chars().enumerate().flat_map(with_comma);
    shown.flatten().collect()
}

/// What the disk below a volume had free, as far as that is known.
fn disk_of(used: &VolumeUse) -> Option<Space> {
    let bytes = used.disk_free_bytes?;
    let files = used.disk_free_files.unwrap_or(u64::MAX);
    Some(Space { bytes, files })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remedy_fits_what_the_disk_lacks() {
        let told = |what: &str| remedy(&format!("the disk of node n1 has {what}"));
        assert_eq!(
            told("no files (inodes) left: 0 of the 1,400"),
            INODES_EXHAUSTED_HINT
        );
        assert_eq!(told("4.0 kB free"), FULL_DISK_HINT);
    }

    #[test]
    fn large_numbers_have_commas() {
        let shown = [0, 12, 999, 1_000, 1_400, 12_345, 123_456, 1_234_567].map(with_commas);
        let expected = [
            "0",
            "12",
            "999",
            "1,000",
            "1,400",
            "12,345",
            "123,456",
            "1,234,567",
        ];
        assert_eq!(shown, expected);
    }
}
