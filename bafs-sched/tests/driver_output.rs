//! What jobs print, as the driver keeps it beside the journal.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bafs_proto::message::Request;
use bafs_sched::Outcome;
use bafs_sched::driver::{CancelHandle, RunOptions, run_with_connections};
use bafs_sched::io::job_logs::read_index;
use bafs_sched::report::RunReport;

use crate::driver::{driver_workflow, memory_network, run_options};
use crate::one_node::OneNodeCluster;

fn options_with_logs(directory: &Path) -> RunOptions {
    RunOptions {
        log_directory: Some(directory.join("j.logs")),
        ..run_options(&directory.join("j"), &CancelHandle::default())
    }
}

async fn run_with_options(cluster: &Arc<OneNodeCluster>, options: RunOptions) -> RunReport {
    let run = run_with_connections(memory_network(cluster), driver_workflow(1), options, |_| {});
    let run = tokio::time::timeout(Duration::from_secs(30), run).await;
    run.expect("it ends in time").expect("run")
}

/// Names and attempts that are listed, each with how it ended.
fn listed_attempts(directory: &Path) -> Vec<(String, u32, String)> {
    let index = read_index(&directory.join("j.logs")).expect("a list");
    let listed = index
        .into_iter()
        .map(|it| (it.job, it.attempt, it.end_description));
    let mut listed: Vec<_> = listed.collect();
    listed.sort();
    listed
}

#[tokio::test(flavor = "multi_thread")]
async fn output_of_every_attempt_is_kept() {
    let directory = tempfile::tempdir().expect("a directory");
    let cluster = Arc::new(OneNodeCluster::default());
    cluster.state().exit_codes.insert("a1".to_owned(), vec![3]);
    let report = run_with_options(&cluster, options_with_logs(directory.path())).await;
    assert_eq!(report.outcome, Outcome::Complete);
    let listed = listed_attempts(directory.path());
    assert_eq!(listed.len(), 7, "{listed:?}");
    let (job, attempt, ended) = &listed[1];
    assert_eq!((job.as_str(), *attempt), ("a1", 1));
    assert!(ended.starts_with("exits with code 3"), "{ended}");
    assert_eq!((listed[2].0.as_str(), listed[2].1), ("a1", 2));
    let read = |name: &str| std::fs::read_to_string(directory.path().join("j.logs").join(name));
    assert_eq!(read("a1.1.out").expect("a log"), "out\n");
    assert_eq!(read("a1.1.err").expect("a log"), "err\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_scheduler_loses_no_output() {
    let directory = tempfile::tempdir().expect("a directory");
    let cluster = Arc::new(OneNodeCluster::default());
    // The second half of a pipeline starts when the end of the first is in the journal.
    let is_second =
        |request: &Request| matches!(request, Request::StartJob(it) if it.job.name == "c0");
    cluster.state().is_last_call = Some(is_second);
    let first = RunOptions {
        log_directory: None,
        ..options_with_logs(directory.path())
    };
    let first = run_with_connections(memory_network(&cluster), driver_workflow(1), first, |_| {});
    let killed = tokio::time::timeout(Duration::from_millis(1_500), first).await;
    assert!(killed.is_err(), "nobody answers it");
    assert!(cluster.state().is_stopped, "the second half has started");
    {
        let mut state = cluster.state();
        (state.is_last_call, state.is_stopped) = (None, false);
    }
    let report = run_with_options(&cluster, options_with_logs(directory.path())).await;
    assert_eq!(report.outcome, Outcome::Complete);
    let listed = listed_attempts(directory.path());
    assert_eq!((listed[0].0.as_str(), listed[0].1), ("a0", 1), "{listed:?}");
}
