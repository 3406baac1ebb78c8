//! Nodes whose disks have no space, for a moment or for long, and what placing large pipelines
//! costs: the core with a cluster that answers at once, and a clock that jumps. No time is taken.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{RunId, ServerId, VolumeId};
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::report::VolumeUse;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode};
use bafs_sched::logic::{Action, Event, NodeSeen, Outcome, Scheduler, Settings, Space};
use bafs_sched::world::{success, workflow};

const MB: u64 = 1_000_000;
const HOUR_MS: u64 = 3_600_000;
/// Nodes refuse sooner than they make a volume.
const REFUSING_MS: u64 = 5;
const MAKING_MS: u64 = 50;
const STEPS_MAX: u32 = 20_000;

fn node(id: u64, slots: u32, megabytes: u64) -> NodeSeen {
    let capacity = Space {
        bytes: megabytes * MB,
        files: 10_000_000,
    };
    NodeSeen::alone(ServerId(id), capacity, slots)
}

/// A volume that is to be made.
struct Ask<'a> {
    name: &'a str,
    server: u64,
    at: u64,
    /// Volumes of which its node has some.
    there: usize,
}

/// How a run ended and when, and which volumes were made where, in their order, and when.
struct Ended {
    outcome: Outcome,
    at: u64,
    made: Vec<(String, u64, u64)>,
}

struct Cluster<'a> {
    scheduler: Scheduler,
    refuses: Box<dyn FnMut(&Ask) -> bool + 'a>,
    /// The job that finds a disk full when it writes, that disk's node, and how long it takes.
    fills_up: Option<(&'a str, u64, u64)>,
    due: BTreeMap<(u64, u64), Event>,
    live: BTreeMap<ServerId, BTreeSet<VolumeId>>,
    made: Vec<(String, u64, u64)>,
    now: u64,
}

impl<'a> Cluster<'a> {
    fn new(text: &str, nodes: Vec<NodeSeen>, refuses: impl FnMut(&Ask) -> bool + 'a) -> Self {
        Self {
            scheduler: Scheduler::new(RunId(0), workflow(text), Settings::default()),
            refuses: Box::new(refuses),
            fills_up: None,
            due: BTreeMap::from([((0, 0), Event::seen(nodes))]),
            live: BTreeMap::new(),
            made: Vec::new(),
            now: 0,
        }
    }

    fn at(&mut self, later_ms: u64, event: Event) {
        let number = self.due.len() as u64;
        let mut key = (self.now + later_ms, number);
        while self.due.contains_key(&key) {
            key.1 += 1;
        }
        self.due.insert(key, event);
    }

    /// Runs all; each job takes an hour.
    fn run(mut self) -> Ended {
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
                    let (at, made) = (self.now, self.made);
                    return Ended { outcome, at, made };
                }
                self.serve(action);
            }
        }
        panic!("it does not end");
    }

    fn serve(&mut self, action: Action) {
        match action {
            Action::CreateVolume {
                id, volume, server, ..
            } => {
                let there = self.live.entry(server).or_default();
                let ask = Ask {
                    name: &self.scheduler.workflow().volume(volume).name,
                    server: server.0,
                    at: self.now,
                    there: there.len(),
                };
                if (self.refuses)(&ask) {
                    let error = Error::new(ErrorCode::NoSpaceBytes, "no room");
                    let event = Event::VolumeCreateFailed { volume: id, error };
                    self.at(REFUSING_MS, event);
                } else {
                    there.insert(id);
                    self.made.push((ask.name.to_owned(), server.0, self.now));
                    self.at(MAKING_MS, Event::VolumeCreated { volume: id });
                }
            }
            Action::DeleteVolume { id, server } => {
                self.live.entry(server).or_default().remove(&id);
                self.at(REFUSING_MS, Event::VolumeDeleted { volume: id });
            }
            Action::StartJob {
                execution,
                job,
                server,
                ..
            } => {
                self.at(REFUSING_MS, Event::JobStarted { execution });
                let job = self.scheduler.workflow().job(job);
                let (took_ms, report) = match self.fills_up {
                    Some((name, on, took_ms)) if (name, on) == (&job.name, server.0) => {
                        let written = job.mounts.iter().find(|mount| mount.writable);
                        let volume = written.expect("it writes").volume;
                        (
                            took_ms,
                            full(&self.scheduler.workflow().volume(volume).name),
                        )
                    }
                    _ => (HOUR_MS, success()),
                };
                self.at(took_ms, Event::JobEnded { execution, report });
            }
            _ => {}
        }
    }
}

/// A job found no space in a volume: the disk below it is full.
fn full(volume: &str) -> JobReport {
    let used = VolumeUse {
        name: volume.to_owned(),
        disk_free_bytes: Some(0),
        no_space_errors: 1,
        ..VolumeUse::default()
    };
    JobReport {
        outcome: JobOutcome::Exited(1),
        volumes: vec![used],
        ..success()
    }
}

