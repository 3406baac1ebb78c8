//! The command line: what can be said. Decides nothing.

mod plan;
mod servers;
mod usage_error;

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use bafs_proto::path::from_bytes;
use bafs_sched::logic::CheckpointPolicy;
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

pub(crate) use plan::{PlanArgs, SimArgs};
pub(crate) use servers::{CatalogArgs, HomeArgs, NodeArgs, ServerArgs};
pub(crate) use usage_error::{EXIT_USAGE_ERROR, UsageError};

/// A path, or a URL with one, whose names need not be UTF-8.
fn path_text() -> impl TypedValueParser<Value = String> {
    OsStringValueParser::new().map(|path| from_bytes(path.as_bytes()))
}

/// A user-space, batch-aware distributed file system.
///
/// BAFS gives each job of a workflow a private name space of volumes: scratch volumes for what
/// jobs pass to each other, cooperative caches for the inputs that all jobs read. Only first
/// inputs and last outputs cross the wide-area link.
#[derive(Debug, Parser)]
#[command(name = "bafs", version, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 done; 1 failed; 2 wrong usage; \
3 bafs doctor found something broken; \
75 the environment failed (bafs exec: the reason is on standard error, as JSON); \
129, 143 bafs run was left as it is, at SIGHUP or SIGTERM; 130 it was interrupted twice; \
141 nobody reads standard output any more; otherwise that of the job.\n\n\
Options whose help shows [env: BAFS_...] can be set by that variable.")]
pub(crate) struct Cli {
    /// Print results for machines, as JSON.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// How this process talks to servers, and for which channels its servers listen.
    #[arg(
        long,
        global = true,
        env = "BAFS_CHANNEL",
        value_enum,
        default_value_t = ChannelChoice::Auto
    )]
    pub(crate) channel: ChannelChoice,

    #[command(subcommand)]
    pub(crate) command: CliCommand,
}

/// What carries calls, always encrypted, both ends known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ChannelChoice {
    /// TCP to servers of networks that this machine is attached to, where it gets through; else
    /// QUIC.
    Auto,
    /// QUIC only.
    Quic,
    /// TCP only, to servers elsewhere too.
    Tcp,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CliCommand {
    /// Run a real workload on a throw-away cluster on this machine, beside remote I/O.
    Demo(DemoArgs),
    /// Create the authority of a new cluster and the identities of its parts.
    Init(InitArgs),
    /// Serve a directory of yours as a home.
    Home(HomeArgs),
    /// Serve the list of live servers.
    Catalog(CatalogArgs),
    /// Serve volumes from this machine's disk and run jobs on it.
    Node(NodeArgs),
    /// List live servers.
    #[command(
        after_help = "Example:\n  bafs servers --identity ~/bafs-cluster --catalog 10.0.0.1:7000"
    )]
    Servers(ClientArgs),
    /// Create, list, show, copy and delete volumes.
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Make an identity that can only mount the volumes that are named: for machines of others.
    Grant(GrantArgs),
    /// Mount a volume on a directory, until it is unmounted or the command is ended.
    Mount(MountArgs),
    /// Run a program with volumes at paths of its own name space.
    Exec(ExecArgs),
    /// Run a workflow.
    Run(RunArgs),
    /// Check a workflow file without running it.
    Check(CheckArgs),
    /// Say which allocation strategy suits a workload, and why, without running it.
    Plan(PlanArgs),
    /// Run a workload on simulated machines under one strategy or all.
    Sim(SimArgs),
    /// Let a pipeline (jobs that share scratch volumes) of a run that goes on go before others.
    Prefer(PreferArgs),
    /// Give up what is not done of a pipeline of a run that goes on.
    Cancel(CancelArgs),
    /// Tell all that happened in a run and what was decided, from its journal.
    Replay(ReplayArgs),
    /// Tell what happened to a job, a volume or a node of a run, and why.
    Why(WhyArgs),
    /// Print what a job printed: its standard output and standard error.
    Logs(LogsArgs),
    /// Show how far a run is, from the journal that it writes.
    Status(StatusArgs),
    /// Write what a run did as one page: who ran where and when, space, failures, copies, ledger.
    Report(ReportArgs),
    /// Print a workflow, or how far a run of it is, as a graph in the DOT language.
    Graph(GraphArgs),
    /// Say what this machine has, lacks, and has left over; mend it if told to. Never hangs.
    Doctor(DoctorArgs),
    /// The agent of one job; started by nodes.
    #[command(hide = true)]
    Agent(AgentArgs),
}

