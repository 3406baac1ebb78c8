//! Directories of the node's own machine as a home, for example on a shared file system. The home
//! server's own code does the work; here it is told where it may.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::hash::Digest;
use bafs_proto::ids::UploadEpoch;
use bafs_proto::message::{
    BeginPut, CommitPut, ListSource, PutProgress, PutReceipt, ReadSource, SourceData, SourcePage,
};
use bafs_proto::net::BoxFuture;
use bafs_proto::path::from_bytes;
use bafs_proto::time::{Deadline, Time};
use bafs_proto::token::{Resource, Right, Token};
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use super::home_backend::HomeBackend;
use super::home_upload::HomeUpload;
use super::settings::HomeSettings;
use crate::access::AccessChecker;
use crate::clock;
use crate::home_server::{Export, ExportEntry, Uploads, list, read};

/// Old receipts and uploads are removed so often at most, in milliseconds.
const SWEEP_MS: u64 = 3_600_000;

/// The directories that a node may use.
pub(super) struct DirectoryHomes {
    directories: Vec<Arc<DirectoryHome>>,
}

/// One of them.
struct DirectoryHome {
    /// Without slashes at its ends.
    path: String,
    access: Arc<AccessChecker>,
    opened: Mutex<OpenedExport>,
}

struct OpenedExport {
    export: Arc<Export>,
    /// Made when first something is written: it leaves a directory of its own behind. With when old
    /// receipts and uploads were removed last.
    uploads: Option<(Arc<Uploads>, Time)>,
}

impl DirectoryHomes {
    /// What the settings permit.
    ///
    /// # Errors
    /// `NotFound` when a directory is not there.
    pub(super) fn new(settings: &HomeSettings, access: &Arc<AccessChecker>) -> Result<Self> {
        let open = |path: &Path| {
            let export = Arc::new(Export::open(path)?);
            Ok(Arc::new(DirectoryHome {
                path: from_bytes(path.as_os_str().as_bytes())
                    .trim_matches('/')
                    .to_owned(),
                access: access.clone(),
                opened: Mutex::new(OpenedExport {
                    export,
                    uploads: None,
                }),
            }))
        };
        let directories = settings.directories().map(open).collect::<Result<_>>()?;
        Ok(Self { directories })
    }

    /// The directory of a path, and the path below it.
    fn find_directory(&self, path: &str) -> Result<(Arc<DirectoryHome>, String)> {
        let below = |directory: &Arc<DirectoryHome>| {
            let rest = match directory.path.as_str() {
                "" => path,
                top => path.strip_prefix(top)?,
            };
            let is_below = rest.is_empty() || rest.starts_with('/') || directory.path.is_empty();
            is_below.then(|| (directory.clone(), rest.trim_start_matches('/').to_owned()))
        };
        let found = self.directories.iter().filter_map(below);
        let found = found.max_by_key(|(directory, _)| directory.path.len());
        found.ok_or_else(|| {
            let text = format!(
                "this node may not use file:///{path}: name the directory in its homes.toml, or \
                 export it with `bafs home` and write bafs://NAME/PATH"
            );
            Error::new(ErrorCode::RightMissing, text)
        })
    }
}

impl DirectoryHome {
    /// The directory, where it is now: a shared file system may have been mounted anew.
    fn open_export(&self) -> Result<MutexGuard<'_, OpenedExport>> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(gone) = opened.export.check_in_place() {
            let export = opened.export.reopen().ok_or(gone)?;
            *opened = OpenedExport {
                export: Arc::new(export),
                uploads: None,
            };
        }
        Ok(opened)
    }

    fn uploads(&self) -> Result<Arc<Uploads>> {
        let now = clock::now();
        let mut opened = self.open_export()?;
        let (uploads, swept) = match opened.uploads.take() {
            Some(uploads) => uploads,
            None => (
                Arc::new(Uploads::open(opened.export.clone())?),
                Time::default(),
            ),
        };
        let is_due = now.ms_since(swept) > SWEEP_MS;
        opened.uploads = Some((uploads.clone(), if is_due { now } else { swept }));
        drop(opened);
        if is_due {
            uploads.sweep(now);
        }
        Ok(uploads)
    }

    /// Does something with the uploads; an error says what room there is, if that is why.
    fn with_uploads<T>(&self, act: impl FnOnce(&Uploads) -> Result<T>) -> Result<T> {
        let uploads = self.uploads()?;
        act(&uploads).map_err(|error| uploads.with_room(error))
    }

    /// Finds a path below it that a token grants: where symbolic links lead must be granted too.
    fn find(&self, token: &Token, path: &str) -> Result<(Arc<Export>, ExportEntry)> {
        let export = self.open_export()?.export.clone();
        let found =
            export.find_allowed(path, |path| self.require_right(token, path, Right::Read))?;
        Ok((export, found))
    }

    fn require_right(&self, token: &Token, path: &str, right: Right) -> Result<()> {
        let whole = format!("{}/{path}", self.path);
        let whole = whole.trim_matches('/').to_owned();
        self.access.require(token, Resource::Home(whole), right)
    }
}

