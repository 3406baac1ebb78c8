//! Puts the agent into a mount name space of its own, as root or through a user name space,
//! and explains a refusal. Mounts no file system and starts no process.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{getegid, geteuid};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::mounts;

/// How often threads that end are looked at, with what pause: for five seconds.
const THREAD_EXIT_POLLS: u32 = 5_000;
const THREAD_EXIT_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// By what right the agent may mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Privilege {
    /// The agent is root and may mount.
    Root,
    /// The agent is an ordinary user and appears as root in its own user name space.
    UserNamespace {
        /// The user's id outside, which the job shows again.
        uid: u32,
        /// The user's primary group id outside.
        gid: u32,
    },
}

/// Whether this process is root of the machine, and not only of a user name space.
pub fn is_root_of_machine() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let shows_all = map.split_whitespace().eq(["0", "0", "4294967295"]);
    geteuid().is_root() && shows_all
}

/// Why the agent could not get a mount name space of its own.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{}; {}", self.problem(), self.remedy())]
pub enum EnterError {
    /// A name space is entered by one thread; the others would stay outside.
    Threads {
        /// How many threads there were.
        count: usize,
    },
    /// The agent finds its own program and its threads in `/proc`.
    NoProc {
        /// The kernel's answer.
        errno: Errno,
    },
    /// Neither root nor user name spaces.
    NoUserNamespace {
        /// What is missing.
        missing: String,
        /// What to do about it.
        remedy: String,
        /// The kernel's answer.
        errno: Errno,
    },
    /// There is a name space, but mounting in it was refused.
    MountRefused {
        /// What was attempted.
        step: &'static str,
        /// What to do about it.
        remedy: String,
        /// The kernel's answer.
        errno: Errno,
    },
    /// No directory of the host can carry the private mount points.
    NoBase {
        /// The directories that were tried.
        candidates: Vec<PathBuf>,
    },
}

impl EnterError {
    /// What is wrong.
    pub fn problem(&self) -> String {
        match self {
            Self::Threads { count } => {
                format!("cannot enter a private name space with {count} threads")
            }
            Self::NoProc { errno } => format!("/proc cannot be read ({errno})"),
            Self::NoUserNamespace { missing, errno, .. } => {
                format!("not root, and user name spaces are unavailable: {missing} ({errno})")
            }
            Self::MountRefused { step, errno, .. } => {
                format!("cannot {step} in the private name space: {errno}")
            }
            Self::NoBase { candidates } => {
                format!("none of the directories {candidates:?} can hold the private mount points")
            }
        }
    }

    /// What to do about it.
    pub fn remedy(&self) -> &str {
        match self {
            Self::Threads { .. } => "call enter_private first in main",
            Self::NoProc { .. } => "mount it: mount -t proc proc /proc",
            Self::NoUserNamespace { remedy, .. } | Self::MountRefused { remedy, .. } => remedy,
            Self::NoBase { .. } => "run as root",
        }
    }
}

/// Moves this process into a private mount name space.
///
/// Must be called while the process has one thread. Afterwards a mount that this process makes
/// is visible to nobody else and vanishes with the last process that can see it. Mounts of the
/// host keep arriving here, as automounted home directories would fail otherwise.
pub fn enter_private() -> Result<Privilege, EnterError> {
    check_single_thread()?;
    let (uid, gid) = (geteuid(), getegid());
    if uid.is_root() {
        match unshare(CloneFlags::CLONE_NEWNS) {
            Ok(()) => {
                set_slave_propagation()?;
                return Ok(Privilege::Root);
            }
            // Root of a container without CAP_SYS_ADMIN goes the way of ordinary users.
            Err(Errno::EPERM) => {}
            Err(errno) => return Err(mount_refusal("unshare the mounts", errno)),
        }
    }
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS).map_err(no_user_namespace)?;
    let (uid, gid) = (uid.as_raw(), gid.as_raw());
    map_ids((0, uid), (0, gid)).map_err(no_user_namespace)?;
    set_slave_propagation()?;
    Ok(Privilege::UserNamespace { uid, gid })
}

/// Waits for threads that are ending: one that was joined is listed until the kernel has let go of
/// it, which takes a moment where the machine is busy, and the kernel counts it until then.
fn check_single_thread() -> Result<(), EnterError> {
    for looks_left in (0..THREAD_EXIT_POLLS).rev() {
        let threads = fs::read_dir("/proc/self/task").map_err(|error| EnterError::NoProc {
            errno: errno_of(&error),
        })?;
        match threads.count() {
            1 => break,
            count if looks_left == 0 => return Err(EnterError::Threads { count }),
            _ => thread::sleep(THREAD_EXIT_POLL_INTERVAL),
        }
    }
    Ok(())
}

fn set_slave_propagation() -> Result<(), EnterError> {
    mounts::set_slave_propagation()
        .map_err(|errno| mount_refusal("separate the mounts from the host's", errno))
}

