//! A run of our own from its journal: each job's measured reads, computing time and writes, and the
//! nodes of the run. Failures of that run are not repeated.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use bafs_proto::ids::ServerId;
use bafs_proto::job_report::{TouchedPages, VolumeUse};
use bafs_sched::io::journal::History;
use bafs_sched::report::{JobSummary, RunReportBuilder};
use bafs_sched::timeline::{ExecutionRecord, Timeline, build_timeline};
use bafs_sched::{IoMode, Outcome, Settings, Space};
use bafs_workflow::{FirstUsers, JobIndex, VolumeIndex, VolumeKind, Workflow};

use super::measured_rates::{completed_executions, measure_home_rate, measure_node_rates};
use super::{PastError, PastRun, Site};
use crate::planner::NodeClass;
use crate::simulator::{JobLoad, MeasuredLoad, MountLoad};
use crate::strategy_selector::ModelSelector;

/// Size of the pages in which agents report reads, in bytes.
const PAGE_BYTES: u64 = 4_096;

/// Time for which the catalog lists a node after its last advert, in milliseconds.
const ADVERT_TTL_MS: u64 = 4_000;

/// Reads a complete run.
///
/// # Errors
/// When the run is incomplete: the journal measures only finished jobs.
pub fn from_journal(history: History) -> Result<PastRun, PastError> {
    let (ledger, scheduler) = RunReportBuilder::from_history(&history, &ModelSelector);
    let Some(outcome) = scheduler.outcome().cloned() else {
        let done = scheduler.progress();
        return Err(PastError::Unusable(format!(
            "the run has not ended: {} of {} jobs are done; wait for its end or resume it",
            done.jobs_done, done.jobs_total
        )));
    };
    if outcome != Outcome::Complete {
        let why = match outcome {
            Outcome::Failed { jobs, .. } if !jobs.is_empty() => {
                format!("job '{}' failed", jobs[0].name)
            }
            Outcome::Failed { .. } => "some of its work failed".to_owned(),
            _ => "it was cancelled".to_owned(),
        };
        return Err(PastError::Unusable(format!(
            "the run is incomplete ({why}); only a complete run can be simulated"
        )));
    }
    let report = ledger.build_report(&scheduler, outcome);
    let summaries = report
        .jobs
        .into_iter()
        .map(|summary| (summary.job, summary))
        .collect();
    let settings = history.header.settings.clone();
    let timeline = build_timeline(history, &ModelSelector);
    let uses = VolumeUses::new(scheduler.workflow(), summaries);
    let (workflow, measured) = uses.measure_load(&timeline);
    let mut remarks = Vec::new();
    let lost = timeline
        .executions
        .iter()
        .filter(|e| e.outcome.is_wasted())
        .count();
    if lost > 0 {
        remarks.push(format!(
            "{lost} executions of that run failed or were lost; the simulation does not repeat them"
        ));
    }
    match settings.io {
        IoMode::Volumes => {}
        IoMode::CachesOnly => remarks.push(
            "the run kept private data at home (--cache-only); the simulation uses volumes instead"
                .to_owned(),
        ),
        IoMode::Remote => remarks.push(
            "the run used remote I/O, so the simulation uses the declared cache sizes".to_owned(),
        ),
    }
    Ok(PastRun {
        site: Some(measure_site(&timeline, &uses, &measured, &settings)),
        workflow,
        duration_s: Some(duration_s(&timeline)),
        began_at: Some(timeline.began_at.plus_ms(first_request_ms(&timeline))),
        measured,
        job_lines: Vec::new(),
        remarks,
    })
}

/// Time of the first action for a node, in milliseconds.
fn first_request_ms(timeline: &Timeline) -> u64 {
    let volumes = timeline.volumes.iter().map(|making| making.requested_ms);
    let asked = volumes.chain(timeline.executions.iter().map(|e| e.requested_ms));
    asked.min().unwrap_or(0)
}

