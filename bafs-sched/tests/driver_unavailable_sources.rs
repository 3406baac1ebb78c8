//! Runs whose volumes cannot be filled from their sources, against a catalog and a node in memory.

use std::sync::Arc;
use std::time::Duration;

use bafs_proto::ErrorCode;
use bafs_sched::Outcome;
use bafs_sched::driver::CancelHandle;
use bafs_sched::report::RunReport;
use bafs_workflow::parse_workflow;

use crate::driver::{driver_workflow, run_on_cluster, run_options, run_with_options};
use crate::one_node::OneNodeCluster;

#[tokio::test(flavor = "multi_thread")]
async fn impossible_source_fails_the_run_at_once() {
    for code in [ErrorCode::NotFound, ErrorCode::RightMissing] {
        let directory = tempfile::tempdir().expect("a directory");
        let cluster = Arc::new(OneNodeCluster::default());
        cluster.state().fill_fault = Some(code);
        let start = tokio::time::Instant::now();
        let report =
            run_on_cluster(&cluster, driver_workflow(0), &directory.path().join("j")).await;
        let Outcome::Failed { jobs, .. } = report.expect("run").outcome else {
            panic!("{code:?}: it cannot complete")
        };
        assert!(jobs[0].reason.contains("'data' of home"), "{jobs:?}");
        assert!(start.elapsed() < Duration::from_secs(5), "{code:?}");
        assert_eq!(cluster.state().volumes.len(), 0, "{code:?}");
        assert!(cluster.state().started.is_empty());
    }
}

/// A run whose scratch volume cannot be filled, and why.
async fn run_with_fill_fault(fault: ErrorCode) -> RunReport {
    let directory = tempfile::tempdir().expect("a directory");
    let cluster = Arc::new(OneNodeCluster::default());
    cluster.state().fill_fault = Some(fault);
    let text = "volume p scratch 1 MB from bafs://home/p\n\
                job a {\n executable = /bin/a\n}\nmount p a /scratch\n";
    let workflow = parse_workflow("w.bafs", text, &|path| Err(path.to_owned()));
    let mut options = run_options(&directory.path().join("j"), &CancelHandle::default());
    (
        options.settings.retry_pause_ms_min,
        options.settings.retry_pause_ms_max,
    ) = (1, 1);
    let report = run_with_options(&cluster, workflow.expect("it parses").workflow, options).await;
    report.expect("run")
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_is_attributed_to_the_node() {
    let report = run_with_fill_fault(ErrorCode::NoSpaceBytes).await;
    let Outcome::Failed { messages, .. } = &report.outcome else {
        panic!("it cannot complete: {:?}", report.outcome)
    };
    assert!(messages[0].contains("on node n2"), "{messages:?}");
    // How often a listing came in between is chance.
    assert!(messages[0].contains("times in a row"), "{messages:?}");
    let told = report.warnings.iter();
    let told = told.filter(|text| text.contains("smaller --size"));
    assert_eq!(told.count(), 1, "{:?}", report.warnings);
}

#[tokio::test(flavor = "multi_thread")]
async fn too_large_source_fails_its_users_at_once() {
    let report = run_with_fill_fault(ErrorCode::TooLarge).await;
    let Outcome::Failed { jobs, .. } = &report.outcome else {
        panic!("it cannot complete: {:?}", report.outcome)
    };
    let reason = &jobs[0].reason;
    assert!(reason.contains("'p' could not be created"), "{reason}");
    assert!(report.warnings.is_empty(), "{:?}", report.warnings);
}
