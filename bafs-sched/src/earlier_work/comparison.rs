//! Which jobs must run because something of their own changed: they, their program, what they read
//! at home, or their results. What follows for others is in `propagation.rs`.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::hash::Digest;
use bafs_proto::ids::ExecutionId;
use bafs_proto::job_report::{
    ObservedInputs, directory_digest, source_digest, unreadable_directory_digest,
};
use bafs_proto::source::{SourceEntry, SourceIdentity, SourceKind};
use bafs_workflow::{JobIndex, Url, VolumeIndex, VolumeKind, Workflow};

use super::description::{ExtractIndex, describe_job_digest, written_volumes};
use super::propagation::{last_writers, producers_of};
use super::reason::RunReason;
use super::record::{JobRecord, NamedFiles, ProgramIdentity, SeenSource, SourceRecord};
use crate::space::Space;

/// What homes have now of all that records name.
#[derive(Debug, Clone, Default)]
pub struct HomeState {
    /// Sources of volumes.
    pub sources: BTreeMap<Url, SourceState>,
    /// Results.
    pub results: BTreeMap<Url, FoundResult>,
    /// Programs, of those jobs of which this machine has them.
    pub programs: BTreeMap<JobIndex, ProgramIdentity>,
    /// Other files of this machine that jobs name.
    pub files: BTreeMap<JobIndex, NamedFiles>,
}

/// What is at a source.
#[derive(Debug, Clone)]
pub enum SourceState {
    /// This.
    Listed(SourceListing),
    /// Nothing.
    Missing,
    /// Its home may not read it, and how it says so.
    Unreadable(String),
    /// It cannot be listed, and why.
    Unknown(String),
}

/// What is at the place of a result.
#[derive(Debug, Clone)]
pub enum FoundResult {
    /// A file.
    Present(SourceIdentity),
    /// None.
    Missing,
    /// A set, of which this file is not as it was sent.
    SetChanged(String),
    /// It cannot be looked at, and why.
    Unknown(String),
}

/// What a listing says of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListedPath<'l> {
    /// This is there.
    Entry(&'l SourceEntry),
    /// Nothing is there.
    Missing,
    /// It says nothing: a link is there, or on the way, or a directory that cannot be read.
    Unlisted,
}

/// All that is at a source and below.
#[derive(Debug, Clone, Default)]
pub struct SourceListing {
    entries: BTreeMap<String, SourceEntry>,
    digest: Option<Digest>,
}

impl SourceListing {
    /// The listing of these entries, whose paths are below the source.
    pub fn new(entries: Vec<SourceEntry>) -> Self {
        let digest = Some(source_digest(entries.iter()));
        let named = entries.into_iter().map(|entry| (entry.path.clone(), entry));
        Self {
            entries: named.collect(),
            digest,
        }
    }