impl HomeBackend for DirectoryHomes {
    fn list<'a>(
        &'a self,
        token: &'a Token,
        call: ListSource,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<SourcePage>> {
        Box::pin(async move {
            let (directory, path) = self.find_directory(&call.path)?;
            let token = token.clone();
            run_blocking(move || {
                let (export, top) = directory.find(&token, &path)?;
                let (page, _) = list(&export, &top, call.after.as_deref())?;
                Ok(page)
            })
            .await
        })
    }

    fn read<'a>(
        &'a self,
        token: &'a Token,
        call: ReadSource,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<(SourceData, Bytes)>> {
        Box::pin(async move {
            let (directory, path) = self.find_directory(&call.path)?;
            let token = token.clone();
            let find = move || directory.find(&token, &path).map(|(_, found)| found);
            run_blocking(move || read(&call, find)).await
        })
    }

    fn issue_upload_epoch<'a>(
        &'a self,
        _token: &'a Token,
        path: &'a str,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<UploadEpoch>> {
        Box::pin(async move {
            let (directory, _) = self.find_directory(path)?;
            run_blocking(move || directory.with_uploads(Uploads::issue_epoch)).await
        })
    }

    fn begin<'a>(
        &'a self,
        put: &'a HomeUpload,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutProgress>> {
        Box::pin(async move {
            let (directory, path) = self.find_directory(&put.path)?;
            let begin = BeginPut {
                extraction: put.extract,
                path,
                mode: put.mode,
                fence: put.fence,
            };
            let token = put.token.clone();
            let done = run_blocking(move || {
                let allow = |path: &str| directory.require_right(&token, path, Right::Write);
                directory.with_uploads(|uploads| uploads.begin(&begin, allow))
            });
            done.await
                .map(|progress| progress_for_caller(put, progress))
        })
    }

    fn write<'a>(
        &'a self,
        put: &'a HomeUpload,
        offset: u64,
        data: Bytes,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutProgress>> {
        Box::pin(async move {
            let (directory, _) = self.find_directory(&put.path)?;
            let (extract, token) = (put.extract, put.token.clone());
            let write = move || {
                let allow = |path: &str| directory.require_right(&token, path, Right::Write);
                directory.with_uploads(|uploads| uploads.write(extract, offset, &data, allow))
            };
            run_blocking(write)
                .await
                .map(|progress| progress_for_caller(put, progress))
        })
    }

    fn commit<'a>(
        &'a self,
        put: &'a HomeUpload,
        digest: Digest,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutReceipt>> {
        Box::pin(async move {
            let (directory, _) = self.find_directory(&put.path)?;
            let commit = CommitPut {
                extraction: put.extract,
                size: put.size,
                digest,
                fence: put.fence,
            };
            let token = put.token.clone();
            let done = run_blocking(move || {
                let allow = |path: &str| directory.require_right(&token, path, Right::Write);
                directory.with_uploads(|uploads| uploads.commit(&commit, allow))
            });
            done.await.map(|receipt| with_caller_path(put, receipt))
        })
    }
}

/// The same under the name that the caller knows.
fn with_caller_path(put: &HomeUpload, receipt: PutReceipt) -> PutReceipt {
    PutReceipt {
        path: put.path.clone(),
        ..receipt
    }
}

fn progress_for_caller(put: &HomeUpload, progress: PutProgress) -> PutProgress {
    PutProgress {
        receipt: progress
            .receipt
            .map(|receipt| with_caller_path(put, receipt)),
        ..progress
    }
}

async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let stopped = |e| Error::new(ErrorCode::ServerFault, format!("a file home failed: {e}"));
    tokio::task::spawn_blocking(work).await.map_err(stopped)?
}
