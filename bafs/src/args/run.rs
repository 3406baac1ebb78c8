//! The command line of `bafs run`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{LearnedArgs, PilotArgs, PolicyArgs, PoolSize, RunPageArgs};

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs run blast.bafs --local 4\n  bafs run blast.bafs \
--identity ~/bafs-cluster --catalog 10.0.0.1:7000\n\n\
Start the command again after a crash, a failure, an edit, or success: it does what is needed and \
no more. An interrupted run resumes. Otherwise, jobs whose description, program, inputs and \
results are as they were do not run again.\n\n\
Exit codes: 0 all jobs are done and all results are at home; 1 the run failed or was cancelled, \
or, with --local, a signal ended it; 2 usage error; 129, 143 SIGHUP or SIGTERM ended the command, \
and the same command resumes the run; 130 a second Ctrl-C ended it; 141 the run is over, but \
standard output is closed."
)]
pub(crate) struct RunArgs {
    /// The workflow file.
    pub(crate) workflow: PathBuf,
    /// Start a temporary cluster of this many nodes on this machine. --identity and --catalog are
    /// ignored.
    #[arg(long, value_name = "NODES", group = "own_nodes")]
    pub(crate) local: Option<u32>,
    /// Start up to this many nodes as jobs of a batch system: slurm, sge, htcondor, ssh or local.
    /// They join the cluster of --identity and --catalog; without these, a temporary cluster whose
    /// home and catalog are on this machine.
    #[arg(long, value_name = "ENGINE:NODES", group = "own_nodes")]
    pub(crate) pool: Option<PoolSize>,
    #[command(flatten)]
    pub(crate) pilots: PilotArgs,
    /// With --pool and a temporary cluster: address by which the nodes reach this machine; defaults
    /// to that of its default route.
    #[arg(long, value_name = "HOST", requires = "pool")]
    pub(crate) pool_address: Option<String>,
    /// With --local or --pool: directory to export as `bafs://home/` from a temporary cluster;
    /// defaults to the workflow's directory.
    #[arg(long, value_name = "DIR", requires = "own_nodes")]
    pub(crate) export: Option<PathBuf>,
    /// With --local or --pool: space of each node; defaults to 10 GB.
    #[arg(long, value_name = "SIZE", requires = "own_nodes")]
    pub(crate) node_size: Option<String>,
    /// With --local or --pool: rate limit of the link to the home of a temporary cluster, such as
    /// 1MB/s.
    #[arg(long, alias = "limit", value_name = "RATE", requires = "own_nodes")]
    pub(crate) home_rate: Option<String>,
    /// Identity: a directory that `bafs init` or `bafs grant` created.
    #[arg(long, env = "BAFS_IDENTITY", value_name = "DIR")]
    pub(crate) identity: Option<PathBuf>,
    /// Address of the catalog.
    #[arg(long, env = "BAFS_CATALOG", value_name = "HOST:PORT")]
    pub(crate) catalog: Option<String>,
    /// Journal of the workflow, which grows with each run; defaults to `WORKFLOW.journal`.
    #[arg(long, value_name = "FILE")]
    pub(crate) journal: Option<PathBuf>,
    /// List the jobs that would run, and why; run nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Run all jobs, whatever earlier runs did.
    #[arg(long)]
    pub(crate) forced: bool,
    /// Run this job again, with all jobs that depend on it; repeatable.
    #[arg(long, value_name = "JOB")]
    pub(crate) from: Vec<String>,
    /// Start even if jobs lack sources, required files or programs, which fail then. Jobs that do
    /// not depend on a failed one run in any case.
    #[arg(long)]
    pub(crate) keep_going: bool,
    /// If the run fails or is cancelled, keep volumes that spare the next run work this long on
    /// their nodes; defaults to 2d. 0 keeps none. Has no effect with --local.
    #[arg(long, value_name = "TIME")]
    pub(crate) keep: Option<String>,
    /// Publish metrics for Prometheus at this address during the run.
    #[arg(long, env = "BAFS_METRICS", value_name = "HOST:PORT")]
    pub(crate) metrics: Option<String>,
    #[command(flatten)]
    pub(crate) page: RunPageArgs,
    /// Read and write home directly, without caches and volumes, for comparison.
    #[arg(long)]
    pub(crate) remote_io: bool,
    /// Cache shared inputs on the nodes, but keep scratch data at home. For benchmarks.
    #[arg(long, conflicts_with = "remote_io", hide = true)]
    pub(crate) cache_only: bool,
    /// Timeout, such as 2d, after which the run fails for lack of nodes, space or a reachable home.
    /// By default, the run waits 1 min for the first node, 5 s for further nodes that the workflow
    /// needs, 30 s for nodes or space later, and 12 h for a home.
    #[arg(long, alias = "patience", value_name = "TIME")]
    pub(crate) resource_timeout: Option<String>,
    /// User whose fair share of the nodes the run uses; all users get equal shares. Defaults to
    /// your login name; has no effect with `--local`.
    #[arg(long, env = "BAFS_USER", value_name = "NAME")]
    pub(crate) user: Option<String>,
    /// Order in which jobs start, under the limits of a strategy that limits nothing. For
    /// benchmarks.
    #[arg(long, value_enum, default_value = "need", hide = true)]
    pub(crate) order: StartOrder,
    /// Directory through which a service talks with the run that it started.
    #[arg(long, value_name = "DIR", hide = true)]
    pub(crate) service_directory: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) learned: LearnedArgs,
    #[command(flatten)]
    pub(crate) policies: PolicyArgs,
    /// Follow the allocation strategy that `bafs plan` chooses for this environment, and change it
    /// when another is faster for the remaining jobs. Jobs run on the nodes of the catalog; if
    /// these differ from the nodes in the file, the model uses the link rates of the file.
    #[arg(long, value_name = "ENVIRONMENT", conflicts_with_all = ["order", "remote_io"])]
    pub(crate) plan: Option<PathBuf>,
}

impl RunArgs {
    /// Whether the run starts a cluster that ends with it.
    pub(crate) fn has_own_cluster(&self) -> bool {
        let names_cluster = self.identity.is_some() && self.catalog.is_some();
        self.local.is_some() || self.pool.is_some() && !names_cluster
    }

    /// The journal of the workflow.
    pub(crate) fn journal_path(&self) -> PathBuf {
        let beside = || {
            let mut name = self.workflow.clone().into_os_string();
            name.push(".journal");
            PathBuf::from(name)
        };
        self.journal.clone().unwrap_or_else(beside)
    }
}

/// Order in which jobs start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StartOrder {
    /// Jobs that need the least new space first.
    Need,
    /// Jobs at a smaller depth of the graph first.
    BreadthFirst,
    /// Jobs at a greater depth of the graph first.
    DepthFirst,
}
