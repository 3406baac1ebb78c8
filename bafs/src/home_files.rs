//! Files of a home server, read and written without a volume. Nodes reach homes of other kinds.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use bafs_proto::hash::{Digest, DigestHasher};
use bafs_proto::ids::ExtractionId;
use bafs_proto::limits::{BLOCK_BYTES_DEFAULT, IO_BYTES_MAX};
use bafs_proto::message::{
    BeginPut, CommitPut, IssueUploadEpoch, ListSource, PutRange, ReadSource, UploadFence,
};
use bafs_proto::path::{check_relative, to_bytes};
use bafs_proto::source::{SourceEntry, SourceKind};
use bafs_proto::time::Deadline;
use bafs_proto::token::{Resource, Right};
use bafs_proto::volume::VolumeSource;
use bafs_workflow::Url;
use bytes::Bytes;

use crate::client::ClusterClient;

/// Time for the calls that list or commit, in milliseconds: a commit reads the whole file again.
const LONG_CALL_TIMEOUT_MS: u64 = 600_000;

/// Time for the transfer of a chunk, in milliseconds.
const CHUNK_TIMEOUT_MS: u64 = 120_000;

/// Tries of a chunk: a read or write of one range may be repeated.
const TRIES: u32 = 3;

/// Copies a file or directory of a home to a local path, and returns the bytes of its files.
pub(crate) async fn download(client: &ClusterClient, url: &str, local: &Path) -> Result<u64> {
    let (address, path) = find_home(client, url).await?;
    let (mut bytes, mut after) = (0, None);
    loop {
        let call = ListSource {
            path: path.clone(),
            after,
        };
        let page = client
            .call_with_timeout(&address, call, LONG_CALL_TIMEOUT_MS)
            .await?;
        for entry in &page.entries {
            bytes += download_entry(client, &address, &path, entry, local)
                .await
                .with_context(|| format!("copy {url} to {}", local.display()))?;
        }
        after = page.entries.last().map(|entry| entry.path.clone());
        if !page.has_more {
            return Ok(bytes);
        }
    }
}

async fn find_home(client: &ClusterClient, url: &str) -> Result<(String, String)> {
    let parsed: Url = url
        .parse()
        .map_err(|error| anyhow::anyhow!("'{url}': {error}"))?;
    match client.resolve_source(&parsed.to_string()).await? {
        VolumeSource::Home { address, path, .. } if url.starts_with("bafs:") => Ok((address, path)),
        _ => bail!("'{url}' is not on a home server of BAFS"),
    }
}

async fn download_entry(
    client: &ClusterClient,
    address: &str,
    root: &str,
    entry: &SourceEntry,
    local: &Path,
) -> Result<u64> {
    let target = match entry.path.is_empty() {
        true => local.to_owned(),
        false => {
            check_relative(&entry.path)?;
            local.join(os_path(&entry.path))
        }
    };
    match &entry.kind {
        SourceKind::Directory | SourceKind::UnreadableDirectory => {
            fs::create_dir_all(&target)?;
            Ok(0)
        }
        SourceKind::Symlink(to) => {
            symlink(os_path(&bafs_proto::path::from_bytes(to)), &target)?;
            Ok(0)
        }
        SourceKind::File => {
            let path = match (root.is_empty(), entry.path.is_empty()) {
                (_, true) => root.to_owned(),
                (true, false) => entry.path.clone(),
                (false, false) => format!("{root}/{}", entry.path),
            };
            download_file(client, address, path, entry, &target).await
        }
    }
}

async fn download_file(
    client: &ClusterClient,
    address: &str,
    path: String,
    entry: &SourceEntry,
    target: &Path,
) -> Result<u64> {
    let token = client.issue_token(Resource::Home(path.clone()), &[Right::Read])?;
    let file = File::create(target)?;
    let size = entry.identity.size;
    let mut offset = 0;
    while offset < size {
        let length =
            u32::try_from(size - offset).map_or(IO_BYTES_MAX, |left| left.min(IO_BYTES_MAX));
        let call = ReadSource {
            path: path.clone(),
            identity: entry.identity,
            offset,
            length,
            block_bytes: BLOCK_BYTES_DEFAULT,
        };
        let request = (call, Bytes::new());
        let (said, body) = client
            .call_with_body(address, &token, request, TRIES, CHUNK_TIMEOUT_MS)
            .await?;
        let pieces = body.chunks(BLOCK_BYTES_DEFAULT as usize).map(Digest::of);
        let is_whole = body.len() == length as usize && pieces.eq(said.digests);
        ensure!(is_whole, "the data of '{path}' arrived damaged");
        file.write_all_at(&body, offset)?;
        offset += u64::from(length);
    }
    fs::set_permissions(target, fs::Permissions::from_mode(entry.mode & 0o777))?;
    Ok(size)
}

/// Sends a local file to a home, and returns its bytes when it is durable there.
pub(crate) async fn upload(client: &ClusterClient, local: &Path, url: &str) -> Result<u64> {
    let (address, path) = find_home(client, url).await?;
    let file = File::open(local).with_context(|| format!("open {}", local.display()))?;
    let found = file.metadata()?;
    ensure!(found.is_file(), "{} is not a file", local.display());
    let (size, extraction) = (found.len(), ExtractionId::random());
    let token = client.issue_token(Resource::Home(path.clone()), &[Right::Read, Right::Write])?;
    let long = || Deadline::after_ms(LONG_CALL_TIMEOUT_MS);
    let pool = &client.pool;
    let ask = IssueUploadEpoch {
        home_address: None,
        home_id: None,
        path: path.clone(),
    };
    let issued = pool.call_with_keepalives(&address, &token, ask, long());
    let (epoch, order) = (issued.await?.epoch, 0);
    let fence = Some(UploadFence { epoch, order });
    let begin = BeginPut {
        extraction,
        path,
        mode: found.permissions().mode() & 0o777,
        fence,
    };
    pool.call_with_keepalives(&address, &token, begin, long())
        .await?;
    let (mut offset, mut digest) = (0, DigestHasher::new());
    while offset < size {
        let length = (size - offset).min(u64::from(IO_BYTES_MAX));
        let mut chunk = vec![0; usize::try_from(length)?];
        file.read_exact_at(&mut chunk, offset)
            .with_context(|| format!("read {}", local.display()))?;
        digest.update(&chunk);
        let request = (PutRange { extraction, offset }, chunk.into());
        client
            .call_with_body(&address, &token, request, TRIES, CHUNK_TIMEOUT_MS)
            .await?;
        offset += length;
    }
    let commit = CommitPut {
        extraction,
        size,
        digest: digest.digest(),
        fence,
    };
    let receipt = pool
        .call_with_keepalives(&address, &token, commit, long())
        .await?;
    ensure!(
        receipt.size == size,
        "the home has {} bytes of {size}",
        receipt.size
    );
    Ok(size)
}

/// The path that a text of [`bafs_proto::path`] stands for.
pub(crate) fn os_path(text: &str) -> std::ffi::OsString {
    use std::os::unix::ffi::OsStringExt;
    std::ffi::OsString::from_vec(to_bytes(text).into_owned())
}
