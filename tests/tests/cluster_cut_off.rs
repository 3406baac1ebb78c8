//! The scheduler, or a group of nodes, is cut off from the others for a while: everybody is there
//! when the link returns, and so is the work.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use bafs_proto::message::JobOutcome;
use bafs_sched::Event;
use bafs_sched::io::journal::read_history;
use bafs_sim::strategy_selector::ModelSelector;
use bafs_tests::netns::{self, ChildGuard, NamespaceCluster, SCHEDULER_HOST};
use bafs_tests::{mount_obstacle, report_skip};

const NODES: [&str; 5] = ["200MB"; 5];
const WIDTH: u32 = 24;
const DEPTH: u32 = 3;
const JOBS: u64 = (WIDTH * DEPTH + 1) as u64;

/// The link is cut so long after the run began.
const CUT_DELAY: Duration = Duration::from_secs(9);

/// A run that takes longer hangs.
const RUN_TIMEOUT: Duration = Duration::from_secs(200);

/// 24 pipelines of three stages, each job of which passes on what it read and adds a line; one more
/// job gathers what they wrote.
fn workflow_text() -> String {
    let mut text = String::new();
    let mut gather = String::new();
    for p in 0..WIDTH {
        for at in 0..DEPTH {
            let before = if at > 0 { "cat /in/out;" } else { "" };
            text += &format!(
                "volume v{p}_{at} scratch 1 MB files 16\njob j{p}_{at} {{\n\
                 executable = /bin/sh\n\
                 arguments = -c \"sleep 2; ({before} echo {p} {at}) > /out/out\"\n}}\n\
                 mount v{p}_{at} j{p}_{at} /out\n"
            );
            if at > 0 {
                let last = at - 1;
                text += &format!("parent j{p}_{last} child j{p}_{at}\n");
                text += &format!("mount v{p}_{last} j{p}_{at} /in ro\n");
            }
        }
        let last = DEPTH - 1;
        gather += &format!("parent j{p}_{last} child all\nmount v{p}_{last} all /in/{p} ro\n");
    }
    text + "volume sum scratch 1 MB files 16\njob all {\nexecutable = /bin/sh\n\
            arguments = -c \"cat /in/*/out | sort -n > /out/sum\"\n}\nmount sum all /out\n\
            extract sum sum bafs://home/sum\n"
        + &gather
}

fn expected_result() -> String {
    let lines = (0..WIDTH).flat_map(|p| (0..DEPTH).map(move |at| format!("{p} {at}\n")));
    lines.collect()
}

/// How often each job was told to have ended well.
fn count_completions(journal: &Path) -> BTreeMap<String, u32> {
    let history = read_history(journal).expect("a journal");
    let mut scheduler = history.header.new_scheduler(&ModelSelector);
    let mut counts = BTreeMap::new();
    for step in history.steps {
        if let Event::JobEnded { execution, report } = &step.event
            && report.outcome == JobOutcome::Exited(0)
            && let Some((job, _)) = scheduler.execution(*execution)
        {
            let name = scheduler.workflow().job(job).name.clone();
            *counts.entry(name).or_default() += 1;
        }
        scheduler.redo(&step.changes);
    }
    counts
}

/// What came of a run.
#[derive(Debug)]
struct CutOffResult {
    is_complete: bool,
    jobs_done: u64,
    rerun_jobs: Vec<String>,
    printed: String,
}

/// Runs the workflow; when some of it is done `disturb` does what it does, and may start the run
/// once more.
fn run_workflow(
    more: &[&str],
    disturb: impl FnOnce(
        &mut NamespaceCluster,
        &dyn Fn(&NamespaceCluster) -> ChildGuard,
        &mut ChildGuard,
    ),
) -> CutOffResult {
    let mut cluster = NamespaceCluster::start(&NODES, 2).expect("a cluster");
    let path = cluster
        .write_home("run.bafs", workflow_text().as_bytes())
        .expect("a workflow");
    let told = cluster.directory.path().join("told");
    let journal = cluster.home.path().join("run.bafs.journal");
    let start =
        |cluster: &NamespaceCluster| cluster.start_run(&path, more, &told).expect("bafs run");
    let mut running = start(&cluster);
    std::thread::sleep(CUT_DELAY);
    disturb(&mut cluster, &start, &mut running);
    let mut waited = Duration::ZERO;
    let status = loop {
        if let Some(status) = running.try_wait().expect("a child") {
            break Some(status);
        }
        if waited > RUN_TIMEOUT {
            break None;
        }
        std::thread::sleep(Duration::from_millis(200));
        waited += Duration::from_millis(200);
    };
    let said = std::fs::read_to_string(&told).expect("what it said");
    let counts = count_completions(&journal);
    let sum = cluster.read_home("sum").unwrap_or_default();
    let is_same = sum == expected_result().as_bytes();
    let again = counts.iter().filter(|(_, count)| **count > 1);
    CutOffResult {
        is_complete: is_same && status.is_some_and(|status| status.success()),
        jobs_done: counts.len() as u64,
        rerun_jobs: again.map(|(name, _)| name.clone()).collect(),
        printed: said,
    }
}

