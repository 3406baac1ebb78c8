//! Verifies whole files before agents read them without digests, and recalls such files. Opens no
//! socket.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bafs_proto::ids::FileIndex;
use bafs_proto::{Error, ErrorCode, Result};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};

use super::block_store::BlockStore;
use crate::cache::errors::run_blocking;
use crate::cache::locks::lock;

/// How long agents may take to give back whole files when a generation ends: their jobs are killed
/// meanwhile.
const RECALL_MS: u64 = 5_000;

/// Longest check of a file before its agent, which waits a second for an answer, gets a refusal;
/// the check goes on.
const CHECK_MAX: Duration = Duration::from_millis(700);

/// Files from this size on are checked as soon as they are complete, so that the first open gets
/// them whole. Smaller files are checked when they are opened, in no time.
const LARGE_BYTES: u64 = 32 << 20;

/// Most files of a volume that are checked at once: a check takes a processor.
const CHECKS_MAX: usize = 2;

/// Pauses between looks whether a released file is still open.
const LOOK: Duration = Duration::from_millis(20);
const LOOK_MAX: Duration = Duration::from_secs(1);

/// The result of a file check, once it has ended.
type FileCheck = watch::Receiver<Option<Result<()>>>;

/// Checks of whole files.
pub(super) struct FileChecks {
    running: Mutex<BTreeMap<FileIndex, FileCheck>>,
    /// Large files that were checked when they were complete. Each is checked once, or a block that
    /// comes and goes would cost the check of all others.
    completed: Mutex<BTreeSet<FileIndex>>,
    permits: Semaphore,
}

impl Default for FileChecks {
    fn default() -> Self {
        Self {
            running: Mutex::default(),
            completed: Mutex::default(),
            permits: Semaphore::new(CHECKS_MAX),
        }
    }
}

impl BlockStore {
    /// Opens a whole file for an agent, after a check if it needs one. The file stays whole until
    /// [`release_when_closed`].
    ///
    /// # Errors
    /// `WrongState` when blocks are absent or the check takes long; the reason of a recall;
    /// `ServerFault`.
    pub(crate) async fn open_checked(self: &Arc<Self>, file: FileIndex) -> Result<OwnedFd> {
        self.check_not_recalled()?;
        if let Some(opened) = self.try_open(file).await? {
            return Ok(opened);
        }
        let later = || {
            let text = "the file is being compared with its digests, and is given whole after that";
            Error::new(ErrorCode::WrongState, text)
        };
        let checked = tokio::time::timeout(CHECK_MAX, self.check_file(file));
        checked.await.map_err(|_| later())??;
        self.try_open(file).await?.ok_or_else(later)
    }

    async fn try_open(self: &Arc<Self>, file: FileIndex) -> Result<Option<OwnedFd>> {
        let store = self.clone();
        run_blocking(move || store.disk.open_whole(&store.manifest, file)).await?
    }

    /// Checks a file in the background. All callers of one check get the same result.
    async fn check_file(self: &Arc<Self>, file: FileIndex) -> Result<()> {
        let mut check = self.start_file_check(file);
        let result = check.wait_for(Option::is_some).await;
        let result = result.ok().and_then(|result| result.clone());
        result.unwrap_or_else(|| {
            let text = "the comparison of a file broke off";
            Err(Error::new(ErrorCode::ServerFault, text))
        })
    }

    /// Starts the check of a file, unless it runs.
    pub(super) fn start_file_check(self: &Arc<Self>, file: FileIndex) -> FileCheck {
        let start = || {
            let (sender, check) = watch::channel(None);
            tokio::spawn(self.clone().run_file_check(file, sender));
            check
        };
        self.running_checks()
            .entry(file)
            .or_insert_with(start)
            .clone()
    }

    /// Whether a file is complete for the first time, and so large that an open would not wait for
    /// its check.
    pub(super) fn is_newly_complete(&self, file: FileIndex) -> bool {
        let is_whole = |entry| {
            let blocks = self.manifest.blocks_of(entry);
            entry.identity.size >= LARGE_BYTES && self.disk.table().has_all_blocks(file, blocks)
        };
        let mut completed = lock(&self.checks.completed);
        self.manifest.file(file).is_ok_and(is_whole) && completed.insert(file)
    }

    async fn run_file_check(
        self: Arc<Self>,
        file: FileIndex,
        sender: watch::Sender<Option<Result<()>>>,
    ) {
        let _permit = self.checks.permits.acquire().await;
        let store = self.clone();
        let checked = run_blocking(move || {
            store.check_not_recalled()?;
            let path = store.disk.hold_file(&store.manifest, file)?;
            let goes_on = || store.check_not_recalled().is_ok();
            let verified = store
                .disk
                .verify_file(&store.manifest, file, &path, goes_on);
            Handle::current().spawn(release_when_closed(store.clone(), file));
            verified
        });
        let checked = checked.await.and_then(|checked| checked);
        self.disk.counters.add("cache_whole_files_verified", 1);
        self.running_checks().remove(&file);
        sender.send_replace(Some(checked));
    }

    fn running_checks(&self) -> MutexGuard<'_, BTreeMap<FileIndex, FileCheck>> {
        lock(&self.checks.running)
    }

    /// Checks that agents may get blocks.
    ///
    /// # Errors
    /// Why they must give back what they have.
    pub(crate) fn check_not_recalled(&self) -> Result<()> {
        match &*self.recall().borrow() {
            Some(why) => Err(why.clone()),
            None => Ok(()),
        }
    }

    /// Has agents give back everything, for this reason, and waits until they have.
    ///
    /// # Errors
    /// `Busy` when they do not; then they may go on.
    pub(crate) async fn recall_agents(&self, why: Error) -> Result<()> {
        self.recall().send_replace(Some(why));
        for _ in 0..RECALL_MS / LOOK.as_millis() as u64 {
            if self.disk.check_no_held_files().is_ok() {
                return Ok(());
            }
            tokio::time::sleep(LOOK).await;
        }
        self.end_recall();
        self.disk.check_no_held_files()
    }

    /// Ends the jobs that may have read damaged bytes without digests.
    pub(crate) async fn recall_after_damage(&self) {
        let text = "a cached file is damaged on this node's disk, and jobs may have read wrong \
                    data; start them again, and check the disk";
        let why = Error::new(ErrorCode::VolumeLost, text);
        tracing::error!(%why, "jobs are ended");
        match self.recall_agents(why).await {
            Ok(()) => self.end_recall(),
            Err(error) => {
                tracing::warn!(%error, "files with damage are still open");
                let has_damage = &self.disk.has_damage_under_readers;
                has_damage.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Undoes [`BlockStore::recall_agents`] for agents that come from now on. Earlier agents still
    /// get the recall.
    pub(crate) fn end_recall(&self) {
        *self.recall() = watch::Sender::new(None);
    }

    /// Becomes the reason of a recall, for agents that come now.
    pub(crate) fn watch_recall(&self) -> watch::Receiver<Option<Error>> {
        self.recall().subscribe()
    }

    fn recall(&self) -> MutexGuard<'_, watch::Sender<Option<Error>>> {
        lock(&self.recall)
    }
}

/// Releases a held file as soon as nobody has it open. The kernel keeps it open for a program whose
/// agent is dead.
pub(crate) async fn release_when_closed(store: Arc<BlockStore>, file: FileIndex) {
    let mut pause = LOOK;
    loop {
        let look = store.clone();
        match run_blocking(move || look.disk.release_file(file)).await {
            Ok(true) => return,
            Ok(false) => {}
            Err(error) => tracing::warn!(%file, %error, "a whole file is not released"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LOOK_MAX);
    }
}
