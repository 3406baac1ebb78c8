//! Where a node can make control groups that bound memory: below its own, in the hierarchy of
//! version 2 or in the one for memory of version 1. Makes no group for a job.
//!
//! In version 2, a group with processes cannot divide its memory among groups below it. So a node
//! that is alone in its group first moves itself into a group of its own below it. Systemd leaves
//! it alone there (`Delegate=yes`), and a terminal does not.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

/// The group of the node itself, where processes have to leave the one above.
const NODE_GROUP: &str = "bafs-node";

/// The controller that bounds memory.
const CONTROLLER: &str = "memory";

/// Kind of a hierarchy of control groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GroupVersion {
    /// Version 2: one hierarchy for all.
    Unified,
    /// Version 1: the hierarchy for memory.
    Memory,
}

/// A directory below which a node can make control groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupLocation {
    pub(super) version: GroupVersion,
    pub(super) directory: PathBuf,
    /// Whether the node has to leave this group first.
    must_leave: bool,
}

/// Why a node cannot make control groups.
#[derive(Debug, thiserror::Error)]
pub enum GroupObstacle {
    /// None of the hierarchies is there.
    #[error("no hierarchy of control groups for memory is mounted")]
    NoHierarchy,
    /// Version 2, without memory.
    #[error("control group {} may not divide its memory", .0.display())]
    NoController(PathBuf),
    /// Others would have to leave, too.
    #[error("other processes are in control group {}", .0.display())]
    NotAlone(PathBuf),
    /// The system does not let this user.
    #[error("control group {}: {error}", .directory.display())]
    Refused {
        /// The group.
        directory: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
}

impl GroupLocation {
    /// Where a node that this process is would make groups. Changes nothing. Blocks.
    ///
    /// # Errors
    /// What is in the way.
    pub fn find() -> Result<Self, GroupObstacle> {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let (own, mounts) = (read("/proc/self/cgroup"), read("/proc/self/mountinfo"));
        let unified = find_own_group(&own, &mounts, GroupVersion::Unified);
        // Where both are mounted, one of them has the memory.
        let unified = unified.map(|group| check_unified_group(&group));
        let memory = || find_own_group(&own, &mounts, GroupVersion::Memory);
        match (unified, memory()) {
            (Some(Err(GroupObstacle::NoController(_))) | None, Some(group)) => {
                check_memory_group(group)
            }
            (Some(found), _) => found,
            (None, None) => Err(GroupObstacle::NoHierarchy),
        }
    }

    /// In one line, for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let version = match self.version {
            GroupVersion::Unified => 2,
            GroupVersion::Memory => 1,
        };
        format!("{} (version {version})", self.directory.display())
    }

    /// Enables groups below this one; moves this process where that is needed. Blocks.
    pub(super) fn prepare(&self) -> Result<(), GroupObstacle> {
        if self.version == GroupVersion::Memory {
            return Ok(());
        }
        let refused = |error| self.refusal(error);
        let enable = || {
            let control = self.directory.join("cgroup.subtree_control");
            fs::write(control, format!("+{CONTROLLER}"))
        };
        if !self.must_leave {
            return enable().map_err(refused);
        }
        let own = self.directory.join(NODE_GROUP);
        match fs::create_dir(&own) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(refused(error));
            }
            _ => move_this_process(&own).map_err(refused)?,
        }
        enable().map_err(|error| {
            // Nothing was gained by it.
            let _ = move_this_process(&self.directory).and_then(|()| fs::remove_dir(&own));
            refused(error)
        })
    }

    /// The system's refusal of something in this group.
    pub(super) fn refusal(&self, error: io::Error) -> GroupObstacle {
        let directory = self.directory.clone();
        GroupObstacle::Refused { directory, error }
    }
}

fn move_this_process(group: &Path) -> io::Result<()> {
    fs::write(group.join("cgroup.procs"), std::process::id().to_string())
}

fn check_unified_group(own: &Path) -> Result<GroupLocation, GroupObstacle> {
    // A node that was started anew in the same process has left the group above already.
    let has_left = own.file_name().is_some_and(|name| name == NODE_GROUP);
    let above = own.parent().filter(|_| has_left);
    let directory = above.unwrap_or(own).to_owned();
    let read = |name: &str| fs::read_to_string(directory.join(name)).unwrap_or_default();
    if !has_word(&read("cgroup.controllers"), CONTROLLER) {
        return Err(GroupObstacle::NoController(directory));
    }
    // Only the root of all groups has no type, and may keep its processes.
    let must_leave = above.is_none() && directory.join("cgroup.type").exists();
    if must_leave && read("cgroup.procs").trim() != std::process::id().to_string() {
        return Err(GroupObstacle::NotAlone(directory));
    }
    check_access(directory, &["", "cgroup.procs", "cgroup.subtree_control"]).map(|directory| {
        GroupLocation {
            version: GroupVersion::Unified,
            directory,
            must_leave,
        }
    })
}