/// Jobs of these names, each with a scratch volume, `v` and its name, that it writes.
fn jobs<'a>(names: impl IntoIterator<Item = &'a str>, megabytes: u64) -> String {
    let job = |name| {
        format!(
            "volume v{name} scratch {megabytes} MB\njob {name} {{\nexecutable = /bin/true\n}}\n\
             mount v{name} {name} /y\n"
        )
    };
    names.into_iter().map(job).collect()
}

/// So many jobs that each read a cache of their own, and take two slots.
fn readers(count: u32, megabytes: u64) -> String {
    let job = |k| {
        format!(
            "volume y{k} cache bafs://home/y{k} {megabytes} MB\njob j{k} {{\n\
             executable = /bin/true\nrequest_cpus = 2\n}}\nmount y{k} j{k} /y\n"
        )
    };
    (0..count).map(job).collect()
}

#[test]
fn refusals_that_are_followed_by_successes_are_not_in_a_row() {
    let mut refused = BTreeSet::new();
    let refuses = |ask: &Ask| refused.insert(ask.name.to_owned());
    let ended = Cluster::new(&readers(12, 60), vec![node(1, 2, 100)], refuses).run();
    assert_eq!(ended.outcome, Outcome::Complete);
    assert_eq!(refused.len(), 12, "each was refused once");
}

/// The one who wrote went where nothing else fits, and nobody writes to the full disk any more.
#[test]
fn nor_are_they_where_a_writer_had_met_the_full_disk_before() {
    let mut refused = BTreeSet::new();
    let refuses = |ask: &Ask| ask.name != "vw" && refused.insert(ask.name.to_owned());
    let text = jobs(["w"], 1) + &readers(12, 60);
    let nodes = vec![node(1, 2, 100), node(2, 1, 10)];
    let mut cluster = Cluster::new(&text, nodes, refuses);
    cluster.fills_up = Some(("w", 1, 1_000));
    let ended = cluster.run();
    assert_eq!(ended.outcome, Outcome::Complete);
    assert_eq!(refused.len(), 12, "each was refused once");
    let of_writer = ended.made.iter().filter(|(name, ..)| name == "vw");
    let of_writer: Vec<u64> = of_writer.map(|(_, server, _)| *server).collect();
    assert_eq!(of_writer, [1, 2]);
}

/// Sixteen slots, and sixteen refusals at once: as soon as the volumes of one job are made, the
/// others go on beside it, and not after it.
#[test]
fn room_that_is_there_again_is_used_by_all() {
    let names: Vec<String> = (0..64).map(|k| format!("j{k}")).collect();
    let text = jobs(names.iter().map(String::as_str), 1);
    let mut left = 16;
    let refuses = |_: &Ask| {
        left -= i32::from(left > 0);
        left > 0
    };
    let ended = Cluster::new(&text, vec![node(1, 16, 100)], refuses).run();
    assert_eq!(ended.outcome, Outcome::Complete);
    assert!(ended.at < 4 * HOUR_MS + HOUR_MS / 10, "{} ms", ended.at);
}

/// A job with all of its volumes tells no more whether there is room for others, though a writer
/// met the full disk while they were made.
#[test]
fn nobody_waits_for_the_end_of_a_job_that_asked_whether_there_is_room() {
    let mut refused = false;
    let refuses = |ask: &Ask| ask.name == "y0" && !std::mem::replace(&mut refused, true);
    let text = jobs(["w"], 1) + &readers(4, 5);
    let nodes = vec![node(1, 4, 100), node(2, 1, 2)];
    let mut cluster = Cluster::new(&text, nodes, refuses);
    // Volumes are asked for at 0 ms, and again when the refusal is ten seconds old.
    let meets_at = REFUSING_MS + 10_000 + MAKING_MS / 2;
    cluster.fills_up = Some(("w", 1, meets_at - MAKING_MS));
    let ended = cluster.run();
    assert_eq!(ended.outcome, Outcome::Complete);
    assert!(refused);
    assert!(ended.at < 2 * HOUR_MS + HOUR_MS / 10, "{} ms", ended.at);
}

/// What is refused on one node for a moment waits for none of the others, which are busy.
#[test]
fn a_node_that_refused_room_is_tried_again_while_others_are_busy() {
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let nodes = vec![node(1, 4, 100), node(2, 4, 100)];
    let refuses = |ask: &Ask| ask.server == 1 && ask.at < 1_000;
    let ended = Cluster::new(&jobs(names, 1), nodes, refuses).run();
    assert_eq!(ended.outcome, Outcome::Complete);
    assert!(ended.at < HOUR_MS + HOUR_MS / 10, "{} ms", ended.at);
}

/// The volume of another job was asked for before the refusal, and proves nothing.
#[test]
fn a_job_waits_for_room_as_long_as_another_runs_beside_it() {
    let refuses = |ask: &Ask| ask.name == "vx" && ask.at < HOUR_MS / 2;
    let ended = Cluster::new(&jobs(["x", "s"], 1), vec![node(1, 4, 100)], refuses).run();
    assert_eq!(ended.outcome, Outcome::Complete);
    let made = ended.made.iter().find(|(name, ..)| name == "vx");
    let at = made.expect("it found room").2;
    let latest = HOUR_MS / 2 + 2 * 10_000;
    assert!((HOUR_MS / 2..latest).contains(&at), "{at} ms");
}

