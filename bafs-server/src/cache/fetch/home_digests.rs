//! What home says of the blocks of a generation: blocks that peers send are compared with it, so
//! that no peer can pass off other bytes. Homes that are no home server know no digests; then the
//! node that read a block first is believed. Reads no block.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex};
use bafs_proto::limits::{BODY_BYTES_MAX, DIGESTS_MAX};
use bafs_proto::message::{PeerCheck, ReadDigests, SourceBlocks, SourceKind};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};

use super::fetcher::Fetcher;
use crate::cache::block_run::BlockRun;
use crate::cache::errors::run_blocking;
use crate::cache::generation::Generation;
use crate::cache::locks::{lock, read_lock};
use crate::digest_log::{DigestLog, DigestRecord};
use crate::home_clients::HomeAddress;
use crate::logic::digest_memory::DigestMemory;

/// Digests of a generation that a node remembers beside those of its own blocks: 32 MiB, for 64 GiB
/// in blocks of 64 KiB.
pub(crate) const REMEMBERED_MAX: usize = 1 << 20;

/// What a node keeps of them for its next start, in bytes for each generation.
const LOG_BYTES_MAX: u64 = (REMEMBERED_MAX * size_of::<Digest>()) as u64;

/// The log in the directory of a generation.
const LOG_FILE: &str = "home-digests";

/// Digests that are asked for beyond the needed ones, at first. The number doubles while home knows
/// them, so that at most as much is asked in vain as is used.
const WELCOME_MIN: u32 = 64;

/// Most bytes of the ranges of a call, of which each takes its path and [`RANGE_BYTES`].
const RANGES_BYTES_MAX: usize = 64 << 10;
const RANGE_BYTES: usize = 64;

/// What home says of the blocks of a generation.
#[derive(Debug)]
pub(crate) struct HomeDigests {
    known: Mutex<DigestMemory<FileIndex>>,
    /// The same for the next start of the node, which may be cut off from home then.
    log: Arc<DigestLog>,
    lookahead: Mutex<Lookahead>,
    /// Home said that it knows no digests.
    has_none: AtomicBool,
    /// Whether readers wait for what home says, which was told.
    is_waiting: AtomicBool,
}

/// How many more digests a call asks for. One call at a time does.
#[derive(Debug)]
struct Lookahead {
    count: u32,
    is_under_way: bool,
}

/// The right to ask for more digests than needed, until it is dropped.
struct LookaheadTurn<'a> {
    digests: &'a HomeDigests,
    count: u32,
}

impl Drop for LookaheadTurn<'_> {
    fn drop(&mut self) {
        lock(&self.digests.lookahead).is_under_way = false;
    }
}

impl HomeDigests {
    /// Takes up what was known of a generation, by its directory (waits for the disk).
    pub(crate) fn open(directory: &Path) -> Self {
        let mut known = DigestMemory::new(REMEMBERED_MAX);
        let log = DigestLog::open(directory.join(LOG_FILE), LOG_BYTES_MAX, |record| {
            known.insert(index_of(record.file), record.first, &record.digests);
        });
        Self {
            known: Mutex::new(known),
            log: Arc::new(log),
            lookahead: Mutex::new(Lookahead {
                count: WELCOME_MIN,
                is_under_way: false,
            }),
            has_none: AtomicBool::new(false),
            is_waiting: AtomicBool::new(false),
        }
    }

    /// Notes what home says, also for the next start.
    async fn note(&self, said: Vec<(FileIndex, u64, Vec<Digest>)>) -> Result<()> {
        {
            let mut known = self.known();
            for (file, first, digests) in &said {
                known.insert(*file, *first, digests);
            }
        }
        let said = said.into_iter().filter(|it| !it.2.is_empty());
        let records = said.map(|(file, first, digests)| DigestRecord {
            file: name_of(file),
            first,
            digests,
        });
        let (log, records) = (self.log.clone(), records.collect::<Vec<_>>());
        run_blocking(move || log.append(&records)).await
    }

    /// Says once that readers wait for home, and once that they do no more.
    fn tell_waiting(&self, home: HomeAddress<'_>, error: Option<&Error>) {
        let was_waiting = self.is_waiting.swap(error.is_some(), Ordering::Relaxed);
        match error {
            Some(error) if !was_waiting => tracing::warn!(
                home = home.address,
                "readers wait for blocks that other nodes have: home does not say what they are, \
                 and this node does not know it: {error}"
            ),
            None if was_waiting => tracing::info!(
                home = home.address,
                "home says again what the blocks of other nodes are"
            ),
            _ => {}
        }
    }

