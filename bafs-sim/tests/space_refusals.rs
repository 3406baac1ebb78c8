//! Nodes whose disks have no space, for a moment or for long, and what placing large pipelines
//! costs: the core with a cluster that answers at once, and a clock that jumps. No time is taken.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{RunId, ServerId, VolumeId};
use bafs_proto::job_report::VolumeUse;
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode};
use bafs_sched::{Action, Event, NodeInfo, Outcome, Scheduler, Settings, Space};
use bafs_sim::simulated_cluster::{parse_workflow_text, successful_report};

const MB: u64 = 1_000_000;
const HOUR_MS: u64 = 3_600_000;
/// Nodes refuse sooner than they make a volume.
const REFUSAL_DELAY_MS: u64 = 5;
const CREATION_DELAY_MS: u64 = 50;
const STEPS_MAX: u32 = 20_000;

fn test_node(id: u64, slots: u32, megabytes: u64) -> NodeInfo {
    let capacity = Space {
        bytes: megabytes * MB,
        files: 10_000_000,
    };
    NodeInfo::single_group(ServerId(id), capacity, slots)
}

/// A volume that is to be made.
struct VolumeRequest<'a> {
    name: &'a str,
    server: u64,
    at_ms: u64,
    /// Volumes of which its node has some.
    volumes_present: usize,
}

/// How a run ended and when, and which volumes were made where, in their order, and when.
struct FinishedRun {
    outcome: Outcome,
    ended_at_ms: u64,
    created_volumes: Vec<(String, u64, u64)>,
}

struct RefusingCluster<'a> {
    scheduler: Scheduler,
    refusal_rule: Box<dyn FnMut(&VolumeRequest) -> bool + 'a>,
    /// The job that finds a disk full when it writes, that disk's node, and how long it takes.
    full_disk: Option<(&'a str, u64, u64)>,
    due: BTreeMap<(u64, u64), Event>,
    live_volumes: BTreeMap<ServerId, BTreeSet<VolumeId>>,
    created_volumes: Vec<(String, u64, u64)>,
    now: u64,
}

impl<'a> RefusingCluster<'a> {
    fn new(
        text: &str,
        nodes: Vec<NodeInfo>,
        refuses: impl FnMut(&VolumeRequest) -> bool + 'a,
    ) -> Self {
        Self {
            scheduler: Scheduler::new(RunId(0), parse_workflow_text(text), Settings::default()),
            refusal_rule: Box::new(refuses),
            full_disk: None,
            due: BTreeMap::from([((0, 0), Event::nodes_listed(nodes))]),
            live_volumes: BTreeMap::new(),
            created_volumes: Vec::new(),
            now: 0,
        }
    }

    fn schedule_event(&mut self, later_ms: u64, event: Event) {
        let number = self.due.len() as u64;
        let mut key = (self.now + later_ms, number);
        while self.due.contains_key(&key) {
            key.1 += 1;
        }
        self.due.insert(key, event);
    }

    /// Runs all; each job takes an hour.
    fn run_to_end(mut self) -> FinishedRun {
        for _ in 0..STEPS_MAX {
            let timer = self.scheduler.next_timer().map(|at| at.0.max(self.now));
            let fact = self.due.first_key_value().map(|((at, _), _)| *at);
            let event = match (timer, fact) {
                (Some(timer), fact) if fact.is_none_or(|fact| timer < fact) => {
                    self.now = timer;
                    Event::Tick
                }
                _ => {
                    let ((at, _), event) = self.due.pop_first().expect("something is due");
                    self.now = at;
                    event
                }
            };
            let mut actions = Vec::new();
            self.scheduler.step(Time(self.now), event, &mut actions);
            self.scheduler.check();
            for action in actions {
                if let Action::Finish { outcome } = action {
                    let (at, made) = (self.now, self.created_volumes);
                    return FinishedRun {
                        outcome,
                        ended_at_ms: at,
                        created_volumes: made,
                    };
                }
                self.serve_action(action);
            }
        }
        panic!("it does not end");
    }

