//! Admission of whole workflows in virtual time: what fits in some order runs to its end without
//! ever dropping finished work, and what can never fit is refused with what is missing. `SEEDS=n`
//! runs so many seeds, `SEED=n` the one.

use bafs_proto::ids::{RunId, ServerId};
use bafs_proto::time::Time;
use bafs_sched::{
    Action, Event, NodeInfo, Outcome, PolicyNames, RunQuota, Scheduler, Settings, Space,
};
use bafs_sim::seeded_rng::SeededRng;
use bafs_sim::simulated_cluster::{Faults, NodeSpec, SimulatedCluster, parse_workflow_text};

const SEEDS: u64 = 300;
const LIMIT_MS: u64 = 4 * 3_600_000;

fn declare_job(name: &str) -> String {
    format!("job {name} {{\n  executable = /bin/true\n}}\n")
}

fn node_specs(megabytes: &[u64], slots: u32) -> Vec<NodeSpec> {
    let node = |megabytes: &u64| NodeSpec {
        capacity: Space {
            bytes: megabytes * 1_000_000,
            files: 100_000,
        },
        slots,
    };
    megabytes.iter().map(node).collect()
}

/// Everything that is offered is used; no copies, so that what runs again was dropped.
fn full_use_settings() -> Settings {
    Settings {
        slack_permille: 0,
        policies: PolicyNames::default().with("replication", "never"),
        ..Settings::default()
    }
}

fn run_workflow(seed: u64, text: &str, nodes: Vec<NodeSpec>) -> (SimulatedCluster, Outcome) {
    let mut world = SimulatedCluster::new(
        seed,
        parse_workflow_text(text),
        full_use_settings(),
        nodes,
        Faults::default(),
    );
    let outcome = world.run_to_end(LIMIT_MS);
    (world, outcome)
}

/// Pipelines whose volumes grow from stage to stage: whoever starts all of them first is stuck.
/// Answers the text and what one pipeline needs at once, in MB.
fn growing_pipelines(rng: &mut SeededRng) -> (String, u64) {
    let (width, depth) = (2 + rng.next_below(10), 2 + rng.next_below(4));
    let mut text = String::new();
    let mut peak = 0;
    for p in 0..width {
        let mut before = 0;
        for at in 0..depth {
            let size = 1 + at * rng.next_below(20) + rng.next_below(5);
            let name = format!("j{p}_{at}");
            text += &declare_job(&name);
            text += &format!("volume v{p}_{at} scratch {size} MB files 5\n");
            text += &format!("mount v{p}_{at} {name} /out\n");
            if at > 0 {
                text += &format!("parent j{p}_{} child {name}\n", at - 1);
                text += &format!("mount v{p}_{} {name} /in ro\n", at - 1);
            }
            peak = peak.max(before + size);
            before = size;
        }
        text += &format!("extract v{p}_{} out bafs://home/out.{p}\n", depth - 1);
    }
    (text, peak)
}

/// Pipelines of several branches that each need much for a while and leave little.
fn branching_pipelines(rng: &mut SeededRng) -> (String, u64) {
    let (width, branches) = (1 + rng.next_below(4), 2 + rng.next_below(3));
    let mut text = String::new();
    let mut peak = 0;
    for p in 0..width {
        text += &declare_job(&format!("end{p}"));
        let mut kept = 0;
        for b in 0..branches {
            let (large, small) = (20 + rng.next_below(30), 1 + rng.next_below(5));
            let (first, second) = (format!("a{p}_{b}"), format!("b{p}_{b}"));
            text += &declare_job(&first);
            text += &declare_job(&second);
            text += &format!(
                "parent {first} child {second}\nparent {second} child end{p}\n\
                 volume t{p}_{b} scratch {large} MB files 5\n\
                 volume r{p}_{b} scratch {small} MB files 5\n\
                 mount t{p}_{b} {first} /t\nmount t{p}_{b} {second} /t ro\n\
                 mount r{p}_{b} {second} /r\nmount r{p}_{b} end{p} /r{b} ro\n"
            );
            peak = peak.max(kept + large + small);
            kept += small;
        }
        text += &format!(
            "volume o{p} scratch 1 MB files 5\nmount o{p} end{p} /o\n\
             extract o{p} out bafs://home/out.{p}\n"
        );
        peak = peak.max(kept + 1);
    }
    (text, peak)
}

