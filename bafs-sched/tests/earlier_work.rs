//! Which jobs run again because of what changed since the last run: small graphs, and random ones
//! against a naive model.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::hash::Digest;
use bafs_proto::ids::{ExecutionId, RunId, ServerId, VolumeId};
use bafs_proto::job_report::{ObservedInputs, directory_digest};
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::source::{SourceEntry, SourceIdentity, SourceKind};
use bafs_proto::time::Time;
use bafs_sched::earlier_work::{
    AdoptedVolume, EarlierWork, ExtractIndex, FoundResult, HomeState, JobDecisions, JobRecord,
    KeptVolume, ProgramIdentity, ResultRecord, RunReason, SeenSource, SourceListing, SourceRecord,
    SourceState, decide_jobs, describe_job_digest, find_changes,
};
use bafs_sched::io::journal::JournalHeader;
use bafs_sched::{Action, Event, NodeInfo, NullSelector, Settings, Space};
use bafs_workflow::{JobIndex, Url, VolumeIndex, VolumeKind, Workflow, parse_workflow};

/// Two samples: `align` reads a cache, `sort` what `align` wrote, and sends the result home.
const SAMPLES: &str = "volume reads cache bafs://home/reads 1 MB\n\
    for s in 1..2\n\
    volume aligned$(s) scratch 1 MB\nvolume sorted$(s) scratch 1 MB\n\
    job align$(s) {\nexecutable = /bin/align\narguments = $(s)\n}\n\
    job sort$(s) {\nexecutable = /bin/sort\n}\n\
    parent align$(s) child sort$(s)\n\
    mount reads align$(s) /reads\nmount aligned$(s) align$(s) /out\n\
    mount aligned$(s) sort$(s) /in ro\nmount sorted$(s) sort$(s) /out\n\
    extract sorted$(s) x bafs://home/out/$(s)\nend\n";

fn parse(text: &str) -> Workflow {
    let none = |path: &str| Err(path.to_owned());
    parse_workflow("w.bafs", text, &none)
        .expect("it is right")
        .workflow
}

fn identity(size: u64) -> SourceIdentity {
    SourceIdentity {
        size,
        mtime_ns: 1,
        ctime_ns: 2,
    }
}

fn file(path: &str, size: u64) -> SourceEntry {
    SourceEntry {
        path: path.to_owned(),
        kind: SourceKind::File,
        identity: identity(size),
        mode: 0o644,
    }
}

fn url(text: &str) -> Url {
    text.parse().expect("a URL")
}

/// A workflow that has run to its end, and its home.
#[derive(Clone)]
struct EarlierState {
    workflow: Workflow,
    records: BTreeMap<String, JobRecord>,
    failed: BTreeSet<String>,
    home: HomeState,
    kept: Vec<KeptVolume>,
}

impl EarlierState {
    fn after_success() -> Self {
        let workflow = parse(SAMPLES);
        let mut state = Self {
            records: BTreeMap::new(),
            failed: BTreeSet::new(),
            home: HomeState::default(),
            kept: Vec::new(),
            workflow,
        };
        for sample in ["1", "2"] {
            let (align, sort) = (format!("align{sample}"), format!("sort{sample}"));
            let reads = SourceRecord {
                source: url("bafs://home/reads"),
                seen: SeenSource::Exactly(ObservedInputs {
                    files: vec![(format!("{sample}.fq"), identity(10))],
                    missing: vec![format!("{sample}.fq.gz")],
                    ..ObservedInputs::default()
                }),
            };
            state.record(&align, 1, vec![reads], &[], &[]);
            let target = format!("bafs://home/out/{sample}");
            state.record(&sort, 1, Vec::new(), &[(&align, 1)], &[&target]);
        }
        state.list_reads(&[file("1.fq", 10), file("2.fq", 10)]);
        state
    }

    fn record(
        &mut self,
        job: &str,
        execution: u128,
        sources: Vec<SourceRecord>,
        producers: &[(&str, u128)],
        targets: &[&str],
    ) {
        let mut names = self.workflow.jobs.iter();
        let index = names.position(|it| it.name == job).expect("a job");
        let index = JobIndex(u32::try_from(index).expect("few"));
        let producers = producers.iter();
        let extracts = ExtractIndex::new(&self.workflow);
        let record = JobRecord {
            job: job.to_owned(),
            execution: ExecutionId(execution),
            description: describe_job_digest(&self.workflow, index, |volume| extracts.of(volume)),
            program: None,
            sources,
            producers: producers
                .map(|(name, id)| ((*name).to_owned(), ExecutionId(*id)))
                .collect(),
            results: targets
                .iter()
                .map(|target| ResultRecord {
                    target: url(target),
                    identity: identity(7),
                })
                .collect(),
        };
        for target in targets {
            let found = FoundResult::Present(identity(7));
            self.home.results.insert(url(target), found);
        }
        self.records.insert(job.to_owned(), record);
    }

