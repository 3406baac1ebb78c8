//! `bafs pool pilot`: the node inside a batch job. It ends when the batch system asks, and at its
//! time limit at the latest.

use std::fs;
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_proto::attributes::AttributeValue;
use nix::sys::signal::{Signal, raise};
use nix::unistd::geteuid;
use tokio::signal::unix::{SignalKind, signal};

use super::pool_directory::{PoolFile, identity_of, read_pool_file};
use crate::args::{NodeArgs, PilotNodeArgs, ServerArgs};
use crate::output::Printer;
use crate::serve;

/// Variables in which batch systems say how many processors a job has on its node.
const PROCESSOR_VARIABLES: [(&str, &str); 3] = [
    ("slurm", "SLURM_CPUS_ON_NODE"),
    ("sge", "NSLOTS"),
    ("htcondor", "OMP_NUM_THREADS"),
];

/// The end of a job of Slurm, in seconds since 1970.
const SLURM_END_VARIABLE: &str = "SLURM_JOB_END_TIME";

/// Time to leave, as `bafs node` has it by default: less than Slurm's `KillWait` of 30 s.
const GRACE: &str = "25s";

/// Memory for requests, as `bafs node` has it by default.
const REQUEST_MEMORY: &str = "512MiB";

/// Runs the node until the pilot ends.
pub(super) async fn run_pilot_node(args: PilotNodeArgs, output: Printer) -> Result<()> {
    let owner = fs::metadata(&args.directory)
        .with_context(|| format!("{} of the pool", args.directory.display()))?
        .uid();
    ensure!(
        owner == geteuid().as_raw(),
        "{} belongs to another user",
        args.directory.display()
    );
    let pool = read_pool_file(&args.directory)?;
    let store = make_store(&pool, &args.name)?;
    let _leaving = tokio::spawn(end_on_request());
    let ended = serve::run_node(build_node(&pool, &args, &store)?, output).await;
    let removed = fs::remove_dir_all(&store);
    ended?;
    removed.with_context(|| format!("remove {}", store.display()))
}

/// Turns each request to leave into the one that a server knows.
async fn end_on_request() {
    // Grid Engine announces its SIGKILL by SIGUSR2 and the end of a soft limit by SIGUSR1.
    tokio::select! {
        () = hear_signal(SignalKind::user_defined1()) => {}
        () = hear_signal(SignalKind::user_defined2()) => {}
    }
    let _ = raise(Signal::SIGTERM);
}

/// When the batch system ends the pilot: as it says itself, or after the time limit of the pool.
fn find_end(time_limit_s: Option<u64>) -> Option<String> {
    let told = std::env::var(SLURM_END_VARIABLE).ok();
    let told = told.and_then(|text| text.parse::<u64>().ok());
    told.map(|end| format!("@{end}"))
        .or_else(|| time_limit_s.map(|limit_s| format!("{limit_s}s")))
}

async fn hear_signal(kind: SignalKind) {
    match signal(kind) {
        Ok(mut heard) => drop(heard.recv().await),
        Err(_) => std::future::pending().await,
    }
}

/// A directory of its own on a local disk of the node. A requeued pilot finds none of its own.
fn make_store(pool: &PoolFile, name: &str) -> Result<PathBuf> {
    let place = pool.store.clone().unwrap_or_else(std::env::temp_dir);
    let store = place.join(format!("{name}-{}", std::process::id()));
    fs::create_dir_all(&place)
        .and_then(|()| fs::create_dir(&store))
        .with_context(|| format!("cannot create the store {}", store.display()))?;
    Ok(store)
}

fn build_node(pool: &PoolFile, args: &PilotNodeArgs, store: &Path) -> Result<NodeArgs> {
    let address = find_own_address(&pool.catalog)?;
    Ok(NodeArgs {
        server: ServerArgs {
            identity: identity_of(&args.directory),
            listen: SocketAddr::new(address.ip(), 0).to_string(),
            metrics: None,
            memory: REQUEST_MEMORY.to_owned(),
            until_stdin_closes: false,
        },
        store: store.to_owned(),
        size: pool.node_size.clone(),
        files: 1_000_000,
        name: Some(args.name.clone()),
        group: None,
        agent_memory: None,
        tmp: None,
        shared_memory: None,
        trust_peers: false,
        enable_rings: false,
        slots: count_processors(&pool.engine),
        homes: None,
        until: find_end(pool.time_limit_s),
        grace: GRACE.to_owned(),
        catalog: Some(pool.catalog.clone()),
        attributes: vec![(
            "batch_system".to_owned(),
            AttributeValue::Text(pool.engine.clone()),
        )],
        catalog_timeout: pool.catalog_timeout_s.map(Duration::from_secs),
    })
}

/// Processors that the batch system gave to the job; nothing leaves the count to the node.
fn count_processors(engine: &str) -> Option<u32> {
    let mut variables = PROCESSOR_VARIABLES.iter();
    let (_, variable) = variables.find(|(name, _)| *name == engine)?;
    let count: u32 = std::env::var(variable).ok()?.trim().parse().ok()?;
    (count > 0).then_some(count)
}

/// The address of this machine on its way to another: nothing is sent.
pub(crate) fn find_own_address(other: &str) -> Result<SocketAddr> {
    let mut others = other
        .to_socket_addrs()
        .with_context(|| format!("the address {other}"))?;
    let other = others
        .next()
        .with_context(|| format!("{other} has no address"))?;
    let any = if other.is_ipv4() {
        "0.0.0.0:0"
    } else {
        "[::]:0"
    };
    let socket = UdpSocket::bind(any)?;
    socket
        .connect(other)
        .with_context(|| format!("no way from this machine to {other}"))?;
    Ok(socket.local_addr()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_catalog_is_reached_from_loopback() {
        let address = find_own_address("127.0.0.1:9").expect("an address");
        assert!(address.ip().is_loopback(), "{address}");
        assert!(find_own_address("nowhere").is_err());
    }
}