#[test]
fn impossible_file_counts_are_rejected_at_the_start() {
    let text = declare_job("a")
        + &declare_job("b")
        + "volume c cache bafs://home/c 40 MB files 2441\nvolume v scratch 5 MB files 1024\n\
           volume w scratch 5 MB files 10\nparent a child b\nmount w a /w\nmount w b /w ro\n\
           mount c b /c\nmount v b /v\n";
    let with_files = |files| {
        let mut nodes = node_specs(&[100, 100], 1);
        for node in &mut nodes {
            node.capacity.files = files;
        }
        let (world, outcome) = run_workflow(1, &text, nodes);
        let is_done = outcome == Outcome::Complete;
        (is_done, world.scheduler.progress().executions)
    };
    assert_eq!(with_files(3_000), (false, 0));
    assert_eq!(with_files(3_475), (true, 2));
}

fn seed_range() -> std::ops::Range<u64> {
    let number = |name: &str| -> Option<u64> {
        let text = std::env::var(name).ok()?;
        Some(text.parse().expect("a number"))
    };
    match number("SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("SEEDS").unwrap_or(SEEDS),
    }
}

/// Nodes just large enough for one pipeline, or a little more: every seed ends complete, and no
/// finished job runs again.
#[test]
fn feasible_workflow_completes_without_rerunning_jobs() {
    let mut refused = 0;
    for seed in seed_range() {
        println!("SEED={seed}");
        let mut rng = SeededRng::new(seed ^ 0xad);
        let (text, peak) = match rng.next_bool(500) {
            true => growing_pipelines(&mut rng),
            false => branching_pipelines(&mut rng),
        };
        let count = 1 + rng.next_below(3);
        let sizes: Vec<u64> = (0..count).map(|_| peak + rng.next_below(peak)).collect();
        let slots = 1 + u32::try_from(rng.next_below(3)).expect("it is small");
        let (world, outcome) = run_workflow(seed, &text, node_specs(&sizes, slots));
        assert_eq!(outcome, Outcome::Complete, "seed {seed}\n{text}");
        let progress = world.scheduler.progress();
        assert_eq!(
            progress.executions, progress.jobs_total,
            "seed {seed}: finished work was dropped on nodes of {sizes:?} MB\n{text}"
        );
        refused += u64::from(world.elapsed_ms() == 0);
    }
    assert_eq!(refused, 0);
}

/// Nodes smaller than a pipeline, of which its volumes need several: each seed ends complete, or
/// is refused before anything starts.
#[test]
fn pipeline_larger_than_a_node_uses_several() {
    let (mut complete, mut refused, mut again) = (0, 0, 0);
    for seed in seed_range() {
        println!("SEED={seed}");
        let mut rng = SeededRng::new(seed ^ 0xbe);
        let (text, peak) = growing_pipelines(&mut rng);
        let count = 2 + rng.next_below(3);
        let sizes: Vec<u64> = (0..count)
            .map(|_| peak / 2 + rng.next_below(peak / 2))
            .collect();
        let (world, outcome) = run_workflow(seed, &text, node_specs(&sizes, 1));
        let progress = world.scheduler.progress();
        match outcome {
            Outcome::Complete => {
                complete += 1;
                again += u64::from(progress.executions > progress.jobs_total);
            }
            Outcome::Failed { messages, .. } => {
                refused += 1;
                assert_eq!(progress.executions, 0, "seed {seed}: {messages:?}");
            }
            Outcome::Cancelled => panic!("nobody cancelled it"),
        }
    }
    println!("{complete} complete, {refused} refused, {again} with work done twice");
    if std::env::var_os("SEED").is_none() {
        assert!(complete > 0 && refused > 0 && again * 10 < complete);
    }
}

fn failure_reason(text: &str, sizes: &[u64]) -> String {
    let (world, outcome) = run_workflow(1, text, node_specs(sizes, 1));
    assert_eq!(
        world.scheduler.progress().executions,
        0,
        "nothing may start"
    );
    assert!(world.elapsed_ms() < 10_000, "it is refused at once");
    match outcome {
        Outcome::Failed { messages, .. } => messages.concat(),
        other => panic!("{other:?}"),
    }
}

const PAIR: &str = "volume x scratch 60 MB files 5\nvolume y scratch 70 MB files 5\n\
    parent a child b\nmount x a /x\nmount x b /x ro\nmount y b /y\n\
    extract y out bafs://home/out\n";

#[test]
fn impossible_pipeline_is_rejected_with_its_missing_space() {
    let text = declare_job("a") + &declare_job("b") + PAIR;
    let told = failure_reason(&text, &[100]);
    for part in [
        "'b'",
        "'x' (60.0 MB)",
        "'y' (70.0 MB)",
        "130.0 MB",
        "100.0 MB",
        "30.0 MB",
    ] {
        assert!(told.contains(part), "{part} is not in: {told}");
    }
    // Each volume on a node of its own is fine.
    assert_eq!(
        run_workflow(1, &text, node_specs(&[100, 100], 1)).1,
        Outcome::Complete
    );
}

