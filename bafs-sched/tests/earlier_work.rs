//! Which jobs run again because of what changed since the last run: small graphs, and random ones
//! against a naive model.

mod comparisons;
mod naive_model;

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::hash::Digest;
use bafs_proto::ids::{ExecutionId, RunId, ServerId, VolumeId};
use bafs_proto::job_report::{ObservedInputs, directory_digest, unreadable_directory_digest};
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::source::{SourceEntry, SourceIdentity, SourceKind};
use bafs_proto::time::Time;
use bafs_sched::earlier_work::{
    AdoptedVolume, EarlierWork, ExtractIndex, FoundResult, HomeState, JobDecisions, JobRecord,
    KeptVolume, NamedFiles, ProgramIdentity, ResultRecord, RunReason, SeenSource, SourceListing,
    SourceRecord, SourceState, decide_jobs, describe_job_digest, find_changes, written_volumes,
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
                seen: SeenSource::Exactly(Box::new(ObservedInputs {
                    files: vec![(format!("{sample}.fq"), identity(10))],
                    missing: vec![format!("{sample}.fq.gz")],
                    ..ObservedInputs::default()
                })),
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
        let index = self.job_index(job);
        let before: Vec<JobIndex> = producers
            .iter()
            .map(|(name, _)| self.job_index(name))
            .collect();
        let producers = producers.iter();
        let extracts = ExtractIndex::new(&self.workflow);
        let record = JobRecord {
            job: job.to_owned(),
            execution: ExecutionId(execution),
            description: describe_job_digest(&self.workflow, index, &before, |volume| {
                extracts.of(volume)
            }),
            program: None,
            files: NamedFiles::default(),
            sizes: written_volumes(&self.workflow, index)
                .map(|(_, size)| size)
                .collect(),
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

    fn job_index(&self, job: &str) -> JobIndex {
        let mut names = self.workflow.jobs.iter();
        let index = names.position(|it| it.name == job).expect("a job");
        JobIndex(u32::try_from(index).expect("few"))
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
    record.sources[0].seen = SeenSource::Exactly(Box::new(ObservedInputs {
        listed: vec![(String::new(), directory_digest(listed.iter()))],
        ..ObservedInputs::default()
    }));
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
fn cache_sizes_and_priorities_change_nothing() {
    let mut state = EarlierState::after_success();
    state.workflow.volumes[0].size_bytes *= 2;
    state.workflow.jobs[0].priority = 5;
    state.workflow.jobs[1].retries = 3;
    assert_eq!(state.running(), [""; 0]);
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

/// Runs a workflow to its end on a node where all goes well; what is noted of its jobs.
fn run_to_its_end(workflow: Workflow, sent: SourceIdentity) -> BTreeMap<String, JobRecord> {
    let settings = Settings {
        fleet_settle_ms: 0,
        ..Settings::default()
    };
    let header = JournalHeader {
        run: RunId(2),
        workflow: workflow.into(),
        settings,
    };
    let mut scheduler = header.new_scheduler(&NullSelector);
    scheduler.start_recording();
    let space = Space {
        bytes: 50_000_000,
        files: 1_000_000,
    };
    let node = NodeInfo::single_group(ServerId(1), space, 2);
    let mut events = vec![Event::nodes_listed(vec![node])];
    for second in 1..100 {
        let event = events.pop().unwrap_or(Event::Tick);
        for action in scheduler.record_step(Time(second * 1_000), event).actions {
            match action {
                Action::CreateVolume { id, .. } => {
                    events.push(Event::VolumeCreated { volume: id });
                }
                Action::DeleteVolume { id, .. } => {
                    events.push(Event::VolumeDeleted { volume: id });
                }
                Action::StartJob { execution, .. } => events.push(Event::JobEnded {
                    execution,
                    report: JobReport {
                        outcome: JobOutcome::Exited(0),
                        wall_ms: 1,
                        cpu_ms: 1,
                        memory_bytes_max: 0,
                        output_tail: String::new(),
                        volumes: Vec::new(),
                    },
                }),
                Action::ExtractFile { extract, index, .. } => {
                    events.push(Event::FileExtracted { extract, bytes: 1 });
                    let identity = sent;
                    events.push(Event::ResultIdentified { index, identity });
                }
                _ => {}
            }
        }
    }
    assert!(scheduler.outcome().is_some(), "the run is over");
    let records = scheduler.job_records();
    records.map(|it| (it.job.clone(), it)).collect()
}

#[test]
fn result_goes_with_its_last_writer() {
    let map = "volume v scratch 1 MB\njob map {\nexecutable = /bin/map\n}\n\
               mount v map /v\nextract v r bafs://home/r\n";
    let filter = "job filter {\nexecutable = /bin/filter\n}\nparent map child filter\n\
                  mount v filter /v\n";
    let both = parse(&format!("{map}{filter}"));
    let records = run_to_its_end(both.clone(), identity(5));
    let mut home = HomeState::default();
    let found = FoundResult::Present(identity(5));
    home.results.insert(url("bafs://home/r"), found);
    let none = BTreeSet::new();
    let unchanged = find_changes(&both, &records, &none, &home);
    assert!(unchanged.iter().all(Option::is_none), "{unchanged:?}");
    let alone = find_changes(&parse(map), &records, &none, &home);
    assert!(alone[0].is_some(), "the result is that of 'filter'");
}

/// Sample 1 is up to date, and so is the first job of sample 2, whose volume was kept: only the
/// last job runs, in that volume. What was written is put back from the journal.
#[test]
#[expect(clippy::too_many_lines, reason = "one run, step by step")]
fn run_begins_with_what_is_up_to_date() {
    let workflow = parse(SAMPLES);
    let settings = Settings {
        fleet_settle_ms: 0,
        ..Settings::default()
    };
    let header = JournalHeader {
        run: RunId(2),
        workflow: workflow.into(),
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
            size: Space {
                bytes: 2_000_000,
                files: 10,
            },
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
    // It runs again, so what it made before is not taken for done if this run is interrupted.
    let noted: Vec<String> = scheduler.job_records().map(|it| it.job).collect();
    assert_eq!(noted, ["align1", "align2", "sort1"]);
    let report = JobReport {
        outcome: JobOutcome::Exited(0),
        wall_ms: 1,
        cpu_ms: 1,
        memory_bytes_max: 0,
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
