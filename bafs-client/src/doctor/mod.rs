//! What a host has, lacks, and has left over from killed processes. It never waits for a file
//! system that may hang: mounts are read from the kernel's table, and touched by a child only.

pub(crate) mod connections;
pub mod mounts;
mod store;

pub use store::check_store;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::mount::{MsFlags, mount};

use crate::logic::mount_table::MountEntry;
use crate::sandbox::{Check, CheckStatus};
use connections::CONNECTIONS;
use mounts::MountHealth;

/// What to do about what is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairMode {
    /// Tell only.
    ReportOnly,
    /// Mend what can be mended without losing anything.
    Repair,
}

/// Looks at the mounts of this host and at the kernel's list of FUSE connections.
pub fn check_mounts(treatment: RepairMode) -> Vec<Check> {
    let mut checks = vec![check_connections(treatment)];
    match mounts::own_mounts() {
        Ok(mounts) => checks.extend(
            mounts
                .iter()
                .map(|mount| check_mount(mount, &mounts::check_health(mount), treatment)),
        ),
        Err(error) => checks.push(broken_check("mounts", error, "mount -t proc proc /proc")),
    }
    checks
}

fn check_mount(mount: &MountEntry, health: &MountHealth, treatment: RepairMode) -> Check {
    let subject = format!("mount {}", mount.mount_point.display());
    let point = mount.mount_point.display();
    match health {
        MountHealth::Alive => fine_check(subject, format!("{} answers", mount.source)),
        MountHealth::Dead if treatment == RepairMode::Repair => {
            mounts::detach_mount(mount);
            let gone =
                mounts::own_mounts().is_ok_and(|all| all.iter().all(|left| left.id != mount.id));
            if gone {
                return repaired_check(subject, "it was dead; unmounted");
            }
            broken_check(
                subject,
                "dead, but the kernel refuses to unmount it",
                "repeat the \
                command as root",
            )
        }
        MountHealth::Dead => broken_check(
            subject,
            "dead: its server process has ended",
            format!("bafs doctor --repair, or: umount -l {point}"),
        ),
        MountHealth::Silent { waiting } => {
            let waiting = waiting.map_or(String::new(), |count| {
                format!(
                    ", {count} calls are \
                pending"
                )
            });
            broken_check(
                subject,
                format!("does not answer{waiting}"),
                format!("wait for its timeout, or force it: umount -l {point}"),
            )
        }
    }
}

fn check_connections(treatment: RepairMode) -> Check {
    let subject = "fusectl";
    if Path::new(CONNECTIONS).read_dir().is_ok_and(|mut all| {
        // An empty directory is what a kernel shows where nothing is mounted on it.
        all.next().is_some() || mounts::is_mounted(Path::new(CONNECTIONS))
    }) {
        return fine_check(subject, CONNECTIONS);
    }
    let none: Option<&str> = None;
    let mounting = || mount(none, CONNECTIONS, Some("fusectl"), MsFlags::empty(), none);
    if treatment == RepairMode::Repair && mounting().is_ok() {
        return repaired_check(subject, "mounted");
    }
    Check {
        subject: subject.into(),
        status: CheckStatus::Degraded,
        found: format!("nothing is mounted on {CONNECTIONS}"),
        remedy: "root needs it to abort hanging connections: mount -t fusectl none \
                 /sys/fs/fuse/connections"
            .into(),
    }
}

/// Looks at the files of an identity: keys are for their owner only.
pub fn check_identity(directory: &Path, treatment: RepairMode) -> Vec<Check> {
    let subject = format!("identity {}", directory.display());
    let mut checks = Vec::new();
    let mut waiting = vec![directory.to_owned()];
    while let Some(at) = waiting.pop() {
        let entries = match fs::read_dir(&at) {
            Ok(entries) => entries,
            Err(error) => {
                checks.push(broken_check(
                    subject,
                    error,
                    "name the directory of `bafs init`",
                ));
                return checks;
            }
        };
        for entry in entries.flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                waiting.push(path);
            } else if name.contains("key") || name == "token" {
                let subject = format!("key {}", path.display());
                checks.push(check_mode(&subject, &path, 0o600, treatment));
            }
        }
    }
    checks
}

fn check_mode(subject: &str, path: &Path, mode: u32, treatment: RepairMode) -> Check {
    let found = match fs::metadata(path) {
        Ok(found) => found.permissions().mode() & 0o777,
        Err(error) => return broken_check(subject, error, "check its owner"),
    };
    if found & 0o077 == 0 {
        return fine_check(subject, format!("mode {found:o}"));
    }
    let set = || fs::set_permissions(path, fs::Permissions::from_mode(mode));
    if treatment == RepairMode::Repair && set().is_ok() {
        return repaired_check(
            subject,
            &format!("other users could read it; mode changed to {mode:o}"),
        );
    }
    let remedy = format!("chmod {mode:o} {}", path.display());
    broken_check(
        subject,
        format!("other users may use it (mode {found:o})"),
        remedy,
    )
}

fn fine_check(subject: impl Into<String>, found: impl Into<String>) -> Check {
    Check {
        subject: subject.into().into(),
        status: CheckStatus::Fine,
        found: found.into(),
        remedy: String::new(),
    }
}

fn repaired_check(subject: impl Into<String>, found: &str) -> Check {
    Check {
        status: CheckStatus::Repaired,
        ..fine_check(subject, found)
    }
}

fn broken_check(
    subject: impl Into<String>,
    found: impl std::fmt::Display,
    remedy: impl Into<String>,
) -> Check {
    Check {
        status: CheckStatus::Broken,
        remedy: remedy.into(),
        ..fine_check(subject, found.to_string())
    }
}
