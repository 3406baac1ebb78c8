//! Tells what this host offers to jobs and mounts, and what to do about what it lacks. Repairs
//! nothing.

use std::borrow::Cow;
use std::env;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::unistd::geteuid;
use serde::Serialize;

use super::privilege::{Privilege, errno_of};
use super::probe;

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was looked at, such as `/dev/fuse` or a mount.
    pub subject: Cow<'static, str>,
    /// How it stands.
    pub status: CheckStatus,
    /// What was found, in one line.
    pub found: String,
    /// What to do; empty when nothing is to be done.
    pub remedy: String,
}

/// How one thing stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum CheckStatus {
    /// As it should be.
    Fine,
    /// Something works less well without it.
    Degraded,
    /// No job can run without it.
    Missing,
    /// Something is left over, or wrong, and in the way.
    Broken,
    /// It was broken, and is mended.
    Repaired,
}

impl Check {
    fn fine_check(subject: &'static str, found: impl Into<String>) -> Self {
        let found = found.into();
        Self {
            subject: subject.into(),
            status: CheckStatus::Fine,
            found,
            remedy: String::new(),
        }
    }
}

/// Looks at everything that a sandbox and its FUSE sessions need.
///
/// Starts this program once more for a moment, so its `main` must call
/// [`super::dispatch_job_init`]. Touches no mounted file system and therefore cannot hang.
pub fn check_host() -> Vec<Check> {
    vec![
        check_user(),
        check_name_space(),
        check_device(),
        check_mounter(),
    ]
}

fn check_user() -> Check {
    let user = geteuid();
    let found = if user.is_root() {
        "root".to_owned()
    } else {
        format!("ordinary user {user}")
    };
    Check::fine_check("user", found)
}

fn check_name_space() -> Check {
    let subject = "private name space";
    match probe::probe_name_space() {
        Ok(Privilege::Root) => Check::fine_check(subject, "sandbox works as root"),
        Ok(Privilege::UserNamespace { uid, .. }) => {
            let found = format!("sandbox works as user {uid} in a user name space");
            Check::fine_check(subject, found)
        }
        Err(refused) => Check {
            subject: subject.into(),
            status: CheckStatus::Missing,
            found: refused.problem,
            remedy: refused.remedy,
        },
    }
}

fn check_device() -> Check {
    let subject = "/dev/fuse";
    let Err(error) = OpenOptions::new().read(true).write(true).open(subject) else {
        return Check::fine_check(subject, "opens for reading and writing");
    };
    let remedy = match errno_of(&error) {
        Errno::ENOENT => {
            "load the module (modprobe fuse); in a container start it with --device /dev/fuse"
        }
        Errno::EACCES => "let all users open it: chmod 666 /dev/fuse, as Debian's udev rule does",
        Errno::EPERM => "allow the device: start the container with --device /dev/fuse",
        Errno::ENODEV | Errno::ENXIO => "load the module: modprobe fuse",
        _ => "use a kernel with CONFIG_FUSE_FS",
    };
    Check {
        subject: subject.into(),
        status: CheckStatus::Missing,
        found: error.to_string(),
        remedy: remedy.to_owned(),
    }
}

fn check_mounter() -> Check {
    let subject = "fusermount3";
    let path = env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
    let found: Option<PathBuf> = env::split_paths(&path)
        .map(|directory| directory.join(subject))
        .find(|candidate| candidate.is_file());
    match found {
        Some(path) => check_mounter_file(subject, &path),
        None => Check {
            subject: subject.into(),
            status: CheckStatus::Degraded,
            found: "not in PATH".to_owned(),
            remedy: "ordinary users need it to mount outside a job: install package fuse3".into(),
        },
    }
}

fn check_mounter_file(subject: &'static str, path: &Path) -> Check {
    use std::os::unix::fs::MetadataExt;
    let set_user_id = path
        .metadata()
        .is_ok_and(|found| found.mode() & 0o4000 != 0);
    let shown = path.display();
    if set_user_id || geteuid().is_root() {
        return Check::fine_check(subject, shown.to_string());
    }
    Check {
        subject: subject.into(),
        status: CheckStatus::Degraded,
        found: format!("{shown} is not set-user-id"),
        remedy: format!("ordinary users need that to mount outside a job: chmod u+s {shown}"),
    }
}
