//! How often the disk of a node had no space.

use bafs_proto::time::Time;
use serde::{Deserialize, Serialize};

/// Who found no space on a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finder {
    /// A volume that was to be made there.
    Volume,
    /// A job that wrote there.
    Writer,
}

/// What a full disk lacks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DiskResource {
    #[default]
    Bytes,
    Inodes,
}

/// What showed that a disk is full.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskLack {
    /// In words.
    pub(crate) why: String,
    pub(crate) lacks: DiskResource,
}

/// How often the disk of a node had no space, one time after the other.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Fullness {
    /// For volumes, until a job that asks later than the last has got all of its own.
    pub(crate) for_volumes: u32,
    pub(crate) refused_at: Time,
    /// For jobs that wrote there, until one that does succeeds.
    pub(crate) for_writers: u32,
    /// What was told the last time.
    pub(crate) why: String,
    /// What it lacked then.
    #[serde(default)]
    pub(crate) lacks: DiskResource,
    /// The user was told that it seems to be full.
    pub(crate) is_told: bool,
}

impl Fullness {
    pub(crate) fn times(&self) -> u32 {
        self.for_volumes.max(self.for_writers)
    }

    /// What is met while the node gets no work anyway is one and the same.
    pub(crate) fn note(&mut self, finder: Finder, lack: &DiskLack, is_another: bool, now: Time) {
        let times = match finder {
            Finder::Volume => &mut self.for_volumes,
            Finder::Writer => &mut self.for_writers,
        };
        *times = times.saturating_add(u32::from(is_another)).max(1);
        if finder == Finder::Volume {
            self.refused_at = now;
        }
        lack.why.clone_into(&mut self.why);
        self.lacks = lack.lacks;
    }

    /// All volumes of a job that asked for them at this time were made.
    pub(crate) fn note_made(&mut self, asked_at: Time) {
        if asked_at <= self.refused_at {
            return;
        }
        self.for_volumes = 0;
        if self.for_writers == 0 {
            *self = Self::default();
        }
    }
}