/// From the first start to the last end of a job or a file's way home, as the simulator counts.
fn duration_s(timeline: &Timeline) -> f64 {
    let ends = timeline.executions.iter().filter_map(|e| e.ended_ms);
    let end = ends
        .chain(timeline.extract_attempts.iter().filter_map(|s| s.ended_ms))
        .max();
    let ms = end.unwrap_or(0).saturating_sub(first_request_ms(timeline));
    ms as f64 / 1_000.0
}

/// Observed access of jobs to their volumes.
pub(super) struct VolumeUses<'r> {
    pub(super) workflow: &'r Workflow,
    first_users: FirstUsers,
    summaries: BTreeMap<JobIndex, JobSummary>,
}

impl<'r> VolumeUses<'r> {
    fn new(workflow: &'r Workflow, summaries: BTreeMap<JobIndex, JobSummary>) -> Self {
        Self {
            workflow,
            first_users: workflow.first_users(),
            summaries,
        }
    }

    fn first_user(&self, volume: VolumeIndex) -> Option<JobIndex> {
        self.first_users[volume.as_usize()][0]
    }

    pub(super) fn use_of(&self, job: JobIndex, volume: VolumeIndex) -> Option<&VolumeUse> {
        let name = &self.workflow.volume(volume).name;
        let mut volumes = self.summaries.get(&job)?.volumes.iter();
        volumes.find(|used| used.name == *name)
    }

    fn measure_load(&self, timeline: &Timeline) -> (Workflow, MeasuredLoad) {
        let mut workflow = self.workflow.clone();
        let jobs = 0..self.workflow.jobs.len() as u32;
        let mut jobs: Vec<JobLoad> = jobs.map(|job| self.job_load(JobIndex(job))).collect();
        // The time in which a node starts a job and reports its end; the simulation adds it again.
        let last: BTreeMap<JobIndex, &ExecutionRecord> =
            completed_executions(timeline).map(|e| (e.job, e)).collect();
        for (job, last) in last {
            let ended_ms = last.ended_ms.unwrap_or(last.requested_ms);
            let on_node_ms = ended_ms.saturating_sub(last.requested_ms);
            let around_ms = on_node_ms.saturating_sub(last.wall_ms);
            jobs[job.as_usize()].compute_us += around_ms.saturating_mul(1_000);
        }
        for (job, load) in workflow.jobs.iter_mut().zip(&jobs) {
            job.runtime_s = Some(load.compute_us.div_ceil(1_000_000));
        }
        // Undeclared sizes are known from the run.
        for volume in workflow.volumes.iter_mut().filter(|v| v.size_bytes == 0) {
            let held = volume
                .users
                .iter()
                .map(|user| self.held_bytes(*user, &volume.name));
            volume.size_bytes = held.max().unwrap_or(0).max(1);
        }
        let mut extract_bytes = BTreeMap::new();
        for sending in &timeline.extract_attempts {
            extract_bytes.extend(sending.bytes.map(|bytes| (sending.index, bytes)));
        }
        let fills = (0..self.workflow.volumes.len() as u32).map(VolumeIndex);
        let fill_bytes = fills.filter_map(|volume| Some((volume, self.filled_bytes(volume)?)));
        let measured = MeasuredLoad {
            jobs,
            fill_bytes: fill_bytes.collect(),
            extract_bytes,
        };
        (workflow, measured)
    }

    fn held_bytes(&self, job: JobIndex, name: &str) -> u64 {
        let volumes = self.summaries.get(&job).map(|summary| &summary.volumes);
        let used = volumes.and_then(|volumes| volumes.iter().find(|used| used.name == name));
        used.map_or(0, |used| used.used_bytes.max(used.read_bytes))
    }