    /// The digest of all.
    pub fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// What is at a path below the source; the source itself is the empty one.
    pub fn find_path(&self, path: &str) -> ListedPath<'_> {
        let ends = path.match_indices('/').map(|(end, _)| end);
        let above = ends.filter_map(|end| self.entries.get(&path[..end]));
        let top = self.entries.get("").filter(|_| !path.is_empty());
        let is_closed = |entry: &SourceEntry| {
            matches!(
                entry.kind,
                SourceKind::Symlink(_) | SourceKind::UnreadableDirectory
            )
        };
        let is_behind = above.chain(top).any(is_closed);
        match self.entries.get(path) {
            _ if is_behind => ListedPath::Unlisted,
            Some(entry) if matches!(entry.kind, SourceKind::Symlink(_)) => ListedPath::Unlisted,
            Some(entry) => ListedPath::Entry(entry),
            None => ListedPath::Missing,
        }
    }

    /// Whether the source is one file.
    pub fn is_file(&self) -> bool {
        let top = self.entries.get("");
        top.is_some_and(|entry| entry.kind == SourceKind::File)
    }

    /// A volume shows a file as a directory with that file, under its name. Nothing for other
    /// sources.
    fn as_volume_of_file(&self, name: &str) -> Option<Self> {
        let file = self.entries.get("");
        let file = file.filter(|entry| entry.kind == SourceKind::File)?;
        let entry = SourceEntry {
            path: name.to_owned(),
            ..file.clone()
        };
        let top = SourceEntry {
            path: String::new(),
            kind: SourceKind::Directory,
            ..file.clone()
        };
        let entries = [top, entry].map(|entry| (entry.path.clone(), entry));
        Some(Self {
            entries: BTreeMap::from(entries),
            digest: self.digest,
        })
    }

    /// What is directly in a directory.
    fn entries_in(&self, directory: &str) -> impl Iterator<Item = &SourceEntry> {
        let prefix = match directory.is_empty() {
            true => String::new(),
            false => format!("{directory}/"),
        };
        let below = self.entries.range(prefix.clone()..);
        let length = prefix.len();
        let below = below.take_while(move |(path, _)| path.starts_with(&prefix));
        below
            .filter(move |(path, _)| path.len() > length && !path[length..].contains('/'))
            .map(|(_, entry)| entry)
    }

    /// What a listing of a directory shows now.
    fn listing_of(&self, directory: &str) -> Digest {
        let entry = self.entries.get(directory);
        match entry.map(|entry| &entry.kind) {
            Some(SourceKind::UnreadableDirectory) => unreadable_directory_digest(),
            _ => directory_digest(self.entries_in(directory)),
        }
    }

    /// The first link that leads out of the source, of those that a job saw if that is known: what
    /// is behind it nobody compares.
    fn find_link_out(&self, seen: Option<&ObservedInputs>) -> Option<&str> {
        let links = self.entries.values().filter(|entry| leads_out(entry));
        let is_seen = |path: &str| {
            seen.is_none_or(|seen| seen.files.iter().any(|(looked_at, _)| looked_at == path))
        };
        let mut paths = links.map(|entry| entry.path.as_str());
        paths.find(|path| is_seen(path))
    }

    /// The first path at which it is not what a job saw.
    fn find_difference(&self, seen: &ObservedInputs) -> Option<String> {
        let is_directory = |path: &String| {
            let found = self.entries.get(path);
            found.is_some_and(|entry| {
                let kind = &entry.kind;
                matches!(
                    kind,
                    SourceKind::Directory | SourceKind::UnreadableDirectory
                )
            })
        };
        let is_same = |(path, identity): &&(String, SourceIdentity)| {
            let found = self
                .entries
                .get(path)
                .filter(|entry| matches!(entry.kind, SourceKind::File | SourceKind::Symlink(_)));
            found.is_some_and(|entry| is_same_file(identity, &entry.identity))
        };
        let is_listed_alike = |listed: &&(String, Digest)| self.listing_of(&listed.0) == listed.1;
        let files = seen.files.iter().find(|file| !is_same(file));
        let files = files.map(|(path, _)| path);
        let missing = || {
            seen.missing
                .iter()
                .find(|path| self.entries.contains_key(*path))
        };
        let directories = || seen.directories.iter().find(|path| !is_directory(path));
        let listed = || seen.listed.iter().find(|it| !is_listed_alike(it));
        let first = files.or_else(missing).or_else(directories);
        first.or_else(|| listed().map(|(path, _)| path)).cloned()
    }
}

/// Whether an entry is a link whose target is absolute, or above the source.
fn leads_out(entry: &SourceEntry) -> bool {
    let SourceKind::Symlink(target) = &entry.kind else {
        return false;
    };
    if target.starts_with(b"/") {
        return true;
    }
    let mut depth = entry.path.matches('/').count();
    for name in target.split(|byte| *byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." if depth == 0 => return true,
            b".." => depth -= 1,
            _ => depth += 1,
        }
    }
    false
}

/// Whether a file is the same. Some homes tell no time of the last change.
fn is_same_file(one: &SourceIdentity, other: &SourceIdentity) -> bool {
    let is_told = one.ctime_ns != 0 && other.ctime_ns != 0;
    (one.size, one.mtime_ns) == (other.size, other.mtime_ns)
        && (!is_told || one.ctime_ns == other.ctime_ns)
}

