//! Past runs and past jobs, simulated again.

use bafs_sched::io::journal::{History, JournalHeader};
use bafs_sched::{Event, Outcome, RecordedStep, Settings, Space, StateChanges};
use bafs_sim::past_runs::{PastRun, from_csv, from_journal, from_slurm};
use bafs_sim::planner::{Environment, NodeClass};
use bafs_sim::simulated_cluster::{Faults, NodeSpec, SimulatedCluster};
use bafs_sim::simulator::{LoadModel, Policy, Scenario, Simulation, SimulationResult};
use bafs_workflow::parse_workflow;

const MB: u64 = 1_000_000;

/// The journal of a run of two pipelines of two jobs, as far as its first `kept` of a hundred
/// facts.
fn partial_history(kept: usize) -> History {
    let mut text = "volume batch bafs://home/data 5 MB\n".to_owned();
    for i in 0..2 {
        text += &format!(
            "volume v{i} scratch 1 MB files 10\njob a{i} {{\nexecutable = x\n}}\n\
             job b{i} {{\nexecutable = x\n}}\nparent a{i} child b{i}\n\
             mount batch a{i} /data\nmount v{i} a{i} /out\nmount v{i} b{i} /in\n\
             extract v{i} out bafs://home/out.{i}\n"
        );
    }
    let parsed = parse_workflow("w.bafs", &text, &|path| Err(path.to_owned()));
    let workflow = parsed.expect("it parses").workflow;
    let settings = Settings::default();
    let node = NodeSpec {
        capacity: Space {
            bytes: 40 * MB,
            files: 10_000,
        },
        slots: 2,
    };
    let (nodes, faults) = (vec![node; 3], Faults::default());
    let mut world = SimulatedCluster::new(1, workflow.clone(), settings.clone(), nodes, faults);
    assert_eq!(world.run_to_end(3_600_000), Outcome::Complete);
    let run = world.scheduler.run();
    let mut steps = world.steps;
    steps.truncate(steps.len() * kept / 100);
    let header = JournalHeader {
        run,
        workflow: workflow.into(),
        settings,
    };
    History { header, steps }
}

fn simulate_past_run(past: &PastRun, nodes: u32, local_bytes_per_s: u64) -> SimulationResult {
    let environment = Environment {
        nodes: vec![NodeClass::new(nodes, 4, 100_000 * MB)],
        home_bytes_per_s: 10 * MB,
        local_bytes_per_s,
        mtbf_s: None,
        restart_s: 60,
    };
    let load = LoadModel::Measured(past.measured.clone());
    let scenario = Scenario::new(environment, Policy::Need, load, 1);
    let run = Simulation::new(past.workflow.clone(), scenario).run();
    let run = run.expect("it ends");
    assert!(run.is_complete(), "{:?}", run.outcome);
    run
}

#[test]
fn a_run_is_simulated_from_its_journal() {
    let past = from_journal(partial_history(100)).expect("a complete run");
    let site = past.site.as_ref().expect("nodes were seen");
    let nodes: Vec<(u32, u32)> = site
        .nodes
        .iter()
        .map(|kind| (kind.count, kind.cpus))
        .collect();
    assert_eq!(nodes, [(3, 2)]);
    assert!(
        past.duration_s.is_some_and(|seconds| seconds > 0.0),
        "{past:?}"
    );
    let jobs = &past.measured.jobs;
    assert_eq!(jobs.len(), 4);
    assert!(jobs.iter().any(|job| job.compute_us > 0), "{jobs:?}");
    assert_eq!(past.measured.extract_bytes.len(), 2);
    let run = simulate_past_run(&past, 3, 10 * MB);
    assert_eq!(run.executions, 4);
    let home: u64 = past.measured.extract_bytes.values().sum();
    assert_eq!(run.home_bytes - run.fetched_bytes, u128::from(home));
}

/// What agents report is not ours.
#[test]
fn waiting_times_of_any_length_are_accepted() {
    let mut history = partial_history(100);
    for step in &mut history.steps {
        if let Event::JobEnded { report, .. } = &mut step.event {
            for used in &mut report.volumes {
                (used.read_bytes, used.wait_ms) = (5 * MB, u64::MAX);
            }
        }
    }
    let past = from_journal(history).expect("a complete run");
    assert!(past.site.is_some());
}

#[test]
fn unfinished_run_is_refused() {
    let error = from_journal(partial_history(60))
        .expect_err("it goes on")
        .to_string();
    assert!(
        error.contains("has not ended") && error.contains("of 4 jobs"),
        "{error}"
    );
}

/// Two jobs share three quarters of what they read: half of the bytes less cross the link.
#[test]
fn shared_data_of_slurm_jobs_cross_the_link_once() {
    let text = "JobID|JobName|State|NCPUS|Elapsed|TotalCPU|MaxDiskRead|MaxDiskWrite\n\
        7_1|a|COMPLETED|2|00:10:00|00:05:00||\n7_1.0|x|COMPLETED|2|00:10:00|00:05:00|1024M|1M\n\
        7_2|a|COMPLETED|2|00:10:00|00:05:00||\n7_2.0|x|COMPLETED|2|00:10:00|00:05:00|1024M|1M\n";
    let home = |permille| {
        let past = from_slurm("jobs", text, permille).expect("it is read");
        simulate_past_run(&past, 1, 100 * MB).home_bytes
    };
    let (alone, shared) = (home(0), home(750));
    assert_eq!(alone, 2 * ((1 << 30) + (1 << 20)));
    assert_eq!(alone - shared, 3 << 28);
}

#[test]
fn jobs_of_a_table_wait_for_their_inputs() {
    let text = "job,runtime,after,output\na,10,,1 MB\nb,20,a,1 MB\nc,5,,\n";
    let past = from_csv("jobs", text).expect("it is read");
    let run = simulate_past_run(&past, 1, 1_000 * MB);
    let seconds = run.seconds();
    assert!((30.0..31.0).contains(&seconds), "{seconds}");
    assert_eq!(
        run.home_bytes,
        u128::from(MB),
        "what `a` wrote never goes home"
    );
}

/// What lies on the own node crosses no link.
#[test]
fn local_scratch_volumes_reveal_the_disk_rate() {
    let mut history = partial_history(100);
    for step in &mut history.steps {
        if let Event::JobEnded { report, .. } = &mut step.event {
            for used in &mut report.volumes {
                let is_batch = used.name == "batch";
                (used.read_bytes, used.wait_ms) = if is_batch { (0, 0) } else { (100 * MB, 100) };
                used.pages.clear();
            }
        }
    }
    let past = from_journal(history).expect("a complete run");
    let site = past.site.expect("nodes were seen");
    assert_eq!(site.nodes[0].disk_bytes_per_s, Some(1_000 * MB));
}

/// Simulated time begins with the first thing that a node was asked for, not with the journal.
#[test]
fn run_begins_with_its_first_request_to_nodes() {
    let mut history = partial_history(100);
    let began = from_journal(history.clone())
        .expect("it is complete")
        .began_at;
    let first = history.began_at();
    assert!(began.is_some_and(|began| began >= first), "{began:?}");
    for step in &mut history.steps {
        step.at = step.at.plus_ms(3_000);
    }
    let tick = RecordedStep {
        at: first,
        event: Event::Tick,
        decisions: Vec::new(),
        actions: Vec::new(),
        changes: StateChanges::default(),
    };
    history.steps.insert(0, tick);
    let later = from_journal(history).expect("it is complete").began_at;
    assert_eq!(later, began.map(|began| began.plus_ms(3_000)));
}
