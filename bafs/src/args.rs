//! The command line: what can be said. Decides nothing.

mod check;
mod client;
mod config;
mod import;
mod job_commands;
mod page;
mod plan;
mod policy;
mod pool;
mod profile;
mod renamed_variables;
mod run;
mod servers;
mod service;
mod sizes;
mod usage_error;
mod volume;

use std::path::PathBuf;
use std::str::FromStr;

use bafs_proto::attributes::Comparison;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

pub(crate) use check::{CheckArgs, FmtArgs};
pub(crate) use client::ClientArgs;
use client::path_text;
pub(crate) use config::{CompletionsArgs, ConfigArgs, ManPagesArgs};
pub(crate) use import::{ImportArgs, ImportCommand, ImportImageArgs, WfformatArgs};
pub(crate) use page::{PageArgs, RunPageArgs};
pub(crate) use plan::{PlanArgs, SimArgs};
pub(crate) use policy::PolicyArgs;
pub(crate) use pool::{
    PilotArgs, PilotNodeArgs, PoolAddArgs, PoolCommand, PoolDryRunArgs, PoolSize,
};
pub(crate) use profile::ProfileArgs;
pub(crate) use run::{RunArgs, StartOrder};
pub(crate) use servers::{CatalogArgs, HomeArgs, NodeArgs, ServerArgs};
pub(crate) use service::{
    LearnedArgs, LearnedCommand, QueueArgs, SchedulerArgs, ServiceArgs, ServiceCommand, SubmitArgs,
    UserAddArgs, UserCommand, UserRemoveArgs, WorkflowNumberArgs,
};
pub(crate) use sizes::SizesArgs;
pub(crate) use usage_error::{EXIT_USAGE_ERROR, UsageError};
pub(crate) use volume::{
    LimitEnforcement, VolumeArgs, VolumeCommand, VolumeCreateArgs, VolumeDeleteArgs,
    VolumeExtractArgs, VolumeGetArgs, VolumeLsArgs, VolumePutArgs, VolumeRenewArgs,
    VolumeReplicateArgs, VolumeResizeArgs, VolumeWarmArgs,
};

/// A distributed file system for batch jobs.
///
/// BAFS gives each job of a workflow a private name space of volumes: scratch volumes for
/// intermediate files, cooperative caches for shared inputs. Only first inputs and last outputs
/// cross the wide-area link.
#[derive(Debug, Parser)]
#[command(name = "bafs", version, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 success; 1 failure; 2 usage error; 3 bafs doctor found a \
fault; 75 the environment failed (bafs exec prints the reason to standard error); 129, \
143 SIGHUP or SIGTERM ended bafs run, and the run can be resumed; 130 a second Ctrl-C ended it; \
141 standard output is closed; any other code is the job's.\n\n\
The variable in [env: BAFS_...] sets an option, too, and so does the file bafs.toml (`bafs \
config`)."
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: GlobalArgs,

    #[command(subcommand)]
    pub(crate) command: CliCommand,
}

/// What every command takes.
#[derive(Debug, Args)]
pub(crate) struct GlobalArgs {
    /// Print results as JSON.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Transport for calls to servers; for a server, also the transports it accepts.
    #[arg(
        long,
        global = true,
        env = "BAFS_CHANNEL",
        value_enum,
        default_value_t = ChannelChoice::Auto
    )]
    pub(crate) channel: ChannelChoice,
}