/// A node with room for half of what it offers: one job at a time asks for the other half.
#[test]
fn a_node_with_half_the_room_runs_all_jobs_one_half_after_the_other() {
    let names: Vec<String> = (0..16).map(|k| format!("j{k}")).collect();
    let text = jobs(names.iter().map(String::as_str), 1);
    let mut asked: BTreeMap<u64, u32> = BTreeMap::new();
    let refuses = |ask: &Ask| {
        *asked.entry(ask.at).or_default() += 1;
        ask.there >= 8
    };
    let ended = Cluster::new(&text, vec![node(1, 16, 100)], refuses).run();
    assert_eq!(ended.outcome, Outcome::Complete);
    assert!(ended.at < 2 * HOUR_MS + HOUR_MS / 10, "{} ms", ended.at);
    let mut before_an_hour = asked.range(1..HOUR_MS);
    assert!(before_an_hour.all(|(_, count)| *count == 1), "{asked:?}");
}

/// What it reads is on the full node, and can be read from another one.
#[test]
fn what_a_job_reads_does_not_hold_it_to_a_full_disk() {
    for beside in ["", "l"] {
        let mut text = jobs(["a"], 40) + &jobs(["b"], 1);
        text += "parent a child b\nmount va b /in ro\n";
        text += &jobs(beside.split_terminator(' '), 1);
        let mut first = 0;
        let refuses = |ask: &Ask| {
            if ask.name == "va" {
                first = ask.server;
            }
            ask.name == "vb" && ask.server == first
        };
        let nodes = vec![node(1, 4, 100), node(2, 4, 100)];
        let ended = Cluster::new(&text, nodes, refuses).run();
        assert_eq!(ended.outcome, Outcome::Complete);
        assert!(ended.at < 2 * HOUR_MS + 1_000, "{} ms", ended.at);
    }
}

/// A volume that was filled stays when another of its job is refused there, but not for long; a
/// third job that finds room on the full node changes nothing.
#[test]
fn a_filled_volume_holds_its_job_to_a_full_disk_only_for_a_moment() {
    for beside in ["s", "s t"] {
        let text = "volume f scratch 10 MB from bafs://home/in\n".to_owned()
            + &jobs("x".split(' ').chain(beside.split(' ')), 1)
            + "mount f x /in\n";
        let mut first = 0;
        let refuses = |ask: &Ask| {
            if ask.name == "f" && first == 0 {
                first = ask.server;
            }
            ask.name == "vx" && ask.server == first
        };
        let nodes = vec![node(1, 4, 100), node(2, 4, 100)];
        let ended = Cluster::new(&text, nodes, refuses).run();
        assert_eq!(ended.outcome, Outcome::Complete);
        assert!(ended.at < HOUR_MS + 60_000, "{} ms", ended.at);
        let fills = ended.made.iter().filter(|(name, ..)| name == "f");
        let at: Vec<u64> = fills.map(|(_, _, at)| *at).collect();
        assert!(at.len() == 2 && at[1] > 10_000, "{at:?}");
    }
}

/// How much is looked at until so many jobs were started, which succeed at once.
fn looked_at(text: &str, nodes: Vec<NodeSeen>, starts_max: u32) -> u64 {
    let mut scheduler = Scheduler::new(RunId(0), workflow(text), Settings::default());
    let mut due = vec![Event::seen(nodes)];
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
                        return scheduler.looked_at();
                    }
                    let report = success();
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
fn placing_a_pipeline_on_many_nodes_looks_at_each_a_few_times() {
    let looked_at = [25u64, 50, 100].map(|size| {
        let mut text = "job z {\nexecutable = /bin/true\n}\n".to_owned();
        for k in 0..size {
            text += &format!("volume v{k} scratch 30 MB files 5\njob j{k} {{\n");
            text += &format!("executable = /bin/true\n}}\nmount v{k} j{k} /y\n");
            text += &format!("parent j{k} child z\nmount v{k} z /i{k} ro\n");
        }
        let mut scheduler = Scheduler::new(RunId(0), workflow(&text), Settings::default());
        let nodes = (1..=size).map(|id| node(id, 1, 100)).collect();
        let mut actions = Vec::new();
        scheduler.step(Time(0), Event::seen(nodes), &mut actions);
        assert_eq!(actions.len() as u64, size, "a volume on each node");
        scheduler.looked_at()
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
fn placing_jobs_that_share_a_volume_looks_at_each_job_a_few_times() {
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
        let nodes = (1..=4).map(|id| node(id, 8, size)).collect();
        looked_at(&text, nodes, 40)
    });
    for pair in looked_at[..3].windows(2) {
        assert!(pair[1] < 3 * pair[0], "{looked_at:?}");
    }
    assert!(looked_at[4] < looked_at[2], "{looked_at:?}");
}