/// What an agent may use.
#[derive(Debug, Clone, Args)]
pub(crate) struct MemoryArgs {
    /// Memory for the data that pass through, over all volumes; about 64 MiB more are for the rest.
    #[arg(
        long,
        env = "BAFS_MEMORY",
        value_name = "SIZE",
        default_value = "256MiB"
    )]
    pub(crate) memory: String,
}

/// How to reach a cluster.
#[derive(Debug, Clone, Args)]
pub(crate) struct ClientArgs {
    /// Directory that `bafs init` made.
    #[arg(long, env = "BAFS_IDENTITY", value_name = "DIR")]
    pub(crate) identity: PathBuf,
    /// Address of the catalog.
    #[arg(long, env = "BAFS_CATALOG", value_name = "HOST:PORT")]
    pub(crate) catalog: String,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs demo\n  bafs demo --home-rate 10MB/s --nodes 8\n  \
bafs demo --kill-node-after 6     # kill -9 a node after six jobs"
)]
pub(crate) struct DemoArgs {
    /// A small database and few pipelines: for a quick look, and for tests.
    #[arg(long)]
    pub(crate) small: bool,
    /// Nodes to start.
    #[arg(long, default_value_t = 4)]
    pub(crate) nodes: u32,
    /// Pipelines to run over BAFS.
    #[arg(long, default_value_t = 16)]
    pub(crate) pipelines: u32,
    /// Pipelines to run with remote I/O for comparison; 0 leaves it out.
    #[arg(long, default_value_t = 3)]
    pub(crate) remote_pipelines: u32,
    /// Size of the protein database in MiB of residues.
    #[arg(long, default_value_t = 25)]
    pub(crate) database_mib: u32,
    /// Rate of the link to home.
    #[arg(long, alias = "limit", default_value = "1MB/s")]
    pub(crate) home_rate: String,
    /// Seed of the synthetic sequences: the same seed gives the same bytes.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Kill one node (SIGKILL) when this many jobs are done.
    #[arg(long, alias = "kill-node", value_name = "JOBS")]
    pub(crate) kill_node_after: Option<u32>,
    /// Keep the cluster's directory for inspection and say where it is.
    #[arg(long)]
    pub(crate) keep: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  bafs init ~/bafs-cluster\n  \
bafs catalog --identity ~/bafs-cluster --listen 10.0.0.1:7000")]
pub(crate) struct InitArgs {
    /// Directory to create.
    pub(crate) directory: PathBuf,
    /// Capability tokens expire after so many days.
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u64).range(1..=36_500))]
    pub(crate) days: u64,
}

#[derive(Debug, Subcommand)]
pub(crate) enum VolumeCommand {
    /// Create a volume on a node.
    #[command(
        after_help = "Example:\n  bafs volume create work --node n1 --size 10GB\n  \
bafs volume create data --node n1 --size 10GB --cache bafs://home/db\n  \
bafs volume create ref --node n1 --size 10GB --cache s3://genomes/hg38"
    )]
    Create(VolumeCreateArgs),
    /// List the volumes of all nodes.
    #[command(after_help = "Example:\n  bafs volume list\n  bafs volume list --json")]
    List(ClientArgs),
    /// Show a volume, or all volumes of a name.
    #[command(after_help = "Example:\n  bafs volume show work\n  bafs volume show data --json")]
    Show(VolumeArgs),
    /// Delete a volume.
    #[command(after_help = "Example:\n  bafs volume delete work")]
    Delete(VolumeArgs),
    /// Copy a scratch volume to another node.
    #[command(after_help = "Example:\n  bafs volume replicate work --to n2")]
    Replicate(VolumeReplicateArgs),
    /// Send a file of a scratch volume home.
    #[command(after_help = "Example:\n  bafs volume extract work out/summary \
