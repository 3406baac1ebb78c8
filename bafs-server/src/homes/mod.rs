//! Homes as a node reaches them, of whatever kind: one trait, an implementation for each kind, and
//! the choice between them. Keeps no data; checks rights where no home server does.
//!
//! An address without `://` is that of a home server; any other is a URL of scheme and host, and
//! the path is below it.

mod bafs;
mod file;
mod ftp;
mod host;
mod listing;
mod objects;
mod packs;
mod settings;
mod sftp;
#[cfg(test)]
pub(crate) mod slow;
mod whereabouts;

pub use settings::HomeSettings;
pub(crate) use whereabouts::At;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bafs_proto::hash::Digest;
use bafs_proto::ids::{ExtractId, ServerId};
use bafs_proto::limits::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, BODY_BYTES_MAX};
use bafs_proto::message::{
    Advert, ListSource, PutProgress, PutReceipt, ReadSource, SourceData, SourcePage,
};
use bafs_proto::net::BoxFuture;
use bafs_proto::net::pool::Pool;
use bafs_proto::path::{check_relative, check_result};
use bafs_proto::replica::ReadSources;
use bafs_proto::time::Deadline;
use bafs_proto::token::{Resource, Right, Token, Verifier};
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use crate::access::Access;
use bafs::{BafsHome, Place};
use file::Files;
use ftp::Ftp;
use host::Addressed;
use objects::{Bucket, Web};
use sftp::Sftp;
use whereabouts::Whereabouts;

/// Time for one call that moves a piece or nothing, in milliseconds: on a home link of 1 MB/s some
/// fifty pieces may go before one of 1 MiB.
pub(crate) const CALL_MS: u64 = 60_000;

/// What the slowest link moves, in bytes per millisecond.
const BYTES_PER_MS_MIN: u64 = 100;

/// Pause before a failed call is repeated, in milliseconds; doubles up to the maximum.
const PAUSE_MS_MIN: u64 = 50;
const PAUSE_MS_MAX: u64 = 2_000;

/// Names of unfinished uploads at homes that have no other place for them begin so.
const UPLOAD_PREFIX: &str = ".bafs-put-";

/// A file on its way to a home.
pub(crate) struct Put {
    /// The upload; the same one resumes.
    pub(crate) extract: ExtractId,
    /// Address of the home.
    pub(crate) home: String,
    /// Which home server that is; `None` for whoever is there.
    pub(crate) home_id: Option<ServerId>,
    /// Where the file shall be.
    pub(crate) path: String,
    /// Permission bits.
    pub(crate) mode: u32,
    /// Size in bytes.
    pub(crate) size: u64,
    /// Capability for the place.
    pub(crate) token: Token,
}

impl Put {
    /// The home that it goes to.
    pub(crate) fn at(&self) -> At<'_> {
        At {
            address: &self.home,
            id: self.home_id,
        }
    }
}

/// A home of some kind, at one address. A call is made once; a late one is dropped by the caller.
trait Home: Send + Sync {
    /// A page of what is below a path, in path order.
    fn list<'a>(
        &'a self,
        token: &'a Token,
        call: ListSource,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<SourcePage>>;

    /// A range of a file that is still what it was, with the digests of its pieces.
    fn read<'a>(
        &'a self,
        token: &'a Token,
        call: ReadSource,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<(SourceData, Bytes)>>;

    /// Whether it gives many small files in one answer, and takes them with one call.
    fn packs(&self) -> bool {
        false
    }

    /// Small files that are still what they were, whole, with the digests of their pieces; from a
    /// home that packs.
    fn read_files<'a>(
        &'a self,
        _token: &'a Token,
        _call: ReadSources,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<(SourceData, Bytes)>> {
        let text = "such a home gives its files one by one";
        Box::pin(async move { Err(Error::new(ErrorCode::Unsupported, text)) })
    }

    /// Begins an upload or shows where it is. Nothing is visible before the commit.
    fn begin<'a>(&'a self, put: &'a Put, deadline: Deadline) -> BoxFuture<'a, Result<PutProgress>>;

    /// Pieces of one upload that may be under way at once; only a home that puts them in order
    /// takes more than one.
    fn pieces_max(&self) -> usize {
        1
    }

