//! Volumes whose sizes are not declared, or too small, in virtual time with seeds. How large those
//! are assumed to be is in `assumed_sizes.rs`.

use bafs_sched::{Outcome, Settings, Space};
use bafs_sim::seeded_rng::SeededRng;
use bafs_sim::simulated_cluster::{Faults, NodeSpec, SimulatedCluster};
use bafs_workflow::{Workflow, parse_workflow};

const SEEDS: u64 = 50;

/// `width` pipelines of two jobs with a volume each.
fn pair_workflow(width: u32, size: &str) -> Workflow {
    let mut text = String::new();
    for p in 0..width {
        text += &format!(
            "job a{p} JOB\njob b{p} JOB\nparent a{p} child b{p}\nvolume x{p} scratch {size}\n\
             volume y{p} scratch {size}\nmount x{p} a{p} /x\nmount x{p} b{p} /x ro\n\
             mount y{p} b{p} /y\nextract y{p} out bafs://home/out.{p}\n"
        );
    }
    parse_text(&text)
}

pub(crate) fn parse_text(text: &str) -> Workflow {
    let text = text.replace("JOB", "{\n  executable = x\n}");
    let none = |path: &str| Err(path.to_owned());
    parse_workflow("w.bafs", &text, &none)
        .expect("it is right")
        .workflow
}

pub(crate) fn space_of_megabytes(bytes: u64) -> Space {
    Space {
        bytes: bytes * 1_000_000,
        files: 10,
    }
}

fn cluster_for_seed(seed: u64, workflow: Workflow) -> SimulatedCluster {
    let node = NodeSpec {
        capacity: Space {
            bytes: 200_000_000,
            files: 1_000_000,
        },
        slots: 4,
    };
    SimulatedCluster::new(
        seed,
        workflow,
        Settings::default(),
        vec![node; 2],
        Faults::default(),
    )
}

#[test]
fn probe_job_measures_the_sizes_others_reserve() {
    for seed in 0..SEEDS {
        let mut rng = SeededRng::new(seed);
        let mut world = cluster_for_seed(seed, pair_workflow(30, "unknown"));
        for p in 0..30 {
            world
                .needed_space
                .insert(format!("x{p}"), space_of_megabytes(10 + rng.next_below(2)));
            world
                .needed_space
                .insert(format!("y{p}"), space_of_megabytes(5));
        }
        assert_eq!(
            world.run_to_end(10_000_000),
            Outcome::Complete,
            "seed {seed}"
        );
        let sizes = world
            .scheduler
            .workflow()
            .volumes
            .iter()
            .map(|v| v.size_bytes);
        let last = sizes.skip(2);
        assert!(
            last.clone().max() < Some(15_000_000),
            "seed {seed}: measured sizes"
        );
        let progress = world.scheduler.progress();
        assert_eq!(progress.executions, progress.jobs_total, "seed {seed}");
        // With the probe's generous volumes one pipeline would run at a time on each node.
        assert!(
            world.elapsed_ms() < 60_000,
            "seed {seed}: {}",
            world.elapsed_ms()
        );
    }
}

#[test]
fn too_small_size_is_doubled_with_a_warning() {
    for seed in 0..SEEDS {
        let mut world = cluster_for_seed(seed, pair_workflow(4, "10 MB"));
        world
            .needed_space
            .insert("y2".to_owned(), space_of_megabytes(15));
        assert_eq!(
            world.run_to_end(10_000_000),
            Outcome::Complete,
            "seed {seed}"
        );
        let told = world.scheduler.warnings();
        assert_eq!(told.len(), 1, "{told:?}");
        for part in [
            "'b2'",
            "'y2'",
            "10.0 MB",
            "20.0 MB",
            "declare a larger size",
        ] {
            assert!(told[0].text.contains(part), "{}", told[0].text);
        }
        let progress = world.scheduler.progress();
        assert_eq!(progress.executions, progress.jobs_total + 1);
    }
}

/// One pipeline at a time: the first finds that out for all.
#[test]
fn similar_volumes_grow_after_one_was_too_small() {
    for seed in 0..SEEDS {
        let node = NodeSpec {
            capacity: space_of_megabytes(50),
            slots: 1,
        };
        let node = NodeSpec {
            capacity: Space {
                files: 1_000_000,
                ..node.capacity
            },
            ..node
        };
        let (settings, faults) = (Settings::default(), Faults::default());
        let mut world = SimulatedCluster::new(
            seed,
            pair_workflow(10, "10 MB"),
            settings,
            vec![node],
            faults,
        );
        for p in 0..10 {
            world
                .needed_space
                .insert(format!("y{p}"), space_of_megabytes(15));
        }
        assert_eq!(
            world.run_to_end(10_000_000),
            Outcome::Complete,
            "seed {seed}"
        );
        let progress = world.scheduler.progress();
        assert!(
            progress.executions <= progress.jobs_total + 4,
            "seed {seed}: {} executions",
            progress.executions
        );
    }
}

