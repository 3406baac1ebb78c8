//! The command line of the servers: `bafs home`, `bafs catalog`, `bafs node`.

use std::path::PathBuf;
use std::time::Duration;

use bafs_proto::attributes::{AttributeValue, parse_attribute};
use bafs_proto::message::HEAD_ATTRIBUTES;
use clap::Args;

/// What all servers share.
#[derive(Debug, Clone, Args)]
pub(crate) struct ServerArgs {
    /// Directory that `bafs init` created.
    #[arg(long, env = "BAFS_IDENTITY", value_name = "DIR")]
    pub(crate) identity: PathBuf,
    /// Address to listen at, reachable by the other machines; port 0 takes any free port.
    #[arg(
        long,
        env = "BAFS_LISTEN",
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:0"
    )]
    pub(crate) listen: String,
    /// Publish metrics for Prometheus at this address, without authentication; port 0 takes any
    /// free port.
    #[arg(long, env = "BAFS_METRICS", value_name = "HOST:PORT")]
    pub(crate) metrics: Option<String>,
    /// Memory for active requests, over all connections. The server rejects requests over the
    /// limit, and clients retry them.
    #[arg(
        long,
        env = "BAFS_SERVER_MEMORY",
        value_name = "SIZE",
        default_value = "512MiB"
    )]
    pub(crate) memory: String,
    /// End when standard input closes, and thus with the parent process.
    #[arg(long)]
    pub(crate) until_stdin_closes: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs home --export ~/data --listen 10.0.0.1:7001 \
--catalog 10.0.0.1:7000 --rate-limit 1MB/s"
)]
pub(crate) struct HomeArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// Directory to export.
    #[arg(long, value_name = "DIR")]
    pub(crate) export: PathBuf,
    /// Name of this home in URLs, `bafs://NAME/path`.
    #[arg(long, default_value = "home")]
    pub(crate) name: String,
    /// Address of the catalog.
    #[arg(long, env = "BAFS_CATALOG", value_name = "HOST:PORT")]
    pub(crate) catalog: Option<String>,
    /// Maximum rate of this server's link, both directions together, such as 1MB/s.
    #[arg(long, alias = "limit", value_name = "RATE")]
    pub(crate) rate_limit: Option<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  bafs catalog --listen 10.0.0.1:7000")]
pub(crate) struct CatalogArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs node --store /var/tmp/bafs --size 100GB \
--listen 10.0.0.2:7002 --catalog 10.0.0.1:7000"
)]
pub(crate) struct NodeArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// Directory for volumes, on a local disk.
    #[arg(long, value_name = "DIR")]
    pub(crate) store: PathBuf,
    /// Space to offer for volumes.
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: String,
    /// Files to offer for volumes.
    #[arg(long, default_value_t = 1_000_000)]
    pub(crate) files: u64,
    /// Name of the node; defaults to the host name.
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Group of nodes that share cooperative caches; defaults to the subnet (/24, for IPv6 /64).
    #[arg(long, value_name = "NAME")]
    pub(crate) group: Option<String>,
    /// Memory of each agent for data in transit; defaults to 256 MiB.
    #[arg(long, env = "BAFS_AGENT_MEMORY", value_name = "SIZE")]
    pub(crate) agent_memory: Option<String>,
    /// Disk space of each slot for /tmp and /var/tmp; defaults to half of the disk space beyond
    /// --size, divided by the slots.
    #[arg(long, env = "BAFS_TMP", value_name = "SIZE")]
    pub(crate) tmp: Option<String>,
    /// Memory of each slot for /dev/shm; defaults to half of the machine's memory, divided by the
    /// slots.
    #[arg(long, env = "BAFS_SHARED_MEMORY", value_name = "SIZE")]
    pub(crate) shared_memory: Option<String>,
    /// Take blocks of a cache from other nodes without asking home what they are.
    #[arg(long)]
    pub(crate) trust_peers: bool,
    /// Let the kernel pass small file requests of this machine by io_uring, which takes a fraction
    /// of their time. Needs root, and Linux 6.14.
    #[arg(long)]
    pub(crate) enable_rings: bool,
    /// When the node ends: after a time such as 2h, or at @SECONDS since 1970. Jobs whose declared
    /// run time is longer do not start there, and its data are copied in time.
    #[arg(long, value_name = "TIME")]
    pub(crate) until: Option<String>,
    /// Time in which other nodes copy the data of this node before it ends, also after SIGTERM. The
    /// default fits into the 30 s that Slurm gives.
    #[arg(long, value_name = "TIME", default_value = "25s")]
    pub(crate) grace: String,
    /// Jobs to run at once; defaults to the number of processors; 0 makes a storage-only node.
    #[arg(long)]
    pub(crate) slots: Option<u32>,
    /// File with credentials and permitted directories for homes other than BAFS home servers;
    /// needs mode 0600.
    #[arg(long, env = "BAFS_HOMES", value_name = "FILE")]
    pub(crate) homes: Option<PathBuf>,
    /// Address of the catalog.
    #[arg(long, env = "BAFS_CATALOG", value_name = "HOST:PORT")]
    pub(crate) catalog: Option<String>,
    /// Attribute that describes the node, such as `disk=ssd` or `has_gpu=true`; `bafs servers
    /// --where` selects by it. May be repeated.
    #[arg(long = "attribute", value_name = "NAME=VALUE", value_parser = parse_own_attribute)]
    pub(crate) attributes: Vec<(String, AttributeValue)>,
    /// How long the node stays without its catalog; for ever if `None`. Only pilots say so.
    #[arg(skip)]
    pub(crate) catalog_timeout: Option<Duration>,
}

/// An attribute whose name the advert does not use itself.
fn parse_own_attribute(text: &str) -> Result<(String, AttributeValue), String> {
    let (name, value) = parse_attribute(text)?;
    match HEAD_ATTRIBUTES.contains(&name.as_str()) {
        true => Err(format!(
            "'{name}' is set by the node itself; choose another name"
        )),
        false => Ok((name, value)),
    }
}