    /// Adds bytes that follow on what was received, or on what is under way.
    fn write<'a>(
        &'a self,
        put: &'a Put,
        offset: u64,
        data: Bytes,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutProgress>>;

    /// Puts an upload in place, whole and with this digest; the file is durable then.
    fn commit<'a>(
        &'a self,
        put: &'a Put,
        digest: Digest,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutReceipt>>;

    /// Puts a small file in place, as the three calls above do.
    fn put<'a>(
        &'a self,
        put: &'a Put,
        data: Bytes,
        digest: Digest,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutReceipt>> {
        Box::pin(async move {
            let progress = self.begin(put, deadline).await?;
            if let Some(receipt) = progress.receipt {
                return Ok(receipt);
            }
            let received = progress.received_bytes;
            let start = usize::try_from(received).unwrap_or(usize::MAX);
            if start > data.len() {
                let text = format!("home has {received} bytes of a file of {}", data.len());
                return Err(Error::new(ErrorCode::WrongState, text));
            }
            if start < data.len() {
                self.write(put, received, data.slice(start..), deadline)
                    .await?;
            }
            self.commit(put, digest, deadline).await
        })
    }
}

/// Homes by address and who must be there.
type Known = BTreeMap<(String, Option<ServerId>), Arc<dyn Home>>;

/// All homes that a node can reach.
pub struct Homes {
    pool: Pool,
    /// Checks what a home server would check; without it only home servers are reached.
    access: Option<Arc<Access>>,
    settings: HomeSettings,
    /// Made when first asked for.
    known: Mutex<Known>,
    whereabouts: Whereabouts,
}

impl std::fmt::Debug for Homes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Homes")
    }
}

impl Homes {
    /// Home servers only.
    pub fn servers_only(pool: Pool) -> Arc<Self> {
        Arc::new(Self {
            pool,
            access: None,
            settings: HomeSettings::default(),
            known: Mutex::default(),
            whereabouts: Whereabouts::default(),
        })
    }

    /// Homes of every kind, for those who have a right of this authority.
    pub fn new(pool: Pool, verifier: Verifier, settings: HomeSettings) -> Arc<Self> {
        Arc::new(Self {
            pool,
            access: Some(Arc::new(Access::new(verifier))),
            settings,
            known: Mutex::default(),
            whereabouts: Whereabouts::default(),
        })
    }

    /// Connections to other servers.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Learns from a catalog's listing where home servers are now.
    pub fn learn(&self, adverts: &[Advert]) {
        self.whereabouts.learn(adverts);
    }

    /// A page of a listing, asked for again while that fails transiently.
    ///
    /// # Errors
    /// What the home answers; `Unsupported` when no home of that kind is reached from here;
    /// `RightMissing`, `BadPath`; `DeadlineExceeded`.
    pub(crate) async fn list(
        &self,
        at: At<'_>,
        token: &Token,
        call: ListSource,
        deadline: Deadline,
    ) -> Result<SourcePage> {
        self.at(at)?;
        self.allow(at.address, token, &call.path, Right::Read)?;
        let asked = |home: Arc<dyn Home>| {
            let call = call.clone();
            async move { home.list(token, call, deadline).await }
        };
        until(deadline, || self.ask(at, asked)).await
    }

    /// A range of a file, asked for once.
    ///
    /// # Errors
    /// As [`Self::list`]; `SourceChanged` when the file is another one now.
    pub(crate) async fn read(
        &self,
        at: At<'_>,
        token: &Token,
        call: ReadSource,
        deadline: Deadline,
    ) -> Result<(SourceData, Bytes)> {
        self.may_read(at, token, &call)?;
        let asked = |home: Arc<dyn Home>| {
            let call = call.clone();
            async move { home.read(token, call, deadline).await }
        };
        in_time(deadline, self.ask(at, asked)).await
    }

