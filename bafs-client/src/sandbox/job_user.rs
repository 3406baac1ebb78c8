//! Gives the process about to run a job the job's user and no way back. Looks nothing up: ids
//! come as numbers.

use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_no_new_privs;
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};

use super::outcome::{NotStarted, NotStartedReason};
use super::plan::JobUser;
use super::privilege::{Privilege, map_ids};

/// User and group of a job, as its own name space and others have them.
pub(super) fn ids_of(identity: &JobUser, privilege: Privilege) -> (u32, u32) {
    match (identity, privilege) {
        (JobUser::OtherUser { uid, gid, .. }, _) => (*uid, *gid),
        (JobUser::SameUser, Privilege::UserNamespace { uid, gid }) => (uid, gid),
        (JobUser::SameUser, Privilege::Root) => (
            nix::unistd::geteuid().as_raw(),
            nix::unistd::getegid().as_raw(),
        ),
    }
}

/// Takes on `identity`. The process must have one thread.
///
/// Only a job of real root keeps set-user-id programs: in a root directory whose content the
/// job's owner chose, such a program would trust files that it should not.
pub(super) fn switch_user(identity: &JobUser, privilege: Privilege) -> Result<(), NotStarted> {
    let taken = match (identity, privilege) {
        (JobUser::SameUser, Privilege::Root) => return Ok(()),
        (JobUser::SameUser, Privilege::UserNamespace { uid, gid }) => restore_outside_ids(uid, gid),
        (
            JobUser::OtherUser { uid, gid, .. },
            Privilege::UserNamespace {
                uid: own,
                gid: group,
            },
        ) if (*uid, *gid) == (own, group) => restore_outside_ids(own, group),
        (JobUser::OtherUser { uid, .. }, Privilege::UserNamespace { uid: own, .. }) => {
            return Err(NotStarted {
                reason: NotStartedReason::IdentityRefused,
                errno: None,
                message: format!(
                    "user {own} cannot run a job as user {uid}; start the agent as root or as \
                     that user"
                ),
            });
        }
        (JobUser::OtherUser { uid, gid, groups }, Privilege::Root) => {
            become_user(*uid, *gid, groups)
        }
    };
    taken
        .and_then(|()| set_no_new_privs())
        .map_err(|errno| NotStarted {
            reason: NotStartedReason::IdentityRefused,
            errno: Some(errno as i32),
            message: format!("cannot switch to the job's user: {errno}"),
        })
}

/// Inside the agent's user name space the user looks like root. A second name space turns the
/// number back, and its owner has no power over the mounts, which belong to the first.
fn restore_outside_ids(uid: u32, gid: u32) -> nix::Result<()> {
    unshare(CloneFlags::CLONE_NEWUSER)?;
    map_ids((uid, 0), (gid, 0))
}

fn become_user(uid: u32, gid: u32, groups: &[u32]) -> nix::Result<()> {
    let groups: Vec<_> = groups.iter().copied().map(Gid::from_raw).collect();
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    setgroups(&groups)?;
    setresgid(gid, gid, gid)?;
    setresuid(uid, uid, uid)
}
