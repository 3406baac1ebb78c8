//! Whether jobs did what the workflow declares, by what their agents report: dependencies that are
//! not declared, reading before writing, writing to what is read-only, mounts that nobody uses. It
//! warns and decides nothing.

use std::collections::BTreeSet;

use bafs_proto::ids::VolumeId;
use bafs_proto::job_report::VolumeUse;
use bafs_proto::message::JobReport;
use bafs_proto::path;
use bafs_proto::source_warning::SourceWarnings;
use bafs_workflow::{JobIndex, Mount, VolumeIndex, VolumeKind};

use crate::state::observed_access::{Deeds, RunWarning, has_written};
use crate::state::scheduler_state::State;

/// Warnings that are kept; more are counted.
const WARNINGS_MAX: usize = 100;

/// Jobs that are looked at to find out whether one is before another.
const SEARCH_MAX: usize = 10_000;

/// What a program says that was not allowed to write.
const READ_ONLY: &str = "Read-only file system";

fn has_read(used: &VolumeUse) -> bool {
    used.read_opens > 0 || used.read_bytes > 0
}

/// What a job did to a volume, at all of the paths where it mounts it.
fn used_in_all(report: &JobReport, name: &str) -> Option<VolumeUse> {
    let mut all = report.volumes.iter().filter(|used| used.name == name);
    let mut sum = all.next()?.clone();
    for used in all {
        sum.read_opens = sum.read_opens.saturating_add(used.read_opens);
        sum.read_bytes = sum.read_bytes.saturating_add(used.read_bytes);
        sum.changes = sum.changes.saturating_add(used.changes);
        sum.written_bytes = sum.written_bytes.saturating_add(used.written_bytes);
        sum.metadata_ops = sum.metadata_ops.saturating_add(used.metadata_ops);
        sum.has_no_counts |= used.has_no_counts;
        if sum.first_read_path.is_empty() {
            sum.first_read_path.clone_from(&used.first_read_path);
        }
        if sum.first_changed_path.is_empty() {
            sum.first_changed_path.clone_from(&used.first_changed_path);
        }
    }
    Some(sum)
}

impl State {
    /// What the user should know so far, in the order in which it was found.
    pub fn warnings(&self) -> &[RunWarning] {
        &self.deeds.warnings
    }

    /// Warnings that were not kept.
    pub fn warnings_omitted(&self) -> u64 {
        self.deeds.omitted
    }

    /// Looks at what a job did that is done.
    pub(crate) fn compare_with_declared(&mut self, job: JobIndex, report: &JobReport) {
        for (volume, _) in self.graph.mounted(job) {
            let name = &self.graph.workflow.volume(volume).name;
            let Some(used) = used_in_all(report, name) else {
                continue;
            };
            let is_unused = !has_read(&used) && !has_written(&used) && used.metadata_ops == 0;
            if is_unused && !used.has_no_counts {
                self.warn_unused(job, volume);
            }
            if !self.graph.volume(volume).is_cache {
                self.note_read(job, volume, &used);
                self.note_write(job, volume, &used);
            }
        }
        for (volume, _) in self.graph.mounted(job) {
            // This job is still one of them.
            if self.graph.volume(volume).users_left <= 1 {
                self.deeds.forget(volume);
            }
        }
    }