bafs://home/results/summary")]
    Extract(VolumeExtractArgs),
    /// Start a new generation of a cache volume: its source is listed again.
    #[command(
        after_help = "Blocks of files that did not change are kept. Jobs that work with the old \
generation end with exit code 75 and the reason SourceChanged. It is for one volume: where \
several share their blocks, do it for each (warm is for all of them at once).\n\n\
Example:\n  bafs volume invalidate data"
    )]
    Invalidate(VolumeArgs),
    /// Fetch what a cache volume does not have yet, behind all that jobs ask for.
    #[command(
        after_help = "It is for a whole cooperative cache: every node that shares the blocks of \
the volume fetches its own share, and nothing where the source has no such path (invalidate is \
for one volume). How far it is: bafs volume show. With --wait it fails (exit code 1) where not \
everything found room.\n\nExample:\n  bafs volume warm data --path db/nr --pin --wait"
    )]
    Warm(VolumeWarmArgs),
}

#[derive(Debug, Args)]
pub(crate) struct VolumeWarmArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Id or name of the volume, or name of a cooperative cache.
    pub(crate) volume: String,
    /// Only this file or directory, named as in the volume: from the top of its source on.
    #[arg(long, default_value = "", hide_default_value = true, value_parser = path_text())]
    pub(crate) path: String,
    /// The blocks stay until they are unpinned.
    #[arg(long)]
    pub(crate) pin: bool,
    /// Fetch nothing: blocks that were pinned may leave again.
    #[arg(long, conflicts_with_all = ["pin", "wait"])]
    pub(crate) unpin: bool,
    /// Wait until all is fetched, or no more finds room; fail in that case.
    #[arg(long)]
    pub(crate) wait: bool,
}

#[derive(Debug, Args)]
pub(crate) struct VolumeArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Id or name of the volume.
    pub(crate) volume: String,
}

/// How the limits of a scratch volume are kept.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum LimitEnforcement {
    Exact,
    Watched,
}

#[derive(Debug, Args)]
pub(crate) struct VolumeCreateArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Name of the volume: without '/'. Others may have the same, here or elsewhere; commands for
    /// one volume then want its id.
    pub(crate) name: String,
    /// Node to create it on, by name or address.
    #[arg(long)]
    pub(crate) node: String,
    /// Space to reserve.
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: String,
    /// Files to reserve.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) files: u64,
    /// How the limits are kept: `exact`, or `watched`, where jobs on the node work on the directory
    /// itself, as fast as its disk, and a job past a limit is ended (exit code 75).
    #[arg(long, default_value = "exact", conflicts_with = "cache")]
    pub(crate) limit: LimitEnforcement,
    /// Fill the scratch volume from this home path.
    #[arg(long, value_name = "URL", conflicts_with = "cache", value_parser = path_text())]
    pub(crate) from: Option<String>,
    /// Make a cache volume of this home path.
    #[arg(long, value_name = "URL", value_parser = path_text())]
    pub(crate) cache: Option<String>,
    /// Cooperative cache to take part in; the volume's name when not given. Volumes share blocks if
    /// they have this name and show the same source.
    #[arg(long, requires = "cache")]
    pub(crate) cooperative: Option<String>,
    /// Delete the volume when nobody shows interest for so many hours.
    #[arg(long, alias = "hours", default_value_t = 24,
        value_parser = clap::value_parser!(u64).range(1..=87_600))]
    pub(crate) lifetime_hours: u64,
}

