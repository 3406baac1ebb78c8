//! The driver against a catalog and nodes in memory: real calls, real journal, simulated jobs.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bafs_proto::identity::Authority;
use bafs_proto::ids::VolumeId;
use bafs_proto::message::{JobOutcome, Request, Role};
use bafs_proto::net::memory::MemoryNetwork;
use bafs_proto::net::pool::Pool;
use bafs_proto::time::Time;
use bafs_proto::token::{Resource, Right, Token, Verifier};
use bafs_proto::{ErrorCode, Result};
use bafs_sched::driver::{CancelHandle, RunOptions, run_with_connections};
use bafs_sched::report::RunReport;
use bafs_sched::{NullSelector, Outcome, PolicyNames, Progress, RunLimit, Settings};
use bafs_workflow::{Workflow, parse_workflow};

use crate::one_node::{ClusterState, OneNodeCluster, ended_state};

pub(crate) fn driver_workflow(retries: u32) -> Workflow {
    let mut text = "volume b bafs://home/data 1 MB\n".to_owned();
    for i in 0..3 {
        text += &format!(
            "volume p{i} scratch 1 MB\njob a{i} {{\n executable = /bin/a\n retry = {retries}\n}}\n\
             job c{i} {{\n executable = /bin/c\n}}\nparent a{i} child c{i}\nmount b a{i} /data\n\
             mount p{i} a{i} /scratch\nmount p{i} c{i} /scratch\nextract p{i} x bafs://home/out.{i}\n"
        );
    }
    parse_workflow("w.bafs", &text, &|path| Err(path.to_owned()))
        .expect("it parses")
        .workflow
}

pub(crate) fn run_options(journal: &Path, cancel: &CancelHandle) -> RunOptions {
    let authority = Authority::generate().expect("authority");
    let rights = [Right::Read, Right::Write, Right::Manage];
    let token = authority
        .signer()
        .grant(&[Resource::Cluster], &rights, Time(u64::MAX / 2));
    RunOptions {
        catalog: "cluster".to_owned(),
        identity: authority
            .issue(Role::Scheduler, token.expect("token"))
            .expect("identity"),
        journal: journal.to_owned(),
        log_directory: None,
        settings: Settings {
            nodes_timeout_ms: 2_000,
            ..Settings::default()
        },
        file_home: None,
        strategy_selector: Arc::new(NullSelector),
        earlier_work: None,
        cancel_handle: cancel.clone(),
        limit: RunLimit::default(),
    }
}

pub(crate) fn memory_network(cluster: &Arc<OneNodeCluster>) -> Pool {
    let network = MemoryNetwork::new();
    network.listen("cluster", cluster.clone());
    Pool::new(network.dialer("scheduler"))
}

pub(crate) async fn run_on_cluster(
    cluster: &Arc<OneNodeCluster>,
    workflow: Workflow,
    journal: &Path,
) -> Result<RunReport> {
    run_with_options(
        cluster,
        workflow,
        run_options(journal, &CancelHandle::default()),
    )
    .await
}

pub(crate) async fn run_with_options(
    c: &Arc<OneNodeCluster>,
    workflow: Workflow,
    options: RunOptions,
) -> Result<RunReport> {
    let run = run_with_connections(memory_network(c), workflow, options, |_| {});
    tokio::time::timeout(Duration::from_secs(30), run)
        .await
        .expect("it ends in time")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_completes_and_leaves_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let journal = directory.path().join("j");
    let cluster = Arc::new(OneNodeCluster::default());
    cluster.state().exit_codes.insert("a1".to_owned(), vec![3]);
    let report = run_on_cluster(&cluster, driver_workflow(1), &journal)
        .await
        .expect("run");
    assert_eq!(report.outcome, Outcome::Complete);
    assert_eq!(report.jobs.len(), 6);
    assert_eq!(report.totals.executions, 7, "one was retried");
    {
        let state = cluster.state();
        assert!(state.volumes.is_empty(), "{:?}", state.volumes);
        assert_eq!(
            state.files_at_home.values().copied().collect::<Vec<_>>(),
            [1, 1, 1]
        );
    }
    // Running a finished run again starts nothing, tells the same, and says so.
    let mut again = run_on_cluster(&cluster, driver_workflow(1), &journal)
        .await
        .expect("run");
    let told = again.warnings.remove(0);
    assert!(told.starts_with("nothing to run"), "{told}");
    assert_eq!(again, report);
    assert_eq!(cluster.state().started.values().sum::<u32>(), 7);
    let other = run_on_cluster(&cluster, driver_workflow(2), &journal)
        .await
        .expect_err("another workflow");
    assert_eq!(other.code, ErrorCode::Conflict);
}

