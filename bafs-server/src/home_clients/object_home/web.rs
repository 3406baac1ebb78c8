//! Files of a web server: one, or those that a list beside them names. Writes nothing.
//!
//! The web knows no directories. A directory is shown when it has a file `bafs.list` with one
//! path in each line, relative to the directory.

use bafs_proto::hash::Digest;
use bafs_proto::message::{
    ListSource, PutProgress, PutReceipt, ReadSource, SourceData, SourceEntry, SourcePage,
};
use bafs_proto::net::BoxFuture;
use bafs_proto::path::{check_relative, from_bytes, join};
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use opendal::ErrorKind;
use opendal::services::Http;

use super::super::home_backend::HomeBackend;
use super::super::home_upload::HomeUpload;
use super::super::listing::{directory_entry, file_entry, make_page};
use super::super::settings::HomeSetting;
use super::{CONCURRENT_STATS_MAX, ObjectStore};

/// Name of the file that lists a directory.
const LIST_FILE: &str = "bafs.list";

/// Most bytes of it.
const LIST_BYTES_MAX: u64 = 256 << 20;

/// A web server.
pub(crate) struct WebHome(ObjectStore);

impl WebHome {
    /// The web server at `address`, a URL without a path.
    ///
    /// # Errors
    /// `Malformed` when that is no address.
    pub(crate) fn new(address: &str, setting: Option<&HomeSetting>) -> Result<Self> {
        let mut service = Http::default().endpoint(address);
        if let Some(setting) = setting {
            let text = |field: &Option<String>| field.clone().unwrap_or_default();
            service = service
                .username(&text(&setting.user))
                .password(&text(&setting.password))
                .token(&text(&setting.token));
        }
        Ok(Self(ObjectStore::new(address, service)?))
    }

    async fn list(&self, path: &str) -> Result<SourcePage> {
        let objects = &self.0;
        let list = join(path, LIST_FILE);
        let list = &objects.object_key(&list)?.into_owned();
        match objects.operator.stat(list).await {
            Ok(found) if found.content_length() <= LIST_BYTES_MAX => {}
            Ok(_) => {
                let text = format!("{}, '{list}': it is too long", objects.address);
                return Err(Error::new(ErrorCode::Malformed, text));
            }
            Err(error) if error.kind() == ErrorKind::NotFound && !path.is_empty() => {
                let found = objects.stat(path).await.map_err(|error| {
                    let hint = "a directory of a web server is shown by its file bafs.list";
                    Error::new(error.code, format!("{}; {hint}", error.detail))
                })?;
                return make_page(vec![file_entry("", found)], SourceWarnings::default());
            }
            Err(error) => return Err(objects.store_error(list, &error)),
        }
        let text = objects.operator.read(list).await;
        let text = text
            .map_err(|error| objects.store_error(list, &error))?
            .to_vec();
        // A name that is no text fails when it is asked for.
        let text = from_bytes(&text);
        let names = text.lines().map(|line| line.trim_start_matches("./"));
        let names = names.filter(|line| !line.is_empty() && !line.starts_with('#'));
        let described = stream::iter(names.map(str::to_owned).collect::<Vec<_>>())
            .map(|name| self.describe(path, name))
            .buffer_unordered(CONCURRENT_STATS_MAX);
        let mut entries: Vec<SourceEntry> = described.try_collect().await?;
        entries.push(directory_entry(""));
        make_page(entries, SourceWarnings::default())
    }

    async fn describe(&self, path: &str, name: String) -> Result<SourceEntry> {
        check_relative(&name)?;
        let found = self.0.stat(&join(path, &name)).await;
        let found = found.map_err(|e| e.context(format!("named in {LIST_FILE}")))?;
        Ok(file_entry(&name, found))
    }
}

impl HomeBackend for WebHome {
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
        Box::pin(self.0.read(call))
    }

    fn begin<'a>(&'a self, _: &'a HomeUpload, _: Deadline) -> BoxFuture<'a, Result<PutProgress>> {
        Box::pin(async { Err(read_only_error(&self.0.address)) })
    }

    fn write<'a>(
        &'a self,
        _: &'a HomeUpload,
        _: u64,
        _: Bytes,
        _: Deadline,
    ) -> BoxFuture<'a, Result<PutProgress>> {
        Box::pin(async { Err(read_only_error(&self.0.address)) })
    }

    fn commit<'a>(
        &'a self,
        _: &'a HomeUpload,
        _: Digest,
        _: Deadline,
    ) -> BoxFuture<'a, Result<PutReceipt>> {
        Box::pin(async { Err(read_only_error(&self.0.address)) })
    }
}

/// What a home says of which nobody can write.
fn read_only_error(address: &str) -> Error {
    let text = format!(
        "{address} is read-only; extract to a home of another kind (bafs, file, ftp, s3 or sftp)"
    );
    Error::new(ErrorCode::Unsupported, text)
}
