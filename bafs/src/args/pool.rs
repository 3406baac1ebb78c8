//! The command line of pools: pilots on a batch system.

use std::path::PathBuf;
use std::str::FromStr;

use bafs_engine::EngineName;
use clap::{Args, Subcommand};

use super::ClientArgs;

/// `ENGINE:NODES` of the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PoolSize {
    /// The batch system.
    pub(crate) engine: EngineName,
    /// Most nodes at a time.
    pub(crate) nodes: usize,
}

impl FromStr for PoolSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = || format!("'{text}' is not ENGINE:NODES, such as slurm:16");
        let (engine, nodes) = text.split_once(':').ok_or_else(form)?;
        let nodes = nodes.parse().map_err(|_| form())?;
        if nodes == 0 {
            return Err("a pool needs a node".to_owned());
        }
        Ok(Self {
            engine: engine.parse()?,
            nodes,
        })
    }
}

/// What each pilot is.
#[derive(Debug, Clone, Args)]
pub(crate) struct PilotArgs {
    /// Time limit of each pilot, such as 2h. Without it, the batch system's default holds.
    #[arg(long, value_name = "TIME")]
    pub(crate) time_limit: Option<String>,
    /// Hosts for pilots by SSH, separated by commas.
    #[arg(long, value_name = "HOSTS", value_delimiter = ',')]
    pub(crate) pool_hosts: Vec<String>,
    /// Directory on a local disk of the nodes, for volumes; defaults to $TMPDIR of the pilot, or
    /// /tmp.
    #[arg(long, value_name = "DIR")]
    pub(crate) pool_store: Option<PathBuf>,
    /// Options for the batch system's submit command, after `--`; they are handed over verbatim.
    #[arg(last = true, value_name = "ENGINE_OPTIONS")]
    pub(crate) engine_options: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// Keep a cluster supplied with pilots until the command ends; it takes its pilots with it.
    #[command(
        after_help = "Example:\n  bafs pool add night slurm:16 --time-limit 2h -- \
--partition=p1"
    )]
    Add(PoolAddArgs),
    /// List pools and their pilots.
    #[command(after_help = "Example:\n  bafs pool list\n  bafs pool list --json")]
    List,
    /// End a pool and its pilots.
    #[command(after_help = "Example:\n  bafs pool remove night")]
    Remove(PoolRemoveArgs),
    /// Ask the batch system whether it would accept a pilot, without submitting one.
    #[command(
        after_help = "Example:\n  bafs pool dry-run slurm:16 --time-limit 2h -- \
--partition=p1"
    )]
    DryRun(PoolDryRunArgs),
    /// Run the node of a pilot; batch jobs start it.
    #[command(hide = true)]
    Pilot(PilotNodeArgs),
}

#[derive(Debug, Args)]
pub(crate) struct PoolAddArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Name of the pool.
    pub(crate) name: String,
    /// Batch system (slurm, sge, htcondor, ssh, local) and most nodes at a time.
    #[arg(value_name = "ENGINE:NODES")]
    pub(crate) size: PoolSize,
    /// Space of each node.
    #[arg(long, value_name = "SIZE", default_value = "10 GB")]
    pub(crate) node_size: String,
    #[command(flatten)]
    pub(crate) pilots: PilotArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PoolRemoveArgs {
    /// Name of the pool.
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct PoolDryRunArgs {
    /// Batch system and most nodes at a time.
    #[arg(value_name = "ENGINE:NODES")]
    pub(crate) size: PoolSize,
    #[command(flatten)]
    pub(crate) pilots: PilotArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PilotNodeArgs {
    /// Directory of the pool.
    pub(crate) directory: PathBuf,
    /// Name of the pilot.
    pub(crate) name: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_size_names_engine_and_nodes() {
        let size = "slurm:16".parse::<PoolSize>().expect("it is of the form");
        assert_eq!((size.engine, size.nodes), (EngineName::Slurm, 16));
        for wrong in ["slurm", "slurm:", "slurm:0", "pbs:3", "slurm:-1"] {
            assert!(wrong.parse::<PoolSize>().is_err(), "{wrong}");
        }
    }
}