/// What of these one may do with a token at a server.
fn granted_resources(
    verifier: &Verifier,
    token: &Token,
    server: &str,
    all: &[Resource],
) -> Vec<Resource> {
    let may = |resource: &&Resource| {
        [Right::Read, Right::Write, Right::Manage]
            .into_iter()
            .any(|right| {
                let asked =
                    verifier.verify_for_server(token, Some(server), resource, right, Time(5));
                asked.is_ok()
            })
    };
    all.iter().filter(may).cloned().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn node_cannot_reuse_received_tokens_elsewhere() {
    let directory = tempfile::tempdir().expect("a directory");
    let cluster = Arc::new(OneNodeCluster::default());
    let options = run_options(&directory.path().join("j"), &CancelHandle::default());
    let verifier = options.identity.verifier.clone();
    let report = run_with_options(&cluster, driver_workflow(0), options)
        .await
        .expect("run");
    assert_eq!(report.outcome, Outcome::Complete);
    let shown = std::mem::take(&mut cluster.state().shown_tokens);
    let volumes: BTreeSet<VolumeId> = shown
        .iter()
        .filter_map(|(request, _)| match request {
            Request::CreateVolume(call) => Some(call.spec.id),
            _ => None,
        })
        .collect();
    let mut all: Vec<Resource> = volumes.into_iter().map(Resource::Volume).collect();
    assert_eq!(all.len(), 4, "a cache and three scratch volumes");
    let home = Resource::Home("data".to_owned());
    all.extend([Resource::Jobs, Resource::Catalog, home]);
    let mut kinds = BTreeSet::new();
    for (request, token) in &shown {
        let own = match request {
            Request::QueryServers(_) => Resource::Catalog,
            Request::CreateVolume(call) => Resource::Volume(call.spec.id),
            Request::DeleteVolume(call) => Resource::Volume(call.volume),
            Request::ExtractFile(call) => Resource::Volume(call.volume),
            Request::GetCache(call) => Resource::Volume(call.volume),
            Request::StartJob(_) | Request::WatchJobs(_) | Request::ReadJobOutput(_) => {
                Resource::Jobs
            }
            // Homes receive the second; only nodes are many.
            Request::RenewVolumes(_) | Request::StatSource(_) | Request::IssueUploadEpoch(_) => {
                continue;
            }
            other => panic!("nobody said what {} shows", other.name()),
        };
        let name = request.name();
        kinds.insert(name);
        let here = granted_resources(&verifier, token, "cluster", &all);
        assert_eq!(here, std::slice::from_ref(&own), "{name}");
        let elsewhere = granted_resources(&verifier, token, "another", &all);
        match own {
            Resource::Catalog => assert_eq!(elsewhere, [own]),
            _ => assert_eq!(elsewhere, [], "{name}"),
        }
    }
    assert_eq!(kinds.len(), 7, "{kinds:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_lifetime_is_extended_only_for_results() {
    let directory = tempfile::tempdir().expect("a directory");
    let cluster = Arc::new(OneNodeCluster::default());
    let journal = directory.path().join("j");
    let report = run_on_cluster(&cluster, driver_workflow(0), &journal)
        .await
        .expect("run");
    assert_eq!(report.outcome, Outcome::Complete);
    let settings = Settings::default();
    let mut kept = BTreeSet::new();
    for (request, _) in &cluster.state().shown_tokens {
        match request {
            // A scheduler that is killed, or a node that is away at the end, leaves no volume long.
            Request::CreateVolume(call) => {
                assert_eq!(call.spec.lifetime_ms, settings.volume_lifetime_ms);
            }
            Request::StartJob(call) => {
                let kept_ms = call
                    .job
                    .mounts
                    .iter()
                    .map(|mount| (&mount.name, mount.lifetime_ms_min));
                let kept_ms = kept_ms.filter(|(_, kept_ms)| *kept_ms > 0);
                kept.extend(kept_ms.map(|(name, ms)| (call.job.name.clone(), name.clone(), ms)));
            }
            _ => {}
        }
    }
    // The files are those of `p0` and so on, which the jobs `c0` and so on write last.
    let result = |at: u32| {
        (
            format!("c{at}"),
            format!("p{at}"),
            settings.result_lifetime_ms,
        )
    };
    assert_eq!(kept, (0..3).map(result).collect());
}

/// Runs a workflow on a cluster that is gone for good once it was asked for this.
async fn run_until_cluster_stops(is_last: fn(&Request) -> bool) -> RunReport {
    let directory = tempfile::tempdir().expect("a directory");
    let cluster = Arc::new(OneNodeCluster::default());
    let network = MemoryNetwork::new();
    network.listen("cluster", cluster.clone());
    let pool = Pool::new(network.dialer("scheduler"));
    let mut options = run_options(&directory.path().join("j"), &CancelHandle::default());
    options.settings.node_timeout_ms = 500;
    options.settings.space_timeout_ms = 500;
    options.settings.volume_lifetime_ms = 4_000;
    let run = run_with_connections(pool, driver_workflow(0), options, |_| {});
    cluster.state().is_last_call = Some(is_last);
    let cut = async {
        while !cluster.state().is_stopped {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        network.kill("cluster");
    };
    let both = async { tokio::join!(run, cut).0 };
    let ended = tokio::time::timeout(Duration::from_secs(80), both).await;
    ended.expect("it ends").expect("with a report")
}

#[tokio::test(flavor = "multi_thread")]
async fn run_fails_when_nodes_and_catalog_disappear() {
    // Nothing says that they are gone but that they do not answer, whatever they are asked.
    let moments: [fn(&Request) -> bool; 3] = [
        |request| matches!(request, Request::CreateVolume(_)),
        |request| matches!(request, Request::ExtractFile(_)),
        |request| matches!(request, Request::DeleteVolume(_)),
    ];
    let runs = moments.map(|is_last| tokio::spawn(run_until_cluster_stops(is_last)));
    for run in runs {
        let report = run.await.expect("no panic");
        let Outcome::Failed { messages, .. } = &report.outcome else {
            panic!("{:?}", report.outcome)
        };
        let is_told = messages.iter().any(|m| m.contains("no node is live"));
        assert!(is_told, "{messages:?}");
        let told = report.warnings.join("\n");
        let names_all = told.contains("node n2") && told.contains("bafs volume delete");
        assert!(names_all, "{told}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_job_ends_its_pipeline_only() {
    let directory = tempfile::tempdir().expect("a directory");
    let cluster = Arc::new(OneNodeCluster::default());
    cluster.state().exit_codes.insert("a1".to_owned(), vec![3]);
    let report = run_on_cluster(&cluster, driver_workflow(0), &directory.path().join("j"))
        .await
        .expect("run");
    let Outcome::Failed { jobs, .. } = &report.outcome else {
        panic!("{:?}", report.outcome)
    };
    assert_eq!(jobs.len(), 1);
    assert_eq!(jobs[0].reason, "exited with code 3");
    assert_eq!(
        (jobs[0].node.as_str(), jobs[0].output_tail.as_str()),
        ("n2", "last words")
    );
    let state = cluster.state();
    assert_eq!(
        state.files_at_home.keys().collect::<Vec<_>>(),
        ["out.0", "out.2"]
    );
    assert!(state.volumes.is_empty() && !state.started.contains_key("c1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn run_explains_why_every_node_refuses_its_quota() {
    for (code, refused) in [
        (ErrorCode::RightMissing, Some(ErrorCode::RightMissing)),
        (ErrorCode::Malformed, Some(ErrorCode::Malformed)),
        (ErrorCode::Busy, None),
    ] {
        let directory = tempfile::tempdir().expect("a directory");
        let cluster = Arc::new(OneNodeCluster::default());
        cluster.state().quota_fault = Some(code);
        let mut options = run_options(&directory.path().join("j"), &CancelHandle::default());
        options.settings.user = Some("me".to_owned());
        // That others have all of the node is no reason to end.
        options.settings.space_timeout_ms = 1_500;
        match run_with_options(&cluster, driver_workflow(0), options).await {
            Ok(report) => {
                assert_eq!((&report.outcome, refused), (&Outcome::Complete, None));
                assert!(cluster.state().quota_requests > 2);
            }
            Err(error) => {
                assert_eq!(Some(error.code), refused);
                assert!(error.detail.contains("n2"), "{error}");
            }
        }
    }
}

/// A run that is dropped in the middle, as `kill -9` does, while its jobs do not end.
pub(crate) async fn drop_run(cluster: &Arc<OneNodeCluster>, journal: &Path) {
    cluster.state().has_unfinished_jobs = true;
    let first = run_options(journal, &CancelHandle::default());
    let first = run_with_connections(memory_network(cluster), driver_workflow(0), first, |_| {});
    let killed = tokio::time::timeout(Duration::from_millis(1_500), first).await;
    assert!(killed.is_err(), "its jobs do not end");
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_scheduler_resumes_without_rerunning_jobs() {
    let directory = tempfile::tempdir().expect("a directory");
    let journal = directory.path().join("j");
    let cluster = Arc::new(OneNodeCluster::default());
    drop_run(&cluster, &journal).await;
    let started = cluster.state().started.values().sum::<u32>();
    assert_eq!(started, 2, "two slots");
    finish_jobs(&cluster);
    let mut changed = run_options(&journal, &CancelHandle::default());
    changed.settings.policies = PolicyNames::default().with("replication", "always");
    let report = run_with_options(&cluster, driver_workflow(0), changed)
        .await
        .expect("run");
    assert_eq!(report.outcome, Outcome::Complete);
    let told = &report.warnings[0];
    assert!(told.contains("resumes with its first options"), "{told}");
    let state = cluster.state();
    assert!(
        state.started.values().all(|times| *times == 1),
        "{:?}",
        state.started
    );
    assert!(state.volumes.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn cancel_kills_jobs_and_deletes_volumes() {
    let directory = tempfile::tempdir().expect("a directory");
    let cluster = Arc::new(OneNodeCluster::default());
    cluster.state().has_unfinished_jobs = true;
    let cancel = CancelHandle::default();
    let options = run_options(&directory.path().join("j"), &cancel);
    let handle = cancel.clone();
    let run = run_with_connections(
        memory_network(&cluster),
        driver_workflow(0),
        options,
        move |progress| {
            if progress.jobs_running > 0 {
                handle.request_cancel();
            }
        },
    );
    let report = tokio::time::timeout(Duration::from_secs(20), run)
        .await
        .expect("it ends");
    assert_eq!(report.expect("run").outcome, Outcome::Cancelled);
    let state = cluster.state();
    assert!(state.running.is_empty() && state.volumes.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn unplaceable_volume_is_named() {
    let directory = tempfile::tempdir().expect("a directory");
    let cluster = Arc::new(OneNodeCluster::default());
    let mut large = driver_workflow(0);
    large.volumes[1].size_bytes = 1_000_000_000;
    let report = run_on_cluster(&cluster, large, &directory.path().join("j"))
        .await
        .expect("run");
    let Outcome::Failed { messages, .. } = report.outcome else {
        panic!("{:?}", report.outcome)
    };
    assert!(
        messages[0].contains("volume 'p0' needs 1.0 GB"),
        "{messages:?}"
    );
    assert!(cluster.state().started.is_empty());
}

/// Waits until something holds of the cluster.
pub(crate) async fn wait_until(
    cluster: &Arc<OneNodeCluster>,
    holds: impl Fn(&ClusterState) -> bool,
) {
    for _ in 0..1_000 {
        if holds(&cluster.state()) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it never came to hold");
}

pub(crate) fn finish_jobs(cluster: &Arc<OneNodeCluster>) {
    let mut state = cluster.state();
    state.has_unfinished_jobs = false;
    for execution in std::mem::take(&mut state.running) {
        state
            .reports
            .insert(execution, ended_state(JobOutcome::Exited(0)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_catalog_ends_the_run() {
    let directory = tempfile::tempdir().expect("a directory");
    let nobody = Pool::new(MemoryNetwork::new().dialer("scheduler"));
    let options = run_options(&directory.path().join("j"), &CancelHandle::default());
    let run = run_with_connections(nobody, driver_workflow(0), options, |_| {});
    let report = tokio::time::timeout(Duration::from_secs(10), run).await;
    let report = report.expect("it ends").expect("run");
    let Outcome::Failed { messages, .. } = report.outcome else {
        panic!("{:?}", report.outcome)
    };
    assert!(messages[0].contains("catalog"), "{messages:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn catalog_refusal_fails_the_run_at_once() {
    let directory = tempfile::tempdir().expect("a directory");
    let cluster = Arc::new(OneNodeCluster::default());
    cluster.state().catalog_fault = Some(ErrorCode::RightMissing);
    let start = tokio::time::Instant::now();
    let error = run_on_cluster(&cluster, driver_workflow(0), &directory.path().join("j")).await;
    let error = error.expect_err("it cannot run");
    assert_eq!(error.code, ErrorCode::RightMissing);
    assert!(error.detail.contains("catalog cluster"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn node_with_a_new_address_keeps_its_jobs() {
    let directory = tempfile::tempdir().expect("a directory");
    let cluster = Arc::new(OneNodeCluster::default());
    cluster.state().has_unfinished_jobs = true;
    cluster.state().node_address = Some("old".to_owned());
    let network = MemoryNetwork::new();
    for address in ["cluster", "old"] {
        network.listen(address, cluster.clone());
    }
    let pool = Pool::new(network.dialer("scheduler"));
    let options = run_options(&directory.path().join("j"), &CancelHandle::default());
    let known = Arc::new(AtomicU64::new(0));
    let seen = known.clone();
    let note = move |progress: &Progress| seen.store(progress.jobs_running, Ordering::Relaxed);
    let running = tokio::spawn(run_with_connections(
        pool,
        driver_workflow(0),
        options,
        note,
    ));
    // An answer that is still on its way over the old link would count as lost.
    wait_until(&cluster, |_| known.load(Ordering::Relaxed) == 2).await;
    network.listen("new", cluster.clone());
    network.kill("old");
    network.cut_link("scheduler", "old");
    cluster.state().node_address = Some("new".to_owned());
    // Work that is given out before the next listing still goes to the old address.
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    finish_jobs(&cluster);
    let report = tokio::time::timeout(Duration::from_secs(20), running).await;
    let report = report.expect("it ends").expect("no panic").expect("run");
    assert_eq!(report.outcome, Outcome::Complete);
    assert_eq!(report.totals.nodes_lost, 0);
    assert_eq!(report.totals.executions, 6, "no job ran again");
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_are_kept_alive_without_a_catalog() {
    let directory = tempfile::tempdir().expect("a directory");
    let cluster = Arc::new(OneNodeCluster::default());
    cluster.state().has_unfinished_jobs = true;
    let mut options = run_options(&directory.path().join("j"), &CancelHandle::default());
    options.settings.volume_lifetime_ms = 400;
    let running = tokio::spawn(run_with_connections(
        memory_network(&cluster),
        driver_workflow(0),
        options,
        |_| {},
    ));
    wait_until(&cluster, |state| state.running.len() == 2).await;
    let renewals = {
        let mut state = cluster.state();
        state.catalog_fault = Some(ErrorCode::Unreachable);
        state.renewal_count
    };
    wait_until(&cluster, |state| state.renewal_count > renewals + 3).await;
    finish_jobs(&cluster);
    let report = tokio::time::timeout(Duration::from_secs(20), running).await;
    let report = report.expect("it ends").expect("no panic").expect("run");
    assert_eq!(report.outcome, Outcome::Complete);
}