    fn list_reads(&mut self, entries: &[SourceEntry]) {
        let mut all = vec![SourceEntry {
            kind: SourceKind::Directory,
            ..file("", 0)
        }];
        all.extend_from_slice(entries);
        let listing = SourceState::Listed(SourceListing::new(all));
        self.home.sources.insert(url("bafs://home/reads"), listing);
    }

    fn decide(&self) -> JobDecisions {
        let own = find_changes(&self.workflow, &self.records, &self.failed, &self.home);
        decide_jobs(&self.workflow, &self.records, own, &self.kept)
    }

    /// The jobs that run, each with why.
    fn running(&self) -> Vec<String> {
        let decisions = self.decide();
        let jobs = self.workflow.jobs.iter().zip(&decisions.reasons);
        let running = jobs.filter_map(|(job, reason)| Some((&job.name, reason.as_ref()?)));
        running
            .map(|(name, why)| format!("{name}: {why}"))
            .collect()
    }

    fn keep(&mut self, name: &str, writers: &[(&str, u128)]) {
        let writers = writers.iter();
        self.kept.push(KeptVolume {
            id: VolumeId(9),
            name: name.to_owned(),
            server: ServerId(1),
            size: Space {
                bytes: u64::MAX,
                files: u64::MAX,
            },
            writers: writers
                .map(|(name, id)| ((*name).to_owned(), ExecutionId(*id)))
                .collect(),
        });
    }
}

#[test]
fn nothing_runs_when_nothing_changed() {
    assert_eq!(EarlierState::after_success().running(), [""; 0]);
}

#[test]
fn jobs_without_records_run() {
    let mut state = EarlierState::after_success();
    state.records.clear();
    assert_eq!(state.running().len(), 4);
    assert_eq!(state.running()[0], "align1: it never ran to its end");
}

#[test]
fn changed_input_runs_its_reader_and_successors() {
    let mut state = EarlierState::after_success();
    state.list_reads(&[file("1.fq", 10), file("2.fq", 11)]);
    let expected = [
        "align2: its input bafs://home/reads/2.fq changed",
        "sort2: job align2 runs again",
    ];
    assert_eq!(state.running(), expected);
}

#[test]
fn file_that_a_job_looked_for_counts() {
    let mut state = EarlierState::after_success();
    let all = [file("1.fq", 10), file("1.fq.gz", 3), file("2.fq", 10)];
    state.list_reads(&all);
    let first = "align1: its input bafs://home/reads/1.fq.gz changed";
    assert_eq!(state.running()[0], first);
    // Nobody has looked for this one.
    state.list_reads(&[file("1.fq", 10), file("2.fq", 10), file("3.fq", 10)]);
    assert_eq!(state.running(), [""; 0]);
}

#[test]
fn listed_directory_counts_with_its_names() {
    let mut state = EarlierState::after_success();
    let listed = [file("1.fq", 10), file("2.fq", 10)];
    let record = state.records.get_mut("align1").expect("it ran");
    record.sources[0].seen = SeenSource::Exactly(ObservedInputs {
        listed: vec![(String::new(), directory_digest(listed.iter()))],
        ..ObservedInputs::default()
    });
    assert_eq!(state.running(), [""; 0]);
    state.list_reads(&[file("1.fq", 10), file("2.fq", 10), file("3.fq", 10)]);
    assert_eq!(
        state.running()[0],
        "align1: its input bafs://home/reads changed"
    );
}

#[test]
fn whole_source_counts_where_nobody_observed() {
    let mut state = EarlierState::after_success();
    let record = state.records.get_mut("align1").expect("it ran");
    record.sources[0].seen = SeenSource::Whole(Digest([1; 32]));
    assert_eq!(
        state.running()[0],
        "align1: its input bafs://home/reads changed"
    );
    let record = state.records.get_mut("align1").expect("it ran");
    record.sources[0].seen = SeenSource::Unknown;
    assert!(state.running()[0].starts_with("align1: its input bafs://home/reads cannot be"));
}

