//! Hands a cache volume over to an agent on the same machine, and answers its requests for blocks
//! and whole files. Opens no socket.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard};

use bafs_proto::fd_passing::{CacheHandoff, HandoffHeader, HandoffReply, HandoffRequest};
use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex, VolumeId};
use bafs_proto::net::BoxFuture;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use rustix::fs::{MemfdFlags, memfd_create};
use tokio::runtime::Handle;

use super::caches::Caches;
use super::errors::{run_blocking, source_changed};
use super::fetch::fetcher::Fetcher;
use super::fetch::read::{BlockReader, Materialised};
use super::fetch::read_ahead;
use super::generation::Generation;
use super::store::file_checks::release_when_closed;
use crate::cache::locks::lock;
use crate::fd_passing::{HandlerReply, Handoff, HandoffFactory, HandoffHandler};

/// Longest read over the socket, in milliseconds. After that the agent repeats it through the
/// network, with its own deadline; the blocks come meanwhile.
const READ_MS: u64 = 5_000;

impl Caches {
    /// Makes the hand-over of a cache volume, when its agent shows its ticket: the directory of the
    /// blocks, the two files of the map, and the lock that says who uses them.
    ///
    /// # Errors
    /// `VolumeLost`, `SourceChanged` when the volume shows another state of its source.
    pub fn prepare_handoff(&self, volume: VolumeId, manifest: Digest) -> Result<HandoffFactory> {
        let generation = self.volume(volume)?.generation();
        if generation.store.manifest.digest() != manifest {
            return Err(source_changed());
        }
        let fetcher = self.fetcher.clone();
        Ok(Box::new(move || Box::pin(hand_over(fetcher, generation))))
    }
}

async fn hand_over(fetcher: Arc<Fetcher>, generation: Arc<Generation>) -> Result<Handoff> {
    let store = generation.store.clone();
    let files = run_blocking(move || store.disk.open_for_agent(&store.manifest)).await??;
    let manifest = generation.store.manifest.digest();
    let recall = generation.store.watch_recall();
    let held = Arc::new(HeldFiles {
        generation,
        holds: Mutex::default(),
    });
    Ok(Handoff {
        header: HandoffHeader::Cache(CacheHandoff { manifest }),
        files,
        handler: Box::new(CacheHandoffHandler { fetcher, held }),
        recall,
    })
}

/// Answers one agent.
struct CacheHandoffHandler {
    fetcher: Arc<Fetcher>,
    held: Arc<HeldFiles>,
}

impl HandoffHandler for CacheHandoffHandler {
    fn answer(&mut self, request: HandoffRequest) -> BoxFuture<'static, HandlerReply> {
        let (fetcher, held) = (self.fetcher.clone(), self.held.clone());
        if let HandoffRequest::PinFile { file } = request {
            held.note_request(file);
        }
        Box::pin(async move {
            match request {
                HandoffRequest::PinFile { file } => held.open(file).await,
                HandoffRequest::ReleaseFile { file } => held.release(file),
                HandoffRequest::ReadBlocks { file, first, count } => {
                    read_blocks(&fetcher, &held.generation, file, (first, count)).await
                }
                HandoffRequest::ReportUse { .. } => {
                    let text = "a cache volume needs no account of its use";
                    Err(Error::new(ErrorCode::Unsupported, text))
                }
            }
        })
    }
}

/// Makes blocks readable for an agent on this machine. Blocks that the disk does not store go into
/// shared memory: without encryption and packets.
async fn read_blocks(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    file: FileIndex,
    (first, count): (BlockIndex, u32),
) -> HandlerReply {
    generation.store.check_not_recalled()?;
    let deadline = Deadline::after_ms(READ_MS);
    let materialised = match generation.store.find_run(file, first, count)? {
        Some(run) => {
            read_ahead::follow(fetcher, generation, &run);
            let reader = BlockReader::for_agent(fetcher, generation);
            reader.materialise(run, deadline).await?
        }
        None => Materialised::Bytes((Vec::new(), Bytes::new())),
    };
    let (digests, bytes) = match materialised {
        Materialised::Local => return Ok((HandoffReply::NowLocal, Vec::new())),
        Materialised::Bytes(data) => data,
    };
    let broken = |error: std::io::Error| {
        Error::new(
            ErrorCode::ServerFault,
            format!("make room for blocks in memory: {error}"),
        )
    };
    let mut memory = File::from(
        memfd_create("bafs-blocks", MemfdFlags::CLOEXEC).map_err(|error| broken(error.into()))?,
    );
    memory.write_all(&bytes).map_err(broken)?;
    Ok((HandoffReply::Blocks(digests), vec![memory.into()]))
}

/// The whole files that one agent has.
struct HeldFiles {
    generation: Arc<Generation>,
    holds: Mutex<BTreeMap<FileIndex, Holds>>,
}

/// How often one agent has a whole file.
#[derive(Default)]
struct Holds {
    given: u32,
    /// Requests without an answer so far.
    requested: u32,
    /// So many of them are given back already: the agent did not wait for the answer.
    waived: u32,
}

impl HeldFiles {
    /// Notes a request, in the order in which they come.
    fn note_request(&self, file: FileIndex) {
        self.lock().entry(file).or_default().requested += 1;
    }

    async fn open(&self, file: FileIndex) -> HandlerReply {
        let opened = self.generation.store.open_checked(file).await;
        let name = if opened.is_ok() {
            "cache_whole_files_opened"
        } else {
            "cache_whole_files_refused"
        };
        self.generation.statistics.add(name, 1);
        let is_waived = self.note_answer(file, opened.is_ok());
        let opened = opened?;
        if is_waived {
            drop(opened);
            tokio::spawn(release_when_closed(self.generation.store.clone(), file));
            let text = "the file was given back before it was handed over";
            return Err(Error::new(ErrorCode::WrongState, text));
        }
        Ok((HandoffReply::Pinned, vec![opened]))
    }

    /// Notes the answer to a request. Tells whether the file was given back before.
    fn note_answer(&self, file: FileIndex, is_given: bool) -> bool {
        let mut held = self.lock();
        let holds = held.entry(file).or_default();
        holds.requested -= 1;
        let is_waived = is_given && holds.waived > 0;
        if is_waived {
            holds.waived -= 1;
        } else if is_given {
            holds.given += 1;
        }
        holds.waived = holds.waived.min(holds.requested);
        if holds.given + holds.requested == 0 {
            held.remove(&file);
        }
        is_waived
    }

    fn release(&self, file: FileIndex) -> HandlerReply {
        let mut held = self.lock();
        let unknown = || {
            let text = format!("file {file} was not handed over");
            Error::new(ErrorCode::WrongState, text)
        };
        let holds = held.get_mut(&file).ok_or_else(unknown)?;
        if holds.given > 0 {
            holds.given -= 1;
            if holds.given + holds.requested == 0 {
                held.remove(&file);
            }
            tokio::spawn(release_when_closed(self.generation.store.clone(), file));
        } else if holds.waived < holds.requested {
            holds.waived += 1;
        } else {
            return Err(unknown());
        }
        Ok((HandoffReply::Done, Vec::new()))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<FileIndex, Holds>> {
        lock(&self.holds)
    }
}

impl Drop for HeldFiles {
    fn drop(&mut self) {
        // A node that stops releases all files.
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        for (file, holds) in std::mem::take(&mut *self.lock()) {
            for _ in 0..holds.given {
                runtime.spawn(release_when_closed(self.generation.store.clone(), file));
            }
        }
    }
}
