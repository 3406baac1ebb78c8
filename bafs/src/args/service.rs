//! The command line of the service, of its users, and of `bafs learned`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::page::PAGE_ADDRESS_DEFAULT;

/// Commands of a service.
#[derive(Debug, Subcommand)]
pub(crate) enum ServiceCommand {
    /// Run a service that queues workflows of several users and runs them.
    Scheduler(SchedulerArgs),
    /// Hand a workflow to a service.
    Submit(SubmitArgs),
    /// List the workflows of a service.
    Queue(QueueArgs),
    /// Keep workflows from starting, or running ones from starting further jobs.
    #[command(after_help = "Example:\n  bafs hold 17 --identity ~/bafs-alice")]
    Hold(WorkflowNumberArgs),
    /// End the hold of workflows.
    #[command(after_help = "Example:\n  bafs release 17 --identity ~/bafs-alice")]
    Release(WorkflowNumberArgs),
    /// Remove workflows from the queue; running ones are cancelled.
    #[command(after_help = "Example:\n  bafs remove 17 18 --identity ~/bafs-alice")]
    Remove(WorkflowNumberArgs),
    /// Add, list and remove users of a service.
    #[command(subcommand)]
    User(UserCommand),
    /// List or forget what runs have taught: run times, sizes, failures, link rates.
    #[command(subcommand)]
    Learned(LearnedCommand),
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs scheduler --state /var/lib/bafs --identity ~/bafs-cluster \
--catalog 10.0.0.1:7000 --listen 10.0.0.1:7100\n\n\
SIGTERM ends the service and leaves its runs alone; the next start takes them up again."
)]
pub(crate) struct SchedulerArgs {
    /// Directory of the queue, its runs, and the learned values.
    #[arg(long, value_name = "DIR")]
    pub(crate) state: PathBuf,
    /// Directory that `bafs init` created.
    #[arg(long, env = "BAFS_IDENTITY", value_name = "DIR")]
    pub(crate) identity: PathBuf,
    /// Address of the catalog.
    #[arg(long, env = "BAFS_CATALOG", value_name = "HOST:PORT")]
    pub(crate) catalog: String,
    /// Address to listen at; port 0 takes the port of the last start, else any free one.
    #[arg(
        long,
        env = "BAFS_LISTEN",
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:0"
    )]
    pub(crate) listen: String,
    /// Order in which workflows start: fair-share or first-come.
    #[arg(long, value_name = "POLICY", default_value = "fair-share")]
    pub(crate) order: String,
    /// Time after which half of a user's past use counts.
    #[arg(long, value_name = "TIME", default_value = "1d")]
    pub(crate) half_life: String,
    /// Workflows that run at once; each is a process of some 50 MB.
    #[arg(long, value_name = "COUNT", default_value_t = 16,
        value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) runs: u16,
    /// Time for which ended workflows are remembered.
    #[arg(long, value_name = "TIME", default_value = "30d")]
    pub(crate) history: String,
    /// Most ended workflows that are remembered.
    #[arg(long, value_name = "COUNT", default_value_t = 10_000)]
    pub(crate) history_max: usize,
    /// Serve a page with the queue and its runs, and an HTTP API, at this address of this machine;
    /// by default any free port. `bafs queue --page` prints a link that opens it.
    #[arg(
        long,
        value_name = "HOST:PORT",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = PAGE_ADDRESS_DEFAULT
    )]
    pub(crate) page: Option<String>,
}