    /// A range of a file, asked for again while that fails transiently.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(crate) async fn read_until(
        &self,
        at: At<'_>,
        token: &Token,
        call: ReadSource,
        deadline: Deadline,
    ) -> Result<(SourceData, Bytes)> {
        self.may_read(at, token, &call)?;
        let asked = |home: Arc<dyn Home>| {
            let call = call.clone();
            async move { home.read(token, call, deadline).await }
        };
        until(deadline, || self.ask(at, asked)).await
    }

    /// Whether a home gives many small files in one answer, and takes them with one call.
    pub(crate) fn packs(&self, at: At<'_>) -> bool {
        self.at(at).is_ok_and(|home| home.packs())
    }

    /// Small files of a home that packs, asked for again while that fails transiently.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(crate) async fn read_files_until(
        &self,
        at: At<'_>,
        token: &Token,
        call: ReadSources,
        deadline: Deadline,
    ) -> Result<(SourceData, Bytes)> {
        self.at(at)?;
        self.allow(at.address, token, &call.path, Right::Read)?;
        let asked = |home: Arc<dyn Home>| {
            let call = call.clone();
            async move { home.read_files(token, call, deadline).await }
        };
        until(deadline, || self.ask(at, asked)).await
    }

    /// Begins an upload or shows where it is.
    ///
    /// # Errors
    /// As [`Self::list`]; `Unsupported` when such homes take no files; `Conflict`.
    pub(crate) async fn begin(&self, put: &Put, deadline: Deadline) -> Result<PutProgress> {
        self.may_write(put)?;
        let asked = |home: Arc<dyn Home>| async move { home.begin(put, deadline).await };
        in_time(deadline, self.ask(put.at(), asked)).await
    }

    /// Adds bytes to an upload.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub(crate) async fn write(
        &self,
        put: &Put,
        offset: u64,
        data: Bytes,
        deadline: Deadline,
    ) -> Result<PutProgress> {
        self.may_write(put)?;
        let asked = |home: Arc<dyn Home>| {
            let data = data.clone();
            async move { home.write(put, offset, data, deadline).await }
        };
        in_time(deadline, self.ask(put.at(), asked)).await
    }

    /// Puts an upload in place.
    ///
    /// # Errors
    /// As [`Self::begin`]; `WrongState` when bytes are missing, `DigestMismatch`.
    pub(crate) async fn commit(
        &self,
        put: &Put,
        digest: Digest,
        deadline: Deadline,
    ) -> Result<PutReceipt> {
        self.may_write(put)?;
        let asked = |home: Arc<dyn Home>| async move { home.commit(put, digest, deadline).await };
        in_time(deadline, self.ask(put.at(), asked)).await
    }

    /// Puts a small file in place.
    ///
    /// # Errors
    /// As [`Self::begin`] and [`Self::commit`].
    pub(crate) async fn put(
        &self,
        put: &Put,
        data: Bytes,
        digest: Digest,
        deadline: Deadline,
    ) -> Result<PutReceipt> {
        self.may_write(put)?;
        let asked = |home: Arc<dyn Home>| {
            let data = data.clone();
            async move { home.put(put, data, digest, deadline).await }
        };
        in_time(deadline, self.ask(put.at(), asked)).await
    }

    /// Pieces of an upload that a home takes at once.
    pub(crate) fn pieces_max(&self, at: At<'_>) -> usize {
        self.at(at).map_or(1, |home| home.pieces_max())
    }

    /// Makes a call to a home, where that is now.
    async fn ask<T, F: Future<Output = Result<T>>>(
        &self,
        at: At<'_>,
        call: impl Fn(Arc<dyn Home>) -> F,
    ) -> Result<T> {
        call(self.at(at)?).await
    }

    /// Checks that a range may be read.
    fn may_read(&self, at: At<'_>, token: &Token, call: &ReadSource) -> Result<()> {
        self.at(at)?;
        self.allow(at.address, token, &call.path, Right::Read)?;
        check_range(call)
    }

    /// Checks that a file may be put there.
    fn may_write(&self, put: &Put) -> Result<()> {
        self.at(put.at())?;
        check_result(&put.path)?;
        self.allow(&put.home, &put.token, &put.path, Right::Write)
    }

    /// A home, where it is now.
    fn at(&self, at: At<'_>) -> Result<Arc<dyn Home>> {
        let place = (self.whereabouts.find(at), at.id);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(home) = known.get(&place) {
            return Ok(home.clone());
        }
        let home = self.make(&place.0, at.id)?;
        known.insert(place, home.clone());
        Ok(home)
    }

    fn make(&self, address: &str, id: Option<ServerId>) -> Result<Arc<dyn Home>> {
        let Some((scheme, _)) = address.split_once("://") else {
            let place = Place::new(self.pool.clone(), address, id);
            return Ok(Arc::new(BafsHome::new(place)));
        };
        let setting = self.settings.of(address);
        match scheme {
            "file" => Ok(Arc::new(Files::new(&self.settings, self.access(address)?)?)),
            "ftp" => Ok(Arc::new(Addressed::new(
                address,
                Ftp::new(address, setting),
            ))),
            "http" | "https" => Ok(Arc::new(Web::new(address, setting)?)),
            "s3" => {
                let setting = self.settings.needed(address, "region and keys")?;
                Ok(Arc::new(Bucket::new(address, setting)?))
            }
            "sftp" => {
                let setting = self.settings.needed(address, "user and key")?;
                let host = Sftp::new(address, setting)?;
                Ok(Arc::new(Addressed::new(address, host)))
            }
            _ => {
                let text = format!(
                    "{address}: '{scheme}' is no kind of home; use bafs, file, ftp, http, https, \
                     s3 or sftp"
                );
                Err(Error::new(ErrorCode::Unsupported, text))
            }
        }
    }

    /// Checks what a home server checks itself.
    fn allow(&self, address: &str, token: &Token, path: &str, right: Right) -> Result<()> {
        if !address.contains("://") {
            return Ok(());
        }
        check_relative(path)?;
        let access = self.access(address)?;
        access.require(token, Resource::Home(path.to_owned()), right)
    }

    fn access(&self, address: &str) -> Result<&Arc<Access>> {
        self.access.as_ref().ok_or_else(|| {
            let text = format!("{address} is no home server; only those are reached from here");
            Error::new(ErrorCode::Unsupported, text)
        })
    }
}