    fn note_read(&mut self, job: JobIndex, volume: VolumeIndex, used: &VolumeUse) {
        // What it wrote itself it may read.
        if !has_read(used) || has_written(used) {
            return;
        }
        let spec = self.graph.workflow.volume(volume);
        let is_filled = matches!(&spec.kind, VolumeKind::Scratch { fill: Some(_) });
        let file = &used.first_read_path;
        let writers = Deeds::of_volume(&self.deeds.wrote, volume);
        let others: Vec<JobIndex> = writers.map(|(job, _)| job).collect();
        // One that comes after this job has done so before when this one runs again.
        let is_unordered = |other: &JobIndex| {
            self.is_before(*other, job) == Some(false) && self.is_before(job, *other) == Some(false)
        };
        let unordered: Vec<JobIndex> = others.iter().copied().filter(is_unordered).collect();
        if others.is_empty() && !is_filled {
            let (reader, name) = (&self.graph.workflow.job(job).name, &spec.name);
            let declared = self.graph.volume(volume).writers.iter().copied();
            let names = self.job_names(declared.filter(|writer| *writer != job));
            let text = format!(
                "job '{reader}' read {} of volume '{name}' before any job wrote there: {names} may \
                 write it, but has not",
                file_name(file)
            );
            self.warn(0, job, volume, text);
        }
        for other in unordered {
            self.warn_unordered(job, file, other, volume);
        }
        self.deeds.read.insert((volume, job), file.clone());
    }

    fn note_write(&mut self, job: JobIndex, volume: VolumeIndex, used: &VolumeUse) {
        if !has_written(used) {
            return;
        }
        let readers = Deeds::of_volume(&self.deeds.read, volume);
        let readers = readers.map(|(reader, file)| (reader, file.clone()));
        for (reader, file) in readers.collect::<Vec<_>>() {
            let is_ordered = self.is_before(reader, job) != Some(false)
                || self.is_before(job, reader) != Some(false);
            if !is_ordered {
                self.warn_unordered(reader, &file, job, volume);
            }
        }
        let file = used.first_changed_path.clone();
        self.deeds.wrote.insert((volume, job), file);
    }

    fn warn_unordered(
        &mut self,
        reader: JobIndex,
        file: &str,
        writer: JobIndex,
        volume: VolumeIndex,
    ) {
        let name = |job: JobIndex| &self.graph.workflow.job(job).name;
        let (read, wrote) = (name(reader), name(writer));
        let changed = self.deeds.wrote.get(&(volume, writer));
        let changed = changed.map_or_else(String::new, |file| in_brackets(file));
        let text = format!(
            "job '{read}' read volume '{}'{}, which job '{wrote}' changed{changed}, but the jobs \
             have no order, so the result depends on timing; write 'parent {wrote} child {read}' \
             or give each a volume of its own",
            self.graph.workflow.volume(volume).name,
            in_brackets(file)
        );
        self.warn(1, reader, volume, text);
    }

    fn warn_unused(&mut self, job: JobIndex, volume: VolumeIndex) {
        let spec = self.graph.workflow.job(job);
        let path = spec.mounts.iter().find(|mount| mount.volume == volume);
        let path = path.map_or("", |mount| &mount.path);
        let (what, name) = (&spec.name, &self.graph.workflow.volume(volume).name);
        let text = format!(
            "job '{what}' did not use volume '{name}', mounted at {path}; if it never does, remove \
             the mount: the job can then start earlier and on more nodes"
        );
        self.warn(2, job, volume, text);
    }

    /// A job failed by its own fault: perhaps it tried to write where it must not.
    pub(crate) fn look_for_refused_writes(&mut self, job: JobIndex, report: &JobReport) {
        if !report.output_tail.contains(READ_ONLY) {
            return;
        }
        let mounted = self.graph.mounted(job);
        let locked: Vec<VolumeIndex> = mounted
            .into_iter()
            .filter_map(|(volume, writable)| (!writable).then_some(volume))
            .collect();
        let line = report
            .output_tail
            .lines()
            .find(|line| line.contains(READ_ONLY));
        let line: String = line.unwrap_or_default().chars().take(200).collect();
        let spec = self.graph.workflow.job(job).clone();
        let blamed = match refused(&line, &spec.mounts) {
            Refused::Disk(volume) => return self.warn_read_only_disk(job, volume, &line),
            Refused::Writes(named) => named,
            Refused::Unclear => locked,
        };
        for volume in blamed {
            let kind = match self.graph.volume(volume).is_cache {
                true => "a read-only cache",
                false => "mounted 'ro' by this job",
            };
            let text = format!(
                "job '{}' seems to write to volume '{}', which is {kind}; its output: {line}",
                spec.name,
                self.graph.workflow.volume(volume).name
            );
            self.warn(3, job, volume, text);
        }
    }

