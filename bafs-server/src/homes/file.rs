//! Directories of the node's own machine as a home, for example on a shared file system. The home
//! server's own code does the work; here it is told where it may.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use bafs_proto::hash::Digest;
use bafs_proto::message::{
    BeginPut, CommitPut, ListSource, PutProgress, PutReceipt, ReadSource, SourceData, SourcePage,
};
use bafs_proto::net::BoxFuture;
use bafs_proto::time::{Deadline, Time};
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use super::settings::HomeSettings;
use super::{Home, Put};
use crate::clock;
use crate::home::{Export, Puts, list, read};

/// Old receipts and uploads are removed so often at most, in milliseconds.
const SWEEP_MS: u64 = 3_600_000;

/// The directories that a node may use.
pub(super) struct Files {
    directories: Vec<Arc<Directory>>,
}

/// One of them.
struct Directory {
    /// Without slashes at its ends.
    path: String,
    export: Arc<Export>,
    /// Made when first something is written: it leaves a directory of its own behind. With when old
    /// receipts and uploads were removed last.
    puts: Mutex<Option<(Arc<Puts>, Time)>>,
}

impl Files {
    /// What the settings permit.
    ///
    /// # Errors
    /// `NotFound` when a directory is not there.
    pub(super) fn new(settings: &HomeSettings) -> Result<Self> {
        let open = |path: &Path| {
            let export = Arc::new(Export::open(path)?);
            let path = path.to_string_lossy().trim_matches('/').to_owned();
            let puts = Mutex::default();
            Ok(Arc::new(Directory { path, export, puts }))
        };
        let directories = settings.directories().map(open).collect::<Result<_>>()?;
        Ok(Self { directories })
    }

    /// The directory of a path, and the path below it.
    fn place(&self, path: &str) -> Result<(Arc<Directory>, String)> {
        let below = |directory: &Arc<Directory>| {
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

impl Directory {
    fn puts(&self) -> Result<Arc<Puts>> {
        let now = clock::now();
        let mut known = self.puts.lock().unwrap_or_else(PoisonError::into_inner);
        let (puts, swept) = match known.take() {
            Some(puts) => puts,
            None => (Arc::new(Puts::open(self.export.clone())?), Time::default()),
        };
        let is_due = now.ms_since(swept) > SWEEP_MS;
        *known = Some((puts.clone(), if is_due { now } else { swept }));
        drop(known);
        if is_due {
            puts.sweep(now);
        }
        Ok(puts)
    }

    /// Does something with the uploads; an error says what room there is, if that is why.
    fn with_puts<T>(&self, act: impl FnOnce(&Puts) -> Result<T>) -> Result<T> {
        let puts = self.puts()?;
        act(&puts).map_err(|error| puts.with_room(error))
    }
}

impl Home for Files {
    fn list<'a>(
        &'a self,
        _token: &'a Token,
        call: ListSource,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<SourcePage>> {
        Box::pin(async move {
            let (directory, path) = self.place(&call.path)?;
            blocking(move || {
                let top = directory.export.find(&path)?;
                let (page, _) = list(&directory.export, &top, call.after.as_deref())?;
                Ok(page)
            })
            .await
        })
    }

    fn read<'a>(
        &'a self,
        _token: &'a Token,
        call: ReadSource,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<(SourceData, Bytes)>> {
        Box::pin(async move {
            let (directory, path) = self.place(&call.path)?;
            blocking(move || read(&call, || directory.export.find(&path))).await
        })
    }

    fn begin<'a>(
        &'a self,
        put: &'a Put,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutProgress>> {
        Box::pin(async move {
            let (directory, path) = self.place(&put.path)?;
            let begin = BeginPut {
                extract: put.extract,
                path,
                mode: put.mode,
            };
            let done = blocking(move || directory.with_puts(|puts| puts.begin(&begin, |_| Ok(()))));
            done.await.map(|progress| told(put, progress))
        })
    }

    fn write<'a>(
        &'a self,
        put: &'a Put,
        offset: u64,
        data: Bytes,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutProgress>> {
        Box::pin(async move {
            let (directory, _) = self.place(&put.path)?;
            let extract = put.extract;
            let write =
                move || directory.with_puts(|puts| puts.write(extract, offset, &data, |_| Ok(())));
            blocking(write).await.map(|progress| told(put, progress))
        })
    }

    fn commit<'a>(
        &'a self,
        put: &'a Put,
        digest: Digest,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutReceipt>> {
        Box::pin(async move {
            let (directory, _) = self.place(&put.path)?;
            let commit = CommitPut {
                extract: put.extract,
                size: put.size,
                digest,
            };
            let done =
                blocking(move || directory.with_puts(|puts| puts.commit(&commit, |_| Ok(()))));
            done.await.map(|receipt| renamed(put, receipt))
        })
    }
}

/// The same under the name that the caller knows.
fn renamed(put: &Put, receipt: PutReceipt) -> PutReceipt {
    PutReceipt {
        path: put.path.clone(),
        ..receipt
    }
}

fn told(put: &Put, progress: PutProgress) -> PutProgress {
    PutProgress {
        receipt: progress.receipt.map(|receipt| renamed(put, receipt)),
        ..progress
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let stopped = |e| Error::new(ErrorCode::ServerFault, format!("a file home failed: {e}"));
    tokio::task::spawn_blocking(work).await.map_err(stopped)?
}
