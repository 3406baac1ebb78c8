//! Files that change their user or group when executed, and what a change by an ordinary user takes
//! from them: the kernel leaves that to us. Changes none.

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bafs_proto::file_op::{Attr, Caller};
use bafs_proto::ids::InodeNo;

const SET_UID: u32 = 0o4000;
const SET_GID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o0010;

/// Permission bits and group of the files of a volume that have such bits, as far as it has told
/// of them.
#[derive(Debug, Default)]
pub(crate) struct SetIdFiles {
    files: Mutex<BTreeMap<InodeNo, (u32, u32)>>,
    has_any: AtomicBool,
}

impl SetIdFiles {
    /// The tree told attributes of a file.
    pub(crate) fn observe_attr(&self, attr: &Attr) {
        if attr.is_regular() && attr.mode & (SET_UID | SET_GID) != 0 {
            self.has_any.store(true, Ordering::Relaxed);
            self.files().insert(attr.ino, (attr.mode, attr.gid));
        } else if self.has_any.load(Ordering::Relaxed) {
            self.files().remove(&attr.ino);
        }
    }

    /// The permission bits that a file must get when `caller` changes its content or its owner;
    /// `None` if nothing changes.
    pub(crate) fn mode_after_change(&self, ino: InodeNo, caller: Caller) -> Option<u32> {
        if caller.uid == 0 || !self.has_any.load(Ordering::Relaxed) {
            return None;
        }
        let (mode, gid) = self.files().get(&ino).copied()?;
        Some(clear_set_id_bits(mode, || is_in_group(caller, gid)))
    }

    fn files(&self) -> MutexGuard<'_, BTreeMap<InodeNo, (u32, u32)>> {
        // No holder leaves the map half-changed.
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The permission bits that are left of `mode`. Without the right to execute, the set-group-id bit
/// once meant mandatory locking and stays for members of the group.
pub(crate) fn clear_set_id_bits(mode: u32, is_member: impl FnOnce() -> bool) -> u32 {
    let may_stay = mode & (SET_GID | GROUP_EXECUTE) == SET_GID;
    let lost = match may_stay && is_member() {
        true => SET_UID,
        false => SET_UID | SET_GID,
    };
    mode & 0o7777 & !lost
}

/// The kernel tells only the group that new files would get. The others are asked of `/proc`, which
/// shows no process outside of our name space: then, and when it has gone, they are taken for none.
fn is_in_group(caller: Caller, gid: u32) -> bool {
    gid == caller.gid
        || caller.pid != 0
            && fs::read_to_string(format!("/proc/{}/status", caller.pid))
                .is_ok_and(|status| has_group(&status, caller, gid))
}

/// Whether the status of a process names `gid` among its groups. Its user and group must be those
/// of the caller: where `/proc` is that of another name space, the number is somebody else's.
fn has_group(status: &str, caller: Caller, gid: u32) -> bool {
    let numbers = |label: &str| {
        let rest = status.lines().find_map(|line| line.strip_prefix(label));
        rest.into_iter()
            .flat_map(str::split_whitespace)
            .filter_map(|number| number.parse::<u32>().ok())
    };
    // Real, effective, saved, and the one that counts for files.
    let is_caller =
        numbers("Uid:").nth(3) == Some(caller.uid) && numbers("Gid:").nth(3) == Some(caller.gid);
    is_caller && numbers("Groups:").any(|group| group == gid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_callers_own_groups_count() {
        let status = "Name:\tdd\nUid:\t1\t2\t3\t1000\nGid:\t5\t6\t7\t1001\nGroups:\t10 2000 \n";
        let caller = |uid, gid| Caller { uid, gid, pid: 7 };
        assert!(has_group(status, caller(1000, 1001), 2000));
        assert!(!has_group(status, caller(1000, 1001), 200));
        assert!(!has_group(status, caller(1, 1001), 2000));
        assert!(!has_group(status, caller(1000, 5), 2000));
        let bare = "Uid:\t0\t0\t0\t1000\nGid:\t0\t0\t0\t1001\nGroups:\t\n";
        assert!(!has_group(bare, caller(1000, 1001), 0));
    }

    #[test]
    fn group_membership_is_checked_only_when_needed() {
        let unasked = || unreachable!("nobody needs to know");
        for (before, after) in [(0o6755, 0o755), (0o4745, 0o745), (0o2777, 0o777)] {
            assert_eq!(clear_set_id_bits(before, unasked), after, "{before:o}");
        }
        assert_eq!(clear_set_id_bits(0o6745, || true), 0o2745);
        assert_eq!(clear_set_id_bits(0o6745, || false), 0o745);
    }
}
