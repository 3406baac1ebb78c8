//! Homes of every kind, as a node calls them.
//!
//! [`HomeClients`] is what the caches and the storage of a node use. It chooses a backend by the
//! address of the home. All backends implement one trait, `HomeBackend`: list, read, and the upload
//! in three steps (begin, write, commit).
//!
//! | Address | Backend | Uploads |
//! |---|---|---|
//! | `host:port` | `server_home`: a home server | chunks in parallel, packs of small files |
//! | `file://` | `directory_home`: a directory on the node's machine | as a home server |
//! | `s3://` | `object_home::bucket`: an object store | one put, or parts |
//! | `http://`, `https://` | `object_home::web`: a web server | none |
//! | `sftp://` | `sftp`: over `ssh` | a temporary file, then a rename |
//! | `ftp://`, `ftps://` | `ftp` (RFC 959, RFC 3659, RFC 4217) | a temporary file, then a rename |
//!
//! A URL names scheme and host, and the path is below it.
//!
//! **Data.** A listing gives entries with an identity (size and times, or an ETag). A read names
//! the identity, and returns up to 4 MiB with one digest for each block. A changed file gives
//! `SourceChanged`. An upload has the id of its extraction, so repeating it resumes or returns the
//! receipt.
//!
//! **Rights.** A home server checks the token itself. For all other homes `HomeClients` checks it,
//! because they do not know tokens. Credentials of such homes are in `homes.toml` (`settings.rs`),
//! and no message shows them.
//!
//! **Errors.** `Unsupported`: no backend for the address, or the home takes no files.
//! `RightMissing`, `BadPath`: the caller is at fault. `DeadlineExceeded`: no answer in time.
//! Everything else is the home's answer. Methods with `retry` in their name, and `list`, repeat
//! transient failures until the deadline, after 50 ms to 2 s. The others run once, because their
//! callers retry.
//!
//! **Concurrency.** Backends are made at first use and shared behind a mutex, one for each address
//! and server id. `home_locations.rs` maps the id of a home server to its present address. A late
//! call is dropped by its caller. Caches bound their calls to one home by the origin limiter.
//!
//! `docs/decisions/0017-homes-of-other-kinds.md` has the reasons.

mod directory_home;
mod ftp;
mod home_backend;
mod home_lister;
mod home_locations;
mod home_upload;
mod host;
mod listing;
mod object_home;
mod pack_sender;
mod server_home;
mod settings;
mod sftp;
#[cfg(test)]
pub(crate) mod slow_home;

pub use home_lister::HomeLister;
pub(crate) use home_locations::HomeAddress;
pub(crate) use home_upload::{CALL_TIMEOUT_MS, HomeUpload, ReplacedFile, transfer_ms_max};
pub use settings::HomeSettings;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bafs_proto::hash::Digest;
use bafs_proto::ids::{ServerId, UploadEpoch};
use bafs_proto::limits::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, BODY_BYTES_MAX};
use bafs_proto::message::{
    Advert, ListSource, PutProgress, PutReceipt, ReadDigests, ReadSource, SourceData,
    SourceDigests, SourcePage,
};
use bafs_proto::net::pool::Pool;
use bafs_proto::path::{check_relative, check_result_path};
use bafs_proto::replica::ReadSources;
use bafs_proto::time::Deadline;
use bafs_proto::token::{Resource, Right, Token, Verifier};
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use crate::access::AccessChecker;
use directory_home::DirectoryHomes;
use ftp::FtpHost;
use home_backend::HomeBackend;
use home_locations::{HomeLocations, HomeServerLocation};
use host::HostHome;
use object_home::{BucketHome, WebHome};
use server_home::ServerHome;
use sftp::SftpHost;

/// Pause before a failed call is repeated, in milliseconds; doubles up to the maximum.
const PAUSE_MS_MIN: u64 = 50;
const PAUSE_MS_MAX: u64 = 2_000;