fn check_memory_group(own: PathBuf) -> Result<GroupLocation, GroupObstacle> {
    check_access(own, &[""]).map(|directory| GroupLocation {
        version: GroupVersion::Memory,
        directory,
        must_leave: false,
    })
}

/// Checks that this user may write these files of a group.
fn check_access(directory: PathBuf, names: &[&str]) -> Result<PathBuf, GroupObstacle> {
    for name in names {
        if let Err(error) = access(directory.join(name), Access::WRITE_OK) {
            let error = error.into();
            return Err(GroupObstacle::Refused { directory, error });
        }
    }
    Ok(directory)
}

/// The directory of a process' group, from the kernel's lists of its groups and of mounts.
fn find_own_group(own: &str, mounts: &str, version: GroupVersion) -> Option<PathBuf> {
    let path = own.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let is_wanted = match version {
            GroupVersion::Unified => controllers.is_empty(),
            GroupVersion::Memory => controllers.split(',').any(|name| name == CONTROLLER),
        };
        is_wanted.then_some(Path::new(path))
    })?;
    mounts.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut file_system = file_system.split(' ');
        let is_wanted = match (version, file_system.next()?) {
            (GroupVersion::Unified, "cgroup2") => true,
            (GroupVersion::Memory, "cgroup") => {
                let options = file_system.nth(1)?;
                options.split(',').any(|name| name == CONTROLLER)
            }
            _ => false,
        };
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        let below = path.strip_prefix(root).ok().filter(|_| is_wanted)?;
        // Without a trailing slash, for the root of the mount.
        Some(
            Path::new(point)
                .components()
                .chain(below.components())
                .collect(),
        )
    })
}

fn has_word(text: &str, word: &str) -> bool {
    text.split_ascii_whitespace().any(|found| found == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
        35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n\
        41 31 0:38 /slice /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";

    #[test]
    fn mounts_lead_to_the_own_group() {
        let own = "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/slice/node.service\n";
        let group = |own, version| find_own_group(own, MOUNTS, version);
        let memory = group(own, GroupVersion::Memory);
        assert_eq!(memory, Some("/sys/fs/cgroup/memory/a/b".into()));
        let unified = group(own, GroupVersion::Unified);
        let expected = "/sys/fs/cgroup/unified/node.service";
        assert_eq!(unified, Some(expected.into()));
        let root = group("4:memory:/\n", GroupVersion::Memory);
        assert_eq!(root, Some("/sys/fs/cgroup/memory".into()));
        assert_eq!(group("0::/other\n", GroupVersion::Unified), None);
        assert_eq!(group("", GroupVersion::Memory), None);
    }

    /// A directory that looks as a group of version 2 does.
    fn group_fixture(processes: &str, controllers: &str) -> tempfile::TempDir {
        let group = tempfile::tempdir().expect("directory");
        let files = [
            ("cgroup.procs", processes),
            ("cgroup.controllers", controllers),
            ("cgroup.subtree_control", ""),
            ("cgroup.type", "domain\n"),
        ];
        for (name, text) in files {
            fs::write(group.path().join(name), text).expect("a file");
        }
        group
    }

    #[test]
    fn node_moves_only_if_alone() {
        let own = format!("{}\n", std::process::id());
        let group = group_fixture(&own, "cpu memory pids\n");
        let found = check_unified_group(group.path()).expect("a location");
        assert!(found.must_leave);
        fs::create_dir(group.path().join(NODE_GROUP)).expect("a group");
        found.prepare().expect("it may divide its memory");
        let read = |name: &str| fs::read_to_string(group.path().join(name)).expect("a file");
        assert_eq!(read("bafs-node/cgroup.procs"), own.trim());
        assert_eq!(read("cgroup.subtree_control"), "+memory");
        // The next node finds that it need not.
        let again = check_unified_group(&group.path().join(NODE_GROUP)).expect("a location");
        assert_eq!(
            (again.directory.as_path(), again.must_leave),
            (group.path(), false)
        );

        let shared = group_fixture("1\n2\n", "memory\n");
        let refused = check_unified_group(shared.path()).expect_err("others are there");
        assert!(matches!(refused, GroupObstacle::NotAlone(_)), "{refused}");
        let without = group_fixture(&own, "cpu\n");
        let refused = check_unified_group(without.path()).expect_err("no memory");
        assert!(
            matches!(refused, GroupObstacle::NoController(_)),
            "{refused}"
        );
    }
}