#[test]
fn impossible_volume_is_named_with_all_node_sizes() {
    let text = declare_job("a") + &declare_job("b") + PAIR;
    let told = failure_reason(&text, &[65, 50]);
    for part in [
        "'y'",
        "70.0 MB",
        "5.0 MB",
        "1 with 65.0 MB",
        "1 with 50.0 MB",
    ] {
        assert!(told.contains(part), "{part} is not in: {told}");
    }
}

/// Two batch volumes of which only one fits, and more pipelines than fit beside it.
#[test]
fn batch_volumes_take_turns_when_space_is_short() {
    let mut text = String::from(
        "volume one cache bafs://home/one 60 MB files 5\nvolume two cache bafs://home/two 60 MB files 5\n",
    );
    for p in 0..6 {
        text += &(declare_job(&format!("a{p}")) + &declare_job(&format!("b{p}")));
        text += &format!(
            "parent a{p} child b{p}\nvolume v{p} scratch 15 MB files 5\n\
             mount v{p} a{p} /v\nmount v{p} b{p} /v\nmount one a{p} /in\nmount two b{p} /in\n\
             extract v{p} out bafs://home/out.{p}\n"
        );
    }
    let (world, outcome) = run_workflow(1, &text, node_specs(&[100], 2));
    assert_eq!(outcome, Outcome::Complete);
    let progress = world.scheduler.progress();
    assert_eq!(progress.executions, progress.jobs_total);
}

/// The scratch volumes of the job that makes the cache fill most of its node: its node still gets a
/// part, as what other jobs may need is not kept twice.
#[test]
fn cache_partition_fits_beside_its_readers_scratch_volumes() {
    let mut text = String::from("volume data cache bafs://home/data 40 MB files 5\n");
    for p in 0..4 {
        text += &declare_job(&format!("a{p}"));
        text += &format!("volume v{p} scratch 60 MB files 5\nmount v{p} a{p} /v\n");
        text += &format!("mount data a{p} /in\nextract v{p} out bafs://home/out.{p}\n");
    }
    let (_, outcome) = run_workflow(1, &text, node_specs(&[100, 100], 1));
    assert_eq!(outcome, Outcome::Complete);
}

/// Two pipelines of which one fits at a time; of Q nothing goes on before `middle` is done.
fn ordered_pipelines(middle: &str) -> String {
    let mut text = String::new();
    for name in ["p1", "p2", "q1", "q2", "r1"] {
        text += &declare_job(name);
    }
    text += "volume vp scratch 60 MB files 5\nvolume vq scratch 60 MB files 5\n\
             mount vp p1 /v\nmount vp p2 /v\nmount vq q1 /v\nmount vq q2 /v\n\
             parent p1 child p2\nparent q1 child q2\nparent q1 child p2\n";
    text + &format!("parent {middle} child q2\n")
}

#[test]
fn preempting_pipeline_may_wait_for_a_preempted_one() {
    let text = ordered_pipelines("r1") + "parent q1 child r1\n";
    let (world, outcome) = run_workflow(1, &text, node_specs(&[100], 1));
    assert_eq!(outcome, Outcome::Complete);
    assert!(world.elapsed_ms() < 30_000, "nobody waits for space");
}

#[test]
fn run_fails_when_dependent_pipelines_cannot_coexist() {
    let (world, outcome) = run_workflow(1, &ordered_pipelines("p1"), node_specs(&[100], 1));
    let Outcome::Failed { messages, .. } = outcome else {
        panic!("{outcome:?}");
    };
    assert!(messages[0].contains("cannot start"), "{messages:?}");
    assert!(
        messages[0].contains("preemption of the pipelines of 'p1', 'q1'"),
        "{messages:?}"
    );
    let executions = world.scheduler.progress().executions;
    assert!(executions <= 6, "{executions} executions, all in vain");
}

/// To try every order of so many jobs would take more stack and time than there is.
#[test]
fn order_search_is_skipped_for_large_pipelines() {
    const READERS: u32 = 3_000;
    let mut text = String::from(
        "volume x scratch 60 MB files 5\nvolume y scratch 60 MB files 5\n\
         volume s scratch 1 MB files 5\n",
    );
    text += &(declare_job("first") + &declare_job("second") + &declare_job("last"));
    text += "parent first child second\nparent second child last\nmount x first /x\n\
             mount s first /s\nmount y second /y\nmount x last /x ro\nmount y last /y ro\n";
    for reader in 0..READERS {
        let name = format!("r{reader}");
        text += &declare_job(&name);
        text += &format!("mount s {name} /s ro\nparent second child {name}\n");
        text += &format!("parent {name} child last\n");
    }
    let (_, outcome) = run_workflow(1, &text, node_specs(&[100, 100], 8));
    assert_eq!(outcome, Outcome::Complete);
}

