//! Arguments of `bafs volume`.

use std::path::PathBuf;

use bafs_proto::ids::VolumeId;
use clap::{Args, Subcommand, ValueEnum};

use super::client::{ClientArgs, path_text};

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
    /// Show a volume, or all volumes with a given name.
    #[command(after_help = "Example:\n  bafs volume show work\n  bafs volume show data --json")]
    Show(VolumeArgs),
    /// Delete a volume, or those that a failed run keeps.
    #[command(after_help = "Example:\n  bafs volume delete work\n  \
bafs volume delete --kept blast.bafs")]
    Delete(VolumeDeleteArgs),
    /// Put off the end of life of volumes, as each use of them does.
    #[command(after_help = "Example:\n  bafs volume renew work\n  \
bafs volume renew work data --lifetime-hours 72")]
    Renew(VolumeRenewArgs),
    /// Change the size of a volume.
    #[command(
        after_help = "A scratch volume cannot become smaller than what it holds, and changes while \
no job on its node uses it. A cache may become smaller: it gives up blocks.\n\n\
Example:\n  bafs volume resize work --size 20GB"
    )]
    Resize(VolumeResizeArgs),
    /// Copy a file or directory of this machine into a scratch volume, as a whole.
    #[command(
        after_help = "What is put appears at once, complete and durable, or not at all: it is \
collected in `.bafs-put` of the volume, then renamed. It replaces a file, but no directory. A job \
that writes the volume goes first.\n\n\
Example:\n  bafs volume put work input.txt\n  bafs volume put work ./params config/params\n  \
echo 42 | bafs volume put work - seed"
    )]
    Put(VolumePutArgs),
    /// Copy a file or directory of a volume to this machine, as a whole.
    #[command(after_help = "Example:\n  bafs volume get work out/summary .\n  \
bafs volume get work out results\n  bafs volume get work out/summary -")]
    Get(VolumeGetArgs),
    /// List the files of a volume, or of a directory in it.
    #[command(after_help = "Example:\n  bafs volume ls work\n  bafs volume ls work out --json")]
    Ls(VolumeLsArgs),
    /// Copy a scratch volume to another node.
    #[command(after_help = "Example:\n  bafs volume replicate work --to n2")]
    Replicate(VolumeReplicateArgs),
    /// Send a file of a scratch volume home.
    #[command(after_help = "Example:\n  bafs volume extract work out/summary \
bafs://home/results/summary")]
    Extract(VolumeExtractArgs),
    /// Start a new generation of a cache volume from a new listing of its source.
    #[command(
        after_help = "The cache keeps the blocks of unchanged files. Jobs that use the old \
generation exit with code 75, reason SourceChanged. The command changes one volume; repeat it for \
each volume of a cooperative cache (warm handles all of them at once).\n\n\
Example:\n  bafs volume invalidate data"
    )]
    Invalidate(VolumeArgs),
    /// Fetch the missing blocks of a cache volume in the background; reads of jobs go first.
    #[command(
        after_help = "The command warms the whole cooperative cache: each member node fetches its \
own share. A node whose source lacks the path fetches nothing. bafs volume show prints the \
progress. With --wait, the command fails (exit code 1) if some blocks do not fit.\n\n\
Example:\n  bafs volume warm data --path nr --pin --wait"
    )]
    Warm(VolumeWarmArgs),
}

#[derive(Debug, Args)]
pub(crate) struct VolumeWarmArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Id or name of the volume, or name of a cooperative cache.
    pub(crate) volume: String,
    /// Fetch only this file or directory, a path relative to the root of the volume.
    #[arg(long, default_value = "", hide_default_value = true, value_parser = path_text())]
    pub(crate) path: String,
    /// Pin the blocks: the cache does not evict them until you unpin them.
    #[arg(long)]
    pub(crate) pin: bool,
    /// Unpin the blocks, so that the cache may evict them; fetch nothing.
    #[arg(long, conflicts_with_all = ["pin", "wait"])]
    pub(crate) unpin: bool,
    /// Wait until all blocks are fetched; fail if some do not fit.
    #[arg(long)]
    pub(crate) wait: bool,
}

#[derive(Debug, Args)]
pub(crate) struct VolumeRenewArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Ids or names of the volumes.
    #[arg(value_name = "VOLUME", required = true)]
    pub(crate) volumes: Vec<String>,
    /// Lifetime without use, from now on; defaults to the present one, and only makes it longer.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=87_600))]
    pub(crate) lifetime_hours: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct VolumeResizeArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Id or name of the volume.
    pub(crate) volume: String,
    /// New space to reserve.
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: String,
    /// New number of files to reserve; defaults to the present one.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) files: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct VolumePutArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Id or name of the volume.
    pub(crate) volume: String,
    /// File or directory of this machine; `-` is standard input.
    pub(crate) source: PathBuf,
    /// Path in the volume; defaults to the name of the source. Its directories are made.
    #[arg(value_name = "PATH", value_parser = path_text(), required_if_eq("source", "-"))]
    pub(crate) path: Option<String>,
    /// Wait so long for another writer of the volume to end.
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    pub(crate) wait: u64,
}

