//! Jobs that failed because they tried to write where they must not, by what they printed.

use bafs_proto::message::JobReport;
use bafs_workflow::{JobIndex, Mount, VolumeIndex};

use crate::policy::View;

/// What a program says that was not allowed to write.
const READ_ONLY: &str = "Read-only file system";

/// What a job may have failed of, with the line that it printed.
#[derive(Debug)]
pub(crate) enum RefusedWrites {
    /// The disk of a volume is read-only.
    Disk(VolumeIndex, String),
    /// Volumes where it must not write.
    Volumes(Vec<VolumeIndex>, String),
}

/// Finds out whether a job that failed by its own fault tried to write where it must not.
pub(crate) fn find_refused_writes(
    view: View<'_>,
    job: JobIndex,
    report: &JobReport,
) -> Option<RefusedWrites> {
    let mut lines = report.output_tail.lines();
    let line = lines.find(|line| line.contains(READ_ONLY))?;
    let line: String = line.chars().take(200).collect();
    let spec = view.graph.workflow.job(job);
    Some(match refused(&line, &spec.mounts) {
        Refused::Disk(volume) => RefusedWrites::Disk(volume, line),
        Refused::Writes(named) => RefusedWrites::Volumes(named, line),
        Refused::Unclear => {
            let mounted = view.graph.mounted(job).into_iter();
            let locked = mounted.filter(|(_, writable)| !writable);
            RefusedWrites::Volumes(locked.map(|(volume, _)| volume).collect(), line)
        }
    })
}

/// What refused a program something as on a read-only file system.
#[derive(Debug, PartialEq)]
enum Refused {
    /// The disk of a volume, which the job may write or only read: nothing that it did.
    Disk(VolumeIndex),
    /// Volumes where it must not write.
    Writes(Vec<VolumeIndex>),
    /// It names no volume.
    Unclear,
}

/// What refused a program something, by the line that it printed.
fn refused(line: &str, mounts: &[Mount]) -> Refused {
    // Every absolute path begins like a root directory.
    let others = mounts.iter().filter(|mount| !mount.is_root());
    let named = others.filter(|mount| is_named(line, &mount.path));
    let named: Vec<_> = named.collect();
    let is_outer = |outer: &Mount| {
        let below = format!("{}/", outer.path);
        named.iter().any(|inner| inner.path.starts_with(&below))
    };
    let inner = named.iter().copied().filter(|mount| !is_outer(mount));
    let (writable, locked): (Vec<&Mount>, Vec<&Mount>) = inner.partition(|mount| mount.writable);
    let volumes = locked.iter().map(|mount| mount.volume);
    match (locked.first(), writable.first()) {
        (Some(mount), _) if is_of_reading(line) => Refused::Disk(mount.volume),
        (Some(_), _) => Refused::Writes(volumes.collect()),
        (None, Some(mount)) => Refused::Disk(mount.volume),
        (None, None) => Refused::Unclear,
    }
}

/// Whether a line has this path, or one below it.
fn is_named(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        let behind = line[at + path.len()..].chars().next();
        behind.is_none_or(|sign| !sign.is_alphanumeric() && !"-_.".contains(sign))
    })
}

/// Whether a program says that it could not read.
fn is_of_reading(line: &str) -> bool {
    let parts = ["error reading", "read error", "cannot read", "for reading"];
    parts.iter().any(|part| line.contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_only_disk_is_no_fault_of_jobs() {
        let mount = |volume, path: &str, writable| Mount {
            volume: VolumeIndex(volume),
            path: path.to_owned(),
            writable,
            write_back: false,
        };
        let mut mounts = vec![mount(0, "/data", false), mount(1, "/data2", true)];
        let line = |what: &str| format!("{what}: {READ_ONLY}");
        let said = |what: &str| refused(&line(what), &mounts);
        let disk = |volume| Refused::Disk(VolumeIndex(volume));
        assert_eq!(said("cp: error reading '/data/x'"), disk(0));
        assert_eq!(said("sh: 1: cannot create /data2/x"), disk(1));
        assert_eq!(said("cp: cannot create regular file '/data2'"), disk(1));
        let wrote = Refused::Writes(vec![VolumeIndex(0)]);
        assert_eq!(said("touch: cannot touch '/data/x'"), wrote);
        assert_eq!(said("mv: cannot move '/data/x' to '/data2/x'"), wrote);
        assert_eq!(said("sh: 1: cannot create x"), Refused::Unclear);
        assert_eq!(said("sh: 1: cannot create /data-x/y"), Refused::Unclear);
        mounts.push(mount(2, "/data2/in", false));
        let below = refused(&line("touch: cannot touch '/data2/in/x'"), &mounts);
        assert_eq!(below, Refused::Writes(vec![VolumeIndex(2)]));
        mounts.push(mount(3, "/data/out", true));
        let above = refused(&line("touch: cannot touch '/data/out/x'"), &mounts);
        assert_eq!(above, disk(3));
    }
}
