//! The end of a pool whose command was killed: its pilots are cancelled by their ids.

use anyhow::{Context, Result};
use bafs_engine::EngineError;

use super::pool_description::open_pool_engine;
use super::pool_directory::PoolDirectory;

/// Ends the pilots of a pool that nobody serves, and removes the pool.
///
/// # Errors
/// The batch system does not answer; then the pool stays.
pub(super) async fn end_pilots(directory: PoolDirectory) -> Result<()> {
    let engine = open_pool_engine(&directory.read_file()?)?;
    let (state, name) = (directory.read_state()?, directory.clone());
    let ended = tokio::task::spawn_blocking(move || {
        for pilot in &state.pilots {
            match pilot.pilot_id() {
                Some(id) => engine.cancel(&id)?,
                None => engine.cancel_named(&name.pilot_name(pilot.number))?,
            }
        }
        Ok::<(), EngineError>(())
    });
    ended
        .await?
        .context("the pilots of the pool are not ended; run the command again")?;
    directory.remove()
}