#[derive(Debug, Args)]
pub(crate) struct VolumeReplicateArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Id or name of the volume.
    pub(crate) volume: String,
    /// Node that shall hold the copy, by name or address.
    #[arg(long)]
    pub(crate) to: String,
}

#[derive(Debug, Args)]
pub(crate) struct VolumeExtractArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Id or name of the volume.
    pub(crate) volume: String,
    /// Path of the file in the volume.
    #[arg(value_parser = path_text())]
    pub(crate) path: String,
    /// Where it shall be at home.
    #[arg(value_parser = path_text())]
    pub(crate) target: String,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs grant data work --to ~/for-node7 --days 2\n  \
scp -rp ~/for-node7 node7:\n  ssh node7 bafs mount work /mnt/work --identity for-node7 \
--catalog 10.0.0.1:7000"
)]
pub(crate) struct GrantArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Ids or names of the volumes, as they are now: one made later is another volume.
    #[arg(required = true)]
    pub(crate) volumes: Vec<String>,
    /// Directory to create for the identity.
    #[arg(long, value_name = "DIR")]
    pub(crate) to: PathBuf,
    /// Permit reading only.
    #[arg(long)]
    pub(crate) read_only: bool,
    /// It expires after so many days.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u64).range(1..=36_500))]
    pub(crate) days: u64,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  bafs mount work /mnt/work")]
pub(crate) struct MountArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Id or name of the volume.
    pub(crate) volume: String,
    /// Directory to mount on.
    pub(crate) directory: PathBuf,
    /// Mount read-only.
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Let the kernel collect what is written to a scratch volume and send it later: small writes
    /// are as fast as memory, and only close or fsync say what found no space or was lost.
    #[arg(long, conflicts_with = "read_only")]
    pub(crate) write_back: bool,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    /// Deadline of each remote operation in seconds; past it the volume is lost.
    #[arg(
        long, alias = "op-deadline",
        env = "BAFS_OPERATION_TIMEOUT",
        default_value_t = 30,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub(crate) operation_timeout: u64,
    /// Say on standard error how each volume is reached, and why not better.
    #[arg(long)]
    pub(crate) explain: bool,
    #[command(flatten)]
    pub(crate) delegate: DelegateArgs,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs exec --mount work:/scratch --mount data:/data:ro -- \
blastp -db /data/nr -query q.fa -out /scratch/raw"
)]
pub(crate) struct ExecArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// A volume and its path in the program's name space; `:ro` for read-only, `:write-back` to let
    /// the kernel collect writes (the program is ended, with exit code 75, if any does not fit).
    #[arg(long = "mount", value_name = "VOLUME:/PATH[:ro|:rw|:write-back]")]
    pub(crate) mounts: Vec<String>,
    /// Deadline of each remote operation in seconds; past it the volume is lost.
    #[arg(
        long, alias = "op-deadline",
        env = "BAFS_OPERATION_TIMEOUT",
        default_value_t = 30,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub(crate) operation_timeout: u64,
    /// Say on standard error how each volume is reached, and why not better.
    #[arg(long)]
    pub(crate) explain: bool,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    #[command(flatten)]
    pub(crate) delegate: DelegateArgs,
    /// Show the program the host's directory of this name; else /tmp, /var/tmp and /dev/shm are
    /// empty, its own, and gone with it.
    #[arg(long, value_name = "DIR", value_parser = bafs_sched::workflow::SHARED_DIRECTORIES)]
    pub(crate) share: Vec<String>,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    pub(crate) program: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  bafs run blast.bafs --local 4\n  \
