//! The directory of a workflow in the state of a service, through which the service and the run
//! talk: both may end at any time, and none of it is lost. Starts nothing.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use bafs_queue::{Resources, RunOutcome, RunUsage};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::result_places::ResultPlaces;

/// What processes of the run print as results.
pub(super) const OUTPUT_FILE: &str = "output.log";

/// What else they print; made before the first of them starts.
pub(super) const MESSAGES_FILE: &str = "messages.log";

/// What the run may use; written by the service.
const SHARE_FILE: &str = "share.json";

/// What it has used; written by the run.
const USAGE_FILE: &str = "usage.json";

/// How it ended; written by the run before it gives up its lock.
const OUTCOME_FILE: &str = "outcome.json";

/// Where its results go; written with the submission.
const PLACES_FILE: &str = "places.json";

/// The first parts of paths here that are not for the files of a user.
pub(super) const RESERVED_NAMES: [&str; 6] = [
    OUTPUT_FILE,
    MESSAGES_FILE,
    SHARE_FILE,
    USAGE_FILE,
    OUTCOME_FILE,
    PLACES_FILE,
];

/// What the process of a run says of itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UsageFile {
    /// The process, which hears signals now.
    pub(crate) process: u32,
    /// What the workflow has used since its first start.
    pub(crate) used: RunUsage,
}

/// The directory of a workflow.
#[derive(Debug, Clone)]
pub(crate) struct RunFiles {
    directory: PathBuf,
}

impl RunFiles {
    /// The files in a directory.
    pub(crate) fn new(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// The directory.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether a process of the run was started here.
    pub(crate) fn has_begun(&self) -> bool {
        self.directory.join(MESSAGES_FILE).exists()
    }

    /// What the run may use; nothing if nobody said.
    pub(crate) fn read_share(&self) -> Option<Resources> {
        self.read(SHARE_FILE)
    }

    /// Tells the run what it may use.
    pub(crate) fn write_share(&self, share: Resources) -> Result<()> {
        self.write(SHARE_FILE, &share, false)
    }

    /// What the run has used.
    pub(crate) fn read_usage(&self) -> Option<UsageFile> {
        self.read(USAGE_FILE)
    }

    /// Tells what the run has used.
    pub(crate) fn write_usage(&self, usage: UsageFile) -> Result<()> {
        self.write(USAGE_FILE, &usage, false)
    }

    /// How the run ended.
    pub(crate) fn read_outcome(&self) -> Option<RunOutcome> {
        self.read(OUTCOME_FILE)
    }

    /// Tells how the run ended, on stable storage.
    pub(crate) fn write_outcome(&self, outcome: &RunOutcome) -> Result<()> {
        self.write(OUTCOME_FILE, outcome, true)
    }

    /// Where results go; nothing if an earlier version took the submission.
    pub(super) fn read_places(&self) -> Option<ResultPlaces> {
        self.read(PLACES_FILE)
    }

    /// Notes where results go, on stable storage.
    pub(super) fn write_places(&self, places: &ResultPlaces) -> Result<()> {
        self.write(PLACES_FILE, places, true)
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        let bytes = fs::read(self.directory.join(name)).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    fn write(&self, name: &str, value: &impl Serialize, is_durable: bool) -> Result<()> {
        let bytes = serde_json::to_vec(value)?;
        write_whole_file(&self.directory.join(name), &bytes, is_durable)
    }
}

/// Writes a file that is never half there, for its owner only.
pub(super) fn write_whole_file(path: &Path, bytes: &[u8], is_durable: bool) -> Result<()> {
    let mut draft = path.as_os_str().to_owned();
    draft.push(".new");
    let written = || {
        let mut options = OpenOptions::new();
        options.create(true).truncate(true).write(true);
        let mut file = options.mode(0o600).open(&draft)?;
        file.write_all(bytes)?;
        if is_durable {
            file.sync_all()?;
        }
        fs::rename(&draft, path)?;
        match path.parent() {
            Some(directory) if is_durable => File::open(directory)?.sync_all(),
            _ => Ok(()),
        }
    };
    written().with_context(|| format!("cannot write {}", path.display()))
}

/// Removes a directory with all that is in it, if it is there.
pub(super) fn remove_directory(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