    fn known(&self) -> MutexGuard<'_, DigestMemory<FileIndex>> {
        lock(&self.known)
    }

    fn begin_lookahead(&self) -> Option<LookaheadTurn<'_>> {
        let mut lookahead = lock(&self.lookahead);
        let is_mine = !std::mem::replace(&mut lookahead.is_under_way, true);
        let count = lookahead.count;
        // An unused turn would end that of the other call.
        is_mine.then(|| LookaheadTurn {
            digests: self,
            count,
        })
    }

    /// Adapts the number of welcome digests to how many of them home knew.
    fn adapt_lookahead(&self, asked: usize, known: usize) {
        let mut lookahead = lock(&self.lookahead);
        lookahead.count = match known * 2 >= asked {
            true => (lookahead.count * 2).min(DIGESTS_MAX / 2),
            false => (lookahead.count / 2).max(WELCOME_MIN),
        };
    }
}

/// A file in the log.
fn name_of(file: FileIndex) -> Digest {
    let mut name = [0; 32];
    name[..size_of::<u32>()].copy_from_slice(&file.0.to_le_bytes());
    Digest(name)
}

/// Back from the log.
fn index_of(Digest(name): Digest) -> FileIndex {
    FileIndex(u32::from_le_bytes([name[0], name[1], name[2], name[3]]))
}

impl Generation {
    /// What home says of the blocks of a run, if this node knows it of all.
    fn known_digests(&self, run: &BlockRun) -> Option<Vec<Digest>> {
        let mut known = self
            .digests
            .known()
            .known_from(run.file, run.first, run.count);
        let table = self.store.disk.table();
        for key in run.keys().skip(known.len()) {
            known.push(table.digest_of(key)?);
        }
        Some(known)
    }

    /// The call for the digests of a run, and which files its welcome blocks are of.
    fn digest_call(&self, run: &BlockRun, welcome: u32) -> Result<(ReadDigests, Vec<FileIndex>)> {
        let manifest = &self.store.manifest;
        let (top, is_file) = (manifest.home_top(), manifest.is_file());
        let range = |file: FileIndex, first: u64, count: u32| {
            let entry = manifest.file(file)?;
            let path = if is_file { "" } else { entry.path.as_str() };
            Ok::<_, Error>(SourceBlocks {
                path: path.to_owned(),
                identity: entry.identity,
                first: BlockIndex(first),
                count,
            })
        };
        let needed = range(run.file, run.first, run.count as u32)?;
        let (mut ranges, mut files) = (Vec::new(), Vec::new());
        let mut left = u64::from(welcome);
        let mut bytes = 0;
        let mut first = run.first + run.count as u64;
        let entries = (run.file.0..).zip(manifest.entries().iter().skip(run.file.0 as usize));
        for (number, entry) in entries {
            let start = std::mem::take(&mut first);
            let blocks = match entry.kind {
                SourceKind::File => manifest.blocks_of(entry).saturating_sub(start),
                _ => 0,
            };
            if blocks == 0 {
                continue;
            }
            bytes += entry.path.len() + RANGE_BYTES;
            if left == 0 || bytes > RANGES_BYTES_MAX {
                break;
            }
            let file = FileIndex(number);
            let count = blocks.min(left);
            left -= count;
            let is_known = !self.digests.known().known_from(file, start, 1).is_empty();
            if !is_known {
                ranges.push(range(file, start, count as u32)?);
                files.push(file);
            }
        }
        let call = ReadDigests {
            path: top.to_owned(),
            block_bytes: run.block_bytes,
            needed,
            welcome: ranges,
        };
        Ok((call, files))
    }
}

impl Fetcher {
    /// What tells this node that blocks of other nodes are right.
    pub(crate) fn peer_check(&self, generation: &Generation) -> PeerCheck {
        let knows_digests = || self.homes.knows_digests(generation.store.manifest.home());
        if self.trusts_peers() {
            PeerCheck::Nothing
        } else if generation.digests.has_none.load(Ordering::Relaxed) || !knows_digests() {
            PeerCheck::FirstReader
        } else {
            PeerCheck::Home
        }
    }