    fn serve_action(&mut self, action: Action) {
        match action {
            Action::CreateVolume {
                id, volume, server, ..
            } => {
                let there = self.live_volumes.entry(server).or_default();
                let ask = VolumeRequest {
                    name: &self.scheduler.workflow().volume(volume).name,
                    server: server.0,
                    at_ms: self.now,
                    volumes_present: there.len(),
                };
                if (self.refusal_rule)(&ask) {
                    let error = Error::new(ErrorCode::NoSpaceBytes, "no room");
                    let event = Event::VolumeCreateFailed { volume: id, error };
                    self.schedule_event(REFUSAL_DELAY_MS, event);
                } else {
                    there.insert(id);
                    self.created_volumes
                        .push((ask.name.to_owned(), server.0, self.now));
                    self.schedule_event(CREATION_DELAY_MS, Event::VolumeCreated { volume: id });
                }
            }
            Action::DeleteVolume { id, server } => {
                self.live_volumes.entry(server).or_default().remove(&id);
                self.schedule_event(REFUSAL_DELAY_MS, Event::VolumeDeleted { volume: id });
            }
            Action::StartJob {
                execution,
                job,
                server,
                ..
            } => {
                self.schedule_event(REFUSAL_DELAY_MS, Event::JobStarted { execution });
                let job = self.scheduler.workflow().job(job);
                let (took_ms, report) = match self.full_disk {
                    Some((name, on, took_ms)) if (name, on) == (&job.name, server.0) => {
                        let written = job.mounts.iter().find(|mount| mount.writable);
                        let volume = written.expect("it writes").volume;
                        (
                            took_ms,
                            full_disk_report(&self.scheduler.workflow().volume(volume).name),
                        )
                    }
                    _ => (HOUR_MS, successful_report()),
                };
                self.schedule_event(took_ms, Event::JobEnded { execution, report });
            }
            _ => {}
        }
    }
}

/// A job found no space in a volume: the disk below it is full.
fn full_disk_report(volume: &str) -> JobReport {
    let used = VolumeUse {
        name: volume.to_owned(),
        disk_free_bytes: Some(0),
        no_space_errors: 1,
        ..VolumeUse::default()
    };
    JobReport {
        outcome: JobOutcome::Exited(1),
        volumes: vec![used],
        ..successful_report()
    }
}

/// Jobs of these names, each with a scratch volume, `v` and its name, that it writes.
fn writer_jobs<'a>(names: impl IntoIterator<Item = &'a str>, megabytes: u64) -> String {
    let job = |name| {
        format!(
            "volume v{name} scratch {megabytes} MB exact\n\
             job {name} {{\nexecutable = /bin/true\n}}\nmount v{name} {name} /y\n"
        )
    };
    names.into_iter().map(job).collect()
}

/// So many jobs that each read a cache of their own, and take two slots.
fn reader_jobs(count: u32, megabytes: u64) -> String {
    let job = |k| {
        format!(
            "volume y{k} cache bafs://home/y{k} {megabytes} MB\njob j{k} {{\n\
             executable = /bin/true\nrequest_cpus = 2\n}}\nmount y{k} j{k} /y\n"
        )
    };
    (0..count).map(job).collect()
}

#[test]
fn run_survives_refusals_between_successes() {
    let mut refused = BTreeSet::new();
    let refuses = |ask: &VolumeRequest| refused.insert(ask.name.to_owned());
    let ended = RefusingCluster::new(&reader_jobs(12, 60), vec![test_node(1, 2, 100)], refuses)
        .run_to_end();
    assert_eq!(ended.outcome, Outcome::Complete);
    assert_eq!(refused.len(), 12, "each was refused once");
}

/// The one who wrote went where nothing else fits, and nobody writes to the full disk any more.
#[test]
fn run_survives_refusals_after_a_full_disk_write() {
    let mut refused = BTreeSet::new();
    let refuses = |ask: &VolumeRequest| ask.name != "vw" && refused.insert(ask.name.to_owned());
    let text = writer_jobs(["w"], 1) + &reader_jobs(12, 60);
    let nodes = vec![test_node(1, 2, 100), test_node(2, 1, 10)];
    let mut cluster = RefusingCluster::new(&text, nodes, refuses);
    cluster.full_disk = Some(("w", 1, 1_000));
    let ended = cluster.run_to_end();
    assert_eq!(ended.outcome, Outcome::Complete);
    assert_eq!(refused.len(), 12, "each was refused once");
    let of_writer = ended
        .created_volumes
        .iter()
        .filter(|(name, ..)| name == "vw");
    let of_writer: Vec<u64> = of_writer.map(|(_, server, _)| *server).collect();
    assert_eq!(of_writer, [1, 2]);
}

/// Sixteen slots, and sixteen refusals at once: as soon as the volumes of one job are made, the
/// others go on beside it, and not after it.
#[test]
fn freed_space_is_used_by_all_waiting_jobs() {
    let names: Vec<String> = (0..64).map(|k| format!("j{k}")).collect();
    let text = writer_jobs(names.iter().map(String::as_str), 1);
    let mut left = 16;
    let refuses = |_: &VolumeRequest| {
        left -= i32::from(left > 0);
        left > 0
    };
    let ended = RefusingCluster::new(&text, vec![test_node(1, 16, 100)], refuses).run_to_end();
    assert_eq!(ended.outcome, Outcome::Complete);
    assert!(
        ended.ended_at_ms < 4 * HOUR_MS + HOUR_MS / 10,
        "{} ms",
        ended.ended_at_ms
    );
}

