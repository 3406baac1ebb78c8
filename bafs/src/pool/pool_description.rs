//! What a pool is, as the command line says it.

use std::sync::Arc;

use anyhow::{Context, Result};
use bafs_engine::logic::PoolSettings;
use bafs_engine::{Engine, EngineCommands, open_engine};
use bafs_workflow::parse_duration;

use super::pool_directory::PoolFile;
use crate::args::{PilotArgs, PoolSize, UsageError};
use crate::units::parse_bytes;

/// Time for a pool to end after it was asked to: the batch system answers, and pilots leave.
pub(super) const REMOVE_TIMEOUT_S: u64 = 120;

/// A pool as the command line describes it.
pub(super) fn describe_pool(
    size: PoolSize,
    node_size: &str,
    pilots: &PilotArgs,
) -> Result<PoolFile> {
    parse_bytes(node_size).context("--node-size")?;
    Ok(PoolFile {
        engine: size.engine.as_str().to_owned(),
        nodes_max: size.nodes,
        node_size: node_size.to_owned(),
        time_limit_s: parse_time_limit(pilots.time_limit.as_deref())?,
        hosts: pilots.pool_hosts.clone(),
        store: pilots.pool_store.clone(),
        engine_options: pilots.engine_options.clone(),
        ..PoolFile::default()
    })
}

fn parse_time_limit(text: Option<&str>) -> Result<Option<u64>> {
    let limit = text.map(parse_duration).transpose();
    limit.map_err(|error| UsageError::from_reason(format!("--time-limit is invalid: {error}")))
}

pub(super) fn open_pool_engine(pool: &PoolFile) -> Result<Arc<dyn Engine>> {
    let name = pool.engine.parse().map_err(UsageError::from_reason)?;
    let commands = EngineCommands::default();
    Ok(Arc::from(open_engine(
        name,
        commands,
        &pool.hosts,
        &pool.engine_options,
    )))
}

pub(super) fn pool_settings(pool: &PoolFile) -> PoolSettings {
    PoolSettings::new(pool.nodes_max, pool.time_limit_s)
}
