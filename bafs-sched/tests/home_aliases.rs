//! Runs that name one home in several ways, against a catalog and a node in memory.

use std::sync::Arc;
use std::time::Duration;

use bafs_proto::net::memory::MemoryNetwork;
use bafs_proto::net::pool::Pool;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_sched::Outcome;
use bafs_sched::driver::{CancelHandle, run_with_connections};
use bafs_sched::io::homes::FileHome;
use bafs_sched::report::RunReport;
use bafs_workflow::{Workflow, parse_workflow};

use crate::driver::run_options;
use crate::one_node::OneNodeCluster;

/// Another address of the home, which the catalog does not list.
const OTHER_ADDRESS: &str = "localhost:17";

/// A job that reads `source` and writes what goes to `target`.
fn workflow_with(source: &str, target: &str) -> Workflow {
    let text = format!(
        "volume c {source}\nvolume w scratch 1 MB\njob j {{\nexecutable = /bin/j\n}}\n\
         mount c j /c\nmount w j /w\nextract w x {target}\n"
    );
    let checked = parse_workflow("w.bafs", &text, &|path| Err(path.to_owned()));
    checked.expect("its text shows no overlap").workflow
}

async fn run_it(cluster: &Arc<OneNodeCluster>, workflow: Workflow) -> Result<RunReport> {
    let directory = tempfile::tempdir().expect("a directory");
    let mut options = run_options(&directory.path().join("j"), &CancelHandle::default());
    options.file_home = Some(FileHome {
        address: "cluster".to_owned(),
        root: "/srv/data".to_owned(),
    });
    let network = MemoryNetwork::new();
    network.listen("cluster", cluster.clone());
    network.listen(OTHER_ADDRESS, cluster.clone());
    let pool = Pool::new(network.dialer("scheduler"));
    let run = run_with_connections(pool, workflow, options, |_| {});
    tokio::time::timeout(Duration::from_secs(30), run)
        .await
        .expect("it ends")
}

fn assert_overlap(error: &Error, statements: [&str; 2]) {
    assert_eq!(error.code, ErrorCode::Conflict, "{error}");
    for statement in statements {
        assert!(error.detail.contains(statement), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn run_rejects_overlaps_under_two_home_names() {
    for (source, target) in [
        ("cache bafs://localhost:17/real 1 MB", "bafs://home/real/x"),
        (
            "cache bafs://HOME/real/x/deep 1 MB",
            "bafs://localhost:17/real/x",
        ),
        (
            "scratch 1 MB files 9 from bafs://localhost:17/",
            "bafs://home/real/x",
        ),
        ("cache file:///srv/data/real 1 MB", "bafs://home/real/x"),
        ("cache file:///srv/data 1 MB", "bafs://localhost:17/x"),
        ("cache bafs://home/real 1 MB", "file:///srv/data/real/x"),
    ] {
        let cluster = Arc::new(OneNodeCluster::default());
        let error = run_it(&cluster, workflow_with(source, target)).await;
        let error = error.expect_err("it reads what it sends");
        let extract = format!("'extract w x {target}'");
        assert_overlap(&error, ["'volume c ", &extract]);
        let state = cluster.state();
        assert!(
            state.volumes.is_empty() && state.started.is_empty(),
            "nothing begins"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn run_accepts_places_apart_under_two_names() {
    for (source, target) in [
        ("cache bafs://localhost:17/in 1 MB", "bafs://home/real/x"),
        ("cache file:///srv/data/rea 1 MB", "bafs://home/real/x"),
    ] {
        let cluster = Arc::new(OneNodeCluster::default());
        let report = run_it(&cluster, workflow_with(source, target)).await;
        assert_eq!(report.expect("a run").outcome, Outcome::Complete);
    }
}