    /// What home says of the blocks of a run; asks home as far as this node does not know it.
    /// `None` if the peers are trusted: the node is told to, or the home knows no digests.
    ///
    /// # Errors
    /// `Busy` while home does not answer: readers wait for home, not for a peer. Else what home
    /// answers, as `SourceChanged`.
    pub(super) async fn learn_digests(
        &self,
        generation: &Generation,
        run: &BlockRun,
        deadline: Deadline,
    ) -> Result<Option<Vec<Digest>>> {
        let digests = &generation.digests;
        if self.peer_check(generation) != PeerCheck::Home {
            return Ok(None);
        }
        if let Some(known) = generation.known_digests(run) {
            return Ok(Some(known));
        }
        let lookahead = digests.begin_lookahead();
        let welcome = lookahead.as_ref().map_or(0, |turn| turn.count);
        let (call, files) = generation.digest_call(run, welcome)?;
        let token = read_lock(&generation.inflight.source_token).clone();
        let home = generation.store.manifest.home();
        let asked = self
            .homes
            .read_digests(home, &token, call.clone(), deadline);
        let said = match asked.await {
            Ok(said) => said,
            Err(error) if error.code == ErrorCode::Unsupported => {
                digests.has_none.store(true, Ordering::Relaxed);
                return Ok(None);
            }
            Err(error) if error.is_transient() => {
                digests.tell_waiting(home, Some(&error));
                let text = format!("home does not say what the blocks are: {error}");
                return Err(Error::new(ErrorCode::Busy, text));
            }
            Err(error) => return Err(error),
        };
        if said.needed.len() != run.count || said.welcome.len() != files.len() {
            let text = "home says too little of the blocks";
            return Err(Error::new(ErrorCode::ServerFault, text));
        }
        generation.statistics.add("cache_digest_calls", 1);
        digests.tell_waiting(home, None);
        let mut learned = vec![(run.file, run.first, said.needed.clone())];
        for ((file, range), said) in files.iter().zip(&call.welcome).zip(&said.welcome) {
            learned.push((*file, range.first.0, said.clone()));
        }
        digests.note(learned).await?;
        if lookahead.is_some() {
            let asked = call.welcome.iter().map(|range| range.count as usize).sum();
            digests.adapt_lookahead(asked, said.welcome.iter().map(Vec::len).sum());
        }
        Ok(Some(said.needed))
    }

    /// Learns what home says of all blocks of some files, so that peers can give them also while
    /// home is away. Does nothing for more blocks than a node remembers.
    ///
    /// # Errors
    /// As [`Self::learn_digests`].
    pub(crate) async fn learn_digests_of(
        &self,
        generation: &Generation,
        files: &[FileIndex],
        deadline: Deadline,
    ) -> Result<()> {
        let manifest = &generation.store.manifest;
        let step = u64::from(BODY_BYTES_MAX / manifest.block_bytes());
        let mut runs = Vec::new();
        for file in files {
            let blocks = manifest.blocks_of(manifest.file(*file)?);
            for first in (0..blocks).step_by(step as usize) {
                let run = generation
                    .store
                    .run(*file, first, step.min(blocks - first))?;
                runs.push(run);
            }
        }
        let blocks: usize = runs.iter().map(|run| run.count).sum();
        if blocks > REMEMBERED_MAX / 2 {
            return Ok(());
        }
        for run in runs {
            if self
                .learn_digests(generation, &run, deadline)
                .await?
                .is_none()
            {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn digests_outlast_the_restart_of_a_node() {
        let directory = tempfile::tempdir().expect("a directory");
        let said: Vec<Digest> = (0..100u8).map(|n| Digest::of(&[n])).collect();
        let digests = HomeDigests::open(directory.path());
        let noted = vec![
            (FileIndex(0), 0, said[..10].to_vec()),
            (FileIndex(70_000), 5, said.clone()),
            (FileIndex(3), 0, Vec::new()),
        ];
        digests.note(noted).await.expect("noted");
        drop(digests);
        let digests = HomeDigests::open(directory.path());
        let known = |file, first| digests.known().known_from(FileIndex(file), first, 1_000);
        assert_eq!(known(0, 0), said[..10]);
        assert_eq!(known(70_000, 5), said);
        assert_eq!(known(3, 0), []);
    }

    #[test]
    fn lookahead_grows_while_home_knows_more() {
        let directory = tempfile::tempdir().expect("a directory");
        let digests = HomeDigests::open(directory.path());
        let count = || digests.begin_lookahead().map(|turn| turn.count);
        assert_eq!(count(), Some(WELCOME_MIN));
        digests.adapt_lookahead(64, 64);
        digests.adapt_lookahead(128, 100);
        assert_eq!(count(), Some(4 * WELCOME_MIN));
        digests.adapt_lookahead(256, 3);
        let turn = digests.begin_lookahead();
        assert_eq!(turn.as_ref().map(|turn| turn.count), Some(2 * WELCOME_MIN));
        assert_eq!(count(), None, "one call at a time asks for more");
        drop(turn);
        assert_eq!(count(), Some(2 * WELCOME_MIN));
    }
}