#[test]
fn job_fails_when_a_doubled_size_is_exceeded() {
    let mut world = cluster_for_seed(1, pair_workflow(2, "10 MB"));
    world
        .needed_space
        .insert("x0".to_owned(), space_of_megabytes(50));
    let Outcome::Failed { jobs, .. } = world.run_to_end(10_000_000) else {
        panic!("it cannot succeed");
    };
    assert_eq!(jobs[0].name, "a0");
    assert!(
        jobs[0].reason.contains("larger volume than declared"),
        "{}",
        jobs[0].reason
    );
    assert_eq!(
        world.extract_arrivals.len(),
        1,
        "the other pipeline is done"
    );
}

#[test]
fn measured_pipeline_may_depend_on_another_pipeline() {
    let pairs = "job p1 JOB\njob p2 JOB\njob q1 JOB\njob q2 JOB\nvolume vp scratch unknown\n\
                 volume vq scratch unknown\nmount vp p1 /v\nmount vp p2 /v\nmount vq q1 /v\n\
                 mount vq q2 /v\nparent p1 child p2\nparent q1 child q2\nparent q1 child p2\n";
    let back = format!("{pairs}job r JOB\nparent p2 child r\nparent r child q2\n");
    let singles = "job b JOB\njob a JOB\nvolume vb scratch unknown\nvolume va scratch unknown\n\
                   mount vb b /v\nmount va a /v\nparent a child b\n";
    for text in [pairs, &back, singles] {
        for seed in 0..SEEDS {
            let mut world = cluster_for_seed(seed, parse_text(text));
            for name in ["vp", "vq", "va", "vb"] {
                world
                    .needed_space
                    .insert(name.to_owned(), space_of_megabytes(10));
            }
            assert_eq!(
                world.run_to_end(10_000_000),
                Outcome::Complete,
                "seed {seed}"
            );
            let progress = world.scheduler.progress();
            assert_eq!(progress.executions, progress.jobs_total, "seed {seed}");
        }
    }
}

/// `width` pipelines of one job each, of two shapes: those of even number read a cache, too.
fn single_job_workflow(width: u32) -> Workflow {
    let mut text = "volume c cache bafs://home/in 1 MB\n".to_owned();
    for p in 0..width {
        text += &format!("job a{p} JOB\nvolume x{p} scratch unknown\n");
        if p % 2 == 0 {
            text += &format!("mount c a{p} /c\n");
        }
        text += &format!("mount x{p} a{p} /x\nextract x{p} out bafs://home/out.{p}\n");
    }
    parse_text(&text)
}

#[test]
fn one_measurement_per_shape_suffices_for_empty_volumes() {
    for seed in 0..SEEDS {
        for bytes in [0, 5] {
            let mut world = cluster_for_seed(seed, single_job_workflow(60));
            for p in 0..60 {
                let held = if bytes == 0 {
                    Space::ZERO
                } else {
                    space_of_megabytes(bytes)
                };
                world.needed_space.insert(format!("x{p}"), held);
            }
            assert_eq!(
                world.run_to_end(10_000_000),
                Outcome::Complete,
                "seed {seed}"
            );
            // One after the other they would take 60 times 0.5 to 4.5 s.
            assert!(world.elapsed_ms() < 80_000, "{}", world.elapsed_ms());
        }
    }
}

#[test]
fn sizes_are_not_doubled_beyond_the_node() {
    for seed in 0..SEEDS {
        let text = "job a JOB\njob b JOB\nvolume x scratch 80 MB\nvolume y scratch 80 MB\n\
                    volume z scratch 1 MB\nmount x a /x\nmount y a /y\nmount z b /z\n\
                    extract z out bafs://home/out\n";
        let mut world = cluster_for_seed(seed, parse_text(text));
        world
            .needed_space
            .insert("y".to_owned(), space_of_megabytes(100));
        let Outcome::Failed { jobs, messages } = world.run_to_end(10_000_000) else {
            panic!("it cannot succeed");
        };
        assert!(messages.is_empty(), "not the run's fault: {messages:?}");
        assert_eq!(jobs[0].name, "a");
        assert_eq!(
            world.extract_arrivals.len(),
            1,
            "the other pipeline is done"
        );
    }
}