/// A job with all of its volumes tells no more whether there is room for others, though a writer
/// met the full disk while they were made.
#[test]
fn jobs_start_beside_a_job_testing_for_space() {
    let mut refused = false;
    let refuses = |ask: &VolumeRequest| ask.name == "y0" && !std::mem::replace(&mut refused, true);
    let text = writer_jobs(["w"], 1) + &reader_jobs(4, 5);
    let nodes = vec![test_node(1, 4, 100), test_node(2, 1, 2)];
    let mut cluster = RefusingCluster::new(&text, nodes, refuses);
    // Volumes are asked for at 0 ms, and again when the refusal is ten seconds old.
    let meets_at = REFUSAL_DELAY_MS + 10_000 + CREATION_DELAY_MS / 2;
    cluster.full_disk = Some(("w", 1, meets_at - CREATION_DELAY_MS));
    let ended = cluster.run_to_end();
    assert_eq!(ended.outcome, Outcome::Complete);
    assert!(refused);
    assert!(
        ended.ended_at_ms < 2 * HOUR_MS + HOUR_MS / 10,
        "{} ms",
        ended.ended_at_ms
    );
}

/// What is refused on one node for a moment waits for none of the others, which are busy.
#[test]
fn refusing_node_is_retried_while_others_are_busy() {
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let nodes = vec![test_node(1, 4, 100), test_node(2, 4, 100)];
    let refuses = |ask: &VolumeRequest| ask.server == 1 && ask.at_ms < 1_000;
    let ended = RefusingCluster::new(&writer_jobs(names, 1), nodes, refuses).run_to_end();
    assert_eq!(ended.outcome, Outcome::Complete);
    assert!(
        ended.ended_at_ms < HOUR_MS + HOUR_MS / 10,
        "{} ms",
        ended.ended_at_ms
    );
}

/// The volume of another job was asked for before the refusal, and proves nothing.
#[test]
fn job_waits_for_space_while_another_runs_there() {
    let refuses = |ask: &VolumeRequest| ask.name == "vx" && ask.at_ms < HOUR_MS / 2;
    let ended = RefusingCluster::new(
        &writer_jobs(["x", "s"], 1),
        vec![test_node(1, 4, 100)],
        refuses,
    )
    .run_to_end();
    assert_eq!(ended.outcome, Outcome::Complete);
    let made = ended.created_volumes.iter().find(|(name, ..)| name == "vx");
    let at = made.expect("it found room").2;
    let latest = HOUR_MS / 2 + 2 * 10_000;
    assert!((HOUR_MS / 2..latest).contains(&at), "{at} ms");
}

/// A node with room for half of what it offers: one job at a time asks for the other half.
#[test]
fn node_with_half_its_space_runs_all_jobs() {
    let names: Vec<String> = (0..16).map(|k| format!("j{k}")).collect();
    let text = writer_jobs(names.iter().map(String::as_str), 1);
    let mut asked: BTreeMap<u64, u32> = BTreeMap::new();
    let refuses = |ask: &VolumeRequest| {
        *asked.entry(ask.at_ms).or_default() += 1;
        ask.volumes_present >= 8
    };
    let ended = RefusingCluster::new(&text, vec![test_node(1, 16, 100)], refuses).run_to_end();
    assert_eq!(ended.outcome, Outcome::Complete);
    assert!(
        ended.ended_at_ms < 2 * HOUR_MS + HOUR_MS / 10,
        "{} ms",
        ended.ended_at_ms
    );
    let mut before_an_hour = asked.range(1..HOUR_MS);
    assert!(before_an_hour.all(|(_, count)| *count == 1), "{asked:?}");
}

/// What it reads is on the full node, and can be read from another one.
#[test]
fn inputs_do_not_bind_jobs_to_full_disks() {
    for beside in ["", "l"] {
        let mut text = writer_jobs(["a"], 40) + &writer_jobs(["b"], 1);
        text += "parent a child b\nmount va b /in ro\n";
        text += &writer_jobs(beside.split_terminator(' '), 1);
        let mut first = 0;
        let refuses = |ask: &VolumeRequest| {
            if ask.name == "va" {
                first = ask.server;
            }
            ask.name == "vb" && ask.server == first
        };
        let nodes = vec![test_node(1, 4, 100), test_node(2, 4, 100)];
        let ended = RefusingCluster::new(&text, nodes, refuses).run_to_end();
        assert_eq!(ended.outcome, Outcome::Complete);
        assert!(
            ended.ended_at_ms < 2 * HOUR_MS + 1_000,
            "{} ms",
            ended.ended_at_ms
        );
    }
}