#[test]
fn edited_argument_runs_its_job_and_successors() {
    let mut state = EarlierState::after_success();
    state.workflow.jobs[0].command.arguments = vec!["-x".to_owned()];
    let expected = [
        "align1: its description changed",
        "sort1: job align1 runs again",
    ];
    assert_eq!(state.running(), expected);
}

#[test]
fn sizes_and_priorities_change_nothing() {
    let mut state = EarlierState::after_success();
    state.workflow.volumes[1].size_bytes *= 2;
    state.workflow.jobs[0].priority = 5;
    state.workflow.jobs[1].retries = 3;
    assert_eq!(state.running(), [""; 0]);
}

#[test]
fn changed_program_runs_its_job() {
    let mut state = EarlierState::after_success();
    let program = |size| ProgramIdentity {
        path: "/bin/sort".to_owned(),
        size,
        mtime_ns: 1,
    };
    state.records.get_mut("sort1").expect("it ran").program = Some(program(1));
    state.home.programs.insert(JobIndex(1), program(1));
    assert_eq!(state.running(), [""; 0]);
    state.home.programs.insert(JobIndex(1), program(2));
    let expected = [
        "align1: job sort1 needs its volume aligned1, which is gone",
        "sort1: its program /bin/sort changed",
    ];
    assert_eq!(state.running(), expected);
}

#[test]
fn missing_or_changed_result_is_made_again() {
    let mut state = EarlierState::after_success();
    let target = url("bafs://home/out/2");
    state
        .home
        .results
        .insert(target.clone(), FoundResult::Missing);
    let expected = [
        "align2: job sort2 needs its volume aligned2, which is gone",
        "sort2: its result bafs://home/out/2 is missing",
    ];
    assert_eq!(state.running(), expected);
    let other = FoundResult::Present(identity(8));
    state.home.results.insert(target, other);
    let last = "sort2: its result bafs://home/out/2 changed at home";
    assert_eq!(state.running()[1], last);
}

#[test]
fn kept_volume_spares_its_writer() {
    let mut state = EarlierState::after_success();
    state.failed.insert("sort1".to_owned());
    assert_eq!(state.running().len(), 2);
    state.keep("aligned1", &[("align1", 1)]);
    assert_eq!(state.running(), ["sort1: it failed"]);
    assert_eq!(
        state.decide().adopted,
        BTreeMap::from([(VolumeIndex(1), 0)])
    );
    // What its writer made later is not in it.
    state.kept[0].writers[0].1 = ExecutionId(0);
    assert_eq!(state.running().len(), 2);
    assert!(state.decide().adopted.is_empty());
}

#[test]
fn kept_volume_of_a_changed_writer_is_dropped() {
    let mut state = EarlierState::after_success();
    state.failed.insert("sort1".to_owned());
    state.keep("aligned1", &[("align1", 1)]);
    state.workflow.jobs[0].command.arguments.clear();
    assert_eq!(state.running().len(), 2);
    assert!(state.decide().adopted.is_empty());
}

#[test]
fn consumer_of_an_older_execution_runs() {
    let mut state = EarlierState::after_success();
    state.records.get_mut("align1").expect("it ran").execution = ExecutionId(2);
    let running = state.running();
    assert_eq!(running[1], "sort1: job align1 has run since", "{running:?}");
}

#[test]
fn added_sample_runs_alone() {
    let mut state = EarlierState::after_success();
    state.workflow = parse(&SAMPLES.replace("1..2", "1..3"));
    state.list_reads(&[file("1.fq", 10), file("2.fq", 10), file("3.fq", 10)]);
    let expected = [
        "align3: it never ran to its end",
        "sort3: it never ran to its end",
    ];
    assert_eq!(state.running(), expected);
}

