//! Whether jobs did what the workflow declares, by what their agents report: dependencies that are
//! not declared, reading before writing, mounts that nobody uses. It only warns.

use std::collections::BTreeSet;

use bafs_proto::job_report::VolumeUse;
use bafs_proto::message::JobReport;
use bafs_workflow::{JobIndex, VolumeIndex, VolumeKind};

use crate::policy::View;
use crate::state::observed_access::{ObservedAccess, has_written};

/// Jobs that are looked at to find out whether one is before another.
const SEARCH_MAX: usize = 10_000;

/// What a job did that is done and is not as the workflow declares it.
#[derive(Debug)]
pub(crate) struct UndeclaredAccess {
    pub(crate) kind: AccessKind,
    /// The job that did it, or read what another changed.
    pub(crate) job: JobIndex,
    pub(crate) volume: VolumeIndex,
    /// The whole in a sentence.
    pub(crate) text: String,
}

/// A kind of access of which the user is told once for each job and volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AccessKind {
    ReadBeforeWrite,
    Unordered,
    Unused,
}

pub(crate) fn has_read(used: &VolumeUse) -> bool {
    used.read_opens > 0 || used.read_bytes > 0
}

/// What a job did to a volume, at all of the paths where it mounts it.
pub(crate) fn used_in_all(report: &JobReport, name: &str) -> Option<VolumeUse> {
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

/// Finds what a job that is done did otherwise than it is declared.
pub(crate) fn find_undeclared(
    view: View<'_>,
    job: JobIndex,
    report: &JobReport,
) -> Vec<UndeclaredAccess> {
    let mut found = Vec::new();
    for (volume, _) in view.graph.mounted(job) {
        let name = &view.graph.workflow.volume(volume).name;
        let Some(used) = used_in_all(report, name) else {
            continue;
        };
        let is_unused = !has_read(&used) && !has_written(&used) && used.metadata_ops == 0;
        if is_unused && !used.has_no_counts {
            found.push(report_unused(view, job, volume));
        }
        if !view.graph.volume(volume).is_cache {
            found.extend(check_read(view, job, volume, &used));
            found.extend(check_write(view, job, volume, &used));
        }
    }
    found
}

fn check_read(
    view: View<'_>,
    job: JobIndex,
    volume: VolumeIndex,
    used: &VolumeUse,
) -> Vec<UndeclaredAccess> {
    // What it wrote itself it may read.
    if !has_read(used) || has_written(used) {
        return Vec::new();
    }
    let spec = view.graph.workflow.volume(volume);
    let is_filled = matches!(&spec.kind, VolumeKind::Scratch { fill: Some(_) });
    let file = &used.first_read_path;
    let writers = ObservedAccess::of_volume(&view.observed_access.wrote, volume);
    let others: Vec<JobIndex> = writers.map(|(job, _)| job).collect();
    if others.is_empty() && !is_filled {
        let (reader, name) = (&view.graph.workflow.job(job).name, &spec.name);
        let declared = view.graph.volume(volume).writers.iter().copied();
        let names = job_names(view, declared.filter(|writer| *writer != job));
        let text = format!(
            "job '{reader}' read {} of volume '{name}' before any job wrote there: {names} may \
             write it, but has not",
            describe_file(file)
        );
        let kind = AccessKind::ReadBeforeWrite;
        return vec![UndeclaredAccess {
            kind,
            job,
            volume,
            text,
        }];
    }
    // One that comes after this job has done so before when this one runs again.
    let is_unordered = |other: &JobIndex| {
        is_before(view, *other, job) == Some(false) && is_before(view, job, *other) == Some(false)
    };
    let unordered = others.into_iter().filter(is_unordered);
    let unordered = unordered.map(|other| report_unordered(view, job, file, other, volume));
    unordered.collect()
}

fn check_write(
    view: View<'_>,
    job: JobIndex,
    volume: VolumeIndex,
    used: &VolumeUse,
) -> Vec<UndeclaredAccess> {
    if !has_written(used) {
        return Vec::new();
    }
    let readers = ObservedAccess::of_volume(&view.observed_access.read, volume);
    let unordered = readers.filter(|(reader, _)| {
        is_before(view, *reader, job) == Some(false) && is_before(view, job, *reader) == Some(false)
    });
    let unordered =
        unordered.map(|(reader, file)| report_unordered(view, reader, file, job, volume));
    unordered.collect()
}

fn report_unordered(
    view: View<'_>,
    reader: JobIndex,
    file: &str,
    writer: JobIndex,
    volume: VolumeIndex,
) -> UndeclaredAccess {
    let name = |job: JobIndex| &view.graph.workflow.job(job).name;
    let (read, wrote) = (name(reader), name(writer));
    let changed = view.observed_access.wrote.get(&(volume, writer));
    let changed = changed.map_or_else(String::new, |file| in_brackets(file));
    let text = format!(
        "job '{read}' read volume '{}'{}, which job '{wrote}' changed{changed}, but the jobs have \
         no order, so the result depends on timing; write 'parent {wrote} child {read}' or give \
         each a volume of its own",
        view.graph.workflow.volume(volume).name,
        in_brackets(file)
    );
    UndeclaredAccess {
        kind: AccessKind::Unordered,
        job: reader,
        volume,
        text,
    }
}

fn report_unused(view: View<'_>, job: JobIndex, volume: VolumeIndex) -> UndeclaredAccess {
    let spec = view.graph.workflow.job(job);
    let path = spec.mounts.iter().find(|mount| mount.volume == volume);
    let path = path.map_or("", |mount| &mount.path);
    let (what, name) = (&spec.name, &view.graph.workflow.volume(volume).name);
    let text = format!(
        "job '{what}' did not use volume '{name}', mounted at {path}; if it never does, remove the \
         mount: the job can then start earlier and on more nodes"
    );
    UndeclaredAccess {
        kind: AccessKind::Unused,
        job,
        volume,
        text,
    }
}

/// Whether a job is before another by declaration; nothing when that takes too long to find.
fn is_before(view: View<'_>, earlier: JobIndex, later: JobIndex) -> Option<bool> {
    let mut seen = BTreeSet::new();
    let mut next = vec![later];
    while let Some(job) = next.pop() {
        if job == earlier {
            return Some(true);
        }
        let rank = view.graph.rank(earlier);
        let parents = view.graph.workflow.job(job).parents.iter().copied();
        for parent in parents.filter(|parent| view.graph.rank(*parent) >= rank) {
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

fn job_names(view: View<'_>, jobs: impl Iterator<Item = JobIndex>) -> String {
    const SHOWN: usize = 3;
    let names = jobs.map(|job| format!("'{}'", view.graph.workflow.job(job).name));
    let mut names: Vec<String> = names.take(SHOWN + 1).collect();
    let is_more = names.len() > SHOWN;
    names.truncate(SHOWN);
    match (names.is_empty(), is_more) {
        (true, _) => "no job".to_owned(),
        (false, true) => format!("{} and others", names.join(", ")),
        (false, false) => names.join(", "),
    }
}

fn in_brackets(path: &str) -> String {
    match path.is_empty() {
        true => String::new(),
        false => format!(" (file '{path}')"),
    }
}

fn describe_file(path: &str) -> String {
    match path.is_empty() {
        true => "files".to_owned(),
        false => format!("file '{path}'"),
    }
}
