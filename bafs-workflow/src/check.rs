//! Declarations to a workflow: resolves names and refuses what does not fit together. Where each
//! kind of job or volume ends up is not its business, nor whether a cluster is large enough.

mod brought_volumes;

use std::collections::BTreeMap;

use bafs_proto::volume::LimitKind;

use super::access::{JobAccess, check_access};
use super::ast::{
    Access, Declarations, ExtractDeclaration, JobDeclaration, MountDeclaration, ParentDeclaration,
    RetryDeclaration, SharedDirectoryDeclaration, VolumeDeclaration, Word,
};
use super::bounds::{check_cache_files, check_mount_count};
use super::command::{CommandPaths, check_command_words, complete_command};
use super::diagnostic::{Diagnostics, SourceLocation};
use super::job_order::find_cycles;
use super::limits::{
    BYTES_PER_FILE_DEFAULT, CACHE_FILES_MAX, CYCLE_JOBS_SHOWN_MAX, EDGES_MAX, FILES_DEFAULT_MIN,
};
use super::model::{
    Extract, Job, JobIndex, JobLimits, Mount, ProgramSpec, Volume, VolumeIndex, VolumeKind,
    Workflow,
};
use super::names::NameTable;
use super::overlaps::{LocatedTarget, check_overlaps};
use super::path::{self, PathError};
use super::script::{JobScript, check_program, complete_script, hidden_interpreters};
use super::targets::{TargetPlace, check_nested_targets, check_target, read_selections};
use super::url::Url;

/// Makes the workflow, and names interpreters of scripts that a shell starts. It is valid only if
/// `diagnostics` has no error afterwards.
///
/// Every stage goes on after an error. Only what would then report echoes of earlier errors (an
/// order that lacks an edge, a volume that lacks its writer) waits until the names are right.
pub(super) fn check_workflow(
    name: String,
    declarations: Declarations,
    diagnostics: &mut Diagnostics,
) -> (Workflow, Vec<(JobIndex, String)>) {
    let complete = !declarations.is_partial;
    let mut checker = WorkflowChecker {
        workflow: Workflow {
            name,
            jobs: vec![],
            volumes: vec![],
            extracts: vec![],
        },
        jobs: NameTable::new("job"),
        volumes: NameTable::new("volume"),
        notes: vec![],
        is_complete: complete,
        is_partial: declarations.is_partial,
        diagnostics,
    };
    let Declarations {
        jobs,
        volumes,
        parents,
        mounts,
        extracts,
        retries,
        shares,
        roots,
        programs,
        ..
    } = declarations;
    checker.declare_jobs(jobs);
    checker.declare_volumes(volumes);
    checker.set_retries(&retries);
    checker.share_directories(shares);
    let edges = checker.connect_jobs(&parents);
    checker.mount_roots(&roots);
    checker.bring_programs(programs);
    checker.mount_volumes(mounts);
    checker.check_mounts();
    checker.complete_commands();
    checker.check_order(&edges);
    checker.declare_extracts(extracts);
    checker.check_presence();
    let scripts = checker.notes.iter().map(|notes| notes.script.as_ref());
    let interpreters = hidden_interpreters(scripts);
    let mut workflow = checker.workflow;
    for job in &mut workflow.jobs {
        job.mounts.sort_by(|a, b| a.path.cmp(&b.path));
    }
    (workflow, interpreters)
}

/// An edge of the graph and where it is declared.
struct DeclaredEdge {
    parent: JobIndex,
    child: JobIndex,
    location: SourceLocation,
}

/// What is known of a job and not part of the workflow.
struct JobNotes {
    paths: CommandPaths,
    script: Option<JobScript>,
    /// Where its name is declared.
    location: SourceLocation,
    /// Where the retries are given, if they are.
    retries_location: Option<SourceLocation>,
    /// Where each mount is declared, as long as the mounts are in the order of declaration.
    mount_locations: Vec<SourceLocation>,
}