/// Transport of calls. All are encrypted and authenticate both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ChannelChoice {
    /// TCP to servers in this machine's own networks, if TCP connects; else QUIC.
    Auto,
    /// QUIC only.
    Quic,
    /// TCP only, also to servers in other networks.
    Tcp,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CliCommand {
    /// Run BLAST on a temporary local cluster, with BAFS and with remote I/O, and compare them.
    Demo(DemoArgs),
    /// Create the keys of a new cluster.
    Init(InitArgs),
    /// Export a directory as a home.
    Home(HomeArgs),
    /// Serve the list of live servers.
    Catalog(CatalogArgs),
    /// Store volumes on this machine and run jobs.
    Node(NodeArgs),
    /// List the servers that are alive.
    #[command(
        after_help = "Example:\n  bafs servers --identity ~/bafs-cluster --catalog 10.0.0.1:7000 \
                      --where 'slots >= 8'"
    )]
    Servers(ServersArgs),
    /// Take a node out of use without losing data: it takes no new work, and runs copy its data.
    Drain(DrainArgs),
    /// Create, list, show, fill, read, copy, extract, warm and delete volumes.
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// List, pin or remove cached data of sources, apart from runs.
    #[command(subcommand)]
    Cache(CacheCommand),
    /// Create an identity that can mount only the named volumes, for use on other people's
    /// machines.
    Grant(GrantArgs),
    /// Mount a volume on a directory until the command ends or you unmount it.
    Mount(MountArgs),
    /// Run a program in a private name space with volumes mounted.
    Exec(ExecArgs),
    /// Run a workflow.
    Run(RunArgs),
    /// Trace the file use of programs, or of the jobs of a workflow, and describe it.
    Profile(ProfileArgs),
    /// Start nodes as jobs of a batch system.
    #[command(subcommand)]
    Pool(PoolCommand),
    #[command(flatten)]
    Service(ServiceCommand),
    /// Check a workflow file, and the files that it names, without running it.
    Check(CheckArgs),
    /// Lay out a workflow file in the usual form.
    Fmt(FmtArgs),
    /// Choose an allocation strategy for a workload, and explain the choice.
    Plan(PlanArgs),
    /// Simulate a workload under one strategy or all.
    Sim(SimArgs),
    /// Raise or lower the priority of a pipeline (jobs that share scratch volumes) in an active
    /// run.
    Prefer(PreferArgs),
    /// List the policies of the scheduler by family.
    #[command(after_help = "Example:\n  bafs policies")]
    Policies,
    /// Cancel the unfinished jobs of a pipeline in an active run.
    Cancel(CancelArgs),
    /// Print all events and decisions of a run, from its journal.
    Replay(ReplayArgs),
    /// Explain the history or the waiting of a job, volume or node of a run.
    Why(WhyArgs),
    /// Propose sizes for volumes of unknown size, from the journal.
    Sizes(SizesArgs),
    /// Print the standard output and standard error of a job.
    Logs(LogsArgs),
    /// Show the progress of a run, from its journal.
    Status(StatusArgs),
    /// Show a run in the browser, from its journal: jobs, schedule, logs, failures; steer it there.
    Page(PageArgs),
    /// Write an HTML report of a run: schedule, space, failures, copies, use of time.
    Report(ReportArgs),
    /// Print a workflow, or the progress of a run, as a graph in the DOT language.
    Graph(GraphArgs),
    /// Make a workflow of a file of another workflow system, or a directory of a container image.
    #[command(subcommand)]
    Import(ImportCommand),
    /// Show the values of options and where each is from: option, environment, file or default.
    Config(ConfigArgs),
    /// Print the completions of a shell.
    Completions(CompletionsArgs),
    /// Write the manual pages.
    #[command(hide = true)]
    ManPages(ManPagesArgs),
    /// Check this machine for missing requirements and leftovers, and repair them on request.
    Doctor(DoctorArgs),
    /// Run the agent of one job; nodes start it.
    #[command(hide = true)]
    Agent(AgentArgs),
}

/// What an agent may use.
#[derive(Debug, Clone, Args)]
pub(crate) struct MemoryArgs {
    /// Memory for data in transit, over all volumes. The process uses about 64 MiB more.
    #[arg(
        long,
        env = "BAFS_MEMORY",
        value_name = "SIZE",
        default_value = "256MiB"
    )]
    pub(crate) memory: String,
}

/// Which servers are listed.
#[derive(Debug, Args)]
pub(crate) struct ServersArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Only servers with this attribute, such as `memory_bytes >= 8000000000`; operators are ==,
    /// !=, <, <=, >, >= and contains. May be repeated; all must hold.
    #[arg(long = "where", value_name = "COMPARISON", value_parser = Comparison::from_str)]
    pub(crate) comparisons: Vec<Comparison>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs demo\n  bafs demo --home-rate 10MB/s --nodes 8\n  \
