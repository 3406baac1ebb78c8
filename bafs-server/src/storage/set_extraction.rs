//! Sends a set of files of a scratch volume home, with a manifest that is written last.
//!
//! The manifest names each file with its size and digest. It is written twice: before the first
//! file as incomplete, and after the last one as complete. So a set that replaces an older one is
//! never taken for complete while files of both are there.
//!
//! Each file is an upload of its own (`extraction.rs`), whose id follows from the set's id and the
//! path. A set that is asked for again sends nothing again that the node knows to be at home. When
//! the last file is at home, the volume is looked at once more: the set fails if a file came, went
//! or changed meanwhile.
//!
//! All parts have the fence of the set, so no file of an earlier set comes after the manifest.
//!
//! Files of an older set that the new one lacks stay at home, and no manifest names them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use bafs_proto::file_set::{
    MANIFEST_NAME, MANIFEST_VERSION, ManifestFile, SELECTIONS_MAX, SetManifest,
};
use bafs_proto::hash::DigestHasher;
use bafs_proto::ids::ExtractionId;
use bafs_proto::message::{ExtractFile, PutReceipt};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use rustix::fs::MemfdFlags;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::extraction::{Extraction, OpenedFile};
use super::file_set::{FileSet, find_files};
use super::sent_sets::SentFiles;
use crate::errors::run_blocking;
use crate::home_clients::HomeClients;

/// Most files of sets that are open at once, of all sets together: as many as extractions of single
/// files.
pub(super) const SET_FILES_OPEN_MAX: usize = 256;

/// Files of one set under way at once: two full packs of small files.
const CONCURRENT_FILES: usize = 64;

/// Permission bits of a manifest.
const MANIFEST_MODE: u32 = 0o644;

/// A set under way.
pub(super) struct SetExtraction {
    pub(super) root: PathBuf,
    pub(super) call: ExtractFile,
    pub(super) homes: Arc<HomeClients>,
    pub(super) chunk_memory: Arc<Semaphore>,
    pub(super) open_files: Arc<Semaphore>,
    pub(super) sent: Arc<SentFiles>,
    pub(super) deadline: Deadline,
}

/// Part of a set; each is an upload of its own.
#[derive(Debug, Clone, Copy)]
enum SetPart<'a> {
    IncompleteManifest,
    File(&'a str),
    Manifest,
}

impl SetExtraction {
    /// Sends the set. The receipt is that of its manifest, with the size of all files.
    ///
    /// # Errors
    /// As [`find_files`] and [`Extraction::run`]; `WrongState` when the volume changes meanwhile.
    pub(super) async fn run(self) -> Result<PutReceipt> {
        if self.call.selections.len() > SELECTIONS_MAX {
            let text = format!("a set has at most {SELECTIONS_MAX} parts");
            return Err(Error::new(ErrorCode::Malformed, text));
        }
        let found = self.find_files().await?;
        let empty = self.describe_set(false, Vec::new());
        self.send_manifest(SetPart::IncompleteManifest, &empty)
            .await?;
        let receipts = self.send_files(&found).await?;
        if self.find_files().await? != found {
            let text = "files changed during the extraction; extract them after their writer has \
                        ended";
            return Err(Error::new(ErrorCode::WrongState, text));
        }
        let described = receipts.into_iter().map(|(path, receipt)| ManifestFile {
            path,
            bytes: receipt.size,
            blake3: receipt.digest.to_string(),
        });
        let manifest = self.describe_set(true, described.collect());
        let receipt = self.send_manifest(SetPart::Manifest, &manifest).await?;
        Ok(PutReceipt {
            extraction: self.call.extraction,
            size: manifest.bytes,
            ..receipt
        })
    }

    async fn find_files(&self) -> Result<FileSet> {
        let (root, selections) = (self.root.clone(), self.call.selections.clone());
        let volume = self.call.volume;
        let found = run_blocking(move || find_files(&root, &selections)).await;
        found.map_err(|error| error.context(format!("extract from volume {volume}")))
    }