/// The job that has both would wait until the run fails, after hours of work of another.
#[test]
fn job_exceeding_space_with_its_cache_is_rejected() {
    let text = declare_job("a")
        + &declare_job("b")
        + "parent a child b\nvolume data cache bafs://home/data 60 MB files 5\n\
           volume v scratch 50 MB files 5\nmount v a /v\nmount v b /v\nmount data b /in\n";
    let told = failure_reason(&text, &[100]);
    for part in ["'b'", "'data'", "'v'", "110.0 MB", "10.0 MB too little"] {
        assert!(told.contains(part), "{part} is not in: {told}");
    }
    let (_, outcome) = run_workflow(1, &text, node_specs(&[100, 20], 1));
    assert_eq!(outcome, Outcome::Complete, "another node has the rest");
}

/// What the catalog lists may be what was there before an earlier run deleted its last volumes, and
/// the next list comes a second later. Nodes know better what they can keep.
#[test]
fn quota_answers_override_an_older_catalog_list() {
    let space = |bytes| Space {
        bytes,
        files: 100_000,
    };
    let text = format!("volume b cache bafs://home/b 48 MB\n{}", declare_job("a"));
    let text = format!("{text}{}mount b a /b\nmount b z /b\n", declare_job("z"));
    let mut scheduler = Scheduler::new(RunId(0), parse_workflow_text(&text), full_use_settings());
    let nodes = (1..=4).map(|id| NodeInfo {
        foreign_space: space(12_000_000),
        ..NodeInfo::single_group(ServerId(id), space(16_000_000), 2)
    });
    let mut asked = Vec::new();
    scheduler.step(Time(0), Event::nodes_listed(nodes.collect()), &mut asked);
    assert!(asked.is_empty(), "16 MB are free: {asked:?}");
    let share = |bytes, is_shared| {
        let kept = |id| RunQuota {
            server: ServerId(id),
            space: space(bytes),
            slots: 2,
            is_shared,
            is_above_fair_share: false,
        };
        Event::QuotasChanged {
            quotas: (1..=4).map(kept).collect(),
        }
    };
    scheduler.step(Time(5), share(4_000_000, false), &mut asked);
    assert!(asked.is_empty(), "they keep 16 MB: {asked:?}");
    scheduler.step(Time(6), share(16_000_000, false), &mut asked);
    let is_made = |action: &&Action| matches!(action, Action::CreateVolume { .. });
    assert_eq!(asked.iter().filter(is_made).count(), 4, "{asked:?}");
}

/// `count` jobs that write a volume each, and one that mounts them all.
fn gathering_workflow(count: u32, size: &str) -> String {
    let mut text = declare_job("sum");
    for p in 0..count {
        text += &declare_job(&format!("m{p}"));
        text += &format!(
            "volume v{p} scratch {size}\nmount v{p} m{p} /o\nmount v{p} sum /in/{p} ro\n\
             parent m{p} child sum\n"
        );
    }
    text
}

/// However many jobs its pipeline has: all of them would run before that was found out.
#[test]
fn impossible_gathering_job_is_rejected_at_once() {
    let told = failure_reason(&gathering_workflow(40, "30 MB files 5"), &[1_000]);
    for part in [
        "'sum'",
        "'v0'",
        "36 more",
        "1.2 GB",
        "1.0 GB",
        "200.0 MB too little",
    ] {
        assert!(told.contains(part), "{part} is not in: {told}");
    }
    let told = failure_reason(&gathering_workflow(100, "64 KB"), &[1_000]);
    for part in [
        "'sum'",
        "102400 files",
        "100000 files",
        "2400 files too little",
    ] {
        assert!(told.contains(part), "{part} is not in: {told}");
    }
}

#[test]
fn gathering_job_without_room_on_nodes_is_rejected() {
    let told = failure_reason(&gathering_workflow(20, "60 MB files 5"), &[100; 15]);
    for part in ["'sum'", "20 of them need 60.0 MB", "space for 15"] {
        assert!(told.contains(part), "{part} is not in: {told}");
    }
    let (_, outcome) = run_workflow(
        1,
        &gathering_workflow(20, "50 MB files 5"),
        node_specs(&[100; 15], 1),
    );
    assert_eq!(outcome, Outcome::Complete, "two of these lie on each node");
}

#[test]
fn cache_partition_counts_beside_a_jobs_own_volumes() {
    let text = declare_job("a")
        + "volume data cache bafs://home/data 60 MB files 5\n\
         volume v scratch 99900 KB files 5\nmount v a /v\nmount data a /in\n";
    let told = failure_reason(&text, &[100, 100]);
    for part in ["'a'", "are on its node", "100.1 MB", "100.0 MB"] {
        assert!(told.contains(part), "{part} is not in: {told}");
    }
}