/// A volume that was filled stays when another of its job is refused there, but not for long; a
/// third job that finds room on the full node changes nothing.
#[test]
fn filled_volumes_bind_jobs_to_full_disks_briefly() {
    for beside in ["s", "s t"] {
        let text = "volume f scratch 10 MB from bafs://home/in\n".to_owned()
            + &writer_jobs("x".split(' ').chain(beside.split(' ')), 1)
            + "mount f x /in\n";
        let mut first = 0;
        let refuses = |ask: &VolumeRequest| {
            if ask.name == "f" && first == 0 {
                first = ask.server;
            }
            ask.name == "vx" && ask.server == first
        };
        let nodes = vec![test_node(1, 4, 100), test_node(2, 4, 100)];
        let ended = RefusingCluster::new(&text, nodes, refuses).run_to_end();
        assert_eq!(ended.outcome, Outcome::Complete);
        assert!(
            ended.ended_at_ms < HOUR_MS + 60_000,
            "{} ms",
            ended.ended_at_ms
        );
        let fills = ended
            .created_volumes
            .iter()
            .filter(|(name, ..)| name == "f");
        let at: Vec<u64> = fills.map(|(_, _, at)| *at).collect();
        assert!(at.len() == 2 && at[1] > 10_000, "{at:?}");
    }
}

/// How much is looked at until so many jobs were started, which succeed at once.
fn count_examined_records(text: &str, nodes: Vec<NodeInfo>, starts_max: u32) -> u64 {
    let mut scheduler = Scheduler::new(RunId(0), parse_workflow_text(text), Settings::default());
    let mut due = vec![Event::nodes_listed(nodes)];
    let (mut starts, mut now) = (0, 0);
    while let Some(event) = due.pop() {
        now += 1;
        let mut actions = Vec::new();
        scheduler.step(Time(now), event, &mut actions);
        for action in actions {
            match action {
                Action::CreateVolume { id, .. } => due.push(Event::VolumeCreated { volume: id }),
                Action::StartJob { execution, .. } => {
                    starts += 1;
                    if starts == starts_max {
                        return scheduler.records_examined();
                    }
                    let report = successful_report();
                    due.insert(0, Event::JobEnded { execution, report });
                    due.push(Event::JobStarted { execution });
                }
                _ => {}
            }
        }
    }
    panic!("{starts} jobs were started");
}

/// A job that gathers what as many others made as there are nodes: on each node fit three of them.
#[test]
fn placing_a_pipeline_visits_each_node_few_times() {
    let looked_at = [25u64, 50, 100].map(|size| {
        let mut text = "job z {\nexecutable = /bin/true\n}\n".to_owned();
        for k in 0..size {
            text += &format!("volume v{k} scratch 30 MB files 5\njob j{k} {{\n");
            text += &format!("executable = /bin/true\n}}\nmount v{k} j{k} /y\n");
            text += &format!("parent j{k} child z\nmount v{k} z /i{k} ro\n");
        }
        let mut scheduler =
            Scheduler::new(RunId(0), parse_workflow_text(&text), Settings::default());
        let nodes = (1..=size).map(|id| test_node(id, 1, 100)).collect();
        let mut actions = Vec::new();
        scheduler.step(Time(0), Event::nodes_listed(nodes), &mut actions);
        assert_eq!(actions.len() as u64, size, "a volume on each node");
        scheduler.records_examined()
    });
    // Jobs times nodes for each of as many jobs.
    for pair in looked_at.windows(2) {
        assert!(pair[1] < 10 * pair[0], "{looked_at:?}");
    }
}

/// Each job reads what the first one made and makes something of its own, of which no node has room
/// for all: to look once at who is done of all users, for each of them, is the square of the jobs.
/// Pipelines of more than 400 jobs are not tried at all.
#[test]
fn placing_volume_sharers_visits_each_job_few_times() {
    let looked_at = [64u64, 128, 256, 512, 1_020].map(|size| {
        let mut text = "volume in scratch 1 MB files 5\n".to_owned();
        text += "job a {\nexecutable = /bin/true\n}\nmount in a /o\n";
        text += "job z {\nexecutable = /bin/true\n}\n";
        for k in 0..size {
            text += &format!("volume v{k} scratch 3 MB files 5\njob j{k} {{\n");
            text += &format!("executable = /bin/true\n}}\nmount v{k} j{k} /y\n");
            text += &format!("parent a child j{k}\nmount in j{k} /in ro\n");
            text += &format!("parent j{k} child z\nmount v{k} z /i{k} ro\n");
        }
        let nodes = (1..=4).map(|id| test_node(id, 8, size)).collect();
        count_examined_records(&text, nodes, 40)
    });
    for pair in looked_at[..3].windows(2) {
        assert!(pair[1] < 3 * pair[0], "{looked_at:?}");
    }
    assert!(looked_at[4] < looked_at[2], "{looked_at:?}");
}