/// Time in which the slowest link moves so many bytes, in milliseconds. Not a time in which nothing
/// is heard: homes that are read back have a shorter one for that.
pub(crate) fn slowest_ms(bytes: u64) -> u64 {
    bytes / BYTES_PER_MS_MIN
}

fn check_range(call: &ReadSource) -> Result<()> {
    let blocks = BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX;
    if call.length <= BODY_BYTES_MAX && blocks.contains(&call.block_bytes) {
        return Ok(());
    }
    let text = format!(
        "cannot read {} bytes in blocks of {}",
        call.length, call.block_bytes
    );
    Err(Error::new(ErrorCode::Malformed, text))
}

async fn in_time<T>(deadline: Deadline, work: impl Future<Output = Result<T>>) -> Result<T> {
    let late = || {
        let text = "the home did not answer in time";
        Error::new(ErrorCode::DeadlineExceeded, text)
    };
    tokio::time::timeout_at(deadline.instant().into(), work)
        .await
        .map_err(|_| late())?
}

/// Makes a call again and again while it fails transiently, until the deadline.
async fn until<T, F: Future<Output = Result<T>>>(
    deadline: Deadline,
    call: impl Fn() -> F,
) -> Result<T> {
    let mut pause_ms = PAUSE_MS_MIN;
    loop {
        match in_time(deadline, call()).await {
            Err(error)
                if error.is_transient() && deadline.left() > Duration::from_millis(pause_ms) =>
            {
                tracing::debug!(%error, "a home will be asked again");
            }
            result => return result,
        }
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        pause_ms = (pause_ms * 2).min(PAUSE_MS_MAX);
    }
}

/// What a home says of which nobody can write.
fn read_only(address: &str) -> Error {
    let text = format!(
        "{address} takes no files: extract to a home that does (bafs, file, ftp, s3 or sftp)"
    );
    Error::new(ErrorCode::Unsupported, text)
}

/// Where an upload grows, beside its place: a path on the same file system.
fn beside(put: &Put) -> String {
    let (above, _) = put.path.rsplit_once('/').unwrap_or_default();
    let name = format!("{UPLOAD_PREFIX}{}", put.extract);
    match above {
        "" => name,
        above => format!("{above}/{name}"),
    }
}

/// Whether a name is that of an unfinished upload, which is never shown.
fn is_own(name: &str) -> bool {
    name.starts_with(UPLOAD_PREFIX)
}