/// Writes the id maps of the user name space just entered, each as (inside, outside).
pub(super) fn map_ids(uid: (u32, u32), gid: (u32, u32)) -> Result<(), Errno> {
    let write = |file: &str, text: String| {
        fs::write(format!("/proc/self/{file}"), text).map_err(|error| errno_of(&error))
    };
    write("uid_map", format!("{} {} 1", uid.0, uid.1))?;
    // Without this the kernel lets no ordinary user map a group: giving up a group could
    // open files that deny that very group.
    write("setgroups", "deny".to_owned())?;
    write("gid_map", format!("{} {} 1", gid.0, gid.1))
}

pub(super) fn errno_of(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

/// The switches by which a host turns user name spaces off; `None` where there is no switch.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct NamespaceSwitches {
    namespaces_max: Option<u64>,
    debian_clone: Option<u64>,
    apparmor_restrict: Option<u64>,
}

impl NamespaceSwitches {
    pub(super) fn read() -> Self {
        let value = |name: &str| {
            fs::read_to_string(format!("/proc/sys/{name}"))
                .ok()?
                .trim()
                .parse()
                .ok()
        };
        Self {
            namespaces_max: value("user/max_user_namespaces"),
            debian_clone: value("kernel/unprivileged_userns_clone"),
            apparmor_restrict: value("kernel/apparmor_restrict_unprivileged_userns"),
        }
    }

    /// What is missing, and what to do.
    pub(super) fn explain(self, errno: Errno) -> (&'static str, &'static str) {
        if self.namespaces_max == Some(0) {
            (
                "user.max_user_namespaces is 0",
                "ask root for: sysctl user.max_user_namespaces=15000",
            )
        } else if self.debian_clone == Some(0) {
            (
                "kernel.unprivileged_userns_clone is 0",
                "ask root for: sysctl kernel.unprivileged_userns_clone=1",
            )
        } else if matches!(self.apparmor_restrict, Some(1..)) {
            (
                "kernel.apparmor_restrict_unprivileged_userns is 1",
                "ask root for an AppArmor profile that allows this program `userns`, or for: \
                 sysctl kernel.apparmor_restrict_unprivileged_userns=0",
            )
        } else if matches!(errno, Errno::ENOSPC | Errno::EUSERS) {
            (
                "all user name spaces are taken, or they are nested too deeply",
                "end other containers or raise user.max_user_namespaces",
            )
        } else if matches!(errno, Errno::EINVAL | Errno::ENOSYS) {
            (
                "the kernel was built without them",
                "use a kernel with CONFIG_USER_NS=y, or be root",
            )
        } else {
            (
                "a security filter forbids them",
                "in a container start it with `--security-opt seccomp=unconfined` or \
                 `--cap-add SYS_ADMIN`; in a chroot leave it; or be root",
            )
        }
    }
}

fn no_user_namespace(errno: Errno) -> EnterError {
    let (missing, remedy) = NamespaceSwitches::read().explain(errno);
    EnterError::NoUserNamespace {
        missing: missing.into(),
        remedy: remedy.into(),
        errno,
    }
}

/// Ubuntu grants the name space and then refuses every use of it; hence the same explanation.
pub(super) fn mount_refusal(step: &'static str, errno: Errno) -> EnterError {
    let (missing, remedy) = NamespaceSwitches::read().explain(errno);
    EnterError::MountRefused {
        step,
        remedy: format!("perhaps {missing}: {remedy}"),
        errno,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(switches: NamespaceSwitches, errno: Errno, missing: &str) {
        let (what, remedy) = switches.explain(errno);
        assert!(what.contains(missing), "{what}");
        assert!(!remedy.is_empty());
    }

    #[test]
    fn the_disabled_kernel_switch_is_named() {
        let on = NamespaceSwitches {
            namespaces_max: Some(9),
            debian_clone: Some(1),
            apparmor_restrict: Some(0),
        };
        check(
            NamespaceSwitches {
                namespaces_max: Some(0),
                ..on
            },
            Errno::ENOSPC,
            "max_user_namespaces",
        );
        check(
            NamespaceSwitches {
                debian_clone: Some(0),
                ..on
            },
            Errno::EPERM,
            "unprivileged_userns_clone",
        );
        check(
            NamespaceSwitches {
                apparmor_restrict: Some(1),
                ..on
            },
            Errno::EACCES,
            "apparmor",
        );
        check(on, Errno::ENOSPC, "taken");
        check(on, Errno::EINVAL, "built without");
        check(on, Errno::EPERM, "security filter");
        check(
            NamespaceSwitches::default(),
            Errno::EPERM,
            "security filter",
        );
    }

    #[test]
    fn a_process_with_threads_is_refused() {
        // The test harness itself is the second thread.
        assert!(matches!(
            enter_private(),
            Err(EnterError::Threads { count: 2.. })
        ));
    }
}