    /// Bytes that filled a volume: the size that its first user found, less its own writes.
    fn filled_bytes(&self, volume: VolumeIndex) -> Option<u64> {
        let spec = self.workflow.volume(volume);
        if !matches!(spec.kind, VolumeKind::Scratch { fill: Some(_) }) {
            return None;
        }
        let used = self.use_of(self.first_user(volume)?, volume)?;
        let found = used.used_bytes.saturating_sub(used.written_bytes);
        (found > 0).then_some(found)
    }

    fn job_load(&self, job: JobIndex) -> JobLoad {
        let mounts = &self.workflow.job(job).mounts;
        let loads = mounts
            .iter()
            .map(|mount| self.mount_load(job, mount.volume, mount.writable));
        let summary = self.summaries.get(&job);
        let computed_ms = summary.map_or(0, |summary| summary.computed_ms);
        JobLoad {
            compute_us: computed_ms.saturating_mul(1_000),
            mounts: loads.collect(),
        }
    }

    pub(super) fn mount_load(
        &self,
        job: JobIndex,
        volume: VolumeIndex,
        writable: bool,
    ) -> MountLoad {
        let Some(used) = self.use_of(job, volume) else {
            return MountLoad::default();
        };
        let spec = self.workflow.volume(volume);
        if matches!(spec.kind, VolumeKind::Cache { .. }) {
            let distinct = used.pages.iter().map(touched_bytes);
            let distinct = distinct.fold(0, u64::saturating_add);
            // Rereads came from the job's own memory or from its node.
            let read_bytes = match distinct {
                0 => used.read_bytes,
                _ => distinct,
            };
            return MountLoad {
                // A cache may be smaller than the data that is read through it.
                read_bytes,
                ..MountLoad::default()
            };
        }
        let is_counted = used.read_bytes > 0 || used.written_bytes > 0;
        let is_first = self.first_user(volume) == Some(job);
        match (is_counted, writable && is_first) {
            (true, _) => MountLoad {
                read_bytes: used.read_bytes,
                written_bytes: used.written_bytes,
                is_bind_mount: false,
            },
            // A bind mount of a directory of the node: neither bytes nor waits were counted.
            (false, true) => MountLoad {
                written_bytes: used.used_bytes,
                is_bind_mount: true,
                ..MountLoad::default()
            },
            (false, false) => MountLoad {
                read_bytes: used.used_bytes,
                is_bind_mount: true,
                ..MountLoad::default()
            },
        }
    }
}

/// Distinct bytes of a file that were read: its last page may be short, and a page too many would
/// not fit into a cache of just its size.
fn touched_bytes(file: &TouchedPages) -> u64 {
    let bytes = |(first, pages): &(u64, u64)| {
        let all = pages.saturating_mul(PAGE_BYTES);
        match file.size {
            // Not known.
            0 => all,
            size => all.min(size.saturating_sub(first.saturating_mul(PAGE_BYTES))),
        }
    };
    file.page_runs
        .iter()
        .map(bytes)
        .fold(0, u64::saturating_add)
}

/// The machines: groups of nodes as clusters, each with the rates that were measured there.
fn measure_site(
    timeline: &Timeline,
    uses: &VolumeUses<'_>,
    measured: &MeasuredLoad,
    settings: &Settings,
) -> Site {
    let groups: BTreeSet<&str> = timeline.nodes.iter().map(|it| it.group.as_str()).collect();
    let all_home_bytes_per_s = measure_home_rate(timeline, uses, measured);
    let mut nodes = Vec::new();
    let (mut link, mut disk) = (None, None);
    for group in &groups {
        let (part, home_bytes_per_s) = match groups.len() {
            1 => (Cow::Borrowed(timeline), all_home_bytes_per_s),
            _ => {
                let part = group_timeline(timeline, uses.workflow, group);
                let home_bytes_per_s = measure_home_rate(&part, uses, measured);
                (Cow::Owned(part), home_bytes_per_s)
            }
        };
        let rates = measure_node_rates(&part, uses, home_bytes_per_s);
        (link, disk) = (
            rates.link_bytes_per_s.max(link),
            rates.disk_bytes_per_s.max(disk),
        );
        for mut class in node_classes(&part, settings) {
            class.disk_bytes_per_s = rates.disk_bytes_per_s;
            if groups.len() > 1 {
                class.cluster = (*group).to_owned();
                (class.home_bytes_per_s, class.local_bytes_per_s) =
                    (home_bytes_per_s, rates.link_bytes_per_s);
            }
            nodes.push(class);
        }
    }
    Site {
        nodes,
        slack_permille: settings.slack_permille,
        home_bytes_per_s: all_home_bytes_per_s,
        // Where all was read from own disks, nothing crossed links.
        local_bytes_per_s: link.or(disk),
    }
}