/// For each job why it must run, as far as that lies in itself; nothing for the others. `failed`
/// has the names of the jobs that failed in the last run.
pub fn find_changes(
    workflow: &Workflow,
    records: &BTreeMap<String, JobRecord>,
    failed: &BTreeSet<String>,
    home: &HomeState,
) -> Vec<Option<RunReason>> {
    let (producers, last_writers) = (producers_of(workflow), last_writers(workflow));
    let extracts = ExtractIndex::new(workflow);
    let jobs = workflow.jobs.iter().zip(0u32..);
    let reasons = jobs.map(|(job, index)| {
        if failed.contains(&job.name) {
            return Some(RunReason::Failed);
        }
        let Some(record) = records.get(&job.name) else {
            return Some(RunReason::NeverRan);
        };
        let change = JobComparison {
            workflow,
            records,
            home,
            last_writers: &last_writers,
            extracts: &extracts,
            job: JobIndex(index),
            record,
        };
        let producers = &producers[index as usize];
        change
            .own(producers)
            .or_else(|| change.producers(producers))
    });
    reasons.collect()
}

struct JobComparison<'c> {
    workflow: &'c Workflow,
    records: &'c BTreeMap<String, JobRecord>,
    home: &'c HomeState,
    /// By volume.
    last_writers: &'c [Option<JobIndex>],
    extracts: &'c ExtractIndex,
    job: JobIndex,
    record: &'c JobRecord,
}

