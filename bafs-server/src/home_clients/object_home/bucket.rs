//! A bucket of an object store. An upload is one put, or one of many parts: it is there as a whole
//! when it is complete, and never before. It does not survive this process; it begins anew then.

use std::sync::Arc;

use bafs_proto::Result;
use bafs_proto::hash::Digest;
use bafs_proto::message::{
    ListSource, PutProgress, PutReceipt, ReadSource, SourceData, SourceEntry, SourcePage,
};
use bafs_proto::net::BoxFuture;
use bafs_proto::path::from_bytes;
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use opendal::services::S3;

use super::super::home_backend::HomeBackend;
use super::super::home_upload::HomeUpload;
use super::super::listing::{directory_entry, file_entry, make_page};
use super::super::settings::HomeSetting;
use super::uploads::BucketUploads;
use super::{CONCURRENT_STATS_MAX, ObjectStore};

/// A bucket.
pub(crate) struct BucketHome {
    objects: Arc<ObjectStore>,
    uploads: BucketUploads,
}

impl BucketHome {
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
        let objects = Arc::new(ObjectStore::new(address, service)?);
        Ok(Self {
            uploads: BucketUploads::new(objects.clone()),
            objects,
        })
    }

    async fn list(&self, path: &str) -> Result<SourcePage> {
        let objects = &self.objects;
        let fault = |error| objects.store_error(path, &error);
        let prefix = match &*objects.object_key(path)? {
            "" => String::new(),
            key => format!("{key}/"),
        };
        let warnings = SourceWarnings::default();
        let lister = objects.operator.lister_with(&prefix).recursive(true);
        let found = lister.await.map_err(fault)?;
        let described = found
            .map_err(fault)
            .map(async |entry| self.describe(&prefix, entry?).await)
            .buffer_unordered(CONCURRENT_STATS_MAX);
        let entries: Vec<SourceEntry> = described.try_collect().await?;
        if !entries.is_empty() {
            return make_page(entries, warnings);
        }
        if path.is_empty() {
            return make_page(vec![directory_entry("")], warnings);
        }
        make_page(vec![file_entry("", objects.stat(path).await?)], warnings)
    }

    async fn describe(&self, prefix: &str, entry: opendal::Entry) -> Result<SourceEntry> {
        let (key, found) = entry.into_parts();
        let path = from_bytes(key.as_bytes());
        let name = from_bytes(key.strip_prefix(prefix).unwrap_or(&key).as_bytes());
        // A key with a slash at its end stands for a directory.
        if found.is_dir() {
            return Ok(directory_entry(name.trim_end_matches('/')));
        }
        let identity = match found.etag() {
            Some(_) => self.objects.identity(&path, &found)?,
            // Some stores leave it out of listings.
            None => self.objects.stat(&path).await?,
        };
        Ok(file_entry(&name, identity))
    }
}

impl HomeBackend for BucketHome {
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

    fn begin<'a>(&'a self, put: &'a HomeUpload, _: Deadline) -> BoxFuture<'a, Result<PutProgress>> {
        Box::pin(self.uploads.begin(put))
    }

    fn write<'a>(
        &'a self,
        put: &'a HomeUpload,
        offset: u64,
        data: Bytes,
        _: Deadline,
    ) -> BoxFuture<'a, Result<PutProgress>> {
        Box::pin(self.uploads.write(put, offset, data))
    }

    fn commit<'a>(
        &'a self,
        put: &'a HomeUpload,
        digest: Digest,
        _: Deadline,
    ) -> BoxFuture<'a, Result<PutReceipt>> {
        Box::pin(self.uploads.commit(put, digest))
    }
}
