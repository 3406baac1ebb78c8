//! What outlives the process of a cache volume's data, beside manifest, pins and blocks.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use bafs_proto::hash::Digest;
use bafs_proto::ids::VolumeId;
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::token::Token;
use bafs_proto::volume::VolumeSpec;
use bafs_proto::{Error, ErrorCode, Result, codec};
use serde::{Deserialize, Serialize};

use super::errors::disk_fault;

/// Name of the file in the directory of the data.
pub(super) const RECORD: &str = "record";

const RECORD_VERSION: u32 = 5;

/// A volume that shows the data.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct CacheUser {
    pub(super) spec: VolumeSpec,
    pub(super) source_token: Token,
}

/// The source, its present generation, and the volumes that show it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct CacheRecord {
    pub(super) version: u32,
    /// As the first of these volumes was asked for.
    pub(super) spec: VolumeSpec,
    pub(super) generation: u64,
    pub(super) manifest: Digest,
    pub(super) is_file: bool,
    pub(super) warnings: SourceWarnings,
    /// In the order in which they came; none while the data only wait for one.
    pub(super) users: Vec<CacheUser>,
}

/// As versions before 0.2 wrote it: data of one volume.
#[derive(Debug, Deserialize)]
struct CacheRecordV4 {
    version: u32,
    spec: VolumeSpec,
    source_token: Token,
    generation: u64,
    manifest: Digest,
    is_file: bool,
    warnings: SourceWarnings,
}

impl CacheRecord {
    /// Of a first generation with this manifest, which is of one file or of a directory.
    pub(super) fn new(
        user: CacheUser,
        manifest: Digest,
        is_file: bool,
        warnings: SourceWarnings,
    ) -> Self {
        Self {
            version: RECORD_VERSION,
            spec: user.spec.clone(),
            generation: 1,
            manifest,
            is_file,
            warnings,
            users: vec![user],
        }
    }

    /// Reads the record in a directory (waits for the disk).
    ///
    /// # Errors
    /// `ServerFault` when the disk fails, `Malformed` when it is damaged, `VersionMismatch`.
    pub(super) fn read(directory: &Path) -> Result<Self> {
        let path = directory.join(RECORD);
        let bytes = std::fs::read(&path).map_err(|e| disk_fault("read the record", &path, e))?;
        let version = bytes.first_chunk().copied().map_or(0, u32::from_le_bytes);
        match version {
            RECORD_VERSION => codec::decode(&bytes),
            4 => codec::decode::<CacheRecordV4>(&bytes).map(Into::into),
            _ => {
                let text = format!("a cache volume of version {version}");
                Err(Error::new(ErrorCode::VersionMismatch, text))
            }
        }
    }

    /// Writes it whole and synced, or leaves the one that is there (waits for the disk).
    ///
    /// # Errors
    /// `ServerFault` when the disk fails.
    pub(super) fn write(&self, directory: &Path) -> Result<()> {
        let path = directory.join(RECORD);
        let temporary = directory.join("record.new");
        let bytes = codec::encode(self)?;
        let written = private_file(&temporary)
            .and_then(|mut file| {
                file.write_all(&bytes)?;
                file.sync_all()
            })
            .and_then(|()| std::fs::rename(&temporary, &path))
            .and_then(|()| File::open(directory)?.sync_all());
        written.map_err(|e| disk_fault("write the record", &path, e))
    }

    /// The volume of this id.
    pub(super) fn user(&self, id: VolumeId) -> Option<&CacheUser> {
        self.users.iter().find(|user| user.spec.id == id)
    }

    /// What the data may take, in bytes and in files: the most that one of the volumes reserved.
    pub(super) fn capacity(&self) -> (u64, u64) {
        let sizes = self.users.iter().map(|user| &user.spec);
        let sizes = sizes.map(|spec| (spec.size_bytes, spec.size_files));
        let most = sizes.reduce(|one, other| (one.0.max(other.0), one.1.max(other.1)));
        most.unwrap_or((self.spec.size_bytes, self.spec.size_files))
    }
}

impl From<CacheRecordV4> for CacheRecord {
    fn from(old: CacheRecordV4) -> Self {
        debug_assert_eq!(old.version, 4, "the version was looked at");
        let user = CacheUser {
            spec: old.spec,
            source_token: old.source_token,
        };
        Self {
            generation: old.generation,
            ..Self::new(user, old.manifest, old.is_file, old.warnings)
        }
    }
}

/// The record holds a capability: nobody else may read it.
fn private_file(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    options.open(path)
}
