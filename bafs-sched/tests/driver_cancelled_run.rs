//! A run that was interrupted is cancelled with other options than its own.

use std::sync::Arc;

use bafs_sched::PolicyNames;
use bafs_sched::driver::CancelHandle;

use crate::driver::{driver_workflow, drop_run, finish_jobs, run_options, run_with_options};
use crate::one_node::OneNodeCluster;

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_run_warns_of_no_options() {
    let directory = tempfile::tempdir().expect("a directory");
    let journal = directory.path().join("j");
    let cluster = Arc::new(OneNodeCluster::default());
    drop_run(&cluster, &journal).await;
    finish_jobs(&cluster);
    let mut changed = run_options(&journal, &CancelHandle::default());
    changed.cancel_handle.request_cancel();
    changed.settings.policies = PolicyNames::default().with("replication", "always");
    let ended = run_with_options(&cluster, driver_workflow(0), changed).await;
    let told = ended.expect("it ends").warnings.concat();
    assert!(!told.contains("first options"), "{told}");
}