/// Sample 1 is up to date, and so is the first job of sample 2, whose volume was kept: only the last
/// job runs, in that volume. What was written is put back from the journal.
#[test]
fn run_begins_with_what_is_up_to_date() {
    let workflow = parse(SAMPLES);
    let settings = Settings {
        fleet_settle_ms: 0,
        ..Settings::default()
    };
    let header = JournalHeader {
        run: RunId(2),
        workflow,
        settings,
    };
    let mut scheduler = header.new_scheduler(&NullSelector);
    scheduler.start_recording();
    let space = |bytes| Space {
        bytes,
        files: 1_000_000,
    };
    let server = ServerId(1);
    let kept = VolumeId(77);
    let dropped = VolumeId(78);
    let work = EarlierWork {
        records: EarlierState::after_success()
            .records
            .into_values()
            .collect(),
        up_to_date: vec![JobIndex(0), JobIndex(1), JobIndex(2)],
        nodes: vec![NodeInfo::single_group(server, space(50_000_000), 2)],
        adopted: vec![AdoptedVolume {
            id: kept,
            volume: VolumeIndex(3),
            server,
            size: space(2_000_000),
        }],
        dropped: vec![(dropped, server)],
        ..EarlierWork::default()
    };
    let event = Event::EarlierWorkFound(Box::new(work));
    let first = scheduler.record_step(Time(1), event);
    let second = scheduler.record_step(Time(2), Event::Tick);
    let actions: Vec<&Action> = first.actions.iter().chain(&second.actions).collect();
    let [
        Action::DeleteVolume { id, .. },
        Action::CreateVolume {
            id: made, volume, ..
        },
    ] = actions[..]
    else {
        panic!("{actions:?}");
    };
    assert_eq!((*id, *volume), (dropped, VolumeIndex(4)));
    let third = scheduler.record_step(Time(3), Event::VolumeCreated { volume: *made });
    let [
        Action::StartJob {
            execution,
            job,
            volumes,
            ..
        },
    ] = &third.actions[..]
    else {
        panic!("{:?}", third.actions);
    };
    assert_eq!(*job, JobIndex(3));
    assert!(volumes.iter().any(|volume| volume.id == kept));
    let progress = scheduler.progress();
    assert_eq!((progress.jobs_done, progress.extracts_done), (3, 1));
    let report = JobReport {
        outcome: JobOutcome::Exited(0),
        wall_ms: 1,
        cpu_ms: 1,
        output_tail: String::new(),
        volumes: Vec::new(),
    };
    let ended = Event::JobEnded {
        execution: *execution,
        report,
    };
    let fourth = scheduler.record_step(Time(4), ended);
    let identity = identity(5);
    let identified = Event::ResultIdentified { index: 1, identity };
    let fifth = scheduler.record_step(Time(5), identified);
    let record = scheduler.job_records().find(|record| record.job == "sort2");
    let record = record.expect("it is done");
    assert_eq!(record.producers, [("align2".to_owned(), ExecutionId(1))]);
    assert_eq!(record.results[0].identity, identity);

    let mut restored = header.new_scheduler(&NullSelector);
    restored.start_recording();
    for step in [&first, &second, &third, &fourth, &fifth] {
        restored.redo(&step.changes);
    }
    restored.finish_redo();
    scheduler.check_restored(&restored);
}

/// Numbers of Park and Miller (1988).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0 * 16_807 % 2_147_483_647;
        self.0 % bound
    }
}

/// A few jobs in a row, each after some of those before, and a few volumes that some of them write
/// and read.
fn random_workflow(numbers: &mut Numbers) -> Workflow {
    let jobs = 2 + numbers.below(5);
    let mut text = String::new();
    for job in 0..jobs {
        text += &format!("job j{job} {{\nexecutable = x\n}}\n");
        for before in 0..job {
            if numbers.below(2) == 0 {
                text += &format!("parent j{before} child j{job}\n");
            }
        }
    }
    for volume in 0..1 + numbers.below(4) {
        text += &format!("volume v{volume} scratch 1 MB\n");
        // Users of a volume follow each other.
        let mut last = None;
        for job in 0..jobs {
            if numbers.below(2) == 0 {
                continue;
            }
            let mode = if last.is_none() || numbers.below(2) == 0 {
                ""
            } else {
                " ro"
            };
            text += &format!("mount v{volume} j{job} /v{volume}{mode}\n");
            if let Some(last) = last {
                text += &format!("parent j{last} child j{job}\n");
            }
            last = Some(job);
        }
    }
    parse(&text)
}

