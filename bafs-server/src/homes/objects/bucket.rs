//! A bucket of an object store. An upload is one put, or one of many parts: it is there as a whole
//! when it is complete, and never before. It does not survive this process; it begins anew then.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use bafs_proto::hash::{Digest, Hasher};
use bafs_proto::ids::ExtractId;
use bafs_proto::message::{
    ListSource, PutProgress, PutReceipt, ReadSource, SourceData, SourceEntry, SourcePage,
};
use bafs_proto::net::BoxFuture;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use opendal::Writer;
use opendal::services::S3;

use super::super::listing::{directory, file, page};
use super::super::settings::HomeSetting;
use super::super::{Home, Put};
use super::{Objects, STATS_MAX};

/// Bytes of a part, at least; each costs a request. The store takes 5 MiB or more.
const PART_BYTES_MIN: u64 = 8 << 20;

/// Most parts of an upload; the store takes 10,000.
const PARTS_MAX: u64 = 9_000;

/// Uploads that are begun and not committed, at most: those before are given up.
const UPLOADS_MAX: usize = 256;

/// A bucket.
pub(crate) struct Bucket {
    objects: Objects,
    uploads: Mutex<BTreeMap<ExtractId, Upload>>,
}

/// A file on its way.
struct Upload {
    path: String,
    writer: Writer,
    hasher: Hasher,
    sent: u64,
}

impl Bucket {
    /// The bucket of `address`, which is `s3://BUCKET`.
    ///
    /// # Errors
    /// `Malformed` when the settings make no sense.
    pub(crate) fn new(address: &str, setting: &HomeSetting) -> Result<Self> {
        let mut service = S3::default()
            .bucket(address.trim_start_matches("s3://"))
            .region(setting.region.as_deref().unwrap_or_default())
            // Travels with each part and is checked where it arrives.
            .checksum_algorithm("crc32c")
            .disable_config_load()
            .disable_ec2_metadata();
        if let Some(endpoint) = &setting.endpoint {
            service = service.endpoint(endpoint);
        }
        service = match (&setting.access_key_id, &setting.secret_access_key) {
            (Some(id), Some(secret)) => service.access_key_id(id).secret_access_key(secret),
            _ => service.skip_signature(),
        };
        Ok(Self {
            objects: Objects::new(address, service)?,
            uploads: Mutex::default(),
        })
    }

    async fn list(&self, path: &str) -> Result<SourcePage> {
        let objects = &self.objects;
        let fault = |error| objects.fault(path, &error);
        let prefix = if path.is_empty() {
            String::new()
        } else {
            format!("{path}/")
        };
        let lister = objects.operator.lister_with(&prefix).recursive(true);
        let found = lister.await.map_err(fault)?;
        let described = found
            .map_err(fault)
            .map(async |entry| self.describe(&prefix, entry?).await)
            .buffer_unordered(STATS_MAX);
        let entries: Vec<SourceEntry> = described.try_collect().await?;
        if !entries.is_empty() {
            return page(entries);
        }
        if path.is_empty() {
            return page(vec![directory("")]);
        }
        page(vec![file("", objects.stat(path).await?)])
    }

    async fn describe(&self, prefix: &str, entry: opendal::Entry) -> Result<SourceEntry> {
        let (path, found) = entry.into_parts();
        let name = path.strip_prefix(prefix).unwrap_or(&path);
        // A key with a slash at its end stands for a directory.
        if found.is_dir() {
            return Ok(directory(name.trim_end_matches('/')));
        }
        let identity = match found.etag() {
            Some(_) => self.objects.identity(&path, &found)?,
            // Some stores leave it out of listings.
            None => self.objects.stat(&path).await?,
        };
        Ok(file(name, identity))
    }

    fn take(&self, put: &Put) -> Option<Upload> {
        let mut uploads = self.uploads.lock().unwrap_or_else(PoisonError::into_inner);
        uploads.remove(&put.extract)
    }

