//! Pipelines that are larger than each single node, in virtual time: they end on several nodes, or
//! are refused before anything starts, but for one in hundreds that fails later, and do little
//! twice. `SEEDS=n` runs so many seeds, `SEED=n` the one.

#![expect(
    clippy::print_stdout,
    reason = "the seed is printed before it can fail"
)]

use bafs_sched::{Outcome, PolicyNames, Settings, Space};
use bafs_sim::seeded_rng::SeededRng;
use bafs_sim::simulated_cluster::{Faults, NodeSpec, SimulatedCluster, parse_workflow_text};

const SEEDS: u64 = 300;
const LIMIT_MS: u64 = 4 * 3_600_000;

/// Pipelines of jobs that each make a volume and read some of those before; answers the text, and
/// the most that one job has at once, in MB.
fn generate_tangled_pipelines(rng: &mut SeededRng, jobs_max: u64) -> (String, u64, u64) {
    let (width, jobs) = (1 + rng.next_below(4), 2 + rng.next_below(jobs_max));
    let has_caches = rng.next_bool(400);
    let mut text = String::new();
    let (mut most, mut sum_most) = (0, 0);
    if has_caches {
        text += "volume c0 cache bafs://home/c0 15 MB files 5\n";
        text += "volume c1 cache bafs://home/c1 15 MB files 5\n";
    }
    for p in 0..width {
        let mut sizes = Vec::new();
        let mut sum = 0;
        for at in 0..jobs {
            let size = 1 + rng.next_below(40);
            let name = format!("j{p}_{at}");
            text += &format!("job {name} {{\n  executable = /bin/true\n}}\n");
            text += &format!("volume v{p}_{at} scratch {size} MB files 5\n");
            text += &format!("mount v{p}_{at} {name} /out\n");
            let mut need = size;
            let mut read = Vec::new();
            for _ in 0..1 + rng.next_below(2) {
                if at > 0 {
                    let other = match rng.next_bool(500) {
                        true => at - 1,
                        false => rng.next_below(at),
                    };
                    if !read.contains(&other) {
                        read.push(other);
                    }
                }
            }
            for other in read {
                need += sizes[other as usize];
                text += &format!("parent j{p}_{other} child {name}\n");
                text += &format!("mount v{p}_{other} {name} /in{other} ro\n");
            }
            if has_caches && rng.next_bool(300) {
                text += &format!("mount c{} {name} /cache\n", rng.next_below(2));
                need += 15;
            }
            sizes.push(size);
            sum += size;
            most = most.max(need);
        }
        sum_most = sum_most.max(sum);
        text += &format!("extract v{p}_{} out bafs://home/out.{p}\n", jobs - 1);
    }
    (text, most, sum_most)
}

fn run_random_workflows(jobs_max: u64, seeds: u64) {
    let number = |name: &str| -> Option<u64> {
        let text = std::env::var(name).ok()?;
        Some(text.parse().expect("a number"))
    };
    let seeds = match number("SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("SEEDS").unwrap_or(seeds),
    };
    let (mut complete, mut refused, mut again, mut failed) = (0, 0, 0, 0);
    for seed in seeds {
        let mut rng = SeededRng::new(seed ^ 0xcafe);
        let (text, most, sum) = generate_tangled_pipelines(&mut rng, jobs_max);
        let count = 1 + rng.next_below(3) + u64::from(sum > most * 2);
        let low = most;
        let sizes: Vec<u64> = (0..count)
            .map(|_| low + rng.next_below(low.max(sum) - low + 1) / 2)
            .collect();
        let nodes = sizes.iter().map(|megabytes| NodeSpec {
            capacity: Space {
                bytes: megabytes * 1_000_000,
                files: 100_000,
            },
            slots: 1 + u32::try_from(rng.next_below(2)).expect("small"),
        });
        let nodes = nodes.collect();
        let settings = Settings {
            slack_permille: 0,
            policies: PolicyNames::default().with("replication", "never"),
            ..Settings::default()
        };
        let mut world = SimulatedCluster::new(
            seed,
            parse_workflow_text(&text),
            settings,
            nodes,
            Faults::default(),
        );
        let outcome = world.run_to_end(LIMIT_MS);
        let progress = world.scheduler.progress();
        let (runs, count) = (progress.executions, progress.jobs_total);
        assert!(
            runs <= 2 * count,
            "SEED={seed}: {runs} executions of {count} jobs"
        );
        match outcome {
            Outcome::Complete => {
                complete += 1;
                if runs > count {
                    again += 1;
                    println!("SEED={seed}: nodes {sizes:?} again {runs} of {count}");
                }
            }
            Outcome::Failed { messages, .. } => {
                if runs == 0 {
                    refused += 1;
                } else {
                    failed += 1;
                    println!("SEED={seed}: nodes {sizes:?} FAILED {runs} of {count}: {messages:?}");
                }
            }
            Outcome::Cancelled => panic!("nobody cancelled it"),
        }
    }
    println!("{complete} complete, {refused} refused, {failed} failed, {again} did work twice");
    if number("SEED").is_none() {
        assert!(complete > 0 && again * 50 <= complete && failed * 100 <= complete);
    }
}