bafs run blast.bafs --identity ~/bafs-cluster --catalog 10.0.0.1:7000\n\n\
After a crash of this command, run it again with the same journal: it goes on where it was. A run \
that has ended does not.\n\n\
Exit codes: 0 all jobs are done and all results are at home; 1 the run failed, was cancelled or \
could not go on, or, with --local, was asked to end by a signal; 2 wrong usage; 129, 143 SIGHUP or \
SIGTERM came, and the run was left as it is: start it again, and it goes on; 130 it was left at \
the second Ctrl-C; 141 it is over, but nobody reads standard output any more.")]
pub(crate) struct RunArgs {
    /// The workflow file.
    pub(crate) workflow: PathBuf,
    /// Start a throw-away cluster of so many nodes on this machine; no other is asked then,
    /// whatever --identity and --catalog say.
    #[arg(long, value_name = "NODES")]
    pub(crate) local: Option<u32>,
    /// With --local: directory to export as `bafs://home/`; the workflow's own when not given.
    #[arg(long, value_name = "DIR", requires = "local")]
    pub(crate) export: Option<PathBuf>,
    /// With --local: space of each node; 10 GB when not given.
    #[arg(long, value_name = "SIZE", requires = "local")]
    pub(crate) node_size: Option<String>,
    /// With --local: rate of the link to home.
    #[arg(long, alias = "limit", value_name = "RATE", requires = "local")]
    pub(crate) home_rate: Option<String>,
    /// Directory that `bafs init` made.
    #[arg(long, env = "BAFS_IDENTITY", value_name = "DIR")]
    pub(crate) identity: Option<PathBuf>,
    /// Address of the catalog.
    #[arg(long, env = "BAFS_CATALOG", value_name = "HOST:PORT")]
    pub(crate) catalog: Option<String>,
    /// Journal of the run; `WORKFLOW.journal` when not given, and with --local none is kept then.
    /// Delete it to start afresh.
    #[arg(long, value_name = "FILE")]
    pub(crate) journal: Option<PathBuf>,
    /// Publish figures for Prometheus at this address while it runs.
    #[arg(long, env = "BAFS_METRICS", value_name = "HOST:PORT")]
    pub(crate) metrics: Option<String>,
    /// Access home directly, with nothing cached and no volumes: the way without BAFS.
    #[arg(long)]
    pub(crate) remote_io: bool,
    /// Cache batch data near the jobs, but keep private data at home: for comparison.
    #[arg(long, conflicts_with = "remote_io")]
    pub(crate) cache_only: bool,
    /// Wait so long, such as 2d, for nodes when there is none, for space when nothing else goes on,
    /// and for a home that does not take a result or give what a job needs, before the run ends as
    /// failed; 1 min for the first node and 5 s for further ones on which the workflow fits, later
    /// 30 s, and 12 h for a home if not given.
    #[arg(long, alias = "patience", value_name = "TIME")]
    pub(crate) resource_timeout: Option<String>,
    /// Whose run it is, where others use the nodes too: each user gets as much as any other. Your
    /// login name when not given; of no meaning with `--local`.
    #[arg(long, env = "BAFS_USER", value_name = "NAME")]
    pub(crate) user: Option<String>,
    /// In which order jobs start; another than `need` is for comparison.
    #[arg(long, value_enum, default_value = "need")]
    pub(crate) order: StartOrder,
    /// When to copy what jobs wrote to another node, in case theirs is lost.
    #[arg(long, value_enum, default_value = "cost-benefit")]
    pub(crate) checkpoint: CheckpointTiming,
    /// Follow the allocation strategy that `bafs plan` chooses for this environment, and another
    /// one when what is left goes faster with it. Jobs run on the nodes of the catalog; where these
    /// are others than those of the file, the model chooses with its links.
    #[arg(long, value_name = "ENVIRONMENT", conflicts_with_all = ["order", "remote_io"])]
    pub(crate) plan: Option<PathBuf>,
}

/// In which order jobs start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StartOrder {
    /// Those first for which the least has to be made.
    Need,
    /// Those first that have fewer jobs before them.
    BreadthFirst,
    /// Those first that have more jobs before them.
    DepthFirst,
}

/// When what jobs wrote is copied to another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CheckpointTiming {
    /// What is lost is computed again.
    Never,
    /// After each stage, as far as there is room.
    Always,
    /// After a stage whose loss would cost more than the copy.
    CostBenefit,
}

