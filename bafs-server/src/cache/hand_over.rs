//! What of a cache volume is handed over to an agent on the same machine, and how it is taken back;
//! opens no socket.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::fd_passing::{CacheHandoff, HandoffHeader, HandoffReply, HandoffRequest};
use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex, VolumeId};
use bafs_proto::net::BoxFuture;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use rustix::fs::{MemfdFlags, memfd_create};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::bring::Brought;
use super::fetch::{Comparison, Fetcher, Generation};
use super::{Caches, blocking, bring_for, source_changed};
use crate::fd_passing::{HandlerReply, Handoff, HandoffFactory, HandoffHandler};

/// How long agents may take to give back whole files when a generation ends: their jobs are killed
/// meanwhile.
const TAKE_BACK_MS: u64 = 5_000;

/// Time for a read at the door, in milliseconds: who waits longer asks again through the network,
/// where it says how long it can wait; the blocks come meanwhile.
const READ_MS: u64 = 5_000;

/// How long a whole file may take to be compared before its agent, which waits a second for an
/// answer, is told to do without; the comparison goes on.
const COMPARE_MAX: Duration = Duration::from_millis(700);

/// Files from this size on are compared as soon as they are wholly here, so that the first who
/// opens one has it whole; smaller ones when they are opened, in no time.
const LARGE_BYTES: u64 = 32 << 20;

/// How often it is looked whether a file that somebody may still have open is free.
const LOOK: Duration = Duration::from_millis(20);
const LOOK_MAX: Duration = Duration::from_secs(1);

impl Caches {
    /// What makes the hand-over of a cache volume, when its agent is at the door: the directory of
    /// the blocks, the two files of the map, the lock that tells who uses them.
    ///
    /// # Errors
    /// `VolumeLost`, `SourceChanged` when the volume shows another state of its source.
    pub fn prepare_handoff(&self, volume: VolumeId, manifest: Digest) -> Result<HandoffFactory> {
        let generation = self.volume(volume)?.generation();
        if generation.manifest.digest() != manifest {
            return Err(source_changed());
        }
        let fetcher = self.fetcher.clone();
        Ok(Box::new(move || Box::pin(hand_over(fetcher, generation))))
    }

    /// Brings the counters up to date with what agents read without asking.
    pub fn count_local_reads(&self) {
        let volumes: Vec<_> = self.lock().values().cloned().collect();
        for volume in volumes {
            volume.generation().disk.count_near_reads();
        }
    }
}