/// The same by applying the rules to all jobs until nothing changes.
fn decide_naively(
    workflow: &Workflow,
    forced: &BTreeSet<u32>,
    kept: &BTreeMap<VolumeIndex, BTreeSet<u32>>,
) -> (BTreeSet<u32>, BTreeSet<VolumeIndex>) {
    let mut rank = vec![0; workflow.jobs.len()];
    for (position, job) in workflow.topological_order().iter().enumerate() {
        rank[job.as_usize()] = position;
    }
    let writes = |job: u32, volume: VolumeIndex| {
        let mut mounts = workflow.jobs[job as usize].mounts.iter();
        mounts.any(|mount| mount.volume == volume && mount.writable)
    };
    let (mut running, mut usable) = (forced.clone(), kept.clone());
    loop {
        let before = (running.clone(), usable.clone());
        for (index, volume) in workflow.volumes.iter().zip(0u32..).map(|(v, i)| (i, v)) {
            let index = VolumeIndex(index);
            assert!(matches!(volume.kind, VolumeKind::Scratch { .. }));
            let users: Vec<u32> = volume.users.iter().map(|job| job.0).collect();
            let writers: BTreeSet<u32> = users
                .iter()
                .copied()
                .filter(|job| writes(*job, index))
                .collect();
            for &user in users.iter().filter(|user| before.0.contains(user)) {
                let earlier: BTreeSet<u32> = writers
                    .iter()
                    .copied()
                    .filter(|it| rank[*it as usize] < rank[user as usize])
                    .collect();
                let is_usable = usable
                    .get(&index)
                    .is_some_and(|kept| *kept == earlier && kept.is_disjoint(&before.0));
                if !is_usable {
                    usable.remove(&index);
                }
                let there = usable.get(&index).cloned().unwrap_or_default();
                running.extend(
                    writers
                        .iter()
                        .filter(|it| **it != user && !there.contains(it)),
                );
                if writes(user, index) {
                    let later = |it: &&u32| rank[**it as usize] > rank[user as usize];
                    running.extend(users.iter().filter(later));
                }
            }
        }
        for (job, index) in workflow.jobs.iter().zip(0u32..) {
            if job
                .parents
                .iter()
                .any(|parent| before.0.contains(&parent.0))
            {
                running.insert(index);
            }
        }
        if (&running, &usable) == (&before.0, &before.1) {
            let is_used = |volume: &VolumeIndex| {
                let mut users = workflow.volume(*volume).users.iter();
                users.any(|user| running.contains(&user.0))
            };
            let used = usable.into_keys().filter(is_used).collect();
            return (running, used);
        }
    }
}

#[test]
fn decision_equals_a_naive_model() {
    let mut adopted_in_all = 0;
    for seed in 1..3_000 {
        let mut numbers = Numbers(seed);
        let workflow = random_workflow(&mut numbers);
        let count = u64::try_from(workflow.jobs.len()).expect("few");
        let forced: BTreeSet<u32> = (0..2)
            .map(|_| u32::try_from(numbers.below(count)).expect("few"))
            .collect();
        let mut records = BTreeMap::new();
        for job in &workflow.jobs {
            let record = JobRecord {
                job: job.name.clone(),
                execution: ExecutionId(1),
                description: Digest([0; 32]),
                program: None,
                sources: Vec::new(),
                producers: Vec::new(),
                results: Vec::new(),
            };
            records.insert(job.name.clone(), record);
        }
        let (mut kept, mut kept_of) = (Vec::new(), BTreeMap::new());
        for (volume, index) in workflow.volumes.iter().zip(0u32..) {
            let index = VolumeIndex(index);
            let is_writer = |job: &&JobIndex| {
                let mut mounts = workflow.job(**job).mounts.iter();
                mounts.any(|mount| mount.volume == index && mount.writable)
            };
            let writers: Vec<JobIndex> = volume.users.iter().filter(is_writer).copied().collect();
            let there = numbers.below(writers.len() as u64 + 2) as usize;
            let there: Vec<JobIndex> = writers.into_iter().take(there).collect();
            if there.is_empty() {
                continue;
            }
            kept_of.insert(index, there.iter().map(|job| job.0).collect());
            let written = there.iter().map(|job| workflow.job(*job).name.clone());
            kept.push(KeptVolume {
                id: VolumeId(u128::from(index.0)),
                name: volume.name.clone(),
                server: ServerId(1),
                size: Space {
                    bytes: u64::MAX,
                    files: u64::MAX,
                },
                writers: written.map(|name| (name, ExecutionId(1))).collect(),
            });
        }
        let own = (0..workflow.jobs.len() as u32)
            .map(|job| forced.contains(&job).then_some(RunReason::Forced))
            .collect();
        let decided = decide_jobs(&workflow, &records, own, &kept);
        let running: BTreeSet<u32> = decided.running().map(|job| job.0).collect();
        let adopted: BTreeSet<VolumeIndex> = decided.adopted.keys().copied().collect();
        adopted_in_all += adopted.len();
        let naive = decide_naively(&workflow, &forced, &kept_of);
        assert_eq!((running, adopted), naive, "seed {seed}");
    }
    assert!(adopted_in_all > 100, "kept volumes are used at times");
}