/// Load of the nodes of one group, and their transfers.
fn group_timeline(timeline: &Timeline, workflow: &Workflow, group: &str) -> Timeline {
    let mut part = timeline.clone();
    part.nodes.retain(|node| node.group == group);
    let servers: BTreeSet<ServerId> = part.nodes.iter().map(|node| node.server).collect();
    part.executions.retain(|it| servers.contains(&it.server));
    let mut place = BTreeMap::new();
    let mounted = part.executions.iter().flat_map(|it| it.mounts.clone());
    let mounted: BTreeSet<usize> = mounted.collect();
    part.volumes.clear();
    for (at, making) in timeline.volumes.iter().enumerate() {
        if servers.contains(&making.server) || mounted.contains(&at) {
            place.insert(at, part.volumes.len());
            let mut making = making.clone();
            // A volume that jobs here mount remotely was not filled over this group's link.
            making.is_filled &= servers.contains(&making.server);
            part.volumes.push(making);
        }
    }
    let here = part
        .volumes
        .iter()
        .filter(|it| servers.contains(&it.server));
    let here: BTreeSet<VolumeIndex> = here.map(|it| it.volume).collect();
    part.extract_attempts.retain(|sending| {
        let extract = workflow.extracts.get(sending.index as usize);
        extract.is_some_and(|extract| here.contains(&extract.volume))
    });
    for mount in part.executions.iter_mut().flat_map(|it| &mut it.mounts) {
        *mount = place[mount];
    }
    part
}

/// Nodes of one group, equal ones together, with their mean free space.
fn node_classes(timeline: &Timeline, settings: &Settings) -> Vec<NodeClass> {
    let mut kinds: BTreeMap<(u32, u64), EqualNodes> = BTreeMap::new();
    for node in &timeline.nodes {
        let alike = kinds.entry((node.slots, node.capacity_bytes)).or_default();
        alike.free_space.push(node.free_space);
        // The node was dead for a while before it was declared lost: its successor may have come by
        // then.
        let unnoticed_ms = settings.node_timeout_ms.saturating_add(ADVERT_TTL_MS);
        let until =
            |until: Option<u64>| until.map_or(u64::MAX, |ms| ms.saturating_sub(unnoticed_ms));
        let present = node.presence.iter();
        let lives = present.map(|(from, to)| (*from, until(*to).max(*from)));
        alike.lifetimes.extend(lives);
    }
    let class = |((slots, _), alike): ((u32, u64), EqualNodes)| {
        let mean = |of: fn(&Space) -> u64| {
            let all: u128 = alike
                .free_space
                .iter()
                .map(|free| u128::from(of(free)))
                .sum();
            (all / alike.free_space.len().max(1) as u128) as u64
        };
        let (bytes, files) = (mean(|free| free.bytes), mean(|free| free.files));
        NodeClass {
            has_hash_imbalance: true,
            files,
            ..NodeClass::new(concurrent_nodes_max(alike.lifetimes), slots, bytes)
        }
    };
    kinds.into_iter().map(class).collect()
}

/// Nodes of one kind.
#[derive(Default)]
struct EqualNodes {
    /// When each node was present, as start and end in milliseconds.
    lifetimes: Vec<(u64, u64)>,
    /// Free space of each node.
    free_space: Vec<Space>,
}