bafs demo --kill-node-after 6     # kill -9 a node after six jobs"
)]
pub(crate) struct DemoArgs {
    /// Use a small database and few pipelines.
    #[arg(long)]
    pub(crate) small: bool,
    /// Nodes to start.
    #[arg(long, default_value_t = 4)]
    pub(crate) nodes: u32,
    /// Pipelines to run over BAFS.
    #[arg(long, default_value_t = 16)]
    pub(crate) pipelines: u32,
    /// Pipelines to run with remote I/O for comparison; 0 skips the comparison.
    #[arg(long, default_value_t = 3)]
    pub(crate) remote_pipelines: u32,
    /// Size of the protein database in MiB of residues.
    #[arg(long, default_value_t = 25)]
    pub(crate) database_mib: u32,
    /// Rate of the link to home.
    #[arg(long, alias = "limit", default_value = "1MB/s")]
    pub(crate) home_rate: String,
    /// Seed for the choice of sequences; the same seed gives the same data.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Kill one node (SIGKILL) after this many jobs.
    #[arg(long, alias = "kill-node", value_name = "JOBS")]
    pub(crate) kill_node_after: Option<u32>,
    /// Keep the cluster's directory for inspection, and print its path.
    #[arg(long)]
    pub(crate) keep: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  bafs init ~/bafs-cluster\n  \
bafs catalog --identity ~/bafs-cluster --listen 10.0.0.1:7000")]
pub(crate) struct InitArgs {
    /// Directory to create.
    pub(crate) directory: PathBuf,
    /// Lifetime of the capability tokens, in days.
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u64).range(1..=36_500))]
    pub(crate) days: u64,
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
    /// Ids or names of existing volumes. The identity cannot mount volumes created later, even with
    /// the same name.
    #[arg(required = true)]
    pub(crate) volumes: Vec<String>,
    /// Directory to create for the identity.
    #[arg(long, value_name = "DIR")]
    pub(crate) to: PathBuf,
    /// Permit reading only.
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Lifetime of the identity, in days.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u64).range(1..=36_500))]
    pub(crate) days: u64,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CacheCommand {
    /// List data of sources that no volume shows, with the space that they take.
    #[command(after_help = "Example:\n  bafs cache list")]
    List(ClientArgs),
    /// Fetch a source to nodes before any run reads it, and keep it there until you unpin it.
    #[command(
        after_help = "Each node reserves the space. Together they keep each block once, so for a \
source of 90 GB on ten nodes, 10 GB for each are enough.\n\n\
Example:\n  bafs cache pin bafs://home/refs/hg38 --size 10GB"
    )]
    Pin(CachePinArgs),
    /// Give up the reservation of a pinned source. Its data stay until space is wanted.
    #[command(after_help = "Example:\n  bafs cache unpin bafs://home/refs/hg38")]
    Unpin(CacheUnpinArgs),
    /// Remove such data: of one source, or all.
    #[command(after_help = "The data of volumes stay; delete these first.\n\n\
                            Example:\n  bafs cache drop refs/hg38\n  bafs cache drop --all")]
    Drop(CacheDropArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CachePinArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// The source at its home (a URL), as workflows name it.
    #[arg(value_parser = path_text())]
    pub(crate) source: String,
    /// Space to reserve on each node.
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: String,
    /// Files to reserve on each node.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) files: u64,
    /// Name or address of a node that keeps a part; may be repeated. By default all nodes do.
    #[arg(long = "node", value_name = "NODE")]
    pub(crate) nodes: Vec<String>,
    /// Unpin the source after this many hours without use.
    #[arg(
        long,
        default_value_t = 720,
        value_parser = clap::value_parser!(u64).range(1..=87_600)
    )]
    pub(crate) lifetime_hours: u64,
}

#[derive(Debug, Args)]
pub(crate) struct CacheUnpinArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// The source at its home (a URL).
    #[arg(value_parser = path_text())]
    pub(crate) source: String,
}

