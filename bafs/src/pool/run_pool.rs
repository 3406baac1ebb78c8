//! The pool of one run: it begins and ends with the run, and is as large as the work left.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use bafs_engine::logic::Demand;
use bafs_proto::hash::Digest;
use bafs_sched::Progress;
use bafs_sched::driver::CancelHandle;
use bafs_workflow::Workflow;
use tokio::sync::{Mutex, watch};
use tokio::task::JoinHandle;

use super::pilot_node::find_own_address;
use super::pool_description::{REMOVE_TIMEOUT_S, describe_pool, open_pool_engine, pool_settings};
use super::pool_directory::PoolDirectory;
use super::pool_driver::PoolDriver;
use super::pool_end::end_pilots;
use crate::args::{PilotArgs, PoolSize};
use crate::client::ClusterClient;
use crate::output::print_notice;

/// An address of the documentation range: the way to it is the way out of this machine.
const ELSEWHERE: &str = "192.0.2.1:9";

/// A pilot of a temporary cluster ends when the catalog has been away for so long, in seconds. The
/// run counts such a node as lost after seconds, and starts another pilot if it still lives.
const CATALOG_TIMEOUT_S: u64 = 120;

/// What the pool of a run is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunPoolSpec<'a> {
    pub(crate) size: PoolSize,
    pub(crate) node_size: &'a str,
    pub(crate) pilots: &'a PilotArgs,
    pub(crate) cluster: PoolCluster<'a>,
    /// The run, by its journal: a resumed run finds its pilots again.
    pub(crate) journal: &'a Path,
}

/// The cluster that the nodes of a pool join.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolCluster<'a> {
    pub(crate) identity: &'a Path,
    pub(crate) catalog: &'a str,
    /// Whether it ends with the run.
    is_temporary: bool,
}

impl<'a> PoolCluster<'a> {
    /// A cluster that outlives the run.
    pub(crate) fn lasting(identity: &'a Path, catalog: &'a str) -> Self {
        Self {
            identity,
            catalog,
            is_temporary: false,
        }
    }

    /// A cluster that ends with the run.
    pub(crate) fn temporary(identity: &'a Path, catalog: &'a str) -> Self {
        Self {
            is_temporary: true,
            ..Self::lasting(identity, catalog)
        }
    }
}

/// A pool that serves a run.
#[derive(Debug, Clone)]
pub(crate) struct RunPool {
    demand: watch::Sender<Demand>,
    close: watch::Sender<bool>,
    longest_job_s: u64,
    served: Arc<Mutex<Option<JoinHandle<Result<()>>>>>,
}

impl RunPool {
    /// Starts it.
    ///
    /// # Errors
    /// The description is wrong, or its directory cannot be made.
    pub(crate) fn start(
        spec: RunPoolSpec<'_>,
        workflow: &Workflow,
        run: CancelHandle,
    ) -> Result<Self> {
        let mut file = describe_pool(spec.size, spec.node_size, spec.pilots)?;
        let cluster = spec.cluster;
        cluster.catalog.clone_into(&mut file.catalog);
        if cluster.is_temporary {
            file.catalog_timeout_s = Some(CATALOG_TIMEOUT_S);
            file.run_host = Some(host_name()?);
        }
        let name = pool_name(spec.journal)?;
        let directory = PoolDirectory::open_or_create(&name, &file, cluster.identity)?;
        let client = ClusterClient::connect(cluster.identity, cluster.catalog)?;
        let controller = directory.resume_controller(pool_settings(&file))?;
        let longest_job_s = workflow.jobs.iter().filter_map(|job| job.runtime_s).max();
        let longest_job_s = longest_job_s.unwrap_or(0);
        let (demand, demanded) = watch::channel(Demand {
            nodes: file.nodes_max.min(workflow.jobs.len()),
            longest_job_s,
        });
        let (close, closed) = watch::channel(false);
        let engine = open_pool_engine(&file)?;
        let driver = PoolDriver::new(engine, controller, directory, client, file).cancelling(run);
        let served = tokio::spawn(driver.run(demanded, closed, print_notice));
        Ok(Self {
            demand,
            close,
            longest_job_s,
            served: Arc::new(Mutex::new(Some(served))),
        })
    }

    /// Fits the pool to the work that is left.
    pub(crate) fn report_progress(&self, progress: &Progress) {
        let over = progress.jobs_done + progress.jobs_failed + progress.jobs_skipped;
        let jobs_left = usize::try_from(progress.jobs_total.saturating_sub(over));
        // The nodes send the last results home.
        let sent = progress.extracts_done + progress.extracts_failed;
        let extracts_left = usize::from(sent < progress.extracts_total);
        let demand = Demand {
            nodes: jobs_left.unwrap_or(usize::MAX).max(extracts_left),
            longest_job_s: self.longest_job_s,
        };
        self.demand
            .send_if_modified(|now| std::mem::replace(now, demand) != demand);
    }

    /// Ends every pilot.
    ///
    /// # Errors
    /// The batch system does not answer: then pilots are left, and the error says how to end them.
    pub(crate) async fn close(&self) -> Result<()> {
        let _ = self.close.send(true);
        let Some(served) = self.served.lock().await.take() else {
            return Ok(());
        };
        let limit = Duration::from_secs(REMOVE_TIMEOUT_S);
        let ended = tokio::time::timeout(limit, served).await.with_context(|| {
            format!(
                "the batch system has not ended the pilots within {REMOVE_TIMEOUT_S} s; \
                 `bafs pool list` shows them, `bafs pool remove NAME` ends them"
            )
        });
        ended??
    }
}

/// The address by which nodes reach this machine.
pub(crate) fn choose_address(named: Option<&str>) -> String {
    let found = || find_own_address(ELSEWHERE).map(|address| address.ip().to_string());
    named.map_or_else(
        || found().unwrap_or_else(|_| "127.0.0.1".to_owned()),
        str::to_owned,
    )
}

/// Ends the pilots that killed runs of temporary clusters left on this machine. What cannot be
/// ended is told, and left to the pilots themselves.
pub(crate) async fn end_abandoned_pools() {
    let pools = host_name().and_then(|host| PoolDirectory::list_abandoned(&host));
    for pool in pools.unwrap_or_default() {
        let name = pool.name().to_owned();
        match end_pilots(pool).await {
            Ok(()) => print_notice(&format!("ended the pilots of a killed run (pool {name})")),
            Err(error) => print_notice(&format!(
                "pilots of a killed run are left (pool {name}): {error:#}; they end without their \
                 catalog, or with: bafs pool remove {name}"
            )),
        }
    }
}

fn host_name() -> Result<String> {
    let name = nix::unistd::gethostname().context("the name of this machine")?;
    Ok(name.to_string_lossy().into_owned())
}

fn pool_name(journal: &Path) -> Result<String> {
    let path = std::path::absolute(journal)?;
    let digest = Digest::of(path.as_os_str().as_encoded_bytes()).to_string();
    Ok(format!("run-{}", digest.get(..12).unwrap_or(&digest)))
}