    fn give_back(&self, put: &Put, upload: Upload) {
        let mut uploads = self.uploads.lock().unwrap_or_else(PoisonError::into_inner);
        if uploads.len() >= UPLOADS_MAX {
            uploads.pop_first();
        }
        uploads.insert(put.extract, upload);
    }

    async fn begin(&self, put: &Put) -> Result<PutProgress> {
        let upload = match self.take(put).filter(|upload| upload.path == put.path) {
            Some(upload) => upload,
            None => {
                let part_bytes = PART_BYTES_MIN.max(put.size.div_ceil(PARTS_MAX));
                let part_bytes = usize::try_from(part_bytes).unwrap_or(usize::MAX);
                let writer = self.objects.operator.writer_with(&put.path);
                let writer = writer.chunk(part_bytes).await;
                Upload {
                    path: put.path.clone(),
                    writer: writer.map_err(|e| self.objects.fault(&put.path, &e))?,
                    hasher: Hasher::new(),
                    sent: 0,
                }
            }
        };
        let received_bytes = upload.sent;
        self.give_back(put, upload);
        Ok(PutProgress {
            received_bytes,
            receipt: None,
        })
    }

    async fn write(&self, put: &Put, offset: u64, data: Bytes) -> Result<PutProgress> {
        let mut upload = self.take(put).ok_or_else(|| begun_anew(put))?;
        if offset != upload.sent {
            self.give_back(put, upload);
            return Err(begun_anew(put));
        }
        upload.hasher.update(&data);
        upload.sent += data.len() as u64;
        if let Err(error) = upload.writer.write(data).await {
            let _ = upload.writer.abort().await;
            return Err(self.objects.fault(&put.path, &error));
        }
        let received_bytes = upload.sent;
        self.give_back(put, upload);
        Ok(PutProgress {
            received_bytes,
            receipt: None,
        })
    }

    async fn commit(&self, put: &Put, digest: Digest) -> Result<PutReceipt> {
        let mut upload = self.take(put).ok_or_else(|| begun_anew(put))?;
        if (upload.sent, upload.hasher.digest()) != (put.size, digest) {
            let _ = upload.writer.abort().await;
            let text = format!(
                "what was sent of '{}' is damaged; it is sent again",
                put.path
            );
            return Err(Error::new(ErrorCode::DigestMismatch, text));
        }
        let fault = |error| self.objects.fault(&put.path, &error);
        upload.writer.close().await.map_err(fault)?;
        let there = self.objects.stat(&put.path).await?;
        if there.size != put.size {
            let text = format!(
                "{} has {} bytes at '{}' after {} were put: somebody else writes there",
                self.objects.address, there.size, put.path, put.size
            );
            return Err(Error::new(ErrorCode::Conflict, text));
        }
        Ok(PutReceipt {
            extract: put.extract,
            path: put.path.clone(),
            size: put.size,
            digest,
        })
    }
}

impl Home for Bucket {
    fn list<'a>(
        &'a self,
        _token: &'a Token,
        call: ListSource,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<SourcePage>> {
        Box::pin(async move { self.list(&call.path).await })
    }

    fn read<'a>(
        &'a self,
        _token: &'a Token,
        call: ReadSource,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<(SourceData, Bytes)>> {
        Box::pin(self.objects.read(call))
    }

    fn begin<'a>(&'a self, put: &'a Put, _: Deadline) -> BoxFuture<'a, Result<PutProgress>> {
        Box::pin(self.begin(put))
    }

    fn write<'a>(
        &'a self,
        put: &'a Put,
        offset: u64,
        data: Bytes,
        _: Deadline,
    ) -> BoxFuture<'a, Result<PutProgress>> {
        Box::pin(self.write(put, offset, data))
    }

    fn commit<'a>(
        &'a self,
        put: &'a Put,
        digest: Digest,
        _: Deadline,
    ) -> BoxFuture<'a, Result<PutReceipt>> {
        Box::pin(self.commit(put, digest))
    }
}

fn begun_anew(put: &Put) -> Error {
    let text = format!(
        "the upload of '{}' was interrupted; it begins anew",
        put.path
    );
    Error::new(ErrorCode::Conflict, text)
}