#[derive(Debug, Args)]
pub(crate) struct CacheDropArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Path of the source at its home, as `bafs cache list` shows it.
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    pub(crate) source: Option<String>,
    /// Remove the data of all sources.
    #[arg(long)]
    pub(crate) all: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  bafs drain node3 --catalog 10.0.0.1:7000")]
pub(crate) struct DrainArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Name or address of the node.
    pub(crate) node: String,
    /// Return at once, instead of when the node has neither jobs nor scratch volumes.
    #[arg(long)]
    pub(crate) no_wait: bool,
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
    /// Let the kernel cache writes to a scratch volume and send them later. Small writes run at
    /// memory speed, but only close and fsync report lack of space or data loss.
    #[arg(long, conflicts_with = "read_only")]
    pub(crate) write_back: bool,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    /// Timeout of each remote operation, in seconds. After a timeout the volume counts as lost.
    #[arg(
        long, alias = "op-deadline",
        env = "BAFS_OPERATION_TIMEOUT",
        default_value_t = 30,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub(crate) operation_timeout: u64,
    /// Print to standard error how the agent accesses each volume, and why not faster.
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
    /// A volume and its path in the program's name space. `:ro` mounts read-only. `:write-back`
    /// lets the kernel cache writes; if one does not fit, the program is killed (exit code 75).
    #[arg(long = "mount", value_name = "VOLUME:/PATH[:ro|:rw|:write-back]")]
    pub(crate) mounts: Vec<String>,
    /// Timeout of each remote operation, in seconds. After a timeout the volume counts as lost.
    #[arg(
        long, alias = "op-deadline",
        env = "BAFS_OPERATION_TIMEOUT",
        default_value_t = 30,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub(crate) operation_timeout: u64,
    /// Print to standard error how the agent accesses each volume, and why not faster.
    #[arg(long)]
    pub(crate) explain: bool,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    #[command(flatten)]
    pub(crate) delegate: DelegateArgs,
    /// Share this directory of the host with the program. By default, /tmp, /var/tmp and /dev/shm
    /// are private, start empty, and are deleted when the program ends.
    #[arg(long, value_name = "DIR", value_parser = bafs_workflow::SHARED_DIRECTORIES)]
    pub(crate) share: Vec<String>,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    pub(crate) program: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  bafs replay blast.bafs\n  bafs replay --verify blast.bafs")]
