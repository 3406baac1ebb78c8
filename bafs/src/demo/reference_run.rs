//! The reference: the workflow's commands on plain directories, without any part of BAFS.
//!
//! Each volume is a directory, and each path of a job's name space is replaced by the directory
//! of the volume that would be mounted there.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use bafs_workflow::{Job, Url, VolumeKind, Workflow};
use tokio::process::Command;

/// Runs a whole workflow below `work`, reading `bafs://home/` from `home`, and returns where each
/// extracted file is, by its path at home.
pub(crate) async fn run_reference(
    workflow: &Workflow,
    home: &Path,
    work: &Path,
) -> Result<BTreeMap<String, PathBuf>> {
    let mut directories = Vec::with_capacity(workflow.volumes.len());
    for volume in &workflow.volumes {
        directories.push(match &volume.kind {
            VolumeKind::Cache { source, .. } => home.join(export_path(source)),
            VolumeKind::Scratch { fill } => {
                let directory = work.join(&volume.name);
                fs::create_dir_all(&directory)?;
                if let Some(source) = fill {
                    copy_into(&home.join(export_path(source)), &directory)?;
                }
                directory
            }
        });
    }
    for index in workflow.topological_order() {
        run_job(workflow.job(index), &directories).await?;
    }
    let file = |volume: usize, path: &str| directories[volume].join(path);
    Ok(workflow
        .extracts
        .iter()
        .map(|e| {
            (
                export_path(&e.target).to_owned(),
                file(e.volume.as_usize(), &e.path),
            )
        })
        .collect())
}

/// Path of a URL below the export.
pub(crate) fn export_path(url: &Url) -> &str {
    url.path.trim_start_matches('/')
}

fn copy_into(source: &Path, directory: &Path) -> Result<()> {
    let name = source.file_name().context("a source has a name")?;
    if !source.is_file() {
        bail!(
            "{}: only single files are copied for the comparison",
            source.display()
        );
    }
    fs::copy(source, directory.join(name))?;
    Ok(())
}

async fn run_job(job: &Job, directories: &[PathBuf]) -> Result<()> {
    let mounts: Vec<(&str, &Path)> = job
        .mounts
        .iter()
        .map(|m| (m.path.as_str(), directories[m.volume.as_usize()].as_path()))
        .collect();
    let output = Command::new(&job.command.executable)
        .args(
            job.command
                .arguments
                .iter()
                .map(|argument| replace_mount_paths(argument, &mounts)),
        )
        .envs(
            job.command
                .environment
                .iter()
                .map(|(k, v)| (k, replace_mount_paths(v, &mounts))),
        )
        .kill_on_drop(true)
        .output()
        .await
        .with_context(|| format!("cannot run {}", job.command.executable))?;
    if !output.status.success() {
        bail!(
            "{} fails on a plain directory, too ({}): {}",
            job.name,
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}

/// Replaces each mount path that stands alone or begins a longer path.
fn replace_mount_paths(text: &str, mounts: &[(&str, &Path)]) -> String {
    let mut out = String::new();
    let mut rest = text;
    let mut previous = ' ';
    while let Some(first) = rest.chars().next() {
        let begins = !(previous.is_alphanumeric() || "/._-".contains(previous));
        let hit = mounts.iter().find(|(path, _)| {
            begins
                && rest.strip_prefix(path).is_some_and(|after| {
                    after
                        .chars()
                        .next()
                        .is_none_or(|c| c == '/' || !(c.is_alphanumeric()))
                })
        });
        if let Some((path, directory)) = hit {
            out.push_str(&directory.to_string_lossy());
            rest = &rest[path.len()..];
            previous = 'x';
        } else {
            out.push(first);
            rest = &rest[first.len_utf8()..];
            previous = first;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_mount_paths_are_relocated() {
        let mounts = [
            ("/in", Path::new("/p/in1")),
            ("/scratch", Path::new("/p/w")),
        ];
        let moved = replace_mount_paths(
            "/bin/sh /in/q /scratch /scratched 'x'/in/q </scratch/a>/scratch/b",
            &mounts,
        );
        assert_eq!(
            moved,
            "/bin/sh /p/in1/q /p/w /scratched 'x'/p/in1/q </p/w/a>/p/w/b"
        );
    }
}
