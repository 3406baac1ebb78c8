//! Runs whose home is away, against a catalog and a node in memory.

use std::sync::Arc;
use std::time::Duration;

use bafs_proto::ErrorCode;
use bafs_sched::driver::{CancelHandle, run_with_connections};
use bafs_sched::io::journal::read_history;
use bafs_sched::{Event, Outcome};

use crate::driver::{driver_workflow, drop_run, memory_network, run_options, wait_until};
use crate::one_node::OneNodeCluster;

/// The node says early that it waits in vain, so that somebody is told, and the result is kept.
#[tokio::test(flavor = "multi_thread")]
async fn cancelled_run_keeps_results_for_an_unreachable_home() {
    let directory = tempfile::tempdir().expect("a directory");
    let cluster = Arc::new(OneNodeCluster::default());
    cluster.state().extract_fault = Some(ErrorCode::HomeUnreachable);
    let cancel = CancelHandle::default();
    let options = run_options(&directory.path().join("j"), &cancel);
    let running = tokio::spawn(run_with_connections(
        memory_network(&cluster),
        driver_workflow(0),
        options,
        |_| {},
    ));
    // Each of the three is asked for again.
    wait_until(&cluster, |state| state.extract_fault_count > 3).await;
    cancel.request_cancel();
    let report = tokio::time::timeout(Duration::from_secs(20), running).await;
    let report = report.expect("it ends").expect("no panic").expect("run");
    assert_eq!(report.outcome, Outcome::Cancelled);
    let kept = |text: &&String| text.contains("bafs volume extract");
    assert_eq!(
        report.warnings.iter().filter(kept).count(),
        3,
        "{:?}",
        report.warnings
    );
    assert_eq!(cluster.state().volumes.len(), 3, "with the results");
}

#[tokio::test(flavor = "multi_thread")]
async fn run_resumed_before_its_home_blames_no_node() {
    let directory = tempfile::tempdir().expect("a directory");
    let journal = directory.path().join("j");
    let cluster = Arc::new(OneNodeCluster::default());
    drop_run(&cluster, &journal).await;
    // All machines start anew, the home last.
    {
        let mut state = cluster.state();
        state.has_unfinished_jobs = false;
        state.is_home_unlisted = true;
        state.volumes.clear();
        state.running.clear();
        state.reports.clear();
    }
    let again = run_options(&journal, &CancelHandle::default());
    let running = tokio::spawn(run_with_connections(
        memory_network(&cluster),
        driver_workflow(0),
        again,
        |_| {},
    ));
    let failures = || {
        let records = read_history(&journal).expect("a journal").steps.into_iter();
        let failed = records.filter_map(|step| match step.event {
            Event::VolumeCreateFailed { error, .. } => Some(error.code),
            _ => None,
        });
        failed.collect::<Vec<_>>()
    };
    for _ in 0..600 {
        if !failures().is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    cluster.state().is_home_unlisted = false;
    let report = tokio::time::timeout(Duration::from_secs(60), running).await;
    let report = report.expect("it ends").expect("no panic").expect("run");
    assert_eq!(report.outcome, Outcome::Complete);
    let failures = failures();
    let is_away = |code: &ErrorCode| *code == ErrorCode::HomeUnreachable;
    assert!(
        !failures.is_empty() && failures.iter().all(is_away),
        "{failures:?}"
    );
}

/// Nobody can tell a wrong name from a home that comes later, so it is waited for, not longer than
/// its user wants.
#[tokio::test(flavor = "multi_thread")]
async fn unknown_home_ends_the_run_within_its_timeout() {
    let directory = tempfile::tempdir().expect("a directory");
    let cluster = Arc::new(OneNodeCluster::default());
    cluster.state().is_home_unlisted = true;
    let mut options = run_options(&directory.path().join("j"), &CancelHandle::default());
    options.settings.extract_timeout_ms = 2_000;
    let began = tokio::time::Instant::now();
    let run = run_with_connections(
        memory_network(&cluster),
        driver_workflow(0),
        options,
        |_| {},
    );
    let report = tokio::time::timeout(Duration::from_secs(60), run).await;
    let report = report.expect("it ends").expect("run");
    let Outcome::Failed { jobs, .. } = &report.outcome else {
        panic!("it cannot complete: {:?}", report.outcome)
    };
    let reason = &jobs[0].reason;
    let wanted = "is not in the catalog: start it, correct the name, or write its address";
    assert!(reason.contains("home 'home' of bafs://home/"), "{reason}");
    assert!(reason.contains(wanted), "{reason}");
    // It was 270 s: ten tries, each of which waited for the name.
    assert!(
        began.elapsed() < Duration::from_secs(12),
        "{:?}",
        began.elapsed()
    );
}

/// The catalog's address was wrong, or no node was started: the same command runs it then.
#[tokio::test(flavor = "multi_thread")]
async fn run_without_nodes_leaves_a_reusable_journal() {
    let directory = tempfile::tempdir().expect("a directory");
    let journal = directory.path().join("j");
    let cluster = Arc::new(OneNodeCluster::default());
    cluster.state().catalog_fault = Some(ErrorCode::Unreachable);
    for is_there in [false, true] {
        if is_there {
            cluster.state().catalog_fault = None;
        }
        let options = run_options(&journal, &CancelHandle::default());
        let workflow = driver_workflow(u32::from(is_there));
        let run = run_with_connections(memory_network(&cluster), workflow, options, |_| {});
        let report = tokio::time::timeout(Duration::from_secs(60), run).await;
        let report = report.expect("it ends").expect("run");
        assert_eq!(
            report.outcome == Outcome::Complete,
            is_there,
            "{:?}",
            report.outcome
        );
        let told = report
            .warnings
            .iter()
            .any(|it| it.starts_with("nothing was run"));
        assert!(!told, "{:?}", report.warnings);
    }
}