struct WorkflowChecker<'d> {
    workflow: Workflow,
    jobs: NameTable,
    volumes: NameTable,
    /// One for each job.
    notes: Vec<JobNotes>,
    /// Whether every declaration is in the workflow.
    is_complete: bool,
    /// Whether a name may be unknown because of an error that was reported.
    is_partial: bool,
    diagnostics: &'d mut Diagnostics,
}

impl WorkflowChecker<'_> {
    fn declare_jobs(&mut self, declarations: Vec<JobDeclaration>) {
        for declaration in declarations {
            check_program(&declaration, self.diagnostics);
            let JobDeclaration { name, settings, .. } = declaration;
            if !self.jobs.declare(&name, self.diagnostics) {
                self.is_complete = false;
                continue;
            }
            self.notes.push(JobNotes {
                paths: CommandPaths {
                    directory: settings.directory,
                    stdout: settings.stdout,
                    stderr: settings.stderr,
                    required: settings.required_files,
                    produced: settings.produced_files,
                },
                script: settings.script.map(|text| JobScript {
                    text,
                    interpreter: settings.interpreter.unwrap_or_default(),
                }),
                location: name.location,
                retries_location: settings.retries.map(|(_, place)| place),
                mount_locations: vec![],
            });
            self.workflow.jobs.push(Job {
                name: name.text,
                command: ProgramSpec {
                    executable: settings
                        .executable
                        .map_or_else(String::new, |word| word.text),
                    arguments: settings.arguments,
                    environment: settings.environment,
                    directory: String::new(),
                    stdout: None,
                    stderr: None,
                    required_files: vec![],
                    produced_files: vec![],
                    shared_directories: settings.shared_directories,
                },
                cpus: settings.cpus.unwrap_or(1),
                memory_bytes: settings.memory_bytes.first().copied().unwrap_or(0),
                limits: JobLimits {
                    more_memory_bytes: settings.memory_bytes.into_iter().skip(1).collect(),
                    temporary_bytes: settings.temporary_bytes,
                    runtime_s: settings.runtime_s_max,
                },
                runtime_s: settings.runtime_s,
                retries: settings.retries.map_or(0, |(retries, _)| retries),
                priority: settings.priority.unwrap_or(0),
                mounts: vec![],
                parents: vec![],
                children: vec![],
            });
        }
    }

    fn declare_volumes(&mut self, declarations: Vec<VolumeDeclaration>) {
        for VolumeDeclaration {
            name,
            kind,
            size_bytes,
            size_location: size_place,
            size_files,
            limit,
        } in declarations
        {
            if !self.volumes.declare(&name, self.diagnostics) {
                self.is_complete = false;
                continue;
            }
            if size_bytes == Some(0) {
                let message = format!("volume '{}' has no space", name.text);
                let hint = "a size counts everything that is in the volume at one time";
                self.diagnostics.error_hint(size_place, message, hint);
            }
            let is_known_scratch =
                size_bytes.is_some() && matches!(kind, VolumeKind::Scratch { .. });
            let size_bytes = size_bytes.unwrap_or(0);
            let files_most = match kind {
                VolumeKind::Cache { .. } => CACHE_FILES_MAX,
                VolumeKind::Scratch { .. } => u64::MAX,
            };
            let size_files = size_files.unwrap_or_else(|| {
                let files = (size_bytes / BYTES_PER_FILE_DEFAULT).max(FILES_DEFAULT_MIN);
                files.min(files_most)
            });
            // What a volume of an unknown size held past its limit would be measured too.
            let limit = limit.unwrap_or_else(|| match is_known_scratch {
                true => LimitKind::for_size(size_bytes, size_files),
                false => LimitKind::Exact,
            });
            let (size_bytes, size_files) = limit.reservation(size_bytes, size_files);
            let users = vec![];
            self.workflow.volumes.push(Volume {
                name: name.text,
                kind,
                size_bytes,
                size_files,
                limit,
                users,
            });
        }
    }

    fn set_retries(&mut self, declarations: &[RetryDeclaration]) {
        for RetryDeclaration { job, retries } in declarations {
            let Some(index) = self.find_job(job) else {
                continue;
            };
            if let Some(before) = self.notes[index.as_usize()].retries_location {
                let before = self.diagnostics.describe_location(before);
                let message = format!(
                    "retries of job '{}' are given twice, first in {before}",
                    job.text
                );
                self.diagnostics.error(job.location, message);
            }
            self.notes[index.as_usize()].retries_location = Some(job.location);
            self.workflow.jobs[index.as_usize()].retries = *retries;
        }
    }

    fn share_directories(&mut self, declarations: Vec<SharedDirectoryDeclaration>) {
        for SharedDirectoryDeclaration { path, jobs } in declarations {
            for job in &jobs {
                let Some(index) = self.find_job(job) else {
                    continue;
                };
                let shared = &mut self.workflow.jobs[index.as_usize()]
                    .command
                    .shared_directories;
                if !shared.contains(&path) {
                    shared.push(path.clone());
                    shared.sort();
                }
            }
        }
    }

    fn connect_jobs(&mut self, declarations: &[ParentDeclaration]) -> Vec<DeclaredEdge> {
        let mut edges = Vec::new();
        for ParentDeclaration { parents, children } in declarations {
            if edges.len() as u64 + parents.len() as u64 * children.len() as u64 > EDGES_MAX {
                let message = format!("more than {EDGES_MAX} pairs of parent and child");
                let hint = "put a job in between: all parents before it, all children after it";
                self.diagnostics
                    .error_hint(parents[0].location, message, hint);
                self.is_complete = false;
                break;
            }
            let parents: Vec<JobIndex> = parents
                .iter()
                .filter_map(|word| self.find_job(word))
                .collect();
            for word in children {
                let Some(child) = self.find_job(word) else {
                    continue;
                };
                let place = word.location;
                edges.extend(parents.iter().map(|&parent| DeclaredEdge {
                    parent,
                    child,
                    location: place,
                }));
            }
        }
        // Sorted edges give sorted lists of neighbours, whatever the order of the text.
        edges.sort_by_key(|edge| (edge.parent, edge.child, edge.location));
        edges.dedup_by_key(|edge| (edge.parent, edge.child));
        for &DeclaredEdge { parent, child, .. } in &edges {
            self.workflow.jobs[parent.as_usize()].children.push(child);
            self.workflow.jobs[child.as_usize()].parents.push(parent);
        }
        edges
    }

    fn add_mount(&mut self, job: JobIndex, mount: Mount, location: SourceLocation) {
        let volume = &mut self.workflow.volumes[mount.volume.as_usize()];
        volume.users.push(job);
        self.workflow.jobs[job.as_usize()].mounts.push(mount);
        self.notes[job.as_usize()].mount_locations.push(location);
    }

    fn mount_volumes(&mut self, declarations: Vec<MountDeclaration>) {
        for MountDeclaration {
            volume,
            job,
            path,
            access,
        } in declarations
        {
            let (volume_index, job_index) = (self.find_volume(&volume), self.find_job(&job));
            let mount_path = path::parse_mount_point(&path.text).unwrap_or_else(|error| {
                let hint = match error {
                    PathError::NotAbsolute => format!("write '/{}'", path.text),
                    _ => "a mount path is absolute and names a directory, such as /data".to_owned(),
                };
                let message = format!("the mount path '{}' {}", path.text, error.description());
                self.diagnostics.error_hint(path.location, message, hint);
                String::new()
            });
            let (Some(volume_index), Some(job_index)) = (volume_index, job_index) else {
                continue;
            };
            let kind = &self.workflow.volume(volume_index).kind;
            let is_cache = matches!(kind, VolumeKind::Cache { .. });
            if let Some((Access::ReadWrite | Access::WriteBack, rw_place)) = access
                && is_cache
            {
                let message = format!("volume '{}' is a cache and cannot be written", volume.text);
                let hint = "mount it 'ro', or declare a scratch volume with 'from'";
                self.diagnostics.error_hint(rw_place, message, hint);
            }
            let access = access.map_or(Access::ReadWrite, |(access, _)| access);
            let mount = Mount {
                volume: volume_index,
                path: mount_path,
                writable: !is_cache && access != Access::ReadOnly,
                write_back: !is_cache && access == Access::WriteBack,
            };
            self.add_mount(job_index, mount, path.location);
        }
        for volume in &mut self.workflow.volumes {
            volume.users.sort_unstable();
            volume.users.dedup();
        }
    }

    /// Refuses mounts of one job that cover each other.
    fn check_mounts(&mut self) {
        let volumes = &self.workflow.volumes;
        for (volume, place) in volumes.iter().zip(self.volumes.locations()) {
            check_cache_files(volume, *place, self.diagnostics);
        }
        for (job, notes) in self.workflow.jobs.iter().zip(&self.notes) {
            check_mount_count(job, &notes.mount_locations, volumes, self.diagnostics);
            let mut mounts: Vec<(&Mount, SourceLocation)> = job
                .mounts
                .iter()
                .zip(notes.mount_locations.iter().copied())
                .collect();
            mounts.retain(|(mount, _)| !mount.path.is_empty() && !mount.is_root());
            // By components, so that a directory stands right before what is inside it.
            mounts.sort_by(|(a, at), (b, other)| {
                a.path.split('/').cmp(b.path.split('/')).then(at.cmp(other))
            });
            for pair in mounts.windows(2) {
                let [(outer, outer_place), (inner, inner_place)] = [pair[0], pair[1]];
                if !path::is_inside(&inner.path, &outer.path) {
                    continue;
                }
                let (first, second) = (outer_place.min(inner_place), outer_place.max(inner_place));
                let before = self.diagnostics.describe_location(first);
                let names = [inner, outer].map(|mount| &volumes[mount.volume.as_usize()].name);
                let message = if inner.path == outer.path {
                    format!("job '{}' mounts two volumes at '{}'", job.name, inner.path)
                } else {
                    let (inside, outside) = (&inner.path, &outer.path);
                    format!("job '{}' mounts '{inside}' inside '{outside}'", job.name)
                };
                let hint = format!(
                    "give '{}' and '{}' separate paths (see {before})",
                    names[0], names[1]
                );
                self.diagnostics.error_hint(second, message, hint);
            }
        }
    }

    /// What is missing. Asked last and only without errors, as it may be missing because of one.
    fn check_presence(&mut self) {
        if self.diagnostics.has_errors() {
            return;
        }
        if self.workflow.jobs.is_empty() {
            let hint = "declare one with 'job NAME FILE'";
            self.diagnostics
                .error_hint(SourceLocation::START, "this workflow has no jobs", hint);
        }
        for (volume, &place) in self.workflow.volumes.iter().zip(self.volumes.locations()) {
            if volume.users.is_empty() {
                let message = format!("volume '{}' is never mounted", volume.name);
                let hint = format!(
                    "mount it with 'mount {} JOB PATH', or remove it",
                    volume.name
                );
                self.diagnostics.warn(place, message, hint);
            }
        }
    }

    /// Completes each job's paths, now that its mounts are known.
    fn complete_commands(&mut self) {
        for (job, notes) in self.workflow.jobs.iter_mut().zip(&self.notes) {
            let volumes = &self.workflow.volumes;
            complete_command(
                job,
                &notes.paths,
                volumes,
                self.is_complete,
                self.diagnostics,
            );
            let script = notes.script.as_ref();
            if script.is_none_or(|script| complete_script(job, script, self.diagnostics)) {
                check_command_words(&job.name, &job.command, notes.location, self.diagnostics);
            }
        }
    }

    fn check_order(&mut self, edges: &[DeclaredEdge]) {
        let found = find_cycles(&self.workflow.jobs);
        for cycle in &found {
            let (last, first) = (cycle[cycle.len() - 1], cycle[0]);
            let closing = edges.binary_search_by_key(&(last, first), |e| (e.parent, e.child));
            let place = closing.map_or(SourceLocation::START, |place| edges[place].location);
            let name = |job: &JobIndex| self.workflow.job(*job).name.as_str();
            let mut names: Vec<&str> = cycle.iter().take(CYCLE_JOBS_SHOWN_MAX).map(name).collect();
            let hidden = format!(
                "({} more)",
                cycle.len().saturating_sub(CYCLE_JOBS_SHOWN_MAX)
            );
            if cycle.len() > CYCLE_JOBS_SHOWN_MAX {
                names.push(&hidden);
            }
            names.push(name(&first));
            let message = format!("jobs wait for each other: {}", names.join(" -> "));
            let hint = "remove one of these 'parent' relations";
            self.diagnostics.error_hint(place, message, hint);
        }
        if found.is_empty() && self.is_complete {
            let uses = self.volume_uses();
            check_access(&self.workflow, uses, self.diagnostics);
        }
    }

    /// Who uses each volume, with several mounts by one job taken together.
    fn volume_uses(&self) -> Vec<Vec<JobAccess>> {
        let mut uses: Vec<Vec<JobAccess>> = self.workflow.volumes.iter().map(|_| vec![]).collect();
        for (position, (job, notes)) in self.workflow.jobs.iter().zip(&self.notes).enumerate() {
            let job_index = JobIndex(position as u32);
            for (mount, &place) in job.mounts.iter().zip(&notes.mount_locations) {
                let uses = &mut uses[mount.volume.as_usize()];
                match uses.last_mut().filter(|last| last.job == job_index) {
                    Some(last) => last.writable |= mount.writable,
                    None => uses.push(JobAccess {
                        job: job_index,
                        writable: mount.writable,
                        location: place,
                    }),
                }
            }
        }
        uses
    }

    fn declare_extracts(&mut self, declarations: Vec<ExtractDeclaration>) {
        let mut targets: BTreeMap<Url, TargetPlace> = BTreeMap::new();
        let mut sources: BTreeMap<Url, LocatedTarget> = BTreeMap::new();
        for declaration in declarations {
            let (path, selections) = read_selections(&declaration, self.diagnostics);
            let ExtractDeclaration {
                volume,
                target,
                target_location: target_place,
                is_directory,
                ..
            } = declaration;
            let place = TargetPlace {
                location: target_place,
                is_directory,
            };
            check_target(&target, place, &mut targets, self.diagnostics);
            let Some(index) = self.find_volume(&volume) else {
                continue;
            };
            sources
                .entry(target.clone())
                .or_insert((index, target_place));
            let declared = self.workflow.volume(index);
            let is_written = |job: &JobIndex| {
                let mounts = &self.workflow.job(*job).mounts;
                mounts
                    .iter()
                    .any(|mount| mount.volume == index && mount.writable)
            };
            if matches!(declared.kind, VolumeKind::Cache { .. }) {
                let message = format!("volume '{}' is a cache: nothing new is in it", volume.text);
                let hint = "extract from the scratch volume that a job writes to";
                self.diagnostics.error_hint(volume.location, message, hint);
            } else if self.is_complete && !declared.users.iter().any(is_written) {
                let message = format!("no job writes to volume '{}'", volume.text);
                let hint = format!("mount it 'rw' in the job that makes '{path}'");
                self.diagnostics.error_hint(volume.location, message, hint);
            }
            self.workflow.extracts.push(Extract {
                volume: index,
                path,
                selections,
                target,
            });
        }
        check_nested_targets(&targets, self.diagnostics);
        let places = self.volumes.locations();
        check_overlaps(&self.workflow, &sources, places, self.diagnostics);
    }

    fn find_job(&mut self, word: &Word) -> Option<JobIndex> {
        let index = self.jobs.find(word, self.is_partial, self.diagnostics);
        self.is_complete &= index.is_some();
        index.map(JobIndex)
    }

    fn find_volume(&mut self, word: &Word) -> Option<VolumeIndex> {
        let index = self.volumes.find(word, self.is_partial, self.diagnostics);
        self.is_complete &= index.is_some();
        index.map(VolumeIndex)
    }
}
