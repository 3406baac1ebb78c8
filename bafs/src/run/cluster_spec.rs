//! The cluster of a run, as the command line names or describes it. Starts nothing.

use std::path::Path;

use anyhow::{Context, Result, bail};

use super::{NODE_SIZE_DEFAULT, local_report};
use crate::args::{RunArgs, UsageError};
use crate::cluster::ClusterSpec;
use crate::pool::choose_address;
use crate::program_file::program_file;
use crate::serve;
use crate::units::{parse_bytes, parse_rate_limit};

/// Nodes of a throw-away cluster: each is a process, with a store of its own.
const LOCAL_NODES_MAX: u32 = 256;

/// The throw-away cluster that is asked for.
pub(super) fn build_cluster_spec(args: &RunArgs, nodes: u32) -> Result<ClusterSpec> {
    let refused = |why: String| UsageError::from_reason(format!("--local {nodes}: {why}"));
    if args.local == Some(0) {
        return Err(refused("a cluster needs a node".to_owned()));
    }
    if nodes > LOCAL_NODES_MAX {
        let most = format!("one machine runs {LOCAL_NODES_MAX} nodes at most");
        return Err(refused(most));
    }
    let size = args
        .node_size
        .clone()
        .unwrap_or_else(|| NODE_SIZE_DEFAULT.to_owned());
    let size_bytes = parse_bytes(&size).context("--node-size")?;
    parse_rate_limit(args.home_rate.as_deref())?;
    let file = args.workflow.canonicalize()?;
    let beside = || {
        file.parent()
            .map(Path::to_owned)
            .context("a file has a directory")
    };
    let export = match &args.export {
        Some(directory) => serve::resolve_export(directory)?,
        None => beside()?,
    };
    let cores = u32::try_from(std::thread::available_parallelism()?.get())?;
    warn_of_small_disk(nodes, size_bytes);
    let listen_host = args
        .pool
        .map(|_| choose_address(args.pool_address.as_deref()));
    Ok(ClusterSpec {
        listen_host,
        program: program_file()?.to_owned(),
        export,
        home_rate: args.home_rate.clone(),
        node_sizes: vec![size; nodes as usize],
        slots: cores.div_ceil(nodes.max(1)),
        has_metrics: false,
        is_kept: false,
    })
}

/// Tells of nodes that offer more than the disk has where their stores will be. Each would say so
/// in its own log only.
fn warn_of_small_disk(nodes: u32, size_bytes: u64) {
    let place = std::env::temp_dir();
    let all = serve::disk_bytes(&place);
    let told =
        all.and_then(|all| local_report::oversubscription_message(nodes, size_bytes, &place, all));
    if let Some(told) = told {
        eprintln!("warning: {told}");
    }
}

/// Identity and catalog of the cluster that the command line names.
pub(super) fn named_cluster(args: &RunArgs) -> Result<(&Path, &str)> {
    let (Some(identity), Some(catalog)) = (&args.identity, &args.catalog) else {
        bail!(
            "no cluster is named; give --local 4 for a temporary cluster on this machine, or \
             --identity DIR and --catalog HOST:PORT for an existing one"
        );
    };
    Ok((identity, catalog))
}