/// A home that cannot be reached for so long while it is to list something is told to the
/// scheduler, which names it to the user and asks again for hours.
const SILENCE_MAX: Duration = Duration::from_secs(20);

/// The part of that time for which a home may answer that it fails itself, as where its exported
/// directory is gone: a server that starts again passes no such answer on.
const FAULT_DIVISOR: u32 = 4;

/// Homes by address and who must be there.
type BackendMap = BTreeMap<(String, Option<ServerId>), Arc<dyn HomeBackend>>;

/// All homes that a node can reach.
pub struct HomeClients {
    pool: Pool,
    /// Checks what a home server would check; without it only home servers are reached.
    access: Option<Arc<AccessChecker>>,
    settings: HomeSettings,
    /// Made when first asked for.
    backends: Mutex<BackendMap>,
    locations: HomeLocations,
}

impl std::fmt::Debug for HomeClients {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Homes")
    }
}

impl HomeClients {
    /// Home servers only.
    pub fn home_servers_only(pool: Pool) -> Arc<Self> {
        Arc::new(Self {
            pool,
            access: None,
            settings: HomeSettings::default(),
            backends: Mutex::default(),
            locations: HomeLocations::default(),
        })
    }

    /// Homes of every kind, for those who have a right of this authority.
    pub fn new(pool: Pool, verifier: Verifier, settings: HomeSettings) -> Arc<Self> {
        Arc::new(Self {
            pool,
            access: Some(Arc::new(AccessChecker::new(verifier))),
            settings,
            backends: Mutex::default(),
            locations: HomeLocations::default(),
        })
    }

    /// Connections to other servers.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Learns from a catalog's listing where home servers are now.
    pub fn update_locations(&self, adverts: &[Advert]) {
        self.locations.update(adverts);
    }

    /// A page of a listing, asked for again while that fails transiently.
    ///
    /// # Errors
    /// What the home answers; `Unsupported` when no home of that kind is reached from here;
    /// `RightMissing`, `BadPath`; `DeadlineExceeded`; `HomeUnreachable` when it could not be
    /// reached for [`SILENCE_MAX`], or answered for a part of that time that it fails.
    pub(crate) async fn list(
        &self,
        at: HomeAddress<'_>,
        token: &Token,
        call: ListSource,
        deadline: Deadline,
    ) -> Result<SourcePage> {
        self.backend(at)?;
        self.require_right(at.address, token, &call.path, Right::Read)?;
        let asked = |home: Arc<dyn HomeBackend>| {
            let call = call.clone();
            async move { home.list(token, call, deadline).await }
        };
        retry_until(deadline, Some(SILENCE_MAX), || self.call_backend(at, asked)).await
    }

    /// A range of a file, asked for once.
    ///
    /// # Errors
    /// As [`Self::list`]; `SourceChanged` when the file is another one now.
    pub(crate) async fn read(
        &self,
        at: HomeAddress<'_>,
        token: &Token,
        call: ReadSource,
        deadline: Deadline,
    ) -> Result<(SourceData, Bytes)> {
        self.check_read(at, token, &call)?;
        let asked = |home: Arc<dyn HomeBackend>| {
            let call = call.clone();
            async move { home.read(token, call, deadline).await }
        };
        with_deadline(deadline, self.call_backend(at, asked)).await
    }