    fn warn_read_only_disk(&mut self, job: JobIndex, volume: VolumeIndex, line: &str) {
        let server = self.attempts.get(&job).map(|attempt| attempt.server);
        let node = server.map_or_else(String::new, |server| self.fleet.name(server));
        let text = format!(
            "the disk of volume '{}' of job '{}' seems to be read-only; see `dmesg` on its node, \
             probably '{node}'; the job's output: {line}",
            self.graph.workflow.volume(volume).name,
            self.graph.workflow.job(job).name,
        );
        self.warn(4, job, volume, text);
    }

    fn warn(&mut self, kind: u8, job: JobIndex, volume: VolumeIndex, text: String) {
        if self.deeds.known.insert((kind, job, volume)) {
            self.tell(RunWarning {
                job: Some(job),
                volume: Some(volume),
                node: None,
                text,
            });
        }
    }

    /// A volume does not have all as its source has it: the parts of a cache say the same.
    pub(crate) fn volume_warned(&mut self, id: VolumeId, warnings: &SourceWarnings) {
        let Some(volume) = self.volumes.get(id).map(|instance| instance.volume) else {
            return;
        };
        let name = self.graph.workflow.volume(volume).name.clone();
        for text in warnings.sentences(&name) {
            self.tell(RunWarning {
                job: None,
                volume: Some(volume),
                node: None,
                text,
            });
        }
    }

    /// Tells the user something, if it is not too much.
    pub(crate) fn tell(&mut self, mut warning: RunWarning) {
        // Agents tell of files by their names, which may be bytes.
        warning.text = path::printable(&warning.text).into_owned();
        if self.deeds.warnings.contains(&warning) {
            return;
        }
        if self.deeds.warnings.len() >= WARNINGS_MAX {
            self.deeds.omitted += 1;
        } else {
            self.deeds.warnings.push(warning);
        }
    }

    /// Whether a job is before another by declaration; nothing when that takes too long to find.
    fn is_before(&self, earlier: JobIndex, later: JobIndex) -> Option<bool> {
        let mut seen = BTreeSet::new();
        let mut next = vec![later];
        while let Some(job) = next.pop() {
            if job == earlier {
                return Some(true);
            }
            let rank = self.graph.rank(earlier);
            let parents = self.graph.workflow.job(job).parents.iter().copied();
            for parent in parents.filter(|parent| self.graph.rank(*parent) >= rank) {
                if seen.insert(parent) {
                    next.push(parent);
                }
            }
            if seen.len() > SEARCH_MAX {
                return None;
            }
        }
        Some(false)
    }

    fn job_names(&self, jobs: impl Iterator<Item = JobIndex>) -> String {
        const SHOWN: usize = 3;
        let names = jobs.map(|job| format!("'{}'", self.graph.workflow.job(job).name));
        let mut names: Vec<String> = names.take(SHOWN + 1).collect();
        let is_more = names.len() > SHOWN;
        names.truncate(SHOWN);
        match (names.is_empty(), is_more) {
            (true, _) => "no job".to_owned(),
            (false, true) => format!("{} and others", names.join(", ")),
            (false, false) => names.join(", "),
        }
    }
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
    let named = mounts.iter().filter(|mount| is_named(line, &mount.path));
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

fn in_brackets(path: &str) -> String {
    match path.is_empty() {
        true => String::new(),
        false => format!(" (file '{path}')"),
    }
}

fn file_name(path: &str) -> String {
    match path.is_empty() {
        true => "files".to_owned(),
        false => format!("file '{path}'"),
    }
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