#[derive(Debug, Args)]
pub(crate) struct VolumeGetArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Id or name of the volume.
    pub(crate) volume: String,
    /// Path of the file or directory in the volume; `/` is all of it.
    #[arg(value_name = "PATH", value_parser = path_text())]
    pub(crate) path: String,
    /// Target on this machine. A file may have an existing directory as its target, or `-`,
    /// standard output.
    pub(crate) target: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct VolumeLsArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Id or name of the volume.
    pub(crate) volume: String,
    /// Path of a file or directory in the volume; defaults to all of it.
    #[arg(
        value_name = "PATH",
        default_value = "",
        hide_default_value = true,
        value_parser = path_text()
    )]
    pub(crate) path: String,
}

#[derive(Debug, Args)]
pub(crate) struct VolumeArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Id or name of the volume.
    pub(crate) volume: String,
}

#[derive(Debug, Args)]
pub(crate) struct VolumeDeleteArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Id or name of the volume.
    #[arg(required_unless_present = "kept")]
    pub(crate) volume: Option<String>,
    /// All volumes that the last run of this workflow, or with this journal, keeps for the next.
    #[arg(long, value_name = "WORKFLOW", conflicts_with = "volume")]
    pub(crate) kept: Option<PathBuf>,
}

/// How a node enforces the limits of a scratch volume.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum LimitEnforcement {
    Exact,
    Watched,
}

#[derive(Debug, Args)]
pub(crate) struct VolumeCreateArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Name of the volume, without '/'. Names need not be unique; if several volumes have this
    /// name, other commands need the id.
    pub(crate) name: String,
    /// Name or address of the node.
    #[arg(long)]
    pub(crate) node: String,
    /// Id of the volume, 32 hexadecimal digits that you choose. The same command with the same id
    /// then finds the volume that it made before.
    #[arg(long, value_name = "ID")]
    pub(crate) id: Option<VolumeId>,
    /// Space to reserve.
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: String,
    /// Files to reserve; by default 10,000, for a larger scratch volume one per 16 KiB of its size.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) files: Option<u64>,
    /// How the node enforces the limits. `exact` rejects writes over a limit. `watched` gives jobs
    /// on the node the directory itself, at disk speed, and kills a job over a limit (exit code
    /// 75). The default is `watched` from 672 MB and 40,960 files on, else `exact`.
    #[arg(long, conflicts_with = "cache")]
    pub(crate) limit: Option<LimitEnforcement>,
    /// Fill the scratch volume from this home path (a URL).
    #[arg(long, value_name = "URL", conflicts_with = "cache", value_parser = path_text())]
    pub(crate) from: Option<String>,
    /// Create a cache volume for this home path (a URL).
    #[arg(long, value_name = "URL", value_parser = path_text())]
    pub(crate) cache: Option<String>,
    /// Cooperative cache to join; defaults to the volume's name. Volumes with the same cooperative
    /// cache and source share blocks.
    #[arg(long, requires = "cache")]
    pub(crate) cooperative: Option<String>,
    /// Delete the volume after this many hours without use.
    #[arg(
        long,
        alias = "hours",
        default_value_t = 24,
        value_parser = clap::value_parser!(u64).range(1..=87_600)
    )]
    pub(crate) lifetime_hours: u64,
}

#[derive(Debug, Args)]
pub(crate) struct VolumeReplicateArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Id or name of the volume.
    pub(crate) volume: String,
    /// Name or address of the node for the copy.
    #[arg(long)]
    pub(crate) to: String,
    /// Id of the copy, 32 hexadecimal digits that you choose. The same command with the same id
    /// then finds the copy that it made before.
    #[arg(long, value_name = "ID")]
    pub(crate) id: Option<VolumeId>,
}

#[derive(Debug, Args)]
pub(crate) struct VolumeExtractArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Id or name of the volume.
    pub(crate) volume: String,
    /// Path of the file in the volume. A set has files, directories such as `out/`, and patterns
    /// such as `*.txt`.
    #[arg(value_name = "PATH", required = true, num_args = 1.., value_parser = path_text())]
    pub(crate) paths: Vec<String>,
    /// URL of the target at home. That of a set ends with `/`.
    #[arg(value_parser = path_text())]
    pub(crate) target: String,
}