/// Of up to nine jobs, so that every order and place is tried in thought.
#[test]
fn small_pipelines_across_nodes_complete_or_are_refused() {
    run_random_workflows(8, SEEDS);
}

/// So many jobs that only two ways are.
#[test]
fn large_pipelines_across_nodes_complete_or_are_refused() {
    run_random_workflows(25, SEEDS / 3);
}

fn declare_job(name: &str) -> String {
    format!("job {name} {{\n  executable = /bin/true\n}}\n")
}

/// Answers the executions, and the jobs.
fn run_on_nodes(text: &str, megabytes: u64, slots: u32) -> (u64, u64) {
    let capacity = Space {
        bytes: megabytes * 1_000_000,
        files: 100_000,
    };
    let settings = Settings {
        slack_permille: 0,
        policies: PolicyNames::default().with("replication", "never"),
        ..Settings::default()
    };
    let nodes = vec![NodeSpec { capacity, slots }];
    let mut world = SimulatedCluster::new(
        1,
        parse_workflow_text(text),
        settings,
        nodes,
        Faults::default(),
    );
    let outcome = world.run_to_end(LIMIT_MS);
    assert_eq!(outcome, Outcome::Complete, "{text}");
    let progress = world.scheduler.progress();
    (progress.executions, progress.jobs_total)
}

/// Three first jobs fit, but then no room is left for what all second jobs read.
#[test]
fn space_is_kept_for_later_batch_volumes() {
    let mut text = String::from("volume data cache bafs://home/data 50 MB files 5\n");
    for p in 0..4 {
        text += &(declare_job(&format!("a{p}")) + &declare_job(&format!("b{p}")));
        text += &format!(
            "parent a{p} child b{p}\nvolume v{p} scratch 30 MB files 5\n\
             volume w{p} scratch 5 MB files 5\nmount v{p} a{p} /v\nmount v{p} b{p} /v ro\n\
             mount w{p} b{p} /w\nmount data b{p} /in\nextract w{p} out bafs://home/out.{p}\n"
        );
    }
    let (executions, jobs) = run_on_nodes(&text, 100, 2);
    assert_eq!(executions, jobs, "nothing finished runs again");
}

/// `p2` waits for `q1`, which finds no room beside `p1`: P begins when Q has its own.
#[test]
fn dependent_pipeline_leaves_room_for_its_predecessor() {
    let mut text = ["p1", "p2", "q1", "q2"].map(declare_job).concat();
    text += "volume vp scratch 60 MB files 5\nvolume vq scratch 60 MB files 5\n\
             mount vp p1 /v\nmount vp p2 /v\nmount vq q1 /v\nmount vq q2 /v\n\
             parent p1 child p2\nparent q1 child q2\nparent q1 child p2\n";
    let (executions, jobs) = run_on_nodes(&text, 100, 2);
    assert_eq!(executions, jobs, "nothing finished runs again");
}