pub(crate) struct ReplayArgs {
    /// Journal of an active or ended run, or its workflow if the journal is in the same directory.
    #[arg(value_name = "JOURNAL")]
    pub(crate) run: Option<PathBuf>,
    /// Decide again with the recorded events, and show the first decision that differs. It exits
    /// with 1 if one does.
    #[arg(long)]
    pub(crate) verify: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  bafs why blast.bafs work3")]
pub(crate) struct WhyArgs {
    /// Journal of an active or ended run, or its workflow if the journal is in the same directory.
    #[arg(value_name = "JOURNAL")]
    pub(crate) run: PathBuf,
    /// Name of the job, volume or node.
    pub(crate) name: Option<String>,
}

#[derive(Debug, Args)]
#[command(
    override_usage = "bafs logs [OPTIONS] [RUN] JOB",
    after_help = "BAFS keeps the first 64 KiB and the last 192 KiB of each stream, even if \
`output` and `error` name files. RUN defaults to the only run with logs in the current \
directory.\n\n\
Example:\n  bafs logs blast.bafs search7\n  bafs logs blast.bafs search7 --attempt 1 --stderr"
)]
pub(crate) struct LogsArgs {
    /// Journal of an active or ended run, or its workflow if the journal is in the same directory;
    /// then the name of the job.
    #[arg(value_name = "[RUN] JOB", num_args = 1..=2, required = true)]
    pub(crate) run_and_job: Vec<String>,
    /// Number of an ended attempt, from 1; defaults to the last.
    #[arg(long, value_name = "N")]
    pub(crate) attempt: Option<u32>,
    /// Only attempts on the node of this name.
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,
    /// Print what the job prints while it runs, until it ends.
    #[arg(long, conflicts_with_all = ["attempt", "node"])]
    pub(crate) follow: bool,
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
    /// Journal of the run, or its workflow if the journal is in the same directory.
    pub(crate) run: PathBuf,
    /// Any job of the pipeline. A pipeline is a set of jobs that share scratch volumes, directly or
    /// through other jobs.
    pub(crate) pipeline: String,
    /// New priority; pipelines of higher priority start first. The initial priority is `priority`
    /// of the job descriptions, or 0.
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    pub(crate) priority: i32,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  bafs cancel blast.bafs search7\n\n\
The run continues with the other pipelines, and exits with code 1. Ctrl-C at `bafs run` stops the \
whole run.")]
pub(crate) struct CancelArgs {
    /// Journal of the run, or its workflow if the journal is in the same directory.
    pub(crate) run: PathBuf,
    /// Any job of the pipeline. A pipeline is a set of jobs that share scratch volumes, directly or
    /// through other jobs.
    pub(crate) pipeline: String,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs status blast.bafs\n  bafs status blast.bafs.journal --json"
)]
pub(crate) struct StatusArgs {
    /// Journal of the run, or its workflow if the journal is in the same directory.
    pub(crate) run: PathBuf,
    /// Print the progress once, even on a terminal.
    #[arg(long)]
    pub(crate) once: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs report blast.bafs.journal -o blast.html\n  \
bafs report blast.bafs --json | jq .goodput.total"
)]
pub(crate) struct ReportArgs {
    /// Journal of the run, or its workflow if the journal is in the same directory.
    pub(crate) run: PathBuf,
    /// File of the report, `-` for standard output; defaults to the journal's name with `.html`.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs graph blast.bafs | dot -Tsvg > blast.svg\n  bafs graph \
blast.bafs.journal -o run.dot\n\n\
Colours of jobs: white waits for other jobs, yellow is ready, orange is held, blue runs, green is \
done, red failed, grey is skipped."
)]
pub(crate) struct GraphArgs {
    /// A workflow file, or the journal of a run.
    pub(crate) workflow: PathBuf,
    /// Output file; defaults to `-`, standard output.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs doctor\n  sudo bafs doctor --repair --store /var/tmp/bafs\n\n\
Exit codes: 0 no fault, or all faults repaired; 1 jobs cannot run here; 3 a fault remains, and the \
output says how to repair it."
)]
pub(crate) struct DoctorArgs {
    /// Repair dead mounts, stale sockets, permissions and failed volumes.
    #[arg(long)]
    pub(crate) repair: bool,
    /// Check the store of a node, too.
    #[arg(long, value_name = "DIR")]
    pub(crate) store: Option<PathBuf>,
    /// Check the exported directory of a home, too, for unfinished uploads.
    #[arg(long, value_name = "DIR")]
    pub(crate) export: Option<PathBuf>,
    /// Check the files of an identity, too.
    #[arg(long, env = "BAFS_IDENTITY", value_name = "DIR")]
    pub(crate) identity: Option<PathBuf>,
    /// Check the servers and volumes of a cluster, too.
    #[arg(long, env = "BAFS_CATALOG", value_name = "HOST:PORT")]
    pub(crate) catalog: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    /// Directory of the agent's identity.
    #[arg(long)]
    pub(crate) identity: PathBuf,
    /// Directory for the temporary files of the job; defaults to the host's.
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
    /// Prefix of the files with the job's output.
    #[arg(long, alias = "printed", value_name = "PREFIX")]
    pub(crate) output_prefix: Option<PathBuf>,
    /// Control group in which the job starts.
    #[arg(long, value_name = "DIR")]
    pub(crate) control_group: Option<PathBuf>,
    /// Start agents on the request of a node, which standard input leads to.
    #[arg(long, conflicts_with_all = ["temporary_directory", "output_prefix"])]
    pub(crate) spawner: bool,
    #[command(flatten)]
    pub(crate) delegate: DelegateArgs,
}

/// Delegation of writes to a volume on another node.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct DelegateArgs {
    /// Reply early to writes to a volume on another node that are certain to succeed; this speeds
    /// up many small files. fsync and the end of a job wait for the server; on a mount of the host,
    /// close waits, too.
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