#[track_caller]
fn check_result(ended: &CutOffResult) {
    assert!(ended.is_complete, "{ended:?}");
    assert_eq!(ended.jobs_done, JOBS, "{ended:?}");
    assert!(ended.rerun_jobs.is_empty(), "{ended:?}");
}

fn is_skipped(test: &str) -> bool {
    let why = mount_obstacle().or_else(netns::namespace_obstacle);
    if let Some(why) = &why {
        report_skip(test, why);
    }
    why.is_some()
}

fn cut_links(cluster: &NamespaceCluster, seconds: u64) {
    cluster.network.cut_link(SCHEDULER_HOST).expect("cut");
    std::thread::sleep(Duration::from_secs(seconds));
    cluster.network.restore_link(SCHEDULER_HOST).expect("mend");
}

#[test]
fn cluster_keeps_work_while_scheduler_is_cut_off() {
    if is_skipped("cluster_keeps_work_while_scheduler_is_cut_off") {
        return;
    }
    let ended = run_workflow(&[], |cluster, _, _| cut_links(cluster, 14));
    check_result(&ended);
    let told = [
        "reaches neither the catalog nor any of its 5 nodes",
        "reaches nodes again after",
    ];
    let is_told = told.iter().all(|text| ended.printed.contains(text));
    assert!(is_told, "{}", ended.printed);
}

#[test]
fn cluster_keeps_copies_while_scheduler_is_cut_off() {
    if is_skipped("cluster_keeps_copies_while_scheduler_is_cut_off") {
        return;
    }
    let ended = run_workflow(&["--checkpoint", "always"], |cluster, _, _| {
        cut_links(cluster, 14)
    });
    check_result(&ended);
}

#[test]
fn cluster_keeps_its_work_over_a_short_cut() {
    if is_skipped("cluster_keeps_its_work_over_a_short_cut") {
        return;
    }
    let ended = run_workflow(&[], |cluster, _, _| cut_links(cluster, 8));
    check_result(&ended);
}

#[test]
fn cluster_run_resumes_within_a_cut() {
    if is_skipped("cluster_run_resumes_within_a_cut") {
        return;
    }
    let ended = run_workflow(&[], |cluster, start, running| {
        cluster.network.cut_link(SCHEDULER_HOST).expect("cut");
        std::thread::sleep(Duration::from_secs(3));
        running.kill().expect("kill");
        running.wait().expect("a child");
        *running = start(cluster);
        std::thread::sleep(Duration::from_secs(14));
        cluster.network.restore_link(SCHEDULER_HOST).expect("mend");
    });
    check_result(&ended);
}

/// Whatever passes in one direction only is no talk.
#[test]
fn cluster_keeps_its_work_over_one_way_cuts() {
    if is_skipped("cluster_keeps_its_work_over_one_way_cuts") {
        return;
    }
    let others = ["catalog", "home", "n1", "n2", "n3", "n4", "n5"];
    let ended = run_workflow(&[], |cluster, _, _| {
        let pause = || std::thread::sleep(Duration::from_secs(14));
        cluster
            .network
            .block_packets(&[SCHEDULER_HOST], &others)
            .expect("mute");
        pause();
        cluster.network.restore_packets().expect("restore");
        std::thread::sleep(Duration::from_secs(3));
        cluster
            .network
            .block_packets(&others, &[SCHEDULER_HOST])
            .expect("deaf");
        pause();
        cluster.network.restore_packets().expect("restore");
    });
    check_result(&ended);
}

/// The catalog sees no node, which the scheduler does.
#[test]
fn cluster_keeps_work_while_catalog_is_cut_off() {
    if is_skipped("cluster_keeps_work_while_catalog_is_cut_off") {
        return;
    }
    let nodes = ["n1", "n2", "n3", "n4", "n5"];
    let ended = run_workflow(&[], |cluster, _, _| {
        cluster
            .network
            .partition(&["catalog"], &nodes)
            .expect("part");
        std::thread::sleep(Duration::from_secs(20));
        cluster.network.restore_packets().expect("restore");
    });
    check_result(&ended);
}

/// Two nodes are apart from all others, which go on without them; the run ends right.
#[test]
fn cluster_completes_without_a_cut_off_node_group() {
    if is_skipped("cluster_completes_without_a_cut_off_node_group") {
        return;
    }
    let group = ["n1", "n2"];
    let others = ["catalog", "home", "n3", "n4", "n5", SCHEDULER_HOST];
    let ended = run_workflow(&[], |cluster, _, _| {
        cluster.network.partition(&group, &others).expect("part");
        std::thread::sleep(Duration::from_secs(14));
        cluster.network.restore_packets().expect("restore");
    });
    assert!(ended.is_complete, "{ended:?}");
    assert_eq!(ended.jobs_done, JOBS, "{ended:?}");
    let is_told = ended.printed.contains("cut off");
    assert!(!is_told, "most of it was reached: {}", ended.printed);
}
