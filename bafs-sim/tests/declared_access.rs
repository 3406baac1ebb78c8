//! Jobs that do not do what the workflow declares: what is warned of, with which names, and that
//! nothing is where they do.

use bafs_proto::ids::{RunId, ServerId};
use bafs_proto::source_warning::{SourceWarnings, WarningReason};
use bafs_proto::time::Time;
use bafs_sched::{Action, Event, NodeInfo, Outcome, Scheduler, Settings, Space};
use bafs_sim::simulated_cluster::{Faults, NodeSpec, SimulatedCluster};
use bafs_workflow::parse_workflow;

/// Job w writes v, r reads it after that, and o uses the filled volume f that w changes.
const ACCESS_WORKFLOW: &str = "job w JOB\njob r JOB\njob o JOB\nparent w child r\n\
    volume v scratch 1 MB\nvolume f scratch 1 MB from bafs://home/f\n\
    volume b cache bafs://home/b 1 MB\nmount v w /v\nmount v r /v ro\nmount f w /f\n\
    mount f o /f ro\nmount b r /b\n";

/// Runs it with these departures from what is declared: job, volume, reads, writes.
fn run_with_access(observed: &[(&str, &str, bool, bool)]) -> Vec<String> {
    let text = ACCESS_WORKFLOW.replace("JOB", "{\n  executable = x\n}");
    let none = |path: &str| Err(path.to_owned());
    let workflow = parse_workflow("w.bafs", &text, &none)
        .expect("it is right")
        .workflow;
    let node = NodeSpec {
        capacity: Space {
            bytes: 100_000_000,
            files: 100_000,
        },
        slots: 4,
    };
    let mut world = SimulatedCluster::new(
        3,
        workflow,
        Settings::default(),
        vec![node],
        Faults::default(),
    );
    for &(job, volume, reads, writes) in observed {
        world
            .observed_access
            .insert((job.to_owned(), volume.to_owned()), (reads, writes));
    }
    assert_eq!(world.run_to_end(1_000_000), Outcome::Complete);
    let warnings = world.scheduler.warnings().iter();
    warnings.map(|warning| warning.text.clone()).collect()
}

fn single_warning(warnings: &[String]) -> &str {
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    &warnings[0]
}

fn assert_mentions(warning: &str, parts: &[&str]) {
    for part in parts {
        assert!(warning.contains(part), "{part} is not in: {warning}");
    }
}

#[test]
fn job_acting_as_declared_gets_no_warning() {
    let observed = [("w", "f", true, false)];
    assert_eq!(run_with_access(&observed), Vec::<String>::new());
}

#[test]
fn undeclared_dependency_is_found_by_observed_access() {
    let found = run_with_access(&[]);
    let parts = ["'o'", "'w'", "'f'", "'file'", "parent w child o"];
    assert_mentions(single_warning(&found), &parts);
}

#[test]
fn reading_unwritten_data_names_the_expected_writer() {
    let found = run_with_access(&[("w", "f", true, false), ("w", "v", true, false)]);
    assert_eq!(found.len(), 2, "w itself read it too: {found:?}");
    assert_mentions(
        &found[1],
        &["'r'", "'w'", "'v'", "'file'", "before any job wrote"],
    );
}

#[test]
fn source_warnings_are_reported_once() {
    let none = |path: &str| Err(path.to_owned());
    let text = ACCESS_WORKFLOW.replace("JOB", "{\n  executable = x\n}");
    let workflow = parse_workflow("w.bafs", &text, &none).expect("right");
    let mut scheduler = Scheduler::new(RunId(1), workflow.workflow, Settings::default());
    let space = Space {
        bytes: 100_000_000,
        files: 100_000,
    };
    let nodes = [1, 2].map(|id| NodeInfo::single_group(ServerId(id), space, 1));
    let mut actions = Vec::new();
    scheduler.step(Time(1), Event::nodes_listed(nodes.to_vec()), &mut actions);
    let made = actions.iter().filter_map(|action| match action {
        Action::CreateVolume { id, .. } => Some(*id),
        _ => None,
    });
    let made: Vec<_> = made.collect();
    assert!(!made.is_empty());
    for volume in made.iter().chain(&made).copied() {
        let mut warnings = SourceWarnings::default();
        warnings.add("lost+found", WarningReason::UnreadableDirectory);
        let warned = Event::SourceWarningsReceived { volume, warnings };
        scheduler.step(Time(2), warned, &mut actions);
    }
    let told = scheduler.warnings().iter();
    let mut told: Vec<_> = told.map(|warning| warning.text.clone()).collect();
    assert!(
        told.iter().all(|text| text.contains("'lost+found'")),
        "{told:?}"
    );
    let count = told.len();
    told.dedup();
    assert_eq!(told.len(), count);
    assert!(count > 0);
}

#[test]
fn unused_mount_is_named_with_its_path() {
    let found = run_with_access(&[("w", "f", true, false), ("r", "b", false, false)]);
    assert_mentions(
        single_warning(&found),
        &["'r'", "did not use volume", "'b'", "/b"],
    );
}

/// Jobs w and x change v, and r reads it between them and writes o, which e reads at the end.
const CHAIN_WORKFLOW: &str = "job w JOB\njob r JOB\njob x JOB\njob e JOB\nparent w child r\n\
    parent r child x\nparent x child e\nvolume v scratch 1 MB\nvolume o scratch 1 MB\n\
    mount v w /v\nmount v r /v ro\nmount o r /o\nmount v x /v\nmount v e /v ro\n\
    mount o e /o ro\n";

/// Executions that came to an end.
fn ended_executions(world: &SimulatedCluster) -> usize {
    let is_end = |event: &Event| matches!(event, Event::JobEnded { .. });
    world
        .records
        .iter()
        .filter(|(_, event)| is_end(event))
        .count()
}

#[test]
fn rerun_job_reads_its_original_input() {
    let text = CHAIN_WORKFLOW.replace("JOB", "{\n  executable = x\n}");
    let none = |path: &str| Err(path.to_owned());
    let parsed = parse_workflow("w.bafs", &text, &none).expect("it is right");
    let mut again = 0;
    for seed in 0..60 {
        let node = NodeSpec {
            capacity: Space {
                bytes: 100_000_000,
                files: 100_000,
            },
            slots: 4,
        };
        let faults = Faults {
            volume_vanishes: 30,
            until_ms: 200_000,
            ..Faults::default()
        };
        let workflow = parsed.workflow.clone();
        let settings = Settings::default();
        let mut world = SimulatedCluster::new(seed, workflow, settings, vec![node; 2], faults);
        assert_eq!(
            world.run_to_end(1_000_000),
            Outcome::Complete,
            "seed {seed}"
        );
        // The world asserts that no job starts with what a later one left.
        again += u64::from(ended_executions(&world) > 4);
        let told: Vec<_> = world.scheduler.warnings().iter().collect();
        let told: Vec<_> = told
            .iter()
            .filter(|warning| warning.text.contains("ordered"))
            .collect();
        assert!(told.is_empty(), "seed {seed}: {told:?}");
    }
    assert!(again > 5, "only {again} runs did something again");
}