async fn hand_over(fetcher: Arc<Fetcher>, generation: Arc<Generation>) -> Result<Handoff> {
    let shared = generation.clone();
    let files = blocking(move || shared.disk.share(&shared.manifest)).await??;
    let manifest = generation.manifest.digest();
    let recall = generation.recall().subscribe();
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
            held.note(file);
        }
        Box::pin(async move {
            match request {
                HandoffRequest::PinFile { file } => held.hold(file).await,
                HandoffRequest::ReleaseFile { file } => held.let_go(file),
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

/// Brings blocks to an agent on this machine: it reads them where they are kept. Those that are not
/// kept are laid down in memory that it gets: nothing is encrypted, cut into packets and put
/// together again.
async fn read_blocks(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    file: FileIndex,
    (first, count): (BlockIndex, u32),
) -> HandlerReply {
    generation.check_kept()?;
    let deadline = Deadline::after_ms(READ_MS);
    let blocks = (file, first, count);
    let (digests, bytes) = match bring_for(fetcher, generation, blocks, deadline).await? {
        Brought::Here => return Ok((HandoffReply::NowLocal, Vec::new())),
        Brought::Bytes(read) => read,
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

/// Knows which whole files one agent has.
struct HeldFiles {
    generation: Arc<Generation>,
    holds: Mutex<BTreeMap<FileIndex, Holds>>,
}

/// How often one agent has a whole file.
#[derive(Default)]
struct Holds {
    given: u32,
    /// Questions that are not answered yet.
    asked: u32,
    /// Of these, so many are given back already: the agent did not wait for the answer.
    waived: u32,
}

impl HeldFiles {
    /// Notes a question, in the order in which they come.
    fn note(&self, file: FileIndex) {
        self.lock().entry(file).or_default().asked += 1;
    }

    async fn hold(&self, file: FileIndex) -> HandlerReply {
        let opened = self.open(file).await;
        let name = if opened.is_ok() {
            "cache_whole_files_opened"
        } else {
            "cache_whole_files_refused"
        };
        self.generation.meter.add(name, 1);
        let is_waived = self.note_answer(file, opened.is_ok());
        let opened = opened?;
        if is_waived {
            drop(opened);
            tokio::spawn(let_go_when_free(self.generation.clone(), file));
            let text = "the file was given back before it was handed over";
            return Err(Error::new(ErrorCode::WrongState, text));
        }
        Ok((HandoffReply::Pinned, vec![opened]))
    }

    async fn open(&self, file: FileIndex) -> Result<OwnedFd> {
        self.generation.check_kept()?;
        if let Some(opened) = self.try_open(file).await? {
            return Ok(opened);
        }
        let later = || {
            let text = "the file is being compared with its digests, and is given whole after that";
            Error::new(ErrorCode::WrongState, text)
        };
        let compared = tokio::time::timeout(COMPARE_MAX, self.generation.compare(file));
        compared.await.map_err(|_| later())??;
        self.try_open(file).await?.ok_or_else(later)
    }

    async fn try_open(&self, file: FileIndex) -> Result<Option<OwnedFd>> {
        let generation = self.generation.clone();
        blocking(move || generation.disk.hold(&generation.manifest, file)).await?
    }

    /// Notes how a question was answered. Tells whether the file was given back before.
    fn note_answer(&self, file: FileIndex, is_given: bool) -> bool {
        let mut held = self.lock();
        let holds = held.entry(file).or_default();
        holds.asked -= 1;
        let is_waived = is_given && holds.waived > 0;
        if is_waived {
            holds.waived -= 1;
        } else if is_given {
            holds.given += 1;
        }
        holds.waived = holds.waived.min(holds.asked);
        if holds.given + holds.asked == 0 {
            held.remove(&file);
        }
        is_waived
    }

    fn let_go(&self, file: FileIndex) -> HandlerReply {
        let mut held = self.lock();
        let unknown = || {
            let text = format!("file {file} was not handed over");
            Error::new(ErrorCode::WrongState, text)
        };
        let holds = held.get_mut(&file).ok_or_else(unknown)?;
        if holds.given > 0 {
            holds.given -= 1;
            if holds.given + holds.asked == 0 {
                held.remove(&file);
            }
            tokio::spawn(let_go_when_free(self.generation.clone(), file));
        } else if holds.waived < holds.asked {
            holds.waived += 1;
        } else {
            return Err(unknown());
        }
        Ok((HandoffReply::Done, Vec::new()))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<FileIndex, Holds>> {
        self.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for HeldFiles {
    fn drop(&mut self) {
        // A node that ends lets everything go.
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        for (file, holds) in std::mem::take(&mut *self.lock()) {
            for _ in 0..holds.given {
                runtime.spawn(let_go_when_free(self.generation.clone(), file));
            }
        }
    }
}

/// Lets a file go as soon as nobody has it open: the kernel keeps it open for a program whose agent
/// is dead.
async fn let_go_when_free(generation: Arc<Generation>, file: FileIndex) {
    let mut pause = LOOK;
    loop {
        let look = generation.clone();
        match blocking(move || look.disk.let_go(file)).await {
            Ok(true) => return,
            Ok(false) => {}
            Err(error) => tracing::warn!(%file, %error, "a whole file is not let go"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LOOK_MAX);
    }
}

impl Generation {
    /// Has a file compared with its digests, in the background: whoever asks meanwhile hears the
    /// same.
    ///
    /// # Errors
    /// As of `super::disk::Disk::compare`.
    async fn compare(self: &Arc<Self>, file: FileIndex) -> Result<()> {
        let mut over = self.begin_to_compare(file);
        let told = over.wait_for(Option::is_some).await;
        let told = told.ok().and_then(|told| told.clone());
        told.unwrap_or_else(|| {
            let text = "the comparison of a file broke off";
            Err(Error::new(ErrorCode::ServerFault, text))
        })
    }

    /// Begins that, unless it is under way.
    pub(super) fn begin_to_compare(self: &Arc<Self>, file: FileIndex) -> Comparison {
        let begin = || {
            let (told, over) = watch::channel(None);
            tokio::spawn(self.clone().compare_alone(file, told));
            over
        };
        let mut comparing = self.comparing();
        comparing.entry(file).or_insert_with(begin).clone()
    }

    /// Whether all of a file is here for the first time, and so much that whoever opens it would
    /// not wait for its comparison.
    pub(super) fn is_large_and_new(&self, file: FileIndex) -> bool {
        let is_whole = |entry| {
            let blocks = self.manifest.blocks_of(entry);
            entry.identity.size >= LARGE_BYTES && self.disk.table().has_all_blocks(file, blocks)
        };
        let on_arrival = self.compared_on_arrival.lock();
        let mut on_arrival = on_arrival.unwrap_or_else(PoisonError::into_inner);
        self.manifest.file(file).is_ok_and(is_whole) && on_arrival.insert(file)
    }

    async fn compare_alone(
        self: Arc<Self>,
        file: FileIndex,
        told: watch::Sender<Option<Result<()>>>,
    ) {
        let _place = self.comparing_places.acquire().await;
        let generation = self.clone();
        let compared = blocking(move || {
            let (disk, manifest) = (&generation.disk, &generation.manifest);
            generation.check_kept()?;
            let path = disk.keep_whole(manifest, file)?;
            let goes_on = || generation.check_kept().is_ok();
            let compared = disk.compare(manifest, (file, &path), goes_on);
            Handle::current().spawn(let_go_when_free(generation.clone(), file));
            compared
        });
        let compared = compared.await.and_then(|compared| compared);
        self.meter.add("cache_whole_files_verified", 1);
        self.comparing().remove(&file);
        told.send_replace(Some(compared));
    }

    fn comparing(&self) -> MutexGuard<'_, BTreeMap<FileIndex, Comparison>> {
        self.comparing
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether agents may have more of it: if not, the reason why what they have is taken back.
    fn check_kept(&self) -> Result<()> {
        match &*self.recall().borrow() {
            Some(why) => Err(why.clone()),
            None => Ok(()),
        }
    }

    /// Tells agents why they must give everything back, and waits until they have.
    ///
    /// # Errors
    /// `Busy` when they do not; then they may go on.
    pub(super) async fn take_back(&self, why: Error) -> Result<()> {
        self.recall().send_replace(Some(why));
        for _ in 0..TAKE_BACK_MS / LOOK.as_millis() as u64 {
            if self.disk.check_unheld().is_ok() {
                return Ok(());
            }
            tokio::time::sleep(LOOK).await;
        }
        self.go_on();
        self.disk.check_unheld()
    }

    /// Ends the jobs that may have read damaged bytes without digests: their results are not to be
    /// trusted.
    pub(super) async fn take_back_hurt(&self) {
        let text = "a cached file is damaged on this node's disk, and jobs may have read wrong \
                    data; start them again, and check the disk";
        let why = Error::new(ErrorCode::VolumeLost, text);
        tracing::error!(%why, "jobs are ended");
        match self.take_back(why).await {
            Ok(()) => self.go_on(),
            Err(error) => {
                tracing::warn!(%error, "files with damage are still open");
                self.disk.hurt.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Undoes [`Generation::take_back`] for agents that come from now on. Those before are told
    /// even if they did not hear of it yet.
    pub(super) fn go_on(&self) {
        *self.recall() = watch::Sender::new(None);
    }

    fn recall(&self) -> MutexGuard<'_, watch::Sender<Option<Error>>> {
        self.recall.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
