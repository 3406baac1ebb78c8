//! Reads blocks from home, so many requests at once as a wide-area link needs. Keeps nothing.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use bafs_proto::message::ReadSource;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};

use super::arrival::BlockOrigin;
use super::disk::Run;
use super::fetch::{FLIGHT_MS_MAX, Fetcher, Generation};
use super::flights::{Block, Urgency};
use crate::clock;

/// How long a fetch waits for its turn to ask home: readers give up earlier, and find the blocks
/// here when they come back.
const GATE_MS_MAX: u64 = 600_000;

/// How often home is asked for a block whose bytes arrive damaged.
const HOME_TRIES_MAX: u32 = 2;

impl Fetcher {
    /// Reads a run from home, when it is its turn.
    ///
    /// # Errors
    /// What home answers; `ServerFault` when its bytes do not match its digests.
    pub(crate) async fn fetch_from_home(
        &self,
        generation: &Arc<Generation>,
        run: &Run,
        urgency: &Urgency,
    ) -> Result<Vec<Block>> {
        let manifest = &generation.manifest;
        let entry = manifest.file(run.file)?;
        let call = ReadSource {
            path: manifest.home_path(entry),
            identity: entry.identity,
            offset: run.at(0),
            length: run.bytes() as u32,
            block_bytes: run.block_bytes,
        };
        let token = generation
            .source_token
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let gate = self.gate(manifest.home().address);
        let _pass = gate.enter(urgency, Deadline::after_ms(GATE_MS_MAX)).await?;
        // Its time begins when it is its turn: what waited long would be asked for in vain.
        let deadline = Deadline::after_ms(FLIGHT_MS_MAX);
        let mut tries = 0;
        loop {
            tries += 1;
            let asked = self
                .homes
                .read(manifest.home(), &token, call.clone(), deadline);
            let (data, body) = asked.await?;
            let now = clock::now();
            gate.note_answer(now);
            generation.home_answered_ms.store(now.0, Ordering::Relaxed);
            generation.meter.add("cache_home_reads", 1);
            generation.meter.add("cache_home_bytes", body.len() as u64);
            match generation
                .check(run, data.digests, body, BlockOrigin::Home)
                .await
            {
                Ok(blocks) if blocks.iter().all(Option::is_some) => {
                    return Ok(blocks.into_iter().flatten().collect());
                }
                Err(error) if tries < HOME_TRIES_MAX => {
                    tracing::warn!(%error, "home is asked once more");
                }
                Err(error) => return Err(error),
                Ok(_) => {
                    let text = "home sent a digest that no bytes have";
                    return Err(Error::new(ErrorCode::ServerFault, text));
                }
            }
        }
    }
}