impl From<CheckpointTiming> for CheckpointPolicy {
    fn from(wanted: CheckpointTiming) -> Self {
        match wanted {
            CheckpointTiming::Never => Self::Never,
            CheckpointTiming::Always => Self::Always,
            CheckpointTiming::CostBenefit => Self::CostBenefit,
        }
    }
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  bafs replay blast.bafs")]
pub(crate) struct ReplayArgs {
    /// Journal of the run, which may be under way, or its workflow if the journal is beside it.
    #[arg(value_name = "JOURNAL")]
    pub(crate) run: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  bafs why blast.bafs work3")]
pub(crate) struct WhyArgs {
    /// Journal of the run, which may be under way, or its workflow if the journal is beside it.
    #[arg(value_name = "JOURNAL")]
    pub(crate) run: PathBuf,
    /// Name of the job, volume or node.
    pub(crate) name: Option<String>,
}

#[derive(Debug, Args)]
#[command(
    override_usage = "bafs logs [OPTIONS] [RUN] JOB",
    after_help = "Of each stream the first 64 KiB and the last 192 KiB are kept, also where \
`output` and `error` name files. Without RUN it is the only run whose logs are in this \
directory.\n\nExample:\n  bafs logs blast.bafs search7\n  \
bafs logs blast.bafs search7 --attempt 1 --stderr"
)]
pub(crate) struct LogsArgs {
    /// Journal of the run, which may be under way, or its workflow if the journal is beside it;
    /// then the name of the job.
    #[arg(value_name = "[RUN] JOB", num_args = 1..=2, required = true)]
    pub(crate) run_and_job: Vec<String>,
    /// This attempt of those that ended, from 1 on; the last one when not given.
    #[arg(long, value_name = "N")]
    pub(crate) attempt: Option<u32>,
    /// Only standard output.
    #[arg(long)]
    pub(crate) stdout: bool,
    /// Only standard error.
    #[arg(long)]
    pub(crate) stderr: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  bafs prefer blast.bafs search7")]
pub(crate) struct PreferArgs {
    /// Journal of the run, or its workflow if the journal is beside it.
    pub(crate) run: PathBuf,
    /// Any job of the pipeline: of the jobs that share scratch volumes, directly or through others.
    pub(crate) pipeline: String,
    /// Those with a higher one go first; a pipeline begins with what `priority` says in the
    /// descriptions of its jobs, else with 0.
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    pub(crate) priority: i32,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  bafs cancel blast.bafs search7\n\n\
The run goes on with the others, and ends with exit code 1. Ctrl-C at `bafs run` stops the whole.")]
pub(crate) struct CancelArgs {
    /// Journal of the run, or its workflow if the journal is beside it.
    pub(crate) run: PathBuf,
    /// Any job of the pipeline: of the jobs that share scratch volumes, directly or through others.
    pub(crate) pipeline: String,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs status blast.bafs\n  bafs status blast.bafs.journal --json"
)]
pub(crate) struct StatusArgs {
    /// Journal of the run, or its workflow if the journal is beside it.
    pub(crate) run: PathBuf,
    /// Show it once, on a terminal too.
    #[arg(long)]
    pub(crate) once: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs report blast.bafs.journal -o blast.html\n  \
bafs report blast.bafs --json | jq .goodput.total"
)]
pub(crate) struct ReportArgs {
    /// Journal of the run, or its workflow if the journal is beside it.
    pub(crate) run: PathBuf,
    /// File of the page, `-` for standard output; the journal's name with `.html` when not given.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs graph blast.bafs | dot -Tsvg > blast.svg\n  \
bafs graph blast.bafs.journal -o run.dot\n\n\
Jobs of a run: white waits, yellow may start, orange is held back, blue is under way, green is \
done, red failed, grey is skipped."
)]
pub(crate) struct GraphArgs {
    /// A workflow file, or the journal of a run.
    pub(crate) workflow: PathBuf,
    /// File to write to instead of printing; `-` prints.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  bafs check blast.bafs\n\n\
Exit codes: 0 it has no errors, though there may be warnings; 1 it has errors, or cannot be read.")]
pub(crate) struct CheckArgs {
    /// The workflow file.
    pub(crate) workflow: PathBuf,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs doctor\n  sudo bafs doctor --repair --store /var/tmp/bafs\n\n\
Exit codes: 0 all is well or was repaired; 1 jobs cannot run here; 3 something is broken, and \
the remedy says what to do."
)]
pub(crate) struct DoctorArgs {
    /// Mend what can be mended: dead mounts, stale sockets, permissions, volumes that failed.
    #[arg(long)]
    pub(crate) repair: bool,
    /// Look at the directory of a node as well.
    #[arg(long, value_name = "DIR")]
    pub(crate) store: Option<PathBuf>,
    /// Look at the directory that a home exports as well: at what unfinished uploads hold there.
    #[arg(long, value_name = "DIR")]
    pub(crate) export: Option<PathBuf>,
    /// Look at the files of an identity as well.
    #[arg(long, env = "BAFS_IDENTITY", value_name = "DIR")]
    pub(crate) identity: Option<PathBuf>,
    /// Look at the servers and volumes of a cluster as well.
    #[arg(
        long,
        env = "BAFS_CATALOG",
        value_name = "HOST:PORT",
        requires = "identity"
    )]
    pub(crate) catalog: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    /// Directory of the agent's identity.
    #[arg(long)]
    pub(crate) identity: PathBuf,
    /// Directory for the temporary files of its job; the host's when not given.
    #[arg(
        long,
        alias = "temporary",
        value_name = "DIR",
        requires = "shared_memory"
    )]
    pub(crate) temporary_directory: Option<PathBuf>,
    /// Memory that processes of the job may share by name.
    #[arg(long, value_name = "SIZE")]
    pub(crate) shared_memory: Option<String>,
    /// What files with the job's output begin with.
    #[arg(long, alias = "printed", value_name = "PREFIX")]
    pub(crate) output_prefix: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) delegate: DelegateArgs,
}

