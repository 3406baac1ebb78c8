//! Traces of the jobs of a workflow: they run on this machine one after the other, in volumes that
//! are directories. Pipelines are the instances. No result goes home.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use bafs_client::sandbox::{Access, Sandbox, VolumeBind, job_environment};
use bafs_client::traced_command::{TracedCommand, TracedDirectory, TracedOutput, run_traced};
use bafs_profile::trace::Trace;
use bafs_workflow::{Job, JobIndex, Url, VolumeIndex, VolumeKind, Workflow};

use super::enter_sandbox;
use crate::args::ProfileArgs;
use crate::home_view::HomeView;
use crate::locked_directory::LockedDirectory;
use crate::output::print_notice;
use crate::workflow_file::load_workflow;

/// Runs all jobs, and adds their traces.
pub(super) fn trace_jobs(path: &Path, args: &ProfileArgs, traces: &mut Vec<Trace>) -> Result<()> {
    let homes = match &args.export {
        Some(export) => HomeView::Directory(export.clone()),
        None => HomeView::beside(path),
    };
    let workflow = load_workflow(path, &homes)?;
    let directory = LockedDirectory::create("profile", false)?;
    let volumes = VolumeDirectories::create(&workflow, &homes, directory.path())?;
    let sandbox = enter_sandbox()?;
    let pipelines = workflow.pipelines();
    for index in workflow.topological_order() {
        let job = workflow.job(index);
        let trace = trace_job(&sandbox, job, &volumes, &workflow)
            .with_context(|| format!("job {}", job.name))?;
        let exit_code = trace.exit_code;
        let first = JobIndex(pipelines[index.as_usize()]);
        traces.push(Trace {
            instance: workflow.job(first).name.clone(),
            stage: job.name.clone(),
            results: list_results(&workflow),
            ..trace
        });
        if exit_code != 0 {
            let name = &job.name;
            print_notice(&format!(
                "job {name} ended with code {exit_code}; later jobs do not run"
            ));
            break;
        }
    }
    Ok(())
}

/// Paths in traces that the workflow sends home.
fn list_results(workflow: &Workflow) -> Vec<String> {
    let files = workflow.extracts.iter().filter(|extract| !extract.is_set());
    let path = |extract: &bafs_workflow::Extract| {
        let volume = &workflow.volume(extract.volume).name;
        format!("{volume}/{}", extract.path)
    };
    files.map(path).collect()
}

/// The directory of each volume.
struct VolumeDirectories(BTreeMap<VolumeIndex, PathBuf>);

impl VolumeDirectories {
    fn create(workflow: &Workflow, homes: &HomeView, place: &Path) -> Result<Self> {
        let mut directories = BTreeMap::new();
        for (number, volume) in workflow.volumes.iter().enumerate() {
            let own = place.join(number.to_string());
            let directory = match &volume.kind {
                VolumeKind::Scratch { fill: None } => make_directory(own)?,
                VolumeKind::Scratch { fill: Some(source) } => {
                    let source = find_source(source, homes)?;
                    let own = make_directory(own)?;
                    copy_all(&source, &own)?;
                    own
                }
                VolumeKind::Cache { source, .. } => {
                    let source = find_source(source, homes)?;
                    match source.is_dir() {
                        true => source,
                        // The volume holds that one file.
                        false => {
                            let own = make_directory(own)?;
                            copy_all(&source, &own)?;
                            own
                        }
                    }
                }
            };
            directories.insert(VolumeIndex(number as u32), directory);
        }
        Ok(Self(directories))
    }
}

fn make_directory(path: PathBuf) -> Result<PathBuf> {
    fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
    Ok(path)
}

fn find_source(url: &Url, homes: &HomeView) -> Result<PathBuf> {
    let Some(path) = homes.local_path(url) else {
        bail!("{url} is not on this machine; profile a copy of it with --export");
    };
    path.canonicalize()
        .with_context(|| format!("{url} is {}", path.display()))
}

/// Copies a file, or the content of a directory, into a directory.
fn copy_all(source: &Path, target: &Path) -> Result<()> {
    let failed = || format!("cannot copy {}", source.display());
    if !source.is_dir() {
        let name = source.file_name().with_context(failed)?;
        fs::copy(source, target.join(name)).with_context(failed)?;
        return Ok(());
    }
    for entry in fs::read_dir(source).with_context(failed)? {
        let entry = entry.with_context(failed)?;
        let path = entry.path();
        match path.is_dir() {
            true => copy_all(&path, &make_directory(target.join(entry.file_name()))?)?,
            false => copy_all(&path, target)?,
        }
    }
    Ok(())
}

fn trace_job(
    sandbox: &Sandbox,
    job: &Job,
    volumes: &VolumeDirectories,
    workflow: &Workflow,
) -> Result<Trace> {
    let mounted = job.mounts.iter().map(|mount| TracedDirectory {
        source: volumes.0[&mount.volume].clone(),
        path: mount.path.clone().into(),
        shown: workflow.volume(mount.volume).name.clone(),
        access: match mount.writable {
            true => Access::ReadWrite,
            false => Access::ReadOnly,
        },
    });
    let directories: Vec<TracedDirectory> = mounted.collect();
    let binds: Vec<VolumeBind> = directories
        .iter()
        .map(|it| VolumeBind {
            name: it.shown.clone(),
            source: PathBuf::new(),
            path: it.path.clone(),
            access: it.access,
        })
        .collect();
    let mut environment = job_environment(std::env::vars_os(), &job.name, &binds);
    let own = &job.command.environment;
    environment.retain(|(name, _)| own.iter().all(|(other, _)| name != other.as_str()));
    environment.extend(own.iter().map(|(name, value)| (name.into(), value.into())));
    let output = |file: &Option<String>| match file {
        Some(path) => TracedOutput::File(path.into()),
        None => TracedOutput::StandardError,
    };
    let command = TracedCommand {
        program: OsString::from(&job.command.executable),
        arguments: job.command.arguments.iter().map(OsString::from).collect(),
        environment,
        directory: job.command.directory.clone().into(),
        directories,
        output: [output(&job.command.stdout), output(&job.command.stderr)],
    };
    Ok(run_traced(sandbox, &command)?)
}