/// Most of these nodes that were present at once.
fn concurrent_nodes_max(mut lives: Vec<(u64, u64)>) -> u32 {
    lives.sort_unstable();
    let mut ends = BinaryHeap::new();
    let mut most = 0;
    for (from, to) in lives {
        while ends.peek().is_some_and(|Reverse(end)| *end <= from) {
            ends.pop();
        }
        ends.push(Reverse(to));
        most = most.max(ends.len());
    }
    u32::try_from(most).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::RunId;
    use bafs_proto::message::JobOutcome;
    use bafs_proto::time::Time;
    use bafs_sched::io::journal::JournalHeader;
    use bafs_sched::timeline::{ExecutionOutcome, ExtractAttempt, VolumeRecord, VolumeRole};
    use bafs_sched::{Event, NodeInfo};

    use super::*;

    #[test]
    fn replacement_nodes_do_not_count_twice() {
        assert_eq!(
            concurrent_nodes_max(vec![(0, 7), (0, 7), (7, u64::MAX), (8, u64::MAX)]),
            2
        );
        assert_eq!(
            concurrent_nodes_max(vec![(0, 9), (3, u64::MAX), (5, 8), (8, 9)]),
            3
        );
        assert_eq!(concurrent_nodes_max(Vec::new()), 0);
    }

    fn only_execution() -> ExecutionRecord {
        ExecutionRecord {
            job: JobIndex(0),
            server: ServerId(3),
            node: String::new(),
            requested_ms: 9,
            ended_ms: Some(20),
            outcome: ExecutionOutcome::Done,
            reported: None,
            end_description: String::new(),
            output_tail: String::new(),
            wall_ms: 11,
            cpu_ms: 11,
            memory_bytes_max: 0,
            held_bytes: 0,
            waited_ms: 0,
            read_bytes: 0,
            written_bytes: 0,
            distinct_bytes: 0,
            slots: 1,
            mounts: vec![1, 0],
        }
    }

    /// Three nodes of two groups, with the volumes and extracted files given below; other users
    /// hold more than half of one node.
    fn two_group_run() -> (Workflow, Timeline) {
        let none = |_: &str| Err("no files".to_owned());
        let text = "job a {\nexecutable = x\n}\nvolume v scratch 9 MB from bafs://home/v\n\
                    volume w scratch 9 MB\nmount v a /v\nmount w a /w\n\
                    extract w f bafs://home/f\n";
        let parsed = bafs_workflow::parse_workflow("w.bafs", text, &none);
        let workflow = parsed.unwrap().workflow;
        let capacity = Space {
            bytes: 100_000_000,
            files: 1_000,
        };
        let node = |id: u64, group: &str, foreign: u64| NodeInfo {
            group: group.to_owned(),
            foreign_space: Space {
                bytes: foreign,
                files: 10,
            },
            ..NodeInfo::single_group(ServerId(id), capacity, 1)
        };
        let east = node(1, "east", 0);
        let west = [node(2, "west", 60_000_000), node(3, "west", 50_000_000)];
        let seen = [&[east][..], &west].concat();
        let header = JournalHeader {
            run: RunId(1),
            workflow: workflow.clone().into(),
            settings: Settings::default(),
        };
        let listed = vec![(Time(0), Event::nodes_listed(seen))];
        let history = History::decide(header, listed, &ModelSelector);
        let mut timeline = build_timeline(history, &ModelSelector);
        // A job in the west that reads what lies in the east.
        let making = |volume: u32, server: u64| VolumeRecord {
            name: "v".to_owned(),
            volume: VolumeIndex(volume),
            role: VolumeRole::Scratch,
            server: ServerId(server),
            node: String::new(),
            bytes: 9_000_000,
            is_filled: volume == 0,
            requested_ms: 0,
            created_ms: Some(9),
            deleted_ms: None,
            is_lost: false,
        };
        timeline.volumes = vec![making(1, 2), making(0, 1)];
        timeline.executions = vec![only_execution()];
        timeline.extract_attempts = vec![ExtractAttempt {
            index: 0,
            target: String::new(),
            requested_ms: 20,
            ended_ms: Some(30),
            bytes: Some(5),
        }];
        (workflow, timeline)
    }

    #[test]
    fn groups_become_clusters_without_foreign_space() {
        let (workflow, timeline) = two_group_run();
        let part = |group: &str| group_timeline(&timeline, &workflow, group);
        let (east, west) = (part("east"), part("west"));
        let told = |part: &Timeline| {
            let classes = node_classes(part, &Settings::default()).into_iter();
            let told = classes.map(|it| (it.count, it.storage_bytes, it.files));
            told.collect::<Vec<_>>()
        };
        assert_eq!(told(&east), [(1, 100_000_000, 990)]);
        assert_eq!(told(&west), [(2, 45_000_000, 990)], "the mean of both");
        let filled = |part: &Timeline| part.volumes.iter().filter(|it| it.is_filled).count();
        assert_eq!((filled(&east), filled(&west)), (1, 0));
        assert_eq!(
            (east.extract_attempts.len(), west.extract_attempts.len()),
            (0, 1)
        );
        assert_eq!((east.executions.len(), west.executions.len()), (0, 1));
        let mounted = west.executions[0].mounts.iter();
        let mounted = mounted.map(|at| west.volumes[*at].volume);
        assert_eq!(
            mounted.collect::<Vec<_>>(),
            [VolumeIndex(0), VolumeIndex(1)]
        );
    }

    /// `a` runs first, writes 5 GB into the volume that home filled with 1 GB, and `z` only reads.
    #[test]
    fn fill_size_is_measured_by_the_first_user() {
        let job = |name: &str| format!("job {name} {{\nexecutable = x\n}}\n");
        let rest = "parent a child z\nvolume v scratch 9 GB exact from bafs://home/v\n\
                    mount v a /v\nmount v z /v\n";
        for (jobs, writer) in [([job("a"), job("z")], 0), ([job("z"), job("a")], 1)] {
            let none = |_: &str| Err("no files".to_owned());
            let text = jobs.concat() + rest;
            let workflow = bafs_workflow::parse_workflow("w.bafs", &text, &none);
            let workflow = workflow.unwrap().workflow;
            let summary = |job: u32| {
                let used = VolumeUse {
                    name: "v".to_owned(),
                    used_bytes: 6_000_000_000,
                    written_bytes: if job == writer { 5_000_000_000 } else { 0 },
                    ..VolumeUse::default()
                };
                JobSummary {
                    job: JobIndex(job),
                    name: String::new(),
                    node: String::new(),
                    attempts: 1,
                    outcome: JobOutcome::Exited(0),
                    wall_ms: 0,
                    cpu_ms: 0,
                    computed_ms: 0,
                    ended: Time(0),
                    output_tail: String::new(),
                    volumes: vec![used],
                }
            };
            let summaries = (0..2).map(|job| (JobIndex(job), summary(job)));
            let uses = VolumeUses::new(&workflow, summaries.collect());
            assert_eq!(uses.filled_bytes(VolumeIndex(0)), Some(1_000_000_000));
        }
    }

    #[test]
    fn file_read_whole_counts_with_its_length() {
        let read = |size, runs: &[(u64, u64)]| {
            let runs = runs.to_vec();
            touched_bytes(&TouchedPages {
                path: "set".to_owned(),
                size,
                page_runs: runs,
            })
        };
        assert_eq!(read(16_000_000, &[(0, 3_907)]), 16_000_000);
        assert_eq!(read(16_000_000, &[(0, 1), (3_906, 1)]), 4_096 + 1_024);
        assert_eq!(read(0, &[(0, 2)]), 8_192, "its size is not known");
    }
}