    /// A range of a file, asked for again while that fails transiently.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(crate) async fn read_with_retry(
        &self,
        at: HomeAddress<'_>,
        token: &Token,
        call: ReadSource,
        deadline: Deadline,
    ) -> Result<(SourceData, Bytes)> {
        self.check_read(at, token, &call)?;
        let asked = |home: Arc<dyn HomeBackend>| {
            let call = call.clone();
            async move { home.read(token, call, deadline).await }
        };
        retry_until(deadline, None, || self.call_backend(at, asked)).await
    }

    /// Whether a home says what the digests of blocks are.
    pub(crate) fn knows_digests(&self, at: HomeAddress<'_>) -> bool {
        self.backend(at).is_ok_and(|home| home.knows_digests())
    }

    /// What a home says of blocks that other nodes send, asked for once.
    ///
    /// # Errors
    /// As [`Self::read`]; `Unsupported` when such homes know no digests.
    pub(crate) async fn read_digests(
        &self,
        at: HomeAddress<'_>,
        token: &Token,
        call: ReadDigests,
        deadline: Deadline,
    ) -> Result<SourceDigests> {
        self.backend(at)?;
        self.require_right(at.address, token, &call.path, Right::Read)?;
        let asked = |home: Arc<dyn HomeBackend>| {
            let call = call.clone();
            async move { home.read_digests(token, call, deadline).await }
        };
        with_deadline(deadline, self.call_backend(at, asked)).await
    }

    /// Whether a home gives many small files in one answer, and takes them with one call.
    pub(crate) fn has_packs(&self, at: HomeAddress<'_>) -> bool {
        self.backend(at).is_ok_and(|home| home.has_packs())
    }

    /// Small files of a home that packs, asked for again while that fails transiently.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(crate) async fn read_files_with_retry(
        &self,
        at: HomeAddress<'_>,
        token: &Token,
        call: ReadSources,
        deadline: Deadline,
    ) -> Result<(SourceData, Bytes)> {
        self.backend(at)?;
        self.require_right(at.address, token, &call.path, Right::Read)?;
        let asked = |home: Arc<dyn HomeBackend>| {
            let call = call.clone();
            async move { home.read_files(token, call, deadline).await }
        };
        retry_until(deadline, None, || self.call_backend(at, asked)).await
    }

    /// An epoch for uploads to a home, asked for again while that fails transiently.
    ///
    /// # Errors
    /// As [`Self::list`]; `Unsupported` where such homes do not order uploads.
    pub(crate) async fn issue_upload_epoch(
        &self,
        at: HomeAddress<'_>,
        token: &Token,
        path: &str,
        deadline: Deadline,
    ) -> Result<UploadEpoch> {
        self.backend(at)?;
        check_result_path(path)?;
        self.require_right(at.address, token, path, Right::Write)?;
        let asked = |home: Arc<dyn HomeBackend>| async move {
            home.issue_upload_epoch(token, path, deadline).await
        };
        retry_until(deadline, Some(SILENCE_MAX), || self.call_backend(at, asked)).await
    }

    /// Begins an upload or shows where it is.
    ///
    /// # Errors
    /// As [`Self::list`]; `Unsupported` when such homes take no files; `Conflict`.
    pub(crate) async fn begin(&self, put: &HomeUpload, deadline: Deadline) -> Result<PutProgress> {
        self.check_write(put)?;
        let asked = |home: Arc<dyn HomeBackend>| async move { home.begin(put, deadline).await };
        with_deadline(deadline, self.call_backend(put.home_address(), asked)).await
    }

    /// Adds bytes to an upload.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub(crate) async fn write(
        &self,
        put: &HomeUpload,
        offset: u64,
        data: Bytes,
        deadline: Deadline,
    ) -> Result<PutProgress> {
        self.check_write(put)?;
        let asked = |home: Arc<dyn HomeBackend>| {
            let data = data.clone();
            async move { home.write(put, offset, data, deadline).await }
        };
        with_deadline(deadline, self.call_backend(put.home_address(), asked)).await
    }

    /// Puts an upload in place.
    ///
    /// # Errors
    /// As [`Self::begin`]; `WrongState` when bytes are missing, `DigestMismatch`.
    pub(crate) async fn commit(
        &self,
        put: &HomeUpload,
        digest: Digest,
        deadline: Deadline,
    ) -> Result<PutReceipt> {
        self.check_write(put)?;
        let asked =
            |home: Arc<dyn HomeBackend>| async move { home.commit(put, digest, deadline).await };
        with_deadline(deadline, self.call_backend(put.home_address(), asked)).await
    }

    /// Puts a small file in place.
    ///
    /// # Errors
    /// As [`Self::begin`] and [`Self::commit`].
    pub(crate) async fn put(
        &self,
        put: &HomeUpload,
        data: Bytes,
        digest: Digest,
        deadline: Deadline,
    ) -> Result<PutReceipt> {
        self.check_write(put)?;
        let asked = |home: Arc<dyn HomeBackend>| {
            let data = data.clone();
            async move { home.put(put, data, digest, deadline).await }
        };
        with_deadline(deadline, self.call_backend(put.home_address(), asked)).await
    }

    /// Pieces of an upload that a home takes at once.
    pub(crate) fn concurrent_chunks_max(&self, at: HomeAddress<'_>) -> usize {
        self.backend(at)
            .map_or(1, |home| home.concurrent_chunks_max())
    }

    /// Makes a call to a home, where that is now.
    async fn call_backend<T, F: Future<Output = Result<T>>>(
        &self,
        at: HomeAddress<'_>,
        call: impl Fn(Arc<dyn HomeBackend>) -> F,
    ) -> Result<T> {
        call(self.backend(at)?).await
    }

    /// Checks that a range may be read.
    fn check_read(&self, at: HomeAddress<'_>, token: &Token, call: &ReadSource) -> Result<()> {
        self.backend(at)?;
        self.require_right(at.address, token, &call.path, Right::Read)?;
        check_range(call)
    }

    /// Checks that a file may be put there.
    fn check_write(&self, put: &HomeUpload) -> Result<()> {
        self.backend(put.home_address())?;
        check_result_path(&put.path)?;
        self.require_right(&put.home, &put.token, &put.path, Right::Write)
    }

    /// A home, where it is now.
    fn backend(&self, at: HomeAddress<'_>) -> Result<Arc<dyn HomeBackend>> {
        let place = (self.locations.current_address(at), at.id);
        let mut known = self.backends.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(home) = known.get(&place) {
            return Ok(home.clone());
        }
        let home = self.make_backend(&place.0, at.id)?;
        known.insert(place, home.clone());
        Ok(home)
    }

    fn make_backend(&self, address: &str, id: Option<ServerId>) -> Result<Arc<dyn HomeBackend>> {
        let Some((scheme, _)) = address.split_once("://") else {
            let place = HomeServerLocation::new(self.pool.clone(), address, id);
            return Ok(Arc::new(ServerHome::new(place)));
        };
        match scheme {
            "file" => Ok(Arc::new(DirectoryHomes::new(
                &self.settings,
                self.access(address)?,
            )?)),
            _ => make_foreign_backend(address, &self.settings),
        }
    }

    /// Checks what a home server checks itself.
    fn require_right(&self, address: &str, token: &Token, path: &str, right: Right) -> Result<()> {
        if !address.contains("://") {
            return Ok(());
        }
        check_relative(path)?;
        let access = self.access(address)?;
        access.require(token, Resource::Home(path.to_owned()), right)
    }

    fn access(&self, address: &str) -> Result<&Arc<AccessChecker>> {
        self.access.as_ref().ok_or_else(|| {
            let text = format!(
                "{address} is not a home server; only home servers are supported \
                                here"
            );
            Error::new(ErrorCode::Unsupported, text)
        })
    }
}