    /// Sends the files, several at once; their receipts by path. After a failure, those under way
    /// go on: what they bring home counts at the next attempt.
    async fn send_files(&self, files: &FileSet) -> Result<BTreeMap<String, PutReceipt>> {
        let mut receipts = BTreeMap::new();
        let (mut under_way, mut failure) = (JoinSet::new(), None);
        for (path, file) in files {
            if under_way.len() >= CONCURRENT_FILES {
                failure = note_receipt(under_way.join_next().await, &mut receipts).err();
            }
            if failure.is_some() {
                break;
            }
            if let Some(receipt) = self.sent.receipt(path, file) {
                receipts.insert(path.clone(), receipt);
                continue;
            }
            let place = self.open_files.clone().acquire_owned().await;
            let place = place.map_err(|error| interrupted_error(&error))?;
            let call = self.call_for(SetPart::File(path), &file.source);
            let (root, deadline) = (self.root.clone(), self.deadline);
            let (sent, path, file) = (self.sent.clone(), path.clone(), file.clone());
            let (homes, memory) = (self.homes.clone(), self.chunk_memory.clone());
            under_way.spawn(async move {
                let _place = place;
                let open = move || Extraction::open(&root, call, homes, memory, deadline);
                let opened = run_blocking(open).await.map_err(|error| match error.code {
                    // It was there when the list was made.
                    ErrorCode::NotFound => Error::new(ErrorCode::WrongState, error.detail),
                    _ => error,
                });
                let receipt = opened?.run().await?;
                sent.note(path.clone(), file, receipt.clone());
                Ok((path, receipt))
            });
        }
        while !under_way.is_empty() {
            let noted = note_receipt(under_way.join_next().await, &mut receipts);
            failure = failure.or_else(|| noted.err());
        }
        failure.map_or(Ok(receipts), Err)
    }

    fn describe_set(&self, complete: bool, files: Vec<ManifestFile>) -> SetManifest {
        SetManifest {
            version: MANIFEST_VERSION,
            complete,
            extraction: self.call.extraction.to_string(),
            bytes: files.iter().map(|file| file.bytes).sum(),
            files,
        }
    }

    async fn send_manifest(&self, part: SetPart<'_>, manifest: &SetManifest) -> Result<PutReceipt> {
        let file = manifest_file(manifest)?;
        let call = self.call_for(part, MANIFEST_NAME);
        let (homes, memory) = (self.homes.clone(), self.chunk_memory.clone());
        Extraction::of_file(file, call, homes, memory, self.deadline)?
            .run()
            .await
    }

    /// The upload of one part.
    fn call_for(&self, part: SetPart<'_>, source: &str) -> ExtractFile {
        let target = match part {
            SetPart::File(path) => path,
            SetPart::IncompleteManifest | SetPart::Manifest => MANIFEST_NAME,
        };
        ExtractFile {
            path: source.to_owned(),
            selections: Vec::new(),
            extraction: part_id(self.call.extraction, part),
            target_path: format!("{}/{target}", self.call.target_path),
            ..self.call.clone()
        }
    }
}

/// The id of an upload of a set: always the same one, and no other's.
fn part_id(set: ExtractionId, part: SetPart<'_>) -> ExtractionId {
    let (kind, path) = match part {
        SetPart::IncompleteManifest => (0u8, ""),
        SetPart::File(path) => (1, path),
        SetPart::Manifest => (2, ""),
    };
    let mut hasher = DigestHasher::new();
    hasher.update(&set.0.to_le_bytes()).update(&[kind]);
    hasher.update(path.as_bytes());
    let mut id = [0; 16];
    id.copy_from_slice(&hasher.digest().0[..16]);
    ExtractionId(u128::from_le_bytes(id))
}

type SentFile = Option<std::result::Result<Result<(String, PutReceipt)>, tokio::task::JoinError>>;

fn note_receipt(sent: SentFile, receipts: &mut BTreeMap<String, PutReceipt>) -> Result<()> {
    if let Some(sent) = sent {
        let (path, receipt) = sent.map_err(|error| interrupted_error(&error))??;
        receipts.insert(path, receipt);
    }
    Ok(())
}

/// A file in memory that has the manifest.
fn manifest_file(manifest: &SetManifest) -> Result<OpenedFile> {
    let failed = |error: &dyn std::fmt::Display| {
        Error::new(ErrorCode::ServerFault, format!("write manifest: {error}"))
    };
    let mut text = serde_json::to_vec_pretty(manifest).map_err(|error| failed(&error))?;
    text.push(b'\n');
    let memory = rustix::fs::memfd_create(MANIFEST_NAME, MemfdFlags::CLOEXEC);
    let mut file = File::from(memory.map_err(|error| failed(&error))?);
    file.write_all(&text).map_err(|error| failed(&error))?;
    Ok(OpenedFile {
        file,
        mode: MANIFEST_MODE,
    })
}

fn interrupted_error(error: &dyn std::fmt::Display) -> Error {
    let text = format!("the extraction was interrupted: {error}");
    Error::new(ErrorCode::ServerFault, text)
}