/// How to reach a service.
#[derive(Debug, Clone, Args)]
pub(crate) struct ServiceArgs {
    /// Identity: a directory that `bafs user add` created, or `bafs init` for an operator.
    #[arg(long, env = "BAFS_IDENTITY", value_name = "DIR")]
    pub(crate) identity: PathBuf,
    /// Address of the service; defaults to the one in the identity.
    #[arg(long, env = "BAFS_SERVICE", value_name = "HOST:PORT")]
    pub(crate) service: Option<String>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs submit blast.bafs --identity ~/bafs-alice --priority 5\n\n\
Exit codes of submit, queue, hold, release, remove and user: 0 success; 1 failure; 2 usage error; \
3 denied; 4 no such workflow or user; 5 not possible in this state; 6 above a limit; 75 the \
service cannot be reached now."
)]
pub(crate) struct SubmitArgs {
    #[command(flatten)]
    pub(crate) service: ServiceArgs,
    /// The workflow file.
    pub(crate) workflow: PathBuf,
    /// Place among your workflows: higher ones start first.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) priority: i32,
    /// For operators: the user whose workflow it is.
    #[arg(long, value_name = "NAME")]
    pub(crate) user: Option<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  bafs queue --identity ~/bafs-alice\n  bafs queue --all --json")]
pub(crate) struct QueueArgs {
    #[command(flatten)]
    pub(crate) service: ServiceArgs,
    /// Also list ended workflows.
    #[arg(long)]
    pub(crate) all: bool,
    /// Print a link that opens the page of the service once, instead of the list. The page is on
    /// the machine of the service; from another one, forward its port: ssh -L PORT:127.0.0.1:PORT
    /// HOST.
    #[arg(long)]
    pub(crate) page: bool,
}

#[derive(Debug, Args)]
pub(crate) struct WorkflowNumberArgs {
    #[command(flatten)]
    pub(crate) service: ServiceArgs,
    /// Number of the workflow, as `bafs queue` lists it.
    #[arg(value_name = "NUMBER", required = true)]
    pub(crate) workflows: Vec<u64>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum UserCommand {
    /// Add a user to a service and create the user's identity; again for a new identity, which
    /// replaces the older ones.
    #[command(
        after_help = "Example:\n  bafs user add alice --to ~/bafs-alice --identity \
~/bafs-cluster --service 10.0.0.1:7100 --home projects/alice --slots 64 --space 2TB"
    )]
    Add(UserAddArgs),
    /// List the users of a service with their quotas and usage.
    #[command(
        after_help = "Example:\n  bafs user list --identity ~/bafs-cluster --service \
10.0.0.1:7100"
    )]
    List(ServiceArgs),
    /// Refuse a user's identities from now on; running workflows go on.
    #[command(
        after_help = "Example:\n  bafs user remove alice --identity ~/bafs-cluster --service \
10.0.0.1:7100"
    )]
    Remove(UserRemoveArgs),
}

#[derive(Debug, Args)]
pub(crate) struct UserAddArgs {
    #[command(flatten)]
    pub(crate) service: ServiceArgs,
    /// Name of the user: letters, digits, `-`, `_` and `.`.
    pub(crate) name: String,
    /// Directory to create for the user's identity.
    #[arg(long, value_name = "DIR")]
    pub(crate) to: PathBuf,
    /// Path of the homes that the user's workflows may read and write; repeatable. By default, all
    /// of them.
    #[arg(long = "home", value_name = "PATH")]
    pub(crate) homes: Vec<String>,
    /// Slots that the user's workflows may have at once.
    #[arg(long, value_name = "COUNT")]
    pub(crate) slots: Option<u64>,
    /// Space that the user's workflows may have at once, such as 2TB.
    #[arg(long, value_name = "SIZE")]
    pub(crate) space: Option<String>,
    /// Let the user see that others have workflows, without details.
    #[arg(long)]
    pub(crate) list_others: bool,
    /// Days for which the identity is valid.
    #[arg(long, default_value_t = 365)]
    pub(crate) days: u64,
}

#[derive(Debug, Args)]
pub(crate) struct UserRemoveArgs {
    #[command(flatten)]
    pub(crate) service: ServiceArgs,
    /// Name of the user.
    pub(crate) name: String,
}

/// Where learned values are.
#[derive(Debug, Clone, Args)]
pub(crate) struct LearnedArgs {
    /// File of learned values, or `none`; defaults to `bafs/learned.redb` in $XDG_STATE_HOME or
    /// ~/.local/state.
    #[arg(long, env = "BAFS_LEARNED", value_name = "FILE")]
    pub(crate) learned: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LearnedCommand {
    /// List what runs have taught: times, sizes, reads, failures, link rates.
    #[command(after_help = "Example:\n  bafs learned list\n  bafs learned list align --json")]
    List(LearnedListArgs),
    /// Forget it, or a part of it.
    #[command(after_help = "Example:\n  bafs learned forget align\n  bafs learned forget --all")]
    Forget(LearnedForgetArgs),
}

#[derive(Debug, Args)]
pub(crate) struct LearnedListArgs {
    #[command(flatten)]
    pub(crate) place: LearnedArgs,
    /// Only programs, volumes, nodes and links whose names contain this.
    pub(crate) part: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct LearnedForgetArgs {
    #[command(flatten)]
    pub(crate) place: LearnedArgs,
    /// Forget what has this in its name.
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    pub(crate) part: Option<String>,
    /// Forget everything.
    #[arg(long)]
    pub(crate) all: bool,
}