/// A node that runs no jobs holds no scratch volumes.
#[test]
fn measured_sizes_fit_nodes_with_slots() {
    let node = |megabytes: u64, slots| NodeSpec {
        capacity: Space {
            bytes: megabytes * 1_000_000,
            files: 1_000_000,
        },
        slots,
    };
    let mut text = String::new();
    for p in 0..4 {
        text += &format!(
            "job a{p} JOB\nvolume x{p} scratch unknown\nmount x{p} a{p} /x\n\
             extract x{p} out bafs://home/out.{p}\n"
        );
    }
    let (settings, faults) = (Settings::default(), Faults::default());
    let nodes = vec![node(14, 1), node(30, 0)];
    let mut world = SimulatedCluster::new(1, parse_text(&text), settings, nodes, faults);
    for p in 0..4 {
        world
            .needed_space
            .insert(format!("x{p}"), space_of_megabytes(12));
    }
    assert_eq!(world.run_to_end(10_000_000), Outcome::Complete);
}

/// `width` jobs that write volumes of unknown size, and one that reads them all.
fn gathering_workflow(width: u32) -> Workflow {
    let mut text = "job all JOB\nvolume out scratch 1 MB\nmount out all /out\n\
                    extract out list bafs://home/list\n"
        .to_owned();
    for p in 0..width {
        text += &format!(
            "volume w{p} scratch unknown\njob s{p} JOB\nmount w{p} s{p} /w\n\
             mount w{p} all /in/{p} ro\nparent s{p} child all\n"
        );
    }
    parse_text(&text)
}

#[test]
fn gathering_with_unknown_sizes_runs_jobs_once() {
    for (seed, width, held) in [(1, 12, 13), (2, 12, 3), (3, 40, 3), (4, 3, 45)] {
        for nodes in [1, 4] {
            let node = NodeSpec {
                capacity: Space {
                    bytes: 200_000_000,
                    files: 1_000_000,
                },
                slots: 4,
            };
            let (settings, faults) = (Settings::default(), Faults::default());
            let nodes = vec![node; nodes];
            let mut world =
                SimulatedCluster::new(seed, gathering_workflow(width), settings, nodes, faults);
            for p in 0..width {
                world
                    .needed_space
                    .insert(format!("w{p}"), space_of_megabytes(held));
            }
            assert_eq!(
                world.run_to_end(10_000_000),
                Outcome::Complete,
                "seed {seed}"
            );
            let progress = world.scheduler.progress();
            assert_eq!(progress.executions, progress.jobs_total, "seed {seed}");
            assert_eq!(world.scheduler.warnings(), [], "seed {seed}");
        }
    }
}

/// The one that is measured may need less than all others.
#[test]
fn gathered_sizes_grow_together_after_a_small_measurement() {
    let node = NodeSpec {
        capacity: Space {
            bytes: 200_000_000,
            files: 1_000_000,
        },
        slots: 1,
    };
    let (settings, faults) = (Settings::default(), Faults::default());
    let mut world = SimulatedCluster::new(1, gathering_workflow(12), settings, vec![node], faults);
    world
        .needed_space
        .insert("w0".to_owned(), space_of_megabytes(1));
    for p in 1..12 {
        world
            .needed_space
            .insert(format!("w{p}"), space_of_megabytes(11));
    }
    assert_eq!(world.run_to_end(10_000_000), Outcome::Complete);
    let progress = world.scheduler.progress();
    let again = progress.executions - progress.jobs_total;
    assert!(
        again <= 1,
        "{again} jobs ran twice: {:?}",
        world.scheduler.warnings()
    );
}

#[test]
fn undeclared_sizes_grow_until_they_fit() {
    for seed in 0..SEEDS {
        let mut world = cluster_for_seed(seed, pair_workflow(4, "unknown"));
        for p in 0..4 {
            world
                .needed_space
                .insert(format!("x{p}"), space_of_megabytes(1));
            world
                .needed_space
                .insert(format!("y{p}"), space_of_megabytes(1));
        }
        // Far more than all others of its like have shown.
        world
            .needed_space
            .insert("y2".to_owned(), space_of_megabytes(150));
        assert_eq!(
            world.run_to_end(10_000_000),
            Outcome::Complete,
            "seed {seed}"
        );
        let told = world.scheduler.warnings();
        assert!(told.len() > 1, "more than once: {told:?}");
        for warning in told {
            assert!(!warning.text.contains("declare"), "{}", warning.text);
        }
    }
}

#[test]
fn undeclared_sizes_beyond_all_nodes_blame_no_declaration() {
    let mut world = cluster_for_seed(1, pair_workflow(2, "unknown"));
    world
        .needed_space
        .insert("x0".to_owned(), space_of_megabytes(500));
    let Outcome::Failed { jobs, .. } = world.run_to_end(10_000_000) else {
        panic!("it cannot succeed");
    };
    assert_eq!(jobs[0].name, "a0");
    let reason = &jobs[0].reason;
    assert!(
        reason.contains("needs more than") && !reason.contains("declared"),
        "{reason}"
    );
}