impl JobComparison<'_> {
    fn own(&self, producers: &BTreeSet<JobIndex>) -> Option<RunReason> {
        let extracts_of = |volume| self.extracts.of(volume);
        let producers: Vec<JobIndex> = producers.iter().copied().collect();
        let description = describe_job_digest(self.workflow, self.job, &producers, extracts_of);
        if description != self.record.description {
            return Some(RunReason::DescriptionChanged);
        }
        if let Some(volume) = self.find_resized() {
            return Some(RunReason::SizeChanged { volume });
        }
        if let Some(program) = self.home.programs.get(&self.job)
            && !(self.record.program.as_ref()).is_some_and(|known| known.is_same(program))
        {
            let program = program.path.clone();
            return Some(RunReason::ProgramChanged { program });
        }
        if let Some(file) = self.changed_file() {
            return Some(RunReason::FileChanged { file });
        }
        let mut sources = self.record.sources.iter();
        sources
            .find_map(|source| self.compare_source(source))
            .or_else(|| self.compare_results())
    }

    /// A volume that it writes and whose declared size is another one. A size that is declared for
    /// the first time, as `bafs sizes` proposes, is none.
    fn find_resized(&self) -> Option<String> {
        let known = self.record.sizes.iter();
        let mut now = written_volumes(self.workflow, self.job).zip(known);
        let is_resized = |size: Space, known: Space| {
            let is_declared = size.bytes > 0 && known.bytes > 0;
            is_declared && size != known
        };
        let found = now.find(|((_, size), known)| is_resized(*size, **known));
        found.map(|((volume, _), _)| volume.name.clone())
    }

    /// A file of this machine that the job names, and that is not as it was. One that was not there
    /// the job may have made itself.
    fn changed_file(&self) -> Option<String> {
        let now = self.home.files.get(&self.job);
        let is_same = |known: &&ProgramIdentity| {
            let found = now.and_then(|it| it.0.iter().find(|file| file.path == known.path));
            found.is_some_and(|file| known.is_same(file))
        };
        let changed = self.record.files.0.iter().find(|known| !is_same(known));
        changed.map(|file| file.path.clone())
    }

    fn compare_source(&self, record: &SourceRecord) -> Option<RunReason> {
        let source = record.source.to_string();
        let unknown = |why: &str| {
            let (source, why) = (source.clone(), why.to_owned());
            Some(RunReason::InputUnknown { source, why })
        };
        let listing = match self.home.sources.get(&record.source) {
            Some(SourceState::Listed(listing)) => listing,
            Some(SourceState::Missing) => return Some(RunReason::InputChanged { path: source }),
            Some(SourceState::Unreadable(why) | SourceState::Unknown(why)) => return unknown(why),
            None => return unknown("nobody has looked at it"),
        };
        let seen = match &record.seen {
            SeenSource::Exactly(seen) => Some(&**seen),
            SeenSource::Whole(_) | SeenSource::Unknown => None,
        };
        let mounts = self.workflow.job(self.job).mounts.iter();
        let mut roots = mounts.filter(|mount| mount.is_root());
        // A link in the root of a job leads nowhere else.
        let is_root = roots.any(|mount| {
            let kind = &self.workflow.volume(mount.volume).kind;
            source_of(kind) == Some(&record.source)
        });
        if !is_root && let Some(link) = listing.find_link_out(seen) {
            return unknown(&format!("'{link}' is a link that leads out of it"));
        }
        match &record.seen {
            SeenSource::Exactly(seen) => {
                // The web has other names for files than volumes.
                let (_, path) = record.source.foreign_location().unwrap_or_default();
                let path = path.trim_end_matches('/');
                let name = path.rsplit('/').next().unwrap_or_default();
                let of_file = listing.as_volume_of_file(name);
                let below = of_file.as_ref().unwrap_or(listing).find_difference(seen)?;
                let path = match below.is_empty() || of_file.is_some() {
                    true => source,
                    false => format!("{}/{below}", source.trim_end_matches('/')),
                };
                Some(RunReason::InputChanged { path })
            }
            SeenSource::Whole(digest) if listing.digest() == Some(*digest) => None,
            SeenSource::Whole(_) => Some(RunReason::InputChanged { path: source }),
            SeenSource::Unknown => unknown("the run that read it did not note what it was"),
        }
    }

    /// The first result that is not at home as it was sent, of volumes that no job writes later:
    /// results are sent when the last writer is done.
    fn compare_results(&self) -> Option<RunReason> {
        let is_own = |volume: &VolumeIndex| self.last_writers[volume.as_usize()] == Some(self.job);
        let mounts = self.workflow.job(self.job).mounts.iter();
        let written: BTreeSet<VolumeIndex> =
            mounts.map(|mount| mount.volume).filter(is_own).collect();
        let mut extracts = written.iter().flat_map(|volume| self.extracts.of(*volume));
        extracts.find_map(|position| {
            let extract = &self.workflow.extracts[*position as usize];
            let target = extract.target.to_string();
            let mut sent = self.record.results.iter();
            let sent = sent.find(|result| result.target == extract.target);
            match (sent, self.home.results.get(&extract.target)) {
                (None, _) => Some(RunReason::ResultUnsent { target }),
                (_, Some(FoundResult::Missing)) => Some(RunReason::ResultMissing { target }),
                (Some(sent), Some(FoundResult::Present(found))) => {
                    let is_same = is_same_file(&sent.identity, found);
                    (!is_same).then_some(RunReason::ResultChanged { target })
                }
                (_, Some(FoundResult::SetChanged(file))) => {
                    let target = format!("{}/{file}", target.trim_end_matches('/'));
                    Some(RunReason::ResultChanged { target })
                }
                (_, Some(FoundResult::Unknown(why))) => {
                    let why = why.clone();
                    Some(RunReason::ResultUnknown { target, why })
                }
                (_, None) => {
                    let why = "nobody has looked at it".to_owned();
                    Some(RunReason::ResultUnknown { target, why })
                }
            }
        })
    }

    /// A job before it that has run since, or that was not before it then.
    fn producers(&self, producers: &BTreeSet<JobIndex>) -> Option<RunReason> {
        let used: BTreeMap<&str, ExecutionId> = self
            .record
            .producers
            .iter()
            .map(|(name, execution)| (name.as_str(), *execution))
            .collect();
        let names = producers.iter().map(|job| &self.workflow.job(*job).name);
        let names: BTreeSet<&str> = names.map(String::as_str).collect();
        if used.keys().copied().collect::<BTreeSet<_>>() != names {
            return Some(RunReason::DescriptionChanged);
        }
        let has_run = |name: &&str| {
            let record = self.records.get(*name);
            record.is_some_and(|record| used.get(name) != Some(&record.execution))
        };
        let producer = names.into_iter().find(has_run)?.to_owned();
        Some(RunReason::ProducerRan { producer })
    }
}

/// The source of a volume, if it has one.
pub fn source_of(kind: &VolumeKind) -> Option<&Url> {
    match kind {
        VolumeKind::Cache { source, .. } => Some(source),
        VolumeKind::Scratch { fill } => fill.as_ref(),
    }
}