/// The backend of a home that is neither a home server nor a directory.
fn make_foreign_backend(address: &str, settings: &HomeSettings) -> Result<Arc<dyn HomeBackend>> {
    let setting = settings.for_address(address);
    let scheme = address.split_once("://").map_or("", |(scheme, _)| scheme);
    match scheme {
        "ftp" | "ftps" => Ok(Arc::new(HostHome::new(
            address,
            FtpHost::new(address, setting)?,
        ))),
        "http" | "https" => Ok(Arc::new(WebHome::new(address, setting)?)),
        "s3" => {
            let setting = settings.required_for(address, "region and keys")?;
            Ok(Arc::new(BucketHome::new(address, setting)?))
        }
        "sftp" => {
            let setting = settings.required_for(address, "user and key")?;
            let host = SftpHost::new(address, setting)?;
            Ok(Arc::new(HostHome::new(address, host)))
        }
        _ => {
            let text = format!(
                "{address}: unknown scheme '{scheme}'; use bafs, file, ftp, ftps, http, https, s3 \
                 or sftp"
            );
            Err(Error::new(ErrorCode::Unsupported, text))
        }
    }
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

async fn with_deadline<T>(deadline: Deadline, work: impl Future<Output = Result<T>>) -> Result<T> {
    let late = || {
        let text = "the home did not answer in time";
        Error::new(ErrorCode::DeadlineExceeded, text)
    };
    tokio::time::timeout_at(deadline.instant().into(), work)
        .await
        .map_err(|_| late())?
}

/// Makes a call again and again while it fails transiently, until the deadline. Ends earlier with
/// `HomeUnreachable` when the home could not be reached for `silence_max`, or fails itself.
async fn retry_until<T, F: Future<Output = Result<T>>>(
    deadline: Deadline,
    silence_max: Option<Duration>,
    call: impl Fn() -> F,
) -> Result<T> {
    let mut useless_until: Option<Deadline> = None;
    let mut pause_ms = PAUSE_MS_MIN;
    loop {
        let answer = with_deadline(deadline, call()).await;
        let timeout = silence_max.and_then(|silence_max| match answer.as_ref().err()?.code {
            ErrorCode::Unreachable => Some(silence_max),
            ErrorCode::ServerFault => Some(silence_max / FAULT_DIVISOR),
            _ => None,
        });
        useless_until = timeout.map(|timeout| {
            let until = Deadline::after(timeout);
            useless_until.map_or(until, |earlier| until.earlier_of(earlier))
        });
        match answer {
            Err(error) if useless_until.is_some_and(|until| until.remaining().is_zero()) => {
                return Err(Error::new(ErrorCode::HomeUnreachable, error.detail));
            }
            Err(error)
                if error.is_transient()
                    && deadline.remaining() > Duration::from_millis(pause_ms) =>
            {
                tracing::debug!(%error, "retrying a request to a home");
            }
            result => return result,
        }
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        pause_ms = (pause_ms * 2).min(PAUSE_MS_MAX);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test]
    async fn unreachable_home_is_reported_before_the_deadline() {
        let silence_max = Some(Duration::from_millis(200));
        let deadline = Deadline::after_ms(60_000);
        let calls = AtomicU32::new(0);
        let fail = |code: fn(u32) -> ErrorCode| {
            let call = calls.fetch_add(1, Ordering::Relaxed);
            async move { Err::<(), _>(Error::new(code(call), "no")) }
        };
        let refused = retry_until(deadline, silence_max, || fail(|_| ErrorCode::Unreachable)).await;
        assert_eq!(refused.expect_err("no").code, ErrorCode::HomeUnreachable);
        assert!(calls.load(Ordering::Relaxed) > 1);
        // So is one that answers for long that it fails.
        let refused = retry_until(deadline, silence_max, || fail(|_| ErrorCode::ServerFault)).await;
        assert_eq!(refused.expect_err("no").code, ErrorCode::HomeUnreachable);
        assert!(deadline.remaining() > Duration::from_secs(30));
        // A home that answers now and then is reachable.
        calls.store(0, Ordering::Relaxed);
        let busy = |call| match call {
            0..4 if call % 2 == 1 => ErrorCode::Busy,
            0..4 => ErrorCode::Unreachable,
            _ => ErrorCode::NotFound,
        };
        let ended = retry_until(deadline, silence_max, || fail(busy)).await;
        assert_eq!(ended.expect_err("no").code, ErrorCode::NotFound);
    }
}