/// How the writer of a volume on another node works.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct DelegateArgs {
    /// Whether programs that write a volume on another node go on before its server has run what
    /// is sure to succeed: fast for many small files. fsync and the end of a job wait; on a mount
    /// of the host close waits too.
    #[arg(long, env = "BAFS_DELEGATE", default_value_t = true, action = ArgAction::Set)]
    pub(crate) delegate: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn commands_without_example(command: &clap::Command, path: &str) -> Vec<String> {
        let mut found = Vec::new();
        let help = command.get_after_help();
        let has_example = help.is_some_and(|help| help.to_string().contains("Example:"));
        if !command.has_subcommands() && !has_example {
            found.push(path.to_owned());
        }
        for below in command.get_subcommands().filter(|it| !it.is_hide_set()) {
            let path = format!("{path} {}", below.get_name());
            found.extend(commands_without_example(below, &path));
        }
        found
    }

    #[test]
    fn every_command_has_an_example() {
        let found = commands_without_example(&Cli::command(), "bafs");
        assert_eq!(found, Vec::<String>::new());
    }

    #[test]
    fn renamed_options_keep_their_old_names() {
        for words in [
            "run w --patience 1h",
            "run w --local 2 --limit 1MB/s",
            "home --export d --listen a:1 --limit 1MB/s",
            "volume create v --node n --size 1MB --hours 2",
            "sim w --failures 12h",
            "plan w --model",
        ] {
            let words = std::iter::once("bafs").chain(words.split(' '));
            let parsed = Cli::command().try_get_matches_from(words.clone());
            let text = parsed
                .err()
                .map(|error| error.to_string())
                .unwrap_or_default();
            assert!(!text.contains("unexpected argument"), "{text}");
        }
    }
}
